//! The port, by either crate: this file is a module of both `by_kurrentdb` and `by_eventstore`, which say what differs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::future::poll_fn;
use futures_util::stream::{BoxStream, unfold};
use tokio::runtime::Handle;
use uuid::Uuid;

use super::api::{self, Position, StreamPosition, SubscriptionEvent, SystemConsumerStrategy};
use crate::client::calls::{Panicked, answered, caught};
use crate::client::guard::Guard;
use crate::client::{
    Client, ConnectError, Event, Failure, Fed, Feed, Filter, Follow, From, Group, GroupSettings, Log, Membership,
    Original, Place, Read, Reading, Received, address, occurred_at,
};

/// Events that a filtered subscription looks at between two checkpoints, and that the server reads at a time. The crates
/// leave it to the server, which takes 32 unless they say: many messages where a filter lets little through. Between two
/// checkpoints a subscription that is opened again looks at the same events again, no more.
const WINDOW: u32 = 128;

/// What the protocol can say. The crates make something negative of what is longer.
const LONGEST: Duration = Duration::from_millis(i32::MAX as u64);

/// `tonic::Code` as a number: the crates have two versions of it.
const CANCELLED: i32 = 1;
const RESOURCE_EXHAUSTED: i32 = 8;
const FAILED_PRECONDITION: i32 = 9;
const ABORTED: i32 = 10;

pub(in crate::client) fn connect(runtime: Handle, connection_string: &str) -> Result<Arc<dyn Client>, ConnectError> {
    let parsed = super::connection_string(connection_string).parse::<api::ClientSettings>();
    let settings =
        parsed.map_err(|error| ConnectError::Address(address::what_is_wrong(error.message(), error.error())))?;
    let made = catch_unwind(AssertUnwindSafe(|| api::Client::with_runtime_handle(runtime, settings)));
    let client = match made {
        Ok(Ok(client)) => client,
        Ok(Err(error)) => return Err(ConnectError::Client(error.to_string())),
        Err(panic) => return Err(ConnectError::Client(Failure::from(Panicked::new(&*panic)).to_string())),
    };
    let user = address::credentials(connection_string).map(|(user, password)| api::Credentials::new(user, password));
    Ok(Arc::new(Connection { client, user }))
}

struct Connection {
    client: api::Client,
    user: Option<api::Credentials>,
}

/// Options with the user of the connection string. Each kind of them has a method of its own for it.
macro_rules! of_user {
    ($connection:ident, $options:expr) => {
        match &$connection.user {
            Some(user) => $options.authenticated(user.clone()),
            None => $options,
        }
    };
}

#[async_trait]
impl Client for Connection {
    async fn read(&self, read: &Read) -> Result<Box<dyn Reading>, Failure> {
        let stream = answered("a read", self.open_read(read)).await?;
        // Filtered here, or by the server, which counts then.
        let filter = match &read.log {
            Log::All(filter) if !super::READS_ARE_FILTERED => Some(filter.clone()),
            _ => None,
        };
        Ok(Box::new(Page { stream, filter, left: read.count, over: None }))
    }

    async fn follow(&self, follow: &Follow) -> Result<Box<dyn Feed>, Failure> {
        let guard = Guard::new(super::NAME)?;
        let subscription = self.subscribe(follow).await?;
        // A call that is dropped half-way loses the subscription. These are the stream's own, and go on with the next poll.
        let told = unfold(subscription, |mut subscription| async move {
            Some((subscription.next_subscription_event().await, subscription))
        });
        let mut feed = CatchUp { told: Some(told.boxed()), guard, end: Failure::Ended };
        answered("a subscription", poll_fn(|context| feed.poll_confirmed(context))).await?;
        Ok(Box::new(feed))
    }

    async fn create_group(&self, group: &Group, settings: &GroupSettings) -> Result<(), Failure> {
        let options = of_user!(self, api::PersistentSubscriptionOptions::default().settings(sent(settings)));
        answered("the creation of a persistent subscription", async {
            let created = self.client.create_persistent_subscription(group.stream.as_str(), &group.name, &options);
            created.await.map_err(failure)
        })
        .await
    }

    async fn group_settings(&self, group: &Group) -> Result<GroupSettings, Failure> {
        match self.info(group).await?.settings {
            Some(settings) => Ok(received_settings(&settings)),
            None => Err(Failure::Other("the server tells no settings of the group".to_owned())),
        }
    }

    async fn group_checkpoint(&self, group: &Group) -> Result<Option<u64>, Failure> {
        Ok(self.info(group).await?.stats.last_checkpointed_event_revision)
    }

