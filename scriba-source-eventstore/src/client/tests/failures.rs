//! What failures become.

use std::future::Future;
use std::net::TcpListener;

use scriba_testing::eventstore::EventStoreDouble;
use uuid::Uuid;

use super::{STREAM, client, end, events, group, settings, soon, start, which};
use crate::client::{Client, Failure, Filter, Follow, From, Log, Read, connect};

fn stream() -> Log {
    Log::Stream(STREAM.to_owned())
}

fn follow() -> Follow {
    Follow { log: stream(), from: From::Start }
}

/// Whether something stands in the stream.
async fn read_one(client: &dyn Client) -> Result<bool, Failure> {
    let read = Read { log: stream(), from: From::Start, backwards: false, count: 1 };
    let mut reading = client.read(&read).await?;
    Ok(reading.next().await?.is_some())
}

/// How everything fails that asks the server.
async fn failures(client: &dyn Client) -> [Option<Failure>; 6] {
    [
        soon(read_one(client)).await.err(),
        soon(client.follow(&follow())).await.err(),
        soon(client.create_group(&group(), &settings())).await.err(),
        soon(client.group_settings(&group())).await.err(),
        soon(client.join(&group(), 10)).await.err(),
        soon(client.delete_group(&group())).await.err(),
    ]
}

async fn all_fail(client: &dyn Client, as_expected: impl Fn(&Failure) -> bool) {
    for (number, failure) in failures(client).await.into_iter().enumerate() {
        let failure = failure.unwrap_or_else(|| panic!("call {number} went well"));
        assert!(as_expected(&failure), "call {number}: {failure:?}");
    }
}

#[tokio::test]
async fn a_group_is_missing_or_exists_or_is_full_or_drops_its_consumers() {
    let server = start();
    let client = client(&server);
    assert_eq!(client.group_settings(&group()).await.err(), Some(Failure::Missing));
    assert_eq!(client.join(&group(), 10).await.err(), Some(Failure::Missing));
    assert_eq!(client.delete_group(&group()).await, Err(Failure::Missing));
    client.create_group(&group(), &settings()).await.unwrap();
    assert_eq!(client.create_group(&group(), &settings()).await, Err(Failure::Exists));
    let mut member = client.join(&group(), 10).await.unwrap();
    assert_eq!(client.join(&group(), 10).await.err(), Some(Failure::Full));
    client.delete_group(&group()).await.unwrap();
    for _ in 0..2 {
        assert_eq!(soon(member.next()).await.err(), Some(Failure::Dropped));
    }
    assert_eq!(member.ack(vec![Uuid::new_v4()]).await, Err(Failure::Dropped));
}

#[tokio::test]
async fn a_stream_is_missing_or_deleted() {
    let server = start();
    let client = client(&server);
    assert_eq!(read_one(&*client).await, Err(Failure::Missing));
    server.append(STREAM, events(1));
    assert_eq!(read_one(&*client).await, Ok(true));
    let mut feed = client.follow(&follow()).await.unwrap();
    server.delete_stream(STREAM);
    assert_eq!(read_one(&*client).await, Err(Failure::Missing));
    server.tombstone_stream(STREAM);
    assert_eq!(read_one(&*client).await, Err(Failure::Deleted));
    assert_eq!(client.follow(&follow()).await.err(), Some(Failure::Deleted));
    assert_eq!(end(&mut *feed).await, Failure::Deleted);
}

#[tokio::test]
async fn a_server_that_is_not_ready_is_unavailable() {
    let server = start();
    let client = client(&server);
    server.unavailable(true);
    let says_so = |failure: &Failure| matches!(failure, Failure::Unavailable(text) if text.contains("Not Ready"));
    all_fail(&*client, says_so).await;
    server.unavailable(false);
    client.create_group(&group(), &settings()).await.unwrap();
}

#[tokio::test]
async fn who_may_not_is_denied() {
    let server = start();
    let client = client(&server);
    server.deny_access(true);
    all_fail(&*client, |failure| *failure == Failure::Denied).await;
}

