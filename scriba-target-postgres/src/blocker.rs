//! Who holds a batch up, as a line for people.

use std::pin::pin;
use std::time::Duration;

use sqlx::Connection as _;
use tokio::time::sleep;

use crate::answer::in_time;
use crate::target::PgTarget;

/// The first blockers of a session: process, application, user, state, seconds in its transaction, query.
const BLOCKERS: &str = "\
    SELECT format('pid %s (application %s, user %s, %s, in its transaction for %s s): %s', b.pid, b.application_name, b.usename, \
        b.state, coalesce(extract(epoch FROM clock_timestamp() - b.xact_start)::bigint::text, '?'), left(b.query, 100)) \
    FROM unnest(pg_blocking_pids($1)) AS blocking (pid) JOIN pg_stat_activity AS b USING (pid) ORDER BY b.xact_start LIMIT 3";

/// An answer of the lookout's own session.
const PATIENCE: Duration = Duration::from_secs(2);

/// Looks, from a session of its own, who blocks another one that takes long.
pub(crate) struct Lookout {
    pub(crate) target: PgTarget,
    /// The session that may be blocked.
    pub(crate) pid: i32,
    /// How long work may take before it looks, and between looks.
    pub(crate) every: Duration,
}

impl Lookout {
    /// Does the work, and answers who held it up last, where somebody did.
    pub(crate) async fn over<T>(&self, work: impl Future<Output = T>) -> (T, Option<String>) {
        let mut work = pin!(work);
        let mut seen = None;
        loop {
            let look = async {
                sleep(self.every).await;
                self.look().await
            };
            tokio::select! {
                // Biased: what is done is not looked after any more.
                biased;
                done = &mut work => return (done, seen),
                found = look => seen = found.or(seen),
            }
        }
    }

    /// What cannot be found out is left out: the failure itself is told all the same.
    async fn look(&self) -> Option<String> {
        let mut conn = self.target.connect("scriba blocker", &[]).await.ok()?;
        let blockers: sqlx::Result<Vec<Option<String>>> =
            in_time(PATIENCE, sqlx::query_scalar(BLOCKERS).bind(self.pid).fetch_all(&mut conn)).await;
        let _ = in_time(PATIENCE, conn.close()).await;
        let blockers: Vec<String> = blockers.ok()?.into_iter().flatten().collect();
        (!blockers.is_empty()).then(|| blockers.join("; "))
    }
}
