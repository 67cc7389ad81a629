//! The tables of the property test: schemas that break naive fusing, by family. Tables of one family can meet in the database:
//! by foreign keys, triggers, sequences, views, or by being the same table.

use super::*;

const NUMBERS: &[ColumnMeta] =
    &[column("id", ValueKind::I64), column("v", ValueKind::I64), column("w", ValueKind::I64)];
const BY_INT: &[ColumnMeta] = &[column("id", ValueKind::I32), column("v", ValueKind::I64), column("w", ValueKind::I64)];
const BY_TEXT: &[ColumnMeta] =
    &[column("id", ValueKind::Text), column("v", ValueKind::I64), column("w", ValueKind::I64)];
const BY_NUMERIC: &[ColumnMeta] = &[cast("id", "numeric"), column("v", ValueKind::I64), column("w", ValueKind::I64)];
const BY_INTERVAL: &[ColumnMeta] = &[cast("id", "interval"), column("v", ValueKind::I64), column("w", ValueKind::I64)];
const BY_FLOAT: &[ColumnMeta] =
    &[column("id", ValueKind::F64), column("v", ValueKind::F64), column("w", ValueKind::F32)];
const BY_TIME: &[ColumnMeta] =
    &[column("id", ValueKind::Timestamp), column("v", ValueKind::I64), column("w", ValueKind::I64)];
const TEXTS: &[ColumnMeta] =
    &[column("id", ValueKind::I64), column("v", ValueKind::Text), column("w", ValueKind::Text)];
const ENUMS: &[ColumnMeta] = &[column("id", ValueKind::I64), cast("v", "mood"), cast("w", "jsonb")];
const MEASURED: &[ColumnMeta] = &[column("id", ValueKind::I64), cast("v", "numeric"), cast("w", "varchar")];
const LISTS: &[ColumnMeta] = &[column("id", ValueKind::I64), cast("v", "int4[]"), cast("w", "json")];

/// Families in which operations on several tables share waves.
pub(super) const SHARING: std::ops::Range<usize> = 3..6;

/// Tables with columns `id`, `v` and `w`, of which `id` is the key unless said otherwise.
pub(super) static FAMILIES: &[&[&TableMeta]] = {
    const fn numbers(name: &'static str) -> TableMeta {
        table(name, NUMBERS)
    }
    static PLAIN: TableMeta = numbers("plain");
    static PLAIN_BY_NAME: TableMeta = TableMeta { schema: Some("public"), name: "plain", columns: NUMBERS, key: &[0] };
    static PLAIN_BY_INT: TableMeta = table("plain", BY_INT);
    static PLAIN_BY_V: TableMeta = TableMeta { schema: None, name: "plain", columns: NUMBERS, key: &[1] };
    static PLAIN_VIEW: TableMeta = numbers("a_view");
    &[
        &[&PLAIN, &PLAIN_BY_NAME, &PLAIN_BY_INT, &PLAIN_BY_V, &PLAIN_VIEW],
        &[&const { numbers("checked") }, &const { numbers("generated") }],
        &[&const { numbers("parent") }, &const { numbers("child") }, &const { numbers("a_grandchild") }],
        &[
            &const { numbers("m_order") },
            &const { numbers("z_line") },
            &const { numbers("a_detail") },
            &const { numbers("numbered") },
            &const { table("m_order", BY_INT) },
        ],
        &[
            &const { numbers("m_order") },
            &const { numbers("a_detail") },
            &const { numbers("b_unique") },
            &const { numbers("z_computed") },
            &const { TableMeta { schema: None, name: "z_line", columns: NUMBERS, key: &[1, 0] } },
        ],
        &[&const { table("m_code", BY_TEXT) }, &const { table("z_coded", TEXTS) }],
        &[&const { numbers("self") }, &const { numbers("self_cascade") }],
        &[&const { numbers("one_unique") }, &const { numbers("partial") }],
        &[&const { numbers("excluding") }, &const { numbers("booked") }],
        &[&const { numbers("counted") }, &const { numbers("always") }, &const { numbers("by_default") }],
        &[&const { numbers("z_shared") }, &const { numbers("a_shared") }, &const { numbers("m_shared") }],
        &[&const { numbers("z_late") }, &const { numbers("a_late") }],
        &[&const { numbers("watched") }, &const { numbers("before_row") }, &const { numbers("after_row") }],
        &[&const { numbers("ruled") }, &const { numbers("rule_target") }],
        &[&const { numbers("deferrable_unique") }],
        &[&const { numbers("m_deferred") }, &const { numbers("z_deferring") }],
        &[&const { numbers("m_reached") }, &const { numbers("z_reaching") }],
        &[&const { table("codes", BY_TEXT) }, &const { table("folded", BY_TEXT) }, &const { table("padded", BY_TEXT) }],
        &[&const { table("decimals", BY_NUMERIC) }, &const { table("spans", BY_INTERVAL) }],
        &[&const { table("floats", BY_FLOAT) }, &const { table("times", BY_TIME) }],
        &[&const { numbers("parted") }, &const { numbers("parted_low") }],
        &[&const { numbers("inherited") }, &const { numbers("inheriting") }],
        &[&const { table("enums", ENUMS) }, &const { table("measured", MEASURED) }, &const { table("lists", LISTS) }],
        &[&const { numbers("free_domain") }, &const { numbers("checked_domain") }],
        &[&const { numbers("nullable") }],
        &[&const { numbers("few") }, &const { numbers("coded_default") }, &const { numbers("operated") }],
    ]
};

