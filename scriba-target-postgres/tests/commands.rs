//! Commands that read and write the control tables: `reset` above all, and what other nodes are told.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

#[path = "commands/rebuild.rs"]
mod rebuild;
mod support;

use std::time::{Duration, Instant};

use scriba_core::checkpoint::{Counts, Replay};
use scriba_core::source::SourceIdentity;
use scriba_core::target::{
    CommitError, LeaseAnswer, ResetRefused, Shortfall, StateRecord, StoredLease, Tables, TakeOver, TakenOver, Target,
};
use scriba_core::{CommandError, FailureClass, Position, Reset, ResetError, Scriba, State, WaitError, WaitFor};
use scriba_target_postgres::{PgOp, Switch};
use sqlx::{Connection, PgConnection};
use support::{Fixture, batch, dead, event, failure, fixture, id, moved, owner, seen, source, take_over};
use tokio::time::{sleep, timeout};

const LEASE: Duration = Duration::from_secs(30);

/// A projection that has seen events 1 and 3, dead-lettered 2, caught up, and was stopped.
async fn stopped(fixture: &Fixture) -> TakenOver<PgOp> {
    let mut taken = take_over(&fixture.target).await;
    let first = batch(&taken.checkpoint, vec![seen(1), dead(event(2), failure("decode")), seen(3)]);
    taken.committer.commit(&first).await.unwrap();
    moved(&mut taken.checkpoint, &first);
    taken.committer.store_replay_position(Some(Position::new(3))).await.unwrap();
    taken.committer.store_event_types(Some(&["Happened"])).await.unwrap();
    stop(fixture, taken.checkpoint.epoch).await;
    taken
}

async fn stop(fixture: &Fixture, epoch: i64) {
    let mut control = fixture.target.control().await.unwrap();
    assert!(control.store_state(&id(), epoch, &StateRecord::new(State::Stopped)).await.unwrap());
}

fn emptying() -> Reset {
    Reset::new().dead_letters().statement("TRUNCATE seen")
}

async fn connection(fixture: &Fixture) -> PgConnection {
    PgConnection::connect_with(&fixture.database.connect_options()).await.unwrap()
}

#[tokio::test]
async fn reset_clears_checkpoint_replay_position_dead_letters_and_read_model_in_one_transaction_and_raises_the_epoch() {
    let fixture = fixture().await;
    stopped(&fixture).await;
    let before = fixture.stored().await;
    let counts = fixture.target.reset(&id(), &emptying()).await.unwrap();
    assert_eq!(counts.cleared, Counts { applied: 2, skipped: 0, dead_lettered: 1 });
    assert_eq!(counts.dead_letters, 1);
    let stored = fixture.target.stored(&id()).await.unwrap().unwrap();
    let after = stored.checkpoint;
    assert_eq!((before.epoch, after.epoch), (1, 2));
    assert_eq!((after.watermark, after.last_event, after.commit_no, after.counts), (None, None, 0, Counts::default()));
    assert_eq!((after.replay, after.event_types, after.in_row.count), (Replay::Ongoing, None, 0));
    assert_eq!((stored.state, stored.lease), (StateRecord::new(State::Stopped), StoredLease::None));
    assert_eq!(fixture.target.dead_letter_stats(&id()).await.unwrap().total, 0);
    assert!(fixture.seen().await.is_empty());

    stop_is_needed_again(&fixture).await;
}

/// After the next take-over it is no longer stopped.
async fn stop_is_needed_again(fixture: &Fixture) {
    let taken = take_over(&fixture.target).await;
    let refused = fixture.target.reset(&id(), &Reset::new()).await.unwrap_err();
    assert!(matches!(refused, ResetRefused::MayRun { state: State::Initializing }), "{refused}");
    stop(fixture, taken.checkpoint.epoch).await;
    let counts = fixture.target.reset(&id(), &Reset::new()).await.unwrap();
    assert_eq!((counts.cleared, counts.dead_letters), (Counts::default(), 0));
}

#[tokio::test]
async fn reset_leaves_read_model_and_dead_letters_alone_unless_it_is_told_otherwise() {
    let fixture = fixture().await;
    stopped(&fixture).await;
    assert_eq!(fixture.target.reset(&id(), &Reset::new()).await.unwrap().dead_letters, 0);
    assert_eq!(fixture.seen().await, [1, 3]);
    assert_eq!(fixture.target.dead_letter_stats(&id()).await.unwrap().total, 1);
}

