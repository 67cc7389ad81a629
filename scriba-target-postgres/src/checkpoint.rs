//! The checkpoint row: taking it over, moving it, and reading back why it did not move.

use std::fmt::Write as _;

use scriba_core::checkpoint::{Advance, Checkpoint, Counts, LastEvent, Replay};
use scriba_core::circuit::DeadLettersInRow;
use scriba_core::source::SourceIdentity;
use scriba_core::target::{Account, Shortfall, TakeOver, TakeOverError, TargetError};
use scriba_core::{EventId, FailureClass, Position, ProjectionId};
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{Arguments, Connection, PgConnection, Row};

use crate::names::{Names, literal, storable};
use crate::sqlstate::{out_of_range, structural_unless_transient, target_error, to_i64};
use crate::switch::Switch;
use crate::target::PgTarget;
use crate::{lease, status};

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

const CREATE: &str = "\
    INSERT INTO scriba_checkpoints (name, version, watermark, event_types) VALUES ($1, $2, $3, $4) \
    ON CONFLICT (name, version) DO NOTHING";

const CREATE_COLD: &str = "\
    INSERT INTO scriba_projections (name, version, source_kind, source_fingerprint) VALUES ($1, $2, $3, $4) \
    ON CONFLICT (name, version) DO NOTHING";

const RAISE_EPOCH: &str = "\
    UPDATE scriba_checkpoints SET epoch = epoch + $3, updated_at = clock_timestamp() WHERE name = $1 AND version = $2";

/// What a checkpoint that was reset begins with. Nothing else may be begun anew: a row that has moved is of events that are in the
/// read model.
const BEGIN_ANEW: &str = "\
    UPDATE scriba_checkpoints SET watermark = $3, event_types = $4 \
    WHERE name = $1 AND version = $2 AND commit_no = 0 AND watermark IS NULL";

const READ_BACK: &str = "SELECT epoch, commit_no FROM scriba_checkpoints WHERE name = $1 AND version = $2";

/// The checkpoint is locked against a take-over, so that what the next owner reads is what stays.
const STORE_REPLAY_POSITION: &str = "\
    WITH checkpoint AS MATERIALIZED ( \
        SELECT epoch FROM scriba_checkpoints WHERE name = $1 AND version = $2 FOR SHARE), \
    stored AS ( \
        UPDATE scriba_projections SET replay_position = $4, updated_at = clock_timestamp() \
        WHERE name = $1 AND version = $2 AND replay_position IS NULL \
            AND EXISTS (SELECT FROM checkpoint WHERE epoch = $3)) \
    SELECT epoch FROM checkpoint";

const CORRECT: &str = "\
    UPDATE scriba_checkpoints \
    SET applied = applied + $5, dead_lettered = dead_lettered + $6, dead_letters_in_row = $7, dead_letter_streams = $8 \
    WHERE name = $1 AND version = $2 AND epoch = $3 AND commit_no = $4";

const STORE_EVENT_TYPES: &str = "\
    UPDATE scriba_checkpoints SET event_types = $4, updated_at = clock_timestamp() \
    WHERE name = $1 AND version = $2 AND epoch = $3 RETURNING epoch";

/// The checkpoint under its new epoch, the source it was made from, and whether it was created.
pub(crate) struct Taken {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) source: SourceIdentity,
    pub(crate) created: bool,
}

