//! What the engine reports while it works: one struct per event, to `tracing` and to observers.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use tracing::field;

use crate::dead_letter::Failure;
use crate::error::HaltReason;
use crate::event::{EventMeta, Position};
use crate::failure::FailureClass;
use crate::lifecycle::State;
use crate::projection::ProjectionId;

/// An attempt at an event begins.
#[derive(Clone, Copy, Debug)]
pub struct EventStart<'a> {
    /// The event and the number of the attempt.
    pub meta: &'a EventMeta,
}

/// An attempt at an event succeeded.
#[derive(Clone, Copy, Debug)]
pub struct EventStop<'a> {
    /// The event and the number of the attempt.
    pub meta: &'a EventMeta,
    /// How long the handler took.
    pub duration: Duration,
}

/// An attempt at an event failed. Whether another follows is seen by the next [`EventStart`].
#[derive(Clone, Copy, Debug)]
pub struct EventException<'a> {
    /// The event and the number of the attempt.
    pub meta: &'a EventMeta,
    /// How long the handler took; `None` while nobody watches single events, because then no clock is read.
    pub duration: Option<Duration>,
    /// Kind, message, and the chain of sources, the place of a panic or the backtrace.
    pub failure: &'a Failure,
}

/// Why an event left nothing in the read model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// The handler said so.
    Handler,
    /// It was delivered before.
    Dedup,
    /// Its type is not one the projection lists.
    Filtered,
}

impl SkipReason {
    /// The name in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Handler => "handler",
            Self::Dedup => "dedup",
            Self::Filtered => "filtered",
        }
    }
}

/// An event was skipped.
#[derive(Clone, Copy, Debug)]
pub struct EventSkipped<'a> {
    /// The event's position.
    pub position: Position,
    /// The event's stream.
    pub stream_id: &'a str,
    /// Why.
    pub reason: SkipReason,
}

/// A batch is durable. Fires after the commit only.
#[derive(Clone, Copy, Debug)]
pub struct BatchStop {
    /// Events accounted for: those of the next three together.
    pub events: u64,
    /// Events whose operations are in the read model now.
    pub applied: u64,
    /// Events skipped by the handler or filtered by type.
    pub skipped: u64,
    /// Events in the dead-letter table now.
    pub dead_lettered: u64,
    /// Operations applied.
    pub operations: u64,
    /// Statements sent.
    pub statements: u64,
    /// From handing the batch to the target until its commit was known.
    pub duration: Duration,
    /// The watermark after it.
    pub watermark: Position,
}

/// What follows a failed batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchNext {
    /// The pipeline starts again from the checkpoint after this wait.
    Replay(Duration),
    /// The batch is committed again event by event, so that only the guilty ones are dead-lettered.
    Isolate,
    /// The projection halts.
    Halt,
    /// Another node has the projection now.
    Standby,
}

impl BatchNext {
    /// The name in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Replay(_) => "replay",
            Self::Isolate => "isolate",
            Self::Halt => "halt",
            Self::Standby => "standby",
        }
    }

    /// How long until it is tried again, where that takes a wait.
    pub const fn retry_in(self) -> Option<Duration> {
        match self {
            Self::Replay(wait) => Some(wait),
            Self::Isolate | Self::Halt | Self::Standby => None,
        }
    }
}

/// A batch was not committed, or it is not known whether it was.
#[derive(Clone, Copy, Debug)]
pub struct BatchFailed<'a> {
    /// Events in it.
    pub events: u64,
    /// The class of the failure, where the target failed.
    pub class: Option<FailureClass>,
    /// Its code.
    pub code: Option<&'a str>,
    /// Its message.
    pub message: &'a str,
    /// What follows.
    pub next: BatchNext,
}

/// A dead letter is durable. Fires after the commit, once per row.
#[derive(Clone, Copy, Debug)]
pub struct DeadLettered<'a> {
    /// The event.
    pub meta: &'a EventMeta,
    /// Why.
    pub failure: &'a Failure,
}

/// The projection's first pipeline of this lifetime is up.
#[derive(Clone, Copy, Debug)]
pub struct Started;

/// The projection paused.
#[derive(Clone, Copy, Debug)]
pub struct Paused;

