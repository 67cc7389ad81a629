//! The circuit: when dead-lettering papers over a broken handler or schema, the projection halts. Pure.
//!
//! It counts dead letters of every kind in a row, in the order of positions, in the checkpoint row itself: so it does not
//! depend on where batches end, and a restart does not forget.
//!
//! | event | count |
//! |---|---|
//! | dead-lettered | one more, with its stream |
//! | applied | back to zero, unless it was an update or delete that hit no row |
//! | applied, no row hit | as it was |
//! | skipped | as it was |

use std::hash::Hasher;

use rustc_hash::FxHasher;

use crate::event::StreamId;

/// How many dead letters in a row halt a projection: by default five over at least three streams, or 20 over any.
///
/// The one that would be too many is not written: the projection halts before its event, which is handled again at the
/// next start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Circuit {
    /// So many in a row over [`Circuit::streams`] streams halt; 0 switches this rule off.
    pub in_row: u32,
    /// Over at least so many streams.
    pub streams: u32,
    /// So many in a row over any streams halt; 0 switches this rule off.
    pub in_row_any: u32,
}

/// Dead letters since the last event that was applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeadLettersInRow {
    /// How many.
    pub count: u64,
    /// Hashes of the streams they are of, as many as the circuit has to tell apart.
    pub streams: Vec<i64>,
}

impl Default for Circuit {
    fn default() -> Self {
        Self { in_row: 5, streams: 3, in_row_any: 20 }
    }
}

impl Circuit {
    /// Never halts.
    pub const OFF: Self = Self { in_row: 0, streams: 0, in_row_any: 0 };

    fn trips(self, row: &DeadLettersInRow) -> bool {
        let reached = |limit: u32| limit > 0 && row.count >= u64::from(limit);
        (reached(self.in_row) && row.streams.len() >= self.streams as usize) || reached(self.in_row_any)
    }
}

impl DeadLettersInRow {
    /// Counts an event that was applied; `changed` is false where all it did was to update or delete no row.
    pub fn applied(&mut self, changed: bool) {
        if changed {
            *self = Self::default();
        }
    }

    /// The row with one more dead letter.
    ///
    /// # Errors
    /// Where that is one too many: how many there would be, over how many streams.
    pub fn with(&self, stream: &StreamId, circuit: Circuit) -> Result<Self, Tripped> {
        let mut longer = self.clone();
        longer.count += 1;
        let hash = hash(stream);
        if circuit.in_row > 0 && longer.streams.len() < circuit.streams as usize && !longer.streams.contains(&hash) {
            longer.streams.push(hash);
        }
        if circuit.trips(&longer) {
            return Err(Tripped { count: longer.count, streams: longer.streams.len() });
        }
        Ok(longer)
    }
}

/// The circuit does not let another dead letter through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{count} dead letters in a row, over at least {streams} streams")]
pub struct Tripped {
    /// How many there would be.
    pub count: u64,
    /// Over at least so many streams.
    pub streams: usize,
}

/// Stored in the checkpoint row. Were the hash to change, a stream would count twice once.
fn hash(stream: &StreamId) -> i64 {
    let mut hasher = FxHasher::default();
    hasher.write(stream.as_str().as_bytes());
    hasher.finish().cast_signed()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Runs through dead letters of these streams (`None` is an applied event); the index of the one that trips.
    fn trip(circuit: Circuit, events: &[Option<&str>]) -> Option<usize> {
        let mut row = DeadLettersInRow::default();
        events.iter().position(|event| match event {
            None => {
                row.applied(true);
                false
            }
            Some(stream) => match row.with(&StreamId::from(*stream), circuit) {
                Ok(longer) => {
                    row = longer;
                    false
                }
                Err(_) => true,
            },
        })
    }

    #[test]
    fn five_in_a_row_over_three_streams_trip_and_over_two_it_takes_twenty() {
        let circuit = Circuit::default();
        let [a, b, c] = [Some("a"), Some("b"), Some("c")];
        assert_eq!(trip(circuit, &[a, b, c, a, b]), Some(4));
        assert_eq!(trip(circuit, &[a, b, a, b, c]), Some(4));
        assert_eq!(trip(circuit, &[a, b, a, b, a, b, c]), Some(6), "the third stream may come late");
        assert_eq!(trip(circuit, &[a, b, c, a, None, b, c, a, b]), None);
        assert_eq!(trip(circuit, &[a; 19]), None);
        assert_eq!(trip(circuit, &[a; 20]), Some(19));
    }

    #[test]
    fn an_event_that_changed_nothing_leaves_the_count() {
        let mut row = DeadLettersInRow { count: 4, streams: vec![1, 2] };
        row.applied(false);
        assert_eq!(row.count, 4);
        row.applied(true);
        assert_eq!(row, DeadLettersInRow::default());
    }

    #[test]
    fn a_circuit_that_is_off_lets_everything_through_and_stores_no_streams() {
        let mut row = DeadLettersInRow::default();
        for n in 0..1_000 {
            row = row.with(&StreamId::from(format!("s{n}")), Circuit::OFF).expect("it is off");
        }
        assert_eq!(row, DeadLettersInRow { count: 1_000, streams: Vec::new() });
    }

    proptest! {
        /// Wherever a run is cut in two and the count carried over, it trips at the same event.
        #[test]
        fn it_trips_at_the_same_event_wherever_the_count_is_stored_in_between(
            events in prop::collection::vec(prop::option::weighted(0.8, 0_u8..5), 0..60),
            cuts in prop::collection::vec(0_usize..60, 0..6),
        ) {
            let circuit = Circuit { in_row: 4, streams: 3, in_row_any: 7 };
            let names: Vec<Option<String>> = events.iter().map(|event| event.map(|n| format!("s{n}"))).collect();
            let names: Vec<Option<&str>> = names.iter().map(Option::as_deref).collect();
            // The model: a list of all streams since the last applied event.
            let mut since: Vec<&str> = Vec::new();
            let expected = names.iter().position(|event| {
                let Some(stream) = event else {
                    since.clear();
                    return false;
                };
                since.push(stream);
                let distinct = since.iter().collect::<std::collections::BTreeSet<_>>().len();
                (since.len() >= 4 && distinct >= 3) || since.len() >= 7
            });
            let mut row = DeadLettersInRow::default();
            let mut found = None;
            for (at, event) in names.iter().enumerate() {
                if cuts.contains(&at) {
                    // As it comes back from the checkpoint row.
                    row = DeadLettersInRow { count: row.count, streams: row.streams.clone() };
                }
                let Some(stream) = event else {
                    row.applied(true);
                    continue;
                };
                let Ok(longer) = row.with(&StreamId::from(*stream), circuit) else {
                    found = Some(at);
                    break;
                };
                row = longer;
            }
            prop_assert_eq!(found, expected);
        }
    }
}
