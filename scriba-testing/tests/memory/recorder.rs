use std::sync::Arc;
use std::time::Duration;

use scriba_core::telemetry::{Halted, Observer, Started, Telemetry};
use scriba_core::{HaltReason, ProjectionId};
use scriba_testing::{Record, Recorded, Recorder};
use tokio::time::Instant;

use crate::{SHORT, at};

fn recorded_by(recorder: &Recorder, name: &str) -> Telemetry {
    let observers: Vec<Arc<dyn Observer>> = vec![Arc::new(recorder.clone())];
    Telemetry::new(ProjectionId::from(name), observers)
}

fn halts(record: &Record) -> bool {
    matches!(record.event, Recorded::Halted { .. })
}

#[tokio::test(start_paused = true)]
async fn keeps_events_in_order_and_wakes_who_waits() {
    let recorder = Recorder::new();
    let (orders, bills) = (recorded_by(&recorder, "orders"), recorded_by(&recorder, "bills"));
    orders.started(&Started);
    let waiter = recorder.clone();
    let waiting = tokio::spawn(async move { waiter.wait_for(halts, Duration::from_mins(1)).await });
    tokio::time::sleep(SHORT).await;
    bills.halted(&Halted { reason: &HaltReason::new("enough").at(at(3)) });

    let record = waiting.await.unwrap().unwrap();
    assert_eq!(record.id, ProjectionId::from("bills"));
    let Recorded::Halted { reason } = record.event else { panic!("{record:?}") };
    assert_eq!(reason.position, Some(at(3)));
    recorder.wait_for(halts, Duration::ZERO).await.expect("an event of the past is found at once");
    let names: Vec<_> = recorder.records().iter().map(|record| record.id.name.clone()).collect();
    assert_eq!(names, ["orders", "bills"]);
    assert!(matches!(recorder.events_of("orders")[..], [Recorded::Started]));
}

#[tokio::test(start_paused = true)]
async fn what_does_not_come_in_time_is_an_error_that_shows_what_did() {
    let recorder = Recorder::new();
    recorded_by(&recorder, "orders").started(&Started);
    let before = Instant::now();
    let error = recorder.wait_for(halts, Duration::from_mins(1)).await.unwrap_err();
    assert_eq!(before.elapsed(), Duration::from_mins(1));
    assert_eq!(error.to_string(), "not seen within 60s; 1 events were recorded, at last:\n  orders v1: Started");
}

#[test]
fn overrides_every_hook_of_the_catalogue() {
    let code = include_str!("../../src/recorder.rs");
    for hook in scriba_core::telemetry::CATALOGUE {
        assert!(code.contains(&format!("    fn {hook}(&self, id: &ProjectionId")), "{hook} is not recorded");
    }
}
