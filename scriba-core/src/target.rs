//! The port read models go out by. Unfrozen until 1.0.

mod tables;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use self::tables::{
    Control, DeadLetterFilter, DeadLetterStats, LeaseAnswer, Owner, Reset, ResetCounts, ResetRefused, StateRecord,
    StoredLease, StoredProjection, Tables,
};
use crate::checkpoint::{Advance, Checkpoint, Counts, LastEvent};
use crate::circuit::DeadLettersInRow;
use crate::dead_letter::{Failure, NewDeadLetter};
use crate::error::HaltReason;
use crate::event::{EventMeta, Position};
use crate::failure::{FailureClass, sqlstate};
use crate::options::{DeadLetterPolicy, OnPoison};
use crate::projection::{Outcome, ProjectionId};
use crate::source::SourceIdentity;

/// Where read models live, for operations of the type `Op`.
///
/// A target commits read-model writes, dead letters and the checkpoint in one transaction; one that cannot
/// has no way to implement this.
#[diagnostic::on_unimplemented(
    message = "the target `{Self}` does not apply operations of type `{Op}`",
    label = "the wrong target for this handler",
    note = "the handler's `type Op` has to be the target's: `PgOp` for `PgTarget`, any type for `MemoryTarget`"
)]
#[async_trait]
pub trait Target<Op>: Tables {
    /// Takes the projection over: raises the epoch, which fences off every earlier owner, waits for the
    /// outcome of a commit of theirs in doubt, and only then reads the checkpoint. Creates the checkpoint where there
    /// is none.
    async fn take_over(&self, request: TakeOver<'_>) -> Result<TakenOver<Op>, TakeOverError>;

    /// Bytes that an operation takes up in memory, as the byte caps count them. What it owns counts too, or a handler that
    /// returns much is not bounded.
    fn size_of(&self, operation: &Op) -> usize {
        size_of_val(operation)
    }
}

/// A take-over, as the engine asks for it.
#[derive(Clone, Debug)]
pub struct TakeOver<'a> {
    /// The projection.
    pub id: &'a ProjectionId,
    /// The owner, which has to hold the lease already, or `None` where leases are switched off. A take-over that is given up
    /// half-way and lands after the release of the lease must not take it again.
    pub owner: Option<&'a Owner>,
    /// How long the lease is to run from now.
    pub lease: Duration,
    /// How long code of the user may take inside the transaction.
    pub handler_timeout: Duration,
    /// The watermark of a checkpoint that has to be created, or that was reset and begins anew.
    pub initial: Option<Position>,
    /// The source it is fed from.
    pub source: &'a SourceIdentity,
    /// The event types it lists; `None` for all. Stored with a checkpoint that has to be created or begins anew.
    pub event_types: Option<&'static [&'static str]>,
}

/// What a take-over hands back.
pub struct TakenOver<Op> {
    /// The checkpoint as it stands under the new epoch.
    pub checkpoint: Checkpoint,
    /// The source that the checkpoint was made from so far.
    pub source: SourceIdentity,
    /// True where the checkpoint was created by this take-over, or was reset before it.
    pub created: bool,
    /// What commits under the new epoch.
    pub committer: Box<dyn Committer<Op>>,
}

/// Why a take-over failed.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// Another owner holds the lease.
    #[error("the lease is held by {holder}")]
    Held {
        /// Who.
        holder: String,
    },
    /// The target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
}

/// What commits batches for one owner under one epoch, over a connection of its own. Dropped with its epoch.
#[async_trait]
pub trait Committer<Op>: Send {
    /// Commits a batch: checkpoint first, then operations and dead letters in the order of positions. An event that the target
    /// refuses for its data (an integrity failure) becomes a dead letter in the same transaction; the others are
    /// committed. [`Batch::account`] counts, and says where the batch has to end.
    ///
    /// # Errors
    /// After any error but [`CommitError::HaltBefore`] this committer is not used again: the engine takes over anew, or stops.
    async fn commit(&mut self, batch: &Batch<Op>) -> Result<Committed, CommitError>;

    /// Stores where this version first caught up, `None` for at the beginning of an empty source; where nothing is stored yet.
    async fn store_replay_position(&mut self, caught_up: Option<Position>) -> Result<(), CommitError>;

    /// Stores the event types that are delivered from now on, `None` for all, in place of those stored.
    async fn store_event_types(&mut self, types: Option<&[&str]>) -> Result<(), CommitError>;
}

/// A contiguous part of what was delivered, all of it accounted for.
#[derive(Clone, Debug)]
pub struct Batch<Op> {
    /// The projection.
    pub id: ProjectionId,
    /// How the checkpoint moves, as the engine sees it: the counts change where the target refuses events.
    pub advance: Advance,
    /// Dead letters in a row before it.
    pub in_row: DeadLettersInRow,
    /// Its events, in the order of positions.
    pub entries: Vec<Entry<Op>>,
    /// What becomes of events that the target refuses.
    pub policy: DeadLetterPolicy,
}

