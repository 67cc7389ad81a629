//! The whole program, run as a user runs it, on a throwaway Postgres of its own.

use std::process::Command;

use scriba_testing::postgres::Postgres;

struct Finished {
    stdout: String,
    stderr: String,
    code: Option<i32>,
}

fn bank(arguments: &[&str]) -> Finished {
    let output = Command::new(env!("CARGO_BIN_EXE_bank")).args(arguments).output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("it prints UTF-8");
    Finished { stdout: text(output.stdout), stderr: text(output.stderr), code: output.status.code() }
}

/// Nothing goes wrong but the bad events.
fn calm_bank(arguments: &[&str]) -> Finished {
    bank(&[arguments, &["--outage", "0", "--column-missing", "0"]].concat())
}

impl Finished {
    /// The first line that contains a text.
    fn line(&self, text: &str) -> &str {
        let line = self.stdout.lines().find(|line| line.contains(text));
        line.unwrap_or_else(|| panic!("no line with {text:?}:\n{}{}", self.stdout, self.stderr))
    }

    /// Looks for the first of each text.
    fn assert_in_order(&self, texts: &[&str]) {
        let place = |text: &&str| self.stdout.find(text).unwrap_or_else(|| panic!("no {text:?}:\n{}", self.stdout));
        assert!(texts.iter().map(place).is_sorted(), "{texts:?}:\n{}", self.stdout);
    }

    /// The numbers of a projection's line: delivered, applied, skipped, dead-lettered.
    fn counts(&self, projection: &str) -> Vec<u64> {
        let start = format!("{projection}: delivered ");
        let line = self.stdout.lines().find(|line| line.starts_with(&start));
        let line = line.unwrap_or_else(|| panic!("no line for {projection}:\n{}{}", self.stdout, self.stderr));
        line.split(' ').filter_map(|word| word.parse().ok()).collect()
    }

    fn killed(&self) -> u64 {
        let line = self.stdout.lines().find_map(|line| line.strip_prefix("killed ")?.strip_suffix(" times"));
        line.and_then(|count| count.parse().ok()).expect("it says how often it killed")
    }

    fn assert_that_all_sums_agree(&self) {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        assert!(self.stdout.contains("log, read models, dead letters and counts agree"), "{}", self.stdout);
        for projection in ["balances", "entries"] {
            let [delivered, applied, skipped, dead_lettered] = self.counts(projection)[..] else {
                panic!("not four numbers: {}", self.stdout)
            };
            assert_eq!(delivered, applied + skipped + dead_lettered);
        }
    }
}

#[test]
fn every_event_is_accounted_for_and_the_bad_ones_are_dead_letters() {
    let run = calm_bank(&["--events", "2000", "--accounts", "100", "--rate", "0"]);
    run.assert_that_all_sums_agree();
    assert_eq!(run.counts("balances")[0], 1_990, "all but the ten of a type that nobody lists");
    assert_eq!(run.counts("balances")[2..], [10, 34], "skipped and dead-lettered");
    assert_eq!(run.counts("entries")[2..], [0, 30]);
    for kind in ["decode", "panic", "bank::projections::NegativeAmount"] {
        assert_eq!(run.stdout.matches(&format!("10 dead letters of kind {kind}\n")).count(), 2, "{}", run.stdout);
    }
    for kind in ["no_row", "commit:23505 (unique_violation)"] {
        assert_eq!(run.stdout.matches(&format!("2 dead letters of kind {kind}\n")).count(), 1, "{}", run.stdout);
    }
    assert!(!run.stdout.contains(" 0 statements"), "{}", run.stdout);
    assert!(!run.stderr.contains("panicked"), "panics on purpose do not flood the terminal: {}", run.stderr);
}

#[test]
fn sums_agree_after_many_kills() {
    let kills = ["--events", "2000", "--accounts", "100", "--rate", "200", "--kill-every", "200", "--no-lease"];
    let run = calm_bank(&kills);
    run.assert_that_all_sums_agree();
    // More than twenty where the machine has time; a node has to get on before it is killed.
    assert!(run.killed() >= 5, "{}", run.stdout);
}

