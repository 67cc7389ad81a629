//! A node of the double: one address, and what it does to the calls that come there.

#![expect(clippy::result_large_err, reason = "a Status is what the traits of the protocol answer with")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::sync::watch;
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::core::Core;
use super::network::Network;
use super::service::refusals;

/// How a node answers, besides what it knows.
#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "switches, each of which a test may turn alone")]
pub(crate) struct Manner {
    pub(crate) unavailable: bool,
    /// Where the leader is, when this node is not.
    pub(crate) leader: Option<SocketAddr>,
    /// User and password that are asked for.
    pub(crate) credentials: Option<(String, String)>,
    pub(crate) deny_access: bool,
    /// Calls about persistent subscriptions are never answered.
    pub(crate) mute_subscriptions: bool,
    pub(crate) swallow_acks: bool,
}

/// When a connection on which nothing comes is looked after, and when it is cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keepalive {
    pub(crate) interval: Duration,
    pub(crate) timeout: Duration,
}

impl Default for Keepalive {
    /// As the server comes.
    fn default() -> Self {
        Self { interval: Duration::from_secs(10), timeout: Duration::from_secs(10) }
    }
}

/// What the services of a node share.
pub(crate) struct Node {
    pub(crate) address: SocketAddr,
    pub(crate) core: Arc<Mutex<Core>>,
    pub(crate) manner: watch::Sender<Manner>,
    pub(crate) network: Network,
    pub(crate) keepalive: Keepalive,
    /// Raised when the streams of catch-up subscriptions have to end as if all were well.
    pub(crate) ended: watch::Sender<u64>,
}

impl Node {
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn manner(&self) -> Manner {
        self.manner.borrow().clone()
    }

    /// Whether a call may go on.
    pub(crate) fn admit(&self, metadata: &MetadataMap) -> Result<(), Status> {
        let manner = self.manner();
        let header = |name: &str| metadata.get(name).and_then(|value| value.to_str().ok());
        if manner.unavailable {
            return Err(Status::unavailable("Server Is Not Ready"));
        }
        if let Some((user, password)) = &manner.credentials {
            let wanted = format!("Basic {}", STANDARD.encode(format!("{user}:{password}")));
            if header("authorization") != Some(&wanted) {
                return Err(Status::unauthenticated("Unauthenticated"));
            }
        }
        if manner.deny_access {
            return Err(refusals::access_denied());
        }
        match manner.leader {
            Some(leader) if header("requires-leader").is_some_and(|value| value.eq_ignore_ascii_case("true")) => {
                Err(refusals::not_leader(leader))
            }
            _ => Ok(()),
        }
    }

    /// The same for calls about persistent subscriptions, which only a leader can answer.
    pub(crate) async fn admit_subscription(&self, metadata: &MetadataMap) -> Result<(), Status> {
        self.admit(metadata)?;
        if let Some(leader) = self.manner().leader {
            return Err(refusals::not_leader(leader));
        }
        if self.manner().mute_subscriptions {
            // Never answered, even if the node changes its manner: the call was forgotten.
            std::future::pending::<()>().await;
        }
        Ok(())
    }
}

/// Who calls, by the header, as `GetInfo` tells it.
pub(crate) fn user(metadata: &MetadataMap) -> String {
    let decoded = metadata
        .get("authorization")
        .and_then(|value| value.to_str().ok()?.strip_prefix("Basic "))
        .and_then(|encoded| STANDARD.decode(encoded).ok())
        .and_then(|text| String::from_utf8(text).ok());
    match decoded.as_deref().and_then(|text| text.split_once(':')) {
        Some((user, _)) => user.to_owned(),
        None => "anonymous".to_owned(),
    }
}

/// What the client calls its connection.
pub(crate) fn connection_name(metadata: &MetadataMap) -> String {
    metadata.get("connection-name").and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}
