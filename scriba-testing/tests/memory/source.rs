use std::collections::BTreeSet;
use std::time::Duration;

use scriba_core::source::{Delivery, Demand, Page, SourceError, SubscribeRequest, Subscription};
use scriba_core::telemetry::Telemetry;
use scriba_core::{EventId, Position, ProjectionId, RecordedEvent, Source as _};
use scriba_testing::{Faults, MemorySource, SourceCall, SourceFault};
use tokio::time::timeout;

use crate::{SHORT, at, filled};

const ALL: Demand = Demand { events: 1_000, bytes: 1 << 30 };

fn positions(page: &Page) -> Vec<u64> {
    page.deliveries
        .iter()
        .filter_map(|delivery| match delivery {
            Delivery::Event(event) => Some(event.position.get()),
            Delivery::Progress(_) => None,
        })
        .collect()
}

async fn subscribe(source: &MemorySource, after: Option<u64>) -> Result<Box<dyn Subscription>, SourceError> {
    subscribe_to(source, after, None).await
}

async fn subscribe_to(
    source: &MemorySource,
    after: Option<u64>,
    event_types: Option<&'static [&'static str]>,
) -> Result<Box<dyn Subscription>, SourceError> {
    let telemetry = Telemetry::new(ProjectionId::from("counts"), Vec::new());
    source
        .subscribe(SubscribeRequest { after: after.map(Position::new), event_types, in_flight: 1_000, telemetry })
        .await
}

