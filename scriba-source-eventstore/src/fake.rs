//! A client for tests of what no double can be brought to do.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use uuid::Uuid;

use crate::client::{
    Client, Event, Failure, Feed, Follow, From, Group, GroupSettings, Membership, Original, Place, Read, Reading,
    Received,
};
use crate::group::{self, Checkpointing};

/// A server with one stream and one group.
#[derive(Default)]
pub(crate) struct FakeClient {
    /// Revisions that stand in the stream.
    pub(crate) log: Vec<u64>,
    /// What each consumer gets, one after another.
    pub(crate) pushes: Mutex<VecDeque<Vec<u64>>>,
    /// What the group has written down.
    pub(crate) checkpoint: Option<u64>,
    /// Ids that were acked.
    pub(crate) acked: Arc<Mutex<Vec<Uuid>>>,
    /// What those who join get first.
    pub(crate) joining: Mutex<VecDeque<Failure>>,
    /// The answer to the deletion of a group.
    pub(crate) deleting: Option<fn() -> Result<(), Failure>>,
}

/// The event at a revision.
pub(crate) fn received(revision: u64) -> Received {
    let id = id(revision);
    let event = Event {
        id,
        stream_id: "s".to_owned(),
        revision,
        event_type: "happened".to_owned(),
        data: Bytes::new(),
        metadata: Bytes::new(),
        occurred_at: None,
    };
    Received {
        original: Original { id, revision, place: Place { commit: revision, prepare: revision } },
        event: Some(event),
    }
}

/// The id of the event at a revision.
pub(crate) fn id(revision: u64) -> Uuid {
    Uuid::from_u64_pair(0, revision)
}

struct Answer(VecDeque<Received>);

#[async_trait]
impl Reading for Answer {
    async fn next(&mut self) -> Result<Option<Received>, Failure> {
        Ok(self.0.pop_front())
    }
}

struct Consumer {
    pushes: VecDeque<Received>,
    acked: Arc<Mutex<Vec<Uuid>>>,
}

#[async_trait]
impl Membership for Consumer {
    async fn next(&mut self) -> Result<Received, Failure> {
        match self.pushes.pop_front() {
            Some(received) => Ok(received),
            None => std::future::pending().await,
        }
    }

    async fn ack(&mut self, ids: Vec<Uuid>) -> Result<(), Failure> {
        self.acked.lock().unwrap().extend(ids);
        Ok(())
    }
}

#[async_trait]
impl Client for FakeClient {
    async fn read(&self, read: &Read) -> Result<Box<dyn Reading>, Failure> {
        let mut revisions: Vec<u64> = match read.from {
            From::At(from) => self.log.iter().copied().filter(|revision| *revision >= from).collect(),
            From::Start | From::End => self.log.clone(),
        };
        if read.backwards {
            revisions.reverse();
        }
        let count = usize::try_from(read.count).unwrap_or(usize::MAX);
        Ok(Box::new(Answer(revisions.into_iter().take(count).map(received).collect())))
    }

    async fn follow(&self, _: &Follow) -> Result<Box<dyn Feed>, Failure> {
        Err(Failure::Missing)
    }

    async fn create_group(&self, _: &Group, _: &GroupSettings) -> Result<(), Failure> {
        Err(Failure::Exists)
    }

    async fn group_settings(&self, _: &Group) -> Result<GroupSettings, Failure> {
        Ok(group::settings(None, Checkpointing::default()))
    }

    async fn group_checkpoint(&self, _: &Group) -> Result<Option<u64>, Failure> {
        Ok(self.checkpoint)
    }

    async fn delete_group(&self, _: &Group) -> Result<(), Failure> {
        self.deleting.map_or(Err(Failure::Missing), |answer| answer())
    }

    async fn join(&self, _: &Group, _: i32) -> Result<Box<dyn Membership>, Failure> {
        if let Some(failure) = self.joining.lock().unwrap().pop_front() {
            return Err(failure);
        }
        let pushes = self.pushes.lock().unwrap().pop_front().ok_or(Failure::Full)?;
        let pushes = pushes.into_iter().map(received).collect();
        Ok(Box::new(Consumer { pushes, acked: Arc::clone(&self.acked) }))
    }
}
