//! What comes back of a checkpoint.

use scriba_core::checkpoint::Replay;
use scriba_core::circuit::{Circuit, DeadLettersInRow};
use scriba_core::source::SourceIdentity;
use scriba_core::{EventMeta, Position};

use super::bed::TargetBed;
use super::node::{Node, TYPES, applies, dead, event, open, source};
use crate::conformance::wait::answer;

/// A checkpoint that has to be created has the watermark, source and event types of the take-over.
pub async fn a_new_checkpoint_begins_as_its_take_over_says<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let holder = node.take_over_from(Some(41), &source(), Some(&TYPES)).await;
    assert!(holder.created);
    assert_eq!((holder.checkpoint.watermark, holder.checkpoint.commit_no), (Some(Position::new(41)), 0));
    assert_eq!(holder.checkpoint.event_types.as_deref(), Some(TYPES.map(str::to_owned).as_slice()));
    assert_eq!(holder.source, source());
    let stored = node.stored().await;
    assert_eq!((stored.checkpoint, stored.source), (holder.checkpoint, source()));
}

/// A take-over of a checkpoint that is there reads it, whatever it says of a new one.
pub async fn a_later_take_over_changes_no_beginning<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    node.take_over_from(Some(41), &source(), Some(&TYPES)).await;
    let elsewhere = SourceIdentity { kind: "other".to_owned(), fingerprint: "elsewhere".to_owned() };
    let later = Node::open(&bed).await.take_over_from(None, &elsewhere, None).await;
    assert!(!later.created);
    assert_eq!(later.source, source());
    assert_eq!(later.checkpoint.watermark, Some(Position::new(41)));
    assert_eq!(later.checkpoint.event_types.as_deref(), Some(TYPES.map(str::to_owned).as_slice()));
}

/// No watermark is the beginning, and a watermark of 0 is one.
pub async fn position_0_is_an_event_and_not_the_beginning<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    assert_eq!((holder.checkpoint.watermark, holder.checkpoint.last_event.as_ref()), (None, None));
    holder.commit(vec![applies(0, bed.write(1, 1))]).await;
    let again = node.take_over().await.checkpoint;
    assert_eq!(again.watermark, Some(Position::new(0)));
    assert_eq!(again.last_event.map(|last| last.position), Some(Position::new(0)));
}

/// The last event seen comes back with its id, which may be long or strange.
pub async fn the_last_event_comes_back_whatever_its_id<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    let ids = ["it's \"quoted\" \\ $1", "\u{1f600}\n\u{7f}", &"é".repeat(10_000)];
    for (position, id) in (0..).zip(ids) {
        let mut entry = applies(position, bed.write(1, 1));
        let mut event = event(position);
        event.id = id.into();
        entry.meta = EventMeta::new(event, false);
        holder.commit(vec![entry]).await;
        assert_eq!(node.stored().await.checkpoint.last_event, holder.checkpoint.last_event);
    }
}

/// The circuit's count is in the checkpoint, so that a restart does not forget it.
pub async fn dead_letters_in_a_row_come_back<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    holder.policy.circuit = Circuit { in_row: 10, streams: 3, in_row_any: 0 };
    holder.commit(vec![applies(0, bed.write(1, 1)), dead(1), dead(2)]).await;
    let in_row = node.take_over().await.checkpoint.in_row;
    assert_eq!((in_row.count, in_row.streams.len()), (2, 2));
    assert_eq!(in_row, holder.checkpoint.in_row);
    let mut holder = node.take_over().await;
    holder.commit(vec![applies(3, bed.write(1, 1))]).await;
    assert_eq!(node.take_over().await.checkpoint.in_row, DeadLettersInRow::default());
}

/// Where a version first caught up stays as it is.
pub async fn the_replay_position_is_stored_once<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    assert_eq!(holder.checkpoint.replay, Replay::Ongoing);
    for position in [7, 9] {
        answer("store", holder.committer.store_replay_position(Some(Position::new(position)))).await;
    }
    assert_eq!(node.take_over().await.checkpoint.replay, Replay::Over(Some(Position::new(7))));
}

/// A source that was empty, one that was caught up with at position 0, and none caught up with are told apart.
pub async fn having_caught_up_with_an_empty_source_is_not_position_0<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    for (version, caught_up) in [(1, None), (2, Some(Position::new(0)))] {
        let node = node.version(version);
        let mut holder = node.take_over().await;
        answer("store", holder.committer.store_replay_position(caught_up)).await;
        assert_eq!(node.take_over().await.checkpoint.replay, Replay::Over(caught_up));
    }
}

/// Event types are replaced by those stored later; all types, which is none listed, and a list of none are told apart.
pub async fn event_types_are_replaced_and_none_are_not_all<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    assert_eq!(holder.checkpoint.event_types, None);
    let lists: [Option<&[&str]>; 4] = [Some(&TYPES), Some(&[]), None, Some(&TYPES[1..])];
    for types in lists {
        answer("store", holder.committer.store_event_types(types)).await;
        let wanted = types.map(|types| types.iter().map(|&one| one.to_owned()).collect::<Vec<_>>());
        assert_eq!(node.stored().await.checkpoint.event_types, wanted);
    }
}

/// What becomes of one version is nothing to another.
pub async fn two_versions_are_apart<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let other = node.version(u32::MAX);
    let mut one = node.take_over().await;
    let mut two = other.take_over().await;
    one.commit(vec![applies(5, bed.write(1, 1)), dead(6)]).await;
    assert_eq!(other.stored().await.checkpoint, two.checkpoint);
    assert_eq!(other.letters_at().await, [0; 0]);
    two.commit(vec![dead(6)]).await;
    assert_eq!(node.stored().await.checkpoint, one.checkpoint);
    assert_eq!(node.letters_at().await, [6]);
}

/// Nothing is stored of what was never taken over; of all others, by name and version.
pub async fn stored_projections_are_read_by_name_and_version<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    assert!(answer("stored", node.target.stored(&node.id)).await.is_none(), "never taken over");
    let mut last = node.version(1);
    "projection".clone_into(&mut last.id.name);
    let nodes = [node.version(2), node.version(10), last];
    for node in [&nodes[2], &nodes[1], &nodes[0]] {
        node.take_over().await;
    }
    assert!(answer("stored", node.target.stored(&node.id)).await.is_none(), "never taken over");
    let all = answer("stored_all", node.target.stored_all()).await;
    let ids: Vec<_> = all.iter().map(|stored| &stored.id).collect();
    assert_eq!(ids, [&nodes[0].id, &nodes[1].id, &nodes[2].id]);
}
