//! The OpenTelemetry metrics of a real run, and the table of instruments in `docs/telemetry.md` held against what is exported.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use opentelemetry::KeyValue;
use opentelemetry::metrics::MeterProvider;
use opentelemetry_sdk::metrics::data::{AggregatedMetrics, Metric, MetricData, ResourceMetrics, ScopeMetrics};
use opentelemetry_sdk::metrics::{InMemoryMetricExporter, PeriodicReader, SdkMeterProvider};
use scriba_core::dead_letter::Failure;
use scriba_core::metrics::Metrics;
use scriba_core::telemetry::{
    BatchFailed, BatchNext, BatchStop, CheckpointLoaded, Degraded, EventException, EventSkipped, EventStop, GapPassed,
    Halted, Lag, Observer, OwnershipLost, Paused, Recovered, Resumed, SkipReason, Standby, StopReason, Stopped,
    Subscribed, Telemetry,
};
use scriba_core::{
    EventMeta, FailureClass, HaltReason, Handler, HandlerError, HandlerResult, Outcome, Position, Projection,
    ProjectionId, ProjectionOptions, RawEvent, Retry, Scriba, State, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget, SourceFault, TargetFault, TargetStep};

/// A meter whose metrics are read back.
struct Bed {
    exporter: InMemoryMetricExporter,
    provider: SdkMeterProvider,
}

/// One exported value. `attributes` are those beside the projection's name and version.
#[derive(Debug)]
struct Point {
    name: String,
    kind: &'static str,
    unit: String,
    id: ProjectionId,
    attributes: BTreeMap<String, String>,
    /// Of a histogram, the sum.
    value: f64,
    /// Of a histogram, how many were recorded.
    count: u64,
}

impl Bed {
    fn new() -> Self {
        let exporter = InMemoryMetricExporter::default();
        let reader = PeriodicReader::builder(exporter.clone()).build();
        Self { exporter, provider: SdkMeterProvider::builder().with_reader(reader).build() }
    }

    fn metrics(&self) -> Metrics {
        Metrics::new(&self.provider.meter("scriba"))
    }

    /// Everything, as of now.
    fn read(&self) -> Vec<Point> {
        self.exporter.reset();
        self.provider.force_flush().unwrap();
        let exported = self.exporter.get_finished_metrics().unwrap();
        let metrics = exported.iter().flat_map(ResourceMetrics::scope_metrics).flat_map(ScopeMetrics::metrics);
        metrics.flat_map(points).collect()
    }

    /// The value of a counter or gauge with an attribute, or without one. `None` where nothing is exported.
    fn value(&self, name: &str, attribute: Option<(&str, &str)>) -> Option<f64> {
        let points = self.read();
        let attribute = attribute.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let has =
            |point: &&Point| attribute.as_ref().is_none_or(|(key, value)| point.attributes.get(key) == Some(value));
        points.iter().filter(|point| point.name == name).find(has).map(|point| point.value)
    }

    /// How many values a histogram has, and their sum.
    fn histogram(&self, name: &str) -> Option<(u64, f64)> {
        self.read().iter().find(|point| point.name == name).map(|point| (point.count, point.value))
    }

    /// The states that are exported as 1, and how many as 0.
    fn states(&self) -> (Vec<String>, usize) {
        let points = self.read().into_iter().filter(|point| point.name == "scriba.state");
        let (ones, zeros): (Vec<_>, Vec<_>) = points.partition(|point| point.value > 0.5);
        (ones.into_iter().map(|point| point.attributes["state"].clone()).collect(), zeros.len())
    }
}

fn points(metric: &Metric) -> Vec<Point> {
    match metric.data() {
        AggregatedMetrics::U64(data) => points_of(metric, data, |value| u32::try_from(value).unwrap().into()),
        AggregatedMetrics::F64(data) => points_of(metric, data, |value| value),
        AggregatedMetrics::I64(data) => panic!("no instrument has signed values: {data:?}"),
    }
}

