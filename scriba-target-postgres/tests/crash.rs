//! Connections and servers lost at each step of a commit: what is said about it, and what is durable.

#![expect(clippy::unwrap_used, reason = "a test fails where it does not hold")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use scriba_core::target::{CommitError, Tables, TakeOverError};
use scriba_core::{FailureClass, Position};
use scriba_target_postgres::PgTarget;
use sqlx::postgres::PgPoolOptions;
use support::{Fixture, batch, dead, event, failure, fixture, run, seen, take_over, take_over_as};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// When a [`Proxy`] cuts a connection.
#[derive(Clone, Copy)]
enum Cut {
    /// The text does not reach the server.
    Before(&'static str),
    /// The text reaches the server, the answer does not come back.
    After(&'static str),
}

/// Stands between target and server. Once armed, it cuts a connection at a text in what the target sends.
struct Proxy {
    port: u16,
    armed: Arc<AtomicBool>,
    done: Arc<AtomicBool>,
}

impl Proxy {
    async fn start(server: u16, cut: Cut) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (armed, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let flags = (Arc::clone(&armed), Arc::clone(&done));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                tokio::spawn(forward(client, server, cut, flags.clone()));
            }
        });
        Self { port, armed, done }
    }

    fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    /// A target whose connections go through it.
    fn target(&self, fixture: &Fixture) -> PgTarget {
        let options = fixture.database.connect_options().host("127.0.0.1").port(self.port);
        PgTarget::new(PgPoolOptions::new().connect_lazy_with(options))
    }
}

async fn forward(client: TcpStream, server: TcpStream, cut: Cut, (armed, done): (Arc<AtomicBool>, Arc<AtomicBool>)) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let answers = tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_server, &mut to_client).await;
    });
    let mut buffer = vec![0; 1 << 16];
    while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
        let sent = &buffer[..read];
        let holds = |text: &str| {
            armed.load(Ordering::SeqCst) && sent.windows(text.len()).any(|window| window == text.as_bytes())
        };
        match cut {
            Cut::Before(text) if holds(text) => {
                done.store(true, Ordering::SeqCst);
                break;
            }
            Cut::After(text) if holds(text) => {
                done.store(true, Ordering::SeqCst);
                answers.abort();
                let _ = answers.await;
                to_server.write_all(sent).await.unwrap();
                // The server's end stays open while it works, so that it does not notice.
                sleep(Duration::from_millis(300)).await;
                return;
            }
            _ => to_server.write_all(sent).await.unwrap(),
        }
    }
    answers.abort();
}

/// Commits one batch (event 1 applied, event 2 dead-lettered) through a proxy that cuts.
async fn commit_through(cut: Cut) -> (Fixture, CommitError) {
    let fixture = fixture().await;
    let proxy = Proxy::start(fixture.database.connect_options().get_port(), cut).await;
    let mut taken = take_over(&proxy.target(&fixture)).await;
    proxy.arm();
    let entries = vec![seen(1), dead(event(2), failure("decode"))];
    let error = taken.committer.commit(&batch(&taken.checkpoint, entries)).await.unwrap_err();
    assert!(proxy.done.load(Ordering::SeqCst), "the proxy has cut");
    (fixture, error)
}

/// Takes over, which settles what is in doubt, and says whether the batch is there, all of it or nothing.
async fn durable(fixture: &Fixture) -> bool {
    let watermark = take_over(&fixture.target).await.checkpoint.watermark;
    let letters = fixture.target.dead_letter_stats(&support::id()).await.unwrap().total;
    match (watermark, &*fixture.seen().await, letters) {
        (None, [], 0) => false,
        (Some(watermark), [1], 1) if watermark == Position::new(2) => true,
        other => panic!("half a batch: {other:?}"),
    }
}

#[tokio::test]
async fn a_connection_lost_before_commit_was_sent_has_written_nothing() {
    for text in ["scriba_advance", "INSERT INTO seen", "scriba_readable_json"] {
        for cut in [Cut::Before(text), Cut::After(text)] {
            let (fixture, error) = commit_through(cut).await;
            let CommitError::Failed(error) = error else { panic!("{text}: {error:?}") };
            assert_eq!(error.class, FailureClass::TransientServer, "{text}: {error}");
            assert!(!durable(&fixture).await);
        }
    }
}

