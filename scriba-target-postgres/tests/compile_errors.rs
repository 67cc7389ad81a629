//! What does not compile, and what the compiler says then: one case per rejection.

use std::process::Command;

#[test]
fn the_derive_refuses_each_wrong_use_and_says_what_to_write_instead() {
    trybuild::TestCases::new().compile_fail("tests/ui/derive/*.rs");
}

/// The frame around our own words is the compiler's, and each version of it draws another one.
const WORDED_BY: &str = "rustc 1.95.";

#[test]
fn types_refuse_what_does_not_fit_together_and_say_what_to_write_instead() {
    let version = Command::new("rustc").arg("--version").output().expect("rustc runs where tests are compiled");
    if String::from_utf8_lossy(&version.stdout).starts_with(WORDED_BY) {
        trybuild::TestCases::new().compile_fail("tests/ui/types/*.rs");
    } else {
        eprintln!("not compared: tests/ui/types holds the words of {WORDED_BY}x");
    }
}
