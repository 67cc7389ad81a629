use super::*;
use crate::eventstore::record::NewEvent;
use crate::eventstore::settings::{Filter, Pattern, Start};
use crate::eventstore::store::Expected;

const STREAM: &str = "orders";
const ONE: ConsumerId = ConsumerId(1);
const TWO: ConsumerId = ConsumerId(2);

fn settings() -> Settings {
    Settings {
        resolve_links: false,
        start: Start::Beginning,
        message_timeout: Duration::from_secs(30),
        max_retry_count: 2,
        checkpoint_after: Some(Duration::from_secs(2)),
        min_checkpoint_count: 10,
        max_checkpoint_count: 1_000,
        history_buffer_size: 500,
        read_batch_size: 20,
        live_buffer_size: 500,
        max_subscriber_count: 0,
        strategy: Strategy::RoundRobin,
        strategy_name: "RoundRobin".to_owned(),
        extra_statistics: false,
    }
}

fn stream() -> Source {
    Source::Stream(STREAM.into())
}

/// Revision and retries of what a consumer got.
type Got = (u64, u32);

/// A subscription under test, with its log and its clock.
struct Bed {
    store: Store,
    rules: PersistentSubscription,
    source: Source,
    now: Duration,
    got: HashMap<ConsumerId, Vec<Got>>,
    ids: HashMap<u64, Uuid>,
    checkpoints: Vec<String>,
    parked: Vec<(Found, String)>,
    dropped: Vec<ConsumerId>,
}

impl Bed {
    fn new(source: Source, settings: Settings, events: usize) -> Self {
        let mut store = Store::default();
        append(&mut store, STREAM, events);
        Self::on(store, source, settings, None)
    }

    fn on(store: Store, source: Source, settings: Settings, checkpoint: Option<Place>) -> Self {
        let now = Duration::from_secs(100);
        let rules = PersistentSubscription::load(source.clone(), settings, checkpoint, &store);
        let mut bed = Self {
            store,
            rules,
            source,
            now,
            got: HashMap::new(),
            ids: HashMap::new(),
            checkpoints: Vec::new(),
            parked: Vec::new(),
            dropped: Vec::new(),
        };
        bed.advance();
        bed
    }

    /// One consumer that takes `capacity` of as many events as there are.
    fn with_consumer(settings: Settings, events: usize, capacity: u32) -> Self {
        let mut bed = Self::new(stream(), settings, events);
        bed.connect(ONE, capacity);
        bed
    }

    fn connect(&mut self, id: ConsumerId, capacity: u32) {
        self.rules.connect(id, capacity).unwrap();
        self.advance();
    }

    fn disconnect(&mut self, id: ConsumerId) {
        self.rules.disconnect(id);
        self.advance();
    }

    fn append(&mut self, events: usize) {
        append(&mut self.store, STREAM, events);
        self.advance();
    }

    fn ack(&mut self, revisions: impl IntoIterator<Item = u64>) {
        let ids: Vec<Uuid> = revisions.into_iter().map(|revision| self.ids[&revision]).collect();
        self.rules.ack(&ids, self.now);
        self.advance();
    }

    fn nack(&mut self, revision: u64, refusal: Refusal) {
        self.rules.nack(&[self.ids[&revision]], refusal, "told so", self.now);
        self.advance();
    }

    /// Lets so many seconds pass, with a tick after each.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.rules.tick(self.now);
            self.advance();
        }
    }

    /// The same subscription after a restart of the server.
    fn restart(self) -> Self {
        let checkpoint = self.checkpoints.last().and_then(|text| Place::parse(text));
        Self::on(self.store, self.source, self.rules.settings().clone(), checkpoint)
    }

    fn advance(&mut self) {
        self.rules.advance(&self.store, self.now);
        for effect in self.rules.take_effects() {
            match effect {
                Effect::Deliver { to, event, retries } => {
                    let revision = event.original.revision;
                    self.ids.insert(revision, event.original.id);
                    self.got.entry(to).or_default().push((revision, retries));
                }
                Effect::WriteCheckpoint(place) => self.checkpoints.push(place.to_string()),
                Effect::Park { event, reason } => self.parked.push((event, reason)),
                Effect::Drop(id) => self.dropped.push(id),
            }
        }
    }

    /// What a consumer got since the last look.
    fn got(&mut self, id: ConsumerId) -> Vec<Got> {
        self.got.remove(&id).unwrap_or_default()
    }

    fn parked(&self) -> Vec<u64> {
        self.parked.iter().map(|(event, _)| event.original.revision).collect()
    }
}

