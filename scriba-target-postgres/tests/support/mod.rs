//! What the tests of this crate share: a migrated target in a database of its own, and batches in few words.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::time::Duration;

use bytes::Bytes;
use scriba_core::checkpoint::Checkpoint;
use scriba_core::dead_letter::Failure;
use scriba_core::source::SourceIdentity;
use scriba_core::target::{Batch, Entry, Owner, Tables, TakeOver, TakeOverError, TakenOver, Target, Write};
use scriba_core::{Circuit, DeadLetterPolicy, EventMeta, OnPoison, Outcome, Position, ProjectionId, RecordedEvent};
use scriba_target_postgres::{PgOp, PgTarget, sql};
use scriba_testing::postgres::{Database, Postgres};
use sqlx::PgPool;

pub(crate) struct Fixture {
    pub(crate) database: Database,
    pub(crate) pool: PgPool,
    pub(crate) target: PgTarget,
}

/// A database with the control tables, and a table `seen` whose rows show each time an event was applied.
pub(crate) async fn fixture() -> Fixture {
    fixture_in(Postgres::shared().await.unwrap()).await
}

/// The same on a server of one's own.
pub(crate) async fn fixture_in(server: &Postgres) -> Fixture {
    let bare = bare_in(server).await;
    bare.target.migrate().await.unwrap();
    sqlx::raw_sql("CREATE TABLE seen (position bigint)").execute(&bare.pool).await.unwrap();
    bare
}

/// An empty database.
pub(crate) async fn bare() -> Fixture {
    bare_in(Postgres::shared().await.unwrap()).await
}

async fn bare_in(server: &Postgres) -> Fixture {
    let database = server.create_database().await.unwrap();
    let pool = database.pool(4).await.unwrap();
    Fixture { target: PgTarget::new(pool.clone()), database, pool }
}

impl Fixture {
    /// Positions that the read model has seen, in order, with repetitions.
    pub(crate) async fn seen(&self) -> Vec<i64> {
        sqlx::query_scalar("SELECT position FROM seen ORDER BY position").fetch_all(&self.pool).await.unwrap()
    }

    pub(crate) async fn stored(&self) -> Checkpoint {
        self.target.stored(&id()).await.unwrap().unwrap().checkpoint
    }
}

pub(crate) fn id() -> ProjectionId {
    ProjectionId::new("orders", 3)
}

pub(crate) fn source() -> SourceIdentity {
    SourceIdentity { kind: "memory".to_owned(), fingerprint: "it's \\ \"here\"".to_owned() }
}

pub(crate) fn owner(name: &str) -> Owner {
    Owner { id: name.to_owned(), description: format!("node {name}") }
}

/// A take-over as owner, with a lease of `lease`; without a lease where there is no owner.
pub(crate) async fn take_over_as(
    target: &PgTarget,
    owner: Option<&Owner>,
    lease: Duration,
) -> Result<TakenOver<PgOp>, TakeOverError> {
    let (id, source) = (id(), source());
    let request = TakeOver {
        id: &id,
        owner,
        lease,
        handler_timeout: Duration::from_secs(30),
        initial: None,
        source: &source,
        event_types: None,
    };
    if let Some(owner) = owner {
        // Whoever has it: a take-over needs the lease, and tells.
        target.control().await.unwrap().lease(&id, owner, lease).await.unwrap();
    }
    target.take_over(request).await
}

pub(crate) async fn take_over(target: &PgTarget) -> TakenOver<PgOp> {
    take_over_as(target, None, Duration::from_secs(30)).await.unwrap()
}

pub(crate) fn event(position: u64) -> RecordedEvent {
    RecordedEvent {
        id: format!("event {position}").into(),
        stream_id: "stream".into(),
        event_type: "Happened".into(),
        position: Position::new(position),
        revision: None,
        data: Bytes::from_static(b"{\"a\": 1}"),
        metadata: Bytes::new(),
        occurred_at: None,
    }
}

/// An event that leaves its position in `seen`.
pub(crate) fn seen(position: u64) -> Entry<PgOp> {
    run(position, format!("INSERT INTO seen VALUES ({position})"))
}

/// An event that runs a statement.
pub(crate) fn run(position: u64, text: impl Into<String>) -> Entry<PgOp> {
    let outcome = Outcome::from(sql(text.into()));
    Entry { meta: EventMeta::new(event(position), false), write: Write::Apply(outcome) }
}

/// An event that is skipped.
pub(crate) fn skip(position: u64) -> Entry<PgOp> {
    Entry { meta: EventMeta::new(event(position), false), write: Write::Skip }
}

/// An event that is dead-lettered.
pub(crate) fn dead(event: RecordedEvent, failure: Failure) -> Entry<PgOp> {
    Entry { meta: EventMeta::new(event, false), write: Write::DeadLetter(failure) }
}

pub(crate) fn failure(kind: &str) -> Failure {
    Failure { kind: kind.to_owned(), message: "it broke".to_owned(), detail: "at 1:2".to_owned(), attempts: 3 }
}

/// However many dead letters there are in a row.
pub(crate) const NO_CIRCUIT: DeadLetterPolicy = DeadLetterPolicy {
    on_poison: OnPoison::DeadLetter,
    on_poison_while_replaying: OnPoison::DeadLetter,
    circuit: Circuit::OFF,
};

/// A batch on top of a checkpoint.
pub(crate) fn batch(checkpoint: &Checkpoint, entries: Vec<Entry<PgOp>>) -> Batch<PgOp> {
    let last = entries.last().expect("entries").meta.position;
    Batch::new(id(), checkpoint, last, entries, NO_CIRCUIT)
}

/// A batch of nothing but progress.
pub(crate) fn progress(checkpoint: &Checkpoint, watermark: u64) -> Batch<PgOp> {
    Batch::new(id(), checkpoint, Position::new(watermark), Vec::new(), DeadLetterPolicy::default())
}

/// Notes in a checkpoint that a batch was committed as it was.
pub(crate) fn moved(checkpoint: &mut Checkpoint, batch: &Batch<PgOp>) {
    let mut account = batch.account();
    for Entry { meta, write } in &batch.entries {
        match write {
            Write::Skip => account.skipped(),
            Write::Apply(_) => account.applied(true),
            Write::DeadLetter(failure) => account.dead_lettered(meta, failure).expect("no circuit"),
        }
    }
    checkpoint.committed(&batch.advance, account.counts(), account.in_row().clone());
}
