//! Persistent subscriptions: from calls to their rules, and back.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status, Streaming};
use uuid::Uuid;

use super::{Service, convert, refusals, subscription_settings};
use crate::eventstore::core::{Core, Group, GroupKey, Subscriber};
use crate::eventstore::node::{self, Node};
use crate::eventstore::proto::event_store::client::StreamIdentifier;
use crate::eventstore::proto::event_store::client::persistent_subscriptions::persistent_subscriptions_server::PersistentSubscriptions;
use crate::eventstore::proto::event_store::client::persistent_subscriptions::{
    CreateReq, CreateResp, DeleteReq, DeleteResp, GetInfoReq, GetInfoResp, ListReq, ListResp, ReadReq, ReadResp,
    ReplayParkedReq, ReplayParkedResp, SubscriptionInfo, UpdateReq, UpdateResp, delete_req, get_info_req, list_req,
    read_req, read_resp, replay_parked_req, subscription_info,
};
use crate::eventstore::settings::{Place, Settings, Source};
use crate::eventstore::subscriptions::{ConsumerId, Refusal};

/// The group a message names, from one of the messages that can.
macro_rules! key {
    ($stream:path, $all:path, $of:expr, $group:expr) => {
        match $of {
            Some($stream(stream)) => named(&stream, &$group)?,
            Some($all(())) => GroupKey::new("$all", &$group),
            None => return Err(Status::invalid_argument("'stream_option' is missing")),
        }
    };
}

#[tonic::async_trait]
impl PersistentSubscriptions for Service {
    type ReadStream = BoxStream<'static, Result<ReadResp, Status>>;

    async fn create(&self, request: Request<CreateReq>) -> Result<Response<CreateResp>, Status> {
        self.node.admit_subscription(request.metadata()).await?;
        let wanted = subscription_settings::to_create(options(request.into_inner().options)?)?;
        let mut core = self.node.core();
        check(&core, &wanted.key, &wanted.source, &wanted.settings)?;
        if core.groups.contains_key(&wanted.key) {
            return Err(refusals::exists(&wanted.key));
        }
        refuse(&wanted.key, wanted.settings.refusal())?;
        core.create_group(wanted.key, wanted.source, wanted.settings);
        Ok(Response::new(CreateResp {}))
    }

    async fn update(&self, request: Request<UpdateReq>) -> Result<Response<UpdateResp>, Status> {
        self.node.admit_subscription(request.metadata()).await?;
        let wanted = subscription_settings::to_update(options(request.into_inner().options)?)?;
        let mut core = self.node.core();
        group(&core, &wanted.key)?;
        check(&core, &wanted.key, &wanted.source, &wanted.settings)?;
        refuse(&wanted.key, wanted.settings.refusal())?;
        core.update_group(&wanted.key, wanted.settings);
        Ok(Response::new(UpdateResp {}))
    }

    async fn delete(&self, request: Request<DeleteReq>) -> Result<Response<DeleteResp>, Status> {
        use delete_req::options::StreamOption as Of;
        self.node.admit_subscription(request.metadata()).await?;
        let options = options(request.into_inner().options)?;
        let key = key!(Of::StreamIdentifier, Of::All, options.stream_option, options.group_name);
        let mut core = self.node.core();
        group(&core, &key)?;
        core.delete_group(&key);
        Ok(Response::new(DeleteResp {}))
    }

    async fn read(&self, request: Request<Streaming<ReadReq>>) -> Result<Response<Self::ReadStream>, Status> {
        use read_req::options::StreamOption as Of;
        use read_req::options::uuid_option::Content;
        self.node.admit_subscription(request.metadata()).await?;
        let (user, connection_name) = (node::user(request.metadata()), node::connection_name(request.metadata()));
        let from = request.remote_addr().map(|address| address.to_string()).unwrap_or_default();
        let mut messages = request.into_inner();
        let Some(read_req::Content::Options(options)) = messages.message().await?.and_then(|first| first.content)
        else {
            return Err(Status::invalid_argument("the first message of a subscriber has to be its options"));
        };
        let key = key!(Of::StreamIdentifier, Of::All, options.stream_option, options.group_name);
        let Some(buffer_size) = usize::try_from(options.buffer_size).ok().filter(|size| *size > 0) else {
            return Err(Status::unknown("Exception was thrown by handler."));
        };
        // One slot more than events need, for the error that ends the stream.
        let (deliveries, receiver) = mpsc::channel(buffer_size + 1);
        let structured_ids =
            matches!(options.uuid_option.and_then(|option| option.content), Some(Content::Structured(())));
        let subscriber = Subscriber { deliveries, buffer_size, structured_ids, user, from, connection_name };
        let id = match self.node.core().connect(&key, subscriber) {
            None => return Err(refusals::does_not_exist(&key)),
            Some(Err(_full)) => return Err(refusals::full(&key)),
            Some(Ok(id)) => id,
        };
        let confirmation = ReadResp {
            content: Some(read_resp::Content::SubscriptionConfirmation(read_resp::SubscriptionConfirmation {
                subscription_id: key.id(),
            })),
        };
        let (alive, gone) = oneshot::channel::<()>();
        tokio::spawn(listen(self.node.clone(), key, id, messages, gone));
        let events = stream::unfold((receiver, alive), |(mut receiver, alive)| async {
            receiver.recv().await.map(|answer| (answer, (receiver, alive)))
        });
        Ok(Response::new(stream::iter([Ok(confirmation)]).chain(events).boxed()))
    }

