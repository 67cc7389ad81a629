//! What the tasks of a projection tell those who ask.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::sync::watch;
use tokio::time::Instant;

use super::info::{OldestOpen, ProjectionInfo, RunCounts, WindowInfo};
use super::messages::Wish;
use super::progress::{Pace, Touched};
use crate::checkpoint::{Checkpoint, Counts, Replay};
use crate::dead_letter::Failure;
use crate::error::HaltReason;
use crate::event::{EventMeta, Position, StreamId};
use crate::lifecycle::{Role, State};
use crate::projection::ProjectionId;
use crate::source::SourceIdentity;
use crate::target::StateRecord;
use crate::telemetry::Recovered;

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
    /// The position of an event whose handler was found to take longer than it may; `u64::MAX` for none.
    overdue: AtomicU64,
    /// At most so many events in a batch: halved while statements of batches fail, doubled by each commit.
    batch_cap: AtomicUsize,
    touched: Touched,
}

struct Inner {
    id: ProjectionId,
    target: String,
    source_keeps_position: bool,
    state: State,
    wish: Wish,
    role: Role,
    holder: Option<String>,
    source: Option<SourceIdentity>,
    epoch: Option<i64>,
    watermark: Option<Position>,
    watermark_time: Option<DateTime<Utc>>,
    head: Option<Position>,
    run: RunCounts,
    stored: Counts,
    replay: Replay,
    window: WindowNow,
    /// The source knew of nothing more when it was last read.
    caught_up: bool,
    pace: Pace,
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
    /// The position that was called last when it was last looked, and when it was first seen there: a page takes as long as all
    /// its handlers together, and only one that stays is stuck.
    seen_called: Option<(Position, Instant)>,
    /// It has reached the position up to which it was to run, and has stopped there by itself.
    reached: bool,
    /// The tries to take over and subscribe that have come to nothing yet.
    tries: Option<Tries>,
}

/// The window as the pipeline last told it.
#[derive(Default)]
pub(crate) struct WindowNow {
    pub(crate) events: usize,
    pub(crate) bytes: usize,
    pub(crate) oldest: Option<OpenEvent>,
}

/// The event that holds up the watermark.
pub(crate) struct OpenEvent {
    pub(crate) position: Position,
    pub(crate) stream_id: StreamId,
    pub(crate) partition: usize,
    /// When it was handed out.
    pub(crate) since: Instant,
    /// When its handler was called first; `None` while it waits for its turn.
    pub(crate) running_since: Option<Instant>,
}

impl WindowNow {
    fn info(&self) -> WindowInfo {
        let oldest = self.oldest.as_ref().map(|open| OldestOpen {
            position: open.position,
            stream_id: open.stream_id.clone(),
            partition: open.partition,
            age: open.since.elapsed(),
            running: open.running_since.map(|since| since.elapsed()),
        });
        WindowInfo { events: self.events, bytes: self.bytes, oldest }
    }
}

/// Whether a projection runs here, in a few words.
pub(crate) struct Standing {
    pub(crate) state: State,
    pub(crate) role: Role,
    pub(crate) halt_reason: Option<HaltReason>,
}

#[derive(Clone, Copy)]
pub(crate) struct Degradation {
    pub(crate) since: DateTime<Utc>,
    pub(crate) failures: u32,
}

/// A degradation that is over.
pub(crate) struct Recovery {
    since: DateTime<Utc>,
    failures: u32,
    last_error: String,
}

impl Recovery {
    /// As it is reported.
    pub(crate) fn event(&self) -> Recovered<'_> {
        let since = (Utc::now() - self.since).to_std().unwrap_or_default();
        Recovered { since, failures: self.failures, last_error: &self.last_error }
    }
}

/// The tries to get a subscription, since the first that failed.
struct Tries {
    count: u32,
    since: Instant,
}

impl Inner {
    /// Events of this run that are accounted for.
    fn accounted(&self) -> u64 {
        self.run.applied + self.run.skipped + self.run.dead_lettered
    }

    /// Ends the degradation, if there is one.
    fn recover(&mut self) -> Option<Recovery> {
        let Degradation { since, failures } = self.degraded.take()?;
        Some(Recovery { since, failures, last_error: self.last_error.clone().unwrap_or_default() })
    }
}

