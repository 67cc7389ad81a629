//! What the memory target keeps, and what it finds wrong with a batch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use scriba_core::checkpoint::{Advance, Checkpoint, Counts};
use scriba_core::dead_letter::{DeadLetter, NewDeadLetter};
use scriba_core::source::SourceIdentity;
use scriba_core::target::{
    Account, Batch, Owner, Refused, Reset, ResetCounts, Shortfall, StateRecord, StoredLease, StoredProjection,
    TakeOver, TargetError, Write,
};
use scriba_core::{FailureClass, Position, ProjectionId, State};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::{TargetFault, TargetStep};

/// A standby asks again every two seconds or so.
const SHORTEST_STANDBY: Duration = Duration::from_secs(10);

pub(super) struct Store<Op> {
    pub(super) rows: BTreeMap<ProjectionId, Row<Op>>,
    /// Apart from the rows, because a lease comes before the checkpoint.
    pub(super) leases: BTreeMap<ProjectionId, Lease>,
    /// Who has asked for a lease in vain, and until when that counts.
    standbys: BTreeMap<ProjectionId, Vec<Lease>>,
    /// Who has the row of a checkpoint.
    pub(super) locks: BTreeMap<ProjectionId, Arc<Mutex<()>>>,
    /// Commits that were sent and that the server has not come to.
    pub(super) late: Vec<(Batch<Op>, Account)>,
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
    /// It was reset and not taken over since.
    pub(super) reset: bool,
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
            standbys: BTreeMap::new(),
            locks: BTreeMap::new(),
            late: Vec::new(),
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

    /// Who holds the lease, for people, unless it is `owner`: one that has run out is the owner's as long as nobody took it.
    pub(super) fn holder_instead_of(&self, id: &ProjectionId, owner: &Owner) -> Option<String> {
        match self.leases.get(id) {
            Some(lease) if lease.owner == *owner => None,
            Some(lease) => Some(lease.owner.description.clone()),
            None => Some("nobody: it was released".to_owned()),
        }
    }

    pub(super) fn hold(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) {
        self.leases.insert(id.clone(), Lease { owner: owner.clone(), expires: Instant::now() + ttl });
    }

    /// Notes that a node stands by: for as long as the lease it asked for, or long enough for it to ask again.
    pub(super) fn stand_by(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) {
        self.end_standby(id, owner);
        let standby = Lease { owner: owner.clone(), expires: Instant::now() + ttl.max(SHORTEST_STANDBY) };
        self.standbys.entry(id.clone()).or_default().push(standby);
    }

    pub(super) fn end_standby(&mut self, id: &ProjectionId, owner: &Owner) {
        if let Some(standbys) = self.standbys.get_mut(id) {
            standbys.retain(|standby| standby.owner != *owner && standby.expires > Instant::now());
        }
    }

    fn standbys(&self, id: &ProjectionId) -> Vec<String> {
        let all = self.standbys.get(id).into_iter().flatten();
        all.filter(|standby| standby.expires > Instant::now())
            .map(|standby| standby.owner.description.clone())
            .collect()
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
            standbys: self.standbys(id),
        })
    }
}

impl<Op: Clone> Store<Op> {
    /// Late commits of a projection become durable, in the order in which they were sent.
    pub(super) fn land(&mut self, id: &ProjectionId) {
        let (due, rest) = std::mem::take(&mut self.late).into_iter().partition(|(batch, _)| batch.id == *id);
        self.late = rest;
        let due: Vec<_> = due;
        for (batch, account) in due {
            // One that was fenced off leaves nothing.
            let _ = self.write(&batch, &account);
        }
    }

    /// Makes a batch durable, all at once.
    pub(super) fn write(&mut self, batch: &Batch<Op>, account: &Account) -> Result<(), Shortfall> {
        let Batch { id, advance, entries, .. } = batch;
        let refused = account.refusals();
        let mut next_dead_letter = self.next_dead_letter;
        let row = self.expect(id, advance)?;
        let violations = row.violations(batch);
        for entry in entries {
            let position = entry.meta.position;
            let refused = refused.iter().find(|refused| refused.meta.position == position);
            let refused = refused.map(|Refused { meta, failure }| NewDeadLetter { event: meta.event(), failure });
            if let (Write::Apply(outcome), None) = (&entry.write, refused) {
                row.applied.extend(outcome.ops().iter().map(|op| (position, op.clone())));
            }
            if let Some(new) = entry.dead_letter().or(refused) {
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
        row.checkpoint.committed(advance, account.counts(), account.in_row().clone());
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
            state: StateRecord::new(State::Initializing),
            applied: Vec::new(),
            dead_letters: Vec::new(),
            commits: 0,
            highest: request.initial,
            reset: false,
        }
    }

    /// Brings it back to the beginning.
    pub(super) fn reset(&mut self, reset: &Reset) -> ResetCounts {
        let mut counts = ResetCounts { cleared: self.checkpoint.counts, dead_letters: 0 };
        self.checkpoint = Checkpoint { epoch: self.checkpoint.epoch + 1, ..Checkpoint::default() };
        self.state = StateRecord::new(State::Stopped);
        self.highest = None;
        self.reset = true;
        if reset.dead_letters {
            counts.dead_letters = std::mem::take(&mut self.dead_letters).len() as u64;
        }
        if !reset.statements.is_empty() {
            self.applied.clear();
        }
        counts
    }

    /// Makes of a row that was reset what a new one is.
    pub(super) fn begin_anew(&mut self, request: &TakeOver<'_>) {
        let new = Self::new(request);
        let epoch = self.checkpoint.epoch;
        self.checkpoint = Checkpoint { epoch, ..new.checkpoint };
        (self.source, self.state, self.highest, self.reset) = (new.source, new.state, new.highest, false);
    }

    /// What is wrong with a batch that is about to become durable.
    fn violations(&self, batch: &Batch<Op>) -> Vec<String> {
        let Batch { id, advance, entries, .. } = batch;
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
        let mut counts = Counts::default();
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
                Write::Apply(outcome) if outcome.is_skip() => {
                    violation(format!("the event at {position} applies nothing and is no skip"));
                }
                Write::Apply(_) => counts.applied += 1,
                Write::Skip => counts.skipped += 1,
                Write::DeadLetter(_) => counts.dead_lettered += 1,
            }
        }
        if advance.counts != counts {
            violation(format!("{counts:?} in the batch, but counted {:?}", advance.counts));
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
