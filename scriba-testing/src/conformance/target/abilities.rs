//! What is owed by a target, or on a store, that has an ability.

use std::time::Duration;

use scriba_core::checkpoint::{Checkpoint, Counts, Replay};
use scriba_core::source::SourceIdentity;
use scriba_core::target::{LeaseAnswer, Reset, ResetCounts, ResetRefused, StateRecord, StoredLease};
use scriba_core::{Position, RecordedEvent, State};
use tokio::time::{sleep, timeout};

use super::bed::{Hold, Statements, TargetBed};
use super::commit::assert_other_epoch;
use super::node::{Holder, LONG, Node, TYPES, applies, dead, dead_as, event, failure, open, owner, source};
use crate::conformance::wait::{WATCH, answer, in_time};

/// Takes over, commits an applied and a dead-lettered event, and stops.
async fn ran_and_stopped<B: TargetBed>(bed: &B, node: &Node<B>) -> Holder<B> {
    let mut holder = node.take_over_from(None, &source(), Some(&TYPES)).await;
    holder.commit(vec![applies(0, bed.write(1, 1)), dead(1)]).await;
    answer("store", holder.committer.store_replay_position(Some(Position::new(1)))).await;
    node.stop(holder.checkpoint.epoch).await;
    holder
}

async fn reset<B: TargetBed>(node: &Node<B>, reset: &Reset) -> ResetCounts {
    answer("reset", node.target.reset(&node.id, reset)).await
}

async fn refused<B: TargetBed>(node: &Node<B>) -> ResetRefused {
    match in_time("reset", node.target.reset(&node.id, &Reset::new().dead_letters())).await {
        Err(refused) => refused,
        Ok(counts) => panic!("reset: {counts:?}"),
    }
}

/// Nothing is left of the checkpoint but the epoch, and the counts that were cleared are told.
pub async fn a_reset_clears_the_checkpoint<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    ran_and_stopped(&bed, &node).await;
    let counts = reset(&node, &Reset::new()).await;
    let cleared = Counts { applied: 1, skipped: 0, dead_lettered: 1 };
    assert_eq!(counts, ResetCounts { cleared, dead_letters: 0 });
    let stored = node.stored().await;
    let epoch = stored.checkpoint.epoch;
    assert_eq!(stored.checkpoint, Checkpoint { epoch, ..Checkpoint::default() });
    assert_eq!(stored.state, StateRecord::new(State::Stopped));
    assert_eq!(bed.read().await, [(1, 1)], "the read model is left alone");
}

/// A reset raises the epoch as a take-over does.
pub async fn a_reset_raises_the_epoch<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let before = ran_and_stopped(&bed, &node).await.checkpoint.epoch;
    reset(&node, &Reset::new()).await;
    let after = node.stored().await.checkpoint.epoch;
    assert!(after > before, "{after} after {before}");
    assert!(node.take_over().await.checkpoint.epoch > after);
}

/// The next take-over finds the checkpoint as if it were new, once.
pub async fn after_a_reset_a_take_over_begins_anew<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    ran_and_stopped(&bed, &node).await;
    reset(&node, &Reset::new()).await;
    let elsewhere = SourceIdentity { kind: "other".to_owned(), fingerprint: "elsewhere".to_owned() };
    let anew = node.take_over_from(Some(41), &elsewhere, Some(&TYPES[1..])).await;
    assert!(anew.created);
    assert_eq!((anew.source, anew.checkpoint.replay), (elsewhere, Replay::Ongoing));
    assert_eq!(anew.checkpoint.watermark, Some(Position::new(41)));
    assert_eq!(anew.checkpoint.event_types.as_deref(), Some([TYPES[1].to_owned()].as_slice()));
    assert!(!node.take_over().await.created, "once");
}

/// An owner from before is fenced off, also where the number of its next commit is the first of the new run.
pub async fn an_owner_from_before_a_reset_commits_nothing<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let mut old = node.take_over().await;
    node.stop(old.checkpoint.epoch).await;
    reset(&node, &Reset::new()).await;
    let found = node.stored().await.checkpoint.epoch;
    let ours = old.checkpoint.epoch;
    assert_other_epoch(old.try_commit(vec![applies(0, bed.write(1, 1))]).await, found, ours);
    assert_eq!(bed.read().await, []);
}

/// Not while a node holds the lease, though its state says that it is stopped.
pub async fn a_reset_is_refused_while_a_node_holds_the_lease<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let holder = ran_and_stopped(&bed, &node).await;
    let mut control = node.control().await;
    answer("lease", control.lease(&node.id, &owner("a"), LONG)).await;
    match refused(&node).await {
        ResetRefused::Held { holder } => assert_eq!(holder, "node a"),
        other => panic!("{other}"),
    }
    assert_eq!(node.stored().await.checkpoint.epoch, holder.checkpoint.epoch, "nothing has changed");
    assert_eq!(node.letters_at().await, [1], "nothing has changed");
}

/// Not while a node stands by, which would take the lease at once.
pub async fn a_reset_is_refused_while_a_node_stands_by<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    ran_and_stopped(&bed, &node).await;
    let mut control = node.control().await;
    for name in ["a", "b"] {
        answer("lease", control.lease(&node.id, &owner(name), LONG)).await;
    }
    answer("release", control.release(&node.id, &owner("a"))).await;
    match refused(&node).await {
        ResetRefused::StoodBy { nodes } => assert_eq!(nodes, ["node b"]),
        other => panic!("{other}"),
    }
}

