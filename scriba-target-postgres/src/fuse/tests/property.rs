//! Any sequence of operations on tables that break naive fusing: fused and one by one leave the same rows.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::schemas::{FAMILIES, ROWS, SETUP, SHARING, adds, reach, value};
use super::*;

#[derive(Clone, Debug)]
enum Action {
    Insert(Conflict),
    Update { set: u8, add: u8 },
    MoveKey,
    Delete,
    UpdateWhere,
    DeleteWhere,
    Sql,
}

/// Operations of one kind as numbers.
#[derive(Clone, Debug)]
struct Step {
    table: usize,
    action: Action,
    /// On this key and those after it: so many operations.
    key: Option<usize>,
    times: usize,
    values: [Option<usize>; 2],
    required: bool,
    of_same_event: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let columns = || prop_oneof![4 => Just(2_u8), 3 => Just(1), 2 => Just(3), 3 => Just(0)];
    let conflict = prop_oneof![
        3 => Just(Conflict::Fail),
        1 => Just(Conflict::Nothing),
        3 => (columns(), columns()).prop_map(|(set, add)| Conflict::Update {
            set: u128::from(set) << 1,
            add: u128::from(add) << 1,
        }),
    ];
    let action = prop_oneof![
        10 => conflict.prop_map(Action::Insert),
        10 => (columns(), columns()).prop_map(|(set, add)| Action::Update { set, add }),
        1 => Just(Action::MoveKey),
        5 => Just(Action::Delete),
        1 => Just(Action::UpdateWhere),
        1 => Just(Action::DeleteWhere),
        1 => Just(Action::Sql),
    ];
    let value = || prop_oneof![2 => Just(None), 17 => (0_usize..3).prop_map(Some), 2 => Just(Some(3))];
    let key = prop_oneof![1 => Just(None), 40 => (0_usize..6).prop_map(Some)];
    let times = prop_oneof![2 => Just(1), 3 => 2_usize..5];
    (0_usize..60, action, (key, times), [value(), value()], prop::bool::weighted(0.05), prop::bool::weighted(0.2))
        .prop_map(|(table, action, (key, times), values, required, of_same_event)| Step {
            table,
            action,
            key,
            times,
            values,
            required,
            of_same_event,
        })
}

/// The `nth` operation of a step.
fn operation(table: &'static TableMeta, step: &Step, nth: usize) -> PgOp {
    let Step { action, key, values, required: require, .. } = step;
    let some = |at: usize, n: Option<usize>| n.map_or(Value::Null, |n| value(table, at, n));
    let values = [key.map(|key| key + nth), values[0].map(|value| (value + nth) % 4), values[1]];
    let changed = |mask: u8| (1..3).filter(move |at| mask >> (at - 1) & 1 == 1);
    // What cannot be added to is set instead, and the key is left alone.
    let split = |set: u8, add: u8| {
        let add: Vec<usize> =
            changed(add & !set).filter(|&at| adds(&table.columns[at]) && !table.key.contains(&at)).collect();
        let set: Vec<usize> = changed(set).filter(|at| !table.key.contains(at)).collect();
        (set, add)
    };
    let pairs = |columns: Vec<usize>| columns.into_iter().map(|at| (at, some(at, values[at]))).collect::<Vec<_>>();
    let key: Box<[Value]> = table.key.iter().map(|&at| some(at, values[at])).collect();
    let rows = Rows::Key(key);
    let update = |rows, set, add| PgOp::Update(UpdateOp { table, rows, set, add, required: *require });
    let op = match action {
        Action::Insert(conflict) => {
            let conflict = match *conflict {
                Conflict::Update { set, add } => {
                    let (set, add) = split(u8::try_from(set >> 1).unwrap(), u8::try_from(add >> 1).unwrap());
                    let mask = |columns: Vec<usize>| columns.into_iter().fold(0, |mask, at| mask | 1 << at);
                    Conflict::Update { set: mask(set), add: mask(add) }
                }
                other => other,
            };
            return write(table, (0..3).map(|at| some(at, values[at])).collect::<Vec<_>>(), conflict);
        }
        Action::Update { set, add } => match split(*set, *add) {
            (set, add) if set.is_empty() && add.is_empty() => update(rows, pairs(vec![2]), vec![]),
            (set, add) => update(rows, pairs(set), pairs(add)),
        },
        Action::MoveKey => update(rows, vec![(0, some(0, values[1]))], vec![]),
        Action::Delete => PgOp::Delete(DeleteOp { table, rows, required: *require }),
        Action::UpdateWhere => update(Rows::Filter(pairs(vec![1])), pairs(vec![2]), vec![]),
        Action::DeleteWhere => delete_where(table, pairs(vec![1])),
        Action::Sql => crate::op::sql(format!("UPDATE {} SET w = w WHERE v IS NOT NULL", table.name)).into(),
    };
    if *require { required(op) } else { op }
}

