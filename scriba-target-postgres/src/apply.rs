//! One batch, one transaction: the checkpoint moves first, then operations and dead letters, COMMIT last. Where the writes
//! are a single statement, all of it is one, in which the move of the checkpoint gates the write.

use std::time::Duration;

use async_trait::async_trait;
use scriba_core::checkpoint::Advance;
use scriba_core::dead_letter::NewDeadLetter;
use scriba_core::target::{Batch, CommitError, Committed, Committer, Shortfall, TargetError, Write};
use scriba_core::{FailureClass, Position, ProjectionId};
use sqlx::postgres::PgArguments;
use sqlx::{AssertSqlSafe, Connection, PgConnection, raw_sql};
use tokio::time::timeout;

use crate::facts::{FactsCache, FactsError};
use crate::fuse::plan;
use crate::names::Names;
use crate::op::PgOp;
use crate::sqlstate::{
    CHECKPOINT_MOVED, postgres_error, refused_by_server, structural_unless_transient, target_error, to_i64,
};
use crate::statement::{Statement, StatementError, table_of};
use crate::{checkpoint, dead_letter};

/// What an answer may take beyond the server's own limit.
const ANSWER_GRACE: Duration = Duration::from_secs(3);

/// How long the goodbye to a server is tried after a failure.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Constraints are checked statement by statement, so that what commits does not depend on where a batch ends.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET CONSTRAINTS ALL IMMEDIATE";

/// Statements of the user get all joins there are; the committer's own get along with fewer.
const PLAN_FREELY: &str = "SET LOCAL enable_hashjoin = on; SET LOCAL enable_mergejoin = on";

/// Set in transactions that run statements of the user, gone with the transaction: what shows that they left it open.
const TOKEN_SETTING: &str = "scriba.batch";

/// The committer of one epoch.
pub(crate) struct PgCommitter {
    pub(crate) id: ProjectionId,
    pub(crate) epoch: i64,
    /// Taken out while a batch is under way: whatever ends that early, a dropped future included, closes it, because
    /// nobody knows what state it is in.
    pub(crate) conn: Option<PgConnection>,
    /// The server's limit for a statement.
    pub(crate) bound: Duration,
    pub(crate) names: Names,
    pub(crate) facts: FactsCache,
    /// Statements of the user ran: settings that they left behind are undone before the next batch.
    pub(crate) reset: bool,
    #[cfg(feature = "test-switches")]
    pub(crate) switch: Option<crate::Switch>,
}

#[async_trait]
impl Committer<PgOp> for PgCommitter {
    async fn commit(&mut self, batch: &Batch<PgOp>) -> Result<Committed, CommitError> {
        let mut conn = self.connection().map_err(CommitError::Failed)?;
        match self.write(&mut conn, batch).await {
            Ok(committed) => {
                self.conn = Some(conn);
                Ok(committed)
            }
            Err(stopped) => {
                let error = match stopped {
                    Stopped::Fenced => self.fenced(&mut conn, &batch.advance).await,
                    Stopped::Error(error) => error,
                };
                close(conn).await;
                Err(error)
            }
        }
    }

    async fn store_replay_position(&mut self, caught_up: Option<Position>) -> Result<(), CommitError> {
        let position = caught_up.map_or(Ok(-1), to_i64).map_err(CommitError::Failed)?;
        let mut conn = self.connection().map_err(CommitError::Failed)?;
        let store = checkpoint::store_replay_position(&mut conn, &self.names, &self.id, self.epoch, position);
        let stored = in_time(self.bound, store).await;
        self.settle(conn, stored, "storing the replay position")
    }

    async fn store_event_types(&mut self, types: Option<&[&str]>) -> Result<(), CommitError> {
        let mut conn = self.connection().map_err(CommitError::Failed)?;
        let store = checkpoint::store_event_types(&mut conn, &self.names, &self.id, self.epoch, types);
        let stored = in_time(self.bound, store).await;
        self.settle(conn, stored, "storing the event types")
    }
}

