//! From messages of the server to pages: what every subscription of a source here does.
//!
//! A message is judged (is something missing before it?), made an element, and waits to be handed out. Whatever was received is
//! kept here and not in a future, so that a call may be dropped at any point.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use scriba_core::Position;
use scriba_core::source::{Delivery, Demand, Page, SourceError, SubscribeRequest};
use scriba_core::telemetry::{GapPassed, Telemetry};
use tokio::task::unconstrained;
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use crate::client::{Failure, Fed, From, Received};
use crate::connection::Connection;
use crate::continuity::{Arrival, Continuity, Hole};
use crate::error::source_error;
use crate::part::{Part, is_system};
use crate::pending::Pending;
use crate::reads;
use crate::recorded::EventTypes;

/// Events that are looked through at once for the end of what a filter holds back: more than a server passes before it says so.
const LOOK_AHEAD: u64 = 200;

/// Where messages come from.
#[async_trait]
pub(crate) trait Incoming: Send {
    /// What comes next. Cancel-safe.
    async fn next(&mut self) -> Result<Fed, Failure>;

    /// Notes an event that is going to be handed out.
    fn note(&mut self, position: u64, id: Uuid);

    /// The end of the subscription, because events in a hole exist and were not delivered.
    async fn missed(&mut self, hole: Hole, noticed: Noticed) -> SourceError;

    /// Whether the server takes the first event behind its checkpoint for the checkpointed one, when that is gone.
    fn leaves_one_out(&self) -> bool;
}

/// How events that were not delivered were noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Noticed {
    /// By one that came and stands behind them.
    ByArrival,
    /// Nothing has come for a while.
    BySilence,
}

/// What comes of a turn.
pub(crate) enum Turn {
    Page(Page),
    /// Nothing has come for a while.
    Idle,
}

/// The way of the events of one subscription.
pub(crate) struct Flow {
    connection: Arc<Connection>,
    part: Part,
    /// Store, stream and group, for people.
    whom: String,
    after: Option<u64>,
    types: Option<&'static [&'static str]>,
    telemetry: Telemetry,
    event_types: EventTypes,
    continuity: Continuity,
    /// Received and not judged yet.
    arrived: Option<Fed>,
    pending: Pending,
    /// What the subscription ends with, once what came before is handed out.
    ended: Option<SourceError>,

    /// The head as the subscription began: whoever is there has caught up.
    first_head: Option<u64>,
    /// Everything up to here was handed out.
    handed_out: Option<u64>,
    /// The server said that it knew of nothing more.
    said: bool,
    /// The engine knows.
    told: bool,

    last_arrival: Instant,
    /// A head of some time ago: what has not come of it by now is missing.
    owed: Option<u64>,
}

impl Flow {
    /// Reads the head; the subscription has to begin afterwards.
    pub(crate) async fn new(
        connection: Arc<Connection>,
        part: Part,
        whom: String,
        request: &SubscribeRequest,
    ) -> Result<Self, SourceError> {
        let after = request.after.map(Position::get);
        let first_head = reads::head(&connection, &part, &whom).await?;
        Ok(Self {
            connection,
            after,
            types: request.event_types,
            telemetry: request.telemetry.clone(),
            event_types: EventTypes::default(),
            continuity: Continuity::new(part.counts(), after),
            arrived: None,
            pending: Pending::default(),
            ended: None,
            first_head,
            handed_out: after,
            said: false,
            told: false,
            last_arrival: Instant::now(),
            owed: None,
            part,
            whom,
        })
    }

    /// Whether anything above the start has come, or nothing was there.
    pub(crate) fn has_begun(&self) -> bool {
        self.continuity.has_moved() || self.handed_out >= self.first_head
    }

    /// The next page, or the news that nothing has come for `idle_after`. Cancel-safe.
    pub(crate) async fn turn(
        &mut self,
        incoming: &mut impl Incoming,
        demand: Demand,
        idle_after: Option<Duration>,
    ) -> Result<Turn, SourceError> {
        loop {
            let dry = self.take_ready(incoming, demand).await;
            if let Some(page) = self.page(demand, dry) {
                return Ok(Turn::Page(page));
            }
            if let Some(error) = self.ended.take() {
                return Err(error);
            }
            let idle_at = self.last_arrival + idle_after.unwrap_or_default();
            tokio::select! {
                // Biased: what is there counts, however late it is looked at.
                biased;
                fed = incoming.next() => self.receive(fed),
                () = sleep_until(idle_at), if idle_after.is_some() => {
                    self.last_arrival = Instant::now();
                    return Ok(Turn::Idle);
                }
            }
        }
    }

    /// Takes in what is there without waiting for more; true when there was nothing more.
    async fn take_ready(&mut self, incoming: &mut impl Incoming, demand: Demand) -> bool {
        while self.ended.is_none() && !self.pending.is_enough(demand) {
            if self.arrived.is_none() {
                // Unconstrained: the runtime's budget would look like the end of what is there.
                match unconstrained(incoming.next()).now_or_never() {
                    Some(fed) => self.receive(fed),
                    None => return true,
                }
            }
            if let Err(error) = self.settle(incoming).await {
                self.ended = Some(error);
            }
        }
        false
    }

    fn receive(&mut self, fed: Result<Fed, Failure>) {
        self.last_arrival = Instant::now();
        match fed {
            Ok(fed) => self.arrived = Some(fed),
            Err(failure) => self.ended = Some(source_error(&self.whom, "read on", &failure)),
        }
    }

