//! A throwaway Postgres: a real server for tests, benches and examples, started where there is none.
//!
//! Where the server comes from, first match:
//!
//! 1. the environment variable `SCRIBA_TEST_DATABASE_URL`: a server of yours, on which the named user may create
//!    databases ([`Postgres::shared`] only; the databases, named `scriba_test_…`, are left on it);
//! 2. Postgres binaries on this machine: on `PATH`, where `pg_config` says, or where Debian, Red Hat and Homebrew
//!    put them (14 or later, the highest version). The server listens on a free port of the loopback interface, keeps
//!    its data in a temporary directory, and runs as `postgres` or `nobody` when root asks for it;
//! 3. else [`PostgresError::NotFound`], which says what to install.
//!
//! The server and its directory go when the [`Postgres`] is dropped, and when the process ends, even by `kill -9`.
//!
//! # What it does not simulate
//!
//! The loss of power or of a disk (without [`PostgresOptions::durable`] nothing is ever flushed); the time that commits
//! take with `fsync`; a network, TLS and passwords (anyone on this machine can log in); locales (text sorts by bytes);
//! replicas, fail-over and poolers such as `PgBouncer`.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};
use tokio::sync::OnceCell;
use uuid::Uuid;

const URL_VARIABLE: &str = "SCRIBA_TEST_DATABASE_URL";
const OLDEST_VERSION: u32 = 14;
/// Another process may take a free port before the server does.
const PORT_TRIES: u32 = 5;
const LOG_TAIL_LINES: usize = 12;

/// A server on which tests create databases of their own.
#[derive(Debug)]
pub struct Postgres {
    /// To any database of it.
    connect: PgConnectOptions,
    /// `None` for a server that the user gave.
    keeper: Option<Arc<Mutex<Keeper>>>,
}

/// How a server of one's own is set up.
#[derive(Clone, Debug, Default)]
pub struct PostgresOptions {
    durable: bool,
    settings: Vec<(String, String)>,
}

/// Why there is no server, or why it did not do as told.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PostgresError {
    /// No server anywhere.
    #[error(
        "no PostgreSQL server found: install one (Debian, Ubuntu: `apt-get install postgresql`), or set {URL_VARIABLE} to the URL of a server on which databases may be created"
    )]
    NotFound,
    /// The environment variable does not hold the URL of a server.
    #[error("{URL_VARIABLE} is not a Postgres URL (wanted: postgres://user:password@host:port/database): {0}")]
    Url(sqlx::Error),
    /// A program of the server failed.
    #[error("the PostgreSQL server of {} could not {action}; the end of its log:\n{log}", bin.display())]
    Server {
        /// Where its programs are.
        bin: PathBuf,
        /// What it was to do.
        action: &'static str,
        /// The last lines of its log.
        log: String,
    },
    /// A server that the user gave is not ours to stop.
    #[error(
        "the server of {URL_VARIABLE} is not stopped or restarted by tests: use `Postgres::start` for one of your own"
    )]
    NotOurs,
    /// The server's process cannot be started or talked to.
    #[error("cannot run the PostgreSQL server: {0}")]
    Io(#[from] io::Error),
    /// The server refused.
    #[error("the PostgreSQL server: {0}")]
    Database(#[from] sqlx::Error),
}

/// What `unwrap` prints in a test: what to do, and not the name of a variant.
impl fmt::Debug for PostgresError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl PostgresOptions {
    /// With `fsync` and full page writes on, as a server in production has them. Without it nothing is flushed to the disk;
    /// what was committed survives a crash of the server all the same, though not one of the machine.
    #[must_use]
    pub fn durable() -> Self {
        Self { durable: true, ..Self::default() }
    }

    /// Sets a parameter of `postgresql.conf`.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    fn lines(&self) -> String {
        let flush = if self.durable { "on" } else { "off" };
        let defaults = [
            ("listen_addresses", "127.0.0.1"),
            ("max_connections", "200"),
            ("fsync", flush),
            ("full_page_writes", flush),
        ];
        let given = self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let mut lines = String::new();
        // Where a name stands twice, the last line counts.
        for (name, value) in defaults.into_iter().chain(given) {
            let value = value.replace('\\', "\\\\").replace('\'', "''");
            lines.extend([name, " = '", &value, "'\n"]);
        }
        lines
    }
}

