//! What the server can do, and who is in the cluster.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use super::{Service, convert};
use crate::eventstore::proto::event_store::client::gossip::gossip_server::Gossip;
use crate::eventstore::proto::event_store::client::gossip::member_info::VNodeState;
use crate::eventstore::proto::event_store::client::gossip::{ClusterInfo, EndPoint, MemberInfo};
use crate::eventstore::proto::event_store::client::server_features::server_features_server::ServerFeatures;
use crate::eventstore::proto::event_store::client::server_features::{SupportedMethod, SupportedMethods};

/// The version that clients are told. They decide by it what they send.
const VERSION: &str = "24.10.0";

const SUBSCRIPTIONS: &str = "event_store.client.persistent_subscriptions.persistentsubscriptions";
const STREAMS: &str = "event_store.client.streams.streams";

/// Service, method and features of it.
const METHODS: [(&str, &str, &[&str]); 13] = [
    (SUBSCRIPTIONS, "create", &["stream", "all"]),
    (SUBSCRIPTIONS, "update", &["stream", "all"]),
    (SUBSCRIPTIONS, "delete", &["stream", "all"]),
    (SUBSCRIPTIONS, "read", &["stream", "all"]),
    (SUBSCRIPTIONS, "getinfo", &["stream", "all"]),
    (SUBSCRIPTIONS, "replayparked", &["stream", "all"]),
    (SUBSCRIPTIONS, "list", &["stream", "all"]),
    (SUBSCRIPTIONS, "restartsubsystem", &[]),
    (STREAMS, "read", &["position", "events"]),
    (STREAMS, "append", &[]),
    (STREAMS, "delete", &[]),
    (STREAMS, "tombstone", &[]),
    (STREAMS, "batchappend", &["deadline_duration"]),
];

#[tonic::async_trait]
impl ServerFeatures for Service {
    async fn get_supported_methods(&self, _request: Request<()>) -> Result<Response<SupportedMethods>, Status> {
        let methods = METHODS.iter().map(|(service, method, features)| SupportedMethod {
            method_name: (*method).to_owned(),
            service_name: (*service).to_owned(),
            features: features.iter().map(|feature| (*feature).to_owned()).collect(),
        });
        Ok(Response::new(SupportedMethods {
            methods: methods.collect(),
            event_store_server_version: VERSION.to_owned(),
        }))
    }
}

#[tonic::async_trait]
impl Gossip for Service {
    async fn read(&self, _request: Request<()>) -> Result<Response<ClusterInfo>, Status> {
        let leader = self.node.manner().leader;
        let own = (self.node.address, if leader.is_some() { VNodeState::Follower } else { VNodeState::Leader });
        let members = leader.map(|leader| (leader, VNodeState::Leader)).into_iter().chain([own]);
        let members = members.map(|(address, state)| MemberInfo {
            // The same at every look: a node is told by its port here.
            instance_id: Some(convert::write_uuid(Uuid::from_u64_pair(0, address.port().into()), false)),
            time_stamp: convert::now().seconds,
            state: state.into(),
            is_alive: true,
            http_end_point: Some(EndPoint { address: address.ip().to_string(), port: address.port().into() }),
        });
        Ok(Response::new(ClusterInfo { members: members.collect() }))
    }
}
