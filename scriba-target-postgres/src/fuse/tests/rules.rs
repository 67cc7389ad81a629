//! One test for each rule: the rule holds, and without it the rows would differ without a word.

use super::*;

const ID_V: &[ColumnMeta] = &[column("id", ValueKind::I64), column("v", ValueKind::I64)];
static T: TableMeta = table("t", ID_V);
const ID_TEXT: &[ColumnMeta] = &[column("id", ValueKind::I64), column("v", ValueKind::Text)];
static U: TableMeta = table("t", ID_TEXT);
static TEXT_KEY: TableMeta = table("t", &[column("id", ValueKind::Text), column("v", ValueKind::I64)]);
static NUMERIC_KEY: TableMeta = table("t", &[cast("id", "numeric"), column("v", ValueKind::I64)]);

#[tokio::test]
async fn a_statement_trigger_fires_once_for_each_operation() {
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint); CREATE TABLE fired (n int DEFAULT 1);
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO fired DEFAULT VALUES; RETURN NULL; END';
         CREATE TRIGGER note AFTER INSERT ON t EXECUTE FUNCTION note()",
    )
    .await;
    place.agree_only_with(&[insert(&T, [int(1), int(1)]), insert(&T, [int(2), int(2)])], forget_all).await;
}

#[tokio::test]
async fn a_trigger_that_reads_its_table_sees_the_operations_before_its_own_and_no_others() {
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint);
         CREATE FUNCTION number_row() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN NEW.v := (SELECT count(*) FROM t); RETURN NEW; END';
         CREATE TRIGGER number_row BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION number_row()",
    )
    .await;
    place.agree_only_with(&[insert(&T, [int(2), int(0)]), insert(&T, [int(1), int(0)])], forget_all).await;
}

#[tokio::test]
async fn a_trigger_behind_a_cascade_fires_in_its_place_among_other_tables() {
    static PARENT: TableMeta = table("parent", &[column("id", ValueKind::I64)]);
    static LOG: TableMeta = table("a_log", ID_V);
    let mut place = Place::new(
        "CREATE TABLE parent (id bigint PRIMARY KEY);
         CREATE TABLE child (id bigint PRIMARY KEY, parent bigint REFERENCES parent ON DELETE CASCADE);
         CREATE TABLE a_log (id bigint PRIMARY KEY, v bigint);
         CREATE FUNCTION count_up() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN UPDATE a_log SET v = v * 2; RETURN NULL; END';
         CREATE TRIGGER count_up AFTER DELETE ON child FOR EACH ROW EXECUTE FUNCTION count_up();
         INSERT INTO parent VALUES (1); INSERT INTO child VALUES (1, 1); INSERT INTO a_log VALUES (1, 1)",
    )
    .await;
    place.agree_only_with(&[delete(&PARENT, int(1)), add(&LOG, int(1), 1, int(1))], forget_all).await;
}

#[tokio::test]
async fn a_rule_rewrites_each_operation() {
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint); CREATE TABLE other (n bigint);
         CREATE RULE also AS ON INSERT TO t DO ALSO INSERT INTO other SELECT count(*) FROM t",
    )
    .await;
    place.agree_only_with(&[insert(&T, [int(1), int(1)]), insert(&T, [int(2), int(2)])], forget_all).await;
}

#[tokio::test]
async fn a_value_of_a_second_unique_index_that_moves_between_rows_is_met_in_the_order_of_positions() {
    let mut place =
        Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v text UNIQUE); INSERT INTO t VALUES (1, 'b'), (2, 'a')")
            .await;
    place.agree_only_with(&[set(&U, int(2), 1, text("b")), set(&U, int(1), 1, text("c"))], forget_all).await;
}

#[tokio::test]
async fn a_delete_frees_a_value_of_a_second_unique_index_only_for_what_comes_after() {
    let mut place =
        Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v text UNIQUE); INSERT INTO t VALUES (1, 'a')").await;
    // The first delete makes its statement come before the insert's.
    let ops = [delete(&U, int(2)), insert(&U, [int(2), text("a")]), delete(&U, int(1))];
    place.agree_only_with(&ops, forget_all).await;
}

#[tokio::test]
async fn of_two_inserts_with_one_value_of_a_second_unique_index_the_first_wins() {
    let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v text UNIQUE)").await;
    let one_by_one = place.agree(&[insert(&U, [int(2), text("a")]), insert(&U, [int(1), text("a")])]).await;
    assert_eq!(one_by_one.failed, [(Position::new(2), "23505".to_owned())]);
}

