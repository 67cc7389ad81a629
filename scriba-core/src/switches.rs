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
    /// The result of an attempt that took longer than it may is taken.
    LateResults,
    /// The watermark goes to progress that came behind an event that is still open.
    ProgressPassesOpen,
    /// Dead letters in a row are counted within a batch.
    CircuitPerBatch,
    /// Dead letters in a row are forgotten when a pipeline starts.
    CircuitForgets,
    /// Outcomes are committed in the order in which handlers finish.
    CommitAsFinished,
    /// No rule but a defect: the coordinator panics when it is told to pause.
    CoordinatorPanics,
}
