//! What leases and states owe.

use std::time::Duration;

use chrono::{TimeZone, Utc};
use scriba_core::target::{LeaseAnswer, StateRecord, StoredLease, TakeOverError};
use scriba_core::{FailureClass, Position, State};
use tokio::time::sleep;

use super::bed::TargetBed;
use super::node::{LONG, Node, open, owner};
use crate::conformance::wait::answer;

/// A lease that lapses while a rule runs.
const SHORT: Duration = Duration::from_millis(100);

/// Asks for the lease, and answers how long another still holds it.
async fn asked<B: TargetBed>(node: &Node<B>, name: &str, ttl: Duration) -> Option<(String, Duration)> {
    let mut control = node.control().await;
    match answer("lease", control.lease(&node.id, &owner(name), ttl)).await {
        LeaseAnswer::Held => None,
        LeaseAnswer::HeldBy { holder, expires_in } => Some((holder, expires_in)),
    }
}

async fn held<B: TargetBed>(node: &Node<B>, name: &str, ttl: Duration) {
    assert_eq!(asked(node, name, ttl).await, None, "held by another");
}

async fn released<B: TargetBed>(node: &Node<B>, name: &str) {
    let mut control = node.control().await;
    answer("release", control.release(&node.id, &owner(name))).await;
}

/// Who else asks is told who holds it and how long still; each version has a lease of its own.
pub async fn a_lease_has_one_holder<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    held(&node, "a", LONG).await;
    let (holder, left) = asked(&Node::open(&bed).await, "b", LONG).await.expect("two holders");
    assert_eq!(holder, "node a");
    assert!(left <= LONG && left > LONG / 2, "{left:?} of {LONG:?}");
    held(&node.version(2), "b", LONG).await;
}

/// Its holder has the lease run on from now.
pub async fn its_own_lease_is_renewed<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    held(&node, "a", LONG / 4).await;
    held(&node, "a", LONG).await;
    let (_, left) = asked(&node, "b", LONG).await.expect("two holders");
    assert!(left > LONG / 2, "{left:?} of {LONG:?}");
}

/// A released lease is free, and only its holder releases it.
pub async fn a_lease_is_released_by_its_holder_only<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    held(&node, "a", LONG).await;
    released(&node, "b").await;
    assert!(asked(&node, "c", LONG).await.is_some(), "released by another");
    released(&node, "a").await;
    held(&node, "b", LONG).await;
}

/// A lease that was not renewed is another's to take, and the tables say that it lapsed.
pub async fn a_lease_lapses<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    held(&node, "a", SHORT).await;
    node.take_over().await;
    sleep(2 * SHORT).await;
    assert_eq!(node.stored().await.lease, StoredLease::Lapsed { holder: "node a".to_owned() });
    held(&node, "b", LONG).await;
    assert_eq!(node.stored().await.lease, StoredLease::Held { holder: "node b".to_owned() });
}

/// Whoever held it, a lease that is seized is the seizer's, who no longer stands by.
pub async fn a_lease_that_is_seized_is_the_seizers<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    held(&node, "a", LONG).await;
    node.take_over().await;
    assert!(asked(&node, "b", LONG).await.is_some());
    answer("seize", node.control().await.seize(&node.id, &owner("b"), LONG)).await;
    assert!(asked(&node, "a", LONG).await.is_some(), "the former holder still has it");
    held(&node, "b", LONG).await;
    assert!(!node.stored().await.standbys.contains(&"node b".to_owned()), "it has what it stood by for");
}

/// Who does not hold the lease is told who does, and raises no epoch.
pub async fn a_take_over_needs_the_lease<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    held(&node, "a", LONG).await;
    let first = answer("take over", node.take_over_as(&owner("a"), LONG)).await;
    match node.take_over_as(&owner("b"), LONG).await {
        Err(TakeOverError::Held { holder }) => assert_eq!(holder, "node a"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("taken over without the lease"),
    }
    assert_eq!(node.stored().await.checkpoint.epoch, first.checkpoint.epoch);
}

/// A take-over lets the lease of its owner run on.
pub async fn a_take_over_renews_the_lease<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    held(&node, "a", LONG / 4).await;
    answer("take over", node.take_over_as(&owner("a"), LONG)).await;
    let (_, left) = asked(&node, "b", LONG).await.expect("two holders");
    assert!(left > LONG / 2, "{left:?} of {LONG:?}");
}

/// A take-over that comes after the release of the lease does not take it again.
pub async fn a_take_over_does_not_take_a_released_lease<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    held(&node, "a", LONG).await;
    let first = answer("take over", node.take_over_as(&owner("a"), LONG)).await;
    released(&node, "a").await;
    assert!(matches!(node.take_over_as(&owner("a"), LONG).await, Err(TakeOverError::Held { .. })));
    let stored = node.stored().await;
    assert_eq!((stored.checkpoint.epoch, stored.lease), (first.checkpoint.epoch, StoredLease::None));
}

/// A node that asks for a lease in vain stands by, until it gets the lease or gives up.
pub async fn who_asks_for_a_lease_in_vain_stands_by<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    node.take_over().await;
    held(&node, "a", LONG).await;
    for name in ["b", "c"] {
        assert!(asked(&node, name, LONG).await.is_some(), "two holders");
    }
    let mut standbys = node.stored().await.standbys;
    standbys.sort_unstable();
    assert_eq!(standbys, ["node b", "node c"]);
    released(&node, "c").await;
    assert_eq!(node.stored().await.standbys, ["node b"]);
    released(&node, "a").await;
    held(&node, "b", LONG).await;
    assert_eq!(node.stored().await.standbys, [""; 0]);
}

fn halted() -> StateRecord {
    StateRecord {
        halt_reason: Some("no such column".to_owned()),
        halt_class: Some(FailureClass::Structural),
        halt_code: Some("42703".to_owned()),
        degraded_since: Utc.timestamp_opt(1_700_000_000, 0).single(),
        last_error: Some("it's broken".to_owned()),
        head: Some(Position::new(0)),
        source_keeps_position: true,
        ..StateRecord::new(State::Halted)
    }
}

/// A state comes back as it was written, to any node.
pub async fn a_state_is_read_by_any_node<B: TargetBed>() {
    let (bed, node) = open::<B>().await;
    let epoch = node.take_over().await.checkpoint.epoch;
    let mut control = node.control().await;
    for state in [halted(), StateRecord::new(State::Running)] {
        assert!(answer("store_state", control.store_state(&node.id, epoch, &state)).await, "it was not stored");
        assert_eq!(Node::open(&bed).await.stored().await.state, state);
    }
}

/// A node that was taken over from is told so and writes no state.
pub async fn a_state_is_stored_under_the_present_epoch_only<B: TargetBed>() {
    let (_bed, node) = open::<B>().await;
    let old = node.take_over().await.checkpoint.epoch;
    let new = node.take_over().await.checkpoint.epoch;
    let (mut control, running) = (node.control().await, StateRecord::new(State::Running));
    assert!(answer("store_state", control.store_state(&node.id, new, &running)).await, "it was not stored");
    for epoch in [old, new + 1] {
        let stored = answer("store_state", control.store_state(&node.id, epoch, &halted())).await;
        assert!(!stored, "under epoch {epoch}, which is not {new}");
    }
    assert_eq!(node.stored().await.state, running);
}
