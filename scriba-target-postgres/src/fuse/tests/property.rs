//! Any sequence of operations on tables that break naive fusing: fused and one by one leave the same rows.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

const NUMBERS: &[ColumnMeta] =
    &[column("id", ValueKind::I64), column("v", ValueKind::I64), column("w", ValueKind::I64)];
const BY_TEXT: &[ColumnMeta] =
    &[column("id", ValueKind::Text), column("v", ValueKind::I64), column("w", ValueKind::I64)];
const BY_NUMERIC: &[ColumnMeta] = &[cast("id", "numeric"), column("v", ValueKind::I64), column("w", ValueKind::I64)];

static PLAIN: TableMeta = table("plain", NUMBERS);
static CHECKED: TableMeta = table("checked", NUMBERS);
static PARENT: TableMeta = table("parent", NUMBERS);
static CHILD: TableMeta = table("child", NUMBERS);
static GRANDCHILD: TableMeta = table("a_grandchild", NUMBERS);
static UNIQUE: TableMeta = table("one_unique", NUMBERS);
static PARTIAL: TableMeta = table("partial", NUMBERS);
static COUNTED: TableMeta = table("counted", NUMBERS);
static WATCHED: TableMeta = table("watched", NUMBERS);
static SELF: TableMeta = table("self", NUMBERS);
static DEFERRABLE: TableMeta = table("deferrable_unique", NUMBERS);
static EXCLUDING: TableMeta = table("excluding", NUMBERS);
static CODES: TableMeta = table("codes", BY_TEXT);
static FOLDED: TableMeta = table("folded", BY_TEXT);
static DECIMALS: TableMeta = table("decimals", BY_NUMERIC);
static PARTED: TableMeta = table("parted", NUMBERS);
static TABLES: [&TableMeta; 16] = [
    &PLAIN,
    &CHECKED,
    &PARENT,
    &CHILD,
    &GRANDCHILD,
    &UNIQUE,
    &PARTIAL,
    &COUNTED,
    &WATCHED,
    &SELF,
    &DEFERRABLE,
    &EXCLUDING,
    &CODES,
    &FOLDED,
    &DECIMALS,
    &PARTED,
];

