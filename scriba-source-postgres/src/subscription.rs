//! One delivery from a point on: probe, page, judge, wait.
//!
//! State changes only after an answer has been read and in one go, so a `next` that is dropped while it waits has
//! done nothing; sqlx finishes reading the answer of a dropped statement before it sends the next one.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures_util::TryStreamExt;
use scriba_core::source::{Delivery, Demand, Page, SourceError, SubscribeRequest, Subscription};
use scriba_core::telemetry::{GapDetected, GapPassed, Telemetry};
use scriba_core::{Position, RecordedEvent};
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{Postgres, Row, query, query_as};
use tokio::time::Instant;

use crate::blocker;
use crate::catalog::Catalog;
use crate::error::answer;
use crate::frontier::{Frontier, Probe, Verdict};
use crate::log::PgLog;
use crate::page_size::PageSize;
use crate::row::{BOOT, REPLICA, Rows};
use crate::wake::{Listener, Wait, Wake};

/// A log with a gap lately will have the next one soon, so the evidence is gathered ahead of the page.
const WARM: Duration = Duration::from_secs(10);
/// Rows read per look while a gap is in the way, since most of them are read in vain.
const ROWS_WHILE_HELD: usize = 32;
/// Appends that end sooner than this are the everyday of a log, not worth a report.
const REPORT_AFTER: Duration = Duration::from_secs(1);
/// Numbers that a filtered page looks through at most, at first; see [`Span`].
const FIRST_SPAN: i64 = 16_384;

const NOT_PROBED: Option<i64> = Some(i64::MAX);

type Evidence = (Option<i64>, Vec<String>, bool, DateTime<Utc>, bool);

pub(crate) struct PgSubscription {
    connection: PgConnection,
    catalog: Catalog,
    rows: Rows,
    telemetry: Telemetry,
    event_types: Option<&'static [&'static str]>,
    /// Everything up to here has been handed out, or is none of what was asked for.
    cursor: Option<i64>,
    frontier: Frontier,
    /// What the first probe saw as the highest position; until then beyond every position.
    first_head: Option<i64>,
    page_size: PageSize,
    span: Span,
    /// Until then a page comes with a probe before it.
    warm_until: Option<Instant>,
    held: Option<Hold>,
    /// The first time it has caught up is told, even with nothing to hand out.
    told_caught_up: bool,
    wake: Wake,
}

/// A wait for appends that may own a position above `at`.
#[derive(Clone, Copy, Debug)]
struct Hold {
    at: Option<i64>,
    since: Instant,
    reported: bool,
}

/// How many numbers a filtered page looks through, so that a statement that finds nothing still ends soon and its
/// progress is kept: doubled while that is quick, halved while it is slow.
#[derive(Clone, Copy, Debug)]
struct Span(i64);

impl Span {
    fn learn(&mut self, took: Duration) {
        if took < Duration::from_millis(50) {
            self.0 = self.0.saturating_mul(2);
        } else if took > Duration::from_millis(200) {
            self.0 = (self.0 / 2).max(FIRST_SPAN);
        }
    }
}

/// What a look at the log came to.
enum Look {
    Found(Page),
    Nothing(Wait),
}

