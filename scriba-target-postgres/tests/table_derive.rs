//! What `#[derive(Table)]` makes of a struct, and that its values are equal where a key of Postgres says so.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::collections::BTreeSet;

use chrono::{DateTime, NaiveDate, Utc};
use scriba_target_postgres::{Column, PgValue, Table, Value, ValueKind};
use scriba_testing::postgres::Postgres;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, query, query_scalar};
use uuid::Uuid;

#[derive(Table)]
#[table(name = "All \"Kinds\"", schema = "read side")]
struct AllRow {
    #[table(key)]
    id: Uuid,
    flag: bool,
    small: i16,
    port: u16,
    number: i32,
    count: u32,
    big: i64,
    real: f32,
    double: f64,
    #[table(key, column = "Name")]
    name: String,
    #[table(cast = "numeric")]
    price: Option<String>,
    bytes: Vec<u8>,
    day: NaiveDate,
    at: DateTime<Utc>,
    document: serde_json::Value,
    #[table(cast = "json")]
    plain_document: Option<serde_json::Value>,
    r#type: Option<i64>,
}

#[test]
fn each_field_is_a_column_with_its_name_the_kind_of_its_values_and_its_cast() {
    let columns: Vec<_> = AllRow::META.columns.iter().map(|column| (column.name, column.kind, column.cast)).collect();
    assert_eq!(
        columns,
        [
            ("id", ValueKind::Uuid, None),
            ("flag", ValueKind::Bool, None),
            ("small", ValueKind::I16, None),
            ("port", ValueKind::I32, None),
            ("number", ValueKind::I32, None),
            ("count", ValueKind::I64, None),
            ("big", ValueKind::I64, None),
            ("real", ValueKind::F32, None),
            ("double", ValueKind::F64, None),
            ("Name", ValueKind::Text, None),
            ("price", ValueKind::Text, Some("numeric")),
            ("bytes", ValueKind::Bytes, None),
            ("day", ValueKind::Date, None),
            ("at", ValueKind::Timestamp, None),
            ("document", ValueKind::Text, Some("jsonb")),
            ("plain_document", ValueKind::Text, Some("json")),
            ("type", ValueKind::I64, None),
        ]
    );
    assert_eq!((AllRow::META.schema, AllRow::META.name), (Some("read side"), "All \"Kinds\""));
    assert_eq!(AllRow::META.key, [0, 9]);
}

#[test]
fn the_constants_are_typed_and_the_values_stand_in_the_order_of_the_columns() {
    let _: Column<AllRow, Option<i64>> = AllRow::TYPE;
    assert_eq!(format!("{:?} {:?}", AllRow::NAME, AllRow::TYPE), "All \"Kinds\".Name All \"Kinds\".type");
    let row = AllRow {
        id: Uuid::max(),
        flag: true,
        small: -1,
        port: 65_535,
        number: -2,
        count: 4_294_967_295,
        big: -3,
        real: 0.5,
        double: 0.25,
        name: "n".to_owned(),
        price: Some("1.10".to_owned()),
        bytes: vec![0, 255],
        day: NaiveDate::MIN,
        at: DateTime::UNIX_EPOCH,
        document: serde_json::json!([1]),
        plain_document: None,
        r#type: Some(7),
    };
    assert_eq!(
        *row.into_values(),
        [
            Value::Uuid(Uuid::max()),
            Value::Bool(true),
            Value::I16(-1),
            Value::I32(65_535),
            Value::I32(-2),
            Value::I64(4_294_967_295),
            Value::I64(-3),
            Value::F32(0.5),
            Value::F64(0.25),
            Value::Text("n".to_owned()),
            Value::Text("1.10".to_owned()),
            Value::Bytes(vec![0, 255]),
            Value::Date(NaiveDate::MIN),
            Value::Timestamp(DateTime::UNIX_EPOCH),
            Value::Text("[1]".to_owned()),
            Value::Null,
            Value::I64(7),
        ]
    );
    let key = AllRow::key_values((Uuid::nil(), "n".to_owned()));
    assert_eq!(*key, [Value::Uuid(Uuid::nil()), Value::Text("n".to_owned())]);
}

#[test]
fn a_struct_that_comes_out_of_a_macro_is_a_table_like_any_other() {
    macro_rules! table {
        ($key:ty) => {
            #[derive(Table)]
            #[table(name = "from_macro")]
            struct FromMacro {
                #[table(key)]
                id: $key,
                total: i64,
            }
        };
    }
    table!(String);
    let row = FromMacro { id: "a".to_owned(), total: 5 };
    assert_eq!(*row.into_values(), [Value::Text("a".to_owned()), Value::I64(5)]);
    assert_eq!(*FromMacro::key_values("a".to_owned()), [Value::Text("a".to_owned())]);
}

/// The rows of a table with a key of this type into which all these values went.
async fn rows_in_a_key(connection: &mut PgConnection, ty: &str, values: &[Value]) -> usize {
    let create = format!("create temporary table keys (k {ty} primary key)");
    query(AssertSqlSafe(create)).execute(&mut *connection).await.unwrap();
    let insert = format!("insert into keys values ($1::{ty}) on conflict do nothing");
    for value in values {
        let insert = query(AssertSqlSafe(insert.clone()));
        let insert = match value.clone() {
            Value::F32(value) => insert.bind(value),
            Value::F64(value) => insert.bind(value),
            Value::Text(value) => insert.bind(value),
            Value::Bytes(value) => insert.bind(value),
            Value::Timestamp(value) => insert.bind(value),
            other => panic!("{other:?} is not tried here"),
        };
        insert.execute(&mut *connection).await.unwrap();
    }
    let rows: i64 = query_scalar("select count(*) from keys").fetch_one(&mut *connection).await.unwrap();
    query("drop table keys").execute(connection).await.unwrap();
    usize::try_from(rows).unwrap()
}

#[tokio::test]
async fn values_are_equal_exactly_where_a_key_of_postgres_takes_them_for_one() {
    let database = Postgres::shared().await.unwrap().create_database().await.unwrap();
    let mut connection = database.connect_options().connect().await.unwrap();
    let other_nan = f64::from_bits(f64::NAN.to_bits() | 1);
    let doubles = [0.0, -0.0, f64::NAN, -f64::NAN, other_nan, f64::INFINITY, f64::NEG_INFINITY, f64::MIN_POSITIVE, 1.0];
    let reals = [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, 1.0];
    let texts = ["", " ", "a", "a ", "A", "ä", "a\u{308}", "1.0", "1.00"];
    // Before and after 2000, from where Postgres counts, and 1970, from where chrono counts.
    let times =
        [0, 1, 999, 1_000, 1_001, -1, -1_000, -1_001, -1_999, -2_000, 946_684_800_000_000_001, 946_684_799_999_999_999];
    let cases: [(&str, Vec<Value>); 5] = [
        ("double precision", doubles.map(PgValue::into_value).into()),
        ("real", reals.map(PgValue::into_value).into()),
        ("text", texts.map(PgValue::into_value).into()),
        ("bytea", texts.map(|text| text.as_bytes().to_vec().into_value()).into()),
        ("timestamptz", times.map(|time| DateTime::from_timestamp_nanos(time).into_value()).into()),
    ];
    for (ty, values) in cases {
        let distinct: BTreeSet<_> = values.iter().collect();
        assert_eq!(rows_in_a_key(&mut connection, ty, &values).await, distinct.len(), "{ty}: {values:?}");
    }
}
