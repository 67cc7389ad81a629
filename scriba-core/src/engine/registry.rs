//! The user's way in: [`Scriba`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tracing::{Instrument as _, info_span};

use super::control::ControlThread;
use super::coordinator::{Coordinator, Parts};
use super::info::ProjectionInfo;
use super::lag;
use super::lease::Keeper;
use super::live::Live;
use super::messages::{Command, Input, Wish};
use super::panic::note_places;
use super::setup::Setup;
use super::supervisor::supervise;
use crate::dead_letter::DeadLetter;
use crate::error::{CommandError, HaltReason, RunError, StartError, StateOrStandby};
use crate::failure::FailureClass;
use crate::lifecycle::State;
use crate::options::{Lease, ProjectionOptions};
use crate::projection::{Handler, Projection, ProjectionId};
use crate::source::{Source, SourceError};
use crate::target::{DeadLetterFilter, DeadLetterStats, Owner, StoredProjection, Tables, Target, TargetError};
use crate::telemetry::{Observer, StopReason, Telemetry};

/// A longer name would make keys that an index cannot hold.
const LONGEST_NAME: usize = 200;
/// What a command may take beyond its own timeout, for the way to the control thread and back.
const GRACE: Duration = Duration::from_secs(2);
/// Orders and inputs that may queue up: commands and news are few.
const QUEUE: usize = 64;

/// Runs projections, and answers for them. Cheap to clone; when the last clone is dropped, everything it runs ends as
/// if the process had died, so call [`Scriba::shutdown`] first.
#[derive(Clone)]
pub struct Scriba {
    inner: Arc<Inner>,
}

struct Inner {
    control: ControlThread,
    observers: Vec<Arc<dyn Observer>>,
    projections: Mutex<HashMap<ProjectionId, Entry>>,
    attached: Mutex<Vec<Arc<dyn Tables>>>,
    /// Sources of projections that may never be started here.
    sources: Mutex<HashMap<ProjectionId, Arc<dyn Source>>>,
    shut_down: watch::Sender<bool>,
    /// The projection that halted first and was not started again since.
    halted: watch::Sender<Option<(ProjectionId, HaltReason)>>,
    /// Counts the projections that have stopped.
    ended: watch::Sender<u64>,
}

/// A projection that was started here.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) live: Arc<Live>,
    pub(super) tables: Arc<dyn Tables>,
    pub(super) source: Arc<dyn Source>,
    inbox: mpsc::Sender<Input>,
    stop_within: Duration,
}

/// A projection as [`Scriba::list`] knows it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListedProjection {
    /// Its identity.
    pub id: ProjectionId,
    /// Its state: this node's where it was started here, else as its owner last wrote it down.
    pub state: State,
    /// What the tables know of it; `None` where it has no checkpoint yet.
    pub stored: Option<StoredProjection>,
    /// What this node knows of it; `None` where it was not started here.
    pub info: Option<ProjectionInfo>,
}

impl Default for Scriba {
    fn default() -> Self {
        Self::new()
    }
}

impl Scriba {
    /// An engine that runs nothing yet.
    ///
    /// It notes, through the process's panic hook, where handlers panic; the hook that was there is called as before.
    pub fn new() -> Self {
        Self::with_observers([])
    }

