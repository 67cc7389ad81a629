//! An event that could not be handled, kept with everything needed to understand and mend it.

use bytes::Bytes;
use chrono::{DateTime, Utc};

use crate::event::{EventId, EventType, Position, RecordedEvent, StreamId};

/// Kinds of dead letters that the engine and its targets file; others are the type names of handlers' errors, and `commit:` with
/// the code and the condition of what the target refused.
pub mod kind {
    /// The body did not decode.
    pub const DECODE: &str = "decode";
    /// The handler panicked.
    pub const PANIC: &str = "panic";
    /// The handler took longer than its timeout.
    pub const TIMEOUT: &str = "timeout";
    /// An update or delete that is required to hit a row hit none.
    pub const NO_ROW: &str = "no_row";
    /// A `custom` operation swallowed an error of the database.
    pub const SWALLOWED_ERROR: &str = "custom:swallowed_error";
    /// A `custom` operation left its transaction.
    pub const LEFT_TRANSACTION: &str = "custom:left_transaction";
}

/// Why an event becomes a dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// `decode`, `panic`, `timeout`, the type name of the error, or `commit:` and a code where the target refused it.
    pub kind: String,
    /// The error's message.
    pub message: String,
    /// The chain of sources or the backtrace; may be empty.
    pub detail: String,
    /// How often the handler was called.
    pub attempts: u32,
}

/// A dead letter as it stands in the table.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// The number of the row: the key for paging.
    pub id: i64,
    /// The event's position.
    pub position: Position,
    /// The event's stream.
    pub stream_id: StreamId,
    /// The event's type.
    pub event_type: EventType,
    /// The event's id.
    pub event_id: EventId,
    /// The body, as the source had it.
    pub data: Bytes,
    /// The metadata, as the source had it.
    pub metadata: Bytes,
    /// Why.
    pub failure: Failure,
    /// When the event was recorded, where the source knows.
    pub occurred_at: Option<DateTime<Utc>>,
    /// When it was dead-lettered.
    pub failed_at: DateTime<Utc>,
}

/// An event on its way into the dead-letter table.
#[derive(Clone, Copy, Debug)]
pub struct NewDeadLetter<'a> {
    /// The event.
    pub event: &'a RecordedEvent,
    /// Why.
    pub failure: &'a Failure,
}