impl Postgres {
    /// The server that all tests of this process share, started on first use.
    pub async fn shared() -> Result<&'static Self, PostgresError> {
        static SHARED: OnceCell<Postgres> = OnceCell::const_new();
        SHARED
            .get_or_try_init(|| async {
                match env::var(URL_VARIABLE) {
                    Ok(url) => Ok(Self { connect: url.parse().map_err(PostgresError::Url)?, keeper: None }),
                    Err(_) => Self::start(PostgresOptions::default()).await,
                }
            })
            .await
    }

    /// A server of one's own, from binaries on this machine.
    pub async fn start(options: PostgresOptions) -> Result<Self, PostgresError> {
        let (port, keeper) = blocking(move || {
            let mut keeper = Keeper::new(&options)?;
            Ok((keeper.start_on_free_port()?, keeper))
        })
        .await?;
        let connect = PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(port)
            .username("postgres")
            .database("postgres")
            .ssl_mode(PgSslMode::Disable);
        Ok(Self { connect, keeper: Some(Arc::new(Mutex::new(keeper))) })
    }

    /// Creates an empty database with a name of its own.
    pub async fn create_database(&self) -> Result<Database, PostgresError> {
        let name = format!("scriba_test_{}", Uuid::new_v4().simple());
        let mut connection = self.connect.connect().await?;
        // template0, because nobody can be connected to it, which would make the statement fail.
        let statement = format!("CREATE DATABASE {name} TEMPLATE template0");
        sqlx::query(AssertSqlSafe(statement)).execute(&mut connection).await?;
        connection.close().await?;
        Ok(Database { connect: self.connect.clone().database(&name) })
    }

    /// Stops the server at once, as a crash would: connections break, and what was not committed is gone.
    pub async fn stop(&self) -> Result<(), PostgresError> {
        self.keep(Keeper::stop).await
    }

    /// Starts a stopped server again, on the same port and data; stops it before, where it runs.
    pub async fn restart(&self) -> Result<(), PostgresError> {
        self.keep(|keeper| {
            keeper.stop()?;
            keeper.start(keeper.port)
        })
        .await
    }

    /// The server's process id; `None` while it is stopped, and for a server that the user gave.
    pub fn pid(&self) -> Option<u32> {
        self.keeper.as_ref().and_then(|keeper| keeper.lock().unwrap_or_else(PoisonError::into_inner).pid)
    }

    async fn keep(
        &self,
        action: impl FnOnce(&mut Keeper) -> Result<(), PostgresError> + Send + 'static,
    ) -> Result<(), PostgresError> {
        let keeper = self.keeper.clone().ok_or(PostgresError::NotOurs)?;
        blocking(move || action(&mut keeper.lock().unwrap_or_else(PoisonError::into_inner))).await
    }
}

/// A database on a throwaway server.
#[derive(Clone, Debug)]
pub struct Database {
    connect: PgConnectOptions,
}

impl Database {
    /// Its name.
    pub fn name(&self) -> &str {
        self.connect.get_database().unwrap_or_default()
    }

    /// Its URL, as any Postgres client understands it.
    pub fn url(&self) -> String {
        let mut url = self.connect.to_url_lossy();
        // The others are sqlx's own, and libpq refuses what it does not know.
        let kept: Vec<(String, String)> =
            url.query_pairs().filter(|(name, _)| name == "sslmode").map(|(n, v)| (n.into(), v.into())).collect();
        url.query_pairs_mut().clear().extend_pairs(kept);
        url.into()
    }

