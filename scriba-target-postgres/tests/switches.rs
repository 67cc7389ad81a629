//! Rules of a commit broken on purpose: what each of them prevents.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use scriba_core::target::{CommitError, Committed, Entry, Shortfall, Write};
use scriba_core::{EventMeta, Outcome, Position};
use scriba_target_postgres::{PgOp, PgTarget, Switch, custom};
use sqlx::Executor;

use self::support::{Fixture, batch, event, fixture, seen, take_over};

/// An owner that another has taken over from commits an event.
async fn commit_of_an_owner_that_was_taken_over(target: &PgTarget) -> Result<Committed, CommitError> {
    let mut old = take_over(target).await;
    take_over(target).await;
    old.committer.commit(&batch(&old.checkpoint, vec![seen(1)])).await
}

#[tokio::test]
async fn a_fence_behind_the_writes_whose_row_count_nobody_reads_lets_an_owner_without_its_epoch_write() {
    let fixture = fixture().await;
    let refused = commit_of_an_owner_that_was_taken_over(&fixture.target).await;
    assert!(matches!(refused, Err(CommitError::Fenced(Shortfall::OtherEpoch { .. }))), "{refused:?}");
    assert!(fixture.seen().await.is_empty());
    let broken = fixture.target.clone().switch(Switch::FenceLast);
    commit_of_an_owner_that_was_taken_over(&broken).await.unwrap();
    assert_eq!(fixture.seen().await, [1], "written by an owner that must not");
    assert_eq!(fixture.stored().await.watermark, None, "and will be again by the other");
}

/// A commit in doubt lands while the next owner takes over: the watermark that one is told.
async fn watermark_after_a_commit_in_doubt(target: &PgTarget, fixture: &Fixture) -> Option<Position> {
    take_over(&fixture.target).await;
    let mut in_doubt = fixture.pool.begin().await.unwrap();
    let land = "UPDATE scriba_checkpoints SET commit_no = commit_no + 1, watermark = 7";
    sqlx::query(land).execute(&mut *in_doubt).await.unwrap();
    let target = target.clone();
    let taking = tokio::spawn(async move { take_over(&target).await.checkpoint.watermark });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while sqlx::query_scalar::<_, i64>(waits).fetch_one(&fixture.pool).await.unwrap() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    in_doubt.commit().await.unwrap();
    taking.await.unwrap()
}

#[tokio::test]
async fn a_commit_in_doubt_that_is_settled_by_a_look_at_the_table_is_overlooked() {
    let sound = fixture().await;
    assert_eq!(watermark_after_a_commit_in_doubt(&sound.target, &sound).await, Some(Position::new(7)));
    let broken = fixture().await;
    let target = broken.target.clone().switch(Switch::ReadBeforeWaiting);
    assert_eq!(
        watermark_after_a_commit_in_doubt(&target, &broken).await,
        None,
        "events up to 7 would be applied twice"
    );
}

fn closure(position: u64, statement: &'static str) -> Entry<PgOp> {
    let custom = custom(move |conn| {
        Box::pin(async move {
            let _ = conn.execute(statement).await;
            Ok(())
        })
    });
    Entry { meta: EventMeta::new(event(position), false), write: Write::Apply(Outcome::from(PgOp::from(custom))) }
}

#[tokio::test]
async fn an_error_swallowed_in_a_closure_and_taken_for_a_commit_loses_the_batch() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target.clone().switch(Switch::TrustClosures)).await;
    let entries = vec![seen(1), closure(2, "SELECT 1 / 0")];
    let committed = taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap();
    assert_eq!(committed.counts.applied, 2, "taken for committed");
    assert!(fixture.seen().await.is_empty(), "and nothing is there");
    assert_eq!(fixture.stored().await.watermark, None);
}

#[tokio::test]
async fn a_commit_in_a_closure_makes_the_checkpoint_durable_with_the_rest_missing() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target.clone().switch(Switch::NoGuard)).await;
    let entries = vec![seen(1), closure(2, "COMMIT"), closure(3, "SELECT pg_terminate_backend(pg_backend_pid())")];
    taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap_err();
    assert_eq!(fixture.stored().await.watermark, Some(Position::new(3)), "accounted for");
    assert_eq!(fixture.seen().await, [1], "without what event 3 would have written");
}
