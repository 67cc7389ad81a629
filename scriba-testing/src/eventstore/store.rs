//! Streams and log of the double.
//!
//! What standard projections of a server do some time later (`$ce-`, `$et-`), an append does here before it returns.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use uuid::Uuid;

use super::record::{DELETED, Found, LogPosition, METADATA, NewEvent, Record, STREAM_DELETED};

/// What an append expects of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    Any,
    NoStream,
    StreamExists,
    Revision(u64),
}

/// Where an append ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Revision of the last event; `None` when the stream has none.
    pub revision: Option<u64>,
    /// Position of the last event; `None` when nothing was written.
    pub position: Option<LogPosition>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AppendError {
    WrongExpectedVersion { current: Option<u64> },
    Deleted,
}

/// What a reader of a stream finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamState {
    /// Never written, or deleted softly.
    Missing,
    /// There, though all its events may be truncated.
    Live,
    /// Under a tombstone.
    Deleted,
}

#[derive(Debug, Default)]
struct Stream {
    records: BTreeMap<u64, Arc<Record>>,
    /// Those of `records`, to tell an append that is sent twice.
    ids: HashMap<Uuid, u64>,
    next: u64,
    truncate_before: u64,
    max_count: Option<u64>,
    tombstoned: bool,
}

impl Stream {
    fn current(&self) -> Option<u64> {
        self.next.checked_sub(1)
    }

    fn is_softly_deleted(&self) -> bool {
        self.truncate_before == DELETED
    }

    fn first_visible(&self) -> u64 {
        let by_count = self.max_count.map_or(0, |count| self.next.saturating_sub(count));
        self.truncate_before.max(by_count)
    }

    /// The last record of an append of these ids from `first` on, if that is what stands there.
    fn repeated(&self, first: u64, events: &[NewEvent]) -> Option<&Arc<Record>> {
        let mut last = None;
        for (revision, event) in (first..).zip(events) {
            last = Some(self.records.get(&revision).filter(|record| record.id == event.id)?);
        }
        last
    }
}

/// What a server has written about itself before the first event of a client, in bytes: no event begins at 0.
const PREAMBLE: u64 = 142;

#[derive(Debug)]
pub(crate) struct Store {
    log: BTreeMap<LogPosition, Arc<Record>>,
    streams: HashMap<Arc<str>, Stream>,
    /// Where the next record begins, in bytes.
    end: u64,
}

impl Default for Store {
    fn default() -> Self {
        Self { log: BTreeMap::new(), streams: HashMap::new(), end: PREAMBLE }
    }
}

impl Store {
    /// Appends all of the events or none.
    pub(crate) fn append(
        &mut self,
        stream: &str,
        expected: Expected,
        events: Vec<NewEvent>,
    ) -> Result<Written, AppendError> {
        if let Some(written) = self.check(stream, expected, &events)? {
            return Ok(written);
        }
        self.revive(stream);
        let mut written = Written { revision: self.current(stream), position: None };
        for event in events {
            let record = self.write(stream, event);
            written = Written { revision: Some(record.revision), position: Some(record.position) };
        }
        Ok(written)
    }

    /// Appends the events as an explicit transaction: each begins at a position of its own, and all are committed at
    /// one that is higher than any of these.
    pub(crate) fn append_transaction(&mut self, stream: &str, events: Vec<NewEvent>) -> Result<Written, AppendError> {
        self.check(stream, Expected::Any, &[])?;
        self.revive(stream);
        let mut prepared = Vec::new();
        for event in events {
            prepared.push((self.advance(event.size(stream)), event));
        }
        let commit = self.advance(96);
        let mut written = Written { revision: self.current(stream), position: None };
        for (prepare, event) in prepared {
            let record = self.insert(stream, event, LogPosition { commit, prepare });
            written = Written { revision: Some(record.revision), position: Some(record.position) };
        }
        Ok(written)
    }

    /// Deletes a stream so that it can be written again: its events are hidden, and numbering goes on.
    pub(crate) fn delete(&mut self, stream: &str, expected: Expected) -> Result<LogPosition, AppendError> {
        self.check(stream, expected, &[])?;
        Ok(self.write_metadata(stream, &serde_json::json!({ "$tb": DELETED })))
    }

