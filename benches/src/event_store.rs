//! A catch-up from an event store, beside reading the same events with no projection: where the time goes.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use fastrand::Rng;
use kurrentdb::{Client, StreamPosition, SubscribeToStreamOptions};
use scriba_core::source::{Delivery, Demand, Source, SubscribeRequest};
use scriba_core::telemetry::Telemetry;
use scriba_core::{Position, ProjectionId};
use scriba_source_eventstore::{CatchUpSource, EventStore, PersistentSource};
use scriba_testing::eventstore::{EventStoreDouble, NewEvent};
use sqlx::postgres::PgConnectOptions;
use tokio::sync::watch;

use crate::hand_loop::Until;
use crate::measure::Usage;
use crate::side::CatchUp;
use crate::{Result, engine_loop};

const CATEGORY: &str = "account";
/// What the engine asks for by default.
const PAGE: Demand = Demand { events: 1_000, bytes: 16 << 20 };

/// One of the things compared. Each reads the category from its beginning, the first two with no projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// The client crate alone.
    Client,
    /// The source alone, as the engine would ask it.
    Source,
    /// The engine, by a catch-up subscription.
    CatchUp,
    /// The engine, by a persistent subscription.
    Persistent,
}

impl Reading {
    /// In the order in which each adds to the one before it.
    pub const ALL: [Self; 4] = [Self::Client, Self::Source, Self::CatchUp, Self::Persistent];

    /// Whether it leaves balances.
    pub fn projects(self) -> bool {
        matches!(self, Self::CatchUp | Self::Persistent)
    }
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client => "client",
            Self::Source => "source",
            Self::CatchUp => "engine-catch-up",
            Self::Persistent => "engine-persistent",
        })
    }
}

impl FromStr for Reading {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|reading| reading.to_string() == name);
        found.ok_or_else(|| format!("unknown reading {name}"))
    }
}

/// Fills a store with events of so many accounts, and gives back what they sum up to.
pub fn fill(store: &EventStoreDouble, events: u64, accounts: u32) -> i64 {
    let mut rng = Rng::with_seed(1);
    let mut opened = vec![false; accounts as usize];
    let mut sum = 0;
    for _ in 0..events {
        let account = rng.u32(..accounts);
        let (event_type, data) = if std::mem::replace(&mut opened[account as usize], true) {
            let cents = rng.i64(1..100_000);
            sum += cents;
            ("Deposited", format!(r#"{{"account":{account},"cents":{cents}}}"#))
        } else {
            ("AccountOpened", format!(r#"{{"account":{account},"owner":"owner {account}"}}"#))
        };
        store.append(&format!("{CATEGORY}-{account}"), [NewEvent::json(event_type, data)]);
    }
    sum
}

/// Reads so many events of a store, into a database where there is a projection. Called once in a process, whose use of the processor
/// it measures.
pub async fn read(reading: Reading, connection: &str, events: u64, database: &PgConnectOptions) -> Result<CatchUp> {
    let last = Position::new(events - 1);
    let until = Until::Position(last.to_i64()?);
    let started = Instant::now();
    let store = EventStore::new(connection)?;
    match reading {
        Reading::Client => by_client(connection, events).await?,
        Reading::Source => by_source(&CatchUpSource::category(&store, CATEGORY), last).await?,
        Reading::CatchUp => {
            engine_loop::run_from(CatchUpSource::category(&store, CATEGORY), database, until, watch::channel(None).0)
                .await?;
        }
        Reading::Persistent => {
            engine_loop::run_from(
                PersistentSource::category(&store, CATEGORY),
                database,
                until,
                watch::channel(None).0,
            )
            .await?;
        }
    }
    Ok(CatchUp { took: started.elapsed(), usage: Usage::of_this_process()? })
}

async fn by_client(connection: &str, events: u64) -> Result<()> {
    let client = Client::new(connection.parse()?)?;
    let options = SubscribeToStreamOptions::default().start_from(StreamPosition::Start).resolve_link_tos();
    let mut subscription = client.subscribe_to_stream(format!("$ce-{CATEGORY}"), &options).await;
    for _ in 0..events {
        subscription.next().await?;
    }
    Ok(())
}

async fn by_source(source: &impl Source, last: Position) -> Result<()> {
    let telemetry = Telemetry::new(ProjectionId::from("bench"), Vec::new());
    let request = SubscribeRequest { after: None, event_types: None, in_flight: PAGE.events, telemetry };
    let mut subscription = source.subscribe(request).await?;
    loop {
        let page = subscription.next(PAGE).await?;
        if page.deliveries.last().map(Delivery::position) >= Some(last) {
            return Ok(());
        }
    }
}
