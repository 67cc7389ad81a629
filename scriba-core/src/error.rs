//! The errors a user meets: in handlers, at start, and from commands.

use std::any::type_name;
use std::error::Error as StdError;
use std::fmt;

use crate::event::{EventType, Position};
use crate::failure::FailureClass;
use crate::lifecycle::State;
use crate::projection::{Outcome, ProjectionId};

/// What a handler returns.
pub type HandlerResult<Op> = Result<Outcome<Op>, HandlerError>;

/// Why a handler could not handle an event. Any error becomes one by `?`; its type's name is then the
/// kind under which a dead letter is filed.
///
/// It does not implement [`std::error::Error`] itself, which is what makes the `?` possible.
#[derive(Debug)]
pub struct HandlerError {
    kind: String,
    message: String,
    detail: String,
    retry: RetryAdvice,
}

/// What a handler's error says about trying again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryAdvice {
    /// As [`ProjectionOptions::retry`](crate::ProjectionOptions::retry) says.
    AsConfigured,
    /// Not at all: the event is dead-lettered at once.
    Never,
    /// With growing waits, for at most
    /// [`ProjectionOptions::retryable_for`](crate::ProjectionOptions::retryable_for); then the projection halts.
    UntilGivenUp,
}

impl HandlerError {
    /// An error of a kind of the user's own, for errors that are no [`std::error::Error`].
    pub fn new(kind: impl Into<String>, message: impl fmt::Display) -> Self {
        Self {
            kind: kind.into(),
            message: message.to_string(),
            detail: String::new(),
            retry: RetryAdvice::AsConfigured,
        }
    }

    /// An error that no retry can mend: the event is dead-lettered at once.
    pub fn permanent(error: impl Into<Self>) -> Self {
        Self { retry: RetryAdvice::Never, ..error.into() }
    }

    /// An error that goes away by itself (a service that is down): tried again with growing waits for at most
    /// [`ProjectionOptions::retryable_for`](crate::ProjectionOptions::retryable_for), never dead-lettered.
    pub fn retryable(error: impl Into<Self>) -> Self {
        Self { retry: RetryAdvice::UntilGivenUp, ..error.into() }
    }

    pub(crate) fn with_detail(mut self, detail: String) -> Self {
        self.detail = detail;
        self
    }

    /// The kind: the error's type name, or what [`HandlerError::new`] was given; `panic`, `timeout` and
    /// `decode` are the engine's own.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The chain of sources, or the backtrace of a panic; may be empty.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// What it says about trying again.
    pub fn retry(&self) -> RetryAdvice {
        self.retry
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl<E: StdError> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self {
            kind: type_name::<E>().to_owned(),
            message: error.to_string(),
            detail: source_chain(&error),
            retry: RetryAdvice::AsConfigured,
        }
    }
}

/// The messages of an error's sources, outermost first, one per line.
pub fn source_chain(error: &dyn StdError) -> String {
    let mut chain = String::new();
    let mut source = error.source();
    while let Some(error) = source {
        if !chain.is_empty() {
            chain.push('\n');
        }
        chain.push_str(&error.to_string());
        source = error.source();
    }
    chain
}

/// Why the body of an event is not what its type promises. Dead-lettered with the kind `decode`.
#[derive(Debug, thiserror::Error)]
#[error("event type {event_type:?}: {message}")]
pub struct DecodeError {
    /// The type that was to be decoded.
    pub event_type: EventType,
    /// What is wrong with the body.
    pub message: String,
}

impl DecodeError {
    /// A body that does not decode.
    pub fn new(event_type: &EventType, error: impl fmt::Display) -> Self {
        Self { event_type: event_type.clone(), message: error.to_string() }
    }

    /// A type that the set of events does not list.
    pub fn unknown_type(event_type: &EventType) -> Self {
        Self::new(event_type, "not one of the event types this projection lists")
    }
}

/// Why a projection halted: stays until it is stopped and started again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HaltReason {
    /// The class of the failure, where one failure is to blame.
    pub class: Option<FailureClass>,
    /// The code of the failure, such as a SQLSTATE, where there is one.
    pub code: Option<String>,
    /// What happened and what to do next.
    pub message: String,
    /// The position of the event to blame, where one is.
    pub position: Option<Position>,
}

impl HaltReason {
    /// A reason that is no failure of a statement.
    pub fn new(message: impl Into<String>) -> Self {
        Self { class: None, code: None, message: message.into(), position: None }
    }

