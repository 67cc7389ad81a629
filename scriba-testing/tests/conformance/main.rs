//! The conformance suites, on memory source and target, and on adapters that break one rule each.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use futures_util::future::BoxFuture;
use tokio::task::LocalKey;

type Rule = fn() -> BoxFuture<'static, ()>;

/// Every rule of a suite for a bed, with its name.
macro_rules! named_rules {
    (@of ($suite:ident $bed:ty) $($ability:ident { $($rule:ident)+ })+) => {
        [$($((stringify!($rule), (|| $suite::$rule::<$bed>().boxed()) as crate::Rule)),+),+]
    };
}

/// The rules that a break is caught by. Beds are told of it by the task, since they are made without arguments.
async fn caught_by<B: Copy + Send + Sync + 'static>(
    key: &'static LocalKey<B>,
    broken: B,
    rules: &[(&'static str, Rule)],
) -> Vec<&'static str> {
    let mut caught = Vec::new();
    for (name, rule) in rules {
        if tokio::spawn(key.scope(broken, rule())).await.is_err() {
            caught.push(*name);
        }
    }
    caught
}

mod broken_source;
mod broken_target;
mod source;
mod target;
