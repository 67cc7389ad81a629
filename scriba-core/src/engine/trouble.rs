//! How a pipeline ends, and which end each failure leads to.

use std::time::Duration;

use crate::error::HaltReason;
use crate::event::Position;
use crate::failure::FailureClass;
use crate::source::SourceError;
use crate::target::{CommitError, Shortfall, TakeOverError, TargetError};

/// Why a pipeline ended.
#[derive(Debug)]
pub(crate) enum Exit {
    /// It was asked to stop, or its task was cancelled.
    Stopped,
    /// Everything up to the position at which it was to end is committed.
    Reached,
    /// The runtime it ran on is gone.
    RuntimeGone,
    /// No retry mends it.
    Halt(HaltReason),
    /// A new pipeline may get on.
    Restart(Trouble),
    /// Another owner holds the lease.
    Held { holder: String },
    /// Another owner has taken over.
    OwnershipLost { by: String },
}

/// A failure after which a new pipeline is started.
#[derive(Debug)]
pub(crate) struct Trouble {
    pub(crate) kind: TroubleKind,
    pub(crate) class: Option<FailureClass>,
    pub(crate) code: Option<String>,
    pub(crate) message: String,
    /// Events in the batch that failed; 0 where none did.
    pub(crate) batch: u64,
    /// The event to blame, where it is known.
    pub(crate) position: Option<Position>,
}

/// What a failure says about the chances of a new pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TroubleKind {
    /// Something is down and will be up again.
    Outage,
    /// A statement for one event alone failed in a way that may pass: a lock, a timeout, a deadlock.
    Statement,
    /// The source asks for a new subscription.
    Source,
    /// The state of a connection, or of the checkpoint row, is not what it should be.
    Unclear,
    /// A panic or an error of unknown nature in the engine, an adapter or an observer.
    Unknown,
}

impl TroubleKind {
    /// How many in a row with nothing committed between them halt the projection, and over how long a time; `None` for any
    /// number.
    pub(crate) fn limit(self) -> Option<(u32, Duration)> {
        match self {
            Self::Outage | Self::Source => None,
            Self::Statement => Some((5, Duration::from_mins(5))),
            Self::Unclear => Some((3, Duration::ZERO)),
            Self::Unknown => Some((10, Duration::ZERO)),
        }
    }
}

impl Trouble {
    pub(crate) fn unknown(message: impl Into<String>) -> Self {
        Self { kind: TroubleKind::Unknown, class: None, code: None, message: message.into(), batch: 0, position: None }
    }

    pub(crate) fn source(message: impl Into<String>) -> Self {
        Self { kind: TroubleKind::Source, ..Self::unknown(message) }
    }

    fn of_target(error: TargetError, kind: TroubleKind) -> Self {
        let TargetError { class, code, message, position, .. } = error;
        Self { kind, class: Some(class), code, message, batch: 0, position }
    }
}

impl Exit {
    pub(crate) fn from_source(error: SourceError) -> Self {
        match error {
            SourceError::Unavailable { message } => {
                Self::Restart(Trouble { kind: TroubleKind::Outage, ..Trouble::source(message) })
            }
            SourceError::Ended { message } => Self::Restart(Trouble::source(message)),
            SourceError::Unusable { message } => Self::Halt(HaltReason::new(message)),
            SourceError::Held { holder } => Self::Held { holder },
            SourceError::NoHead => Self::Halt(HaltReason::new(format!(
                "{}: start_from \"now\" needs one; start from a position instead",
                SourceError::NoHead
            ))),
        }
    }

    /// | class | end |
    /// |---|---|
    /// | transient | restart, for as long as it takes; a statement for one event alone halts after five times over five minutes |
    /// | unclear | restart, three times |
    /// | integrity, structural | halt |
    pub(crate) fn from_target(error: TargetError) -> Self {
        match error.class {
            FailureClass::TransientServer | FailureClass::TransientStatement => {
                Self::Restart(Trouble::of_target(error, TroubleKind::Outage))
            }
            FailureClass::Unclear => Self::Restart(Trouble::of_target(error, TroubleKind::Unclear)),
            FailureClass::Integrity | FailureClass::Structural => Self::Halt(HaltReason {
                class: Some(error.class),
                code: error.code,
                message: error.message,
                position: error.position,
            }),
        }
    }