    /// An engine that reports to observers, in their order.
    pub fn with_observers(observers: impl IntoIterator<Item = Arc<dyn Observer>>) -> Self {
        note_places();
        let inner = Inner {
            control: ControlThread::new(),
            observers: observers.into_iter().collect(),
            projections: Mutex::default(),
            attached: Mutex::default(),
            sources: Mutex::default(),
            shut_down: watch::Sender::new(false),
            halted: watch::Sender::new(None),
            ended: watch::Sender::new(0),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Makes the commands that read tables answer for all projections whose tables are in `target`, also on a node that starts
    /// none of them. The tables of projections that were started here are attached by themselves.
    pub fn attach(&self, target: impl Tables) {
        lock(&self.inner.attached).push(Arc::new(target));
    }

    /// Makes [`WaitFor::Head`](crate::WaitFor::Head) and [`Scriba::reset`] know the source of a projection on a node that does not
    /// start it.
    pub fn attach_source(&self, id: impl Into<ProjectionId>, source: impl Source) {
        lock(&self.inner.sources).insert(id.into(), Arc::new(source));
    }

    /// Starts a projection. Its pipelines run on the runtime this is called on.
    ///
    /// Returns once it is known that it can run: whether it is up yet, on standby, or waiting for a database that is down,
    /// tells [`Scriba::info`].
    ///
    /// # Errors
    /// [`StartError`], and then nothing runs.
    pub async fn start<P, S, T>(
        &self,
        projection: P,
        source: S,
        target: T,
        options: ProjectionOptions,
    ) -> Result<(), StartError>
    where
        P: Projection + Handler,
        S: Source,
        T: Target<P::Op>,
    {
        let id = ProjectionId::of::<P>();
        check_identity(&id)?;
        options.validate(&id)?;
        let source: Arc<dyn Source> = Arc::new(source);
        let target = Arc::new(target);
        check_target(&id, target.as_ref()).await?;
        check_source(&id, source.as_ref()).await?;

        let live = Arc::new(Live::new(id.clone(), target.name(), source.keeps_position()));
        let (own_inbox, inbox) = mpsc::channel(QUEUE);
        let entry = Entry {
            live: Arc::clone(&live),
            tables: Arc::clone(&target) as Arc<dyn Tables>,
            source: Arc::clone(&source),
            inbox: own_inbox.clone(),
            stop_within: options.shutdown_timeout,
        };
        self.enter(&id, entry)?;

        let options = Arc::new(options);
        let telemetry = Telemetry::new(id.clone(), self.inner.observers.clone());
        let owner = new_owner();
        let (wish, wished) = watch::channel(Wish::Run);
        let lease = Keeper {
            id: id.clone(),
            owner: owner.clone(),
            lease: match options.lease {
                Lease::For(lease) => Some(lease),
                Lease::Off => None,
            },
            tables: Arc::clone(&target) as Arc<dyn Tables>,
            live: Arc::clone(&live),
            inbox: own_inbox.clone(),
        };
        let setup = Arc::new(Setup {
            id: id.clone(),
            handler: Arc::new(projection),
            source: Arc::clone(&source),
            target,
            options: Arc::clone(&options),
            telemetry: telemetry.clone(),
            owner,
            live: Arc::clone(&live),
            wish: wished,
        });
        let halted = self.inner.halted.clone();
        halted.send_if_modified(|halted| halted.take_if(|(there, _)| *there == id).is_some());
        let ended = self.inner.ended.clone();
        let runtime = Handle::current();
        let span = info_span!(target: "scriba", "projection", projection = %id);
        let tree = async move {
            let mut tasks = JoinSet::new();
            if !options.lag_interval.is_zero() {
                let lag = lag::watch(source, Arc::clone(&live), telemetry.clone(), options.lag_interval);
                tasks.spawn(lag.instrument(info_span!(target: "scriba", "lag")));
            }
            let admits_one = setup.source.admits_one();
            let launch = Box::new(move |way| Box::pin(Arc::clone(&setup).run(way)) as _);
            let parts = Parts {
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
            };
            supervise(Coordinator::new(parts)).await;
        };
        self.inner.control.spawn(tree.instrument(span));
        Ok(())
    }

    /// Enters a projection, unless one of its identity is there and not stopped.
    fn enter(&self, id: &ProjectionId, entry: Entry) -> Result<(), StartError> {
        let mut projections = lock(&self.inner.projections);
        if *self.inner.shut_down.borrow() {
            return Err(StartError::ShutDown { id: id.clone() });
        }
        if let Some(there) = projections.get(id) {
            let state = there.live.state();
            if state != State::Stopped {
                return Err(StartError::AlreadyStarted { id: id.clone(), state });
            }
        }
        projections.insert(id.clone(), entry);
        Ok(())
    }

    /// Stops pulling from the source. Lease and subscription are kept; what is in flight is committed.
    ///
    /// # Errors
    /// [`CommandError::InvalidState`] unless it is running and active.
    pub async fn pause(&self, id: impl Into<ProjectionId>) -> Result<(), CommandError> {
        self.command(&id.into(), Command::Pause).await
    }

    /// Goes on after a pause.
    ///
    /// # Errors
    /// [`CommandError::InvalidState`] unless it is paused.
    pub async fn resume(&self, id: impl Into<ProjectionId>) -> Result<(), CommandError> {
        self.command(&id.into(), Command::Resume).await
    }

    /// Stops a projection: handlers in flight finish or time out, what is ready is committed and acked, the lease is given up.
    ///
    /// # Errors
    /// [`CommandError::Timeout`] when that took longer than the shutdown timeout: it is stopped all the same, what hangs is left
    /// behind and can commit nothing once the next owner has taken over. [`CommandError::InvalidState`] when it is stopped.
    pub async fn stop(&self, id: impl Into<ProjectionId>) -> Result<(), CommandError> {
        self.command(&id.into(), Command::Stop(StopReason::Stop)).await
    }

    /// Stops everything, all at the same time; nothing can be started afterwards.
    ///
    /// # Errors
    /// The first of the errors of [`Scriba::stop`].
    pub async fn shutdown(&self) -> Result<(), CommandError> {
        self.inner.shut_down.send_replace(true);
        let running: Vec<ProjectionId> = lock(&self.inner.projections)
            .iter()
            .filter(|(_, entry)| entry.live.state() != State::Stopped)
            .map(|(id, _)| id.clone())
            .collect();
        let stops = running.iter().map(|id| async {
            match self.command(id, Command::Stop(StopReason::Shutdown)).await {
                // Stopped by another in between.
                Err(CommandError::InvalidState { .. }) => Ok(()),
                stopped => stopped,
            }
        });
        futures_util::future::join_all(stops).await.into_iter().collect()
    }

    /// Runs everything that was started until `signal` ends, then shuts down; or until a projection halts, then shuts down and
    /// returns its reason, so that a supervisor starts the process anew and people hear of it; or until nothing runs any more
    /// because what was started has come to where it was to end ([`ProjectionOptions::until`]).
    ///
    /// While a projection waits to be started, or was stopped by [`Scriba::stop`] and nothing else has ended by itself, it goes on.
    ///
    /// # Errors
    /// [`RunError`].
    pub async fn run_until(&self, signal: impl Future) -> Result<(), RunError> {
        let mut halted = self.inner.halted.subscribe();
        let halt = tokio::select! {
            _ = signal => None,
            // The sender lives in `self`.
            Ok(halt) = halted.wait_for(Option::is_some) => halt.clone(),
            () = self.all_have_ended() => None,
        };
        let shut_down = self.shutdown().await;
        if let Some((id, reason)) = halt {
            return Err(RunError::Halted { id, reason });
        }
        shut_down.map_err(RunError::Shutdown)
    }

    /// Returns once every projection is stopped, and one of them by itself.
    async fn all_have_ended(&self) {
        let mut ended = self.inner.ended.subscribe();
        loop {
            ended.mark_unchanged();
            let over = {
                let projections = lock(&self.inner.projections);
                let stopped = projections.values().all(|entry| entry.live.state() == State::Stopped);
                stopped && projections.values().any(|entry| entry.live.has_reached())
            };
            // The sender lives in `self`.
            if over || ended.changed().await.is_err() {
                return;
            }
        }
    }

    async fn command(&self, id: &ProjectionId, command: Command) -> Result<(), CommandError> {
        let entry = self.entry(id).ok_or_else(|| CommandError::Unknown { id: id.clone() })?;
        let stopped = || CommandError::InvalidState {
            id: id.clone(),
            state: StateOrStandby::State(State::Stopped),
            command: command.name(),
        };
        let (reply, answer) = oneshot::channel();
        let asked = async {
            entry.inbox.send(Input::Command(command, reply)).await.map_err(|_| stopped())?;
            answer.await.map_err(|_| match entry.live.state() {
                State::Stopped => stopped(),
                _ => CommandError::Interrupted { id: id.clone(), command: command.name() },
            })?
        };
        timeout(entry.stop_within + GRACE, asked).await.unwrap_or_else(|_| {
            Err(CommandError::Timeout {
                id: id.clone(),
                command: command.name(),
                timeout: entry.stop_within + GRACE,
                left_behind: "its coordinator did not answer".to_owned(),
            })
        })
    }

    /// What this node knows of a projection that was started here, stopped since or not.
    ///
    /// # Errors
    /// [`CommandError::Unknown`] when it was never started here; [`Scriba::list`] reads the tables.
    pub fn info(&self, id: impl Into<ProjectionId>) -> Result<ProjectionInfo, CommandError> {
        let id = id.into();
        let entry = self.entry(&id).ok_or(CommandError::Unknown { id })?;
        Ok(entry.live.info())
    }

    /// All projections known to the tables of attached targets or started here, by name and version.
    ///
    /// # Errors
    /// [`CommandError::Tables`] when a target could not be read.
    pub async fn list(&self) -> Result<Vec<ListedProjection>, CommandError> {
        let mut listed: HashMap<ProjectionId, ListedProjection> = HashMap::new();
        for tables in self.tables() {
            let all = tables.stored_all().await;
            let all = all.map_err(|error| tables_error(&ProjectionId::new("*", 0), &error))?;
            for stored in all {
                let (id, state) = (stored.id.clone(), stored.state.state);
                listed.insert(id.clone(), ListedProjection { id, state, stored: Some(stored), info: None });
            }
        }
        for (id, entry) in lock(&self.inner.projections).iter() {
            let info = entry.live.info();
            let stored = listed.remove(id).and_then(|listed| listed.stored);
            let here = ListedProjection { id: id.clone(), state: info.state, stored, info: Some(info) };
            listed.insert(id.clone(), here);
        }
        let mut listed: Vec<_> = listed.into_values().collect();
        listed.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(listed)
    }

    /// Dead letters of a projection that a filter lets through, whether it runs or not.
    ///
    /// # Errors
    /// [`CommandError::Unknown`] when no attached target knows the projection, [`CommandError::Tables`] when one could not be read.
    pub async fn dead_letters(
        &self,
        id: impl Into<ProjectionId>,
        filter: &DeadLetterFilter,
    ) -> Result<Vec<DeadLetter>, CommandError> {
        let id = id.into();
        let tables = self.tables_of(&id).await?;
        tables.dead_letters(&id, filter).await.map_err(|error| tables_error(&id, &error))
    }

    /// The dead letters of a projection counted, whether it runs or not.
    ///
    /// # Errors
    /// Those of [`Scriba::dead_letters`].
    pub async fn dead_letter_stats(&self, id: impl Into<ProjectionId>) -> Result<DeadLetterStats, CommandError> {
        let id = id.into();
        let tables = self.tables_of(&id).await?;
        tables.dead_letter_stats(&id).await.map_err(|error| tables_error(&id, &error))
    }

    pub(super) fn entry(&self, id: &ProjectionId) -> Option<Entry> {
        lock(&self.inner.projections).get(id).cloned()
    }

    /// The tables of attached targets, then those of projections started here.
    pub(super) fn tables(&self) -> Vec<Arc<dyn Tables>> {
        let mut tables = lock(&self.inner.attached).clone();
        tables.extend(lock(&self.inner.projections).values().map(|entry| Arc::clone(&entry.tables)));
        tables
    }

    /// What is stored of a projection, in the tables it was started with or else in the first attached ones that know it.
    pub(super) async fn stored(&self, id: &ProjectionId) -> Result<Option<StoredProjection>, CommandError> {
        Ok(self.find(id).await?.map(|(_, stored)| stored))
    }

    /// The tables of a projection.
    async fn tables_of(&self, id: &ProjectionId) -> Result<Arc<dyn Tables>, CommandError> {
        if let Some(entry) = self.entry(id) {
            return Ok(entry.tables);
        }
        let found = self.find(id).await?;
        found.map(|(tables, _)| tables).ok_or_else(|| CommandError::Unknown { id: id.clone() })
    }

    /// The source of a projection, as far as this node knows it.
    pub(super) fn source_of(&self, id: &ProjectionId) -> Option<Arc<dyn Source>> {
        let started = self.entry(id).map(|entry| entry.source);
        started.or_else(|| lock(&self.inner.sources).get(id).cloned())
    }

    /// Forgets what a projection that is stopped was when it ran here, now that it was reset.
    pub(super) fn forget(&self, stopped: &Entry) {
        let info = stopped.live.info();
        if let Some(entry) = lock(&self.inner.projections).get_mut(&info.id)
            && Arc::ptr_eq(&entry.live, &stopped.live)
        {
            entry.live = Arc::new(Live::new(info.id, info.target, entry.source.keeps_position()));
            entry.live.set_state(State::Stopped);
        }
    }

    /// The tables that know a projection, and what is stored of it.
    pub(super) async fn find(
        &self,
        id: &ProjectionId,
    ) -> Result<Option<(Arc<dyn Tables>, StoredProjection)>, CommandError> {
        let candidates = match self.entry(id) {
            Some(entry) => vec![entry.tables],
            None => self.tables(),
        };
        for tables in candidates {
            if let Some(stored) = tables.stored(id).await.map_err(|error| tables_error(id, &error))? {
                return Ok(Some((tables, stored)));
            }
        }
        Ok(None)
    }
}

pub(super) fn tables_error(id: &ProjectionId, error: &TargetError) -> CommandError {
    CommandError::Tables { id: id.clone(), message: error.message.clone() }
}

/// A panic while one of these locks is held can only come from an allocation; what is inside stays whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check_identity(id: &ProjectionId) -> Result<(), StartError> {
    let versioned = id
        .name
        .rsplit_once("_v")
        .is_some_and(|(_, digits)| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()));
    let problem = if id.name.is_empty() {
        "the name is empty: give it one in #[projection(name = \"…\")]".to_owned()
    } else if id.name.len() > LONGEST_NAME {
        format!("the name has {} bytes, at most {LONGEST_NAME} are allowed", id.name.len())
    } else if id.name.chars().any(char::is_control) {
        "the name contains a control character".to_owned()
    } else if versioned {
        "the name ends in a version: write it as version = … beside the name".to_owned()
    } else if id.version == 0 || i32::try_from(id.version).is_err() {
        format!("version {} is out of range: 1 to {}", id.version, i32::MAX)
    } else {
        return Ok(());
    };
    Err(StartError::Identity { id: id.clone(), problem })
}

