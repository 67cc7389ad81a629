//! Handlers and targets that fail, and what becomes of it.

use std::time::Duration;

use scriba_core::telemetry::BatchNext;
use scriba_core::{FailureClass, Lease, OnPoison, Position, Scriba, State};
use scriba_testing::{MemorySource, MemoryTarget, Recorded, Recorder, SourceFault, TargetFault, TargetStep};

use super::common::{Act, Fail, Script, append, applied, eventually, id, options, start, until};

fn failing(how: Fail) -> Act {
    Act { fail: 9, how, ..Act::default() }
}

async fn halted(scriba: &Scriba) -> scriba_core::HaltReason {
    eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
    scriba.info(id()).unwrap().halt_reason.expect("a reason")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_a_panic_and_a_body_that_is_no_json_are_dead_lettered_with_their_kind_and_the_stream_goes_on() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    append(&source, "a", &failing(Fail::Error));
    append(&source, "a", &failing(Fail::Panic));
    source.append("a", "Act", "no json");
    let last = append(&source, "a", &Act::default());
    let (scriba, script) = start(&source, &target, options()).await;
    until(&scriba, last).await;
    let letters = target.dead_letters(id());
    let seen: Vec<_> = letters.iter().map(|letter| (letter.failure.kind.as_str(), letter.failure.attempts)).collect();
    assert_eq!(seen, [("scripted", 3), ("panic", 3), ("serde_json::error::Error", 3)]);
    assert!(letters[1].failure.detail.contains("common.rs:"), "the place of the panic: {}", letters[1].failure.detail);
    assert_eq!(&letters[2].data[..], b"no json");
    assert_eq!(applied(&target), [3]);
    let attempts: Vec<u32> = script.calls.lock().unwrap().iter().map(|call| call.attempt).collect();
    assert_eq!(attempts, [1, 2, 3, 1, 2, 3, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_permanent_error_is_not_retried() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let last = append(&source, "a", &failing(Fail::Permanent));
    let (scriba, script) = start(&source, &target, options()).await;
    until(&scriba, last).await;
    assert_eq!(script.calls.lock().unwrap().len(), 1);
    assert_eq!(target.dead_letters(id()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_hangs_times_out() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    append(&source, "a", &failing(Fail::Hang));
    let last = append(&source, "a", &Act::default());
    let (scriba, _) = start(&source, &target, options().handler_timeout(Duration::from_millis(20))).await;
    until(&scriba, last).await;
    let letters = target.dead_letters(id());
    assert_eq!((letters[0].failure.kind.as_str(), letters[0].failure.attempts), ("timeout", 3));
    assert_eq!(applied(&target), [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retryable_error_is_retried_beyond_the_schedule_while_others_go_on_and_shows_meanwhile() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    append(&source, "slow", &Act { fail: 4, how: Fail::Retryable, ..Act::default() });
    let last = append(&source, "other", &Act::default());
    let (scriba, script) = start(&source, &target, options()).await;
    eventually("it fails again", || script.calls.lock().unwrap().iter().any(|call| call.attempt == 2)).await;
    let info = scriba.info(id()).unwrap();
    assert!(info.degraded_since.is_some() && !info.is_ready());
    let error = info.last_error.unwrap();
    assert!(error.contains("\"slow\"") && error.contains("position 0"), "{error}");
    let oldest = info.window.oldest.expect("an open event");
    assert_eq!(oldest.position, Position::new(0));
    assert!(oldest.stream_id == "slow" && oldest.running.is_some(), "{oldest:?}");
    assert!(script.calls.lock().unwrap().iter().any(|call| call.stream == "other"), "others go on");
    assert_eq!(applied(&target), Vec::<u64>::new(), "and become visible in order, after");
    until(&scriba, last).await;
    assert_eq!(applied(&target), [0, 1]);
    assert!(target.dead_letters(id()).is_empty());
    assert!(scriba.info(id()).unwrap().degraded_since.is_none(), "recovered");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retryable_error_that_goes_on_for_too_long_halts_and_names_the_event() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    append(&source, "a", &Act::default());
    append(&source, "slow", &Act { fail: 1_000, how: Fail::Retryable, ..Act::default() });
    append(&source, "b", &Act::default());
    let (scriba, _) = start(&source, &target, options().retryable_for(Duration::from_millis(50))).await;
    let reason = halted(&scriba).await;
    assert_eq!(reason.position, Some(Position::new(1)));
    assert!(reason.message.contains("\"slow\""), "{reason}");
    assert_eq!(applied(&target), [0], "what came before is committed, nothing after it");
    assert_eq!(source.acked(), Some(Position::new(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn on_poison_halt_stops_before_the_event_in_one_partition_and_in_two() {
    for streams in [["a", "a"], ["a", "b"]] {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        append(&source, streams[0], &failing(Fail::Permanent));
        for _ in 0..500 {
            append(&source, streams[1], &Act::default());
        }
        let (scriba, _) = start(&source, &target, options().on_poison(OnPoison::Halt)).await;
        let reason = halted(&scriba).await;
        assert_eq!(reason.position, Some(Position::new(0)));
        assert_eq!(applied(&target), Vec::<u64>::new());
        assert_eq!(target.checkpoint(id()).unwrap().watermark, None);
        assert_eq!(source.acked(), None);
        scriba.stop(id()).await.expect("halted can be stopped");
        assert_eq!(scriba.info(id()).unwrap().state, State::Stopped);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_at_every_step_of_a_run_leaves_the_same_read_model() {
    let clean = steps_of_a_run(None, TargetFault::Transient).await;
    assert!(clean > 10, "{clean} steps");
    for fault in
        [TargetFault::Transient, TargetFault::Ambiguous { durable: true }, TargetFault::Ambiguous { durable: false }]
    {
        for step in 1..=clean {
            steps_of_a_run(Some(step), fault).await;
        }
    }
}

async fn steps_of_a_run(fail_at: Option<u64>, fault: TargetFault) -> u64 {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..12 {
        let act = match n % 5 {
            3 => failing(Fail::Permanent),
            4 => Act { skip: true, ..Act::default() },
            _ => Act::default(),
        };
        append(&source, &format!("s{}", n % 3), &act);
    }
    if let Some(step) = fail_at {
        target.fail_any(step, fault);
    }
    let (scriba, _) = start(&source, &target, options().batch_events(3)).await;
    until(&scriba, Position::new(11)).await;
    scriba.shutdown().await.expect("it stops");
    assert_eq!(applied(&target), [0, 1, 2, 5, 6, 7, 10, 11], "{fault:?} at step {fail_at:?}");
    let dead: Vec<u64> = target.dead_letters(id()).iter().map(|letter| letter.position.get()).collect();
    assert_eq!(dead, [3, 8], "{fault:?} at step {fail_at:?}");
    assert_eq!(target.violations(), Vec::<String>::new(), "{fault:?} at step {fail_at:?}");
    assert_eq!(target.checkpoint(id()).unwrap().counts.total(), 12);
    target.steps()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_target_is_waited_out_and_never_halts() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    target.outage(true);
    let last = append(&source, "a", &Act::default());
    eventually("restarts are counted", || {
        let info = scriba.info(id()).unwrap();
        info.degraded_since.is_some() && info.state == State::Initializing
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_ne!(scriba.info(id()).unwrap().state, State::Halted);
    target.outage(false);
    until(&scriba, last).await;
    assert_eq!(applied(&target), [0, 1]);
    assert!(scriba.info(id()).unwrap().degraded_since.is_none(), "recovered");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_structural_failure_halts_with_class_and_code_and_commits_nothing() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    target.fail(TargetStep::Apply, 1, TargetFault::Structural);
    for _ in 0..5 {
        append(&source, "a", &Act::default());
    }
    let recorder = Recorder::new();
    let scriba = Scriba::with_observers([std::sync::Arc::new(recorder.clone()) as _]);
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    let reason = halted(&scriba).await;
    let told = recorder.events_of(id());
    let lost = told.iter().position(|event| matches!(event, Recorded::BatchFailed { next: BatchNext::Halt, .. }));
    let halted = told.iter().position(|event| matches!(event, Recorded::Halted { .. }));
    assert!(lost.is_some() && lost < halted, "{told:#?}");
    assert_eq!((reason.class, reason.code.as_deref()), (Some(FailureClass::Structural), Some("42P01")));
    assert_eq!(applied(&target), Vec::<u64>::new());
    assert_eq!(source.acked(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_changed_behind_the_engine_halts_when_it_is_gone_and_starts_again_from_it_when_it_is_older() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options().lease(Lease::Off)).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    target.edit_checkpoint(id(), |checkpoint| checkpoint.commit_no += 7);
    until(&scriba, append(&source, "a", &Act::default())).await;
    assert_eq!(applied(&target), [0, 1]);
    target.remove(id());
    append(&source, "a", &Act::default());
    let reason = halted(&scriba).await;
    assert!(reason.message.contains("checkpoint row is missing"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_below_the_last_one_starts_the_subscription_again_and_drops_nothing() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let act = |wait| serde_json::to_vec(&Act { wait, ..Act::default() }).unwrap();
    source.append_at(Position::new(5), "a", "Act", act(100_000));
    let (scriba, script) = start(&source, &target, options()).await;
    eventually("5 is in the window", || scriba.info(id()).unwrap().window.events == 1).await;
    source.append_late(Position::new(3), "b", "Act", act(0));
    until(&scriba, Position::new(5)).await;
    assert_eq!(source.faults_met().late, 1);
    assert_eq!(source.subscriptions(), 2);
    assert_eq!(applied(&target), [3, 5], "in order after all");
    let handled: Vec<u64> = script.calls.lock().unwrap().iter().map(|call| call.position.get()).collect();
    assert_eq!(handled, [3, 5], "the first handling of 5 was dropped");
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_that_ends_is_followed_by_another() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    source.inject(SourceFault::End);
    until(&scriba, append(&source, "b", &Act::default())).await;
    assert_eq!(source.subscriptions(), 2);
    assert_eq!(applied(&target), [0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_window_that_is_full_stops_pulling() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    append(&source, "stuck", &Act { wait: 300_000, ..Act::default() });
    for n in 0..500 {
        append(&source, &format!("s{n}"), &Act::default());
    }
    let (scriba, script) = start(&source, &target, options().in_flight_events(100)).await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    let info = scriba.info(id()).unwrap();
    assert!(info.window.events <= 100, "{:?}", info.window);
    assert!(script.calls.lock().unwrap().len() >= 70, "others go on until the window is full");
    until(&scriba, Position::new(500)).await;
    assert_eq!(applied(&target), (0..=500).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn handlers_that_compute_for_long_run_beside_each_other_and_not_in_turns() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..300 {
        append(&source, &format!("s{n}"), &Act { compute: 500, ..Act::default() });
    }
    let (scriba, script) = start(&source, &target, options().parallelism(4)).await;
    until(&scriba, Position::new(299)).await;
    let calls = script.calls.lock().unwrap().clone();
    let beside = calls.iter().filter(|call| {
        calls
            .iter()
            .any(|other| other.position != call.position && other.started < call.ended && call.started < other.ended)
    });
    assert!(beside.count() > 200, "most have company");
    assert_eq!(applied(&target), (0..300).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_ends_again_and_again_does_not_keep_a_slow_event_from_being_handled() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    append(&source, "slow", &Act { wait: 150_000, ..Act::default() });
    let last = append(&source, "slow", &Act::default());
    let (scriba, script) = start(&source, &target, options()).await;
    eventually("it is read", || scriba.info(id()).unwrap().window.events == 2).await;
    source.inject(SourceFault::End);
    until(&scriba, last).await;
    assert_eq!(applied(&target), [0, 1]);
    let slow = script.calls.lock().unwrap().iter().filter(|call| call.position == Position::new(0)).count();
    assert_eq!(slow, 1, "it is handled once");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_halts_does_so_although_its_source_ends_again_and_again() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    append(&source, "a", &Act { wait: 100_000, ..failing(Fail::Permanent) });
    let ending = source.clone();
    let ends = tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(60)).await;
            ending.cut();
        }
    });
    let (scriba, _) = start(&source, &target, options().on_poison(OnPoison::Halt)).await;
    let reason = halted(&scriba).await;
    ends.abort();
    assert_eq!(reason.position, Some(Position::new(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_above_an_event_that_comes_late_is_committed_before_it() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..20 {
        append(&source, &format!("s{n}"), &Act::default());
    }
    source.inject(SourceFault::Reorder);
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, Position::new(19)).await;
    assert_eq!(applied(&target), (0..20).collect::<Vec<_>>());
    assert_eq!(target.violations(), Vec::<String>::new());
    let run = scriba.info(id()).unwrap().run;
    assert_eq!(run.delivered, run.applied + run.deduplicated + run.thrown_away, "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_comes_when_the_read_model_is_beyond_it_halts() {
    let (source, target) = (MemorySource::new().without_acks(), MemoryTarget::new());
    source.append_at(Position::new(5), "a", "Act", serde_json::to_vec(&Act::default()).unwrap());
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, Position::new(5)).await;
    source.append_late(Position::new(3), "b", "Act", serde_json::to_vec(&Act::default()).unwrap());
    let reason = halted(&scriba).await;
    assert_eq!(reason.position, Some(Position::new(3)));
    assert!(reason.message.contains("lost its order"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_handlers_that_each_take_their_time_on_the_pipelines_task_are_not_taken_for_one_that_is_stuck() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let mut last = Position::new(0);
    // Not one of those under the clock is slow, so all stay where they are.
    for n in 0..60 {
        last = append(&source, &format!("s{n}"), &Act { compute: if n == 0 { 0 } else { 60_000 }, ..Act::default() });
    }
    let (scriba, _) = start(&source, &target, options().handler_timeout(Duration::from_millis(500))).await;
    until(&scriba, last).await;
    assert_eq!(applied(&target).len(), 60);
}
