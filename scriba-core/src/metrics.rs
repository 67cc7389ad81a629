//! What the engine reports, as OpenTelemetry metrics. With the cargo feature `opentelemetry`.
//!
//! `docs/telemetry.md` lists the instruments.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::metrics::{AsyncInstrument, Counter, Histogram, Meter};

use crate::event::Position;
use crate::lifecycle::State;
use crate::projection::ProjectionId;
use crate::telemetry::{
    BatchFailed, BatchNext, BatchStop, CheckpointLoaded, Degraded, EventException, EventSkipped, EventStop, GapPassed,
    Halted, Lag, Observer, OwnershipLost, Paused, Recovered, Resumed, SkipReason, Standby, Stopped, Subscribed,
};

/// Buckets for seconds: from a handler that is ready at once to one that runs into its timeout.
const SECONDS: [f64; 18] = [
    0.000_01, 0.000_1, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0,
];
/// Buckets for what a batch holds.
const NUMBERS: [f64; 13] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0];

const STATES: [State; 6] =
    [State::Initializing, State::Running, State::Paused, State::Draining, State::Halted, State::Stopped];

/// An [`Observer`] that records metrics. It installs no exporter: the meter comes from a provider of yours.
///
/// Every instrument has the attributes `projection.name` and `projection.version`. No attribute grows with the events: a
/// stream, a position or an id is never one. A gauge whose value is not known exports nothing, and all gauges end when this
/// is dropped.
///
/// ```
/// use std::sync::Arc;
///
/// use opentelemetry::metrics::MeterProvider;
/// use opentelemetry_sdk::metrics::SdkMeterProvider;
/// use scriba_core::Scriba;
/// use scriba_core::metrics::Metrics;
/// use scriba_core::telemetry::Observer;
///
/// let provider = SdkMeterProvider::builder().build(); // with a reader and an exporter
/// let metrics = Metrics::new(&provider.meter("scriba"));
/// let scriba = Scriba::with_observers([Arc::new(metrics) as Arc<dyn Observer>]);
/// ```
pub struct Metrics {
    times_events: bool,
    events: Counter<u64>,
    exceptions: Counter<u64>,
    event_duration: Histogram<f64>,
    batch_duration: Histogram<f64>,
    batch_events: Histogram<u64>,
    batch_statements: Histogram<u64>,
    batch_failures: Counter<u64>,
    restarts: Counter<u64>,
    gaps_passed: Counter<u64>,
    /// What the gauges show. They hold it too, but not alive.
    standings: Arc<Standings>,
}

type Standings = Mutex<HashMap<ProjectionId, Standing>>;

/// How a projection stands, as far as it was told. What is not known is `None`.
#[derive(Default)]
struct Standing {
    state: Option<State>,
    /// Paused by the user, which a lost pipeline does not change.
    paused: bool,
    standby: Option<bool>,
    degraded: bool,
    /// A pipeline of this lifetime had a subscription.
    subscribed: bool,
    watermark: Option<Position>,
    lag_events: Option<u64>,
    lag_time: Option<Duration>,
}

impl Metrics {
    /// Makes the instruments. The duration of single events is not recorded: see [`Metrics::time_events`].
    pub fn new(meter: &Meter) -> Self {
        let standings = Arc::new(Standings::default());
        gauges(meter, &standings);
        Self {
            times_events: false,
            events: counter(meter, "scriba.events", "{event}", "Events accounted for, or delivered once too often."),
            exceptions: counter(meter, "scriba.event.exceptions", "{attempt}", "Attempts at an event that failed."),
            event_duration: seconds(meter, "scriba.event.duration", "How long a handler took for an attempt."),
            batch_duration: seconds(
                meter,
                "scriba.batch.duration",
                "How long a batch took until its commit was known.",
            ),
            batch_events: numbers(meter, "scriba.batch.events", "{event}", "Events in a committed batch."),
            batch_statements: numbers(
                meter,
                "scriba.batch.statements",
                "{statement}",
                "Statements for a committed batch.",
            ),
            batch_failures: counter(meter, "scriba.batch.failures", "{batch}", "Batches that were not committed."),
            restarts: counter(meter, "scriba.restarts", "{restart}", "Subscriptions after the first since the start."),
            gaps_passed: counter(meter, "scriba.gaps.passed", "{gap}", "Gaps in a log that were proven to stay."),
            standings,
        }
    }

    /// Records the duration of single events too, which costs two looks at a clock and a measurement for each.
    #[must_use]
    pub fn time_events(mut self) -> Self {
        self.times_events = true;
        self
    }

