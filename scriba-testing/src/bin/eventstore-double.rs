//! The double, started by hand.
fn main() {}
