use std::sync::LazyLock;
use std::time::Duration;

use scriba_core::checkpoint::{Checkpoint, Counts, Replay};
use scriba_core::dead_letter::Failure;
use scriba_core::source::SourceIdentity;
use scriba_core::target::{
    Batch, CommitError, DeadLetterFilter, Entry, LeaseAnswer, Owner, Reset, ResetRefused, Shortfall, StateRecord,
    StoredLease, Tables, TakeOver, TakeOverError, TakenOver, Target as _, Write,
};
use scriba_core::{DeadLetterPolicy, EventMeta, FailureClass, Outcome, ProjectionId, State};
use scriba_testing::{MemorySource, MemoryTarget, TargetFault, TargetStep};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::{SHORT, at, filled};

type Operations = MemoryTarget<&'static str>;

fn id() -> ProjectionId {
    ProjectionId::from("counts")
}

fn owner(name: &str) -> Owner {
    Owner { id: name.to_owned(), description: format!("node {name}") }
}

fn source() -> SourceIdentity {
    SourceIdentity { kind: "memory".to_owned(), fingerprint: "test".to_owned() }
}

fn request<'a>(source: &'a SourceIdentity, owner: Option<&'a Owner>) -> TakeOver<'a> {
    static ID: LazyLock<ProjectionId> = LazyLock::new(id);
    let lease = Duration::from_secs(30);
    TakeOver { id: &ID, owner, lease, handler_timeout: lease, initial: None, source, event_types: Some(&["Counted"]) }
}

async fn take_over(target: &Operations, owner: Option<&Owner>) -> Result<TakenOver<&'static str>, TakeOverError> {
    target.take_over(request(&source(), owner)).await
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

/// The batch that follows a checkpoint.
fn batch(checkpoint: &Checkpoint, entries: Vec<Entry<&'static str>>) -> Batch<&'static str> {
    let last = entries.last().unwrap().meta.position;
    Batch::new(id(), checkpoint, last, entries, DeadLetterPolicy::default())
}

async fn commit(taken: &mut TakenOver<&'static str>, entries: Vec<Entry<&'static str>>) -> Result<(), CommitError> {
    let batch = batch(&taken.checkpoint, entries);
    let committed = taken.committer.commit(&batch).await?;
    taken.checkpoint.committed(&batch.advance, committed.counts, committed.in_row);
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
    assert_eq!(list(DeadLetterFilter { after: Some(at(2)), ..newest }).await, [1, 0]);
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
        (TargetFault::Locked, FailureClass::TransientStatement),
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

#[tokio::test]
async fn events_with_an_operation_that_is_judged_to_break_a_rule_are_dead_letters_and_others_fail_the_batch() {
    let target = Operations::judging(|op| match *op {
        "taken" => Some(TargetFault::Integrity),
        "no table" => Some(TargetFault::Structural),
        _ => None,
    });
    let mut taken = take_over(&target, None).await.unwrap();
    commit(&mut taken, vec![applies(0, "a"), applies(1, "taken"), applies(2, "c")]).await.unwrap();
    assert_eq!(target.applied("counts"), [(at(0), "a"), (at(2), "c")]);
    let letters = target.dead_letters("counts");
    assert_eq!((letters.len(), letters[0].position), (1, at(1)));
    assert_eq!(letters[0].failure.kind, "commit:23505 (unique_violation)");
    assert_eq!(target.checkpoint("counts").unwrap().counts, Counts { applied: 2, skipped: 0, dead_lettered: 1 });
    let error = commit(&mut taken, vec![applies(3, "d"), applies(4, "no table")]).await.unwrap_err();
    let CommitError::Failed(error) = error else { panic!("{error}") };
    assert_eq!((error.class, error.position), (FailureClass::Structural, Some(at(4))));
    assert_eq!(target.commits("counts"), 1);
}

#[tokio::test]
async fn a_late_commit_is_not_to_be_seen_until_a_take_over_waits_for_it() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    target.fail(TargetStep::Commit, 1, TargetFault::Late);
    let error = commit(&mut taken, vec![applies(0, "a"), fails(1, "panic")]).await.unwrap_err();
    assert!(matches!(error, CommitError::Ambiguous(_)), "{error}");
    // Whoever settles the doubt by a look takes it for lost, and does it again.
    assert_eq!(target.stored(&id()).await.unwrap().unwrap().checkpoint.watermark, None);
    let next = take_over(&target, None).await.unwrap();
    assert_eq!((next.checkpoint.watermark, next.checkpoint.epoch), (Some(at(1)), 2));
    assert_eq!(target.applied("counts"), [(at(0), "a")]);
    assert_eq!(target.dead_letters("counts").len(), 1);
    assert_eq!(take_over(&target, None).await.unwrap().checkpoint.commit_no, 1, "it lands once");
}

#[tokio::test]
async fn a_late_commit_is_cleared_by_a_reset_which_waits_for_it() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    target.fail(TargetStep::Commit, 1, TargetFault::Late);
    commit(&mut taken, vec![applies(0, "a")]).await.unwrap_err();
    let mut control = target.control().await.unwrap();
    assert!(control.store_state(&id(), 1, &StateRecord::new(State::Stopped)).await.unwrap());
    let counts = target.reset(&id(), &Reset::new().statement("TRUNCATE counts")).await.unwrap();
    assert_eq!(counts.cleared, Counts { applied: 1, skipped: 0, dead_lettered: 0 });
    assert_eq!(take_over(&target, None).await.unwrap().checkpoint.watermark, None);
    assert!(target.applied("counts").is_empty());
}

