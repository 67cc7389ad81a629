//! A batch whose events are written one by one, so that only guilty ones are left out: one that failed for the data of an
//! event, and one with closures of the user, which could spoil the transaction for others.
//!
//! Each event stands under a savepoint, constraints checked as they are declared, those that are deferred at the end of the
//! event: so each is found where it is broken, and an event may break and heal one by itself. Between events that nothing of
//! this can be told of, 32 are written together first.

use std::collections::{BTreeMap, BTreeSet};

use scriba_core::dead_letter::kind;
use scriba_core::target::{Batch, CommitError, Committed, Entry, TargetError};
use scriba_core::{FailureClass, Position, sqlstate};
use sqlx::{AssertSqlSafe, Executor, PgConnection};

use crate::answer::in_time;
use crate::apply::{Begun, PgCommitter, Stopped, UserCode, assume, note, ops_of, parts, refuse_unsafe};
use crate::constraints::Constraints;
use crate::custom::{self, Session};
use crate::fuse::{heed, plan, plan_one_by_one};
use crate::op::PgOp;
use crate::sqlstate::{structural_unless_transient, target_error};
use crate::statement::{Statement, table_of};

/// Events that are written together first.
const CHUNK: usize = 32;

/// An event that is to blame for the failure of a batch.
pub(crate) enum Suspect {
    /// It, or one of several, failed; the connection is of use.
    Failed(TargetError),
    /// It left the connection in a state that nobody knows, or without its transaction.
    Lost(TargetError),
}

impl Suspect {
    pub(crate) fn into_error(self) -> TargetError {
        match self {
            Self::Failed(error) | Self::Lost(error) => error,
        }
    }
}

/// Events that are not to be tried again, because they spoil the connection.
#[derive(Default)]
pub(crate) struct Guilty {
    events: BTreeMap<Position, TargetError>,
    /// Closures that took too long once: what held one up may be gone at the second try.
    slow_once: BTreeSet<Position>,
}

impl Guilty {
    /// Notes an event. Hands the failure back, with whether the connection is of no use any more.
    pub(crate) fn note(&mut self, suspect: Suspect) -> (TargetError, bool) {
        let lost = matches!(suspect, Suspect::Lost(_));
        let error = suspect.into_error();
        if let (true, Some(position)) = (lost, error.position) {
            let slow = error.kind.as_deref() == Some(kind::TIMEOUT);
            if !slow || !self.slow_once.insert(position) {
                self.events.insert(position, error.clone());
            }
        }
        (error, lost)
    }
}

/// The commands around each event, the same for a whole pass. The savepoint has a name that code of the user cannot know.
struct Commands {
    save: String,
    undo: String,
    /// At the end of an event of operations.
    keep: String,
    /// At the end of one with code of the user.
    keep_and_restore: String,
}

impl Commands {
    fn new(constraints: &Constraints, session: Option<&Session>) -> Self {
        let savepoint = format!("scriba_{:016x}", fastrand::u64(..));
        let guarded = session.is_some_and(|session| session.guarded);
        let check = if guarded { &constraints.check_but_the_guard } else { &constraints.check };
        let restore = session.map_or_else(String::new, Session::restore);
        Self {
            save: format!("SAVEPOINT {savepoint}"),
            undo: format!("ROLLBACK TO SAVEPOINT {savepoint}; RELEASE SAVEPOINT {savepoint}"),
            keep: format!("{check}RELEASE SAVEPOINT {savepoint}"),
            keep_and_restore: format!("{check}{restore}RELEASE SAVEPOINT {savepoint}"),
        }
    }
}

impl PgCommitter {
    /// Writes a batch event by event. Stops at an event that spoils the connection, to be called again with that among the
    /// guilty.
    pub(crate) async fn isolate(
        &mut self,
        conn: &mut PgConnection,
        batch: &Batch<PgOp>,
        guilty: &Guilty,
    ) -> Result<Committed, Stopped> {
        let ops = ops_of(&batch.entries);
        in_time(self.bound, self.load_facts(conn, &ops)).await?;
        let constraints = in_time(self.bound, self.load_constraints(conn)).await?;
        let mut begun = self.begin(conn, &batch.advance, assume(batch)?, true, UserCode::of(&ops)).await?;
        let commands = Commands::new(&constraints, begun.session.as_ref());
        let mut account = batch.account();
        for part in parts(batch) {
            // Events that may not go with others stand between those that may.
            let alike = part.chunk_by(|a, b| self.may_go_together(a, guilty) && self.may_go_together(b, guilty));
            for chunk in alike.flat_map(|alike| alike.chunks(CHUNK)) {
                if chunk.len() > 1 {
                    let together = plan(&ops_of(chunk), &self.facts);
                    if let Ok(changed) = self.under_savepoint(&mut begun, &together, None, &commands).await? {
                        note(&mut account, chunk, changed)?;
                        continue;
                    }
                }
                for entry in chunk {
                    match self.alone(&mut begun, entry, guilty, &commands).await? {
                        Ok(changed) => note(&mut account, std::slice::from_ref(entry), changed)?,
                        Err(error) => account
                            .refused(&entry.meta, &error)
                            .map_err(|halt| Stopped::Error(CommitError::HaltBefore(halt)))?,
                    }
                }
            }
        }
        self.finish(begun, batch, account).await.map_err(|stopped| match stopped {
            Stopped::Suspect(suspect) if batch.entries.len() == 1 => {
                // What its check does not reach, such as a constraint in a schema that this role may not use.
                let position = batch.entries.first().map(|entry| entry.meta.position);
                Stopped::Suspect(Suspect::Lost(TargetError { position, ..suspect.into_error() }))
            }
            Stopped::Suspect(suspect) => {
                // Somebody else has changed what was checked at the end of each event; the next try finds the event.
                self.constraints = None;
                let class = FailureClass::TransientStatement;
                Stopped::Error(CommitError::Failed(TargetError { class, ..suspect.into_error() }))
            }
            other => other,
        })
    }

