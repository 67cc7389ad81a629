//! The fold case by case, and the rule against a model of a server with many sessions.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn probe(highest: i64, holders: &[&str]) -> Probe {
    Probe { highest: Some(highest), holders: holders.iter().map(|&holder| holder.to_owned()).collect() }
}

fn frontier(after: Option<i64>) -> Frontier {
    Frontier::new(after, 1)
}

#[test]
fn with_no_append_open_everything_visible_is_final() {
    let mut frontier = frontier(None);
    frontier.fold(Probe::default());
    assert_eq!(frontier.settled(), None);
    frontier.fold(probe(7, &[]));
    assert_eq!(frontier.settled(), Some(7));
    assert!(!frontier.holds());
}

#[test]
fn the_first_probe_does_not_know_how_old_the_open_appends_are_and_waits_for_them() {
    let mut frontier = frontier(Some(3));
    frontier.fold(probe(9, &["4/1"]));
    assert_eq!(frontier.settled(), Some(3));
    assert!(frontier.holds());
    frontier.fold(probe(9, &[]));
    assert_eq!(frontier.settled(), Some(9));
}

#[test]
fn an_append_that_an_earlier_probe_did_not_list_holds_only_what_came_after_it() {
    let mut frontier = frontier(None);
    frontier.fold(probe(9, &[]));
    frontier.fold(probe(12, &["4/1"]));
    assert_eq!(frontier.settled(), Some(9));
    frontier.fold(probe(20, &["4/1", "5/1"]));
    assert_eq!(frontier.settled(), Some(9), "4/1 is still the oldest");
    frontier.fold(probe(30, &["5/1"]));
    assert_eq!(frontier.settled(), Some(12), "5/1 came after the probe that saw 12");
    assert!(frontier.can_own("5/1", 13) && !frontier.can_own("5/1", 12) && !frontier.can_own("4/1", 99));
}

#[test]
fn what_is_final_stays_final_when_the_head_goes_back() {
    let mut frontier = frontier(None);
    frontier.fold(probe(9, &[]));
    frontier.fold(Probe::default());
    frontier.fold(probe(2, &["4/1"]));
    assert_eq!(frontier.settled(), Some(9));
}

#[test]
fn a_prepared_transaction_renamed_by_a_restart_may_own_everything_not_yet_final() {
    let mut frontier = frontier(None);
    frontier.fold(probe(5, &[]));
    frontier.fold(probe(9, &["4/1"]));
    frontier.fold(probe(12, &["-1/812"]));
    assert_eq!(frontier.settled(), Some(5));
}

#[test]
fn a_row_is_delivered_if_nothing_or_only_dead_numbers_are_before_it() {
    let mut frontier = frontier(None);
    frontier.fold(probe(9, &[]));
    for (cursor, position, verdict) in [
        (None, 0, Verdict::Contiguous),
        (None, 1, Verdict::Contiguous),
        (None, 5, Verdict::GapPassed),
        (Some(4), 5, Verdict::Contiguous),
        (Some(4), 7, Verdict::GapPassed),
        (Some(4), 10, Verdict::GapPassed),
        (Some(4), 11, Verdict::Held),
        (Some(10), 11, Verdict::Contiguous),
        (Some(i64::MAX), i64::MAX, Verdict::Held),
    ] {
        assert_eq!(frontier.judge(cursor, position), verdict, "{cursor:?} {position}");
    }
}

const SESSIONS: usize = 4;

/// What one session does next.
#[derive(Clone, Copy, Debug)]
enum Step {
    Draw(usize),
    /// The rows become visible; the locks are still held.
    Commit(usize),
    /// The locks go; a rollback, where nothing was committed before.
    End(usize),
    /// The reader takes its next step: snapshot, one session's locks, …, page.
    Read,
    /// The reader looks again with the evidence it has.
    PageAgain,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..SESSIONS).prop_map(Step::Draw),
        2 => (0..SESSIONS).prop_map(Step::Commit),
        2 => (0..SESSIONS).prop_map(Step::End),
        8 => Just(Step::Read),
        1 => Just(Step::PageAgain),
    ];
    vec(step, 0..150)
}

