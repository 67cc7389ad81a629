//! Words of the protocol and words of the double.

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tonic::Status;
use uuid::Uuid;

use super::refusals;
use crate::eventstore::proto::event_store::client as proto;
use crate::eventstore::proto::event_store::client::persistent_subscriptions as ps;
use crate::eventstore::proto::event_store::client::streams;
use crate::eventstore::record::{Found, LogPosition, NewEvent, Record};
use crate::eventstore::settings::{Filter, Pattern};

/// What an append may hold, in bytes.
pub(crate) const MAX_APPEND: usize = 1024 * 1024;

pub(crate) fn stream_name(identifier: Option<&proto::StreamIdentifier>) -> Result<String, Status> {
    let name = any_stream_name(identifier);
    if name.is_empty() { Err(Status::invalid_argument("'Stream Identifier' is missing")) } else { Ok(name) }
}

/// The same, empty where it is missing.
pub(crate) fn any_stream_name(identifier: Option<&proto::StreamIdentifier>) -> String {
    identifier.map(|identifier| String::from_utf8_lossy(&identifier.stream_name).into_owned()).unwrap_or_default()
}

pub(crate) fn stream_identifier(name: &str) -> proto::StreamIdentifier {
    proto::StreamIdentifier { stream_name: Bytes::copy_from_slice(name.as_bytes()) }
}

/// Takes an id in either form.
pub(crate) fn read_uuid(uuid: Option<&proto::Uuid>) -> Result<Uuid, Status> {
    match uuid.and_then(|uuid| uuid.value.as_ref()) {
        Some(proto::uuid::Value::String(text)) => {
            Uuid::parse_str(text).map_err(|error| Status::invalid_argument(format!("bad id {text:?}: {error}")))
        }
        Some(proto::uuid::Value::Structured(halves)) => Ok(Uuid::from_u64_pair(
            halves.most_significant_bits.cast_unsigned(),
            halves.least_significant_bits.cast_unsigned(),
        )),
        None => Err(Status::invalid_argument("'UUID' is missing")),
    }
}

pub(crate) fn write_uuid(id: Uuid, structured: bool) -> proto::Uuid {
    let value = if structured {
        let (most, least) = id.as_u64_pair();
        proto::uuid::Value::Structured(proto::uuid::Structured {
            most_significant_bits: most.cast_signed(),
            least_significant_bits: least.cast_signed(),
        })
    } else {
        proto::uuid::Value::String(id.to_string())
    };
    proto::Uuid { value: Some(value) }
}

pub(crate) fn now() -> prost_types::Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    prost_types::Timestamp { seconds: since.as_secs().cast_signed(), nanos: since.subsec_nanos().cast_signed() }
}

/// An event to append, from what clients of either append send.
pub(crate) fn new_event(
    id: Option<&proto::Uuid>,
    mut metadata: HashMap<String, String>,
    custom_metadata: Bytes,
    data: Bytes,
) -> Result<NewEvent, Status> {
    let mut property = |name: &str| metadata.remove(name).ok_or_else(|| refusals::missing_property(name));
    Ok(NewEvent {
        id: read_uuid(id)?,
        event_type: property("type")?,
        json: property("content-type")? == "application/json",
        data,
        metadata: custom_metadata,
    })
}

/// A filter of a read; its parts are those of all messages that have one.
pub(crate) fn filter(of_streams: bool, prefixes: Vec<String>, regex: &str) -> Result<Filter, Status> {
    let pattern = match regex {
        "" if prefixes.is_empty() => return Err(Status::invalid_argument("a filter needs a prefix or a regex")),
        "" => Pattern::Prefix(prefixes),
        r"^[^\$].*" | "^[^$].*" => Pattern::NotSystem,
        r"^(?!(\$.+$|PersistentConfig\d+$|Result$))" => Pattern::NotInternal,
        other => {
            let message =
                format!("the double knows prefixes, and no regex but those for system events; it got {other}");
            return Err(Status::unimplemented(message));
        }
    };
    Ok(if of_streams { Filter::Stream(pattern) } else { Filter::EventType(pattern) })
}

fn properties(record: &Record) -> HashMap<String, String> {
    let content_type = if record.json { "application/json" } else { "application/octet-stream" };
    HashMap::from([
        ("type".to_owned(), record.event_type.clone()),
        ("created".to_owned(), record.created.to_string()),
        ("content-type".to_owned(), content_type.to_owned()),
    ])
}

