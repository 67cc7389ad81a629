//! A source in memory, with faults.

mod faults;
mod log;
mod seat;
mod subscription;

use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use scriba_core::source::{
    Place, Source, SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription,
};
use scriba_core::{EventType, Position, ProjectionId, RecordedEvent, StreamId};
use serde::Serialize;
use tokio::sync::Notify;

pub use self::faults::{FaultCounts, Faults, SourceCall, SourceFault};
pub use self::log::HeldAppend;
pub(crate) use self::log::recorded;
use self::log::{Log, MemoryInspector};
use self::seat::Seat;
use self::subscription::MemorySubscription;

/// An event log in memory. Clones share the log, so a test keeps one to append to and gives the other away.
///
/// It behaves like a server that keeps the position of each projection: what a projection has acked is never
/// delivered to it again, even if its checkpoint is lower. So an engine that acks too early loses events here, and a
/// test that throws its target away has to call [`MemorySource::forget_acks`]. Waits go by `tokio::time`, so they
/// follow a paused clock.
///
/// Faults come by chance ([`MemorySource::faults`]), on request ([`MemorySource::inject`]), or as something that befalls
/// the store ([`MemorySource::truncate_below`], [`MemorySource::restore_before`], [`MemorySource::tell_identity`] and others).
///
/// # What it does not simulate
///
/// - an error of its own after so many deliveries of an event, and an event that the server parks;
/// - the cost, the buffers and the order of answers of a network: a page is read and handed out in one step, so nothing is
///   lost or delivered twice by a connection that breaks in the middle of an answer;
/// - a failure of an inspector alone: it is unavailable when the whole source is;
/// - bodies or ids that the store refuses: it takes any;
/// - a fail-over to a replica that trails: a restored store is put back for all at once, and open subscriptions end.
///
/// ```
/// use scriba_testing::MemorySource;
///
/// let source = MemorySource::new();
/// let first = source.append("account-1", "Deposited", r#"{"amount": 5}"#);
/// let second = source.append_json("account-2", "Deposited", &[1, 2]);
/// assert_eq!((first.get(), second.get()), (0, 1));
/// ```
#[derive(Clone, Default)]
pub struct MemorySource {
    shared: Arc<Shared>,
}

struct Shared {
    fingerprint: String,
    log: Mutex<Log>,
    /// Woken by everything that may let a waiting subscription go on.
    changed: Notify,
}

impl Default for Shared {
    fn default() -> Self {
        static SOURCES: AtomicU64 = AtomicU64::new(0);
        let number = SOURCES.fetch_add(1, Ordering::Relaxed);
        Self { fingerprint: format!("memory-{number}"), log: Mutex::default(), changed: Notify::new() }
    }
}

impl MemorySource {
    /// An empty log, with a fingerprint of its own.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether subscriptions leave out events of types that were not asked for; they do not unless said.
    #[must_use]
    pub fn filters_types(self, filters: bool) -> Self {
        self.lock().filters_types = filters;
        self
    }

    /// Subscriptions take no acks, as those of a table: they begin behind the watermark and repeat nothing. They do take them
    /// unless this is said.
    #[must_use]
    pub fn without_acks(self) -> Self {
        self.lock().without_acks = true;
        self
    }

    /// Lets one subscriber of each projection in at a time, as a server does with a subscription group that is made by the first
    /// subscription.
    #[must_use]
    pub fn admits_one_subscriber(self) -> Self {
        self.lock().admits_one = true;
        self
    }

    /// Faults by chance for every subscription from now on.
    #[must_use]
    pub fn faults(self, faults: Faults) -> Self {
        self.lock().faults = faults;
        self
    }

    /// Appends an event one position after the last one, from 0 on.
    pub fn append(
        &self,
        stream_id: impl Into<StreamId>,
        event_type: impl Into<EventType>,
        body: impl Into<Bytes>,
    ) -> Position {
        let mut log = self.lock();
        let position = log.next_position();
        log.insert(recorded(position, stream_id.into(), event_type.into(), body.into()));
        self.changed(log);
        position
    }

