//! Pages: demand, size, progress, restart.

use scriba_core::source::{Demand, SourceError};
use scriba_core::{Position, Source};

use crate::bed::{APPEND, Bed, DEMAND, PATIENCE, Reader, millis};

#[tokio::test]
async fn a_restart_goes_on_behind_its_position() {
    let bed = Bed::new().await;
    bed.run("insert into events (data) select to_json(n) from generate_series(1, 500) n").await;
    let mut reader = Reader::start(&bed.log(), Some(200), None).await.unwrap();
    reader.until(300).await;
    assert_eq!(reader.positions(), (201..=500).collect::<Vec<_>>());
    assert_eq!(reader.events[0].data, "201");
    let mut reader = Reader::start(&bed.log(), Some(500), None).await.unwrap();
    assert!(reader.page(DEMAND, PATIENCE).await && reader.caught_up && reader.events.is_empty());
    reader.sees_nothing_for(millis(50)).await;
    bed.run(APPEND).await;
    reader.until(1).await;
    assert_eq!(reader.positions(), [501]);
}

#[tokio::test]
async fn an_empty_log_is_caught_up_once_and_then_waited_for() {
    let bed = Bed::new().await;
    for types in [None, Some(["happened"].as_slice())] {
        let mut reader = Reader::start(&bed.log(), None, types).await.unwrap();
        assert!(reader.page(DEMAND, PATIENCE).await && reader.caught_up && reader.events.is_empty());
        assert!(!reader.page(DEMAND, millis(100)).await, "an empty page came a second time");
    }
}

