//! Operations on the read model, as data.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use scriba_core::Outcome;

use crate::table::{Column, Table, TableMeta};
use crate::value::{IntoColumn, Number, PgValue, Value};

/// One operation on the read model. Every operation can be applied again.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PgOp {
    /// Inserts a row, with what happens on conflict said.
    Insert(InsertOp),
    /// Changes rows.
    Update(UpdateOp),
    /// Deletes rows.
    Delete(DeleteOp),
    /// One SQL statement.
    Sql(SqlOp),
}

/// Inserts a row: made by [`Table::insert`] and [`Table::upsert`].
#[derive(Clone, Debug)]
#[must_use = "an operation does nothing until the handler returns it"]
pub struct InsertOp {
    pub(crate) table: &'static TableMeta,
    /// One value per column of the table's meta, in its order.
    pub(crate) values: Box<[Value]>,
    pub(crate) conflict: Conflict,
}

/// What happens when a row of the key is there already. Column sets are bits by column index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Conflict {
    Fail,
    Nothing,
    Update { set: u128, add: u128 },
}

/// Changes rows: made by [`Table::update`] and [`Table::update_where`].
#[derive(Clone, Debug)]
pub struct UpdateOp {
    pub(crate) table: &'static TableMeta,
    pub(crate) rows: Rows,
    /// Column index and new value.
    pub(crate) set: Vec<(usize, Value)>,
    /// Column index and value to add.
    pub(crate) add: Vec<(usize, Value)>,
    pub(crate) required: bool,
}

/// Deletes rows: made by [`Table::delete`] and [`Table::delete_where`].
#[derive(Clone, Debug)]
#[must_use = "an operation does nothing until the handler returns it"]
pub struct DeleteOp {
    pub(crate) table: &'static TableMeta,
    pub(crate) rows: Rows,
    pub(crate) required: bool,
}

/// Which rows.
#[derive(Clone, Debug)]
pub(crate) enum Rows {
    /// The one with this key: one value per key column.
    Key(Box<[Value]>),
    /// All whose columns equal these values (NULL equals NULL here).
    Filter(Vec<(usize, Value)>),
}

/// One SQL statement with its binds, run as a prepared statement: made by [`sql`].
#[derive(Clone, Debug)]
#[must_use = "an operation does nothing until the handler returns it"]
pub struct SqlOp {
    pub(crate) text: Cow<'static, str>,
    pub(crate) binds: Vec<Value>,
    pub(crate) required: bool,
}

/// An update in the making. It becomes an operation once something is set or added to.
#[must_use = "an operation does nothing until the handler returns it"]
pub struct Update<T, S = SomethingSet> {
    op: UpdateOp,
    types: PhantomData<fn() -> (T, S)>,
}

/// An [`Update`] that changes nothing yet.
#[derive(Debug)]
pub enum NothingSet {}

/// An [`Update`] that changes something.
#[derive(Debug)]
pub enum SomethingSet {}

/// Whether an [`Update`] changes something: [`SomethingSet`] does, [`NothingSet`] does not.
#[diagnostic::on_unimplemented(
    message = "this update changes nothing",
    label = "neither `set` nor `add` is called",
    note = "add `.set(OrderRow::STATUS, \"shipped\")` or `.add(OrderRow::TOTAL, 5)` to it"
)]
pub trait Changes {}

impl Changes for SomethingSet {}

impl<T: Table> Update<T, NothingSet> {
    pub(crate) fn new(rows: Rows) -> Self {
        let op = UpdateOp { table: T::META, rows, set: Vec::new(), add: Vec::new(), required: false };
        Self { op, types: PhantomData }
    }
}

impl<T: Table, S> Update<T, S> {
    /// Gives a column a value. What was said of the column before is forgotten.
    pub fn set<V: PgValue>(mut self, column: Column<T, V>, value: impl IntoColumn<V>) -> Update<T> {
        let index = column.index();
        self.op.set.retain(|(other, _)| *other != index);
        self.op.add.retain(|(other, _)| *other != index);
        self.op.set.push((index, value.into_column().into_value()));
        Update { op: self.op, types: PhantomData }
    }

