//! Which operations share a statement, without a database.

use super::*;

const ID_V: &[ColumnMeta] = &[column("id", ValueKind::I64), column("v", ValueKind::I64), column("w", ValueKind::I64)];
static A: TableMeta = table("a", ID_V);
static B: TableMeta = table("b", ID_V);
static B_ELSEWHERE: TableMeta = TableMeta { schema: Some("elsewhere"), name: "b", columns: ID_V, key: &[0] };
static C: TableMeta = table("c", ID_V);
static BYTES: TableMeta = table("d", &[column("id", ValueKind::I64), column("body", ValueKind::Bytes)]);

fn free(identity: u32) -> TableFacts {
    TableFacts {
        identity,
        group: identity,
        one_by_one: None,
        in_order: false,
        unique: 0,
        second_unique: false,
        referenced: 0,
        cascades: false,
        mergeable: 0,
        limited_key: false,
        links: Links { odd_key: true, ..Links::default() },
        deferrable: false,
    }
}

/// `b` and `elsewhere.b` are free, `a` too, `c` is in order.
fn facts() -> FactsCache {
    let mut facts = FactsCache::default();
    for (identity, table) in [&A, &B, &B_ELSEWHERE, &BYTES].into_iter().enumerate() {
        facts.insert(table, free(u32::try_from(identity).unwrap()));
    }
    facts.insert(&C, TableFacts { in_order: true, ..free(9) });
    facts
}

/// The statements as words: what, where, keys.
fn planned(ops: &[PgOp], facts: &FactsCache) -> Vec<String> {
    plan(&events(ops), facts).iter().map(ToString::to_string).collect()
}

fn row(table: &'static TableMeta, id: i64) -> PgOp {
    insert(table, [int(id), int(0), int(0)])
}

#[test]
fn operations_of_one_table_and_shape_share_a_statement_in_the_order_of_keys() {
    let ops = [row(&B, 3), row(&A, 2), set(&B, int(9), 1, int(0)), row(&B, 1), row(&A, 1), set(&B, int(8), 2, int(0))];
    assert_eq!(planned(&ops, &facts()), ["INSERT a 1 2", "INSERT b 1 3", "UPDATE b 9", "UPDATE b 8"]);
}

#[test]
fn the_order_in_which_columns_are_set_makes_no_shape_of_its_own() {
    let ops =
        [update(&A, int(1), [(1, int(10)), (2, int(20))], []), update(&A, int(2), [(2, int(21)), (1, int(11))], [])];
    assert_eq!(planned(&ops, &facts()), ["UPDATE a 1 2"]);
}

#[test]
fn the_kth_operation_on_a_key_goes_into_the_kth_wave() {
    let bump = |id| add(&A, int(id), 1, int(1));
    let ops = [bump(1), bump(2), bump(1), bump(1), bump(3), bump(2)];
    assert_eq!(planned(&ops, &facts()), ["UPDATE a 1 2 3", "UPDATE a 1 2", "UPDATE a 1"]);
}

/// Adds to `a.v` and to all of `b` are merged.
fn merging_facts() -> FactsCache {
    let mut facts = facts();
    facts.insert(&A, TableFacts { mergeable: 1 << 1, ..free(0) });
    facts.insert(&B, TableFacts { mergeable: !0, ..free(1) });
    facts
}

#[test]
fn accounts_that_are_opened_and_receive_deposits_take_two_statements() {
    let ops: Vec<PgOp> = (0..300)
        .flat_map(|id| {
            [add(&A, int(id - 2), 1, int(1)), row(&A, id), add(&A, int(id), 1, int(1)), add(&A, int(id), 1, int(2))]
        })
        .collect();
    let plan_of = |facts| plan(&events(&ops), &facts).iter().map(Statement::len).collect::<Vec<_>>();
    assert_eq!(plan_of(merging_facts()), [300, 302]);
    assert_eq!(plan_of(facts()), [300, 302, 300, 298]);
}

#[test]
fn one_hot_row_takes_one_statement() {
    let ops: Vec<PgOp> = (0..1_000).map(|amount| add(&A, int(1), 1, int(amount))).collect();
    assert_eq!(planned(&ops, &merging_facts()), ["UPDATE a 1"]);
    assert_eq!(plan_one_by_one(&events(&ops)).len(), 1_000);
}

