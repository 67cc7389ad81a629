//! Streams, categories and the whole log: positions, types, progress.

use scriba_core::source::{Demand, Source};
use scriba_core::{Position, RecordedEvent};
use scriba_source_eventstore::{CatchUpSource, PersistentSource};
use scriba_testing::eventstore::NewEvent;
use tokio::time::timeout;

use super::bed::{DEMAND, PATIENCE, Reader, STREAM, Server, assert_says, halted, millis, request, store};

fn of(event_type: &str) -> NewEvent {
    NewEvent::json(event_type, "{}")
}

/// A source with its name, for messages.
fn sources(server: &Server) -> [(&'static str, Box<dyn Source>); 5] {
    let store = &server.store;
    [
        ("catch-up stream", Box::new(CatchUpSource::stream(store, "$et-Deposited"))),
        ("catch-up category", Box::new(CatchUpSource::category(store, "account"))),
        ("all", Box::new(CatchUpSource::all(store))),
        ("persistent stream", Box::new(PersistentSource::stream(store, "$et-Deposited").group("s"))),
        ("persistent category", Box::new(PersistentSource::category(store, "account").group("c"))),
    ]
}

fn ids(events: &[RecordedEvent]) -> Vec<(String, Option<u64>)> {
    events.iter().map(|event| (format!("{} {}", event.stream_id, event.id), event.revision)).collect()
}

/// Case A13.
#[tokio::test]
async fn a_projection_goes_on_exactly_where_it_was_over_every_kind_of_log() {
    let server = Server::new();
    let mut wanted = Vec::new();
    for number in 0..20 {
        let (event, stream) = (of("Deposited"), format!("account-{}", number % 3));
        let id = event.id;
        let revision = server.double.append(&stream, [event]).revision;
        wanted.push((format!("{stream} {id}"), revision));
    }
    for (name, source) in sources(&server) {
        let mut found = Vec::new();
        let mut after = None;
        while found.len() < wanted.len() {
            let mut reader = Reader::start(&*source, after).await;
            reader.page(Demand { events: 7, ..DEMAND }, PATIENCE).await.unwrap().unwrap();
            found.extend(reader.events.clone());
            after = Some(found.last().unwrap().position.get());
            reader.ack(after.unwrap()).await;
        }
        assert_eq!(ids(&found), wanted, "{name}");
        assert!(found.is_sorted_by(|one, next| one.position < next.position), "{name}");
    }
}

/// Case A13.
#[tokio::test]
async fn an_explicit_transaction_in_the_whole_log_halts_and_streams_are_read_over_it() {
    let server = Server::new();
    server.append(2);
    server.double.append_transaction(STREAM, [of("Deposited"), of("Deposited")]);
    server.append(1);
    let mut all = Reader::start(&CatchUpSource::all(&server.store), None).await;
    let message = halted(Err::<(), _>(all.end().await));
    assert_eq!(all.events.len(), 2, "what stands before it is handed out");
    assert_says(&message, &["$all", "explicit transaction", "commit position", "categories instead"]);

    for source in [server.catch_up(), CatchUpSource::category(&server.store, "account")] {
        let mut reader = Reader::start(&source, None).await;
        reader.until(4).await;
        assert_eq!(reader.positions(), [0, 1, 2, 3, 4]);
    }
}

#[tokio::test]
async fn types_are_matched_whole_and_what_is_not_listed_is_progress() {
    static LISTED: [&str; 1] = ["Deposit"];
    let server = Server::new();
    server.double.append(STREAM, [of("Deposit"), of("Deposited"), of("Deposit"), of("DepositRefused"), of("Opened")]);
    for source in sources(&server).into_iter().filter(|(name, _)| !name.ends_with("stream")) {
        let (name, source) = source;
        let mut reader = Reader::try_start_types(&*source, None, Some(&LISTED)).await.unwrap();
        let head = source.inspector().await.unwrap().head().await.unwrap().unwrap();
        reader.until(head.get()).await;
        let types: Vec<_> = reader.events.iter().map(|event| event.event_type.as_str()).collect();
        assert_eq!(types, ["Deposit", "Deposit"], "{name}");
        let [one, other] = &reader.events[..] else { panic!("two") };
        assert_eq!(one.event_type.as_str().as_ptr(), other.event_type.as_str().as_ptr(), "types share one allocation");
    }
}

#[tokio::test]
async fn an_idle_projection_of_some_types_moves_on_to_the_head_of_the_whole_log() {
    static LISTED: [&str; 1] = ["Deposited"];
    let server = Server::new();
    server.append(1);
    let source = CatchUpSource::all(&server.store);
    let mut reader = Reader::try_start_types(&source, None, Some(&LISTED)).await.unwrap();
    let mut inspector = source.inspector().await.unwrap();
    for _ in 0..2 {
        let first = inspector.head().await.unwrap().unwrap();
        reader.until(first.get()).await;
        // Too few for the server to say that it has passed them.
        server.double.append(STREAM, [of("Opened"), of("Closed")]);
        let head = inspector.head().await.unwrap().unwrap();
        assert!(head > first);
        reader.until(head.get()).await;
        server.append(1);
    }
    reader.until(inspector.head().await.unwrap().unwrap().get()).await;
    reader.sees_nothing_for(millis(1_200)).await;
    assert_eq!(reader.events.len(), 3);
}

#[tokio::test]
async fn system_events_are_handed_out_where_they_are_listed_only() {
    static LISTED: [&str; 2] = ["$metadata", "Deposited"];
    let server = Server::new();
    server.append(2);
    server.double.truncate_stream(STREAM, 1);
    server.append(1);
    let all = CatchUpSource::all(&server.store);
    let types = |reader: &Reader| reader.events.iter().map(|event| event.event_type.to_string()).collect::<Vec<_>>();
    let head = all.inspector().await.unwrap().head().await.unwrap().unwrap().get();
    let mut reader = Reader::start(&all, None).await;
    reader.until(head).await;
    assert_eq!(types(&reader), ["Deposited", "Deposited", "Deposited"]);
    let mut reader = Reader::try_start_types(&all, None, Some(&LISTED)).await.unwrap();
    reader.until(head).await;
    assert_eq!(types(&reader), ["Deposited", "Deposited", "$metadata", "Deposited"]);
    let metadata = &reader.events[2];
    let id = all.inspector().await.unwrap().event_id_at(metadata.position).await.unwrap();
    assert_eq!(id.as_ref(), Some(&metadata.id), "also where no filter for others shows it");
}

#[tokio::test]
async fn the_whole_log_may_be_narrowed_to_streams_by_their_beginnings() {
    static LISTED: [&str; 1] = ["Opened"];
    let server = Server::new();
    for stream in ["account-1", "order-1", "invoice-1", "order-2"] {
        server.double.append(stream, [of("Opened"), of("Closed")]);
    }
    let source = CatchUpSource::all_beginning_with(&server.store, ["order-", "account-"]);
    let mut reader = Reader::start(&source, None).await;
    let head = source.inspector().await.unwrap().head().await.unwrap().unwrap().get();
    reader.until(head).await;
    let streams = |reader: &Reader| reader.events.iter().map(|event| event.stream_id.to_string()).collect::<Vec<_>>();
    assert_eq!(streams(&reader), ["account-1", "account-1", "order-1", "order-1", "order-2", "order-2"]);
    let mut reader = Reader::try_start_types(&source, None, Some(&LISTED)).await.unwrap();
    reader.until(head).await;
    assert_eq!(streams(&reader), ["account-1", "order-1", "order-2"]);
    // An idle one moves on over other streams.
    server.double.append("invoice-2", [of("Opened")]);
    let head = source.inspector().await.unwrap().head().await.unwrap().unwrap().get();
    reader.until(head).await;
    assert_eq!(reader.events.len(), 3);

    let all = CatchUpSource::all(&server.store).identity().await.unwrap();
    assert_ne!(source.identity().await.unwrap(), all, "checkpoints are not continued over other streams");
}

#[tokio::test]
async fn five_thousand_events_come_whatever_little_is_demanded() {
    let server = Server::new();
    server.append(5_000);
    let persistent = server.persistent();
    for (name, source) in [("catch-up", &server.catch_up() as &dyn Source), ("persistent", &persistent)] {
        let mut reader = Reader::start(source, None).await;
        let mut demands = [1, 2, 3, 50].into_iter().cycle().map(|events| Demand { events, ..DEMAND });
        while reader.events.len() < 5_000 {
            let (before, demand) = (reader.events.len(), demands.next().unwrap());
            reader.page(demand, PATIENCE).await.unwrap().unwrap();
            assert!(reader.events.len() - before <= demand.events);
            let reached = reader.reached.unwrap();
            reader.ack(reached).await;
        }
        assert_eq!(reader.positions(), (0..5_000).collect::<Vec<_>>(), "{name}");
    }
}

#[tokio::test]
async fn a_projection_may_change_between_the_kinds_of_subscription_over_one_log() {
    let server = Server::new();
    let (one, other) = (server.catch_up().identity().await.unwrap(), server.persistent().identity().await.unwrap());
    assert_eq!(one, other);
    assert_eq!(one.fingerprint, format!("{} {STREAM}", server.double.address()));
    let named = server.store.clone().store_name("bank-prod");
    let category = PersistentSource::category(&named, "account").identity().await.unwrap();
    assert_eq!(category.fingerprint, "bank-prod $ce-account");

    server.append(6);
    let mut reader = Reader::start(&server.persistent(), None).await;
    reader.until(2).await;
    let mut reader = Reader::start(&server.catch_up(), Some(2)).await;
    reader.until(5).await;
    assert_eq!(reader.positions(), [3, 4, 5]);
}

#[tokio::test]
async fn caught_up_is_said_again_when_what_came_later_is_handed_out() {
    let server = Server::new();
    server.append(3);
    for source in [&server.catch_up() as &dyn Source, &server.persistent()] {
        let mut reader = Reader::start(source, None).await;
        while !reader.caught_up {
            reader.page(Demand { events: 2, ..DEMAND }, PATIENCE).await.unwrap().unwrap();
        }
        assert_eq!(reader.reached, Some(2));
        reader.ack(2).await;
    }
    let persistent = server.persistent();
    let mut reader = Reader::start(&persistent, Some(2)).await;
    reader.page(DEMAND, PATIENCE).await.unwrap().unwrap();
    assert!(reader.caught_up && reader.events.is_empty(), "there is nothing above the watermark");
    server.append(10);
    sleep_until_outstanding(&server, 10).await;
    reader.page(Demand { events: 4, ..DEMAND }, PATIENCE).await.unwrap().unwrap();
    assert!(!reader.caught_up, "more is there");
    reader.until(12).await;
    assert!(reader.caught_up);
}

async fn sleep_until_outstanding(server: &Server, events: usize) {
    server.until_group("pushed", |group| group.outstanding == events).await;
    tokio::time::sleep(millis(50)).await;
}

#[tokio::test]
async fn names_that_are_none_and_a_connection_string_that_is_none_are_refused_by_the_check() {
    let server = Server::new();
    assert_says(&halted(CatchUpSource::stream(&server.store, "").check().await), &["no name"]);
    assert_says(&halted(PersistentSource::stream(&server.store, "$all").check().await), &["CatchUpSource::all"]);
    let nonsense = store("nonsense://user:secret@127.0.0.1:2113");
    let message = halted(CatchUpSource::stream(&nonsense, STREAM).check().await);
    assert_says(&message, &["connection string", "esdb://user:password@host:2113"]);
    assert!(!message.contains("secret"), "{message}");
}

#[tokio::test]
async fn a_subscription_to_an_empty_store_waits() {
    let server = Server::new();
    for source in [&server.catch_up() as &dyn Source, &server.persistent()] {
        let (request, _) = request(None, None);
        let mut subscription = source.subscribe(request).await.unwrap();
        let page = subscription.next(DEMAND).await.unwrap();
        assert!(page.caught_up && page.deliveries.is_empty());
        assert!(timeout(millis(200), subscription.next(DEMAND)).await.is_err());
        subscription.ack(Position::new(0)).await.unwrap();
    }
}
