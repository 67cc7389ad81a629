//! The fields of what is reported, in real runs, to observers and to `tracing`.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::source::{
    PassedOver, SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription, TypeSet,
};
use scriba_core::telemetry::{BatchFailed, BatchNext, Halted, Lag, Observer, StopReason, Subscribed, Telemetry};
use scriba_core::{
    EventId, EventMeta, FailureClass, HaltReason, Handler, HandlerError, HandlerResult, Position, Projection,
    ProjectionId, ProjectionOptions, RawEvent, Scriba, Source, State, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget, Recorded, Recorder, TargetFault, TargetStep};
use tracing::field::{Field, Visit};
use tracing::span;

const SOON: Duration = Duration::from_secs(10);

#[derive(Projection)]
#[projection(name = "told")]
struct Told;

impl Handler for Told {
    type Event = RawEvent;
    type Op = u64;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<u64> {
        match event.0.event_type.as_str() {
            "hang" => std::future::pending().await,
            "outlast" => return Err(HandlerError::retryable(HandlerError::new("outlasting", "still"))),
            "wait" => tokio::time::sleep(Duration::from_millis(100)).await,
            _ => {}
        }
        Ok(meta.position.get().into())
    }
}

fn id() -> ProjectionId {
    ProjectionId::of::<Told>()
}

fn options() -> ProjectionOptions {
    ProjectionOptions::default().lag_interval(Duration::ZERO)
}

/// A projection that is watched.
async fn start(source: impl Source, target: &MemoryTarget<u64>, options: ProjectionOptions) -> (Scriba, Recorder) {
    let recorder = Recorder::new();
    let scriba = Scriba::with_observers([Arc::new(recorder.clone()) as Arc<dyn Observer>]);
    scriba.start(Told, source, target.clone(), options).await.unwrap();
    (scriba, recorder)
}

async fn until(scriba: &Scriba, position: Position) {
    scriba.wait_for(id(), WaitFor::Position(position), SOON).await.unwrap();
}

async fn told(recorder: &Recorder, fits: impl Fn(&Recorded) -> bool) -> Recorded {
    recorder.wait_for(|record| fits(&record.event), SOON).await.unwrap().event
}

type Stop = (StopReason, Option<String>, Option<HaltReason>);

async fn stopped(recorder: &Recorder) -> Stop {
    match told(recorder, |event| matches!(event, Recorded::Stopped { .. })).await {
        Recorded::Stopped { reason, left_behind, halt_reason } => (reason, left_behind, halt_reason),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_says_by_whom_whether_in_time_and_whether_there_was_a_halt_before() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, recorder) = start(source.clone(), &target, options()).await;
    until(&scriba, source.append("a", "apply", "{}")).await;
    scriba.stop(id()).await.unwrap();
    assert_eq!(stopped(&recorder).await, (StopReason::Stop, None, None));

    let (scriba, recorder) =
        start(source.clone(), &target, options().shutdown_timeout(Duration::from_millis(100))).await;
    source.append("a", "hang", "{}");
    told(&recorder, |event| matches!(event, Recorded::EventStart { .. })).await;
    scriba.shutdown().await.expect_err("the handler hangs");
    let (reason, left_behind, _) = stopped(&recorder).await;
    assert_eq!(reason, StopReason::Shutdown);
    assert!(left_behind.as_deref().is_some_and(|left| left.contains("1 events in flight")), "{left_behind:?}");

    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, recorder) = start(source.clone(), &target, options().retryable_for(Duration::ZERO)).await;
    source.append("a", "outlast", "{}");
    let Recorded::Halted { reason: halt } = told(&recorder, |event| matches!(event, Recorded::Halted { .. })).await
    else {
        panic!("halted")
    };
    assert_eq!(halt.position, Some(Position::new(0)));
    scriba.stop(id()).await.unwrap();
    let (reason, left_behind, halt_reason) = stopped(&recorder).await;
    assert_eq!((reason, left_behind, halt_reason), (StopReason::Stop, None, Some(halt)));
}

