//! What the catalogue says, table by table, and what is said when it does not fit the struct.

use super::*;
use crate::facts::FactsError;

const ID_V: &[ColumnMeta] = &[column("id", ValueKind::I64), column("v", ValueKind::I64)];
static T: TableMeta = table("t", ID_V);
static T_W: TableMeta =
    table("t", &[column("id", ValueKind::I64), column("v", ValueKind::I64), column("w", ValueKind::I64)]);
static V_TEXT: TableMeta = table("t", &[column("id", ValueKind::I64), column("v", ValueKind::Text)]);
static TEXT_KEY: TableMeta = table("t", &[column("id", ValueKind::Text), column("v", ValueKind::I64)]);
static FLOAT_KEY: TableMeta = table("t", &[column("id", ValueKind::F64), column("v", ValueKind::I64)]);
static TIME_KEY: TableMeta = table("t", &[column("id", ValueKind::Timestamp), column("v", ValueKind::I64)]);
static UUID_AS_TEXT: TableMeta = table("t", &[cast("id", "uuid"), column("v", ValueKind::I64)]);

async fn facts(setup: &'static str, table: &'static TableMeta) -> Result<TableFacts, FactsError> {
    let mut place = Place::new(setup).await;
    let mut facts = FactsCache::default();
    facts.load(&mut place.conn, std::iter::once(table)).await?;
    Ok(facts.get(table).unwrap().clone())
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "a table")]
async fn what_keeps_a_table_from_being_fused() {
    let own_type = "a column has a type that is not fused";
    let own_equality = "the key's type has an equality of its own";
    let own_default = "a column outside the struct has a default with code of its own";
    let own_check = "a check calls a function that may read tables";
    let no_index = "no unique index covers exactly the key";
    let cases: &[(&'static str, &'static TableMeta, Option<&str>)] = &[
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)", &T, None),
        ("CREATE TABLE t (id int PRIMARY KEY, v smallint)", &T, None),
        ("CREATE UNLOGGED TABLE t (id bigint NOT NULL, v bigint, UNIQUE (id) INCLUDE (v))", &T, None),
        ("CREATE TABLE t (id text PRIMARY KEY, v bigint)", &TEXT_KEY, None),
        ("CREATE TABLE t (id varchar PRIMARY KEY, v bigint)", &TEXT_KEY, None),
        ("CREATE TABLE t (id timestamptz PRIMARY KEY, v bigint)", &TIME_KEY, None),
        ("CREATE TYPE e AS ENUM ('a'); CREATE TABLE t (id bigint PRIMARY KEY, v e)", &V_TEXT, None),
        ("CREATE DOMAIN d AS numeric(5,2); CREATE TABLE t (id bigint PRIMARY KEY, v d)", &V_TEXT, None),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint, at timestamptz DEFAULT now(), n int DEFAULT 1 + 1)", &T, None),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint, w bigint GENERATED ALWAYS AS (v * 2) STORED)", &T, None),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint CHECK (abs(v) < 10))", &T, None),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint, u uuid DEFAULT gen_random_uuid(), c timestamptz DEFAULT clock_timestamp())", &T, None),
        ("CREATE SEQUENCE s; CREATE TABLE t (id bigint PRIMARY KEY, v bigint, n bigint DEFAULT nextval('s'))", &T, None),
        ("CREATE DOMAIN d AS bigint; CREATE TABLE t (id bigint PRIMARY KEY, v bigint, n d DEFAULT 1)", &T, None),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint, n bigint DEFAULT lastval())", &T, Some(own_default)),
        (
            "CREATE SEQUENCE s; CREATE TABLE t (id bigint PRIMARY KEY, v bigint, n bigint DEFAULT nextval('s'::text))",
            &T,
            Some(own_default),
        ),
        (
            "CREATE DOMAIN d AS bigint CHECK (value > 0); CREATE TABLE t (id bigint PRIMARY KEY, v bigint, n bigint DEFAULT 1::d)",
            &T,
            Some(own_default),
        ),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint CHECK (v > random()))", &T, Some(own_check)),
        (
            "CREATE DOMAIN d AS bigint CHECK (value > 0); CREATE TABLE t (id bigint PRIMARY KEY, v bigint CHECK (v::d > 0))",
            &T,
            Some(own_check),
        ),
        (
            "CREATE FUNCTION below(bigint, bigint) RETURNS bool STABLE LANGUAGE sql AS 'SELECT true';
             CREATE OPERATOR <<< (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = below);
             CREATE TABLE t (id bigint PRIMARY KEY, v bigint CHECK (v <<< 3::bigint))",
            &T,
            Some(own_check),
        ),
        (
            "CREATE TABLE t (id bigint PRIMARY KEY, v bigint, n bigint GENERATED ALWAYS AS IDENTITY);
             CREATE TABLE x (n bigint DEFAULT nextval('t_n_seq'))",
            &T,
            Some("it shares a sequence with another table"),
        ),
        (
            "CREATE TABLE x (n bigint GENERATED ALWAYS AS IDENTITY);
             CREATE TABLE t (id bigint PRIMARY KEY, v bigint, n bigint DEFAULT nextval('x_n_seq'))",
            &T,
            Some("it shares a sequence with another table"),
        ),
        ("CREATE TABLE x (id bigint, v bigint); CREATE VIEW t AS SELECT * FROM x", &T, Some("it is no plain table")),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint) PARTITION BY RANGE (id)", &T, Some("it is no plain table")),
        (
            "CREATE TABLE x (id bigint PRIMARY KEY, v bigint) PARTITION BY RANGE (id);
             CREATE TABLE t PARTITION OF x DEFAULT",
            &T,
            Some("it is a partition, has partitions, or inherits"),
        ),
        (
            "CREATE TABLE t (id bigint PRIMARY KEY, v bigint); CREATE TABLE x () INHERITS (t)",
            &T,
            Some("it is a partition, has partitions, or inherits"),
        ),
        (
            "CREATE TABLE t (id bigint PRIMARY KEY, v bigint); ALTER TABLE t ENABLE ROW LEVEL SECURITY;
             ALTER TABLE t FORCE ROW LEVEL SECURITY; CREATE ROLE bound_by_row_security; GRANT ALL ON t TO bound_by_row_security;
             SET ROLE bound_by_row_security",
            &T,
            Some("row security binds this role"),
        ),
        (
            "CREATE TABLE x (id bigint PRIMARY KEY);
             CREATE TABLE t (id bigint PRIMARY KEY, v bigint REFERENCES x DEFERRABLE)",
            &T,
            Some("a constraint is deferrable"),
        ),
        (
            "CREATE TABLE t (id bigint PRIMARY KEY, v bigint);
             CREATE TABLE x (id bigint PRIMARY KEY REFERENCES t DEFERRABLE)",
            &T,
            Some("a constraint is deferrable"),
        ),
        ("CREATE TABLE t (id bigint PRIMARY KEY DEFERRABLE, v bigint)", &T, Some("a constraint is deferrable")),
        (
            "CREATE TABLE t (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, v bigint)",
            &T,
            Some("a column of the struct is generated or an identity"),
        ),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v text[])", &V_TEXT, Some(own_type)),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v inet)", &V_TEXT, Some(own_type)),
        ("CREATE DOMAIN d AS text CHECK (value <> ''); CREATE TABLE t (id bigint PRIMARY KEY, v d)", &V_TEXT, Some(own_type)),
        ("CREATE DOMAIN d AS text NOT NULL; CREATE DOMAIN e AS d; CREATE TABLE t (id bigint PRIMARY KEY, v e)", &V_TEXT, Some(own_type)),
        ("CREATE TABLE t (id bigint, v bigint)", &T, Some(no_index)),
        ("CREATE TABLE t (id bigint, v bigint, PRIMARY KEY (id, v))", &T, Some(no_index)),
        ("CREATE TABLE t (id bigint, v bigint); CREATE UNIQUE INDEX ON t (id) WHERE v > 0", &T, Some(no_index)),
        ("CREATE TABLE t (id bigint, v bigint); CREATE UNIQUE INDEX ON t ((id + 0))", &T, Some(no_index)),
        ("CREATE TABLE t (id double precision PRIMARY KEY, v bigint)", &FLOAT_KEY, Some(own_equality)),
        ("CREATE TABLE t (id numeric PRIMARY KEY, v bigint)", &T, Some(own_equality)),
        ("CREATE TABLE t (id char(3) PRIMARY KEY, v bigint)", &TEXT_KEY, Some(own_equality)),
        ("CREATE DOMAIN d AS text; CREATE TABLE t (id d PRIMARY KEY, v bigint)", &TEXT_KEY, Some(own_equality)),
        ("CREATE TABLE t (id uuid PRIMARY KEY, v bigint)", &UUID_AS_TEXT, Some(own_equality)),
    ];
    for (setup, table, reason) in cases {
        assert_eq!(facts(setup, table).await.unwrap().one_by_one, *reason, "{setup}");
    }
}

