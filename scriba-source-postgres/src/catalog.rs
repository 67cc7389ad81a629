//! What the table is: found in the catalogue at every start, and refused where events could be missed.

use chrono::{DateTime, Utc};
use scriba_core::source::SourceError;
use sqlx::postgres::PgConnection;
use sqlx::postgres::types::Oid;
use sqlx::{query, query_as, query_scalar};

use crate::error::answer;
use crate::log::PgLog;
use crate::sql::{self, Texts};

/// How the bytes of a column are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes as they are: text, `json`, `bytea`.
    Plain,
    /// A version byte, then text.
    Jsonb,
    /// A big-endian number of 2, 4 or 8 bytes.
    Integer,
    /// 16 bytes.
    Uuid,
    /// Read as text by the statement.
    Enum,
    /// Microseconds since 2000.
    Time,
}

/// What a column may be.
#[derive(Clone, Copy)]
enum Role {
    Position,
    Id,
    Type,
    Body,
    Time,
    Number,
}

impl Role {
    const fn supported(self) -> &'static str {
        match self {
            Self::Position => "bigint, integer",
            Self::Id => "text, character varying, uuid, bigint, integer, smallint",
            Self::Type => "text, character varying, an enum",
            Self::Body => "json, jsonb, text, character varying, bytea",
            Self::Time => "timestamp with time zone",
            Self::Number => "bigint, integer, smallint",
        }
    }

    fn kind(self, type_name: &str, is_enum: bool) -> Option<Kind> {
        Some(match (self, type_name) {
            (Self::Position | Self::Id | Self::Number, "bigint" | "integer")
            | (Self::Id | Self::Number, "smallint") => Kind::Integer,
            (Self::Id, "uuid") => Kind::Uuid,
            (Self::Id | Self::Type | Self::Body, "text" | "character varying") | (Self::Body, "json" | "bytea") => {
                Kind::Plain
            }
            (Self::Body, "jsonb") => Kind::Jsonb,
            (Self::Type, _) if is_enum => Kind::Enum,
            (Self::Time, "timestamp with time zone") => Kind::Time,
            _ => return None,
        })
    }
}

/// How the columns that come in several kinds are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kinds {
    pub(crate) id: Kind,
    pub(crate) stream_id: Kind,
    pub(crate) data: Kind,
    pub(crate) metadata: Kind,
}

/// The sequence that positions are drawn from.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) oid: Oid,
    pub(crate) name: String,
    pub(crate) step: i64,
    pub(crate) lowest: i64,
}

/// The table as the catalogue describes it.
#[derive(Clone, Debug)]
pub(crate) struct Catalog {
    /// `schema.table`, for people.
    pub(crate) name: String,
    pub(crate) kinds: Kinds,
    pub(crate) sequence: Sequence,
    pub(crate) texts: Texts,
    /// When the server started: another time is another server, or a crash.
    pub(crate) boot: DateTime<Utc>,
    oid: Oid,
    position_column: String,
    database: String,
    role: String,
    standby: bool,
}

type TableRow = (Oid, String, String, String, bool, DateTime<Utc>, String, String, bool, bool);
type SequenceRow = (Oid, String, Option<i64>, Option<i64>, Option<bool>, String, Option<i64>, Option<i64>, String);

