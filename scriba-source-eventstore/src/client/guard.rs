//! The way out of a call of a client crate that would never return.
//!
//! When a server ends a catch-up subscription as if all were well, `Subscription::next_subscription_event` (kurrentdb
//! 1.2.0, eventstore 4.0.0) takes the end for a message that it does not know, warns, and reads again, for ever, within one
//! poll. There is nothing in that loop that yields, nothing to cancel, and nothing of ours but the warning. So the call is
//! polled under a `tracing` dispatcher that unwinds when the warning comes again and again.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tracing::field::{Field, Visit};
use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, dispatcher};

use super::Failure;
use super::calls::Panicked;

/// So many unknown messages in one poll are none. A single one may be: a server of the future may send it.
const TOO_MANY: u32 = 100;

/// Polls what could spin.
pub(super) struct Guard {
    dispatch: Dispatch,
    unknown: Arc<AtomicU32>,
    /// Of a lone dispatcher, `tracing` asks the dispatcher of the thread that happens to meet the warning first, and keeps
    /// the answer. Two are always asked themselves.
    _second: Dispatch,
}

/// What is unwound with.
struct Spins;

impl Guard {
    /// For calls of a crate. What else the crate tells goes on to the dispatcher of now.
    pub(super) fn new(of: &'static str) -> Result<Self, Failure> {
        needs_warnings(STATIC_MAX_LEVEL)?;
        let unknown = Arc::new(AtomicU32::new(0));
        let watch = || Watch { of, unknown: unknown.clone(), on: dispatcher::get_default(Dispatch::clone) };
        Ok(Self { dispatch: Dispatch::new(watch()), _second: Dispatch::new(watch()), unknown })
    }

    /// Calls `poll`, and comes back.
    pub(super) fn poll<T>(&self, poll: impl FnOnce() -> T) -> Result<T, Failure> {
        self.unknown.store(0, Ordering::Relaxed);
        catch_unwind(AssertUnwindSafe(|| dispatcher::with_default(&self.dispatch, poll)))
            .map_err(|panic| if panic.is::<Spins>() { Failure::Ended } else { Panicked::new(&*panic).into() })
    }
}

fn needs_warnings(compiled: LevelFilter) -> Result<(), Failure> {
    if compiled >= LevelFilter::WARN {
        return Ok(());
    }
    Err(Failure::Unfit(format!(
        "the program is built without the warnings of `tracing`, by which the end of a catch-up subscription is noticed: \
         remove the cargo feature `max_level_{compiled}` or `release_max_level_{compiled}` of `tracing`"
    )))
}

/// Hands on what it is told, but for the warning. (It knows no current span: `tracing` does not export the type of the
/// answer. What the crates would do with it is to say what a span follows from.)
struct Watch {
    of: &'static str,
    unknown: Arc<AtomicU32>,
    on: Dispatch,
}

impl Watch {
    fn may_be_it(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() == Level::WARN && metadata.target().split("::").next() == Some(self.of)
    }
}

impl Subscriber for Watch {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.may_be_it(metadata) { Interest::always() } else { self.on.register_callsite(metadata) }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.may_be_it(metadata) || self.on.enabled(metadata)
    }

    /// The highest of all dispatchers counts, and the other has its own say.
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        if !self.may_be_it(event.metadata()) {
            return self.on.event(event);
        }
        let mut message = Message { is_it: false };
        event.record(&mut message);
        if message.is_it && self.unknown.fetch_add(1, Ordering::Relaxed) >= TOO_MANY {
            // Not a panic: the hook has nothing to say about it.
            resume_unwind(Box::new(Spins));
        }
        // Of a spin, the first warning is enough.
        if (!message.is_it || self.unknown.load(Ordering::Relaxed) == 1) && self.on.enabled(event.metadata()) {
            self.on.event(event);
        }
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.on.new_span(span)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        self.on.record(span, values);
    }

    fn record_follows_from(&self, span: &Id, follows: &Id) {
        self.on.record_follows_from(span, follows);
    }

    fn enter(&self, span: &Id) {
        self.on.enter(span);
    }

    fn exit(&self, span: &Id) {
        self.on.exit(span);
    }

    fn clone_span(&self, id: &Id) -> Id {
        self.on.clone_span(id)
    }

    fn try_close(&self, id: Id) -> bool {
        self.on.try_close(id)
    }
}

