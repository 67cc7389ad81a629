//! Fused and one by one on a real Postgres: the same rows, or a failure of the whole.

mod facts;
mod forms;
mod merging;
mod plans;
mod property;
mod rules;
mod schemas;

use sqlx::{AssertSqlSafe, Connection, PgConnection, raw_sql};

use super::*;
use crate::facts::Links;
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
        PgOp::Insert(_) | PgOp::Custom(_) => panic!("it is not required"),
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
    /// The tables whose rows are compared; all where none is named.
    compared: Vec<&'static str>,
    /// Where a fused batch failed, the first event that fails one by one is enough.
    hasty: bool,
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
    /// No event failed, but one broke a deferrable constraint that it healed itself.
    healed: bool,
}

impl OneByOne {
    /// A fused batch may differ only by failing, and does so only where something fails anyway, or would have if deferred
    /// constraints were checked statement by statement.
    fn agrees_with(&self, fused: &Fused) -> bool {
        match fused {
            Fused::Rows(rows) => self.failed.is_empty() && *rows == self.rows,
            Fused::Failed(_) => !self.failed.is_empty() || self.healed,
        }
    }
}

/// When deferrable constraints are checked, at the latest at the end of each event.
#[derive(Clone, Copy, PartialEq)]
enum Checked {
    AsDeclared,
    AtOnce,
}

impl Place {
    async fn new(setup: &'static str) -> Self {
        let database = Postgres::shared().await.unwrap().create_database().await.unwrap();
        let options = database.connect_options().statement_cache_capacity(2_000);
        let mut conn = PgConnection::connect_with(&options).await.unwrap();
        raw_sql(setup).execute(&mut conn).await.unwrap();
        Self { conn, reset: "", compared: Vec::new(), hasty: false }
    }

    async fn facts(&mut self, ops: &[Row<'_>]) -> FactsCache {
        let mut facts = FactsCache::default();
        facts.load(&mut self.conn, ops.iter().filter_map(|row| table_of(row.1))).await.unwrap();
        facts
    }

    async fn begin(&mut self, checked: Checked) {
        if !self.reset.is_empty() {
            self.run(self.reset).await.unwrap();
        }
        self.run(if checked == Checked::AtOnce { "BEGIN; SET CONSTRAINTS ALL IMMEDIATE" } else { "BEGIN" })
            .await
            .unwrap();
    }

    async fn run(&mut self, sql: &'static str) -> Result<(), StatementError> {
        raw_sql(sql).execute(&mut self.conn).await?;
        Ok(())
    }

    async fn rollback(&mut self) {
        raw_sql("ROLLBACK").execute(&mut self.conn).await.unwrap();
    }

    /// All rows of the tables compared.
    async fn rows(&mut self) -> String {
        let mut tables: Vec<String> = self.compared.iter().map(|&name| name.to_owned()).collect();
        if tables.is_empty() {
            tables = sqlx::query_scalar(
                "SELECT format('%I', relname) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' ORDER BY 1",
            )
            .fetch_all(&mut self.conn)
            .await
            .unwrap();
        }
        let each = tables.iter().map(|table| {
            format!(
                "'{table}: ' || (SELECT coalesce(string_agg(t::text, ' ' ORDER BY t::text COLLATE \"C\"), '') FROM {table} t) || E'\\n'"
            )
        });
        let query = format!("SELECT concat({})", each.chain(["''".to_owned()]).collect::<Vec<_>>().join(" || "));
        sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(&mut self.conn).await.unwrap()
    }

    async fn fused(&mut self, ops: &[Row<'_>], facts: &FactsCache) -> Fused {
        self.begin(Checked::AtOnce).await;
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

    /// A savepoint for each event, and constraints checked at its end; what fails is left out.
    async fn one_by_one(&mut self, ops: &[Row<'_>], checked: Checked, to_the_end: bool) -> OneByOne {
        self.begin(checked).await;
        self.run("SAVEPOINT e").await.unwrap();
        let mut failed = Vec::new();
        for event in ops.chunk_by(|a, b| a.0 == b.0) {
            if let Err(error) = self.event(event).await {
                failed.push((event[0].0, code(error)));
                self.run("ROLLBACK TO e; RELEASE e; SAVEPOINT e").await.unwrap();
                if !to_the_end {
                    break;
                }
            }
        }
        let rows = self.rows().await;
        self.rollback().await;
        OneByOne { rows, failed, healed: false }
    }

    async fn event(&mut self, ops: &[Row<'_>]) -> Result<(), StatementError> {
        for statement in plan_one_by_one(ops) {
            statement.execute(&mut self.conn).await?;
        }
        self.run("SAVEPOINT chk; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO chk; RELEASE e; SAVEPOINT e").await
    }

    async fn compare(&mut self, ops: &[Row<'_>], facts: &FactsCache) -> (Fused, OneByOne) {
        let fused = self.fused(ops, facts).await;
        let to_the_end = !self.hasty || matches!(fused, Fused::Rows(_));
        let mut one_by_one = self.one_by_one(ops, Checked::AsDeclared, to_the_end).await;
        if !one_by_one.agrees_with(&fused) {
            one_by_one.healed = !self.one_by_one(ops, Checked::AtOnce, false).await.failed.is_empty();
        }
        (fused, one_by_one)
    }

    /// Fused and one by one agree.
    async fn agree(&mut self, ops: &[PgOp]) -> OneByOne {
        let ops = events(ops);
        let facts = self.facts(&ops).await;
        let (fused, one_by_one) = self.compare(&ops, &facts).await;
        assert!(one_by_one.agrees_with(&fused), "{fused:#?}\n{one_by_one:#?}");
        one_by_one
    }

    /// Fused and one by one agree, and would not without a certain fact: the rule that rests on it is needed.
    async fn agree_only_with(&mut self, ops: &[PgOp], forget: impl Fn(&mut TableFacts)) {
        let one_by_one = self.agree(ops).await;
        let ops = events(ops);
        let facts = self.facts_with(&ops, forget).await;
        let fused = self.fused(&ops, &facts).await;
        assert!(
            matches!(fused, Fused::Rows(_)) && !one_by_one.agrees_with(&fused),
            "the batch does not show that the rule is needed: {fused:#?}\n{one_by_one:#?}"
        );
    }

    async fn statements(&mut self, ops: &[PgOp]) -> usize {
        self.statements_with(ops, |_| ()).await
    }

    /// Statements, where facts are other than they are.
    async fn statements_with(&mut self, ops: &[PgOp], change: impl Fn(&mut TableFacts)) -> usize {
        let ops = events(ops);
        let facts = self.facts_with(&ops, change).await;
        plan(&ops, &facts).len()
    }

    async fn facts_with(&mut self, ops: &[Row<'_>], change: impl Fn(&mut TableFacts)) -> FactsCache {
        let mut facts = self.facts(ops).await;
        for table in ops.iter().filter_map(|row| table_of(row.1)) {
            let mut changed = facts.get(table).unwrap().clone();
            change(&mut changed);
            facts.insert(table, changed);
        }
        facts
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
    facts.links = Links::default();
}
