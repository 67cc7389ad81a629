//! The two appends.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::Stream;
use futures_util::stream::try_unfold;
use prost::Message;
use tonic::{Code, Status, Streaming};
use uuid::Uuid;

use super::streams::expected;
use super::{convert, refusals};
use crate::eventstore::node::Node;
use crate::eventstore::proto::event_store::client as proto;
use crate::eventstore::proto::event_store::client::streams::{
    AppendReq, AppendResp, BatchAppendReq, BatchAppendResp, append_req, append_resp, batch_append_req,
    batch_append_resp,
};
use crate::eventstore::proto::google::rpc;
use crate::eventstore::record::NewEvent;
use crate::eventstore::store::{AppendError, Expected, Written};

fn size(event: &NewEvent) -> usize {
    event.data.len() + event.metadata.len() + event.event_type.len()
}

fn write(node: &Node, stream: &str, expected: Expected, events: Vec<NewEvent>) -> Result<Written, AppendError> {
    let mut core = node.core();
    let written = core.store.append(stream, expected, events);
    core.settle();
    written
}

pub(super) async fn append(node: &Node, mut messages: Streaming<AppendReq>) -> Result<AppendResp, Status> {
    use append_req::options::ExpectedStreamRevision as Sent;
    let Some(append_req::Content::Options(options)) = messages.message().await?.and_then(|first| first.content) else {
        return Err(Status::invalid_argument("the first message of an append has to be its options"));
    };
    let stream = convert::stream_name(options.stream_identifier.as_ref())?;
    let expected = expected!(Sent, options.expected_stream_revision);
    let mut events = Vec::new();
    let mut bytes = 0;
    while let Some(message) = messages.message().await? {
        let Some(append_req::Content::ProposedMessage(proposed)) = message.content else {
            return Err(Status::invalid_argument("an append has options once"));
        };
        let append_req::ProposedMessage { id, metadata, custom_metadata, data } = proposed;
        let event = convert::new_event(id.as_ref(), metadata, custom_metadata, data)?;
        bytes += size(&event);
        if bytes > convert::MAX_APPEND {
            return Err(refusals::too_large(convert::MAX_APPEND));
        }
        events.push(event);
    }
    let result = match write(node, &stream, expected, events) {
        Ok(written) => append_resp::Result::Success(success(written)),
        Err(AppendError::WrongExpectedVersion { current }) => {
            append_resp::Result::WrongExpectedVersion(wrong_version(expected, current))
        }
        Err(AppendError::Deleted) => return Err(refusals::stream_deleted(&stream)),
    };
    Ok(AppendResp { result: Some(result) })
}

fn success(written: Written) -> append_resp::Success {
    use append_resp::success::{CurrentRevisionOption, PositionOption};
    append_resp::Success {
        current_revision_option: Some(
            written.revision.map_or(CurrentRevisionOption::NoStream(()), CurrentRevisionOption::CurrentRevision),
        ),
        position_option: Some(written.position.map_or(PositionOption::NoPosition(()), |position| {
            PositionOption::Position(append_resp::Position {
                commit_position: position.commit,
                prepare_position: position.prepare,
            })
        })),
    }
}

/// Newer clients read one set of fields, older ones the other.
fn wrong_version(expected: Expected, current: Option<u64>) -> append_resp::WrongExpectedVersion {
    use append_resp::wrong_expected_version::{
        CurrentRevisionOption as Current, CurrentRevisionOption2060 as OldCurrent, ExpectedRevisionOption as Wanted,
        ExpectedRevisionOption2060 as OldWanted,
    };
    let (wanted, old_wanted) = match expected {
        Expected::Any => (Wanted::ExpectedAny(()), Some(OldWanted::Any2060(()))),
        Expected::StreamExists => (Wanted::ExpectedStreamExists(()), Some(OldWanted::StreamExists2060(()))),
        Expected::NoStream => (Wanted::ExpectedNoStream(()), None),
        Expected::Revision(revision) => {
            (Wanted::ExpectedRevision(revision), Some(OldWanted::ExpectedRevision2060(revision)))
        }
    };
    append_resp::WrongExpectedVersion {
        current_revision_option_20_6_0: Some(
            current.map_or(OldCurrent::NoStream2060(()), OldCurrent::CurrentRevision2060),
        ),
        expected_revision_option_20_6_0: old_wanted,
        current_revision_option: Some(current.map_or(Current::CurrentNoStream(()), Current::CurrentRevision)),
        expected_revision_option: Some(wanted),
    }
}

/// An append that comes in pieces.
struct Batch {
    stream: String,
    expected: Expected,
    events: Vec<NewEvent>,
}

/// Answers every append of the connection as its last piece arrives.
pub(super) fn batch_append(
    node: Arc<Node>,
    messages: Streaming<BatchAppendReq>,
) -> impl Stream<Item = Result<BatchAppendResp, Status>> + Send {
    let open: HashMap<Uuid, Batch> = HashMap::new();
    try_unfold((node, messages, open), |(node, mut messages, mut open)| async move {
        while let Some(message) = messages.message().await? {
            if let Some(answer) = take_piece(&node, &mut open, message)? {
                return Ok(Some((answer, (node, messages, open))));
            }
        }
        Ok(None)
    })
}

