//! A store, a database, and a projection between them that keeps a log of what it commits.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use kurrentdb::{Client, PersistentSubscriptionOptions, StreamPosition, SystemConsumerStrategy};
use scriba_core::source::{Place, SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription};
use scriba_core::telemetry::Observer;
use scriba_core::{
    EventMeta, Handler, HandlerResult, Lease, Outcome, Position, Projection, ProjectionId, ProjectionInfo,
    ProjectionOptions, RawEvent, Role, Scriba, Source, State, WaitFor,
};
use scriba_source_eventstore::{CatchUpSource, EventStore, PersistentSource};
use scriba_target_postgres::{PgOp, PgTarget, Table};
use scriba_testing::eventstore::{EventStoreDouble, GroupStats, NewEvent};
use scriba_testing::postgres::{Database, Postgres};
use scriba_testing::{Recorded, Recorder};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

const CATEGORY: &str = "account";
/// What a projection of the category reads.
pub(crate) const CATEGORY_STREAM: &str = "$ce-account";
/// The group of [`Ledger`].
pub(crate) const GROUP: &str = "ledger_v1";
/// The least that the source takes.
pub(crate) const MESSAGE_TIMEOUT: Duration = Duration::from_hours(1);
pub(crate) const RETRIES: i32 = 1_000;
/// Of the projections here: the shortest there is.
pub(crate) const LEASE: Duration = Duration::from_secs(1);
/// No test waits longer for what has to come.
const PATIENCE: Duration = Duration::from_secs(20);

/// How the store is subscribed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Persistent,
    CatchUp,
}

impl Kind {
    pub(crate) const BOTH: [Self; 2] = [Self::Persistent, Self::CatchUp];
}

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn id() -> ProjectionId {
    ProjectionId::of::<Ledger>()
}

/// What was appended, in the order of positions: the stream and the revision in it.
type Appended = Vec<(String, i64)>;

pub(crate) struct Stage {
    pub(crate) server: EventStoreDouble,
    pub(crate) store: EventStore,
    pub(crate) pool: PgPool,
    pub(crate) target: PgTarget,
    appended: Mutex<Appended>,
    _database: Database,
}

