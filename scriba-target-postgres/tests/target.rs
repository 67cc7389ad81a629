//! The target against a real Postgres: commits, fences, leases, dead letters, what others read.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

mod support;

use std::time::Duration;

use bytes::Bytes;
use chrono::{TimeZone, Utc};
use scriba_core::checkpoint::{Counts, LastEvent, Replay};
use scriba_core::dead_letter::Failure;
use scriba_core::target::{
    CommitError, DeadLetterFilter, Entry, LeaseAnswer, Shortfall, StateRecord, StoredLease, Tables, TakeOver,
    TakeOverError, Target, Write,
};
use scriba_core::{EventMeta, FailureClass, Outcome, Position, ProjectionId, State};
use scriba_target_postgres::{PgOp, PgTarget, Switch, Table};
use sqlx::{Connection, PgConnection};
use support::{
    Fixture, batch, dead, event, failure, fixture, id, moved, owner, progress, run, seen, skip, source, take_over,
    take_over_as,
};
use tokio::time::{sleep, timeout};

const LEASE: Duration = Duration::from_secs(30);

async fn other_connection(fixture: &Fixture) -> PgConnection {
    PgConnection::connect_with(&fixture.database.connect_options()).await.unwrap()
}

/// Waits until a backend of that application name waits for a lock.
async fn waits_for_a_lock(fixture: &Fixture, application: &str) {
    for _ in 0..500 {
        let waiting: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1 \
             AND wait_event_type = 'Lock'",
        )
        .bind(application)
        .fetch_one(&fixture.pool)
        .await
        .unwrap();
        if waiting > 0 {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("nobody waits for a lock");
}

#[tokio::test]
async fn a_commit_writes_operations_and_checkpoint_and_counts_add_up_over_commits() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    assert!(taken.created);
    assert_eq!((taken.checkpoint.epoch, taken.checkpoint.commit_no, taken.checkpoint.watermark), (1, 0, None));

    let skips = (5..9).chain([12]).map(skip);
    let mut entries: Vec<_> = [seen(4), seen(9)].into_iter().chain(skips).collect();
    entries.sort_by_key(|entry| entry.meta.position);
    let first = batch(&taken.checkpoint, entries);
    taken.committer.commit(&first).await.unwrap();
    moved(&mut taken.checkpoint, &first);
    let second = batch(&taken.checkpoint, vec![seen(13), dead(event(14), failure("decode"))]);
    taken.committer.commit(&second).await.unwrap();
    moved(&mut taken.checkpoint, &second);

    assert_eq!(fixture.seen().await, [4, 9, 13]);
    let stored = fixture.stored().await;
    assert_eq!(stored, taken.checkpoint, "the row and the engine's own arithmetic agree");
    assert_eq!(stored.counts, Counts { applied: 3, skipped: 5, dead_lettered: 1 });
    assert_eq!(stored.last_event, Some(LastEvent { position: Position::new(14), id: "event 14".into() }));
    assert!(!take_over(&fixture.target).await.created);
}

#[tokio::test]
async fn no_watermark_is_the_beginning_and_position_0_is_a_real_event() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    assert_eq!(taken.checkpoint.watermark, None);
    taken.committer.commit(&batch(&taken.checkpoint, vec![seen(0)])).await.unwrap();
    assert_eq!(take_over(&fixture.target).await.checkpoint.watermark, Some(Position::new(0)));
}

#[tokio::test]
async fn progress_without_events_keeps_the_last_event() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let first = batch(&taken.checkpoint, vec![seen(1)]);
    taken.committer.commit(&first).await.unwrap();
    moved(&mut taken.checkpoint, &first);
    let progress = progress(&taken.checkpoint, 7);
    taken.committer.commit(&progress).await.unwrap();
    let stored = fixture.stored().await;
    assert_eq!(stored.watermark, Some(Position::new(7)));
    assert_eq!(stored.last_event.unwrap().position, Position::new(1));
}

