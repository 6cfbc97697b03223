//! The writing half of a connection.
//!
//! A frame goes to the socket at once where it takes it, and is queued where it does not. Data is
//! only queued while [`Outbound::has_room`]; the small frames always are, and their number is bounded
//! by what the host asks and sends.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::rc::Rc;

use sandkeep_proto::frame::{FrameKind, HEADER, Header, MAX_PAYLOAD};
use sandkeep_proto::link::{Done, Failure, Reply};
use serde::Serialize;
use tokio::sync::Notify;

use crate::serve::link::connection::Stream;
use crate::serve::link::transport::Transport;

/// How much may wait for the socket before senders of Data wait too.
const LIMIT: usize = 1 << 20;

/// Frames on their way to one daemon, and the streams it has open.
#[derive(Debug)]
pub(crate) struct Outbound {
    transport: Transport,
    queue: RefCell<Vec<u8>>,
    pub(crate) streams: RefCell<HashMap<u32, Stream>>,
    closed: Cell<bool>,
    unsent: Notify,
    changed: Notify,
}

impl Outbound {
    /// Starts with `first`, bytes that are no frame.
    pub(crate) fn new(transport: Transport, first: &[u8]) -> Rc<Self> {
        let unsent = Notify::new();
        if !first.is_empty() {
            unsent.notify_one();
        }
        Rc::new(Self {
            transport,
            queue: RefCell::new(first.to_vec()),
            streams: RefCell::default(),
            closed: Cell::new(false),
            unsent,
            changed: Notify::new(),
        })
    }

    pub(crate) fn transport(&self) -> &Transport {
        &self.transport
    }

    pub(crate) fn has_room(&self) -> bool {
        self.queue.borrow().len() < LIMIT
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Gives the connection up. Everybody who waits for it is woken.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        self.queue.borrow_mut().clear();
        // Taken out first: what a stream does when it is dropped may look at this table.
        let streams = std::mem::take(&mut *self.streams.borrow_mut());
        drop(streams);
        self.unsent.notify_one();
        self.changed.notify_waiters();
    }

    /// Waits until something was written or the connection was closed.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Waits until the connection is closed.
    pub(crate) async fn closed(&self) {
        while !self.closed.get() {
            self.changed.notified().await;
        }
    }

    /// Waits until there is room, or the connection is closed.
    pub(crate) async fn room(&self) {
        while !self.closed.get() && !self.has_room() {
            self.changed.notified().await;
        }
    }

    pub(crate) fn push(&self, stream: u32, kind: FrameKind, payload: &[u8]) {
        if self.closed.get() {
            return;
        }
        let mut queue = self.queue.borrow_mut();
        let idle = queue.is_empty();
        queue.reserve(HEADER + payload.len());
        let header = Header { length: payload.len(), stream, kind }.encode();
        self.transport.add(&mut queue, &header);
        self.transport.add(&mut queue, payload);
        if idle {
            // An error shows again, and is dealt with, in `write`.
            if let Ok(written) = self.transport.try_write(&queue) {
                queue.drain(..written);
            }
        }
        if !queue.is_empty() {
            self.unsent.notify_one();
        }
    }

    pub(crate) fn credit(&self, stream: u32, bytes: usize) {
        let amount = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.push(stream, FrameKind::Credit, &amount.to_le_bytes());
    }

    pub(crate) fn reply(&self, stream: u32, reply: &Reply) {
        self.push_json(stream, FrameKind::Reply, reply, || Reply::Error {
            kind: Failure::Fault,
            message: "the answer does not fit a frame".to_owned(),
        });
    }

    /// Sends an answer that is the last of its stream.
    pub(crate) fn finish(&self, stream: u32, reply: &Reply) {
        self.reply(stream, reply);
        let ended = self.streams.borrow_mut().remove(&stream);
        drop(ended);
    }

    /// Sends the outcome, which ends the stream.
    pub(crate) fn done(&self, stream: u32, done: &Done) {
        self.push_json(stream, FrameKind::Done, done, || Done::Failed {
            kind: Failure::Fault,
            message: "the outcome does not fit a frame".to_owned(),
        });
        let ended = self.streams.borrow_mut().remove(&stream);
        drop(ended);
    }

    fn push_json<T: Serialize>(
        &self,
        stream: u32,
        kind: FrameKind,
        word: &T,
        other: impl Fn() -> T,
    ) {
        let fits = |json: &Vec<u8>| json.len() <= MAX_PAYLOAD;
        let json = serde_json::to_vec(word).ok().filter(fits);
        // The other is a short sentence, which always fits.
        let json = json.or_else(|| serde_json::to_vec(&other()).ok()).unwrap_or_default();
        self.push(stream, kind, &json);
    }

    /// Writes what the socket did not take at once; ends when the connection does.
    pub(crate) async fn write(self: Rc<Self>) {
        loop {
            self.unsent.notified().await;
            while !self.closed.get() && !self.queue.borrow().is_empty() {
                let ready = tokio::select! {
                    ready = self.transport.writable() => ready,
                    () = self.closed() => return,
                };
                if ready.is_err() {
                    return self.close();
                }
                let result = self.transport.try_write(&self.queue.borrow());
                match result {
                    Ok(written) => {
                        self.queue.borrow_mut().drain(..written);
                        self.changed.notify_waiters();
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return self.close(),
                }
            }
            if self.closed.get() {
                return;
            }
        }
    }
}
