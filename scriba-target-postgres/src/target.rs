//! The target as users and the engine see it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use scriba_core::dead_letter::DeadLetter;
use scriba_core::target::{
    Control, DeadLetterFilter, DeadLetterStats, Reset, ResetCounts, ResetRefused, StoredProjection, Tables, TakeOver,
    TakeOverError, TakenOver, Target, TargetError,
};
use scriba_core::{FailureClass, ProjectionId};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection, PgPool};
use tokio::time::timeout;

use crate::answer::in_time;
use crate::apply::PgCommitter;
use crate::backend::Backend;
use crate::facts::FactsCache;
use crate::lease::{PgControl, STATEMENT_TIMEOUT};
use crate::names::Names;
use crate::op::PgOp;
use crate::sqlstate::target_error;
use crate::switch::Switch;
use crate::{checkpoint, dead_letter, migrate, reset, status};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The bound of what an owner may keep the server waiting for where no lease says when others may follow.
const BOUND_WITHOUT_LEASE: Duration = Duration::from_secs(20);

/// A busy machine may be silent for as long between two statements: with a shorter lease, a take-over waits for this bound
/// of the old owner's.
const SHORTEST_BOUND: Duration = Duration::from_secs(2);

/// Postgres cuts longer names off.
const LONGEST_APPLICATION_NAME: usize = 63;

/// A Postgres database (14 or later) with read models and, beside them, the control tables of Scriba.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use scriba_target_postgres::PgTarget;
///
/// let pool = sqlx::PgPool::connect("postgres://localhost/shop").await?;
/// let target = PgTarget::new(pool);
/// target.migrate().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Connections
/// The pool serves commands that read, such as the listing of dead letters. Every projection that runs commits over one
/// connection of its own, and leases are kept over another; both are opened beside the pool with its connect options, so
/// that the engine never waits for connections that handlers hold. Hooks of the pool (`after_connect`, `before_acquire`)
/// do not run on them: settings that writes depend on belong in the connect options or the role. They carry start-up
/// options (`statement_timeout`, `lock_timeout`, `idle_in_transaction_session_timeout`, `tcp_user_timeout`: two thirds
/// of the lease, at least 2 s), which a pooler between here and the server has to let through; over a Unix socket the last
/// one has no effect. The committing one calls itself `scriba <name> v<version>` in `pg_stat_activity`.
#[derive(Clone, Debug)]
pub struct PgTarget {
    pool: PgPool,
    names: Names,
    switch: Option<Switch>,
}

impl PgTarget {
    /// A target in the database of `pool`, with control tables named `scriba_…` where the search path finds them.
    pub fn new(pool: PgPool) -> Self {
        Self { pool, names: Names::default(), switch: None }
    }

