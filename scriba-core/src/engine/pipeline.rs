//! One subscription's life: events in, handlers in parallel, outcomes committed in the order of positions.
//!
//! The pipeline is one task that owns the window and the partitions. Beside it run a reader ([`super::reader`]), a
//! writer ([`super::commit`]) and one task for each handler that has to wait. Whatever goes wrong ends the pipeline; the
//! coordinator starts a new one from the checkpoint.

use std::collections::HashMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, unconstrained};
use tokio::time::Instant;

use super::commit::{self, Job, Written};
use super::info::{Live, OldestOpen, WindowInfo};
use super::messages::{Handled, Taken, Wish};
use super::reader::{self, Orders};
use super::trouble::{Exit, Trouble};
use super::worker::Worker;
use crate::checkpoint::{Checkpoint, Counts, LastEvent, Replay};
use crate::event::{EventMeta, Position, RecordedEvent, StreamId};
use crate::options::ProjectionOptions;
use crate::partition::{Partitions, partition_of};
use crate::projection::{Handler, ProjectionId};
use crate::source::{Delivery, Demand, Page, SourceError};
use crate::target::{Batch, Entry, Target, Write};
use crate::telemetry::{BatchFailed, BatchNext, EventSkipped, Recovered, SkipReason, Telemetry};
use crate::window::{Arrival, Load, Window};

mod rules;

/// A run of nothing but skips is committed this often.
const SKIPS_COMMITTED_EVERY: Duration = Duration::from_secs(1);
/// With nothing more to read, a run of skips is committed after this long.
const IDLE_AFTER: Duration = Duration::from_millis(20);

/// How long handlers in flight may go on after their source has ended.
const PATIENCE: Duration = Duration::from_secs(1);

/// One event in so many is handled under the clock.
const SAMPLE_EVERY: u64 = 64;
/// A handler that computes for longer than this is worth a task of its own, which costs about a microsecond.
const HEAVY: Duration = Duration::from_micros(20);

/// An event that is handled, or will not be: what goes into the commit.
enum Settled<Op> {
    Write(Entry<Op>),
    Skip(EventMeta),
}

impl<Op> Settled<Op> {
    fn meta(&self) -> &EventMeta {
        match self {
            Self::Write(entry) => &entry.meta,
            Self::Skip(meta) => meta,
        }
    }
}

/// What the writer is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Free,
    /// It has a job.
    Busy,
    /// It has ended: nothing can be committed any more.
    Gone,
}

/// A handler that had to wait, in its own task.
struct Running {
    stream_id: StreamId,
    partition: usize,
    since: Instant,
}

pub(super) struct Pipeline<H: Handler> {
    id: ProjectionId,
    options: Arc<ProjectionOptions>,
    telemetry: Telemetry,
    live: Arc<Live>,
    wish: watch::Receiver<Wish>,
    worker: Arc<Worker<H>>,
    /// Asked for the sizes of operations only: the writer has what commits.
    target: Arc<dyn Target<H::Op>>,

    /// The checkpoint as the last commit left it.
    checkpoint: Checkpoint,
    window: Window<EventMeta, Settled<H::Op>>,
    partitions: Partitions,
    /// Handlers that had to wait. Dropped with the pipeline.
    handlers: JoinSet<(u64, usize, Handled<H::Op>)>,
    running: HashMap<u64, Running>,
    /// The last handler under the clock computed for long.
    heavy: bool,

    reader: tokio::task::JoinHandle<()>,
    orders: watch::Sender<Orders>,
    pages: mpsc::Receiver<Result<Page, SourceError>>,
    /// The number of the page that was ordered last, and whether it is still to come.
    page: u64,
    page_ordered: bool,
    /// The source knew of nothing more when it read the last page.
    caught_up: bool,
    last_arrival: Instant,
    /// A page that arrived in a pause: kept for when it is over.
    held: Option<Page>,

    jobs: mpsc::Sender<Job<H::Op>>,
    written: mpsc::Receiver<Written>,
    writer: Writer,
    /// When the event at the end of the batch that is being written was recorded.
    writing_time: Option<chrono::DateTime<chrono::Utc>>,
    /// Since when there is something done that was not offered for commit, being nothing but skips.
    skips_since: Option<Instant>,
    /// Where this version caught up first: to be stored before anything after it is handed out.
    /// `Ongoing` while there is nothing to store.
    replay_to_store: Replay,

