//! The rules of a persistent subscription: pure, with the time given by the caller.
//!
//! | what happens to an event | what follows |
//! |---|---|
//! | acked, skipped | it is done |
//! | `Stop` | it is skipped, as servers do |
//! | `Park` | it goes to the parked stream, and is done |
//! | `Retry`, or longer out than the message timeout | it goes out again with one more retry, or is parked when it has had them all |
//! | its consumer leaves | it goes out again with one more retry, and is never parked for that |
//! | acked while it waits to go out again | nothing: it goes out again |
//!
//! Events that go out again come before new ones, in order of position and behind those that were replayed before; but
//! a consumer may hold later ones already.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::record::{Found, LogPosition, Record};
use super::settings::{Place, Settings, Source, Strategy};
use super::store::{Store, StreamState};

/// A consumer of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ConsumerId(pub(crate) u64);

/// What a consumer says that it did not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    Retry,
    Park,
    Skip,
    Stop,
}

/// What the owner of the subscription has to do, in this order.
#[derive(Debug)]
pub(crate) enum Effect {
    Deliver {
        to: ConsumerId,
        event: Found,
        retries: u32,
    },
    WriteCheckpoint(Place),
    Park {
        event: Found,
        reason: String,
    },
    /// The consumer is told that the subscription is gone.
    Drop(ConsumerId),
}

/// As many consumers as the settings allow are there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// An event on its way through the subscription.
#[derive(Debug, Clone)]
struct Message {
    event: Found,
    place: Place,
    /// Number of its first push. Events that were replayed from the parked stream have none, and no part in checkpoints.
    sequence: Option<u64>,
    retries: u32,
    replayed: bool,
}

/// An event that a consumer holds.
#[derive(Debug)]
struct Outstanding {
    message: Message,
    holder: ConsumerId,
    since: Duration,
}

#[derive(Debug)]
struct Consumer {
    id: ConsumerId,
    capacity: i64,
    free: i64,
    delivered: u64,
}

/// What `GetInfo` tells of a consumer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ConsumerStats {
    pub(crate) id: ConsumerId,
    pub(crate) free: i64,
    pub(crate) in_flight: i64,
    pub(crate) delivered: u64,
}

/// What `GetInfo` tells of the events.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) buffered: usize,
    pub(crate) to_retry: usize,
    pub(crate) outstanding: usize,
    pub(crate) delivered: u64,
    pub(crate) checkpoint: Option<Place>,
    pub(crate) last_known: Option<Place>,
    pub(crate) behind: bool,
}

#[derive(Debug)]
pub(crate) struct PersistentSubscription {
    source: Source,
    settings: Settings,
    /// The next place to read from, inclusive.
    cursor: Place,
    /// The first event of the first read is taken for the one that the checkpoint names, whatever it is. Servers do so.
    drop_first: bool,
    /// Read and never pushed.
    buffer: VecDeque<Message>,
    /// To be pushed again: by place, but those replayed from the parked stream keep theirs in the queue.
    retry: VecDeque<Message>,
    outstanding: HashMap<Uuid, Outstanding>,
    /// The first is the one whose turn it is.
    consumers: VecDeque<Consumer>,
    /// The source stream was found under a tombstone: nobody gets anything until a restart.
    faulted: bool,
    last_known: Option<Place>,
    delivered: u64,

    // Checkpoint. Sequence numbers count pushes, so that gaps between revisions do not matter.
    pushed: u64,
    last_pushed: Option<Place>,
    /// By sequence: the place before each event that is pushed and not done.
    open: BTreeMap<u64, Option<Place>>,
    checkpoint: Option<Place>,
    checkpoint_sequence: u64,
    /// `None` since the load: the first one waits for no time.
    checkpoint_written: Option<Duration>,

    effects: Vec<Effect>,
}

