//! The dead-letter table.

use bytes::Bytes;
use chrono::{DateTime, Datelike, Utc};
use scriba_core::dead_letter::{DeadLetter, Failure, NewDeadLetter};
use scriba_core::target::{DeadLetterFilter, DeadLetterStats, TargetError};
use scriba_core::{EventId, EventType, ProjectionId, StreamId};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool};

use crate::checkpoint::{count, get, to_position};
use crate::names::{Names, storable};
use crate::sqlstate::{structural_unless_transient, target_error, to_i64};

const INSERT: &str = "\
    INSERT INTO scriba_dead_letters AS d (name, version, position, stream_id, event_type, event_id, data, metadata, \
        data_json, metadata_json, error_kind, error_message, error_detail, attempts, occurred_at) \
    SELECT $1, $2, u.position, u.stream_id, u.event_type, u.event_id, u.data, u.metadata, \
        scriba_readable_json(u.data), scriba_readable_json(u.metadata), u.kind, u.message, u.detail, u.attempts, u.occurred_at \
    FROM unnest($3::bigint[], $4::text[], $5::text[], $6::text[], $7::bytea[], $8::bytea[], $9::text[], $10::text[], \
            $11::text[], $12::bigint[], $13::timestamptz[]) \
        AS u (position, stream_id, event_type, event_id, data, metadata, kind, message, detail, attempts, occurred_at) \
    ON CONFLICT (name, version, position) DO UPDATE \
    SET stream_id = excluded.stream_id, event_type = excluded.event_type, event_id = excluded.event_id, \
        data = excluded.data, metadata = excluded.metadata, data_json = excluded.data_json, \
        metadata_json = excluded.metadata_json, error_kind = excluded.error_kind, \
        error_message = excluded.error_message, error_detail = excluded.error_detail, attempts = excluded.attempts, \
        occurred_at = excluded.occurred_at, failed_at = excluded.failed_at";

/// The beginning of the stream id stands in the condition as the index holds it.
const LIST: &str = "\
    SELECT id, position, stream_id, event_type, event_id, data, metadata, error_kind, error_message, error_detail, \
        attempts, occurred_at, failed_at \
    FROM scriba_dead_letters \
    WHERE name = $1 AND version = $2 \
        AND ($3::text IS NULL OR (stream_id = $3 AND left(stream_id, 200) = left($3, 200))) \
        AND ($4::text IS NULL OR error_kind = $4) \
        AND ($5::bigint IS NULL OR position >= $5) \
        AND ($6::bigint IS NULL OR position <= $6) \
        AND ($7::timestamptz IS NULL OR failed_at >= $7) \
        AND ($8::timestamptz IS NULL OR failed_at < $8)";

const ASCENDING: &str = "AND ($9::bigint IS NULL OR position > $9) ORDER BY position LIMIT $10";

const DESCENDING: &str = "AND ($9::bigint IS NULL OR position < $9) ORDER BY position DESC LIMIT $10";

const STATS: &str = "\
    SELECT error_kind, count(*) AS number, min(failed_at) AS oldest, max(failed_at) AS newest \
    FROM scriba_dead_letters WHERE name = $1 AND version = $2 \
    GROUP BY error_kind ORDER BY number DESC, error_kind";

const DELETE: &str = "DELETE FROM scriba_dead_letters WHERE name = $1 AND version = $2";

const DEFAULT_LIMIT: u32 = 100;

