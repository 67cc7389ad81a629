//! The pipeline's side of the writer: one job at a time.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use tokio::sync::mpsc;
use tracing::{Instrument as _, info_span};

use crate::engine::commit::{self, Job, Written};
use crate::engine::worker::Worker;
use crate::event::Position;
use crate::target::{Committer, Entry};

pub(super) struct Outlet<Op> {
    jobs: mpsc::Sender<Job<Op>>,
    written: mpsc::Receiver<Written>,
    writer: Writer,
    writing: Writing,
}

/// What the writer is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Free,
    /// It has a job.
    Busy,
    /// It has ended: nothing can be committed any more.
    Gone,
}

/// What is to be known of a batch while the writer has it.
#[derive(Default)]
pub(super) struct Writing {
    pub(super) events: u64,
    /// The position of its event, where it holds a single one.
    pub(super) only: Option<Position>,
    /// Where it leads to.
    watermark: Option<Position>,
    /// When its last event was recorded.
    pub(super) recorded_at: Option<DateTime<Utc>>,
}

impl Writing {
    fn of<Op>(job: &Job<Op>) -> Self {
        let Job::Batch(batch) = job else { return Self::default() };
        Self {
            events: batch.entries.len() as u64,
            only: if let [Entry { meta, .. }] = &batch.entries[..] { Some(meta.position) } else { None },
            watermark: Some(batch.advance.watermark),
            recorded_at: batch.entries.last().and_then(|entry| entry.meta.occurred_at),
        }
    }
}

impl<Op: Send + Sync + 'static> Outlet<Op> {
    /// Spawns the writer.
    pub(super) fn new<H>(committer: Box<dyn Committer<Op>>, worker: &Worker<H>) -> Self {
        let (jobs, jobs_out) = mpsc::channel(1);
        let (written_in, written) = mpsc::channel(1);
        let (telemetry, live) = (worker.telemetry.clone(), Arc::clone(&worker.live));
        let writer = commit::write(committer, jobs_out, written_in, telemetry, live);
        tokio::spawn(writer.instrument(info_span!(target: "scriba", "writer")));
        Self { jobs, written, writer: Writer::Free, writing: Writing::default() }
    }

    pub(super) fn is_free(&self) -> bool {
        self.writer == Writer::Free
    }

    pub(super) fn is_gone(&self) -> bool {
        self.writer == Writer::Gone
    }

    /// The watermark that the batch which is out leads to; `None` where none is.
    pub(super) fn watermark(&self) -> Option<Position> {
        self.writing.watermark
    }

    pub(super) fn write(&mut self, job: Job<Op>) {
        let writing = Writing::of(&job);
        // There is room: one job is out at most. A writer that is gone says so through `written`.
        if self.jobs.try_send(job).is_ok() {
            self.writer = Writer::Busy;
            self.writing = writing;
        }
    }

    /// What became of the job that is out; `None` when the writer is gone. Can be cancelled without loss.
    pub(super) async fn written(&mut self) -> (Option<Written>, Writing) {
        let written = self.written.recv().await;
        self.writer = Writer::Free;
        (written, std::mem::take(&mut self.writing))
    }

    /// Notes that nothing can be committed any more.
    pub(super) fn close(&mut self) {
        self.writer = Writer::Gone;
    }
}
