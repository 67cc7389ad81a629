//! Which events may be handled at the same time. Pure.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hash::Hasher;

use rustc_hash::FxHasher;

use crate::event::StreamId;

/// Streams share this many partitions. Nothing durable depends on the number.
pub(crate) const PARTITIONS: usize = 4_096;

/// The partition of a stream.
pub(crate) fn partition_of(stream: &StreamId) -> usize {
    let mut hasher = FxHasher::default();
    hasher.write(stream.as_str().as_bytes());
    // The high half is the better mixed one.
    (hasher.finish() >> 32) as usize % PARTITIONS
}

/// Lets one event per partition run at a time and at most `parallelism` in all; free capacity takes the waiting event
/// with the lowest number. Numbers are those of the window, given in ascending order.
pub(crate) struct Partitions {
    lanes: Vec<Lane>,
    /// The first waiting event of every partition that runs none.
    ready: BinaryHeap<Reverse<(u64, usize)>>,
    running: usize,
    parallelism: usize,
}

#[derive(Clone, Default)]
struct Lane {
    busy: bool,
    waiting: VecDeque<u64>,
}

impl Partitions {
    pub(crate) fn new(parallelism: usize) -> Self {
        Self { lanes: vec![Lane::default(); PARTITIONS], ready: BinaryHeap::new(), running: 0, parallelism }
    }

    /// Takes in an event. True when it runs at once, which it only does if it `may`; otherwise [`Partitions::start_next`] will
    /// name it.
    pub(crate) fn admit(&mut self, number: u64, partition: usize, may: bool) -> bool {
        let lane = &mut self.lanes[partition];
        let idle = !lane.busy && lane.waiting.is_empty();
        if may && idle && self.running < self.parallelism && self.ready.is_empty() {
            lane.busy = true;
            self.running += 1;
            return true;
        }
        lane.waiting.push_back(number);
        if idle {
            self.ready.push(Reverse((number, partition)));
        }
        false
    }

    /// The first waiting event whose partition runs none.
    pub(crate) fn next(&self) -> Option<u64> {
        self.ready.peek().map(|Reverse((number, _))| *number)
    }

    /// The next event that runs now, with its partition, if there is one and capacity for it.
    pub(crate) fn start_next(&mut self) -> Option<(u64, usize)> {
        if self.running >= self.parallelism {
            return None;
        }
        let Reverse((number, partition)) = self.ready.pop()?;
        let lane = &mut self.lanes[partition];
        lane.waiting.pop_front();
        lane.busy = true;
        self.running += 1;
        Some((number, partition))
    }

    /// Notes that the event running in a partition has ended.
    pub(crate) fn ended(&mut self, partition: usize) {
        let lane = &mut self.lanes[partition];
        lane.busy = false;
        self.running -= 1;
        if let Some(&number) = lane.waiting.front() {
            self.ready.push(Reverse((number, partition)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Admit(usize, bool),
        Start,
        End(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (0..6_usize, prop::bool::weighted(0.8)).prop_map(|(lane, may)| Step::Admit(lane, may)),
            2 => Just(Step::Start),
            2 => any::<usize>().prop_map(Step::End),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        /// The model keeps all waiting events in one list and looks through it.
        #[test]
        fn one_event_per_partition_runs_at_a_time_in_order_and_capacity_takes_the_lowest_number(
            parallelism in 1..5_usize,
            steps in steps(),
        ) {
            let mut partitions = Partitions::new(parallelism);
            let mut waiting: BTreeMap<u64, usize> = BTreeMap::new();
            let mut running: Vec<(u64, usize)> = Vec::new();
            let mut number = 0;
            let startable = |waiting: &BTreeMap<u64, usize>, running: &[(u64, usize)]| {
                (running.len() < parallelism)
                    .then(|| waiting.iter().find(|(_, lane)| running.iter().all(|(_, busy)| busy != *lane)))
                    .flatten()
                    .map(|(number, lane)| (*number, *lane))
            };
            for step in steps {
                match step {
                    Step::Admit(lane, may) => {
                        waiting.insert(number, lane);
                        let at_once = partitions.admit(number, lane, may);
                        if at_once {
                            prop_assert_eq!(startable(&waiting, &running), Some((number, lane)));
                            waiting.remove(&number);
                            running.push((number, lane));
                        }
                        number += 1;
                    }
                    Step::Start => {
                        let expected = startable(&waiting, &running);
                        prop_assert_eq!(partitions.start_next(), expected);
                        if let Some((number, lane)) = expected {
                            waiting.remove(&number);
                            running.push((number, lane));
                        }
                    }
                    Step::End(which) => {
                        if !running.is_empty() {
                            let (_, lane) = running.remove(which % running.len());
                            partitions.ended(lane);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn streams_spread_over_the_partitions() {
        let mut hit = vec![0_u32; PARTITIONS];
        for n in 0..40_960 {
            hit[partition_of(&StreamId::from(format!("account-{n}")))] += 1;
        }
        let empty = hit.iter().filter(|&&n| n == 0).count();
        let most = hit.iter().max().copied().unwrap_or_default();
        assert!(empty < 20 && most < 40, "{empty} empty partitions, {most} streams in the fullest");
    }
}