/// An unreachable target is waited for after the start; one that answers has to be fit.
async fn check_target(id: &ProjectionId, target: &impl Tables) -> Result<(), StartError> {
    match target.check().await {
        Err(error) if !matches!(error.class, FailureClass::TransientServer | FailureClass::TransientStatement) => {
            Err(StartError::Target { id: id.clone(), message: error.message })
        }
        _ => Ok(()),
    }
}

async fn check_source(id: &ProjectionId, source: &dyn Source) -> Result<(), StartError> {
    match source.check().await {
        Err(SourceError::Unusable { message }) => Err(StartError::Source { id: id.clone(), message }),
        _ => Ok(()),
    }
}

fn new_owner() -> Owner {
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    Owner { id: uuid::Uuid::new_v4().to_string(), description: format!("{host} process {}", std::process::id()) }
}

/// A timeout beyond what the clock can hold is as good as a year.
pub(super) fn deadline(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or_else(|| now + Duration::from_hours(24 * 365))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_that_a_derive_would_refuse_are_refused_at_start_too() {
        let problem =
            |name: &str, version| check_identity(&ProjectionId::new(name, version)).err().map(|e| e.to_string());
        assert_eq!(problem("orders", 1), None);
        assert_eq!(problem("orders_vip", 1), None);
        for (name, version, expected) in [
            ("", 1, "name is empty"),
            ("orders_v2", 1, "version = …"),
            ("orders\0", 1, "control character"),
            ("orders", 0, "version 0 is out of range"),
            ("orders", u32::MAX, "out of range"),
        ] {
            let problem = problem(name, version).unwrap_or_default();
            assert!(problem.contains(expected), "{name:?} {version}: {problem}");
        }
        assert!(problem(&"x".repeat(201), 1).unwrap_or_default().contains("201 bytes"));
    }
}
