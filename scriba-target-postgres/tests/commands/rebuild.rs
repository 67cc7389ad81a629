//! Rebuilds from a log in Postgres: with no events, up to a position, killed, and failing.

use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use scriba_core::checkpoint::Replay;
use scriba_core::target::Tables;
use scriba_core::{
    EventMeta, Handler, HandlerError, HandlerResult, Lease, OnPoison, Outcome, Position, Projection, ProjectionId,
    ProjectionOptions, RawEvent, Retry, Scriba, State, WaitFor,
};
use scriba_source_postgres::PgLog;
use scriba_target_postgres::{PgOp, PgTarget, sql};
use sqlx::PgPool;

use super::support::{Fixture, fixture};

const EVENTS: i64 = 2_000;

/// Where a child process finds its database; it is not set in the tests themselves.
const CHILD: &str = "SCRIBA_TEST_REBUILD_OF";

/// Leaves each position in `seen`; fails for good where the body says so.
#[derive(Clone, Default, Projection)]
#[projection(name = "rebuild")]
struct Rebuild {
    handled: Arc<Mutex<Vec<Position>>>,
}

impl Handler for Rebuild {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        self.handled.lock().unwrap().push(meta.position);
        if &*event.0.data == b"bad" {
            return Err(HandlerError::permanent(HandlerError::new("bad_order", "the order has no lines")));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        Ok(Outcome::from(sql("INSERT INTO seen VALUES ($1)").bind(meta.position.to_i64()?)))
    }
}

fn id() -> ProjectionId {
    ProjectionId::of::<Rebuild>()
}

fn options() -> ProjectionOptions {
    ProjectionOptions::default()
        .parallelism(4)
        .batch_events(20)
        .in_flight_events(40)
        .retry(Retry::none())
        .lease(Lease::For(Duration::from_secs(1)))
        .lag_interval(Duration::from_millis(100))
}

/// A log of so many events at positions from 0 on, in 20 streams.
async fn log(fixture: &Fixture, events: i64) -> PgLog {
    let table = "CREATE TABLE events (
        position bigint GENERATED ALWAYS AS IDENTITY (MINVALUE 0 START 0) PRIMARY KEY,
        id uuid NOT NULL DEFAULT gen_random_uuid(), stream_id text NOT NULL, type text NOT NULL, data bytea NOT NULL)";
    sqlx::raw_sql(table).execute(&fixture.pool).await.unwrap();
    sqlx::query("INSERT INTO events (stream_id, type, data) SELECT 's' || n % 20, 'Happened', 'x' FROM generate_series(1, $1) AS n")
        .bind(events)
        .execute(&fixture.pool)
        .await
        .unwrap();
    PgLog::new(fixture.pool.clone(), "events")
}

async fn seen_once_each(fixture: &Fixture, up_to: i64) {
    assert_eq!(fixture.seen().await, (0..=up_to).collect::<Vec<_>>());
}

/// What `main` of a program does that rebuilds up to the head of its log and ends.
async fn program(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let pool = PgPool::connect(url).await?;
    let head: i64 = sqlx::query_scalar("SELECT max(position) FROM events").fetch_one(&pool).await?;
    let scriba = Scriba::new();
    let options = options().on_poison_while_replaying(OnPoison::Halt).until(Position::from_i64(head)?);
    scriba.start(Rebuild::default(), PgLog::new(pool.clone(), "events"), PgTarget::new(pool), options).await?;
    scriba.run_until(std::future::pending::<()>()).await?;
    Ok(())
}

/// In the child process of a test, the test is the program, and ends with it.
async fn be_the_program_in_a_child() {
    let Ok(url) = std::env::var(CHILD) else { return };
    // What the standard library makes of a `main` that returns this.
    let code = match program(&url).await {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("Error: {error}");
            1
        }
    };
    std::process::exit(code);
}

/// The program in a process of its own.
fn child(fixture: &Fixture, test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, fixture.database.url());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// F1.
#[tokio::test(flavor = "multi_thread")]
async fn a_rebuild_with_no_events_is_done_at_once_caught_up_empty() {
    let fixture = fixture().await;
    let source = log(&fixture, 0).await;
    let scriba = Scriba::new();
    let begun = Instant::now();
    scriba.start(Rebuild::default(), source, fixture.target.clone(), options()).await.unwrap();
    scriba.wait_for(id(), WaitFor::Head, Duration::from_secs(20)).await.unwrap();
    while scriba.info(id()).unwrap().replay != Replay::Over(None) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", scriba.info(id()));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let info = scriba.info(id()).unwrap();
    assert_eq!((info.replay.to_string().as_str(), info.watermark), ("caught up (empty)", None));
    assert_eq!(fixture.target.stored(&id()).await.unwrap().unwrap().checkpoint.replay, Replay::Over(None));
    scriba.shutdown().await.unwrap();
}

