//! A server that goes away and comes back, with another leader, with other passwords, or ends what should go on.

use std::panic::PanicHookInfo;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use scriba_core::{ProjectionOptions, Scriba, State};
use tokio::time::{Instant, sleep};

use super::stage::{Gate, Kind, Ledger, Stage, Watched, assert_says, eventually, millis, source, store_at};

/// Case A7.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_down_for_a_while_is_asked_ever_less_often_and_then_read_on() {
    let goes_on = async |kind| {
        let stage = Stage::new().await;
        stage.append(10);
        let watched = Watched::new(stage.source(kind));
        let node = stage.start_from(watched.clone(), &Ledger::new()).await;
        stage.conserved(&node).await;
        stage.server.stop();
        let down = Instant::now();
        eventually("it was asked 8 times", || watched.asked_since(down).len() >= 8).await;
        let asked = watched.asked_since(down);
        let waits: Vec<Duration> = asked.windows(2).map(|pair| pair[1] - pair[0]).collect();
        // Waits double from 10 ms, and are shortened by up to a half.
        assert!(waits[6] >= millis(320), "{kind:?}: {waits:?}");
        assert!(waits.iter().sum::<Duration>() >= millis(635), "{kind:?}: {waits:?}");
        let info = node.info();
        assert_eq!(info.state, State::Initializing, "not running while it does nothing");
        assert!(info.degraded_since.is_some() && info.last_error.is_some());
        stage.append(10);
        stage.server.start_again();
        stage.conserved(&node).await;
        eventually("it is well again", || node.info().is_ready()).await;
        node.stop().await;
    };
    tokio::join!(goes_on(Kind::Persistent), goes_on(Kind::CatchUp));
}

/// Case A7.
#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_followed_to_and_fro_without_a_restart() {
    for kind in Kind::BOTH {
        let stage = Stage::new().await;
        stage.append(10);
        let follower = stage.server.start_follower().unwrap();
        let node = stage.start(kind, &Ledger::new()).await;
        stage.conserved(&node).await;
        for (from, to) in [(&stage.server, &follower), (&follower, &stage.server)] {
            from.move_leader_to(to);
            stage.append(10);
            stage.conserved(&node).await;
            // A new subscription finds its way too.
            from.cut_connections();
            to.cut_connections();
            stage.append(10);
            stage.conserved(&node).await;
        }
        assert_eq!(node.info().state, State::Running);
        node.stop().await;
    }
}

/// Case A7.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_whose_leader_dies_is_read_on_from_the_next_one() {
    for kind in Kind::BOTH {
        let stage = Stage::new().await;
        stage.append(10);
        let follower = stage.server.start_follower().unwrap();
        let cluster = store_at("", &[stage.server.address(), follower.address()]);
        let node = stage.start_from(source(&cluster, kind), &Ledger::new()).await;
        stage.conserved(&node).await;
        stage.server.move_leader_to(&follower);
        stage.server.stop();
        stage.append(10);
        stage.conserved(&node).await;
        assert_eq!(node.info().state, State::Running);
        node.stop().await;
    }
}

/// Case A7.
#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_is_wrong_halts_with_the_reason_and_the_right_one_goes_on() {
    for kind in Kind::BOTH {
        let stage = Stage::new().await;
        stage.append(10);
        let by = |password: &str| source(&store_at(&format!("reader:{password}@"), &[stage.server.address()]), kind);
        stage.server.require_credentials("reader", "first");
        // Wrong from the beginning: it does not even start.
        let refused =
            Scriba::new().start(Ledger::new(), by("wrong"), stage.target.clone(), ProjectionOptions::default()).await;
        assert_says(&refused.unwrap_err().to_string(), &["access denied", "correct user and password"]);

        let watched = Watched::new(by("first"));
        let node = stage.start_from(watched.clone(), &Ledger::new()).await;
        stage.conserved(&node).await;
        // Wrong from now on.
        stage.server.require_credentials("reader", "second");
        stage.append(10);
        stage.server.cut_connections();
        assert_says(&node.halted().await, &["access denied", "correct user and password", "the store"]);
        let halted = Instant::now();
        sleep(millis(500)).await;
        assert!(watched.asked_since(halted).is_empty(), "{kind:?}: it is not tried again");
        assert!(!node.info().is_live());

        node.stop().await;
        node.start(by("second"), &stage, &Ledger::new()).await;
        stage.conserved(&node).await;
        node.stop().await;
    }
}

/// Panics of this process that are neither of the client crate nor of a test that fails.
fn panics_of_ours() -> usize {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            let file = info.location().map_or("", |location| location.file());
            if !file.contains("kurrentdb") && !file.contains("tests/cases") {
                PANICS.fetch_add(1, Ordering::SeqCst);
            }
            before(info);
        }));
    });
    PANICS.load(Ordering::SeqCst)
}

/// The time on processors of the threads with a name.
fn processor_time(name: &str) -> Duration {
    // In user and kernel mode, in hundredths of a second.
    let time_of = |stat: &str| -> u64 {
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread may end while it is looked at.
    let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("stat")).ok());
    let hundredths: u64 = stats.filter(|stat| stat.contains(&format!("({name})"))).map(|stat| time_of(&stat)).sum();
    millis(hundredths * 10)
}

/// Case A10.
#[test]
fn streams_that_the_server_ends_as_if_all_were_well_are_opened_again_with_growing_waits() {
    const THREADS: &str = "a10";
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name(THREADS)
        .enable_all()
        .build()
        .unwrap();
    panics_of_ours();
    let ends = async {
        for kind in Kind::BOTH {
            let stage = Stage::new().await;
            stage.append(10);
            let gate = Gate::shut_from(15);
            let watched = Watched::new(stage.source(kind));
            let node = stage.start_from(watched.clone(), &gate.ledger()).await;
            stage.conserved(&node).await;

            // While it waits for events, and while handlers are at work.
            stage.server.end_streams();
            stage.append(5);
            stage.conserved(&node).await;
            stage.append(5);
            eventually("handlers wait", || node.info().window.events == 5).await;
            stage.server.end_streams();
            gate.open();
            stage.conserved(&node).await;
            eventually("it is subscribed for the third time", || node.subscriptions() == 3).await;

            // Again and again, with nothing committed between.
            let mut waits = Vec::new();
            for _ in 0..7 {
                let before = node.subscriptions();
                let ended = Instant::now();
                stage.server.end_streams();
                eventually("it is subscribed again", || node.subscriptions() > before).await;
                waits.push(watched.asked_since(ended)[0] - ended);
                assert_eq!(watched.asked_since(ended).len(), 1, "{kind:?}: {waits:?}");
            }
            assert!(waits[6] >= millis(320), "{kind:?}: {waits:?}");
            // Quiet for a second: nothing spins.
            let (before, subscriptions) = (processor_time(THREADS), node.subscriptions());
            sleep(Duration::from_secs(1)).await;
            let used = processor_time(THREADS).saturating_sub(before);
            assert!(used < millis(300), "{kind:?}: {used:?} in a second of nothing");
            assert_eq!(node.subscriptions(), subscriptions, "{kind:?}");
            stage.append(5);
            stage.conserved(&node).await;
            assert_eq!(node.info().state, State::Running);
            node.stop().await;
        }
    };
    runtime.block_on(ends);
    assert_eq!(panics_of_ours(), 0);
}
