//! The source by a catch-up subscription: the stored watermark is the position.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::source::{Demand, Page, SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription};
use scriba_core::{Position, Source};
use uuid::Uuid;

use crate::client::{Failure, Fed, Feed, Follow, From};
use crate::continuity::Hole;
use crate::error::source_error;
use crate::flow::{Flow, Incoming, Noticed, Turn};
use crate::inspector::Inspector;
use crate::lines::Line;
use crate::part::Part;
use crate::reads;
use crate::store::EventStore;

/// How often it is looked for events that a filter left out, while no others come.
const LOOK_AHEAD_EVERY: Duration = Duration::from_secs(1);

/// A stream, a category or the whole log as a source, by a catch-up subscription.
///
/// The server keeps nothing: the read model's watermark is the position, and the lease decides who projects.
///
/// Events of the server's own types (`$…`) are handed out where a projection lists them by name, and else passed over. In the whole log,
/// events of other types than the listed ones are left out by the server, unless the log is narrowed to streams.
#[derive(Clone, Debug)]
pub struct CatchUpSource {
    store: EventStore,
    part: Part,
}

impl CatchUpSource {
    /// The events of a stream, links resolved; positions are revisions in it. A stream of links, such as `$et-account-opened`, is a
    /// stream like any other.
    pub fn stream(store: &EventStore, name: impl Into<String>) -> Self {
        Self { store: store.clone(), part: Part::Stream(name.into()) }
    }

    /// The events of all streams `<category>-…`, read from `$ce-<category>`, which the server's projection `$by_category` fills;
    /// positions are revisions in that stream.
    pub fn category(store: &EventStore, category: &str) -> Self {
        Self { store: store.clone(), part: Part::category(category) }
    }

    /// All events of the store; positions are commit positions, so lag in events is one in bytes of the log. An event that was written
    /// by an explicit transaction, as old clients over TCP could, halts the projection: such a store is read by streams or categories.
    pub fn all(store: &EventStore) -> Self {
        Self { store: store.clone(), part: Part::All { stream_prefixes: Vec::new() } }
    }

    /// Of [`CatchUpSource::all`], the streams whose names begin with one of these. They are part of what the source is: a
    /// checkpoint is not continued with others.
    pub fn all_beginning_with<P: Into<String>>(store: &EventStore, prefixes: impl IntoIterator<Item = P>) -> Self {
        let mut stream_prefixes: Vec<String> = prefixes.into_iter().map(Into::into).collect();
        stream_prefixes.sort_unstable();
        stream_prefixes.dedup();
        Self { store: store.clone(), part: Part::All { stream_prefixes } }
    }

    fn whom(&self) -> String {
        format!("{} of {}", self.part, self.store)
    }
}

#[async_trait]
impl Source for CatchUpSource {
    async fn check(&self) -> Result<(), SourceError> {
        self.part.check()?;
        self.store.check()?;
        reads::head(&self.store.connection, &self.part, &self.whom()).await.map(drop)
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        Ok(self.store.identity(&self.part))
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.part.check()?;
        let whom = self.whom();
        let flow = Flow::new(Arc::clone(&self.store.connection), self.part.clone(), whom.clone(), &request).await?;
        let from = request.after.map_or(From::Start, |after| From::At(after.get()));
        let followed = self.store.lines.follow(&Follow { log: self.part.followed(request.event_types), from }).await;
        let (line, feed) = followed.map_err(|failure| source_error(&whom, "subscribe", &failure))?;
        Ok(Box::new(CatchUpSubscription { flow, followed: Followed { feed, line, whom } }))
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        Ok(Box::new(Inspector::new(&self.store, &self.part)))
    }
}

struct CatchUpSubscription {
    flow: Flow,
    followed: Followed,
}

/// A feed, and whose it is.
struct Followed {
    feed: Box<dyn Feed>,
    line: Line,
    whom: String,
}

#[async_trait]
impl Incoming for Followed {
    async fn next(&mut self) -> Result<Fed, Failure> {
        let fed = self.feed.next().await;
        if let Err(failure) = &fed {
            self.line.note(failure);
        }
        fed
    }

    fn note(&mut self, _: u64, _: Uuid) {}

    async fn missed(&mut self, Hole { first, last, .. }: Hole, _: Noticed) -> SourceError {
        SourceError::ended(format!(
            "{}: there are events at revisions {first} to {last}, and the server did not deliver them; it is asked again",
            self.whom
        ))
    }

    fn leaves_one_out(&self) -> bool {
        false
    }
}

#[async_trait]
impl Subscription for CatchUpSubscription {
    async fn next(&mut self, demand: Demand) -> Result<Page, SourceError> {
        let idle_after = self.flow.is_filtered().then_some(LOOK_AHEAD_EVERY);
        loop {
            match self.flow.turn(&mut self.followed, demand, idle_after).await? {
                Turn::Page(page) => return Ok(page),
                Turn::Idle => self.flow.look_ahead().await,
            }
        }
    }

    /// The server keeps no position.
    fn wants_acks(&self) -> bool {
        false
    }

    async fn ack(&mut self, _: Position) -> Result<(), SourceError> {
        Ok(())
    }
}
