//! Stores and tables that are not what they were, ways to read one store, and what a projection says of itself meanwhile.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

#[path = "nodes/stage.rs"]
mod stage;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use scriba_core::{
    EventMeta, Events, Handler, HandlerResult, Lease, Position, Projection, ProjectionOptions, RawEvent, Reset, Role,
    Scriba, Source, State,
};
use scriba_source_eventstore::{CatchUpSource, EventStore, PersistentSource};
use scriba_target_postgres::{PgOp, PgTarget};
use scriba_testing::MemorySource;
use scriba_testing::eventstore::NewEvent;
use sqlx::PgPool;
use stage::{CATEGORY, LEDGER, Ledger, Log, Model, STREAM, Way, applied, eventually, halted, millis, options, start};
use tokio::time::{Instant, sleep};

const PATIENCE: Duration = Duration::from_secs(20);

/// Runs a test with each of these at the same time.
async fn with_each<T>(cases: impl IntoIterator<Item = T>, test: impl AsyncFn(T)) {
    join_all(cases.into_iter().map(|case| test(case))).await;
}

/// Whether tables are wiped, or put back from a copy.
fn wiped_or_restored(ways: &[Way]) -> Vec<(Way, bool)> {
    ways.iter().flat_map(|way| [(*way, true), (*way, false)]).collect()
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

/// Runs until everything up to a position is applied.
async fn run_to(position: u64, log: &Log, model: &Model, way: Way) {
    let scriba = start(way.source(&log.store()), model).await;
    model.until(position, PATIENCE).await;
    scriba.shutdown().await.unwrap();
}

/// A store of ten events, all of which are applied, and where the last one stands.
async fn ten_applied(way: Way) -> (Log, Model, u64) {
    let (log, model) = (Log::new(), Model::new().await);
    let last = log.append_many(way, 10);
    run_to(last, &log, &model, way).await;
    (log, model, last)
}

/// Starts on a source; it has to halt with nothing done. Says why, and where.
async fn refusal(source: Arc<dyn Source>, model: &Model) -> (String, Option<Position>) {
    let before = (model.watermark().await, model.commits().await);
    let scriba = start(source, model).await;
    let reason = halted(&scriba, LEDGER).await;
    scriba.shutdown().await.unwrap();
    assert_eq!((model.watermark().await, model.commits().await), before);
    reason
}

/// Case G1.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_was_restored_to_an_older_point_halts_at_the_next_start_before_and_after_it_is_written_to() {
    with_each(Way::EVERY, async |way| {
        let (_, model, last) = ten_applied(way).await;
        let restored = Log::new();
        let head = restored.append_many(way, 6);
        let (message, position) = refusal(way.source(&restored.store()), &model).await;
        assert_says(&message, &["restored to an older state", &format!("the head of the source is at {head} now")]);
        assert_eq!(position, Some(Position::new(last)), "{way:?}");
        // Other events stand where those that were seen stood.
        restored.append_many(way, 6);
        let (message, position) = refusal(way.source(&restored.store()), &model).await;
        assert_says(&message, &["restored to an older state and written to since", "stands at its position"]);
        assert_eq!(position, Some(Position::new(last)), "{way:?}");
    })
    .await;
}

/// Case G1.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_whose_last_event_is_gone_halts_and_one_whose_old_events_are_gone_goes_on() {
    with_each(Way::EVERY, async |way| {
        let (log, model, _) = ten_applied(way).await;
        let last = log.append("account-1", "Happened");
        run_to(log.read(way).last().unwrap().0.try_into().unwrap(), &log, &model, way).await;
        assert!(log.double.remove_event(&last.stream, last.revision));
        assert!(log.double.remove_event("$ce-account", last.link));
        let (message, _) = refusal(way.source(&log.store()), &model).await;
        assert_says(&message, &["restored to an older state"]);

        let (log, model, last) = ten_applied(way).await;
        for number in 0..5 {
            log.double.truncate_stream(&format!("account-{number}"), 1);
        }
        log.double.truncate_stream("$ce-account", 8);
        log.double.scavenge();
        log.append_many(way, 3);
        let events = log.read(way);
        run_to(events.last().unwrap().0.try_into().unwrap(), &log, &model, way).await;
        model.assert_shows(&events).await;
        assert!(model.watermark().await > Some(last), "{way:?}");
    })
    .await;
}

