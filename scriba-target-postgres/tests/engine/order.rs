//! Streams in order, each event once, everything visible in the order of the log.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use scriba_core::{FailureClass, HandlerError, Outcome, Position, Scriba, StreamPositions};
use scriba_target_postgres::{CustomError, OnConflict, PgOp, Table, custom, sql};
use scriba_testing::{Faults, MemorySource, Recorded, Recorder, SourceFault};
use tokio::sync::Semaphore;

use super::common::{
    Play, Seen, assert_conserved, eventually, halted, options, play, play_from, played, seen, slow, stage, statements,
    until,
};

/// A row that several streams write.
#[derive(Table)]
#[table(name = "shared")]
struct Shared {
    #[table(key)]
    id: i64,
    last: i64,
    events: i64,
}

const SHARED: &str = "CREATE TABLE shared (id bigint PRIMARY KEY, last bigint NOT NULL, events bigint NOT NULL)";

/// Numbers of the events in the batches that were committed.
fn batches(recorder: &Recorder) -> Vec<u64> {
    let stops = recorder.events_of(played()).into_iter().filter_map(|event| match event {
        Recorded::BatchStop { events, .. } => Some(events),
        _ => None,
    });
    stops.collect()
}

/// A handler that lets the event at position 0 through when it is told to, so that all others wait for it in the window.
fn behind_the_first(
    act: impl Fn(&scriba_core::EventMeta) -> Outcome<PgOp> + Send + Sync + 'static,
) -> (Play, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let (act, held) = (Arc::new(act), gate.clone());
    let play = play(move |meta| {
        let (act, held) = (act.clone(), held.clone());
        async move {
            if meta.position == Position::new(0) {
                drop(held.acquire().await?);
            }
            Ok(act(&meta))
        }
    });
    (play, gate)
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_one_stream_and_of_many_that_write_one_row_in_one_batch_are_all_applied_in_order() {
    for streams in [1, 50] {
        let fixture = stage().await;
        fixture.run(SHARED).await;
        fixture.append_many(200, streams).await;
        let (play, gate) = behind_the_first(|meta| {
            let row = Shared { id: 1, last: meta.position.to_i64().unwrap(), events: 1 };
            seen(meta).and(row.upsert(OnConflict::update(Shared::LAST).add(Shared::EVENTS)))
        });
        let recorder = Recorder::new();
        let scriba = fixture.play_to(&recorder, &play, options()).await;
        // In one stream the others are not even called before the first is done.
        if streams > 1 {
            eventually("the others are handled", || play.handled().len() >= 150).await;
        }
        gate.add_permits(1);
        until(&scriba, &played(), 199).await;
        assert_eq!(fixture.texts("SELECT id || ' ' || last || ' ' || events FROM shared").await, ["1 199 200"]);
        assert!(batches(&recorder).iter().any(|events| *events >= 100), "{:?}", batches(&recorder));
        let failed = |event: &Recorded| matches!(event, Recorded::BatchFailed { .. } | Recorded::DeadLettered { .. });
        assert!(!recorder.events_of(played()).iter().any(failed), "no 21000, nor anything else");
        assert_eq!(fixture.seen().await, (0..200).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_first_event_has_revision_7_is_accepted_and_goes_on_from_there() {
    let fixture = stage().await;
    fixture.run("INSERT INTO events (stream_id, type, data, revision) VALUES ('a', 'x', '', 7), ('b', 'x', '', 0), ('a', 'x', '', 8)").await;
    let revisions = play(|meta| async move {
        let stream = format!("{} at {:?}", meta.stream_id, meta.revision);
        Ok(Seen { position: meta.position.to_i64()?, stream }.insert().into())
    });
    let scriba = fixture.play(&revisions, options()).await;
    until(&scriba, &played(), 2).await;
    let expected = ["a at Some(7)", "b at Some(0)", "a at Some(8)"];
    assert_eq!(fixture.texts("SELECT stream FROM seen ORDER BY position").await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_an_event_that_fails_structurally_nothing_is_committed_in_its_partition_or_any_other() {
    for good in ["bad", "good"] {
        let fixture = stage().await;
        fixture.append("first", "Statement", b"").await;
        fixture.append("bad", "Statement", b"INSERT INTO missing VALUES (1)").await;
        for _ in 0..501 {
            fixture.append(good, "Statement", b"").await;
        }
        let scriba = fixture.play(&statements(), options().batch_events(10)).await;
        let reason = halted(&scriba, &played()).await;
        assert_eq!((reason.position, reason.class), (Some(Position::new(1)), Some(FailureClass::Structural)));
        let watermark = fixture.watermark().await;
        assert!(watermark < Some(1), "{watermark:?}");
        assert_eq!(fixture.seen().await, (0..watermark.map_or(0, |watermark| watermark + 1)).collect::<Vec<_>>());
        assert_conserved(&scriba);
        fixture.run("CREATE TABLE missing (id bigint)").await;
        scriba.stop(played()).await.unwrap();
        fixture.play_again(&scriba, &statements(), options()).await;
        until(&scriba, &played(), 502).await;
        assert_eq!(fixture.seen().await, (0..503).collect::<Vec<_>>(), "{good}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_over_three_streams_is_progress_of_all_three_at_the_next_start() {
    let fixture = stage().await;
    fixture.append_many(30, 3).await;
    let (play, gate) = behind_the_first(seen);
    let recorder = Recorder::new();
    let scriba = fixture.play_to(&recorder, &play, options()).await;
    gate.add_permits(1);
    until(&scriba, &played(), 29).await;
    scriba.shutdown().await.unwrap();
    play.forget();
    fixture.append_many(3, 3).await;
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 32).await;
    let mut handled = play.handled();
    handled.sort_unstable();
    assert_eq!(handled, [30, 31, 32], "one new event for each");
    assert_eq!(fixture.seen().await, (0..33).collect::<Vec<_>>());
    let ends: BTreeMap<_, _> = [("s0", 30), ("s1", 31), ("s2", 32)].map(|(s, p)| (s.into(), Position::new(p))).into();
    assert_eq!(scriba.info(played()).unwrap().streams, StreamPositions::Known(ends));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_event_at_position_0_is_applied_once_and_the_next_start_goes_on_behind_it() {
    let fixture = stage().await;
    assert_eq!(fixture.append("a", "First", b"").await, 0);
    let play = slow();
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 0).await;
    assert_eq!((fixture.seen().await, fixture.watermark().await), (vec![0], Some(0)));
    scriba.shutdown().await.unwrap();
    fixture.append("a", "Second", b"").await;
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 1).await;
    assert_eq!((fixture.seen().await, play.handled()), (vec![0, 1], vec![0, 1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_refers_to_a_row_of_another_streams_event_that_is_retried_waits_for_it_to_be_visible() {
    const PAIRS: i64 = 25;
    let fixture = stage().await;
    fixture
        .run("CREATE TABLE orders (id bigint PRIMARY KEY); CREATE TABLE payments (id bigint PRIMARY KEY REFERENCES orders)")
        .await;
    for n in 0..PAIRS {
        fixture.append(&format!("order {n}"), "OrderPlaced", b"").await;
        fixture.append(&format!("payment {n}"), "PaymentReceived", b"").await;
    }
    let play = play(|meta| async move {
        let pair = meta.position.to_i64()? / 2;
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..3_000))).await;
        if meta.event_type == "PaymentReceived" {
            return Ok(seen(&meta).and(sql("INSERT INTO payments VALUES ($1)").bind(pair)));
        }
        if pair % 5 == 0 && meta.attempt == 1 {
            return Err(HandlerError::retryable(HandlerError::new("down", "the service is down")));
        }
        Ok(seen(&meta).and(sql("INSERT INTO orders VALUES ($1)").bind(pair)))
    });
    let done = Arc::new(AtomicBool::new(false));
    let reader = tokio::spawn(look(fixture.pool.clone(), done.clone()));
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 2 * PAIRS - 1).await;
    done.store(true, Ordering::Relaxed);
    assert!(reader.await.unwrap() > 0, "the reader has looked");
    assert!(fixture.letters().await.is_empty());
    let count = "SELECT (SELECT count(*) FROM orders) || ' ' || (SELECT count(*) FROM payments)";
    assert_eq!(fixture.texts(count).await, [format!("{PAIRS} {PAIRS}")]);
    let retried: HashSet<i64> = play.calls().iter().filter(|call| call.attempt > 1).map(|call| call.position).collect();
    assert_eq!(retried.len(), 5);
}

/// Looks at read model and checkpoint until it is done: what it sees is a prefix of the log. Answers how often it looked.
async fn look(pool: sqlx::PgPool, done: Arc<AtomicBool>) -> u64 {
    let snapshot = "SELECT (SELECT watermark FROM scriba_checkpoints), (SELECT count(*) FROM orders), (SELECT count(*) FROM payments)";
    let mut looks = 0;
    while !done.load(Ordering::Relaxed) {
        let (watermark, orders, payments): (Option<i64>, i64, i64) =
            sqlx::query_as(snapshot).fetch_one(&pool).await.unwrap();
        let events = watermark.map_or(0, |watermark| watermark + 1);
        assert_eq!((orders, payments), (events - events / 2, events / 2), "at watermark {watermark:?}");
        looks += 1;
    }
    looks
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_delivered_again_while_its_first_copy_is_handled_is_applied_once() {
    let (fixture, source) = (stage().await, MemorySource::new());
    for _ in 0..3 {
        source.append("a", "Happened", "");
    }
    let (play, gate) = behind_the_first(seen);
    let recorder = Recorder::new();
    let scriba = Scriba::with_observers([Arc::new(recorder.clone()) as _]);
    scriba.start(play.clone(), source.clone(), fixture.target.clone(), options()).await.unwrap();
    eventually("all are in the window", || scriba.info(played()).unwrap().window.events == 3).await;
    source.inject(SourceFault::Repeat);
    source.append("b", "Happened", "");
    eventually("it is delivered again", || scriba.info(played()).unwrap().run.deduplicated > 0).await;
    gate.add_permits(1);
    until(&scriba, &played(), 3).await;
    assert_eq!(fixture.seen().await, [0, 1, 2, 3]);
    let mut handled = play.handled();
    handled.sort_unstable();
    assert_eq!(handled, [0, 1, 2, 3], "each once");
    assert_conserved(&scriba);
    let lost = |event: &Recorded| matches!(event, Recorded::OwnershipLost { .. } | Recorded::DeadLettered { .. });
    assert!(!recorder.events_of(played()).iter().any(lost));
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_are_delivered_again_in_other_batches_than_their_first_copies_are_applied_once() {
    for size in [1, 7, 1_000] {
        let fixture = stage().await;
        let faults = Faults { seed: 7, repeat: 0.6, page: Some(9), ..Faults::default() };
        let source = MemorySource::new().faults(faults);
        for n in 0..300 {
            source.append(format!("s{}", n % 11), "Happened", "");
        }
        let recorder = Recorder::new();
        let scriba = Scriba::with_observers([Arc::new(recorder.clone()) as _]);
        scriba.start(slow(), source.clone(), fixture.target.clone(), options().batch_events(size)).await.unwrap();
        until(&scriba, &played(), 299).await;
        assert_eq!(fixture.seen().await, (0..300).collect::<Vec<_>>(), "batches of {size}");
        assert!(scriba.info(played()).unwrap().run.deduplicated > 0, "batches of {size}");
        assert_conserved(&scriba);
        let lost = |event: &Recorded| matches!(event, Recorded::OwnershipLost { .. } | Recorded::DeadLettered { .. });
        assert!(!recorder.events_of(played()).iter().any(lost), "batches of {size}");
        assert_eq!(source.subscriptions(), 1, "batches of {size}: nothing was out of order");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_of_another_stream_that_arrives_late_starts_the_subscription_again_and_drops_nothing() {
    let (fixture, source) = (stage().await, MemorySource::new());
    source.inject(SourceFault::Reorder);
    for n in 0..40 {
        source.append(format!("s{}", n % 4), "Happened", "");
    }
    let scriba = play_from(&fixture, source.clone(), &slow(), options()).await;
    until(&scriba, &played(), 39).await;
    assert_eq!((source.faults_met().reordered, source.subscriptions()), (1, 2));
    assert_eq!(fixture.seen().await, (0..40).collect::<Vec<_>>());
    assert!(fixture.letters().await.is_empty());
    assert_conserved(&scriba);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closure_that_reads_its_own_read_model_sees_every_earlier_event_of_its_stream_and_none_of_later_ones() {
    for size in [1, 5, 1_000] {
        let fixture = stage().await;
        fixture.run("CREATE TABLE history (position bigint PRIMARY KEY, stream text, earlier bigint)").await;
        fixture.append_many(120, 4).await;
        let play = play(|meta| async move {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(0..1_000))).await;
            let (stream, position) = (meta.stream_id.to_string(), meta.position.to_i64()?);
            Ok(custom(move |conn| {
                let stream = stream.clone();
                Box::pin(async move {
                    let count = "SELECT count(*) FROM history WHERE stream = $1";
                    let earlier: i64 = sqlx::query_scalar(count).bind(&stream).fetch_one(&mut *conn).await?;
                    let insert = "INSERT INTO history VALUES ($1, $2, $3)";
                    sqlx::query(insert).bind(position).bind(stream).bind(earlier).execute(conn).await?;
                    Ok::<(), CustomError>(())
                })
            })
            .into())
        });
        let scriba = fixture.play(&play, options().batch_events(size)).await;
        until(&scriba, &played(), 60).await;
        scriba.shutdown().await.unwrap();
        let scriba = fixture.play(&play, options().batch_events(size)).await;
        until(&scriba, &played(), 119).await;
        let wrong = "SELECT position FROM history WHERE earlier <> position / 4";
        assert_eq!(fixture.texts(wrong).await, [] as [&str; 0], "batches of {size}");
        assert_eq!(fixture.texts("SELECT count(*) FROM history").await, ["120"], "batches of {size}");
    }
}

/// Whether each event was handled as a replay, by position.
fn replays(play: &Play) -> BTreeMap<i64, bool> {
    play.calls().into_iter().map(|call| (call.position, call.replay)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_a_replay_below_where_the_version_first_caught_up_and_live_above_whatever_restarts_come_between() {
    let fixture = stage().await;
    fixture.append_many(60, 5).await;
    let play = slow();
    // Reads a few at a time, so that it does not catch up before it has handled most.
    let options = || options().in_flight_events(5);
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 20).await;
    scriba.shutdown().await.unwrap();
    assert_eq!(fixture.texts("SELECT replay_position IS NULL FROM scriba_projections").await, ["true"], "not yet");
    // Appended while nothing runs: the first catching up goes on through them.
    fixture.append_many(20, 5).await;
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 79).await;
    let stored = "SELECT replay_position IS NOT DISTINCT FROM 79 FROM scriba_projections";
    super::common::until_true(&fixture, stored).await;
    scriba.shutdown().await.unwrap();
    fixture.append_many(20, 5).await;
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 99).await;
    // Killed without a word, not stopped.
    drop(scriba);
    assert_eq!(fixture.texts(stored).await, ["true"], "it stays");
    let expected: BTreeMap<i64, bool> = (0..100).map(|position| (position, position < 80)).collect();
    assert_eq!(replays(&play), expected);
    assert_eq!(fixture.seen().await, (0..100).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_thousand_rows_of_five_columns_in_one_batch_meet_no_limit_of_binds() {
    #[derive(Table)]
    #[table(name = "wide")]
    struct Wide {
        #[table(key)]
        id: i64,
        a: i64,
        b: String,
        c: String,
        d: bool,
    }
    const EVENTS: i64 = 10_000;
    let fixture = stage().await;
    fixture.run("CREATE TABLE wide (id bigint PRIMARY KEY, a bigint, b text, c text, d boolean)").await;
    fixture.append_many(EVENTS, 1_000).await;
    let (play, gate) = behind_the_first(|meta| {
        let id = meta.position.to_i64().unwrap();
        let row = |id: i64| Wide { id, a: -id, b: format!("b{id}"), c: format!("c{id}"), d: id % 2 == 0 };
        Outcome::from(PgOp::from(row(id).insert())).and(row(id + EVENTS).insert())
    });
    let recorder = Recorder::new();
    let options =
        options().batch_events(10_000).in_flight_events(20_000).batch_bytes(64 << 20).in_flight_bytes(64 << 20);
    let scriba = fixture.play_to(&recorder, &play, options).await;
    // The others of its stream come behind it.
    eventually("the others are handled", || play.handled().len() == 9_990).await;
    gate.add_permits(1);
    until(&scriba, &played(), EVENTS - 1).await;
    let batch = recorder.events_of(played()).into_iter().find_map(|event| match event {
        Recorded::BatchStop { events, operations, statements, .. } => Some((events, operations, statements)),
        _ => None,
    });
    let (events, operations, statements) = batch.unwrap();
    assert!(events >= 9_000 && operations == 2 * events && statements <= 10, "{events} {operations} {statements}");
    assert_eq!(fixture.texts("SELECT count(*) || ' ' || sum(a) FROM wide").await, ["20000 -199990000"]);
    assert!(fixture.letters().await.is_empty());
}
