//! The suite can fail: targets that break one rule are each caught by the test of that rule, and by no other.

mod bed;
mod committer;

use futures_util::FutureExt;
use scriba_testing::conformance::target;

use self::bed::BrokenBed;

/// What is broken, each caught by the rule beside it in [`BREAKS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Break {
    Nothing,
    Check,
    LosesALastDeadLetter,
    ReversesOperationsOfAnEvent,
    KeepsWhatCameBeforeAFailure,
    WritesBeforeItCommits,
    SmallerNumbersCommit,
    LargerNumbersCommit,
    SkipsAloneAreNotCounted,
    ProgressForgetsTheLastEvent,
    DoesNotTellWhatItRefused,
    CircuitStaysClosed,
    NeverHalts,
    WritesBeforeItIsFenced,
    AnyoneStoresReplayPositions,
    AnyoneStoresEventTypes,
    EpochsRepeat,
    ClaimSurvivesADroppedTakeOver,
    NothingIsCreated,
    TellsTheSourceItWasAskedWith,
    LastEventAtZeroIsNone,
    ShortIdsOfLastEvents,
    ForgetsDeadLettersInARow,
    ReplayPositionMoves,
    AnEmptySourceIsPositionZero,
    NoTypesAreAll,
    ShortVersions,
    VersionsSortAsText,
    TellsNobodyTheHolder,
    DoesNotRenew,
    AnyoneReleases,
    LeasesNeverLapse,
    SeizesAFreeLeaseOnly,
    TakesOverWithoutTheLease,
    TakeOverDoesNotRenew,
    TakesAReleasedLease,
    ForgetsTheHaltCode,
    AnyoneStoresStates,
    OneStandbyAtMost,
    NoTimes,
    LossyUtf8,
    ShortIds,
    KeepsTheFirstDeadLetter,
    StreamsByPrefix,
    KindsByPattern,
    ToPositionIsExclusive,
    UntilIsInclusive,
    NoPagesBackwards,
    KindsByName,
    ResetKeepsTheLastEvent,
    ResetKeepsTheEpoch,
    AlwaysAnewOnceReset,
    ResetOfNothingKeepsTheEpoch,
    ResetsWhileHeld,
    ResetsWhileStoodBy,
    ResetsWhileItMayRun,
    ResetDeletesAllDeadLetters,
    RunsNoStatements,
    StatementsAreNotUndone,
    ReadsBeforeItWaits,
    LeaseWaitsForACommit,
    EndsAtNul,
}

