//! A database with a log, sessions that append to it, and a reader.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use scriba_core::source::{Delivery, Demand, SourceError, SubscribeRequest, Subscription};
use scriba_core::telemetry::{GapDetected, GapPassed, Observer, Telemetry};
use scriba_core::{Position, ProjectionId, RecordedEvent, Source};
use scriba_source_postgres::PgLog;
use scriba_testing::postgres::{Database, Postgres};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, PgPool, query_scalar, raw_sql};
use tokio::time::{Instant, timeout};

pub(crate) const DEMAND: Demand = Demand { events: 4_000, bytes: 16 << 20 };
/// No test waits longer for what has to come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);

pub(crate) const TABLE: &str =
    "create table events (position bigserial primary key, id uuid not null default gen_random_uuid(),
    stream_id text not null default 's', type text not null default 'happened', data jsonb not null default '{}')";
/// Appends one event.
pub(crate) const APPEND: &str = "insert into events default values";

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) struct Bed {
    pub(crate) database: Database,
    pub(crate) pool: PgPool,
}

impl Bed {
    /// With the usual table.
    pub(crate) async fn new() -> Self {
        Self::with(TABLE).await
    }

    /// With what `ddl` creates.
    pub(crate) async fn with(ddl: &str) -> Self {
        Self::on(Postgres::shared().await.unwrap(), ddl).await
    }

    pub(crate) async fn on(server: &Postgres, ddl: &str) -> Self {
        let database = server.create_database().await.unwrap();
        let bed = Self { pool: database.pool(4).await.unwrap(), database };
        bed.run(ddl).await;
        bed
    }

    /// Runs statements, each committed by itself unless they say otherwise.
    pub(crate) async fn run(&self, sql: &str) {
        raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await.unwrap();
    }

    /// A session of its own.
    pub(crate) async fn session(&self) -> Session {
        Session(self.database.connect_options().application_name("appender").connect().await.unwrap())
    }

    pub(crate) fn log(&self) -> PgLog {
        PgLog::new(self.pool.clone(), "events")
    }

    pub(crate) async fn read(&self) -> Reader {
        Reader::start(&self.log(), None, None).await.unwrap()
    }

    pub(crate) async fn read_types(&self, types: &'static [&'static str]) -> Reader {
        Reader::start(&self.log(), None, Some(types)).await.unwrap()
    }

    /// All positions there are, in order.
    pub(crate) async fn positions(&self) -> Vec<u64> {
        let all: Vec<i64> =
            query_scalar("select position::int8 from events order by 1").fetch_all(&self.pool).await.unwrap();
        all.into_iter().map(i64::cast_unsigned).collect()
    }

    /// How check answers.
    pub(crate) async fn refused(&self, log: PgLog) -> String {
        match log.check().await {
            Err(SourceError::Unusable { message }) => message,
            other => panic!("not refused: {other:?}"),
        }
    }
}

pub(crate) struct Session(pub(crate) PgConnection);

impl Session {
    pub(crate) async fn run(&mut self, sql: &str) {
        self.try_run(sql).await.unwrap();
    }

    pub(crate) async fn try_run(&mut self, sql: &str) -> Result<(), sqlx::Error> {
        raw_sql(AssertSqlSafe(sql)).execute(&mut self.0).await.map(drop)
    }

    pub(crate) async fn pid(&mut self) -> i32 {
        query_scalar("select pg_backend_pid()").fetch_one(&mut self.0).await.unwrap()
    }
}

/// What the source reported.
#[derive(Default)]
pub(crate) struct Reports {
    /// Missing position, highest visible, blocker.
    pub(crate) detected: Mutex<Vec<(u64, u64, String)>>,
    /// First and last missing, age.
    pub(crate) passed: Mutex<Vec<(u64, u64, Duration)>>,
}

impl Observer for Reports {
    fn gap_detected(&self, _: &ProjectionId, gap: &GapDetected<'_>) {
        assert_eq!(gap.evidence, "sequence_lock");
        assert!(gap.age >= Duration::from_secs(1), "an everyday append is not reported: {:?}", gap.age);
        let gap = (gap.position.get(), gap.highest_visible.get(), gap.blocker.to_owned());
        self.detected.lock().unwrap().push(gap);
    }

    fn gap_passed(&self, _: &ProjectionId, gap: &GapPassed<'_>) {
        assert_eq!(gap.evidence, "no_holder");
        assert!(gap.highest_visible > gap.to, "the row behind the gap is visible");
        self.passed.lock().unwrap().push((gap.from.get(), gap.to.get(), gap.age));
    }
}

pub(crate) struct Reader {
    pub(crate) subscription: Box<dyn Subscription>,
    pub(crate) reports: Arc<Reports>,
    pub(crate) events: Vec<RecordedEvent>,
    /// The last progress.
    pub(crate) progress: Option<u64>,
    pub(crate) caught_up: bool,
}

impl Reader {
    pub(crate) async fn start(
        log: &PgLog,
        after: Option<u64>,
        event_types: Option<&'static [&'static str]>,
    ) -> Result<Self, SourceError> {
        let reports = Arc::new(Reports::default());
        let telemetry = Telemetry::new(ProjectionId::new("reader", 1), vec![reports.clone()]);
        let request = SubscribeRequest { after: after.map(Position::new), event_types, in_flight: 1_000, telemetry };
        let subscription = log.subscribe(request).await?;
        Ok(Self { subscription, reports, events: Vec::new(), progress: None, caught_up: false })
    }

    /// Takes the next page; `false` if none came in time.
    pub(crate) async fn page(&mut self, demand: Demand, within: Duration) -> bool {
        let Ok(page) = timeout(within, self.subscription.next(demand)).await else { return false };
        let page = page.unwrap();
        self.caught_up = page.caught_up;
        for delivery in page.deliveries {
            let position = match &delivery {
                Delivery::Event(event) => event.position.get(),
                Delivery::Progress(position) => position.get(),
            };
            let last = self.events.last().map(|event| event.position.get()).max(self.progress);
            assert!(last < Some(position), "{position} came after {last:?}");
            match delivery {
                Delivery::Event(event) => self.events.push(event),
                Delivery::Progress(position) => self.progress = Some(position.get()),
            }
        }
        true
    }

    /// Reads until there are `count` events in all, and says how long it took.
    pub(crate) async fn until(&mut self, count: usize) -> Duration {
        let started = Instant::now();
        while self.events.len() < count {
            let left = PATIENCE.saturating_sub(started.elapsed());
            assert!(self.page(DEMAND, left).await, "still {} of {count} events", self.events.len());
        }
        assert_eq!(self.events.len(), count);
        started.elapsed()
    }

    /// Reads until the progress is at `position`.
    pub(crate) async fn until_progress(&mut self, position: u64) {
        while self.progress < Some(position) {
            assert!(self.page(DEMAND, PATIENCE).await, "still at progress {:?}", self.progress);
        }
    }

    /// Reads for a while, during which no event may come.
    pub(crate) async fn sees_nothing_for(&mut self, time: Duration) {
        let (until, before) = (Instant::now() + time, self.events.len());
        while self.page(DEMAND, until.saturating_duration_since(Instant::now())).await {}
        assert_eq!(self.positions().split_off(before), Vec::<u64>::new(), "events came that had to wait");
    }

    pub(crate) fn positions(&self) -> Vec<u64> {
        self.events.iter().map(|event| event.position.get()).collect()
    }

    pub(crate) fn passed(&self) -> Vec<(u64, u64)> {
        self.reports.passed.lock().unwrap().iter().map(|(from, to, _)| (*from, *to)).collect()
    }
}
