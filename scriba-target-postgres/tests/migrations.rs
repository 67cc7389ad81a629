//! The control tables: how they come, go, and are looked for.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

mod support;

use scriba_core::FailureClass;
use scriba_core::target::{DeadLetterFilter, Tables, TargetError};
use scriba_target_postgres::PgTarget;
use sqlx::migrate::Migrator;
use support::{Fixture, bare, batch, dead, event, failure, id, run, take_over};

async fn run_sql(fixture: &Fixture, text: &'static str) {
    sqlx::raw_sql(text).execute(&fixture.pool).await.unwrap();
}

/// Names of all that stands in the schemas of users.
async fn everything(fixture: &Fixture) -> Vec<String> {
    sqlx::query_scalar(
        "SELECT relname::text FROM pg_class WHERE relnamespace NOT IN \
            (SELECT oid FROM pg_namespace WHERE nspname LIKE 'pg\\_%' OR nspname = 'information_schema') \
         UNION ALL SELECT proname::text FROM pg_proc WHERE pronamespace NOT IN \
            (SELECT oid FROM pg_namespace WHERE nspname LIKE 'pg\\_%' OR nspname = 'information_schema')",
    )
    .fetch_all(&fixture.pool)
    .await
    .unwrap()
}

async fn refusal(target: &PgTarget) -> TargetError {
    let error = target.check().await.unwrap_err();
    assert_eq!(error.class, FailureClass::Structural, "{error}");
    error
}

/// A commit with a dead letter goes through, which needs every table and function.
async fn works(target: &PgTarget) {
    target.check().await.unwrap();
    let mut taken = take_over(target).await;
    let entries = vec![run(1, "SELECT 1"), dead(event(2), failure("decode"))];
    taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap();
    assert_eq!(target.dead_letters(&id(), &DeadLetterFilter::default()).await.unwrap().len(), 1);
    assert_eq!(target.stored_all().await.unwrap().len(), 1);
    let mut control = target.control().await.unwrap();
    control.lease(&id(), &support::owner("a"), std::time::Duration::from_secs(1)).await.unwrap();
}

#[tokio::test]
async fn missing_tables_are_named_with_both_versions_and_the_command() {
    let fixture = bare().await;
    let error = refusal(&fixture.target).await.to_string();
    for part in [
        "version none",
        "wanted is version 1",
        "table \"scriba_checkpoints\"",
        "scriba_dead_letters",
        "PgTarget::migrate",
        "sqlx migrate run",
    ] {
        assert!(error.contains(part), "{part} in: {error}");
    }
    fixture.target.migrate().await.unwrap();
    works(&fixture.target).await;
}

#[tokio::test]
async fn older_tables_are_refused_and_brought_up() {
    let fixture = bare().await;
    fixture.target.migrate().await.unwrap();
    run_sql(&fixture, "CREATE OR REPLACE FUNCTION scriba_schema_version() RETURNS integer LANGUAGE sql AS 'SELECT 0'")
        .await;
    let error = refusal(&fixture.target).await.to_string();
    assert!(error.contains("of version 0, wanted is version 1: run `PgTarget::migrate`"), "{error}");
    fixture.target.migrate().await.unwrap();
    works(&fixture.target).await;
}

#[tokio::test]
async fn tables_that_are_half_there_are_refused_and_mended_without_losing_a_checkpoint() {
    let fixture = bare().await;
    fixture.target.migrate().await.unwrap();
    take_over(&fixture.target).await;
    run_sql(&fixture, "DROP TABLE scriba_dead_letters; DROP FUNCTION scriba_readable_json").await;
    let error = refusal(&fixture.target).await.to_string();
    assert!(error.contains("missing: table \"scriba_dead_letters\", function \"scriba_readable_json\""), "{error}");
    assert!(!error.contains("scriba_checkpoints"), "{error}");
    fixture.target.migrate().await.unwrap();
    assert_eq!(take_over(&fixture.target).await.checkpoint.epoch, 2);
    works(&fixture.target).await;
}

#[tokio::test]
async fn newer_tables_are_left_alone() {
    let fixture = bare().await;
    fixture.target.migrate().await.unwrap();
    run_sql(&fixture, "CREATE OR REPLACE FUNCTION scriba_schema_version() RETURNS integer LANGUAGE sql AS 'SELECT 99'")
        .await;
    let error = refusal(&fixture.target).await.to_string();
    assert!(error.contains("of version 99") && error.contains("newer Scriba"), "{error}");
    assert!(fixture.target.migrate().await.is_err());
}

