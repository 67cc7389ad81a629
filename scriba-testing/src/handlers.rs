//! Handlers tried without a pipeline: one alone, or a projection's on events up to a commit.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures_util::FutureExt as _;
use scriba_core::dead_letter::{Failure, kind};
use scriba_core::source::SourceIdentity;
use scriba_core::target::{Batch, CommitError, Entry, Refused, TakeOver, TakeOverError, Target, Write};
use scriba_core::{
    Circuit, DeadLetterPolicy, EventId, EventMeta, EventType, Events, Handler, HandlerError, Outcome, Position,
    Projection, ProjectionId, RecordedEvent, StreamId,
};
use serde::Serialize;

use crate::memory_source::{after, json, recorded};

/// An event for a handler: a type and a body are enough, everything else has a default.
#[derive(Clone, Debug)]
pub struct Given {
    event: RecordedEvent,
    /// Only where the test said one; otherwise the next free one is taken.
    position: Option<Position>,
    id: Option<EventId>,
    attempt: u32,
    replay: bool,
}

impl Given {
    /// An event with a body serialised as JSON: a struct, or a `serde_json::json!` value.
    ///
    /// # Panics
    /// When the body cannot be serialised.
    pub fn event<B: Serialize>(event_type: impl Into<EventType>, body: &B) -> Self {
        Self::raw(event_type, json(body))
    }

    /// An event with a body as it stands, such as one that is not JSON.
    pub fn raw(event_type: impl Into<EventType>, body: impl Into<Bytes>) -> Self {
        let event = recorded(Position::new(0), StreamId::from("test"), event_type.into(), body.into());
        Self { event, position: None, id: None, attempt: 1, replay: false }
    }

    /// In this stream; `test` where nothing is said.
    #[must_use]
    pub fn stream(mut self, stream_id: impl Into<StreamId>) -> Self {
        self.event.stream_id = stream_id.into();
        self
    }

    /// At this position; the one after the event before where nothing is said.
    #[must_use]
    pub fn position(mut self, position: Position) -> Self {
        self.position = Some(position);
        self
    }

    /// With this id; `event-` and the position where nothing is said.
    #[must_use]
    pub fn id(mut self, id: impl Into<EventId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// With this number within its stream; none where nothing is said.
    #[must_use]
    pub fn revision(mut self, revision: u64) -> Self {
        self.event.revision = Some(revision);
        self
    }

    /// With metadata serialised as JSON; empty where nothing is said.
    ///
    /// # Panics
    /// When it cannot be serialised.
    #[must_use]
    pub fn metadata<M: Serialize>(mut self, metadata: &M) -> Self {
        self.event.metadata = json(metadata);
        self
    }

    /// Recorded at this time; now where nothing is said.
    #[must_use]
    pub fn occurred_at(mut self, occurred_at: DateTime<Utc>) -> Self {
        self.event.occurred_at = Some(occurred_at);
        self
    }

    /// As the attempt of this number; the first where nothing is said.
    #[must_use]
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.attempt = attempt;
        self
    }

    /// As in a replay, or not; not where nothing is said.
    #[must_use]
    pub fn replay(mut self, replay: bool) -> Self {
        self.replay = replay;
        self
    }

    fn meta(self, next: Position) -> EventMeta {
        let mut event = self.event;
        event.position = self.position.unwrap_or(next);
        event.id = self.id.unwrap_or_else(|| EventId::from(format!("event-{}", event.position)));
        let mut meta = EventMeta::new(event, self.replay);
        meta.attempt = self.attempt;
        meta
    }
}

/// A recorded event as it is.
impl From<RecordedEvent> for Given {
    fn from(event: RecordedEvent) -> Self {
        let (position, id) = (Some(event.position), Some(event.id.clone()));
        Self { event, position, id, attempt: 1, replay: false }
    }
}

