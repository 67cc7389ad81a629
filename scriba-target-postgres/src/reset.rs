//! Bringing a projection that nobody runs back to the beginning, in one transaction.

use scriba_core::target::{Reset, ResetCounts, ResetRefused, StoredLease, TargetError};
use scriba_core::{FailureClass, Position, ProjectionId};
use sqlx::{Connection, PgConnection};

use crate::op::{PgOp, sql};
use crate::sqlstate::{structural_unless_transient, target_error};
use crate::statement::{Statement, StatementError};
use crate::switch::Switch;
use crate::target::PgTarget;
use crate::{checkpoint, dead_letter, lease, status};

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

const TAKE_LAPSED: &str = "\
    DELETE FROM scriba_leases WHERE name = $1 AND version = $2 AND expires_at < clock_timestamp() RETURNING holder";

/// Whoever wants the lease waits for the end of the transaction that this row is of.
const BLOCK: &str = "\
    INSERT INTO scriba_leases (name, version, owner, holder, expires_at) VALUES ($1, $2, $3, 'a reset', 'infinity') \
    ON CONFLICT (name, version) DO NOTHING";

const UNBLOCK: &str = "DELETE FROM scriba_leases WHERE name = $1 AND version = $2 AND owner = $3";

/// The owner by which the lease is blocked; owners of nodes are UUIDs.
const BLOCKER: &str = "reset";

const CLEAR: &str = "\
    UPDATE scriba_checkpoints \
    SET commit_no = 0, watermark = NULL, last_position = NULL, last_event_id = NULL, applied = 0, skipped = 0, \
        dead_lettered = 0, dead_letters_in_row = 0, dead_letter_streams = '{}', event_types = NULL, \
        updated_at = clock_timestamp() \
    WHERE name = $1 AND version = $2";

/// The fault of [`Switch::EpochsRepeatAfterReset`].
const SET_EPOCH_BACK: &str = "UPDATE scriba_checkpoints SET epoch = 0 WHERE name = $1 AND version = $2";

/// Without its cold row a checkpoint begins anew at the next take-over.
const CLEAR_COLD: &str = "DELETE FROM scriba_projections WHERE name = $1 AND version = $2";

/// For how long a reset waits for locks: of a former owner whose transaction the server has yet to end, and of readers of the
/// tables that its statements empty.
const LOCK_TIMEOUT: &str = "30s";

/// Settings of the connection.
pub(crate) fn settings() -> [(&'static str, String); 3] {
    [
        ("lock_timeout", LOCK_TIMEOUT.to_owned()),
        ("idle_in_transaction_session_timeout", "30s".to_owned()),
        ("tcp_user_timeout", "30s".to_owned()),
    ]
}

/// The user's statements, once it is clear that none of them can end the transaction.
pub(crate) fn statements(reset: &Reset) -> Result<Vec<PgOp>, TargetError> {
    let checked = reset.statements.iter().map(|text| {
        let statement = sql(text.clone());
        statement.check().map_err(|problem| TargetError::new(FailureClass::Structural, problem))?;
        Ok(statement.into())
    });
    checked.collect()
}

/// Runs all of it, or nothing.
pub(crate) async fn run(
    conn: &mut PgConnection,
    target: &PgTarget,
    id: &ProjectionId,
    statements: &[PgOp],
    dead_letters: bool,
) -> Result<ResetCounts, ResetRefused> {
    let names = target.names();
    let what = format!("resetting projection {id}");
    let failed = |error: sqlx::Error| structural_unless_transient(target_error(&error, &what));
    let mut tx = conn.begin_with(BEGIN).await.map_err(failed)?;
    let lapsed: Option<String> = sqlx::query_scalar(names.sql(TAKE_LAPSED))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .fetch_optional(&mut *tx)
        .await
        .map_err(failed)?;
    let blocked = sqlx::query(names.sql(BLOCK))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(BLOCKER)
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    if blocked.rows_affected() == 0 {
        let holder = lease::holder(&mut tx, names, id).await.map_err(failed)?;
        return Err(ResetRefused::Held {
            holder: holder.unwrap_or_else(|| "a node that has just released it".to_owned()),
        });
    }
    let read = |row: sqlx::postgres::PgRow| status::projection(&row);
    let find = sqlx::query(names.sql(status::SELECT)).bind(&id.name).bind(i64::from(id.version));
    let found = find.fetch_optional(&mut *tx).await.map_err(failed)?;
    let mut stored = found.map(read).transpose()?.ok_or(ResetRefused::NoCheckpoint)?;
    stored.lease = lapsed.map_or(StoredLease::None, |holder| StoredLease::Lapsed { holder });
    stored.may_be_reset()?;

    // Only a later statement sees what became of a commit in doubt.
    checkpoint::raise_epoch(&mut tx, names, id, 1).await.map_err(failed)?;
    let find = sqlx::query(names.sql(status::SELECT)).bind(&id.name).bind(i64::from(id.version));
    let cleared = read(find.fetch_one(&mut *tx).await.map_err(failed)?)?.checkpoint.counts;
    let fault = if target.breaks(Switch::EpochsRepeatAfterReset) { Some(SET_EPOCH_BACK) } else { None };
    for text in [CLEAR, CLEAR_COLD].into_iter().chain(fault) {
        sqlx::query(names.sql(text))
            .bind(&id.name)
            .bind(i64::from(id.version))
            .execute(&mut *tx)
            .await
            .map_err(failed)?;
    }
    let dead_letters = if dead_letters { dead_letter::delete(&mut tx, names, id).await.map_err(failed)? } else { 0 };
    for op in statements {
        // Not of any event: the position only names it where it fails, and a plain statement does not.
        let statement = Statement::alone(Position::new(0), op);
        statement.execute(&mut tx).await.map_err(|error| match error {
            StatementError::Database(error) => failed(error),
            StatementError::NoRow(error) => TargetError::new(FailureClass::Structural, error),
        })?;
    }
    let unblocked = sqlx::query(names.sql(UNBLOCK))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(BLOCKER)
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    if unblocked.rows_affected() != 1 {
        let message = format!("{what}: a statement has ended its transaction: take that out of it");
        return Err(TargetError::new(FailureClass::Structural, message).into());
    }
    tx.commit().await.map_err(failed)?;
    Ok(ResetCounts { cleared, dead_letters })
}
