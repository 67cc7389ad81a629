//! Source and settings of a persistent subscription, from the two forms that clients send.
//!
//! Older clients fill the deprecated fields: the stream beside the options, and the revision in the settings, where
//! -1 is the end.

use std::time::Duration;

use tonic::Status;

use super::{convert, refusals};
use crate::eventstore::core::GroupKey;
use crate::eventstore::proto::event_store::client::persistent_subscriptions::{create_req, update_req};
use crate::eventstore::record::LogPosition;
use crate::eventstore::settings::{Filter, Place, Settings, Source, Start, Strategy};

/// A group as a client asks for it.
pub(crate) struct Wanted {
    pub(crate) key: GroupKey,
    pub(crate) source: Source,
    pub(crate) settings: Settings,
}

fn start_of_log(position: LogPosition) -> Start {
    Start::At(Place::Log(position))
}

fn old_start(revision: u64) -> Start {
    if revision == u64::MAX { Start::End } else { Start::At(Place::Revision(revision)) }
}

fn count(value: i32) -> u32 {
    value.try_into().unwrap_or(0)
}

fn milliseconds(value: i64) -> Duration {
    Duration::from_millis(value.try_into().unwrap_or(0))
}

/// Units of 100 ns.
fn ticks(value: i64) -> Duration {
    Duration::from_micros(u64::try_from(value).unwrap_or(0) / 10)
}

/// The messages of create and update are alike, and different types.
macro_rules! wanted {
    ($module:ident, $options:expr, $strategy:expr, $filter:expr) => {{
        use $module::all_options::AllOption;
        use $module::options::StreamOption;
        use $module::settings::{CheckpointAfter, MessageTimeout};
        use $module::stream_options::RevisionOption;

        let options: $module::Options = $options;
        let sent = options.settings.ok_or_else(|| Status::invalid_argument("'Settings' is missing"))?;
        #[expect(deprecated, reason = "some clients know nothing else")]
        let (old_stream, old_revision) = (options.stream_identifier, sent.revision);
        let (source, start) = match options.stream_option {
            None => {
                let stream = convert::any_stream_name(old_stream.as_ref());
                (Source::Stream(stream.into()), old_start(old_revision))
            }
            Some(StreamOption::Stream(stream)) => {
                let name = convert::any_stream_name(stream.stream_identifier.as_ref());
                let start = match stream.revision_option {
                    Some(RevisionOption::Revision(revision)) => Start::At(Place::Revision(revision)),
                    Some(RevisionOption::Start(())) => Start::Beginning,
                    Some(RevisionOption::End(())) => Start::End,
                    None => return Err(Status::invalid_argument("'revision_option' is missing")),
                };
                (Source::Stream(name.into()), start)
            }
            Some(StreamOption::All(all)) => {
                let start = match &all.all_option {
                    Some(AllOption::Position(position)) => start_of_log(LogPosition {
                        commit: position.commit_position,
                        prepare: position.prepare_position,
                    }),
                    Some(AllOption::Start(())) => Start::Beginning,
                    Some(AllOption::End(())) => Start::End,
                    None => return Err(Status::invalid_argument("'all_option' is missing")),
                };
                (Source::All($filter(all)?), start)
            }
        };
        let key = GroupKey::new(source.name(), &options.group_name);
        let strategy_name: String = $strategy(&sent);
        let strategy = Strategy::from_name(&strategy_name)
            .ok_or_else(|| refusals::failed(&key, &format!("Consumer strategy {strategy_name} does not exist.")))?;
        let after = match sent.checkpoint_after {
            Some(CheckpointAfter::CheckpointAfterMs(value)) => milliseconds(value.into()),
            Some(CheckpointAfter::CheckpointAfterTicks(value)) => ticks(value),
            None => return Err(Status::invalid_argument("'checkpoint_after' is missing")),
        };
        let settings = Settings {
            resolve_links: sent.resolve_links,
            start,
            message_timeout: match sent.message_timeout {
                Some(MessageTimeout::MessageTimeoutMs(value)) => milliseconds(value.into()),
                Some(MessageTimeout::MessageTimeoutTicks(value)) => ticks(value),
                None => return Err(Status::invalid_argument("'message_timeout' is missing")),
            },
            max_retry_count: count(sent.max_retry_count),
            checkpoint_after: (!after.is_zero()).then_some(after),
            min_checkpoint_count: count(sent.min_checkpoint_count),
            max_checkpoint_count: count(sent.max_checkpoint_count),
            history_buffer_size: count(sent.history_buffer_size),
            read_batch_size: count(sent.read_batch_size),
            live_buffer_size: count(sent.live_buffer_size),
            max_subscriber_count: count(sent.max_subscriber_count),
            strategy,
            strategy_name,
            extra_statistics: sent.extra_statistics,
        };
        Ok(Wanted { key, source, settings })
    }};
}

