//! Two nodes: what the one does while the other is slow, or frozen.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

mod support;

use std::env;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use scriba_core::telemetry::{Halted, Observer, OwnershipLost};
use scriba_core::{
    EventMeta, Handler, HandlerError, HandlerResult, Lease, Outcome, Projection, ProjectionId, ProjectionOptions,
    RawEvent, Role, Scriba, State,
};
use scriba_source_postgres::PgLog;
use scriba_target_postgres::{PgOp, PgTarget, sql};
use scriba_testing::MemorySource;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use support::{Fixture, fixture};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::sleep;

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !holds().await {
        assert!(Instant::now() < until, "not within 30 s: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

fn options(lease: Duration) -> ProjectionOptions {
    ProjectionOptions::default().lag_interval(Duration::ZERO).lease(Lease::For(lease))
}

/// Looks something up over the pool for 50 ms, before it leaves the event's position in `seen`.
#[derive(Clone, Projection)]
#[projection(name = "slow")]
struct Slow {
    pool: PgPool,
    /// Times when the pool had no connection.
    refused: Arc<AtomicUsize>,
}

impl Handler for Slow {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, _: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        if let Err(error) = sqlx::query("SELECT pg_sleep(0.05)").execute(&self.pool).await {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return Err(HandlerError::retryable(error));
        }
        Ok(sql("INSERT INTO seen VALUES ($1)").bind(meta.position.to_i64()?).into())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_partitions_whose_handlers_fight_for_two_connections_keep_the_lease_and_the_only_active_node() {
    const EVENTS: i64 = 160;
    let fixture = fixture().await;
    let source = MemorySource::new();
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .acquire_timeout(Duration::from_millis(200))
        .connect_with(fixture.database.connect_options())
        .await
        .unwrap();
    let target = PgTarget::new(pool.clone());
    let slow = Slow { pool, refused: Arc::default() };
    let second = Duration::from_secs(1);
    let (active, standby) = (Scriba::new(), Scriba::new());
    active
        .start(slow.clone(), source.clone(), target.clone(), options(second).parallelism(16))
        .await
        .expect("it starts");
    eventually("the first is active", async || active.info("slow").unwrap().state == State::Running).await;
    standby.start(slow.clone(), source.clone(), target, options(second).parallelism(16)).await.expect("it starts");
    eventually("the second stands by", async || standby.info("slow").unwrap().role == Role::Standby).await;
    for event in 0..EVENTS {
        source.append(format!("stream {event}"), "Happened", "{}");
    }
    let held = "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM scriba_leases";
    let mut least = f64::MAX;
    eventually("all events are seen", async || {
        for (scriba, role) in [(&active, Role::Active), (&standby, Role::Standby)] {
            let info = scriba.info("slow").unwrap();
            assert_eq!((info.state, info.role), (State::Running, role), "{info:#?}");
        }
        least = least.min(sqlx::query_scalar(held).fetch_one(&fixture.pool).await.unwrap());
        i64::try_from(fixture.seen().await.len()) == Ok(EVENTS)
    })
    .await;
    assert!(least > 0.0, "the lease was renewed on time: {least} s were left");
    assert!(slow.refused.load(Ordering::SeqCst) > 0, "the pool was used up");
    assert_eq!(fixture.seen().await, (0..EVENTS).collect::<Vec<_>>());
    let epoch: i64 = sqlx::query_scalar("SELECT epoch FROM scriba_checkpoints").fetch_one(&fixture.pool).await.unwrap();
    assert_eq!(epoch, 1, "nobody has taken over");
    standby.shutdown().await.expect("it stops");
    active.shutdown().await.expect("it stops");
}

const LEASE: Duration = Duration::from_secs(2);

/// Writes to a row that all events write to. One of type `Slow` then stays in its transaction for a second.
#[derive(Projection)]
#[projection(name = "frozen")]
struct Freezing;

impl Handler for Freezing {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        let count = sql("UPDATE counter SET events = events + 1");
        let seen = sql("INSERT INTO seen VALUES ($1)").bind(meta.position.to_i64()?);
        let outcome = Outcome::from(PgOp::from(count)).and(seen);
        Ok(if event.0.event_type.as_str() == "Slow" { outcome.and(sql("SELECT pg_sleep(1)")) } else { outcome })
    }
}

fn log(pool: &PgPool) -> PgLog {
    PgLog::new(pool.clone(), "events")
}

async fn append(pool: &PgPool, event_type: &str) -> i64 {
    sqlx::query_scalar("INSERT INTO events (stream_id, type, data) VALUES ('stream', $1, '') RETURNING position")
        .bind(event_type)
        .fetch_one(pool)
        .await
        .unwrap()
}

/// Tells what happens to a node on its standard output.
struct Told;

impl Observer for Told {
    fn ownership_lost(&self, _: &ProjectionId, _: &OwnershipLost<'_>) {
        println!("node: ownership lost");
    }

    fn halted(&self, _: &ProjectionId, halted: &Halted<'_>) {
        println!("node: halted: {}", halted.reason);
    }
}

/// Set in the process that is frozen, which runs the test that freezes it.
const DATABASE: &str = "SCRIBA_TEST_NODE_DATABASE";
const FREEZES: &str =
    "a_node_that_is_frozen_inside_its_transaction_is_taken_over_from_in_time_and_stands_by_when_it_wakes_up";

/// The process that is frozen.
async fn be_the_node(url: &str) {
    let pool = PgPool::connect(url).await.unwrap();
    let scriba = Scriba::with_observers([Arc::new(Told) as Arc<dyn Observer>]);
    scriba.start(Freezing, log(&pool), PgTarget::new(pool.clone()), options(LEASE)).await.expect("it starts");
    let mut told = None;
    loop {
        let info = scriba.info("frozen").unwrap();
        let now = (info.state, info.role);
        if told != Some(now) {
            println!("node: {} {}", info.state, info.role);
            told = Some(now);
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// A node in a process of its own, which does not outlive this.
struct Node {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Node {
    fn start(fixture: &Fixture) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", FREEZES, "--nocapture"])
            .env(DATABASE, fixture.database.url())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    async fn signal(&self, signal: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().await.unwrap().success());
    }

    /// What it tells until it tells something that is expected.
    async fn tells(&mut self, expected: &str) -> Vec<String> {
        let mut told = Vec::new();
        let telling = async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                if let Some((_, line)) = line.split_once("node: ") {
                    told.push(line.to_owned());
                    if line == expected {
                        return;
                    }
                }
            }
            panic!("the node has ended");
        };
        let in_time = tokio::time::timeout(Duration::from_secs(20), telling).await;
        assert!(in_time.is_ok(), "it does not tell {expected:?}, but {told:?}");
        told
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_frozen_inside_its_transaction_is_taken_over_from_in_time_and_stands_by_when_it_wakes_up() {
    if let Ok(url) = env::var(DATABASE) {
        return be_the_node(&url).await;
    }
    let fixture = fixture().await;
    let tables = "CREATE TABLE events (
            position bigint GENERATED ALWAYS AS IDENTITY (MINVALUE 0 START 0) PRIMARY KEY,
            id uuid NOT NULL DEFAULT gen_random_uuid(), stream_id text NOT NULL, type text NOT NULL, data bytea NOT NULL);
        CREATE TABLE counter (events bigint);
        INSERT INTO counter VALUES (0)";
    sqlx::raw_sql(tables).execute(&fixture.pool).await.unwrap();
    let mut node = Node::start(&fixture);
    append(&fixture.pool, "Quick").await;
    node.tells("running active").await;
    eventually("the node projects", async || fixture.seen().await == [0]).await;
    let standby = Scriba::new();
    standby.start(Freezing, log(&fixture.pool), fixture.target.clone(), options(LEASE)).await.expect("it starts");
    eventually("this one stands by", async || standby.info("frozen").unwrap().role == Role::Standby).await;

    append(&fixture.pool, "Slow").await;
    let sleeps = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                  AND application_name = 'scriba frozen v1' AND wait_event = 'PgSleep'";
    eventually("it is inside its transaction", async || {
        sqlx::query_scalar::<_, i64>(sleeps).fetch_one(&fixture.pool).await.unwrap() == 1
    })
    .await;
    node.signal("-STOP").await;
    let frozen = Instant::now();
    eventually("this one has taken over and projects", async || fixture.seen().await == [0, 1]).await;
    let took = frozen.elapsed();
    // The lease lapses, a standby asks at most 2.25 s later, and the row locks of the frozen transaction go two thirds of a
    // lease, at least 2 s, after its last statement; then the event takes its second.
    let bound = LEASE + Duration::from_millis(2_250) + Duration::from_secs(2) + Duration::from_secs(1);
    assert!(took < bound + Duration::from_secs(1), "{took:?}");
    let info = standby.info("frozen").unwrap();
    assert_eq!((info.state, info.role), (State::Running, Role::Active));

    node.signal("-CONT").await;
    let mut told = node.tells("ownership lost").await;
    told.extend(node.tells("running standby").await);
    assert!(!told.iter().any(|line| line.contains("halted")), "{told:?}");
    append(&fixture.pool, "Quick").await;
    eventually("this one goes on", async || fixture.seen().await == [0, 1, 2]).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.seen().await, [0, 1, 2], "the one that woke up has committed nothing");
    let counted: i64 = sqlx::query_scalar("SELECT events FROM counter").fetch_one(&fixture.pool).await.unwrap();
    assert_eq!(counted, 3);

    standby.shutdown().await.expect("it stops");
    node.tells("running active").await;
    append(&fixture.pool, "Quick").await;
    eventually("the node projects again", async || fixture.seen().await == [0, 1, 2, 3]).await;
}
