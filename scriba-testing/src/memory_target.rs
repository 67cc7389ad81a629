//! A target in memory, with failures at chosen steps and an eye on the contract.

mod committer;
mod store;
mod tables;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::checkpoint::Checkpoint;
use scriba_core::dead_letter::DeadLetter;
use scriba_core::target::{TakeOver, TakeOverError, TakenOver, Target, TargetError};
use scriba_core::{FailureClass, Position, ProjectionId, sqlstate};
use tokio::sync::{Notify, OwnedMutexGuard};

use self::committer::MemoryCommitter;
use self::store::{Planned, Row, Store};

/// How long a transaction may be silent where no lease says when others may follow.
const BOUND_WITHOUT_LEASE: Duration = Duration::from_secs(20);

/// How long it may be silent with the shortest lease.
const SHORTEST_BOUND: Duration = Duration::from_secs(2);

/// A target in memory: what was committed is a log of positions and operations. Clones share everything, so a test
/// keeps one to look at and gives the other away.
///
/// It checks the engine while it is used: [`MemoryTarget::violations`] is empty as long as the watermark only moves
/// forwards, every event is applied once and in the order of positions, and the counts are those of the batches.
///
/// A statement of a reset, whatever it says, empties the log of operations.
///
/// Leases go by `tokio::time`, so they follow a paused clock, though only on the runtime whose clock is paused.
///
/// A commit holds the row of its checkpoint from [`TargetStep::Checkpoint`] to its end, as on Postgres: a take-over, a reset and a commit of
/// another owner wait for it, and renewals of the lease do not. One that hangs gives the row up when it is released or dropped,
/// and otherwise when the server would end it, after two thirds of the lease (at least 2 s, and 20 s without a lease); it fails then.
///
/// Not simulated: operations are kept and not carried out, so there are no constraints, types or rows, but for what
/// [`MemoryTarget::judging`] says, and a change that hits no row counts as one; no two projections wait for each other, since
/// they share no rows; no lock runs into its timeout; a connection is never lost on its own; nothing outlives the process.
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

/// The steps of a take-over, of a commit and of a reset, in order.
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
    /// The event types are stored.
    EventTypes,
    /// A statement of a reset.
    Statement,
}

/// How a step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetFault {
    /// The connection is lost.
    Transient,
    /// A lock is not to be had.
    Locked,
    /// A table is missing.
    Structural,
    /// A unique constraint is violated: at [`TargetStep::Apply`] by the operations of an event, which becomes a dead letter.
    Integrity,
    /// The connection is lost after COMMIT was sent; at other steps than [`TargetStep::Commit`] the same as
    /// [`TargetFault::Transient`].
    Ambiguous {
        /// Whether the commit came to be durable all the same.
        durable: bool,
    },
    /// The connection is lost after COMMIT was sent, and the server comes to it only when the next take-over or reset waits for it:
    /// until then nothing of it is to be seen, and then it is durable. At other steps the same as [`TargetFault::Transient`].
    Late,
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

/// How the database fails at an operation.
type Judge<Op> = Box<dyn Fn(&Op) -> Option<TargetFault> + Send + Sync>;

struct Shared<Op> {
    store: Mutex<Store<Op>>,
    judge: Option<Judge<Op>>,
    released: Notify,
    /// Steps that hang.
    hanging: AtomicUsize,
}

/// A step that hangs, until it goes on or is dropped.
struct Hanging<'a>(&'a AtomicUsize);

impl<'a> Hanging<'a> {
    fn new(hanging: &'a AtomicUsize) -> Self {
        hanging.fetch_add(1, Ordering::SeqCst);
        Self(hanging)
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<Op> Clone for MemoryTarget<Op> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<Op> Default for MemoryTarget<Op> {
    fn default() -> Self {
        Self::with(None)
    }
}

impl<Op> MemoryTarget<Op> {
    /// With nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// With nothing in it, and operations that fail: for each one `judge` says how, if it does, as the database's constraints
    /// and types do. An event with an operation that is answered with [`TargetFault::Integrity`] becomes a dead letter;
    /// any other answer fails the batch as it does at [`TargetStep::Apply`], and [`TargetFault::Hang`] as a lost connection.
    pub fn judging(judge: impl Fn(&Op) -> Option<TargetFault> + Send + Sync + 'static) -> Self {
        Self::with(Some(Box::new(judge)))
    }

    fn with(judge: Option<Judge<Op>>) -> Self {
        let (store, released, hanging) = (Mutex::default(), Notify::new(), AtomicUsize::new(0));
        Self { shared: Arc::new(Shared { store, judge, released, hanging }) }
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

    /// Steps that hang now.
    pub fn hanging(&self) -> usize {
        self.shared.hanging.load(Ordering::SeqCst)
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

    fn judge(&self, ops: &[Op]) -> Option<TargetFault> {
        ops.iter().find_map(self.shared.judge.as_ref()?)
    }

    /// Waits for the row of a checkpoint, which is the caller's until the guard is dropped.
    async fn row_lock(&self, id: &ProjectionId) -> OwnedMutexGuard<()> {
        let lock = Arc::clone(self.lock().locks.entry(id.clone()).or_default());
        lock.lock_owned().await
    }

    fn lock(&self) -> MutexGuard<'_, Store<Op>> {
        self.shared.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reaches a step: counts it, hangs where it is to hang, and says how else it is to fail.
    async fn step(&self, step: TargetStep) -> Option<TargetFault> {
        let released = self.shared.released.notified();
        let fault = self.lock().reach(step);
        if fault == Some(TargetFault::Hang) {
            let _hanging = Hanging::new(&self.shared.hanging);
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
            Self::Transient | Self::Ambiguous { .. } | Self::Late | Self::Hang => {
                (FailureClass::TransientServer, "08006")
            }
            Self::Locked => (FailureClass::TransientStatement, sqlstate::LOCK_NOT_AVAILABLE),
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
        if let Some(holder) = owner.and_then(|owner| self.lock().holder_instead_of(id, owner)) {
            return Err(TakeOverError::Held { holder });
        }
        let _row = self.row_lock(id).await;
        let mut store = self.lock();
        store.land(id);
        if let Some(owner) = owner {
            if let Some(holder) = store.holder_instead_of(id, owner) {
                return Err(TakeOverError::Held { holder });
            }
            store.hold(id, owner, lease);
        }
        let created = store.rows.get(id).is_none_or(|row| row.reset);
        let row = store.rows.entry(id.clone()).or_insert_with(|| Row::new(&request));
        if row.reset {
            row.begin_anew(&request);
        }
        row.checkpoint.epoch += 1;
        Ok(TakenOver {
            checkpoint: row.checkpoint.clone(),
            source: row.source.clone(),
            created,
            committer: Box::new(MemoryCommitter {
                target: self.clone(),
                id: id.clone(),
                epoch: row.checkpoint.epoch,
                bound: owner.map_or(BOUND_WITHOUT_LEASE, |_| (lease * 2 / 3).max(SHORTEST_BOUND)),
                unusable: false,
            }),
        })
    }
}
