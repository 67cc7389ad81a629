//! The yardstick: the fastest loop we know how to write by hand for balances out of a Postgres log, with the
//! guarantees of the engine that such a loop can have: read model and checkpoint in one transaction, a checkpoint
//! statement that names epoch and commit number, comes first and is answered before anything else is sent.
//!
//! It reads pages in key order on a connection of its own, decodes each body from its raw bytes into the type of its
//! event, and builds the next batch while one commits. A commit is three round trips with `merged` adds. It handles
//! no failure: no retries, no dead letters, no lease; and it ends with an error at a position that is missing from the
//! log, because telling a rolled-back append from an open one is beyond it.

use std::error::Error;
use std::time::Duration;

use futures_util::TryStreamExt;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions, PgRow};
use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row};
use tokio::sync::{mpsc, watch};

use crate::Result;
use crate::events::BankEvent;

/// Events per page and per commit.
const PAGE: i64 = 1_000;
/// Pages read ahead.
const READ_AHEAD: usize = 2;
/// How long an idle loop waits before it reads without having been notified.
const POLL: Duration = Duration::from_secs(1);

/// What becomes of several changes to one account in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adds {
    /// Summed up by the client: one statement.
    Merged,
    /// The k-th change of an account goes into the k-th statement, as an engine does that may not assume that sums are
    /// the same as one after another.
    Waves,
}

/// Where the loop ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// With the event at this position committed.
    Position(i64),
    /// Never: it waits for notifications.
    Forever,
}

/// Creates the table of balances, empty, in place of the one that there is.
pub async fn reset_balances(connection: &mut PgConnection) -> Result<()> {
    let sql = "
        DROP TABLE IF EXISTS balances;
        CREATE TABLE balances (account bigint PRIMARY KEY, cents bigint NOT NULL);";
    sqlx::raw_sql(sql).execute(connection).await?;
    Ok(())
}

/// Creates the table of balances and the loop's checkpoint, both empty, in place of those that there are.
pub async fn reset(connection: &mut PgConnection) -> Result<()> {
    reset_balances(connection).await?;
    let sql = "
        DROP TABLE IF EXISTS hand_checkpoint;
        CREATE TABLE hand_checkpoint (
            name text PRIMARY KEY,
            epoch bigint NOT NULL DEFAULT 0,
            commit_no bigint NOT NULL DEFAULT 0,
            watermark bigint,
            last_event_id uuid,
            applied bigint NOT NULL DEFAULT 0
        ) WITH (fillfactor = 50);
        CREATE OR REPLACE FUNCTION hand_advance(
            p_epoch bigint, p_commit_no bigint, p_watermark bigint, p_last_event_id uuid, p_applied bigint
        ) RETURNS void LANGUAGE plpgsql AS $body$
        BEGIN
            UPDATE hand_checkpoint
            SET commit_no = commit_no + 1, watermark = p_watermark, last_event_id = p_last_event_id,
                applied = applied + p_applied
            WHERE name = 'balances' AND epoch = p_epoch AND commit_no = p_commit_no;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'the checkpoint is not at epoch % and commit number %', p_epoch, p_commit_no;
            END IF;
        END
        $body$;";
    sqlx::raw_sql(sql).execute(connection).await?;
    Ok(())
}

