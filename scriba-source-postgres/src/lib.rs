//! Scriba source: an event log in a Postgres table.
