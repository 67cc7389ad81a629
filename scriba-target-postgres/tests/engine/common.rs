//! A log, a read model and a projection between them, in a database of their own.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use scriba_core::telemetry::Observer;
use scriba_core::{
    EventMeta, HaltReason, Handler, HandlerResult, Outcome, Projection, ProjectionId, ProjectionOptions, RawEvent,
    Retry, Scriba, Source, State,
};
use scriba_source_postgres::PgLog;
use scriba_target_postgres::{PgOp, PgTarget, Table, sql};
use scriba_testing::Recorder;
use scriba_testing::postgres::{Database, Postgres};
use sqlx::{AssertSqlSafe, PgPool};

pub(crate) struct Fixture {
    pub(crate) pool: PgPool,
    pub(crate) target: PgTarget,
    pub(crate) source: PgLog,
    pub(crate) database: Database,
}

/// An empty log `events` (bodies of any bytes) with a NOTIFY trigger, and the control tables.
pub(crate) async fn fixture() -> Fixture {
    fixture_on(Postgres::shared().await.unwrap()).await
}

pub(crate) async fn fixture_on(server: &Postgres) -> Fixture {
    let database = server.create_database().await.unwrap();
    let pool = database.pool(8).await.unwrap();
    let log = "CREATE TABLE events (
        position bigint GENERATED ALWAYS AS IDENTITY (MINVALUE 0 START 0) PRIMARY KEY,
        id uuid NOT NULL DEFAULT gen_random_uuid(),
        stream_id text NOT NULL,
        type text NOT NULL,
        data bytea NOT NULL,
        metadata bytea,
        revision bigint
    )";
    sqlx::raw_sql(log).execute(&pool).await.unwrap();
    let source = PgLog::new(pool.clone(), "events")
        .metadata_column("metadata")
        .revision_column("revision")
        .notify_channel("events");
    let trigger = source.notify_trigger_sql().expect("there is a channel");
    sqlx::raw_sql(AssertSqlSafe(trigger)).execute(&pool).await.unwrap();
    let target = PgTarget::new(pool.clone());
    target.migrate().await.unwrap();
    Fixture { pool, target, source, database }
}

/// With a table `seen` for what [`Play`] applies. An event that is applied twice breaks its key.
pub(crate) async fn stage() -> Fixture {
    stage_on(Postgres::shared().await.unwrap()).await
}

pub(crate) async fn stage_on(server: &Postgres) -> Fixture {
    let fixture = fixture_on(server).await;
    fixture.run("CREATE TABLE seen (position bigint PRIMARY KEY, stream text NOT NULL)").await;
    fixture
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

    /// Appends so many events in one statement, to the streams `s0` and so on in turn.
    pub(crate) async fn append_many(&self, events: i64, streams: i64) {
        let append = "INSERT INTO events (stream_id, type, data)
                      SELECT 's' || n % $2, 'Happened', '' FROM generate_series(0, $1 - 1) AS n";
        sqlx::query(append).bind(events).bind(streams).execute(&self.pool).await.unwrap();
    }

    /// Runs statements of the test's own.
    pub(crate) async fn run(&self, text: impl Into<String>) {
        sqlx::raw_sql(AssertSqlSafe(text.into())).execute(&self.pool).await.unwrap();
    }

    /// The only column of the rows of a query, as text.
    pub(crate) async fn texts(&self, query: impl Into<String>) -> Vec<String> {
        let query = format!("SELECT q.c::text FROM ({}) AS q (c)", query.into());
        sqlx::query_scalar(AssertSqlSafe(query)).fetch_all(&self.pool).await.unwrap()
    }

    /// What [`Play`] has applied.
    pub(crate) async fn seen(&self) -> Vec<i64> {
        sqlx::query_scalar("SELECT position FROM seen ORDER BY position").fetch_all(&self.pool).await.unwrap()
    }

    /// Position and kind of all dead letters.
    pub(crate) async fn letters(&self) -> Vec<(i64, String)> {
        let letters = "SELECT position, error_kind FROM scriba_dead_letters ORDER BY position";
        sqlx::query_as(letters).fetch_all(&self.pool).await.unwrap()
    }

    /// The watermark of the only projection there is.
    pub(crate) async fn watermark(&self) -> Option<i64> {
        let stored = sqlx::query_scalar("SELECT watermark FROM scriba_checkpoints").fetch_optional(&self.pool);
        stored.await.unwrap().flatten()
    }

    /// Starts a projection between log and target.
    pub(crate) async fn play(&self, play: &Play, options: ProjectionOptions) -> Scriba {
        let scriba = Scriba::new();
        self.play_again(&scriba, play, options).await;
        scriba
    }

    /// The same with somebody who listens.
    pub(crate) async fn play_to(&self, recorder: &Recorder, play: &Play, options: ProjectionOptions) -> Scriba {
        let scriba = Scriba::with_observers([Arc::new(recorder.clone()) as Arc<dyn Observer>]);
        self.play_again(&scriba, play, options).await;
        scriba
    }

    pub(crate) async fn play_again(&self, scriba: &Scriba, play: &Play, options: ProjectionOptions) {
        scriba.start(play.clone(), self.source.clone(), self.target.clone(), options).await.unwrap();
    }
}