/// What a page came to.
#[derive(Default)]
struct Read {
    events: Vec<RecordedEvent>,
    /// The gaps passed on the way: the positions before and behind them.
    passed: Vec<(Option<i64>, i64)>,
    bytes: usize,
    end: End,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum End {
    /// There were no more rows.
    #[default]
    Exhausted,
    /// As many rows came as were asked for.
    Full,
    /// The next event would have been more than the demand's bytes.
    Bytes,
    /// What is missing before the next row may still come.
    Gap,
}

impl PgSubscription {
    pub(crate) async fn start(
        log: &PgLog,
        application: &str,
        mut connection: PgConnection,
        catalog: Catalog,
        request: SubscribeRequest,
    ) -> Result<Self, SourceError> {
        if catalog.is_standby() {
            return Err(standby(&catalog.name));
        }
        let cursor = request.after.map(Position::to_i64).transpose().map_err(SourceError::unusable)?;
        if let Some(cursor) = cursor {
            catalog.refuse_below(&mut connection, cursor).await?;
        }
        let listen = |channel: &String| {
            let options: PgConnectOptions = log.connect_options(&format!("{application} listener"));
            Listener::start(options, channel.clone())
        };
        Ok(Self {
            connection,
            rows: Rows::new(&catalog, log.columns.clone()),
            telemetry: request.telemetry,
            event_types: request.event_types,
            cursor,
            frontier: Frontier::new(cursor, catalog.sequence.lowest),
            first_head: NOT_PROBED,
            page_size: PageSize::new(log.page_rows),
            span: Span(FIRST_SPAN),
            warm_until: None,
            held: None,
            told_caught_up: false,
            wake: Wake::new(log.intervals, log.channel.as_ref().map(listen)),
            catalog,
        })
    }

    async fn look(&mut self, demand: Demand) -> Result<Look, SourceError> {
        match self.event_types {
            None => self.look_at_all(demand).await,
            Some(types) => self.look_at_types(types, demand).await,
        }
    }

    /// Every event: numbers without a gap need no evidence; a gap is judged by a probe before the page that shows it.
    async fn look_at_all(&mut self, demand: Demand) -> Result<Look, SourceError> {
        let mut probed = self.warm_until.is_some_and(|until| Instant::now() < until);
        if probed {
            self.probe().await?;
        }
        loop {
            let mut limit = self.page_size.rows(demand);
            if self.held.is_some() {
                limit = limit.min(ROWS_WHILE_HELD);
            }
            let after = self.cursor.unwrap_or(i64::MIN);
            let page = query(self.catalog.texts.page.clone()).bind(after).bind(as_i64(limit));
            let read = self.read(page, demand, limit).await?;
            if read.end == End::Gap {
                self.warm_until = Some(Instant::now() + WARM);
            }
            match (read.events.last(), read.end) {
                (Some(last), _) => {
                    let last = last.position.to_i64().map_err(SourceError::unusable)?;
                    self.report_passed(&read.passed);
                    self.held = None;
                    self.cursor = Some(last);
                    let caught_up = read.end == End::Exhausted || read.end == End::Gap && self.is_past_first_head();
                    return Ok(Look::Found(self.page(read, None, caught_up)));
                }
                (None, End::Gap) if !probed => {
                    self.probe().await?;
                    probed = true;
                }
                (None, End::Gap) => {
                    self.hold().await?;
                    return Ok(Look::Nothing(Wait::Stuck));
                }
                (None, _) => return Ok(self.nothing_more()),
            }
        }
    }

    /// Only some types: the gaps between them mean nothing, so it reads up to where everything is final.
    async fn look_at_types(&mut self, types: &'static [&'static str], demand: Demand) -> Result<Look, SourceError> {
        let fresh = self.frontier.settled() <= self.cursor;
        if fresh {
            self.probe().await?;
        }
        let settled = match self.frontier.settled() {
            Some(settled) if self.cursor < Some(settled) => settled,
            _ if self.frontier.holds() => {
                self.hold().await?;
                return Ok(Look::Nothing(Wait::Stuck));
            }
            _ => return Ok(self.nothing_more()),
        };
        let from = self.cursor.unwrap_or(-1);
        let to = settled.min(from.saturating_add(self.span.0));
        let limit = self.page_size.rows(demand);
        let page = query(self.catalog.texts.filtered_page.clone())
            .bind(self.cursor.unwrap_or(i64::MIN))
            .bind(to)
            .bind(types)
            .bind(as_i64(limit));
        let started = Instant::now();
        let read = self.read(page, demand, limit).await?;
        self.held = None;
        if read.end == End::Exhausted {
            self.span.learn(started.elapsed());
            self.cursor = Some(to);
            let nothing_held = fresh && !self.frontier.holds();
            let caught_up = to == settled && (nothing_held || self.is_past_first_head());
            return Ok(Look::Found(self.page(read, Some(to), caught_up)));
        }
        if let Some(last) = read.events.last() {
            self.cursor = Some(last.position.to_i64().map_err(SourceError::unusable)?);
        }
        Ok(Look::Found(self.page(read, None, false)))
    }