const SETUP: &str = r"
CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
CREATE TABLE plain (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE TABLE checked (id int PRIMARY KEY, v smallint CHECK (v < 4), w bigint NOT NULL, twice bigint GENERATED ALWAYS AS (w * 2) STORED);
CREATE TABLE parent (id bigint PRIMARY KEY, v bigint, w bigint UNIQUE);
CREATE TABLE child (id bigint PRIMARY KEY, v bigint REFERENCES parent ON DELETE CASCADE, w bigint REFERENCES parent (w) ON UPDATE CASCADE ON DELETE SET NULL);
CREATE TABLE a_grandchild (id bigint PRIMARY KEY, v bigint REFERENCES child ON DELETE CASCADE, w bigint REFERENCES parent);
CREATE TABLE one_unique (id bigint PRIMARY KEY, v bigint UNIQUE, w bigint);
CREATE TABLE partial (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE UNIQUE INDEX ON partial (v) WHERE w > 1;
CREATE TABLE counted (id bigint PRIMARY KEY, v bigint, w bigint, n bigserial);
CREATE TABLE watched (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE TABLE seen (n bigserial, what text, rows bigint);
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO seen (what, rows) SELECT TG_OP, count(*) FROM watched; RETURN NULL; END';
CREATE TRIGGER see AFTER INSERT OR UPDATE OR DELETE ON watched FOR EACH STATEMENT EXECUTE FUNCTION see();
CREATE TABLE self (id bigint PRIMARY KEY, v bigint REFERENCES self, w bigint);
CREATE TABLE deferrable_unique (id bigint PRIMARY KEY, v bigint UNIQUE DEFERRABLE, w bigint);
CREATE TABLE excluding (id bigint PRIMARY KEY, v bigint, w bigint, EXCLUDE USING btree ((v + w) WITH =));
CREATE TABLE codes (id varchar(1) PRIMARY KEY, v bigint, w bigint);
CREATE TABLE folded (id text COLLATE ci PRIMARY KEY, v bigint, w bigint);
CREATE TABLE decimals (id numeric PRIMARY KEY, v bigint, w bigint);
CREATE TABLE parted (id bigint PRIMARY KEY, v bigint, w bigint) PARTITION BY RANGE (id);
CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (2);
CREATE TABLE parted_high PARTITION OF parted FOR VALUES FROM (2) TO (100);
";

/// Sets rows 0 and 1 of each table, so that operations find something.
const ROWS: &str = "INSERT INTO plain VALUES (0, 0, 0), (1, 1, 1); INSERT INTO checked VALUES (0, 0, 0), (1, 1, 1);
INSERT INTO parent VALUES (0, 0, 0), (1, 1, 1), (2, 2, 2); INSERT INTO child VALUES (0, 0, 0), (1, 1, 1);
INSERT INTO a_grandchild VALUES (0, 0, 0); INSERT INTO one_unique VALUES (0, 1, 0), (1, 0, 1);
INSERT INTO partial VALUES (0, 0, 0), (1, 1, 2); INSERT INTO self VALUES (0, NULL, 0), (1, 0, 1);
INSERT INTO deferrable_unique VALUES (0, 0, 0), (1, 1, 1); INSERT INTO excluding VALUES (0, 0, 0), (1, 1, 1);
INSERT INTO codes VALUES ('a', 0, 0); INSERT INTO folded VALUES ('a', 0, 0); INSERT INTO decimals VALUES (1, 0, 0);
INSERT INTO parted VALUES (0, 0, 0), (3, 1, 1)";

#[derive(Clone, Debug)]
enum Action {
    Insert(Conflict),
    Update { set: u8, add: u8 },
    Delete,
    DeleteWhere,
    Sql,
}

/// An operation as numbers: table, what, key, values, required, and whether it belongs to the event before.
type Step = (usize, Action, usize, [Option<i64>; 2], bool, bool);

fn step() -> impl Strategy<Value = Step> {
    let columns = 0_u8..4;
    let conflict = prop_oneof![
        3 => Just(Conflict::Fail),
        1 => Just(Conflict::Nothing),
        3 => (columns.clone(), columns.clone()).prop_map(|(set, add)| Conflict::Update {
            set: u128::from(set) << 1,
            add: u128::from(add & !set) << 1,
        }),
    ];
    let action = prop_oneof![
        4 => conflict.prop_map(Action::Insert),
        5 => (columns.clone(), columns).prop_map(|(set, add)| if set | add == 0 {
            Action::Update { set: 1, add: 0 }
        } else {
            Action::Update { set, add: add & !set }
        }),
        3 => Just(Action::Delete),
        1 => Just(Action::DeleteWhere),
        1 => Just(Action::Sql),
    ];
    let value = || prop_oneof![1 => Just(None), 8 => (0_i64..4).prop_map(Some)];
    (0..TABLES.len(), action, 0_usize..4, [value(), value()], prop::bool::weighted(0.1), prop::bool::weighted(0.2))
}

fn operation((table, action, key, values, require, _): &Step) -> PgOp {
    let table = TABLES[*table];
    let key = if table.columns[0].cast.is_some() {
        text(["1", "1.0", "2", "1.00"][*key])
    } else if table.columns[0].kind == ValueKind::Text {
        text(["a", "A", "a ", "b"][*key])
    } else {
        int(i64::try_from(*key).unwrap())
    };
    let [v, w] = values.map(|value| value.map_or(Value::Null, int));
    let picked = |mask: u8| {
        [(1, v.clone()), (2, w.clone())]
            .into_iter()
            .filter(move |(at, _)| mask >> (at - 1) & 1 == 1)
            .collect::<Vec<_>>()
    };
    let op = match action {
        Action::Insert(conflict) => return write(table, [key, v, w], *conflict),
        Action::Update { set, add } => update(table, key, picked(*set), picked(*add)),
        Action::Delete => delete(table, key),
        Action::DeleteWhere => delete_where(table, [(1, v)]),
        Action::Sql => {
            crate::op::sql(format!("UPDATE {} SET w = w + 1 WHERE v = $1", table.name)).bind(values[0]).into()
        }
    };
    if *require { required(op) } else { op }
}

#[test]
fn any_sequence_leaves_the_same_rows_or_fails_where_one_by_one_fails_too() {
    // Few tables at a time, so that operations meet.
    let tables = prop::collection::vec(0..TABLES.len(), 1..4);
    let steps = (tables, prop::collection::vec(step(), 1..14)).prop_map(|(tables, mut steps)| {
        for step in &mut steps {
            step.0 = tables[step.0 % tables.len()];
        }
        steps.iter().map(|step| (step.5, operation(step))).collect()
    });
    compare(&[SETUP, ROWS], "SELECT setval('counted_n_seq', 1, false); SELECT setval('seen_n_seq', 1, false)", steps);
}

/// Operations, each with whether it belongs to the event before, on the tables of `setup`.
pub(super) fn compare(
    setup: &[&'static str],
    reset: &'static str,
    operations: impl Strategy<Value = Vec<(bool, PgOp)>>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut place = runtime.block_on(Place::new(""));
    for &sql in setup {
        runtime.block_on(async { raw_sql(sql).execute(&mut place.conn).await.unwrap() });
    }
    place.reset = reset;
    let place = std::cell::RefCell::new(place);
    let tally = std::cell::Cell::new((0, 0, 0));
    TestRunner::new(Config { failure_persistence: None, ..Config::default() })
        .run(&operations, |operations| {
            let mut position = 0;
            let rows: Vec<Row<'_>> = operations
                .iter()
                .map(|(of_same_event, op)| {
                    position += u64::from(!of_same_event || position == 0);
                    (Position::new(position), op)
                })
                .collect();
            let place = &mut *place.borrow_mut();
            runtime.block_on(async {
                let facts = place.facts(&rows).await;
                let fused = place.fused(&rows, &facts).await;
                let one_by_one = place.one_by_one(&rows).await;
                let (runs, well, saved) = tally.get();
                let fewer = rows.len() - plan(&rows, &facts).len();
                tally.set((runs + 1, well + u32::from(matches!(fused, Fused::Rows(_))), saved + fewer));
                prop_assert!(one_by_one.agrees_with(&fused), "{:#?}\n{:#?}\n{:#?}", rows, fused, one_by_one);
                Ok(())
            })
        })
        .unwrap();
    let (runs, well, saved) = tally.get();
    assert!(
        well * 10 > runs && saved > 0,
        "too little was compared: {well} of {runs} without failure, {saved} statements saved"
    );
}
