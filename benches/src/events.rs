//! The bank's events as far as the benches use them.

use serde::{Deserialize, Serialize};

use crate::Result;

/// An account was opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AccountOpened {
    /// The account's number.
    pub account: i64,
    /// Whose it is.
    pub owner: String,
}

/// Money was paid in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Deposited {
    /// The account's number.
    pub account: i64,
    /// How much.
    pub cents: i64,
}

/// Money was paid out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Withdrawn {
    /// The account's number.
    pub account: i64,
    /// How much.
    pub cents: i64,
}

/// Any of them; the variants' names are the event types.
#[derive(Clone, Debug)]
pub enum BankEvent {
    /// See [`AccountOpened`].
    AccountOpened(AccountOpened),
    /// See [`Deposited`].
    Deposited(Deposited),
    /// See [`Withdrawn`].
    Withdrawn(Withdrawn),
}

impl BankEvent {
    /// Decodes a body by its event type.
    ///
    /// # Errors
    /// An unknown type, or a body that is not what the type promises.
    pub fn decode(event_type: &str, body: &[u8]) -> Result<Self> {
        Ok(match event_type {
            "AccountOpened" => Self::AccountOpened(serde_json::from_slice(body)?),
            "Deposited" => Self::Deposited(serde_json::from_slice(body)?),
            "Withdrawn" => Self::Withdrawn(serde_json::from_slice(body)?),
            other => return Err(format!("unknown event type {other}").into()),
        })
    }

    /// The account it is about.
    pub fn account(&self) -> i64 {
        match self {
            Self::AccountOpened(opened) => opened.account,
            Self::Deposited(deposited) => deposited.account,
            Self::Withdrawn(withdrawn) => withdrawn.account,
        }
    }

    /// What it adds to the account's balance; `None` where it opens the account.
    pub fn cents(&self) -> Option<i64> {
        match self {
            Self::AccountOpened(_) => None,
            Self::Deposited(deposited) => Some(deposited.cents),
            Self::Withdrawn(withdrawn) => Some(-withdrawn.cents),
        }
    }
}
