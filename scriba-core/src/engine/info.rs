//! What a projection tells about itself while it runs on this node.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::checkpoint::{Checkpoint, Counts};
use crate::dead_letter::Failure;
use crate::error::HaltReason;
use crate::event::{EventMeta, Position, StreamId};
use crate::lifecycle::{Role, State};
use crate::projection::ProjectionId;
use crate::source::SourceIdentity;
use crate::target::StateRecord;

/// A projection as this node sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProjectionInfo {
    /// Its identity.
    pub id: ProjectionId,
    /// Where it stands in its life.
    pub state: State,
    /// Whether this node projects.
    pub role: Role,
    /// Who holds it when this node is on standby.
    pub holder: Option<String>,
    /// Its source, once it was asked.
    pub source: Option<SourceIdentity>,
    /// The epoch of this node's last take-over.
    pub epoch: Option<i64>,
    /// Everything up to it is accounted for; `None` is the beginning, or not known yet (see `epoch`).
    pub watermark: Option<Position>,
    /// The source's head when last asked; `None` when it was not or cannot be.
    pub head: Option<Position>,
    /// How many positions the watermark is behind the head; an upper bound for events, as positions may be missing.
    /// `None` when the head is not known.
    pub lag_events: Option<u64>,
    /// How long ago the event at the watermark was recorded; zero when caught up, `None` when not known.
    pub lag_time: Option<Duration>,
    /// What happened to the events delivered in this run.
    pub run: RunCounts,
    /// What was made of all events, over all starts, as the checkpoint counts them.
    pub stored: Counts,
    /// The window.
    pub window: WindowInfo,
    /// Why it halted.
    pub halt_reason: Option<HaltReason>,
    /// Since when it does not get on.
    pub degraded_since: Option<DateTime<Utc>>,
    /// The last error met, whether mended since or not.
    pub last_error: Option<String>,
}

impl ProjectionInfo {
    /// True while this node's tasks run, be it on standby or in a pause.
    pub fn is_live(&self) -> bool {
        !matches!(self.state, State::Halted | State::Stopped)
    }

    /// True while this node projects and gets on.
    pub fn is_ready(&self) -> bool {
        self.state == State::Running && self.role == Role::Active && self.degraded_since.is_none()
    }
}

/// What happened to the events delivered since this projection was started on this node. At every moment
/// delivered = applied + skipped + dead-lettered + deduplicated + thrown away by restarts + in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Delivered by the source.
    pub delivered: u64,
    /// Operations of theirs are committed.
    pub applied: u64,
    /// Skipped or filtered.
    pub skipped: u64,
    /// Committed to the dead-letter table.
    pub dead_lettered: u64,
    /// Delivered before.
    pub deduplicated: u64,
    /// In the window when a pipeline was lost; the source delivers them again.
    pub thrown_away: u64,
}

/// The window: what is handed out and not committed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowInfo {
    /// Events in it.
    pub events: usize,
    /// Their bytes.
    pub bytes: usize,
    /// The first event in it that is not handled, where there is one.
    pub oldest: Option<OldestOpen>,
}

/// The event that holds up the watermark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldestOpen {
    /// Its position.
    pub position: Position,
    /// Its stream and partition, and for how long its handler has been at it; `None` while it waits for its turn.
    pub running: Option<(StreamId, usize, Duration)>,
}

/// A call of a handler, noted until this is dropped.
struct Attempt<'a> {
    live: &'a Live,
    position: Position,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.live.lock().attempts.remove(&self.position);
    }
}

/// The state shared between the tasks of a projection and those who ask. Locked for moments, never across an await.
pub(crate) struct Live {
    inner: Mutex<Inner>,
    watermark: watch::Sender<Option<Position>>,
    /// The position of the event whose handler the pipeline called last.
    called: AtomicU64,
}

struct Inner {
    id: ProjectionId,
    state: State,
    role: Role,
    holder: Option<String>,
    source: Option<SourceIdentity>,
    epoch: Option<i64>,
    watermark: Option<Position>,
    watermark_time: Option<DateTime<Utc>>,
    head: Option<Position>,
    run: RunCounts,
    stored: Counts,
    window: WindowInfo,
    halt_reason: Option<HaltReason>,
    degraded: Option<Degradation>,
    last_error: Option<String>,
    /// Commits since the last pipeline started: restarts count as fruitless only while it is 0.
    commits: u64,
    /// Handlers that failed and are tried again, by position.
    troubled: HashMap<Position, u32>,
    /// Calls of handlers that had to wait or compute for long, and when they began.
    attempts: HashMap<Position, Instant>,
    /// Since when the pipeline calls handlers on its own task; `None` while it does not.
    calling: Option<Instant>,
    /// The pipeline has caught up with its source and has nothing in its window.
    idle: bool,
}