    /// What the pipeline ends with, once what is ready is committed. The first reason stays.
    ending: Option<Exit>,
    /// Until when handlers in flight may finish although the pipeline ends.
    patience: Option<Instant>,
}

impl<H: Handler> Pipeline<H> {
    /// Spawns reader and writer.
    pub(super) fn new(
        worker: Worker<H>,
        taken: Taken<H::Op>,
        target: Arc<dyn Target<H::Op>>,
        id: ProjectionId,
    ) -> Self {
        let (orders, ordered) = watch::channel(Orders::default());
        let (pages_in, pages) = mpsc::channel(1);
        let reader = tokio::spawn(reader::read(taken.subscription, ordered, pages_in));
        let (jobs, jobs_out) = mpsc::channel(1);
        let (written_in, written) = mpsc::channel(1);
        tokio::spawn(commit::write(taken.committer, jobs_out, written_in, worker.telemetry.clone()));
        Self {
            id,
            target,
            options: Arc::clone(&worker.options),
            telemetry: worker.telemetry.clone(),
            live: Arc::clone(&worker.live),
            wish: worker.wish.clone(),
            window: Window::new(taken.checkpoint.watermark),
            partitions: Partitions::new(worker.options.parallelism),
            worker: Arc::new(worker),
            checkpoint: taken.checkpoint,
            handlers: JoinSet::new(),
            running: HashMap::new(),
            heavy: false,
            reader,
            orders,
            pages,
            page: 0,
            page_ordered: false,
            caught_up: false,
            last_arrival: Instant::now(),
            held: None,
            jobs,
            written,
            writer: Writer::Free,
            writing_time: None,
            skips_since: None,
            replay_to_store: Replay::Ongoing,
            ending: None,
            patience: None,
        }
    }

    /// Runs until something ends it.
    pub(super) async fn run(mut self) -> Exit {
        loop {
            self.lose_patience();
            self.take_held();
            self.start_waiting();
            self.offer();
            if self.is_over() {
                return self.end().await;
            }
            self.order_page();
            self.publish();
            let wake_at = self.flush_at().into_iter().chain(self.patience).min();
            tokio::select! {
                // Biased: a stop must not wait behind traffic, and what is finished goes before new work.
                biased;
                wish = self.wish.changed(), if self.ending.is_none() => if wish.is_err() {
                    // The coordinator is gone: nobody would hear of anything any more.
                    self.end_with(Exit::Stopped);
                },
                written = self.written.recv(), if self.writer != Writer::Gone => self.note_written(written),
                Some(handled) = self.handlers.join_next() => self.note_handled(handled),
                page = self.pages.recv(), if self.ending.is_none() => self.note_page(page),
                () = tokio::time::sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {},
            }
        }
    }

    /// Takes in a page, or the end of the subscription.
    fn note_page(&mut self, page: Option<Result<Page, SourceError>>) {
        self.page_ordered = false;
        match page {
            // The next start gets it.
            Some(Ok(_)) if self.is_wanted(Wish::Stop) => {}
            Some(Ok(page)) if self.is_wanted(Wish::Pause) => self.held = Some(page),
            Some(Ok(page)) => self.take_in(page),
            Some(Err(error)) => self.end_after_handlers(Exit::from_source(error)),
            None => self.end_with(Exit::Restart(Trouble::unknown("the reader of the source ended unexpectedly"))),
        }
    }

    fn take_held(&mut self) {
        if self.is_wanted(Wish::Run)
            && let Some(page) = self.held.take()
        {
            self.take_in(page);
        }
    }

    fn take_in(&mut self, page: Page) {
        self.live.set_calling(true);
        self.take_in_all(page);
        self.live.set_calling(false);
    }

    fn take_in_all(&mut self, page: Page) {
        self.last_arrival = Instant::now();
        self.caught_up = page.caught_up;
        let (mut delivered, mut deduplicated) = (0, 0);
        for delivery in page.deliveries {
            match delivery {
                Delivery::Progress(position) => self.window.progress(position),
                Delivery::Event(event) => {
                    delivered += 1;
                    match self.arrive(event.position) {
                        Arrival::New => self.admit(event),
                        Arrival::Duplicate => {
                            deduplicated += 1;
                            self.skipped(&event, SkipReason::Dedup);
                        }
                        Arrival::Late => {
                            // It stays undelivered: the next subscription begins at the checkpoint and brings it in order.
                            delivered -= 1;
                            self.end_with(Exit::Restart(Trouble::source(format!(
                                "position {} was delivered after {}: the subscription is out of order and starts again from the checkpoint",
                                event.position,
                                self.window.highest().map_or(0, Position::get),
                            ))));
                            break;
                        }
                    }
                }
            }
        }
        self.live.delivered(delivered, deduplicated);
        if deduplicated > 0 {
            self.ack(self.checkpoint.watermark);
        }
        if self.caught_up && self.checkpoint.replay == Replay::Ongoing {
            self.replay_to_store = Replay::Over(self.window.highest());
        }
    }

