//! What is left of clients whose subscriptions have ended.

use crate::double::bed::{Reader, Server};

/// Both crates keep a task for every client that they ever made, whoever has dropped it.
#[tokio::test]
async fn subscriptions_that_end_again_and_again_leave_nothing_behind() {
    let server = Server::new();
    server.append(3);
    let persistent = server.persistent();
    let catch_up = server.catch_up();
    let mut alive = Vec::new();
    for _ in 0..12 {
        let mut group = Reader::start_again(&persistent, None).await;
        let mut feed = Reader::start_again(&catch_up, None).await;
        group.until(2).await;
        feed.until(2).await;
        server.double.end_streams();
        group.end().await;
        feed.end().await;
        drop((group, feed));
        alive.push(tokio::runtime::Handle::current().metrics().num_alive_tasks());
    }
    // The first rounds make what the later ones use.
    assert!(alive[11] <= alive[2] + 2, "tasks after each round: {alive:?}");
}
