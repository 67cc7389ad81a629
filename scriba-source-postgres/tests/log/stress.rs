//! Many writers at once.

use std::time::Duration;

use scriba_core::RecordedEvent;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::bed::{Bed, DEMAND, PATIENCE, Reader};

/// Each writer appends so often, with a random delay between drawing and the end, of which some are rollbacks.
async fn write(bed: &Bed, writers: usize, appends: usize) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for writer in 0..writers {
        let mut session = bed.session().await;
        let mut random = fastrand::Rng::with_seed(writer as u64);
        tasks.spawn(async move {
            for n in 0..appends {
                let event_type = if n % 2 == 0 { "even" } else { "odd" };
                // Some draw before they insert, some burn a number beside.
                let insert = match random.u8(..10) {
                    0 => format!("select nextval('events_position_seq'); select pg_sleep(0.001); insert into events (type, stream_id) values ('{event_type}', '{writer}')"),
                    1 => format!("savepoint s; insert into events default values; rollback to s; insert into events (type, stream_id) values ('{event_type}', '{writer}')"),
                    _ => format!("insert into events (type, stream_id) values ('{event_type}', '{writer}')"),
                };
                session.run(&format!("begin; {insert}")).await;
                if random.u8(..4) == 0 {
                    tokio::time::sleep(Duration::from_micros(random.u64(..3_000))).await;
                }
                session.run(if random.u8(..20) == 0 { "rollback" } else { "commit" }).await;
            }
        });
    }
    tasks
}

fn positions(events: &[RecordedEvent]) -> Vec<u64> {
    events.iter().map(|event| event.position.get()).collect()
}

/// Reads until the writers are done and everything up to the head is seen.
async fn read_all(mut reader: Reader, bed: &Bed, mut done: tokio::sync::watch::Receiver<bool>) -> Reader {
    let started = Instant::now();
    loop {
        let over = *done.borrow_and_update();
        let more = reader.page(DEMAND, Duration::from_millis(300)).await;
        let last = reader.events.last().map(|event| event.position.get()).max(reader.progress);
        if over && !more && last == bed.positions().await.last().copied() {
            return reader;
        }
        assert!(started.elapsed() < 4 * PATIENCE, "stuck at {last:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_appends_of_sixteen_writers_are_each_read_once_in_order_with_and_without_a_filter() {
    let bed = Bed::new().await;
    let (done, watch) = tokio::sync::watch::channel(false);
    let all = read_all(bed.read().await, &bed, watch.clone());
    let odd = read_all(bed.read_types(&["odd"]).await, &bed, watch);
    let writers = async {
        write(&bed, 16, 625).await.join_all().await;
        done.send_replace(true);
    };
    let (all, odd, ()) = tokio::join!(all, odd, writers);
    let written = bed.positions().await;
    assert!((9_000..10_000).contains(&written.len()), "some are rolled back: {}", written.len());
    assert_eq!(positions(&all.events), written);
    let written: Vec<i64> = sqlx::query_scalar("select position from events where type = 'odd' order by position")
        .fetch_all(&bed.pool)
        .await
        .unwrap();
    assert_eq!(positions(&odd.events), written.into_iter().map(i64::cast_unsigned).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_next_dropped_at_random_points_loses_and_repeats_nothing() {
    let bed = Bed::new().await;
    for types in [None, Some(["odd"].as_slice())] {
        let mut writers = write(&bed, 4, 300).await;
        let mut reader = Reader::start(&bed.log().page_size(50), None, types).await.unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        let (mut dropped, mut pages) = (0, 0);
        let mut quiet = 0;
        while quiet < 3 {
            // Within the demand of a single event too, so that most answers are longer than what is taken of them.
            let demand = scriba_core::source::Demand {
                events: 1 + random.usize(..60),
                bytes: if random.bool() { 1 } else { 1 << 20 },
            };
            if reader.page(demand, Duration::from_micros(random.u64(..4_000))).await {
                pages += 1;
            } else {
                dropped += 1;
            }
            if writers.is_empty() {
                quiet += usize::from(!reader.page(DEMAND, Duration::from_millis(400)).await);
            } else {
                while writers.try_join_next().is_some() {}
            }
        }
        let wanted: Vec<i64> =
            sqlx::query_scalar("select position from events where $1 or type = 'odd' order by position")
                .bind(types.is_none())
                .fetch_all(&bed.pool)
                .await
                .unwrap();
        assert_eq!(positions(&reader.events), wanted.into_iter().map(i64::cast_unsigned).collect::<Vec<_>>());
        assert!(dropped > 20 && pages > 20, "{dropped} dropped, {pages} pages: the test shows nothing");
    }
}
