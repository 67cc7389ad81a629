//! The task that keeps the lease and writes states down, over a connection of its own on the control thread.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{Instrument as _, info_span};

use super::live::Live;
use super::messages::{Input, LeaseNews, Order};
use crate::failure::FailureClass;
use crate::lifecycle::State;
use crate::projection::ProjectionId;
use crate::target::{Control, LeaseAnswer, Owner, Tables, TargetError};

/// No question to the tables may take longer than this, nor longer than the lease.
const PATIENCE: Duration = Duration::from_secs(5);
/// Orders that may queue up: they are few.
const QUEUE: usize = 64;

/// What a keeper is made from.
#[derive(Clone)]
pub(crate) struct Keeper {
    pub(crate) id: ProjectionId,
    pub(crate) owner: Owner,
    /// How long a lease runs; `None` where leases are off.
    pub(crate) lease: Option<Duration>,
    pub(crate) tables: Arc<dyn Tables>,
    pub(crate) live: Arc<Live>,
    pub(crate) inbox: mpsc::Sender<Input>,
}

impl Keeper {
    /// Spawns the task that serves the orders of the sender, until it is told to end or the sender is gone.
    pub(crate) fn spawn(&self) -> (mpsc::Sender<Order>, JoinHandle<()>) {
        let (orders, ordered) = mpsc::channel(QUEUE);
        let keeping = Keeping { keeper: self.clone(), connection: None };
        (orders, tokio::spawn(keeping.keep(ordered).instrument(info_span!(target: "scriba", "keeper"))))
    }

    fn patience(&self) -> Duration {
        self.lease.map_or(PATIENCE, |lease| lease.min(PATIENCE))
    }
}

struct Keeping {
    keeper: Keeper,
    connection: Option<Box<dyn Control>>,
}

impl Keeping {
    /// Serves orders and renews the lease while it is held.
    async fn keep(mut self, mut orders: mpsc::Receiver<Order>) {
        let mut renew_at: Option<Instant> = None;
        loop {
            let due = renew_at.unwrap_or_else(Instant::now);
            let order = tokio::select! {
                // Biased: a renewal that is due goes first; a lapsed lease is worse than a late order.
                biased;
                () = sleep_until(due), if renew_at.is_some() => {
                    renew_at = self.renew().await;
                    continue;
                }
                order = orders.recv() => order,
            };
            match order {
                Some(Order::Acquire) => {
                    let answer = self.acquire().await;
                    if matches!(answer, Ok(LeaseAnswer::Held)) {
                        renew_at = self.keeper.lease.map(|lease| Instant::now() + lease / 3);
                    }
                    self.tell(Input::Lease(LeaseNews::Answer(answer))).await;
                }
                Some(Order::Seize) => {
                    let seized = self.seize().await;
                    if seized.is_ok() {
                        renew_at = self.keeper.lease.map(|lease| Instant::now() + lease / 3);
                    }
                    self.tell(Input::Lease(LeaseNews::Seized(seized))).await;
                }
                Some(Order::Store) => self.store(None).await,
                Some(Order::End) => {
                    self.store(Some(State::Stopped)).await;
                    self.release().await;
                    return self.tell(Input::Released).await;
                }
                None => return,
            }
        }
    }

    async fn tell(&mut self, input: Input) {
        // A coordinator that is gone has no use for news.
        let _ = self.keeper.inbox.send(input).await;
    }

    async fn acquire(&mut self) -> Result<LeaseAnswer, TargetError> {
        let Some(lease) = self.keeper.lease else { return Ok(LeaseAnswer::Held) };
        let (id, owner) = (self.keeper.id.clone(), self.keeper.owner.clone());
        let patience = self.keeper.patience();
        let connection = self.connection().await?;
        let answer = in_time(patience, connection.lease(&id, &owner, lease)).await;
        self.keep_if_ok(answer)
    }

    async fn seize(&mut self) -> Result<(), TargetError> {
        let Some(lease) = self.keeper.lease else { return Ok(()) };
        let (id, owner) = (self.keeper.id.clone(), self.keeper.owner.clone());
        let patience = self.keeper.patience();
        let connection = self.connection().await?;
        let seized = in_time(patience, connection.seize(&id, &owner, lease)).await;
        self.keep_if_ok(seized)
    }

    /// When to renew next; `None` once the lease is another's.
    async fn renew(&mut self) -> Option<Instant> {
        let lease = self.keeper.lease?;
        let next = match self.acquire().await {
            Ok(LeaseAnswer::Held) => Instant::now() + lease / 3,
            Ok(LeaseAnswer::HeldBy { holder, .. }) => {
                self.tell(Input::Lease(LeaseNews::Lost { holder })).await;
                return None;
            }
            Err(error) => {
                tracing::warn!(target: "scriba", projection = %self.keeper.id, error = %error.message, "the lease could not be renewed");
                Instant::now() + lease / 10
            }
        };
        // What other nodes see of this one is brought up to date with the lease.
        self.store(None).await;
        Some(next)
    }

    /// Writes down how things stand, or the state that they are about to reach.
    async fn store(&mut self, state: Option<State>) {
        let (Some(epoch), mut record) = self.keeper.live.record() else { return };
        record.state = state.unwrap_or(record.state);
        let (id, patience) = (self.keeper.id.clone(), self.keeper.patience());
        let stored = match self.connection().await {
            Ok(connection) => in_time(patience, connection.store_state(&id, epoch, &record)).await,
            Err(error) => Err(error),
        };
        if let Err(error) = self.keep_if_ok(stored) {
            tracing::warn!(target: "scriba", projection = %self.keeper.id, error = %error.message, "the state could not be written down");
        }
    }

    async fn release(&mut self) {
        if self.keeper.lease.is_none() {
            return;
        }
        let (id, owner, patience) = (self.keeper.id.clone(), self.keeper.owner.clone(), self.keeper.patience());
        let released = match self.connection().await {
            Ok(connection) => in_time(patience, connection.release(&id, &owner)).await,
            Err(error) => Err(error),
        };
        if let Err(error) = self.keep_if_ok(released) {
            tracing::warn!(target: "scriba", projection = %self.keeper.id, error = %error.message, "the lease could not be released and will lapse");
        }
    }

    async fn connection(&mut self) -> Result<&mut Box<dyn Control>, TargetError> {
        if self.connection.is_none() {
            self.connection = Some(in_time(self.keeper.patience(), self.keeper.tables.control()).await?);
        }
        self.connection.as_mut().ok_or_else(|| TargetError::new(FailureClass::TransientServer, "not connected"))
    }

    fn keep_if_ok<T>(&mut self, answer: Result<T, TargetError>) -> Result<T, TargetError> {
        if answer.is_err() {
            self.connection = None;
        }
        answer
    }
}

async fn in_time<T>(
    patience: Duration,
    question: impl Future<Output = Result<T, TargetError>>,
) -> Result<T, TargetError> {
    timeout(patience, question).await.unwrap_or_else(|_| {
        Err(TargetError::new(FailureClass::TransientServer, format!("the target did not answer within {patience:?}")))
    })
}
