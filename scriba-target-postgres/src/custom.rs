//! Closures that write the read model themselves, inside the transaction of their batch.

use std::any::type_name;
use std::error::Error as StdError;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use scriba_core::dead_letter::kind;
use scriba_core::target::TargetError;
use scriba_core::{FailureClass, Position, source_chain, sqlstate};
use sqlx::{AssertSqlSafe, Database, PgConnection, Postgres};
use sqlx_core::transaction::TransactionManager as _;
use tokio::time::timeout;

use crate::answer::in_time;
use crate::sqlstate::{COMMIT_REFUSED, postgres_error, target_error};

/// What a closure of [`custom`] returns.
pub type CustomResult = Result<(), CustomError>;

type Run =
    dyn for<'c> Fn(&'c mut PgConnection) -> Pin<Box<dyn Future<Output = CustomResult> + Send + 'c>> + Send + Sync;

/// A closure: made by [`custom`].
#[derive(Clone)]
#[must_use = "an operation does nothing until the handler returns it"]
pub struct CustomOp {
    run: Arc<Run>,
}

/// A closure that gets the connection in the transaction of its batch, in its place among the operations, and so sees what all
/// earlier events have written.
///
/// It may be called again with the same event after its writes were rolled back: whenever the batch is tried again. Effects in
/// memory are not undone. Its event is written by itself, not together with others, and deferred constraints are checked at its end.
///
/// The transaction is the engine's. A closure that ends it, leaves one of its own open, makes it read-only, or goes on after an error
/// of the database that it does not return, makes its event a dead letter, and so does one that fails, panics or takes longer than
/// `handler_timeout` (or half of the lease, where that is shorter). Behind it settings and roles are set back, and temporary tables,
/// cursors, advisory locks and LISTEN are gone. It must not
/// change the schema of tables that are written by operations: nobody notices for a minute.
///
/// ```
/// use scriba_core::Outcome;
/// use scriba_target_postgres::{PgOp, custom};
///
/// let outcome: Outcome<PgOp> = custom(|conn| {
///     Box::pin(async move {
///         let open: i64 = sqlx::query_scalar("SELECT count(*) FROM orders WHERE status = 'open'").fetch_one(&mut *conn).await?;
///         sqlx::query("UPDATE totals SET open_orders = $1").bind(open).execute(conn).await?;
///         Ok(())
///     })
/// })
/// .into();
/// ```
pub fn custom<F>(run: F) -> CustomOp
where
    F: for<'c> Fn(&'c mut PgConnection) -> Pin<Box<dyn Future<Output = CustomResult> + Send + 'c>>
        + Send
        + Sync
        + 'static,
{
    CustomOp { run: Arc::new(run) }
}

impl fmt::Debug for CustomOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("custom")
    }
}

/// Why a closure failed. Any error becomes one by `?`; the name of its type is the kind under which the dead letter is filed,
/// unless an error of the database is among its sources: that decides what becomes of the batch.
///
/// It does not implement [`std::error::Error`] itself, which is what makes the `?` possible.
#[derive(Debug)]
pub struct CustomError {
    kind: String,
    error: Box<dyn StdError + Send + Sync>,
}

impl CustomError {
    /// An error of a kind of the user's own.
    pub fn new(kind: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { kind: kind.into(), error: message.to_string().into() }
    }