#[tokio::test]
async fn a_wrong_password_is_denied_and_one_with_any_characters_is_not() {
    let server = start();
    server.require_credentials("admin", "p@ss/w^rd%");
    server.append(STREAM, events(1));
    let with = |login: &str| connect(which(), &format!("esdb://{login}@{}?tls=false", server.address())).unwrap();
    all_fail(&*with("admin:changeit"), |failure| *failure == Failure::Denied).await;
    assert_eq!(failures(&*with("admin:p@ss%2Fw^rd%25")).await, [None, None, None, None, None, None]);
}

#[tokio::test]
async fn another_leader_is_named_and_gone_to() {
    let first = start();
    let second = first.start_follower().unwrap();
    let client = client(&first);
    client.create_group(&group(), &settings()).await.unwrap();
    let mut member = client.join(&group(), 10).await.unwrap();
    first.move_leader_to(&second);
    assert_eq!(soon(member.next()).await.err(), Some(Failure::Dropped));
    assert_eq!(read_one(&*client).await, Err(Failure::NotLeader(second.address().to_string())));
    soon(async { while client.join(&group(), 10).await.is_err() {} }).await;
}

#[tokio::test]
async fn a_client_whose_first_connection_fails_is_dead() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let client = connect(which(), &format!("esdb://{nobody}?tls=false")).unwrap();
    all_fail(&*client, |failure| matches!(failure, Failure::Dead(_))).await;
}

/// What comes of a feed, a consumer and its ack when something happens to the server.
async fn lost(server: &EventStoreDouble, happens: impl FnOnce()) -> [Failure; 3] {
    let client = client(server);
    server.append(STREAM, events(1));
    client.create_group(&group(), &settings()).await.unwrap();
    let mut member = client.join(&group(), 10).await.unwrap();
    let held = soon(member.next()).await.unwrap();
    let mut feed = client.follow(&Follow { log: Log::All(Filter::SystemEvents), from: From::End }).await.unwrap();
    soon(feed.next()).await.unwrap();
    happens();
    let of_feed = end(&mut *feed).await;
    assert_eq!(soon(feed.next()).await.err(), Some(of_feed.clone()), "it stays over");
    let of_member = soon(member.next()).await.unwrap_err();
    [of_feed, of_member, member.ack(vec![held.original.id]).await.unwrap_err()]
}

#[tokio::test]
async fn those_whose_connection_is_cut_are_told_and_the_client_goes_on() {
    let server = start();
    for failure in lost(&server, || server.cut_connections()).await {
        assert!(matches!(failure, Failure::Unavailable(_)), "{failure:?}");
    }
    let client = client(&server);
    assert_eq!(read_one(&*client).await, Ok(true));
    server.stop();
    // The first may have been on its way over the old connection.
    for _ in 0..2 {
        let outcome = soon(read_one(&*client)).await;
        assert!(matches!(outcome, Err(Failure::Unavailable(_))), "{outcome:?}");
    }
    server.start_again();
    assert_eq!(soon(read_one(&*client)).await, Ok(true));
}

#[tokio::test]
async fn an_end_as_if_all_were_well_is_a_failure() {
    let server = start();
    assert_eq!(lost(&server, || server.end_streams()).await, [Failure::Ended, Failure::Ended, Failure::Ended]);
}

/// Whether a call ends for want of an answer when nothing happens any more.
async fn is_not_answered<T>(call: impl Future<Output = Result<T, Failure>>) -> bool {
    tokio::time::pause();
    let outcome = call.await;
    tokio::time::resume();
    matches!(outcome, Err(Failure::Unavailable(text)) if text.contains("not answer"))
}

#[tokio::test]
async fn a_server_that_never_answers_is_unavailable() {
    let server = start();
    let client = client(&server);
    client.create_group(&group(), &settings()).await.unwrap();
    server.mute_subscriptions(true);
    assert!(is_not_answered(client.join(&group(), 10)).await);
    assert!(is_not_answered(client.create_group(&group(), &settings())).await);
    assert!(is_not_answered(client.group_settings(&group())).await);
    assert!(is_not_answered(client.delete_group(&group())).await);
    server.freeze();
    assert!(is_not_answered(client.follow(&follow())).await);
    assert!(is_not_answered(read_one(&*client)).await);
}
