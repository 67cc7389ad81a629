//! What every source owes.

use bytes::Bytes;
use futures_util::future::join;
use scriba_core::source::Demand;
use scriba_core::{Position, RecordedEvent};

use super::bed::{NewEvent, SourceBed};
use super::reader::{PLENTY, Reader, TYPES, append, append_one, event, events, request};
use crate::conformance::wait::{WATCH, answer, give_up_after};

/// The most polls after which a call is dropped: enough for every await point of a few round trips.
const MOST_POLLS: usize = 64;

/// Of the events that were delivered, the missing ones.
pub(super) fn missing(reader: &Reader, wanted: &[Position]) -> Vec<Position> {
    let delivered = reader.sorted();
    wanted.iter().copied().filter(|position| delivered.binary_search(position).is_err()).collect()
}

/// What has to be delivered is.
pub(super) fn assert_all(reader: &Reader, wanted: &[Position]) {
    let missing = missing(reader, wanted);
    assert!(missing.is_empty(), "not delivered: {missing:?}");
}

/// The source says of a store that can be read that it can be used.
pub async fn a_store_that_can_be_read_passes_the_check<B: SourceBed>() {
    let bed = B::new().await;
    answer("check", bed.source().await.check()).await;
}

/// Positions strictly increase over all streams and all pages of a subscription.
pub async fn positions_strictly_increase_over_all_streams<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(20)).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.page(Demand { events: 7, ..PLENTY }).await;
    reader.until(positions[19]).await;
    let delivered = reader.positions();
    assert!(delivered.is_sorted_by(|one, next| one < next), "delivered in this order: {delivered:?}");
}

/// Every event is delivered, over pages of many sizes.
pub async fn nothing_is_missing<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(600)).await;
    let mut reader = Reader::open(&bed, None).await;
    for events in [1, 7, 64, 300] {
        reader.page(Demand { events, ..PLENTY }).await;
    }
    reader.until(positions[599]).await;
    assert_all(&reader, &positions);
}

/// A subscription above a watermark delivers everything above it, be it the first position or the last.
pub async fn everything_above_any_watermark_is_delivered<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(6)).await;
    for (index, watermark) in positions.iter().enumerate().take(5) {
        let mut reader = Reader::open(&bed, Some(*watermark)).await;
        reader.until(positions[5]).await;
        assert_all(&reader, &positions[index + 1..]);
    }
    let mut at_the_end = Reader::open(&bed, Some(positions[5])).await;
    let next = append_one(&bed, event("conformance-0")).await;
    at_the_end.until(next).await;
    assert_all(&at_the_end, &[next]);
}

/// A page has no more events than were asked for.
pub async fn no_page_has_more_events_than_demanded<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(20)).await;
    for demanded in [1, 2, 7] {
        let mut reader = Reader::open(&bed, None).await;
        while reader.reached < Some(positions[19]) {
            let before = reader.events.len();
            reader.page(Demand { events: demanded, ..PLENTY }).await;
            let delivered = reader.events.len() - before;
            assert!(delivered <= demanded, "{delivered} events, {demanded} were demanded");
        }
    }
}

/// A page has no more bytes than were asked for, unless it has one event only.
pub async fn no_page_has_more_bytes_than_demanded<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(10)).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(positions[9]).await;
    let one = reader.at(positions[0]).size();
    drop(reader);
    for bytes in [1, 2 * one + one / 2] {
        let mut reader = Reader::open(&bed, None).await;
        while reader.reached < Some(positions[9]) {
            let before = reader.events.len();
            reader.page(Demand { bytes, ..PLENTY }).await;
            let page = &reader.events[before..];
            let delivered: usize = page.iter().map(RecordedEvent::size).sum();
            let count = page.len();
            assert!(delivered <= bytes || count == 1, "{delivered} bytes in {count} events, {bytes} were demanded");
        }
    }
}

/// An event that is larger than the demand comes all the same.
pub async fn one_event_is_always_admitted_however_large<B: SourceBed>() {
    let bed = B::new().await;
    let large = NewEvent { data: json_string(1 << 20), ..event("conformance-0") };
    let positions = append(&bed, vec![event("conformance-0"), large, event("conformance-1")]).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until_with(Demand { bytes: 1_000, ..PLENTY }, positions[2]).await;
    assert_all(&reader, &positions);
}

/// What is appended while the engine asks for nothing, as in a pause, comes when it asks again.
pub async fn a_reader_that_asks_for_nothing_for_a_while_loses_nothing<B: SourceBed>() {
    let bed = B::new().await;
    let first = append_one(&bed, event("conformance-0")).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(first).await;
    let positions = append(&bed, events(200)).await;
    tokio::time::sleep(WATCH).await;
    reader.until(positions[199]).await;
    assert_all(&reader, &positions);
}