    /// Judges what has arrived and makes an element of it.
    async fn settle(&mut self, incoming: &mut impl Incoming) -> Result<(), SourceError> {
        if let Some(Fed::Event(received)) = &self.arrived {
            let position = self.part.position(&received.original)?;
            if let Arrival::Behind(hole) = self.continuity.arrival(position) {
                self.judge(incoming, hole, Noticed::ByArrival).await?;
            }
        }
        match self.arrived.take() {
            Some(Fed::Event(received)) => self.accept(incoming, received)?,
            // One in a transaction passes part of it only.
            Some(Fed::Checkpoint(place)) if place.commit == place.prepare => self.progress(place.commit),
            Some(Fed::CaughtUp) => self.said = true,
            Some(Fed::Checkpoint(_)) | None => {}
        }
        Ok(())
    }

    fn accept(&mut self, incoming: &mut impl Incoming, received: Received) -> Result<(), SourceError> {
        let position = self.part.position(&received.original)?;
        incoming.note(position, received.original.id);
        match received.event.filter(|event| self.part.wants(self.types, event)) {
            Some(event) => {
                self.pending.push(Delivery::Event(self.event_types.recorded(event, position)));
                self.continuity.reach(position);
            }
            None => self.progress(position),
        }
        Ok(())
    }

    fn progress(&mut self, position: u64) {
        if self.continuity.reached() < Some(position) {
            self.pending.push(Delivery::Progress(Position::new(position)));
            self.continuity.reach(position);
        }
    }

    /// Looks whether anything stands in a hole. Nothing: it is passed.
    async fn judge(&mut self, incoming: &mut impl Incoming, hole: Hole, noticed: Noticed) -> Result<(), SourceError> {
        let within = self.read_from(hole.first, 2).await?;
        let mut within = within.into_iter().filter(|received| received.original.revision <= hole.last);
        match (within.next(), within.next()) {
            (None, _) => self.pass(hole.first..hole.last.saturating_add(1)),
            (Some(only), None) if hole.at_start && incoming.leaves_one_out() && self.is_after_gone().await? => {
                tracing::warn!(
                    target: "scriba", source = %self.whom, revision = only.original.revision,
                    "the server left an event out, because the one at its checkpoint is gone; it was read from the stream"
                );
                let at = only.original.revision;
                self.pass(hole.first..at);
                self.accept(incoming, only)?;
                self.pass(at.saturating_add(1)..hole.last.saturating_add(1));
            }
            (Some(_), _) => return Err(incoming.missed(hole, noticed).await),
        }
        Ok(())
    }

    /// Passes what is gone, if that is anything.
    fn pass(&mut self, gone: Range<u64>) {
        let Some(last) = gone.end.checked_sub(1).filter(|last| *last >= gone.start) else { return };
        let (from, to, highest_visible) = (Position::new(gone.start), Position::new(last), Position::new(gone.end));
        let gap = GapPassed { from, to, highest_visible, age: Duration::ZERO, evidence: "truncated" };
        self.telemetry.gap_passed(&gap);
        self.continuity.reach(last);
    }

    /// Whether nothing stands where the subscription was to go on from.
    async fn is_after_gone(&self) -> Result<bool, SourceError> {
        let Some(after) = self.after else { return Ok(false) };
        let there = self.read_from(after, 1).await?;
        Ok(there.first().is_none_or(|first| first.original.revision != after))
    }

    async fn read_from(&self, position: u64, count: u64) -> Result<Vec<Received>, SourceError> {
        let read = reads::events(&self.connection, self.part.whole(), From::At(position), false, count).await;
        read.map_err(|failure| source_error(&self.whom, "look what is missing", &failure))
    }

    /// After a while in which nothing came: judges what was there a while ago and has not come since.
    pub(crate) async fn look_back(&mut self, incoming: &mut impl Incoming) -> Result<(), SourceError> {
        // Whoever cannot answer tells the subscription as well.
        let Ok(head) = reads::head(&self.connection, &self.part, &self.whom).await else { return Ok(()) };
        let owed = std::mem::replace(&mut self.owed, head);
        match owed.and_then(|owed| self.continuity.hole_up_to(owed)) {
            Some(hole) => self.judge(incoming, hole, Noticed::BySilence).await,
            None => Ok(()),
        }
    }

    /// Whether a filter of the server may hold back for a while what it has passed.
    pub(crate) fn is_filtered(&self) -> bool {
        let names_system_events = self.types.is_some_and(|types| types.iter().any(|name| is_system(name)));
        self.part.followed(self.types) != self.part.whole() && !names_system_events
    }

    /// After a while in which nothing came: moves on over events that a filter left out, so that an idle projection has no lag.
    ///
    /// A single read tells: what it shows comes from one node, and in order.
    pub(crate) async fn look_ahead(&mut self) {
        let reached = self.continuity.reached();
        let from = reached.map_or(From::Start, From::At);
        let Ok(read) = reads::events(&self.connection, self.part.whole(), from, false, LOOK_AHEAD).await else {
            return;
        };
        for received in read {
            let wanted = received.event.is_none_or(|event| self.part.wants(self.types, &event));
            match self.part.position(&received.original) {
                Ok(position) if reached >= Some(position) => {}
                Ok(position) if !wanted => self.progress(position),
                // It is on its way.
                _ => return,
            }
        }
    }

    /// A page of what is pending; `None` when there is nothing to say.
    fn page(&mut self, demand: Demand, dry: bool) -> Option<Page> {
        let deliveries = self.pending.take(demand);
        let highest = deliveries.iter().map(|delivery| delivery.position().get()).max();
        self.handed_out = self.handed_out.max(highest);
        let everything = self.pending.is_empty();
        let said = everything && std::mem::take(&mut self.said);
        let at_the_end = if self.told { dry && everything } else { self.handed_out >= self.first_head };
        let caught_up = said || at_the_end;
        if deliveries.is_empty() && (self.told || !caught_up) {
            return None;
        }
        self.told |= caught_up;
        Some(Page { deliveries, caught_up })
    }
}
