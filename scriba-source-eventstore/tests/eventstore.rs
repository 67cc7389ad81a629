//! The same by the crate `eventstore`, in a process of its own: it does not start where `kurrentdb` was before it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod double;

use eventstore as client;
use scriba_source_eventstore::ClientCrate;

const CLIENT: ClientCrate = ClientCrate::EventStore;
