//! The way of the projections to the database, which can be cut: an outage, without stopping a server that may not be ours.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};
use tokio::task::{JoinHandle, JoinSet};

use crate::Result;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 64;

/// Passes connections on to the database, from a port of the loopback interface; also when this is dropped, as long as the
/// program runs.
pub(crate) struct Relay {
    database: Place,
    address: SocketAddr,
    /// While the way is open.
    serving: Option<JoinHandle<()>>,
    /// While it is cut: keeps the port, so that whoever connects is refused and nobody else gets it.
    held: Option<TcpSocket>,
}

/// Where a server listens.
#[derive(Clone)]
enum Place {
    Port(String, u16),
    Socket(PathBuf),
}

impl Relay {
    /// Opens the way to the database of a URL, and answers with the URL that goes by it.
    pub(crate) fn start(database_url: &str) -> Result<(Self, String)> {
        let options: PgConnectOptions = database_url.parse()?;
        let socket = bind((Ipv4Addr::LOCALHOST, 0).into())?;
        let address = socket.local_addr()?;
        let mut url = options.clone().host("127.0.0.1").port(address.port()).to_url_lossy();
        // It names the directory of a socket where there is one, and leaves the options out.
        url.set_host(Some("127.0.0.1"))?;
        if let Some(more) = options.get_options() {
            url.query_pairs_mut().append_pair("options", more);
        }
        let mut relay = Self { database: Place::of(&options), address, serving: None, held: Some(socket) };
        relay.restore()?;
        Ok((relay, url.into()))
    }

    /// Breaks all connections, and refuses new ones.
    pub(crate) async fn cut(&mut self) -> Result<()> {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            // The port is free once it has ended; that it was aborted is no news.
            let _ = serving.await;
            self.held = Some(bind(self.address)?);
        }
        Ok(())
    }

    /// Lets connections through again.
    pub(crate) fn restore(&mut self) -> Result<()> {
        if let Some(socket) = self.held.take() {
            self.serving = Some(tokio::spawn(serve(socket.listen(BACKLOG)?, self.database.clone())));
        }
        Ok(())
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // Or the port would be taken for a minute by the connections that were broken.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

async fn serve(listener: TcpListener, database: Place) {
    // They end with this task.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    connections.spawn(pass_on(client, database.clone()));
                }
            }
            // A connection that failed has been closed, which is all that its ends need to know.
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn pass_on(mut client: TcpStream, database: Place) -> io::Result<()> {
    client.set_nodelay(true)?;
    match database {
        Place::Port(host, port) => {
            let mut server = TcpStream::connect((host, port)).await?;
            server.set_nodelay(true)?;
            copy_bidirectional(&mut client, &mut server).await?;
        }
        Place::Socket(path) => {
            copy_bidirectional(&mut client, &mut UnixStream::connect(path).await?).await?;
        }
    }
    Ok(())
}

impl Place {
    fn of(options: &PgConnectOptions) -> Self {
        let (host, port) = (options.get_host(), options.get_port());
        let directory = options.get_socket().map(PathBuf::as_path);
        match directory.or_else(|| host.starts_with('/').then(|| Path::new(host))) {
            Some(directory) => Self::Socket(directory.join(format!(".s.PGSQL.{port}"))),
            None => Self::Port(host.trim_matches(['[', ']']).to_owned(), port),
        }
    }
}

#[cfg(test)]
mod tests {
    use scriba_testing::postgres::Postgres;
    use sqlx::{Connection, PgConnection};

    use super::*;

    #[tokio::test]
    async fn what_goes_by_the_relay_breaks_and_is_refused_until_the_way_is_open_again() -> Result<()> {
        let database = Postgres::shared().await?.create_database().await?;
        let (mut relay, url) = Relay::start(&database.url())?;
        let mut connection = PgConnection::connect(&url).await?;
        let name: String = sqlx::query_scalar("SELECT current_database()").fetch_one(&mut connection).await?;
        assert_eq!(name, database.name());

        relay.cut().await?;
        let broken = sqlx::query("SELECT 1").execute(&mut connection).await.unwrap_err();
        assert!(matches!(broken, sqlx::Error::Io(_)), "{broken:?}");
        let refused = PgConnection::connect(&url).await.unwrap_err();
        assert!(refused.to_string().contains("refused"), "{refused}");

        relay.restore()?;
        PgConnection::connect(&url).await?.ping().await?;
        Ok(())
    }

    #[test]
    fn a_server_is_found_by_its_port_or_by_its_socket() -> Result<()> {
        let place = |url: &str| Ok::<_, sqlx::Error>(Place::of(&url.parse()?));
        assert!(matches!(place("postgres://u@db:5433/x")?, Place::Port(host, 5433) if host == "db"));
        for url in ["postgres://u@%2Frun%2Fpg:5433/x", "postgres:///x?host=/run/pg&port=5433"] {
            let socket = Path::new("/run/pg/.s.PGSQL.5433");
            assert!(matches!(place(url)?, Place::Socket(path) if path == socket), "{url}");
        }
        Ok(())
    }

    #[tokio::test]
    async fn the_url_by_the_relay_says_all_that_the_first_one_says_but_the_place() -> Result<()> {
        let settings = "options=-c%20search_path%3Dbank";
        for place in ["db:5433", "%2Frun%2Fpg:5433"] {
            let (relay, url) = Relay::start(&format!("postgres://me:p%40ss@{place}/money?{settings}"))?;
            let options: PgConnectOptions = url.parse()?;
            assert!(
                matches!(Place::of(&options), Place::Port(host, port) if host == "127.0.0.1" && port == relay.address.port())
            );
            assert_eq!((options.get_username(), options.get_database()), ("me", Some("money")));
            assert_eq!(options.get_options(), Some("-c search_path=bank"));
            assert!(url.contains("me:p%40ss@"), "{url}");
        }
        Ok(())
    }
}
