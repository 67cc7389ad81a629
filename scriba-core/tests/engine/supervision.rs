//! Each task of a projection lost in turn: it comes back, nobody who asked is left waiting, and nothing is left behind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use scriba_core::switches::Switches;
use scriba_core::{CommandError, Lease, OnPoison, Position, ProjectionOptions, Role, Scriba, State};
use scriba_testing::{MemorySource, MemoryTarget, Recorded, Recorder, TargetFault, TargetStep};

use super::common::{Act, Fail, Script, append, applied, eventually, id, options, until};
use super::fragile::{Call, FragileSource, FragileTarget, Panics};

struct Bed {
    source: MemorySource,
    target: MemoryTarget<u64>,
    panics: Panics,
    scriba: Scriba,
    script: Script,
    recorder: Recorder,
}

fn settings() -> ProjectionOptions {
    options().lease(Lease::For(Duration::from_secs(1))).lag_interval(Duration::from_millis(100))
}

impl Bed {
    async fn start(options: ProjectionOptions) -> Self {
        let recorder = Recorder::new();
        let bed = Self {
            source: MemorySource::new(),
            target: MemoryTarget::new(),
            panics: Panics::default(),
            scriba: Scriba::with_observers([Arc::new(recorder.clone()) as _]),
            script: Script::default(),
            recorder,
        };
        bed.start_on(&bed.scriba, bed.script.clone(), options).await;
        until(&bed.scriba, append(&bed.source, "a", &Act::default())).await;
        bed.reaches(State::Running).await;
        bed
    }

    async fn start_on(&self, scriba: &Scriba, script: Script, options: ProjectionOptions) {
        let source = FragileSource { source: self.source.clone(), panics: self.panics.clone() };
        let target = FragileTarget { target: self.target.clone(), panics: self.panics.clone(), detached: false };
        scriba.start(script, source, target, options).await.expect("it starts");
    }