/// F2.
#[tokio::test(flavor = "multi_thread")]
async fn a_rebuild_killed_at_60_percent_resumes_at_59_or_above() {
    be_the_program_in_a_child().await;
    let fixture = fixture().await;
    let source = log(&fixture, EVENTS).await;
    let test = "rebuild::a_rebuild_killed_at_60_percent_resumes_at_59_or_above";
    let mut child = child(&fixture, test).spawn().unwrap();
    let begun = Instant::now();
    let reached = loop {
        let stored = fixture.target.stored(&id()).await.unwrap();
        let watermark = stored.and_then(|stored| stored.checkpoint.watermark).map_or(-1, |w| w.to_i64().unwrap());
        if watermark >= EVENTS * 60 / 100 {
            break watermark;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "at {watermark} after a minute");
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(reached < EVENTS - 1, "killed too late to show anything");

    let (scriba, rebuild) = (Scriba::new(), Rebuild::default());
    scriba.start(rebuild.clone(), source, fixture.target.clone(), options()).await.unwrap();
    let last = Position::from_i64(EVENTS - 1).unwrap();
    scriba.wait_for(id(), WaitFor::Position(last), Duration::from_mins(1)).await.unwrap();
    let first = rebuild.handled.lock().unwrap().iter().min().copied().unwrap().to_i64().unwrap();
    assert!(first > reached && first >= EVENTS * 59 / 100, "killed at {reached}, resumed at {first}");
    seen_once_each(&fixture, EVENTS - 1).await;
    scriba.shutdown().await.unwrap();
}

/// F4.
#[tokio::test(flavor = "multi_thread")]
async fn a_rebuild_that_fails_ends_its_program_with_an_exit_code_the_error_and_its_position() {
    be_the_program_in_a_child().await;
    let test = "rebuild::a_rebuild_that_fails_ends_its_program_with_an_exit_code_the_error_and_its_position";
    let fixture = fixture().await;
    log(&fixture, 50).await;
    sqlx::raw_sql("UPDATE events SET data = 'bad' WHERE position = 17").execute(&fixture.pool).await.unwrap();
    let output = child(&fixture, test).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let error = errors.lines().find(|line| line.starts_with("Error: ")).unwrap_or_else(|| panic!("{errors}"));
    assert!(error.contains("projection rebuild v1 halted") && error.contains("the order has no lines"), "{error}");
    assert!(error.ends_with("(position 17)"), "{error}");

    sqlx::raw_sql("UPDATE events SET data = 'x' WHERE position = 17").execute(&fixture.pool).await.unwrap();
    let output = child(&fixture, test).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    seen_once_each(&fixture, 49).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn until_ends_exactly_at_its_position_also_where_that_is_a_gap() {
    let fixture = fixture().await;
    let source = log(&fixture, 60).await;
    sqlx::raw_sql("DELETE FROM events WHERE position IN (30, 31)").execute(&fixture.pool).await.unwrap();
    for until in [10, 31, 59] {
        let scriba = Scriba::new();
        let options = options().until(Position::from_i64(until).unwrap());
        scriba.start(Rebuild::default(), source.clone(), fixture.target.clone(), options).await.unwrap();
        scriba.run_until(std::future::pending::<()>()).await.unwrap();
        let stored = fixture.target.stored(&id()).await.unwrap().unwrap();
        assert_eq!(stored.checkpoint.watermark, Position::from_i64(until).ok());
        assert_eq!(stored.state.state, State::Stopped);
        assert_eq!(fixture.seen().await, (0..=until).filter(|n| ![30, 31].contains(n)).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_is_rebuilt_in_place_by_stop_reset_and_start() {
    let fixture = fixture().await;
    let source = log(&fixture, 40).await;
    let last = Position::new(39);
    let scriba = Scriba::new();
    let start = || scriba.start(Rebuild::default(), source.clone(), fixture.target.clone(), options());
    start().await.unwrap();
    scriba.wait_for(id(), WaitFor::Position(last), Duration::from_secs(20)).await.unwrap();
    scriba.stop(id()).await.unwrap();
    let counts = scriba.reset(id(), scriba_core::Reset::new().dead_letters().statement("TRUNCATE seen")).await.unwrap();
    assert_eq!(counts.cleared.applied, 40);
    start().await.unwrap();
    scriba.wait_for(id(), WaitFor::Position(last), Duration::from_secs(20)).await.unwrap();
    seen_once_each(&fixture, 39).await;
    scriba.shutdown().await.unwrap();
}