#[tokio::test]
async fn a_page_keeps_to_the_demand_and_says_when_it_was_the_last() {
    let bed = Bed::new().await;
    bed.run("insert into events (data) select to_json(repeat('x', 1000)) from generate_series(1, 100)").await;
    for types in [None, Some(["happened"].as_slice())] {
        let mut reader = Reader::start(&bed.log(), None, types).await.unwrap();
        assert!(reader.page(Demand { events: 7, ..DEMAND }, PATIENCE).await);
        assert_eq!((reader.events.len(), reader.caught_up), (7, false));
        let size = reader.events[0].size();
        assert!(reader.page(Demand { bytes: 5 * size + size / 2, ..DEMAND }, PATIENCE).await);
        assert_eq!((reader.events.len(), reader.caught_up), (12, false));
        assert!(reader.page(Demand { bytes: 1, ..DEMAND }, PATIENCE).await);
        assert_eq!((reader.events.len(), reader.caught_up), (13, false), "one always fits");
        reader.until(100).await;
        while !reader.caught_up {
            assert!(reader.page(DEMAND, PATIENCE).await);
        }
        assert_eq!(reader.positions(), (1..=100).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn a_backlog_of_large_bodies_comes_in_pages_within_the_bytes() {
    let bed = Bed::with("create table events (position bigserial primary key, id bigint not null default 0, stream_id text not null default 's',
        type text not null default 'happened', data bytea not null)").await;
    bed.run("alter table events alter data set storage external; insert into events (data) select convert_to(repeat('x', 1 << 20), 'UTF8') from generate_series(1, 60)").await;
    let mut reader = bed.read().await;
    let demand = Demand { bytes: 8 << 20, ..DEMAND };
    while reader.events.len() < 60 {
        let before = reader.events.len();
        assert!(reader.page(demand, PATIENCE).await);
        let bytes: usize = reader.events[before..].iter().map(scriba_core::RecordedEvent::size).sum();
        assert!(bytes <= demand.bytes, "{bytes}");
    }
    assert!(reader.events.iter().all(|event| event.data.len() == 1 << 20));
}

#[tokio::test]
async fn types_nobody_handles_move_the_progress_and_a_restart_does_not_read_them_again() {
    let bed = Bed::new().await;
    bed.run("insert into events (type) select 'unknown' from generate_series(1, 100000)").await;
    bed.run("insert into events (type) values ('handled')").await;
    let mut reader = bed.read_types(&["handled"]).await;
    assert!(reader.page(DEMAND, PATIENCE).await);
    let middle = reader.progress.expect("progress without events");
    assert!((1..100_000).contains(&middle) && reader.events.is_empty(), "{middle}");
    let mut reader = Reader::start(&bed.log(), Some(middle), Some(&["handled"])).await.unwrap();
    reader.page(DEMAND, PATIENCE).await;
    assert!(reader.progress > Some(middle) || !reader.events.is_empty());
    reader.until(1).await;
    assert_eq!(reader.positions(), [100_001]);
    while !reader.caught_up {
        assert!(reader.page(DEMAND, PATIENCE).await);
    }
    assert_eq!(reader.progress.max(Some(100_001)), Some(100_001));
}

#[tokio::test]
async fn a_leap_of_the_sequence_is_looked_through_in_few_steps() {
    let bed = Bed::new().await;
    bed.run("insert into events default values; select setval('events_position_seq', 4000000000000000000); insert into events default values").await;
    let mut reader = bed.read_types(&["happened"]).await;
    reader.until(2).await;
    let mut reader = bed.read().await;
    reader.until(2).await;
    assert_eq!(reader.passed(), [(2, 4_000_000_000_000_000_000)]);
}

#[tokio::test]
async fn position_0_is_an_event_and_a_negative_one_is_refused() {
    let bed = Bed::new().await;
    bed.run("alter sequence events_position_seq minvalue 0 start 0 restart; insert into events default values; insert into events default values").await;
    let mut reader = bed.read().await;
    reader.until(2).await;
    assert_eq!(reader.positions(), [0, 1]);
    let mut reader = Reader::start(&bed.log(), Some(0), None).await.unwrap();
    reader.until(1).await;
    assert_eq!(reader.positions(), [1]);
    bed.run("insert into events (position) values (-3)").await;
    assert!(bed.refused(bed.log()).await.contains("an event at position -3"));
    bed.run("delete from events; alter sequence events_position_seq minvalue -5 start -5 restart").await;
    assert!(bed.refused(bed.log()).await.contains("starts at -5"));
}

#[tokio::test]
async fn under_constant_load_it_has_caught_up_when_it_is_past_the_head_it_started_with() {
    let bed = Bed::new().await;
    // A gap, so that there is a probe without a filter too.
    bed.run("begin; insert into events default values; rollback").await;
    bed.run("insert into events select from generate_series(1, 50)").await;
    for types in [None, Some(["happened"].as_slice())] {
        let mut reader = Reader::start(&bed.log(), None, types).await.unwrap();
        // The first probe has to come before the open append, which the reader would otherwise wait for.
        while reader.events.is_empty() {
            reader.page(Demand { events: 1, ..DEMAND }, PATIENCE).await;
        }
        let mut open = bed.session().await;
        open.run("begin; insert into events default values").await;
        bed.run(APPEND).await;
        while !reader.caught_up {
            assert!(reader.page(DEMAND, PATIENCE).await, "{:?}", reader.positions().last());
        }
        let open_at = reader.positions().last().unwrap().max(&reader.progress.unwrap_or(0)) + 1;
        assert_eq!(bed.positions().await.last(), Some(&(open_at + 1)), "the visible one behind the open one is held");
        open.run("commit").await;
    }
}

#[tokio::test]
async fn increments_above_one_leave_no_gaps_that_are_reported() {
    let bed = Bed::new().await;
    bed.run("alter sequence events_position_seq increment 10; insert into events default values; insert into events default values").await;
    bed.run("begin; insert into events default values; rollback").await;
    bed.run(APPEND).await;
    let mut reader = bed.read().await;
    reader.until(3).await;
    assert_eq!(reader.positions(), [1, 11, 31]);
    assert_eq!(reader.passed(), [(12, 30)]);
}

#[tokio::test]
async fn the_inspector_tells_the_head_and_the_id_at_a_position() {
    let bed = Bed::new().await;
    let mut inspector = bed.log().inspector().await.unwrap();
    assert_eq!(inspector.head().await.unwrap(), None);
    bed.run("insert into events (id) values ('6b1f9c2e-0d55-4c55-9d5c-1f2f6a1f0e11')").await;
    assert_eq!(inspector.head().await.unwrap(), Some(Position::new(1)));
    let id = inspector.event_id_at(Position::new(1)).await.unwrap().unwrap();
    assert_eq!(id, "6b1f9c2e-0d55-4c55-9d5c-1f2f6a1f0e11");
    assert_eq!(inspector.event_id_at(Position::new(2)).await.unwrap(), None);
    assert_eq!(inspector.event_id_at(Position::new(u64::MAX)).await.unwrap(), None);
}

#[tokio::test]
async fn a_position_above_the_head_is_refused_unless_events_were_deleted() {
    let bed = Bed::new().await;
    bed.run("insert into events select from generate_series(1, 9)").await;
    let Err(SourceError::Unusable { message }) = Reader::start(&bed.log(), Some(42), None).await.map(drop) else {
        panic!()
    };
    for part in ["position 42", "below it (9)", "last number of sequence events_position_seq is 9", "restored"] {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
    bed.run("delete from events").await;
    let mut reader = Reader::start(&bed.log(), Some(9), None).await.unwrap();
    bed.run(APPEND).await;
    reader.until(1).await;
    assert_eq!(reader.positions(), [10]);
    bed.run("truncate events restart identity").await;
    let Err(SourceError::Unusable { message }) = Reader::start(&bed.log(), Some(9), None).await.map(drop) else {
        panic!()
    };
    assert!(message.contains("empty") && message.contains("no number was drawn"), "{message}");
}
