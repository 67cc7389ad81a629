//! Catch-up subscriptions: what stands in a stream or the log, then what comes.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use uuid::Uuid;

use super::read::{self, Shape};
use super::{convert, refusals};
use crate::eventstore::core::Core;
use crate::eventstore::node::Node;
use crate::eventstore::proto::event_store::client::streams::{ReadResp, read_req, read_resp};
use crate::eventstore::record::{LogPosition, Record};
use crate::eventstore::settings::Filter;
use crate::eventstore::store::{Store, StreamState};

/// Records looked at under one lock, and answers that wait for the client.
const PAGE: usize = 64;
/// Records between two checkpoints of a filtered subscription whose client names no window.
const WINDOW: u32 = 32;

/// Where a subscription goes on.
#[derive(Debug)]
enum Cursor {
    Stream { name: String, next: u64 },
    All { next: LogPosition, filter: Filter },
}

struct CatchUp {
    cursor: Cursor,
    shape: Shape,
    /// Records between two checkpoints; `None` without a filter.
    checkpoint_every: Option<u64>,
    considered: u64,
    last: Option<(u64, LogPosition)>,
    live: bool,
}

pub(super) fn subscribe(
    node: Arc<Node>,
    options: read_req::Options,
) -> Result<BoxStream<'static, Result<ReadResp, Status>>, Status> {
    if options.read_direction() == read_req::options::ReadDirection::Backwards {
        return Err(Status::invalid_argument("a subscription reads forwards"));
    }
    let shape = Shape::of(&options);
    let checkpoint_every = checkpoint_every(options.filter_option.as_ref());
    let cursor = cursor(&node.core().store, options)?;
    if let Cursor::Stream { name, .. } = &cursor
        && node.core().store.state(name) == StreamState::Deleted
    {
        return Err(refusals::stream_deleted(name));
    }
    let (answers, receiver) = mpsc::channel(PAGE);
    let subscription = CatchUp { cursor, shape, checkpoint_every, considered: 0, last: None, live: false };
    tokio::spawn(subscription.run(node, answers));
    Ok(ReceiverStream::new(receiver).boxed())
}

fn cursor(store: &Store, options: read_req::Options) -> Result<Cursor, Status> {
    use read_req::options::StreamOption;
    use read_req::options::all_options::AllOption;
    use read_req::options::stream_options::RevisionOption;
    match options.stream_option {
        Some(StreamOption::Stream(of)) => {
            let name = convert::stream_name(of.stream_identifier.as_ref())?;
            let next = match of.revision_option {
                Some(RevisionOption::Revision(revision)) => revision.saturating_add(1),
                Some(RevisionOption::Start(())) => 0,
                Some(RevisionOption::End(())) => store.current(&name).map_or(0, |last| last.saturating_add(1)),
                None => return Err(Status::invalid_argument("'revision_option' is missing")),
            };
            Ok(Cursor::Stream { name, next })
        }
        Some(StreamOption::All(of)) => {
            let next = match of.all_option {
                Some(AllOption::Position(position)) => {
                    LogPosition { commit: position.commit_position, prepare: position.prepare_position }.successor()
                }
                Some(AllOption::Start(())) => LogPosition::default(),
                Some(AllOption::End(())) => store.end(),
                None => return Err(Status::invalid_argument("'all_option' is missing")),
            };
            Ok(Cursor::All { next, filter: read::filter(options.filter_option)? })
        }
        None => Err(Status::invalid_argument("'stream_option' is missing")),
    }
}

fn checkpoint_every(option: Option<&read_req::options::FilterOption>) -> Option<u64> {
    use read_req::options::FilterOption;
    use read_req::options::filter_options::Window;
    let Some(FilterOption::Filter(options)) = option else { return None };
    let window = match options.window {
        Some(Window::Max(window)) => window,
        Some(Window::Count(())) | None => WINDOW,
    };
    Some((u64::from(window) * u64::from(options.checkpoint_interval_multiplier)).max(1))
}

impl CatchUp {
    async fn run(mut self, node: Arc<Node>, answers: mpsc::Sender<Result<ReadResp, Status>>) {
        let mut changes = node.core().changes();
        let mut ended = node.ended.subscribe();
        let confirmation = read_resp::SubscriptionConfirmation { subscription_id: Uuid::new_v4().to_string() };
        let mut page = vec![Ok(convert::content(read_resp::Content::Confirmation(confirmation)))];
        loop {
            for answer in page {
                let last = answer.is_err();
                if answers.send(answer).await.is_err() || last {
                    return;
                }
            }
            // Before the look, so that a change after it wakes the wait below.
            changes.mark_unchanged();
            page = self.page(&node.core());
            if page.is_empty() {
                tokio::select! {
                    changed = changes.changed() => if changed.is_err() { return },
                    _ = ended.changed() => return,
                    () = answers.closed() => return,
                }
            }
        }
    }

    /// What is to be sent next; nothing when all is sent.
    fn page(&mut self, core: &Core) -> Vec<Result<ReadResp, Status>> {
        let store = &core.store;
        let records: Vec<Arc<Record>> = match &self.cursor {
            Cursor::Stream { name, next } => store.forwards(name, *next).take(PAGE).cloned().collect(),
            Cursor::All { next, .. } => store.all_forwards(*next).take(PAGE).cloned().collect(),
        };
        let mut page = Vec::new();
        for record in &records {
            if self.consider(record) {
                let found = store.find(record, self.shape.resolve_links);
                page.push(Ok(convert::read_event(&found, self.shape.structured_ids)));
            }
            self.considered += 1;
            if self.checkpoint_every.is_some_and(|every| self.considered.is_multiple_of(every)) {
                page.extend(self.checkpoint().map(Ok));
            }
        }
        if records.is_empty() {
            if let Cursor::Stream { name, .. } = &self.cursor
                && store.state(name) == StreamState::Deleted
            {
                page.push(Err(refusals::stream_deleted(name)));
            } else if !std::mem::replace(&mut self.live, true) {
                page.extend(self.checkpoint_every.and_then(|_| self.checkpoint()).map(Ok));
                page.push(Ok(self.caught_up()));
            }
        } else if page.is_empty() {
            // Nothing of it was wanted: look at what follows.
            return self.page(core);
        }
        page
    }

    /// Moves the cursor behind the record, and tells whether the client wants it.
    fn consider(&mut self, record: &Record) -> bool {
        self.last = Some((record.revision, record.position));
        match &mut self.cursor {
            Cursor::Stream { next, .. } => {
                *next = record.revision.saturating_add(1);
                true
            }
            Cursor::All { next, filter } => {
                *next = record.position.successor();
                filter.admits(record)
            }
        }
    }

    fn checkpoint(&self) -> Option<ReadResp> {
        let (_, position) = self.last?;
        Some(convert::content(read_resp::Content::Checkpoint(read_resp::Checkpoint {
            commit_position: position.commit,
            prepare_position: position.prepare,
            timestamp: Some(convert::now()),
        })))
    }

    fn caught_up(&self) -> ReadResp {
        let (stream_revision, position) = match &self.cursor {
            Cursor::Stream { .. } => (self.last.map(|(revision, _)| revision.cast_signed()), None),
            Cursor::All { .. } => (None, self.last.map(|(_, position)| position)),
        };
        convert::content(read_resp::Content::CaughtUp(read_resp::CaughtUp {
            timestamp: Some(convert::now()),
            stream_revision,
            position: position
                .map(|at| read_resp::Position { commit_position: at.commit, prepare_position: at.prepare }),
        }))
    }
}
