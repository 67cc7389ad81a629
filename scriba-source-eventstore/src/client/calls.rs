//! What every call of a client crate goes through.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::timeout;

use super::Failure;

/// How long the server may take to answer. There are servers that never do just after they became leader.
pub(super) const ANSWER: Duration = Duration::from_secs(10);

/// A call that is answered in time, whatever the crate does. `what` names it.
pub(super) async fn answered<T>(
    what: &str,
    call: impl Future<Output = Result<T, Failure>> + Send,
) -> Result<T, Failure> {
    match timeout(ANSWER, caught(call)).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(panic)) => Err(panic.into()),
        Err(_) => Err(Failure::Unavailable(format!("the server did not answer within {} s: {what}", ANSWER.as_secs()))),
    }
}

/// What a call comes to, or how it panicked.
pub(super) async fn caught<T>(call: impl Future<Output = T> + Send) -> Result<T, Panicked> {
    AssertUnwindSafe(call).catch_unwind().await.map_err(|panic| Panicked::new(&*panic))
}

/// The text of a panic in a client crate.
#[derive(Debug)]
pub(super) struct Panicked(String);

impl Panicked {
    pub(super) fn new(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Self(text.unwrap_or("no text").to_owned())
    }

    /// Whether the crate was where its authors saw no way to.
    pub(super) fn is_unreachable_code(&self) -> bool {
        self.0.contains("unreachable code")
    }
}

impl From<Panicked> for Failure {
    fn from(Panicked(text): Panicked) -> Self {
        Self::Dead(format!("the client panicked: {text}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_a_failure_with_its_text() {
        let number = 5;
        let outcome: Result<(), _> = answered("a call", async { panic!("out of {number}") }).await;
        assert_eq!(outcome, Err(Failure::Dead("the client panicked: out of 5".to_owned())));
        let outcome: Result<(), _> = answered("a call", async { panic!("out of all") }).await;
        assert_eq!(outcome, Err(Failure::Dead("the client panicked: out of all".to_owned())));
    }

    #[tokio::test]
    async fn code_that_was_thought_unreachable_is_told_apart() {
        let panicked = |call| async { caught(call).await.unwrap_err().is_unreachable_code() };
        assert!(panicked(async { unreachable!() }.boxed()).await);
        assert!(!panicked(async { panic!("no") }.boxed()).await);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_waited_for_10_s() {
        let outcome: Result<(), _> = answered("a call", std::future::pending()).await;
        let said = "the server did not answer within 10 s: a call";
        assert_eq!(outcome, Err(Failure::Unavailable(said.to_owned())));
    }
}
