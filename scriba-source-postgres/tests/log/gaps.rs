//! Interleavings of appends: nothing lost, and nothing waited for but an append that may own a lower position.

use std::time::Duration;

use scriba_source_postgres::PgLog;
use scriba_testing::postgres::{Postgres, PostgresOptions};
use sqlx::query_as;

use crate::bed::{APPEND, Bed, Reader, millis};

const BEGIN: &str = "begin; insert into events default values";

#[tokio::test]
async fn an_open_append_holds_what_committed_after_it_and_then_comes_first() {
    let bed = Bed::new().await;
    let (mut t, mut v) = (bed.session().await, bed.session().await);
    t.run(BEGIN).await;
    bed.run(APPEND).await;
    let mut reader = bed.read().await;
    reader.sees_nothing_for(millis(60)).await;
    v.run(BEGIN).await;
    t.run("commit").await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [1, 2]);
    v.run("commit").await;
    reader.until(3).await;
    assert_eq!(reader.positions(), [1, 2, 3]);
    assert!(reader.passed().is_empty());
}

#[tokio::test]
async fn several_appends_behind_an_open_one_wait_for_it() {
    let bed = Bed::new().await;
    for _ in 1..=8 {
        bed.run(APPEND).await;
    }
    let mut reader = bed.read().await;
    reader.until(8).await;
    let mut a = bed.session().await;
    a.run(BEGIN).await;
    for _ in 10..=12 {
        bed.run(APPEND).await;
    }
    reader.sees_nothing_for(millis(300)).await;
    a.run("commit").await;
    reader.until(12).await;
    assert_eq!(reader.positions(), (1..=12).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_rolled_back_append_is_passed_within_milliseconds_while_another_stays_open() {
    let bed = Bed::new().await;
    let mut reader = bed.read().await;
    reader.sees_nothing_for(millis(5)).await;
    let (mut t, mut v) = (bed.session().await, bed.session().await);
    t.run(BEGIN).await;
    bed.run(APPEND).await;
    reader.sees_nothing_for(millis(40)).await;
    v.run(BEGIN).await;
    reader.sees_nothing_for(millis(200)).await;
    t.run("rollback").await;
    let took = reader.until(1).await;
    assert!(took < millis(150), "one poll interval is 100 ms at most, it took {took:?}");
    assert_eq!(reader.positions(), [2]);
    assert_eq!(reader.passed(), [(1, 1)]);
    let age = reader.reports.passed.lock().unwrap()[0].2;
    assert!(age >= millis(200), "held for {age:?}");
    v.run("rollback").await;
}

#[tokio::test]
async fn two_gaps_at_once_are_both_passed() {
    let bed = Bed::new().await;
    let mut burnt = bed.session().await;
    for _ in 0..2 {
        burnt.run("begin; insert into events default values; insert into events default values; rollback").await;
        bed.run(APPEND).await;
    }
    let mut reader = bed.read().await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [3, 6]);
    assert_eq!(reader.passed(), [(1, 2), (4, 5)]);
    assert!(reader.reports.detected.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_number_drawn_before_the_insert_is_waited_for() {
    let bed = Bed::new().await;
    let mut t = bed.session().await;
    t.run("begin; select nextval('events_position_seq')").await;
    bed.run(APPEND).await;
    let mut reader = bed.read().await;
    reader.sees_nothing_for(millis(60)).await;
    t.run("insert into events (position) values (1); commit").await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [1, 2]);
}

#[tokio::test]
async fn a_number_of_a_rolled_back_savepoint_used_by_the_outer_transaction_is_waited_for() {
    let bed = Bed::new().await;
    let mut t = bed.session().await;
    t.run("begin; savepoint s; insert into events default values; rollback to s").await;
    bed.run(APPEND).await;
    let mut reader = bed.read().await;
    reader.sees_nothing_for(millis(60)).await;
    t.run("insert into events (position) values (1); commit").await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [1, 2]);
}

#[tokio::test]
async fn a_rolled_back_savepoint_leaves_a_gap_that_is_passed_when_its_transaction_ends() {
    let bed = Bed::new().await;
    let mut t = bed.session().await;
    t.run("begin; savepoint s; insert into events default values; rollback to s; insert into events default values")
        .await;
    bed.run(APPEND).await;
    let mut reader = bed.read().await;
    reader.sees_nothing_for(millis(60)).await;
    t.run("commit").await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [2, 3]);
    assert_eq!(reader.passed(), [(1, 1)]);
}