    async fn delete_group(&self, group: &Group) -> Result<(), Failure> {
        let options = of_user!(self, api::DeletePersistentSubscriptionOptions::default());
        answered("the deletion of a persistent subscription", async {
            let deleted = self.client.delete_persistent_subscription(group.stream.as_str(), &group.name, &options);
            deleted.await.map_err(failure)
        })
        .await
    }

    async fn join(&self, group: &Group, buffer: i32) -> Result<Box<dyn Membership>, Failure> {
        let buffer = usize::try_from(buffer).unwrap_or_default();
        let options = api::SubscribeToPersistentSubscriptionOptions::default().buffer_size(buffer);
        let options = of_user!(self, options);
        answered("a persistent subscription", async {
            let joined = self.client.subscribe_to_persistent_subscription(group.stream.as_str(), &group.name, &options);
            let mut consumer = Consumer { subscription: joined.await.map_err(not_joined)?, end: None };
            match consumer.told().await? {
                api::PersistentSubscriptionEvent::Confirmed(_) => Ok(Box::new(consumer) as Box<dyn Membership>),
                other @ api::PersistentSubscriptionEvent::EventAppeared { .. } => Err(too_early(&other)),
            }
        })
        .await
    }
}

impl Connection {
    async fn info(&self, group: &Group) -> Result<api::PersistentSubscriptionInfo<u64>, Failure> {
        let options = of_user!(self, api::GetPersistentSubscriptionInfoOptions::default());
        answered("the state of a persistent subscription", async {
            self.client.get_persistent_subscription_info(&group.stream, &group.name, &options).await.map_err(failure)
        })
        .await
    }

    async fn open_read(&self, read: &Read) -> Result<api::ReadStream, Failure> {
        // A direction comes after a position, which sets one.
        macro_rules! directed {
            ($options:expr) => {
                if read.backwards { $options.backwards() } else { $options.forwards() }
            };
        }
        let count = usize::try_from(read.count).unwrap_or(usize::MAX);
        let opened = match &read.log {
            Log::Stream(stream) => {
                let options = api::ReadStreamOptions::default().resolve_link_tos().max_count(count);
                let options = of_user!(self, directed!(options.position(revision(read.from))));
                self.client.read_stream(stream.as_str(), &options).await
            }
            Log::All(filter) => {
                let count = if super::READS_ARE_FILTERED { count } else { usize::MAX };
                let options = api::ReadAllOptions::default().max_count(count);
                let options = super::filtered(options, server_filter(filter));
                let options = of_user!(self, directed!(options.position(place(read.from))));
                self.client.read_all(&options).await
            }
        };
        opened.map_err(failure)
    }

    /// The subscription of the crate, which opens it when it is asked for its first event. Without options for retries it
    /// does not open itself again after an error, as long as it is not asked again.
    async fn subscribe(&self, follow: &Follow) -> Result<api::Subscription, Failure> {
        let subscribed = async {
            match &follow.log {
                Log::Stream(stream) => {
                    let options = api::SubscribeToStreamOptions::default().resolve_link_tos();
                    let options = of_user!(self, options.start_from(revision(follow.from)));
                    self.client.subscribe_to_stream(stream.as_str(), &options).await
                }
                Log::All(filter) => {
                    let options = api::SubscribeToAllOptions::default().filter(server_filter(filter).max(WINDOW));
                    let options = of_user!(self, options.position(place(follow.from)));
                    self.client.subscribe_to_all(&options).await
                }
            }
        };
        Ok(caught(subscribed).await?)
    }
}

fn revision(from: From) -> StreamPosition<u64> {
    match from {
        From::Start => StreamPosition::Start,
        From::End => StreamPosition::End,
        From::At(revision) => StreamPosition::Position(revision),
    }
}

fn place(from: From) -> StreamPosition<Position> {
    revision(from).map(|commit| Position { commit, prepare: commit })
}

fn server_filter(filter: &Filter) -> api::SubscriptionFilter {
    let (filter, prefixes) = match filter {
        Filter::SystemEvents => return api::SubscriptionFilter::on_event_type().exclude_system_events(),
        Filter::TypePrefixes(prefixes) => (api::SubscriptionFilter::on_event_type(), prefixes),
        Filter::StreamPrefixes(prefixes) => (api::SubscriptionFilter::on_stream_name(), prefixes),
    };
    prefixes.iter().fold(filter, api::SubscriptionFilter::add_prefix)
}

