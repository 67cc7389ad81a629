//! The settings of a group: those it is created with, and those that lose events.

use std::time::Duration;

use scriba_core::source::SourceError;

use crate::client::GroupSettings;

/// The longest that goes over the wire. An event that is handed out comes back by itself when the connection ends; within one, nothing
/// but an ack may end its stay.
const LONGEST: Duration = Duration::from_millis(i32::MAX as u64);
/// Below these, what a slow projection or a long outage leaves without an ack is delivered again out of order, and parked.
const TIMEOUT_AT_LEAST: Duration = Duration::from_hours(1);
const RETRIES_AT_LEAST: i32 = 1_000;
/// The server reads no more at once.
const READ_AT_ONCE: i32 = 100;
/// Well above what is read at once: with less, older servers stop reading.
const BUFFERED: i32 = 1_000;

/// When the server writes down how far the group is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checkpointing {
    pub(crate) after: Duration,
    pub(crate) min: i32,
    pub(crate) max: i32,
}

impl Default for Checkpointing {
    /// With a minimum of 1, the last events before a pause are written down too, and a restart of the server delivers at most a
    /// second's events again. That costs the server one small event a second while events are acked.
    fn default() -> Self {
        Self { after: Duration::from_secs(1), min: 1, max: 1_000 }
    }
}

/// What a group is created with, to begin above a revision.
pub(crate) fn settings(after: Option<u64>, checkpointing: Checkpointing) -> GroupSettings {
    GroupSettings {
        resolve_links: true,
        start_from: Some(after.map_or(0, |after| after.saturating_add(1))),
        message_timeout: LONGEST,
        max_retry_count: i32::MAX,
        checkpoint_after: checkpointing.after,
        min_checkpoint_count: checkpointing.min,
        max_checkpoint_count: checkpointing.max,
        max_subscriber_count: 1,
        live_buffer_size: BUFFERED,
        history_buffer_size: BUFFERED,
        read_batch_size: READ_AT_ONCE,
        consumer_strategy: "DispatchToSingle".to_owned(),
    }
}

/// Refuses a group that exists with settings by which events are lost or come out of order.
pub(crate) fn check(whom: &str, found: &GroupSettings) -> Result<(), SourceError> {
    let unsafe_settings = unsafe_settings(found);
    if unsafe_settings.is_empty() {
        return Ok(());
    }
    Err(SourceError::unusable(format!(
        "{whom} exists with settings by which events get lost or out of order: {}. Update the group, or delete it and start again: it is \
         made anew from the watermark, so deleting loses nothing",
        unsafe_settings.join("; ")
    )))
}

/// Each with what was found and what is wanted.
fn unsafe_settings(found: &GroupSettings) -> Vec<String> {
    let mut refused = Vec::new();
    let strategy = found.consumer_strategy.as_str();
    // With one subscriber these two are one.
    if !matches!(strategy, "DispatchToSingle" | "RoundRobin") {
        refused.push(format!("consumer strategy is {strategy}, wanted DispatchToSingle"));
    }
    if found.max_subscriber_count != 1 {
        let count = match found.max_subscriber_count {
            0 => "unlimited".to_owned(),
            count => count.to_string(),
        };
        refused.push(format!("max subscriber count is {count}, wanted 1"));
    }
    if found.message_timeout < TIMEOUT_AT_LEAST {
        let (timeout, least, wanted) =
            (found.message_timeout.as_millis(), TIMEOUT_AT_LEAST.as_millis(), LONGEST.as_millis());
        refused.push(format!("message timeout is {timeout} ms, wanted {wanted} ms, at least {least} ms"));
    }
    if found.max_retry_count < RETRIES_AT_LEAST {
        let retries = found.max_retry_count;
        refused.push(format!("max retry count is {retries}, wanted {}, at least {RETRIES_AT_LEAST}", i32::MAX));
    }
    if !found.resolve_links {
        refused.push("resolve link tos is off, wanted on".to_owned());
    }
    refused
}

#[cfg(test)]
mod tests {
    use super::*;

    fn safe() -> GroupSettings {
        settings(None, Checkpointing::default())
    }

    #[test]
    fn what_is_created_is_safe_and_begins_above_the_watermark() {
        assert!(check("group", &safe()).is_ok());
        assert_eq!(safe().start_from, Some(0));
        assert_eq!(settings(Some(0), Checkpointing::default()).start_from, Some(1));
        assert_eq!(i32::try_from(safe().message_timeout.as_millis()), Ok(i32::MAX));
        assert!(safe().read_batch_size < safe().history_buffer_size, "a server refuses others");
    }

    #[test]
    fn every_unsafe_setting_is_named_with_what_was_found_and_what_is_wanted() {
        let found = GroupSettings {
            consumer_strategy: "Pinned".to_owned(),
            max_subscriber_count: 2,
            message_timeout: Duration::from_secs(30),
            max_retry_count: 10,
            resolve_links: false,
            ..safe()
        };
        let Err(SourceError::Unusable { message }) = check("group g", &found) else { panic!("not refused") };
        for part in [
            "group g exists",
            "consumer strategy is Pinned, wanted DispatchToSingle",
            "max subscriber count is 2, wanted 1",
            "message timeout is 30000 ms, wanted 2147483647 ms",
            "max retry count is 10, wanted 2147483647",
            "resolve link tos is off, wanted on",
            "delete it",
        ] {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }

    #[test]
    fn a_group_that_an_operator_made_may_differ_where_nothing_is_lost() {
        let hour = Duration::from_hours(1);
        let other = GroupSettings {
            consumer_strategy: "RoundRobin".to_owned(),
            message_timeout: hour,
            max_retry_count: 1_000,
            min_checkpoint_count: 10,
            read_batch_size: 20,
            ..safe()
        };
        assert!(check("group", &other).is_ok());
        let unlimited = GroupSettings { max_subscriber_count: 0, ..safe() };
        assert_eq!(unsafe_settings(&unlimited), ["max subscriber count is unlimited, wanted 1"]);
        let shorter = GroupSettings { message_timeout: hour.saturating_sub(Duration::from_millis(1)), ..safe() };
        assert_eq!(unsafe_settings(&shorter).len(), 1);
    }
}