#[tokio::test]
async fn a_deferrable_constraint_is_known_wherever_operations_reach_it_and_whatever_else_holds() {
    let t = "CREATE TABLE t (id bigint PRIMARY KEY, v bigint); ";
    for (more, deferrable) in [
        ("CREATE TABLE x (id bigint REFERENCES t)", false),
        ("CREATE TABLE x (id bigint REFERENCES t, n bigint UNIQUE DEFERRABLE)", false),
        ("ALTER TABLE t ADD UNIQUE (v) DEFERRABLE", true),
        ("CREATE TABLE x (id bigint REFERENCES t DEFERRABLE INITIALLY DEFERRED)", true),
        ("CREATE TABLE x (id bigint REFERENCES t ON DELETE SET NULL, n bigint UNIQUE DEFERRABLE)", true),
        ("CREATE TABLE x () INHERITS (t); ALTER TABLE t ADD UNIQUE (v) DEFERRABLE", true),
        (
            "DROP TABLE t; CREATE TABLE t (id bigint, v bigint) PARTITION BY LIST (v);
             CREATE TABLE t_1 PARTITION OF t (UNIQUE (id) DEFERRABLE) FOR VALUES IN (1)",
            true,
        ),
    ] {
        let mut place = Place::new(t).await;
        raw_sql(more).execute(&mut place.conn).await.unwrap_or_else(|error| panic!("{more}: {error}"));
        let mut facts = FactsCache::default();
        facts.load(&mut place.conn, std::iter::once(&T)).await.unwrap();
        assert_eq!(facts.get(&T).unwrap().deferrable, deferrable, "{more}");
    }
}