fn append(store: &mut Store, stream: &str, events: usize) {
    let events = (0..events).map(|_| NewEvent::json("Placed", "{}")).collect();
    store.append(stream, Expected::Any, events).unwrap();
}

fn first_time(revisions: std::ops::Range<u64>) -> Vec<Got> {
    revisions.map(|revision| (revision, 0)).collect()
}

mod delivery {
    use super::*;

    #[test]
    fn a_consumer_holds_no_more_than_its_buffer() {
        let mut bed = Bed::with_consumer(settings(), 100, 4);
        assert_eq!(bed.got(ONE), first_time(0..4));
        bed.ack([2]);
        assert_eq!(bed.got(ONE), first_time(4..5));
        assert_eq!(bed.rules.stats().outstanding, 4);
    }

    #[test]
    fn events_are_read_as_far_as_the_buffer_of_the_group_goes() {
        let bed = Bed::new(stream(), Settings { history_buffer_size: 50, ..settings() }, 200);
        assert_eq!(bed.rules.stats().buffered, 50);
        assert!(bed.rules.stats().behind);
    }

    #[test]
    fn events_that_come_later_follow() {
        let mut bed = Bed::with_consumer(settings(), 0, 10);
        bed.append(3);
        assert_eq!(bed.got(ONE), first_time(0..3));
    }

    #[test]
    fn start_is_inclusive_and_the_end_is_behind_what_is_there() {
        let at = |start| {
            let mut bed = Bed::with_consumer(Settings { start, ..settings() }, 5, 10);
            bed.append(1);
            bed.got(ONE).first().copied()
        };
        assert_eq!(at(Start::Beginning), Some((0, 0)));
        assert_eq!(at(Start::At(Place::Revision(3))), Some((3, 0)));
        assert_eq!(at(Start::End), Some((5, 0)));
    }

    #[test]
    fn a_group_admits_as_many_consumers_as_its_settings_say() {
        let mut bed = Bed::new(stream(), Settings { max_subscriber_count: 1, ..settings() }, 0);
        bed.connect(ONE, 10);
        assert_eq!(bed.rules.connect(TWO, 10), Err(Full));
        bed.disconnect(ONE);
        assert_eq!(bed.rules.connect(TWO, 10), Ok(()));
    }

    #[test]
    fn round_robin_takes_turns() {
        let mut bed = Bed::new(stream(), settings(), 0);
        bed.connect(ONE, 10);
        bed.connect(TWO, 10);
        bed.append(4);
        assert_eq!((bed.got(ONE), bed.got(TWO)), (vec![(0, 0), (2, 0)], vec![(1, 0), (3, 0)]));
    }

    #[test]
    fn dispatch_to_single_fills_one_consumer_before_the_next() {
        let mut bed = Bed::new(stream(), Settings { strategy: Strategy::DispatchToSingle, ..settings() }, 0);
        bed.connect(ONE, 3);
        bed.connect(TWO, 3);
        bed.append(4);
        assert_eq!((bed.got(ONE), bed.got(TWO)), (first_time(0..3), first_time(3..4)));
        bed.ack([0]);
        bed.append(3);
        assert_eq!((bed.got(TWO), bed.got(ONE)), (first_time(4..6), first_time(6..7)));
    }

