//! A target in memory, with failures at chosen steps and an eye on the contract.

mod store;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::checkpoint::{Checkpoint, Replay};
use scriba_core::dead_letter::DeadLetter;
use scriba_core::target::{
    Batch, CommitError, Committed, Committer, Control, DeadLetterFilter, DeadLetterStats, LeaseAnswer, Owner,
    StateRecord, StoredProjection, Tables, TakeOver, TakeOverError, TakenOver, Target, TargetError,
};
use scriba_core::{FailureClass, Position, ProjectionId, sqlstate};
use tokio::sync::Notify;
use tokio::time::Instant;

use self::store::{Planned, Row, Store};

/// A target in memory: what was committed is a log of positions and operations. Clones share everything, so a test
/// keeps one to look at and gives the other away.
///
/// It checks the engine while it is used: [`MemoryTarget::violations`] is empty as long as the watermark only moves
/// forwards, every event is applied once and in the order of positions, and the counts are those of the batches.
///
/// Leases go by `tokio::time`, so they follow a paused clock, though only on the runtime whose clock is paused.
///
/// Not simulated: operations are kept and not carried out, so there are no constraints, types or rows; a take-over
/// does not wait for a commit that hangs (it fences it off); nothing outlives the process.
///
/// ```
/// use scriba_testing::{MemoryTarget, TargetFault, TargetStep};
///
/// let target = MemoryTarget::<String>::new();
/// target.fail(TargetStep::Commit, 2, TargetFault::Ambiguous { durable: true });
/// assert!(target.applied("orders").is_empty());
/// assert_eq!(target.violations(), Vec::<String>::new());
/// ```
pub struct MemoryTarget<Op> {
    shared: Arc<Shared<Op>>,
}

/// The steps of a take-over and of a commit, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TargetStep {
    /// A take-over begins.
    TakeOver,
    /// A commit begins its transaction.
    Begin,
    /// The checkpoint statement of a commit.
    Checkpoint,
    /// The operations or the dead letter of one event.
    Apply,
    /// COMMIT is sent.
    Commit,
    /// The replay position is stored.
    ReplayPosition,
}

/// How a step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetFault {
    /// The connection is lost.
    Transient,
    /// A table is missing.
    Structural,
    /// A unique constraint is violated.
    Integrity,
    /// The connection is lost after COMMIT was sent; at other steps than [`TargetStep::Commit`] the same as
    /// [`TargetFault::Transient`].
    Ambiguous {
        /// Whether the commit came to be durable all the same.
        durable: bool,
    },
    /// The step does not return until [`MemoryTarget::release_hung`] lets it go on.
    Hang,
}

/// What is stored of a projection, all as of one moment.
#[derive(Clone, Debug)]
pub struct Snapshot<Op> {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The operations, with the positions of their events, in the order in which they were applied.
    pub applied: Vec<(Position, Op)>,
    /// The dead letters, in the order of their rows.
    pub dead_letters: Vec<DeadLetter>,
}

struct Shared<Op> {
    store: Mutex<Store<Op>>,
    released: Notify,
}

impl<Op> Clone for MemoryTarget<Op> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<Op> Default for MemoryTarget<Op> {
    fn default() -> Self {
        Self { shared: Arc::new(Shared { store: Mutex::default(), released: Notify::new() }) }
    }
}

impl<Op> MemoryTarget<Op> {
    /// With nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// The `nth` time from now that `step` is reached (1 is the next time), it fails; once.
    ///
    /// # Panics
    /// When `nth` is 0.
    pub fn fail(&self, step: TargetStep, nth: u64, fault: TargetFault) {
        self.plan(Some(step), nth, fault);
    }

    /// The `nth` step from now on fails, whichever it is (1 is the next one); once. With [`MemoryTarget::steps`] of a
    /// clean run this makes a test that fails at each step in turn.
    ///
    /// # Panics
    /// When `nth` is 0.
    pub fn fail_any(&self, nth: u64, fault: TargetFault) {
        self.plan(None, nth, fault);
    }

    fn plan(&self, step: Option<TargetStep>, nth: u64, fault: TargetFault) {
        assert!(nth > 0, "steps are counted from 1, which is the next one");
        self.lock().faults.push(Planned { step, left: nth, fault });
    }

