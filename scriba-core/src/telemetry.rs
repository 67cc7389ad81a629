//! What the engine reports while it works: one struct per event, to `tracing` and to observers.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::dead_letter::Failure;
use crate::error::HaltReason;
use crate::event::{EventMeta, Position};
use crate::failure::FailureClass;
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
    /// How long the handler took.
    pub duration: Duration,
    /// Kind, message, and chain or backtrace.
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
    /// Events accounted for.
    pub events: u64,
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
    /// The projection halts.
    Halt,
    /// Another node has the projection now.
    Standby,
}

/// A batch was not committed, or it is not known whether it was.
#[derive(Clone, Copy, Debug)]
pub struct BatchFailed<'a> {
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

/// The projection stopped.
#[derive(Clone, Copy, Debug)]
pub struct Stopped;

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
pub struct Recovered {
    /// For how long it did not.
    pub since: Duration,
    /// Failures in a row that there were.
    pub failures: u32,
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

/// How far behind its source the projection is.
#[derive(Clone, Copy, Debug)]
pub struct Lag {
    /// The source's head; `None` where the source is empty or cannot tell.
    pub head: Option<Position>,
    /// The watermark.
    pub watermark: Option<Position>,
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
}

/// A source met positions that are not there and cannot pass them yet.
#[derive(Clone, Copy, Debug)]
pub struct GapDetected<'a> {
    /// The first missing position.
    pub position: Position,
    /// The highest position that is visible.
    pub highest_visible: Position,
    /// Who may still fill the gap, for people; empty where that is not known.
    pub blocker: &'a str,
}

/// A source passed positions that will never be there.
#[derive(Clone, Copy, Debug)]
pub struct GapPassed<'a> {
    /// The first missing position.
    pub from: Position,
    /// The last missing position.
    pub to: Position,
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
        /// that panics is told to `tracing` and changes nothing else.
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
    event_start(e: EventStart<'_>) => "event start", trace, { position = e.meta.position.get(), attempt = e.meta.attempt };
    /// An attempt at an event succeeded.
    event_stop(e: EventStop<'_>) => "event stop", trace, { position = e.meta.position.get(), attempt = e.meta.attempt, duration = ?e.duration };
    /// An attempt at an event failed.
    event_exception(e: EventException<'_>) => "event exception", warn, { position = e.meta.position.get(), stream_id = %e.meta.stream_id, event_type = %e.meta.event_type, attempt = e.meta.attempt, kind = %e.failure.kind, message = %e.failure.message };
    /// An event was skipped.
    event_skipped(e: EventSkipped<'_>) => "event skipped", trace, { position = e.position.get(), stream_id = e.stream_id, reason = e.reason.as_str() };
    /// A batch is durable.
    batch_stop(e: BatchStop) => "batch stop", debug, { events = e.events, operations = e.operations, statements = e.statements, duration = ?e.duration, watermark = e.watermark.get() };
    /// A batch was not committed.
    batch_failed(e: BatchFailed<'_>) => "batch failed", warn, { class = ?e.class, code = e.code, message = e.message, next = ?e.next };
    /// A dead letter is durable.
    dead_lettered(e: DeadLettered<'_>) => "dead letter", warn, { position = e.meta.position.get(), stream_id = %e.meta.stream_id, event_type = %e.meta.event_type, error_kind = %e.failure.kind };
    /// The first pipeline of this lifetime is up.
    started(_e: Started) => "started", info, { lifetime = "first" };
    /// The projection paused.
    paused(_e: Paused) => "paused", info, { state = "paused" };
    /// The projection resumed.
    resumed(_e: Resumed) => "resumed", info, { state = "running" };
    /// The projection stopped.
    stopped(_e: Stopped) => "stopped", info, { state = "stopped" };
    /// The projection halted.
    halted(e: Halted<'_>) => "halted", error, { reason = %e.reason, class = ?e.reason.class, code = e.reason.code };
    /// The projection does not get on.
    degraded(e: Degraded<'_>) => "degraded", warn, { since = ?e.since, failures = e.failures, last_error = e.last_error };
    /// The projection gets on again.
    recovered(e: Recovered) => "recovered", info, { since = ?e.since, failures = e.failures };
    /// A take-over has read the checkpoint.
    checkpoint_loaded(e: CheckpointLoaded) => "checkpoint loaded", info, { watermark = e.watermark.map(Position::get), epoch = e.epoch, stored = e.stored };
    /// The lag was measured.
    lag(e: Lag) => "lag", debug, { head = e.head.map(Position::get), watermark = e.watermark.map(Position::get) };
    /// Another node holds the projection.
    standby(e: Standby<'_>) => "standby", info, { holder = e.holder, attempt = e.attempt, retry_in = ?e.retry_in };
    /// The source delivers.
    subscribed(e: Subscribed) => "subscribed", info, { after = e.after.map(Position::get) };
    /// A source holds before positions that are not there.
    gap_detected(e: GapDetected<'_>) => "gap detected", warn, { position = e.position.get(), highest_visible = e.highest_visible.get(), blocker = e.blocker };
    /// A source passed positions that will never be there.
    gap_passed(e: GapPassed<'_>) => "gap passed", info, { from = e.from.get(), to = e.to.get(), age = ?e.age, evidence = e.evidence };
    /// This node lost the projection to another.
    ownership_lost(e: OwnershipLost<'_>) => "ownership lost", warn, { epoch = e.epoch, by = e.by };
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
