//! The subscription of the memory source: from chance and script to pages.

use std::collections::VecDeque;
use std::future::pending;
use std::ops::Range;
use std::time::Duration;

use async_trait::async_trait;
use fastrand::Rng;
use scriba_core::source::{Delivery, Demand, Page, SourceError, SubscribeRequest, Subscription};
use scriba_core::{Position, ProjectionId, RecordedEvent};
use tokio::time::Instant;

use super::faults::{SourceCall, SourceFault};
use super::log::Log;
use super::seat::Seat;
use super::{MemorySource, after};

/// One delivery of events from a point on, and the faults it meets.
pub(super) struct MemorySubscription {
    source: MemorySource,
    id: ProjectionId,
    /// The types to deliver, where the source filters.
    event_types: Option<&'static [&'static str]>,
    /// The lowest position not handed out in order so far.
    from: u64,
    /// Handed out here and not acked here: what may be repeated.
    unacked: VecDeque<Position>,
    /// How many of the log's late positions are dealt with.
    late_seen: usize,
    /// The log's cuts as this subscription was opened.
    cuts: u64,
    told_caught_up: bool,
    /// Kept for as long as the subscription lives, where one is let in.
    pub(super) seat: Option<Seat>,
    /// The last page brought nothing new: another such page must not follow, or a certain fault would stop all progress.
    only_repeated: bool,
    ended: bool,
    /// What chance and script have in store for the next page. Kept over calls, so that a dropped `next` changes nothing.
    plan: Option<Plan>,
    rng: Rng,
}

struct Plan {
    ready_at: Option<Instant>,
    page: usize,
    repeat: bool,
}

/// What `next` can do now.
enum Step {
    Deliver(Page),
    WaitUntil(Instant),
    WaitForChange,
}

#[async_trait]
impl Subscription for MemorySubscription {
    fn wants_acks(&self) -> bool {
        !self.source.lock().without_acks
    }

    async fn next(&mut self, demand: Demand) -> Result<Page, SourceError> {
        let source = self.source.clone();
        if source.hangs(SourceCall::Next) {
            pending::<()>().await;
        }
        loop {
            // Made before looking at the log, so that no change between the look and the wait is missed.
            let changed = source.shared.changed.notified();
            let step = self.step(&mut source.lock(), demand)?;
            match step {
                Step::Deliver(page) => return Ok(page),
                Step::WaitUntil(instant) => {
                    let _ = tokio::time::timeout_at(instant, changed).await;
                }
                Step::WaitForChange => changed.await,
            }
        }
    }

    async fn ack(&mut self, position: Position) -> Result<(), SourceError> {
        if self.source.hangs(SourceCall::Ack) {
            pending::<()>().await;
        }
        let mut log = self.source.lock();
        log.reachable()?;
        let acked = log.acked.entry(self.id.clone()).or_insert(position);
        *acked = position.max(*acked);
        self.unacked.retain(|handed_out| *handed_out > position);
        Ok(())
    }
}

impl MemorySubscription {
    /// Subscribes, or meets the outage that chance has in store.
    pub(super) fn open(source: MemorySource, log: &mut Log, request: &SubscribeRequest) -> Result<Self, SourceError> {
        log.reachable()?;
        let mut rng = Rng::with_seed(log.faults.seed.wrapping_add(log.subscriptions));
        log.subscriptions += 1;
        if rng.f64() < log.faults.unavailable {
            let outage = within(&mut rng, &log.faults.outage);
            return Err(log.fall_silent(outage));
        }
        let id = request.telemetry.id().clone();
        let acked = log.acked.get(&id).copied();
        let mut from = after(request.after.max(acked));
        let below = log.index_from(after(acked))..log.index_from(from);
        let scripted = log.take_fault(SourceFault::StartBelow);
        if !below.is_empty() && (scripted || log.faults.start_below) {
            let index = if scripted { below.start } else { rng.usize(below) };
            from = log.events[index].position.get();
            log.met.started_below += 1;
        }
        Ok(Self {
            source,
            id,
            event_types: request.event_types.filter(|_| log.filters_types),
            from,
            unacked: VecDeque::new(),
            late_seen: log.late.len(),
            cuts: log.cuts,
            told_caught_up: false,
            seat: None,
            only_repeated: false,
            ended: false,
            plan: None,
            rng,
        })
    }