#[tokio::test]
async fn a_new_checkpoint_takes_its_watermark_source_and_event_types_from_the_first_take_over_only() {
    let fixture = fixture().await;
    let (id, first) = (id(), source());
    let request = |initial: Option<u64>, source, event_types| TakeOver {
        id: &id,
        owner: None,
        lease: LEASE,
        handler_timeout: LEASE,
        initial: initial.map(Position::new),
        source,
        event_types,
    };
    let types: &'static [&'static str] = &["Opened", "Clo'sed"];
    let taken = fixture.target.take_over(request(Some(41), &first, Some(types))).await.unwrap();
    assert_eq!(taken.checkpoint.watermark, Some(Position::new(41)));
    assert_eq!(taken.source, first);
    assert_eq!(taken.checkpoint.event_types.as_deref().unwrap(), types);

    let mut other = first.clone();
    other.fingerprint = "elsewhere".to_owned();
    let again = fixture.target.take_over(request(None, &other, None)).await.unwrap();
    assert_eq!(again.checkpoint.watermark, Some(Position::new(41)));
    assert_eq!(again.source, first);
    assert_eq!(again.checkpoint.event_types.as_deref().unwrap(), types);
    assert_eq!(again.checkpoint.epoch, 2);
}

#[tokio::test]
async fn an_owner_that_was_taken_over_commits_nothing() {
    let fixture = fixture().await;
    let mut old = take_over(&fixture.target).await;
    let mut new = take_over(&fixture.target).await;
    let refused = old
        .committer
        .commit(&batch(&old.checkpoint, vec![seen(1), dead(event(2), failure("decode"))]))
        .await
        .unwrap_err();
    assert!(matches!(refused, CommitError::Fenced(Shortfall::OtherEpoch { found: 2, ours: 1 })), "{refused:?}");
    assert!(fixture.seen().await.is_empty());
    assert_eq!(fixture.target.dead_letter_stats(&id()).await.unwrap().total, 0);
    let unchanged = fixture.stored().await;
    assert_eq!((unchanged.commit_no, unchanged.watermark), (0, None));
    new.committer.commit(&batch(&new.checkpoint, vec![seen(1)])).await.unwrap();
    assert_eq!(fixture.seen().await, [1]);
}

#[tokio::test]
async fn with_the_epoch_kept_an_owner_that_was_taken_over_still_commits() {
    let fixture = fixture().await;
    let mut old = take_over(&fixture.target).await;
    take_over(&fixture.target.clone().switch(Switch::KeepEpoch)).await;
    old.committer.commit(&batch(&old.checkpoint, vec![seen(1)])).await.unwrap();
    assert_eq!(fixture.seen().await, [1], "which is what the raised epoch prevents");
}

/// A pipeline that was left behind with a batch, and a later one under the same epoch that has committed since.
async fn orphan_and_successor(fixture: &Fixture, orphan: &PgTarget) -> Result<(), CommitError> {
    let mut orphan = take_over(orphan).await;
    let left_behind = batch(&orphan.checkpoint, vec![seen(1), seen(2), seen(3)]);
    let mut successor = take_over(&fixture.target.clone().switch(Switch::KeepEpoch)).await;
    assert_eq!(successor.checkpoint.epoch, orphan.checkpoint.epoch);
    successor.committer.commit(&batch(&successor.checkpoint, vec![seen(1), seen(2)])).await.unwrap();
    orphan.committer.commit(&left_behind).await.map(drop)
}

#[tokio::test]
async fn an_orphaned_commit_under_the_same_epoch_is_refused_by_its_number() {
    let fixture = fixture().await;
    let refused = orphan_and_successor(&fixture, &fixture.target).await.unwrap_err();
    assert!(
        matches!(refused, CommitError::Fenced(Shortfall::OtherCommit { found: 1, expected: 0, epoch: 1 })),
        "{refused:?}"
    );
    assert_eq!(fixture.seen().await, [1, 2]);
}

#[tokio::test]
async fn with_smaller_than_instead_of_the_exact_number_an_orphaned_commit_doubles_events() {
    let fixture = fixture().await;
    let orphan = fixture.target.clone().switch(Switch::CommitNoSmallerThan);
    orphan_and_successor(&fixture, &orphan).await.unwrap();
    assert_eq!(fixture.seen().await, [1, 1, 2, 2, 3]);
}