/// Runs the loop from its checkpoint. Each watermark is told to `watermark` once it is durable.
///
/// # Errors
/// Anything that goes wrong ends the loop; so does another one that took over.
pub async fn run(
    database: &PgConnectOptions,
    adds: Adds,
    until: Until,
    watermark: &watch::Sender<Option<i64>>,
) -> Result<()> {
    // As startup parameters they cost no round trip.
    let options = database.clone().options([
        ("idle_in_transaction_session_timeout", "10s"),
        ("statement_timeout", "10s"),
        ("lock_timeout", "5s"),
        ("tcp_user_timeout", "10s"),
    ]);
    let mut committer = Committer::take_over(options.connect().await?).await?;
    watermark.send_replace(committer.watermark);
    let reader = Reader::open(database, committer.watermark).await?;
    let (pages, mut read) = mpsc::channel(READ_AHEAD);
    let reading = tokio::spawn(reader.run(until, pages));

    let mut next = build(&mut read, adds).await;
    while let Some(batch) = next {
        let commit = async {
            committer.commit(&batch).await?;
            watermark.send_replace(committer.watermark);
            Ok::<_, Box<dyn Error + Send + Sync>>(())
        };
        ((), next) = tokio::try_join!(commit, async { Ok(build(&mut read, adds).await) })?;
    }
    reading.await?
}

/// An event, decoded.
struct ReadEvent {
    position: i64,
    id: Uuid,
    event: BankEvent,
}

/// What one commit writes.
struct Batch {
    watermark: i64,
    last_event_id: Uuid,
    events: usize,
    statements: Vec<Wave>,
}

/// The rows of one statement: no account twice, so that the order inside the statement says nothing.
#[derive(Default)]
struct Wave {
    opened: Columns,
    added: Columns,
}

/// Accounts in ascending order, with cents.
#[derive(Default)]
struct Columns {
    accounts: Vec<i64>,
    cents: Vec<i64>,
}

/// What an event does to a balance.
struct Change {
    account: i64,
    /// `None` opens the account.
    cents: Option<i64>,
}

impl Wave {
    fn push(&mut self, account: i64, opens: bool, cents: i64) {
        let columns = if opens { &mut self.opened } else { &mut self.added };
        columns.accounts.push(account);
        columns.cents.push(cents);
    }
}

/// The next batch, or `None` at the end.
async fn build(read: &mut mpsc::Receiver<Vec<ReadEvent>>, adds: Adds) -> Option<Batch> {
    let page = read.recv().await?;
    let last = page.last()?;
    let change = |read: &ReadEvent| Change { account: read.event.account(), cents: read.event.cents() };
    let mut changes: Vec<Change> = page.iter().map(change).collect();
    // Stable, so that the changes of one account stay in order.
    changes.sort_by_key(|change| change.account);
    let statements = match adds {
        Adds::Merged => vec![merged(&changes)],
        Adds::Waves => waves(&changes),
    };
    Some(Batch { watermark: last.position, last_event_id: last.id, events: page.len(), statements })
}

fn merged(changes: &[Change]) -> Wave {
    let mut wave = Wave::default();
    for of_account in changes.chunk_by(|a, b| a.account == b.account) {
        let sum = of_account.iter().filter_map(|change| change.cents).sum();
        wave.push(of_account[0].account, of_account[0].cents.is_none(), sum);
    }
    wave
}

fn waves(changes: &[Change]) -> Vec<Wave> {
    let mut waves: Vec<Wave> = Vec::new();
    for of_account in changes.chunk_by(|a, b| a.account == b.account) {
        for (number, change) in of_account.iter().enumerate() {
            if number == waves.len() {
                waves.push(Wave::default());
            }
            waves[number].push(change.account, change.cents.is_none(), change.cents.unwrap_or(0));
        }
    }
    waves
}

/// Holds the one connection that writes, and what the checkpoint row holds.
struct Committer {
    connection: PgConnection,
    epoch: i64,
    commit_no: i64,
    watermark: Option<i64>,
}

impl Committer {
    /// Takes a new epoch, after which no earlier loop can commit.
    async fn take_over(mut connection: PgConnection) -> Result<Self> {
        let insert = "INSERT INTO hand_checkpoint (name) VALUES ('balances') ON CONFLICT DO NOTHING";
        sqlx::raw_sql(insert).execute(&mut connection).await?;
        let update = "UPDATE hand_checkpoint SET epoch = epoch + 1 WHERE name = 'balances'
                      RETURNING epoch, commit_no, watermark";
        let (epoch, commit_no, watermark) = sqlx::query_as(update).fetch_one(&mut connection).await?;
        Ok(Self { connection, epoch, commit_no, watermark })
    }