fn points_of<T: Copy>(metric: &Metric, data: &MetricData<T>, value: impl Fn(T) -> f64) -> Vec<Point> {
    let point = |kind, attributes: Vec<&KeyValue>, value, count| {
        let mut attributes: BTreeMap<String, String> =
            attributes.iter().map(|pair| (pair.key.to_string(), pair.value.to_string())).collect();
        let projection = attributes.remove("projection.name").expect("each value tells its projection");
        let version = attributes.remove("projection.version").expect("each value tells its version");
        let id = ProjectionId::new(projection, version.parse().unwrap());
        let (name, unit) = (metric.name().to_owned(), metric.unit().to_owned());
        Point { name, kind, unit, id, attributes, value, count }
    };
    match data {
        MetricData::Gauge(gauge) => {
            let points = gauge.data_points();
            points.map(|at| point("gauge", at.attributes().collect(), value(at.value()), 1)).collect()
        }
        MetricData::Sum(sum) => {
            assert!(sum.is_monotonic(), "{} goes down", metric.name());
            sum.data_points().map(|at| point("counter", at.attributes().collect(), value(at.value()), 1)).collect()
        }
        MetricData::Histogram(histogram) => {
            let points = histogram.data_points();
            points.map(|at| point("histogram", at.attributes().collect(), value(at.sum()), at.count())).collect()
        }
        MetricData::ExponentialHistogram(_) => panic!("{} has no buckets of ours", metric.name()),
    }
}

/// Does what the type of an event says.
#[derive(Projection)]
#[projection(name = "measured", version = 3)]
struct Measured;

impl Handler for Measured {
    type Event = RawEvent;
    type Op = u64;

    async fn handle(&self, event: RawEvent, meta: &EventMeta) -> HandlerResult<u64> {
        match event.0.event_type.as_str() {
            "skip" => return Ok(Outcome::skip()),
            "refuse" => return Err(HandlerError::permanent(HandlerError::new("refused", "never"))),
            "stumble" if meta.attempt == 1 => return Err(HandlerError::new("stumbled", "once")),
            "wait" => tokio::time::sleep(Duration::from_millis(200)).await,
            _ => {}
        }
        Ok(meta.position.get().into())
    }
}