#[test]
fn sums_agree_when_the_lease_of_each_killed_node_has_to_lapse() {
    let kills = ["--events", "2000", "--accounts", "100", "--rate", "250", "--kill-every", "300"];
    let run = calm_bank(&kills);
    run.assert_that_all_sums_agree();
    assert!(run.killed() >= 2, "{}", run.stdout);
}

#[test]
fn sums_agree_when_two_nodes_project_at_once_without_a_lease() {
    let nodes = ["--events", "2000", "--accounts", "100", "--rate", "400", "--nodes", "2", "--no-lease"];
    calm_bank(&nodes).assert_that_all_sums_agree();
}

#[test]
fn an_outage_is_recovered_from_and_a_halt_at_a_missing_column_is_mended_by_putting_it_back_and_a_restart() {
    let arguments =
        ["--events", "3000", "--accounts", "100", "--rate", "1000", "--outage", "3", "--column-missing", "2"];
    let run = bank(&arguments);
    run.assert_that_all_sums_agree();

    run.assert_in_order(&["OUTAGE: for 3 s", "balances degraded since ", "END OF OUTAGE", "balances recovered"]);
    let degraded = run.line("balances degraded since ");
    assert!(degraded.contains("UTC, last error: ") && degraded.contains("refused"), "{degraded}");

    let behind = "positions behind, halted";
    run.assert_in_order(&["END OF OUTAGE", "MISSING COLUMN", "HALTED", behind, "REPAIRED", "entries: delivered"]);
    let halted = run.line("HALTED: entries, class structural, code 42703: ");
    assert!(halted.contains("cents"), "it names the column: {halted}");
}

#[test]
fn sums_agree_when_two_nodes_are_killed_through_an_outage_and_a_missing_column() {
    let run = bank(&[
        "--events",
        "1500",
        "--accounts",
        "100",
        "--rate",
        "300",
        "--nodes",
        "2",
        "--kill-every",
        "500",
        "--outage",
        "2",
        "--column-missing",
        "1",
    ]);
    run.assert_that_all_sums_agree();
    assert!(run.killed() >= 2, "{}", run.stdout);
    assert!(run.stdout.contains("HALTED: entries, class structural"), "{}", run.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_given_database_keeps_what_came_out_and_is_not_used_twice() {
    let database = Postgres::shared().await.expect("a server").create_database().await.expect("a database");
    let url = database.url();
    let arguments = ["--events", "50", "--rate", "0", "--outage", "1", "--column-missing", "1", "--database-url", &url];
    let first = bank(&arguments);
    first.assert_that_all_sums_agree();
    let pool = database.pool(1).await.expect("a connection");
    let events: i64 = sqlx::query_scalar("SELECT count(*) FROM bank_events").fetch_one(&pool).await.expect("a count");
    assert_eq!(events, 50);
    let second = bank(&arguments);
    assert_eq!(second.code, Some(1));
    assert!(second.stderr.contains("name an empty one with --database-url"), "{}", second.stderr);
}

#[test]
fn an_option_that_is_out_of_range_is_refused_by_name() {
    let run = bank(&["--writers", "0"]);
    assert_eq!(run.code, Some(2));
    assert!(run.stderr.contains("--writers"), "{}", run.stderr);
}

#[test]
fn sums_agree_over_an_event_store_by_either_subscription() {
    for subscription in ["catch-up", "persistent"] {
        let run = calm_bank(
            &[["--source", "eventstore", "--subscription", subscription], ["--events", "2000", "--accounts", "100"]]
                .concat(),
        );
        run.assert_that_all_sums_agree();
        assert_eq!(run.counts("balances")[0], 1_990, "{subscription}: all but the ten of a type that nobody lists");
        assert!(
            run.line("double of EventStoreDB").contains("esdb://127.0.0.1:"),
            "it says what the events are kept by"
        );
    }
}

#[test]
fn sums_agree_when_two_nodes_on_an_event_store_are_killed_again_and_again() {
    for subscription in ["catch-up", "persistent"] {
        let store = ["--source", "eventstore", "--subscription", subscription];
        let kills = ["--events", "2000", "--accounts", "100", "--rate", "250", "--nodes", "2", "--kill-every", "400"];
        let run = calm_bank(&[&store[..], &kills].concat());
        run.assert_that_all_sums_agree();
        assert!(run.killed() >= 3, "{subscription}: {}", run.stdout);
    }
}
