//! The memory source passes.

use async_trait::async_trait;
use chrono::Utc;
use scriba_core::{Position, RecordedEvent, Source};
use scriba_testing::conformance::source::{Cut, HoldOpen, NewEvent, Restore, SourceBed, Truncate};
use scriba_testing::{HeldAppend, MemorySource};

pub(crate) struct MemoryBed(pub(crate) MemorySource);

#[async_trait]
impl SourceBed for MemoryBed {
    async fn new() -> Self {
        Self(MemorySource::new().filters_types(true).admits_one_subscriber())
    }

    async fn source(&self) -> Box<dyn Source> {
        Box::new(self.0.clone())
    }

    async fn append(&self, events: Vec<NewEvent>) -> Vec<Position> {
        events.into_iter().map(|event| self.0.append_event(recorded(event))).collect()
    }
}

/// An event as a store would have it, but for position and revision.
fn recorded(event: NewEvent) -> RecordedEvent {
    RecordedEvent {
        id: event.id.into(),
        stream_id: event.stream_id.into(),
        event_type: event.event_type.into(),
        position: Position::new(0),
        revision: None,
        data: event.data,
        metadata: event.metadata,
        occurred_at: Some(Utc::now()),
    }
}

#[async_trait]
impl Truncate for MemoryBed {
    async fn truncate_below(&self, position: Position) {
        self.0.truncate_below(position);
    }
}

#[async_trait]
impl Restore for MemoryBed {
    async fn restore_before(&self, position: Position) {
        self.0.restore_before(position);
    }
}

#[async_trait]
impl Cut for MemoryBed {
    async fn cut(&self) {
        self.0.cut();
    }
}

#[async_trait]
impl HoldOpen for MemoryBed {
    type Held = HeldAppend;

    async fn hold(&self, event: NewEvent) -> HeldAppend {
        self.0.hold_append(event.stream_id, event.event_type, event.data)
    }

    async fn commit(&self, held: HeldAppend) -> Position {
        held.commit()
    }
}

mod memory {
    scriba_testing::source_conformance!(
        super::MemoryBed: exact_start, filters, head, passed_over, several, any_bytes, metadata, long_ids, nul_in_ids,
        revisions, times, keeps_position, one_place, truncate, restore, cut, hold_open
    );
}
