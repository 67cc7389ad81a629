//! The control thread: a runtime of its own for leases, lags and commands, which traffic and blocking handlers
//! cannot starve.

use std::future::Future;
use std::sync::OnceLock;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// Starts with its first task and ends when it is dropped, with all tasks on it.
pub(super) struct ControlThread {
    running: OnceLock<Running>,
}

struct Running {
    handle: Handle,
    /// Dropped to end the thread.
    _until: oneshot::Sender<()>,
}

impl ControlThread {
    pub(super) fn new() -> Self {
        Self { running: OnceLock::new() }
    }

    /// # Panics
    /// When the operating system gives out no more threads or file descriptors.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.running.get_or_init(start).handle.spawn(task);
    }
}

#[expect(
    clippy::expect_used,
    reason = "without a thread nothing can be run, and there is no one to return the error to"
)]
fn start() -> Running {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime for the control thread");
    let handle = runtime.handle().clone();
    let (until, ended) = oneshot::channel::<()>();
    let run = move || {
        // The sender is never used: its drop is the message.
        let _ = runtime.block_on(ended);
    };
    thread::Builder::new().name("scriba-control".to_owned()).spawn(run).expect("the control thread");
    Running { handle, _until: until }
}
