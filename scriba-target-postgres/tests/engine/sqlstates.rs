//! Every class of SQLSTATEs, raised by real statements, and the response that belongs to it.
//!
//! What the state of the database raises (locks, read-only, lost connections) is in `database.rs`.

use scriba_core::telemetry::BatchNext;
use scriba_core::{FailureClass, HaltReason, Position, Scriba};
use scriba_target_postgres::{CustomError, Table, custom, sql};
use scriba_testing::{Recorded, Recorder};

use super::common::{
    Fixture, assert_conserved, eventually, halted, options, play, played, seen, stage, statements, until,
};

const SCHEMA: &str = "
    CREATE TABLE parents (id bigint PRIMARY KEY);
    CREATE TABLE rows (id bigint PRIMARY KEY, of bigint REFERENCES parents, amount bigint NOT NULL DEFAULT 0 CHECK (amount >= 0),
                       short varchar(3), small smallint, at date, body jsonb, note text);
    CREATE INDEX ON rows (note);
    CREATE TABLE spans (span int4range, EXCLUDE USING gist (span WITH &&));
    CREATE VIEW large AS SELECT * FROM rows WHERE amount > 100 WITH CHECK OPTION;
    INSERT INTO rows (id) VALUES (1);
    INSERT INTO spans VALUES ('[1,5)');
    CREATE FUNCTION raise(code text, message text DEFAULT 'as told') RETURNS void LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION '%', message USING ERRCODE = code; END $$;
    CREATE FUNCTION one_of(n bigint) RETURNS bigint LANGUAGE plpgsql AS $$
        DECLARE found bigint; BEGIN SELECT g INTO STRICT found FROM generate_series(1, n) AS g; RETURN found; END $$;
    CREATE FUNCTION assert_not() RETURNS void LANGUAGE plpgsql AS $$ BEGIN ASSERT false, 'as told'; END $$;
    CREATE FUNCTION endless(n bigint) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RETURN endless(n + 1); END $$;
    CREATE SEQUENCE tries;
    CREATE FUNCTION fail(code text, times bigint, message text DEFAULT 'as told') RETURNS void LANGUAGE plpgsql AS $$
        BEGIN IF nextval('tries') <= times THEN RAISE EXCEPTION '%', message USING ERRCODE = code; END IF; END $$;
";

