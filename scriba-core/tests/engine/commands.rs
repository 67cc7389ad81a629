//! Commands that read and write tables, `until`, and what `info` tells.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::checkpoint::{Counts, Replay};
use scriba_core::source::{Source, SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription};
use scriba_core::target::{Owner, StateRecord, StoredLease, Tables};
use scriba_core::telemetry::StopReason;
use scriba_core::{
    CommandError, FailureClass, Lease, OnPoison, Position, ProjectionId, Reset, ResetError, Role, RunError, Scriba,
    StartFrom, State, StateOrStandby, StreamPositions, WaitError, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget, Recorded, Recorder, TargetFault, TargetStep};

use super::common::{Act, Fail, Script, append, applied, eventually, id, options, start, until};

const SHORT: Duration = Duration::from_millis(60);
const LONG: Duration = Duration::from_secs(20);

fn at(position: u64) -> Position {
    Position::new(position)
}

async fn running(scriba: &Scriba) {
    eventually("running", || scriba.info(id()).is_ok_and(|info| info.state == State::Running)).await;
}

async fn stopped(scriba: &Scriba) {
    eventually("stopped", || scriba.info(id()).is_ok_and(|info| info.state == State::Stopped)).await;
}

/// A node that starts nothing and sees the tables.
fn onlooker(target: &MemoryTarget<u64>) -> Scriba {
    let scriba = Scriba::new();
    scriba.attach(target.clone());
    scriba
}

async fn wait(scriba: &Scriba, what: WaitFor, timeout: Duration) -> Option<WaitError> {
    scriba.wait_for(id(), what, timeout).await.err()
}

