//! Parts of a log, read once.

use scriba_core::source::SourceError;

use crate::client::{Failure, From, Log, Read, Received};
use crate::connection::Connection;
use crate::error::source_error;
use crate::part::Part;

/// At most `count` events; none where there is no such stream.
pub(crate) async fn events(
    connection: &Connection,
    log: Log,
    from: From,
    backwards: bool,
    count: u64,
) -> Result<Vec<Received>, Failure> {
    let mut events = Vec::new();
    let asked = async {
        let mut reading = connection.read(&Read { log, from, backwards, count }).await?;
        while let Some(received) = reading.next().await? {
            events.push(received);
        }
        Ok(())
    };
    match asked.await {
        Ok(()) | Err(Failure::Missing) => Ok(events),
        Err(failure) => Err(failure),
    }
}

/// The position of the last event.
pub(crate) async fn head(connection: &Connection, part: &Part, whom: &str) -> Result<Option<u64>, SourceError> {
    let last = events(connection, part.whole(), From::End, true, 1).await;
    let last = last.map_err(|failure| source_error(whom, "read the last event", &failure))?;
    last.first().map(|received| part.position(&received.original)).transpose()
}
