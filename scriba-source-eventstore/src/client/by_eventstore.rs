//! The port, by the crate `eventstore`.

use ::eventstore as api;

#[path = "implementation.rs"]
#[cfg_attr(
    all(feature = "kurrentdb", feature = "eventstore"),
    expect(clippy::duplicate_mod, reason = "it is compiled once for each crate")
)]
mod implementation;

pub(super) use self::implementation::connect;

const NAME: &str = "eventstore";

/// It knows none but the old scheme.
fn connection_string(given: &str) -> String {
    let old = given.split_once("://").and_then(|(scheme, rest)| {
        let (name, discover) = scheme.split_once('+').map_or((scheme, ""), |(name, _)| (name, "+discover"));
        ["kurrentdb", "kurrent", "kdb"].contains(&name).then(|| format!("esdb{discover}://{rest}"))
    });
    old.unwrap_or_else(|| given.to_owned())
}

/// The crate has made it text.
fn stream_id(event: &api::RecordedEvent) -> String {
    event.stream_id.clone()
}

fn is_caught_up(told: &api::SubscriptionEvent) -> bool {
    matches!(told, api::SubscriptionEvent::CaughtUp)
}

/// Reads of the whole log cannot be filtered by the server: see below.
fn filtered(options: api::ReadAllOptions, _: api::SubscriptionFilter) -> api::ReadAllOptions {
    options
}

/// Whether what is read has been filtered by the server.
const READS_ARE_FILTERED: bool = false;