    async fn load_constraints(&mut self, conn: &mut PgConnection) -> Result<Constraints, TargetError> {
        if let Some(constraints) = self.constraints.as_ref().filter(|constraints| !constraints.is_old()) {
            return Ok(constraints.clone());
        }
        let read = Constraints::read(conn, &self.names).await;
        let read = read.map_err(|error| structural_unless_transient(target_error(&error, "reading the catalogue")))?;
        Ok(self.constraints.insert(read).clone())
    }

    /// Where the tables of all its operations are fused, no deferred constraint and no code of the user tells an event from those
    /// around it.
    fn may_go_together(&self, entry: &Entry<PgOp>, guilty: &Guilty) -> bool {
        !guilty.events.contains_key(&entry.meta.position)
            && ops_of(std::slice::from_ref(entry)).iter().all(|(_, op)| {
                let facts = table_of(op).and_then(|table| self.facts.get(table));
                facts.is_some_and(|facts| facts.one_by_one.is_none())
            })
    }

    /// One event. Answers whether it changed something, or why it is a dead letter.
    async fn alone(
        &self,
        begun: &mut Begun<'_>,
        entry: &Entry<PgOp>,
        guilty: &Guilty,
        commands: &Commands,
    ) -> Result<Result<bool, TargetError>, Stopped> {
        let position = entry.meta.position;
        if let Some(error) = guilty.events.get(&position) {
            return Ok(Err(error.clone()));
        }
        let ops = ops_of(std::slice::from_ref(entry));
        if ops.is_empty() {
            return Ok(Ok(false));
        }
        if let Err(error) = refuse_unsafe(&ops) {
            return Ok(Err(error));
        }
        let user_code = (UserCode::of(&ops) != UserCode::None).then_some(position);
        let written = self.under_savepoint(begun, &plan_one_by_one(&ops), user_code, commands).await;
        for (_, op) in &ops {
            heed(op, &self.facts);
        }
        written
    }

    /// Sends statements and checks what is deferred; where that fails for the data, everything is as it was before. `user_code`
    /// is the position of an event that has some.
    async fn under_savepoint(
        &self,
        begun: &mut Begun<'_>,
        statements: &[Statement<'_>],
        user_code: Option<Position>,
        commands: &Commands,
    ) -> Result<Result<bool, TargetError>, Stopped> {
        self.command(begun, &commands.save).await?;
        match self.write_and_keep(begun, statements, user_code, commands).await {
            Ok(changed) => Ok(Ok(changed)),
            Err(Stopped::Suspect(Suspect::Failed(error))) => {
                self.command(begun, &commands.undo).await?;
                Ok(Err(error))
            }
            Err(stopped) => Err(stopped),
        }
    }

    async fn write_and_keep(
        &self,
        begun: &mut Begun<'_>,
        statements: &[Statement<'_>],
        user_code: Option<Position>,
        commands: &Commands,
    ) -> Result<bool, Stopped> {
        let changed = self.execute(begun, statements).await?;
        let (Some(position), Some(session)) = (user_code, &begun.session) else {
            self.command(begun, &commands.keep).await?;
            return Ok(changed);
        };
        // A closure was examined as it came back.
        if statements.iter().any(|statement| statement.custom().is_none()) {
            custom::examine(&mut begun.tx, self.limits(session), position, Ok(())).await?;
        }
        let kept = self.command(begun, &commands.keep_and_restore).await;
        kept.map_err(|stopped| match stopped {
            // What it left behind cannot be undone.
            Stopped::Error(CommitError::Failed(error)) if error.class == FailureClass::Structural => {
                let class = FailureClass::Integrity;
                let kind = Some(kind::LEFT_TRANSACTION.into());
                TargetError { class, kind, position: Some(position), ..error }.into()
            }
            other => other,
        })?;
        Ok(changed)
    }

    async fn command(&self, begun: &mut Begun<'_>, text: &str) -> Result<(), Stopped> {
        begun.statements += 1;
        // Made of this crate's own words, numbers, and names that the server has quoted.
        let sent = begun.tx.execute(sqlx::raw_sql(AssertSqlSafe(text.to_owned())));
        let error = match in_time(self.bound, sent).await {
            Ok(_) => return Ok(()),
            Err(error) => target_error(&error, "writing events one by one"),
        };
        let class = match error.code.as_deref() {
            // A constraint that was there when the catalogue was read: the next committer reads it again.
            Some(sqlstate::UNDEFINED_OBJECT) => FailureClass::Unclear,
            _ => error.class,
        };
        Err(TargetError { class, ..error }.into())
    }
}
