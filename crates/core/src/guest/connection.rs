//! One connection to an agent: frames in, frames out, and the streams they belong to.
//!
//! The agent lives inside the sandbox and is not trusted. What it can make this side hold is
//! bounded: a frame by [`MAX_PAYLOAD`](sandkeep_proto::frame::MAX_PAYLOAD), a stream by [`WINDOW`];
//! streams exist only where the daemon opened one. Anything that is against the rules breaks the
//! connection, and every call on it then fails with [`GuestError::Protocol`].
//!
//! A frame is written to the socket by the caller itself where the socket takes it, and by the
//! writing task where it does not: a command's latency is a promise, and a hop between tasks shows.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use parking_lot::{Mutex, MutexGuard};
use sandkeep_proto::frame::{CHUNK, FrameKind, HEADER, Header, MAX_PAYLOAD, WINDOW};
use sandkeep_proto::link::{Done, Failure, Reply, Request};
use sandkeep_proto::serial::escaped;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::receive_buffer::{OutputSource, ReceiveBuffer};
use super::serial::SerialPort;
use super::{GuestError, within};

/// How many bytes may wait for the socket before callers that send data or requests wait too.
const OUT_LIMIT: usize = 4 << 20;

/// The connection, shared by its users and its two tasks.
#[derive(Debug)]
pub(super) struct AgentConnection {
    socket: UnixStream,
    /// Whether bytes go through a serial port.
    serial: bool,
    state: Mutex<ConnectionState>,
    /// There is something to write that the socket did not take at once.
    unsent: Notify,
    /// Something was written.
    room: Notify,
    lost: CancellationToken,
}

#[derive(Debug)]
struct ConnectionState {
    streams: HashMap<u32, StreamState>,
    next: u32,
    out: BytesMut,
    lost: bool,
    /// Which rule the agent broke, if it did.
    broken: Option<String>,
}

impl ConnectionState {
    fn error(&self) -> GuestError {
        match &self.broken {
            Some(reason) => GuestError::Protocol { reason: reason.clone() },
            None => GuestError::Lost,
        }
    }
}

/// What is known of one open stream.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) received: ReceiveBuffer,
    pub(super) reply: Option<Reply>,
    pub(super) done: Option<Done>,
    /// The agent sends no more Data.
    pub(super) ended: bool,
    /// The agent takes no more Data.
    pub(super) deaf: bool,
    /// How much we may send.
    pub(super) credit: usize,
    /// How much we have sent.
    pub(super) sent: u64,
    /// How much arrived that we have not credited.
    pub(super) uncredited: usize,
    replied: bool,
    wake: Arc<Notify>,
}

/// Keeps the connection open, and its tasks running.
#[derive(Debug)]
pub(super) struct ConnectionOwner {
    pub(super) connection: Arc<AgentConnection>,
    _reading: AbortOnDropHandle<()>,
    _writing: AbortOnDropHandle<()>,
}

impl Drop for ConnectionOwner {
    fn drop(&mut self) {
        self.connection.lose(None);
    }
}

impl AgentConnection {
    /// Takes over a connected socket and starts its tasks. On a serial port a connection has begun.
    pub(super) fn start(socket: UnixStream, port: Option<SerialPort>) -> Arc<ConnectionOwner> {
        Self::with(socket, port, HashMap::new())
    }

    /// The same, for a port to which `asked` requests were written already, with the first `asked`
    /// numbers.
    pub(super) fn go_on(
        socket: UnixStream,
        port: SerialPort,
        asked: u32,
    ) -> (Arc<ConnectionOwner>, Vec<Handle>) {
        let streams: HashMap<u32, StreamState> =
            (1..=asked).map(|id| (id, StreamState::new(0))).collect();
        let wakes = streams.iter().map(|(id, stream)| (*id, Arc::clone(&stream.wake)));
        let mut wakes: Vec<_> = wakes.collect();
        wakes.sort_unstable_by_key(|(id, _)| *id);
        let owner = Self::with(socket, Some(port), streams);
        let handle = |(id, wake)| Handle { owner: Arc::clone(&owner), id, wake };
        let handles = wakes.into_iter().map(handle).collect();
        (owner, handles)
    }

