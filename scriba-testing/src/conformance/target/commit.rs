//! What a commit owes.

use scriba_core::checkpoint::{Checkpoint, Counts};
use scriba_core::circuit::Circuit;
use scriba_core::target::{Batch, CommitError, Shortfall};
use scriba_core::{DeadLetterPolicy, FailureClass, OnPoison, Position};
use tokio::time::sleep;

use super::bed::TargetBed;
use super::node::{NO_CIRCUIT, Node, applies, applies_all, dead, open, skips};
use crate::conformance::wait::{WATCH, answer, give_up_after};

/// Numbers of polls after which a call is dropped.
const POLLS: [usize; 9] = [1, 2, 3, 4, 6, 9, 14, 25, 60];

/// Nothing is stored but this checkpoint.
async fn assert_untouched<B: TargetBed>(bed: &B, node: &Node<B>, checkpoint: &Checkpoint) {
    assert_eq!(bed.read().await, [], "the read model");
    assert_eq!(node.letters_at().await, [0; 0], "the dead letters");
    assert_eq!(node.stored().await.checkpoint, *checkpoint);
}

/// The target says of tables that are there that they can be used.
pub async fn tables_that_are_there_pass_the_check<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    answer("check", node.target.check()).await;
}

/// A commit leaves operations, dead letters and checkpoint, and the counts of several add up.
pub async fn a_commit_writes_operations_dead_letters_and_checkpoint<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    let committed = holder.commit(vec![applies(0, bed.write(1, 5)), dead(1), applies(2, bed.write(2, 6))]).await;
    assert_eq!(committed.counts, Counts { applied: 2, skipped: 0, dead_lettered: 1 });
    holder.commit(vec![applies(3, bed.write(3, 7)), dead(4)]).await;
    assert_eq!(bed.read().await, [(1, 5), (2, 6), (3, 7)]);
    assert_eq!(node.letters_at().await, [1, 4]);
    assert_eq!(node.stored().await.checkpoint, holder.checkpoint, "the row and the engine's own arithmetic");
}

/// What an operation does depends on those before it, in its own event, its own batch and batches before.
pub async fn operations_are_applied_in_the_order_of_positions<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    let both = applies_all(3, [bed.write(2, 1), bed.add(2, 1)]);
    let entries = vec![applies(0, bed.write(1, 5)), applies(1, bed.add(1, 2)), applies(2, bed.write(1, 10)), both];
    holder.commit(entries).await;
    holder.commit(vec![applies(4, bed.add(1, 3)), applies(5, bed.add(3, 4))]).await;
    assert_eq!(bed.read().await, [(1, 13), (2, 2), (3, 4)]);
}

/// A batch with an operation that fails leaves nothing, and says what class of failure it was.
pub async fn a_commit_that_fails_leaves_nothing<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    let error = holder.refused_commit(vec![applies(0, bed.write(1, 5)), dead(1), applies(2, bed.failing())]).await;
    let CommitError::Failed(error) = error else { panic!("{error:?}") };
    assert_eq!(error.class, FailureClass::Structural, "{error}");
    assert_untouched(&bed, &node, &holder.checkpoint).await;
}

/// A commit that is dropped half-way is there or not, and whoever takes over next is told which.
pub async fn a_commit_that_is_dropped_is_there_whole_or_not_at_all<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut wanted = Vec::new();
    for (position, polls) in (0..).zip(POLLS) {
        let mut holder = node.take_over().await;
        let entry = applies(position, bed.write(position.cast_signed(), 1));
        let batch = holder.batch(vec![entry.clone()]);
        if let Some(Err(error)) = give_up_after(polls, holder.committer.commit(&batch)).await {
            panic!("commit: {error}");
        }
        drop(holder);
        let mut next = node.take_over().await;
        if next.checkpoint.watermark == Some(Position::new(position)) {
            wanted.push((position.cast_signed(), 1));
        }
        assert_eq!(bed.read().await, wanted, "dropped after {polls} polls, with {:?}", next.checkpoint);
        if wanted.len() as u64 == position {
            next.commit(vec![entry]).await;
            wanted.push((position.cast_signed(), 1));
        }
        assert_eq!(next.checkpoint.counts.applied, position + 1, "dropped after {polls} polls");
    }
}

