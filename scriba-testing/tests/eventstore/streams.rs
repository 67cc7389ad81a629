//! Appends, reads and deletions.

use kurrentdb::{
    AppendToStreamOptions, BatchAppendOptions, DeleteStreamOptions, Error, EventData, Position, ReadAllOptions,
    ReadStreamOptions, ResolvedEvent, StreamPosition, StreamState, SubscriptionFilter, TombstoneStreamOptions,
};
use tonic::Code;
use uuid::Uuid;

use super::{Client, STREAM, client, events, soon, start};

fn placed(number: u64) -> EventData {
    EventData::json("Placed", &number).unwrap()
}

async fn read(client: &Client, stream: &str, options: ReadStreamOptions) -> Vec<ResolvedEvent> {
    let mut page = soon(client.read_stream(stream, &options)).await.unwrap();
    let mut found = Vec::new();
    while let Some(event) = soon(page.next()).await.unwrap() {
        found.push(event);
    }
    found
}

async fn read_all(client: &Client, options: ReadAllOptions) -> Vec<ResolvedEvent> {
    let mut page = soon(client.read_all(&options)).await.unwrap();
    let mut found = Vec::new();
    while let Some(event) = soon(page.next()).await.unwrap() {
        found.push(event);
    }
    found
}

fn revisions(events: &[ResolvedEvent]) -> Vec<u64> {
    events.iter().map(|event| event.get_original_event().revision).collect()
}

#[tokio::test]
async fn what_was_appended_is_read_with_all_its_parts() {
    let server = start();
    let client = client(&server);
    let id = Uuid::new_v4();
    let event = EventData::binary("Placed", "body".into()).id(id).metadata("about".into());
    let written = soon(client.append_to_stream(STREAM, &AppendToStreamOptions::default(), event)).await.unwrap();
    assert_eq!(written.next_expected_version, 0);

    let found = read(&client, STREAM, ReadStreamOptions::default()).await;
    let event = found[0].get_original_event();
    assert_eq!((event.id, event.event_type.as_str(), event.revision), (id, "Placed", 0));
    assert_eq!((&event.data[..], &event.custom_metadata[..]), (&b"body"[..], &b"about"[..]));
    assert_eq!(event.position, written.position);
    assert!(!event.is_json);
}

#[tokio::test]
async fn pages_go_both_ways_and_from_where_they_are_told() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(10));
    let forwards = ReadStreamOptions::default().position(StreamPosition::Position(3)).max_count(4);
    assert_eq!(revisions(&read(&client, STREAM, forwards).await), [3, 4, 5, 6]);
    let backwards = ReadStreamOptions::default().backwards().position(StreamPosition::End).max_count(3);
    assert_eq!(revisions(&read(&client, STREAM, backwards).await), [9, 8, 7]);
}

#[tokio::test]
async fn a_wrong_expectation_is_answered_with_what_is_there() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(3));
    let options = AppendToStreamOptions::default().stream_state(StreamState::StreamRevision(7));
    let error = soon(client.append_to_stream(STREAM, &options, placed(0))).await.unwrap_err();
    assert_eq!(error.to_string(), "Wrong expected version: expected 'StreamRevision(7)' but got 'Current(2)'");
}

#[tokio::test]
async fn batches_are_answered_one_by_one() {
    let server = start();
    let client = client(&server);
    let batch = soon(client.batch_append(&BatchAppendOptions::default())).await.unwrap();
    let first = soon(batch.append_to_stream(STREAM, StreamState::NoStream, vec![placed(0), placed(1)])).await.unwrap();
    assert_eq!(first.current_revision(), Some(1));
    let again = soon(batch.append_to_stream(STREAM, StreamState::NoStream, vec![placed(2)])).await;
    assert!(matches!(again, Err(Error::Grpc { code, .. }) if code == Code::AlreadyExists), "{again:?}");
    assert_eq!(revisions(&read(&client, STREAM, ReadStreamOptions::default()).await), [0, 1]);
}

#[tokio::test]
async fn the_log_is_read_in_order_and_its_head_from_behind() {
    let server = start();
    let client = client(&server);
    server.append("order-1", events(2));
    let last = server.append("order-2", events(1));
    let all = read_all(&client, ReadAllOptions::default()).await;
    let positions: Vec<Position> = all.iter().map(|event| event.get_original_event().position).collect();
    assert!(positions.iter().all(|position| position.commit == position.prepare));
    assert!(positions.is_sorted_by(|left, right| left.commit < right.commit), "{positions:?}");

    let orders = SubscriptionFilter::on_stream_name().add_prefix("order-");
    let filtered = read_all(&client, ReadAllOptions::default().filter(orders)).await;
    assert_eq!(filtered.len(), 3);
    assert_eq!(filtered[2].get_original_event().position.commit, last.position.unwrap().commit);

    let head = ReadAllOptions::default().backwards().position(StreamPosition::End).max_count(1);
    assert_eq!(read_all(&client, head).await[0].get_original_event().position, *positions.last().unwrap());
}

#[tokio::test]
async fn a_category_is_read_through_its_links() {
    let server = start();
    let client = client(&server);
    server.append("order-1", events(1));
    server.append("order-2", events(1));
    server.remove_event("order-1", 0);
    let found = read(&client, "$ce-order", ReadStreamOptions::default().resolve_link_tos()).await;
    assert_eq!(revisions(&found), [0, 1]);
    assert!(found[0].event.is_none());
    assert_eq!(found[1].event.as_ref().unwrap().stream_id(), "order-2");
}

#[tokio::test]
async fn a_stream_that_never_was_and_one_that_was_deleted_are_told_apart() {
    let server = start();
    let client = client(&server);
    let missing = soon(async {
        let mut page = client.read_stream("nothing", &ReadStreamOptions::default()).await?;
        page.next().await
    });
    assert!(matches!(missing.await, Err(Error::ResourceNotFound)));

    server.append(STREAM, events(2));
    soon(client.delete_stream(STREAM, &DeleteStreamOptions::default())).await.unwrap();
    let deleted = soon(async {
        let mut page = client.read_stream(STREAM, &ReadStreamOptions::default()).await?;
        page.next().await
    });
    assert!(matches!(deleted.await, Err(Error::ResourceNotFound)));
    let again = soon(client.append_to_stream(STREAM, &AppendToStreamOptions::default(), placed(9))).await.unwrap();
    assert_eq!(again.next_expected_version, 2);

    soon(client.tombstone_stream(STREAM, &TombstoneStreamOptions::default())).await.unwrap();
    let gone = soon(client.append_to_stream(STREAM, &AppendToStreamOptions::default(), placed(9))).await;
    assert!(matches!(gone, Err(Error::ResourceDeleted)), "{gone:?}");
}

#[tokio::test]
async fn an_append_above_a_mebibyte_is_refused() {
    let server = start();
    let client = client(&server);
    let large = EventData::binary("Placed", vec![b'x'; 1024 * 1024 + 1].into());
    let refused = soon(client.append_to_stream(STREAM, &AppendToStreamOptions::default(), large)).await;
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("Maximum Append Size of 1048576 Exceeded."), "{text}");
}

#[tokio::test]
async fn an_event_of_a_transaction_shows_two_positions() {
    let server = start();
    let client = client(&server);
    server.append_transaction(STREAM, events(2));
    let found = read(&client, STREAM, ReadStreamOptions::default()).await;
    let positions: Vec<Position> = found.iter().map(|event| event.get_original_event().position).collect();
    assert_eq!(positions[0].commit, positions[1].commit);
    assert_ne!(positions[0].commit, positions[0].prepare);
}
