//! Persistent subscriptions, as a client sees them. Their rules have tests of their own, beside them.

use std::time::Duration;

use kurrentdb::{
    DeletePersistentSubscriptionOptions, Error, GetPersistentSubscriptionInfoOptions,
    ListPersistentSubscriptionsOptions, NakAction, PersistentSubscriptionOptions, PersistentSubscriptionToAllOptions,
    ReplayParkedMessagesOptions, StreamPosition, SubscribeToPersistentSubscriptionOptions, SubscriptionFilter,
    SystemConsumerStrategy,
};

use super::{GROUP, STREAM, a_moment, client, create, events, from_start, group, next, soon, start, subscribe, until};

#[tokio::test]
async fn no_more_arrives_than_the_subscriber_has_room_for() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(10));
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 3).await.unwrap();
    assert_eq!(next(&mut subscription, 3).await, [(0, 0), (1, 0), (2, 0)]);
    assert_eq!(group(&server).outstanding, 3);

    a_moment().await;
    assert_eq!(group(&server).delivered, 3);
}

#[tokio::test]
async fn an_acked_event_makes_room_for_the_next() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(4));
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 2).await.unwrap();
    let first = soon(subscription.next()).await.unwrap();
    subscription.ack(&first).await.unwrap();
    assert_eq!(next(&mut subscription, 2).await, [(1, 0), (2, 0)]);
    assert_eq!(until(&server, |stats| stats.outstanding == 2).await.delivered, 3);
}

#[tokio::test]
async fn a_second_subscriber_is_refused_until_the_first_is_gone() {
    let server = start();
    let (first, second) = (client(&server), client(&server));
    create(&first, from_start()).await;
    let held = subscribe(&first, 10).await.unwrap();
    let Err(refused) = subscribe(&second, 10).await else { panic!("two at once") };
    assert_eq!(
        refused.to_string(),
        "Unmapped gRPC error: code: The system is not in a state required for the operation's execution, message: \
         Maximum subscriptions reached for subscription group readers on stream orders.."
    );
    drop(held);
    until(&server, |stats| stats.subscribers == 0).await;
    assert!(subscribe(&second, 10).await.is_ok());
}

#[tokio::test]
async fn what_a_subscriber_held_goes_to_the_next_with_its_retries() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(3));
    create(&client, from_start()).await;
    let mut first = subscribe(&client, 10).await.unwrap();
    let event = soon(first.next()).await.unwrap();
    assert_eq!(next(&mut first, 2).await, [(1, 0), (2, 0)]);
    first.ack(&event).await.unwrap();
    until(&server, |stats| stats.outstanding == 2).await;
    drop(first);
    until(&server, |stats| stats.to_retry == 2).await;
    let mut second = subscribe(&client, 10).await.unwrap();
    assert_eq!(next(&mut second, 2).await, [(1, 1), (2, 1)]);
}

#[tokio::test]
async fn a_group_is_there_once_and_a_missing_one_is_told() {
    let server = start();
    let client = client(&server);
    assert!(matches!(subscribe(&client, 10).await, Err(Error::ResourceNotFound)));
    create(&client, from_start()).await;
    let again = soon(client.create_persistent_subscription(STREAM, GROUP, &from_start())).await;
    assert!(matches!(again, Err(Error::ResourceAlreadyExists)), "{again:?}");
}

#[tokio::test]
async fn settings_that_a_server_refuses_are_refused() {
    let server = start();
    let client = client(&server);
    let batch = from_start().read_batch_size(500).history_buffer_size(500);
    let error = soon(client.create_persistent_subscription(STREAM, GROUP, &batch)).await.unwrap_err();
    assert!(error.to_string().contains("Subscription group readers on stream orders failed: '"), "{error}");
}

#[tokio::test]
async fn info_tells_settings_and_state() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(30));
    let options = from_start()
        .consumer_strategy_name(SystemConsumerStrategy::DispatchToSingle)
        .max_retry_count(7)
        .message_timeout(Duration::from_secs(90))
        .checkpoint_lower_bound(5);
    create(&client, options).await;
    let mut subscription = subscribe(&client, 20).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..20 {
        held.push(soon(subscription.next()).await.unwrap().get_original_event().id);
    }
    subscription.ack_ids(held.into_iter().take(10)).await.unwrap();
    until(&server, |stats| stats.delivered == 30).await;
    server.fast_forward(Duration::from_secs(3));

    let options = GetPersistentSubscriptionInfoOptions::default();
    let info = soon(client.get_persistent_subscription_info(STREAM, GROUP, &options)).await.unwrap();
    let settings = info.settings.unwrap();
    assert_eq!(settings.start_from, StreamPosition::Start);
    assert_eq!(settings.consumer_strategy_name, SystemConsumerStrategy::DispatchToSingle);
    assert_eq!((settings.max_retry_count, settings.max_subscriber_count), (7, 1));
    assert_eq!(settings.message_timeout, Duration::from_secs(90));
    assert_eq!(info.connections.len(), 1);
    assert_eq!((info.stats.outstanding_messages_count, info.stats.total_items), (20, 30));
    assert_eq!(info.stats.last_checkpointed_event_revision, Some(9));
    assert_eq!(info.stats.last_known_event_revision, Some(29));

    let list = ListPersistentSubscriptionsOptions::default();
    assert_eq!(soon(client.list_persistent_subscriptions_for_stream(STREAM, &list)).await.unwrap().len(), 1);
    let never = soon(client.list_persistent_subscriptions_for_stream("nothing", &list)).await;
    assert!(matches!(never, Err(Error::ResourceNotFound)), "{:?}", never.err());
}