impl PersistentSubscription {
    /// A subscription as it is after a start of the server, with what its checkpoint stream holds.
    pub(crate) fn load(source: Source, settings: Settings, checkpoint: Option<Place>, store: &Store) -> Self {
        let cursor = checkpoint.unwrap_or_else(|| settings.start.resolve(&source, store));
        Self {
            source,
            settings,
            cursor,
            drop_first: checkpoint.is_some(),
            buffer: VecDeque::new(),
            retry: VecDeque::new(),
            outstanding: HashMap::new(),
            consumers: VecDeque::new(),
            faulted: false,
            last_known: checkpoint,
            delivered: 0,
            pushed: 0,
            last_pushed: checkpoint,
            open: BTreeMap::new(),
            checkpoint,
            checkpoint_sequence: 0,
            checkpoint_written: None,
            effects: Vec::new(),
        }
    }

    /// Takes a consumer in, who gets at most `capacity` events that are not done.
    pub(crate) fn connect(&mut self, id: ConsumerId, capacity: u32) -> Result<(), Full> {
        let limit = self.settings.max_subscriber_count;
        if limit > 0 && self.consumers.len() >= limit as usize {
            return Err(Full);
        }
        self.consumers.push_back(Consumer { id, capacity: capacity.into(), free: capacity.into(), delivered: 0 });
        if self.faulted {
            self.drop_consumers();
        }
        Ok(())
    }

    /// Lets a consumer go. What it held goes out again, and is not parked however often that was.
    pub(crate) fn disconnect(&mut self, id: ConsumerId) {
        self.consumers.retain(|consumer| consumer.id != id);
        for message in self.take_outstanding(|held| held.holder == id) {
            self.put_back(Message { retries: message.retries + 1, ..message });
        }
    }

    /// Sends all consumers away.
    pub(crate) fn drop_consumers(&mut self) {
        for id in self.consumers.iter().map(|consumer| consumer.id).collect::<Vec<_>>() {
            self.disconnect(id);
            self.effects.push(Effect::Drop(id));
        }
    }

    /// Events are done, in any order and whoever holds them. Ids that nobody holds mean nothing.
    pub(crate) fn ack(&mut self, ids: &[Uuid], now: Duration) {
        for id in ids {
            if let Some(message) = self.release(*id) {
                self.close(&message);
            }
        }
        self.mark_checkpoint(now, false);
    }

    pub(crate) fn nack(&mut self, ids: &[Uuid], refusal: Refusal, reason: &str, now: Duration) {
        for id in ids {
            let Some(message) = self.release(*id) else { continue };
            match refusal {
                Refusal::Retry => self.retry_or_park(message),
                Refusal::Park => self.park(message, format!("Client explicitly NAK'ed message.\n{reason}")),
                Refusal::Skip | Refusal::Stop => self.close(&message),
            }
        }
        self.mark_checkpoint(now, false);
    }

    /// What a server does once a second: timeouts, then the checkpoint.
    pub(crate) fn tick(&mut self, now: Duration) {
        let timeout = self.settings.message_timeout;
        for message in self.take_outstanding(|held| now.saturating_sub(held.since) >= timeout) {
            self.retry_or_park(message);
        }
        self.mark_checkpoint(now, true);
    }

    /// Parked events go out again as new ones, without a part in checkpoints.
    pub(crate) fn replay(&mut self, parked: impl IntoIterator<Item = Found>) {
        for event in parked {
            let place = self.source.place(&event.original);
            self.retry.push_back(Message { event, place, sequence: None, retries: 0, replayed: true });
        }
    }

    /// Reads and pushes until there is nothing more to read or nobody to push to.
    pub(crate) fn advance(&mut self, store: &Store, now: Duration) {
        loop {
            let read = self.fill(store);
            let pushed = self.push(now);
            if !read && !pushed {
                break;
            }
        }
        self.mark_checkpoint(now, false);
    }

