//! One row of a statement by key: an operation, or several adds on one key that fail as one where they would one by one.

use scriba_core::Position;

use super::{Key, Row};
use crate::op::PgOp;
use crate::table::ValueKind;
use crate::value::Value;

/// How many addends a merged add has.
pub(super) const ADDENDS: usize = 3;

/// An operation by key, with the adds that were merged into it.
#[derive(Clone, Debug)]
pub(crate) struct KeyedRow<'a> {
    position: Position,
    op: &'a PgOp,
    /// Most rows hold one operation and pay for no more than a pointer here.
    merged: Option<Box<Merged>>,
}

#[derive(Clone, Debug)]
struct Merged {
    one_event: bool,
    /// By number among the columns that the operation adds to, the steps from the value before to the lowest of the values
    /// on the way, from there to the highest, and from there to the last. Added one after the other they overflow exactly
    /// where one of the values on the way would have.
    addends: Vec<[Value; ADDENDS]>,
}

impl<'a> From<Row<'a>> for KeyedRow<'a> {
    fn from((position, op): Row<'a>) -> Self {
        Self { position, op, merged: None }
    }
}

impl<'a> KeyedRow<'a> {
    /// The position of its first event.
    pub(crate) fn position(&self) -> Position {
        self.position
    }

    pub(crate) fn op(&self) -> &'a PgOp {
        self.op
    }

    pub(crate) fn key(&self) -> Option<Key<'a>> {
        Key::of(self.op)
    }

    /// The position of its event, where it is of one only.
    pub(super) fn single_position(&self) -> Option<Position> {
        self.merged.as_ref().is_none_or(|merged| merged.one_event).then_some(self.position)
    }

    /// Takes in an update of the same shape and key that comes next, and only adds. `false` where it cannot: an amount is
    /// NULL, or a step does not fit its kind.
    pub(crate) fn merge(&mut self, (position, op): Row<'_>) -> bool {
        let (PgOp::Update(first), PgOp::Update(next)) = (self.op, op) else { return false };
        let addends: Option<Vec<_>> = (first.add.iter().enumerate())
            .map(|(nth, (column, amount))| {
                let (_, more) = next.add.iter().find(|(other, _)| other == column)?;
                match &self.merged {
                    Some(merged) => with(merged.addends[nth].each_ref().map(number), more),
                    None => with([number(amount), Some(0), Some(0)], more),
                }
            })
            .collect();
        let one_event = self.single_position() == Some(position);
        let merged = addends.map(|addends| Merged { one_event, addends });
        let done = merged.is_some();
        match (&mut self.merged, merged) {
            (Some(old), Some(new)) => **old = new,
            (old @ None, Some(new)) => *old = Some(Box::new(new)),
            (_, None) => {}
        }
        done
    }

    /// The `nth` addend to a column; `None` where the operation does not add to it.
    pub(super) fn addend(&self, column: usize, nth: usize) -> Option<&Value> {
        let PgOp::Update(op) = self.op else { return None };
        let at = op.add.iter().position(|(other, _)| *other == column)?;
        Some(match &self.merged {
            Some(merged) => &merged.addends[at][nth],
            None if nth == 0 => &op.add[at].1,
            None => zero(op.table.columns[column].kind),
        })
    }
}

/// The addends after one more add. Wider than any kind, so that only what is sent can be too large.
fn with(addends: [Option<i128>; ADDENDS], more: &Value) -> Option<[Value; ADDENDS]> {
    let [low, up, back] = addends;
    let low = low?;
    let high = low + up?;
    let total = high + back? + number(more)?;
    let (low, high) = (low.min(total), high.max(total));
    let kind = more.kind()?;
    Some([value(kind, low)?, value(kind, high - low)?, value(kind, total - high)?])
}

fn number(value: &Value) -> Option<i128> {
    match value {
        Value::I16(number) => Some((*number).into()),
        Value::I32(number) => Some((*number).into()),
        Value::I64(number) => Some((*number).into()),
        _ => None,
    }
}

fn value(kind: ValueKind, number: i128) -> Option<Value> {
    match kind {
        ValueKind::I16 => number.try_into().ok().map(Value::I16),
        ValueKind::I32 => number.try_into().ok().map(Value::I32),
        ValueKind::I64 => number.try_into().ok().map(Value::I64),
        _ => None,
    }
}

fn zero(kind: ValueKind) -> &'static Value {
    static ZEROS: [Value; 3] = [Value::I16(0), Value::I32(0), Value::I64(0)];
    match kind {
        ValueKind::I16 => &ZEROS[0],
        ValueKind::I32 => &ZEROS[1],
        ValueKind::I64 => &ZEROS[2],
        _ => unreachable!("adds to columns of kind {kind:?} are not merged"),
    }
}
