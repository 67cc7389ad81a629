//! The session behind a committing connection, and its end.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tokio::time::timeout;

use crate::custom::SETTINGS;

/// How long the goodbye to a server is tried after a failure.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A session as the server knows it.
#[derive(Clone, Debug)]
pub(crate) struct Backend {
    pub(crate) pid: i32,
    started: DateTime<Utc>,
    /// What RESET goes back to of [`SETTINGS`].
    pub(crate) settings: String,
}

impl Backend {
    pub(crate) async fn of(conn: &mut PgConnection) -> sqlx::Result<Self> {
        let look = format!("SELECT pid, backend_start, {SETTINGS} FROM pg_stat_activity WHERE pid = pg_backend_pid()");
        // Made of this crate's own words.
        let (pid, started, settings) = sqlx::query_as(AssertSqlSafe(look)).fetch_one(conn).await?;
        Ok(Self { pid, started, settings })
    }

    /// Ends it from another session: in the middle of a statement it does not hear a goodbye, and keeps its locks.
    pub(crate) async fn end(&self, conn: &mut PgConnection) -> sqlx::Result<()> {
        let end = "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2";
        sqlx::query(end).bind(self.pid).bind(self.started).execute(conn).await.map(drop)
    }
}

/// Says goodbye, so that the server gives up locks at once; a connection that cannot is dropped.
pub(crate) async fn close(conn: PgConnection) {
    let _ = timeout(CLOSE_TIMEOUT, conn.close()).await;
}