#[test]
fn adds_are_merged_only_right_behind_one_another_and_where_nothing_looks_at_the_values_on_the_way() {
    let [bump, watched] = [1, 2].map(|column| move |id| add(&A, int(id), column, int(1)));
    let both = || update(&A, int(1), [], [(1, int(1)), (2, int(1))]);
    let facts = merging_facts();
    assert_eq!(planned(&[bump(1), bump(2), bump(1)], &facts), ["UPDATE a 1 2"]);
    assert_eq!(planned(&[watched(1), watched(1)], &facts).len(), 2);
    assert_eq!(planned(&[both(), both()], &facts).len(), 2);
    assert_eq!(planned(&[bump(1), watched(1), bump(1)], &facts).len(), 3);
    assert_eq!(planned(&[bump(1), required(bump(1)), bump(1)], &facts).len(), 3);
    assert_eq!(planned(&[bump(1), set(&A, int(1), 1, int(1)), bump(1)], &facts).len(), 3);
    assert_eq!(planned(&[bump(1), crate::op::sql("SELECT 1").into(), bump(1)], &facts).len(), 3);
    // The order in which columns are named does not matter.
    let [one, other] = [[(1, int(1)), (2, int(9))], [(2, int(9)), (1, int(1))]].map(|add| update(&B, int(1), [], add));
    assert_eq!(planned(&[one, other], &facts), ["UPDATE b 1"]);
    // A step that does not fit its type goes into a wave of its own, and what follows joins that one.
    let large = || add(&A, int(1), 1, int(i64::MAX));
    assert_eq!(planned(&[large(), large(), large(), bump(1)], &facts), ["UPDATE a 1", "UPDATE a 1"]);

    let mut in_order = merging_facts();
    in_order.insert(&A, TableFacts { in_order: true, mergeable: !0, ..free(0) });
    assert_eq!(planned(&[bump(1), bump(1)], &in_order).len(), 2);
    let mut connected = merging_facts();
    connected.insert(&B, TableFacts { group: 0, ..free(1) });
    assert_eq!(
        planned(&[bump(1), bump(1), row(&B, 1), bump(1)], &connected),
        ["UPDATE a 1", "INSERT b 1", "UPDATE a 1"]
    );
}

#[test]
fn a_table_in_order_keeps_its_rows_in_place_and_goes_on_with_the_latest_statement_only() {
    let ops = [
        row(&C, 3),
        row(&A, 1),
        row(&C, 1),
        set(&C, int(9), 1, int(0)),
        row(&C, 2),
        row(&C, 1),
        row(&C, 2),
        row(&A, 0),
    ];
    assert_eq!(planned(&ops, &facts()), ["INSERT a 0 1", "INSERT c 3 1", "UPDATE c 9", "INSERT c 2 1", "INSERT c 2"]);
}

#[test]
fn tables_that_foreign_keys_connect_take_turns_and_others_do_not_wait_for_them() {
    let mut facts = facts();
    facts.insert(&B, TableFacts { group: 0, ..free(1) });
    let ops = [row(&A, 1), row(&A, 2), row(&B, 1), row(&B_ELSEWHERE, 1), row(&B, 2), row(&A, 3), row(&B_ELSEWHERE, 2)];
    assert_eq!(planned(&ops, &facts), ["INSERT a 1 2", "INSERT elsewhere.b 1 2", "INSERT b 1 2", "INSERT a 3"]);
}

#[test]
fn nothing_passes_a_barrier() {
    let ops = [
        row(&A, 1),
        row(&B, 1),
        crate::op::sql("SELECT 1").into(),
        row(&A, 2),
        delete_where(&B, [(1, int(1))]),
        row(&A, 3),
        set(&A, int(1), 0, int(4)),
        row(&A, 5),
        insert(&A, [Value::Null, int(0), int(0)]),
        row(&A, 6),
    ];
    assert_eq!(
        planned(&ops, &facts()),
        [
            "INSERT a 1",
            "INSERT b 1",
            "sql",
            "INSERT a 2",
            "DELETE b where",
            "INSERT a 3",
            "UPDATE a 1",
            "INSERT a 5",
            "INSERT a NULL",
            "INSERT a 6"
        ]
    );
}

#[test]
fn what_frees_or_changes_a_second_unique_value_stands_alone_in_its_table_and_no_other() {
    let mut facts = facts();
    facts.insert(&C, TableFacts { in_order: true, second_unique: true, unique: 1 << 1, ..free(9) });
    let ops = [
        row(&C, 1),
        row(&A, 1),
        set(&C, int(7), 1, int(0)),
        set(&C, int(8), 1, int(0)),
        set(&C, int(9), 2, int(0)),
        set(&C, int(6), 2, int(0)),
        delete(&C, int(5)),
        delete(&C, int(4)),
        row(&C, 2),
        row(&A, 2),
    ];
    assert_eq!(
        planned(&ops, &facts),
        [
            "INSERT a 1 2",
            "INSERT c 1",
            "UPDATE c 7",
            "UPDATE c 8",
            "UPDATE c 9 6",
            "DELETE c 5",
            "DELETE c 4",
            "INSERT c 2"
        ]
    );
}