#[tokio::test]
async fn a_connection_lost_around_commit_is_in_doubt_and_settled_by_a_take_over() {
    for (cut, is_durable) in [(Cut::Before("COMMIT\0"), false), (Cut::After("COMMIT\0"), true)] {
        let (fixture, error) = commit_through(cut).await;
        let CommitError::Ambiguous(error) = error else { panic!("{error:?}") };
        assert_eq!(error.class, FailureClass::TransientServer, "{error}");
        assert_eq!(durable(&fixture).await, is_durable);
    }
}

#[tokio::test]
async fn a_take_over_whose_connection_is_lost_is_transient_and_the_next_one_goes_through() {
    for cut in [Cut::Before("epoch + $3"), Cut::After("epoch + $3"), Cut::Before("COMMIT\0"), Cut::After("COMMIT\0")] {
        let fixture = fixture().await;
        let proxy = Proxy::start(fixture.database.connect_options().get_port(), cut).await;
        proxy.arm();
        let lost = take_over_as(&proxy.target(&fixture), None, Duration::from_secs(30)).await;
        let Err(TakeOverError::Target(error)) = lost else { panic!("taken over") };
        assert_eq!(error.class, FailureClass::TransientServer, "{error}");
        assert!(take_over(&fixture.target).await.checkpoint.epoch >= 1);
    }
}

#[tokio::test]
async fn a_terminated_backend_is_transient_and_has_written_nothing() {
    let fixture = fixture().await;
    let mut taken = take_over(&fixture.target).await;
    let slow = batch(&taken.checkpoint, vec![seen(1), run(2, "SELECT pg_sleep(30)")]);
    let committing = tokio::spawn(async move { taken.committer.commit(&slow).await });
    let terminated = async {
        loop {
            let found: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM (SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                 WHERE datname = current_database() AND application_name = 'scriba orders v3' \
                 AND wait_event = 'PgSleep') AS t",
            )
            .fetch_one(&fixture.pool)
            .await
            .unwrap();
            if found > 0 {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), terminated).await.unwrap();
    let CommitError::Failed(error) = committing.await.unwrap().unwrap_err() else { panic!("not failed") };
    assert_eq!((error.class, error.code.as_deref()), (FailureClass::TransientServer, Some("57P01")));
    assert!(fixture.seen().await.is_empty());
    assert_eq!(fixture.stored().await.watermark, None);
}

#[tokio::test]
async fn a_statement_that_outlasts_the_limit_and_a_lock_that_does_are_transient() {
    let fixture = fixture().await;
    let owner = support::owner("a");
    let lease = Duration::from_millis(900);
    let mut taken = take_over_as(&fixture.target, Some(&owner), lease).await.unwrap();
    let slow = batch(&taken.checkpoint, vec![run(1, "SELECT pg_sleep(30)")]);
    let CommitError::Failed(error) = taken.committer.commit(&slow).await.unwrap_err() else { panic!("not failed") };
    assert_eq!((error.class, error.code.as_deref()), (FailureClass::TransientStatement, Some("57014")));

    let mut taken = take_over_as(&fixture.target, Some(&owner), lease).await.unwrap();
    let mut holding = fixture.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE seen").execute(&mut *holding).await.unwrap();
    let blocked = batch(&taken.checkpoint, vec![seen(1)]);
    let CommitError::Failed(error) = taken.committer.commit(&blocked).await.unwrap_err() else { panic!("not failed") };
    assert_eq!(error.class, FailureClass::TransientStatement, "{error}");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_transient_and_named() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let options = sqlx::postgres::PgConnectOptions::new().host("127.0.0.1").port(port);
    let target =
        PgTarget::new(PgPoolOptions::new().acquire_timeout(Duration::from_millis(300)).connect_lazy_with(options));
    let Err(TakeOverError::Target(error)) = take_over_as(&target, None, Duration::from_secs(30)).await else {
        panic!("taken over")
    };
    assert_eq!(error.class, FailureClass::TransientServer);
    assert!(error.message.contains(&format!("127.0.0.1:{port}")), "{error}");
    assert_eq!(target.control().await.err().unwrap().class, FailureClass::TransientServer);
    assert_eq!(target.check().await.unwrap_err().class, FailureClass::TransientServer);
}
