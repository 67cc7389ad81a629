//! Closures of the user: each is blamed for what it does to the transaction, and changes nothing for others.

use std::time::Duration;

use super::*;

async fn short_take_over(target: &PgTarget) -> TakenOver<PgOp> {
    let (id, source) = (id(), source());
    let handler_timeout = Duration::from_millis(300);
    let request = TakeOver {
        id: &id,
        owner: None,
        lease: Duration::from_secs(30),
        handler_timeout,
        initial: None,
        source: &source,
        event_types: None,
    };
    target.take_over(request).await.unwrap()
}

/// Between two good events and behind a good closure: it alone becomes a dead letter, of this kind.
async fn is_blamed(kind: &str, bad: Entry<PgOp>) {
    let fixture = accounts().await;
    let mut taken = short_take_over(&fixture.target).await;
    assert_eq!(bad.meta.position, Position::new(3));
    let good = |position: u64| {
        closure(position, move |conn| {
            Box::pin(async move {
                sqlx::query("INSERT INTO accounts VALUES ($1, 1)").bind(position.cast_signed()).execute(conn).await?;
                Ok(())
            })
        })
    };
    let entries = vec![open(1, 1), good(2), bad, good(4), open(5, 1)];
    let (committed, halt) = commit(&mut taken, entries, DeadLetterPolicy::default()).await.unwrap();
    assert!(halt.is_none(), "{halt:?}");
    assert_eq!(committed.unwrap().counts, Counts { applied: 4, skipped: 0, dead_lettered: 1 }, "{kind}");
    assert_eq!(fixture.letters().await, [(3, kind.to_owned())]);
    assert_eq!(fixture.ids("accounts").await, [1, 2, 4, 5], "{kind}");
    let stored = fixture.stored().await;
    assert_eq!((stored.commit_no, stored.watermark), (1, Some(Position::new(5))));
    // The committer goes on, with no setting left behind.
    let (committed, _) = commit(&mut taken, vec![good(6), open(7, 1)], DeadLetterPolicy::default()).await.unwrap();
    assert_eq!(committed.unwrap().counts.applied, 2);
}

#[tokio::test]
async fn a_closure_that_swallows_an_error_of_the_database_is_blamed() {
    let swallow = closure(3, |conn| {
        Box::pin(async move {
            let _ = sqlx::query("INSERT INTO accounts VALUES (1, 1)").execute(conn).await;
            Ok(())
        })
    });
    is_blamed("custom:swallowed_error", swallow).await;
}

#[tokio::test]
async fn a_closure_that_returns_the_error_of_the_database_is_blamed_for_that() {
    let fail = closure(3, |conn| {
        Box::pin(async move {
            sqlx::query("INSERT INTO accounts VALUES (1, 1)").execute(conn).await?;
            Ok(())
        })
    });
    is_blamed("commit:23505 (unique_violation)", fail).await;
}

#[tokio::test]
async fn a_closure_that_commits_is_blamed_and_commits_nothing() {
    let commit = closure(3, |conn| {
        Box::pin(async move {
            let _ = conn.execute("COMMIT").await;
            Ok(())
        })
    });
    is_blamed("custom:left_transaction", commit).await;
}

#[tokio::test]
async fn a_closure_that_commits_and_begins_another_is_blamed_and_commits_nothing() {
    let commit = closure(3, |conn| {
        Box::pin(async move {
            let _ = conn.execute(sqlx::raw_sql("COMMIT")).await;
            let _ = conn.execute(sqlx::raw_sql("BEGIN")).await;
            Ok(())
        })
    });
    is_blamed("custom:left_transaction", commit).await;
}

#[tokio::test]
async fn a_closure_that_rolls_back_is_blamed() {
    let roll_back = closure(3, |conn| {
        Box::pin(async move {
            conn.execute("ROLLBACK").await?;
            Ok(())
        })
    });
    is_blamed("custom:left_transaction", roll_back).await;
}

