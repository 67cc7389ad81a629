//! What the catalogue says about a table: whether operations on it may be fused, and what must keep its order.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{FromRow, Row, query_as};

use crate::statement::quoted_name;
use crate::table::{ColumnMeta, TableMeta, ValueKind};

/// How long facts are believed before they are read again.
const MAX_AGE: Duration = Duration::from_mins(1);

/// What decides how operations on one table may be written. Column sets are bits by column index of the table's meta.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts are independent of each other")]
pub(crate) struct TableFacts {
    /// The same for all metas of one table whose keys can be compared with each other.
    pub(crate) identity: u32,
    /// The same for all tables that foreign keys connect, over any number of steps: the lowest oid among them.
    pub(crate) group: u32,
    /// Why nothing may be fused, or `None` where operations by key may.
    pub(crate) one_by_one: Option<&'static str>,
    /// Operations keep their order, because they share a second unique index or a default that counts up.
    pub(crate) in_order: bool,
    /// Columns of second unique and exclusion indexes, their expressions and predicates.
    pub(crate) unique: u128,
    /// A second unique or exclusion index exists.
    pub(crate) second_unique: bool,
    /// Columns that foreign keys refer to.
    pub(crate) referenced: u128,
    /// Deleting a row changes rows of other tables.
    pub(crate) cascades: bool,
    /// Columns of integers that travel as what they are, and that no check, generated column, index or foreign key looks at:
    /// nobody sees the values between two adds.
    pub(crate) mergeable: u128,
    /// A key column has a length limit: assignment cuts off trailing spaces, so keys that differ here may be one there.
    pub(crate) limited_key: bool,
}

/// Why the facts of a table could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FactsError {
    /// The database did not answer.
    #[error("reading the catalogue: {0}")]
    Database(#[from] sqlx::Error),
    /// The table does not fit the struct: what is wrong and what to do.
    #[error("{0}")]
    Mismatch(String),
}

/// Facts of the tables met so far, by the address of their meta. Dropped where a statement failed, since the schema may
/// have changed.
#[derive(Debug, Default)]
pub(crate) struct FactsCache {
    tables: FxHashMap<usize, Known>,
    identities: FxHashMap<Identity, u32>,
}

#[derive(Debug)]
struct Known {
    read_at: Instant,
    facts: TableFacts,
}

/// The table's oid, and number and kind of each key column: keys of the same identity are comparable on the client.
type Identity = (i64, Vec<(i16, ValueKind)>);

impl FactsCache {
    /// Reads the facts that are missing or too old.
    ///
    /// # Errors
    /// A missing table, column or type is an error that says what to do; the facts of other tables stay.
    pub(crate) async fn load(
        &mut self,
        conn: &mut PgConnection,
        tables: impl Iterator<Item = &'static TableMeta>,
    ) -> Result<(), FactsError> {
        let now = Instant::now();
        let mut last = None;
        for meta in tables {
            let address = address(meta);
            if last.replace(address) == Some(address) {
                continue;
            }
            if self.tables.get(&address).is_none_or(|known| now.duration_since(known.read_at) >= MAX_AGE) {
                let facts = self.read(conn, meta).await?;
                self.tables.insert(address, Known { read_at: now, facts });
            }
        }
        Ok(())
    }

    pub(crate) fn get(&self, meta: &'static TableMeta) -> Option<&TableFacts> {
        self.tables.get(&address(meta)).map(|known| &known.facts)
    }

    #[cfg(test)]
    pub(crate) fn insert(&mut self, meta: &'static TableMeta, facts: TableFacts) {
        self.tables.insert(address(meta), Known { read_at: Instant::now(), facts });
    }

