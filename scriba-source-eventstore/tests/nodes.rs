//! Nodes in processes of their own, on one store and one read model: killed, frozen and replaced, and how long it takes until another
//! one goes on.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

#[path = "nodes/node.rs"]
mod node;
#[path = "nodes/stage.rs"]
mod stage;

use std::sync::Arc;
use std::time::Duration;

use node::{Node, active_of, is_a_node};
use scriba_testing::eventstore::EventStoreDouble;
use stage::{Log, Model, Way, eventually, millis};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

const SECOND: Duration = Duration::from_secs(1);
/// The lease that nodes come with: no take-over in a test can have waited for it.
const LONG: Duration = Duration::from_secs(30);
/// What is promised behind the end of the place or of the lease.
const PROMISED: Duration = Duration::from_secs(5);
/// No wait is longer where there is no promise.
const PATIENCE: Duration = Duration::from_secs(20);
/// The test that a node runs.
const NODE: &str =
    "with_a_catch_up_subscription_every_node_that_is_killed_is_followed_within_its_lease_and_five_seconds";

/// Appends an event every ten milliseconds until it is aborted.
fn flow(log: &Arc<Log>, way: Way) -> JoinHandle<()> {
    let log = Arc::clone(log);
    tokio::spawn(async move {
        loop {
            log.append_many(way, 1);
            sleep(millis(10)).await;
        }
    })
}

/// Says how long take-overs took.
fn print(what: &str, mut took: Vec<Duration>) {
    took.sort_unstable();
    let (min, median, max) = (took[0], took[took.len() / 2], took[took.len() - 1]);
    println!("{what}, {} times: {min:.2?} at least, {median:.2?} in the middle, {max:.2?} at most", took.len());
}

/// Waits until everything that was appended is shown, and compares.
async fn assert_conserved(log: &Log, model: &Model, way: Way) {
    let events = log.read(way);
    model.until(events.last().unwrap().0.try_into().unwrap(), PATIENCE).await;
    // Time for what must not come.
    sleep(millis(300)).await;
    model.assert_shows(&events).await;
}

/// Kills the active one of two nodes while events flow, again and again, each time with a new one in its place.
async fn kill_again_and_again(way: Way, kills: usize, lease: Duration, bound: Duration) {
    let (log, model) = (Arc::new(Log::new()), Model::new().await);
    let flowing = flow(&log, way);
    let start = || Node::start(NODE, way, lease, &log, &model);
    let mut nodes = [start(), start()];
    let mut took = Vec::new();
    for kill in 0..kills {
        let active = active_of(&nodes).await;
        // At any moment of a batch.
        sleep(Duration::from_micros(kill as u64 * 7_919 % 50_000)).await;
        let killed = Instant::now();
        std::mem::replace(&mut nodes[active], start()).kill().await;
        let appended = log.append_many(way, 1);
        model.until(appended, bound).await;
        took.push(killed.elapsed());
    }
    flowing.abort();
    let _ = flowing.await;
    assert_conserved(&log, &model, way).await;
    assert!(took.iter().all(|took| *took < bound), "{took:?}");
    print(&format!("{way:?}: killed"), took);
}

/// Case E4.
#[tokio::test(flavor = "multi_thread")]
async fn with_a_persistent_subscription_every_node_that_is_killed_is_followed_within_five_seconds() {
    kill_again_and_again(Way::PersistentCategory, 20, LONG, PROMISED).await;
}

/// Case E4.
#[tokio::test(flavor = "multi_thread")]
async fn with_a_catch_up_subscription_every_node_that_is_killed_is_followed_within_its_lease_and_five_seconds() {
    if is_a_node().await {
        return;
    }
    kill_again_and_again(Way::Category, 8, SECOND, SECOND + PROMISED).await;
}

