//! What was received and not handed out yet: cut to what was demanded. Pure.

use std::collections::VecDeque;

use scriba_core::source::{Delivery, Demand};

/// Elements in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    queue: VecDeque<Delivery>,
    events: usize,
    bytes: usize,
}

impl Pending {
    /// Adds an element. A run of progress is one element, the last.
    pub(crate) fn push(&mut self, delivery: Delivery) {
        match &delivery {
            Delivery::Event(event) => {
                self.events += 1;
                self.bytes += event.size();
            }
            Delivery::Progress(_) => {
                self.queue.pop_back_if(|last| matches!(last, Delivery::Progress(_)));
            }
        }
        self.queue.push_back(delivery);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether more would not fit into what is demanded.
    pub(crate) fn is_enough(&self, demand: Demand) -> bool {
        self.events >= demand.events || self.bytes >= demand.bytes
    }

    /// Takes what is demanded: one event always, however large.
    pub(crate) fn take(&mut self, demand: Demand) -> Vec<Delivery> {
        let mut taken = Vec::new();
        let (mut events, mut bytes) = (0, 0);
        while let Some(next) = self.queue.front() {
            if let Delivery::Event(event) = next {
                let size = event.size();
                if events > 0 && (events >= demand.events || bytes + size > demand.bytes) {
                    break;
                }
                events += 1;
                bytes += size;
            }
            taken.extend(self.queue.pop_front());
        }
        self.events -= events;
        self.bytes -= bytes;
        taken
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use scriba_core::{Position, RecordedEvent};

    use super::*;

    fn event(position: u64, body: usize) -> Delivery {
        Delivery::Event(RecordedEvent {
            id: "id".into(),
            stream_id: "s".into(),
            event_type: "happened".into(),
            position: Position::new(position),
            revision: None,
            data: Bytes::from(vec![0; body]),
            metadata: Bytes::new(),
            occurred_at: None,
        })
    }

    fn progress(position: u64) -> Delivery {
        Delivery::Progress(Position::new(position))
    }

    fn of(deliveries: impl IntoIterator<Item = Delivery>) -> Pending {
        let mut pending = Pending::default();
        deliveries.into_iter().for_each(|delivery| pending.push(delivery));
        pending
    }

    fn taken(pending: &mut Pending, events: usize, bytes: usize) -> Vec<u64> {
        pending.take(Demand { events, bytes }).iter().map(|delivery| delivery.position().get()).collect()
    }

    #[test]
    fn a_run_of_progress_is_its_last_and_passes_no_event() {
        let mut pending = of([progress(1), progress(2), event(3, 0), progress(4), progress(5)]);
        assert_eq!(taken(&mut pending, 9, 9_000), [2, 3, 5]);
        assert!(pending.is_empty());
    }

    #[test]
    fn what_is_over_waits_for_the_next_demand_whatever_was_demanded_when_it_came() {
        let mut pending = of((1..=5).map(|position| event(position, 0)));
        assert!(pending.is_enough(Demand { events: 5, bytes: 90_000 }));
        assert_eq!(taken(&mut pending, 2, 90_000), [1, 2]);
        assert_eq!(taken(&mut pending, 1, 90_000), [3]);
        assert!(!pending.is_enough(Demand { events: 5, bytes: 90_000 }));
        assert_eq!(taken(&mut pending, 9, 90_000), [4, 5]);
    }

    #[test]
    fn one_event_is_taken_however_large_and_none_beyond_the_bytes() {
        let mut pending = of([event(1, 10_000), event(2, 100), event(3, 100), progress(4)]);
        assert!(pending.is_enough(Demand { events: 9, bytes: 500 }));
        assert_eq!(taken(&mut pending, 9, 500), [1]);
        assert_eq!(taken(&mut pending, 9, 500), [2]);
        assert_eq!(taken(&mut pending, 9, 500), [3, 4]);
    }
}
