//! The memory source, the memory target and the recorder, on their own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use scriba_core::checkpoint::{Checkpoint, Counts, LastEvent};
use scriba_core::dead_letter::Failure;
use scriba_core::source::{Delivery, Demand, Page, SourceError, SourceIdentity, SubscribeRequest, Subscription};
use scriba_core::target::{
    Batch, CommitError, Committer, Control as _, DeadLetterFilter, Entry, LeaseAnswer, Owner, Shortfall, StoredLease,
    Tables, TakeOver, TakeOverError, TakenOver, Target as _, Write,
};
use scriba_core::telemetry::{Halted, Observer, Started, Telemetry};
use scriba_core::{
    EventId, EventMeta, FailureClass, HaltReason, Outcome, Position, ProjectionId, RecordedEvent, Source as _,
};
use scriba_testing::{
    Faults, MemorySource, MemoryTarget, Record, Recorded, Recorder, SourceFault, TargetFault, TargetStep,
};
use tokio::time::{Instant, timeout};

const ALL: Demand = Demand { events: 1_000, bytes: 1 << 30 };
const SHORT: Duration = Duration::from_millis(10);

fn at(number: u64) -> Position {
    Position::new(number)
}

fn positions(page: &Page) -> Vec<u64> {
    page.deliveries
        .iter()
        .filter_map(|delivery| match delivery {
            Delivery::Event(event) => Some(event.position.get()),
            Delivery::Progress(_) => None,
        })
        .collect()
}

/// Events at positions from 0 on, over three streams.
fn filled(source: MemorySource, events: u64) -> MemorySource {
    for number in 0..events {
        source.append(format!("stream-{}", number % 3), "Counted", number.to_string());
    }
    source
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
    source.subscribe(SubscribeRequest { after: after.map(Position::new), event_types, telemetry }).await
}

mod source {
    use super::*;

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
        while seen.len() < events as usize {
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
        assert!(
            matches!(&page.deliveries[0], Delivery::Event(event) if event.id == "mine" && event.position == at(40))
        );
    }

