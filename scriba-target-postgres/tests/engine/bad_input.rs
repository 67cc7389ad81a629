//! Input that is not what anyone expected: a dead letter, or an error that says what to do.

use scriba_core::{EventMeta, Events, Handler, HandlerResult, Projection, ProjectionId, Scriba, StartError, State};
use scriba_target_postgres::{PgOp, Table};
use serde::Deserialize;

use super::common::{Fixture, eventually, fixture, options, until};

#[derive(Deserialize)]
struct Note {
    text: String,
}

#[derive(Events)]
enum NoteEvent {
    Noted(Note),
}

#[derive(Table)]
#[table(name = "notes")]
struct NoteRow {
    #[table(key)]
    position: i64,
    text: String,
}

#[derive(Projection)]
#[projection(name = "notes")]
struct Notes;

impl Handler for Notes {
    type Event = NoteEvent;
    type Op = PgOp;

    async fn handle(&self, event: NoteEvent, meta: &EventMeta) -> HandlerResult<PgOp> {
        let NoteEvent::Noted(note) = event;
        Ok(NoteRow { position: meta.position.to_i64()?, text: note.text }.insert().into())
    }
}

fn id() -> ProjectionId {
    ProjectionId::of::<Notes>()
}

async fn notes() -> Fixture {
    let fixture = fixture().await;
    let table = "CREATE TABLE notes (position bigint PRIMARY KEY, text text NOT NULL)";
    sqlx::raw_sql(table).execute(&fixture.pool).await.unwrap();
    fixture
}

async fn start(fixture: &Fixture) -> Scriba {
    let scriba = Scriba::new();
    scriba.start(Notes, fixture.source.clone(), fixture.target.clone(), options()).await.unwrap();
    scriba
}

