//! The child processes from outside: started, killed, started again, stopped.

use std::env;
use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::Result;
use crate::node::NodeOptions;

/// A node stops within the shutdown timeout of its projections, 30 s.
const PATIENCE: Duration = Duration::from_secs(40);

pub(crate) struct Nodes {
    database_url: String,
    options: NodeOptions,
    running: Vec<Node>,
    killed: usize,
}

/// A child process, which does not outlive this.
struct Node(Child);

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Nodes {
    pub(crate) fn start(count: usize, database_url: &str, options: NodeOptions) -> Result<Self> {
        let mut nodes = Self { database_url: database_url.to_owned(), options, running: Vec::new(), killed: 0 };
        for _ in 0..count {
            nodes.start_one()?;
        }
        Ok(nodes)
    }

    fn start_one(&mut self) -> Result<()> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["node", "--database-url", &self.database_url]).args(self.options.arguments());
        // Takes orders; its end tells the node to stop.
        command.stdin(Stdio::piped());
        // Dead letters of panics would hold backtraces where RUST_BACKTRACE is set, and to resolve the first one takes a
        // debug build longer than a node may live here.
        command.env("RUST_LIB_BACKTRACE", "0");
        self.running.push(Node(command.spawn()?));
        Ok(())
    }

    /// Kills the one that has run longest, by SIGKILL, and starts another in its place.
    pub(crate) fn kill_one(&mut self) -> Result<()> {
        self.all_run()?;
        drop(self.running.remove(0));
        self.killed += 1;
        self.start_one()
    }

    /// Has a projection stopped and started again by each of them.
    pub(crate) fn restart(&mut self, projection: &str) -> Result<()> {
        self.all_run()?;
        for stdin in self.running.iter_mut().filter_map(|Node(child)| child.stdin.as_mut()) {
            writeln!(stdin, "{projection}")?;
        }
        Ok(())
    }

    /// How many have been killed.
    pub(crate) fn killed(&self) -> usize {
        self.killed
    }

    /// # Errors
    /// One has ended that nobody ended.
    pub(crate) fn all_run(&mut self) -> Result<()> {
        for Node(child) in &mut self.running {
            if let Some(status) = child.try_wait()? {
                return Err(format!("a node ended by itself ({status}); it said why above").into());
            }
        }
        Ok(())
    }

    /// Tells all of them to stop, and waits until they have.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        for Node(child) in &mut self.running {
            drop(child.stdin.take());
        }
        for Node(child) in &mut self.running {
            let status = loop {
                if let Some(status) = child.try_wait()? {
                    break status;
                }
                if Instant::now() > deadline {
                    return Err(format!("a node did not stop within {PATIENCE:?}").into());
                }
                sleep(Duration::from_millis(10)).await;
            };
            if !status.success() {
                return Err(format!("a node did not stop as it should ({status}); it said why above").into());
            }
        }
        Ok(())
    }
}