    /// While it is on, every call fails as it does when the server is down.
    pub fn outage(&self, on: bool) {
        self.lock().outage = on;
    }

    /// Lets all steps that hang go on.
    pub fn release_hung(&self) {
        self.shared.released.notify_waiters();
    }

    /// Steps reached so far, of all projections.
    pub fn steps(&self) -> u64 {
        self.lock().steps
    }

    /// Commits that came to be durable.
    pub fn commits(&self, id: impl Into<ProjectionId>) -> u64 {
        self.lock().rows.get(&id.into()).map_or(0, |row| row.commits)
    }

    /// The checkpoint; `None` where there is none.
    pub fn checkpoint(&self, id: impl Into<ProjectionId>) -> Option<Checkpoint> {
        self.lock().rows.get(&id.into()).map(|row| row.checkpoint.clone())
    }

    /// The dead letters, in the order of their rows.
    pub fn dead_letters(&self, id: impl Into<ProjectionId>) -> Vec<DeadLetter> {
        self.lock().rows.get(&id.into()).map_or_else(Vec::new, |row| row.dead_letters.clone())
    }

    /// Changes the checkpoint behind the engine's back, as someone does who restores a row.
    ///
    /// # Panics
    /// When there is none.
    pub fn edit_checkpoint(&self, id: impl Into<ProjectionId>, edit: impl FnOnce(&mut Checkpoint)) {
        let id = id.into();
        match self.lock().rows.get_mut(&id) {
            Some(row) => edit(&mut row.checkpoint),
            None => panic!("there is no checkpoint of {id}"),
        }
    }

    /// Removes the checkpoint and everything else of a projection behind the engine's back.
    pub fn remove(&self, id: impl Into<ProjectionId>) {
        self.lock().rows.remove(&id.into());
    }

    /// What the engine did against the contract; empty when all is well.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Store<Op>> {
        self.shared.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reaches a step: counts it, hangs where it is to hang, and says how else it is to fail.
    async fn step(&self, step: TargetStep) -> Option<TargetFault> {
        let released = self.shared.released.notified();
        let fault = self.lock().reach(step);
        if fault == Some(TargetFault::Hang) {
            released.await;
            return None;
        }
        fault
    }

    async fn step_or_fail(&self, step: TargetStep, position: Option<Position>) -> Result<(), TargetError> {
        match self.step(step).await {
            None => Ok(()),
            Some(fault) => Err(fault.error(step, position)),
        }
    }
}

impl<Op: Clone> MemoryTarget<Op> {
    /// The operations applied, with the positions of their events, in the order in which they were applied.
    pub fn applied(&self, id: impl Into<ProjectionId>) -> Vec<(Position, Op)> {
        self.lock().rows.get(&id.into()).map_or_else(Vec::new, |row| row.applied.clone())
    }

    /// All of a projection as of one moment, as a reader in one transaction sees it; `None` where there is no
    /// checkpoint.
    pub fn snapshot(&self, id: impl Into<ProjectionId>) -> Option<Snapshot<Op>> {
        self.lock().rows.get(&id.into()).map(|row| Snapshot {
            checkpoint: row.checkpoint.clone(),
            applied: row.applied.clone(),
            dead_letters: row.dead_letters.clone(),
        })
    }
}

impl TargetFault {
    fn error(self, step: TargetStep, position: Option<Position>) -> TargetError {
        let (class, code) = match self {
            Self::Transient | Self::Ambiguous { .. } | Self::Hang => (FailureClass::TransientServer, "08006"),
            Self::Structural => (FailureClass::Structural, sqlstate::UNDEFINED_TABLE),
            Self::Integrity => (FailureClass::Integrity, "23505"),
        };
        let message = format!("memory target: {self:?} at the step {step:?}, as the test asked for");
        TargetError { code: Some(code.to_owned()), position, ..TargetError::new(class, message) }
    }
}

