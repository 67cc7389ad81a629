//! Deferrable constraints: what checks those that are deferred at the end of an event, as COMMIT would.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use sqlx::PgConnection;

use crate::names::Names;

/// How long what the catalogue said is believed.
const BELIEVED_FOR: Duration = Duration::from_mins(1);

/// All deferrable constraints of permanent tables but the guard, with whether they are deferred from the beginning. Where
/// several in a schema have one name, they can only be set together: then as deferred ones.
const DEFERRABLE: &str = "\
    SELECT quote_ident(n.nspname) || '.' || quote_ident(c.conname), bool_or(c.condeferred) \
    FROM pg_constraint AS c JOIN pg_namespace AS n ON n.oid = c.connamespace JOIN pg_class AS t ON t.oid = c.conrelid \
    WHERE c.condeferrable AND c.conrelid <> to_regclass($1)::oid AND t.relpersistence <> 't' \
        AND has_schema_privilege(n.oid, 'USAGE') \
    GROUP BY n.nspname, c.conname ORDER BY 1";

/// The texts that check.
#[derive(Clone, Debug)]
pub(crate) struct Constraints {
    read: Instant,
    /// Where there is no guard that takes this for a COMMIT.
    pub(crate) check: String,
    /// Where there is one.
    pub(crate) check_but_the_guard: String,
}

impl Constraints {
    pub(crate) async fn read(conn: &mut PgConnection, names: &Names) -> sqlx::Result<Self> {
        let rows: Vec<(String, bool)> =
            sqlx::query_as(DEFERRABLE).bind(names.quoted("scriba_checkpoints")).fetch_all(conn).await?;
        let list = |wanted: fn(bool) -> bool| {
            let names = rows.iter().filter(|(_, deferred)| wanted(*deferred)).map(|(name, _)| name.as_str());
            names.collect::<Vec<_>>().join(", ")
        };
        let (all, immediate) = (list(|_| true), list(|deferred| !deferred));
        if all.is_empty() {
            return Ok(Self { read: Instant::now(), check: String::new(), check_but_the_guard: String::new() });
        }
        // Their modes are as declared again afterwards.
        let mut restore = "SET CONSTRAINTS ALL DEFERRED; ".to_owned();
        if !immediate.is_empty() {
            // Writing to a String cannot fail.
            let _ = write!(restore, "SET CONSTRAINTS {immediate} IMMEDIATE; ");
        }
        Ok(Self {
            read: Instant::now(),
            check: format!("SET CONSTRAINTS ALL IMMEDIATE; {restore}"),
            check_but_the_guard: format!("SET CONSTRAINTS {all} IMMEDIATE; {restore}"),
        })
    }

    pub(crate) fn is_old(&self) -> bool {
        self.read.elapsed() > BELIEVED_FOR
    }
}
