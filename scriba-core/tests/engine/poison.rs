//! Events that cannot be applied: dead letters, the circuit that stops them, and batches that get smaller.

use std::sync::Arc;

use scriba_core::checkpoint::Replay;
use scriba_core::telemetry::BatchNext;
use scriba_core::{Circuit, FailureClass, HaltReason, OnPoison, Position, ProjectionOptions, Scriba, State};
use scriba_testing::{MemorySource, MemoryTarget, Recorded, Recorder, TargetFault, TargetStep};

use super::common::{Act, Fail, Script, append, applied, eventually, id, options, start, until};

fn failing() -> Act {
    Act { fail: 9, how: Fail::Permanent, ..Act::default() }
}

async fn halted(scriba: &Scriba) -> HaltReason {
    eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
    scriba.info(id()).unwrap().halt_reason.expect("a reason")
}

fn dead(target: &MemoryTarget<u64>) -> Vec<u64> {
    target.dead_letters(id()).iter().map(|letter| letter.position.get()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_whose_data_the_target_refuses_is_dead_lettered_alone_and_counted() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for _ in 0..5 {
        append(&source, "a", &Act::default());
    }
    target.fail(TargetStep::Apply, 3, TargetFault::Integrity);
    let recorder = Recorder::new();
    let scriba = Scriba::with_observers([Arc::new(recorder.clone()) as _]);
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    until(&scriba, Position::new(4)).await;
    assert_eq!((applied(&target), dead(&target)), (vec![0, 1, 3, 4], vec![2]));
    let letter = target.dead_letters(id()).remove(0);
    assert_eq!(letter.failure.kind, "commit:23505 (unique_violation)");
    let info = scriba.info(id()).unwrap();
    assert_eq!((info.run.applied, info.run.dead_lettered), (4, 1));
    assert_eq!((info.stored.applied, info.stored.dead_lettered), (4, 1));
    eventually("it is acked", || source.acked() == Some(Position::new(4))).await;
    let told = recorder.events_of(id());
    let letters = told.iter().filter(|event| matches!(event, Recorded::DeadLettered { .. })).count();
    assert_eq!(letters, 1, "{told:#?}");
    let isolated =
        told.iter().filter(|event| matches!(event, Recorded::BatchFailed { next: BatchNext::Isolate, .. })).count();
    assert_eq!(isolated, 1, "{told:#?}");
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_five_bad_events_among_good_ones_on_many_streams_are_dead_lettered_and_nothing_halts() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let mut last = Position::new(0);
    for n in 0..250 {
        last = append(&source, &format!("s{n}"), &if n % 10 == 3 { failing() } else { Act::default() });
    }
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, last).await;
    assert_eq!(dead(&target), (0..25).map(|n| n * 10 + 3).collect::<Vec<u64>>());
    assert_eq!(applied(&target).len(), 225);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_fails_on_everything_is_halted_with_four_dead_letters_whatever_the_batch_size_and_after_ten_restarts()
 {
    for (batch, parallelism) in [(1, 1), (2, 8), (3, 4), (7, 8), (1_000, 16)] {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        for n in 0..40 {
            append(&source, &format!("s{n}"), &failing());
        }
        let options = || options().batch_events(batch).parallelism(parallelism);
        let scriba = Scriba::new();
        for _ in 0..10 {
            scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
            let reason = halted(&scriba).await;
            assert_eq!(reason.position, Some(Position::new(4)), "{reason}");
            assert!(reason.message.contains("circuit"), "{reason}");
            scriba.stop(id()).await.expect("halted can be stopped");
        }
        assert_eq!(dead(&target), [0, 1, 2, 3], "batches of {batch}");
        let checkpoint = target.checkpoint(id()).unwrap();
        assert_eq!((checkpoint.watermark, checkpoint.in_row.count), (Some(Position::new(3)), 4));
        eventually("it is acked", || source.acked() == Some(Position::new(3))).await;
        assert_eq!(target.violations(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn skips_leave_the_count_an_applied_event_resets_it_and_one_stream_alone_takes_twenty() {
    let dead = |streams: &[&'static str]| streams.iter().map(|stream| (*stream, failing())).collect::<Vec<_>>();
    let then = |mut events: Vec<_>, more: Vec<_>| {
        events.extend(more);
        events
    };
    let first = || dead(&["a", "b", "c", "a"]);
    let skip = ("d", Act { skip: true, ..Act::default() });
    let applied = ("d", Act::default());
    let cases = [
        ("skips", then(then(first(), vec![skip]), dead(&["b"])), Some(5)),
        ("applied", then(then(first(), vec![applied]), dead(&["b", "c", "a", "b"])), None),
        ("one stream", dead(&["a"; 20]), Some(19)),
    ];
    for (what, events, trips) in cases {
        for batch in [1, 4, 1_000] {
            let (source, target) = (MemorySource::new(), MemoryTarget::new());
            let mut last = Position::new(0);
            for (stream, act) in &events {
                last = append(&source, stream, act);
            }
            let (scriba, _) = start(&source, &target, options().batch_events(batch)).await;
            match trips {
                Some(at) => assert_eq!(halted(&scriba).await.position, Some(Position::new(at)), "{what}"),
                None => until(&scriba, last).await,
            }
            scriba.stop(id()).await.expect("it stops");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_start_goes_on_with_the_event_that_opened_the_circuit() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..4 {
        append(&source, &format!("s{n}"), &failing());
    }
    let opens = append(&source, "s4", &Act { fail: 1, how: Fail::Permanent, ..Act::default() });
    let (scriba, _) = start(&source, &target, options()).await;
    assert_eq!(halted(&scriba).await.position, Some(opens));
    scriba.stop(id()).await.expect("halted can be stopped");
    let wider = options().circuit(Circuit { in_row: 6, ..Circuit::default() });
    scriba.start(Script::default(), source.clone(), target.clone(), wider).await.expect("it starts");
    until(&scriba, opens).await;
    assert_eq!(dead(&target), [0, 1, 2, 3, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_becomes_of_poison_may_differ_while_replaying() {
    let cases: [(ProjectionOptions, Option<u64>); 3] = [
        (options().on_poison(OnPoison::DeadLetter).on_poison_while_replaying(OnPoison::Halt), Some(1)),
        (options().on_poison(OnPoison::Halt).on_poison_while_replaying(OnPoison::DeadLetter), Some(3)),
        (options().on_poison(OnPoison::DeadLetter), None),
    ];
    for (options, halts_at) in cases {
        for by_target in [false, true] {
            let (source, target) = (MemorySource::new(), MemoryTarget::new());
            let bad = || if by_target { Act::default() } else { failing() };
            append(&source, "a", &Act::default());
            append(&source, "a", &bad());
            if by_target {
                target.fail(TargetStep::Apply, 2, TargetFault::Integrity);
            }
            let (scriba, _) = start(&source, &target, options.clone()).await;
            if halts_at != Some(1) {
                until(&scriba, Position::new(1)).await;
                // Only once this is stored does anything live come.
                eventually("caught up", || target.checkpoint(id()).unwrap().replay != Replay::Ongoing).await;
                append(&source, "a", &Act::default());
                until(&scriba, Position::new(2)).await;
                if by_target {
                    target.fail(TargetStep::Apply, 1, TargetFault::Integrity);
                }
                append(&source, "a", &bad());
            }
            match halts_at {
                Some(at) => assert_eq!(halted(&scriba).await.position, Some(Position::new(at)), "{by_target}"),
                None => until(&scriba, Position::new(3)).await,
            }
            scriba.stop(id()).await.expect("it stops");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_meets_a_lock_is_halved_until_it_gets_through_and_grows_again() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    // The first holds the others up until there are more than a batch of them.
    for n in 0..64 {
        append(&source, &format!("s{n}"), &Act { wait: if n == 0 { 100_000 } else { 0 }, ..Act::default() });
    }
    for nth in 1..=3 {
        target.fail(TargetStep::Checkpoint, nth, TargetFault::Locked);
    }
    let recorder = Recorder::new();
    let scriba = Scriba::with_observers([Arc::new(recorder.clone()) as _]);
    let options = options().batch_events(16);
    scriba.start(Script::default(), source.clone(), target.clone(), options).await.expect("it starts");
    until(&scriba, Position::new(63)).await;
    assert_eq!(applied(&target), (0..64).collect::<Vec<_>>());
    let told = recorder.events_of(id());
    let sizes: Vec<u64> = told
        .iter()
        .filter_map(|event| match event {
            Recorded::BatchStop { events, .. } => Some(*events),
            _ => None,
        })
        .collect();
    assert_eq!(sizes[..4], [2, 4, 8, 16], "{sizes:?}");
    let failed = told.iter().filter(|event| {
        matches!(
            event,
            Recorded::BatchFailed { next: BatchNext::Replay(_), class: Some(FailureClass::TransientStatement), .. }
        )
    });
    assert_eq!(failed.count(), 3);
}
