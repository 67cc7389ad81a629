//! Handlers alone, and a projection committed without a pipeline.

use std::fmt;

use scriba_core::checkpoint::Counts;
use scriba_core::{EventMeta, Events, Handler, HandlerError, HandlerResult, Outcome, Position, Projection, Target};
use scriba_testing::{
    Given, MemorySource, MemoryTarget, ProjectError, Projected, TargetFault, TargetStep, handle, project,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Serialize, Deserialize)]
struct Deposited {
    amount: i64,
}

#[derive(Deserialize)]
struct Closed {}

#[derive(Events)]
enum AccountEvent {
    Deposited(Deposited),
    Closed(Closed),
}

#[derive(Debug)]
struct Overdrawn;

impl fmt::Display for Overdrawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the account is overdrawn")
    }
}

impl std::error::Error for Overdrawn {}

#[derive(Projection)]
#[projection(name = "balances", version = 2)]
struct Balances;

impl Handler for Balances {
    type Event = AccountEvent;
    type Op = (String, i64);

    async fn handle(&self, event: AccountEvent, meta: &EventMeta) -> HandlerResult<Self::Op> {
        tokio::task::yield_now().await;
        match event {
            AccountEvent::Deposited(Deposited { amount: 0 }) => panic!("nothing was deposited at {}", meta.position),
            AccountEvent::Deposited(Deposited { amount }) if amount < 0 => Err(HandlerError::permanent(Overdrawn)),
            AccountEvent::Deposited(Deposited { amount }) => Ok((meta.stream_id.to_string(), amount).into()),
            AccountEvent::Closed(Closed {}) => Ok(Outcome::skip()),
        }
    }
}

fn deposited(amount: i64) -> Given {
    Given::event("Deposited", &Deposited { amount })
}

fn at(number: u64) -> Position {
    Position::new(number)
}

#[tokio::test]
async fn a_handler_gets_the_decoded_event_and_its_circumstances() {
    let outcome = handle(&Balances, deposited(5)).await.unwrap();
    assert_eq!(outcome.ops(), [("test".to_owned(), 5)]);
    let outcome = handle(&Balances, deposited(5).stream("account-1")).await.unwrap();
    assert_eq!(outcome.ops(), [("account-1".to_owned(), 5)]);
    assert!(handle(&Balances, Given::event("Closed", &json!({}))).await.unwrap().is_skip());
}

#[tokio::test]
async fn every_circumstance_can_be_given() {
    struct Seen;
    impl Handler for Seen {
        type Event = scriba_core::RawEvent;
        type Op = String;
        async fn handle(&self, _: scriba_core::RawEvent, meta: &EventMeta) -> HandlerResult<String> {
            let tenant: String = meta.metadata_as()?;
            let (id, position, revision) = (&meta.id, meta.position, meta.revision);
            Ok(format!("{id} {position} {revision:?} {tenant} {} {}", meta.attempt, meta.replay).into())
        }
    }
    let given = deposited(1).id("e-7").position(at(7)).revision(3).metadata(&"acme").attempt(2).replay(true);
    assert_eq!(handle(&Seen, given).await.unwrap().ops(), ["e-7 7 Some(3) acme 2 true"]);
    let given = deposited(1).position(at(8)).metadata(&"acme");
    assert_eq!(handle(&Seen, given).await.unwrap().ops(), ["event-8 8 None acme 1 false"]);
}

#[tokio::test]
async fn a_failure_has_the_kind_that_its_dead_letter_would_have() {
    let cases = [
        (Given::raw("Deposited", "{\"amount\": \0}"), "decode", "Deposited"),
        (Given::event("Renamed", &json!({})), "decode", "Renamed"),
        (deposited(-1), "handlers::Overdrawn", "the account is overdrawn"),
        (deposited(0).position(at(9)), "panic", "nothing was deposited at 9"),
    ];
    for (given, kind, message) in cases {
        let failure = handle(&Balances, given.attempt(2)).await.unwrap_err();
        assert_eq!((failure.kind.as_str(), failure.attempts), (kind, 2));
        assert!(failure.message.contains(message), "{failure:?}");
    }
}

/// The positions of what was applied, skipped and failed.
fn parts(projected: &Projected<(String, i64)>) -> [Vec<u64>; 3] {
    let position = |meta: &EventMeta| meta.position.get();
    [
        projected.applied.iter().map(|(meta, _)| position(meta)).collect(),
        projected.skipped.iter().map(position).collect(),
        projected.failed.iter().map(|failed| position(&failed.meta)).collect(),
    ]
}

#[tokio::test]
async fn a_projection_is_committed_through_the_target_and_goes_on_where_it_left_off() {
    let target = MemoryTarget::new();
    let events = [
        deposited(5).stream("a"),
        Given::event("Closed", &json!({})),
        deposited(-1),
        Given::event("Unlisted", &json!({})),
        deposited(7).stream("b").position(at(10)),
    ];
    let projected = project(&Balances, &target, events).await.unwrap();
    assert_eq!(parts(&projected), [vec![0, 10], vec![1, 3], vec![2]]);
    assert_eq!(projected.failed[0].failure.message, "the account is overdrawn");

    let projected = project(&Balances, &target, [deposited(1).stream("a")]).await.unwrap();
    assert_eq!(parts(&projected), [vec![11], vec![], vec![]]);
    let id = ("balances", 2);
    let op = |position, account: &str, amount| (at(position), (account.to_owned(), amount));
    assert_eq!(target.applied(id), [op(0, "a", 5), op(10, "b", 7), op(11, "a", 1)]);
    assert_eq!(target.checkpoint(id).unwrap().counts, Counts { applied: 3, skipped: 2, dead_lettered: 0 });
    assert_eq!(target.commits(id), 2);
    assert!(target.dead_letters(id).is_empty(), "failures are handed back, not dead-lettered");
    assert_eq!(target.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn recorded_events_are_projected_as_they_are_through_a_target_known_by_its_trait() {
    let source = MemorySource::new();
    source.append_at(at(3), "a", "Deposited", r#"{"amount": 4}"#);
    source.append_json("b", "Deposited", &Deposited { amount: 6 });
    let memory = MemoryTarget::new();
    let target: &dyn Target<(String, i64)> = &memory;
    let projected = project(&Balances, target, source.events()).await.unwrap();
    assert_eq!(parts(&projected), [vec![3, 4], vec![], vec![]]);
    assert_eq!(projected.applied[1].0.id, "event-4");
}

#[tokio::test]
async fn events_that_do_not_rise_and_failures_of_the_target_commit_nothing() {
    let target = MemoryTarget::new();
    let error =
        project(&Balances, &target, [deposited(1).position(at(4)), deposited(2).position(at(4))]).await.unwrap_err();
    assert!(
        matches!(error, ProjectError::Position { position, before } if (position, before) == (at(4), at(4))),
        "{error}"
    );
    target.fail(TargetStep::Apply, 1, TargetFault::Structural);
    let error = project(&Balances, &target, [deposited(1)]).await.unwrap_err();
    assert!(matches!(error, ProjectError::Commit(_)), "{error}");
    target.fail(TargetStep::TakeOver, 1, TargetFault::Structural);
    let error = project(&Balances, &target, [deposited(1)]).await.unwrap_err();
    assert!(matches!(error, ProjectError::TakeOver(_)), "{error}");
    assert_eq!(target.commits(("balances", 2)), 0);

    let projected = project(&Balances, &target, Vec::<Given>::new()).await.unwrap();
    assert_eq!(parts(&projected), [const { Vec::<u64>::new() }; 3], "no events, no commit");
}