    async fn reaches(&self, state: State) {
        // Ten panics are met with waits of 5 s in all, and each may resolve a backtrace.
        let until = Instant::now() + Duration::from_mins(1);
        while self.scriba.info(id()).unwrap().state != state {
            assert!(Instant::now() < until, "not {state}: {:#?}", self.scriba.info(id()));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn has_panicked(&self, call: Call) {
        eventually(&format!("{call:?} has panicked"), || self.panics.left(call) == 0).await;
    }

    fn reason(&self) -> String {
        self.scriba.info(id()).unwrap().halt_reason.map(|reason| reason.to_string()).unwrap_or_default()
    }

    /// It goes on, stops in time, and leaves nothing behind.
    async fn goes_on_and_ends(self) {
        let last = append(&self.source, "b", &Act::default());
        until(&self.scriba, last).await;
        self.reaches(State::Running).await;
        let info = self.scriba.info(id()).unwrap();
        assert_eq!((info.role, info.degraded_since), (Role::Active, None));
        self.scriba.stop(id()).await.expect("it stops");
        assert_eq!(applied(&self.target), (0..=last.get()).collect::<Vec<_>>());
        assert_eq!(self.target.violations(), Vec::<String>::new());
        eventually("no task holds the handler any more", || Arc::strong_count(&self.script.calls) == 1).await;
        assert!(self.recorder.events_of(id()).iter().filter(|event| matches!(event, Recorded::Started)).count() == 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_pipeline_the_reader_or_the_writer_brings_a_new_pipeline() {
    for call in [Call::Commit, Call::Next, Call::TakeOver, Call::Subscribe] {
        let bed = Bed::start(settings()).await;
        let subscriptions = bed.source.subscriptions();
        bed.panics.arm(call, 1);
        if matches!(call, Call::TakeOver | Call::Subscribe) {
            bed.source.cut();
        } else {
            append(&bed.source, "a", &Act::default());
        }
        bed.has_panicked(call).await;
        eventually("subscribed anew", || bed.source.subscriptions() > subscriptions).await;
        bed.goes_on_and_ends().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_the_keeper_brings_the_projection_back_with_its_lease() {
    for call in [Call::Lease, Call::StoreState] {
        let bed = Bed::start(settings()).await;
        let epoch = bed.target.checkpoint(id()).unwrap().epoch;
        bed.panics.arm(call, 1);
        bed.has_panicked(call).await;
        eventually("it comes back", || bed.target.checkpoint(id()).unwrap().epoch > epoch).await;
        let error = bed.scriba.info(id()).unwrap().last_error.unwrap();
        assert!(error.contains("keeper of the lease panicked"), "{error}");
        let standby = bed_of(&bed);
        standby.start_on(&standby.scriba, standby.script.clone(), settings()).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert_eq!(standby.scriba.info(id()).unwrap().role, Role::Standby, "{call:?}: the lease is renewed");
        standby.scriba.shutdown().await.expect("it stops");
        bed.goes_on_and_ends().await;
    }
}

/// Another node on the same source and target.
fn bed_of(bed: &Bed) -> Bed {
    Bed {
        source: bed.source.clone(),
        target: bed.target.clone(),
        panics: Panics::default(),
        scriba: Scriba::new(),
        script: Script::default(),
        recorder: Recorder::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_the_coordinator_is_told_to_who_asked_and_the_projection_comes_back() {
    let bed = Bed::start(settings().switches(Switches::CoordinatorPanics)).await;
    let epoch = bed.target.checkpoint(id()).unwrap().epoch;
    for round in 1..=3 {
        let error = bed.scriba.pause(id()).await.expect_err("the coordinator panics");
        assert!(matches!(error, CommandError::Interrupted { command: "pause", .. }), "{error}");
        eventually("it comes back", || bed.target.checkpoint(id()).unwrap().epoch == epoch + round).await;
        bed.reaches(State::Running).await;
        until(&bed.scriba, append(&bed.source, "a", &Act::default())).await;
    }
    bed.goes_on_and_ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_behind_a_command_that_loses_the_coordinator_is_carried_out_all_the_same() {
    let bed = Bed::start(settings().switches(Switches::CoordinatorPanics)).await;
    bed.target.fail(TargetStep::Begin, 1, TargetFault::Hang);
    append(&bed.source, "a", &Act::default());
    eventually("a commit is in flight", || bed.target.hanging() == 1).await;
    let (paused, stopped) = tokio::join!(bed.scriba.pause(id()), bed.scriba.stop(id()));
    assert!(matches!(paused, Err(CommandError::Interrupted { .. })), "{paused:?}");
    stopped.expect("it stops");
    bed.target.release_hung();
    bed.start_on(&bed.scriba, bed.script.clone(), settings()).await;
    bed.goes_on_and_ends_after_start().await;
}

impl Bed {
    /// The same of one that was started twice.
    async fn goes_on_and_ends_after_start(self) {
        let last = append(&self.source, "b", &Act::default());
        until(&self.scriba, last).await;
        self.scriba.stop(id()).await.expect("it stops");
        assert_eq!(applied(&self.target), (0..=last.get()).collect::<Vec<_>>());
        assert_eq!(self.target.violations(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_panics_when_it_is_asked_for_its_head_leaves_the_lag_unknown_and_the_projection_running() {
    let bed = Bed::start(settings()).await;
    eventually("the head is known", || bed.scriba.info(id()).unwrap().head.is_some()).await;
    let epoch = bed.target.checkpoint(id()).unwrap().epoch;
    bed.panics.arm(Call::Head, 3);
    eventually("the head is not known", || bed.scriba.info(id()).unwrap().lag_events.is_none()).await;
    bed.has_panicked(Call::Head).await;
    eventually("the head is known again", || bed.scriba.info(id()).unwrap().lag_events == Some(0)).await;
    assert_eq!(bed.target.checkpoint(id()).unwrap().epoch, epoch, "the pipeline was not disturbed");
    bed.goes_on_and_ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_panics_with_nothing_committed_between_them_halt_with_the_last_of_them() {
    for call in [Call::Commit, Call::TakeOver] {
        let bed = Bed::start(settings()).await;
        bed.panics.arm(call, 100);
        bed.source.cut();
        append(&bed.source, "a", &Act::default());
        bed.reaches(State::Halted).await;
        assert_eq!(100 - bed.panics.left(call), 10, "{call:?}");
        assert!(bed.reason().contains("10 times with nothing committed between them"), "{}", bed.reason());
        assert_eq!(applied(&bed.target), [0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_that_panics_again_and_again_halts_and_is_answered_for_all_the_while() {
    let bed = Bed::start(settings()).await;
    bed.panics.arm(Call::Lease, 1_000);
    bed.reaches(State::Halted).await;
    assert!(bed.reason().contains("keeper of the lease panicked"), "{}", bed.reason());
    bed.scriba.stop(id()).await.expect("it stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn panics_with_commits_between_them_never_halt() {
    let bed = Bed::start(settings()).await;
    for _ in 0..12 {
        bed.panics.arm(Call::Commit, 1);
        until(&bed.scriba, append(&bed.source, "a", &Act::default())).await;
        bed.has_panicked(Call::Commit).await;
        until(&bed.scriba, append(&bed.source, "a", &Act::default())).await;
    }
    bed.goes_on_and_ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_never_halts_not_even_with_panics_before_it() {
    let bed = Bed::start(settings()).await;
    bed.panics.arm(Call::TakeOver, 5);
    bed.source.cut();
    bed.has_panicked(Call::TakeOver).await;
    bed.target.outage(true);
    append(&bed.source, "a", &Act::default());
    tokio::time::sleep(Duration::from_secs(3)).await;
    let info = bed.scriba.info(id()).unwrap();
    assert_eq!(info.state, State::Initializing);
    assert!(info.degraded_since.is_some(), "{info:?}");
    bed.target.outage(false);
    bed.goes_on_and_ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_halted_projection_stays_halted_with_its_first_reason_and_its_lease_when_the_keeper_is_lost() {
    let bed = Bed::start(settings().on_poison(OnPoison::Halt)).await;
    append(&bed.source, "a", &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
    bed.reaches(State::Halted).await;
    let reason = bed.reason();
    let standby = bed_of(&bed);
    standby.start_on(&standby.scriba, standby.script.clone(), settings()).await;
    bed.panics.arm(Call::Lease, 2);
    bed.has_panicked(Call::Lease).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let info = bed.scriba.info(id()).unwrap();
    assert_eq!((info.state, bed.reason()), (State::Halted, reason));
    assert_eq!(info.halt_reason.unwrap().position, Some(Position::new(1)));
    assert_eq!(standby.scriba.info(id()).unwrap().role, Role::Standby);
    bed.scriba.stop(id()).await.expect("it stops");
}
