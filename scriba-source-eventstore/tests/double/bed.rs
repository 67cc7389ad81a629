//! A server, appends to it, and a reader.

use std::time::Duration;

use scriba_core::source::{Delivery, Demand, SourceError, SubscribeRequest, Subscription};
use scriba_core::telemetry::Telemetry;
use scriba_core::{Position, ProjectionId, RecordedEvent, Source};
use scriba_source_eventstore::{CatchUpSource, EventStore, PersistentSource};
use scriba_testing::eventstore::{EventStoreDouble, GroupStats, NewEvent};
use scriba_testing::{Recorded, Recorder};
use tokio::time::{Instant, timeout};

pub(crate) const DEMAND: Demand = Demand { events: 1_000, bytes: 16 << 20 };
/// No test waits longer for what has to come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);
pub(crate) const STREAM: &str = "account-1";
/// The group of the projection that a [`Reader`] reads for.
pub(crate) const GROUP: &str = "reader_v1";

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn id() -> ProjectionId {
    ProjectionId::from("reader")
}

pub(crate) struct Server {
    pub(crate) double: EventStoreDouble,
    pub(crate) store: EventStore,
}

impl Server {
    pub(crate) fn new() -> Self {
        let double = EventStoreDouble::start().unwrap();
        let store = store(&double.connection_string());
        Self { double, store }
    }

    /// Appends so many events to [`STREAM`].
    pub(crate) fn append(&self, count: usize) {
        let event = |number| NewEvent::json("Deposited", format!(r#"{{"number": {number}}}"#));
        self.double.append(STREAM, (0..count).map(event));
    }

    /// Cuts connections, and goes on when the client has noticed: it fails the next call.
    pub(crate) async fn cut(&self) {
        self.double.cut_connections();
        let started = Instant::now();
        while let Err(error) = self.catch_up().check().await {
            assert!(started.elapsed() < PATIENCE, "{error}");
        }
    }

    pub(crate) fn persistent(&self) -> PersistentSource {
        PersistentSource::stream(&self.store, STREAM)
    }

    pub(crate) fn catch_up(&self) -> CatchUpSource {
        CatchUpSource::stream(&self.store, STREAM)
    }

    /// How the group of a reader stands.
    pub(crate) fn group(&self) -> GroupStats {
        self.double.group(STREAM, GROUP).unwrap()
    }

    /// Waits until the group stands as it should.
    pub(crate) async fn until_group(&self, what: &str, fits: impl Fn(&GroupStats) -> bool) {
        let started = Instant::now();
        while !fits(&self.group()) {
            assert!(started.elapsed() < PATIENCE, "{what}: {:?}", self.group());
            tokio::time::sleep(millis(5)).await;
        }
    }
}

pub(crate) fn store(connection_string: &str) -> EventStore {
    EventStore::new(connection_string).unwrap().client(crate::CLIENT)
}

pub(crate) fn request(
    after: Option<u64>,
    event_types: Option<&'static [&'static str]>,
) -> (SubscribeRequest, Recorder) {
    let recorder = Recorder::new();
    let telemetry = Telemetry::new(id(), vec![std::sync::Arc::new(recorder.clone())]);
    (SubscribeRequest { after: after.map(Position::new), event_types, in_flight: 1_000, telemetry }, recorder)
}

pub(crate) struct Reader {
    pub(crate) subscription: Box<dyn Subscription>,
    recorder: Recorder,
    pub(crate) events: Vec<RecordedEvent>,
    /// The last position of an event or of progress.
    pub(crate) reached: Option<u64>,
    pub(crate) caught_up: bool,
}

impl Reader {
    pub(crate) async fn try_start(source: &dyn Source, after: Option<u64>) -> Result<Self, SourceError> {
        Self::try_start_types(source, after, None).await
    }

    pub(crate) async fn start(source: &dyn Source, after: Option<u64>) -> Self {
        Self::try_start(source, after).await.unwrap()
    }

    /// Subscribes as soon as the server and its client are back.
    pub(crate) async fn start_again(source: &dyn Source, after: Option<u64>) -> Self {
        let started = Instant::now();
        loop {
            match Self::try_start(source, after).await {
                Ok(reader) => return reader,
                Err(SourceError::Unavailable { .. } | SourceError::Held { .. }) if started.elapsed() < PATIENCE => {
                    tokio::time::sleep(millis(50)).await;
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    pub(crate) async fn try_start_types(
        source: &dyn Source,
        after: Option<u64>,
        event_types: Option<&'static [&'static str]>,
    ) -> Result<Self, SourceError> {
        let (request, recorder) = request(after, event_types);
        Ok(Self::of(source.subscribe(request).await?, recorder))
    }

    pub(crate) fn of(subscription: Box<dyn Subscription>, recorder: Recorder) -> Self {
        Self { subscription, recorder, events: Vec::new(), reached: None, caught_up: false }
    }

    /// Takes the next page, or what it ends with; `None` if neither came in time.
    pub(crate) async fn page(&mut self, demand: Demand, within: Duration) -> Option<Result<(), SourceError>> {
        let page = match timeout(within, self.subscription.next(demand)).await.ok()? {
            Ok(page) => page,
            Err(error) => return Some(Err(error)),
        };
        self.caught_up = page.caught_up;
        for delivery in page.deliveries {
            self.reached = self.reached.max(Some(delivery.position().get()));
            if let Delivery::Event(event) = delivery {
                self.events.push(event);
            }
        }
        Some(Ok(()))
    }

    /// Reads until a position is reached.
    pub(crate) async fn until(&mut self, position: u64) {
        while self.reached < Some(position) {
            let page = self.page(DEMAND, PATIENCE).await;
            page.unwrap_or_else(|| panic!("still at {:?}", self.reached)).unwrap();
        }
    }

    /// Reads until the subscription ends.
    pub(crate) async fn end(&mut self) -> SourceError {
        loop {
            match self.page(DEMAND, PATIENCE).await {
                Some(Ok(())) => {}
                Some(Err(error)) => return error,
                None => panic!("it did not end, and is at {:?}", self.reached),
            }
        }
    }

    /// Reads for a while, during which no event may come.
    pub(crate) async fn sees_nothing_for(&mut self, time: Duration) {
        let (until, before) = (Instant::now() + time, self.events.len());
        while let Some(page) = self.page(DEMAND, until.saturating_duration_since(Instant::now())).await {
            page.unwrap();
        }
        assert_eq!(self.positions().split_off(before), Vec::<u64>::new());
    }

    pub(crate) async fn ack(&mut self, position: u64) {
        self.subscription.ack(Position::new(position)).await.unwrap();
    }

    pub(crate) fn positions(&self) -> Vec<u64> {
        self.events.iter().map(|event| event.position.get()).collect()
    }

    /// First and last positions of gaps that were passed.
    pub(crate) fn passed(&self) -> Vec<(u64, u64)> {
        let gap = |recorded: Recorded| match recorded {
            Recorded::GapPassed { from, to, evidence, .. } => {
                assert_eq!(evidence, "truncated");
                Some((from.get(), to.get()))
            }
            _ => None,
        };
        self.recorder.events_of(id()).into_iter().filter_map(gap).collect()
    }
}

/// Why a projection would halt.
pub(crate) fn halted<T>(outcome: Result<T, SourceError>) -> String {
    match outcome {
        Err(SourceError::Unusable { message }) => message,
        Err(other) => panic!("no reason to halt: {other:?}"),
        Ok(_) => panic!("no reason to halt: it is well"),
    }
}

pub(crate) fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}