    #[test]
    fn pinned_gives_all_of_a_stream_to_one_consumer() {
        let settings = Settings { strategy: Strategy::Pinned, ..settings() };
        let mut bed = Bed::new(Source::Stream("$ce-order".into()), settings, 0);
        bed.connect(ONE, 100);
        bed.connect(TWO, 100);
        for number in 0..20 {
            append(&mut bed.store, &format!("order-{}", number % 5), 1);
        }
        bed.advance();
        let holders: Vec<_> = [ONE, TWO].map(|id| bed.got(id)).into();
        assert_eq!(holders.iter().map(Vec::len).sum::<usize>(), 20);
        for got in holders {
            // Link number n is of stream n % 5, so a consumer has all four of a stream or none.
            let count = |stream: u64| got.iter().filter(|(revision, _)| revision % 5 == stream).count();
            assert!((0..5).all(|stream| [0, 4].contains(&count(stream))), "{got:?}");
        }
    }

    #[test]
    fn a_filter_leaves_out_what_it_does_not_match() {
        let filter = Filter::EventType(Pattern::Prefix(vec!["Placed".to_owned()]));
        let mut bed = Bed::new(Source::All(filter), settings(), 3);
        bed.connect(ONE, 100);
        // The links of `$et-Placed` are in the log too.
        assert_eq!(bed.got(ONE), first_time(0..3));
    }

    #[test]
    fn links_are_resolved_when_the_settings_say_so() {
        let mut store = Store::default();
        append(&mut store, "order-1", 2);
        let settings = Settings { resolve_links: true, ..settings() };
        let source = Source::Stream("$ce-order".into());
        let mut rules = PersistentSubscription::load(source, settings, None, &store);
        rules.connect(ONE, 10).unwrap();
        rules.advance(&store, Duration::ZERO);
        let effects = rules.take_effects();
        let Effect::Deliver { event, .. } = &effects[1] else { panic!("{effects:?}") };
        assert_eq!(&*event.event.as_ref().unwrap().stream, "order-1");
        assert_eq!(&*event.original.stream, "$ce-order");
        rules.ack(&[event.original.id], Duration::ZERO);
        assert_eq!(rules.stats().outstanding, 1);
    }

    #[test]
    fn a_second_event_of_an_id_costs_its_consumer_a_place_for_good() {
        let mut bed = Bed::with_consumer(settings(), 0, 3);
        let twin = NewEvent::json("Placed", "{}");
        bed.store.append(STREAM, Expected::Any, vec![twin.clone(), twin]).unwrap();
        bed.advance();
        assert_eq!(bed.got(ONE), first_time(0..2));
        bed.ack([0]);
        let stats = bed.rules.consumers().next().unwrap();
        assert_eq!((bed.rules.stats().outstanding, stats.free), (0, 2));
    }
}

mod settling {
    use super::*;

    #[test]
    fn acks_come_in_any_order_and_unknown_ones_mean_nothing() {
        let mut bed = Bed::with_consumer(settings(), 5, 5);
        bed.ack([3, 1]);
        bed.rules.ack(&[Uuid::new_v4()], bed.now);
        assert_eq!(bed.rules.stats().outstanding, 3);
        bed.ack([1]);
        assert_eq!(bed.rules.stats().outstanding, 3);
    }

    #[test]
    fn retry_sends_an_event_again_until_it_is_parked() {
        let mut bed = Bed::with_consumer(settings(), 1, 5);
        bed.nack(0, Refusal::Retry);
        bed.nack(0, Refusal::Retry);
        assert_eq!(bed.got(ONE), [(0, 0), (0, 1), (0, 2)]);
        bed.nack(0, Refusal::Retry);
        assert_eq!(bed.got(ONE), []);
        assert_eq!((bed.parked(), bed.parked[0].1.as_str()), (vec![0], "Reached retry count of 2"));
        assert_eq!(bed.rules.stats().outstanding, 0);
    }

    #[test]
    fn without_retries_the_first_one_parks() {
        let mut bed = Bed::with_consumer(Settings { max_retry_count: 0, ..settings() }, 1, 5);
        bed.nack(0, Refusal::Retry);
        assert_eq!(bed.parked(), [0]);
    }