#[tokio::test]
async fn an_update_and_a_deletion_drop_subscribers() {
    let server = start();
    let client = client(&server);
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    soon(client.update_persistent_subscription(STREAM, GROUP, &from_start().max_retry_count(3))).await.unwrap();
    let dropped = "Illegal state error: Persistent subscription has dropped";
    assert_eq!(soon(subscription.next()).await.unwrap_err().to_string(), dropped);

    let mut subscription = subscribe(&client, 10).await.unwrap();
    let options = DeletePersistentSubscriptionOptions::default();
    soon(client.delete_persistent_subscription(STREAM, GROUP, &options)).await.unwrap();
    assert_eq!(soon(subscription.next()).await.unwrap_err().to_string(), dropped);
    assert!(matches!(subscribe(&client, 10).await, Err(Error::ResourceNotFound)));
    assert_eq!(server.group(STREAM, GROUP), None);
}

#[tokio::test]
async fn parked_events_are_counted_and_replayed() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(2));
    create(&client, from_start()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    let event = soon(subscription.next()).await.unwrap();
    subscription.nack(&event, NakAction::Park, "no good").await.unwrap();
    until(&server, |stats| stats.parked == 1).await;
    assert_eq!(next(&mut subscription, 1).await, [(1, 0)]);

    let options = ReplayParkedMessagesOptions::default();
    soon(client.replay_parked_messages(STREAM, GROUP, &options)).await.unwrap();
    let again = soon(subscription.next()).await.unwrap();
    assert_eq!(again.event.as_ref().unwrap().id, event.get_original_event().id);
    assert_eq!(again.link.as_ref().unwrap().stream_id(), "$persistentsubscription-orders::readers-parked");
    subscription.ack(&again).await.unwrap();
    assert_eq!(until(&server, |stats| stats.outstanding == 1).await.parked, 0);
}

#[tokio::test]
async fn a_category_comes_with_links_and_their_revisions() {
    let server = start();
    let client = client(&server);
    server.append("order-1", events(2));
    server.append("order-2", events(1));
    let options = from_start().resolve_link_tos(true);
    soon(client.create_persistent_subscription("$ce-order", GROUP, &options)).await.unwrap();
    let options = SubscribeToPersistentSubscriptionOptions::default();
    let mut subscription =
        soon(client.subscribe_to_persistent_subscription("$ce-order", GROUP, &options)).await.unwrap();
    for (link, event) in [(0, ("order-1", 0)), (1, ("order-1", 1)), (2, ("order-2", 0))] {
        let got = soon(subscription.next()).await.unwrap();
        let original = got.event.as_ref().unwrap();
        assert_eq!((original.stream_id(), original.revision), event);
        assert_eq!(got.get_original_event().revision, link);
        subscription.ack(&got).await.unwrap();
    }
    let settled = soon(async {
        while server.group("$ce-order", GROUP).unwrap().outstanding > 0 {
            a_moment().await;
        }
    });
    settled.await;
}

#[tokio::test]
async fn a_group_on_the_log_reads_what_its_filter_wants() {
    let server = start();
    let client = client(&server);
    server.append("other", events(3));
    let last = server.append(STREAM, events(2)).position.unwrap();
    let filter = SubscriptionFilter::on_stream_name().add_prefix(STREAM);
    let options = PersistentSubscriptionToAllOptions::default().start_from(StreamPosition::Start).filter(filter);
    soon(client.create_persistent_subscription_to_all(GROUP, &options)).await.unwrap();
    let options = SubscribeToPersistentSubscriptionOptions::default();
    let mut subscription = soon(client.subscribe_to_persistent_subscription_to_all(GROUP, &options)).await.unwrap();
    assert_eq!(next(&mut subscription, 1).await, [(0, 0)]);
    let second = soon(subscription.next()).await.unwrap();
    assert_eq!(second.get_original_event().position.commit, last.commit);
}

#[tokio::test]
async fn a_start_at_the_end_sees_only_what_comes() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(3));
    create(&client, PersistentSubscriptionOptions::default()).await;
    let mut subscription = subscribe(&client, 10).await.unwrap();
    server.append(STREAM, events(1));
    assert_eq!(next(&mut subscription, 1).await, [(3, 0)]);
}
