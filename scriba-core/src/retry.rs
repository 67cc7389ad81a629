//! When a failed handler is called again, and how long a failing dependency is waited for.

use std::time::Duration;

/// The attempts a handler gets and the waits between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    attempts: u32,
    waits: Vec<Duration>,
}

impl Retry {
    /// So many attempts in all, with the waits between them in order.
    ///
    /// A schedule shorter than `attempts - 1` waits is refused at start.
    pub fn new(attempts: u32, waits: impl Into<Vec<Duration>>) -> Self {
        Self { attempts, waits: waits.into() }
    }

    /// One attempt.
    pub fn none() -> Self {
        Self::new(1, [])
    }

    /// Attempts in all.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The wait after a failed attempt (the first is 1), or `None` when it was the last.
    pub fn wait_after(&self, attempt: u32) -> Option<Duration> {
        if attempt >= self.attempts {
            return None;
        }
        self.waits.get(attempt as usize - 1).copied()
    }

    /// What is wrong with the schedule, if anything.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.attempts == 0 {
            return Some("0 attempts: write Retry::none() for a single one".to_owned());
        }
        let wanted = self.attempts as usize - 1;
        (self.waits.len() < wanted)
            .then(|| format!("{} attempts need {wanted} waits between them, found {}", self.attempts, self.waits.len()))
    }
}

/// Three attempts, with 100 ms and 1 s between them; a fourth would wait 10 s.
impl Default for Retry {
    fn default() -> Self {
        Self::new(3, [Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(10)])
    }
}

/// Waits that double from a first one up to a cap, with jitter.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    cap: Duration,
    failures: u32,
}

impl Backoff {
    /// From `first` on, never above `cap`.
    pub fn new(first: Duration, cap: Duration) -> Self {
        Self { first, cap, failures: 0 }
    }

    /// Failures in a row so far.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Notes a failure and says how long to wait: between half and the whole of the doubled wait, so that
    /// nodes that failed together do not come back together.
    pub fn next_wait(&mut self) -> Duration {
        let whole = self.first.saturating_mul(1_u32 << self.failures.min(20)).min(self.cap);
        self.failures = self.failures.saturating_add(1);
        whole.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// Notes a success.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_schedule_waits_100_ms_and_1_s_and_gives_up_after_the_third_attempt() {
        let retry = Retry::default();
        assert_eq!(retry.wait_after(1), Some(Duration::from_millis(100)));
        assert_eq!(retry.wait_after(2), Some(Duration::from_secs(1)));
        assert_eq!(retry.wait_after(3), None);
        assert_eq!(Retry::none().wait_after(1), None);
    }

    #[test]
    fn a_schedule_too_short_for_its_attempts_says_what_is_missing() {
        assert_eq!(Retry::new(0, []).problem().as_deref(), Some("0 attempts: write Retry::none() for a single one"));
        assert_eq!(
            Retry::new(3, [Duration::ZERO]).problem().as_deref(),
            Some("3 attempts need 2 waits between them, found 1")
        );
        assert_eq!(Retry::none().problem(), None);
    }

    #[test]
    fn waits_double_up_to_the_cap_and_start_again_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
        for failure in 0..40 {
            let whole = Duration::from_millis(100).saturating_mul(1 << failure.min(20)).min(Duration::from_secs(30));
            let wait = backoff.next_wait();
            assert!(wait >= whole / 2 && wait <= whole, "failure {failure}: {wait:?} of {whole:?}");
        }
        backoff.reset();
        assert!(backoff.next_wait() <= Duration::from_millis(100));
    }
}
