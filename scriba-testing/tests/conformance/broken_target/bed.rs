//! The memory target behind something that breaks it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::TimeDelta;
use scriba_core::checkpoint::Checkpoint;
use scriba_core::circuit::DeadLettersInRow;
use scriba_core::dead_letter::{DeadLetter, Failure};
use scriba_core::target::{
    Control, DeadLetterFilter, DeadLetterStats, LeaseAnswer, Owner, Reset, ResetCounts, ResetRefused, StateRecord,
    StoredProjection, Tables, TakeOver, TakeOverError, TakenOver, Target, TargetError,
};
use scriba_core::{FailureClass, Position, ProjectionId};
use scriba_testing::MemoryTarget;
use scriba_testing::conformance::target::{Hold, Statements, TargetBed};
use tokio::time::sleep;

use super::committer::BrokenCommitter;
use super::{BREAK, Break};
use crate::target::{MemoryBed, Op, values};

/// The memory bed, with a target that breaks what [`BREAK`] says.
pub(crate) struct BrokenBed {
    memory: MemoryBed,
    shared: Arc<Shared>,
}

/// What a broken store keeps.
pub(super) struct Shared {
    pub(super) memory: MemoryTarget<Op>,
    broken: Break,
    /// Operations that are to be seen without having been committed.
    pub(super) loose: Mutex<Vec<Op>>,
    emptied: AtomicBool,
    take_overs: AtomicU64,
    claimed: AtomicBool,
    reset: AtomicBool,
    holders: Mutex<HashMap<ProjectionId, Owner>>,
    /// What each dead letter was first written with.
    pub(super) first: Mutex<HashMap<(ProjectionId, Position), Failure>>,
}

impl Shared {
    pub(super) fn is(&self, broken: Break) -> bool {
        self.broken == broken
    }
}

#[async_trait]
impl TargetBed for BrokenBed {
    type Op = Op;

    async fn new() -> Self {
        let memory = MemoryBed::new().await;
        let shared = Shared {
            memory: memory.0.clone(),
            broken: BREAK.get(),
            loose: Mutex::default(),
            emptied: AtomicBool::new(false),
            take_overs: AtomicU64::new(0),
            claimed: AtomicBool::new(false),
            reset: AtomicBool::new(false),
            holders: Mutex::default(),
            first: Mutex::default(),
        };
        Self { memory, shared: Arc::new(shared) }
    }

    async fn target(&self) -> Arc<dyn Target<Op>> {
        Arc::new(BrokenTarget(self.shared.clone()))
    }

    fn write(&self, key: i64, value: i64) -> Op {
        self.memory.write(key, value)
    }

    fn add(&self, key: i64, value: i64) -> Op {
        self.memory.add(key, value)
    }

    fn refused(&self) -> Op {
        self.memory.refused()
    }

    fn failing(&self) -> Op {
        self.memory.failing()
    }

    async fn read(&self) -> Vec<(i64, i64)> {
        if self.shared.emptied.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let applied = self.shared.memory.applied("conformance").into_iter().map(|(_, op)| op);
        values(applied.chain(self.shared.loose.lock().unwrap().iter().copied()))
    }
}

impl Statements for BrokenBed {
    fn empties(&self) -> String {
        self.memory.empties()
    }

    fn fails(&self) -> String {
        self.memory.fails()
    }
}

#[async_trait]
impl Hold for BrokenBed {
    type Held = ();

    async fn hold(&self) -> (Op, ()) {
        self.memory.hold().await
    }

    async fn let_go(&self, (): ()) {
        self.memory.let_go(()).await;
    }
}

struct BrokenTarget(Arc<Shared>);

fn broken() -> TargetError {
    TargetError::new(FailureClass::Structural, "broken")
}

impl BrokenTarget {
    /// The take-over of the memory target, and what becomes of the lease it asks for.
    async fn taken(&self, mut request: TakeOver<'_>) -> Result<TakenOver<Op>, TakeOverError> {
        let Self(shared) = self;
        if shared.is(Break::TakeOverDoesNotRenew) {
            request.lease /= 60;
        }
        let held = match shared.memory.take_over(request.clone()).await {
            Err(TakeOverError::Held { holder }) => holder,
            other => return other,
        };
        let released = held.starts_with("nobody");
        if let Some(owner) = request.owner.filter(|_| released && shared.is(Break::TakesAReleasedLease)) {
            shared.memory.control().await?.lease(request.id, owner, request.lease).await?;
            return shared.memory.take_over(request).await;
        }
        if !released && shared.is(Break::TakesOverWithoutTheLease) {
            return shared.memory.take_over(TakeOver { owner: None, ..request }).await;
        }
        Err(TakeOverError::Held { holder: held })
    }
}

