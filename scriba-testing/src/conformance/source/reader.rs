//! What the rules are written with: events to append, and a reader that notes what it is given.

use std::time::Duration;

use bytes::Bytes;
use scriba_core::source::{Delivery, Demand, Page, Source, SourceError, SubscribeRequest, Subscription};
use scriba_core::telemetry::Telemetry;
use scriba_core::{Position, ProjectionId, RecordedEvent};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::bed::{NewEvent, SourceBed};
use crate::conformance::wait::{PATIENCE, WATCH, answer, give_up_after};

/// Pages with nothing in them after which a rule does not go on; one that is strict about them is a rule of its own.
const ENDLESS: usize = 10_000;
/// More than any rule leaves without an ack.
pub(super) const IN_FLIGHT: usize = 10_000;
/// More than any rule appends.
pub(super) const PLENTY: Demand = Demand { events: 10_000, bytes: 1 << 30 };

pub(super) const TYPES: [&str; 2] = ["conformance-a", "conformance-b"];
const STREAMS: usize = 3;

/// An event of the first type.
pub(super) fn event(stream_id: &str) -> NewEvent {
    NewEvent {
        id: Uuid::new_v4().to_string(),
        stream_id: stream_id.to_owned(),
        event_type: TYPES[0].to_owned(),
        data: Bytes::from_static(b"{}"),
        metadata: Bytes::new(),
    }
}

/// Events over several streams and types, neighbours in different ones.
pub(super) fn events(count: usize) -> Vec<NewEvent> {
    let new = |number: usize| NewEvent {
        event_type: TYPES[number % TYPES.len()].to_owned(),
        data: format!("{{\"number\": {number}}}").into(),
        ..event(&format!("conformance-{}", number % STREAMS))
    };
    (0..count).map(new).collect()
}

/// Appends one event.
pub(super) async fn append_one<B: SourceBed>(bed: &B, event: NewEvent) -> Position {
    append(bed, vec![event]).await[0]
}

/// Appends events, and holds the bed to its part.
pub(super) async fn append<B: SourceBed>(bed: &B, events: Vec<NewEvent>) -> Vec<Position> {
    let count = events.len();
    let positions = bed.append(events).await;
    assert_eq!(positions.len(), count, "the bed returned other positions than it was given events");
    assert!(positions.is_sorted_by(|one, next| one < next), "the bed appended in another order: {positions:?}");
    positions
}

pub(super) fn request(after: Option<Position>, event_types: Option<&'static [&'static str]>) -> SubscribeRequest {
    request_of("conformance", after, event_types)
}

fn request_of(
    projection: &str,
    after: Option<Position>,
    event_types: Option<&'static [&'static str]>,
) -> SubscribeRequest {
    let telemetry = Telemetry::new(ProjectionId::from(projection), Vec::new());
    SubscribeRequest { after, event_types, in_flight: IN_FLIGHT, telemetry }
}

/// A subscription, and what it delivered so far.
pub(super) struct Reader {
    subscription: Box<dyn Subscription>,
    pub(super) events: Vec<RecordedEvent>,
    /// The last position of an event or of progress.
    pub(super) reached: Option<Position>,
    pub(super) progress: Option<Position>,
    /// Progress, and an event not above it that came after it.
    pub(super) overtaken: Vec<(Position, Position)>,
    empty_in_a_row: usize,
}

impl Reader {
    /// Subscribes to all events above a position.
    pub(super) async fn open<B: SourceBed>(bed: &B, after: Option<Position>) -> Self {
        Self::ask(&*bed.source().await, request(after, None)).await
    }