/// An event with what was made of it.
#[derive(Clone, Debug)]
pub struct Entry<Op> {
    /// The event.
    pub meta: EventMeta,
    /// What is written.
    pub write: Write<Op>,
}

/// What an event leaves in the target.
#[derive(Clone, Debug)]
pub enum Write<Op> {
    /// Nothing: it was skipped, and is only counted.
    Skip,
    /// Operations on the read model.
    Apply(Outcome<Op>),
    /// A dead letter.
    DeadLetter(Failure),
}

impl<Op> Batch<Op> {
    /// A batch that follows on a checkpoint and accounts for everything up to `watermark`.
    pub fn new(
        id: ProjectionId,
        checkpoint: &Checkpoint,
        watermark: Position,
        entries: Vec<Entry<Op>>,
        policy: DeadLetterPolicy,
    ) -> Self {
        let advance = checkpoint.advance(watermark, last_event(&entries), counts(&entries));
        Self { id, advance, in_row: checkpoint.in_row.clone(), entries, policy }
    }

    /// Leaves out everything from a position on. False where nothing is left then.
    pub fn end_before(&mut self, position: Position) -> bool {
        self.entries.retain(|entry| entry.meta.position < position);
        let Some(last) = last_event(&self.entries) else { return false };
        self.advance.watermark = last.position;
        self.advance.last_event = Some(last);
        self.advance.counts = counts(&self.entries);
        true
    }

    /// What the target finds out about its events, in the order of positions.
    pub fn account(&self) -> Account {
        let Self { in_row, policy, .. } = self;
        Account { policy: *policy, counts: Counts::default(), in_row: in_row.clone(), refused: Vec::new() }
    }
}

fn last_event<Op>(entries: &[Entry<Op>]) -> Option<LastEvent> {
    entries.last().map(|Entry { meta, .. }| LastEvent { position: meta.position, id: meta.id.clone() })
}

fn counts<Op>(entries: &[Entry<Op>]) -> Counts {
    let mut counts = Counts::default();
    for entry in entries {
        match entry.write {
            Write::Skip => counts.skipped += 1,
            Write::Apply(_) => counts.applied += 1,
            Write::DeadLetter(_) => counts.dead_lettered += 1,
        }
    }
    counts
}

impl<Op> Entry<Op> {
    /// The dead letter, where this is one.
    pub fn dead_letter(&self) -> Option<NewDeadLetter<'_>> {
        match &self.write {
            Write::Skip | Write::Apply(_) => None,
            Write::DeadLetter(failure) => Some(NewDeadLetter { event: self.meta.event(), failure }),
        }
    }
}

/// Counts what becomes of the events of a batch, told in the order of positions, and says where the batch has to end.
#[derive(Clone, Debug)]
pub struct Account {
    policy: DeadLetterPolicy,
    counts: Counts,
    in_row: DeadLettersInRow,
    refused: Vec<Refused>,
}

impl Account {
    /// An event was skipped.
    pub fn skipped(&mut self) {
        self.counts.skipped += 1;
    }

    /// An event was applied; `changed` is false where all it did was to update or delete no row.
    pub fn applied(&mut self, changed: bool) {
        self.counts.applied += 1;
        self.in_row.applied(changed);
    }

    /// An event is a dead letter of its handler's.
    ///
    /// # Errors
    /// Where it is one too many in a row.
    pub fn dead_lettered(&mut self, meta: &EventMeta, failure: &Failure) -> Result<(), HaltBefore> {
        self.in_row = self.in_row.with(&meta.stream_id, self.policy.circuit).map_err(|tripped| HaltBefore {
            position: meta.position,
            reason: HaltReason::new(format!(
                "the circuit opened: with the event of stream {:?} there would be {tripped}, the last with {}: {}; mend the handler or the \
                 schema, then stop and start the projection, which goes on with this event",
                meta.stream_id.as_str(),
                failure.kind,
                failure.message
            ))
            .at(meta.position),
        })?;
        self.counts.dead_lettered += 1;
        Ok(())
    }

    /// The target refuses an event for its data: it becomes a dead letter.
    ///
    /// # Errors
    /// Where it is one too many in a row, or the projection is to halt rather than dead-letter.
    pub fn refused(&mut self, meta: &EventMeta, error: &TargetError) -> Result<(), HaltBefore> {
        let failure = error.failure(meta.attempt);
        if self.policy.on_poison(meta.replay) == OnPoison::Halt {
            let reason = HaltReason {
                class: Some(error.class),
                code: error.code.clone(),
                ..HaltReason::new(format!(
                    "the target refused the event of stream {:?} and on_poison is Halt: {}: {}; mend the handler, the event or the schema, \
                     then start the projection again",
                    meta.stream_id.as_str(),
                    failure.kind,
                    failure.message
                ))
            };
            return Err(HaltBefore { position: meta.position, reason: reason.at(meta.position) });
        }
        self.dead_lettered(meta, &failure)?;
        self.refused.push(Refused { meta: meta.clone(), failure });
        Ok(())
    }

