//! The settings of a log, and the source's port.

use std::time::Duration;

use async_trait::async_trait;
use scriba_core::Source;
use scriba_core::source::{SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool};
use sqlx::{ConnectOptions, Connection};

use crate::catalog::Catalog;
use crate::error::answer;
use crate::inspector::Inspector;
use crate::sql;
use crate::subscription::PgSubscription;
use crate::wake::Intervals;

/// The kind in [`SourceIdentity`].
const KIND: &str = "postgres-log";

/// The names of the columns.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    pub(crate) position: String,
    pub(crate) id: String,
    pub(crate) stream_id: String,
    pub(crate) event_type: String,
    pub(crate) data: String,
    pub(crate) metadata: Option<String>,
    pub(crate) occurred_at: Option<String>,
    pub(crate) revision: Option<String>,
}

/// An event log in a Postgres table, as a source.
///
/// Every subscription, inspector and listener opens a connection of its own, with the pool's connection options; the
/// pool itself lends none, so that a small pool is enough for the target. Names of schemas, tables and columns are those of the
/// catalogue, case and all, without quotes.
#[derive(Clone, Debug)]
pub struct PgLog {
    /// Asked for its options at each connection, since they may change (passwords do).
    pool: PgPool,
    pub(crate) schema: Option<String>,
    pub(crate) table: String,
    pub(crate) columns: Columns,
    pub(crate) sequence: Option<String>,
    pub(crate) channel: Option<String>,
    pub(crate) intervals: Intervals,
    pub(crate) page_rows: usize,
}

impl PgLog {
    /// The log in `table`, found by the search path, with the columns `position`, `id`, `stream_id`, `type` and `data`;
    /// nothing is looked up before it is used. Columns for metadata, time and revision are read where they are named.
    pub fn new(pool: PgPool, table: impl Into<String>) -> Self {
        Self {
            pool,
            schema: None,
            table: table.into(),
            columns: Columns {
                position: "position".to_owned(),
                id: "id".to_owned(),
                stream_id: "stream_id".to_owned(),
                event_type: "type".to_owned(),
                data: "data".to_owned(),
                metadata: None,
                occurred_at: None,
                revision: None,
            },
            sequence: None,
            channel: None,
            intervals: Intervals::default(),
            page_rows: 1_000,
        }
    }

    /// The schema of the table; without it the search path decides.
    #[must_use]
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// The column with the position: `bigint` or `integer`, `NOT NULL`, drawn from a sequence.
    #[must_use]
    pub fn position_column(mut self, name: impl Into<String>) -> Self {
        self.columns.position = name.into();
        self
    }

    /// The column with the event's id: text, `uuid` or an integer, which is read as text.
    #[must_use]
    pub fn id_column(mut self, name: impl Into<String>) -> Self {
        self.columns.id = name.into();
        self
    }

    /// The column with the stream's id: text, `uuid` or an integer, which is read as text.
    #[must_use]
    pub fn stream_id_column(mut self, name: impl Into<String>) -> Self {
        self.columns.stream_id = name.into();
        self
    }

    /// The column with the event's type: text or an enum.
    #[must_use]
    pub fn type_column(mut self, name: impl Into<String>) -> Self {
        self.columns.event_type = name.into();
        self
    }

    /// The column with the body: `json`, `jsonb`, text or `bytea`. A NULL is an empty body.
    #[must_use]
    pub fn data_column(mut self, name: impl Into<String>) -> Self {
        self.columns.data = name.into();
        self
    }

    /// The column with the metadata: `json`, `jsonb`, text or `bytea`. A NULL is empty metadata.
    #[must_use]
    pub fn metadata_column(mut self, name: impl Into<String>) -> Self {
        self.columns.metadata = Some(name.into());
        self
    }

    /// The column with the time of recording: `timestamptz`. It informs handlers and decides nothing.
    #[must_use]
    pub fn occurred_at_column(mut self, name: impl Into<String>) -> Self {
        self.columns.occurred_at = Some(name.into());
        self
    }

    /// The column with the event's number in its stream: an integer.
    #[must_use]
    pub fn revision_column(mut self, name: impl Into<String>) -> Self {
        self.columns.revision = Some(name.into());
        self
    }

