//! Events that come again, late or out of order.

use std::time::Duration;

use kurrentdb::{NakAction, SubscribeToPersistentSubscriptionOptions};
use scriba_core::Position;
use tokio::time::sleep;

use super::stage::{
    CATEGORY_STREAM, GROUP, Gate, Kind, Ledger, MESSAGE_TIMEOUT, RETRIES, Stage, eventually, least_group, millis,
};

/// What makes every event time out that is out.
const BEYOND: Duration = MESSAGE_TIMEOUT.saturating_add(Duration::from_secs(1));

/// Case A3.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_is_cut_off_in_mid_batch_before_a_restart_of_the_server_loses_nothing() {
    for kind in Kind::BOTH {
        let stage = Stage::new().await;
        stage.append(60);
        let gate = Gate::shut_from(30);
        let node = stage.start(kind, &gate.ledger()).await;
        node.until(29).await;
        stage.server.cut_connections();
        stage.server.fast_forward(Duration::from_secs(5));
        stage.server.restart();
        stage.append(10);
        // What was in the handlers' hands is given up, and comes again.
        eventually("it is subscribed again", || node.subscriptions() > 1).await;
        gate.open();
        stage.conserved(&node).await;
        assert!(node.info().run.thrown_away > 0, "{kind:?}");
        node.stop().await;
    }
}

/// Case A3.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_dies_in_mid_batch_before_a_restart_of_the_server_loses_nothing() {
    for kind in Kind::BOTH {
        let stage = Stage::new().await;
        stage.append(60);
        let node = stage.start(kind, &Gate::shut_from(30).ledger()).await;
        node.until(29).await;
        drop(node);
        stage.server.fast_forward(Duration::from_secs(5));
        stage.server.restart();
        stage.append(10);
        let node = stage.start(kind, &Ledger::new()).await;
        stage.conserved(&node).await;
        node.stop().await;
    }
}

/// Case A4.
#[tokio::test(flavor = "multi_thread")]
async fn handlers_slower_than_the_message_timeout_have_no_effect_twice_and_what_they_hold_up_is_named() {
    let stage = Stage::new().await;
    stage.server.stop_clock();
    stage.create_group(least_group()).await;
    stage.append(20);
    let gate = Gate::shut_from(3);
    let node = stage.start_from(stage.persistent().buffer_size(4), &gate.ledger()).await;
    node.until(2).await;
    let all_room_is_used = || stage.group().delivered == 7 && stage.group().outstanding == 4;
    eventually("the server has the acks of three events, and waits for four", all_room_is_used).await;
    for round in 1..=3 {
        let before = stage.group().delivered;
        stage.server.fast_forward(BEYOND);
        eventually("they went out again", || stage.group().delivered > before).await;
        let oldest = || node.info().window.oldest;
        eventually("it says what it waits for", || oldest().is_some_and(|oldest| oldest.running.is_some())).await;
        let oldest = oldest().unwrap();
        assert_eq!((oldest.position, oldest.stream_id.as_str()), (Position::new(3), "account-3"), "round {round}");
    }
    eventually("it has seen that they came again", || node.info().run.deduplicated > 0).await;
    assert_eq!(node.subscriptions(), 1, "nothing has ended for that: {:?}", node.info().last_error);
    gate.open();
    stage.conserved(&node).await;
    eventually("all is acked", || stage.group().outstanding + stage.group().to_retry == 0).await;
    assert_eq!(stage.group().parked, 0);
    node.stop().await;
}