/// Freezes a node, inside its transaction or with nothing to do, and wakes it up when another one has taken over.
async fn freeze(way: Way, lease: Duration, in_transaction: bool) {
    // Of the server: half of it is the time for an answer.
    let keepalive = 2 * SECOND;
    let (log, model) = (Log::of(EventStoreDouble::start_with_keepalive(SECOND, SECOND).unwrap()), Model::new().await);
    let start = || Node::start(NODE, way, lease, &log, &model);
    let mut frozen = start();
    frozen.until_it_is("running active").await;
    let standby = start();
    standby.until_it_is("running standby").await;
    model.until(log.append_many(way, 3), PATIENCE).await;

    if in_transaction {
        log.append("account-1", "Slow");
        let sleeps = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                      AND application_name = 'scriba ledger v1' AND wait_event = 'PgSleep'";
        eventually("it is inside its transaction", async || model.count(sleeps).await == 1).await;
    }
    frozen.signal("-STOP").await;
    let stopped = Instant::now();
    let appended = log.append_many(way, 1);
    model.until(appended, PATIENCE).await;
    let took = stopped.elapsed();
    let ends = if way.is_persistent() { keepalive } else { lease };
    // The event that was in its transaction takes its second again.
    let again = if in_transaction { SECOND } else { Duration::ZERO };
    assert!(took < ends + PROMISED + again, "{took:?}");
    println!("{way:?}: frozen, in a transaction: {in_transaction}: {took:.2?}");
    standby.until_it_is("running active").await;

    frozen.signal("-CONT").await;
    eventually("it says that it lost the projection", async || {
        frozen.told().iter().any(|line| line == "ownership lost")
    })
    .await;
    frozen.until_it_is("running standby").await;
    log.append_many(way, 20);
    assert_conserved(&log, &model, way).await;
    assert!(!frozen.told().iter().any(|line| line.contains("halted")), "{:?}", frozen.told());
    assert_eq!((frozen.is("running standby"), standby.is("running active")), (true, true));

    standby.kill().await;
    frozen.until_it_is("running active").await;
    log.append_many(way, 3);
    assert_conserved(&log, &model, way).await;
    frozen.stop().await;
}

/// Case E1.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_subscriber_is_followed_when_the_server_has_ended_its_place_and_stands_by_when_it_wakes_up() {
    freeze(Way::PersistentCategory, LONG, false).await;
}

/// Case E1. Its row locks go two thirds of a lease after its last statement.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_frozen_inside_its_transaction_is_followed_when_the_server_has_ended_its_place() {
    freeze(Way::PersistentCategory, 3 * SECOND, true).await;
}

/// Case E1.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_frozen_with_a_catch_up_subscription_is_followed_when_its_lease_has_lapsed() {
    freeze(Way::Category, SECOND, false).await;
}

/// Case E1.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_frozen_inside_its_transaction_with_a_catch_up_subscription_is_followed_when_its_lease_has_lapsed() {
    freeze(Way::Category, SECOND, true).await;
}

/// Stops the active node in good order and kills it, each time with a new one in its place.
async fn deploy(way: Way) {
    // A standby asks at most so often, and this is less than two asks; the rest is for the take-over.
    let bound = millis(2_250) + millis(1_500);
    let (log, model) = (Arc::new(Log::new()), Model::new().await);
    let flowing = flow(&log, way);
    let start = || Node::start(NODE, way, LONG, &log, &model);
    let mut nodes = [start(), start()];
    let (mut took, mut stopping) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let active = active_of(&nodes).await;
        let told = Instant::now();
        nodes[active].stop().await;
        stopping.push(told.elapsed());
        let stopped = Instant::now();
        let appended = log.append_many(way, 1);
        model.until(appended, PATIENCE).await;
        took.push(stopped.elapsed());
        assert!(told.elapsed() < PROMISED, "{:?}", told.elapsed());
        std::mem::replace(&mut nodes[active], start()).kill().await;
    }
    flowing.abort();
    let _ = flowing.await;
    assert_conserved(&log, &model, way).await;
    assert!(took.iter().all(|took| *took < bound), "{took:?}");
    print(&format!("{way:?}: told to stop, until it has"), stopping);
    print(&format!("{way:?}: stopped, until the other goes on"), took);
}

/// Case E4.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_rolling_deploy_a_node_that_stops_hands_over_when_the_standby_asks_next() {
    deploy(Way::PersistentCategory).await;
    deploy(Way::Category).await;
}
