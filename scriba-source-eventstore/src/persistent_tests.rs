//! What a group may do that a double cannot be brought to do in a test's time.

use std::sync::Mutex;

use scriba_core::telemetry::Telemetry;
use tokio::time::{Instant, timeout};

use super::*;
use crate::fake::{FakeClient, id};

const PLENTY: Demand = Demand { events: 1_000, bytes: 1 << 20 };

/// A source of what stands in a stream, whose consumers get these pushes, one after another.
fn source(log: impl IntoIterator<Item = u64>, pushes: &[&[u64]]) -> (PersistentSource, Arc<FakeClient>) {
    let pushes = Mutex::new(pushes.iter().map(|pushes| pushes.to_vec()).collect());
    let client = Arc::new(FakeClient { log: log.into_iter().collect(), pushes, ..FakeClient::default() });
    let store = EventStore::by(Arc::<FakeClient>::clone(&client));
    (PersistentSource::stream(&store, "s").group("g"), client)
}

async fn subscribe(source: &PersistentSource, after: Option<u64>) -> Box<dyn Subscription> {
    let telemetry = Telemetry::new(ProjectionId::from("p"), Vec::new());
    let request = SubscribeRequest { after: after.map(Position::new), event_types: None, in_flight: 100, telemetry };
    source.subscribe(request).await.unwrap()
}

/// Reads until nothing comes for a day, or an error.
async fn read(subscription: &mut Box<dyn Subscription>) -> (Vec<u64>, Option<SourceError>) {
    let mut positions = Vec::new();
    loop {
        match timeout(Duration::from_hours(24), subscription.next(PLENTY)).await {
            Err(_) => return (positions, None),
            Ok(Err(error)) => return (positions, Some(error)),
            Ok(Ok(page)) => positions.extend(page.deliveries.iter().map(|delivery| delivery.position().get())),
        }
    }
}

/// The same of a group that has written this down.
fn source_at(checkpoint: Option<u64>, pushes: &[&[u64]]) -> PersistentSource {
    let pushes = Mutex::new(pushes.iter().map(|pushes| pushes.to_vec()).collect());
    let client = Arc::new(FakeClient { log: (0..10).collect(), pushes, checkpoint, ..FakeClient::default() });
    PersistentSource::stream(&EventStore::by(client), "s").group("g")
}

fn assert_names_the_hole(error: Option<SourceError>, hole: &str) {
    let Some(SourceError::Unusable { message }) = error else { panic!("not halted: {error:?}") };
    for part in ["group g on stream s", "at the beginning", hole, "restore", "reset"] {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_group_that_has_written_down_that_all_is_done_halts_a_projection_that_begins() {
    let started = Instant::now();
    let (positions, error) = read(&mut subscribe(&source_at(Some(9), &[&[]]), None).await).await;
    assert!(positions.is_empty(), "{positions:?}");
    assert_names_the_hole(error, "revisions 0 to 9");
    assert_eq!(started.elapsed(), 2 * NOTHING_YET_AFTER);
}

#[tokio::test(start_paused = true)]
async fn a_group_that_is_only_silent_is_asked_again_and_never_halts() {
    for checkpoint in [None, Some(8)] {
        let source = source_at(checkpoint, &[&[][..]; 9]);
        for _ in 0..9 {
            let (positions, error) = read(&mut subscribe(&source, None).await).await;
            assert!(positions.is_empty(), "{positions:?}");
            assert!(matches!(error, Some(SourceError::Ended { .. })), "it may be slow: {error:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_group_that_begins_behind_events_three_times_in_a_row_halts() {
    let source = source_at(None, &[&[4, 5][..]; 3]);
    for _ in 0..2 {
        let (_, error) = read(&mut subscribe(&source, None).await).await;
        assert!(matches!(error, Some(SourceError::Ended { .. })), "pushes may have been lost: {error:?}");
    }
    assert_names_the_hole(read(&mut subscribe(&source, None).await).await.1, "revisions 0 to 3");
}

#[tokio::test(start_paused = true)]
async fn a_push_lost_at_the_start_is_forgotten_once_a_subscription_begins_well() {
    let (source, _) = source(0..3, &[&[1, 2], &[0], &[1, 2]]);
    for (pushes, delivered) in
        [("a lost push", vec![]), ("another one, of the last", vec![0]), ("the first again", vec![])]
    {
        let (positions, error) = read(&mut subscribe(&source, None).await).await;
        assert_eq!(positions, delivered, "{pushes}");
        assert!(matches!(error, Some(SourceError::Ended { .. })), "{pushes}: {error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_push_of_the_last_event_is_noticed() {
    let (source, _) = source(0..6, &[&[0, 1, 2, 3, 4]]);
    let (positions, error) = read(&mut subscribe(&source, None).await).await;
    assert_eq!(positions, [0, 1, 2, 3, 4]);
    let Some(SourceError::Ended { message }) = error else { panic!("not ended: {error:?}") };
    assert!(message.contains("revisions 5 to 5"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn a_lost_push_ends_the_subscription_behind_what_came_before_it() {
    let (source, _) = source(0..6, &[&[0, 1, 3, 4, 5]]);
    let (positions, error) = read(&mut subscribe(&source, None).await).await;
    assert_eq!(positions, [0, 1]);
    assert!(matches!(error, Some(SourceError::Ended { .. })), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_group_that_waits_for_acks_is_not_suspected() {
    let (source, _) = source(0..6, &[&[0, 1]]);
    let (positions, error) = read(&mut subscribe(&source.buffer_size(2), None).await).await;
    assert_eq!(positions, [0, 1]);
    assert!(error.is_none(), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn the_event_that_a_server_takes_for_its_checkpoint_is_read_from_the_stream() {
    // 3 was the last one acked; it and 4 are gone, and the server drops 5.
    for pushes in [&[6][..], &[]] {
        let log = if pushes.is_empty() { vec![5] } else { vec![5, 6] };
        let (source, _) = source(log.clone(), &[pushes]);
        let (positions, error) = read(&mut subscribe(&source, Some(3)).await).await;
        assert_eq!(positions, log);
        assert!(error.is_none(), "{error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_comes_twice_is_handed_out_twice_and_acked_once() {
    let (source, client) = source(0..3, &[&[0, 1, 0, 2]]);
    let mut subscription = subscribe(&source, None).await;
    let (positions, error) = read(&mut subscription).await;
    assert_eq!(positions, [0, 1, 0, 2]);
    assert!(error.is_none(), "{error:?}");
    subscription.ack(Position::new(1)).await.unwrap();
    assert_eq!(*client.acked.lock().unwrap(), [id(0), id(1)]);
}

#[tokio::test(start_paused = true)]
async fn what_is_durable_already_is_acked_when_it_comes() {
    let (source, client) = source(0..6, &[&[2, 3, 4]]);
    let mut subscription = subscribe(&source.buffer_size(3), Some(4)).await;
    let page = subscription.next(PLENTY).await.unwrap();
    assert_eq!(page.deliveries.len(), 3, "the engine counts them as duplicates");
    assert!(timeout(Duration::from_secs(1), subscription.next(PLENTY)).await.is_err());
    assert_eq!(*client.acked.lock().unwrap(), [id(2), id(3), id(4)]);
}
