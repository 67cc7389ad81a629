//! Tables and columns as types.

use std::fmt;
use std::marker::PhantomData;

use crate::op::{Conflict, DeleteOp, InsertOp, NothingSet, Rows, Update};
use crate::value::{IntoColumn, Number, PgValue, Value};

/// A table, as `#[derive(Table)]` describes it.
#[derive(Debug)]
pub struct TableMeta {
    /// Its schema; `None` where the search path decides.
    pub schema: Option<&'static str>,
    /// Its name.
    pub name: &'static str,
    /// The columns of the struct, in the order of its fields.
    pub columns: &'static [ColumnMeta],
    /// Indexes into `columns` of the key, in the order of the fields.
    pub key: &'static [usize],
}

/// A column of a [`TableMeta`].
#[derive(Debug)]
pub struct ColumnMeta {
    /// Its name.
    pub name: &'static str,
    /// The type of the values that travel to it.
    pub kind: ValueKind,
    /// The SQL type the value is cast to where the one it travels as cannot be assigned: an enum, `jsonb`, `numeric`.
    pub cast: Option<&'static str>,
}

/// The type as which values of a column travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ValueKind {
    /// `boolean`.
    Bool,
    /// `smallint`.
    I16,
    /// `integer`.
    I32,
    /// `bigint`.
    I64,
    /// `real`.
    F32,
    /// `double precision`.
    F64,
    /// `text`.
    Text,
    /// `bytea`.
    Bytes,
    /// `uuid`.
    Uuid,
    /// `date`.
    Date,
    /// `timestamptz`.
    Timestamp,
}

/// A row of a table: a struct with `#[derive(Table)]`, from which operations on the table are made.
///
/// ```
/// use scriba_core::Outcome;
/// use scriba_target_postgres::{OnConflict, PgOp, Table};
///
/// #[derive(Table)]
/// #[table(name = "balances")]
/// struct BalanceRow {
///     #[table(key)]
///     account_id: String,
///     owner: String,
///     cents: i64,
/// }
///
/// let row = BalanceRow { account_id: "a-1".into(), owner: "Ann".into(), cents: 100 };
/// let deposited = row.upsert(OnConflict::update(BalanceRow::OWNER).add(BalanceRow::CENTS));
/// let withdrawn = BalanceRow::update("a-2").add(BalanceRow::CENTS, -100).required();
/// let outcome: Outcome<PgOp> = Outcome::from(deposited).and(withdrawn);
///
/// let closed: Outcome<PgOp> = BalanceRow::delete("a-3").into();
/// let emptied: Outcome<PgOp> =
///     BalanceRow::update_where(BalanceRow::OWNER.is("Ann").and(BalanceRow::CENTS, 0)).set(BalanceRow::OWNER, "").into();
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a row of a table",
    label = "no `Table`",
    note = "write `#[derive(Table)]` and `#[table(name = \"…\")]` on a struct with one field per column"
)]
pub trait Table: Sized + Send + 'static {
    /// The table and its columns.
    const META: &'static TableMeta;

    /// The key of a row: the type of its column, or a tuple where it has several.
    type Key;

    /// One value per column, in the order of [`TableMeta::columns`].
    fn into_values(self) -> Box<[Value]>;

    /// One value per column of the key, in the order of [`TableMeta::key`].
    fn key_values(key: Self::Key) -> Box<[Value]>;

    /// Inserts this row. A row of the same key that is there already is an integrity failure of this event.
    fn insert(self) -> InsertOp {
        InsertOp { table: Self::META, values: self.into_values(), conflict: Conflict::Fail }
    }

    /// Inserts this row, or does what is said where one of the same key is there already.
    fn upsert(self, on_conflict: OnConflict<Self>) -> InsertOp {
        InsertOp { table: Self::META, values: self.into_values(), conflict: on_conflict.conflict }
    }

    /// Changes the row of a key; say how with [`Update::set`] and [`Update::add`].
    fn update(key: impl Into<Self::Key>) -> Update<Self, NothingSet> {
        Update::new(Rows::Key(Self::key_values(key.into())))
    }

    /// Changes all rows that a filter lets through.
    fn update_where(filter: Filter<Self>) -> Update<Self, NothingSet> {
        Update::new(Rows::Filter(filter.columns))
    }

    /// Deletes the row of a key.
    fn delete(key: impl Into<Self::Key>) -> DeleteOp {
        DeleteOp { table: Self::META, rows: Rows::Key(Self::key_values(key.into())), required: false }
    }

    /// Deletes all rows that a filter lets through.
    fn delete_where(filter: Filter<Self>) -> DeleteOp {
        DeleteOp { table: Self::META, rows: Rows::Filter(filter.columns), required: false }
    }
}

/// A column of the table of the rows `T`, with values of the type `V`. `#[derive(Table)]` makes one per field.
pub struct Column<T, V> {
    index: usize,
    types: PhantomData<fn() -> (T, V)>,
}

