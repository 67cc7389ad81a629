//! What was handed out and is not yet accounted for: dedup, completion out of order, commit in order. Pure.

use std::collections::VecDeque;

use crate::event::Position;

/// Everything handed out by one subscription above the watermark, with what was made of it so far.
///
/// `E` is an event that waits for its handler, `O` what became of one. Every element has a number, ascending with
/// its position.
pub(crate) struct Window<E, O> {
    slots: VecDeque<Slot<E, O>>,
    /// The number of the first slot.
    first: u64,
    /// Leading slots that are done.
    done: usize,
    /// Leading slots that are done and leave something in the target.
    writes: usize,
    /// Events and bytes in the slots and in the batch that is being committed: what the in-flight caps bound.
    load: Load,
    committing: Load,
    dedup: Dedup,
}

struct Slot<E, O> {
    position: Position,
    bytes: usize,
    content: Content<E, O>,
}

enum Content<E, O> {
    Waiting(E),
    Running,
    Done { outcome: Option<O>, write: bool },
}

/// A number of events and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) events: usize,
    pub(crate) bytes: usize,
}

/// What an event is, by its position.
///
/// | position | | |
/// |---|---|---|
/// | above the last one of the subscription | above the watermark of the start | new |
/// | | at or below it | duplicate |
/// | not above the last one | handed out and not acked | duplicate |
/// | | any other | late |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// It is to be handled.
    New,
    /// It was delivered before.
    Duplicate,
    /// The source delivered out of order: the subscription is not to be trusted any further.
    Late,
}

/// The leading part of the window, all of it done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Prefix<O> {
    /// What became of its events, in the order of positions.
    pub(crate) outcomes: Vec<O>,
    /// The position of its last element.
    pub(crate) watermark: Position,
}

impl<E, O> Window<E, O> {
    /// An empty window above a watermark, for a new subscription.
    pub(crate) fn new(watermark: Option<Position>) -> Self {
        Self {
            slots: VecDeque::new(),
            first: 0,
            done: 0,
            writes: 0,
            load: Load::default(),
            committing: Load::default(),
            dedup: Dedup { floor: watermark, last: None, unacked: VecDeque::new() },
        }
    }

    /// What an event at a position is. Has to be asked once for every event delivered, in their order.
    pub(crate) fn arrive(&mut self, position: Position) -> Arrival {
        self.dedup.arrive(position)
    }

    /// The number of the next element.
    pub(crate) fn next_number(&self) -> u64 {
        self.first + self.slots.len() as u64
    }

    /// Takes in a new event that waits for its handler.
    pub(crate) fn admit(&mut self, position: Position, bytes: usize, event: E) {
        self.load.events += 1;
        self.load.bytes += bytes;
        self.slots.push_back(Slot { position, bytes, content: Content::Waiting(event) });
    }

    /// Takes in a new event that is handled at once.
    pub(crate) fn admit_running(&mut self, position: Position, bytes: usize) {
        self.load.events += 1;
        self.load.bytes += bytes;
        self.slots.push_back(Slot { position, bytes, content: Content::Running });
    }

    /// Takes in progress without an event: reached when everything before it is accounted for.
    pub(crate) fn progress(&mut self, position: Position) {
        if !self.dedup.progress(position) {
            return;
        }
        // One element for a run of them: behind an event that is stuck, any number may come.
        if let Some(Slot { position: last, content: Content::Done { outcome: None, .. }, .. }) = self.slots.back_mut() {
            *last = position;
        } else {
            self.slots.push_back(Slot { position, bytes: 0, content: Content::Done { outcome: None, write: false } });
            self.count_done();
        }
    }

    /// The waiting event of a number, to be handled now; `None` if it is not waiting.
    pub(crate) fn start(&mut self, number: u64) -> Option<E> {
        let slot = self.slot(number)?;
        if !matches!(slot.content, Content::Waiting(_)) {
            return None;
        }
        match std::mem::replace(&mut slot.content, Content::Running) {
            Content::Waiting(event) => Some(event),
            Content::Running | Content::Done { .. } => None,
        }
    }

