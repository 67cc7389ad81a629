//! A double with a stopped clock, a group on a stream, and a Python client.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use scriba_testing::eventstore::{EventStoreDouble, GroupStats, NewEvent};
use serde_json::{Value, json};

use super::python::{Python, with};

pub(crate) const STREAM: &str = "orders";
pub(crate) const GROUP: &str = "readers";
pub(crate) const PARKED: &str = "$persistentsubscription-orders::readers-parked";

/// Revision of the event that was read, and how often it was tried before.
pub(crate) type Got = (u64, u64);

pub(crate) struct Bed {
    pub(crate) server: EventStoreDouble,
    pub(crate) python: Python,
    stream: &'static str,
    /// By revision: what is acked.
    ids: HashMap<u64, String>,
}

impl Bed {
    /// A group that reads a stream of so many events from its start.
    pub(crate) fn new(events: usize, settings: Value) -> Self {
        Self::on(STREAM, events, settings)
    }

    /// The same with a group on another stream.
    pub(crate) fn on(stream: &'static str, events: usize, settings: Value) -> Self {
        let mut bed = Self::without_group(stream);
        bed.append(events);
        bed.create(settings).unwrap();
        bed
    }

    pub(crate) fn without_group(stream: &'static str) -> Self {
        let server = EventStoreDouble::start().unwrap();
        server.stop_clock();
        let python = Python::connect(&server.connection_string());
        Self { server, python, stream, ids: HashMap::new() }
    }

    /// A group from which one consumer takes all it has room for.
    pub(crate) fn with_consumer(events: usize, settings: Value, buffer: usize) -> Self {
        let mut bed = Self::new(events, settings);
        bed.subscribe("one", buffer);
        bed
    }

    pub(crate) fn append(&self, events: usize) {
        self.server.append(STREAM, (0..events).map(|_| NewEvent::json("Placed", "{}")));
    }

    pub(crate) fn call(&mut self, method: &str, more: Value) -> Result<Value, (String, String)> {
        let names = json!({ "group_name": GROUP, "stream_name": self.stream });
        self.python.call(method, with(names, more))
    }

    pub(crate) fn create(&mut self, settings: Value) -> Result<Value, (String, String)> {
        self.call("create_subscription_to_stream", settings)
    }

    pub(crate) fn info(&mut self) -> Value {
        self.call("get_subscription_info", json!({})).unwrap()
    }

    /// What a stream of the server holds.
    pub(crate) fn read(&mut self, stream: &str) -> Vec<Value> {
        let read = self.python.call("get_stream", json!({ "stream_name": stream }));
        match read {
            Ok(events) => events.as_array().unwrap().clone(),
            Err((error, message)) if error == "NotFoundError" => {
                assert!(message.contains(stream), "{message}");
                Vec::new()
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    pub(crate) fn try_subscribe(&mut self, name: &str, buffer: usize) -> Result<Value, (String, String)> {
        self.python.ask(&json!({
            "do": "subscribe", "name": name, "method": "read_subscription_to_stream", "group_name": GROUP,
            "stream_name": self.stream, "event_buffer_size": buffer, "max_ack_delay": 0.02, "stopping_grace": 0.02,
        }))
    }

    #[track_caller]
    pub(crate) fn subscribe(&mut self, name: &str, buffer: usize) {
        self.try_subscribe(name, buffer).unwrap();
    }

    /// The next events of a consumer.
    #[track_caller]
    pub(crate) fn next(&mut self, name: &str, count: usize) -> Vec<Got> {
        self.next_events(name, count).iter().map(|event| self.note(event)).collect()
    }

    #[track_caller]
    pub(crate) fn next_events(&mut self, name: &str, count: usize) -> Vec<Value> {
        let events = self.python.ask(&json!({ "do": "next", "name": name, "count": count, "timeout": 10 }));
        events.unwrap().as_array().unwrap().clone()
    }

    /// How the subscription of a consumer fails.
    #[track_caller]
    pub(crate) fn failure(&mut self, name: &str) -> (String, String) {
        self.python.ask(&json!({ "do": "next", "name": name, "count": 1, "timeout": 10 })).unwrap_err()
    }

    /// A consumer gets nothing now.
    #[track_caller]
    pub(crate) fn nothing(&mut self, name: &str) {
        let arrived = self.python.ask(&json!({ "do": "waiting", "name": name, "timeout": 0.15 })).unwrap();
        assert_eq!(arrived, Value::Null);
    }

    pub(crate) fn id(&self, revision: u64) -> String {
        self.ids[&revision].clone()
    }

    pub(crate) fn ack(&mut self, name: &str, revisions: impl IntoIterator<Item = u64>) {
        let ids: Vec<String> = revisions.into_iter().map(|revision| self.id(revision)).collect();
        self.ack_ids(name, &ids);
    }

    pub(crate) fn ack_ids(&mut self, name: &str, ids: &[String]) {
        self.python.ask(&json!({ "do": "ack", "name": name, "ids": ids })).unwrap();
    }

    pub(crate) fn nack(&mut self, name: &str, revisions: impl IntoIterator<Item = u64>, action: &str) {
        let ids: Vec<String> = revisions.into_iter().map(|revision| self.id(revision)).collect();
        self.python.ask(&json!({ "do": "nack", "name": name, "ids": ids, "action": action })).unwrap();
    }

    /// Acks are sent first; then the consumer goes, and the server has noticed it.
    #[track_caller]
    pub(crate) fn close(&mut self, name: &str) {
        let before = self.group().subscribers;
        self.python.ask(&json!({ "do": "close", "name": name })).unwrap();
        self.until(|stats| stats.subscribers < before);
    }

    /// Lets so many seconds of the server pass.
    pub(crate) fn pass(&self, seconds: u64) {
        self.server.fast_forward(Duration::from_secs(seconds));
    }

    /// The server starts anew; consumers notice.
    #[track_caller]
    pub(crate) fn restart(&mut self, consumers: &[&str]) {
        self.server.restart();
        for name in consumers {
            assert_eq!(self.failure(name).0, "ServiceUnavailableError");
        }
    }

    pub(crate) fn group(&self) -> GroupStats {
        self.server.group(self.stream, GROUP).unwrap()
    }

    pub(crate) fn checkpoint(&self) -> Option<String> {
        self.group().checkpoint
    }

    /// Waits until the group stands as it should.
    #[track_caller]
    pub(crate) fn until(&self, holds: impl Fn(&GroupStats) -> bool) -> GroupStats {
        let begun = Instant::now();
        loop {
            let stats = self.group();
            if holds(&stats) {
                return stats;
            }
            assert!(begun.elapsed() < Duration::from_secs(10), "{stats:?}");
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }

    fn note(&mut self, event: &Value) -> Got {
        let read = if event["link"].is_null() { event } else { &event["link"] };
        let revision = read["stream_position"].as_u64().unwrap();
        self.ids.insert(revision, read["id"].as_str().unwrap().to_owned());
        (revision, event["retry_count"].as_u64().unwrap())
    }
}

/// Events that come for the first time.
pub(crate) fn fresh(revisions: std::ops::Range<u64>) -> Vec<Got> {
    revisions.map(|revision| (revision, 0)).collect()
}

/// Events that come for the second time.
pub(crate) fn again(revisions: impl IntoIterator<Item = u64>) -> Vec<Got> {
    revisions.into_iter().map(|revision| (revision, 1)).collect()
}
