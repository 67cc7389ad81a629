//! The throwaway Postgres: it works, it comes back after an outage, and nothing of it is left behind.
#![cfg(target_os = "linux")] // For /proc.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]
#![expect(clippy::disallowed_methods, reason = "what waits here has no runtime")]

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use scriba_testing::postgres::{Database, Postgres, PostgresError, PostgresOptions};
use sqlx::{Connection, PgConnection};

/// Set for the child process that is killed.
const CHILD: &str = "SCRIBA_TEST_POSTGRES_CHILD";

async fn one(database: &Database, sql: &'static str) -> Result<String, sqlx::Error> {
    let mut connection = PgConnection::connect_with(&database.connect_options()).await?;
    sqlx::query_scalar(sql).fetch_one(&mut connection).await
}

fn runs(pid: u32) -> bool {
    Command::new("kill").args(["-0", &pid.to_string()]).stderr(Stdio::null()).status().unwrap().success()
}

fn data_directory(pid: u32) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/cwd")).unwrap().parent().unwrap().to_owned()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(20), "after 20 s it is not so that {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// This test program again, as a process that starts a server, prints its process id and waits to be killed.
fn child() -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "a_killed_process_leaves_no_server_and_no_directory", "--nocapture"]).env(CHILD, "1");
    command
}

#[tokio::test]
async fn databases_of_the_shared_server_know_nothing_of_each_other() {
    let server = Postgres::shared().await.unwrap();
    let (a, b) = (server.create_database().await.unwrap(), server.create_database().await.unwrap());
    let pool = a.pool(2).await.unwrap();
    sqlx::raw_sql("CREATE TABLE t (id int)").execute(&pool).await.unwrap();
    let in_b = one(&b, "SELECT coalesce(to_regclass('t')::text, 'none')").await.unwrap();
    assert_eq!(in_b, "none");
    let mut by_url = PgConnection::connect(&a.url()).await.unwrap();
    let name: String = sqlx::query_scalar("SELECT current_database()::text").fetch_one(&mut by_url).await.unwrap();
    assert_eq!(name, a.name());
}

#[tokio::test]
async fn all_tests_of_a_process_share_one_server() {
    let (a, b) = (Postgres::shared().await.unwrap(), Postgres::shared().await.unwrap());
    assert!(std::ptr::eq(a, b));
}

#[tokio::test]
async fn settings_reach_the_server_and_a_durable_one_flushes() {
    let server = Postgres::start(PostgresOptions::durable().setting("max_prepared_transactions", "7")).await.unwrap();
    let database = server.create_database().await.unwrap();
    let sql = "SELECT concat_ws(' ', current_setting('max_prepared_transactions'), current_setting('fsync'), \
               current_setting('synchronous_commit'), current_setting('server_encoding'))";
    assert_eq!(one(&database, sql).await.unwrap(), "7 on on UTF8");
}

#[tokio::test]
async fn a_bad_setting_fails_with_the_end_of_the_servers_log() {
    let error = Postgres::start(PostgresOptions::default().setting("max_conections", "7")).await.unwrap_err();
    assert!(matches!(&error, PostgresError::Server { log, .. } if log.contains("max_conections")), "{error}");
}

#[tokio::test]
async fn what_was_committed_is_there_after_an_outage_on_the_same_port() {
    let server = Postgres::start(PostgresOptions::default()).await.unwrap();
    let database = server.create_database().await.unwrap();
    let pool = database.pool(1).await.unwrap();
    sqlx::raw_sql("CREATE TABLE t AS SELECT 'kept' AS v").execute(&pool).await.unwrap();
    let first = server.pid().unwrap();

    server.stop().await.unwrap();
    assert!(!runs(first) && server.pid().is_none());
    assert!(one(&database, "SELECT v FROM t").await.is_err());
    server.restart().await.unwrap();
    assert_eq!(one(&database, "SELECT v FROM t").await.unwrap(), "kept");

    let second = server.pid().unwrap();
    server.restart().await.unwrap();
    assert!(!runs(second), "a running server is stopped first");
    assert_eq!(one(&database, "SELECT v FROM t").await.unwrap(), "kept");
}

#[tokio::test]
async fn a_dropped_server_is_gone_with_its_directory() {
    let server = Postgres::start(PostgresOptions::default()).await.unwrap();
    let pid = server.pid().unwrap();
    let dir = data_directory(pid);
    assert!(dir.exists());
    drop(server);
    assert!(!runs(pid) && !dir.exists());
}

#[tokio::test]
async fn a_killed_process_leaves_no_server_and_no_directory() {
    if env::var_os(CHILD).is_some() {
        let server = Postgres::start(PostgresOptions::default()).await.unwrap();
        println!("\npid {}", server.pid().unwrap());
        return std::future::pending().await;
    }
    let mut child = child().stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let pid = lines.find_map(|line| line.strip_prefix("pid ").map(|pid| pid.parse().unwrap())).unwrap();
    let dir = data_directory(pid);
    assert!(runs(pid) && dir.exists());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("server and directory are gone", || !runs(pid) && !dir.exists());
}

#[test]
fn a_process_killed_while_the_server_starts_leaves_no_server_and_no_directory() {
    let temp = tempfile::tempdir().unwrap();
    // The server's user, who is not root, has to get in.
    fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut child = child().env("TMPDIR", temp.path()).stdout(Stdio::null()).spawn().unwrap();
    let only_entry = || fs::read_dir(temp.path()).unwrap().next().map(|entry| entry.unwrap().path());
    let dir = loop {
        if let Some(dir) = only_entry().filter(|dir| dir.join("log").exists()) {
            break dir;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the directory is gone", || !dir.exists());
}
