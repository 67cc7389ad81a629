//! Several consumers of a group.

use scriba_testing::eventstore::NewEvent;
use serde_json::json;

use super::bed::{Bed, fresh};

#[test]
fn round_robin_takes_turns() {
    let mut bed = Bed::with_consumer(0, json!({ "consumer_strategy": "RoundRobin" }), 5);
    bed.subscribe("two", 5);
    bed.append(4);
    assert_eq!((bed.next("one", 2), bed.next("two", 2)), (vec![(0, 0), (2, 0)], vec![(1, 0), (3, 0)]));
}

#[test]
fn dispatch_to_single_stays_with_a_consumer_until_it_is_full() {
    let mut bed = Bed::with_consumer(0, json!({ "consumer_strategy": "DispatchToSingle" }), 3);
    bed.subscribe("two", 3);
    bed.append(4);
    assert_eq!((bed.next("one", 3), bed.next("two", 1)), (fresh(0..3), fresh(3..4)));
    // Room elsewhere is no reason to leave it.
    bed.ack("one", [0]);
    bed.until(|stats| stats.outstanding == 3);
    bed.append(3);
    assert_eq!((bed.next("two", 2), bed.next("one", 1)), (fresh(4..6), fresh(6..7)));
}

#[test]
fn pinned_gives_all_of_a_stream_to_one_consumer() {
    let mut bed = Bed::on("$ce-order", 0, json!({ "consumer_strategy": "Pinned", "resolve_links": true }));
    bed.subscribe("one", 30);
    bed.subscribe("two", 30);
    for number in 0..20 {
        bed.server.append(&format!("order-{}", number % 5), [NewEvent::json("Placed", "{}")]);
    }
    let counts = bed.until(|stats| stats.delivered == 20);
    assert_eq!(counts.outstanding, 20);
    let slots: Vec<u64> = bed.info()["connections"]
        .as_array()
        .unwrap()
        .iter()
        .map(|connection| connection["in_flight_messages"].as_u64().unwrap())
        .collect();
    for (name, count) in ["one", "two"].into_iter().zip(slots) {
        let events = bed.next_events(name, usize::try_from(count).unwrap());
        for stream in 0..5 {
            let of_stream = events.iter().filter(|event| event["stream_name"] == format!("order-{stream}")).count();
            assert!([0, 4].contains(&of_stream), "{of_stream} of order-{stream}");
        }
    }
}

#[test]
fn a_consumer_too_many_is_refused_until_another_one_goes() {
    let mut bed = Bed::with_consumer(1, json!({ "max_subscriber_count": 1 }), 5);
    let (error, _) = bed.try_subscribe("two", 5).unwrap_err();
    assert_eq!(error, "MaximumSubscriptionsReachedError");
    bed.close("one");
    bed.subscribe("two", 5);
    assert_eq!(bed.next("two", 1).len(), 1);
}
