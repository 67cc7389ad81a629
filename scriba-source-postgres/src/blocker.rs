//! Who may still fill a gap, as a line for people.

use std::fmt::Write as _;

use scriba_core::source::SourceError;
use sqlx::postgres::PgConnection;
use sqlx::query_as;

use crate::catalog::Catalog;
use crate::error::answer;
use crate::frontier::Frontier;
use crate::sql;

/// So many are named; behind them stands how many more there are.
const NAMED: usize = 3;

/// Virtual transaction, process, application, name of a prepared transaction, user, address, state, seconds open, blocked by.
type Holder =
    (String, Option<i32>, String, Option<String>, String, Option<String>, Option<String>, Option<i64>, Vec<i32>);

/// Names those that may own `missing`, the oldest first. Empty where they have just ended.
pub(crate) async fn describe(
    connection: &mut PgConnection,
    catalog: &Catalog,
    frontier: &Frontier,
    missing: i64,
) -> Result<String, SourceError> {
    let holders: Vec<Holder> = answer(
        &catalog.name,
        "look who holds a gap",
        query_as(sql::HOLDERS).bind(vec![catalog.sequence.oid]).fetch_all(connection),
    )
    .await?;
    let owners: Vec<_> = holders.iter().filter(|holder| frontier.can_own(&holder.0, missing)).collect();
    let mut lines: Vec<_> = owners.iter().take(NAMED).map(|holder| line(holder)).collect();
    if owners.len() > NAMED {
        lines.push(format!("and {} more", owners.len() - NAMED));
    }
    Ok(lines.join("; "))
}

fn line((_, pid, application, prepared, user, address, state, open_seconds, blocked_by): &Holder) -> String {
    let mut line = match (pid, prepared) {
        (Some(pid), _) => format!("pid {pid} app={application}"),
        (None, Some(gid)) => format!("prepared transaction '{gid}'"),
        (None, None) => "a prepared transaction".to_owned(),
    };
    // Writing to a String does not fail.
    let _ = write!(line, " user={user}");
    if let Some(address) = address {
        let _ = write!(line, " from {address}");
    }
    if let Some(state) = state {
        let _ = write!(line, " {state}");
    }
    match open_seconds {
        Some(seconds) => _ = write!(line, ", open {seconds} s"),
        None => line.push_str(", age not visible (GRANT pg_read_all_stats to the role of the source)"),
    }
    if !blocked_by.is_empty() {
        let _ = write!(line, ", waits for pids {blocked_by:?}");
    }
    match (pid, prepared) {
        (Some(pid), _) => _ = write!(line, " (SELECT pg_terminate_backend({pid}) ends it)"),
        (None, Some(gid)) => _ = write!(line, " (ROLLBACK PREPARED '{}' ends it)", gid.replace('\'', "''")),
        (None, None) => line.push_str(" (see pg_prepared_xacts)"),
    }
    line
}