/// Case A6.
#[tokio::test(flavor = "multi_thread")]
async fn timeouts_that_bring_events_back_behind_later_ones_do_not_change_the_order_of_commits() {
    let stage = Stage::new().await;
    stage.server.stop_clock();
    stage.create_group(least_group()).await;
    stage.append(1_500);
    let gate = Gate::shut_from(0);
    let at_the_gate = gate.clone();
    let ledger = Ledger::after(move |meta| {
        let gate = at_the_gate.clone();
        async move {
            sleep(Duration::from_micros(meta.position.get() * 7_919 % 3_000)).await;
            gate.pass(&meta).await;
        }
    });
    let node = stage.start_from(stage.persistent().buffer_size(500), &ledger).await;
    for reached in (100..1_500).step_by(200) {
        gate.shut_at(reached);
        node.until(reached - 1).await;
        // All that is out comes again, the first behind the last.
        let out = usize::try_from(500.min(1_500 - reached)).unwrap();
        let all_are_there = || stage.group().outstanding == out && node.info().window.events == out;
        eventually("all acks have arrived, and what they gave room for", all_are_there).await;
        let (subscriptions, before) = (node.subscriptions(), node.info().run.deduplicated);
        stage.server.fast_forward(BEYOND);
        eventually("all came again", || node.info().run.deduplicated >= before + out as u64).await;
        assert_eq!(node.subscriptions(), subscriptions, "{:?}", node.info().last_error);
        // Acks that are lost make events come again that are done. The timeout is after that: nothing else brings them back.
        stage.server.swallow_acks(true);
        gate.shut_at(reached + 50);
        node.until(reached + 49).await;
        stage.server.swallow_acks(false);
        stage.server.fast_forward(BEYOND);
    }
    gate.open();
    stage.conserved(&node).await;
    assert!(stage.group().delivered > 2_000, "many came again: {:?}", stage.group());
    assert!(node.info().run.deduplicated > 0);
    stage.server.fast_forward(BEYOND);
    eventually("all is acked", || stage.group().outstanding + stage.group().to_retry == 0).await;
    assert_eq!(stage.group().parked, 0);
    stage.append(5);
    stage.conserved(&node).await;
    node.stop().await;
}

/// Case A9.
#[tokio::test(flavor = "multi_thread")]
async fn five_events_in_flight_of_a_consumer_that_dies_arrive_in_order_when_one_is_at_its_retry_limit() {
    let stage = Stage::new().await;
    stage.create_group(least_group()).await;
    stage.append(5);
    let options = SubscribeToPersistentSubscriptionOptions::default().buffer_size(5);
    let client = stage.client();
    let mut consumer = client.subscribe_to_persistent_subscription(CATEGORY_STREAM, GROUP, &options).await.unwrap();
    let mut third = None;
    for position in 0..5 {
        let event = consumer.next().await.unwrap();
        if position == 2 {
            third = Some(event.get_original_event().id);
        }
    }
    for _ in 0..RETRIES {
        consumer.nack_ids([third.unwrap()], NakAction::Retry, "").await.unwrap();
        consumer.next().await.unwrap();
    }
    drop(consumer);
    eventually("its events wait for another", || stage.group().to_retry == 5).await;
    let gate = Gate::shut_from(0);
    let node = stage.start(Kind::Persistent, &gate.ledger()).await;
    eventually("it has them", || node.info().window.events == 5).await;
    drop(node);
    let node = stage.start(Kind::Persistent, &Ledger::new()).await;
    stage.conserved(&node).await;
    assert_eq!(stage.group().parked, 0);
    node.stop().await;
}

/// Case A5.
#[tokio::test(flavor = "multi_thread")]
async fn after_events_around_the_checkpoint_are_gone_and_a_restart_it_goes_on_and_tells_of_the_hole() {
    for kind in Kind::BOTH {
        for scavenge in [false, true] {
            let stage = Stage::new().await;
            stage.append(5);
            let node = stage.start(kind, &Ledger::new()).await;
            stage.conserved(&node).await;
            if kind == Kind::Persistent {
                eventually("all is acked", || stage.group().outstanding == 0).await;
                stage.server.fast_forward(Duration::from_secs(2));
                assert_eq!(stage.group().checkpoint.as_deref(), Some("4"));
            }
            stage.server.stop();
            stage.append(10);
            // The links are what the projection counts by; what they lead to is there.
            stage.server.truncate_stream(CATEGORY_STREAM, 8);
            if scavenge {
                assert_eq!(stage.server.scavenge(), 8);
            }
            sleep(millis(100)).await;
            stage.server.start_again();
            stage.conserved_without(&node, |position| (5..8).contains(&position)).await;
            assert_eq!(node.passed(), [(5, 7)], "{kind:?}");
            stage.append(3);
            stage.conserved_without(&node, |position| (5..8).contains(&position)).await;
            node.stop().await;
        }
    }
}

/// Case A5.
#[tokio::test(flavor = "multi_thread")]
async fn links_to_events_that_are_gone_are_passed_and_their_order_is_that_of_the_rest() {
    for kind in Kind::BOTH {
        let stage = Stage::new().await;
        stage.append(5);
        let node = stage.start(kind, &Ledger::new()).await;
        stage.conserved(&node).await;
        stage.server.stop();
        stage.append(10);
        stage.server.truncate_stream("account-0", 3);
        assert_eq!(stage.server.scavenge(), 3);
        stage.server.start_again();
        // What was applied before stays.
        stage.conserved_without(&node, |position| [5, 10].contains(&position)).await;
        assert_eq!(node.passed(), [], "{kind:?}: no position is missing");
        node.stop().await;
    }
}
