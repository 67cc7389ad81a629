//! Whoever reads the read model sees a prefix of the log, at every moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use scriba_core::switches::Switches;
use scriba_core::{EventMeta, Handler, HandlerResult, Lease, Outcome, Projection, ProjectionId, RawEvent, Scriba};
use scriba_target_postgres::{PgOp, Table};

use super::common::{Fixture, fixture, options, until};

const EVENTS: i64 = 60;

#[derive(Table)]
#[table(name = "seen")]
struct Seen {
    #[table(key)]
    position: i64,
}

/// A row that every event changes: the sum of all positions and the number of events.
#[derive(Table)]
#[table(name = "total")]
struct Total {
    #[table(key)]
    id: i32,
    sum: i64,
    events: i64,
}

/// Waits as long as the event's body says, then writes.
#[derive(Projection)]
#[projection(name = "prefix")]
struct Prefix;

impl Handler for Prefix {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        let wait: u64 = serde_json::from_slice(&event.0.data)?;
        if wait > 0 {
            tokio::time::sleep(Duration::from_micros(wait)).await;
        }
        let position = meta.position.to_i64()?;
        let total = Total::update(1).add(Total::SUM, position).add(Total::EVENTS, 1);
        Ok(Outcome::from(PgOp::from(Seen { position }.insert())).and(total))
    }
}

/// Runs the log through the projection while a reader looks. The first snapshot that is no prefix, if there is one.
async fn not_a_prefix(fixture: &Fixture, seed: u64, switch: Switches) -> Option<String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let clear =
        "TRUNCATE events RESTART IDENTITY; TRUNCATE seen, total, scriba_checkpoints, scriba_projections, scriba_leases;
                 INSERT INTO total VALUES (1, 0, 0)";
    sqlx::raw_sql(clear).execute(&fixture.pool).await.unwrap();
    let streams: Vec<String> = (0..EVENTS).map(|_| format!("stream {}", rng.u8(0..9))).collect();
    let waits: Vec<Vec<u8>> =
        (0..EVENTS).map(|_| if rng.bool() { 0 } else { rng.u32(0..3_000) }.to_string().into_bytes()).collect();
    let append = "INSERT INTO events (stream_id, type, data)
                  SELECT stream, 'Happened', data FROM unnest($1::text[], $2::bytea[]) AS e (stream, data)";
    sqlx::query(append).bind(&streams).bind(&waits).execute(&fixture.pool).await.unwrap();

    let done = Arc::new(AtomicBool::new(false));
    let reader = tokio::spawn(look(fixture.pool.clone(), Arc::clone(&done)));
    let scriba = Scriba::new();
    let options = options().lease(Lease::Off).batch_events(rng.usize(1..20)).in_flight_events(rng.usize(5..60));
    let options = options.switches(switch);
    scriba.start(Prefix, fixture.source.clone(), fixture.target.clone(), options).await.unwrap();
    until(&scriba, &ProjectionId::of::<Prefix>(), EVENTS - 1).await;
    scriba.shutdown().await.unwrap();
    done.store(true, Ordering::Relaxed);
    reader.await.unwrap()
}

async fn look(pool: sqlx::PgPool, done: Arc<AtomicBool>) -> Option<String> {
    // One statement, one snapshot.
    let snapshot =
        "SELECT (SELECT watermark FROM scriba_checkpoints), (SELECT sum FROM total), (SELECT events FROM total),
                           ARRAY(SELECT position FROM seen ORDER BY position)";
    loop {
        let last = done.load(Ordering::Relaxed);
        let (watermark, sum, events, seen): (Option<i64>, i64, i64, Vec<i64>) =
            sqlx::query_as(snapshot).fetch_one(&pool).await.unwrap();
        let prefix: Vec<i64> = (0..=watermark.unwrap_or(-1)).collect();
        let right = seen == prefix && sum == prefix.iter().sum::<i64>() && usize::try_from(events) == Ok(prefix.len());
        if !right {
            return Some(format!("watermark {watermark:?}, {events} events with sum {sum}, rows {seen:?}"));
        }
        if last {
            assert_eq!(watermark, Some(EVENTS - 1), "the reader has seen the end");
            return None;
        }
    }
}

async fn tables() -> Fixture {
    let fixture = fixture().await;
    let tables = "CREATE TABLE seen (position bigint PRIMARY KEY);
                  CREATE TABLE total (id integer PRIMARY KEY, sum bigint NOT NULL, events bigint NOT NULL)";
    sqlx::raw_sql(tables).execute(&fixture.pool).await.unwrap();
    fixture
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_sees_a_prefix_of_the_log_every_time_in_200_runs() {
    let fixture = tables().await;
    for seed in 0..200 {
        assert_eq!(not_a_prefix(&fixture, seed, Switches::None).await, None, "seed {seed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reader_notices_outcomes_that_are_committed_in_the_order_they_finish() {
    let fixture = tables().await;
    // The database would notice first.
    let unchecked = "ALTER TABLE scriba_checkpoints DROP CONSTRAINT scriba_checkpoints_check";
    sqlx::raw_sql(unchecked).execute(&fixture.pool).await.unwrap();
    for seed in 0..20 {
        if not_a_prefix(&fixture, seed, Switches::CommitAsFinished).await.is_some() {
            return;
        }
    }
    panic!("20 runs and nothing noticed");
}
