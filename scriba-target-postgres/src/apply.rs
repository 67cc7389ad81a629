//! One batch, one transaction: the checkpoint moves first, then operations and dead letters, COMMIT last.
//!
//! Where the writes are a single statement, [`crate::single`] makes one of all of it. A batch that fails for the data of one of its
//! events, and one with closures, is written event by event by [`crate::isolate`].

use std::fmt::Write as _;
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::checkpoint::Advance;
use scriba_core::dead_letter::{NewDeadLetter, kind};
use scriba_core::target::{
    Account, Batch, CommitError, Committed, Committer, Entry, Refused, Shortfall, TargetError, Write,
};
use scriba_core::{FailureClass, Position, ProjectionId, sqlstate};
use sqlx::postgres::PgDatabaseError;
use sqlx::{AssertSqlSafe, Connection, Executor as _, PgConnection, Postgres, Transaction, raw_sql};

use crate::answer::in_time;
use crate::backend::{Backend, close};
use crate::blocker::Lookout;
use crate::constraints::Constraints;
use crate::custom::{self, Limits, Misstep, RESET, Session, Standing, TIDY};
use crate::facts::{FactsCache, FactsError};
use crate::fuse::{may_change_schema, plan};
use crate::isolate::{Guilty, Suspect};
use crate::names::Names;
use crate::op::PgOp;
use crate::sqlstate::{
    CHECKPOINT_MOVED, postgres_error, refused_by_server, structural_unless_transient, target_error, to_i64,
};
use crate::statement::{Row, Statement, StatementError, table_of};
use crate::switch::Switch;
use crate::target::PgTarget;
use crate::{checkpoint, dead_letter};

/// That it may write is the session's default, and is said only where that may have been changed: a server in recovery refuses to
/// hear it with a code that says nothing.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// Constraints are checked statement by statement, so that what commits does not depend on where a batch ends.
const IMMEDIATE: &str = "SET CONSTRAINTS ALL IMMEDIATE; ";

/// Statements of the user get all joins there are; the committer's own get along with fewer.
const PLAN_FREELY: &str = "SET LOCAL enable_hashjoin = on; SET LOCAL enable_mergejoin = on; ";

/// What a closure sends after it has left the transaction writes nothing.
const READ_ONLY_OUTSIDE: &str = "SET default_transaction_read_only = on";

/// Names the state that the checkpoint was moved to, without which a transaction with code of the user does not commit.
const ALLOW_COMMIT: &str = "SELECT set_config('scriba.commit', $1, true)";

/// The committer of one epoch.
pub(crate) struct PgCommitter {
    pub(crate) id: ProjectionId,
    pub(crate) epoch: i64,
    /// Taken out while a batch is under way: whatever ends that early, a dropped future included, closes it, because
    /// nobody knows what state it is in.
    pub(crate) conn: Option<PgConnection>,
    /// The server's side of it.
    pub(crate) backend: Backend,
    /// The server's limit for a statement.
    pub(crate) bound: Duration,
    pub(crate) names: Names,
    pub(crate) facts: FactsCache,
    /// Asked for once events are written one by one.
    pub(crate) constraints: Option<Constraints>,
    /// Code of the user ran: settings that it left behind are undone before the next batch.
    pub(crate) reset: bool,
    /// How long a closure may take.
    pub(crate) closure_limit: Duration,
    /// Where a connection comes from when a closure has spoilt the one there was.
    pub(crate) target: PgTarget,
}

#[async_trait]
impl Committer<PgOp> for PgCommitter {
    async fn commit(&mut self, batch: &Batch<PgOp>) -> Result<Committed, CommitError> {
        let mut conn = self.connection().map_err(CommitError::Failed)?;
        let (mut guilty, mut isolated) = (Guilty::default(), None);
        let lookout = |committer: &Self| {
            let (target, pid) = (committer.target.clone(), committer.backend.pid);
            Lookout { target, pid, every: committer.bound / 4 }
        };
        let (mut written, mut blocker) = lookout(self).over(self.write(&mut conn, batch)).await;
        while let Err(Stopped::Suspect(suspect)) = written {
            let (error, lost) = guilty.note(suspect);
            isolated.get_or_insert(error);
            if lost {
                close(conn).await;
                let connected = self.target.committing_connection(&self.id, self.bound).await;
                let backend;
                (conn, backend) = connected.map_err(CommitError::Failed)?;
                let lost = std::mem::replace(&mut self.backend, backend);
                self.reset = false;
                let ended = in_time(self.bound, lost.end(&mut conn)).await;
                ended.map_err(|error| {
                    CommitError::Failed(target_error(&error, "ending a session that `custom` spoilt"))
                })?;
            }
            (written, blocker) = lookout(self).over(self.isolate(&mut conn, batch, &guilty)).await;
        }
        let error = match written {
            Ok(committed) => {
                self.conn = Some(conn);
                return Ok(Committed { isolated, ..committed });
            }
            Err(Stopped::Fenced) => self.fenced(&mut conn, &batch.advance).await,
            Err(Stopped::Error(error)) => held_up(error, blocker),
            Err(Stopped::Suspect(suspect)) => CommitError::Failed(suspect.into_error()),
        };
        if matches!(error, CommitError::HaltBefore(_)) {
            // The rollback goes out with the next begin.
            self.conn = Some(conn);
        } else {
            close(conn).await;
        }
        Err(error)
    }

