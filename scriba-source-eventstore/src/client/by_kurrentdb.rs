//! The port, by the crate `kurrentdb`.

use ::kurrentdb as api;

#[path = "implementation.rs"]
#[cfg_attr(
    all(feature = "kurrentdb", feature = "eventstore"),
    expect(clippy::duplicate_mod, reason = "it is compiled once for each crate")
)]
mod implementation;

pub(super) use self::implementation::connect;

const NAME: &str = "kurrentdb";

fn connection_string(given: &str) -> String {
    given.to_owned()
}

/// As text: the crate promises UTF-8 where there are the bytes that the server sent.
fn stream_id(event: &api::RecordedEvent) -> String {
    String::from_utf8_lossy(event.stream_id().as_bytes()).into_owned()
}

fn is_caught_up(told: &api::SubscriptionEvent) -> bool {
    matches!(told, api::SubscriptionEvent::CaughtUp(_))
}

/// The server filters.
fn filtered(options: api::ReadAllOptions, filter: api::SubscriptionFilter) -> api::ReadAllOptions {
    options.filter(filter)
}

/// Whether what is read has been filtered by the server.
const READS_ARE_FILTERED: bool = true;