    fn with(
        socket: UnixStream,
        port: Option<SerialPort>,
        streams: HashMap<u32, StreamState>,
    ) -> Arc<ConnectionOwner> {
        // The existing ones were numbered from one.
        let next = u32::try_from(streams.len()).unwrap_or(u32::MAX).saturating_add(1);
        let connection = Arc::new(Self {
            socket,
            serial: port.is_some(),
            state: Mutex::new(ConnectionState {
                streams,
                next,
                out: BytesMut::new(),
                lost: false,
                broken: None,
            }),
            unsent: Notify::new(),
            room: Notify::new(),
            lost: CancellationToken::new(),
        });
        let (reader, writer) = (Arc::clone(&connection), Arc::clone(&connection));
        Arc::new(ConnectionOwner {
            connection,
            _reading: AbortOnDropHandle::new(tokio::spawn(Self::read(reader, port))),
            _writing: AbortOnDropHandle::new(tokio::spawn(Self::write(writer))),
        })
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock()
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.is_cancelled()
    }

    pub(super) async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// Gives the connection up, with the rule that was broken if one was.
    fn lose(&self, broken: Option<String>) {
        let mut state = self.lock();
        if state.lost {
            return;
        }
        state.lost = true;
        state.broken = broken;
        state.out = BytesMut::new();
        for stream in state.streams.values() {
            stream.wake.notify_waiters();
        }
        drop(state);
        // Any holder of a part of it would keep it open, and a port has room for one connection
        // only: the next would wait behind this one without end.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        self.lost.cancel();
        self.room.notify_waiters();
        self.unsent.notify_one();
    }

    /// Queues a frame and hands the socket what it takes at once.
    fn push(&self, state: &mut ConnectionState, stream: u32, kind: FrameKind, payload: &[u8]) {
        if state.lost {
            return;
        }
        let idle = state.out.is_empty();
        state.out.reserve(HEADER + payload.len());
        let header = Header { length: payload.len(), stream, kind }.encode();
        for bytes in [&header, payload] {
            if self.serial {
                escaped(bytes).for_each(|piece| state.out.extend_from_slice(piece));
            } else {
                state.out.extend_from_slice(bytes);
            }
        }
        if idle {
            // An error here shows again, and is dealt with, in the writing task.
            if let Ok(written) = self.socket.try_write(&state.out) {
                state.out.advance(written);
            }
        }
        if !state.out.is_empty() {
            self.unsent.notify_one();
        }
    }

    async fn write(connection: Arc<Self>) {
        loop {
            connection.unsent.notified().await;
            loop {
                {
                    let mut state = connection.lock();
                    if state.lost {
                        return;
                    }
                    if state.out.is_empty() {
                        break;
                    }
                    match connection.socket.try_write(&state.out) {
                        Ok(written) => {
                            state.out.advance(written);
                            connection.room.notify_waiters();
                            continue;
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(_) => {
                            drop(state);
                            return connection.lose(None);
                        }
                    }
                }
                tokio::select! {
                    ready = connection.socket.writable() => if ready.is_err() { return connection.lose(None) },
                    () = connection.lost() => return,
                }
            }
        }
    }

    async fn read(connection: Arc<Self>, mut port: Option<SerialPort>) {
        let mut buffer = BytesMut::new();
        let mut raw = BytesMut::new();
        loop {
            tokio::select! {
                ready = connection.socket.readable() => if ready.is_err() { return connection.lose(None) },
                () = connection.lost() => return,
            }
            let into = if port.is_some() { &mut raw } else { &mut buffer };
            into.reserve(64 << 10);
            match connection.socket.try_read_buf(into) {
                Ok(0) => return connection.lose(None),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => return connection.lose(None),
            }
            if let Some(port) = &mut port {
                if !port.take(&raw, &mut buffer) {
                    return connection.lose(None);
                }
                raw.clear();
            }
            if let Err(reason) = connection.take_frames(&mut buffer) {
                return connection.lose(Some(reason));
            }
        }
    }

    /// Acts on every whole frame in `buffer` and leaves the rest in it.
    fn take_frames(&self, buffer: &mut BytesMut) -> Result<(), String> {
        while let Some(bytes) = buffer.first_chunk::<HEADER>() {
            let header = Header::decode(bytes).map_err(|bad| bad.to_string())?;
            let whole = HEADER + header.length;
            let Some(payload) = buffer.get(HEADER..whole) else { break };
            let mut state = self.lock();
            let next = state.next;
            match state.streams.get_mut(&header.stream) {
                Some(stream) => stream.arrive(header.kind, payload)?,
                // It was dropped on this side; the agent did not know yet.
                None if header.stream != 0 && header.stream < next => {}
                None => return Err(format!("stream {} was never opened", header.stream)),
            }
            drop(state);
            buffer.advance(whole);
        }
        Ok(())
    }

    /// Opens a stream. `credit` is what may be sent on it before the agent gives any.
    pub(super) async fn open(
        owner: &Arc<ConnectionOwner>,
        request: &Request,
        credit: usize,
    ) -> Result<Handle, GuestError> {
        let connection = &owner.connection;
        let json = serde_json::to_vec(request).map_err(|error| GuestError::Refused {
            kind: Failure::Invalid,
            message: format!("the request cannot be written down: {error}"),
        })?;
        if json.len() > MAX_PAYLOAD {
            return Err(GuestError::Refused {
                kind: Failure::Invalid,
                message: format!("the request takes {} bytes, over {MAX_PAYLOAD}", json.len()),
            });
        }
        let mut state = connection.lock_with_room().await?;
        let id = state.next;
        // Four billion requests on one connection: start over with a new one.
        state.next = id.checked_add(1).ok_or(GuestError::Lost)?;
        let stream = StreamState::new(credit);
        let wake = Arc::clone(&stream.wake);
        state.streams.insert(id, stream);
        connection.push(&mut state, id, FrameKind::Open, &json);
        drop(state);
        Ok(Handle { owner: Arc::clone(owner), id, wake })
    }

    /// Waits until not too much waits for the socket.
    async fn lock_with_room(&self) -> Result<MutexGuard<'_, ConnectionState>, GuestError> {
        loop {
            self.room().await?;
            let state = self.lock();
            if state.lost {
                return Err(state.error());
            }
            if state.out.len() < OUT_LIMIT {
                return Ok(state);
            }
        }
    }

