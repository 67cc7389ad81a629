//! Scriba target: read models in Postgres, committed with their checkpoint in one transaction.
//!
//! [`PgTarget`] is the target. Operations are data ([`PgOp`]); tables and columns are typed by `#[derive(Table)]`.
//!
//! | room | files |
//! |---|---|
//! | operations | `op`, `table`, `value` |
//! | from a batch to statements (pure but for the catalogue) | `facts`, `fuse`, `statement` |
//! | one transaction | `apply`, `checkpoint`, `dead_letter` |
//! | control tables | `names`, `migrate`, `lease`, `status` |
//! | the outside | `target`, `sqlstate` |

mod apply;
mod checkpoint;
mod dead_letter;
mod facts;
mod fuse;
mod lease;
mod migrate;
mod names;
mod op;
mod sqlstate;
mod statement;
mod status;
mod table;
mod target;
mod value;

pub use op::{Changes, DeleteOp, InsertOp, NothingSet, PgOp, SomethingSet, SqlOp, Update, UpdateOp, sql};
pub use scriba_macros::Table;
pub use table::{Column, ColumnMeta, Filter, OnConflict, Table, TableMeta, ValueKind};
pub use target::PgTarget;
#[cfg(feature = "test-switches")]
#[doc(hidden)]
pub use target::Switch;
pub use value::{IntoColumn, Number, PgValue, Value};
