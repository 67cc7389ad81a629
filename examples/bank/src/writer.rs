//! What the rest of the bank would do: append events to the log, from several connections at the same time.

use std::any::type_name;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use scriba_core::dead_letter::kind;
use serde::Serialize;
use serde_json::json;
use sqlx::{Connection, PgConnection, PgPool};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::Result;
use crate::events::{AccountClosed, AccountOpened, Deposited, Transferred, Withdrawn};
use crate::projections::{ALL_MONEY, NegativeAmount};

/// What is to be appended.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Work {
    /// Events to append
    #[arg(long, default_value_t = 20_000)]
    events: u64,
    /// Accounts they are about; a stream for each
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    accounts: u32,
    /// Connections that append at the same time
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=50))]
    writers: u32,
    /// Events appended a second, all told; 0 is as many as the database takes
    #[arg(long, default_value_t = 2_000)]
    rate: u32,
}

impl Work {
    /// Connections it takes: one for each writer.
    pub(crate) fn connections(self) -> u32 {
        self.writers
    }

    /// Does it, and answers once everything is committed.
    pub(crate) async fn run(self, pool: PgPool) -> Result<()> {
        // A writer without an account would have nothing to write about.
        let writers = self.writers.min(self.accounts);
        let tickets = Arc::new(Tickets { work: self, given: AtomicU64::new(0), started: Instant::now() });
        let mut writing = JoinSet::new();
        for writer in 0..writers {
            let accounts = (writer..self.accounts).step_by(writers as usize).map(i64::from).rev().collect();
            let teller = Teller { unopened: accounts, open: Vec::new(), rng: Rng::new() };
            writing.spawn(write(pool.clone(), Arc::clone(&tickets), teller));
        }
        while let Some(written) = writing.join_next().await {
            written??;
        }
        Ok(())
    }
}

/// Numbers the events and sets the pace.
struct Tickets {
    work: Work,
    given: AtomicU64,
    started: Instant,
}

impl Tickets {
    /// The numbers of the next events, when it is time for them; `None` when all are given away.
    async fn take(&self, count: u64) -> Option<Range<u64>> {
        let first = self.given.fetch_add(count, Ordering::Relaxed);
        let tickets = first..self.work.events.min(first + count);
        if tickets.is_empty() {
            return None;
        }
        if self.work.rate > 0 {
            #[expect(clippy::cast_precision_loss, reason = "a pace need not be exact")]
            let at = tickets.end as f64 / f64::from(self.work.rate);
            sleep_until(self.started + Duration::from_secs_f64(at)).await;
        }
        Some(tickets)
    }
}

async fn write(pool: PgPool, tickets: Arc<Tickets>, mut teller: Teller) -> Result<()> {
    let mut connection = pool.acquire().await?;
    while let Some(tickets) = tickets.take(teller.rng.u64(1..=5)).await {
        if teller.rng.u8(0..10) == 0 {
            roll_back(&mut connection, &mut teller).await?;
        }
        let mut transaction = connection.begin().await?;
        for ticket in tickets {
            append(&mut transaction, &teller.event(ticket)).await?;
        }
        transaction.commit().await?;
    }
    Ok(())
}

/// Appends events that never happened: their positions are missing from the log for ever.
async fn roll_back(connection: &mut PgConnection, teller: &mut Teller) -> Result<()> {
    let mut transaction = connection.begin().await?;
    for _ in 0..teller.rng.u8(1..=5) {
        append(&mut transaction, &teller.zero_deposit()).await?;
    }
    Ok(transaction.rollback().await?)
}

async fn append(connection: &mut PgConnection, event: &NewEvent) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO bank_events (stream_id, type, data, metadata) VALUES ($1, $2, $3::text::json, $4::text::json)",
    )
    .bind(format!("account-{}", event.account))
    .bind(event.event_type)
    .bind(event.data.to_string())
    .bind(event.mark.to_string())
    .execute(connection)
    .await?;
    Ok(())
}

struct NewEvent {
    account: i64,
    event_type: &'static str,
    data: serde_json::Value,
    /// What it is to come to, for the check at the end.
    mark: serde_json::Value,
}

impl NewEvent {
    fn new(account: i64, event_type: &'static str, body: &impl Serialize) -> Self {
        Self { account, event_type, data: json!(body), mark: json!({}) }
    }

    fn dead_letter(self, kind: &str) -> Self {
        Self { mark: json!({ "dead_letter": kind }), ..self }
    }
}

/// Makes up what happens to the accounts of one writer. They are nobody else's, so that an account is opened before
/// anything else happens to it.
struct Teller {
    unopened: Vec<i64>,
    open: Vec<i64>,
    rng: Rng,
}

impl Teller {
    /// The event of a number: every 50th is one of those that do not simply become part of the read models.
    fn event(&mut self, ticket: u64) -> NewEvent {
        match ticket % 200 {
            24 => self.undecodable(),
            49 => self.deposit(-1).dead_letter(type_name::<NegativeAmount>()),
            99 => self.deposit(ALL_MONEY + 1).dead_letter(kind::PANIC),
            149 => self.zero_deposit(),
            // No projection lists this type.
            199 => NewEvent::new(self.account(), "StatementPrinted", &json!({ "pages": 2 })),
            _ => self.good(),
        }
    }

    fn good(&mut self) -> NewEvent {
        let opens = self.open.is_empty() || self.rng.u8(0..4) == 0;
        if opens && let Some(account) = self.unopened.pop() {
            self.open.push(account);
            let opened = AccountOpened { account, owner: format!("owner {account}") };
            return NewEvent::new(account, "AccountOpened", &opened);
        }
        let (account, to) = (self.account(), self.account());
        let cents = self.rng.i64(1..100_000);
        match self.rng.u16(0..1_000) {
            0..2 if self.open.len() > 1 => {
                self.open.retain(|open| *open != account);
                NewEvent::new(account, "AccountClosed", &AccountClosed { account })
            }
            2..200 if account != to => NewEvent::new(account, "Transferred", &Transferred { from: account, to, cents }),
            200..400 => NewEvent::new(account, "Withdrawn", &Withdrawn { account, cents }),
            _ => self.deposit(cents),
        }
    }

    fn deposit(&mut self, cents: i64) -> NewEvent {
        let account = self.account();
        NewEvent::new(account, "Deposited", &Deposited { account, cents })
    }

    fn zero_deposit(&mut self) -> NewEvent {
        NewEvent { mark: json!({ "skipped_by": "balances" }), ..self.deposit(0) }
    }

    fn undecodable(&mut self) -> NewEvent {
        let account = self.account();
        NewEvent::new(account, "Deposited", &json!({ "account": account, "cents": "a lot" })).dead_letter(kind::DECODE)
    }

    /// One of the open accounts; before the first is open, the one that will be.
    fn account(&mut self) -> i64 {
        let account = self.rng.choice(&self.open).or(self.unopened.last());
        *account.expect("a writer has an account, and never closes its last")
    }
}
