//! Standing by: who has the lease and the place at the source instead, and when to ask again.

use std::time::Duration;

use tokio::time::Instant;

use super::Coordinator;
use crate::engine::trouble::Trouble;
use crate::lifecycle::{Role, State, Step};
use crate::target::TargetError;
use crate::telemetry::{OwnershipLost, Standby};

/// How often a standby asks for the lease, at most: a lease that was given up is noticed after this long.
pub(super) const ASKS_EVERY: Duration = Duration::from_secs(2);

impl Coordinator {
    /// Another node has the lease: whoever projected here before has lost it.
    pub(super) fn note_holder(&mut self, holder: &str, expires_in: Duration) {
        let projected = self.live.record().0.is_some();
        if projected && self.pipeline.is_none() {
            self.lose_ownership(holder);
        } else {
            self.stand_by(holder, expires_in);
        }
    }

    fn stand_by(&mut self, holder: &str, expires_in: Duration) {
        if self.stopping.is_some() || self.pipeline.is_some() || self.live.state() == State::Halted {
            return;
        }
        // The tables answer: what may have been wrong is over, and what else there is happens elsewhere.
        self.backoff.reset();
        if let Some(recovery) = self.live.recover() {
            self.telemetry.recovered(&recovery.event());
        }
        self.live.set_role(Role::Standby, Some(holder.to_owned()));
        if self.live.state() == State::Initializing {
            self.enter(State::Running);
        }
        self.standby_attempts += 1;
        let retry_in = expires_in.min(ASKS_EVERY) + jitter();
        let attempt = self.standby_attempts;
        self.telemetry.standby(&Standby { holder, attempt, retry_in });
        self.retry_at = Some(Instant::now() + retry_in);
    }

    /// Another node has taken over, or is about to.
    pub(super) fn lose_ownership(&mut self, by: &str) {
        if let (Some(epoch), _) = self.live.record() {
            self.telemetry.ownership_lost(&OwnershipLost { epoch, by });
        }
        self.live.ownership_lost();
        if self.stopping.is_some() {
            return self.release();
        }
        self.step(Step::Lost);
        if self.live.state() != State::Halted {
            self.stand_by(by, ASKS_EVERY);
        }
    }

    /// The source could not be asked for its place. Whoever has the lease has its own view of that.
    pub(super) fn note_unanswered(&mut self, holder: &str, trouble: &Trouble) {
        tracing::warn!(target: "scriba", projection = %self.id, error = %trouble.message, "a standby could not ask the source for its place");
        self.note_holder(holder, ASKS_EVERY);
    }

    /// The lease was taken from its holder, or not: then the pipeline that waits for it hears nothing and ends.
    pub(super) fn note_seized(&mut self, answer: Result<(), TargetError>) {
        let Some(seized) = self.seizing.take() else { return };
        match answer {
            Ok(()) => {
                self.stands_for = None;
                self.end_standby();
                // A pipeline that is gone has its exit on the way.
                let _ = seized.send(());
            }
            Err(error) => {
                tracing::warn!(target: "scriba", projection = %self.id, error = %error.message, "the lease could not be taken with the place at the source");
            }
        }
    }

    /// It is this node's turn.
    pub(super) fn end_standby(&mut self) {
        if self.live.role() == Role::Standby {
            self.live.set_role(Role::Active, None);
            self.standby_attempts = 0;
            self.step(Step::Lost);
        }
    }
}

/// So that nodes do not ask all at once.
fn jitter() -> Duration {
    Duration::from_millis(fastrand::u64(0..250))
}