#[tokio::test]
async fn a_statement_that_fails_or_ends_the_transaction_leaves_everything_as_it_was() {
    let fixture = fixture().await;
    stopped(&fixture).await;
    let before = fixture.stored().await;
    for statement in ["TRUNCATE nowhere", "COMMIT", "/* x */ rollback", "TRUNCATE seen; COMMIT", ""] {
        let error = fixture.target.reset(&id(), &emptying().statement(statement)).await.unwrap_err();
        assert!(matches!(error, ResetRefused::Target(_)), "{statement}: {error}");
        assert_eq!(fixture.stored().await, before, "{statement}");
        assert_eq!(fixture.seen().await, [1, 3], "{statement}");
        assert_eq!(fixture.target.dead_letter_stats(&id()).await.unwrap().total, 1, "{statement}");
        assert_eq!(fixture.target.stored(&id()).await.unwrap().unwrap().lease, StoredLease::None);
    }
}

#[tokio::test]
async fn reset_is_refused_while_a_node_holds_the_lease_or_stands_by_and_goes_through_once_the_lease_has_lapsed() {
    let fixture = fixture().await;
    let reset = || async { fixture.target.reset(&id(), &Reset::new()).await };
    assert!(matches!(reset().await.unwrap_err(), ResetRefused::NoCheckpoint));
    stopped(&fixture).await;
    let mut control = fixture.target.control().await.unwrap();
    let (a, b) = (owner("a"), owner("b"));
    control.lease(&id(), &a, Duration::from_millis(300)).await.unwrap();
    let refused = reset().await.unwrap_err();
    assert!(matches!(&refused, ResetRefused::Held { holder } if holder == "node a"), "{refused}");
    let answer = control.lease(&id(), &b, LEASE).await.unwrap();
    assert!(matches!(answer, LeaseAnswer::HeldBy { .. }));
    let stored = || async { fixture.target.stored(&id()).await.unwrap().unwrap() };
    assert_eq!(stored().await.standbys, ["node b"]);
    control.release(&id(), &a).await.unwrap();
    let refused = reset().await.unwrap_err();
    assert!(matches!(&refused, ResetRefused::StoodBy { nodes } if nodes == &["node b".to_owned()]), "{refused}");
    assert_eq!(stored().await.lease, StoredLease::None, "a reset that is refused holds nothing");
    control.lease(&id(), &b, Duration::from_millis(50)).await.unwrap();
    assert_eq!(stored().await.standbys, Vec::<String>::new(), "it holds the lease now");
    sleep(Duration::from_millis(100)).await;
    reset().await.expect("its lease has lapsed");
    assert_eq!(stored().await.lease, StoredLease::None);
}

#[tokio::test]
async fn a_standby_that_has_not_asked_for_long_is_forgotten() {
    let fixture = fixture().await;
    stopped(&fixture).await;
    let mut control = fixture.target.control().await.unwrap();
    control.lease(&id(), &owner("a"), LEASE).await.unwrap();
    control.lease(&id(), &owner("b"), LEASE).await.unwrap();
    sqlx::raw_sql("UPDATE scriba_standbys SET expires_at = clock_timestamp() - interval '1 s'")
        .execute(&fixture.pool)
        .await
        .unwrap();
    assert_eq!(fixture.target.stored(&id()).await.unwrap().unwrap().standbys, Vec::<String>::new());
    control.lease(&id(), &owner("c"), LEASE).await.unwrap();
    let rows: Vec<String> =
        sqlx::query_scalar("SELECT owner FROM scriba_standbys").fetch_all(&fixture.pool).await.unwrap();
    assert_eq!(rows, ["c"]);
}

#[tokio::test]
async fn a_node_that_starts_while_it_is_reset_gets_the_lease_after_it_and_not_before() {
    let fixture = fixture().await;
    stopped(&fixture).await;
    let target = fixture.target.clone();
    let begun = Instant::now();
    let reset = tokio::spawn(async move { target.reset(&id(), &Reset::new().statement("SELECT pg_sleep(1)")).await });
    sleep(Duration::from_millis(300)).await;
    let mut control = fixture.target.control().await.unwrap();
    assert_eq!(control.lease(&id(), &owner("a"), LEASE).await.unwrap(), LeaseAnswer::Held);
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    reset.await.unwrap().unwrap();
    assert_eq!(fixture.stored().await.watermark, None);
}

