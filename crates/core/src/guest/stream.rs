//! The ends of streams that callers hold: a process's output and input, bytes coming and going.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use sandkeep_proto::frame::{FrameKind, WINDOW};
use sandkeep_proto::link::{Done, Exit};

use super::connection::{Handle, StreamState};
use super::receive_buffer::OutputSource;
use super::{GuestError, within};

/// A command this connection is attached to.
///
/// When both halves are dropped the agent is notified; the process lives on and can be attached to
/// again.
#[derive(Debug)]
pub struct Process {
    /// Its number inside the sandbox.
    pub pid: u32,
    /// How many bytes of standard input the agent had taken when this was attached.
    pub stdin_taken: u64,
    /// What it prints.
    pub output: Output,
    /// What it reads.
    pub stdin: Stdin,
}

/// What a command prints, and how it ends.
#[derive(Debug)]
pub struct Output {
    pub(super) handle: Arc<Handle>,
}

/// One piece of a command's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputEvent {
    /// Bytes it wrote to standard output, or to its terminal.
    Stdout(Bytes),
    /// Bytes it wrote to standard error.
    Stderr(Bytes),
    /// It ended; nothing comes after this.
    Exited(Exit),
}

impl Output {
    /// Waits for what comes next. Calling it again after [`OutputEvent::Exited`] repeats that.
    ///
    /// Safe to drop and call again: nothing is lost by that.
    ///
    /// # Errors
    ///
    /// Fails when the connection is gone, or when the command was attached to again elsewhere.
    pub async fn next(&mut self) -> Result<OutputEvent, GuestError> {
        self.handle
            .wait(|stream| {
                if let Some((source, bytes)) = stream.received.pop() {
                    return Some(Ok(match source {
                        OutputSource::Out => OutputEvent::Stdout(bytes),
                        OutputSource::Err => OutputEvent::Stderr(bytes),
                    }));
                }
                match &stream.done {
                    Some(Done::Exited(exit)) => Some(Ok(OutputEvent::Exited(*exit))),
                    other => outcome(other.as_ref()).map(|failed| failed.and(Err(unexpected()))),
                }
            })
            .await
    }

    /// Waits until nothing more can come: the connection is gone, or the command was attached to
    /// elsewhere. A command that ended is no such case.
    pub async fn lost(&self) {
        let _ = self
            .handle
            .wait(|stream| match stream.done {
                None | Some(Done::Exited(_)) => None,
                Some(_) => Some(Ok(())),
            })
            .await;
    }

    /// Acknowledges `bytes` more bytes as stored: the agent need not send them again. It holds back
    /// the process while a whole window is unacknowledged.
    pub fn keep(&self, bytes: usize) {
        self.handle.credit(bytes);
    }
}

/// What a command reads.
///
/// Callers take turns: bytes of two who send at the same time would mix.
#[derive(Debug)]
pub struct Stdin {
    handle: Arc<Handle>,
    open: AtomicBool,
    /// What the agent had taken before this connection, and what of it the process had.
    taken: u64,
    written: u64,
}

/// How far standard input has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StdinCount {
    /// How many bytes are on their way to the process, or with it.
    pub taken: u64,
    /// How many are in its pipe or terminal.
    pub written: u64,
    /// Whether it has ended. Otherwise one that takes no more has closed its input.
    pub ended: bool,
}

impl Stdin {
    pub(super) fn new(handle: Arc<Handle>, open: bool, taken: u64, written: u64) -> Self {
        Self { handle, open: AtomicBool::new(open), taken, written }
    }

    /// Sends bytes, as fast as the process takes them. A caller that gives up has sent what
    /// [`count`](Self::count) says.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Gone`] when the process has ended or closed its input, or none was
    /// asked for when it was started.
    pub async fn send(&self, bytes: Bytes) -> Result<(), GuestError> {
        if !self.open.load(Ordering::SeqCst) {
            return Err(GuestError::Gone);
        }
        self.handle.send(&bytes, None).await
    }

    /// How far the input has come, as far as this connection knows.
    ///
    /// # Errors
    ///
    /// Fails when the connection is gone.
    pub async fn count(&self) -> Result<StdinCount, GuestError> {
        self.handle.wait(|stream| Some(Ok(self.counted(stream)))).await
    }

