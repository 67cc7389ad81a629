//! The protocol, as generated code (`proto/README.md`).

#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::all,
    clippy::pedantic,
    clippy::unwrap_used,
    reason = "generated, and complete: it has what the double does not use"
)]

pub(crate) mod event_store {
    pub(crate) mod client {
        include!("proto/event_store.client.rs");

        pub(crate) mod gossip {
            include!("proto/event_store.client.gossip.rs");
        }
        pub(crate) mod persistent_subscriptions {
            include!("proto/event_store.client.persistent_subscriptions.rs");
        }
        pub(crate) mod server_features {
            include!("proto/event_store.client.server_features.rs");
        }
        pub(crate) mod streams {
            include!("proto/event_store.client.streams.rs");
        }
    }
}

pub(crate) mod google {
    pub(crate) mod rpc {
        include!("proto/google.rpc.rs");
    }
}
