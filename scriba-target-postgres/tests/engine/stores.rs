//! The wrong store, and stores that are not what they were.

use std::time::Duration;

use scriba_core::target::DeadLetterFilter;
use scriba_core::{HandlerError, Lease, Position, Reset, Role, Scriba, Source};
use scriba_source_postgres::PgLog;
use scriba_testing::MemorySource;

use super::common::{Fixture, eventually, halted, options, play, play_from, played, seen, slow, stage, until};

/// A log whose first five events are applied, and nothing runs.
async fn five_applied() -> Fixture {
    let fixture = stage().await;
    fixture.append_many(5, 2).await;
    let scriba = fixture.play(&slow(), options()).await;
    until(&scriba, &played(), 4).await;
    scriba.shutdown().await.unwrap();
    fixture
}

/// Starts on a source; it has to halt with nothing handled. Says why.
async fn refusal(fixture: &Fixture, source: impl Source) -> (String, Option<Position>) {
    let play = slow();
    let scriba = play_from(fixture, source, &play, options()).await;
    let reason = halted(&scriba, &played()).await;
    scriba.shutdown().await.unwrap();
    assert!(play.handled().is_empty(), "{:?}", play.handled());
    assert_eq!((fixture.watermark().await, fixture.seen().await), (Some(4), vec![0, 1, 2, 3, 4]));
    (reason.message, reason.position)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_restored_to_an_older_point_halts_at_the_next_start_before_and_after_it_is_written_to() {
    let fixture = five_applied().await;
    fixture.run("DELETE FROM events WHERE position >= 3; ALTER TABLE events ALTER position RESTART WITH 3").await;
    let (message, _) = refusal(&fixture, fixture.source.clone()).await;
    assert!(message.contains("restored") && message.contains('4'), "{message}");
    // Other events stand where those that were seen stood.
    fixture.append_many(5, 2).await;
    let (message, position) = refusal(&fixture, fixture.source.clone()).await;
    assert!(message.contains("restored"), "{message}");
    assert_eq!(position, Some(Position::new(4)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_whose_old_events_were_removed_goes_on() {
    let fixture = five_applied().await;
    fixture.run("DELETE FROM events").await;
    fixture.append_many(2, 1).await;
    let scriba = fixture.play(&slow(), options()).await;
    until(&scriba, &played(), 6).await;
    assert_eq!(fixture.seen().await, (0..7).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn another_table_another_database_and_another_kind_of_source_halt_with_both_fingerprints() {
    let fixture = five_applied().await;
    let own = fixture.source.identity().await.unwrap();
    fixture.run("CREATE TABLE copy (LIKE events INCLUDING ALL); INSERT INTO copy OVERRIDING SYSTEM VALUE SELECT * FROM events").await;
    let copy = PgLog::new(fixture.pool.clone(), "copy");
    let elsewhere = stage().await;
    let memory = MemorySource::new();
    for _ in 0..9 {
        memory.append("a", "Happened", "");
    }
    let others = [
        (copy.identity().await.unwrap(), refusal(&fixture, copy).await),
        (elsewhere.source.identity().await.unwrap(), refusal(&fixture, elsewhere.source.clone()).await),
        (memory.identity().await.unwrap(), refusal(&fixture, memory).await),
    ];
    for (other, (message, _)) in others {
        assert_ne!(own, other);
        for identity in [&own, &other] {
            let fingerprint = format!("{} {:?}", identity.kind, identity.fingerprint);
            assert!(message.contains(&fingerprint), "{fingerprint} is not in: {message}");
        }
    }
    let scriba = fixture.play(&slow(), options()).await;
    fixture.append_many(1, 1).await;
    until(&scriba, &played(), 5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_by_position_in_whatever_order_they_were_written() {
    let fixture = stage().await;
    fixture.append_many(30, 30).await;
    let fail_on = |failing: fn(u64) -> bool| {
        play(move |meta| async move {
            if failing(meta.position.get()) {
                return Err(HandlerError::permanent(HandlerError::new("bad", "as told")));
            }
            Ok(seen(&meta))
        })
    };
    let scriba = Scriba::new();
    fixture.play_again(&scriba, &fail_on(|position| position > 9 && position % 3 == 0), options()).await;
    until(&scriba, &played(), 29).await;
    scriba.stop(played()).await.unwrap();
    // Kept over a reset, they are older than those of the events before them.
    scriba.reset(played(), Reset::new().statement("TRUNCATE seen")).await.unwrap();
    fixture.play_again(&scriba, &fail_on(|position| position % 3 == 0), options()).await;
    until(&scriba, &played(), 29).await;
    let list = async |filter: DeadLetterFilter| -> Vec<u64> {
        let letters = scriba.dead_letters(played(), &filter).await.unwrap();
        letters.iter().map(|letter| letter.position.get()).collect()
    };
    let expected: Vec<u64> = (0..10).map(|n| n * 3).collect();
    assert_eq!(list(DeadLetterFilter::default()).await, expected);
    let newest_first = DeadLetterFilter { descending: true, ..DeadLetterFilter::default() };
    assert_eq!(list(newest_first).await, expected.into_iter().rev().collect::<Vec<_>>());
}

mod rolling {
    //! One version, deployed anew with one event type more.

    use scriba_core::{EventMeta, Events, Handler, HandlerResult, Projection};
    use scriba_target_postgres::PgOp;

    use super::super::common::seen;

    #[derive(Events)]
    pub(super) enum OnlyA {
        A,
    }

    #[derive(Events)]
    pub(super) enum AAndB {
        A,
        B,
    }

    #[derive(Projection)]
    #[projection(name = "rolling")]
    pub(super) struct Old;

    #[derive(Projection)]
    #[projection(name = "rolling")]
    pub(super) struct New;

    impl Handler for Old {
        type Event = OnlyA;
        type Op = PgOp;

        async fn handle(&self, _: OnlyA, meta: &EventMeta) -> HandlerResult<PgOp> {
            Ok(seen(meta))
        }
    }

    impl Handler for New {
        type Event = AAndB;
        type Op = PgOp;

        async fn handle(&self, _: AAndB, meta: &EventMeta) -> HandlerResult<PgOp> {
            Ok(seen(meta))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_node_that_takes_over_halts_for_events_of_its_new_type_that_the_old_one_passed_or_accepts_them_by_option()
{
    for accept in [false, true] {
        let fixture = stage().await;
        let id = "rolling";
        let (old, new) = (Scriba::new(), Scriba::new());
        let options = || options().lease(Lease::For(Duration::from_secs(30)));
        old.start(rolling::Old, fixture.source.clone(), fixture.target.clone(), options()).await.unwrap();
        until(&old, &id.into(), fixture.append("s", "A", b"null").await).await;
        let accepting = options().accept_missed(accept);
        new.start(rolling::New, fixture.source.clone(), fixture.target.clone(), accepting).await.unwrap();
        eventually("it stands by", || new.info(id).unwrap().role == Role::Standby).await;
        for event_type in ["B", "A", "B", "B"] {
            fixture.append("s", event_type, b"null").await;
        }
        until(&old, &id.into(), fixture.append("s", "A", b"null").await).await;
        old.shutdown().await.unwrap();
        if accept {
            let last = fixture.append("s", "B", b"null").await;
            until(&new, &id.into(), last).await;
            assert_eq!(fixture.seen().await, [0, 2, 5, 6]);
        } else {
            let reason = halted(&new, &id.into()).await;
            assert!(reason.message.contains("\"B\"") && reason.message.contains("3 events"), "{reason}");
            assert_eq!(reason.position, Some(Position::new(1)));
            assert_eq!(fixture.seen().await, [0, 2, 5]);
        }
        new.shutdown().await.unwrap();
    }
}
