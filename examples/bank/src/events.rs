//! What happens in the bank: the bodies of events, and which of them each projection takes.

use scriba_core::Events;
use serde::{Deserialize, Serialize};

/// An account was opened.
#[derive(Serialize, Deserialize)]
pub(crate) struct AccountOpened {
    pub(crate) account: i64,
    pub(crate) owner: String,
}

/// Money was paid in.
#[derive(Serialize, Deserialize)]
pub(crate) struct Deposited {
    pub(crate) account: i64,
    pub(crate) cents: i64,
}

/// Money was paid out.
#[derive(Serialize, Deserialize)]
pub(crate) struct Withdrawn {
    pub(crate) account: i64,
    pub(crate) cents: i64,
}

/// Money went from one account to another. The event is in the stream of the first.
#[derive(Serialize, Deserialize)]
pub(crate) struct Transferred {
    pub(crate) from: i64,
    pub(crate) to: i64,
    pub(crate) cents: i64,
}

/// An account was closed.
#[derive(Serialize, Deserialize)]
pub(crate) struct AccountClosed {
    pub(crate) account: i64,
}

/// A statement of an account was issued: its balance as of now, under a number that no other statement has.
#[derive(Serialize, Deserialize)]
pub(crate) struct StatementIssued {
    pub(crate) account: i64,
    pub(crate) number: i64,
}

/// Everything that happens to an account.
#[derive(Events)]
pub(crate) enum AccountEvent {
    AccountOpened(AccountOpened),
    Deposited(Deposited),
    Withdrawn(Withdrawn),
    Transferred(Transferred),
    AccountClosed(AccountClosed),
    StatementIssued(StatementIssued),
}

/// Everything that moves money.
#[derive(Events)]
pub(crate) enum MoneyEvent {
    Deposited(Deposited),
    Withdrawn(Withdrawn),
    Transferred(Transferred),
}