    /// Reads everything through all faults, acking now and then, as an engine does that subscribes again from what it
    /// has seen without a gap. Returns what it saw for the first time, in order.
    async fn read_through_faults(source: &MemorySource, events: u64) -> Vec<u64> {
        let mut seen = Vec::new();
        let mut acked = None;
        while seen.len() < events as usize {
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
}

mod target {
    use super::*;

    type Operations = MemoryTarget<&'static str>;

    fn id() -> ProjectionId {
        ProjectionId::from("counts")
    }

    fn owner(name: &str) -> Owner {
        Owner { id: name.to_owned(), description: format!("node {name}") }
    }

    async fn take_over(target: &Operations, owner: Option<&Owner>) -> Result<TakenOver<&'static str>, TakeOverError> {
        let source = SourceIdentity { kind: "memory".to_owned(), fingerprint: "test".to_owned() };
        let lease = Duration::from_secs(30);
        let request =
            TakeOver { id: &id(), owner, lease, initial: None, source: &source, event_types: Some(&["Counted"]) };
        target.take_over(request).await
    }

    fn event(position: u64) -> EventMeta {
        EventMeta::new(super::filled(MemorySource::new(), position + 1).events()[position as usize].clone(), false)
    }

    fn applies(position: u64, op: &'static str) -> Entry<&'static str> {
        Entry { meta: event(position), write: Write::Apply(Outcome::from(op)) }
    }

    fn fails(position: u64, kind: &str) -> Entry<&'static str> {
        let failure = Failure { kind: kind.to_owned(), message: "no".to_owned(), detail: String::new(), attempts: 3 };
        Entry { meta: event(position), write: Write::DeadLetter(failure) }
    }

    /// The batch that follows a checkpoint, with its counts right.
    fn batch(checkpoint: &Checkpoint, entries: Vec<Entry<&'static str>>) -> Batch<&'static str> {
        let last = &entries.last().unwrap().meta;
        let last = LastEvent { position: last.position, id: last.id.clone() };
        let dead_lettered = entries.iter().filter(|entry| entry.dead_letter().is_some()).count() as u64;
        let counts = Counts { applied: entries.len() as u64 - dead_lettered, skipped: 0, dead_lettered };
        Batch { id: id(), advance: checkpoint.advance(last.position, Some(last), counts), entries }
    }

    async fn commit(taken: &mut TakenOver<&'static str>, entries: Vec<Entry<&'static str>>) -> Result<(), CommitError> {
        let batch = batch(&taken.checkpoint, entries);
        taken.committer.commit(&batch).await?;
        taken.checkpoint.committed(&batch.advance);
        Ok(())
    }

    #[tokio::test]
    async fn a_commit_leaves_operations_dead_letters_and_checkpoint_and_a_take_over_reads_them() {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        assert!(taken.created);
        assert_eq!((taken.checkpoint.epoch, taken.checkpoint.watermark), (1, None));
        commit(&mut taken, vec![applies(0, "a"), fails(1, "panic"), applies(2, "c")]).await.unwrap();
        commit(&mut taken, vec![fails(3, "decode"), fails(4, "panic")]).await.unwrap();

        assert_eq!(target.applied("counts"), [(at(0), "a"), (at(2), "c")]);
        assert_eq!(target.commits("counts"), 2);
        let again = take_over(&target, None).await.unwrap();
        assert!(!again.created);
        assert_eq!(again.checkpoint, Checkpoint { epoch: 2, ..taken.checkpoint });
        assert_eq!(again.checkpoint.counts, Counts { applied: 2, skipped: 0, dead_lettered: 3 });
        assert_eq!(again.checkpoint.event_types, Some(vec!["Counted".to_owned()]));
        let snapshot = target.snapshot("counts").unwrap();
        assert_eq!(snapshot.dead_letters.len(), 3);
        assert_eq!(snapshot.checkpoint.watermark, Some(at(4)));
        assert_eq!(target.violations(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn dead_letters_are_filtered_paged_and_counted() {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        let entries = vec![fails(0, "panic"), fails(1, "decode"), fails(2, "panic"), fails(3, "panic")];
        commit(&mut taken, entries).await.unwrap();
        let tables: &dyn Tables = &target;
        let list = async |filter: DeadLetterFilter| {
            let letters = tables.dead_letters(&id(), &filter).await.unwrap();
            letters.iter().map(|letter| letter.position.get()).collect::<Vec<_>>()
        };
        let filter = DeadLetterFilter::default;
        assert_eq!(list(filter()).await, [0, 1, 2, 3]);
        assert_eq!(list(DeadLetterFilter { kind: Some("panic".to_owned()), ..filter() }).await, [0, 2, 3]);
        assert_eq!(list(DeadLetterFilter { stream_id: Some("stream-0".into()), ..filter() }).await, [0, 3]);
        let range = DeadLetterFilter { from_position: Some(at(1)), to_position: Some(at(2)), ..filter() };
        assert_eq!(list(range).await, [1, 2]);
        let newest = DeadLetterFilter { descending: true, limit: Some(2), ..filter() };
        assert_eq!(list(newest.clone()).await, [3, 2]);
        let third = target.dead_letters("counts")[2].id;
        assert_eq!(list(DeadLetterFilter { after_id: Some(third), ..newest }).await, [1, 0]);
        let stats = tables.dead_letter_stats(&id()).await.unwrap();
        assert_eq!((stats.total, stats.by_kind), (4, vec![("panic".to_owned(), 3), ("decode".to_owned(), 1)]));
    }

    #[tokio::test]
    async fn an_owner_that_was_taken_over_from_writes_nothing() {
        let target = Operations::new();
        let mut first = take_over(&target, None).await.unwrap();
        let mut second = take_over(&target, None).await.unwrap();
        let error = commit(&mut first, vec![applies(0, "first")]).await.unwrap_err();
        assert!(matches!(error, CommitError::Fenced(Shortfall::OtherEpoch { found: 2, ours: 1 })), "{error}");
        assert!(target.applied("counts").is_empty());
        commit(&mut second, vec![applies(0, "second")]).await.unwrap();
        assert_eq!(target.applied("counts"), [(at(0), "second")]);
        let error = first.committer.store_replay_position(at(0)).await.unwrap_err();
        assert!(matches!(error, CommitError::Fenced(Shortfall::OtherEpoch { .. })), "{error}");
    }

    #[tokio::test]
    async fn a_checkpoint_changed_behind_the_engines_back_is_met_by_the_exact_number() {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
        target.edit_checkpoint("counts", |checkpoint| checkpoint.commit_no = 0);
        let error = commit(&mut taken, vec![applies(1, "b")]).await.unwrap_err();
        assert!(
            matches!(error, CommitError::Fenced(Shortfall::OtherCommit { found: 0, expected: 1, epoch: 1 })),
            "{error}"
        );
        let mut taken = take_over(&target, None).await.unwrap();
        target.remove("counts");
        let error = commit(&mut taken, vec![applies(1, "b")]).await.unwrap_err();
        assert!(matches!(error, CommitError::Fenced(Shortfall::Missing)), "{error}");
    }

    #[tokio::test]
    async fn a_failure_at_any_step_leaves_nothing_and_says_its_class_and_event() {
        let classes = [
            (TargetFault::Transient, FailureClass::TransientServer),
            (TargetFault::Structural, FailureClass::Structural),
            (TargetFault::Integrity, FailureClass::Integrity),
        ];
        let clean = Operations::new();
        let mut taken = take_over(&clean, None).await.unwrap();
        let before = clean.steps();
        commit(&mut taken, vec![applies(0, "a"), fails(1, "panic")]).await.unwrap();
        let steps = clean.steps() - before;
        assert_eq!(steps, 5, "begin, checkpoint, two events, commit");
        for (fault, class) in classes {
            for step in 1..=steps {
                let target = Operations::new();
                let mut taken = take_over(&target, None).await.unwrap();
                target.fail_any(step, fault);
                let error = commit(&mut taken, vec![applies(0, "a"), fails(1, "panic")]).await.unwrap_err();
                let CommitError::Failed(error) = error else { panic!("step {step}: {error}") };
                assert_eq!(error.class, class);
                let event = step.checked_sub(3).filter(|event| *event < 2);
                assert_eq!(error.position, event.map(at), "step {step}");
                let snapshot = target.snapshot("counts").unwrap();
                assert!(snapshot.applied.is_empty() && snapshot.dead_letters.is_empty());
                assert_eq!(snapshot.checkpoint.commit_no, 0);
            }
        }
    }

    #[tokio::test]
    async fn an_ambiguous_commit_is_durable_or_not_as_asked() {
        for durable in [false, true] {
            let target = Operations::new();
            let mut taken = take_over(&target, None).await.unwrap();
            target.fail(TargetStep::Commit, 2, TargetFault::Ambiguous { durable });
            commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
            let error = commit(&mut taken, vec![applies(1, "b")]).await.unwrap_err();
            assert!(matches!(error, CommitError::Ambiguous(_)), "{error}");
            assert_eq!(target.commits("counts"), 1 + u64::from(durable));
            assert_eq!(target.violations(), Vec::<String>::new());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_commit_that_hangs_is_fenced_off_by_a_take_over_and_dropped_leaves_nothing() {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        target.fail(TargetStep::Commit, 1, TargetFault::Hang);
        let hung = tokio::spawn(async move { commit(&mut taken, vec![applies(0, "a")]).await });
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        assert!(!hung.is_finished());
        let mut next = take_over(&target, None).await.unwrap();
        target.release_hung();
        let error = hung.await.unwrap().unwrap_err();
        assert!(matches!(error, CommitError::Fenced(Shortfall::OtherEpoch { .. })), "{error}");

        target.fail(TargetStep::Apply, 1, TargetFault::Hang);
        assert!(timeout(SHORT, commit(&mut next, vec![applies(0, "a")])).await.is_err());
        assert_eq!(target.commits("counts"), 0);
    }

    #[tokio::test]
    async fn in_an_outage_every_call_fails_as_transient() {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        let mut control = target.control().await.unwrap();
        target.outage(true);
        let transient = |class| assert_eq!(class, FailureClass::TransientServer);
        let Err(TakeOverError::Target(error)) = take_over(&target, None).await else { panic!("taken over") };
        transient(error.class);
        let CommitError::Failed(error) = commit(&mut taken, vec![applies(0, "a")]).await.unwrap_err() else { panic!() };
        transient(error.class);
        transient(target.stored(&id()).await.unwrap_err().class);
        transient(control.lease(&id(), &owner("a"), SHORT).await.unwrap_err().class);
        target.outage(false);
        assert!(take_over(&target, None).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_keeps_others_out_until_it_lapses_or_is_released() {
        let target = Operations::new();
        let (a, b) = (owner("a"), owner("b"));
        let ttl = Duration::from_secs(10);
        let mut control = target.control().await.unwrap();
        assert_eq!(control.lease(&id(), &a, ttl).await.unwrap(), LeaseAnswer::Held);
        let answer = control.lease(&id(), &b, ttl).await.unwrap();
        assert_eq!(answer, LeaseAnswer::HeldBy { holder: "node a".to_owned(), expires_in: ttl });
        let Err(TakeOverError::Held { holder }) = take_over(&target, Some(&b)).await else { panic!("taken over") };
        assert_eq!(holder, "node a");
        take_over(&target, Some(&a)).await.unwrap();
        let stored = async || target.stored(&id()).await.unwrap().unwrap().lease;
        assert_eq!(stored().await, StoredLease::Held { holder: "node a".to_owned() });

        tokio::time::sleep(Duration::from_secs(31)).await;
        assert_eq!(stored().await, StoredLease::Lapsed { holder: "node a".to_owned() });
        assert_eq!(control.lease(&id(), &b, ttl).await.unwrap(), LeaseAnswer::Held);
        control.release(&id(), &a).await.unwrap();
        assert_eq!(stored().await, StoredLease::Held { holder: "node b".to_owned() }, "only the holder releases");
        control.release(&id(), &b).await.unwrap();
        assert_eq!(stored().await, StoredLease::None);
    }

    #[tokio::test]
    async fn the_replay_position_is_stored_once() {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        taken.committer.store_replay_position(at(3)).await.unwrap();
        taken.committer.store_replay_position(at(9)).await.unwrap();
        assert_eq!(target.checkpoint("counts").unwrap().replay_position, Some(at(3)));
    }

    /// Commits batches built by hand and returns the violations.
    async fn violations(batches: impl IntoIterator<Item = Batch<&'static str>>) -> Vec<String> {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        for (number, mut batch) in batches.into_iter().enumerate() {
            batch.advance.epoch = taken.checkpoint.epoch;
            batch.advance.expected_commit_no = i64::try_from(number).unwrap();
            taken.committer.commit(&batch).await.unwrap();
        }
        target.violations()
    }

    #[tokio::test]
    async fn breaches_of_the_contract_are_noticed() {
        let empty = Checkpoint::default();
        let one = |position| batch(&empty, vec![applies(position, "a")]);
        assert_eq!(violations([one(0), one(1)]).await, Vec::<String>::new());
        let cases = [
            ("applied twice", vec![one(0), one(0)]),
            ("the watermark moves backwards", vec![one(4), one(3)]),
            ("out of order", vec![batch(&empty, vec![applies(2, "c"), applies(1, "b"), applies(3, "d")])]),
            ("is above the watermark", {
                let mut early = one(5);
                early.advance.watermark = at(4);
                vec![early]
            }),
            ("counted", {
                let mut miscounted = one(0);
                miscounted.advance.counts.applied = 2;
                vec![miscounted]
            }),
            ("the skip at 0", {
                let mut skip = one(0);
                skip.entries[0].write = Write::Apply(Outcome::skip());
                vec![skip]
            }),
        ];
        for (expected, batches) in cases {
            let found = violations(batches).await;
            assert!(found.iter().any(|violation| violation.contains(expected)), "{expected}: {found:?}");
        }
    }

    #[tokio::test]
    async fn an_event_applied_again_after_the_row_was_restored_is_noticed() {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
        target.edit_checkpoint("counts", |checkpoint| checkpoint.watermark = None);
        let mut taken = take_over(&target, None).await.unwrap();
        commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
        assert!(target.violations()[0].contains("applied twice"), "{:?}", target.violations());
    }

    #[tokio::test]
    async fn a_committer_used_after_it_failed_is_noticed() {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        target.fail(TargetStep::Begin, 1, TargetFault::Transient);
        commit(&mut taken, vec![applies(0, "a")]).await.unwrap_err();
        commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
        assert!(target.violations()[0].contains("used again after it failed"), "{:?}", target.violations());
    }
}

mod recorder {
    use super::*;

    fn recorded_by(recorder: &Recorder, name: &str) -> Telemetry {
        let observers: Vec<Arc<dyn Observer>> = vec![Arc::new(recorder.clone())];
        Telemetry::new(ProjectionId::from(name), observers)
    }

    fn halts(record: &Record) -> bool {
        matches!(record.event, Recorded::Halted { .. })
    }

    #[tokio::test(start_paused = true)]
    async fn keeps_events_in_order_and_wakes_who_waits() {
        let recorder = Recorder::new();
        let (orders, bills) = (recorded_by(&recorder, "orders"), recorded_by(&recorder, "bills"));
        orders.started(&Started);
        let waiter = recorder.clone();
        let waiting = tokio::spawn(async move { waiter.wait_for(halts, Duration::from_secs(60)).await });
        tokio::time::sleep(SHORT).await;
        bills.halted(&Halted { reason: &HaltReason::new("enough").at(at(3)) });

        let record = waiting.await.unwrap().unwrap();
        assert_eq!(record.id, ProjectionId::from("bills"));
        let Recorded::Halted { reason } = record.event else { panic!("{record:?}") };
        assert_eq!(reason.position, Some(at(3)));
        recorder.wait_for(halts, Duration::ZERO).await.expect("an event of the past is found at once");
        let names: Vec<_> = recorder.records().iter().map(|record| record.id.name.clone()).collect();
        assert_eq!(names, ["orders", "bills"]);
        assert!(matches!(recorder.events_of("orders")[..], [Recorded::Started]));
    }

    #[tokio::test(start_paused = true)]
    async fn what_does_not_come_in_time_is_an_error_that_shows_what_did() {
        let recorder = Recorder::new();
        recorded_by(&recorder, "orders").started(&Started);
        let before = Instant::now();
        let error = recorder.wait_for(halts, Duration::from_secs(60)).await.unwrap_err();
        assert_eq!(before.elapsed(), Duration::from_secs(60));
        assert_eq!(error.to_string(), "not seen within 60s; 1 events were recorded, at last:\n  orders v1: Started");
    }

    #[test]
    fn overrides_every_hook_of_the_catalogue() {
        let code = include_str!("../src/recorder.rs");
        for hook in scriba_core::telemetry::CATALOGUE {
            assert!(code.contains(&format!("    fn {hook}(&self, id: &ProjectionId")), "{hook} is not recorded");
        }
    }
}
