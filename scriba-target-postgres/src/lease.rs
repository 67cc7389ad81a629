//! Leases, and the control connection that keeps them and the cold row.

use std::time::Duration;

use async_trait::async_trait;
use scriba_core::target::{Control, LeaseAnswer, Owner, StateRecord, TargetError};
use scriba_core::{FailureClass, ProjectionId};
use sqlx::PgConnection;
use tokio::time::timeout;

use crate::names::{Names, storable};
use crate::sqlstate::{target_error, to_i64};

/// The server gives a statement of the control connection up after this time.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// A standby asks again every two seconds or so: its note has to last until then, whatever the lease it asks for.
const SHORTEST_STANDBY: Duration = Duration::from_secs(10);

/// This side gives it up a little later: for a server that no longer answers at all.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(6);

const TAKE: &str = "\
    WITH taken AS ( \
        INSERT INTO scriba_leases AS l (name, version, owner, holder, expires_at) \
        VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5)) \
        ON CONFLICT (name, version) DO UPDATE \
        SET owner = excluded.owner, holder = excluded.holder, expires_at = clock_timestamp() + make_interval(secs => $5) \
        WHERE l.owner = excluded.owner OR l.expires_at < clock_timestamp() \
        RETURNING true AS taken), \
    ended AS ( \
        DELETE FROM scriba_standbys WHERE name = $1 AND version = $2 AND owner = $3 AND EXISTS (SELECT FROM taken)) \
    SELECT taken FROM taken";

/// Whoever holds it.
const SEIZE: &str = "\
    WITH ended AS (DELETE FROM scriba_standbys WHERE name = $1 AND version = $2 AND owner = $3) \
    INSERT INTO scriba_leases (name, version, owner, holder, expires_at) \
    VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5)) \
    ON CONFLICT (name, version) DO UPDATE \
    SET owner = excluded.owner, holder = excluded.holder, expires_at = clock_timestamp() + make_interval(secs => $5)";

/// Notes that the asker stands by, forgets those that have not asked for long, and answers who holds the lease.
const STAND_BY: &str = "\
    WITH noted AS ( \
        INSERT INTO scriba_standbys (name, version, owner, holder, expires_at) \
        VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5)) \
        ON CONFLICT (name, version, owner) DO UPDATE SET expires_at = excluded.expires_at), \
    forgotten AS ( \
        DELETE FROM scriba_standbys \
        WHERE name = $1 AND version = $2 AND owner <> $3 AND expires_at < clock_timestamp()) \
    SELECT holder, greatest(extract(epoch FROM expires_at - clock_timestamp()), 0)::float8 \
    FROM scriba_leases WHERE name = $1 AND version = $2";

const RENEW: &str = "\
    UPDATE scriba_leases SET expires_at = clock_timestamp() + make_interval(secs => $4) \
    WHERE name = $1 AND version = $2 AND owner = $3";

const HOLDER: &str = "SELECT holder FROM scriba_leases WHERE name = $1 AND version = $2";

const RELEASE: &str = "\
    WITH ended AS (DELETE FROM scriba_standbys WHERE name = $1 AND version = $2 AND owner = $3) \
    DELETE FROM scriba_leases WHERE name = $1 AND version = $2 AND owner = $3";

/// The epoch is only looked at, not locked: a lock on the checkpoint row would wait for the batch in flight.
const STORE_STATE: &str = "\
    UPDATE scriba_projections AS p \
    SET state = $4, halt_reason = $5, halt_class = $9, halt_code = $10, degraded_since = $6, last_error = $7, head = $8, \
        source_keeps_position = $11, updated_at = clock_timestamp() \
    WHERE p.name = $1 AND p.version = $2 AND EXISTS ( \
        SELECT FROM scriba_checkpoints AS c WHERE c.name = $1 AND c.version = $2 AND c.epoch = $3)";

/// Lets the lease run on from now if the owner has it. Answers who has it otherwise.
pub(crate) async fn renew(
    conn: &mut PgConnection,
    names: &Names,
    id: &ProjectionId,
    owner: &Owner,
    ttl: Duration,
) -> sqlx::Result<Result<(), String>> {
    let renewed = sqlx::query(names.sql(RENEW))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(&owner.id)
        .bind(ttl.as_secs_f64())
        .execute(&mut *conn)
        .await?;
    if renewed.rows_affected() > 0 {
        return Ok(Ok(()));
    }
    Ok(Err(holder(conn, names, id).await?.unwrap_or_else(|| "nobody: it was released".to_owned())))
}