/// Case G1.
#[tokio::test(flavor = "multi_thread")]
async fn another_store_another_part_of_it_and_another_kind_of_source_halt_with_both_fingerprints() {
    let memory = MemorySource::new();
    memory.append("account-1", "Happened", "{}");
    with_each(Way::EVERY, async |way| {
        let (log, model, _) = ten_applied(way).await;
        let own = way.source(&log.store()).identity().await.unwrap();
        let elsewhere = Log::new();
        elsewhere.append_many(way, 12);
        let another_part = if way == Way::All { Way::Stream } else { Way::All };
        let others: [Arc<dyn Source>; 4] = [
            way.source(&elsewhere.store().store_name("elsewhere")),
            // By its address.
            way.source(&EventStore::new(log.double.connection_string()).unwrap()),
            another_part.source(&log.store()),
            Arc::new(memory.clone()),
        ];
        for other in others {
            let identity = other.identity().await.unwrap();
            assert_ne!(own, identity);
            let (message, _) = refusal(other, &model).await;
            for identity in [&own, &identity] {
                assert_says(&message, &[&format!("{} {:?}", identity.kind, identity.fingerprint)]);
            }
        }
        run_to(log.append_many(way, 3), &log, &model, way).await;
        model.assert_shows(&log.read(way)).await;
    })
    .await;
}

/// Tables behind what was done: wiped, or put back from a copy of before; and the first and last revision that they miss.
async fn behind_their_group(way: Way, wiped: bool) -> (Log, Model, u64, u64) {
    let (log, model, last) = ten_applied(way).await;
    if wiped {
        model.run("TRUNCATE commits, counts, scriba_checkpoints, scriba_projections").await;
        return (log, model, 0, last);
    }
    model.copy("backup").await;
    let beyond = log.append_many(way, 5);
    run_to(beyond, &log, &model, way).await;
    model.restore("backup").await;
    (log, model, last + 1, beyond)
}

/// Case G2.
#[tokio::test(flavor = "multi_thread")]
async fn tables_that_were_wiped_or_restored_while_the_group_lived_on_halt_with_the_hole_and_a_reset_mends_it() {
    with_each(wiped_or_restored(&[Way::PersistentStream, Way::PersistentCategory]), async |(way, wiped)| {
        let (log, model, first, last) = behind_their_group(way, wiped).await;
        let before = model.commits().await;
        let scriba = start(way.source(&log.store()), &model).await;
        log.append_many(way, 1);
        let (message, _) = halted(&scriba, LEDGER).await;
        let hole = format!("there are events at revisions {first} to {last}");
        assert_says(&message, &[&hole, "tables were wiped or restored", "reset the projection"]);
        assert_eq!(model.commits().await, before, "{way:?}");

        scriba.stop(LEDGER).await.unwrap();
        scriba.reset(LEDGER, Reset::new().statement("TRUNCATE commits, counts")).await.unwrap();
        scriba.shutdown().await.unwrap();
        let events = log.read(way);
        run_to(events.last().unwrap().0.try_into().unwrap(), &log, &model, way).await;
        model.assert_shows(&events).await;
    })
    .await;
}

/// Case G2.
#[tokio::test(flavor = "multi_thread")]
async fn tables_that_were_wiped_or_restored_go_on_where_the_events_between_were_truncated() {
    with_each(wiped_or_restored(&[Way::PersistentStream, Way::PersistentCategory]), async |(way, wiped)| {
        let (log, model, first, last) = behind_their_group(way, wiped).await;
        let stream = if way == Way::PersistentStream { STREAM } else { "$ce-account" };
        log.double.truncate_stream(stream, last + 1);
        let appended = log.append_many(way, 2);
        run_to(appended, &log, &model, way).await;
        let mut events = log.read(way);
        let gone = i64::try_from(first).unwrap()..=i64::try_from(last).unwrap();
        events.retain(|(position, ..)| !gone.contains(position));
        model.assert_shows(&events).await;
    })
    .await;
}

