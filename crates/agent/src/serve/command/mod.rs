//! Commands: decides how a process is started (`start`, `launch`, as `user`), how long its output is kept (`output`), and when it is
//! over.
//!
//! One task per command, [`Command::run`], moves bytes between the process's pipes (or terminal)
//! and whichever connection is attached. The process is held back by its own full pipe when a
//! window's worth of output is not kept, whether somebody is attached or not.
//!
//! # When a command is over
//!
//! When its process has exited *and* either every writer of its output is gone, or nothing came for
//! [`QUIET`], or [`LATE`] has passed since what was in the pipes at its exit was read. The last two
//! are for what it left running in the background with its output inherited. Such leftovers live on:
//! what they print later is read and dropped, so that they do not die of a closed pipe. On a terminal
//! they are hung up, as on any terminal that goes away.

pub(crate) mod launch;
mod output;
pub(crate) mod reap;
mod secret_files;
pub(crate) mod start;
pub(crate) mod user;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::termios::{SpecialCodeIndex, Winsize};
use sandkeep_proto::frame::{FrameKind, WINDOW};
use sandkeep_proto::link::{Done, Exit, Failure, Known, TermSize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::serve::command::launch::waiting;
use crate::serve::command::output::OutputBacklog;
use crate::serve::command::secret_files::SecretFiles;
use crate::serve::error::RequestError;
use crate::serve::link::outbound::Outbound;

/// How long output must be silent after the exit.
const QUIET: Duration = Duration::from_millis(200);
/// How long leftovers that never fall silent are listened to.
const LATE: Duration = Duration::from_secs(2);

/// Our ends of a process's standard streams.
#[derive(Debug)]
pub(crate) struct Ends {
    pub(crate) stdin: Option<Rc<AsyncFd<OwnedFd>>>,
    pub(crate) out: Option<Rc<AsyncFd<OwnedFd>>>,
    pub(crate) err: Option<Rc<AsyncFd<OwnedFd>>>,
    /// The process's side of a terminal, held so that it is not hung up while the process lives.
    pub(crate) held: Option<OwnedFd>,
}

/// A command the agent knows.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) id: String,
    pub(crate) pid: i32,
    /// Commands are listed in this order.
    pub(crate) number: u64,
    /// How often the kernel had killed a process out of memory when this one was started.
    pub(crate) oom_kills_before: u64,
    terminal: Option<Rc<AsyncFd<OwnedFd>>>,
    state: RefCell<CommandState>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct CommandState {
    backlog: OutputBacklog,
    exit: Option<Exit>,
    /// The command is over: no more output will come.
    over: bool,
    /// The daemon will not ask again.
    forgotten: bool,
    attached: Option<Attached>,
    input: StdinQueue,
    /// What goes when the process has exited.
    secret_files: SecretFiles,
}

/// Who listens.
#[derive(Debug)]
struct Attached {
    out: Rc<Outbound>,
    stream: u32,
    /// The number of the next byte to send.
    sent: u64,
    /// How much standard input the host may send.
    allowed: usize,
    /// How much was written to the process without an acknowledgement to the host.
    owed: usize,
}

/// Standard input on its way to the process.
#[derive(Debug, Default)]
struct StdinQueue {
    queue: VecDeque<u8>,
    taken: u64,
    /// The last byte taken, which decides how the end is signalled to a terminal.
    last: Option<u8>,
    ended: bool,
    /// The process reads no more.
    closed: bool,
}

impl Command {
    pub(crate) fn new(
        id: String,
        pid: i32,
        number: u64,
        oom_kills_before: u64,
        ends: &Ends,
        tty: bool,
    ) -> Rc<Self> {
        let state = RefCell::new(CommandState::default());
        let terminal = ends.out.clone().filter(|_| tty);
        let wake = Notify::new();
        let command = Self { id, pid, number, oom_kills_before, terminal, state, wake };
        command.state.borrow_mut().input.closed = ends.stdin.is_none();
        Rc::new(command)
    }

    /// Keeps files for as long as the process lives.
    pub(crate) fn hold(&self, files: SecretFiles) {
        self.state.borrow_mut().secret_files = files;
    }

    pub(crate) fn known(&self) -> Known {
        let exit = self.state.borrow().exit;
        Known { command: self.id.clone(), pid: self.pid.unsigned_abs(), exit }
    }

    pub(crate) fn has_exited(&self) -> bool {
        self.state.borrow().exit.is_some()
    }

    /// Takes note that the process was reaped.
    pub(crate) fn exited(&self, exit: Exit) {
        let mut state = self.state.borrow_mut();
        state.exit = Some(exit);
        state.secret_files = SecretFiles::default();
        drop(state);
        self.wake.notify_one();
    }

    /// Drops the command once the attached listener got its exit.
    pub(crate) fn forget(&self) {
        self.state.borrow_mut().forgotten = true;
        self.wake.notify_one();
    }

    /// How much standard input was taken, and how much of it the process's pipe has.
    pub(crate) fn stdin_progress(&self) -> (u64, u64) {
        let input = &self.state.borrow().input;
        (input.taken, input.taken.saturating_sub(input.queue.len() as u64))
    }

    /// Attaches the connection that started the command.
    pub(crate) fn begin(&self, out: &Rc<Outbound>, stream: u32) {
        let attached = Attached { out: Rc::clone(out), stream, sent: 0, allowed: WINDOW, owed: 0 };
        self.state.borrow_mut().attached = Some(attached);
    }

    /// Whether [`Self::attach`] at these places would do.
    pub(crate) fn check_attach(&self, from: u64, stdin_from: u64) -> Result<(), RequestError> {
        let state = self.state.borrow();
        let (base, end) = (state.backlog.base(), state.backlog.end());
        if from < base || from > end {
            let message =
                format!("of `{}` the bytes {base} to {end} are held, not {from}", self.id);
            return Err(RequestError::new(Failure::Invalid, message));
        }
        if stdin_from > state.input.taken {
            let message = format!(
                "`{}` was sent {} bytes of input, not {stdin_from}",
                self.id, state.input.taken
            );
            return Err(RequestError::new(Failure::Invalid, message));
        }
        Ok(())
    }

    /// Attaches another listener from byte `from` on; what is before it counts as kept. An earlier
    /// listener is notified and dropped.
    pub(crate) fn attach(&self, out: &Rc<Outbound>, stream: u32, from: u64) {
        let earlier = self.state.borrow_mut().attached.take();
        if let Some(earlier) = earlier {
            let message = format!("`{}` was attached to again", self.id);
            earlier.out.done(earlier.stream, &RequestError::new(Failure::Exists, message).done());
        }
        let mut state = self.state.borrow_mut();
        state.backlog.keep_to(from);
        let allowed = WINDOW.saturating_sub(state.input.queue.len());
        out.credit(stream, allowed);
        if state.input.closed || state.input.ended {
            out.push(stream, FrameKind::Cancel, &[]);
        }
        state.attached =
            Some(Attached { out: Rc::clone(out), stream, sent: from, allowed, owed: 0 });
        self.wake.notify_one();
    }

    /// Lets go of the listener on this stream of this connection.
    pub(crate) fn detach(&self, out: &Rc<Outbound>, stream: u32) {
        let mut state = self.state.borrow_mut();
        if state.is_attached(out, stream) {
            state.attached = None;
        }
    }

    /// Takes note of what the host has kept.
    pub(crate) fn kept(&self, out: &Rc<Outbound>, stream: u32, bytes: u64) {
        let mut state = self.state.borrow_mut();
        if !state.is_attached(out, stream) {
            return;
        }
        let sent = state.attached.as_ref().map_or(0, |attached| attached.sent);
        let to = state.backlog.base().saturating_add(bytes).min(sent);
        state.backlog.keep_to(to);
        self.wake.notify_one();
    }

    /// Takes standard input from the host. False when it was not allowed to send so much.
    pub(crate) fn input(&self, out: &Rc<Outbound>, stream: u32, bytes: &[u8]) -> bool {
        let mut state = self.state.borrow_mut();
        if !state.is_attached(out, stream) {
            return true;
        }
        let CommandState { attached: Some(attached), input, .. } = &mut *state else { return true };
        let Some(allowed) = attached.allowed.checked_sub(bytes.len()) else { return false };
        attached.allowed = allowed;
        if input.closed || input.ended {
            return true;
        }
        input.queue.extend(bytes);
        input.taken += bytes.len() as u64;
        input.last = bytes.last().copied().or(input.last);
        self.wake.notify_one();
        true
    }

    /// The host sends no more standard input.
    pub(crate) fn end_input(&self, out: &Rc<Outbound>, stream: u32) {
        let mut state = self.state.borrow_mut();
        if !state.is_attached(out, stream) || state.input.ended {
            return;
        }
        state.input.ended = true;
        if let Some(terminal) = &self.terminal {
            // In the middle of a line the first one only hands the line over.
            let again = !matches!(state.input.last, None | Some(b'\n'));
            let code = end_of_file(terminal);
            state.input.queue.extend(std::iter::repeat_n(code, 1 + usize::from(again)));
        }
        self.wake.notify_one();
    }

    /// Changes the size of the terminal.
    pub(crate) fn resize(&self, size: TermSize) -> Result<(), RequestError> {
        let Some(terminal) = &self.terminal else {
            let message = format!("`{}` has no terminal", self.id);
            return Err(RequestError::new(Failure::Invalid, message));
        };
        rustix::termios::tcsetwinsize(terminal.get_ref(), winsize(size)).map_err(|error| {
            let message = format!("could not resize the terminal of `{}`: {error}", self.id);
            RequestError::new(Failure::Fault, message)
        })
    }

    /// Moves bytes until the command is over and its outcome was reported or is available by
    /// attaching.
    pub(crate) async fn run(self: Rc<Self>, mut ends: Ends, scratch: Rc<RefCell<Vec<u8>>>) {
        let mut ending = Ending::default();
        loop {
            let blocked = self.flush();
            let (room, exited, ended_input) = {
                let state = self.state.borrow();
                let no_more =
                    state.input.closed || (state.input.ended && state.input.queue.is_empty());
                (state.backlog.room(), state.exit.is_some(), no_more)
            };
            if ended_input && self.terminal.is_none() {
                ends.stdin = None;
            }
            if exited {
                ends.held = None;
                ending.begin(&ends);
            }
            let silent = ends.out.is_none() && ends.err.is_none();
            if exited && (silent || ending.reached(room)) {
                break;
            }
            let listening = room > 0;
            let writing = !self.state.borrow().input.queue.is_empty();
            tokio::select! {
                biased;
                () = ready(ends.out.as_ref(), Interest::READABLE), if listening && ends.out.is_some() => {
                    self.read(&mut ends.out, FrameKind::Data, &mut ending, &scratch);
                }
                () = ready(ends.err.as_ref(), Interest::READABLE), if listening && ends.err.is_some() => {
                    self.read(&mut ends.err, FrameKind::DataErr, &mut ending, &scratch);
                }
                () = ready(ends.stdin.as_ref(), Interest::WRITABLE), if writing && ends.stdin.is_some() => {
                    self.write(&mut ends.stdin);
                }
                () = self.wake.notified() => {}
                () = changed(blocked.as_ref()), if blocked.is_some() => {}
                () = sleep_until(ending.deadline()), if exited && listening => {}
            }
        }
        {
            let mut state = self.state.borrow_mut();
            state.over = true;
            state.input.closed = true;
            state.input.queue = VecDeque::new();
        }
        ends.stdin = None;
        if self.terminal.is_none() {
            drain(ends.out.take(), Rc::clone(&scratch));
            drain(ends.err.take(), scratch);
        }
        drop(ends);
        self.tell_the_end().await;
    }

    /// Sends what is held and the outcome to the attached listener, now or later.
    async fn tell_the_end(&self) {
        loop {
            let blocked = self.flush();
            {
                let state = self.state.borrow();
                if state.forgotten && state.attached.is_none() {
                    return;
                }
            }
            tokio::select! {
                () = self.wake.notified() => {}
                () = changed(blocked.as_ref()), if blocked.is_some() => {}
            }
        }
    }

    /// Hands over what is held, as far as the connection takes it; returns the connection if it
    /// does not take all.
    fn flush(&self) -> Option<Rc<Outbound>> {
        let mut state = self.state.borrow_mut();
        let CommandState { backlog, exit, over, attached, .. } = &mut *state;
        let listener = attached.as_mut()?;
        if listener.out.is_closed() {
            *attached = None;
            return None;
        }
        // Not gathered: the sender to a slow reader learns to the byte how far it has come.
        if listener.owed > 0 {
            listener.out.credit(listener.stream, listener.owed);
            listener.allowed += std::mem::take(&mut listener.owed);
        }
        while let Some((kind, bytes)) = backlog.from(listener.sent) {
            if !listener.out.has_room() {
                return Some(Rc::clone(&listener.out));
            }
            listener.out.push(listener.stream, kind, &bytes);
            listener.sent += bytes.len() as u64;
        }
        let (true, Some(exit)) = (*over, *exit) else { return None };
        let listener = attached.take()?;
        // The end of the stream calls this command again, which must be free by then.
        drop(state);
        listener.out.done(listener.stream, &Done::Exited(exit));
        None
    }

    /// Reads once from a pipe that is ready, and forgets it at its end.
    fn read(
        &self,
        end: &mut Option<Rc<AsyncFd<OwnedFd>>>,
        kind: FrameKind,
        ending: &mut Ending,
        scratch: &RefCell<Vec<u8>>,
    ) {
        let Some(pipe) = end else { return };
        let mut state = self.state.borrow_mut();
        let mut scratch = scratch.borrow_mut();
        let limit = state.backlog.room().min(scratch.len());
        let Some(buffer) = scratch.get_mut(..limit) else { return };
        match pipe.try_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut *buffer)?)) {
            Ok(0) => *end = None,
            Ok(count) => {
                ending.heard(count);
                state.backlog.push(kind, buffer.get(..count).unwrap_or_default());
            }
            Err(error) if is_transient(&error) => {}
            // A terminal without an open end returns EIO.
            Err(_) => *end = None,
        }
    }

    /// Writes once to standard input that is ready.
    fn write(&self, end: &mut Option<Rc<AsyncFd<OwnedFd>>>) {
        let Some(pipe) = end else { return };
        let mut state = self.state.borrow_mut();
        let CommandState { attached, input, .. } = &mut *state;
        let (bytes, _) = input.queue.as_slices();
        match pipe.try_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, bytes)?)) {
            Ok(count) => {
                input.queue.drain(..count);
                if input.queue.is_empty() {
                    input.queue = VecDeque::new();
                }
                if let Some(attached) = attached {
                    // Bytes of an earlier connection, or that we typed, were never allowed on this.
                    let outstanding = WINDOW.saturating_sub(attached.allowed + attached.owed);
                    attached.owed += count.min(outstanding);
                }
            }
            Err(error) if is_transient(&error) => {}
            Err(_) => {
                *end = None;
                input.closed = true;
                input.queue = VecDeque::new();
                if let Some(attached) = attached {
                    attached.out.push(attached.stream, FrameKind::Cancel, &[]);
                }
            }
        }
    }
}

