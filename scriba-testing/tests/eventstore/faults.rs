//! What tests can let happen to the server, as a client sees it.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use kurrentdb::{AppendToStreamOptions, Error, EventData};
use tokio::time::timeout;

use super::{
    Client, GROUP, STREAM, a_moment, client, connect, create, events, from_start, group, next, soon, start, subscribe,
    until,
};

const SECONDS_3: Duration = Duration::from_secs(3);

async fn append(client: &Client) -> kurrentdb::Result<u64> {
    let event = EventData::json("Placed", &0).unwrap();
    let written = soon(client.append_to_stream(STREAM, &AppendToStreamOptions::default(), event)).await?;
    Ok(written.next_expected_version)
}

/// Subscribes as soon as it can be done again.
async fn subscribe_again(client: &Client) -> kurrentdb::PersistentSubscription {
    soon(async {
        loop {
            match subscribe(client, 100).await {
                Ok(subscription) => return subscription,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_restart_goes_on_from_the_checkpoint() {
    let server = start();
    server.stop_clock();
    let client = client(&server);
    server.append(STREAM, events(30));
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 100).await.unwrap();
    let mut ids = Vec::new();
    for _ in 0..30 {
        ids.push(soon(subscription.next()).await.unwrap().get_original_event().id);
    }
    subscription.ack_ids(ids[..12].to_vec()).await.unwrap();
    until(&server, |stats| stats.outstanding == 18).await;
    server.fast_forward(SECONDS_3);
    assert_eq!(group(&server).checkpoint.as_deref(), Some("11"));
    // Acked, and too few for a checkpoint.
    subscription.ack_ids(ids[12..15].to_vec()).await.unwrap();
    until(&server, |stats| stats.outstanding == 15).await;

    server.restart();
    assert!(matches!(soon(subscription.next()).await, Err(Error::ServerError(_))));
    let mut subscription = subscribe_again(&client).await;
    assert_eq!(next(&mut subscription, 18).await, (12..30).map(|revision| (revision, 0)).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_stopped_server_is_not_there_until_it_starts() {
    let server = start();
    let client = client(&server);
    assert_eq!(append(&client).await.unwrap(), 0);
    server.stop();
    for _ in 0..2 {
        // The first may have been on its way over the old connection.
        let outcome = append(&client).await;
        assert!(matches!(outcome, Err(Error::ServerError(_) | Error::Grpc { .. })), "{outcome:?}");
    }
    let refused = std::net::TcpStream::connect(server.address()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    server.start_again();
    assert_eq!(append(&client).await.unwrap(), 1);
}

#[tokio::test]
async fn dropped_subscribers_are_told_and_may_come_back() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(1));
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    assert_eq!(next(&mut subscription, 1).await, [(0, 0)]);
    server.drop_all();
    let error = soon(subscription.next()).await.unwrap_err();
    assert_eq!(error.to_string(), "Illegal state error: Persistent subscription has dropped");
    let mut subscription = subscribe(&client, 10).await.unwrap();
    assert_eq!(next(&mut subscription, 1).await, [(0, 1)]);
}

#[tokio::test]
async fn streams_end_as_if_all_were_well() {
    let server = start();
    let client = client(&server);
    create(&client, from_start()).await;
    let mut group = subscribe(&client, 10).await.unwrap();
    server.end_streams();
    let ended = std::panic::AssertUnwindSafe(async { next(&mut group, 1).await }).catch_unwind().await;
    assert!(ended.is_err(), "this client panics here: {ended:?}");
}

#[tokio::test]
async fn a_frozen_server_says_nothing_and_goes_on_when_thawed() {
    let server = start();
    let client = client(&server);
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    server.freeze();
    server.append(STREAM, events(1));
    assert!(timeout(Duration::from_millis(300), next(&mut subscription, 1)).await.is_err());
    server.thaw();
    assert_eq!(next(&mut subscription, 1).await, [(0, 0)]);
}

#[tokio::test]
async fn a_server_that_is_not_ready_says_so() {
    let server = start();
    let client = client(&server);
    server.unavailable(true);
    let error = append(&client).await.unwrap_err();
    assert!(error.to_string().contains("Server Is Not Ready"), "{error}");
    server.unavailable(false);
    assert_eq!(append(&client).await.unwrap(), 0);
}

#[tokio::test]
async fn a_wrong_password_is_refused() {
    let server = start();
    server.require_credentials("admin", "changeit");
    let address = |login: &str| format!("esdb://{login}@{}?tls=false", server.address());
    assert!(matches!(append(&connect(&address("admin:wrong"))).await, Err(Error::AccessDenied)));
    assert!(matches!(append(&client(&server)).await, Err(Error::AccessDenied)));
    assert_eq!(append(&connect(&address("admin:changeit"))).await.unwrap(), 0);
}

#[tokio::test]
async fn access_can_be_denied() {
    let server = start();
    let client = client(&server);
    server.deny_access(true);
    let denied = soon(client.create_persistent_subscription(STREAM, GROUP, &from_start())).await;
    assert!(matches!(denied, Err(Error::AccessDenied)), "{denied:?}");
}

#[tokio::test]
async fn a_client_follows_the_leader() {
    let first = start();
    let second = first.start_follower().unwrap();
    let client = client(&first);
    first.append(STREAM, events(3));
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    assert_eq!(next(&mut subscription, 3).await.len(), 3);

    first.move_leader_to(&second);
    assert!(matches!(soon(subscription.next()).await, Err(Error::IllegalStateError(_))));
    let error = append(&client).await.unwrap_err();
    assert!(
        matches!(&error, Error::NotLeaderException(leader) if leader.port == u32::from(second.address().port())),
        "{error}"
    );
    let mut subscription = subscribe_again(&client).await;
    assert_eq!(next(&mut subscription, 3).await, [(0, 0), (1, 0), (2, 0)]);
    assert_eq!(append(&client).await.unwrap(), 3);
}

#[tokio::test]
async fn a_cluster_is_discovered_by_gossip() {
    let first = start();
    let second = first.start_follower().unwrap();
    let address = format!("esdb+discover://{}?tls=false", second.address());
    assert_eq!(append(&connect(&address)).await.unwrap(), 0);
}

#[tokio::test]
async fn swallowed_acks_are_as_if_never_sent() {
    let server = start();
    server.stop_clock();
    let client = client(&server);
    server.append(STREAM, events(1));
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    server.swallow_acks(true);
    let event = soon(subscription.next()).await.unwrap();
    subscription.ack(&event).await.unwrap();
    a_moment().await;
    assert_eq!(group(&server).outstanding, 1);
    server.fast_forward(Duration::from_secs(31));
    assert_eq!(next(&mut subscription, 1).await, [(0, 1)]);
}

#[tokio::test]
async fn a_lost_push_comes_back_by_timeout_behind_later_events() {
    let server = start();
    server.stop_clock();
    let client = client(&server);
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    server.lose_pushes(1);
    server.append(STREAM, events(3));
    assert_eq!(next(&mut subscription, 2).await, [(1, 0), (2, 0)]);
    server.fast_forward(Duration::from_secs(31));
    assert_eq!(next(&mut subscription, 1).await, [(0, 1)]);
}

#[tokio::test]
async fn a_group_that_is_muted_is_never_answered() {
    let server = start();
    let client = client(&server);
    create(&client, from_start()).await;
    server.mute_subscriptions(true);
    let waited = timeout(Duration::from_millis(300), subscribe(&client, 10)).await;
    assert!(waited.is_err());
    assert_eq!(append(&client).await.unwrap(), 0);
}

#[tokio::test]
async fn a_cut_connection_frees_the_place_of_its_subscriber() {
    let server = start();
    let client = client(&server);
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    server.cut_connections();
    assert!(matches!(soon(subscription.next()).await, Err(Error::ServerError(_))));
    until(&server, |stats| stats.subscribers == 0).await;
}

#[tokio::test]
async fn the_time_of_a_running_clock_passes() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(1));
    create(&client, from_start().message_timeout(Duration::from_millis(500))).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    let begun = Instant::now();
    assert_eq!(next(&mut subscription, 2).await, [(0, 0), (0, 1)]);
    assert!(begun.elapsed() >= Duration::from_millis(500), "{:?}", begun.elapsed());
}
