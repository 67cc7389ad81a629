//! Events that cannot be applied, dead letters that cannot be written, and the circuit, on a real database.

use std::time::Duration;

use bytes::Bytes;
use scriba_core::target::DeadLetterFilter;
use scriba_core::{
    Circuit, FailureClass, HandlerError, OnPoison, Outcome, Position, ProjectionOptions, RecordedEvent, Retry, Scriba,
    State,
};
use scriba_target_postgres::{CustomError, PgOp, PgTarget, custom, sql};
use scriba_testing::MemorySource;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, Executor, PgConnection};

use super::common::{
    Fixture, Play, assert_conserved, eventually, halted, options, play, play_from, played, seen, stage, until,
};

/// A handler that fails at once on events of the type `Bad`.
fn picky() -> Play {
    play(|meta| async move {
        if meta.event_type == "Bad" {
            return Err(HandlerError::permanent(HandlerError::new("bad", "as told")));
        }
        Ok(seen(&meta))
    })
}

/// One event that is applied, and one that has to become a dead letter.
async fn good_and_bad() -> Fixture {
    let fixture = stage().await;
    fixture.append("a", "Good", b"").await;
    fixture.append("a", "Bad", b"").await;
    fixture
}

/// Waits until the projection says that it does not get on, and leaves it like that for a while.
async fn stays_degraded(scriba: &Scriba, code: &str) {
    let told = || scriba.info(played()).unwrap().last_error.is_some_and(|error| error.contains(code));
    eventually("it is degraded", told).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let info = scriba.info(played()).unwrap();
    assert_ne!(info.state, State::Halted, "{:?}", info.halt_reason);
    assert!(info.degraded_since.is_some());
}

/// Both are accounted for, each as it should be.
async fn is_whole(fixture: &Fixture, scriba: &Scriba) {
    until(scriba, &played(), 1).await;
    assert_eq!(fixture.seen().await, [0]);
    assert_eq!(fixture.letters().await, [(1, "bad".to_owned())]);
    assert_conserved(scriba);
}

