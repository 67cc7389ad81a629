//! ARCHITECTURE.md held against the code: what it names is there.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The words in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Every row of a table that begins with the path of a source file, with the functions it names.
fn rows(document: &str) -> Vec<(&str, Vec<&str>)> {
    let cells = document.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('|').collect::<Vec<_>>());
    let rows = cells.filter_map(|cells| Some((quoted(cells.get(1)?).next()?, quoted(cells.get(2)?).collect())));
    rows.filter(|(path, _)| path.contains(".rs")).collect()
}

fn has_function(code: &str, name: &str) -> bool {
    ["(", "<"].iter().any(|behind| code.contains(&format!("fn {name}{behind}")))
}

#[test]
fn every_function_and_test_of_its_tables_is_in_the_file_it_is_said_to_be_in() {
    let document = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let rows = rows(&document);
    assert!(rows.len() > 30, "{} rows", rows.len());
    for (path, functions) in rows {
        let code = fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(!functions.is_empty(), "{path}: no function is named");
        for function in functions {
            assert!(has_function(&code, function), "{path} has no function {function}");
        }
    }
}

/// What a heading is linked by.
fn slug(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
    text.chars().filter(|letter| letter.is_alphanumeric() || *letter == '-').collect()
}

#[test]
fn every_link_in_the_documents_leads_to_a_file() {
    let documents = ["README.md", "ARCHITECTURE.md", "REBUILDING.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let records = fs::read_dir(root().join("docs/adr")).expect("docs/adr");
    let records = records.map(|entry| Path::new("docs/adr").join(entry.expect("an entry").file_name()));
    let documents = documents.iter().map(PathBuf::from).chain(records).chain(["docs/telemetry.md".into()]);
    for document in documents {
        let path = root().join(&document);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", document.display()));
        let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
        for link in links.filter(|link| !link.contains("://")) {
            if let Some(anchor) = link.strip_prefix('#') {
                let mut headings = text.lines().filter_map(|line| line.strip_prefix('#'));
                assert!(
                    headings.any(|heading| slug(heading) == anchor),
                    "{}: {link} leads nowhere",
                    document.display()
                );
                continue;
            }
            let target = path.parent().expect("a directory").join(link);
            assert!(target.exists(), "{}: {link} leads nowhere", document.display());
        }
    }
}
