//! Batches with events whose data the database refuses: those alone become dead letters.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod closures;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use scriba_core::checkpoint::Counts;
use scriba_core::target::{
    Batch, CommitError, Committed, DeadLetterFilter, Entry, HaltBefore, Tables, TakeOver, TakenOver, Target, Write,
};
use scriba_core::{DeadLetterPolicy, EventMeta, FailureClass, OnPoison, Outcome, Position, RecordedEvent};
use scriba_target_postgres::{CustomError, PgOp, PgTarget, Table, custom, sql};
use sqlx::{Connection, Executor, PgConnection};

use self::support::{Fixture, NO_CIRCUIT, dead, event, failure, fixture, id, source, take_over};

#[derive(Table)]
#[table(name = "accounts")]
struct Account {
    #[table(key)]
    id: i64,
    balance: i64,
}

/// With a table of accounts whose balance may not be negative.
async fn accounts() -> Fixture {
    let fixture = fixture().await;
    let table = "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL CHECK (balance >= 0));
                 CREATE TABLE notes (id bigint PRIMARY KEY, of bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)";
    sqlx::raw_sql(table).execute(&fixture.pool).await.unwrap();
    fixture
}

impl Fixture {
    async fn ids(&self, table: &'static str) -> Vec<i64> {
        let text = sqlx::AssertSqlSafe(format!("SELECT id FROM {table} ORDER BY id"));
        sqlx::query_scalar(text).fetch_all(&self.pool).await.unwrap()
    }

    /// Position and kind of all dead letters.
    async fn letters(&self) -> Vec<(u64, String)> {
        let letters = self.target.dead_letters(&id(), &DeadLetterFilter::default()).await.unwrap();
        letters.into_iter().map(|letter| (letter.position.get(), letter.failure.kind)).collect()
    }
}

/// Of a stream of its own.
fn meta(position: u64) -> EventMeta {
    EventMeta::new(RecordedEvent { stream_id: format!("s{position}").into(), ..event(position) }, false)
}

fn apply(position: u64, op: impl Into<PgOp>) -> Entry<PgOp> {
    Entry { meta: meta(position), write: Write::Apply(Outcome::from(op.into())) }
}

fn all(position: u64, ops: impl IntoIterator<Item = PgOp>) -> Entry<PgOp> {
    let outcome = Outcome::all_or_skip(ops);
    Entry { meta: meta(position), write: Write::Apply(outcome) }
}

fn open(position: u64, balance: i64) -> Entry<PgOp> {
    apply(position, Account { id: position.cast_signed(), balance }.insert())
}

fn note(note: i64, of: i64) -> PgOp {
    sql("INSERT INTO notes VALUES ($1, $2)").bind(note).bind(of).into()
}

/// Commits as the engine does: up to where a batch has to end, where it has to.
async fn commit(
    taken: &mut TakenOver<PgOp>,
    entries: Vec<Entry<PgOp>>,
    policy: DeadLetterPolicy,
) -> Result<(Option<Committed>, Option<HaltBefore>), CommitError> {
    let last = entries.last().unwrap().meta.position;
    let mut batch = Batch::new(id(), &taken.checkpoint, last, entries, policy);
    let mut halt = None;
    loop {
        match taken.committer.commit(&batch).await {
            Ok(committed) => {
                taken.checkpoint.committed(&batch.advance, committed.counts, committed.in_row.clone());
                return Ok((Some(committed), halt));
            }
            Err(CommitError::HaltBefore(before)) => {
                let left = batch.end_before(before.position);
                halt = Some(before);
                if !left {
                    return Ok((None, halt));
                }
            }
            Err(error) => return Err(error),
        }
    }
}

