//! A batch as one statement, in which the move of the checkpoint gates the write.

use scriba_core::checkpoint::Advance;
use scriba_core::target::{Account, Committed, TargetError};
use scriba_core::{FailureClass, Position};
use sqlx::postgres::PgArguments;
use sqlx::{AssertSqlSafe, PgConnection};

use crate::answer::in_time;
use crate::apply::{PgCommitter, Stopped};
use crate::checkpoint;
use crate::sqlstate::{CHECKPOINT_MOVED, postgres_error, refused_by_server, target_error};
use crate::statement::Statement;
use crate::switch::Switch;

impl PgCommitter {
    /// The batch as one statement, where its writes are at most one on a table that is fused: those are checked as the
    /// statement ends, and nothing of the user's runs.
    pub(crate) fn single(
        &self,
        plan: &[Statement<'_>],
        advance: &Advance,
        assumed: &Account,
    ) -> Result<Option<(AssertSqlSafe<String>, PgArguments)>, TargetError> {
        let gate = |first| self.names.substitute(&checkpoint::gate(first));
        let fused = |statement: &Statement<'_>| {
            let facts = statement.keyed_table().and_then(|table| self.facts.get(table));
            facts.is_some_and(|facts| facts.one_by_one.is_none())
        };
        let gated = match plan {
            _ if self.reset || self.target.breaks(Switch::CommitNoSmallerThan) => None,
            [] => Some(Ok((format!("SELECT count(*) FROM (SELECT {}) AS moved", gate(1)), PgArguments::default()))),
            [statement] if fused(statement) => statement.gated(gate),
            _ => None,
        };
        let Some(gated) = gated else { return Ok(None) };
        let (text, mut arguments) =
            gated.map_err(|error| target_error(&sqlx::Error::Encode(error), "writing the read model"))?;
        checkpoint::bind_gate(&mut arguments, &self.id, advance, assumed.in_row())?;
        // Identifiers in it are quoted by the statement and by `substitute`; values travel as binds.
        Ok(Some((AssertSqlSafe(text), arguments)))
    }

    /// Once it is sent, only the server can say whether it is committed.
    pub(crate) async fn autocommit(
        &self,
        conn: &mut PgConnection,
        text: AssertSqlSafe<String>,
        arguments: PgArguments,
        position: Option<Position>,
        assumed: Account,
    ) -> Result<Committed, Stopped> {
        let moved = in_time(self.bound, sqlx::query_scalar_with(text, arguments).fetch_one(conn)).await;
        match moved {
            Ok(1_i64) => Ok(assumed.committed(1)),
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
}
