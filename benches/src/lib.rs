//! What Scriba is measured by: the loop that a user would otherwise write by hand, and the engine beside it, on the
//! same log and the same table.

pub mod engine_loop;
pub mod event_store;
pub mod events;
pub mod fill;
pub mod hand_loop;
pub mod measure;
pub mod side;

/// Benches stop at the first error, whatever it is.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