    async fn read(&mut self, conn: &mut PgConnection, meta: &'static TableMeta) -> Result<TableFacts, FactsError> {
        let name = quoted_name(meta);
        let Some(table) = query_as::<_, TableRow>(TABLE).bind(&name).fetch_optional(&mut *conn).await? else {
            return Err(FactsError::Mismatch(format!(
                "there is no table {name}, or this role cannot see it: create it, or correct `name` and `schema` in #[table(…)]"
            )));
        };
        let columns = query_as::<_, ColumnRow>(COLUMNS).bind(table.oid).fetch_all(&mut *conn).await?;
        let own = own_columns(meta, &name, &columns)?;
        check_casts(conn, meta, &name).await?;
        let indexes = query_as::<_, IndexRow>(INDEXES).bind(table.oid).fetch_all(&mut *conn).await?;

        let key: Vec<&ColumnRow> = meta.key.iter().map(|&column| own[column]).collect();
        let key_index = indexes.iter().position(|index| index.is_key(&key));
        let bits = |wanted: &dyn Fn(i16) -> bool| -> u128 {
            own.iter().enumerate().filter(|(_, column)| wanted(column.attnum)).map(|(bit, _)| 1 << bit).sum()
        };
        let second: Vec<&IndexRow> =
            indexes.iter().enumerate().filter(|(at, _)| Some(*at) != key_index).map(|(_, index)| index).collect();
        // A dependency on column 0 is one on the whole row.
        let in_second =
            |number: i16| second.iter().any(|index| index.uses.iter().any(|&used| used == number || used == 0));
        let omitted = || columns.iter().filter(|column| !own.iter().any(|other| other.attnum == column.attnum));
        let comparable = meta.key.iter().all(|&at| own[at].compares_like(&meta.columns[at]));

        let one_by_one = if let Some(reason) = table.one_by_one() {
            Some(reason)
        } else if own.iter().any(|column| column.generated) {
            Some("a column of the struct is generated or an identity")
        } else if own.iter().any(|column| !column.fusible_type) {
            Some("a column has a type that is not fused")
        } else if omitted().any(|column| column.own_code) {
            Some("a column outside the struct has a default with code of its own")
        } else if key_index.is_none() {
            Some("no unique index covers exactly the key")
        } else if !comparable {
            Some("the key's type has an equality of its own")
        } else {
            None
        };

        let signature = key.iter().zip(meta.key).map(|(row, &at)| (row.attnum, meta.columns[at].kind)).collect();
        let next = u32::try_from(self.identities.len()).unwrap_or(u32::MAX);
        let identity = *self.identities.entry((table.oid, signature)).or_insert(next);
        Ok(TableFacts {
            identity,
            group: u32::try_from(table.component).unwrap_or(u32::MAX),
            one_by_one,
            in_order: !second.is_empty() || omitted().any(|column| column.volatile),
            unique: bits(&in_second),
            second_unique: !second.is_empty(),
            referenced: bits(&|number| table.referenced.contains(&number)),
            cascades: table.cascades,
            mergeable: own
                .iter()
                .zip(meta.columns)
                .enumerate()
                .filter(|(_, (column, meta))| column.unwatched && column.adds_like(meta))
                .fold(0, |mask, (bit, _)| mask | 1 << bit),
            limited_key: key.iter().any(|column| column.limited),
        })
    }
}

fn address(meta: &'static TableMeta) -> usize {
    std::ptr::from_ref(meta).addr()
}

/// The rows of the struct's columns, in its order.
fn own_columns<'a>(
    meta: &'static TableMeta,
    name: &str,
    columns: &'a [ColumnRow],
) -> Result<Vec<&'a ColumnRow>, FactsError> {
    meta.columns
        .iter()
        .map(|wanted| {
            columns.iter().find(|column| column.name == wanted.name).ok_or_else(|| {
                FactsError::Mismatch(format!(
                    "table {name} has no column {:?}: add it to the table, or correct #[table(column = \"…\")] on the struct's field",
                    wanted.name
                ))
            })
        })
        .collect()
}

/// A cast with a type modifier would cut values off where an assignment refuses them.
async fn check_casts(conn: &mut PgConnection, meta: &'static TableMeta, name: &str) -> Result<(), FactsError> {
    for column in meta.columns {
        let Some(cast) = column.cast else { continue };
        let problem = if cast.contains('(') {
            "has a length or precision, which would change values silently: name the type without it"
        } else {
            let (known,): (bool,) =
                query_as("SELECT pg_catalog.to_regtype($1) IS NOT NULL").bind(cast).fetch_one(&mut *conn).await?;
            if known {
                continue;
            }
            "is no type that the database knows: create it, or correct the cast"
        };
        return Err(FactsError::Mismatch(format!(
            "column {:?} of table {name}: #[table(cast = {cast:?})] {problem}",
            column.name
        )));
    }
    Ok(())
}

