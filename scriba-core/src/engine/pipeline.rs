//! One subscription's life: events in, handlers in parallel, outcomes committed in the order of positions.
//!
//! The pipeline is one task that owns the window and the partitions. Beside it run a reader ([`super::reader`], reached by
//! [`intake`]), a writer ([`super::commit`], reached by [`outlet`]) and one task for each handler that has to wait. Whatever goes wrong ends the pipeline; the
//! coordinator starts a new one from the checkpoint.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::commit::{Durable, Job, Written};
use super::live::{Live, OpenEvent, WindowNow};
use super::messages::{Handled, Taken, Wish};
use super::trouble::{Exit, Trouble};
use super::worker::Worker;
use crate::checkpoint::{Checkpoint, Replay};
use crate::error::HaltReason;
use crate::event::{EventMeta, Position, RecordedEvent, StreamId};
use crate::failure::FailureClass;
use crate::options::ProjectionOptions;
use crate::partition::{Partitions, partition_of};
use crate::projection::{Handler, ProjectionId};
use crate::source::{Delivery, Demand, Page, SourceError};
use crate::target::{Batch, Entry, Target};
use crate::telemetry::{BatchFailed, BatchNext, EventSkipped, SkipReason, Telemetry};
use crate::window::{Arrival, Load, Window};

mod handlers;
mod intake;
mod outlet;
mod rules;

use self::intake::Intake;
use self::outlet::{Outlet, Writing};

/// A run of nothing but skips is committed this often.
const SKIPS_COMMITTED_EVERY: Duration = Duration::from_secs(1);
/// With nothing more to read, or with nothing coming, a run of skips is committed after this long.
const IDLE_AFTER: Duration = Duration::from_millis(20);