    fn database(&self) -> Option<&sqlx::Error> {
        let mut error: Option<&(dyn StdError + 'static)> = Some(&*self.error);
        while let Some(found) = error {
            if let Some(database) = found.downcast_ref::<sqlx::Error>() {
                return Some(database);
            }
            error = found.source();
        }
        None
    }

    fn into_target_error(self) -> TargetError {
        let detail: Box<str> = source_chain(&*self.error).into();
        match self.database() {
            // By the guard, which takes the check of all constraints for a COMMIT.
            Some(database) if postgres_error(database).is_some_and(|error| error.code() == COMMIT_REFUSED) => {
                TargetError {
                    kind: Some(kind::LEFT_TRANSACTION.into()),
                    class: FailureClass::Integrity,
                    detail,
                    ..target_error(database, "in the closure of `custom`")
                }
            }
            Some(database) if is_of_the_server(database) => {
                let error = target_error(database, "in the closure of `custom`");
                // The transaction could be written when the closure got it.
                let made_read_only = error.code.as_deref() == Some(sqlstate::READ_ONLY_SQL_TRANSACTION);
                let class = if made_read_only { FailureClass::Integrity } else { error.class };
                TargetError { detail, class, ..error }
            }
            _ => TargetError {
                kind: Some(self.kind.into()),
                detail,
                ..TargetError::new(FailureClass::Integrity, self.error)
            },
        }
    }
}

/// Whether it says something about the server or the connection; the others are about rows, and the closure's own.
fn is_of_the_server(error: &sqlx::Error) -> bool {
    use sqlx::Error::{Database, Io, PoolClosed, PoolTimedOut, Protocol, Tls, WorkerCrashed};
    matches!(error, Database(_) | Io(_) | Tls(_) | Protocol(_) | PoolTimedOut | PoolClosed | WorkerCrashed)
}

impl<E: StdError + Send + Sync + 'static> From<E> for CustomError {
    fn from(error: E) -> Self {
        Self { kind: type_name::<E>().to_owned(), error: Box::new(error) }
    }
}

/// How code of the user went wrong.
pub(crate) enum Misstep {
    /// The transaction, or the savepoint around the event, can be rolled back.
    Failed(TargetError),
    /// The connection is in a state that nobody knows, or its transaction is gone.
    Lost(TargetError),
}

/// What code of the user is run under.
#[derive(Clone, Copy)]
pub(crate) struct Limits<'a> {
    /// How long a closure may take.
    pub(crate) closure: Duration,
    /// How long an answer of the server may take.
    pub(crate) answer: Duration,
    /// What it must leave as it was.
    pub(crate) session: &'a Session,
    /// Only in tests: it is not looked at how a closure left the transaction.
    pub(crate) trusted: bool,
}

/// The session of a transaction that code of the user runs in.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    /// What tells the transaction from any other.
    pub(crate) token: String,
    /// [`SETTINGS`] as they were when it was opened.
    pub(crate) before: String,
    /// The statements that make the settings of the transaction.
    pub(crate) settings: String,
    /// Only the engine may commit it: closures run in it.
    pub(crate) guarded: bool,
}

/// What decides what later statements do, as one text.
pub(crate) const SETTINGS: &str = "\
    concat_ws(' ', current_setting('search_path'), current_user, current_setting('session_replication_role'), \
        CASE WHEN pg_my_temp_schema() = 0 THEN 0 \
            ELSE (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()) END)";

/// Undoes what code of the user may have set for the session. Before a BEGIN that makes its transaction writable, nothing may
/// come that takes a snapshot.
pub(crate) const RESET: &str = "RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; ";

/// Undoes what else it may have left behind. Prepared statements stay: sqlx believes in them.
pub(crate) const TIDY: &str = "CLOSE ALL; DISCARD TEMP; UNLISTEN *; SELECT pg_advisory_unlock_all(); ";

/// Set at the begin of transactions with code of the user, and gone with the transaction.
const BATCH_SETTING: &str = "scriba.batch";

impl Session {
    /// The statements that mark the transaction with the token, and have the guard look after it. (A single statement cannot
    /// commit, so those of `sql` need no guard.)
    pub(crate) fn mark(&self) -> String {
        let guard = if self.guarded { "SELECT set_config('scriba.guard', 'on', true); " } else { "" };
        format!("SELECT set_config('{BATCH_SETTING}', '{}', true); {guard}", self.token)
    }

    /// The statements that bring it back to how it stood at the begin of the transaction.
    pub(crate) fn restore(&self) -> String {
        format!("{RESET}{TIDY}{}{}", self.mark(), self.settings)
    }
}

/// Calls a closure, and makes sure that it left the transaction as it was.
pub(crate) async fn run(
    op: &CustomOp,
    conn: &mut PgConnection,
    limits: Limits<'_>,
    position: Position,
) -> Result<(), Misstep> {
    let call = AssertUnwindSafe(async { (op.run)(&mut *conn).await }).catch_unwind();
    let result = match timeout(limits.closure, call).await {
        Ok(Ok(result)) => result,
        Ok(Err(panic)) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
            let message = format!("the closure of `custom` panicked: {text}");
            return Err(Misstep::Lost(blame(position, kind::PANIC, message)));
        }
        Err(_) => {
            let message = format!("the closure of `custom` took longer than {:?}", limits.closure);
            return Err(Misstep::Lost(blame(position, kind::TIMEOUT, message)));
        }
    };
    if limits.trusted && result.is_ok() {
        return Ok(());
    }
    examine(conn, limits, position, result).await
}

