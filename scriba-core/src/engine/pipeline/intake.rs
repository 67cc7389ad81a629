//! The pipeline's side of the source: pages are ordered and come in, acks go back.

use std::collections::VecDeque;

use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;
use tracing::{Instrument as _, info_span};

use crate::engine::reader::{self, Orders};
use crate::event::Position;
use crate::source::{Demand, Page, SourceError, Subscription};

pub(super) struct Intake {
    reader: JoinHandle<()>,
    orders: watch::Sender<Orders>,
    pages: mpsc::Receiver<Result<Page, SourceError>>,
    /// The number of the page that was ordered last, and whether it is still to come.
    page: u64,
    ordered: bool,
    /// The source knew of nothing more when it read the last page.
    pub(super) caught_up: bool,
    /// Everything up to the position at which the projection is to end was handed out.
    pub(super) reached: bool,
    pub(super) last_arrival: Instant,
    /// When the pages arrived that elements of the window came with, each with the number of its first element.
    arrivals: VecDeque<(u64, Instant)>,
    /// A page that arrived in a pause: kept for when it is over.
    pub(super) held: Option<Page>,
}

impl Intake {
    /// Spawns the reader.
    pub(super) fn new(subscription: Box<dyn Subscription>, reached: bool) -> Self {
        let (orders, ordered) = watch::channel(Orders::default());
        let (pages_in, pages) = mpsc::channel(1);
        Self {
            reader: tokio::spawn(
                reader::read(subscription, ordered, pages_in).instrument(info_span!(target: "scriba", "reader")),
            ),
            orders,
            pages,
            page: 0,
            ordered: false,
            caught_up: false,
            reached,
            last_arrival: Instant::now(),
            arrivals: VecDeque::new(),
            held: None,
        }
    }

    /// The page that was ordered, or the end of the subscription. Can be cancelled without loss.
    pub(super) async fn next(&mut self) -> Option<Result<Page, SourceError>> {
        let page = self.pages.recv().await;
        self.ordered = false;
        page
    }

    pub(super) fn is_ordered(&self) -> bool {
        self.ordered
    }

    pub(super) fn order(&mut self, demand: Demand) {
        self.page += 1;
        self.ordered = true;
        let page = Some((self.page, demand));
        self.orders.send_modify(|orders| orders.page = page);
    }

    /// Takes back what was ordered and has not come.
    pub(super) fn order_nothing(&mut self) {
        self.orders.send_if_modified(|orders| orders.page.take().is_some());
        self.ordered = false;
    }

    pub(super) fn ack(&self, position: Position) {
        self.orders.send_modify(|orders| orders.ack = Some(position));
    }

    /// Notes that a page has come whose first element gets a number.
    pub(super) fn note_arrival(&mut self, first: u64, caught_up: bool) {
        self.last_arrival = Instant::now();
        self.caught_up = caught_up;
        // An earlier page of that number brought no element of its own: behind an event that is stuck any number of them may come.
        self.arrivals.pop_back_if(|(number, _)| *number == first);
        self.arrivals.push_back((first, self.last_arrival));
    }

    /// When the element of a number came, which is the first that is still asked for; `None` for nothing any more.
    pub(super) fn arrival(&mut self, number: Option<u64>) -> Option<Instant> {
        let Some(number) = number else {
            self.arrivals.clear();
            return None;
        };
        while self.arrivals.get(1).is_some_and(|(first, _)| *first <= number) {
            self.arrivals.pop_front();
        }
        self.arrivals.front().map(|(_, since)| *since)
    }

    /// Passes the last ack on and lets go of the source.
    pub(super) async fn end(self) -> Result<(), JoinError> {
        let Self { reader, orders, pages, .. } = self;
        drop((orders, pages));
        reader.await
    }
}
