//! The engine on a source and a target in memory.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod common;
mod failures;
mod lifecycle;
mod order;
#[cfg(feature = "test-switches")]
mod switches;