    fn standings(&self) -> MutexGuard<'_, HashMap<ProjectionId, Standing>> {
        lock(&self.standings)
    }

    fn note(&self, id: &ProjectionId, change: impl FnOnce(&mut Standing)) {
        let mut standings = self.standings();
        if let Some(standing) = standings.get_mut(id) {
            return change(standing);
        }
        change(standings.entry(id.clone()).or_default());
    }

    fn time_event(&self, id: &ProjectionId, duration: Option<Duration>) {
        if let Some(duration) = duration.filter(|_| self.times_events) {
            self.event_duration.record(duration.as_secs_f64(), &attributes(id));
        }
    }

    fn count_events(&self, id: &ProjectionId, outcome: &'static str, events: u64) {
        if events > 0 {
            self.events.add(events, &attributes_and(id, "outcome", outcome));
        }
    }
}

impl Observer for Metrics {
    fn watches_events(&self) -> bool {
        self.times_events
    }

    fn event_stop(&self, id: &ProjectionId, event: &EventStop<'_>) {
        self.time_event(id, Some(event.duration));
    }

    fn event_exception(&self, id: &ProjectionId, event: &EventException<'_>) {
        self.exceptions.add(1, &attributes_and(id, "kind", event.failure.kind.clone()));
        self.time_event(id, event.duration);
    }

    fn event_skipped(&self, id: &ProjectionId, event: &EventSkipped<'_>) {
        // The others are counted when they are committed.
        if event.reason == SkipReason::Dedup {
            self.count_events(id, "deduplicated", 1);
        }
    }

    fn batch_stop(&self, id: &ProjectionId, event: &BatchStop) {
        self.count_events(id, "applied", event.applied);
        self.count_events(id, "skipped", event.skipped);
        self.count_events(id, "dead_lettered", event.dead_lettered);
        let attributes = attributes(id);
        self.batch_duration.record(event.duration.as_secs_f64(), &attributes);
        self.batch_events.record(event.events, &attributes);
        self.batch_statements.record(event.statements, &attributes);
        self.note(id, |standing| standing.watermark = Some(event.watermark));
    }

    fn batch_failed(&self, id: &ProjectionId, event: &BatchFailed<'_>) {
        let class = event.class.map_or_else(|| "none".to_owned(), |class| class.to_string());
        let [name, version] = attributes(id);
        let next = KeyValue::new("next", event.next.as_str());
        self.batch_failures.add(1, &[name, version, KeyValue::new("class", class), next]);
        if let BatchNext::Replay(_) = event.next {
            self.note(id, |standing| standing.state = Some(State::Initializing));
        }
    }

    fn paused(&self, id: &ProjectionId, _: &Paused) {
        self.note(id, |standing| {
            standing.paused = true;
            standing.state = Some(State::Paused);
        });
    }

    fn resumed(&self, id: &ProjectionId, _: &Resumed) {
        self.note(id, |standing| {
            standing.paused = false;
            standing.state = Some(State::Running);
        });
    }

    fn stopped(&self, id: &ProjectionId, _: &Stopped<'_>) {
        self.note(id, |standing| *standing = Standing { state: Some(State::Stopped), ..Standing::default() });
    }

    fn halted(&self, id: &ProjectionId, _: &Halted<'_>) {
        self.note(id, |standing| standing.state = Some(State::Halted));
    }

    fn degraded(&self, id: &ProjectionId, _: &Degraded<'_>) {
        self.note(id, |standing| {
            standing.degraded = true;
            standing.state = Some(State::Initializing);
        });
    }

    fn recovered(&self, id: &ProjectionId, _: &Recovered<'_>) {
        self.note(id, |standing| standing.degraded = false);
    }

    fn checkpoint_loaded(&self, id: &ProjectionId, event: &CheckpointLoaded) {
        self.note(id, |standing| {
            standing.standby = Some(false);
            standing.state = Some(State::Initializing);
            standing.watermark = event.watermark;
        });
    }

    fn lag(&self, id: &ProjectionId, event: &Lag) {
        self.note(id, |standing| {
            standing.state = Some(event.state);
            standing.degraded = event.degraded_since.is_some();
            standing.watermark = event.watermark;
            standing.lag_events = event.lag_events;
            standing.lag_time = event.lag_time;
        });
    }

    fn standby(&self, id: &ProjectionId, _: &Standby<'_>) {
        self.note(id, |standing| {
            standing.standby = Some(true);
            standing.state = Some(State::Running);
        });
    }

    fn subscribed(&self, id: &ProjectionId, _: &Subscribed) {
        let mut first = false;
        self.note(id, |standing| {
            first = !standing.subscribed;
            standing.subscribed = true;
            standing.state = Some(if standing.paused { State::Paused } else { State::Running });
        });
        if !first {
            self.restarts.add(1, &attributes(id));
        }
    }

