//! Batches whose writes are one statement: the checkpoint moves in the same statement, and gates it.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::time::Duration;

use scriba_core::checkpoint::Checkpoint;
use scriba_core::target::{Batch, CommitError, Entry, Shortfall, Write};
use scriba_core::{EventMeta, Outcome, Position};
use scriba_target_postgres::{PgOp, Table};

use self::support::{Fixture, batch, event, fixture, moved, take_over};

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

fn open(position: u64, account: i64) -> Entry<PgOp> {
    apply(position, Account { id: account, balance: 5 }.insert())
}

fn add(position: u64, account: i64, cents: i64) -> Entry<PgOp> {
    apply(position, Account::update(account).add(Account::BALANCE, cents))
}

/// With a table of accounts, 1 to 3 of them opened.
async fn accounts() -> Fixture {
    let fixture = fixture().await;
    let table = "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
                 INSERT INTO accounts SELECT n, 0 FROM generate_series(1, 3) AS n";
    sqlx::raw_sql(table).execute(&fixture.pool).await.unwrap();
    fixture
}

async fn total(fixture: &Fixture) -> (i64, i64) {
    let total = "SELECT count(*), coalesce(sum(balance), 0)::bigint FROM accounts";
    sqlx::query_as(total).fetch_one(&fixture.pool).await.unwrap()
}

fn nothing_but_skips(checkpoint: &Checkpoint, position: u64) -> Batch<PgOp> {
    let skip = |position| Entry { meta: EventMeta::new(event(position), false), write: Write::Skip };
    batch(checkpoint, (position - 6..=position).map(skip).collect())
}

#[tokio::test]
async fn a_thousand_operations_of_one_kind_are_one_statement_and_of_two_kinds_a_transaction() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let opened = batch(&taken.checkpoint, (0..1000).map(|n| open(n, n.cast_signed() + 10)).collect());
    assert_eq!(taken.committer.commit(&opened).await.unwrap().statements, 1);
    moved(&mut taken.checkpoint, &opened);
    let added = batch(&taken.checkpoint, (1000..2000).map(|n| add(n, n.cast_signed() - 990, 2)).collect());
    assert_eq!(taken.committer.commit(&added).await.unwrap().statements, 1);
    moved(&mut taken.checkpoint, &added);
    let both = batch(&taken.checkpoint, vec![open(2000, 7_000), add(2001, 7_000, 1)]);
    assert_eq!(taken.committer.commit(&both).await.unwrap().statements, 4);
    assert_eq!(total(&fixture).await, (1_004, 7_006));
    let stored = fixture.stored().await;
    assert_eq!((stored.commit_no, stored.watermark, stored.counts.applied), (3, Some(Position::new(2001)), 2_002));
}

#[tokio::test]
async fn a_batch_of_nothing_but_skips_is_one_statement() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let skips = nothing_but_skips(&taken.checkpoint, 9);
    assert_eq!(taken.committer.commit(&skips).await.unwrap().statements, 1);
    let stored = fixture.stored().await;
    assert_eq!((stored.watermark, stored.counts.skipped), (Some(Position::new(9)), 7));
}

#[tokio::test]
async fn the_checkpoint_moves_also_where_no_row_is_hit() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let ops = [
        PgOp::from(Account::update(99_i64).add(Account::BALANCE, 1)),
        PgOp::from(Account::delete(99_i64)),
        PgOp::from(Account::update(99_i64).set(Account::BALANCE, 1)),
    ];
    for empty in [false, true] {
        if empty {
            sqlx::raw_sql("TRUNCATE accounts").execute(&fixture.pool).await.unwrap();
        }
        for op in &ops {
            let position = fixture.stored().await.commit_no.cast_unsigned();
            let missed = batch(&taken.checkpoint, vec![apply(position, op.clone())]);
            assert_eq!(taken.committer.commit(&missed).await.unwrap().statements, 1);
            moved(&mut taken.checkpoint, &missed);
        }
    }
    assert_eq!(fixture.stored().await.commit_no, 6);
}

