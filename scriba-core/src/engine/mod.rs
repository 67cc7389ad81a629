//! The engine: the only files that spawn tasks.
//!
//! An event goes forward through [`reader`], [`pipeline`], [`worker`] and [`commit`], and its ack goes back through
//! [`reader`]. Above them stands one [`coordinator`] per projection, with its [`lease`] and [`lag`] beside it, on the
//! [`control`] thread; [`registry`] is what the user holds.

mod commit;
mod control;
mod coordinator;
mod info;
mod lag;
mod lease;
mod messages;
mod panic;
mod pipeline;
mod reader;
mod registry;
mod setup;
mod trouble;
mod wait;
mod worker;

pub use info::{OldestOpen, ProjectionInfo, RunCounts, WindowInfo};
pub use registry::{ListedProjection, Scriba};
pub use wait::WaitFor;
