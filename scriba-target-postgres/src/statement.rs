//! One statement as it is sent: its text, its arrays, and the events it holds.
//!
//! A typed operation alone and a thousand fused ones have the same text; only the length of the arrays differs.

mod key;
mod row;
mod text;

use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashSet;
use scriba_core::Position;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgArguments, PgBindIterExt, PgConnection, PgTypeInfo};
use sqlx::{Arguments, AssertSqlSafe, Encode, Postgres, Type};

pub(crate) use self::key::Key;
pub(crate) use self::row::KeyedRow;
use self::text::{Filtered, arrays, conditional_text, filtered_parts, filtered_text, sql_text};
pub(crate) use self::text::{keyed_text, quoted_name};
use crate::custom::CustomOp;
use crate::op::{Conflict, DeleteOp, PgOp, Rows, SqlOp, UpdateOp};
use crate::table::{TableMeta, ValueKind};
use crate::value::Value;

/// The kind of a failure of `required`.
pub(crate) const NO_ROW: &str = "no_row";

/// An operation with the position of its event.
pub(crate) type Row<'a> = (Position, &'a PgOp);

/// What decides the text of an operation by key, beside its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Shape {
    Insert(Conflict),
    Update {
        set: u128,
        add: u128,
        required: bool,
        /// Several adds on one key may be one row.
        merging: bool,
    },
    Delete {
        required: bool,
    },
}

/// A statement ready to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Statement<'a> {
    text: Arc<str>,
    kind: Kind<'a>,
}

#[derive(Clone, Debug)]
enum Kind<'a> {
    /// Operations by key, all of one shape, at most one for each key.
    Keyed {
        table: &'static TableMeta,
        shape: Shape,
        rows: Vec<KeyedRow<'a>>,
    },
    /// An operation by filter.
    Filtered(Row<'a>),
    Sql(Position, &'a SqlOp),
    Custom(Position, &'a CustomOp),
}

/// Why a statement failed. The transaction is to be rolled back after either.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatementError {
    /// The database refused it, or was lost.
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    /// Fewer rows were there than `required` asks for.
    #[error(transparent)]
    NoRow(#[from] NoRow),
}

/// A required row was not there: an integrity failure of kind [`NO_ROW`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoRow {
    /// The quoted table; `None` for `sql`.
    table: Option<String>,
    /// The key or the filter, where one operation is to blame.
    rows: Option<String>,
    /// Of the event, where one is to blame.
    position: Option<Position>,
    wanted: u64,
    found: u64,
}

impl fmt::Display for NoRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.table {
            Some(table) => {
                write!(f, "{NO_ROW}: {} of {} required rows found in table {table}", self.found, self.wanted)?;
            }
            None => write!(f, "{NO_ROW}: a required `sql` statement hit no row")?,
        }
        if let Some(rows) = &self.rows {
            write!(f, " for {rows}")?;
        }
        if let Some(position) = self.position {
            write!(f, ", position {position}")?;
        }
        f.write_str(": write the row first, or leave out `required()` where it may be missing")
    }
}

impl std::error::Error for NoRow {}

impl<'a> Statement<'a> {
    /// Operations by key. The text is [`keyed_text`]'s.
    ///
    /// # Panics
    /// On no rows, and on two rows of one key where the database would drop or refuse the second.
    pub(crate) fn keyed(text: Arc<str>, table: &'static TableMeta, shape: Shape, rows: Vec<KeyedRow<'a>>) -> Self {
        assert!(!rows.is_empty(), "a statement holds at least one row");
        if rows.len() > 1 && !matches!(shape, Shape::Insert(Conflict::Fail | Conflict::Nothing)) {
            assert!(all_keys_differ(&rows), "a statement holds each key of {} once", quoted_name(table));
        }
        Self { text, kind: Kind::Keyed { table, shape, rows } }
    }

    /// An operation by filter, or `sql`: always a statement of its own.
    ///
    /// # Panics
    /// On an operation by key.
    pub(crate) fn alone(position: Position, op: &'a PgOp) -> Self {
        match op {
            PgOp::Sql(sql) => Self { text: sql_text(sql).into(), kind: Kind::Sql(position, sql) },
            PgOp::Custom(custom) => Self { text: "".into(), kind: Kind::Custom(position, custom) },
            PgOp::Insert(_) | PgOp::Update(_) | PgOp::Delete(_) => {
                Self { text: filtered_text(op).into(), kind: Kind::Filtered((position, op)) }
            }
        }
    }

    /// The position of its event, where it is of one only.
    pub(crate) fn single_position(&self) -> Option<Position> {
        match &self.kind {
            Kind::Keyed { rows, .. } if rows.len() > 1 => None,
            Kind::Keyed { rows, .. } => rows.first().and_then(KeyedRow::single_position),
            Kind::Filtered((position, _)) | Kind::Sql(position, _) | Kind::Custom(position, _) => Some(*position),
        }
    }

