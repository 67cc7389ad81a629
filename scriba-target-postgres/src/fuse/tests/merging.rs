//! Adds that become one row: they end as they would one by one, and without each condition they would not.

use proptest::prelude::*;

use super::*;

const ID_V: &[ColumnMeta] = &[column("id", ValueKind::I64), column("v", ValueKind::I64)];
static T: TableMeta = table("t", ID_V);
static T16: TableMeta = table("t", &[column("id", ValueKind::I64), column("v", ValueKind::I16)]);
static T32: TableMeta = table("t", &[column("id", ValueKind::I64), column("v", ValueKind::I32)]);

fn adds(amounts: &[i64]) -> Vec<PgOp> {
    amounts.iter().map(|&amount| add(&T, int(1), 1, int(amount))).collect()
}

/// A value of a kind of integers.
type Make = fn(i64) -> Value;

/// Every column counts as one whose values on the way nobody sees.
fn forget_onlookers(facts: &mut TableFacts) {
    forget_all(facts);
    facts.referenced = 0;
    facts.mergeable = !0;
}

#[tokio::test]
async fn a_sum_overflows_where_a_value_on_the_way_would_have() {
    // The value before, the amounts, and the events that fail, between two limits.
    let cases = |low: i64, high: i64| -> Vec<(i64, Vec<i64>, Vec<u64>)> {
        vec![
            (high - 1, vec![1, -1, 1, -1], vec![]),
            (high - 1, vec![2, -2], vec![1]),
            (high - 1, vec![-5, 6, 1, -9], vec![3]),
            (high - 1, vec![-5, 4, 3, -9], vec![3]),
            (low + 1, vec![-1, 1], vec![]),
            (low + 1, vec![-2, 2], vec![1]),
            (low + 1, vec![5, -6, -1, 9], vec![3]),
            (low + 1, vec![5, -6, 9, -9, 3], vec![]),
            (low + 1, vec![5, -8, 9], vec![2]),
            (0, vec![high, -high, low], vec![]),
            (1, vec![high, -high], vec![1]),
            (-1, vec![low, 5], vec![1]),
        ]
    };
    let kinds: [(_, _, _, _, Make); 3] = [
        (&T16, "int2", i16::MIN.into(), i16::MAX.into(), |v| Value::I16(v.try_into().unwrap())),
        (&T32, "int4", i32::MIN.into(), i32::MAX.into(), |v| Value::I32(v.try_into().unwrap())),
        (&T, "int8", i64::MIN, i64::MAX, Value::I64),
    ];
    for (table, sql_type, low, high, value) in kinds {
        let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        let column = format!("ALTER TABLE t ADD v {sql_type}");
        raw_sql(AssertSqlSafe(column)).execute(&mut place.conn).await.unwrap();
        for (before, amounts, failing) in cases(low, high) {
            let fill = format!("TRUNCATE t; INSERT INTO t VALUES (1, {before})");
            raw_sql(AssertSqlSafe(fill)).execute(&mut place.conn).await.unwrap();
            let ops: Vec<PgOp> = amounts.iter().map(|&amount| add(table, int(1), 1, value(amount))).collect();
            let one_by_one = place.agree(&ops).await;
            let failed: Vec<u64> = one_by_one.failed.iter().map(|(position, _)| position.get()).collect();
            assert_eq!(failed, failing, "{sql_type} {before} {amounts:?}");
            let ops = events(&ops);
            let facts = place.facts(&ops).await;
            let expected = match failing[..] {
                [] => Fused::Rows(one_by_one.rows),
                _ => Fused::Failed("22003".to_owned()),
            };
            assert_eq!(place.fused(&ops, &facts).await, expected, "{sql_type} {before} {amounts:?}");
        }
    }
}

#[tokio::test]
async fn the_sum_alone_would_hide_an_overflow() {
    let mut place =
        Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); INSERT INTO t VALUES (1, 9223372036854775807)")
            .await;
    let ops = adds(&[1, -1]);
    assert_eq!(place.statements(&ops).await, 1);
    assert_eq!(place.agree(&ops).await.failed, [(Position::new(1), "22003".to_owned())]);
    assert_eq!(place.agree(&adds(&[0])).await.failed, []);
}

