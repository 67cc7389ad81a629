//! The task that owns a subscription: it asks for pages and passes acks back.

use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::event::Position;
use crate::source::{Demand, Page, SourceError, Subscription};

/// How long an ack lets a page finish that is being read, before it interrupts the reading: long enough for a
/// page that is on its way, short enough for a server that waits for acks before it sends more.
const ACK_PATIENCE: Duration = Duration::from_millis(20);
/// An ack that takes longer has failed: nothing is read meanwhile, and the end of the pipeline waits for the last one.
const ACK_TIMEOUT: Duration = Duration::from_secs(10);

/// What the pipeline wants of the reader. The latest order counts, so nothing queues up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Orders {
    /// The page wanted, by its number; a number is served once. `None` while nothing is to be read.
    pub(crate) page: Option<(u64, Demand)>,
    /// Everything up to it is durable.
    pub(crate) ack: Option<Position>,
}

/// Serves orders until they end, then passes the last ack on.
pub(crate) async fn read(
    mut subscription: Box<dyn Subscription>,
    mut orders: watch::Receiver<Orders>,
    pages: mpsc::Sender<Result<Page, SourceError>>,
) {
    let acks = subscription.wants_acks();
    let mut served = 0;
    let mut acked = None;
    loop {
        let order = *orders.borrow_and_update();
        if acks
            && order.ack > acked
            && let Some(position) = order.ack
        {
            let acking = tokio::time::timeout(ACK_TIMEOUT, subscription.ack(position)).await;
            if let Err(error) = acking.unwrap_or_else(|_| Err(SourceError::unavailable(not_acked(position)))) {
                // A closed channel means that the pipeline is gone, and with it whoever would want the error.
                let _ = pages.send(Err(error)).await;
                return;
            }
            acked = order.ack;
        }
        if orders.has_changed().is_err() {
            return;
        }
        let Some((number, demand)) = order.page.filter(|(number, _)| *number > served) else {
            // An end is noticed at the top, after the last ack.
            let _ = orders.changed().await;
            continue;
        };
        let page = tokio::select! {
            // Biased: a page that is there is taken before anything new is considered.
            biased;
            page = subscription.next(demand) => page,
            () = interrupted(&mut orders, number, acks) => continue,
        };
        served = number;
        let failed = page.is_err();
        if pages.send(page).await.is_err() || failed {
            return;
        }
    }
}

fn not_acked(position: Position) -> String {
    format!("the source has not answered the ack of position {position} within {ACK_TIMEOUT:?}")
}

/// Waits until reading the page has to be interrupted: it is not wanted any more, or an ack cannot wait.
async fn interrupted(orders: &mut watch::Receiver<Orders>, number: u64, acks: bool) {
    while orders.changed().await.is_ok() {
        if orders.borrow().page.is_none_or(|(wanted, _)| wanted != number) {
            return;
        }
        if acks {
            return tokio::time::sleep(ACK_PATIENCE).await;
        }
    }
}