    /// Gathers evidence. It judges only what later statements show.
    async fn probe(&mut self) -> Result<(), SourceError> {
        let asked = query_as(self.catalog.texts.probe.clone())
            .bind(vec![self.catalog.sequence.oid])
            .fetch_one(&mut self.connection);
        let (highest, holders, canary, boot, replica): Evidence =
            answer(&self.catalog.name, "look for open appends", asked).await?;
        self.same_server(boot, replica)?;
        if !canary {
            return Err(SourceError::unusable(format!(
                "event log {}: the server's pg_locks does not show this connection's own lock, so open appends cannot be seen: only PostgreSQL itself is supported",
                self.catalog.name
            )));
        }
        self.frontier.fold(Probe { highest, holders });
        if self.first_head == NOT_PROBED {
            self.first_head = highest;
        }
        Ok(())
    }

    /// Whether everything there was at the first probe is behind the cursor: under constant load, where some append is always
    /// open and something always held, that is what having caught up means.
    fn is_past_first_head(&self) -> bool {
        self.cursor >= self.first_head
    }

    /// Runs a page and takes in what may be delivered of it; nothing else changes. With a filter, everything it shows may be.
    async fn read(
        &mut self,
        page: Query<'static, Postgres, PgArguments>,
        demand: Demand,
        limit: usize,
    ) -> Result<Read, SourceError> {
        let Self { connection, rows, frontier, catalog, cursor, event_types, .. } = self;
        let frontier = event_types.is_none().then_some(&*frontier);
        let asked = async {
            let mut read = Read::default();
            let mut server = None;
            let mut cursor = *cursor;
            let mut answered = page.fetch(&mut *connection);
            // What is left of the answer when this ends early is thrown away before the next statement.
            while let Some(row) = answered.try_next().await? {
                if server.is_none() {
                    server = Some((row.try_get(BOOT)?, row.try_get(REPLICA)?));
                }
                match read.take(rows, frontier, cursor, demand, &row) {
                    Ok(Some(position)) => cursor = Some(position),
                    Ok(None) => break,
                    Err(error) => return Ok(Err(error)),
                }
            }
            if read.end == End::Exhausted && read.events.len() == limit {
                read.end = End::Full;
            }
            Ok(Ok((read, server)))
        };
        let (read, server) = answer(&catalog.name, "read a page", asked).await??;
        if let Some((boot, replica)) = server {
            self.same_server(boot, replica)?;
        }
        self.page_size.learn(read.events.len(), read.bytes, read.end == End::Bytes);
        Ok(read)
    }

    /// Evidence of one server says nothing about what another shows.
    fn same_server(&self, boot: DateTime<Utc>, replica: bool) -> Result<(), SourceError> {
        if replica {
            return Err(standby(&self.catalog.name));
        }
        if boot != self.catalog.boot {
            return Err(SourceError::ended(format!(
                "event log {}: the server was restarted, or is another one",
                self.catalog.name
            )));
        }
        Ok(())
    }

    /// Makes a page of what was read, with the progress behind it.
    fn page(&mut self, read: Read, progress: Option<i64>, caught_up: bool) -> Page {
        self.wake.reset();
        self.told_caught_up |= caught_up;
        let last = read.events.last().map(|event| event.position);
        let progress = progress.and_then(|to| Position::from_i64(to).ok()).filter(|to| last < Some(*to));
        let events = read.events.into_iter().map(Delivery::Event);
        Page { deliveries: events.chain(progress.map(Delivery::Progress)).collect(), caught_up }
    }

    fn nothing_more(&mut self) -> Look {
        self.held = None;
        if self.told_caught_up {
            return Look::Nothing(Wait::Idle);
        }
        self.told_caught_up = true;
        Look::Found(Page { deliveries: Vec::new(), caught_up: true })
    }

