//! Events that are missing, and those that only seem to be.

use scriba_core::Source;
use scriba_core::source::SourceError;
use scriba_source_eventstore::{CatchUpSource, PersistentSource};
use tokio::time::{Instant, sleep};

use super::bed::{GROUP, PATIENCE, Reader, STREAM, Server, assert_says, halted, millis};

#[tokio::test]
async fn an_event_that_was_removed_is_passed_and_reported() {
    let server = Server::new();
    server.append(6);
    assert!(server.double.remove_event(STREAM, 3));
    let (catch_up, persistent) = (server.catch_up(), server.persistent());
    let mut readers = [Reader::start(&catch_up, None).await, Reader::start(&persistent, None).await];
    for reader in &mut readers {
        reader.until(5).await;
        assert_eq!(reader.positions(), [0, 1, 2, 4, 5]);
        assert_eq!(reader.passed(), [(3, 3)]);
    }
}

#[tokio::test]
async fn a_truncated_beginning_is_passed_from_wherever_the_watermark_is() {
    let server = Server::new();
    server.append(6);
    server.double.truncate_stream(STREAM, 4);
    for (after, passed) in [(None, (0, 3)), (Some(1), (2, 3))] {
        let mut reader = Reader::start(&server.catch_up(), after).await;
        reader.until(5).await;
        assert_eq!(reader.positions(), [4, 5]);
        assert_eq!(reader.passed(), [passed]);
    }
    let mut reader = Reader::start(&server.persistent(), None).await;
    reader.until(5).await;
    assert_eq!((reader.positions(), reader.passed()), (vec![4, 5], vec![(0, 3)]));
}

#[tokio::test]
async fn a_stream_that_was_deleted_softly_goes_on_where_it_was() {
    let server = Server::new();
    server.append(3);
    let source = server.persistent();
    let mut reader = Reader::start(&source, None).await;
    reader.until(2).await;
    reader.ack(2).await;
    server.double.delete_stream(STREAM);
    server.append(2);
    reader.until(4).await;
    assert_eq!(reader.positions(), [0, 1, 2, 3, 4]);
    let mut reader = Reader::start(&server.catch_up(), None).await;
    reader.until(4).await;
    assert_eq!((reader.positions(), reader.passed()), (vec![3, 4], vec![(0, 2)]));
}

#[tokio::test]
async fn a_tombstone_halts() {
    let server = Server::new();
    server.append(3);
    let (catch_up, persistent) = (server.catch_up(), server.persistent());
    let mut reader = Reader::start(&catch_up, None).await;
    reader.until(2).await;
    server.double.tombstone_stream(STREAM);
    let ended = reader.end().await;
    assert!(!matches!(ended, SourceError::Unavailable { .. }), "{ended:?}");
    for outcome in [Reader::try_start(&catch_up, Some(2)).await, Reader::try_start(&persistent, Some(2)).await] {
        assert_says(&halted(outcome), &["account-1", "deleted for ever", "another stream"]);
    }
    assert_says(&halted(catch_up.check().await), &["deleted for ever"]);
}

#[tokio::test]
async fn a_push_that_was_lost_is_delivered_by_the_next_subscription() {
    let server = Server::new();
    let source = server.persistent();
    let mut reader = Reader::start(&source, None).await;
    server.append(2);
    reader.until(1).await;
    server.double.lose_pushes(2);
    server.append(5);
    let SourceError::Ended { message } = reader.end().await else { panic!("not ended") };
    assert_says(&message, &["account-1", "reader_v1", "revisions 2 to 3"]);
    assert_eq!(reader.positions(), [0, 1], "nothing behind the hole");
    drop(reader);

    let mut reader = Reader::start(&source, Some(1)).await;
    reader.until(6).await;
    assert_eq!(reader.positions().last_chunk(), Some(&[2, 3, 4, 5, 6]));
}