#[tokio::test]
async fn of_a_thousand_events_25_that_break_a_rule_are_dead_letters_and_all_others_are_applied() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let is_bad = |position: u64| position % 40 == 7;
    let entries = (0..1_000).map(|n| open(n, if is_bad(n) { -1 } else { 1 })).collect();
    let (committed, halt) = commit(&mut taken, entries, DeadLetterPolicy::default()).await.unwrap();
    assert!(halt.is_none());
    let committed = committed.unwrap();
    assert_eq!(committed.counts, Counts { applied: 975, skipped: 0, dead_lettered: 25 });
    // 32 chunks of three, 25 of them undone and written again as 32 events of three.
    assert!(committed.statements < 3_000, "{}", committed.statements);
    let bad: Vec<u64> = (0..1_000).filter(|n| is_bad(*n)).collect();
    let letters = fixture.letters().await;
    assert_eq!(letters.iter().map(|(position, _)| *position).collect::<Vec<_>>(), bad);
    assert!(letters.iter().all(|(_, kind)| kind == "commit:23514 (check_violation)"), "{letters:?}");
    assert_eq!(fixture.ids("accounts").await.len(), 975);
    let stored = fixture.stored().await;
    assert_eq!(stored.counts, committed.counts);
    assert_eq!((stored.commit_no, stored.watermark), (1, Some(Position::new(999))));
    assert_eq!(stored.in_row.count, 0, "applied events came after the last one");
}

#[tokio::test]
async fn a_deferred_constraint_names_its_event_and_an_event_may_break_and_heal_one_by_itself() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let heal = sql("DELETE FROM notes WHERE id = $1");
    let entries = vec![
        all(1, [note(1, 10)]),
        // Breaks it and heals it.
        all(2, [note(2, 10), heal.clone().bind(1_i64).into()]),
        // Breaks it; the next event would heal it.
        all(3, [note(3, 10)]),
        all(4, [note(4, 11), heal.bind(3_i64).into()]),
    ];
    let (committed, _) = commit(&mut taken, entries, DeadLetterPolicy::default()).await.unwrap();
    assert_eq!(committed.unwrap().counts, Counts { applied: 3, skipped: 0, dead_lettered: 1 });
    assert_eq!(fixture.letters().await, [(3, "commit:23505 (unique_violation)".to_owned())]);
    assert_eq!(fixture.ids("notes").await, [2, 4]);
}

#[tokio::test]
async fn an_event_with_several_operations_is_applied_whole_or_not_at_all() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let account = |id, balance| PgOp::from(Account { id, balance }.insert());
    let entries = vec![all(1, [account(1, 1), account(2, -1)]), all(2, [account(2, 5), account(3, 5)])];
    commit(&mut taken, entries, DeadLetterPolicy::default()).await.unwrap();
    assert_eq!(fixture.ids("accounts").await, [2, 3]);
}

#[tokio::test]
async fn a_required_row_that_is_missing_makes_a_dead_letter_of_kind_no_row() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let missing = apply(2, Account::update(9_i64).add(Account::BALANCE, 2).required());
    commit(&mut taken, vec![open(1, 1), missing, open(3, 1)], DeadLetterPolicy::default()).await.unwrap();
    assert_eq!(fixture.letters().await, [(2, "no_row".to_owned())]);
    assert_eq!(fixture.ids("accounts").await, [1, 3]);
    let letter = fixture.target.dead_letters(&id(), &DeadLetterFilter::default()).await.unwrap().remove(0);
    assert!(letter.failure.message.contains("accounts"), "{:?}", letter.failure);
}

#[tokio::test]
async fn what_a_statement_of_the_users_may_not_be_is_a_dead_letter_too() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let entries = vec![open(1, 1), apply(2, sql("COMMIT")), open(3, 1)];
    commit(&mut taken, entries, DeadLetterPolicy::default()).await.unwrap();
    assert_eq!(fixture.letters().await, [(2, "commit".to_owned())]);
    assert_eq!(fixture.ids("accounts").await, [1, 3]);
}

