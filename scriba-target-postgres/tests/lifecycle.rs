//! Commands and states on a real server: leases of what does not project, stops while the server hangs, starts after them.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

mod support;

use std::time::{Duration, Instant};

use scriba_core::{
    CommandError, EventMeta, Handler, HandlerError, HandlerResult, Lease, OnPoison, Position, Projection,
    ProjectionOptions, RawEvent, Role, Scriba, State, WaitFor,
};
use scriba_target_postgres::{PgOp, PgTarget, sql};
use scriba_testing::MemorySource;
use scriba_testing::postgres::{Postgres, PostgresOptions};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, PgConnection, PgPool};
use support::{Fixture, fixture, fixture_in};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;

const NAME: &str = "lifecycle";

/// Leaves the position of each event in `seen`; an event of type `Bad` fails for good.
#[derive(Projection)]
#[projection(name = "lifecycle")]
struct Seen;

impl Handler for Seen {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        if event.0.event_type.as_str() == "Bad" {
            return Err(HandlerError::permanent(HandlerError::new("bad", "as told")));
        }
        Ok(sql("INSERT INTO seen VALUES ($1)").bind(meta.position.to_i64()?).into())
    }
}

fn options(lease: Duration) -> ProjectionOptions {
    ProjectionOptions::default()
        .parallelism(4)
        .lag_interval(Duration::ZERO)
        .shutdown_timeout(Duration::from_secs(5))
        .lease(Lease::For(lease))
}

const LONG: Duration = Duration::from_secs(30);

async fn start(scriba: &Scriba, source: &MemorySource, target: &PgTarget, options: ProjectionOptions) {
    scriba.start(Seen, source.clone(), target.clone(), options).await.expect("it starts");
}

fn append(source: &MemorySource) -> Position {
    source.append("stream", "Good", "{}")
}