impl Stage {
    /// A server without events, and a database with the control tables, a commit log (each event once) and a counter for each of
    /// five streams.
    pub(crate) async fn new() -> Self {
        let database = Postgres::shared().await.unwrap().create_database().await.unwrap();
        let pool = database.pool(6).await.unwrap();
        let tables = "CREATE TABLE committed (
                n bigint GENERATED ALWAYS AS IDENTITY, position bigint PRIMARY KEY, stream text NOT NULL, revision bigint NOT NULL);
            CREATE TABLE counters (stream text PRIMARY KEY, events bigint NOT NULL);
            INSERT INTO counters SELECT 'account-' || n, 0 FROM generate_series(0, 4) AS n";
        sqlx::raw_sql(tables).execute(&pool).await.unwrap();
        let target = PgTarget::new(pool.clone());
        target.migrate().await.unwrap();
        let server = EventStoreDouble::start().unwrap();
        let store = store_at("", &[server.address()]);
        Self { server, store, pool, target, appended: Mutex::default(), _database: database }
    }

    /// Appends so many events to the five streams in turn.
    pub(crate) fn append(&self, events: usize) {
        let mut appended = self.appended.lock().unwrap();
        for _ in 0..events {
            let stream = format!("account-{}", appended.len() % 5);
            let written = self.server.append(&stream, [NewEvent::json("Deposited", r#"{"amount": 5}"#)]);
            appended.push((stream, i64::try_from(written.revision.unwrap()).unwrap()));
        }
    }

    /// The last position.
    pub(crate) fn head(&self) -> i64 {
        i64::try_from(self.appended.lock().unwrap().len()).unwrap() - 1
    }

    pub(crate) fn source(&self, kind: Kind) -> Arc<dyn Source> {
        source(&self.store, kind)
    }

    pub(crate) fn persistent(&self) -> PersistentSource {
        PersistentSource::category(&self.store, CATEGORY)
    }

    pub(crate) async fn start(&self, kind: Kind, ledger: &Ledger) -> Node {
        self.start_from(self.source(kind), ledger).await
    }

    pub(crate) async fn start_from(&self, source: impl Source, ledger: &Ledger) -> Node {
        let recorder = Recorder::new();
        let scriba = Scriba::with_observers([Arc::new(recorder.clone()) as Arc<dyn Observer>]);
        let node = Node { scriba, recorder };
        node.start(source, self, ledger).await;
        node
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.server.connection_string().parse().unwrap()).unwrap()
    }

    /// Makes the projection's group as an operator would.
    pub(crate) async fn create_group(&self, options: PersistentSubscriptionOptions) {
        self.client().create_persistent_subscription(CATEGORY_STREAM, GROUP, &options).await.unwrap();
    }

    pub(crate) fn group(&self) -> GroupStats {
        self.server.group(CATEGORY_STREAM, GROUP).unwrap()
    }

    /// Positions that are committed, in the order of commits.
    pub(crate) async fn committed(&self) -> Vec<i64> {
        sqlx::query_scalar("SELECT position FROM committed ORDER BY n").fetch_all(&self.pool).await.unwrap()
    }

    pub(crate) async fn run(&self, text: impl Into<String>) {
        sqlx::raw_sql(AssertSqlSafe(text.into())).execute(&self.pool).await.unwrap();
    }

    /// Waits until everything that was appended is done, and holds the read model against it.
    pub(crate) async fn conserved(&self, node: &Node) {
        self.conserved_without(node, |_| false).await;
    }

    /// The same where events are gone from the store.
    pub(crate) async fn conserved_without(&self, node: &Node, gone: impl Fn(i64) -> bool) {
        let head = self.head();
        node.until(head).await;
        let expected: Vec<(i64, String, i64)> = {
            let appended = self.appended.lock().unwrap().clone();
            let all =
                appended.into_iter().zip(0_i64..).map(|((stream, revision), position)| (position, stream, revision));
            all.filter(|(position, ..)| !gone(*position)).collect()
        };
        let committed: Vec<(i64, String, i64)> =
            sqlx::query_as("SELECT position, stream, revision FROM committed ORDER BY n")
                .fetch_all(&self.pool)
                .await
                .unwrap();
        assert_eq!(committed, expected, "each event once, in order");
        let counters: Vec<(String, i64, i64)> = sqlx::query_as(
            "SELECT stream, events, (SELECT count(*) FROM committed WHERE committed.stream = counters.stream) FROM counters ORDER BY stream",
        )
        .fetch_all(&self.pool)
        .await
        .unwrap();
        assert!(counters.iter().all(|(_, events, committed)| events == committed), "{counters:?}");
        let (watermark, applied, skipped, dead): (Option<i64>, i64, i64, i64) =
            sqlx::query_as("SELECT watermark, applied, skipped, dead_lettered FROM scriba_checkpoints")
                .fetch_one(&self.pool)
                .await
                .unwrap();
        let events = i64::try_from(expected.len()).unwrap();
        assert_eq!((watermark, applied, skipped, dead), (Some(head), events, 0, 0));
        let letters: i64 =
            sqlx::query_scalar("SELECT count(*) FROM scriba_dead_letters").fetch_one(&self.pool).await.unwrap();
        assert_eq!(letters, 0);
        let info = node.info();
        let run = info.run;
        let accounted = run.applied + run.skipped + run.dead_lettered + run.deduplicated + run.thrown_away;
        assert_eq!(run.delivered, accounted + info.window.events as u64, "{info:#?}");
        assert_eq!(info.window.oldest, None, "nothing is open below the watermark");
    }
}

/// A store by the addresses of its nodes, for a user (`name:password@`) or for anybody.
pub(crate) fn store_at(user: &str, nodes: &[SocketAddr]) -> EventStore {
    let nodes: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    // The client waits for so long before it connects for the first time, by default 500 ms.
    let connection_string = format!("esdb://{user}{}?tls=false&discoveryInterval=10", nodes.join(","));
    EventStore::new(connection_string).unwrap().store_name("the store")
}

/// The category of a store.
pub(crate) fn source(store: &EventStore, kind: Kind) -> Arc<dyn Source> {
    match kind {
        Kind::Persistent => Arc::new(PersistentSource::category(store, CATEGORY)),
        Kind::CatchUp => Arc::new(CatchUpSource::category(store, CATEGORY)),
    }
}

/// What the source makes, nearly, with the least message timeout and the fewest retries that it takes.
pub(crate) fn least_group() -> PersistentSubscriptionOptions {
    PersistentSubscriptionOptions::default()
        .resolve_link_tos(true)
        .start_from(StreamPosition::Start)
        .message_timeout(MESSAGE_TIMEOUT)
        .max_retry_count(RETRIES)
        .max_subscriber_count(1)
        .consumer_strategy_name(SystemConsumerStrategy::DispatchToSingle)
}

/// An engine, and what it reports. Dropped, it is as if the process had died.
pub(crate) struct Node {
    pub(crate) scriba: Scriba,
    pub(crate) recorder: Recorder,
}

impl Node {
    /// Starts the projection, be it again.
    pub(crate) async fn start(&self, source: impl Source, stage: &Stage, ledger: &Ledger) {
        let options = ProjectionOptions::default()
            .parallelism(8)
            .lag_interval(Duration::ZERO)
            .lease(Lease::For(LEASE))
            .shutdown_timeout(Duration::from_secs(5));
        self.scriba.start(ledger.clone(), source, stage.target.clone(), options).await.unwrap();
    }

    pub(crate) async fn stop(&self) {
        self.scriba.stop(id()).await.unwrap();
    }

    pub(crate) fn info(&self) -> ProjectionInfo {
        self.scriba.info(id()).unwrap()
    }

    /// Waits until everything up to a position is done.
    pub(crate) async fn until(&self, position: i64) {
        let position = Position::from_i64(position).unwrap();
        let waited = async {
            let until = Instant::now() + PATIENCE;
            loop {
                match self.scriba.wait_for(id(), WaitFor::Position(position), PATIENCE).await {
                    // Until the present node has the lease of one that died.
                    Err(scriba_core::WaitError::RunByNobody { .. }) if Instant::now() < until => {
                        sleep(millis(50)).await;
                    }
                    other => return other,
                }
            }
        };
        if let Err(error) = waited.await {
            panic!("{error}: {:#?}", self.info());
        }
    }

    /// Waits until it projects.
    pub(crate) async fn is_active(&self) {
        eventually("it projects", || {
            let info = self.info();
            (info.state, info.role) == (State::Running, Role::Active)
        })
        .await;
    }

    /// Waits until it has halted, and says why.
    pub(crate) async fn halted(&self) -> String {
        eventually("it has halted", || self.info().state == State::Halted).await;
        self.info().halt_reason.unwrap().message
    }

    /// How many subscriptions there were.
    pub(crate) fn subscriptions(&self) -> usize {
        self.recorder.events_of(id()).iter().filter(|event| matches!(event, Recorded::Subscribed { .. })).count()
    }

    /// First and last positions of gaps that were passed.
    pub(crate) fn passed(&self) -> Vec<(u64, u64)> {
        let gap = |recorded: Recorded| match recorded {
            Recorded::GapPassed { from, to, .. } => Some((from.get(), to.get())),
            _ => None,
        };
        self.recorder.events_of(id()).into_iter().filter_map(gap).collect()
    }
}

type Act = Arc<dyn Fn(EventMeta) -> BoxFuture<'static, ()> + Send + Sync>;

/// Writes each event down, and counts it, after what the test wants to happen before.
#[derive(Clone, Projection)]
#[projection(name = "ledger")]
pub(crate) struct Ledger {
    act: Act,
    /// Calls of the handler that came to their end.
    calls: Arc<AtomicUsize>,
}

impl Ledger {
    pub(crate) fn new() -> Self {
        Self::after(|_| async {})
    }

    pub(crate) fn after<F>(act: impl Fn(EventMeta) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self { act: Arc::new(move |meta| Box::pin(act(meta))), calls: Arc::default() }
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

impl Handler for Ledger {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, _: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        (self.act)(meta.clone()).await;
        self.calls.fetch_add(1, Ordering::SeqCst);
        let row = Committed {
            position: meta.position.to_i64()?,
            stream: meta.stream_id.to_string(),
            revision: i64::try_from(meta.revision.unwrap_or(u64::MAX))?,
        };
        let counted = Counter::update(row.stream.clone()).add(Counter::EVENTS, 1).required();
        Ok(Outcome::from(PgOp::from(row.insert())).and(counted))
    }
}

#[derive(Table)]
#[table(name = "committed")]
struct Committed {
    #[table(key)]
    position: i64,
    stream: String,
    revision: i64,
}

#[derive(Table)]
#[table(name = "counters")]
struct Counter {
    #[table(key)]
    stream: String,
    events: i64,
}

/// What handlers of events from a position on wait for.
#[derive(Clone)]
pub(crate) struct Gate(Arc<watch::Sender<i64>>);

impl Gate {
    /// Shut for events at this position and above.
    pub(crate) fn shut_from(position: i64) -> Self {
        Self(Arc::new(watch::Sender::new(position)))
    }

    pub(crate) fn open(&self) {
        self.shut_at(i64::MAX);
    }

    /// Opens it for events below this position.
    pub(crate) fn shut_at(&self, position: i64) {
        self.0.send_replace(position);
    }

    pub(crate) async fn pass(&self, meta: &EventMeta) {
        let position = meta.position.to_i64().unwrap();
        self.0.subscribe().wait_for(|shut_from| position < *shut_from).await.unwrap();
    }

    /// A projection whose handlers wait at the gate.
    pub(crate) fn ledger(&self) -> Ledger {
        let gate = self.clone();
        Ledger::after(move |meta| {
            let gate = gate.clone();
            async move { gate.pass(&meta).await }
        })
    }
}

/// A source that notes when it was asked to deliver.
#[derive(Clone)]
pub(crate) struct Watched {
    source: Arc<dyn Source>,
    asked: Arc<Mutex<Vec<Instant>>>,
}

impl Watched {
    pub(crate) fn new(source: Arc<dyn Source>) -> Self {
        Self { source, asked: Arc::default() }
    }

    fn note(&self) {
        self.asked.lock().unwrap().push(Instant::now());
    }

    /// When it was asked since a moment.
    pub(crate) fn asked_since(&self, since: Instant) -> Vec<Instant> {
        self.asked.lock().unwrap().iter().copied().filter(|asked| *asked >= since).collect()
    }
}

#[async_trait]
impl Source for Watched {
    async fn check(&self) -> Result<(), SourceError> {
        self.source.check().await
    }

    /// Asked at each attempt to subscribe, where there is no place to claim.
    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        if !self.source.admits_one() {
            self.note();
        }
        self.source.identity().await
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.source.subscribe(request).await
    }

    fn admits_one(&self) -> bool {
        self.source.admits_one()
    }

    async fn claim(&self, id: &ProjectionId, in_flight: usize) -> Result<Option<Box<dyn Place>>, SourceError> {
        self.note();
        self.source.claim(id, in_flight).await
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        self.source.inspector().await
    }

    fn keeps_position(&self) -> bool {
        self.source.keeps_position()
    }

    async fn reset(&self, id: &ProjectionId) -> Result<(), SourceError> {
        self.source.reset(id).await
    }
}

/// Waits until a condition holds.
pub(crate) async fn eventually(what: &str, holds: impl FnMut() -> bool) {
    eventually_within(PATIENCE, what, holds).await;
}

pub(crate) async fn eventually_within(patience: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + patience;
    while !holds() {
        assert!(Instant::now() < until, "not within {patience:?}: {what}");
        sleep(millis(5)).await;
    }
}

pub(crate) fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}
