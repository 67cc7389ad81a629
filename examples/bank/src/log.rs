//! The log of the bank: a table in its database, or an event store.

use std::fmt;
use std::sync::Arc;

use clap::ValueEnum;
use kurrentdb::{
    BatchAppendClient, BatchAppendOptions, Client, EventData, ReadStreamOptions, StreamPosition, StreamState,
};
use scriba_core::Source;
use scriba_source_eventstore::{CatchUpSource, EventStore, PersistentSource};
use scriba_testing::eventstore::EventStoreDouble;
use sqlx::pool::PoolConnection;
use sqlx::{Connection, PgConnection, PgPool, Postgres};
use uuid::Uuid;

use crate::Result;
use crate::database::table;
use crate::writer::NewEvent;

/// Streams are `account-1` and so on: the server links their events into `$ce-account`.
const CATEGORY: &str = "account";
/// Rows that are copied by one statement.
const ROWS: usize = 1_000;

/// Where the events are, and how the projections read them.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LogOptions {
    /// Where the events are
    #[arg(long, value_enum, default_value_t = Kind::Postgres)]
    source: Kind,
    /// The event store [default: a double of one, started for the run]
    #[arg(long, value_name = "esdb://…")]
    connection: Option<String>,
    /// How an event store is subscribed to
    #[arg(long, value_enum, default_value_t = Subscription::CatchUp)]
    subscription: Subscription,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Postgres,
    Eventstore,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Subscription {
    CatchUp,
    Persistent,
}

/// As on the command line.
impl fmt::Display for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CatchUp => "catch-up",
            Self::Persistent => "persistent",
        })
    }
}

impl LogOptions {
    /// Starts a double where an event store is wanted and none is named; it lives as long as what is returned.
    pub(crate) fn start_double(&mut self) -> Result<Option<EventStoreDouble>> {
        if self.source != Kind::Eventstore || self.connection.is_some() {
            return Ok(None);
        }
        let double = EventStoreDouble::start()?;
        println!(
            "events are kept by a double of EventStoreDB, in memory, at {}; name a server by --connection esdb://…",
            double.connection_string()
        );
        self.connection = Some(double.connection_string());
        Ok(Some(double))
    }

    /// The command line that says the same.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let Some(connection) = self.event_store() else { return Vec::new() };
        let subscription = self.subscription.to_string();
        ["--source", "eventstore", "--connection", connection, "--subscription", &subscription]
            .map(str::to_owned)
            .into()
    }

    fn event_store(&self) -> Option<&str> {
        self.connection.as_deref().filter(|_| self.source == Kind::Eventstore)
    }

    /// The log as the projections read it.
    pub(crate) fn source(&self, pool: &PgPool) -> Result<Arc<dyn Source>> {
        let Some(connection) = self.event_store() else { return Ok(Arc::new(table(pool.clone()))) };
        let store = EventStore::new(connection)?;
        Ok(match self.subscription {
            Subscription::CatchUp => Arc::new(CatchUpSource::category(&store, CATEGORY)),
            Subscription::Persistent => Arc::new(PersistentSource::category(&store, CATEGORY)),
        })
    }

    /// The log as a writer sees it.
    pub(crate) async fn appender(&self, pool: &PgPool) -> Result<Appender> {
        Ok(match self.event_store() {
            Some(connection) => {
                // Appends over one open call: the client opens a call for each of the plain ones, which costs it 40 ms of waiting
                // for its own packets (Nagle's algorithm, which it does not switch off).
                let client = Client::new(connection.parse()?)?;
                Appender::EventStore(client.batch_append(&BatchAppendOptions::default()).await?)
            }
            None => Appender::Table(pool.acquire().await?),
        })
    }

    /// Copies the events of an event store to the table, at the positions the projections know, so that the read models can be
    /// compared with them by SQL. Read by the client itself: what is to be checked takes no part in it.
    pub(crate) async fn copy_to_table(&self, pool: &PgPool) -> Result<()> {
        let Some(connection) = self.event_store() else { return Ok(()) };
        let client = Client::new(connection.parse()?)?;
        let options = ReadStreamOptions::default().position(StreamPosition::Start).resolve_link_tos().forwards();
        let mut events = client.read_stream(format!("$ce-{CATEGORY}"), &options).await?;
        let mut rows = Rows::default();
        while let Some(event) = events.next().await? {
            let position = event.get_original_event().revision;
            let event = event.event.ok_or("a link in the category leads to nothing")?;
            rows.positions.push(i64::try_from(position)?);
            rows.ids.push(event.id);
            rows.stream_ids.push(event.stream_id().to_owned());
            rows.data.push(String::from_utf8(event.data.into())?);
            rows.metadata.push(String::from_utf8(event.custom_metadata.into())?);
            rows.types.push(event.event_type);
            if rows.ids.len() == ROWS {
                std::mem::take(&mut rows).insert(pool).await?;
            }
        }
        rows.insert(pool).await
    }
}

#[derive(Default)]
struct Rows {
    positions: Vec<i64>,
    ids: Vec<Uuid>,
    stream_ids: Vec<String>,
    types: Vec<String>,
    data: Vec<String>,
    metadata: Vec<String>,
}

impl Rows {
    async fn insert(self, pool: &PgPool) -> Result<()> {
        sqlx::query(
            "INSERT INTO bank_events (position, id, stream_id, type, data, metadata) OVERRIDING SYSTEM VALUE
             SELECT position, id, stream_id, type, data::json, metadata::json
             FROM unnest($1::int8[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[])
                 AS rows (position, id, stream_id, type, data, metadata)",
        )
        .bind(self.positions)
        .bind(self.ids)
        .bind(self.stream_ids)
        .bind(self.types)
        .bind(self.data)
        .bind(self.metadata)
        .execute(pool)
        .await?;
        Ok(())
    }
}

/// One writer's way to the log.
pub(crate) enum Appender {
    Table(PoolConnection<Postgres>),
    EventStore(BatchAppendClient),
}

impl Appender {
    /// Appends events: to the table in one transaction, to an event store one by one, since they belong to several streams.
    pub(crate) async fn append(&mut self, events: &[NewEvent]) -> Result<()> {
        match self {
            Self::Table(connection) => {
                let mut transaction = connection.begin().await?;
                insert(&mut transaction, events).await?;
                transaction.commit().await?;
            }
            Self::EventStore(client) => {
                for event in events {
                    let data = EventData::json(event.event_type, &event.data)?.metadata_as_json(&event.mark)?;
                    client.append_to_stream(event.stream_id(), StreamState::Any, vec![data]).await?;
                }
            }
        }
        Ok(())
    }

    /// Appends events that never happened: their positions are missing from a table for ever. An event store has nothing of the kind.
    pub(crate) async fn roll_back(&mut self, events: &[NewEvent]) -> Result<()> {
        if let Self::Table(connection) = self {
            let mut transaction = connection.begin().await?;
            insert(&mut transaction, events).await?;
            transaction.rollback().await?;
        }
        Ok(())
    }
}

async fn insert(connection: &mut PgConnection, events: &[NewEvent]) -> sqlx::Result<()> {
    for event in events {
        sqlx::query(
            "INSERT INTO bank_events (stream_id, type, data, metadata) VALUES ($1, $2, $3::text::json, $4::text::json)",
        )
        .bind(event.stream_id())
        .bind(event.event_type)
        .bind(event.data.to_string())
        .bind(event.mark.to_string())
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}