#[tokio::test]
async fn an_owner_that_was_taken_over_writes_nothing() {
    let fixture = accounts().await;
    let mut old = take_over(&fixture.target).await;
    let _new = take_over(&fixture.target).await;
    let refused = old.committer.commit(&batch(&old.checkpoint, vec![add(1, 1, 5)])).await.unwrap_err();
    assert!(matches!(refused, CommitError::Fenced(Shortfall::OtherEpoch { found: 2, ours: 1 })), "{refused:?}");
    let mut older = take_over(&fixture.target).await;
    let _newer = take_over(&fixture.target).await;
    let refused = older.committer.commit(&nothing_but_skips(&older.checkpoint, 9)).await.unwrap_err();
    assert!(matches!(refused, CommitError::Fenced(Shortfall::OtherEpoch { .. })), "{refused:?}");
    assert_eq!(total(&fixture).await, (3, 0));
    assert_eq!(fixture.stored().await.watermark, None);
}

#[tokio::test]
async fn an_owner_whose_statement_waits_while_it_is_taken_over_writes_nothing() {
    let fixture = accounts().await;
    let mut old = take_over(&fixture.target).await;
    let mut taking = fixture.pool.begin().await.unwrap();
    sqlx::query("UPDATE scriba_checkpoints SET epoch = epoch + 1").execute(&mut *taking).await.unwrap();
    let late = batch(&old.checkpoint, vec![add(1, 1, 5)]);
    let commit = tokio::spawn(async move { old.committer.commit(&late).await });
    wait_for_a_lock(&fixture).await;
    taking.commit().await.unwrap();
    let refused = commit.await.unwrap().unwrap_err();
    assert!(matches!(refused, CommitError::Fenced(Shortfall::OtherEpoch { .. })), "{refused:?}");
    assert_eq!(total(&fixture).await, (3, 0));
}

#[tokio::test]
async fn a_take_over_waits_for_the_statement_of_the_owner_before_it() {
    let fixture = accounts().await;
    let mut old = take_over(&fixture.target).await;
    let mut blocking = fixture.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM accounts WHERE id = 1 FOR UPDATE").execute(&mut *blocking).await.unwrap();
    let slow = batch(&old.checkpoint, vec![add(1, 1, 5)]);
    let commit = tokio::spawn(async move { old.committer.commit(&slow).await });
    wait_for_a_lock(&fixture).await;
    let target = fixture.target.clone();
    let taking = tokio::spawn(async move { take_over(&target).await.checkpoint });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!taking.is_finished(), "it waits for what is in doubt");
    blocking.rollback().await.unwrap();
    commit.await.unwrap().unwrap();
    assert_eq!(taking.await.unwrap().watermark, Some(Position::new(1)), "and reads what became of it");
    assert_eq!(total(&fixture).await, (3, 5));
}

async fn wait_for_a_lock(fixture: &Fixture) {
    loop {
        let waits =
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'scriba %'
                     AND datname = current_database()";
        let waiting: i64 = sqlx::query_scalar(waits).fetch_one(&fixture.pool).await.unwrap();
        if waiting > 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn an_orphaned_commit_under_the_same_epoch_writes_nothing() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let first = batch(&taken.checkpoint, vec![add(1, 1, 5)]);
    taken.committer.commit(&first).await.unwrap();
    let refused = taken.committer.commit(&first).await.unwrap_err();
    let expected = Shortfall::OtherCommit { found: 1, expected: 0, epoch: 1 };
    assert!(matches!(refused, CommitError::Fenced(shortfall) if shortfall == expected), "{refused:?}");
    assert_eq!(total(&fixture).await, (3, 5));
}

#[tokio::test]
async fn a_row_that_breaks_a_constraint_is_a_dead_letter_and_the_checkpoint_moves_on() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let committed = taken.committer.commit(&batch(&taken.checkpoint, vec![open(4, 1), open(5, 5)])).await.unwrap();
    let [refused] = &committed.refused[..] else { panic!("{committed:?}") };
    assert_eq!(
        (refused.meta.position, refused.failure.kind.as_str()),
        (Position::new(4), "commit:23505 (unique_violation)")
    );
    let stored = fixture.stored().await;
    assert_eq!((stored.commit_no, stored.counts.applied, stored.counts.dead_lettered), (1, 1, 1));
}

#[tokio::test]
async fn a_table_that_is_not_fused_gets_its_transaction() {
    let fixture = accounts().await;
    let deferrable =
        "ALTER TABLE accounts ADD CONSTRAINT balance_once UNIQUE (balance, id) DEFERRABLE INITIALLY DEFERRED";
    sqlx::raw_sql(deferrable).execute(&fixture.pool).await.unwrap();
    let mut taken = take_over(&fixture.target).await;
    let one = batch(&taken.checkpoint, vec![add(1, 1, 5)]);
    assert_eq!(taken.committer.commit(&one).await.unwrap().statements, 3);
}
