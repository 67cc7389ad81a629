//! Every cell of the table of states: what each command and each event makes of a projection that runs.

use std::time::Duration;

use scriba_core::{CommandError, OnPoison, Position, ProjectionOptions, Role, Scriba, State, StateOrStandby};
use scriba_testing::{MemorySource, MemoryTarget, SourceFault, TargetFault, TargetStep};
use tokio::task::JoinHandle;

use super::common::{Act, Fail, append, applied, eventually, id, options, start, until};

/// Where a projection stands before something happens to it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Row {
    Initializing,
    Running,
    Paused,
    Draining,
    Halted,
    Stopped,
    Standby,
}

impl Row {
    const ALL: [Self; 7] =
        [Self::Initializing, Self::Running, Self::Paused, Self::Draining, Self::Halted, Self::Stopped, Self::Standby];

    fn state(self) -> (State, Role) {
        let active = |state| (state, Role::Active);
        match self {
            Self::Initializing => active(State::Initializing),
            Self::Running => active(State::Running),
            Self::Paused => active(State::Paused),
            Self::Draining => active(State::Draining),
            Self::Halted => active(State::Halted),
            Self::Stopped => active(State::Stopped),
            Self::Standby => (State::Running, Role::Standby),
        }
    }

    fn refusal(self) -> StateOrStandby {
        if self == Self::Standby { StateOrStandby::Standby } else { StateOrStandby::State(self.state().0) }
    }
}

/// A projection in the state of a row.
struct Bed {
    row: Row,
    source: MemorySource,
    target: MemoryTarget<u64>,
    scriba: Scriba,
    /// The first stop of a projection that drains.
    stopping: Option<JoinHandle<Result<(), CommandError>>>,
    /// The node that holds what this one stands by for.
    holder: Option<Scriba>,
}

fn settings() -> ProjectionOptions {
    options().on_poison(OnPoison::Halt)
}

