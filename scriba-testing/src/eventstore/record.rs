//! What the log of the double is made of: records, their positions, and links between them.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use uuid::Uuid;

/// Type of a record that points at another one.
pub(crate) const LINK: &str = "$>";
/// Type of the records of a stream `$$s`, which hold the settings of the stream `s`.
pub(crate) const METADATA: &str = "$metadata";
/// Type of the record that a tombstone leaves behind.
pub(crate) const STREAM_DELETED: &str = "$streamDeleted";
/// The revision of a tombstone, and the `$tb` of a stream that was deleted softly.
pub(crate) const DELETED: u64 = i64::MAX as u64;

/// Where a record stands in the log (`$all`).
///
/// The two numbers are equal but for records of an explicit transaction, which share the commit position.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogPosition {
    /// What makes the order of the log.
    pub commit: u64,
    /// Where the record itself begins.
    pub prepare: u64,
}

impl LogPosition {
    pub(crate) fn both(at: u64) -> Self {
        Self { commit: at, prepare: at }
    }

    /// The lowest position above this one.
    pub(crate) fn successor(self) -> Self {
        Self { prepare: self.prepare.saturating_add(1), ..self }
    }

    /// Reads what [`LogPosition`] writes as text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (commit, prepare) = text.strip_prefix("C:")?.split_once("/P:")?;
        Some(Self { commit: commit.parse().ok()?, prepare: prepare.parse().ok()? })
    }
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "C:{}/P:{}", self.commit, self.prepare)
    }
}

/// An event to be appended.
#[derive(Debug, Clone)]
pub struct NewEvent {
    /// Makes an append that is sent twice count once.
    pub id: Uuid,
    /// The event type.
    pub event_type: String,
    /// Whether the event says that its body is JSON.
    pub json: bool,
    /// The body.
    pub data: Bytes,
    /// Custom metadata; empty for none.
    pub metadata: Bytes,
}

impl NewEvent {
    /// A JSON event with an id of its own and no metadata.
    pub fn json(event_type: impl Into<String>, data: impl Into<Bytes>) -> Self {
        Self {
            id: Uuid::new_v4(),
            event_type: event_type.into(),
            json: true,
            data: data.into(),
            metadata: Bytes::new(),
        }
    }

    pub(crate) fn link(target: &Record) -> Self {
        let origin = serde_json::json!({ "$o": &*target.stream, "$causedBy": target.id.to_string() });
        Self {
            id: Uuid::new_v4(),
            event_type: LINK.to_owned(),
            json: false,
            data: Bytes::from(format!("{}@{}", target.revision, target.stream)),
            metadata: Bytes::from(origin.to_string()),
        }
    }

    /// About what a record of it takes in the log of a server.
    pub(crate) fn size(&self, stream: &str) -> u64 {
        (96 + stream.len() + self.event_type.len() + self.data.len() + self.metadata.len()) as u64
    }
}

/// An event as it stands in the log.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) id: Uuid,
    pub(crate) stream: Arc<str>,
    pub(crate) revision: u64,
    pub(crate) position: LogPosition,
    pub(crate) event_type: String,
    pub(crate) json: bool,
    pub(crate) data: Bytes,
    pub(crate) metadata: Bytes,
    /// Units of 100 ns since 1970, as the protocol carries it.
    pub(crate) created: u64,
}

impl Record {
    pub(crate) fn new(event: NewEvent, stream: Arc<str>, revision: u64, position: LogPosition) -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            id: event.id,
            stream,
            revision,
            position,
            event_type: event.event_type,
            json: event.json,
            data: event.data,
            metadata: event.metadata,
            created: u64::try_from(since_epoch.as_nanos() / 100).unwrap_or(u64::MAX),
        }
    }

    pub(crate) fn is_link(&self) -> bool {
        self.event_type == LINK
    }

    /// Revision and stream a link points at.
    pub(crate) fn target(&self) -> Option<(u64, &str)> {
        let (revision, stream) = std::str::from_utf8(&self.data).ok()?.split_once('@')?;
        Some((revision.parse().ok()?, stream))
    }

    /// Whether it is one of those that neither reads of `$all` nor subscriptions to it show.
    pub(crate) fn is_hidden(&self) -> bool {
        self.stream
            .strip_prefix("$persistentsubscription-$all::")
            .is_some_and(|group| group.ends_with("-checkpoint") || group.ends_with("-parked"))
            || &*self.stream == "$epoch-information"
    }
}

/// A record as a reader gets it: with the link it was found through, where there is one.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// Absent when the link points at nothing.
    pub(crate) event: Option<Arc<Record>>,
    pub(crate) link: Option<Arc<Record>>,
    /// The record that was read: the link, or the event itself. Its id is what is acked.
    pub(crate) original: Arc<Record>,
}

impl Found {
    pub(crate) fn plain(record: Arc<Record>) -> Self {
        Self { event: Some(record.clone()), link: None, original: record }
    }
}