    #[test]
    fn park_parks_with_its_reason() {
        let mut bed = Bed::with_consumer(settings(), 2, 5);
        bed.nack(1, Refusal::Park);
        assert_eq!(bed.parked(), [1]);
        assert_eq!(bed.parked[0].1, "Client explicitly NAK'ed message.\ntold so");
    }

    #[test]
    fn skip_and_stop_count_as_done() {
        let mut bed = Bed::with_consumer(settings(), 2, 5);
        bed.nack(0, Refusal::Skip);
        bed.nack(1, Refusal::Stop);
        assert_eq!(bed.rules.stats().outstanding, 0);
        assert_eq!((bed.parked(), bed.got(ONE)), (vec![], first_time(0..2)));
        assert_eq!(bed.rules.consumers().count(), 1);
    }

    #[test]
    fn what_goes_out_again_goes_before_new_events_in_order() {
        let mut bed = Bed::with_consumer(settings(), 10, 4);
        bed.got(ONE);
        bed.rules.nack(&[bed.ids[&2], bed.ids[&0]], Refusal::Retry, "", bed.now);
        bed.ack([1]);
        assert_eq!(bed.got(ONE), [(0, 1), (2, 1), (4, 0)]);
    }

    #[test]
    fn replayed_events_go_out_as_new_and_keep_their_turn_among_those_that_go_out_again() {
        let mut bed = Bed::with_consumer(settings(), 3, 2);
        bed.got(ONE);
        bed.nack(0, Refusal::Park);
        assert_eq!(bed.got(ONE), [(2, 0)]);
        let (parked, _) = bed.parked.remove(0);
        bed.rules.replay([parked]);
        bed.rules.nack(&[bed.ids[&2]], Refusal::Retry, "", bed.now);
        bed.advance();
        assert_eq!(bed.got(ONE), [(0, 0)]);
        bed.ack([1]);
        assert_eq!(bed.got(ONE), [(2, 1)]);
    }
}

mod timeouts {
    use super::*;

    #[test]
    fn an_event_held_too_long_goes_out_again_behind_those_the_consumer_has() {
        let mut bed = Bed::with_consumer(settings(), 1, 5);
        bed.pass(20);
        bed.append(1);
        assert_eq!(bed.got(ONE), first_time(0..2));
        bed.pass(9);
        assert_eq!(bed.got(ONE), []);
        bed.pass(1);
        assert_eq!(bed.got(ONE), [(0, 1)]);
    }

    #[test]
    fn an_event_out_of_time_once_too_often_is_parked() {
        let mut bed = Bed::with_consumer(settings(), 1, 5);
        bed.pass(90);
        assert_eq!(bed.got(ONE), [(0, 0), (0, 1), (0, 2)]);
        assert_eq!(bed.parked(), [0]);
    }

    #[test]
    fn a_timeout_of_zero_is_over_at_the_next_tick() {
        let mut bed = Bed::with_consumer(Settings { message_timeout: Duration::ZERO, ..settings() }, 1, 5);
        bed.pass(1);
        assert_eq!(bed.got(ONE), [(0, 0), (0, 1)]);
    }

    #[test]
    fn an_ack_after_the_timeout_and_before_the_next_delivery_has_no_effect() {
        let mut bed = Bed::with_consumer(settings(), 1, 1);
        bed.now += Duration::from_secs(30);
        bed.rules.tick(bed.now);
        bed.rules.ack(&[bed.ids[&0]], bed.now);
        bed.advance();
        assert_eq!(bed.got(ONE), [(0, 0), (0, 1)]);
    }
}

mod leaving {
    use super::*;

