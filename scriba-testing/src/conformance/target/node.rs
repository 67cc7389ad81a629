//! What the rules are written with: nodes, owners and entries.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use scriba_core::checkpoint::Checkpoint;
use scriba_core::circuit::Circuit;
use scriba_core::dead_letter::{DeadLetter, Failure};
use scriba_core::source::SourceIdentity;
use scriba_core::target::{
    Batch, CommitError, Committed, Committer, Control, DeadLetterFilter, Entry, Owner, StateRecord, StoredProjection,
    TakeOver, TakeOverError, Target, Write,
};
use scriba_core::{DeadLetterPolicy, EventMeta, OnPoison, Outcome, Position, ProjectionId, RecordedEvent, State};

use super::bed::TargetBed;
use crate::conformance::wait::{answer, in_time};

/// A lease that does not lapse while a rule runs.
pub(super) const LONG: Duration = Duration::from_mins(1);

pub(super) const TYPES: [&str; 2] = ["Opened", "Clo'sed"];

/// Dead letters without end.
pub(super) const NO_CIRCUIT: DeadLetterPolicy = DeadLetterPolicy {
    on_poison: OnPoison::DeadLetter,
    on_poison_while_replaying: OnPoison::DeadLetter,
    circuit: Circuit::OFF,
};

/// A projection as a node sees it.
pub(super) struct Node<B: TargetBed> {
    pub(super) target: Arc<dyn Target<B::Op>>,
    pub(super) id: ProjectionId,
}

/// A node that has taken over.
pub(super) struct Holder<B: TargetBed> {
    pub(super) id: ProjectionId,
    /// As it stands in memory, moved by its commits.
    pub(super) checkpoint: Checkpoint,
    pub(super) source: SourceIdentity,
    pub(super) created: bool,
    pub(super) committer: Box<dyn Committer<B::Op>>,
    pub(super) policy: DeadLetterPolicy,
}

/// A bed, and a node.
pub(super) async fn open<B: TargetBed>() -> (B, Node<B>) {
    let bed = B::new().await;
    let node = Node::open(&bed).await;
    (bed, node)
}

impl<B: TargetBed> Node<B> {
    pub(super) async fn open(bed: &B) -> Self {
        Self { target: bed.target().await, id: ProjectionId::new("conformance", 1) }
    }

    /// Another version of the projection.
    pub(super) fn version(&self, version: u32) -> Self {
        Self { target: self.target.clone(), id: ProjectionId::new(self.id.name.clone(), version) }
    }

    /// A take-over with leases switched off, from the beginning, of all types.
    pub(super) async fn take_over(&self) -> Holder<B> {
        self.take_over_from(None, &source(), None).await
    }

    /// A take-over that says what a new checkpoint is to begin with.
    pub(super) async fn take_over_from(
        &self,
        initial: Option<u64>,
        source: &SourceIdentity,
        event_types: Option<&'static [&'static str]>,
    ) -> Holder<B> {
        let request = TakeOver { initial: initial.map(Position::new), event_types, ..self.request(None, source) };
        let taken = self.ask(request).await;
        taken.unwrap_or_else(|error| panic!("take over: {error}"))
    }

    pub(super) async fn take_over_as(&self, owner: &Owner, lease: Duration) -> Result<Holder<B>, TakeOverError> {
        let source = source();
        self.ask(TakeOver { lease, ..self.request(Some(owner), &source) }).await
    }

    pub(super) fn request<'a>(&'a self, owner: Option<&'a Owner>, source: &'a SourceIdentity) -> TakeOver<'a> {
        let (id, lease) = (&self.id, LONG);
        TakeOver { id, owner, lease, handler_timeout: LONG, initial: None, source, event_types: None }
    }

    async fn ask(&self, request: TakeOver<'_>) -> Result<Holder<B>, TakeOverError> {
        let taken = in_time("take over", self.target.take_over(request)).await?;
        Ok(Holder {
            id: self.id.clone(),
            checkpoint: taken.checkpoint,
            source: taken.source,
            created: taken.created,
            committer: taken.committer,
            policy: NO_CIRCUIT,
        })
    }

    /// What is stored; something has to be.
    pub(super) async fn stored(&self) -> StoredProjection {
        let stored = answer("stored", self.target.stored(&self.id)).await;
        stored.unwrap_or_else(|| panic!("nothing is stored of {}", self.id))
    }

    pub(super) async fn letters(&self, filter: DeadLetterFilter) -> Vec<DeadLetter> {
        answer("dead_letters", self.target.dead_letters(&self.id, &filter)).await
    }

    /// The positions of the dead letters that a filter lets through, as they are listed.
    pub(super) async fn listed(&self, filter: DeadLetterFilter) -> Vec<u64> {
        self.letters(filter).await.iter().map(|letter| letter.position.get()).collect()
    }

    /// The positions of all dead letters.
    pub(super) async fn letters_at(&self) -> Vec<u64> {
        self.listed(DeadLetterFilter::default()).await
    }

    /// All dead letters.
    pub(super) async fn all_letters(&self) -> Vec<DeadLetter> {
        self.letters(DeadLetterFilter::default()).await
    }

    pub(super) async fn control(&self) -> Box<dyn Control> {
        answer("control", self.target.control()).await
    }

    /// Writes down that it is stopped, as the owner of an epoch does.
    pub(super) async fn stop(&self, epoch: i64) {
        let (mut control, stopped) = (self.control().await, StateRecord::new(State::Stopped));
        assert!(
            answer("store_state", control.store_state(&self.id, epoch, &stopped)).await,
            "the state was not stored"
        );
    }
}

