//! A store, and a projection between it and a read model that shows every commit.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use scriba_core::{
    EventMeta, Handler, HandlerResult, Lease, Outcome, Position, Projection, ProjectionOptions, RawEvent, Retry,
    Scriba, Source, State,
};
use scriba_source_eventstore::{CatchUpSource, EventStore, PersistentSource};
use scriba_target_postgres::{PgOp, PgTarget, Table, sql};
use scriba_testing::eventstore::{EventStoreDouble, NewEvent};
use scriba_testing::postgres::{Database, Postgres};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::time::{Instant, sleep};

/// The projection's name.
pub(crate) const LEDGER: &str = "ledger";
/// What a [`Way`] by stream reads.
pub(crate) const STREAM: &str = "account-1";
pub(crate) const CATEGORY: &str = "account";

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// How a store is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    PersistentStream,
    PersistentCategory,
    Stream,
    Category,
    All,
}

impl Way {
    pub(crate) const EVERY: [Self; 5] =
        [Self::PersistentStream, Self::PersistentCategory, Self::Stream, Self::Category, Self::All];

    pub(crate) fn source(self, store: &EventStore) -> Arc<dyn Source> {
        match self {
            Self::PersistentStream => Arc::new(PersistentSource::stream(store, STREAM)),
            Self::PersistentCategory => Arc::new(PersistentSource::category(store, CATEGORY)),
            Self::Stream => Arc::new(CatchUpSource::stream(store, STREAM)),
            Self::Category => Arc::new(CatchUpSource::category(store, CATEGORY)),
            Self::All => Arc::new(CatchUpSource::all(store)),
        }
    }

    pub(crate) fn by_name(name: &str) -> Self {
        Self::EVERY.into_iter().find(|way| format!("{way:?}") == name).expect("the name of a way")
    }

    pub(crate) fn is_persistent(self) -> bool {
        matches!(self, Self::PersistentStream | Self::PersistentCategory)
    }

    fn position(self, event: &Appended) -> Option<u64> {
        match self {
            Self::PersistentStream | Self::Stream => (event.stream == STREAM).then_some(event.revision),
            Self::PersistentCategory | Self::Category => Some(event.link),
            Self::All => Some(event.commit),
        }
    }
}

/// An event of the category, and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Appended {
    pub(crate) stream: String,
    pub(crate) revision: u64,
    /// Revision of its link in the stream of the category.
    pub(crate) link: u64,
    /// Commit position.
    pub(crate) commit: u64,
}

/// A server, and what was appended to it.
pub(crate) struct Log {
    pub(crate) double: EventStoreDouble,
    appended: Mutex<Vec<Appended>>,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self::of(EventStoreDouble::start().unwrap())
    }

    pub(crate) fn of(double: EventStoreDouble) -> Self {
        Self { double, appended: Mutex::default() }
    }

    /// The same name for each, so that one can stand for another.
    pub(crate) fn store(&self) -> EventStore {
        EventStore::new(self.double.connection_string()).unwrap().store_name("bank")
    }

    /// Appends one event to a stream of the category.
    pub(crate) fn append(&self, stream: &str, event_type: &str) -> Appended {
        let mut appended = self.appended.lock().unwrap();
        let written = self.double.append(stream, [NewEvent::json(event_type, "{}")]);
        let event = Appended {
            stream: stream.to_owned(),
            revision: written.revision.unwrap(),
            link: appended.len() as u64,
            commit: written.position.unwrap().commit,
        };
        appended.push(event.clone());
        event
    }

    /// Appends so many events that are read this way, one after another to five streams where it reads several; tells where the last
    /// one stands.
    pub(crate) fn append_many(&self, way: Way, events: usize) -> u64 {
        let mut last = None;
        for _ in 0..events {
            let appended = self.appended.lock().unwrap().len();
            let number = if matches!(way, Way::PersistentStream | Way::Stream) { 1 } else { appended % 5 };
            last = way.position(&self.append(&format!("account-{number}"), "Happened"));
        }
        last.unwrap()
    }

    /// Position, stream and revision of everything that is read this way, in order.
    pub(crate) fn read(&self, way: Way) -> Vec<(i64, String, i64)> {
        let appended = self.appended.lock().unwrap();
        let row = |event: &Appended| {
            let position = i64::try_from(way.position(event)?).unwrap();
            Some((position, event.stream.clone(), i64::try_from(event.revision).unwrap()))
        };
        appended.iter().filter_map(row).collect()
    }
}

/// A database with the control tables, a row for each commit of an event, and a count for each stream.
pub(crate) struct Model {
    pub(crate) database: Database,
    pub(crate) pool: PgPool,
    pub(crate) target: PgTarget,
}

impl Model {
    pub(crate) async fn new() -> Self {
        let database = Postgres::shared().await.unwrap().create_database().await.unwrap();
        let pool = database.pool(4).await.unwrap();
        let target = PgTarget::new(pool.clone());
        target.migrate().await.unwrap();
        let model = Self { database, pool, target };
        model
            .run(
                "CREATE TABLE commits (n bigint GENERATED ALWAYS AS IDENTITY, position bigint UNIQUE, stream text, revision bigint);
                 CREATE TABLE counts (stream text PRIMARY KEY, events bigint NOT NULL)",
            )
            .await;
        model
    }

    pub(crate) async fn run(&self, text: &'static str) {
        sqlx::raw_sql(text).execute(&self.pool).await.unwrap();
    }

