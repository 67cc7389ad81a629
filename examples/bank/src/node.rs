//! The child process, which runs the projections: all that a program of yours would have.

use std::collections::BTreeSet;
use std::io::stdin;
use std::panic;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use scriba_core::telemetry::{BatchFailed, BatchNext, Observer};
use scriba_core::{Lease, Projection as _, ProjectionId, ProjectionOptions, Retry, Scriba, State};
use scriba_target_postgres::PgTarget;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::mpsc;
use tokio::time::interval;

use crate::Result;
use crate::log::LogOptions;
use crate::projections::{self, Balances, Entries};

/// The lease of a node that was killed has to lapse before another projects: as short as can be here, where nodes are
/// killed all the time.
const LEASE: Duration = Duration::from_secs(1);

/// How the projections are run.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct NodeOptions {
    /// Run the projections without leases: with several nodes, all of them project at once
    #[arg(long)]
    no_lease: bool,
    /// Handlers that run at once; the number of cores where nothing is said
    #[arg(long)]
    parallelism: Option<usize>,
    /// At most so many events in a commit
    #[arg(long)]
    batch: Option<usize>,
    #[command(flatten)]
    pub(crate) log: LogOptions,
}

impl NodeOptions {
    /// The command line that says the same.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut arguments = self.log.arguments();
        if self.no_lease {
            arguments.push("--no-lease".to_owned());
        }
        for (name, value) in [("--parallelism", self.parallelism), ("--batch", self.batch)] {
            arguments.extend(value.iter().flat_map(|value| [name.to_owned(), value.to_string()]));
        }
        arguments
    }

    fn projection_options(&self) -> ProjectionOptions {
        let lease = if self.no_lease { Lease::Off } else { Lease::For(LEASE) };
        // In quick succession: a node that is killed again and again begins the attempts anew each time.
        let retry = Retry::new(2, [Duration::from_millis(10)]);
        let mut options = ProjectionOptions::default().lease(lease).retry(retry);
        if let Some(parallelism) = self.parallelism {
            options = options.parallelism(parallelism);
        }
        if let Some(batch) = self.batch {
            options = options.batch_events(batch);
        }
        options
    }
}

/// The projections, as they are started by name.
const PROJECTIONS: [&str; 2] = [Balances::NAME, Entries::NAME];
/// Orders that may wait: there is hardly ever one.
const ORDERS: usize = 8;
/// How often it is looked whether a projection gets on.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Runs the projections until stdin ends. A line there is the name of a projection, which is stopped and started again.
///
/// A program without an operator at hand has `Scriba::run_until` instead, which ends with the first halt.
pub(crate) async fn run(database_url: &str, options: &NodeOptions) -> Result<()> {
    keep_quiet_about_handlers();
    // Lazily, because a database that is down just now is waited for.
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy(database_url)?;
    let scriba = Scriba::with_observers([Arc::new(Complaints) as Arc<dyn Observer>]);
    let node = Node { scriba, pool, options };
    for name in PROJECTIONS {
        node.start(name).await?;
    }
    let mut orders = orders();
    let mut looks = interval(LOOK_EVERY);
    let mut degraded = BTreeSet::new();
    loop {
        tokio::select! {
            order = orders.recv() => match order {
                Some(name) => node.restart(&name).await?,
                None => break,
            },
            _ = looks.tick() => node.say_what_does_not_get_on(&mut degraded)?,
        }
    }
    node.scriba.shutdown().await?;
    Ok(())
}

struct Node<'a> {
    scriba: Scriba,
    pool: PgPool,
    options: &'a NodeOptions,
}

impl Node<'_> {
    async fn start(&self, name: &str) -> Result<()> {
        let (log, target) = (self.options.log.source(&self.pool)?, PgTarget::new(self.pool.clone()));
        let options = self.options.projection_options();
        match name {
            Balances::NAME => self.scriba.start(Balances, log, target, options).await?,
            Entries::NAME => self.scriba.start(Entries, log, target, options).await?,
            _ => return Err(format!("there is no projection {name:?}, only {PROJECTIONS:?}").into()),
        }
        Ok(())
    }

    async fn restart(&self, name: &str) -> Result<()> {
        self.scriba.stop(name).await?;
        self.start(name).await
    }

    /// Says what `info` tells of projections that have lost their pipeline and try to get another: nobody else can tell while
    /// the tables are out of reach. One whose handler is called again is degraded too, which is nothing special here.
    fn say_what_does_not_get_on(&self, degraded: &mut BTreeSet<&str>) -> Result<()> {
        for name in PROJECTIONS {
            let info = self.scriba.info(name)?;
            match (info.state, info.degraded_since) {
                (State::Initializing, Some(since)) => {
                    let error = info.last_error.unwrap_or_default();
                    println!("       | {name} degraded since {} UTC, last error: {error}", since.format("%H:%M:%S"));
                    degraded.insert(name);
                }
                (State::Running, _) if degraded.remove(name) => println!("       | {name} recovered"),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Lines of stdin. The parent closes it to stop this process, and it ends with the parent too.
fn orders() -> mpsc::Receiver<String> {
    let (order, orders) = mpsc::channel(ORDERS);
    thread::spawn(move || {
        for line in stdin().lines().map_while(std::result::Result::ok) {
            if order.blocking_send(line).is_err() {
                return;
            }
        }
    });
    orders
}

/// Handlers panic on purpose here and their panics become dead letters; any other panic is shown as always.
fn keep_quiet_about_handlers() {
    let show = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if panic.location().is_none_or(|place| place.file() != projections::FILE) {
            show(panic);
        }
    }));
}

/// Says on stderr which batches failed, but for those that an event was taken out of as a dead letter.
struct Complaints;

impl Observer for Complaints {
    fn watches_events(&self) -> bool {
        false
    }

    fn batch_failed(&self, id: &ProjectionId, failed: &BatchFailed<'_>) {
        if failed.next != BatchNext::Isolate {
            eprintln!("{id}: a batch failed: {}", failed.message);
        }
    }
}