impl CommandState {
    fn is_attached(&self, out: &Rc<Outbound>, stream: u32) -> bool {
        self.attached
            .as_ref()
            .is_some_and(|attached| attached.stream == stream && Rc::ptr_eq(&attached.out, out))
    }
}

/// Decides when a command whose process has exited is over.
#[derive(Debug, Default)]
struct Ending {
    begun: bool,
    /// What was in the pipes at the exit and was not read yet.
    owed: usize,
    /// There was no room the last time.
    deafened: bool,
    quiet: Option<Instant>,
    late: Option<Instant>,
}

impl Ending {
    fn begin(&mut self, ends: &Ends) {
        if self.begun {
            return;
        }
        self.begun = true;
        let both = [&ends.out, &ends.err];
        self.owed = both.into_iter().flatten().map(|pipe| waiting(pipe.get_ref().as_fd())).sum();
        self.heard(0);
    }

    /// Takes note of output.
    fn heard(&mut self, bytes: usize) {
        if !self.begun {
            return;
        }
        self.owed = self.owed.saturating_sub(bytes);
        self.quiet = Some(Instant::now() + QUIET);
        if self.owed == 0 && self.late.is_none() {
            self.late = Some(Instant::now() + LATE);
        }
    }

    fn deadline(&self) -> Instant {
        let now = Instant::now();
        let quiet = self.quiet.unwrap_or(now);
        self.late.map_or(quiet, |late| late.min(quiet))
    }