#[tokio::test]
async fn a_row_restored_to_an_older_state_is_refused_by_its_number() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let first = batch(&taken.checkpoint, vec![seen(1)]);
    taken.committer.commit(&first).await.unwrap();
    moved(&mut taken.checkpoint, &first);
    sqlx::query("UPDATE scriba_checkpoints SET commit_no = 0, watermark = NULL, last_position = NULL")
        .execute(&fixture.pool)
        .await
        .unwrap();
    let refused = taken.committer.commit(&batch(&taken.checkpoint, vec![seen(2)])).await.unwrap_err();
    assert!(
        matches!(refused, CommitError::Fenced(Shortfall::OtherCommit { found: 0, expected: 1, epoch: 1 })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_missing_row_is_said_to_be_missing() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    sqlx::query("DELETE FROM scriba_checkpoints").execute(&fixture.pool).await.unwrap();
    let refused = taken.committer.commit(&batch(&taken.checkpoint, vec![seen(1)])).await.unwrap_err();
    assert!(matches!(refused, CommitError::Fenced(Shortfall::Missing)), "{refused:?}");
}

#[tokio::test]
async fn a_take_over_waits_for_a_commit_in_doubt_and_reads_what_became_of_it() {
    for (end, watermark, commit_no) in [("COMMIT", Some(Position::new(8)), 1), ("ROLLBACK", None, 0)] {
        let fixture = fixture().await;
        take_over(&fixture.target).await;
        let mut doubt = other_connection(&fixture).await;
        sqlx::raw_sql("BEGIN; SELECT scriba_advance('orders', 3, 1, 0, 8, 8, 'event 8', 1, 0, 0, 0, '{}')")
            .execute(&mut doubt)
            .await
            .unwrap();
        let target = fixture.target.clone();
        let taking = tokio::spawn(async move { take_over(&target).await.checkpoint });
        waits_for_a_lock(&fixture, "scriba orders v3").await;
        assert!(!taking.is_finished());
        sqlx::raw_sql(end).execute(&mut doubt).await.unwrap();
        let checkpoint = taking.await.unwrap();
        assert_eq!((checkpoint.watermark, checkpoint.commit_no, checkpoint.epoch), (watermark, commit_no, 2), "{end}");
    }
}

#[tokio::test]
async fn a_commit_that_waited_for_a_take_over_is_refused() {
    let fixture = fixture().await;
    let mut old = take_over(&fixture.target).await;
    let mut taking = other_connection(&fixture).await;
    sqlx::raw_sql("BEGIN; UPDATE scriba_checkpoints SET epoch = epoch + 1").execute(&mut taking).await.unwrap();
    let late = batch(&old.checkpoint, vec![seen(1)]);
    let committing = tokio::spawn(async move { old.committer.commit(&late).await });
    waits_for_a_lock(&fixture, "scriba orders v3").await;
    sqlx::raw_sql("COMMIT").execute(&mut taking).await.unwrap();
    let refused = committing.await.unwrap().unwrap_err();
    assert!(matches!(refused, CommitError::Fenced(Shortfall::OtherEpoch { .. })), "{refused:?}");
    assert!(fixture.seen().await.is_empty());
}

#[tokio::test]
async fn a_lease_is_held_renewed_released_and_lapses() {
    let fixture = fixture().await;
    let mut control = fixture.target.control().await.unwrap();
    let (a, b) = (owner("a"), owner("b"));
    assert_eq!(control.lease(&id(), &a, LEASE).await.unwrap(), LeaseAnswer::Held);
    assert_eq!(control.lease(&id(), &a, LEASE).await.unwrap(), LeaseAnswer::Held, "its own is renewed");
    match control.lease(&id(), &b, LEASE).await.unwrap() {
        LeaseAnswer::HeldBy { holder, expires_in } => {
            assert_eq!(holder, "node a");
            assert!(expires_in > Duration::from_secs(25) && expires_in <= LEASE, "{expires_in:?}");
        }
        LeaseAnswer::Held => panic!("two holders"),
    }
    control.release(&id(), &b).await.unwrap();
    assert!(matches!(control.lease(&id(), &b, LEASE).await.unwrap(), LeaseAnswer::HeldBy { .. }), "not b's to release");
    control.release(&id(), &a).await.unwrap();
    let short = Duration::from_millis(50);
    assert_eq!(control.lease(&id(), &b, short).await.unwrap(), LeaseAnswer::Held, "released");
    sleep(short * 2).await;
    assert_eq!(control.lease(&id(), &a, LEASE).await.unwrap(), LeaseAnswer::Held, "lapsed");
    assert!(matches!(control.lease(&id(), &b, LEASE).await.unwrap(), LeaseAnswer::HeldBy { .. }));
    let other = ProjectionId::new("orders", 4);
    assert_eq!(control.lease(&other, &b, LEASE).await.unwrap(), LeaseAnswer::Held, "a lease is of one version");
}

#[tokio::test]
async fn a_take_over_needs_the_lease_and_raises_no_epoch_without_it() {
    let fixture = fixture().await;
    let (a, b) = (owner("a"), owner("b"));
    take_over_as(&fixture.target, Some(&a), LEASE).await.unwrap();
    match take_over_as(&fixture.target, Some(&b), LEASE).await {
        Err(TakeOverError::Held { holder }) => assert_eq!(holder, "node a"),
        other => panic!("{:?}", other.map(|taken| taken.checkpoint)),
    }
    assert_eq!(fixture.stored().await.epoch, 1);
    assert_eq!(take_over_as(&fixture.target, Some(&a), LEASE).await.unwrap().checkpoint.epoch, 2, "its own");
}

#[tokio::test]
async fn a_lease_is_renewed_and_a_state_stored_while_a_batch_holds_the_checkpoint() {
    let fixture = fixture().await;
    let a = owner("a");
    take_over_as(&fixture.target, Some(&a), LEASE).await.unwrap();
    let mut control = fixture.target.control().await.unwrap();
    let mut open = other_connection(&fixture).await;
    sqlx::raw_sql("BEGIN; SELECT scriba_advance('orders', 3, 1, 0, 8, 8, 'event 8', 1, 0, 0, 0, '{}')")
        .execute(&mut open)
        .await
        .unwrap();
    let busy = async {
        control.lease(&id(), &a, LEASE).await.unwrap();
        control.store_state(&id(), 1, &record(State::Running)).await.unwrap();
    };
    timeout(Duration::from_secs(1), busy).await.expect("neither waits for the batch");
}

fn record(state: State) -> StateRecord {
    StateRecord {
        halt_reason: Some("no such column\0".to_owned()),
        halt_class: Some(FailureClass::Structural),
        halt_code: Some("42703".to_owned()),
        degraded_since: Some(Utc.timestamp_opt(1_700_000_000, 0).unwrap()),
        head: Some(Position::new(0)),
        source_keeps_position: true,
        ..StateRecord::new(state)
    }
}

#[tokio::test]
async fn a_state_is_written_by_the_owner_of_the_epoch_only_and_read_by_anyone() {
    let fixture = fixture().await;
    assert!(fixture.target.stored(&id()).await.unwrap().is_none(), "never started");
    take_over_as(&fixture.target, Some(&owner("a")), Duration::from_millis(50)).await.unwrap();
    let mut control = fixture.target.control().await.unwrap();
    assert!(control.store_state(&id(), 1, &record(State::Halted)).await.unwrap());
    assert!(!control.store_state(&id(), 0, &record(State::Running)).await.unwrap(), "not its epoch any more");

    let stored = fixture.target.stored(&id()).await.unwrap().unwrap();
    let wanted = StateRecord { halt_reason: Some("no such column\u{2400}".to_owned()), ..record(State::Halted) };
    assert_eq!(stored.state, wanted);
    assert_eq!(stored.source, source());
    sleep(Duration::from_millis(100)).await;
    let lapsed = fixture.target.stored(&id()).await.unwrap().unwrap().lease;
    assert_eq!(lapsed, StoredLease::Lapsed { holder: "node a".to_owned() });
    control.lease(&id(), &owner("b"), LEASE).await.unwrap();
    let held = fixture.target.stored(&id()).await.unwrap().unwrap().lease;
    assert_eq!(held, StoredLease::Held { holder: "node b".to_owned() });
    control.release(&id(), &owner("b")).await.unwrap();
    let all = fixture.target.stored_all().await.unwrap();
    assert_eq!(all.len(), 1);
    assert_eq!((&all[0].id, &all[0].lease), (&id(), &StoredLease::None));
}

#[tokio::test]
async fn a_checkpoint_that_was_deleted_is_not_begun_anew_and_a_watermark_cannot_be_lowered_by_hand() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    taken.committer.commit(&batch(&taken.checkpoint, vec![seen(4)])).await.unwrap();
    let lowered = sqlx::raw_sql("UPDATE scriba_checkpoints SET watermark = 3").execute(&fixture.pool).await;
    assert!(lowered.unwrap_err().to_string().contains("check constraint"));
    sqlx::raw_sql("DELETE FROM scriba_checkpoints").execute(&fixture.pool).await.unwrap();
    let error = take_over_as(&fixture.target, None, Duration::from_secs(30)).await.err().unwrap();
    let TakeOverError::Target(error) = error else { panic!("{error}") };
    assert_eq!(error.class, FailureClass::Structural);
    assert!(error.message.contains("was deleted"), "{error}");
}

