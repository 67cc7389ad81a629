//! The engine doing what the hand-written loop does: balances out of a Postgres log.

use sqlx::PgConnection;
use sqlx::postgres::PgConnectOptions;
use tokio::sync::watch;

use crate::Result;
use crate::hand_loop::{Until, reset_balances};

/// Whether [`run`] runs anything yet.
pub const AVAILABLE: bool = false;

/// Creates the table of balances and the control tables, all empty, in place of those that there are.
pub async fn reset(connection: &mut PgConnection) -> Result<()> {
    reset_balances(connection).await
}

#[expect(clippy::unused_async, reason = "what is to be awaited comes with the engine")]
/// Runs the engine from its checkpoint. Each watermark is told to `watermark` once it is durable.
pub async fn run(database: &PgConnectOptions, until: Until, watermark: &watch::Sender<Option<i64>>) -> Result<()> {
    let _ = (database, until, watermark);
    Err("the engine is not wired to this bench yet".into())
}