#[test]
fn any_sequence_leaves_the_same_rows_or_fails_where_one_by_one_fails_too() {
    // Few tables at a time, so that operations meet.
    let family = prop_oneof![3 => 0..FAMILIES.len(), 1 => SHARING];
    let families = prop::collection::vec(family, 1..3);
    let steps = (families, prop::collection::vec(step(), 1..8)).prop_map(|(families, steps)| {
        let tables: Vec<&'static TableMeta> = families.iter().flat_map(|&family| FAMILIES[family]).copied().collect();
        let operations = |step: &Step| {
            let table = tables[step.table % tables.len()];
            (0..step.times).map(|nth| (step.of_same_event, operation(table, step, nth))).collect::<Vec<_>>()
        };
        steps.iter().flat_map(operations).collect()
    });
    compare(&[SETUP, ROWS], reach, 1_500, steps);
}

/// Operations, each with whether it belongs to the event before, on the tables of `setup`: so many sequences, unless
/// `PROPTEST_CASES` says how many. `reach` names the tables they may change, all where none is named, and the SQL that
/// resets what a rollback leaves.
pub(super) fn compare(
    setup: &[&'static str],
    reach: fn(&[Row<'_>]) -> (Vec<&'static str>, &'static str),
    cases: u32,
    operations: impl Strategy<Value = Vec<(bool, PgOp)>>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut place = runtime.block_on(Place::new(""));
    for &sql in setup {
        runtime.block_on(async { raw_sql(sql).execute(&mut place.conn).await.unwrap() });
    }
    place.hasty = true;
    let place = std::cell::RefCell::new((place, FactsCache::default()));
    let tally = std::cell::Cell::new((0, 0, 0));
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    TestRunner::new(config)
        .run(&operations, |operations| {
            let mut position = 0;
            let rows: Vec<Row<'_>> = operations
                .iter()
                .map(|(of_same_event, op)| {
                    position += u64::from(!of_same_event || position == 0);
                    (Position::new(position), op)
                })
                .collect();
            let (place, facts) = &mut *place.borrow_mut();
            (place.compared, place.reset) = reach(&rows);
            runtime.block_on(async {
                facts.load(&mut place.conn, rows.iter().filter_map(|row| table_of(row.1))).await.unwrap();
                let (fused, one_by_one) = place.compare(&rows, facts).await;
                let (runs, well, saved) = tally.get();
                let fewer = rows.len() - plan(&rows, facts).len();
                tally.set((runs + 1, well + u32::from(matches!(fused, Fused::Rows(_))), saved + fewer));
                prop_assert!(one_by_one.agrees_with(&fused), "{:#?}\n{:#?}\n{:#?}", rows, fused, one_by_one);
                Ok(())
            })
        })
        .unwrap();
    let (runs, well, saved) = tally.get();
    println!("{runs} sequences, {well} without failure, {saved} statements saved");
    assert!(
        well * 10 > runs && saved > 0,
        "too little was compared: {well} of {runs} without failure, {saved} statements saved"
    );
}
