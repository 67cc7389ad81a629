//! Operations on the read model, as data.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use scriba_core::Outcome;

use crate::custom::CustomOp;
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
    /// A closure.
    Custom(CustomOp),
}

impl PgOp {
    /// Bytes that its values take up in memory, those they point to included.
    pub(crate) fn size(&self) -> usize {
        let pairs = |values: &[(usize, Value)]| values.iter().map(|(_, value)| value.size()).sum::<usize>();
        let plain = |values: &[Value]| values.iter().map(Value::size).sum::<usize>();
        let rows = |rows: &Rows| match rows {
            Rows::Key(values) => plain(values),
            Rows::Filter(values) => pairs(values),
        };
        match self {
            Self::Insert(op) => plain(&op.values),
            Self::Update(op) => rows(&op.rows) + pairs(&op.set) + pairs(&op.add),
            Self::Delete(op) => rows(&op.rows),
            Self::Sql(op) => op.text.len() + plain(&op.binds),
            // What a closure holds cannot be seen.
            Self::Custom(_) => 0,
        }
    }
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

    /// The keyword it begins with, in capitals.
    fn first_word(&self) -> String {
        let statement = without_comments(&self.text);
        let end = statement.find(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '$')).unwrap_or(statement.len());
        statement[..end].to_ascii_uppercase()
    }

    /// True where it is an update or delete, which may hit no row.
    pub(crate) fn may_miss(&self) -> bool {
        matches!(self.first_word().as_str(), "UPDATE" | "DELETE")
    }

    /// Looks whether the statement is one that the engine can run inside its transaction.
    ///
    /// # Errors
    /// What is wrong with it and what to do about it.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.text.contains('\0') {
            return Err(format!("sql({:?}): a statement has no NUL in it: bind the value instead", self.text));
        }
        let word = self.first_word();
        if word.is_empty() && without_comments(&self.text).is_empty() {
            return Err(format!(
                "sql({:?}): there is no statement in it: return `Outcome::skip()` where there is nothing to do",
                self.text
            ));
        }
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
    [] CustomOp => Custom, op => op;
    [T: Table, S: Changes] Update<T, S> => Update, update => update.op;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::OnConflict;

    #[derive(scriba_macros::Table)]
    #[table(name = "balances", crate = "crate")]
    struct BalanceRow {
        #[table(key)]
        tenant: i32,
        owner: Option<String>,
        cents: i64,
        #[table(key)]
        account_id: String,
    }

    fn row() -> BalanceRow {
        BalanceRow { tenant: 1, owner: None, cents: 5, account_id: "a".to_owned() }
    }

    fn text(text: &str) -> Value {
        Value::Text(text.to_owned())
    }

    fn conflict(on_conflict: OnConflict<BalanceRow>) -> Conflict {
        row().upsert(on_conflict).conflict
    }

    fn update(outcome: impl Into<Outcome<PgOp>>) -> UpdateOp {
        match outcome.into().into_ops().next() {
            Some(PgOp::Update(op)) => op,
            other => panic!("no update: {other:?}"),
        }
    }

    #[test]
    fn an_insert_holds_a_value_per_column_in_the_order_of_the_fields_and_fails_on_conflict() {
        let op = row().insert();
        assert_eq!(*op.values, [Value::I32(1), Value::Null, Value::I64(5), text("a")]);
        assert_eq!(op.conflict, Conflict::Fail);
    }

    #[test]
    fn an_upsert_changes_the_columns_it_names_and_the_last_word_on_a_column_counts() {
        const OWNER: u128 = 0b10;
        const CENTS: u128 = 0b100;
        assert_eq!(conflict(OnConflict::nothing()), Conflict::Nothing);
        assert_eq!(conflict(OnConflict::update_all()), Conflict::Update { set: OWNER | CENTS, add: 0 });
        let update = OnConflict::update(BalanceRow::OWNER);
        assert_eq!(conflict(update), Conflict::Update { set: OWNER, add: 0 });
        assert_eq!(conflict(update.add(BalanceRow::CENTS)), Conflict::Update { set: OWNER, add: CENTS });
        let adding = OnConflict::adding(BalanceRow::CENTS);
        assert_eq!(conflict(adding), Conflict::Update { set: 0, add: CENTS });
        assert_eq!(conflict(adding.and(BalanceRow::CENTS)), Conflict::Update { set: CENTS, add: 0 });
        assert_eq!(conflict(OnConflict::update(BalanceRow::CENTS).add(BalanceRow::CENTS)), conflict(adding));
    }

    #[test]
    #[should_panic(expected = "column balances.tenant is of the key")]
    fn an_upsert_that_would_change_a_key_panics() {
        let _ = OnConflict::adding(BalanceRow::TENANT);
    }

    #[test]
    fn an_upsert_of_a_table_that_is_all_key_changes_nothing() {
        #[derive(scriba_macros::Table)]
        #[table(name = "seen", crate = "crate")]
        struct SeenRow {
            #[table(key)]
            event_id: String,
        }
        let op = SeenRow { event_id: "e".to_owned() }.upsert(OnConflict::update_all());
        assert_eq!(op.conflict, Conflict::Nothing);
    }

    #[test]
    fn an_update_names_its_row_by_the_key_in_the_order_of_the_fields_and_holds_each_column_once() {
        let op = update(
            BalanceRow::update((1, "a".to_owned()))
                .set(BalanceRow::OWNER, "Ann")
                .add(BalanceRow::CENTS, -7)
                .set(BalanceRow::OWNER, None)
                .required(),
        );
        assert!(matches!(op.rows, Rows::Key(key) if *key == [Value::I32(1), text("a")]));
        assert_eq!(op.set, [(1, Value::Null)]);
        assert_eq!(op.add, [(2, Value::I64(-7))]);
        assert!(op.required);

        let op = update(BalanceRow::update((1, "a".to_owned())).add(BalanceRow::CENTS, 7).set(BalanceRow::CENTS, 8));
        assert_eq!((op.set, op.add, op.required), (vec![(2, Value::I64(8))], vec![], false));
    }

    #[test]
    #[should_panic(expected = "already changes column balances.cents: call `add` once")]
    fn adding_twice_to_a_column_panics_instead_of_losing_one_amount() {
        let _ = BalanceRow::update((1, "a".to_owned())).add(BalanceRow::CENTS, 1).add(BalanceRow::CENTS, 2);
    }

    #[test]
    fn a_filter_holds_every_column_it_names() {
        let filter = BalanceRow::OWNER.is(None).and(BalanceRow::CENTS, 0).and(BalanceRow::ACCOUNT_ID, "a");
        let op = BalanceRow::delete_where(filter).required();
        let Rows::Filter(columns) = op.rows else { panic!("no filter") };
        assert_eq!(columns, [(1, Value::Null), (2, Value::I64(0)), (3, text("a"))]);
        assert!(op.required);
    }

    #[test]
    fn operations_of_all_kinds_go_into_one_outcome_in_order() {
        let key = (1, "a".to_owned());
        let outcome = Outcome::<PgOp>::from(row().insert())
            .and(BalanceRow::update(key.clone()).set(BalanceRow::CENTS, 1))
            .and(BalanceRow::delete(key))
            .and(sql("select $1, $2").bind("a").bind(None::<i64>));
        let [PgOp::Insert(_), PgOp::Update(_), PgOp::Delete(delete), PgOp::Sql(sql)] = outcome.ops() else {
            panic!("{outcome:?}")
        };
        assert!(matches!(&delete.rows, Rows::Key(key) if **key == [Value::I32(1), text("a")]) && !delete.required);
        assert_eq!(sql.binds, [text("a"), Value::Null]);
    }

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