/// Takes a projection over in one transaction. Everything is read by statements after the one that raises the epoch:
/// that one waits for a commit in doubt, and only a later snapshot sees what became of it.
pub(crate) async fn take_over(
    conn: &mut PgConnection,
    target: &PgTarget,
    request: &TakeOver<'_>,
) -> Result<Taken, TakeOverError> {
    let (id, names) = (request.id, target.names());
    let failed = |error: sqlx::Error| target_error(&error, &format!("taking projection {id} over"));
    let mut tx = conn.begin_with(BEGIN).await.map_err(failed)?;
    if let Some(owner) = request.owner
        && let Err(holder) = lease::renew(&mut tx, names, id, owner, request.lease).await.map_err(failed)?
    {
        return Err(TakeOverError::Held { holder });
    }
    let too_early =
        if target.breaks(Switch::ReadBeforeWaiting) { Some(select(&mut tx, names, id).await?) } else { None };
    let created = sqlx::query(names.sql(CREATE))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(request.initial.map(to_i64).transpose()?)
        .bind(request.event_types)
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    let first = sqlx::query(names.sql(CREATE_COLD))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(storable(&request.source.kind))
        .bind(storable(&request.source.fingerprint))
        .execute(&mut *tx)
        .await
        .map_err(failed)?
        .rows_affected()
        > 0;
    raise_epoch(&mut tx, names, id, i64::from(!target.breaks(Switch::KeepEpoch))).await.map_err(failed)?;
    let created = created.rows_affected() > 0;
    if created && !first {
        return Err(deleted(id).into());
    }
    let anew = first && !created && begin_anew(&mut tx, names, request).await?;
    let (_, mut checkpoint, source) = read(&select(&mut tx, names, id).await?)?;
    if let Some(row) = too_early {
        checkpoint = Checkpoint { epoch: checkpoint.epoch, ..read(&row)?.1 };
    }
    tx.commit().await.map_err(failed)?;
    Ok(Taken { checkpoint, source, created: created || anew })
}

/// Fences off every owner before, and waits for a commit of theirs that is in doubt.
pub(crate) async fn raise_epoch(
    conn: &mut PgConnection,
    names: &Names,
    id: &ProjectionId,
    raise_by: i64,
) -> sqlx::Result<()> {
    let raise = sqlx::query(names.sql(RAISE_EPOCH)).bind(&id.name).bind(i64::from(id.version)).bind(raise_by);
    raise.execute(conn).await.map(drop)
}

/// Gives a checkpoint that was reset what a new one is created with, and answers whether it was one.
async fn begin_anew(conn: &mut PgConnection, names: &Names, request: &TakeOver<'_>) -> Result<bool, TargetError> {
    let begun = sqlx::query(names.sql(BEGIN_ANEW))
        .bind(&request.id.name)
        .bind(i64::from(request.id.version))
        .bind(request.initial.map(to_i64).transpose()?)
        .bind(request.event_types)
        .execute(conn)
        .await
        .map_err(|error| target_error(&error, &format!("beginning projection {} anew", request.id)))?;
    Ok(begun.rows_affected() > 0)
}

async fn select(conn: &mut PgConnection, names: &Names, id: &ProjectionId) -> Result<PgRow, TargetError> {
    let row = sqlx::query(names.sql(status::SELECT)).bind(&id.name).bind(i64::from(id.version)).fetch_one(conn).await;
    row.map_err(|error| target_error(&error, &format!("taking projection {id} over")))
}

/// To begin anew would apply every event to a read model that holds them already.
fn deleted(id: &ProjectionId) -> TargetError {
    TargetError::new(
        FailureClass::Structural,
        format!(
            "the checkpoint of projection {id} was deleted while its row in scriba_projections is still there: restore it from a \
             backup; or, to rebuild from the beginning, empty the read model, delete that row too, and start again"
        ),
    )
}

/// The checkpoint in a row of [`status::SELECT`].
pub(crate) fn read(row: &PgRow) -> Result<(ProjectionId, Checkpoint, SourceIdentity), TargetError> {
    let (position, last_event_id): (Option<i64>, Option<String>) =
        (get(row, "last_position")?, get(row, "last_event_id")?);
    let last_event = match (position, last_event_id) {
        (Some(position), Some(id)) => Some(LastEvent { position: to_position(position)?, id: EventId::from(id) }),
        _ => None,
    };
    let checkpoint = Checkpoint {
        epoch: get(row, "epoch")?,
        commit_no: get(row, "commit_no")?,
        watermark: optional_position(row, "watermark")?,
        last_event,
        counts: Counts {
            applied: count(get(row, "applied")?)?,
            skipped: count(get(row, "skipped")?)?,
            dead_lettered: count(get(row, "dead_lettered")?)?,
        },
        in_row: DeadLettersInRow {
            count: count(get(row, "dead_letters_in_row")?)?,
            streams: get(row, "dead_letter_streams")?,
        },
        replay: replay(get(row, "replay_position")?)?,
        event_types: get(row, "event_types")?,
    };
    let source = SourceIdentity { kind: get(row, "source_kind")?, fingerprint: get(row, "source_fingerprint")? };
    let version = u32::try_from(get::<i64>(row, "version")?)
        .map_err(|_| TargetError::new(FailureClass::Structural, "a stored version is no version: correct the row"))?;
    Ok((ProjectionId::new(get::<String>(row, "name")?, version), checkpoint, source))
}

