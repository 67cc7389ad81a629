//! From nothing to a pipeline: take over, compare, subscribe.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::live::Live;
use super::messages::{Standing, Taken, Way, Wish};
use super::pipeline::Pipeline;
use super::trouble::{Exit, Trouble};
use super::worker::Worker;
use crate::checkpoint::{Checkpoint, LastEvent};
use crate::error::HaltReason;
use crate::event::{EventId, Events, Position};
use crate::lifecycle::{Role, State};
use crate::options::{Lease, ProjectionOptions, StartFrom};
use crate::projection::{Handler, ProjectionId};
use crate::source::{PassedOver, Place, Source, SourceError, SourceIdentity, SubscribeRequest, TypeSet};
use crate::target::{Committer, Owner, StoredLease, TakeOver, Target};
use crate::telemetry::{CheckpointLoaded, Subscribed, Telemetry};

/// How long a source may take to answer before a subscription.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often, and for how long, the holder of the lease asks for the place at a source where it seems to be taken: a server may
/// need a moment to see that the subscription before has ended.
const ASKS_AGAIN_AFTER: Duration = Duration::from_millis(100);
const ASKS_FOR: Duration = Duration::from_secs(1);

/// Everything a pipeline is made from, once for each start of the projection.
pub(crate) struct Setup<H: Handler> {
    pub(crate) id: ProjectionId,
    pub(crate) handler: Arc<H>,
    pub(crate) source: Arc<dyn Source>,
    pub(crate) target: Arc<dyn Target<H::Op>>,
    pub(crate) options: Arc<ProjectionOptions>,
    pub(crate) telemetry: Telemetry,
    pub(crate) owner: Owner,
    pub(crate) live: Arc<Live>,
    pub(crate) wish: watch::Receiver<Wish>,
}

impl<H: Handler> Setup<H> {
    /// Takes over, subscribes, says that it is up, and runs the pipeline to its end.
    pub(crate) async fn run(self: Arc<Self>, Way { up, standby }: Way) -> Exit {
        let taken = match self.take(standby).await {
            Ok(taken) => taken,
            Err(exit) => return exit,
        };
        let worker = Worker {
            handler: Arc::clone(&self.handler),
            options: Arc::clone(&self.options),
            telemetry: self.telemetry.clone(),
            wish: self.wish.clone(),
            live: Arc::clone(&self.live),
        };
        let pipeline = Pipeline::new(worker, taken, Arc::clone(&self.target), self.id.clone());
        let (heard, is_heard) = oneshot::channel();
        // A coordinator that is gone does not want to know. One that is there hears of it before the first event is handled,
        // so that nobody sees a projection that projects and is still initializing.
        if up.send(heard).is_ok() {
            let _ = is_heard.await;
        }
        pipeline.run().await
    }

    async fn take(&self, standby: Option<Standing>) -> Result<Taken<H::Op>, Exit> {
        let place = match standby {
            Some(standing) => self.be_granted(standing).await?,
            None => self.claim().await?,
        };
        self.live.trying();
        let identity = answered(self.source.identity()).await?;
        let lease = match self.options.lease {
            Lease::For(lease) => Some(lease),
            Lease::Off => None,
        };
        let event_types = H::Event::event_types();
        let request = TakeOver {
            id: &self.id,
            owner: lease.map(|_| &self.owner),
            lease: lease.unwrap_or_default(),
            handler_timeout: self.options.handler_timeout,
            initial: self.initial().await?,
            source: &identity,
            event_types,
        };
        let mut taken = self.target.take_over(request).await.map_err(Exit::from_take_over)?;
        let checkpoint = taken.checkpoint;
        self.live.taken_over(&checkpoint, identity.clone());
        self.telemetry.checkpoint_loaded(&CheckpointLoaded {
            watermark: checkpoint.watermark,
            epoch: checkpoint.epoch,
            stored: !taken.created,
        });
        if !is_same(&taken.source, &identity) {
            return Err(Exit::Halt(other_source(&taken.source, &identity)));
        }
        self.same_store(&checkpoint).await?;
        self.same_types(&checkpoint, taken.committer.as_mut()).await?;
        let after = checkpoint.watermark;
        let (in_flight, telemetry) = (self.options.in_flight_events, self.telemetry.clone());
        let request = SubscribeRequest { after, event_types, in_flight, telemetry };
        let subscription = match place {
            Some(place) => answered(place.subscribe(request)).await?,
            None => answered(self.source.subscribe(request)).await?,
        };
        let (attempts, waited) = self.live.subscribed();
        self.telemetry.subscribed(&Subscribed { after, attempts, waited });
        Ok(Taken { checkpoint, committer: taken.committer, subscription })
    }

