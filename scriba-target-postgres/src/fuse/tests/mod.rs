//! Fused and one by one on a real Postgres: the same rows, or a failure of the whole.

mod facts;
mod forms;
mod merging;
mod plans;
mod property;
mod rules;

use sqlx::{AssertSqlSafe, Connection, PgConnection, raw_sql};

use super::*;
use crate::op::{DeleteOp, InsertOp, Rows, UpdateOp};
use crate::statement::StatementError;
use crate::table::{ColumnMeta, ValueKind};
use scriba_testing::postgres::Postgres;

/// A table whose first column is its key.
const fn table(name: &'static str, columns: &'static [ColumnMeta]) -> TableMeta {
    TableMeta { schema: None, name, columns, key: &[0] }
}

const fn column(name: &'static str, kind: ValueKind) -> ColumnMeta {
    ColumnMeta { name, kind, cast: None }
}

const fn cast(name: &'static str, cast: &'static str) -> ColumnMeta {
    ColumnMeta { name, kind: ValueKind::Text, cast: Some(cast) }
}

fn int(value: i64) -> Value {
    Value::I64(value)
}

fn text(value: &str) -> Value {
    Value::Text(value.to_owned())
}

fn insert(table: &'static TableMeta, values: impl Into<Vec<Value>>) -> PgOp {
    write(table, values, Conflict::Fail)
}

/// Sets the second column on conflict.
fn upsert(table: &'static TableMeta, values: impl Into<Vec<Value>>) -> PgOp {
    write(table, values, Conflict::Update { set: 1 << 1, add: 0 })
}

fn write(table: &'static TableMeta, values: impl Into<Vec<Value>>, conflict: Conflict) -> PgOp {
    let values: Vec<Value> = values.into();
    assert_eq!(values.len(), table.columns.len());
    PgOp::Insert(InsertOp { table, values: values.into(), conflict })
}

fn set(table: &'static TableMeta, key: Value, column: usize, value: Value) -> PgOp {
    update(table, key, [(column, value)], [])
}

fn add(table: &'static TableMeta, key: Value, column: usize, value: Value) -> PgOp {
    update(table, key, [], [(column, value)])
}

fn update(
    table: &'static TableMeta,
    key: Value,
    set: impl Into<Vec<(usize, Value)>>,
    add: impl Into<Vec<(usize, Value)>>,
) -> PgOp {
    PgOp::Update(UpdateOp { table, rows: Rows::Key([key].into()), set: set.into(), add: add.into(), required: false })
}

fn delete(table: &'static TableMeta, key: Value) -> PgOp {
    PgOp::Delete(DeleteOp { table, rows: Rows::Key([key].into()), required: false })
}

fn delete_where(table: &'static TableMeta, filter: impl Into<Vec<(usize, Value)>>) -> PgOp {
    PgOp::Delete(DeleteOp { table, rows: Rows::Filter(filter.into()), required: false })
}

fn required(mut op: PgOp) -> PgOp {
    match &mut op {
        PgOp::Update(op) => op.required = true,
        PgOp::Delete(op) => op.required = true,
        PgOp::Sql(op) => op.required = true,
        PgOp::Insert(_) => panic!("an insert is not required"),
    }
    op
}

/// Each operation an event of its own.
fn events(ops: &[PgOp]) -> Vec<Row<'_>> {
    (1..).map(Position::new).zip(ops).collect()
}

/// A database of its own with some tables.
struct Place {
    conn: PgConnection,
    /// Run before each try, for what a rollback leaves: sequences.
    reset: &'static str,
}

/// What a fused batch came to.
#[derive(Debug, PartialEq)]
enum Fused {
    Rows(String),
    Failed(String),
}

/// What the same batch came to one by one: the rows in the end and the events that failed.
#[derive(Debug, PartialEq)]
struct OneByOne {
    rows: String,
    failed: Vec<(Position, String)>,
}

impl OneByOne {
    /// A fused batch may differ only by failing, and does so only where something fails anyway.
    fn agrees_with(&self, fused: &Fused) -> bool {
        match fused {
            Fused::Rows(rows) => self.failed.is_empty() && *rows == self.rows,
            Fused::Failed(_) => !self.failed.is_empty(),
        }
    }
}

impl Place {
    async fn new(setup: &'static str) -> Self {
        let database = Postgres::shared().await.unwrap().create_database().await.unwrap();
        let mut conn = PgConnection::connect_with(&database.connect_options()).await.unwrap();
        raw_sql(setup).execute(&mut conn).await.unwrap();
        Self { conn, reset: "" }
    }