#[tokio::test]
async fn on_poison_halt_ends_the_batch_before_the_event_and_in_a_replay_as_it_says_there() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let policy = DeadLetterPolicy { on_poison: OnPoison::Halt, ..DeadLetterPolicy::default() };
    let mut replayed = open(2, -1);
    replayed.meta = EventMeta::new(replayed.meta.event().clone(), true);
    let entries = vec![open(1, 1), replayed, open(3, 1), open(4, -1), open(5, 1)];
    let (committed, halt) = commit(&mut taken, entries, policy).await.unwrap();
    let reason = halt.unwrap().reason;
    assert_eq!((reason.position, reason.class), (Some(Position::new(4)), Some(FailureClass::Integrity)));
    assert_eq!(reason.code.as_deref(), Some("23514"));
    assert_eq!(committed.unwrap().counts, Counts { applied: 2, skipped: 0, dead_lettered: 1 });
    assert_eq!(fixture.stored().await.watermark, Some(Position::new(3)));
    assert_eq!(fixture.ids("accounts").await, [1, 3]);
}

#[tokio::test]
async fn a_circuit_trips_at_the_same_event_for_every_batch_size_and_over_take_overs() {
    // Five in a row over three streams at position 12: before it are two runs of four.
    let bad = [1, 2, 3, 4, 8, 9, 10, 11, 12, 13];
    for size in [1, 2, 3, 5, 7, 100] {
        let fixture = accounts().await;
        let mut halted = None;
        for start in (0..20).step_by(size) {
            let mut taken = take_over(&fixture.target).await;
            let entries = (start..20.min(start + size as u64)).map(|n| open(n, if bad.contains(&n) { -1 } else { 1 }));
            let (_, halt) = commit(&mut taken, entries.collect(), DeadLetterPolicy::default()).await.unwrap();
            if let Some(halt) = halt {
                halted = Some(halt.position.get());
                break;
            }
        }
        assert_eq!(halted, Some(12), "batches of {size}");
        assert_eq!(fixture.letters().await.len(), 8, "batches of {size}");
        let stored = fixture.stored().await;
        assert_eq!((stored.watermark, stored.in_row.count), (Some(Position::new(11)), 4), "batches of {size}");
        // It does not forget: the next one trips it again.
        let mut taken = take_over(&fixture.target).await;
        let (committed, halt) = commit(&mut taken, vec![open(12, -1)], DeadLetterPolicy::default()).await.unwrap();
        assert!(committed.is_none() && halt.is_some(), "batches of {size}");
    }
}

#[tokio::test]
async fn an_update_that_hits_no_row_does_not_reset_the_circuit_and_one_that_hits_does() {
    for (hit, trips) in [(false, true), (true, false)] {
        let fixture = accounts().await;
        let mut taken = take_over(&fixture.target).await;
        let target = if hit { 0_i64 } else { 77 };
        let update = |position| apply(position, Account::update(target).add(Account::BALANCE, 1));
        let of_handler = |position| Entry { meta: meta(position), ..dead(event(position), failure("decode")) };
        commit(&mut taken, vec![open(0, 1)], DeadLetterPolicy::default()).await.unwrap();
        // Dead letters of the handler's and of the database's count alike.
        let entries = vec![of_handler(1), open(2, -1), update(3), of_handler(4), update(5), open(6, -1), of_handler(7)];
        let (_, halt) = commit(&mut taken, entries, DeadLetterPolicy::default()).await.unwrap();
        assert_eq!(halt.map(|halt| halt.position.get()), trips.then_some(7), "hit: {hit}");
        let stored = fixture.stored().await.in_row.count;
        assert_eq!(stored, if trips { 4 } else { 2 });
    }
}

#[tokio::test]
async fn a_dead_letter_that_cannot_be_written_halts_and_nothing_is_written() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    sqlx::raw_sql("DROP TABLE scriba_dead_letters").execute(&fixture.pool).await.unwrap();
    let result = commit(&mut taken, vec![open(1, 1), open(2, -1)], DeadLetterPolicy::default()).await;
    let Err(CommitError::Failed(error)) = result else { panic!("{result:?}") };
    assert_eq!((error.class, error.code.as_deref()), (FailureClass::Structural, Some("42P01")));
    assert!(fixture.ids("accounts").await.is_empty());
    assert_eq!(fixture.stored().await.watermark, None);
}