#[async_trait]
impl<Op: Clone + Send + Sync + 'static> Target<Op> for MemoryTarget<Op> {
    async fn take_over(&self, request: TakeOver<'_>) -> Result<TakenOver<Op>, TakeOverError> {
        self.step_or_fail(TargetStep::TakeOver, None).await?;
        let TakeOver { id, owner, lease, .. } = request;
        let mut store = self.lock();
        if let Some(owner) = owner {
            if let Some(held) = store.other_holder(id, owner) {
                return Err(TakeOverError::Held { holder: held.owner.description.clone() });
            }
            store.hold(id, owner, lease);
        }
        let created = !store.rows.contains_key(id);
        let row = store.rows.entry(id.clone()).or_insert_with(|| Row::new(&request));
        row.checkpoint.epoch += 1;
        Ok(TakenOver {
            checkpoint: row.checkpoint.clone(),
            source: row.source.clone(),
            created,
            committer: Box::new(MemoryCommitter {
                target: self.clone(),
                id: id.clone(),
                epoch: row.checkpoint.epoch,
                unusable: false,
            }),
        })
    }
}

struct MemoryCommitter<Op> {
    target: MemoryTarget<Op>,
    id: ProjectionId,
    epoch: i64,
    /// An error was returned, or a call was dropped half-way.
    unusable: bool,
}

impl<Op: Clone + Send + Sync> MemoryCommitter<Op> {
    fn begin_use(&mut self, id: &ProjectionId, epoch: i64) {
        let mut store = self.target.lock();
        if self.unusable {
            store.violations.push(format!("{id}: a committer is used again after it failed, epoch {epoch}"));
        }
        if (id, epoch) != (&self.id, self.epoch) {
            let own = format!("{}, epoch {}", self.id, self.epoch);
            store.violations.push(format!("{id}, epoch {epoch}: committed by the committer of {own}"));
        }
        self.unusable = true;
    }

    async fn try_commit(&self, batch: &Batch<Op>) -> Result<Committed, CommitError> {
        let target = &self.target;
        target.step_or_fail(TargetStep::Begin, None).await.map_err(CommitError::Failed)?;
        target.step_or_fail(TargetStep::Checkpoint, None).await.map_err(CommitError::Failed)?;
        target.lock().expect(&batch.id, &batch.advance).map_err(CommitError::Fenced)?;
        for entry in &batch.entries {
            let position = Some(entry.meta.position);
            target.step_or_fail(TargetStep::Apply, position).await.map_err(CommitError::Failed)?;
        }
        let step = TargetStep::Commit;
        let fault = target.step(step).await;
        let lost = fault.map(|fault| fault.error(step, None));
        match (fault, lost) {
            // Fenced off meanwhile, or not: the connection is lost all the same.
            (Some(TargetFault::Ambiguous { durable }), Some(error)) => {
                if durable {
                    let _ = target.lock().write(batch);
                }
                Err(CommitError::Ambiguous(error))
            }
            (_, Some(error)) => Err(CommitError::Failed(error)),
            (_, None) => {
                target.lock().write(batch).map_err(CommitError::Fenced)?;
                // Begin, checkpoint, one for each event, commit.
                Ok(Committed { statements: batch.entries.len() as u64 + 3 })
            }
        }
    }
}

#[async_trait]
impl<Op: Clone + Send + Sync + 'static> Committer<Op> for MemoryCommitter<Op> {
    async fn commit(&mut self, batch: &Batch<Op>) -> Result<Committed, CommitError> {
        self.begin_use(&batch.id, batch.advance.epoch);
        let result = self.try_commit(batch).await;
        self.unusable = result.is_err();
        result
    }

    async fn store_replay_position(&mut self, caught_up: Option<Position>) -> Result<(), CommitError> {
        let (id, epoch) = (self.id.clone(), self.epoch);
        self.begin_use(&id, epoch);
        self.target.step_or_fail(TargetStep::ReplayPosition, None).await.map_err(CommitError::Failed)?;
        let mut store = self.target.lock();
        let checkpoint = &mut store.fenced(&id, epoch).map_err(CommitError::Fenced)?.checkpoint;
        if checkpoint.replay == Replay::Ongoing {
            checkpoint.replay = Replay::Over(caught_up);
        }
        drop(store);
        self.unusable = false;
        Ok(())
    }

    async fn store_event_types(&mut self, types: Option<&[&str]>) -> Result<(), CommitError> {
        let (id, epoch) = (self.id.clone(), self.epoch);
        self.begin_use(&id, epoch);
        let mut store = self.target.lock();
        let checkpoint = &mut store.fenced(&id, epoch).map_err(CommitError::Fenced)?.checkpoint;
        checkpoint.event_types = types.map(|types| types.iter().map(|&listed| listed.to_owned()).collect());
        drop(store);
        self.unusable = false;
        Ok(())
    }
}

