//! The sources against real servers, in Docker: the suite that they pass against the double. That these tests can pass, the double
//! shows here too.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kurrentdb::{
    AppendToStreamOptions, BatchAppendClient, BatchAppendOptions, Client, EventData, StreamMetadataBuilder, StreamState,
};
use scriba_core::{Position, Source};
use scriba_source_eventstore::{CatchUpSource, EventStore, PersistentSource};
use scriba_testing::conformance::source::{self, NewEvent, SourceBed, Truncate};
use scriba_testing::eventstore::EventStoreDouble;
use testcontainers::core::IntoContainerPort;
use testcontainers::runners::AsyncRunner;
use testcontainers::{GenericImage, ImageExt};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

const PORT: u16 = 2113;
const READY_WITHIN: Duration = Duration::from_mins(2);

/// An image, its tag, and what its environment variables begin with.
type Image = (&'static str, &'static str, &'static str);

const KURRENT_DB: Image = ("kurrentplatform/kurrentdb", "26.1.1", "KURRENTDB");
/// The last line under the old name.
const EVENT_STORE_DB: Image = ("eventstore/eventstore", "24.10", "EVENTSTORE");

/// A server that takes anybody in.
struct Server {
    store: EventStore,
    client: Client,
    /// One open call: to open one for each append takes the client 40 ms.
    appends: BatchAppendClient,
    /// Ends with it.
    _process: Box<dyn Any + Send + Sync>,
}

impl Server {
    async fn double() -> Self {
        let double = EventStoreDouble::start().unwrap();
        Self::at(double.connection_string(), Box::new(double)).await
    }

    async fn at(connection_string: String, process: Box<dyn Any + Send + Sync>) -> Self {
        let client = Client::new(connection_string.parse().unwrap()).unwrap();
        let appends = client.batch_append(&BatchAppendOptions::default()).await.unwrap();
        let store = EventStore::new(connection_string).unwrap();
        Self { store, client, appends, _process: process }
    }

    async fn in_docker((name, tag, prefix): Image) -> Self {
        let container = GenericImage::new(name, tag)
            .with_exposed_port(PORT.tcp())
            .with_env_var(format!("{prefix}_INSECURE"), "true")
            .with_env_var(format!("{prefix}_MEM_DB"), "true")
            // By default less than the largest body of a rule with its names.
            .with_env_var(format!("{prefix}_MAX_APPEND_SIZE"), (4 << 20).to_string())
            .start()
            .await
            .unwrap();
        let host = (container.get_host().await.unwrap(), container.get_host_port_ipv4(PORT).await.unwrap());
        let connection_string = format!("esdb://{}:{}?tls=false", host.0, host.1);
        let started = Instant::now();
        // Made anew for each attempt, as a client whose first attempt fails is of no use any more.
        while let Err(error) = CatchUpSource::all(&EventStore::new(connection_string.as_str()).unwrap()).check().await {
            assert!(started.elapsed() < READY_WITHIN, "{name}: {error}");
            sleep(Duration::from_millis(500)).await;
        }
        Self::at(connection_string, Box::new(container)).await
    }
}

tokio::task_local! {
    /// The server of the beds that are made in this task.
    static SERVER: Arc<Server>;
}

/// A category of its own for each rule. Its links are appended here, so that they are there when the append returns.
struct Category {
    server: Arc<Server>,
    name: String,
    make: fn(&EventStore, &str) -> Box<dyn Source>,
}

impl Category {
    fn stream(&self) -> String {
        format!("$ce-{}", self.name)
    }

    /// The revision of what was appended.
    async fn append_to(&self, stream: &str, event: EventData) -> u64 {
        let appended = self.server.appends.append_to_stream(stream, StreamState::Any, vec![event]);
        appended.await.unwrap().current_revision().unwrap()
    }

    async fn append_linked(&self, event: NewEvent) -> Position {
        let data =
            EventData::binary(event.event_type, event.data).id(event.id.parse().unwrap()).metadata(event.metadata);
        let revision = self.append_to(&event.stream_id, data).await;
        let link = EventData::binary("$>", format!("{revision}@{}", event.stream_id).into());
        Position::new(self.append_to(&self.stream(), link).await)
    }
}

/// A bed by one of the sources.
macro_rules! bed {
    ($bed:ident, $source:ident) => {
        struct $bed(Category);

        #[async_trait]
        impl SourceBed for $bed {
            async fn new() -> Self {
                let make = |store: &EventStore, name: &str| Box::new($source::category(store, name)) as _;
                Self(Category { server: SERVER.get(), name: Uuid::new_v4().simple().to_string(), make })
            }

            async fn source(&self) -> Box<dyn Source> {
                (self.0.make)(&self.0.server.store, &self.0.name)
            }

            async fn append(&self, events: Vec<NewEvent>) -> Vec<Position> {
                let mut positions = Vec::new();
                for event in events {
                    positions.push(self.0.append_linked(event).await);
                }
                positions
            }
        }

        #[async_trait]
        impl Truncate for $bed {
            async fn truncate_below(&self, position: Position) {
                let metadata = StreamMetadataBuilder::new().truncate_before(position.get()).build();
                let options = AppendToStreamOptions::default();
                self.0.server.client.set_stream_metadata(self.0.stream(), &options, &metadata).await.unwrap();
            }
        }
    };
}

bed!(Persistent, PersistentSource);
bed!(CatchUp, CatchUpSource);

type Rule = (&'static str, fn() -> BoxFuture<'static, ()>);

/// The rules of the abilities that a bed here has.
macro_rules! rules {
    (@of ($bed:ident) $($ability:ident $rules:tt)+) => { [$(rules!(@ability $ability $bed $rules)),+].concat() };
    // Connections are not cut here, and nothing is restored or held open.
    (@ability cut $bed:ident $rules:tt) => { Vec::<Rule>::new() };
    (@ability restore $bed:ident $rules:tt) => { Vec::<Rule>::new() };
    (@ability hold_open $bed:ident $rules:tt) => { Vec::<Rule>::new() };
    // Names that the servers may refuse.
    (@ability long_ids $bed:ident $rules:tt) => { Vec::<Rule>::new() };
    (@ability nul_in_ids $bed:ident $rules:tt) => { Vec::<Rule>::new() };
    (@ability $ability:ident $bed:ident { $($rule:ident)+ }) => {
        vec![$((stringify!($rule), (|| source::$rule::<$bed>().boxed()) as fn() -> BoxFuture<'static, ()>)),+]
    };
}

/// Runs rules one after another on one server.
async fn passes(server: Server, rules: Vec<Rule>, but: &[&str]) {
    let server = Arc::new(server);
    let mut broken = Vec::new();
    for (name, rule) in rules.into_iter().filter(|(name, _)| !but.contains(name)) {
        if tokio::spawn(SERVER.scope(Arc::clone(&server), rule())).await.is_err() {
            broken.push(name);
        }
    }
    assert!(broken.is_empty(), "broken: {broken:?}");
}

/// The server of a persistent subscription trails.
const NO_EXACT_START: [&str; 2] =
    ["nothing_at_or_below_the_watermark_is_delivered", "the_first_position_is_an_event_and_not_the_beginning"];
/// Anybody is let in, and no position is kept.
const NO_GROUP: [&str; 3] = [
    "a_reset_forgets_what_was_acked",
    "the_only_place_is_had_by_one_at_a_time",
    "who_was_granted_the_place_is_delivered_everything",
];

/// Events that the double takes from tests only: to clients it says that they are too large.
const TOO_LARGE: [&str; 2] = ["one_event_is_always_admitted_however_large", "empty_and_large_bodies_come_back"];

async fn persistent_passes(server: Server, but: &[&str]) {
    let but = [&NO_EXACT_START, but].concat();
    passes(server, scriba_testing::source_conformance!(@rules [rules] (Persistent)), &but).await;
}

async fn catch_up_passes(server: Server, but: &[&str]) {
    let but = [&NO_GROUP, but].concat();
    passes(server, scriba_testing::source_conformance!(@rules [rules] (CatchUp)), &but).await;
}

#[tokio::test]
async fn both_sources_pass_on_the_double_as_they_would_on_a_server() {
    persistent_passes(Server::double().await, &TOO_LARGE).await;
    catch_up_passes(Server::double().await, &TOO_LARGE).await;
}

#[tokio::test]
#[ignore = "needs Docker"]
async fn both_sources_pass_on_kurrent_db() {
    persistent_passes(Server::in_docker(KURRENT_DB).await, &[]).await;
    catch_up_passes(Server::in_docker(KURRENT_DB).await, &[]).await;
}

#[tokio::test]
#[ignore = "needs Docker"]
async fn both_sources_pass_on_the_last_event_store_db() {
    persistent_passes(Server::in_docker(EVENT_STORE_DB).await, &[]).await;
    catch_up_passes(Server::in_docker(EVENT_STORE_DB).await, &[]).await;
}