#[tokio::test]
async fn a_closure_that_leaks_a_transaction_of_its_own_is_blamed() {
    let leak = closure(3, |conn| {
        Box::pin(async move {
            let mut nested = conn.begin().await?;
            sqlx::query("INSERT INTO accounts VALUES (33, 1)").execute(&mut *nested).await?;
            std::mem::forget(nested);
            Ok(())
        })
    });
    is_blamed("custom:left_transaction", leak).await;
}

#[tokio::test]
async fn a_closure_that_waits_for_ever_is_blamed_after_the_handlers_timeout() {
    is_blamed("timeout", closure(3, |_| Box::pin(std::future::pending()))).await;
    let sleep = closure(3, |conn| {
        Box::pin(async move {
            conn.execute("SELECT pg_sleep(60)").await?;
            Ok(())
        })
    });
    is_blamed("timeout", sleep).await;
}

#[tokio::test]
async fn a_closure_that_panics_is_blamed() {
    is_blamed("panic", closure(3, |_| Box::pin(async { panic!("as told") }))).await;
    is_blamed("panic", closure(3, |_| panic!("before the future"))).await;
}

#[tokio::test]
async fn a_closure_that_fails_is_blamed_under_the_name_of_its_error() {
    let fail = closure(3, |_| {
        Box::pin(async {
            "x".parse::<u8>()?;
            Ok(())
        })
    });
    is_blamed("core::num::error::ParseIntError", fail).await;
    is_blamed("too_small", closure(3, |_| Box::pin(async { Err(CustomError::new("too_small", "3 < 4")) }))).await;
}

#[tokio::test]
async fn a_closure_may_use_savepoints_and_leave_one_open() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let nested = |position: u64| {
        closure(position, move |conn| {
            Box::pin(async move {
                let mut nested = conn.begin().await?;
                let refused = sqlx::query("INSERT INTO accounts VALUES (0, -1)").execute(&mut *nested).await;
                assert!(refused.is_err());
                nested.rollback().await?;
                sqlx::query("INSERT INTO accounts VALUES ($1, 1)")
                    .bind(position.cast_signed())
                    .execute(&mut *conn)
                    .await?;
                conn.execute("SAVEPOINT mine").await?;
                Ok(())
            })
        })
    };
    // Together with an event that makes them go one by one, and without.
    for (first, bad) in [(1, true), (10, false)] {
        let balance = if bad { -1 } else { 1 };
        let entries = vec![nested(first), open(first + 1, balance), nested(first + 2)];
        let (committed, _) = commit(&mut taken, entries, NO_CIRCUIT).await.unwrap();
        assert_eq!(committed.unwrap().counts.dead_lettered, u64::from(bad));
    }
    assert_eq!(fixture.ids("accounts").await, [1, 3, 10, 11, 12]);
}

#[tokio::test]
async fn what_a_closure_sets_for_the_session_is_gone_for_the_next_event_and_the_next_batch() {
    let fixture = accounts().await;
    sqlx::raw_sql("CREATE ROLE scriba_nobody; CREATE SCHEMA elsewhere").execute(&fixture.pool).await.unwrap();
    let mut taken = take_over(&fixture.target).await;
    let set = |position: u64| {
        closure(position, |conn| {
            Box::pin(async move {
                let settings = "SET search_path = elsewhere; SET application_name = 'mine'; SET ROLE scriba_nobody";
                conn.execute(sqlx::raw_sql(settings)).await?;
                Ok(())
            })
        })
    };
    let read = |position: u64| {
        closure(position, |conn| {
            Box::pin(async move {
                let name: String = sqlx::query_scalar("SHOW application_name").fetch_one(conn).await?;
                if name == "scriba orders v3" { Ok(()) } else { Err(CustomError::new("changed", name)) }
            })
        })
    };
    for start in [0, 10] {
        let entries = vec![set(start), open(start + 1, 1), read(start + 2), set(start + 3)];
        let (committed, _) = commit(&mut taken, entries, NO_CIRCUIT).await.unwrap();
        assert_eq!(committed.unwrap().counts.applied, 4, "{:?}", fixture.letters().await);
    }
    let (committed, _) = commit(&mut taken, vec![open(20, 1)], NO_CIRCUIT).await.unwrap();
    assert_eq!(committed.unwrap().counts.applied, 1);
}

