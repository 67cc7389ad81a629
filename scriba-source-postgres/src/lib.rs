//! Scriba source: an event log in a Postgres table.
//!
//! [`PgLog`] reads any table that has one row per event and a position drawn from a sequence. It misses no event and
//! waits for nothing but an append that could still own a lower position.
//!
//! ```no_run
//! use scriba_source_postgres::PgLog;
//!
//! # fn log(pool: sqlx::PgPool) -> PgLog {
//! PgLog::new(pool, "events").metadata_column("metadata").occurred_at_column("recorded_at")
//! # }
//! ```
//!
//! # Why reading by position is not enough
//!
//! A position is drawn when a transaction inserts and becomes visible when it commits, and commits come in another
//! order than draws. A reader that goes by the highest position it has seen loses events. Here a missing position is passed
//! only on evidence: a *probe* lists the transactions that hold the lock on the position's sequence, which every
//! transaction that has drawn a number keeps to its end; a *page*, a later statement with a snapshot of its own, then
//! reads the rows, and a gap in it is dead if no listed transaction could own a number in it. Time alone proves nothing, so
//! an append that stays open is waited for, and reported by name.
//!
//! # What it asks of the log
//!
//! - The position is `bigint` or `integer`, `NOT NULL`, 0 or more, drawn from **one** sequence (serial, identity, or a default)
//!   that is ascending, does not cycle, is WAL-logged and has `CACHE 1`, in the transaction that inserts the row.
//! - The server is the primary, and the table is no target of logical replication.
//! - The position has an index that starts with it.
//! - `SELECT` on the table. `SELECT` on the sequence lets a restored store be told from an emptied one; membership in
//!   `pg_read_all_stats` lets reports on gaps say how long a blocking transaction has been open.
//!
//! [`PgLog`]'s check refuses what it can see of these, with what it found and the remedy. What no server shows is a position
//! drawn in one transaction and inserted in another: such a log must not be read with this source.
//!
//! # Code map
//!
//! `log` (settings, the port) → `catalog` (what the table is) → `subscription` (the loop) with `frontier` (the rule, pure),
//! `page_size` (pure), `row` (bytes to events), `wake` (polling and NOTIFY), `blocker` (who holds a gap); `sql` has every text.

mod blocker;
mod catalog;
mod error;
mod frontier;
mod inspector;
mod log;
mod page_size;
mod row;
mod sql;
mod subscription;
mod wake;

pub use log::PgLog;