    fn admit(&mut self, event: RecordedEvent) {
        let (position, bytes, partition) = (event.position, event.size(), partition_of(&event.stream_id));
        let replay = self.checkpoint.replay.covers(position);
        let meta = EventMeta::new(event, replay);
        let number = self.window.next_number();
        let may_start = !self.is_ending() && (self.has_room() || self.window.all_done());
        let starts = self.partitions.admit(number, partition, may_start);
        if starts {
            self.window.admit_running(position, bytes);
            self.start(number, partition, meta);
        } else {
            self.window.admit(position, bytes, meta);
        }
    }

    fn start_waiting(&mut self) {
        while !self.is_ending()
            && self.may_start_next()
            && let Some((number, partition)) = self.partitions.start_next()
        {
            match self.window.start(number) {
                Some(meta) => {
                    self.live.set_calling(true);
                    self.start(number, partition, meta);
                }
                None => self.partitions.ended(partition),
            }
        }
        self.live.set_calling(false);
    }

    /// While what handlers returned takes up all that the cap allows, only the event that holds everything up is handled.
    fn may_start_next(&self) -> bool {
        self.has_room() || self.partitions.next() == self.window.oldest_open().map(|(number, _)| number)
    }

    fn has_room(&self) -> bool {
        self.window.load().bytes < self.options.in_flight_bytes
    }

    /// Polls the handler once, here: most are ready at once and never cost a task. One that waits gets a task of its own,
    /// and so does every one while handlers are found to compute for long, because here they would take turns.
    fn start(&mut self, number: u64, partition: usize, meta: EventMeta) {
        let sampled = number.is_multiple_of(SAMPLE_EVERY);
        let stream_id = meta.stream_id.clone();
        let inline = sampled || !self.heavy;
        self.live.set_called(meta.position);
        let mut call = Box::pin(Arc::clone(&self.worker).handle(meta, !inline));
        if inline {
            let started = sampled.then(Instant::now);
            // Unconstrained: tokio's budget would make a handler that locks a free mutex look as if it had to wait.
            // The waker is of no use: a call that is pending is polled again at once by the task it moves to.
            let polled = pin!(unconstrained(call.as_mut())).poll(&mut Context::from_waker(Waker::noop()));
            if let Some(started) = started {
                self.heavy = started.elapsed() > HEAVY;
            }
            if let Poll::Ready(handled) = polled {
                return self.settle(number, partition, handled);
            }
        }
        self.running.insert(number, Running { stream_id, partition, since: Instant::now() });
        self.handlers.spawn(async move { (number, partition, call.await) });
    }

    fn note_handled(&mut self, handled: Result<(u64, usize, Handled<H::Op>), tokio::task::JoinError>) {
        match handled {
            Ok((number, partition, handled)) => {
                self.running.remove(&number);
                self.settle(number, partition, handled);
            }
            // Handlers' panics are caught within their task: this one is the engine's or an observer's.
            Err(error) if error.is_panic() => {
                self.end_with(Exit::Restart(Trouble::unknown(format!("a task of the pipeline panicked: {error}"))));
            }
            Err(_) => {}
        }
    }

    fn settle(&mut self, number: u64, partition: usize, handled: Handled<H::Op>) {
        let (settled, bytes) = match handled {
            Handled::Apply(meta, outcome) => {
                let bytes = outcome.ops().iter().map(|op| self.target.size_of(op)).sum();
                (Settled::Write(Entry { meta, write: Write::Apply(outcome) }), bytes)
            }
            Handled::DeadLetter(meta, failure) => {
                let bytes = failure.message.len() + failure.detail.len();
                (Settled::Write(Entry { meta, write: Write::DeadLetter(failure) }), bytes)
            }
            Handled::Skip(meta) => {
                self.skipped(&meta, SkipReason::Handler);
                (Settled::Skip(meta), 0)
            }
            Handled::Filtered(meta) => {
                self.skipped(&meta, SkipReason::Filtered);
                (Settled::Skip(meta), 0)
            }
            // Its slot stays open, so that nothing behind it is committed.
            Handled::Halt(reason) => return self.end_with(Exit::Halt(reason)),
            Handled::Abandoned => return,
        };
        self.partitions.ended(partition);
        let write = matches!(settled, Settled::Write(_));
        self.window.complete(number, settled, bytes, write);
    }