    async fn get_info(&self, request: Request<GetInfoReq>) -> Result<Response<GetInfoResp>, Status> {
        use get_info_req::options::StreamOption as Of;
        self.node.admit_subscription(request.metadata()).await?;
        let options = options(request.into_inner().options)?;
        let key = key!(Of::StreamIdentifier, Of::All, options.stream_option, options.group_name);
        let core = self.node.core();
        let found = group(&core, &key)?;
        Ok(Response::new(GetInfoResp { subscription_info: Some(info(&core, &key, found)) }))
    }

    async fn replay_parked(&self, request: Request<ReplayParkedReq>) -> Result<Response<ReplayParkedResp>, Status> {
        use replay_parked_req::options::{StopAtOption, StreamOption as Of};
        self.node.admit_subscription(request.metadata()).await?;
        let options = options(request.into_inner().options)?;
        let key = key!(Of::StreamIdentifier, Of::All, options.stream_option, options.group_name);
        let limit = match options.stop_at_option {
            Some(StopAtOption::StopAt(limit)) => {
                Some(usize::try_from(limit).map_err(|_| Status::invalid_argument("'stop_at' is negative"))?)
            }
            Some(StopAtOption::NoLimit(())) | None => None,
        };
        let mut core = self.node.core();
        group(&core, &key)?;
        core.replay_parked(&key, limit);
        Ok(Response::new(ReplayParkedResp {}))
    }

    async fn list(&self, request: Request<ListReq>) -> Result<Response<ListResp>, Status> {
        use list_req::options::ListOption;
        use list_req::stream_option::StreamOption as Of;
        self.node.admit_subscription(request.metadata()).await?;
        let wanted = match options(request.into_inner().options)?.list_option {
            Some(ListOption::ListAllSubscriptions(())) => None,
            Some(ListOption::ListForStream(of)) => Some(key!(Of::Stream, Of::All, of.stream_option, "").stream),
            None => return Err(Status::invalid_argument("'list_option' is missing")),
        };
        let core = self.node.core();
        if let Some(stream) = wanted.as_ref().filter(|stream| !core.subscribed_once.contains(stream)) {
            return Err(refusals::does_not_exist(&GroupKey::new(stream, "")));
        }
        let groups = core.groups.iter().filter(|(key, _)| wanted.as_ref().is_none_or(|stream| key.stream == *stream));
        Ok(Response::new(ListResp { subscriptions: groups.map(|(key, group)| info(&core, key, group)).collect() }))
    }

    async fn restart_subsystem(&self, request: Request<()>) -> Result<Response<()>, Status> {
        self.node.admit_subscription(request.metadata()).await?;
        self.node.core().reload();
        Ok(Response::new(()))
    }
}

fn named(stream: &StreamIdentifier, group: &str) -> Result<GroupKey, Status> {
    Ok(GroupKey::new(&convert::stream_name(Some(stream))?, group))
}

fn options<T>(options: Option<T>) -> Result<T, Status> {
    options.ok_or_else(|| Status::invalid_argument("'options' is missing"))
}

fn group<'core>(core: &'core Core, key: &GroupKey) -> Result<&'core Group, Status> {
    core.groups.get(key).ok_or_else(|| refusals::does_not_exist(key))
}

/// Whether a server has a group there, and lets it start there.
fn check(core: &Core, key: &GroupKey, source: &Source, settings: &Settings) -> Result<(), Status> {
    let refusal = match source.stream() {
        Some("") => Some("Bad stream name.".to_owned()),
        Some("$all") => {
            Some("Persistent subscriptions to $all are only supported over gRPC through gRPC clients".to_owned())
        }
        _ => settings.start.refusal(&core.store),
    };
    refuse(key, refusal)
}