    /// Subscribes to all events of some types.
    pub(super) async fn open_types<B: SourceBed>(bed: &B, types: &'static [&'static str]) -> Self {
        Self::ask(&*bed.source().await, request(None, Some(types))).await
    }

    /// Subscribes to all events, as another projection.
    pub(super) async fn open_as<B: SourceBed>(bed: &B, projection: &str) -> Self {
        Self::ask(&*bed.source().await, request_of(projection, None, None)).await
    }

    async fn ask(source: &dyn Source, request: SubscribeRequest) -> Self {
        Self::of(answer("subscribe", source.subscribe(request)).await)
    }

    pub(super) fn of(subscription: Box<dyn Subscription>) -> Self {
        Self {
            subscription,
            events: Vec::new(),
            reached: None,
            progress: None,
            overtaken: Vec::new(),
            empty_in_a_row: 0,
        }
    }

    /// The next page, which has to come.
    pub(super) async fn page(&mut self, demand: Demand) -> Page {
        let page = answer("next", self.subscription.next(demand)).await;
        self.note(&page);
        page
    }

    /// The next page, for which nobody waits long.
    pub(super) async fn page_within(&mut self, time: Duration) -> Option<Result<Page, SourceError>> {
        let page = timeout(time, self.subscription.next(PLENTY)).await.ok()?;
        if let Ok(page) = &page {
            self.note(page);
        }
        Some(page)
    }

    /// Reads for a while, until there is surely nothing more.
    pub(super) async fn settle(&mut self) {
        let until = Instant::now() + WATCH;
        while let Some(page) = self.page_within(until.saturating_duration_since(Instant::now())).await {
            page.unwrap_or_else(|error| panic!("next: {error}"));
        }
    }

    /// A page, or whatever else comes of it, which has to come.
    pub(super) async fn page_or_end(&mut self) -> Result<Page, SourceError> {
        let page = self.page_within(PATIENCE).await;
        page.unwrap_or_else(|| panic!("next: neither a page nor an error within {PATIENCE:?}"))
    }

    /// The next page, dropped after so many polls.
    pub(super) async fn page_or_drop(&mut self, polls: usize, demand: Demand) {
        match give_up_after(polls, self.subscription.next(demand)).await {
            Some(Ok(page)) => self.note(&page),
            Some(Err(error)) => panic!("next: {error}"),
            // Whoever dropped a call does something else before the next one.
            None => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }

    /// Reads until everything up to a position is delivered, or said to be none of what was asked for.
    pub(super) async fn until(&mut self, position: Position) {
        self.until_with(PLENTY, position).await;
    }

    pub(super) async fn until_with(&mut self, demand: Demand, position: Position) {
        while self.reached < Some(position) {
            self.page(demand).await;
        }
    }

    pub(super) async fn ack(&mut self, position: Position) {
        answer("ack", self.subscription.ack(position)).await;
    }

    /// The positions of the events that were delivered, as they came.
    pub(super) fn positions(&self) -> Vec<Position> {
        self.events.iter().map(|event| event.position).collect()
    }

    /// The positions of the events that were delivered, in order, so that another order breaks one rule only.
    pub(super) fn sorted(&self) -> Vec<Position> {
        let mut positions = self.positions();
        positions.sort_unstable();
        positions
    }

    /// The event at a position, which has to be delivered.
    pub(super) fn at(&self, position: Position) -> &RecordedEvent {
        let found = self.events.iter().find(|event| event.position == position);
        found.unwrap_or_else(|| panic!("the event at position {position} was not delivered"))
    }

    fn note(&mut self, page: &Page) {
        self.empty_in_a_row = if page.deliveries.is_empty() { self.empty_in_a_row + 1 } else { 0 };
        assert!(self.empty_in_a_row < ENDLESS, "{ENDLESS} empty pages in a row: `next` has to wait");
        for delivery in &page.deliveries {
            let position = match delivery {
                Delivery::Event(event) => {
                    let overtaken = self.progress.filter(|progress| event.position <= *progress);
                    self.overtaken.extend(overtaken.map(|progress| (progress, event.position)));
                    self.events.push(event.clone());
                    event.position
                }
                Delivery::Progress(position) => {
                    self.progress = self.progress.max(Some(*position));
                    *position
                }
            };
            self.reached = self.reached.max(Some(position));
        }
    }
}
