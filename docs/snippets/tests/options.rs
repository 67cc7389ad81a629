//! README's table of options held against the options that there are.

use std::fs;
use std::path::Path;

#[test]
fn the_table_of_options_names_every_option_and_nothing_else() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = fs::read_to_string(readme).expect("README.md");
    let (_, table) = readme.split_once("\n| option | ").expect("the table of options");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let documented: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();

    // The methods that set one.
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scriba-core/src/options.rs");
    let source = fs::read_to_string(source).expect("options.rs");
    let setters = source.lines().filter_map(|line| line.strip_prefix("    pub fn ")?.split_once("(mut self, "));
    let setters: Vec<&str> = setters.map(|(name, _)| name).filter(|name| *name != "switches").collect();
    assert_eq!(documented, setters);
}
