//! What a failure of the database means for the source.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use scriba_core::source::SourceError;
use scriba_core::{FailureClass, classify, sqlstate};
use sqlx::Error;

/// Longer than any statement here should take, so that a connection whose other end is gone ends the subscription.
const ANSWER_WITHIN: Duration = Duration::from_mins(1);

/// Waits for the answer to something asked of the database, not for ever.
pub(crate) async fn answer<T>(
    log: &str,
    doing: impl Display,
    asked: impl Future<Output = Result<T, Error>>,
) -> Result<T, SourceError> {
    match tokio::time::timeout(ANSWER_WITHIN, asked).await {
        Ok(answered) => answered.map_err(|error| source_error(log, doing, &error)),
        Err(_) => Err(SourceError::unavailable(format!(
            "event log {log}: {doing}: no answer within {ANSWER_WITHIN:?}: look whether the server hangs, and whether an index starts with the position column"
        ))),
    }
}

/// The source's error for one of the database: `log` names the table, `doing` what was tried.
pub(crate) fn source_error(log: &str, doing: impl Display, error: &Error) -> SourceError {
    let at = |remedy: &str| format!("event log {log}: {doing}: {error}{remedy}");
    match error {
        Error::Io(_) | Error::Tls(_) | Error::PoolTimedOut => SourceError::unavailable(at("")),
        Error::Configuration(_) => SourceError::unusable(at(": correct the connection options of the pool")),
        Error::Database(db) => {
            let code = db.code().unwrap_or_default();
            if classify(&code, db.message()) == FailureClass::TransientServer {
                SourceError::unavailable(at(&format!(" (SQLSTATE {code})")))
            } else if let Some(remedy) = remedy(&code) {
                SourceError::unusable(at(&format!(" (SQLSTATE {code}): {remedy}")))
            } else {
                SourceError::ended(at(&format!(" (SQLSTATE {code})")))
            }
        }
        _ => SourceError::ended(at("")),
    }
}

/// What to do about a failure that no new attempt mends.
fn remedy(code: &str) -> Option<&'static str> {
    Some(match code {
        sqlstate::UNDEFINED_TABLE => "name the table, schema and sequence as the catalogue has them",
        "42703" => "name the columns as the catalogue has them",
        sqlstate::INSUFFICIENT_PRIVILEGE => "grant USAGE on the schema and SELECT on the table to the role of the pool",
        _ if code.starts_with("42") => "the table does not fit the settings of this log: compare its columns with them",
        _ if code.starts_with("28") => "correct the user or password in the connection options of the pool",
        _ if code.starts_with("22") => {
            "a text in the log cannot be read as UTF-8: correct it, or keep it in a bytea column"
        }
        "3D000" => "correct the database in the connection options of the pool",
        _ => return None,
    })
}
