//! What any node can ask of a target, whether it runs a projection or not, and what it can do to one that is stopped.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::TargetError;
use crate::checkpoint::{Checkpoint, Counts};
use crate::dead_letter::DeadLetter;
use crate::event::{Position, StreamId};
use crate::failure::FailureClass;
use crate::lifecycle::State;
use crate::projection::ProjectionId;
use crate::source::SourceIdentity;

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
    /// What and where it is, for people, without credentials: `postgres shop at localhost:5432`.
    fn name(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

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

    /// Brings a projection that no node runs back to the beginning, in one transaction that no node can take the lease in:
    ///
    /// 1. the epoch is raised, never set back, which fences off a former owner; this waits for the outcome of a commit of
    ///    theirs in doubt;
    /// 2. watermark, last event, counts, commit number, dead letters in a row, event types, replay position, source and
    ///    stored failures are cleared; the state is stopped;
    /// 3. dead letters are deleted, where `reset` says so, and its statements run in their order.
    ///
    /// The next take-over finds the checkpoint as if it were new: [`TakenOver::created`](super::TakenOver::created) is true, and
    /// watermark, source and event types are those of its request.
    ///
    /// # Errors
    /// [`ResetRefused`], and then nothing has changed.
    async fn reset(&self, id: &ProjectionId, reset: &Reset) -> Result<ResetCounts, ResetRefused> {
        let _ = (id, reset);
        Err(TargetError::new(FailureClass::Structural, "this target cannot reset a projection: give it a new version")
            .into())
    }
}

/// A connection for leases and states, used on the engine's control thread only. After an error it is thrown away.
#[async_trait]
pub trait Control: Send {
    /// Takes the lease if it is free, lapsed, or the asker's own, and lets it run for `ttl` from now. An asker that does not get
    /// it stands by: that is noted for a while, since it will ask again, and forgotten once it gets the lease or releases.
    async fn lease(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<LeaseAnswer, TargetError>;

    /// Takes the lease from whoever holds it, and lets it run for `ttl` from now: asked for only by an owner whom a source that
    /// admits one subscriber has let in.
    async fn seize(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<(), TargetError>;

    /// Gives the lease up, if the owner holds it, and standing by for it.
    async fn release(&mut self, id: &ProjectionId, owner: &Owner) -> Result<(), TargetError>;

    /// Writes the state, if `epoch` is still the projection's, and answers whether it was.
    async fn store_state(&mut self, id: &ProjectionId, epoch: i64, state: &StateRecord) -> Result<bool, TargetError>;
}

/// What the engine writes down about itself for nodes that do not run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateRecord {
    /// The state.
    pub state: State,
    /// Why it halted, if it did.
    pub halt_reason: Option<String>,
    /// The class of the failure it halted for, where one failure is to blame.
    pub halt_class: Option<FailureClass>,
    /// The code of that failure, where there is one.
    pub halt_code: Option<String>,
    /// Since when it does not get on, if it does not.
    pub degraded_since: Option<DateTime<Utc>>,
    /// The last error met.
    pub last_error: Option<String>,
    /// The source's head when last asked.
    pub head: Option<Position>,
    /// Whether the source keeps a position of its own for the projection, which a reset has to reset too.
    pub source_keeps_position: bool,
}

impl StateRecord {
    /// A state, and nothing else known.
    pub fn new(state: State) -> Self {
        Self {
            state,
            halt_reason: None,
            halt_class: None,
            halt_code: None,
            degraded_since: None,
            last_error: None,
            head: None,
            source_keeps_position: false,
        }
    }
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
    /// The nodes that stand by for it, for people.
    pub standbys: Vec<String>,
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

/// Which dead letters to list, by position.
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
    /// Only those behind this position, in the order of the listing: that of the last one of the page before.
    pub after: Option<Position>,
    /// At most so many; 100 where nothing is said.
    pub limit: Option<u32>,
    /// The highest position first.
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

/// What [`Scriba::reset`](crate::Scriba::reset) does beside clearing the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reset {
    /// Whether dead letters are deleted.
    pub dead_letters: bool,
    /// Statements that run in the transaction of the reset, in this order.
    pub statements: Vec<String>,
}

impl Reset {
    /// Clears the checkpoint and leaves dead letters and read model alone.
    pub fn new() -> Self {
        Self::default()
    }

    /// Deletes the dead letters too. Those that stay are listed, counted and taken by
    /// [`WaitFor::Event`](crate::WaitFor::Event) for dead letters of the new run, until the same event fails again and takes
    /// their place.
    #[must_use]
    pub fn dead_letters(mut self) -> Self {
        self.dead_letters = true;
        self
    }

    /// Runs a statement that empties the read model, such as `TRUNCATE orders`, in the transaction of the reset. It is sent as
    /// it is, so it must not hold anything that a stranger has written.
    #[must_use]
    pub fn statement(mut self, statement: impl Into<String>) -> Self {
        self.statements.push(statement.into());
        self
    }
}

/// What a reset cleared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetCounts {
    /// What the checkpoint had counted.
    pub cleared: Counts,
    /// Dead letters deleted.
    pub dead_letters: u64,
}

/// Why a target did not reset a projection: nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum ResetRefused {
    /// There is no checkpoint.
    #[error("there is no checkpoint")]
    NoCheckpoint,
    /// A node holds the lease.
    #[error("{holder} holds the lease")]
    Held {
        /// Who.
        holder: String,
    },
    /// Nodes stand by.
    #[error("{} stand by", .nodes.join(", "))]
    StoodBy {
        /// Which.
        nodes: Vec<String>,
    },
    /// There is no lease and its state says that it runs: leases may be switched off.
    #[error("it is {state} and has no lease")]
    MayRun {
        /// The state last written down.
        state: State,
    },
    /// The target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl StoredProjection {
    /// Whether no node runs it, as far as the tables tell.
    ///
    /// | lease | state | |
    /// |---|---|---|
    /// | held | | refused |
    /// | another | while nodes stand by | refused |
    /// | lapsed | any | may be: a node that died, or will find itself fenced off |
    /// | none | stopped | may be |
    /// | none | any other | refused: run by a node with leases off |
    ///
    /// # Errors
    /// Who or what stands in the way.
    pub fn may_be_reset(&self) -> Result<(), ResetRefused> {
        let state = self.state.state;
        match &self.lease {
            StoredLease::Held { holder } => Err(ResetRefused::Held { holder: holder.clone() }),
            _ if !self.standbys.is_empty() => Err(ResetRefused::StoodBy { nodes: self.standbys.clone() }),
            StoredLease::None if state != State::Stopped => Err(ResetRefused::MayRun { state }),
            StoredLease::None | StoredLease::Lapsed { .. } => Ok(()),
        }
    }

    /// Whether the next take-over may begin anew: nothing was ever committed, or it was reset since.
    pub fn is_untouched(&self) -> bool {
        self.checkpoint.commit_no == 0 && self.checkpoint.watermark.is_none()
    }

    /// What was made of all events, over all starts.
    pub fn counts(&self) -> Counts {
        self.checkpoint.counts
    }
}

#[async_trait]
impl<T: Tables + ?Sized> Tables for Arc<T> {
    fn name(&self) -> String {
        (**self).name()
    }

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

    async fn reset(&self, id: &ProjectionId, reset: &Reset) -> Result<ResetCounts, ResetRefused> {
        (**self).reset(id, reset).await
    }
}
