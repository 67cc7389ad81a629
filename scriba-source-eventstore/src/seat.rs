//! A place in a group, from joining it to leaving it in good order.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::ProjectionId;
use scriba_core::source::SourceError;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use crate::acks::Acks;
use crate::client::{Failure, Fed, Group, Membership, Received};
use crate::connection::Connection;
use crate::continuity::Hole;
use crate::departures::Departures;
use crate::flow::{Incoming, Noticed};
use crate::lines::Line;
use crate::store::EventStore;

/// Ids in one message.
const ACKS_AT_ONCE: usize = 500;
/// How long a place is kept after the last ack was queued: acks that are still queued when it is given up are lost.
const ACKS_LEAVE_WITHIN: Duration = Duration::from_millis(50);
/// Between two attempts to get a place that this process has just left.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);

/// Holes at the start of a subscription, by projection, and in how many of them in a row: pushes may be lost on their way.
pub(crate) type Suspicions = Arc<Mutex<HashMap<ProjectionId, (Hole, u32)>>>;
/// So often in a row is none by chance.
const SUSPICIOUS: u32 = 3;

/// The place of a subscriber.
pub(crate) struct Seat {
    group: Group,
    whom: String,
    connection: Arc<Connection>,
    departures: Departures,
    /// `None` only while it is dropped.
    membership: Option<Box<dyn Membership>>,
    line: Line,
    /// Events that the server lets out without an ack.
    buffer: usize,
    acks: Acks,
    /// When acks were queued last.
    acked: Option<Instant>,
    after: Option<u64>,
    suspicion: Option<(ProjectionId, Suspicions)>,
}

impl Seat {
    /// Joins a group. One that this process has just left is waited for.
    pub(crate) async fn join(store: &EventStore, whom: String, group: Group, buffer: i32) -> Result<Self, Failure> {
        let departures = store.departures.clone();
        let (line, membership) = loop {
            let unanswered = departures.unless_answered(&group);
            let joined = store.lines.join(&group, buffer).await;
            unanswered.answered();
            match joined {
                Err(Failure::Full) if departures.are_recent(&group) => sleep(BETWEEN_ATTEMPTS).await,
                joined => break joined?,
            }
        };
        Ok(Self {
            group,
            whom,
            departures,
            membership: Some(membership),
            line,
            connection: Arc::clone(&store.connection),
            buffer: usize::try_from(buffer).unwrap_or_default(),
            acks: Acks::new(None),
            acked: None,
            after: None,
            suspicion: None,
        })
    }

    /// Begins a subscription of a projection above a position.
    pub(crate) fn begin(&mut self, after: Option<u64>, id: ProjectionId, suspicions: Suspicions) {
        self.after = after;
        self.acks = Acks::new(after);
        self.suspicion = Some((id, suspicions));
    }

    pub(crate) fn whom(&self) -> &str {
        &self.whom
    }

    /// Whether the server may let out more.
    pub(crate) fn has_room(&self) -> bool {
        self.acks.open() < self.buffer
    }

    /// Acks everything up to a position.
    pub(crate) async fn ack(&mut self, position: u64) -> Result<(), SourceError> {
        self.acks.durable(position);
        let sent = self.send().await;
        sent.map_err(|failure| SourceError::unavailable(format!("{}: send acks: {failure}", self.whom)))
    }

    /// Queues the acks that are due. One that is dropped half-way may be sent twice, which means nothing.
    async fn send(&mut self) -> Result<(), Failure> {
        let Some(membership) = &mut self.membership else { return Err(Failure::Ended) };
        while let Some(ids) = self.acks.next(ACKS_AT_ONCE) {
            let count = ids.len();
            if let Err(failure) = membership.ack(ids.to_vec()).await {
                self.line.note(&failure);
                return Err(failure);
            }
            self.acks.sent(count);
            self.acked = Some(Instant::now());
        }
        Ok(())
    }

    async fn receive(&mut self) -> Result<Received, Failure> {
        self.send().await?;
        match &mut self.membership {
            Some(membership) => membership.next().await,
            None => Err(Failure::Ended),
        }
    }

    /// Whether the group takes what is in a hole at the start for done. Behind an arrival, if it was there some times in a row.
    /// Silence is no proof: the server may be slow. There it is the group's own checkpoint.
    async fn has_done(&mut self, hole: Hole, noticed: Noticed) -> bool {
        match noticed {
            Noticed::ByArrival => self.is_suspected(hole),
            Noticed::BySilence => {
                let checkpoint = self.connection.group_checkpoint(&self.group).await;
                checkpoint.is_ok_and(|checkpoint| checkpoint >= Some(hole.last))
            }
        }
    }

    fn is_suspected(&self, hole: Hole) -> bool {
        let Some((id, suspicions)) = &self.suspicion else { return false };
        let mut suspicions = suspicions.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, times) = suspicions.entry(id.clone()).or_insert((hole, 0));
        *times = if *before == hole { *times + 1 } else { 1 };
        *before = hole;
        *times >= SUSPICIOUS
    }
}

#[async_trait]
impl Incoming for Seat {
    async fn next(&mut self) -> Result<Fed, Failure> {
        let received = self.receive().await;
        if let Err(failure) = &received {
            self.line.note(failure);
        }
        received.map(Fed::Event)
    }

    fn note(&mut self, position: u64, id: Uuid) {
        self.acks.received(position, id);
        // It goes on where it should.
        if self.after < Some(position)
            && let Some((id, suspicions)) = self.suspicion.take()
        {
            suspicions.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        }
    }

    async fn missed(&mut self, hole: Hole, noticed: Noticed) -> SourceError {
        let done = hole.at_start && self.has_done(hole, noticed).await;
        let (whom, Hole { first, last, .. }) = (&self.whom, hole);
        if done {
            let watermark = self.after.map_or("at the beginning".to_owned(), |after| format!("revision {after}"));
            return SourceError::unusable(format!(
                "{whom}: the watermark is {watermark}, the group goes on behind revision {last}, and there are events at revisions {first} \
                 to {last}, which it takes for done: tables were wiped or restored while the group lived on; restore them to revision \
                 {last} or beyond, or reset the projection, which deletes the group, and rebuild"
            ));
        }
        SourceError::ended(format!(
            "{whom}: there are events at revisions {first} to {last}, and the server did not deliver them; it is asked again"
        ))
    }

    fn leaves_one_out(&self) -> bool {
        true
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Some(membership) = self.membership.take() else { return };
        self.departures.note(&self.group);
        let queued = self.acked.is_some_and(|acked| acked.elapsed() < ACKS_LEAVE_WITHIN);
        // Without a runtime there is nothing that could send.
        if queued && let Ok(runtime) = Handle::try_current() {
            let (departures, group) = (self.departures.clone(), self.group.clone());
            runtime.spawn(async move {
                sleep(ACKS_LEAVE_WITHIN).await;
                drop(membership);
                departures.note(&group);
            });
        }
    }
}