#[tokio::test]
async fn the_replay_position_is_stored_once_and_by_the_owner_of_the_epoch_only() {
    let fixture = fixture().await;
    let mut old = take_over(&fixture.target).await;
    let mut new = take_over(&fixture.target).await;
    let refused = old.committer.store_replay_position(Some(Position::new(5))).await.unwrap_err();
    assert!(matches!(refused, CommitError::Fenced(Shortfall::OtherEpoch { found: 2, ours: 1 })), "{refused:?}");
    assert_eq!(fixture.stored().await.replay, Replay::Ongoing);
    new.committer.store_replay_position(Some(Position::new(7))).await.unwrap();
    new.committer.store_replay_position(None).await.unwrap();
    assert_eq!(take_over(&fixture.target).await.checkpoint.replay, Replay::Over(Some(Position::new(7))));
}

#[tokio::test]
async fn a_deferrable_constraint_is_checked_at_the_statement_so_that_no_later_event_heals_it() {
    let fixture = fixture().await;
    sqlx::raw_sql(
        "CREATE TABLE parent (id int PRIMARY KEY); \
         CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
    )
    .execute(&fixture.pool)
    .await
    .unwrap();
    let mut taken = take_over(&fixture.target).await;
    let entries = vec![run(1, "INSERT INTO child VALUES (1)"), run(2, "INSERT INTO parent VALUES (1)")];
    let committed = taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap();
    let [refused] = &committed.refused[..] else { panic!("{committed:?}") };
    assert_eq!(refused.meta.position, Position::new(1));
    assert_eq!(refused.failure.kind, "commit:23503 (foreign_key_violation)");
    let message = &refused.failure.message;
    assert!(message.contains("child_parent_fkey") && message.contains("table child"), "{message}");
    assert_eq!(fixture.stored().await.counts.applied, 1);
}

