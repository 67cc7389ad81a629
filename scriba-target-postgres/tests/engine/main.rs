//! The engine from a Postgres log to read models in Postgres.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod bad_input;
mod common;
mod database;
mod event_types;
mod failures;
mod order;
mod parallel;
mod prefix;
mod sqlstates;
mod stores;
