//! When to look again: polling with growing intervals, cut short by NOTIFY.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// A gap that is filled or dead soon is common under load; looking more often than this costs the log's server more than it gains.
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
const RECONNECT_FIRST: Duration = Duration::from_millis(100);
const RECONNECT_MAX: Duration = Duration::from_secs(30);
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// New events.
    Idle,
    /// An append that may own a missing position.
    Stuck,
}

/// The first interval of each wait and the longest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Intervals {
    pub(crate) idle: (Duration, Duration),
    pub(crate) stuck: (Duration, Duration),
}

impl Default for Intervals {
    fn default() -> Self {
        let millis = Duration::from_millis;
        Self { idle: (millis(10), millis(250)), stuck: (millis(5), millis(100)) }
    }
}

/// Waits between two looks at the log.
#[derive(Debug)]
pub(crate) struct Wake {
    intervals: Intervals,
    /// What was waited for last, and the interval it came to.
    last: Option<(Wait, Duration)>,
    listener: Option<Listener>,
}

impl Wake {
    pub(crate) fn new(intervals: Intervals, listener: Option<Listener>) -> Self {
        Self { intervals, last: None, listener }
    }

    /// There was something: the next wait begins with the first interval.
    pub(crate) fn reset(&mut self) {
        self.last = None;
    }

    /// Waits. Cancel-safe.
    pub(crate) async fn wait(&mut self, wait: Wait) {
        let interval = self.next_interval(wait);
        let Some(listener) = &self.listener else { return sleep(interval).await };
        if wait == Wait::Stuck {
            sleep(BETWEEN_LOOKS).await;
        }
        // Its end says that nobody notified in time.
        let _ = timeout(interval, listener.told.notified()).await;
    }

    fn next_interval(&mut self, wait: Wait) -> Duration {
        let (first, max) = match wait {
            Wait::Idle => self.intervals.idle,
            Wait::Stuck => self.intervals.stuck,
        };
        let interval = match self.last {
            Some((last, interval)) if last == wait => interval.saturating_mul(2),
            _ => first,
        }
        .min(max)
        .max(Duration::from_millis(1));
        self.last = Some((wait, interval));
        interval
    }
}

/// A task with a connection that listens. Ends with its owner.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Holds one permit at most, so a burst of notifications is one look.
    told: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Listener {
    pub(crate) fn start(options: PgConnectOptions, channel: String) -> Self {
        let told = Arc::new(Notify::new());
        let task = tokio::spawn(listen(options, channel, Arc::clone(&told)));
        Self { told, task }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Listens for ever. What goes wrong is waited out: polling goes on meanwhile.
async fn listen(options: PgConnectOptions, channel: String, told: Arc<Notify>) {
    let mut pause = RECONNECT_FIRST;
    loop {
        let error = match connect(&options, &channel).await {
            Ok(mut listener) => {
                pause = RECONNECT_FIRST;
                loop {
                    // Whatever came while there was no connection is lost, so a new connection is a reason to look.
                    told.notify_one();
                    if let Err(error) = listener.try_recv().await {
                        break error;
                    }
                }
            }
            Err(error) => error,
        };
        tracing::warn!(target: "scriba", channel, %error, retry_in = ?pause, "not listening; new events are seen by polling");
        sleep(pause).await;
        pause = (pause * 2).min(RECONNECT_MAX);
    }
}

async fn connect(options: &PgConnectOptions, channel: &str) -> Result<PgListener, sqlx::Error> {
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(CONNECT_WITHIN)
        .max_lifetime(None)
        .idle_timeout(None)
        .connect_lazy_with(options.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.listen(channel).await?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_double_to_their_maximum_and_start_anew_after_events_and_for_another_reason() {
        let mut wake = Wake::new(Intervals::default(), None);
        let mut millis = |wait| wake.next_interval(wait).as_millis();
        assert_eq!([(); 7].map(|()| millis(Wait::Idle)), [10, 20, 40, 80, 160, 250, 250]);
        assert_eq!([(); 6].map(|()| millis(Wait::Stuck)), [5, 10, 20, 40, 80, 100]);
        assert_eq!(millis(Wait::Idle), 10);
        wake.reset();
        assert_eq!(wake.next_interval(Wait::Idle).as_millis(), 10);
        let zero = Intervals { idle: (Duration::ZERO, Duration::ZERO), ..Intervals::default() };
        assert_eq!(Wake::new(zero, None).next_interval(Wait::Idle).as_millis(), 1, "never a busy loop");
    }
}
