//! The checkpoint: the one row that says what is accounted for, and the arithmetic of moving it. Pure.

use std::fmt;

use crate::circuit::DeadLettersInRow;
use crate::event::{EventId, Position};

/// What was made of events, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Events whose operations are in the read model.
    pub applied: u64,
    /// Events skipped by the handler or filtered by type.
    pub skipped: u64,
    /// Events in the dead-letter table.
    pub dead_lettered: u64,
}

impl Counts {
    /// All of them.
    pub fn total(self) -> u64 {
        self.applied + self.skipped + self.dead_lettered
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.applied += other.applied;
        self.skipped += other.skipped;
        self.dead_lettered += other.dead_lettered;
    }
}

/// The event at the highest position seen so far: what proves at the next start that the source is still the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastEvent {
    /// Its position.
    pub position: Position,
    /// Its id.
    pub id: EventId,
}

/// Whether a version of a projection has caught up with its source once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replay {
    /// Not yet: every event is a replay.
    #[default]
    Ongoing,
    /// When it stood at this position: events above it are live. `None` where the source was empty.
    Over(Option<Position>),
}

impl Replay {
    /// Whether the event at a position is a replay.
    pub fn covers(self, position: Position) -> bool {
        match self {
            Self::Ongoing => true,
            Self::Over(caught_up) => Some(position) <= caught_up,
        }
    }
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ongoing => f.write_str("catching up"),
            Self::Over(None) => f.write_str("caught up (empty)"),
            Self::Over(Some(position)) => write!(f, "caught up at position {position}"),
        }
    }
}

/// The stored checkpoint of one version of a projection, as a take-over read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// The fencing number: raised by every take-over, never repeated.
    pub epoch: i64,
    /// Commits so far; each commit names the number it expects.
    pub commit_no: i64,
    /// Everything up to it is accounted for; `None` is the beginning.
    pub watermark: Option<Position>,
    /// The last event seen.
    pub last_event: Option<LastEvent>,
    /// What was made of all events, over all starts.
    pub counts: Counts,
    /// Dead letters since the last event that was applied.
    pub in_row: DeadLettersInRow,
    /// Whether this version has caught up with its source once.
    pub replay: Replay,
    /// The event types recorded with it; `None` for all types.
    pub event_types: Option<Vec<String>>,
}

/// How one commit moves the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    /// The epoch under which the batch was made.
    pub epoch: i64,
    /// The commit number expected in the row: exactly this one, or nothing is written.
    pub expected_commit_no: i64,
    /// The watermark after the commit.
    pub watermark: Position,
    /// The last event of the batch; `None` where it holds only progress without events.
    pub last_event: Option<LastEvent>,
    /// What was made of the events of the batch.
    pub counts: Counts,
}

impl Checkpoint {
    /// The statement's contents for a batch that ends at `watermark`.
    pub fn advance(&self, watermark: Position, last_event: Option<LastEvent>, counts: Counts) -> Advance {
        debug_assert!(self.watermark.is_none_or(|old| old <= watermark), "a watermark never moves backwards");
        Advance { epoch: self.epoch, expected_commit_no: self.commit_no, watermark, last_event, counts }
    }

    /// Notes that an advance was committed, with what became of its events and the dead letters in a row after it.
    pub fn committed(&mut self, advance: &Advance, counts: Counts, in_row: DeadLettersInRow) {
        self.commit_no = advance.expected_commit_no + 1;
        self.watermark = Some(advance.watermark);
        if let Some(last) = &advance.last_event {
            self.last_event = Some(last.clone());
        }
        self.counts += counts;
        self.in_row = in_row;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_a_replay_up_to_where_the_version_caught_up_and_none_is_where_that_was_an_empty_source() {
        let zero = Position::new(0);
        assert!(Replay::Ongoing.covers(zero));
        assert!(!Replay::Over(None).covers(zero));
        assert!(Replay::Over(Some(zero)).covers(zero));
        assert!(!Replay::Over(Some(zero)).covers(Position::new(1)));
    }

    #[test]
    fn a_commit_names_the_number_it_expects_and_the_next_one_expects_one_more() {
        let mut checkpoint = Checkpoint { epoch: 3, commit_no: 7, ..Checkpoint::default() };
        let counts = Counts { applied: 2, skipped: 1, dead_lettered: 0 };
        let last = LastEvent { position: Position::new(0), id: EventId::from("a") };
        let first = checkpoint.advance(Position::new(0), Some(last.clone()), counts);
        assert_eq!((first.epoch, first.expected_commit_no), (3, 7));
        checkpoint.committed(&first, first.counts, DeadLettersInRow::default());
        let second = checkpoint.advance(Position::new(5), None, Counts::default());
        assert_eq!(second.expected_commit_no, 8);
        checkpoint.committed(&second, second.counts, DeadLettersInRow::default());
        assert_eq!(checkpoint.watermark, Some(Position::new(5)));
        assert_eq!(checkpoint.last_event, Some(last), "progress without events keeps the last event");
        assert_eq!(checkpoint.counts, counts);
    }
}