/// Whether an event's message is the one.
struct Message {
    is_it: bool,
}

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.is_it |= field.name() == "message" && format!("{value:?}").contains("unknown subscription message");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
    use tracing_subscriber::registry::{LookupSpan, Registry};

    use super::*;

    /// The target of the events of this test begins with it.
    const HERE: &str = "scriba_source_eventstore";

    fn guard() -> Guard {
        Guard::new(HERE).unwrap()
    }

    /// What comes of `test`, which may spin.
    fn soon<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, outcome) = mpsc::channel();
        thread::spawn(move || done.send(test()));
        outcome.recv_timeout(Duration::from_secs(10)).expect("it came back")
    }

    #[test]
    fn a_loop_that_only_warns_is_left() {
        let spin = || -> Result<(), _> {
            guard().poll(|| {
                loop {
                    tracing::warn!("Received an unknown subscription message");
                }
            })
        };
        assert_eq!(soon(spin), Err(Failure::Ended));
    }

    #[test]
    fn a_warning_that_nobody_wanted_before_is_noticed() {
        fn warn(times: u32) {
            for _ in 0..times {
                tracing::warn!("Received an unknown subscription message");
            }
        }
        warn(1);
        assert_eq!(soon(|| guard().poll(|| warn(u32::MAX))), Err(Failure::Ended));
    }

    #[test]
    fn a_warning_that_another_thread_met_first_is_noticed() {
        fn warn(times: u32) {
            for _ in 0..times {
                tracing::warn!("Received an unknown subscription message");
            }
        }
        let guard = guard();
        soon(|| warn(1));
        assert_eq!(soon(move || guard.poll(|| warn(u32::MAX))), Err(Failure::Ended));
    }

    #[test]
    fn a_few_unknown_messages_and_other_warnings_are_none_of_its_business() {
        let guard = guard();
        for _ in 0..3 {
            let polled = guard.poll(|| {
                for _ in 0..TOO_MANY {
                    tracing::warn!("Received an unknown subscription message");
                }
                for _ in 0..=TOO_MANY {
                    tracing::warn!("something else");
                    tracing::warn!(target: "others", "Received an unknown subscription message");
                }
                7
            });
            assert_eq!(polled, Ok(7));
        }
    }

    #[test]
    fn a_panic_stays_one() {
        let polled: Result<(), _> = guard().poll(|| panic!("of another kind"));
        assert_eq!(polled, Err(Failure::Dead("the client panicked: of another kind".to_owned())));
    }

    /// Writes down what it is told.
    #[derive(Clone, Default)]
    struct Told(Arc<Mutex<Vec<String>>>);

    impl Told {
        fn push(&self, what: String) {
            self.0.lock().unwrap().push(what);
        }
    }

    impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Told {
        fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
            let span = context.event_span(event).map_or("none", |span| span.name());
            self.push(format!("{} in {span}", event.metadata().level()));
        }

        fn on_close(&self, id: Id, context: Context<'_, S>) {
            self.push(format!("{} closed", context.span(&id).map_or("none", |span| span.name())));
        }
    }

    #[test]
    fn what_else_is_told_goes_on_with_its_spans() {
        let told = Told::default();
        let outer = Dispatch::new(Registry::default().with(told.clone()));
        let guard = dispatcher::with_default(&outer, guard);
        let kept = guard.poll(|| {
            let span = tracing::info_span!("short");
            span.in_scope(|| tracing::info!("inside"));
            drop(span);
            tracing::warn!("of the crate");
            for _ in 0..3 {
                tracing::warn!("Received an unknown subscription message");
            }
            tracing::info_span!("long")
        });
        let kept = kept.unwrap();
        drop(guard);
        dispatcher::with_default(&outer, || kept.in_scope(|| tracing::error!("later")));
        drop(kept);
        let told = told.0.lock().unwrap();
        let expected =
            ["INFO in short", "short closed", "WARN in none", "WARN in none", "ERROR in long", "long closed"];
        assert_eq!(*told, expected);
    }

    #[test]
    fn a_program_without_warnings_is_told_what_to_remove() {
        assert_eq!(needs_warnings(LevelFilter::WARN), Ok(()));
        assert_eq!(needs_warnings(LevelFilter::TRACE), Ok(()));
        let Err(Failure::Unfit(text)) = needs_warnings(LevelFilter::ERROR) else { panic!("not refused") };
        assert!(text.contains("`max_level_error`"), "{text}");
    }
}
