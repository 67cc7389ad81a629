//! Catch-up subscriptions.

use std::env;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;
use scriba_testing::eventstore::NewEvent;

use super::{STREAM, assert_passes, client, end, events, next, next_few, soon, start};
use crate::client::{Failure, Fed, Filter, Follow, From, Log};

/// Set in the process that has a subscriber for all of it.
const WITH_SUBSCRIBER: &str = "SCRIBA_TEST_WITH_SUBSCRIBER";

fn stream(from: From) -> Follow {
    Follow { log: Log::Stream(STREAM.to_owned()), from }
}

fn all(filter: Filter, from: From) -> Follow {
    Follow { log: Log::All(filter), from }
}

fn prefixes<const N: usize>(prefixes: [&str; N]) -> Vec<String> {
    prefixes.map(str::to_owned).to_vec()
}

#[tokio::test]
async fn a_stream_is_caught_up_with_and_followed() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(3));
    let mut feed = client.follow(&stream(From::At(0))).await.unwrap();
    let mut from_end = client.follow(&stream(From::End)).await.unwrap();
    assert_eq!(next_few(&mut *feed, 3).await, ["1@orders", "2@orders", "caught up"]);
    assert_eq!(next(&mut *from_end).await, "caught up");
    server.append(STREAM, events(1));
    assert_eq!(next(&mut *feed).await, "3@orders");
    assert_eq!(next(&mut *from_end).await, "3@orders");
}

#[tokio::test]
async fn the_log_is_filtered_and_followed_from_behind_a_position() {
    let server = start();
    let client = client(&server);
    let first = server.append(STREAM, events(1)).position.unwrap().commit;
    server.append("$system", [NewEvent::json("$stats", "{}")]);
    server.append("other", [NewEvent::json("Shipped", "{}")]);
    server.append(STREAM, events(1));
    for (filter, from, expected) in [
        (Filter::SystemEvents, From::Start, &["0@orders", "0@other", "1@orders", "caught up"][..]),
        (Filter::SystemEvents, From::At(first), &["0@other", "1@orders", "caught up"]),
        (Filter::TypePrefixes(prefixes(["Ship", "$st"])), From::Start, &["0@$system", "0@other", "caught up"]),
        (Filter::StreamPrefixes(prefixes(["ord"])), From::At(first), &["1@orders", "caught up"]),
        (Filter::SystemEvents, From::End, &["caught up"]),
    ] {
        let mut feed = client.follow(&all(filter, from)).await.unwrap();
        assert_eq!(next_few(&mut *feed, expected.len()).await, expected);
    }
}

#[tokio::test]
async fn a_checkpoint_tells_how_far_a_filter_has_looked() {
    let server = start();
    let client = client(&server);
    server.append("other", events(1000));
    let last = server.append("other", events(1)).position.unwrap();
    let filter = Filter::StreamPrefixes(prefixes(["ord"]));
    let mut feed = client.follow(&all(filter, From::Start)).await.unwrap();
    let mut checkpoints = Vec::new();
    loop {
        match soon(feed.next()).await.unwrap() {
            Fed::Checkpoint(at) => checkpoints.push(at.commit),
            Fed::CaughtUp => break,
            Fed::Event(event) => panic!("{event:?}"),
        }
    }
    assert!(checkpoints.is_sorted() && checkpoints.len() >= 8, "{checkpoints:?}");
    assert!(checkpoints.last() >= Some(&last.commit), "{checkpoints:?} {last}");
}

#[tokio::test]
async fn calls_that_are_dropped_lose_nothing() {
    let server = start();
    let client = client(&server);
    let mut feed = client.follow(&stream(From::Start)).await.unwrap();
    let mut got = Vec::new();
    let mut dropped = 0;
    soon(async {
        while got.len() < 50 {
            match feed.next().now_or_never() {
                Some(Ok(Fed::Event(received))) => got.push(received.original.revision),
                Some(other) => drop(other.unwrap()),
                None => {
                    dropped += 1;
                    if dropped <= 50 {
                        server.append(STREAM, events(1));
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
    })
    .await;
    assert_eq!(got, (0..50).collect::<Vec<_>>());
    assert!(dropped >= 50, "{dropped}");
}

/// Lets the server end a few feeds on a thread of their own, which a feed that spins would take along.
fn ended_feeds() -> Vec<Failure> {
    let (done, outcome) = mpsc::channel();
    thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let server = start();
            let client = client(&server);
            let mut ends = Vec::new();
            for follow in [all(Filter::SystemEvents, From::Start), stream(From::End), stream(From::Start)] {
                let mut feed = client.follow(&follow).await.unwrap();
                assert_eq!(next(&mut *feed).await, "caught up");
                server.end_streams();
                ends.push(end(&mut *feed).await);
            }
            done.send(ends).unwrap();
        });
    });
    outcome.recv_timeout(Duration::from_secs(15)).expect("the feeds came to an end")
}

#[test]
fn every_feed_ends_when_the_server_ends_it() {
    if env::var_os(WITH_SUBSCRIBER).is_some() {
        tracing::subscriber::set_global_default(tracing_subscriber::registry()).unwrap();
    }
    assert_eq!(ended_feeds(), [Failure::Ended, Failure::Ended, Failure::Ended]);
}

#[test]
fn every_feed_ends_where_a_subscriber_is_installed() {
    if env::var_os(WITH_SUBSCRIBER).is_none() {
        let test = "client::tests::feeds::every_feed_ends_when_the_server_ends_it";
        assert_passes(&["--exact", test], WITH_SUBSCRIBER);
    }
}