/// An answer, or an error of the connection where none comes: the server gives every statement up after `bound`, but a
/// connection that was cut without a word never says so.
async fn in_time<T, E: From<NoAnswer>>(bound: Duration, answer: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    let limit = bound + ANSWER_GRACE;
    timeout(limit, answer).await.unwrap_or_else(|_| Err(NoAnswer(limit).into()))
}

/// The server said nothing for so long.
struct NoAnswer(Duration);

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

/// Why a transaction did not commit.
enum Stopped {
    /// The checkpoint did not move. The transaction is in its failed state, and sqlx does not know of it.
    Fenced,
    Error(CommitError),
}

impl From<TargetError> for Stopped {
    fn from(error: TargetError) -> Self {
        Self::Error(CommitError::Failed(error))
    }
}

impl PgCommitter {
    /// The end of a single statement on a control table: the connection is kept if all went well.
    fn settle(
        &mut self,
        conn: PgConnection,
        stored: sqlx::Result<Option<Shortfall>>,
        what: &str,
    ) -> Result<(), CommitError> {
        match stored {
            Ok(None) => {
                self.conn = Some(conn);
                Ok(())
            }
            Ok(Some(shortfall)) => Err(CommitError::Fenced(shortfall)),
            Err(error) => {
                let failure = target_error(&error, &format!("{what} of {}", self.id));
                Err(CommitError::Failed(structural_unless_transient(failure)))
            }
        }
    }

    fn connection(&mut self) -> Result<PgConnection, TargetError> {
        self.conn.take().ok_or_else(|| {
            TargetError::new(FailureClass::Structural, "a committer that failed was used again: take over anew")
        })
    }

    async fn write(&mut self, conn: &mut PgConnection, batch: &Batch<PgOp>) -> Result<Committed, Stopped> {
        let (ops, letters) = take_apart(batch);
        refuse_unsafe(&ops)?;
        let plan = in_time(self.bound, self.plan(conn, &ops)).await?;
        if letters.is_empty()
            && let Some((text, arguments)) = self.single(&plan, &batch.advance)?
        {
            let position = plan.first().and_then(Statement::single_position);
            return self.autocommit(conn, text, arguments, position).await;
        }
        self.transaction(conn, batch, &ops, &letters, &plan).await
    }

    /// The batch as one statement, where its writes are at most one on a table that is fused: those are checked as the
    /// statement ends, and nothing of the user's runs.
    fn single(
        &self,
        plan: &[Statement<'_>],
        advance: &Advance,
    ) -> Result<Option<(AssertSqlSafe<String>, PgArguments)>, TargetError> {
        let gate = |first| self.names.substitute(&checkpoint::gate(first));
        let fused = |statement: &Statement<'_>| {
            let facts = statement.keyed_table().and_then(|table| self.facts.get(table));
            facts.is_some_and(|facts| facts.one_by_one.is_none())
        };
        let gated = match plan {
            _ if self.reset || !self.may_be_single() => None,
            [] => Some(Ok((format!("SELECT count(*) FROM (SELECT {}) AS moved", gate(1)), PgArguments::default()))),
            [statement] if fused(statement) => statement.gated(gate),
            _ => None,
        };
        let Some(gated) = gated else { return Ok(None) };
        let (text, mut arguments) =
            gated.map_err(|error| target_error(&sqlx::Error::Encode(error), "writing the read model"))?;
        checkpoint::bind_gate(&mut arguments, &self.id, advance)?;
        // Identifiers in it are quoted by the statement and by `substitute`; values travel as binds.
        Ok(Some((AssertSqlSafe(text), arguments)))
    }

