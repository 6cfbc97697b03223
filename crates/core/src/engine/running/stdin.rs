//! A command's standard input, counted.
//!
//! Bytes of input are numbered from 0, as those of output are. *Taken* are those on their way to the
//! process: the agent has them and writes them as the process reads. *Written* are those in the
//! process's pipe or terminal. A caller that names the offset of what it sends may send it again
//! whenever it is in doubt: bytes that were taken are not taken twice, and a gap is refused.
//!
//! After a lost connection to the agent, or a restart of the daemon, the agent is asked how much it
//! has taken, and writing continues from there; what was in flight and did not arrive is sent again
//! by a sender that is still there, and counts as not taken otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::engine::running::tracked::Tracked;
use crate::engine::{Error, Result};
use crate::guest::{GuestError, Stdin, StdinCount};

/// The input of a command that is alive.
#[derive(Debug)]
pub(in crate::engine) struct Input {
    /// Whether it was started with one.
    pub(in crate::engine) attached: bool,
    now: watch::Sender<Now>,
    /// How long a caller waits for a command that is not attached to.
    patience: Duration,
    /// Each sender holds this, so that bytes of two callers do not mix.
    turn: tokio::sync::Mutex<()>,
    closed: AtomicBool,
    /// How many callers wanted to send something, or to know how much was taken.
    uses: AtomicU64,
}

/// Where input goes.
#[derive(Debug, Clone)]
enum Now {
    /// The command is not attached to, or not yet.
    Detached,
    /// The command is paused with its machine, until the machine is resumed.
    SleepingCommands,
    /// To the connection the command is followed on.
    Attached(Arc<Stdin>),
    /// Nowhere: the command is over.
    Over,
}

impl Input {
    pub(in crate::engine) fn new(stdin: Option<Stdin>, attached: bool, patience: Duration) -> Self {
        let now = stdin.map_or(Now::Detached, |stdin| Now::Attached(Arc::new(stdin)));
        Self {
            attached,
            now: watch::Sender::new(now),
            patience,
            turn: tokio::sync::Mutex::default(),
            closed: AtomicBool::new(false),
            uses: AtomicU64::new(0),
        }
    }

    /// How often it was used.
    pub(in crate::engine) fn uses(&self) -> u64 {
        self.uses.load(Ordering::SeqCst)
    }

    /// The command is followed on another connection.
    pub(in crate::engine) async fn renew(&self, stdin: Stdin) {
        if self.closed.load(Ordering::SeqCst) {
            // The end may not have arrived. A connection that is lost again is renewed again.
            let _ = stdin.close().await;
        }
        self.now.send_replace(Now::Attached(Arc::new(stdin)));
    }

    /// The command is not followed for the time being.
    pub(in crate::engine) fn detach(&self) {
        self.now.send_replace(Now::Detached);
    }

    /// The command's machine is paused.
    pub(in crate::engine) fn sleep(&self) {
        self.now.send_replace(Now::SleepingCommands);
    }

    /// The command has ended.
    pub(in crate::engine) fn over(&self) {
        self.now.send_replace(Now::Over);
    }

    /// Waits until the command is attached to, or over.
    pub(in crate::engine) async fn attached(&self) {
        let mut changes = self.now.subscribe();
        // The sender is in `self`, so this ends by the value alone.
        let _ = changes.wait_for(|now| !matches!(now, Now::Detached)).await;
    }

    /// Where input goes; `None` when the command is over. Waits for a command that is not attached to,
    /// or whose connection `lost` has to be replaced, until its agent should have answered; for a
    /// paused one, until it resumes.
    async fn now(&self, lost: Option<&Arc<Stdin>>) -> Result<Option<Arc<Stdin>>> {
        self.uses.fetch_add(1, Ordering::SeqCst);
        let mut changes = self.now.subscribe();
        let waits = |now: &Now| match now {
            Now::Detached => true,
            Now::Attached(stdin) => lost.is_some_and(|lost| Arc::ptr_eq(stdin, lost)),
            Now::SleepingCommands | Now::Over => false,
        };
        loop {
            // The sender is in `self`, so these end by the value alone.
            let _ = changes.wait_for(|now| !matches!(now, Now::SleepingCommands)).await;
            let found = tokio::time::timeout(self.patience, changes.wait_for(|now| !waits(now)));
            match found.await.map_err(|_| GuestError::Timeout)?.as_deref() {
                Ok(Now::Attached(stdin)) => return Ok(Some(Arc::clone(stdin))),
                Ok(Now::SleepingCommands) => {}
                _ => return Ok(None),
            }
        }
    }
}

/// A command's standard input.
#[derive(Debug, Clone)]
pub struct StdinHandle {
    tracked: Arc<Tracked>,
}

/// How far input has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StdinProgress {
    /// How many bytes the process's pipe has had, from the beginning.
    pub written: u64,
    /// Whether all that was sent is among them.
    pub complete: bool,
}

/// How far a sender wants its bytes to have come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    Taken,
    Written,
}

impl StdinHandle {
    pub(in crate::engine) fn new(tracked: Arc<Tracked>) -> Self {
        Self { tracked }
    }