#[async_trait]
impl Target<Op> for BrokenTarget {
    async fn take_over(&self, request: TakeOver<'_>) -> Result<TakenOver<Op>, TakeOverError> {
        let Self(shared) = self;
        if shared.claimed.load(Ordering::Relaxed) {
            return Err(broken().into());
        }
        if shared.is(Break::ClaimSurvivesADroppedTakeOver) {
            shared.claimed.store(true, Ordering::Relaxed);
            tokio::task::yield_now().await;
            shared.claimed.store(false, Ordering::Relaxed);
        }
        let before = shared.memory.checkpoint(request.id.clone());
        let mut taken = self.taken(request.clone()).await?;
        let number = shared.take_overs.fetch_add(1, Ordering::Relaxed);
        let checkpoint = &mut taken.checkpoint;
        match shared.broken {
            Break::EpochsRepeat if number > 2 => {
                checkpoint.epoch -= 1;
                let epoch = checkpoint.epoch;
                shared.memory.edit_checkpoint(request.id.clone(), |checkpoint| checkpoint.epoch = epoch);
            }
            Break::NothingIsCreated => taken.created &= shared.reset.load(Ordering::Relaxed),
            Break::TellsTheSourceItWasAskedWith => taken.source = request.source.clone(),
            Break::LastEventAtZeroIsNone => drop(checkpoint.last_event.take_if(|last| last.position.get() == 0)),
            Break::ForgetsDeadLettersInARow => checkpoint.in_row = DeadLettersInRow::default(),
            Break::AlwaysAnewOnceReset => taken.created |= shared.reset.load(Ordering::Relaxed),
            Break::ReadsBeforeItWaits if !taken.created => {
                let epoch = checkpoint.epoch;
                *checkpoint = before.map_or_else(|| checkpoint.clone(), |before| Checkpoint { epoch, ..before });
            }
            _ => {}
        }
        let committer = BrokenCommitter { id: request.id.clone(), memory: taken.committer, shared: shared.clone() };
        Ok(TakenOver { committer: Box::new(committer), ..taken })
    }
}

#[async_trait]
impl Tables for BrokenTarget {
    async fn check(&self) -> Result<(), TargetError> {
        if self.0.is(Break::Check) { Err(broken()) } else { self.0.memory.check().await }
    }

    async fn control(&self) -> Result<Box<dyn Control>, TargetError> {
        Ok(Box::new(BrokenControl { memory: self.0.memory.control().await?, shared: self.0.clone() }))
    }

    async fn stored(&self, id: &ProjectionId) -> Result<Option<StoredProjection>, TargetError> {
        let Self(shared) = self;
        let mut id = id.clone();
        if shared.is(Break::ShortVersions) {
            id.version &= 0xffff;
        }
        let mut stored = shared.memory.stored(&id).await?;
        let last = stored.as_mut().and_then(|stored| stored.checkpoint.last_event.as_mut());
        if let Some(last) = last.filter(|_| shared.is(Break::ShortIdsOfLastEvents)) {
            last.id = short(last.id.as_str()).into();
        }
        if let Some(stored) = stored.as_mut().filter(|_| shared.is(Break::OneStandbyAtMost)) {
            stored.standbys.truncate(1);
        }
        Ok(stored)
    }

    async fn stored_all(&self) -> Result<Vec<StoredProjection>, TargetError> {
        let mut all = self.0.memory.stored_all().await?;
        if self.0.is(Break::VersionsSortAsText) {
            all.sort_by_key(|stored| (stored.id.name.clone(), stored.id.version.to_string()));
        }
        Ok(all)
    }

    async fn dead_letters(&self, id: &ProjectionId, filter: &DeadLetterFilter) -> Result<Vec<DeadLetter>, TargetError> {
        let Self(shared) = self;
        let mut filter = filter.clone();
        let (stream, kind) = (filter.stream_id.clone(), filter.kind.clone());
        match shared.broken {
            Break::StreamsByPrefix => filter.stream_id = None,
            Break::KindsByPattern => filter.kind = None,
            Break::ToPositionIsExclusive => {
                if let Some(to) = filter.to_position.map(Position::get) {
                    match to.checked_sub(1) {
                        Some(to) => filter.to_position = Some(Position::new(to)),
                        None => return Ok(Vec::new()),
                    }
                }
            }
            Break::UntilIsInclusive => filter.until = filter.until.map(|until| until + TimeDelta::nanoseconds(1)),
            Break::NoPagesBackwards if filter.descending => filter.after = None,
            _ => {}
        }
        let mut letters = Tables::dead_letters(&shared.memory, id, &filter).await?;
        letters.retain(|letter| {
            let of_stream = stream.as_ref().is_none_or(|stream| letter.stream_id.as_str().starts_with(stream.as_str()));
            of_stream && kind.as_ref().is_none_or(|kind| letter.failure.kind.starts_with(kind.trim_end_matches('%')))
        });
        for letter in &mut letters {
            self.spoil(id, letter);
        }
        Ok(letters)
    }

    async fn dead_letter_stats(&self, id: &ProjectionId) -> Result<DeadLetterStats, TargetError> {
        let mut stats = self.0.memory.dead_letter_stats(id).await?;
        if self.0.is(Break::KindsByName) {
            stats.by_kind.sort();
        }
        Ok(stats)
    }

