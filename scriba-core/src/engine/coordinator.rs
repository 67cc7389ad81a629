//! One projection's life on this node: lease, pipeline, commands, restarts. It outlives every pipeline.
//!
//! The coordinator is an actor on the control thread. It waits for nothing but its inbox, its tasks and its timers, so that it
//! can answer whatever else hangs. When it is lost by a panic, [`super::supervisor`] has it come back.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinError, JoinHandle, JoinSet};
use tokio::time::Instant;
use tracing::{Instrument as _, info_span};

use self::stopping::Stopping;
use super::fruitless::Fruitless;
use super::lease::Keeper;
use super::live::Live;
use super::messages::{Command, Input, LeaseNews, Order, Reply, Standing, Way, Wish};
use super::panic::message_of;
use super::setup::exit_of;
use super::trouble::{Exit, Trouble};
use crate::error::{CommandError, HaltReason, StateOrStandby};
use crate::event::Position;
use crate::lifecycle::{Role, State, Step, next};
use crate::options::ProjectionOptions;
use crate::projection::ProjectionId;
use crate::retry::Backoff;
#[cfg(feature = "test-switches")]
use crate::switches::Switches;
use crate::target::LeaseAnswer;
use crate::telemetry::{BatchFailed, BatchNext, Degraded, Halted, Paused, Resumed, Started, StopReason, Telemetry};

mod standby;
mod stopping;

/// Waits between restarts of a pipeline.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// How often the coordinator looks after what tells nothing by itself.
const LOOKS_EVERY: Duration = Duration::from_secs(1);
/// A pipeline that has been up for so long and has nothing to do gets on as well as one that commits.
const QUIET_FOR: Duration = Duration::from_secs(1);

/// Makes a pipeline: the future is spawned on the user's runtime and tells along the way when it is up.
pub(crate) type Launch = Box<dyn Fn(Way) -> Pin<Box<dyn Future<Output = Exit> + Send>> + Send>;

pub(crate) struct Coordinator {
    id: ProjectionId,
    options: Arc<ProjectionOptions>,
    telemetry: Telemetry,
    live: Arc<Live>,
    /// Where pipelines run.
    runtime: Handle,
    launch: Launch,
    /// The source admits one subscriber: a standby asks there too.
    admits_one: bool,
    wish: watch::Sender<Wish>,
    /// What each keeper is made from.
    lease: Keeper,
    keeper: mpsc::Sender<Order>,
    /// Not ended with the coordinator: a keeper that the target keeps waiting gives the lease up as soon as it can.
    keeping: JoinHandle<()>,
    inbox: mpsc::Receiver<Input>,
    /// For the tasks that watch over pipelines.
    own_inbox: mpsc::Sender<Input>,
    /// Where the first halt of any projection is told to who waits for it.
    halted: watch::Sender<Option<(ProjectionId, HaltReason)>>,
    /// Counts the projections that have stopped, for who waits for all of them.
    ended: watch::Sender<u64>,
    /// Lag and the watchers of pipelines: they end with the projection.
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
    /// Who holds the lease, where the present pipeline was launched all the same and has not taken it.
    stands_for: Option<String>,
    /// A pipeline that was granted the place at the source waits for the lease.
    seizing: Option<oneshot::Sender<()>>,
    /// Ends of pipelines with nothing committed between them.
    fruitless: Fruitless,
    standby_attempts: u32,
    stopping: Option<Stopping>,
}

/// What a coordinator is made from.
pub(crate) struct Parts {
    pub(crate) id: ProjectionId,
    pub(crate) options: Arc<ProjectionOptions>,
    pub(crate) telemetry: Telemetry,
    pub(crate) live: Arc<Live>,
    pub(crate) runtime: Handle,
    pub(crate) launch: Launch,
    pub(crate) admits_one: bool,
    pub(crate) wish: watch::Sender<Wish>,
    pub(crate) lease: Keeper,
    pub(crate) inbox: mpsc::Receiver<Input>,
    pub(crate) own_inbox: mpsc::Sender<Input>,
    pub(crate) halted: watch::Sender<Option<(ProjectionId, HaltReason)>>,
    pub(crate) ended: watch::Sender<u64>,
    pub(crate) tasks: JoinSet<()>,
}