fn id() -> ProjectionId {
    ProjectionId::of::<Measured>()
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < until, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_measured_from_its_first_event_to_its_stop() {
    let bed = Bed::new();
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let metrics: Arc<dyn Observer> = Arc::new(bed.metrics().time_events());
    let scriba = Scriba::with_observers([metrics]);
    let append = |stream: &str, event_type: &str| source.append(stream, event_type, "{}");
    let options = ProjectionOptions::default()
        .retry(Retry::new(2, [Duration::from_millis(1)]))
        .lag_interval(Duration::from_millis(100));

    // The first commit fails once, so that there is a second subscription.
    target.fail(TargetStep::Commit, 1, TargetFault::Transient);
    for event_type in ["apply", "apply", "stumble", "skip", "refuse", "skip", "apply"] {
        append("a", event_type);
    }
    scriba.start(Measured, source.clone(), target.clone(), options).await.unwrap();
    let wait_for = |position| scriba.wait_for(id(), WaitFor::Position(position), Duration::from_secs(10));
    wait_for(Position::new(6)).await.unwrap();

    // What is delivered again while it is in the window is a duplicate.
    append("b", "wait");
    eventually("it is in the window", || scriba.info(id()).unwrap().window.events == 1).await;
    source.inject(SourceFault::Repeat);
    let last = append("b", "apply");
    wait_for(last).await.unwrap();
    let run = scriba.info(id()).unwrap().run;
    assert!(run.deduplicated > 0, "{run:?}");

    let count = |outcome| bed.value("scriba.events", Some(("outcome", outcome)));
    assert_eq!(count("applied"), Some(6.0));
    assert_eq!(count("skipped"), Some(2.0));
    assert_eq!(count("dead_lettered"), Some(1.0));
    assert_eq!(count("deduplicated"), Some(f64::from(u32::try_from(run.deduplicated).unwrap())));

    let (batches, seconds) = bed.histogram("scriba.batch.duration").unwrap();
    let (counted, events) = bed.histogram("scriba.batch.events").unwrap();
    assert_eq!((counted, events.round()), (batches, 9.0));
    assert!(batches == target.commits(id()) && seconds > 0.0 && seconds < 10.0, "{batches} in {seconds} s");
    assert_eq!(bed.histogram("scriba.batch.statements").unwrap().0, batches);
    let failures = || bed.read().into_iter().filter(|point| point.name == "scriba.batch.failures");
    let failed: Vec<_> = failures().map(|point| (point.attributes, point.value.round())).collect();
    let attributes = [("class", "transient (server)"), ("next", "replay")];
    let attributes = attributes.map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(failed, [(BTreeMap::from(attributes), 1.0)]);
    assert_eq!(bed.value("scriba.restarts", None), Some(1.0));

    // Handlers are called again for what was not committed.
    let stumbled = bed.value("scriba.event.exceptions", Some(("kind", "stumbled"))).unwrap();
    let refused = bed.value("scriba.event.exceptions", Some(("kind", "refused"))).unwrap();
    assert!(stumbled >= 1.0 && refused >= 1.0, "{stumbled} {refused}");
    let (attempts, seconds) = bed.histogram("scriba.event.duration").unwrap();
    assert!(attempts >= 10 && seconds >= 0.2, "9 events, one called twice, one of 200 ms: {attempts} in {seconds} s");

    eventually("the lag is measured again", || bed.value("scriba.lag.events", None) == Some(0.0)).await;
    assert_eq!(bed.value("scriba.lag.time", None), Some(0.0));
    assert_eq!(bed.value("scriba.watermark", None), Some(8.0));
    assert_eq!(bed.states(), (vec!["running".to_owned()], 5));
    assert_eq!(bed.value("scriba.degraded", None), Some(0.0));
    assert_eq!(bed.value("scriba.standby", None), Some(0.0));
    assert!(bed.read().iter().all(|point| point.id == id()), "version 3 of measured");

    scriba.pause(id()).await.unwrap();
    assert_eq!(bed.states(), (vec!["paused".to_owned()], 5));
    append("a", "apply");
    append("a", "apply");
    eventually("what is held back shows", || bed.value("scriba.lag.events", None) == Some(2.0)).await;
    let behind = bed.value("scriba.lag.time", None).unwrap();
    assert!(behind > 0.0 && behind < 10.0, "{behind} s");

    scriba.shutdown().await.unwrap();
    assert_eq!(bed.states(), (vec!["stopped".to_owned()], 5));
    for gauge in ["scriba.lag.events", "scriba.lag.time", "scriba.watermark", "scriba.degraded", "scriba.standby"] {
        assert_eq!(bed.value(gauge, None), None, "{gauge} of a stopped projection is not known here");
    }
    drop(scriba);
    eventually("gauges end with the engine", || bed.states().0.is_empty()).await;
}

#[test]
fn what_is_not_known_is_not_exported_and_a_standby_is_told_from_the_node_that_projects() {
    let bed = Bed::new();
    let metrics = Arc::new(bed.metrics());
    let telemetry = Telemetry::new("orders".into(), vec![metrics as Arc<dyn Observer>]);
    let gauges = || {
        ["scriba.lag.events", "scriba.lag.time", "scriba.watermark", "scriba.standby"]
            .map(|gauge| bed.value(gauge, None))
    };
    assert_eq!(gauges(), [None; 4], "nothing was told yet");

    telemetry.checkpoint_loaded(&CheckpointLoaded { watermark: None, epoch: 1, stored: false });
    assert_eq!(gauges(), [None, None, None, Some(0.0)], "the beginning is not position 0");
    telemetry.lag(&LAG);
    assert_eq!(gauges(), [Some(5.0), Some(1.5), Some(4.0), Some(0.0)]);
    telemetry.lag(&Lag { lag_events: None, lag_time: None, head: None, ..LAG });
    assert_eq!(gauges(), [None, None, Some(4.0), Some(0.0)], "a source that is silent leaves no old value behind");
    telemetry.lag(&LAG);
    telemetry.ownership_lost(&OwnershipLost { epoch: 1, by: "another" });
    telemetry.standby(&Standby { holder: "another", attempt: 1, retry_in: Duration::from_secs(1) });
    assert_eq!(gauges(), [None, None, None, Some(1.0)]);
    assert_eq!(bed.states().0, ["running"]);

    telemetry.checkpoint_loaded(&CheckpointLoaded { watermark: Some(Position::new(9)), epoch: 3, stored: true });
    assert_eq!(bed.states().0, ["initializing"]);
    telemetry.subscribed(&SUBSCRIBED);
    assert_eq!(bed.states().0, ["running"]);
    telemetry.paused(&Paused);
    telemetry.degraded(&Degraded { since: Duration::ZERO, failures: 1, last_error: "gone" });
    assert_eq!((bed.states().0, bed.value("scriba.degraded", None)), (vec!["initializing".to_owned()], Some(1.0)));
    telemetry.subscribed(&SUBSCRIBED);
    telemetry.recovered(&Recovered { since: Duration::ZERO, failures: 1, last_error: "gone" });
    assert_eq!((bed.states().0, bed.value("scriba.degraded", None)), (vec!["paused".to_owned()], Some(0.0)));
    telemetry.resumed(&Resumed);
    assert_eq!(bed.states().0, ["running"]);
    telemetry.halted(&Halted { reason: &HaltReason::new("enough") });
    assert_eq!(bed.states().0, ["halted"]);
}

#[test]
fn single_events_are_watched_only_when_their_durations_are_asked_for() {
    let bed = Bed::new();
    let metrics = bed.metrics();
    assert!(!metrics.watches_events());
    // Another observer may have them watched.
    let meta = meta();
    metrics.event_stop(&id(), &EventStop { meta: &meta, duration: Duration::from_secs(1) });
    assert_eq!(bed.histogram("scriba.event.duration"), None);
    let metrics = metrics.time_events();
    assert!(metrics.watches_events());
    metrics.event_stop(&id(), &EventStop { meta: &meta, duration: Duration::from_secs(1) });
    let failure = failure();
    metrics.event_exception(&id(), &EventException { meta: &meta, duration: None, failure: &failure });
    assert_eq!(bed.histogram("scriba.event.duration"), Some((1, 1.0)), "an unknown duration is not zero");
}

const LAG: Lag = Lag {
    lag_time: Some(Duration::from_millis(1500)),
    lag_events: Some(5),
    head: Some(Position::new(9)),
    watermark: Some(Position::new(4)),
    state: State::Running,
    degraded_since: None,
};

const SUBSCRIBED: Subscribed = Subscribed { after: None, attempts: 1, waited: Duration::ZERO };

fn meta() -> EventMeta {
    let source = MemorySource::new();
    source.append("a", "apply", "{}");
    EventMeta::new(source.events().remove(0), false)
}

fn failure() -> Failure {
    Failure { kind: "kind".to_owned(), message: String::new(), detail: String::new(), attempts: 1 }
}

/// An instrument as documented: name, kind, unit, and attributes beside those of the projection.
type Instrument = (String, String, String, BTreeSet<String>);

/// Rows of the form `` | `scriba.name` | kind | `unit` | `attribute`, … | what | ``.
fn documented() -> Vec<Instrument> {
    let text = include_str!("../../docs/telemetry.md");
    let rows = text.lines().filter(|line| line.starts_with("| `scriba."));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, unit, attributes, what] = cells[..] else { panic!("not five cells: {row}") };
        assert!(!what.is_empty(), "what is it? {row}");
        let attributes = attributes.split('`').skip(1).step_by(2).map(ToOwned::to_owned).collect();
        (name.trim_matches('`').to_owned(), kind.to_owned(), unit.trim_matches('`').to_owned(), attributes)
    })
    .collect()
}