/// Makes sure that code of the user left the transaction as it was, and blames the event where it did not.
pub(crate) async fn examine(
    conn: &mut PgConnection,
    limits: Limits<'_>,
    position: Position,
    result: CustomResult,
) -> Result<(), Misstep> {
    let left = |what: &str| blame(position, kind::LEFT_TRANSACTION, format!("code of this event {what}"));
    if depth(conn) != 1 {
        return Err(Misstep::Lost(left(
            "left a transaction of its own open, or ended that of the engine: commit or roll back every transaction it \
             begins, and no other",
        )));
    }
    let standing = match in_time(limits.answer, standing(conn, limits.session)).await {
        Ok(standing) => standing,
        Err(error) if error.class == FailureClass::TransientServer => return Err(Misstep::Failed(error)),
        // Such as a COPY that is not at its end, or prepared statements that are gone.
        Err(error) => {
            let what = format!("left the connection in a state in which it answers nothing more: {}", error.message);
            return Err(Misstep::Lost(left(&what)));
        }
    };
    match (result, standing) {
        (Ok(()), Standing::Open | Standing::Changed) => Ok(()),
        (Ok(()), Standing::Failed) => {
            let message = "code of this event went on after an error of the database, which has made the transaction \
                           useless: return the error, or wrap the statement in a savepoint (`conn.begin()`)";
            Err(Misstep::Failed(blame(position, kind::SWALLOWED_ERROR, message.to_owned())))
        }
        (Err(error), Standing::Open | Standing::Changed | Standing::Failed) => {
            Err(Misstep::Failed(TargetError { position: Some(position), ..error.into_target_error() }))
        }
        (_, Standing::ReadOnly) => {
            Err(Misstep::Failed(left("made the transaction read-only: take SET TRANSACTION out of it")))
        }
        (_, Standing::Gone) => Err(Misstep::Lost(left(
            "ended the transaction of its batch, which is the engine's: take COMMIT, ROLLBACK and their like out of it",
        ))),
    }
}

fn blame(position: Position, kind: &str, message: String) -> TargetError {
    let error = TargetError::new(FailureClass::Integrity, message);
    TargetError { kind: Some(kind.into()), position: Some(position), ..error }
}

/// What sqlx takes a COMMIT for: at a depth above 1 it only releases a savepoint.
pub(crate) fn depth(conn: &PgConnection) -> usize {
    <Postgres as Database>::TransactionManager::get_transaction_depth(conn)
}

/// What has become of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It takes statements.
    Open,
    /// It does, under other settings than those it began with.
    Changed,
    /// It takes no writes.
    ReadOnly,
    /// It refuses everything until it is rolled back.
    Failed,
    /// The connection is in another one, or in none.
    Gone,
}

/// Looks whether the transaction is the one with the token, and how it stands.
pub(crate) async fn standing(conn: &mut PgConnection, session: &Session) -> Result<Standing, TargetError> {
    let look = format!(
        "SELECT current_setting('{BATCH_SETTING}', true), current_setting('transaction_read_only') = 'on', {SETTINGS}"
    );
    // Made of this file's own words.
    let found: sqlx::Result<(Option<String>, bool, String)> = sqlx::query_as(AssertSqlSafe(look)).fetch_one(conn).await;
    match found {
        Ok((token, ..)) if token.as_deref() != Some(&session.token) => Ok(Standing::Gone),
        Ok((_, true, _)) => Ok(Standing::ReadOnly),
        Ok((.., settings)) if settings == session.before => Ok(Standing::Open),
        Ok(_) => Ok(Standing::Changed),
        Err(error)
            if postgres_error(&error).is_some_and(|error| error.code() == sqlstate::IN_FAILED_SQL_TRANSACTION) =>
        {
            Ok(Standing::Failed)
        }
        Err(error) => Err(target_error(&error, "looking whether code of the user left the transaction open")),
    }
}