/// Which rows a reader judges after its evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// Those of a snapshot taken after it.
    After,
    /// Those of the snapshot the evidence began with: all in one statement.
    SameStatement,
}

struct Model {
    look: Look,
    /// Reads only what is final, as with a filter, and never by contiguity.
    filtered: bool,
    next_number: i64,
    sessions: [Session; SESSIONS],
    visible: BTreeSet<i64>,
    /// The reader.
    cursor: Option<i64>,
    frontier: Frontier,
    delivered: Vec<i64>,
    probing: Option<(Probe, BTreeSet<i64>, usize)>,
}

#[derive(Clone, Default)]
struct Session {
    transaction: u32,
    drawn: Vec<i64>,
    locks: bool,
}

impl Model {
    fn new(look: Look, filtered: bool) -> Self {
        Self {
            look,
            filtered,
            next_number: 1,
            sessions: Default::default(),
            visible: BTreeSet::new(),
            cursor: None,
            frontier: frontier(None),
            delivered: Vec::new(),
            probing: None,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Draw(session) => {
                let session = &mut self.sessions[session];
                // After its commit a session draws nothing before its locks are gone.
                if !session.locks || !session.drawn.is_empty() {
                    session.locks = true;
                    session.drawn.push(self.next_number);
                    self.next_number += 1;
                }
            }
            Step::Commit(session) => self.visible.extend(self.sessions[session].drawn.drain(..)),
            Step::End(session) => {
                let session = &mut self.sessions[session];
                session.drawn.clear();
                session.locks = false;
                session.transaction += 1;
            }
            Step::Read => self.read(),
            Step::PageAgain => self.page(&self.visible.clone()),
        }
    }

    /// Session after session is looked at, each at an instant of its own.
    fn read(&mut self) {
        let (mut probe, snapshot, session) = self.probing.take().unwrap_or_else(|| {
            (Probe { highest: self.visible.last().copied(), holders: Vec::new() }, self.visible.clone(), 0)
        });
        if let Some(looked_at) = self.sessions.get(session) {
            if looked_at.locks {
                probe.holders.push(format!("{session}/{}", looked_at.transaction));
            }
            self.probing = Some((probe, snapshot, session + 1));
        } else {
            self.frontier.fold(probe);
            let rows = if self.look == Look::After { self.visible.clone() } else { snapshot };
            self.page(&rows);
        }
    }

    fn page(&mut self, rows: &BTreeSet<i64>) {
        for &position in rows {
            if self.cursor >= Some(position) {
                continue;
            }
            let passes = if self.filtered {
                Some(position) <= self.frontier.settled()
            } else {
                self.frontier.judge(self.cursor, position) != Verdict::Held
            };
            if !passes {
                break;
            }
            self.delivered.push(position);
            self.cursor = Some(position);
        }
        if self.filtered {
            self.cursor = self.cursor.max(self.frontier.settled());
        }
    }

    /// All sessions end, and the reader has time for two more probes.
    fn finish(mut self) -> (Vec<i64>, Vec<i64>) {
        (0..SESSIONS).for_each(|session| self.step(Step::End(session)));
        (0..3 * (SESSIONS + 2)).for_each(|_| self.read());
        (self.delivered, self.visible.into_iter().collect())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn whatever_sessions_do_every_committed_number_is_delivered_once_in_order(steps in steps(), filtered: bool) {
        let mut model = Model::new(Look::After, filtered);
        for step in steps {
            model.step(step);
        }
        let (delivered, committed) = model.finish();
        prop_assert_eq!(delivered, committed);
    }
}

#[test]
fn the_model_catches_a_reader_that_gathers_evidence_and_looks_in_one_statement() {
    let interleaving = [Step::Draw(1), Step::Draw(0), Step::Commit(0), Step::End(0), Step::Read]
        .into_iter()
        .chain([Step::Commit(1), Step::End(1)])
        .chain([Step::Read; SESSIONS]);
    let run = |look| {
        let mut model = Model::new(look, false);
        interleaving.clone().for_each(|step| model.step(step));
        model.finish()
    };
    assert_eq!(run(Look::After), (vec![1, 2], vec![1, 2]));
    assert_eq!(run(Look::SameStatement), (vec![2], vec![1, 2]), "1 is lost");
}
