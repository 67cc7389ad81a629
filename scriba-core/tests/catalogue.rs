//! The catalogue of `docs/telemetry.md` held against the code of `telemetry.rs`, in both directions.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use scriba_core::telemetry::CATALOGUE;

/// A hook: in the documentation a row of the table, in the code its struct and its line in `hooks!`.
#[derive(Debug, PartialEq, Eq)]
struct Hook {
    name: String,
    /// The message of the `tracing` event, and its level.
    message: String,
    level: String,
    /// The fields of the struct that observers get.
    fields: Vec<String>,
    /// The fields of the `tracing` event.
    traced: Vec<String>,
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What stands between two marks, and what follows the second.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<(&'a str, &'a str)> {
    text.split_once(from)?.1.split_once(to)
}

/// Rows of the form `` | `hook` | message | level | when | `field`, … | `field`, … | ``.
fn documented() -> Vec<Hook> {
    let text = read("../docs/telemetry.md");
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(ToOwned::to_owned).collect::<Vec<_>>();
    // Instruments of metrics stand in a table of their own, which `tests/metrics.rs` holds.
    let rows = text.lines().filter(|line| line.starts_with("| `") && !line.starts_with("| `scriba."));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, message, level, when, fields, traced] = cells[..] else { panic!("not six cells: {row}") };
        assert!(!when.is_empty(), "when does it fire? {row}");
        Hook {
            name: name.trim_matches('`').to_owned(),
            message: message.to_owned(),
            level: level.to_owned(),
            fields: names(fields),
            traced: names(traced),
        }
    })
    .collect()
}

/// The public fields of every struct.
fn structs(text: &str) -> HashMap<&str, Vec<String>> {
    let mut structs = HashMap::new();
    for declared in text.split("pub struct ").skip(1) {
        let name = declared.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        let body =
            if declared.starts_with(&format!("{name};")) { "" } else { declared.split('}').next().unwrap_or("") };
        let fields = body.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(':'));
        structs.insert(name, fields.map(|(field, _)| field.to_owned()).collect());
    }
    structs
}

/// Lines of the form `hook(e: Struct<'_>) => "message", level, { field = value, … };`.
fn coded() -> Vec<Hook> {
    let text = read("src/telemetry.rs");
    let structs = structs(&text);
    let (hooks, _) = between(&text, "\nhooks! {\n", "\n}\n").expect("the hooks");
    let lines = hooks.lines().map(str::trim).filter(|line| !line.starts_with("///"));
    lines
        .map(|line| {
            let parsed = || {
                let (name, rest) = line.split_once('(')?;
                let (event, rest) = between(rest, ": ", ") => \"")?;
                let (message, rest) = rest.split_once("\", ")?;
                let (level, rest) = rest.split_once(", { ")?;
                let (traced, _) = rest.split_once(" };")?;
                let fields = structs.get(event.trim_end_matches("<'_>"))?.clone();
                let traced =
                    traced.split(", ").filter_map(|field| field.split_once(" = ")).map(|(key, _)| key.to_owned());
                let (name, message, level) = (name.to_owned(), message.to_owned(), level.to_owned());
                Some(Hook { name, message, level, fields, traced: traced.collect() })
            };
            parsed().unwrap_or_else(|| panic!("not understood: {line}"))
        })
        .collect()
}

#[test]
fn the_code_is_read_whole() {
    let names: Vec<String> = coded().into_iter().map(|hook| hook.name).collect();
    assert_eq!(names, CATALOGUE);
}

#[test]
fn every_hook_is_documented_with_all_its_fields_and_nothing_else_is() {
    let (coded, documented) = (coded(), documented());
    for hook in &coded {
        let row = documented.iter().find(|row| row.name == hook.name);
        assert_eq!(row, Some(hook), "docs/telemetry.md and telemetry.rs differ");
    }
    let names = |hooks: &[Hook]| hooks.iter().map(|hook| hook.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&documented), names(&coded), "rows of docs/telemetry.md and hooks of telemetry.rs, in order");
}
