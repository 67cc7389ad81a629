//! The suite for targets: each rule of what a target owes is a test.
//!
//! An adapter supplies a [`TargetBed`], and [`target_conformance!`](crate::target_conformance) makes the tests. Give the bed's
//! type, and the abilities that the target has:
//!
//! ```
//! use std::collections::BTreeMap;
//! use std::sync::Arc;
//!
//! use async_trait::async_trait;
//! use scriba_core::target::Target;
//! use scriba_testing::conformance::target::TargetBed;
//! use scriba_testing::{MemoryTarget, TargetFault};
//!
//! #[derive(Clone)]
//! enum Op {
//!     Write(i64, i64),
//!     Add(i64, i64),
//!     Fail(TargetFault),
//! }
//!
//! struct MemoryBed(MemoryTarget<Op>);
//!
//! #[async_trait]
//! impl TargetBed for MemoryBed {
//!     type Op = Op;
//!
//!     async fn new() -> Self {
//!         Self(MemoryTarget::judging(|op| if let Op::Fail(fault) = op { Some(*fault) } else { None }))
//!     }
//!
//!     async fn target(&self) -> Arc<dyn Target<Op>> {
//!         Arc::new(self.0.clone())
//!     }
//!
//!     fn write(&self, key: i64, value: i64) -> Op {
//!         Op::Write(key, value)
//!     }
//!
//!     fn add(&self, key: i64, value: i64) -> Op {
//!         Op::Add(key, value)
//!     }
//!
//!     fn refused(&self) -> Op {
//!         Op::Fail(TargetFault::Integrity)
//!     }
//!
//!     fn failing(&self) -> Op {
//!         Op::Fail(TargetFault::Structural)
//!     }
//!
//!     async fn read(&self) -> Vec<(i64, i64)> {
//!         // An adapter reads its store here.
//!         let mut values = BTreeMap::new();
//!         for (_, op) in self.0.applied("conformance") {
//!             match op {
//!                 Op::Write(key, value) => drop(values.insert(key, value)),
//!                 Op::Add(key, value) => *values.entry(key).or_default() += value,
//!                 Op::Fail(_) => {}
//!             }
//!         }
//!         values.into_iter().collect()
//!     }
//! }
//!
//! mod memory_target {
//!     scriba_testing::target_conformance!(super::MemoryBed: reset, nul_in_texts);
//! }
//! ```
//!
//! For the rules of an ability that is not named there are no tests; [`not_offered`] lists them.
//!
//! | ability | means that |
//! |---|---|
//! | `reset` | the target can reset a projection |
//! | `statements` | it can run statements with a reset, and the bed implements [`Statements`] |
//! | `hold` | the bed implements [`Hold`] |
//! | `nul_in_texts` | texts with a NUL come back as they were, and not with something in its place |
//!
//! A rule looks at one thing, so that a broken one fails one test. Waits go by `tokio::time`; the longest is 15 seconds, for what
//! has to come.
//!
//! # What it does not show
//!
//! What a connection that is cut around COMMIT leaves behind, what a frozen owner is kept from and when, that a call is given up
//! when the store accepts and never answers, and which codes of the store belong to which class: these take faults of the
//! store's own. Nor does it show that a change that hits no row leaves the count of dead letters in a row as it is.

#![expect(clippy::missing_panics_doc, reason = "a rule that is broken panics: that is what a suite is for")]

mod abilities;
mod bed;
mod checkpoint;
mod commit;
mod dead_letters;
mod leases;
mod node;

pub use self::abilities::*;
pub use self::bed::{Hold, Statements, TargetBed};
pub use self::checkpoint::*;
pub use self::commit::*;
pub use self::dead_letters::*;
pub use self::leases::*;

/// Makes the tests of the suite for targets: see [`conformance::target`](crate::conformance::target).
#[macro_export]
macro_rules! target_conformance {
    // Every rule, by the ability it belongs to, given to another macro behind arguments of its own.
    (@rules [$($callback:tt)+] $arguments:tt) => {
        $($callback)+! { @of $arguments
            always {
                tables_that_are_there_pass_the_check
                a_commit_writes_operations_dead_letters_and_checkpoint
                operations_are_applied_in_the_order_of_positions
                a_commit_that_fails_leaves_nothing
                a_commit_that_is_dropped_is_there_whole_or_not_at_all
                an_older_commit_number_is_refused
                a_newer_commit_number_is_refused
                skips_are_counted
                progress_without_events_keeps_the_last_event
                a_refused_event_is_dead_lettered_alone
                a_batch_ends_before_the_event_that_opens_the_circuit
                a_batch_ends_before_a_refused_event_where_that_is_to_halt
                an_owner_that_was_taken_over_from_commits_nothing
                an_owner_that_was_taken_over_from_stores_no_replay_position
                an_owner_that_was_taken_over_from_stores_no_event_types
                each_take_over_raises_the_epoch
                a_take_over_that_is_dropped_is_in_nobodys_way
                a_new_checkpoint_begins_as_its_take_over_says
                a_later_take_over_changes_no_beginning
                position_0_is_an_event_and_not_the_beginning
                the_last_event_comes_back_whatever_its_id
                dead_letters_in_a_row_come_back
                the_replay_position_is_stored_once
                having_caught_up_with_an_empty_source_is_not_position_0
                event_types_are_replaced_and_none_are_not_all
                two_versions_are_apart
                stored_projections_are_read_by_name_and_version
                a_lease_has_one_holder
                its_own_lease_is_renewed
                a_lease_is_released_by_its_holder_only
                a_lease_lapses
                a_lease_that_is_seized_is_the_seizers
                a_take_over_needs_the_lease
                a_take_over_renews_the_lease
                a_take_over_does_not_take_a_released_lease
                a_state_is_read_by_any_node
                a_state_is_stored_under_the_present_epoch_only
                who_asks_for_a_lease_in_vain_stands_by
                a_dead_letter_says_what_it_is_of_and_why
                a_dead_letter_keeps_any_bytes
                a_dead_letter_keeps_long_ids
                an_event_is_one_dead_letter_at_most
                dead_letters_are_filtered_by_stream
                dead_letters_are_filtered_by_kind
                dead_letters_are_filtered_by_position
                dead_letters_are_filtered_by_time
                dead_letters_are_paged_in_both_directions
                dead_letters_are_counted
            }
            reset {
                a_reset_clears_the_checkpoint
                a_reset_raises_the_epoch
                after_a_reset_a_take_over_begins_anew
                an_owner_from_before_a_reset_commits_nothing
                a_reset_is_refused_while_a_node_holds_the_lease
                a_reset_is_refused_while_a_node_stands_by
                a_reset_is_refused_while_it_may_run_without_a_lease
                a_reset_deletes_dead_letters_only_where_it_says_so
            }
            statements {
                a_reset_runs_its_statements
                a_reset_whose_statement_fails_changes_nothing
            }
            hold {
                a_take_over_waits_for_a_commit_under_way
                a_lease_is_renewed_while_a_commit_is_under_way
            }
            nul_in_texts { texts_with_a_nul_come_back }
        }
    };

    ($bed:ty $(: $($ability:ident),+ $(,)?)?) => {
        $crate::target_conformance! { @rules [$crate::conformance_tests] ([$] target [$bed] [$($($ability)+)?]) }
    };
}

/// The rules that are no tests of a bed that offers these abilities, each with the ability it needs.
///
/// # Panics
/// When one of them is no ability.
pub fn not_offered(abilities: &[&str]) -> Vec<(&'static str, &'static str)> {
    super::not_offered(&target_conformance!(@rules [super::rules_by_ability] ()), abilities)
}
