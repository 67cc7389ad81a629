//! The states of a projection and what each command and event makes of them. Pure.

use std::fmt;

/// Where a projection stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The pipeline is not up yet, or comes up again.
    Initializing,
    /// Events flow, or would (a standby is running with the role standby).
    Running,
    /// The source is not pulled; lease and subscription are kept.
    Paused,
    /// Finishing what is in flight.
    Draining,
    /// Stopped by a failure that no retry mends; stays so until it is stopped.
    Halted,
    /// Ended.
    Stopped,
}

impl State {
    /// The name in tables, logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Initializing => "initializing",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Draining => "draining",
            Self::Halted => "halted",
            Self::Stopped => "stopped",
        }
    }

    /// The state of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Initializing, Self::Running, Self::Paused, Self::Draining, Self::Halted, Self::Stopped]
            .into_iter()
            .find(|state| state.as_str() == name)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether this node projects or waits for the one that does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// This node projects, or is about to.
    Active,
    /// Another node holds the projection.
    Standby,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Active => "active",
            Self::Standby => "standby",
        })
    }
}

/// What happens to a projection: a user's command or an event of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// `pause` was called.
    Pause,
    /// `resume` was called.
    Resume,
    /// `stop` was called.
    Stop,
    /// The pipeline is up.
    Up,
    /// The pipeline has ended: lost, or drained.
    Lost,
    /// A failure that no retry mends.
    Halt,
}

/// The answer to a step: the next state, or `None` where the step does not fit (`InvalidState`).
///
/// | state | pause | resume | stop | up | lost | halt |
/// |---|---|---|---|---|---|---|
/// | initializing | - | - | stopped | running, or paused where `paused` | initializing | halted |
/// | running | paused | - | draining | - | initializing | halted |
/// | paused | - | running | draining | - | initializing | halted |
/// | draining | - | - | draining (joins the first) | - | stopped | stopped |
/// | halted | - | - | stopped | - | halted | halted |
/// | stopped | - | - | - | - | - | - |
///
/// `paused` is the user's wish, which outlives a restart of the pipeline. Stopping a paused projection
/// passes through draining like any other: what was handled is committed and acked first. One that is stopped while it is
/// initializing or halted is draining for as long as it takes to end what it is in the middle of and to give the lease up.
pub(crate) fn next(state: State, step: Step, paused: bool) -> Option<State> {
    use State::{Draining, Halted, Initializing, Paused, Running, Stopped};
    match (state, step) {
        (Initializing, Step::Up) => Some(if paused { Paused } else { Running }),
        (Initializing | Halted, Step::Stop) | (Draining, Step::Lost | Step::Halt) => Some(Stopped),
        (Initializing | Running | Paused, Step::Lost) => Some(Initializing),
        (Initializing | Running | Paused | Halted, Step::Halt) | (Halted, Step::Lost) => Some(Halted),
        (Running, Step::Pause) => Some(Paused),
        (Paused, Step::Resume) => Some(Running),
        (Running | Paused | Draining, Step::Stop) => Some(Draining),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::State::{Draining, Halted, Initializing, Paused, Running, Stopped};
    use super::*;

    #[test]
    fn every_cell_of_the_table() {
        use Step::{Halt, Lost, Pause, Resume, Stop, Up};
        let steps = [Pause, Resume, Stop, Up, Lost, Halt];
        let table = [
            (Initializing, [None, None, Some(Stopped), Some(Running), Some(Initializing), Some(Halted)]),
            (Running, [Some(Paused), None, Some(Draining), None, Some(Initializing), Some(Halted)]),
            (Paused, [None, Some(Running), Some(Draining), None, Some(Initializing), Some(Halted)]),
            (Draining, [None, None, Some(Draining), None, Some(Stopped), Some(Stopped)]),
            (Halted, [None, None, Some(Stopped), None, Some(Halted), Some(Halted)]),
            (Stopped, [None; 6]),
        ];
        for (state, row) in table {
            for (step, expected) in steps.into_iter().zip(row) {
                assert_eq!(next(state, step, false), expected, "{state} {step:?}");
            }
        }
        assert_eq!(next(Initializing, Up, true), Some(Paused), "a pause survives a restart of the pipeline");
    }

    #[test]
    fn names_lead_back_to_their_states() {
        for state in [Initializing, Running, Paused, Draining, Halted, Stopped] {
            assert_eq!(State::from_name(state.as_str()), Some(state));
        }
        assert_eq!(State::from_name("asleep"), None);
    }
}
