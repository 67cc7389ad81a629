//! The yardstick does the work it is measured by, and keeps the guarantees it claims.
#![cfg(unix)]

use std::time::Duration;

use scriba_benches::Result;
use scriba_benches::fill::{Fill, fill};
use scriba_benches::hand_loop::{Adds, Until, reset, run};
use scriba_benches::side::check_balances;
use scriba_testing::postgres::{Database, Postgres};
use sqlx::{ConnectOptions, PgConnection};
use tokio::sync::watch;

const EVENTS: u64 = 5_000;
const LAST: Until = Until::Position(5_000);

async fn filled(jsonb: bool) -> Result<(Database, PgConnection)> {
    let database = Postgres::shared().await?.create_database().await?;
    let mut connection = database.connect_options().connect().await?;
    fill(&mut connection, Fill { events: EVENTS, streams: 300, zipf: Some(1.0), jsonb, seed: 7 }).await?;
    reset(&mut connection).await?;
    Ok((database, connection))
}

async fn catch_up(database: &Database, adds: Adds, until: Until) -> Result<()> {
    run(&database.connect_options(), adds, until, &watch::channel(None).0).await
}

async fn checkpoint(connection: &mut PgConnection) -> Result<(i64, i64)> {
    Ok(sqlx::query_as("SELECT watermark, applied FROM hand_checkpoint").fetch_one(connection).await?)
}

#[tokio::test]
async fn both_ways_to_add_leave_the_balances_of_the_log() -> Result<()> {
    for (adds, jsonb) in [(Adds::Merged, false), (Adds::Merged, true), (Adds::Waves, false)] {
        let (database, mut connection) = filled(jsonb).await?;
        catch_up(&database, adds, LAST).await?;
        check_balances(&mut connection).await?;
        assert_eq!(checkpoint(&mut connection).await?, (5_000, 5_000), "{adds:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_wrong_balance_is_noticed() -> Result<()> {
    let (database, mut connection) = filled(false).await?;
    catch_up(&database, Adds::Merged, Until::Position(4_999)).await?;
    assert!(check_balances(&mut connection).await.is_err(), "one event is missing");
    Ok(())
}

#[tokio::test]
async fn the_loop_goes_on_from_its_checkpoint() -> Result<()> {
    let (database, mut connection) = filled(false).await?;
    catch_up(&database, Adds::Merged, Until::Position(1_234)).await?;
    assert_eq!(checkpoint(&mut connection).await?, (1_234, 1_234));
    catch_up(&database, Adds::Merged, LAST).await?;
    assert_eq!(checkpoint(&mut connection).await?, (5_000, 5_000));
    check_balances(&mut connection).await
}

#[tokio::test]
async fn a_loop_that_was_taken_over_cannot_commit() -> Result<()> {
    let (database, mut connection) = filled(false).await?;
    let (sender, mut watermark) = watch::channel(None);
    let options = database.connect_options();
    let first = tokio::spawn(async move { run(&options, Adds::Merged, Until::Forever, &sender).await });
    watermark.wait_for(|at| *at == Some(5_000)).await?;

    catch_up(&database, Adds::Merged, LAST).await?;
    let append = "INSERT INTO bank_events (stream_id, type, data)
                    SELECT stream_id, 'Deposited', data FROM bank_events WHERE type = 'Deposited' LIMIT 1";
    sqlx::raw_sql(append).execute(&mut connection).await?;
    let error = tokio::time::timeout(Duration::from_secs(10), first).await??.map_err(|error| error.to_string());
    assert!(error.as_ref().is_err_and(|error| error.contains("the checkpoint is not at epoch 1")), "{error:?}");
    assert_eq!(checkpoint(&mut connection).await?, (5_000, 5_000));

    catch_up(&database, Adds::Merged, Until::Position(5_001)).await?;
    check_balances(&mut connection).await
}

#[tokio::test]
async fn a_missing_position_ends_the_loop_before_it() -> Result<()> {
    let (database, mut connection) = filled(false).await?;
    sqlx::raw_sql("DELETE FROM bank_events WHERE position = 2500").execute(&mut connection).await?;
    let error = catch_up(&database, Adds::Merged, LAST).await.map_err(|error| error.to_string());
    assert_eq!(error, Err("position 2500 is missing from the log".to_owned()));
    assert!(checkpoint(&mut connection).await?.0 < 2_500);
    Ok(())
}

#[tokio::test]
async fn one_seed_makes_one_log() -> Result<()> {
    let mut digests = Vec::new();
    for _ in 0..2 {
        let (_, mut connection) = filled(false).await?;
        let sql = "SELECT md5(string_agg(concat_ws(' ', position, id, stream_id, type, data), ',' ORDER BY position))
                   FROM bank_events";
        digests.push(sqlx::query_scalar::<_, String>(sql).fetch_one(&mut connection).await?);
    }
    assert_eq!(digests[0], digests[1]);
    Ok(())
}