impl Catalog {
    /// Reads the catalogue.
    ///
    /// # Errors
    /// `Unusable` where the table does not fit the settings, or events of it could be missed.
    pub(crate) async fn read(log: &PgLog, connection: &mut PgConnection) -> Result<Self, SourceError> {
        let identifier = sql::table(log.schema.as_deref(), &log.table);
        let looked_up: Option<TableRow> = answer(
            &log.name(),
            "look up the table",
            query_as(sql::TABLE).bind(&identifier).fetch_optional(&mut *connection),
        )
        .await?;
        let Some((oid, schema, table, relkind, standby, boot, database, role, no_encoding, subscribed)) = looked_up
        else {
            return Err(SourceError::unusable(format!(
                "event log {identifier}: there is no such table: create it, or name schema and table as the catalogue has them (case matters; without a schema the search path decides)"
            )));
        };
        let name = format!("{schema}.{table}");
        let refuse = |why: String| SourceError::unusable(format!("event log {name}: {why}"));
        if !matches!(relkind.as_str(), "r" | "p") {
            let what = match relkind.as_str() {
                "v" => "a view",
                "m" => "a materialized view",
                "f" => "a foreign table",
                _ => "no table",
            };
            return Err(refuse(format!(
                "it is {what}, which has no sequence that shows open appends: name the table that events are inserted into"
            )));
        }
        if no_encoding {
            answer(&name, "set the encoding", query(sql::BYTES_AS_THEY_ARE).execute(&mut *connection)).await?;
        }
        if subscribed {
            return Err(refuse(
                "it is filled by a logical replication subscription, which commits in another order than positions were drawn: read the publisher's table".to_owned(),
            ));
        }
        let kinds_of: Vec<(String, String, String, bool)> =
            answer(&name, "read its columns", query_as(sql::COLUMNS).bind(oid).fetch_all(&mut *connection)).await?;
        let column = |name: &str, role: Role| {
            let Some((_, type_name, type_type, not_null)) = kinds_of.iter().find(|(column, ..)| column == name) else {
                let there: Vec<_> = kinds_of.iter().map(|(column, ..)| column.as_str()).collect();
                return Err(refuse(format!(
                    "it has no column {name:?} (it has: {}): name the columns in the settings of the log",
                    there.join(", ")
                )));
            };
            let kind = role.kind(type_name, type_type == "e").ok_or_else(|| {
                refuse(format!("column {name:?} is of type {type_name}; supported here: {}", role.supported()))
            })?;
            Ok((kind, *not_null))
        };
        let columns = &log.columns;
        let (_, not_null) = column(&columns.position, Role::Position)?;
        if !not_null {
            return Err(refuse(format!(
                "column {0:?} may be NULL, and an event without a position would never be read: ALTER TABLE {1} ALTER COLUMN {2} SET NOT NULL",
                columns.position,
                sql::table(Some(&schema), &table),
                sql::quoted(&columns.position),
            )));
        }
        let kinds = Kinds {
            id: column(&columns.id, Role::Id)?.0,
            stream_id: column(&columns.stream_id, Role::Id)?.0,
            data: column(&columns.data, Role::Body)?.0,
            metadata: columns.metadata.as_deref().map_or(Ok(Kind::Plain), |name| Ok(column(name, Role::Body)?.0))?,
        };
        let event_type = column(&columns.event_type, Role::Type)?.0;
        for (name, role) in [(&columns.occurred_at, Role::Time), (&columns.revision, Role::Number)] {
            if let Some(name) = name {
                column(name, role)?;
            }
        }

        let sequence = find_sequence(log, connection, oid, &name).await?;
        let texts = Texts::new(&sql::table(Some(&schema), &table), columns, event_type == Kind::Enum);
        let lowest: Option<i64> =
            answer(&name, "read the lowest position", query_scalar(texts.tail.clone()).fetch_one(&mut *connection))
                .await?;
        if let Some(lowest) = lowest.filter(|lowest| *lowest < 0) {
            return Err(refuse(format!(
                "there is an event at position {lowest}, and positions run from 0: renumber the events below 0"
            )));
        }
        let position_column = columns.position.clone();
        Ok(Self { name, kinds, sequence, texts, boot, oid, position_column, database, role, standby })
    }

    /// Whether the server is a standby, which shows no locks of the primary's transactions.
    pub(crate) fn is_standby(&self) -> bool {
        self.standby
    }

    /// Which store and table this is, stable over restarts and the same for every role.
    pub(crate) async fn fingerprint(&self, connection: &mut PgConnection) -> Result<String, SourceError> {
        let (system, database): (Option<i64>, Oid) =
            answer(&self.name, "read the system identifier", query_as(sql::SYSTEM_IDENTIFIER).fetch_one(connection))
                .await?;
        let system = match system {
            Some(system) => format!("system {}", system.cast_unsigned()),
            // A server that keeps its identifier to itself still numbers its databases.
            None => format!("database {}", database.0),
        };
        Ok(format!("{system}, {}, {}", self.database, self.name))
    }

    /// Refuses to go on from a position that this store has not reached: it was restored, or is another.
    pub(crate) async fn refuse_below(&self, connection: &mut PgConnection, after: i64) -> Result<(), SourceError> {
        let head: Option<i64> =
            answer(&self.name, "read the head", query_scalar(self.texts.head.clone()).fetch_one(&mut *connection))
                .await?;
        if head >= Some(after) {
            return Ok(());
        }
        let (last_drawn, readable): (Option<i64>, bool) = answer(
            &self.name,
            "read the sequence",
            query_as(sql::LAST_DRAWN).bind(self.sequence.oid).fetch_one(connection),
        )
        .await?;
        // Events may have been deleted; then the sequence is where it was.
        if last_drawn >= Some(after) {
            return Ok(());
        }
        let head = head.map_or("none, it is empty".to_owned(), |head| head.to_string());
        let sequence = &self.sequence.name;
        let drawn = match last_drawn {
            Some(last) => format!("the last number of sequence {sequence} is {last}"),
            None if readable => format!("no number was drawn from sequence {sequence}"),
            None => format!(
                "sequence {sequence} cannot be read, so a log whose events were deleted cannot be told from a restored one: GRANT SELECT ON SEQUENCE {sequence} TO {} if they were deleted",
                sql::quoted(&self.role)
            ),
        };
        Err(SourceError::unusable(format!(
            "event log {}: the checkpoint is at position {after}, the head of the log is below it ({head}), and {drawn}: the log was restored to an older state, or is another one; connect to the right one, or rebuild the projection under a new version",
            self.name
        )))
    }