    /// The place at a source that admits one subscriber, asked for before anything is taken over: who does not get it stands by, and
    /// must not fence off the one that has it. `None` where anybody is let in, and where there is nothing to be had yet.
    async fn claim(&self) -> Result<Option<Box<dyn Place>>, Exit> {
        if !self.source.admits_one() {
            return Ok(None);
        }
        let patience = if self.live.role() == Role::Standby { Duration::ZERO } else { ASKS_FOR };
        let give_up_at = Instant::now() + patience;
        loop {
            match self.ask().await {
                Err(Exit::Held { .. }) if Instant::now() < give_up_at => tokio::time::sleep(ASKS_AGAIN_AFTER).await,
                answer => return answer,
            }
        }
    }

    /// The place at the source, and with it the lease that another node still holds: it has lost the place, unless it has no
    /// use for it.
    async fn be_granted(&self, Standing { holder, granted }: Standing) -> Result<Option<Box<dyn Place>>, Exit> {
        if self.holder_keeps_it().await? {
            return Err(Exit::Held { holder });
        }
        let place = match self.ask().await {
            // Whoever holds the lease is the one to name, and to make what the server does not have yet.
            Ok(None) | Err(Exit::Held { .. }) => return Err(Exit::Held { holder }),
            place => place?,
        };
        // Who halts lets go of its place first and writes it down then.
        if self.holder_keeps_it().await? {
            return Err(Exit::Held { holder });
        }
        let (seized, is_seized) = oneshot::channel();
        if granted.send(seized).is_err() || is_seized.await.is_err() {
            return Err(Exit::Held { holder });
        }
        Ok(place)
    }

    /// Whether the holder of the lease keeps the projection although the place may be free.
    ///
    /// # Errors
    /// A halt where the source is another one than that of the checkpoint: its place says nothing about the holder's.
    async fn holder_keeps_it(&self) -> Result<bool, Exit> {
        let Some(stored) = self.target.stored(&self.id).await.map_err(Exit::from_target)? else { return Ok(false) };
        let identity = answered(self.source.identity()).await?;
        if !stored.is_untouched() && !is_same(&stored.source, &identity) {
            return Err(Exit::Halt(other_source(&stored.source, &identity)));
        }
        let idle = matches!(stored.state.state, State::Paused | State::Halted);
        // One without a place, as a catch-up subscription has none, cannot have lost it.
        let has_none = !stored.state.source_keeps_position;
        Ok((idle || has_none) && matches!(stored.lease, StoredLease::Held { .. }))
    }

    async fn ask(&self) -> Result<Option<Box<dyn Place>>, Exit> {
        answered(self.source.claim(&self.id, self.options.in_flight_events)).await
    }

    /// Looks whether the last event seen is still what stands at its position. One that is missing, and an empty source, prove
    /// nothing: retention may have removed them. A head below it does. (The watermark would be the wrong one to compare with: it may
    /// have gone on to positions that were drawn and never used.)
    async fn same_store(&self, checkpoint: &Checkpoint) -> Result<(), Exit> {
        let Some(last) = &checkpoint.last_event else { return Ok(()) };
        let mut inspector = answered(self.source.inspector()).await?;
        match answered(inspector.event_id_at(last.position)).await? {
            Some(found) if !is_stored_as(found.as_str(), last.id.as_str()) => {
                return Err(Exit::Halt(restored(last, &found)));
            }
            Some(_) => return Ok(()),
            None => {}
        }
        let head = answered(async {
            match inspector.head().await {
                Err(SourceError::NoHead) => Ok(None),
                head => head,
            }
        });
        match head.await?.filter(|head| *head < last.position) {
            Some(head) => Err(Exit::Halt(cut_off(last, head))),
            None => Ok(()),
        }
    }

