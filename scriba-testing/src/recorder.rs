//! Keeps what the engine reports.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use scriba_core::dead_letter::Failure;
use scriba_core::telemetry::{self, BatchNext, Observer, SkipReason, StopReason};
use scriba_core::{EventMeta, FailureClass, HaltReason, Position, ProjectionId, State, StreamId};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// An [`Observer`] that keeps all events in the order in which they were reported, for ever. Clones share them, so a
/// test keeps one to look at and gives the other away.
///
/// Not simulated: the tracing events of the same names go to the subscriber as always; the recorder holds nothing up, so
/// what an observer that blocks would do to the engine is not seen.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use scriba_core::ProjectionId;
/// use scriba_core::telemetry::{Started, Telemetry};
/// use scriba_testing::{Recorded, Recorder};
///
/// let recorder = Recorder::new();
/// let telemetry = Telemetry::new(ProjectionId::from("orders"), vec![Arc::new(recorder.clone())]);
/// telemetry.started(&Started);
///
/// let started = |record: &scriba_testing::Record| matches!(record.event, Recorded::Started);
/// let record = recorder.wait_for(started, Duration::from_secs(5)).await.unwrap();
/// assert_eq!(record.id, ProjectionId::from("orders"));
/// # });
/// ```
#[derive(Clone, Default)]
pub struct Recorder {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    records: Mutex<Vec<Record>>,
    added: Notify,
}

/// One event of one projection.
#[derive(Clone, Debug)]
pub struct Record {
    /// The projection.
    pub id: ProjectionId,
    /// What was reported of it.
    pub event: Recorded,
}

/// An owned copy of an event of [`scriba_core::telemetry`]; the fields are those of the struct of the same name there.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the fields are documented where they are copied from")]
pub enum Recorded {
    /// An attempt at an event begins.
    EventStart { meta: EventMeta },
    /// An attempt at an event succeeded.
    EventStop { meta: EventMeta, duration: Duration },
    /// An attempt at an event failed.
    EventException { meta: EventMeta, duration: Option<Duration>, failure: Failure },
    /// An event was skipped.
    EventSkipped { position: Position, stream_id: StreamId, reason: SkipReason },
    /// A batch is durable.
    BatchStop {
        events: u64,
        applied: u64,
        skipped: u64,
        dead_lettered: u64,
        operations: u64,
        statements: u64,
        duration: Duration,
        watermark: Position,
    },
    /// A batch was not committed.
    BatchFailed { events: u64, class: Option<FailureClass>, code: Option<String>, message: String, next: BatchNext },
    /// A dead letter is durable.
    DeadLettered { meta: EventMeta, failure: Failure },
    /// The first pipeline of this lifetime is up.
    Started,
    /// The projection paused.
    Paused,
    /// The projection resumed.
    Resumed,
    /// The projection stopped.
    Stopped { reason: StopReason, left_behind: Option<String>, halt_reason: Option<HaltReason> },
    /// The projection halted.
    Halted { reason: HaltReason },
    /// The projection does not get on.
    Degraded { since: Duration, failures: u32, last_error: String },
    /// The projection gets on again.
    Recovered { since: Duration, failures: u32, last_error: String },
    /// A take-over has read the checkpoint.
    CheckpointLoaded { watermark: Option<Position>, epoch: i64, stored: bool },
    /// The lag was measured.
    Lag {
        lag_time: Option<Duration>,
        lag_events: Option<u64>,
        head: Option<Position>,
        watermark: Option<Position>,
        state: State,
        degraded_since: Option<DateTime<Utc>>,
    },
    /// Another node holds the projection.
    Standby { holder: String, attempt: u32, retry_in: Duration },
    /// The source delivers.
    Subscribed { after: Option<Position>, attempts: u32, waited: Duration },
    /// A source holds before positions that are not there.
    GapDetected { position: Position, highest_visible: Position, age: Duration, evidence: String, blocker: String },
    /// A source passed positions that will never be there.
    GapPassed { from: Position, to: Position, highest_visible: Position, age: Duration, evidence: String },
    /// This node lost the projection to another.
    OwnershipLost { epoch: i64, by: String },
}