/// Tries a batch that expects another commit number than the one in the row.
async fn other_number<B: TargetBed>(expected: i64) {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    let epoch = holder.checkpoint.epoch;
    for position in [0, 1] {
        holder.commit(vec![applies(position, bed.add(1, 1))]).await;
    }
    let mut batch = holder.batch(vec![applies(2, bed.add(1, 1)), dead(3)]);
    batch.advance.expected_commit_no = expected;
    match holder.committer.commit(&batch).await {
        Err(CommitError::Fenced(shortfall)) => {
            assert_eq!(shortfall, Shortfall::OtherCommit { found: 2, expected, epoch });
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(bed.read().await, [(1, 2)]);
    assert_eq!(node.letters_at().await, [0; 0]);
    assert_eq!(node.stored().await.checkpoint, holder.checkpoint);
}

/// A commit that expects fewer commits than there were, as one left behind does, leaves nothing.
pub async fn an_older_commit_number_is_refused<B: TargetBed>() {
    other_number::<B>(1).await;
}

/// A commit that expects more commits than there were, as after a restored row, leaves nothing.
pub async fn a_newer_commit_number_is_refused<B: TargetBed>() {
    other_number::<B>(3).await;
}

/// A skipped event is counted, and the last event seen may be one.
pub async fn skips_are_counted<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    let committed = holder.commit(vec![skips(0), applies(1, bed.write(1, 1)), skips(2)]).await;
    assert_eq!(committed.counts, Counts { applied: 1, skipped: 2, dead_lettered: 0 });
    holder.commit(vec![skips(3)]).await;
    let stored = node.stored().await.checkpoint;
    assert_eq!(stored.counts, Counts { applied: 1, skipped: 3, dead_lettered: 0 });
    assert_eq!(stored.last_event.map(|last| last.position), Some(Position::new(3)));
}

/// A batch without events moves the watermark and nothing else.
pub async fn progress_without_events_keeps_the_last_event<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    holder.commit(vec![applies(1, bed.write(1, 1))]).await;
    let progress = Batch::new(node.id.clone(), &holder.checkpoint, Position::new(7), Vec::new(), NO_CIRCUIT);
    holder.commit_batch(&progress).await.unwrap_or_else(|error| panic!("commit: {error}"));
    let stored = node.stored().await.checkpoint;
    assert_eq!(stored.watermark, Some(Position::new(7)));
    assert_eq!(stored.last_event.map(|last| last.position), Some(Position::new(1)));
}

/// An event that the store refuses becomes a dead letter in the same commit, and all others are applied.
pub async fn a_refused_event_is_dead_lettered_alone<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    let refused = applies_all(1, [bed.add(1, 100), bed.refused()]);
    let entries = vec![applies(0, bed.add(1, 1)), refused, skips(2), dead(3), applies(4, bed.add(1, 1))];
    let committed = holder.commit(entries).await;
    assert_eq!(bed.read().await, [(1, 2)]);
    assert_eq!(committed.counts, Counts { applied: 2, skipped: 1, dead_lettered: 2 });
    let [refused] = committed.refused.as_slice() else { panic!("refused: {:?}", committed.refused) };
    assert_eq!(refused.meta.position, Position::new(1));
    assert!(committed.isolated.is_some_and(|error| error.class == FailureClass::Integrity));
    let stored = node.stored().await.checkpoint;
    assert_eq!((stored.counts, stored.commit_no), (committed.counts, 1));
    let letters = node.all_letters().await;
    let [first, second] = letters.as_slice() else { panic!("{letters:?}") };
    assert_eq!((first.position, &first.failure), (Position::new(1), &refused.failure));
    assert!(first.failure.kind.starts_with("commit"), "{}", first.failure.kind);
    assert_eq!(second.position, Position::new(3));
}

/// A batch that must not go beyond an event leaves nothing, says which event, and may be tried again up to there.
async fn ends_before<B: TargetBed>(bed: &B, node: &Node<B>, policy: DeadLetterPolicy, refused: u64) {
    let mut holder = node.take_over().await;
    holder.policy = policy;
    let entries = (0..5).map(|position| {
        let op = if position < refused - 1 { bed.write(1, 1) } else { bed.refused() };
        if position == refused - 1 && policy.on_poison == OnPoison::Halt {
            skips(position)
        } else {
            applies(position, op)
        }
    });
    let mut batch = holder.batch(entries.collect());
    match holder.commit_batch(&batch).await {
        Err(CommitError::HaltBefore(before)) => assert_eq!(before.position, Position::new(refused)),
        other => panic!("{other:?}"),
    }
    assert_untouched(bed, node, &holder.checkpoint).await;
    assert!(batch.end_before(Position::new(refused)));
    holder.commit_batch(&batch).await.unwrap_or_else(|error| panic!("the committer goes on: {error}"));
    assert_eq!(node.stored().await.checkpoint.watermark, Some(Position::new(refused - 1)));
}

