//! The two projections: one keeps the balance of each account and its statements, the other one entry for each movement of
//! money.

use scriba_core::{EventMeta, Handler, HandlerError, HandlerResult, Outcome, Projection};
use scriba_target_postgres::{CustomOp, PgOp, Table, custom};

use crate::events::{AccountEvent, MoneyEvent, StatementIssued};

#[derive(Table)]
#[table(name = "bank_balances")]
struct BalanceRow {
    #[table(key)]
    account: i64,
    owner: String,
    cents: i64,
    closed: bool,
}

/// Keeps `bank_balances`, one row for each account, and `bank_statements`.
#[derive(Projection)]
#[projection(name = "balances")]
pub(crate) struct Balances;

impl Handler for Balances {
    type Event = AccountEvent;
    type Op = PgOp;

    async fn handle(&self, event: AccountEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        Ok(match event {
            AccountEvent::AccountOpened(e) => {
                BalanceRow { account: e.account, owner: e.owner, cents: 0, closed: false }.insert().into()
            }
            AccountEvent::Deposited(e) if e.cents == 0 => Outcome::skip(),
            AccountEvent::Deposited(e) => add(e.account, amount(e.cents)?).into(),
            AccountEvent::Withdrawn(e) => add(e.account, -amount(e.cents)?).into(),
            AccountEvent::Transferred(e) => {
                let cents = amount(e.cents)?;
                Outcome::from(add(e.from, -cents)).and(add(e.to, cents))
            }
            AccountEvent::AccountClosed(e) => {
                BalanceRow::update(e.account).set(BalanceRow::CLOSED, true).required().into()
            }
            AccountEvent::StatementIssued(e) => statement(&e, meta.position.to_i64()?).into(),
        })
    }
}

/// An account that is not there would be money lost in silence, so the row is required.
fn add(account: i64, cents: i64) -> PgOp {
    BalanceRow::update(account).add(BalanceRow::CENTS, cents).required().into()
}

/// Writes a statement. The handler could not read the balance: it runs ahead of what is committed. The closure runs in its
/// place among the operations, and finds what the events before this one have made of the read model, no more and no less.
/// A number that is taken breaks the key of the table, and the event becomes a dead letter.
fn statement(issued: &StatementIssued, position: i64) -> CustomOp {
    let StatementIssued { account, number } = *issued;
    custom(move |connection| {
        Box::pin(async move {
            let cents: i64 = sqlx::query_scalar("SELECT cents FROM bank_balances WHERE account = $1")
                .bind(account)
                .fetch_one(&mut *connection)
                .await?;
            let last: Option<i64> = sqlx::query_scalar(
                "SELECT cents FROM bank_statements WHERE account = $1 ORDER BY position DESC LIMIT 1",
            )
            .bind(account)
            .fetch_optional(&mut *connection)
            .await?;
            sqlx::query(
                "INSERT INTO bank_statements (number, account, position, cents, change) VALUES ($1, $2, $3, $4, $5)",
            )
            .bind(number)
            .bind(account)
            .bind(position)
            .bind(cents)
            .bind(cents - last.unwrap_or(0))
            .execute(connection)
            .await?;
            Ok(())
        })
    })
}

#[derive(Table)]
#[table(name = "bank_entries")]
struct EntryRow {
    #[table(key)]
    position: i64,
    /// A transfer has two.
    #[table(key)]
    leg: i16,
    account: i64,
    cents: i64,
}

/// Keeps `bank_entries`: one row for each movement of money on an account, nothing ever changed.
#[derive(Projection)]
#[projection(name = "entries")]
pub(crate) struct Entries;

impl Handler for Entries {
    type Event = MoneyEvent;
    type Op = PgOp;

    async fn handle(&self, event: MoneyEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        let position = meta.position.to_i64()?;
        let entry = |leg, account, cents| PgOp::from(EntryRow { position, leg, account, cents }.insert());
        Ok(match event {
            MoneyEvent::Deposited(e) => entry(1, e.account, amount(e.cents)?).into(),
            MoneyEvent::Withdrawn(e) => entry(1, e.account, -amount(e.cents)?).into(),
            MoneyEvent::Transferred(e) => {
                let cents = amount(e.cents)?;
                Outcome::from(entry(1, e.from, -cents)).and(entry(2, e.to, cents))
            }
        })
    }
}

/// More than this is not in the bank.
pub(crate) const ALL_MONEY: i64 = 1_000_000_000_000;

/// An amount that cannot have been moved. The name of the type is the kind of the dead letter.
#[derive(Debug, thiserror::Error)]
#[error("{0} cents: an amount is never negative")]
pub(crate) struct NegativeAmount(i64);

/// Looks at an amount. The error cannot go away, so it is not tried again; the panic is here to show what becomes of one.
fn amount(cents: i64) -> Result<i64, HandlerError> {
    assert!(cents <= ALL_MONEY, "{cents} cents are more than the bank has");
    if cents < 0 { Err(HandlerError::permanent(NegativeAmount(cents))) } else { Ok(cents) }
}

/// This file, for telling its panics from others.
pub(crate) const FILE: &str = file!();

#[cfg(test)]
mod tests {
    use scriba_core::dead_letter::kind;
    use scriba_testing::{Given, handle};
    use serde_json::json;

    use super::*;
    use crate::events::Transferred;

    fn deposit(cents: &serde_json::Value) -> Given {
        Given::event("Deposited", &json!({ "account": 1, "cents": cents }))
    }

    #[tokio::test]
    async fn a_transfer_is_two_operations_in_both_read_models() {
        let transferred = || Given::event("Transferred", &Transferred { from: 1, to: 2, cents: 5 });
        assert_eq!(handle(&Balances, transferred()).await.unwrap().ops().len(), 2);
        assert_eq!(handle(&Entries, transferred()).await.unwrap().ops().len(), 2);
    }

    #[tokio::test]
    async fn an_empty_deposit_is_an_entry_and_leaves_the_balance_alone() {
        assert!(handle(&Balances, deposit(&json!(0))).await.unwrap().is_skip());
        assert_eq!(handle(&Entries, deposit(&json!(0))).await.unwrap().ops().len(), 1);
    }

    #[tokio::test]
    async fn each_bad_amount_becomes_a_dead_letter_of_its_kind() {
        let amounts = [
            (json!("a lot"), kind::DECODE),
            (json!(-1), "bank::projections::NegativeAmount"),
            (json!(ALL_MONEY + 1), kind::PANIC),
        ];
        for (cents, kind) in amounts {
            assert_eq!(handle(&Balances, deposit(&cents)).await.unwrap_err().kind, kind);
            assert_eq!(handle(&Entries, deposit(&cents)).await.unwrap_err().kind, kind);
        }
    }
}
