//! Empty: the test in `tests/` depends on the crates of Scriba under other names.