    /// The same reason, blaming the event at a position.
    #[must_use]
    pub fn at(mut self, position: Position) -> Self {
        self.position = Some(position);
        self
    }
}

impl fmt::Display for HaltReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(position) = self.position {
            write!(f, " (position {position})")?;
        }
        Ok(())
    }
}

/// Why a projection could not be started. Nothing runs after it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An option is out of range, or options contradict each other.
    #[error("projection {id}: option `{option}`: {problem}")]
    Option {
        /// The projection.
        id: ProjectionId,
        /// The option's name.
        option: &'static str,
        /// Found, allowed, and what to write instead.
        problem: String,
    },
    /// The identity cannot be used.
    #[error("projection {id}: {problem}")]
    Identity {
        /// The projection.
        id: ProjectionId,
        /// What is wrong with it.
        problem: String,
    },
    /// A projection of this identity has been started on this `Scriba` and not stopped.
    #[error(
        "projection {id} is already started in this process and is {state}: stop it first, or give the other one a name or version of its own"
    )]
    AlreadyStarted {
        /// The projection.
        id: ProjectionId,
        /// The state of the one that runs.
        state: State,
    },
    /// The target is not fit: tables missing or of another version.
    #[error("projection {id}: target: {message}")]
    Target {
        /// The projection.
        id: ProjectionId,
        /// What is wrong and the command that mends it.
        message: String,
    },
    /// The source is not fit.
    #[error("projection {id}: source: {message}")]
    Source {
        /// The projection.
        id: ProjectionId,
        /// What is wrong and what to do about it.
        message: String,
    },
    /// `Scriba` has been shut down.
    #[error("projection {id}: this Scriba has been shut down; create a new one to start projections")]
    ShutDown {
        /// The projection.
        id: ProjectionId,
    },
}

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The command does not fit the state.
    #[error("projection {id} is {state}: {command} is not possible in this state")]
    InvalidState {
        /// The projection.
        id: ProjectionId,
        /// The state it is in; `standby` for a node that does not project.
        state: StateOrStandby,
        /// The command.
        command: &'static str,
    },
    /// No projection of this identity is known here.
    #[error(
        "projection {id} is not known: it was neither started here nor is it in the tables of an attached target; `Scriba::attach` adds one"
    )]
    Unknown {
        /// The projection.
        id: ProjectionId,
    },
    /// The task that was to carry it out was lost by a panic. The projection comes back by itself.
    #[error(
        "projection {id}: {command} was interrupted by a panic in the engine, and may have been carried out or not: the projection comes back; look at its state and ask again"
    )]
    Interrupted {
        /// The projection.
        id: ProjectionId,
        /// The command.
        command: &'static str,
    },
    /// The tables could not be read or written.
    #[error("projection {id}: {message}")]
    Tables {
        /// The projection.
        id: ProjectionId,
        /// What went wrong.
        message: String,
    },
    /// The time allowed ran out. What was not committed is redelivered at the next start.
    #[error("projection {id}: {command} did not finish within {timeout:?}; {left_behind}")]
    Timeout {
        /// The projection.
        id: ProjectionId,
        /// The command.
        command: &'static str,
        /// The time allowed.
        timeout: std::time::Duration,
        /// What still hangs and was left behind, fenced off from committing.
        left_behind: String,
    },
}

/// Why [`Scriba::reset`](crate::Scriba::reset) changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// A node holds its lease.
    #[error(
        "projection {id} is not stopped: {holder} holds its lease; stop it there, or wait until the lease of a dead node lapses"
    )]
    Held {
        /// The projection.
        id: ProjectionId,
        /// Who holds it.
        holder: String,
    },
    /// Nodes stand by, and would take it over at once.
    #[error("nodes stand by for projection {id}: {}; stop it there too", .nodes.join(", "))]
    StoodBy {
        /// The projection.
        id: ProjectionId,
        /// The nodes.
        nodes: Vec<String>,
    },
    /// There is no lease and the state last written down is not stopped: it may be run by a node that has leases off.
    #[error(
        "projection {id} is {state} and has no lease, so a node that has leases off may run it: stop it there; if nobody runs it, start \
         and stop it once"
    )]
    MayRun {
        /// The projection.
        id: ProjectionId,
        /// The state last written down.
        state: State,
    },
    /// The server of its source keeps a position for it, and that would live on.
    #[error("projection {id}: its source keeps a position of its own for it, which was not reset: {message}")]
    SourceLivesOn {
        /// The projection.
        id: ProjectionId,
        /// Why, and what to do.
        message: String,
    },
    /// The command itself failed: it is started on this node and not stopped, it is not known, or tables could not be written.
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// Why [`Scriba::run_until`](crate::Scriba::run_until) ended otherwise than by its signal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A projection halted; the others were shut down.
    #[error("projection {id} halted: {reason}")]
    Halted {
        /// The projection.
        id: ProjectionId,
        /// Why.
        reason: HaltReason,
    },
    /// The signal came, and something did not stop in time.
    #[error(transparent)]
    Shutdown(CommandError),
}

