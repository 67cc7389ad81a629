use std::time::Duration;

use scriba_core::checkpoint::{Checkpoint, Counts, LastEvent, Replay};
use scriba_core::dead_letter::Failure;
use scriba_core::source::SourceIdentity;
use scriba_core::target::{
    Batch, CommitError, DeadLetterFilter, Entry, LeaseAnswer, Owner, Shortfall, StoredLease, Tables, TakeOver,
    TakeOverError, TakenOver, Target as _, Write,
};
use scriba_core::{EventMeta, FailureClass, Outcome, ProjectionId};
use scriba_testing::{MemorySource, MemoryTarget, TargetFault, TargetStep};
use tokio::time::timeout;

use crate::{SHORT, at, filled};

type Operations = MemoryTarget<&'static str>;

fn id() -> ProjectionId {
    ProjectionId::from("counts")
}

fn owner(name: &str) -> Owner {
    Owner { id: name.to_owned(), description: format!("node {name}") }
}

async fn take_over(target: &Operations, owner: Option<&Owner>) -> Result<TakenOver<&'static str>, TakeOverError> {
    let source = SourceIdentity { kind: "memory".to_owned(), fingerprint: "test".to_owned() };
    let lease = Duration::from_secs(30);
    let request = TakeOver { id: &id(), owner, lease, initial: None, source: &source, event_types: Some(&["Counted"]) };
    target.take_over(request).await
}

fn event(position: u64) -> EventMeta {
    EventMeta::new(filled(MemorySource::new(), position + 1).events().pop().unwrap(), false)
}

fn applies(position: u64, op: &'static str) -> Entry<&'static str> {
    Entry { meta: event(position), write: Write::Apply(Outcome::from(op)) }
}

fn fails(position: u64, kind: &str) -> Entry<&'static str> {
    let failure = Failure { kind: kind.to_owned(), message: "no".to_owned(), detail: String::new(), attempts: 3 };
    Entry { meta: event(position), write: Write::DeadLetter(failure) }
}

/// The batch that follows a checkpoint, with its counts right.
fn batch(checkpoint: &Checkpoint, entries: Vec<Entry<&'static str>>) -> Batch<&'static str> {
    let last = &entries.last().unwrap().meta;
    let last = LastEvent { position: last.position, id: last.id.clone() };
    let dead_lettered = entries.iter().filter(|entry| entry.dead_letter().is_some()).count() as u64;
    let counts = Counts { applied: entries.len() as u64 - dead_lettered, skipped: 0, dead_lettered };
    Batch { id: id(), advance: checkpoint.advance(last.position, Some(last), counts), entries }
}

async fn commit(taken: &mut TakenOver<&'static str>, entries: Vec<Entry<&'static str>>) -> Result<(), CommitError> {
    let batch = batch(&taken.checkpoint, entries);
    taken.committer.commit(&batch).await?;
    taken.checkpoint.committed(&batch.advance);
    Ok(())
}

#[tokio::test]
async fn a_commit_leaves_operations_dead_letters_and_checkpoint_and_a_take_over_reads_them() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    assert!(taken.created);
    assert_eq!((taken.checkpoint.epoch, taken.checkpoint.watermark), (1, None));
    commit(&mut taken, vec![applies(0, "a"), fails(1, "panic"), applies(2, "c")]).await.unwrap();
    commit(&mut taken, vec![fails(3, "decode"), fails(4, "panic")]).await.unwrap();

    assert_eq!(target.applied("counts"), [(at(0), "a"), (at(2), "c")]);
    assert_eq!(target.commits("counts"), 2);
    let again = take_over(&target, None).await.unwrap();
    assert!(!again.created);
    assert_eq!(again.checkpoint, Checkpoint { epoch: 2, ..taken.checkpoint });
    assert_eq!(again.checkpoint.counts, Counts { applied: 2, skipped: 0, dead_lettered: 3 });
    assert_eq!(again.checkpoint.event_types, Some(vec!["Counted".to_owned()]));
    let snapshot = target.snapshot("counts").unwrap();
    assert_eq!(snapshot.dead_letters.len(), 3);
    assert_eq!(snapshot.checkpoint.watermark, Some(at(4)));
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn dead_letters_are_filtered_paged_and_counted() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    let entries = vec![fails(0, "panic"), fails(1, "decode"), fails(2, "panic"), fails(3, "panic")];
    commit(&mut taken, entries).await.unwrap();
    let tables: &dyn Tables = &target;
    let list = async |filter: DeadLetterFilter| {
        let letters = tables.dead_letters(&id(), &filter).await.unwrap();
        letters.iter().map(|letter| letter.position.get()).collect::<Vec<_>>()
    };
    let filter = DeadLetterFilter::default;
    assert_eq!(list(filter()).await, [0, 1, 2, 3]);
    assert_eq!(list(DeadLetterFilter { kind: Some("panic".to_owned()), ..filter() }).await, [0, 2, 3]);
    assert_eq!(list(DeadLetterFilter { stream_id: Some("stream-0".into()), ..filter() }).await, [0, 3]);
    let range = DeadLetterFilter { from_position: Some(at(1)), to_position: Some(at(2)), ..filter() };
    assert_eq!(list(range).await, [1, 2]);
    let newest = DeadLetterFilter { descending: true, limit: Some(2), ..filter() };
    assert_eq!(list(newest.clone()).await, [3, 2]);
    let third = target.dead_letters("counts")[2].id;
    assert_eq!(list(DeadLetterFilter { after_id: Some(third), ..newest }).await, [1, 0]);
    let stats = tables.dead_letter_stats(&id()).await.unwrap();
    assert_eq!((stats.total, stats.by_kind), (4, vec![("panic".to_owned(), 3), ("decode".to_owned(), 1)]));
}

