//! Measures the engine beside the hand-written loop, in pairs, each side in a process of its own, on a durable
//! throwaway Postgres:
//!
//! ```text
//! cargo run --release -p scriba-benches -- catch-up --events 200000 --streams 10000 --pairs 5
//! cargo run --release -p scriba-benches -- idle --events 500 --pairs 5
//! cargo run --release -p scriba-benches -- event-store --events 200000 --streams 10000 --pairs 3
//! ```
//!
//! The last one measures a catch-up from a double of `EventStoreDB` beside reading its events with no projection.
//!
//! Only ratios inside one run count: figures drift between machines and minutes.

use std::collections::HashMap;
use std::env;
use std::process::{Command, ExitCode, Stdio};
use std::str::FromStr;

use scriba_benches::Result;
use scriba_benches::event_store::{self, Reading};
use scriba_benches::fill::{Fill, create_log, fill};
use scriba_benches::measure::{Usage, summary};
use scriba_benches::side::{Side, catch_up, check_balances, idle};
use scriba_testing::eventstore::EventStoreDouble;
use scriba_testing::postgres::{Database, Postgres, PostgresOptions};
use sqlx::{ConnectOptions, PgConnection};

const USAGE: &str = "usage: scriba-benches catch-up [--events 200000] [--streams 10000] [--pairs 5] [--zipf EXPONENT] \
                     [--hand hand-merged|hand-waves] [--body json|jsonb]\n       \
                     scriba-benches idle [--events 500] [--pairs 5] [--hand hand-merged|hand-waves]\n       \
                     scriba-benches event-store [--events 200000] [--streams 10000] [--pairs 3]";

#[tokio::main]
async fn main() -> ExitCode {
    match bench().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn bench() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let options = Options::parse(arguments)?;
    match command.as_str() {
        "catch-up" => compare_catch_ups(&options).await,
        "idle" => compare_idle(&options).await,
        "event-store" => compare_readings(&options).await,
        // These are what the others start for each side.
        "side-catch-up" => {
            let measured =
                catch_up(options.required("side")?, options.required::<String>("database-url")?.parse()?).await?;
            println!(
                "{} {} {}",
                measured.took.as_secs_f64(),
                measured.usage.cpu.as_secs_f64(),
                measured.usage.peak_kib
            );
            Ok(())
        }
        "side-idle" => {
            let url: String = options.required("database-url")?;
            let measured = idle(options.required("side")?, url.parse()?, options.required("events")?).await?;
            println!("{} {}", measured.p50, measured.p99);
            Ok(())
        }
        "side-event-store" => {
            let (url, store): (String, String) = (options.required("database-url")?, options.required("connection")?);
            let (side, events) = (options.required("side")?, options.required("events")?);
            let measured = event_store::read(side, &store, events, &url.parse()?).await?;
            println!("{} {}", measured.took.as_secs_f64(), measured.usage.cpu.as_secs_f64());
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

async fn compare_catch_ups(options: &Options) -> Result<()> {
    let fill_with = Fill {
        events: options.or("events", 200_000)?,
        streams: options.or("streams", 10_000)?,
        zipf: options.optional("zipf")?,
        jsonb: options.or("body", "json".to_owned())? == "jsonb",
        seed: 1,
    };
    let server = Postgres::start(PostgresOptions::durable()).await?;
    let database = server.create_database().await?;
    let mut connection = database.connect_options().connect().await?;
    println!("filling the log: {fill_with:?}");
    fill(&mut connection, fill_with).await?;

    let sides = sides(options)?;
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); sides.len()];
    for pair in 1..=options.or("pairs", 5)? {
        for (side, rates) in sides.iter().zip(&mut rates) {
            prepare(*side, &mut connection, &database).await?;
            let [took, cpu, peak_kib] = measure_side("side-catch-up", &side.to_string(), &database, &[])?;
            check_balances(&mut connection).await?;
            #[expect(clippy::cast_precision_loss, reason = "counts of events are small")]
            let events = fill_with.events as f64;
            rates.push(events / took / 1e3);
            println!(
                "pair {pair}: {side} {:.1} k events/s, CPU {:.2} µs an event, peak memory {:.1} MiB",
                events / took / 1e3,
                cpu / events * 1e6,
                peak_kib / 1024.0
            );
        }
    }
    report(&sides, &rates, "k events/s");
    Ok(())
}

async fn compare_idle(options: &Options) -> Result<()> {
    let events: u32 = options.or("events", 500)?;
    let server = Postgres::start(PostgresOptions::durable()).await?;
    let sides = sides(options)?;
    let (mut p50s, mut p99s) = (vec![Vec::new(); sides.len()], vec![Vec::new(); sides.len()]);
    for pair in 1..=options.or("pairs", 5)? {
        for (index, side) in sides.iter().enumerate() {
            let database = server.create_database().await?;
            let mut connection = database.connect_options().connect().await?;
            create_log(&mut connection, false).await?;
            prepare(*side, &mut connection, &database).await?;
            let [p50, p99] =
                measure_side("side-idle", &side.to_string(), &database, &["--events", &events.to_string()])?;
            check_balances(&mut connection).await?;
            println!("pair {pair}: {side} p50 {p50:.2} ms, p99 {p99:.2} ms");
            p50s[index].push(p50);
            p99s[index].push(p99);
        }
    }
    report(&sides, &p50s, "ms at p50");
    report(&sides, &p99s, "ms at p99");
    Ok(())
}

/// Reads the same store in each way, every time in a process of its own, while the store is in this one.
async fn compare_readings(options: &Options) -> Result<()> {
    let (events, accounts) = (options.or("events", 200_000_u64)?, options.or("streams", 10_000)?);
    let server = Postgres::start(PostgresOptions::durable()).await?;
    let database = server.create_database().await?;
    let mut connection = database.connect_options().connect().await?;
    let store = EventStoreDouble::start()?;
    println!("filling the store: {events} events of {accounts} accounts");
    let sum = event_store::fill(&store, events, accounts);
    let mut rates = vec![Vec::new(); Reading::ALL.len()];
    for pair in 1..=options.or("pairs", 3)? {
        for (reading, rates) in Reading::ALL.iter().zip(&mut rates) {
            Side::Engine.reset(&mut connection, &database.connect_options()).await?;
            sqlx::raw_sql("CHECKPOINT").execute(&mut connection).await?;
            // Only one way makes it.
            store.delete_group("$ce-account", "balances_v1");
            let before = Usage::of_this_process()?.cpu;
            let more = ["--connection", &store.connection_string(), "--events", &events.to_string()];
            let [took, cpu] = measure_side("side-event-store", &reading.to_string(), &database, &more)?;
            let of_the_store = Usage::of_this_process()?.cpu.saturating_sub(before).as_secs_f64();
            if reading.projects() {
                let found: i64 =
                    sqlx::query_scalar("SELECT sum(cents)::bigint FROM balances").fetch_one(&mut connection).await?;
                if found != sum {
                    return Err(format!("{reading}: the balances sum up to {found}, the events to {sum}").into());
                }
            }
            #[expect(clippy::cast_precision_loss, reason = "counts of events are small")]
            let events = events as f64;
            rates.push(events / took / 1e3);
            println!(
                "pair {pair}: {reading} {:.1} k events/s, CPU {:.2} µs an event, and {:.2} µs of the store",
                events / took / 1e3,
                cpu / events * 1e6,
                of_the_store / events * 1e6
            );
        }
    }
    for (reading, values) in Reading::ALL.iter().zip(&rates) {
        let to_client = rates[0].iter().zip(values).map(|(client, value)| value / client).collect();
        println!("{reading}: {} k events/s, to the client alone {}", summary(values.clone()), summary(to_client));
    }
    Ok(())
}

/// The hand-written loop and the engine.
fn sides(options: &Options) -> Result<[Side; 2]> {
    Ok([options.or("hand", "hand-merged".to_owned())?.parse()?, Side::Engine])
}

/// The same start for every run: empty tables, and no write-back of an earlier run under way.
async fn prepare(side: Side, connection: &mut PgConnection, database: &Database) -> Result<()> {
    side.reset(connection, &database.connect_options()).await?;
    sqlx::raw_sql("CHECKPOINT").execute(connection).await?;
    Ok(())
}

/// Starts this program again for one side and reads the numbers it prints.
fn measure_side<const N: usize>(command: &str, side: &str, database: &Database, more: &[&str]) -> Result<[f64; N]> {
    let mut child = Command::new(env::current_exe()?);
    child.args([command, "--side", side, "--database-url", &database.url()]).args(more);
    let output = child.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("{side} failed: {}", output.status).into());
    }
    let numbers: std::result::Result<Vec<f64>, _> =
        String::from_utf8(output.stdout)?.split_whitespace().map(f64::from_str).collect();
    numbers?.try_into().map_err(|_| format!("{side} printed something else than {N} numbers").into())
}

