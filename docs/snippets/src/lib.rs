//! The documents' Rust, as doctests: what no longer compiles, or no longer comes out as written, fails here.

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../../../REBUILDING.md")]
struct Rebuilding;