    /// Hands bytes to the command, waiting while it does not read.
    ///
    /// # Errors
    ///
    /// Returns [`Error::StdinClosed`] or [`Error::CommandEnded`] when they will not be read.
    pub async fn send(&self, bytes: Bytes) -> Result<()> {
        let _turn = self.tracked.stdin.turn.lock().await;
        self.put(&mut None, &bytes, Until::Taken).await
    }

    /// Hands over the bytes from `offset` on, waiting while the command does not read. Those that were taken before are left
    /// out.
    ///
    /// # Errors
    ///
    /// As [`send_at`](Self::send_at).
    pub async fn send_from(&self, offset: u64, bytes: &Bytes) -> Result<()> {
        let _turn = self.tracked.stdin.turn.lock().await;
        self.put(&mut Some(offset), bytes, Until::Taken).await
    }

    /// Hands over the bytes from `offset` on, or after all that came before, and waits until the
    /// process's pipe has them, but not for longer than `patience`. Those that were taken before are
    /// left out.
    ///
    /// # Errors
    ///
    /// Returns [`Error::StdinGap`] when bytes before `offset` are missing, and
    /// [`Error::StdinClosed`] or [`Error::CommandEnded`] when these will not be read.
    pub async fn send_at(
        &self,
        offset: Option<u64>,
        bytes: Bytes,
        patience: Duration,
    ) -> Result<StdinProgress> {
        let deadline = Instant::now() + patience;
        let mut start = offset;
        let sending = async {
            let _turn = self.tracked.stdin.turn.lock().await;
            self.put(&mut start, &bytes, Until::Written).await
        };
        let complete = match timeout_at(deadline, sending).await {
            Ok(outcome) => outcome.map(|()| true)?,
            Err(_) => false,
        };
        let written = match self.count().await {
            Ok(count) => count.written,
            // It ended after it had taken everything.
            Err(_) if complete => start.unwrap_or(0) + bytes.len() as u64,
            Err(error) => return Err(error),
        };
        Ok(StdinProgress { written, complete })
    }

    /// How many bytes the process's pipe has had.
    ///
    /// # Errors
    ///
    /// Returns [`Error::StdinClosed`] or [`Error::CommandEnded`] when it takes no more.
    pub async fn written(&self) -> Result<u64> {
        let count = self.count().await?;
        if !self.tracked.stdin.closed.load(Ordering::SeqCst)
            && let Some(stdin) = self.tracked.stdin.now(None).await?
            && let Err(GuestError::Gone) = stdin.listens().await
        {
            return Err(self.refused(count.ended));
        }
        Ok(count.written)
    }

    /// Signals the end of the input to the command.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the agent cannot be reached.
    pub async fn close(&self) -> Result<()> {
        let _turn = self.tracked.stdin.turn.lock().await;
        self.tracked.stdin.closed.store(true, Ordering::SeqCst);
        let mut lost = None;
        while let Some(stdin) = self.tracked.stdin.now(lost.as_ref()).await? {
            match stdin.close().await {
                Ok(()) | Err(GuestError::Gone) => break,
                Err(GuestError::Lost) => lost = Some(stdin),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends what of `bytes` was not taken before, in the caller's turn. `start` is where they begin.
    async fn put(&self, start: &mut Option<u64>, bytes: &Bytes, until: Until) -> Result<()> {
        let input = &self.tracked.stdin;
        let mut lost = None;
        loop {
            let stdin = input.now(lost.as_ref()).await?.ok_or_else(|| self.refused(true))?;
            let sent = async {
                let taken = stdin.count().await?.taken;
                let offset = *start.get_or_insert(taken);
                let Some(had) = taken.checked_sub(offset) else { return Ok(Some((taken, offset))) };
                let had = usize::try_from(had).unwrap_or(usize::MAX).min(bytes.len());
                if had < bytes.len() {
                    stdin.send(bytes.slice(had..)).await?;
                }
                if until == Until::Written {
                    stdin.written(offset + bytes.len() as u64).await?;
                }
                Ok(None)
            };
            match sent.await {
                Ok(None) => return Ok(()),
                Ok(Some((taken, offset))) => {
                    return Err(Error::StdinGap { command: self.tracked.id(), taken, offset });
                }
                Err(GuestError::Lost) => lost = Some(stdin),
                Err(GuestError::Gone) => {
                    let ended = stdin.count().await.is_ok_and(|count| count.ended);
                    return Err(self.refused(ended));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn count(&self) -> Result<StdinCount> {
        let mut lost = None;
        loop {
            let now = self.tracked.stdin.now(lost.as_ref()).await?;
            let stdin = now.ok_or_else(|| self.refused(true))?;
            match stdin.count().await {
                Ok(count) => return Ok(count),
                Err(GuestError::Lost) => lost = Some(stdin),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn refused(&self, ended: bool) -> Error {
        if ended {
            Error::CommandEnded(self.tracked.id())
        } else {
            Error::StdinClosed(self.tracked.id())
        }
    }
}
