//! File operations: a thread each, and the stream that it moves bytes on.
//!
//! A piece of work runs on a thread that becomes the user it is for, does one thing and ends; the
//! kernel checks its permissions like any process's. The thread talks to its stream through
//! [`FileTask`]; the task in between waits for credit and for room on the connection, so the thread
//! blocks when the host does. When the stream is dropped the task says so at the next use, and the
//! work breaks off.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use sandkeep_proto::frame::{CHUNK, FrameKind, WINDOW};
use sandkeep_proto::link::{At, Done, Failure, Reply};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::machine::Machine;
use crate::serve::Agent;
use crate::serve::command::launch::become_on_this_thread;
use crate::serve::command::user::{Identity, lookup};
use crate::serve::error::{RequestError, say};
use crate::serve::link::connection::Stream;
use crate::serve::link::outbound::Outbound;

/// How many chunks a thread may be ahead of its stream.
const AHEAD: usize = 4;
/// Enough for a walk through deep directories.
const STACK: usize = 2 << 20;

/// A path, and whose eyes it is seen with.
#[derive(Debug)]
pub(crate) struct FileTarget {
    pub(crate) path: PathBuf,
    pub(crate) identity: Identity,
    base: PathBuf,
}

impl FileTarget {
    /// Finds the user and becomes it.
    fn enter(at: &At) -> Result<Self, RequestError> {
        let identity = lookup(at.user.as_deref())?;
        let base = Path::new("/").join(at.cwd.as_deref().unwrap_or(&identity.home));
        if at.path.is_empty() || at.path.contains('\0') {
            return Err(RequestError::new(
                Failure::Invalid,
                "a path has at least one byte, none of them zero",
            ));
        }
        if identity.uid != 0 || identity.gid != 0 {
            become_on_this_thread(&identity).map_err(|error| {
                let message = format!("could not become user {}: {}", identity.uid, say(&error));
                RequestError::new(Failure::NoUser, message)
            })?;
        }
        Ok(Self { path: base.join(&at.path), identity, base })
    }

    /// Another path, resolved like this one's.
    pub(crate) fn beside(&self, path: &str) -> PathBuf {
        self.base.join(path)
    }
}

/// The runtime's end of a stream that moves bytes.
#[derive(Debug)]
pub(crate) struct Transfer {
    input: mpsc::UnboundedSender<Input>,
    /// How much the host may send.
    allowed: Cell<usize>,
    /// How much we may send.
    credit: Cell<usize>,
    credited: Notify,
}

/// What the host sends.
#[derive(Debug)]
pub(crate) enum Input {
    Data(Vec<u8>),
    End,
}

impl Transfer {
    pub(crate) fn new() -> (Rc<Self>, mpsc::UnboundedReceiver<Input>) {
        let (input, receiver) = mpsc::unbounded_channel();
        let transfer = Self {
            input,
            allowed: Cell::new(WINDOW),
            credit: Cell::new(WINDOW),
            credited: Notify::new(),
        };
        (Rc::new(transfer), receiver)
    }

    /// Takes Data from the host. False when it was not allowed to send so much.
    pub(crate) fn input(&self, bytes: &[u8]) -> bool {
        let Some(allowed) = self.allowed.get().checked_sub(bytes.len()) else { return false };
        self.allowed.set(allowed);
        // An empty frame costs no credit, so it must cost no memory.
        if !bytes.is_empty() {
            // A task that no longer listens is about to end the stream.
            let _ = self.input.send(Input::Data(bytes.to_vec()));
        }
        true
    }

    pub(crate) fn end(&self) {
        let _ = self.input.send(Input::End);
    }

    pub(crate) fn credit(&self, amount: u32) {
        self.credit.set(self.credit.get().saturating_add(amount as usize));
        self.credited.notify_one();
    }

    /// Lets the host send so much more.
    pub(crate) fn took(&self, out: &Outbound, stream: u32, bytes: usize) {
        self.allowed.set(self.allowed.get() + bytes);
        out.credit(stream, bytes);
    }

    /// Sends bytes as credit and the connection allow.
    pub(crate) async fn send(&self, out: &Outbound, stream: u32, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            out.room().await;
            let take = self.credit.get().min(bytes.len()).min(CHUNK);
            if take == 0 {
                self.credited.notified().await;
                continue;
            }
            self.credit.set(self.credit.get() - take);
            let (now, later) = bytes.split_at(take);
            out.push(stream, FrameKind::Data, now);
            bytes = later;
        }
    }
}

/// What a thread has to say.
enum Event {
    Reply(Reply),
    Data(Vec<u8>),
    Took(usize),
    Done(Done),
}

/// A thread's end of its stream: reads what the host sends, writes what it is to get.
pub(crate) struct FileTask {
    events: mpsc::Sender<Event>,
    input: mpsc::UnboundedReceiver<Input>,
    chunk: Vec<u8>,
    used: usize,
    ended: bool,
    replied: bool,
    pub(crate) received: u64,
    pub(crate) sent: u64,
}

impl FileTask {
    fn tell(&self, event: Event) -> io::Result<()> {
        self.events.blocking_send(event).map_err(|_| nobody())
    }

    /// Gives the answer to the request, after which bytes may flow.
    pub(crate) fn reply(&mut self, reply: Reply) -> Result<(), RequestError> {
        self.replied = true;
        self.tell(Event::Reply(reply))
            .map_err(|error| RequestError::new(Failure::Fault, error.to_string()))
    }

