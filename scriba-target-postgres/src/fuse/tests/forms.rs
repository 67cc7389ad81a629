//! Values, casts, messages: the same in a statement for one row and for many.

use super::*;
use crate::op::sql;

static CASTS: TableMeta = table(
    "t",
    &[
        column("id", ValueKind::I64),
        cast("status", "order_status"),
        cast("body", "jsonb"),
        cast("price", "numeric"),
        cast("tags", "text[]"),
    ],
);
const CASTS_SQL: &str = "CREATE TYPE order_status AS ENUM ('open', 'shipped');
    CREATE TABLE t (id bigint PRIMARY KEY, status order_status, body jsonb, price numeric(6,2))";
static KINDS: TableMeta = table(
    "o\"dd \\ name",
    &[
        column("id", ValueKind::Uuid),
        column("a \"b\"", ValueKind::Bool),
        column("i16", ValueKind::I16),
        column("i32", ValueKind::I32),
        column("i64", ValueKind::I64),
        column("f32", ValueKind::F32),
        column("f64", ValueKind::F64),
        column("text", ValueKind::Text),
        column("bytes", ValueKind::Bytes),
        column("date", ValueKind::Date),
        column("at", ValueKind::Timestamp),
    ],
);
static SHORT: TableMeta = table("t", &[column("id", ValueKind::I64), column("v", ValueKind::Text)]);
static T: TableMeta = table("t", &[column("id", ValueKind::I64), column("v", ValueKind::I64)]);

#[tokio::test]
async fn enums_json_and_numbers_travel_as_text_and_are_assigned_as_the_column_says() {
    static FUSIBLE: TableMeta = table(
        "t",
        &[
            column("id", ValueKind::I64),
            cast("status", "order_status"),
            cast("body", "jsonb"),
            cast("price", "numeric"),
        ],
    );
    let mut place = Place::new(CASTS_SQL).await;
    let row = |id: i64, price: &str| insert(&FUSIBLE, [int(id), text("open"), text(r#"{"a": 1}"#), text(price)]);
    let ops = [row(1, "1.005"), row(2, "2"), row(3, "9999.994")];
    assert_eq!(place.statements(&ops).await, 1);
    let one_by_one = place.agree(&ops).await;
    assert_eq!(
        one_by_one.rows,
        "t: (1,open,\"{\"\"a\"\": 1}\",1.01) (2,open,\"{\"\"a\"\": 1}\",2.00) (3,open,\"{\"\"a\"\": 1}\",9999.99)\n"
    );
    let changes =
        [row(1, "1"), row(2, "2"), set(&FUSIBLE, int(1), 1, text("shipped")), add(&FUSIBLE, int(2), 3, text("0.5"))];
    assert_eq!(place.agree(&changes).await.failed, []);
    for (bad, code) in [(row(4, "10000"), "22003"), (row(4, "x"), "22P02")] {
        let one_by_one = place.agree(&[row(1, "1"), bad]).await;
        assert_eq!(one_by_one.failed, [(Position::new(2), code.to_owned())]);
    }
}

#[tokio::test]
async fn an_array_column_travels_as_text_one_by_one() {
    let mut place = Place::new(CASTS_SQL).await;
    raw_sql("ALTER TABLE t ADD tags text[]").execute(&mut place.conn).await.unwrap();
    let row = |id: i64| insert(&CASTS, [int(id), Value::Null, Value::Null, Value::Null, text("{a,b}")]);
    let one_by_one = place.agree(&[row(1), row(2)]).await;
    assert_eq!(one_by_one.rows, "t: (1,,,,\"{a,b}\") (2,,,,\"{a,b}\")\n");
}

#[tokio::test]
async fn text_that_is_too_long_is_refused_and_never_cut_off() {
    let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v varchar(5))").await;
    let ops = [insert(&SHORT, [int(1), text("12345")]), insert(&SHORT, [int(2), text("123456")])];
    assert_eq!(place.agree(&ops).await.failed, [(Position::new(2), "22001".to_owned())]);
    let rows = events(&ops);
    let facts = place.facts(&rows).await;
    assert_eq!(place.fused(&rows, &facts).await, Fused::Failed("22001".to_owned()));
}

#[tokio::test]
async fn every_kind_of_value_and_null_arrive_as_they_were() {
    let mut place = Place::new(
        r#"CREATE TABLE "o""dd \ name" (id uuid PRIMARY KEY, "a ""b""" bool, i16 int2, i32 int4, i64 int8, f32 float4,
           f64 float8, text text, bytes bytea, date date, at timestamptz); SET TimeZone = 'UTC'"#,
    )
    .await;
    let row = |id: u128| {
        let at = chrono::DateTime::from_timestamp(1_700_000_000, 123_456_000).unwrap();
        insert(
            &KINDS,
            [
                Value::Uuid(uuid::Uuid::from_u128(id)),
                Value::Bool(true),
                Value::I16(i16::MIN),
                Value::I32(i32::MAX),
                Value::I64(i64::MIN),
                Value::F32(0.1),
                Value::F64(f64::INFINITY),
                text("a\"b\\ ünï"),
                Value::Bytes(vec![0, 255]),
                Value::Date(at.date_naive()),
                Value::Timestamp(at),
            ],
        )
    };
    let mut nulls = vec![Value::Null; KINDS.columns.len()];
    nulls[0] = Value::Uuid(uuid::Uuid::from_u128(1));
    let ops = [row(3), insert(&KINDS, nulls), row(2)];
    assert_eq!(place.statements(&ops).await, 1);
    let one_by_one = place.agree(&ops).await;
    assert_eq!(one_by_one.failed, []);
    assert!(
        one_by_one.rows.contains(
            "(00000000-0000-0000-0000-000000000003,t,-32768,2147483647,-9223372036854775808,0.1,Infinity,\
         \"a\"\"b\\\\ ünï\",\"\\\\x00ff\",2023-11-14,\"2023-11-14 22:13:20.123456+00\")"
        ),
        "{}",
        one_by_one.rows
    );
    assert!(one_by_one.rows.contains("(00000000-0000-0000-0000-000000000001,,,,,,,,,,)"), "{}", one_by_one.rows);
}

#[tokio::test]
async fn required_rows_that_are_missing_name_table_key_and_position() {
    let mut place =
        Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); INSERT INTO t VALUES (1, 1), (2, 2)").await;
    let there = [required(add(&T, int(1), 1, int(1))), required(add(&T, int(2), 1, int(1)))];
    assert_eq!(place.statements(&there).await, 1);
    assert_eq!(place.agree(&there).await.failed, []);
    let missing = [required(add(&T, int(1), 1, int(1))), required(add(&T, int(3), 1, int(1)))];
    assert_eq!(place.agree(&missing).await.failed, [(Position::new(2), "no_row".to_owned())]);
    // What is not required may be missing in the same batch.
    assert_eq!(place.agree(&[required(delete(&T, int(1))), delete(&T, int(3))]).await.failed, []);

    let mut message = async |op: PgOp| {
        let rows = [(Position::new(7), &op)];
        let facts = place.facts(&rows).await;
        let [statement] = &plan(&rows, &facts)[..] else { panic!("one statement") };
        statement.execute(&mut place.conn).await.unwrap_err().to_string()
    };
    let hint = "write the row first, or leave out `required()` where it may be missing";
    assert_eq!(
        message(required(delete(&T, int(3)))).await,
        format!("no_row: 0 of 1 required rows found in table \"t\" for id = 3, position 7: {hint}")
    );
    assert_eq!(
        message(required(delete_where(&T, [(0, int(9)), (1, Value::Null)]))).await,
        format!("no_row: 0 of 1 required rows found in table \"t\" for id = 9, v = NULL, position 7: {hint}")
    );
    assert_eq!(
        message(sql("DELETE FROM t WHERE id = $1").bind(3_i64).required().into()).await,
        format!("no_row: a required `sql` statement hit no row, position 7: {hint}")
    );
}

