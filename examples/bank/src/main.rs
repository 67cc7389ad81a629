//! A bank on Scriba: the example to copy from, and the acceptance test.
//!
//! ```text
//! cargo run --release -p bank
//! cargo run --release -p bank -- --kill-every 400 --no-lease
//! cargo run --release -p bank -- --nodes 2 --no-lease
//! cargo run --release -p bank -- --events 5000 --outage 0 --column-missing 0
//! ```
//!
//! Writers append the events of accounts to a log in Postgres, from several connections and with rollbacks. A child
//! process projects them, while they are written: balances, where amounts are added up, with the statements that are issued of
//! them, and entries, one row for each movement. Some events are bad on purpose and become dead letters: bodies that do not
//! decode, amounts that a handler refuses or panics at, deposits to accounts that were never opened, statements under a number
//! that is taken.
//!
//! On the way the projections lose the database for a while and catch up by themselves. Later a column of a read model goes
//! missing: its projection halts and says why, is mended, stopped and started, and goes on.
//!
//! At the end each row of the read models, each dead letter and each count is compared with what the log says, by SQL; any
//! difference is printed, and the exit code is 1. That has to come out right also when the child process is killed again and
//! again by SIGKILL (`--kill-every`), and when two of them run the same projections without a lease to keep them apart.
//!
//! The events may be in EventStoreDB or KurrentDB instead (`--source eventstore`, with `--connection esdb://…`, and
//! `--subscription persistent` for a subscription whose position the server keeps).
//!
//! Without `--database-url` it starts a Postgres server of its own, which takes nothing but Debian's package `postgresql`.
//!
//! | to see | read |
//! |---|---|
//! | how a projection is written | `events`, `projections` |
//! | how a program runs it | `node` |
//! | how a halt is mended | `incidents`, `node` |
//! | how progress is read from another process | `report` |
//! | the rest of the experiment | `log`, `writer`, `nodes`, `relay`, `database`, this file |

mod database;
mod events;
mod incidents;
mod log;
mod node;
mod nodes;
mod projections;
mod relay;
mod report;
mod writer;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use scriba_core::Scriba;
use scriba_target_postgres::PgTarget;
use tokio::time::{MissedTickBehavior, interval};

use crate::database::Database;
use crate::incidents::{Incidents, Plan, describe_halt};
use crate::node::NodeOptions;
use crate::nodes::Nodes;
use crate::relay::Relay;
use crate::report::Progress;
use crate::writer::{Tickets, Work};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Error>;

const LOOK_EVERY: Duration = Duration::from_millis(100);
/// When nothing moves for so long, the run is given up.
const STALLED_AFTER: Duration = Duration::from_mins(1);
/// Connections beside those of the writers: one that looks and one that checks.
const SPARE_CONNECTIONS: u32 = 2;

/// A bank on Scriba: events are written and projected at the same time, and at the end the sums have to agree.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Hidden>,
    #[command(flatten)]
    run: Run,
}

#[derive(Subcommand)]
enum Hidden {
    /// The child process
    #[command(hide = true)]
    Node {
        #[arg(long)]
        database_url: String,
        #[command(flatten)]
        options: NodeOptions,
    },
}

#[derive(clap::Args)]
struct Run {
    #[command(flatten)]
    work: Work,
    /// Kill a node by SIGKILL so long, in milliseconds, after the nodes have got on since the last time; 0 is never. Another
    /// goes on when the lease of the killed one has lapsed, which takes 1 s; with --no-lease at once
    #[arg(long, value_name = "MS", default_value_t = 0)]
    kill_every: u64,
    /// Child processes that run the same projections
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    nodes: u8,
    #[command(flatten)]
    node: NodeOptions,
    #[command(flatten)]
    plan: Plan,
    /// An empty database to use [default: on a server of its own]
    #[arg(long)]
    database_url: Option<String>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.command {
        Some(Hidden::Node { database_url, options }) => node::run(&database_url, &options).await,
        None => arguments.run.run().await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

impl Run {
    async fn run(mut self) -> Result<()> {
        let _double = self.node.log.start_double()?;
        let database = Database::create(self.database_url.clone(), self.work.connections() + SPARE_CONNECTIONS).await?;
        let (relay, url) = if self.plan.outage > 0 {
            let (relay, url) = Relay::start(&database.url)?;
            (Some(relay), url)
        } else {
            (None, database.url.clone())
        };
        let mut nodes = Nodes::start(self.nodes.into(), &url, self.node.clone())?;
        let tickets = Arc::new(Tickets::new(self.work));
        let incidents = Incidents::new(self.plan, database.pool.clone(), relay, Arc::clone(&tickets));
        self.supervise(&database, &mut nodes, tickets, incidents).await?;
        let killed = nodes.killed();
        nodes.stop().await?;
        println!("killed {killed} times");
        self.node.log.copy_to_table(&database.pool).await?;
        report::conclude(&database.pool).await?;
        database.pool.close().await;
        Ok(())
    }

    /// Has the events written, kills nodes, has things go wrong, and returns when the projections have accounted for everything.
    async fn supervise(
        &self,
        database: &Database,
        nodes: &mut Nodes,
        tickets: Arc<Tickets>,
        mut incidents: Incidents,
    ) -> Result<()> {
        let scriba = Scriba::new();
        scriba.attach(PgTarget::new(database.pool.clone()));
        let mut log = self.node.log.source(&database.pool)?.inspector().await?;
        let mut writing = tokio::spawn(self.work.run(tickets, self.node.log.clone(), database.pool.clone()));
        let mut written = false;
        let mut looks = interval(LOOK_EVERY);
        let mut kills = interval(Duration::from_millis(self.kill_every.max(1)));
        kills.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut progress = Progress::new();
        loop {
            tokio::select! {
                done = &mut writing, if !written => {
                    done??;
                    written = true;
                }
                // A node that has not got on yet is let live, and for the whole time from then on: else one that lives
                // shorter than a lease would never be the one that projects, and one that starts slowly would be killed at
                // its first event.
                _ = kills.tick(), if self.kill_every > 0 && progress.got_on() => {
                    nodes.kill_one()?;
                    progress.begin_anew();
                }
                _ = looks.tick() => {
                    nodes.all_run()?;
                    let head = log.head().await?;
                    let got_on = progress.got_on();
                    progress.note(report::look(&scriba).await?, head);
                    if progress.got_on() && !got_on {
                        kills.reset();
                    }
                    if let Some(halted) = progress.halted().find(|halted| !incidents.explains(halted)) {
                        return Err(format!("halted: {}", describe_halt(halted)).into());
                    }
                    incidents.step(&progress, written, nodes).await?;
                    let done = written && incidents.are_over() && progress.caught_up();
                    progress.print_if_due(nodes.killed(), done);
                    if done {
                        return Ok(());
                    }
                    if progress.stalled_for() > STALLED_AFTER {
                        return Err(format!("no event was handled for {} s", STALLED_AFTER.as_secs()).into());
                    }
                }
            }
        }
    }
}