    async fn store_replay_position(&mut self, caught_up: Option<Position>) -> Result<(), CommitError> {
        let position = caught_up.map_or(Ok(-1), to_i64).map_err(CommitError::Failed)?;
        let mut conn = self.connection().map_err(CommitError::Failed)?;
        self.clean(&mut conn).await.map_err(CommitError::Failed)?;
        let store = checkpoint::store_replay_position(&mut conn, &self.names, &self.id, self.epoch, position);
        let stored = in_time(self.bound, store).await;
        self.settle(conn, stored, "storing the replay position")
    }

    async fn store_event_types(&mut self, types: Option<&[&str]>) -> Result<(), CommitError> {
        let mut conn = self.connection().map_err(CommitError::Failed)?;
        self.clean(&mut conn).await.map_err(CommitError::Failed)?;
        let store = checkpoint::store_event_types(&mut conn, &self.names, &self.id, self.epoch, types);
        let stored = in_time(self.bound, store).await;
        self.settle(conn, stored, "storing the event types")
    }
}

/// Why a transaction did not commit.
pub(crate) enum Stopped {
    /// The checkpoint did not move. The transaction is in its failed state, and sqlx does not know of it.
    Fenced,
    /// The data of an event is to blame.
    Suspect(Suspect),
    Error(CommitError),
}

impl From<TargetError> for Stopped {
    fn from(error: TargetError) -> Self {
        if error.class == FailureClass::Integrity {
            Self::Suspect(Suspect::Failed(error))
        } else {
            Self::Error(CommitError::Failed(error))
        }
    }
}

impl From<Misstep> for Stopped {
    fn from(misstep: Misstep) -> Self {
        match misstep {
            Misstep::Failed(error) => error.into(),
            Misstep::Lost(error) => Self::Suspect(Suspect::Lost(error)),
        }
    }
}

