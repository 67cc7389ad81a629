//! How a projection is run. Every option has a default and a range; what is out of range is refused at start.

use std::time::Duration;

use crate::circuit::Circuit;
use crate::error::StartError;
use crate::event::Position;
use crate::projection::ProjectionId;
use crate::retry::Retry;

/// The circuit's streams stand in the checkpoint row, which has to stay small.
const MOST_STREAMS: u32 = 20;

/// Where a new checkpoint begins. Without effect once there is a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartFrom {
    /// With the first event of the source.
    #[default]
    Beginning,
    /// With the first event after the source's head as of the first start. An append that is open at that moment with a
    /// position below the head counts as before.
    Now,
    /// With the first event after a position.
    After(Position),
}

/// What becomes of an event whose handler failed for good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnPoison {
    /// It goes to the dead-letter table and its stream goes on.
    #[default]
    DeadLetter,
    /// The projection halts before it.
    Halt,
}

/// What becomes of events that cannot be applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeadLetterPolicy {
    /// What becomes of one while live.
    pub on_poison: OnPoison,
    /// What becomes of one up to where the version first caught up.
    pub on_poison_while_replaying: OnPoison,
    /// How many in a row are too many.
    pub circuit: Circuit,
}

impl DeadLetterPolicy {
    /// What becomes of an event, by whether it is a replay.
    pub fn on_poison(&self, replay: bool) -> OnPoison {
        if replay { self.on_poison_while_replaying } else { self.on_poison }
    }
}

/// How one of several nodes is made the one that projects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lease {
    /// By a lease in the target that lapses after this time without renewal.
    For(Duration),
    /// Not at all: every node takes the projection over from the other whenever it can. Epochs keep the read model
    /// right all the same, but nodes throw away each other's work. For tests, or where the source admits one holder.
    Off,
}

/// How a projection is run.
#[derive(Clone, Debug)]
pub struct ProjectionOptions {
    pub(crate) parallelism: usize,
    pub(crate) batch_events: usize,
    pub(crate) batch_bytes: usize,
    pub(crate) in_flight_events: usize,
    pub(crate) in_flight_bytes: usize,
    pub(crate) retry: Retry,
    pub(crate) handler_timeout: Duration,
    pub(crate) retryable_for: Duration,
    pub(crate) dead_letters: DeadLetterPolicy,
    pub(crate) start_from: StartFrom,
    pub(crate) accept_missed: bool,
    pub(crate) until: Option<Position>,
    pub(crate) lease: Lease,
    pub(crate) lag_interval: Duration,
    pub(crate) shutdown_timeout: Duration,
    #[cfg(feature = "test-switches")]
    pub(crate) switches: crate::switches::Switches,
}

impl Default for ProjectionOptions {
    fn default() -> Self {
        Self {
            parallelism: std::thread::available_parallelism().map_or(1, usize::from),
            batch_events: 1_000,
            batch_bytes: 4 << 20,
            in_flight_events: 4_000,
            in_flight_bytes: 16 << 20,
            retry: Retry::default(),
            handler_timeout: Duration::from_secs(30),
            retryable_for: Duration::from_hours(1),
            dead_letters: DeadLetterPolicy::default(),
            start_from: StartFrom::default(),
            accept_missed: false,
            until: None,
            lease: Lease::For(Duration::from_secs(30)),
            lag_interval: Duration::from_secs(5),
            shutdown_timeout: Duration::from_secs(30),
            #[cfg(feature = "test-switches")]
            switches: crate::switches::Switches::default(),
        }
    }
}

impl ProjectionOptions {
    /// How many handlers run at once, 1 to 4,096; default: the cores. Handlers of different streams run at the same time and
    /// ahead of what is committed, so a handler that looks things up elsewhere must not rely on another
    /// stream's events being in the read model.
    #[must_use]
    pub fn parallelism(mut self, handlers: usize) -> Self {
        self.parallelism = handlers;
        self
    }

    /// At most so many events per commit, 1 to 10,000; default 1,000.
    #[must_use]
    pub fn batch_events(mut self, events: usize) -> Self {
        self.batch_events = events;
        self
    }