/// The dead letter that is one too many in a row is not written.
pub async fn a_batch_ends_before_the_event_that_opens_the_circuit<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let circuit = Circuit { in_row: 2, streams: 2, in_row_any: 0 };
    ends_before(&bed, &node, DeadLetterPolicy { circuit, ..NO_CIRCUIT }, 3).await;
    assert_eq!(node.letters_at().await, [2]);
}

/// With `OnPoison::Halt` a refused event becomes no dead letter.
pub async fn a_batch_ends_before_a_refused_event_where_that_is_to_halt<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    ends_before(&bed, &node, DeadLetterPolicy { on_poison: OnPoison::Halt, ..NO_CIRCUIT }, 2).await;
    assert_eq!(node.letters_at().await, [0; 0]);
}

/// What a node that was taken over from tells, which it must not do as it likes.
pub(super) fn assert_other_epoch<T: std::fmt::Debug>(result: Result<T, CommitError>, found: i64, ours: i64) {
    match result {
        Err(CommitError::Fenced(shortfall)) => assert_eq!(shortfall, Shortfall::OtherEpoch { found, ours }),
        other => panic!("{other:?}"),
    }
}

/// A node commits nothing once another has taken over, whatever the commit number; the other does.
pub async fn an_owner_that_was_taken_over_from_commits_nothing<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut old = node.take_over().await;
    let mut new = Node::open(&bed).await.take_over().await;
    let late = old.try_commit(vec![applies(0, bed.write(1, 1)), dead(1)]).await;
    assert_other_epoch(late, new.checkpoint.epoch, old.checkpoint.epoch);
    assert_untouched(&bed, &node, &new.checkpoint).await;
    new.commit(vec![applies(0, bed.write(1, 2))]).await;
    assert_eq!(bed.read().await, [(1, 2)]);
}

/// Nor does it store where it caught up.
pub async fn an_owner_that_was_taken_over_from_stores_no_replay_position<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let mut old = node.take_over().await;
    let new = node.take_over().await;
    let late = old.committer.store_replay_position(Some(Position::new(3))).await;
    assert_other_epoch(late, new.checkpoint.epoch, old.checkpoint.epoch);
    assert_eq!(node.stored().await.checkpoint.replay, new.checkpoint.replay);
}

/// Nor event types.
pub async fn an_owner_that_was_taken_over_from_stores_no_event_types<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let mut old = node.take_over().await;
    let new = node.take_over().await;
    let late = old.committer.store_event_types(Some(&["Opened"])).await;
    assert_other_epoch(late, new.checkpoint.epoch, old.checkpoint.epoch);
    assert_eq!(node.stored().await.checkpoint.event_types, None);
}

/// Epochs rise with every take-over and never repeat, whoever takes over and whether something was committed.
pub async fn each_take_over_raises_the_epoch<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut last = 0;
    for position in 0..3 {
        for node in [&node, &Node::open(&bed).await] {
            let epoch = node.take_over().await.checkpoint.epoch;
            assert!(epoch > last, "{epoch} after {last}");
            last = epoch;
        }
        let mut holder = node.take_over().await;
        holder.commit(vec![applies(position, bed.write(1, 1))]).await;
        last = holder.checkpoint.epoch;
    }
}

/// A take-over that is dropped half-way has happened or has not, and the next one does.
pub async fn a_take_over_that_is_dropped_is_in_nobodys_way<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    for (position, polls) in (0..).zip(POLLS) {
        let source = super::node::source();
        drop(give_up_after(polls, node.target.take_over(node.request(None, &source))).await);
        // Whoever gave up does something else before the next try.
        sleep(WATCH / 20).await;
        let mut holder = node.take_over().await;
        holder.commit(vec![applies(position, bed.add(1, 1))]).await;
        assert_eq!(bed.read().await, [(1, position.cast_signed() + 1)], "dropped after {polls} polls");
    }
}