impl Live {
    /// Of a projection that is about to be started.
    pub(crate) fn new(id: ProjectionId, target: String, source_keeps_position: bool) -> Self {
        Self {
            inner: Mutex::new(Inner {
                id,
                target,
                source_keeps_position,
                state: State::Initializing,
                wish: Wish::Run,
                role: Role::Active,
                holder: None,
                source: None,
                epoch: None,
                watermark: None,
                watermark_time: None,
                head: None,
                run: RunCounts::default(),
                stored: Counts::default(),
                replay: Replay::default(),
                window: WindowNow::default(),
                caught_up: false,
                pace: Pace::default(),
                halt_reason: None,
                degraded: None,
                last_error: None,
                commits: 0,
                troubled: HashMap::new(),
                attempts: HashMap::new(),
                calling: None,
                seen_called: None,
                reached: false,
                tries: None,
            }),
            watermark: watch::Sender::new(None),
            called: AtomicU64::new(0),
            overdue: AtomicU64::new(u64::MAX),
            batch_cap: AtomicUsize::new(usize::MAX),
            touched: Touched::default(),
        }
    }

    /// A panic while the lock is held can only come from an allocation; what is inside stays readable.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn info(&self) -> ProjectionInfo {
        let streams = self.touched.positions();
        let inner = self.lock();
        // Nobody asks for the head of a source for a projection that is stopped: an old answer would show it caught up for ever.
        let head = inner.head.filter(|_| inner.state != State::Stopped);
        let lag_events = head.and_then(|head| {
            inner.epoch?;
            Some(match inner.watermark {
                Some(watermark) => head.get().saturating_sub(watermark.get()),
                None => head.get().saturating_add(1),
            })
        });
        let lag_time = match lag_events {
            Some(0) => Some(Duration::ZERO),
            // With no head to compare with, the age of the last event of an idle projection says nothing.
            None if inner.window.events == 0 => None,
            _ if inner.state == State::Stopped => None,
            _ => inner.watermark_time.and_then(|at| (Utc::now() - at).to_std().ok()),
        };
        let behind = inner.state == State::Running && inner.role == Role::Active && !inner.caught_up;
        let catch_up = behind.then(|| inner.pace.catch_up(inner.accounted(), inner.watermark, lag_events)).flatten();
        ProjectionInfo {
            id: inner.id.clone(),
            state: inner.state,
            role: inner.role,
            holder: inner.holder.clone(),
            source: inner.source.clone(),
            target: inner.target.clone(),
            epoch: inner.epoch,
            watermark: inner.watermark,
            replay: inner.replay,
            streams,
            head: inner.head,
            lag_events,
            lag_time,
            catch_up,
            run: inner.run,
            stored: inner.stored,
            window: inner.window.info(),
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

    /// What one who waits for it wants to know again and again.
    pub(crate) fn standing(&self) -> Standing {
        let inner = self.lock();
        Standing { state: inner.state, role: inner.role, halt_reason: inner.halt_reason.clone() }
    }

    /// Enters a state. From a stop on, the watermark may be moved, or reset, by any other node.
    pub(crate) fn set_state(&self, state: State) {
        self.lock().state = state;
        if state == State::Stopped {
            self.watermark.send_replace(None);
        }
    }

    pub(crate) fn set_wish(&self, wish: Wish) {
        self.lock().wish = wish;
    }

    /// Notes that it stops because it has reached the position up to which it was to run.
    pub(crate) fn set_reached(&self) {
        self.lock().reached = true;
    }

    /// Whether it has stopped by itself where it was to.
    pub(crate) fn has_reached(&self) -> bool {
        let inner = self.lock();
        inner.reached && inner.state == State::Stopped
    }

    /// Notes the events of a batch that is durable, in the order of positions.
    pub(crate) fn touched<'a>(&self, events: impl Iterator<Item = (&'a StreamId, Position)>) {
        self.touched.note(events);
    }

    /// Notes where this version caught up first.
    pub(crate) fn set_replay(&self, replay: Replay) {
        self.lock().replay = replay;
    }

    pub(crate) fn role(&self) -> Role {
        self.lock().role
    }

    pub(crate) fn set_role(&self, role: Role, holder: Option<String>) {
        let mut inner = self.lock();
        inner.role = role;
        inner.holder = holder;
        if role == Role::Standby {
            inner.tries = None;
        }
    }

    /// Notes a try to take over and subscribe.
    pub(crate) fn trying(&self) {
        let mut inner = self.lock();
        inner.tries.get_or_insert_with(|| Tries { count: 0, since: Instant::now() }).count += 1;
    }

    /// Notes that the last try got a subscription: says how many there were, and since when.
    pub(crate) fn subscribed(&self) -> (u32, Duration) {
        self.lock().tries.take().map_or((0, Duration::ZERO), |tries| (tries.count, tries.since.elapsed()))
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
            // A pause lasts while the pipeline is brought back, and other nodes have to respect it.
            state: match (inner.wish, inner.state) {
                (Wish::Pause, State::Initializing) => State::Paused,
                (_, state) => state,
            },
            halt_reason: inner.halt_reason.as_ref().map(ToString::to_string),
            halt_class: inner.halt_reason.as_ref().and_then(|reason| reason.class),
            halt_code: inner.halt_reason.as_ref().and_then(|reason| reason.code.clone()),
            degraded_since: inner.degraded.map(|degraded| degraded.since),
            last_error: inner.last_error.clone(),
            head: inner.head,
            source_keeps_position: inner.source_keeps_position,
        };
        (inner.epoch, record)
    }

    pub(crate) fn taken_over(&self, checkpoint: &Checkpoint, source: SourceIdentity) {
        let mut inner = self.lock();
        inner.source = Some(source);
        inner.epoch = Some(checkpoint.epoch);
        inner.watermark = checkpoint.watermark;
        inner.stored = checkpoint.counts;
        inner.replay = checkpoint.replay;
        inner.caught_up = false;
        let accounted = inner.accounted();
        inner.pace.begin(accounted, checkpoint.watermark);
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

    pub(crate) fn set_window(&self, window: WindowNow, caught_up: bool) {
        let mut inner = self.lock();
        inner.caught_up = caught_up;
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
        let mut inner = self.lock();
        let called = Position::new(self.called.load(Ordering::Relaxed));
        let now = Instant::now();
        let calling = inner.calling.map(|since| {
            let seen = inner.seen_called.filter(|(position, seen)| *position == called && since <= *seen);
            seen.unwrap_or((called, now))
        });
        inner.seen_called = calling;
        let attempts = inner.attempts.iter().map(|(position, since)| (*position, *since)).chain(calling);
        attempts.min_by_key(|(_, since)| *since).map(|(position, since)| (position, since.elapsed()))
    }

    /// Whether there is nothing to do counts as getting on: says what degradation that ended, if any.
    pub(crate) fn idle(&self) -> Option<Recovery> {
        let mut inner = self.lock();
        if !inner.caught_up || inner.window.events > 0 {
            return None;
        }
        inner.commits = inner.commits.max(1);
        inner.recover()
    }

    /// Ends the degradation, if there is one.
    pub(crate) fn recover(&self) -> Option<Recovery> {
        self.lock().recover()
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

    /// Notes that events were dropped from the window: the source delivers them again.
    pub(crate) fn thrown_away(&self, events: u64) {
        self.lock().run.thrown_away += events;
    }

    /// Notes that the pipeline is gone, and with it what was in its window.
    pub(crate) fn pipeline_lost(&self) {
        let mut inner = self.lock();
        let lost = std::mem::take(&mut inner.window).events as u64;
        inner.run.thrown_away += lost;
        inner.attempts.clear();
        inner.calling = None;
        inner.caught_up = false;
    }

    /// Notes that the handler of an event takes longer than it may.
    pub(crate) fn set_overdue(&self, position: Position) {
        self.overdue.store(position.get(), Ordering::Relaxed);
    }

    /// Whether that was noted of an event. Once for each event, so it costs next to nothing.
    pub(crate) fn is_overdue(&self, position: Position) -> bool {
        self.overdue.load(Ordering::Relaxed) == position.get()
    }

    /// At most so many events in a batch.
    pub(crate) fn batch_cap(&self) -> usize {
        self.batch_cap.load(Ordering::Relaxed)
    }

    /// Notes that a statement of a batch of so many events failed: fewer at once may get through.
    pub(crate) fn halve_batches(&self, events: u64) {
        self.batch_cap.store(usize::try_from(events / 2).map_or(usize::MAX, |half| half.max(1)), Ordering::Relaxed);
    }

    /// Notes a commit. Says what degradation it ended, if any.
    pub(crate) fn committed(
        &self,
        checkpoint: &Checkpoint,
        counts: Counts,
        watermark_time: Option<DateTime<Utc>>,
    ) -> Option<Recovery> {
        let mut inner = self.lock();
        inner.watermark = checkpoint.watermark;
        inner.watermark_time = watermark_time.or(inner.watermark_time);
        inner.stored = checkpoint.counts;
        inner.run.applied += counts.applied;
        inner.run.skipped += counts.skipped;
        inner.run.dead_lettered += counts.dead_lettered;
        let accounted = inner.accounted();
        inner.pace.note(accounted, checkpoint.watermark);
        inner.commits += 1;
        inner.troubled.retain(|position, _| Some(*position) > checkpoint.watermark);
        let recovered = if inner.troubled.is_empty() { inner.recover() } else { None };
        drop(inner);
        self.batch_cap.store(self.batch_cap().saturating_mul(2), Ordering::Relaxed);
        self.watermark.send_replace(checkpoint.watermark);
        recovered
    }

    /// Commits of the present pipeline.
    #[cfg(feature = "test-switches")]
    pub(crate) fn commits(&self) -> u64 {
        self.lock().commits
    }

    /// Commits since the last pipeline took over, or since this was asked: they count once.
    pub(crate) fn take_commits(&self) -> u64 {
        std::mem::take(&mut self.lock().commits)
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