    /// Appends an event with the id, metadata and time it has; position and revision are those it gets here.
    pub fn append_event(&self, event: RecordedEvent) -> Position {
        let mut log = self.lock();
        let position = log.next_position();
        log.insert(RecordedEvent { position, ..event });
        self.changed(log);
        position
    }

    /// Appends an event with a body serialised as JSON.
    ///
    /// # Panics
    /// When the body cannot be serialised.
    pub fn append_json<B: Serialize>(
        &self,
        stream_id: impl Into<StreamId>,
        event_type: impl Into<EventType>,
        body: &B,
    ) -> Position {
        self.append(stream_id, event_type, json(body))
    }

    /// Appends an event at a position, which may leave a gap.
    ///
    /// # Panics
    /// When the position is not above the last one.
    pub fn append_at(
        &self,
        position: Position,
        stream_id: impl Into<StreamId>,
        event_type: impl Into<EventType>,
        body: impl Into<Bytes>,
    ) {
        let mut log = self.lock();
        log.assert_above_head(position);
        log.insert(recorded(position, stream_id.into(), event_type.into(), body.into()));
        self.changed(log);
    }

    /// Appends prepared events as they are.
    ///
    /// # Panics
    /// When a position is not above the one before it.
    pub fn append_all(&self, events: impl IntoIterator<Item = RecordedEvent>) {
        let mut log = self.lock();
        for event in events {
            log.assert_above_head(event.position);
            log.insert_as_it_is(event);
        }
        self.changed(log);
    }

    /// Puts an event in below the head, as a source does that misses what commits late: subscriptions that are past the
    /// position deliver it out of order with their next page, later ones in its place.
    ///
    /// # Panics
    /// When there is an event at the position.
    pub fn append_late(
        &self,
        position: Position,
        stream_id: impl Into<StreamId>,
        event_type: impl Into<EventType>,
        body: impl Into<Bytes>,
    ) {
        let mut log = self.lock();
        assert!(log.at(position).is_none(), "there is an event at position {position} already");
        log.insert(recorded(position, stream_id.into(), event_type.into(), body.into()));
        log.late.push(position);
        self.changed(log);
    }

    /// Begins an append: it draws the next position, and until it is committed or rolled back nothing above that position
    /// is delivered.
    pub fn hold_append(
        &self,
        stream_id: impl Into<StreamId>,
        event_type: impl Into<EventType>,
        body: impl Into<Bytes>,
    ) -> HeldAppend {
        let mut log = self.lock();
        let position = log.hold();
        let event = recorded(position, stream_id.into(), event_type.into(), body.into());
        HeldAppend { source: self.clone(), position, event: Some(event) }
    }

    /// Leaves out so many revisions of a stream before its next event, as truncated streams and categories do.
    pub fn skip_revisions(&self, stream_id: impl Into<StreamId>, count: u64) {
        self.lock().skip_revisions(stream_id.into(), count);
    }

    /// Removes the events below a position, as retention does. Subscriptions go on with what is left.
    pub fn truncate_below(&self, position: Position) {
        let mut log = self.lock();
        log.truncate_below(position);
        self.changed(log);
    }

    /// Puts the store back to what it was before the append at a position: later appends draw the same positions again, acks
    /// at or above it are forgotten, and open subscriptions end.
    pub fn restore_before(&self, position: Position) {
        let mut log = self.lock();
        log.restore_before(position);
        self.changed(log);
    }

    /// Ends all open subscriptions, as a connection does that is cut. New ones can be opened at once.
    pub fn cut(&self) {
        let mut log = self.lock();
        log.cuts += 1;
        log.places.values_mut().for_each(|place| *place = None);
        self.changed(log);
    }

    /// Says from now on that it is this, whatever it is: as if the program were connected to another store.
    pub fn tell_identity(&self, kind: impl Into<String>, fingerprint: impl Into<String>) {
        self.lock().pretended = Some(SourceIdentity { kind: kind.into(), fingerprint: fingerprint.into() });
    }

