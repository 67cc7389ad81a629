//! The task that asks the source for its head, over a connection of its own on the control thread.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::info::Live;
use crate::source::{Source, SourceError, SourceInspector};
use crate::telemetry::{Lag, Telemetry};

/// No question to the source may take longer than this.
const PATIENCE: Duration = Duration::from_secs(5);

/// Asks again and again, for as long as the source can tell.
pub(crate) async fn watch(source: Arc<dyn Source>, live: Arc<Live>, telemetry: Telemetry, every: Duration) {
    let mut inspector: Option<Box<dyn SourceInspector>> = None;
    loop {
        match timeout(PATIENCE, head(source.as_ref(), &mut inspector)).await {
            Ok(Ok(head)) => {
                live.set_head(head);
                telemetry.lag(&Lag { head, watermark: live.info().watermark });
            }
            Ok(Err(SourceError::NoHead)) => return,
            // Unknown is empty, never an old answer.
            Ok(Err(_)) | Err(_) => {
                live.set_head(None);
                inspector = None;
            }
        }
        tokio::time::sleep(every).await;
    }
}

async fn head(
    source: &dyn Source,
    inspector: &mut Option<Box<dyn SourceInspector>>,
) -> Result<Option<crate::event::Position>, SourceError> {
    let open = match inspector.take() {
        Some(open) => open,
        None => source.inspector().await?,
    };
    inspector.insert(open).head().await
}
