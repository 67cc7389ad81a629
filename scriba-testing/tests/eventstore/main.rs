//! The EventStoreDB double, through the published Rust client.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod catch_up;
mod faults;
mod groups;
mod streams;

use std::future::Future;
use std::time::Duration;

use kurrentdb::{
    Client, ClientSettings, PersistentSubscription, PersistentSubscriptionEvent, PersistentSubscriptionOptions,
    StreamPosition, SubscribeToPersistentSubscriptionOptions,
};
use scriba_testing::eventstore::{EventStoreDouble, GroupStats, NewEvent};

const STREAM: &str = "orders";
const GROUP: &str = "readers";

/// Fails a wait that takes longer than anything here should.
async fn soon<F: Future>(wait: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(15), wait).await.expect("15 s were not enough")
}

/// Long enough for something to arrive, if it were on its way.
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(150)).await;
}

fn start() -> EventStoreDouble {
    EventStoreDouble::start().unwrap()
}

fn client(server: &EventStoreDouble) -> Client {
    connect(&server.connection_string())
}

fn connect(address: &str) -> Client {
    Client::new(address.parse::<ClientSettings>().unwrap()).unwrap()
}

fn events(count: usize) -> impl Iterator<Item = NewEvent> {
    (0..count).map(|number| NewEvent::json("Placed", number.to_string()))
}

fn from_start() -> PersistentSubscriptionOptions {
    PersistentSubscriptionOptions::default().start_from(StreamPosition::Start).max_subscriber_count(1)
}

async fn create(client: &Client, options: PersistentSubscriptionOptions) {
    soon(client.create_persistent_subscription(STREAM, GROUP, &options)).await.unwrap();
}

async fn subscribe(client: &Client, buffer_size: usize) -> kurrentdb::Result<PersistentSubscription> {
    let options = SubscribeToPersistentSubscriptionOptions::default().buffer_size(buffer_size);
    soon(client.subscribe_to_persistent_subscription(STREAM, GROUP, &options)).await
}

/// Revision and retries of the next events.
async fn next(subscription: &mut PersistentSubscription, count: usize) -> Vec<(u64, usize)> {
    let mut got = Vec::new();
    while got.len() < count {
        if let PersistentSubscriptionEvent::EventAppeared { retry_count, event } =
            soon(subscription.next_subscription_event()).await.unwrap()
        {
            got.push((event.get_original_event().revision, retry_count));
        }
    }
    got
}

fn group(server: &EventStoreDouble) -> GroupStats {
    server.group(STREAM, GROUP).unwrap()
}

/// Waits until the group stands as it should.
async fn until(server: &EventStoreDouble, holds: impl Fn(&GroupStats) -> bool) -> GroupStats {
    soon(async {
        loop {
            let stats = group(server);
            if holds(&stats) {
                return stats;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}
