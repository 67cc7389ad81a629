//! A client for calls, made when it is first needed, and anew when it has failed for good.
//!
//! Subscriptions have [`crate::lines`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime;

use crate::client::{Client, ConnectError, Failure, Group, GroupSettings, Read, Reading};

/// A client of a cluster stays with the node that it has chosen, dead or not. After so many outages in a row it may choose again.
pub(crate) const OUTAGES: u32 = 3;

/// How a client is made.
pub(crate) type Connect = dyn Fn() -> Result<Arc<dyn Client>, ConnectError> + Send + Sync;

/// A client for each runtime, since it lives on the one where it was made.
pub(crate) struct Connection {
    connect: Arc<Connect>,
    clients: Mutex<HashMap<runtime::Id, Made>>,
}

struct Made {
    client: Arc<dyn Client>,
    /// Outages in a row.
    outages: u32,
}

impl Connection {
    pub(crate) fn new(connect: Arc<Connect>) -> Self {
        Self { connect, clients: Mutex::default() }
    }

    /// The client of this runtime.
    pub(crate) fn client(&self) -> Result<Arc<dyn Client>, ConnectError> {
        let id = runtime::Handle::try_current().map_err(|_| ConnectError::NoRuntime)?.id();
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = clients.get(&id) {
            return Ok(Arc::clone(&made.client));
        }
        let client = (self.connect)()?;
        clients.insert(id, Made { client: Arc::clone(&client), outages: 0 });
        Ok(client)
    }

    fn of_now(&self) -> Result<Arc<dyn Client>, Failure> {
        self.client().map_err(|error| Failure::Other(error.to_string()))
    }

    /// Lets go of a client that will not work again.
    fn judged<T>(&self, client: &Arc<dyn Client>, answer: Result<T, Failure>) -> Result<T, Failure> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.retain(|_, made| {
            if !Arc::ptr_eq(&made.client, client) {
                return true;
            }
            made.outages = if matches!(answer, Err(Failure::Unavailable(_))) { made.outages + 1 } else { 0 };
            made.outages < OUTAGES && !matches!(answer, Err(Failure::Dead(_)))
        });
        drop(clients);
        answer
    }
}

/// The calls of a [`Client`].
impl Connection {
    pub(crate) async fn read(&self, read: &Read) -> Result<Box<dyn Reading>, Failure> {
        let client = self.of_now()?;
        self.judged(&client, client.read(read).await)
    }

    pub(crate) async fn create_group(&self, group: &Group, settings: &GroupSettings) -> Result<(), Failure> {
        let client = self.of_now()?;
        self.judged(&client, client.create_group(group, settings).await)
    }

    pub(crate) async fn group_settings(&self, group: &Group) -> Result<GroupSettings, Failure> {
        let client = self.of_now()?;
        self.judged(&client, client.group_settings(group).await)
    }

    pub(crate) async fn group_checkpoint(&self, group: &Group) -> Result<Option<u64>, Failure> {
        let client = self.of_now()?;
        self.judged(&client, client.group_checkpoint(group).await)
    }

    pub(crate) async fn delete_group(&self, group: &Group) -> Result<(), Failure> {
        let client = self.of_now()?;
        self.judged(&client, client.delete_group(group).await)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::fake::FakeClient;

    fn group() -> Group {
        Group { stream: "s".to_owned(), name: "g".to_owned() }
    }

    /// A connection to servers that answer with this, and how many clients were made.
    fn connection(answer: fn() -> Result<(), Failure>) -> (Connection, Arc<AtomicU32>) {
        let made = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&made);
        let connect = move || {
            count.fetch_add(1, Ordering::Relaxed);
            let client: Arc<dyn Client> = Arc::new(FakeClient { deleting: Some(answer), ..FakeClient::default() });
            Ok(client)
        };
        (Connection::new(Arc::new(connect)), made)
    }

    async fn clients_after(calls: u32, answer: fn() -> Result<(), Failure>) -> u32 {
        let (connection, made) = connection(answer);
        for _ in 0..calls {
            assert_eq!(connection.delete_group(&group()).await, answer());
        }
        made.load(Ordering::Relaxed)
    }

    #[tokio::test]
    async fn a_client_is_made_once_and_anew_when_it_is_dead_or_there_was_outage_after_outage() {
        assert_eq!(clients_after(7, || Ok(())).await, 1);
        assert_eq!(clients_after(7, || Err(Failure::Denied)).await, 1);
        assert_eq!(clients_after(7, || Err(Failure::Dead(String::new()))).await, 7);
        assert_eq!(clients_after(7, || Err(Failure::Unavailable(String::new()))).await, 3);
    }

    #[test]
    fn every_runtime_has_a_client_of_its_own() {
        let (connection, made) = connection(|| Ok(()));
        let runtime = || tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let (one, other) = (runtime(), runtime());
        for runtime in [&one, &other, &one] {
            assert_eq!(runtime.block_on(connection.delete_group(&group())), Ok(()));
        }
        assert_eq!(made.load(Ordering::Relaxed), 2);
        assert!(matches!(connection.client(), Err(ConnectError::NoRuntime)));
    }
}
