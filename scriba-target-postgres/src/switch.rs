//! Rules that tests break on purpose, to see that it is caught.

use scriba_core::checkpoint::Advance;
use scriba_core::target::{Batch, Committed};
use sqlx::{Connection as _, PgConnection};

use crate::apply::{PgCommitter, Stopped, assume, ops_of, statement_failed};
use crate::fuse::plan;
use crate::op::PgOp;
use crate::sqlstate::{target_error, to_i64};

/// One rule broken.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// A commit goes through whenever the stored watermark is below its own, whatever the commit number.
    CommitNoSmallerThan,
    /// A take-over keeps the epoch.
    KeepEpoch,
    /// A reset sets the epoch back, as deleting the row and creating it anew would.
    EpochsRepeatAfterReset,
    /// The checkpoint moves after the writes, and nobody looks whether it did.
    FenceLast,
    /// A take-over reads the checkpoint before it has waited for a commit in doubt.
    ReadBeforeWaiting,
    /// Nobody looks how a closure left its transaction.
    TrustClosures,
    /// A transaction commits whoever says so.
    NoGuard,
}

impl Switch {
    /// Whether a rule is broken: never but in tests.
    pub(crate) fn is_broken(rule: Self, broken: Option<Self>) -> bool {
        cfg!(feature = "test-switches") && broken == Some(rule)
    }
}

impl PgCommitter {
    /// A commit as it must not be.
    pub(crate) async fn write_unfenced(
        &self,
        conn: &mut PgConnection,
        batch: &Batch<PgOp>,
    ) -> Result<Committed, Stopped> {
        let failed = |error: sqlx::Error| Stopped::from(target_error(&error, "writing without a fence"));
        let mut tx = conn.begin().await.map_err(failed)?;
        for statement in plan(&ops_of(&batch.entries), &self.facts) {
            statement.execute(&mut tx).await.map_err(|error| statement_failed(&statement, error))?;
        }
        let Advance { epoch, expected_commit_no, watermark, .. } = batch.advance;
        let fence = "UPDATE scriba_checkpoints SET commit_no = commit_no + 1, watermark = $3 WHERE epoch = $1 AND commit_no = $2";
        let fence = sqlx::query(self.names.sql(fence)).bind(epoch).bind(expected_commit_no).bind(to_i64(watermark)?);
        fence.execute(&mut *tx).await.map_err(failed)?;
        tx.commit().await.map_err(failed)?;
        Ok(assume(batch)?.committed(0))
    }
}
