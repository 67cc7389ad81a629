//! Rules broken on purpose: each has to be caught by what the tests look at.

use std::time::Duration;

use scriba_core::switches::Switches;
use scriba_core::{
    EventMeta, Events, Handler, HandlerResult, Position, Projection, ProjectionId, Retry, Scriba, State, WaitFor,
};
use scriba_testing::{Faults, MemorySource, MemoryTarget, TargetFault, TargetStep};

use super::common::{Act, Fail, append, applied, eventually, id, options, start, until};

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

#[tokio::test(flavor = "multi_thread")]
async fn a_late_result_of_an_attempt_that_timed_out_is_caught() {
    caught(Switches::LateResults, async |switch, seed| {
        // One attempt is enough to tell.
        if seed > 0 {
            return false;
        }
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        // Waits first, so that it runs in a task of its own, and then blocks the thread beyond its time.
        let slow = append(&source, "a", &Act { wait: 100, compute_after: 60_000, ..Act::default() });
        let options = options().handler_timeout(Duration::from_millis(30)).retry(Retry::none()).switches(switch);
        let (scriba, _) = start(&source, &target, options).await;
        until(&scriba, slow).await;
        scriba.shutdown().await.expect("it stops");
        target.dead_letters(id()).is_empty()
    })
    .await;
}

#[derive(Events)]
enum Listed {
    Act(Act),
}

/// Applies listed events, the second of them slowly.
#[derive(Projection)]
#[projection(name = "listed")]
struct Slow;

impl Handler for Slow {
    type Event = Listed;
    type Op = u64;

    async fn handle(&self, Listed::Act(act): Listed, meta: &EventMeta) -> HandlerResult<u64> {
        tokio::time::sleep(Duration::from_micros(act.wait)).await;
        Ok(meta.position.get().into())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_that_passes_an_open_event_is_caught() {
    caught(Switches::ProgressPassesOpen, async |switch, _| {
        let (source, target) = (MemorySource::new().filters_types(true), MemoryTarget::new());
        append(&source, "a", &Act::default());
        append(&source, "b", &Act { wait: 10_000, ..Act::default() });
        for _ in 0..8 {
            source.append("c", "Other", "{}");
        }
        let (scriba, id) = (Scriba::new(), ProjectionId::of::<Slow>());
        scriba.start(Slow, source.clone(), target.clone(), options().switches(switch)).await.expect("it starts");
        let mut passed = false;
        eventually("both are applied", || {
            let applied = target.snapshot(id.clone()).map_or(0, |snapshot| {
                passed |= snapshot.checkpoint.watermark > Some(Position::new(0)) && snapshot.applied.len() < 2;
                snapshot.applied.len()
            });
            passed || applied == 2
        })
        .await;
        scriba.shutdown().await.expect("it stops");
        passed || !target.violations().is_empty()
    })
    .await;
}

/// Where a handler that fails on everything is halted, in batches of three, with restarts in between.
async fn dead_letters_of_a_broken_handler(switch: Switches, batch: usize) -> usize {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..12 {
        append(&source, &format!("s{n}"), &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
    }
    for _ in 0..3 {
        let (scriba, _) = start(&source, &target, options().batch_events(batch).switches(switch)).await;
        eventually("it halts or gets through", || {
            let info = scriba.info(id()).unwrap();
            info.state == State::Halted || info.watermark == Some(Position::new(11))
        })
        .await;
        scriba.shutdown().await.expect("it stops");
    }
    target.dead_letters(id()).len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_circuit_that_depends_on_batches_is_caught() {
    caught(Switches::CircuitPerBatch, async |switch, _| dead_letters_of_a_broken_handler(switch, 3).await != 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_circuit_that_forgets_at_a_restart_is_caught() {
    caught(Switches::CircuitForgets, async |switch, _| dead_letters_of_a_broken_handler(switch, 100).await != 4).await;
}