#[tokio::test]
async fn one_sql_text_may_be_bound_with_other_types_and_with_null_on_one_connection() {
    let mut place = Place::new("CREATE TABLE t (id int PRIMARY KEY, v text)").await;
    let insert = "INSERT INTO t VALUES ($1, $2) -- a comment";
    let ops: [PgOp; 4] = [
        sql(insert).bind(1_i64).bind(None::<String>).into(),
        sql(insert).bind(2_i32).bind("two").into(),
        sql(insert).bind(3_i16).bind(None::<i32>).into(),
        sql(insert).bind(None::<i32>).bind("null").into(),
    ];
    let one_by_one = place.agree(&ops).await;
    assert_eq!(one_by_one.rows, "t: (1,) (2,two) (3,)\n");
    assert_eq!(one_by_one.failed, [(Position::new(4), "23502".to_owned())]);
}

#[tokio::test]
async fn updates_by_filter_set_and_add_where_all_columns_match() {
    static WIDE: TableMeta =
        table("t", &[column("id", ValueKind::I64), column("v", ValueKind::I64), column("w", ValueKind::I64)]);
    let mut place = Place::new(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint, w bigint); INSERT INTO t VALUES (1, 1, NULL), (2, 1, 5), (3, 2, 5)",
    )
    .await;
    let filtered = |filter: Vec<(usize, Value)>, set: Vec<(usize, Value)>, add: Vec<(usize, Value)>| {
        PgOp::Update(UpdateOp { table: &WIDE, rows: Rows::Filter(filter), set, add, required: true })
    };
    let ops = [
        filtered(vec![(1, int(1)), (2, Value::Null)], vec![(2, int(7))], vec![(1, int(10))]),
        filtered(vec![], vec![], vec![(2, int(100))]),
        delete_where(&WIDE, [(1, int(2)), (1, int(1))]),
    ];
    let one_by_one = place.agree(&ops).await;
    assert_eq!(one_by_one.failed, []);
    assert_eq!(one_by_one.rows, "t: (1,11,107) (2,1,105) (3,2,105)\n");
    assert_eq!(place.agree(&[delete_where(&WIDE, [])]).await.rows, "t: \n");
}
