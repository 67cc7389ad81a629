//! One event through its handler, with retries: what becomes of it, before anything is written.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::poll;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{Instrument as _, debug_span};

use super::live::Live;
use super::messages::{Handled, Wish};
use super::panic::{Guarded, Panic};
use crate::dead_letter::{Failure, kind};
use crate::error::{HaltReason, HandlerError, RetryAdvice};
use crate::event::{EventMeta, Events, Position};
use crate::options::{OnPoison, ProjectionOptions};
use crate::projection::{Handler, Outcome};
use crate::retry::Backoff;
use crate::telemetry::{EventException, EventStart, EventStop, Telemetry};

/// Waits between the retries of errors that go away by themselves.
const RETRYABLE_FIRST_WAIT: Duration = Duration::from_millis(100);
const RETRYABLE_LONGEST_WAIT: Duration = Duration::from_secs(30);

/// What every call of a handler shares.
pub(crate) struct Worker<H> {
    pub(crate) handler: Arc<H>,
    pub(crate) options: Arc<ProjectionOptions>,
    pub(crate) telemetry: Telemetry,
    /// What the user wants of the projection: a stop ends waits between attempts.
    pub(crate) wish: watch::Receiver<Wish>,
    /// Gets told of failures that are tried again.
    pub(crate) live: Arc<Live>,
}

enum Attempt<Op> {
    Done(Outcome<Op>),
    Unlisted,
    Failed(HandlerError),
}

impl<H: Handler> Worker<H> {
    /// Handles an event to its end. `spawned` when this runs in a task of its own from the beginning.
    pub(crate) async fn handle(self: Arc<Self>, mut meta: EventMeta, spawned: bool) -> Handled<H::Op> {
        let mut configured_attempts = 0;
        let mut backoff = Backoff::new(RETRYABLE_FIRST_WAIT, RETRYABLE_LONGEST_WAIT);
        let mut first_failure = None;
        loop {
            let in_own_task = spawned || meta.attempt > 1;
            let error = match self.observed_attempt(&meta, in_own_task).await {
                Attempt::Done(outcome) if outcome.is_skip() => return Handled::Skip(meta),
                Attempt::Done(outcome) => return Handled::Apply(meta, outcome),
                Attempt::Unlisted => return Handled::Filtered(meta),
                Attempt::Failed(error) => error,
            };
            let failure = failure_of(&error, meta.attempt);
            let wait = match error.retry() {
                RetryAdvice::Never => None,
                RetryAdvice::AsConfigured => {
                    configured_attempts += 1;
                    self.options.retry.wait_after(configured_attempts)
                }
                RetryAdvice::UntilGivenUp => {
                    let since: &mut Instant = first_failure.get_or_insert_with(Instant::now);
                    if since.elapsed() >= self.options.retryable_for {
                        return Handled::Halt(given_up(&meta, &failure, self.options.retryable_for));
                    }
                    Some(backoff.next_wait())
                }
            };
            let Some(wait) = wait else {
                return match self.options.dead_letters.on_poison(meta.replay) {
                    OnPoison::DeadLetter => Handled::DeadLetter(meta, failure),
                    OnPoison::Halt => Handled::Halt(poisoned(&meta, &failure)),
                };
            };
            self.live.handler_failed(&meta, &failure);
            if self.stopped_during(wait).await {
                return Handled::Abandoned;
            }
            meta.attempt += 1;
        }
    }

    async fn observed_attempt(&self, meta: &EventMeta, in_own_task: bool) -> Attempt<H::Op> {
        if !self.telemetry.watches_events() {
            let attempt = self.attempt(meta, in_own_task).await;
            if let Some(failure) = failure_in(&attempt, meta) {
                self.telemetry.event_exception(&EventException { meta, duration: None, failure: &failure });
            }
            return attempt;
        }
        self.telemetry.event_start(&EventStart { meta });
        let started = Instant::now();
        let attempt = self.attempt(meta, in_own_task).await;
        let duration = started.elapsed();
        match failure_in(&attempt, meta) {
            None => self.telemetry.event_stop(&EventStop { meta, duration }),
            Some(failure) => {
                let duration = Some(duration);
                self.telemetry.event_exception(&EventException { meta, duration, failure: &failure });
            }
        }
        attempt
    }

