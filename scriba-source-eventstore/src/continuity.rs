//! Whether something is missing before an event: the rule for positions that count up one by one. Pure.

/// Where a subscription stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Continuity {
    /// Where positions count up one by one, every jump is a hole; in the whole log they leap.
    counts: bool,
    /// The highest position that is accounted for: of the start, or arrived since.
    reached: Option<u64>,
    /// Nothing above the start has arrived.
    at_start: bool,
}

/// What an arrival is.
///
/// | position | |
/// |---|---|
/// | not above what is accounted for | below |
/// | the next one, or positions leap | next |
/// | any other | there is a hole before it |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    Below,
    Next,
    Behind(Hole),
}

/// Positions that were passed, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hole {
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// Nothing above the start came before it.
    pub(crate) at_start: bool,
}

impl Continuity {
    pub(crate) fn new(counts: bool, after: Option<u64>) -> Self {
        Self { counts, reached: after, at_start: true }
    }

    pub(crate) fn reached(&self) -> Option<u64> {
        self.reached
    }

    pub(crate) fn has_moved(&self) -> bool {
        !self.at_start
    }

    pub(crate) fn arrival(&self, position: u64) -> Arrival {
        if self.reached >= Some(position) {
            return Arrival::Below;
        }
        match position.checked_sub(1).and_then(|last| self.hole_up_to(last)) {
            Some(hole) if self.counts => Arrival::Behind(hole),
            _ => Arrival::Next,
        }
    }

    /// The positions up to one that have not arrived.
    pub(crate) fn hole_up_to(&self, last: u64) -> Option<Hole> {
        let first = self.reached.map_or(Some(0), |reached| reached.checked_add(1))?;
        (first <= last).then_some(Hole { first, last, at_start: self.at_start })
    }

    /// Everything up to a position is accounted for.
    pub(crate) fn reach(&mut self, position: u64) {
        if self.reached < Some(position) {
            self.reached = Some(position);
            self.at_start = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn hole(first: u64, last: u64, at_start: bool) -> Arrival {
        Arrival::Behind(Hole { first, last, at_start })
    }

    #[test]
    fn every_row_of_the_table() {
        let mut from_5 = Continuity::new(true, Some(5));
        assert_eq!(from_5.arrival(5), Arrival::Below);
        assert_eq!(from_5.arrival(6), Arrival::Next);
        assert_eq!(from_5.arrival(9), hole(6, 8, true));
        from_5.reach(6);
        assert_eq!(from_5.arrival(9), hole(7, 8, false));
    }

    #[test]
    fn the_beginning_is_before_position_0() {
        let beginning = Continuity::new(true, None);
        assert_eq!(beginning.arrival(0), Arrival::Next);
        assert_eq!(beginning.arrival(1), hole(0, 0, true));
        assert_eq!(Continuity::new(true, Some(0)).arrival(0), Arrival::Below);
        assert_eq!(Continuity::new(true, Some(u64::MAX)).arrival(u64::MAX), Arrival::Below);
    }

    #[test]
    fn in_the_whole_log_a_jump_is_no_hole() {
        let mut all = Continuity::new(false, None);
        assert_eq!(all.arrival(4_711), Arrival::Next);
        all.reach(4_711);
        assert_eq!(all.arrival(4_711), Arrival::Below);
        assert_eq!(all.arrival(9_000), Arrival::Next);
    }

    #[test]
    fn what_is_delivered_again_below_the_start_makes_no_hole_and_leaves_the_start_where_it_was() {
        let mut from_9 = Continuity::new(true, Some(9));
        for again in [3, 7] {
            assert_eq!(from_9.arrival(again), Arrival::Below);
            from_9.reach(again);
        }
        assert_eq!(from_9.arrival(12), hole(10, 11, true));
    }

    proptest! {
        /// The model is the set of all positions that were accounted for.
        #[test]
        fn a_hole_is_exactly_what_did_not_arrive_before(
            after in prop::option::of(0..20_u64),
            arrivals in prop::collection::vec(0..40_u64, 0..60),
        ) {
            let mut continuity = Continuity::new(true, after);
            let mut seen: BTreeSet<u64> = after.map_or_else(BTreeSet::new, |after| (0..=after).collect());
            let start = seen.len();
            for position in arrivals {
                let missing: Vec<u64> = (0..position).filter(|other| !seen.contains(other)).collect();
                let above = seen.last().is_none_or(|last| position > *last);
                match continuity.arrival(position) {
                    Arrival::Below => prop_assert!(!above),
                    Arrival::Next => prop_assert!(above && missing.is_empty()),
                    Arrival::Behind(hole) => {
                        prop_assert!(above);
                        prop_assert_eq!(missing, (hole.first..=hole.last).collect::<Vec<_>>());
                        prop_assert_eq!(hole.at_start, seen.len() == start);
                    }
                }
                continuity.reach(position);
                // A hole is judged before what stands behind it is accounted for.
                if above {
                    seen.extend(0..=position);
                }
            }
        }
    }
}
