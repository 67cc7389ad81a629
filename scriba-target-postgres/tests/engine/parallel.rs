//! Several partitions at once, and what happens to the others when one of them fails or dies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use scriba_core::{HandlerError, Lease, Position, Retry, Scriba};
use scriba_target_postgres::{OnConflict, Table};

use super::common::{assert_conserved, eventually, options, play, played, seen, slow, stage, until};

/// How many events of a stream were applied, however often.
#[derive(Table)]
#[table(name = "counters")]
struct Counter {
    #[table(key)]
    stream: String,
    events: i64,
}

const COUNTERS: &str = "CREATE TABLE counters (stream text PRIMARY KEY, events bigint NOT NULL)";

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_fails_and_begins_anew_leaves_the_others_effects_exactly_once() {
    let fixture = stage().await;
    fixture.run(COUNTERS).await;
    fixture.append_many(400, 8).await;
    // No key that would notice a second time.
    let play = play(|meta| async move {
        let stream = meta.stream_id.to_string();
        tokio::time::sleep(Duration::from_micros(meta.position.get() * 7_919 % 1_000)).await;
        if stream == "s3" && meta.attempt <= 2 {
            return Err(HandlerError::new("down", "as told"));
        }
        Ok(Counter { stream, events: 1 }.upsert(OnConflict::adding(Counter::EVENTS)).into())
    });
    let options = options().retry(Retry::new(3, [Duration::from_millis(1); 2])).batch_events(10);
    let scriba = fixture.play(&play, options).await;
    // The pipeline loses its session now and then, too, and all partitions begin anew.
    let mut last = Position::new(0);
    while last < Position::new(350) {
        let committed =
            || scriba.info(played()).unwrap().watermark.is_some_and(|watermark| watermark.get() >= last.get() + 60);
        eventually("it gets on", committed).await;
        last = scriba.info(played()).unwrap().watermark.unwrap();
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE datname = current_database() AND application_name LIKE 'scriba play%'";
        fixture.run(end).await;
        if last >= Position::new(330) {
            break;
        }
    }
    until(&scriba, &played(), 399).await;
    let counted = fixture.texts("SELECT stream || ' ' || events FROM counters ORDER BY stream").await;
    let expected: Vec<String> = (0..8).map(|n| format!("s{n} 50")).collect();
    assert_eq!(counted, expected);
    assert!(fixture.letters().await.is_empty());
    let info = scriba.info(played()).unwrap();
    assert_eq!((info.run.applied, info.stored.applied), (400, 400));
    assert!(info.run.thrown_away > 0, "events were in flight");
    assert_conserved(&scriba);
}

#[tokio::test(flavor = "multi_thread")]
async fn parallelism_of_4_then_8_then_3_over_restarts_with_events_in_flight_loses_and_doubles_nothing() {
    let fixture = stage().await;
    fixture.append_many(900, 23).await;
    let play = slow();
    // Without a lease, since one that is killed without a word leaves it behind for a while.
    let options = |parallelism| options().parallelism(parallelism).batch_events(20).lease(Lease::Off);
    let scriba = fixture.play(&play, options(4)).await;
    reaches(&scriba, 150).await;
    scriba.shutdown().await.unwrap();
    assert_conserved(&scriba);
    assert!(fixture.watermark().await < Some(899), "it was stopped on its way");
    assert_streams_in_order(&play.calls());
    play.forget();

    let scriba = fixture.play(&play, options(8)).await;
    reaches(&scriba, 350).await;
    // Dropped in the middle of it, as by a crash; whatever its last commit is, the next owner sees it or fences it off.
    drop(scriba);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(fixture.watermark().await < Some(899), "it was killed on its way");
    assert_streams_in_order(&play.calls());
    let play = slow();

    let scriba = fixture.play(&play, options(3)).await;
    reaches(&scriba, 899).await;
    assert_streams_in_order(&play.calls());
    assert_eq!(fixture.seen().await, (0..900).collect::<Vec<_>>());
    assert!(fixture.letters().await.is_empty());
    let info = scriba.info(played()).unwrap();
    assert_eq!((info.stored.applied, info.stored.skipped, info.stored.dead_lettered), (900, 0, 0));
    assert_conserved(&scriba);
}

/// Waits until this node has committed a position.
async fn reaches(scriba: &Scriba, position: u64) {
    let reached = || scriba.info(played()).unwrap().watermark >= Some(Position::new(position));
    eventually("it gets there", reached).await;
}

/// In one life, each stream's events one after another.
fn assert_streams_in_order(calls: &[super::common::Call]) {
    let mut last = BTreeMap::new();
    for call in calls {
        let before = last.insert(&call.stream, call.position);
        assert!(before.is_none_or(|before| before < call.position), "{call:?} after {before:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_waits_for_its_event_whose_handler_died_and_nobody_else_handles_it_meanwhile() {
    let fixture = stage().await;
    fixture.append("dies", "Happened", b"").await;
    fixture.append("dies", "Happened", b"").await;
    for n in 0..20 {
        fixture.append(&format!("other {n}"), "Happened", b"").await;
    }
    let (at_once, mended) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (running, may_live) = (at_once.clone(), mended.clone());
    let play = play(move |meta| {
        let (running, may_live) = (running.clone(), may_live.clone());
        async move {
            if meta.stream_id == "dies" {
                assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                tokio::time::sleep(Duration::from_millis(5)).await;
                running.fetch_sub(1, Ordering::SeqCst);
                let dies = meta.position == Position::new(0) && (meta.attempt == 1 || !may_live.load(Ordering::SeqCst));
                assert!(!dies, "as told");
            }
            Ok(seen(&meta))
        }
    });
    let waits = Retry::new(2_000, vec![Duration::from_millis(10); 1_999]);
    let scriba = fixture.play(&play, options().retry(waits)).await;
    eventually("the others are handled", || play.handled().len() == 20).await;
    assert!(play.handled().iter().all(|position| *position > 1), "none of its stream");
    assert_eq!(fixture.watermark().await, None, "and nothing passes it");
    mended.store(true, Ordering::SeqCst);
    until(&scriba, &played(), 21).await;
    // A call that panics does not come to its end.
    let dies: Vec<_> = play.calls().into_iter().filter(|call| call.stream == "dies").collect();
    assert_eq!(dies.iter().map(|call| call.position).collect::<Vec<_>>(), [0, 1]);
    assert!(dies[0].attempt > 1 && dies[1].attempt == 1, "{dies:?}");
    assert_eq!(fixture.seen().await, (0..22).collect::<Vec<_>>());
}
