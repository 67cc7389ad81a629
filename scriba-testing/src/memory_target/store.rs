//! What the memory target keeps, and what it finds wrong with a batch.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::Utc;
use scriba_core::checkpoint::{Advance, Checkpoint};
use scriba_core::dead_letter::{DeadLetter, NewDeadLetter};
use scriba_core::source::SourceIdentity;
use scriba_core::target::{
    Batch, Owner, Shortfall, StateRecord, StoredLease, StoredProjection, TakeOver, TargetError, Write,
};
use scriba_core::{FailureClass, Position, ProjectionId, State};
use tokio::time::Instant;

use super::{TargetFault, TargetStep};

pub(super) struct Store<Op> {
    pub(super) rows: BTreeMap<ProjectionId, Row<Op>>,
    /// Apart from the rows, because a lease comes before the checkpoint.
    pub(super) leases: BTreeMap<ProjectionId, Lease>,
    pub(super) next_dead_letter: i64,
    /// Steps reached so far.
    pub(super) steps: u64,
    pub(super) faults: Vec<Planned>,
    pub(super) outage: bool,
    pub(super) violations: Vec<String>,
}

pub(super) struct Row<Op> {
    pub(super) checkpoint: Checkpoint,
    pub(super) source: SourceIdentity,
    pub(super) state: StateRecord,
    pub(super) applied: Vec<(Position, Op)>,
    pub(super) dead_letters: Vec<DeadLetter>,
    pub(super) commits: u64,
    /// The highest position that left something here, whatever became of the checkpoint.
    pub(super) highest: Option<Position>,
}

pub(super) struct Lease {
    pub(super) owner: Owner,
    pub(super) expires: Instant,
}

pub(super) struct Planned {
    /// `None` for any step.
    pub(super) step: Option<TargetStep>,
    pub(super) left: u64,
    pub(super) fault: TargetFault,
}

impl<Op> Default for Store<Op> {
    fn default() -> Self {
        Self {
            rows: BTreeMap::new(),
            leases: BTreeMap::new(),
            next_dead_letter: 1,
            steps: 0,
            faults: Vec::new(),
            outage: false,
            violations: Vec::new(),
        }
    }
}

impl<Op> Store<Op> {
    /// Counts a step and says how it is to fail, if it is.
    pub(super) fn reach(&mut self, step: TargetStep) -> Option<TargetFault> {
        self.steps += 1;
        let mut due = None;
        self.faults.retain_mut(|planned| {
            if planned.step.is_none_or(|wanted| wanted == step) {
                planned.left -= 1;
                if planned.left == 0 {
                    due = Some(planned.fault);
                }
            }
            planned.left > 0
        });
        if self.outage { Some(TargetFault::Transient) } else { due }
    }

    pub(super) fn reachable(&self) -> Result<(), TargetError> {
        if self.outage {
            return Err(TargetError::new(FailureClass::TransientServer, "memory target: the test asked for an outage"));
        }
        Ok(())
    }

    /// The row, if `epoch` is still the projection's.
    pub(super) fn fenced(&mut self, id: &ProjectionId, epoch: i64) -> Result<&mut Row<Op>, Shortfall> {
        let row = self.rows.get_mut(id).ok_or(Shortfall::Missing)?;
        let found = row.checkpoint.epoch;
        if found == epoch { Ok(row) } else { Err(Shortfall::OtherEpoch { found, ours: epoch }) }
    }

    /// The row, if it is exactly as the owner of an advance left it.
    pub(super) fn expect(&mut self, id: &ProjectionId, advance: &Advance) -> Result<&mut Row<Op>, Shortfall> {
        let Advance { epoch, expected_commit_no: expected, .. } = *advance;
        let row = self.fenced(id, epoch)?;
        let found = row.checkpoint.commit_no;
        if found == expected { Ok(row) } else { Err(Shortfall::OtherCommit { found, expected, epoch }) }
    }

    /// The holder of a lease that has not run out, unless it is `owner`.
    pub(super) fn other_holder(&self, id: &ProjectionId, owner: &Owner) -> Option<&Lease> {
        self.leases.get(id).filter(|lease| lease.owner != *owner && lease.expires > Instant::now())
    }

    pub(super) fn hold(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) {
        self.leases.insert(id.clone(), Lease { owner: owner.clone(), expires: Instant::now() + ttl });
    }

