//! The suite for sources: each rule of what a source owes is a test.
//!
//! An adapter supplies a [`SourceBed`], and [`source_conformance!`](crate::source_conformance) makes the tests. Give the bed's
//! type, and the abilities that source and store have:
//!
//! ```
//! use async_trait::async_trait;
//! use scriba_core::{Position, RecordedEvent, Source};
//! use scriba_testing::MemorySource;
//! use scriba_testing::conformance::source::{NewEvent, SourceBed};
//!
//! struct MemoryBed(MemorySource);
//!
//! #[async_trait]
//! impl SourceBed for MemoryBed {
//!     async fn new() -> Self {
//!         Self(MemorySource::new())
//!     }
//!
//!     async fn source(&self) -> Box<dyn Source> {
//!         Box::new(self.0.clone())
//!     }
//!
//!     async fn append(&self, events: Vec<NewEvent>) -> Vec<Position> {
//!         // An adapter writes to its store here, with the id and the metadata.
//!         events.into_iter().map(|event| self.0.append(event.stream_id, event.event_type, event.data)).collect()
//!     }
//! }
//!
//! mod memory_source {
//!     scriba_testing::source_conformance!(super::MemoryBed: exact_start, head, passed_over, several, any_bytes);
//! }
//! ```
//!
//! For the rules of an ability that is not named there are no tests; [`not_offered`] lists them.
//!
//! | ability | means that |
//! |---|---|
//! | `exact_start` | a subscription never begins at or below the asked position (a server that keeps the position may trail) |
//! | `filters` | events of types that were not asked for are left out |
//! | `head` | the inspector knows the head |
//! | `passed_over` | the inspector finds events by type |
//! | `several` | two projections may be subscribed at once |
//! | `any_bytes` | a body may be any bytes, and not JSON only |
//! | `metadata` | events have metadata |
//! | `long_ids` | a stream id may have 10,000 characters |
//! | `nul_in_ids` | a stream id may have a NUL |
//! | `revisions` | events have revisions |
//! | `times` | events have the time of recording |
//! | `keeps_position` | the server keeps a position for each projection, and the source can reset it |
//! | `one_place` | the server lets one subscriber in for each projection |
//! | `truncate` | the bed implements [`Truncate`] |
//! | `restore` | the bed implements [`Restore`] |
//! | `cut` | the bed implements [`Cut`] |
//! | `hold_open` | the bed implements [`HoldOpen`] |
//!
//! A rule looks at one thing, so that a broken one fails one test: a test on order passes a source that misses an event.
//! Failures say what was delivered. Waits go by `tokio::time`; the longest is 15 seconds, for what has to come.
//!
//! # What it does not show
//!
//! That appends of many writers at once are each delivered once, in order (a stress test of the adapter's own); what a
//! server-side group does with redelivery and parked events; that memory is bounded with a large store; that a
//! call is given up when the store accepts and never answers.

#![expect(clippy::missing_panics_doc, reason = "a rule that is broken panics: that is what a suite is for")]

mod abilities;
mod bed;
mod reader;
mod rules;

pub use self::abilities::*;
pub use self::bed::{Cut, HoldOpen, NewEvent, Restore, SourceBed, Truncate};
pub use self::rules::*;

/// Makes the tests of the suite for sources: see [`conformance::source`](crate::conformance::source).
#[macro_export]
macro_rules! source_conformance {
    // Every rule, by the ability it belongs to, given to another macro behind arguments of its own.
    (@rules [$($callback:tt)+] $arguments:tt) => {
        $($callback)+! { @of $arguments
            always {
                a_store_that_can_be_read_passes_the_check
                positions_strictly_increase_over_all_streams
                nothing_is_missing
                everything_above_any_watermark_is_delivered
                no_page_has_more_events_than_demanded
                no_page_has_more_bytes_than_demanded
                one_event_is_always_admitted_however_large
                a_reader_that_asks_for_nothing_for_a_while_loses_nothing
                progress_never_passes_an_event_that_is_not_delivered
                caught_up_is_said_at_the_end_and_not_before
                an_empty_store_is_caught_up
                no_page_is_empty_but_the_first_that_has_caught_up
                events_appended_while_it_waits_arrive
                an_event_comes_back_as_it_was_appended
                empty_and_large_bodies_come_back
                strange_ids_come_back
                the_identity_is_the_same_when_it_is_opened_again
                another_store_has_another_fingerprint
                the_id_of_the_event_at_a_position_is_told
                a_dropped_next_loses_and_repeats_nothing
                a_dropped_subscribe_is_in_nobodys_way
                a_subscription_dropped_half_way_loses_nothing_for_the_next
                an_ack_loses_nothing_above_it
            }
            exact_start {
                nothing_at_or_below_the_watermark_is_delivered
                the_first_position_is_an_event_and_not_the_beginning
            }
            filters {
                only_events_of_listed_types_are_delivered
                progress_moves_beyond_events_of_other_types
            }
            head { the_head_is_the_last_position }
            passed_over {
                events_passed_over_are_found_by_their_types
                events_passed_over_are_found_by_the_types_they_are_not_of
            }
            several { two_subscriptions_at_once_are_each_given_everything }
            any_bytes { bodies_of_any_bytes_come_back }
            metadata { metadata_comes_back }
            long_ids { long_ids_come_back }
            nul_in_ids { ids_with_a_nul_come_back }
            revisions { revisions_count_up_within_each_stream }
            times { the_time_of_recording_is_told }
            keeps_position { a_reset_forgets_what_was_acked }
            one_place {
                the_only_place_is_had_by_one_at_a_time
                who_was_granted_the_place_is_delivered_everything
            }
            truncate { removed_events_are_passed_and_what_is_left_is_delivered }
            restore { a_store_that_was_put_back_shows_other_ids }
            cut {
                after_a_cut_a_new_subscription_delivers_everything
                a_subscription_that_is_cut_while_it_waits_ends_or_goes_on
            }
            hold_open { an_append_that_is_held_open_is_waited_for }
        }
    };

    ($bed:ty $(: $($ability:ident),+ $(,)?)?) => {
        $crate::source_conformance! { @rules [$crate::conformance_tests] ([$] source [$bed] [$($($ability)+)?]) }
    };
}

/// The rules that are no tests of a bed that offers these abilities, each with the ability it needs.
///
/// # Panics
/// When one of them is no ability.
pub fn not_offered(abilities: &[&str]) -> Vec<(&'static str, &'static str)> {
    super::not_offered(&source_conformance!(@rules [super::rules_by_ability] ()), abilities)
}
