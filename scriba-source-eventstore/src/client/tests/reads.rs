//! Reads, and what an event is made of.

use bytes::Bytes;
use chrono::{DateTime, Utc};
use scriba_testing::eventstore::NewEvent;

use super::{STREAM, client, events, short, soon, start};
use crate::client::{Client, Filter, From, Log, Read, Received};

async fn read(client: &dyn Client, read: &Read) -> Vec<Received> {
    let mut reading = client.read(read).await.unwrap();
    let mut got = Vec::new();
    while let Some(received) = soon(reading.next()).await.unwrap() {
        got.push(received);
    }
    assert!(soon(reading.next()).await.unwrap().is_none(), "it stays at its end");
    got
}

fn stream() -> Log {
    Log::Stream(STREAM.to_owned())
}

#[tokio::test]
async fn a_log_is_read_both_ways_from_anywhere_up_to_a_count() {
    let server = start();
    let client = client(&server);
    let first = server.append(STREAM, events(2)).position.unwrap().commit;
    server.append("$system", [NewEvent::json("$stats", "{}")]);
    let other = server.append("other", [NewEvent::json("Shipped", "{}")]).position.unwrap().commit;
    server.append(STREAM, events(1));
    let shipped = || Log::All(Filter::TypePrefixes(vec!["Ship".to_owned()]));
    let of_streams = || Log::All(Filter::StreamPrefixes(vec!["ord".to_owned(), "none".to_owned()]));
    let all = || Log::All(Filter::SystemEvents);
    for (log, from, backwards, count, expected) in [
        (stream(), From::Start, false, 10, &["0@orders", "1@orders", "2@orders"][..]),
        (stream(), From::At(1), false, 1, &["1@orders"]),
        (stream(), From::End, true, 2, &["2@orders", "1@orders"]),
        (stream(), From::At(1), true, 10, &["1@orders", "0@orders"]),
        (all(), From::Start, false, 3, &["0@orders", "1@orders", "0@other"]),
        (all(), From::At(other), false, 10, &["0@other", "2@orders"]),
        (all(), From::End, true, 1, &["2@orders"]),
        (shipped(), From::End, true, 1, &["0@other"]),
        (shipped(), From::At(first), false, u64::MAX, &["0@other"]),
        (of_streams(), From::At(other), true, 2, &["1@orders", "0@orders"]),
    ] {
        let request = Read { log, from, backwards, count };
        let got = read(&*client, &request).await;
        assert_eq!(got.iter().map(short).collect::<Vec<_>>(), expected, "{request:?}");
    }
}

#[tokio::test]
async fn an_event_arrives_as_it_was_written() {
    let server = start();
    let client = client(&server);
    let mut event = NewEvent::json("Placed", Bytes::from_static(b"\0\xff"));
    event.metadata = Bytes::from_static(b"{}");
    let (id, before) = (event.id, Utc::now());
    let place = server.append(STREAM, [event]).position.unwrap();
    let request = Read { log: stream(), from: From::Start, backwards: false, count: 1 };
    let received = read(&*client, &request).await.pop().unwrap();
    assert_eq!((received.original.id, received.original.revision), (id, 0));
    assert_eq!((received.original.place.commit, received.original.place.prepare), (place.commit, place.prepare));
    let event = received.event.unwrap();
    assert_eq!((event.id, event.event_type.as_str(), event.stream_id.as_str()), (id, "Placed", STREAM));
    assert_eq!((&event.data[..], &event.metadata[..]), (&b"\0\xff"[..], &b"{}"[..]));
    let ticks = |at: DateTime<Utc>| at.timestamp_nanos_opt().unwrap() / 100;
    let occurred_at = ticks(event.occurred_at.unwrap());
    assert!((ticks(before)..=ticks(Utc::now())).contains(&occurred_at), "{before} {occurred_at}");
}

#[tokio::test]
async fn an_event_of_a_transaction_has_two_numbers() {
    let server = start();
    let client = client(&server);
    server.append_transaction(STREAM, events(2));
    let request = Read { log: Log::All(Filter::SystemEvents), from: From::Start, backwards: false, count: 2 };
    let places: Vec<_> = read(&*client, &request).await.iter().map(|received| received.original.place).collect();
    assert_eq!(places[0].commit, places[1].commit);
    assert_ne!(places[0].commit, places[0].prepare);
}