#[derive(Clone, Copy)]
pub(crate) struct Degradation {
    pub(crate) since: DateTime<Utc>,
    pub(crate) failures: u32,
}

impl Live {
    pub(crate) fn new(id: ProjectionId) -> Self {
        Self {
            inner: Mutex::new(Inner {
                id,
                state: State::Initializing,
                role: Role::Active,
                holder: None,
                source: None,
                epoch: None,
                watermark: None,
                watermark_time: None,
                head: None,
                run: RunCounts::default(),
                stored: Counts::default(),
                window: WindowInfo::default(),
                halt_reason: None,
                degraded: None,
                last_error: None,
                commits: 0,
                troubled: HashMap::new(),
                attempts: HashMap::new(),
                calling: None,
                idle: false,
            }),
            watermark: watch::Sender::new(None),
            called: AtomicU64::new(0),
        }
    }

    /// A panic while the lock is held can only come from an allocation; what is inside stays readable.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn info(&self) -> ProjectionInfo {
        let inner = self.lock();
        let lag_events = inner.head.and_then(|head| {
            inner.epoch?;
            Some(match inner.watermark {
                Some(watermark) => head.get().saturating_sub(watermark.get()),
                None => head.get().saturating_add(1),
            })
        });
        let lag_time = match lag_events {
            Some(0) => Some(Duration::ZERO),
            _ => inner.watermark_time.and_then(|at| (Utc::now() - at).to_std().ok()),
        };
        ProjectionInfo {
            id: inner.id.clone(),
            state: inner.state,
            role: inner.role,
            holder: inner.holder.clone(),
            source: inner.source.clone(),
            epoch: inner.epoch,
            watermark: inner.watermark,
            head: inner.head,
            lag_events,
            lag_time,
            run: inner.run,
            stored: inner.stored,
            window: inner.window.clone(),
            halt_reason: inner.halt_reason.clone(),
            degraded_since: inner.degraded.map(|degraded| degraded.since),
            last_error: inner.last_error.clone(),
        }
    }

    /// The watermark as it moves; `None` also while this node does not know it.
    pub(crate) fn watermark(&self) -> watch::Receiver<Option<Position>> {
        self.watermark.subscribe()
    }

    pub(crate) fn state(&self) -> State {
        self.lock().state
    }

    pub(crate) fn set_state(&self, state: State) {
        self.lock().state = state;
    }

    pub(crate) fn role(&self) -> Role {
        self.lock().role
    }

    pub(crate) fn set_role(&self, role: Role, holder: Option<String>) {
        let mut inner = self.lock();
        inner.role = role;
        inner.holder = holder;
    }

    pub(crate) fn set_head(&self, head: Option<Position>) {
        self.lock().head = head;
    }

    pub(crate) fn set_halted(&self, reason: HaltReason) {
        let mut inner = self.lock();
        inner.last_error = Some(reason.to_string());
        inner.halt_reason.get_or_insert(reason);
    }

    /// The epoch of this node's last take-over and what is to be written down for other nodes.
    pub(crate) fn record(&self) -> (Option<i64>, StateRecord) {
        let inner = self.lock();
        let record = StateRecord {
            state: inner.state,
            halt_reason: inner.halt_reason.as_ref().map(ToString::to_string),
            degraded_since: inner.degraded.map(|degraded| degraded.since),
            last_error: inner.last_error.clone(),
            head: inner.head,
        };
        (inner.epoch, record)
    }

    pub(crate) fn taken_over(&self, checkpoint: &Checkpoint, source: SourceIdentity) {
        let mut inner = self.lock();
        inner.source = Some(source);
        inner.epoch = Some(checkpoint.epoch);
        inner.watermark = checkpoint.watermark;
        inner.stored = checkpoint.counts;
        inner.commits = 0;
        inner.troubled.clear();
        drop(inner);
        self.watermark.send_replace(checkpoint.watermark);
    }

    pub(crate) fn delivered(&self, delivered: u64, deduplicated: u64) {
        let mut inner = self.lock();
        inner.run.delivered += delivered;
        inner.run.deduplicated += deduplicated;
    }

    pub(crate) fn set_window(&self, window: WindowInfo, caught_up: bool) {
        let mut inner = self.lock();
        inner.idle = caught_up && window.events == 0;
        inner.window = window;
    }

    /// Notes that handlers are called on the pipeline's own task from now on, or that this is over.
    pub(crate) fn set_calling(&self, calling: bool) {
        self.lock().calling = calling.then(Instant::now);
    }

    /// Notes which event's handler is called. Once for each event, so it costs next to nothing.
    pub(crate) fn set_called(&self, position: Position) {
        self.called.store(position.get(), Ordering::Relaxed);
    }

    /// Notes a call of a handler for as long as the answer is kept.
    pub(crate) fn attempt(&self, position: Position) -> impl Drop + use<'_> {
        self.lock().attempts.insert(position, Instant::now());
        Attempt { live: self, position }
    }

    /// The call of a handler that has been going on for longest, and for how long.
    pub(crate) fn oldest_attempt(&self) -> Option<(Position, Duration)> {
        let inner = self.lock();
        let called = Position::new(self.called.load(Ordering::Relaxed));
        let calling = inner.calling.map(|since| (called, since));
        let attempts = inner.attempts.iter().map(|(position, since)| (*position, *since)).chain(calling);
        attempts.min_by_key(|(_, since)| *since).map(|(position, since)| (position, since.elapsed()))
    }

    /// Whether there is nothing to do counts as getting on: says what degradation that ended, if any.
    pub(crate) fn idle(&self) -> Option<Degradation> {
        let mut inner = self.lock();
        if !inner.idle {
            return None;
        }
        inner.commits = inner.commits.max(1);
        inner.degraded.take()
    }

    /// What this node knows of the checkpoint is another's now.
    pub(crate) fn ownership_lost(&self) {
        let mut inner = self.lock();
        inner.epoch = None;
        inner.watermark = None;
        inner.watermark_time = None;
        drop(inner);
        self.watermark.send_replace(None);
    }

    /// Notes that the pipeline is gone, and with it what was in its window.
    pub(crate) fn pipeline_lost(&self) {
        let mut inner = self.lock();
        let lost = std::mem::take(&mut inner.window).events as u64;
        inner.run.thrown_away += lost;
        inner.attempts.clear();
        inner.calling = None;
        inner.idle = false;
    }

    /// Notes a commit. Says what degradation it ended, if any.
    pub(crate) fn committed(
        &self,
        checkpoint: &Checkpoint,
        counts: Counts,
        watermark_time: Option<DateTime<Utc>>,
    ) -> Option<Degradation> {
        let mut inner = self.lock();
        inner.watermark = checkpoint.watermark;
        inner.watermark_time = watermark_time.or(inner.watermark_time);
        inner.stored = checkpoint.counts;
        inner.run.applied += counts.applied;
        inner.run.skipped += counts.skipped;
        inner.run.dead_lettered += counts.dead_lettered;
        inner.commits += 1;
        inner.troubled.retain(|position, _| Some(*position) > checkpoint.watermark);
        let recovered = if inner.troubled.is_empty() { inner.degraded.take() } else { None };
        drop(inner);
        self.watermark.send_replace(checkpoint.watermark);
        recovered
    }

    /// Commits of the pipeline that started last.
    pub(crate) fn commits(&self) -> u64 {
        self.lock().commits
    }

    /// Notes a failure that is tried again.
    pub(crate) fn failed(&self, error: &str) -> Degradation {
        let mut inner = self.lock();
        inner.last_error = Some(error.to_owned());
        let degraded = inner.degraded.get_or_insert(Degradation { since: Utc::now(), failures: 0 });
        degraded.failures = degraded.failures.saturating_add(1);
        *degraded
    }

    /// Notes the failure of a handler that is called again.
    pub(crate) fn handler_failed(&self, meta: &EventMeta, failure: &Failure) {
        *self.lock().troubled.entry(meta.position).or_default() += 1;
        self.failed(&format!(
            "{}: {} (stream {:?}, position {}, attempt {})",
            failure.kind,
            failure.message,
            meta.stream_id.as_str(),
            meta.position,
            meta.attempt
        ));
    }
}
