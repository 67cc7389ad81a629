//! The spans show the tree of tasks as it is. Alone in its program, because the subscriber is the program's.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use scriba_core::{
    EventMeta, Handler, HandlerResult, Projection, ProjectionId, ProjectionOptions, RawEvent, Scriba, WaitFor,
};
use scriba_testing::{MemorySource, MemoryTarget};
use tracing::span;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// The paths of all spans, from the root.
#[derive(Clone, Default)]
struct Paths(Arc<Mutex<BTreeSet<String>>>);

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Paths {
    fn on_new_span(&self, _: &span::Attributes<'_>, id: &span::Id, context: Context<'_, S>) {
        let path: Vec<&str> = context.span_scope(id).unwrap().from_root().map(|span| span.name()).collect();
        self.0.lock().unwrap().insert(path.join(" > "));
    }
}

#[derive(Projection)]
#[projection(name = "spanned")]
struct Spanned;

impl Handler for Spanned {
    type Event = RawEvent;
    type Op = u64;

    async fn handle(&self, _: RawEvent, meta: &EventMeta) -> HandlerResult<u64> {
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(meta.position.get().into())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_show_the_tree_of_tasks() {
    let paths = Paths::default();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(paths.clone())).unwrap();
    let (source, target) = (MemorySource::new(), MemoryTarget::new());
    let last = source.append("a", "Happened", "{}");
    let scriba = Scriba::new();
    scriba.start(Spanned, source, target, ProjectionOptions::default()).await.unwrap();
    let id = ProjectionId::of::<Spanned>();
    scriba.wait_for(id, WaitFor::Position(last), Duration::from_secs(10)).await.unwrap();
    scriba.shutdown().await.unwrap();
    let found = paths.0.lock().unwrap().clone();
    let expected = [
        "projection",
        "projection > keeper",
        "projection > lag",
        "projection > pipeline",
        "projection > pipeline > event",
        "projection > pipeline > reader",
        "projection > pipeline > writer",
    ];
    assert_eq!(found, expected.map(str::to_owned).into());
}
