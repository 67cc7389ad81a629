//! A source and a target that panic where a test says so, or go on with what was given up, and otherwise are those in memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::dead_letter::DeadLetter;
use scriba_core::source::{
    Demand, Page, PassedOver, Source, SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription,
    TypeSet,
};
use scriba_core::target::{
    Batch, CommitError, Committed, Committer, Control, DeadLetterFilter, DeadLetterStats, LeaseAnswer, Owner,
    StateRecord, StoredProjection, Tables, TakeOver, TakeOverError, TakenOver, Target, TargetError,
};
use scriba_core::{EventId, Position, ProjectionId};
use scriba_testing::{MemorySource, MemoryTarget};

/// A call that can be made to panic, by the task that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    /// The pipeline.
    TakeOver,
    /// The pipeline.
    Subscribe,
    /// The reader.
    Next,
    /// The writer.
    Commit,
    /// The keeper.
    Control,
    /// The keeper.
    Lease,
    /// The keeper.
    StoreState,
    /// Lag.
    Head,
}

/// How often each call is still to panic.
#[derive(Clone, Default)]
pub(crate) struct Panics(Arc<Mutex<HashMap<Call, u32>>>);

impl Panics {
    pub(crate) fn arm(&self, call: Call, times: u32) {
        self.0.lock().unwrap().insert(call, times);
    }

    /// How many have not happened yet.
    pub(crate) fn left(&self, call: Call) -> u32 {
        self.0.lock().unwrap().get(&call).copied().unwrap_or_default()
    }

    fn meet(&self, call: Call) {
        let due = match self.0.lock().unwrap().get_mut(&call) {
            Some(left) if *left > 0 => {
                *left -= 1;
                true
            }
            _ => false,
        };
        assert!(!due, "{call:?} panics as the test asked for");
    }
}

#[derive(Clone)]
pub(crate) struct FragileSource {
    pub(crate) source: MemorySource,
    pub(crate) panics: Panics,
}

struct FragileSubscription(Box<dyn Subscription>, Panics);

struct FragileInspector(Box<dyn SourceInspector>, Panics);

#[async_trait]
impl Source for FragileSource {
    async fn check(&self) -> Result<(), SourceError> {
        self.source.check().await
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        self.source.identity().await
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.panics.meet(Call::Subscribe);
        Ok(Box::new(FragileSubscription(self.source.subscribe(request).await?, self.panics.clone())))
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        Ok(Box::new(FragileInspector(self.source.inspector().await?, self.panics.clone())))
    }
}

#[async_trait]
impl Subscription for FragileSubscription {
    async fn next(&mut self, demand: Demand) -> Result<Page, SourceError> {
        let page = self.0.next(demand).await;
        self.1.meet(Call::Next);
        page
    }

    async fn ack(&mut self, position: Position) -> Result<(), SourceError> {
        self.0.ack(position).await
    }
}

#[async_trait]
impl SourceInspector for FragileInspector {
    async fn head(&mut self) -> Result<Option<Position>, SourceError> {
        self.1.meet(Call::Head);
        self.0.head().await
    }

    async fn event_id_at(&mut self, position: Position) -> Result<Option<EventId>, SourceError> {
        self.0.event_id_at(position).await
    }

    async fn passed_over(&mut self, types: TypeSet<'_>, up_to: Position) -> Result<Option<PassedOver>, SourceError> {
        self.0.passed_over(types, up_to).await
    }
}

#[derive(Clone)]
pub(crate) struct FragileTarget {
    pub(crate) target: MemoryTarget<u64>,
    pub(crate) panics: Panics,
    /// A take-over that is given up half-way goes on, as one does that is on its way to a server.
    pub(crate) detached: bool,
}

struct FragileCommitter(Box<dyn Committer<u64>>, Panics);

struct FragileControl(Box<dyn Control>, Panics);

#[async_trait]
impl Target<u64> for FragileTarget {
    async fn take_over(&self, request: TakeOver<'_>) -> Result<TakenOver<u64>, TakeOverError> {
        self.panics.meet(Call::TakeOver);
        let taken = if self.detached {
            let (target, id, owner, source) =
                (self.target.clone(), request.id.clone(), request.owner.cloned(), request.source.clone());
            let TakeOver { lease, handler_timeout, initial, event_types, .. } = request;
            let taking = async move {
                let (id, owner, source) = (&id, owner.as_ref(), &source);
                let request = TakeOver { id, owner, lease, handler_timeout, initial, source, event_types };
                target.take_over(request).await
            };
            tokio::spawn(taking).await.unwrap()?
        } else {
            self.target.take_over(request).await?
        };
        Ok(TakenOver { committer: Box::new(FragileCommitter(taken.committer, self.panics.clone())), ..taken })
    }
}

#[async_trait]
impl Committer<u64> for FragileCommitter {
    async fn commit(&mut self, batch: &Batch<u64>) -> Result<Committed, CommitError> {
        self.1.meet(Call::Commit);
        self.0.commit(batch).await
    }

    async fn store_replay_position(&mut self, caught_up: Option<Position>) -> Result<(), CommitError> {
        self.0.store_replay_position(caught_up).await
    }

    async fn store_event_types(&mut self, types: Option<&[&str]>) -> Result<(), CommitError> {
        self.0.store_event_types(types).await
    }
}

#[async_trait]
impl Tables for FragileTarget {
    async fn check(&self) -> Result<(), TargetError> {
        self.target.check().await
    }

    async fn control(&self) -> Result<Box<dyn Control>, TargetError> {
        self.panics.meet(Call::Control);
        Ok(Box::new(FragileControl(self.target.control().await?, self.panics.clone())))
    }

    async fn stored(&self, id: &ProjectionId) -> Result<Option<StoredProjection>, TargetError> {
        self.target.stored(id).await
    }

    async fn stored_all(&self) -> Result<Vec<StoredProjection>, TargetError> {
        self.target.stored_all().await
    }

    async fn dead_letters(&self, id: &ProjectionId, filter: &DeadLetterFilter) -> Result<Vec<DeadLetter>, TargetError> {
        Tables::dead_letters(&self.target, id, filter).await
    }

    async fn dead_letter_stats(&self, id: &ProjectionId) -> Result<DeadLetterStats, TargetError> {
        self.target.dead_letter_stats(id).await
    }
}

#[async_trait]
impl Control for FragileControl {
    async fn lease(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<LeaseAnswer, TargetError> {
        self.1.meet(Call::Lease);
        self.0.lease(id, owner, ttl).await
    }

    async fn seize(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<(), TargetError> {
        self.0.seize(id, owner, ttl).await
    }

    async fn release(&mut self, id: &ProjectionId, owner: &Owner) -> Result<(), TargetError> {
        self.0.release(id, owner).await
    }

    async fn store_state(&mut self, id: &ProjectionId, epoch: i64, state: &StateRecord) -> Result<bool, TargetError> {
        self.1.meet(Call::StoreState);
        self.0.store_state(id, epoch, state).await
    }
}
