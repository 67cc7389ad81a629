//! The double through the published Rust client.