    pub(crate) fn from_take_over(error: TakeOverError) -> Self {
        match error {
            TakeOverError::Held { holder } => Self::Held { holder },
            TakeOverError::Target(error) => Self::from_target(error),
        }
    }

    /// An ambiguous commit is settled by taking over anew: only that waits for the commit in doubt. `only` is the event of a
    /// batch that held no other.
    pub(crate) fn from_commit(error: CommitError, only: Option<Position>) -> Self {
        let exit = match error {
            CommitError::Fenced(Shortfall::OtherEpoch { found, .. }) => {
                return Self::OwnershipLost { by: format!("the owner of epoch {found}") };
            }
            CommitError::Fenced(shortfall @ Shortfall::OtherCommit { .. }) => Self::Restart(Trouble {
                kind: TroubleKind::Unclear,
                ..Trouble::unknown(format!("{shortfall}: was the checkpoint restored from a backup?"))
            }),
            CommitError::Fenced(Shortfall::Missing) => Self::Halt(HaltReason {
                class: Some(FailureClass::Structural),
                ..HaltReason::new(
                    "the checkpoint row is missing: it was deleted while the projection ran; restore it, or start the projection \
                     again to create a new one and rebuild the read model",
                )
            }),
            CommitError::Ambiguous(error) => Self::Restart(Trouble::of_target(error, TroubleKind::Outage)),
            CommitError::Failed(error) => Self::from_target(error),
            CommitError::HaltBefore(halt) => Self::Halt(halt.reason),
        };
        match exit {
            Self::Restart(trouble @ Trouble { class: Some(FailureClass::TransientStatement), .. })
                if only.is_some() =>
            {
                Self::Restart(Trouble { kind: TroubleKind::Statement, position: only, ..trouble })
            }
            other => other,
        }
    }

    /// The same end, of a pipeline whose batch of so many events failed.
    pub(crate) fn of_batch(self, events: u64) -> Self {
        match self {
            Self::Restart(trouble) => Self::Restart(Trouble { batch: events, ..trouble }),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_ends_a_pipeline_as_its_table_says() {
        let exit = |class| Exit::from_target(TargetError::new(class, "x"));
        let kind = |exit| match exit {
            Exit::Restart(trouble) => Some(trouble.kind),
            _ => None,
        };
        assert_eq!(kind(exit(FailureClass::TransientServer)), Some(TroubleKind::Outage));
        assert_eq!(kind(exit(FailureClass::TransientStatement)), Some(TroubleKind::Outage));
        assert_eq!(kind(exit(FailureClass::Unclear)), Some(TroubleKind::Unclear));
        assert!(matches!(exit(FailureClass::Integrity), Exit::Halt(_)));
        assert!(matches!(exit(FailureClass::Structural), Exit::Halt(_)));
        assert_eq!(TroubleKind::Outage.limit(), None, "an outage never halts");
    }

    #[test]
    fn each_shortfall_ends_a_pipeline_in_its_own_way() {
        let lost = Exit::from_commit(CommitError::Fenced(Shortfall::OtherEpoch { found: 5, ours: 4 }), None);
        assert!(matches!(lost, Exit::OwnershipLost { .. }));
        let other =
            Exit::from_commit(CommitError::Fenced(Shortfall::OtherCommit { found: 1, expected: 2, epoch: 4 }), None);
        assert!(matches!(other, Exit::Restart(Trouble { kind: TroubleKind::Unclear, .. })));
        assert!(matches!(other.of_batch(3), Exit::Restart(Trouble { kind: TroubleKind::Unclear, batch: 3, .. })));
        assert!(matches!(Exit::from_commit(CommitError::Fenced(Shortfall::Missing), None), Exit::Halt(_)));
        let locked = || CommitError::Failed(TargetError::new(FailureClass::TransientStatement, "locked"));
        let alone = Exit::from_commit(locked(), Some(Position::new(7)));
        assert!(matches!(
            alone,
            Exit::Restart(Trouble { kind: TroubleKind::Statement, position: Some(position), .. }) if position == Position::new(7)
        ));
        let among_others = Exit::from_commit(locked(), None);
        assert!(matches!(among_others, Exit::Restart(Trouble { kind: TroubleKind::Outage, .. })));
        let doubt = CommitError::Ambiguous(TargetError::new(FailureClass::Structural, "connection lost"));
        assert!(matches!(Exit::from_commit(doubt, None), Exit::Restart(Trouble { kind: TroubleKind::Outage, .. })));
    }
}