#[tokio::test]
async fn a_value_on_the_way_is_held_against_what_looks_at_it() {
    for onlooker in [
        "ALTER TABLE t ADD CHECK (v <> 12)",
        "ALTER TABLE t ADD CHECK (t IS DISTINCT FROM (1::bigint, 12::bigint))",
        "ALTER TABLE t ADD g bigint GENERATED ALWAYS AS (9 / (v - 12)) STORED",
        "CREATE INDEX ON t ((9 / (v - 12)))",
        "CREATE INDEX ON t (id) WHERE 9 / (v - 12) > 0",
        "ALTER TABLE t ADD UNIQUE (v); INSERT INTO t VALUES (2, 12)",
        "CREATE TABLE p (id bigint PRIMARY KEY); INSERT INTO p VALUES (5); ALTER TABLE t ADD FOREIGN KEY (v) REFERENCES p",
    ] {
        let mut place =
            Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); INSERT INTO t VALUES (1, 5)").await;
        raw_sql(onlooker).execute(&mut place.conn).await.unwrap_or_else(|error| panic!("{onlooker}: {error}"));
        place.agree_only_with(&adds(&[7, -7]), forget_onlookers).await;
    }
}

#[tokio::test]
async fn a_sum_in_a_wider_type_than_the_column_s_is_not_held_against_its_limits() {
    let mut place =
        Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v int); INSERT INTO t VALUES (1, 2147483647)").await;
    place.agree_only_with(&adds(&[1, -1]), forget_onlookers).await;
}

#[tokio::test]
async fn null_is_added_by_itself_and_stays_where_it_is() {
    let mut place =
        Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); INSERT INTO t VALUES (1, 5), (2, NULL)").await;
    let null = || add(&T, int(1), 1, Value::Null);
    for (ops, statements) in [
        (vec![add(&T, int(1), 1, int(3)), null(), add(&T, int(1), 1, int(4)), add(&T, int(1), 1, int(4))], 3),
        (vec![null(), add(&T, int(1), 1, int(3))], 2),
        (vec![add(&T, int(2), 1, int(3)), add(&T, int(2), 1, int(3))], 1),
    ] {
        assert_eq!(place.statements(&ops).await, statements);
        assert_eq!(place.agree(&ops).await.failed, []);
    }
}

#[tokio::test]
async fn what_reads_between_two_adds_sees_the_first_only() {
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint); CREATE TABLE seen (n bigint); INSERT INTO t VALUES (1, 5)",
    )
    .await;
    let see = || PgOp::from(crate::op::sql("INSERT INTO seen SELECT v FROM t"));
    let [first, second, third] = [1, 2, 4].map(|amount| add(&T, int(1), 1, int(amount)));
    let ops = [first, see(), second, third, set(&T, int(9), 0, int(8)), see()];
    assert_eq!(place.agree(&ops).await.rows, "seen: (12) (6)\nt: (1,12)\n");
}

#[tokio::test]
async fn required_counts_rows_and_names_an_event_only_where_there_is_one() {
    let mut place =
        Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); INSERT INTO t VALUES (1, 5), (2, 5)").await;
    let needed = |id| required(add(&T, int(id), 1, int(1)));
    let there = [needed(1), needed(2), needed(1)];
    assert_eq!(place.statements(&there).await, 1);
    assert_eq!(place.agree(&there).await.rows, "t: (1,7) (2,6)\n");
    let missing = [needed(1), needed(3), needed(1), needed(3)];
    let failed = place.agree(&missing).await.failed;
    assert_eq!(failed, [2, 4].map(|position| (Position::new(position), "no_row".to_owned())));

    let ops = [needed(3), needed(3)];
    let facts = place.facts(&events(&ops)).await;
    for (positions, blamed) in [([7, 7], " for id = 3, position 7"), ([7, 8], "")] {
        let rows: Vec<Row<'_>> = positions.map(Position::new).into_iter().zip(&ops).collect();
        let [statement] = &plan(&rows, &facts)[..] else { panic!("one statement") };
        assert_eq!(
            statement.execute(&mut place.conn).await.unwrap_err().to_string(),
            format!(
                "no_row: 0 of 1 required rows found in table \"t\"{blamed}: write the row first, or leave out `required()` \
                 where it may be missing"
            )
        );
    }
}

static LIMITS: TableMeta =
    table("limits", &[column("id", ValueKind::I64), column("v", ValueKind::I16), column("w", ValueKind::I32)]);
const NUMBERS: &[ColumnMeta] =
    &[column("id", ValueKind::I64), column("v", ValueKind::I64), column("w", ValueKind::I64)];
