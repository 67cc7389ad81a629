//! How many rows a page asks for: within the demand, and few where bodies are large.

use scriba_core::source::Demand;

/// The first page of a subscription, whose bodies' size nobody knows yet.
const FIRST: usize = 16;

/// Learns from page to page how much may be asked for at once. What a page was asked for beyond `Demand::bytes` still comes
/// over the wire and is thrown away, so it starts small, doubles, and follows the mean size of the last page's events.
#[derive(Clone, Debug)]
pub(crate) struct PageSize {
    max: usize,
    current: usize,
    bytes_per_event: usize,
}

impl PageSize {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, current: FIRST.min(max), bytes_per_event: 1 }
    }

    /// Rows to ask for, at least 1.
    pub(crate) fn rows(&self, demand: Demand) -> usize {
        self.current.min(demand.events).min(demand.bytes / self.bytes_per_event).max(1)
    }

    /// A page came back with this much; `cut` if there was more of it than the demand's bytes.
    pub(crate) fn learn(&mut self, events: usize, bytes: usize, cut: bool) {
        if let Some(mean) = bytes.checked_div(events) {
            self.bytes_per_event = mean.max(1);
            self.current = if cut { events } else { (self.current * 2).min(self.max) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand { events: 4_000, bytes: 16 << 20 };

    #[test]
    fn pages_of_small_events_grow_to_the_maximum_and_never_above_the_demand() {
        let mut size = PageSize::new(1_000);
        for _ in 0..10 {
            let rows = size.rows(DEMAND);
            size.learn(rows, rows * 300, false);
        }
        assert_eq!(size.rows(DEMAND), 1_000);
        assert_eq!(size.rows(Demand { events: 7, ..DEMAND }), 7);
        assert_eq!(size.rows(Demand { bytes: 3_000, ..DEMAND }), 10);
        assert_eq!(size.rows(Demand { bytes: 1, ..DEMAND }), 1);
    }

    #[test]
    fn pages_of_large_events_shrink_to_what_the_demand_holds_and_grow_again_behind_them() {
        let mut size = PageSize::new(1_000);
        assert!(size.rows(DEMAND) <= FIRST, "nobody knows yet how large they are");
        size.current = 1_000;
        size.learn(16, 16 << 20, true);
        assert_eq!(size.rows(DEMAND), 16);
        size.learn(16, 16 << 20, false);
        assert_eq!(size.rows(DEMAND), 16, "as many as fit, however often it worked");
        for _ in 0..6 {
            size.learn(16, 16 * 300, false);
        }
        assert_eq!(size.rows(DEMAND), 1_000);
    }

    #[test]
    fn an_empty_page_teaches_nothing() {
        let mut size = PageSize::new(1_000);
        size.learn(0, 0, false);
        assert_eq!(size.rows(DEMAND), FIRST);
    }
}
