//! What the state of the database does to a projection: locks, lost connections, limits, read-only. All of it is waited out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use scriba_core::{Lease, Position, ProjectionOptions, Scriba, State};
use scriba_source_postgres::PgLog;
use scriba_target_postgres::{CustomError, PgOp, PgTarget, custom, sql};
use scriba_testing::postgres::{Postgres, PostgresOptions};
use scriba_testing::{Recorded, Recorder};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, Executor, PgConnection};

use super::common::{
    Fixture, Play, assert_conserved, eventually, options, play, played, seen, stage, stage_on, statements, until,
    until_true,
};

/// Whether the committing session waits for a lock.
const COMMITTER_WAITS: &str = "SELECT count(*) > 0 FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'scriba play%' AND wait_event_type = 'Lock'";

async fn rows() -> Fixture {
    let fixture = stage().await;
    fixture.run("CREATE TABLE rows (id bigint PRIMARY KEY, n bigint); INSERT INTO rows VALUES (1, 0), (2, 0)").await;
    fixture
}

/// A session that holds the row 1.
async fn holder(fixture: &Fixture) -> PgConnection {
    let options = fixture.database.connect_options().application_name("the one in the way");
    let mut holder = PgConnection::connect_with(&options).await.unwrap();
    holder.execute("BEGIN").await.unwrap();
    holder.execute("UPDATE rows SET n = 100 WHERE id = 1").await.unwrap();
    holder
}

/// Codes of the batches that failed.
fn codes(recorder: &Recorder) -> Vec<String> {
    let codes = recorder.events_of(played()).into_iter().filter_map(|event| match event {
        Recorded::BatchFailed { code, .. } => code,
        _ => None,
    });
    codes.collect()
}

