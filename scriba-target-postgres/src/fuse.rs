//! From a batch's operations to as few statements as leave the same rows. Pure.
//!
//! "One by one" is the meaning: each operation a statement of its own, in the order of positions. A plan differs from it
//! only where facts of the tables prove that nobody can tell, or by failing as a whole.
//!
//! Each operation is put into a wave. Waves are sent one after another; within a wave, the operations of one table and
//! [`Shape`] are one statement. An operation's wave is the first that is later than all it must not pass:
//!
//! | operation | must not pass | stands beside |
//! |---|---|---|
//! | by key | earlier ones on its key; an insert of the row it comes to refer to; where it inserts, what came to refer to its row | other keys |
//! | by key, with foreign keys of which its values do not say all | besides, every earlier one on another table that foreign keys connect with its own | other keys |
//! | by key, table in order | besides, every earlier one on its table | other keys of the same shape right before it |
//! | alone: frees or changes a value of a second unique index, or deletes rows that others hang from | every earlier one on its table and connected ones | nothing of those |
//! | barrier: `sql`, by filter, on a table that is not fused, with a key that is NULL or changes | every earlier one | nothing |
//!
//! and nothing passes an operation that stands alone in the tables named, or a barrier at all. Behind `sql` that may change
//! the schema, facts prove nothing any more: every operation is a barrier.
//!
//! Values say all of a foreign key where one column refers to the key of the other table and both travel in one way: then
//! inserts, upserts, and updates that set the column name the row they refer to. They do not where a row is deleted that
//! others may refer to, and where the foreign key has several columns, one outside the struct, or refers to other columns
//! than the key.
//!
//! Where a table's rows are not in order, the first wave behind what nothing passes is kept for inserts of keys without
//! an earlier operation, so that what follows an insert shares a statement with its like on other keys. And an add that
//! comes right after an add of the same shape on its key joins the row of that one, where nothing in the table looks at
//! the values on the way; how it still overflows where they would, [`KeyedRow`] says.

use rustc_hash::FxHashMap;
use scriba_core::Position;

use crate::facts::{FactsCache, TableFacts};
use crate::op::{Conflict, PgOp};
use crate::statement::{Key, KeyedRow, Row, Shape, Statement, keyed_text, table_of};
use crate::table::TableMeta;
use crate::value::Value;

/// Rows in one statement, at most.
const MAX_ROWS: usize = 5_000;
/// Bytes of values in one statement, at most, unless a single row is larger.
const MAX_BYTES: usize = 8 << 20;

/// The statements for a batch's operations, which are in the order of positions.
///
/// A table that `facts` do not know is written one by one, and so is every table behind an operation that may change the
/// schema, until facts are loaded again.
pub(crate) fn plan<'a>(ops: &[(Position, &'a PgOp)], facts: &FactsCache) -> Vec<Statement<'a>> {
    let mut planner = Planner::new(facts, ops.len());
    for &row in ops {
        planner.place(row);
    }
    planner.finish()
}

/// The same operations, each a statement of its own, in their order.
pub(crate) fn plan_one_by_one<'a>(ops: &[(Position, &'a PgOp)]) -> Vec<Statement<'a>> {
    let nothing = FactsCache::default();
    plan(ops, &nothing)
}