    /// How to connect to it.
    pub fn connect_options(&self) -> PgConnectOptions {
        self.connect.clone()
    }

    /// A pool of at most `max` connections, of which one is opened now.
    pub async fn pool(&self, max: u32) -> Result<PgPool, PostgresError> {
        Ok(PgPoolOptions::new().max_connections(max).connect_with(self.connect.clone()).await?)
    }
}

/// The script beside this file, which outlives this process for as long as it takes to clean up.
#[derive(Debug)]
struct Keeper {
    bin: PathBuf,
    child: Child,
    /// Held open for as long as the server is wanted: its end is what makes the script clean up. `None` only in `drop`.
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    dir: PathBuf,
    port: u16,
    pid: Option<u32>,
}

impl Keeper {
    /// Starts the script and waits until it has made a data directory.
    fn new(options: &PostgresOptions) -> Result<Self, PostgresError> {
        let bin = find_binaries(env::var_os("PATH").as_deref(), Path::new("/")).ok_or(PostgresError::NotFound)?;
        let mut command = Command::new("sh");
        command.arg("-c").arg(include_str!("postgres.sh")).arg("scriba-postgres").arg(&bin).arg(options.lines());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.env("LC_ALL", "C").current_dir("/");
        // A Ctrl-C in the terminal is not for the script: it has to clean up.
        command.process_group(0);
        if id(&["-u"]) == Some(0) {
            let user =
                ["postgres", "nobody"].into_iter().find_map(|user| Some((id(&["-u", user])?, id(&["-g", user])?)));
            let (uid, gid) = user.ok_or_else(|| {
                io::Error::other("the server refuses to run as root, and there is no user `postgres` or `nobody`")
            })?;
            command.uid(uid).gid(gid);
        }
        let mut child = command.spawn()?;
        let commands = child.stdin.take();
        let answers = child.stdout.take().ok_or_else(|| io::Error::other("no pipe from the server's script"))?;
        let mut keeper =
            Self { bin, child, commands, answers: BufReader::new(answers), dir: PathBuf::new(), port: 0, pid: None };
        let (ok, dir) = keeper.answer()?;
        keeper.dir = dir.into();
        if ok { Ok(keeper) } else { Err(keeper.failed("initialise its data")) }
    }

    fn start_on_free_port(&mut self) -> Result<u16, PostgresError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
            match self.start(port) {
                Ok(()) => return Ok(port),
                Err(PostgresError::Server { log, .. }) if tries < PORT_TRIES && log.contains("could not bind") => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn start(&mut self, port: u16) -> Result<(), PostgresError> {
        self.port = port;
        let (ok, pid) = self.command(&format!("start {port}"))?;
        self.pid = pid.parse().ok().filter(|_| ok);
        if self.pid.is_some() { Ok(()) } else { Err(self.failed("start")) }
    }

    fn stop(&mut self) -> Result<(), PostgresError> {
        self.command("stop")?;
        self.pid = None;
        Ok(())
    }

    fn command(&mut self, line: &str) -> Result<(bool, String), PostgresError> {
        if let Some(commands) = &mut self.commands {
            writeln!(commands, "{line}")?;
        }
        self.answer()
    }

    fn answer(&mut self) -> Result<(bool, String), PostgresError> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            let dir = env::temp_dir();
            let problem = format!("its script ended; can the user it runs as write to {}?", dir.display());
            return Err(io::Error::other(problem).into());
        }
        let (word, detail) = line.trim_end().split_once(' ').unwrap_or((line.trim_end(), ""));
        Ok((word == "ok", detail.to_owned()))
    }

    fn failed(&self, action: &'static str) -> PostgresError {
        let log = fs::read(self.dir.join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n");
        PostgresError::Server { bin: self.bin.clone(), action, log: tail }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.commands = None;
        // Waiting leaves no zombie, and whoever dropped the server can count on its being gone.
        let _ = self.child.wait();
    }
}

