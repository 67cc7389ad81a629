//! Rules broken on purpose: each has to be caught by what the tests look at.

use std::time::Duration;

use scriba_core::switches::Switches;
use scriba_core::{Position, WaitFor};
use scriba_testing::{Faults, MemorySource, MemoryTarget, TargetFault, TargetStep};

use super::common::{Act, append, applied, eventually, id, options, start, until};

/// Whether the read model came out wrong with a rule broken: some of 20 seeds have to see it, and none without.
async fn caught(switch: Switches, attempt: impl AsyncFn(Switches, u64) -> bool) {
    for seed in 0..20 {
        assert!(!attempt(Switches::None, seed).await, "seed {seed} finds fault with an engine in order");
    }
    for seed in 0..20 {
        if attempt(switch, seed).await {
            return;
        }
    }
    panic!("{switch:?} was not noticed");
}

#[tokio::test(flavor = "multi_thread")]
async fn dedup_that_looks_at_the_stored_watermark_only_is_caught() {
    caught(Switches::DedupStoredOnly, async |switch, seed| {
        let faults = Faults { seed, repeat: 0.5, page: Some(3), ..Faults::default() };
        let (source, target) = (MemorySource::new().faults(faults), MemoryTarget::new());
        let mut last = None;
        for n in 0..30 {
            last = Some(append(&source, &format!("s{}", n % 3), &Act { wait: 300, ..Act::default() }));
        }
        let (scriba, _) = start(&source, &target, options().switches(switch)).await;
        until(&scriba, last.expect("events")).await;
        scriba.shutdown().await.expect("it stops");
        !target.violations().is_empty() || applied(&target) != (0..30).collect::<Vec<_>>()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ack_before_the_commit_is_caught() {
    caught(Switches::AckBeforeCommit, async |switch, _| {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        for n in 0..10 {
            append(&source, &format!("s{n}"), &Act::default());
        }
        target.fail(TargetStep::Commit, 1, TargetFault::Hang);
        let (scriba, _) = start(&source, &target, options().batch_events(5).switches(switch)).await;
        // The commit hangs: what was handed to it is not durable, and the node dies.
        tokio::time::sleep(Duration::from_millis(60)).await;
        drop(scriba);
        let fresh = MemoryTarget::new();
        let (scriba, _) = start(&source, &fresh, options()).await;
        let lost =
            scriba.wait_for(id(), WaitFor::Position(Position::new(9)), Duration::from_millis(300)).await.is_err()
                || applied(&fresh) != (0..10).collect::<Vec<_>>();
        scriba.shutdown().await.expect("it stops");
        target.release_hung();
        lost
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_committed_in_the_order_they_finish_are_caught() {
    caught(Switches::CommitAsFinished, async |switch, seed| {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        let mut last = None;
        for n in 0..20_u64 {
            let act = Act { wait: (n * 7 + seed) % 5 * 400, ..Act::default() };
            last = Some(append(&source, &format!("s{n}"), &act));
        }
        let (scriba, _) = start(&source, &target, options().switches(switch)).await;
        let mut prefix = true;
        eventually("the log is applied", || {
            if let Some(snapshot) = target.snapshot(id()) {
                let seen: Vec<u64> = snapshot.applied.iter().map(|(position, _)| position.get()).collect();
                prefix &= seen == (0..seen.len() as u64).collect::<Vec<_>>();
            }
            target.checkpoint(id()).is_some_and(|checkpoint| checkpoint.watermark >= last)
        })
        .await;
        scriba.shutdown().await.expect("it stops");
        !prefix || !target.violations().is_empty()
    })
    .await;
}
