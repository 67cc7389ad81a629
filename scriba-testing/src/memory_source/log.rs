//! What the memory source keeps, and the questions about it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::Utc;
use scriba_core::source::{PassedOver, SourceError, SourceIdentity, SourceInspector, TypeSet};
use scriba_core::{EventId, EventType, Position, ProjectionId, RecordedEvent, StreamId};
use tokio::time::Instant;

use super::faults::{FaultCounts, Faults, SourceCall, SourceFault};
use super::{MemorySource, after};

/// The store and its faults.
#[derive(Default)]
pub(super) struct Log {
    /// In the order of positions.
    pub(super) events: Vec<RecordedEvent>,
    /// The position of the next append.
    next: u64,
    /// What the next event of each stream gets.
    revisions: HashMap<StreamId, u64>,
    /// Positions of appends that are still open: nothing above them is delivered.
    pub(super) held: BTreeSet<Position>,
    /// What each projection need not be delivered again.
    pub(super) acked: BTreeMap<ProjectionId, Position>,
    /// Positions appended below the head, in the order of appending.
    pub(super) late: Vec<Position>,
    pub(super) subscriptions: u64,
    /// How often all open subscriptions were ended: one that was opened before the last time ends.
    pub(super) cuts: u64,
    /// What it says it is, where that is not what it is.
    pub(super) pretended: Option<SourceIdentity>,
    pub(super) filters_types: bool,
    pub(super) without_acks: bool,
    pub(super) admits_one: bool,
    /// Where one subscriber is let in: the projections that have subscribed, each with the number of who is in.
    pub(super) places: BTreeMap<ProjectionId, Option<u64>>,
    /// How many have been let in so far.
    pub(super) let_in: u64,
    pub(super) faults: Faults,
    pub(super) script: VecDeque<SourceFault>,
    unavailable_until: Option<Instant>,
    pub(super) met: FaultCounts,
}

impl Log {
    /// Puts an event in at its position, with the next revision of its stream.
    pub(super) fn insert(&mut self, event: RecordedEvent) {
        let revision = self.revisions.entry(event.stream_id.clone()).or_default();
        let event = RecordedEvent { revision: Some(*revision), ..event };
        *revision += 1;
        self.insert_as_it_is(event);
    }

    pub(super) fn insert_as_it_is(&mut self, event: RecordedEvent) {
        self.next = self.next.max(event.position.get().saturating_add(1));
        let index = self.index_from(event.position.get());
        self.events.insert(index, event);
    }

    /// Draws the next position for an append that is not committed yet.
    pub(super) fn hold(&mut self) -> Position {
        let position = self.next_position();
        self.next = after(Some(position));
        self.held.insert(position);
        position
    }

    pub(super) fn skip_revisions(&mut self, stream_id: StreamId, count: u64) {
        *self.revisions.entry(stream_id).or_default() += count;
    }

    pub(super) fn head(&self) -> Option<Position> {
        self.events.last().map(|event| event.position)
    }

    pub(super) fn next_position(&self) -> Position {
        Position::new(self.next)
    }

    pub(super) fn assert_above_head(&self, position: Position) {
        let head = self.head();
        assert!(
            head < Some(position),
            "position {position} is not above the head {head:?}: `append_late` puts events in below"
        );
    }

    pub(super) fn truncate_below(&mut self, position: Position) {
        self.events.retain(|event| event.position >= position);
    }

    /// Forgets whatever happened from the append at a position on, acks included.
    pub(super) fn restore_before(&mut self, position: Position) {
        let gone = self.events.split_off(self.index_from(position.get()));
        for event in gone.iter().rev() {
            if let Some(revision) = event.revision {
                self.revisions.insert(event.stream_id.clone(), revision);
            }
        }
        self.next = self.next.min(position.get());
        self.held.clear();
        self.late.retain(|late| *late < position);
        self.acked.retain(|_, acked| *acked < position);
        self.cuts += 1;
    }

    /// The index of the first event at or above a position.
    pub(super) fn index_from(&self, position: u64) -> usize {
        self.events.partition_point(|event| event.position.get() < position)
    }

    pub(super) fn at(&self, position: Position) -> Option<&RecordedEvent> {
        self.events.get(self.index_from(position.get())).filter(|event| event.position == position)
    }

    /// Takes a fault from the script if it is the next one there.
    pub(super) fn take_fault(&mut self, fault: SourceFault) -> bool {
        self.script.pop_front_if(|next| *next == fault).is_some()
    }

    /// Whether the next call of this kind is to hang; it counts as one that does.
    pub(super) fn hangs(&mut self, call: SourceCall) -> bool {
        let hangs = self.take_fault(SourceFault::Hang(call));
        self.met.hung += u64::from(hangs);
        hangs
    }

    pub(super) fn fall_silent(&mut self, duration: Duration) -> SourceError {
        self.unavailable_until = Some(Instant::now() + duration);
        self.met.unavailable += 1;
        SourceError::unavailable(format!("memory source: unavailable for {duration:?}"))
    }

    pub(super) fn reachable(&self) -> Result<(), SourceError> {
        let left = self.unavailable_until.map(|until| until.saturating_duration_since(Instant::now()));
        match left {
            Some(left) if !left.is_zero() => {
                Err(SourceError::unavailable(format!("memory source: unavailable for another {left:?}")))
            }
            _ => Ok(()),
        }
    }
}

pub(super) struct MemoryInspector(pub(super) MemorySource);

#[async_trait]
impl SourceInspector for MemoryInspector {
    async fn head(&mut self) -> Result<Option<Position>, SourceError> {
        let log = self.0.lock();
        log.reachable()?;
        Ok(log.head())
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

/// An append that is not committed yet, see [`MemorySource::hold_append`]. Dropped, it is rolled back: its position stays
/// empty for ever.
#[must_use = "an append that is dropped is rolled back"]
pub struct HeldAppend {
    pub(super) source: MemorySource,
    pub(super) position: Position,
    /// Taken by the commit.
    pub(super) event: Option<RecordedEvent>,
}

impl HeldAppend {
    /// Makes the event visible, at the position that was drawn for it.
    ///
    /// # Panics
    /// When the store was put back to a state before this append.
    pub fn commit(mut self) -> Position {
        let event = self.event.take();
        let mut log = self.source.lock();
        let still_held = log.held.remove(&self.position);
        if let Some(event) = event.filter(|_| still_held) {
            log.insert(event);
        }
        self.source.changed(log);
        assert!(still_held, "the store was put back to a state before the append at {} was begun", self.position);
        self.position
    }
}

impl Drop for HeldAppend {
    fn drop(&mut self) {
        if self.event.is_some() {
            let mut log = self.source.lock();
            log.held.remove(&self.position);
            self.source.changed(log);
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
