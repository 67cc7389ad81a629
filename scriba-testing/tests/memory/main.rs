//! The memory source, the memory target and the recorder, on their own and under the engine.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod engine;
mod recorder;
mod source;
mod target;

use std::time::Duration;

use scriba_core::Position;
use scriba_testing::MemorySource;

const SHORT: Duration = Duration::from_millis(10);

fn at(number: u64) -> Position {
    Position::new(number)
}

/// Events at positions from 0 on, over three streams.
fn filled(source: MemorySource, events: u64) -> MemorySource {
    for number in 0..events {
        source.append(format!("stream-{}", number % 3), "Counted", number.to_string());
    }
    source
}
