//! Event types that are added to a version after it has passed events of them.

use scriba_core::{
    EventMeta, Events, Handler, HandlerResult, Outcome, Projection, ProjectionId, ProjectionOptions, RawEvent, Scriba,
    State,
};
use scriba_target_postgres::PgOp;

use super::common::{Fixture, eventually, fixture, options, until};

#[derive(Events)]
enum OnlyA {
    A,
}

#[derive(Events)]
enum AAndB {
    A,
    B,
}

/// Three deployments of one version, which list more and more types.
#[derive(Projection)]
#[projection(name = "types")]
struct Old;

#[derive(Projection)]
#[projection(name = "types")]
struct New;

#[derive(Projection)]
#[projection(name = "types")]
struct All;

impl Handler for Old {
    type Event = OnlyA;
    type Op = PgOp;

    async fn handle(&self, _: OnlyA, _: &EventMeta) -> HandlerResult<PgOp> {
        Ok(Outcome::skip())
    }
}

impl Handler for New {
    type Event = AAndB;
    type Op = PgOp;

    async fn handle(&self, _: AAndB, _: &EventMeta) -> HandlerResult<PgOp> {
        Ok(Outcome::skip())
    }
}

impl Handler for All {
    type Event = RawEvent;
    type Op = PgOp;

    async fn handle(&self, _: RawEvent, _: &EventMeta) -> HandlerResult<PgOp> {
        Ok(Outcome::skip())
    }
}

fn id() -> ProjectionId {
    ProjectionId::of::<Old>()
}

/// Starts a deployment, brings it to a position, and stops it.
async fn deploy<P>(fixture: &Fixture, projection: P, options: ProjectionOptions, position: i64)
where
    P: Projection + Handler<Op = PgOp>,
{
    let scriba = Scriba::new();
    scriba.start(projection, fixture.source.clone(), fixture.target.clone(), options).await.unwrap();
    eventually("running", || scriba.info(id()).unwrap().state == State::Running).await;
    until(&scriba, &id(), position).await;
    scriba.shutdown().await.unwrap();
}

/// Starts a deployment that has to halt, and says why.
async fn halts<P>(fixture: &Fixture, projection: P) -> String
where
    P: Projection + Handler<Op = PgOp>,
{
    let scriba = Scriba::new();
    scriba.start(projection, fixture.source.clone(), fixture.target.clone(), options()).await.unwrap();
    eventually("halted", || scriba.info(id()).unwrap().state == State::Halted).await;
    let reason = scriba.info(id()).unwrap().halt_reason.unwrap().to_string();
    scriba.shutdown().await.unwrap();
    reason
}

async fn stored(fixture: &Fixture) -> Option<Vec<String>> {
    sqlx::query_scalar("SELECT event_types FROM scriba_checkpoints").fetch_one(&fixture.pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_type_of_which_events_were_passed_over_halts_naming_type_count_and_first_position_unless_that_is_accepted() {
    let fixture = fixture().await;
    for event_type in ["A", "B", "B", "A"] {
        fixture.append("s", event_type, b"null").await;
    }
    deploy(&fixture, Old, options(), 3).await;
    let reason = halts(&fixture, New).await;
    assert!(reason.contains("event type \"B\"") && reason.contains("2 events"), "{reason}");
    assert!(reason.ends_with("(position 1)"), "{reason}");
    let reason = halts(&fixture, All).await;
    assert!(reason.contains("event type \"B\""), "all types are more than some: {reason}");
    assert_eq!(stored(&fixture).await, Some(vec!["A".to_owned()]), "a halt changes nothing");
    deploy(&fixture, New, options().accept_missed(true), 3).await;
    assert_eq!(stored(&fixture).await, Some(vec!["A".to_owned(), "B".to_owned()]));
    deploy(&fixture, New, options(), 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_type_without_events_is_added_and_taken_away_and_events_passed_meanwhile_are_noticed() {
    let fixture = fixture().await;
    fixture.append("s", "A", b"null").await;
    deploy(&fixture, Old, options(), 0).await;
    deploy(&fixture, New, options(), 0).await;
    // The old deployment takes over once more, while events of the new type are appended.
    fixture.append("s", "B", b"null").await;
    let last = fixture.append("s", "A", b"null").await;
    deploy(&fixture, Old, options(), last).await;
    let reason = halts(&fixture, New).await;
    assert!(reason.contains("event type \"B\"") && reason.ends_with("(position 1)"), "{reason}");
}
