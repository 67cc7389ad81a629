//! Events into handlers, and what handlers return into the window.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::task::{JoinError, unconstrained};
use tokio::time::Instant;

use super::{Pipeline, Running};
use crate::engine::messages::Handled;
use crate::engine::trouble::{Exit, Trouble};
use crate::event::{EventMeta, RecordedEvent};
use crate::partition::partition_of;
use crate::projection::Handler;
use crate::target::{Entry, Write};
use crate::telemetry::SkipReason;

/// One event in so many is handled under the clock.
const SAMPLE_EVERY: u64 = 64;
/// A handler that computes for longer than this is worth a task of its own, which costs about a microsecond.
const HEAVY: Duration = Duration::from_micros(20);

impl<H: Handler> Pipeline<H> {
    pub(super) fn admit(&mut self, event: RecordedEvent) {
        let (position, bytes, partition) = (event.position, event.size(), partition_of(&event.stream_id));
        let replay = self.checkpoint.replay.covers(position);
        let meta = EventMeta::new(event, replay);
        let number = self.window.next_number();
        let may_start = !self.is_ending() && self.is_before_halt(number) && (self.has_room() || self.window.all_done());
        let starts = self.partitions.admit(number, partition, may_start);
        if starts {
            self.window.admit_running(position, bytes);
            self.start(number, partition, meta);
        } else {
            self.window.admit(position, bytes, meta);
        }
    }

    pub(super) fn start_waiting(&mut self) {
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
        if !self.partitions.next().is_some_and(|number| self.is_before_halt(number)) {
            return false;
        }
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

    pub(super) fn note_handled(&mut self, handled: Result<(u64, usize, Handled<H::Op>), JoinError>) {
        match handled {
            Ok((number, partition, handled)) => {
                // One that is not handled in the end holds the window up, and is named for as long as the pipeline lasts.
                if !matches!(handled, Handled::Halt(_) | Handled::Abandoned) {
                    self.running.remove(&number);
                }
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
        let (meta, write, bytes) = match handled {
            Handled::Apply(meta, outcome) => {
                let bytes = outcome.ops().iter().map(|op| self.target.size_of(op)).sum();
                (meta, Write::Apply(outcome), bytes)
            }
            Handled::DeadLetter(meta, failure) => {
                let bytes = failure.message.len() + failure.detail.len();
                (meta, Write::DeadLetter(failure), bytes)
            }
            Handled::Skip(meta) => {
                self.skipped(&meta, SkipReason::Handler);
                (meta, Write::Skip, 0)
            }
            Handled::Filtered(meta) => {
                self.skipped(&meta, SkipReason::Filtered);
                (meta, Write::Skip, 0)
            }
            // Its slot stays open, so that nothing behind it is committed.
            Handled::Halt(reason) => return self.halt_before(number, reason),
            Handled::Abandoned => return,
        };
        self.partitions.ended(partition);
        let writes = !matches!(write, Write::Skip);
        self.window.complete(number, Entry { meta, write }, bytes, writes);
    }
}