/// A struct read from a row by the names of its fields.
macro_rules! row {
    ($(#[$meta:meta])* struct $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        struct $name { $($(#[$doc])* $field: $type,)* }

        impl FromRow<'_, PgRow> for $name {
            fn from_row(row: &PgRow) -> sqlx::Result<Self> {
                Ok(Self { $($field: row.try_get(stringify!($field))?,)* })
            }
        }
    };
}

row! {
struct TableRow {
    oid: i64,
    component: i64,
    plain: bool,
    related: bool,
    reacts: bool,
    row_security: bool,
    references_itself: bool,
    deferrable: bool,
    checks_by_code: bool,
    shares_sequence: bool,
    cascade_reacts: bool,
    cascades: bool,
    referenced: Vec<i16>,
}
}

impl TableRow {
    fn one_by_one(&self) -> Option<&'static str> {
        [
            (!self.plain, "it is no plain table"),
            (self.related, "it is a partition, has partitions, or inherits"),
            (self.reacts, "it has a trigger or a rule"),
            (self.row_security, "row security binds this role"),
            (self.references_itself, "it refers to itself"),
            (self.deferrable, "a constraint is deferrable"),
            (self.checks_by_code, "a check calls a function that may read tables"),
            (self.shares_sequence, "it shares a sequence with another table"),
            (self.cascade_reacts, "deleting its rows sets off a trigger or a rule of another table"),
        ]
        .into_iter()
        .find_map(|(holds, reason)| holds.then_some(reason))
    }
}

row! {
struct ColumnRow {
    attnum: i16,
    name: String,
    /// The type, not looked through domains.
    type_name: String,
    fusible_type: bool,
    deterministic: bool,
    /// The type is one of Postgres itself.
    built_in: bool,
    limited: bool,
    generated: bool,
    volatile: bool,
    own_code: bool,
    /// No check, generated column, index or foreign key looks at it.
    unwatched: bool,
}
}

impl ColumnRow {
    /// Whether two values of `meta`'s kind are equal here exactly when they are equal on the client.
    fn compares_like(&self, meta: &ColumnMeta) -> bool {
        let same: &[&str] = match meta.kind {
            ValueKind::Bool => &["bool"],
            ValueKind::I16 | ValueKind::I32 | ValueKind::I64 => &["int2", "int4", "int8"],
            ValueKind::Text => &["text", "varchar"],
            ValueKind::Bytes => &["bytea"],
            ValueKind::Uuid => &["uuid"],
            ValueKind::Date => &["date"],
            ValueKind::Timestamp => &["timestamptz"],
            ValueKind::F32 | ValueKind::F64 => &[],
        };
        meta.cast.is_none() && self.deterministic && same.contains(&self.type_name.as_str())
    }

    /// Whether a sum is computed in the column's own type: one in a wider type is held against the limits of the column only
    /// at its end.
    fn adds_like(&self, meta: &ColumnMeta) -> bool {
        let same = match meta.kind {
            ValueKind::I16 => "int2",
            ValueKind::I32 => "int4",
            ValueKind::I64 => "int8",
            _ => return false,
        };
        meta.cast.is_none() && self.built_in && self.type_name == same
    }
}

row! {
struct IndexRow {
    /// Unique, valid, immediate, over all rows, over columns only, with the equality of the types themselves.
    plain: bool,
    /// Key columns.
    keys: Vec<i16>,
    /// All columns that its entries depend on; 0 for the whole row.
    uses: Vec<i16>,
}
}

impl IndexRow {
    fn is_key(&self, key: &[&ColumnRow]) -> bool {
        self.plain && self.keys.len() == key.len() && key.iter().all(|column| self.keys.contains(&column.attnum))
    }
}

