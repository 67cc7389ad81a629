//! The port against the double, by both crates.
//!
//! The crate `eventstore` works in a process only as long as `kurrentdb` has not been used there, so its half runs in a
//! process of its own, which is this test binary again.

mod failures;
mod feeds;
mod groups;
mod reads;

use std::env;
use std::future::Future;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use scriba_testing::eventstore::{EventStoreDouble, NewEvent};

use super::{
    Client, ClientCrate, ConnectError, Failure, Fed, Feed, Group, GroupSettings, Received, connect, occurred_at,
};

/// Set in the process that tests the crate `eventstore`.
const BY_EVENTSTORE: &str = "SCRIBA_TEST_BY_EVENTSTORE";
const STREAM: &str = "orders";

#[test]
fn the_same_holds_by_the_crate_eventstore() {
    if env::var_os(BY_EVENTSTORE).is_some() {
        return;
    }
    assert_passes(&["client::tests::"], BY_EVENTSTORE);
}

/// Runs tests of this binary in a process of their own, with a variable set.
fn assert_passes(filter: &[&str], variable: &str) {
    let output = Command::new(env::current_exe().unwrap()).args(filter).env(variable, "1").output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!told.contains("running 0 tests"), "{told}");
}

fn which() -> ClientCrate {
    if env::var_os(BY_EVENTSTORE).is_some() { ClientCrate::EventStore } else { ClientCrate::KurrentDb }
}

/// Fails a wait that takes longer than anything here should.
async fn soon<F: Future>(wait: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(15), wait).await.expect("15 s were not enough")
}

fn start() -> EventStoreDouble {
    EventStoreDouble::start().unwrap()
}

fn client(server: &EventStoreDouble) -> Arc<dyn Client> {
    connect(which(), &server.connection_string()).unwrap()
}

fn events(count: usize) -> impl Iterator<Item = NewEvent> {
    (0..count).map(|number| NewEvent::json("Placed", number.to_string()))
}

fn group() -> Group {
    Group { stream: STREAM.to_owned(), name: "readers".to_owned() }
}

fn settings() -> GroupSettings {
    GroupSettings {
        resolve_links: true,
        start_from: Some(0),
        message_timeout: Duration::from_hours(1),
        max_retry_count: i32::MAX,
        checkpoint_after: Duration::from_secs(1),
        min_checkpoint_count: 1,
        max_checkpoint_count: 500,
        max_subscriber_count: 1,
        live_buffer_size: 600,
        history_buffer_size: 700,
        read_batch_size: 30,
        consumer_strategy: "DispatchToSingle".to_owned(),
    }
}

/// An event in short.
fn short(received: &Received) -> String {
    let event = received.event.as_ref().unwrap();
    format!("{}@{}", event.revision, event.stream_id)
}

/// What a feed tells next, in short; checkpoints left out.
async fn next(feed: &mut dyn Feed) -> String {
    loop {
        match soon(feed.next()).await {
            Ok(Fed::Event(received)) => return short(&received),
            Ok(Fed::Checkpoint(_)) => {}
            Ok(Fed::CaughtUp) => return "caught up".to_owned(),
            Err(failure) => return format!("{failure:?}"),
        }
    }
}

async fn next_few(feed: &mut dyn Feed, count: usize) -> Vec<String> {
    let mut told = Vec::new();
    for _ in 0..count {
        told.push(next(feed).await);
    }
    told
}

/// Why a feed ends, whatever it tells before.
async fn end(feed: &mut dyn Feed) -> Failure {
    soon(async {
        loop {
            if let Err(failure) = feed.next().await {
                return failure;
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_connection_string_that_cannot_be_used_says_why_and_tells_no_secret() {
    for (string, said) in [
        ("esdb://admin:hunter2@host:port", "invalid port number"),
        ("esdb://admin:hunter2/3@host:2113", "invalid port number"),
        ("esdb://admin:12/hunter2@host:2113", "Unsupported URL path"),
        ("http://admin:hunter2@host:2113", "Unknown URL scheme"),
        ("esdb://admin:hunter2@host:2113?tls=maybe", "Invalid format for param 'tls'"),
        ("esdb://admin:hunter2@host:2113?nodePreference=nearest", "Unknown node preference"),
        ("esdb://admin:hunter2@host:2113?userCertFile=a", "Both userCertFile and userKeyFile must be provided"),
        ("esdb://admin:hunter2@h1:1,h2:x", "Invalid port number"),
    ] {
        let Err(error) = connect(which(), string) else { panic!("{string} was taken") };
        let text = error.to_string();
        assert!(text.contains(said), "{string}: {text}");
        assert!(text.ends_with("esdb://user:password@host:2113?tls=true"), "{text}");
        assert!(!text.contains("hunter2") && !format!("{error:?}").contains("hunter2"), "{text}");
    }
}

#[tokio::test]
async fn every_scheme_is_understood() {
    for scheme in ["esdb", "esdb+discover", "kurrentdb", "kurrentdb+discover", "kurrent", "kdb+discover"] {
        let connected = connect(which(), &format!("{scheme}://127.0.0.1:1?tls=false"));
        assert!(connected.is_ok(), "{scheme}: {:?}", connected.err());
    }
}

#[test]
fn without_a_runtime_there_is_no_client() {
    assert_eq!(connect(which(), "esdb://127.0.0.1:1?tls=false").err(), Some(ConnectError::NoRuntime));
}

#[test]
fn a_time_is_exact_or_none() {
    let at = |ticks: &str| occurred_at(ticks).map(|at| at.to_rfc3339());
    assert_eq!(at("17000000001234567").as_deref(), Some("2023-11-14T22:13:20.123456700+00:00"));
    assert_eq!(at("-1").as_deref(), Some("1969-12-31T23:59:59.999999900+00:00"));
    assert_eq!(at(&u64::MAX.to_string()), None);
    assert_eq!(at("yesterday"), None);
}