/// A column of a control table.
pub(crate) fn get<'r, T>(row: &'r PgRow, column: &str) -> Result<T, TargetError>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(column).map_err(|error| target_error(&error, "reading a control table"))
}

/// A nullable position of a control table.
pub(crate) fn optional_position(row: &PgRow, column: &str) -> Result<Option<Position>, TargetError> {
    get::<Option<i64>>(row, column)?.map(to_position).transpose()
}

/// -1 stands for having caught up with an empty source.
fn replay(stored: Option<i64>) -> Result<Replay, TargetError> {
    Ok(match stored {
        None => Replay::Ongoing,
        Some(-1) => Replay::Over(None),
        Some(position) => Replay::Over(Some(to_position(position)?)),
    })
}

/// A position of a control table.
pub(crate) fn to_position(value: i64) -> Result<Position, TargetError> {
    Position::from_i64(value).map_err(out_of_range)
}

/// A count of a control table.
pub(crate) fn count(value: i64) -> Result<u64, TargetError> {
    u64::try_from(value).map_err(|_| TargetError::new(FailureClass::Structural, format!("{value} is no count")))
}

/// The call that moves the checkpoint, as text: it shares a round trip with BEGIN, where binds cannot travel.
/// `expected` is the SQL of the commit number expected.
pub(crate) fn advance_call(
    id: &ProjectionId,
    advance: &Advance,
    in_row: &DeadLettersInRow,
    expected: &str,
) -> Result<String, TargetError> {
    let streams: Vec<String> = in_row.streams.iter().map(i64::to_string).collect();
    let (last_position, last_event_id) = match &advance.last_event {
        Some(last) => (to_i64(last.position)?.to_string(), literal(last.id.as_str())),
        None => ("NULL".to_owned(), "NULL".to_owned()),
    };
    let mut call = String::with_capacity(256);
    // Writing to a String cannot fail.
    let _ = write!(
        call,
        "SELECT scriba_advance({name}, {version}, {epoch}, {expected}, {watermark}, {last_position}, {last_event_id}, \
         {applied}, {skipped}, {dead_lettered}, {in_row}, '{{{streams}}}')",
        name = literal(&id.name),
        version = id.version,
        epoch = advance.epoch,
        watermark = to_i64(advance.watermark)?,
        applied = signed(advance.counts.applied)?,
        skipped = signed(advance.counts.skipped)?,
        dead_lettered = signed(advance.counts.dead_lettered)?,
        in_row = signed(in_row.count)?,
        streams = streams.join(","),
    );
    Ok(call)
}

fn signed(count: u64) -> Result<i64, TargetError> {
    i64::try_from(count).map_err(|_| TargetError::new(FailureClass::Structural, format!("{count} is no count")))
}

/// The same call with binds from a number on, for a statement that does everything at once.
pub(crate) fn gate(first: usize) -> String {
    const TYPES: [&str; 12] =
        ["text", "int8", "int8", "int8", "int8", "int8", "text", "int8", "int8", "int8", "int8", "int8[]"];
    let binds: Vec<String> =
        TYPES.iter().enumerate().map(|(at, sql_type)| format!("${}::{sql_type}", first + at)).collect();
    format!("scriba_advance({})", binds.join(", "))
}

/// Binds what [`gate`] asks for.
pub(crate) fn bind_gate(
    arguments: &mut PgArguments,
    id: &ProjectionId,
    advance: &Advance,
    in_row: &DeadLettersInRow,
) -> Result<(), TargetError> {
    let last = advance.last_event.as_ref();
    let numbers = [advance.epoch, advance.expected_commit_no, to_i64(advance.watermark)?];
    arguments.add(id.name.as_str()).map_err(encoding)?;
    arguments.add(i64::from(id.version)).map_err(encoding)?;
    for number in numbers {
        arguments.add(number).map_err(encoding)?;
    }
    arguments.add(last.map(|last| to_i64(last.position)).transpose()?).map_err(encoding)?;
    arguments.add(last.map(|last| storable(last.id.as_str()))).map_err(encoding)?;
    for count in [advance.counts.applied, advance.counts.skipped, advance.counts.dead_lettered, in_row.count] {
        arguments.add(signed(count)?).map_err(encoding)?;
    }
    arguments.add(&in_row.streams).map_err(encoding)?;
    Ok(())
}

