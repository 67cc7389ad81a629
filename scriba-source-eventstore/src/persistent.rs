//! The source by a persistent subscription: the server keeps the position, and lets in one subscriber.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::source::{
    Demand, Page, Place, SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription,
};
use scriba_core::{Position, ProjectionId, Source};

use crate::client::{Failure, Group};
use crate::error::source_error;
use crate::flow::{Flow, Turn};
use crate::group::{self, Checkpointing};
use crate::inspector::Inspector;
use crate::part::Part;
use crate::reads;
use crate::seat::{Seat, Suspicions};
use crate::store::EventStore;

/// After so long without an event it is looked whether one is missing; after twice that, it is.
const IDLE_AFTER: Duration = Duration::from_secs(15);
/// The same where nothing has come yet of what was there at the start: a group that is beyond it is to be noticed soon, and one that
/// the server is still loading is not to be taken for it.
const NOTHING_YET_AFTER: Duration = Duration::from_secs(5);

/// A stream or a category as a source, by a persistent subscription.
///
/// Each projection has a group of its own on the server, which is made when it is first needed, with settings by which nothing
/// is parked or reordered. It lets in one subscriber: who is let in holds the projection. The read model's watermark decides what is
/// done; the position of the group trails it, and what the group delivers again is recognized.
///
/// A group that goes on behind the watermark, because tables were wiped or restored while it lived on, halts the projection.
#[derive(Clone, Debug)]
pub struct PersistentSource {
    store: EventStore,
    part: Part,
    group: Option<String>,
    buffer: Option<usize>,
    checkpointing: Checkpointing,
    suspicions: Suspicions,
}

impl PersistentSource {
    /// The events of a stream, links resolved; positions are revisions in it. A stream of links, such as `$et-account-opened`, is a
    /// stream like any other.
    pub fn stream(store: &EventStore, name: impl Into<String>) -> Self {
        Self::of(store, Part::Stream(name.into()))
    }

    /// The events of all streams `<category>-…`, read from `$ce-<category>`, which the server's projection `$by_category` fills;
    /// positions are revisions in that stream.
    pub fn category(store: &EventStore, category: &str) -> Self {
        Self::of(store, Part::category(category))
    }

    fn of(store: &EventStore, part: Part) -> Self {
        Self {
            store: store.clone(),
            part,
            group: None,
            buffer: None,
            checkpointing: Checkpointing::default(),
            suspicions: Suspicions::default(),
        }
    }

    /// The name of the group, instead of `<name>_v<version>` of the projection. Two projections with one group are never active at
    /// once, and a new version with the group of an old one halts, since the group is beyond its watermark.
    #[must_use]
    pub fn group(mut self, name: impl Into<String>) -> Self {
        self.group = Some(name.into());
        self
    }

    /// Events that the server lets out without an ack, at least 1. By default a tenth more than the engine may have in flight;
    /// with less, the server waits for commits while the engine has room.
    #[must_use]
    pub fn buffer_size(mut self, events: usize) -> Self {
        self.buffer = Some(events.max(1));
        self
    }

    /// How often the server writes the position of the group down, where it moved. Default 1 s, which is also the least. Used when the
    /// group is made.
    #[must_use]
    pub fn checkpoint_after(mut self, time: Duration) -> Self {
        self.checkpointing.after = time.max(Duration::from_secs(1));
        self
    }

    /// The server writes the position down by time when at least `min` events were acked since, and at once when `max` were. Default 1
    /// and 1,000. With a higher minimum it writes less and delivers more again after a restart. Used when the group is made.
    #[must_use]
    pub fn checkpoint_counts(mut self, min: u16, max: u16) -> Self {
        self.checkpointing.min = i32::from(min.max(1));
        self.checkpointing.max = i32::from(max.max(min).max(1));
        self
    }

    fn group_of(&self, id: &ProjectionId) -> Group {
        let name = self.group.clone().unwrap_or_else(|| format!("{}_v{}", id.name, id.version));
        Group { stream: self.part.to_string(), name }
    }

    fn whom(&self, group: &Group) -> String {
        format!("group {} on stream {} of {}", group.name, group.stream, self.store)
    }

    fn buffer(&self, in_flight: usize) -> i32 {
        let buffer = self.buffer.unwrap_or_else(|| in_flight.saturating_add((in_flight / 10).max(64)));
        i32::try_from(buffer).unwrap_or(i32::MAX)
    }