#[tokio::test]
async fn an_owner_that_was_taken_over_from_writes_nothing() {
    let target = Operations::new();
    let mut first = take_over(&target, None).await.unwrap();
    let mut second = take_over(&target, None).await.unwrap();
    let error = commit(&mut first, vec![applies(0, "first")]).await.unwrap_err();
    assert!(matches!(error, CommitError::Fenced(Shortfall::OtherEpoch { found: 2, ours: 1 })), "{error}");
    assert!(target.applied("counts").is_empty());
    commit(&mut second, vec![applies(0, "second")]).await.unwrap();
    assert_eq!(target.applied("counts"), [(at(0), "second")]);
    let error = first.committer.store_replay_position(Some(at(0))).await.unwrap_err();
    assert!(matches!(error, CommitError::Fenced(Shortfall::OtherEpoch { .. })), "{error}");
}

#[tokio::test]
async fn a_checkpoint_changed_behind_the_engines_back_is_met_by_the_exact_number() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
    target.edit_checkpoint("counts", |checkpoint| checkpoint.commit_no = 0);
    let error = commit(&mut taken, vec![applies(1, "b")]).await.unwrap_err();
    assert!(
        matches!(error, CommitError::Fenced(Shortfall::OtherCommit { found: 0, expected: 1, epoch: 1 })),
        "{error}"
    );
    let mut taken = take_over(&target, None).await.unwrap();
    target.remove("counts");
    let error = commit(&mut taken, vec![applies(1, "b")]).await.unwrap_err();
    assert!(matches!(error, CommitError::Fenced(Shortfall::Missing)), "{error}");
}

#[tokio::test]
async fn a_failure_at_any_step_leaves_nothing_and_says_its_class_and_event() {
    let classes = [
        (TargetFault::Transient, FailureClass::TransientServer),
        (TargetFault::Structural, FailureClass::Structural),
        (TargetFault::Integrity, FailureClass::Integrity),
    ];
    let clean = Operations::new();
    let mut taken = take_over(&clean, None).await.unwrap();
    let before = clean.steps();
    commit(&mut taken, vec![applies(0, "a"), fails(1, "panic")]).await.unwrap();
    let steps = clean.steps() - before;
    assert_eq!(steps, 5, "begin, checkpoint, two events, commit");
    for (fault, class) in classes {
        for step in 1..=steps {
            let target = Operations::new();
            let mut taken = take_over(&target, None).await.unwrap();
            target.fail_any(step, fault);
            let error = commit(&mut taken, vec![applies(0, "a"), fails(1, "panic")]).await.unwrap_err();
            let CommitError::Failed(error) = error else { panic!("step {step}: {error}") };
            assert_eq!(error.class, class);
            let event = step.checked_sub(3).filter(|event| *event < 2);
            assert_eq!(error.position, event.map(at), "step {step}");
            let snapshot = target.snapshot("counts").unwrap();
            assert!(snapshot.applied.is_empty() && snapshot.dead_letters.is_empty());
            assert_eq!(snapshot.checkpoint.commit_no, 0);
        }
    }
}

