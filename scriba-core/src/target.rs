//! The port read models go out by. Unfrozen until 1.0.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use crate::checkpoint::{Advance, Checkpoint, Counts};
use crate::dead_letter::{DeadLetter, Failure, NewDeadLetter};
use crate::event::{EventMeta, Position, StreamId};
use crate::failure::FailureClass;
use crate::lifecycle::State;
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
    /// The owner that must hold the lease, or `None` where leases are switched off.
    pub owner: Option<&'a Owner>,
    /// How long the lease is to run from now.
    pub lease: Duration,
    /// The watermark of a checkpoint that has to be created.
    pub initial: Option<Position>,
    /// The source it is fed from.
    pub source: &'a SourceIdentity,
    /// The event types it lists; `None` for all. Stored with a checkpoint that has to be created.
    pub event_types: Option<&'static [&'static str]>,
}

/// What a take-over hands back.
pub struct TakenOver<Op> {
    /// The checkpoint as it stands under the new epoch.
    pub checkpoint: Checkpoint,
    /// The source that the checkpoint was made from so far.
    pub source: SourceIdentity,
    /// True where the checkpoint was created by this take-over.
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
    /// Commits a batch: checkpoint first, then operations and dead letters in the order of positions.
    ///
    /// # Errors
    /// After any error this committer is not used again: the engine takes over anew, or stops.
    async fn commit(&mut self, batch: &Batch<Op>) -> Result<Committed, CommitError>;

    /// Stores where this version first caught up, `None` for at the beginning of an empty source; where nothing is stored yet.
    async fn store_replay_position(&mut self, caught_up: Option<Position>) -> Result<(), CommitError>;

    /// Stores the event types that are delivered from now on, `None` for all, in place of those stored.
    async fn store_event_types(&mut self, types: Option<&[&str]>) -> Result<(), CommitError>;
}

/// A contiguous part of what was delivered, all of it accounted for.
#[derive(Debug)]
pub struct Batch<Op> {
    /// The projection.
    pub id: ProjectionId,
    /// How the checkpoint moves.
    pub advance: Advance,
    /// The events that leave something in the target, in the order of positions. Skipped events are only counted.
    pub entries: Vec<Entry<Op>>,
}

/// An event with what was made of it.
#[derive(Debug)]
pub struct Entry<Op> {
    /// The event.
    pub meta: EventMeta,
    /// What is written.
    pub write: Write<Op>,
}

/// What an event leaves in the target.
#[derive(Debug)]
pub enum Write<Op> {
    /// Operations on the read model.
    Apply(Outcome<Op>),
    /// A dead letter.
    DeadLetter(Failure),
}

impl<Op> Entry<Op> {
    /// The dead letter, where this is one.
    pub fn dead_letter(&self) -> Option<NewDeadLetter<'_>> {
        match &self.write {
            Write::Apply(_) => None,
            Write::DeadLetter(failure) => Some(NewDeadLetter { event: self.meta.event(), failure }),
        }
    }
}

/// A batch that is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Statements sent for it, all told.
    pub statements: u64,
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
    /// What was tried, what came back, and what to do.
    pub message: String,
    /// The event whose operation failed, where it is known.
    pub position: Option<Position>,
}

impl TargetError {
    /// A failure without a code.
    pub fn new(class: FailureClass, message: impl fmt::Display) -> Self {
        Self { class, code: None, message: message.to_string(), position: None }
    }
}

/// A node, by a random id made at each start of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The random id.
    pub id: String,
    /// Who that is, for people: host and process.
    pub description: String,
}

/// The answer to a request for the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// The asker holds it.
    Held,
    /// Another holds it.
    HeldBy {
        /// Who, for people.
        holder: String,
        /// How long it still runs, by the database's clock.
        expires_in: Duration,
    },
}

/// The tables beside the read model, independent of what operations there are: what any node can ask, whether it
/// runs a projection or not.
#[async_trait]
pub trait Tables: Send + Sync + 'static {
    /// Looks whether the tables are there in the version this library wants.
    ///
    /// # Errors
    /// A structural error that names what is missing, found and wanted version, and the command that mends it.
    async fn check(&self) -> Result<(), TargetError>;

    /// Opens a connection for leases and states that shares nothing with the user's pool. It is called and used
    /// on the engine's control thread.
    async fn control(&self) -> Result<Box<dyn Control>, TargetError>;

    /// What is stored of a projection; `None` where there is no checkpoint.
    async fn stored(&self, id: &ProjectionId) -> Result<Option<StoredProjection>, TargetError>;

    /// What is stored of all projections, by name and version.
    async fn stored_all(&self) -> Result<Vec<StoredProjection>, TargetError>;

    /// Dead letters that a filter lets through.
    async fn dead_letters(&self, id: &ProjectionId, filter: &DeadLetterFilter) -> Result<Vec<DeadLetter>, TargetError>;

    /// Dead letters counted.
    async fn dead_letter_stats(&self, id: &ProjectionId) -> Result<DeadLetterStats, TargetError>;
}