    async fn facts(&mut self, ops: &[Row<'_>]) -> FactsCache {
        let mut facts = FactsCache::default();
        facts.load(&mut self.conn, ops.iter().filter_map(|row| table_of(row.1))).await.unwrap();
        facts
    }

    async fn begin(&mut self) {
        raw_sql(self.reset).execute(&mut self.conn).await.unwrap();
        raw_sql("BEGIN; SET CONSTRAINTS ALL IMMEDIATE").execute(&mut self.conn).await.unwrap();
    }

    async fn rollback(&mut self) {
        raw_sql("ROLLBACK").execute(&mut self.conn).await.unwrap();
    }

    /// All rows of all tables.
    async fn rows(&mut self) -> String {
        let tables: Vec<String> = sqlx::query_scalar(
            "SELECT format('%I', relname) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' ORDER BY 1",
        )
        .fetch_all(&mut self.conn)
        .await
        .unwrap();
        let mut all = String::new();
        for table in tables {
            let query =
                format!("SELECT coalesce(string_agg(t::text, ' ' ORDER BY t::text COLLATE \"C\"), '') FROM {table} t");
            let rows: String = sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(&mut self.conn).await.unwrap();
            all.extend([&table, ": ", &rows, "\n"]);
        }
        all
    }

    async fn fused(&mut self, ops: &[Row<'_>], facts: &FactsCache) -> Fused {
        self.begin().await;
        let mut outcome = None;
        for statement in plan(ops, facts) {
            if let Err(error) = statement.execute(&mut self.conn).await {
                outcome = Some(Fused::Failed(code(error)));
                break;
            }
        }
        let outcome = match outcome {
            Some(failed) => failed,
            None => Fused::Rows(self.rows().await),
        };
        self.rollback().await;
        outcome
    }

    /// A savepoint for each event; what fails is left out.
    async fn one_by_one(&mut self, ops: &[Row<'_>]) -> OneByOne {
        self.begin().await;
        let mut failed = Vec::new();
        for event in ops.chunk_by(|a, b| a.0 == b.0) {
            raw_sql("SAVEPOINT e").execute(&mut self.conn).await.unwrap();
            for statement in plan_one_by_one(event) {
                if let Err(error) = statement.execute(&mut self.conn).await {
                    failed.push((event[0].0, code(error)));
                    raw_sql("ROLLBACK TO e").execute(&mut self.conn).await.unwrap();
                    break;
                }
            }
            raw_sql("RELEASE e").execute(&mut self.conn).await.unwrap();
        }
        let rows = self.rows().await;
        self.rollback().await;
        OneByOne { rows, failed }
    }

    /// Fused and one by one agree.
    async fn agree(&mut self, ops: &[PgOp]) -> OneByOne {
        let ops = events(ops);
        let facts = self.facts(&ops).await;
        let fused = self.fused(&ops, &facts).await;
        let one_by_one = self.one_by_one(&ops).await;
        assert!(one_by_one.agrees_with(&fused), "{fused:#?}\n{one_by_one:#?}");
        one_by_one
    }

    /// Fused and one by one agree, and would not without a certain fact: the rule that rests on it is needed.
    async fn agree_only_with(&mut self, ops: &[PgOp], forget: impl Fn(&mut TableFacts)) {
        let one_by_one = self.agree(ops).await;
        let ops = events(ops);
        let mut facts = self.facts(&ops).await;
        for table in ops.iter().filter_map(|row| table_of(row.1)) {
            let mut forgetful = facts.get(table).unwrap().clone();
            forget(&mut forgetful);
            facts.insert(table, forgetful);
        }
        let fused = self.fused(&ops, &facts).await;
        assert!(
            matches!(fused, Fused::Rows(_)) && !one_by_one.agrees_with(&fused),
            "the batch does not show that the rule is needed: {fused:#?}\n{one_by_one:#?}"
        );
    }

    async fn statements(&mut self, ops: &[PgOp]) -> usize {
        let ops = events(ops);
        let facts = self.facts(&ops).await;
        plan(&ops, &facts).len()
    }
}

fn code(error: StatementError) -> String {
    match error {
        StatementError::NoRow(_) => crate::statement::NO_ROW.to_owned(),
        StatementError::Database(error) => error
            .as_database_error()
            .and_then(sqlx::error::DatabaseError::code)
            .map_or_else(|| error.to_string(), std::borrow::Cow::into_owned),
    }
}

/// Nothing that keeps operations apart is known.
fn forget_all(facts: &mut TableFacts) {
    facts.one_by_one = None;
    facts.in_order = false;
    facts.unique = 0;
    facts.second_unique = false;
    facts.cascades = false;
}

/// Foreign keys are not known.
fn forget_links(facts: &mut TableFacts) {
    facts.group = 1_000_000 + facts.identity;
    facts.cascades = false;
    facts.referenced = 0;
}