    /// Refuses a group with unsafe settings; tells whether there is one.
    async fn check_group(&self, group: &Group) -> Result<bool, SourceError> {
        let whom = self.whom(group);
        match self.store.connection.group_settings(group).await {
            Ok(settings) => group::check(&whom, &settings).map(|()| true),
            Err(Failure::Missing) => Ok(false),
            Err(failure) => Err(source_error(whom, "read the settings", &failure)),
        }
    }

    async fn make_group(&self, group: &Group, after: Option<Position>) -> Result<(), SourceError> {
        let settings = group::settings(after.map(Position::get), self.checkpointing);
        match self.store.connection.create_group(group, &settings).await {
            Ok(()) => Ok(()),
            // Somebody else was faster.
            Err(Failure::Exists) => self.check_group(group).await.map(drop),
            Err(failure) => Err(source_error(self.whom(group), "create it", &failure)),
        }
    }

    async fn join(&self, group: Group, in_flight: usize) -> Result<Seat, Failure> {
        Seat::join(&self.store, self.whom(&group), group, self.buffer(in_flight)).await
    }

    async fn begin(&self, mut seat: Seat, request: &SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        let after = request.after.map(Position::get);
        seat.begin(after, request.telemetry.id().clone(), Arc::clone(&self.suspicions));
        let connection = Arc::clone(&self.store.connection);
        let flow = Flow::new(connection, self.part.clone(), seat.whom().to_owned(), request).await?;
        Ok(Box::new(PersistentSubscription { flow, seat }))
    }
}

#[async_trait]
impl Source for PersistentSource {
    async fn check(&self) -> Result<(), SourceError> {
        self.part.check()?;
        self.store.check()?;
        let whom = format!("stream {} of {}", self.part, self.store);
        reads::head(&self.store.connection, &self.part, &whom).await.map(drop)
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        Ok(self.store.identity(&self.part))
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.part.check()?;
        let group = self.group_of(request.telemetry.id());
        if !self.check_group(&group).await? {
            self.make_group(&group, request.after).await?;
        }
        let joined = self.join(group.clone(), request.in_flight).await;
        let seat = joined.map_err(|failure| source_error(self.whom(&group), "join it", &failure))?;
        self.begin(seat, &request).await
    }

    fn admits_one(&self) -> bool {
        true
    }

    async fn claim(&self, id: &ProjectionId, in_flight: usize) -> Result<Option<Box<dyn Place>>, SourceError> {
        self.part.check()?;
        let group = self.group_of(id);
        if !self.check_group(&group).await? {
            return Ok(None);
        }
        match self.join(group.clone(), in_flight).await {
            Ok(seat) => Ok(Some(Box::new(Granted { source: self.clone(), seat }))),
            Err(Failure::Missing) => Ok(None),
            Err(failure) => Err(source_error(self.whom(&group), "join it", &failure)),
        }
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        Ok(Box::new(Inspector::new(&self.store, &self.part)))
    }

    fn keeps_position(&self) -> bool {
        true
    }

    async fn reset(&self, id: &ProjectionId) -> Result<(), SourceError> {
        let group = self.group_of(id);
        match self.store.connection.delete_group(&group).await {
            Ok(()) | Err(Failure::Missing) => Ok(()),
            Err(failure) => Err(source_error(self.whom(&group), "delete it", &failure)),
        }
    }
}

/// A place that was let in before it is known where to begin.
struct Granted {
    source: PersistentSource,
    seat: Seat,
}

#[async_trait]
impl Place for Granted {
    async fn subscribe(self: Box<Self>, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.source.begin(self.seat, &request).await
    }
}

struct PersistentSubscription {
    flow: Flow,
    seat: Seat,
}

#[async_trait]
impl Subscription for PersistentSubscription {
    async fn next(&mut self, demand: Demand) -> Result<Page, SourceError> {
        loop {
            let idle_after = if self.flow.has_begun() { IDLE_AFTER } else { NOTHING_YET_AFTER };
            match self.flow.turn(&mut self.seat, demand, Some(idle_after)).await? {
                Turn::Page(page) => return Ok(page),
                // With a full buffer the server waits for acks.
                Turn::Idle if self.seat.has_room() => self.flow.look_back(&mut self.seat).await?,
                Turn::Idle => {}
            }
        }
    }

    async fn ack(&mut self, position: Position) -> Result<(), SourceError> {
        self.seat.ack(position.get()).await
    }
}

#[cfg(test)]
#[path = "persistent_tests.rs"]
mod tests;