async fn until(scriba: &Scriba, position: Position) {
    let waited = scriba.wait_for(NAME, WaitFor::Position(position), Duration::from_secs(20)).await;
    if let Err(error) = waited {
        panic!("{error}: {:#?}", scriba.info(NAME));
    }
}

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(15);
    while !holds().await {
        assert!(Instant::now() < until, "not within 15 s: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

async fn is(scriba: &Scriba, state: State, role: Role) {
    eventually(&format!("{state} and {role}"), async || {
        scriba.info(NAME).is_ok_and(|info| (info.state, info.role) == (state, role))
    })
    .await;
}

/// The owner of the lease, while it has not run out.
async fn owner(pool: &PgPool) -> Option<String> {
    let held = "SELECT owner FROM scriba_leases WHERE name = $1 AND expires_at > clock_timestamp()";
    sqlx::query_scalar(held).bind(NAME).fetch_optional(pool).await.unwrap()
}

async fn epoch(pool: &PgPool) -> i64 {
    sqlx::query_scalar("SELECT epoch FROM scriba_checkpoints WHERE name = $1").bind(NAME).fetch_one(pool).await.unwrap()
}

/// A stop, and how long it took.
async fn timed_stop(scriba: &Scriba) -> (Result<(), CommandError>, Duration) {
    let begun = Instant::now();
    let stopped = scriba.stop(NAME).await;
    assert_eq!(scriba.info(NAME).unwrap().state, State::Stopped);
    (stopped, begun.elapsed())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_and_a_halted_projection_renew_their_lease_for_longer_than_it_runs() {
    let fixture = fixture().await;
    let source = MemorySource::new();
    let lease = || options(Duration::from_secs(1)).on_poison(OnPoison::Halt);
    let (active, standby) = (Scriba::new(), Scriba::new());
    start(&active, &source, &fixture.target, lease()).await;
    until(&active, append(&source)).await;
    start(&standby, &source, &fixture.target, lease()).await;
    is(&standby, State::Running, Role::Standby).await;
    let (holder, first) = (owner(&fixture.pool).await.unwrap(), epoch(&fixture.pool).await);
    for state in [State::Paused, State::Halted] {
        if state == State::Paused {
            active.pause(NAME).await.expect("running can be paused");
        } else {
            active.resume(NAME).await.expect("paused can be resumed");
            until(&active, append(&source)).await;
            source.append("stream", "Bad", "{}");
        }
        is(&active, state, Role::Active).await;
        let until = Instant::now() + Duration::from_millis(3_500);
        while Instant::now() < until {
            assert_eq!(owner(&fixture.pool).await.as_ref(), Some(&holder), "{state}");
            sleep(Duration::from_millis(20)).await;
        }
        is(&active, state, Role::Active).await;
        is(&standby, State::Running, Role::Standby).await;
        assert_eq!(epoch(&fixture.pool).await, first, "{state}");
    }
    active.shutdown().await.expect("it stops");
    standby.shutdown().await.expect("it stops");
}

/// Locks the checkpoint row, has a start wait for it in its take-over, and answers what holds the lock.
async fn blocked_take_over(
    fixture: &Fixture,
    scriba: &Scriba,
    source: &MemorySource,
    options: ProjectionOptions,
) -> PgConnection {
    start(scriba, source, &fixture.target, self::options(LONG)).await;
    until(scriba, append(source)).await;
    scriba.stop(NAME).await.expect("it stops");
    let mut locking = PgConnection::connect_with(&fixture.database.connect_options()).await.unwrap();
    sqlx::raw_sql("BEGIN; SELECT FROM scriba_checkpoints FOR UPDATE").execute(&mut locking).await.unwrap();
    start(scriba, source, &fixture.target, options).await;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                 AND application_name = 'scriba lifecycle v1' AND wait_event_type = 'Lock'";
    eventually("the take-over waits for the row", async || {
        sqlx::query_scalar::<_, i64>(waits).fetch_one(&fixture.pool).await.unwrap() == 1
    })
    .await;
    locking
}

/// Starts, and is active long before a lease that was left would have lapsed.
async fn starts_clean(fixture: &Fixture, scriba: &Scriba, source: &MemorySource) {
    let before = epoch(&fixture.pool).await;
    let begun = Instant::now();
    start(scriba, source, &fixture.target, options(LONG)).await;
    let last = append(source);
    until(scriba, last).await;
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    is(scriba, State::Running, Role::Active).await;
    assert_eq!(epoch(&fixture.pool).await, before + 1, "nobody but the new start has taken over");
    let expected: Vec<i64> = (0..=last.to_i64().unwrap()).collect();
    assert_eq!(fixture.seen().await, expected);
    scriba.stop(NAME).await.expect("it stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_while_a_take_over_waits_for_a_lock_gives_the_lease_up_and_the_next_start_is_active_at_once() {
    let (fixture, scriba, source) = (fixture().await, Scriba::new(), MemorySource::new());
    let mut locking = blocked_take_over(&fixture, &scriba, &source, options(LONG)).await;
    let stopping = {
        let scriba = scriba.clone();
        tokio::spawn(async move { timed_stop(&scriba).await })
    };
    sleep(Duration::from_millis(300)).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut locking).await.unwrap();
    let (stopped, took) = stopping.await.unwrap();
    stopped.expect("it stops");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(owner(&fixture.pool).await, None, "the lease was given up, and nothing has taken it again");
    starts_clean(&fixture, &scriba, &source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_whose_time_is_over_while_a_take_over_waits_for_a_lock_is_told_and_the_lease_is_given_up_later() {
    let (fixture, scriba, source) = (fixture().await, Scriba::new(), MemorySource::new());
    let short = options(LONG).shutdown_timeout(Duration::from_millis(300));
    let mut locking = blocked_take_over(&fixture, &scriba, &source, short).await;
    let (stopped, took) = timed_stop(&scriba).await;
    assert!(took < Duration::from_millis(700), "{took:?}");
    let error = stopped.expect_err("the lease row is locked by the take-over");
    assert!(error.to_string().contains("the lease lapses by itself, unless"), "{error}");
    sqlx::raw_sql("ROLLBACK").execute(&mut locking).await.unwrap();
    starts_clean(&fixture, &scriba, &source).await;
}

/// What a [`Hanging`] proxy lets through.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Through {
    Everything,
    /// What is sent arrives, and no answer comes back.
    NoAnswers,
    /// Connections are accepted, and what is sent is swallowed.
    Nothing,
}

/// Stands between target and server, and can make the server look as if it hung.
struct Hanging {
    port: u16,
    through: watch::Sender<Through>,
}

impl Hanging {
    async fn start(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let through = watch::Sender::new(Through::Everything);
        let watched = through.subscribe();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                tokio::spawn(copy(from_client, to_server, watched.clone(), |through| through != Through::Nothing));
                tokio::spawn(copy(from_server, to_client, watched.clone(), |through| through == Through::Everything));
            }
        });
        Self { port, through }
    }
}

/// A connection that has lost something stays silent.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    through: watch::Receiver<Through>,
    passes: fn(Through) -> bool,
) {
    let mut buffer = vec![0; 1 << 16];
    let mut silent = false;
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        silent |= !passes(*through.borrow());
        if !silent && to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_returns_in_time_while_the_server_accepts_and_never_answers_and_the_next_start_is_clean() {
    for through in [Through::Nothing, Through::NoAnswers] {
        for in_flight in [false, true] {
            let (fixture, scriba, source) = (fixture().await, Scriba::new(), MemorySource::new());
            let proxy = Hanging::start(fixture.database.connect_options().get_port()).await;
            let connect = fixture.database.connect_options().host("127.0.0.1").port(proxy.port);
            let target = PgTarget::new(PgPoolOptions::new().connect_lazy_with(connect));
            let lease = Duration::from_secs(3);
            let hanging = options(lease).shutdown_timeout(Duration::from_secs(1));
            start(&scriba, &source, &target, hanging).await;
            until(&scriba, append(&source)).await;
            proxy.through.send_replace(through);
            if in_flight {
                append(&source);
                sleep(Duration::from_millis(200)).await;
            }
            let (stopped, took) = timed_stop(&scriba).await;
            assert!(took < Duration::from_millis(1_500), "{through:?} {in_flight}: {took:?}");
            let error = stopped.expect_err("nothing answers").to_string();
            let expected =
                if in_flight { "a commit of 1 events was left behind" } else { "the lease lapses by itself" };
            assert!(error.contains(expected), "{through:?}: {error}");

            proxy.through.send_replace(Through::Everything);
            let begun = Instant::now();
            start(&scriba, &source, &target, options(lease)).await;
            let last = append(&source);
            until(&scriba, last).await;
            // The lease lapses, unless the keeper of before gets to giving it up first; a standby asks at most 2.25 s later; and
            // a commit in doubt that the server heard of is waited for, for at most 2 s.
            let bound = lease + Duration::from_millis(2_250) + Duration::from_secs(2);
            assert!(begun.elapsed() < bound + Duration::from_secs(2), "{through:?} {in_flight}: {:?}", begun.elapsed());
            assert_eq!(
                fixture.seen().await,
                (0..=last.to_i64().unwrap()).collect::<Vec<_>>(),
                "{through:?} {in_flight}"
            );
            scriba.shutdown().await.expect("it stops");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_and_starting_again_and_again_leaves_no_lease_and_no_connection_behind() {
    let (fixture, scriba, source) = (fixture().await, Scriba::new(), MemorySource::new());
    for round in 0..25 {
        start(&scriba, &source, &fixture.target, options(LONG)).await;
        append(&source);
        if round % 2 == 0 {
            sleep(Duration::from_millis(round * 2)).await;
        }
        let (stopped, took) = timed_stop(&scriba).await;
        stopped.expect("it stops");
        assert!(took < Duration::from_secs(3), "{took:?}");
        assert_eq!(owner(&fixture.pool).await, None, "round {round}");
    }
    start(&scriba, &source, &fixture.target, options(LONG)).await;
    until(&scriba, append(&source)).await;
    assert_eq!(fixture.seen().await, (0..=25).collect::<Vec<_>>());
    scriba.shutdown().await.expect("it stops");
    let connections = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                       AND application_name LIKE 'scriba%'";
    eventually("all connections are closed", async || {
        sqlx::query_scalar::<_, i64>(connections).fetch_one(&fixture.pool).await.unwrap() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_out_of_connections_degrades_a_projection_which_recovers_by_itself() {
    let server = Postgres::start(PostgresOptions::default().setting("max_connections", "14")).await.unwrap();
    let fixture = fixture_in(&server).await;
    let (scriba, source) = (Scriba::new(), MemorySource::new());
    start(&scriba, &source, &fixture.target, options(Duration::from_secs(2))).await;
    until(&scriba, append(&source)).await;

    let mut taken = Vec::new();
    let until_degraded = Instant::now() + Duration::from_secs(20);
    loop {
        // The engine and this test are after the same places; once the test has all of them, the engine waits.
        let theirs: i64 = sqlx::query_scalar(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'scriba%'",
        )
        .fetch_one(&fixture.pool)
        .await
        .unwrap();
        while let Ok(connection) = PgConnection::connect_with(&fixture.database.connect_options()).await {
            taken.push(connection);
        }
        if theirs == 0 {
            break;
        }
        assert!(Instant::now() < until_degraded, "the engine keeps its connections");
    }
    source.append("stream", "Good", "{}");
    eventually("the engine is told that there are too many", async || {
        let info = scriba.info(NAME).unwrap();
        info.degraded_since.is_some() && info.last_error.is_some_and(|error| error.contains("too many clients"))
    })
    .await;
    for _ in 0..20 {
        let info = scriba.info(NAME).unwrap();
        assert!(info.is_live() && !info.is_ready(), "{info:#?}");
        sleep(Duration::from_millis(50)).await;
    }
    drop(taken);
    until(&scriba, append(&source)).await;
    eventually("it is ready again", async || scriba.info(NAME).unwrap().is_ready()).await;
    assert_eq!(fixture.seen().await, [0, 1, 2]);
    scriba.shutdown().await.expect("it stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_one_connection_that_a_handler_holds_starves_neither_a_start_nor_a_commit() {
    let fixture = fixture().await;
    let (scriba, source) = (Scriba::new(), MemorySource::new());
    let pool = fixture.database.pool(1).await.unwrap();
    let target = PgTarget::new(pool.clone());
    start(&scriba, &source, &target, options(Duration::from_secs(1))).await;
    let held = pool.acquire().await.unwrap();
    let last = append(&source);
    eventually("it is committed", async || scriba.info(NAME).unwrap().watermark == Some(last)).await;
    scriba.stop(NAME).await.expect("it stops");
    drop(held);
    assert_eq!(fixture.seen().await, [0]);
}