#[tokio::test(start_paused = true)]
async fn delivers_in_order_says_when_it_has_caught_up_and_then_waits() {
    let source = filled(MemorySource::new(), 3);
    let mut subscription = subscribe(&source, Some(0)).await.unwrap();
    let page = subscription.next(ALL).await.unwrap();
    assert_eq!((positions(&page), page.caught_up), (vec![1, 2], true));
    assert!(timeout(SHORT, subscription.next(ALL)).await.is_err(), "nothing more is to come");

    let appender = source.clone();
    let waiting = tokio::spawn(async move { subscription.next(ALL).await });
    tokio::time::sleep(SHORT).await;
    appender.append("stream-0", "Counted", "3");
    let page = waiting.await.unwrap().unwrap();
    assert_eq!((positions(&page), page.caught_up), (vec![3], true));
    assert_eq!(source.events()[3].revision, Some(1), "the second event of its stream");
    assert_eq!(source.subscriptions(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_empty_log_is_caught_up_once_and_has_no_head() {
    let source = MemorySource::new();
    let mut subscription = subscribe(&source, None).await.unwrap();
    let page = subscription.next(ALL).await.unwrap();
    assert!(page.deliveries.is_empty() && page.caught_up);
    assert!(timeout(SHORT, subscription.next(ALL)).await.is_err());
    let mut inspector = source.inspector().await.unwrap();
    assert_eq!(inspector.head().await.unwrap(), None);
    source.append_at(at(7), "s", "Counted", "");
    assert_eq!(inspector.head().await.unwrap(), Some(at(7)));
    assert_eq!(inspector.event_id_at(at(7)).await.unwrap(), Some(EventId::from("event-7")));
    assert_eq!(inspector.event_id_at(at(6)).await.unwrap(), None);
}

#[tokio::test]
async fn hands_out_no_more_than_the_demand_but_one_event_however_large() {
    let source = MemorySource::new();
    source.append("s", "Counted", vec![b'x'; 10_000]);
    source.append("s", "Counted", "small");
    source.append("s", "Counted", "small");
    let mut subscription = subscribe(&source, None).await.unwrap();
    let page = subscription.next(Demand { events: 10, bytes: 1_000 }).await.unwrap();
    assert_eq!((positions(&page), page.caught_up), (vec![0], false));
    let page = subscription.next(Demand { events: 1, bytes: 1_000 }).await.unwrap();
    assert_eq!((positions(&page), page.caught_up), (vec![1], false));
}

#[tokio::test]
async fn delivers_all_types_unless_told_to_filter_and_then_reports_progress_over_the_others() {
    for filters in [false, true] {
        let source = MemorySource::new().filters_types(filters);
        source.append("s", "Wanted", "");
        source.append("s", "Other", "");
        let mut subscription = subscribe_to(&source, None, Some(&["Wanted"])).await.unwrap();
        let page = subscription.next(ALL).await.unwrap();
        assert!(page.caught_up);
        if filters {
            assert_eq!(positions(&page), [0]);
            assert!(matches!(page.deliveries[1], Delivery::Progress(position) if position == at(1)));
        } else {
            assert_eq!(positions(&page), [0, 1]);
        }
    }
}

#[tokio::test]
async fn what_is_acked_is_never_delivered_again_and_the_rest_is() {
    let source = filled(MemorySource::new(), 5);
    let mut subscription = subscribe(&source, None).await.unwrap();
    subscription.next(ALL).await.unwrap();
    subscription.ack(at(2)).await.unwrap();
    drop(subscription);
    assert_eq!(source.acked(), Some(at(2)));
    let mut again = subscribe(&source, Some(0)).await.unwrap();
    assert_eq!(positions(&again.next(ALL).await.unwrap()), [3, 4], "an early ack loses events");
    source.forget_acks();
    let mut anew = subscribe(&source, Some(0)).await.unwrap();
    assert_eq!(positions(&anew.next(ALL).await.unwrap()), [1, 2, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_next_loses_and_repeats_nothing() {
    let events = 300;
    let faults = Faults {
        seed: 7,
        delay: Duration::from_millis(1)..Duration::from_millis(20),
        page: Some(5),
        ..Faults::default()
    };
    let source = filled(MemorySource::new().faults(faults), events);
    let mut subscription = subscribe(&source, None).await.unwrap();
    let mut seen = Vec::new();
    let mut dropped = 0;
    while (seen.len() as u64) < events {
        match timeout(Duration::from_millis(3), subscription.next(ALL)).await {
            Ok(page) => seen.extend(positions(&page.unwrap())),
            Err(_) => dropped += 1,
        }
    }
    assert!(dropped > 100, "only {dropped} calls were dropped half-way");
    assert_eq!(seen, (0..events).collect::<Vec<_>>());
    assert!(source.faults_met().delayed > 50);
}

#[tokio::test]
async fn scripted_faults_come_in_their_order() {
    let source = filled(MemorySource::new(), 6);
    let mut subscription = subscribe(&source, None).await.unwrap();
    subscription.next(Demand { events: 3, ..ALL }).await.unwrap();
    subscription.ack(at(0)).await.unwrap();
    source.inject(SourceFault::Repeat);
    source.inject(SourceFault::End);
    source.inject(SourceFault::StartBelow);

    let page = subscription.next(ALL).await.unwrap();
    let repeated: Vec<_> = positions(&page).into_iter().filter(|position| *position < 3).collect();
    assert!(!repeated.is_empty() && !repeated.contains(&0), "of what is not acked only: {repeated:?}");
    let error = subscription.next(ALL).await.unwrap_err();
    assert!(matches!(error, SourceError::Ended { .. }), "{error}");
    assert!(subscription.next(ALL).await.is_err(), "an ended subscription stays ended");

    let mut below = subscribe(&source, Some(4)).await.unwrap();
    assert_eq!(positions(&below.next(ALL).await.unwrap()), [1, 2, 3, 4, 5], "right above the last ack");
    let met = source.faults_met();
    assert_eq!((met.repeated, met.ended, met.started_below), (repeated.len() as u64, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_outage_ends_subscriptions_that_wait_and_fails_every_call_until_it_is_over() {
    let source = filled(MemorySource::new(), 1);
    let mut subscription = subscribe(&source, None).await.unwrap();
    subscription.next(ALL).await.unwrap();
    let waiting = tokio::spawn(async move { subscription.next(ALL).await });
    tokio::time::sleep(SHORT).await;
    source.unavailable_for(Duration::from_secs(5));
    let unavailable = |error| matches!(error, SourceError::Unavailable { .. });
    assert!(unavailable(waiting.await.unwrap().unwrap_err()));
    assert!(unavailable(subscribe(&source, None).await.err().unwrap()));
    assert!(unavailable(source.check().await.unwrap_err()));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(subscribe(&source, None).await.is_ok());
}

#[tokio::test]
async fn a_late_event_comes_out_of_order_where_it_was_passed_and_in_order_elsewhere() {
    let source = MemorySource::new();
    source.append_at(at(5), "a", "Counted", "");
    source.append_at(at(9), "a", "Counted", "");
    let mut past = subscribe(&source, None).await.unwrap();
    assert_eq!(positions(&past.next(ALL).await.unwrap()), [5, 9]);
    let mut before = subscribe(&source, None).await.unwrap();
    source.append_late(at(7), "b", "Counted", "");
    assert_eq!(positions(&past.next(ALL).await.unwrap()), [7]);
    assert_eq!(positions(&before.next(ALL).await.unwrap()), [5, 7, 9]);
    assert_eq!(source.faults_met().late, 1);
}

#[tokio::test]
#[should_panic(expected = "position 5 is not above the head")]
async fn an_append_below_the_head_is_refused() {
    let source = MemorySource::new();
    source.append_at(at(5), "a", "Counted", "");
    source.append_at(at(5), "a", "Counted", "");
}

#[tokio::test]
async fn prepared_events_are_delivered_as_they_are() {
    let source = MemorySource::new();
    let events = filled(MemorySource::new(), 3).events();
    let prepared = RecordedEvent { id: EventId::from("mine"), position: at(40), ..events[2].clone() };
    source.append_all([events[0].clone(), prepared]);
    let mut subscription = subscribe(&source, Some(0)).await.unwrap();
    let page = subscription.next(ALL).await.unwrap();
    assert!(matches!(&page.deliveries[0], Delivery::Event(event) if event.id == "mine" && event.position == at(40)));
}

/// Reads everything through all faults, acking now and then, as an engine does that subscribes again from what it
/// has seen without a gap. Returns what it saw for the first time, in order.
async fn read_through_faults(source: &MemorySource, events: u64) -> Vec<u64> {
    let mut seen = Vec::new();
    let mut acked = None;
    while (seen.len() as u64) < events {
        let after = seen.last().copied();
        let Ok(mut subscription) = subscribe(source, after).await else {
            tokio::time::sleep(SHORT).await;
            continue;
        };
        let mut highest: Option<u64> = None;
        let mut unacked = BTreeSet::new();
        while let Ok(page) = subscription.next(Demand { events: 10, ..ALL }).await {
            assert!(page.deliveries.len() <= 10, "more than the demand");
            for position in positions(&page) {
                if highest.is_some_and(|highest| position <= highest) {
                    assert!(unacked.contains(&position), "{position} repeated, though acked or never handed out");
                } else {
                    let lowest = acked.map_or(0, |acked: u64| acked + 1);
                    let expected =
                        highest.map_or(lowest..=after.map_or(0, |after| after + 1), |last| last + 1..=last + 1);
                    assert!(expected.contains(&position), "{position} came, {expected:?} was expected");
                    highest = Some(position);
                    unacked.insert(position);
                    if seen.last().is_none_or(|last| position > *last) {
                        seen.push(position);
                    }
                }
            }
            let last = *seen.last().unwrap();
            if last + 1 == events {
                break;
            }
            if last % 3 == 0 && subscription.ack(at(last)).await.is_ok() {
                acked = Some(last);
                unacked = unacked.split_off(&(last + 1));
            }
        }
    }
    seen
}

#[tokio::test(start_paused = true)]
async fn faults_by_seed_all_happen_and_never_break_what_a_source_owes() {
    let events = 400;
    for seed in 0..20 {
        let faults = Faults {
            seed,
            repeat: 0.3,
            end: 0.1,
            unavailable: 0.05,
            outage: SHORT..Duration::from_secs(1),
            delay: Duration::ZERO..SHORT,
            start_below: true,
            page: Some(8),
        };
        let source = filled(MemorySource::new().faults(faults), events);
        let seen = read_through_faults(&source, events).await;
        assert_eq!(seen, (0..events).collect::<Vec<_>>(), "seed {seed}");
        let met = source.faults_met();
        let all = [met.repeated, met.ended, met.unavailable, met.delayed, met.started_below];
        assert!(all.iter().all(|count| *count > 0), "seed {seed}: {met:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn certain_repetition_does_not_stop_progress() {
    let source = filled(MemorySource::new().faults(Faults { repeat: 1.0, ..Faults::default() }), 5);
    let mut subscription = subscribe(&source, None).await.unwrap();
    let mut highest = 0;
    for _ in 0..20 {
        let page = timeout(SHORT, subscription.next(Demand { events: 1, ..ALL })).await;
        highest = page.map_or(highest, |page| highest.max(positions(&page.unwrap())[0]));
    }
    assert_eq!(highest, 4);
    assert!(source.faults_met().repeated >= 4);
}

#[tokio::test]
async fn a_skipped_event_is_never_delivered_by_its_subscription_and_a_new_one_has_it() {
    let source = filled(MemorySource::new(), 5);
    let mut subscription = subscribe(&source, None).await.unwrap();
    subscription.next(Demand { events: 2, ..ALL }).await.unwrap();
    source.inject(SourceFault::Skip);
    let page = subscription.next(ALL).await.unwrap();
    assert_eq!((positions(&page), page.caught_up), (vec![3, 4], true), "without 2");
    assert_eq!(source.faults_met().skipped, 1);
    let mut again = subscribe(&source, Some(1)).await.unwrap();
    assert_eq!(positions(&again.next(ALL).await.unwrap()), [2, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_skipped_event_that_is_alone_makes_no_page() {
    let source = MemorySource::new();
    let mut subscription = subscribe(&source, None).await.unwrap();
    subscription.next(ALL).await.unwrap();
    source.inject(SourceFault::Skip);
    source.append("s", "Counted", "");
    assert!(timeout(SHORT, subscription.next(ALL)).await.is_err());
    source.append("s", "Counted", "");
    assert_eq!(positions(&subscription.next(ALL).await.unwrap()), [1]);
}

#[tokio::test]
async fn reordered_events_are_of_two_streams_and_wait_for_a_page_with_such_a_pair() {
    let source = MemorySource::new();
    for stream in ["a", "a", "a", "b", "b"] {
        source.append(stream, "Counted", "");
    }
    source.inject(SourceFault::Reorder);
    let mut subscription = subscribe(&source, None).await.unwrap();
    let page = subscription.next(Demand { events: 2, ..ALL }).await.unwrap();
    assert_eq!(positions(&page), [0, 1], "of one stream");
    assert_eq!(positions(&subscription.next(ALL).await.unwrap()), [3, 2, 4]);
    assert_eq!(source.faults_met().reordered, 1);
}

#[tokio::test]
async fn a_source_that_becomes_unusable_says_so_once() {
    let source = filled(MemorySource::new(), 1);
    let mut subscription = subscribe(&source, None).await.unwrap();
    source.inject(SourceFault::Unusable);
    let error = subscription.next(ALL).await.unwrap_err();
    assert!(matches!(error, SourceError::Unusable { .. }), "{error}");
    let mut next = subscribe(&source, None).await.unwrap();
    assert_eq!(positions(&next.next(ALL).await.unwrap()), [0]);
    assert_eq!(source.faults_met().unusable, 1);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_hangs_is_over_when_it_is_dropped_and_has_done_nothing() {
    let source = filled(MemorySource::new(), 2);
    source.inject(SourceFault::Hang(SourceCall::Subscribe));
    assert!(timeout(SHORT, subscribe(&source, None)).await.is_err());
    let mut subscription = subscribe(&source, None).await.unwrap();
    source.inject(SourceFault::Hang(SourceCall::Next));
    assert!(timeout(SHORT, subscription.next(ALL)).await.is_err());
    assert_eq!(positions(&subscription.next(ALL).await.unwrap()), [0, 1]);
    source.inject(SourceFault::Hang(SourceCall::Ack));
    assert!(timeout(SHORT, subscription.ack(at(0))).await.is_err());
    assert_eq!(source.acked(), None);
    subscription.ack(at(0)).await.unwrap();
    assert_eq!((source.acked(), source.faults_met().hung), (Some(at(0)), 3));
}

#[tokio::test]
async fn another_identity_is_told_from_then_on() {
    let source = MemorySource::new();
    let own = source.identity().await.unwrap();
    assert_eq!(own.kind, "memory");
    source.tell_identity("other", "store 7");
    let told = source.identity().await.unwrap();
    assert_eq!((told.kind.as_str(), told.fingerprint.as_str()), ("other", "store 7"));
}

#[tokio::test]
async fn a_restored_store_gives_the_same_positions_again_and_forgets_what_came_after() {
    let source = filled(MemorySource::new(), 6);
    let mut subscription = subscribe(&source, None).await.unwrap();
    subscription.next(ALL).await.unwrap();
    subscription.ack(at(4)).await.unwrap();
    source.restore_before(at(3));
    let error = subscription.next(ALL).await.unwrap_err();
    assert!(matches!(error, SourceError::Ended { .. }), "{error}");
    assert_eq!((source.acked(), source.events().len()), (None, 3));

    assert_eq!(source.append("stream-0", "Anew", ""), at(3));
    let anew = &source.events()[3];
    assert_eq!((anew.event_type.as_str(), anew.revision), ("Anew", Some(1)), "stream-0 had its second event at 3");
    let mut next = subscribe(&source, Some(1)).await.unwrap();
    assert_eq!(positions(&next.next(ALL).await.unwrap()), [2, 3]);
}

#[tokio::test]
async fn what_retention_removed_is_gone_and_open_subscriptions_go_on_behind_it() {
    let source = filled(MemorySource::new(), 6);
    let mut subscription = subscribe(&source, None).await.unwrap();
    subscription.next(Demand { events: 2, ..ALL }).await.unwrap();
    source.truncate_below(at(4));
    assert_eq!(positions(&subscription.next(ALL).await.unwrap()), [4, 5]);
    source.truncate_below(at(100));
    assert_eq!(source.inspector().await.unwrap().head().await.unwrap(), None, "an empty log has no head");
    assert_eq!(source.append("s", "Counted", ""), at(6), "though its positions go on");
}

#[tokio::test]
async fn revisions_can_have_gaps() {
    let source = MemorySource::new();
    source.append("s", "Counted", "");
    source.skip_revisions("s", 3);
    source.skip_revisions("new", 7);
    source.append("s", "Counted", "");
    source.append("new", "Counted", "");
    let revisions: Vec<_> = source.events().iter().map(|event| event.revision).collect();
    assert_eq!(revisions, [Some(0), Some(4), Some(7)]);
}

#[tokio::test(start_paused = true)]
async fn an_append_held_open_keeps_back_what_is_above_it_until_it_ends() {
    let source = filled(MemorySource::new(), 1);
    let committed = source.hold_append("s", "Counted", "");
    let rolled_back = source.hold_append("s", "Counted", "");
    assert_eq!(source.append("other", "Counted", ""), at(3));
    let mut subscription = subscribe(&source, None).await.unwrap();
    let page = subscription.next(ALL).await.unwrap();
    assert_eq!((positions(&page), page.caught_up), (vec![0], false));
    assert!(timeout(SHORT, subscription.next(ALL)).await.is_err());
    assert_eq!(committed.commit(), at(1));
    assert_eq!(positions(&subscription.next(ALL).await.unwrap()), [1]);
    drop(rolled_back);
    let page = subscription.next(ALL).await.unwrap();
    assert_eq!((positions(&page), page.caught_up), (vec![3], true), "2 stays empty");
}

#[tokio::test]
#[should_panic(expected = "the store was put back to a state before the append at 1 was begun")]
async fn an_append_that_was_begun_before_the_store_was_put_back_cannot_be_committed() {
    let source = filled(MemorySource::new(), 1);
    let held = source.hold_append("s", "Counted", "");
    source.restore_before(at(1));
    held.commit();
}

#[tokio::test(start_paused = true)]
async fn a_cut_ends_subscriptions_that_wait_and_new_ones_can_be_opened() {
    let source = filled(MemorySource::new(), 1);
    let mut subscription = subscribe(&source, None).await.unwrap();
    subscription.next(ALL).await.unwrap();
    let waiting = tokio::spawn(async move { subscription.next(ALL).await });
    tokio::time::sleep(SHORT).await;
    source.cut();
    assert!(matches!(waiting.await.unwrap().unwrap_err(), SourceError::Ended { .. }));
    let mut next = subscribe(&source, None).await.unwrap();
    assert_eq!(positions(&next.next(ALL).await.unwrap()), [0]);
}
