//! The port events come in by. Unfrozen until 1.0.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use crate::event::{EventId, EventType, Position, RecordedEvent};
use crate::projection::ProjectionId;
use crate::telemetry::Telemetry;

/// What a source is and which store it reads: kept with the checkpoint, so that a checkpoint is never
/// continued on another store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceIdentity {
    /// The kind, such as `postgres-log`.
    pub kind: String,
    /// The store and the part of it that is read, such as the system identifier and the table.
    pub fingerprint: String,
}

/// What the engine wants to be delivered.
#[derive(Clone, Debug)]
pub struct SubscribeRequest {
    /// Everything above it; `None` is the beginning. A subscription may begin lower.
    pub after: Option<Position>,
    /// Only these event types; `None` for all. A source that cannot filter delivers them all.
    pub event_types: Option<&'static [&'static str]>,
    /// Events that the engine may have taken and not acked: a server that waits for acks has to let out more than that.
    pub in_flight: usize,
    /// Where the source reports what it meets, such as gaps.
    pub telemetry: Telemetry,
}

/// How much the engine has room for. A source hands out no more than that; at least one event always
/// fits, however large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Events, at least 1.
    pub events: usize,
    /// Bytes, as [`RecordedEvent::size`] counts them.
    pub bytes: usize,
}

/// One element of the delivered sequence.
#[derive(Clone, Debug)]
pub enum Delivery {
    /// An event.
    Event(RecordedEvent),
    /// Nothing more is to come up to here: the watermark may move to it once everything before is accounted for.
    Progress(Position),
}

impl Delivery {
    /// Where in the sequence it stands.
    pub fn position(&self) -> Position {
        match self {
            Self::Event(event) => event.position,
            Self::Progress(position) => *position,
        }
    }
}

/// Some elements of the delivered sequence, in order.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// In strictly increasing positions, over all pages of a subscription.
    pub deliveries: Vec<Delivery>,
    /// True when the source knew of nothing more as it read this page.
    pub caught_up: bool,
}

/// Where events come from.
///
/// What a source owes: within one subscription strictly increasing positions over all streams, with nothing
/// missing between; after an unclean end it may deliver again anything above the last ack.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// Looks whether the source can be used at all: called once by `start`.
    ///
    /// # Errors
    /// [`SourceError::Unusable`] when it never can as configured (then `start` fails with it), others when it cannot be reached now.
    async fn check(&self) -> Result<(), SourceError>;

    /// What it is.
    async fn identity(&self) -> Result<SourceIdentity, SourceError>;

    /// Starts to deliver everything above `request.after`.
    ///
    /// # Errors
    /// [`SourceError::Held`] where only one subscriber is let in, and another is.
    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError>;

    /// Whether the server lets only one subscriber in for each projection. Then [`Source::claim`] is asked before a checkpoint is
    /// taken over, and who has the place may take the lease from a holder that lost it.
    fn admits_one(&self) -> bool {
        false
    }

    /// Asks for the only place there is for a projection, and keeps it until what is returned is dropped. `None` where the server keeps
    /// nothing for the projection yet: whoever holds the lease subscribes and has it made.
    ///
    /// # Errors
    /// [`SourceError::Held`] where another has the place.
    async fn claim(&self, id: &ProjectionId, in_flight: usize) -> Result<Option<Box<dyn Place>>, SourceError> {
        let _ = (id, in_flight);
        Ok(None)
    }

    /// Opens a way of asking the source questions that shares no connection with subscriptions. It is
    /// called and used on the engine's control thread.
    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError>;

    /// Whether a server keeps a position for each projection beside the checkpoint, such as that of a subscription group.
    fn keeps_position(&self) -> bool {
        false
    }

    /// Forgets the position that a server keeps for a projection, so that the next subscription begins where its request says.
    /// Called before the checkpoint is reset, and again where that failed. Nobody is subscribed.
    ///
    /// # Errors
    /// The position lives on; the checkpoint is not reset then.
    async fn reset(&self, id: &ProjectionId) -> Result<(), SourceError> {
        let _ = id;
        if self.keeps_position() {
            return Err(SourceError::unusable("this source cannot reset the position that its server keeps"));
        }
        Ok(())
    }
}