    /// Adds an amount to a column of numbers; a negative one takes away. NULL stays NULL.
    ///
    /// # Panics
    /// When this update already sets or adds to the column: the sum is the handler's to make.
    pub fn add<V: Number>(mut self, column: Column<T, V>, amount: V::Amount) -> Update<T> {
        let index = column.index();
        let changed = self.op.set.iter().chain(&self.op.add).any(|(other, _)| *other == index);
        assert!(!changed, "this update already changes column {column:?}: call `add` once, with the sum");
        self.op.add.push((index, amount.into_value()));
        Update { op: self.op, types: PhantomData }
    }

    /// Makes it an integrity failure of the event, of kind `no_row`, when no row is hit.
    pub fn required(mut self) -> Self {
        self.op.required = true;
        self
    }
}

impl<T, S> Clone for Update<T, S> {
    fn clone(&self) -> Self {
        Self { op: self.op.clone(), types: PhantomData }
    }
}

impl<T, S> fmt::Debug for Update<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.op.fmt(f)
    }
}

impl DeleteOp {
    /// Makes it an integrity failure of the event, of kind `no_row`, when no row is hit.
    pub fn required(mut self) -> Self {
        self.required = true;
        self
    }
}

/// One SQL statement, with `$1`, `$2`, … for the values bound to it in order.
///
/// It runs inside the transaction of its batch, in its place among the operations. It cannot be written together with
/// others in one statement, so it costs a round trip of its own. Statements that control the transaction, the session or
/// prepared statements are refused when it is applied: the engine owns those. A text with values written into it instead
/// of bound is prepared anew for each of them.
///
/// ```
/// use scriba_core::Outcome;
/// use scriba_target_postgres::{PgOp, sql};
///
/// let outcome: Outcome<PgOp> = sql("update orders set shipped_at = now() where order_id = $1 and not cancelled")
///     .bind("o-1")
///     .required()
///     .into();
/// ```
pub fn sql(text: impl Into<Cow<'static, str>>) -> SqlOp {
    SqlOp { text: text.into(), binds: Vec::new(), required: false }
}

impl SqlOp {
    /// Binds the next value. It travels as the type that [`PgValue`] says; where another one is wanted (`jsonb`, an enum,
    /// `numeric`), cast it in the text: `$1::text::jsonb`.
    pub fn bind(mut self, value: impl PgValue) -> Self {
        self.binds.push(value.into_value());
        self
    }

    /// Makes it an integrity failure of the event, of kind `no_row`, when no row is hit.
    pub fn required(mut self) -> Self {
        self.required = true;
        self
    }

    /// Looks whether the statement is one that the engine can run inside its transaction.
    ///
    /// # Errors
    /// What is wrong with it and what to do about it.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.text.contains('\0') {
            return Err(format!("sql({:?}): a statement has no NUL in it: bind the value instead", self.text));
        }
        let statement = without_comments(&self.text);
        if statement.is_empty() {
            return Err(format!(
                "sql({:?}): there is no statement in it: return `Outcome::skip()` where there is nothing to do",
                self.text
            ));
        }
        let end = statement.find(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '$')).unwrap_or(statement.len());
        let word = statement[..end].to_ascii_uppercase();
        let refused = match word.as_str() {
            "BEGIN" | "START" | "COMMIT" | "END" | "ROLLBACK" | "ABORT" | "SAVEPOINT" | "RELEASE" => {
                "the transaction is the engine's, which commits the statement with its checkpoint: leave it out"
            }
            "SET" | "RESET" | "DISCARD" | "LISTEN" | "UNLISTEN" | "LOAD" => {
                "the connection is the engine's, and other projections use it later: set it for the role or in a function"
            }
            "PREPARE" | "EXECUTE" | "DEALLOCATE" => "every statement is prepared already: write the statement itself",
            "COPY" => "copying speaks a protocol of its own: write an INSERT",
            _ => return Ok(()),
        };
        Err(format!("sql({:?}): {word} cannot be run here; {refused}", self.text))
    }
}