async fn dead_letters(fixture: &Fixture) -> Vec<(i64, String, Vec<u8>, bool)> {
    let letters = "SELECT position, error_kind, data, data_json IS NOT NULL FROM scriba_dead_letters ORDER BY position";
    sqlx::query_as(letters).fetch_all(&fixture.pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_do_not_decode_are_dead_letters_with_their_bytes_and_good_ones_around_them_are_applied() {
    let fixture = notes().await;
    let mebibyte = format!(r#"{{"text":"{}"}}"#, "x".repeat(1 << 20));
    fixture.append("a", "Noted", br#"{"text":"good"}"#).await;
    fixture.append("a", "Noted", b"not json").await;
    fixture.append("a", "Noted", b"").await;
    fixture.append("a", "Noted", b"\xff\xfe\0").await;
    fixture.append("a", "Noted", br#"{"text":7}"#).await;
    fixture.append("a", "Unheard", b"of").await;
    fixture.append(&"s".repeat(10_000), "Noted", b"{").await;
    fixture.append(&"s".repeat(10_000), "Noted", mebibyte.as_bytes()).await;
    let last = fixture.append("a", "Noted", br#"{"text":"good"}"#).await;
    let scriba = start(&fixture).await;
    until(&scriba, &id(), last).await;
    let letters = dead_letters(&fixture).await;
    let decode = |position, bytes: &[u8], json| (position, "decode".to_owned(), bytes.to_vec(), json);
    let expected = [
        decode(1, b"not json", false),
        decode(2, b"", false),
        decode(3, b"\xff\xfe\0", false),
        decode(4, br#"{"text":7}"#, true),
        decode(6, b"{", false),
    ];
    assert_eq!(letters, expected);
    let applied: Vec<i64> =
        sqlx::query_scalar("SELECT position FROM notes ORDER BY position").fetch_all(&fixture.pool).await.unwrap();
    assert_eq!(applied, [0, 7, 8]);
    let info = scriba.info(id()).unwrap();
    assert_eq!(
        (info.run.delivered, info.run.applied, info.run.dead_lettered),
        (8, 3, 5),
        "the unknown type is not delivered"
    );
    assert_eq!((info.stored.applied, info.stored.skipped, info.stored.dead_lettered), (3, 0, 5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_with_a_nul_that_the_read_model_cannot_hold_is_a_dead_letter_of_its_event_alone() {
    let fixture = notes().await;
    fixture.append("a", "Noted", br#"{"text":"good"}"#).await;
    fixture.append("a", "Noted", br#"{"text":"a\u0000b"}"#).await;
    fixture.append("a", "Noted", br#"{"text":"good"}"#).await;
    let scriba = start(&fixture).await;
    until(&scriba, &id(), 2).await;
    let kind = "commit:22021 (character_not_in_repertoire)".to_owned();
    assert_eq!(dead_letters(&fixture).await, [(1, kind, br#"{"text":"a\u0000b"}"#.to_vec(), false)]);
    let applied: Vec<i64> =
        sqlx::query_scalar("SELECT position FROM notes ORDER BY position").fetch_all(&fixture.pool).await.unwrap();
    assert_eq!(applied, [0, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_and_old_control_tables_are_errors_at_start_with_the_command_that_mends_them() {
    let fixture = notes().await;
    let error = |error: StartError| match error {
        StartError::Target { message, .. } => message,
        other => panic!("{other}"),
    };
    let scriba = Scriba::new();
    let old = "CREATE OR REPLACE FUNCTION scriba_schema_version() RETURNS integer LANGUAGE sql AS 'SELECT 0'";
    sqlx::raw_sql(old).execute(&fixture.pool).await.unwrap();
    let start = || scriba.start(Notes, fixture.source.clone(), fixture.target.clone(), options());
    let message = error(start().await.unwrap_err());
    assert!(message.contains('0') && message.contains('1') && message.contains("PgTarget::migrate"), "{message}");
    fixture.target.migrate_down().await.unwrap();
    let message = error(start().await.unwrap_err());
    assert!(message.contains("scriba_") && message.contains("PgTarget::migrate"), "{message}");
    fixture.target.migrate().await.unwrap();
    start().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_the_read_model_that_is_missing_halts_and_names_it() {
    let fixture = fixture().await;
    fixture.append("a", "Noted", br#"{"text":"good"}"#).await;
    let scriba = start(&fixture).await;
    eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
    let reason = scriba.info(id()).unwrap().halt_reason.unwrap();
    assert!(reason.message.contains("notes"), "{reason}");
    // Mended, it goes on where it was.
    let table = "CREATE TABLE notes (position bigint PRIMARY KEY, text text NOT NULL)";
    sqlx::raw_sql(table).execute(&fixture.pool).await.unwrap();
    scriba.stop(id()).await.unwrap();
    scriba.start(Notes, fixture.source.clone(), fixture.target.clone(), options()).await.unwrap();
    until(&scriba, &id(), 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_does_not_exist_is_an_error_at_start() {
    let fixture = notes().await;
    let source = scriba_source_postgres::PgLog::new(fixture.pool.clone(), "no_such_table");
    let error = Scriba::new().start(Notes, source, fixture.target.clone(), options()).await.unwrap_err();
    assert!(matches!(&error, StartError::Source { message, .. } if message.contains("no_such_table")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_restored_and_written_to_since_halts_at_the_next_start_and_one_that_was_pruned_does_not() {
    let fixture = notes().await;
    fixture.append("a", "Noted", br#"{"text":"good"}"#).await;
    let last = fixture.append("a", "Noted", br#"{"text":"good"}"#).await;
    let scriba = start(&fixture).await;
    until(&scriba, &id(), last).await;
    scriba.stop(id()).await.unwrap();
    let again = async || {
        scriba.start(Notes, fixture.source.clone(), fixture.target.clone(), options()).await.unwrap();
    };
    sqlx::raw_sql("UPDATE events SET id = gen_random_uuid() WHERE position = 1").execute(&fixture.pool).await.unwrap();
    again().await;
    eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
    let reason = scriba.info(id()).unwrap().halt_reason.unwrap();
    assert!(reason.message.contains("restored"), "{reason}");
    assert_eq!(reason.position.map(scriba_core::Position::get), Some(1));
    scriba.stop(id()).await.unwrap();
    sqlx::raw_sql("DELETE FROM events").execute(&fixture.pool).await.unwrap();
    again().await;
    until(&scriba, &id(), fixture.append("a", "Noted", br#"{"text":"good"}"#).await).await;
}