/// Progress never says of an event to come that nothing more comes up to it.
pub async fn progress_never_passes_an_event_that_is_not_delivered<B: SourceBed>() {
    static WANTED: [&str; 1] = [TYPES[1]];
    let bed = B::new().await;
    for types in [TYPES.as_slice(), WANTED.as_slice()] {
        let mut reader = Reader::open_types(&bed, types).await;
        for _ in 0..3 {
            let last = append(&bed, events(6)).await[5];
            reader.until(last).await;
            assert_eq!(reader.overtaken, [], "progress, and an event not above it that came later");
        }
    }
}

/// `caught_up` is said when everything is delivered, and not while something is left.
pub async fn caught_up_is_said_at_the_end_and_not_before<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(5)).await;
    let mut reader = Reader::open(&bed, None).await;
    loop {
        let page = reader.page(Demand { events: 2, ..PLENTY }).await;
        let (reached, end) = (reader.reached, positions[4]);
        if page.caught_up {
            assert!(reached >= Some(end), "caught up at {reached:?}, though there is an event at {end}");
            break;
        }
    }
}

/// An empty store answers with an empty page that has caught up.
pub async fn an_empty_store_is_caught_up<B: SourceBed>() {
    let bed = B::new().await;
    let mut reader = Reader::open(&bed, None).await;
    let page = reader.page(PLENTY).await;
    assert!(page.caught_up && page.deliveries.is_empty(), "the first page of an empty store is {page:?}");
}

/// A page with nothing in it says one thing only: that the source has caught up, for the first time. Else it waits.
pub async fn no_page_is_empty_but_the_first_that_has_caught_up<B: SourceBed>() {
    let bed = B::new().await;
    append(&bed, events(3)).await;
    let mut reader = Reader::open(&bed, None).await;
    let mut empty = 0;
    while let Some(page) = reader.page_within(WATCH).await {
        let page = page.unwrap_or_else(|error| panic!("next: {error}"));
        empty += usize::from(page.deliveries.is_empty());
        assert!(!page.deliveries.is_empty() || (empty == 1 && page.caught_up), "an empty page instead of a wait");
    }
}

/// What is appended while the source waits for it arrives.
pub async fn events_appended_while_it_waits_arrive<B: SourceBed>() {
    let bed = B::new().await;
    let first = append_one(&bed, event("conformance-0")).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(first).await;
    for _ in 0..3 {
        let appended = async {
            tokio::time::sleep(WATCH).await;
            append_one(&bed, event("conformance-1")).await
        };
        let read = async {
            while reader.events.len() < 2 {
                reader.page(PLENTY).await;
            }
        };
        let (position, ()) = join(appended, read).await;
        reader.at(position);
        reader.events.truncate(1);
    }
}

/// Id, stream, type and body come back as they were appended.
pub async fn an_event_comes_back_as_it_was_appended<B: SourceBed>() {
    for (wanted, found) in round_trip::<B>(events(4)).await {
        assert_eq!(found.id.as_str(), wanted.id, "the id of the event at position {}", found.position);
        assert_ids(&wanted, &found);
        assert_bytes("body", &found.data, &wanted.data, found.position);
    }
}

/// Empty bodies come back empty, and bodies of a mebibyte whole.
pub async fn empty_and_large_bodies_come_back<B: SourceBed>() {
    bodies_come_back::<B>([Bytes::new(), json_string(1 << 20)]).await;
}

/// Stream ids and types of any characters come back as they are.
pub async fn strange_ids_come_back<B: SourceBed>() {
    let strange = "a b/c\t\n\u{1}'\"\\%{}ß\u{1f600}";
    ids_come_back::<B>(NewEvent { event_type: strange.to_owned(), ..event(strange) }).await;
}

/// The identity is the same whenever the source is opened, and whatever is in the store.
pub async fn the_identity_is_the_same_when_it_is_opened_again<B: SourceBed>() {
    let bed = B::new().await;
    let before = answer("identity", bed.source().await.identity()).await;
    append(&bed, events(3)).await;
    let after = answer("identity", bed.source().await.identity()).await;
    assert_eq!(before, after);
}

/// Another store has another fingerprint, and the same kind.
pub async fn another_store_has_another_fingerprint<B: SourceBed>() {
    let (one, other) = (B::new().await, B::new().await);
    let one = answer("identity", one.source().await.identity()).await;
    let other = answer("identity", other.source().await.identity()).await;
    assert_eq!(one.kind, other.kind);
    assert_ne!(one.fingerprint, other.fingerprint, "two stores with one fingerprint");
}

/// The inspector tells the id of the event at each position, and none where there is no event.
pub async fn the_id_of_the_event_at_a_position_is_told<B: SourceBed>() {
    let bed = B::new().await;
    let appended = events(5);
    let positions = append(&bed, appended.clone()).await;
    let mut inspector = answer("inspector", bed.source().await.inspector()).await;
    for (event, position) in appended.iter().zip(&positions) {
        let id = answer("event_id_at", inspector.event_id_at(*position)).await;
        assert_eq!(id.map(|id| id.to_string()).as_deref(), Some(event.id.as_str()), "at position {position}");
    }
    for position in [positions[4].get() + 1, u64::MAX] {
        let id = answer("event_id_at", inspector.event_id_at(Position::new(position))).await;
        assert_eq!(id, None, "at position {position}, where there is no event");
    }
}

