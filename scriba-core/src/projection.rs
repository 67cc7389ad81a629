//! What a user writes: a projection, its handler, and the outcomes a handler returns.

use std::fmt;
use std::future::Future;

use crate::error::HandlerResult;
use crate::event::{EventMeta, Events};

/// The identity of a projection: a name and a version. Two versions of one name are two projections
/// with checkpoints of their own, which is how a read model is rebuilt beside the one in use.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProjectionId {
    /// The name, without the version in it.
    pub name: String,
    /// The version, from 1 on.
    pub version: u32,
}

impl ProjectionId {
    /// An id from its parts.
    pub fn new(name: impl Into<String>, version: u32) -> Self {
        Self { name: name.into(), version }
    }

    /// The id of a projection type.
    pub fn of<P: Projection>() -> Self {
        Self::new(P::NAME, P::VERSION)
    }
}

impl fmt::Display for ProjectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} v{}", self.name, self.version)
    }
}

/// `"orders"` is version 1.
impl From<&str> for ProjectionId {
    fn from(name: &str) -> Self {
        Self::new(name, 1)
    }
}

impl From<(&str, u32)> for ProjectionId {
    fn from((name, version): (&str, u32)) -> Self {
        Self::new(name, version)
    }
}

impl From<&ProjectionId> for ProjectionId {
    fn from(id: &ProjectionId) -> Self {
        id.clone()
    }
}

/// The identity of a projection as part of its type, so that it cannot be overridden at start.
/// Derived: `#[derive(Projection)] #[projection(name = "orders", version = 2)]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no projection name",
    label = "not a projection",
    note = "write `#[derive(Projection)]` and `#[projection(name = \"…\")]` on the struct"
)]
pub trait Projection: Send + Sync + 'static {
    /// The name, without the version in it.
    const NAME: &'static str;
    /// The version, from 1 on.
    const VERSION: u32 = 1;
}

/// The work of a projection: from one event to what it makes of the read model.
///
/// Handlers of different streams run at the same time and ahead of what is committed; handlers of one
/// stream run one after another. What they return is committed in the order of positions, so the
/// read model always is what the events up to the watermark make of it. A handler may be called more
/// than once for an event (retries, a restart before the commit), so effects outside the returned
/// operations have to bear repetition.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not handle events",
    label = "no `Handler`",
    note = "implement `scriba_core::Handler` for it: `type Event`, `type Op` and `async fn handle`"
)]
pub trait Handler: Send + Sync + 'static {
    /// The events it takes: an enum with `#[derive(Events)]`, or [`RawEvent`](crate::RawEvent).
    type Event: Events;
    /// The operations it returns; they have to be those of the target it is started with.
    type Op: Send + Sync + 'static;

    /// Handles one event. An `async fn` in the implementation.
    ///
    /// An error or a panic is retried as [`ProjectionOptions::retry`](crate::ProjectionOptions::retry)
    /// says, then the event is dead-lettered and its stream goes on.
    fn handle(&self, event: Self::Event, meta: &EventMeta) -> impl Future<Output = HandlerResult<Self::Op>> + Send;
}

/// What a handler makes of an event: one or several operations, or an explicit skip. An empty list of
/// operations cannot be written, so "nothing to do" is always said in so many words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome<Op>(OutcomeKind<Op>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum OutcomeKind<Op> {
    Skip,
    One(Op),
    Many(Vec<Op>),
}

impl<Op> Outcome<Op> {
    /// The event is none of this projection's business. It is counted as skipped.
    pub fn skip() -> Self {
        Self(OutcomeKind::Skip)
    }

    /// Adds an operation, applied after those already there.
    #[must_use]
    pub fn and(self, op: impl Into<Op>) -> Self {
        let op = op.into();
        Self(match self.0 {
            OutcomeKind::Skip => OutcomeKind::One(op),
            OutcomeKind::One(first) => OutcomeKind::Many(vec![first, op]),
            OutcomeKind::Many(mut ops) => {
                ops.push(op);
                OutcomeKind::Many(ops)
            }
        })
    }

    /// The operations of an iterator in its order, or a skip where it yields none.
    pub fn all_or_skip(ops: impl IntoIterator<Item = Op>) -> Self {
        ops.into_iter().fold(Self::skip(), Self::and)
    }

    /// True for a skip.
    pub fn is_skip(&self) -> bool {
        matches!(self.0, OutcomeKind::Skip)
    }

    /// The operations in order; none for a skip.
    pub fn ops(&self) -> &[Op] {
        match &self.0 {
            OutcomeKind::Skip => &[],
            OutcomeKind::One(op) => std::slice::from_ref(op),
            OutcomeKind::Many(ops) => ops,
        }
    }

    /// The operations in order, by value.
    pub fn into_ops(self) -> impl Iterator<Item = Op> {
        let (one, many) = match self.0 {
            OutcomeKind::Skip => (None, Vec::new()),
            OutcomeKind::One(op) => (Some(op), Vec::new()),
            OutcomeKind::Many(ops) => (None, ops),
        };
        one.into_iter().chain(many)
    }
}

impl<Op> From<Op> for Outcome<Op> {
    fn from(op: Op) -> Self {
        Self(OutcomeKind::One(op))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_keep_their_order_and_an_empty_iterator_is_a_skip() {
        assert!(Outcome::<u8>::all_or_skip([]).is_skip());
        let outcome = Outcome::<u8>::from(1).and(2).and(3);
        assert_eq!(outcome.ops(), [1, 2, 3]);
        assert_eq!(outcome.into_ops().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(Outcome::<u8>::skip().and(7).ops(), [7]);
    }
}