/// G3.
#[tokio::test]
async fn an_owner_frozen_before_its_transaction_cannot_commit_after_a_reset_not_even_once_it_was_taken_over_anew() {
    let fixture = fixture().await;
    let mut old = take_over(&fixture.target).await;
    stop(&fixture, 1).await;
    fixture.target.reset(&id(), &Reset::new()).await.unwrap();
    take_over(&fixture.target).await;
    let error = old.committer.commit(&batch(&old.checkpoint, vec![seen(1)])).await.unwrap_err();
    assert!(matches!(error, CommitError::Fenced(Shortfall::OtherEpoch { found: 3, ours: 1 })), "{error}");
    assert!(fixture.seen().await.is_empty());
}

/// G3: the switch breaks the rule that epochs never repeat, and the same owner doubles an event.
#[tokio::test]
async fn with_epochs_that_repeat_after_a_reset_a_frozen_owner_commits_into_the_new_run() {
    let fixture = fixture().await;
    let mut old = take_over(&fixture.target).await;
    stop(&fixture, 1).await;
    let broken = fixture.target.clone().switch(Switch::EpochsRepeatAfterReset);
    broken.reset(&id(), &Reset::new()).await.unwrap();
    assert_eq!(take_over(&fixture.target).await.checkpoint.epoch, 1);
    old.committer.commit(&batch(&old.checkpoint, vec![seen(1)])).await.expect("nothing fences it off");
    assert_eq!(fixture.seen().await, [1]);
}

/// The transaction of an owner at epoch 1 whose process is frozen after its writes: the server ends it after `limit`.
async fn frozen(fixture: &Fixture, limit: &str) -> PgConnection {
    let mut open = connection(fixture).await;
    let text = format!(
        "SET idle_in_transaction_session_timeout = '{limit}'; BEGIN; \
         SELECT scriba_advance('orders', 3, 1, 0, 1, 1, 'event 1', 1, 0, 0, 0, '{{}}'); INSERT INTO seen VALUES (1)"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(text)).execute(&mut open).await.unwrap();
    open
}

/// G3.
#[tokio::test]
async fn reset_waits_until_the_server_has_ended_the_transaction_of_a_frozen_owner_whose_commit_is_refused_when_it_wakes()
 {
    let fixture = fixture().await;
    take_over(&fixture.target).await;
    stop(&fixture, 1).await;
    let mut old = frozen(&fixture, "1s").await;
    let begun = Instant::now();
    let counts = timeout(Duration::from_secs(10), fixture.target.reset(&id(), &emptying())).await.unwrap().unwrap();
    assert!(begun.elapsed() > Duration::from_millis(500), "{:?}", begun.elapsed());
    assert_eq!(counts.cleared, Counts::default(), "its transaction came to nothing");
    sqlx::raw_sql("COMMIT").execute(&mut old).await.expect_err("its session is gone");
    assert!(fixture.seen().await.is_empty());
    let after = fixture.stored().await;
    assert_eq!((after.watermark, after.epoch), (None, 2));
}

/// G3.
#[tokio::test]
async fn a_commit_in_doubt_that_lands_while_a_reset_waits_for_it_is_cleared_with_the_rest() {
    let fixture = fixture().await;
    take_over(&fixture.target).await;
    stop(&fixture, 1).await;
    let mut old = frozen(&fixture, "30s").await;
    let target = fixture.target.clone();
    let reset = tokio::spawn(async move { target.reset(&id(), &emptying()).await });
    sleep(Duration::from_millis(300)).await;
    assert!(!reset.is_finished(), "it waits");
    sqlx::raw_sql("COMMIT").execute(&mut old).await.expect("it is in time");
    let counts = reset.await.unwrap().unwrap();
    assert_eq!(counts.cleared, Counts { applied: 1, ..Counts::default() });
    assert!(fixture.seen().await.is_empty());
    assert_eq!(fixture.stored().await.watermark, None);
}

#[tokio::test]
async fn a_version_that_was_reset_takes_position_source_and_types_anew_at_its_next_take_over_and_no_other_does() {
    let fixture = fixture().await;
    stopped(&fixture).await;
    let other = SourceIdentity { kind: "postgres-log".to_owned(), fingerprint: "restored".to_owned() };
    let (the_id, types): (_, &'static [&'static str]) = (id(), &["Placed"]);
    let request = || TakeOver {
        id: &the_id,
        owner: None,
        lease: LEASE,
        handler_timeout: LEASE,
        initial: Some(Position::new(7)),
        source: &other,
        event_types: Some(types),
    };
    let taken = fixture.target.take_over(request()).await.unwrap();
    assert_eq!((taken.created, taken.source, taken.checkpoint.watermark), (false, source(), Some(Position::new(3))));
    stop(&fixture, 2).await;
    fixture.target.reset(&id(), &Reset::new()).await.unwrap();
    let taken = fixture.target.take_over(request()).await.unwrap();
    assert_eq!((taken.created, taken.source, taken.checkpoint.epoch), (true, other.clone(), 4));
    assert_eq!(taken.checkpoint.watermark, Some(Position::new(7)));
    assert_eq!(taken.checkpoint.event_types, Some(vec!["Placed".to_owned()]));

    // A cold row that someone deletes makes nothing begin anew that has moved.
    sqlx::raw_sql("DELETE FROM scriba_projections").execute(&fixture.pool).await.unwrap();
    let later = TakeOver { initial: Some(Position::new(99)), ..request() };
    let taken = fixture.target.take_over(later).await.unwrap();
    assert_eq!((taken.created, taken.checkpoint.watermark), (false, Some(Position::new(7))));
}