async fn listened(fixture: &Fixture, play: &Play, options: ProjectionOptions) -> (Recorder, Scriba) {
    let recorder = Recorder::new();
    let scriba = fixture.play_to(&recorder, play, options).await;
    (recorder, scriba)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_with_another_session_is_met_by_a_replay() {
    let fixture = rows().await;
    // The one that waits for less long is the one that the server refuses.
    fixture.run(format!("ALTER DATABASE {} SET deadlock_timeout = '300ms'", fixture.database.name())).await;
    let mut holder = holder(&fixture).await;
    holder.execute("SET deadlock_timeout = '60s'").await.unwrap();
    // By one event, so that both rows are locked in one transaction.
    let both = "CREATE FUNCTION lock_two() RETURNS void LANGUAGE plpgsql AS
        'BEGIN UPDATE rows SET n = n + 1 WHERE id = 2; UPDATE rows SET n = n + 1 WHERE id = 1; END'";
    fixture.run(both).await;
    fixture.append("a", "Statement", b"SELECT lock_two()").await;
    let (recorder, scriba) = listened(&fixture, &statements(), options()).await;
    until_true(&fixture, COMMITTER_WAITS).await;
    holder.execute("UPDATE rows SET n = 200 WHERE id = 2").await.unwrap();
    holder.execute("COMMIT").await.unwrap();
    until(&scriba, &played(), 0).await;
    assert!(codes(&recorder).contains(&"40P01".to_owned()), "{:?}", codes(&recorder));
    assert_eq!(fixture.texts("SELECT n FROM rows ORDER BY id").await, ["101", "201"]);
    assert!(fixture.letters().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_another_session_holds_is_waited_for_and_who_holds_it_is_told() {
    let fixture = rows().await;
    let mut holder = holder(&fixture).await;
    fixture.append("a", "Statement", b"UPDATE rows SET n = n + 1 WHERE id = 1").await;
    let short = options().lease(Lease::For(Duration::from_secs(3)));
    let (recorder, scriba) = listened(&fixture, &statements(), short).await;
    eventually("it is degraded", || scriba.info(played()).unwrap().degraded_since.is_some()).await;
    let error = scriba.info(played()).unwrap().last_error.unwrap();
    assert!(error.contains("held up by") && error.contains("the one in the way"), "{error}");
    assert_eq!(fixture.seen().await, [] as [i64; 0]);
    holder.execute("COMMIT").await.unwrap();
    until(&scriba, &played(), 0).await;
    // Whichever limit of the server's comes first: that for a lock or that for a statement.
    let codes = codes(&recorder);
    assert!(codes.iter().all(|code| code == "55P03" || code == "57014"), "{codes:?}");
    assert_eq!(fixture.texts("SELECT n FROM rows ORDER BY id").await, ["101", "0"]);
    eventually("it recovers", || scriba.info(played()).unwrap().is_ready()).await;
    assert_conserved(&scriba);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_not_to_be_had_at_once_is_met_by_replays_until_it_is() {
    let fixture = rows().await;
    let mut holder = holder(&fixture).await;
    fixture.append("a", "Statement", b"SELECT * FROM rows WHERE id = 1 FOR UPDATE NOWAIT").await;
    let (recorder, scriba) = listened(&fixture, &statements(), options()).await;
    eventually("it has failed twice", || codes(&recorder).len() > 1).await;
    holder.execute("COMMIT").await.unwrap();
    until(&scriba, &played(), 0).await;
    assert!(codes(&recorder).iter().all(|code| code == "55P03"), "{:?}", codes(&recorder));
    assert_eq!((fixture.seen().await, fixture.letters().await), (vec![0], vec![]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_an_operator_cancels_and_a_session_that_he_ends_are_met_by_replays() {
    for (act, code) in [("pg_cancel_backend", "57014"), ("pg_terminate_backend", "57P01")] {
        let fixture = rows().await;
        let mut holder = holder(&fixture).await;
        fixture.append("a", "Statement", b"").await;
        fixture.append("b", "Statement", b"UPDATE rows SET n = n + 1 WHERE id = 1").await;
        let (recorder, scriba) = listened(&fixture, &statements(), options()).await;
        until_true(&fixture, COMMITTER_WAITS).await;
        fixture
            .run(format!(
                "SELECT {act}(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name LIKE 'scriba play%'"
            ))
            .await;
        eventually("it has failed", || !codes(&recorder).is_empty()).await;
        holder.execute("COMMIT").await.unwrap();
        until(&scriba, &played(), 1).await;
        assert_eq!(codes(&recorder)[0], code);
        assert_eq!(fixture.texts("SELECT n FROM rows ORDER BY id").await, ["101", "0"], "{act}");
        assert_eq!((fixture.seen().await, fixture.letters().await), (vec![0, 1], vec![]), "{act}");
        assert_conserved(&scriba);
    }
}

/// The name of a role that may do what the engine does, and a target that logs in as it.
async fn app(fixture: &Fixture) -> (String, PgTarget) {
    let role = format!("{}_app", fixture.database.name());
    fixture
        .run(format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'app'; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role};
             GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}"
        ))
        .await;
    let connect = fixture.database.connect_options().username(&role).password("app");
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(connect);
    (role, PgTarget::new(pool))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_with_no_connections_left_is_waited_for() {
    let fixture = stage().await;
    let (role, target) = app(&fixture).await;
    let recorder = Recorder::new();
    let scriba = Scriba::with_observers([Arc::new(recorder.clone()) as _]);
    scriba.start(statements(), fixture.source.clone(), target, options()).await.unwrap();
    until(&scriba, &played(), fixture.append("a", "Statement", b"").await).await;
    fixture.run(format!("ALTER ROLE {role} CONNECTION LIMIT 0")).await;
    fixture.run(format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")).await;
    let last = fixture.append("a", "Statement", b"").await;
    let refused = || scriba.info(played()).unwrap().last_error.is_some_and(|error| error.contains("53300"));
    eventually("the limit is told", refused).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_ne!(scriba.info(played()).unwrap().state, State::Halted);
    fixture.run(format!("ALTER ROLE {role} CONNECTION LIMIT -1")).await;
    until(&scriba, &played(), last).await;
    assert_eq!(fixture.seen().await, [0, 1]);
    scriba.shutdown().await.unwrap();
    fixture.run(format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")).await;
    fixture.run(format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_read_only_by_setting_is_waited_for() {
    let fixture = stage().await;
    let name = fixture.database.name();
    fixture.append("a", "Statement", b"").await;
    fixture.run(format!("ALTER DATABASE {name} SET default_transaction_read_only = on")).await;
    let scriba = fixture.play(&statements(), options()).await;
    // The lease is written by a session that takes the setting as it is.
    let told = || scriba.info(played()).unwrap().last_error.is_some_and(|error| error.contains("25006"));
    eventually("read-only is told", told).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let info = scriba.info(played()).unwrap();
    assert_eq!((info.state, info.watermark), (State::Initializing, None));
    fixture
        .run(format!(
            "SET default_transaction_read_only = off; ALTER DATABASE {name} RESET default_transaction_read_only"
        ))
        .await;
    until(&scriba, &played(), 0).await;
    assert_eq!(fixture.seen().await, [0]);
    assert!(scriba.info(played()).unwrap().degraded_since.is_none());
}

/// A read model on a server of its own, which is made a standby and back; the log is on another server.
async fn through_a_standby(lease: Lease) {
    let server = Postgres::start(PostgresOptions::default()).await.unwrap();
    let fixture = stage_on(&server).await;
    let log = stage().await;
    let source = PgLog::new(log.pool.clone(), "events");
    let scriba = Scriba::new();
    scriba.start(statements(), source, fixture.target.clone(), options().lease(lease)).await.unwrap();
    until(&scriba, &played(), log.append("a", "Statement", b"").await).await;
    let directory = fixture.texts("SELECT current_setting('data_directory')").await;
    std::fs::write(format!("{}/standby.signal", directory[0]), "").unwrap();
    server.restart().await.unwrap();
    assert_eq!(fixture.texts("SELECT pg_is_in_recovery()").await, ["true"]);
    let last = log.append("a", "Statement", b"").await;
    let read_only = Instant::now();
    while read_only.elapsed() < Duration::from_secs(3) {
        let info = scriba.info(played()).unwrap();
        assert_ne!(info.state, State::Halted, "{lease:?}: {:?}", info.halt_reason);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(scriba.info(played()).unwrap().degraded_since.is_some());
    fixture.run("SELECT pg_promote()").await;
    until(&scriba, &played(), last).await;
    assert_eq!(fixture.seen().await, [0, 1], "{lease:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_a_standby_for_a_while_is_waited_for() {
    through_a_standby(Lease::For(Duration::from_secs(30))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_a_standby_for_a_while_is_waited_for_without_a_lease_too() {
    through_a_standby(Lease::Off).await;
}

/// Every attempt to write the event runs the closure with its number.
fn closures<F>(run: F) -> Play
where
    F: Fn(&mut PgConnection, u32) -> futures_util::future::BoxFuture<'_, Result<(), CustomError>>
        + Send
        + Sync
        + 'static,
{
    let (run, attempts) = (Arc::new(run), Arc::new(AtomicU32::new(0)));
    play(move |meta| {
        let (run, attempts) = (run.clone(), attempts.clone());
        async move {
            if meta.event_type != "Closure" {
                return Ok(seen(&meta));
            }
            let op: PgOp = custom(move |conn| run(conn, attempts.fetch_add(1, Ordering::Relaxed))).into();
            Ok(seen(&meta).and(op))
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_the_server_ends_for_being_idle_in_its_transaction_is_met_by_a_replay() {
    let fixture = stage().await;
    let idle = closures(|conn, attempt| {
        Box::pin(async move {
            if attempt == 0 {
                conn.execute("SET LOCAL idle_in_transaction_session_timeout = '50ms'").await?;
                tokio::time::sleep(Duration::from_millis(300)).await;
                conn.execute("SELECT 1").await?;
            }
            Ok(())
        })
    });
    fixture.append("a", "Good", b"").await;
    let last = fixture.append("a", "Closure", b"").await;
    let (recorder, scriba) = listened(&fixture, &idle, options()).await;
    until(&scriba, &played(), last).await;
    assert_eq!((fixture.seen().await, fixture.letters().await), (vec![0, 1], vec![]));
    let failed = recorder.events_of(played()).into_iter().any(|event| matches!(event, Recorded::BatchFailed { .. }));
    assert!(failed, "it was a failure of the batch");
}

#[tokio::test(flavor = "multi_thread")]
async fn closures_that_take_prepared_statements_away_or_make_the_transaction_read_only_hurt_nobody_else() {
    for statement in ["DEALLOCATE ALL", "SET TRANSACTION READ ONLY"] {
        let fixture = stage().await;
        let play = play(move |meta| async move {
            let spoils = meta.position == Position::new(2);
            let closure = custom(move |conn| {
                Box::pin(async move {
                    if spoils {
                        conn.execute(statement).await?;
                    }
                    Ok(())
                })
            });
            Ok(seen(&meta).and(closure))
        });
        fixture.append_many(5, 2).await;
        let scriba = fixture.play(&play, options()).await;
        until(&scriba, &played(), 4).await;
        assert_eq!(fixture.letters().await, [(2, "custom:left_transaction".to_owned())], "{statement}");
        assert_eq!(fixture.seen().await, [0, 1, 3, 4], "{statement}");
        assert_conserved(&scriba);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_altered_while_a_statement_on_it_is_prepared_is_met_by_a_replay() {
    let fixture = stage().await;
    fixture.run("CREATE TABLE wide (id bigint)").await;
    let insert = play(|meta| async move {
        Ok(seen(&meta).and(sql("INSERT INTO wide (id) VALUES ($1) RETURNING *").bind(meta.position.to_i64()?)))
    });
    let (recorder, scriba) = listened(&fixture, &insert, options()).await;
    until(&scriba, &played(), fixture.append("a", "Wide", b"").await).await;
    fixture.run("ALTER TABLE wide ADD COLUMN more text").await;
    until(&scriba, &played(), fixture.append("a", "Wide", b"").await).await;
    assert_eq!(codes(&recorder), ["0A000"]);
    assert_eq!(fixture.texts("SELECT id FROM wide ORDER BY id").await, ["0", "1"]);
}