fn closure<F>(position: u64, run: F) -> Entry<PgOp>
where
    F: for<'c> Fn(&'c mut PgConnection) -> std::pin::Pin<Box<dyn Future<Output = Result<(), CustomError>> + Send + 'c>>
        + Send
        + Sync
        + 'static,
{
    apply(position, custom(run))
}

#[tokio::test]
async fn a_statement_whose_function_changes_settings_does_not_change_what_later_events_do() {
    let fixture = accounts().await;
    sqlx::raw_sql("CREATE SCHEMA elsewhere; CREATE TABLE elsewhere.accounts (LIKE accounts)")
        .execute(&fixture.pool)
        .await
        .unwrap();
    let mut taken = take_over(&fixture.target).await;
    let sets = |position| apply(position, sql("SELECT set_config('search_path', 'elsewhere', false)"));
    let entries = vec![open(1, 1), sets(2), open(3, 1), sets(4)];
    let (committed, _) = commit(&mut taken, entries, NO_CIRCUIT).await.unwrap();
    assert_eq!(committed.unwrap().counts.applied, 4);
    commit(&mut taken, vec![open(5, 1)], NO_CIRCUIT).await.unwrap();
    assert_eq!(fixture.ids("accounts").await, [1, 3, 5]);
    let read_only = apply(7, sql("SELECT set_config('transaction_read_only', 'on', false)"));
    commit(&mut taken, vec![open(6, 1), read_only, open(8, 1)], NO_CIRCUIT).await.unwrap();
    assert_eq!(fixture.letters().await, [(7, "custom:left_transaction".to_owned())]);
    assert_eq!(fixture.ids("accounts").await, [1, 3, 5, 6, 8]);
}

#[tokio::test]
async fn settings_of_a_batch_that_was_rolled_back_do_not_leak_into_the_next() {
    let fixture = accounts().await;
    let mut taken = take_over(&fixture.target).await;
    let set = || apply(1, sql("SELECT set_config('application_name', 'mine', false)"));
    commit(&mut taken, vec![set()], NO_CIRCUIT).await.unwrap();
    // Rolled back, with the reset that went before it.
    let policy = DeadLetterPolicy { on_poison: OnPoison::Halt, ..NO_CIRCUIT };
    let (committed, halt) = commit(&mut taken, vec![open(2, -1)], policy).await.unwrap();
    assert!(committed.is_none() && halt.is_some());
    let name = "INSERT INTO notes SELECT 1 WHERE current_setting('application_name') = 'mine'";
    commit(&mut taken, vec![apply(2, sql(name))], NO_CIRCUIT).await.unwrap();
    assert!(fixture.ids("notes").await.is_empty());
}

#[tokio::test]
async fn a_deferred_trigger_does_its_work_at_the_end_of_each_event_and_once() {
    let fixture = accounts().await;
    let trigger = "CREATE TABLE lines (n bigserial, of bigint, seen bigint);
        CREATE FUNCTION line() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN INSERT INTO lines (of, seen) SELECT NEW.id, count(*) FROM lines; RETURN NULL; END';
        CREATE CONSTRAINT TRIGGER line AFTER INSERT ON notes DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION line()";
    sqlx::raw_sql(trigger).execute(&fixture.pool).await.unwrap();
    let mut taken = take_over(&fixture.target).await;
    let entries = vec![all(1, [note(1, 1)]), all(2, [note(2, 2)]), open(3, -1), all(4, [note(4, 4)])];
    commit(&mut taken, entries, NO_CIRCUIT).await.unwrap();
    let lines: Vec<(i64, i64)> =
        sqlx::query_as("SELECT of, seen FROM lines ORDER BY n").fetch_all(&fixture.pool).await.unwrap();
    assert_eq!(lines, [(1, 0), (2, 1), (4, 2)]);
}