impl Bed {
    async fn new(row: Row) -> Self {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        let mut holder = None;
        match row {
            Row::Initializing => target.outage(true),
            Row::Standby => {
                let (active, _) = start(&source, &target, settings()).await;
                until(&active, append(&source, "a", &Act::default())).await;
                holder = Some(active);
            }
            _ => {}
        }
        let (scriba, _) = start(&source, &target, settings()).await;
        let mut bed = Self { row, source, target, scriba, stopping: None, holder };
        if !matches!(row, Row::Initializing | Row::Standby) {
            bed.reaches(State::Running).await;
            until(&bed.scriba, append(&bed.source, "a", &Act::default())).await;
        }
        match row {
            Row::Paused => {
                bed.begin_commit().await;
                bed.scriba.pause(id()).await.expect("running can be paused");
            }
            Row::Draining => {
                bed.begin_commit().await;
                let scriba = bed.scriba.clone();
                bed.stopping = Some(tokio::spawn(async move { scriba.stop(id()).await }));
            }
            Row::Halted => {
                append(&bed.source, "a", &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
            }
            Row::Stopped => bed.scriba.stop(id()).await.expect("running can be stopped"),
            Row::Initializing | Row::Running | Row::Standby => {}
        }
        bed.is(row.state()).await;
        bed
    }

    /// An event whose commit hangs from now on.
    async fn begin_commit(&self) {
        self.target.fail(TargetStep::Begin, 1, TargetFault::Hang);
        append(&self.source, "a", &Act::default());
        eventually("a commit is in flight", || self.target.hanging() == 1).await;
    }

    async fn is(&self, (state, role): (State, Role)) {
        eventually(&format!("{:?}: {state} and {role}", self.row), || {
            self.scriba.info(id()).is_ok_and(|info| (info.state, info.role) == (state, role))
        })
        .await;
    }

    async fn reaches(&self, state: State) {
        // What is stopped keeps the role it had.
        let role = if self.row == Row::Standby && state == State::Stopped { Role::Standby } else { Role::Active };
        self.is((state, role)).await;
    }

    /// It is in a state, and stays there.
    async fn stays(&self, state: State) {
        self.reaches(state).await;
        tokio::time::sleep(Duration::from_millis(60)).await;
        self.reaches(state).await;
    }

    /// The pipeline is lost, in the way it can be where it stands.
    async fn lose_pipeline(&self) {
        match self.row {
            Row::Initializing => {
                self.target.fail(TargetStep::TakeOver, 1, TargetFault::Transient);
                self.target.outage(false);
            }
            Row::Running => self.source.inject(SourceFault::End),
            Row::Paused | Row::Draining => {
                self.target.fail(TargetStep::Commit, 1, TargetFault::Transient);
                self.target.release_hung();
            }
            Row::Halted | Row::Stopped | Row::Standby => {
                self.target.outage(true);
                self.source.cut();
                tokio::time::sleep(Duration::from_millis(50)).await;
                self.target.outage(false);
            }
        }
    }

    /// A failure that no retry mends, in the way it can come where it stands.
    fn fail_for_good(&self) {
        match self.row {
            Row::Initializing => {
                self.target.fail(TargetStep::TakeOver, 1, TargetFault::Structural);
                self.target.outage(false);
            }
            Row::Running => self.source.inject(SourceFault::Unusable),
            Row::Paused | Row::Draining => {
                self.target.fail(TargetStep::Commit, 1, TargetFault::Structural);
                self.target.release_hung();
            }
            Row::Halted | Row::Stopped | Row::Standby => {
                // Nothing runs that could fail: what waits for its turn is not met.
                self.target.fail(TargetStep::TakeOver, 1, TargetFault::Structural);
                self.source.inject(SourceFault::Unusable);
            }
        }
    }

    fn reason(&self) -> Option<String> {
        self.scriba.info(id()).unwrap().halt_reason.map(|reason| reason.to_string())
    }

    /// Whatever it was, nothing is lost or doubled.
    async fn end(self) {
        self.target.outage(false);
        self.target.release_hung();
        if self.scriba.info(id()).unwrap().state != State::Stopped {
            self.scriba.stop(id()).await.expect("it stops");
        }
        let positions = applied(&self.target);
        assert!(positions.windows(2).all(|pair| pair[0] < pair[1]), "{:?}: {positions:?}", self.row);
        assert_eq!(self.target.violations(), Vec::<String>::new(), "{:?}", self.row);
    }
}

fn refused(row: Row, result: Result<(), CommandError>) {
    match result {
        Err(CommandError::InvalidState { state, .. }) => assert_eq!(state, row.refusal(), "{row:?}"),
        other => panic!("{row:?}: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_is_obeyed_by_a_running_active_projection_and_refused_by_any_other() {
    for row in Row::ALL {
        let bed = Bed::new(row).await;
        let answer = bed.scriba.pause(id()).await;
        if row == Row::Running {
            answer.expect("running can be paused");
            bed.stays(State::Paused).await;
        } else {
            refused(row, answer);
            bed.is(row.state()).await;
        }
        bed.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_is_obeyed_by_a_paused_projection_and_refused_by_any_other() {
    for row in Row::ALL {
        let bed = Bed::new(row).await;
        let answer = bed.scriba.resume(id()).await;
        if row == Row::Paused {
            answer.expect("paused can be resumed");
            bed.stays(State::Running).await;
        } else {
            refused(row, answer);
            bed.is(row.state()).await;
        }
        bed.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_is_obeyed_in_every_state_but_stopped_and_joins_one_that_is_on_its_way() {
    for row in Row::ALL {
        let mut bed = Bed::new(row).await;
        let stop = {
            let scriba = bed.scriba.clone();
            tokio::spawn(async move { scriba.stop(id()).await })
        };
        match row {
            Row::Stopped => refused(row, stop.await.unwrap()),
            Row::Running | Row::Standby | Row::Initializing | Row::Halted => {
                stop.await.unwrap().expect("it can be stopped");
            }
            Row::Paused | Row::Draining => {
                // The commit in flight is finished first.
                tokio::time::sleep(Duration::from_millis(30)).await;
                assert_eq!(bed.scriba.info(id()).unwrap().state, State::Draining, "{row:?}");
                bed.target.release_hung();
                stop.await.unwrap().expect("it can be stopped");
                if let Some(first) = bed.stopping.take() {
                    first.await.unwrap().expect("both stops end together");
                }
                assert_eq!(applied(&bed.target), [0, 1], "{row:?}");
            }
        }
        bed.stays(State::Stopped).await;
        assert_eq!(bed.reason().is_some(), row == Row::Halted, "{row:?}: the reason outlives the stop");
        bed.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_that_is_lost_comes_back_as_what_it_was() {
    for row in Row::ALL {
        let mut bed = Bed::new(row).await;
        let subscriptions = bed.source.subscriptions();
        bed.lose_pipeline().await;
        match row {
            Row::Initializing | Row::Running | Row::Paused => {
                eventually("subscribed anew", || bed.source.subscriptions() > subscriptions).await;
                bed.stays(if row == Row::Paused { State::Paused } else { State::Running }).await;
                if row == Row::Paused {
                    assert_eq!(applied(&bed.target), [0], "a pause survives: what was lost is not pulled again");
                    bed.scriba.resume(id()).await.expect("paused can be resumed");
                }
                let last = append(&bed.source, "a", &Act::default());
                until(&bed.scriba, last).await;
                assert_eq!(applied(&bed.target), (0..=last.get()).collect::<Vec<_>>(), "{row:?}");
            }
            Row::Draining => {
                bed.stopping.take().unwrap().await.unwrap().expect("it is stopped");
                bed.stays(State::Stopped).await;
                assert_eq!(applied(&bed.target), [0], "the batch is delivered again at the next start");
                assert_eq!(bed.reason(), None);
            }
            Row::Halted => bed.stays(State::Halted).await,
            Row::Stopped => bed.stays(State::Stopped).await,
            Row::Standby => {
                tokio::time::sleep(Duration::from_millis(60)).await;
                bed.is(row.state()).await;
            }
        }
        bed.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_structural_failure_halts_what_runs_and_leaves_its_reason_with_what_stops() {
    for row in Row::ALL {
        let mut bed = Bed::new(row).await;
        let before = bed.reason();
        bed.fail_for_good();
        match row {
            Row::Initializing | Row::Running | Row::Paused => {
                bed.stays(State::Halted).await;
                assert!(bed.reason().is_some());
                refused(Row::Halted, bed.scriba.resume(id()).await);
            }
            Row::Draining => {
                bed.stopping.take().unwrap().await.unwrap().expect("it is stopped");
                bed.stays(State::Stopped).await;
                assert!(bed.reason().is_some_and(|reason| reason.contains("Structural")), "{:?}", bed.reason());
            }
            Row::Halted => {
                bed.stays(State::Halted).await;
                let halted = bed.scriba.info(id()).unwrap().halt_reason.unwrap();
                assert_eq!((Some(halted.to_string()), halted.position), (before, Some(Position::new(1))));
            }
            Row::Stopped => bed.stays(State::Stopped).await,
            Row::Standby => {
                // It meets the failure when it takes over.
                bed.holder.take().unwrap().shutdown().await.expect("it stops");
                bed.stays(State::Halted).await;
            }
        }
        bed.end().await;
    }
}
