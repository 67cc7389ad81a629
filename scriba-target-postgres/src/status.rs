//! What any node can read of projections, whoever runs them.

use scriba_core::target::{StateRecord, StoredLease, StoredProjection, TargetError};
use scriba_core::{FailureClass, ProjectionId, State};
use sqlx::PgPool;
use sqlx::postgres::PgRow;

use crate::checkpoint::{get, optional_position, read};
use crate::names::Names;
use crate::sqlstate::target_error;

/// Everything stored of one projection, or of all of them. One without its cold row was reset and not started since.
pub(crate) const SELECT: &str = "\
    SELECT c.name, c.version, c.epoch, c.commit_no, c.watermark, c.last_position, c.last_event_id, \
        c.applied, c.skipped, c.dead_lettered, c.dead_letters_in_row, c.dead_letter_streams, c.event_types, p.replay_position, \
        coalesce(p.source_kind, '') AS source_kind, coalesce(p.source_fingerprint, '') AS source_fingerprint, \
        coalesce(p.state, 'stopped') AS state, p.halt_reason, p.halt_class, p.halt_code, p.degraded_since, p.last_error, p.head, \
        coalesce(p.source_keeps_position, false) AS source_keeps_position, \
        l.holder, l.expires_at < clock_timestamp() AS lapsed, \
        ARRAY(SELECT s.holder FROM scriba_standbys AS s \
            WHERE s.name = c.name AND s.version = c.version AND s.expires_at >= clock_timestamp() ORDER BY s.holder) AS standbys \
    FROM scriba_checkpoints AS c \
        LEFT JOIN scriba_projections AS p USING (name, version) \
        LEFT JOIN scriba_leases AS l USING (name, version) \
    WHERE $1::text IS NULL OR (c.name = $1 AND c.version = $2) \
    ORDER BY c.name, c.version";

/// One projection, or all of them.
pub(crate) async fn stored(
    pool: &PgPool,
    names: &Names,
    id: Option<&ProjectionId>,
) -> Result<Vec<StoredProjection>, TargetError> {
    let rows = sqlx::query(names.sql(SELECT))
        .bind(id.map(|id| &id.name))
        .bind(id.map(|id| i64::from(id.version)))
        .fetch_all(pool)
        .await
        .map_err(|error| target_error(&error, "reading what is stored of projections"))?;
    rows.iter().map(projection).collect()
}

/// A row of [`SELECT`].
pub(crate) fn projection(row: &PgRow) -> Result<StoredProjection, TargetError> {
    let (id, checkpoint, source) = read(row)?;
    let state: String = get(row, "state")?;
    let state = State::from_name(&state).ok_or_else(|| {
        TargetError::new(
            FailureClass::Structural,
            format!("the stored state {state:?} of {id} is none: correct the row"),
        )
    })?;
    let lease = match (get::<Option<String>>(row, "holder")?, get::<Option<bool>>(row, "lapsed")?) {
        (Some(holder), Some(true)) => StoredLease::Lapsed { holder },
        (Some(holder), _) => StoredLease::Held { holder },
        (None, _) => StoredLease::None,
    };
    let state = StateRecord {
        state,
        halt_reason: get(row, "halt_reason")?,
        halt_class: get::<Option<String>>(row, "halt_class")?.as_deref().and_then(FailureClass::from_name),
        halt_code: get(row, "halt_code")?,
        degraded_since: get(row, "degraded_since")?,
        last_error: get(row, "last_error")?,
        head: optional_position(row, "head")?,
        source_keeps_position: get(row, "source_keeps_position")?,
    };
    Ok(StoredProjection { id, checkpoint, source, state, lease, standbys: get(row, "standbys")? })
}
