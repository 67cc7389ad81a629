//! What the run says: progress while it runs, and at the end whether all sums agree with the log.

use std::time::Duration;

use scriba_core::target::{StoredProjection, Tables as _};
use scriba_core::{Events as _, Handler, Position, Projection, ProjectionId, Scriba, State};
use scriba_target_postgres::PgTarget;
use sqlx::PgPool;
use tokio::time::Instant;

use crate::Result;
use crate::projections::{Balances, Entries};

/// How many projections there are.
const PROJECTIONS: usize = 2;
const PRINT_EVERY: Duration = Duration::from_secs(1);

/// Both projections as the tables know them: they run in other processes.
pub(crate) async fn look(scriba: &Scriba) -> Result<Vec<StoredProjection>> {
    Ok(scriba.list().await?.into_iter().filter_map(|listed| listed.stored).collect())
}

/// How the projections get on.
pub(crate) struct Progress {
    started: Instant,
    projections: Vec<StoredProjection>,
    head: Option<Position>,
    /// Events handled, and when that number last rose.
    handled: (u64, Instant),
    /// The projections as of the last line, and when that was.
    printed: (Vec<StoredProjection>, Instant),
    /// The watermarks as of the last kill.
    marks: Vec<Option<Position>>,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self {
            started: now,
            projections: Vec::new(),
            head: None,
            handled: (0, now),
            printed: (Vec::new(), now),
            marks: Vec::new(),
        }
    }

    /// Takes a look into account: the projections and the head of the log.
    pub(crate) fn note(&mut self, projections: Vec<StoredProjection>, head: Option<Position>) {
        let handled = projections.iter().map(|stored| stored.counts().total()).sum();
        if handled > self.handled.0 {
            self.handled = (handled, Instant::now());
        }
        (self.projections, self.head) = (projections, head);
    }

    /// For how long nothing has been handled.
    pub(crate) fn stalled_for(&self) -> Duration {
        self.handled.1.elapsed()
    }

    /// Whether everything in the log is accounted for.
    pub(crate) fn caught_up(&self) -> bool {
        self.projections.len() == PROJECTIONS && self.watermarks().all(|watermark| watermark >= self.head)
    }

    /// Projections that have halted.
    pub(crate) fn halted(&self) -> impl Iterator<Item = &StoredProjection> {
        self.projections.iter().filter(|stored| stored.state.state == State::Halted)
    }

    /// Whether a projection has moved on since [`Progress::begin_anew`].
    pub(crate) fn got_on(&self) -> bool {
        self.watermarks().zip(self.marks.iter().chain(std::iter::repeat(&None))).any(|(now, mark)| now > *mark)
    }

    /// From here on progress is new.
    pub(crate) fn begin_anew(&mut self) {
        self.marks = self.watermarks().collect();
    }

    fn watermarks(&self) -> impl Iterator<Item = Option<Position>> {
        self.projections.iter().map(|stored| stored.checkpoint.watermark)
    }

    /// Prints a line each second, and a last one.
    pub(crate) fn print_if_due(&mut self, killed: usize, last: bool) {
        let since = self.printed.1.elapsed();
        if since < PRINT_EVERY && !last {
            return;
        }
        let mut parts = vec![format!("{:>4} s", self.started.elapsed().as_secs())];
        parts.extend(self.projections.iter().map(|stored| {
            let before = self.printed.0.iter().find(|before| before.id == stored.id);
            describe(stored, before, self.head, since)
        }));
        if killed > 0 {
            parts.push(format!("killed {killed} times"));
        }
        println!("{}", parts.join(" | "));
        self.printed = (self.projections.clone(), Instant::now());
    }
}

