//! The log source against a real server.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bed;
mod conformance;
mod gaps;
mod layouts;
mod paging;
mod refusals;
mod stress;
mod waiting;