#[tokio::test]
async fn a_commit_that_the_server_refuses_is_not_in_doubt_and_the_guilty_event_is_found() {
    let fixture = fixture().await;
    sqlx::raw_sql(
        "CREATE TABLE parent (id int PRIMARY KEY); \
         CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED); \
         CREATE FUNCTION defer_all() RETURNS void LANGUAGE plpgsql AS 'BEGIN SET CONSTRAINTS ALL DEFERRED; END'",
    )
    .execute(&fixture.pool)
    .await
    .unwrap();
    let mut taken = take_over(&fixture.target).await;
    let entries = vec![run(1, "SELECT defer_all()"), run(2, "INSERT INTO child VALUES (1)")];
    let committed = taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap();
    assert!(committed.isolated.unwrap().message.starts_with("committing a batch"), "it was the COMMIT that failed");
    let refused: Vec<_> = committed.refused.iter().map(|refused| refused.meta.position).collect();
    assert_eq!(refused, [Position::new(2)]);
}

#[tokio::test]
async fn a_failed_operation_rolls_the_batch_back_and_ends_the_committer() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let entries = vec![seen(1), dead(event(2), failure("decode")), run(3, "INSERT INTO nowhere VALUES (1)")];
    let CommitError::Failed(error) = taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap_err()
    else {
        panic!("not failed")
    };
    assert_eq!((error.class, error.code.as_deref()), (FailureClass::Structural, Some("42P01")));
    assert!(fixture.seen().await.is_empty());
    assert_eq!(fixture.target.dead_letter_stats(&id()).await.unwrap().total, 0);
    let again = taken.committer.commit(&batch(&taken.checkpoint, vec![seen(1)])).await.unwrap_err();
    assert!(again.to_string().contains("take over anew"), "{again}");
    assert!(fixture.seen().await.is_empty());
}