pub(crate) fn to_create(options: create_req::Options) -> Result<Wanted, Status> {
    wanted!(create_req, options, create_strategy, create_filter)
}

/// The source that is asked for has no filter: an update keeps the one that is there.
pub(crate) fn to_update(options: update_req::Options) -> Result<Wanted, Status> {
    wanted!(update_req, options, update_strategy, |_| Ok::<_, Status>(Filter::None))
}

/// The name where there is one, and the old field where not.
fn create_strategy(settings: &create_req::Settings) -> String {
    if settings.consumer_strategy.is_empty() {
        settings.named_consumer_strategy().as_str_name().to_owned()
    } else {
        settings.consumer_strategy.clone()
    }
}

fn update_strategy(settings: &update_req::Settings) -> String {
    settings.named_consumer_strategy().as_str_name().to_owned()
}

fn create_filter(all: create_req::AllOptions) -> Result<Filter, Status> {
    use create_req::all_options::{FilterOption, filter_options};
    let Some(FilterOption::Filter(options)) = all.filter_option else { return Ok(Filter::None) };
    match options.filter {
        Some(filter_options::Filter::StreamIdentifier(of)) => convert::filter(true, of.prefix, &of.regex),
        Some(filter_options::Filter::EventType(of)) => convert::filter(false, of.prefix, &of.regex),
        None => Err(Status::invalid_argument("'filter' is missing")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent() -> create_req::Settings {
        create_req::Settings {
            message_timeout: Some(create_req::settings::MessageTimeout::MessageTimeoutMs(0)),
            checkpoint_after: Some(create_req::settings::CheckpointAfter::CheckpointAfterMs(0)),
            consumer_strategy: "Pinned".to_owned(),
            ..Default::default()
        }
    }

    #[test]
    #[expect(deprecated, reason = "this is what older clients send")]
    fn the_older_form_names_stream_revision_and_strategy_elsewhere() {
        let old = |revision| {
            let options = create_req::Options {
                stream_identifier: Some(convert::stream_identifier("orders")),
                group_name: "readers".to_owned(),
                settings: Some(create_req::Settings {
                    revision,
                    consumer_strategy: String::new(),
                    named_consumer_strategy: 1,
                    ..sent()
                }),
                ..Default::default()
            };
            to_create(options).unwrap()
        };
        let wanted = old(7);
        assert_eq!(wanted.key, GroupKey::new("orders", "readers"));
        assert_eq!(wanted.settings.start, Start::At(Place::Revision(7)));
        assert_eq!(wanted.settings.strategy, Strategy::RoundRobin);
        assert_eq!(old(u64::MAX).settings.start, Start::End);
    }

    #[test]
    fn zero_is_at_once_for_messages_and_never_for_checkpoints() {
        let options = create_req::Options {
            stream_option: Some(create_req::options::StreamOption::All(create_req::AllOptions {
                all_option: Some(create_req::all_options::AllOption::End(())),
                filter_option: None,
            })),
            settings: Some(sent()),
            ..Default::default()
        };
        let wanted = to_create(options).unwrap();
        assert_eq!(wanted.source, Source::All(Filter::None));
        assert_eq!(wanted.settings.message_timeout, Duration::ZERO);
        assert_eq!(wanted.settings.checkpoint_after, None);
    }

    #[test]
    fn a_strategy_that_does_not_exist_is_refused_by_name() {
        let options = create_req::Options {
            stream_option: Some(create_req::options::StreamOption::Stream(create_req::StreamOptions {
                stream_identifier: Some(convert::stream_identifier("orders")),
                revision_option: Some(create_req::stream_options::RevisionOption::Start(())),
            })),
            settings: Some(create_req::Settings { consumer_strategy: "Best".to_owned(), ..sent() }),
            ..Default::default()
        };
        let refused = to_create(options).err().unwrap();
        assert_eq!(refused.metadata().get("reason").unwrap(), "Consumer strategy Best does not exist.");
    }
}