    /// The event of a number, while it waits.
    pub(crate) fn waiting(&self, number: u64) -> Option<&E> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        match &self.slots.get(index)?.content {
            Content::Waiting(event) => Some(event),
            Content::Running | Content::Done { .. } => None,
        }
    }

    /// Notes what became of an event, and the bytes that takes up beside the event; `write` when it leaves something in the
    /// target.
    pub(crate) fn complete(&mut self, number: u64, outcome: O, bytes: usize, write: bool) {
        if let Some(slot) = self.slot(number) {
            slot.bytes += bytes;
            slot.content = Content::Done { outcome: Some(outcome), write };
            self.load.bytes += bytes;
            self.count_done();
        }
    }

    fn slot(&mut self, number: u64) -> Option<&mut Slot<E, O>> {
        let index = number.checked_sub(self.first)?;
        self.slots.get_mut(usize::try_from(index).ok()?)
    }

    fn count_done(&mut self) {
        while let Some(Slot { content: Content::Done { write, .. }, .. }) = self.slots.get(self.done) {
            self.writes += usize::from(*write);
            self.done += 1;
        }
    }

    /// Takes the leading part that is done, up to the caps; at least one element if there is one. It counts toward
    /// the load until [`Window::committed`].
    pub(crate) fn take(&mut self, most: Load) -> Option<Prefix<O>> {
        let mut taken = Load::default();
        let mut prefix: Option<Prefix<O>> = None;
        while self.done > 0 && taken.events < most.events {
            let bytes = self.slots.front().map_or(0, |slot| slot.bytes);
            if prefix.is_some() && taken.bytes + bytes > most.bytes {
                break;
            }
            let Some(slot) = self.slots.pop_front() else { break };
            self.first += 1;
            self.done -= 1;
            let prefix = prefix.get_or_insert_with(|| Prefix { outcomes: Vec::new(), watermark: slot.position });
            prefix.watermark = slot.position;
            if let Content::Done { outcome: Some(outcome), write } = slot.content {
                taken.events += 1;
                taken.bytes += bytes;
                self.writes -= usize::from(write);
                prefix.outcomes.push(outcome);
            }
        }
        self.committing.events += taken.events;
        self.committing.bytes += taken.bytes;
        prefix
    }

    /// Notes that all that was taken is durable.
    pub(crate) fn committed(&mut self) {
        self.load.events -= self.committing.events;
        self.load.bytes -= self.committing.bytes;
        self.committing = Load::default();
    }

    /// Drops everything from a position on that is not taken, and answers how many events that were.
    pub(crate) fn forget_from(&mut self, position: Position) -> usize {
        let before = self.load.events;
        while let Some(slot) = self.slots.pop_back_if(|slot| slot.position >= position) {
            let is_event = !matches!(slot.content, Content::Done { outcome: None, .. });
            self.load.events -= usize::from(is_event);
            self.load.bytes -= slot.bytes;
        }
        (self.done, self.writes) = (0, 0);
        self.count_done();
        before - self.load.events
    }

    /// Notes that the source was told that everything up to a position is durable.
    pub(crate) fn acked(&mut self, position: Position) {
        self.dedup.acked(position);
    }

    /// Events and bytes handed out and not yet committed.
    pub(crate) fn load(&self) -> Load {
        self.load
    }

    /// Leading elements that are done and not taken.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// True when a leading element that is done leaves something in the target.
    pub(crate) fn has_writes(&self) -> bool {
        self.writes > 0
    }

    /// True when nothing in it waits or runs.
    pub(crate) fn all_done(&self) -> bool {
        self.done == self.slots.len()
    }

    /// The position of the first element that is not done, which holds up the watermark.
    pub(crate) fn oldest_open(&self) -> Option<(u64, Position)> {
        self.slots.get(self.done).map(|slot| (self.first + self.done as u64, slot.position))
    }

    /// The highest position taken in.
    pub(crate) fn highest(&self) -> Option<Position> {
        self.dedup.last.max(self.dedup.floor)
    }
}

