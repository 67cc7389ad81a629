//! A stop ends in time whatever hangs, and the next start is clean.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use scriba_core::target::{StoredLease, Tables};
use scriba_core::{
    CommandError, EventMeta, Handler, HandlerResult, Lease, Projection, RawEvent, Role, Scriba, State, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget, SourceCall, SourceFault, TargetFault, TargetStep};

use super::common::{Act, Fail, Script, append, applied, eventually, id, options, start, until};
use super::fragile::{FragileTarget, Panics};

/// The time a stop has, and more than a clean start takes; far less than a lease of the default 30 s.
const SHORT: Duration = Duration::from_millis(300);

/// Stops, in time.
async fn stop(scriba: &Scriba) -> Result<(), CommandError> {
    let begun = Instant::now();
    let stopped = scriba.stop(id()).await;
    let took = begun.elapsed();
    assert!(took < SHORT + Duration::from_millis(300), "{took:?}: {stopped:?}");
    assert_eq!(scriba.info(id()).unwrap().state, State::Stopped);
    stopped
}

/// Starts again, and is active at once: no lease of before is waited for.
async fn starts_clean(scriba: &Scriba, source: &MemorySource, target: &MemoryTarget<u64>) {
    let script = Script::default();
    scriba.start(script, source.clone(), target.clone(), options()).await.expect("it starts again");
    let begun = Instant::now();
    let last = append(source, "last", &Act::default());
    until(scriba, last).await;
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    let info = scriba.info(id()).unwrap();
    assert_eq!((info.state, info.role), (State::Running, Role::Active));
    let positions = applied(target);
    assert!(positions.windows(2).all(|pair| pair[0] < pair[1]), "{positions:?}");
    assert_eq!(positions.last(), Some(&last.get()));
    assert_eq!(target.violations(), Vec::<String>::new());
    scriba.stop(id()).await.expect("it stops");
}

/// Its commits in doubt are waited for, for at most 2 s.
async fn running(source: &MemorySource, target: &MemoryTarget<u64>) -> Scriba {
    let lease = Lease::For(Duration::from_secs(3));
    let (scriba, _) = start(source, target, options().lease(lease).shutdown_timeout(SHORT)).await;
    until(&scriba, append(source, "a", &Act::default())).await;
    scriba
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_while_a_take_over_hangs_leaves_nothing_that_takes_the_lease_again() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    target.fail(TargetStep::TakeOver, 1, TargetFault::Hang);
    let (scriba, _) = start(&source, &target, options().shutdown_timeout(SHORT)).await;
    eventually("it is taking over", || target.hanging() == 1).await;
    stop(&scriba).await.expect("a take-over can be given up");
    target.release_hung();
    starts_clean(&scriba, &source, &target).await;
    assert_eq!(target.checkpoint(id()).unwrap().epoch, 1, "the take-over that was given up has raised nothing");
}