async fn blocking<T: Send + 'static>(
    action: impl FnOnce() -> Result<T, PostgresError> + Send + 'static,
) -> Result<T, PostgresError> {
    tokio::task::spawn_blocking(action).await.map_err(io::Error::other)?
}

/// What the program `id` answers: a number, or nothing where there is no such user.
fn id(arguments: &[&str]) -> Option<u32> {
    let output = Command::new("id").args(arguments).stderr(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// The directory of `initdb` and its kin: on the path, else where `pg_config` says, else the highest version below
/// `root` that is new enough.
fn find_binaries(path: Option<&OsStr>, root: &Path) -> Option<PathBuf> {
    let on_path = path.into_iter().flat_map(env::split_paths).find(|dir| holds_server(dir));
    on_path.or_else(pg_config).or_else(|| installed(root))
}

fn pg_config() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").stderr(Stdio::null()).output().ok()?;
    let dir = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    holds_server(&dir).then_some(dir)
}

fn installed(root: &Path) -> Option<PathBuf> {
    /// Where packages put versions side by side, and what stands before the version in a directory's name.
    const PLACES: [(&str, &str); 4] = [
        ("usr/lib/postgresql", ""),
        ("usr", "pgsql-"),
        ("opt/homebrew/opt", "postgresql@"),
        ("usr/local/opt", "postgresql@"),
    ];
    PLACES
        .into_iter()
        .flat_map(|(place, prefix)| {
            let dirs = fs::read_dir(root.join(place)).into_iter().flatten().flatten();
            dirs.filter_map(move |dir| {
                let version: u32 = dir.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
                Some((version, dir.path().join("bin")))
            })
        })
        .filter(|(version, bin)| *version >= OLDEST_VERSION && holds_server(bin))
        .max()
        .map(|(_, bin)| bin)
}

fn holds_server(dir: &Path) -> bool {
    ["initdb", "postgres"].into_iter().all(|program| dir.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put_server(dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        ["initdb", "postgres"].into_iter().try_for_each(|program| fs::write(dir.join(program), ""))
    }

    #[test]
    fn the_highest_version_that_is_new_enough_and_complete_is_found() -> io::Result<()> {
        let root = tempfile::tempdir()?;
        let lib = root.path().join("usr/lib/postgresql");
        put_server(&lib.join("9/bin"))?;
        assert_eq!(installed(root.path()), None, "9 is too old");
        put_server(&lib.join("14/bin"))?;
        put_server(&root.path().join("usr/pgsql-16/bin"))?;
        fs::create_dir_all(lib.join("17/bin"))?;
        assert_eq!(installed(root.path()), Some(root.path().join("usr/pgsql-16/bin")), "17 holds no server");
        Ok(())
    }

    #[test]
    fn binaries_on_the_path_come_first() -> io::Result<()> {
        let root = tempfile::tempdir()?;
        let chosen = root.path().join("chosen");
        put_server(&chosen)?;
        put_server(&root.path().join("usr/lib/postgresql/17/bin"))?;
        assert_eq!(find_binaries(Some(chosen.as_os_str()), root.path()), Some(chosen));
        Ok(())
    }

    #[test]
    fn settings_of_the_user_come_last_and_are_quoted() {
        let lines = PostgresOptions::durable().setting("fsync", "off").setting("search_path", r"it's\").lines();
        let fsync: Vec<&str> = lines.lines().filter(|line| line.starts_with("fsync")).collect();
        assert_eq!(fsync, ["fsync = 'on'", "fsync = 'off'"]);
        assert!(lines.ends_with("search_path = 'it''s\\\\'\n"), "{lines}");
    }

    #[test]
    fn with_no_server_the_error_says_in_one_line_what_to_install() {
        let message = PostgresError::NotFound.to_string();
        assert!(message.contains("apt-get install postgresql") && message.contains(URL_VARIABLE), "{message}");
        assert!(!message.contains('\n'));
    }
}