#[tokio::test]
async fn a_reset_that_fails_at_a_statement_changes_nothing() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    commit(&mut taken, vec![applies(0, "a")]).await.unwrap();
    let mut control = target.control().await.unwrap();
    assert!(control.store_state(&id(), 1, &StateRecord::new(State::Stopped)).await.unwrap());
    target.fail(TargetStep::Statement, 2, TargetFault::Structural);
    let reset = Reset::new().statement("TRUNCATE counts").statement("TRUNCATE nowhere");
    assert!(matches!(target.reset(&id(), &reset).await, Err(ResetRefused::Target(_))));
    assert_eq!(target.checkpoint("counts"), Some(taken.checkpoint));
    assert_eq!(target.applied("counts"), [(at(0), "a")]);
}

/// A commit that hangs at a step, in a task.
async fn hung(target: &Operations, step: TargetStep, owner: Option<&Owner>) -> JoinHandle<Result<(), CommitError>> {
    let mut taken = take_over(target, owner).await.unwrap();
    target.fail(step, 1, TargetFault::Hang);
    let hung = tokio::spawn(async move { commit(&mut taken, vec![applies(0, "a")]).await });
    while target.hanging() == 0 {
        tokio::time::sleep(SHORT).await;
    }
    hung
}

#[tokio::test(start_paused = true)]
async fn a_take_over_waits_for_a_commit_that_hangs_and_reads_what_became_of_it() {
    for step in [TargetStep::Checkpoint, TargetStep::Apply, TargetStep::Commit] {
        let target = Operations::new();
        let hung = hung(&target, step, None).await;
        let next = take_over(&target, None);
        let mut next = std::pin::pin!(next);
        assert!(timeout(Duration::from_secs(10), &mut next).await.is_err(), "{step:?}");
        assert!(timeout(SHORT, target.stored(&id())).await.is_ok(), "readers do not wait");
        target.release_hung();
        hung.await.unwrap().unwrap();
        let next = next.await.unwrap();
        assert_eq!((next.checkpoint.watermark, next.checkpoint.epoch), (Some(at(0)), 2), "{step:?}");
        assert_eq!(target.violations(), Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_hangs_before_it_has_the_row_is_waited_for_by_nobody_and_fenced_off() {
    let target = Operations::new();
    let hung = hung(&target, TargetStep::Begin, None).await;
    timeout(SHORT, take_over(&target, None)).await.unwrap().unwrap();
    target.release_hung();
    let error = hung.await.unwrap().unwrap_err();
    assert!(matches!(error, CommitError::Fenced(Shortfall::OtherEpoch { found: 2, ours: 1 })), "{error}");
    assert_eq!(target.commits("counts"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_hangs_for_too_long_gives_up_its_row_and_fails_when_it_wakes_up() {
    let a = owner("a");
    // The bound is two thirds of the lease, or what it is without one.
    for (owner, bound) in [(None, Duration::from_secs(20)), (Some(&a), Duration::from_secs(20))] {
        let target = Operations::new();
        if let Some(owner) = owner {
            target.control().await.unwrap().lease(&id(), owner, Duration::from_secs(30)).await.unwrap();
        }
        let hung = hung(&target, TargetStep::Commit, owner).await;
        let begun = Instant::now();
        let mut next = take_over(&target, owner).await.unwrap();
        assert!(begun.elapsed().abs_diff(bound) < Duration::from_secs(1), "{:?}", begun.elapsed());
        commit(&mut next, vec![applies(0, "b")]).await.unwrap();
        assert!(!hung.is_finished(), "it hangs on");
        target.release_hung();
        let CommitError::Failed(error) = hung.await.unwrap().unwrap_err() else { panic!("not failed") };
        assert_eq!(error.code.as_deref(), Some("25P03"));
        assert_eq!(target.applied("counts"), [(at(0), "b")]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_is_dropped_gives_up_its_row_and_leaves_nothing() {
    let target = Operations::new();
    let mut taken = take_over(&target, None).await.unwrap();
    target.fail(TargetStep::Apply, 1, TargetFault::Hang);
    assert!(timeout(SHORT, commit(&mut taken, vec![applies(0, "a")])).await.is_err());
    let next = timeout(SHORT, take_over(&target, None)).await.unwrap().unwrap();
    assert_eq!(next.checkpoint.watermark, None);
    assert_eq!(target.commits("counts"), 0);
}

#[tokio::test(start_paused = true)]
async fn renewals_and_states_and_other_versions_wait_for_no_commit() {
    let target = Operations::new();
    let hung = hung(&target, TargetStep::Commit, None).await;
    let mut control = target.control().await.unwrap();
    let answered = async {
        assert_eq!(control.lease(&id(), &owner("a"), SHORT).await.unwrap(), LeaseAnswer::Held);
        assert!(control.store_state(&id(), 1, &StateRecord::new(State::Running)).await.unwrap());
    };
    timeout(SHORT, answered).await.unwrap();
    let (other, source) = (ProjectionId::new("counts", 2), source());
    let request = TakeOver { id: &other, ..request(&source, None) };
    timeout(SHORT, target.take_over(request)).await.unwrap().unwrap();
    target.release_hung();
    hung.await.unwrap().unwrap();
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
        ("applies nothing and is no skip", {
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