    fn step(&mut self, log: &mut Log, demand: Demand) -> Result<Step, SourceError> {
        if self.ended {
            return Err(SourceError::ended("by an earlier error"));
        }
        let cut = if self.cuts < log.cuts { Err(SourceError::ended("the connection was cut")) } else { Ok(()) };
        let planned = cut.and_then(|()| log.reachable()).and_then(|()| self.plan(log));
        if let Err(error) = planned {
            self.ended = true;
            return Err(error);
        }
        let Some(plan) = &self.plan else { return Ok(Step::WaitForChange) };
        if let Some(ready_at) = plan.ready_at.filter(|at| *at > Instant::now()) {
            return Ok(Step::WaitUntil(ready_at));
        }
        let mut room = Room { events: demand.events.min(plan.page), bytes: demand.bytes, empty: true };
        let repeat = plan.repeat;
        let late = self.late(log, &mut room);
        let repeated = if repeat { self.repeated(log, &mut room) } else { Vec::new() };
        let (mut deliveries, scanned, at_head) = self.new_events(log, &mut room);
        let caught_up = at_head && self.late_seen == log.late.len();

        self.only_repeated = deliveries.is_empty() && !repeated.is_empty();
        log.met.repeated += repeated.len() as u64;
        if !repeated.is_empty() {
            let index = self.rng.usize(..=deliveries.len());
            deliveries.splice(index..index, repeated);
        }
        deliveries.splice(0..0, late);
        let from = self.from;
        if let Some(scanned) = scanned {
            self.from = after(Some(scanned));
            // Filtered events at the end leave no trace but that nothing more is to come up to them.
            let last = self.unacked.back().copied();
            if last < Some(scanned) {
                deliveries.push(Delivery::Progress(scanned));
            }
        }
        if self.skip(log, from, &mut deliveries) && deliveries.is_empty() {
            return self.step(log, demand);
        }
        reorder(log, &mut deliveries);
        if deliveries.is_empty() && (self.told_caught_up || !caught_up) {
            return Ok(Step::WaitForChange);
        }
        self.told_caught_up |= caught_up;
        self.plan = None;
        Ok(Step::Deliver(Page { deliveries, caught_up }))
    }

    /// Makes the plan for a page, if there is none, and meets the faults that are due.
    fn plan(&mut self, log: &mut Log) -> Result<(), SourceError> {
        let mut end = false;
        let mut unusable = false;
        let mut outage = None;
        if self.plan.is_none() {
            let faults = &log.faults;
            let rng = &mut self.rng;
            let delay = Some(within(rng, &faults.delay)).filter(|delay| !delay.is_zero());
            let page = faults.page.map_or(usize::MAX, |largest| rng.usize(1..=largest.max(1)));
            let repeat = rng.f64() < faults.repeat;
            end = rng.f64() < faults.end;
            outage = (rng.f64() < faults.unavailable).then(|| within(rng, &faults.outage));
            log.met.delayed += u64::from(delay.is_some());
            self.plan = Some(Plan { ready_at: delay.map(|delay| Instant::now() + delay), page, repeat });
        }
        if let (Some(plan), Some(fault)) = (&mut self.plan, log.script.front().copied()) {
            let applies = match fault {
                SourceFault::Repeat => !self.unacked.is_empty(),
                // Met where they apply: at a subscribe, on a page, at a call.
                SourceFault::StartBelow | SourceFault::Skip | SourceFault::Reorder | SourceFault::Hang(_) => false,
                SourceFault::End | SourceFault::Unusable | SourceFault::Unavailable(_) | SourceFault::Delay(_) => true,
            };
            if applies {
                log.script.pop_front();
                match fault {
                    SourceFault::Repeat => {
                        plan.repeat = true;
                        self.only_repeated = false;
                    }
                    SourceFault::End => end = true,
                    SourceFault::Unavailable(duration) => outage = Some(duration),
                    SourceFault::Delay(delay) => {
                        plan.ready_at = Some(Instant::now() + delay);
                        log.met.delayed += 1;
                    }
                    SourceFault::Unusable => unusable = true,
                    SourceFault::StartBelow | SourceFault::Skip | SourceFault::Reorder | SourceFault::Hang(_) => {}
                }
            }
        }
        if let Some(outage) = outage {
            return Err(log.fall_silent(outage));
        }
        if unusable {
            log.met.unusable += 1;
            return Err(SourceError::unusable("memory source: a fault asked for by the test"));
        }
        if end {
            log.met.ended += 1;
            return Err(SourceError::ended("a fault asked for by the test"));
        }
        Ok(())
    }

