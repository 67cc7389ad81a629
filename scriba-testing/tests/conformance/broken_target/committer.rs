//! The memory target's committer behind something that breaks it.

use std::sync::Arc;

use async_trait::async_trait;
use scriba_core::checkpoint::Replay;
use scriba_core::target::{Batch, CommitError, Committed, Committer, Entry, Shortfall, Write};
use scriba_core::{OnPoison, Outcome, Position, ProjectionId};

use super::Break;
use super::bed::Shared;
use crate::target::Op;

pub(super) struct BrokenCommitter {
    pub(super) id: ProjectionId,
    pub(super) memory: Box<dyn Committer<Op>>,
    pub(super) shared: Arc<Shared>,
}

/// The operations that a store can carry out.
fn ops(batch: &Batch<Op>) -> Vec<Op> {
    let mut ops = Vec::new();
    for Entry { write, .. } in &batch.entries {
        if let Write::Apply(outcome) = write {
            ops.extend(outcome.ops().iter().filter(|op| !matches!(op, Op::Refused | Op::Failing)));
        }
    }
    ops
}

fn is_dead(entry: &Entry<Op>) -> bool {
    matches!(entry.write, Write::DeadLetter(_))
}

impl BrokenCommitter {
    fn spoil(&self, batch: &mut Batch<Op>) {
        let stored = self.shared.memory.checkpoint(self.id.clone()).map_or(0, |checkpoint| checkpoint.commit_no);
        let expected = &mut batch.advance.expected_commit_no;
        let entries = &mut batch.entries;
        if self.shared.is(Break::SmallerNumbersCommit) {
            *expected = stored.max(*expected);
        } else if self.shared.is(Break::LargerNumbersCommit) {
            *expected = stored.min(*expected);
        } else if self.shared.is(Break::LosesALastDeadLetter) {
            let behind_operations =
                matches!(&entries[..], [.., Entry { write: Write::Apply(_), .. }, last] if is_dead(last));
            if *expected == 1 && behind_operations {
                entries.pop();
            }
        } else if self.shared.is(Break::ReversesOperationsOfAnEvent) {
            for entry in entries {
                if let Write::Apply(outcome) = &mut entry.write {
                    *outcome = Outcome::all_or_skip(outcome.ops().iter().rev().copied());
                }
            }
        } else if self.shared.is(Break::CircuitStaysClosed) {
            let in_row = &mut batch.policy.circuit.in_row;
            *in_row = if *in_row > 0 { u32::MAX } else { 0 };
        } else if self.shared.is(Break::NeverHalts) {
            batch.policy.on_poison = OnPoison::DeadLetter;
        }
    }

    /// What is wrong with a commit that failed.
    fn spoil_failure(&self, batch: &Batch<Op>, error: &CommitError) {
        let wrong = match error {
            CommitError::Failed(_) => self.shared.is(Break::KeepsWhatCameBeforeAFailure),
            CommitError::Fenced(Shortfall::OtherEpoch { .. }) => {
                self.shared.is(Break::WritesBeforeItIsFenced) && batch.entries.iter().any(is_dead)
            }
            _ => false,
        };
        if wrong {
            self.shared.loose.lock().unwrap().extend(ops(batch));
        }
    }

    /// What is wrong with a commit that succeeded.
    fn spoil_success(&self, batch: &Batch<Op>, committed: &mut Committed) {
        let (shared, entries) = (&self.shared, &batch.entries);
        if shared.is(Break::DoesNotTellWhatItRefused) {
            committed.refused.clear();
        }
        for Entry { meta, write } in entries {
            if let Write::DeadLetter(failure) = write {
                let mut first = shared.first.lock().unwrap();
                first.entry((self.id.clone(), meta.position)).or_insert_with(|| failure.clone());
            }
        }
        let only_skips = !entries.is_empty() && entries.iter().all(|entry| matches!(entry.write, Write::Skip));
        shared.memory.edit_checkpoint(self.id.clone(), |checkpoint| {
            if shared.is(Break::SkipsAloneAreNotCounted) && only_skips {
                checkpoint.counts.skipped -= entries.len() as u64;
            }
            if shared.is(Break::ProgressForgetsTheLastEvent) && entries.is_empty() {
                checkpoint.last_event = None;
            }
        });
    }
}

#[async_trait]
impl Committer<Op> for BrokenCommitter {
    async fn commit(&mut self, batch: &Batch<Op>) -> Result<Committed, CommitError> {
        let mut batch = batch.clone();
        self.spoil(&mut batch);
        if self.shared.is(Break::WritesBeforeItCommits) {
            self.shared.loose.lock().unwrap().extend(ops(&batch));
            tokio::task::yield_now().await;
            self.shared.loose.lock().unwrap().clear();
        }
        match self.memory.commit(&batch).await {
            Ok(mut committed) => {
                self.spoil_success(&batch, &mut committed);
                Ok(committed)
            }
            Err(error) => {
                self.spoil_failure(&batch, &error);
                Err(error)
            }
        }
    }

    async fn store_replay_position(&mut self, caught_up: Option<Position>) -> Result<(), CommitError> {
        let empty = caught_up.is_none() && self.shared.is(Break::AnEmptySourceIsPositionZero);
        let caught_up = if empty { Some(Position::new(0)) } else { caught_up };
        let stored = self.memory.store_replay_position(caught_up).await;
        let anyone = stored.is_err() && self.shared.is(Break::AnyoneStoresReplayPositions);
        if anyone || self.shared.is(Break::ReplayPositionMoves) && stored.is_ok() {
            let moves =
                |checkpoint: &mut scriba_core::checkpoint::Checkpoint| checkpoint.replay = Replay::Over(caught_up);
            self.shared.memory.edit_checkpoint(self.id.clone(), moves);
        }
        stored
    }

    async fn store_event_types(&mut self, types: Option<&[&str]>) -> Result<(), CommitError> {
        let types = types.filter(|types| !types.is_empty() || !self.shared.is(Break::NoTypesAreAll));
        let stored = self.memory.store_event_types(types).await;
        if stored.is_err() && self.shared.is(Break::AnyoneStoresEventTypes) {
            let types = types.map(|types| types.iter().map(|&one| one.to_owned()).collect());
            self.shared.memory.edit_checkpoint(self.id.clone(), |checkpoint| checkpoint.event_types = types);
        }
        stored
    }
}
