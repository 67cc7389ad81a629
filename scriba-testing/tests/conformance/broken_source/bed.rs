//! The memory source behind something that breaks it.

use std::collections::HashMap;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::FutureExt;
use scriba_core::source::{
    Delivery, Demand, Page, PassedOver, Place, Source, SourceError, SourceIdentity, SourceInspector, SubscribeRequest,
    Subscription, TypeSet,
};
use scriba_core::{EventId, Position, ProjectionId, RecordedEvent};
use scriba_testing::conformance::source::{Cut, HoldOpen, NewEvent, Restore, SourceBed, Truncate};

use super::{BREAK, Break};
use crate::source::MemoryBed;

/// Breaks what [`BREAK`] says.
pub(crate) struct BrokenBed {
    memory: MemoryBed,
    shared: Arc<Shared>,
}

/// What a broken server keeps of all its subscriptions.
struct Shared {
    broken: Break,
    open: AtomicUsize,
    cut: AtomicBool,
    /// Whether somebody seems to hold the only subscription there may be.
    claimed: Mutex<bool>,
    /// What is never delivered again.
    consumed: Mutex<Option<Position>>,
    ids: Mutex<HashMap<Position, Option<EventId>>>,
}

impl Shared {
    fn is(&self, broken: Break) -> bool {
        self.broken == broken
    }
}

#[async_trait]
impl SourceBed for BrokenBed {
    async fn new() -> Self {
        let broken = BREAK.get();
        let memory = MemoryBed::new().await;
        let memory = if broken == Break::DeliversAllTypes { MemoryBed(memory.0.filters_types(false)) } else { memory };
        let shared = Shared {
            broken,
            open: AtomicUsize::new(0),
            cut: AtomicBool::new(false),
            claimed: Mutex::new(false),
            consumed: Mutex::new(None),
            ids: Mutex::default(),
        };
        Self { memory, shared: Arc::new(shared) }
    }

    async fn source(&self) -> Box<dyn Source> {
        Box::new(BrokenSource { memory: self.memory.source().await, shared: self.shared.clone() })
    }

    async fn append(&self, events: Vec<NewEvent>) -> Vec<Position> {
        self.memory.append(events).await
    }
}

#[async_trait]
impl Truncate for BrokenBed {
    async fn truncate_below(&self, position: Position) {
        self.memory.truncate_below(position).await;
    }
}

#[async_trait]
impl Restore for BrokenBed {
    async fn restore_before(&self, position: Position) {
        self.memory.restore_before(position).await;
    }
}

#[async_trait]
impl Cut for BrokenBed {
    async fn cut(&self) {
        self.memory.cut().await;
        self.shared.cut.store(true, Ordering::Relaxed);
        *self.shared.claimed.lock().unwrap() = self.shared.is(Break::ClaimSurvivesACut);
    }
}

#[async_trait]
impl HoldOpen for BrokenBed {
    type Held = Held;

    async fn hold(&self, event: NewEvent) -> Held {
        if self.shared.is(Break::PassesOpenAppends) {
            // Nothing shows that the position is taken, so what is appended above it is delivered.
            let position = Position::new(self.memory.0.events().len() as u64);
            let above = Position::new(position.get() + 1);
            self.memory.0.append_at(above, "conformance-0", "conformance-a", "{}");
            return Held::Unseen(event, position);
        }
        Held::Seen(self.memory.hold(event).await)
    }

    async fn commit(&self, held: Held) -> Position {
        match held {
            Held::Seen(held) => self.memory.commit(held).await,
            Held::Unseen(event, position) => {
                self.memory.0.append_late(position, event.stream_id, event.event_type, event.data);
                position
            }
        }
    }
}

pub(crate) enum Held {
    Seen(<MemoryBed as HoldOpen>::Held),
    Unseen(NewEvent, Position),
}

struct PlaceAtTheHead {
    place: Box<dyn Place>,
    head: Option<Position>,
}

#[async_trait]
impl Place for PlaceAtTheHead {
    async fn subscribe(self: Box<Self>, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.place.subscribe(SubscribeRequest { after: self.head, ..request }).await
    }
}

struct BrokenSource {
    memory: Box<dyn Source>,
    shared: Arc<Shared>,
}

#[async_trait]
impl Source for BrokenSource {
    async fn check(&self) -> Result<(), SourceError> {
        if self.shared.is(Break::Check) { Err(SourceError::unusable("broken")) } else { self.memory.check().await }
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        static OPENINGS: AtomicU64 = AtomicU64::new(0);
        let mut identity = self.memory.identity().await?;
        match self.shared.broken {
            Break::FingerprintOfEachOpening => {
                identity.fingerprint = format!("opening {}", OPENINGS.fetch_add(1, Ordering::Relaxed));
            }
            Break::OneFingerprintForAll => "store".clone_into(&mut identity.fingerprint),
            _ => {}
        }
        Ok(identity)
    }