/// Stops while a take-over hangs that nothing can cancel, and answers what goes on with it.
async fn stopped_in_a_take_over(lease: Lease) -> (Scriba, MemorySource, FragileTarget) {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let fragile = FragileTarget { target: target.clone(), panics: Panics::default(), detached: true };
    let scriba = Scriba::new();
    scriba.start(Script::default(), source.clone(), fragile.clone(), options().lease(lease)).await.expect("it starts");
    until(&scriba, append(&source, "a", &Act::default())).await;
    scriba.stop(id()).await.expect("it stops");
    target.fail(TargetStep::TakeOver, 1, TargetFault::Hang);
    scriba.start(Script::default(), source.clone(), fragile.clone(), options().lease(lease)).await.expect("it starts");
    eventually("it is taking over", || target.hanging() == 1).await;
    stop(&scriba).await.expect("a take-over can be given up");
    assert_eq!(target.hanging(), 1, "it goes on all the same");
    (scriba, source, fragile)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_take_over_that_lands_after_the_stop_gave_the_lease_up_takes_nothing() {
    let lease = Lease::For(Duration::from_secs(30));
    for before_the_next_start in [true, false] {
        let (scriba, source, FragileTarget { target, .. }) = stopped_in_a_take_over(lease).await;
        if before_the_next_start {
            target.release_hung();
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(target.stored(&id()).await.unwrap().unwrap().lease, StoredLease::None);
            assert_eq!(target.checkpoint(id()).unwrap().epoch, 1);
        }
        let again = Instant::now();
        scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts again");
        until(&scriba, append(&source, "a", &Act::default())).await;
        assert!(again.elapsed() < Duration::from_secs(1), "active at once: {:?}", again.elapsed());
        target.release_hung();
        until(&scriba, append(&source, "a", &Act::default())).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let info = scriba.info(id()).unwrap();
        assert_eq!((info.state, info.role, info.epoch), (State::Running, Role::Active, Some(2)));
        assert_eq!(target.checkpoint(id()).unwrap().epoch, 2, "the take-over that was given up has raised nothing");
        scriba.stop(id()).await.expect("it stops");
        assert_eq!(applied(&target), [0, 1, 2]);
        assert_eq!(target.violations(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_take_over_that_lands_after_the_next_start_where_no_lease_tells_costs_a_take_over_and_nothing_else() {
    let (scriba, source, FragileTarget { target, .. }) = stopped_in_a_take_over(Lease::Off).await;
    let off = options().lease(Lease::Off);
    scriba.start(Script::default(), source.clone(), target.clone(), off).await.expect("it starts again");
    until(&scriba, append(&source, "a", &Act::default())).await;
    target.release_hung();
    eventually("what was given up has raised the epoch", || target.checkpoint(id()).unwrap().epoch == 3).await;
    until(&scriba, append(&source, "a", &Act::default())).await;
    let info = scriba.info(id()).unwrap();
    assert_eq!((info.state, info.role, info.epoch), (State::Running, Role::Active, Some(4)));
    scriba.stop(id()).await.expect("it stops");
    assert_eq!(applied(&target), [0, 1, 2]);
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn stops_during_take_overs_without_a_lease_leave_the_next_start_what_it_has_taken() {
    let (source, target) = (MemorySource::new(), MemoryTarget::<u64>::new());
    let scriba = Scriba::new();
    let options = || options().lease(Lease::Off);
    for round in 0..200 {
        scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
        if round % 3 > 0 {
            tokio::time::sleep(Duration::from_micros(round * 7)).await;
        }
        scriba.stop(id()).await.expect("it stops");
    }
    let epoch = target.checkpoint(id()).map_or(0, |checkpoint| checkpoint.epoch);
    scriba.start(Script::default(), source.clone(), target.clone(), options()).await.expect("it starts");
    until(&scriba, append(&source, "a", &Act::default())).await;
    assert_eq!(target.checkpoint(id()).unwrap().epoch, epoch + 1, "nobody else has taken over meanwhile");
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_returns_in_time_whatever_call_hangs_and_the_next_start_is_active_at_once() {
    for call in [SourceCall::Subscribe, SourceCall::Next, SourceCall::Ack] {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        let scriba = if call == SourceCall::Subscribe {
            source.inject(SourceFault::Hang(call));
            let (scriba, _) = start(&source, &target, options().shutdown_timeout(SHORT)).await;
            eventually("taken over", || target.checkpoint(id()).is_some()).await;
            scriba
        } else {
            let scriba = running(&source, &target).await;
            source.inject(SourceFault::Hang(call));
            append(&source, "a", &Act::default());
            tokio::time::sleep(Duration::from_millis(50)).await;
            scriba
        };
        let stopped = stop(&scriba).await;
        assert_eq!(stopped.is_err(), call == SourceCall::Ack, "{call:?}: {stopped:?}");
        if let Err(error) = stopped {
            assert!(error.to_string().contains("does not come back"), "{error}");
        }
        starts_clean(&scriba, &source, &target).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_returns_in_time_at_whatever_step_a_commit_hangs_and_what_was_left_behind_commits_nothing_after_the_next_start()
 {
    for step in [TargetStep::Begin, TargetStep::Checkpoint, TargetStep::Apply, TargetStep::Commit] {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        let scriba = running(&source, &target).await;
        target.fail(step, 1, TargetFault::Hang);
        append(&source, "a", &Act::default());
        eventually("a commit is in flight", || target.hanging() == 1).await;
        let error = stop(&scriba).await.expect_err("the commit does not end");
        assert!(error.to_string().contains("a commit of 1 events was left behind"), "{step:?}: {error}");
        starts_clean(&scriba, &source, &target).await;
        let before = applied(&target);
        target.release_hung();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(applied(&target), before, "{step:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_returns_in_time_while_a_handler_hangs_and_the_next_start_is_active_at_once() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, script) = start(&source, &target, options().shutdown_timeout(SHORT)).await;
    let stuck = append(&source, "stuck", &Act { fail: 1, how: Fail::Hang, ..Act::default() });
    eventually("it is handled", || script.calls.lock().unwrap().len() == 1).await;
    let error = stop(&scriba).await.expect_err("the handler never ends");
    assert!(error.to_string().contains("\"stuck\""), "{error}");
    eventually("nothing of it is left", || Arc::strong_count(&script.calls) == 1).await;
    // The same event again, which hangs again: the one behind it on another stream is not committed before it.
    let (scriba, script) = start(&source, &target, options().shutdown_timeout(SHORT)).await;
    eventually("it is handled again, at once", || script.calls.lock().unwrap().len() == 1).await;
    assert_eq!(script.calls.lock().unwrap()[0].position, stuck);
    stop(&scriba).await.expect_err("the handler never ends");
}

/// Runs on a runtime of one worker thread, as a small program does.
fn on_one_worker(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(test);
    runtime.shutdown_background();
}

#[test]
fn a_stop_returns_in_time_while_a_handler_blocks_the_only_thread_of_the_runtime() {
    on_one_worker(async {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        let (scriba, other) = (Scriba::new(), Other::default());
        let options = || options().shutdown_timeout(SHORT);
        scriba.start(other.clone(), source.clone(), target.clone(), options()).await.expect("it starts");
        append(&source, "a", &Act { compute: 1_500_000, ..Act::default() });
        // Without an await: the blocked thread is the one that would wake up sleepers.
        while other.begun.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let begun = Instant::now();
        let stopped = scriba.stop("other").await;
        assert!(begun.elapsed() < Duration::from_millis(600), "{:?}: {stopped:?}", begun.elapsed());
        let error = stopped.expect_err("the handler blocks");
        assert!(error.to_string().contains("the handler of the event at position 0 has not come back"), "{error}");
        scriba.start(other.clone(), source.clone(), target.clone(), options()).await.expect("it starts again");
        let last = append(&source, "a", &Act::default());
        let waited = scriba.wait_for("other", WaitFor::Position(last), Duration::from_secs(10)).await;
        waited.expect("it is active as soon as there is a thread");
        assert_eq!(target.applied("other").len(), 2);
        assert_eq!(target.violations(), Vec::<String>::new());
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_of_several_projections_takes_no_longer_than_the_slowest_of_them() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let scriba = running(&source, &target).await;
    scriba
        .start(Other::default(), MemorySource::new(), MemoryTarget::new(), options().shutdown_timeout(SHORT))
        .await
        .expect("it starts");
    target.fail(TargetStep::Begin, 1, TargetFault::Hang);
    append(&source, "a", &Act::default());
    tokio::time::sleep(Duration::from_millis(50)).await;
    let begun = Instant::now();
    let error = scriba.shutdown().await.expect_err("one hangs");
    assert!(begun.elapsed() < SHORT + Duration::from_millis(300), "{:?}", begun.elapsed());
    assert!(matches!(&error, CommandError::Timeout { id: stuck, .. } if *stuck == id()), "{error}");
    let states: Vec<State> = ["script", "other"].map(|id| scriba.info(id).unwrap().state).to_vec();
    assert_eq!(states, [State::Stopped, State::Stopped]);
}

/// Another projection that does the same.
#[derive(Clone, Default, Projection)]
#[projection(name = "other")]
pub(crate) struct Other {
    script: Script,
    /// Calls of the handler.
    begun: Arc<AtomicUsize>,
}

impl Handler for Other {
    type Event = RawEvent;
    type Op = u64;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<u64> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.script.handle(event, meta).await
    }
}