/// The projection resumed.
#[derive(Clone, Copy, Debug)]
pub struct Resumed;

/// What a projection was stopped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// [`Scriba::stop`](crate::Scriba::stop).
    Stop,
    /// [`Scriba::shutdown`](crate::Scriba::shutdown), which ends [`Scriba::run_until`](crate::Scriba::run_until) too.
    Shutdown,
    /// The position up to which it was to run is reached.
    Until,
    /// The runtime that it was started on has shut down.
    RuntimeGone,
}

impl StopReason {
    /// The name in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Shutdown => "shutdown",
            Self::Until => "until",
            Self::RuntimeGone => "runtime_gone",
        }
    }
}

/// The projection stopped.
#[derive(Clone, Copy, Debug)]
pub struct Stopped<'a> {
    /// What stopped it.
    pub reason: StopReason,
    /// What was still going on when the shutdown timeout was over; `None` where everything ended in time.
    pub left_behind: Option<&'a str>,
    /// Why it had halted before, or could not finish what was in flight.
    pub halt_reason: Option<&'a HaltReason>,
}

/// The projection halted.
#[derive(Clone, Copy, Debug)]
pub struct Halted<'a> {
    /// Why.
    pub reason: &'a HaltReason,
}

/// The projection does not get on and says why. Fires at the first failure in a row and again at each
/// doubling of their number.
#[derive(Clone, Copy, Debug)]
pub struct Degraded<'a> {
    /// For how long.
    pub since: Duration,
    /// Failures in a row.
    pub failures: u32,
    /// The last one.
    pub last_error: &'a str,
}

/// The projection gets on again.
#[derive(Clone, Copy, Debug)]
pub struct Recovered<'a> {
    /// For how long it did not.
    pub since: Duration,
    /// Failures in a row that there were.
    pub failures: u32,
    /// The last one.
    pub last_error: &'a str,
}

/// A take-over has read the checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointLoaded {
    /// The watermark; `None` is the beginning.
    pub watermark: Option<Position>,
    /// The new epoch.
    pub epoch: i64,
    /// True where it was stored before, false where this take-over created it.
    pub stored: bool,
}

/// How far behind its source the projection is. What is not known is `None`, never zero.
#[derive(Clone, Copy, Debug)]
pub struct Lag {
    /// How long ago the event at the watermark was recorded; zero when caught up. `None` before the first commit of this
    /// lifetime, where the source keeps no times, and while the head is not known.
    pub lag_time: Option<Duration>,
    /// How many positions the watermark is behind the head: as many events or fewer, since positions may be missing and
    /// types filtered. `None` while head or watermark is not known.
    pub lag_events: Option<u64>,
    /// The source's head; `None` where the source is empty, does not answer or cannot know it.
    pub head: Option<Position>,
    /// The watermark; `None` is the beginning, or not known, as on a standby.
    pub watermark: Option<Position>,
    /// Where the projection stands in its life.
    pub state: State,
    /// Since when it does not get on, failed handlers that are called again included; `None` while it does.
    pub degraded_since: Option<DateTime<Utc>>,
}

/// Another node holds the projection; this one waits.
#[derive(Clone, Copy, Debug)]
pub struct Standby<'a> {
    /// Who holds it.
    pub holder: &'a str,
    /// How often this node has asked.
    pub attempt: u32,
    /// When it asks again.
    pub retry_in: Duration,
}

/// The source delivers.
#[derive(Clone, Copy, Debug)]
pub struct Subscribed {
    /// Everything above it is to come; `None` is the beginning.
    pub after: Option<Position>,
    /// Times this node has tried to take over and subscribe until it came to this, this one included.
    pub attempts: u32,
    /// How long that took, from the first time on.
    pub waited: Duration,
}

/// A source met positions that are not there and cannot pass them yet.
#[derive(Clone, Copy, Debug)]
pub struct GapDetected<'a> {
    /// The first missing position.
    pub position: Position,
    /// The highest position that is visible.
    pub highest_visible: Position,
    /// For how long it has been held.
    pub age: Duration,
    /// What shows that something may still come.
    pub evidence: &'a str,
    /// The sessions that may still fill the gap, for people; empty where they have just ended.
    pub blocker: &'a str,
}

