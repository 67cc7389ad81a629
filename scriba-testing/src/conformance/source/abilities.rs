//! What is owed by a source that, or on a store that, has an ability.

use std::time::Duration;

use bytes::Bytes;
use chrono::Utc;
use futures_util::future::join;
use scriba_core::source::{Demand, PassedOver, Place, Source, SourceError, TypeSet};
use scriba_core::{Position, ProjectionId};
use tokio::time::{Instant, sleep};

use super::bed::{Cut, HoldOpen, NewEvent, Restore, SourceBed, Truncate};
use super::reader::{IN_FLIGHT, PLENTY, Reader, TYPES, append, append_one, event, events, request};
use super::rules::{assert_all, assert_bytes, bodies_come_back, ids_come_back, round_trip};
use crate::conformance::wait::{PATIENCE, WATCH, answer};

static FIRST_TYPE: [&str; 1] = [TYPES[0]];

/// More than the clocks of store and test differ.
const CLOCKS_DIFFER: Duration = Duration::from_mins(5);

/// A subscription begins right above its watermark.
pub async fn nothing_at_or_below_the_watermark_is_delivered<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(7)).await;
    for watermark in &positions[1..5] {
        let mut reader = Reader::open(&bed, Some(*watermark)).await;
        reader.until(positions[6]).await;
        let delivered = reader.sorted();
        assert!(delivered.first() > Some(watermark), "delivered above {watermark}: {delivered:?}");
    }
}

/// A watermark at the first position, which may be 0, is not the beginning.
pub async fn the_first_position_is_an_event_and_not_the_beginning<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(3)).await;
    let mut reader = Reader::open(&bed, Some(positions[0])).await;
    reader.until(positions[2]).await;
    assert!(!reader.sorted().contains(&positions[0]), "delivered again: the event at {}", positions[0]);
}

/// With a list of types, their events are delivered, all of them and no others.
pub async fn only_events_of_listed_types_are_delivered<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(7)).await;
    let wanted: Vec<Position> = positions.iter().copied().step_by(TYPES.len()).collect();
    let mut reader = Reader::open_types(&bed, &FIRST_TYPE).await;
    reader.until(positions[6]).await;
    assert_eq!(reader.sorted(), wanted);
}

/// Events of types that are not listed move the progress, so that they are not looked through again.
pub async fn progress_moves_beyond_events_of_other_types<B: SourceBed>() {
    let bed = B::new().await;
    let mut appended = events(6);
    for event in &mut appended[1..] {
        TYPES[1].clone_into(&mut event.event_type);
    }
    let positions = append(&bed, appended).await;
    let mut reader = Reader::open_types(&bed, &FIRST_TYPE).await;
    reader.until(positions[5]).await;
}

/// The head is the highest position, and none in an empty store.
pub async fn the_head_is_the_last_position<B: SourceBed>() {
    let bed = B::new().await;
    let mut inspector = answer("inspector", bed.source().await.inspector()).await;
    assert_eq!(answer("head", inspector.head()).await, None, "of an empty store");
    for count in [1, 5] {
        let positions = append(&bed, events(count)).await;
        assert_eq!(answer("head", inspector.head()).await, positions.last().copied());
    }
}

/// The inspector finds events of some types up to a position: of the type that comes first, how many and where.
pub async fn events_passed_over_are_found_by_their_types<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(6)).await;
    let cases = [
        (TypeSet::Only(&[TYPES[1]]), positions[5], Some(found(1, 3, positions[1]))),
        (TypeSet::Only(&[TYPES[1]]), positions[4], Some(found(1, 2, positions[1]))),
        (TypeSet::Only(&[TYPES[1]]), positions[1], Some(found(1, 1, positions[1]))),
        (TypeSet::Only(&[TYPES[1]]), positions[0], None),
        (TypeSet::Only(&[TYPES[1], TYPES[0]]), positions[5], Some(found(0, 3, positions[0]))),
        (TypeSet::Only(&["conformance-none"]), positions[5], None),
    ];
    passed_over(&bed, &cases).await;
}

/// The inspector finds events of all but some types in the same way.
pub async fn events_passed_over_are_found_by_the_types_they_are_not_of<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(6)).await;
    let cases = [
        (TypeSet::AllBut(&[TYPES[0]]), positions[5], Some(found(1, 3, positions[1]))),
        (TypeSet::AllBut(&[TYPES[0]]), positions[2], Some(found(1, 1, positions[1]))),
        (TypeSet::AllBut(&[TYPES[0]]), positions[0], None),
        (TypeSet::AllBut(&[]), positions[5], Some(found(0, 3, positions[0]))),
        (TypeSet::AllBut(&TYPES), positions[5], None),
    ];
    passed_over(&bed, &cases).await;
}

fn found(event_type: usize, events: u64, first: Position) -> PassedOver {
    PassedOver { event_type: TYPES[event_type].into(), events, first }
}

