//! Every SQL text. The only place where names become part of a text: all of them go through [`quoted`] or [`literal`].

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use crate::log::Columns;

/// A name as an SQL identifier.
pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A text as an SQL literal, whatever `standard_conforming_strings` says.
fn literal(text: &str) -> String {
    format!(" E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

/// A table as an SQL identifier.
pub(crate) fn table(schema: Option<&str>, table: &str) -> String {
    match schema {
        Some(schema) => format!("{}.{}", quoted(schema), quoted(table)),
        None => quoted(table),
    }
}

/// The table, by `$1`, a name as in SQL; and the server it is on.
pub(crate) const TABLE: &str = "
    select c.oid, n.nspname::text, c.relname::text, c.relkind::text,
           pg_is_in_recovery(), pg_postmaster_start_time(), current_database()::text, current_user::text,
           getdatabaseencoding() = 'SQL_ASCII',
           exists (with recursive part(oid) as (select c.oid union select i.inhrelid from pg_inherits i join part p on i.inhparent = p.oid)
                   select from pg_subscription_rel r join part on r.srrelid = part.oid)
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = to_regclass($1)";

/// In a database without an encoding texts are any bytes, which the server refuses to send as UTF-8.
pub(crate) const BYTES_AS_THEY_ARE: &str = "set client_encoding = 'SQL_ASCII'";

/// The columns of the table `$1`, domains as what they are made of.
pub(crate) const COLUMNS: &str = "
    select a.attname::text, format_type(coalesce(nullif(t.typbasetype, 0), t.oid), null), coalesce(b.typtype, t.typtype)::text, a.attnotnull
    from pg_attribute a join pg_type t on t.oid = a.atttypid left join pg_type b on b.oid = t.typbasetype
    where a.attrelid = $1 and a.attnum > 0 and not a.attisdropped";

/// What stands in front of the sequence `s` with its parameters `q`.
macro_rules! sequence {
    ($from:literal) => {
        concat!(
            "select distinct s.oid, s.oid::regclass::text, q.seqincrement, q.seqcache, q.seqcycle, s.relpersistence::text, q.seqmin, q.seqstart, s.relkind::text from ",
            $from
        )
    };
}

/// The sequence by `$1`, a name as in SQL.
pub(crate) const SEQUENCE_BY_NAME: &str =
    sequence!("pg_class s left join pg_sequence q on q.seqrelid = s.oid where s.oid = to_regclass($1)");

/// The sequences that the default or identity of the column `$2` of the table `$1` draws from.
pub(crate) const SEQUENCE_BY_COLUMN: &str = sequence!(
    "pg_attribute a
    join pg_depend d on (d.classid = 'pg_attrdef'::regclass and d.refclassid = 'pg_class'::regclass
                         and d.objid = (select oid from pg_attrdef where adrelid = a.attrelid and adnum = a.attnum))
      or (d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.refobjid = a.attrelid
          and d.refobjsubid = a.attnum and d.deptype = 'i')
    join pg_class s on s.relkind = 'S' and s.oid in (d.objid, d.refobjid)
    join pg_sequence q on q.seqrelid = s.oid
    where a.attrelid = $1 and a.attname = $2"
);

/// Whether an index starts with the column `$2` of the table `$1`.
pub(crate) const INDEXED: &str = "
    select exists (select from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
                   where i.indrelid = $1 and i.indpred is null and a.attname = $2)";

/// The cluster's id.
pub(crate) const SYSTEM_IDENTIFIER: &str = "
    select case when has_function_privilege('pg_control_system()', 'execute')
                then (select system_identifier from pg_control_system()) end,
           (select oid from pg_database where datname = current_database())";

/// The last number drawn from the sequence `$1`, and whether this role may know.
pub(crate) const LAST_DRAWN: &str = "
    select case when has_sequence_privilege($1::oid, 'select') then pg_sequence_last_value($1::oid::regclass) end,
           has_sequence_privilege($1::oid, 'select')";

/// Who holds the lock of the sequences `$1`, for people.
pub(crate) const HOLDERS: &str = "
    select k.virtualtransaction, k.pid, coalesce(a.application_name, ''), p.gid,
           coalesce(a.usename::text, p.owner::text, ''), a.client_addr::text, a.state,
           extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::bigint,
           case when k.pid is not null then pg_blocking_pids(k.pid) else '{}' end
    from pg_locks k left join pg_stat_activity a on a.pid = k.pid
    left join pg_locks x on k.pid is null and x.pid is null and x.virtualtransaction = k.virtualtransaction and x.locktype = 'transactionid'
    left join pg_prepared_xacts p on p.transaction = x.transactionid
    where k.locktype = 'relation' and k.mode = 'RowExclusiveLock' and k.granted and k.relation = any($1::oid[])
      and k.database = (select oid from pg_database where datname = current_database())
    order by coalesce(a.xact_start, p.prepared) nulls last, k.pid";

/// The texts that name the table.
#[derive(Clone, Debug)]
pub(crate) struct Texts {
    /// The evidence, `$1` the sequences. It looks at the rows first, by its snapshot, and then at the locks; its own
    /// virtual transaction has to show, or the view of the locks is not real.
    pub(crate) probe: SqlStr,
    /// All rows above `$1`, at most `$2`. It answers one row with what the server is even where there is none.
    pub(crate) page: SqlStr,
    /// Rows above `$1` up to `$2` of the types `$3`, at most `$4`; answers like `page`.
    pub(crate) filtered_page: SqlStr,
    /// The highest position.
    pub(crate) head: SqlStr,
    /// The lowest position.
    pub(crate) tail: SqlStr,
    /// The id at the position `$1`.
    pub(crate) id_at: SqlStr,
    /// Events of the types `$2` up to the position `$1`: type, number and first position, of the type that comes first.
    pub(crate) passed_over: SqlStr,
    /// The same of all but the types `$2`.
    pub(crate) passed_over_but: SqlStr,
}

impl Texts {
    /// For a table, by its SQL identifier. An enum for the type is read and compared as text.
    pub(crate) fn new(table: &str, columns: &Columns, type_is_enum: bool) -> Self {
        let column = |name: &str| format!("t.{}", quoted(name));
        let optional = |name: &Option<String>| name.as_deref().map_or("null".to_owned(), column);
        let position = column(&columns.position);
        let event_type = column(&columns.event_type) + if type_is_enum { "::text" } else { "" };
        let passed_over = |which: &str| {
            safe(format!(
                "select {event_type}, count(*), min({position})::int8 from {table} t
                 where {position} <= $1 and {event_type} {which} group by 1 order by 3 limit 1"
            ))
        };
        // The names are unlike any input column's, because `order by` prefers a name of the output.
        let selected = format!(
            "{position} as scriba_1, {} as scriba_2, {} as scriba_3, {event_type} as scriba_4, {} as scriba_5, {} as scriba_6, {} as scriba_7, {} as scriba_8",
            column(&columns.id),
            column(&columns.stream_id),
            column(&columns.data),
            optional(&columns.metadata),
            optional(&columns.occurred_at),
            optional(&columns.revision),
        );
        let page = |condition: &str, limit: &str| {
            safe(format!(
                "select g.boot, g.replica, e.* from (select pg_postmaster_start_time() as boot, pg_is_in_recovery() as replica) g
                 left join lateral (select {selected} from {table} t where {position} > $1{condition} order by {position} limit {limit}) e on true"
            ))
        };
        Self {
            probe: safe(format!(
                "select (select max({position})::int8 from {table} t) as l,
                        coalesce(array_agg(k.virtualtransaction) filter (where k.relation is not null), '{{}}') as holders,
                        coalesce(bool_or(k.locktype = 'virtualxid'), false) as canary,
                        pg_postmaster_start_time() as boot, pg_is_in_recovery() as replica
                 from pg_locks k
                 where (k.locktype = 'relation' and k.mode = 'RowExclusiveLock' and k.granted and k.relation = any($1::oid[])
                        and k.database = (select oid from pg_database where datname = current_database()))
                    or (k.locktype = 'virtualxid' and k.pid = pg_backend_pid())"
            )),
            page: page("", "$2"),
            filtered_page: page(&format!(" and {position} <= $2 and {event_type} = any($3)"), "$4"),
            head: safe(format!("select max({position})::int8 from {table} t")),
            tail: safe(format!("select min({position})::int8 from {table} t")),
            passed_over: passed_over("= any($2)"),
            passed_over_but: passed_over("<> all($2)"),
            id_at: safe(format!("select {} from {table} t where {position} = $1", column(&columns.id))),
        }
    }
}

/// A function and a trigger that notify a channel at every insert.
pub(crate) fn notify_trigger(schema: Option<&str>, name: &str, channel: &str) -> String {
    let function = table(schema, &format!("{name}_scriba_notify"));
    let table = table(schema, name);
    let channel = literal(channel);
    format!(
        "create or replace function {function}() returns trigger language plpgsql as
  $scriba$ begin perform pg_notify(tg_argv[0], ''); return null; end $scriba$;
create or replace trigger scriba_notify after insert on {table}
  for each statement execute function {function}({channel});
"
    )
}

/// Only texts made of constants and of names that went through [`quoted`] or [`literal`] come here.
fn safe(text: String) -> SqlStr {
    AssertSqlSafe(text).into_sql_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_quotes_and_backslashes_stay_names() {
        assert_eq!(table(Some("a\"b"), "t"), r#""a""b"."t""#);
        assert_eq!(literal(r"it's\"), r" E'it''s\\'");
        let trigger = notify_trigger(None, "Log", "it's");
        assert!(trigger.contains(r#"after insert on "Log""#) && trigger.contains("E'it''s'"), "{trigger}");
    }
}