/// Statements that break a rule with the data of their event, and the kind under which that is filed.
const INTEGRITY: &[(&str, &str)] = &[
    ("21000 (cardinality_violation)", "SELECT (SELECT generate_series(1, 2))"),
    (
        "21000 (cardinality_violation)",
        "INSERT INTO rows (id) VALUES (7), (7) ON CONFLICT (id) DO UPDATE SET amount = 1",
    ),
    ("22001 (string_data_right_truncation)", "UPDATE rows SET short = 'abcd'"),
    ("22003 (numeric_value_out_of_range)", "UPDATE rows SET small = amount + 40000"),
    ("22007 (invalid_datetime_format)", "UPDATE rows SET at = ('x' || id)::date"),
    ("22008 (datetime_field_overflow)", "UPDATE rows SET at = ('2026-02-3' || amount)::date"),
    ("22012 (division_by_zero)", "UPDATE rows SET small = 1 / amount"),
    ("22023 (invalid_parameter_value)", "SELECT generate_series(1, 2, amount::int) FROM rows"),
    ("2201B (invalid_regular_expression)", "SELECT 'a' ~ ('(' || id) FROM rows"),
    ("22P02 (invalid_text_representation)", "UPDATE rows SET small = ('x' || id)::smallint"),
    ("22P05 (untranslatable_character)", r#"UPDATE rows SET body = ('"\u000' || amount || '"')::jsonb"#),
    ("23502 (not_null_violation)", "UPDATE rows SET amount = NULL"),
    ("23503 (foreign_key_violation)", "UPDATE rows SET of = 77"),
    ("23505 (unique_violation)", "INSERT INTO rows (id) VALUES (1)"),
    ("23514 (check_violation)", "UPDATE rows SET amount = -1"),
    ("23P01 (exclusion_violation)", "INSERT INTO spans VALUES ('[4,6)')"),
    ("23001 (restrict_violation)", "SELECT raise('23001')"),
    ("38000 (external_routine_exception)", "SELECT raise('38000')"),
    ("44000 (with_check_option_violation)", "INSERT INTO large (id, amount) VALUES (2, 5)"),
    (
        "54000 (program_limit_exceeded)",
        "UPDATE rows SET note = (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) AS n)",
    ),
    ("54001 (statement_too_complex)", "SELECT endless(1)"),
    ("P0001 (raise_exception)", "DO $$ BEGIN RAISE EXCEPTION 'as told'; END $$"),
    ("P0002 (no_data_found)", "SELECT one_of(0)"),
    ("P0003 (too_many_rows)", "SELECT one_of(2)"),
    ("P0004 (assert_failure)", "SELECT assert_not()"),
];

/// Errors that need nothing but to be tried again, each with its class, raised by a function. Not 25006: a transaction that has
/// moved the checkpoint can write, so there it is the statement's own doing.
const TRANSIENT: &[(&str, FailureClass)] = &[
    ("08000", FailureClass::TransientServer),
    ("08003", FailureClass::TransientServer),
    ("08006", FailureClass::TransientServer),
    ("57P01", FailureClass::TransientServer),
    ("57P02", FailureClass::TransientServer),
    ("57P03", FailureClass::TransientServer),
    ("53300", FailureClass::TransientServer),
    ("25P03", FailureClass::TransientServer),
    ("25P04", FailureClass::TransientServer),
    ("40001", FailureClass::TransientStatement),
    ("40P01", FailureClass::TransientStatement),
    ("53000", FailureClass::TransientStatement),
    ("53100", FailureClass::TransientStatement),
    ("53200", FailureClass::TransientStatement),
    ("55P03", FailureClass::TransientStatement),
    ("57014", FailureClass::TransientStatement),
];

/// Errors that a new connection may mend.
const UNCLEAR: &[(&str, &str)] = &[
    ("0A000", "cached plan must not change result type"),
    ("26000", "prepared statement does not exist"),
    ("XX000", "cache lookup failed"),
    ("08P01", "protocol violation"),
    ("57P04", "database was dropped"),
];

async fn schema() -> Fixture {
    let fixture = stage().await;
    fixture.run(SCHEMA).await;
    fixture
}

/// Where a statement of an event fails for the rights of a role that owns a function, as its owner's and with row-level security.
async fn add_role(fixture: &Fixture) -> String {
    let role = format!("{}_app", fixture.database.name());
    fixture
        .run(format!(
            "CREATE ROLE {role};
             CREATE TABLE secured (id bigint); ALTER TABLE secured ENABLE ROW LEVEL SECURITY;
             CREATE POLICY small ON secured USING (id < 10); GRANT INSERT ON secured TO {role};
             CREATE TABLE forbidden (id bigint);
             CREATE FUNCTION write_secured(id bigint) RETURNS void SECURITY DEFINER LANGUAGE sql AS 'INSERT INTO secured VALUES (id)';
             CREATE FUNCTION write_forbidden(id bigint) RETURNS void SECURITY DEFINER LANGUAGE sql AS 'INSERT INTO forbidden VALUES (id)';
             ALTER FUNCTION write_secured OWNER TO {role}; ALTER FUNCTION write_forbidden OWNER TO {role}"
        ))
        .await;
    role
}

#[tokio::test(flavor = "multi_thread")]
async fn each_error_of_an_events_data_makes_a_dead_letter_of_that_event_alone_under_its_code_in_batches_of_any_size() {
    for size in [1, 1_000] {
        let fixture = schema().await;
        let role = add_role(&fixture).await;
        let secured = ("42501 (insufficient_privilege)", "SELECT write_secured(11)");
        let (mut good, mut expected) = (vec![fixture.append("good", "Statement", b"").await], Vec::new());
        for (n, (kind, statement)) in INTEGRITY.iter().chain([&secured]).enumerate() {
            let bad = fixture.append(&format!("s{n}"), "Statement", statement.as_bytes()).await;
            expected.push((bad, format!("commit:{kind}")));
            good.push(fixture.append("good", "Statement", b"").await);
        }
        let scriba = fixture.play(&statements(), options().batch_events(size)).await;
        until(&scriba, &played(), *good.last().unwrap()).await;
        assert_eq!(fixture.letters().await, expected, "batches of {size}");
        assert_eq!(fixture.seen().await, good, "batches of {size}");
        assert_conserved(&scriba);
        scriba.shutdown().await.unwrap();
        fixture.run(format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_required_a_value_that_cannot_be_stored_and_a_closures_own_errors_are_dead_letters_of_their_event()
 {
    let fixture = schema().await;
    let play = play(|meta| async move {
        let then: scriba_target_postgres::PgOp = match meta.event_type.as_str() {
            "no row" => sql("DELETE FROM rows WHERE id = 99").required().into(),
            "nul" => sql("UPDATE rows SET note = $1").bind("a\0b").into(),
            "own error" => custom(|_| Box::pin(async { Err(CustomError::new("too_small", "3 < 4")) })).into(),
            "failed transaction" => custom(|conn| {
                Box::pin(async move {
                    let _ = sqlx::query("SELECT 1 / (SELECT 0)").execute(&mut *conn).await;
                    sqlx::query("SELECT 1").execute(conn).await?;
                    Ok(())
                })
            })
            .into(),
            _ => super::common::Seen { position: -meta.position.to_i64()? - 1, stream: String::new() }.insert().into(),
        };
        Ok(seen(&meta).and(then))
    });
    let kinds = ["no row", "nul", "own error", "failed transaction"];
    for kind in kinds {
        fixture.append(kind, kind, b"").await;
        fixture.append("good", "good", b"").await;
    }
    let scriba = fixture.play(&play, options()).await;
    until(&scriba, &played(), 7).await;
    let letters: Vec<String> = fixture.letters().await.into_iter().map(|(_, kind)| kind).collect();
    let expected = [
        "no_row",
        "commit:22021 (character_not_in_repertoire)",
        "too_small",
        "commit:25P02 (in_failed_sql_transaction)",
    ];
    assert_eq!(letters, expected);
    assert_eq!(fixture.seen().await, [-8, -6, -4, -2, 1, 3, 5, 7], "every second one");
    assert_conserved(&scriba);
}

/// Starts with somebody who listens, on a database where statements can be told to fail.
async fn listened() -> (Fixture, Recorder, Scriba) {
    let fixture = schema().await;
    let recorder = Recorder::new();
    let scriba = fixture.play_to(&recorder, &statements(), options()).await;
    (fixture, recorder, scriba)
}

/// Class and code of the batches that failed and were tried again.
fn replayed(recorder: &Recorder) -> Vec<(Option<FailureClass>, Option<String>)> {
    let failed = recorder.events_of(played()).into_iter().filter_map(|event| match event {
        Recorded::BatchFailed { class, code, next: BatchNext::Replay(_), .. } => Some((class, code)),
        _ => None,
    });
    failed.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_error_that_passes_is_met_by_a_replay_and_counts_toward_no_limit() {
    let (fixture, recorder, scriba) = listened().await;
    for (code, class) in TRANSIENT {
        let before = replayed(&recorder).len();
        fixture.run("ALTER SEQUENCE tries RESTART").await;
        // One of each class more often than an unclear one may fail.
        let times = if ["08006", "40001"].contains(code) { 4 } else { 1 };
        let statement = format!("SELECT fail('{code}', {times})");
        until(&scriba, &played(), fixture.append("a", "Statement", statement.as_bytes()).await).await;
        let told = replayed(&recorder).split_off(before);
        assert_eq!(told, vec![(Some(*class), Some((*code).to_owned())); times], "{code}");
    }
    assert!(fixture.letters().await.is_empty());
    let count = i64::try_from(TRANSIENT.len()).unwrap();
    assert_eq!(fixture.seen().await, (0..count).collect::<Vec<_>>());
    assert!(scriba.info(played()).unwrap().degraded_since.is_none(), "recovered");
    assert_conserved(&scriba);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_unclear_error_is_tried_three_times_and_then_halts_with_its_code() {
    let (fixture, recorder, scriba) = listened().await;
    for (code, message) in UNCLEAR {
        let before = replayed(&recorder).len();
        let fail = |times: i64| format!("SELECT fail('{code}', {times}, '{message}')");
        // Before the last try it may get better.
        let times = if *code == "XX000" { 2 } else { 1 };
        fixture.run("ALTER SEQUENCE tries RESTART").await;
        until(&scriba, &played(), fixture.append("a", "Statement", fail(times).as_bytes()).await).await;
        let told = replayed(&recorder).split_off(before);
        let expected = (Some(FailureClass::Unclear), Some((*code).to_owned()));
        assert_eq!(told, vec![expected; usize::try_from(times).unwrap()], "{code}");

        fixture.run("ALTER SEQUENCE tries RESTART").await;
        let last = fixture.append("a", "Statement", fail(9).as_bytes()).await;
        let reason = halted(&scriba, &played()).await;
        assert_eq!((reason.class, reason.code.as_deref()), (Some(FailureClass::Unclear), Some(*code)), "{reason}");
        assert!(reason.message.contains(message), "{reason}");
        assert_eq!(fixture.texts("SELECT last_value FROM tries").await, ["3"], "{code}");
        mend(&fixture, &scriba, last).await;
    }
    assert!(fixture.letters().await.is_empty());
}

/// Makes the event harmless at which it halted, and goes on.
async fn mend(fixture: &Fixture, scriba: &Scriba, position: i64) {
    assert_eq!(fixture.watermark().await, Some(position - 1));
    assert!(!fixture.seen().await.contains(&position));
    fixture.run(format!("UPDATE events SET data = '' WHERE position = {position}")).await;
    scriba.stop(played()).await.unwrap();
    fixture.play_again(scriba, &statements(), options()).await;
    until(scriba, &played(), position).await;
    assert!(fixture.seen().await.contains(&position));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_error_of_schema_and_rights_and_each_unknown_one_halts_at_once_with_class_code_and_event() {
    let fixture = schema().await;
    let role = add_role(&fixture).await;
    fixture.run("CREATE SEQUENCE untouched").await;
    let scriba = fixture.play(&statements(), options()).await;
    until(&scriba, &played(), fixture.append("a", "Statement", b"").await).await;
    for (code, statement) in [
        ("42P01", "INSERT INTO no_such_table VALUES (1)"),
        ("42703", "UPDATE rows SET no_such_column = 1"),
        ("42883", "SELECT no_such_function(1)"),
        ("42601", "UPDATE SET"),
        ("42501", "SELECT write_forbidden(1)"),
        ("42804", "UPDATE rows SET at = 1"),
        ("3F000", "CREATE TABLE no_such_schema.rows ()"),
        ("55000", "SELECT currval('untouched')"),
        ("0A000", "SELECT * FROM elsewhere.public.rows"),
        ("P0000", "SELECT raise('P0000')"),
        ("99999", "SELECT raise('99999')"),
    ] {
        let position = fixture.append("a", "Statement", statement.as_bytes()).await;
        let HaltReason { class, code: found, message, position: at, .. } = halted(&scriba, &played()).await;
        assert_eq!((class, found.as_deref()), (Some(FailureClass::Structural), Some(code)), "{message}");
        assert_eq!(at, Some(Position::from_i64(position).unwrap()), "{message}");
        mend(&fixture, &scriba, position).await;
    }
    assert!(fixture.letters().await.is_empty());
    scriba.shutdown().await.unwrap();
    fixture.run(format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_fails_for_a_lock_is_followed_by_one_of_half_its_size() {
    let fixture = schema().await;
    fixture.append_many(63, 63).await;
    fixture.append("last", "Statement", b"SELECT fail('55P03', 3)").await;
    let recorder = Recorder::new();
    // All are there before the first batch is made.
    let first = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let gate = first.clone();
    let play = play(move |meta| {
        let gate = gate.clone();
        async move {
            if meta.position == Position::new(0) {
                gate.acquire().await?.forget();
                gate.add_permits(1);
            }
            let text = String::from_utf8(meta.data.to_vec())?;
            Ok(if text.is_empty() { seen(&meta) } else { seen(&meta).and(sql(text)) })
        }
    });
    let scriba = fixture.play_to(&recorder, &play, options()).await;
    eventually("the others are handled", || play.handled().len() == 63).await;
    first.add_permits(1);
    until(&scriba, &played(), 63).await;
    let batches: Vec<(u64, bool)> = recorder
        .events_of(played())
        .into_iter()
        .filter_map(|event| match event {
            Recorded::BatchFailed { events, class: Some(FailureClass::TransientStatement), .. } => {
                Some((events, false))
            }
            Recorded::BatchStop { events, .. } => Some((events, true)),
            _ => None,
        })
        .collect();
    assert_eq!(batches[0], (64, false), "{batches:?}");
    assert_eq!(batches.iter().filter(|(_, durable)| !durable).count(), 3, "{batches:?}");
    let halved = batches.windows(2).all(|pair| pair[0].1 || pair[1].0 <= (pair[0].0 / 2).max(1));
    assert!(halved, "{batches:?}");
    assert_eq!(fixture.seen().await, (0..64).collect::<Vec<_>>());
}
