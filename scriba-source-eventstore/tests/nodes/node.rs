//! A node in a process of its own: this test binary, run again with one test.

use std::env;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use scriba_core::telemetry::{Halted, Observer, OwnershipLost};
use scriba_core::{Lease, ProjectionId, Scriba};
use scriba_source_eventstore::EventStore;
use scriba_target_postgres::PgTarget;
use sqlx::PgPool;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::sleep;

use crate::stage::{LEDGER, Ledger, Log, Model, Way, eventually, millis, options};

/// Set in a node: the way, the lease in milliseconds, the database, the store.
const NODE: &str = "SCRIBA_TEST_EVENTSTORE_NODE";

/// Tells what happens to a node on its standard output.
struct Told;

impl Observer for Told {
    fn ownership_lost(&self, _: &ProjectionId, _: &OwnershipLost<'_>) {
        println!("node: ownership lost");
    }

    fn halted(&self, _: &ProjectionId, halted: &Halted<'_>) {
        println!("node: halted: {}", halted.reason);
    }
}

/// Is a node, in the process of one, until it is killed; false in any other.
pub(crate) async fn is_a_node() -> bool {
    let Ok(settings) = env::var(NODE) else { return false };
    let [way, lease, database, connection] = settings.split(' ').collect::<Vec<_>>()[..] else {
        panic!("not four settings: {settings}")
    };
    let pool = PgPool::connect(database).await.unwrap();
    let store = EventStore::new(connection).unwrap();
    let source = Way::by_name(way).source(&store);
    let scriba = Scriba::with_observers([Arc::new(Told) as Arc<dyn Observer>]);
    let lease = Lease::For(millis(lease.parse().unwrap()));
    scriba.start(Ledger, source, PgTarget::new(pool), options(lease)).await.expect("it starts");
    let told_to_stop = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
    let mut told = None;
    while !told_to_stop.is_finished() {
        let info = scriba.info(LEDGER).unwrap();
        let now = (info.state, info.role);
        if told != Some(now) {
            println!("node: {} {}", info.state, info.role);
            told = Some(now);
        }
        sleep(millis(5)).await;
    }
    scriba.shutdown().await.expect("it stops");
    println!("node: stopped");
    // A process that is about to be killed still has its connections.
    sleep(Duration::from_secs(5)).await;
    true
}

/// A node that does not outlive this.
pub(crate) struct Node {
    child: Child,
    told: Arc<Mutex<Vec<String>>>,
}

impl Node {
    /// Starts a node; `test` is one that begins with [`is_a_node`].
    pub(crate) fn start(test: &str, way: Way, lease: Duration, log: &Log, model: &Model) -> Self {
        let connection = log.double.connection_string();
        let settings = format!("{way:?} {} {} {connection}", lease.as_millis(), model.database.url());
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(NODE, settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let told = Arc::<Mutex<Vec<String>>>::default();
        let noted = Arc::clone(&told);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if let Some((_, line)) = line.split_once("node: ") {
                    noted.lock().unwrap().push(line.to_owned());
                }
            }
        });
        Self { child, told }
    }

    /// Everything it has told so far.
    pub(crate) fn told(&self) -> Vec<String> {
        self.told.lock().unwrap().clone()
    }

    /// Whether this is the last that it told of its state.
    pub(crate) fn is(&self, state: &str) -> bool {
        self.told().iter().rfind(|line| !line.starts_with("ownership lost")).is_some_and(|line| line == state)
    }

    pub(crate) async fn until_it_is(&self, state: &str) {
        let until = tokio::time::Instant::now() + Duration::from_secs(20);
        while !self.is(state) {
            assert!(tokio::time::Instant::now() < until, "it is not {state}: {:?}", self.told());
            sleep(millis(5)).await;
        }
    }

    pub(crate) async fn signal(&self, signal: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().await.unwrap().success());
    }

    /// Kills it, which it does not notice.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    /// Tells it to stop, and waits until it has.
    pub(crate) async fn stop(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"stop\n").await.unwrap();
        self.until_it_is("stopped").await;
    }
}

/// Waits until one of two nodes is active and the other one stands by; tells which is active.
pub(crate) async fn active_of(nodes: &[Node; 2]) -> usize {
    let active = || nodes.iter().position(|node| node.is("running active"));
    eventually("one is active and one stands by", async || {
        active().is_some() && nodes.iter().any(|node| node.is("running standby"))
    })
    .await;
    active().unwrap()
}