    #[test]
    fn what_a_consumer_held_goes_to_the_next_in_order() {
        let mut bed = Bed::with_consumer(settings(), 10, 5);
        bed.ack([1, 3]);
        bed.disconnect(ONE);
        assert_eq!(bed.rules.stats().to_retry, 5);
        bed.connect(TWO, 6);
        assert_eq!(bed.got(TWO), [(0, 1), (2, 1), (4, 1), (5, 1), (6, 1), (7, 0)]);
    }

    #[test]
    fn no_number_of_departures_parks_but_the_next_timeout_does() {
        let mut bed = Bed::with_consumer(settings(), 1, 5);
        for _ in 0..12 {
            bed.disconnect(ONE);
            bed.connect(ONE, 5);
        }
        assert_eq!(bed.got(ONE).last(), Some(&(0, 12)));
        assert_eq!(bed.parked(), [0_u64; 0]);
        bed.pass(30);
        assert_eq!(bed.parked(), [0]);
    }

    #[test]
    fn dropped_consumers_are_told_after_what_they_were_sent() {
        let mut bed = Bed::new(stream(), settings(), 2);
        bed.rules.connect(ONE, 5).unwrap();
        bed.rules.advance(&bed.store, bed.now);
        bed.rules.drop_consumers();
        let effects = bed.rules.take_effects();
        assert!(matches!(effects.last(), Some(Effect::Drop(ONE))), "{effects:?}");
        assert_eq!(effects.len(), 3);
    }

    #[test]
    fn a_tombstone_on_the_stream_drops_everybody_until_a_restart_and_after() {
        let mut bed = Bed::with_consumer(settings(), 1, 5);
        bed.store.tombstone(STREAM, Expected::Any).unwrap();
        bed.advance();
        assert_eq!(bed.dropped, [ONE]);
        bed.connect(TWO, 5);
        assert_eq!(bed.dropped, [ONE, TWO]);
        assert_eq!(bed.got(TWO), []);
    }
}

mod checkpoints {
    use super::*;

    /// A consumer that holds all of `events`.
    fn bed(settings: Settings, events: usize) -> Bed {
        Bed::with_consumer(settings, events, 10_000)
    }

    #[test]
    fn fewer_than_the_minimum_are_never_written() {
        let mut bed = bed(settings(), 20);
        bed.ack(0..9);
        bed.pass(60);
        assert_eq!(bed.checkpoints, [""; 0]);
    }

    #[test]
    fn the_minimum_is_written_at_a_tick_and_the_next_after_the_time() {
        let mut bed = bed(settings(), 30);
        bed.ack(0..10);
        assert_eq!(bed.checkpoints, [""; 0]);
        bed.pass(1);
        assert_eq!(bed.checkpoints, ["9"]);
        bed.ack(10..20);
        bed.pass(1);
        assert_eq!(bed.checkpoints, ["9"]);
        bed.pass(1);
        assert_eq!(bed.checkpoints, ["9", "19"]);
        bed.pass(10);
        assert_eq!(bed.checkpoints, ["9", "19"]);
    }

    #[test]
    fn the_maximum_is_written_at_once() {
        let mut bed = bed(Settings { max_checkpoint_count: 15, ..settings() }, 20);
        bed.ack(0..14);
        assert_eq!(bed.checkpoints, [""; 0]);
        bed.ack([14]);
        assert_eq!(bed.checkpoints, ["14"]);
    }

    #[test]
    fn without_a_time_only_the_maximum_counts() {
        let mut bed = bed(Settings { checkpoint_after: None, max_checkpoint_count: 15, ..settings() }, 20);
        bed.ack(0..12);
        bed.pass(20);
        assert_eq!(bed.checkpoints, [""; 0]);
        bed.ack(12..15);
        assert_eq!(bed.checkpoints, ["14"]);
    }

    #[test]
    fn nothing_passes_the_lowest_event_that_is_not_done() {
        let mut bed = bed(settings(), 40);
        bed.ack((0..40).filter(|revision| *revision != 12));
        bed.pass(5);
        assert_eq!(bed.checkpoints, ["11"]);
        bed.ack([12]);
        bed.pass(5);
        assert_eq!(bed.checkpoints, ["11", "39"]);
    }

