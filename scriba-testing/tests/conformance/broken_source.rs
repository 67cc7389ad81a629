//! The suite can fail: sources that break one rule are each caught by the test of that rule, and by no other.

mod bed;

use futures_util::FutureExt;
use scriba_testing::conformance::source;

use self::bed::BrokenBed;

/// What is broken, each caught by the rule beside it in [`BREAKS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Break {
    Nothing,
    Check,
    SwapsEventsOfTwoStreams,
    LosesAnEventAtTheEdgeOfABuffer,
    BeginsOneTooHigh,
    OneEventTooMany,
    IgnoresBytes,
    WithholdsLargeEvents,
    DropsWhatItHasNoRoomFor,
    ProgressAheadOfItsEvent,
    CaughtUpAlways,
    CaughtUpNever,
    SilentWhenEmpty,
    EmptyPagesWhileItWaits,
    MissesTheWakeUp,
    OwnIds,
    TruncatesBodies,
    AsciiOnly,
    FingerprintOfEachOpening,
    OneFingerprintForAll,
    IdOfTheNextEvent,
    LosesAPageWithADroppedNext,
    ClaimSurvivesADroppedSubscribe,
    PrefetchCountsAsDelivered,
    AckOfAllHandedOut,
    BeginsOneTooLow,
    ZeroIsTheBeginning,
    DeliversAllTypes,
    NoProgress,
    HeadOfAnEmptyStore,
    PassedOverIgnoresUpTo,
    AllButAsOnly,
    CompetingConsumers,
    LossyUtf8,
    NoMetadata,
    ShortIds,
    EndsAtNul,
    RevisionsOfTheWholeStore,
    NoTimes,
    ResetDoesNothing,
    ClaimIsNeverRefused,
    PlaceBeginsAtTheHead,
    HaltsAtRetention,
    CachesIds,
    ClaimSurvivesACut,
    HangsWhenCut,
    PassesOpenAppends,
}

const BREAKS: [(Break, &str); 46] = [
    (Break::Check, "a_store_that_can_be_read_passes_the_check"),
    (Break::SwapsEventsOfTwoStreams, "positions_strictly_increase_over_all_streams"),
    (Break::LosesAnEventAtTheEdgeOfABuffer, "nothing_is_missing"),
    (Break::BeginsOneTooHigh, "everything_above_any_watermark_is_delivered"),
    (Break::OneEventTooMany, "no_page_has_more_events_than_demanded"),
    (Break::IgnoresBytes, "no_page_has_more_bytes_than_demanded"),
    (Break::WithholdsLargeEvents, "one_event_is_always_admitted_however_large"),
    (Break::DropsWhatItHasNoRoomFor, "a_reader_that_asks_for_nothing_for_a_while_loses_nothing"),
    (Break::ProgressAheadOfItsEvent, "progress_never_passes_an_event_that_is_not_delivered"),
    (Break::CaughtUpAlways, "caught_up_is_said_at_the_end_and_not_before"),
    (Break::CaughtUpNever, "caught_up_is_said_at_the_end_and_not_before"),
    (Break::SilentWhenEmpty, "an_empty_store_is_caught_up"),
    (Break::EmptyPagesWhileItWaits, "no_page_is_empty_but_the_first_that_has_caught_up"),
    (Break::MissesTheWakeUp, "events_appended_while_it_waits_arrive"),
    (Break::OwnIds, "an_event_comes_back_as_it_was_appended"),
    (Break::TruncatesBodies, "empty_and_large_bodies_come_back"),
    (Break::AsciiOnly, "strange_ids_come_back"),
    (Break::FingerprintOfEachOpening, "the_identity_is_the_same_when_it_is_opened_again"),
    (Break::OneFingerprintForAll, "another_store_has_another_fingerprint"),
    (Break::IdOfTheNextEvent, "the_id_of_the_event_at_a_position_is_told"),
    (Break::LosesAPageWithADroppedNext, "a_dropped_next_loses_and_repeats_nothing"),
    (Break::ClaimSurvivesADroppedSubscribe, "a_dropped_subscribe_is_in_nobodys_way"),
    (Break::PrefetchCountsAsDelivered, "a_subscription_dropped_half_way_loses_nothing_for_the_next"),
    (Break::AckOfAllHandedOut, "an_ack_loses_nothing_above_it"),
    (Break::BeginsOneTooLow, "nothing_at_or_below_the_watermark_is_delivered"),
    (Break::ZeroIsTheBeginning, "the_first_position_is_an_event_and_not_the_beginning"),
    (Break::DeliversAllTypes, "only_events_of_listed_types_are_delivered"),
    (Break::NoProgress, "progress_moves_beyond_events_of_other_types"),
    (Break::HeadOfAnEmptyStore, "the_head_is_the_last_position"),
    (Break::PassedOverIgnoresUpTo, "events_passed_over_are_found_by_their_types"),
    (Break::AllButAsOnly, "events_passed_over_are_found_by_the_types_they_are_not_of"),
    (Break::CompetingConsumers, "two_subscriptions_at_once_are_each_given_everything"),
    (Break::LossyUtf8, "bodies_of_any_bytes_come_back"),
    (Break::NoMetadata, "metadata_comes_back"),
    (Break::ShortIds, "long_ids_come_back"),
    (Break::EndsAtNul, "ids_with_a_nul_come_back"),
    (Break::RevisionsOfTheWholeStore, "revisions_count_up_within_each_stream"),
    (Break::NoTimes, "the_time_of_recording_is_told"),
    (Break::ResetDoesNothing, "a_reset_forgets_what_was_acked"),
    (Break::ClaimIsNeverRefused, "the_only_place_is_had_by_one_at_a_time"),
    (Break::PlaceBeginsAtTheHead, "who_was_granted_the_place_is_delivered_everything"),
    (Break::HaltsAtRetention, "removed_events_are_passed_and_what_is_left_is_delivered"),
    (Break::CachesIds, "a_store_that_was_put_back_shows_other_ids"),
    (Break::ClaimSurvivesACut, "after_a_cut_a_new_subscription_delivers_everything"),
    (Break::HangsWhenCut, "a_subscription_that_is_cut_while_it_waits_ends_or_goes_on"),
    (Break::PassesOpenAppends, "an_append_that_is_held_open_is_waited_for"),
];

tokio::task_local! {
    /// What the beds made in this task break.
    static BREAK: Break;
}

async fn caught_by(broken: Break) -> Vec<&'static str> {
    let rules = scriba_testing::source_conformance!(@rules [named_rules] (source BrokenBed));
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
async fn the_same_source_with_nothing_broken_passes_and_every_rule_has_a_source_that_breaks_it() {
    assert_eq!(caught_by(Break::Nothing).await, Vec::<&str>::new());
    for (rule, _) in scriba_testing::source_conformance!(@rules [named_rules] (source BrokenBed)) {
        assert!(BREAKS.iter().any(|(_, caught_by)| *caught_by == rule), "no source breaks {rule}");
    }
}