/// Brings the checkpoint that this transaction has moved in line with what became of its events: `assumed` is what it was
/// moved by.
pub(crate) async fn correct(
    conn: &mut PgConnection,
    names: &Names,
    id: &ProjectionId,
    advance: &Advance,
    assumed: &Account,
    found: &Account,
) -> Result<(), TargetError> {
    let what = format!("correcting the checkpoint of {id}");
    let difference =
        |of: fn(Counts) -> u64| Ok::<i64, TargetError>(signed(of(found.counts()))? - signed(of(assumed.counts()))?);
    let corrected = sqlx::query(names.sql(CORRECT))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(advance.epoch)
        .bind(advance.expected_commit_no + 1)
        .bind(difference(|counts| counts.applied)?)
        .bind(difference(|counts| counts.dead_lettered)?)
        .bind(signed(found.in_row().count)?)
        .bind(&found.in_row().streams)
        .execute(conn)
        .await
        .map_err(|error| structural_unless_transient(target_error(&error, &what)))?;
    if corrected.rows_affected() == 1 {
        return Ok(());
    }
    Err(TargetError::new(FailureClass::Structural, format!("{what}: the row that was moved is not there any more")))
}

fn encoding(error: BoxDynError) -> TargetError {
    target_error(&sqlx::Error::Encode(error), "encoding the checkpoint")
}

/// How the row differs from what a commit expected of it.
pub(crate) async fn shortfall(
    conn: &mut PgConnection,
    names: &Names,
    id: &ProjectionId,
    advance: &Advance,
) -> sqlx::Result<Shortfall> {
    let row: Option<(i64, i64)> =
        sqlx::query_as(names.sql(READ_BACK)).bind(&id.name).bind(i64::from(id.version)).fetch_optional(conn).await?;
    Ok(match row {
        None => Shortfall::Missing,
        Some((found, _)) if found != advance.epoch => Shortfall::OtherEpoch { found, ours: advance.epoch },
        Some((epoch, found)) => Shortfall::OtherCommit { found, expected: advance.expected_commit_no, epoch },
    })
}

/// Stores the event types, and answers how the checkpoint differs from ours if it does.
pub(crate) async fn store_event_types(
    conn: &mut PgConnection,
    names: &Names,
    id: &ProjectionId,
    epoch: i64,
    types: Option<&[&str]>,
) -> sqlx::Result<Option<Shortfall>> {
    let stored: Option<i64> = sqlx::query_scalar(names.sql(STORE_EVENT_TYPES))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(epoch)
        .bind(types)
        .fetch_optional(&mut *conn)
        .await?;
    if stored.is_some() {
        return Ok(None);
    }
    let row: Option<(i64, i64)> =
        sqlx::query_as(names.sql(READ_BACK)).bind(&id.name).bind(i64::from(id.version)).fetch_optional(conn).await?;
    Ok(Some(row.map_or(Shortfall::Missing, |(found, _)| Shortfall::OtherEpoch { found, ours: epoch })))
}

/// Stores the replay position where there is none, and answers how the checkpoint differs from ours if it does.
pub(crate) async fn store_replay_position(
    conn: &mut PgConnection,
    names: &Names,
    id: &ProjectionId,
    epoch: i64,
    position: i64,
) -> sqlx::Result<Option<Shortfall>> {
    let found: Option<i64> = sqlx::query_scalar(names.sql(STORE_REPLAY_POSITION))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(epoch)
        .bind(position)
        .fetch_optional(conn)
        .await?;
    Ok(match found {
        None => Some(Shortfall::Missing),
        Some(found) if found != epoch => Some(Shortfall::OtherEpoch { found, ours: epoch }),
        Some(_) => None,
    })
}