#[tokio::test]
async fn an_open_update_of_the_log_holds_nothing() {
    let bed = Bed::new().await;
    bed.run(APPEND).await;
    bed.run("begin; insert into events default values; rollback").await;
    let mut update = bed.session().await;
    update.run("begin; update events set data = '[]'; select from events for update").await;
    bed.run(APPEND).await;
    let mut reader = bed.read().await;
    assert!(reader.until(2).await < millis(500));
    assert_eq!(reader.positions(), [1, 3]);
    update.run("rollback").await;
}

#[tokio::test]
async fn idling_and_wrong_clocks_make_no_slow_append_skipped() {
    let bed = Bed::new().await;
    bed.run("alter table events add recorded_at timestamptz").await;
    bed.run("insert into events (recorded_at) values (now() + interval '1 hour')").await;
    let log = bed.log().occurred_at_column("recorded_at");
    let mut reader = Reader::start(&log, None, None).await.unwrap();
    reader.until(1).await;
    reader.sees_nothing_for(millis(1_000)).await;
    let mut slow = bed.session().await;
    slow.run("begin; insert into events (recorded_at) values (now() - interval '1 hour')").await;
    bed.run("insert into events (recorded_at) values (now() + interval '1 hour')").await;
    reader.sees_nothing_for(millis(1_500)).await;
    slow.run("commit").await;
    reader.until(3).await;
    assert_eq!(reader.positions(), [1, 2, 3]);
}

#[tokio::test]
async fn a_writer_idle_in_its_transaction_is_waited_for_and_reported_once_by_name() {
    let bed = Bed::new().await;
    let mut reader = bed.read().await;
    reader.sees_nothing_for(millis(5)).await;
    let mut idle = bed.session().await;
    idle.run(BEGIN).await;
    let pid = idle.pid().await;
    bed.run(APPEND).await;
    reader.sees_nothing_for(millis(3_000)).await;
    {
        let detected = reader.reports.detected.lock().unwrap();
        let [(1, 2, blocker)] = detected.as_slice() else { panic!("{detected:?}") };
        for part in
            [&format!("pid {pid} app=appender user=postgres"), "idle in transaction, open ", "pg_terminate_backend"]
        {
            assert!(blocker.contains(part), "{part:?} is not in {blocker:?}");
        }
    }
    idle.run("commit").await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [1, 2]);
}

#[tokio::test]
async fn prepared_transactions_are_waited_for_also_behind_their_session_and_a_restart_of_the_server() {
    let server = Postgres::start(PostgresOptions::default().setting("max_prepared_transactions", "5")).await.unwrap();
    let bed = Bed::on(&server, crate::bed::TABLE).await;
    let mut t = bed.session().await;
    t.run("begin; insert into events default values; prepare transaction 'two'' phases'").await;
    bed.run(APPEND).await;
    let mut reader = bed.read().await;
    reader.sees_nothing_for(millis(60)).await;
    drop(t);
    reader.sees_nothing_for(millis(1_500)).await;
    let blocker = reader.reports.detected.lock().unwrap()[0].2.clone();
    assert!(blocker.contains("ROLLBACK PREPARED 'two'' phases'"), "{blocker}");

    server.restart().await.unwrap();
    let lost = reader.subscription.next(crate::bed::DEMAND).await;
    assert!(matches!(lost, Err(scriba_core::source::SourceError::Unavailable { .. })), "{lost:?}");
    let mut reader = bed.read().await;
    reader.sees_nothing_for(millis(60)).await;
    bed.session().await.run("commit prepared 'two'' phases'").await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [1, 2]);
}

