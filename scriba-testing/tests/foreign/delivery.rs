//! What is handed out, how much of it, and in which order.

use std::collections::HashSet;

use scriba_testing::eventstore::NewEvent;
use serde_json::json;
use uuid::Uuid;

use super::bed::{Bed, STREAM, again, fresh};

#[test]
fn a_consumer_holds_no_more_than_its_buffer() {
    let mut bed = Bed::with_consumer(10, json!({}), 3);
    assert_eq!(bed.next("one", 3), fresh(0..3));
    bed.nothing("one");
    assert_eq!(bed.group().outstanding, 3);
    bed.ack("one", [1]);
    assert_eq!(bed.next("one", 1), fresh(3..4));
    bed.nothing("one");
}

#[test]
fn what_goes_out_again_goes_before_new_events_in_order_of_position() {
    let mut bed = Bed::with_consumer(10, json!({}), 4);
    assert_eq!(bed.next("one", 4), fresh(0..4));
    bed.nack("one", [2, 0], "retry");
    let got = bed.next("one", 2);
    assert_eq!(HashSet::from_iter(got), HashSet::from([(0, 1), (2, 1)]));
    bed.nothing("one");
    bed.ack("one", [1]);
    assert_eq!(bed.next("one", 1), fresh(4..5));
}

#[test]
fn events_are_acked_one_by_one_in_any_order_and_unknown_ids_mean_nothing() {
    let mut bed = Bed::with_consumer(5, json!({}), 5);
    assert_eq!(bed.next("one", 5), fresh(0..5));
    let ids = [bed.id(3), Uuid::new_v4().to_string(), bed.id(1)];
    bed.ack_ids("one", &ids);
    bed.until(|stats| stats.outstanding == 3);
    // Done already.
    bed.ack("one", [1]);
    bed.close("one");
    bed.subscribe("two", 5);
    assert_eq!(bed.next("two", 3), again([0, 2, 4]));
    bed.nothing("two");
}

#[test]
fn any_consumer_of_the_group_acks_what_another_one_holds() {
    let mut bed = Bed::with_consumer(2, json!({}), 2);
    bed.subscribe("two", 2);
    assert_eq!(bed.next("one", 2), fresh(0..2));
    bed.ack("two", [0]);
    bed.until(|stats| stats.outstanding == 1);
    bed.append(2);
    // It was the first consumer who got room for one.
    assert_eq!((bed.next("one", 1), bed.next("two", 1)), (fresh(2..3), fresh(3..4)));
}

#[test]
fn events_of_the_client_itself_are_delivered_with_all_their_parts() {
    let mut bed = Bed::with_consumer(0, json!({}), 5);
    let id = Uuid::new_v4().to_string();
    let events = json!([["Placed", r#"{"cents": 5}"#, id]]);
    bed.python.ask(&json!({ "do": "append", "stream_name": STREAM, "events": events })).unwrap();
    let event = bed.next_events("one", 1).remove(0);
    assert_eq!((event["id"].as_str(), event["type"].as_str()), (Some(id.as_str()), Some("Placed")));
    assert_eq!((event["data"].as_str(), event["stream_name"].as_str()), (Some(r#"{"cents": 5}"#), Some(STREAM)));
}

#[test]
fn a_second_event_of_an_id_is_not_followed_and_costs_its_consumer_a_place() {
    let mut bed = Bed::with_consumer(0, json!({}), 3);
    let id = Uuid::new_v4().to_string();
    let twins = json!([["Placed", "{}", id], ["Placed", "{}", id]]);
    bed.python.ask(&json!({ "do": "append", "stream_name": STREAM, "events": twins })).unwrap();
    assert_eq!(bed.next("one", 2), fresh(0..2));
    bed.ack("one", [0]);
    bed.until(|stats| stats.outstanding == 0);
    let info = bed.info();
    assert_eq!(info["connections"][0]["available_slots"], 2);
}

#[test]
fn a_push_that_got_lost_comes_back_by_its_timeout_behind_later_events() {
    let mut bed = Bed::with_consumer(0, json!({}), 5);
    bed.server.lose_pushes(1);
    bed.append(3);
    assert_eq!(bed.next("one", 2), [(1, 0), (2, 0)]);
    bed.ack("one", [1, 2]);
    bed.until(|stats| stats.outstanding == 1);
    bed.pass(30);
    assert_eq!(bed.next("one", 1), again([0]));
}

#[test]
fn events_of_a_category_come_with_their_links_and_are_acked_by_these() {
    let mut bed = Bed::without_group("$ce-order");
    bed.server.append("order-1", [NewEvent::json("Placed", "{}")]);
    bed.server.append("order-2", [NewEvent::json("Placed", "{}")]);
    bed.create(json!({ "resolve_links": true })).unwrap();
    bed.subscribe("one", 5);
    let events = bed.next_events("one", 2);
    let found: Vec<_> = events.iter().map(|event| &event["stream_name"]).collect();
    assert_eq!(found, ["order-1", "order-2"]);
    assert_eq!(events[1]["link"]["stream_position"], 1);
    // Of the event itself: it means nothing here.
    bed.ack_ids("one", &[events[0]["id"].as_str().unwrap().to_owned()]);
    bed.ack_ids("one", &[events[1]["link"]["id"].as_str().unwrap().to_owned()]);
    bed.until(|stats| stats.outstanding == 1);
    bed.close("one");
    bed.subscribe("two", 5);
    assert_eq!(bed.next("two", 1), again([0]));
}
