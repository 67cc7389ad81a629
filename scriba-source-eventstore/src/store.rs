//! The store: a connection string, and what the sources of one store share.

use std::fmt;
use std::sync::Arc;

use scriba_core::source::{SourceError, SourceIdentity};

use crate::client::{ClientCrate, ConnectError, connect};
use crate::connection::{Connect, Connection};
use crate::departures::Departures;
use crate::lines::Lines;
use crate::part::Part;

/// The kind in [`SourceIdentity`], whatever kind of subscription: both go by the same positions.
const KIND: &str = "eventstoredb";
const DEFAULT_PORT: u16 = 2113;
#[cfg(feature = "kurrentdb")]
const DEFAULT_CLIENT: ClientCrate = ClientCrate::KurrentDb;
#[cfg(not(feature = "kurrentdb"))]
const DEFAULT_CLIENT: ClientCrate = ClientCrate::EventStore;

/// An `EventStoreDB` or `KurrentDB`, a single server or a cluster.
///
/// Nothing connects before it is used. Clones share connections, so one store for all projections of a program is enough: each
/// subscription has a connection to itself, and one is for everything else. A client that has failed for good is replaced.
#[derive(Clone)]
pub struct EventStore {
    connection_string: Arc<str>,
    which: ClientCrate,
    /// Part of the fingerprint of every source.
    name: Arc<str>,
    /// For calls.
    pub(crate) connection: Arc<Connection>,
    /// For subscriptions.
    pub(crate) lines: Arc<Lines>,
    pub(crate) departures: Departures,
}

/// A connection string that names no host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection string {0}: one looks like esdb://user:password@host:2113?tls=true")]
pub struct InvalidConnectionString(&'static str);

impl EventStore {
    /// The store that a connection string of the official clients leads to, such as `esdb://127.0.0.1:2113?tls=false`; in user
    /// and password, `/ ? # @ : ,` are written as `%2F %3F %23 %40 %3A %2C`. `discoveryInterval`, which the clients wait before they connect, is 50 ms
    /// unless it is given.
    ///
    /// # Errors
    /// When no host can be found in it. What else may be wrong with it is told by the check of a source.
    pub fn new(connection_string: impl Into<Arc<str>>) -> Result<Self, InvalidConnectionString> {
        let connection_string = connection_string.into();
        let name = hosts(&connection_string)?.into();
        let connect = by(DEFAULT_CLIENT, Arc::clone(&connection_string));
        Ok(Self::of(connection_string, DEFAULT_CLIENT, name, connect))
    }

    fn of(connection_string: Arc<str>, which: ClientCrate, name: Arc<str>, connect: Arc<Connect>) -> Self {
        let connection = Arc::new(Connection::new(Arc::clone(&connect)));
        let lines = Arc::new(Lines::new(connect));
        Self { connection_string, which, name, connection, lines, departures: Departures::default() }
    }

    /// Talks to it by this crate.
    #[must_use]
    pub fn client(self, which: ClientCrate) -> Self {
        let connect = by(which, Arc::clone(&self.connection_string));
        Self::of(self.connection_string, which, self.name, connect)
    }

    /// The name by which checkpoints know the store, instead of the hosts of the connection string. With a name, hosts can be
    /// replaced, and the projections of a store go on. Never give the name of one store to another.
    #[must_use]
    pub fn store_name(mut self, name: impl Into<Arc<str>>) -> Self {
        self.name = name.into();
        self
    }

    pub(crate) fn identity(&self, part: &Part) -> SourceIdentity {
        SourceIdentity { kind: KIND.to_owned(), fingerprint: format!("{} {part}", self.name) }
    }

    /// Refuses what the client crate does not take for a connection string.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        match self.connection.client() {
            Ok(_) => Ok(()),
            Err(error @ (ConnectError::Address(_) | ConnectError::NoRuntime)) => Err(SourceError::unusable(error)),
            Err(error @ ConnectError::Client(_)) => Err(SourceError::unavailable(error)),
        }
    }
}

#[cfg(test)]
impl EventStore {
    /// A store that is reached by a client of the test.
    pub(crate) fn by(client: Arc<dyn crate::client::Client>) -> Self {
        let connect = move || Ok(Arc::clone(&client));
        Self::of("esdb://double".into(), DEFAULT_CLIENT, "double".into(), Arc::new(connect))
    }
}

fn by(which: ClientCrate, connection_string: Arc<str>) -> Arc<Connect> {
    Arc::new(move || connect(which, &connection_string))
}

/// Without what may be secret.
impl fmt::Debug for EventStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventStore").field("name", &self.name).field("client", &self.which).finish_non_exhaustive()
    }
}

impl fmt::Display for EventStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The hosts of a connection string, each with its port, in the order of the alphabet: the same cluster may be written in any order.
fn hosts(connection_string: &str) -> Result<String, InvalidConnectionString> {
    let (_, rest) = connection_string.split_once("://").ok_or(InvalidConnectionString("has no scheme"))?;
    let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
    let hosts = authority.rsplit_once('@').map_or(authority, |(_credentials, hosts)| hosts);
    let mut hosts: Vec<String> = hosts.split(',').filter(|host| !host.is_empty()).map(with_port).collect();
    if hosts.is_empty() {
        return Err(InvalidConnectionString("names no host"));
    }
    hosts.sort_unstable();
    hosts.dedup();
    Ok(hosts.join(","))
}

fn with_port(host: &str) -> String {
    let host = host.to_lowercase();
    // In an address in brackets there are colons that begin no port.
    let behind_brackets = host.rsplit_once(']').map_or(host.as_str(), |(_, behind)| behind);
    if behind_brackets.contains(':') { host } else { format!("{host}:{DEFAULT_PORT}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_known_by_its_hosts_in_any_order_and_never_by_who_reads_it() {
        for (text, wanted) in [
            ("esdb://127.0.0.1:2113?tls=false", "127.0.0.1:2113"),
            ("esdb://admin:changeit@DB.example?tls=true", "db.example:2113"),
            ("esdb+discover://b:1,a:2,c/?tls=true", "a:2,b:1,c:2113"),
            ("kurrentdb://user:p%40ss@[::1]:2114", "[::1]:2114"),
            ("kurrentdb://[::1]", "[::1]:2113"),
        ] {
            assert_eq!(hosts(text).as_deref(), Ok(wanted), "{text}");
        }
    }

    #[test]
    fn a_connection_string_without_a_host_is_refused() {
        for text in ["", "127.0.0.1:2113", "esdb://", "esdb://user:secret@?tls=false"] {
            let error = EventStore::new(text).map(|_| ()).expect_err(text).to_string();
            assert!(error.contains("esdb://user:password@host:2113") && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_name_stands_for_the_hosts_and_what_is_read_is_told_apart() {
        let store = EventStore::new("esdb://user:secret@b:1").expect("hosts");
        let stream = Part::Stream("account-1".to_owned());
        let prefixed = Part::All { stream_prefixes: vec!["account-".to_owned()] };
        let fingerprint = |store: &EventStore, part: &Part| store.identity(part).fingerprint;
        assert_eq!(fingerprint(&store, &Part::category("account")), "b:1 $ce-account");
        assert_eq!(fingerprint(&store, &stream), "b:1 account-1");
        assert_eq!(fingerprint(&store, &prefixed), "b:1 $all [\"account-\"]");
        assert_eq!(fingerprint(&store.clone().store_name("orders-prod"), &stream), "orders-prod account-1");
        assert!(!format!("{store:?}").contains("secret"));
    }
}