#[tokio::test]
async fn settings_that_a_statement_leaves_behind_do_not_reach_the_next_batch() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let first = batch(&taken.checkpoint, vec![run(1, "SELECT set_config('search_path', 'pg_catalog', false)")]);
    taken.committer.commit(&first).await.unwrap();
    moved(&mut taken.checkpoint, &first);
    taken.committer.commit(&batch(&taken.checkpoint, vec![seen(2)])).await.unwrap();
    assert_eq!(fixture.seen().await, [2]);
}

#[tokio::test]
async fn the_committing_connection_has_limits_below_the_lease_and_a_name_also_after_statements_of_the_user() {
    let fixture = fixture().await;
    sqlx::raw_sql("CREATE TABLE settings (name text, setting text)").execute(&fixture.pool).await.unwrap();
    let mut taken = take_over_as(&fixture.target, Some(&owner("a")), Duration::from_secs(3)).await.unwrap();
    for position in [1, 2] {
        let text = "INSERT INTO settings SELECT name, setting FROM pg_settings WHERE name IN ('statement_timeout', \
            'lock_timeout', 'idle_in_transaction_session_timeout', 'tcp_user_timeout', 'default_transaction_isolation', \
            'application_name', 'TimeZone') ORDER BY name";
        let reading = batch(&taken.checkpoint, vec![run(position, "TRUNCATE settings"), run(position, text)]);
        taken.committer.commit(&reading).await.unwrap();
        moved(&mut taken.checkpoint, &reading);
        let found: Vec<(String, String)> =
            sqlx::query_as("SELECT name, setting FROM settings ORDER BY name COLLATE \"C\"")
                .fetch_all(&fixture.pool)
                .await
                .unwrap();
        let found: Vec<(&str, &str)> = found.iter().map(|(name, setting)| (name.as_str(), setting.as_str())).collect();
        assert_eq!(
            found,
            [
                ("TimeZone", "UTC"),
                ("application_name", "scriba orders v3"),
                ("default_transaction_isolation", "read committed"),
                ("idle_in_transaction_session_timeout", "2000"),
                ("lock_timeout", "2000"),
                ("statement_timeout", "2000"),
                ("tcp_user_timeout", "2000"),
            ]
        );
    }
}

#[tokio::test]
async fn a_commit_that_is_dropped_halfway_writes_nothing_and_ends_the_committer() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let slow = batch(&taken.checkpoint, vec![seen(1), run(2, "SELECT pg_sleep(0.3)")]);
    assert!(timeout(Duration::from_millis(100), taken.committer.commit(&slow)).await.is_err());
    sleep(Duration::from_millis(500)).await;
    assert!(fixture.seen().await.is_empty());
    assert!(taken.committer.commit(&batch(&taken.checkpoint, vec![seen(1)])).await.is_err());
}

