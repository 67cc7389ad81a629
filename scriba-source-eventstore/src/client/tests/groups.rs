//! Persistent subscriptions.

use futures_util::FutureExt;

use super::{STREAM, client, events, group, settings, short, soon, start};
use crate::client::{Failure, Group, GroupSettings};

fn of_category() -> Group {
    Group { stream: "$ce-account".to_owned(), ..group() }
}

#[tokio::test]
async fn a_group_has_the_settings_it_was_created_with() {
    let server = start();
    let client = client(&server);
    for start_from in [Some(0), Some(7), None] {
        let group = Group { name: format!("from {start_from:?}"), ..group() };
        let settings = GroupSettings { start_from, ..settings() };
        client.create_group(&group, &settings).await.unwrap();
        assert_eq!(client.group_settings(&group).await.unwrap(), settings);
    }
    let of_others = GroupSettings { consumer_strategy: "PinnedByCorrelation".to_owned(), ..settings() };
    let refused = client.create_group(&group(), &of_others).await.unwrap_err();
    assert!(matches!(refused, Failure::Other(_)), "{refused:?}");
}

#[tokio::test]
async fn a_consumer_gets_links_with_their_events_and_acks_the_links() {
    let server = start();
    server.stop_clock();
    let client = client(&server);
    client.create_group(&of_category(), &settings()).await.unwrap();
    server.append("account-1", events(2));
    server.append("account-2", events(1));
    let mut member = client.join(&of_category(), 10).await.unwrap();
    let mut got = Vec::new();
    soon(async {
        while got.len() < 3 {
            // Calls that are dropped lose nothing.
            match member.next().now_or_never() {
                Some(received) => got.push(received.unwrap()),
                None => tokio::task::yield_now().await,
            }
        }
    })
    .await;
    assert_eq!(got.iter().map(short).collect::<Vec<_>>(), ["0@account-1", "1@account-1", "0@account-2"]);
    assert_eq!(got.iter().map(|received| received.original.revision).collect::<Vec<_>>(), [0, 1, 2]);
    assert_ne!(got[0].original.id, got[0].event.as_ref().unwrap().id);
    let outstanding = || server.group("$ce-account", "readers").unwrap().outstanding;
    assert_eq!(outstanding(), 3);
    member.ack(got.iter().map(|received| received.original.id).collect()).await.unwrap();
    soon(async {
        while outstanding() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_link_that_leads_nowhere_is_told() {
    let server = start();
    let client = client(&server);
    server.append("account-1", events(1));
    assert!(server.remove_event("account-1", 0));
    client.create_group(&of_category(), &settings()).await.unwrap();
    let mut member = client.join(&of_category(), 10).await.unwrap();
    let received = soon(member.next()).await.unwrap();
    assert_eq!((received.original.revision, received.event.is_none()), (0, true));
}

#[tokio::test]
async fn a_client_works_on_another_runtime() {
    let server = start();
    let client = client(&server);
    server.append(STREAM, events(1));
    client.create_group(&group(), &settings()).await.unwrap();
    let elsewhere = tokio::task::spawn_blocking(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let mut member = client.join(&group(), 10).await.unwrap();
            short(&soon(member.next()).await.unwrap())
        })
    });
    assert_eq!(elsewhere.await.unwrap(), "0@orders");
}
