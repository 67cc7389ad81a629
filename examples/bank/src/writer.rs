//! What the rest of the bank would do: append events to the log, from several connections at the same time.

use std::any::type_name;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use scriba_core::Projection as _;
use scriba_core::dead_letter::kind;
use serde::Serialize;
use serde_json::json;
use sqlx::PgPool;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::Result;
use crate::events::{AccountClosed, AccountOpened, Deposited, StatementIssued, Transferred, Withdrawn};
use crate::log::{Appender, LogOptions};
use crate::projections::{ALL_MONEY, Balances, Entries, NegativeAmount};

/// What is to be appended.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Work {
    /// Events to append
    #[arg(long, default_value_t = 60_000)]
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
    /// What the writers make up depends on it, and not on chance
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// The account that is opened first.
const FIRST_ACCOUNT: i64 = 0;
/// The number of the event that is the first statement, and the number of that statement.
const FIRST_STATEMENT: u64 = 1;
/// Kind of the dead letter of a statement whose number is taken.
const UNIQUE_VIOLATION: &str = "commit:23505 (unique_violation)";
/// Accounts from here on are never opened.
const NEVER_OPENED: i64 = 1_000_000_000;

impl Work {
    /// Connections it takes: one for each writer.
    pub(crate) fn connections(self) -> u32 {
        self.writers
    }

    /// Does it, as the tickets allow, and answers once everything is committed.
    pub(crate) async fn run(self, tickets: Arc<Tickets>, log: LogOptions, pool: PgPool) -> Result<()> {
        // A writer without an account would have nothing to write about.
        let writers = self.writers.min(self.accounts);
        let mut tellers: Vec<Teller> = (0..writers)
            .map(|writer| Teller {
                unopened: (writer..self.accounts).step_by(writers as usize).map(i64::from).rev().collect(),
                open: Vec::new(),
                rng: Rng::with_seed(self.seed.wrapping_add(writer.into())),
            })
            .collect();
        if let Some(teller) = tellers.first_mut() {
            // Before anybody else's, so that the number of the first statement is taken wherever it comes again.
            write(&mut log.appender(&pool).await?, &tickets, teller, FIRST_STATEMENT + 1).await?;
        }
        let mut writing = JoinSet::new();
        for teller in tellers {
            writing.spawn(keep_writing(log.appender(&pool).await?, Arc::clone(&tickets), teller));
        }
        while let Some(written) = writing.join_next().await {
            written??;
        }
        Ok(())
    }
}

/// Numbers the events, sets the pace, and holds the writers back.
pub(crate) struct Tickets {
    work: Work,
    given: AtomicU64,
    /// Numbers from here on are held back.
    open_to: watch::Sender<u64>,
    started: Instant,
}

impl Tickets {
    pub(crate) fn new(work: Work) -> Self {
        Self { work, given: AtomicU64::new(0), open_to: watch::Sender::new(u64::MAX), started: Instant::now() }
    }

    /// Holds back numbers from here on.
    pub(crate) fn open_to(&self, number: u64) {
        self.open_to.send_replace(number);
    }

    /// So many are given away, held back or not.
    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Relaxed).min(self.work.events)
    }

    /// So many thirds of all numbers.
    pub(crate) fn third(&self, thirds: u64) -> u64 {
        self.work.events / 3 * thirds
    }

    /// The numbers of the next events, when it is time for them; `None` when all are given away.
    async fn take(&self, count: u64) -> Option<Range<u64>> {
        let first = self.given.fetch_add(count, Ordering::Relaxed);
        let tickets = first..self.work.events.min(first + count);
        if tickets.is_empty() {
            return None;
        }
        // The sender lives in `self`.
        let _ = self.open_to.subscribe().wait_for(|open_to| tickets.start < *open_to).await;
        if self.work.rate > 0 {
            #[expect(clippy::cast_precision_loss, reason = "a pace need not be exact")]
            let at = tickets.end as f64 / f64::from(self.work.rate);
            sleep_until(self.started + Duration::from_secs_f64(at)).await;
        }
        Some(tickets)
    }
}

