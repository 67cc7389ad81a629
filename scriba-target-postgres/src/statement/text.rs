//! The SQL of operations, and which values belong to which of its binds. Identifiers are quoted here and nowhere else.

use std::fmt::Write;
use std::ops::Range;

use super::row::ADDENDS;
use super::{KeyedRow, Shape};
use crate::op::{Conflict, PgOp, Rows, SqlOp};
use crate::table::{TableMeta, ValueKind};
use crate::value::Value;

/// Where in an operation the values of one array are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// By column.
    Inserted(usize),
    /// By number among the key columns.
    Key(usize),
    /// By column.
    Set(usize),
    /// By column and number among its addends.
    Added(usize, usize),
}

impl Part {
    pub(super) fn value<'v>(self, row: &'v KeyedRow<'_>) -> &'v Value {
        let found = match (self, row.op()) {
            (Self::Inserted(column), PgOp::Insert(op)) => op.values.get(column),
            (Self::Set(column), PgOp::Update(op)) => {
                op.set.iter().find(|(at, _)| *at == column).map(|(_, value)| value)
            }
            (Self::Added(column, nth), _) => row.addend(column, nth),
            (Self::Key(at), _) => row.key().map(|key| key.value(at)),
            _ => None,
        };
        found.unwrap_or_else(|| unreachable!("the operations of a statement have its shape"))
    }
}

/// The arrays of a statement by key, in the order of its binds: the column each belongs to, and where its values are.
pub(super) fn arrays(table: &'static TableMeta, shape: Shape) -> Vec<(usize, Part)> {
    let key = || table.key.iter().enumerate().map(|(at, &column)| (column, Part::Key(at)));
    match shape {
        Shape::Insert(_) => (0..table.columns.len()).map(|column| (column, Part::Inserted(column))).collect(),
        Shape::Update { set, add, merging, .. } => {
            let addends = if merging { ADDENDS } else { 1 };
            let added = bits(add).flat_map(|column| (0..addends).map(move |nth| (column, Part::Added(column, nth))));
            key().chain(bits(set).map(|column| (column, Part::Set(column)))).chain(added).collect()
        }
        Shape::Delete { .. } => key().collect(),
    }
}

/// The text of a statement by key: the same for one row as for thousands.
pub(crate) fn keyed_text(table: &'static TableMeta, shape: Shape) -> String {
    conditional_text(table, shape, None)
}

/// The same, written only under a condition.
pub(super) fn conditional_text(table: &'static TableMeta, shape: Shape, condition: Option<&str>) -> String {
    let filter = condition.map(|condition| format!(" WHERE {condition}")).unwrap_or_default();
    let and = condition.map(|condition| format!(" AND {condition}")).unwrap_or_default();
    let name = quoted_name(table);
    let arrays = arrays(table, shape);
    let from = unnest(table, arrays.iter().map(|(at, _)| *at));
    // The arrays of the key come first in updates and deletes.
    let by_key = || {
        let pairs = table.key.iter().enumerate();
        joined(pairs.map(|(nth, &at)| format!("t.{} = {}", column(table, at), item(table, at, nth))), " AND ")
    };
    match shape {
        Shape::Insert(conflict) => {
            let columns = joined((0..table.columns.len()).map(|at| column(table, at)), ", ");
            let items = joined((0..table.columns.len()).map(|at| item(table, at, at)), ", ");
            let conflict = on_conflict(table, conflict);
            format!("INSERT INTO {name} AS t ({columns}) SELECT {items} FROM {from}{filter}{conflict}")
        }
        Shape::Update { .. } => {
            let mut nth = table.key.len();
            // The addends of one column stand together.
            let changes = arrays[nth..].chunk_by(|(a, _), (b, _)| a == b).map(|of_column| {
                let first = nth;
                nth += of_column.len();
                let (at, part) = of_column[0];
                change(table, at, first..nth, matches!(part, Part::Added(..)))
            });
            format!("UPDATE {name} AS t SET {} FROM {from} WHERE {}{and}", joined(changes, ", "), by_key())
        }
        Shape::Delete { .. } => format!("DELETE FROM {name} AS t USING {from} WHERE {}{and}", by_key()),
    }
}

fn on_conflict(table: &'static TableMeta, conflict: Conflict) -> String {
    let on_key = || format!(" ON CONFLICT ({})", joined(table.key.iter().map(|&at| column(table, at)), ", "));
    match conflict {
        Conflict::Fail => String::new(),
        Conflict::Nothing | Conflict::Update { set: 0, add: 0 } => on_key() + " DO NOTHING",
        Conflict::Update { set, add } => {
            let sets = bits(set).map(|at| format!("{0} = EXCLUDED.{0}", column(table, at)));
            let adds = bits(add).map(|at| format!("{0} = t.{0} + EXCLUDED.{0}", column(table, at)));
            format!("{} DO UPDATE SET {}", on_key(), joined(sets.chain(adds), ", "))
        }
    }
}

/// `"total" = t."total" + u.c3`, with more addends, or without the sum.
fn change(table: &TableMeta, at: usize, arrays: Range<usize>, added: bool) -> String {
    let (column, new) = (column(table, at), joined(arrays.map(|nth| item(table, at, nth)), " + "));
    if added { format!("{column} = t.{column} + {new}") } else { format!("{column} = {new}") }
}

/// An operation by filter, taken apart.
pub(super) struct Filtered<'a> {
    pub(super) table: &'static TableMeta,
    filter: &'a [(usize, Value)],
    /// The changes, then what the filter compares with: the binds in their order.
    pub(super) values: Vec<(usize, &'a Value)>,
}

