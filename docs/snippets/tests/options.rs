//! README's table of options held against the options that there are.

use std::fs;
use std::path::Path;

use scriba_core::ProjectionOptions;

#[test]
fn the_table_of_options_names_every_option_and_nothing_else() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = fs::read_to_string(readme).expect("README.md");
    let (_, table) = readme.split_once("\n| option | ").expect("the table of options");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let documented: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();

    // The fields of the struct, as `Debug` lists them: four spaces in.
    let options = format!("{:#?}", ProjectionOptions::default());
    let fields = options.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
    let fields = fields.map(|(name, _)| name).filter(|name| !name.starts_with(' ') && *name != "switches");
    assert_eq!(documented, fields.collect::<Vec<_>>());
}
