//! What an adapter supplies to be tested.

use async_trait::async_trait;
use bytes::Bytes;
use scriba_core::{Position, Source};

/// An event to append to the store under test.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NewEvent {
    /// The text of a UUID, different for each event.
    pub id: String,
    /// The stream.
    pub stream_id: String,
    /// The type.
    pub event_type: String,
    /// The body. JSON, written as `jsonb` of Postgres writes it, or empty; other bytes only where the bed offers `any_bytes`.
    pub data: Bytes,
    /// Metadata: JSON as the body is, or empty. Empty but for the rule of `metadata`.
    pub metadata: Bytes,
}

/// A store with a source that reads it: what an adapter supplies. Every rule makes a bed of its own.
///
/// Methods panic on failure, which fails the test.
#[async_trait]
pub trait SourceBed: Sized + Send + Sync + 'static {
    /// A bed with an empty store, which is not the store of any other bed.
    async fn new() -> Self;

    /// The source, opened anew, as another process would open it.
    async fn source(&self) -> Box<dyn Source>;

    /// Appends events, in this order, and returns their positions when they are durable and visible.
    async fn append(&self, events: Vec<NewEvent>) -> Vec<Position>;
}

/// The ability `truncate`: events vanish by retention.
#[async_trait]
pub trait Truncate: SourceBed {
    /// Removes all events below a position. Positions go on where they were.
    async fn truncate_below(&self, position: Position);
}

/// The ability `restore`: the store is put back to an older state, as from a backup.
#[async_trait]
pub trait Restore: SourceBed {
    /// Puts the store back to what it was before the append that got `position`: the next append gets it again.
    async fn restore_before(&self, position: Position);
}

/// The ability `cut`: connections are cut while the store goes on.
#[async_trait]
pub trait Cut: SourceBed {
    /// Cuts every connection of every source opened so far. Later ones are not cut.
    async fn cut(&self);
}

/// The ability `hold_open`: an append is begun and committed later than others that were begun after it.
#[async_trait]
pub trait HoldOpen: SourceBed {
    /// An append that is not committed yet.
    type Held: Send;

    /// Begins an append, so that it has its position, without making it visible.
    async fn hold(&self, event: NewEvent) -> Self::Held;

    /// Commits it, and returns its position.
    async fn commit(&self, held: Self::Held) -> Position;
}