/// The statement from where Postgres begins to read it: behind white space, comments, which nest, and empty statements.
fn without_comments(text: &str) -> &str {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c', ';']);
        if let Some(comment) = rest.strip_prefix("--") {
            rest = comment.find(['\n', '\r']).map_or("", |end| &comment[end..]);
        } else if rest.starts_with("/*") {
            rest = after_block_comment(rest);
        } else {
            return rest;
        }
    }
}

/// What stands behind the block comment that `text` begins with; nothing where it does not end.
fn after_block_comment(text: &str) -> &str {
    let mut depth = 0_usize;
    let mut rest = text;
    loop {
        if let Some(inside) = rest.strip_prefix("/*") {
            depth += 1;
            rest = inside;
        } else if let Some(outside) = rest.strip_prefix("*/") {
            depth -= 1;
            rest = outside;
            if depth == 0 {
                return rest;
            }
        } else {
            let mut characters = rest.chars();
            if characters.next().is_none() {
                return "";
            }
            rest = characters.as_str();
        }
    }
}

macro_rules! operations {
    ($([$($generics:tt)*] $operation:ty => $variant:ident, $value:pat => $op:expr;)*) => {$(
        impl<$($generics)*> From<$operation> for PgOp {
            fn from($value: $operation) -> Self {
                Self::$variant($op)
            }
        }

        impl<$($generics)*> From<$operation> for Outcome<PgOp> {
            fn from(operation: $operation) -> Self {
                PgOp::from(operation).into()
            }
        }
    )*};
}

operations! {
    [] InsertOp => Insert, op => op;
    [] DeleteOp => Delete, op => op;
    [] SqlOp => Sql, op => op;
    [T: Table, S: Changes] Update<T, S> => Update, update => update.op;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &'static str) -> Option<String> {
        sql(text).check().err()
    }

    #[test]
    fn statements_that_control_the_transaction_or_the_session_are_refused_however_they_are_dressed() {
        for text in [
            "BEGIN",
            "start transaction",
            "Commit",
            "commit;",
            "END",
            "ROLLBACK TO SAVEPOINT a",
            "abort",
            "SAVEPOINT a",
            "release a",
            "PREPARE TRANSACTION 'a'",
            "execute a",
            "deallocate all",
            "DISCARD ALL",
            "SET search_path = x",
            "reset all",
            "LISTEN a",
            "UNLISTEN *",
            "COPY a FROM STDIN",
            " \t\r\n\x0c commit",
            ";; ; commit",
            "-- select\ncommit",
            "-- select\rcommit",
            "--\n--\n commit",
            "/* select */ commit",
            "/* a /* b */ c */commit",
            "/**//*/**/*/commit",
            "/* a */ -- b\n ; /* c */ commit -- d",
            "commit/* a */",
        ] {
            assert!(refusal(text).is_some(), "{text}");
        }
    }

    #[test]
    fn other_statements_pass_though_such_words_stand_further_on_or_inside_names() {
        for text in [
            "update orders set status = 'commit'",
            "SELECT commit()",
            "/* commit */ delete from orders",
            "-- commit\ninsert into orders values (1)",
            "with begin as (select 1) select * from begin",
            "commit_orders",
            "endé",
            "set$x",
            "call rollback_order(1)",
            "(select 1)",
            "lock table orders",
            "notify orders",
        ] {
            assert_eq!(refusal(text), None);
        }
    }

    #[test]
    fn a_text_without_a_statement_and_one_with_nul_are_refused_with_what_to_do_instead() {
        for text in ["", " ; ", "-- commit", "/* commit", "/* /* commit */"] {
            assert!(refusal(text).is_some_and(|refusal| refusal.contains("Outcome::skip()")), "{text}");
        }
        assert!(refusal("select 'a\0b'").is_some_and(|refusal| refusal.contains("bind the value")));
    }

    #[test]
    fn a_refusal_names_the_statement_and_the_word() {
        assert_eq!(
            refusal("/* x */ commit").as_deref(),
            Some(
                "sql(\"/* x */ commit\"): COMMIT cannot be run here; the transaction is the engine's, which commits the \
                 statement with its checkpoint: leave it out"
            )
        );
    }
}
