//! The EventStoreDB double through clients of other languages: each rule that is written down of servers, seen by a client
//! that knows nothing of this project.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod bed;
mod checkpoints;
mod consumers;
mod delivery;
mod documented;
mod install;
mod parking;
mod python;
mod refusals;
mod retries;