    async fn reset(&self, id: &ProjectionId, reset: &Reset) -> Result<ResetCounts, ResetRefused> {
        let Self(shared) = self;
        let before = shared.memory.checkpoint(id.clone());
        let mut wanted = reset.clone();
        match shared.broken {
            Break::ResetDeletesAllDeadLetters => wanted.dead_letters = true,
            Break::RunsNoStatements if reset.statements.len() == 1 => wanted.statements.clear(),
            _ => {}
        }
        let mut counts = match (shared.broken, shared.memory.reset(id, &wanted).await) {
            (Break::ResetsWhileHeld, Err(ResetRefused::Held { .. }))
            | (Break::ResetsWhileStoodBy, Err(ResetRefused::StoodBy { .. }))
            | (Break::ResetsWhileItMayRun, Err(ResetRefused::MayRun { .. })) => ResetCounts::default(),
            (Break::StatementsAreNotUndone, Err(refused @ ResetRefused::Target(_))) => {
                shared.emptied.store(true, Ordering::Relaxed);
                return Err(refused);
            }
            (_, reset) => reset?,
        };
        shared.reset.store(true, Ordering::Relaxed);
        if !reset.dead_letters {
            counts.dead_letters = 0;
        }
        let Some(before) = before else { return Ok(counts) };
        let keeps_the_epoch = match shared.broken {
            Break::ResetKeepsTheEpoch => before.commit_no > 0,
            Break::ResetOfNothingKeepsTheEpoch => before.commit_no == 0,
            _ => false,
        };
        shared.memory.edit_checkpoint(id.clone(), |checkpoint| {
            if keeps_the_epoch {
                checkpoint.epoch = before.epoch;
            }
            if shared.is(Break::ResetKeepsTheLastEvent) {
                checkpoint.last_event = before.last_event;
            }
        });
        Ok(counts)
    }
}

impl BrokenTarget {
    fn spoil(&self, id: &ProjectionId, letter: &mut DeadLetter) {
        match self.0.broken {
            Break::NoTimes => letter.occurred_at = None,
            Break::LossyUtf8 => letter.data = Bytes::from(String::from_utf8_lossy(&letter.data).into_owned()),
            Break::ShortIds => letter.stream_id = short(letter.stream_id.as_str()).into(),
            Break::KeepsTheFirstDeadLetter => {
                let first = self.0.first.lock().unwrap();
                let first = first.get(&(id.clone(), letter.position));
                letter.failure = first.unwrap_or(&letter.failure).clone();
            }
            Break::EndsAtNul => {
                let end = letter.stream_id.as_str().split('\0').next().unwrap_or_default().to_owned();
                letter.stream_id = end.into();
            }
            _ => {}
        }
    }
}

fn short(text: &str) -> String {
    text.chars().take(255).collect()
}

struct BrokenControl {
    memory: Box<dyn Control>,
    shared: Arc<Shared>,
}

#[async_trait]
impl Control for BrokenControl {
    async fn lease(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<LeaseAnswer, TargetError> {
        let shared = &self.shared;
        while shared.is(Break::LeaseWaitsForACommit) && shared.memory.hanging() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
        let own = shared.holders.lock().unwrap().get(id) == Some(owner);
        if own && shared.is(Break::DoesNotRenew) {
            return Ok(LeaseAnswer::Held);
        }
        let ttl = if shared.is(Break::LeasesNeverLapse) { ttl.max(Duration::from_mins(1)) } else { ttl };
        let mut answer = self.memory.lease(id, owner, ttl).await?;
        match &mut answer {
            LeaseAnswer::Held => drop(shared.holders.lock().unwrap().insert(id.clone(), owner.clone())),
            LeaseAnswer::HeldBy { holder, .. } if shared.is(Break::TellsNobodyTheHolder) => holder.clear(),
            LeaseAnswer::HeldBy { .. } => {}
        }
        Ok(answer)
    }

    async fn seize(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<(), TargetError> {
        if self.shared.is(Break::SeizesAFreeLeaseOnly) {
            return self.lease(id, owner, ttl).await.map(drop);
        }
        self.shared.holders.lock().unwrap().insert(id.clone(), owner.clone());
        self.memory.seize(id, owner, ttl).await
    }

    async fn release(&mut self, id: &ProjectionId, owner: &Owner) -> Result<(), TargetError> {
        let holder = self.shared.holders.lock().unwrap().get(id).cloned();
        if let Some(holder) = holder.filter(|_| self.shared.is(Break::AnyoneReleases)) {
            self.memory.release(id, &holder).await?;
        }
        self.memory.release(id, owner).await
    }

    async fn store_state(&mut self, id: &ProjectionId, epoch: i64, state: &StateRecord) -> Result<bool, TargetError> {
        let mut state = state.clone();
        if self.shared.is(Break::ForgetsTheHaltCode) {
            state.halt_code = None;
        }
        Ok(self.memory.store_state(id, epoch, &state).await? || self.shared.is(Break::AnyoneStoresStates))
    }
}