const BREAKS: [(Break, &str); 61] = [
    (Break::Check, "tables_that_are_there_pass_the_check"),
    (Break::LosesALastDeadLetter, "a_commit_writes_operations_dead_letters_and_checkpoint"),
    (Break::ReversesOperationsOfAnEvent, "operations_are_applied_in_the_order_of_positions"),
    (Break::KeepsWhatCameBeforeAFailure, "a_commit_that_fails_leaves_nothing"),
    (Break::WritesBeforeItCommits, "a_commit_that_is_dropped_is_there_whole_or_not_at_all"),
    (Break::SmallerNumbersCommit, "an_older_commit_number_is_refused"),
    (Break::LargerNumbersCommit, "a_newer_commit_number_is_refused"),
    (Break::SkipsAloneAreNotCounted, "skips_are_counted"),
    (Break::ProgressForgetsTheLastEvent, "progress_without_events_keeps_the_last_event"),
    (Break::DoesNotTellWhatItRefused, "a_refused_event_is_dead_lettered_alone"),
    (Break::CircuitStaysClosed, "a_batch_ends_before_the_event_that_opens_the_circuit"),
    (Break::NeverHalts, "a_batch_ends_before_a_refused_event_where_that_is_to_halt"),
    (Break::WritesBeforeItIsFenced, "an_owner_that_was_taken_over_from_commits_nothing"),
    (Break::AnyoneStoresReplayPositions, "an_owner_that_was_taken_over_from_stores_no_replay_position"),
    (Break::AnyoneStoresEventTypes, "an_owner_that_was_taken_over_from_stores_no_event_types"),
    (Break::EpochsRepeat, "each_take_over_raises_the_epoch"),
    (Break::ClaimSurvivesADroppedTakeOver, "a_take_over_that_is_dropped_is_in_nobodys_way"),
    (Break::NothingIsCreated, "a_new_checkpoint_begins_as_its_take_over_says"),
    (Break::TellsTheSourceItWasAskedWith, "a_later_take_over_changes_no_beginning"),
    (Break::LastEventAtZeroIsNone, "position_0_is_an_event_and_not_the_beginning"),
    (Break::ShortIdsOfLastEvents, "the_last_event_comes_back_whatever_its_id"),
    (Break::ForgetsDeadLettersInARow, "dead_letters_in_a_row_come_back"),
    (Break::ReplayPositionMoves, "the_replay_position_is_stored_once"),
    (Break::AnEmptySourceIsPositionZero, "having_caught_up_with_an_empty_source_is_not_position_0"),
    (Break::NoTypesAreAll, "event_types_are_replaced_and_none_are_not_all"),
    (Break::ShortVersions, "two_versions_are_apart"),
    (Break::VersionsSortAsText, "stored_projections_are_read_by_name_and_version"),
    (Break::TellsNobodyTheHolder, "a_lease_has_one_holder"),
    (Break::DoesNotRenew, "its_own_lease_is_renewed"),
    (Break::AnyoneReleases, "a_lease_is_released_by_its_holder_only"),
    (Break::LeasesNeverLapse, "a_lease_lapses"),
    (Break::SeizesAFreeLeaseOnly, "a_lease_that_is_seized_is_the_seizers"),
    (Break::TakesOverWithoutTheLease, "a_take_over_needs_the_lease"),
    (Break::TakeOverDoesNotRenew, "a_take_over_renews_the_lease"),
    (Break::TakesAReleasedLease, "a_take_over_does_not_take_a_released_lease"),
    (Break::ForgetsTheHaltCode, "a_state_is_read_by_any_node"),
    (Break::AnyoneStoresStates, "a_state_is_stored_under_the_present_epoch_only"),
    (Break::OneStandbyAtMost, "who_asks_for_a_lease_in_vain_stands_by"),
    (Break::NoTimes, "a_dead_letter_says_what_it_is_of_and_why"),
    (Break::LossyUtf8, "a_dead_letter_keeps_any_bytes"),
    (Break::ShortIds, "a_dead_letter_keeps_long_ids"),
    (Break::KeepsTheFirstDeadLetter, "an_event_is_one_dead_letter_at_most"),
    (Break::StreamsByPrefix, "dead_letters_are_filtered_by_stream"),
    (Break::KindsByPattern, "dead_letters_are_filtered_by_kind"),
    (Break::ToPositionIsExclusive, "dead_letters_are_filtered_by_position"),
    (Break::UntilIsInclusive, "dead_letters_are_filtered_by_time"),
    (Break::NoPagesBackwards, "dead_letters_are_paged_in_both_directions"),
    (Break::KindsByName, "dead_letters_are_counted"),
    (Break::ResetKeepsTheLastEvent, "a_reset_clears_the_checkpoint"),
    (Break::ResetKeepsTheEpoch, "a_reset_raises_the_epoch"),
    (Break::AlwaysAnewOnceReset, "after_a_reset_a_take_over_begins_anew"),
    (Break::ResetOfNothingKeepsTheEpoch, "an_owner_from_before_a_reset_commits_nothing"),
    (Break::ResetsWhileHeld, "a_reset_is_refused_while_a_node_holds_the_lease"),
    (Break::ResetsWhileStoodBy, "a_reset_is_refused_while_a_node_stands_by"),
    (Break::ResetsWhileItMayRun, "a_reset_is_refused_while_it_may_run_without_a_lease"),
    (Break::ResetDeletesAllDeadLetters, "a_reset_deletes_dead_letters_only_where_it_says_so"),
    (Break::RunsNoStatements, "a_reset_runs_its_statements"),
    (Break::StatementsAreNotUndone, "a_reset_whose_statement_fails_changes_nothing"),
    (Break::ReadsBeforeItWaits, "a_take_over_waits_for_a_commit_under_way"),
    (Break::LeaseWaitsForACommit, "a_lease_is_renewed_while_a_commit_is_under_way"),
    (Break::EndsAtNul, "texts_with_a_nul_come_back"),
];

tokio::task_local! {
    /// What the beds made in this task break.
    static BREAK: Break;
}

async fn caught_by(broken: Break) -> Vec<&'static str> {
    let rules = scriba_testing::target_conformance!(@rules [named_rules] (target BrokenBed));
    crate::caught_by(&BREAK, broken, &rules).await
}

#[tokio::test(start_paused = true)]
async fn each_broken_rule_is_caught_by_its_test_and_by_no_other() {
    let mut others = Vec::new();
    for (broken, rule) in BREAKS {
        let caught = caught_by(broken).await;
        if caught != [rule] {
            others.push((broken, caught));
        }
    }
    assert!(others.is_empty(), "caught otherwise than by one test of its own: {others:#?}");
}

#[tokio::test(start_paused = true)]
async fn the_same_target_with_nothing_broken_passes_and_every_rule_has_a_target_that_breaks_it() {
    assert_eq!(caught_by(Break::Nothing).await, Vec::<&str>::new());
    for (rule, _) in scriba_testing::target_conformance!(@rules [named_rules] (target BrokenBed)) {
        assert!(BREAKS.iter().any(|(_, caught_by)| *caught_by == rule), "no target breaks {rule}");
    }
}
