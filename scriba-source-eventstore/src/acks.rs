//! Which events are durable and which of them the server has to be told. Pure.

use std::collections::BTreeMap;

use uuid::Uuid;

/// The acks of one subscription to a group.
#[derive(Debug)]
pub(crate) struct Acks {
    /// Everything up to here is durable.
    durable: Option<u64>,
    /// Above it: events by position.
    open: BTreeMap<u64, Uuid>,
    /// Durable, and the server does not know.
    to_send: Vec<Uuid>,
}

impl Acks {
    pub(crate) fn new(durable: Option<u64>) -> Self {
        Self { durable, open: BTreeMap::new(), to_send: Vec::new() }
    }

    /// Notes an event that was received. One that is durable already is acked by that: nobody else will, and a long run of
    /// them would fill the server's buffer for ever.
    pub(crate) fn received(&mut self, position: u64, id: Uuid) {
        if self.durable >= Some(position) {
            self.to_send.push(id);
        } else {
            self.open.insert(position, id);
        }
    }

    /// Notes that everything up to a position is durable.
    pub(crate) fn durable(&mut self, position: u64) {
        self.durable = self.durable.max(Some(position));
        let above = position.checked_add(1).map(|above| self.open.split_off(&above)).unwrap_or_default();
        self.to_send.extend(std::mem::replace(&mut self.open, above).into_values());
    }

    /// At most so many that the server has to be told.
    pub(crate) fn next(&self, most: usize) -> Option<&[Uuid]> {
        self.to_send.chunks(most).next()
    }

    /// The server is told of the first ones.
    pub(crate) fn sent(&mut self, count: usize) {
        self.to_send.drain(..count);
    }

    /// How many are with the engine, or on their way.
    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> Uuid {
        Uuid::from_u64_pair(0, number)
    }

    fn to_send(acks: &mut Acks, most: usize) -> Vec<Uuid> {
        let ids = acks.next(most).unwrap_or_default().to_vec();
        acks.sent(ids.len());
        ids
    }

    #[test]
    fn what_is_at_or_below_an_ack_is_sent_in_order_and_once() {
        let mut acks = Acks::new(None);
        for position in 0..5 {
            acks.received(position, id(position));
        }
        assert!(to_send(&mut acks, 10).is_empty());
        acks.durable(2);
        assert_eq!(to_send(&mut acks, 2), [id(0), id(1)]);
        assert_eq!(to_send(&mut acks, 2), [id(2)]);
        acks.durable(2);
        assert_eq!((to_send(&mut acks, 2), acks.open()), (vec![], 2));
        acks.durable(u64::MAX);
        assert_eq!((to_send(&mut acks, 9), acks.open()), (vec![id(3), id(4)], 0));
    }

    #[test]
    fn what_is_durable_already_is_sent_when_it_comes() {
        let mut acks = Acks::new(Some(7));
        for position in [6, 7, 8] {
            acks.received(position, id(position));
        }
        assert_eq!((to_send(&mut acks, 9), acks.open()), (vec![id(6), id(7)], 1));
        acks.durable(8);
        to_send(&mut acks, 9);
        // Delivered again before the server heard of the ack.
        acks.received(8, id(8));
        assert_eq!((to_send(&mut acks, 9), acks.open()), (vec![id(8)], 0));
    }

    #[test]
    fn an_event_that_comes_twice_before_its_ack_is_acked_once() {
        let mut acks = Acks::new(None);
        for position in [0, 1, 0] {
            acks.received(position, id(position));
        }
        acks.durable(1);
        assert_eq!(to_send(&mut acks, 9), [id(0), id(1)]);
    }
}
