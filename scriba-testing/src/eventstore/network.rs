//! The wire of a node: connections that can be cut, frozen and refused.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// How long a change of mode may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that wait to be accepted.
const BACKLOG: u32 = 128;

/// What the network of a node does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mode {
    #[default]
    Up,
    /// Connections stay, and nothing moves on them.
    Frozen,
    /// Nobody listens: connections are refused.
    Down,
}

#[derive(Debug, Default)]
struct State {
    mode: Mode,
    /// What the listener has made of it.
    listening: Listening,
    /// Connections of an older generation are cut.
    generation: u64,
    connections: Vec<Weak<Wakers>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Listening {
    #[default]
    Yes,
    No,
}

/// Who waits on a connection, so that a change of mode wakes them.
#[derive(Debug, Default)]
struct Wakers {
    read: AtomicWaker,
    write: AtomicWaker,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Network {
    state: Arc<Mutex<State>>,
    changed: Arc<watch::Sender<()>>,
    /// Told when `listening` changes.
    listening: Arc<Condvar>,
}

impl Network {
    /// Changes the mode, and waits until connections are refused, or no more, as it says.
    pub(crate) fn set(&self, mode: Mode) {
        self.change(|state| {
            state.mode = mode;
            if mode == Mode::Down {
                state.generation += 1;
            }
        });
        let wanted = if mode == Mode::Down { Listening::No } else { Listening::Yes };
        // The listener answers at once, unless its thread has ended.
        let _waited = self
            .listening
            .wait_timeout_while(self.lock(), PATIENCE, |state| state.listening != wanted)
            .unwrap_or_else(PoisonError::into_inner);
    }

    /// Cuts every connection; new ones are welcome.
    pub(crate) fn cut(&self) {
        self.change(|state| state.generation += 1);
    }

    /// Accepts connections for as long as somebody takes them.
    pub(crate) async fn accept(
        self,
        mut listener: TcpListener,
        connections: mpsc::Sender<io::Result<Connection>>,
    ) -> io::Result<()> {
        let address = listener.local_addr()?;
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let mode = self.lock().mode;
            if mode == Mode::Down {
                drop(listener);
                let held = hold(address).await?;
                self.tell(Listening::No);
                while self.lock().mode == Mode::Down {
                    // The sender lives as long as this does.
                    let _alive = changed.changed().await;
                }
                listener = held.listen(BACKLOG)?;
                self.tell(Listening::Yes);
                continue;
            }
            let accepted = tokio::select! {
                accepted = listener.accept(), if mode == Mode::Up => accepted,
                () = connections.closed() => return Ok(()),
                _ = changed.changed() => continue,
            };
            // A connection that broke before it was taken is the client's matter.
            let Ok((stream, _)) = accepted else { continue };
            // Small answers go out at once.
            let _unsupported = stream.set_nodelay(true);
            if connections.send(Ok(self.adopt(stream))).await.is_err() {
                return Ok(());
            }
        }
    }

    fn tell(&self, listening: Listening) {
        self.lock().listening = listening;
        self.listening.notify_all();
    }

    fn adopt(&self, stream: TcpStream) -> Connection {
        let wakers = Arc::new(Wakers::default());
        let mut state = self.lock();
        state.connections.retain(|connection| connection.strong_count() > 0);
        state.connections.push(Arc::downgrade(&wakers));
        Connection { stream, wakers, generation: state.generation, network: self.clone() }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let connections: Vec<_> = {
            let mut state = self.lock();
            change(&mut state);
            state.connections.iter().filter_map(Weak::upgrade).collect()
        };
        for wakers in connections {
            wakers.read.wake();
            wakers.write.wake();
        }
        self.changed.send_replace(());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the port for the node, without listening on it.
async fn hold(address: SocketAddr) -> io::Result<TcpSocket> {
    let begun = Instant::now();
    loop {
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        match socket.bind(address) {
            Ok(()) => return Ok(socket),
            // Somebody else may have it for a moment.
            Err(error) if begun.elapsed() > PATIENCE => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// A connection under the rule of its node's network.
pub(crate) struct Connection {
    stream: TcpStream,
    wakers: Arc<Wakers>,
    generation: u64,
    network: Network,
}

impl Connection {
    fn gate(&self, waker: &AtomicWaker, context: &Context<'_>) -> Poll<io::Result<()>> {
        // First, so that a change between the look and the wait is not missed.
        waker.register(context.waker());
        let state = self.network.lock();
        if state.generation != self.generation {
            Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
        } else if state.mode == Mode::Frozen {
            Poll::Pending
        } else {
            Poll::Ready(Ok(()))
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        std::task::ready!(this.gate(&this.wakers.read, context))?;
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        if read.is_ready() {
            acknowledge(&this.stream);
        }
        read
    }
}

/// Has the kernel acknowledge at once what comes next. The Rust clients send a call in several small packets, of which each waits for
/// the acknowledgement of the one before (Nagle's algorithm, which they do not switch off): 40 ms for each call, as servers delay
/// acknowledgements. That would be most of the time of a test.
fn acknowledge(stream: &TcpStream) {
    // The kernel falls back to delays by itself.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _slower = stream.set_quickack(true);
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = stream;
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        std::task::ready!(this.gate(&this.wakers.write, context))?;
        Pin::new(&mut this.stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        std::task::ready!(this.gate(&this.wakers.write, context))?;
        Pin::new(&mut this.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        let address = |of: io::Result<SocketAddr>| of.ok();
        TcpConnectInfo { local_addr: address(self.stream.local_addr()), remote_addr: address(self.stream.peer_addr()) }
    }
}