#[tokio::test]
async fn the_predicate_of_a_partial_unique_index_counts_as_a_value_of_it() {
    static P: TableMeta =
        table("t", &[column("id", ValueKind::I64), column("v", ValueKind::I64), column("active", ValueKind::Bool)]);
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint, active bool); CREATE UNIQUE INDEX ON t (v) WHERE active;
         INSERT INTO t VALUES (1, 7, true), (2, 7, false)",
    )
    .await;
    let ops = [set(&P, int(2), 2, Value::Bool(true)), set(&P, int(1), 2, Value::Bool(false))];
    place.agree_only_with(&ops, forget_all).await;
}

#[tokio::test]
async fn an_exclusion_constraint_and_an_index_on_an_expression_keep_the_order_like_a_second_unique_index() {
    for index in [
        "CREATE UNIQUE INDEX ON t (lower(v))",
        "ALTER TABLE t ADD EXCLUDE USING btree (v WITH =)",
        "CREATE UNIQUE INDEX ON t (hashtext(t::text)) WHERE v <> ''",
    ] {
        let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v text)").await;
        if raw_sql(index).execute(&mut place.conn).await.is_err() {
            // Casting a row to text is not immutable everywhere.
            continue;
        }
        raw_sql("INSERT INTO t VALUES (1, 'b'), (2, 'a')").execute(&mut place.conn).await.unwrap();
        place.agree_only_with(&[set(&U, int(2), 1, text("b")), set(&U, int(1), 1, text("c"))], forget_all).await;
    }
}

#[tokio::test]
async fn an_index_or_a_foreign_key_on_a_generated_column_is_one_on_what_it_is_made_from() {
    let unique = "CREATE TABLE t (id bigint PRIMARY KEY, v text, g text GENERATED ALWAYS AS (lower(v)) STORED UNIQUE);
         INSERT INTO t VALUES (1, 'b'), (2, 'a')";
    let moved = [set(&U, int(2), 1, text("B")), set(&U, int(1), 1, text("c"))];
    Place::new(unique).await.agree_only_with(&moved, forget_all).await;

    let from = "CREATE TABLE m_parent (id bigint PRIMARY KEY);
         CREATE TABLE a_child (id bigint PRIMARY KEY, v bigint, g bigint GENERATED ALWAYS AS (v + 1) STORED REFERENCES m_parent);
         INSERT INTO m_parent VALUES (1); INSERT INTO a_child VALUES (1, 0)";
    let ops = [set(&EARLY_CHILD, int(1), 1, int(1)), insert(&PARENT, [int(2)])];
    Place::new(from).await.agree_only_with(&ops, forget_links).await;

    let to = "CREATE TABLE m_parent (id bigint PRIMARY KEY, v bigint, g bigint GENERATED ALWAYS AS (v + 1) STORED UNIQUE);
         CREATE TABLE a_child (id bigint PRIMARY KEY, v bigint REFERENCES m_parent (g)); INSERT INTO m_parent VALUES (1, 0)";
    let ops = [insert(&EARLY_CHILD, [int(1), int(5)]), set(&GENERATING, int(1), 1, int(4))];
    assert_eq!(Place::new(to).await.agree(&ops).await.failed.len(), 1);
}

#[tokio::test]
async fn a_deferrable_constraint_is_checked_after_each_operation() {
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text UNIQUE DEFERRABLE); INSERT INTO t VALUES (1, 'a'), (2, 'b')",
    )
    .await;
    place.agree_only_with(&[set(&U, int(1), 1, text("b")), set(&U, int(2), 1, text("a"))], forget_all).await;
}

#[tokio::test]
async fn a_row_of_a_table_that_refers_to_itself_is_not_deleted_together_with_those_that_need_it() {
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint REFERENCES t); INSERT INTO t VALUES (1, NULL), (2, 1)",
    )
    .await;
    place.agree_only_with(&[delete(&T, int(1)), delete(&T, int(2))], forget_all).await;
}

static PARENT: TableMeta = table("m_parent", &[column("id", ValueKind::I64)]);
static EARLY_CHILD: TableMeta = table("a_child", ID_V);
static GENERATING: TableMeta = table("m_parent", ID_V);
static LATE_CHILD: TableMeta = table("z_child", ID_V);