/// Not where there is no lease and the state says that it runs; what never ran cannot be reset either.
pub async fn a_reset_is_refused_while_it_may_run_without_a_lease<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    assert!(matches!(refused(&node).await, ResetRefused::NoCheckpoint));
    let epoch = node.take_over().await.checkpoint.epoch;
    let mut control = node.control().await;
    answer("store_state", control.store_state(&node.id, epoch, &StateRecord::new(State::Running))).await;
    assert!(matches!(refused(&node).await, ResetRefused::MayRun { state: State::Running }));
    assert_eq!(node.stored().await.lease, StoredLease::None);
}

/// Dead letters stay, or are deleted and counted; those of another version stay in any case.
pub async fn a_reset_deletes_dead_letters_only_where_it_says_so<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let other = node.version(2);
    for node in [&node, &other] {
        ran_and_stopped(&bed, node).await;
    }
    reset(&node, &Reset::new()).await;
    assert_eq!(node.letters_at().await, [1]);
    assert_eq!(reset(&node, &Reset::new().dead_letters()).await.dead_letters, 1);
    assert_eq!(node.letters_at().await, [0; 0]);
    assert_eq!(other.letters_at().await, [1]);
}

/// Statements empty the read model.
pub async fn a_reset_runs_its_statements<B: Statements>() {
    let (bed, node) = open::<B>().await;
    ran_and_stopped(&bed, &node).await;
    reset(&node, &Reset::new().statement(bed.empties())).await;
    assert_eq!(bed.read().await, []);
}

/// They run in the transaction of the reset: all of it happens, or nothing.
pub async fn a_reset_whose_statement_fails_changes_nothing<B: Statements>() {
    let (bed, node) = open::<B>().await;
    let holder = ran_and_stopped(&bed, &node).await;
    let statements = Reset::new().dead_letters().statement(bed.empties()).statement(bed.fails());
    let failed = in_time("reset", node.target.reset(&node.id, &statements)).await;
    assert!(matches!(failed, Err(ResetRefused::Target(_))), "{failed:?}");
    assert_eq!(bed.read().await, [(1, 1)]);
    assert_eq!(node.letters_at().await, [1]);
    let stored = node.stored().await.checkpoint;
    assert_eq!((stored.epoch, stored.watermark), (holder.checkpoint.epoch, holder.checkpoint.watermark));
}

/// A take-over waits for what becomes of a commit, and reads that.
pub async fn a_take_over_waits_for_a_commit_under_way<B: Hold>() {
    let (bed, node) = open::<B>().await;
    let mut old = node.take_over().await;
    let (op, held) = bed.hold().await;
    let entries = vec![applies(0, bed.write(1, 1)), applies(1, op)];
    let committing = tokio::spawn(async move { old.try_commit(entries).await.map(drop) });
    sleep(WATCH).await;
    assert!(!committing.is_finished(), "the bed holds nothing up");
    let next = node.take_over();
    tokio::pin!(next);
    if let Ok(next) = timeout(WATCH, &mut next).await {
        panic!("taken over beside a commit under way: {:?}", next.checkpoint);
    }
    let (next, committed, ()) = tokio::join!(next, committing, async {
        sleep(Duration::from_millis(1)).await;
        bed.let_go(held).await;
    });
    assert!(matches!(committed, Ok(Ok(()))), "commit: {committed:?}");
    assert_eq!((next.checkpoint.watermark, next.checkpoint.commit_no), (Some(Position::new(1)), 1));
}

/// Renewals and states wait for no commit, however long it takes.
pub async fn a_lease_is_renewed_while_a_commit_is_under_way<B: Hold>() {
    let (bed, node) = open::<B>().await;
    let mut holder = node.take_over().await;
    let epoch = holder.checkpoint.epoch;
    let mut control = node.control().await;
    let (op, held) = bed.hold().await;
    let entries = vec![applies(0, op)];
    let committing = tokio::spawn(async move { holder.try_commit(entries).await.map(drop) });
    sleep(WATCH).await;
    let renewing = async {
        let lease = answer("lease", control.lease(&node.id, &owner("a"), LONG)).await;
        assert_eq!(lease, LeaseAnswer::Held);
        answer("store_state", control.store_state(&node.id, epoch, &StateRecord::new(State::Running))).await;
    };
    assert!(timeout(5 * WATCH, renewing).await.is_ok(), "it waits for the commit");
    assert!(!committing.is_finished(), "the bed holds nothing up");
    bed.let_go(held).await;
    assert!(in_time("commit", committing).await.is_ok_and(|committed| committed.is_ok()));
}

/// Ids, types and failures with a NUL come back.
pub async fn texts_with_a_nul_come_back<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let text = "a\0b";
    let event = RecordedEvent { stream_id: text.into(), id: text.into(), event_type: text.into(), ..event(0) };
    node.take_over().await.commit(vec![dead_as(event, failure(text))]).await;
    let letters = node.all_letters().await;
    let [letter] = letters.as_slice() else { panic!("{letters:?}") };
    assert!(letter.stream_id == text && letter.event_id == text && letter.event_type == text, "{letter:?}");
    assert_eq!(letter.failure.kind, text);
}
