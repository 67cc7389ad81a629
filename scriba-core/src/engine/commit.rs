//! The task that owns a committer: one commit at a time, never cancelled half-way.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::live::Live;
use crate::checkpoint::Advance;
use crate::error::HaltReason;
use crate::event::Position;
use crate::target::{Batch, CommitError, Committed, Committer, Entry, HaltBefore, Refused, TargetError, Write};
use crate::telemetry::{BatchFailed, BatchNext, BatchStop, DeadLettered, Telemetry};

/// What the pipeline wants written.
pub(crate) enum Job<Op> {
    /// A batch.
    Batch(Batch<Op>),
    /// The position at which this version first caught up.
    ReplayPosition(Option<Position>),
}

/// What became of a job.
pub(crate) enum Written {
    /// The batch is durable, as far as it was to go.
    Batch(Box<Durable>),
    /// Nothing is written, because the projection has to halt before the first event of the batch.
    Halted(HaltReason),
    /// The replay position is stored.
    ReplayPosition(Option<Position>),
    /// The committer is of no use any more.
    Failed(CommitError),
}

/// A batch that is durable.
pub(crate) struct Durable {
    pub(crate) advance: Advance,
    pub(crate) committed: Committed,
    /// Why it was to go no further.
    pub(crate) halt: Option<HaltReason>,
}

/// Does jobs until there are no more, or one fails. A pipeline that is dropped leaves this task to finish
/// the commit it is in; whatever that writes is under an epoch of its own.
pub(crate) async fn write<Op: Send + Sync + 'static>(
    mut committer: Box<dyn Committer<Op>>,
    mut jobs: mpsc::Receiver<Job<Op>>,
    done: mpsc::Sender<Written>,
    telemetry: Telemetry,
    live: Arc<Live>,
) {
    while let Some(job) = jobs.recv().await {
        let written = match job {
            Job::Batch(batch) => write_batch(committer.as_mut(), batch, &telemetry, &live).await,
            Job::ReplayPosition(position) => {
                let stored = committer.store_replay_position(position).await;
                stored.map_or_else(Written::Failed, |()| Written::ReplayPosition(position))
            }
        };
        let over = match &written {
            Written::Batch(durable) => durable.halt.is_some(),
            Written::ReplayPosition(_) => false,
            Written::Halted(_) | Written::Failed(_) => true,
        };
        if done.send(written).await.is_err() || over {
            return;
        }
    }
}

/// Where the batch has to end before one of its events, what stands before that is committed alone.
async fn write_batch<Op: Send + Sync + 'static>(
    committer: &mut dyn Committer<Op>,
    mut batch: Batch<Op>,
    telemetry: &Telemetry,
    live: &Live,
) -> Written {
    let mut halt = None;
    loop {
        let started = Instant::now();
        match committer.commit(&batch).await {
            Ok(committed) => {
                live.touched(batch.entries.iter().map(|entry| (&entry.meta.stream_id, entry.meta.position)));
                report(&batch, &committed, started.elapsed(), telemetry);
                return Written::Batch(Box::new(Durable { advance: batch.advance, committed, halt }));
            }
            Err(CommitError::HaltBefore(HaltBefore { position, reason })) => {
                if !batch.end_before(position) {
                    return Written::Halted(reason);
                }
                halt = Some(reason);
            }
            Err(error) => return Written::Failed(error),
        }
    }
}

fn report<Op>(batch: &Batch<Op>, committed: &Committed, duration: Duration, telemetry: &Telemetry) {
    let operations = batch.entries.iter().map(|entry| match &entry.write {
        Write::Apply(outcome) => outcome.ops().len() as u64,
        Write::Skip | Write::DeadLetter(_) => 0,
    });
    if let Some(TargetError { class, code, message, .. }) = &committed.isolated {
        telemetry.batch_failed(&BatchFailed {
            events: batch.entries.len() as u64,
            class: Some(*class),
            code: code.as_deref(),
            message,
            next: BatchNext::Isolate,
        });
    }
    telemetry.batch_stop(&BatchStop {
        events: committed.counts.total(),
        applied: committed.counts.applied,
        skipped: committed.counts.skipped,
        dead_lettered: committed.counts.dead_lettered,
        operations: operations.sum(),
        statements: committed.statements,
        duration,
        watermark: batch.advance.watermark,
    });
    for Entry { meta, write } in &batch.entries {
        if let Write::DeadLetter(failure) = write {
            telemetry.dead_lettered(&DeadLettered { meta, failure });
        }
    }
    for Refused { meta, failure } in &committed.refused {
        telemetry.dead_lettered(&DeadLettered { meta, failure });
    }
}
