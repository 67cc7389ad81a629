//! The services of the protocol: thin, from messages to calls of the store and the subscriptions, and back.

#![expect(clippy::result_large_err, reason = "a Status is what the traits of the protocol answer with")]

mod append;
mod catch_up;
pub(crate) mod convert;
mod features;
mod read;
pub(crate) mod refusals;
mod streams;
mod subscription_settings;
mod subscriptions;

use std::sync::Arc;

use tonic::transport::Server;
use tonic::transport::server::Router;

use super::node::Node;
use super::proto::event_store::client::gossip::gossip_server::GossipServer;
use super::proto::event_store::client::persistent_subscriptions::persistent_subscriptions_server::PersistentSubscriptionsServer;
use super::proto::event_store::client::server_features::server_features_server::ServerFeaturesServer;
use super::proto::event_store::client::streams::streams_server::StreamsServer;

/// The handlers of a node.
#[derive(Clone)]
pub(crate) struct Service {
    node: Arc<Node>,
}

pub(crate) fn router(node: Arc<Node>) -> Router {
    let keepalive = node.keepalive;
    let service = Service { node };
    Server::builder()
        .http2_keepalive_interval(Some(keepalive.interval))
        .http2_keepalive_timeout(Some(keepalive.timeout))
        .add_service(StreamsServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE))
        .add_service(PersistentSubscriptionsServer::new(service.clone()))
        .add_service(ServerFeaturesServer::new(service.clone()))
        .add_service(GossipServer::new(service))
}

/// Above the largest append, so that the refusal of an append is the one of the protocol.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;
