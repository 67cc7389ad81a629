//! What a server remembers of a group, seen by starting it anew.

use serde_json::json;

use super::bed::{Bed, STREAM, fresh};

const CHECKPOINTS: &str = "$persistentsubscription-orders::readers-checkpoint";

/// A consumer that holds all of so many events.
fn bed(events: u64, settings: serde_json::Value) -> Bed {
    let count = usize::try_from(events).unwrap();
    let mut bed = Bed::with_consumer(count, settings, 100);
    assert_eq!(bed.next("one", count), fresh(0..events));
    bed
}

/// The consumer acks these, and the server has heard it.
fn ack(bed: &mut Bed, revisions: impl IntoIterator<Item = u64>) {
    let revisions: Vec<u64> = revisions.into_iter().collect();
    let left = bed.group().outstanding - revisions.len();
    bed.ack("one", revisions);
    bed.until(|stats| stats.outstanding == left);
}

/// What a consumer gets after a restart begins with this revision.
fn goes_on_from(bed: &mut Bed, revision: u64) {
    bed.restart(&["one"]);
    bed.subscribe("one", 100);
    assert_eq!(bed.next("one", 1), fresh(revision..revision + 1));
}

#[test]
fn fewer_than_the_minimum_are_not_remembered() {
    let mut bed = bed(20, json!({ "min_checkpoint_count": 10 }));
    ack(&mut bed, 0..9);
    bed.pass(20);
    assert_eq!(bed.checkpoint(), None);
    goes_on_from(&mut bed, 0);
}

#[test]
fn the_minimum_is_remembered_at_a_tick_and_the_next_when_its_time_has_come() {
    let mut bed = bed(40, json!({ "min_checkpoint_count": 10, "checkpoint_after": 3.0 }));
    ack(&mut bed, 0..10);
    assert_eq!(bed.checkpoint(), None);
    bed.pass(1);
    assert_eq!(bed.checkpoint().as_deref(), Some("9"));
    ack(&mut bed, 10..20);
    bed.pass(2);
    assert_eq!(bed.checkpoint().as_deref(), Some("9"));
    bed.pass(1);
    assert_eq!(bed.checkpoint().as_deref(), Some("19"));
    let written = bed.read(CHECKPOINTS);
    assert_eq!(written.len(), 2);
    assert_eq!(
        (written[1]["type"].as_str(), written[1]["data"].as_str()),
        (Some("$SubscriptionCheckpoint"), Some("\"19\""))
    );
    goes_on_from(&mut bed, 20);
}

#[test]
fn the_maximum_is_remembered_at_once() {
    let mut bed = bed(20, json!({ "max_checkpoint_count": 15 }));
    ack(&mut bed, 0..14);
    assert_eq!(bed.checkpoint(), None);
    ack(&mut bed, [14]);
    assert_eq!(bed.checkpoint().as_deref(), Some("14"));
    goes_on_from(&mut bed, 15);
}

#[test]
fn without_a_time_only_the_maximum_counts() {
    let mut bed = bed(20, json!({ "checkpoint_after": 0.0, "max_checkpoint_count": 15 }));
    ack(&mut bed, 0..12);
    bed.pass(20);
    assert_eq!(bed.checkpoint(), None);
    ack(&mut bed, 12..15);
    assert_eq!(bed.checkpoint().as_deref(), Some("14"));
}

#[test]
fn nothing_passes_the_lowest_event_that_is_not_done() {
    let mut bed = bed(40, json!({}));
    ack(&mut bed, (0..40).filter(|revision| *revision != 12));
    bed.pass(5);
    assert_eq!(bed.checkpoint().as_deref(), Some("11"));
    // Neither one that waits to go out again.
    bed.close("one");
    bed.pass(5);
    assert_eq!((bed.checkpoint().as_deref(), bed.group().to_retry), (Some("11"), 1));
    bed.subscribe("one", 100);
    assert_eq!(bed.next("one", 1), [(12, 1)]);
    ack(&mut bed, [12]);
    bed.pass(5);
    assert_eq!(bed.checkpoint().as_deref(), Some("39"));
}

#[test]
fn gaps_between_revisions_do_not_count() {
    let mut bed = Bed::new(30, json!({}));
    for revision in 1..25 {
        bed.server.remove_event(STREAM, revision);
    }
    bed.call("delete_subscription", json!({})).unwrap();
    bed.create(json!({})).unwrap();
    bed.subscribe("one", 100);
    assert_eq!(bed.next("one", 6), [(0, 0), (25, 0), (26, 0), (27, 0), (28, 0), (29, 0)]);
    ack(&mut bed, [0, 25, 26, 27, 28, 29]);
    bed.pass(20);
    assert_eq!(bed.checkpoint(), None);
}