/// Who holds the lease, for people.
pub(crate) async fn holder(conn: &mut PgConnection, names: &Names, id: &ProjectionId) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar(names.sql(HOLDER)).bind(&id.name).bind(i64::from(id.version)).fetch_optional(conn).await
}

/// Takes the lease if it is free, lapsed, or the asker's own; otherwise the asker stands by.
pub(crate) async fn take(
    conn: &mut PgConnection,
    names: &Names,
    id: &ProjectionId,
    owner: &Owner,
    ttl: Duration,
) -> sqlx::Result<LeaseAnswer> {
    let taken: Option<bool> = sqlx::query_scalar(names.sql(TAKE))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(&owner.id)
        .bind(storable(&owner.description))
        .bind(ttl.as_secs_f64())
        .fetch_optional(&mut *conn)
        .await?;
    if taken.is_some() {
        return Ok(LeaseAnswer::Held);
    }
    let row: Option<(String, f64)> = sqlx::query_as(names.sql(STAND_BY))
        .bind(&id.name)
        .bind(i64::from(id.version))
        .bind(&owner.id)
        .bind(storable(&owner.description))
        .bind(ttl.max(SHORTEST_STANDBY).as_secs_f64())
        .fetch_optional(conn)
        .await?;
    // Released in between: to be had at the next try.
    let (holder, seconds) = row.unwrap_or_else(|| ("a node that has just released it".to_owned(), 0.0));
    let expires_in = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    Ok(LeaseAnswer::HeldBy { holder, expires_in })
}

/// The connection for leases and states.
pub(crate) struct PgControl {
    pub(crate) conn: PgConnection,
    pub(crate) names: Names,
}

#[async_trait]
impl Control for PgControl {
    async fn lease(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<LeaseAnswer, TargetError> {
        answered("asking for the lease", take(&mut self.conn, &self.names, id, owner, ttl)).await
    }

    async fn seize(&mut self, id: &ProjectionId, owner: &Owner, ttl: Duration) -> Result<(), TargetError> {
        let seize = sqlx::query(self.names.sql(SEIZE))
            .bind(&id.name)
            .bind(i64::from(id.version))
            .bind(&owner.id)
            .bind(storable(&owner.description))
            .bind(ttl.as_secs_f64())
            .execute(&mut self.conn);
        answered("taking the lease from its holder", seize).await.map(drop)
    }

    async fn release(&mut self, id: &ProjectionId, owner: &Owner) -> Result<(), TargetError> {
        let release = sqlx::query(self.names.sql(RELEASE))
            .bind(&id.name)
            .bind(i64::from(id.version))
            .bind(&owner.id)
            .execute(&mut self.conn);
        answered("releasing the lease", release).await.map(drop)
    }

    async fn store_state(&mut self, id: &ProjectionId, epoch: i64, state: &StateRecord) -> Result<bool, TargetError> {
        let store = sqlx::query(self.names.sql(STORE_STATE))
            .bind(&id.name)
            .bind(i64::from(id.version))
            .bind(epoch)
            .bind(state.state.as_str())
            .bind(state.halt_reason.as_deref().map(storable))
            .bind(state.degraded_since)
            .bind(state.last_error.as_deref().map(storable))
            .bind(state.head.map(to_i64).transpose()?)
            .bind(state.halt_class.map(|class| class.to_string()))
            .bind(state.halt_code.as_deref().map(storable))
            .bind(state.source_keeps_position)
            .execute(&mut self.conn);
        Ok(answered("writing the state down", store).await?.rows_affected() > 0)
    }
}

async fn answered<T>(what: &str, statement: impl Future<Output = sqlx::Result<T>>) -> Result<T, TargetError> {
    match timeout(ANSWER_TIMEOUT, statement).await {
        Ok(answer) => answer.map_err(|error| target_error(&error, what)),
        Err(_) => Err(TargetError::new(
            FailureClass::TransientServer,
            format!("{what}: the server has not answered within {ANSWER_TIMEOUT:?}"),
        )),
    }
}
