//! The database of the bank: one that is given, or a server of its own for the time of the run.

use scriba_source_postgres::PgLog;
use scriba_target_postgres::PgTarget;
use scriba_testing::postgres::{Postgres, PostgresError, PostgresOptions};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};

use crate::{Error, Result};

/// The log as the projections read it, where it is a table.
pub(crate) fn table(pool: PgPool) -> PgLog {
    PgLog::new(pool, "bank_events")
        .metadata_column("metadata")
        .occurred_at_column("occurred_at")
        .notify_channel("bank_events")
}

pub(crate) struct Database {
    pub(crate) url: String,
    pub(crate) pool: PgPool,
    /// It goes when this is dropped; `None` where the database was given.
    _server: Option<Postgres>,
}

impl Database {
    /// Connects and creates the tables.
    ///
    /// # Errors
    /// No server, or a database that holds a bank already.
    pub(crate) async fn create(given: Option<String>, connections: u32) -> Result<Self> {
        let (url, server) = if let Some(url) = given {
            (url, None)
        } else {
            let server = Postgres::start(PostgresOptions::durable()).await.map_err(explain)?;
            (server.create_database().await?.url(), Some(server))
        };
        // A pool would try again for half a minute and then not say why.
        let first =
            PgConnection::connect(&url).await.map_err(|error| format!("cannot connect to the database: {error}"))?;
        first.close().await?;
        let pool = PgPoolOptions::new().max_connections(connections).connect(&url).await?;
        create_tables(&pool).await?;
        Ok(Self { url, pool, _server: server })
    }
}

fn explain(error: PostgresError) -> Error {
    match error {
        PostgresError::NotFound => {
            "no PostgreSQL found: install it (Debian, Ubuntu: `apt-get install postgresql`), or name \
                                    an empty database with --database-url"
                .into()
        }
        other => other.into(),
    }
}

/// Creates the log, the read models, the tables of Scriba, and views of what the read models have to be.
///
/// # Errors
/// There is a bank already.
pub(crate) async fn create_tables(pool: &PgPool) -> Result<()> {
    let there: bool = sqlx::query_scalar("SELECT to_regclass('bank_events') IS NOT NULL").fetch_one(pool).await?;
    if there {
        return Err("the database holds a bank already: name an empty one with --database-url".into());
    }
    pool.execute(include_str!("schema.sql")).await?;
    pool.execute(include_str!("expected.sql")).await?;
    if let Some(trigger) = table(pool.clone()).notify_trigger_sql() {
        pool.execute(sqlx::raw_sql(AssertSqlSafe(trigger))).await?;
    }
    PgTarget::new(pool.clone()).migrate().await?;
    Ok(())
}
