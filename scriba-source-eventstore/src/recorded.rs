//! From what the server delivers to events.

use std::collections::HashMap;

use scriba_core::{EventType, Position, RecordedEvent};

use crate::client::Event;

/// More types than any store has by intention; beyond them each event gets a text of its own.
const TYPES_SHARED: usize = 4_096;

/// One allocation for each type.
#[derive(Debug, Default)]
pub(crate) struct EventTypes(HashMap<String, EventType>);

impl EventTypes {
    pub(crate) fn recorded(&mut self, event: Event, position: u64) -> RecordedEvent {
        RecordedEvent {
            id: event.id.to_string().into(),
            stream_id: event.stream_id.into(),
            event_type: self.shared(event.event_type),
            position: Position::new(position),
            revision: Some(event.revision),
            data: event.data,
            metadata: event.metadata,
            occurred_at: event.occurred_at,
        }
    }

    fn shared(&mut self, name: String) -> EventType {
        if let Some(known) = self.0.get(&name) {
            return known.clone();
        }
        let new = EventType::from(name.as_str());
        if self.0.len() < TYPES_SHARED {
            self.0.insert(name, new.clone());
        }
        new
    }
}