/// Case G2: there is nothing but the tables that could be ahead.
#[tokio::test(flavor = "multi_thread")]
async fn by_catch_up_subscriptions_tables_that_were_wiped_or_restored_are_filled_again() {
    with_each(wiped_or_restored(&[Way::Stream, Way::Category, Way::All]), async |(way, wiped)| {
        let (log, model, ..) = behind_their_group(way, wiped).await;
        run_to(log.append_many(way, 1), &log, &model, way).await;
        model.assert_shows(&log.read(way)).await;
    })
    .await;
}

/// Runs until so many events more are applied, and is gone at once.
fn run_and_vanish(way: Way, connection: &str, database: &str, events: i64) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let scriba = runtime.block_on(async {
        let pool = PgPool::connect(database).await.unwrap();
        let source = way.source(&EventStore::new(connection).unwrap().store_name("bank"));
        let scriba = Scriba::new();
        let options = options(Lease::Off).batch_events(3);
        scriba.start(Ledger, source, PgTarget::new(pool.clone()), options).await.expect("it starts");
        let commits = async || -> i64 {
            sqlx::query_scalar("SELECT coalesce(max(n), 0) FROM commits").fetch_one(&pool).await.unwrap()
        };
        let wanted = commits().await + events;
        eventually("it gets on", async || commits().await >= wanted).await;
        scriba
    });
    runtime.shutdown_background();
    drop(scriba);
}

async fn vanish_and_resume(way: Way) {
    let (log, model) = (Log::new(), Model::new().await);
    let last = log.append_many(way, 400);
    for events in [1, 5, 2, 9] {
        let (connection, database) = (log.double.connection_string(), model.database.url());
        let vanishing = move || run_and_vanish(way, &connection, &database, events);
        tokio::task::spawn_blocking(vanishing).await.unwrap();
    }
    assert!(model.watermark().await < Some(last), "{way:?}: it did not vanish in the middle");
    run_to(log.append_many(way, 5), &log, &model, way).await;
    model.assert_shows(&log.read(way)).await;
}

/// Case A13.
#[tokio::test(flavor = "multi_thread")]
async fn a_projection_that_vanishes_again_and_again_resumes_exactly_by_stream_category_and_the_whole_log() {
    with_each(Way::EVERY, vanish_and_resume).await;
}

/// Case A13.
#[tokio::test(flavor = "multi_thread")]
async fn an_explicit_transaction_halts_the_whole_log_with_its_positions_and_is_read_by_streams_and_categories() {
    with_each(Way::EVERY, async |way| {
        let (log, model) = (Log::new(), Model::new().await);
        let last = log.append_many(way, 3);
        let scriba = start(way.source(&log.store()), &model).await;
        model.until(last, PATIENCE).await;
        let pair = [(); 2].map(|()| NewEvent::json("Happened", "{}"));
        let named = format!("event {} has commit position", pair[0].id);
        let written = log.double.append_transaction(STREAM, pair).position.unwrap();
        if way != Way::All {
            model.until(4, PATIENCE).await;
            scriba.shutdown().await.unwrap();
            let positions: Vec<i64> = model.commits().await.into_iter().map(|(position, ..)| position).collect();
            assert_eq!(positions, [0, 1, 2, 3, 4], "{way:?}");
            return;
        }
        let says =
            [&format!("{named} {}", written.commit), "explicit transaction", "project the streams or categories"];
        assert_says(&halted(&scriba, LEDGER).await.0, &says);
        scriba.shutdown().await.unwrap();
        // At the head, it is seen before anything begins.
        let scriba = Scriba::new();
        let started = scriba.start(Ledger, way.source(&log.store()), model.target.clone(), options(Lease::Off)).await;
        assert_says(&started.unwrap_err().to_string(), &["explicit transaction"]);
        log.double.append(STREAM, [NewEvent::json("Happened", "{}")]);
        let (message, _) = refusal(way.source(&log.store()), &model).await;
        assert_says(&message, &says);
        let watermark = model.watermark().await.unwrap();
        assert!((last..written.commit).contains(&watermark), "what came before is applied: {watermark}");
        model.assert_shows(&log.read(way)).await;
    })
    .await;
}

/// Like [`Ledger`], under another name.
#[derive(Projection)]
#[projection(name = "second")]
struct Second;

