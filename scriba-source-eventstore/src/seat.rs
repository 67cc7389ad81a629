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
use crate::continuity::Hole;
use crate::departures::Departures;
use crate::flow::Incoming;
use crate::lines::Line;
use crate::store::EventStore;

/// Ids in one message.
const ACKS_AT_ONCE: usize = 500;
/// How long a place is kept after the last ack was queued: acks that are still queued when it is given up are lost.
const ACKS_LEAVE_WITHIN: Duration = Duration::from_millis(50);
/// Between two attempts to get a place that this process has just left.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);

/// First revisions of holes at the start of a subscription, by projection. The first time, a push may have been lost on its way.
pub(crate) type Suspicions = Arc<Mutex<HashMap<ProjectionId, u64>>>;

/// The place of a subscriber.
pub(crate) struct Seat {
    group: Group,
    whom: String,
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
                self.line.spoil();
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

    /// Whether a hole at the start was there the last time as well.
    fn is_suspected(&self, hole: Hole) -> bool {
        let Some((id, suspicions)) = &self.suspicion else { return false };
        let before = suspicions.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone(), hole.first);
        before == Some(hole.first)
    }
}

#[async_trait]
impl Incoming for Seat {
    async fn next(&mut self) -> Result<Fed, Failure> {
        let received = self.receive().await;
        if received.is_err() {
            self.line.spoil();
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

    fn missed(&mut self, hole: Hole) -> SourceError {
        let (whom, Hole { first, last, at_start }) = (&self.whom, hole);
        if at_start && self.is_suspected(hole) {
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
