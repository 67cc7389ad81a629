//! Clients as their own documentation uses them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use scriba_testing::eventstore::EventStoreDouble;
use serde_json::{Value, json};

use super::install;

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/foreign");

#[test]
fn the_examples_in_the_documentation_of_the_python_client_run_as_they_are() {
    let server = EventStoreDouble::start().unwrap();
    let script = format!("{SCRIPTS}/published.py");
    let output = Command::new(install::python()).args([script, server.address().to_string()]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "Synopsis 1\nPersistent subscriptions 17\n");
}

#[test]
fn the_node_client_appends_reads_and_subscribes_as_its_documentation_shows() {
    let server = EventStoreDouble::start().unwrap();
    let mut process = Command::new("node")
        .args([format!("{SCRIPTS}/documented.cjs"), format!("kurrentdb://{}?tls=false", server.address())])
        .env("NODE_PATH", install::node_modules())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let steps: Vec<Value> = BufReader::new(process.stdout.take().unwrap())
        .lines()
        .take(5)
        .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
        .collect();
    let seat = |revision: u64, seat: &str| json!(["seat-reserved", revision, { "seat": seat }]);
    let all = [seat(0, "4b"), seat(1, "5c"), seat(2, "7e")];
    let wanted = [
        json!(["append", [true, 1]]),
        json!(["append again", "wrong-expected-version"]),
        json!(["read", [[0, { "seat": "4b" }], [1, { "seat": "5c" }]]]),
        json!(["subscribe", all]),
        json!(["persistent", all]),
    ];
    assert_eq!(steps, wanted);
    let begun = Instant::now();
    while server.group("booking-1", "seats").unwrap().outstanding > 0 {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", server.group("booking-1", "seats"));
        std::thread::park_timeout(Duration::from_millis(5));
    }
    writeln!(process.stdin.take().unwrap(), "done").unwrap();
    assert!(process.wait().unwrap().success());
}
