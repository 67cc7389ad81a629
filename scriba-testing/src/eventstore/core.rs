//! The state behind the services: the log, the groups and the clock, under one lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::{mpsc, watch};
use tonic::Status;

use super::proto::event_store::client::persistent_subscriptions as ps;
use super::record::{Found, NewEvent};
use super::service::{convert, refusals};
use super::settings::{Place, Settings, Source};
use super::store::{Expected, Store};
use super::subscriptions::{ConsumerId, Effect, Full, PersistentSubscription};

/// A second of the server's clock.
const TICK: Duration = Duration::from_secs(1);

/// Stream (or `$all`) and name of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct GroupKey {
    pub(crate) stream: Arc<str>,
    pub(crate) group: Arc<str>,
}

impl GroupKey {
    pub(crate) fn new(stream: &str, group: &str) -> Self {
        Self { stream: stream.into(), group: group.into() }
    }

    /// The id that subscribers are told.
    pub(crate) fn id(&self) -> String {
        format!("{}::{}", self.stream, self.group)
    }

    pub(crate) fn checkpoint_stream(&self) -> String {
        format!("$persistentsubscription-{}-checkpoint", self.id())
    }

    pub(crate) fn parked_stream(&self) -> String {
        format!("$persistentsubscription-{}-parked", self.id())
    }
}

pub(crate) type Deliveries = mpsc::Sender<Result<ps::ReadResp, Status>>;

/// The wire to a subscriber.
pub(crate) struct Subscriber {
    pub(crate) deliveries: Deliveries,
    /// The events that fit; what comes on top is lost without a word, as on a server.
    pub(crate) buffer_size: usize,
    pub(crate) structured_ids: bool,
    pub(crate) user: String,
    pub(crate) from: String,
    pub(crate) connection_name: String,
}

pub(crate) struct Group {
    pub(crate) source: Source,
    pub(crate) rules: PersistentSubscription,
    pub(crate) subscribers: HashMap<ConsumerId, Subscriber>,
}

/// The server's time: real time while it runs, and what tests put on top.
struct Clock {
    running_since: Option<Instant>,
    ahead: Duration,
}

impl Clock {
    fn now(&self) -> Duration {
        self.running_since.map_or(Duration::ZERO, |since| since.elapsed()) + self.ahead
    }
}

pub(crate) struct Core {
    pub(crate) store: Store,
    pub(crate) groups: BTreeMap<GroupKey, Group>,
    /// Streams that had a group once: `List` tells them from those that never had one.
    pub(crate) subscribed_once: Vec<Arc<str>>,
    clock: Clock,
    next_consumer: u64,
    /// Pushes that get lost on their way, from now on.
    pub(crate) pushes_to_lose: u64,
    /// Told of every change, for readers that wait for one.
    changed: watch::Sender<()>,
}

