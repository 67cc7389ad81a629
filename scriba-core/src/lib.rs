//! Scriba keeps read models in step with an event stream.
//!
//! A projection is a struct with a [`Handler`]. [`Scriba::start`] feeds it from a [`Source`] and commits what it returns
//! to a [`Target`], in the order of positions, each event once as far as the read model can tell.

extern crate self as scriba_core;

pub mod checkpoint;
pub mod circuit;
pub mod dead_letter;
mod engine;
mod error;
mod event;
mod failure;
mod lifecycle;
#[cfg(feature = "opentelemetry")]
pub mod metrics;
mod options;
mod partition;
mod projection;
mod retry;
pub mod source;
#[cfg(feature = "test-switches")]
#[doc(hidden)]
pub mod switches;
pub mod target;
pub mod telemetry;
mod window;

pub use circuit::Circuit;
pub use engine::{
    CatchUp, ListedProjection, OldestOpen, ProjectionInfo, RunCounts, Scriba, StreamPositions, WaitFor, WindowInfo,
};
pub use error::{
    CommandError, DecodeError, HaltReason, HandlerError, HandlerResult, ResetError, RetryAdvice, RunError, StartError,
    StateOrStandby, WaitError, source_chain,
};
pub use event::{
    EventId, EventMeta, EventType, Events, Position, PositionOutOfRange, RawEvent, RecordedEvent, StreamId,
};
pub use failure::{FailureClass, classify, sqlstate};
pub use lifecycle::{Role, State};
pub use options::{DeadLetterPolicy, Lease, OnPoison, ProjectionOptions, StartFrom};
pub use projection::{Handler, Outcome, Projection, ProjectionId};
pub use retry::{Backoff, Retry};
pub use scriba_macros::{Events, Projection};
pub use source::Source;
pub use target::{Reset, ResetCounts, Target};

/// What the derives' code needs; not part of the public API.
#[doc(hidden)]
pub mod __private {
    pub use serde_json;
}
