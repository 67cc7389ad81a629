//! A double of EventStoreDB and KurrentDB: real gRPC on loopback, for unchanged clients, with faults on request.
//!
//! It follows the rules of the servers where a consumer can see them: what is in flight, what is delivered again and in
//! which order, when the position of a persistent subscription is written and what a restart makes of it, who is refused
//! and with which error.
//!
//! # Other clients
//!
//! It can be started by hand, and any client be pointed at it. The tests of this crate do so with the two below.
//!
//! ```sh
//! cargo run -p scriba-testing --features eventstore --bin eventstore-double -- --port 2113
//! ```
//!
//! Python, 3.10 or later:
//!
//! ```sh
//! python3 -m venv clients
//! clients/bin/pip install kurrentdbclient==1.3.5
//! clients/bin/python <<'END'
//! from kurrentdbclient import KurrentDBClient, NewEvent, StreamState
//!
//! client = KurrentDBClient("kurrentdb://localhost:2113?Tls=false")
//! client.append_to_stream("orders", current_version=StreamState.ANY, events=[NewEvent("Placed", b"{}")])
//! print(client.get_stream("orders"))
//! client.create_subscription_to_stream("readers", "orders")
//! with client.read_subscription_to_stream("readers", "orders") as subscription:
//!     for event in subscription:
//!         print(event.stream_position, event.type)
//!         subscription.ack(event)
//!         break
//! client.close()
//! END
//! ```
//!
//! Node, 18 or later:
//!
//! ```sh
//! npm install @kurrent/kurrentdb-client@1.3.1
//! node <<'END'
//! const { KurrentDBClient, jsonEvent } = require("@kurrent/kurrentdb-client");
//!
//! (async () => {
//!   const client = KurrentDBClient.connectionString("kurrentdb://localhost:2113?tls=false");
//!   await client.appendToStream("orders", jsonEvent({ type: "Placed", data: {} }));
//!   for await (const { event } of client.readStream("orders")) console.log(event.revision, event.type);
//!   await client.dispose();
//! })();
//! END
//! ```

mod core;
mod network;
mod node;
mod proto;
mod record;
mod service;
mod settings;
mod store;
mod subscriptions;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;

use self::core::{Core, GroupKey};
use self::network::{Mode, Network};
use self::node::{Keepalive, Manner, Node};
pub use self::record::{LogPosition, NewEvent};
use self::store::Expected;
pub use self::store::Written;

/// A server on a port of its own, with a thread of its own, until it is dropped.
///
/// Tests append by [`EventStoreDouble::append`] or through a client, and let things happen to the server: it restarts,
/// freezes, loses its leadership, drops its subscribers, forgets acks. Time runs as it does outside, unless a test stops
/// the clock and moves it.
///
/// # What it does not simulate
///
/// - a log on disk: a restart keeps what was written, always;
/// - replication: nodes of a cluster ([`EventStoreDouble::start_follower`]) share one log;
/// - writes that take time: a checkpoint and a parked event are written when that is decided;
/// - projections that lag, are reset or are switched off: links of `$ce-` and `$et-` are there when the append returns;
/// - the two buffers of a persistent subscription: it reads the log in order, however many events wait, so there is no
///   loss by a filter and no stall when nothing is acked;
/// - that `Pinned` goes past events whose consumer is full, and its errors around checkpoints; `PinnedByCorrelation`, which
///   pins by stream here;
/// - regular expressions in filters, but those that clients send to leave out system events;
/// - users, `$acl` and `$maxAge`; TLS; the HTTP API, projections, monitoring and operations;
/// - the measurements of `GetInfo`: rates are zero.
///
/// ```
/// use scriba_testing::eventstore::{EventStoreDouble, NewEvent};
///
/// let server = EventStoreDouble::start()?;
/// let written = server.append("account-1", [NewEvent::json("Deposited", r#"{"amount": 5}"#)]);
/// assert_eq!(written.revision, Some(0));
/// assert!(server.connection_string().starts_with("esdb://127.0.0.1:"));
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct EventStoreDouble {
    node: Arc<Node>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// How a persistent subscription stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupStats {
    /// Consumers that are connected.
    pub subscribers: usize,
    /// Events that consumers hold.
    pub outstanding: usize,
    /// Events that wait to go out again.
    pub to_retry: usize,
    /// Events that wait to go out for the first time.
    pub buffered: usize,
    /// Events in the parked stream.
    pub parked: usize,
    /// Events that went out, each time counted, since the group was loaded.
    pub delivered: u64,
    /// The position from which a restart would go on: a revision, or `C:commit/P:prepare`.
    pub checkpoint: Option<String>,
}

impl EventStoreDouble {
    /// Starts an empty server on a free port.
    ///
    /// # Errors
    /// When no port can be listened on or no thread be started.
    pub fn start() -> io::Result<Self> {
        Self::start_on(0)
    }

    /// Starts an empty server on a port.
    ///
    /// # Errors
    /// When the port cannot be listened on or no thread be started.
    pub fn start_on(port: u16) -> io::Result<Self> {
        Self::launch(port, Arc::new(Mutex::new(Core::new())), None, Keepalive::default())
    }

