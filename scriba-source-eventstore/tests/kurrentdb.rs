//! The sources against a double of the server, by the crate `kurrentdb`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod double;

use kurrentdb as client;
use scriba_source_eventstore::ClientCrate;

const CLIENT: ClientCrate = ClientCrate::KurrentDb;