/// A `next` that is dropped, at whatever await point, has neither lost an event nor delivers one twice later.
pub async fn a_dropped_next_loses_and_repeats_nothing<B: SourceBed>() {
    let bed = B::new().await;
    let mut positions = append(&bed, events(20)).await;
    let mut reader = Reader::open(&bed, None).await;
    let mut polls = (1..=MOST_POLLS).cycle();
    while reader.reached < Some(positions[19]) {
        reader.page_or_drop(polls.next().unwrap_or(1), Demand { events: 3, ..PLENTY }).await;
    }
    // Dropped while it waits, with nothing to come.
    for polls in 1..5 {
        reader.page_or_drop(polls, PLENTY).await;
    }
    let last = append_one(&bed, event("conformance-0")).await;
    positions.push(last);
    reader.until(last).await;
    assert_eq!(reader.sorted(), positions);
}

/// A `subscribe` that is dropped, at whatever await point, is in nobody's way.
pub async fn a_dropped_subscribe_is_in_nobodys_way<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(5)).await;
    let source = bed.source().await;
    let mut subscription = None;
    let mut polls = 1;
    while subscription.is_none() && polls <= MOST_POLLS {
        subscription = give_up_after(polls, source.subscribe(request(None, None))).await;
        polls *= 2;
    }
    let mut reader = match subscription {
        Some(subscribed) => Reader::of(subscribed.unwrap_or_else(|error| panic!("subscribe: {error}"))),
        None => Reader::open(&bed, None).await,
    };
    reader.until(positions[4]).await;
    assert_all(&reader, &positions);
}

/// A subscription that is dropped before everything was asked for loses nothing for the next one.
pub async fn a_subscription_dropped_half_way_loses_nothing_for_the_next<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(10)).await;
    for events in 1..4 {
        let mut dropped = Reader::open(&bed, None).await;
        dropped.page(Demand { events, ..PLENTY }).await;
        drop(dropped);
        let mut next = Reader::open(&bed, None).await;
        next.until(positions[9]).await;
        assert_all(&next, &positions);
    }
}

/// After an ack, everything above it is delivered again to the next subscription.
pub async fn an_ack_loses_nothing_above_it<B: SourceBed>() {
    let bed = B::new().await;
    let positions = append(&bed, events(10)).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(positions[9]).await;
    reader.ack(positions[4]).await;
    drop(reader);
    // The checkpoint may be where the ack was, or trail it when the read model was put back: a source whose server keeps the
    // position has to notice that, and need not deliver then.
    let trailing = [None, Some(positions[2]), Some(positions[4])];
    let at_the_ack = if bed.source().await.keeps_position() { 2 } else { 0 };
    for watermark in &trailing[at_the_ack..] {
        let mut next = Reader::open(&bed, *watermark).await;
        next.until(positions[9]).await;
        assert_all(&next, &positions[5..]);
    }
}

/// JSON that is a string of so many bytes.
fn json_string(bytes: usize) -> Bytes {
    format!("\"{}\"", "x".repeat(bytes.saturating_sub(2))).into()
}

/// Appends events to a store, and returns each with what was delivered of it.
pub(super) async fn round_trip<B: SourceBed>(appended: Vec<NewEvent>) -> Vec<(NewEvent, RecordedEvent)> {
    let bed = B::new().await;
    let positions = append(&bed, appended.clone()).await;
    let mut reader = Reader::open(&bed, None).await;
    reader.until(positions[positions.len() - 1]).await;
    appended.into_iter().zip(positions.iter().map(|position| reader.at(*position).clone())).collect()
}

pub(super) async fn bodies_come_back<B: SourceBed>(bodies: impl IntoIterator<Item = Bytes>) {
    let appended = bodies.into_iter().map(|data| NewEvent { data, ..event("conformance-0") }).collect();
    for (wanted, found) in round_trip::<B>(appended).await {
        assert_bytes("body", &found.data, &wanted.data, found.position);
    }
}

/// Stream id and type of an event come back.
pub(super) async fn ids_come_back<B: SourceBed>(appended: NewEvent) {
    for (wanted, found) in round_trip::<B>(vec![appended]).await {
        assert_ids(&wanted, &found);
    }
}

fn assert_ids(wanted: &NewEvent, found: &RecordedEvent) {
    let position = found.position;
    assert_bytes("stream id", found.stream_id.as_str().as_bytes(), wanted.stream_id.as_bytes(), position);
    assert_bytes("type", found.event_type.as_str().as_bytes(), wanted.event_type.as_bytes(), position);
}

/// Like `assert_eq`, without a mebibyte of output.
pub(super) fn assert_bytes(what: &str, found: &[u8], wanted: &[u8], position: Position) {
    let start = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(64)]).into_owned();
    assert!(
        found == wanted,
        "the {what} of the event at position {position} came back as {} bytes {:?}, was appended as {} bytes {:?}",
        found.len(),
        start(found),
        wanted.len(),
        start(wanted)
    );
}