/// Decodes an event as the engine does and calls the handler with it, once. No database, no runtime of Scriba's.
///
/// Not simulated: retries, the handler timeout, the filter by event type (an event of a type that the handler does not
/// list is a failure to decode here and is not delivered there), parallelism, and everything that the operations
/// do to a database.
///
/// # Errors
/// What the dead letter would say: the body does not decode, the handler returns an error, or it panics.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// use scriba_core::{EventMeta, Events, Handler, HandlerResult, Outcome};
/// use scriba_testing::{Given, handle};
/// use serde::Deserialize;
/// use serde_json::json;
///
/// #[derive(Deserialize)]
/// struct Deposited {
///     amount: i64,
/// }
///
/// #[derive(Events)]
/// enum AccountEvent {
///     Deposited(Deposited),
/// }
///
/// struct Balances;
///
/// impl Handler for Balances {
///     type Event = AccountEvent;
///     type Op = i64;
///
///     async fn handle(&self, event: AccountEvent, _: &EventMeta) -> HandlerResult<i64> {
///         let AccountEvent::Deposited(Deposited { amount }) = event;
///         Ok(amount.into())
///     }
/// }
///
/// let outcome = handle(&Balances, Given::event("Deposited", &json!({ "amount": 5 }))).await.unwrap();
/// assert_eq!(outcome, Outcome::from(5));
///
/// let failure = handle(&Balances, Given::raw("Deposited", "no JSON")).await.unwrap_err();
/// assert_eq!(failure.kind, "decode");
/// # });
/// ```
pub async fn handle<H: Handler>(handler: &H, event: impl Into<Given>) -> Result<Outcome<H::Op>, Failure> {
    call(handler, &event.into().meta(Position::new(0))).await
}

/// What became of the events given to [`project`], each part in the order of positions.
#[derive(Debug)]
pub struct Projected<Op> {
    /// Events whose operations are in the read model, with the operations.
    pub applied: Vec<(EventMeta, Outcome<Op>)>,
    /// Events that the handler skipped, or of a type that it does not list.
    pub skipped: Vec<EventMeta>,
    /// Events that would be retried and in the end dead-lettered. They left nothing in the target.
    pub failed: Vec<Failed>,
}

/// An event whose handler failed.
#[derive(Debug)]
pub struct Failed {
    /// The event.
    pub meta: EventMeta,
    /// Why.
    pub failure: Failure,
}

/// Why nothing was committed by [`project`].
#[derive(Debug, thiserror::Error)]
pub enum ProjectError {
    /// The target could not be taken over.
    #[error("the target could not be taken over: {0}")]
    TakeOver(#[from] TakeOverError),
    /// The target refused the commit.
    #[error("the commit failed: {0}")]
    Commit(#[from] CommitError),
    /// An event stands where everything is accounted for already.
    #[error(
        "the event at position {position} is not above {before}, up to which everything is accounted for: \
         give it a higher position, or none"
    )]
    Position {
        /// Of the event.
        position: Position,
        /// The watermark of the target, or the event before.
        before: Position,
    },
}

