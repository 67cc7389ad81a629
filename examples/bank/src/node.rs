//! The child process, which runs the projections: all that a program of yours would have.

use std::io::{Read, stdin};
use std::panic;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use scriba_core::telemetry::{BatchFailed, Degraded, Observer};
use scriba_core::{Lease, ProjectionId, ProjectionOptions, Retry, Scriba};
use scriba_target_postgres::PgTarget;
use sqlx::postgres::PgPoolOptions;

use crate::Result;
use crate::database::log;
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
}

impl NodeOptions {
    /// The command line that says the same.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
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

/// Runs the projections until stdin ends.
pub(crate) async fn run(database_url: &str, options: &NodeOptions) -> Result<()> {
    keep_quiet_about_handlers();
    let pool = PgPoolOptions::new().max_connections(2).connect(database_url).await?;
    let target = PgTarget::new(pool.clone());
    let scriba = Scriba::with_observers([Arc::new(Complaints) as Arc<dyn Observer>]);
    scriba.start(Balances, log(pool.clone()), target.clone(), options.projection_options()).await?;
    scriba.start(Entries, log(pool), target, options.projection_options()).await?;
    scriba.run_until(end_of_stdin()).await?;
    Ok(())
}

/// The parent closes it to stop this process, and it ends with the parent too.
async fn end_of_stdin() {
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    thread::spawn(move || {
        let _ = stdin().read_to_end(&mut Vec::new());
        drop(end);
    });
    let _ = ended.await;
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

/// Says on stderr what keeps a projection from getting on.
struct Complaints;

impl Observer for Complaints {
    fn watches_events(&self) -> bool {
        false
    }

    fn batch_failed(&self, id: &ProjectionId, failed: &BatchFailed<'_>) {
        eprintln!("{id}: a batch failed: {}", failed.message);
    }

    fn degraded(&self, id: &ProjectionId, degraded: &Degraded<'_>) {
        eprintln!("{id}: degraded: {}", degraded.last_error);
    }
}