#[test]
fn every_instrument_is_documented_with_its_kind_unit_and_attributes_and_nothing_else_is() {
    let bed = Bed::new();
    let metrics = Arc::new(bed.metrics().time_events());
    let telemetry = Telemetry::new("orders".into(), vec![metrics as Arc<dyn Observer>]);
    let (meta, failure, at) = (meta(), failure(), Position::new(1));
    // Whatever moves an instrument.
    telemetry.event_stop(&EventStop { meta: &meta, duration: Duration::ZERO });
    telemetry.event_exception(&EventException { meta: &meta, duration: None, failure: &failure });
    telemetry.event_skipped(&EventSkipped { position: at, stream_id: "a", reason: SkipReason::Dedup });
    telemetry.batch_stop(&BatchStop {
        events: 3,
        applied: 1,
        skipped: 1,
        dead_lettered: 1,
        operations: 1,
        statements: 1,
        duration: Duration::ZERO,
        watermark: at,
    });
    let class = Some(FailureClass::Integrity);
    telemetry.batch_failed(&BatchFailed { events: 1, class, code: None, message: "", next: BatchNext::Isolate });
    telemetry.checkpoint_loaded(&CheckpointLoaded { watermark: None, epoch: 1, stored: true });
    telemetry.subscribed(&SUBSCRIBED);
    telemetry.subscribed(&SUBSCRIBED);
    telemetry.lag(&LAG);
    telemetry.gap_passed(&GapPassed { from: at, to: at, highest_visible: at, age: Duration::ZERO, evidence: "" });

    let mut exported: BTreeMap<String, Instrument> = BTreeMap::new();
    for Point { name, kind, unit, attributes, .. } in bed.read() {
        let instrument = (name.clone(), kind.to_owned(), unit, attributes.into_keys().collect());
        let before = exported.insert(name, instrument.clone());
        assert!(before.is_none_or(|before| before == instrument), "{instrument:?} has different attributes at times");
    }
    let mut documented = documented();
    documented.sort();
    assert_eq!(documented, exported.into_values().collect::<Vec<_>>());

    telemetry.stopped(&Stopped { reason: StopReason::Until, left_behind: None, halt_reason: None });
    assert_eq!(bed.states().0, ["stopped"]);
}