    /// At most so many bytes of events per commit, 1 to 1 GiB; default 4 MiB. One event always fits.
    #[must_use]
    pub fn batch_bytes(mut self, bytes: usize) -> Self {
        self.batch_bytes = bytes;
        self
    }

    /// At most so many events handed out and not yet committed, 1 to 1,000,000; default 4,000.
    #[must_use]
    pub fn in_flight_events(mut self, events: usize) -> Self {
        self.in_flight_events = events;
        self
    }

    /// At most so many bytes of events handed out and not yet committed, 1 to 16 GiB; default 16 MiB. One event always fits.
    #[must_use]
    pub fn in_flight_bytes(mut self, bytes: usize) -> Self {
        self.in_flight_bytes = bytes;
        self
    }

    /// When a failed handler is called again; default: three attempts, after 100 ms and 1 s.
    #[must_use]
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// How long a handler may take, 1 ms to 1 day; default 30 s. A handler that takes longer fails with the kind `timeout`.
    /// A handler that blocks its thread cannot be interrupted: it is noticed when it comes back.
    #[must_use]
    pub fn handler_timeout(mut self, timeout: Duration) -> Self {
        self.handler_timeout = timeout;
        self
    }

    /// How long errors made with [`HandlerError::retryable`](crate::HandlerError::retryable) are retried before the
    /// projection halts; default 1 h.
    #[must_use]
    pub fn retryable_for(mut self, duration: Duration) -> Self {
        self.retryable_for = duration;
        self
    }

    /// What becomes of an event whose handler failed for good, or that the target refuses; default: it is dead-lettered.
    #[must_use]
    pub fn on_poison(mut self, on_poison: OnPoison) -> Self {
        self.dead_letters = DeadLetterPolicy { on_poison, on_poison_while_replaying: on_poison, ..self.dead_letters };
        self
    }

    /// The same up to the position at which this version first caught up; default: as [`ProjectionOptions::on_poison`], which
    /// is to be called before.
    #[must_use]
    pub fn on_poison_while_replaying(mut self, on_poison: OnPoison) -> Self {
        self.dead_letters.on_poison_while_replaying = on_poison;
        self
    }

    /// How many dead letters in a row halt the projection; default: five over at least three streams, or 20 over any.
    #[must_use]
    pub fn circuit(mut self, circuit: Circuit) -> Self {
        self.dead_letters.circuit = circuit;
        self
    }

    /// Where a new checkpoint begins; default: at the beginning.
    #[must_use]
    pub fn start_from(mut self, start_from: StartFrom) -> Self {
        self.start_from = start_from;
        self
    }

    /// Whether to go on when event types were added to this version of which there are events that it has passed already and will
    /// never be given; default: it halts, naming them, because the read model would be incomplete without a word.
    #[must_use]
    pub fn accept_missed(mut self, accept: bool) -> Self {
        self.accept_missed = accept;
        self
    }

    /// Stops by itself at a position: events above it are not handed out, and once everything up to it is committed, the
    /// projection is stopped, as if by [`Scriba::stop`](crate::Scriba::stop), with the watermark at the position. Default: it goes
    /// on for ever. While the source has nothing at or above the position it waits, as it would without; a projection that is at or
    /// above it already stops at once. [`Scriba::run_until`](crate::Scriba::run_until) returns once all that was started has stopped so.
    #[must_use]
    pub fn until(mut self, position: Position) -> Self {
        self.until = Some(position);
        self
    }

    /// How one of several nodes is made the one that projects; default: a lease of 30 s, 1 s to 1 h.
    #[must_use]
    pub fn lease(mut self, lease: Lease) -> Self {
        self.lease = lease;
        self
    }

    /// How often the source is asked for its head, to tell the lag; default 5 s, 0 is never, otherwise at least 100 ms.
    #[must_use]
    pub fn lag_interval(mut self, interval: Duration) -> Self {
        self.lag_interval = interval;
        self
    }

    /// How long `stop` and `shutdown` may take; default 30 s. The last tenth of it, at most 1 s, is for giving the lease up: what is in
    /// flight has the rest.
    #[must_use]
    pub fn shutdown_timeout(mut self, timeout: Duration) -> Self {
        self.shutdown_timeout = timeout;
        self
    }

