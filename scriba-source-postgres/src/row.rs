//! From the bytes of a row to an event.

use std::borrow::Cow;
use std::collections::HashMap;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use scriba_core::source::SourceError;
use scriba_core::{EventId, EventType, Position, RecordedEvent, StreamId};
use sqlx::Row;
use sqlx::ValueRef;
use sqlx::postgres::{PgRow, PgValueRef};
use sqlx::types::Uuid;

use crate::catalog::{Catalog, Kind, Kinds};
use crate::log::Columns;

/// More types than any log has by intention; beyond them each event gets a text of its own.
const TYPES_SHARED: usize = 4_096;
/// From 1970, by which time is counted, to 2000, by which Postgres counts it.
const POSTGRES_EPOCH_MICROS: i64 = 946_684_800_000_000;

/// Columns of a page: what the server is comes first.
pub(crate) const BOOT: usize = 0;
pub(crate) const REPLICA: usize = 1;
const POSITION: usize = 2;
const ID: usize = 3;
const STREAM_ID: usize = 4;
const TYPE: usize = 5;
const DATA: usize = 6;
const METADATA: usize = 7;
const OCCURRED_AT: usize = 8;
const REVISION: usize = 9;

/// Turns rows into events.
#[derive(Debug)]
pub(crate) struct Rows {
    log: String,
    kinds: Kinds,
    names: Columns,
    /// One allocation for each type.
    types: HashMap<String, EventType>,
}

impl Rows {
    pub(crate) fn new(catalog: &Catalog, names: Columns) -> Self {
        Self { log: catalog.name.clone(), kinds: catalog.kinds, names, types: HashMap::new() }
    }

    /// The position in a row of a page; `None` in the one that only tells what the server is.
    pub(crate) fn position(row: &PgRow) -> Result<Option<i64>, SourceError> {
        Ok(bytes(&raw(row, POSITION)?)?.map(integer))
    }

    /// The event in a row of a page.
    pub(crate) fn event(&mut self, row: &PgRow, position: i64) -> Result<RecordedEvent, SourceError> {
        let position = Position::from_i64(position).map_err(|error| {
            SourceError::unusable(format!("event log {}: {error}: renumber the events below 0", self.log))
        })?;
        let null = |column: &str| {
            SourceError::unusable(format!(
                "event log {}: the event at position {position} has NULL in column {column:?}: fill it in, and make the column NOT NULL",
                self.log
            ))
        };
        let id = text(&raw(row, ID)?, self.kinds.id)?.ok_or_else(|| null(&self.names.id))?.as_ref().into();
        let stream_id = StreamId::from(
            text(&raw(row, STREAM_ID)?, self.kinds.stream_id)?.ok_or_else(|| null(&self.names.stream_id))?.as_ref(),
        );
        let event_type = raw(row, TYPE)?;
        let event_type = text(&event_type, Kind::Plain)?.ok_or_else(|| null(&self.names.event_type))?;
        let event_type = self.shared_type(&event_type);
        Ok(RecordedEvent {
            id,
            stream_id,
            event_type,
            position,
            revision: bytes(&raw(row, REVISION)?)?.and_then(|bytes| integer(bytes).try_into().ok()),
            data: body(&raw(row, DATA)?, self.kinds.data)?,
            metadata: body(&raw(row, METADATA)?, self.kinds.metadata)?,
            occurred_at: bytes(&raw(row, OCCURRED_AT)?)?.and_then(time),
        })
    }

    /// A row that is not behind the one before it.
    pub(crate) fn out_of_order(&self, position: i64) -> SourceError {
        SourceError::unusable(format!(
            "event log {}: there is more than one event at position {position}: renumber them, and make column {:?} unique",
            self.log, self.names.position
        ))
    }

    fn shared_type(&mut self, name: &str) -> EventType {
        if let Some(known) = self.types.get(name) {
            return known.clone();
        }
        let new = EventType::from(name);
        if self.types.len() < TYPES_SHARED {
            self.types.insert(name.to_owned(), new.clone());
        }
        new
    }
}

/// The id in the first column of a row.
pub(crate) fn event_id(row: &PgRow, kind: Kind) -> Result<Option<EventId>, SourceError> {
    Ok(text(&raw(row, 0)?, kind)?.map(|id| EventId::from(id.as_ref())))
}

fn raw(row: &PgRow, column: usize) -> Result<PgValueRef<'_>, SourceError> {
    row.try_get_raw(column).map_err(SourceError::ended)
}

fn bytes<'r>(value: &PgValueRef<'r>) -> Result<Option<&'r [u8]>, SourceError> {
    if value.is_null() { Ok(None) } else { value.as_bytes().map(Some).map_err(SourceError::ended) }
}

/// A text that identifies something. A database without an encoding can hold what is no UTF-8: it is replaced.
fn text<'r>(value: &PgValueRef<'r>, kind: Kind) -> Result<Option<Cow<'r, str>>, SourceError> {
    Ok(bytes(value)?.map(|bytes| match kind {
        Kind::Integer => integer(bytes).to_string().into(),
        Kind::Uuid => Uuid::from_slice(bytes).unwrap_or_default().to_string().into(),
        _ => String::from_utf8_lossy(bytes),
    }))
}

/// A body, copied: a slice of the row would keep the whole read buffer alive, which nobody counts.
fn body(value: &PgValueRef<'_>, kind: Kind) -> Result<Bytes, SourceError> {
    let bytes = bytes(value)?.unwrap_or_default();
    Ok(match (kind, bytes) {
        (Kind::Jsonb, [1, text @ ..]) => Bytes::copy_from_slice(text),
        (Kind::Jsonb, [version, ..]) => {
            return Err(SourceError::unusable(format!(
                "jsonb comes in version {version}; only version 1 is known: read the column as json or text"
            )));
        }
        (_, bytes) => Bytes::copy_from_slice(bytes),
    })
}

/// A big-endian number of at most 8 bytes, sign and all.
fn integer(bytes: &[u8]) -> i64 {
    let sign = if bytes.first().is_some_and(|first| first & 0x80 != 0) { -1 } else { 0 };
    bytes.iter().take(8).fold(sign, |number, byte| (number << 8) | i64::from(*byte))
}

/// A time; `None` for infinity and beyond.
fn time(bytes: &[u8]) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp_micros(integer(bytes).checked_add(POSTGRES_EPOCH_MICROS)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_every_width_keep_their_sign() {
        assert_eq!(integer(&7_i16.to_be_bytes()), 7);
        assert_eq!(integer(&(-7_i16).to_be_bytes()), -7);
        assert_eq!(integer(&i32::MIN.to_be_bytes()), i64::from(i32::MIN));
        for number in [0, 1, -1, i64::MIN, i64::MAX] {
            assert_eq!(integer(&number.to_be_bytes()), number);
        }
    }

    #[test]
    fn infinite_times_are_none() {
        assert_eq!(time(&i64::MAX.to_be_bytes()), None);
        assert_eq!(time(&i64::MIN.to_be_bytes()), None);
        assert_eq!(
            time(&0_i64.to_be_bytes()).map(|time| time.to_rfc3339()).as_deref(),
            Some("2000-01-01T00:00:00+00:00")
        );
    }
}