#[async_trait]
impl<Op: Send + Sync + 'static> Tables for MemoryTarget<Op> {
    async fn check(&self) -> Result<(), TargetError> {
        self.lock().reachable()
    }

    async fn control(&self) -> Result<Box<dyn Control>, TargetError> {
        self.lock().reachable()?;
        Ok(Box::new(MemoryControl(self.clone())))
    }

    async fn stored(&self, id: &ProjectionId) -> Result<Option<StoredProjection>, TargetError> {
        let store = self.lock();
        store.reachable()?;
        Ok(store.stored(id))
    }

    async fn stored_all(&self) -> Result<Vec<StoredProjection>, TargetError> {
        let store = self.lock();
        store.reachable()?;
        Ok(store.rows.keys().filter_map(|id| store.stored(id)).collect())
    }

    async fn dead_letters(&self, id: &ProjectionId, filter: &DeadLetterFilter) -> Result<Vec<DeadLetter>, TargetError> {
        self.lock().reachable()?;
        let mut letters = self.dead_letters(id);
        letters.retain(|letter| lets_through(filter, letter));
        if filter.descending {
            letters.reverse();
        }
        letters.truncate(filter.limit.unwrap_or(100) as usize);
        Ok(letters)
    }

    async fn dead_letter_stats(&self, id: &ProjectionId) -> Result<DeadLetterStats, TargetError> {
        self.lock().reachable()?;
        let letters = self.dead_letters(id);
        let mut kinds = BTreeMap::<_, u64>::new();
        for letter in &letters {
            *kinds.entry(letter.failure.kind.clone()).or_default() += 1;
        }
        let mut by_kind: Vec<_> = kinds.into_iter().collect();
        by_kind.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        Ok(DeadLetterStats {
            total: letters.len() as u64,
            by_kind,
            oldest: letters.iter().map(|letter| letter.failed_at).min(),
            newest: letters.iter().map(|letter| letter.failed_at).max(),
        })
    }
}

fn lets_through(filter: &DeadLetterFilter, letter: &DeadLetter) -> bool {
    let DeadLetterFilter { stream_id, kind, from_position, to_position, since, until, after_id, limit: _, descending } =
        filter;
    stream_id.as_ref().is_none_or(|stream_id| *stream_id == letter.stream_id)
        && kind.as_ref().is_none_or(|kind| *kind == letter.failure.kind)
        && from_position.is_none_or(|from| from <= letter.position)
        && to_position.is_none_or(|to| letter.position <= to)
        && since.is_none_or(|since| since <= letter.failed_at)
        && until.is_none_or(|until| letter.failed_at < until)
        && after_id.is_none_or(|id| if *descending { letter.id < id } else { id < letter.id })
}

struct MemoryControl<Op>(MemoryTarget<Op>);

#[async_trait]
impl<Op: Send + Sync + 'static> Control for MemoryControl<Op> {
    async fn lease(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<LeaseAnswer, TargetError> {
        let mut store = self.0.lock();
        store.reachable()?;
        if let Some(held) = store.other_holder(id, owner) {
            let expires_in = held.expires.saturating_duration_since(Instant::now());
            return Ok(LeaseAnswer::HeldBy { holder: held.owner.description.clone(), expires_in });
        }
        store.hold(id, owner, ttl);
        Ok(LeaseAnswer::Held)
    }

    async fn release(&mut self, id: &ProjectionId, owner: &Owner) -> Result<(), TargetError> {
        let mut store = self.0.lock();
        store.reachable()?;
        if store.leases.get(id).is_some_and(|lease| lease.owner == *owner) {
            store.leases.remove(id);
        }
        Ok(())
    }

    async fn store_state(&mut self, id: &ProjectionId, epoch: i64, state: &StateRecord) -> Result<(), TargetError> {
        let mut store = self.0.lock();
        store.reachable()?;
        if let Ok(row) = store.fenced(id, epoch) {
            row.state = state.clone();
        }
        Ok(())
    }
}
