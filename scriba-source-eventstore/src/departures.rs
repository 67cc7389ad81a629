//! Groups that this process has just left. A server takes a moment to notice, and admits nobody meanwhile.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::client::Group;

/// A server that takes longer to notice has lost the connection and notices by keepalive: then a standby asks again.
const NOTICED_WITHIN: Duration = Duration::from_secs(1);

/// When groups were left. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Departures(Arc<Mutex<HashMap<(String, String), Instant>>>);

impl Departures {
    pub(crate) fn note(&self, group: &Group) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key(group), Instant::now());
    }

    /// Whether a place that is taken may be the one that this process has just left.
    pub(crate) fn are_recent(&self, group: &Group) -> bool {
        let departures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        departures.get(&key(group)).is_some_and(|left| left.elapsed() < NOTICED_WITHIN)
    }

    /// Notes that the group was left, unless that is called off: for a call that may be dropped half-way.
    pub(crate) fn unless_answered<'a>(&'a self, group: &'a Group) -> Unanswered<'a> {
        Unanswered { departures: self, group, answered: false }
    }
}

fn key(group: &Group) -> (String, String) {
    (group.stream.clone(), group.name.clone())
}

/// A call that has no answer yet.
pub(crate) struct Unanswered<'a> {
    departures: &'a Departures,
    group: &'a Group,
    answered: bool,
}

impl Unanswered<'_> {
    pub(crate) fn answered(mut self) {
        self.answered = true;
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.departures.note(self.group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_group_is_left_for_a_second_also_by_a_call_that_was_dropped() {
        let departures = Departures::default();
        let group = |name: &str| Group { stream: "s".to_owned(), name: name.to_owned() };
        departures.unless_answered(&group("answered")).answered();
        drop(departures.unless_answered(&group("dropped")));
        assert!(!departures.are_recent(&group("answered")));
        assert!(departures.are_recent(&group("dropped")));
        tokio::time::advance(NOTICED_WITHIN).await;
        assert!(!departures.are_recent(&group("dropped")));
    }
}
