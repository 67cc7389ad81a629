//! A log, a read model and a projection between them, in a database of their own.

use std::time::{Duration, Instant};

use scriba_core::{ProjectionId, ProjectionOptions, Retry, Scriba};
use scriba_source_postgres::PgLog;
use scriba_target_postgres::PgTarget;
use scriba_testing::postgres::{Database, Postgres};
use sqlx::PgPool;

pub(crate) struct Fixture {
    pub(crate) pool: PgPool,
    pub(crate) target: PgTarget,
    pub(crate) source: PgLog,
    _database: Database,
}

/// An empty log `events` (bodies of any bytes) with a NOTIFY trigger, and the control tables.
pub(crate) async fn fixture() -> Fixture {
    let database = Postgres::shared().await.unwrap().create_database().await.unwrap();
    let pool = database.pool(8).await.unwrap();
    let log = "CREATE TABLE events (
        position bigint GENERATED ALWAYS AS IDENTITY (MINVALUE 0 START 0) PRIMARY KEY,
        id uuid NOT NULL DEFAULT gen_random_uuid(),
        stream_id text NOT NULL,
        type text NOT NULL,
        data bytea NOT NULL
    )";
    sqlx::raw_sql(log).execute(&pool).await.unwrap();
    let source = PgLog::new(pool.clone(), "events").notify_channel("events");
    let trigger = source.notify_trigger_sql().expect("there is a channel");
    sqlx::raw_sql(sqlx::AssertSqlSafe(trigger)).execute(&pool).await.unwrap();
    let target = PgTarget::new(pool.clone());
    target.migrate().await.unwrap();
    Fixture { pool, target, source, _database: database }
}

impl Fixture {
    pub(crate) async fn append(&self, stream: &str, event_type: &str, data: &[u8]) -> i64 {
        sqlx::query_scalar("INSERT INTO events (stream_id, type, data) VALUES ($1, $2, $3) RETURNING position")
            .bind(stream)
            .bind(event_type)
            .bind(data)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }
}

pub(crate) fn options() -> ProjectionOptions {
    ProjectionOptions::default()
        .parallelism(8)
        .retry(Retry::new(2, [Duration::from_millis(1)]))
        .shutdown_timeout(Duration::from_secs(5))
}

/// Waits until everything up to a position is accounted for.
pub(crate) async fn until(scriba: &Scriba, id: &ProjectionId, position: i64) {
    let position = scriba_core::Position::from_i64(position).unwrap();
    let waited = scriba.wait_for(id, scriba_core::WaitFor::Position(position), Duration::from_secs(20)).await;
    if let Err(error) = waited {
        panic!("{error}: {:#?}", scriba.info(id));
    }
}

/// Waits until a condition holds.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < until, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