    /// Hands the leading part that is done to the writer, if it is free and the time has come.
    fn offer(&mut self) {
        if self.writer != Writer::Free {
            return;
        }
        if let Replay::Over(caught_up) = self.replay_to_store {
            return self.write(Job::ReplayPosition(caught_up));
        }
        if !self.has_ready() {
            self.skips_since = None;
            return;
        }
        if self.only_skips() && self.flush_at().is_some_and(|at| at > Instant::now()) {
            return;
        }
        let Some(batch) = self.next_batch() else { return };
        self.ack_early(batch.advance.watermark);
        self.write(Job::Batch(batch));
    }

    fn write(&mut self, job: Job<H::Op>) {
        // There is room: one job is out at most. A writer that is gone says so through `written`.
        if self.jobs.try_send(job).is_ok() {
            self.writer = Writer::Busy;
        }
        self.skips_since = None;
    }

    /// When what is done has to be committed although it is nothing but skips.
    fn flush_at(&mut self) -> Option<Instant> {
        if self.writer != Writer::Free || !self.has_ready() {
            return None;
        }
        let now = Instant::now();
        let since = *self.skips_since.get_or_insert(now);
        let pressing = self.is_ending() || self.is_wanted(Wish::Pause);
        if pressing || self.window.done() * 2 >= self.options.in_flight_events {
            return Some(now);
        }
        let at = since + SKIPS_COMMITTED_EVERY;
        let idle = self.caught_up && self.window.all_done();
        Some(if idle { at.min(self.last_arrival + IDLE_AFTER) } else { at })
    }

    fn next_batch(&mut self) -> Option<Batch<H::Op>> {
        let prefix = self.take(Load { events: self.options.batch_events, bytes: self.options.batch_bytes })?;
        let last = prefix.outcomes.last().map(Settled::meta);
        self.writing_time = last.and_then(|meta| meta.occurred_at);
        let last_event = last.map(|meta| LastEvent { position: meta.position, id: meta.id.clone() });
        let mut counts = Counts::default();
        let mut entries = Vec::with_capacity(prefix.outcomes.len());
        for settled in prefix.outcomes {
            match settled {
                Settled::Skip(_) => counts.skipped += 1,
                Settled::Write(entry) => {
                    match entry.write {
                        Write::Apply(_) => counts.applied += 1,
                        Write::DeadLetter(_) => counts.dead_lettered += 1,
                    }
                    entries.push(entry);
                }
            }
        }
        let advance = self.checkpoint.advance(prefix.watermark, last_event, counts);
        Some(Batch { id: self.id.clone(), advance, entries })
    }

    fn note_written(&mut self, written: Option<Written>) {
        self.writer = Writer::Free;
        match written {
            Some(Written::Batch(advance)) => {
                self.checkpoint.committed(&advance);
                self.window.committed();
                // Before the watermark is told, so that whoever waits for it does not find its events in the window.
                self.publish();
                let time = self.writing_time.take();
                if let Some(degraded) = self.live.committed(&self.checkpoint, advance.counts, time) {
                    let since = (chrono::Utc::now() - degraded.since).to_std().unwrap_or_default();
                    self.telemetry.recovered(&Recovered { since, failures: degraded.failures });
                }
                self.ack(self.checkpoint.watermark);
            }
            Some(Written::ReplayPosition(position)) => {
                self.checkpoint.replay = Replay::Over(position);
                self.replay_to_store = Replay::Ongoing;
            }
            Some(Written::Failed(error)) => self.writer_ended(Exit::from_commit(error)),
            None => self.writer_ended(Exit::Restart(Trouble::unknown("the writer to the target ended unexpectedly"))),
        }
    }

    fn writer_ended(&mut self, exit: Exit) {
        self.writer = Writer::Gone;
        self.report_lost_batch(&exit);
        // What the target says weighs more than why the pipeline was about to end.
        self.ending = None;
        self.end_with(exit);
    }