    /// Rows in it.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        if let Kind::Keyed { rows, .. } = &self.kind { rows.len() } else { 1 }
    }

    /// Sends it and reads its answer: the number of rows hit.
    pub(crate) async fn execute(&self, conn: &mut PgConnection) -> Result<u64, StatementError> {
        let arguments = self.arguments().map_err(sqlx::Error::Encode)?;
        // The one place where text that is not a literal becomes SQL: identifiers in it are quoted, values travel as
        // binds, and the text of `sql` is the user's own.
        let query = sqlx::query_with(AssertSqlSafe(Arc::clone(&self.text)), arguments);
        let found = query.execute(conn).await?.rows_affected();
        let wanted = self.required_rows();
        if found < wanted { Err(self.no_row(wanted, found).into()) } else { Ok(found) }
    }

    /// The text that moves the checkpoint and, only where that was done, writes: a transaction in one round trip. `None` for
    /// statements that need one of their own. `gate` is the call that moves the checkpoint or fails, with binds from a
    /// number on.
    ///
    /// The outermost query reads the gate, so that it is always passed, rows or no rows.
    pub(crate) fn gated(
        &self,
        gate: impl FnOnce(usize) -> String,
    ) -> Option<Result<(String, PgArguments), BoxDynError>> {
        let Kind::Keyed { table, shape, .. } = &self.kind else { return None };
        if self.required_rows() > 0 {
            return None;
        }
        let write = conditional_text(table, *shape, Some("EXISTS (SELECT FROM moved)"));
        let gate = gate(arrays(table, *shape).len() + 1);
        let text =
            format!("WITH moved AS MATERIALIZED (SELECT {gate}), written AS ({write}) SELECT count(*) FROM moved");
        Some(self.arguments().map(|arguments| (text, arguments)))
    }

    /// The closure, where it is one: that is not sent but called.
    pub(crate) fn custom(&self) -> Option<(Position, &'a CustomOp)> {
        if let Kind::Custom(position, custom) = self.kind { Some((position, custom)) } else { None }
    }

    /// True where it counts as having changed something: all but an update or delete that hit no row.
    pub(crate) fn changed(&self, rows: u64) -> bool {
        let may_miss = match &self.kind {
            Kind::Keyed { shape, .. } => !matches!(shape, Shape::Insert(_)),
            Kind::Filtered(_) => true,
            Kind::Sql(_, op) => op.may_miss(),
            Kind::Custom(..) => false,
        };
        rows > 0 || !may_miss
    }

    /// The table it writes, where it writes one by key.
    pub(crate) fn keyed_table(&self) -> Option<&'static TableMeta> {
        if let Kind::Keyed { table, .. } = &self.kind { Some(table) } else { None }
    }

    fn required_rows(&self) -> u64 {
        match &self.kind {
            Kind::Keyed { shape: Shape::Update { required, .. } | Shape::Delete { required }, rows, .. } => {
                if *required { rows.len() as u64 } else { 0 }
            }
            Kind::Filtered((_, PgOp::Update(UpdateOp { required, .. }) | PgOp::Delete(DeleteOp { required, .. })))
            | Kind::Sql(_, SqlOp { required, .. }) => u64::from(*required),
            Kind::Keyed { .. } | Kind::Filtered(_) | Kind::Custom(..) => 0,
        }
    }

    fn no_row(&self, wanted: u64, found: u64) -> NoRow {
        let op = match &self.kind {
            Kind::Keyed { rows, .. } => rows.first().map(KeyedRow::op),
            Kind::Filtered((_, op)) => Some(*op),
            Kind::Sql(..) | Kind::Custom(..) => None,
        };
        let position = self.single_position();
        NoRow {
            table: op.and_then(table_of).map(quoted_name),
            rows: op.filter(|_| position.is_some()).map(describe_rows),
            position,
            wanted,
            found,
        }
    }

    fn arguments(&self) -> Result<PgArguments, BoxDynError> {
        let mut arguments = PgArguments::default();
        match &self.kind {
            Kind::Keyed { table, shape, rows } => {
                for (column, part) in arrays(table, *shape) {
                    let values = rows.iter().map(|row| part.value(row));
                    add_array(&mut arguments, table.columns[column].kind, values)?;
                }
            }
            Kind::Filtered((_, op)) => {
                let Filtered { table, values, .. } = filtered_parts(op);
                for (column, value) in values {
                    add_array(&mut arguments, table.columns[column].kind, std::iter::once(value))?;
                }
            }
            Kind::Sql(_, op) => {
                for value in &op.binds {
                    add_value(&mut arguments, value)?;
                }
            }
            Kind::Custom(..) => {}
        }
        Ok(arguments)
    }
}

