//! What the engine makes of a source whose store or answers go wrong.

use std::time::Duration;

use scriba_core::{
    EventMeta, Handler, HandlerResult, Projection, ProjectionOptions, RawEvent, RecordedEvent, Scriba, State, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget, SourceCall, SourceFault};
use tokio::time::{sleep, timeout};

use crate::{at, filled};

const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Projection)]
#[projection(name = "seen")]
struct Seen;

impl Handler for Seen {
    type Event = RawEvent;
    type Op = u64;

    async fn handle(&self, _event: RawEvent, meta: &EventMeta) -> HandlerResult<u64> {
        // Long enough for what was delivered before to be still in the window.
        sleep(Duration::from_millis(20)).await;
        Ok(meta.position.get().into())
    }
}

async fn start(source: &MemorySource, target: &MemoryTarget<u64>) -> Scriba {
    let scriba = Scriba::new();
    let options = ProjectionOptions::default().lag_interval(Duration::ZERO).shutdown_timeout(Duration::from_secs(2));
    scriba.start(Seen, source.clone(), target.clone(), options).await.unwrap();
    scriba
}

/// Projects everything, and stops.
async fn project(source: &MemorySource, target: &MemoryTarget<u64>) {
    let scriba = start(source, target).await;
    scriba.wait_for("seen", WaitFor::Head, PATIENCE).await.unwrap();
    scriba.shutdown().await.unwrap();
}

fn applied(target: &MemoryTarget<u64>) -> Vec<u64> {
    target.applied("seen").into_iter().map(|(_, op)| op).collect()
}

/// Why it halts, which it has to.
async fn halted(scriba: &Scriba) -> String {
    let halts = async {
        loop {
            let info = scriba.info("seen").unwrap();
            if info.state == State::Halted {
                return info.halt_reason.unwrap().to_string();
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, halts).await.expect("halted")
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_another_order_than_their_positions_are_applied_in_order_after_a_new_start() {
    let (source, target) = (filled(MemorySource::new(), 6), MemoryTarget::new());
    source.inject(SourceFault::Reorder);
    project(&source, &target).await;
    assert_eq!(applied(&target), [0, 1, 2, 3, 4, 5]);
    assert_eq!((source.faults_met().reordered, source.subscriptions()), (1, 2));
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_was_put_back_and_has_grown_again_halts_the_projection() {
    let (source, target) = (filled(MemorySource::new(), 6), MemoryTarget::new());
    project(&source, &target).await;
    source.restore_before(at(3));
    for number in 0..3 {
        let id = format!("again-{number}").into();
        source.append_event(RecordedEvent { id, ..source.events()[0].clone() });
    }
    let reason = halted(&start(&source, &target).await).await;
    assert!(reason.contains("again-2") && reason.contains("event-5"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_was_put_back_halts_the_projection() {
    let (source, target) = (filled(MemorySource::new(), 6), MemoryTarget::new());
    project(&source, &target).await;
    source.restore_before(at(3));
    let reason = halted(&start(&source, &target).await).await;
    assert!(reason.contains("event-5") && reason.contains("is at 2 now"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_store_halts_the_projection_with_both_fingerprints() {
    let (source, target) = (filled(MemorySource::new(), 2), MemoryTarget::new());
    project(&source, &target).await;
    source.tell_identity("memory", "another store");
    let reason = halted(&start(&source, &target).await).await;
    assert!(reason.contains("another store") && reason.contains("memory-"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_says_it_is_unusable_halts_the_projection() {
    let (source, target) = (filled(MemorySource::new(), 2), MemoryTarget::new());
    source.inject(SourceFault::Unusable);
    let reason = halted(&start(&source, &target).await).await;
    assert!(reason.contains("a fault asked for by the test"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_never_answered_does_not_keep_a_projection_from_stopping() {
    for call in [SourceCall::Subscribe, SourceCall::Next, SourceCall::Ack] {
        let (source, target) = (filled(MemorySource::new(), 2), MemoryTarget::new());
        source.inject(SourceFault::Hang(call));
        let scriba = start(&source, &target).await;
        let hangs = async {
            while source.faults_met().hung == 0 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, hangs).await.unwrap_or_else(|_| panic!("{call:?} was not called"));
        // Whether it says that something was left behind is not the point here.
        let stopped = timeout(Duration::from_secs(4), scriba.stop("seen")).await;
        assert!(stopped.is_ok(), "{call:?}");
        project(&source, &target).await;
        assert_eq!(applied(&target), [0, 1], "after {call:?}");
    }
}