    /// The end of a batch that is not tried again. One that is tried again is reported by the coordinator, which knows when.
    fn report_lost_batch(&self, exit: &Exit) {
        let (class, code, message, next) = match exit {
            Exit::Halt(reason) => (reason.class, reason.code.as_deref(), reason.message.as_str(), BatchNext::Halt),
            Exit::OwnershipLost { by } => (None, None, by.as_str(), BatchNext::Standby),
            Exit::Stopped | Exit::RuntimeGone | Exit::Restart(_) | Exit::Held { .. } => return,
        };
        self.telemetry.batch_failed(&BatchFailed { class, code, message, next });
    }

    /// Tells the source that everything up to the watermark is durable.
    fn ack(&mut self, watermark: Option<Position>) {
        if let Some(position) = watermark {
            self.window.acked(position);
            self.orders.send_modify(|orders| orders.ack = Some(position));
        }
    }

    /// Orders the next page once there is room for a decent one, unless nothing is wanted.
    fn order_page(&mut self) {
        let wanted = self.is_wanted(Wish::Run) && self.ending.is_none() && self.replay_to_store == Replay::Ongoing;
        if !wanted {
            self.orders.send_if_modified(|orders| orders.page.take().is_some());
            self.page_ordered = false;
            return;
        }
        let load = self.window.load();
        let room = self.options.in_flight_events.saturating_sub(load.events);
        let bytes = self.options.in_flight_bytes.saturating_sub(load.bytes);
        let decent = (self.options.in_flight_events / 4).clamp(1, self.options.batch_events);
        if self.page_ordered || (load.events > 0 && (room < decent || bytes == 0)) {
            return;
        }
        let demand = Demand { events: room.min(self.options.batch_events).max(1), bytes: bytes.max(1) };
        self.page += 1;
        self.page_ordered = true;
        let page = Some((self.page, demand));
        self.orders.send_modify(|orders| orders.page = page);
    }

    /// Ends the pipeline once what is ready is committed. Handlers in flight are dropped.
    fn end_with(&mut self, exit: Exit) {
        self.handlers.abort_all();
        self.patience = None;
        self.ending.get_or_insert(exit);
    }

    /// Ends the pipeline, and lets handlers in flight finish for a while: what was delivered is good, and where a source ends
    /// again and again, an event that takes its time would never get done otherwise.
    fn end_after_handlers(&mut self, exit: Exit) {
        if self.ending.is_none() {
            self.patience = Some(Instant::now() + PATIENCE);
            self.ending = Some(exit);
        }
    }

    fn lose_patience(&mut self) {
        if self.patience.is_some_and(|until| until <= Instant::now()) {
            self.patience = None;
            self.handlers.abort_all();
        }
    }

    fn is_ending(&self) -> bool {
        self.ending.is_some() || self.is_wanted(Wish::Stop)
    }

    fn is_wanted(&self, wish: Wish) -> bool {
        *self.wish.borrow() == wish
    }

    fn is_over(&self) -> bool {
        let waits = self.ending.is_none() || self.patience.is_some();
        let handlers_done = !waits || self.handlers.is_empty();
        let all_written = self.writer == Writer::Free && self.window.done() == 0;
        self.writer == Writer::Gone || (self.is_ending() && handlers_done && all_written)
    }

    /// Passes the last ack on and lets go of the source.
    async fn end(mut self) -> Exit {
        self.publish();
        self.handlers.shutdown().await;
        let Self { orders, reader, pages, ending, .. } = self;
        drop((orders, pages));
        if let Err(error) = reader.await {
            tracing::debug!(target: "scriba", projection = %self.id, %error, "the reader did not end well");
        }
        ending.unwrap_or(Exit::Stopped)
    }

    fn publish(&self) {
        let Load { events, bytes } = self.window.load();
        let oldest = self.window.oldest_open().map(|(number, position)| OldestOpen {
            position,
            running: self
                .running
                .get(&number)
                .map(|running| (running.stream_id.clone(), running.partition, running.since.elapsed())),
        });
        self.live.set_window(WindowInfo { events, bytes, oldest }, self.caught_up);
    }

    fn skipped(&self, event: &RecordedEvent, reason: SkipReason) {
        let skipped = EventSkipped { position: event.position, stream_id: event.stream_id.as_str(), reason };
        self.telemetry.event_skipped(&skipped);
    }
}
