//! The wire of a node: connections that can be cut, frozen and refused.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// What the network of a node does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mode {
    #[default]
    Up,
    /// Connections stay, and nothing moves on them.
    Frozen,
    /// Connections are cut as soon as they are made.
    Down,
}

#[derive(Debug, Default)]
struct State {
    mode: Mode,
    /// Connections of an older generation are cut.
    generation: u64,
    connections: Vec<Weak<Wakers>>,
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
}

impl Network {
    pub(crate) fn set(&self, mode: Mode) {
        self.change(|state| {
            state.mode = mode;
            if mode == Mode::Down {
                state.generation += 1;
            }
        });
    }

    /// Cuts every connection; new ones are welcome.
    pub(crate) fn cut(&self) {
        self.change(|state| state.generation += 1);
    }

    /// Accepts connections for as long as somebody takes them.
    pub(crate) async fn accept(self, listener: TcpListener, connections: mpsc::Sender<io::Result<Connection>>) {
        let mut changed = self.changed.subscribe();
        loop {
            if self.lock().mode == Mode::Frozen {
                // The sender lives as long as this does.
                let _alive = changed.changed().await;
                continue;
            }
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = connections.closed() => break,
                _ = changed.changed() => continue,
            };
            // A connection that broke before it was taken is the client's matter.
            let Ok((stream, _)) = accepted else { continue };
            if self.lock().mode == Mode::Down {
                continue;
            }
            // Small answers go out at once.
            let _unsupported = stream.set_nodelay(true);
            if connections.send(Ok(self.adopt(stream))).await.is_err() {
                break;
            }
        }
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
        Pin::new(&mut this.stream).poll_read(context, buffer)
    }
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
        TcpConnectInfo {
            local_addr: address(self.stream.local_addr()),
            remote_addr: address(self.stream.peer_addr()),
        }
    }
}