    pub(super) fn stored(&self, id: &ProjectionId) -> Option<StoredProjection> {
        let row = self.rows.get(id)?;
        let lease = self.leases.get(id).map_or(StoredLease::None, |lease| {
            let holder = lease.owner.description.clone();
            if lease.expires > Instant::now() { StoredLease::Held { holder } } else { StoredLease::Lapsed { holder } }
        });
        Some(StoredProjection {
            id: id.clone(),
            checkpoint: row.checkpoint.clone(),
            source: row.source.clone(),
            state: row.state.clone(),
            lease,
        })
    }
}

impl<Op: Clone> Store<Op> {
    /// Makes a batch durable, all at once.
    pub(super) fn write(&mut self, batch: &Batch<Op>) -> Result<(), Shortfall> {
        let Batch { id, advance, entries } = batch;
        let mut next_dead_letter = self.next_dead_letter;
        let row = self.expect(id, advance)?;
        let violations = row.violations(batch);
        for entry in entries {
            let position = entry.meta.position;
            if let Write::Apply(outcome) = &entry.write {
                row.applied.extend(outcome.ops().iter().map(|op| (position, op.clone())));
            }
            if let Some(new) = entry.dead_letter() {
                // Unique by position: one that is there already is replaced in its row.
                if let Some(letter) = row.dead_letters.iter_mut().find(|letter| letter.position == position) {
                    *letter = dead_letter(letter.id, new);
                } else {
                    row.dead_letters.push(dead_letter(next_dead_letter, new));
                    next_dead_letter += 1;
                }
            }
            row.highest = row.highest.max(Some(position));
        }
        row.checkpoint.committed(advance);
        row.commits += 1;
        self.next_dead_letter = next_dead_letter;
        self.violations.extend(violations);
        Ok(())
    }
}

impl<Op> Row<Op> {
    /// With nothing accounted for but what is below the start.
    pub(super) fn new(request: &TakeOver<'_>) -> Self {
        let event_types = request.event_types.map(|types| types.iter().copied().map(str::to_owned).collect());
        Self {
            checkpoint: Checkpoint { watermark: request.initial, event_types, ..Checkpoint::default() },
            source: request.source.clone(),
            state: StateRecord {
                state: State::Initializing,
                halt_reason: None,
                degraded_since: None,
                last_error: None,
                head: None,
            },
            applied: Vec::new(),
            dead_letters: Vec::new(),
            commits: 0,
            highest: request.initial,
        }
    }

    /// What is wrong with a batch that is about to become durable.
    fn violations(&self, batch: &Batch<Op>) -> Vec<String> {
        let Batch { id, advance, entries } = batch;
        let mut found = Vec::new();
        let mut violation = |what: String| found.push(format!("{id}, commit {}: {what}", advance.expected_commit_no));
        let before = self.checkpoint.watermark;
        if Some(advance.watermark) < before {
            violation(format!("the watermark moves backwards from {before:?} to {:?}", advance.watermark));
        }
        if let Some(last) = advance.last_event.as_ref().filter(|last| last.position > advance.watermark) {
            violation(format!("the last event, at {}, is above the watermark {}", last.position, advance.watermark));
        }
        let mut last = self.highest.max(before);
        let mut dead_lettered = 0;
        for entry in entries {
            let position = entry.meta.position;
            if Some(position) <= last {
                violation(format!("position {position} after {last:?}: applied twice or out of order"));
            }
            if position > advance.watermark {
                violation(format!("position {position} is above the watermark {}", advance.watermark));
            }
            last = last.max(Some(position));
            match &entry.write {
                Write::Apply(outcome) if outcome.is_skip() => violation(format!("the skip at {position} is an entry")),
                Write::Apply(_) => {}
                Write::DeadLetter(_) => dead_lettered += 1,
            }
        }
        let applied = entries.len() as u64 - dead_lettered;
        if (advance.counts.applied, advance.counts.dead_lettered) != (applied, dead_lettered) {
            violation(format!("{applied} applied and {dead_lettered} dead-lettered, but counted {:?}", advance.counts));
        }
        found
    }
}

fn dead_letter(id: i64, new: NewDeadLetter<'_>) -> DeadLetter {
    let event = new.event;
    DeadLetter {
        id,
        position: event.position,
        stream_id: event.stream_id.clone(),
        event_type: event.event_type.clone(),
        event_id: event.id.clone(),
        data: event.data.clone(),
        metadata: event.metadata.clone(),
        failure: new.failure.clone(),
        occurred_at: event.occurred_at,
        failed_at: Utc::now(),
    }
}