fn sent(settings: &GroupSettings) -> api::PersistentSubscriptionSettings<u64> {
    api::PersistentSubscriptionSettings {
        resolve_link_tos: settings.resolve_links,
        start_from: settings.start_from.map_or(StreamPosition::End, StreamPosition::Position),
        extra_statistics: false,
        message_timeout: settings.message_timeout.min(LONGEST),
        max_retry_count: settings.max_retry_count,
        live_buffer_size: settings.live_buffer_size,
        read_batch_size: settings.read_batch_size,
        history_buffer_size: settings.history_buffer_size,
        checkpoint_after: settings.checkpoint_after.min(LONGEST),
        checkpoint_lower_bound: settings.min_checkpoint_count,
        checkpoint_upper_bound: settings.max_checkpoint_count,
        max_subscriber_count: settings.max_subscriber_count,
        consumer_strategy_name: match settings.consumer_strategy.as_str() {
            "DispatchToSingle" => SystemConsumerStrategy::DispatchToSingle,
            "RoundRobin" => SystemConsumerStrategy::RoundRobin,
            "Pinned" => SystemConsumerStrategy::Pinned,
            // The crate refuses it as not supported.
            other => SystemConsumerStrategy::Custom(other.to_owned()),
        },
    }
}

fn received_settings(settings: &api::PersistentSubscriptionSettings<u64>) -> GroupSettings {
    GroupSettings {
        resolve_links: settings.resolve_link_tos,
        start_from: match settings.start_from {
            StreamPosition::Start => Some(0),
            StreamPosition::End => None,
            StreamPosition::Position(revision) => Some(revision),
        },
        message_timeout: settings.message_timeout,
        max_retry_count: settings.max_retry_count,
        checkpoint_after: settings.checkpoint_after,
        min_checkpoint_count: settings.checkpoint_lower_bound,
        max_checkpoint_count: settings.checkpoint_upper_bound,
        max_subscriber_count: settings.max_subscriber_count,
        live_buffer_size: settings.live_buffer_size,
        history_buffer_size: settings.history_buffer_size,
        read_batch_size: settings.read_batch_size,
        consumer_strategy: settings.consumer_strategy_name.to_string(),
    }
}

/// A read.
struct Page {
    stream: api::ReadStream,
    /// Where the server has not filtered.
    filter: Option<Filter>,
    left: u64,
    over: Option<Result<(), Failure>>,
}

#[async_trait]
impl Reading for Page {
    async fn next(&mut self) -> Result<Option<Received>, Failure> {
        if let Some(over) = &self.over {
            return over.clone().map(|()| None);
        }
        let next = self.wanted().await;
        match &next {
            Ok(Some(_)) => self.left -= 1,
            Ok(None) => self.over = Some(Ok(())),
            Err(failure) => self.over = Some(Err(failure.clone())),
        }
        next
    }
}

impl Page {
    async fn wanted(&mut self) -> Result<Option<Received>, Failure> {
        while self.left > 0 {
            let next = answered("a read", async { self.stream.next().await.map_err(failure) }).await?;
            let Some(received) = next.map(received).transpose()? else { break };
            if self.filter.as_ref().is_none_or(|filter| filter.admits(&received)) {
                return Ok(Some(received));
            }
        }
        Ok(None)
    }
}

/// A catch-up subscription.
struct CatchUp {
    /// None where it is over: the crate would open it again.
    told: Option<BoxStream<'static, api::Result<SubscriptionEvent>>>,
    guard: Guard,
    /// Why it is over.
    end: Failure,
}

impl CatchUp {
    fn poll_told(&mut self, context: &mut Context<'_>) -> Poll<Result<SubscriptionEvent, Failure>> {
        let Some(told) = &mut self.told else { return Poll::Ready(Err(self.end.clone())) };
        let failed = match self.guard.poll(|| told.poll_next_unpin(context)) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(Some(Ok(told)))) => return Poll::Ready(Ok(told)),
            Ok(Poll::Ready(Some(Err(error)))) => failure(error),
            Ok(Poll::Ready(None)) => Failure::Ended,
            Err(failed) => failed,
        };
        self.told = None;
        self.end = failed.clone();
        Poll::Ready(Err(failed))
    }

    fn poll_confirmed(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        self.poll_told(context).map(|told| match told? {
            SubscriptionEvent::Confirmed(_) => Ok(()),
            other => Err(too_early(&other)),
        })
    }

    fn poll_fed(&mut self, context: &mut Context<'_>) -> Poll<Result<Fed, Failure>> {
        loop {
            let fed = match ready!(self.poll_told(context))? {
                SubscriptionEvent::EventAppeared(event) => Fed::Event(received(event)?),
                SubscriptionEvent::Checkpoint(at) => Fed::Checkpoint(at.into()),
                other if super::is_caught_up(&other) => Fed::CaughtUp,
                _ => continue,
            };
            return Poll::Ready(Ok(fed));
        }
    }
}

