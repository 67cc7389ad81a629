//! What sqlx reports, as the failures the engine decides by.

use std::fmt::Write as _;

use scriba_core::target::TargetError;
use scriba_core::{FailureClass, Position, PositionOutOfRange, classify};
use sqlx::postgres::{PgDatabaseError, PgSeverity};

/// Raised by `scriba_advance` when the checkpoint is not in the expected state.
pub(crate) const CHECKPOINT_MOVED: &str = "SB001";

/// Raised by `scriba_check_commit` when a transaction is committed by someone else than the engine.
pub(crate) const COMMIT_REFUSED: &str = "SB002";

/// A failure while doing `what`.
pub(crate) fn target_error(error: &sqlx::Error, what: &str) -> TargetError {
    use FailureClass::{Integrity, Structural, TransientServer, Unclear};
    let class = match error {
        sqlx::Error::Database(_) => return database_error(error, what),
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::PoolTimedOut | sqlx::Error::WorkerCrashed => {
            TransientServer
        }
        sqlx::Error::Protocol(_) | sqlx::Error::BeginFailed => Unclear,
        sqlx::Error::Encode(_) => Integrity,
        _ => Structural,
    };
    TargetError::new(class, format!("{what}: {error}"))
}

fn database_error(error: &sqlx::Error, what: &str) -> TargetError {
    let Some(database) = postgres_error(error) else {
        return TargetError::new(FailureClass::Structural, format!("{what}: {error}"));
    };
    let mut message = format!("{what}: {} (SQLSTATE {}", database.message(), database.code());
    for (kind, name) in
        [("table", database.table()), ("column", database.column()), ("constraint", database.constraint())]
    {
        if let Some(name) = name {
            // Writing to a String cannot fail.
            let _ = write!(message, ", {kind} {name}");
        }
    }
    message.push(')');
    for more in [database.detail(), database.hint()].into_iter().flatten() {
        message.push_str(": ");
        message.push_str(more);
    }
    TargetError {
        code: Some(database.code().to_owned()),
        ..TargetError::new(classify(database.code(), database.message()), message)
    }
}

/// The server's own error, where it is one.
pub(crate) fn postgres_error(error: &sqlx::Error) -> Option<&PgDatabaseError> {
    error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()
}

/// True where the server refused the statement and is there to take the next one; false where the connection, and with
/// it the outcome of what was sent, is lost.
pub(crate) fn refused_by_server(error: &sqlx::Error) -> bool {
    postgres_error(error).is_some_and(|database| database.severity() == PgSeverity::Error)
}

/// A failure of a statement that does not depend on any one event: what would be the data's fault elsewhere
/// is the schema's here.
pub(crate) fn structural_unless_transient(mut error: TargetError) -> TargetError {
    if error.class == FailureClass::Integrity {
        error.class = FailureClass::Structural;
    }
    error
}

/// A position for a `bigint` column.
pub(crate) fn to_i64(position: Position) -> Result<i64, TargetError> {
    position.to_i64().map_err(out_of_range)
}

/// A number above the range of `bigint`, or below the range of what it counts.
pub(crate) fn out_of_range(error: PositionOutOfRange) -> TargetError {
    TargetError::new(FailureClass::Structural, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_without_a_sqlstate_have_classes_of_their_own() {
        let class = |error: sqlx::Error| target_error(&error, "x").class;
        assert_eq!(class(std::io::Error::other("reset").into()), FailureClass::TransientServer);
        assert_eq!(class(sqlx::Error::Tls("x".into())), FailureClass::TransientServer);
        assert_eq!(class(sqlx::Error::PoolTimedOut), FailureClass::TransientServer);
        assert_eq!(class(sqlx::Error::PoolClosed), FailureClass::Structural);
        assert_eq!(class(sqlx::Error::Protocol("x".into())), FailureClass::Unclear);
        assert_eq!(class(sqlx::Error::Encode("x".into())), FailureClass::Integrity);
        assert_eq!(class(sqlx::Error::Decode("x".into())), FailureClass::Structural);
        assert_eq!(class(sqlx::Error::RowNotFound), FailureClass::Structural);
    }
}
