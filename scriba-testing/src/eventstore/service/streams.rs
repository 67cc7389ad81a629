//! Streams: appends, reads, deletions.

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tonic::{Request, Response, Status, Streaming};

use super::{Service, append, catch_up, convert, read, refusals};
use crate::eventstore::proto::event_store::client::streams::streams_server::Streams;
use crate::eventstore::proto::event_store::client::streams::{
    AppendReq, AppendResp, BatchAppendReq, BatchAppendResp, DeleteReq, DeleteResp, ReadReq, ReadResp, TombstoneReq,
    TombstoneResp, delete_req, delete_resp, read_req, tombstone_req, tombstone_resp,
};
use crate::eventstore::record::LogPosition;
use crate::eventstore::store::{AppendError, Expected, Store};

/// What is expected of a stream, from one of the messages that can say it.
macro_rules! expected {
    ($sent:ident, $option:expr) => {
        match $option {
            Some($sent::Revision(revision)) => Expected::Revision(revision),
            Some($sent::NoStream(())) => Expected::NoStream,
            Some($sent::StreamExists(())) => Expected::StreamExists,
            Some($sent::Any(())) => Expected::Any,
            None => return Err(Status::invalid_argument("'expected_stream_revision' is missing")),
        }
    };
}
pub(super) use expected;

#[tonic::async_trait]
impl Streams for Service {
    type ReadStream = BoxStream<'static, Result<ReadResp, Status>>;
    type BatchAppendStream = BoxStream<'static, Result<BatchAppendResp, Status>>;

    async fn read(&self, request: Request<ReadReq>) -> Result<Response<Self::ReadStream>, Status> {
        self.node.admit(request.metadata())?;
        let options = request.into_inner().options.ok_or_else(|| Status::invalid_argument("'options' is missing"))?;
        let answer = match options.count_option {
            Some(read_req::options::CountOption::Count(count)) => read::read(&self.node, options, count)?,
            Some(read_req::options::CountOption::Subscription(_)) => catch_up::subscribe(self.node.clone(), options)?,
            None => return Err(Status::invalid_argument("'count_option' is missing")),
        };
        Ok(Response::new(answer))
    }

    async fn append(&self, request: Request<Streaming<AppendReq>>) -> Result<Response<AppendResp>, Status> {
        self.node.admit(request.metadata())?;
        append::append(&self.node, request.into_inner()).await.map(Response::new)
    }

    async fn batch_append(
        &self,
        request: Request<Streaming<BatchAppendReq>>,
    ) -> Result<Response<Self::BatchAppendStream>, Status> {
        self.node.admit(request.metadata())?;
        Ok(Response::new(append::batch_append(self.node.clone(), request.into_inner()).boxed()))
    }

    async fn delete(&self, request: Request<DeleteReq>) -> Result<Response<DeleteResp>, Status> {
        use delete_req::options::ExpectedStreamRevision as Sent;
        self.node.admit(request.metadata())?;
        let options = request.into_inner().options.unwrap_or_default();
        let expected = expected!(Sent, options.expected_stream_revision);
        let stream = convert::stream_name(options.stream_identifier.as_ref())?;
        let position = self.change_stream(&stream, |store| store.delete(&stream, expected))?;
        let position = delete_resp::Position { commit_position: position.commit, prepare_position: position.prepare };
        Ok(Response::new(DeleteResp { position_option: Some(delete_resp::PositionOption::Position(position)) }))
    }

    async fn tombstone(&self, request: Request<TombstoneReq>) -> Result<Response<TombstoneResp>, Status> {
        use tombstone_req::options::ExpectedStreamRevision as Sent;
        self.node.admit(request.metadata())?;
        let options = request.into_inner().options.unwrap_or_default();
        let expected = expected!(Sent, options.expected_stream_revision);
        let stream = convert::stream_name(options.stream_identifier.as_ref())?;
        let position = self.change_stream(&stream, |store| store.tombstone(&stream, expected))?;
        let position =
            tombstone_resp::Position { commit_position: position.commit, prepare_position: position.prepare };
        Ok(Response::new(TombstoneResp { position_option: Some(tombstone_resp::PositionOption::Position(position)) }))
    }
}

impl Service {
    fn change_stream(
        &self,
        stream: &str,
        change: impl FnOnce(&mut Store) -> Result<LogPosition, AppendError>,
    ) -> Result<LogPosition, Status> {
        let mut core = self.node.core();
        let changed = change(&mut core.store).map_err(|error| match error {
            AppendError::Deleted => refusals::stream_deleted(stream),
            AppendError::WrongExpectedVersion { current } => refusals::wrong_expected_version(stream, current),
        });
        core.settle();
        changed
    }
}
