//! Bank.
fn main() {}