    async fn commit(&mut self, batch: &Batch) -> Result<()> {
        let begin = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET CONSTRAINTS ALL IMMEDIATE; \
             SELECT hand_advance({}, {}, {}, '{}', {})",
            self.epoch, self.commit_no, batch.watermark, batch.last_event_id, batch.events
        );
        let mut transaction = self.connection.begin_with(AssertSqlSafe(begin)).await?;
        for Wave { opened, added } in &batch.statements {
            // Not one upsert for both: that locks each row in a step of its own, a tenth more for the server to do.
            let write = "WITH opened AS (
                             INSERT INTO balances (account, cents) SELECT * FROM unnest($1::int8[], $2::int8[])
                         )
                         UPDATE balances AS b SET cents = b.cents + added.cents
                         FROM unnest($3::int8[], $4::int8[]) AS added (account, cents)
                         WHERE b.account = added.account";
            let query = sqlx::query(write).bind(&opened.accounts).bind(&opened.cents);
            let query = query.bind(&added.accounts).bind(&added.cents);
            if query.execute(&mut *transaction).await?.rows_affected() != added.accounts.len() as u64 {
                return Err("a deposit or withdrawal of an account that was not opened".into());
            }
        }
        transaction.commit().await?;
        self.commit_no += 1;
        self.watermark = Some(batch.watermark);
        Ok(())
    }
}

/// Reads the log ahead of the committer.
struct Reader {
    connection: PgConnection,
    notifications: PgListener,
    /// The position of the last event read; 0 before the first, since identity columns start at 1.
    at: i64,
}

impl Reader {
    async fn open(database: &PgConnectOptions, watermark: Option<i64>) -> Result<Self> {
        let pool = PgPoolOptions::new().max_connections(1).connect_with(database.clone()).await?;
        let mut notifications = PgListener::connect_with(&pool).await?;
        notifications.listen("bank_events").await?;
        Ok(Self { connection: database.connect().await?, notifications, at: watermark.unwrap_or(0) })
    }

    async fn run(mut self, until: Until, pages: mpsc::Sender<Vec<ReadEvent>>) -> Result<()> {
        loop {
            if matches!(until, Until::Position(last) if self.at >= last) {
                return Ok(());
            }
            let page = self.page(until).await?;
            if page.is_empty() {
                // An error of the listener, or a notification lost, means no more than to read now.
                let _ = tokio::time::timeout(POLL, self.notifications.try_recv()).await;
            } else if pages.send(page).await.is_err() {
                return Ok(());
            }
        }
    }

    async fn page(&mut self, until: Until) -> Result<Vec<ReadEvent>> {
        let last = match until {
            Until::Position(last) => last,
            Until::Forever => i64::MAX,
        };
        let sql = "SELECT position, id, type, data FROM bank_events
                   WHERE position > $1 AND position <= $2 ORDER BY position LIMIT $3";
        let query = sqlx::query(sql).bind(self.at).bind(last).bind(PAGE);
        let mut rows = query.fetch(&mut self.connection);
        let mut page = Vec::new();
        while let Some(row) = rows.try_next().await? {
            let read = decode(&row)?;
            if read.position != self.at + 1 {
                return Err(format!("position {} is missing from the log", self.at + 1).into());
            }
            self.at = read.position;
            page.push(read);
        }
        Ok(page)
    }
}

fn decode(row: &PgRow) -> Result<ReadEvent> {
    let data = row.try_get_raw(3)?;
    let body = data.as_bytes()?;
    // The binary form of jsonb is the text behind a version number, a byte that no JSON begins with.
    let body = body.strip_prefix(&[1]).unwrap_or(body);
    Ok(ReadEvent { position: row.try_get(0)?, id: row.try_get(1)?, event: BankEvent::decode(row.try_get(2)?, body)? })
}
