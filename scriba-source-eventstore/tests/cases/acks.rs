//! What is acked and what is not when a projection or its database goes away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use scriba_core::Role;
use scriba_core::telemetry::BatchNext;
use scriba_testing::Recorded;
use tokio::time::{Instant, sleep};

use super::stage::{Kind, LEASE, Ledger, Node, Stage, eventually, eventually_within, id, millis};

/// A transaction that wants to write loses its connection, for as long as this is so.
async fn set_outage(stage: &Stage, on: bool) {
    stage.run(format!("UPDATE outage SET is_on = {on}")).await;
}

fn replays(node: &Node) -> usize {
    let is_replay = |event: &Recorded| matches!(event, Recorded::BatchFailed { next: BatchNext::Replay(_), .. });
    node.recorder.events_of(id()).iter().filter(|event| is_replay(event)).count()
}

/// Case A1.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_is_replayed_12_times_is_applied_once_and_nothing_is_parked() {
    let replayed = async |kind| {
        const EVENTS: usize = 20;
        let stage = Stage::new().await;
        let outage = "CREATE TABLE outage (is_on bool);
            INSERT INTO outage VALUES (true);
            CREATE FUNCTION cut_off() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF (SELECT is_on FROM outage) THEN
                    PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(10);
                END IF;
                RETURN NULL;
            END $$;
            CREATE TRIGGER cut_off BEFORE INSERT ON committed FOR EACH STATEMENT EXECUTE FUNCTION cut_off()";
        stage.run(outage).await;
        stage.append(EVENTS);
        let node = stage.start(kind, &Ledger::new()).await;
        eventually_within(Duration::from_mins(1), "12 replays", || replays(&node) >= 12).await;
        assert_eq!(stage.committed().await, Vec::<i64>::new());
        if kind == Kind::Persistent {
            assert!(stage.group().delivered >= 12 * EVENTS as u64, "each time again: {:?}", stage.group());
        }
        set_outage(&stage, false).await;
        // It may wait for up to 20 s before it tries again: a new start does not.
        node.stop().await;
        let node = stage.start(kind, &Ledger::new()).await;
        stage.conserved(&node).await;
        if kind == Kind::Persistent {
            eventually("all is acked", || stage.group().outstanding == 0).await;
            assert_eq!((stage.group().parked, stage.group().to_retry), (0, 0));
        }
        node.stop().await;
    };
    tokio::join!(replayed(Kind::Persistent), replayed(Kind::CatchUp));
}

/// Case A8.
#[tokio::test(flavor = "multi_thread")]
async fn in_20_starts_and_stops_while_events_flow_none_waits_for_a_timeout() {
    for kind in Kind::BOTH {
        let stage = Arc::new(Stage::new().await);
        stage.server.stop_clock();
        stage.append(1);
        let flows = Arc::new(AtomicBool::new(true));
        let writer = tokio::spawn({
            let (stage, flows) = (Arc::clone(&stage), Arc::clone(&flows));
            async move {
                while flows.load(Ordering::SeqCst) {
                    stage.append(1);
                    sleep(millis(2)).await;
                }
            }
        });
        let node = stage.start(kind, &Ledger::new()).await;
        for _ in 0..20 {
            node.until(stage.head()).await;
            node.stop().await;
            node.start(stage.source(kind), &stage, &Ledger::new()).await;
        }
        flows.store(false, Ordering::SeqCst);
        writer.await.unwrap();
        stage.conserved(&node).await;
        node.stop().await;
    }
}

/// Case A8.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_within_its_bound_from_a_node_that_stops_and_from_one_that_dies() {
    // A standby asks at least so often.
    const ASKS: Duration = Duration::from_millis(2_250);
    for kind in Kind::BOTH {
        let stage = Stage::new().await;
        stage.append(10);
        let first = stage.start(kind, &Ledger::new()).await;
        stage.conserved(&first).await;
        let second = stage.start(kind, &Ledger::new()).await;
        eventually("it stands by", || second.info().role == Role::Standby).await;

        first.stop().await;
        let bound = ASKS + Duration::from_secs(1);
        takes_over(&stage, &second, bound).await;

        first.start(stage.source(kind), &stage, &Ledger::new()).await;
        eventually("it stands by", || first.info().role == Role::Standby).await;
        drop(second);
        // As ADR 14 promises.
        let bound = Duration::from_secs(5) + if kind == Kind::CatchUp { LEASE } else { Duration::ZERO };
        takes_over(&stage, &first, bound).await;
        first.stop().await;
    }
}

async fn takes_over(stage: &Stage, standby: &Node, bound: Duration) {
    let gone = Instant::now();
    stage.append(5);
    standby.is_active().await;
    stage.conserved(standby).await;
    let took = gone.elapsed();
    assert!(took < bound, "{took:?}");
}

/// Case A11.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_acked_right_before_a_node_died_has_no_effect_twice() {
    for kind in Kind::BOTH {
        let stage = Stage::new().await;
        stage.append(100);
        let node = stage.start(kind, &Ledger::new()).await;
        node.until(99).await;
        drop(node);
        let ledger = Ledger::new();
        let node = stage.start(kind, &ledger).await;
        stage.conserved(&node).await;
        node.is_active().await;
        stage.append(1);
        stage.conserved(&node).await;
        assert_eq!(ledger.calls(), 1, "{kind:?}: none of the 100 was handled again");
        node.stop().await;
    }
}

/// Case A11.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_graceful_stop_at_most_the_buffer_is_delivered_again() {
    const BUFFER: u64 = 20;
    let stage = Stage::new().await;
    stage.server.stop_clock();
    stage.append(200);
    let ledger = Ledger::after(|_| sleep(millis(2)));
    let source = || stage.persistent().buffer_size(usize::try_from(BUFFER).unwrap());
    let node = stage.start_from(source(), &ledger).await;
    for (stops, reached) in [(1, 40), (2, 90), (3, 150)] {
        node.until(reached).await;
        node.stop().await;
        let done = stage.committed().await.len();
        assert!(done < 200, "it was stopped in mid-flight");
        let delivered = stage.group().delivered;
        assert!(delivered <= done as u64 + stops * BUFFER, "{delivered} were delivered until {done} were done");
        node.start(source(), &stage, &ledger).await;
    }
    stage.conserved(&node).await;
    let again = stage.group().delivered - 200;
    assert!(again <= 3 * BUFFER, "{again} in 3 stops");
    let calls = ledger.calls() as u64;
    assert!((200..=200 + again).contains(&calls), "{calls} calls of handlers, {again} events came again");
    node.stop().await;
}