fn report(sides: &[Side], values: &[Vec<f64>], unit: &str) {
    for (side, values) in sides.iter().zip(values) {
        println!("{side}: {} {unit}", summary(values.clone()));
    }
    if let [hand, engine] = values {
        let ratios = hand.iter().zip(engine).map(|(hand, engine)| engine / hand).collect();
        println!("engine to hand-written loop, {unit}: {}", summary(ratios));
    }
}

/// The command line behind the command: `--name value`, any number of times.
struct Options(HashMap<String, String>);

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        const NAMES: &[&str] =
            &["events", "streams", "pairs", "zipf", "hand", "body", "side", "database-url", "connection"];
        let mut options = HashMap::new();
        while let Some(argument) = arguments.next() {
            let name = argument.strip_prefix("--").filter(|name| NAMES.contains(name));
            let (Some(name), Some(value)) = (name, arguments.next()) else {
                return Err(format!("{argument}: not understood, or its value is missing\n{USAGE}").into());
            };
            options.insert(name.to_owned(), value);
        }
        Ok(Self(options))
    }

    fn optional<T: FromStr>(&self, name: &str) -> Result<Option<T>> {
        let parsed =
            self.0.get(name).map(|value| value.parse().map_err(|_| format!("--{name} {value}: not understood")));
        Ok(parsed.transpose()?)
    }

    fn or<T: FromStr>(&self, name: &str, default: T) -> Result<T> {
        Ok(self.optional(name)?.unwrap_or(default))
    }

    fn required<T: FromStr>(&self, name: &str) -> Result<T> {
        self.optional(name)?.ok_or_else(|| format!("--{name} is missing\n{USAGE}").into())
    }
}
