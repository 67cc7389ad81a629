//! A server that is gone, cut off, not the leader, or does not let in.

use scriba_core::Source;
use scriba_core::source::{Demand, SourceError};
use scriba_source_eventstore::CatchUpSource;
use scriba_testing::eventstore::NewEvent;
use tokio::time::{Instant, sleep};

use super::bed::{DEMAND, PATIENCE, Reader, STREAM, Server, assert_says, halted, millis, store};

/// Both sources, with the events of a server that holds so many.
fn sources(server: &Server) -> [Box<dyn Source>; 2] {
    [Box::new(server.catch_up()), Box::new(server.persistent())]
}

fn is_passing(error: &SourceError) -> bool {
    matches!(error, SourceError::Unavailable { .. } | SourceError::Ended { .. })
}

/// A fault while both kinds of subscription wait ends them, and a new one delivers everything.
async fn goes_on_after(what: &str, fault: fn(&Server)) {
    let server = Server::new();
    server.append(5);
    for source in sources(&server) {
        let mut reader = Reader::start(&*source, None).await;
        reader.until(4).await;
        fault(&server);
        let started = Instant::now();
        let error = reader.end().await;
        assert!(is_passing(&error), "{what}: {error:?}");
        assert!(started.elapsed() < PATIENCE);
        drop(reader);
        server.append(1);
        let mut reader = Reader::start_again(&*source, None).await;
        reader.until(5).await;
        assert_eq!(reader.positions()[..6], [0, 1, 2, 3, 4, 5], "{what}");
    }
}

#[tokio::test]
async fn after_a_cut_it_goes_on() {
    goes_on_after("a cut", |server| server.double.cut_connections()).await;
}

#[tokio::test]
async fn after_a_restart_it_goes_on() {
    goes_on_after("a restart", |server| server.double.restart()).await;
}

/// Case A10.
#[tokio::test]
async fn streams_that_end_as_if_all_were_well_end_subscriptions() {
    goes_on_after("an end", |server| server.double.end_streams()).await;
}

#[tokio::test]
async fn subscribers_that_are_dropped_come_back() {
    let server = Server::new();
    server.append(3);
    let source = server.persistent();
    let mut reader = Reader::start(&source, None).await;
    reader.until(2).await;
    server.double.drop_all();
    let SourceError::Ended { message } = reader.end().await else { panic!("not ended") };
    assert_says(&message, &["group reader_v1 on stream account-1", "dropped"]);
    drop(reader);
    let mut reader = Reader::start(&source, None).await;
    reader.until(2).await;
}

#[tokio::test]
async fn a_server_that_was_never_there_is_waited_for() {
    let server = Server::new();
    server.append(3);
    server.double.stop();
    for source in sources(&server) {
        let error = source.check().await.err().unwrap();
        assert!(matches!(error, SourceError::Unavailable { .. }), "{error:?}");
        let error = Reader::try_start(&*source, None).await.err().unwrap();
        assert!(matches!(error, SourceError::Unavailable { .. }), "{error:?}");
    }
    let mut inspector = server.catch_up().inspector().await.unwrap();
    let error = inspector.head().await.err().unwrap();
    assert!(matches!(error, SourceError::Unavailable { .. }), "{error:?}");
    server.double.start_again();
    // A client whose first connection fails is dead for ever: it is replaced.
    for source in sources(&server) {
        Reader::start_again(&*source, None).await.until(2).await;
    }
    let started = Instant::now();
    while inspector.head().await.ok().flatten().is_none() {
        assert!(started.elapsed() < PATIENCE);
        sleep(millis(50)).await;
    }
}

#[tokio::test]
async fn a_server_that_is_not_ready_is_waited_for() {
    let server = Server::new();
    server.append(3);
    server.double.unavailable(true);
    for source in sources(&server) {
        for _ in 0..4 {
            let error = Reader::try_start(&*source, None).await.err().unwrap();
            assert!(matches!(error, SourceError::Unavailable { .. }), "{error:?}");
        }
    }
    server.double.unavailable(false);
    for source in sources(&server) {
        Reader::start_again(&*source, None).await.until(2).await;
    }
}

/// Case A7.
#[tokio::test]
async fn the_leader_is_followed() {
    let server = Server::new();
    server.append(3);
    let follower = server.double.start_follower().unwrap();
    for source in sources(&server) {
        let mut reader = Reader::start_again(&*source, None).await;
        reader.until(2).await;
        server.double.move_leader_to(&follower);
        if source.admits_one() {
            assert!(is_passing(&reader.end().await));
        }
        drop(reader);
        let mut reader = Reader::start_again(&*source, None).await;
        reader.until(2).await;
        drop(reader);
        follower.move_leader_to(&server.double);
    }
}

/// Case A7.
#[tokio::test]
async fn a_wrong_password_halts_with_the_remedy() {
    let server = Server::new();
    server.append(3);
    server.double.require_credentials("reader", "right");
    let address = server.double.address();
    for (credentials, refused) in [("reader:wrong@", true), ("", true), ("reader:right@", false)] {
        let store = store(&format!("esdb://{credentials}{address}?tls=false"));
        let source = CatchUpSource::stream(&store, STREAM);
        if refused {
            assert_says(&halted(source.check().await), &["access denied", "correct user and password"]);
            assert_says(&halted(Reader::try_start(&source, None).await), &["access denied"]);
        } else {
            source.check().await.unwrap();
        }
    }
}

#[tokio::test]
async fn access_that_is_denied_later_halts() {
    let server = Server::new();
    server.append(3);
    for source in sources(&server) {
        Reader::start(&*source, None).await.until(2).await;
    }
    server.double.deny_access(true);
    for source in sources(&server) {
        assert_says(&halted(Reader::try_start(&*source, None).await), &["access denied", "access control list"]);
    }
}

/// What is delivered to one subscription and not read takes room on its connection.
#[tokio::test]
async fn subscriptions_that_nobody_reads_hold_up_no_other() {
    let server = Server::new();
    let body = format!("\"{}\"", "x".repeat(100_000));
    let large = || (0..100).map(|_| NewEvent::json("Deposited", body.clone()));
    server.double.append(STREAM, large());
    let mut paused = Vec::new();
    for number in 0..6 {
        let source: Box<dyn Source> = match number % 2 {
            0 => Box::new(server.catch_up()),
            _ => Box::new(server.persistent().group(format!("group-{number}"))),
        };
        let mut reader = Reader::start(&*source, None).await;
        reader.page(Demand { events: 1, ..DEMAND }, PATIENCE).await.unwrap().unwrap();
        paused.push(reader);
    }
    sleep(millis(500)).await;
    let mut reader = Reader::start(&server.catch_up(), None).await;
    reader.until(99).await;
    for reader in &mut paused {
        reader.until(99).await;
    }
}
