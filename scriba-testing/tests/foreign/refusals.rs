//! What a server refuses, and in which words.

use serde_json::json;

use super::bed::{Bed, GROUP};

#[test]
fn a_group_is_there_once_and_one_that_is_missing_is_told() {
    let mut bed = Bed::new(0, json!({}));
    assert_eq!(bed.create(json!({})).unwrap_err().0, "AlreadyExistsError");
    bed.call("delete_subscription", json!({})).unwrap();
    for method in ["delete_subscription", "get_subscription_info", "replay_parked_events"] {
        assert_eq!(bed.call(method, json!({})).unwrap_err().0, "NotFoundError", "{method}");
    }
}

#[test]
fn settings_that_no_server_takes_are_refused_with_their_reason() {
    let mut bed = Bed::without_group("orders");
    bed.append(1);
    let (_, message) = bed.create(json!({ "read_batch_size": 500, "history_buffer_size": 500 })).unwrap_err();
    let reason = "Specified argument was out of the range of valid values. (Parameter 'ReadBatchSize may not be greater than \
                  or equal to BufferSize')";
    assert!(message.contains(&format!("Subscription group readers on stream orders failed: '{reason}'")), "{message}");

    let at_the_end = bed.python.call("get_commit_position", json!({})).unwrap().as_u64().unwrap();
    let behind = json!({ "group_name": GROUP, "commit_position": at_the_end + 100_000 });
    let (_, message) = bed.python.call("create_subscription_to_all", behind).unwrap_err();
    let reason = "Invalid Start From position: commit position must be less than or equal to the last commit position in the \
                  transaction file.";
    assert!(message.contains(reason), "{message}");

    let (_, message) = bed.call("create_subscription_to_stream", json!({ "stream_name": "" })).unwrap_err();
    assert!(message.contains("failed: 'Bad stream name.'"), "{message}");
    let (_, message) = bed.call("create_subscription_to_stream", json!({ "stream_name": "$all" })).unwrap_err();
    assert!(message.contains("only supported over gRPC through gRPC clients"), "{message}");
}