    fn gap_passed(&self, id: &ProjectionId, _: &GapPassed<'_>) {
        self.gaps_passed.add(1, &attributes(id));
    }

    fn ownership_lost(&self, id: &ProjectionId, _: &OwnershipLost<'_>) {
        self.note(id, |standing| {
            (standing.watermark, standing.lag_events, standing.lag_time) = (None, None, None);
        });
    }
}

/// The gauges. They are asked by the meter's reader whenever it collects, so that what is not known any more is gone.
fn gauges(meter: &Meter, standings: &Arc<Standings>) {
    let gauge = |name, unit, description, show: Show<u64>| {
        let gauge = meter.u64_observable_gauge(name).with_unit(unit).with_description(description);
        gauge.with_callback(each(standings, show)).build()
    };
    gauge("scriba.state", "1", "1 for the state the projection is in, 0 for the others.", |id, standing, gauge| {
        for state in STATES.into_iter().filter(|_| standing.state.is_some()) {
            gauge.observe(u64::from(standing.state == Some(state)), &attributes_and(id, "state", state.as_str()));
        }
    });
    gauge("scriba.standby", "1", "1 while another node holds the projection, else 0.", |id, standing, gauge| {
        observe(id, gauge, standing.standby.map(u64::from));
    });
    gauge("scriba.degraded", "1", "1 while the projection does not get on, else 0.", |id, standing, gauge| {
        let told = standing.state.filter(|state| *state != State::Stopped);
        observe(id, gauge, told.map(|_| u64::from(standing.degraded)));
    });
    gauge("scriba.watermark", "{position}", "Everything up to it is accounted for.", |id, standing, gauge| {
        observe(id, gauge, standing.watermark.map(Position::get));
    });
    gauge("scriba.lag.events", "{event}", "Positions from the watermark to the head.", |id, standing, gauge| {
        observe(id, gauge, standing.lag_events);
    });
    let gauge = meter.f64_observable_gauge("scriba.lag.time").with_unit("s");
    let gauge = gauge.with_description("The age of the event at the watermark; 0 when caught up.");
    gauge
        .with_callback(each(standings, |id, standing, gauge| {
            observe(id, gauge, standing.lag_time.map(|lag| lag.as_secs_f64()));
        }))
        .build();
}

/// Shows how one projection stands in a gauge.
type Show<T> = fn(&ProjectionId, &Standing, &dyn AsyncInstrument<T>);

fn each<T: 'static>(standings: &Arc<Standings>, show: Show<T>) -> impl Fn(&dyn AsyncInstrument<T>) + use<T> {
    let standings = Arc::downgrade(standings);
    move |gauge| {
        let Some(standings) = standings.upgrade() else { return };
        for (id, standing) in lock(&standings).iter() {
            show(id, standing, gauge);
        }
    }
}

fn observe<T>(id: &ProjectionId, gauge: &dyn AsyncInstrument<T>, value: Option<T>) {
    if let Some(value) = value {
        gauge.observe(value, &attributes(id));
    }
}

fn counter(meter: &Meter, name: &'static str, unit: &'static str, description: &'static str) -> Counter<u64> {
    meter.u64_counter(name).with_unit(unit).with_description(description).build()
}

fn seconds(meter: &Meter, name: &'static str, description: &'static str) -> Histogram<f64> {
    let histogram = meter.f64_histogram(name).with_unit("s").with_description(description);
    histogram.with_boundaries(SECONDS.to_vec()).build()
}

fn numbers(meter: &Meter, name: &'static str, unit: &'static str, description: &'static str) -> Histogram<u64> {
    let histogram = meter.u64_histogram(name).with_unit(unit).with_description(description);
    histogram.with_boundaries(NUMBERS.to_vec()).build()
}

fn attributes(id: &ProjectionId) -> [KeyValue; 2] {
    [KeyValue::new("projection.name", id.name.clone()), KeyValue::new("projection.version", i64::from(id.version))]
}

fn attributes_and(id: &ProjectionId, key: &'static str, value: impl Into<opentelemetry::Value>) -> [KeyValue; 3] {
    let [name, version] = attributes(id);
    [name, version, KeyValue::new(key, value)]
}

/// A panic while the lock is held can only come from an allocation; what is inside stays readable.
fn lock(standings: &Standings) -> MutexGuard<'_, HashMap<ProjectionId, Standing>> {
    standings.lock().unwrap_or_else(PoisonError::into_inner)
}
