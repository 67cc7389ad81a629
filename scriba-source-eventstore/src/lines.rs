//! Connections for subscriptions, one for each: what is delivered and not read, as in a pause, takes room on a connection, and
//! others on it would wait for ever.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime;

use crate::client::{Client, Failure, Feed, Follow, Group, Membership};
use crate::connection::{Connect, OUTAGES};

/// Clients that no subscription uses, with the runtimes they live on.
pub(crate) struct Lines {
    connect: Arc<Connect>,
    idle: Mutex<Vec<Idle>>,
}

/// A client that waits for the next subscription.
struct Idle {
    /// Where it lives.
    runtime: runtime::Id,
    client: Arc<dyn Client>,
    outages: u32,
}

/// A client while one subscription has it.
pub(crate) struct Line {
    lines: Arc<Lines>,
    runtime: runtime::Id,
    client: Arc<dyn Client>,
    /// Made for this subscription.
    fresh: bool,
    /// In a row. A client that is thrown away is never freed by its crate, which keeps a task for it, so it is used on as long as
    /// it may get better.
    outages: u32,
    /// It will not work again.
    dead: bool,
}

/// What was tried again already while one subscription was opened.
#[derive(Default)]
struct Tried {
    leader: bool,
    connection: bool,
}

impl Lines {
    pub(crate) fn new(connect: Arc<Connect>) -> Self {
        Self { connect, idle: Mutex::default() }
    }

    pub(crate) async fn follow(self: &Arc<Self>, follow: &Follow) -> Result<(Line, Box<dyn Feed>), Failure> {
        let mut tried = Tried::default();
        loop {
            let line = self.line()?;
            match line.client.follow(follow).await {
                Ok(feed) => return Ok((line.proven(), feed)),
                Err(failure) => line.failed(failure, &mut tried)?,
            }
        }
    }

    pub(crate) async fn join(
        self: &Arc<Self>,
        group: &Group,
        buffer: i32,
    ) -> Result<(Line, Box<dyn Membership>), Failure> {
        let mut tried = Tried::default();
        loop {
            let line = self.line()?;
            match line.client.join(group, buffer).await {
                Ok(membership) => return Ok((line.proven(), membership)),
                Err(failure) => line.failed(failure, &mut tried)?,
            }
        }
    }

    /// One that is idle, or a new one.
    fn line(self: &Arc<Self>) -> Result<Line, Failure> {
        let runtime = runtime::Handle::try_current().map_err(|error| Failure::Other(error.to_string()))?.id();
        let idle = {
            let mut idle = self.idle();
            let at = idle.iter().rposition(|idle| idle.runtime == runtime);
            at.map(|at| idle.swap_remove(at))
        };
        let fresh = idle.is_none();
        let (client, outages) = match idle {
            Some(Idle { client, outages, .. }) => (client, outages),
            None => ((self.connect)().map_err(|error| Failure::Other(error.to_string()))?, 0),
        };
        Ok(Line { lines: Arc::clone(self), runtime, client, fresh, outages, dead: false })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    /// Notes what a subscription ended with.
    pub(crate) fn note(&mut self, failure: &Failure) {
        match failure {
            Failure::Dead(_) => self.dead = true,
            Failure::Unavailable(_) => self.outages += 1,
            _ => {}
        }
    }

    fn proven(mut self) -> Self {
        self.outages = 0;
        self
    }

    /// `Ok` where another attempt is to be made at once: with the leader, to which the client goes by itself, or where the
    /// connection may have broken while nobody used it.
    fn failed(mut self, failure: Failure, tried: &mut Tried) -> Result<(), Failure> {
        self.note(&failure);
        let again = match failure {
            Failure::NotLeader(_) => !std::mem::replace(&mut tried.leader, true),
            Failure::Dead(_) => !self.fresh,
            Failure::Unavailable(_) => !self.fresh && !std::mem::replace(&mut tried.connection, true),
            _ => false,
        };
        if again { Ok(()) } else { Err(failure) }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if !self.dead && self.outages < OUTAGES {
            let (runtime, client, outages) = (self.runtime, Arc::clone(&self.client), self.outages);
            self.lines.idle().push(Idle { runtime, client, outages });
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
    async fn a_client_is_used_on_whatever_a_subscription_ended_with_and_through_a_short_outage() {
        let (lines, made) = lines(&[&[outage(), outage()]]);
        assert_eq!(lines.join(&group(), 1).await.err(), Some(outage()), "a new one that fails is an outage");
        for end in [Failure::Dropped, Failure::Ended, Failure::Missing, Failure::Denied, outage(), outage()] {
            let (mut line, _membership) = lines.join(&group(), 1).await.unwrap();
            line.note(&end);
        }
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn a_client_is_replaced_when_it_is_dead_and_after_outages_in_a_row() {
        let (lines, made) = lines(&[&[], &[outage(), outage(), outage()], &[]]);
        let (mut line, _membership) = lines.join(&group(), 1).await.unwrap();
        line.note(&Failure::Dead(String::new()));
        drop(line);
        for outages in ["one", "two, as it is tried again"] {
            assert_eq!(lines.join(&group(), 1).await.err(), Some(outage()), "{outages}");
        }
        assert!(lines.join(&group(), 1).await.is_ok());
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