/// A connection for leases and states, used on the engine's control thread only. After an error it is thrown away.
#[async_trait]
pub trait Control: Send {
    /// Takes the lease if it is free, lapsed, or the asker's own, and lets it run for `ttl` from now.
    async fn lease(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<LeaseAnswer, TargetError>;

    /// Gives the lease up, if the owner holds it.
    async fn release(&mut self, id: &ProjectionId, owner: &Owner) -> Result<(), TargetError>;

    /// Writes the state, if `epoch` is still the projection's.
    async fn store_state(&mut self, id: &ProjectionId, epoch: i64, state: &StateRecord) -> Result<(), TargetError>;
}

/// What the engine writes down about itself for nodes that do not run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateRecord {
    /// The state.
    pub state: State,
    /// Why it halted, if it did.
    pub halt_reason: Option<String>,
    /// Since when it does not get on, if it does not.
    pub degraded_since: Option<DateTime<Utc>>,
    /// The last error met.
    pub last_error: Option<String>,
    /// The source's head when last asked.
    pub head: Option<Position>,
}

/// A projection as the tables know it.
#[derive(Clone, Debug)]
pub struct StoredProjection {
    /// Its identity.
    pub id: ProjectionId,
    /// Its checkpoint.
    pub checkpoint: Checkpoint,
    /// Its source.
    pub source: SourceIdentity,
    /// The state its owner last wrote.
    pub state: StateRecord,
    /// Its lease.
    pub lease: StoredLease,
}

/// A lease as the tables know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredLease {
    /// There is none: never taken, released, or leases are switched off.
    None,
    /// Held.
    Held {
        /// By whom, for people.
        holder: String,
    },
    /// It ran out and nobody has taken it.
    Lapsed {
        /// Who held it, for people.
        holder: String,
    },
}

/// Which dead letters to list, by row number.
#[derive(Clone, Debug, Default)]
pub struct DeadLetterFilter {
    /// Of this stream.
    pub stream_id: Option<StreamId>,
    /// Of this kind.
    pub kind: Option<String>,
    /// From this position on.
    pub from_position: Option<Position>,
    /// Up to this position.
    pub to_position: Option<Position>,
    /// Dead-lettered at or after this time.
    pub since: Option<DateTime<Utc>>,
    /// Dead-lettered before this time.
    pub until: Option<DateTime<Utc>>,
    /// Only rows beyond this id, in the order of the listing.
    pub after_id: Option<i64>,
    /// At most so many; 100 where nothing is said.
    pub limit: Option<u32>,
    /// Newest row first.
    pub descending: bool,
}

/// Dead letters counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeadLetterStats {
    /// All of them.
    pub total: u64,
    /// By kind, the most frequent first.
    pub by_kind: Vec<(String, u64)>,
    /// When the oldest was dead-lettered.
    pub oldest: Option<DateTime<Utc>>,
    /// When the newest was dead-lettered.
    pub newest: Option<DateTime<Utc>>,
}

impl StoredProjection {
    /// What was made of all events, over all starts.
    pub fn counts(&self) -> Counts {
        self.checkpoint.counts
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

#[async_trait]
impl<T: Tables + ?Sized> Tables for Arc<T> {
    async fn check(&self) -> Result<(), TargetError> {
        (**self).check().await
    }

    async fn control(&self) -> Result<Box<dyn Control>, TargetError> {
        (**self).control().await
    }

    async fn stored(&self, id: &ProjectionId) -> Result<Option<StoredProjection>, TargetError> {
        (**self).stored(id).await
    }

    async fn stored_all(&self) -> Result<Vec<StoredProjection>, TargetError> {
        (**self).stored_all().await
    }

    async fn dead_letters(&self, id: &ProjectionId, filter: &DeadLetterFilter) -> Result<Vec<DeadLetter>, TargetError> {
        (**self).dead_letters(id, filter).await
    }

    async fn dead_letter_stats(&self, id: &ProjectionId) -> Result<DeadLetterStats, TargetError> {
        (**self).dead_letter_stats(id).await
    }
}