    async fn subscribe(&self, mut request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        let shared = &self.shared;
        if *shared.claimed.lock().unwrap() {
            return Err(SourceError::unavailable("another holds the subscription"));
        }
        if shared.is(Break::ClaimSurvivesADroppedSubscribe) {
            *shared.claimed.lock().unwrap() = true;
            tokio::task::yield_now().await;
            *shared.claimed.lock().unwrap() = false;
        }
        let asked = request.after.map(Position::get);
        request.after = match (shared.broken, asked) {
            // Higher ones are asked for by the rule of acks too.
            (Break::BeginsOneTooHigh, Some(asked @ ..4)) => Some(Position::new(asked + 1)),
            (Break::BeginsOneTooLow, Some(asked @ 1..)) => Some(Position::new(asked - 1)),
            (Break::ZeroIsTheBeginning, Some(0)) => None,
            (Break::PrefetchCountsAsDelivered, _) => request.after.max(*shared.consumed.lock().unwrap()),
            _ => request.after,
        };
        let number = shared.open.fetch_add(1, Ordering::Relaxed);
        let mut inspector = self.memory.inspector().await?;
        let head = inspector.head().await?;
        let truncated = head.is_some() && inspector.event_id_at(Position::new(0)).await?.is_none();
        if truncated && shared.is(Break::HaltsAtRetention) {
            return Err(SourceError::unusable("the first event is missing"));
        }
        let memory = self.memory.subscribe(request).await?;
        let shared = shared.clone();
        Ok(Box::new(BrokenSubscription { memory, shared, number, head, last: None, caught_up: false, stash: None }))
    }

    fn admits_one(&self) -> bool {
        self.memory.admits_one()
    }

    async fn claim(&self, id: &ProjectionId, in_flight: usize) -> Result<Option<Box<dyn Place>>, SourceError> {
        let head = self.memory.inspector().await?.head().await?;
        match self.memory.claim(id, in_flight).await {
            Ok(Some(place)) if self.shared.is(Break::PlaceBeginsAtTheHead) => {
                Ok(Some(Box::new(PlaceAtTheHead { place, head })))
            }
            Err(SourceError::Held { .. }) if self.shared.is(Break::ClaimIsNeverRefused) => Ok(None),
            answer => answer,
        }
    }

    fn keeps_position(&self) -> bool {
        self.memory.keeps_position()
    }

    async fn reset(&self, id: &ProjectionId) -> Result<(), SourceError> {
        if self.shared.is(Break::ResetDoesNothing) { Ok(()) } else { self.memory.reset(id).await }
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        Ok(Box::new(BrokenInspector { memory: self.memory.inspector().await?, shared: self.shared.clone() }))
    }
}

struct BrokenSubscription {
    memory: Box<dyn Subscription>,
    shared: Arc<Shared>,
    /// How many others were open as it was opened.
    number: usize,
    head: Option<Position>,
    /// The last event delivered.
    last: Option<Position>,
    caught_up: bool,
    /// A page that nobody was woken up for.
    stash: Option<Page>,
}

#[async_trait]
impl Subscription for BrokenSubscription {
    async fn next(&mut self, demand: Demand) -> Result<Page, SourceError> {
        let page = loop {
            let mut page = self.taken(self.asked(demand)).await?;
            if self.withholds(&page, demand) {
                pending::<()>().await;
            }
            let empty = page.deliveries.is_empty();
            self.spoil(&mut page);
            if empty || !page.deliveries.is_empty() {
                break page;
            }
        };
        if self.shared.is(Break::LosesAPageWithADroppedNext) {
            tokio::task::yield_now().await;
        }
        let last = page.deliveries.iter().filter_map(event).map(|event| event.position).max();
        self.last = self.last.max(last);
        self.caught_up |= page.caught_up;
        Ok(page)
    }

    async fn ack(&mut self, position: Position) -> Result<(), SourceError> {
        let all = self.last.filter(|_| self.shared.is(Break::AckOfAllHandedOut));
        self.memory.ack(all.unwrap_or(position)).await
    }
}

impl BrokenSubscription {
    fn asked(&self, demand: Demand) -> Demand {
        match self.shared.broken {
            Break::OneEventTooMany => Demand { events: demand.events + 1, ..demand },
            Break::IgnoresBytes => Demand { bytes: usize::MAX, ..demand },
            _ => demand,
        }
    }

    /// The page of the memory source, or what becomes of the wait for it.
    async fn taken(&mut self, demand: Demand) -> Result<Page, SourceError> {
        if let Some(page) = self.stash.take() {
            return Ok(page);
        }
        let broken = self.shared.broken;
        if let Some(page) = self.memory.next(demand).now_or_never() {
            return if broken == Break::HangsWhenCut && page.is_err() { pending().await } else { page };
        }
        match broken {
            Break::EmptyPagesWhileItWaits => {
                tokio::time::sleep(Duration::from_millis(10)).await;
                Ok(Page::default())
            }
            Break::MissesTheWakeUp => {
                self.stash = Some(self.memory.next(demand).await?);
                pending().await
            }
            Break::HangsWhenCut => match self.memory.next(demand).await {
                Ok(page) => Ok(page),
                Err(_) => pending().await,
            },
            _ => self.memory.next(demand).await,
        }
    }