    /// How many bytes were sent so far.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    fn finish(self, outcome: Result<Done, RequestError>) {
        let event = match outcome {
            Ok(done) => Event::Done(done),
            Err(problem) if self.replied => Event::Done(problem.done()),
            Err(problem) => Event::Reply(problem.reply()),
        };
        // Without a listener the event is not needed.
        let _ = self.tell(event);
    }
}

fn nobody() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the transfer was given up")
}

impl Read for FileTask {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.used == self.chunk.len() && !self.ended {
            match self.input.blocking_recv() {
                Some(Input::Data(bytes)) => {
                    self.received += bytes.len() as u64;
                    self.tell(Event::Took(bytes.len()))?;
                    self.chunk = bytes;
                    self.used = 0;
                }
                Some(Input::End) => self.ended = true,
                None => return Err(nobody()),
            }
        }
        let mut rest = self.chunk.get(self.used..).unwrap_or_default();
        let count = rest.read(buffer)?;
        self.used += count;
        Ok(count)
    }
}

impl Write for FileTask {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let now = bytes.get(..CHUNK).unwrap_or(bytes);
        self.tell(Event::Data(now.to_vec()))?;
        self.sent += now.len() as u64;
        Ok(now.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Does work that has an answer and nothing else.
pub(crate) fn short(
    agent: &Rc<Agent>,
    out: &Rc<Outbound>,
    stream: u32,
    at: At,
    job: impl FnOnce(FileTarget) -> Result<Reply, RequestError> + Send + 'static,
) {
    answer(agent, out, stream, move || FileTarget::enter(&at).and_then(job));
}

/// The same, without a target path.
pub(crate) fn answer(
    agent: &Rc<Agent>,
    out: &Rc<Outbound>,
    stream: u32,
    job: impl FnOnce() -> Result<Reply, RequestError> + Send + 'static,
) {
    let agent = Rc::clone(agent);
    promise(out, stream, async move {
        let _permit = agent.short_work.acquire().await;
        let (answer, answered) = oneshot::channel();
        thread(move || drop(answer.send(job())))?;
        answered.await.unwrap_or_else(|_| Err(broken()))
    });
}

/// The same, on the machine's own thread for that, after what it was given before.
pub(crate) fn in_turn(
    machine: &Machine,
    out: &Rc<Outbound>,
    stream: u32,
    job: impl FnOnce(&Machine) -> Result<Reply, RequestError> + Send + 'static,
) {
    let (answer, answered) = oneshot::channel();
    let told = machine.in_turn(move |machine| drop(answer.send(job(machine))));
    promise(out, stream, async move {
        told?;
        answered.await.unwrap_or_else(|_| Err(broken()))
    });
}

/// Answers a request when there is an answer.
fn promise(
    out: &Rc<Outbound>,
    stream: u32,
    outcome: impl Future<Output = Result<Reply, RequestError>> + 'static,
) {
    let mine = Rc::clone(out);
    let task = tokio::task::spawn_local(async move {
        mine.finish(stream, &outcome.await.unwrap_or_else(RequestError::reply));
    });
    out.streams.borrow_mut().insert(stream, Stream::task(task.abort_handle(), None));
}

/// Does work that moves bytes.
pub(crate) fn long(
    agent: &Rc<Agent>,
    out: &Rc<Outbound>,
    stream: u32,
    at: At,
    job: impl FnOnce(FileTarget, &mut FileTask) -> Result<Done, RequestError> + Send + 'static,
) {
    moving(agent, out, stream, move |task| {
        FileTarget::enter(&at).and_then(|target| job(target, task))
    });
}

/// The same, without a target path.
pub(crate) fn moving(
    agent: &Rc<Agent>,
    out: &Rc<Outbound>,
    stream: u32,
    job: impl FnOnce(&mut FileTask) -> Result<Done, RequestError> + Send + 'static,
) {
    let (agent, mine) = (Rc::clone(agent), Rc::clone(out));
    let (transfer, input) = Transfer::new();
    let carried = Rc::clone(&transfer);
    let task = tokio::task::spawn_local(async move {
        let _permit = agent.long_work.acquire().await;
        let (events, mut heard) = mpsc::channel(AHEAD);
        let started = thread(move || {
            let mut task = FileTask {
                events,
                input,
                chunk: Vec::new(),
                used: 0,
                ended: false,
                replied: false,
                received: 0,
                sent: 0,
            };
            let outcome = job(&mut task);
            task.finish(outcome);
        });
        if let Err(problem) = started {
            return mine.finish(stream, &problem.reply());
        }
        let mut replied = false;
        while let Some(event) = heard.recv().await {
            match event {
                Event::Reply(reply @ Reply::Error { .. }) => return mine.finish(stream, &reply),
                Event::Reply(reply) => {
                    mine.reply(stream, &reply);
                    replied = true;
                }
                Event::Data(bytes) => carried.send(&mine, stream, &bytes).await,
                Event::Took(bytes) => carried.took(&mine, stream, bytes),
                Event::Done(done) => return mine.done(stream, &done),
            }
        }
        // The thread ended without a reply.
        if replied {
            mine.done(stream, &broken().done());
        } else {
            mine.finish(stream, &broken().reply());
        }
    });
    out.streams.borrow_mut().insert(stream, Stream::task(task.abort_handle(), Some(transfer)));
}

fn broken() -> RequestError {
    RequestError::new(Failure::Fault, "the work broke off")
}

/// Does work on a thread of its own.
fn thread(work: impl FnOnce() + Send + 'static) -> Result<(), RequestError> {
    std::thread::Builder::new().stack_size(STACK).spawn(work).map(drop).map_err(|error| {
        RequestError::new(Failure::Exhausted, format!("could not start a thread: {}", say(&error)))
    })
}