#[tokio::test]
async fn a_parent_that_comes_after_its_child_does_not_help_it() {
    let mut place = Place::new(
        "CREATE TABLE m_parent (id bigint PRIMARY KEY);
         CREATE TABLE z_child (id bigint PRIMARY KEY, v bigint REFERENCES m_parent)",
    )
    .await;
    let ops = [insert(&LATE_CHILD, [int(1), int(1)]), insert(&PARENT, [int(1)])];
    place.agree_only_with(&ops, forget_links).await;
    let ops = [insert(&PARENT, [int(1)]), insert(&LATE_CHILD, [int(1), int(1)])];
    assert_eq!(place.agree(&ops).await.failed, [], "in order they succeed");
}

#[tokio::test]
async fn rows_and_those_that_refer_to_them_are_written_in_two_statements() {
    let mut place = Place::new(
        "CREATE TABLE m_parent (id bigint PRIMARY KEY);
         CREATE TABLE a_child (id bigint PRIMARY KEY, v bigint REFERENCES m_parent)",
    )
    .await;
    let ops: Vec<PgOp> = (0..500)
        .flat_map(|id| {
            let lines = (0..3).map(move |line| insert(&EARLY_CHILD, [int(3 * id + line), int(id)]));
            std::iter::once(insert(&PARENT, [int(id)])).chain(lines)
        })
        .collect();
    assert_eq!(place.agree(&ops).await.failed, []);
    assert_eq!(place.statements(&ops).await, 2);
    let apart = |facts: &mut TableFacts| facts.links.odd_key = true;
    assert_eq!(place.statements_with(&ops, apart).await, 1_000);
}

#[tokio::test]
async fn a_reference_follows_its_row_and_a_row_does_not_pass_what_refers_to_it() {
    let mut place = Place::new(
        "CREATE TABLE m_parent (id bigint PRIMARY KEY);
         CREATE TABLE a_child (id bigint PRIMARY KEY, v bigint REFERENCES m_parent);
         INSERT INTO m_parent VALUES (1); INSERT INTO a_child VALUES (1, 1), (2, 1)",
    )
    .await;
    let refer = |id, to| set(&EARLY_CHILD, int(id), 1, int(to));
    let ops = [insert(&PARENT, [int(2)]), refer(1, 2), insert(&PARENT, [int(3)]), refer(2, 3)];
    assert_eq!(place.agree(&ops).await.failed, []);
    assert_eq!(place.statements(&ops).await, 2);
    let ops = [refer(1, 2), insert(&PARENT, [int(2)]), refer(2, 3), insert(&PARENT, [int(3)])];
    assert_eq!(place.agree(&ops).await.failed.len(), 2);
    place.agree_only_with(&ops, forget_links).await;
}

#[tokio::test]
async fn behind_sql_that_changes_the_schema_operations_are_written_one_by_one() {
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint); CREATE TABLE fired (n int DEFAULT 1);
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO fired DEFAULT VALUES; RETURN NULL; END'",
    )
    .await;
    let rows = || [insert(&T, [int(1), int(1)]), insert(&T, [int(2), int(2)])];
    let with = |text: &'static str| std::iter::once(crate::op::sql(text).into()).chain(rows()).collect::<Vec<PgOp>>();
    let trigger = with("CREATE TRIGGER note AFTER INSERT ON t EXECUTE FUNCTION note()");
    assert_eq!(place.agree(&trigger).await.rows, "fired: (1) (1)\nt: (1,1) (2,2)\n");
    // The name means another table from here on.
    assert_eq!(place.agree(&with("CREATE TEMP TABLE t (id bigint, v bigint)")).await.rows, "fired: \nt: (1,1) (2,2)\n");
    assert_eq!(place.statements(&with("SELECT 1")).await, 2);
}

#[tokio::test]
async fn a_child_that_is_deleted_after_its_parent_does_not_help_it() {
    let mut place = Place::new(
        "CREATE TABLE m_parent (id bigint PRIMARY KEY);
         CREATE TABLE a_child (id bigint PRIMARY KEY, v bigint REFERENCES m_parent);
         INSERT INTO m_parent VALUES (1); INSERT INTO a_child VALUES (1, 1)",
    )
    .await;
    place.agree_only_with(&[delete(&PARENT, int(1)), delete(&EARLY_CHILD, int(1))], forget_links).await;
    let one_by_one = place.agree(&[delete(&EARLY_CHILD, int(1)), delete(&PARENT, int(1))]).await;
    assert_eq!(one_by_one.failed, [], "in order they succeed");
}