#[tokio::test]
async fn eight_nodes_migrate_at_once() {
    for schema in [None, Some("read models")] {
        let fixture = bare().await;
        let nodes = (0..8).map(|_| {
            let target = schema.map_or(fixture.target.clone(), |schema| fixture.target.clone().schema(schema));
            tokio::spawn(async move { target.migrate().await })
        });
        for node in nodes.collect::<Vec<_>>() {
            node.await.unwrap().unwrap();
        }
        works(&schema.map_or(fixture.target.clone(), |schema| fixture.target.clone().schema(schema))).await;
    }
}

#[tokio::test]
async fn a_migration_of_tables_that_are_there_waits_for_nobody_who_uses_them() {
    let fixture = bare().await;
    fixture.target.migrate().await.unwrap();
    let mut busy = fixture.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE scriba_dead_letters, scriba_checkpoints IN ROW EXCLUSIVE MODE")
        .execute(&mut *busy)
        .await
        .unwrap();
    tokio::time::timeout(std::time::Duration::from_secs(2), fixture.target.migrate()).await.unwrap().unwrap();
}

#[tokio::test]
async fn down_takes_everything_away_and_can_be_run_again() {
    let fixture = bare().await;
    let target = fixture.target.clone().table_prefix("p_");
    target.migrate().await.unwrap();
    assert!(!everything(&fixture).await.is_empty());
    target.migrate_down().await.unwrap();
    assert_eq!(everything(&fixture).await, [""; 0]);
    target.migrate_down().await.unwrap();
}

#[tokio::test]
async fn schema_and_prefix_of_any_spelling_hold_tables_of_their_own() {
    let fixture = bare().await;
    let plain = fixture.target.clone();
    let odd = plain.clone().schema("Read \"Models\"; it's").table_prefix("Größe \"x\" '");
    let prefixed = plain.clone().table_prefix("p_");
    for target in [&plain, &odd, &prefixed] {
        target.migrate().await.unwrap();
    }
    for target in [&plain, &odd, &prefixed] {
        works(target).await;
    }
    plain.migrate_down().await.unwrap();
    prefixed.migrate_down().await.unwrap();
    let left = everything(&fixture).await;
    assert!(!left.is_empty() && left.iter().all(|name| name.starts_with("Größe \"x\" '")), "{left:?}");
    assert_eq!(take_over(&odd).await.checkpoint.epoch, 2);
}

#[tokio::test]
async fn names_that_cannot_be_are_refused() {
    let fixture = bare().await;
    for target in [
        fixture.target.clone().table_prefix("p".repeat(41)),
        fixture.target.clone().table_prefix(""),
        fixture.target.clone().schema("a\0b"),
        fixture.target.clone().schema("$body$"),
    ] {
        refusal(&target).await;
        assert!(target.migrate().await.unwrap_err().message.contains("choose another"));
        assert!(target.export_migrations(std::env::temp_dir()).is_err());
    }
}

#[tokio::test]
async fn exported_files_are_what_sqlx_migrate_wants_and_can_be_run_by_hand_again() {
    let fixture = bare().await;
    for target in [fixture.target.clone(), fixture.target.clone().schema("Models").table_prefix("p_")] {
        let dir = tempfile::tempdir().unwrap();
        let files = target.export_migrations(dir.path()).unwrap();
        assert_eq!(
            files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect::<Vec<_>>(),
            ["1_scriba.up.sql", "1_scriba.down.sql"]
        );
        let migrator = Migrator::new(dir.path()).await.unwrap();
        migrator.run(&fixture.pool).await.unwrap();
        works(&target).await;
        let by_hand = std::fs::read_to_string(&files[0]).unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(by_hand)).execute(&fixture.pool).await.unwrap();
        works_again(&target).await;
        migrator.undo(&fixture.pool, 0).await.unwrap();
        refusal(&target).await;
    }
}

async fn works_again(target: &PgTarget) {
    target.check().await.unwrap();
    assert_eq!(take_over(target).await.checkpoint.commit_no, 1, "the checkpoint is still there");
}

#[test]
fn exported_files_of_default_names_are_the_files_of_the_repository() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy("postgres://localhost/none").unwrap();
    for file in PgTarget::new(pool).export_migrations(dir.path()).unwrap() {
        let repository =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations").join(file.file_name().unwrap());
        assert_eq!(std::fs::read(&file).unwrap(), std::fs::read(repository).unwrap());
    }
}