    /// The sequence the position is drawn from, as one writes it in SQL (`my_schema.my_seq`). Needed only where the catalogue
    /// does not know it, because the application or a function draws the numbers. They have to be drawn in the transaction
    /// that inserts the row: nothing in the server shows it when they are not, and events are then lost.
    #[must_use]
    pub fn sequence(mut self, name: impl Into<String>) -> Self {
        self.sequence = Some(name.into());
        self
    }

    /// Listens on this channel of `NOTIFY` while it waits, so that an event is seen at once instead of at the next poll. The
    /// payload does not matter. Polling goes on, so a listener that cannot connect, or no trigger
    /// ([`PgLog::notify_trigger_sql`]), costs latency only.
    #[must_use]
    pub fn notify_channel(mut self, channel: impl Into<String>) -> Self {
        self.channel = Some(channel.into());
        self
    }

    /// How often it looks for new events while there are none: first after `first`, then after twice that, up to `max`.
    /// Default 10 ms to 250 ms. At least 1 ms.
    #[must_use]
    pub fn poll_idle(mut self, first: Duration, max: Duration) -> Self {
        self.intervals.idle = (first, max);
        self
    }

    /// How often it looks while it waits for an append that may own a missing position. Default 5 ms to 100 ms. At least 1 ms.
    #[must_use]
    pub fn poll_gap(mut self, first: Duration, max: Duration) -> Self {
        self.intervals.stuck = (first, max);
        self
    }

    /// The most rows read by one statement, at least 1; default 1,000. Pages are smaller where the demand is, or where
    /// bodies are large.
    #[must_use]
    pub fn page_size(mut self, rows: usize) -> Self {
        self.page_rows = rows.max(1);
        self
    }

    /// SQL that makes every insert notify the channel: a function and a statement-level trigger, to be installed by the
    /// owner of the table, once; running it again changes nothing. `None` without a [`PgLog::notify_channel`].
    ///
    /// It costs every appending transaction a lock: `NOTIFY` takes one that is global to the server, from before the commit to
    /// its end, so appends commit one after another. Where hundreds of transactions a second append, leave it out: while
    /// there is always something new the source does not wait anyway.
    pub fn notify_trigger_sql(&self) -> Option<String> {
        self.channel.as_ref().map(|channel| sql::notify_trigger(self.schema.as_deref(), &self.table, channel))
    }

    /// The table as people write it.
    pub(crate) fn name(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{schema}.{}", self.table),
            None => self.table.clone(),
        }
    }

    /// Options for connections of the source's own.
    pub(crate) fn connect_options(&self, application: &str) -> PgConnectOptions {
        PgConnectOptions::clone(&self.pool.connect_options()).application_name(application)
    }

    async fn open(&self, application: &str) -> Result<(PgConnection, Catalog), SourceError> {
        let name = self.name();
        let mut connection = answer(&name, "connect", self.connect_options(application).connect()).await?;
        let catalog = Catalog::read(self, &mut connection).await?;
        Ok((connection, catalog))
    }
}

#[async_trait]
impl Source for PgLog {
    async fn check(&self) -> Result<(), SourceError> {
        let (mut connection, catalog) = self.open("scriba check").await?;
        if catalog.is_standby() {
            return Err(SourceError::unusable(format!(
                "event log {}: the server is a standby, where no one can see which appends are open: connect to the primary",
                catalog.name
            )));
        }
        catalog.warn_without_index(&mut connection).await?;
        // The answers are in; a failure to say goodbye concerns nobody.
        let _ = connection.close().await;
        Ok(())
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        let (mut connection, catalog) = self.open("scriba identity").await?;
        let fingerprint = catalog.fingerprint(&mut connection).await?;
        let _ = connection.close().await;
        Ok(SourceIdentity { kind: KIND.to_owned(), fingerprint })
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        let application = format!("scriba {}", request.telemetry.id());
        let (connection, catalog) = self.open(&application).await?;
        Ok(Box::new(PgSubscription::start(self, &application, connection, catalog, request).await?))
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        let (connection, catalog) = self.open("scriba inspector").await?;
        Ok(Box::new(Inspector::new(connection, catalog)))
    }
}
