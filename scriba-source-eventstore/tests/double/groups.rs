//! Groups: made, refused, held, left, deleted; acks.

use std::time::Duration;

use scriba_core::source::SourceError;
use scriba_core::{ProjectionId, Source};
use tokio::time::Instant;

use super::bed::{GROUP, Reader, STREAM, Server, assert_says, halted, id, request};
use crate::client::{Client, PersistentSubscriptionOptions, StreamPosition, SystemConsumerStrategy};

/// Makes the group of a reader as an operator would.
async fn create(server: &Server, options: PersistentSubscriptionOptions) {
    let client = Client::new(server.double.connection_string().parse().unwrap()).unwrap();
    client.create_persistent_subscription(STREAM, GROUP, &options).await.unwrap();
}

/// What the source creates, nearly.
fn safe() -> PersistentSubscriptionOptions {
    PersistentSubscriptionOptions::default()
        .resolve_link_tos(true)
        .start_from(StreamPosition::Start)
        .message_timeout(Duration::from_hours(1))
        .max_retry_count(1_000)
        .max_subscriber_count(1)
        .consumer_strategy_name(SystemConsumerStrategy::RoundRobin)
}

/// Case A2.
#[tokio::test]
async fn a_group_with_unsafe_settings_is_refused_with_each_of_them_named() {
    let server = Server::new();
    create(&server, PersistentSubscriptionOptions::default().consumer_strategy_name(SystemConsumerStrategy::Pinned))
        .await;
    let source = server.persistent();
    for refusal in [halted(source.claim(&id(), 10).await), halted(Reader::try_start(&source, None).await)] {
        let parts = [
            "group reader_v1 on stream account-1",
            "consumer strategy is Pinned, wanted DispatchToSingle",
            "max subscriber count is unlimited, wanted 1",
            "message timeout is 30000 ms",
            "max retry count is 10",
            "resolve link tos is off",
            "delete it",
        ];
        assert_says(&refusal, &parts);
    }
}

#[tokio::test]
async fn a_group_that_an_operator_made_safely_is_joined() {
    let server = Server::new();
    create(&server, safe()).await;
    server.append(3);
    let mut reader = Reader::start(&server.persistent(), None).await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [0, 1, 2]);
}

#[tokio::test]
async fn a_second_subscriber_is_held_until_the_first_is_gone() {
    let server = Server::new();
    server.append(3);
    let (one, other) = (server.persistent(), server.persistent());
    assert!(one.claim(&id(), 10).await.unwrap().is_none(), "a group before the first subscription");
    let reader = Reader::start(&one, None).await;
    for held in [other.claim(&id(), 10).await.err(), Reader::try_start(&other, None).await.err()] {
        let Some(SourceError::Held { holder }) = held else { panic!("let in: {held:?}") };
        assert_says(&holder, &["group reader_v1 on stream account-1"]);
    }
    // Another projection has a group of its own, another version too.
    for id in [ProjectionId::from("other"), ProjectionId::new("reader", 2)] {
        assert!(other.claim(&id, 10).await.unwrap().is_none());
    }
    drop(reader);
    // Though the server takes a moment to notice.
    let place = other.claim(&id(), 10).await.unwrap().unwrap();
    let (request, recorder) = request(None, None);
    let mut reader = Reader::of(place.subscribe(request).await.unwrap(), recorder);
    reader.until(2).await;
    assert_eq!(reader.positions(), [0, 1, 2]);
}

#[tokio::test]
async fn two_projections_that_share_a_group_are_never_both_let_in() {
    let server = Server::new();
    let source = server.persistent().group("shared");
    let _reader = Reader::start(&source, None).await;
    assert!(matches!(source.claim(&ProjectionId::from("other"), 10).await, Err(SourceError::Held { .. })));
}

#[tokio::test]
async fn the_server_lets_out_more_than_the_engine_may_have_in_flight() {
    let server = Server::new();
    server.append(2_000);
    let source = server.persistent();
    let reader = Reader::start(&source, None).await;
    server.until_group("a tenth more than 1,000", |group| group.outstanding == 1_100).await;
    drop(reader);
    let _reader = Reader::start(&source.buffer_size(7), None).await;
    server.until_group("what was asked for", |group| group.outstanding == 7).await;
}

#[tokio::test]
async fn a_group_begins_above_the_watermark_it_is_made_with() {
    let server = Server::new();
    server.append(6);
    let mut reader = Reader::start(&server.persistent(), Some(2)).await;
    reader.until(5).await;
    assert_eq!((reader.positions(), reader.passed()), (vec![3, 4, 5], vec![]));
}

