//! Groups that exist, that are deleted, and what the server says of them.

use std::time::Duration;

use kurrentdb::{GetPersistentSubscriptionInfoOptions, PersistentSubscriptionOptions, SystemConsumerStrategy};
use scriba_core::{CommandError, State};
use tokio::time::sleep;

use super::stage::{
    CATEGORY_STREAM, GROUP, Gate, Kind, Ledger, MESSAGE_TIMEOUT, Stage, assert_says, eventually, id, least_group,
    millis,
};

/// Case A2.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_would_lose_events_halts_with_each_setting_named_and_deleting_it_mends_that() {
    let least = least_group;
    let groups: [(&str, PersistentSubscriptionOptions, &[&str]); 5] = [
        (
            "pinned",
            least().consumer_strategy_name(SystemConsumerStrategy::Pinned),
            &["consumer strategy is Pinned, wanted DispatchToSingle"],
        ),
        (
            "shared by two",
            least().consumer_strategy_name(SystemConsumerStrategy::RoundRobin).max_subscriber_count(2),
            &["max subscriber count is 2, wanted 1"],
        ),
        ("a small retry limit", least().max_retry_count(10), &["max retry count is 10, wanted 2147483647"]),
        (
            "a small timeout",
            least().message_timeout(MESSAGE_TIMEOUT.saturating_sub(millis(1))),
            &["message timeout is 3599999 ms, wanted 2147483647 ms, at least 3600000 ms"],
        ),
        (
            "as clients make it",
            PersistentSubscriptionOptions::default()
                .consumer_strategy_name(SystemConsumerStrategy::Pinned)
                .max_subscriber_count(2),
            &[
                "consumer strategy is Pinned",
                "max subscriber count is 2",
                "message timeout is 30000 ms",
                "max retry count is 10",
                "resolve link tos is off",
            ],
        ),
    ];
    let stage = Stage::new().await;
    for (what, options, named) in groups {
        stage.server.delete_group(CATEGORY_STREAM, GROUP);
        stage.create_group(options).await;
        stage.append(10);
        let ledger = Ledger::new();
        let node = stage.start(Kind::Persistent, &ledger).await;
        let reason = node.halted().await;
        assert_says(&reason, &["group ledger_v1 on stream $ce-account of the store", "delete it and start again"]);
        assert_says(&reason, named);
        assert_eq!(reason.matches("wanted").count(), named.len(), "{what}: {reason}");
        assert_eq!(ledger.calls(), 0, "{what}");

        assert!(stage.server.delete_group(CATEGORY_STREAM, GROUP));
        node.stop().await;
        node.start(stage.source(Kind::Persistent), &stage, &ledger).await;
        stage.conserved(&node).await;
        assert_eq!(ledger.calls(), 10, "{what}: the group began above the watermark");
        node.stop().await;
    }
}

/// Case A12.
#[tokio::test(flavor = "multi_thread")]
async fn after_1000_events_the_server_waits_for_no_ack_and_has_moved_its_checkpoint() {
    let stage = Stage::new().await;
    stage.append(600);
    let node = stage.start(Kind::Persistent, &Ledger::new()).await;
    node.until(300).await;
    stage.append(400);
    stage.conserved(&node).await;
    eventually("all is acked", || stage.group().outstanding == 0).await;
    stage.server.fast_forward(Duration::from_secs(2));
    let client = stage.client();
    let options = GetPersistentSubscriptionInfoOptions::default();
    let info = client.get_persistent_subscription_info(CATEGORY_STREAM, GROUP, &options).await.unwrap();
    let stats = info.stats;
    assert_eq!(
        (
            stats.outstanding_messages_count,
            stats.total_in_flight_messages,
            stats.retry_buffer_count,
            stats.parked_message_count
        ),
        (0, 0, 0, 0)
    );
    assert_eq!((stats.last_checkpointed_event_revision, stats.last_known_event_revision), (Some(999), Some(999)));
    assert_eq!(stage.group().delivered, 1_000, "each of them once");
    node.stop().await;
}

/// Case A15.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_deleted_under_a_projection_is_made_again_from_the_watermark_and_never_from_the_end() {
    let stage = Stage::new().await;
    stage.append(40);
    let gate = Gate::shut_from(25);
    let node = stage.start(Kind::Persistent, &gate.ledger()).await;
    node.until(24).await;
    // The rest is in flight, and more is appended while there is no group.
    assert!(stage.server.delete_group(CATEGORY_STREAM, GROUP));
    stage.append(20);
    eventually("the group is there again", || stage.server.group(CATEGORY_STREAM, GROUP).is_some()).await;
    gate.open();
    stage.conserved(&node).await;

    // With nothing in flight, and again and again.
    for _ in 0..3 {
        assert!(stage.server.delete_group(CATEGORY_STREAM, GROUP));
        stage.append(5);
        stage.conserved(&node).await;
    }
    // In a pause nobody listens.
    node.scriba.pause(id()).await.unwrap();
    assert!(stage.server.delete_group(CATEGORY_STREAM, GROUP));
    stage.append(5);
    // Whoever has noticed that the subscription is gone is initializing for a moment, which cannot be resumed.
    while let Err(error) = node.scriba.resume(id()).await {
        assert!(matches!(error, CommandError::InvalidState { .. }), "{error}");
        sleep(millis(5)).await;
    }
    stage.conserved(&node).await;
    assert_eq!(node.info().state, State::Running);
    eventually("all is acked", || stage.group().outstanding == 0).await;
    assert!(stage.group().delivered <= 5, "the last group began above the watermark: {:?}", stage.group());
    node.stop().await;
}