/// Faults for tests.
#[cfg(feature = "test-switches")]
impl<E, O> Window<E, O> {
    /// Dedup that does not look at the window.
    pub(crate) fn arrive_unless_stored(&mut self, position: Position, watermark: Option<Position>) -> Arrival {
        self.dedup.last = self.dedup.last.max(Some(position));
        if Some(position) <= watermark { Arrival::Duplicate } else { Arrival::New }
    }

    /// Takes everything that is done, wherever it stands; the watermark is that of the leading part.
    pub(crate) fn take_finished(&mut self, most: Load, watermark: Option<Position>) -> Option<Prefix<O>> {
        let mut prefix = self.take(most);
        for slot in &mut self.slots {
            if let Content::Done { outcome, .. } = &mut slot.content
                && let Some(outcome) = outcome.take()
            {
                self.committing.events += 1;
                self.committing.bytes += slot.bytes;
                let empty = || Prefix { outcomes: Vec::new(), watermark: watermark.unwrap_or(Position::new(0)) };
                prefix.get_or_insert_with(empty).outcomes.push(outcome);
            }
        }
        prefix
    }

    /// Takes the leading part, with a watermark at the last progress there is, whatever stands before that.
    pub(crate) fn take_with_progress(&mut self, most: Load) -> Option<Prefix<O>> {
        let is_progress = |slot: &&Slot<E, O>| matches!(slot.content, Content::Done { outcome: None, .. });
        let progress = self.slots.iter().rev().find(is_progress).map(|slot| slot.position);
        let mut prefix = self.take(most)?;
        prefix.watermark = progress.map_or(prefix.watermark, |progress| prefix.watermark.max(progress));
        Some(prefix)
    }

    /// True when anything in it is done and not taken.
    pub(crate) fn any_finished(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot.content, Content::Done { outcome: Some(_), .. }))
    }
}

/// Tells new events from those delivered before.
struct Dedup {
    /// The watermark when the subscription began.
    floor: Option<Position>,
    /// The highest position this subscription has delivered.
    last: Option<Position>,
    /// Positions this subscription has delivered and that were not acked, ascending.
    unacked: VecDeque<Position>,
}

impl Dedup {
    fn arrive(&mut self, position: Position) -> Arrival {
        if self.last.is_none_or(|last| position > last) {
            self.last = Some(position);
            self.unacked.push_back(position);
            return if Some(position) > self.floor { Arrival::New } else { Arrival::Duplicate };
        }
        if self.unacked.binary_search(&position).is_ok() { Arrival::Duplicate } else { Arrival::Late }
    }

    /// True when progress to a position leads beyond everything delivered so far.
    fn progress(&mut self, position: Position) -> bool {
        if self.last.is_some_and(|last| position <= last) || Some(position) <= self.floor {
            return false;
        }
        self.last = Some(position);
        true
    }