impl Handler for Second {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, _: RawEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        applied(meta)
    }
}

/// Case A14.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_projections_with_one_group_the_second_is_seen_to_stand_by_and_halts_with_the_hole_when_the_first_stops()
{
    let (log, model) = (Log::new(), Model::new().await);
    let store = log.store();
    let source = || PersistentSource::category(&store, CATEGORY).group("shared");
    let scriba = Scriba::new();
    let options = || -> ProjectionOptions { options(Lease::For(Duration::from_secs(30))) };
    scriba.start(Ledger, source(), model.target.clone(), options()).await.unwrap();
    model.until(log.append_many(Way::Category, 5), PATIENCE).await;

    scriba.start(Second, source(), model.target.clone(), options()).await.unwrap();
    let second = || scriba.info("second").unwrap();
    eventually("it stands by", async || {
        assert!(!second().is_ready());
        second().role == Role::Standby
    })
    .await;
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        let info = second();
        assert_eq!((info.state, info.role, info.is_ready()), (State::Running, Role::Standby, false));
        assert_says(info.holder.as_deref().unwrap(), &["another subscriber of group shared on stream $ce-account"]);
        log.append_many(Way::Category, 1);
        sleep(millis(50)).await;
    }
    let first = scriba.info(LEDGER).unwrap();
    assert!(first.is_ready(), "{first:#?}");

    let events = log.read(Way::Category);
    let last = events.last().unwrap().0;
    eventually("the first has done everything", async || model.commits().await.len() == events.len()).await;
    scriba.stop(LEDGER).await.unwrap();
    eventually("the second is let in", async || second().role != Role::Standby).await;
    log.append_many(Way::Category, 1);
    let (message, _) = halted(&scriba, "second").await;
    assert_says(&message, &["group shared", &format!("there are events at revisions 0 to {last}")]);
    assert_eq!(model.commits().await, events, "the second has done nothing");
    scriba.shutdown().await.unwrap();
}

#[derive(Events)]
enum OnlyOpened {
    Opened,
}

#[derive(Projection)]
#[projection(name = "opened")]
struct OpenedOnly;

impl Handler for OpenedOnly {
    type Event = OnlyOpened;
    type Op = PgOp;

    async fn handle(&self, OnlyOpened::Opened: OnlyOpened, meta: &EventMeta) -> HandlerResult<PgOp> {
        applied(meta)
    }
}

/// Case F6.
#[tokio::test(flavor = "multi_thread")]
async fn a_projection_of_few_types_of_the_whole_log_has_no_lag_while_events_of_other_types_are_appended() {
    let (log, model) = (Log::new(), Model::new().await);
    let append = |event_type: &str| {
        let written = log.double.append("account-1", [NewEvent::json(event_type, "null")]);
        Position::new(written.position.unwrap().commit)
    };
    append("Other");
    let first = append("Opened");
    let scriba = Scriba::new();
    let source = CatchUpSource::all(&log.store());
    scriba.start(OpenedOnly, source, model.target.clone(), options(Lease::Off)).await.unwrap();
    let info = || scriba.info("opened").unwrap();
    let has_no_lag = || (info().lag_events, info().lag_time) == (Some(0), Some(Duration::ZERO));
    eventually("it has caught up", async || info().watermark >= Some(first) && has_no_lag()).await;

    for round in 0..3 {
        let mut last = append("Other");
        let until = Instant::now() + millis(700);
        while Instant::now() < until {
            last = append("Other");
            sleep(millis(20)).await;
        }
        let started = Instant::now();
        eventually("the watermark moves over them", async || info().watermark >= Some(last)).await;
        eventually("it has no lag", async || info().head == Some(last) && has_no_lag()).await;
        assert!(started.elapsed() < Duration::from_secs(3), "round {round}: {:?}", started.elapsed());
        assert!(info().is_ready());
    }
    let opened = append("Opened");
    eventually("it goes on", async || info().watermark >= Some(opened) && has_no_lag()).await;
    let positions: Vec<i64> = model.commits().await.into_iter().map(|(position, ..)| position).collect();
    assert_eq!(positions, [first.to_i64().unwrap(), opened.to_i64().unwrap()]);
    scriba.shutdown().await.unwrap();
}