#[test]
fn neither_a_departure_nor_an_end_of_the_server_remembers_anything() {
    let mut bed = bed(20, json!({}));
    ack(&mut bed, 0..20);
    bed.close("one");
    assert_eq!(bed.checkpoint(), None);
    bed.server.restart();
    bed.subscribe("one", 100);
    assert_eq!(bed.next("one", 20), fresh(0..20));
}

#[test]
fn an_update_drops_consumers_forgets_retries_and_keeps_the_checkpoint_but_writes_none() {
    let mut bed = bed(30, json!({}));
    ack(&mut bed, 0..12);
    bed.pass(1);
    ack(&mut bed, 12..24);
    bed.nack("one", [24], "retry");
    assert_eq!(bed.next("one", 1), [(24, 1)]);
    bed.call("update_subscription_to_stream", json!({ "stream_position": 3, "max_retry_count": 7 })).unwrap();
    let (error, message) = bed.failure("one");
    assert!(error.contains("Cancelled") || message.contains("was dropped"), "{error}: {message}");
    assert_eq!(bed.checkpoint().as_deref(), Some("11"));
    assert_eq!(bed.info()["max_retry_count"], 7);
    bed.subscribe("one", 100);
    assert_eq!(bed.next("one", 18), fresh(12..30));
}

#[test]
fn a_deletion_drops_consumers_and_forgets_the_checkpoint_and_what_was_parked() {
    let mut bed = bed(20, json!({}));
    bed.nack("one", [0], "park");
    bed.until(|stats| stats.parked == 1);
    ack(&mut bed, 1..12);
    bed.pass(1);
    assert_eq!(bed.checkpoint().as_deref(), Some("11"));
    bed.call("delete_subscription", json!({})).unwrap();
    let (error, message) = bed.failure("one");
    assert!(error.contains("Cancelled") || message.contains("was dropped"), "{error}: {message}");
    assert_eq!(bed.try_subscribe("one", 100).unwrap_err().0, "NotFoundError");
    assert_eq!(bed.read(CHECKPOINTS).len(), 0);
    bed.create(json!({})).unwrap();
    assert_eq!((bed.checkpoint(), bed.group().parked), (None, 0));
    bed.subscribe("one", 100);
    assert_eq!(bed.next("one", 20), fresh(0..20));
}

#[test]
fn a_start_at_the_end_without_a_checkpoint_loses_what_came_before_a_restart() {
    let mut bed = Bed::with_consumer(5, json!({ "from_end": true }), 100);
    bed.append(3);
    assert_eq!(bed.next("one", 3), fresh(5..8));
    bed.restart(&["one"]);
    bed.append(1);
    bed.subscribe("one", 100);
    assert_eq!(bed.next("one", 1), fresh(8..9));
}

#[test]
fn when_the_event_of_the_checkpoint_is_truncated_the_next_one_is_dropped_for_it() {
    let mut bed = bed(20, json!({}));
    ack(&mut bed, 0..12);
    bed.pass(1);
    assert_eq!(bed.checkpoint().as_deref(), Some("11"));
    bed.python.call("set_stream_metadata", json!({ "stream_name": STREAM, "metadata": { "$tb": 12 } })).unwrap();
    goes_on_from(&mut bed, 13);
}

#[test]
fn a_group_on_the_log_remembers_its_positions_and_keeps_its_filter_through_an_update() {
    let mut bed = Bed::without_group("$all");
    let names = json!({ "group_name": super::bed::GROUP });
    let more = |object, more| super::python::with(object, more);
    let settings = json!({ "min_checkpoint_count": 1 });
    bed.append(2);
    bed.python.call("create_subscription_to_all", more(names.clone(), settings)).unwrap();
    let subscribe =
        json!({ "do": "subscribe", "name": "one", "method": "read_subscription_to_all", "max_ack_delay": 0.02 });
    bed.python.ask(&more(subscribe.clone(), names.clone())).unwrap();
    assert_eq!(bed.next("one", 2), fresh(0..2));
    bed.nothing("one");
    bed.ack("one", [0]);
    bed.until(|stats| stats.outstanding == 1);
    bed.pass(1);
    let first = bed.read(STREAM).remove(0);
    assert_eq!(bed.checkpoint(), Some(format!("C:{0}/P:{0}", first["commit_position"])));

    bed.python.call("update_subscription_to_all", more(names.clone(), json!({ "max_retry_count": 7 }))).unwrap();
    bed.failure("one");
    bed.python.ask(&more(subscribe, names)).unwrap();
    bed.append(1);
    // Links, settings of the group and the checkpoint itself are in the log too.
    assert_eq!(bed.next("one", 2), fresh(1..3));
    bed.nothing("one");
}
