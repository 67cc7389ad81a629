use super::*;
use crate::eventstore::record::LINK;

fn events(types: &[&str]) -> Vec<NewEvent> {
    types.iter().map(|event_type| NewEvent::json(*event_type, "{}")).collect()
}

fn append(store: &mut Store, stream: &str, types: &[&str]) -> Written {
    store.append(stream, Expected::Any, events(types)).unwrap()
}

fn types(store: &Store, stream: &str) -> Vec<String> {
    store.forwards(stream, 0).map(|record| record.event_type.clone()).collect()
}

fn revisions(store: &Store, stream: &str) -> Vec<u64> {
    store.forwards(stream, 0).map(|record| record.revision).collect()
}

fn targets(store: &Store, stream: &str) -> Vec<String> {
    store.forwards(stream, 0).map(|record| String::from_utf8(record.data.to_vec()).unwrap()).collect()
}

fn wrong(current: Option<u64>) -> AppendError {
    AppendError::WrongExpectedVersion { current }
}

#[test]
fn positions_grow_with_every_record_and_leave_gaps() {
    let mut store = Store::default();
    append(&mut store, "a", &["A", "B", "C"]);
    let positions: Vec<_> = store.all_forwards(LogPosition::default()).map(|record| record.position).collect();
    assert!(positions.is_sorted_by(|left, right| left.commit + 1 < right.commit), "{positions:?}");
    assert!(positions.iter().all(|position| position.commit == position.prepare));
    assert!(store.end() > *positions.last().unwrap());
}

#[test]
fn an_append_answers_with_revision_and_position_of_its_last_event() {
    let mut store = Store::default();
    let written = append(&mut store, "a", &["A", "B"]);
    let last = store.forwards("a", 1).next().unwrap();
    assert_eq!(written, Written { revision: Some(1), position: Some(last.position) });
}

#[test]
fn an_expectation_is_held_against_the_stream() {
    let mut store = Store::default();
    let mut expect =
        |expected, types: &[&str]| store.append("a", expected, events(types)).map(|written| written.revision);
    assert_eq!(expect(Expected::StreamExists, &["A"]), Err(wrong(None)));
    assert_eq!(expect(Expected::Revision(0), &["A"]), Err(wrong(None)));
    assert_eq!(expect(Expected::NoStream, &["A"]), Ok(Some(0)));
    assert_eq!(expect(Expected::NoStream, &["B"]), Err(wrong(Some(0))));
    assert_eq!(expect(Expected::Revision(0), &["B", "C"]), Ok(Some(2)));
    assert_eq!(expect(Expected::Revision(0), &["D"]), Err(wrong(Some(2))));
    assert_eq!(expect(Expected::StreamExists, &["D"]), Ok(Some(3)));
    assert_eq!(expect(Expected::Revision(9), &["E"]), Err(wrong(Some(3))));
}

#[test]
fn an_append_sent_twice_counts_once_and_answers_as_before() {
    let mut store = Store::default();
    append(&mut store, "a", &["A"]);
    let pair = events(&["B", "C"]);
    let first = store.append("a", Expected::Revision(0), pair.clone()).unwrap();
    append(&mut store, "a", &["D"]);
    assert_eq!(store.append("a", Expected::Revision(0), pair.clone()), Ok(first));
    assert_eq!(store.append("a", Expected::Any, pair.clone()), Ok(first));
    assert_eq!(types(&store, "a"), ["A", "B", "C", "D"]);
    let mut other = pair;
    other[1] = NewEvent::json("X", "{}");
    assert_eq!(store.append("a", Expected::Revision(0), other), Err(wrong(Some(3))));
}

#[test]
fn category_and_type_get_links_as_the_append_returns() {
    let mut store = Store::default();
    append(&mut store, "order-1", &["Placed", "Paid"]);
    append(&mut store, "order-2-b", &["Placed"]);
    append(&mut store, "plain", &["Placed"]);
    assert_eq!(targets(&store, "$ce-order"), ["0@order-1", "1@order-1", "0@order-2-b"]);
    assert_eq!(targets(&store, "$et-Placed"), ["0@order-1", "0@order-2-b", "0@plain"]);
    assert!(store.forwards("$ce-order", 0).all(|record| record.event_type == LINK));
}