#[tokio::test]
async fn acks_that_are_followed_by_a_drop_arrive() {
    let server = Server::new();
    let source = server.persistent();
    let mut after = None;
    for round in 0..50_u64 {
        server.append(1);
        let mut reader = Reader::start(&source, after).await;
        reader.until(round).await;
        assert_eq!(reader.positions(), [round], "delivered again though it was acked");
        reader.ack(round).await;
        after = Some(round);
    }
    server.until_group("everything is acked", |group| group.outstanding == 0 && group.to_retry == 0).await;
}

#[tokio::test]
async fn acks_reach_as_far_as_they_say() {
    let server = Server::new();
    server.append(1_500);
    let mut reader = Reader::start(&server.persistent(), None).await;
    reader.until(999).await;
    reader.ack(699).await;
    server.until_group("acked up to 699", |group| group.outstanding == 800).await;
    reader.until(1_499).await;
    reader.ack(1_499).await;
    server.until_group("all acked", |group| group.outstanding == 0).await;
    assert_eq!(server.group().delivered, 1_500, "each once");
}

#[tokio::test]
async fn a_long_run_of_durable_events_that_come_again_does_not_stall() {
    let server = Server::new();
    server.double.stop_clock();
    server.append(5_000);
    // No checkpoint is written before the restart.
    let source = server.persistent().buffer_size(100).checkpoint_counts(u16::MAX, u16::MAX);
    let mut reader = Reader::start(&source, None).await;
    for position in 0..5_000 {
        reader.until(position).await;
        let reached = reader.reached.unwrap();
        reader.ack(reached).await;
    }
    server.until_group("all acked", |group| group.outstanding == 0).await;
    assert_eq!(server.group().checkpoint, None);
    server.double.restart();
    reader.end().await;
    drop(reader);

    let mut reader = Reader::start_again(&source, Some(4_999)).await;
    server.append(1);
    // The engine sends no acks: its watermark does not move.
    reader.until(5_000).await;
    assert_eq!(reader.positions().first(), Some(&0), "everything comes again");
    server.until_group("only the new one is open", |group| group.outstanding == 1).await;
}

/// Case A15.
#[tokio::test]
async fn a_group_that_was_deleted_is_made_again_from_the_watermark() {
    let server = Server::new();
    server.append(5);
    let source = server.persistent();
    let mut reader = Reader::start(&source, None).await;
    reader.until(4).await;
    reader.ack(2).await;
    assert!(server.double.delete_group(STREAM, GROUP));
    assert!(matches!(reader.end().await, SourceError::Ended { .. }));
    server.append(2);
    assert!(source.claim(&id(), 10).await.unwrap().is_none());
    let mut reader = Reader::start(&source, Some(2)).await;
    reader.until(6).await;
    assert_eq!(reader.positions(), [3, 4, 5, 6]);
}

#[tokio::test]
async fn a_reset_deletes_the_group_and_a_missing_one_is_no_matter() {
    let server = Server::new();
    let source = server.persistent();
    source.reset(&id()).await.unwrap();
    drop(Reader::start(&source, None).await);
    assert!(server.double.group(STREAM, GROUP).is_some());
    source.reset(&ProjectionId::new("reader", 2)).await.unwrap();
    assert!(server.double.group(STREAM, GROUP).is_some());
    source.reset(&id()).await.unwrap();
    assert!(server.double.group(STREAM, GROUP).is_none());
}

#[tokio::test]
async fn a_position_is_written_down_although_few_events_were_acked() {
    let server = Server::new();
    server.append(3);
    let mut reader = Reader::start(&server.persistent(), None).await;
    reader.until(2).await;
    reader.ack(1).await;
    server.until_group("after two of three", |group| group.checkpoint.as_deref() == Some("1")).await;
}

#[tokio::test]
async fn what_was_not_acked_comes_again_in_order() {
    let server = Server::new();
    server.append(10);
    let source = server.persistent();
    let mut reader = Reader::start(&source, None).await;
    reader.until(9).await;
    reader.ack(3).await;
    drop(reader);
    let mut reader = Reader::start(&source, Some(3)).await;
    reader.until(9).await;
    assert_eq!(reader.positions(), [4, 5, 6, 7, 8, 9]);
}

/// They come for every commit.
#[tokio::test]
async fn acks_wait_for_nothing() {
    let server = Server::new();
    server.append(200);
    let mut reader = Reader::start(&server.persistent(), None).await;
    reader.until(199).await;
    let started = Instant::now();
    for position in 0..200 {
        reader.ack(position).await;
    }
    assert!(started.elapsed() < Duration::from_secs(1), "200 acks took {:?}", started.elapsed());
    server.until_group("all acked", |group| group.outstanding == 0).await;
}