#[tokio::test]
async fn an_ambiguous_commit_is_durable_or_not_as_asked() {
    for durable in [false, true] {
        let target = Operations::new();
        let mut taken = take_over(&target, None).await.unwrap();
        target.fail(TargetStep::Commit, 2, TargetFault::Ambiguous { durable });
        commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
        let error = commit(&mut taken, vec![applies(1, "b")]).await.unwrap_err();
        assert!(matches!(error, CommitError::Ambiguous(_)), "{error}");
        assert_eq!(target.commits("counts"), 1 + u64::from(durable));
        assert_eq!(target.violations(), Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_hangs_is_fenced_off_by_a_take_over_and_dropped_leaves_nothing() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    target.fail(TargetStep::Commit, 1, TargetFault::Hang);
    let hung = tokio::spawn(async move { commit(&mut taken, vec![applies(0, "a")]).await });
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert!(!hung.is_finished());
    let mut next = take_over(&target, None).await.unwrap();
    target.release_hung();
    let error = hung.await.unwrap().unwrap_err();
    assert!(matches!(error, CommitError::Fenced(Shortfall::OtherEpoch { .. })), "{error}");

    target.fail(TargetStep::Apply, 1, TargetFault::Hang);
    assert!(timeout(SHORT, commit(&mut next, vec![applies(0, "a")])).await.is_err());
    assert_eq!(target.commits("counts"), 0);
}

#[tokio::test]
async fn in_an_outage_every_call_fails_as_transient() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    let mut control = target.control().await.unwrap();
    target.outage(true);
    let transient = |class| assert_eq!(class, FailureClass::TransientServer);
    let Err(TakeOverError::Target(error)) = take_over(&target, None).await else { panic!("taken over") };
    transient(error.class);
    let CommitError::Failed(error) = commit(&mut taken, vec![applies(0, "a")]).await.unwrap_err() else { panic!() };
    transient(error.class);
    transient(target.stored(&id()).await.unwrap_err().class);
    transient(control.lease(&id(), &owner("a"), SHORT).await.unwrap_err().class);
    target.outage(false);
    assert!(take_over(&target, None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_lease_keeps_others_out_until_it_lapses_or_is_released() {
    let target = Operations::new();
    let (a, b) = (owner("a"), owner("b"));
    let ttl = Duration::from_secs(10);
    let mut control = target.control().await.unwrap();
    assert_eq!(control.lease(&id(), &a, ttl).await.unwrap(), LeaseAnswer::Held);
    let answer = control.lease(&id(), &b, ttl).await.unwrap();
    assert_eq!(answer, LeaseAnswer::HeldBy { holder: "node a".to_owned(), expires_in: ttl });
    let Err(TakeOverError::Held { holder }) = take_over(&target, Some(&b)).await else { panic!("taken over") };
    assert_eq!(holder, "node a");
    take_over(&target, Some(&a)).await.unwrap();
    let stored = async || target.stored(&id()).await.unwrap().unwrap().lease;
    assert_eq!(stored().await, StoredLease::Held { holder: "node a".to_owned() });

    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(stored().await, StoredLease::Lapsed { holder: "node a".to_owned() });
    assert_eq!(control.lease(&id(), &b, ttl).await.unwrap(), LeaseAnswer::Held);
    control.release(&id(), &a).await.unwrap();
    assert_eq!(stored().await, StoredLease::Held { holder: "node b".to_owned() }, "only the holder releases");
    control.release(&id(), &b).await.unwrap();
    assert_eq!(stored().await, StoredLease::None);
}

#[tokio::test]
async fn the_replay_position_is_stored_once() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    taken.committer.store_replay_position(Some(at(3))).await.unwrap();
    taken.committer.store_replay_position(Some(at(9))).await.unwrap();
    assert_eq!(target.checkpoint("counts").unwrap().replay, Replay::Over(Some(at(3))));
}

/// Commits batches built by hand and returns the violations.
async fn violations(batches: impl IntoIterator<Item = Batch<&'static str>>) -> Vec<String> {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    for (number, mut batch) in batches.into_iter().enumerate() {
        batch.advance.epoch = taken.checkpoint.epoch;
        batch.advance.expected_commit_no = i64::try_from(number).unwrap();
        taken.committer.commit(&batch).await.unwrap();
    }
    target.violations()
}

#[tokio::test]
async fn breaches_of_the_contract_are_noticed() {
    let empty = Checkpoint::default();
    let one = |position| batch(&empty, vec![applies(position, "a")]);
    assert_eq!(violations([one(0), one(1)]).await, Vec::<String>::new());
    let cases = [
        ("applied twice", vec![one(0), one(0)]),
        ("the watermark moves backwards", vec![one(4), one(3)]),
        ("out of order", vec![batch(&empty, vec![applies(2, "c"), applies(1, "b"), applies(3, "d")])]),
        ("is above the watermark", {
            let mut early = one(5);
            early.advance.watermark = at(4);
            vec![early]
        }),
        ("counted", {
            let mut miscounted = one(0);
            miscounted.advance.counts.applied = 2;
            vec![miscounted]
        }),
        ("the skip at 0", {
            let mut skip = one(0);
            skip.entries[0].write = Write::Apply(Outcome::skip());
            vec![skip]
        }),
    ];
    for (expected, batches) in cases {
        let found = violations(batches).await;
        assert!(found.iter().any(|violation| violation.contains(expected)), "{expected}: {found:?}");
    }
}

#[tokio::test]
async fn an_event_applied_again_after_the_row_was_restored_is_noticed() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
    target.edit_checkpoint("counts", |checkpoint| checkpoint.watermark = None);
    let mut taken = take_over(&target, None).await.unwrap();
    commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
    assert!(target.violations()[0].contains("applied twice"), "{:?}", target.violations());
}

#[tokio::test]
async fn a_committer_used_after_it_failed_is_noticed() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    target.fail(TargetStep::Begin, 1, TargetFault::Transient);
    commit(&mut taken, vec![applies(0, "a")]).await.unwrap_err();
    commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
    assert!(target.violations()[0].contains("used again after it failed"), "{:?}", target.violations());
}