    fn withholds(&self, page: &Page, demand: Demand) -> bool {
        const LARGE: usize = 100_000;
        match self.shared.broken {
            Break::WithholdsLargeEvents => {
                page.deliveries.iter().filter_map(event).any(|event| event.size() > demand.bytes.max(LARGE))
            }
            Break::SilentWhenEmpty => page.deliveries.is_empty(),
            _ => false,
        }
    }

    fn spoil(&self, page: &mut Page) {
        let deliveries = &mut page.deliveries;
        match self.shared.broken {
            Break::SwapsEventsOfTwoStreams => {
                if let [Delivery::Event(_), Delivery::Event(_), ..] = deliveries.as_slice() {
                    deliveries.swap(0, 1);
                }
            }
            Break::LosesAnEventAtTheEdgeOfABuffer => {
                deliveries.retain(|delivery| event(delivery).is_none_or(|event| event.position.get() != 512));
            }
            Break::DropsWhatItHasNoRoomFor if self.caught_up && deliveries.len() > 64 => {
                deliveries.drain(..deliveries.len() - 64);
            }
            Break::ProgressAheadOfItsEvent => {
                if let Some(first) = deliveries.first().and_then(event).map(|event| event.position) {
                    deliveries.insert(0, Delivery::Progress(first));
                }
            }
            Break::CaughtUpAlways => page.caught_up = true,
            Break::CaughtUpNever => page.caught_up &= deliveries.is_empty(),
            Break::NoProgress => deliveries.retain(|delivery| event(delivery).is_some()),
            Break::CompetingConsumers if self.number > 0 && self.shared.open.load(Ordering::Relaxed) > 1 => {
                deliveries.retain(|delivery| event(delivery).is_none_or(|event| event.position.get() % 4 != 1));
            }
            _ => {}
        }
        for delivery in deliveries {
            if let Delivery::Event(event) = delivery {
                self.spoil_event(event);
            }
        }
    }

    fn spoil_event(&self, event: &mut RecordedEvent) {
        let cut = |text: &str, length: usize| text.chars().take(length).collect::<String>();
        match self.shared.broken {
            Break::OwnIds => event.id = event.position.to_string().into(),
            Break::TruncatesBodies => event.data.truncate(1 << 16),
            Break::AsciiOnly => event.stream_id = event.stream_id.as_str().replace('\u{1f600}', "?").into(),
            Break::LossyUtf8 => {
                event.data = Bytes::from(String::from_utf8_lossy(&event.data).into_owned());
            }
            Break::NoMetadata => event.metadata = Bytes::new(),
            Break::ShortIds => event.stream_id = cut(event.stream_id.as_str(), 255).into(),
            Break::EndsAtNul => {
                let end = event.stream_id.as_str().split('\0').next().unwrap_or_default().to_owned();
                event.stream_id = end.into();
            }
            Break::RevisionsOfTheWholeStore => event.revision = Some(event.position.get()),
            Break::NoTimes => event.occurred_at = None,
            _ => {}
        }
    }
}

impl Drop for BrokenSubscription {
    fn drop(&mut self) {
        self.shared.open.fetch_sub(1, Ordering::Relaxed);
        let half_way = self.last.is_some() && self.last < self.head && !self.shared.cut.load(Ordering::Relaxed);
        if half_way && self.shared.is(Break::PrefetchCountsAsDelivered) {
            *self.shared.consumed.lock().unwrap() = self.head;
        }
    }
}

struct BrokenInspector {
    memory: Box<dyn SourceInspector>,
    shared: Arc<Shared>,
}

#[async_trait]
impl SourceInspector for BrokenInspector {
    async fn head(&mut self) -> Result<Option<Position>, SourceError> {
        let head = self.memory.head().await?;
        Ok(if self.shared.is(Break::HeadOfAnEmptyStore) { head.or(Some(Position::new(0))) } else { head })
    }

    async fn event_id_at(&mut self, position: Position) -> Result<Option<EventId>, SourceError> {
        match self.shared.broken {
            Break::IdOfTheNextEvent => self.memory.event_id_at(Position::new(position.get().saturating_add(1))).await,
            Break::CachesIds => {
                let known = self.shared.ids.lock().unwrap().get(&position).cloned();
                if let Some(known) = known {
                    return Ok(known);
                }
                let id = self.memory.event_id_at(position).await?;
                self.shared.ids.lock().unwrap().insert(position, id.clone());
                Ok(id)
            }
            _ => self.memory.event_id_at(position).await,
        }
    }

    async fn passed_over(&mut self, types: TypeSet<'_>, up_to: Position) -> Result<Option<PassedOver>, SourceError> {
        match (self.shared.broken, types) {
            (Break::PassedOverIgnoresUpTo, TypeSet::Only(_)) => {
                self.memory.passed_over(types, Position::new(u64::MAX)).await
            }
            (Break::AllButAsOnly, TypeSet::AllBut(types)) => self.memory.passed_over(TypeSet::Only(types), up_to).await,
            _ => self.memory.passed_over(types, up_to).await,
        }
    }
}

fn event(delivery: &Delivery) -> Option<&RecordedEvent> {
    match delivery {
        Delivery::Event(event) => Some(event),
        Delivery::Progress(_) => None,
    }
}