#[tokio::test]
async fn a_closure_sees_what_all_earlier_events_wrote() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let double = |position: u64| {
        closure(position, |conn| {
            Box::pin(async move {
                let sum: i64 =
                    sqlx::query_scalar("SELECT sum(balance)::bigint FROM accounts").fetch_one(&mut *conn).await?;
                sqlx::query("INSERT INTO accounts VALUES ($1, $1)").bind(100 + sum).execute(conn).await?;
                Ok(())
            })
        })
    };
    let entries = vec![open(1, 1), open(2, 2), double(3), open(4, 4), double(5)];
    commit(&mut taken, entries, DeadLetterPolicy::default()).await.unwrap();
    assert_eq!(fixture.ids("accounts").await, [1, 2, 4, 103, 210]);
}

#[tokio::test]
async fn a_transient_error_ends_the_pass_and_nothing_is_written() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    // Terminates its own session, but only when written one by one: when the event before it is gone.
    let die = closure(3, |conn| {
        Box::pin(async move {
            let before: i64 = sqlx::query_scalar("SELECT count(*) FROM accounts").fetch_one(&mut *conn).await?;
            if before == 1 {
                conn.execute("SELECT pg_terminate_backend(pg_backend_pid())").await?;
            }
            sqlx::query("INSERT INTO accounts VALUES (2, -1)").execute(conn).await?;
            Ok(())
        })
    });
    let result = commit(&mut taken, vec![open(1, 1), die], DeadLetterPolicy::default()).await;
    let Err(CommitError::Failed(error)) = result else { panic!("{result:?}") };
    assert_eq!(error.class, FailureClass::TransientServer);
    assert!(fixture.ids("accounts").await.is_empty());
    assert_eq!(fixture.stored().await.commit_no, 0);
}

fn executes(position: u64, text: &'static str) -> Entry<PgOp> {
    closure(position, move |conn| {
        Box::pin(async move {
            conn.execute(sqlx::raw_sql(text)).await?;
            Ok(())
        })
    })
}

#[tokio::test]
async fn what_a_closure_writes_after_it_has_left_the_transaction_is_not_there() {
    for end in ["ROLLBACK", "COMMIT"] {
        let bad = closure(3, move |conn| {
            Box::pin(async move {
                let _ = conn.execute(end).await;
                let _ = conn.execute("INSERT INTO accounts VALUES (33, 1)").await;
                Ok(())
            })
        });
        is_blamed("custom:left_transaction", bad).await;
    }
}

#[tokio::test]
async fn a_closure_that_makes_the_transaction_read_only_is_blamed_and_not_the_event_behind_it() {
    is_blamed("custom:left_transaction", executes(3, "SET TRANSACTION READ ONLY")).await;
}

#[tokio::test]
async fn a_closure_that_checks_all_constraints_is_told_that_the_guard_takes_that_for_a_commit() {
    is_blamed("custom:left_transaction", executes(3, "SET CONSTRAINTS ALL IMMEDIATE")).await;
}

#[tokio::test]
async fn a_closure_that_leaves_the_connection_speechless_is_blamed() {
    is_blamed("custom:left_transaction", executes(3, "DEALLOCATE ALL")).await;
}

#[tokio::test]
async fn tables_cursors_and_listeners_of_a_closure_are_gone_for_the_next_event() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let text = "CREATE TEMP TABLE accounts (id bigint, balance bigint); CREATE TEMP TABLE more (n int) ON COMMIT DROP; \
                DECLARE c CURSOR WITH HOLD FOR SELECT 1; LISTEN news; NOTIFY news; SELECT pg_advisory_lock(7)";
    let entries = vec![executes(1, text), open(2, 1), executes(3, text), open(4, 1)];
    let (committed, _) = commit(&mut taken, entries, NO_CIRCUIT).await.unwrap();
    assert_eq!(committed.unwrap().counts.applied, 4, "{:?}", fixture.letters().await);
    assert_eq!(fixture.ids("accounts").await, [2, 4], "in the table that is meant");
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = \
                 (SELECT oid FROM pg_database WHERE datname = current_database())";
    assert_eq!(sqlx::query_scalar::<_, i64>(locks).fetch_one(&fixture.pool).await.unwrap(), 0);
}