/// Two services have messages of the same shape for a record.
macro_rules! recorded {
    ($service:ident, $record:expr, $position:expr, $structured:expr) => {{
        let (record, position): (&Record, LogPosition) = ($record, $position);
        $service::read_resp::read_event::RecordedEvent {
            id: Some(write_uuid(record.id, $structured)),
            stream_identifier: Some(stream_identifier(&record.stream)),
            stream_revision: record.revision,
            prepare_position: position.prepare,
            commit_position: position.commit,
            metadata: properties(record),
            custom_metadata: record.metadata.clone(),
            data: record.data.clone(),
        }
    }};
}

/// An event of a read or a catch-up subscription. Event and link have their own positions.
pub(crate) fn read_event(found: &Found, structured: bool) -> streams::ReadResp {
    use streams::read_resp::{Content, ReadEvent, read_event::Position};
    content(Content::Event(ReadEvent {
        event: found.event.as_ref().map(|record| recorded!(streams, record, record.position, structured)),
        link: found.link.as_ref().map(|record| recorded!(streams, record, record.position, structured)),
        position: Some(Position::CommitPosition(found.original.position.commit)),
    }))
}

pub(crate) fn content(content: streams::read_resp::Content) -> streams::ReadResp {
    streams::ReadResp { content: Some(content) }
}

/// An event of a persistent subscription. Event and link have the position of what was read.
pub(crate) fn delivery(found: &Found, retries: u32, structured: bool) -> ps::ReadResp {
    use ps::read_resp::{
        Content, ReadEvent,
        read_event::{Count, Position},
    };
    let position = found.original.position;
    ps::ReadResp {
        content: Some(Content::Event(ReadEvent {
            event: found.event.as_ref().map(|record| recorded!(ps, record, position, structured)),
            link: found.link.as_ref().map(|record| recorded!(ps, record, position, structured)),
            position: Some(Position::CommitPosition(position.commit)),
            count: Some(Count::RetryCount(retries.try_into().unwrap_or(i32::MAX))),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eventstore::record::NewEvent;

    #[test]
    fn an_id_is_read_in_both_forms() {
        let id = Uuid::new_v4();
        for structured in [true, false] {
            assert_eq!(read_uuid(Some(&write_uuid(id, structured))).unwrap(), id);
        }
        assert!(read_uuid(None).is_err());
    }

    #[test]
    fn a_filter_takes_prefixes_and_what_clients_send_for_system_events() {
        let record = |event_type: &str| {
            Record::new(NewEvent::json(event_type, "{}"), "orders".into(), 0, LogPosition::default())
        };
        let admitted = |prefixes: &[&str], regex: &str| {
            let prefixes = prefixes.iter().map(|prefix| (*prefix).to_owned()).collect();
            let filter = filter(false, prefixes, regex).unwrap();
            let types = ["Placed", "Paid", "$metadata", "PersistentConfig1", "Result"];
            types.into_iter().filter(|event_type| filter.admits(&record(event_type))).collect::<Vec<_>>()
        };
        assert_eq!(admitted(&["Pl", "Pa"], ""), ["Placed", "Paid"]);
        for regex in [r"^[^\$].*", "^[^$].*"] {
            assert_eq!(admitted(&[], regex), ["Placed", "Paid", "PersistentConfig1", "Result"]);
        }
        assert_eq!(admitted(&[], r"^(?!(\$.+$|PersistentConfig\d+$|Result$))"), ["Placed", "Paid"]);
        assert_eq!(filter(false, Vec::new(), "P.*").unwrap_err().code(), tonic::Code::Unimplemented);
    }

    #[test]
    fn an_event_without_a_type_is_refused_by_name() {
        let metadata = HashMap::from([("content-type".to_owned(), "application/json".to_owned())]);
        let id = write_uuid(Uuid::new_v4(), false);
        let refused = new_event(Some(&id), metadata, Bytes::new(), Bytes::new()).unwrap_err();
        assert_eq!(refused.metadata().get("exception").unwrap(), "missing-required-metadata-property");
    }

    #[test]
    fn a_delivery_has_the_position_of_the_link_on_event_and_link() {
        let at = |position| {
            std::sync::Arc::new(Record::new(
                NewEvent::json("Placed", "{}"),
                "orders".into(),
                0,
                LogPosition::both(position),
            ))
        };
        let (event, link) = (at(10), at(20));
        let found = Found { event: Some(event), link: Some(link.clone()), original: link };
        let Some(ps::read_resp::Content::Event(sent)) = delivery(&found, 3, false).content else { panic!("no event") };
        assert_eq!(sent.event.unwrap().commit_position, 20);
        assert_eq!(sent.count, Some(ps::read_resp::read_event::Count::RetryCount(3)));
        let Some(streams::read_resp::Content::Event(sent)) = read_event(&found, false).content else {
            panic!("no event")
        };
        assert_eq!(sent.event.unwrap().commit_position, 10);
    }
}