/// A source of which 20 events were projected, two of them dead letters, and the target of it; stopped.
async fn projected() -> (MemorySource, MemoryTarget<u64>, Scriba) {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..20 {
        let fail = if n % 10 == 5 { 9 } else { 0 };
        append(&source, &format!("s{}", n % 4), &Act { fail, how: Fail::Permanent, skip: n == 7, ..Act::default() });
    }
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, at(19)).await;
    scriba.stop(id()).await.expect("it stops");
    (source, target, scriba)
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_clears_everything_but_the_epoch_and_the_read_model_and_the_version_begins_anew() {
    let (source, target, scriba) = projected().await;
    let before = target.checkpoint(id()).unwrap();
    let counts = scriba.reset(id(), Reset::new()).await.expect("stopped can be reset");
    assert_eq!(counts.cleared, Counts { applied: 17, skipped: 1, dead_lettered: 2 });
    assert_eq!(counts.dead_letters, 0);
    let after = target.checkpoint(id()).unwrap();
    assert!(after.epoch > before.epoch, "{before:?} {after:?}");
    assert_eq!((after.watermark, after.commit_no, after.last_event, after.counts), (None, 0, None, Counts::default()));
    assert_eq!((after.replay, after.event_types), (Replay::Ongoing, None));
    assert_eq!(target.dead_letters(id()).len(), 2, "not asked for");
    assert_eq!(applied(&target).len(), 17, "the read model is left alone");
    assert_eq!(source.acked_by(id()), None, "the server's position goes with it");
    assert_eq!(scriba.list().await.unwrap()[0].state, State::Stopped);
    assert_eq!(scriba.info(id()).unwrap().watermark, None);
    assert!(matches!(
        wait(&scriba, WaitFor::Position(at(3)), LONG).await,
        Some(WaitError::Stopped { watermark: None, .. })
    ));

    let script = Script::default();
    scriba.start(script.clone(), source.clone(), target.clone(), options()).await.expect("it starts");
    until(&scriba, at(19)).await;
    assert_eq!(target.checkpoint(id()).unwrap().counts, Counts { applied: 17, skipped: 1, dead_lettered: 2 });
    assert!(script.calls.lock().unwrap().iter().all(|call| call.replay), "a replay until it has caught up again");
    assert_eq!(applied(&target).len(), 34, "the read model was not emptied");
    assert_eq!(target.dead_letters(id()).len(), 2, "one for each position");
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_takes_dead_letters_and_read_model_with_it_where_it_is_told_to() {
    let (source, target, scriba) = projected().await;
    let counts = scriba.reset(id(), Reset::new().dead_letters().statement("TRUNCATE orders")).await.expect("stopped");
    assert_eq!(counts.dead_letters, 2);
    assert!(target.dead_letters(id()).is_empty() && applied(&target).is_empty());
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    until(&scriba, at(19)).await;
    assert_eq!(applied(&target).len(), 17);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_reset_start_from_counts_again_as_for_a_new_checkpoint() {
    for (start_from, first) in [(StartFrom::After(at(13)), 14), (StartFrom::Now, 20), (StartFrom::Beginning, 0)] {
        let (source, target, scriba) = projected().await;
        scriba.reset(id(), Reset::new().statement("TRUNCATE orders")).await.expect("stopped can be reset");
        let begun = options().start_from(start_from);
        scriba.start(Script::default(), source.clone(), target.clone(), begun).await.expect("it starts");
        running(&scriba).await;
        until(&scriba, append(&source, "s", &Act::default())).await;
        assert_eq!(applied(&target).first().copied(), Some(first), "{start_from:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_is_refused_while_a_node_holds_it_stands_by_or_may_run_it_without_a_lease() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (active, _) = start(&source, &target, options()).await;
    running(&active).await;
    let here = active.reset(id(), Reset::new()).await.expect_err("it runs here");
    let expected = StateOrStandby::State(State::Running);
    assert!(
        matches!(&here, ResetError::Command(CommandError::InvalidState { state, command: "reset", .. }) if *state == expected),
        "{here}"
    );
    let elsewhere = onlooker(&target).reset(id(), Reset::new()).await.expect_err("it runs elsewhere");
    assert!(matches!(&elsewhere, ResetError::Held { holder, .. } if holder.contains("process")), "{elsewhere}");

    let (standby, _) = start(&source, &target, options()).await;
    eventually("it stands by", || standby.info(id()).unwrap().role == Role::Standby).await;
    active.stop(id()).await.expect("it stops");
    let stood_by = active.reset(id(), Reset::new()).await.expect_err("a node stands by");
    // Or it has taken over already.
    assert!(matches!(&stood_by, ResetError::StoodBy { .. } | ResetError::Held { .. }), "{stood_by}");
    standby.stop(id()).await.expect("it stops");
    active.reset(id(), Reset::new()).await.expect("nobody is left");

    active
        .start(Script::default(), source.clone(), target.clone(), options().lease(Lease::Off))
        .await
        .expect("it starts");
    until(&active, append(&source, "a", &Act::default())).await;
    let mut refused = None;
    for _ in 0..50 {
        refused = onlooker(&target).reset(id(), Reset::new()).await.err();
        if matches!(refused, Some(ResetError::MayRun { state: State::Running, .. })) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(matches!(refused, Some(ResetError::MayRun { state: State::Running, .. })), "{refused:?}");
    let unknown = onlooker(&target).reset(("script", 9), Reset::new()).await.expect_err("there is none");
    assert!(matches!(unknown, ResetError::Command(CommandError::Unknown { .. })), "{unknown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_was_killed_keeps_a_reset_off_for_a_while_only_and_one_that_stopped_not_at_all() {
    let target = MemoryTarget::<u64>::new();
    let (source, owner) =
        (MemorySource::new(), |name: &str| Owner { id: name.to_owned(), description: name.to_owned() });
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    let mut control = target.control().await.unwrap();
    for name in ["b", "c"] {
        control.lease(&id(), &owner(name), Duration::from_secs(1)).await.unwrap();
    }
    let standbys = || async { target.stored(&id()).await.unwrap().unwrap().standbys };
    assert_eq!(standbys().await, ["b", "c"]);
    control.release(&id(), &owner("b")).await.unwrap();
    assert_eq!(standbys().await, ["c"]);
    scriba.stop(id()).await.expect("it stops");
    let refused = scriba.reset(id(), Reset::new()).await.expect_err("c stands by");
    assert!(matches!(&refused, ResetError::StoodBy { nodes, .. } if nodes == &["c".to_owned()]), "{refused}");
    control.lease(&id(), &owner("c"), Duration::from_secs(1)).await.unwrap();
    assert_eq!(standbys().await, Vec::<String>::new(), "it holds the lease now");
}

/// A source whose server keeps a position that cannot be reset.
struct Keeps(MemorySource);

#[async_trait]
impl Source for Keeps {
    async fn check(&self) -> Result<(), SourceError> {
        self.0.check().await
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        self.0.identity().await
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.0.subscribe(request).await
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        self.0.inspector().await
    }

    fn keeps_position(&self) -> bool {
        true
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_is_refused_while_the_position_that_the_sources_server_keeps_would_live_on() {
    let (_, target, scriba) = projected().await;
    let other = onlooker(&target);
    let refused = other.reset(id(), Reset::new()).await.expect_err("the source is not known there");
    assert!(matches!(&refused, ResetError::SourceLivesOn { .. }), "{refused}");
    assert!(refused.to_string().contains("attach_source"), "{refused}");
    other.attach_source(id(), Keeps(MemorySource::new()));
    let refused = other.reset(id(), Reset::new()).await.expect_err("it cannot be reset");
    assert!(matches!(&refused, ResetError::SourceLivesOn { .. }), "{refused}");
    assert_eq!(target.checkpoint(id()).unwrap().watermark, Some(at(19)), "nothing has changed");
    scriba.reset(id(), Reset::new()).await.expect("here it is known");
    assert_eq!(target.checkpoint(id()).unwrap().watermark, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_hangs_in_its_commit_while_it_is_reset_commits_nothing_afterwards() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options().shutdown_timeout(Duration::from_millis(100))).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    target.fail(TargetStep::Commit, 1, TargetFault::Hang);
    append(&source, "a", &Act::default());
    eventually("it is being committed", || scriba.info(id()).unwrap().window.events == 1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    scriba.stop(id()).await.expect_err("it hangs");
    scriba.reset(id(), Reset::new().statement("TRUNCATE orders")).await.expect("its lease is given up");
    target.release_hung();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(applied(&target).is_empty(), "{:?}", applied(&target));
    assert_eq!(target.checkpoint(id()).unwrap().watermark, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn until_hands_out_nothing_above_it_drains_and_stops_by_itself_with_the_watermark_at_it() {
    let (source, target, recorder) = (MemorySource::new(), MemoryTarget::new(), Recorder::new());
    for n in 0..50 {
        append(&source, &format!("s{}", n % 7), &Act { wait: 500, skip: n % 3 == 0, ..Act::default() });
    }
    let (scriba, script) = (Scriba::with_observers([std::sync::Arc::new(recorder.clone()) as _]), Script::default());
    scriba.start(script.clone(), source.clone(), target.clone(), options().until(at(29))).await.expect("it starts");
    scriba.run_until(std::future::pending::<()>()).await.expect("it ends by itself");
    let info = scriba.info(id()).unwrap();
    assert_eq!((info.state, info.watermark, info.halt_reason), (State::Stopped, Some(at(29)), None));
    assert_eq!(target.checkpoint(id()).unwrap().watermark, Some(at(29)));
    assert_eq!(script.calls.lock().unwrap().iter().map(|call| call.position).max(), Some(at(29)));
    assert_eq!(info.run.delivered, 30, "what is above it was not handed out");
    assert_eq!(target.checkpoint(id()).unwrap().replay, Replay::Ongoing, "it has not caught up");
    assert_eq!(source.acked_by(id()), Some(at(29)));
    let reasons: Vec<StopReason> = recorder
        .events_of(id())
        .iter()
        .filter_map(|event| if let Recorded::Stopped { reason, .. } = event { Some(*reason) } else { None })
        .collect();
    assert_eq!(reasons, [StopReason::Until]);
    assert_eq!(target.stored(&id()).await.unwrap().unwrap().state.state, State::Stopped);
    assert_eq!(target.stored(&id()).await.unwrap().unwrap().lease, StoredLease::None);
    assert!(wait(&scriba, WaitFor::Position(at(29)), LONG).await.is_none());
    assert!(
        matches!(wait(&scriba, WaitFor::Head, LONG).await, Some(WaitError::Stopped { wanted, .. }) if wanted == at(49))
    );

    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, at(49)).await;
    let expected: Vec<u64> = (0..50).filter(|n| n % 3 != 0).collect();
    assert_eq!(applied(&target), expected, "the next start goes on after it");
}

#[tokio::test(flavor = "multi_thread")]
async fn until_at_a_position_without_an_event_ends_exactly_there_once_something_stands_above() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    append(&source, "a", &Act::default());
    let (scriba, script) = start(&source, &target, options().until(at(6))).await;
    until(&scriba, at(0)).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(scriba.info(id()).unwrap().state, State::Running, "what is below 6 may still come");
    source.append_at(at(9), "a", "Act", "{}");
    stopped(&scriba).await;
    assert_eq!(target.checkpoint(id()).unwrap().watermark, Some(at(6)));
    assert_eq!(script.calls.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn until_cuts_progress_without_events() {
    // No event is of a listed type: all that is delivered is progress.
    let (source, target) = (MemorySource::new().filters_types(true), MemoryTarget::<u64>::new());
    for _ in 0..10 {
        source.append("a", "Another", "{}");
    }
    let scriba = Scriba::new();
    scriba.start(Picky, source.clone(), target.clone(), options().until(at(4))).await.expect("it starts");
    eventually("stopped", || scriba.info("picky").unwrap().state == State::Stopped).await;
    assert_eq!(target.checkpoint("picky").unwrap().watermark, Some(at(4)));
}

#[derive(scriba_core::Events)]
enum Listed {
    Act,
}

#[derive(scriba_core::Projection)]
#[projection(name = "picky")]
struct Picky;

impl scriba_core::Handler for Picky {
    type Event = Listed;
    type Op = u64;

    async fn handle(&self, _: Listed, _: &scriba_core::EventMeta) -> scriba_core::HandlerResult<u64> {
        Ok(1.into())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn until_at_or_below_the_watermark_stops_at_once_and_handles_nothing() {
    let (source, target, _) = projected().await;
    for until in [19, 3] {
        let (scriba, script) = start(&source, &target, options().until(at(until))).await;
        scriba.run_until(std::future::pending::<()>()).await.expect("it ends by itself");
        assert!(script.calls.lock().unwrap().is_empty());
        assert_eq!(target.checkpoint(id()).unwrap().watermark, Some(at(19)), "a watermark never moves backwards");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn until_survives_faults_of_the_target_and_ends_where_it_should() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..40 {
        append(&source, &format!("s{}", n % 5), &Act { wait: 300, ..Act::default() });
    }
    target.fail(TargetStep::Commit, 2, TargetFault::Ambiguous { durable: true });
    target.fail(TargetStep::Apply, 17, TargetFault::Transient);
    let (scriba, _) = start(&source, &target, options().batch_events(4).until(at(30))).await;
    scriba.run_until(std::future::pending::<()>()).await.expect("it ends by itself");
    assert_eq!(applied(&target), (0..=30).collect::<Vec<_>>());
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn run_until_goes_on_while_another_projection_runs_and_where_a_user_stopped_the_only_one() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    append(&source, "a", &Act::default());
    let (scriba, _) = start(&source, &target, options().until(at(0))).await;
    scriba.start(Picky, source.clone(), MemoryTarget::new(), options()).await.expect("it starts");
    stopped(&scriba).await;
    let ended = tokio::time::timeout(SHORT, scriba.run_until(std::future::pending::<()>())).await;
    assert!(ended.is_err(), "the other one runs");

    let (scriba, _) = start(&source, &target, options()).await;
    running(&scriba).await;
    scriba.stop(id()).await.expect("it stops");
    let ended = tokio::time::timeout(SHORT, scriba.run_until(std::future::pending::<()>())).await;
    assert!(ended.is_err(), "it may be started again");
}

/// F4.
#[tokio::test(flavor = "multi_thread")]
async fn a_failing_rebuild_ends_run_until_with_the_first_error_and_its_position() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    for n in 0..20 {
        let fail = if n == 7 || n == 9 { 9 } else { 0 };
        append(&source, &format!("s{n}"), &Act { fail, how: Fail::Permanent, ..Act::default() });
    }
    let (scriba, _) = start(&source, &target, options().on_poison_while_replaying(OnPoison::Halt).until(at(19))).await;
    let error = scriba.run_until(std::future::pending::<()>()).await.expect_err("it fails");
    let message = error.to_string();
    let RunError::Halted { id: halted, reason } = error else { panic!("{error}") };
    assert_eq!((halted, reason.position), (id(), Some(at(7))));
    assert!(message.contains("as told") && message.ends_with("(position 7)"), "{message}");
    assert_eq!(applied(&target), (0..7).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn info_names_source_target_streams_and_the_oldest_event_also_while_it_waits() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    for stream in ["a", "b", "a"] {
        append(&source, stream, &Act::default());
    }
    let (scriba, _) = start(&source, &target, options().parallelism(1)).await;
    until(&scriba, at(2)).await;
    let info = scriba.info(id()).unwrap();
    assert_eq!(info.target, "memory");
    assert_eq!(info.source.unwrap().kind, "memory");
    let known = BTreeMap::from([("a".into(), at(2)), ("b".into(), at(1))]);
    assert_eq!(info.streams, StreamPositions::Known(known));

    append(&source, "slow", &Act { wait: 400_000, ..Act::default() });
    append(&source, "waits", &Act { wait: 400_000, ..Act::default() });
    let oldest = || scriba.info(id()).unwrap().window.oldest;
    eventually("it runs", || oldest().is_some_and(|oldest| oldest.running.is_some())).await;
    let (first, again) = (oldest().unwrap(), {
        tokio::time::sleep(Duration::from_millis(30)).await;
        oldest().unwrap()
    });
    assert_eq!((first.position, first.stream_id.as_str()), (at(3), "slow"));
    assert!(again.age >= first.age + Duration::from_millis(30), "the age is that of now: {first:?} {again:?}");
    assert!(again.running.unwrap() >= first.running.unwrap() + Duration::from_millis(30));
    eventually("the second one", || oldest().is_some_and(|oldest| oldest.position == at(4))).await;
    assert!(oldest().unwrap().age >= Duration::from_millis(300), "it has waited behind the first one");
    assert_ne!(oldest().unwrap().partition, first.partition);
}

#[tokio::test(flavor = "multi_thread")]
async fn info_shows_the_oldest_event_while_it_waits_for_its_turn() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let (scriba, _) = start(&source, &target, options().parallelism(1)).await;
    running(&scriba).await;
    // The window's first event is done, the one behind it waits while a third, of the partition that runs, is handled.
    append(&source, "a", &Act { wait: 50_000, ..Act::default() });
    append(&source, "b", &Act { wait: 50_000, ..Act::default() });
    target.fail(TargetStep::Commit, 1, TargetFault::Hang);
    eventually("the second is the oldest", || {
        scriba
            .info(id())
            .unwrap()
            .window
            .oldest
            .is_some_and(|oldest| oldest.position == at(1) && oldest.stream_id == "b")
    })
    .await;
    target.release_hung();
}

#[tokio::test(flavor = "multi_thread")]
async fn info_keeps_no_streams_beyond_1000() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    for n in 0..1_001 {
        append(&source, &format!("s{n}"), &Act::default());
    }
    let (scriba, _) = start(&source, &target, options()).await;
    until(&scriba, at(1_000)).await;
    assert_eq!(scriba.info(id()).unwrap().streams, StreamPositions::Truncated);
}

#[tokio::test(flavor = "multi_thread")]
async fn info_tells_the_rate_of_a_catch_up_and_the_time_left_where_the_head_is_known_and_none_once_it_is_over() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    for n in 0..600 {
        append(&source, &format!("s{}", n % 8), &Act { wait: 20_000, ..Act::default() });
    }
    let lagging =
        options().parallelism(8).batch_events(8).in_flight_events(16).lag_interval(Duration::from_millis(100));
    let (scriba, _) = start(&source, &target, lagging).await;
    eventually("a rate", || scriba.info(id()).unwrap().catch_up.is_some()).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let info = scriba.info(id()).unwrap();
    let catch_up = info.catch_up.expect("it is behind");
    // 8 handlers of 20 ms: 400 a second at most.
    assert!((50.0..=420.0).contains(&catch_up.events_per_second), "{catch_up:?}");
    let left = catch_up.time_left.expect("the head is known").as_secs_f64();
    let expected = f64::from(u32::try_from(info.lag_events.unwrap()).unwrap()) / catch_up.events_per_second;
    assert!((expected * 0.8..expected * 1.2).contains(&left), "{left} s left, {expected} s expected");
    until(&scriba, at(599)).await;
    eventually("no rate", || scriba.info(id()).unwrap().catch_up.is_none()).await;
}

/// F6.
#[tokio::test(flavor = "multi_thread")]
async fn caught_up_and_idle_has_no_lag_however_old_its_last_event_is() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let hour_ago = chrono::Utc::now() - chrono::Duration::hours(1);
    let position = append(&source, "a", &Act::default());
    let event = source.events().pop().unwrap();
    let last = source.append_event(scriba_core::RecordedEvent { occurred_at: Some(hour_ago), ..event });
    assert_eq!(last.get(), position.get() + 1);
    let (scriba, _) = start(&source, &target, options().lag_interval(Duration::from_millis(100))).await;
    until(&scriba, last).await;
    eventually("no lag", || {
        let info = scriba.info(id()).unwrap();
        (info.lag_events, info.lag_time) == (Some(0), Some(Duration::ZERO))
    })
    .await;
    let info = scriba.info(id()).unwrap();
    assert!(info.is_ready() && info.head == Some(last), "{info:?}");
}

/// F6.
#[tokio::test(flavor = "multi_thread")]
async fn lag_grows_against_the_head_and_health_is_red_while_the_pipeline_is_lost_and_when_it_has_halted() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let lagging = || options().lag_interval(Duration::from_millis(100));
    let (scriba, _) = start(&source, &target, lagging().on_poison(OnPoison::Halt)).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    target.outage(true);
    append(&source, "a", &Act::default());
    let lag = |wanted: u64| {
        let info = scriba.info(id()).unwrap();
        info.lag_events == Some(wanted) && !info.is_ready()
    };
    eventually("one behind and not ready", || lag(1)).await;
    append(&source, "a", &Act::default());
    eventually("two behind and not ready", || lag(2)).await;
    target.outage(false);
    eventually("ready again", || scriba.info(id()).unwrap().is_ready()).await;
    append(&source, "a", &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
    eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
    append(&source, "a", &Act::default());
    eventually("two behind, halted", || lag(2) && !scriba.info(id()).unwrap().is_live()).await;
    scriba.stop(id()).await.expect("it stops");
    let info = scriba.info(id()).unwrap();
    assert_eq!((info.lag_events, info.lag_time), (None, None), "nobody looks any more");
}

/// F6.
#[test]
fn a_projection_whose_runtime_was_killed_is_not_ready_and_shows_no_old_lag() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let scriba = runtime.block_on(async {
        let (scriba, _) = start(&source, &target, options().lag_interval(Duration::from_millis(100))).await;
        until(&scriba, append(&source, "a", &Act::default())).await;
        eventually("no lag", || scriba.info(id()).unwrap().lag_events == Some(0)).await;
        scriba
    });
    runtime.shutdown_background();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(eventually("it is known", || !scriba.info(id()).unwrap().is_live()));
    append(&source, "a", &Act::default());
    let info = scriba.info(id()).unwrap();
    assert!(!info.is_ready() && info.lag_events.is_none(), "{info:?}");
}

/// F1.
#[tokio::test(flavor = "multi_thread")]
async fn a_rebuild_with_no_events_is_done_at_once_caught_up_empty() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let (scriba, _) = start(&source, &target, options()).await;
    scriba.wait_for(id(), WaitFor::Head, LONG).await.expect("there is nothing to wait for");
    eventually("caught up", || scriba.info(id()).unwrap().replay == Replay::Over(None)).await;
    assert_eq!(scriba.info(id()).unwrap().replay.to_string(), "caught up (empty)");
}

#[tokio::test(flavor = "multi_thread")]
async fn list_knows_all_projections_on_any_node_also_stopped_and_halted_ones_with_class_and_code() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let scriba = Scriba::new();
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    scriba.start(Picky, source.clone(), target.clone(), options()).await.expect("it starts");
    scriba
        .wait_for("picky", WaitFor::Position(append(&source, "a", &Act::default())), LONG)
        .await
        .expect("it is there");
    scriba.stop("picky").await.expect("it stops");
    until(&scriba, at(0)).await;
    target.fail(TargetStep::Apply, 1, TargetFault::Structural);
    append(&source, "a", &Act::default());
    let other = onlooker(&target);
    let mut listed = Vec::new();
    for _ in 0..1_000 {
        listed = other.list().await.expect("the tables answer");
        if listed.iter().any(|listed| listed.state == State::Halted) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let states: Vec<(ProjectionId, State)> = listed.iter().map(|listed| (listed.id.clone(), listed.state)).collect();
    assert_eq!(states, [("picky".into(), State::Stopped), (id(), State::Halted)]);
    let StateRecord { halt_class, halt_code, halt_reason, source_keeps_position, .. } =
        listed[1].stored.clone().unwrap().state;
    assert_eq!((halt_class, halt_code.as_deref()), (Some(FailureClass::Structural), Some("42P01")));
    assert!(halt_reason.is_some() && source_keeps_position);
}

/// F5.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_waits_is_told_why_it_will_not_come_on_the_node_itself_and_on_another() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let other = onlooker(&target);
    let unknown =
        Scriba::new().wait_for(id(), WaitFor::Position(at(0)), LONG).await.expect_err("no tables to look into");
    assert!(matches!(unknown, WaitError::Command(CommandError::Unknown { .. })), "{unknown}");
    let never = wait(&other, WaitFor::Position(at(0)), LONG).await.expect("it was never started");
    assert!(matches!(never, WaitError::NeverStarted { .. }), "{never}");

    let (scriba, _) = start(&source, &target, options().on_poison(OnPoison::Halt)).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    for node in [&scriba, &other] {
        assert!(wait(node, WaitFor::Position(at(0)), LONG).await.is_none());
        assert!(wait(node, WaitFor::Event(at(0)), LONG).await.is_none());
        let late = wait(node, WaitFor::Position(at(1)), SHORT).await.expect("it does not come");
        assert!(
            matches!(&late, WaitError::Timeout { watermark: Some(watermark), timeout: SHORT, .. } if *watermark == at(0)),
            "{late}"
        );
    }

    append(&source, "a", &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
    eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
    for node in [&scriba, &other] {
        let mut halted = wait(node, WaitFor::Position(at(5)), SHORT).await.expect("it does not come");
        for _ in 0..50 {
            if !matches!(halted, WaitError::Timeout { .. }) {
                break;
            }
            halted = wait(node, WaitFor::Position(at(5)), SHORT).await.expect("it does not come");
        }
        assert!(matches!(&halted, WaitError::Halted { reason, .. } if reason.contains("(position 1)")), "{halted}");
    }

    scriba.stop(id()).await.expect("it stops");
    for node in [&scriba, &other] {
        let told = wait(node, WaitFor::Position(at(5)), LONG).await.expect("it does not come");
        assert!(
            matches!(&told, WaitError::Stopped { watermark: Some(watermark), .. } if *watermark == at(0)),
            "{told}"
        );
        assert!(told.to_string().contains("script v1"), "{told}");
    }

    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    until(&scriba, at(1)).await;
    for node in [&scriba, &other] {
        let dead = wait(node, WaitFor::Event(at(1)), LONG).await.expect("it is a dead letter");
        assert!(matches!(&dead, WaitError::DeadLettered { kind, .. } if kind == "scripted"), "{dead}");
        assert!(wait(node, WaitFor::Position(at(1)), LONG).await.is_none(), "it is accounted for");
    }
}

/// F5.
#[tokio::test(flavor = "multi_thread")]
async fn a_projection_whose_node_died_is_run_by_nobody_once_its_lease_lapses_and_a_standby_is_waited_for() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options().lease(Lease::For(Duration::from_secs(1)))).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    let other = onlooker(&target);
    drop(scriba);
    let told = wait(&other, WaitFor::Position(at(1)), LONG).await.expect("it does not come");
    assert!(
        matches!(&told, WaitError::RunByNobody { watermark: Some(watermark), .. } if *watermark == at(0)),
        "{told}"
    );
    assert!(other.reset(id(), Reset::new()).await.is_err_and(|e| matches!(e, ResetError::SourceLivesOn { .. })));
    append(&source, "a", &Act::default());
    let (_next, _) = start(&source, &target, options()).await;
    eventually("it is taken over", || target.checkpoint(id()).unwrap().watermark == Some(at(1))).await;
    assert!(wait(&other, WaitFor::Position(at(1)), LONG).await.is_none());
}

/// F5.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stopped_it_waits_for_the_one_that_runs_it_now() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (first, _) = start(&source, &target, options()).await;
    until(&first, append(&source, "a", &Act::default())).await;
    first.stop(id()).await.expect("it stops");
    let (second, _) = start(&source, &target, options()).await;
    until(&second, append(&source, "a", &Act::default())).await;
    let told = wait(&first, WaitFor::Position(at(2)), SHORT).await.expect("nothing stands there");
    assert!(matches!(told, WaitError::Timeout { .. }), "{told}");
    append(&source, "a", &Act::default());
    assert!(wait(&first, WaitFor::Position(at(2)), LONG).await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_head_is_waited_for_on_a_node_that_was_told_the_source() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, _) = start(&source, &target, options()).await;
    let other = onlooker(&target);
    let unknown = wait(&other, WaitFor::Head, LONG).await.expect("it does not know the source");
    assert!(
        matches!(&unknown, WaitError::HeadUnknown { message, .. } if message.contains("attach_source")),
        "{unknown}"
    );
    other.attach_source(id(), source.clone());
    let last = append(&source, "a", &Act { wait: 50_000, ..Act::default() });
    for node in [&scriba, &other] {
        assert!(wait(node, WaitFor::Head, LONG).await.is_none());
        assert_eq!(target.checkpoint(id()).unwrap().watermark, Some(last));
    }
}
