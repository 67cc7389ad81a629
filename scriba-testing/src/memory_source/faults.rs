//! What can be asked to go wrong.

use std::ops::Range;
use std::time::Duration;

/// Faults by chance, drawn from a seed: the same seed and the same calls meet the same faults. The default has none.
///
/// Chances are between 0 and 1, for each page unless said otherwise.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Where the chances come from.
    pub seed: u64,
    /// Delivers again a run of events that this subscription has handed out and that are not acked.
    pub repeat: f64,
    /// Ends the subscription.
    pub end: f64,
    /// Becomes unavailable for a time out of `outage`, for each page and each subscription.
    pub unavailable: f64,
    /// How long an outage lasts; none where it is empty.
    pub outage: Range<Duration>,
    /// The wait before each page; none where it is empty.
    pub delay: Range<Duration>,
    /// Whether subscriptions begin below the asked position, though never at or below the last ack.
    pub start_below: bool,
    /// Pages have a random size from 1 to this; as large as asked for where it is `None`.
    pub page: Option<usize>,
}

/// One fault on request, see [`MemorySource::inject`](super::MemorySource::inject).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFault {
    /// The next page delivers again events that its subscription handed out and that are not acked. Waits for a page
    /// that has some.
    Repeat,
    /// The next page is the end of its subscription.
    End,
    /// At the next page the source becomes unavailable for so long.
    Unavailable(Duration),
    /// The next page comes so much later.
    Delay(Duration),
    /// The next subscription begins below the asked position, right above the last ack.
    StartBelow,
    /// The next page ends its subscription with [`SourceError::Unusable`](scriba_core::source::SourceError::Unusable), which
    /// halts a projection.
    Unusable,
    /// The next page with a new event leaves that event out, and its subscription never delivers it: what no source may do.
    Skip,
    /// The next page in which an event is followed by one of another stream has these two the other way round: a position
    /// of another stream arrives late.
    Reorder,
    /// The next such call is never answered. Dropped, it is over.
    Hang(SourceCall),
}

/// A call that can be made to hang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceCall {
    /// `Source::subscribe`.
    Subscribe,
    /// `Subscription::next`.
    Next,
    /// `Subscription::ack`.
    Ack,
}

/// Faults that really happened, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Events delivered again within a subscription.
    pub repeated: u64,
    /// Subscriptions ended.
    pub ended: u64,
    /// Outages begun.
    pub unavailable: u64,
    /// Pages that came later.
    pub delayed: u64,
    /// Subscriptions begun below the asked position, with an event there.
    pub started_below: u64,
    /// Events delivered below the last one for the first time, because they were appended late.
    pub late: u64,
    /// Subscriptions ended as unusable.
    pub unusable: u64,
    /// Events left out.
    pub skipped: u64,
    /// Events delivered after one of another stream with a higher position.
    pub reordered: u64,
    /// Calls that were never answered.
    pub hung: u64,
}