    async fn room(&self) -> Result<(), GuestError> {
        loop {
            let notified = self.room.notified();
            {
                let state = self.lock();
                if state.lost {
                    return Err(state.error());
                }
                if state.out.len() < OUT_LIMIT {
                    return Ok(());
                }
            }
            notified.await;
        }
    }
}

impl StreamState {
    fn new(credit: usize) -> Self {
        Self {
            received: ReceiveBuffer::default(),
            reply: None,
            done: None,
            ended: false,
            deaf: false,
            credit,
            sent: 0,
            uncredited: 0,
            replied: false,
            wake: Arc::new(Notify::new()),
        }
    }

    /// Takes in one frame, or says which rule it breaks.
    fn arrive(&mut self, kind: FrameKind, payload: &[u8]) -> Result<(), String> {
        let orderly = match kind {
            FrameKind::Reply => !self.replied,
            FrameKind::Data | FrameKind::DataErr => {
                self.replied && self.done.is_none() && !self.ended
            }
            FrameKind::End | FrameKind::Cancel | FrameKind::Credit | FrameKind::Done => {
                self.replied && self.done.is_none()
            }
            FrameKind::Open => false,
        };
        if !orderly {
            return Err(format!("a {kind:?} frame came out of turn"));
        }
        match kind {
            FrameKind::Reply => {
                self.reply = Some(parse(payload)?);
                self.replied = true;
            }
            FrameKind::Data | FrameKind::DataErr => self.take_data(kind, payload)?,
            FrameKind::End => self.ended = true,
            FrameKind::Cancel => self.deaf = true,
            FrameKind::Credit => {
                let amount: [u8; 4] =
                    payload.try_into().map_err(|_| "a Credit frame holds a u32".to_owned())?;
                self.credit = self.credit.saturating_add(u32::from_le_bytes(amount) as usize);
            }
            FrameKind::Done => self.done = Some(parse(payload)?),
            FrameKind::Open => {}
        }
        self.wake.notify_waiters();
        Ok(())
    }

    fn take_data(&mut self, kind: FrameKind, payload: &[u8]) -> Result<(), String> {
        self.uncredited += payload.len();
        if self.uncredited > WINDOW {
            return Err(format!("{} bytes came without credit", self.uncredited));
        }
        let source = if kind == FrameKind::DataErr { OutputSource::Err } else { OutputSource::Out };
        self.received.push(source, payload);
        Ok(())
    }

    /// Whether the agent still takes Data, or why not.
    pub(super) fn listens(&self) -> Result<(), GuestError> {
        match &self.done {
            Some(done) => Err(refusal(done)),
            None if self.deaf => Err(GuestError::Gone),
            None => Ok(()),
        }
    }

    /// Whether nothing more will come on the stream.
    fn over(&self) -> bool {
        self.done.is_some()
    }
}

