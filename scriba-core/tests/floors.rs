//! The floors of this crate, as ARCHITECTURE.md describes them: a file uses its own floor or a lower one.

use std::fs;
use std::path::{Path, PathBuf};

/// From the ground up. `engine` is a directory; the others are files of `src`.
const FLOORS: [(&str, &[&str]); 4] = [
    (
        "words",
        &[
            "event",
            "projection",
            "options",
            "error",
            "dead_letter",
            "failure",
            "lifecycle",
            "retry",
            "checkpoint",
            "circuit",
            "switches",
        ],
    ),
    ("rules", &["window", "partition"]),
    ("ports", &["source", "target", "telemetry", "metrics"]),
    ("engine", &["engine"]),
];

/// A line of code that names a module of this crate from its root.
#[derive(Debug, PartialEq, Eq)]
struct Edge {
    from: String,
    to: String,
    place: String,
}

fn floor_of(module: &str) -> Option<usize> {
    FLOORS.iter().position(|(_, modules)| modules.contains(&module))
}

/// All source files, each with the module it belongs to. `lib.rs` is the door and stands on no floor.
fn files() -> Vec<(String, PathBuf)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    let mut directories = vec![src.clone()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).expect("a directory of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let below = path.strip_prefix(&src).expect("below src");
            let module = below.iter().next().expect("a name").to_string_lossy().trim_end_matches(".rs").to_owned();
            if module != "lib" {
                files.push((module, path));
            }
        }
    }
    files.sort();
    files
}

/// The code of a file, line by line, without comments.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(at, line)| (at + 1, line.split("//").next().unwrap_or_default()))
}

fn edges(module: &str, name: &str, text: &str) -> Vec<Edge> {
    let mut edges = Vec::new();
    for (line, code) in code(text) {
        for behind in code.split("crate::").skip(1) {
            let to: String = behind.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
            edges.push(Edge { from: module.to_owned(), to, place: format!("{name}:{line}") });
        }
    }
    edges
}

/// What is wrong with an edge, if anything.
fn problem(edge: &Edge) -> Option<String> {
    let Edge { from, to, place } = edge;
    let Some(higher) = floor_of(to) else {
        return Some(format!("{place}: write `crate::<module>::…`, one module a line, so that its floor can be read"));
    };
    let floor = floor_of(from)?;
    (higher > floor).then(|| format!("{place}: {from} ({}) uses {to} ({})", FLOORS[floor].0, FLOORS[higher].0))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("a source file")
}

#[test]
fn every_file_stands_on_a_floor_and_every_floor_has_its_files() {
    let mut found: Vec<String> = files().into_iter().map(|(module, _)| module).collect();
    found.dedup();
    let mut listed: Vec<&str> = FLOORS.iter().flat_map(|(_, modules)| modules.iter().copied()).collect();
    listed.sort_unstable();
    assert_eq!(found, listed);
}

#[test]
fn no_file_uses_a_higher_floor() {
    let problems: Vec<String> = files()
        .iter()
        .flat_map(|(module, path)| edges(module, &path.display().to_string(), &read(path)))
        .filter_map(|edge| problem(&edge))
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn only_the_engine_knows_the_runtime() {
    for (module, path) in files() {
        let at = code(&read(&path)).find(|(_, code)| code.contains("tokio")).map(|(line, _)| line);
        assert!(
            module == "engine" || at.is_none(),
            "{}:{}: only the engine uses tokio",
            path.display(),
            at.unwrap_or(0)
        );
    }
}

#[test]
fn an_edge_that_runs_upward_and_one_that_hides_its_module_are_seen() {
    let seen = |module: &str, text: &str| -> Vec<String> {
        edges(module, "x.rs", text).iter().filter_map(problem).collect::<Vec<_>>()
    };
    assert_eq!(seen("window", "use crate::event::Position; // crate::engine\n/// crate::target"), [""; 0]);
    assert_eq!(seen("engine", "let x = crate::window::Load::default();"), [""; 0]);
    assert_eq!(seen("event", "\nfn f(_: crate::source::Page) {}"), ["x.rs:2: event (words) uses source (ports)"]);
    assert_eq!(seen("source", "use crate::engine::Scriba;"), ["x.rs:1: source (ports) uses engine (engine)"]);
    assert_eq!(seen("engine", "use crate::{event, target};").len(), 1);
    assert_eq!(seen("engine", "use crate::RawEvent;").len(), 1);
}
