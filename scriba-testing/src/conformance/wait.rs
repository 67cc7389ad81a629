//! How rules wait.

use std::fmt::Display;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::timeout;

/// No rule waits longer for what has to come.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// How long a rule watches that nothing comes that must not.
pub(super) const WATCH: Duration = Duration::from_millis(200);

/// Waits for what has to come, well or badly.
pub(super) async fn in_time<T>(what: &str, asked: impl Future<Output = T>) -> T {
    timeout(PATIENCE, asked).await.unwrap_or_else(|_| panic!("{what}: no answer within {PATIENCE:?}"))
}

/// Waits for an answer that has to come.
pub(super) async fn answer<T, E: Display>(what: &str, asked: impl Future<Output = Result<T, E>>) -> T {
    in_time(what, asked).await.unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Polls a future so many times at most, and not for long; `None` when it was dropped unanswered.
pub(super) async fn give_up_after<T>(polls: usize, asked: impl Future<Output = T>) -> Option<T> {
    let mut asked = pin!(asked);
    let mut polled = 0;
    let polled_enough = poll_fn(|context| {
        polled += 1;
        match asked.as_mut().poll(context) {
            Poll::Ready(answered) => Poll::Ready(Some(answered)),
            Poll::Pending if polled >= polls => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    });
    timeout(WATCH, polled_enough).await.ok().flatten()
}
