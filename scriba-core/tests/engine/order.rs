//! Order, once, and nothing lost: as properties, with everything going wrong that may.

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;
use scriba_core::{Circuit, ProjectionOptions};
use scriba_testing::{Faults, MemorySource, MemoryTarget, TargetFault, TargetStep};

use super::common::{Act, Call, Fail, append, applied, id, options, start, until};

/// A run: what is in the log, how it is run, and what goes wrong.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) acts: Vec<(u8, Act)>,
    pub(crate) parallelism: usize,
    pub(crate) batch: usize,
    pub(crate) in_flight: usize,
    pub(crate) faults: Faults,
    /// Commits that fail, and how.
    pub(crate) commit_faults: Vec<(u64, u8)>,
}

pub(crate) fn runs() -> impl Strategy<Value = Run> {
    let how = prop_oneof![30 => Just(Fail::Error), 10 => Just(Fail::Permanent), 1 => Just(Fail::Retryable)];
    let act =
        (prop_oneof![Just(0), 0..1_500_u64], prop_oneof![8 => Just(0), 1 => 1..2_u32, 1 => Just(9)], how, 0..10_u8)
            .prop_map(|(wait, fail, how, skip)| Act {
                wait,
                // A retryable error that goes on for long would only make the run slow.
                fail: if how == Fail::Retryable { fail.min(1) } else { fail },
                how,
                skip: skip == 0,
                ..Act::default()
            });
    let chance = || prop_oneof![2 => Just(0.0), 1 => 0.0..0.3_f64];
    let faults = (any::<u64>(), chance(), chance(), chance(), any::<bool>(), prop::option::of(1..8_usize)).prop_map(
        |(seed, repeat, end, unavailable, start_below, page)| Faults {
            seed,
            repeat,
            end: end / 3.0,
            unavailable: unavailable / 6.0,
            outage: Duration::ZERO..Duration::from_millis(3),
            delay: Duration::ZERO..Duration::from_micros(300),
            start_below,
            page,
        },
    );
    (
        prop::collection::vec((0..5_u8, act), 1..40),
        1..9_usize,
        1..12_usize,
        1..30_usize,
        faults,
        prop::collection::vec((1..8_u64, 0..3_u8), 0..3),
    )
        .prop_map(|(acts, parallelism, batch, in_flight, faults, commit_faults)| Run {
            acts,
            parallelism,
            batch,
            in_flight,
            faults,
            commit_faults,
        })
}

/// What a run left behind.
pub(crate) struct Left {
    pub(crate) calls: Vec<Call>,
    pub(crate) applied: Vec<u64>,
    pub(crate) dead: Vec<u64>,
    pub(crate) violations: Vec<String>,
    pub(crate) counted: [u64; 3],
}

/// Runs it to the end of the log, or until nothing more can be hoped for.
pub(crate) async fn carry_out(run: &Run, change: impl FnOnce(ProjectionOptions) -> ProjectionOptions) -> Left {
    let source = MemorySource::new().faults(run.faults.clone());
    let target = MemoryTarget::new();
    let mut last = None;
    for (stream, act) in &run.acts {
        last = Some(append(&source, &format!("stream-{stream}"), act));
    }
    for (nth, how) in &run.commit_faults {
        let fault = match how {
            0 => TargetFault::Transient,
            1 => TargetFault::Ambiguous { durable: true },
            _ => TargetFault::Ambiguous { durable: false },
        };
        target.fail(TargetStep::Commit, *nth, fault);
    }
    // Poison is common here, and order is what is looked at.
    let options = options()
        .circuit(Circuit::OFF)
        .parallelism(run.parallelism)
        .batch_events(run.batch)
        .in_flight_events(run.in_flight);
    let (scriba, script) = start(&source, &target, change(options)).await;
    until(&scriba, last.expect("a log of at least one event")).await;
    scriba.shutdown().await.expect("it stops");
    let counts = target.checkpoint(id()).expect("a checkpoint").counts;
    let calls = script.calls.lock().unwrap().clone();
    Left {
        calls,
        applied: applied(&target),
        dead: target.dead_letters(id()).iter().map(|letter| letter.position.get()).collect(),
        violations: target.violations(),
        counted: [counts.applied, counts.skipped, counts.dead_lettered],
    }
}

/// What the log makes of the read model, one event after another.
pub(crate) fn expected(run: &Run) -> (Vec<u64>, Vec<u64>, u64) {
    let (mut applied, mut dead, mut skipped) = (Vec::new(), Vec::new(), 0);
    for (position, (_, act)) in (0..).zip(&run.acts) {
        let attempts = if act.how == Fail::Permanent { 1 } else { 3 };
        if act.how != Fail::Retryable && act.fail >= attempts {
            dead.push(position);
        } else if act.skip {
            skipped += 1;
        } else {
            applied.push(position);
        }
    }
    (applied, dead, skipped)
}

/// One event of a stream at a time; and after each event the next one of its stream, or, where a new pipeline began
/// again, an earlier one.
fn streams_in_order(run: &Run, calls: &[Call]) -> Result<(), String> {
    let mut by_stream: HashMap<&str, Vec<&Call>> = HashMap::new();
    for call in calls {
        by_stream.entry(&call.stream).or_default().push(call);
    }
    for (stream, mut calls) in by_stream {
        calls.sort_by_key(|call| call.started);
        for pair in calls.windows(2) {
            if pair[1].started < pair[0].ended {
                return Err(format!("{:?} ran while {:?} did", pair[1], pair[0]));
            }
            let (before, after) = (pair[0].position.get(), pair[1].position.get());
            let left_out = (before + 1..after).find(|&position| {
                usize::try_from(position).is_ok_and(|n| format!("stream-{}", run.acts[n].0) == stream)
            });
            if let Some(left_out) = left_out {
                return Err(format!("{stream}: {after} was handled after {before}, before {left_out}"));
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, max_shrink_iters: 8, ..ProptestConfig::default() })]

    #[test]
    fn whatever_goes_wrong_the_read_model_is_what_the_log_makes_of_it_in_order_and_once(run in runs()) {
        let left = runtime().block_on(carry_out(&run, |options| options));
        let (applied, dead, skipped) = expected(&run);
        prop_assert_eq!(&left.violations, &Vec::<String>::new());
        prop_assert_eq!(&left.applied, &applied);
        prop_assert_eq!(&left.dead, &dead);
        prop_assert_eq!(left.counted, [applied.len() as u64, skipped, dead.len() as u64]);
        prop_assert_eq!(streams_in_order(&run, &left.calls), Ok(()));
    }
}

pub(crate) fn runtime() -> &'static tokio::runtime::Runtime {
    static RUNTIME: std::sync::OnceLock<tokio::runtime::Runtime> = std::sync::OnceLock::new();
    RUNTIME.get_or_init(|| tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime"))
}
