//! Cases that only show with the clock stopped, or by what a source is told.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use scriba_core::{
    EventMeta, FailureClass, Handler, HandlerError, HandlerResult, Position, Projection, ProjectionId, ProjectionInfo,
    RawEvent, Scriba, State, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget, TargetFault, TargetStep};
use tokio::sync::Notify;

use super::common::{Act, append, applied, eventually, id, options, start};

/// Fails a thousand times at the event at position 0, then succeeds. Every other event succeeds.
#[derive(Clone, Default, Projection)]
#[projection(name = "patient")]
struct Patient {
    scriba: Scriba,
    /// What was known of the projection as the last attempt began.
    meanwhile: Arc<Mutex<Option<ProjectionInfo>>>,
    handled: Arc<Mutex<Vec<u64>>>,
    handled_meanwhile: Arc<Mutex<Vec<u64>>>,
    last_attempt: Arc<Notify>,
}

impl Handler for Patient {
    type Event = RawEvent;
    type Op = u64;

    async fn handle(&self, _: RawEvent, meta: &EventMeta) -> HandlerResult<u64> {
        if meta.position != Position::new(0) {
            self.handled.lock().unwrap().push(meta.position.get());
        } else if meta.attempt <= 1_000 {
            return Err(HandlerError::retryable(HandlerError::new("down", "the service is down")));
        } else {
            let info = self.scriba.info(ProjectionId::of::<Self>()).unwrap();
            *self.meanwhile.lock().unwrap() = Some(info);
            self.handled_meanwhile.lock().unwrap().clone_from(&self.handled.lock().unwrap());
            self.last_attempt.notify_one();
        }
        Ok(meta.position.get().into())
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_that_is_retried_a_thousand_times_is_applied_once_while_others_go_on_until_the_window_is_full() {
    const YEAR: Duration = Duration::from_hours(365 * 24);
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    for n in 0..300 {
        append(&source, &format!("s{n}"), &Act::default());
    }
    let patient = Patient::default();
    let scriba = patient.scriba.clone();
    let options = options().in_flight_events(100).retryable_for(YEAR);
    scriba.start(patient.clone(), source.clone(), target.clone(), options).await.expect("it starts");
    let id = ProjectionId::of::<Patient>();
    // Hours by the clock, which jumps from one retry to the next as long as nobody looks at it.
    patient.last_attempt.notified().await;
    scriba.wait_for(&id, WaitFor::Position(Position::new(299)), YEAR).await.expect("it gets there");

    let info = patient.meanwhile.lock().unwrap().take().expect("the last attempt was made");
    let handled = patient.handled_meanwhile.lock().unwrap().clone();
    assert!(info.degraded_since.is_some() && !info.is_ready() && info.state == State::Running, "{info:#?}");
    let error = info.last_error.expect("an error");
    assert!(error.contains("\"s0\"") && error.contains("position 0") && error.contains("attempt 1000"), "{error}");
    assert_eq!(info.watermark, None, "nothing passes it");
    let oldest = info.window.oldest.as_ref().expect("an open event");
    assert!(oldest.position == Position::new(0) && oldest.stream_id == "s0", "{oldest:?}");
    assert!((76..=100).contains(&info.window.events), "{:?}", info.window);
    assert_eq!(handled, (1..info.window.events as u64).collect::<Vec<_>>(), "the others in the window");

    let applied: Vec<u64> = target.applied(&id).iter().map(|(position, _)| position.get()).collect();
    assert_eq!(applied, (0..300).collect::<Vec<_>>(), "visible in order");
    assert!(target.dead_letters(&id).is_empty());
    assert_eq!(target.violations(), Vec::<String>::new());
    assert!(scriba.info(&id).unwrap().degraded_since.is_none(), "recovered");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_structural_failure_is_acked_no_further_than_what_was_committed_before_it_in_one_partition_and_in_two() {
    for streams in [["a", "a"], ["a", "b"]] {
        let (source, target) = (MemorySource::new(), MemoryTarget::new());
        append(&source, streams[0], &Act::default());
        target.fail(TargetStep::Apply, 1, TargetFault::Structural);
        for _ in 0..501 {
            append(&source, streams[1], &Act::default());
        }
        let (scriba, _) = start(&source, &target, options().batch_events(1)).await;
        eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
        assert_eq!(scriba.info(id()).unwrap().halt_reason.unwrap().class, Some(FailureClass::Structural));
        assert_eq!((applied(&target), source.acked()), (vec![], None));
        assert_eq!(target.checkpoint(id()).unwrap().watermark, None);
        scriba.stop(id()).await.expect("halted can be stopped");
        assert_eq!(source.acked(), None, "nor by the stop");
    }
}
