//! Waiting for events: NOTIFY, and polling where there is none.

use std::time::Duration;

use scriba_source_postgres::PgLog;
use tokio::time::{Instant, sleep};

use crate::bed::{APPEND, Bed, Reader, millis};

/// A log that polls so rarely that only NOTIFY can explain a prompt answer.
fn notified(bed: &Bed) -> PgLog {
    bed.log().notify_channel("news").poll_idle(millis(2_000), millis(2_000))
}

/// Reads on until the reader waits, so that its listener is there.
async fn settle(reader: &mut Reader) {
    reader.sees_nothing_for(millis(300)).await;
}

async fn append_and_read(bed: &Bed, reader: &mut Reader) -> Duration {
    let count = reader.events.len() + 1;
    let append = async {
        sleep(millis(20)).await;
        bed.run(APPEND).await;
        Instant::now()
    };
    let (appended, _) = tokio::join!(append, reader.until(count));
    appended.elapsed()
}

#[tokio::test]
async fn a_notification_wakes_a_waiting_reader_with_and_without_a_filter() {
    let bed = Bed::new().await;
    bed.run(&notified(&bed).notify_trigger_sql().unwrap()).await;
    for types in [None, Some(["happened"].as_slice())] {
        let mut reader = Reader::start(&notified(&bed), bed.positions().await.last().copied(), types).await.unwrap();
        settle(&mut reader).await;
        let mut took = Vec::new();
        for _ in 0..9 {
            took.push(append_and_read(&bed, &mut reader).await);
        }
        took.sort();
        assert!(took[4] < millis(100), "without it this takes 2 s: {took:?}");
    }
}

#[tokio::test]
async fn without_a_trigger_events_are_seen_by_polling() {
    let bed = Bed::new().await;
    let mut reader = Reader::start(&bed.log().notify_channel("news"), None, None).await.unwrap();
    settle(&mut reader).await;
    let took = append_and_read(&bed, &mut reader).await;
    assert!(took < millis(600), "{took:?}");
    assert_eq!(bed.log().notify_trigger_sql(), None);
}

#[tokio::test]
async fn a_killed_listener_costs_no_more_than_a_poll_interval_and_listens_again() {
    let bed = Bed::new().await;
    let log = notified(&bed).poll_idle(millis(10), millis(250));
    bed.run(&log.notify_trigger_sql().unwrap()).await;
    let mut reader = Reader::start(&log, None, None).await.unwrap();
    settle(&mut reader).await;
    let kill = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name = 'scriba reader v1 listener'";
    for _ in 0..5 {
        bed.run(kill).await;
        let took = append_and_read(&bed, &mut reader).await;
        assert!(took < millis(500), "{took:?}");
    }
    let mut reader = Reader::start(&notified(&bed), Some(5), None).await.unwrap();
    settle(&mut reader).await;
    bed.run(kill).await;
    settle(&mut reader).await;
    let took = append_and_read(&bed, &mut reader).await;
    assert!(took < millis(500), "it does not listen again: {took:?}");
}

#[tokio::test]
async fn a_listener_that_cannot_connect_is_no_failure() {
    let bed = Bed::new().await;
    let role = format!("one_{}", bed.database.name());
    bed.run(&format!("create role \"{role}\" login connection limit 1; grant select on events to \"{role}\"")).await;
    let options = bed.database.connect_options().username(&role);
    let log = PgLog::new(sqlx::PgPool::connect_lazy_with(options), "events").notify_channel("news");
    let mut reader = Reader::start(&log, None, None).await.unwrap();
    settle(&mut reader).await;
    let took = append_and_read(&bed, &mut reader).await;
    assert!(took < millis(600), "{took:?}");
    drop(reader);
    sleep(millis(200)).await;
    bed.run(&format!("drop owned by \"{role}\"; drop role \"{role}\"")).await;
}

#[tokio::test]
async fn a_dropped_subscription_leaves_no_connection_behind() {
    let bed = Bed::new().await;
    let mut reader = Reader::start(&notified(&bed), None, None).await.unwrap();
    settle(&mut reader).await;
    let connections = || async {
        sqlx::query_scalar::<_, i64>("select count(*) from pg_stat_activity where datname = current_database() and application_name like 'scriba reader%'")
            .fetch_one(&bed.pool)
            .await
            .unwrap()
    };
    assert_eq!(connections().await, 2);
    drop(reader);
    let started = Instant::now();
    while connections().await > 0 {
        assert!(started.elapsed() < Duration::from_secs(5), "{} are left", connections().await);
        sleep(millis(20)).await;
    }
}
