//! A projection whose events say what their handler does, and the runs the tests look at.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use scriba_core::{
    EventMeta, Handler, HandlerError, HandlerResult, Outcome, Position, Projection, ProjectionId, ProjectionOptions,
    RawEvent, Retry, Scriba, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget};
use serde::{Deserialize, Serialize};

/// What the handler does with an event: its body.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Act {
    /// Wait so long, in microseconds.
    pub(crate) wait: u64,
    /// Fail so many first attempts.
    pub(crate) fail: u32,
    /// Fail in this way.
    pub(crate) how: Fail,
    /// Leave it out.
    pub(crate) skip: bool,
    /// Compute for so long, in microseconds, without ever waiting.
    pub(crate) compute: u64,
    /// The same after the wait.
    pub(crate) compute_after: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) enum Fail {
    #[default]
    Error,
    Panic,
    Permanent,
    Retryable,
    /// Never comes back.
    Hang,
}

/// A call of the handler, from start to end.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) stream: String,
    pub(crate) position: Position,
    pub(crate) started: Instant,
    pub(crate) ended: Instant,
    pub(crate) attempt: u32,
    pub(crate) replay: bool,
}

#[derive(Clone, Default, Projection)]
#[projection(name = "script")]
pub(crate) struct Script {
    pub(crate) calls: Arc<Mutex<Vec<Call>>>,
}

impl Handler for Script {
    type Event = RawEvent;
    type Op = u64;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<u64> {
        let started = Instant::now();
        let act: Act = serde_json::from_slice(&event.0.data)?;
        compute(act.compute);
        if act.wait > 0 {
            tokio::time::sleep(Duration::from_micros(act.wait)).await;
        }
        compute(act.compute_after);
        self.calls.lock().unwrap().push(Call {
            stream: meta.stream_id.to_string(),
            position: meta.position,
            started,
            ended: Instant::now(),
            attempt: meta.attempt,
            replay: meta.replay,
        });
        if meta.attempt <= act.fail {
            let error = HandlerError::new("scripted", "as told");
            return match act.how {
                Fail::Error => Err(error),
                Fail::Permanent => Err(HandlerError::permanent(error)),
                Fail::Retryable => Err(HandlerError::retryable(error)),
                Fail::Panic => panic!("as told"),
                Fail::Hang => std::future::pending().await,
            };
        }
        Ok(if act.skip { Outcome::skip() } else { meta.position.get().into() })
    }
}

fn compute(microseconds: u64) {
    let started = Instant::now();
    while started.elapsed() < Duration::from_micros(microseconds) {
        std::hint::spin_loop();
    }
}

pub(crate) fn id() -> ProjectionId {
    ProjectionId::of::<Script>()
}

/// Short waits, so that tests do not spend their time asleep.
pub(crate) fn options() -> ProjectionOptions {
    ProjectionOptions::default()
        .parallelism(8)
        .retry(Retry::new(3, [Duration::from_millis(1), Duration::from_millis(2)]))
        .lag_interval(Duration::ZERO)
        .shutdown_timeout(Duration::from_secs(5))
}

pub(crate) fn append(source: &MemorySource, stream: &str, act: &Act) -> Position {
    source.append_json(stream, "Act", act)
}

/// Starts a projection on clones of source and target.
pub(crate) async fn start(
    source: &MemorySource,
    target: &MemoryTarget<u64>,
    options: ProjectionOptions,
) -> (Scriba, Script) {
    let (scriba, script) = (Scriba::new(), Script::default());
    scriba.start(script.clone(), source.clone(), target.clone(), options).await.expect("it starts");
    (scriba, script)
}

/// Waits until everything up to a position is accounted for.
pub(crate) async fn until(scriba: &Scriba, position: Position) {
    let waited = scriba.wait_for(id(), WaitFor::Position(position), Duration::from_secs(20)).await;
    if let Err(error) = waited {
        panic!("{error}: {:#?}", scriba.info(id()));
    }
}

/// The positions of everything that was applied, in the order of commits.
pub(crate) fn applied(target: &MemoryTarget<u64>) -> Vec<u64> {
    target.applied(id()).iter().map(|(position, _)| position.get()).collect()
}

/// Waits until a condition holds.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < until, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