async fn passed_over<B: SourceBed>(bed: &B, cases: &[(TypeSet<'_>, Position, Option<PassedOver>)]) {
    let mut inspector = answer("inspector", bed.source().await.inspector()).await;
    for (types, up_to, wanted) in cases {
        let found = answer("passed_over", inspector.passed_over(*types, *up_to)).await;
        assert_eq!(found, *wanted, "{types:?} up to {up_to}");
    }
}

/// Two subscriptions of different projections at once are each given everything.
pub async fn two_subscriptions_at_once_are_each_given_everything<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(20)).await;
    let mut readers = [Reader::open_as(&bed, "conformance-one").await, Reader::open_as(&bed, "conformance-two").await];
    while readers.iter().any(|reader| reader.reached < Some(positions[19])) {
        for reader in readers.iter_mut().filter(|reader| reader.reached < Some(positions[19])) {
            reader.page(Demand { events: 3, ..PLENTY }).await;
        }
    }
    for reader in &readers {
        assert_all(reader, &positions);
    }
}

/// Bodies that are no JSON, no UTF-8 and no C string come back byte for byte.
pub async fn bodies_of_any_bytes_come_back<B: SourceBed>() {
    let all: Vec<u8> = (0..=u8::MAX).collect();
    bodies_come_back::<B>([Bytes::from(all), Bytes::from_static(b"\0"), Bytes::from_static(b"{\"no\": \"json\xff")])
        .await;
}

/// Metadata comes back as it was appended, and empty where there is none.
pub async fn metadata_comes_back<B: SourceBed>() {
    let metadata = [Bytes::from_static(b"{\"by\": \"conformance\"}"), Bytes::new()];
    let appended = metadata.map(|metadata| NewEvent { metadata, ..event("conformance-0") });
    for (wanted, found) in round_trip::<B>(appended.into()).await {
        assert_bytes("metadata", &found.metadata, &wanted.metadata, found.position);
    }
}

/// A stream id of 10,000 characters comes back whole.
pub async fn long_ids_come_back<B: SourceBed>() {
    ids_come_back::<B>(event(&"ß".repeat(10_000))).await;
}

/// A stream id with a NUL comes back whole.
pub async fn ids_with_a_nul_come_back<B: SourceBed>() {
    ids_come_back::<B>(event("before\0behind")).await;
}

/// The revisions of a stream count up one by one, whatever is appended to others.
pub async fn revisions_count_up_within_each_stream<B: SourceBed>() {
    let bed = B::new().await;
    let appended = events(9);
    let positions = append(&bed, appended.clone()).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(positions[8]).await;
    for stream in ["conformance-0", "conformance-1", "conformance-2"] {
        let of_stream = appended.iter().zip(&positions).filter(|(event, _)| event.stream_id == stream);
        let revisions: Vec<u64> = of_stream
            .map(|(_, position)| {
                let revision = reader.at(*position).revision;
                revision.unwrap_or_else(|| panic!("no revision at position {position}"))
            })
            .collect();
        let first = revisions[0];
        assert_eq!(revisions, [first, first + 1, first + 2], "of stream {stream}");
    }
}

/// The time of recording is told.
pub async fn the_time_of_recording_is_told<B: SourceBed>() {
    let bed = B::new().await;
    let before = Utc::now() - CLOCKS_DIFFER;
    let positions = append(&bed, events(3)).await;
    let after = Utc::now() + CLOCKS_DIFFER;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(positions[2]).await;
    for position in positions {
        let time = reader.at(position).occurred_at;
        assert!(time.is_some_and(|time| (before..after).contains(&time)), "recorded at {time:?}");
    }
}

/// A reset forgets the position that the server keeps: the next subscription begins where it is asked to.
pub async fn a_reset_forgets_what_was_acked<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(6)).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(positions[5]).await;
    reader.ack(positions[5]).await;
    drop(reader);
    let source = bed.source().await;
    assert!(source.keeps_position(), "the bed offers `keeps_position`, the source says that no position is kept");
    answer("reset", source.reset(request(None, None).telemetry.id())).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(positions[5]).await;
    assert_all(&reader, &positions);
}

/// There is nothing to claim before the first subscription; then one has the place, and it is free again once that one is gone.
pub async fn the_only_place_is_had_by_one_at_a_time<B: SourceBed>() {
    let bed = B::new().await;
    let source = bed.source().await;
    let id = request(None, None).telemetry.id().clone();
    assert!(source.admits_one(), "the bed offers `one_place`, the source says that it admits any number");
    assert!(answer("claim", source.claim(&id, IN_FLIGHT)).await.is_none(), "a place before the first subscription");
    let reader = Reader::open(&bed, None).await;
    held("claim", source.claim(&id, IN_FLIGHT).await);
    held("subscribe", source.subscribe(request(None, None)).await);
    drop(reader);
    let place = free_place(&*source, &id).await;
    held("claim", bed.source().await.claim(&id, IN_FLIGHT).await);
    drop(place);
    drop(free_place(&*source, &id).await);
}

