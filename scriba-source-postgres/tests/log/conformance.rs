//! The log passes the conformance suite for sources.

use async_trait::async_trait;
use scriba_core::{Position, Source};
use scriba_source_postgres::PgLog;
use scriba_testing::conformance::source::{Cut, HoldOpen, NewEvent, Restore, SourceBed, Truncate};
use sqlx::{AssertSqlSafe, PgConnection, query_scalar};

use crate::bed::{Bed, Session};

/// A log whose bodies are any bytes, with positions from 0 on.
struct BytesLog(Bed);

/// A log whose bodies are JSON, with positions from 1 on.
struct JsonLog(Bed);

async fn bed(body: &str, sequence: &str) -> Bed {
    Bed::with(&format!(
        "create table events (position bigint generated always as identity ({sequence}) primary key, id uuid not null,
            stream_id text not null, type text not null, data {body}, metadata {body},
            recorded_at timestamptz not null default clock_timestamp(), revision int not null)"
    ))
    .await
}

fn log(bed: &Bed) -> PgLog {
    bed.log().metadata_column("metadata").occurred_at_column("recorded_at").revision_column("revision")
}

/// Bytes as a value of the body's type; empty ones are NULL where they are no such value.
fn value(body: &str, parameter: &str) -> String {
    match body {
        "bytea" => parameter.to_owned(),
        _ => format!("nullif(convert_from({parameter}, 'UTF8'), '')::{body}"),
    }
}

/// Appends an event in whatever transaction the connection is in.
async fn append(connection: &mut PgConnection, body: &str, event: &NewEvent) -> Position {
    let statement = format!(
        "insert into events (id, stream_id, type, data, metadata, revision)
         values ($1::uuid, $2, $3, {}, {}, (select count(*) from events where stream_id = $2)) returning position",
        value(body, "$4"),
        value(body, "$5"),
    );
    let position = query_scalar(AssertSqlSafe(statement))
        .bind(&event.id)
        .bind(&event.stream_id)
        .bind(&event.event_type)
        .bind(&event.data[..])
        .bind(&event.metadata[..])
        .fetch_one(connection)
        .await;
    Position::from_i64(position.unwrap()).unwrap()
}

/// Implements a bed for a log of a kind.
macro_rules! bed {
    ($bed:ident, $body:literal, $sequence:literal) => {
        #[async_trait]
        impl SourceBed for $bed {
            async fn new() -> Self {
                Self(bed($body, $sequence).await)
            }

            async fn source(&self) -> Box<dyn Source> {
                Box::new(log(&self.0))
            }

            async fn append(&self, events: Vec<NewEvent>) -> Vec<Position> {
                let mut transaction = self.0.pool.begin().await.unwrap();
                let mut positions = Vec::new();
                for event in &events {
                    positions.push(append(&mut transaction, $body, event).await);
                }
                transaction.commit().await.unwrap();
                positions
            }
        }

        #[async_trait]
        impl Truncate for $bed {
            async fn truncate_below(&self, position: Position) {
                self.0.run(&format!("delete from events where position < {position}")).await;
            }
        }

        #[async_trait]
        impl Restore for $bed {
            async fn restore_before(&self, position: Position) {
                let sequence = format!("alter table events alter position restart with {position}");
                self.0.run(&format!("delete from events where position >= {position}; {sequence}")).await;
            }
        }

        #[async_trait]
        impl Cut for $bed {
            async fn cut(&self) {
                self.0
                    .run(
                        "select pg_terminate_backend(pid) from pg_stat_activity
                         where datname = current_database() and application_name like 'scriba%'",
                    )
                    .await;
            }
        }

        #[async_trait]
        impl HoldOpen for $bed {
            type Held = (Session, Position);

            async fn hold(&self, event: NewEvent) -> Self::Held {
                let mut session = self.0.session().await;
                session.run("begin").await;
                let position = append(&mut session.0, $body, &event).await;
                (session, position)
            }

            async fn commit(&self, (mut session, position): Self::Held) -> Position {
                session.run("commit").await;
                position
            }
        }
    };
}

bed!(BytesLog, "bytea", "minvalue 0 start 0");
bed!(JsonLog, "jsonb", "start 1");

mod bytes {
    scriba_testing::source_conformance!(
        super::BytesLog: exact_start, filters, head, passed_over, several, any_bytes, metadata, long_ids, revisions,
        times, truncate, restore, cut, hold_open
    );
}

mod json {
    scriba_testing::source_conformance!(
        super::JsonLog: exact_start, filters, head, passed_over, several, metadata, long_ids, revisions, times, truncate,
        restore, cut, hold_open
    );
}
