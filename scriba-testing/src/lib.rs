//! Testing kit for Scriba: handlers tried without a pipeline, a source and a target in memory with faults at chosen
//! steps, a recorder of what the engine reports, a throwaway Postgres, and conformance suites for adapters.
//!
//! From small to large:
//!
//! - [`handle`] calls one handler with one event, with no database;
//! - [`project`] runs a projection's handlers on events and commits through a real target, with no pipeline;
//! - [`MemorySource`] and [`MemoryTarget`] stand in for log and database under a real engine, and fail when told to;
//! - [`Recorder`] keeps all that the engine reports, to wait for and to look at.
//!
//! With the cargo feature `eventstore`, `eventstore` has a double of EventStoreDB and KurrentDB that speaks their protocol.
//!
//! For authors of adapters, [`conformance`] has a suite that every source passes, and one that every target does.
//!
//! Each says what it does not simulate. What Postgres itself does (constraints, locks, types) is seen on Postgres only.

pub mod conformance;
#[cfg(feature = "eventstore")]
pub mod eventstore;
mod handlers;
mod memory_source;
mod memory_target;
pub mod postgres;
mod recorder;

pub use handlers::{Failed, Given, ProjectError, Projected, handle, project};
pub use memory_source::{FaultCounts, Faults, HeldAppend, MemorySource, SourceCall, SourceFault};
pub use memory_target::{MemoryTarget, Snapshot, TargetFault, TargetStep};
pub use recorder::{NotSeen, Record, Recorded, Recorder};
