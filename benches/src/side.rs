//! What is compared: the hand-written loop in its variants, and the engine. Each is measured in a process of its own.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection};
use tokio::sync::watch;

use crate::hand_loop::{Adds, Until};
use crate::measure::{Usage, quantile};
use crate::{Result, engine_loop, hand_loop};

/// One of the things compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// [`hand_loop`].
    Hand(Adds),
    /// [`engine_loop`].
    Engine,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hand(Adds::Merged) => "hand-merged",
            Self::Hand(Adds::Waves) => "hand-waves",
            Self::Engine => "engine",
        })
    }
}

impl FromStr for Side {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let all = [Self::Hand(Adds::Merged), Self::Hand(Adds::Waves), Self::Engine];
        let found = all.into_iter().find(|side| side.to_string() == name);
        found.ok_or_else(|| format!("unknown side {name}: write hand-merged, hand-waves or engine"))
    }
}

impl Side {
    /// Puts read model and checkpoint back to the beginning.
    pub async fn reset(self, connection: &mut PgConnection, database: &PgConnectOptions) -> Result<()> {
        match self {
            Self::Hand(_) => hand_loop::reset(connection).await,
            Self::Engine => engine_loop::reset(connection, database).await,
        }
    }

    async fn run(self, database: PgConnectOptions, until: Until, watermark: watch::Sender<Option<i64>>) -> Result<()> {
        match self {
            Self::Hand(adds) => hand_loop::run(&database, adds, until, &watermark).await,
            Self::Engine => engine_loop::run(&database, until, watermark).await,
        }
    }
}

/// A catch-up, measured.
#[derive(Clone, Copy, Debug)]
pub struct CatchUp {
    /// From the start of the loop until its last commit was answered.
    pub took: Duration,
    /// What the whole process used.
    pub usage: Usage,
}

/// Runs a side from the beginning of the log to its end. Called once in a process, whose memory it measures.
pub async fn catch_up(side: Side, database: PgConnectOptions) -> Result<CatchUp> {
    let mut connection = database.connect().await?;
    let last: i64 = sqlx::query_scalar("SELECT max(position) FROM bank_events").fetch_one(&mut connection).await?;
    let (sender, mut watermark) = watch::channel(None);
    let started = Instant::now();
    let running = tokio::spawn(side.run(database, Until::Position(last), sender));
    // Where the loop fails, its sender goes, and its own error says more.
    let reached = watermark.wait_for(|at| *at >= Some(last)).await.is_ok();
    let took = started.elapsed();
    running.await??;
    if !reached {
        return Err("the loop ended before the end of the log".into());
    }
    Ok(CatchUp { took, usage: Usage::of_this_process()? })
}

/// Latencies from the answer to an append until the loop's commit of it was answered, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// The median.
    pub p50: f64,
    /// That of the slowest of a hundred.
    pub p99: f64,
}

/// Runs a side on an empty log and appends single events, each when the one before has been projected for a while.
pub async fn idle(side: Side, database: PgConnectOptions, appends: u32) -> Result<Idle> {
    const PAUSE: Duration = Duration::from_millis(5);
    let mut connection = database.connect().await?;
    let (sender, mut watermark) = watch::channel(None);
    let running = tokio::spawn(side.run(database, Until::Forever, sender));
    let open = r#"INSERT INTO bank_events (stream_id, type, data)
                  VALUES ('account-1', 'AccountOpened', '{"account":1,"owner":"owner 1"}')"#;
    sqlx::raw_sql(open).execute(&mut connection).await?;
    let mut latencies = Vec::new();
    for _ in 0..appends {
        let sql = r#"INSERT INTO bank_events (stream_id, type, data)
                     VALUES ('account-1', 'Deposited', '{"account":1,"cents":1}') RETURNING position"#;
        let position: i64 = sqlx::query_scalar(sql).fetch_one(&mut connection).await?;
        let appended = Instant::now();
        if watermark.wait_for(|at| *at >= Some(position)).await.is_err() {
            running.await??;
            return Err("the loop ended".into());
        }
        latencies.push(appended.elapsed().as_secs_f64() * 1e3);
        tokio::time::sleep(PAUSE).await;
    }
    running.abort();
    latencies.sort_by(f64::total_cmp);
    let at = |share| quantile(&latencies, share).ok_or("nothing was appended");
    Ok(Idle { p50: at(0.5)?, p99: at(0.99)? })
}

/// Compares the balances with the sums over the log, account by account.
///
/// # Errors
/// Where they differ, saying in how many accounts.
pub async fn check_balances(connection: &mut PgConnection) -> Result<()> {
    let sql = "SELECT count(*) FROM balances FULL JOIN (
                   SELECT (data->>'account')::bigint AS account,
                          sum(CASE type WHEN 'Deposited' THEN (data->>'cents')::bigint
                                        WHEN 'Withdrawn' THEN -(data->>'cents')::bigint ELSE 0 END) AS cents
                   FROM bank_events GROUP BY 1
               ) AS log USING (account)
               WHERE balances.cents IS DISTINCT FROM log.cents";
    let wrong: i64 = sqlx::query_scalar(sql).fetch_one(connection).await?;
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} balances differ from the log").into()) }
}
