//! Rules that tests break on purpose, to see that it is caught.

/// One rule broken.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// A commit goes through whenever the stored watermark is below its own, whatever the commit number.
    CommitNoSmallerThan,
    /// A take-over keeps the epoch.
    KeepEpoch,
    /// A reset sets the epoch back, as deleting the row and creating it anew would.
    EpochsRepeatAfterReset,
    /// The checkpoint moves after the writes, and nobody looks whether it did.
    FenceLast,
    /// A take-over reads the checkpoint before it has waited for a commit in doubt.
    ReadBeforeWaiting,
    /// Nobody looks how a closure left its transaction.
    TrustClosures,
    /// A transaction commits whoever says so.
    NoGuard,
}

impl Switch {
    /// Whether a rule is broken: never but in tests.
    pub(crate) fn is_broken(rule: Self, broken: Option<Self>) -> bool {
        cfg!(feature = "test-switches") && broken == Some(rule)
    }
}