#[tokio::test]
async fn any_bytes_and_texts_end_as_a_dead_letter_that_keeps_them() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let body = |position: u64, data: &[u8]| {
        let mut event = event(position);
        event.data = Bytes::copy_from_slice(data);
        event
    };
    let mut nul = body(0, b"{\"a\": \"\0\"}");
    nul.stream_id = "a\0b".into();
    nul.event_type = "Type\0".into();
    nul.id = "it's \0 \\ id".into();
    nul.metadata = Bytes::from_static(b"{\"user\": \"u-1\"}");
    nul.occurred_at = Some(Utc.timestamp_opt(1_700_000_000, 0).unwrap());
    let long = "é".repeat(10_000);
    let mut huge = body(1, &vec![b'x'; 1 << 20]);
    huge.stream_id = long.as_str().into();
    huge.id = long.as_str().into();
    huge.occurred_at = Some(chrono::DateTime::<Utc>::MIN_UTC);
    let big_json = format!("[{}1]", "1,".repeat(500_000));
    let entries = vec![
        dead(nul, Failure { kind: "k\0".into(), message: "m\0".into(), detail: "d\0".into(), attempts: u32::MAX }),
        dead(huge, Failure { kind: "k".repeat(5_000), ..failure("") }),
        dead(body(2, b"\xff\xfe{}"), failure("decode")),
        dead(body(3, b"{\"a\": \"\\u0000\"}"), failure("decode")),
        dead(body(4, b"1e1000000000"), failure("decode")),
        dead(body(5, big_json.as_bytes()), failure("decode")),
        dead(body(6, "[".repeat(100_000).as_bytes()), failure("decode")),
        dead(body(7, b""), failure("decode")),
        dead(body(8, b"{\"ok\": [1, null]}"), failure("decode")),
    ];
    let sent: Vec<_> = entries.iter().map(|entry| entry.meta.event().clone()).collect();
    taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap();

    let letters = fixture.target.dead_letters(&id(), &DeadLetterFilter::default()).await.unwrap();
    assert_eq!(letters.len(), sent.len());
    for (letter, event) in letters.iter().zip(&sent) {
        assert_eq!((letter.position, &letter.data, &letter.metadata), (event.position, &event.data, &event.metadata));
    }
    assert_eq!(letters[0].stream_id, "a\u{2400}b");
    assert_eq!(letters[0].event_type, "Type\u{2400}");
    assert_eq!(letters[0].event_id, "it's \u{2400} \\ id");
    assert_eq!(letters[0].occurred_at, sent[0].occurred_at);
    assert_eq!(letters[0].failure.kind, "k\u{2400}");
    assert_eq!(letters[0].failure.attempts, u32::MAX);
    assert_eq!(letters[1].stream_id, long.as_str());
    assert_eq!(letters[1].occurred_at, None, "before all that Postgres can store");

    let readable: Vec<(i64, bool)> =
        sqlx::query_as("SELECT position, data_json IS NOT NULL FROM scriba_dead_letters ORDER BY position")
            .fetch_all(&fixture.pool)
            .await
            .unwrap();
    let readable: Vec<i64> = readable.iter().filter(|(_, readable)| *readable).map(|(position, _)| *position).collect();
    assert_eq!(readable, [5, 8], "the others are no JSON that jsonb can hold");
    let user: String =
        sqlx::query_scalar("SELECT metadata_json ->> 'user' FROM scriba_dead_letters WHERE position = 0")
            .fetch_one(&fixture.pool)
            .await
            .unwrap();
    assert_eq!(user, "u-1");

    let of_stream = DeadLetterFilter { stream_id: Some(long.into()), ..DeadLetterFilter::default() };
    assert_eq!(fixture.target.dead_letters(&id(), &of_stream).await.unwrap().len(), 1);
    let with_nul = DeadLetterFilter { stream_id: Some("a\0b".into()), ..DeadLetterFilter::default() };
    assert_eq!(fixture.target.dead_letters(&id(), &with_nul).await.unwrap().len(), 1);
    assert_eq!(fixture.target.stored(&id()).await.unwrap().unwrap().counts().dead_lettered, 9);
}

#[tokio::test]
async fn an_event_id_of_any_kind_can_be_the_last_of_a_batch() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let ids = ["it's".to_owned(), "\\'; DROP TABLE seen; --".to_owned(), "\0".to_owned(), "é".repeat(10_000)];
    for (position, event_id) in (1..).zip(ids) {
        let mut next = batch(&taken.checkpoint, vec![seen(position)]);
        next.advance.last_event = Some(LastEvent { position: Position::new(position), id: event_id.as_str().into() });
        taken.committer.commit(&next).await.unwrap();
        moved(&mut taken.checkpoint, &next);
        assert_eq!(fixture.stored().await.last_event.unwrap().id, event_id.replace('\0', "\u{2400}").as_str());
    }
    assert_eq!(fixture.seen().await, [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_dead_letter_is_one_row_per_event_however_often_it_is_written() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    for kind in ["decode", "panic"] {
        let again = batch(&taken.checkpoint, vec![dead(event(1), failure(kind))]);
        taken.committer.commit(&again).await.unwrap();
        moved(&mut taken.checkpoint, &again);
    }
    let letters = fixture.target.dead_letters(&id(), &DeadLetterFilter::default()).await.unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].failure, failure("panic"));
}

