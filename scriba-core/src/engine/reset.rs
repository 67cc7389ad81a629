//! The command that brings a projection back to the beginning.

use super::registry::{Scriba, tables_error};
use crate::error::{CommandError, ResetError, StateOrStandby};
use crate::lifecycle::State;
use crate::projection::ProjectionId;
use crate::target::{Reset, ResetCounts, ResetRefused};

impl Scriba {
    /// Brings a stopped version back to the beginning: clears its checkpoint, its replay position and the position that the
    /// source's server keeps for it, deletes its dead letters where `reset` says so, and returns the counts. On any node that has
    /// the tables ([`Scriba::attach`]), whether it started the projection or not.
    ///
    /// The read model is left alone unless `reset` has statements for it; all of it is one transaction. At its next start the
    /// version is as a new one: `start_from` says where it begins, and events are a replay until it has caught up. Its epoch goes on
    /// from where it was, so whoever ran it before, frozen or cut off, can commit nothing any more.
    ///
    /// ```no_run
    /// # async fn rebuild(scriba: scriba_core::Scriba) -> Result<(), scriba_core::ResetError> {
    /// use scriba_core::Reset;
    ///
    /// let cleared = scriba.reset("orders", Reset::new().dead_letters().statement("TRUNCATE orders")).await?;
    /// println!("{} events and {} dead letters", cleared.cleared.total(), cleared.dead_letters);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ResetError`], and then the checkpoint, the dead letters and the read model are as they were.
    pub async fn reset(&self, id: impl Into<ProjectionId>, reset: Reset) -> Result<ResetCounts, ResetError> {
        let id = id.into();
        let entry = self.entry(&id);
        if let Some(state) = entry.as_ref().map(|entry| entry.live.state()).filter(|state| *state != State::Stopped) {
            let state = StateOrStandby::State(state);
            return Err(CommandError::InvalidState { id, state, command: "reset" }.into());
        }
        let Some((tables, stored)) = self.find(&id).await? else {
            return Err(CommandError::Unknown { id }.into());
        };
        // Looked at before the source is touched, and again by the target, in the transaction of the reset.
        stored.may_be_reset().map_err(|refused| refusal(&id, refused))?;
        let lives_on = |message: String| ResetError::SourceLivesOn { id: id.clone(), message };
        match self.source_of(&id) {
            Some(source) => source.reset(&id).await.map_err(|error| lives_on(error.to_string()))?,
            None if stored.state.source_keeps_position => {
                return Err(lives_on(
                    "this node does not know the source: tell it by `Scriba::attach_source`, or reset on a node that started it"
                        .to_owned(),
                ));
            }
            None => {}
        }
        let counts = tables.reset(&id, &reset).await.map_err(|refused| refusal(&id, refused))?;
        if let Some(entry) = entry {
            self.forget(&entry);
        }
        Ok(counts)
    }
}

fn refusal(id: &ProjectionId, refused: ResetRefused) -> ResetError {
    let id = id.clone();
    match refused {
        ResetRefused::NoCheckpoint => CommandError::Unknown { id }.into(),
        ResetRefused::Held { holder } => ResetError::Held { id, holder },
        ResetRefused::StoodBy { nodes } => ResetError::StoodBy { id, nodes },
        ResetRefused::MayRun { state } => ResetError::MayRun { id, state },
        ResetRefused::Target(error) => tables_error(&id, &error).into(),
    }
}
