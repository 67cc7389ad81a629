//! The engine: the only files that spawn tasks.
//!
//! An event goes forward through [`reader`], [`pipeline`], [`worker`] and [`commit`], and its ack goes back through
//! [`reader`]. Above them stands one [`coordinator`] per projection, with its [`lease`] and [`lag`] beside it and its
//! [`supervisor`] above it, on the [`control`] thread; [`registry`] is what the user holds.

mod commit;
mod control;
mod coordinator;
mod fruitless;
mod info;
mod lag;
mod lease;
mod live;
mod messages;
mod panic;
mod pipeline;
mod progress;
mod reader;
mod registry;
mod reset;
mod setup;
mod supervisor;
mod trouble;
mod wait;
mod worker;

pub use info::{CatchUp, OldestOpen, ProjectionInfo, RunCounts, StreamPositions, WindowInfo};
pub use registry::{ListedProjection, Scriba};
pub use wait::WaitFor;
