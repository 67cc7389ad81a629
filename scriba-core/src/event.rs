//! What a source delivers and what a handler gets to see of it.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;

use crate::error::DecodeError;

/// The global position of an event in its source: strictly increasing over all streams, 0 allowed.
///
/// "Nothing seen yet" is `Option::<Position>::None`, never a number, because 0 is a real event.
/// Positions order events; they are not stable when an event store is rebuilt, so they make no
/// idempotency keys ([`RecordedEvent::id`] does).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(u64);

impl Position {
    /// A position from its number.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The number as a signed one, as databases store it.
    ///
    /// # Errors
    /// A position above `i64::MAX` cannot be stored.
    pub fn to_i64(self) -> Result<i64, PositionOutOfRange> {
        i64::try_from(self.0).map_err(|_| PositionOutOfRange(i128::from(self.0)))
    }

    /// A position from a signed number.
    ///
    /// # Errors
    /// A negative number is no position.
    pub fn from_i64(value: i64) -> Result<Self, PositionOutOfRange> {
        u64::try_from(value).map(Self).map_err(|_| PositionOutOfRange(i128::from(value)))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number that is no position: negative, or above `i64::MAX` where a signed number stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a position: positions run from 0 to 9223372036854775807")]
pub struct PositionOutOfRange(pub i128);

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }

        impl From<Arc<str>> for $name {
            fn from(text: Arc<str>) -> Self {
                Self(text)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                &*self.0 == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                &*self.0 == *other
            }
        }
    };
}

text_id! {
    /// The id of an event, unique over the whole source: the key for idempotency outside the read model.
    EventId
}
text_id! {
    /// The stream an event belongs to. Any length, any text.
    StreamId
}
text_id! {
    /// The type of an event, as the source names it. Sources share one allocation among events of a type.
    EventType
}

/// An event as its source recorded it.
#[derive(Clone, Debug)]
pub struct RecordedEvent {
    /// Unique over the source.
    pub id: EventId,
    /// The stream it belongs to.
    pub stream_id: StreamId,
    /// Its type, by which [`Events`] decodes it.
    pub event_type: EventType,
    /// Where it stands among all events of the source.
    pub position: Position,
    /// Its number within the stream, where the source keeps one.
    pub revision: Option<u64>,
    /// The body, as stored.
    pub data: Bytes,
    /// The metadata, as stored; empty where there is none.
    pub metadata: Bytes,
    /// When it was recorded, where the source knows.
    pub occurred_at: Option<DateTime<Utc>>,
}

impl RecordedEvent {
    /// Bytes this event takes up in memory, as the byte caps count them: texts and bodies plus a
    /// fixed sum for the structures around them.
    pub fn size(&self) -> usize {
        const STRUCTURES: usize = 256;
        STRUCTURES + self.id.as_str().len() + self.stream_id.as_str().len() + self.data.len() + self.metadata.len()
    }

    /// The metadata decoded as JSON.
    ///
    /// # Errors
    /// When the metadata is not the JSON of a `T`.
    pub fn metadata_as<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_slice(&self.metadata)
    }
}

/// What a handler is told beside the decoded event: the recorded event (reached through `Deref`, so
/// `meta.position` reads its position) and the circumstances of this call.
#[derive(Clone, Debug)]
pub struct EventMeta {
    event: RecordedEvent,
    /// 1 for the first call with this event, 2 for the first retry, and so on.
    pub attempt: u32,
    /// True up to the position at which this version of the projection first caught up with its
    /// source: the time to leave out e-mails and other effects outside the read model.
    pub replay: bool,
}

impl EventMeta {
    /// The circumstances of a first attempt.
    pub fn new(event: RecordedEvent, replay: bool) -> Self {
        Self { event, attempt: 1, replay }
    }

    /// The event as recorded.
    pub fn event(&self) -> &RecordedEvent {
        &self.event
    }
}

impl std::ops::Deref for EventMeta {
    type Target = RecordedEvent;

    fn deref(&self) -> &RecordedEvent {
        &self.event
    }
}

/// The set of events a handler takes, decoded by event type. Derived for an enum; [`RawEvent`] takes
/// every event undecoded.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be decoded from events",
    label = "not a set of events",
    note = "write `#[derive(Events)]` on an enum with one variant per event type, or use `RawEvent` for undecoded bytes"
)]
pub trait Events: Sized + Send + 'static {
    /// The event types (aliases included) that are delivered, or `None` for all of them.
    fn event_types() -> Option<&'static [&'static str]>;

    /// Decodes one event.
    ///
    /// # Errors
    /// When the body is not what its type promises, or the type is none of [`Events::event_types`].
    /// The event is dead-lettered with the kind `decode`, without retries.
    fn decode(event: &RecordedEvent) -> Result<Self, DecodeError>;
}

/// Every event, undecoded.
#[derive(Clone, Debug)]
pub struct RawEvent(pub RecordedEvent);

impl Events for RawEvent {
    fn event_types() -> Option<&'static [&'static str]> {
        None
    }

    fn decode(event: &RecordedEvent) -> Result<Self, DecodeError> {
        Ok(Self(event.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_survives_the_signed_numbers_of_a_database_and_refuses_what_does_not_fit() {
        assert_eq!(Position::from_i64(0), Ok(Position::new(0)));
        assert_eq!(Position::new(i64::MAX as u64).to_i64(), Ok(i64::MAX));
        assert_eq!(Position::new(u64::MAX).to_i64(), Err(PositionOutOfRange(i128::from(u64::MAX))));
        assert_eq!(Position::from_i64(-1), Err(PositionOutOfRange(-1)));
    }
}
