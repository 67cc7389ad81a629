//! What commits to the memory target: one transaction of a batch, step by step.

use std::pin::pin;
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::checkpoint::Replay;
use scriba_core::target::{Account, Batch, CommitError, Committed, Committer, Entry, TargetError, Write};
use scriba_core::{FailureClass, Position, ProjectionId, sqlstate};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use super::{Hanging, MemoryTarget, TargetFault, TargetStep};

pub(super) struct MemoryCommitter<Op> {
    pub(super) target: MemoryTarget<Op>,
    pub(super) id: ProjectionId,
    pub(super) epoch: i64,
    /// How long a transaction may be silent before it is ended.
    pub(super) bound: Duration,
    /// An error was returned, or a call was dropped half-way.
    pub(super) unusable: bool,
}

/// A transaction that holds the checkpoint's row until it ends, however it ends.
struct Transaction<'a, Op> {
    target: &'a MemoryTarget<Op>,
    /// `None` when it was silent for so long that it was ended.
    row: Option<OwnedMutexGuard<()>>,
    bound: Duration,
}

impl<Op> Transaction<'_, Op> {
    /// Reaches a step. A step that hangs for longer than the bound goes on in a transaction that is no more.
    async fn step(&mut self, step: TargetStep, position: Option<Position>) -> Result<Option<TargetFault>, TargetError> {
        let mut released = pin!(self.target.shared.released.notified());
        let fault = self.target.lock().reach(step);
        if fault != Some(TargetFault::Hang) {
            return Ok(fault);
        }
        let _hanging = Hanging::new(&self.target.shared.hanging);
        if timeout(self.bound, &mut released).await.is_ok() {
            return Ok(None);
        }
        self.row = None;
        released.await;
        let code = sqlstate::IDLE_IN_TRANSACTION_SESSION_TIMEOUT.to_owned();
        let message = format!("memory target: the transaction was ended at the step {step:?}, after {:?}", self.bound);
        Err(TargetError { code: Some(code), position, ..TargetError::new(FailureClass::TransientServer, message) })
    }
}

impl<Op: Clone + Send + Sync + 'static> MemoryCommitter<Op> {
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

    /// Waits for the row, which it holds from then on.
    async fn begin(&self, step: TargetStep) -> Result<Transaction<'_, Op>, CommitError> {
        let target = &self.target;
        target.step_or_fail(step, None).await.map_err(CommitError::Failed)?;
        let row = target.row_lock(&self.id).await;
        Ok(Transaction { target, row: Some(row), bound: self.bound })
    }

    async fn try_commit(&self, batch: &Batch<Op>) -> Result<Committed, CommitError> {
        let target = &self.target;
        let mut transaction = self.begin(TargetStep::Begin).await?;
        let step = TargetStep::Checkpoint;
        if let Some(fault) = transaction.step(step, None).await.map_err(CommitError::Failed)? {
            return Err(CommitError::Failed(fault.error(step, None)));
        }
        target.lock().expect(&batch.id, &batch.advance).map_err(CommitError::Fenced)?;
        let (account, isolated) = self.apply(&mut transaction, batch).await?;
        let step = TargetStep::Commit;
        let fault = transaction.step(step, None).await.map_err(CommitError::Failed)?;
        let lost = fault.map(|fault| fault.error(step, None));
        let mut store = target.lock();
        match (fault, lost) {
            // Fenced off meanwhile, or not: the connection is lost all the same.
            (Some(TargetFault::Ambiguous { durable }), Some(error)) => {
                if durable {
                    let _ = store.write(batch, &account);
                }
                Err(CommitError::Ambiguous(error))
            }
            (Some(TargetFault::Late), Some(error)) => {
                store.late.push((batch.clone(), account));
                Err(CommitError::Ambiguous(error))
            }
            (_, Some(error)) => Err(CommitError::Failed(error)),
            (_, None) => {
                store.write(batch, &account).map_err(CommitError::Fenced)?;
                // Begin, checkpoint, one for each event, commit.
                Ok(Committed { isolated, ..account.committed(batch.entries.len() as u64 + 3) })
            }
        }
    }

    /// What becomes of each event, and the first refusal.
    async fn apply(
        &self,
        transaction: &mut Transaction<'_, Op>,
        batch: &Batch<Op>,
    ) -> Result<(Account, Option<TargetError>), CommitError> {
        let (mut account, mut isolated) = (batch.account(), None);
        let step = TargetStep::Apply;
        for Entry { meta, write } in &batch.entries {
            let judged = match write {
                Write::Skip => {
                    account.skipped();
                    continue;
                }
                Write::Apply(outcome) => self.target.judge(outcome.ops()),
                Write::DeadLetter(_) => None,
            };
            let position = Some(meta.position);
            let fault = transaction.step(step, position).await.map_err(CommitError::Failed)?.or(judged);
            match (write, fault.map(|fault| fault.error(step, position))) {
                (Write::Skip, _) => {}
                (Write::Apply(_), None) => account.applied(true),
                (Write::Apply(_), Some(error)) if error.class == FailureClass::Integrity => {
                    account.refused(meta, &error).map_err(CommitError::HaltBefore)?;
                    isolated.get_or_insert(error);
                }
                (Write::DeadLetter(failure), None) => {
                    account.dead_lettered(meta, failure).map_err(CommitError::HaltBefore)?;
                }
                (_, Some(error)) => return Err(CommitError::Failed(error)),
            }
        }
        Ok((account, isolated))
    }
}

#[async_trait]
impl<Op: Clone + Send + Sync + 'static> Committer<Op> for MemoryCommitter<Op> {
    async fn commit(&mut self, batch: &Batch<Op>) -> Result<Committed, CommitError> {
        self.begin_use(&batch.id, batch.advance.epoch);
        let result = self.try_commit(batch).await;
        self.unusable = !matches!(result, Ok(_) | Err(CommitError::HaltBefore(_)));
        result
    }

    async fn store_replay_position(&mut self, caught_up: Option<Position>) -> Result<(), CommitError> {
        let (id, epoch) = (self.id.clone(), self.epoch);
        self.begin_use(&id, epoch);
        let transaction = self.begin(TargetStep::ReplayPosition).await?;
        let mut store = self.target.lock();
        let checkpoint = &mut store.fenced(&id, epoch).map_err(CommitError::Fenced)?.checkpoint;
        if checkpoint.replay == Replay::Ongoing {
            checkpoint.replay = Replay::Over(caught_up);
        }
        drop(store);
        drop(transaction);
        self.unusable = false;
        Ok(())
    }

    async fn store_event_types(&mut self, types: Option<&[&str]>) -> Result<(), CommitError> {
        let (id, epoch) = (self.id.clone(), self.epoch);
        self.begin_use(&id, epoch);
        let transaction = self.begin(TargetStep::EventTypes).await?;
        let mut store = self.target.lock();
        let checkpoint = &mut store.fenced(&id, epoch).map_err(CommitError::Fenced)?.checkpoint;
        checkpoint.event_types = types.map(|types| types.iter().map(|&listed| listed.to_owned()).collect());
        drop(store);
        drop(transaction);
        self.unusable = false;
        Ok(())
    }
}
