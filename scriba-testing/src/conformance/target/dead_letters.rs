//! What comes back of dead letters.

use bytes::Bytes;
use chrono::{TimeDelta, TimeZone, Utc};
use scriba_core::dead_letter::Failure;
use scriba_core::target::{DeadLetterFilter, DeadLetterStats, Entry};
use scriba_core::{Position, RecordedEvent};

use super::bed::TargetBed;
use super::node::{Holder, Node, dead_as, event, failure, open};
use crate::conformance::wait::answer;

/// A dead letter has all of its event and of its failure.
pub async fn a_dead_letter_says_what_it_is_of_and_why<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let occurred_at = Utc.timestamp_opt(1_700_000_000, 0).single();
    let metadata = Bytes::from_static(b"{\"user\": \"u-1\"}");
    let event = RecordedEvent { metadata, occurred_at, ..event(3) };
    let failure = Failure { attempts: u32::MAX, ..failure("it's \"odd\"") };
    node.take_over().await.commit(vec![dead_as(event.clone(), failure.clone())]).await;
    let letters = node.all_letters().await;
    let [letter] = letters.as_slice() else { panic!("{letters:?}") };
    assert_eq!((&letter.stream_id, &letter.event_type), (&event.stream_id, &event.event_type));
    assert_eq!((&letter.event_id, letter.position), (&event.id, event.position));
    assert_eq!((&letter.data, &letter.metadata), (&event.data, &event.metadata));
    assert_eq!((letter.occurred_at, &letter.failure), (occurred_at, &failure));
}

/// Body and metadata stay as they are, whatever bytes they are.
pub async fn a_dead_letter_keeps_any_bytes<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let large = vec![b'x'; 1 << 20];
    let bodies: [&[u8]; 6] = [b"", b"a\0b", b"\xff\xfe{}", b"{\"a\": \"\\u0000\"}", b"1e1000000000", &large];
    let of = |(position, body)| {
        let data = Bytes::copy_from_slice(body);
        dead_as(RecordedEvent { metadata: data.clone(), data, ..event(position) }, failure("decode"))
    };
    node.take_over().await.commit((0..).zip(bodies).map(of).collect()).await;
    let letters = node.all_letters().await;
    assert_eq!(letters.len(), bodies.len());
    for (letter, body) in letters.iter().zip(bodies) {
        assert!(letter.data == body, "the body at {} came back otherwise", letter.position);
        assert!(letter.metadata == body, "the metadata at {} came back otherwise", letter.position);
    }
}

/// Ids of 10,000 characters come back, and a dead letter is found by them.
pub async fn a_dead_letter_keeps_long_ids<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let long = "é".repeat(10_000);
    let text = || long.as_str();
    let event = RecordedEvent { stream_id: text().into(), id: text().into(), event_type: text().into(), ..event(0) };
    node.take_over().await.commit(vec![dead_as(event, failure(text()))]).await;
    let filter = DeadLetterFilter { stream_id: Some(text().into()), ..DeadLetterFilter::default() };
    let letters = node.letters(filter).await;
    let [letter] = letters.as_slice() else { panic!("{} letters", letters.len()) };
    assert!(letter.stream_id == text() && letter.event_id == text() && letter.event_type == text());
    assert!(letter.failure.kind == text(), "the kind came back otherwise");
}

/// An event that is dead-lettered again takes the place of the first dead letter.
pub async fn an_event_is_one_dead_letter_at_most<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    for kind in ["decode", "panic"] {
        holder.commit(vec![dead_as(event(1), failure(kind))]).await;
    }
    let letters = node.all_letters().await;
    let failures: Vec<_> = letters.iter().map(|letter| &letter.failure).collect();
    assert_eq!(failures, [&failure("panic")]);
}

/// Ten dead letters over three streams, the first six of one kind.
async fn ten<B: TargetBed>(node: &Node<B>) -> Holder<B> {
    let mut holder = node.take_over().await;
    let of = |position| dead_as(event(position), failure(if position < 6 { "decode" } else { "panic" }));
    let letters: Vec<Entry<B::Op>> = (0..10).map(of).collect();
    holder.commit(letters).await;
    holder
}

