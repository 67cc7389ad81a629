//! What a projection tells about itself while it runs on this node.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::checkpoint::{Counts, Replay};
use crate::error::HaltReason;
use crate::event::{Position, StreamId};
use crate::lifecycle::{Role, State};
use crate::projection::ProjectionId;
use crate::source::SourceIdentity;

/// A projection as this node sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProjectionInfo {
    /// Its identity.
    pub id: ProjectionId,
    /// Where it stands in its life.
    pub state: State,
    /// Whether this node projects.
    pub role: Role,
    /// Who holds it when this node is on standby.
    pub holder: Option<String>,
    /// Its source, once it was asked.
    pub source: Option<SourceIdentity>,
    /// Its target, for people.
    pub target: String,
    /// The epoch of this node's last take-over.
    pub epoch: Option<i64>,
    /// Everything up to it is accounted for; `None` is the beginning, or not known yet (see `epoch`).
    pub watermark: Option<Position>,
    /// Whether this version has caught up with its source once, and where; `caught up (empty)` where that was empty.
    pub replay: Replay,
    /// How far the streams touched in this run are committed.
    pub streams: StreamPositions,
    /// The source's head when last asked; `None` when it was not or cannot be.
    pub head: Option<Position>,
    /// How many positions the watermark is behind the head; an upper bound for events, as positions may be missing.
    /// `None` when the head is not known, and when it is stopped: nobody asks for the head then.
    pub lag_events: Option<u64>,
    /// How long ago the event at the watermark was recorded; zero when caught up. `None` before the first commit of this
    /// lifetime, where the source keeps no times, and with nothing in flight while the head is not known.
    pub lag_time: Option<Duration>,
    /// The pace while it is behind what its source has; `None` once it is not, and in the first half second.
    pub catch_up: Option<CatchUp>,
    /// What happened to the events delivered in this run.
    pub run: RunCounts,
    /// What was made of all events, over all starts, as the checkpoint counts them.
    pub stored: Counts,
    /// The window.
    pub window: WindowInfo,
    /// Why it halted.
    pub halt_reason: Option<HaltReason>,
    /// Since when it does not get on.
    pub degraded_since: Option<DateTime<Utc>>,
    /// The last error met, whether mended since or not.
    pub last_error: Option<String>,
}

impl ProjectionInfo {
    /// True while this node's tasks run, be it on standby or in a pause.
    pub fn is_live(&self) -> bool {
        !matches!(self.state, State::Halted | State::Stopped)
    }

    /// True while this node projects and gets on.
    pub fn is_ready(&self) -> bool {
        self.state == State::Running && self.role == Role::Active && self.degraded_since.is_none()
    }
}

/// What happened to the events delivered since this projection was started on this node. At every moment
/// delivered = applied + skipped + dead-lettered + deduplicated + thrown away by restarts + in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Delivered by the source.
    pub delivered: u64,
    /// Operations of theirs are committed.
    pub applied: u64,
    /// Skipped or filtered.
    pub skipped: u64,
    /// Committed to the dead-letter table.
    pub dead_lettered: u64,
    /// Delivered before.
    pub deduplicated: u64,
    /// In the window when a pipeline was lost; the source delivers them again.
    pub thrown_away: u64,
}

/// The window: what is handed out and not committed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowInfo {
    /// Events in it.
    pub events: usize,
    /// Their bytes.
    pub bytes: usize,
    /// The first event in it that is not handled, where there is one.
    pub oldest: Option<OldestOpen>,
}

/// The event that holds up the watermark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldestOpen {
    /// Its position.
    pub position: Position,
    /// Its stream.
    pub stream_id: StreamId,
    /// The partition of its stream.
    pub partition: usize,
    /// How long ago it was handed out.
    pub age: Duration,
    /// For how long its handler has been at it, retries included; `None` while it waits for its turn.
    pub running: Option<Duration>,
}

/// The streams touched in this run, each with the position of its last event that is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamPositions {
    /// All of them.
    Known(BTreeMap<StreamId, Position>),
    /// More than 1,000: none are kept for the rest of the run.
    Truncated,
}

/// How fast a projection that is behind gets on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CatchUp {
    /// Events accounted for per second, over the last ten seconds.
    pub events_per_second: f64,
    /// When it reaches the head at this pace; `None` while the head is not known, and while it does not get on.
    pub time_left: Option<Duration>,
}
