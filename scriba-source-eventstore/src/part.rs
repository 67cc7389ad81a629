//! The part of a store that is read, and what a position is in it.

use std::fmt;

use scriba_core::source::SourceError;

use crate::client::{Event, Filter, Log, Original};

/// What a source reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A stream, with links resolved. Positions are revisions.
    Stream(String),
    /// The whole log, or the streams whose names begin with one of these, if there are any. Positions are commit positions.
    All { stream_prefixes: Vec<String> },
}

impl Part {
    /// The stream of links to the events of a category.
    pub(crate) fn category(category: &str) -> Self {
        Self::Stream(format!("$ce-{category}"))
    }

    /// What is followed for events of some types.
    pub(crate) fn followed(&self, types: Option<&[&str]>) -> Log {
        match self {
            Self::Stream(stream) => Log::Stream(stream.clone()),
            Self::All { stream_prefixes } if !stream_prefixes.is_empty() => {
                Log::All(Filter::StreamPrefixes(stream_prefixes.clone()))
            }
            Self::All { .. } => Log::All(match types {
                Some(types) if !types.is_empty() => {
                    Filter::TypePrefixes(types.iter().map(|&name| name.to_owned()).collect())
                }
                _ => Filter::SystemEvents,
            }),
        }
    }

    /// All of it that a projection may be given without naming a system event.
    pub(crate) fn whole(&self) -> Log {
        match self {
            Self::Stream(stream) => Log::Stream(stream.clone()),
            Self::All { .. } => Log::All(Filter::SystemEvents),
        }
    }

    /// Whether an event is to be handed out: its type is listed, or there is no list and it is none of the server's own.
    pub(crate) fn wants(&self, types: Option<&[&str]>, event: &Event) -> bool {
        let wanted = match types {
            Some(types) => types.contains(&event.event_type.as_str()),
            None => !is_system(&event.event_type),
        };
        wanted && self.reaches(event)
    }

    /// Whether an event is in it at all. A server filters by prefixes as well, but not where nothing is followed.
    pub(crate) fn reaches(&self, event: &Event) -> bool {
        match self {
            Self::Stream(_) => true,
            Self::All { stream_prefixes } => {
                let begins = |prefix: &String| event.stream_id.starts_with(prefix.as_str());
                stream_prefixes.is_empty() || stream_prefixes.iter().any(begins)
            }
        }
    }

    /// Whether positions count up one by one, so that a jump is a hole.
    pub(crate) fn counts(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    /// The position of an event.
    ///
    /// # Errors
    /// `Unusable` for one in the whole log that was written by an explicit transaction.
    pub(crate) fn position(&self, original: &Original) -> Result<u64, SourceError> {
        let (commit, prepare) = (original.place.commit, original.place.prepare);
        match self {
            Self::Stream(_) => Ok(original.revision),
            Self::All { .. } if commit == prepare && commit != u64::MAX => Ok(commit),
            Self::All { .. } => Err(SourceError::unusable(format!(
                "{self}: event {} has commit position {commit} and prepare position {prepare}: it was written by an explicit transaction, whose \
                 events share one commit position, and none of the two is an order to go by; project the streams or categories instead, \
                 whose revisions are",
                original.id
            ))),
        }
    }

    /// Refuses names that are none.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        match self {
            Self::Stream(name) if name.is_empty() || name == "$ce-" => {
                Err(SourceError::unusable("the stream or category has no name: give it one"))
            }
            Self::Stream(name) if name == "$all" => Err(SourceError::unusable(
                "$all is no stream: read it with CatchUpSource::all; a persistent subscription to it is not offered, because with a \
                 filter it loses events, and without one nobody can prove that none is missing",
            )),
            Self::Stream(_) | Self::All { .. } => Ok(()),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stream(stream) => f.write_str(stream),
            Self::All { stream_prefixes } if stream_prefixes.is_empty() => f.write_str("$all"),
            Self::All { stream_prefixes } => write!(f, "$all {stream_prefixes:?}"),
        }
    }
}

/// Whether a type is one of the server's own.
pub(crate) fn is_system(event_type: &str) -> bool {
    event_type.starts_with('$')
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::client::Place;

    fn original(commit: u64, prepare: u64) -> Original {
        Original { id: Uuid::nil(), revision: 7, place: Place { commit, prepare } }
    }

    fn event(stream_id: &str, event_type: &str) -> Event {
        Event {
            id: Uuid::nil(),
            stream_id: stream_id.to_owned(),
            revision: 0,
            event_type: event_type.to_owned(),
            data: bytes::Bytes::new(),
            metadata: bytes::Bytes::new(),
            occurred_at: None,
        }
    }

    #[test]
    fn the_whole_log_goes_by_commit_positions_and_names_an_explicit_transaction() {
        let all = Part::All { stream_prefixes: Vec::new() };
        assert_eq!(all.position(&original(90, 90)).ok(), Some(90));
        for (commit, prepare) in [(90, 80), (u64::MAX, u64::MAX)] {
            let Err(SourceError::Unusable { message }) = all.position(&original(commit, prepare)) else {
                panic!("not refused")
            };
            for part in ["explicit transaction", &commit.to_string(), &prepare.to_string(), "categories instead"] {
                assert!(message.contains(part), "{part:?} is not in {message:?}");
            }
        }
    }

    #[test]
    fn a_stream_goes_by_revisions_whatever_the_log_says() {
        assert_eq!(Part::category("account").position(&original(90, 80)).ok(), Some(7));
    }

    #[test]
    fn events_are_wanted_by_exact_type_and_system_events_by_name_only() {
        let all = Part::All { stream_prefixes: Vec::new() };
        assert!(all.wants(Some(&["Opened"]), &event("a", "Opened")));
        assert!(!all.wants(Some(&["Opened"]), &event("a", "OpenedAgain")));
        assert!(!all.wants(None, &event("$$a", "$metadata")));
        assert!(all.wants(Some(&["$metadata"]), &event("$$a", "$metadata")));
        let some = Part::All { stream_prefixes: vec!["account-".to_owned(), "order-".to_owned()] };
        assert!(some.wants(None, &event("order-1", "Opened")));
        assert!(!some.wants(None, &event("invoice-1", "Opened")));
    }

    #[test]
    fn names_that_are_none_are_refused() {
        for refused in [Part::Stream(String::new()), Part::category(""), Part::Stream("$all".to_owned())] {
            assert!(matches!(refused.check(), Err(SourceError::Unusable { .. })), "{refused:?}");
        }
        assert!(Part::category("account").check().is_ok());
    }
}