/// The only place of a subscriber that there is for a projection.
#[async_trait]
pub trait Place: Send {
    /// Starts to deliver everything above `request.after`. A server that keeps the position decides where it really begins: the
    /// source has to notice when it begins higher.
    async fn subscribe(self: Box<Self>, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError>;
}

/// One delivery of events from a point on.
#[async_trait]
pub trait Subscription: Send {
    /// The next elements, at most what `demand` allows. Waits until there are some, or until the source has
    /// caught up for the first time (then an empty page with `caught_up` is right).
    ///
    /// Cancel-safe: the future may be dropped at any await point and nothing is lost or repeated.
    ///
    /// # Errors
    /// The subscription has ended; the engine subscribes again from its checkpoint, with backoff, unless the error is
    /// [`SourceError::Unusable`].
    async fn next(&mut self, demand: Demand) -> Result<Page, SourceError>;

    /// Whether acks matter to the source. Where they do not, none are sent, and no page is interrupted for one.
    fn wants_acks(&self) -> bool {
        true
    }

    /// Everything up to `position` is durable in the target and need not be delivered again.
    async fn ack(&mut self, position: Position) -> Result<(), SourceError>;
}

/// Questions to a source.
#[async_trait]
pub trait SourceInspector: Send {
    /// The highest position there is. `Ok(None)` for an empty source.
    ///
    /// # Errors
    /// [`SourceError::NoHead`] from a source that cannot know.
    async fn head(&mut self) -> Result<Option<Position>, SourceError>;

    /// The id of the event at a position, or `None` where there is none (any more).
    async fn event_id_at(&mut self, position: Position) -> Result<Option<EventId>, SourceError>;

    /// The events of some types at or below a position: of the type whose first one comes first. `None` where there are none.
    /// May take as long as it needs to look through the whole store.
    ///
    /// # Errors
    /// [`SourceError::Unusable`] from a source that cannot answer.
    async fn passed_over(&mut self, types: TypeSet<'_>, up_to: Position) -> Result<Option<PassedOver>, SourceError>;
}

/// A set of event types.
#[derive(Clone, Copy, Debug)]
pub enum TypeSet<'a> {
    /// These.
    Only(&'a [&'a str]),
    /// All but these.
    AllBut(&'a [&'a str]),
}

impl TypeSet<'_> {
    /// Whether a type is in it.
    pub fn contains(&self, event_type: &str) -> bool {
        match self {
            Self::Only(types) => types.contains(&event_type),
            Self::AllBut(types) => !types.contains(&event_type),
        }
    }
}

/// Events of a type that a projection was never given, because it did not list the type when it passed them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedOver {
    /// The type.
    pub event_type: EventType,
    /// How many.
    pub events: u64,
    /// Where the first one stands.
    pub first: Position,
}

/// Why a source does not deliver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// It cannot be reached now. The engine tries again with backoff, for as long as it takes.
    #[error("{message}")]
    Unavailable {
        /// What was tried and what came back.
        message: String,
    },
    /// The subscription ended and a new one from the checkpoint may go on.
    #[error("the subscription ended: {message}")]
    Ended {
        /// Why.
        message: String,
    },
    /// It cannot be used as configured, or can no longer be trusted: the projection halts.
    #[error("{message}")]
    Unusable {
        /// Found, wanted, and what to do.
        message: String,
    },
    /// Only one subscriber is let in, and another is: the projection stands by and asks again.
    #[error("held by {holder}")]
    Held {
        /// Who, for people.
        holder: String,
    },
    /// It cannot know its head.
    #[error("this source does not know its head")]
    NoHead,
}

impl SourceError {
    /// It cannot be reached now.
    pub fn unavailable(message: impl fmt::Display) -> Self {
        Self::Unavailable { message: message.to_string() }
    }

    /// The subscription ended.
    pub fn ended(message: impl fmt::Display) -> Self {
        Self::Ended { message: message.to_string() }
    }

    /// Another subscriber is let in.
    pub fn held(holder: impl fmt::Display) -> Self {
        Self::Held { holder: holder.to_string() }
    }

    /// It cannot be used.
    pub fn unusable(message: impl fmt::Display) -> Self {
        Self::Unusable { message: message.to_string() }
    }
}

#[async_trait]
impl<S: Source + ?Sized> Source for Arc<S> {
    async fn check(&self) -> Result<(), SourceError> {
        (**self).check().await
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        (**self).identity().await
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        (**self).subscribe(request).await
    }

    fn admits_one(&self) -> bool {
        (**self).admits_one()
    }

    async fn claim(&self, id: &ProjectionId, in_flight: usize) -> Result<Option<Box<dyn Place>>, SourceError> {
        (**self).claim(id, in_flight).await
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        (**self).inspector().await
    }

    fn keeps_position(&self) -> bool {
        (**self).keeps_position()
    }

    async fn reset(&self, id: &ProjectionId) -> Result<(), SourceError> {
        (**self).reset(id).await
    }
}
