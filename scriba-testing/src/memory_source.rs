//! A source in memory, with faults.

mod subscription;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::Utc;
use scriba_core::source::{
    PassedOver, Source, SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription, TypeSet,
};
use scriba_core::{EventId, EventType, Position, ProjectionId, RecordedEvent, StreamId};
use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::subscription::MemorySubscription;

/// An event log in memory. Clones share the log, so a test keeps one to append to and gives the other away.
///
/// It behaves like a server that keeps the position of each projection: what a projection has acked is never
/// delivered to it again, even if its checkpoint is lower. So an engine that acks too early loses events here, and a
/// test that throws its target away has to call [`MemorySource::forget_acks`]. Waits go by `tokio::time`, so they
/// follow a paused clock.
///
/// Not simulated: events that vanish by retention, a log put back to an older state, a limit on the number of
/// subscribers, and the cost of reading from a network.
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

/// Faults by chance, drawn from a seed: the same seed and the same calls meet the same faults. The default has none.
///
/// Chances are between 0 and 1, for each page unless said otherwise.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Where the chances come from.
    pub seed: u64,
    /// Delivers again a run of events that this subscription has handed out and that are not acked.
    pub repeat: f64,
    /// Ends the subscription.
    pub end: f64,
    /// Becomes unavailable for a time out of `outage`, for each page and each subscription.
    pub unavailable: f64,
    /// How long an outage lasts; none where it is empty.
    pub outage: Range<Duration>,
    /// The wait before each page; none where it is empty.
    pub delay: Range<Duration>,
    /// Whether subscriptions begin below the asked position, though never at or below the last ack.
    pub start_below: bool,
    /// Pages have a random size from 1 to this; as large as asked for where it is `None`.
    pub page: Option<usize>,
}

/// One fault on request, see [`MemorySource::inject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFault {
    /// The next page delivers again events that its subscription handed out and that are not acked. Waits for a page
    /// that has some.
    Repeat,
    /// The next page is the end of its subscription.
    End,
    /// At the next page the source becomes unavailable for so long.
    Unavailable(Duration),
    /// The next page comes so much later.
    Delay(Duration),
    /// The next subscription begins below the asked position, right above the last ack.
    StartBelow,
}

/// Faults that really happened, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Events delivered again within a subscription.
    pub repeated: u64,
    /// Subscriptions ended.
    pub ended: u64,
    /// Outages begun.
    pub unavailable: u64,
    /// Pages that came later.
    pub delayed: u64,
    /// Subscriptions begun below the asked position, with an event there.
    pub started_below: u64,
    /// Events delivered below the last one for the first time.
    pub late: u64,
}

struct Shared {
    fingerprint: String,
    log: Mutex<Log>,
    /// Woken by everything that may let a waiting subscription go on.
    changed: Notify,
}

#[derive(Default)]
struct Log {
    /// In the order of positions.
    events: Vec<RecordedEvent>,
    revisions: HashMap<StreamId, u64>,
    /// What each projection need not be delivered again.
    acked: BTreeMap<ProjectionId, Position>,
    /// Positions appended below the head, in the order of appending.
    late: Vec<Position>,
    subscriptions: u64,
    filters_types: bool,
    faults: Faults,
    script: VecDeque<SourceFault>,
    unavailable_until: Option<Instant>,
    met: FaultCounts,
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
        let position = log.events.last().map_or(Position::new(0), |last| Position::new(last.position.get() + 1));
        log.insert(position, stream_id.into(), event_type.into(), body.into());
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
        log.insert(position, stream_id.into(), event_type.into(), body.into());
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
            log.events.push(event);
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
        log.insert(position, stream_id.into(), event_type.into(), body.into());
        log.late.push(position);
        self.changed(log);
    }

    /// Adds a fault to the script, which is followed in order: the next page or subscription that the first fault
    /// applies to meets it.
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
        self.lock().reachable()?;
        Ok(SourceIdentity { kind: "memory".to_owned(), fingerprint: self.shared.fingerprint.clone() })
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        let subscription = MemorySubscription::open(self.clone(), &mut self.lock(), &request)?;
        Ok(Box::new(subscription))
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        self.lock().reachable()?;
        Ok(Box::new(MemoryInspector(self.clone())))
    }
}

struct MemoryInspector(MemorySource);

#[async_trait]
impl SourceInspector for MemoryInspector {
    async fn head(&mut self) -> Result<Option<Position>, SourceError> {
        let log = self.0.lock();
        log.reachable()?;
        Ok(log.events.last().map(|event| event.position))
    }

    async fn event_id_at(&mut self, position: Position) -> Result<Option<EventId>, SourceError> {
        let log = self.0.lock();
        log.reachable()?;
        Ok(log.at(position).map(|event| event.id.clone()))
    }

    async fn passed_over(&mut self, types: TypeSet<'_>, up_to: Position) -> Result<Option<PassedOver>, SourceError> {
        let log = self.0.lock();
        log.reachable()?;
        let passed = || log.events.iter().filter(|event| event.position <= up_to);
        let first = passed().find(|event| types.contains(event.event_type.as_str()));
        Ok(first.map(|first| PassedOver {
            event_type: first.event_type.clone(),
            events: passed().filter(|event| event.event_type == first.event_type).count() as u64,
            first: first.position,
        }))
    }
}

impl Log {
    fn insert(&mut self, position: Position, stream_id: StreamId, event_type: EventType, data: Bytes) {
        let revision = self.revisions.entry(stream_id.clone()).or_default();
        let event = RecordedEvent { revision: Some(*revision), ..recorded(position, stream_id, event_type, data) };
        *revision += 1;
        let index = self.index_from(position.get());
        self.events.insert(index, event);
    }

    fn assert_above_head(&self, position: Position) {
        let head = self.events.last().map(|event| event.position);
        assert!(
            head < Some(position),
            "position {position} is not above the head {head:?}: `append_late` puts events in below"
        );
    }

    /// The index of the first event at or above a position.
    fn index_from(&self, position: u64) -> usize {
        self.events.partition_point(|event| event.position.get() < position)
    }

    fn at(&self, position: Position) -> Option<&RecordedEvent> {
        self.events.get(self.index_from(position.get())).filter(|event| event.position == position)
    }

    fn fall_silent(&mut self, duration: Duration) -> SourceError {
        self.unavailable_until = Some(Instant::now() + duration);
        self.met.unavailable += 1;
        SourceError::unavailable(format!("memory source: unavailable for {duration:?}"))
    }

    fn reachable(&self) -> Result<(), SourceError> {
        let left = self.unavailable_until.map(|until| until.saturating_duration_since(Instant::now()));
        match left {
            Some(left) if !left.is_zero() => {
                Err(SourceError::unavailable(format!("memory source: unavailable for another {left:?}")))
            }
            _ => Ok(()),
        }
    }
}

/// An event as a store would have it, without a revision.
pub(crate) fn recorded(position: Position, stream_id: StreamId, event_type: EventType, data: Bytes) -> RecordedEvent {
    RecordedEvent {
        id: EventId::from(format!("event-{position}")),
        stream_id,
        event_type,
        position,
        revision: None,
        data,
        metadata: Bytes::new(),
        occurred_at: Some(Utc::now()),
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