impl<B: TargetBed> Holder<B> {
    /// The batch that follows, up to its last entry.
    pub(super) fn batch(&self, entries: Vec<Entry<B::Op>>) -> Batch<B::Op> {
        let last = entries.last().map_or_else(|| Position::new(0), |entry| entry.meta.position);
        Batch::new(self.id.clone(), &self.checkpoint, last, entries, self.policy)
    }

    /// Commits a batch, and notes that in the checkpoint.
    pub(super) async fn commit_batch(&mut self, batch: &Batch<B::Op>) -> Result<Committed, CommitError> {
        let committed = in_time("commit", self.committer.commit(batch)).await?;
        self.checkpoint.committed(&batch.advance, committed.counts, committed.in_row.clone());
        Ok(committed)
    }

    pub(super) async fn try_commit(&mut self, entries: Vec<Entry<B::Op>>) -> Result<Committed, CommitError> {
        let batch = self.batch(entries);
        self.commit_batch(&batch).await
    }

    /// A commit that has to succeed.
    pub(super) async fn commit(&mut self, entries: Vec<Entry<B::Op>>) -> Committed {
        self.try_commit(entries).await.unwrap_or_else(|error| panic!("commit: {error}"))
    }

    /// A commit that must not succeed.
    pub(super) async fn refused_commit(&mut self, entries: Vec<Entry<B::Op>>) -> CommitError {
        match self.try_commit(entries).await {
            Err(error) => error,
            Ok(committed) => panic!("committed: {committed:?}"),
        }
    }
}

pub(super) fn source() -> SourceIdentity {
    SourceIdentity { kind: "conformance".to_owned(), fingerprint: "it's \\ \"here\"".to_owned() }
}

pub(super) fn owner(name: &str) -> Owner {
    Owner { id: format!("conformance-{name}"), description: format!("node {name}") }
}

/// An event; neighbours are of different streams.
pub(super) fn event(position: u64) -> RecordedEvent {
    RecordedEvent {
        id: format!("event-{position}").into(),
        stream_id: format!("stream-{}", position % 3).into(),
        event_type: "Happened".into(),
        position: Position::new(position),
        revision: None,
        data: Bytes::from_static(b"{}"),
        metadata: Bytes::new(),
        occurred_at: None,
    }
}

fn entry<Op>(position: u64, write: Write<Op>) -> Entry<Op> {
    Entry { meta: EventMeta::new(event(position), false), write }
}

pub(super) fn applies<Op>(position: u64, op: Op) -> Entry<Op> {
    entry(position, Write::Apply(Outcome::from(op)))
}

pub(super) fn applies_all<Op>(position: u64, ops: impl IntoIterator<Item = Op>) -> Entry<Op> {
    entry(position, Write::Apply(Outcome::all_or_skip(ops)))
}

pub(super) fn skips<Op>(position: u64) -> Entry<Op> {
    entry(position, Write::Skip)
}

pub(super) fn dead<Op>(position: u64) -> Entry<Op> {
    entry(position, Write::DeadLetter(failure("decode")))
}

pub(super) fn dead_as<Op>(event: RecordedEvent, failure: Failure) -> Entry<Op> {
    Entry { meta: EventMeta::new(event, false), write: Write::DeadLetter(failure) }
}

pub(super) fn failure(kind: &str) -> Failure {
    Failure { kind: kind.to_owned(), message: "it broke".to_owned(), detail: "at 1:2".to_owned(), attempts: 3 }
}