#[test]
fn a_stop_for_want_of_a_runtime_says_so() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (_scriba, recorder) = runtime.block_on(async {
        let (scriba, recorder) = start(MemorySource::new(), &MemoryTarget::new(), options()).await;
        told(&recorder, |event| matches!(event, Recorded::Started)).await;
        (scriba, recorder)
    });
    runtime.shutdown_background();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (reason, _, halt_reason) = runtime.block_on(stopped(&recorder));
    assert_eq!(reason, StopReason::RuntimeGone);
    assert!(halt_reason.is_some_and(|halt| halt.message.contains("runtime")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_says_how_many_tries_it_took_and_how_long() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    target.fail(TargetStep::TakeOver, 1, TargetFault::Transient);
    target.fail(TargetStep::TakeOver, 2, TargetFault::Transient);
    let (scriba, recorder) = start(source.clone(), &target, options()).await;
    until(&scriba, source.append("a", "apply", "{}")).await;
    target.fail(TargetStep::Commit, 1, TargetFault::Transient);
    until(&scriba, source.append("a", "apply", "{}")).await;
    let subscribed = recorder.events_of(id()).into_iter().filter_map(|event| match event {
        Recorded::Subscribed { after, attempts, waited } => Some((after, attempts, waited)),
        _ => None,
    });
    let [(None, 3, first), (Some(after), 1, second)] = subscribed.collect::<Vec<_>>()[..] else {
        panic!("{:?}", recorder.events_of(id()))
    };
    assert_eq!(after, Position::new(0));
    // The waits between tries begin at 10 ms, less the jitter.
    assert!(first >= Duration::from_millis(5) && first < SOON && second < first, "{first:?} {second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_batch_says_how_many_events_it_held_and_a_recovery_from_what_it_was() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    // The first one holds back the others until all of them make one batch.
    for (stream, event_type) in [("a", "wait"), ("b", "apply"), ("c", "apply")] {
        source.append(stream, event_type, "{}");
    }
    target.fail(TargetStep::Commit, 1, TargetFault::Transient);
    let (scriba, recorder) = start(source, &target, options().parallelism(3)).await;
    until(&scriba, Position::new(2)).await;
    let recovered = told(&recorder, |event| matches!(event, Recorded::Recovered { .. })).await;
    let failed = told(&recorder, |event| matches!(event, Recorded::BatchFailed { .. })).await;
    let Recorded::BatchFailed { events: 3, class: Some(FailureClass::TransientServer), message, next, .. } = failed
    else {
        panic!("{failed:?}")
    };
    assert!(next.retry_in().is_some_and(|wait| wait < SOON), "{next:?}");
    let Recorded::Recovered { failures: 1, last_error, .. } = recovered else { panic!("{recovered:?}") };
    assert_eq!(last_error, message);
    let committed = told(&recorder, |event| matches!(event, Recorded::BatchStop { .. })).await;
    let Recorded::BatchStop { events: 3, applied: 3, skipped: 0, dead_lettered: 0, .. } = committed else {
        panic!("{committed:?}")
    };
}

struct Panics;

impl Observer for Panics {
    fn subscribed(&self, _: &ProjectionId, _: &Subscribed) {
        panic!("an observer");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hook_that_panics_keeps_nothing_from_the_observers_behind_it() {
    let recorder = Recorder::new();
    let observers: [Arc<dyn Observer>; 2] = [Arc::new(Panics), Arc::new(recorder.clone())];
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let scriba = Scriba::with_observers(observers);
    scriba.start(Told, source.clone(), target, options()).await.unwrap();
    until(&scriba, source.append("a", "apply", "{}")).await;
    let subscribed = recorder.events_of(id());
    let subscribed = subscribed.iter().filter(|event| matches!(event, Recorded::Subscribed { .. }));
    assert_eq!(subscribed.count(), 1, "told once, and the pipeline goes on");
}

/// A source that does not know its head.
struct Headless(MemorySource);

struct NoHead(Box<dyn SourceInspector>);

#[async_trait]
impl Source for Headless {
    async fn check(&self) -> Result<(), SourceError> {
        self.0.check().await
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        self.0.identity().await
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.0.subscribe(request).await
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        Ok(Box::new(NoHead(self.0.inspector().await?)))
    }
}

#[async_trait]
impl SourceInspector for NoHead {
    async fn head(&mut self) -> Result<Option<Position>, SourceError> {
        Err(SourceError::NoHead)
    }

    async fn event_id_at(&mut self, position: Position) -> Result<Option<EventId>, SourceError> {
        self.0.event_id_at(position).await
    }

    async fn passed_over(&mut self, types: TypeSet<'_>, up_to: Position) -> Result<Option<PassedOver>, SourceError> {
        self.0.passed_over(types, up_to).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lag_tells_what_is_known_and_leaves_empty_what_is_not() {
    let options = || options().lag_interval(Duration::from_millis(100));
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, recorder) = start(source.clone(), &target, options()).await;
    let last = source.append("a", "apply", "{}");
    until(&scriba, last).await;
    let caught_up = told(&recorder, |event| matches!(event, Recorded::Lag { lag_events: Some(0), .. })).await;
    let Recorded::Lag {
        lag_time: Some(Duration::ZERO),
        head,
        watermark,
        state: State::Running,
        degraded_since: None,
        ..
    } = caught_up
    else {
        panic!("{caught_up:?}")
    };
    assert_eq!((head, watermark), (Some(last), Some(last)));
    source.append("a", "outlast", "{}");
    let behind = |event: &Recorded| matches!(event, Recorded::Lag { lag_events: Some(1), degraded_since: Some(_), .. });
    let Recorded::Lag { lag_time: Some(lag), .. } = told(&recorder, behind).await else { panic!("a time") };
    assert!(lag > Duration::ZERO && lag < SOON, "{lag:?}");
    scriba.shutdown().await.unwrap();

    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let (scriba, recorder) = start(Headless(source.clone()), &target, options()).await;
    let last = source.append("a", "apply", "{}");
    until(&scriba, last).await;
    let seen = told(&recorder, |event| matches!(event, Recorded::Lag { watermark: Some(_), .. })).await;
    let Recorded::Lag { lag_time: None, lag_events: None, head: None, watermark, state: State::Running, .. } = seen
    else {
        panic!("{seen:?}")
    };
    assert_eq!(watermark, Some(last), "told although the source cannot tell its head");
}

/// The fields of every event, by message.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<BTreeMap<String, String>>>>);

struct Line(BTreeMap<String, String>);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "scriba"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(BTreeMap::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn tracing_gets_the_fields_that_are_known_and_no_others() {
    let lines = Lines::default();
    let telemetry = Telemetry::new("orders".into(), Vec::new());
    tracing::subscriber::with_default(lines.clone(), || {
        let reason = HaltReason { class: Some(FailureClass::Structural), ..HaltReason::new("a table is missing") };
        telemetry.halted(&Halted { reason: &HaltReason { code: Some("42P01".to_owned()), ..reason } });
        telemetry.lag(&Lag {
            lag_time: None,
            lag_events: None,
            head: None,
            watermark: Some(Position::new(7)),
            state: State::Running,
            degraded_since: None,
        });
        let next = BatchNext::Replay(Duration::from_millis(20));
        telemetry.batch_failed(&BatchFailed { events: 2, class: None, code: None, message: "in doubt", next });
    });
    let expected = [
        "class=structural code=42P01 message=halted projection=orders v1 reason=a table is missing",
        "message=lag projection=orders v1 state=running watermark=7",
        "error_message=in doubt events=2 message=batch failed next=replay projection=orders v1 retry_in=20ms",
    ];
    let seen: Vec<String> = lines.0.lock().unwrap().iter().map(line).collect();
    assert_eq!(seen, expected);
}

fn line(fields: &BTreeMap<String, String>) -> String {
    fields.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
}
