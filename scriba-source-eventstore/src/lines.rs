//! Connections for subscriptions, one for each: what is delivered and not read, as in a pause, takes room on a connection, and
//! others on it would wait for ever.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime;

use crate::client::{Client, Failure, Feed, Follow, Group, Membership};
use crate::connection::Connect;

/// Clients that no subscription uses, with the runtimes they live on.
pub(crate) struct Lines {
    connect: Arc<Connect>,
    idle: Mutex<Vec<(runtime::Id, Arc<dyn Client>)>>,
}

/// A client while one subscription has it.
pub(crate) struct Line {
    lines: Arc<Lines>,
    runtime: runtime::Id,
    client: Arc<dyn Client>,
    /// Made for this subscription.
    fresh: bool,
    /// Whether another subscription may have it next.
    good: bool,
}

impl Lines {
    pub(crate) fn new(connect: Arc<Connect>) -> Self {
        Self { connect, idle: Mutex::default() }
    }

    pub(crate) async fn follow(self: &Arc<Self>, follow: &Follow) -> Result<(Line, Box<dyn Feed>), Failure> {
        let mut redirected = false;
        loop {
            let line = self.line()?;
            match line.client.follow(follow).await {
                Ok(feed) => return Ok((line, feed)),
                Err(failure) => line.failed(failure, &mut redirected)?,
            }
        }
    }

    pub(crate) async fn join(
        self: &Arc<Self>,
        group: &Group,
        buffer: i32,
    ) -> Result<(Line, Box<dyn Membership>), Failure> {
        let mut redirected = false;
        loop {
            let line = self.line()?;
            match line.client.join(group, buffer).await {
                Ok(membership) => return Ok((line, membership)),
                Err(failure) => line.failed(failure, &mut redirected)?,
            }
        }
    }

    /// One that is idle, or a new one.
    fn line(self: &Arc<Self>) -> Result<Line, Failure> {
        let runtime = runtime::Handle::try_current().map_err(|error| Failure::Other(error.to_string()))?.id();
        let idle = {
            let mut idle = self.idle();
            let at = idle.iter().rposition(|(lives_on, _)| *lives_on == runtime);
            at.map(|at| idle.swap_remove(at).1)
        };
        let (client, fresh) = match idle {
            Some(client) => (client, false),
            None => ((self.connect)().map_err(|error| Failure::Other(error.to_string()))?, true),
        };
        Ok(Line { lines: Arc::clone(self), runtime, client, fresh, good: true })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(runtime::Id, Arc<dyn Client>)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    /// No other subscription is to have it.
    pub(crate) fn spoil(&mut self) {
        self.good = false;
    }

    /// `Ok` where another attempt is to be made at once: with the leader, to which the client goes by itself, or with a new client
    /// in place of one whose connection broke while nobody used it.
    fn failed(mut self, failure: Failure, redirected: &mut bool) -> Result<(), Failure> {
        match failure {
            Failure::NotLeader(_) if !std::mem::replace(redirected, true) => Ok(()),
            Failure::Unavailable(_) | Failure::Dead(_) => {
                self.spoil();
                if self.fresh {
                    return Err(failure);
                }
                self.lines.idle().retain(|(lives_on, _)| *lives_on != self.runtime);
                Ok(())
            }
            failure => Err(failure),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.good {
            self.lines.idle().push((self.runtime, Arc::clone(&self.client)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::fake::FakeClient;

    fn group() -> Group {
        Group { stream: "s".to_owned(), name: "g".to_owned() }
    }

    /// Lines whose clients answer to those who join with these failures first, and how many clients were made.
    fn lines(failures: &[&[Failure]]) -> (Arc<Lines>, Arc<AtomicUsize>) {
        let made = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&made);
        let mut failures: VecDeque<_> = failures.iter().map(|failures| failures.to_vec()).collect();
        let clients: Mutex<VecDeque<_>> = Mutex::new(std::mem::take(&mut failures));
        let connect = move || {
            count.fetch_add(1, Ordering::Relaxed);
            let joining = clients.lock().unwrap().pop_front().unwrap_or_default();
            let client: Arc<dyn Client> = Arc::new(FakeClient {
                joining: Mutex::new(joining.into()),
                pushes: Mutex::new(vec![Vec::new(); 9].into()),
                ..FakeClient::default()
            });
            Ok(client)
        };
        (Arc::new(Lines::new(Arc::new(connect))), made)
    }

    fn outage() -> Failure {
        Failure::Unavailable(String::new())
    }

    #[tokio::test]
    async fn every_subscription_has_a_client_to_itself_which_is_used_again() {
        let (lines, made) = lines(&[]);
        let one = lines.join(&group(), 1).await.unwrap();
        let other = lines.join(&group(), 1).await.unwrap();
        drop((one, other));
        let _again = (lines.join(&group(), 1).await.unwrap(), lines.join(&group(), 1).await.unwrap());
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn a_client_that_was_idle_is_replaced_when_it_fails_and_a_new_one_that_fails_is_an_outage() {
        let (lines, made) = lines(&[&[outage()], &[], &[outage()]]);
        assert_eq!(lines.join(&group(), 1).await.err(), Some(outage()));
        drop(lines.join(&group(), 1).await.unwrap());
        drop(lines.join(&group(), 1).await.unwrap());
        assert_eq!(made.load(Ordering::Relaxed), 2);
        let (mut line, _membership) = lines.join(&group(), 1).await.unwrap();
        line.spoil();
        drop(line);
        assert_eq!(lines.join(&group(), 1).await.err(), Some(outage()));
        assert_eq!(made.load(Ordering::Relaxed), 3);
    }

    #[tokio::test]
    async fn the_client_that_was_told_who_leads_is_asked_again() {
        let leader = || Failure::NotLeader("b:1".to_owned());
        let (lines, made) = lines(&[&[leader()]]);
        assert!(lines.join(&group(), 1).await.is_ok());
        assert_eq!(made.load(Ordering::Relaxed), 1);
        let (lines, made) = self::lines(&[&[leader(), leader()]]);
        assert_eq!(lines.join(&group(), 1).await.err(), Some(leader()), "it is not chased for ever");
        assert!(lines.join(&group(), 1).await.is_ok());
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }
}
