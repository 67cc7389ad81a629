//! What the catalogue says about a table: whether operations on it may be fused, and what must keep its order.

mod sql;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use scriba_core::sqlstate;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{FromRow, Row, query_as};

use self::sql::{CAST, COLUMNS, INDEXES, LINKS, TABLE};
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
    /// What foreign keys ask of operations on connected tables.
    pub(crate) links: Links,
    /// Deleting a row changes rows of other tables.
    pub(crate) cascades: bool,
    /// Columns of integers that travel as what they are, and that no check, generated column, index or foreign key looks at:
    /// nobody sees the values between two adds.
    pub(crate) mergeable: u128,
    /// A key column has a length limit: assignment cuts off trailing spaces, so keys that differ here may be one there.
    pub(crate) limited_key: bool,
    /// A deferrable constraint stands on the table, one of its partitions, a foreign key that refers to it, or a table that
    /// its deletes and updates reach by foreign keys: an event may break it and heal it by itself. Known whatever
    /// `one_by_one` says.
    #[cfg_attr(not(test), expect(dead_code, reason = "isolation of a failed batch is to ask for it"))]
    pub(crate) deferrable: bool,
}

/// What an operation must not pass on a table that a foreign key connects with its own, so far as its values do not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Links {
    /// Foreign keys that values say all of: the column, and the identity of the keys it refers to.
    pub(crate) followed: Vec<(usize, u32)>,
    /// Columns of all other foreign keys.
    pub(crate) unfollowed: u128,
    /// Inserts meet a foreign key, from the table or to it, of which values do not say all.
    pub(crate) inserts: bool,
    /// Foreign keys refer to the table.
    pub(crate) referenced: bool,
    /// The key is not the one by which operations of another struct on this table would be told apart.
    pub(crate) odd_key: bool,
}