#[tokio::test]
async fn a_push_that_was_lost_at_the_start_is_delivered_by_the_next_subscription() {
    let server = Server::new();
    server.append(4);
    server.double.lose_pushes(1);
    let source = server.persistent();
    let SourceError::Ended { .. } = Reader::start(&source, None).await.end().await else { panic!("not ended") };
    let mut reader = Reader::start(&source, None).await;
    reader.until(3).await;
    assert_eq!(reader.positions(), [0, 1, 2, 3]);
}

/// Case G2.
#[tokio::test]
async fn tables_that_were_wiped_while_the_group_lived_on_halt_with_the_hole_named() {
    let server = Server::new();
    server.append(10);
    let source = server.persistent();
    let mut reader = Reader::start(&source, None).await;
    reader.until(9).await;
    reader.ack(6).await;
    drop(reader);

    for (after, watermark, hole) in
        [(None, "at the beginning", "revisions 0 to 6"), (Some(2), "revision 2", "revisions 3 to 6")]
    {
        for _ in 0..2 {
            let mut reader = Reader::start(&source, after).await;
            assert!(matches!(reader.end().await, SourceError::Ended { .. }), "a push may have been lost");
        }
        let mut reader = Reader::start(&source, after).await;
        let message = halted(Err::<(), _>(reader.end().await));
        assert_says(&message, &["group reader_v1 on stream account-1", watermark, hole, "restore", "reset"]);
        assert!(reader.positions().is_empty(), "delivered: {:?}", reader.positions());
    }
    // Tables at or beyond where the group is go on.
    let mut reader = Reader::start(&source, Some(6)).await;
    reader.until(9).await;
    assert_eq!(reader.positions(), [7, 8, 9]);
}

/// Case A5: the event at the server's checkpoint is gone, and the server drops the first one behind it.
#[tokio::test]
async fn a_restart_after_events_around_the_checkpoint_are_gone_goes_on_and_misses_nothing() {
    for (truncate, scavenge) in [(true, false), (true, true), (false, false)] {
        let server = Server::new();
        server.double.stop_clock();
        server.append(10);
        let source = server.persistent();
        let mut reader = Reader::start(&source, None).await;
        reader.until(9).await;
        reader.ack(4).await;
        server.until_group("acked", |group| group.outstanding == 5).await;
        server.double.fast_forward(millis(5_000));
        assert_eq!(server.group().checkpoint.as_deref(), Some("4"));
        if truncate {
            server.double.truncate_stream(STREAM, 6);
        } else {
            assert!(server.double.remove_event(STREAM, 4));
        }
        if scavenge {
            assert_eq!(server.double.scavenge(), 6);
        }
        server.double.restart();
        reader.end().await;
        drop(reader);

        let mut reader = Reader::start_again(&source, Some(4)).await;
        reader.until(9).await;
        if truncate {
            assert_eq!((reader.positions(), reader.passed()), (vec![6, 7, 8, 9], vec![(5, 5)]));
        } else {
            assert_eq!((reader.positions(), reader.passed()), (vec![5, 6, 7, 8, 9], vec![]));
        }
    }
}

#[tokio::test]
async fn links_that_lead_nowhere_are_progress_and_are_acked() {
    let server = Server::new();
    server.append(3);
    server.double.remove_event(STREAM, 1);
    let category = PersistentSource::category(&server.store, "account");
    let mut reader = Reader::start(&category, None).await;
    reader.until(2).await;
    assert_eq!((reader.positions(), reader.passed()), (vec![0, 2], vec![]));
    reader.ack(2).await;
    let outstanding = || server.double.group("$ce-account", GROUP).unwrap().outstanding;
    let started = Instant::now();
    while outstanding() > 0 {
        assert!(started.elapsed() < PATIENCE, "still {}", outstanding());
        sleep(millis(5)).await;
    }
    // One at the end is no less.
    server.append(1);
    server.double.remove_event(STREAM, 3);
    let mut reader = Reader::start(&CatchUpSource::category(&server.store, "account"), Some(2)).await;
    reader.until(3).await;
    assert!(reader.positions().is_empty());
}