#[tokio::test]
async fn a_target_is_named_for_people_without_its_password() {
    let fixture = fixture().await;
    let options = fixture.database.connect_options().password("secret");
    let target = scriba_target_postgres::PgTarget::new(sqlx::postgres::PgPoolOptions::new().connect_lazy_with(options));
    let name = target.name();
    let expected = format!("postgres {} at ", fixture.database.name());
    assert!(name.starts_with(&expected), "{name}");
    assert!(name.ends_with(&format!(":{}", fixture.database.connect_options().get_port())), "{name}");
    assert!(!name.contains("secret"), "{name}");
}

/// F5, on a node that runs nothing.
#[tokio::test]
async fn another_node_resets_from_the_tables_and_is_told_how_things_stand_there() {
    let fixture = fixture().await;
    let node = Scriba::new();
    node.attach(fixture.target.clone());
    let wait = |position| node.wait_for(id(), WaitFor::Event(Position::new(position)), Duration::from_millis(200));
    assert!(matches!(wait(1).await.unwrap_err(), WaitError::NeverStarted { .. }));
    stopped(&fixture).await;
    wait(1).await.expect("it is there");
    assert!(matches!(wait(2).await.unwrap_err(), WaitError::DeadLettered { kind, .. } if kind == "decode"));
    assert!(matches!(wait(4).await.unwrap_err(), WaitError::Stopped { watermark: Some(_), .. }));

    let mut control = fixture.target.control().await.unwrap();
    control.lease(&id(), &owner("a"), Duration::from_millis(400)).await.unwrap();
    assert!(matches!(wait(4).await.unwrap_err(), WaitError::Timeout { .. }), "another holds it and is about to run it");
    let refused = node.reset(id(), Reset::new()).await.unwrap_err();
    assert!(matches!(&refused, ResetError::Held { .. }) && refused.to_string().contains("node a"), "{refused}");
    let halted = StateRecord {
        halt_reason: Some("no such column".to_owned()),
        halt_class: Some(FailureClass::Structural),
        halt_code: Some("42703".to_owned()),
        ..StateRecord::new(State::Halted)
    };
    assert!(control.store_state(&id(), 1, &halted).await.unwrap());
    assert!(!control.store_state(&id(), 0, &StateRecord::new(State::Running)).await.unwrap(), "no epoch of its own");
    assert_eq!(node.list().await.unwrap()[0].stored.clone().unwrap().state, halted);
    assert!(matches!(wait(4).await.unwrap_err(), WaitError::Halted { reason, .. } if reason == "no such column"));
    control.store_state(&id(), 1, &StateRecord::new(State::Running)).await.unwrap();
    sleep(Duration::from_millis(500)).await;
    assert!(matches!(wait(4).await.unwrap_err(), WaitError::RunByNobody { .. }));

    let counts = node.reset(id(), emptying()).await.expect("a node that died holds nothing back");
    assert_eq!((counts.cleared.total(), counts.dead_letters), (3, 1));
    assert!(matches!(wait(1).await.unwrap_err(), WaitError::Stopped { watermark: None, .. }));
    let listed = node.list().await.unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, State::Stopped));

    let group = StateRecord { source_keeps_position: true, ..StateRecord::new(State::Stopped) };
    let epoch = take_over(&fixture.target).await.checkpoint.epoch;
    control.store_state(&id(), epoch, &group).await.unwrap();
    let refused = node.reset(id(), Reset::new()).await.unwrap_err();
    assert!(matches!(refused, ResetError::SourceLivesOn { .. }), "{refused}");
    let unknown = node.reset("nobody", Reset::new()).await.unwrap_err();
    assert!(matches!(unknown, ResetError::Command(CommandError::Unknown { .. })), "{unknown}");
}