/// One row for the table of that name, none where there is none.
///
/// `cascaded` holds the tables whose rows a delete or update here may change through foreign keys; `component`
/// those that foreign keys connect in either direction. Functions in C count as built in: they do not read tables.
const TABLE: &str = r"
WITH RECURSIVE
me AS (
    SELECT c.* , c.oid AS id FROM pg_catalog.pg_class c WHERE c.oid = pg_catalog.to_regclass($1)
),
component (id) AS (
    SELECT id FROM me
    UNION
    SELECT CASE WHEN f.conrelid = k.id THEN f.confrelid ELSE f.conrelid END
    FROM component k JOIN pg_catalog.pg_constraint f ON f.contype = 'f' AND k.id IN (f.conrelid, f.confrelid)
),
cascaded (id) AS (
    SELECT id FROM me
    UNION
    SELECT f.conrelid FROM cascaded k
    JOIN pg_catalog.pg_constraint f ON f.contype = 'f' AND f.confrelid = k.id
    WHERE f.confdeltype IN ('c', 'n', 'd') OR f.confupdtype IN ('c', 'n', 'd')
),
reacting (id) AS (
    SELECT tgrelid FROM pg_catalog.pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'D'
    UNION
    SELECT ev_class FROM pg_catalog.pg_rewrite WHERE ev_enabled <> 'D' AND ev_type <> '1'
)
SELECT me.id::int8 AS oid,
    (SELECT min(id::int8) FROM component) AS component,
    me.relkind = 'r' AS plain,
    me.relispartition OR EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE me.id IN (i.inhrelid, i.inhparent)) AS related,
    EXISTS (SELECT FROM reacting r WHERE r.id = me.id) AS reacts,
    pg_catalog.row_security_active(me.id) AS row_security,
    EXISTS (SELECT FROM pg_catalog.pg_constraint f
        WHERE f.contype = 'f' AND f.conrelid = me.id AND f.confrelid = me.id) AS references_itself,
    EXISTS (SELECT FROM pg_catalog.pg_constraint d
        WHERE d.condeferrable AND me.id IN (d.conrelid, d.confrelid)) AS deferrable,
    EXISTS (SELECT FROM pg_catalog.pg_constraint c
        JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::regclass AND d.objid = c.oid
            AND d.refclassid = 'pg_catalog.pg_proc'::regclass
        JOIN pg_catalog.pg_proc p ON p.oid = d.refobjid
        JOIN pg_catalog.pg_language l ON l.oid = p.prolang
        WHERE c.contype = 'c' AND c.conrelid = me.id AND p.provolatile <> 'i' AND l.lanname NOT IN ('internal', 'c')
    ) AS checks_by_code,
    EXISTS (SELECT FROM pg_catalog.pg_attrdef mine
        JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_attrdef'::regclass AND d.objid = mine.oid
            AND d.refclassid = 'pg_catalog.pg_class'::regclass
        JOIN pg_catalog.pg_class s ON s.oid = d.refobjid AND s.relkind = 'S'
        JOIN pg_catalog.pg_depend e ON e.classid = 'pg_catalog.pg_attrdef'::regclass AND e.refclassid = d.refclassid
            AND e.refobjid = s.oid
        JOIN pg_catalog.pg_attrdef other ON other.oid = e.objid AND other.adrelid <> mine.adrelid
        WHERE mine.adrelid = me.id) AS shares_sequence,
    EXISTS (SELECT FROM cascaded k JOIN reacting r ON r.id = k.id WHERE k.id <> me.id) AS cascade_reacts,
    EXISTS (SELECT FROM pg_catalog.pg_constraint f
        WHERE f.contype = 'f' AND f.confrelid = me.id AND f.confdeltype IN ('c', 'n', 'd')) AS cascades,
    ARRAY(SELECT pg_catalog.unnest(f.confkey) FROM pg_catalog.pg_constraint f
        WHERE f.contype = 'f' AND f.confrelid = me.id) AS referenced
FROM me";