#[async_trait]
impl Feed for CatchUp {
    async fn next(&mut self) -> Result<Fed, Failure> {
        poll_fn(|context| self.poll_fed(context)).await
    }
}

/// A consumer of a persistent subscription. A call for the next event that is dropped loses nothing.
struct Consumer {
    subscription: api::PersistentSubscription,
    /// Why it is over.
    end: Option<Failure>,
}

impl Consumer {
    async fn told(&mut self) -> Result<api::PersistentSubscriptionEvent, Failure> {
        if let Some(end) = &self.end {
            return Err(end.clone());
        }
        let failed = match caught(self.subscription.next_subscription_event()).await {
            Ok(Ok(told)) => return Ok(told),
            Ok(Err(error)) => failure(error),
            // What the crate takes for impossible is a stream that ends as if all were well.
            Err(panicked) if panicked.is_unreachable_code() => Failure::Ended,
            Err(panicked) => panicked.into(),
        };
        self.end = Some(failed.clone());
        Err(failed)
    }
}

#[async_trait]
impl Membership for Consumer {
    async fn next(&mut self) -> Result<Received, Failure> {
        loop {
            if let api::PersistentSubscriptionEvent::EventAppeared { event, .. } = self.told().await? {
                return received(event);
            }
        }
    }

    async fn ack(&mut self, ids: Vec<Uuid>) -> Result<(), Failure> {
        if let Some(end) = &self.end {
            return Err(end.clone());
        }
        answered("acks", async { self.subscription.ack_ids(ids).await.map_err(failure) }).await
    }
}

fn received(resolved: api::ResolvedEvent) -> Result<Received, Failure> {
    let Some(original) = resolved.link.as_ref().or(resolved.event.as_ref()) else {
        return Err(Failure::Other("the server sent what is neither an event nor a link".to_owned()));
    };
    let original = Original { id: original.id, revision: original.revision, place: original.position.into() };
    let event = resolved.event.map(|event| Event {
        id: event.id,
        stream_id: super::stream_id(&event),
        revision: event.revision,
        // The crate cuts it to whole seconds, and takes 1970 where there is none.
        occurred_at: event.metadata.get("created").and_then(|ticks| occurred_at(ticks)),
        event_type: event.event_type,
        data: event.data,
        metadata: event.custom_metadata,
    });
    Ok(Received { original, event })
}

impl std::convert::From<Position> for Place {
    fn from(at: Position) -> Self {
        Self { commit: at.commit, prepare: at.prepare }
    }
}

fn too_early(told: &impl std::fmt::Debug) -> Failure {
    Failure::Other(format!("the server did not confirm the subscription first, it sent {told:?}"))
}

/// Before there are events, this code means one thing only.
fn not_joined(error: api::Error) -> Failure {
    match error {
        api::Error::Grpc { code, .. } if i32::from(code) == FAILED_PRECONDITION => Failure::Full,
        other => failure(other),
    }
}

fn failure(error: api::Error) -> Failure {
    use api::Error;
    match error {
        Error::IllegalStateError(text) if text.contains("has dropped") => Failure::Dropped,
        // The second is for an ack that nobody takes any more.
        Error::ServerError(text) | Error::IllegalStateError(text) => Failure::Unavailable(text),
        Error::DeadlineExceeded => Failure::Unavailable("the server did not answer in time".to_owned()),
        Error::Grpc { code, message } if [CANCELLED, RESOURCE_EXHAUSTED, ABORTED].contains(&code.into()) => {
            Failure::Unavailable(message)
        }
        Error::ConnectionClosed => {
            Failure::Dead("the client is closed: its first connection failed, or its runtime has ended".to_owned())
        }
        Error::GrpcConnectionError(error) => Failure::Dead(error.to_string()),
        Error::NotLeaderException(leader) => Failure::NotLeader(format!("{}:{}", leader.host, leader.port)),
        Error::AccessDenied => Failure::Denied,
        Error::ResourceNotFound => Failure::Missing,
        Error::ResourceAlreadyExists => Failure::Exists,
        Error::ResourceDeleted => Failure::Deleted,
        other => Failure::Other(other.to_string()),
    }
}