impl<T, V> Clone for Column<T, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, V> Copy for Column<T, V> {}

impl<T: Table, V> fmt::Debug for Column<T, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", T::META.name, self.name())
    }
}

impl<T, V> Column<T, V> {
    /// The column of this index in [`TableMeta::columns`]: for the derive, which knows it.
    #[doc(hidden)]
    pub const fn at(index: usize) -> Self {
        Self { index, types: PhantomData }
    }

    /// Where it stands in [`TableMeta::columns`].
    pub(crate) fn index(self) -> usize {
        self.index
    }
}

impl<T: Table, V> Column<T, V> {
    /// Its name in the database.
    pub fn name(self) -> &'static str {
        T::META.columns[self.index].name
    }
}

impl<T: Table, V: PgValue> Column<T, V> {
    /// The rows that have this value in this column. `None` lets those with NULL through.
    pub fn is(self, value: impl IntoColumn<V>) -> Filter<T> {
        Filter { columns: Vec::new(), row: PhantomData }.and(self, value)
    }
}

/// Some rows of a table, told by the values of columns: begun by [`Column::is`].
#[derive(Clone)]
#[must_use = "a filter says which rows `update_where` or `delete_where` is about"]
pub struct Filter<T> {
    columns: Vec<(usize, Value)>,
    row: PhantomData<fn() -> T>,
}

impl<T: Table> Filter<T> {
    /// Of these rows only those that have this value in this column, too.
    pub fn and<V: PgValue>(mut self, column: Column<T, V>, value: impl IntoColumn<V>) -> Self {
        self.columns.push((column.index, value.into_column().into_value()));
        self
    }
}

impl<T: Table> fmt::Debug for Filter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.columns.iter().map(|(index, value)| (T::META.columns[*index].name, value));
        f.debug_map().entries(columns).finish()
    }
}

/// What an upsert does where a row of the same key is there already.
#[must_use = "it says what `upsert` does on conflict"]
pub struct OnConflict<T> {
    conflict: Conflict,
    row: PhantomData<fn() -> T>,
}

impl<T> Clone for OnConflict<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for OnConflict<T> {}

impl<T> fmt::Debug for OnConflict<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.conflict.fmt(f)
    }
}

impl<T: Table> OnConflict<T> {
    fn new(conflict: Conflict) -> Self {
        Self { conflict, row: PhantomData }
    }

    /// Leaves the row that is there as it is.
    pub fn nothing() -> Self {
        Self::new(Conflict::Nothing)
    }

    /// Gives all columns outside the key the new row's values. Where there are none it is [`OnConflict::nothing`].
    pub fn update_all() -> Self {
        let set = (0..T::META.columns.len())
            .filter(|index| !T::META.key.contains(index))
            .fold(0, |set, index| set | 1 << index);
        Self::new(if set == 0 { Conflict::Nothing } else { Conflict::Update { set, add: 0 } })
    }

    /// Gives a column the new row's value, and leaves those not named as they are.
    ///
    /// # Panics
    /// When the column is one of the key, which is the same in both rows.
    pub fn update<V: PgValue>(column: Column<T, V>) -> Self {
        Self::new(Conflict::Update { set: changed(column), add: 0 })
    }

    /// Adds the new row's value to a column, and leaves those not named as they are.
    ///
    /// # Panics
    /// When the column is one of the key.
    pub fn adding<V: Number>(column: Column<T, V>) -> Self {
        Self::new(Conflict::Update { set: 0, add: changed(column) })
    }

    /// Gives another column the new row's value, too. A column that was to be added to is set instead.
    ///
    /// # Panics
    /// When the column is one of the key.
    pub fn and<V: PgValue>(self, column: Column<T, V>) -> Self {
        let (set, add) = self.columns();
        Self::new(Conflict::Update { set: set | changed(column), add: add & !changed(column) })
    }

    /// Adds the new row's value to another column, too. A column that was to be set is added to instead.
    ///
    /// # Panics
    /// When the column is one of the key.
    #[expect(clippy::should_implement_trait, reason = "a column is named, no sum is made")]
    pub fn add<V: Number>(self, column: Column<T, V>) -> Self {
        let (set, add) = self.columns();
        Self::new(Conflict::Update { set: set & !changed(column), add: add | changed(column) })
    }

    fn columns(self) -> (u128, u128) {
        match self.conflict {
            Conflict::Update { set, add } => (set, add),
            Conflict::Fail | Conflict::Nothing => (0, 0),
        }
    }
}

/// The bit of a column that changes on conflict.
fn changed<T: Table, V>(column: Column<T, V>) -> u128 {
    assert!(
        !T::META.key.contains(&column.index),
        "column {column:?} is of the key, which does not change on conflict: leave it out"
    );
    1 << column.index
}