    /// Looks whether events of types that were added to this version have been passed over already, and stores the types that
    /// are delivered from now on.
    async fn same_types(&self, checkpoint: &Checkpoint, committer: &mut dyn Committer<H::Op>) -> Result<(), Exit> {
        let listed = H::Event::event_types();
        let stored: Option<Vec<&str>> =
            checkpoint.event_types.as_ref().map(|types| types.iter().map(String::as_str).collect());
        let known = |event_type: &&str| stored.as_ref().is_none_or(|stored| stored.contains(event_type));
        let added: Vec<&str> = listed.into_iter().flatten().copied().filter(|listed| !known(listed)).collect();
        let added = match (&stored, listed) {
            (Some(stored), None) => Some(TypeSet::AllBut(stored)),
            _ => (!added.is_empty()).then_some(TypeSet::Only(&added)),
        };
        if let (Some(added), Some(watermark), false) = (added, checkpoint.watermark, self.options.accept_missed) {
            let mut inspector = answered(self.source.inspector()).await?;
            if let Some(missed) = inspector.passed_over(added, watermark).await.map_err(Exit::from_source)? {
                return Err(Exit::Halt(passed_over(&missed, watermark)));
            }
        }
        let same = match (&stored, listed) {
            (Some(stored), Some(listed)) => {
                stored.len() == listed.len() && stored.iter().all(|event_type| listed.contains(event_type))
            }
            (stored, listed) => stored.is_none() && listed.is_none(),
        };
        if same {
            Ok(())
        } else {
            committer.store_event_types(listed).await.map_err(|error| Exit::from_commit(error, None))
        }
    }

    /// The watermark of a checkpoint that has to be created: resolved before, so that it is stored with its row.
    async fn initial(&self) -> Result<Option<Position>, Exit> {
        match self.options.start_from {
            StartFrom::Beginning => Ok(None),
            StartFrom::After(position) => Ok(Some(position)),
            StartFrom::Now => {
                let stored = self.target.stored(&self.id).await.map_err(Exit::from_target)?;
                if stored.is_some_and(|stored| !stored.is_untouched()) {
                    return Ok(None);
                }
                let mut inspector = answered(self.source.inspector()).await?;
                answered(inspector.head()).await
            }
        }
    }
}

/// The answer of a source, or an outage where there is none.
async fn answered<T>(question: impl Future<Output = Result<T, SourceError>>) -> Result<T, Exit> {
    let answer = tokio::time::timeout(PATIENCE, question).await;
    let answer = answer
        .unwrap_or_else(|_| Err(SourceError::unavailable(format!("the source has not answered within {PATIENCE:?}"))));
    answer.map_err(Exit::from_source)
}

fn is_same(stored: &SourceIdentity, found: &SourceIdentity) -> bool {
    is_stored_as(&found.kind, &stored.kind) && is_stored_as(&found.fingerprint, &stored.fingerprint)
}

/// Whether a text is the one that was stored: a target that cannot hold NUL may hold its visible sign instead.
fn is_stored_as(text: &str, stored: &str) -> bool {
    text == stored || text.replace('\0', "\u{2400}") == stored
}

fn other_source(stored: &SourceIdentity, found: &SourceIdentity) -> HaltReason {
    HaltReason::new(format!(
        "the checkpoint was made from source {} {:?}, this source is {} {:?}: start the projection with the source it was made \
         from, or give it a new version to rebuild from this one",
        stored.kind, stored.fingerprint, found.kind, found.fingerprint
    ))
}

fn passed_over(missed: &PassedOver, watermark: Position) -> HaltReason {
    HaltReason::new(format!(
        "event type {:?} was added to this version, and {} events of it at or below the watermark {watermark} were passed over when it \
         was not listed, the first at the position named here: rebuild under a new version, or start with accept_missed(true) to go \
         on without them",
        missed.event_type.as_str(),
        missed.events
    ))
    .at(missed.first)
}

fn cut_off(last: &LastEvent, head: Position) -> HaltReason {
    HaltReason::new(format!(
        "event {:?} was the last one seen, and the head of the source is at {head} now, below it: the store was restored to an older state, \
         and what is appended now would be taken for seen; restore the read model and the checkpoint to before that point, or rebuild \
         under a new version",
        last.id.as_str()
    ))
    .at(last.position)
}

fn restored(last: &LastEvent, found: &EventId) -> HaltReason {
    HaltReason::new(format!(
        "event {:?} was the last one seen and now event {:?} stands at its position: the store was restored to an older state and \
         written to since; rebuild the read model from it under a new version",
        last.id.as_str(),
        found.as_str()
    ))
    .at(last.position)
}

/// The end of a pipeline whose task did not come to its end.
pub(crate) fn exit_of(ended: Result<Exit, tokio::task::JoinError>) -> Exit {
    match ended {
        Ok(exit) => exit,
        Err(error) if error.is_panic() => {
            let message = super::panic::message_of(error.into_panic().as_ref());
            Exit::Restart(Trouble::unknown(format!("the pipeline panicked: {message}")))
        }
        Err(_) => Exit::RuntimeGone,
    }
}
