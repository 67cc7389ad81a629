//! The private port between the adapter and the client crates: what both can do, in the adapter's own words.
//!
//! Everything that a crate does in a way of its own (its errors, its panics, a call that cannot be cancelled) ends here:
//! no call panics, none waits longer than 10 s for an answer of the server, and none leaves anything behind when it is
//! dropped.

mod address;
#[cfg(feature = "eventstore")]
mod by_eventstore;
#[cfg(feature = "kurrentdb")]
mod by_kurrentdb;
mod calls;
mod guard;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use tokio::runtime::Handle;
use uuid::Uuid;

#[cfg(not(any(feature = "kurrentdb", feature = "eventstore")))]
compile_error!(
    "scriba-source-eventstore needs a client crate: switch on its feature `kurrentdb` (the default), or `eventstore` for \
     a program that is on the crate of that name"
);

/// The crate that talks to the server. Both speak to EventStoreDB and to KurrentDB.
///
/// With either, this holds of a program:
///
/// - It needs `panic = "unwind"`, which is the default. Both crates panic, or never return, where a server ends a
///   subscription as if all were well; the source makes an error of it by unwinding. The panic of a persistent
///   subscription goes through the panic hook first, so a message about unreachable code may stand in the log.
/// - It may not compile the warnings of `tracing` out (`max_level_off`, `max_level_error` and their `release_` forms):
///   by a warning the source notices that a catch-up subscription will never return. It refuses to follow without.
/// - Where the feature `log` of `tracing` hands events to the crate `log` for want of a subscriber, that ends with the
///   first catch-up subscription. Install a subscriber, or use `log-always`.
/// - A client lives on the runtime where it was made. It can be called from others, but a connection that is opened by
///   such a call lives on the runtime of the call. So each runtime has a client of its own, and its runtime outlives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "kurrentdb", derive(Default))]
#[non_exhaustive]
pub enum ClientCrate {
    /// [`kurrentdb`](https://docs.rs/kurrentdb), the present official client.
    #[cfg(feature = "kurrentdb")]
    #[cfg_attr(feature = "kurrentdb", default)]
    KurrentDb,
    /// [`eventstore`](https://docs.rs/eventstore), its predecessor.
    ///
    /// Its first client in a process has to be made before anything installs a crypto provider of `rustls` for the
    /// process; `kurrentdb` does, and so may crates that speak TLS. Otherwise (`eventstore` 4.0.0) the client panics in its
    /// own task, and every call says that the connection is closed. A program that uses both makes the client of
    /// `eventstore` first. It panics in the same way where the certificates of the system cannot be loaded, with
    /// `tls=false` too.
    #[cfg(feature = "eventstore")]
    EventStore,
}

/// Why there is no client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("the connection string cannot be used: {0}. One looks like esdb://user:password@host:2113?tls=true")]
    Address(String),
    #[error("a client needs a tokio runtime: make it inside of one")]
    NoRuntime,
    #[error("the client cannot be made: {0}")]
    Client(String),
}

/// Makes a client, which connects with its first call. It lives on the runtime of the caller; see [`ClientCrate`].
///
/// It reads the certificates of the system, which takes a moment.
pub(crate) fn connect(which: ClientCrate, connection_string: &str) -> Result<Arc<dyn Client>, ConnectError> {
    let runtime = Handle::try_current().map_err(|_| ConnectError::NoRuntime)?;
    let connection_string = address::hastened(connection_string);
    match which {
        #[cfg(feature = "kurrentdb")]
        ClientCrate::KurrentDb => by_kurrentdb::connect(runtime, &connection_string),
        #[cfg(feature = "eventstore")]
        ClientCrate::EventStore => by_eventstore::connect(runtime, &connection_string),
    }
}

/// The time that the server says, in units of 100 ns since 1970.
fn occurred_at(ticks: &str) -> Option<DateTime<Utc>> {
    const PER_SECOND: i64 = 10_000_000;
    let ticks = ticks.parse::<i64>().ok()?;
    let nanoseconds = u32::try_from(ticks.rem_euclid(PER_SECOND) * 100).ok()?;
    DateTime::from_timestamp(ticks.div_euclid(PER_SECOND), nanoseconds)
}

/// A connection to a server or a cluster. One that has failed in a way that the crate does not mend says
/// [`Failure::Dead`] from then on, and is replaced.
#[async_trait]
pub(crate) trait Client: Send + Sync {
    /// Reads a part of a log, once.
    async fn read(&self, read: &Read) -> Result<Box<dyn Reading>, Failure>;

    /// Follows a log, for as long as the server goes on.
    async fn follow(&self, follow: &Follow) -> Result<Box<dyn Feed>, Failure>;

    /// Creates a group that begins at a revision.
    async fn create_group(&self, group: &Group, settings: &GroupSettings) -> Result<(), Failure>;

    /// The settings of a group.
    async fn group_settings(&self, group: &Group) -> Result<GroupSettings, Failure>;

    /// The revision up to which the server has written down that a group is done, where it has.
    async fn group_checkpoint(&self, group: &Group) -> Result<Option<u64>, Failure>;

    /// Deletes a group.
    async fn delete_group(&self, group: &Group) -> Result<(), Failure>;

    /// Joins a group as a consumer that holds at most `buffer` events which it has not acked.
    async fn join(&self, group: &Group, buffer: i32) -> Result<Box<dyn Membership>, Failure>;
}

/// What comes of a read.
#[async_trait]
pub(crate) trait Reading: Send {
    /// The next event, `None` behind the last one. Not cancel-safe.
    async fn next(&mut self) -> Result<Option<Received>, Failure>;
}

