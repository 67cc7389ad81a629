//! The engine from a Postgres log to read models in Postgres.

mod bad_input;
mod common;
mod prefix;
