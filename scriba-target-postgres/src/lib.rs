//! Scriba target: read models in Postgres, committed with their checkpoint in one transaction.
//!
//! [`PgTarget`] is the target. Operations are data ([`PgOp`]); tables and columns are typed by `#[derive(Table)]`.
//!
//! | room | files |
//! |---|---|
//! | operations | `op`, `custom`, `table`, `value` |
//! | from a batch to statements (pure but for the catalogue) | `facts`, `fuse`, `statement` |
//! | one transaction | `apply`, `single`, `isolate`, `constraints`, `backend`, `answer`, `blocker`, `checkpoint`, `dead_letter` |
//! | control tables | `names`, `migrate`, `lease`, `status`, `reset` |
//! | the outside | `target`, `sqlstate` |

mod answer;
mod apply;
mod backend;
mod blocker;
mod checkpoint;
mod constraints;
mod custom;
mod dead_letter;
mod facts;
mod fuse;
mod isolate;
mod lease;
mod migrate;
mod names;
mod op;
mod reset;
mod single;
mod sqlstate;
mod statement;
mod status;
mod switch;
mod table;
mod target;
mod value;

pub use custom::{CustomError, CustomOp, CustomResult, custom};
pub use op::{Changes, DeleteOp, InsertOp, NothingSet, PgOp, SomethingSet, SqlOp, Update, UpdateOp, sql};
pub use scriba_macros::Table;
#[doc(hidden)]
pub use switch::Switch;
pub use table::{Column, ColumnMeta, Filter, OnConflict, Table, TableMeta, ValueKind};
pub use target::PgTarget;
pub use value::{IntoColumn, Number, PgValue, Value};
