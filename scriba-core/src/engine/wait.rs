//! Waiting until a projection has accounted for a position, from the tables: on any node.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::live::Standing;
use super::registry::{Entry, Scriba, deadline};
use crate::error::{CommandError, WaitError};
use crate::event::Position;
use crate::lifecycle::{Role, State};
use crate::projection::ProjectionId;
use crate::target::{DeadLetterFilter, StoredLease, StoredProjection};

/// How often the tables are read while waiting.
const LOOKS_EVERY: Duration = Duration::from_millis(50);

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// Every event up to a position is accounted for: applied, skipped or dead-lettered.
    Position(Position),
    /// The event at a position is accounted for and was not dead-lettered.
    Event(Position),
    /// Every event up to the source's head as of now is accounted for. On a node that has not started the projection, its source
    /// has to be known by [`Scriba::attach_source`].
    Head,
}

impl Scriba {
    /// Waits until a projection has accounted for what `what` says. An event that was appended in a transaction of the caller's
    /// must be committed before.
    ///
    /// # Errors
    /// [`WaitError`], with a variant for each way in which it may never come. A projection that runs and does not get on is
    /// waited for until the timeout. [`WaitError::RunByNobody`] and [`WaitError::Stopped`] are how things stand: another node may
    /// be about to take over.
    pub async fn wait_for(
        &self,
        id: impl Into<ProjectionId>,
        what: WaitFor,
        timeout: Duration,
    ) -> Result<(), WaitError> {
        let id = id.into();
        let until = deadline(timeout);
        let entry = self.entry(&id);
        if entry.is_none() && self.tables().is_empty() {
            return Err(CommandError::Unknown { id }.into());
        }
        let position = match what {
            WaitFor::Position(position) | WaitFor::Event(position) => position,
            WaitFor::Head => match self.head(&id, until).await? {
                Some(head) => head,
                None => return Ok(()),
            },
        };
        self.until_accounted_for(&id, entry.as_ref(), position, until, timeout).await?;
        if matches!(what, WaitFor::Event(_)) {
            self.not_dead_lettered(&id, position).await?;
        }
        Ok(())
    }

    async fn until_accounted_for(
        &self,
        id: &ProjectionId,
        entry: Option<&Entry>,
        wanted: Position,
        until: Instant,
        timeout: Duration,
    ) -> Result<(), WaitError> {
        let mut here = entry.map(|entry| entry.live.watermark());
        let mut known = None;
        loop {
            if here.as_mut().is_some_and(|here| *here.borrow_and_update() >= Some(wanted)) {
                return Ok(());
            }
            match timeout_at(until, self.stored(id)).await {
                Ok(stored) => match verdict(id, entry, stored?, wanted)? {
                    Verdict::There => return Ok(()),
                    Verdict::NotYet(watermark) => known = watermark,
                },
                Err(_) => return Err(WaitError::Timeout { id: id.clone(), wanted, watermark: known, timeout }),
            }
            if Instant::now() >= until {
                return Err(WaitError::Timeout { id: id.clone(), wanted, watermark: known, timeout });
            }
            let look_at = until.min(Instant::now() + LOOKS_EVERY);
            match &mut here {
                // A projection that runs here says at once when it moves on.
                Some(here) => {
                    let moved = async {
                        while *here.borrow_and_update() < Some(wanted) {
                            if here.changed().await.is_err() {
                                return sleep_until(look_at).await;
                            }
                        }
                    };
                    let _ = timeout_at(look_at, moved).await;
                }
                None => sleep_until(look_at).await,
            }
        }
    }

    async fn head(&self, id: &ProjectionId, until: Instant) -> Result<Option<Position>, WaitError> {
        let unknown = |message: String| WaitError::HeadUnknown { id: id.clone(), message };
        let source = self.source_of(id).ok_or_else(|| {
            unknown(
                "this node does not know it: start the projection here, or tell its source by `Scriba::attach_source`"
                    .to_owned(),
            )
        })?;
        let asked = async { source.inspector().await?.head().await };
        match timeout_at(until, asked).await {
            Ok(head) => head.map_err(|error| unknown(error.to_string())),
            Err(_) => Err(unknown("it did not answer in time".to_owned())),
        }
    }

    async fn not_dead_lettered(&self, id: &ProjectionId, position: Position) -> Result<(), WaitError> {
        let filter = DeadLetterFilter {
            from_position: Some(position),
            to_position: Some(position),
            ..DeadLetterFilter::default()
        };
        if let Some(letter) = self.dead_letters(id, &filter).await?.into_iter().next() {
            let (kind, message) = (letter.failure.kind, letter.failure.message);
            return Err(WaitError::DeadLettered { id: id.clone(), position, kind, message });
        }
        Ok(())
    }
}

enum Verdict {
    There,
    NotYet(Option<Position>),
}

/// | known of it | answer |
/// |---|---|
/// | watermark at or above the position | there |
/// | no checkpoint, not run here | never started |
/// | halted | halted |
/// | stopped, here or as its owner wrote down, and nobody holds the lease | stopped |
/// | its lease lapsed, not run here | run by nobody |
/// | this node stands by for it, or otherwise | not yet |
fn verdict(
    id: &ProjectionId,
    entry: Option<&Entry>,
    stored: Option<StoredProjection>,
    wanted: Position,
) -> Result<Verdict, WaitError> {
    let here = entry.map(|entry| entry.live.standing());
    let stands_by = here
        .as_ref()
        .is_some_and(|here| here.role == Role::Standby && !matches!(here.state, State::Halted | State::Stopped));
    let stopped_here = here.as_ref().is_some_and(|here| here.state == State::Stopped);
    // What was stopped here may be run elsewhere by now.
    let here = here.filter(|here| here.role == Role::Active && here.state != State::Stopped);
    let id = id.clone();
    let Some(stored) = stored else {
        return match here {
            Some(Standing { state: State::Halted, halt_reason, .. }) => {
                let reason = halt_reason.map_or_else(String::new, |reason| reason.to_string());
                Err(WaitError::Halted { id, wanted, watermark: None, reason })
            }
            Some(_) => Ok(Verdict::NotYet(None)),
            None if stands_by => Ok(Verdict::NotYet(None)),
            None => Err(WaitError::NeverStarted { id }),
        };
    };
    let watermark = stored.checkpoint.watermark;
    if watermark >= Some(wanted) {
        return Ok(Verdict::There);
    }
    if stands_by && stored.state.state != State::Halted {
        return Ok(Verdict::NotYet(watermark));
    }
    let state = here.as_ref().map_or(stored.state.state, |here| here.state);
    let held = matches!(stored.lease, StoredLease::Held { .. });
    match state {
        State::Halted => {
            let reason = here.and_then(|here| here.halt_reason).map(|reason| reason.to_string());
            let reason = reason.or(stored.state.halt_reason).unwrap_or_default();
            Err(WaitError::Halted { id, wanted, watermark, reason })
        }
        // Whoever holds the lease by now is about to write its own state.
        State::Stopped if !held => Err(WaitError::Stopped { id, wanted, watermark }),
        _ if here.is_some() || held => Ok(Verdict::NotYet(watermark)),
        _ if stopped_here => Err(WaitError::Stopped { id, wanted, watermark }),
        _ if matches!(stored.lease, StoredLease::Lapsed { .. }) => {
            Err(WaitError::RunByNobody { id, wanted, watermark })
        }
        _ => Ok(Verdict::NotYet(watermark)),
    }
}