    /// Whether to wait no longer. While there is no room nothing can be read, so silence means
    /// nothing.
    fn reached(&mut self, room: usize) -> bool {
        if std::mem::replace(&mut self.deafened, room == 0) {
            self.quiet = Some(Instant::now() + QUIET);
        }
        room > 0 && self.owed == 0 && Instant::now() >= self.deadline()
    }
}

/// The kernel's form of a terminal's size.
pub(crate) fn winsize(size: TermSize) -> Winsize {
    Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 }
}

/// The character that means end of file on this terminal.
fn end_of_file(terminal: &AsyncFd<OwnedFd>) -> u8 {
    rustix::termios::tcgetattr(terminal.get_ref())
        .map_or(4, |settings| settings.special_codes[SpecialCodeIndex::VEOF])
}

fn is_transient(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::AGAIN | Errno::INTR)) || error.kind() == io::ErrorKind::WouldBlock
}

/// Waits until a pipe is ready; forever if there is none.
async fn ready(pipe: Option<&Rc<AsyncFd<OwnedFd>>>, interest: Interest) {
    match pipe {
        // An error shows again when the pipe is used.
        Some(pipe) => drop(pipe.ready(interest).await),
        None => std::future::pending().await,
    }
}

async fn changed(out: Option<&Rc<Outbound>>) {
    match out {
        Some(out) => out.changed().await,
        None => std::future::pending().await,
    }
}

/// Reads and drops what leftovers of a command print, until they are gone.
fn drain(pipe: Option<Rc<AsyncFd<OwnedFd>>>, scratch: Rc<RefCell<Vec<u8>>>) {
    let Some(pipe) = pipe else { return };
    tokio::task::spawn_local(async move {
        loop {
            ready(Some(&pipe), Interest::READABLE).await;
            let mut buffer = scratch.borrow_mut();
            match pipe.try_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut *buffer)?)) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if is_transient(&error) => {}
                Err(_) => return,
            }
        }
    });
}