/// Events handled, their rate, how far it is behind the head of the log, and the time to catch up at this pace.
#[expect(clippy::cast_precision_loss, reason = "for people")]
fn describe(
    stored: &StoredProjection,
    before: Option<&StoredProjection>,
    head: Option<Position>,
    since: Duration,
) -> String {
    let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / since.as_secs_f64().max(1e-3);
    let passed = |position: Option<Position>| position.map_or(0, Position::get);
    let handled = stored.counts().total();
    let rate = per_second(handled, before.map_or(0, |before| before.counts().total()));
    let watermark = passed(stored.checkpoint.watermark);
    let pace = per_second(watermark, before.map_or(0, |before| passed(before.checkpoint.watermark)));
    let behind = passed(head).saturating_sub(watermark);
    let left = match behind {
        0 => "caught up".to_owned(),
        _ if stored.state.state == State::Halted => "halted".to_owned(),
        _ if pace < 1.0 => "time left unknown".to_owned(),
        _ => format!("{:.1} s left", behind as f64 / pace),
    };
    format!("{} {handled} events, {rate:.0}/s, {behind} positions behind, {left}", stored.id.name)
}

/// Prints what came out, and compares it with what the log says.
///
/// # Errors
/// There are differences, which have been printed.
pub(crate) async fn conclude(pool: &PgPool) -> Result<()> {
    let (accounts, closed, cents): (i64, i64, i64) = sqlx::query_as(
        "SELECT count(*), count(*) FILTER (WHERE closed), coalesce(sum(cents), 0)::bigint FROM bank_balances",
    )
    .fetch_one(pool)
    .await?;
    let statements: i64 = sqlx::query_scalar("SELECT count(*) FROM bank_statements").fetch_one(pool).await?;
    println!("{accounts} accounts, {closed} of them closed, hold {cents} cents; {statements} statements tell of them");
    let mut differences = account_for::<Balances>(pool).await?;
    differences.extend(account_for::<Entries>(pool).await?);
    differences.extend(different_rows(pool).await?);
    if differences.is_empty() {
        println!("log, read models, dead letters and counts agree");
        return Ok(());
    }
    for difference in &differences {
        println!("DIFFERENT: {difference}");
    }
    Err(format!("{} differences between the log and what was made of it", differences.len()).into())
}

/// Prints the counts of a projection's checkpoint and its dead letters, and answers where they differ from the log.
async fn account_for<P: Projection + Handler>(pool: &PgPool) -> Result<Vec<String>> {
    let id = ProjectionId::of::<P>();
    let types = P::Event::event_types().unwrap_or_default();
    let (delivered, skipped, dead_lettered): (i64, i64, i64) = sqlx::query_as(
        "SELECT count(*),
                count(*) FILTER (WHERE metadata->>$2 = 'skipped'),
                count(*) FILTER (WHERE metadata->>$2 <> 'skipped')
         FROM bank_events WHERE type = ANY($1)",
    )
    .bind(types)
    .bind(&id.name)
    .fetch_one(pool)
    .await?;

    let target = PgTarget::new(pool.clone());
    let stored = target.stored(&id).await?.ok_or_else(|| format!("{id} has no checkpoint"))?;
    let counts = stored.counts();
    let letters = target.dead_letter_stats(&id).await?;
    println!(
        "{}: delivered {} = applied {} + skipped {} + dead-lettered {}",
        id.name,
        counts.total(),
        counts.applied,
        counts.skipped,
        counts.dead_lettered
    );
    for (kind, count) in &letters.by_kind {
        println!("    {count} dead letters of kind {kind}");
    }

    let applied = delivered - skipped - dead_lettered;
    let expected = [("applied", applied), ("skipped", skipped), ("dead-lettered", dead_lettered)];
    let found = [counts.applied, counts.skipped, counts.dead_lettered];
    let mut differences: Vec<String> = (expected.into_iter().zip(found))
        .filter(|((_, expected), found)| u64::try_from(*expected) != Ok(*found))
        .map(|((what, expected), found)| format!("{id}: {what} {found}, by the log {expected}"))
        .collect();
    let rows: Vec<String> =
        sqlx::query_scalar(DEAD_LETTERS).bind(&id.name).bind(i64::from(id.version)).fetch_all(pool).await?;
    differences.extend(rows.into_iter().map(|row| format!("dead letters of {id}: {row}")));
    Ok(differences)
}