/// The state a command met: that of the lifecycle, or the role of a standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateOrStandby {
    /// A state of the lifecycle.
    State(State),
    /// Another node holds the projection.
    Standby,
}

impl fmt::Display for StateOrStandby {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::State(state) => state.fmt(f),
            Self::Standby => f.write_str("standby"),
        }
    }
}

/// Why [`Scriba::wait_for`](crate::Scriba::wait_for) did not see the position accounted for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The time allowed ran out; the projection goes on.
    #[error("projection {id}: not at position {wanted} after {timeout:?}: watermark {watermark}", watermark = show(*.watermark))]
    Timeout {
        /// The projection.
        id: ProjectionId,
        /// The position waited for.
        wanted: Position,
        /// Where it stands.
        watermark: Option<Position>,
        /// The time allowed.
        timeout: std::time::Duration,
    },
    /// It halted before the position.
    #[error("projection {id} is halted at watermark {watermark} before position {wanted}: {reason}", watermark = show(*.watermark))]
    Halted {
        /// The projection.
        id: ProjectionId,
        /// The position waited for.
        wanted: Position,
        /// Where it stands.
        watermark: Option<Position>,
        /// Why it halted.
        reason: String,
    },
    /// It was stopped before the position.
    #[error("projection {id} is stopped at watermark {watermark} before position {wanted}: start it first", watermark = show(*.watermark))]
    Stopped {
        /// The projection.
        id: ProjectionId,
        /// The position waited for.
        wanted: Position,
        /// Where it stands.
        watermark: Option<Position>,
    },
    /// It has never been started: there is no checkpoint.
    #[error("projection {id} was never started: there is no checkpoint of it")]
    NeverStarted {
        /// The projection.
        id: ProjectionId,
    },
    /// No node runs it: the lease lapsed.
    #[error("projection {id} is run by no node (its lease lapsed) and stands at watermark {watermark} before position {wanted}", watermark = show(*.watermark))]
    RunByNobody {
        /// The projection.
        id: ProjectionId,
        /// The position waited for.
        wanted: Position,
        /// Where it stands.
        watermark: Option<Position>,
    },
    /// The event waited for was dead-lettered.
    #[error("projection {id}: the event at position {position} was dead-lettered: {kind}: {message}")]
    DeadLettered {
        /// The projection.
        id: ProjectionId,
        /// The event's position.
        position: Position,
        /// The kind of the dead letter.
        kind: String,
        /// Its message.
        message: String,
    },
    /// The source has no head to wait for, or could not be asked.
    #[error("projection {id}: the head of its source is not known: {message}")]
    HeadUnknown {
        /// The projection.
        id: ProjectionId,
        /// Why.
        message: String,
    },
    /// The command itself failed.
    #[error(transparent)]
    Command(#[from] CommandError),
}

fn show(watermark: Option<Position>) -> String {
    watermark.map_or_else(|| "beginning".to_owned(), |position| position.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("no such account")]
    struct NoSuchAccount(#[source] std::fmt::Error);

    fn fails() -> HandlerResult<u8> {
        Err(NoSuchAccount(std::fmt::Error))?
    }

    #[test]
    fn any_error_becomes_a_handler_error_by_the_question_mark_and_keeps_its_type_name_and_sources() {
        let error = fails().unwrap_err();
        assert_eq!(error.kind(), "scriba_core::error::tests::NoSuchAccount");
        assert_eq!(error.message(), "no such account");
        assert_eq!(error.detail(), std::fmt::Error.to_string());
        assert_eq!(error.retry(), RetryAdvice::AsConfigured);
        assert_eq!(HandlerError::permanent(error).retry(), RetryAdvice::Never);
        assert_eq!(HandlerError::retryable(NoSuchAccount(std::fmt::Error)).retry(), RetryAdvice::UntilGivenUp);
    }
}
