//! What a persistent subscription is created with.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::record::{LogPosition, Record};
use super::store::Store;

/// Where a subscription reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    Stream(Arc<str>),
    All(Filter),
}

impl Source {
    /// The name of the stream, unless it is the whole log.
    pub(crate) fn stream(&self) -> Option<&str> {
        match self {
            Self::Stream(stream) => Some(stream),
            Self::All(_) => None,
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.stream().unwrap_or("$all")
    }

    pub(crate) fn admits(&self, record: &Record) -> bool {
        match self {
            Self::Stream(_) => true,
            Self::All(filter) => filter.admits(record),
        }
    }
}

/// Which records of the log a reader wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Filter {
    #[default]
    None,
    Stream(Pattern),
    EventType(Pattern),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Begins with one of these.
    Prefix(Vec<String>),
    /// Does not begin with `$`: what clients in Rust and JavaScript send to leave out the server's own events.
    NotSystem,
    /// The same, and two old names besides: what the client in Python sends.
    NotInternal,
}

impl Filter {
    pub(crate) fn admits(&self, record: &Record) -> bool {
        match self {
            Self::None => true,
            Self::Stream(pattern) => pattern.matches(&record.stream),
            Self::EventType(pattern) => pattern.matches(&record.event_type),
        }
    }
}

impl Pattern {
    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Prefix(prefixes) => prefixes.iter().any(|prefix| text.starts_with(prefix.as_str())),
            Self::NotSystem => !text.is_empty() && !text.starts_with('$'),
            Self::NotInternal => {
                let number = text.strip_prefix("PersistentConfig").unwrap_or_default();
                let is_config = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
                !(text.len() > 1 && text.starts_with('$') || is_config || text == "Result")
            }
        }
    }
}

/// A place in what a subscription reads. Places of one source are compared with each other only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Revision(u64),
    Log(LogPosition),
}

impl Place {
    /// Reads what a checkpoint holds.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        LogPosition::parse(text).map(Self::Log).or_else(|| text.parse().ok().map(Self::Revision))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Revision(revision) => revision.fmt(f),
            Self::Log(position) => position.fmt(f),
        }
    }
}

/// Where a subscription without a checkpoint begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Beginning,
    /// Behind what is there when the subscription is loaded.
    End,
    /// At this place, inclusive.
    At(Place),
}

impl Start {
    pub(crate) fn resolve(self, source: &Source, store: &Store) -> Place {
        match (self, source) {
            (Self::At(place), _) => place,
            (Self::Beginning, Source::Stream(_)) => Place::Revision(0),
            (Self::Beginning, Source::All(_)) => Place::Log(LogPosition::default()),
            (Self::End, Source::Stream(stream)) => {
                Place::Revision(store.current(stream).map_or(0, |revision| revision.saturating_add(1)))
            }
            (Self::End, Source::All(_)) => Place::Log(store.end()),
        }
    }

    /// Why a server refuses to start there.
    pub(crate) fn refusal(self, store: &Store) -> Option<String> {
        let Self::At(Place::Log(LogPosition { commit, prepare })) = self else { return None };
        let reason = if prepare > commit {
            "prepare position must be less than or equal to the commit position."
        } else if commit > store.last_commit() {
            "commit position must be less than or equal to the last commit position in the transaction file."
        } else {
            return None;
        };
        Some(format!("Invalid Start From position: {reason}"))
    }

    /// As `GetInfo` writes it.
    pub(crate) fn text(self, source: &Source) -> String {
        match (self, source) {
            (Self::At(place), _) => place.to_string(),
            (Self::Beginning, Source::Stream(_)) => "0".to_owned(),
            (Self::Beginning, Source::All(_)) => "C:0/P:0".to_owned(),
            (Self::End, Source::Stream(_)) => "-1".to_owned(),
            (Self::End, Source::All(_)) => "C:-1/P:-1".to_owned(),
        }
    }
}

/// Which consumer gets an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strategy {
    RoundRobin,
    DispatchToSingle,
    /// By the stream of the event.
    Pinned,
}

impl Strategy {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "RoundRobin" => Some(Self::RoundRobin),
            "DispatchToSingle" => Some(Self::DispatchToSingle),
            "Pinned" | "PinnedByCorrelation" => Some(Self::Pinned),
            _ => None,
        }
    }
}

/// Settings as they are on the server, which has no defaults of its own.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) resolve_links: bool,
    pub(crate) start: Start,
    /// Zero: out of time at the next tick.
    pub(crate) message_timeout: Duration,
    pub(crate) max_retry_count: u32,
    /// `None`: time makes no checkpoint.
    pub(crate) checkpoint_after: Option<Duration>,
    pub(crate) min_checkpoint_count: u32,
    pub(crate) max_checkpoint_count: u32,
    pub(crate) history_buffer_size: u32,
    pub(crate) read_batch_size: u32,
    pub(crate) live_buffer_size: u32,
    /// Zero: any number.
    pub(crate) max_subscriber_count: u32,
    pub(crate) strategy: Strategy,
    /// The strategy by the name it was given.
    pub(crate) strategy_name: String,
    pub(crate) extra_statistics: bool,
}

impl Settings {
    /// Why a server refuses to make a group of these settings.
    pub(crate) fn refusal(&self) -> Option<String> {
        let reason = "Specified argument was out of the range of valid values. \
                      (Parameter 'ReadBatchSize may not be greater than or equal to BufferSize')";
        (self.read_batch_size >= self.history_buffer_size).then(|| reason.to_owned())
    }
}