/// Why the facts of a table could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FactsError {
    /// The database did not answer.
    #[error("reading the catalogue: {0}")]
    Database(#[from] sqlx::Error),
    /// The table does not fit the struct: what is wrong and what to do, under the code that a statement would have met.
    #[error("{1}")]
    Mismatch(&'static str, String),
}

/// Facts of the tables met so far, by the address of their meta. Dropped where a statement failed, since the schema may
/// have changed.
///
/// A schema that others change is noticed when the facts have reached their age.
#[derive(Debug, Default)]
pub(crate) struct FactsCache {
    /// An operation was met that may change the schema.
    stale: AtomicBool,
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
        if self.stale.swap(false, Ordering::Relaxed) {
            self.tables.clear();
        }
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
        let known = self.tables.get(&address(meta)).filter(|_| !self.stale.load(Ordering::Relaxed));
        known.map(|known| &known.facts)
    }

    /// Forgets all facts, until they are read again.
    pub(crate) fn distrust(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    /// One number for each table and its key columns.
    fn identity(&mut self, identity: Identity) -> u32 {
        let next = u32::try_from(self.identities.len()).unwrap_or(u32::MAX);
        *self.identities.entry(identity).or_insert(next)
    }

    #[cfg(test)]
    pub(crate) fn insert(&mut self, meta: &'static TableMeta, facts: TableFacts) {
        self.tables.insert(address(meta), Known { read_at: Instant::now(), facts });
    }

    async fn read(&mut self, conn: &mut PgConnection, meta: &'static TableMeta) -> Result<TableFacts, FactsError> {
        let name = quoted_name(meta);
        let Some(table) = query_as::<_, TableRow>(TABLE).bind(&name).fetch_optional(&mut *conn).await? else {
            return Err(FactsError::Mismatch(
                sqlstate::UNDEFINED_TABLE,
                format!(
                    "there is no table {name}, or this role cannot see it: create it, or correct `name` and `schema` in #[table(…)]"
                ),
            ));
        };
        let columns = query_as::<_, ColumnRow>(COLUMNS).bind(table.oid).fetch_all(&mut *conn).await?;
        let own = own_columns(meta, &name, &columns)?;
        check_casts(conn, meta, &name).await?;
        let indexes = query_as::<_, IndexRow>(INDEXES).bind(table.oid).fetch_all(&mut *conn).await?;
        let foreign_keys = query_as::<_, LinkRow>(LINKS).bind(table.oid).fetch_all(&mut *conn).await?;

        let key: Vec<&ColumnRow> = meta.key.iter().map(|&column| own[column]).collect();
        let key_index = indexes.iter().position(|index| index.is_key(&key));
        let bits = |wanted: &dyn Fn(i16) -> bool| -> u128 {
            own.iter().enumerate().filter(|(_, column)| wanted(column.attnum)).map(|(bit, _)| 1 << bit).sum()
        };
        let second: Vec<&IndexRow> =
            indexes.iter().enumerate().filter(|(at, _)| Some(*at) != key_index).map(|(_, index)| index).collect();
        // A dependency on column 0 is one on the whole row, and one on a generated column may be one on any other.
        let generated = |number: i16| columns.iter().any(|column| column.attnum == number && column.computed);
        let looks_at =
            |uses: &[i16], number: i16| uses.iter().any(|&used| used == number || used == 0 || generated(used));
        let in_second = |number: i16| second.iter().any(|index| looks_at(&index.uses, number));
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
        let primary = key_index.is_some_and(|at| indexes[at].primary);
        let links = self.links(table.oid, meta, &own, primary, &foreign_keys);
        Ok(TableFacts {
            identity: self.identity((table.oid, signature)),
            group: u32::try_from(table.component).unwrap_or(u32::MAX),
            one_by_one,
            in_order: !second.is_empty() || omitted().any(|column| column.volatile),
            unique: bits(&in_second),
            second_unique: !second.is_empty(),
            referenced: bits(&|number| {
                foreign_keys.iter().any(|link| link.parent == table.oid && looks_at(&link.referenced, number))
            }),
            links,
            cascades: table.cascades,
            mergeable: own
                .iter()
                .zip(meta.columns)
                .enumerate()
                .filter(|(_, (column, meta))| column.unwatched && column.adds_like(meta))
                .fold(0, |mask, (bit, _)| mask | 1 << bit),
            limited_key: key.iter().any(|column| column.limited),
            deferrable: table.deferrable,
        })
    }

    /// `primary`: the key is the table's primary key.
    fn links(
        &mut self,
        oid: i64,
        meta: &'static TableMeta,
        own: &[&ColumnRow],
        primary: bool,
        foreign_keys: &[LinkRow],
    ) -> Links {
        let as_they_are = |at: usize| own[at].holds_what_travels(&meta.columns[at]);
        let mut links = Links {
            odd_key: !primary
                || !meta.key.iter().all(|&at| as_they_are(at))
                || !meta.key.is_sorted_by_key(|&at| own[at].attnum),
            ..Links::default()
        };
        for link in foreign_keys {
            if link.parent == oid {
                links.referenced = true;
                links.inserts |= !link.alike || meta.key.len() != 1 || own[meta.key[0]].attnum != link.referenced[0];
            }
            if link.child == oid {
                let columns = || (0..own.len()).filter(|&at| link.columns.contains(&own[at].attnum));
                match columns().next() {
                    Some(at) if link.alike && as_they_are(at) => {
                        let refers_to = (link.parent, vec![(link.referenced[0], meta.columns[at].kind)]);
                        links.followed.push((at, self.identity(refers_to)));
                    }
                    // One outside the struct may be generated from any of its columns.
                    _ if columns().count() < link.columns.len() => {
                        links.inserts = true;
                        links.unfollowed = u128::MAX;
                    }
                    _ => {
                        links.inserts = true;
                        links.unfollowed = columns().fold(links.unfollowed, |mask, at| mask | 1 << at);
                    }
                }
            }
        }
        links
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
                FactsError::Mismatch(sqlstate::UNDEFINED_COLUMN, format!(
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
            match query_as(CAST).bind(cast).fetch_one(&mut *conn).await? {
                (true, false) => continue,
                (true, true) => {
                    "has a length, to which values would be cut off silently: leave the cast out, or name a type without one"
                }
                (false, _) => "is no type that the database knows: create it, or correct the cast",
            }
        };
        return Err(FactsError::Mismatch(
            sqlstate::UNDEFINED_OBJECT,
            format!("column {:?} of table {name}: #[table(cast = {cast:?})] {problem}", column.name),
        ));
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
    /// From other columns.
    computed: bool,
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
        matches!(meta.kind, ValueKind::I16 | ValueKind::I32 | ValueKind::I64) && self.holds_what_travels(meta)
    }

    /// Whether the column is of the very type as which its values travel.
    fn holds_what_travels(&self, meta: &ColumnMeta) -> bool {
        let same: &[&str] = match meta.kind {
            ValueKind::Bool => &["bool"],
            ValueKind::I16 => &["int2"],
            ValueKind::I32 => &["int4"],
            ValueKind::I64 => &["int8"],
            ValueKind::F32 => &["float4"],
            ValueKind::F64 => &["float8"],
            ValueKind::Text => &["text", "varchar"],
            ValueKind::Bytes => &["bytea"],
            ValueKind::Uuid => &["uuid"],
            ValueKind::Date => &["date"],
            ValueKind::Timestamp => &["timestamptz"],
        };
        meta.cast.is_none() && self.built_in && same.contains(&self.type_name.as_str())
    }
}

row! {
struct IndexRow {
    primary: bool,
    /// Unique, valid, immediate, over all rows, over columns only, with the equality of the types themselves.
    plain: bool,
    /// Key columns.
    keys: Vec<i16>,
    /// All columns that its entries depend on; 0 for the whole row.
    uses: Vec<i16>,
}
}

row! {
/// A foreign key; see [`LINKS`].
struct LinkRow {
    child: i64,
    parent: i64,
    columns: Vec<i16>,
    referenced: Vec<i16>,
    alike: bool,
}
}

impl IndexRow {
    fn is_key(&self, key: &[&ColumnRow]) -> bool {
        self.plain && self.keys.len() == key.len() && key.iter().all(|column| self.keys.contains(&column.attnum))
    }
}
