//! The task that asks the source for its head, over a connection of its own on the control thread.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::timeout;

use super::info::ProjectionInfo;
use super::live::Live;
use super::panic::message_of;
use crate::event::Position;
use crate::source::{Source, SourceError, SourceInspector};
use crate::telemetry::{Lag, Telemetry};

/// No question to the source may take longer than this.
const PATIENCE: Duration = Duration::from_secs(5);

/// Asks again and again, and tells how things stand whatever the answer is: what the source cannot tell is left empty.
pub(crate) async fn watch(source: Arc<dyn Source>, live: Arc<Live>, telemetry: Telemetry, every: Duration) {
    let mut head = Head { source, inspector: None, knowable: true };
    loop {
        live.set_head(head.ask().await);
        let ProjectionInfo { lag_time, lag_events, head, watermark, state, degraded_since, .. } = live.info();
        telemetry.lag(&Lag { lag_time, lag_events, head, watermark, state, degraded_since });
        tokio::time::sleep(every).await;
    }
}

/// The way to the source's head.
struct Head {
    source: Arc<dyn Source>,
    inspector: Option<Box<dyn SourceInspector>>,
    /// False once the source has said that it cannot know its head.
    knowable: bool,
}

impl Head {
    /// `None` where it is not known now: never an old answer.
    async fn ask(&mut self) -> Option<Position> {
        if !self.knowable {
            return None;
        }
        // Unwind safe: the inspector that panicked is thrown away.
        let answer = timeout(PATIENCE, AssertUnwindSafe(self.try_ask()).catch_unwind()).await;
        match answer {
            Ok(Ok(Ok(head))) => return head,
            Ok(Err(panic)) => {
                let message = message_of(panic.as_ref());
                tracing::error!(target: "scriba", error = %message, "the source panicked when it was asked for its head");
            }
            Ok(Ok(Err(SourceError::NoHead))) => self.knowable = false,
            Ok(Ok(Err(_))) | Err(_) => {}
        }
        // A connection that failed or hangs is not asked again.
        self.inspector = None;
        None
    }

    async fn try_ask(&mut self) -> Result<Option<Position>, SourceError> {
        let open = match self.inspector.take() {
            Some(open) => open,
            None => self.source.inspector().await?,
        };
        self.inspector.insert(open).head().await
    }
}
