//! The errors of a server: code, text and trailers.

use std::net::SocketAddr;

use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

use crate::eventstore::core::GroupKey;

fn refusal(code: Code, message: impl Into<String>, trailers: &[(&'static str, &str)]) -> Status {
    let mut metadata = MetadataMap::new();
    for (key, value) in trailers {
        // A value that a header cannot carry is left out: tests of such names look at the message.
        if let Ok(value) = MetadataValue::try_from(*value) {
            metadata.insert(*key, value);
        }
    }
    Status::with_metadata(code, message, metadata)
}

fn of_group(code: Code, exception: &str, key: &GroupKey, what: &str) -> Status {
    let message = format!("Subscription group {} on stream {} {what}", key.group, key.stream);
    refusal(code, message, &[("exception", exception), ("stream-name", &key.stream), ("group-name", &key.group)])
}

pub(crate) fn exists(key: &GroupKey) -> Status {
    of_group(Code::AlreadyExists, "persistent-subscription-exists", key, "exists.")
}

pub(crate) fn does_not_exist(key: &GroupKey) -> Status {
    of_group(Code::NotFound, "persistent-subscription-does-not-exist", key, "does not exist.")
}

pub(crate) fn dropped(key: &GroupKey) -> Status {
    of_group(Code::Cancelled, "persistent-subscription-dropped", key, "was dropped.")
}

pub(crate) fn failed(key: &GroupKey, reason: &str) -> Status {
    let mut status = of_group(Code::Internal, "persistent-subscription-failed", key, &format!("failed: '{reason}'"));
    if let Ok(value) = MetadataValue::try_from(reason) {
        status.metadata_mut().insert("reason", value);
    }
    status
}

pub(crate) fn full(key: &GroupKey) -> Status {
    let message =
        format!("Maximum subscriptions reached for subscription group {} on stream {}.", key.group, key.stream);
    refusal(
        Code::FailedPrecondition,
        message,
        &[("exception", "maximum-subscribers-reached"), ("stream-name", &key.stream), ("group-name", &key.group)],
    )
}

pub(crate) fn access_denied() -> Status {
    refusal(Code::PermissionDenied, "Access Denied", &[("exception", "access-denied")])
}

pub(crate) fn not_leader(leader: SocketAddr) -> Status {
    refusal(
        Code::NotFound,
        "Leader info available",
        &[
            ("exception", "not-leader"),
            ("leader-endpoint-host", &leader.ip().to_string()),
            ("leader-endpoint-port", &leader.port().to_string()),
        ],
    )
}

pub(crate) fn stream_deleted(stream: &str) -> Status {
    refusal(
        Code::FailedPrecondition,
        format!("Event stream '{stream}' is deleted."),
        &[("exception", "stream-deleted"), ("stream-name", stream)],
    )
}

/// An append whose expectation fails, for calls that have no answer for it.
pub(crate) fn wrong_expected_version(stream: &str, current: Option<u64>) -> Status {
    let current = current.map_or_else(|| "-1".to_owned(), |revision| revision.to_string());
    refusal(
        Code::FailedPrecondition,
        format!("Operation failed due to WrongExpectedVersion. Stream: {stream}, Actual version: {current}"),
        &[("exception", "wrong-expected-version"), ("stream-name", stream), ("actual-version", &current)],
    )
}

pub(crate) fn missing_property(name: &str) -> Status {
    refusal(
        Code::InvalidArgument,
        format!("Required Metadata Property '{name}' is missing"),
        &[("exception", "missing-required-metadata-property"), ("required-metadata-properties", "type,content-type")],
    )
}

pub(crate) fn too_large(limit: usize) -> Status {
    refusal(
        Code::InvalidArgument,
        format!("Maximum Append Size of {limit} Exceeded."),
        &[("exception", "maximum-append-size-exceeded"), ("maximum-append-size", &limit.to_string())],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_the_code_the_exception_and_the_words_of_a_server() {
        let key = GroupKey::new("orders", "readers");
        let leader: SocketAddr = "127.0.0.1:2114".parse().unwrap();
        let group = "Subscription group readers on stream orders";
        let table = [
            (exists(&key), Code::AlreadyExists, "persistent-subscription-exists", format!("{group} exists.")),
            (
                does_not_exist(&key),
                Code::NotFound,
                "persistent-subscription-does-not-exist",
                format!("{group} does not exist."),
            ),
            (dropped(&key), Code::Cancelled, "persistent-subscription-dropped", format!("{group} was dropped.")),
            (
                failed(&key, "Bad stream name."),
                Code::Internal,
                "persistent-subscription-failed",
                format!("{group} failed: 'Bad stream name.'"),
            ),
            (
                full(&key),
                Code::FailedPrecondition,
                "maximum-subscribers-reached",
                "Maximum subscriptions reached for subscription group readers on stream orders.".to_owned(),
            ),
            (access_denied(), Code::PermissionDenied, "access-denied", "Access Denied".to_owned()),
            (not_leader(leader), Code::NotFound, "not-leader", "Leader info available".to_owned()),
            (
                stream_deleted("orders"),
                Code::FailedPrecondition,
                "stream-deleted",
                "Event stream 'orders' is deleted.".to_owned(),
            ),
        ];
        for (status, code, exception, message) in table {
            assert_eq!((status.code(), status.message()), (code, message.as_str()));
            assert_eq!(status.metadata().get("exception").unwrap(), exception);
        }
    }

    #[test]
    fn trailers_name_group_reason_and_leader() {
        let status = failed(&GroupKey::new("orders", "readers"), "no");
        let trailer = |status: &Status, name: &str| status.metadata().get(name).unwrap().to_str().unwrap().to_owned();
        let names = ["stream-name", "group-name", "reason"];
        assert_eq!(names.map(|name| trailer(&status, name)), ["orders", "readers", "no"]);
        let status = not_leader("127.0.0.1:2114".parse().unwrap());
        let names = ["leader-endpoint-host", "leader-endpoint-port"];
        assert_eq!(names.map(|name| trailer(&status, name)), ["127.0.0.1", "2114"]);
    }
}
