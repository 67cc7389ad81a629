//! The key of an operation, compared without a copy.

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

use crate::op::{PgOp, Rows};
use crate::value::Value;

/// One value for each key column, wherever the operation keeps them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key<'a> {
    values: &'a [Value],
    /// Where in `values`; `None` for all in order.
    picks: Option<&'static [usize]>,
}

impl<'a> Key<'a> {
    /// `None` for operations that have no key.
    pub(crate) fn of(op: &'a PgOp) -> Option<Self> {
        match op {
            PgOp::Insert(op) => Some(Self { values: &op.values, picks: Some(op.table.key) }),
            PgOp::Update(op) => Self::of_rows(&op.rows),
            PgOp::Delete(op) => Self::of_rows(&op.rows),
            PgOp::Sql(_) | PgOp::Custom(_) => None,
        }
    }

    /// The key of one column that has this value.
    pub(crate) fn of_column(value: &'a Value) -> Self {
        Self { values: std::slice::from_ref(value), picks: None }
    }

    fn of_rows(rows: &'a Rows) -> Option<Self> {
        match rows {
            Rows::Key(values) => Some(Self { values, picks: None }),
            Rows::Filter(_) => None,
        }
    }

    /// The value of a key column, by its number among them.
    pub(super) fn value(self, at: usize) -> &'a Value {
        &self.values[self.picks.map_or(at, |picks| picks[at])]
    }

    /// All values, in the order of the key columns.
    pub(crate) fn values(self) -> impl Iterator<Item = &'a Value> {
        (0..self.picks.map_or(self.values.len(), <[usize]>::len)).map(move |at| self.value(at))
    }
}

impl PartialEq for Key<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.values().eq(other.values())
    }
}

impl Eq for Key<'_> {}

impl Hash for Key<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.values().for_each(|value| value.hash(state));
    }
}

impl PartialOrd for Key<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.values().cmp(other.values())
    }
}
