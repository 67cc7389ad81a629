//! Faults that tests put in on purpose, to see that they are caught.

/// One rule broken, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switches {
    /// Every rule holds.
    #[default]
    None,
    /// Duplicates are looked for below the stored watermark only, not in the window.
    DedupStoredOnly,
    /// Events are acked when they are handled, before they are committed.
    AckBeforeCommit,
    /// Outcomes are committed in the order in which handlers finish.
    CommitAsFinished,
}
