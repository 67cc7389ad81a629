//! Questions beside the subscriptions, on the connection for calls of whichever runtime they are asked on.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use scriba_core::source::{PassedOver, SourceError, SourceInspector, TypeSet};
use scriba_core::{EventId, Position};

use crate::client::{Event, Failure, Filter, From, Log, Read, Received};
use crate::connection::Connection;
use crate::error::source_error;
use crate::part::{Part, is_system};
use crate::reads;
use crate::store::EventStore;

pub(crate) struct Inspector {
    connection: Arc<Connection>,
    part: Part,
    whom: String,
}

/// Of one type: the first position, and how many.
type Found = HashMap<String, (u64, u64)>;

impl Inspector {
    pub(crate) fn new(store: &EventStore, part: &Part) -> Self {
        Self { connection: Arc::clone(&store.connection), part: part.clone(), whom: format!("{part} of {store}") }
    }

    fn error(&self, doing: &str, failure: &Failure) -> SourceError {
        source_error(&self.whom, doing, failure)
    }

    /// The event that a read from a position shows, if it stands there.
    async fn event_at(&self, log: Log, position: u64) -> Result<Option<Received>, SourceError> {
        let read = reads::events(&self.connection, log, From::At(position), false, 1).await;
        let read = read.map_err(|failure| self.error("read one event", &failure))?;
        let stands_there = |received: &Received| {
            let original = &received.original;
            position == if self.part.counts() { original.revision } else { original.place.commit }
        };
        Ok(read.into_iter().next().filter(stands_there))
    }

    /// Counts events that a projection would be given for the types, up to a position.
    async fn count(&self, types: TypeSet<'_>, up_to: u64) -> Result<Found, SourceError> {
        let failed = |failure| self.error("look for events of added types", &failure);
        let log = match (types, &self.part) {
            (TypeSet::Only(types), Part::All { .. }) => {
                Log::All(Filter::TypePrefixes(types.iter().map(|&name| name.to_owned()).collect()))
            }
            _ => self.part.whole(),
        };
        let counts = |event: &Event| match types {
            TypeSet::Only(_) => types.contains(&event.event_type),
            TypeSet::AllBut(_) => types.contains(&event.event_type) && !is_system(&event.event_type),
        };
        let mut found = Found::new();
        let read = Read { log, from: From::Start, backwards: false, count: u64::MAX };
        let mut reading = match self.connection.read(&read).await {
            Ok(reading) => reading,
            Err(Failure::Missing) => return Ok(found),
            Err(failure) => return Err(failed(failure)),
        };
        loop {
            let received = match reading.next().await {
                Ok(Some(received)) => received,
                Ok(None) | Err(Failure::Missing) => return Ok(found),
                Err(failure) => return Err(failed(failure)),
            };
            let position = self.part.position(&received.original)?;
            if position > up_to {
                return Ok(found);
            }
            if let Some(event) = received.event.filter(|event| counts(event) && self.part.reaches(event)) {
                found.entry(event.event_type).or_insert((position, 0)).1 += 1;
            }
        }
    }
}

#[async_trait]
impl SourceInspector for Inspector {
    /// The last event that may be delivered without being named: where the server filters, a subscription moves on to it.
    async fn head(&mut self) -> Result<Option<Position>, SourceError> {
        Ok(reads::head(&self.connection, &self.part, &self.whom).await?.map(Position::new))
    }

    async fn event_id_at(&mut self, position: Position) -> Result<Option<EventId>, SourceError> {
        // No server counts further, and some numbers beyond mean something else to it.
        if position.to_i64().is_err() {
            return Ok(None);
        }
        let at = position.get();
        let mut found = self.event_at(self.part.whole(), at).await?;
        if found.is_none() && !self.part.counts() {
            found = self.event_at(Log::All(Filter::TypePrefixes(vec!["$".to_owned()])), at).await?;
        }
        Ok(found.and_then(|received| received.event).map(|event| event.id.to_string().into()))
    }

    async fn passed_over(&mut self, types: TypeSet<'_>, up_to: Position) -> Result<Option<PassedOver>, SourceError> {
        if matches!(types, TypeSet::Only([])) {
            return Ok(None);
        }
        let found = self.count(types, up_to.get()).await?;
        let first = found.into_iter().min_by_key(|(_, (first, _))| *first);
        Ok(first.map(|(event_type, (first, events))| PassedOver {
            event_type: event_type.into(),
            events,
            first: Position::new(first),
        }))
    }
}