/// Runs a projection's handlers on events, one after another, and commits what they return in one transaction of a real
/// target, with no pipeline. Called again, it goes on after the events before.
///
/// Not simulated: retries and the handler timeout (a failure is handed back after one attempt and never dead-lettered,
/// though the watermark passes it), parallelism, the splitting into batches, lease and fencing between nodes, a source.
/// It takes the projection over, so whoever runs it on the same tables is fenced off.
///
/// # Errors
/// When the target fails or a position does not rise. Nothing is committed then.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// use scriba_core::{EventMeta, Events, Handler, HandlerResult, Position, Projection};
/// use scriba_testing::{Given, MemoryTarget, project};
/// use serde::Deserialize;
/// use serde_json::json;
///
/// #[derive(Deserialize)]
/// struct Deposited {
///     amount: i64,
/// }
///
/// #[derive(Events)]
/// enum AccountEvent {
///     Deposited(Deposited),
/// }
///
/// #[derive(Projection)]
/// #[projection(name = "balances")]
/// struct Balances;
///
/// impl Handler for Balances {
///     type Event = AccountEvent;
///     type Op = (String, i64);
///
///     async fn handle(&self, event: AccountEvent, meta: &EventMeta) -> HandlerResult<Self::Op> {
///         let AccountEvent::Deposited(Deposited { amount }) = event;
///         Ok((meta.stream_id.to_string(), amount).into())
///     }
/// }
///
/// let target = MemoryTarget::new();
/// let deposited = Given::event("Deposited", &json!({ "amount": 5 })).stream("account-1");
/// let broken = Given::raw("Deposited", "no JSON").stream("account-2");
/// let projected = project(&Balances, &target, [deposited, broken]).await.unwrap();
/// assert_eq!(projected.failed[0].failure.kind, "decode");
/// assert_eq!(target.applied("balances"), [(Position::new(0), ("account-1".to_owned(), 5))]);
/// # });
/// ```
pub async fn project<P, T, E>(projection: &P, target: &T, events: E) -> Result<Projected<P::Op>, ProjectError>
where
    P: Projection + Handler,
    T: Target<P::Op> + ?Sized,
    E: IntoIterator<Item: Into<Given>>,
{
    let id = ProjectionId::of::<P>();
    let source = SourceIdentity { kind: "given".to_owned(), fingerprint: "handler test".to_owned() };
    let request = TakeOver {
        id: &id,
        owner: None,
        lease: Duration::ZERO,
        handler_timeout: Duration::from_secs(30),
        initial: None,
        source: &source,
        event_types: P::Event::event_types(),
    };
    let mut taken = target.take_over(request).await?;

    let mut projected = Projected { applied: Vec::new(), skipped: Vec::new(), failed: Vec::new() };
    let mut entries = Vec::new();
    let mut watermark = taken.checkpoint.watermark;
    for event in events {
        let meta = event.into().meta(Position::new(after(watermark)));
        let position = meta.position;
        if let Some(before) = watermark.filter(|before| position <= *before) {
            return Err(ProjectError::Position { position, before });
        }
        watermark = Some(position);
        let listed = P::Event::event_types().is_none_or(|types| types.contains(&meta.event_type.as_str()));
        let write = match call(projection, &meta).await {
            _ if !listed => Write::Skip,
            Ok(outcome) if outcome.is_skip() => Write::Skip,
            Ok(outcome) => Write::Apply(outcome),
            Err(failure) => {
                projected.failed.push(Failed { meta, failure });
                continue;
            }
        };
        entries.push(Entry { meta, write });
    }
    let Some(watermark) = watermark.filter(|_| !entries.is_empty() || !projected.failed.is_empty()) else {
        return Ok(projected);
    };
    // Failures are what the caller wants to see, however many there are.
    let policy = DeadLetterPolicy { circuit: Circuit::OFF, ..DeadLetterPolicy::default() };
    let batch = Batch::new(id, &taken.checkpoint, watermark, entries, policy);
    let committed = taken.committer.commit(&batch).await?;
    let refused: Vec<Position> = committed.refused.iter().map(|refused| refused.meta.position).collect();
    for Entry { meta, write } in batch.entries {
        match write {
            Write::Skip => projected.skipped.push(meta),
            Write::Apply(outcome) if !refused.contains(&meta.position) => projected.applied.push((meta, outcome)),
            Write::Apply(_) | Write::DeadLetter(_) => {}
        }
    }
    projected.failed.extend(committed.refused.into_iter().map(|Refused { meta, failure }| Failed { meta, failure }));
    projected.failed.sort_by_key(|failed| failed.meta.position);
    Ok(projected)
}

async fn call<H: Handler>(handler: &H, meta: &EventMeta) -> Result<Outcome<H::Op>, Failure> {
    let handled = AssertUnwindSafe(async {
        match H::Event::decode(meta.event()) {
            Ok(event) => handler.handle(event, meta).await,
            Err(error) => Err(HandlerError::new(kind::DECODE, error)),
        }
    });
    let error = match handled.catch_unwind().await {
        Ok(Ok(outcome)) => return Ok(outcome),
        Ok(Err(error)) => error,
        Err(panic) => HandlerError::new(kind::PANIC, panic_message(&*panic)),
    };
    Err(Failure {
        kind: error.kind().to_owned(),
        message: error.message().to_owned(),
        detail: error.detail().to_owned(),
        attempts: meta.attempt,
    })
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic with a value that is no text").to_owned()
}