/// Who has the place subscribes from it like anybody else.
pub async fn who_was_granted_the_place_is_delivered_everything<B: SourceBed>() {
    let bed = B::new().await;
    let source = bed.source().await;
    drop(Reader::open(&bed, None).await);
    let positions = append(&bed, events(5)).await;
    let asked = request(None, None);
    let place = free_place(&*source, asked.telemetry.id()).await;
    let mut reader = Reader::of(answer("subscribe", place.subscribe(asked)).await);
    reader.until(positions[4]).await;
    assert_all(&reader, &positions);
}

/// The place, once the server has seen that it is free.
async fn free_place(source: &dyn Source, id: &ProjectionId) -> Box<dyn Place> {
    let until = Instant::now() + PATIENCE;
    loop {
        match source.claim(id, IN_FLIGHT).await {
            Ok(Some(place)) => return place,
            Err(SourceError::Held { .. }) if Instant::now() < until => sleep(Duration::from_millis(20)).await,
            Ok(None) => panic!("claim: there is no place"),
            Err(error) => panic!("claim: {error}"),
        }
    }
}

#[track_caller]
fn held<T>(call: &str, answer: Result<T, SourceError>) {
    match answer {
        Err(SourceError::Held { holder }) => assert!(!holder.is_empty(), "{call}: nobody is named"),
        Err(error) => panic!("{call}: {error}"),
        Ok(_) => panic!("{call}: let in beside another"),
    }
}

/// What retention removed is passed, whether the watermark was below it or in it, and what is left is delivered.
pub async fn removed_events_are_passed_and_what_is_left_is_delivered<B: Truncate>() {
    let bed = B::new().await;
    let positions = append(&bed, events(6)).await;
    bed.truncate_below(positions[3]).await;
    for watermark in [None, Some(positions[1])] {
        let mut reader = Reader::open(&bed, watermark).await;
        reader.until(positions[5]).await;
        assert_all(&reader, &positions[3..]);
    }
    let mut inspector = answer("inspector", bed.source().await.inspector()).await;
    let id = answer("event_id_at", inspector.event_id_at(positions[0])).await;
    assert_eq!(id, None, "the id of a removed event");
}

/// A store that was put back shows it: nothing stands at a position that is gone, and later another event.
pub async fn a_store_that_was_put_back_shows_other_ids<B: Restore>() {
    let bed = B::new().await;
    let positions = append(&bed, events(6)).await;
    let source = bed.source().await;
    let gone = positions[4];
    let mut inspector = answer("inspector", source.inspector()).await;
    let before = answer("event_id_at", inspector.event_id_at(gone)).await;
    bed.restore_before(positions[3]).await;

    let mut inspector = answer("inspector", source.inspector()).await;
    assert_eq!(answer("event_id_at", inspector.event_id_at(gone)).await, None, "where nothing is any more");
    let again = append(&bed, events(3)).await;
    assert_eq!(again, positions[3..], "the bed gave other positions than it gave before it was put back");
    let after = answer("event_id_at", inspector.event_id_at(gone)).await;
    assert!(after.is_some() && after != before, "{after:?} at position {gone}, where {before:?} was before");
}

/// After a cut, a new subscription delivers everything.
pub async fn after_a_cut_a_new_subscription_delivers_everything<B: Cut>() {
    let bed = B::new().await;
    let positions = append(&bed, events(10)).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.page(Demand { events: 3, ..PLENTY }).await;
    bed.cut().await;
    drop(reader);
    let mut reader = Reader::open(&bed, None).await;
    reader.until(positions[9]).await;
    assert_all(&reader, &positions);
}

/// A subscription that is cut while it waits ends or goes on; it does not wait for ever, nor is it a reason to halt.
pub async fn a_subscription_that_is_cut_while_it_waits_ends_or_goes_on<B: Cut>() {
    let bed = B::new().await;
    let first = append_one(&bed, event("conformance-0")).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(first).await;
    // Beyond what it says when it has caught up.
    reader.settle().await;
    let cut = async {
        tokio::time::sleep(WATCH).await;
        bed.cut().await;
        append_one(&bed, event("conformance-1")).await
    };
    match join(reader.page_or_end(), cut).await.0 {
        Ok(_) | Err(SourceError::Ended { .. } | SourceError::Unavailable { .. }) => {}
        Err(error) => panic!("a cut connection is told as `{error:?}`, which halts the projection"),
    }
}

/// Nothing above an append that is still open is delivered before it is committed, and then all of it in order.
pub async fn an_append_that_is_held_open_is_waited_for<B: HoldOpen>() {
    let bed = B::new().await;
    let first = append_one(&bed, event("conformance-0")).await;
    let held = bed.hold(event("conformance-1")).await;
    let above = append(&bed, events(4)).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(first).await;
    reader.settle().await;
    let early = reader.positions();
    let held = bed.commit(held).await;
    assert!(first < held && held < above[0], "the bed held {held} open, between {first} and {above:?}");
    assert_eq!(early, [first], "delivered while position {held} was open");
    reader.until(above[3]).await;
    assert_all(&reader, &[held]);
    assert_all(&reader, &above);
}
