//! The engine on a source and a target in memory.

mod common;
mod failures;
mod lifecycle;
mod order;
#[cfg(feature = "test-switches")]
mod switches;