    fn acked(&mut self, position: Position) {
        while self.unacked.front().is_some_and(|first| *first <= position) {
            self.unacked.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn at(position: u64) -> Position {
        Position::new(position)
    }

    #[test]
    fn what_stands_at_or_above_a_late_position_is_forgotten_and_what_stands_below_can_still_be_taken() {
        let mut window: Window<(), u64> = Window::new(None);
        for position in [1, 4, 6, 9] {
            assert_eq!(window.arrive(Position::new(position)), Arrival::New);
            window.admit_running(Position::new(position), 10);
        }
        window.progress(Position::new(12));
        for number in [0, 2, 3] {
            window.complete(number, number, 5, true);
        }
        assert_eq!(window.arrive(Position::new(5)), Arrival::Late);
        assert_eq!(window.forget_from(Position::new(5)), 2);
        assert_eq!(window.load(), Load { events: 2, bytes: 25 });
        // A result that comes afterwards is of no use.
        window.complete(2, 2, 5, true);
        window.complete(1, 1, 5, true);
        let taken = window.take(Load { events: 9, bytes: 1_000 }).expect("two are done");
        assert_eq!(taken, Prefix { outcomes: vec![0, 1], watermark: Position::new(4) });
        window.committed();
        assert_eq!((window.load(), window.done(), window.has_writes()), (Load::default(), 0, false));
    }

    #[test]
    fn every_row_of_the_arrival_table() {
        let mut window = Window::<(), ()>::new(Some(at(10)));
        assert_eq!(window.arrive(at(8)), Arrival::Duplicate, "below the watermark, first seen");
        assert_eq!(window.arrive(at(8)), Arrival::Duplicate, "again, not acked");
        assert_eq!(window.arrive(at(10)), Arrival::Duplicate, "at the watermark");
        assert_eq!(window.arrive(at(9)), Arrival::Late, "never handed out by this subscription");
        assert_eq!(window.arrive(at(12)), Arrival::New);
        assert_eq!(window.arrive(at(11)), Arrival::Late, "another stream's event, below the last one");
        assert_eq!(window.arrive(at(12)), Arrival::Duplicate, "in the window");
        window.acked(at(12));
        assert_eq!(window.arrive(at(12)), Arrival::Late, "acked, and delivered all the same");
    }

    #[test]
    fn position_0_is_an_event_above_the_beginning_and_not_above_a_watermark_of_0() {
        assert_eq!(Window::<(), ()>::new(None).arrive(at(0)), Arrival::New);
        assert_eq!(Window::<(), ()>::new(Some(at(0))).arrive(at(0)), Arrival::Duplicate);
    }

    #[test]
    fn one_event_is_taken_however_large() {
        let mut window = Window::<(), u8>::new(None);
        for position in 0..2 {
            let number = window.next_number();
            window.admit_running(at(position), 1_000);
            window.complete(number, 0, 0, true);
        }
        let prefix = window.take(Load { events: 10, bytes: 1 }).expect("one event");
        assert_eq!((prefix.outcomes.len(), prefix.watermark), (1, at(0)));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Admit { gap: u64, bytes: usize },
        Progress { gap: u64 },
        Start(usize),
        Complete { which: usize, bytes: usize, write: bool },
        Take(Load),
        Committed,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let load = (1..6_usize, 1..60_usize).prop_map(|(events, bytes)| Load { events, bytes });
        let step = prop_oneof![
            4 => (0..3_u64, 0..20_usize).prop_map(|(gap, bytes)| Step::Admit { gap, bytes }),
            1 => (0..3_u64).prop_map(|gap| Step::Progress { gap }),
            4 => any::<usize>().prop_map(Step::Start),
            4 => (any::<usize>(), 0..9_usize, any::<bool>())
                .prop_map(|(which, bytes, write)| Step::Complete { which, bytes, write }),
            2 => load.prop_map(Step::Take),
            1 => Just(Step::Committed),
        ];
        prop::collection::vec(step, 0..150)
    }

    #[derive(Clone, Debug)]
    struct Model {
        number: Option<u64>,
        position: u64,
        bytes: usize,
        state: Phase,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Phase {
        Waiting,
        Running,
        Done { write: bool },
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        /// The model is a plain list that is looked through at every step.
        #[test]
        fn what_is_taken_is_the_longest_leading_part_that_is_done_in_order_and_within_the_caps(
            watermark in prop::option::of(0..5_u64),
            steps in steps(),
        ) {
            let mut window = Window::<u64, u64>::new(watermark.map(at));
            let mut model: VecDeque<Model> = VecDeque::new();
            let mut next = watermark.map_or(0, |position| position + 1);
            let mut committing = Load::default();
            let mut seen = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Admit { gap, bytes } => {
                        let position = next + gap;
                        next = position + 1;
                        prop_assert_eq!(window.arrive(at(position)), Arrival::New);
                        let number = window.next_number();
                        window.admit(at(position), bytes, position);
                        prop_assert!(seen.insert(number), "numbers are given once");
                        model.push_back(Model { number: Some(number), position, bytes, state: Phase::Waiting });
                    }
                    Step::Progress { gap } => {
                        let position = next + gap;
                        next = position + 1;
                        window.progress(at(position));
                        match model.back_mut() {
                            Some(last) if last.number.is_none() => last.position = position,
                            _ => model.push_back(Model {
                                number: None,
                                position,
                                bytes: 0,
                                state: Phase::Done { write: false },
                            }),
                        }
                    }
                    Step::Start(which) => {
                        let waiting: Vec<_> = (0..model.len()).filter(|&n| model[n].state == Phase::Waiting).collect();
                        if let Some(&n) = waiting.get(which % waiting.len().max(1)) {
                            let number = model[n].number.expect("an event");
                            prop_assert_eq!(window.start(number), Some(model[n].position));
                            prop_assert_eq!(window.start(number), None, "an event starts once");
                            model[n].state = Phase::Running;
                        }
                    }
                    Step::Complete { which, bytes, write } => {
                        let running: Vec<_> = (0..model.len()).filter(|&n| model[n].state == Phase::Running).collect();
                        if let Some(&n) = running.get(which % running.len().max(1)) {
                            window.complete(model[n].number.expect("an event"), model[n].position, bytes, write);
                            model[n].bytes += bytes;
                            model[n].state = Phase::Done { write };
                        }
                    }
                    Step::Take(most) => {
                        let mut expected = Vec::new();
                        let mut end = None;
                        let mut bytes = 0;
                        while let Some(front) = model.front() {
                            let full = expected.len() == most.events
                                || (end.is_some() && bytes + front.bytes > most.bytes);
                            if !matches!(front.state, Phase::Done { .. }) || full {
                                break;
                            }
                            let front = model.pop_front().expect("looked at");
                            end = Some(at(front.position));
                            bytes += front.bytes;
                            if front.number.is_some() {
                                expected.push(front.position);
                            }
                        }
                        committing.events += expected.len();
                        committing.bytes += bytes;
                        let expected = end.map(|watermark| Prefix { outcomes: expected, watermark });
                        prop_assert_eq!(window.take(most), expected);
                    }
                    Step::Committed => {
                        window.committed();
                        committing = Load::default();
                    }
                }
                let events = model.iter().filter(|slot| slot.number.is_some()).count() + committing.events;
                let bytes = model.iter().map(|slot| slot.bytes).sum::<usize>() + committing.bytes;
                prop_assert_eq!(window.load(), Load { events, bytes });
                let done = model.iter().take_while(|slot| matches!(slot.state, Phase::Done { .. })).count();
                prop_assert_eq!(window.done(), done);
                let writes = model.iter().take(done).any(|slot| slot.state == Phase::Done { write: true });
                prop_assert_eq!(window.has_writes(), writes);
                prop_assert_eq!(window.all_done(), done == model.len());
                prop_assert_eq!(window.oldest_open().map(|(_, position)| position), model.get(done).map(|slot| at(slot.position)));
            }
        }

        #[test]
        fn an_event_is_new_once_whatever_is_repeated_within_a_subscription(
            deliveries in prop::collection::vec((0..40_u64, any::<bool>()), 0..120),
            watermark in prop::option::of(0..20_u64),
        ) {
            let mut window = Window::<(), ()>::new(watermark.map(at));
            let mut model_last: Option<u64> = None;
            let mut handed_out = BTreeSet::new();
            let mut new = Vec::new();
            for (position, ack) in deliveries {
                let expected = if model_last.is_none_or(|last| position > last) {
                    model_last = Some(position);
                    handed_out.insert(position);
                    if watermark.is_none_or(|floor| position > floor) { Arrival::New } else { Arrival::Duplicate }
                } else if handed_out.contains(&position) {
                    Arrival::Duplicate
                } else {
                    Arrival::Late
                };
                prop_assert_eq!(window.arrive(at(position)), expected);
                if expected == Arrival::New {
                    new.push(position);
                }
                if ack {
                    window.acked(at(position));
                    handed_out.retain(|other| *other > position);
                }
            }
            prop_assert!(new.is_sorted_by(|a, b| a < b), "new events come in ascending positions");
        }
    }
}