    async fn attempt(&self, meta: &EventMeta, in_own_task: bool) -> Attempt<H::Op> {
        // On the pipeline's own task the pipeline itself is what shows a handler that does not come back.
        let mut noted = in_own_task.then(|| self.live.attempt(meta.position));
        let mut since = in_own_task.then(Instant::now);
        let (position, stream_id, attempt) = (meta.position.get(), meta.stream_id.as_str(), meta.attempt);
        let span = debug_span!(target: "scriba", "event", position, stream_id, attempt);
        let call = async {
            match H::Event::decode(meta.event()) {
                // Sources that cannot filter deliver other types too; looking only here keeps it off every event's path.
                Err(_) if unlisted::<H>(meta) => Attempt::Unlisted,
                Err(error) => Attempt::Failed(HandlerError::permanent(HandlerError::new(kind::DECODE, error))),
                Ok(event) => match self.handler.handle(event, meta).await {
                    Ok(outcome) => Attempt::Done(outcome),
                    Err(error) => Attempt::Failed(error),
                },
            }
        };
        let mut call = pin!(call.instrument(span));
        // A handler that is ready at once never pays for a timer.
        let done = match poll!(Guarded(call.as_mut())) {
            std::task::Poll::Ready(done) => done,
            std::task::Poll::Pending => {
                noted.get_or_insert_with(|| self.live.attempt(meta.position));
                since.get_or_insert_with(Instant::now);
                match within(self.options.handler_timeout, Guarded(call)).await {
                    Some(done) => done,
                    None => return Attempt::Failed(timed_out(self.options.handler_timeout)),
                }
            }
        };
        match done {
            Ok(_) if self.is_late(since, meta.position) => Attempt::Failed(timed_out(self.options.handler_timeout)),
            Ok(attempt) => attempt,
            Err(panic) => Attempt::Failed(panicked(panic).await),
        }
    }

    /// Whether an attempt took longer than it may. One that blocks its thread comes back whenever it likes.
    fn is_late(&self, since: Option<Instant>, position: Position) -> bool {
        #[cfg(feature = "test-switches")]
        if self.options.switches == crate::switches::Switches::LateResults {
            return false;
        }
        // Without a clock it is the coordinator that has noticed.
        since.map_or_else(|| self.live.is_overdue(position), |since| since.elapsed() > self.options.handler_timeout)
    }

    /// Waits; true when the projection is stopped meanwhile.
    async fn stopped_during(&self, wait: Duration) -> bool {
        let mut wish = self.wish.clone();
        tokio::select! {
            // A lost sender means that the pipeline is gone, and with it whoever would take the result.
            _ = wish.wait_for(|wish| *wish == Wish::Stop) => true,
            () = tokio::time::sleep(wait) => false,
        }
    }
}

fn unlisted<H: Handler>(meta: &EventMeta) -> bool {
    H::Event::event_types().is_some_and(|types| !types.contains(&meta.event_type.as_str()))
}

async fn within<F: Future>(timeout: Duration, future: F) -> Option<F::Output> {
    tokio::time::timeout(timeout, future).await.ok()
}

fn failure_in<Op>(attempt: &Attempt<Op>, meta: &EventMeta) -> Option<Failure> {
    match attempt {
        Attempt::Failed(error) => Some(failure_of(error, meta.attempt)),
        Attempt::Done(_) | Attempt::Unlisted => None,
    }
}

fn failure_of(error: &HandlerError, attempts: u32) -> Failure {
    Failure {
        kind: error.kind().to_owned(),
        message: error.message().to_owned(),
        detail: error.detail().to_owned(),
        attempts,
    }
}

async fn panicked(panic: Panic) -> HandlerError {
    let place = match panic.place {
        Some(place) => place.resolve().await,
        None => "at an unknown place".to_owned(),
    };
    HandlerError::new(kind::PANIC, &panic.message).with_detail(place)
}

fn timed_out(timeout: Duration) -> HandlerError {
    HandlerError::new(kind::TIMEOUT, format_args!("the handler took longer than handler_timeout ({timeout:?})"))
}

fn given_up(meta: &EventMeta, failure: &Failure, after: Duration) -> HaltReason {
    HaltReason::new(format!(
        "a retryable error of the event at stream {:?} went on for longer than retryable_for ({after:?}): {}: {}; mend its cause, then \
         stop and start the projection",
        meta.stream_id.as_str(),
        failure.kind,
        failure.message
    ))
    .at(meta.position)
}

fn poisoned(meta: &EventMeta, failure: &Failure) -> HaltReason {
    HaltReason::new(format!(
        "the handler failed at stream {:?} and on_poison is Halt: {}: {}; mend the handler or the event, then start the projection again",
        meta.stream_id.as_str(),
        failure.kind,
        failure.message
    ))
    .at(meta.position)
}
