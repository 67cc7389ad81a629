//! One projection's life on this node: lease, pipeline, commands, restarts. It outlives every pipeline.
//!
//! The coordinator is an actor on the control thread. It waits for nothing but its inbox and its timers, so that it can
//! answer whatever else hangs.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::info::Live;
use super::messages::{Command, Input, LeaseNews, Order, Reply, Up, Wish};
use super::setup::exit_of;
use super::trouble::{Exit, Trouble, TroubleKind};
use crate::error::{CommandError, HaltReason, StateOrStandby};
use crate::event::Position;
use crate::lifecycle::{Role, State, Step, next};
use crate::options::ProjectionOptions;
use crate::projection::ProjectionId;
use crate::retry::Backoff;
use crate::target::LeaseAnswer;
use crate::telemetry::{
    BatchFailed, BatchNext, Degraded, Halted, OwnershipLost, Paused, Recovered, Resumed, Standby, Started, Stopped,
    Telemetry,
};

/// Waits between restarts of a pipeline.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// How often a standby asks for the lease, at most: a lease that was given up is noticed after this long.
const STANDBY_ASKS_EVERY: Duration = Duration::from_secs(2);

/// How often the coordinator looks after what tells nothing by itself.
const LOOKS_EVERY: Duration = Duration::from_secs(1);
/// A pipeline that has been up for so long and has nothing to do gets on as well as one that commits.
const QUIET_FOR: Duration = Duration::from_secs(1);

/// Makes a pipeline: the future is spawned on the user's runtime and tells through the sender when it is up.
pub(crate) type Launch = Box<dyn Fn(Up) -> Pin<Box<dyn Future<Output = Exit> + Send>> + Send>;

pub(crate) struct Coordinator {
    id: ProjectionId,
    options: Arc<ProjectionOptions>,
    telemetry: Telemetry,
    live: Arc<Live>,
    /// Where pipelines run.
    runtime: Handle,
    launch: Launch,
    wish: watch::Sender<Wish>,
    keeper: mpsc::Sender<Order>,
    inbox: mpsc::Receiver<Input>,
    /// For the tasks that watch over pipelines.
    own_inbox: mpsc::Sender<Input>,
    /// Where the first halt of any projection is told to who waits for it.
    halted: watch::Sender<Option<(ProjectionId, HaltReason)>>,
    /// Keeper, lag and the watchers of pipelines: they end with the coordinator.
    tasks: JoinSet<()>,

    /// Pipelines are numbered, so that news of one that was given up is told from news of the present one.
    number: u64,
    pipeline: Option<AbortHandle>,
    started: bool,
    /// When to try again for lease and pipeline.
    retry_at: Option<Instant>,
    /// When to look next after what tells nothing by itself.
    look_at: Instant,
    /// Since when the present pipeline is up.
    up_since: Option<Instant>,
    backoff: Backoff,
    /// Ends of one kind in a row, with nothing committed between them.
    fruitless: (TroubleKind, u32),
    standby_attempts: u32,
    stopping: Option<Stopping>,
}

/// A stop on its way.
struct Stopping {
    replies: Vec<Reply>,
    deadline: Instant,
    /// The pipeline is gone and the keeper gives the lease up.
    releasing: bool,
    /// What was left behind.
    left_behind: Option<String>,
}

/// What a coordinator is made from.
pub(crate) struct Parts {
    pub(crate) id: ProjectionId,
    pub(crate) options: Arc<ProjectionOptions>,
    pub(crate) telemetry: Telemetry,
    pub(crate) live: Arc<Live>,
    pub(crate) runtime: Handle,
    pub(crate) launch: Launch,
    pub(crate) wish: watch::Sender<Wish>,
    pub(crate) keeper: mpsc::Sender<Order>,
    pub(crate) inbox: mpsc::Receiver<Input>,
    pub(crate) own_inbox: mpsc::Sender<Input>,
    pub(crate) halted: watch::Sender<Option<(ProjectionId, HaltReason)>>,
    pub(crate) tasks: JoinSet<()>,
}