/// One row for each column. `own_code` and `volatile` speak of the default that an insert without the column takes;
/// the functions of a default are read off its stored tree, since dependencies leave out the built-in ones; the columns that
/// checks, indexes and generated columns look at too, 0 for the whole row, since dependencies leave that one out. What a
/// foreign key refers to stands in an index.
const COLUMNS: &str = r"
WITH RECURSIVE
base (attnum, typ, domain, constrained, defaulted) AS (
    SELECT a.attnum, a.atttypid, false, false, false
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = $1::int8::oid AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT b.attnum, t.typbasetype, true,
        b.constrained OR t.typnotnull
            OR EXISTS (SELECT FROM pg_catalog.pg_constraint c WHERE c.contypid = t.oid),
        b.defaulted OR t.typdefault IS NOT NULL
    FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typ AND t.typtype = 'd'
),
called AS (
    SELECT d.adnum,
        bool_or(p.provolatile <> 'i' AND l.lanname NOT IN ('internal', 'c')) AS own_code,
        bool_or(p.provolatile = 'v') AS volatile
    FROM pg_catalog.pg_attrdef d,
        LATERAL pg_catalog.regexp_matches(d.adbin::text, ':(?:funcid|opfuncid) (\d+)', 'g') AS called (id)
        JOIN pg_catalog.pg_proc p ON p.oid = called.id[1]::oid
        JOIN pg_catalog.pg_language l ON l.oid = p.prolang
    WHERE d.adrelid = $1::int8::oid GROUP BY d.adnum
),
trees (tree) AS (
    SELECT c.conbin::text FROM pg_catalog.pg_constraint c WHERE c.conrelid = $1::int8::oid
    UNION ALL
    SELECT concat(i.indexprs::text, i.indpred::text) FROM pg_catalog.pg_index i WHERE i.indrelid = $1::int8::oid
    UNION ALL
    SELECT d.adbin::text FROM pg_catalog.pg_attrdef d WHERE d.adrelid = $1::int8::oid
)
SELECT a.attnum, a.attname::text AS name, declared.typname::text AS type_name,
    NOT b.constrained AND (t.typtype = 'e' OR t.typnamespace = 'pg_catalog'::regnamespace AND t.typname IN (
        'bool', 'int2', 'int4', 'int8', 'float4', 'float8', 'numeric', 'text', 'varchar', 'bpchar', 'bytea', 'uuid',
        'date', 'time', 'timestamp', 'timestamptz', 'interval', 'json', 'jsonb')) AS fusible_type,
    coalesce((SELECT l.collisdeterministic FROM pg_catalog.pg_collation l WHERE l.oid = a.attcollation), true)
        AND declared.typnamespace = 'pg_catalog'::regnamespace AS deterministic,
    declared.typnamespace = 'pg_catalog'::regnamespace AS built_in,
    a.atttypmod <> -1 AS limited,
    a.attidentity <> '' OR a.attgenerated <> '' AS generated,
    a.attidentity <> '' OR coalesce(called.volatile, false) AS volatile,
    b.constrained OR b.defaulted OR coalesce(called.own_code, false) AND a.attgenerated = '' AS own_code,
    NOT EXISTS (SELECT FROM trees WHERE tree ~ (':varattno (0|' || a.attnum || ') '))
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_index i
            WHERE i.indrelid = a.attrelid AND a.attnum = ANY (i.indkey::int2[]))
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint f
            WHERE f.contype = 'f' AND f.conrelid = a.attrelid AND a.attnum = ANY (f.conkey)) AS unwatched
FROM base b
    JOIN pg_catalog.pg_type t ON t.oid = b.typ AND t.typtype <> 'd'
    JOIN pg_catalog.pg_attribute a ON a.attrelid = $1::int8::oid AND a.attnum = b.attnum
    JOIN pg_catalog.pg_type declared ON declared.oid = a.atttypid
    LEFT JOIN called ON called.adnum = a.attnum
ORDER BY a.attnum";

/// One row for each unique or exclusion index. One that is not valid yet keeps rows out already.
const INDEXES: &str = r"
SELECT i.indisunique AND NOT i.indisexclusion AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
        AND i.indexprs IS NULL
        AND NOT EXISTS (SELECT FROM pg_catalog.unnest(i.indcollation::oid[]) AS c (id)
            JOIN pg_catalog.pg_collation l ON l.oid = c.id WHERE NOT l.collisdeterministic)
        AND NOT EXISTS (SELECT FROM pg_catalog.unnest(i.indclass::oid[]) AS c (id)
            JOIN pg_catalog.pg_opclass o ON o.oid = c.id WHERE o.opcnamespace <> 'pg_catalog'::regnamespace)
        AS plain,
    ARRAY(SELECT k.number FROM pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)
        WHERE k.place <= i.indnkeyatts) AS keys,
    ARRAY(SELECT k.number FROM pg_catalog.unnest(i.indkey::int2[]) AS k (number) WHERE k.number > 0
        UNION
        SELECT d.refobjsubid::int2 FROM pg_catalog.pg_depend d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = i.indexrelid
            AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = i.indrelid) AS uses
FROM pg_catalog.pg_index i WHERE i.indrelid = $1::int8::oid AND (i.indisunique OR i.indisexclusion)";
