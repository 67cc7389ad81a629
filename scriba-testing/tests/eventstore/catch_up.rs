//! Catch-up subscriptions.

use kurrentdb::{
    Position, RetryOptions, StreamPosition, SubscribeToAllOptions, SubscribeToStreamOptions, Subscription,
    SubscriptionEvent, SubscriptionFilter,
};

use super::{STREAM, client, events, soon, start};

/// What a subscription tells next, in short.
async fn next(subscription: &mut Subscription) -> String {
    match soon(subscription.next_subscription_event()).await {
        Ok(SubscriptionEvent::Confirmed(_)) => "confirmed".to_owned(),
        Ok(SubscriptionEvent::EventAppeared(event)) => {
            let event = event.get_original_event();
            format!("{}@{}", event.revision, event.stream_id())
        }
        Ok(SubscriptionEvent::Checkpoint(_)) => "checkpoint".to_owned(),
        Ok(SubscriptionEvent::CaughtUp(at)) => format!("caught up at {:?}", at.and_then(|at| at.stream_revision)),
        Ok(other) => format!("{other:?}"),
        Err(error) => format!("error: {error}"),
    }
}

async fn next_few(subscription: &mut Subscription, count: usize) -> Vec<String> {
    let mut told = Vec::new();
    for _ in 0..count {
        told.push(next(subscription).await);
    }
    told
}

#[tokio::test]
async fn a_stream_is_caught_up_with_and_followed() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(4));
    let options = SubscribeToStreamOptions::default().start_from(StreamPosition::Position(1));
    let mut subscription = client.subscribe_to_stream(STREAM, &options).await;
    assert_eq!(next_few(&mut subscription, 4).await, ["confirmed", "2@orders", "3@orders", "caught up at Some(3)"]);
    server.append(STREAM, events(1));
    assert_eq!(next(&mut subscription).await, "4@orders");
}

#[tokio::test]
async fn the_log_is_followed_from_behind_a_position() {
    let server = start();
    let client = client(&server);
    let first = server.append(STREAM, events(2)).position.unwrap();
    let filter = SubscriptionFilter::on_stream_name().add_prefix(STREAM);
    let after = Position { commit: first.commit, prepare: first.prepare };
    let options = SubscribeToAllOptions::default().position(StreamPosition::Position(after)).filter(filter);
    server.append("other", events(1));
    server.append(STREAM, events(1));
    let mut subscription = client.subscribe_to_all(&options).await;
    let told = next_few(&mut subscription, 4).await;
    let told: Vec<_> = told.iter().map(String::as_str).filter(|told| *told != "checkpoint").collect();
    assert_eq!(told, ["confirmed", "2@orders", "caught up at None"]);
}

#[tokio::test]
async fn a_checkpoint_tells_how_far_a_filter_has_looked() {
    let server = start();
    let client = client(&server);
    server.append("other", events(100));
    let filter = SubscriptionFilter::on_stream_name().add_prefix(STREAM);
    let mut subscription =
        client.subscribe_to_all(&SubscribeToAllOptions::default().position(StreamPosition::Start).filter(filter)).await;
    assert_eq!(next(&mut subscription).await, "confirmed");
    assert_eq!(next(&mut subscription).await, "checkpoint");
}

#[tokio::test]
async fn a_tombstone_is_delivered_and_ends_the_subscription() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(1));
    let options = SubscribeToStreamOptions::default().start_from(StreamPosition::Start);
    let mut subscription = client.subscribe_to_stream(STREAM, &options).await;
    assert_eq!(next_few(&mut subscription, 3).await, ["confirmed", "0@orders", "caught up at Some(0)"]);
    server.tombstone_stream(STREAM);
    assert_eq!(next(&mut subscription).await, format!("{}@orders", i64::MAX));
    assert_eq!(next(&mut subscription).await, "error: The resource you asked for was deleted");
}

#[tokio::test]
async fn a_restart_is_survived_by_a_client_that_subscribes_again() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(1));
    let options =
        SubscribeToStreamOptions::default().start_from(StreamPosition::Start).retry_options(RetryOptions::default());
    let mut subscription = client.subscribe_to_stream(STREAM, &options).await;
    assert_eq!(next_few(&mut subscription, 3).await, ["confirmed", "0@orders", "caught up at Some(0)"]);
    server.restart();
    server.append(STREAM, events(1));
    let told = next_few(&mut subscription, 2).await;
    assert_eq!(told, ["confirmed", "1@orders"]);
}