#[tokio::test]
async fn a_foreign_key_is_followed_where_one_column_holds_keys_as_they_travel() {
    static NARROW: TableMeta = table("t", &[column("id", ValueKind::I64), column("v", ValueKind::I32)]);
    static BY_V: TableMeta = TableMeta { schema: None, name: "t", columns: ID_V, key: &[1] };
    let p = "CREATE TABLE p (id bigint PRIMARY KEY, n bigint UNIQUE, c varchar UNIQUE, i int UNIQUE, UNIQUE (id, n)); ";
    let inserts = |links: &Links| (links.followed.len(), links.unfollowed, links.inserts);
    for (t, meta, expected) in [
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint REFERENCES p)", &T, (1, 0, false)),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v varchar REFERENCES p (c))", &V_TEXT, (1, 0, false)),
        ("CREATE TABLE t (id bigint PRIMARY KEY REFERENCES p, v bigint REFERENCES p)", &T, (2, 0, false)),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v int REFERENCES p)", &NARROW, (0, 0b10, true)),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v int REFERENCES p (i))", &T, (0, 0b10, true)),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v varchar(1) REFERENCES p (c))", &V_TEXT, (0, 0b10, true)),
        (
            "CREATE TABLE t (id bigint PRIMARY KEY, v bigint, FOREIGN KEY (v, id) REFERENCES p (id, n))",
            &T,
            (0, 0b11, true),
        ),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint, o bigint DEFAULT 1 REFERENCES p)", &T, (0, u128::MAX, true)),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); CREATE TABLE c (t bigint REFERENCES t)", &T, (0, 0, false)),
        ("CREATE TABLE t (id bigint PRIMARY KEY, v bigint); CREATE TABLE c (t int REFERENCES t)", &T, (0, 0, true)),
        (
            "CREATE TABLE t (id bigint PRIMARY KEY, v bigint UNIQUE); CREATE TABLE c (t bigint REFERENCES t (v))",
            &T,
            (0, 0, true),
        ),
    ] {
        let mut place = Place::new(p).await;
        raw_sql(t).execute(&mut place.conn).await.unwrap_or_else(|error| panic!("{t}: {error}"));
        let mut facts = FactsCache::default();
        facts.load(&mut place.conn, std::iter::once(meta)).await.unwrap();
        let links = &facts.get(meta).unwrap().links;
        assert_eq!(inserts(links), expected, "{t}");
        assert!(!links.odd_key, "{t}");
        assert_eq!(links.referenced, t.contains("TABLE c"), "{t}");
    }
    let odd = "CREATE TABLE t (id bigint PRIMARY KEY, v bigint UNIQUE)";
    assert!(facts(odd, &BY_V).await.unwrap().links.odd_key);
    assert!(facts("CREATE TABLE t (id int PRIMARY KEY, v bigint)", &T).await.unwrap().links.odd_key);
}