    #[test]
    fn an_event_that_waits_to_go_out_again_is_not_passed() {
        let mut bed = bed(settings(), 40);
        bed.disconnect(ONE);
        bed.rules.connect(ONE, 1).unwrap();
        bed.advance();
        bed.ack([0]);
        bed.pass(5);
        assert_eq!(bed.checkpoints, [""; 0]);
    }

    #[test]
    fn parked_events_are_passed() {
        let mut bed = bed(settings(), 12);
        for revision in 0..12 {
            bed.nack(revision, Refusal::Park);
        }
        bed.pass(5);
        assert_eq!(bed.checkpoints, ["11"]);
    }

    #[test]
    fn gaps_between_revisions_do_not_count() {
        let mut store = Store::default();
        append(&mut store, STREAM, 30);
        for revision in 1..25 {
            store.remove(STREAM, revision);
        }
        let mut bed = Bed::on(store, stream(), settings(), None);
        bed.connect(ONE, 100);
        bed.ack([0, 25, 26, 27, 28, 29]);
        bed.pass(10);
        assert_eq!(bed.checkpoints, [""; 0]);
    }

    #[test]
    fn a_restart_goes_on_behind_the_checkpoint() {
        let mut bed = bed(settings(), 20);
        bed.ack(0..12);
        bed.pass(2);
        bed.ack(12..15);
        let mut bed = bed.restart();
        bed.connect(ONE, 100);
        assert_eq!(bed.got(ONE), first_time(12..20));
    }

    #[test]
    fn without_a_checkpoint_a_restart_begins_at_the_start() {
        let mut bed = bed(settings(), 20);
        bed.ack(0..5);
        let mut bed = bed.restart();
        bed.connect(ONE, 100);
        assert_eq!(bed.got(ONE), first_time(0..20));
    }

    #[test]
    fn without_a_checkpoint_a_start_at_the_end_loses_what_came_before_the_restart() {
        let mut bed = bed(Settings { start: Start::End, ..settings() }, 5);
        bed.append(3);
        assert_eq!(bed.got(ONE), first_time(5..8));
        let mut bed = bed.restart();
        bed.connect(ONE, 100);
        bed.append(1);
        assert_eq!(bed.got(ONE), first_time(8..9));
    }

    #[test]
    fn when_the_event_of_the_checkpoint_is_gone_a_restart_drops_the_next_one() {
        let mut bed = bed(settings(), 20);
        bed.ack(0..12);
        bed.pass(2);
        bed.store.truncate(STREAM, 12);
        let mut bed = bed.restart();
        bed.connect(ONE, 100);
        assert_eq!(bed.got(ONE), first_time(13..20));
    }

    #[test]
    fn when_nothing_is_left_from_the_checkpoint_on_a_restart_drops_nothing() {
        let mut bed = bed(settings(), 12);
        bed.ack(0..12);
        bed.pass(2);
        bed.store.truncate(STREAM, 12);
        let mut bed = bed.restart();
        bed.connect(ONE, 100);
        bed.append(1);
        assert_eq!(bed.got(ONE), first_time(12..13));
    }

    #[test]
    fn a_subscription_to_the_log_counts_in_its_positions() {
        let mut bed = Bed::new(Source::All(Filter::None), Settings { min_checkpoint_count: 1, ..settings() }, 1);
        bed.connect(ONE, 1);
        let position = bed.store.forwards(STREAM, 0).next().unwrap().position;
        bed.ack([0]);
        bed.pass(2);
        assert_eq!(bed.checkpoints, [format!("C:{0}/P:{0}", position.commit)]);
        let mut bed = bed.restart();
        bed.connect(ONE, 1);
        let next = bed.got(ONE);
        // The link of `$et-Placed`, which is the second record.
        assert_eq!(next, [(0, 0)]);
        assert_ne!(bed.ids[&0], bed.store.forwards(STREAM, 0).next().unwrap().id);
    }
}
