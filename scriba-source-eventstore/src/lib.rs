//! Scriba sources: `EventStoreDB` and `KurrentDB`.
//!
//! [`PersistentSource`] reads a stream or a category by a persistent subscription, whose position the server keeps and which
//! lets in one subscriber; [`CatchUpSource`] reads a stream, a category or the whole log by a catch-up subscription, from the watermark of
//! the read model. Both go by the same positions, so a projection may change from one to the other over the same stream.
//!
//! ```no_run
//! use scriba_source_eventstore::{CatchUpSource, EventStore, PersistentSource};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = EventStore::new("esdb://admin:changeit@db.example:2113?tls=true")?.store_name("orders-prod");
//!
//! let accounts = PersistentSource::category(&store, "account");
//! let everything = CatchUpSource::all_beginning_with(&store, ["account-", "order-"]);
//! # Ok(())
//! # }
//! ```
//!
//! # What it makes of a store
//!
//! | source | position of an event | |
//! |---|---|---|
//! | stream | its revision, or that of the link it was reached by | counts up one by one |
//! | category | the revision of the link in `$ce-<category>` | counts up one by one |
//! | all | its commit position | increases |
//!
//! - A revision that is passed is looked up: where the event exists, the subscription begins again from the watermark; where it was
//!   truncated or scavenged, that is reported and passed.
//! - A link that leads nowhere, an event of a type that the projection does not list, and one of the server's own types (`$…`)
//!   that it does not list are passed over.
//! - A stream that is deleted for ever (by a tombstone) halts its projections. One that is deleted softly, or missing, is empty.
//! - A group that exists is refused where its settings lose events or reorder them: the error names each with the remedy.
//! - A group is made by who may do so: in secure mode a user in `$ops` or `$admins`.
//!
//! # What it needs of the server
//!
//! Version 20.6 or later; the tests of this crate run against a double, see `scriba_testing::eventstore`. For categories the
//! projection `$by_category` has to run.
//!
//! # Code map
//!
//! `catch_up`, `persistent` (the two sources) → `flow` (messages to pages) with `continuity` (what is missing, pure) and
//! `pending` (what was demanded, pure); `seat` (a place in a group) with `acks` (pure) and `group` (settings, pure); `inspector`;
//! `store`, `connection` and `lines` (clients, made anew when they fail); `client` is the port to the client crates.

mod acks;
mod catch_up;
mod client;
mod connection;
mod continuity;
mod departures;
mod error;
#[cfg(test)]
mod fake;
mod flow;
mod group;
mod inspector;
mod lines;
mod part;
mod pending;
mod persistent;
mod reads;
mod recorded;
mod seat;
mod store;

pub use catch_up::CatchUpSource;
pub use client::ClientCrate;
pub use persistent::PersistentSource;
pub use store::{EventStore, InvalidConnectionString};