pub(super) fn filtered_parts(op: &PgOp) -> Filtered<'_> {
    let (table, rows, set, add) = match op {
        PgOp::Update(op) => (op.table, &op.rows, op.set.as_slice(), op.add.as_slice()),
        PgOp::Delete(op) => (op.table, &op.rows, &[][..], &[][..]),
        PgOp::Insert(_) | PgOp::Sql(_) | PgOp::Custom(_) => unreachable!("no operation by filter"),
    };
    let Rows::Filter(filter) = rows else { unreachable!("no operation by filter") };
    let compared = filter.iter().filter(|(_, value)| *value != Value::Null);
    let values = set.iter().chain(add).chain(compared).map(|(column, value)| (*column, value)).collect();
    Filtered { table, filter, values }
}

/// An operation by filter. NULL is asked for by `IS NULL` and not by `IS NOT DISTINCT FROM`, which no index serves.
pub(super) fn filtered_text(op: &PgOp) -> String {
    let Filtered { table, filter, values } = filtered_parts(op);
    let name = quoted_name(table);
    let from = unnest(table, values.iter().map(|(at, _)| *at));
    let changes = values.len() - filter.iter().filter(|(_, value)| *value != Value::Null).count();
    let mut nth = changes;
    let conditions = filter.iter().map(|(at, value)| {
        if *value == Value::Null {
            return format!("t.{} IS NULL", column(table, *at));
        }
        nth += 1;
        format!("t.{} = {}", column(table, *at), item(table, *at, nth - 1))
    });
    let conditions = joined(conditions, " AND ");
    let filter = if conditions.is_empty() { String::new() } else { format!(" WHERE {conditions}") };
    match op {
        PgOp::Update(op) => {
            let changes = values[..changes].iter().enumerate();
            let changes = changes.map(|(nth, &(at, _))| change(table, at, nth..nth + 1, nth >= op.set.len()));
            format!("UPDATE {name} AS t SET {} FROM {from}{filter}", joined(changes, ", "))
        }
        _ if values.is_empty() => format!("DELETE FROM {name} AS t{filter}"),
        _ => format!("DELETE FROM {name} AS t USING {from}{filter}"),
    }
}

/// The text of `sql` with the types of its binds in a comment: prepared statements are kept by their text alone, and
/// one that was prepared for other types would read the values wrongly.
pub(super) fn sql_text(op: &SqlOp) -> String {
    if op.binds.is_empty() {
        return op.text.clone().into_owned();
    }
    let mut text = String::with_capacity(op.text.len() + op.binds.len() + 8);
    text.push_str(&op.text);
    text.push_str("\n/* ");
    text.extend(op.binds.iter().map(letter));
    text.push_str(" */");
    text
}

fn letter(value: &Value) -> char {
    match value {
        Value::Null => 'n',
        Value::Bool(_) => 'b',
        Value::I16(_) => '2',
        Value::I32(_) => '4',
        Value::I64(_) => '8',
        Value::F32(_) => 'f',
        Value::F64(_) => 'd',
        Value::Text(_) => 't',
        Value::Bytes(_) => 'x',
        Value::Uuid(_) => 'u',
        Value::Date(_) => 'y',
        Value::Timestamp(_) => 'z',
    }
}

/// `unnest($1::int8[], $2::text[]) AS u(c1, c2)`.
fn unnest(table: &TableMeta, columns: impl Iterator<Item = usize>) -> String {
    let (mut binds, mut names) = (String::new(), String::new());
    for (at, column) in columns.enumerate() {
        let comma = if at == 0 { "" } else { ", " };
        // Writing to a String does not fail.
        let _ = write!(binds, "{comma}${}::{}[]", at + 1, sql_type(table.columns[column].kind));
        let _ = write!(names, "{comma}c{}", at + 1);
    }
    format!("unnest({binds}) AS u({names})")
}

const fn sql_type(kind: ValueKind) -> &'static str {
    match kind {
        ValueKind::Bool => "bool",
        ValueKind::I16 => "int2",
        ValueKind::I32 => "int4",
        ValueKind::I64 => "int8",
        ValueKind::F32 => "float4",
        ValueKind::F64 => "float8",
        ValueKind::Text => "text",
        ValueKind::Bytes => "bytea",
        ValueKind::Uuid => "uuid",
        ValueKind::Date => "date",
        ValueKind::Timestamp => "timestamptz",
    }
}

/// The value of the `nth` array, cast to the base type where the column asks for it.
fn item(table: &TableMeta, column: usize, nth: usize) -> String {
    let cast = table.columns[column].cast.map(|cast| format!("::{cast}")).unwrap_or_default();
    format!("u.c{}{cast}", nth + 1)
}

fn column(table: &TableMeta, at: usize) -> String {
    quoted(table.columns[at].name)
}

/// The name of a table as SQL, with its schema where the struct names one.
pub(crate) fn quoted_name(table: &TableMeta) -> String {
    let schema = table.schema.map(|schema| quoted(schema) + ".").unwrap_or_default();
    schema + &quoted(table.name)
}

fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

fn joined(parts: impl Iterator<Item = String>, separator: &str) -> String {
    parts.collect::<Vec<_>>().join(separator)
}

/// The bits of a column set, in ascending order.
fn bits(mask: u128) -> impl Iterator<Item = usize> {
    (0..u128::BITS as usize).filter(move |&bit| mask >> bit & 1 == 1)
}
