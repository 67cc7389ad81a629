//! The task that owns a committer: one commit at a time, never cancelled half-way.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::checkpoint::Advance;
use crate::event::Position;
use crate::target::{Batch, CommitError, Committer, Write};
use crate::telemetry::{BatchStop, DeadLettered, Telemetry};

/// What the pipeline wants written.
pub(crate) enum Job<Op> {
    /// A batch.
    Batch(Batch<Op>),
    /// The position at which this version first caught up.
    ReplayPosition(Option<Position>),
}

/// What became of a job.
pub(crate) enum Written {
    /// The batch is durable.
    Batch(Advance),
    /// The replay position is stored.
    ReplayPosition(Option<Position>),
    /// The committer is of no use any more.
    Failed(CommitError),
}

/// Does jobs until there are no more, or one fails. A pipeline that is dropped leaves this task to finish
/// the commit it is in; whatever that writes is under an epoch of its own.
pub(crate) async fn write<Op: Send + Sync + 'static>(
    mut committer: Box<dyn Committer<Op>>,
    mut jobs: mpsc::Receiver<Job<Op>>,
    done: mpsc::Sender<Written>,
    telemetry: Telemetry,
) {
    while let Some(job) = jobs.recv().await {
        let written = match job {
            Job::Batch(batch) => write_batch(committer.as_mut(), batch, &telemetry).await,
            Job::ReplayPosition(position) => {
                let stored = committer.store_replay_position(position).await;
                stored.map_or_else(Written::Failed, |()| Written::ReplayPosition(position))
            }
        };
        let failed = matches!(written, Written::Failed(_));
        if done.send(written).await.is_err() || failed {
            return;
        }
    }
}

async fn write_batch<Op: Send + Sync + 'static>(
    committer: &mut dyn Committer<Op>,
    batch: Batch<Op>,
    telemetry: &Telemetry,
) -> Written {
    let started = Instant::now();
    let committed = match committer.commit(&batch).await {
        Ok(committed) => committed,
        Err(error) => return Written::Failed(error),
    };
    report(&batch, committed.statements, started.elapsed(), telemetry);
    Written::Batch(batch.advance)
}

fn report<Op>(batch: &Batch<Op>, statements: u64, duration: Duration, telemetry: &Telemetry) {
    let operations = batch.entries.iter().map(|entry| match &entry.write {
        Write::Apply(outcome) => outcome.ops().len() as u64,
        Write::DeadLetter(_) => 0,
    });
    telemetry.batch_stop(&BatchStop {
        events: batch.advance.counts.total(),
        operations: operations.sum(),
        statements,
        duration,
        watermark: batch.advance.watermark,
    });
    for entry in &batch.entries {
        if let Write::DeadLetter(failure) = &entry.write {
            telemetry.dead_lettered(&DeadLettered { meta: &entry.meta, failure });
        }
    }
}
