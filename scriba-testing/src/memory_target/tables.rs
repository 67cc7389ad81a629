//! What any node can ask of the memory target, and its leases.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::ProjectionId;
use scriba_core::dead_letter::DeadLetter;
use scriba_core::target::{
    Control, DeadLetterFilter, DeadLetterStats, LeaseAnswer, Owner, Reset, ResetCounts, ResetRefused, StateRecord,
    StoredProjection, Tables, TargetError,
};
use tokio::time::Instant;

use super::{MemoryTarget, TargetStep};

#[async_trait]
impl<Op: Clone + Send + Sync + 'static> Tables for MemoryTarget<Op> {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    async fn check(&self) -> Result<(), TargetError> {
        self.lock().reachable()
    }

    async fn control(&self) -> Result<Box<dyn Control>, TargetError> {
        self.lock().reachable()?;
        Ok(Box::new(MemoryControl(self.clone())))
    }

    async fn stored(&self, id: &ProjectionId) -> Result<Option<StoredProjection>, TargetError> {
        let store = self.lock();
        store.reachable()?;
        Ok(store.stored(id))
    }

    async fn stored_all(&self) -> Result<Vec<StoredProjection>, TargetError> {
        let store = self.lock();
        store.reachable()?;
        Ok(store.rows.keys().filter_map(|id| store.stored(id)).collect())
    }

    async fn dead_letters(&self, id: &ProjectionId, filter: &DeadLetterFilter) -> Result<Vec<DeadLetter>, TargetError> {
        self.lock().reachable()?;
        let mut letters = self.dead_letters(id);
        letters.retain(|letter| lets_through(filter, letter));
        letters.sort_by_key(|letter| letter.position);
        if filter.descending {
            letters.reverse();
        }
        letters.truncate(filter.limit.unwrap_or(100) as usize);
        Ok(letters)
    }

    async fn dead_letter_stats(&self, id: &ProjectionId) -> Result<DeadLetterStats, TargetError> {
        self.lock().reachable()?;
        let letters = self.dead_letters(id);
        let mut kinds = BTreeMap::<_, u64>::new();
        for letter in &letters {
            *kinds.entry(letter.failure.kind.clone()).or_default() += 1;
        }
        let mut by_kind: Vec<_> = kinds.into_iter().collect();
        by_kind.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        Ok(DeadLetterStats {
            total: letters.len() as u64,
            by_kind,
            oldest: letters.iter().map(|letter| letter.failed_at).min(),
            newest: letters.iter().map(|letter| letter.failed_at).max(),
        })
    }

    async fn reset(&self, id: &ProjectionId, reset: &Reset) -> Result<ResetCounts, ResetRefused> {
        self.lock().reachable()?;
        self.lock().stored(id).ok_or(ResetRefused::NoCheckpoint)?.may_be_reset()?;
        let _row = self.row_lock(id).await;
        for _ in &reset.statements {
            self.step_or_fail(TargetStep::Statement, None).await?;
        }
        let mut store = self.lock();
        store.reachable()?;
        store.stored(id).ok_or(ResetRefused::NoCheckpoint)?.may_be_reset()?;
        store.land(id);
        let row = store.rows.get_mut(id).ok_or(ResetRefused::NoCheckpoint)?;
        Ok(row.reset(reset))
    }
}

fn lets_through(filter: &DeadLetterFilter, letter: &DeadLetter) -> bool {
    let DeadLetterFilter { stream_id, kind, from_position, to_position, since, until, after, limit: _, descending } =
        filter;
    stream_id.as_ref().is_none_or(|stream_id| *stream_id == letter.stream_id)
        && kind.as_ref().is_none_or(|kind| *kind == letter.failure.kind)
        && from_position.is_none_or(|from| from <= letter.position)
        && to_position.is_none_or(|to| letter.position <= to)
        && since.is_none_or(|since| since <= letter.failed_at)
        && until.is_none_or(|until| letter.failed_at < until)
        && after.is_none_or(|after| if *descending { letter.position < after } else { after < letter.position })
}

struct MemoryControl<Op>(MemoryTarget<Op>);

#[async_trait]
impl<Op: Send + Sync + 'static> Control for MemoryControl<Op> {
    async fn lease(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<LeaseAnswer, TargetError> {
        let mut store = self.0.lock();
        store.reachable()?;
        if let Some(held) = store.other_holder(id, owner) {
            let expires_in = held.expires.saturating_duration_since(Instant::now());
            let answer = LeaseAnswer::HeldBy { holder: held.owner.description.clone(), expires_in };
            store.stand_by(id, owner, ttl);
            return Ok(answer);
        }
        store.end_standby(id, owner);
        store.hold(id, owner, ttl);
        Ok(LeaseAnswer::Held)
    }

    async fn seize(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<(), TargetError> {
        let mut store = self.0.lock();
        store.reachable()?;
        store.end_standby(id, owner);
        store.hold(id, owner, ttl);
        Ok(())
    }

    async fn release(&mut self, id: &ProjectionId, owner: &Owner) -> Result<(), TargetError> {
        let mut store = self.0.lock();
        store.reachable()?;
        store.end_standby(id, owner);
        if store.leases.get(id).is_some_and(|lease| lease.owner == *owner) {
            store.leases.remove(id);
        }
        Ok(())
    }

    async fn store_state(&mut self, id: &ProjectionId, epoch: i64, state: &StateRecord) -> Result<bool, TargetError> {
        let mut store = self.0.lock();
        store.reachable()?;
        // A row that was reset has no state until it is taken over.
        let row = store.fenced(id, epoch).ok().filter(|row| !row.reset);
        let ours = row.map(|row| row.state = state.clone());
        Ok(ours.is_some())
    }
}
