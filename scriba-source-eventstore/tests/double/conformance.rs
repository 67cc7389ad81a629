//! The sources pass the conformance suite.

use std::sync::Mutex;

use async_trait::async_trait;
use scriba_core::{Position, Source};
use scriba_source_eventstore::{CatchUpSource, PersistentSource};
use scriba_testing::conformance::source::{Cut, NewEvent, SourceBed, Truncate};
use scriba_testing::eventstore;

use crate::double::bed::Server;

/// A category of all events: any name goes, as in one that a projection of the user fills.
const CATEGORY: &str = "everything";
const CATEGORY_STREAM: &str = "$ce-everything";

fn event(event: NewEvent) -> eventstore::NewEvent {
    eventstore::NewEvent {
        id: event.id.parse().unwrap(),
        event_type: event.event_type,
        json: false,
        data: event.data,
        metadata: event.metadata,
    }
}

/// Appends an event, and a link to it in the category.
fn append_linked(server: &Server, appended: NewEvent) -> Position {
    let stream = appended.stream_id.clone();
    let revision = server.double.append(&stream, [event(appended)]).revision.unwrap();
    let link = eventstore::NewEvent { json: false, ..eventstore::NewEvent::json("$>", format!("{revision}@{stream}")) };
    Position::new(server.double.append(CATEGORY_STREAM, [link]).revision.unwrap())
}

/// Implements a bed with a category.
macro_rules! category_bed {
    ($bed:ident, $source:ident) => {
        struct $bed(Server);

        #[async_trait]
        impl SourceBed for $bed {
            async fn new() -> Self {
                Self(Server::new())
            }

            async fn source(&self) -> Box<dyn Source> {
                Box::new($source::category(&self.0.store, CATEGORY))
            }

            async fn append(&self, events: Vec<NewEvent>) -> Vec<Position> {
                events.into_iter().map(|event| append_linked(&self.0, event)).collect()
            }
        }

        #[async_trait]
        impl Truncate for $bed {
            async fn truncate_below(&self, position: Position) {
                self.0.double.truncate_stream(CATEGORY_STREAM, position.get());
            }
        }

        #[async_trait]
        impl Cut for $bed {
            async fn cut(&self) {
                self.0.cut().await;
            }
        }
    };
}

category_bed!(PersistentCategory, PersistentSource);
category_bed!(CatchUpCategory, CatchUpSource);

/// Where an event of the whole log stands: position, stream, revision.
type Appended = (Position, String, u64);

struct WholeLog(Server, Mutex<Vec<Appended>>);

#[async_trait]
impl SourceBed for WholeLog {
    async fn new() -> Self {
        Self(Server::new(), Mutex::default())
    }

    async fn source(&self) -> Box<dyn Source> {
        Box::new(CatchUpSource::all(&self.0.store))
    }

    async fn append(&self, events: Vec<NewEvent>) -> Vec<Position> {
        let append = |appended: NewEvent| {
            let stream = appended.stream_id.clone();
            let written = self.0.double.append(&stream, [event(appended)]);
            let position = Position::new(written.position.unwrap().commit);
            self.1.lock().unwrap().push((position, stream, written.revision.unwrap()));
            position
        };
        events.into_iter().map(append).collect()
    }
}

#[async_trait]
impl Truncate for WholeLog {
    async fn truncate_below(&self, position: Position) {
        for (_, stream, revision) in self.1.lock().unwrap().iter().filter(|(at, ..)| *at < position) {
            assert!(self.0.double.remove_event(stream, *revision));
        }
    }
}

#[async_trait]
impl Cut for WholeLog {
    async fn cut(&self) {
        self.0.cut().await;
    }
}

mod persistent_category {
    scriba_testing::source_conformance!(
        super::PersistentCategory: filters, head, passed_over, several, any_bytes, metadata, long_ids, nul_in_ids, revisions,
        times, keeps_position, one_place, truncate, cut
    );
}

mod catch_up_category {
    scriba_testing::source_conformance!(
        super::CatchUpCategory: exact_start, filters, head, passed_over, several, any_bytes, metadata, long_ids, nul_in_ids,
        revisions, times, truncate, cut
    );
}

mod whole_log {
    scriba_testing::source_conformance!(
        super::WholeLog: exact_start, filters, head, passed_over, several, any_bytes, metadata, long_ids, nul_in_ids, revisions,
        times, truncate, cut
    );
}