struct Planner<'a, 'f> {
    facts: &'f FactsCache,
    /// Tables and shapes met, by number.
    shapes: Vec<(&'static TableMeta, Shape)>,
    shape_numbers: FxHashMap<(usize, Shape), u32>,
    /// Where the latest operation on this key of the table of this identity is.
    keys: FxHashMap<(u32, Key<'a>), Last>,
    groups: FxHashMap<u32, Group>,
    /// By the identity of the table.
    in_order: FxHashMap<u32, Latest>,
    slots: Vec<Slot<'a>>,
    slot_numbers: FxHashMap<(u32, u32), usize>,
    /// The first wave behind the last barrier.
    floor: u32,
    /// The latest wave with anything in it; 0 is none.
    latest: u32,
}

/// The latest operation on a key; before the first, wave 0, which holds nothing.
#[derive(Default)]
struct Last {
    wave: u32,
    shape: u32,
    /// By number in its slot.
    row: u32,
    /// The latest wave that may insert the key.
    inserted: u32,
    /// The latest wave in which a row of another table came to refer to the key.
    referenced: u32,
}

/// Tables that foreign keys connect.
#[derive(Default)]
struct Group {
    turn: Turn,
    floor: u32,
    latest: u32,
}

/// Whose operations are in the waves of a group from its floor on.
#[derive(Clone, Copy, Default)]
enum Turn {
    /// Nobody's, or that of one that stands alone.
    #[default]
    Over,
    /// Of one table, by its identity; shared where values say all of their foreign keys.
    Table { table: u32, shared: bool },
    /// Of several tables, where values say all of their foreign keys.
    Shared,
}

impl Turn {
    /// With one more operation on a table; `None` where it must not stand beside the others.
    fn with(self, table: u32, shares: bool) -> Option<Self> {
        match self {
            Self::Table { table: other, shared } if other == table => {
                Some(Self::Table { table, shared: shared && shares })
            }
            Self::Table { shared: true, .. } | Self::Shared if shares => Some(Self::Shared),
            Self::Over | Self::Table { .. } | Self::Shared => None,
        }
    }
}

/// The latest operation on a table in order.
#[derive(Default)]
struct Latest {
    shape: u32,
    wave: u32,
}

/// What becomes one statement, or several where it is too large.
struct Slot<'a> {
    wave: u32,
    /// Its table and shape; `None` for an operation by filter and `sql`.
    shape: Option<u32>,
    /// The rows keep their order.
    in_order: bool,
    rows: Vec<KeyedRow<'a>>,
}

impl<'a, 'f> Planner<'a, 'f> {
    fn new(facts: &'f FactsCache, ops: usize) -> Self {
        Self {
            facts,
            shapes: Vec::new(),
            shape_numbers: FxHashMap::default(),
            keys: FxHashMap::with_capacity_and_hasher(ops, rustc_hash::FxBuildHasher),
            groups: FxHashMap::default(),
            in_order: FxHashMap::default(),
            slots: Vec::new(),
            slot_numbers: FxHashMap::default(),
            floor: 1,
            latest: 0,
        }
    }

    fn place(&mut self, row: Row<'a>) {
        let op = row.1;
        heed(op, self.facts);
        let (Some(table), Some(key), Some(shape)) = (table_of(op), Key::of(op), shape_of(op)) else {
            return self.barrier(None, row);
        };
        match self.facts.get(table) {
            Some(facts) if facts.one_by_one.is_none() && exact(key, facts) && !moves_key(table, shape, facts) => {
                self.by_key(row, merging(shape, facts), key, table, facts);
            }
            _ => {
                let number = self.number(table, shape);
                self.barrier(Some(number), row);
            }
        }
    }

    fn number(&mut self, table: &'static TableMeta, shape: Shape) -> u32 {
        if let Some((last, last_shape)) = self.shapes.last()
            && std::ptr::eq(*last, table)
            && *last_shape == shape
        {
            return index(self.shapes.len() - 1);
        }
        *self.shape_numbers.entry((std::ptr::from_ref(table).addr(), shape)).or_insert_with(|| {
            self.shapes.push((table, shape));
            index(self.shapes.len() - 1)
        })
    }

