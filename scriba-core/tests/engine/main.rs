//! The engine on a source and a target in memory.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod cases;
mod commands;
mod common;
mod failures;
mod fragile;
mod in_flight;
mod lifecycle;
mod order;
mod places;
mod poison;
mod states;
mod stopping;
mod supervision;
#[cfg(feature = "test-switches")]
mod switches;
