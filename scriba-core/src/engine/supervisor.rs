//! The root of a projection's tasks: it has the coordinator come back when a panic has lost it or the keeper.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;

use super::coordinator::Coordinator;
use super::panic::message_of;
use super::trouble::Trouble;

/// How long commands wait at least when the coordinator is lost. How often coming back helps, and what is waited for before
/// the next pipeline, is for the coordinator to count.
const PAUSE: Duration = Duration::from_millis(10);

/// Runs a projection to its stop.
pub(crate) async fn supervise(mut coordinator: Coordinator) {
    let mut lost = None;
    loop {
        // Unwind safe: what a panic may have left half done is what coming back throws away.
        let ended = AssertUnwindSafe(coordinator.run(lost)).catch_unwind().await;
        let trouble = match ended {
            Ok(Ok(())) => break,
            Ok(Err(trouble)) => trouble,
            Err(panic) => Trouble::unknown(format!("the coordinator panicked: {}", message_of(panic.as_ref()))),
        };
        coordinator.report_loss(&trouble);
        lost = Some(trouble);
        tokio::time::sleep(PAUSE).await;
    }
    coordinator.end().await;
}