#[tokio::test]
async fn with_a_filter_open_appends_are_waited_for_and_dead_numbers_are_progress() {
    let bed = Bed::new().await;
    let mut reader = bed.read_types(&["happened"]).await;
    let (mut t, mut v) = (bed.session().await, bed.session().await);
    t.run(BEGIN).await;
    bed.run(APPEND).await;
    bed.run("insert into events (type) values ('other')").await;
    reader.sees_nothing_for(millis(60)).await;
    v.run(BEGIN).await;
    reader.sees_nothing_for(millis(60)).await;
    t.run("commit").await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [1, 2]);
    v.run("rollback").await;
    reader.until_progress(3).await;
    bed.run("insert into events (type) values ('other')").await;
    reader.until_progress(5).await;
    assert_eq!(reader.positions(), [1, 2]);
}

#[tokio::test]
async fn with_a_filter_a_writer_idle_in_its_transaction_is_reported_too() {
    let bed = Bed::new().await;
    let mut reader = bed.read_types(&["happened"]).await;
    reader.sees_nothing_for(millis(5)).await;
    let mut idle = bed.session().await;
    idle.run(BEGIN).await;
    let pid = idle.pid().await;
    bed.run(APPEND).await;
    reader.sees_nothing_for(millis(1_500)).await;
    let detected = reader.reports.detected.lock().unwrap().clone();
    assert!(
        matches!(detected.as_slice(), [(1, 2, blocker)] if blocker.contains(&format!("pid {pid} "))),
        "{detected:?}"
    );
    idle.run("rollback").await;
}

/// What the source must not do, on the same server: had it gathered its evidence and looked in one statement, it would have
/// found the gap without an owner, and lost the event that committed between the two.
#[tokio::test]
async fn evidence_and_look_in_one_statement_would_lose_an_event() {
    let bed = Bed::new().await;
    let mut t = bed.session().await;
    t.run(BEGIN).await;
    bed.run(APPEND).await;
    let pool = bed.pool.clone();
    let one_statement = tokio::spawn(async move {
        query_as::<_, (Vec<i64>, i64)>(
            "select (select array_agg(position) from events), (select count(*) from pg_sleep(0.5), lateral (
                 select from pg_locks where relation = 'events_position_seq'::regclass and mode = 'RowExclusiveLock' offset 0) held)",
        )
        .fetch_one(&pool)
        .await
        .unwrap()
    });
    tokio::time::sleep(millis(200)).await;
    t.run("commit").await;
    assert_eq!(one_statement.await.unwrap(), (vec![2], 0), "1 is not shown, and nobody seems to own it");
    let mut reader = bed.read().await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [1, 2]);
}

#[tokio::test]
async fn an_ordinary_role_sees_open_appends_of_others() {
    let bed = Bed::new().await;
    let role = format!("reader_{}", bed.database.name());
    bed.run(&format!("create role \"{role}\" login; grant select on events to \"{role}\"")).await;
    let options = bed.database.connect_options().username(&role);
    let log = PgLog::new(sqlx::PgPool::connect_lazy_with(options), "events");
    scriba_core::Source::check(&log).await.unwrap();
    assert_eq!(
        scriba_core::Source::identity(&log).await.unwrap(),
        scriba_core::Source::identity(&bed.log()).await.unwrap()
    );
    let mut t = bed.session().await;
    t.run(BEGIN).await;
    bed.run(APPEND).await;
    let mut reader = Reader::start(&log, None, None).await.unwrap();
    reader.sees_nothing_for(millis(1_300)).await;
    let blocker = reader.reports.detected.lock().unwrap()[0].2.clone();
    assert!(blocker.contains("app=appender user=postgres") && blocker.contains("pg_read_all_stats"), "{blocker}");
    t.run("commit").await;
    assert!(reader.until(2).await < Duration::from_secs(1));
    assert_eq!(reader.positions(), [1, 2]);
    drop(reader);
    bed.run(&format!("drop owned by \"{role}\"; drop role \"{role}\"")).await;
}
