//! Reads of a stream or the log: one page, as long as the client asks for.

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use tonic::Status;

use super::{convert, refusals};
use crate::eventstore::node::Node;
use crate::eventstore::proto::event_store::client::streams::{ReadResp, read_req, read_resp};
use crate::eventstore::record::LogPosition;
use crate::eventstore::settings::Filter;
use crate::eventstore::store::StreamState;

type Answer = BoxStream<'static, Result<ReadResp, Status>>;

pub(super) fn read(node: &Node, options: read_req::Options, count: u64) -> Result<Answer, Status> {
    let backwards = options.read_direction() == read_req::options::ReadDirection::Backwards;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let shape = Shape::of(&options);
    let messages = match options.stream_option {
        Some(read_req::options::StreamOption::Stream(of)) => {
            let name = convert::stream_name(of.stream_identifier.as_ref())?;
            let from = first_revision(of.revision_option.as_ref(), backwards)?;
            read_stream(node, &name, from, backwards, count, shape)?
        }
        Some(read_req::options::StreamOption::All(of)) => {
            let from = first_position(of.all_option.as_ref())?;
            let filter = filter(options.filter_option)?;
            read_all(node, from, backwards, count, &filter, shape)
        }
        None => return Err(Status::invalid_argument("'stream_option' is missing")),
    };
    Ok(stream::iter(messages.into_iter().map(Ok)).boxed())
}

/// What the events of an answer look like.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) resolve_links: bool,
    pub(super) structured_ids: bool,
    /// What the client understands beyond events.
    compatibility: u32,
}

impl Shape {
    pub(super) fn of(options: &read_req::Options) -> Self {
        use read_req::options::uuid_option::Content;
        let ids = options.uuid_option.as_ref().and_then(|option| option.content);
        Self {
            resolve_links: options.resolve_links,
            structured_ids: matches!(ids, Some(Content::Structured(()))),
            compatibility: options.control_option.as_ref().map_or(0, |control| control.compatibility),
        }
    }
}

pub(super) fn filter(option: Option<read_req::options::FilterOption>) -> Result<Filter, Status> {
    use read_req::options::{FilterOption, filter_options};
    let Some(FilterOption::Filter(options)) = option else { return Ok(Filter::None) };
    match options.filter {
        Some(filter_options::Filter::StreamIdentifier(of)) => convert::filter(true, of.prefix, &of.regex),
        Some(filter_options::Filter::EventType(of)) => convert::filter(false, of.prefix, &of.regex),
        None => Err(Status::invalid_argument("'filter' is missing")),
    }
}

fn first_revision(
    option: Option<&read_req::options::stream_options::RevisionOption>,
    backwards: bool,
) -> Result<Option<u64>, Status> {
    use read_req::options::stream_options::RevisionOption;
    match option {
        Some(RevisionOption::Revision(revision)) => Ok(Some(*revision)),
        Some(RevisionOption::Start(())) => Ok(Some(0)),
        // There is nothing behind the end.
        Some(RevisionOption::End(())) => Ok(backwards.then_some(u64::MAX)),
        None => Err(Status::invalid_argument("'revision_option' is missing")),
    }
}

fn first_position(option: Option<&read_req::options::all_options::AllOption>) -> Result<LogPosition, Status> {
    use read_req::options::all_options::AllOption;
    let end = LogPosition { commit: u64::MAX, prepare: u64::MAX };
    match option {
        Some(AllOption::Position(position)) => {
            Ok(LogPosition { commit: position.commit_position, prepare: position.prepare_position })
        }
        Some(AllOption::Start(())) => Ok(LogPosition::default()),
        Some(AllOption::End(())) => Ok(end),
        None => Err(Status::invalid_argument("'all_option' is missing")),
    }
}

fn read_stream(
    node: &Node,
    name: &str,
    from: Option<u64>,
    backwards: bool,
    count: usize,
    shape: Shape,
) -> Result<Vec<ReadResp>, Status> {
    use read_resp::Content;
    let core = node.core();
    let store = &core.store;
    match store.state(name) {
        StreamState::Deleted => return Err(refusals::stream_deleted(name)),
        StreamState::Missing => {
            let missing = read_resp::StreamNotFound { stream_identifier: Some(convert::stream_identifier(name)) };
            return Ok(vec![convert::content(Content::StreamNotFound(missing))]);
        }
        StreamState::Live => {}
    }
    let found: Vec<_> = match from {
        Some(from) if backwards => store.backwards(name, from).take(count).collect(),
        Some(from) => store.forwards(name, from).take(count).collect(),
        None => Vec::new(),
    };
    let event = |record| convert::read_event(&store.find(record, shape.resolve_links), shape.structured_ids);
    let mut messages: Vec<_> = found.into_iter().map(event).collect();
    if shape.compatibility >= 1 {
        if messages.is_empty() {
            messages.push(convert::content(Content::FirstStreamPosition(store.first_visible(name))));
        }
        if let Some(last) = store.current(name) {
            messages.push(convert::content(Content::LastStreamPosition(last)));
        }
    }
    Ok(messages)
}

fn read_all(
    node: &Node,
    from: LogPosition,
    backwards: bool,
    count: usize,
    filter: &Filter,
    shape: Shape,
) -> Vec<ReadResp> {
    let core = node.core();
    let store = &core.store;
    let event = |record| convert::read_event(&store.find(record, shape.resolve_links), shape.structured_ids);
    if backwards {
        store.all_backwards(from).filter(|record| filter.admits(record)).take(count).map(event).collect()
    } else {
        store.all_forwards(from).filter(|record| filter.admits(record)).take(count).map(event).collect()
    }
}