    pub(crate) async fn watermark(&self) -> Option<u64> {
        let stored = sqlx::query_scalar::<_, Option<i64>>("SELECT watermark FROM scriba_checkpoints");
        let watermark = stored.fetch_optional(&self.pool).await.unwrap().flatten();
        watermark.map(|watermark| watermark.try_into().unwrap())
    }

    pub(crate) async fn count(&self, query: &'static str) -> i64 {
        sqlx::query_scalar(query).fetch_one(&self.pool).await.unwrap()
    }

    pub(crate) async fn commits(&self) -> Vec<(i64, String, i64)> {
        let commits = "SELECT position, stream, revision FROM commits ORDER BY n";
        sqlx::query_as(commits).fetch_all(&self.pool).await.unwrap()
    }

    /// Waits until everything up to a position is accounted for, and tells how long that took.
    pub(crate) async fn until(&self, position: u64, within: Duration) -> Duration {
        let started = Instant::now();
        loop {
            let watermark = self.watermark().await;
            let elapsed = started.elapsed();
            if watermark >= Some(position) {
                return elapsed;
            }
            assert!(elapsed < within, "at {watermark:?} instead of {position} after {elapsed:?}");
            sleep(millis(5)).await;
        }
    }

    /// Every event once, in order, and counted once.
    pub(crate) async fn assert_shows(&self, events: &[(i64, String, i64)]) {
        let commits = self.commits().await;
        if let Some(different) = commits.iter().zip(events).position(|(is, should_be)| is != should_be) {
            panic!("commit {different}: {:?} instead of {:?}", commits[different], events[different]);
        }
        assert_eq!(commits.len(), events.len());
        let mut expected = BTreeMap::<String, i64>::new();
        for (_, stream, _) in events {
            *expected.entry(stream.clone()).or_default() += 1;
        }
        let counts: Vec<(String, i64)> = sqlx::query_as("SELECT * FROM counts").fetch_all(&self.pool).await.unwrap();
        assert_eq!(counts.into_iter().collect::<BTreeMap<_, _>>(), expected);
        let accounted = "SELECT applied, skipped, dead_lettered FROM scriba_checkpoints";
        let accounted: (i64, i64, i64) = sqlx::query_as(accounted).fetch_one(&self.pool).await.unwrap();
        assert_eq!(accounted, (i64::try_from(events.len()).unwrap(), 0, 0));
        let last = events.last().map(|(position, ..)| *position);
        assert!(self.watermark().await.map(|watermark| i64::try_from(watermark).unwrap()) >= last);
    }

    pub(crate) async fn copy(&self, suffix: &str) {
        for table in ["commits", "counts", "scriba_checkpoints", "scriba_projections"] {
            let copy = format!("CREATE TABLE {table}_{suffix} AS TABLE {table}");
            sqlx::raw_sql(AssertSqlSafe(copy)).execute(&self.pool).await.unwrap();
        }
    }

    /// Puts back what was copied, as the restore of a backup does.
    pub(crate) async fn restore(&self, suffix: &str) {
        for table in ["commits", "counts", "scriba_checkpoints", "scriba_projections"] {
            let overriding = if table == "commits" { "OVERRIDING SYSTEM VALUE" } else { "" };
            let restore = format!("TRUNCATE {table}; INSERT INTO {table} {overriding} SELECT * FROM {table}_{suffix}");
            sqlx::raw_sql(AssertSqlSafe(restore)).execute(&self.pool).await.unwrap();
        }
    }
}

/// Leaves a row for each event and counts it. One of type `Slow` stays in its transaction for a second.
#[derive(Clone, Projection)]
#[projection(name = "ledger")]
pub(crate) struct Ledger;

#[derive(Table)]
#[table(name = "commits")]
struct Commit {
    #[table(key)]
    position: i64,
    stream: String,
    revision: i64,
}

/// What shows that an event was applied.
pub(crate) fn applied(meta: &EventMeta) -> HandlerResult<PgOp> {
    let revision = i64::try_from(meta.revision.expect("every event has one"))?;
    let stream = meta.stream_id.to_string();
    let counted =
        sql("INSERT INTO counts VALUES ($1, 1) ON CONFLICT (stream) DO UPDATE SET events = counts.events + 1")
            .bind(stream.clone());
    let commit = Commit { position: meta.position.to_i64()?, stream, revision };
    Ok(Outcome::from(PgOp::from(commit.insert())).and(counted))
}

impl Handler for Ledger {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        let outcome = applied(meta)?;
        Ok(if event.0.event_type.as_str() == "Slow" { outcome.and(sql("SELECT pg_sleep(1)")) } else { outcome })
    }
}

pub(crate) fn options(lease: Lease) -> ProjectionOptions {
    ProjectionOptions::default()
        .parallelism(4)
        .batch_events(50)
        .lease(lease)
        .lag_interval(millis(100))
        .retry(Retry::none())
        .shutdown_timeout(Duration::from_secs(5))
}

/// Starts [`Ledger`] alone, without a lease.
pub(crate) async fn start(source: Arc<dyn Source>, model: &Model) -> Scriba {
    let scriba = Scriba::new();
    scriba.start(Ledger, source, model.target.clone(), options(Lease::Off)).await.expect("it starts");
    scriba
}

/// Waits until it has halted, and says why and where.
pub(crate) async fn halted(scriba: &Scriba, id: &str) -> (String, Option<Position>) {
    eventually("it halts", async || scriba.info(id).unwrap().state == State::Halted).await;
    let reason = scriba.info(id).unwrap().halt_reason.unwrap();
    (reason.message, reason.position)
}

pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !holds().await {
        assert!(Instant::now() < until, "not within 20 s: {what}");
        sleep(millis(5)).await;
    }
}
