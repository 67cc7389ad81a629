//! Which positions are final: the rule that passes a gap, without I/O.
//!
//! A probe tells the highest visible position and, by a scan that comes after that look, which transactions hold the lock
//! on the position's sequence. A transaction takes that lock before it draws a number and keeps it to its end, so:
//!
//! - a number at or below the highest visible position was drawn before the scan;
//! - a transaction that an earlier probe did not list has drawn only numbers above what that probe saw.
//!
//! Hence what is at or below both the highest visible position and the bound of every listed transaction is owned by nobody
//! any more: what a *later* snapshot does not show of it will never be there.

use std::collections::HashMap;

/// What a probe saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Probe {
    /// The highest visible position, by a snapshot taken before the scan for holders.
    pub(crate) highest: Option<i64>,
    /// The virtual transaction ids of those that hold the sequence's lock.
    pub(crate) holders: Vec<String>,
}

/// Whether a row that comes next in the order of positions may be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing can be between the last one and it.
    Contiguous,
    /// What is missing before it is dead.
    GapPassed,
    /// What is missing before it may still come.
    Held,
}

/// What the probes of one subscription add up to. `None` is the beginning, below every number.
#[derive(Clone, Debug)]
pub(crate) struct Frontier {
    /// Every number up to here is final: a later snapshot shows it, or it never comes.
    settled: Option<i64>,
    /// The highest position that any probe saw.
    highest: Option<i64>,
    /// For each open append, a bound that all its numbers are above.
    bounds: HashMap<String, Option<i64>>,
    /// The lowest number the sequence can draw.
    lowest: i64,
}

impl Frontier {
    /// Everything up to `after` is accounted for.
    pub(crate) fn new(after: Option<i64>, lowest: i64) -> Self {
        Self { settled: after, highest: after, bounds: HashMap::new(), lowest }
    }

    /// Every number up to here is final.
    pub(crate) fn settled(&self) -> Option<i64> {
        self.settled
    }

    /// The highest position that any probe saw.
    pub(crate) fn highest(&self) -> Option<i64> {
        self.highest
    }

    /// True if something is visible that may not be read yet.
    pub(crate) fn holds(&self) -> bool {
        self.settled < self.highest
    }

    /// Whether a holder can own a number at or below `position`.
    pub(crate) fn can_own(&self, holder: &str, position: i64) -> bool {
        self.bounds.get(holder).is_some_and(|bound| *bound < Some(position))
    }

    /// Takes in a probe.
    pub(crate) fn fold(&mut self, probe: Probe) {
        let before = self.highest;
        self.highest = before.max(probe.highest);
        let mut known = std::mem::take(&mut self.bounds);
        for holder in probe.holders {
            let bound = known.remove(&holder).unwrap_or(
                // A prepared transaction gets such an id by a restart of the server, so it may be older than its name.
                if holder.starts_with("-1/") { self.settled } else { before },
            );
            self.bounds.insert(holder, bound);
        }
        let final_now = self.bounds.values().copied().fold(self.highest, Option::min);
        self.settled = self.settled.max(final_now);
    }

    /// Judges a row that a statement *after* the last probe shows as the next one behind `cursor`.
    ///
    /// The sequence's increment makes nothing contiguous, since it can be altered while the log is read.
    pub(crate) fn judge(&self, cursor: Option<i64>, position: i64) -> Verdict {
        let contiguous = match cursor {
            Some(cursor) => cursor.checked_add(1) == Some(position),
            None => position <= self.lowest,
        };
        if contiguous {
            Verdict::Contiguous
        } else if Some(position.saturating_sub(1)) <= self.settled {
            Verdict::GapPassed
        } else {
            Verdict::Held
        }
    }
}

#[cfg(test)]
#[path = "frontier_tests.rs"]
mod tests;
