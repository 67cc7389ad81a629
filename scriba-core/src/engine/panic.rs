//! Panics of handlers, caught with message and place.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Once;
use std::task::{Context, Poll};

thread_local! {
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
    static PLACE: RefCell<Option<Place>> = const { RefCell::new(None) };
}

/// A caught panic.
#[derive(Debug)]
pub(crate) struct Panic {
    /// What was said.
    pub(crate) message: String,
    /// Where; `None` where the panic hook was replaced after [`note_places`].
    pub(crate) place: Option<Place>,
}

/// Where a handler panicked.
#[derive(Debug)]
pub(crate) struct Place {
    location: String,
    /// Captured where `RUST_BACKTRACE` asks for it, and not resolved: that takes long.
    backtrace: Backtrace,
}

impl Place {
    /// The place as text. Resolves the backtrace on a thread of its own, since that may take a second.
    pub(crate) async fn resolve(self) -> String {
        if self.backtrace.status() != BacktraceStatus::Captured {
            return self.location;
        }
        let Self { location, backtrace } = self;
        let resolved = tokio::task::spawn_blocking(move || format!("{location}\n{backtrace}")).await;
        resolved.unwrap_or_else(|error| format!("the backtrace could not be resolved: {error}"))
    }
}

/// Polls a future and turns a panic into a value. The place is known only if [`note_places`] was called.
pub(crate) struct Guarded<'a, F>(pub(crate) Pin<&'a mut F>);

impl<F: Future> Future for Guarded<'_, F> {
    type Output = Result<F::Output, Panic>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let before = IN_HANDLER.replace(true);
        let polled = catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(cx)));
        IN_HANDLER.set(before);
        match polled {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(payload) => Poll::Ready(Err(Panic { message: message_of(payload.as_ref()), place: PLACE.take() })),
        }
    }
}

/// The message of a panic's payload.
pub(crate) fn message_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Has the process's panic hook note where a handler panicked, before it does what it did so far. Once a process.
pub(crate) fn note_places() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if IN_HANDLER.get() {
                let location = info.location().map_or_else(String::new, |location| format!("at {location}"));
                PLACE.set(Some(Place { location, backtrace: Backtrace::capture() }));
            }
            before(info);
        }));
    });
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn a_panic_becomes_a_value_with_message_and_place() {
        note_places();
        let panics = pin!(async {
            tokio::task::yield_now().await;
            panic!("no balance for {}", 7)
        });
        let panic: Result<(), _> = Guarded(panics).await;
        let panic = panic.expect_err("it panics");
        assert_eq!(panic.message, "no balance for 7");
        let place = panic.place.expect("the hook has seen it").resolve().await;
        assert!(place.contains("engine/panic.rs:"), "{place}");
    }
}
