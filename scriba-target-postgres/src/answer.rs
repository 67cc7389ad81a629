//! How long the server may take to answer.

use std::time::Duration;

use scriba_core::FailureClass;
use scriba_core::target::TargetError;
use tokio::time::timeout;

use crate::statement::StatementError;

/// What an answer may take beyond the server's own limit.
const GRACE: Duration = Duration::from_secs(3);

/// An answer, or an error of the connection where none comes: the server gives every statement up after `bound`, but a
/// connection that was cut without a word never says so.
pub(crate) async fn in_time<T, E: From<NoAnswer>>(
    bound: Duration,
    answer: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let limit = bound + GRACE;
    timeout(limit, answer).await.unwrap_or_else(|_| Err(NoAnswer(limit).into()))
}

/// The server said nothing for so long.
pub(crate) struct NoAnswer(Duration);

impl From<NoAnswer> for sqlx::Error {
    fn from(NoAnswer(limit): NoAnswer) -> Self {
        Self::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, format!("no answer within {limit:?}")))
    }
}

impl From<NoAnswer> for StatementError {
    fn from(no_answer: NoAnswer) -> Self {
        Self::Database(no_answer.into())
    }
}

impl From<NoAnswer> for TargetError {
    fn from(NoAnswer(limit): NoAnswer) -> Self {
        Self::new(FailureClass::TransientServer, format!("the server has not answered within {limit:?}"))
    }
}