    /// Adds a fault to the script, which is followed in order: the next page or subscription that the first fault
    /// applies to meets it. What is behind a fault that does not come to pass waits.
    pub fn inject(&self, fault: SourceFault) {
        let mut log = self.lock();
        log.script.push_back(fault);
        self.changed(log);
    }

    /// Is unavailable from now on for so long: every call fails, and a subscription that is asked or waits ends.
    pub fn unavailable_for(&self, duration: Duration) {
        let mut log = self.lock();
        log.fall_silent(duration);
        self.changed(log);
    }

    /// The highest position that any projection has acked.
    pub fn acked(&self) -> Option<Position> {
        self.lock().acked.values().max().copied()
    }

    /// The highest position that a projection has acked.
    pub fn acked_by(&self, id: impl Into<ProjectionId>) -> Option<Position> {
        self.lock().acked.get(&id.into()).copied()
    }

    /// Forgets all acks, so that a projection that begins anew is delivered everything.
    pub fn forget_acks(&self) {
        self.lock().acked.clear();
    }

    /// Forgets what a projection has acked and that it ever subscribed, as when its group is deleted: its subscription ends.
    pub fn delete_group(&self, id: impl Into<ProjectionId>) {
        let (mut log, id) = (self.lock(), id.into());
        log.acked.remove(&id);
        log.places.remove(&id);
        log.cuts += 1;
        self.changed(log);
    }

    /// Subscriptions opened so far.
    pub fn subscriptions(&self) -> u64 {
        self.lock().subscriptions
    }

    /// All events, in the order of positions.
    pub fn events(&self) -> Vec<RecordedEvent> {
        self.lock().events.clone()
    }

    /// The faults that really happened so far.
    pub fn faults_met(&self) -> FaultCounts {
        self.lock().met
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hangs(&self, call: SourceCall) -> bool {
        self.lock().hangs(call)
    }

    fn changed(&self, log: MutexGuard<'_, Log>) {
        drop(log);
        self.shared.changed.notify_waiters();
    }
}

#[async_trait]
impl Source for MemorySource {
    async fn check(&self) -> Result<(), SourceError> {
        self.lock().reachable()
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        let log = self.lock();
        log.reachable()?;
        let own = || SourceIdentity { kind: "memory".to_owned(), fingerprint: self.shared.fingerprint.clone() };
        Ok(log.pretended.clone().unwrap_or_else(own))
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        if self.hangs(SourceCall::Subscribe) {
            pending::<()>().await;
        }
        let mut log = self.lock();
        let mut subscription = MemorySubscription::open(self.clone(), &mut log, &request)?;
        if log.admits_one {
            subscription.seat = Some(Seat::take(self, &mut log, request.telemetry.id())?);
        }
        Ok(Box::new(subscription))
    }

    fn admits_one(&self) -> bool {
        self.lock().admits_one
    }

    async fn claim(&self, id: &ProjectionId, _in_flight: usize) -> Result<Option<Box<dyn Place>>, SourceError> {
        let mut log = self.lock();
        log.reachable()?;
        if !log.admits_one || !log.places.contains_key(id) {
            return Ok(None);
        }
        let seat = Seat::take(self, &mut log, id)?;
        Ok(Some(Box::new(seat)))
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        self.lock().reachable()?;
        Ok(Box::new(MemoryInspector(self.clone())))
    }

    fn keeps_position(&self) -> bool {
        true
    }

    async fn reset(&self, id: &ProjectionId) -> Result<(), SourceError> {
        let mut log = self.lock();
        log.reachable()?;
        log.acked.remove(id);
        log.places.remove(id);
        Ok(())
    }
}

/// # Panics
/// When the body cannot be serialised.
pub(crate) fn json<B: Serialize>(body: &B) -> Bytes {
    match serde_json::to_vec(body) {
        Ok(bytes) => bytes.into(),
        Err(error) => panic!("the body cannot be written as JSON: {error}"),
    }
}

/// The lowest position above one; 0 above the beginning.
pub(crate) fn after(position: Option<Position>) -> u64 {
    position.map_or(0, |position| position.get() + 1)
}