#[tokio::test]
async fn events_with_deferred_constraints_are_each_checked_once() {
    let fixture = accounts().await;
    let slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.002); RETURN NULL; END';
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON notes DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()";
    sqlx::raw_sql(slow).execute(&fixture.pool).await.unwrap();
    let mut taken = take_over(&fixture.target).await;
    let entries =
        (0..200).map(|n| if n == 100 { open(n, -1) } else { all(n, [note(n.cast_signed(), n.cast_signed())]) });
    let begun = std::time::Instant::now();
    commit(&mut taken, entries.collect(), NO_CIRCUIT).await.unwrap();
    // Checked anew at each event, they would take 200 * 200 / 2 * 2 ms.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    assert_eq!(fixture.ids("notes").await.len(), 199);
}

#[tokio::test]
async fn a_statement_that_changes_what_later_events_stand_on_is_undone_behind_its_event() {
    let fixture = accounts().await;
    let functions = "CREATE ROLE scriba_weak;
        CREATE FUNCTION weak() RETURNS void LANGUAGE plpgsql AS 'BEGIN PERFORM set_config(''role'', ''scriba_weak'', false); END';
        CREATE FUNCTION shadow() RETURNS void LANGUAGE plpgsql AS
            'BEGIN CREATE TEMP TABLE accounts (id bigint, balance bigint) ON COMMIT DROP; END';
        CREATE FUNCTION keep() RETURNS void LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_lock(9); END'";
    sqlx::raw_sql(functions).execute(&fixture.pool).await.unwrap();
    let mut taken = take_over(&fixture.target).await;
    let mut position = 0;
    for text in
        ["SELECT weak()", "SELECT shadow()", "SELECT keep()", "CREATE TEMP TABLE accounts (id bigint, balance bigint)"]
    {
        let entries = (0..4).map(|n| {
            position += 1;
            if n % 2 == 0 { apply(position, sql(text)) } else { open(position, 1) }
        });
        let (committed, _) = commit(&mut taken, entries.collect(), NO_CIRCUIT).await.unwrap();
        assert_eq!(committed.unwrap().counts.applied, 4, "{text}: {:?}", fixture.letters().await);
    }
    commit(&mut taken, vec![open(17, 1)], NO_CIRCUIT).await.unwrap();
    assert_eq!(fixture.ids("accounts").await, [2, 4, 6, 8, 10, 12, 14, 16, 17]);
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 9";
    assert_eq!(sqlx::query_scalar::<_, i64>(locks).fetch_one(&fixture.pool).await.unwrap(), 0);
}

#[tokio::test]
async fn constraints_of_one_name_are_checked_at_the_end_of_each_event() {
    let fixture = accounts().await;
    let tables = "CREATE TABLE early (id bigint, CONSTRAINT once UNIQUE (id) DEFERRABLE INITIALLY IMMEDIATE);
        CREATE TABLE late (id bigint); ALTER TABLE late ADD CONSTRAINT late_once UNIQUE (id) DEFERRABLE INITIALLY DEFERRED;
        ALTER TABLE late ADD CONSTRAINT positive CHECK (id > 0);
        CREATE TABLE other (id bigint, CONSTRAINT fk UNIQUE (id) DEFERRABLE INITIALLY IMMEDIATE);
        CREATE TABLE another (id bigint REFERENCES accounts, CONSTRAINT fk FOREIGN KEY (id) REFERENCES accounts DEFERRABLE INITIALLY DEFERRED)";
    sqlx::raw_sql(tables).execute(&fixture.pool).await.unwrap();
    let mut taken = take_over(&fixture.target).await;
    let run = |text: &'static str| PgOp::from(sql(text));
    let heals = || [run("INSERT INTO late VALUES (1), (1)"), run("DELETE FROM late")];
    let breaks = || [run("INSERT INTO late VALUES (2), (2)")];
    let entries = vec![
        open(1, -1),
        all(2, heals()),
        all(3, breaks()),
        all(4, [run("INSERT INTO early VALUES (1), (1)"), run("DELETE FROM early")]),
        all(5, heals()),
    ];
    commit(&mut taken, entries, NO_CIRCUIT).await.unwrap();
    let dead: Vec<u64> = fixture.letters().await.into_iter().map(|(position, _)| position).collect();
    assert_eq!(dead, [1, 3, 4], "an immediate one is checked at once, a deferred one at the end of the event");
}