#[tokio::test]
async fn dead_letters_are_filtered_paged_and_counted() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let entries = (0..10)
        .map(|position| {
            let mut event = event(position);
            event.stream_id = format!("s{}", position % 2).into();
            dead(event, failure(if position < 7 { "decode" } else { "panic" }))
        })
        .collect();
    taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap();
    let list = async |filter: DeadLetterFilter| {
        let letters = fixture.target.dead_letters(&id(), &filter).await.unwrap();
        letters.iter().map(|letter| letter.position.get()).collect::<Vec<_>>()
    };
    let all = DeadLetterFilter::default;
    assert_eq!(list(DeadLetterFilter { stream_id: Some("s1".into()), ..all() }).await, [1, 3, 5, 7, 9]);
    assert_eq!(list(DeadLetterFilter { kind: Some("panic".into()), ..all() }).await, [7, 8, 9]);
    let range =
        DeadLetterFilter { from_position: Some(Position::new(2)), to_position: Some(Position::new(4)), ..all() };
    assert_eq!(list(range).await, [2, 3, 4]);
    let now = Utc::now();
    let hour = chrono::TimeDelta::hours(1);
    assert_eq!(list(DeadLetterFilter { since: Some(now + hour), ..all() }).await, [0; 0]);
    assert_eq!(list(DeadLetterFilter { until: Some(now - hour), ..all() }).await, [0; 0]);
    assert_eq!(list(DeadLetterFilter { since: Some(now - hour), until: Some(now + hour), ..all() }).await.len(), 10);

    let page = DeadLetterFilter { limit: Some(4), descending: true, ..all() };
    let first = fixture.target.dead_letters(&id(), &page).await.unwrap();
    let next = DeadLetterFilter { after: first.last().map(|letter| letter.position), ..page };
    assert_eq!(first.iter().map(|letter| letter.position.get()).collect::<Vec<_>>(), [9, 8, 7, 6]);
    assert_eq!(list(next).await, [5, 4, 3, 2]);
    assert_eq!(list(DeadLetterFilter { after: Some(Position::new(0)), limit: Some(2), ..all() }).await, [1, 2]);

    let stats = fixture.target.dead_letter_stats(&id()).await.unwrap();
    assert_eq!(stats.total, 10);
    assert_eq!(stats.by_kind, [("decode".to_owned(), 7), ("panic".to_owned(), 3)]);
    assert!(stats.oldest <= stats.newest && stats.oldest.is_some());
    let none = fixture.target.dead_letter_stats(&ProjectionId::new("orders", 1)).await.unwrap();
    assert_eq!((none.total, none.oldest), (0, None));
}

#[derive(Table)]
#[table(name = "accounts")]
struct Account {
    #[table(key)]
    id: i64,
    balance: i64,
}

fn apply(position: u64, op: impl Into<PgOp>) -> Entry<PgOp> {
    Entry { meta: EventMeta::new(event(position), false), write: Write::Apply(Outcome::from(op.into())) }
}

#[tokio::test]
async fn a_table_that_is_missing_is_structural_and_named() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let lost = apply(4, Account { id: 1, balance: 2 }.insert());
    let CommitError::Failed(error) = taken.committer.commit(&batch(&taken.checkpoint, vec![lost])).await.unwrap_err()
    else {
        panic!("not failed")
    };
    assert_eq!(error.class, FailureClass::Structural);
    assert!(error.message.contains("accounts"), "{error}");
}

#[tokio::test]
async fn two_versions_of_one_name_have_checkpoints_of_their_own() {
    let fixture = fixture().await;
    let mut third = take_over(&fixture.target).await;
    let (fourth, source) = (ProjectionId::new("orders", u32::MAX), source());
    let request = TakeOver {
        id: &fourth,
        owner: None,
        lease: LEASE,
        handler_timeout: Duration::from_secs(30),
        initial: None,
        source: &source,
        event_types: None,
    };
    fixture.target.take_over(request).await.unwrap();
    third.committer.commit(&batch(&third.checkpoint, vec![seen(1)])).await.unwrap();
    let all = fixture.target.stored_all().await.unwrap();
    assert_eq!(all.iter().map(|stored| &stored.id).collect::<Vec<_>>(), [&id(), &fourth]);
    assert_eq!(all[1].checkpoint.commit_no, 0);
}