/// Rows of the read models that are not what the log makes of them.
async fn different_rows(pool: &PgPool) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    for (table, sql) in [("bank_balances", BALANCES), ("bank_statements", STATEMENTS), ("bank_entries", ENTRIES)] {
        let rows: Vec<String> = sqlx::query_scalar(sql).fetch_all(pool).await?;
        differences.extend(rows.into_iter().map(|row| format!("{table}: {row}")));
    }
    Ok(differences)
}

/// The rows of one query that the other does not have, and the other way round.
macro_rules! differences {
    ($expected:literal, $found:literal) => {
        concat!(
            "SELECT 'expected and not found: ' || row::text FROM (",
            $expected,
            " EXCEPT ALL ",
            $found,
            ") AS row UNION ALL SELECT 'found and not expected: ' || row::text FROM (",
            $found,
            " EXCEPT ALL ",
            $expected,
            ") AS row"
        )
    };
}

const BALANCES: &str = differences!("TABLE bank_expected_balances", "TABLE bank_balances");
const STATEMENTS: &str = differences!("TABLE bank_expected_statements", "TABLE bank_statements");
const ENTRIES: &str = differences!("TABLE bank_expected_entries", "TABLE bank_entries");
const DEAD_LETTERS: &str = differences!(
    "SELECT position, type, kind FROM bank_expected_dead_letters WHERE name = $1",
    "SELECT position, event_type, error_kind FROM scriba_dead_letters WHERE name = $1 AND version = $2"
);

#[cfg(test)]
mod tests {
    use scriba_testing::postgres::Postgres;

    use super::*;
    use crate::database::create_tables;

    #[tokio::test]
    async fn rows_that_the_log_does_not_explain_and_rows_that_are_missing_are_found() -> Result<()> {
        let database = Postgres::shared().await?.create_database().await?;
        let pool = database.pool(2).await?;
        create_tables(&pool).await?;
        assert_eq!(different_rows(&pool).await?, [""; 0]);
        sqlx::raw_sql(
            r#"INSERT INTO bank_events (stream_id, type, data, metadata) VALUES
                   ('account-1', 'AccountOpened', '{"account":1,"owner":"o"}', '{}'),
                   ('account-1', 'Deposited', '{"account":1,"cents":7}', '{}'),
                   ('account-1', 'Deposited', '{"account":1,"cents":"a lot"}', '{"balances":"decode","entries":"decode"}'),
                   ('account-1', 'StatementIssued', '{"account":1,"number":10}', '{}'),
                   ('account-1', 'Withdrawn', '{"account":1,"cents":3}', '{}'),
                   ('account-1', 'StatementIssued', '{"account":1,"number":11}', '{}'),
                   ('account-1', 'StatementIssued', '{"account":1,"number":10}', '{"balances":"a kind"}');
               INSERT INTO bank_balances VALUES (1, 'o', 8, false);
               INSERT INTO bank_statements VALUES (10, 1, 4, 7, 7), (11, 1, 6, 4, 4);
               INSERT INTO bank_entries VALUES (5, 1, 1, -3)"#,
        )
        .execute(&pool)
        .await?;
        let mut found = different_rows(&pool).await?;
        found.sort();
        let expected = [
            "bank_balances: expected and not found: (1,o,4,f)",
            "bank_balances: found and not expected: (1,o,8,f)",
            "bank_entries: expected and not found: (2,1,1,7)",
            "bank_statements: expected and not found: (11,1,6,4,-3)",
            "bank_statements: found and not expected: (11,1,6,4,4)",
        ];
        assert_eq!(found, expected);
        Ok(())
    }
}