/// The dead letters of a stream.
pub async fn dead_letters_are_filtered_by_stream<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    ten(&node).await;
    let of = |stream: &str| DeadLetterFilter { stream_id: Some(stream.into()), ..DeadLetterFilter::default() };
    assert_eq!(node.listed(of("stream-1")).await, [1, 4, 7]);
    assert_eq!(node.listed(of("stream")).await, [0; 0]);
}

/// The dead letters of a kind.
pub async fn dead_letters_are_filtered_by_kind<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    ten(&node).await;
    let of = |kind: &str| DeadLetterFilter { kind: Some(kind.to_owned()), ..DeadLetterFilter::default() };
    assert_eq!(node.listed(of("panic")).await, [6, 7, 8, 9]);
    assert_eq!(node.listed(of("pan%")).await, [0; 0]);
}

/// The dead letters from a position on, up to one, and between two, both included.
pub async fn dead_letters_are_filtered_by_position<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    ten(&node).await;
    let between = |from: Option<u64>, to: Option<u64>| DeadLetterFilter {
        from_position: from.map(Position::new),
        to_position: to.map(Position::new),
        ..DeadLetterFilter::default()
    };
    assert_eq!(node.listed(between(Some(8), None)).await, [8, 9]);
    assert_eq!(node.listed(between(None, Some(0))).await, [0]);
    assert_eq!(node.listed(between(Some(2), Some(4))).await, [2, 3, 4]);
}

/// The dead letters written at or after a time, and before one.
pub async fn dead_letters_are_filtered_by_time<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    ten(&node).await;
    let letters = node.all_letters().await;
    let oldest = letters.iter().map(|letter| letter.failed_at).min();
    let newest = letters.iter().map(|letter| letter.failed_at).max();
    let later = newest.map(|newest| newest + TimeDelta::milliseconds(1));
    let filter = |since, until| DeadLetterFilter { since, until, ..DeadLetterFilter::default() };
    assert_eq!(node.listed(filter(oldest, later)).await.len(), 10);
    assert!(node.listed(filter(newest, None)).await.contains(&9), "at the time itself");
    assert_eq!(node.listed(filter(later, None)).await, [0; 0]);
    assert_eq!(node.listed(filter(None, oldest)).await, [0; 0], "before the time itself");
}

/// Pages go on behind the last id of the page before, forwards and backwards, with a limit of 100 where none is said.
pub async fn dead_letters_are_paged_in_both_directions<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let mut holder = ten(&node).await;
    for (descending, first, second) in [(false, [0, 1, 2, 3], [4, 5, 6, 7]), (true, [9, 8, 7, 6], [5, 4, 3, 2])] {
        let page = DeadLetterFilter { limit: Some(4), descending, ..DeadLetterFilter::default() };
        let letters = node.letters(page.clone()).await;
        assert_eq!(letters.iter().map(|letter| letter.position.get()).collect::<Vec<_>>(), first);
        let next = DeadLetterFilter { after: letters.last().map(|letter| letter.position), ..page };
        assert_eq!(node.listed(next).await, second);
    }
    holder.commit((10..105).map(|position| dead_as(event(position), failure("decode"))).collect()).await;
    assert_eq!(node.listed(DeadLetterFilter::default()).await, (0..100).collect::<Vec<_>>());
}

/// Dead letters are counted, in all and by kind, with the times of the oldest and the newest.
pub async fn dead_letters_are_counted<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let none = answer("stats", node.target.dead_letter_stats(&node.id)).await;
    assert_eq!(none, DeadLetterStats::default());
    let mut holder = ten(&node).await;
    holder.commit(vec![dead_as(event(10), failure("a rare one"))]).await;
    let stats = answer("stats", node.target.dead_letter_stats(&node.id)).await;
    let by_kind = [("decode", 6), ("panic", 4), ("a rare one", 1)].map(|(kind, count)| (kind.to_owned(), count));
    assert_eq!((stats.total, stats.by_kind.as_slice()), (11, by_kind.as_slice()));
    let letters = node.all_letters().await;
    assert_eq!(stats.oldest, letters.iter().map(|letter| letter.failed_at).min());
    assert_eq!(stats.newest, letters.iter().map(|letter| letter.failed_at).max());
}
