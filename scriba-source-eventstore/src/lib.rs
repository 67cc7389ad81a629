//! EventStoreDB and KurrentDB as sources of Scriba.

mod client;