    fn by_key(&mut self, row: Row<'a>, of: Shape, key: Key<'a>, table: &'static TableMeta, facts: &TableFacts) {
        let shape = self.number(table, of);
        let (alone, shares) = (stands_alone(table, of, facts), shares_turn(of, facts));
        let group = self.groups.entry(facts.group).or_default();
        if let Some(turn) = group.turn.with(facts.identity, shares).filter(|_| !alone) {
            group.turn = turn;
        } else {
            let turn = if alone { Turn::Over } else { Turn::Table { table: facts.identity, shared: shares } };
            *group = Group { turn, floor: group.latest + 1, ..*group };
        }
        let floor = self.floor.max(group.floor);
        let parents = references(row.1, facts).filter_map(|parent| self.keys.get(&parent));
        let mut earliest = parents.map(|parent| parent.inserted + 1).max().unwrap_or(0);
        let last = self.keys.entry((facts.identity, key)).or_default();
        if matches!(of, Shape::Update { merging: true, .. }) && last.shape == shape && last.wave >= floor {
            let slot = self.slot_numbers[&(shape, last.wave)];
            if self.slots[slot].rows[last.row as usize].merge(row) {
                return;
            }
        }
        let inserts = matches!(of, Shape::Insert(_));
        if inserts {
            earliest = earliest.max(last.referenced + 1);
        }
        let wave = if facts.in_order {
            let before = self.in_order.entry(facts.identity).or_default();
            let beside = before.shape == shape && last.wave < before.wave;
            let next = before.wave + u32::from(before.wave >= floor && !beside);
            *before = Latest { shape, wave: next.max(floor).max(earliest) };
            before.wave
        } else {
            (floor + u32::from(!inserts)).max(last.wave + 1).max(earliest)
        };
        group.latest = group.latest.max(wave);
        self.latest = self.latest.max(wave);
        let slot = *self.slot_numbers.entry((shape, wave)).or_insert_with(|| {
            self.slots.push(Slot { wave, shape: Some(shape), in_order: facts.in_order, rows: Vec::new() });
            self.slots.len() - 1
        });
        let rows = &mut self.slots[slot].rows;
        let inserted = if inserts { wave } else { last.inserted };
        *last = Last { wave, shape, row: index(rows.len()), inserted, ..*last };
        rows.push(row.into());
        for parent in references(row.1, facts) {
            let parent = self.keys.entry(parent).or_default();
            parent.referenced = parent.referenced.max(wave);
        }
    }

    fn barrier(&mut self, shape: Option<u32>, row: Row<'a>) {
        self.latest += 1;
        self.floor = self.latest + 1;
        self.slots.push(Slot { wave: self.latest, shape, in_order: true, rows: vec![row.into()] });
    }

    /// Wave by wave; within a wave by table, so that writers of the same tables meet them in the same order.
    fn finish(self) -> Vec<Statement<'a>> {
        let Self { shapes, mut slots, .. } = self;
        let table =
            |slot: &Slot<'_>| slot.shape.map(|shape| (shapes[shape as usize].0.schema, shapes[shape as usize].0.name));
        slots.sort_by(|a, b| a.wave.cmp(&b.wave).then_with(|| table(a).cmp(&table(b))));
        let texts: Vec<std::sync::Arc<str>> =
            shapes.iter().map(|&(table, shape)| keyed_text(table, shape).into()).collect();
        let mut statements = Vec::with_capacity(slots.len());
        for Slot { shape, in_order, mut rows, .. } in slots {
            let Some(number) = shape.map(|shape| shape as usize) else {
                statements.extend(rows.into_iter().map(|row| Statement::alone(row.position(), row.op())));
                continue;
            };
            if !in_order {
                rows.sort_unstable_by(|a, b| a.key().cmp(&b.key()));
            }
            let (table, shape) = shapes[number];
            for rows in chunks(rows) {
                statements.push(Statement::keyed(texts[number].clone(), table, shape, rows));
            }
        }
        statements
    }
}