impl Coordinator {
    /// Spawns the keeper.
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts {
            id,
            options,
            telemetry,
            live,
            runtime,
            launch,
            admits_one,
            wish,
            lease,
            inbox,
            own_inbox,
            halted,
            ended,
            tasks,
        } = parts;
        let (keeper, keeping) = lease.spawn();
        Self {
            id,
            options,
            telemetry,
            live,
            runtime,
            launch,
            admits_one,
            wish,
            lease,
            keeper,
            keeping,
            inbox,
            own_inbox,
            halted,
            ended,
            tasks,
            number: 0,
            pipeline: None,
            started: false,
            retry_at: None,
            look_at: Instant::now() + LOOKS_EVERY,
            up_since: None,
            backoff: Backoff::new(FIRST_WAIT, LONGEST_WAIT),
            stands_for: None,
            seizing: None,
            fruitless: Fruitless::default(),
            standby_attempts: 0,
            stopping: None,
        }
    }

    /// Runs until the projection is stopped, from its beginning or after this task or the keeper was lost.
    ///
    /// # Errors
    /// How the keeper was lost.
    pub(crate) async fn run(&mut self, lost: Option<Trouble>) -> Result<(), Trouble> {
        match lost {
            None => self.order(Order::Acquire),
            Some(lost) => self.come_back(lost),
        }
        while self.live.state() != State::Stopped || self.stopping.is_some() {
            let due = self.stopping.as_ref().map(Stopping::due);
            let timer = [self.retry_at, due, Some(self.look_at)].into_iter().flatten().min();
            tokio::select! {
                // Biased: what has happened is heard before a timer says that it has not.
                biased;
                input = self.inbox.recv() => match input {
                    Some(input) => self.hear(input),
                    None => return Ok(()),
                },
                // A task that watched over a pipeline has told what it saw.
                Some(_) = self.tasks.join_next() => {},
                ended = &mut self.keeping => return Err(Trouble::unknown(keeper_lost(ended))),
                () = tokio::time::sleep_until(timer.unwrap_or_else(Instant::now)), if timer.is_some() => self.ring(),
            }
        }
        Ok(())
    }

    /// Says that this task or the keeper was lost.
    pub(crate) fn report_loss(&self, lost: &Trouble) {
        tracing::error!(target: "scriba", projection = %self.id, error = %lost.message, "lost a task; the projection comes back");
    }

    /// Lets go of the tasks that are of no use any more.
    pub(crate) async fn end(mut self) {
        self.tasks.shutdown().await;
    }

    /// Begins anew. What lasts is what the user wants, the lease, and the count of failures; the pipeline does not.
    fn come_back(&mut self, lost: Trouble) {
        self.give_up_pipeline();
        // Nothing that is still on its way counts.
        self.number += 1;
        (self.keeper, self.keeping) = self.lease.spawn();
        self.retry_at = None;
        self.standby_attempts = 0;
        if let Some(stopping) = &mut self.stopping {
            stopping.releasing = false;
            return self.release();
        }
        if *self.wish.borrow() == Wish::Stop {
            self.begin_stop(StopReason::Stop, Vec::new());
            return self.release();
        }
        self.live.set_role(Role::Active, None);
        if self.live.state() != State::Halted {
            self.note_exit(Exit::Restart(lost));
        }
        if self.live.state() == State::Halted {
            // It keeps its lease.
            self.retry_at = Some(Instant::now() + self.backoff.next_wait());
        }
    }

    fn hear(&mut self, input: Input) {
        match input {
            Input::Command(command, reply) => self.command(command, reply),
            Input::Lease(LeaseNews::Answer(answer)) => match answer {
                Ok(LeaseAnswer::Held) => self.launch(None),
                Ok(LeaseAnswer::HeldBy { holder, .. }) if self.admits_one => self.launch(Some(holder)),
                Ok(LeaseAnswer::HeldBy { holder, expires_in }) => self.note_holder(&holder, expires_in),
                Err(error) => {
                    let exit = Exit::from_target(error);
                    self.note_exit(exit);
                }
            },
            Input::Lease(LeaseNews::Seized(answer)) => self.note_seized(answer),
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
            Input::Granted(number, seized) if number == self.number && self.stopping.is_none() => {
                self.seizing = Some(seized);
                self.order(Order::Seize);
            }
            Input::Exited(number, exit) if number == self.number => {
                let holder = self.stands_for.take();
                self.pipeline = None;
                self.seizing = None;
                self.up_since = None;
                self.live.pipeline_lost();
                match (exit, holder) {
                    (Exit::Restart(trouble), Some(holder)) if self.stopping.is_none() => {
                        self.note_unanswered(&holder, &trouble);
                    }
                    (exit @ Exit::Restart(_), None) if self.stopping.is_none() => {
                        // Whoever has the lease stands by for one that has the place, and for no other reason.
                        self.end_standby();
                        self.note_exit(exit);
                    }
                    (exit, _) => self.note_exit(exit),
                }
            }
            // Of a pipeline that was given up.
            Input::Up(..) | Input::Granted(..) | Input::Exited(..) => {}
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
        if self.stopping.as_ref().is_some_and(|stopping| stopping.due() <= now) {
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
            self.live.set_overdue(position);
            self.live.failed(&stuck(position, age).to_string());
        }
        if self.up_since.is_some_and(|since| since.elapsed() > QUIET_FOR)
            && let Some(recovery) = self.live.idle()
        {
            self.telemetry.recovered(&recovery.event());
        }
    }

    fn command(&mut self, command: Command, reply: Reply) {
        #[cfg(feature = "test-switches")]
        assert!(
            self.options.switches != Switches::CoordinatorPanics || command != Command::Pause,
            "the test asked for it"
        );
        let state = self.live.state();
        let standby = self.live.role() == Role::Standby && !matches!(command, Command::Stop(_));
        let (step, wish) = match command {
            Command::Pause => (Step::Pause, Wish::Pause),
            Command::Resume => (Step::Resume, Wish::Run),
            Command::Stop(_) => (Step::Stop, Wish::Stop),
        };
        let Some(next) = next(state, step, false).filter(|_| !standby) else {
            let state = if standby { StateOrStandby::Standby } else { StateOrStandby::State(state) };
            let error = CommandError::InvalidState { id: self.id.clone(), state, command: command.name() };
            return answer(reply, Err(error));
        };
        self.wish.send_replace(wish);
        self.live.set_wish(wish);
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
            Command::Stop(reason) => self.stop(next, reason, reply),
        }
    }

    fn note_up(&mut self) {
        if self.stopping.is_some() {
            return;
        }
        self.up_since = Some(Instant::now());
        self.end_standby();
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
            // An answer about the lease may come while the pipeline still drains.
            if self.pipeline.is_none() {
                self.release();
            }
            return;
        }
        if self.live.state() == State::Halted {
            // The lease could not be had again: it is tried for as long as this goes on.
            self.retry_at = Some(Instant::now() + self.backoff.next_wait());
            return;
        }
        if self.live.take_commits() > 0 {
            self.backoff.reset();
            self.fruitless.forget();
        }
        match exit {
            Exit::Halt(reason) => self.halt(reason),
            Exit::Restart(trouble) => self.restart(trouble),
            Exit::Held { holder } => self.note_holder(&holder, standby::ASKS_EVERY),
            Exit::OwnershipLost { by } => self.lose_ownership(&by),
            Exit::RuntimeGone => self.end_without_runtime(),
            Exit::Reached => {
                self.live.set_reached();
                self.begin_stop(StopReason::Until, Vec::new());
                self.release();
            }
            Exit::Stopped => self.restart(Trouble::unknown("the pipeline stopped without being asked to")),
        }
    }

    /// Nothing can run here any more: whoever stands by is to have the projection.
    fn end_without_runtime(&mut self) {
        self.halt(HaltReason::new(
            "the runtime that the projection was started on has shut down: start it again on one that lives",
        ));
        self.begin_stop(StopReason::RuntimeGone, Vec::new());
        self.release();
    }

    fn restart(&mut self, trouble: Trouble) {
        if let Some(times) = self.fruitless.one_too_many(trouble.kind) {
            self.report_batch(&trouble, BatchNext::Halt);
            let Trouble { class, code, message, position, .. } = trouble;
            let message = format!("{times} times with nothing committed between them: {message}");
            return self.halt(HaltReason { class, code, message, position });
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
        if trouble.batch > 0 {
            let Trouble { batch: events, class, code, message, .. } = trouble;
            let (events, class, code) = (*events, *class, code.as_deref());
            self.telemetry.batch_failed(&BatchFailed { events, class, code, message, next });
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

    /// Launches a pipeline: where another holds the lease, one that stands by until the source grants it the place.
    fn launch(&mut self, holder: Option<String>) {
        if self.stopping.is_some() || self.pipeline.is_some() || self.live.state() == State::Halted {
            return;
        }
        // Where the source has the last word it is still a standby, until it has the place.
        if !self.admits_one {
            self.end_standby();
        }
        self.number += 1;
        let number = self.number;
        let (up, is_up) = oneshot::channel();
        let (granted, is_granted) = oneshot::channel();
        self.stands_for.clone_from(&holder);
        let standby = holder.map(|holder| Standing { holder, granted });
        let span = info_span!(target: "scriba", "pipeline", number);
        let task = self.runtime.spawn((self.launch)(Way { up, standby }).instrument(span));
        self.pipeline = Some(task.abort_handle());
        let inbox = self.own_inbox.clone();
        self.tasks.spawn(async move {
            // A sender that is dropped means that nothing was granted, or that nothing had to be.
            if let Ok(seized) = is_granted.await {
                let _ = inbox.send(Input::Granted(number, seized)).await;
            }
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
            self.seizing = None;
            self.up_since = None;
            self.live.pipeline_lost();
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

fn keeper_lost(ended: Result<(), JoinError>) -> String {
    match ended {
        Err(error) if error.is_panic() => {
            format!("the keeper of the lease panicked: {}", message_of(error.into_panic().as_ref()))
        }
        _ => "the keeper of the lease ended unexpectedly".to_owned(),
    }
}

fn answer(reply: Reply, result: Result<(), CommandError>) {
    // Whoever asked may have given up waiting.
    let _ = reply.send(result);
}
