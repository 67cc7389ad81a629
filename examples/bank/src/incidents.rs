//! What goes wrong on purpose while the bank runs, and how it is mended: the database is out of reach for a while, and a column
//! of a read model goes missing.
//!
//! | stage | begins when | and then |
//! |---|---|---|
//! | calm | | |
//! | outage | a third of the events is given out | the projections are cut off; the events go on to the second third |
//! | recovery | its time is over | the projections catch up by themselves |
//! | column missing | they have caught up | the last third is written; the entries halt |
//! | halted | they have | an operator puts the column back, then stops and starts them |
//! | over | | they go on where they were |

use std::sync::Arc;
use std::time::Duration;

use scriba_core::target::StoredProjection;
use scriba_core::{FailureClass, Projection as _, State};
use sqlx::{Executor as _, PgPool};
use tokio::time::Instant;

use crate::Result;
use crate::nodes::Nodes;
use crate::projections::Entries;
use crate::relay::Relay;
use crate::report::Progress;
use crate::writer::Tickets;

/// What is to go wrong.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Plan {
    /// Cut the projections off from the database for so long, in seconds, a third of the way; 0 is never
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=20))]
    pub(crate) outage: u64,
    /// Take a column of a read model away, two thirds of the way, and put it back so long after its projection has halted, in
    /// seconds; 0 is never
    #[arg(long, value_name = "S", default_value_t = 3, value_parser = clap::value_parser!(u64).range(0..=20))]
    pub(crate) column_missing: u64,
}

pub(crate) struct Incidents {
    plan: Plan,
    pool: PgPool,
    relay: Option<Relay>,
    tickets: Arc<Tickets>,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    Calm,
    Outage { until: Instant },
    Recovery,
    ColumnMissing,
    Halted { until: Instant },
    Over,
}

impl Incidents {
    /// Holds the writers back at the first third. `relay` is the way of the projections to the database, where it is to be cut.
    pub(crate) fn new(plan: Plan, pool: PgPool, relay: Option<Relay>, tickets: Arc<Tickets>) -> Self {
        tickets.open_to(tickets.third(1));
        Self { plan, pool, relay, tickets, stage: Stage::Calm }
    }

    /// Lets happen what is due.
    pub(crate) async fn step(&mut self, progress: &Progress, written: bool, nodes: &mut Nodes) -> Result<()> {
        let now = Instant::now();
        match self.stage {
            Stage::Calm if self.tickets.given() >= self.tickets.third(1) => {
                self.stage = Stage::Recovery;
                if let Some(relay) = &mut self.relay {
                    let seconds = self.plan.outage;
                    println!(
                        "OUTAGE: for {seconds} s the projections do not reach the database: a relay on loopback that their connections go \
                         through has broken them and refuses new ones, so that no server has to be stopped; the writers go on"
                    );
                    relay.cut().await?;
                    self.stage = Stage::Outage { until: now + Duration::from_secs(seconds) };
                }
                self.tickets.open_to(self.tickets.third(2));
            }
            Stage::Outage { until } if now >= until => {
                println!("END OF OUTAGE: the projections reach the database again as soon as they try");
                if let Some(relay) = &mut self.relay {
                    relay.restore()?;
                }
                self.stage = Stage::Recovery;
            }
            Stage::Recovery if self.tickets.given() >= self.tickets.third(2) && progress.caught_up() => {
                self.stage = Stage::Over;
                if self.plan.column_missing > 0 {
                    println!("MISSING COLUMN: bank_entries.cents is now called amount, which entries does not know");
                    self.pool.execute("ALTER TABLE bank_entries RENAME COLUMN cents TO amount").await?;
                    self.stage = Stage::ColumnMissing;
                }
                self.tickets.open_to(u64::MAX);
            }
            Stage::ColumnMissing => {
                if let Some(halted) = progress.halted().find(|halted| self.explains(halted)) {
                    println!("HALTED: {}", describe_halt(halted));
                    self.stage = Stage::Halted { until: now + Duration::from_secs(self.plan.column_missing) };
                } else if written && progress.caught_up() {
                    println!("no event came for entries while the column was missing");
                    self.repair(nodes).await?;
                }
            }
            Stage::Halted { until } if now >= until => self.repair(nodes).await?,
            _ => {}
        }
        Ok(())
    }

    /// What an operator would do: mend what the halt names, then stop and start the projection.
    async fn repair(&mut self, nodes: &mut Nodes) -> Result<()> {
        self.pool.execute("ALTER TABLE bank_entries RENAME COLUMN amount TO cents").await?;
        nodes.restart(Entries::NAME)?;
        println!("REPAIRED: bank_entries.cents is back; entries is stopped and started in the process that runs it");
        self.stage = Stage::Over;
        Ok(())
    }

    /// Whether a projection halted for what was done to it here, be it that it has not been started again yet.
    pub(crate) fn explains(&self, halted: &StoredProjection) -> bool {
        let broken = matches!(self.stage, Stage::ColumnMissing | Stage::Halted { .. } | Stage::Over);
        // The column is missed by a statement, with a code, or by the engine in the catalogue, without.
        let structural = halted.state.halt_class == Some(FailureClass::Structural);
        broken && structural && halted.id.name == Entries::NAME && halted.state.state == State::Halted
    }

    /// Whether nothing goes wrong any more.
    pub(crate) fn are_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }
}

/// A halt as the tables tell it: name, class, code and reason.
pub(crate) fn describe_halt(halted: &StoredProjection) -> String {
    let (name, state) = (&halted.id.name, &halted.state);
    let class = state.halt_class.as_ref().map(FailureClass::to_string).unwrap_or_default();
    let code = state.halt_code.as_deref().unwrap_or("none");
    let reason = state.halt_reason.as_deref().unwrap_or("no reason was written down");
    format!("{name}, class {class}, code {code}: {reason}")
}