/// What comes of following a log.
#[async_trait]
pub(crate) trait Feed: Send {
    /// What comes next. Cancel-safe.
    async fn next(&mut self) -> Result<Fed, Failure>;
}

/// A consumer of a group.
#[async_trait]
pub(crate) trait Membership: Send {
    /// The next event. Cancel-safe.
    async fn next(&mut self) -> Result<Received, Failure>;

    /// Queues acks of events by the ids of [`Received::original`]. They are sent while the membership lives.
    async fn ack(&mut self, ids: Vec<Uuid>) -> Result<(), Failure>;
}

/// Which log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Log {
    /// A stream, with links resolved.
    Stream(String),
    /// All events there are that a filter lets through; system events only where it names them.
    All(Filter),
}

/// What the server leaves out of the whole log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    /// Events whose type begins with `$`.
    SystemEvents,
    /// Events whose type begins with none of these.
    TypePrefixes(Vec<String>),
    /// Events in streams whose name begins with none of these.
    StreamPrefixes(Vec<String>),
}

impl Filter {
    /// Whether it lets an event through, for a crate that does not ask the server.
    fn admits(&self, received: &Received) -> bool {
        let Some(event) = &received.event else { return false };
        let begins = |with: &[String], text: &str| with.iter().any(|prefix| text.starts_with(prefix.as_str()));
        match self {
            Self::SystemEvents => !event.event_type.starts_with('$'),
            Self::TypePrefixes(prefixes) => begins(prefixes, &event.event_type),
            Self::StreamPrefixes(prefixes) => begins(prefixes, &event.stream_id),
        }
    }
}

/// A place in a log: a revision of a stream, or a commit position of the whole log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Start,
    End,
    /// Included where a log is read, left out where it is followed.
    At(u64),
}

/// A read.
#[derive(Clone, Debug)]
pub(crate) struct Read {
    pub(crate) log: Log,
    pub(crate) from: From,
    pub(crate) backwards: bool,
    /// At most so many events.
    pub(crate) count: u64,
}

/// A catch-up subscription.
#[derive(Clone, Debug)]
pub(crate) struct Follow {
    pub(crate) log: Log,
    pub(crate) from: From,
}

/// A persistent subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) stream: String,
    pub(crate) name: String,
}

/// The settings of a group that matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupSettings {
    pub(crate) resolve_links: bool,
    /// The first revision that is delivered; `None` for those that come after the group was created.
    pub(crate) start_from: Option<u64>,
    pub(crate) message_timeout: Duration,
    pub(crate) max_retry_count: i32,
    pub(crate) checkpoint_after: Duration,
    pub(crate) min_checkpoint_count: i32,
    pub(crate) max_checkpoint_count: i32,
    /// 0 for any number.
    pub(crate) max_subscriber_count: i32,
    pub(crate) live_buffer_size: i32,
    pub(crate) history_buffer_size: i32,
    pub(crate) read_batch_size: i32,
    /// The server's name of it, such as `DispatchToSingle`.
    pub(crate) consumer_strategy: String,
}

/// What a catch-up subscription delivers.
#[derive(Clone, Debug)]
pub(crate) enum Fed {
    Event(Received),
    /// Every event up to here was looked at.
    Checkpoint(Place),
    /// The server knew of nothing more. Older servers do not say it.
    CaughtUp,
}

/// An event as it is delivered.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    /// Where it stands: in the stream that was asked for this is the link, where there is one.
    pub(crate) original: Original,
    /// The event that is meant; `None` for a link that leads nowhere.
    pub(crate) event: Option<Event>,
}

/// Where an event, or the link to it, stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Original {
    pub(crate) id: Uuid,
    /// In the stream that was asked for.
    pub(crate) revision: u64,
    pub(crate) place: Place,
}

/// A place in the whole log. Where the two differ, the event was written by an explicit transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) commit: u64,
    pub(crate) prepare: u64,
}

/// An event.
#[derive(Clone, Debug)]
#[expect(clippy::struct_field_names, reason = "`type` is a keyword")]
pub(crate) struct Event {
    pub(crate) id: Uuid,
    pub(crate) stream_id: String,
    pub(crate) revision: u64,
    pub(crate) event_type: String,
    pub(crate) data: Bytes,
    pub(crate) metadata: Bytes,
    pub(crate) occurred_at: Option<DateTime<Utc>>,
}

/// Why the server or the client crate does not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection failed, the server is not ready, or it did not answer; the next try may do.
    Unavailable(String),
    /// This client will never work again: make another.
    Dead(String),
    /// Another node is the leader; the crate goes there with the next call.
    NotLeader(String),
    /// The user is not let in, or may not do this.
    Denied,
    /// No such stream or group.
    Missing,
    /// The group exists.
    Exists,
    /// The stream is deleted for ever.
    Deleted,
    /// The group has as many consumers as it admits.
    Full,
    /// The server has dropped the consumer: the group was changed or deleted, or the server goes away.
    Dropped,
    /// The server ended what was to go on, as if all were well.
    Ended,
    /// Neither this server nor this program can do it, now or later.
    Unfit(String),
    /// Whatever else; the text says it.
    Other(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable(why) | Self::Dead(why) | Self::Unfit(why) | Self::Other(why) => f.write_str(why),
            Self::NotLeader(leader) => write!(f, "the node is not the leader; {leader} is"),
            Self::Denied => f.write_str("access denied"),
            Self::Missing => f.write_str("not found"),
            Self::Exists => f.write_str("it exists already"),
            Self::Deleted => f.write_str("the stream is deleted for ever"),
            Self::Full => f.write_str("the group has as many consumers as it admits"),
            Self::Dropped => f.write_str("the server dropped the subscription"),
            Self::Ended => f.write_str("the server ended the stream"),
        }
    }
}