#[tokio::test]
async fn a_disabled_trigger_and_constant_or_stable_defaults_keep_nothing_in_order() {
    let facts = facts(
        "CREATE TABLE t (id bigint PRIMARY KEY, v bigint, a int DEFAULT 7, b text DEFAULT current_user, c timestamptz DEFAULT now());
         CREATE TRIGGER x AFTER INSERT ON t EXECUTE FUNCTION suppress_redundant_updates_trigger();
         ALTER TABLE t DISABLE TRIGGER x",
        &T,
    )
    .await
    .unwrap();
    assert_eq!((facts.one_by_one, facts.in_order), (None, false));
}

#[tokio::test]
async fn columns_of_second_unique_indexes_their_expressions_and_predicates_are_known() {
    for (index, columns) in [
        ("CREATE INDEX ON t (v)", None),
        ("CREATE UNIQUE INDEX ON t (id)", Some(0b001)),
        ("CREATE UNIQUE INDEX ON t (v)", Some(0b010)),
        // The catalogue does not say which columns, where there are none but in expressions.
        ("CREATE UNIQUE INDEX ON t (abs(v))", Some(0b111)),
        ("CREATE UNIQUE INDEX ON t (v) WHERE w > 0", Some(0b110)),
        ("ALTER TABLE t ADD EXCLUDE USING btree ((v + w) WITH =)", Some(0b110)),
        ("ALTER TABLE t ADD other int UNIQUE", Some(0)),
        ("ALTER TABLE t ADD n bigint GENERATED ALWAYS AS IDENTITY UNIQUE", Some(0)),
        ("ALTER TABLE t ADD g bigint GENERATED ALWAYS AS (v + 1) STORED UNIQUE", Some(0b111)),
    ] {
        let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint, w bigint)").await;
        raw_sql(index).execute(&mut place.conn).await.unwrap();
        let mut facts = FactsCache::default();
        facts.load(&mut place.conn, std::iter::once(&T_W)).await.unwrap();
        let facts = facts.get(&T_W).unwrap();
        assert_eq!(facts.second_unique.then_some(facts.unique), columns, "{index}");
        assert_eq!((facts.in_order, facts.one_by_one), (columns.is_some(), None), "{index}");
    }
}

#[tokio::test]
async fn adds_are_merged_on_integers_of_the_column_s_own_type_that_nothing_looks_at() {
    static NARROW: TableMeta = table("t", &[column("id", ValueKind::I64), column("v", ValueKind::I32)]);
    static FLOAT: TableMeta = table("t", &[column("id", ValueKind::I64), column("v", ValueKind::F64)]);
    static NUMERIC: TableMeta = table("t", &[column("id", ValueKind::I64), cast("v", "numeric")]);
    for (column, more, table, mergeable) in [
        ("bigint", "", &T, true),
        ("int", "", &NARROW, true),
        ("bigint NOT NULL DEFAULT 0", "CREATE VIEW w AS SELECT v FROM t", &T, true),
        ("bigint", "ALTER TABLE t ADD w bigint CHECK (w > 0) UNIQUE", &T, true),
        ("bigint", "CREATE TABLE x (id bigint REFERENCES t)", &T, true),
        ("int", "", &T, false),
        ("bigint", "", &NARROW, false),
        ("double precision", "", &FLOAT, false),
        ("numeric", "", &NUMERIC, false),
        ("d", "", &T, false),
        ("o.int8", "", &T, false),
        ("bigint CHECK (v > 0)", "", &T, false),
        ("bigint", "ALTER TABLE t ADD CHECK (id > 0 AND t IS NOT NULL)", &T, false),
        ("bigint", "ALTER TABLE t ADD g bigint GENERATED ALWAYS AS (v * 2) STORED", &T, false),
        ("bigint", "CREATE INDEX ON t (v)", &T, false),
        ("bigint", "CREATE INDEX ON t (id) INCLUDE (v)", &T, false),
        ("bigint", "CREATE INDEX ON t (id) WHERE v > 0", &T, false),
        ("bigint", "CREATE INDEX ON t ((v + id))", &T, false),
        ("bigint UNIQUE", "CREATE TABLE x (v bigint REFERENCES t (v))", &T, false),
        ("bigint", "CREATE TABLE x (id bigint PRIMARY KEY); ALTER TABLE t ADD FOREIGN KEY (v) REFERENCES x", &T, false),
    ] {
        let mut place = Place::new("CREATE DOMAIN d AS bigint; CREATE SCHEMA o; CREATE DOMAIN o.int8 AS bigint").await;
        let setup = format!("CREATE TABLE t (id bigint PRIMARY KEY, v {column}); {more}");
        raw_sql(AssertSqlSafe(setup)).execute(&mut place.conn).await.unwrap_or_else(|error| panic!("{more}: {error}"));
        let mut facts = FactsCache::default();
        facts.load(&mut place.conn, std::iter::once(table)).await.unwrap();
        assert_eq!(facts.get(table).unwrap().mergeable, u128::from(mergeable) << 1, "{column} {more}");
    }
}

