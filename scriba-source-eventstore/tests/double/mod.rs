//! The tests of the sources, for whichever client crate.

mod bed;
mod clients;
mod conformance;
mod groups;
mod holes;
mod logs;
mod outages;
