//! A source that lets one subscriber in: who has the place has the projection.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use scriba_core::source::{SourceError, SourceIdentity, SourceInspector, SubscribeRequest, Subscription};
use scriba_core::target::Tables as _;
use scriba_core::{Lease, Position, Role, Scriba, Source, State};
use scriba_testing::{MemorySource, MemoryTarget};

use super::common::{Act, Fail, Script, append, applied, eventually, id, options, start, until};

/// A standby asks every two seconds or so.
const BOUND: Duration = Duration::from_secs(5);
const LONG_LEASE: Lease = Lease::For(Duration::from_mins(10));

fn bed() -> (MemorySource, MemoryTarget<u64>) {
    (MemorySource::new().admits_one_subscriber(), MemoryTarget::new())
}

fn role(node: &Scriba) -> Role {
    node.info(id()).unwrap().role
}

fn state(node: &Scriba) -> State {
    node.info(id()).unwrap().state
}

async fn two_nodes(source: &MemorySource, target: &MemoryTarget<u64>) -> (Scriba, Scriba) {
    let (active, _) = start(source, target, options().lease(LONG_LEASE)).await;
    until(&active, append(source, "a", &Act::default())).await;
    let (standby, _) = start(source, target, options().lease(LONG_LEASE)).await;
    eventually("the second stands by", || role(&standby) == Role::Standby && state(&standby) == State::Running).await;
    (active, standby)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_is_let_in_takes_the_lease_of_a_node_that_died_long_before_it_lapses() {
    let (source, target) = bed();
    let (active, standby) = two_nodes(&source, &target).await;
    let died = Instant::now();
    drop(active);
    until(&standby, append(&source, "a", &Act::default())).await;
    assert!(died.elapsed() < BOUND, "{:?}", died.elapsed());
    assert_eq!((role(&standby), state(&standby)), (Role::Active, State::Running));
    assert_eq!(applied(&target), [0, 1]);
    // The lease is its own now, and is given up with the place.
    let (third, _) = start(&source, &target, options().lease(LONG_LEASE)).await;
    eventually("the third stands by", || role(&third) == Role::Standby).await;
    standby.stop(id()).await.expect("it stops");
    until(&third, append(&source, "a", &Act::default())).await;
    assert_eq!(applied(&target), [0, 1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_is_not_let_in_leaves_epoch_and_lease_alone() {
    let (source, target) = bed();
    let (active, standby) = two_nodes(&source, &target).await;
    let epoch = target.checkpoint(id()).unwrap().epoch;
    // Long enough for it to ask twice.
    tokio::time::sleep(Duration::from_secs(5)).await;
    until(&active, append(&source, "a", &Act::default())).await;
    assert_eq!(target.checkpoint(id()).unwrap().epoch, epoch);
    assert_eq!((role(&active), role(&standby)), (Role::Active, Role::Standby));
    let info = standby.info(id()).unwrap();
    assert!(info.is_live() && !info.is_ready() && info.holder.is_some(), "{info:#?}");
    standby.stop(id()).await.expect("a standby stops at once");
    assert_eq!(state(&standby), State::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_place_was_given_to_another_stands_by_and_does_not_halt() {
    let (source, target) = bed();
    let (first, second) = two_nodes(&source, &target).await;
    let before = target.checkpoint(id()).unwrap().epoch;
    // The place is free as the server sees it, and the first comes back for it only once the pipeline has noticed.
    for round in 1..=40 {
        source.cut();
        let position = append(&source, "a", &Act::default());
        eventually("it goes on", || target.checkpoint(id()).unwrap().watermark == Some(position)).await;
        assert_eq!(applied(&target), (0..=round).collect::<Vec<_>>());
        if role(&second) == Role::Active {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    eventually("one has it, the other stands by", || {
        let roles = [role(&first), role(&second)];
        roles == [Role::Active, Role::Standby] || roles == [Role::Standby, Role::Active]
    })
    .await;
    assert!(target.checkpoint(id()).unwrap().epoch > before);
    assert!(state(&first) == State::Running && state(&second) == State::Running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_node_that_loses_its_place_keeps_the_projection() {
    let (source, target) = bed();
    let (active, standby) = two_nodes(&source, &target).await;
    active.pause(id()).await.expect("it pauses");
    // Until its reader asks for nothing, and so does not notice.
    tokio::time::sleep(Duration::from_millis(200)).await;
    source.cut();
    append(&source, "a", &Act::default());
    tokio::time::sleep(BOUND).await;
    assert_eq!(applied(&target), [0], "an operator wanted it paused");
    assert_eq!((role(&standby), state(&active)), (Role::Standby, State::Paused));
    active.resume(id()).await.expect("it resumes");
    eventually("it goes on", || applied(&target) == [0, 1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_halted_node_keeps_the_projection_until_it_is_stopped() {
    let (source, target) = bed();
    let halting = || options().lease(LONG_LEASE).on_poison(scriba_core::OnPoison::Halt);
    let (active, _) = start(&source, &target, halting()).await;
    append(&source, "a", &Act { fail: 9, how: Fail::Permanent, ..Act::default() });
    eventually("it halts", || state(&active) == State::Halted).await;
    let (standby, _) = start(&source, &target, halting()).await;
    tokio::time::sleep(BOUND).await;
    assert_eq!((role(&standby), state(&standby)), (Role::Standby, State::Running));
    active.stop(id()).await.expect("it stops");
    eventually("the other meets the same event", || state(&standby) == State::Halted).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_deleted_is_made_again_from_the_watermark() {
    let (source, target) = bed();
    let (active, standby) = two_nodes(&source, &target).await;
    for last in 1..=5 {
        source.delete_group(id());
        let position = append(&source, "a", &Act::default());
        until(&active, position).await;
        assert_eq!(applied(&target), (0..=last).collect::<Vec<_>>());
    }
    assert_eq!(role(&standby), Role::Standby);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_lease_the_place_alone_decides() {
    let (source, target) = bed();
    let (active, _) = start(&source, &target, options().lease(Lease::Off)).await;
    until(&active, append(&source, "a", &Act::default())).await;
    let epoch = target.checkpoint(id()).unwrap().epoch;
    let (standby, _) = start(&source, &target, options().lease(Lease::Off)).await;
    eventually("the second stands by", || role(&standby) == Role::Standby).await;
    assert_eq!(target.checkpoint(id()).unwrap().epoch, epoch, "a standby never raises the epoch");
    active.stop(id()).await.expect("it stops");
    until(&standby, append(&source, "a", &Act::default())).await;
    assert_eq!(applied(&target), [0, 1]);
}

/// A14.
#[tokio::test(flavor = "multi_thread")]
async fn with_the_place_taken_by_somebody_else_it_stands_by_visibly_and_takes_nothing_over() {
    let (source, target) = bed();
    let (first, _) = start(&source, &target, options()).await;
    until(&first, append(&source, "a", &Act::default())).await;
    first.stop(id()).await.expect("it stops");
    let epoch = target.checkpoint(id()).unwrap().epoch;
    let place = source.claim(&id(), 1).await.expect("it is free").expect("there is one");
    assert!(matches!(source.claim(&id(), 1).await.map(drop), Err(SourceError::Held { .. })));
    let (scriba, _) = start(&source, &target, options()).await;
    eventually("it stands by", || role(&scriba) == Role::Standby && state(&scriba) == State::Running).await;
    let seen = Instant::now();
    while seen.elapsed() < Duration::from_secs(3) {
        assert_eq!(role(&scriba), Role::Standby, "it does not flap");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(scriba.info(id()).unwrap().holder.is_some_and(|holder| holder.contains("subscriber")));
    assert_eq!(target.checkpoint(id()).unwrap().epoch, epoch);
    drop(place);
    until(&scriba, append(&source, "a", &Act::default())).await;
    assert_eq!(applied(&target), [0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn three_nodes_whose_places_are_lost_again_and_again_apply_every_event_once_in_order() {
    let (source, target) = bed();
    let options = || options().lease(Lease::For(Duration::from_secs(2))).batch_events(7);
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(start(&source, &target, options()).await.0);
    }
    let mut last = Position::new(0);
    for round in 0..60_u64 {
        for n in 0..20 {
            last = append(&source, &format!("s{}", n % 7), &Act { wait: 300, ..Act::default() });
        }
        if round % 3 == 0 {
            source.cut();
        }
        if round == 20 || round == 40 {
            nodes.remove(0);
            nodes.push(start(&source, &target, options()).await.0);
        }
        tokio::time::sleep(Duration::from_millis(fastrand::u64(20..150))).await;
    }
    eventually("all of it is there", || target.checkpoint(id()).unwrap().watermark == Some(last)).await;
    assert_eq!(applied(&target), (0..=last.get()).collect::<Vec<_>>());
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_lasts_for_other_nodes_while_the_pipeline_of_its_node_is_brought_back() {
    let (source, target) = bed();
    let (active, standby) = two_nodes(&source, &target).await;
    active.pause(id()).await.expect("it pauses");
    // A page on its way meets the outage, and the pipeline ends.
    source.unavailable_for(Duration::from_secs(8));
    append(&source, "a", &Act::default());
    for _ in 0..160 {
        let stored = target.stored(&id()).await.unwrap().unwrap();
        assert_eq!(stored.state.state, State::Paused, "other nodes read it");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::time::sleep(BOUND).await;
    assert_eq!((role(&standby), applied(&target)), (Role::Standby, vec![0]));
    eventually("it is paused again", || state(&active) == State::Paused).await;
    active.resume(id()).await.expect("it resumes");
    eventually("it goes on", || applied(&target) == [0, 1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_has_the_lease_and_not_the_source_is_no_standby() {
    let (source, target) = bed();
    let (active, standby) = two_nodes(&source, &target).await;
    source.unavailable_for(Duration::from_secs(6));
    active.stop(id()).await.expect("it stops");
    eventually("it has the lease, and is degraded", || {
        let info = standby.info(id()).unwrap();
        info.role == Role::Active && info.state == State::Initializing && info.degraded_since.is_some()
    })
    .await;
    until(&standby, append(&source, "a", &Act::default())).await;
    assert_eq!(applied(&target), [0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_cannot_ask_the_source_stands_by_for_the_one_that_has_the_lease() {
    let (source, target) = bed();
    let (active, _) = start(&source, &target, options().lease(LONG_LEASE)).await;
    until(&active, append(&source, "a", &Act::default())).await;
    source.unavailable_for(Duration::from_secs(3));
    let asked = Instant::now();
    let (standby, _) = start(&source, &target, options().lease(LONG_LEASE)).await;
    eventually("it stands by", || role(&standby) == Role::Standby && state(&standby) == State::Running).await;
    assert!(asked.elapsed() < Duration::from_secs(2), "the source was not there yet");
    assert!(standby.info(id()).unwrap().holder.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_on_another_store_halts_and_takes_nothing() {
    let (source, target) = bed();
    let (active, _) = start(&source, &target, options().lease(LONG_LEASE)).await;
    until(&active, append(&source, "a", &Act::default())).await;
    let other = MemorySource::new().admits_one_subscriber();
    // There is a place to be had.
    let elsewhere = MemoryTarget::new();
    let (scriba, _) = start(&other, &elsewhere, options()).await;
    until(&scriba, append(&other, "a", &Act::default())).await;
    scriba.stop(id()).await.expect("it stops");
    let epoch = target.checkpoint(id()).unwrap().epoch;
    let (wrong, _) = start(&other, &target, options().lease(LONG_LEASE)).await;
    eventually("it halts", || state(&wrong) == State::Halted).await;
    assert!(wrong.info(id()).unwrap().halt_reason.is_some_and(|reason| reason.message.contains("memory-")));
    until(&active, append(&source, "a", &Act::default())).await;
    assert_eq!(target.checkpoint(id()).unwrap().epoch, epoch);
}

/// A source that lets anybody in and keeps no position.
struct LetsAnybodyIn(MemorySource);

#[async_trait]
impl Source for LetsAnybodyIn {
    async fn check(&self) -> Result<(), SourceError> {
        self.0.check().await
    }

    async fn identity(&self) -> Result<SourceIdentity, SourceError> {
        self.0.identity().await
    }

    async fn subscribe(&self, request: SubscribeRequest) -> Result<Box<dyn Subscription>, SourceError> {
        self.0.subscribe(request).await
    }

    async fn inspector(&self) -> Result<Box<dyn SourceInspector>, SourceError> {
        self.0.inspector().await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_is_let_in_takes_nothing_from_a_node_whose_source_has_no_places() {
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let with_places = MemorySource::new().admits_one_subscriber();
    for of in [&source, &with_places] {
        of.tell_identity("memory", "the same log");
    }
    let (before, _) = start(&with_places, &MemoryTarget::new(), options()).await;
    until(&before, append(&with_places, "a", &Act::default())).await;
    before.stop(id()).await.expect("it stops, and its group is left behind");

    let active = Scriba::new();
    let options = || options().lease(LONG_LEASE);
    active.start(Script::default(), LetsAnybodyIn(source.clone()), target.clone(), options()).await.expect("it starts");
    until(&active, append(&source, "a", &Act::default())).await;
    let epoch = target.checkpoint(id()).unwrap().epoch;
    let (standby, _) = start(&with_places, &target, options()).await;
    eventually("it stands by", || role(&standby) == Role::Standby).await;
    tokio::time::sleep(BOUND).await;
    assert_eq!((role(&standby), target.checkpoint(id()).unwrap().epoch), (Role::Standby, epoch));
}

#[tokio::test(flavor = "multi_thread")]
async fn skips_are_committed_when_nothing_comes_any_more_although_the_source_has_not_caught_up() {
    let (source, target) = bed();
    let skipped = append(&source, "a", &Act { skip: true, ..Act::default() });
    // Nothing above an append that is open is delivered: as with a server that waits for acks, there is more, and it does not come.
    let open = source.hold_append("b", "Act", "{}");
    append(&source, "a", &Act::default());
    let (scriba, _) = start(&source, &target, options()).await;
    eventually("it runs", || state(&scriba) == State::Running).await;
    let started = Instant::now();
    until(&scriba, skipped).await;
    assert!(started.elapsed() < Duration::from_millis(500), "not by the clock: {:?}", started.elapsed());
    drop(open);
}