#[tokio::test]
async fn a_cascade_reaches_tables_two_steps_away_in_its_place() {
    let mut place = Place::new(
        "CREATE TABLE m_parent (id bigint PRIMARY KEY);
         CREATE TABLE middle (id bigint PRIMARY KEY, v bigint REFERENCES m_parent ON DELETE CASCADE);
         CREATE TABLE a_child (id bigint PRIMARY KEY, v bigint REFERENCES middle ON DELETE CASCADE);
         INSERT INTO m_parent VALUES (1); INSERT INTO middle VALUES (1, 1)",
    )
    .await;
    place.agree_only_with(&[delete(&PARENT, int(1)), insert(&EARLY_CHILD, [int(1), int(1)])], forget_links).await;
}

#[tokio::test]
async fn rows_that_others_hang_from_by_a_cascade_are_deleted_one_by_one() {
    let mut place = Place::new(
        "CREATE TABLE m_parent (id bigint PRIMARY KEY);
         CREATE TABLE left_child (id bigint PRIMARY KEY, p bigint REFERENCES m_parent ON DELETE CASCADE);
         CREATE TABLE right_child (id bigint PRIMARY KEY, p bigint REFERENCES m_parent ON DELETE CASCADE,
             l bigint REFERENCES left_child);
         INSERT INTO m_parent VALUES (1), (2); INSERT INTO left_child VALUES (1, 1); INSERT INTO right_child VALUES (1, 2, 1)",
    )
    .await;
    place.agree_only_with(&[delete(&PARENT, int(1)), delete(&PARENT, int(2))], |facts| facts.cascades = false).await;
}

#[tokio::test]
async fn a_default_that_counts_up_numbers_rows_in_the_order_of_positions() {
    for column in ["n bigserial", "n bigint GENERATED ALWAYS AS IDENTITY", "n bigint GENERATED BY DEFAULT AS IDENTITY"]
    {
        let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        raw_sql(AssertSqlSafe(format!("ALTER TABLE t ADD {column}"))).execute(&mut place.conn).await.unwrap();
        place.reset = "SELECT setval('t_n_seq', 1, false)";
        let ops = [insert(&T, [int(3), int(0)]), insert(&T, [int(1), int(0)]), insert(&T, [int(2), int(0)])];
        place.agree_only_with(&ops, forget_all).await;
        assert_eq!(place.statements(&ops).await, 1, "in order, and fused all the same");
    }
}

#[tokio::test]
async fn a_sequence_that_two_tables_share_numbers_rows_in_the_order_of_positions() {
    static A: TableMeta = table("a", ID_V);
    static B: TableMeta = table("b", ID_V);
    let mut place = Place::new(
        "CREATE SEQUENCE s; CREATE TABLE a (id bigint PRIMARY KEY, v bigint, n bigint DEFAULT nextval('s'));
         CREATE TABLE b (id bigint PRIMARY KEY, v bigint, n bigint DEFAULT nextval('s'))",
    )
    .await;
    place.reset = "SELECT setval('s', 1, false)";
    place.agree_only_with(&[insert(&B, [int(1), int(0)]), insert(&A, [int(1), int(0)])], forget_all).await;
}

#[tokio::test]
async fn a_sequence_found_at_run_time_and_one_of_an_identity_number_rows_of_all_tables_in_order() {
    static A: TableMeta = table("a", ID_V);
    static B: TableMeta = table("b", ID_V);
    for (column_a, column_b) in [
        ("n bigint DEFAULT nextval('s'::text)", "n bigint DEFAULT nextval('s'::text)"),
        ("n bigint GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME i)", "n bigint DEFAULT nextval('i')"),
        ("n bigserial", "n bigint DEFAULT lastval()"),
    ] {
        let mut place = Place::new("CREATE SEQUENCE s").await;
        for (table, column) in [("a", column_a), ("b", column_b)] {
            let create = format!("CREATE TABLE {table} (id bigint PRIMARY KEY, v bigint, {column})");
            raw_sql(AssertSqlSafe(create)).execute(&mut place.conn).await.unwrap();
        }
        place.reset = "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'; SELECT nextval('s'), nextval('s')";
        place.agree_only_with(&[insert(&B, [int(1), int(0)]), insert(&A, [int(1), int(0)])], forget_all).await;
    }
}