    /// Deletes a stream for ever.
    pub(crate) fn tombstone(&mut self, stream: &str, expected: Expected) -> Result<LogPosition, AppendError> {
        self.check(stream, expected, &[])?;
        let entry = self.streams.entry(stream.into()).or_default();
        entry.next = DELETED;
        let record = self.write(stream, NewEvent { json: false, ..NewEvent::json(STREAM_DELETED, Bytes::new()) });
        self.streams.entry(stream.into()).or_default().tombstoned = true;
        Ok(record.position)
    }

    /// Hides what stands below a revision.
    pub(crate) fn truncate(&mut self, stream: &str, before: u64) {
        self.write_metadata(stream, &serde_json::json!({ "$tb": before }));
    }

    /// Takes what is hidden by truncation or deletion out of the log. Gives back how many records that were.
    pub(crate) fn scavenge(&mut self) -> usize {
        let mut removed = 0;
        for stream in self.streams.values_mut() {
            let kept = match stream.first_visible() {
                _ if stream.tombstoned => stream.records.split_off(&DELETED),
                DELETED => BTreeMap::new(),
                first => stream.records.split_off(&first),
            };
            for record in std::mem::replace(&mut stream.records, kept).into_values() {
                stream.ids.remove(&record.id);
                self.log.remove(&record.position);
                removed += 1;
            }
        }
        removed
    }

    /// Takes one record out of the log.
    pub(crate) fn remove(&mut self, stream: &str, revision: u64) -> bool {
        let Some(stream) = self.streams.get_mut(stream) else { return false };
        let Some(record) = stream.records.remove(&revision) else { return false };
        stream.ids.remove(&record.id);
        self.log.remove(&record.position);
        true
    }

    pub(crate) fn state(&self, stream: &str) -> StreamState {
        match self.streams.get(stream) {
            Some(stream) if stream.tombstoned => StreamState::Deleted,
            Some(stream) if stream.next > 0 && !stream.is_softly_deleted() => StreamState::Live,
            _ => StreamState::Missing,
        }
    }

    /// Revision of the last event ever written to a stream, visible or not.
    pub(crate) fn current(&self, stream: &str) -> Option<u64> {
        self.streams.get(stream).and_then(Stream::current)
    }

    /// The lowest revision that a reader of the stream can get.
    pub(crate) fn first_visible(&self, stream: &str) -> u64 {
        self.streams.get(stream).map_or(0, Stream::first_visible)
    }

    /// Visible records of a stream from a revision on.
    pub(crate) fn forwards(&self, stream: &str, from: u64) -> impl Iterator<Item = &Arc<Record>> {
        self.visible(stream)
            .flat_map(move |(records, first)| records.range(from.max(first)..))
            .map(|(_, record)| record)
    }

    /// Visible records of a stream from a revision down.
    pub(crate) fn backwards(&self, stream: &str, from: u64) -> impl Iterator<Item = &Arc<Record>> {
        self.visible(stream)
            .filter(move |(_, first)| *first <= from)
            .flat_map(move |(records, first)| records.range(first..=from).rev())
            .map(|(_, record)| record)
    }

    /// Records of the log from a position on.
    pub(crate) fn all_forwards(&self, from: LogPosition) -> impl Iterator<Item = &Arc<Record>> {
        self.log.range(from..).map(|(_, record)| record).filter(|record| !record.is_hidden())
    }

    /// Records of the log below a position, the highest first.
    pub(crate) fn all_backwards(&self, below: LogPosition) -> impl Iterator<Item = &Arc<Record>> {
        self.log.range(..below).rev().map(|(_, record)| record).filter(|record| !record.is_hidden())
    }

    /// The position that the next record will have at least.
    pub(crate) fn end(&self) -> LogPosition {
        LogPosition::both(self.end)
    }

    /// The commit position of the last record.
    pub(crate) fn last_commit(&self) -> u64 {
        self.log.last_key_value().map_or(0, |(position, _)| position.commit)
    }

    /// A record with what it links to, if it is a link and the reader asks for that.
    pub(crate) fn find(&self, record: &Arc<Record>, resolve_links: bool) -> Found {
        if !(resolve_links && record.is_link()) {
            return Found::plain(record.clone());
        }
        let event = record.target().and_then(|(revision, stream)| {
            let stream = self.streams.get(stream)?;
            let visible = stream.tombstoned || revision >= stream.first_visible();
            stream.records.get(&revision).filter(|_| visible).cloned()
        });
        Found { event, link: Some(record.clone()), original: record.clone() }
    }