/// Halted by a dead letter that cannot be written, with nothing at or after its event committed.
async fn halts_with(fixture: &Fixture, scriba: &Scriba, code: &str) {
    let reason = halted(scriba, &played()).await;
    assert_eq!((reason.class, reason.code.as_deref()), (Some(FailureClass::Structural), Some(code)), "{reason}");
    assert!(reason.message.contains("dead letter"), "{reason}");
    assert!(fixture.watermark().await < Some(1));
    scriba.stop(played()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_table_that_is_missing_halts_and_once_it_is_there_again_nothing_is_lost() {
    let fixture = good_and_bad().await;
    fixture.run("DROP TABLE scriba_dead_letters").await;
    let scriba = Scriba::new();
    let error = scriba.start(picky(), fixture.source.clone(), fixture.target.clone(), options()).await.unwrap_err();
    assert!(error.to_string().contains("scriba_dead_letters"), "{error}");
    fixture.target.migrate().await.unwrap();
    fixture.run("TRUNCATE events RESTART IDENTITY").await;
    let scriba = fixture.play(&picky(), options()).await;
    eventually("it runs", || scriba.info(played()).unwrap().state == State::Running).await;
    fixture.run("DROP TABLE scriba_dead_letters").await;
    fixture.append("a", "Good", b"").await;
    fixture.append("a", "Bad", b"").await;
    halts_with(&fixture, &scriba, "42P01").await;
    fixture.target.migrate().await.unwrap();
    fixture.play_again(&scriba, &picky(), options()).await;
    is_whole(&fixture, &scriba).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_table_that_may_not_be_written_or_refuses_the_row_halts() {
    let fixture = good_and_bad().await;
    let role = format!("{}_app", fixture.database.name());
    fixture
        .run(format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'app'; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role};
             GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}; REVOKE INSERT ON scriba_dead_letters FROM {role}"
        ))
        .await;
    let connect = fixture.database.connect_options().username(&role).password("app");
    let target = PgTarget::new(PgPoolOptions::new().connect_lazy_with(connect));
    let scriba = Scriba::new();
    scriba.start(picky(), fixture.source.clone(), target, options()).await.unwrap();
    halts_with(&fixture, &scriba, "42501").await;

    fixture.run("ALTER TABLE scriba_dead_letters ADD CONSTRAINT none CHECK (position < 0)").await;
    fixture.play_again(&scriba, &picky(), options()).await;
    // The data of the event is not to blame.
    halts_with(&fixture, &scriba, "23514").await;

    fixture.run("ALTER TABLE scriba_dead_letters DROP CONSTRAINT none").await;
    fixture.play_again(&scriba, &picky(), options()).await;
    is_whole(&fixture, &scriba).await;
    fixture.run(format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")).await;
    fixture.run(format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_and_a_read_only_database_under_a_dead_letter_are_waited_out() {
    for code in ["53100", "25006"] {
        let fixture = good_and_bad().await;
        fixture
            .run(format!(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
                     BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '{code}'; END $$;
                 CREATE TRIGGER refuse BEFORE INSERT ON scriba_dead_letters FOR EACH ROW EXECUTE FUNCTION refuse()"
            ))
            .await;
        let scriba = fixture.play(&picky(), options()).await;
        stays_degraded(&scriba, code).await;
        assert!(fixture.watermark().await < Some(1));
        fixture.run("DROP TRIGGER refuse ON scriba_dead_letters").await;
        is_whole(&fixture, &scriba).await;
        eventually("it recovers", || scriba.info(played()).unwrap().degraded_since.is_none()).await;
    }
}

/// Bodies that nobody expects, and whether they are JSON that can be read in the table.
fn bodies() -> Vec<(Vec<u8>, bool)> {
    let mebibyte = format!(r#"{{"text":"{}"}}"#, "x".repeat(1 << 20)).into_bytes();
    vec![
        (b"".to_vec(), false),
        (b"\0".to_vec(), false),
        (b"{\"a\":\"b\0c\"}".to_vec(), false),
        // Good JSON, but not for jsonb.
        (br#"{"a":"b\u0000c"}"#.to_vec(), false),
        (b"\xff\xfe".to_vec(), false),
        (b"{\"a\":\"\xc3\x28\"}".to_vec(), false),
        (br#"{"a":"#.to_vec(), false),
        (br#""\ud800""#.to_vec(), false),
        (br#"{"a":1,"a":2}"#.to_vec(), true),
        (b"null".to_vec(), true),
        (br#" {"a": [1, "\u00e9"]} "#.to_vec(), true),
        (format!("1e{}", "9".repeat(10)).into_bytes(), false),
        ([b"[".repeat(100_000), b"]".repeat(100_000)].concat(), false),
        (vec![0; 1 << 20], false),
        (mebibyte, true),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn any_bytes_in_body_metadata_and_error_text_are_kept_in_the_dead_letter_and_readable_where_they_are_json() {
    let fixture = stage().await;
    let append = "INSERT INTO events (stream_id, type, data, metadata) VALUES ('a', 'Bad', $1, $2)";
    for (body, _) in bodies() {
        sqlx::query(append).bind(&body).bind(b"{}".as_slice()).execute(&fixture.pool).await.unwrap();
        sqlx::query(append).bind(b"{}".as_slice()).bind(&body).execute(&fixture.pool).await.unwrap();
    }
    // The text of the error is as bad as the event.
    let play = play(|meta| async move {
        let text = String::from_utf8_lossy(&[&meta.data[..], &meta.metadata[..]].concat()).into_owned();
        Err(HandlerError::permanent(HandlerError::new(format!("kind\0{}", meta.position), text)))
    });
    let scriba = fixture.play(&play, options().circuit(Circuit::OFF)).await;
    let count = 2 * bodies().len();
    until(&scriba, &played(), i64::try_from(count).unwrap() - 1).await;

    let letters = scriba.dead_letters(played(), &DeadLetterFilter::default()).await.unwrap();
    assert_eq!(letters.len(), count);
    let readable: Vec<(bool, bool)> = sqlx::query_as(
        "SELECT data_json IS NOT NULL, metadata_json IS NOT NULL FROM scriba_dead_letters ORDER BY position",
    )
    .fetch_all(&fixture.pool)
    .await
    .unwrap();
    for (n, (body, is_json)) in bodies().into_iter().enumerate() {
        let start = String::from_utf8_lossy(&body[..body.len().min(30)]).into_owned();
        let (as_data, as_metadata) = (&letters[2 * n], &letters[2 * n + 1]);
        assert_eq!((&as_data.data[..], &as_data.metadata[..]), (&body[..], b"{}".as_slice()), "{start}");
        assert_eq!((&as_metadata.data[..], &as_metadata.metadata[..]), (b"{}".as_slice(), &body[..]), "{start}");
        assert_eq!((readable[2 * n], readable[2 * n + 1]), ((is_json, true), (true, is_json)), "{start}");
        // What a text column cannot hold is shown by a sign.
        let text = String::from_utf8_lossy(&[&body[..], b"{}"].concat()).replace('\0', "\u{2400}");
        assert_eq!(as_data.failure.message, text, "{start}");
        assert_eq!(as_data.failure.kind, format!("kind\u{2400}{}", 2 * n));
    }
    assert_conserved(&scriba);
}

#[tokio::test(flavor = "multi_thread")]
async fn any_text_in_the_ids_of_an_event_is_applied_or_dead_lettered_and_the_next_start_knows_the_store_again() {
    let (fixture, source) = (stage().await, MemorySource::new());
    let odd = |text: &str, event_type: &str| RecordedEvent {
        id: text.into(),
        stream_id: text.into(),
        event_type: event_type.into(),
        position: Position::new(0),
        revision: None,
        data: Bytes::new(),
        metadata: Bytes::from_static(b"\xff\0"),
        occurred_at: None,
    };
    let long = "s".repeat(10_000);
    let texts = ["", "a\0b", "'; DROP TABLE seen; --", "\\' \u{fffd} \u{1f980}", long.as_str()];
    let play = play(|meta| async move {
        if meta.event_type == "Good" {
            return Ok(sql("INSERT INTO seen VALUES ($1, $2)")
                .bind(meta.position.to_i64()?)
                .bind(meta.stream_id.as_str().replace('\0', ""))
                .into());
        }
        Err(HandlerError::permanent(HandlerError::new("bad", meta.stream_id.as_str())))
    });
    let mut next = 0;
    for text in texts {
        // Each is the last event seen once.
        for event_type in ["Good", "Bad\0type", "Good"] {
            source.append_event(odd(text, event_type));
            let scriba = play_from(&fixture, source.clone(), &play, options()).await;
            until(&scriba, &played(), next).await;
            scriba.shutdown().await.unwrap();
            next += 1;
        }
    }
    assert_eq!(fixture.seen().await.len(), 10);
    let letters = fixture.letters().await;
    assert_eq!(letters.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [1, 4, 7, 10, 13]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_becomes_of_an_event_that_fails_differs_between_a_rebuild_and_live_as_configured() {
    let halt_while_replaying = || options().on_poison(OnPoison::DeadLetter).on_poison_while_replaying(OnPoison::Halt);
    let halt_live = || options().on_poison(OnPoison::Halt).on_poison_while_replaying(OnPoison::DeadLetter);
    let by_handler = || picky();
    let by_database = || {
        play(|meta| async move {
            let refused = sql("SELECT 1 / (SELECT 0)");
            Ok(if meta.event_type == "Bad" { seen(&meta).and(refused) } else { seen(&meta) })
        })
    };
    for play in [by_handler(), by_database()] {
        let fixture = good_and_bad().await;
        let scriba = fixture.play(&play, halt_while_replaying()).await;
        assert_eq!(halted(&scriba, &played()).await.position, Some(Position::new(1)), "a rebuild halts");
        assert!(fixture.letters().await.is_empty());
        scriba.stop(played()).await.unwrap();
        fixture.play_again(&scriba, &play, halt_live()).await;
        until(&scriba, &played(), 1).await;
        assert_eq!(fixture.letters().await.len(), 1, "a rebuild dead-letters");
        super::common::until_true(&fixture, "SELECT replay_position IS NOT NULL FROM scriba_projections").await;

        fixture.append("a", "Bad", b"").await;
        assert_eq!(halted(&scriba, &played()).await.position, Some(Position::new(2)), "live halts");
        assert_eq!(fixture.letters().await.len(), 1);
        scriba.stop(played()).await.unwrap();
        fixture.play_again(&scriba, &play, halt_while_replaying()).await;
        until(&scriba, &played(), 2).await;
        assert_eq!(fixture.letters().await.len(), 2, "live dead-letters");
        assert_eq!(fixture.seen().await, [0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_streams_25_events_that_the_database_the_handler_or_the_decoding_refuses_are_dead_letters_and_nothing_halts()
 {
    let play = play(|meta| async move {
        Ok(match meta.position.get() % 40 {
            7 => seen(&meta).and(sql("SELECT 1 / (SELECT 0)")),
            17 => return Err(HandlerError::new("bad", "as told")),
            27 => panic!("as told"),
            37 => Outcome::from(serde_json::from_slice::<u64>(&meta.data).map(|_| PgOp::from(sql("SELECT 1")))?),
            _ => seen(&meta),
        })
    });
    let fixture = stage().await;
    fixture.append_many(250, 250).await;
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 249).await;
    let bad: Vec<i64> = (0..250).filter(|position| position % 10 == 7).collect();
    assert_eq!(bad.len(), 25);
    assert_eq!(fixture.letters().await.into_iter().map(|(position, _)| position).collect::<Vec<_>>(), bad);
    assert_eq!(fixture.seen().await.len(), 225);
    assert_eq!(scriba.info(played()).unwrap().state, State::Running);
    assert_conserved(&scriba);
}

/// Starts and stops some times: each time it halts at the event at position 4, and four dead letters are left.
async fn is_halted_by_the_circuit(what: &str, starts: u32, play: Play, options: impl Fn() -> ProjectionOptions) {
    let fixture = stage().await;
    fixture.run("CREATE TABLE impossible (id bigint CHECK (false))").await;
    fixture.append_many(40, 40).await;
    let scriba = Scriba::new();
    for start in 0..starts {
        fixture.play_again(&scriba, &play, options()).await;
        let reason = halted(&scriba, &played()).await;
        assert_eq!(reason.position, Some(Position::new(4)), "{what}, start {start}: {reason}");
        assert!(reason.message.contains("circuit"), "{reason}");
        scriba.stop(played()).await.unwrap();
    }
    let letters = fixture.letters().await;
    assert_eq!(letters.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [0, 1, 2, 3], "{what}");
    assert_eq!((fixture.watermark().await, fixture.seen().await), (Some(3), vec![]), "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_and_a_schema_that_fail_on_everything_are_halted_with_four_dead_letters_in_batches_of_any_size_and_after_ten_starts()
 {
    let panics = || play(|meta| async move { panic!("body {}", meta.position) });
    let does_not_decode =
        || play(|meta| async move { Err(serde_json::from_slice::<u64>(&meta.data).unwrap_err().into()) });
    let breaks_a_check = || play(|meta| async move { Ok(seen(&meta).and(sql("INSERT INTO impossible VALUES (1)"))) });
    for (size, starts) in [(1, 2), (3, 10), (1_000, 2)] {
        let options = || options().batch_events(size).retry(Retry::none());
        tokio::join!(
            is_halted_by_the_circuit("panics", starts, panics(), options),
            is_halted_by_the_circuit("does not decode", starts, does_not_decode(), options),
            is_halted_by_the_circuit("breaks a check", starts, breaks_a_check(), options),
        );
    }
}

/// What a closure does to the transaction it runs in.
async fn misbehave(conn: &mut PgConnection, how: &str) -> Result<(), CustomError> {
    match how {
        "swallows" => {
            let _ = sqlx::query("INSERT INTO seen SELECT * FROM seen LIMIT 1").execute(conn).await;
        }
        "commits" => {
            let _ = conn.execute("COMMIT").await;
        }
        "rolls back" => {
            conn.execute("ROLLBACK").await?;
        }
        "leaks" => {
            let mut nested = conn.begin().await?;
            nested.execute("SELECT 1").await?;
            std::mem::forget(nested);
        }
        "waits" => std::future::pending().await,
        "panics" => panic!("as told"),
        _ => {
            conn.execute("SAVEPOINT mine").await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn closures_that_break_the_transaction_are_dead_letters_of_their_kinds_and_the_others_of_their_batch_are_applied()
{
    let acts = ["swallows", "commits", "rolls back", "leaks", "waits", "panics", "leaves a savepoint"];
    for size in [1, 1_000] {
        let fixture = stage().await;
        fixture.append("good", "good", b"").await;
        for act in acts {
            fixture.append(act, act, b"").await;
            fixture.append("good", "good", b"").await;
        }
        let play = play(|meta| async move {
            if meta.event_type == "good" {
                return Ok(seen(&meta));
            }
            let how = meta.event_type.clone();
            let act = custom(move |conn| {
                let how = how.clone();
                Box::pin(async move { misbehave(conn, how.as_str()).await })
            });
            Ok(seen(&meta).and(act))
        });
        let options = options().handler_timeout(Duration::from_millis(200)).batch_events(size);
        let scriba = fixture.play(&play, options).await;
        until(&scriba, &played(), 14).await;
        let expected = [
            (1, "custom:swallowed_error"),
            (3, "custom:left_transaction"),
            (5, "custom:left_transaction"),
            (7, "custom:left_transaction"),
            (9, "timeout"),
            (11, "panic"),
        ]
        .map(|(position, kind)| (position, kind.to_owned()));
        assert_eq!(fixture.letters().await, expected, "batches of {size}");
        assert_eq!(fixture.seen().await, [0, 2, 4, 6, 8, 10, 12, 13, 14], "batches of {size}");
        assert_conserved(&scriba);
    }
}