#[tokio::test]
async fn a_constraint_that_was_dropped_since_the_catalogue_was_read_starts_the_pipeline_again_and_blames_nobody() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    commit(&mut taken, vec![executes(1, "SELECT 1")], NO_CIRCUIT).await.unwrap();
    sqlx::raw_sql("ALTER TABLE notes DROP CONSTRAINT notes_of_key").execute(&fixture.pool).await.unwrap();
    let result = commit(&mut taken, vec![executes(2, "SELECT 1")], NO_CIRCUIT).await;
    let Err(CommitError::Failed(error)) = result else { panic!("{result:?}") };
    assert_eq!(error.class, FailureClass::Unclear);
    let mut taken = take_over(&fixture.target).await;
    let (committed, _) = commit(&mut taken, vec![executes(2, "SELECT 1")], NO_CIRCUIT).await.unwrap();
    assert_eq!(committed.unwrap().counts.applied, 1);
}

#[tokio::test]
async fn where_all_closures_failed_the_session_can_be_written_again() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let fails = closure(1, |_| Box::pin(async { Err(CustomError::new("no", "good")) }));
    commit(&mut taken, vec![fails], NO_CIRCUIT).await.unwrap();
    taken.committer.store_replay_position(Some(Position::new(1))).await.unwrap();
    taken.committer.store_event_types(None).await.unwrap();
    let fails = closure(2, |_| Box::pin(async { Err(CustomError::new("no", "good")) }));
    commit(&mut taken, vec![fails], NO_CIRCUIT).await.unwrap();
    commit(&mut taken, vec![open(3, 1), open(4, 1)], NO_CIRCUIT).await.unwrap();
    assert_eq!(fixture.ids("accounts").await, [3, 4]);
}

#[tokio::test]
async fn a_closure_that_finds_no_row_or_null_is_blamed_for_that() {
    let missing = closure(3, |conn| {
        Box::pin(async move {
            sqlx::query("SELECT 1 FROM accounts WHERE id = 99").fetch_one(conn).await?;
            Ok(())
        })
    });
    is_blamed("sqlx_core::error::Error", missing).await;
    let null = closure(3, |conn| {
        Box::pin(async move {
            sqlx::query_scalar::<_, i64>("SELECT NULL::bigint").fetch_one(conn).await?;
            Ok(())
        })
    });
    is_blamed("sqlx_core::error::Error", null).await;
}

#[tokio::test]
async fn an_event_alone_that_only_commit_finds_guilty_is_a_dead_letter() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    // A constraint that was not there when the names were read.
    let breaks =
        "CREATE TABLE fresh (id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO fresh VALUES (1), (1)";
    commit(&mut taken, vec![executes(1, "SELECT 1")], NO_CIRCUIT).await.unwrap();
    let result = commit(&mut taken, vec![executes(2, breaks), open(3, 1)], NO_CIRCUIT).await;
    let Err(CommitError::Failed(error)) = result else { panic!("{result:?}") };
    assert_eq!(error.class, FailureClass::TransientStatement, "half of the batch is tried next");
    let mut taken = take_over(&fixture.target).await;
    commit(&mut taken, vec![executes(2, breaks)], NO_CIRCUIT).await.unwrap();
    commit(&mut taken, vec![open(3, 1)], NO_CIRCUIT).await.unwrap();
    assert_eq!(fixture.letters().await, [(2, "commit:23505 (unique_violation)".to_owned())]);
    assert_eq!(fixture.ids("accounts").await, [3]);
}