/// Fails for a reason, where there is one.
fn refuse(key: &GroupKey, refusal: Option<String>) -> Result<(), Status> {
    refusal.map_or(Ok(()), |reason| Err(refusals::failed(key, &reason)))
}

/// Takes acks from a subscriber until it is gone.
async fn listen(
    node: Arc<Node>,
    key: GroupKey,
    id: ConsumerId,
    mut messages: Streaming<ReadReq>,
    mut gone: oneshot::Receiver<()>,
) {
    loop {
        let message = tokio::select! {
            // Acks that arrived count, even if their sender is gone.
            biased;
            message = messages.message() => message,
            _ = &mut gone => break,
        };
        let Ok(Some(message)) = message else {
            // It has nothing more to say, and may still listen.
            let _dropped = gone.await;
            break;
        };
        if !node.manner().swallow_acks {
            settle(&node, &key, id, message);
        }
    }
    node.core().disconnect(&key, id);
}

fn settle(node: &Node, key: &GroupKey, id: ConsumerId, message: ReadReq) {
    use read_req::nack::Action;
    let mut core = node.core();
    let now = core.now();
    // One that was dropped has no say any more.
    let Some(group) = core.groups.get_mut(key).filter(|group| group.subscribers.contains_key(&id)) else { return };
    let ids = |sent: &[_]| sent.iter().filter_map(|id| convert::read_uuid(Some(id)).ok()).collect::<Vec<Uuid>>();
    match message.content {
        Some(read_req::Content::Ack(ack)) => group.rules.ack(&ids(&ack.ids), now),
        Some(read_req::Content::Nack(nack)) => {
            let refusal = match nack.action() {
                Action::Unknown | Action::Retry => Refusal::Retry,
                Action::Park => Refusal::Park,
                Action::Skip => Refusal::Skip,
                Action::Stop => Refusal::Stop,
            };
            group.rules.nack(&ids(&nack.ids), refusal, &nack.reason, now);
        }
        Some(read_req::Content::Options(_)) | None => {}
    }
    core.settle();
}

fn limited(value: impl TryInto<i32>) -> i32 {
    value.try_into().unwrap_or(i32::MAX)
}

fn info(core: &Core, key: &GroupKey, group: &Group) -> SubscriptionInfo {
    let stats = group.rules.stats();
    let settings = group.rules.settings();
    let place = |place: Option<Place>| place.map(|place| place.to_string()).unwrap_or_default();
    let connections: Vec<_> = group
        .rules
        .consumers()
        .filter_map(|consumer| {
            let subscriber = group.subscribers.get(&consumer.id)?;
            Some(subscription_info::ConnectionInfo {
                from: subscriber.from.clone(),
                username: subscriber.user.clone(),
                total_items: consumer.delivered.cast_signed(),
                available_slots: limited(consumer.free),
                in_flight_messages: limited(consumer.in_flight),
                connection_name: subscriber.connection_name.clone(),
                ..Default::default()
            })
        })
        .collect();
    SubscriptionInfo {
        event_source: key.stream.to_string(),
        group_name: key.group.to_string(),
        status: if stats.behind { "Behind" } else { "Live" }.to_owned(),
        total_in_flight_messages: connections.iter().map(|connection| connection.in_flight_messages).sum(),
        connections,
        total_items: stats.delivered.cast_signed(),
        last_checkpointed_event_position: place(stats.checkpoint),
        last_known_event_position: place(stats.last_known),
        resolve_link_tos: settings.resolve_links,
        start_from: settings.start.text(&group.source),
        message_timeout_milliseconds: limited(settings.message_timeout.as_millis()),
        extra_statistics: settings.extra_statistics,
        max_retry_count: limited(settings.max_retry_count),
        live_buffer_size: limited(settings.live_buffer_size),
        buffer_size: limited(settings.history_buffer_size),
        read_batch_size: limited(settings.read_batch_size),
        check_point_after_milliseconds: settings.checkpoint_after.map_or(0, |after| limited(after.as_millis())),
        min_check_point_count: limited(settings.min_checkpoint_count),
        max_check_point_count: limited(settings.max_checkpoint_count),
        read_buffer_count: limited(stats.buffered),
        retry_buffer_count: limited(stats.to_retry),
        outstanding_messages_count: limited(stats.outstanding),
        named_consumer_strategy: settings.strategy_name.clone(),
        max_subscriber_count: limited(settings.max_subscriber_count),
        parked_message_count: limited(core.parked_count(key)).into(),
        ..Default::default()
    }
}
