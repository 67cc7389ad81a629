//! Commands, states and roles.

use std::sync::Arc;
use std::time::{Duration, Instant};

use scriba_core::checkpoint::Replay;
use scriba_core::telemetry::{EventStop, Observer, Started, Subscribed};
use scriba_core::{
    CommandError, Lease, OnPoison, Position, ProjectionId, ProjectionOptions, Role, RunError, Scriba, StartError,
    StartFrom, State, StateOrStandby, WaitError, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget, Recorded, Recorder, SourceFault, TargetFault, TargetStep};

use super::common::{Act, Fail, Script, append, applied, eventually, id, options, start, until};
use super::stopping::Other;

fn invalid(result: Result<(), CommandError>) -> Option<StateOrStandby> {
    match result.err()? {
        CommandError::InvalidState { state, .. } => Some(state),
        _ => None,
    }
}

async fn running(scriba: &Scriba) {
    eventually("running", || scriba.info(id()).is_ok_and(|info| info.state == State::Running)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_pulls_nothing_more_and_resume_goes_on_where_it_was() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, script) = start(&source, &target, options()).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    scriba.pause(id()).await.expect("running can be paused");
    assert_eq!(scriba.info(id()).unwrap().state, State::Paused);
    assert_eq!(invalid(scriba.pause(id()).await), Some(StateOrStandby::State(State::Paused)));
    let last = append(&source, "a", &Act::default());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(script.calls.lock().unwrap().len(), 1, "nothing is handled in a pause");
    scriba.resume(id()).await.expect("paused can be resumed");
    until(&scriba, last).await;
    assert_eq!(invalid(scriba.resume(id()).await), Some(StateOrStandby::State(State::Running)));
    assert_eq!(applied(&target), [0, 1]);
    scriba.shutdown().await.expect("it stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn pauses_in_quick_succession_lose_no_page_that_was_under_way() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let mut last = Position::new(0);
    for n in 0..20_000 {
        last = append(&source, &format!("s{}", n % 50), &Act::default());
    }
    let (scriba, _) = start(&source, &target, options().batch_events(8)).await;
    let mut pauses = 0;
    while target.checkpoint(id()).is_none_or(|checkpoint| checkpoint.watermark < Some(last)) {
        if scriba.pause(id()).await.is_ok() {
            pauses += 1;
            scriba.resume(id()).await.expect("paused can be resumed");
        }
    }
    until(&scriba, last).await;
    assert!(pauses > 100, "{pauses}");
    assert_eq!(applied(&target), (0..20_000).collect::<Vec<_>>());
    let info = scriba.info(id()).unwrap();
    assert_eq!((info.run.delivered, info.stored.applied), (20_000, 20_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_survives_the_loss_of_the_pipeline() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, script) = start(&source, &target, options()).await;
    until(&scriba, append(&source, "a", &Act { wait: 50_000, ..Act::default() })).await;
    target.fail(TargetStep::Commit, 1, TargetFault::Transient);
    append(&source, "a", &Act { wait: 50_000, ..Act::default() });
    eventually("the event is in the window", || scriba.info(id()).unwrap().window.events == 1).await;
    scriba.pause(id()).await.expect("running can be paused");
    eventually("the pipeline was lost and came back", || {
        let info = scriba.info(id()).unwrap();
        info.run.thrown_away == 1 && info.state == State::Paused
    })
    .await;
    let calls = script.calls.lock().unwrap().len();
    tokio::time::sleep(Duration::from_millis(120)).await;
    assert_eq!(script.calls.lock().unwrap().len(), calls, "the new pipeline pulls nothing either");
    scriba.resume(id()).await.expect("paused can be resumed");
    until(&scriba, Position::new(1)).await;
    assert_eq!(applied(&target), [0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_commits_and_acks_what_is_handled_and_the_next_start_goes_on_after_it() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options()).await;
    for _ in 0..20 {
        append(&source, "a", &Act { wait: 2_000, ..Act::default() });
    }
    eventually("some are handled", || applied(&target).len() > 3).await;
    scriba.stop(id()).await.expect("running can be stopped");
    let stored = target.checkpoint(id()).unwrap().watermark;
    assert_eq!(source.acked(), stored, "everything committed is acked");
    assert_eq!(applied(&target).last().copied(), stored.map(Position::get));
    assert_eq!(scriba.info(id()).unwrap().state, State::Stopped);
    assert_eq!(invalid(scriba.stop(id()).await), Some(StateOrStandby::State(State::Stopped)));
    assert_eq!(invalid(scriba.pause(id()).await), Some(StateOrStandby::State(State::Stopped)));
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts again");
    until(&scriba, Position::new(19)).await;
    assert_eq!(applied(&target), (0..20).collect::<Vec<_>>());
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_and_start_fifty_times_in_one_process_lose_and_double_nothing() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let scriba = Scriba::new();
    for round in 0..50_u64 {
        scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
        for n in 0..4 {
            append(&source, &format!("s{n}"), &Act { wait: n * 200, ..Act::default() });
        }
        if round % 2 == 0 {
            tokio::time::sleep(Duration::from_millis(round % 7)).await;
        }
        scriba.stop(id()).await.expect("it stops");
    }
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    until(&scriba, Position::new(199)).await;
    assert_eq!(applied(&target), (0..200).collect::<Vec<_>>());
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_returns_within_its_timeout_when_a_handler_hangs_and_says_where() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options().shutdown_timeout(Duration::from_millis(200))).await;
    append(&source, "stuck", &Act { fail: 9, how: Fail::Hang, ..Act::default() });
    eventually("it is being handled", || {
        scriba.info(id()).unwrap().window.oldest.is_some_and(|oldest| oldest.running.is_some())
    })
    .await;
    let begun = Instant::now();
    let error = scriba.stop(id()).await.expect_err("the handler never ends");
    assert!(begun.elapsed() < Duration::from_millis(600), "{:?}", begun.elapsed());
    let message = error.to_string();
    assert!(message.contains("position 0") && message.contains("\"stuck\""), "{message}");
    assert_eq!(scriba.info(id()).unwrap().state, State::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_returns_within_its_timeout_when_the_target_hangs_and_the_next_start_is_clean() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options().shutdown_timeout(Duration::from_millis(200))).await;
    running(&scriba).await;
    target.fail(TargetStep::Commit, 1, TargetFault::Hang);
    let last = append(&source, "a", &Act::default());
    tokio::time::sleep(Duration::from_millis(50)).await;
    let begun = Instant::now();
    let error = scriba.stop(id()).await.expect_err("the commit never ends");
    assert!(begun.elapsed() < Duration::from_millis(600), "{:?}", begun.elapsed());
    assert!(error.to_string().contains("a commit of 1 events was left behind"), "{error}");
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts again");
    target.release_hung();
    until(&scriba, last).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(applied(&target), [0]);
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_projection_of_one_identity_in_a_process_is_refused() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options()).await;
    let error = scriba.start(Script::default(), source.clone(), target.clone(), options()).await.unwrap_err();
    assert!(matches!(error, StartError::AlreadyStarted { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn options_out_of_range_start_nothing() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let scriba = Scriba::new();
    let error = scriba.start(Script::default(), source, target, ProjectionOptions::default().parallelism(0)).await;
    assert!(matches!(error, Err(StartError::Option { option: "parallelism", .. })));
    assert!(matches!(scriba.info(id()), Err(CommandError::Unknown { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_nodes_one_stands_by_and_takes_over_when_the_other_stops() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (active, _) = start(&source, &target, options()).await;
    running(&active).await;
    let (standby, _) = start(&source, &target, options()).await;
    eventually("the second stands by", || standby.info(id()).unwrap().role == Role::Standby).await;
    let info = standby.info(id()).unwrap();
    assert!(info.is_live() && !info.is_ready(), "a standby is live and not ready");
    assert_eq!(info.state, State::Running);
    assert_eq!(invalid(standby.pause(id()).await), Some(StateOrStandby::Standby));
    let epoch = target.checkpoint(id()).unwrap().epoch;
    until(&active, append(&source, "a", &Act::default())).await;
    assert_eq!(target.checkpoint(id()).unwrap().epoch, epoch, "a standby never raises the epoch");
    active.stop(id()).await.expect("it stops");
    until(&standby, append(&source, "a", &Act::default())).await;
    assert_eq!(standby.info(id()).unwrap().role, Role::Active);
    assert_eq!(applied(&target), [0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_without_a_lease_take_turns_and_the_read_model_is_right() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..200 {
        append(&source, &format!("s{}", n % 9), &Act { wait: 500, ..Act::default() });
    }
    // Either node may be ahead: acks of one must not keep events from the other.
    let options = || options().lease(Lease::Off).batch_events(5);
    let (one, _) = start(&source, &target, options()).await;
    let (two, _) = start(&source, &target, options()).await;
    until(&one, Position::new(199)).await;
    until(&two, Position::new(199)).await;
    assert_eq!(applied(&target), (0..200).collect::<Vec<_>>());
    assert_eq!(target.violations(), Vec::<String>::new());
    assert!(target.checkpoint(id()).unwrap().epoch > 1, "both have held it");
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_for_answers_by_type_for_each_way_in_which_it_may_never_come() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let scriba = Scriba::new();
    let short = Duration::from_millis(50);
    let wait = async |what| scriba.wait_for(id(), what, short).await;
    scriba.attach(target.clone());
    let far = WaitFor::Position(Position::new(9));
    assert!(matches!(wait(far).await, Err(WaitError::NeverStarted { .. })));
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    running(&scriba).await;
    assert!(wait(WaitFor::Head).await.is_ok(), "an empty source has nothing to wait for");
    let bad = append(&source, "a", &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
    let good = append(&source, "a", &Act::default());
    assert!(scriba.wait_for(id(), WaitFor::Head, Duration::from_secs(5)).await.is_ok());
    assert!(wait(WaitFor::Position(bad)).await.is_ok(), "a dead letter is accounted for");
    let dead = wait(WaitFor::Event(bad)).await;
    assert!(matches!(&dead, Err(WaitError::DeadLettered { kind, .. }) if kind == "scripted"), "{dead:?}");
    assert!(wait(WaitFor::Event(good)).await.is_ok());
    let late = wait(far).await;
    assert!(matches!(late, Err(WaitError::Timeout { watermark, .. }) if watermark == Some(good)), "{late:?}");
    scriba.stop(id()).await.expect("it stops");
    assert!(matches!(wait(far).await, Err(WaitError::Stopped { .. })));
    let elsewhere = Scriba::new();
    elsewhere.attach(target);
    assert!(matches!(elsewhere.wait_for(id(), far, short).await, Err(WaitError::Stopped { .. })));
    assert!(elsewhere.wait_for(id(), WaitFor::Position(good), short).await.is_ok(), "on any node");
    let listed = elsewhere.list().await.expect("the tables answer");
    assert_eq!((listed[0].id.clone(), listed[0].state), (ProjectionId::from("script"), State::Stopped));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_can_begin_now_or_after_a_position_and_keeps_where_it_began() {
    let source = MemorySource::new();
    for _ in 0..5 {
        append(&source, "a", &Act::default());
    }
    for (from, first) in [(StartFrom::Now, 5), (StartFrom::After(Position::new(2)), 3), (StartFrom::Beginning, 0)] {
        let target = MemoryTarget::new();
        source.forget_acks();
        let (scriba, _) = start(&source, &target, options().start_from(from)).await;
        running(&scriba).await;
        let last = append(&source, "a", &Act::default());
        until(&scriba, last).await;
        let expected: Vec<_> = (first..=last.get()).collect();
        if from == StartFrom::Now {
            assert_eq!(applied(&target), expected);
        } else {
            assert_eq!(applied(&target).first().copied(), Some(first));
        }
        scriba.shutdown().await.expect("it stops");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_a_replay_until_the_version_has_caught_up_once() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for _ in 0..5 {
        append(&source, "a", &Act::default());
    }
    let (scriba, script) = start(&source, &target, options()).await;
    until(&scriba, Position::new(4)).await;
    eventually("it has caught up", || target.checkpoint(id()).unwrap().replay != Replay::Ongoing).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    scriba.stop(id()).await.expect("it stops");
    scriba.start(script.clone(), source.clone(), target.clone(), options()).await.expect("it starts again");
    until(&scriba, append(&source, "a", &Act::default())).await;
    let replay: Vec<bool> = script.calls.lock().unwrap().iter().map(|call| call.replay).collect();
    assert_eq!(replay, [true, true, true, true, true, false, false]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_event_of_a_log_that_was_empty_is_no_replay() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let (scriba, script) = start(&source, &target, options()).await;
    eventually("it has caught up", || {
        target.checkpoint(id()).is_some_and(|checkpoint| checkpoint.replay == Replay::Over(None))
    })
    .await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    assert!(!script.calls.lock().unwrap()[0].replay);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_life_of_a_projection_is_told_to_observers_in_order() {
    let (source, target, recorder) = (MemorySource::new(), MemoryTarget::<u64>::new(), Recorder::new());
    let scriba = Scriba::with_observers([std::sync::Arc::new(recorder.clone()) as _]);
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    until(&scriba, append(&source, "a", &Act::default())).await;
    scriba.pause(id()).await.expect("it pauses");
    scriba.resume(id()).await.expect("it resumes");
    scriba.stop(id()).await.expect("it stops");
    let life: Vec<&str> = recorder
        .events_of(id())
        .iter()
        .filter_map(|event| match event {
            Recorded::CheckpointLoaded { .. } => Some("checkpoint loaded"),
            Recorded::Subscribed { .. } => Some("subscribed"),
            Recorded::EventStart { .. } => Some("event start"),
            Recorded::EventStop { .. } => Some("event stop"),
            Recorded::BatchStop { .. } => Some("batch stop"),
            Recorded::Paused => Some("paused"),
            Recorded::Resumed => Some("resumed"),
            Recorded::Stopped { .. } => Some("stopped"),
            _ => None,
        })
        .collect();
    let expected =
        ["checkpoint loaded", "subscribed", "event start", "event stop", "batch stop", "paused", "resumed", "stopped"];
    assert_eq!(life, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn run_until_ends_with_its_signal_or_with_the_first_halt_and_stops_everything() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    scriba.run_until(tokio::time::sleep(Duration::from_millis(10))).await.expect("the signal ends it");
    assert_eq!(scriba.info(id()).unwrap().state, State::Stopped);

    let (scriba, _) = start(&source, &target, options().on_poison(OnPoison::Halt)).await;
    append(&source, "a", &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
    let error = scriba.run_until(std::future::pending::<()>()).await.expect_err("it halts");
    let RunError::Halted { id: halted, reason } = error else { panic!("{error}") };
    assert_eq!((halted, reason.position), (id(), Some(Position::new(1))));
    assert_eq!(scriba.info(id()).unwrap().state, State::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_scriba_with_a_commit_in_flight_ends_the_pipeline_when_the_commit_ends() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, script) = start(&source, &target, options()).await;
    running(&scriba).await;
    target.fail(TargetStep::Commit, 1, TargetFault::Hang);
    append(&source, "a", &Act::default());
    eventually("it is handled", || script.calls.lock().unwrap().len() == 1).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(scriba);
    // The pipeline holds the handler for as long as it lives.
    assert!(Arc::strong_count(&script.calls) > 1);
    target.release_hung();
    eventually("the pipeline is gone", || Arc::strong_count(&script.calls) == 1).await;
    assert_eq!(applied(&target), [0], "a commit is never cancelled half-way");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_projection_whose_subscription_ended_recovers_without_an_event() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    source.inject(SourceFault::End);
    eventually("degraded", || scriba.info(id()).unwrap().degraded_since.is_some()).await;
    eventually("recovered", || scriba.info(id()).unwrap().is_ready()).await;
    assert_eq!(applied(&target), [0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_blocks_its_thread_is_degraded_after_its_timeout_and_halts_after_twice_that() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let options = options().handler_timeout(Duration::from_millis(500));
    let (scriba, _) = start(&source, &target, options).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    append(&source, "stuck", &Act { compute: 5_000_000, ..Act::default() });
    // A look that comes late may find it time to halt at once.
    eventually("not ready", || !scriba.info(id()).unwrap().is_ready()).await;
    eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
    let reason = scriba.info(id()).unwrap().halt_reason.unwrap();
    assert_eq!(reason.position, Some(Position::new(1)), "{reason}");
    assert!(reason.message.contains("has not come back"), "{reason}");
    assert_eq!(applied(&target), [0]);
}

struct Panics;

impl Observer for Panics {
    fn event_stop(&self, _: &ProjectionId, _: &EventStop<'_>) {
        panic!("an observer");
    }

    fn subscribed(&self, _: &ProjectionId, _: &Subscribed) {
        panic!("an observer");
    }

    fn started(&self, _: &ProjectionId, _: &Started) {
        panic!("an observer");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_observer_that_panics_changes_nothing() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let scriba = Scriba::with_observers([Arc::new(Panics) as Arc<dyn Observer>]);
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    until(&scriba, append(&source, "a", &Act::default())).await;
    scriba.shutdown().await.expect("it stops");
    assert_eq!(applied(&target), [0]);
    assert!(target.dead_letters(id()).is_empty());
}

#[test]
fn a_node_whose_runtime_is_gone_gives_the_projection_to_a_standby() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (gone, _) = runtime.block_on(start(&source, &target, options()));
    runtime.block_on(running(&gone));
    runtime.shutdown_background();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        eventually("stopped", || gone.info(id()).unwrap().state == State::Stopped).await;
        let reason = gone.info(id()).unwrap().halt_reason.unwrap();
        assert!(reason.message.contains("runtime"), "{reason}");
        let (scriba, _) = start(&source, &target, options()).await;
        until(&scriba, append(&source, "a", &Act::default())).await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_ever_is_a_timeout_like_any_other() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let (scriba, _) = start(&source, &target, options()).await;
    let position = append(&source, "a", &Act::default());
    scriba.wait_for(id(), WaitFor::Position(position), Duration::MAX).await.expect("it gets there");
}

#[tokio::test(flavor = "multi_thread")]
async fn run_until_with_several_projections_ends_with_the_first_halt_of_any_and_stops_all() {
    let (source, target, quiet) = (MemorySource::new(), MemoryTarget::new(), MemorySource::new());
    let (scriba, _) = start(&source, &target, options().on_poison(OnPoison::Halt)).await;
    let other = Other::default();
    scriba.start(other, quiet.clone(), target.clone(), options()).await.expect("it starts");
    let task = { scriba.clone() };
    let runs = tokio::spawn(async move { task.run_until(std::future::pending::<()>()).await });
    let fine = append(&quiet, "a", &Act::default());
    scriba.wait_for("other", WaitFor::Position(fine), Duration::from_secs(5)).await.expect("the other runs");
    assert!(!runs.is_finished());
    append(&source, "a", &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
    let RunError::Halted { id: halted, .. } = runs.await.unwrap().expect_err("one halts") else { panic!("no halt") };
    assert_eq!(halted, id());
    let states: Vec<State> = ["script", "other"].map(|id| scriba.info(id).unwrap().state).to_vec();
    assert_eq!(states, [State::Stopped, State::Stopped]);

    let scriba = Scriba::new();
    for n in 0..2 {
        let source = MemorySource::new();
        let target = MemoryTarget::<u64>::new();
        if n == 0 {
            scriba.start(Script::default(), source, target, options()).await.expect("it starts");
        } else {
            scriba.start(Other::default(), source, target, options()).await.expect("it starts");
        }
    }
    scriba.run_until(tokio::time::sleep(Duration::from_millis(20))).await.expect("the signal ends it");
    assert!(["script", "other"].into_iter().all(|id| scriba.info(id).unwrap().state == State::Stopped));
}