    /// Starts an empty server on a free port that asks for a sign of life where nothing comes for `interval`, and cuts the connection
    /// when there is none for `timeout`. A server does so after 10 s and 10 s, and this one too unless it is told otherwise: then
    /// a consumer that is frozen is gone.
    ///
    /// # Errors
    /// When no port can be listened on or no thread be started.
    pub fn start_with_keepalive(interval: Duration, timeout: Duration) -> io::Result<Self> {
        Self::launch(0, Arc::new(Mutex::new(Core::new())), None, Keepalive { interval, timeout })
    }

    /// Starts another node on the same log, which follows this one.
    ///
    /// # Errors
    /// When no port can be listened on or no thread be started.
    pub fn start_follower(&self) -> io::Result<Self> {
        Self::launch(0, self.node.core.clone(), Some(self.address()), self.node.keepalive)
    }

    fn launch(port: u16, core: Arc<Mutex<Core>>, leader: Option<SocketAddr>, keepalive: Keepalive) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        listener.set_nonblocking(true)?;
        let node = Arc::new(Node {
            address: listener.local_addr()?,
            core,
            manner: watch::Sender::new(Manner { leader, ..Manner::default() }),
            network: Network::default(),
            keepalive,
            ended: watch::Sender::new(0),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let (served, thread_name) = (node.clone(), format!("eventstore-double-{}", node.address.port()));
        let thread = std::thread::Builder::new().name(thread_name).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    // Dropped or sent, both mean the end.
                    _ = stopped => {}
                    () = serve(served, listener) => {}
                }
            });
            runtime.shutdown_background();
        })?;
        Ok(Self { node, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.node.address
    }

    /// What clients are given to connect. With an interval of discovery of 10 ms: the Rust clients wait for it, 500 ms by default, before they
    /// connect for the first time.
    pub fn connection_string(&self) -> String {
        format!("esdb://{}?tls=false&discoveryInterval=10", self.address())
    }

    /// Appends events, whatever the stream holds.
    ///
    /// # Panics
    /// When the stream has a tombstone.
    #[track_caller]
    pub fn append(&self, stream: &str, events: impl IntoIterator<Item = NewEvent>) -> Written {
        let mut core = self.node.core();
        let written = core.store.append(stream, Expected::Any, events.into_iter().collect());
        core.settle();
        drop(core);
        assert!(written.is_ok(), "stream {stream} is deleted for ever: append to another");
        written.unwrap_or(Written { revision: None, position: None })
    }

    /// Appends events as an explicit transaction, as old clients could: they share one commit position, which is none of
    /// their own.
    ///
    /// # Panics
    /// When the stream has a tombstone.
    #[track_caller]
    pub fn append_transaction(&self, stream: &str, events: impl IntoIterator<Item = NewEvent>) -> Written {
        let mut core = self.node.core();
        let written = core.store.append_transaction(stream, events.into_iter().collect());
        core.settle();
        drop(core);
        assert!(written.is_ok(), "stream {stream} is deleted for ever: append to another");
        written.unwrap_or(Written { revision: None, position: None })
    }

    /// Deletes a stream so that it can be written again; its revisions go on.
    pub fn delete_stream(&self, stream: &str) {
        let mut core = self.node.core();
        // One that is gone for ever is deleted already.
        let _tombstoned = core.store.delete(stream, Expected::Any);
        core.settle();
    }

    /// Deletes a stream for ever. Subscriptions to it fail until a restart, and then again.
    pub fn tombstone_stream(&self, stream: &str) {
        let mut core = self.node.core();
        let _tombstoned = core.store.tombstone(stream, Expected::Any);
        core.settle();
    }

    /// Hides the events of a stream below a revision.
    pub fn truncate_stream(&self, stream: &str, before: u64) {
        let mut core = self.node.core();
        core.store.truncate(stream, before);
        core.settle();
    }

    /// Takes truncated and deleted events out of the log, and gives back how many they were.
    pub fn scavenge(&self) -> usize {
        self.node.core().store.scavenge()
    }

    /// Takes one event out of the log. Gives back whether it was there.
    pub fn remove_event(&self, stream: &str, revision: u64) -> bool {
        self.node.core().store.remove(stream, revision)
    }

    /// How a persistent subscription stands; `$all` is the stream of those to the log. `None` when there is none.
    pub fn group(&self, stream: &str, group: &str) -> Option<GroupStats> {
        let core = self.node.core();
        let key = GroupKey::new(stream, group);
        let rules = &core.groups.get(&key)?.rules;
        let stats = rules.stats();
        Some(GroupStats {
            subscribers: rules.consumers().count(),
            outstanding: stats.outstanding,
            to_retry: stats.to_retry,
            buffered: stats.buffered,
            parked: core.parked_count(&key),
            delivered: stats.delivered,
            checkpoint: stats.checkpoint.map(|place| place.to_string()),
        })
    }

    /// Deletes a persistent subscription, as an operator would. Gives back whether there was one.
    pub fn delete_group(&self, stream: &str, group: &str) -> bool {
        let mut core = self.node.core();
        let key = GroupKey::new(stream, group);
        let exists = core.groups.contains_key(&key);
        if exists {
            core.delete_group(&key);
        }
        exists
    }

    /// Ends the server at once: connections are cut, and new ones refused until it starts again.
    pub fn stop(&self) {
        self.node.network.set(Mode::Down);
        self.reload();
    }

    /// Lets a stopped server start. Persistent subscriptions go on from what their checkpoints say.
    pub fn start_again(&self) {
        self.reload();
        self.node.network.set(Mode::Up);
    }

    /// Stops the server and starts it.
    pub fn restart(&self) {
        self.stop();
        self.start_again();
    }

    /// Cuts the connections. The server itself goes on.
    pub fn cut_connections(&self) {
        self.node.network.cut();
    }

    /// Lets nothing through, on old connections and new ones, which stay open: what a stopped process or a broken network
    /// looks like.
    pub fn freeze(&self) {
        self.node.network.set(Mode::Frozen);
    }

    /// Ends a freeze.
    pub fn thaw(&self) {
        self.node.network.set(Mode::Up);
    }

    /// Drops the subscribers of every persistent subscription, with the error of a server that does so.
    pub fn drop_all(&self) {
        self.node.core().drop_all_subscribers();
    }

    /// Ends the streams of all subscriptions, persistent and catch-up, as if all were well.
    pub fn end_streams(&self) {
        self.node.core().end_subscribers();
        self.node.ended.send_modify(|times| *times += 1);
    }

    /// Loses the next pushes of persistent subscriptions on their way: they are in flight and arrive only after a timeout.
    pub fn lose_pushes(&self, count: u64) {
        self.node.core().pushes_to_lose = count;
    }

    /// Answers calls that it is not ready, or no more. Streams that are open stay so.
    pub fn unavailable(&self, unavailable: bool) {
        self.manner(|manner| manner.unavailable = unavailable);
    }

    /// Lets acks and nacks of persistent subscriptions vanish, or no more.
    pub fn swallow_acks(&self, swallow: bool) {
        self.manner(|manner| manner.swallow_acks = swallow);
    }

    /// Never answers calls about persistent subscriptions, or no more: what some servers do just after they became leader.
    pub fn mute_subscriptions(&self, mute: bool) {
        self.manner(|manner| manner.mute_subscriptions = mute);
    }

    /// Lets only this user in, with this password. Streams that are open stay so.
    pub fn require_credentials(&self, user: &str, password: &str) {
        self.manner(|manner| manner.credentials = Some((user.to_owned(), password.to_owned())));
    }

    /// Denies everything to everybody, or no more.
    pub fn deny_access(&self, deny: bool) {
        self.manner(|manner| manner.deny_access = deny);
    }

    /// Refuses calls that need the leader, and names the one to go to. Its subscribers are dropped.
    pub fn not_leader(&self, leader: SocketAddr) {
        self.manner(|manner| manner.leader = Some(leader));
        self.node.core().reload();
    }

    /// Is the leader again.
    pub fn leader(&self) {
        self.manner(|manner| manner.leader = None);
    }

    /// Hands the leadership to another node. Persistent subscriptions drop their subscribers, and go on there from their
    /// checkpoints.
    pub fn move_leader_to(&self, other: &Self) {
        other.leader();
        self.not_leader(other.address());
    }

    /// Stops the server's clock: from now on it moves by [`EventStoreDouble::fast_forward`] only.
    pub fn stop_clock(&self) {
        self.node.core().stop_clock();
    }

    /// Moves the server's clock on, in its steps of a second, after each of which timeouts and checkpoints are due.
    pub fn fast_forward(&self, by: Duration) {
        self.node.core().fast_forward(by);
    }

    /// Persistent subscriptions live on the leader, in memory.
    fn reload(&self) {
        if self.node.manner().leader.is_none() {
            self.node.core().reload();
        }
    }

    fn manner(&self, change: impl FnOnce(&mut Manner)) {
        self.node.manner.send_modify(change);
    }
}

impl Drop for EventStoreDouble {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked said so on standard error.
            let _panicked = thread.join();
        }
    }
}

async fn serve(node: Arc<Node>, listener: std::net::TcpListener) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            eprintln!("the double cannot listen on {}: {error}", node.address);
            return;
        }
    };
    let (connections, incoming) = mpsc::channel(1);
    let (ticking, router) = (node.clone(), service::router(node.clone()));
    tokio::select! {
        accepted = node.network.clone().accept(listener, connections) => {
            if let Err(error) = accepted {
                eprintln!("the double on {} lost its port: {error}", node.address);
            }
        }
        () = tick(&ticking) => {}
        served = router.serve_with_incoming(ReceiverStream::new(incoming)) => {
            if let Err(error) = served {
                eprintln!("the double on {} ended: {error}", node.address);
            }
        }
    }
}

async fn tick(node: &Node) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Of nodes that share a log, the leader's clock is the one that counts.
        if node.manner().leader.is_none() {
            let mut core = node.core();
            if core.clock_runs() {
                core.tick();
            }
        }
    }
}