static WIDE: TableMeta = table("wide", NUMBERS);
static NARROW: TableMeta = table("narrow", NUMBERS);
static CHECKED: TableMeta = table("checked", NUMBERS);
static INDEXED: TableMeta = table("indexed", NUMBERS);
static LINKED: TableMeta = table("linked", NUMBERS);
static TABLES: [&TableMeta; 6] = [&LIMITS, &WIDE, &NARROW, &CHECKED, &INDEXED, &LINKED];

const SETUP: &str = r"
CREATE TABLE limits (id bigint PRIMARY KEY, v smallint, w int NOT NULL);
CREATE TABLE wide (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE TABLE narrow (id bigint PRIMARY KEY, v int, w smallint);
CREATE TABLE checked (id bigint PRIMARY KEY, v bigint CHECK (v <> 3), w bigint, g bigint GENERATED ALWAYS AS (9 / (w - 3)) STORED);
CREATE TABLE indexed (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE INDEX ON indexed ((9 / (v - 3))); CREATE INDEX ON indexed (id) WHERE 9 / (w - 3) > 0;
CREATE TABLE linked (id bigint PRIMARY KEY, v bigint REFERENCES wide, w bigint);
INSERT INTO limits VALUES (0, 32765, 2147483645), (1, -32766, -2147483646);
INSERT INTO wide VALUES (0, 9223372036854775805, 0), (1, -9223372036854775806, NULL);
INSERT INTO narrow VALUES (0, 2147483645, 32765), (1, -2147483646, -32766);
INSERT INTO checked VALUES (0, 0, 0), (1, 5, 5);
INSERT INTO indexed VALUES (0, 0, 0), (1, 5, 5);
INSERT INTO linked VALUES (0, 0, 0), (1, 1, 0)";

#[derive(Clone, Copy, Debug)]
enum Action {
    /// To these columns, as bits.
    Add(u8),
    Set,
    Insert,
    Delete,
    Sql,
}

/// Table, what, key, amounts, required, and whether it belongs to the event before.
type Step = (usize, Action, i64, [Option<i64>; 2], bool, bool);

fn step() -> impl Strategy<Value = Step> {
    let action = prop_oneof![
        20 => prop_oneof![3 => Just(1_u8), 1 => Just(2), 1 => Just(3)].prop_map(Action::Add),
        1 => Just(Action::Set),
        2 => Just(Action::Insert),
        1 => Just(Action::Delete),
        1 => Just(Action::Sql),
    ];
    let amount = || prop_oneof![1 => Just(None), 20 => (-4_i64..5).prop_map(Some), 2 => (-9_i64..10).prop_map(|n| Some(n << 60))];
    let require = prop::bool::weighted(0.1);
    (0..TABLES.len(), action, 0_i64..3, [amount(), amount()], require, prop::bool::weighted(0.2))
}

fn operation((table, action, key, amounts, require, _): &Step) -> PgOp {
    let table = TABLES[*table];
    let value = |at: usize| match (amounts[at - 1], table.columns[at].kind) {
        (None, _) => Value::Null,
        (Some(amount), ValueKind::I16) => Value::I16((amount % 32_749).try_into().unwrap()),
        (Some(amount), ValueKind::I32) => Value::I32((amount % 2_147_483_629).try_into().unwrap()),
        (Some(amount), _) => int(amount),
    };
    let op = match action {
        Action::Add(columns) => {
            let added = [1, 2].into_iter().filter(|at| columns >> (at - 1) & 1 == 1);
            update(table, int(*key), [], added.map(|at| (at, value(at))).collect::<Vec<_>>())
        }
        Action::Set => set(table, int(*key), 1, value(1)),
        Action::Insert => return insert(table, [int(*key), value(1), value(2)]),
        Action::Delete => delete(table, int(*key)),
        Action::Sql => crate::op::sql(format!("UPDATE {} SET w = v WHERE v < 9", table.name)).into(),
    };
    if *require { required(op) } else { op }
}

#[test]
fn any_sequence_of_adds_near_the_limits_leaves_the_same_rows_or_fails_where_one_by_one_fails_too() {
    // Few tables at a time, so that operations meet.
    let tables = prop::collection::vec(0..TABLES.len(), 1..3);
    let steps = (tables, prop::collection::vec(step(), 1..14)).prop_map(|(tables, mut steps)| {
        for step in &mut steps {
            step.0 = tables[step.0 % tables.len()];
        }
        steps.iter().map(|step| (step.5, operation(step))).collect()
    });
    property::compare(&[SETUP], |_| (Vec::new(), ""), 500, steps);
}