fn take_piece(
    node: &Node,
    open: &mut HashMap<Uuid, Batch>,
    message: BatchAppendReq,
) -> Result<Option<BatchAppendResp>, Status> {
    use batch_append_req::options::ExpectedStreamPosition as Sent;
    let id = convert::read_uuid(message.correlation_id.as_ref())?;
    if let Some(options) = message.options {
        let expected = match options.expected_stream_position {
            Some(Sent::StreamPosition(revision)) => Expected::Revision(revision),
            Some(Sent::NoStream(())) => Expected::NoStream,
            Some(Sent::StreamExists(())) => Expected::StreamExists,
            Some(Sent::Any(())) => Expected::Any,
            None => return Err(Status::invalid_argument("'expected_stream_position' is missing")),
        };
        let stream = convert::stream_name(options.stream_identifier.as_ref())?;
        open.insert(id, Batch { stream, expected, events: Vec::new() });
    }
    let Some(batch) = open.get_mut(&id) else {
        return Err(Status::invalid_argument("the first piece of an append has to have its options"));
    };
    for proposed in message.proposed_messages {
        let batch_append_req::ProposedMessage { id, metadata, custom_metadata, data } = proposed;
        batch.events.push(convert::new_event(id.as_ref(), metadata, custom_metadata, data)?);
    }
    if !message.is_final {
        return Ok(None);
    }
    let Some(Batch { stream, expected, events }) = open.remove(&id) else { return Ok(None) };
    let result = if events.iter().map(size).sum::<usize>() > convert::MAX_APPEND {
        batch_append_resp::Result::Error(too_large())
    } else {
        batch_result(&stream, expected, write(node, &stream, expected, events))
    };
    Ok(Some(BatchAppendResp {
        correlation_id: message.correlation_id,
        result: Some(result),
        stream_identifier: Some(convert::stream_identifier(&stream)),
        expected_stream_position: Some(echo(expected)),
    }))
}

fn echo(expected: Expected) -> batch_append_resp::ExpectedStreamPosition {
    use batch_append_resp::ExpectedStreamPosition as Echo;
    match expected {
        Expected::Any => Echo::Any(()),
        Expected::NoStream => Echo::NoStream(()),
        Expected::StreamExists => Echo::StreamExists(()),
        Expected::Revision(revision) => Echo::StreamPosition(revision),
    }
}

fn batch_result(stream: &str, expected: Expected, written: Result<Written, AppendError>) -> batch_append_resp::Result {
    use batch_append_resp::success::{CurrentRevisionOption, PositionOption};
    use proto::wrong_expected_version::{
        CurrentStreamRevisionOption as Current, ExpectedStreamPositionOption as Wanted,
    };
    match written {
        Ok(written) => batch_append_resp::Result::Success(batch_append_resp::Success {
            current_revision_option: Some(
                written.revision.map_or(CurrentRevisionOption::NoStream(()), CurrentRevisionOption::CurrentRevision),
            ),
            position_option: Some(written.position.map_or(PositionOption::NoPosition(()), |position| {
                PositionOption::Position(proto::AllStreamPosition {
                    commit_position: position.commit,
                    prepare_position: position.prepare,
                })
            })),
        }),
        Err(AppendError::WrongExpectedVersion { current }) => {
            let details = proto::WrongExpectedVersion {
                current_stream_revision_option: Some(
                    current.map_or(Current::CurrentNoStream(()), Current::CurrentStreamRevision),
                ),
                expected_stream_position_option: Some(match expected {
                    Expected::Any => Wanted::ExpectedAny(()),
                    Expected::StreamExists => Wanted::ExpectedStreamExists(()),
                    Expected::NoStream => Wanted::ExpectedNoStream(()),
                    Expected::Revision(revision) => Wanted::ExpectedStreamPosition(revision),
                }),
            };
            error(Code::AlreadyExists, "Wrong expected version", "WrongExpectedVersion", &details)
        }
        Err(AppendError::Deleted) => {
            let details = proto::StreamDeleted { stream_identifier: Some(convert::stream_identifier(stream)) };
            error(Code::NotFound, "Stream deleted", "StreamDeleted", &details)
        }
    }
}

fn error(code: Code, message: &str, kind: &str, details: &impl Message) -> batch_append_resp::Result {
    batch_append_resp::Result::Error(status(code, message, kind, details))
}

fn too_large() -> rpc::Status {
    let details =
        proto::MaximumAppendSizeExceeded { max_append_size: u32::try_from(convert::MAX_APPEND).unwrap_or(u32::MAX) };
    let message = format!("Maximum Append Size of {} Exceeded.", convert::MAX_APPEND);
    status(Code::InvalidArgument, &message, "MaximumAppendSizeExceeded", &details)
}

fn status(code: Code, message: &str, kind: &str, details: &impl Message) -> rpc::Status {
    rpc::Status {
        code: code.into(),
        message: message.to_owned(),
        details: Some(prost_types::Any {
            type_url: format!("type.googleapis.com/event_store.client.{kind}"),
            value: details.encode_to_vec(),
        }),
    }
}