/// Cuts rows so that no statement grows beyond what a server takes well.
fn chunks(mut rows: Vec<KeyedRow<'_>>) -> Vec<Vec<KeyedRow<'_>>> {
    let mut cuts = Vec::new();
    let (mut count, mut bytes) = (0, 0);
    for (at, row) in rows.iter().enumerate() {
        let size = row.op().size();
        if count > 0 && (count == MAX_ROWS || bytes + size > MAX_BYTES) {
            cuts.push(at);
            (count, bytes) = (0, 0);
        }
        count += 1;
        bytes += size;
    }
    let mut chunks: Vec<_> = cuts.into_iter().rev().map(|at| rows.split_off(at)).collect();
    chunks.push(rows);
    chunks.reverse();
    chunks
}

/// `None` for what has no key: operations by filter, and `sql`.
fn shape_of(op: &PgOp) -> Option<Shape> {
    let mask = |values: &[(usize, Value)]| values.iter().fold(0, |mask, (column, _)| mask | 1_u128 << column);
    Key::of(op)?;
    Some(match op {
        PgOp::Insert(op) => Shape::Insert(op.conflict),
        PgOp::Update(op) => {
            Shape::Update { set: mask(&op.set), add: mask(&op.add), required: op.required, merging: false }
        }
        PgOp::Delete(op) => Shape::Delete { required: op.required },
        PgOp::Sql(_) | PgOp::Custom(_) => return None,
    })
}

/// Has the facts forgotten where an operation may change the schema. Planning does so by itself.
pub(crate) fn heed(op: &PgOp, facts: &FactsCache) {
    if may_change_schema(op) {
        facts.distrust();
    }
}

/// Whether it is a statement that does more than read and write rows, as far as its first word tells.
pub(crate) fn may_change_schema(op: &PgOp) -> bool {
    const ROWS_ONLY: [&str; 10] =
        ["SELECT", "INSERT", "UPDATE", "DELETE", "WITH", "MERGE", "VALUES", "TABLE", "TRUNCATE", "NOTIFY"];
    let PgOp::Sql(sql) = op else { return false };
    let text = sql.text.trim_start_matches(|c: char| c.is_whitespace() || c == '(');
    let word = text.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
    !ROWS_ONLY.iter().any(|known| known.eq_ignore_ascii_case(word))
}

/// Updates that do nothing but add where values on the way go unseen.
fn merging(shape: Shape, facts: &TableFacts) -> Shape {
    match shape {
        Shape::Update { set: 0, add, required, .. } if !facts.in_order && add & !facts.mergeable == 0 => {
            Shape::Update { set: 0, add, required, merging: true }
        }
        other => other,
    }
}

/// Whether two such keys are equal here exactly when the index finds them equal. NULL equals nothing there, times are
/// kept to the microsecond, and a column with a length limit cuts off the spaces behind it.
fn exact(key: Key<'_>, facts: &TableFacts) -> bool {
    key.values().all(|value| match value {
        Value::Null => false,
        // A leap second has 1,000,000,000 nanoseconds and more.
        Value::Timestamp(time) => {
            let nanos = time.timestamp_subsec_nanos();
            nanos % 1_000 == 0 && nanos < 1_000_000_000
        }
        Value::Text(text) => !(facts.limited_key && text.ends_with(' ')),
        _ => true,
    })
}

/// Columns of a row that was there before and may be changed. An upsert that sets the key sets it to what it is.
fn changes(table: &'static TableMeta, shape: Shape) -> u128 {
    match shape {
        Shape::Update { set, add, .. } => set | add,
        Shape::Insert(Conflict::Update { set, add }) => set & !key_columns(table) | add,
        Shape::Insert(Conflict::Fail | Conflict::Nothing) | Shape::Delete { .. } => 0,
    }
}

fn key_columns(table: &'static TableMeta) -> u128 {
    table.key.iter().fold(0, |mask, &column| mask | 1 << column)
}

fn moves_key(table: &'static TableMeta, shape: Shape, facts: &TableFacts) -> bool {
    changes(table, shape) & (key_columns(table) | facts.referenced) != 0
}

fn stands_alone(table: &'static TableMeta, shape: Shape, facts: &TableFacts) -> bool {
    match shape {
        Shape::Delete { .. } => facts.second_unique || facts.cascades,
        _ => changes(table, shape) & facts.unique != 0,
    }
}

/// Whether an operation's values say all that foreign keys make of it.
fn shares_turn(shape: Shape, facts: &TableFacts) -> bool {
    let links = &facts.links;
    let followed = links.followed.iter().fold(0, |mask, (column, _)| mask | 1 << column);
    let held_back = match shape {
        Shape::Insert(Conflict::Update { add, .. }) => links.inserts || add & followed != 0,
        Shape::Insert(Conflict::Fail | Conflict::Nothing) => links.inserts,
        Shape::Update { set, add, .. } => (set | add) & links.unfollowed | add & followed != 0,
        Shape::Delete { .. } => links.referenced,
    };
    !links.odd_key && !held_back
}

/// The values by which an operation comes to refer to rows, with the identities of the keys they are.
fn references<'a>(op: &'a PgOp, facts: &TableFacts) -> impl Iterator<Item = (u32, Key<'a>)> {
    let written = move |column: usize| match op {
        PgOp::Insert(op) => op.values.get(column),
        PgOp::Update(op) => op.set.iter().find(|(at, _)| *at == column).map(|(_, value)| value),
        _ => None,
    };
    let followed = facts.links.followed.iter();
    followed.filter_map(move |&(column, to)| {
        written(column).filter(|value| !matches!(value, Value::Null)).map(|value| (to, Key::of_column(value)))
    })
}

fn index(at: usize) -> u32 {
    u32::try_from(at).unwrap_or_else(|_| unreachable!("a batch has fewer than 2^32 operations"))
}

#[cfg(test)]
mod tests;