    fn visible(&self, stream: &str) -> impl Iterator<Item = (&BTreeMap<u64, Arc<Record>>, u64)> {
        self.streams.get(stream).map(|stream| (&stream.records, stream.first_visible())).into_iter()
    }

    /// Whether a stream is what an append expects. `Some` when the append was done before.
    fn check(&self, name: &str, expected: Expected, events: &[NewEvent]) -> Result<Option<Written>, AppendError> {
        let empty = Stream::default();
        let stream = self.streams.get(name).unwrap_or(&empty);
        if stream.tombstoned {
            return Err(AppendError::Deleted);
        }
        let current = stream.current();
        let exists = current.is_some() && !stream.is_softly_deleted();
        let (fits, repeated_from) = match expected {
            Expected::Any => {
                let first = events.first().and_then(|event| stream.ids.get(&event.id));
                (true, first.copied())
            }
            Expected::StreamExists => (exists, None),
            Expected::NoStream => (!exists, Some(0)),
            Expected::Revision(revision) => (current == Some(revision), Some(revision.saturating_add(1))),
        };
        if let Some(record) = repeated_from.and_then(|first| stream.repeated(first, events)) {
            return Ok(Some(Written { revision: Some(record.revision), position: Some(record.position) }));
        }
        if fits { Ok(None) } else { Err(AppendError::WrongExpectedVersion { current }) }
    }

    /// A stream that was deleted softly comes back by an append, with nothing of what it had before.
    fn revive(&mut self, name: &str) {
        if let Some(stream) = self.streams.get(name).filter(|stream| stream.is_softly_deleted()) {
            let next = stream.next;
            self.write_metadata(name, &serde_json::json!({ "$tb": next }));
        }
    }

    pub(crate) fn write_metadata(&mut self, stream: &str, settings: &Value) -> LogPosition {
        self.write(&format!("$${stream}"), NewEvent::json(METADATA, settings.to_string())).position
    }

    fn write(&mut self, stream: &str, event: NewEvent) -> Arc<Record> {
        let at = LogPosition::both(self.advance(event.size(stream)));
        self.insert(stream, event, at)
    }

    fn advance(&mut self, bytes: u64) -> u64 {
        let at = self.end;
        self.end += bytes;
        at
    }

    fn insert(&mut self, name: &str, event: NewEvent, position: LogPosition) -> Arc<Record> {
        let name: Arc<str> = name.into();
        let stream = self.streams.entry(name.clone()).or_default();
        let record = Arc::new(Record::new(event, name, stream.next, position));
        stream.records.insert(record.revision, record.clone());
        stream.ids.insert(record.id, record.revision);
        if stream.next < DELETED {
            stream.next += 1;
        }
        self.log.insert(position, record.clone());
        self.take_settings(&record);
        self.project(&record);
        record
    }

    fn take_settings(&mut self, record: &Record) {
        if let Some(name) = record.stream.strip_prefix("$$").filter(|_| record.event_type == METADATA) {
            let settings: Value = serde_json::from_slice(&record.data).unwrap_or_default();
            let stream = self.streams.entry(name.into()).or_default();
            stream.truncate_before = settings["$tb"].as_u64().unwrap_or(0);
            stream.max_count = settings["$maxCount"].as_u64();
        }
    }

    /// The links of `$by_category` and `$by_event_type`.
    fn project(&mut self, record: &Arc<Record>) {
        // A soft delete is a record of `$$s` and counts as one of `s`.
        let deletes = record.event_type == METADATA && self.current_truncation(&record.stream) == Some(DELETED);
        let stream = if deletes { record.stream.trim_start_matches("$$") } else { &record.stream };
        if stream.starts_with('$') || record.is_link() {
            return;
        }
        let mut links = Vec::new();
        if let Some((category, _)) = stream.split_once('-') {
            links.push(format!("$ce-{category}"));
        }
        if !deletes {
            links.push(format!("$et-{}", record.event_type));
        }
        for link in links {
            self.write(&link, NewEvent::link(record));
        }
    }

    fn current_truncation(&self, metadata_stream: &str) -> Option<u64> {
        let stream = metadata_stream.strip_prefix("$$")?;
        self.streams.get(stream).map(|stream| stream.truncate_before)
    }
}

#[cfg(test)]
mod tests;