/// The row that shows that an event was applied.
#[derive(Table)]
#[table(name = "seen")]
pub(crate) struct Seen {
    #[table(key)]
    pub(crate) position: i64,
    pub(crate) stream: String,
}

/// The operation that shows that an event was applied.
pub(crate) fn seen(meta: &EventMeta) -> Outcome<PgOp> {
    Seen { position: meta.position.to_i64().unwrap(), stream: meta.stream_id.to_string() }.insert().into()
}

/// A call of a handler that came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) stream: String,
    pub(crate) position: i64,
    pub(crate) attempt: u32,
    pub(crate) replay: bool,
}

/// A projection whose handler is the test's.
#[derive(Clone, Projection)]
#[projection(name = "play")]
pub(crate) struct Play {
    act: Arc<dyn Fn(EventMeta) -> BoxFuture<'static, HandlerResult<PgOp>> + Send + Sync>,
    calls: Arc<Mutex<Vec<Call>>>,
}

/// A projection with this handler.
pub(crate) fn play<F>(act: impl Fn(EventMeta) -> F + Send + Sync + 'static) -> Play
where
    F: Future<Output = HandlerResult<PgOp>> + Send + 'static,
{
    Play { act: Arc::new(move |meta| Box::pin(act(meta))), calls: Arc::default() }
}

/// A projection that notes each event as seen, and runs the statement in its body, where there is one.
pub(crate) fn statements() -> Play {
    play(|meta| async move {
        let text = String::from_utf8(meta.data.to_vec())?;
        Ok(if text.is_empty() { seen(&meta) } else { seen(&meta).and(sql(text)) })
    })
}

/// A projection that notes each event as seen, after it has waited for up to two milliseconds.
pub(crate) fn slow() -> Play {
    play(|meta| async move {
        tokio::time::sleep(Duration::from_micros(meta.position.get() * 7_919 % 2_000)).await;
        Ok(seen(&meta))
    })
}

impl Play {
    /// All calls that came to an end so far.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    /// The positions of them.
    pub(crate) fn handled(&self) -> Vec<i64> {
        self.calls().iter().map(|call| call.position).collect()
    }

    /// Forgets them.
    pub(crate) fn forget(&self) {
        self.calls.lock().unwrap().clear();
    }
}

impl Handler for Play {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, _: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        let result = (self.act)(meta.clone()).await;
        self.calls.lock().unwrap().push(Call {
            stream: meta.stream_id.to_string(),
            position: meta.position.to_i64()?,
            attempt: meta.attempt,
            replay: meta.replay,
        });
        result
    }
}

/// The identity of [`Play`].
pub(crate) fn played() -> ProjectionId {
    ProjectionId::of::<Play>()
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

/// Waits until it has halted, and says why.
pub(crate) async fn halted(scriba: &Scriba, id: &ProjectionId) -> HaltReason {
    eventually("halted", || scriba.info(id).unwrap().state == State::Halted).await;
    scriba.info(id).unwrap().halt_reason.unwrap()
}

/// Starts a projection between a source of the test's own and the target.
pub(crate) async fn play_from(
    fixture: &Fixture,
    source: impl Source,
    play: &Play,
    options: ProjectionOptions,
) -> Scriba {
    let scriba = Scriba::new();
    scriba.start(play.clone(), source, fixture.target.clone(), options).await.unwrap();
    scriba
}

/// What every run owes: delivered is applied, skipped, dead-lettered, deduplicated, thrown away or in the window; and what this
/// adds up to over all starts is what the checkpoint has counted.
pub(crate) fn assert_conserved(scriba: &Scriba) {
    let info = scriba.info(played()).unwrap();
    let run = info.run;
    let accounted = run.applied + run.skipped + run.dead_lettered + run.deduplicated + run.thrown_away;
    assert_eq!(run.delivered, accounted + info.window.events as u64, "{info:#?}");
}

/// Waits until a condition holds.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < until, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until a query answers true.
pub(crate) async fn until_true(fixture: &Fixture, query: &str) {
    let until = Instant::now() + Duration::from_secs(10);
    while fixture.texts(query).await != ["true"] {
        assert!(Instant::now() < until, "not within 10 s: {query}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