fn parse<T: serde::de::DeserializeOwned>(payload: &[u8]) -> Result<T, String> {
    serde_json::from_slice(payload).map_err(|error| format!("an answer cannot be read: {error}"))
}

/// An open stream. Dropping it notifies the agent that there is no listener any more.
#[derive(Debug)]
pub(super) struct Handle {
    owner: Arc<ConnectionOwner>,
    id: u32,
    wake: Arc<Notify>,
}

impl Handle {
    fn connection(&self) -> &AgentConnection {
        &self.owner.connection
    }

    /// Waits until `ready` has an answer. What arrived before the connection was lost still counts.
    pub(super) async fn wait<T>(
        &self,
        mut ready: impl FnMut(&mut StreamState) -> Option<Result<T, GuestError>>,
    ) -> Result<T, GuestError> {
        loop {
            let notified = self.wake.notified();
            {
                let mut state = self.connection().lock();
                let Some(stream) = state.streams.get_mut(&self.id) else {
                    return Err(GuestError::Lost);
                };
                if let Some(answer) = ready(stream) {
                    return answer;
                }
                if state.lost {
                    return Err(state.error());
                }
            }
            notified.await;
        }
    }

    /// Waits for the agent's answer.
    pub(super) async fn reply(&self) -> Result<Reply, GuestError> {
        let reply = self.wait(|stream| stream.reply.take().map(Ok)).await?;
        match reply {
            Reply::Error { kind, message } => {
                self.forget();
                Err(GuestError::Refused { kind, message })
            }
            reply => Ok(reply),
        }
    }

    /// Marks the stream as over, so that dropping it sends nothing.
    pub(super) fn forget(&self) {
        self.connection().lock().streams.remove(&self.id);
    }

    /// Sends a frame that needs no credit.
    pub(super) fn tell(&self, kind: FrameKind, payload: &[u8]) {
        let mut state = self.connection().lock();
        if state.streams.get(&self.id).is_some_and(|stream| !stream.over()) {
            self.connection().push(&mut state, self.id, kind, payload);
        }
    }

    /// Allows the agent to send `bytes` more bytes.
    pub(super) fn credit(&self, bytes: usize) {
        let mut state = self.connection().lock();
        let Some(stream) = state.streams.get_mut(&self.id) else { return };
        let bytes = bytes.min(stream.uncredited);
        stream.uncredited -= bytes;
        let over = stream.over();
        // A window fits a u32.
        let amount = u32::try_from(bytes).unwrap_or(u32::MAX);
        if bytes > 0 && !over {
            self.connection().push(&mut state, self.id, FrameKind::Credit, &amount.to_le_bytes());
        }
    }

    /// Sends bytes as credit allows, which must come within `progress`. A caller that gives up half way
    /// has sent what [`StreamState::sent`] says.
    pub(super) async fn send(
        &self,
        mut bytes: &[u8],
        progress: Option<Duration>,
    ) -> Result<(), GuestError> {
        while !bytes.is_empty() {
            let sent = within(progress, self.send_some(bytes)).await?;
            bytes = bytes.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// Sends what may be sent now, once anything may. Credit is taken and used in one step, so that
    /// nothing is lost by a caller that gives up.
    async fn send_some(&self, bytes: &[u8]) -> Result<usize, GuestError> {
        loop {
            self.connection().room().await?;
            let notified = self.wake.notified();
            {
                let mut state = self.connection().lock();
                if state.lost {
                    return Err(state.error());
                }
                let full = state.out.len() >= OUT_LIMIT;
                let stream = state.streams.get_mut(&self.id).ok_or(GuestError::Lost)?;
                stream.listens()?;
                let take = stream.credit.min(bytes.len()).min(CHUNK);
                if full {
                    continue;
                }
                if take > 0 {
                    stream.credit -= take;
                    stream.sent += take as u64;
                    let now = bytes.get(..take).unwrap_or_default();
                    self.connection().push(&mut state, self.id, FrameKind::Data, now);
                    return Ok(take);
                }
            }
            notified.await;
        }
    }
}

/// What an ended stream answers to more input.
fn refusal(done: &Done) -> GuestError {
    match done {
        Done::Failed { kind, message } => {
            GuestError::Refused { kind: *kind, message: message.clone() }
        }
        Done::Exited(_) | Done::Moved { .. } => GuestError::Gone,
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.connection().lock();
        if let Some(stream) = state.streams.remove(&self.id)
            && !stream.over()
        {
            self.connection().push(&mut state, self.id, FrameKind::Cancel, &[]);
        }
    }
}
