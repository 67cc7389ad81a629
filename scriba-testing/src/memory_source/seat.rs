//! The one place there is for a projection, where the memory source lets one subscriber in.

use async_trait::async_trait;
use scriba_core::ProjectionId;
use scriba_core::source::{Place, SourceError, SubscribeRequest, Subscription};

use super::MemorySource;
use super::log::Log;
use super::subscription::MemorySubscription;

/// Free again when it is dropped.
pub(super) struct Seat {
    source: MemorySource,
    id: ProjectionId,
    number: u64,
}

impl Seat {
    pub(super) fn take(source: &MemorySource, log: &mut Log, id: &ProjectionId) -> Result<Self, SourceError> {
        if let Some(Some(number)) = log.places.get(id) {
            return Err(SourceError::held(format!("subscriber {number} of the memory source")));
        }
        log.let_in += 1;
        log.places.insert(id.clone(), Some(log.let_in));
        Ok(Self { source: source.clone(), id: id.clone(), number: log.let_in })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut log = self.source.lock();
        // Who was thrown out may find another there.
        if let Some(place) = log.places.get_mut(&self.id).filter(|place| **place == Some(self.number)) {
            *place = None;
        }
    }
}

#[async_trait]
impl Place for Seat {
    async fn subscribe(self: Box<Self>, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        let source = self.source.clone();
        let mut log = source.lock();
        let mut subscription = MemorySubscription::open(source.clone(), &mut log, &request)?;
        subscription.seat = Some(*self);
        Ok(Box::new(subscription))
    }
}