    /// Once it is sent, only the server can say whether it is committed.
    async fn autocommit(
        &self,
        conn: &mut PgConnection,
        text: AssertSqlSafe<String>,
        arguments: PgArguments,
        position: Option<Position>,
    ) -> Result<Committed, Stopped> {
        let moved = in_time(self.bound, sqlx::query_scalar_with(text, arguments).fetch_one(conn)).await;
        match moved {
            Ok(1_i64) => Ok(Committed { statements: 1 }),
            Ok(moved) => {
                let message = format!("the checkpoint of {} was moved {moved} times in one statement", self.id);
                Err(TargetError::new(FailureClass::Structural, message).into())
            }
            Err(error) if postgres_error(&error).is_some_and(|error| error.code() == CHECKPOINT_MOVED) => {
                Err(Stopped::Fenced)
            }
            Err(error) if refused_by_server(&error) => {
                Err(TargetError { position, ..target_error(&error, "writing the read model") }.into())
            }
            Err(error) => Err(self.not_committed(&error)),
        }
    }

    async fn transaction(
        &mut self,
        conn: &mut PgConnection,
        batch: &Batch<PgOp>,
        ops: &[(Position, &PgOp)],
        letters: &[NewDeadLetter<'_>],
        plan: &[Statement<'_>],
    ) -> Result<Committed, Stopped> {
        let user_code = ops.iter().any(|(_, op)| matches!(op, PgOp::Sql(_)));

        // The round trip that decides whether the rest may be sent: its answer is read before anything follows.
        let begin = self.begin(&batch.advance, user_code)?;
        let begun = in_time(self.bound, conn.begin_with(self.names.sql(&begin))).await;
        let mut tx = begun.map_err(|error| self.not_begun(&error))?;
        self.reset = user_code;
        let mut statements = 2;
        for statement in plan {
            let executed = in_time(self.bound, statement.execute(&mut tx)).await;
            executed.map_err(|error| statement_failed(statement, error))?;
            statements += 1;
        }
        if !letters.is_empty() {
            in_time(self.bound, dead_letter::insert(&mut tx, &self.names, &self.id, letters)).await?;
            statements += 1;
        }
        if user_code {
            in_time(self.bound, still_in(&mut tx, &token(&batch.advance))).await?;
            statements += 1;
        }
        in_time(self.bound, tx.commit()).await.map_err(|error| self.not_committed(&error))?;
        Ok(Committed { statements })
    }

    fn not_begun(&self, error: &sqlx::Error) -> Stopped {
        if postgres_error(error).is_some_and(|error| error.code() == CHECKPOINT_MOVED) {
            return Stopped::Fenced;
        }
        structural_unless_transient(target_error(error, &format!("moving the checkpoint of {}", self.id))).into()
    }

    /// An error of the server's says that the transaction is rolled back; without one COMMIT may have arrived.
    fn not_committed(&self, error: &sqlx::Error) -> Stopped {
        let failure = target_error(error, &format!("committing a batch of {}", self.id));
        Stopped::Error(if refused_by_server(error) {
            CommitError::Failed(failure)
        } else {
            CommitError::Ambiguous(failure)
        })
    }

    /// The statements of a batch. Facts are read before the transaction begins.
    async fn plan<'a>(
        &mut self,
        conn: &mut PgConnection,
        ops: &[(Position, &'a PgOp)],
    ) -> Result<Vec<Statement<'a>>, TargetError> {
        let tables = ops.iter().filter_map(|(_, op)| table_of(op));
        self.facts.load(conn, tables).await.map_err(|error| match error {
            FactsError::Database(error) => target_error(&error, "reading the catalogue"),
            FactsError::Mismatch(message) => TargetError::new(FailureClass::Structural, message),
        })?;
        Ok(plan(ops, &self.facts))
    }

    fn begin(&self, advance: &Advance, user_code: bool) -> Result<String, TargetError> {
        let reset = if self.reset { "RESET ALL; " } else { "" };
        let call = checkpoint::advance_call(&self.id, advance, &self.expected(advance))?;
        let token = if user_code {
            format!("; {PLAN_FREELY}; SELECT set_config('{TOKEN_SETTING}', '{}', true)", token(advance))
        } else {
            String::new()
        };
        Ok(format!("{reset}{BEGIN}; {call}{token}"))
    }

    #[cfg(feature = "test-switches")]
    fn may_be_single(&self) -> bool {
        self.switch != Some(crate::Switch::CommitNoSmallerThan)
    }

    #[cfg(not(feature = "test-switches"))]
    #[expect(clippy::unused_self, reason = "the switch is a field")]
    fn may_be_single(&self) -> bool {
        true
    }

    /// The SQL of the commit number that the row must have.
    #[cfg_attr(not(feature = "test-switches"), expect(clippy::unused_self, reason = "the switch is a field"))]
    fn expected(&self, advance: &Advance) -> String {
        #[cfg(feature = "test-switches")]
        if self.switch == Some(crate::Switch::CommitNoSmallerThan) {
            return format!(
                "(SELECT commit_no FROM scriba_checkpoints WHERE name = {} AND version = {} \
                 AND (watermark IS NULL OR watermark < {}) FOR UPDATE)",
                crate::names::literal(&self.id.name),
                self.id.version,
                advance.watermark,
            );
        }
        advance.expected_commit_no.to_string()
    }

    /// What a commit that moved no row met.
    async fn fenced(&self, conn: &mut PgConnection, advance: &Advance) -> CommitError {
        let read = async {
            raw_sql("ROLLBACK").execute(&mut *conn).await?;
            checkpoint::shortfall(conn, &self.names, &self.id, advance).await
        };
        match in_time(self.bound, read).await {
            Ok(shortfall) => CommitError::Fenced(shortfall),
            Err(error) => {
                CommitError::Failed(target_error(&error, &format!("reading the checkpoint of {} back", self.id)))
            }
        }
    }
}

/// Operations and dead letters of a batch, each in the order of positions.
fn take_apart(batch: &Batch<PgOp>) -> (Vec<(Position, &PgOp)>, Vec<NewDeadLetter<'_>>) {
    let mut ops = Vec::with_capacity(batch.entries.len());
    let mut letters = Vec::new();
    for entry in &batch.entries {
        if let Write::Apply(outcome) = &entry.write {
            ops.extend(outcome.ops().iter().map(|op| (entry.meta.position, op)));
        }
        letters.extend(entry.dead_letter());
    }
    (ops, letters)
}

/// Refuses statements that would end or leave the transaction.
fn refuse_unsafe(ops: &[(Position, &PgOp)]) -> Result<(), TargetError> {
    for (position, op) in ops {
        if let PgOp::Sql(sql) = op {
            sql.check().map_err(|error| TargetError {
                position: Some(*position),
                ..TargetError::new(FailureClass::Integrity, format!("the event at position {position}: {error}"))
            })?;
        }
    }
    Ok(())
}

/// A failed statement of the plan, with its event where it holds only one.
fn statement_failed(statement: &Statement<'_>, error: StatementError) -> TargetError {
    let mut failure = match error {
        StatementError::Database(error) => target_error(&error, "writing the read model"),
        StatementError::NoRow(error) => TargetError::new(FailureClass::Integrity, error),
    };
    failure.position = statement.single_position();
    failure
}

fn token(advance: &Advance) -> String {
    format!("{}.{}", advance.epoch, advance.expected_commit_no)
}

/// Makes sure that the transaction is the one that moved the checkpoint: sqlx answers a COMMIT of any other, or of a
/// failed one, with Ok.
async fn still_in(conn: &mut PgConnection, token: &str) -> Result<(), TargetError> {
    const WHAT: &str = "looking whether `sql` statements left the transaction open";
    let found: Option<String> = sqlx::query_scalar("SELECT current_setting($1, true)")
        .bind(TOKEN_SETTING)
        .fetch_one(conn)
        .await
        .map_err(|error| target_error(&error, WHAT))?;
    if found.as_deref() == Some(token) {
        return Ok(());
    }
    Err(TargetError::new(
        FailureClass::Structural,
        "a `sql` statement ended the transaction of its batch: take COMMIT, ROLLBACK and their like out of it",
    ))
}

/// Says goodbye, so that the server gives up locks at once; a connection that cannot is dropped.
async fn close(conn: PgConnection) {
    let _ = timeout(CLOSE_TIMEOUT, conn.close()).await;
}