pub(super) const SETUP: &str = r"
CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
CREATE TYPE mood AS ENUM ('calm', 'glad');
CREATE DOMAIN free AS bigint;
CREATE DOMAIN small AS bigint CHECK (value < 3);
CREATE TABLE plain (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE VIEW a_view AS SELECT * FROM plain;
CREATE TABLE checked (id int PRIMARY KEY, v smallint CHECK (v < 4), w bigint NOT NULL, twice bigint GENERATED ALWAYS AS (w * 2) STORED);
CREATE TABLE generated (id bigint PRIMARY KEY, v bigint, w bigint, g bigint GENERATED ALWAYS AS (9 / (v - 5)) STORED);
CREATE TABLE parent (id bigint PRIMARY KEY, v bigint, w bigint UNIQUE);
CREATE TABLE child (id bigint PRIMARY KEY, v bigint REFERENCES parent ON DELETE CASCADE,
    w bigint REFERENCES parent (w) ON UPDATE CASCADE ON DELETE SET NULL);
CREATE TABLE a_grandchild (id bigint PRIMARY KEY, v bigint REFERENCES child ON DELETE CASCADE, w bigint REFERENCES parent);
CREATE TABLE m_order (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE TABLE z_line (id bigint PRIMARY KEY, v bigint REFERENCES m_order, w bigint);
CREATE TABLE a_detail (id bigint PRIMARY KEY, v bigint REFERENCES z_line ON DELETE CASCADE, w bigint DEFAULT 1 REFERENCES m_order ON DELETE SET DEFAULT);
CREATE TABLE numbered (id bigint PRIMARY KEY, v bigint REFERENCES m_order, w bigint, n bigserial);
CREATE TABLE z_computed (id bigint PRIMARY KEY, v bigint, w bigint, g bigint GENERATED ALWAYS AS (v + 1) STORED UNIQUE REFERENCES m_order);
CREATE TABLE b_unique (id bigint PRIMARY KEY, v bigint REFERENCES a_detail, w bigint UNIQUE);
CREATE TABLE m_code (id varchar PRIMARY KEY, v bigint, w bigint);
CREATE TABLE z_coded (id bigint PRIMARY KEY, v varchar REFERENCES m_code, w varchar(1) REFERENCES m_code);
CREATE TABLE self (id bigint PRIMARY KEY, v bigint REFERENCES self, w bigint);
CREATE TABLE self_cascade (id bigint PRIMARY KEY, v bigint REFERENCES self_cascade ON DELETE CASCADE,
    w bigint REFERENCES self_cascade ON DELETE SET NULL);
CREATE TABLE one_unique (id bigint PRIMARY KEY, v bigint UNIQUE, w bigint);
CREATE TABLE partial (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE UNIQUE INDEX ON partial (v) WHERE w > 1;
CREATE TABLE excluding (id bigint PRIMARY KEY, v bigint, w bigint, EXCLUDE USING btree ((v + w) WITH =));
CREATE TABLE booked (id bigint PRIMARY KEY, v bigint, w bigint, EXCLUDE USING gist (int8range(v, v + 2) WITH &&) WHERE (w > 0));
CREATE TABLE counted (id bigint PRIMARY KEY, v bigint, w bigint, n bigserial);
CREATE TABLE always (id bigint PRIMARY KEY, v bigint, w bigint, n bigint GENERATED ALWAYS AS IDENTITY);
CREATE TABLE by_default (id bigint PRIMARY KEY, v bigint, w bigint, n bigint GENERATED BY DEFAULT AS IDENTITY);
CREATE TABLE z_shared (id bigint PRIMARY KEY, v bigint, w bigint, n bigint GENERATED ALWAYS AS IDENTITY);
CREATE TABLE a_shared (id bigint PRIMARY KEY, v bigint, w bigint, n bigint DEFAULT nextval('z_shared_n_seq'));
CREATE TABLE m_shared (id bigint PRIMARY KEY, v bigint, w bigint, n bigint DEFAULT nextval('z_shared_n_seq'));
CREATE SEQUENCE late;
CREATE TABLE z_late (id bigint PRIMARY KEY, v bigint, w bigint, n bigint DEFAULT nextval('late'::text));
CREATE TABLE a_late (id bigint PRIMARY KEY, v bigint, w bigint, n bigint DEFAULT nextval('late'::text));
CREATE TABLE seen (n bigserial, what text, rows bigint);
CREATE TABLE watched (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO seen (what, rows) SELECT TG_OP, count(*) FROM watched; RETURN NULL; END';
CREATE TRIGGER see AFTER INSERT OR UPDATE OR DELETE ON watched FOR EACH STATEMENT EXECUTE FUNCTION see();
CREATE TABLE before_row (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN NEW.w := NEW.w + (SELECT count(*) FROM before_row); RETURN NEW; END';
CREATE TRIGGER change BEFORE INSERT OR UPDATE ON before_row FOR EACH ROW EXECUTE FUNCTION change();
CREATE TABLE after_row (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE FUNCTION sum_up() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO seen (what, rows) SELECT TG_OP, sum(v) FROM after_row; RETURN NULL; END';
CREATE TRIGGER sum_up AFTER INSERT OR UPDATE OR DELETE ON after_row FOR EACH ROW EXECUTE FUNCTION sum_up();
CREATE TABLE ruled (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE TABLE rule_target (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE RULE also AS ON UPDATE TO ruled DO ALSO UPDATE rule_target SET v = v * 2 + (SELECT count(*) FROM ruled);
CREATE TABLE deferrable_unique (id bigint PRIMARY KEY, v bigint UNIQUE DEFERRABLE, w bigint);
CREATE TABLE m_deferred (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE TABLE z_deferring (id bigint PRIMARY KEY, v bigint REFERENCES m_deferred DEFERRABLE INITIALLY DEFERRED, w bigint);
CREATE TABLE m_reached (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE TABLE z_reaching (id bigint PRIMARY KEY, v bigint REFERENCES m_reached ON DELETE SET NULL,
    w bigint, UNIQUE (w) DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE codes (id varchar(1) PRIMARY KEY, v bigint, w bigint);
CREATE TABLE folded (id text COLLATE ci PRIMARY KEY, v bigint, w bigint);
CREATE TABLE padded (id char(3) PRIMARY KEY, v bigint, w bigint);
CREATE TABLE decimals (id numeric PRIMARY KEY, v bigint, w bigint);
CREATE TABLE spans (id interval PRIMARY KEY, v bigint, w bigint);
CREATE TABLE floats (id float8 PRIMARY KEY, v float8, w float4);
CREATE TABLE times (id timestamptz PRIMARY KEY, v bigint, w bigint);
CREATE TABLE parted (id bigint PRIMARY KEY, v bigint, w bigint) PARTITION BY RANGE (id);
CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (2);
CREATE TABLE parted_high PARTITION OF parted FOR VALUES FROM (2) TO (100);
CREATE TABLE inherited (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE TABLE inheriting (PRIMARY KEY (id)) INHERITS (inherited);
CREATE TABLE enums (id bigint PRIMARY KEY, v mood, w jsonb);
CREATE TABLE measured (id bigint PRIMARY KEY, v numeric(4, 2), w varchar(2));
CREATE TABLE lists (id bigint PRIMARY KEY, v int[], w json);
CREATE TABLE free_domain (id bigint PRIMARY KEY, v free, w bigint);
CREATE TABLE checked_domain (id bigint PRIMARY KEY, v small, w bigint);
CREATE TABLE nullable (id bigint UNIQUE, v bigint, w bigint);
CREATE TABLE few (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE FUNCTION few() RETURNS bool STABLE LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM few) < 4; END';
ALTER TABLE few ADD CHECK (few());
CREATE TABLE coded_default (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE FUNCTION next_n() RETURNS bigint STABLE LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM coded_default); END';
ALTER TABLE coded_default ADD n bigint DEFAULT next_n();
CREATE TABLE operated (id bigint PRIMARY KEY, v bigint, w bigint);
CREATE FUNCTION below(bigint, bigint) RETURNS bool STABLE LANGUAGE plpgsql AS
    'BEGIN RETURN $1 < $2 AND (SELECT count(*) FROM operated) < 4; END';
CREATE OPERATOR <<< (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = below);
ALTER TABLE operated ADD CHECK (id <<< 100::bigint);
";

/// Rows that operations find.
pub(super) const ROWS: &str = r"
INSERT INTO plain VALUES (0, 0, 0), (1, 1, 1); INSERT INTO checked VALUES (0, 0, 0), (1, 1, 1);
INSERT INTO generated VALUES (0, 0, 0), (1, 1, 1); INSERT INTO parent VALUES (0, 0, 0), (1, 1, 1), (2, 2, 2);
INSERT INTO child VALUES (0, 0, 0), (1, 1, 1); INSERT INTO a_grandchild VALUES (0, 0, 0);
INSERT INTO m_order VALUES (0, 0, 0); INSERT INTO z_line VALUES (0, 0, 0); INSERT INTO a_detail VALUES (0, 0, 0);
INSERT INTO m_code VALUES ('a', 0, 0); INSERT INTO z_coded VALUES (0, 'a', 'a');
INSERT INTO self VALUES (0, NULL, 0), (1, 0, 1); INSERT INTO self_cascade VALUES (0, NULL, NULL), (1, 0, NULL);
INSERT INTO one_unique VALUES (0, 1, 0), (1, 0, 1); INSERT INTO partial VALUES (0, 0, 0), (1, 1, 2);
INSERT INTO excluding VALUES (0, 0, 0), (1, 1, 1); INSERT INTO booked VALUES (0, 0, 1), (1, 2, 1);
INSERT INTO watched VALUES (0, 0, 0); INSERT INTO before_row VALUES (0, 0, 0); INSERT INTO after_row VALUES (0, 0, 0);
INSERT INTO ruled VALUES (0, 0, 0); INSERT INTO rule_target VALUES (0, 1, 0), (1, 1, 1);
INSERT INTO deferrable_unique VALUES (0, 0, 0), (1, 1, 1); INSERT INTO m_deferred VALUES (0, 0, 0);
INSERT INTO z_deferring VALUES (0, 0, 0); INSERT INTO m_reached VALUES (0, 0, 0), (1, 1, 1);
INSERT INTO z_reaching VALUES (0, 0, 0), (1, 1, 1); INSERT INTO codes VALUES ('a', 0, 0); INSERT INTO folded VALUES ('a', 0, 0);
INSERT INTO padded VALUES ('a', 0, 0); INSERT INTO decimals VALUES (1, 0, 0); INSERT INTO spans VALUES ('1 day', 0, 0);
INSERT INTO floats VALUES (0, 0, 0), ('NaN', 1, 1); INSERT INTO parted VALUES (0, 0, 0), (3, 1, 1);
INSERT INTO inherited VALUES (0, 0, 0); INSERT INTO inheriting VALUES (0, 1, 1); INSERT INTO enums VALUES (0, 'calm', '{}');
INSERT INTO measured VALUES (0, 1, 'a'); INSERT INTO lists VALUES (0, '{1}', '1'); INSERT INTO free_domain VALUES (0, 0, 0);
INSERT INTO checked_domain VALUES (0, 0, 0); INSERT INTO nullable VALUES (0, 0, 0), (NULL, 1, 1);
INSERT INTO few VALUES (0, 0, 0); INSERT INTO operated VALUES (0, 0, 0)";

/// Tables whose operations draw from sequences.
const COUNTING: [&str; 11] = [
    "numbered",
    "counted",
    "always",
    "by_default",
    "a_shared",
    "m_shared",
    "z_shared",
    "a_late",
    "z_late",
    "watched",
    "after_row",
];

/// Sequences count on over a rollback.
const RESET: &str = "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace";

/// The tables that operations on these may change, and what resets the sequences they draw from.
pub(super) fn reach(ops: &[Row<'_>]) -> (Vec<&'static str>, &'static str) {
    let named = |name: &str| {
        ops.iter().any(|(_, op)| match op {
            PgOp::Sql(sql) => sql.text.contains(name),
            op => table_of(op).is_some_and(|table| table.name == name),
        })
    };
    let families = FAMILIES.iter().filter(|family| family.iter().any(|table| named(table.name)));
    let mut tables: Vec<_> = families.copied().flatten().map(|table| table.name).chain(["seen"]).collect();
    tables.sort_unstable();
    tables.dedup();
    let counts = tables.iter().any(|table| COUNTING.contains(table));
    (tables, if counts { RESET } else { "" })
}

/// One of a few values for a column: some are equal to the database in spite of how they look, the last is refused by some
/// columns.
pub(super) fn value(table: &'static TableMeta, at: usize, n: usize) -> Value {
    let column = &table.columns[at];
    let key = table.key.contains(&at);
    let texts = match column.cast {
        None => ["a", "A", "a ", "b"],
        Some("mood") => ["calm", "glad", "calm", "sad"],
        Some("jsonb" | "json") => [r#"{"a": 1, "a": 2}"#, "[1.0]", "null", "{"],
        Some("varchar") => ["a", "a ", "b   ", "abc"],
        Some("int4[]") => ["{1,2}", "{}", "{NULL}", "1"],
        Some("interval") => ["1 day", "24:00", "1 mon", "30 days"],
        Some("numeric") if key => ["1", "1.0", "2", "1.00"],
        Some("numeric") => ["1", "1.005", "-0.00", "100"],
        Some(other) => panic!("no values for {other}"),
    };
    let small = i16::try_from(n).unwrap();
    let n = n % 4;
    match column.kind {
        ValueKind::I32 => Value::I32(small.into()),
        ValueKind::I64 => Value::I64(small.into()),
        ValueKind::F32 => Value::F32([0.1, f32::NAN, -0.0, f32::MAX][n]),
        ValueKind::F64 => Value::F64([0.0, -0.0, f64::NAN, f64::MAX][n]),
        ValueKind::Text => text(texts[n]),
        ValueKind::Timestamp => {
            let (seconds, nanos) = [(59, 0), (60, 0), (59, 1_001), (59, 1_000_000_000)][n];
            Value::Timestamp(chrono::DateTime::from_timestamp(seconds, nanos).unwrap())
        }
        other => panic!("no values of kind {other:?}"),
    }
}

/// Whether a column can be added to.
pub(super) fn adds(column: &ColumnMeta) -> bool {
    column.kind != ValueKind::Text || column.cast == Some("numeric")
}
