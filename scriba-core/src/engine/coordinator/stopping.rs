//! A stop, in two parts: the pipeline comes to its end, then the lease is given up.

use std::time::Duration;

use tokio::time::Instant;

use super::{Coordinator, answer};
use crate::engine::info::WindowInfo;
use crate::engine::messages::{Command, Order, Reply};
use crate::error::CommandError;
use crate::event::Position;
use crate::lifecycle::State;
use crate::telemetry::{StopReason, Stopped};

/// What of the time of a stop is kept for giving the lease up, at most; otherwise a tenth.
const FOR_THE_LEASE: Duration = Duration::from_secs(1);

/// A stop on its way.
pub(super) struct Stopping {
    reason: StopReason,
    replies: Vec<Reply>,
    /// When the pipeline is left behind.
    give_up_at: Instant,
    /// When the keeper is left behind.
    deadline: Instant,
    /// The pipeline is gone and the keeper gives the lease up.
    pub(super) releasing: bool,
    /// What was left behind.
    left_behind: Option<String>,
}

impl Stopping {
    pub(super) fn due(&self) -> Instant {
        if self.releasing { self.deadline } else { self.give_up_at }
    }
}

impl Coordinator {
    pub(super) fn stop(&mut self, next: State, reason: StopReason, reply: Reply) {
        if let Some(stopping) = &mut self.stopping {
            return stopping.replies.push(reply);
        }
        self.begin_stop(reason, vec![reply]);
        let Some(pipeline) = &self.pipeline else { return self.release() };
        if next != State::Draining || self.up_since.is_none() {
            // It is over, with whatever it is in the middle of, before the lease is given up: its end is heard first.
            pipeline.abort();
        }
        self.enter(State::Draining);
    }

    pub(super) fn begin_stop(&mut self, reason: StopReason, replies: Vec<Reply>) {
        self.retry_at = None;
        let timeout = self.options.shutdown_timeout;
        let deadline = Instant::now() + timeout;
        let give_up_at = deadline - FOR_THE_LEASE.min(timeout / 10);
        self.stopping = Some(Stopping { reason, replies, give_up_at, deadline, releasing: false, left_behind: None });
    }

    /// The time for a part of the stop is over.
    pub(super) fn overrun(&mut self) {
        let Some(stopping) = &mut self.stopping else { return };
        if stopping.releasing {
            stopping.left_behind.get_or_insert_with(|| {
                "the target does not answer: the lease lapses by itself, unless it answers before".to_owned()
            });
            return self.finish_stop();
        }
        stopping.left_behind = Some(left_behind(&self.live.info().window, self.live.oldest_attempt()));
        self.give_up_pipeline();
        self.release();
    }

    /// Has the keeper write the end down and give the lease up.
    pub(super) fn release(&mut self) {
        let Some(stopping) = &mut self.stopping else { return };
        if !stopping.releasing {
            stopping.releasing = true;
            self.live.set_state(State::Draining);
            self.order(Order::End);
        }
    }

    pub(super) fn finish_stop(&mut self) {
        let Some(Stopping { reason, replies, left_behind, .. }) = self.stopping.take() else { return };
        self.live.set_state(State::Stopped);
        let halt_reason = self.live.info().halt_reason;
        let halt_reason = halt_reason.as_ref();
        self.telemetry.stopped(&Stopped { reason, left_behind: left_behind.as_deref(), halt_reason });
        self.ended.send_modify(|ended| *ended += 1);
        for reply in replies {
            let result = left_behind.clone().map_or(Ok(()), |left_behind| {
                let (command, timeout) = (Command::Stop(reason).name(), self.options.shutdown_timeout);
                Err(CommandError::Timeout { id: self.id.clone(), command, timeout, left_behind })
            });
            answer(reply, result);
        }
    }
}

fn left_behind(window: &WindowInfo, attempt: Option<(Position, Duration)>) -> String {
    match &window.oldest {
        Some(oldest) => format!(
            "{} events in flight were left behind, the first at position {} (stream {:?}, partition {}, {}): they are handled again at the \
             next start",
            window.events,
            oldest.position,
            oldest.stream_id.as_str(),
            oldest.partition,
            oldest.running.map_or_else(
                || format!("waiting for {:?}", oldest.age),
                |running| format!("handler running for {running:?}")
            )
        ),
        None if window.events > 0 && attempt.is_none() => {
            format!(
                "a commit of {} events was left behind: it lands or not, and the next start sees which",
                window.events
            )
        }
        None => match attempt {
            Some((position, age)) => format!(
                "the handler of the event at position {position} has not come back for {age:?} and was left behind: it is handled again \
                 at the next start"
            ),
            None => "a call of the source or the target that does not come back was left behind".to_owned(),
        },
    }
}