impl Coordinator {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { id, options, telemetry, live, runtime, launch, wish, keeper, inbox, own_inbox, halted, tasks } =
            parts;
        Self {
            id,
            options,
            telemetry,
            live,
            runtime,
            launch,
            wish,
            keeper,
            inbox,
            own_inbox,
            halted,
            tasks,
            number: 0,
            pipeline: None,
            started: false,
            retry_at: None,
            look_at: Instant::now() + LOOKS_EVERY,
            up_since: None,
            backoff: Backoff::new(FIRST_WAIT, LONGEST_WAIT),
            fruitless: (TroubleKind::Outage, 0),
            standby_attempts: 0,
            stopping: None,
        }
    }

    /// Runs until the projection is stopped.
    pub(crate) async fn run(mut self) {
        self.order(Order::Acquire);
        while self.live.state() != State::Stopped || self.stopping.is_some() {
            let deadline = self.stopping.as_ref().map(|stopping| stopping.deadline);
            let timer = [self.retry_at, deadline, Some(self.look_at)].into_iter().flatten().min();
            tokio::select! {
                // Biased: what has happened is heard before a timer says that it has not.
                biased;
                input = self.inbox.recv() => match input {
                    Some(input) => self.hear(input),
                    None => return,
                },
                () = tokio::time::sleep_until(timer.unwrap_or_else(Instant::now)), if timer.is_some() => self.ring(),
            }
        }
        self.tasks.shutdown().await;
    }

    fn hear(&mut self, input: Input) {
        match input {
            Input::Command(command, reply) => self.command(command, reply),
            Input::Lease(LeaseNews::Answer(answer)) => match answer {
                Ok(LeaseAnswer::Held) => self.launch(),
                Ok(LeaseAnswer::HeldBy { holder, expires_in }) => self.stand_by(&holder, expires_in),
                Err(error) => {
                    let exit = Exit::from_target(error);
                    self.note_exit(exit);
                }
            },
            Input::Lease(LeaseNews::Lost { holder }) => {
                self.give_up_pipeline();
                self.lose_ownership(&holder);
            }
            Input::Released => self.finish_stop(),
            Input::Up(number, heard) if number == self.number => {
                self.note_up();
                // A pipeline that is gone has its exit on the way.
                let _ = heard.send(());
            }
            Input::Exited(number, exit) if number == self.number => {
                self.pipeline = None;
                self.up_since = None;
                self.live.pipeline_lost();
                self.note_exit(exit);
            }
            // Of a pipeline that was given up.
            Input::Up(..) | Input::Exited(..) => {}
        }
    }

    fn ring(&mut self) {
        let now = Instant::now();
        if self.look_at <= now {
            self.look_at = now + LOOKS_EVERY;
            self.look();
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            self.order(Order::Acquire);
        }
        if self.stopping.as_ref().is_some_and(|stopping| stopping.deadline <= now) {
            self.overrun();
        }
    }

    /// Looks after what tells nothing by itself: a handler that does not come back, and a pipeline with nothing to do.
    fn look(&mut self) {
        let timeout = self.options.handler_timeout;
        if let Some((position, age)) = self.live.oldest_attempt().filter(|(_, age)| *age > timeout + LOOKS_EVERY) {
            if age > 2 * timeout + LOOKS_EVERY {
                self.give_up_pipeline();
                return self.halt(stuck(position, age));
            }
            self.live.failed(&stuck(position, age).to_string());
        }
        if self.up_since.is_some_and(|since| since.elapsed() > QUIET_FOR)
            && let Some(degraded) = self.live.idle()
        {
            let since = (chrono::Utc::now() - degraded.since).to_std().unwrap_or_default();
            self.telemetry.recovered(&Recovered { since, failures: degraded.failures });
        }
    }

    fn command(&mut self, command: Command, reply: Reply) {
        let state = self.live.state();
        let standby = self.live.role() == Role::Standby && command != Command::Stop;
        let (step, wish) = match command {
            Command::Pause => (Step::Pause, Wish::Pause),
            Command::Resume => (Step::Resume, Wish::Run),
            Command::Stop => (Step::Stop, Wish::Stop),
        };
        let Some(next) = next(state, step, false).filter(|_| !standby) else {
            let state = if standby { StateOrStandby::Standby } else { StateOrStandby::State(state) };
            let error = CommandError::InvalidState { id: self.id.clone(), state, command: command.name() };
            return answer(reply, Err(error));
        };
        self.wish.send_replace(wish);
        match command {
            Command::Pause => {
                self.enter(next);
                self.telemetry.paused(&Paused);
                answer(reply, Ok(()));
            }
            Command::Resume => {
                self.enter(next);
                self.telemetry.resumed(&Resumed);
                answer(reply, Ok(()));
            }
            Command::Stop => self.stop(next, reply),
        }
    }

    fn stop(&mut self, next: State, reply: Reply) {
        if let Some(stopping) = &mut self.stopping {
            return stopping.replies.push(reply);
        }
        self.begin_stop(vec![reply]);
        if next == State::Draining && self.pipeline.is_some() {
            self.enter(State::Draining);
        } else {
            self.give_up_pipeline();
            self.release();
        }
    }

    fn begin_stop(&mut self, replies: Vec<Reply>) {
        self.retry_at = None;
        let deadline = Instant::now() + self.options.shutdown_timeout;
        self.stopping = Some(Stopping { replies, deadline, releasing: false, left_behind: None });
    }

    fn note_up(&mut self) {
        self.up_since = Some(Instant::now());
        let paused = *self.wish.borrow() == Wish::Pause;
        if let Some(next) = next(self.live.state(), Step::Up, paused) {
            self.enter(next);
        }
        if !self.started {
            self.started = true;
            self.telemetry.started(&Started);
        }
    }

    fn note_exit(&mut self, exit: Exit) {
        if self.stopping.is_some() {
            if let Exit::Halt(reason) = exit {
                self.live.set_halted(reason);
            }
            return self.release();
        }
        if self.live.commits() > 0 {
            self.backoff.reset();
            self.fruitless.1 = 0;
        }
        match exit {
            Exit::Halt(reason) => self.halt(reason),
            Exit::Restart(trouble) => self.restart(trouble),
            Exit::Held { holder } => self.stand_by(&holder, STANDBY_ASKS_EVERY),
            Exit::OwnershipLost { by } => self.lose_ownership(&by),
            Exit::RuntimeGone => self.end_without_runtime(),
            Exit::Stopped => self.restart(Trouble::unknown("the pipeline stopped without being asked to")),
        }
    }

    /// Nothing can run here any more: whoever stands by is to have the projection.
    fn end_without_runtime(&mut self) {
        self.halt(HaltReason::new(
            "the runtime that the projection was started on has shut down: start it again on one that lives",
        ));
        self.begin_stop(Vec::new());
        self.release();
    }

    fn restart(&mut self, trouble: Trouble) {
        if self.fruitless.0 != trouble.kind {
            self.fruitless = (trouble.kind, 0);
        }
        self.fruitless.1 += 1;
        if trouble.kind.limit().is_some_and(|limit| self.fruitless.1 >= limit) {
            self.report_batch(&trouble, BatchNext::Halt);
            let message = format!("{} times in a row with nothing committed: {}", self.fruitless.1, trouble.message);
            return self.halt(HaltReason { class: trouble.class, code: trouble.code, ..HaltReason::new(message) });
        }
        let wait = self.backoff.next_wait();
        self.report_batch(&trouble, BatchNext::Replay(wait));
        let since = (chrono::Utc::now() - self.live.failed(&trouble.message).since).to_std().unwrap_or_default();
        let failures = self.backoff.failures();
        if failures.is_power_of_two() {
            self.telemetry.degraded(&Degraded { since, failures, last_error: &trouble.message });
        }
        self.step(Step::Lost);
        self.retry_at = Some(Instant::now() + wait);
    }

    fn report_batch(&self, trouble: &Trouble, next: BatchNext) {
        if trouble.batch {
            let Trouble { class, code, message, .. } = trouble;
            self.telemetry.batch_failed(&BatchFailed { class: *class, code: code.as_deref(), message, next });
        }
    }

    fn halt(&mut self, reason: HaltReason) {
        self.telemetry.halted(&Halted { reason: &reason });
        self.live.set_halted(reason.clone());
        self.step(Step::Halt);
        self.halted.send_if_modified(|halted| {
            let first = halted.is_none();
            halted.get_or_insert((self.id.clone(), reason));
            first
        });
    }

    fn stand_by(&mut self, holder: &str, expires_in: Duration) {
        if self.stopping.is_some() {
            return;
        }
        self.live.set_role(Role::Standby, Some(holder.to_owned()));
        if self.live.state() == State::Initializing {
            self.enter(State::Running);
        }
        self.standby_attempts += 1;
        let jitter = Duration::from_millis(fastrand::u64(0..250));
        let retry_in = expires_in.min(STANDBY_ASKS_EVERY) + jitter;
        let attempt = self.standby_attempts;
        self.telemetry.standby(&Standby { holder, attempt, retry_in });
        self.retry_at = Some(Instant::now() + retry_in);
    }

    fn lose_ownership(&mut self, by: &str) {
        if let (Some(epoch), _) = self.live.record() {
            self.telemetry.ownership_lost(&OwnershipLost { epoch, by });
        }
        self.live.ownership_lost();
        if self.stopping.is_some() {
            return self.release();
        }
        self.step(Step::Lost);
        if self.live.state() != State::Halted {
            self.stand_by(by, STANDBY_ASKS_EVERY);
        }
    }

    fn launch(&mut self) {
        if self.stopping.is_some() || self.pipeline.is_some() || self.live.state() == State::Halted {
            return;
        }
        if self.live.role() == Role::Standby {
            self.live.set_role(Role::Active, None);
            self.standby_attempts = 0;
            self.step(Step::Lost);
        }
        self.number += 1;
        let number = self.number;
        let (up, is_up) = oneshot::channel();
        let task = self.runtime.spawn((self.launch)(up));
        self.pipeline = Some(task.abort_handle());
        let inbox = self.own_inbox.clone();
        self.tasks.spawn(async move {
            // A coordinator that is gone does not want to know; a sender that is dropped means that it never came up.
            if let Ok(heard) = is_up.await {
                let _ = inbox.send(Input::Up(number, heard)).await;
            }
            let exit = exit_of(task.await);
            let _ = inbox.send(Input::Exited(number, exit)).await;
        });
    }

    /// Cancels the pipeline. A commit it is in goes on by itself; the next take-over waits for it and fences it.
    fn give_up_pipeline(&mut self) {
        if let Some(pipeline) = self.pipeline.take() {
            pipeline.abort();
            self.number += 1;
            self.up_since = None;
            self.live.pipeline_lost();
        }
    }

    /// The time for the stop is over.
    fn overrun(&mut self) {
        let releasing = self.stopping.as_ref().is_some_and(|stopping| stopping.releasing);
        if releasing {
            return self.finish_stop();
        }
        let info = self.live.info();
        let left_behind = match info.window.oldest {
            Some(oldest) => format!(
                "{} events in flight were left behind, the first at position {}{}: they are handled again at the next start",
                info.window.events,
                oldest.position,
                oldest.running.map_or_else(String::new, |(stream, partition, age)| format!(
                    " (stream {:?}, partition {partition}, handler running for {age:?})",
                    stream.as_str()
                ))
            ),
            None => format!(
                "a commit of {} events was left behind: it lands or not, and the next start sees which",
                info.window.events
            ),
        };
        if let Some(stopping) = &mut self.stopping {
            stopping.left_behind = Some(left_behind);
        }
        self.give_up_pipeline();
        self.finish_stop();
    }

    /// Has the keeper write the end down and give the lease up.
    fn release(&mut self) {
        let Some(stopping) = &mut self.stopping else { return };
        if !stopping.releasing {
            stopping.releasing = true;
            self.live.set_state(State::Draining);
            self.order(Order::End);
        }
    }

    fn finish_stop(&mut self) {
        let Some(stopping) = self.stopping.take() else { return };
        self.live.set_state(State::Stopped);
        self.telemetry.stopped(&Stopped);
        for reply in stopping.replies {
            let result = stopping.left_behind.clone().map_or(Ok(()), |left_behind| {
                let timeout = self.options.shutdown_timeout;
                Err(CommandError::Timeout { id: self.id.clone(), command: Command::Stop.name(), timeout, left_behind })
            });
            answer(reply, result);
        }
    }

    fn step(&mut self, step: Step) {
        if let Some(next) = next(self.live.state(), step, false) {
            self.enter(next);
        }
    }

    fn enter(&mut self, state: State) {
        self.live.set_state(state);
        self.order(Order::Store);
    }

    /// A keeper that hangs on earlier orders misses this one: a state is stored with the next order or renewal, a lease is
    /// asked for again, and a stop has its deadline.
    fn order(&mut self, order: Order) {
        if self.keeper.try_send(order).is_err() && order == Order::Acquire {
            self.retry_at = Some(Instant::now() + LONGEST_WAIT);
        }
    }
}

fn stuck(position: Position, age: Duration) -> HaltReason {
    HaltReason::new(format!(
        "the handler has not come back for {age:?}, and its timeout cannot interrupt one that blocks its thread: make it wait \
         asynchronously, or move the work to spawn_blocking"
    ))
    .at(position)
}

fn answer(reply: Reply, result: Result<(), CommandError>) {
    // Whoever asked may have given up waiting.
    let _ = reply.send(result);
}