    /// Puts the control tables into a schema. [`PgTarget::migrate`] creates it where it is missing.
    #[must_use]
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.names.schema = Some(schema.into());
        self
    }

    /// Starts the names of the control tables with something else than `scriba_`; at most 40 bytes.
    #[must_use]
    pub fn table_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.names.prefix = prefix.into();
        self
    }

    /// Puts a fault in.
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    #[must_use]
    pub fn switch(mut self, switch: Switch) -> Self {
        self.switch = Some(switch);
        self
    }

    /// Creates the control tables, brings them up to this library's version, and mends them where they are half
    /// there. Any number of nodes may do so at once. Takes the rights to create tables and functions.
    ///
    /// # Errors
    /// A failure of the database, or tables of a newer library.
    pub async fn migrate(&self) -> Result<(), TargetError> {
        migrate::up(&mut self.connect("scriba migrate", &[]).await?, &self.names).await
    }

    /// Drops the control tables: every checkpoint and every dead letter is lost. Read models stay.
    ///
    /// # Errors
    /// A failure of the database.
    pub async fn migrate_down(&self) -> Result<(), TargetError> {
        migrate::down(&mut self.connect("scriba migrate", &[]).await?, &self.names).await
    }

    /// Writes the migrations as files into `dir`, named as `sqlx migrate` wants them and with this target's schema and
    /// prefix in them, and answers their paths.
    ///
    /// # Errors
    /// When a file cannot be written, or schema or prefix cannot be names.
    pub fn export_migrations(&self, dir: impl AsRef<Path>) -> std::io::Result<Vec<PathBuf>> {
        migrate::export(&self.names, dir.as_ref())
    }

    /// A connection that commits batches.
    pub(crate) async fn committing_connection(
        &self,
        id: &ProjectionId,
        bound: Duration,
    ) -> Result<(PgConnection, Backend), TargetError> {
        let mut conn = self.connect(&application_name(id), &committer_settings(bound)).await?;
        let backend = in_time(bound, Backend::of(&mut conn)).await;
        Ok((conn, backend.map_err(|error| target_error(&error, "asking for the session's own number"))?))
    }

    /// A connection beside the pool.
    pub(crate) async fn connect(
        &self,
        application: &str,
        settings: &[(&str, String)],
    ) -> Result<PgConnection, TargetError> {
        let options = PgConnectOptions::clone(&self.pool.connect_options())
            .application_name(application)
            .options(settings.iter().map(|(name, value)| (*name, value.as_str())));
        let what = format!("connecting to Postgres at {}:{}", options.get_host(), options.get_port());
        match timeout(CONNECT_TIMEOUT, options.connect()).await {
            Ok(connected) => connected.map_err(|error| target_error(&error, &what)),
            Err(_) => Err(TargetError::new(
                FailureClass::TransientServer,
                format!("{what}: no answer within {CONNECT_TIMEOUT:?}"),
            )),
        }
    }

    /// Whether a rule is broken on purpose.
    pub(crate) fn breaks(&self, rule: Switch) -> bool {
        Switch::is_broken(rule, self.switch)
    }

    /// How its control tables are called.
    pub(crate) fn names(&self) -> &Names {
        &self.names
    }
}

#[async_trait]
impl Target<PgOp> for PgTarget {
    fn size_of(&self, operation: &PgOp) -> usize {
        size_of::<PgOp>() + operation.size()
    }

    async fn take_over(&self, request: TakeOver<'_>) -> Result<TakenOver<PgOp>, TakeOverError> {
        let bound = request.owner.map_or(BOUND_WITHOUT_LEASE, |_| (request.lease * 2 / 3).max(SHORTEST_BOUND));
        let (mut conn, backend) = self.committing_connection(request.id, bound).await?;
        // It may wait for two locks, each as long as the server lets it; a connection that was cut without a word says nothing.
        let limit = 2 * bound + CONNECT_TIMEOUT;
        let taking = checkpoint::take_over(&mut conn, self, &request);
        let taken = timeout(limit, taking).await.unwrap_or_else(|_| {
            let message =
                format!("taking projection {} over: the server has not answered within {limit:?}", request.id);
            Err(TargetError::new(FailureClass::TransientServer, message).into())
        })?;
        let committer = PgCommitter {
            id: request.id.clone(),
            epoch: taken.checkpoint.epoch,
            conn: Some(conn),
            backend,
            bound,
            names: self.names.clone(),
            facts: FactsCache::default(),
            constraints: None,
            reset: false,
            closure_limit: request.handler_timeout.min(bound * 3 / 4),
            target: self.clone(),
        };
        Ok(TakenOver {
            checkpoint: taken.checkpoint,
            source: taken.source,
            created: taken.created,
            committer: Box::new(committer),
        })
    }
}

#[async_trait]
impl Tables for PgTarget {
    fn name(&self) -> String {
        let options = self.pool.connect_options();
        let database = options.get_database().unwrap_or(options.get_username());
        let port = options.get_port();
        match options.get_socket() {
            Some(socket) => format!("postgres {database} at {}:{port}", socket.display()),
            None => format!("postgres {database} at {}:{port}", options.get_host()),
        }
    }