/// What, where, and the keys: `INSERT orders 1 2`.
#[cfg(test)]
impl fmt::Display for Statement<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ops, ends): (Vec<_>, _) = match &self.kind {
            Kind::Keyed { rows, .. } => (rows.iter().map(KeyedRow::op).collect(), ""),
            Kind::Filtered((_, op)) => (vec![*op], " where"),
            Kind::Sql(..) => return f.write_str("sql"),
            Kind::Custom(..) => return f.write_str("custom"),
        };
        let word = self.text.split(' ').next().unwrap_or_default();
        let table =
            table_of(ops[0]).map(|table| [table.schema, Some(table.name)].into_iter().flatten().collect::<Vec<_>>());
        write!(f, "{word} {}", table.unwrap_or_default().join("."))?;
        for value in ops.into_iter().filter_map(Key::of).flat_map(Key::values) {
            write!(f, " {}", Shown(value))?;
        }
        f.write_str(ends)
    }
}

fn all_keys_differ(rows: &[KeyedRow<'_>]) -> bool {
    let mut seen = FxHashSet::default();
    rows.is_sorted_by(|a, b| a.key() < b.key()) || rows.iter().all(|row| seen.insert(row.key()))
}

/// The table an operation writes; `None` for `sql`.
pub(crate) fn table_of(op: &PgOp) -> Option<&'static TableMeta> {
    match op {
        PgOp::Insert(op) => Some(op.table),
        PgOp::Update(op) => Some(op.table),
        PgOp::Delete(op) => Some(op.table),
        PgOp::Sql(_) | PgOp::Custom(_) => None,
    }
}

/// Binds an array of a column's kind straight from the operations, without a copy.
fn add_array<'v>(
    arguments: &mut PgArguments,
    kind: ValueKind,
    values: impl Iterator<Item = &'v Value>,
) -> Result<(), BoxDynError> {
    macro_rules! add {
        ($variant:ident, $value:pat => $bound:expr) => {
            arguments.add(
                values
                    .map(|value| match value {
                        Value::Null => None,
                        Value::$variant($value) => Some($bound),
                        other => unreachable!("{other:?} in a column of kind {kind:?}"),
                    })
                    .bind_iter(),
            )
        };
    }
    match kind {
        ValueKind::Bool => add!(Bool, v => *v),
        ValueKind::I16 => add!(I16, v => *v),
        ValueKind::I32 => add!(I32, v => *v),
        ValueKind::I64 => add!(I64, v => *v),
        ValueKind::F32 => add!(F32, v => *v),
        ValueKind::F64 => add!(F64, v => *v),
        ValueKind::Text => add!(Text, v => v.as_str()),
        ValueKind::Bytes => add!(Bytes, v => v.as_slice()),
        ValueKind::Uuid => add!(Uuid, v => *v),
        ValueKind::Date => add!(Date, v => *v),
        ValueKind::Timestamp => add!(Timestamp, v => *v),
    }
}

/// Binds a value of `sql`.
fn add_value(arguments: &mut PgArguments, value: &Value) -> Result<(), BoxDynError> {
    match value {
        Value::Null => arguments.add(Untyped),
        Value::Bool(v) => arguments.add(v),
        Value::I16(v) => arguments.add(v),
        Value::I32(v) => arguments.add(v),
        Value::I64(v) => arguments.add(v),
        Value::F32(v) => arguments.add(v),
        Value::F64(v) => arguments.add(v),
        Value::Text(v) => arguments.add(v.as_str()),
        Value::Bytes(v) => arguments.add(v.as_slice()),
        Value::Uuid(v) => arguments.add(v),
        Value::Date(v) => arguments.add(v),
        Value::Timestamp(v) => arguments.add(v),
    }
}

/// NULL of the type that the statement wants in its place.
struct Untyped;

impl Type<Postgres> for Untyped {
    fn type_info() -> PgTypeInfo {
        const UNKNOWN: Oid = Oid(705);
        PgTypeInfo::with_oid(UNKNOWN)
    }
}

impl Encode<'_, Postgres> for Untyped {
    fn encode_by_ref(&self, _: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        Ok(IsNull::Yes)
    }
}

/// The rows an operation asks for, for messages.
fn describe_rows(op: &PgOp) -> String {
    let named = |(column, value): (usize, &Value)| {
        let name = table_of(op).map_or("", |table| table.columns[column].name);
        format!("{name} = {}", Shown(value))
    };
    let described: Vec<String> = match (op, Key::of(op), table_of(op)) {
        (_, Some(key), Some(table)) => table.key.iter().copied().zip(key.values()).map(named).collect(),
        (
            PgOp::Update(UpdateOp { rows: Rows::Filter(f), .. }) | PgOp::Delete(DeleteOp { rows: Rows::Filter(f), .. }),
            ..,
        ) => f.iter().map(|(column, value)| named((*column, value))).collect(),
        _ => Vec::new(),
    };
    described.join(", ")
}

struct Shown<'a>(&'a Value);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Value::Null => f.write_str("NULL"),
            Value::Bool(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
            Value::Text(v) => fmt::Debug::fmt(v, f),
            Value::Bytes(v) => write!(f, "{} bytes", v.len()),
            Value::Uuid(v) => v.fmt(f),
            Value::Date(v) => v.fmt(f),
            Value::Timestamp(v) => v.fmt(f),
        }
    }
}