    /// Says in the log of the program that pages will be slow.
    pub(crate) async fn warn_without_index(&self, connection: &mut PgConnection) -> Result<(), SourceError> {
        let indexed: bool = answer(
            &self.name,
            "look for an index",
            query_scalar(sql::INDEXED).bind(self.oid).bind(&self.position_column).fetch_one(connection),
        )
        .await?;
        if !indexed {
            let (log, column) = (&self.name, &self.position_column);
            tracing::warn!(target: "scriba", log, "no index starts with column {column:?}: every page reads the whole table; create a unique index on it");
        }
        Ok(())
    }
}

/// Resolves the sequence and refuses one that proves nothing.
async fn find_sequence(
    log: &PgLog,
    connection: &mut PgConnection,
    table: Oid,
    name: &str,
) -> Result<Sequence, SourceError> {
    let refuse = |why: String| SourceError::unusable(format!("event log {name}: {why}"));
    let doing = "look up the sequence of its positions";
    let column = &log.columns.position;
    let found: Vec<SequenceRow> = match &log.sequence {
        Some(sequence) => {
            answer(name, doing, query_as(sql::SEQUENCE_BY_NAME).bind(sequence).fetch_all(connection)).await?
        }
        None => {
            answer(name, doing, query_as(sql::SEQUENCE_BY_COLUMN).bind(table).bind(column).fetch_all(connection))
                .await?
        }
    };
    let (oid, sequence, step, cache, cycle, persistence, lowest, start) = match (found.as_slice(), &log.sequence) {
        ([(oid, sequence, Some(step), Some(cache), Some(cycle), persistence, Some(lowest), Some(start), _)], _) => {
            (*oid, sequence, *step, *cache, *cycle, persistence, *lowest, *start)
        }
        ([], None) => {
            return Err(refuse(format!(
                "column {column:?} draws from no sequence that the catalogue knows, so open appends cannot be seen: if the application draws its numbers from one, in the transaction that inserts the event, name it with PgLog::sequence"
            )));
        }
        ([], Some(sequence)) => {
            return Err(refuse(format!("there is no sequence {sequence}: name it as in SQL, with its schema")));
        }
        ([other], _) => {
            return Err(refuse(format!("{} is no sequence: name the one that {column:?} is drawn from", other.1)));
        }
        (several, _) => {
            let names: Vec<_> = several.iter().map(|row| row.1.as_str()).collect();
            return Err(refuse(format!(
                "column {column:?} depends on several sequences ({}): name the one it is drawn from with PgLog::sequence",
                names.join(", ")
            )));
        }
    };
    if cache != 1 {
        return Err(refuse(format!(
            "sequence {sequence} has CACHE {cache}: a session keeps numbers back that no open transaction shows, and appends them later: ALTER SEQUENCE {sequence} CACHE 1"
        )));
    }
    if cycle {
        return Err(refuse(format!(
            "sequence {sequence} cycles, so a later event could get a lower position: ALTER SEQUENCE {sequence} NO CYCLE"
        )));
    }
    if step < 1 {
        return Err(refuse(format!(
            "sequence {sequence} has INCREMENT {step}, and positions have to grow: ALTER SEQUENCE {sequence} INCREMENT 1 and set it above the highest position"
        )));
    }
    if persistence != "p" {
        return Err(refuse(format!(
            "sequence {sequence} is unlogged or temporary, so a crash of the server would draw numbers again: ALTER SEQUENCE {sequence} SET LOGGED (PostgreSQL 15), with a logged table"
        )));
    }
    if start < 0 {
        return Err(refuse(format!(
            "sequence {sequence} starts at {start}, and positions run from 0: ALTER SEQUENCE {sequence} MINVALUE 0 START 0 RESTART"
        )));
    }
    Ok(Sequence { oid, name: sequence.clone(), step, lowest })
}
