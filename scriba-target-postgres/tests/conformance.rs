//! The Postgres target passes the suite for targets.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

use std::sync::Arc;

use async_trait::async_trait;
use scriba_core::target::Target;
use scriba_target_postgres::{OnConflict, PgOp, PgTarget, Table, sql};
use scriba_testing::conformance::target::{Hold, Statements, TargetBed};
use scriba_testing::postgres::{Database, Postgres};
use sqlx::pool::PoolConnection;
use sqlx::{PgPool, Postgres as Server};

const TABLE: &str = "CREATE TABLE entries (key bigint PRIMARY KEY, value bigint NOT NULL CHECK (value >= 0))";

#[derive(Table)]
#[table(name = "entries")]
struct Row {
    #[table(key)]
    key: i64,
    value: i64,
}

/// Read model and control tables in a database of its own.
struct Store {
    _database: Database,
    pool: PgPool,
}

impl Store {
    async fn open() -> Self {
        let database = Postgres::shared().await.unwrap().create_database().await.unwrap();
        let pool = database.pool(4).await.unwrap();
        PgTarget::new(pool.clone()).migrate().await.unwrap();
        sqlx::raw_sql(TABLE).execute(&pool).await.unwrap();
        Self { _database: database, pool }
    }
}

/// A bed whose `write` and `add` are the given operations.
macro_rules! bed {
    ($bed:ident, $write:expr, $add:expr) => {
        struct $bed(Store);

        #[async_trait]
        impl TargetBed for $bed {
            type Op = PgOp;

            async fn new() -> Self {
                Self(Store::open().await)
            }

            async fn target(&self) -> Arc<dyn Target<PgOp>> {
                Arc::new(PgTarget::new(self.0.pool.clone()))
            }

            fn write(&self, key: i64, value: i64) -> PgOp {
                $write(Row { key, value })
            }

            fn add(&self, key: i64, value: i64) -> PgOp {
                $add(Row { key, value })
            }

            fn refused(&self) -> PgOp {
                $write(Row { key: -1, value: -1 })
            }

            fn failing(&self) -> PgOp {
                sql("INSERT INTO nowhere VALUES (1)").into()
            }

            async fn read(&self) -> Vec<(i64, i64)> {
                let rows = sqlx::query_as("SELECT key, value FROM entries WHERE key >= 0 ORDER BY key");
                rows.fetch_all(&self.0.pool).await.unwrap()
            }
        }

        impl Statements for $bed {
            fn empties(&self) -> String {
                "TRUNCATE entries".to_owned()
            }

            fn fails(&self) -> String {
                "TRUNCATE nowhere".to_owned()
            }
        }

        #[async_trait]
        impl Hold for $bed {
            type Held = PoolConnection<Server>;

            /// The commit waits for a row of the read model.
            async fn hold(&self) -> (PgOp, Self::Held) {
                let mut held = self.0.pool.acquire().await.unwrap();
                sqlx::raw_sql("BEGIN; INSERT INTO entries VALUES (-2, 0)").execute(&mut *held).await.unwrap();
                ($write(Row { key: -2, value: 0 }), held)
            }

            async fn let_go(&self, mut held: Self::Held) {
                sqlx::raw_sql("ROLLBACK").execute(&mut *held).await.unwrap();
            }
        }
    };
}

/// Operations that are fused, and where they are alone written by one statement that moves the checkpoint too.
fn upsert(row: Row) -> PgOp {
    row.upsert(OnConflict::update_all()).into()
}

fn upsert_adding(row: Row) -> PgOp {
    row.upsert(OnConflict::adding(Row::VALUE)).into()
}

/// Statements of the user's own.
fn sql_write(Row { key, value }: Row) -> PgOp {
    let text = "INSERT INTO entries VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value";
    sql(text).bind(key).bind(value).into()
}

fn sql_add(Row { key, value }: Row) -> PgOp {
    let text =
        "INSERT INTO entries AS e VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = e.value + excluded.value";
    sql(text).bind(key).bind(value).into()
}

bed!(DataBed, upsert, upsert_adding);
bed!(SqlBed, sql_write, sql_add);

mod data {
    scriba_testing::target_conformance!(super::DataBed: reset, statements, hold);
}

mod statements {
    scriba_testing::target_conformance!(super::SqlBed: reset, statements, hold);
}
