//! The memory target passes.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use scriba_core::target::Target;
use scriba_testing::conformance::target::{Hold, Statements, TargetBed, not_offered};
use scriba_testing::{MemoryTarget, TargetFault, TargetStep};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Write(i64, i64),
    Add(i64, i64),
    Refused,
    Failing,
}

/// What operations leave, by key.
pub(crate) fn values(ops: impl IntoIterator<Item = Op>) -> Vec<(i64, i64)> {
    let mut values = BTreeMap::new();
    for op in ops {
        match op {
            Op::Write(key, value) => drop(values.insert(key, value)),
            Op::Add(key, value) => *values.entry(key).or_default() += value,
            Op::Refused | Op::Failing => panic!("{op:?} was applied"),
        }
    }
    values.into_iter().collect()
}

pub(crate) struct MemoryBed(pub(crate) MemoryTarget<Op>);

#[async_trait]
impl TargetBed for MemoryBed {
    type Op = Op;

    async fn new() -> Self {
        Self(MemoryTarget::judging(|op| match op {
            Op::Write(..) | Op::Add(..) => None,
            Op::Refused => Some(TargetFault::Integrity),
            Op::Failing => Some(TargetFault::Structural),
        }))
    }

    async fn target(&self) -> Arc<dyn Target<Op>> {
        Arc::new(self.0.clone())
    }

    fn write(&self, key: i64, value: i64) -> Op {
        Op::Write(key, value)
    }

    fn add(&self, key: i64, value: i64) -> Op {
        Op::Add(key, value)
    }

    fn refused(&self) -> Op {
        Op::Refused
    }

    fn failing(&self) -> Op {
        Op::Failing
    }

    async fn read(&self) -> Vec<(i64, i64)> {
        values(self.0.applied("conformance").into_iter().map(|(_, op)| op))
    }
}

#[async_trait]
impl Hold for MemoryBed {
    type Held = ();

    async fn hold(&self) -> (Op, ()) {
        self.0.fail(TargetStep::Commit, 1, TargetFault::Hang);
        (Op::Write(-1, 0), ())
    }

    async fn let_go(&self, (): ()) {
        self.0.release_hung();
    }
}

impl Statements for MemoryBed {
    fn empties(&self) -> String {
        "any statement empties the log of operations".to_owned()
    }

    /// The second one of the reset.
    fn fails(&self) -> String {
        self.0.fail(TargetStep::Statement, 2, TargetFault::Structural);
        "this one does not come to it".to_owned()
    }
}

mod memory {
    scriba_testing::target_conformance!(super::MemoryBed: reset, statements, hold, nul_in_texts);
}

#[test]
fn rules_that_a_bed_does_not_offer_are_listed() {
    let rules = not_offered(&["reset", "hold", "nul_in_texts"]);
    let statements = ["a_reset_runs_its_statements", "a_reset_whose_statement_fails_changes_nothing"];
    assert_eq!(rules, statements.map(|rule| (rule, "statements")));
}