    /// Notes that something above the cursor may still come; after a while it is reported, once.
    async fn hold(&mut self) -> Result<(), SourceError> {
        let at = self.cursor;
        let held = match self.held {
            Some(held) if held.at == at => held,
            _ => Hold { at, since: Instant::now(), reported: false },
        };
        self.held = Some(held);
        if held.reported || held.since.elapsed() < REPORT_AFTER {
            return Ok(());
        }
        let missing = self.behind(at);
        let highest = self.frontier.highest().unwrap_or(missing);
        let blocker = blocker::describe(&mut self.connection, &self.catalog, &self.frontier, missing).await?;
        if let (Ok(position), Ok(highest_visible)) = (Position::from_i64(missing), Position::from_i64(highest)) {
            let age = held.since.elapsed();
            let gap = GapDetected { position, highest_visible, age, evidence: "sequence_lock", blocker: &blocker };
            self.telemetry.gap_detected(&gap);
        }
        self.held = Some(Hold { reported: true, ..held });
        Ok(())
    }

    fn report_passed(&self, passed: &[(Option<i64>, i64)]) {
        for (at, position) in passed {
            let age = self.held.filter(|held| held.at == *at).map(|held| held.since.elapsed()).unwrap_or_default();
            let first = self.behind(*at);
            // What the increment leaps over was never a number of the sequence.
            let leap = at.is_some() && position - first < self.catalog.sequence.step;
            let ends = (Position::from_i64(first), Position::from_i64(position.saturating_sub(1)));
            let highest = Position::from_i64(self.frontier.highest().unwrap_or(*position));
            if let ((Ok(from), Ok(to)), Ok(highest_visible)) = (ends, highest)
                && from <= to
                && !leap
            {
                self.telemetry.gap_passed(&GapPassed { from, to, highest_visible, age, evidence: "no_holder" });
            }
        }
    }

    /// The first number behind a cursor.
    fn behind(&self, at: Option<i64>) -> i64 {
        at.map_or(self.catalog.sequence.lowest.max(0), |at| at.saturating_add(1))
    }
}

#[async_trait]
impl Subscription for PgSubscription {
    async fn next(&mut self, demand: Demand) -> Result<Page, SourceError> {
        loop {
            match self.look(demand).await? {
                Look::Found(page) => return Ok(page),
                Look::Nothing(wait) => self.wake.wait(wait).await,
            }
        }
    }

    /// The log keeps no position of its readers.
    fn wants_acks(&self) -> bool {
        false
    }

    async fn ack(&mut self, _: Position) -> Result<(), SourceError> {
        Ok(())
    }
}

impl Read {
    /// Takes in a row. `None`: neither this one nor any behind it.
    fn take(
        &mut self,
        rows: &mut Rows,
        frontier: Option<&Frontier>,
        cursor: Option<i64>,
        demand: Demand,
        row: &PgRow,
    ) -> Result<Option<i64>, SourceError> {
        let Some(position) = Rows::position(row)? else { return Ok(None) };
        if cursor >= Some(position) {
            return Err(rows.out_of_order(position));
        }
        let verdict = frontier.map_or(Verdict::Contiguous, |frontier| frontier.judge(cursor, position));
        if verdict == Verdict::Held {
            self.end = End::Gap;
            return Ok(None);
        }
        let event = rows.event(row, position)?;
        let bytes = self.bytes + event.size();
        if bytes > demand.bytes && !self.events.is_empty() {
            self.end = End::Bytes;
            return Ok(None);
        }
        if verdict == Verdict::GapPassed {
            self.passed.push((cursor, position));
        }
        self.bytes = bytes;
        self.events.push(event);
        Ok(Some(position))
    }
}

/// While a failover is under way this passes; where the options name a standby for good, the check refuses it.
fn standby(log: &str) -> SourceError {
    SourceError::unavailable(format!(
        "event log {log}: the server is a standby, where no one can see which appends are open: connect to the primary"
    ))
}

/// Page sizes are far below the limits of `i64`.
fn as_i64(rows: usize) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}