#[test]
fn an_unknown_table_and_a_time_between_microseconds_are_written_one_by_one() {
    static TIMES: TableMeta = table("times", &[column("id", ValueKind::Timestamp)]);
    assert_eq!(planned(&[row(&A, 2), row(&A, 1)], &FactsCache::default()), ["INSERT a 2", "INSERT a 1"]);
    let mut facts = facts();
    facts.insert(&TIMES, free(10));
    let at = |nanos| insert(&TIMES, [Value::Timestamp(chrono::DateTime::from_timestamp(0, nanos).unwrap())]);
    assert_eq!(plan(&events(&[at(1_000), at(2_000)]), &facts).len(), 1);
    assert_eq!(plan(&events(&[at(1_000), at(2_001), at(3_000)]), &facts).len(), 3);
    let leap_second = insert(&TIMES, [Value::Timestamp(chrono::DateTime::from_timestamp(59, 1_000_000_000).unwrap())]);
    assert_eq!(plan(&events(&[at(1_000), leap_second, at(3_000)]), &facts).len(), 3);
}

#[test]
fn a_statement_grows_to_5_000_rows_or_8_mib() {
    let many: Vec<PgOp> = (0..12_000).map(|id| row(&A, id)).collect();
    let plan_of = |ops: &[PgOp]| plan(&events(ops), &facts()).iter().map(Statement::len).collect::<Vec<_>>();
    assert_eq!(plan_of(&many), [5_000, 5_000, 2_000]);
    let body = |id, mib: usize| insert(&BYTES, [int(id), Value::Bytes(vec![0; mib << 20])]);
    assert_eq!(plan_of(&[body(1, 3), body(2, 3), body(3, 3), body(4, 9), body(5, 1)]), [2, 1, 1, 1]);
}

#[test]
#[should_panic(expected = "a statement holds each key of \"a\" once")]
fn two_rows_of_one_key_in_a_statement_are_a_mistake_of_the_planner() {
    let ops = [add(&A, int(1), 1, int(1)), add(&A, int(1), 1, int(1))];
    let shape = shape_of(&ops[0]).unwrap();
    let rows = events(&ops).into_iter().map(KeyedRow::from).collect();
    Statement::keyed(keyed_text(&A, shape).into(), &A, shape, rows);
}

#[test]
fn texts_quote_names_and_cast_values() {
    static ODD: TableMeta = TableMeta {
        schema: Some("s\"1"),
        name: "t\"2",
        columns: &[
            column("a", ValueKind::I64),
            column("b\"", ValueKind::Text),
            cast("c", "jsonb"),
            column("d", ValueKind::I32),
        ],
        key: &[1, 0],
    };
    let text = |shape| keyed_text(&ODD, shape);
    let from = "unnest($1::int8[], $2::text[], $3::text[], $4::int4[]) AS u(c1, c2, c3, c4)";
    let head = format!(
        "INSERT INTO \"s\"\"1\".\"t\"\"2\" AS t (\"a\", \"b\"\"\", \"c\", \"d\") SELECT u.c1, u.c2, u.c3::jsonb, u.c4 FROM {from}"
    );
    assert_eq!(text(Shape::Insert(Conflict::Fail)), head);
    assert_eq!(text(Shape::Insert(Conflict::Nothing)), format!("{head} ON CONFLICT (\"b\"\"\", \"a\") DO NOTHING"));
    assert_eq!(
        text(Shape::Insert(Conflict::Update { set: 1 << 2, add: 1 << 3 })),
        format!(
            "{head} ON CONFLICT (\"b\"\"\", \"a\") DO UPDATE SET \"c\" = EXCLUDED.\"c\", \"d\" = t.\"d\" + EXCLUDED.\"d\""
        )
    );
    assert_eq!(
        text(Shape::Update { set: 1 << 2, add: 1 << 3, required: true, merging: false }),
        "UPDATE \"s\"\"1\".\"t\"\"2\" AS t SET \"c\" = u.c3::jsonb, \"d\" = t.\"d\" + u.c4 FROM unnest($1::text[], $2::int8[], \
         $3::text[], $4::int4[]) AS u(c1, c2, c3, c4) WHERE t.\"b\"\"\" = u.c1 AND t.\"a\" = u.c2"
    );
    assert_eq!(
        keyed_text(&A, Shape::Update { set: 0, add: 0b110, required: false, merging: true }),
        "UPDATE \"a\" AS t SET \"v\" = t.\"v\" + u.c2 + u.c3 + u.c4, \"w\" = t.\"w\" + u.c5 + u.c6 + u.c7 FROM \
         unnest($1::int8[], $2::int8[], $3::int8[], $4::int8[], $5::int8[], $6::int8[], $7::int8[]) \
         AS u(c1, c2, c3, c4, c5, c6, c7) WHERE t.\"id\" = u.c1"
    );
    assert_eq!(
        text(Shape::Delete { required: false }),
        "DELETE FROM \"s\"\"1\".\"t\"\"2\" AS t USING unnest($1::text[], $2::int8[]) AS u(c1, c2) WHERE t.\"b\"\"\" = u.c1 AND t.\"a\" = u.c2"
    );
}