#[tokio::test]
async fn a_default_that_reads_the_table_sees_the_operations_before_its_own() {
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint);
         CREATE FUNCTION next_n() RETURNS bigint STABLE LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM t); END';
         ALTER TABLE t ADD n bigint DEFAULT next_n()",
    )
    .await;
    place.agree_only_with(&[insert(&T, [int(1), int(0)]), insert(&T, [int(2), int(0)])], forget_all).await;
}

#[tokio::test]
async fn a_check_that_reads_the_table_sees_the_operations_before_its_own() {
    for check in [
        "ALTER TABLE t ADD CHECK (few())",
        "CREATE FUNCTION few(bigint, bigint) RETURNS bool STABLE LANGUAGE sql AS 'SELECT few()';
         CREATE OPERATOR <<< (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = few); ALTER TABLE t ADD CHECK (id <<< v)",
        "CREATE DOMAIN d AS bigint CHECK (few()); ALTER TABLE t ADD CHECK (id::d > 0)",
    ] {
        let mut place = Place::new(
            "CREATE TABLE t (id bigint PRIMARY KEY, v bigint);
             CREATE FUNCTION few() RETURNS bool STABLE LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM t) < 1; END'",
        )
        .await;
        raw_sql(check).execute(&mut place.conn).await.unwrap();
        place.agree_only_with(&[insert(&T, [int(1), int(0)]), insert(&T, [int(2), int(0)])], forget_all).await;
    }
}

#[tokio::test]
async fn keys_that_only_the_database_finds_equal_are_not_told_apart() {
    let collated = "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
         CREATE TABLE t (id text COLLATE ci PRIMARY KEY, v bigint)";
    let indexed = "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
         CREATE TABLE t (id text NOT NULL, v bigint); CREATE UNIQUE INDEX ON t (id COLLATE ci)";
    // The first delete makes its statement come before the insert's.
    let cases = |key: &str, same: &str| {
        [delete(&TEXT_KEY, text(key)), upsert(&TEXT_KEY, [text(key), int(1)]), delete(&TEXT_KEY, text(same))]
    };
    Place::new(collated).await.agree_only_with(&cases("A", "a"), forget_all).await;
    let mut place = Place::new(indexed).await;
    let twice = [insert(&TEXT_KEY, [text("A"), int(1)]), insert(&TEXT_KEY, [text("a"), int(1)])];
    assert_eq!(place.agree(&twice).await.failed.len(), 1);
    assert_eq!(place.statements(&twice).await, 2);

    let limited = "CREATE TABLE t (id varchar(2) PRIMARY KEY, v bigint)";
    Place::new(limited).await.agree_only_with(&cases("ab ", "ab"), |facts| facts.limited_key = false).await;
    Place::new("CREATE TABLE t (id char(3) PRIMARY KEY, v bigint)").await.agree(&cases("a ", "a")).await;

    let numeric = |key: &str| text(key);
    let ops = [
        delete(&NUMERIC_KEY, numeric("1.0")),
        insert(&NUMERIC_KEY, [numeric("1.0"), int(1)]),
        delete(&NUMERIC_KEY, numeric("1.00")),
    ];
    Place::new("CREATE TABLE t (id numeric PRIMARY KEY, v bigint)").await.agree_only_with(&ops, forget_all).await;
}

#[tokio::test]
async fn an_upsert_on_a_key_that_only_a_partial_index_covers_is_refused_alone_and_among_others() {
    let mut place = Place::new("CREATE TABLE t (id bigint, v bigint); CREATE UNIQUE INDEX ON t (id) WHERE v > 0").await;
    let one_by_one = place.agree(&[upsert(&T, [int(1), int(1)]), upsert(&T, [int(2), int(0)])]).await;
    let refused = |position| (Position::new(position), "42P10".to_owned());
    assert_eq!(one_by_one.failed, [refused(1), refused(2)]);
}

#[tokio::test]
async fn two_structs_of_one_table_meet_on_its_keys() {
    static OTHER: TableMeta = TableMeta { schema: Some("public"), name: "t", columns: ID_V, key: &[0] };
    static BY_V: TableMeta = TableMeta { schema: None, name: "t", columns: ID_V, key: &[1] };
    let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
    // The first delete makes the insert come late.
    let ops = [delete(&OTHER, int(1)), insert(&OTHER, [int(1), int(1)]), delete(&T, int(1))];
    let tables = std::cell::Cell::new(0);
    place
        .agree_only_with(&ops, |facts| {
            tables.set(tables.get() + 1);
            facts.identity = tables.get();
            facts.group = tables.get();
        })
        .await;
    // Different keys, so nothing may pass.
    let ops = [insert(&T, [int(1), int(1)]), delete(&BY_V, int(1)), insert(&T, [int(2), int(1)])];
    place.agree(&ops).await;
}

