//! The engine doing what the hand-written loop does: balances out of a Postgres log, with default options.

use std::sync::Arc;
use std::time::Duration;

use scriba_core::telemetry::{BatchStop, Observer};
use scriba_core::{
    EventMeta, Events, Handler, HandlerResult, Position, Projection, ProjectionId, ProjectionOptions, Scriba, Source,
    WaitFor,
};
use scriba_source_postgres::PgLog;
use scriba_target_postgres::{PgOp, PgTarget, Table};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{PgConnection, PgPool};
use tokio::sync::watch;

use crate::Result;
use crate::events::{AccountOpened, Deposited, Withdrawn};
use crate::hand_loop::{Until, reset_balances};

/// No catch-up of a bench takes longer.
const AN_HOUR: Duration = Duration::from_hours(1);

/// Creates the table of balances and the control tables, all empty, in place of those that there are.
pub async fn reset(connection: &mut PgConnection, database: &PgConnectOptions) -> Result<()> {
    reset_balances(connection).await?;
    let target = PgTarget::new(pool(database).await?);
    target.migrate_down().await?;
    target.migrate().await?;
    Ok(())
}

/// Runs the engine on the log in the database, from its checkpoint. Each watermark is told to `watermark` once it is durable.
pub async fn run(database: &PgConnectOptions, until: Until, watermark: watch::Sender<Option<i64>>) -> Result<()> {
    let log = PgLog::new(pool(database).await?, "bank_events").notify_channel("bank_events");
    run_from(log, database, until, watermark).await
}

/// The same on any source.
pub async fn run_from(
    source: impl Source,
    database: &PgConnectOptions,
    until: Until,
    watermark: watch::Sender<Option<i64>>,
) -> Result<()> {
    let pool = pool(database).await?;
    let scriba = Scriba::with_observers([Arc::new(Watermark(watermark)) as Arc<dyn Observer>]);
    scriba.start(Balances, source, PgTarget::new(pool), ProjectionOptions::default()).await?;
    match until {
        Until::Position(last) => {
            let last = WaitFor::Position(Position::from_i64(last)?);
            scriba.wait_for(ProjectionId::of::<Balances>(), last, AN_HOUR).await?;
            scriba.shutdown().await?;
            Ok(())
        }
        Until::Forever => std::future::pending().await,
    }
}

async fn pool(database: &PgConnectOptions) -> Result<PgPool> {
    Ok(PgPoolOptions::new().max_connections(2).connect_with(database.clone()).await?)
}

/// Tells each watermark on.
struct Watermark(watch::Sender<Option<i64>>);

impl Observer for Watermark {
    fn watches_events(&self) -> bool {
        false
    }

    fn batch_stop(&self, _: &ProjectionId, batch: &BatchStop) {
        self.0.send_replace(batch.watermark.to_i64().ok());
    }
}

#[derive(Events)]
enum BalanceEvent {
    AccountOpened(AccountOpened),
    Deposited(Deposited),
    Withdrawn(Withdrawn),
}

#[derive(Table)]
#[table(name = "balances")]
struct Balance {
    #[table(key)]
    account: i64,
    cents: i64,
}

#[derive(Projection)]
#[projection(name = "balances")]
struct Balances;

impl Handler for Balances {
    type Event = BalanceEvent;
    type Op = PgOp;

    async fn handle(&self, event: BalanceEvent, _: &EventMeta) -> HandlerResult<PgOp> {
        Ok(match event {
            BalanceEvent::AccountOpened(opened) => Balance { account: opened.account, cents: 0 }.insert().into(),
            BalanceEvent::Deposited(deposited) => {
                Balance::update(deposited.account).add(Balance::CENTS, deposited.cents).into()
            }
            BalanceEvent::Withdrawn(withdrawn) => {
                Balance::update(withdrawn.account).add(Balance::CENTS, -withdrawn.cents).into()
            }
        })
    }
}