    async fn check(&self) -> Result<(), TargetError> {
        let mut conn =
            self.pool.acquire().await.map_err(|error| target_error(&error, "taking a connection from the pool"))?;
        migrate::check(&mut conn, &self.names).await
    }

    async fn control(&self) -> Result<Box<dyn Control>, TargetError> {
        let settings = [("statement_timeout", milliseconds(STATEMENT_TIMEOUT))];
        let conn = self.connect("scriba control", &settings).await?;
        Ok(Box::new(PgControl { conn, names: self.names.clone() }))
    }

    async fn stored(&self, id: &ProjectionId) -> Result<Option<StoredProjection>, TargetError> {
        Ok(status::stored(&self.pool, &self.names, Some(id)).await?.pop())
    }

    async fn stored_all(&self) -> Result<Vec<StoredProjection>, TargetError> {
        status::stored(&self.pool, &self.names, None).await
    }

    async fn dead_letters(&self, id: &ProjectionId, filter: &DeadLetterFilter) -> Result<Vec<DeadLetter>, TargetError> {
        dead_letter::list(&self.pool, &self.names, id, filter).await
    }

    async fn dead_letter_stats(&self, id: &ProjectionId) -> Result<DeadLetterStats, TargetError> {
        dead_letter::stats(&self.pool, &self.names, id).await
    }

    async fn reset(&self, id: &ProjectionId, reset: &Reset) -> Result<ResetCounts, ResetRefused> {
        let statements = reset::statements(reset)?;
        let mut conn = self.connect("scriba reset", &reset::settings()).await?;
        reset::run(&mut conn, self, id, &statements, reset.dead_letters).await
    }
}

/// Settings of the committing connection. A frozen owner must not keep locks for longer than others wait for it, so all
/// limits are below the lease. As start-up options they are what `RESET ALL` goes back to.
///
/// Without hash and merge joins a fused statement looks each key of its array up in the index: in the order of the array,
/// so that two projections lock rows in one order, and at a cost that does not grow with the table. (On a table of 10,000
/// rows the planner hashes the whole table for each statement.)
fn committer_settings(bound: Duration) -> [(&'static str, String); 8] {
    let bound = milliseconds(bound);
    [
        ("statement_timeout", bound.clone()),
        ("lock_timeout", bound.clone()),
        ("idle_in_transaction_session_timeout", bound.clone()),
        ("tcp_user_timeout", bound),
        ("default_transaction_isolation", "read committed".to_owned()),
        ("default_transaction_read_only", "off".to_owned()),
        ("enable_hashjoin", "off".to_owned()),
        ("enable_mergejoin", "off".to_owned()),
    ]
}

/// At least 1, since 0 would switch a limit off.
fn milliseconds(duration: Duration) -> String {
    duration.as_millis().clamp(1, i32::MAX as u128).to_string()
}

/// `scriba <name> v<version>`, with the name cut so that the version is seen.
fn application_name(id: &ProjectionId) -> String {
    let version = format!(" v{}", id.version);
    let room = LONGEST_APPLICATION_NAME - "scriba ".len() - version.len();
    let name: String =
        id.name.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).take(room).collect();
    format!("scriba {name}{version}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_application_name_fits_and_shows_the_version() {
        assert_eq!(application_name(&"orders".into()), "scriba orders v1");
        let long = application_name(&ProjectionId::new("é\0".repeat(100), u32::MAX));
        assert_eq!(long.len(), LONGEST_APPLICATION_NAME);
        assert!(long.starts_with("scriba ????") && long.ends_with(" v4294967295"), "{long}");
    }

    #[test]
    fn no_limit_is_switched_off_by_a_tiny_or_a_huge_lease() {
        assert_eq!(milliseconds(Duration::ZERO), "1");
        assert_eq!(milliseconds(Duration::MAX), i32::MAX.to_string());
    }
}