/// A transaction whose checkpoint has moved.
pub(crate) struct Begun<'c> {
    pub(crate) tx: Transaction<'c, Postgres>,
    /// What the checkpoint was moved by.
    assumed: Account,
    /// Set where code of the user may run in it.
    pub(crate) session: Option<Session>,
    /// Event by event, under savepoints.
    one_by_one: bool,
    pub(crate) statements: u64,
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

    /// Undoes what code of the user may have left behind for the session.
    async fn clean(&mut self, conn: &mut PgConnection) -> Result<(), TargetError> {
        if self.reset {
            let cleaned = conn.execute(raw_sql(AssertSqlSafe(format!("{RESET}{TIDY}"))));
            let cleaned = in_time(self.bound, cleaned).await;
            cleaned.map_err(|error| target_error(&error, "undoing what code of the user left behind"))?;
            self.reset = false;
        }
        Ok(())
    }

    fn connection(&mut self) -> Result<PgConnection, TargetError> {
        self.conn.take().ok_or_else(|| {
            TargetError::new(FailureClass::Structural, "a committer that failed was used again: take over anew")
        })
    }

    async fn write(&mut self, conn: &mut PgConnection, batch: &Batch<PgOp>) -> Result<Committed, Stopped> {
        let assumed = assume(batch)?;
        let ops = ops_of(&batch.entries);
        // Such code could spoil the transaction for the events behind it, and is undone behind each event there.
        let risky = UserCode::of(&ops) == UserCode::Closures || ops.iter().any(|(_, op)| may_change_schema(op));
        if risky && !self.trusts() {
            return self.isolate(conn, batch, &Guilty::default()).await;
        }
        refuse_unsafe(&ops)?;
        in_time(self.bound, self.load_facts(conn, &ops)).await?;
        if self.target.breaks(Switch::FenceLast) {
            return self.write_unfenced(conn, batch).await;
        }
        // Between dead letters nobody can tell which of the events changed something.
        let plans: Vec<_> = parts(batch).map(|part| (part, plan(&ops_of(part), &self.facts))).collect();
        // What the circuit counts depends on rows hit, which a single statement does not tell.
        if batch.in_row.count == 0 && assumed.counts().dead_lettered == 0 {
            let plan = plans.first().map_or(&[][..], |(_, plan)| plan);
            if let Some((text, arguments)) = self.single(plan, &batch.advance, &assumed)? {
                let position = plan.first().and_then(Statement::single_position);
                return self.autocommit(conn, text, arguments, position, assumed).await;
            }
        }
        let mut begun = self.begin(conn, &batch.advance, assumed, false, UserCode::of(&ops)).await?;
        let mut account = batch.account();
        for (part, plan) in plans {
            let changed = self.execute(&mut begun, &plan).await?;
            note(&mut account, part, changed)?;
        }
        self.finish(begun, batch, account).await
    }

    /// Sends statements, and answers whether any of them changed something.
    pub(crate) async fn execute(&self, begun: &mut Begun<'_>, plan: &[Statement<'_>]) -> Result<bool, Stopped> {
        let mut changed = false;
        for statement in plan {
            begun.statements += 1;
            if let (Some((position, closure)), Some(session)) = (statement.custom(), &begun.session) {
                custom::run(closure, &mut begun.tx, self.limits(session), position).await?;
                changed = true;
            } else {
                let executed = in_time(self.bound, statement.execute(&mut begun.tx)).await;
                let rows = executed.map_err(|error| {
                    let failure = statement_failed(statement, error);
                    // One by one, it is found which event changed what later ones stand on.
                    if begun.session.is_some() && !begun.one_by_one { perhaps_of_user_code(failure) } else { failure }
                })?;
                changed |= statement.changed(rows);
            }
        }
        Ok(changed)
    }

    pub(crate) fn limits<'s>(&self, session: &'s Session) -> Limits<'s> {
        Limits { closure: self.closure_limit, answer: self.bound, session, trusted: self.trusts() }
    }

    /// Never but in tests.
    fn trusts(&self) -> bool {
        self.target.breaks(Switch::TrustClosures) || self.target.breaks(Switch::NoGuard)
    }

    /// Writes dead letters, brings the checkpoint in line with what was found, and commits.
    pub(crate) async fn finish(
        &mut self,
        begun: Begun<'_>,
        batch: &Batch<PgOp>,
        account: Account,
    ) -> Result<Committed, Stopped> {
        let Begun { mut tx, assumed, session, mut statements, .. } = begun;
        let refused = account.refusals().iter();
        let refused = refused.map(|Refused { meta, failure }| NewDeadLetter { event: meta.event(), failure });
        let mut letters: Vec<_> = batch.entries.iter().filter_map(Entry::dead_letter).chain(refused).collect();
        letters.sort_by_key(|letter| letter.event.position);
        if !letters.is_empty() {
            in_time(self.bound, dead_letter::insert(&mut tx, &self.names, &self.id, &letters)).await?;
            statements += 1;
        }
        if (account.counts(), account.in_row()) != (assumed.counts(), assumed.in_row()) {
            let correct = checkpoint::correct(&mut tx, &self.names, &self.id, &batch.advance, &assumed, &account);
            in_time(self.bound, correct).await?;
            statements += 1;
        }
        if let Some(session) = &session {
            self.allow_commit(&mut tx, session, &batch.advance).await?;
            statements += 2;
        }
        in_time(self.bound, tx.commit()).await.map_err(|error| self.not_committed(&error))?;
        self.reset = session.is_some();
        Ok(account.committed(statements + 1))
    }

    /// Makes sure that the transaction is the one that moved the checkpoint, because sqlx answers a COMMIT of any other, or of a
    /// failed one, with Ok; and lets it pass the guard.
    async fn allow_commit(
        &self,
        tx: &mut PgConnection,
        session: &Session,
        advance: &Advance,
    ) -> Result<(), TargetError> {
        if self.trusts() {
            return Ok(());
        }
        let standing = match custom::depth(tx) {
            1 => in_time(self.bound, custom::standing(tx, session)).await?,
            _ => Standing::Gone,
        };
        let class = match standing {
            Standing::Open => None,
            // Written by itself, the event that changed them does not change what those behind it do.
            Standing::Changed | Standing::ReadOnly => Some(FailureClass::Integrity),
            Standing::Failed | Standing::Gone => Some(FailureClass::Structural),
        };
        if let Some(class) = class {
            let message = "a `sql` statement ended the transaction of its batch, or changed its settings: take COMMIT, ROLLBACK, SET \
                           and their like out of the functions it calls";
            return Err(TargetError::new(class, message));
        }
        if !session.guarded {
            return Ok(());
        }
        let allow = sqlx::query(ALLOW_COMMIT).bind(moved_to(advance)).execute(tx);
        in_time(self.bound, allow)
            .await
            .map(drop)
            .map_err(|error| target_error(&error, &format!("committing a batch of {}", self.id)))
    }

    /// The round trip that decides whether the rest may be sent: its answer is read before anything follows.
    pub(crate) async fn begin<'c>(
        &mut self,
        conn: &'c mut PgConnection,
        advance: &Advance,
        assumed: Account,
        one_by_one: bool,
        user_code: UserCode,
    ) -> Result<Begun<'c>, Stopped> {
        let call = checkpoint::advance_call(&self.id, advance, assumed.in_row(), &self.expected(advance))?;
        let (mut reset, mut writes, mut tidy) = if self.reset { (RESET, " READ WRITE", TIDY) } else { ("", "", "") };
        if user_code == UserCode::Closures {
            let prepared = conn.execute(raw_sql(AssertSqlSafe(format!("{RESET}{TIDY}{READ_ONLY_OUTSIDE}"))));
            in_time(self.bound, prepared).await.map_err(|error| self.not_begun(&error))?;
            (reset, writes, tidy) = ("", " READ WRITE", "");
        }
        let unguarded = self.target.breaks(Switch::NoGuard) || self.target.breaks(Switch::CommitNoSmallerThan);
        let session = (user_code != UserCode::None).then(|| {
            let token = format!("{}.{}", advance.epoch, advance.expected_commit_no);
            let mut settings = PLAN_FREELY.to_owned();
            if user_code == UserCode::Closures {
                // A lock that is not to be had is no fault of the closure that waits for it, whose time ends later.
                let lock_timeout = (self.closure_limit / 2).as_millis().max(1);
                // Writing to a String cannot fail.
                let _ = write!(settings, "SET LOCAL lock_timeout = {lock_timeout}; ");
            }
            let guarded = user_code == UserCode::Closures && !unguarded;
            Session { token, before: self.backend.settings.clone(), settings, guarded }
        });
        let constraints = if one_by_one { "" } else { IMMEDIATE };
        let guard = session.as_ref().map_or_else(String::new, |session| {
            let guard = self.names.constraint("scriba_commit_guard");
            format!("SET CONSTRAINTS {guard} DEFERRED; {}", session.mark())
        });
        let settings = session.as_ref().map_or_else(String::new, |session| format!("; {}", session.settings));
        let begin =
            format!("{reset}{BEGIN}{writes}; {tidy}{constraints}{guard}{}{settings}", self.names.substitute(&call));
        // Identifiers in it are quoted, and so are the literals of the call.
        let begun = in_time(self.bound, conn.begin_with(AssertSqlSafe(begin))).await;
        let tx = begun.map_err(|error| self.not_begun(&error))?;
        // Until a commit: a rollback undoes the reset too.
        self.reset |= user_code != UserCode::None;
        Ok(Begun { tx, assumed, session, one_by_one, statements: 1 })
    }

    fn not_begun(&self, error: &sqlx::Error) -> Stopped {
        match postgres_error(error).map(PgDatabaseError::code) {
            Some(CHECKPOINT_MOVED) => return Stopped::Fenced,
            // READ WRITE, said to a server in recovery.
            Some(sqlstate::FEATURE_NOT_SUPPORTED) => {
                let failure = target_error(error, &format!("beginning a batch of {}", self.id));
                return TargetError { class: FailureClass::TransientServer, ..failure }.into();
            }
            _ => {}
        }
        structural_unless_transient(target_error(error, &format!("moving the checkpoint of {}", self.id))).into()
    }

    /// An error of the server's says that the transaction is rolled back; without one COMMIT may have arrived.
    pub(crate) fn not_committed(&self, error: &sqlx::Error) -> Stopped {
        let failure = target_error(error, &format!("committing a batch of {}", self.id));
        if refused_by_server(error) { failure.into() } else { Stopped::Error(CommitError::Ambiguous(failure)) }
    }

    /// Facts are read before the transaction begins.
    pub(crate) async fn load_facts(&mut self, conn: &mut PgConnection, ops: &[Row<'_>]) -> Result<(), TargetError> {
        let tables = ops.iter().filter_map(|(_, op)| table_of(op));
        self.facts.load(conn, tables).await.map_err(|error| match error {
            FactsError::Database(error) => structural_unless_transient(target_error(&error, "reading the catalogue")),
            FactsError::Mismatch(code, message) => {
                TargetError { code: Some(code.to_owned()), ..TargetError::new(FailureClass::Structural, message) }
            }
        })
    }

    /// The SQL of the commit number that the row must have.
    fn expected(&self, advance: &Advance) -> String {
        if self.target.breaks(Switch::CommitNoSmallerThan) {
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

/// Names who was in the way, where that is what the failure is about.
fn held_up(error: CommitError, blocker: Option<String>) -> CommitError {
    match (error, blocker) {
        (CommitError::Failed(mut error), Some(blocker)) if error.class == FailureClass::TransientStatement => {
            error.message = format!("{}; held up by {blocker}", error.message);
            CommitError::Failed(error)
        }
        (error, _) => error,
    }
}

/// The account of a batch whose events all change something. Where even that trips the circuit, the batch has to end before.
pub(crate) fn assume(batch: &Batch<PgOp>) -> Result<Account, Stopped> {
    let mut account = batch.account();
    note(&mut account, &batch.entries, true)?;
    Ok(account)
}

/// Enters events that were not refused into an account.
pub(crate) fn note(account: &mut Account, entries: &[Entry<PgOp>], changed: bool) -> Result<(), Stopped> {
    for Entry { meta, write } in entries {
        match write {
            Write::Skip => account.skipped(),
            Write::Apply(_) => account.applied(changed),
            Write::DeadLetter(failure) => {
                account.dead_lettered(meta, failure).map_err(|halt| Stopped::Error(CommitError::HaltBefore(halt)))?;
            }
        }
    }
    Ok(())
}

/// The events of a batch, cut behind each dead letter: what comes after one counts from it.
pub(crate) fn parts(batch: &Batch<PgOp>) -> impl Iterator<Item = &[Entry<PgOp>]> {
    batch.entries.split_inclusive(|entry| matches!(entry.write, Write::DeadLetter(_)))
}

/// The operations of some events, in the order of positions.
pub(crate) fn ops_of(entries: &[Entry<PgOp>]) -> Vec<Row<'_>> {
    let mut ops = Vec::with_capacity(entries.len());
    for entry in entries {
        if let Write::Apply(outcome) = &entry.write {
            ops.extend(outcome.ops().iter().map(|op| (entry.meta.position, op)));
        }
    }
    ops
}

/// Code of the user that runs in a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum UserCode {
    None,
    Statements,
    Closures,
}

impl UserCode {
    pub(crate) fn of(ops: &[Row<'_>]) -> Self {
        let code = ops.iter().map(|(_, op)| match op {
            PgOp::Insert(_) | PgOp::Update(_) | PgOp::Delete(_) => Self::None,
            PgOp::Sql(_) => Self::Statements,
            PgOp::Custom(_) => Self::Closures,
        });
        code.max().unwrap_or(Self::None)
    }
}

/// Refuses statements that would end or leave the transaction.
pub(crate) fn refuse_unsafe(ops: &[Row<'_>]) -> Result<(), TargetError> {
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
pub(crate) fn statement_failed(statement: &Statement<'_>, error: StatementError) -> TargetError {
    let mut failure = match error {
        StatementError::Database(error) => target_error(&error, "writing the read model"),
        StatementError::NoRow(error) => {
            TargetError { kind: Some(kind::NO_ROW.into()), ..TargetError::new(FailureClass::Integrity, error) }
        }
    };
    failure.position = statement.single_position();
    failure
}

/// Among code of the user, a failure that no data explains may be due to settings that it has changed.
fn perhaps_of_user_code(failure: TargetError) -> TargetError {
    let read_only = failure.code.as_deref() == Some(sqlstate::READ_ONLY_SQL_TRANSACTION);
    if read_only || failure.class == FailureClass::Structural {
        return TargetError { class: FailureClass::Integrity, position: None, ..failure };
    }
    failure
}

/// The state that a commit moves the checkpoint to, as the guard spells it.
pub(crate) fn moved_to(advance: &Advance) -> String {
    format!("{}.{}", advance.epoch, advance.expected_commit_no + 1)
}