/// Writes the dead letters of a batch as one statement. Whatever text they hold can be stored; the bytes stay as they are.
///
/// # Errors
/// Never of the class integrity: a dead letter that cannot be written has nowhere to go.
pub(crate) async fn insert(
    conn: &mut PgConnection,
    names: &Names,
    id: &ProjectionId,
    letters: &[NewDeadLetter<'_>],
) -> Result<(), TargetError> {
    let texts = |of: for<'a> fn(&NewDeadLetter<'a>) -> &'a str| {
        letters.iter().map(|letter| storable(of(letter))).collect::<Vec<_>>()
    };
    let positions = letters.iter().map(|l| to_i64(l.event.position)).collect::<Result<Vec<_>, _>>()?;
    sqlx::query(names.sql(INSERT))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(positions)
        .bind(texts(|l| l.event.stream_id.as_str()))
        .bind(texts(|l| l.event.event_type.as_str()))
        .bind(texts(|l| l.event.id.as_str()))
        .bind(letters.iter().map(|l| &*l.event.data).collect::<Vec<&[u8]>>())
        .bind(letters.iter().map(|l| &*l.event.metadata).collect::<Vec<&[u8]>>())
        .bind(texts(|l| &l.failure.kind))
        .bind(texts(|l| &l.failure.message))
        .bind(texts(|l| &l.failure.detail))
        .bind(letters.iter().map(|l| i64::from(l.failure.attempts)).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.event.occurred_at.filter(storable_time)).collect::<Vec<_>>())
        .execute(conn)
        .await
        .map(drop)
        .map_err(|error| {
            let first = letters.first().map(|l| l.event.position);
            let mut error = structural_unless_transient(target_error(
                &error,
                &format!("writing {} dead letters of {id} from position {first:?} on", letters.len()),
            ));
            error.position = first.filter(|_| letters.len() == 1);
            error
        })
}

/// Within the range of `timestamptz`.
fn storable_time(time: &DateTime<Utc>) -> bool {
    (-4712..=294_275).contains(&time.year())
}

/// Dead letters that a filter lets through.
pub(crate) async fn list(
    pool: &PgPool,
    names: &Names,
    id: &ProjectionId,
    filter: &DeadLetterFilter,
) -> Result<Vec<DeadLetter>, TargetError> {
    let order = if filter.descending { DESCENDING } else { ASCENDING };
    let rows = sqlx::query(names.sql(&format!("{LIST} {order}")))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(filter.stream_id.as_ref().map(|stream| storable(stream.as_str())))
        .bind(filter.kind.as_deref().map(storable))
        .bind(filter.from_position.map(to_i64).transpose()?)
        .bind(filter.to_position.map(to_i64).transpose()?)
        .bind(filter.since)
        .bind(filter.until)
        .bind(filter.after.map(to_i64).transpose()?)
        .bind(i64::from(filter.limit.unwrap_or(DEFAULT_LIMIT)))
        .fetch_all(pool)
        .await
        .map_err(|error| target_error(&error, &format!("reading dead letters of {id}")))?;
    rows.iter().map(dead_letter).collect()
}

fn dead_letter(row: &PgRow) -> Result<DeadLetter, TargetError> {
    Ok(DeadLetter {
        id: get(row, "id")?,
        position: to_position(get(row, "position")?)?,
        stream_id: StreamId::from(get::<String>(row, "stream_id")?),
        event_type: EventType::from(get::<String>(row, "event_type")?),
        event_id: EventId::from(get::<String>(row, "event_id")?),
        data: Bytes::from(get::<Vec<u8>>(row, "data")?),
        metadata: Bytes::from(get::<Vec<u8>>(row, "metadata")?),
        failure: Failure {
            kind: get(row, "error_kind")?,
            message: get(row, "error_message")?,
            detail: get(row, "error_detail")?,
            attempts: u32::try_from(get::<i64>(row, "attempts")?).unwrap_or(u32::MAX),
        },
        occurred_at: get(row, "occurred_at")?,
        failed_at: get(row, "failed_at")?,
    })
}

/// Deletes all of a projection, and answers how many there were.
pub(crate) async fn delete(conn: &mut PgConnection, names: &Names, id: &ProjectionId) -> sqlx::Result<u64> {
    let deleted = sqlx::query(names.sql(DELETE)).bind(&id.name).bind(i64::from(id.version)).execute(conn).await?;
    Ok(deleted.rows_affected())
}

/// Dead letters counted.
pub(crate) async fn stats(pool: &PgPool, names: &Names, id: &ProjectionId) -> Result<DeadLetterStats, TargetError> {
    let rows: Vec<(String, i64, DateTime<Utc>, DateTime<Utc>)> = sqlx::query_as(names.sql(STATS))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .fetch_all(pool)
        .await
        .map_err(|error| target_error(&error, &format!("counting dead letters of {id}")))?;
    let mut stats = DeadLetterStats::default();
    for (kind, number, oldest, newest) in rows {
        let number = count(number)?;
        stats.total += number;
        stats.by_kind.push((kind, number));
        stats.oldest = stats.oldest.into_iter().chain([oldest]).min();
        stats.newest = stats.newest.into_iter().chain([newest]).max();
    }
    Ok(stats)
}