/// What was waited for did not come in time.
#[derive(Debug)]
pub struct NotSeen {
    timeout: Duration,
    records: Vec<Record>,
}

impl std::error::Error for NotSeen {}

impl fmt::Display for NotSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 10;
        let Self { timeout, records } = self;
        write!(f, "not seen within {timeout:?}; {} events were recorded, at last:", records.len())?;
        for record in &records[records.len().saturating_sub(SHOWN)..] {
            write!(f, "\n  {}: {:?}", record.id, record.event)?;
        }
        Ok(())
    }
}

impl Recorder {
    /// With nothing recorded.
    pub fn new() -> Self {
        Self::default()
    }

    /// Everything so far.
    pub fn records(&self) -> Vec<Record> {
        self.lock().clone()
    }

    /// The events of one projection so far.
    pub fn events_of(&self, id: impl Into<ProjectionId>) -> Vec<Recorded> {
        let id = id.into();
        self.lock().iter().filter(|record| record.id == id).map(|record| record.event.clone()).collect()
    }

    /// Waits for an event, recorded already or still to come, and returns the first that fits.
    ///
    /// # Errors
    /// When there is none within the timeout; it shows the last events that there were.
    pub async fn wait_for(&self, mut fits: impl FnMut(&Record) -> bool, timeout: Duration) -> Result<Record, NotSeen> {
        let deadline = Instant::now() + timeout;
        let mut seen = 0;
        loop {
            // Made before looking, so that no event between the look and the wait is missed.
            let added = self.shared.added.notified();
            {
                let records = self.lock();
                if let Some(record) = records[seen..].iter().find(|record| fits(record)) {
                    return Ok(record.clone());
                }
                seen = records.len();
            }
            if timeout_at(deadline, added).await.is_err() {
                return Err(NotSeen { timeout, records: self.records() });
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Record>> {
        self.shared.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, id: &ProjectionId, event: Recorded) {
        self.lock().push(Record { id: id.clone(), event });
        self.shared.added.notify_waiters();
    }
}

impl Observer for Recorder {
    fn event_start(&self, id: &ProjectionId, event: &telemetry::EventStart<'_>) {
        self.add(id, Recorded::EventStart { meta: event.meta.clone() });
    }

    fn event_stop(&self, id: &ProjectionId, event: &telemetry::EventStop<'_>) {
        self.add(id, Recorded::EventStop { meta: event.meta.clone(), duration: event.duration });
    }

    fn event_exception(&self, id: &ProjectionId, event: &telemetry::EventException<'_>) {
        let &telemetry::EventException { meta, duration, failure } = event;
        self.add(id, Recorded::EventException { meta: meta.clone(), duration, failure: failure.clone() });
    }

    fn event_skipped(&self, id: &ProjectionId, event: &telemetry::EventSkipped<'_>) {
        let &telemetry::EventSkipped { position, stream_id, reason } = event;
        self.add(id, Recorded::EventSkipped { position, stream_id: stream_id.into(), reason });
    }

    fn batch_stop(&self, id: &ProjectionId, event: &telemetry::BatchStop) {
        let &telemetry::BatchStop {
            events,
            applied,
            skipped,
            dead_lettered,
            operations,
            statements,
            duration,
            watermark,
        } = event;
        let recorded = Recorded::BatchStop {
            events,
            applied,
            skipped,
            dead_lettered,
            operations,
            statements,
            duration,
            watermark,
        };
        self.add(id, recorded);
    }

    fn batch_failed(&self, id: &ProjectionId, event: &telemetry::BatchFailed<'_>) {
        let &telemetry::BatchFailed { events, class, code, message, next } = event;
        let (code, message) = (code.map(str::to_owned), message.to_owned());
        self.add(id, Recorded::BatchFailed { events, class, code, message, next });
    }

    fn dead_lettered(&self, id: &ProjectionId, event: &telemetry::DeadLettered<'_>) {
        self.add(id, Recorded::DeadLettered { meta: event.meta.clone(), failure: event.failure.clone() });
    }

    fn started(&self, id: &ProjectionId, _: &telemetry::Started) {
        self.add(id, Recorded::Started);
    }

    fn paused(&self, id: &ProjectionId, _: &telemetry::Paused) {
        self.add(id, Recorded::Paused);
    }

    fn resumed(&self, id: &ProjectionId, _: &telemetry::Resumed) {
        self.add(id, Recorded::Resumed);
    }

    fn stopped(&self, id: &ProjectionId, event: &telemetry::Stopped<'_>) {
        let &telemetry::Stopped { reason, left_behind, halt_reason } = event;
        let (left_behind, halt_reason) = (left_behind.map(str::to_owned), halt_reason.cloned());
        self.add(id, Recorded::Stopped { reason, left_behind, halt_reason });
    }

    fn halted(&self, id: &ProjectionId, event: &telemetry::Halted<'_>) {
        self.add(id, Recorded::Halted { reason: event.reason.clone() });
    }

    fn degraded(&self, id: &ProjectionId, event: &telemetry::Degraded<'_>) {
        let &telemetry::Degraded { since, failures, last_error } = event;
        self.add(id, Recorded::Degraded { since, failures, last_error: last_error.to_owned() });
    }

    fn recovered(&self, id: &ProjectionId, event: &telemetry::Recovered<'_>) {
        let &telemetry::Recovered { since, failures, last_error } = event;
        self.add(id, Recorded::Recovered { since, failures, last_error: last_error.to_owned() });
    }

    fn checkpoint_loaded(&self, id: &ProjectionId, event: &telemetry::CheckpointLoaded) {
        let &telemetry::CheckpointLoaded { watermark, epoch, stored } = event;
        self.add(id, Recorded::CheckpointLoaded { watermark, epoch, stored });
    }

    fn lag(&self, id: &ProjectionId, event: &telemetry::Lag) {
        let &telemetry::Lag { lag_time, lag_events, head, watermark, state, degraded_since } = event;
        self.add(id, Recorded::Lag { lag_time, lag_events, head, watermark, state, degraded_since });
    }

    fn standby(&self, id: &ProjectionId, event: &telemetry::Standby<'_>) {
        let &telemetry::Standby { holder, attempt, retry_in } = event;
        self.add(id, Recorded::Standby { holder: holder.to_owned(), attempt, retry_in });
    }

    fn subscribed(&self, id: &ProjectionId, event: &telemetry::Subscribed) {
        let &telemetry::Subscribed { after, attempts, waited } = event;
        self.add(id, Recorded::Subscribed { after, attempts, waited });
    }

    fn gap_detected(&self, id: &ProjectionId, event: &telemetry::GapDetected<'_>) {
        let &telemetry::GapDetected { position, highest_visible, age, evidence, blocker } = event;
        let (evidence, blocker) = (evidence.to_owned(), blocker.to_owned());
        self.add(id, Recorded::GapDetected { position, highest_visible, age, evidence, blocker });
    }

    fn gap_passed(&self, id: &ProjectionId, event: &telemetry::GapPassed<'_>) {
        let &telemetry::GapPassed { from, to, highest_visible, age, evidence } = event;
        self.add(id, Recorded::GapPassed { from, to, highest_visible, age, evidence: evidence.to_owned() });
    }

    fn ownership_lost(&self, id: &ProjectionId, event: &telemetry::OwnershipLost<'_>) {
        self.add(id, Recorded::OwnershipLost { epoch: event.epoch, by: event.by.to_owned() });
    }
}