    /// Waits until the process's pipe has got `bytes` bytes, those of earlier connections included.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Gone`] when it will not take that much.
    pub async fn written(&self, bytes: u64) -> Result<(), GuestError> {
        self.handle
            .wait(|stream| {
                if self.counted(stream).written >= bytes {
                    return Some(Ok(()));
                }
                stream.listens().err().map(Err)
            })
            .await
    }

    /// Whether the process still reads, as far as is known.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Gone`] when it does not.
    pub async fn listens(&self) -> Result<(), GuestError> {
        self.handle.wait(|stream| Some(stream.listens())).await
    }

    fn counted(&self, stream: &StreamState) -> StdinCount {
        let taken = self.taken + stream.sent;
        let waiting = WINDOW.saturating_sub(stream.credit) as u64;
        let written = taken.saturating_sub(waiting).max(self.written);
        StdinCount { taken, written, ended: stream.done.is_some() }
    }

    /// Lets the process see the end of its input. On a terminal this types the end-of-file
    /// character. Closing twice is fine.
    ///
    /// # Errors
    ///
    /// Fails when the connection is gone.
    pub async fn close(&self) -> Result<(), GuestError> {
        if self.open.swap(false, Ordering::SeqCst) {
            self.handle.wait(|_| Some(Ok(()))).await?;
            self.handle.tell(FrameKind::End, &[]);
        }
        Ok(())
    }
}

/// Bytes that come from the sandbox.
#[derive(Debug)]
pub struct Incoming {
    pub(super) handle: Arc<Handle>,
    /// Whether the agent's verdict is waited for; a port's bytes just end.
    pub(super) verdict: bool,
    /// How long the next byte may take.
    pub(super) progress: Option<Duration>,
}

impl Incoming {
    /// Waits for more; `None` when all has come.
    ///
    /// # Errors
    ///
    /// Fails when the agent broke off, with its reason, when the connection is gone, and with
    /// [`GuestError::Timeout`] when nothing comes. The time the caller takes between calls does not count.
    pub async fn next(&mut self) -> Result<Option<Bytes>, GuestError> {
        let verdict = self.verdict;
        let next = self.handle.wait(|stream: &mut StreamState| {
            if let Some((_, bytes)) = stream.received.pop() {
                return Some(Ok(Some(bytes)));
            }
            if stream.ended && !verdict {
                return Some(Ok(None));
            }
            outcome(stream.done.as_ref()).map(|moved| moved.map(|_| None))
        });
        let bytes = within(self.progress, next).await?;
        if let Some(bytes) = &bytes {
            self.handle.credit(bytes.len());
        }
        Ok(bytes)
    }
}

/// Bytes that go into the sandbox.
#[derive(Debug)]
pub struct Outgoing {
    pub(super) handle: Arc<Handle>,
    /// How long the agent may take to accept more, and to finish.
    pub(super) progress: Option<Duration>,
}

/// What a finished transfer moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferSummary {
    /// How many bytes.
    pub bytes: u64,
    /// How many files.
    pub files: u64,
}

impl Outgoing {
    /// Sends bytes, as fast as the agent takes them.
    ///
    /// # Errors
    ///
    /// Fails when the agent broke off, with its reason, when the connection is gone, and with
    /// [`GuestError::Timeout`] when the agent takes nothing more.
    pub async fn send(&mut self, bytes: Bytes) -> Result<(), GuestError> {
        self.handle.send(&bytes, self.progress).await
    }

    /// Says that all was sent, without waiting. For a port: the peer sees the end of its input.
    pub fn end(self) {
        self.handle.tell(FrameKind::End, &[]);
    }

    /// Says that all was sent, and waits until the agent has put it in place.
    ///
    /// # Errors
    ///
    /// Fails when the agent broke off, with its reason, or when the connection is gone.
    pub async fn finish(self) -> Result<TransferSummary, GuestError> {
        self.handle.tell(FrameKind::End, &[]);
        within(self.progress, self.handle.wait(|stream| outcome(stream.done.as_ref()))).await
    }
}

fn outcome(done: Option<&Done>) -> Option<Result<TransferSummary, GuestError>> {
    Some(match done? {
        Done::Moved { bytes, files } => Ok(TransferSummary { bytes: *bytes, files: *files }),
        Done::Failed { kind, message } => {
            Err(GuestError::Refused { kind: *kind, message: message.clone() })
        }
        Done::Exited(_) => Err(unexpected()),
    })
}

/// The agent gave the outcome of another kind of request.
pub(super) fn unexpected() -> GuestError {
    GuestError::Protocol { reason: "the answer does not fit the question".to_owned() }
}