async fn keep_writing(mut log: Appender, tickets: Arc<Tickets>, mut teller: Teller) -> Result<()> {
    loop {
        let count = teller.rng.u64(1..=5);
        if teller.rng.u8(0..10) == 0 {
            let rolled_back: Vec<NewEvent> = (0..teller.rng.u8(1..=5)).map(|_| teller.zero_deposit()).collect();
            log.roll_back(&rolled_back).await?;
        }
        if !write(&mut log, &tickets, &mut teller, count).await? {
            return Ok(());
        }
    }
}

/// Appends the next events, so many of them; false where there are none left.
async fn write(log: &mut Appender, tickets: &Tickets, teller: &mut Teller, count: u64) -> Result<bool> {
    let Some(tickets) = tickets.take(count).await else { return Ok(false) };
    let events: Vec<NewEvent> = tickets.map(|ticket| teller.event(ticket)).collect();
    log.append(&events).await?;
    Ok(true)
}

pub(crate) struct NewEvent {
    account: i64,
    pub(crate) event_type: &'static str,
    pub(crate) data: serde_json::Value,
    /// What it is to come to, for the check at the end.
    pub(crate) mark: serde_json::Value,
}

impl NewEvent {
    pub(crate) fn stream_id(&self) -> String {
        format!("account-{}", self.account)
    }

    fn new(account: i64, event_type: &'static str, body: &impl Serialize) -> Self {
        Self { account, event_type, data: json!(body), mark: json!({}) }
    }

    /// In both projections.
    fn dead_letter(self, kind: &str) -> Self {
        Self { mark: json!({ Balances::NAME: kind, Entries::NAME: kind }), ..self }
    }

    /// In the balances alone: skipped, or a dead letter of a kind.
    fn in_balances(self, what: &str) -> Self {
        Self { mark: json!({ Balances::NAME: what }), ..self }
    }
}

fn deposit(account: i64, cents: i64) -> NewEvent {
    NewEvent::new(account, "Deposited", &Deposited { account, cents })
}

/// Statements have the numbers of their events.
fn statement(account: i64, ticket: u64) -> NewEvent {
    NewEvent::new(account, "StatementIssued", &StatementIssued { account, number: ticket.cast_signed() })
}

/// Makes up what happens to the accounts of one writer. They are nobody else's, so that an account is opened before
/// anything else happens to it.
struct Teller {
    unopened: Vec<i64>,
    open: Vec<i64>,
    rng: Rng,
}

impl Teller {
    /// The event of a number: about every 40th is one of those that do not simply become part of the read models. They are at
    /// least 24 numbers apart: dead letters in a row, with nothing good between them, would open the circuit.
    fn event(&mut self, ticket: u64) -> NewEvent {
        match (ticket % 200, ticket % 1_000) {
            _ if ticket == FIRST_STATEMENT => statement(self.account(), ticket),
            (_, 74) => deposit(NEVER_OPENED + ticket.cast_signed(), 100).in_balances(kind::NO_ROW),
            (_, 574) => statement(FIRST_ACCOUNT, FIRST_STATEMENT).in_balances(UNIQUE_VIOLATION),
            (24, _) => self.undecodable(),
            (49, _) => self.deposit(-1).dead_letter(type_name::<NegativeAmount>()),
            (99, _) => self.deposit(ALL_MONEY + 1).dead_letter(kind::PANIC),
            (149, _) => self.zero_deposit(),
            // No projection lists this type.
            (199, _) => NewEvent::new(self.account(), "AddressChanged", &json!({ "city": "Bern" })),
            _ => self.good(ticket),
        }
    }

    fn good(&mut self, ticket: u64) -> NewEvent {
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
            2..5 => statement(account, ticket),
            5..200 if account != to => NewEvent::new(account, "Transferred", &Transferred { from: account, to, cents }),
            200..400 => NewEvent::new(account, "Withdrawn", &Withdrawn { account, cents }),
            _ => self.deposit(cents),
        }
    }

    fn deposit(&mut self, cents: i64) -> NewEvent {
        deposit(self.account(), cents)
    }

    fn zero_deposit(&mut self) -> NewEvent {
        self.deposit(0).in_balances("skipped")
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