/// A source passed positions that will never be there.
#[derive(Clone, Copy, Debug)]
pub struct GapPassed<'a> {
    /// The first missing position.
    pub from: Position,
    /// The last missing position.
    pub to: Position,
    /// The highest position that is visible.
    pub highest_visible: Position,
    /// For how long it was held.
    pub age: Duration,
    /// What proved that nothing can come any more.
    pub evidence: &'a str,
}

/// This node lost the projection to another.
#[derive(Clone, Copy, Debug)]
pub struct OwnershipLost<'a> {
    /// Our epoch, now void.
    pub epoch: i64,
    /// By whom or by what, for people.
    pub by: &'a str,
}

macro_rules! hooks {
    ($($(#[$doc:meta])* $hook:ident($e:ident: $event:ty) => $message:literal, $level:ident, { $($fields:tt)* };)*) => {
        /// Gets told what a projection does. Every hook does nothing unless overridden.
        ///
        /// Hooks run on the engine's tasks: one that blocks holds up handlers, commits and leases of all projections. A hook
        /// that panics is told to `tracing` and changes nothing else, and it is called again at the next event.
        #[allow(unused_variables)]
        pub trait Observer: Send + Sync + 'static {
            /// Whether it wants [`Observer::event_start`] and [`Observer::event_stop`], which cost two looks at a clock for
            /// each event. Asked at the start of a projection.
            fn watches_events(&self) -> bool {
                true
            }

            $($(#[$doc])* fn $hook(&self, id: &ProjectionId, event: &$event) {})*
        }

        impl Telemetry {
            $(
                #[doc = concat!("Reports to `tracing` and to the observers: ", stringify!($hook), ".")]
                pub fn $hook(&self, event: &$event) {
                    let $e = event;
                    tracing::$level!(target: "scriba", projection = %self.inner.id, $($fields)*, $message);
                    for observer in &self.inner.observers {
                        let told = catch_unwind(AssertUnwindSafe(|| observer.$hook(&self.inner.id, event)));
                        if told.is_err() {
                            tracing::error!(target: "scriba", projection = %self.inner.id, concat!("an observer panicked in ", stringify!($hook)));
                        }
                    }
                }
            )*
        }

        /// The names of all hooks, in the order of the catalogue.
        pub const CATALOGUE: &[&str] = &[$(stringify!($hook)),*];
    };
}

hooks! {
    /// An attempt at an event begins.
    event_start(e: EventStart<'_>) => "event start", trace, { position = e.meta.position.get(), stream_id = %e.meta.stream_id, event_type = %e.meta.event_type, attempt = e.meta.attempt };
    /// An attempt at an event succeeded.
    event_stop(e: EventStop<'_>) => "event stop", trace, { position = e.meta.position.get(), stream_id = %e.meta.stream_id, event_type = %e.meta.event_type, attempt = e.meta.attempt, duration = ?e.duration };
    /// An attempt at an event failed.
    event_exception(e: EventException<'_>) => "event exception", warn, { position = e.meta.position.get(), stream_id = %e.meta.stream_id, event_type = %e.meta.event_type, attempt = e.meta.attempt, duration = e.duration.map(field::debug), kind = %e.failure.kind, error_message = %e.failure.message, backtrace = given(&e.failure.detail) };
    /// An event was skipped.
    event_skipped(e: EventSkipped<'_>) => "event skipped", trace, { position = e.position.get(), stream_id = e.stream_id, reason = e.reason.as_str() };
    /// A batch is durable.
    batch_stop(e: BatchStop) => "batch stop", debug, { events = e.events, applied = e.applied, skipped = e.skipped, dead_lettered = e.dead_lettered, operations = e.operations, statements = e.statements, duration = ?e.duration, watermark = e.watermark.get() };
    /// A batch was not committed.
    batch_failed(e: BatchFailed<'_>) => "batch failed", warn, { events = e.events, class = e.class.map(field::display), code = e.code, error_message = e.message, next = e.next.as_str(), retry_in = e.next.retry_in().map(field::debug) };
    /// A dead letter is durable.
    dead_lettered(e: DeadLettered<'_>) => "dead letter", warn, { position = e.meta.position.get(), stream_id = %e.meta.stream_id, event_type = %e.meta.event_type, error_kind = %e.failure.kind };
    /// The first pipeline of this lifetime is up.
    started(_e: Started) => "started", info, { lifetime = "first" };
    /// The projection paused.
    paused(_e: Paused) => "paused", info, { state = "paused" };
    /// The projection resumed.
    resumed(_e: Resumed) => "resumed", info, { state = "running" };
    /// The projection stopped.
    stopped(e: Stopped<'_>) => "stopped", info, { reason = e.reason.as_str(), left_behind = e.left_behind, halt_reason = e.halt_reason.map(field::display), class = e.halt_reason.and_then(|halt| halt.class).map(field::display), code = e.halt_reason.and_then(|halt| halt.code.as_deref()) };
    /// The projection halted.
    halted(e: Halted<'_>) => "halted", error, { reason = %e.reason, class = e.reason.class.map(field::display), code = e.reason.code.as_deref() };
    /// The projection does not get on.
    degraded(e: Degraded<'_>) => "degraded", warn, { since = ?e.since, failures = e.failures, last_error = e.last_error };
    /// The projection gets on again.
    recovered(e: Recovered<'_>) => "recovered", info, { since = ?e.since, failures = e.failures, last_error = e.last_error };
    /// A take-over has read the checkpoint.
    checkpoint_loaded(e: CheckpointLoaded) => "checkpoint loaded", info, { watermark = e.watermark.map(Position::get), epoch = e.epoch, stored = e.stored };
    /// The lag was measured.
    lag(e: Lag) => "lag", debug, { lag_time = e.lag_time.map(field::debug), lag_events = e.lag_events, head = e.head.map(Position::get), watermark = e.watermark.map(Position::get), state = e.state.as_str(), degraded_since = e.degraded_since.map(field::display) };
    /// Another node holds the projection.
    standby(e: Standby<'_>) => "standby", info, { holder = e.holder, attempt = e.attempt, retry_in = ?e.retry_in };
    /// The source delivers.
    subscribed(e: Subscribed) => "subscribed", info, { after = e.after.map(Position::get), attempts = e.attempts, waited = ?e.waited };
    /// A source holds before positions that are not there.
    gap_detected(e: GapDetected<'_>) => "gap detected", warn, { position = e.position.get(), highest_visible = e.highest_visible.get(), age = ?e.age, evidence = e.evidence, blocker = e.blocker };
    /// A source passed positions that will never be there.
    gap_passed(e: GapPassed<'_>) => "gap passed", info, { from = e.from.get(), to = e.to.get(), highest_visible = e.highest_visible.get(), age = ?e.age, evidence = e.evidence };
    /// This node lost the projection to another.
    ownership_lost(e: OwnershipLost<'_>) => "ownership lost", warn, { epoch = e.epoch, by = e.by };
}

/// A text, where there is one.
fn given(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// The way to `tracing` and to the observers, for one projection. Cheap to clone.
#[derive(Clone)]
pub struct Telemetry {
    inner: Arc<Inner>,
}

struct Inner {
    id: ProjectionId,
    observers: Vec<Arc<dyn Observer>>,
    watches_events: bool,
}

impl Telemetry {
    /// For a projection, reporting to all of the observers in order.
    pub fn new(id: ProjectionId, observers: Vec<Arc<dyn Observer>>) -> Self {
        let watches_events = observers.iter().any(|observer| observer.watches_events());
        Self { inner: Arc::new(Inner { id, observers, watches_events }) }
    }

    /// The projection reported about.
    pub fn id(&self) -> &ProjectionId {
        &self.inner.id
    }

    /// Whether someone looks at single events: the engine leaves out clocks and calls where nobody does.
    pub(crate) fn watches_events(&self) -> bool {
        self.inner.watches_events || tracing::enabled!(target: "scriba", tracing::Level::TRACE)
    }
}

impl fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Telemetry").field("id", &self.inner.id).field("observers", &self.inner.observers.len()).finish()
    }
}