#[tokio::test]
async fn operations_on_one_key_follow_each_other() {
    let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
    let ops = [
        insert(&T, [int(1), int(1)]),
        delete(&T, int(1)),
        insert(&T, [int(1), int(2)]),
        add(&T, int(1), 1, int(5)),
        set(&T, int(1), 1, int(3)),
        add(&T, int(1), 1, int(5)),
        add(&T, int(1), 1, int(5)),
        upsert(&T, [int(2), int(1)]),
        upsert(&T, [int(2), int(2)]),
        upsert(&T, [int(3), int(3)]),
        write(&T, [int(2), int(10)], Conflict::Update { set: 0, add: 1 << 1 }),
        write(&T, [int(2), int(100)], Conflict::Nothing),
        insert(&T, [int(4), Value::Null]),
        add(&T, int(4), 1, int(1)),
        delete(&T, int(9)),
    ];
    let one_by_one = place.agree(&ops).await;
    assert_eq!(one_by_one.failed, []);
    assert_eq!(one_by_one.rows, "t: (1,13) (2,12) (3,3) (4,)\n");
}

#[tokio::test]
async fn sql_and_operations_by_filter_see_everything_before_them_and_nothing_after() {
    let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); CREATE TABLE seen (n bigint)").await;
    let count = || PgOp::from(crate::op::sql("INSERT INTO seen SELECT count(*) + $1 FROM t").bind(0_i64));
    let ops = [
        insert(&T, [int(1), int(1)]),
        count(),
        insert(&T, [int(2), int(1)]),
        delete_where(&T, [(1, int(1))]),
        count(),
        insert(&T, [int(3), int(1)]),
        insert(&T, [int(4), Value::Null]),
        delete_where(&T, [(1, Value::Null)]),
        insert(&T, [int(5), Value::Null]),
        count(),
    ];
    let one_by_one = place.agree(&ops).await;
    assert_eq!(one_by_one.rows, "seen: (0) (1) (2)\nt: (3,1) (5,)\n");
}

#[tokio::test]
async fn a_change_of_a_key_or_of_a_column_that_foreign_keys_refer_to_keeps_its_place() {
    static P: TableMeta =
        table("p", &[column("id", ValueKind::I64), column("code", ValueKind::I64), column("v", ValueKind::I64)]);
    static C: TableMeta = table("c", ID_V);
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint);
         CREATE TABLE p (id bigint PRIMARY KEY, code bigint UNIQUE, v bigint);
         CREATE TABLE c (id bigint PRIMARY KEY, v bigint REFERENCES p (code) ON UPDATE CASCADE);
         INSERT INTO t VALUES (1, 1); INSERT INTO p VALUES (1, 7, 0); INSERT INTO c VALUES (1, 7)",
    )
    .await;
    let ops = [
        // The first add makes its statement come before the change of the key.
        add(&T, int(6), 1, int(1)),
        set(&T, int(1), 0, int(5)),
        add(&T, int(5), 1, int(1)),
        delete(&T, int(1)),
        add(&P, int(1), 2, int(1)),
        set(&P, int(1), 1, int(8)),
        insert(&C, [int(2), int(8)]),
    ];
    let one_by_one = place.agree(&ops).await;
    assert_eq!(one_by_one.failed, []);
    assert_eq!(one_by_one.rows, "c: (1,8) (2,8)\np: (1,8,1)\nt: (5,2)\n");
}

#[tokio::test]
async fn null_in_a_key_hits_nothing_and_is_left_to_the_database() {
    let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); INSERT INTO t VALUES (1, 1)").await;
    let one_by_one = place.agree(&[set(&T, Value::Null, 1, int(5)), delete(&T, Value::Null)]).await;
    assert_eq!(one_by_one.rows, "t: (1,1)\n");
    let one_by_one = place.agree(&[insert(&T, [int(2), int(1)]), insert(&T, [Value::Null, int(1)])]).await;
    assert_eq!(one_by_one.failed, [(Position::new(2), "23502".to_owned())]);
}