    pub(crate) fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            buffered: self.buffer.len(),
            to_retry: self.retry.len(),
            outstanding: self.outstanding.len(),
            delivered: self.delivered,
            checkpoint: self.checkpoint,
            last_known: self.last_known,
            behind: self.buffer.len() >= self.settings.history_buffer_size as usize,
        }
    }

    pub(crate) fn consumers(&self) -> impl Iterator<Item = ConsumerStats> {
        self.consumers.iter().map(|consumer| ConsumerStats {
            id: consumer.id,
            free: consumer.free,
            in_flight: consumer.capacity - consumer.free,
            delivered: consumer.delivered,
        })
    }

    fn fill(&mut self, store: &Store) -> bool {
        if self.faulted {
            return false;
        }
        if self.source.stream().is_some_and(|stream| store.state(stream) == StreamState::Deleted) {
            self.faulted = true;
            self.drop_consumers();
            return false;
        }
        let room = (self.settings.history_buffer_size as usize).saturating_sub(self.buffer.len());
        let mut records = self.source.read(store, self.cursor, room.min(self.settings.read_batch_size as usize));
        let drop_first = std::mem::take(&mut self.drop_first);
        let Some(last) = records.last() else { return false };
        self.cursor = self.source.place(last).successor();
        self.last_known = Some(self.source.place(last));
        if drop_first {
            records.remove(0);
        }
        for record in records.into_iter().filter(|record| self.source.admits(record)) {
            let place = self.source.place(&record);
            let event = store.find(&record, self.settings.resolve_links);
            self.buffer.push_back(Message { event, place, sequence: None, retries: 0, replayed: false });
        }
        true
    }

    fn push(&mut self, now: Duration) -> bool {
        let mut any = false;
        while let Some(message) = self.retry.front().or(self.buffer.front()) {
            let record = message.event.original.clone();
            let Some(to) = self.choose(&record) else { break };
            let Some(message) = self.retry.pop_front().or_else(|| self.buffer.pop_front()) else { break };
            self.push_to(to, message, now);
            any = true;
        }
        any
    }

    fn push_to(&mut self, to: ConsumerId, mut message: Message, now: Duration) {
        let id = message.event.original.id;
        let held_already = self.outstanding.contains_key(&id);
        if message.sequence.is_none() && !message.replayed {
            self.pushed += 1;
            message.sequence = Some(self.pushed);
            let before = self.last_pushed.replace(message.place);
            // The second event of an id is not followed, so a checkpoint may pass it.
            if !held_already {
                self.open.insert(self.pushed, before);
            }
        }
        if let Some(consumer) = self.consumers.iter_mut().find(|consumer| consumer.id == to) {
            consumer.free -= 1;
            consumer.delivered += 1;
        }
        self.delivered += 1;
        self.effects.push(Effect::Deliver { to, event: message.event.clone(), retries: message.retries });
        if !held_already {
            self.outstanding.insert(id, Outstanding { message, holder: to, since: now });
        }
    }

    /// Which consumer gets the event; `None` when those that may have it have no room.
    fn choose(&mut self, record: &Record) -> Option<ConsumerId> {
        let at = match self.settings.strategy {
            Strategy::RoundRobin | Strategy::DispatchToSingle => {
                self.consumers.iter().position(|consumer| consumer.free > 0)?
            }
            Strategy::Pinned => {
                let stream = record.target().filter(|_| record.is_link()).map_or(&*record.stream, |(_, stream)| stream);
                bucket(stream).checked_rem(self.consumers.len())?
            }
        };
        let chosen = self.consumers.get(at).filter(|consumer| consumer.free > 0)?.id;
        match self.settings.strategy {
            Strategy::RoundRobin => self.consumers.rotate_left(at + 1),
            // It stays the first until it is full.
            Strategy::DispatchToSingle => self.consumers.rotate_left(at),
            Strategy::Pinned => {}
        }
        Some(chosen)
    }

    fn take_outstanding(&mut self, which: impl Fn(&Outstanding) -> bool) -> Vec<Message> {
        let ids: Vec<Uuid> = self.outstanding.iter().filter(|(_, held)| which(held)).map(|(id, _)| *id).collect();
        let mut messages: Vec<Message> = ids.into_iter().filter_map(|id| self.release(id)).collect();
        messages.sort_by_key(|message| (message.replayed, message.place));
        messages
    }

    /// Takes an event from whoever holds it, which gives room for one.
    fn release(&mut self, id: Uuid) -> Option<Message> {
        let held = self.outstanding.remove(&id)?;
        if let Some(consumer) = self.consumers.iter_mut().find(|consumer| consumer.id == held.holder) {
            consumer.free += 1;
        }
        Some(held.message)
    }

    fn retry_or_park(&mut self, message: Message) {
        let limit = self.settings.max_retry_count;
        if message.retries >= limit {
            self.park(message, format!("Reached retry count of {limit}"));
        } else {
            self.put_back(Message { retries: message.retries + 1, ..message });
        }
    }

    fn put_back(&mut self, message: Message) {
        let comes_later = |other: &Message| !message.replayed && !other.replayed && other.place > message.place;
        let at = self.retry.iter().position(comes_later).unwrap_or(self.retry.len());
        self.retry.insert(at, message);
    }

    fn park(&mut self, message: Message, reason: String) {
        self.close(&message);
        self.effects.push(Effect::Park { event: message.event, reason });
    }

    fn close(&mut self, message: &Message) {
        if let Some(sequence) = message.sequence {
            self.open.remove(&sequence);
        }
    }

    /// Writes the place before the lowest open event, or the last pushed when none is open, if enough lies between it
    /// and the last one written.
    fn mark_checkpoint(&mut self, now: Duration, is_tick: bool) {
        let (sequence, place) = match self.open.first_key_value() {
            Some((sequence, before)) => (sequence - 1, *before),
            None => (self.pushed, self.last_pushed),
        };
        let Some(place) = place else { return };
        let done = sequence.saturating_sub(self.checkpoint_sequence);
        let settings = &self.settings;
        let is_time = |after| self.checkpoint_written.is_none_or(|written| now.saturating_sub(written) >= after);
        let by_time =
            is_tick && settings.checkpoint_after.is_some_and(is_time) && done >= settings.min_checkpoint_count.into();
        if done > 0 && (by_time || done >= settings.max_checkpoint_count.into()) {
            self.checkpoint = Some(place);
            self.checkpoint_sequence = sequence;
            self.checkpoint_written = Some(now);
            self.effects.push(Effect::WriteCheckpoint(place));
        }
    }
}

impl Source {
    /// At most `limit` records from a place on.
    fn read(&self, store: &Store, from: Place, limit: usize) -> Vec<Arc<Record>> {
        match (self, from) {
            (Self::Stream(stream), Place::Revision(revision)) => {
                store.forwards(stream, revision).take(limit).cloned().collect()
            }
            (Self::All(_), Place::Log(position)) => store.all_forwards(position).take(limit).cloned().collect(),
            (Self::Stream(_), Place::Log(_)) | (Self::All(_), Place::Revision(_)) => Vec::new(),
        }
    }

    pub(crate) fn place(&self, record: &Record) -> Place {
        match self {
            Self::Stream(_) => Place::Revision(record.revision),
            Self::All(_) => Place::Log(record.position),
        }
    }
}

impl Place {
    fn successor(self) -> Self {
        match self {
            Self::Revision(revision) => Self::Revision(revision.saturating_add(1)),
            Self::Log(position) => Self::Log(LogPosition::successor(position)),
        }
    }
}

/// Which of 1,024 buckets a stream is in.
fn bucket(stream: &str) -> usize {
    stream.bytes().fold(17_usize, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into())) % 1024
}

#[cfg(test)]
mod tests;