/// How long handlers in flight may go on after their source has ended.
const PATIENCE: Duration = Duration::from_secs(1);

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
    window: Window<EventMeta, Entry<H::Op>>,
    partitions: Partitions,
    /// Handlers that had to wait. Dropped with the pipeline.
    handlers: JoinSet<(u64, usize, Handled<H::Op>)>,
    running: HashMap<u64, Running>,
    /// The last handler under the clock computed for long.
    heavy: bool,

    source: Intake,
    /// The source delivers again what was not acked.
    wants_acks: bool,
    writer: Outlet<H::Op>,
    /// Since when there is something done that was not offered for commit, being nothing but skips.
    skips_since: Option<Instant>,
    /// Where this version caught up first: to be stored before anything after it is handed out.
    /// `Ongoing` while there is nothing to store.
    replay_to_store: Replay,

    /// The first event, by number, that the projection has to halt before, and why. What stands before it is handled and
    /// committed first, so that of several it is the first that is named.
    halt: Option<(u64, HaltReason)>,
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
        let reached = worker.options.until.is_some_and(|until| taken.checkpoint.watermark >= Some(until));
        Self {
            id,
            target,
            wants_acks: taken.subscription.wants_acks(),
            source: Intake::new(taken.subscription, reached),
            writer: Outlet::new(taken.committer, &worker),
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
            skips_since: None,
            replay_to_store: Replay::Ongoing,
            halt: None,
            ending: None,
            patience: None,
        }
    }

    /// Runs until something ends it.
    pub(super) async fn run(mut self) -> Exit {
        loop {
            self.lose_patience();
            self.take_held();
            self.halt_if_due();
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
                (written, writing) = self.writer.written(), if !self.writer.is_gone() => self.note_written(written, &writing),
                Some(handled) = self.handlers.join_next() => self.note_handled(handled),
                // A page that is held comes first: another stays with the reader meanwhile.
                page = self.source.next(), if self.ending.is_none() && self.source.held.is_none() => self.note_page(page),
                () = tokio::time::sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {},
            }
        }
    }

    /// Takes in a page, or the end of the subscription.
    fn note_page(&mut self, page: Option<Result<Page, SourceError>>) {
        match page {
            // The next start gets it.
            Some(Ok(_)) if self.is_wanted(Wish::Stop) => {}
            Some(Ok(page)) if self.is_wanted(Wish::Pause) => self.source.held = Some(page),
            Some(Ok(page)) => self.take_in(page),
            Some(Err(error)) => self.end_after_handlers(Exit::from_source(error)),
            None => self.end_with(Exit::Restart(Trouble::unknown("the reader of the source ended unexpectedly"))),
        }
    }

    fn take_held(&mut self) {
        if self.is_wanted(Wish::Run)
            && let Some(page) = self.source.held.take()
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
        self.source.note_arrival(self.window.next_number(), page.caught_up);
        let (mut delivered, mut deduplicated) = (0, 0);
        for delivery in page.deliveries {
            let position = delivery.position();
            if let Some(until) = self.options.until.filter(|until| position > *until) {
                // Whatever stands above it says that nothing more is to come up to it.
                self.window.progress(until);
                self.source.caught_up = false;
                self.source.reached = true;
                break;
            }
            self.source.reached |= Some(position) == self.options.until;
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
                            // It stays undelivered.
                            delivered -= 1;
                            self.end_late(event.position);
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
        if self.source.caught_up && self.checkpoint.replay == Replay::Ongoing {
            self.replay_to_store = Replay::Over(self.window.highest());
        }
    }

    /// Hands the leading part that is done to the writer, if it is free and the time has come.
    fn offer(&mut self) {
        if !self.writer.is_free() {
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
        self.writer.write(job);
        self.skips_since = None;
    }

    /// When what is done has to be committed although it is nothing but skips.
    fn flush_at(&mut self) -> Option<Instant> {
        if !self.writer.is_free() || !self.has_ready() {
            return None;
        }
        let now = Instant::now();
        let since = *self.skips_since.get_or_insert(now);
        let pressing = self.is_ending() || self.source.reached || self.is_wanted(Wish::Pause);
        if pressing || self.window.done() * 2 >= self.options.in_flight_events {
            return Some(now);
        }
        let at = since + SKIPS_COMMITTED_EVERY;
        // A server that waits for acks may have more and not send it.
        let idle = (self.source.caught_up || self.wants_acks) && self.window.all_done();
        Some(if idle { at.min(self.source.last_arrival + IDLE_AFTER) } else { at })
    }

    fn next_batch(&mut self) -> Option<Batch<H::Op>> {
        let events = self.options.batch_events.min(self.live.batch_cap());
        let prefix = self.take(Load { events, bytes: self.options.batch_bytes })?;
        let policy = self.options.dead_letters;
        let mut batch = Batch::new(self.id.clone(), &self.checkpoint, prefix.watermark, prefix.outcomes, policy);
        batch.in_row = self.in_row();
        Some(batch)
    }

    fn note_written(&mut self, written: Option<Written>, writing: &Writing) {
        match written {
            Some(Written::Batch(durable)) => {
                let Durable { advance, committed, halt } = *durable;
                self.checkpoint.committed(&advance, committed.counts, committed.in_row);
                self.window.committed();
                // Before the watermark is told, so that whoever waits for it does not find its events in the window.
                self.publish();
                let counts = committed.counts;
                if let Some(recovery) = self.live.committed(&self.checkpoint, counts, writing.recorded_at) {
                    self.telemetry.recovered(&recovery.event());
                }
                self.ack(self.checkpoint.watermark);
                if let Some(reason) = halt {
                    self.writer_ended(Exit::Halt(reason), writing.events.saturating_sub(counts.total()));
                }
            }
            Some(Written::ReplayPosition(position)) => {
                self.checkpoint.replay = Replay::Over(position);
                self.live.set_replay(self.checkpoint.replay);
                self.replay_to_store = Replay::Ongoing;
            }
            Some(Written::Halted(reason)) => self.writer_ended(Exit::Halt(reason), writing.events),
            Some(Written::Failed(error)) => {
                let exit = Exit::from_commit(error, writing.only);
                if matches!(exit, Exit::Restart(Trouble { class: Some(FailureClass::TransientStatement), .. })) {
                    self.live.halve_batches(writing.events);
                }
                self.writer_ended(exit, writing.events);
            }
            None => {
                let trouble = Trouble::unknown("the writer to the target ended unexpectedly");
                self.writer_ended(Exit::Restart(trouble), writing.events);
            }
        }
    }

    /// The writer has ended, with a batch of so many events that is not durable.
    fn writer_ended(&mut self, exit: Exit, events: u64) {
        self.writer.close();
        let exit = exit.of_batch(events);
        self.report_lost_batch(&exit, events);
        // What the target says weighs more than why the pipeline was about to end.
        self.ending = None;
        self.end_with(exit);
    }

    /// The end of a batch that is not tried again. One that is tried again is reported by the coordinator, which knows when.
    fn report_lost_batch(&self, exit: &Exit, events: u64) {
        let (class, code, message, next) = match exit {
            Exit::Halt(reason) => (reason.class, reason.code.as_deref(), reason.message.as_str(), BatchNext::Halt),
            Exit::OwnershipLost { by } => (None, None, by.as_str(), BatchNext::Standby),
            Exit::Stopped | Exit::Reached | Exit::RuntimeGone | Exit::Restart(_) | Exit::Held { .. } => return,
        };
        if events > 0 {
            self.telemetry.batch_failed(&BatchFailed { events, class, code, message, next });
        }
    }

    /// Tells the source that everything up to the watermark is durable.
    fn ack(&mut self, watermark: Option<Position>) {
        if let Some(position) = watermark {
            self.window.acked(position);
            self.source.ack(position);
        }
    }

    /// Orders the next page once there is room for a decent one, unless nothing is wanted.
    fn order_page(&mut self) {
        let wanted = self.is_wanted(Wish::Run)
            && self.ending.is_none()
            && self.halt.is_none()
            && !self.source.reached
            && self.replay_to_store == Replay::Ongoing;
        if !wanted {
            return self.source.order_nothing();
        }
        let load = self.window.load();
        let room = self.options.in_flight_events.saturating_sub(load.events);
        let bytes = self.options.in_flight_bytes.saturating_sub(load.bytes);
        let decent = (self.options.in_flight_events / 4).clamp(1, self.options.batch_events);
        if self.source.is_ordered() || (load.events > 0 && (room < decent || bytes == 0)) {
            return;
        }
        self.source.order(Demand { events: room.min(self.options.batch_events).max(1), bytes: bytes.max(1) });
    }

    /// Ends the pipeline for an event that was delivered after others of higher positions. None of those may be committed any
    /// more: the next subscription begins at the checkpoint and brings it in order.
    fn end_late(&mut self, position: Position) {
        let highest = self.window.highest().map_or(0, Position::get);
        let passed = self.checkpoint.watermark.max(self.writer.watermark());
        // What was acked may come again, and nobody can tell it from what was never there.
        let may_be_acked = self.wants_acks && Some(position) <= self.checkpoint.watermark;
        if Some(position) > passed || may_be_acked {
            let dropped = self.window.forget_from(position);
            self.live.thrown_away(dropped as u64);
            return self.end_with(Exit::Restart(Trouble::source(format!(
                "position {position} was delivered after {highest}: the subscription is out of order and starts again from the checkpoint"
            ))));
        }
        self.end_with(Exit::Halt(HaltReason::new(format!(
            "the event was delivered after that of position {highest}, when the read model was at or beyond it already: the source has \
             lost its order, and the event is missing in the read model; have the source mended, and rebuild under a new version"
        )).at(position)));
    }

    fn halt_before(&mut self, number: u64, reason: HaltReason) {
        if self.is_before_halt(number) {
            self.halt = Some((number, reason));
        }
    }

    fn is_before_halt(&self, number: u64) -> bool {
        self.halt.as_ref().is_none_or(|(first, _)| number < *first)
    }

    /// Halts once all that stands before the event is handled.
    fn halt_if_due(&mut self) {
        let oldest = self.window.oldest_open().map(|(number, _)| number);
        if let Some((_, reason)) = self.halt.take_if(|(first, _)| oldest.is_none_or(|oldest| *first <= oldest)) {
            // A new subscription would meet the event again.
            self.ending.take_if(|ending| matches!(ending, Exit::Restart(_)));
            self.end_with(Exit::Halt(reason));
        }
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
        let all_written = self.writer.is_free() && self.window.done() == 0;
        self.writer.is_gone() || (self.is_ending() && handlers_done && all_written) || self.is_at_its_end()
    }

    /// Everything up to where it is to end is committed.
    fn is_at_its_end(&self) -> bool {
        let empty = self.window.load().events == 0 && self.window.done() == 0 && self.window.all_done();
        self.source.reached && empty && self.writer.is_free() && self.replay_to_store == Replay::Ongoing
    }

    /// Passes the last ack on and lets go of the source.
    async fn end(mut self) -> Exit {
        self.publish();
        let by_itself = if self.is_at_its_end() { Exit::Reached } else { Exit::Stopped };
        self.handlers.shutdown().await;
        if let Err(error) = self.source.end().await {
            tracing::debug!(target: "scriba", projection = %self.id, %error, "the reader did not end well");
        }
        self.ending.unwrap_or(by_itself)
    }

    fn publish(&mut self) {
        let Load { events, bytes } = self.window.load();
        let oldest = self.oldest();
        self.live.set_window(WindowNow { events, bytes, oldest }, self.source.caught_up);
    }

    /// The event that holds up the watermark.
    fn oldest(&mut self) -> Option<OpenEvent> {
        let oldest = self.window.oldest_open();
        let since = self.source.arrival(oldest.map(|(number, _)| number));
        let ((number, position), since) = (oldest?, since?);
        if let Some(Running { stream_id, partition, since: running }) = self.running.get(&number) {
            let (stream_id, partition, running_since) = (stream_id.clone(), *partition, Some(*running));
            return Some(OpenEvent { position, stream_id, partition, since, running_since });
        }
        let stream_id = self.window.waiting(number)?.stream_id.clone();
        let partition = partition_of(&stream_id);
        Some(OpenEvent { position, stream_id, partition, since, running_since: None })
    }

    fn skipped(&self, event: &RecordedEvent, reason: SkipReason) {
        let skipped = EventSkipped { position: event.position, stream_id: event.stream_id.as_str(), reason };
        self.telemetry.event_skipped(&skipped);
    }
}
