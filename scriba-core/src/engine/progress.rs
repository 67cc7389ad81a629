//! How a run gets on: the streams it touched, and how fast it catches up.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::info::{CatchUp, StreamPositions};
use crate::event::{Position, StreamId};

/// More streams than this are not kept: what grows with the store has no place in memory.
const MOST_STREAMS: usize = 1_000;

/// The rate is that of so long a time.
const RATE_OVER: Duration = Duration::from_secs(10);
/// Of a shorter time than this there is none.
const RATE_FROM: Duration = Duration::from_millis(500);
/// Samples lie at least so far apart, which bounds their number.
const SAMPLE_EVERY: Duration = Duration::from_millis(250);

/// The streams touched in this run, each with the position of its last event that is committed. `None` once there were too
/// many, so that it costs nothing where it tells nothing.
pub(super) struct Touched(Mutex<Option<FxHashMap<StreamId, Position>>>);

impl Default for Touched {
    fn default() -> Self {
        Self(Mutex::new(Some(FxHashMap::default())))
    }
}

impl Touched {
    fn lock(&self) -> MutexGuard<'_, Option<FxHashMap<StreamId, Position>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the events of a batch, in the order of positions.
    pub(super) fn note<'a>(&self, events: impl Iterator<Item = (&'a StreamId, Position)>) {
        let mut kept = self.lock();
        let Some(streams) = &mut *kept else { return };
        for (stream, position) in events {
            if let Some(last) = streams.get_mut(stream) {
                *last = position;
            } else if streams.len() < MOST_STREAMS {
                streams.insert(stream.clone(), position);
            } else {
                *kept = None;
                return;
            }
        }
    }

    pub(super) fn positions(&self) -> StreamPositions {
        self.lock().as_ref().map_or(StreamPositions::Truncated, |streams| {
            StreamPositions::Known(streams.iter().map(|(stream, position)| (stream.clone(), *position)).collect())
        })
    }
}

/// How much was accounted for at some moments of the last seconds, the oldest first.
#[derive(Default)]
pub(super) struct Pace(VecDeque<Sample>);

#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    events: u64,
    /// Positions from the beginning up to the watermark.
    reached: u64,
}

impl Sample {
    fn new(events: u64, watermark: Option<Position>) -> Self {
        Self { at: Instant::now(), events, reached: watermark.map_or(0, |position| position.get().saturating_add(1)) }
    }
}

impl Pace {
    /// A pipeline begins here.
    pub(super) fn begin(&mut self, events: u64, watermark: Option<Position>) {
        self.0.clear();
        self.0.push_back(Sample::new(events, watermark));
    }

    /// Notes how much is accounted for after a commit.
    pub(super) fn note(&mut self, events: u64, watermark: Option<Position>) {
        let sample = Sample::new(events, watermark);
        if self.0.back().is_some_and(|last| sample.at - last.at < SAMPLE_EVERY) {
            return;
        }
        self.0.push_back(sample);
        // The second one has to be as old as the time asked for, or the first is still needed.
        while self.0.get(1).is_some_and(|second| sample.at - second.at > RATE_OVER) {
            self.0.pop_front();
        }
    }

    /// The pace over the last seconds, and the time that `left` more positions take at it; `None` while there is too little to
    /// tell it from.
    pub(super) fn catch_up(&self, events: u64, watermark: Option<Position>, left: Option<u64>) -> Option<CatchUp> {
        let now = Sample::new(events, watermark);
        let recent = self.0.iter().find(|sample| now.at - sample.at <= RATE_OVER);
        let base = recent.or(self.0.back())?;
        let seconds = Some(now.at - base.at).filter(|time| *time >= RATE_FROM)?.as_secs_f64();
        let per_second = |now: u64, then: u64| {
            // Counts far beyond what a double holds exactly are no matter for a rate.
            #[expect(clippy::cast_precision_loss, reason = "a rate is no exact number")]
            let difference = now.saturating_sub(then) as f64;
            difference / seconds
        };
        let positions = per_second(now.reached, base.reached);
        let time_left = left.filter(|_| positions > 0.0).and_then(|left| {
            #[expect(clippy::cast_precision_loss, reason = "an estimate is no exact number")]
            let left = left as f64;
            Duration::try_from_secs_f64(left / positions).ok()
        });
        Some(CatchUp { events_per_second: per_second(now.events, base.events), time_left })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_position_of_each_stream_is_kept_up_to_1000_streams_and_none_beyond() {
        let touched = Touched::default();
        let streams: Vec<StreamId> = (0..1_001).map(|n| StreamId::from(format!("s{n}"))).collect();
        let at = |n: usize| Position::new(n as u64);
        touched.note(streams[..1_000].iter().enumerate().map(|(n, stream)| (stream, at(n))));
        touched.note([(&streams[3], at(1_000))].into_iter());
        let StreamPositions::Known(known) = touched.positions() else { panic!("1,000 are kept") };
        assert_eq!((known.len(), known[&streams[3]], known[&streams[4]]), (1_000, at(1_000), at(4)));
        touched.note([(&streams[1_000], at(1_001))].into_iter());
        assert_eq!(touched.positions(), StreamPositions::Truncated);
        touched.note([(&streams[3], at(1_002))].into_iter());
        assert_eq!(touched.positions(), StreamPositions::Truncated, "for the rest of the run");
    }

    #[tokio::test(start_paused = true)]
    async fn the_pace_is_that_of_the_last_ten_seconds_and_the_time_left_goes_by_positions() {
        let mut pace = Pace::default();
        pace.begin(0, None);
        assert_eq!(pace.catch_up(0, None, Some(100)), None, "too early to tell");
        // Slow for 20 s, then 100 events and 200 positions a second for 10 s.
        let (mut events, mut reached) = (0, 0);
        for tenth in 0..300_u64 {
            tokio::time::advance(Duration::from_millis(100)).await;
            let fast = tenth >= 200;
            events += if fast { 10 } else { 1 };
            reached += if fast { 20 } else { 1 };
            pace.note(events, Some(Position::new(reached - 1)));
        }
        let watermark = Some(Position::new(reached - 1));
        let now = pace.catch_up(events, watermark, Some(1_000)).expect("long enough");
        assert!((90.0..=101.0).contains(&now.events_per_second), "{now:?}");
        let left = now.time_left.expect("positions move");
        assert!((4.9..5.6).contains(&left.as_secs_f64()), "{now:?}");
        assert_eq!(pace.catch_up(events, watermark, None).expect("a pace").time_left, None, "the head is not known");
        tokio::time::advance(Duration::from_mins(1)).await;
        let stalled = pace.catch_up(events, watermark, Some(1_000)).expect("a pace");
        assert_eq!((stalled.events_per_second, stalled.time_left), (0.0, None), "nothing for a minute");
        assert!(pace.0.len() < 60, "{}", pace.0.len());
    }
}
