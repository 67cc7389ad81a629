//! Commands and source errors that arrive while a commit is in flight.

use std::time::Duration;

use fastrand::Rng;
use scriba_core::checkpoint::Replay;
use scriba_core::{CommandError, Scriba, State};
use scriba_testing::{MemorySource, MemoryTarget, Recorded, Recorder, SourceFault, TargetFault, TargetStep};

use super::common::{Act, Script, append, applied, eventually, id, options};

const ROUNDS: usize = 10_000;
const AT_ONCE: usize = 10;

/// What meets the commit in flight.
#[derive(Clone, Copy, Debug)]
enum Meets {
    Pause,
    Resume,
    Stop,
    SourceEnds,
    SourceCut,
}

struct Bed {
    source: MemorySource,
    target: MemoryTarget<u64>,
    recorder: Recorder,
    scriba: Scriba,
    rng: Rng,
    appended: u64,
}

impl Bed {
    async fn start(&self) {
        let options = options().parallelism(4);
        self.scriba
            .start(Script::default(), self.source.clone(), self.target.clone(), options)
            .await
            .expect("it starts");
        self.reaches(State::Running).await;
    }

    async fn reaches(&self, state: State) {
        eventually(state.as_str(), || self.scriba.info(id()).is_ok_and(|info| info.state == state)).await;
    }

    fn append(&mut self) {
        let stream = format!("s{}", self.rng.u8(0..4));
        append(&self.source, &stream, &Act { skip: self.rng.u8(0..8) == 0, ..Act::default() });
        self.appended += 1;
    }

    /// A commit is in flight, and several things happen before it ends.
    async fn round(&mut self) {
        self.target.fail(TargetStep::Begin, 1, TargetFault::Hang);
        for _ in 0..self.rng.usize(1..4) {
            self.append();
        }
        // A run of nothing but skips waits.
        append(&self.source, "sure", &Act::default());
        self.appended += 1;
        let target = &self.target;
        eventually("a commit is in flight", || target.hanging() == 1).await;
        let mut state = State::Running;
        for _ in 0..self.rng.usize(1..4) {
            let meets =
                [Meets::Pause, Meets::Resume, Meets::Stop, Meets::SourceEnds, Meets::SourceCut][self.rng.usize(0..5)];
            match meets {
                Meets::Pause => {
                    answer(self.scriba.pause(id()).await, &mut state, State::Running, State::Paused);
                }
                Meets::Resume => {
                    answer(self.scriba.resume(id()).await, &mut state, State::Paused, State::Running);
                }
                Meets::Stop => {
                    let stop = self.scriba.stop(id());
                    let release = async {
                        if self.rng.bool() {
                            tokio::task::yield_now().await;
                        }
                        self.target.release_hung();
                    };
                    tokio::join!(stop, release).0.expect("it stops in time");
                    return self.start().await;
                }
                Meets::SourceEnds => self.source.inject(SourceFault::End),
                Meets::SourceCut => self.source.cut(),
            }
        }
        self.target.release_hung();
        if state == State::Paused {
            self.reaches(State::Paused).await;
            self.scriba.resume(id()).await.expect("paused can be resumed");
        }
        // Whatever met the commit, everything is committed in the end.
        let last = self.appended - 1;
        let reached = || self.target.checkpoint(id()).and_then(|it| it.watermark).is_some_and(|it| it.get() >= last);
        eventually("all is committed", reached).await;
        self.reaches(State::Running).await;
    }
}

/// A command is obeyed in one state and refused in the other.
fn answer(answer: Result<(), CommandError>, state: &mut State, from: State, to: State) {
    match answer {
        Ok(()) if *state == from => *state = to,
        Err(CommandError::InvalidState { .. }) if *state != from => {}
        other => panic!("{state}: {other:?}"),
    }
}

async fn rounds(seed: u64) {
    let recorder = Recorder::new();
    let scriba = Scriba::with_observers([std::sync::Arc::new(recorder.clone()) as _]);
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let mut bed = Bed { source, target, recorder, scriba, rng: Rng::with_seed(seed), appended: 0 };
    bed.start().await;
    bed.append();
    eventually("caught up", || {
        bed.target.checkpoint(id()).is_some_and(|it| it.watermark.is_some() && it.replay != Replay::Ongoing)
    })
    .await;
    for _ in 0..ROUNDS / AT_ONCE {
        bed.round().await;
    }
    bed.scriba.stop(id()).await.expect("it stops");
    assert_eq!(bed.target.violations(), Vec::<String>::new(), "seed {seed}");
    let positions = applied(&bed.target);
    assert!(positions.windows(2).all(|pair| pair[0] < pair[1]), "seed {seed}: applied once and in order");
    let counts = bed.target.checkpoint(id()).unwrap().counts;
    assert_eq!(counts.total(), bed.appended, "seed {seed}: nothing is lost");
    assert_eq!(counts.applied, positions.len() as u64, "seed {seed}: nothing is doubled");
    let batches: Vec<u64> = bed.recorder.events_of(id()).iter().filter_map(batch).collect();
    assert!(batches.iter().all(|events| *events > 0), "seed {seed}: no commit is empty");
    assert_eq!(batches.iter().sum::<u64>(), bed.appended, "seed {seed}: each event is in one commit");
}

fn batch(event: &Recorded) -> Option<u64> {
    match event {
        Recorded::BatchStop { events, .. } => Some(*events),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_and_source_errors_that_meet_a_commit_in_flight_double_nothing_and_commit_nothing_empty() {
    let begun = std::time::Instant::now();
    let all = (0..AT_ONCE as u64).map(|seed| tokio::spawn(rounds(seed)));
    for done in futures_util::future::join_all(all).await {
        done.expect("a run");
    }
    assert!(begun.elapsed() < Duration::from_mins(2), "{:?}", begun.elapsed());
}