impl Core {
    pub(crate) fn new() -> Self {
        Self {
            store: Store::default(),
            groups: BTreeMap::new(),
            subscribed_once: Vec::new(),
            clock: Clock { running_since: Some(Instant::now()), ahead: Duration::ZERO },
            next_consumer: 0,
            pushes_to_lose: 0,
            changed: watch::Sender::new(()),
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(crate) fn stop_clock(&mut self) {
        self.clock = Clock { running_since: None, ahead: self.now() };
    }

    pub(crate) fn clock_runs(&self) -> bool {
        self.clock.running_since.is_some()
    }

    /// Moves the clock on by whole ticks, and lets the subscriptions have each of them.
    pub(crate) fn fast_forward(&mut self, by: Duration) {
        let mut left = by;
        while left > Duration::ZERO {
            let step = left.min(TICK);
            self.clock.ahead += step;
            left -= step;
            self.tick();
        }
    }

    pub(crate) fn tick(&mut self) {
        let now = self.now();
        for group in self.groups.values_mut() {
            group.rules.tick(now);
        }
        self.settle();
    }

    pub(crate) fn create_group(&mut self, key: GroupKey, source: Source, settings: Settings) {
        self.write_config(&key, "created");
        if !self.subscribed_once.contains(&key.stream) {
            self.subscribed_once.push(key.stream.clone());
        }
        let rules = self.load(&key, source.clone(), settings);
        self.groups.insert(key, Group { source, rules, subscribers: HashMap::new() });
        self.settle();
    }

    /// Subscribers are dropped, and the group goes on from its checkpoint, if it has one.
    pub(crate) fn update_group(&mut self, key: &GroupKey, settings: Settings) {
        self.write_config(key, "updated");
        self.reload_group(key, Some(settings));
        self.settle();
    }

    pub(crate) fn delete_group(&mut self, key: &GroupKey) {
        self.drop_subscribers(key);
        self.groups.remove(key);
        for stream in [key.checkpoint_stream(), key.parked_stream()] {
            // A stream that was never written cannot be deleted, and need not be.
            let _missing = self.store.delete(&stream, Expected::StreamExists);
        }
        self.write_config(key, "deleted");
        self.settle();
    }

    /// What a server that starts has: nothing but what was written.
    pub(crate) fn reload(&mut self) {
        for key in self.groups.keys().cloned().collect::<Vec<_>>() {
            self.reload_group(&key, None);
        }
        self.settle();
    }

    pub(crate) fn connect(&mut self, key: &GroupKey, subscriber: Subscriber) -> Option<Result<ConsumerId, Full>> {
        let group = self.groups.get_mut(key)?;
        self.next_consumer += 1;
        let id = ConsumerId(self.next_consumer);
        let capacity = u32::try_from(subscriber.buffer_size).unwrap_or(u32::MAX);
        if group.rules.connect(id, capacity).is_err() {
            return Some(Err(Full));
        }
        group.subscribers.insert(id, subscriber);
        self.settle();
        Some(Ok(id))
    }

    pub(crate) fn disconnect(&mut self, key: &GroupKey, id: ConsumerId) {
        if let Some(group) = self.groups.get_mut(key) {
            group.subscribers.remove(&id);
            group.rules.disconnect(id);
        }
        self.settle();
    }

    /// Tells the subscribers that the subscription is gone.
    pub(crate) fn drop_subscribers(&mut self, key: &GroupKey) {
        if let Some(group) = self.groups.get_mut(key) {
            group.rules.drop_consumers();
        }
        self.settle();
    }

    pub(crate) fn drop_all_subscribers(&mut self) {
        for key in self.groups.keys().cloned().collect::<Vec<_>>() {
            self.drop_subscribers(&key);
        }
    }

    /// Streams to subscribers end as if all were well.
    pub(crate) fn end_subscribers(&mut self) {
        for group in self.groups.values_mut() {
            for (id, _) in group.subscribers.drain() {
                group.rules.disconnect(id);
            }
        }
        self.settle();
    }

    /// The parked stream is truncated at once, so what is replayed and not acked is lost by a restart, as on a server.
    pub(crate) fn replay_parked(&mut self, key: &GroupKey, limit: Option<usize>) {
        let Some(group) = self.groups.get_mut(key) else { return };
        let stream = key.parked_stream();
        let parked: Vec<_> = self.store.forwards(&stream, 0).take(limit.unwrap_or(usize::MAX)).cloned().collect();
        let Some(last) = parked.last() else { return };
        group.rules.replay(parked.iter().map(|link| self.store.find(link, true)));
        self.store.truncate(&stream, last.revision + 1);
        self.settle();
    }

    pub(crate) fn parked_count(&self, key: &GroupKey) -> usize {
        self.store.forwards(&key.parked_stream(), 0).count()
    }

    /// Lets every group do what it can, until none can do more.
    pub(crate) fn settle(&mut self) {
        loop {
            let now = self.now();
            let mut work = Vec::new();
            for (key, group) in &mut self.groups {
                group.rules.advance(&self.store, now);
                work.extend(group.rules.take_effects().into_iter().map(|effect| (key.clone(), effect)));
            }
            if work.is_empty() {
                break;
            }
            for (key, effect) in work {
                self.perform(&key, effect);
            }
        }
        self.changed.send_replace(());
    }

    fn perform(&mut self, key: &GroupKey, effect: Effect) {
        match effect {
            Effect::Deliver { to, event, retries } => self.deliver(key, to, &event, retries),
            Effect::WriteCheckpoint(place) => self.write_checkpoint(key, place),
            Effect::Park { event, reason } => self.write_parked(key, &event, &reason),
            Effect::Drop(id) => {
                let subscriber = self.groups.get_mut(key).and_then(|group| group.subscribers.remove(&id));
                if let Some(subscriber) = subscriber {
                    // The channel has a slot for this beyond those for events.
                    let _gone = subscriber.deliveries.try_send(Err(refusals::dropped(key)));
                }
            }
        }
    }

    fn deliver(&mut self, key: &GroupKey, to: ConsumerId, event: &Found, retries: u32) {
        if self.pushes_to_lose > 0 {
            self.pushes_to_lose -= 1;
            return;
        }
        let Some(subscriber) = self.groups.get(key).and_then(|group| group.subscribers.get(&to)) else { return };
        let deliveries = &subscriber.deliveries;
        if deliveries.max_capacity() - deliveries.capacity() < subscriber.buffer_size {
            let message = convert::delivery(event, retries, subscriber.structured_ids);
            let _gone = deliveries.try_send(Ok(message));
        }
    }

    fn write_checkpoint(&mut self, key: &GroupKey, place: Place) {
        let stream = key.checkpoint_stream();
        if self.store.current(&stream).is_none() {
            self.store.write_metadata(&stream, &json!({ "$maxCount": 2 }));
        }
        self.write_system(&stream, NewEvent::json("$SubscriptionCheckpoint", json!(place.to_string()).to_string()));
    }

    fn write_parked(&mut self, key: &GroupKey, event: &Found, reason: &str) {
        // What was replayed from the parked stream, or found through a link, is linked to where it really stands.
        let mut link = event.event.as_ref().map_or_else(
            || NewEvent { data: event.original.data.clone(), ..NewEvent::link(&event.original) },
            |record| NewEvent::link(record),
        );
        let added = chrono::Utc::now().to_rfc3339();
        let number = event.original.revision;
        link.metadata =
            json!({ "Added": added, "Reason": reason, "SubscriptionEventNumber": number }).to_string().into();
        self.write_system(&key.parked_stream(), link);
    }

    fn write_config(&mut self, key: &GroupKey, change: &str) {
        let body = json!({ "subscription": key.id(), "change": change }).to_string();
        self.write_system("$persistentSubscriptionConfig", NewEvent::json("$PersistentConfig", body));
    }

    fn write_system(&mut self, stream: &str, event: NewEvent) {
        // Only a tombstone would refuse it, and then a server cannot write either.
        let _deleted = self.store.append(stream, Expected::Any, vec![event]);
    }

    fn reload_group(&mut self, key: &GroupKey, settings: Option<Settings>) {
        self.drop_subscribers(key);
        let Some(group) = self.groups.get(key) else { return };
        let settings = settings.unwrap_or_else(|| group.rules.settings().clone());
        let rules = self.load(key, group.source.clone(), settings);
        if let Some(group) = self.groups.get_mut(key) {
            group.rules = rules;
        }
    }

    fn load(&self, key: &GroupKey, source: Source, settings: Settings) -> PersistentSubscription {
        let checkpoint = self.store.backwards(&key.checkpoint_stream(), u64::MAX).next().and_then(|record| {
            let text: String = serde_json::from_slice(&record.data).ok()?;
            Place::parse(&text)
        });
        PersistentSubscription::load(source, settings, checkpoint, &self.store)
    }
}