    /// Events put in below what was handed out, never handed out themselves.
    fn late(&mut self, log: &mut Log, room: &mut Room) -> Vec<Delivery> {
        let mut late = Vec::new();
        while let Some(position) = log.late.get(self.late_seen).copied() {
            if position.get() < self.from
                && let Some(event) = log.at(position).filter(|event| self.wants(event))
            {
                if !room.take(event) {
                    break;
                }
                late.push(Delivery::Event(event.clone()));
                self.unacked.push_back(position);
                log.met.late += 1;
            }
            self.late_seen += 1;
        }
        late
    }

    /// A run of what was handed out by earlier pages and is not acked.
    fn repeated(&mut self, log: &Log, room: &mut Room) -> Vec<Delivery> {
        if self.unacked.is_empty() || self.only_repeated {
            return Vec::new();
        }
        let first = self.rng.usize(..self.unacked.len());
        // Half of the room is left for what is new.
        let most = (self.unacked.len() - first).min((room.events / 2).max(1));
        let run = self.rng.usize(1..=most);
        let events = self.unacked.range(first..first + run).filter_map(|position| log.at(*position));
        events.take_while(|event| room.take(event)).cloned().map(Delivery::Event).collect()
    }

    /// What is new, the last position looked at, and whether that was the last one there is.
    fn new_events(&mut self, log: &Log, room: &mut Room) -> (Vec<Delivery>, Option<Position>, bool) {
        let mut deliveries = Vec::new();
        let mut scanned = None;
        for event in &log.events[log.index_from(self.from)..] {
            if log.held.first().is_some_and(|held| *held < event.position) {
                return (deliveries, scanned, false);
            }
            if self.wants(event) {
                if !room.take(event) {
                    return (deliveries, scanned, false);
                }
                deliveries.push(Delivery::Event(event.clone()));
                self.unacked.push_back(event.position);
            }
            scanned = Some(event.position);
        }
        (deliveries, scanned, true)
    }

    /// Leaves out the first event of a page at or above a position, where the script says so, and whether it did.
    fn skip(&mut self, log: &mut Log, from: u64, deliveries: &mut Vec<Delivery>) -> bool {
        let new = deliveries.iter().filter_map(event).map(|event| event.position).filter(|new| new.get() >= from).min();
        let Some(position) = new.filter(|_| log.take_fault(SourceFault::Skip)) else { return false };
        deliveries.retain(|delivery| event(delivery).is_none_or(|event| event.position != position));
        self.unacked.retain(|handed_out| *handed_out != position);
        log.met.skipped += 1;
        true
    }

    fn wants(&self, event: &RecordedEvent) -> bool {
        self.event_types.is_none_or(|types| types.contains(&event.event_type.as_str()))
    }
}

/// Exchanges the first event that is followed by one of another stream with that one, where the script says so.
fn reorder(log: &mut Log, deliveries: &mut [Delivery]) {
    let streams_differ = |pair: &[Delivery]| match (event(&pair[0]), event(&pair[1])) {
        (Some(first), Some(second)) => first.stream_id != second.stream_id && first.position < second.position,
        _ => false,
    };
    let found = deliveries.windows(2).position(streams_differ);
    if let Some(index) = found.filter(|_| log.take_fault(SourceFault::Reorder)) {
        deliveries.swap(index, index + 1);
        log.met.reordered += 1;
    }
}

fn event(delivery: &Delivery) -> Option<&RecordedEvent> {
    match delivery {
        Delivery::Event(event) => Some(event),
        Delivery::Progress(_) => None,
    }
}

/// What of a demand is left.
struct Room {
    events: usize,
    bytes: usize,
    empty: bool,
}

impl Room {
    /// Takes the room for an event, if there is some; the first event always fits.
    fn take(&mut self, event: &RecordedEvent) -> bool {
        let fits = self.empty || (self.events > 0 && event.size() <= self.bytes);
        if fits {
            self.empty = false;
            self.events = self.events.saturating_sub(1);
            self.bytes = self.bytes.saturating_sub(event.size());
        }
        fits
    }
}

fn within(rng: &mut Rng, range: &Range<Duration>) -> Duration {
    let width = range.end.saturating_sub(range.start);
    if width.is_zero() { Duration::ZERO } else { range.start + width.mul_f64(rng.f64()) }
}
