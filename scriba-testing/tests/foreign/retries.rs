//! What goes out again: refused, out of time, left behind.

use serde_json::json;

use super::bed::{Bed, again, fresh};

#[test]
fn skip_and_stop_count_as_done_and_the_consumer_stays() {
    let mut bed = Bed::with_consumer(2, json!({}), 5);
    assert_eq!(bed.next("one", 2), fresh(0..2));
    bed.nack("one", [0], "skip");
    bed.nack("one", [1], "stop");
    let stats = bed.until(|stats| stats.outstanding == 0);
    assert_eq!((stats.parked, stats.to_retry, stats.subscribers), (0, 0, 1));
    bed.append(1);
    assert_eq!(bed.next("one", 1), fresh(2..3));
}

#[test]
fn retry_and_unknown_send_an_event_again_at_once() {
    let mut bed = Bed::with_consumer(1, json!({}), 5);
    assert_eq!(bed.next("one", 1), fresh(0..1));
    bed.nack("one", [0], "retry");
    assert_eq!(bed.next("one", 1), [(0, 1)]);
    bed.nack("one", [0], "unknown");
    assert_eq!(bed.next("one", 1), [(0, 2)]);
}

#[test]
fn timeouts_are_looked_for_once_a_second() {
    let mut bed = Bed::with_consumer(1, json!({ "message_timeout": 1.5 }), 5);
    assert_eq!(bed.next("one", 1), fresh(0..1));
    bed.pass(1);
    bed.nothing("one");
    bed.pass(1);
    assert_eq!(bed.next("one", 1), again([0]));
}

#[test]
fn a_timeout_of_zero_is_over_at_the_next_tick() {
    let mut bed = Bed::with_consumer(1, json!({ "message_timeout": 0.0 }), 5);
    assert_eq!(bed.next("one", 1), fresh(0..1));
    bed.nothing("one");
    bed.pass(1);
    assert_eq!(bed.next("one", 1), again([0]));
}

#[test]
fn an_event_out_of_time_comes_again_behind_those_the_consumer_holds() {
    let mut bed = Bed::with_consumer(1, json!({}), 5);
    assert_eq!(bed.next("one", 1), fresh(0..1));
    bed.pass(20);
    bed.append(1);
    assert_eq!(bed.next("one", 1), fresh(1..2));
    bed.pass(9);
    bed.nothing("one");
    bed.pass(1);
    assert_eq!(bed.next("one", 1), again([0]));
}

#[test]
fn an_ack_after_the_timeout_and_before_the_next_delivery_has_no_effect() {
    let mut bed = Bed::with_consumer(6, json!({}), 5);
    bed.subscribe("two", 1);
    assert_eq!(bed.next("one", 5), fresh(0..5));
    assert_eq!(bed.next("two", 1), fresh(5..6));
    bed.close("one");
    // The place that the timeout of 5 leaves goes to 0, which is lower.
    bed.pass(30);
    assert_eq!(bed.next("two", 1), again([0]));
    assert_eq!(bed.group().to_retry, 5);
    bed.ack("two", [5]);
    bed.ack("two", [0]);
    for revision in 1..6 {
        assert_eq!(bed.next("two", 1), again([revision]));
        bed.ack("two", [revision]);
    }
    bed.until(|stats| stats.outstanding == 0);
}

#[test]
fn what_a_consumer_held_goes_to_the_next_lowest_first_and_then_onward() {
    let mut bed = Bed::with_consumer(8, json!({}), 5);
    assert_eq!(bed.next("one", 5), fresh(0..5));
    // 1 and 3 are acked above a hole: they do not come again.
    bed.ack("one", [3, 1]);
    assert_eq!(bed.next("one", 2), fresh(5..7));
    bed.close("one");
    assert_eq!(bed.group().to_retry, 5);
    bed.subscribe("two", 6);
    assert_eq!(bed.next("two", 6), [(0, 1), (2, 1), (4, 1), (5, 1), (6, 1), (7, 0)]);
    bed.nothing("two");
}

#[test]
fn what_was_acked_above_a_hole_comes_again_after_a_restart() {
    let mut bed = Bed::with_consumer(4, json!({}), 5);
    assert_eq!(bed.next("one", 4), fresh(0..4));
    bed.ack("one", [1, 3]);
    bed.until(|stats| stats.outstanding == 2);
    bed.restart(&["one"]);
    bed.subscribe("two", 5);
    assert_eq!(bed.next("two", 4), fresh(0..4));
}
