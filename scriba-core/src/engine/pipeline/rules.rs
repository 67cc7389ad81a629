//! The steps of the pipeline in which tests may break a rule on purpose.

use super::Pipeline;
use crate::circuit::DeadLettersInRow;
use crate::event::Position;
use crate::projection::Handler;
#[cfg(feature = "test-switches")]
use crate::switches::Switches;
use crate::target::Entry;
use crate::window::{Arrival, Load, Prefix};

#[cfg(not(feature = "test-switches"))]
impl<H: Handler> Pipeline<H> {
    pub(super) fn arrive(&mut self, position: Position) -> Arrival {
        self.window.arrive(position)
    }

    pub(super) fn take(&mut self, most: Load) -> Option<Prefix<Entry<H::Op>>> {
        self.window.take(most)
    }

    pub(super) fn has_ready(&self) -> bool {
        self.window.done() > 0
    }

    pub(super) fn only_skips(&self) -> bool {
        !self.window.has_writes()
    }

    #[expect(clippy::unused_self, reason = "the counterpart under test-switches uses it")]
    pub(super) fn ack_early(&mut self, _: Position) {}

    pub(super) fn in_row(&self) -> DeadLettersInRow {
        self.checkpoint.in_row.clone()
    }
}

/// The same, with the faults that tests put in.
#[cfg(feature = "test-switches")]
impl<H: Handler> Pipeline<H> {
    pub(super) fn arrive(&mut self, position: Position) -> Arrival {
        match self.options.switches {
            Switches::DedupStoredOnly => self.window.arrive_unless_stored(position, self.checkpoint.watermark),
            _ => self.window.arrive(position),
        }
    }

    pub(super) fn take(&mut self, most: Load) -> Option<Prefix<Entry<H::Op>>> {
        match self.options.switches {
            Switches::CommitAsFinished => self.window.take_finished(most, self.checkpoint.watermark),
            Switches::ProgressPassesOpen => self.window.take_with_progress(most),
            _ => self.window.take(most),
        }
    }

    pub(super) fn has_ready(&self) -> bool {
        match self.options.switches {
            Switches::CommitAsFinished => self.window.any_finished(),
            _ => self.window.done() > 0,
        }
    }

    pub(super) fn only_skips(&self) -> bool {
        match self.options.switches {
            Switches::CommitAsFinished => false,
            _ => !self.window.has_writes(),
        }
    }

    pub(super) fn in_row(&self) -> DeadLettersInRow {
        match self.options.switches {
            Switches::CircuitPerBatch => DeadLettersInRow::default(),
            Switches::CircuitForgets if self.live.commits() == 0 => DeadLettersInRow::default(),
            _ => self.checkpoint.in_row.clone(),
        }
    }

    pub(super) fn ack_early(&mut self, position: Position) {
        if self.options.switches == Switches::AckBeforeCommit {
            self.ack(Some(position));
        }
    }
}