#[tokio::test]
async fn what_does_not_fit_the_struct_is_an_error_that_says_what_to_do() {
    static CASTS: TableMeta = table("t", &[column("id", ValueKind::I64), cast("v", "numeric(5,2)")]);
    static CHARS: TableMeta = table("t", &[column("id", ValueKind::I64), cast("v", "char")]);
    static DOMAIN: TableMeta = table("t", &[column("id", ValueKind::I64), cast("v", "code")]);
    static UNKNOWN: TableMeta = table("t", &[column("id", ValueKind::I64), cast("v", "order_status")]);
    static QUOTED: TableMeta = table("o\"dd", ID_V);
    let t = "CREATE TABLE t (id bigint PRIMARY KEY, v numeric(5,2))";
    for (setup, table, message) in [
        (
            "",
            &T,
            "there is no table \"t\", or this role cannot see it: create it, or correct `name` and `schema` in #[table(…)]",
        ),
        (
            "CREATE TABLE t (id bigint PRIMARY KEY)",
            &T,
            "table \"t\" has no column \"v\": add it to the table, or correct #[table(column = \"…\")] on the struct's field",
        ),
        (
            t,
            &CASTS,
            "column \"v\" of table \"t\": #[table(cast = \"numeric(5,2)\")] has a length or precision, which would change values \
             silently: name the type without it",
        ),
        (
            t,
            &CHARS,
            "column \"v\" of table \"t\": #[table(cast = \"char\")] has a length, to which values would be cut off silently: leave \
             the cast out, or name a type without one",
        ),
        (
            "CREATE DOMAIN short AS varchar(5); CREATE DOMAIN code AS short; CREATE TABLE t (id bigint PRIMARY KEY, v code)",
            &DOMAIN,
            "column \"v\" of table \"t\": #[table(cast = \"code\")] has a length, to which values would be cut off silently: leave \
             the cast out, or name a type without one",
        ),
        (
            t,
            &UNKNOWN,
            "column \"v\" of table \"t\": #[table(cast = \"order_status\")] is no type that the database knows: create it, or \
             correct the cast",
        ),
    ] {
        assert_eq!(facts(setup, table).await.unwrap_err().to_string(), message);
    }
    assert!(facts("CREATE TABLE \"o\"\"dd\" (id bigint PRIMARY KEY, v bigint)", &QUOTED).await.is_ok());
}

#[tokio::test]
async fn facts_are_read_once() {
    let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
    let mut facts = FactsCache::default();
    facts.load(&mut place.conn, std::iter::once(&T)).await.unwrap();
    raw_sql("DROP TABLE t").execute(&mut place.conn).await.unwrap();
    facts.load(&mut place.conn, [&T, &T].into_iter()).await.unwrap();
    assert!(facts.get(&T).is_some());
    assert!(FactsCache::default().load(&mut place.conn, std::iter::once(&T)).await.is_err());
}

#[tokio::test]
async fn facts_are_read_again_behind_a_batch_that_may_change_the_schema() {
    for (text, again) in [
        ("UPDATE t SET v = 1", false),
        (" (select 1)", false),
        ("with x as (select 1) select * from x", false),
        ("ALTER TABLE t ADD w bigint", true),
        ("-- a comment\nSELECT 1", true),
        ("DO $$ BEGIN END $$", true),
        ("selects", true),
    ] {
        let mut place = Place::new("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        let mut facts = FactsCache::default();
        facts.load(&mut place.conn, std::iter::once(&T)).await.unwrap();
        plan(&events(&[crate::op::sql(text).into()]), &facts);
        raw_sql("DROP TABLE t").execute(&mut place.conn).await.unwrap();
        assert_eq!(facts.load(&mut place.conn, std::iter::once(&T)).await.is_err(), again, "{text}");
    }
}
