//! What the tasks of a projection say to each other.

use tokio::sync::oneshot;

use super::trouble::Exit;
use crate::checkpoint::Checkpoint;
use crate::dead_letter::Failure;
use crate::error::{CommandError, HaltReason};
use crate::event::EventMeta;
use crate::projection::Outcome;
use crate::source::Subscription;
use crate::target::{Committer, LeaseAnswer, TargetError};
use crate::telemetry::StopReason;

/// What the user wants of a projection. The latest wish counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Project.
    Run,
    /// Ask the source for nothing.
    Pause,
    /// Finish what is in flight and end.
    Stop,
}

/// What became of an event.
pub(crate) enum Handled<Op> {
    /// Its operations.
    Apply(EventMeta, Outcome<Op>),
    /// The handler left it out.
    Skip(EventMeta),
    /// Its type is not one the projection lists.
    Filtered(EventMeta),
    /// Its handler failed for good.
    DeadLetter(EventMeta, Failure),
    /// The projection has to halt before it.
    Halt(HaltReason),
    /// The projection stops before it was handled.
    Abandoned,
}

/// Tells the coordinator that the pipeline is up, with a way for it to say that it has heard.
pub(crate) type Up = oneshot::Sender<oneshot::Sender<()>>;

/// How a pipeline is launched.
pub(crate) struct Way {
    pub(crate) up: Up,
    /// There where another node holds the lease: only the place at the source gives a right to it.
    pub(crate) standby: Option<Standing>,
}

/// Standing by at a source that admits one subscriber.
pub(crate) struct Standing {
    /// Who holds the lease, for people.
    pub(crate) holder: String,
    /// Tells that the source has granted the place. The answer comes when the lease is had; none comes if it cannot be had.
    pub(crate) granted: oneshot::Sender<oneshot::Sender<()>>,
}

/// What a take-over and a subscription hand to the pipeline.
pub(crate) struct Taken<Op> {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) committer: Box<dyn Committer<Op>>,
    pub(crate) subscription: Box<dyn Subscription>,
}

/// A user's command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Pause,
    Resume,
    Stop(StopReason),
}

impl Command {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Stop(_) => "stop",
        }
    }
}

/// Where the answer to a command goes.
pub(crate) type Reply = oneshot::Sender<Result<(), CommandError>>;

/// Everything the coordinator hears of.
pub(crate) enum Input {
    /// A command of the user.
    Command(Command, Reply),
    /// News of the lease.
    Lease(LeaseNews),
    /// The keeper has ended.
    Released,
    /// The pipeline of that number is up, and goes on once it was told that this is known.
    Up(u64, oneshot::Sender<()>),
    /// The pipeline of that number was granted the place at the source, and goes on once the lease is had.
    Granted(u64, oneshot::Sender<()>),
    /// The pipeline of that number has ended.
    Exited(u64, Exit),
}

/// What the coordinator wants of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Try once to get the lease; the answer comes as [`Input::Lease`].
    Acquire,
    /// Take the lease from whoever holds it; the answer comes as [`Input::Lease`].
    Seize,
    /// Write the state down.
    Store,
    /// Write the state down, give the lease up, and end; then comes [`Input::Released`].
    End,
}

/// What the keeper tells about the lease.
#[derive(Debug)]
pub(crate) enum LeaseNews {
    /// An [`Order::Acquire`] was answered.
    Answer(Result<LeaseAnswer, TargetError>),
    /// An [`Order::Seize`] was answered.
    Seized(Result<(), TargetError>),
    /// A renewal found that another holds it.
    Lost { holder: String },
}