    /// Puts a fault into the engine, to see that a test catches it.
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    #[must_use]
    pub fn switches(mut self, switches: crate::switches::Switches) -> Self {
        self.switches = switches;
        self
    }

    /// Looks at every range.
    pub(crate) fn validate(&self, id: &ProjectionId) -> Result<(), StartError> {
        let refuse = |option, problem: String| Err(StartError::Option { id: id.clone(), option, problem });
        let counts = [
            ("parallelism", self.parallelism, 4_096),
            ("batch_events", self.batch_events, 10_000),
            ("batch_bytes", self.batch_bytes, 1 << 30),
            ("in_flight_events", self.in_flight_events, 1_000_000),
            ("in_flight_bytes", self.in_flight_bytes, 16 << 30),
        ];
        for (option, found, highest) in counts {
            if found < 1 || found > highest {
                return refuse(option, format!("{found} is out of range: 1 to {highest}"));
            }
        }
        let day = Duration::from_hours(24);
        let millisecond = Duration::from_millis(1);
        let mut times = vec![
            ("handler_timeout", self.handler_timeout, millisecond, day),
            ("retryable_for", self.retryable_for, Duration::ZERO, 365 * day),
            ("shutdown_timeout", self.shutdown_timeout, millisecond, day),
        ];
        if let Lease::For(lease) = self.lease {
            times.push(("lease", lease, Duration::from_secs(1), Duration::from_hours(1)));
        }
        if !self.lag_interval.is_zero() {
            times.push(("lag_interval", self.lag_interval, Duration::from_millis(100), day));
        }
        for (option, found, lowest, highest) in times {
            if found < lowest || found > highest {
                return refuse(option, format!("{found:?} is out of range: {lowest:?} to {highest:?}"));
            }
        }
        let Circuit { in_row, streams, .. } = self.dead_letters.circuit;
        if in_row > 0 && (streams == 0 || streams > in_row || streams > MOST_STREAMS) {
            let most = in_row.min(MOST_STREAMS);
            return refuse(
                "circuit",
                format!("streams is {streams} and has to be 1 to {most} where in_row is {in_row}"),
            );
        }
        if let Some(problem) = self.retry.problem() {
            return refuse("retry", problem);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(options: &ProjectionOptions) -> Option<String> {
        options.validate(&ProjectionId::new("orders", 2)).err().map(|error| error.to_string())
    }

    #[test]
    fn the_defaults_are_in_range() {
        assert_eq!(problem(&ProjectionOptions::default()), None);
        assert_eq!(problem(&ProjectionOptions::default().lag_interval(Duration::ZERO).lease(Lease::Off)), None);
    }

    #[test]
    fn what_is_out_of_range_is_refused_with_the_projection_the_option_the_value_and_the_range() {
        let default = ProjectionOptions::default;
        let cases = [
            (default().parallelism(0), "option `parallelism`: 0 is out of range: 1 to 4096"),
            (default().parallelism(4_097), "option `parallelism`: 4097 is out of range: 1 to 4096"),
            (default().batch_events(0), "option `batch_events`: 0 is out of range: 1 to 10000"),
            (default().batch_bytes(0), "option `batch_bytes`: 0 is out of range: 1 to 1073741824"),
            (default().in_flight_events(0), "option `in_flight_events`: 0 is out of range: 1 to 1000000"),
            (default().in_flight_bytes(0), "option `in_flight_bytes`: 0 is out of range: 1 to 17179869184"),
            (default().handler_timeout(Duration::ZERO), "option `handler_timeout`: 0ns is out of range: 1ms to 86400s"),
            (
                default().shutdown_timeout(Duration::ZERO),
                "option `shutdown_timeout`: 0ns is out of range: 1ms to 86400s",
            ),
            (
                default().lag_interval(Duration::from_millis(1)),
                "option `lag_interval`: 1ms is out of range: 100ms to 86400s",
            ),
            (default().lease(Lease::For(Duration::ZERO)), "option `lease`: 0ns is out of range: 1s to 3600s"),
            (default().retry(Retry::new(2, [])), "option `retry`: 2 attempts need 1 waits between them, found 0"),
        ];
        for (options, expected) in cases {
            assert_eq!(problem(&options).as_deref(), Some(format!("projection orders v2: {expected}").as_str()));
        }
    }
}