#[test]
fn a_link_is_resolved_until_its_event_is_gone() {
    let mut store = Store::default();
    append(&mut store, "order-1", &["Placed", "Paid"]);
    let links: Vec<_> = store.forwards("$ce-order", 0).cloned().collect();
    let found = store.find(&links[1], true);
    assert_eq!(found.event.unwrap().event_type, "Paid");
    assert_eq!(found.original.id, links[1].id);
    assert!(store.find(&links[1], false).link.is_none());

    store.truncate("order-1", 1);
    assert!(store.find(&links[0], true).event.is_none());
    assert!(store.find(&links[1], true).event.is_some());
    assert!(store.remove("order-1", 1));
    assert!(store.find(&links[1], true).event.is_none());
}

#[test]
fn a_stream_deleted_softly_is_missing_and_goes_on_with_its_revisions() {
    let mut store = Store::default();
    append(&mut store, "order-1", &["A", "B"]);
    store.delete("order-1", Expected::Revision(1)).unwrap();
    assert_eq!(store.state("order-1"), StreamState::Missing);
    assert_eq!(types(&store, "order-1"), [""; 0]);
    // The category hears of it.
    assert_eq!(targets(&store, "$ce-order"), ["0@order-1", "1@order-1", "0@$$order-1"]);

    store.append("order-1", Expected::NoStream, events(&["C"])).unwrap();
    assert_eq!(store.state("order-1"), StreamState::Live);
    assert_eq!(revisions(&store, "order-1"), [2]);
}

#[test]
fn a_tombstone_is_for_ever() {
    let mut store = Store::default();
    append(&mut store, "order-1", &["A"]);
    store.tombstone("order-1", Expected::Any).unwrap();
    assert_eq!(store.state("order-1"), StreamState::Deleted);
    assert_eq!(store.append("order-1", Expected::Any, events(&["B"])), Err(AppendError::Deleted));
    assert_eq!(store.delete("order-1", Expected::Any), Err(AppendError::Deleted));
    let last = store.forwards("order-1", 1).next().unwrap();
    assert_eq!((last.event_type.as_str(), last.revision), ("$streamDeleted", DELETED));
}

#[test]
fn truncation_hides_and_scavenging_removes() {
    let mut store = Store::default();
    append(&mut store, "a", &["A", "B", "C", "D"]);
    store.truncate("a", 2);
    assert_eq!(revisions(&store, "a"), [2, 3]);
    assert_eq!(store.backwards("a", u64::MAX).count(), 2);
    let in_log =
        |store: &Store| store.all_forwards(LogPosition::default()).filter(|record| &*record.stream == "a").count();
    assert_eq!(in_log(&store), 4);
    assert_eq!(store.scavenge(), 2);
    assert_eq!(in_log(&store), 2);
    assert_eq!(store.current("a"), Some(3));
}

#[test]
fn a_maximal_count_hides_what_is_older() {
    let mut store = Store::default();
    store.write_metadata("a", &serde_json::json!({ "$maxCount": 2 }));
    append(&mut store, "a", &["A", "B", "C"]);
    assert_eq!(revisions(&store, "a"), [1, 2]);
}

#[test]
fn events_of_a_transaction_share_a_commit_position_above_their_own() {
    let mut store = Store::default();
    append(&mut store, "a", &["A"]);
    store.append_transaction("a", events(&["B", "C"])).unwrap();
    append(&mut store, "a", &["D"]);
    let found: Vec<_> = store.forwards("a", 1).take(2).map(|record| record.position).collect();
    assert_eq!(found[0].commit, found[1].commit);
    assert!(found[0].prepare < found[1].prepare && found[1].prepare < found[1].commit);
    let order: Vec<_> = store.all_forwards(LogPosition::default()).filter(|record| &*record.stream == "a").collect();
    assert_eq!(order.iter().map(|record| record.revision).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn reading_the_log_backwards_leaves_out_the_position_it_starts_from() {
    let mut store = Store::default();
    append(&mut store, "a", &["A", "B"]);
    let b = store.forwards("a", 1).next().unwrap().position;
    assert_eq!(store.all_backwards(b).filter(|record| &*record.stream == "a").count(), 1);
}

#[test]
fn the_log_hides_checkpoints_of_subscriptions_to_it_and_shows_those_of_streams() {
    let mut store = Store::default();
    append(&mut store, "$persistentsubscription-$all::g-checkpoint", &["X"]);
    append(&mut store, "$persistentsubscription-orders::g-checkpoint", &["Y"]);
    let seen: Vec<_> = store.all_forwards(LogPosition::default()).map(|record| record.event_type.clone()).collect();
    assert_eq!(seen, ["Y"]);
}