    /// What was counted so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Dead letters in a row so far.
    pub fn in_row(&self) -> &DeadLettersInRow {
        &self.in_row
    }

    /// Events that the target refused so far.
    pub fn refusals(&self) -> &[Refused] {
        &self.refused
    }

    /// The account of a batch that is durable.
    pub fn committed(self, statements: u64) -> Committed {
        let Self { counts, in_row, refused, .. } = self;
        Committed { statements, counts, in_row, refused, isolated: None }
    }
}

/// A batch that is durable.
#[derive(Clone, Debug)]
pub struct Committed {
    /// Statements sent for it, all told.
    pub statements: u64,
    /// What became of its events in the end.
    pub counts: Counts,
    /// Dead letters in a row after it.
    pub in_row: DeadLettersInRow,
    /// Events that were to be applied and are dead letters now.
    pub refused: Vec<Refused>,
    /// Why it was written again event by event, if it was.
    pub isolated: Option<TargetError>,
}

/// An event that the target refused for its data.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The event.
    pub meta: EventMeta,
    /// Why.
    pub failure: Failure,
}

/// A batch must not go beyond an event: nothing of it was written, and it may be tried again up to the event before.
#[derive(Clone, Debug)]
pub struct HaltBefore {
    /// The event's position.
    pub position: Position,
    /// Why the projection halts there.
    pub reason: HaltReason,
}

/// Why a batch is not (known to be) durable.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The checkpoint is not the one this owner left: nothing was written.
    #[error("{0}")]
    Fenced(Shortfall),
    /// The connection was lost after COMMIT was sent: only a new take-over can tell.
    #[error("the outcome of the commit is not known: {0}")]
    Ambiguous(TargetError),
    /// Nothing was written.
    #[error("{0}")]
    Failed(TargetError),
    /// Nothing was written, because the batch has to end before an event. The committer goes on.
    #[error("{}", .0.reason)]
    HaltBefore(HaltBefore),
}

/// How the checkpoint differs from the one that was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Shortfall {
    /// Another owner has taken over.
    #[error("another owner has taken over: epoch {found}, ours was {ours}")]
    OtherEpoch {
        /// In the row.
        found: i64,
        /// Of this owner.
        ours: i64,
    },
    /// The epoch is ours and the commit number is not: the row was changed behind the engine's back.
    #[error("commit number {found} found, {expected} expected, under our own epoch {epoch}")]
    OtherCommit {
        /// In the row.
        found: i64,
        /// Expected.
        expected: i64,
        /// Of this owner.
        epoch: i64,
    },
    /// The row is gone.
    #[error("the checkpoint row is missing")]
    Missing,
}

/// A failure of a target.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct TargetError {
    /// What decides the response.
    pub class: FailureClass,
    /// The SQLSTATE, where there is one.
    pub code: Option<String>,
    /// The kind of dead letter it makes; `None` for `commit:` and the code.
    pub kind: Option<Box<str>>,
    /// What was tried, what came back, and what to do.
    pub message: String,
    /// The chain of sources; may be empty.
    pub detail: Box<str>,
    /// The event whose operation failed, where it is known.
    pub position: Option<Position>,
}

impl TargetError {
    /// A failure without a code.
    pub fn new(class: FailureClass, message: impl fmt::Display) -> Self {
        Self { class, code: None, kind: None, message: message.to_string(), detail: Box::default(), position: None }
    }

    /// The failure of an event whose handler had been called so often: `commit:23505 (unique_violation)`.
    pub fn failure(&self, attempts: u32) -> Failure {
        let kind = match (&self.kind, &self.code) {
            (Some(kind), _) => kind.to_string(),
            (None, Some(code)) => match sqlstate::condition(code) {
                Some(condition) => format!("commit:{code} ({condition})"),
                None => format!("commit:{code}"),
            },
            (None, None) => "commit".to_owned(),
        };
        Failure { kind, message: self.message.clone(), detail: self.detail.to_string(), attempts }
    }
}

#[async_trait]
impl<Op: Send + Sync + 'static, T: Target<Op> + ?Sized> Target<Op> for Arc<T> {
    async fn take_over(&self, request: TakeOver<'_>) -> Result<TakenOver<Op>, TakeOverError> {
        (**self).take_over(request).await
    }

    fn size_of(&self, operation: &Op) -> usize {
        (**self).size_of(operation)
    }
}
