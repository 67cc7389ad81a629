//! Projections from an event store to read models in Postgres: what breaks other systems of this kind. The server is the double,
//! client crate, engine and database are the real ones.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod acks;
mod groups;
mod outages;
mod redelivery;
mod stage;
