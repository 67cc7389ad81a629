//! Events that are given up, and given another chance.

use serde_json::{Value, json};

use super::bed::{Bed, PARKED, again, fresh};

/// The parked events: what they link to, and the reason.
fn parked(bed: &mut Bed) -> Vec<(String, String)> {
    let events = bed.read(PARKED);
    let link = |event: &Value| {
        assert_eq!(event["type"], "$>");
        let metadata: Value = serde_json::from_str(event["metadata"].as_str().unwrap()).unwrap();
        assert!(metadata["Added"].is_string(), "{metadata}");
        assert!(metadata["SubscriptionEventNumber"].is_u64(), "{metadata}");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        (text(&event["data"]), text(&metadata["Reason"]))
    };
    events.iter().map(link).collect()
}

fn link(to: &str, reason: &str) -> (String, String) {
    (to.to_owned(), reason.to_owned())
}

#[test]
fn park_takes_an_event_to_the_parked_stream() {
    let mut bed = Bed::with_consumer(3, json!({}), 2);
    assert_eq!(bed.next("one", 2), fresh(0..2));
    bed.nack("one", [1], "park");
    // Its place is free at once.
    assert_eq!(bed.next("one", 1), fresh(2..3));
    assert_eq!(parked(&mut bed), [link("1@orders", "Client explicitly NAK'ed message.\n")]);
    assert_eq!(bed.info()["parked_message_count"], 1);
}

#[test]
fn an_event_that_was_retried_as_often_as_it_may_is_parked() {
    let mut bed = Bed::with_consumer(1, json!({ "max_retry_count": 2 }), 5);
    for retries in 0..3 {
        assert_eq!(bed.next("one", 1), [(0, retries)]);
        bed.nack("one", [0], "retry");
    }
    bed.until(|stats| stats.parked == 1);
    bed.nothing("one");
    assert_eq!(bed.group().outstanding, 0);
    assert_eq!(parked(&mut bed), [link("0@orders", "Reached retry count of 2")]);
}

#[test]
fn without_retries_the_first_one_parks() {
    let mut bed = Bed::with_consumer(1, json!({ "max_retry_count": 0 }), 5);
    assert_eq!(bed.next("one", 1), fresh(0..1));
    bed.nack("one", [0], "retry");
    bed.until(|stats| stats.parked == 1);
    assert_eq!(parked(&mut bed), [link("0@orders", "Reached retry count of 0")]);
}

#[test]
fn timeouts_count_as_retries() {
    let mut bed = Bed::with_consumer(1, json!({ "max_retry_count": 1 }), 5);
    assert_eq!(bed.next("one", 1), fresh(0..1));
    bed.pass(30);
    assert_eq!(bed.next("one", 1), again([0]));
    bed.pass(30);
    bed.nothing("one");
    assert_eq!(parked(&mut bed), [link("0@orders", "Reached retry count of 1")]);
}

#[test]
fn no_number_of_departures_parks_but_the_next_timeout_does() {
    let mut bed = Bed::new(1, json!({ "max_retry_count": 2 }));
    for retries in 0..5 {
        bed.subscribe("one", 5);
        assert_eq!(bed.next("one", 1), [(0, retries)]);
        bed.close("one");
    }
    assert_eq!(bed.group().parked, 0);
    bed.subscribe("one", 5);
    assert_eq!(bed.next("one", 1), [(0, 5)]);
    bed.pass(30);
    bed.nothing("one");
    assert_eq!(parked(&mut bed), [link("0@orders", "Reached retry count of 2")]);
}

#[test]
fn parked_events_are_replayed_as_new_ones_of_the_past_with_the_link_of_the_parked_stream() {
    let mut bed = Bed::with_consumer(3, json!({}), 5);
    assert_eq!(bed.next("one", 3), fresh(0..3));
    bed.nack("one", [0], "park");
    bed.ack("one", [1, 2]);
    bed.until(|stats| stats.parked == 1 && stats.outstanding == 0);
    bed.call("replay_parked_events", json!({})).unwrap();
    let event = bed.next_events("one", 1).remove(0);
    assert_eq!((event["stream_name"].as_str(), event["stream_position"].as_u64()), (Some("orders"), Some(0)));
    assert_eq!((event["link"]["stream_name"].as_str(), event["retry_count"].as_u64()), (Some(PARKED), Some(0)));
    assert_eq!(parked(&mut bed), []);
}

#[test]
fn a_replayed_event_that_was_not_acked_is_lost_by_a_restart() {
    let mut bed = Bed::with_consumer(12, json!({}), 20);
    assert_eq!(bed.next("one", 12), fresh(0..12));
    bed.nack("one", [0], "park");
    bed.ack("one", 1..12);
    bed.until(|stats| stats.parked == 1 && stats.outstanding == 0);
    bed.call("replay_parked_events", json!({})).unwrap();
    assert_eq!(bed.next_events("one", 1).len(), 1);
    // It has no part in the checkpoint, which passes it.
    bed.pass(1);
    assert_eq!((bed.checkpoint().as_deref(), bed.group().outstanding), (Some("11"), 1));
    bed.restart(&["one"]);
    bed.subscribe("two", 20);
    bed.nothing("two");
    assert_eq!(parked(&mut bed), []);
}
