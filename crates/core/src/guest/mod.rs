//! The host's end of the agent link.
//!
//! [`Guest`] is one connection to the agent of one live machine. It knows the messages of
//! [`sandkeep_proto::link`] and nothing of sandboxes, drivers or the database: the engine learns
//! from the driver where the agent listens, dials it here, and decides what a failure means.
//!
//! *Connections are disposable.* When one is lost, every call on it fails and nothing on it is
//! reused; commands live on inside. The next connection asks [`Guest::commands`] and
//! [`Guest::attach`]es to each from the first byte the daemon has not stored.
//!
//! *The agent is not trusted.* It runs inside the sandbox, next to whatever escaped there. What it
//! says is parsed, counted and bounded before anything is kept (see `connection`).
//!
//! *The agent is not trusted to answer.* Every wait for it has a deadline here, so that no caller can
//! forget one ([`Deadlines`]): a request fails with [`GuestError::Timeout`] when no reply comes, a
//! transfer when no byte moves. Three waits have none, because silence is normal there: output of a
//! command, input that a command does not read, and a connection to a port. They end with the
//! connection. A timeout fails one call; the connection and the other calls on it continue.
//! Dropping a call is always safe.

mod connection;
mod error;
mod receive_buffer;
mod resume;
mod serial;
mod stream;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sandkeep_proto::ask::InsideAnswer;
use sandkeep_proto::frame::WINDOW;
use sandkeep_proto::link::{
    Assemble, At, Entry, InsideQuestion, Known, Looked, Renew, Reply, Request, Spawn, TermSize,
    VERSION,
};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout_at};

use connection::{AgentConnection, ConnectionOwner, Handle};
pub use error::GuestError;
pub use resume::{ResumeHandshake, ResumedGuest};
use stream::unexpected;
pub use stream::{
    Incoming, Outgoing, Output, OutputEvent, Process, Stdin, StdinCount, TransferSummary,
};

/// How long the agent may take before a call fails with [`GuestError::Timeout`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// For the reply to a request. A few requests that do more work get a multiple of it.
    pub reply: Duration,
    /// For the next byte of a transfer, for credit to send the next, and for its outcome after the last.
    pub progress: Duration,
}

impl Default for Deadlines {
    /// Generous for a loaded host: starting a process, listing ten thousand names and freezing a disk
    /// take far less.
    fn default() -> Self {
        Self { reply: Duration::from_secs(30), progress: Duration::from_secs(60) }
    }
}

/// How long an agent may take to answer the first greeting over a serial port before it is dialled again; twice as long each time.
const HELLO: Duration = Duration::from_secs(2);

/// A connection to an agent. Clones share it; it closes when the last of them and of the streams
/// opened through them is dropped.
#[derive(Debug, Clone)]
pub struct Guest {
    owner: Arc<ConnectionOwner>,
    generation: Arc<str>,
    deadlines: Deadlines,
}

impl Guest {
    /// Dials the agent until it listens, and greets it.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Timeout`] when it does not answer within `patience`, and with
    /// [`GuestError::Version`] when it is not of this daemon's version.
    pub async fn connect(socket: &Path, patience: Duration) -> Result<Self, GuestError> {
        let deadline = Instant::now() + patience;
        let stream = dial(socket, deadline).await?;
        Self::greet(AgentConnection::start(stream, None), deadline).await
    }

    /// Dials the agent of a machine of its own, through the socket of its serial port, until it answers, and greets it.
    ///
    /// # Errors
    ///
    /// As [`Guest::connect`].
    pub async fn connect_serial(socket: &Path, patience: Duration) -> Result<Self, GuestError> {
        Self::begin_serial(socket, Instant::now() + patience).await
    }

    async fn begin_serial(socket: &Path, deadline: Instant) -> Result<Self, GuestError> {
        let mut hello = HELLO;
        loop {
            let stream = dial(socket, deadline).await?;
            // A connection that is closed before any byte came belongs to a hypervisor that was
            // just ending, or was busy with another client.
            if let Some(port) = serial::begin(&stream, deadline).await? {
                let until = deadline.min(Instant::now() + hello);
                match Self::greet(AgentConnection::start(stream, Some(port)), until).await {
                    // An agent that took note late of who is at its port has given this connection up.
                    Err(GuestError::Timeout | GuestError::Lost) if Instant::now() < deadline => {
                        hello *= 2;
                    }
                    greeted => return greeted,
                }
            }
            if Instant::now() + serial::AGAIN > deadline {
                return Err(GuestError::Timeout);
            }
            sleep(serial::AGAIN / 10).await;
        }
    }

    async fn greet(owner: Arc<ConnectionOwner>, deadline: Instant) -> Result<Self, GuestError> {
        let greeting = async {
            let handle =
                AgentConnection::open(&owner, &Request::Hello { version: VERSION }, 0).await?;
            let reply = handle.reply().await?;
            handle.forget();
            Ok(reply)
        };
        let reply = timeout_at(deadline, greeting).await.map_err(|_| GuestError::Timeout)??;
        let generation = greeted(reply)?.into();
        Ok(Self { owner, generation, deadlines: Deadlines::default() })
    }

    /// The same connection with other deadlines, for calls made through it from now on.
    #[must_use]
    pub fn with_deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = deadlines;
        self
    }

    /// The deadlines of calls on it.
    #[must_use]
    pub fn deadlines(&self) -> Deadlines {
        self.deadlines
    }

    /// What the agent calls this run of the machine; another after every start, restore or fork.
    #[must_use]
    pub fn generation(&self) -> &str {
        &self.generation
    }

    /// Whether the connection is gone.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.owner.connection.is_lost()
    }

    /// Waits until the connection is gone.
    pub async fn lost(&self) {
        self.owner.connection.lost().await;
    }

    /// Starts a process.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when it cannot be started, and says why.
    pub async fn spawn(&self, spawn: Spawn) -> Result<Process, GuestError> {
        let stdin = spawn.stdin;
        self.process(Request::Spawn(spawn), stdin, WINDOW).await
    }

    /// Attaches to a command of an earlier connection from output byte `from`.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when the agent does not know the command, or no longer
    /// has byte `from`.
    pub async fn attach(
        &self,
        command: &str,
        from: u64,
        stdin_from: u64,
    ) -> Result<Process, GuestError> {
        let request = Request::Attach { command: command.to_owned(), from, stdin_from };
        // Earlier input may still be waiting inside, so the agent says how much more it takes.
        self.process(request, true, 0).await
    }

    async fn process(
        &self,
        request: Request,
        stdin: bool,
        credit: usize,
    ) -> Result<Process, GuestError> {
        let (handle, reply) = self.call(&request, credit).await?;
        let Reply::Spawned { pid, stdin_taken, stdin_written } = reply else {
            return Err(unexpected());
        };
        let handle = Arc::new(handle);
        let output = Output { handle: Arc::clone(&handle) };
        let stdin = Stdin::new(handle, stdin, stdin_taken, stdin_written);
        Ok(Process { pid, stdin_taken, output, stdin })
    }

    /// Lists the commands the agent still knows, in the order they were started.
    ///
    /// # Errors
    ///
    /// Fails when the connection does.
    pub async fn commands(&self) -> Result<Vec<Known>, GuestError> {
        match self.ask(&Request::Commands).await? {
            Reply::Commands { commands } => Ok(commands),
            _ => Err(unexpected()),
        }
    }

    /// Lets the agent drop a command that has exited; fine when it is unknown.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when the command is still running.
    pub async fn forget(&self, command: &str) -> Result<(), GuestError> {
        self.ask_ok(&Request::Forget { command: command.to_owned() }).await
    }

    /// Sends a signal to a command's process group.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when the command is unknown or has exited.
    pub async fn signal(&self, command: &str, signal: i32) -> Result<(), GuestError> {
        self.ask_ok(&Request::Signal { command: command.to_owned(), signal }).await
    }

    /// Changes the size of a command's terminal.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when the command is unknown or has no terminal.
    pub async fn resize(&self, command: &str, size: TermSize) -> Result<(), GuestError> {
        self.ask_ok(&Request::Resize { command: command.to_owned(), size }).await
    }

    /// Ends every process but the agent: politely for `grace`, then by force.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when some will not die.
    pub async fn quiesce(&self, grace: Duration) -> Result<(), GuestError> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.ask_ok(&Request::Quiesce { grace_ms }).await
    }

    /// Asks a machine of its own what changed in its root since the last look. `saved`: all that
    /// exists now is in a snapshot.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] by an agent of an earlier version.
    pub async fn look(&self, saved: bool) -> Result<Looked, GuestError> {
        match self.ask(&Request::Look { saved }).await? {
            Reply::Looked(looked) => Ok(*looked),
            _ => Err(unexpected()),
        }
    }

    /// Lists what programs inside ask, with the version of that list, once it is another one than `known` or after `wait`.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] by an agent of an earlier version.
    pub async fn questions(
        &self,
        known: u64,
        wait: Duration,
    ) -> Result<(u64, Vec<InsideQuestion>), GuestError> {
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        match self.ask(&Request::Questions { known, wait_ms }).await? {
            Reply::Questions { version, questions } => Ok((version, questions)),
            _ => Err(unexpected()),
        }
    }

    /// Answers a question; fine when it is unknown.
    ///
    /// # Errors
    ///
    /// Fails when the connection does.
    pub async fn answer_question(
        &self,
        question: &str,
        answer: InsideAnswer,
        comment: &str,
    ) -> Result<(), GuestError> {
        let (question, comment) = (question.to_owned(), comment.to_owned());
        self.ask_ok(&Request::AnswerQuestion { question, answer, comment }).await
    }

    /// Reads a file from `offset`, at most `limit` bytes.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when it cannot be opened.
    pub async fn read_file(
        &self,
        at: At,
        offset: u64,
        limit: Option<u64>,
    ) -> Result<(Entry, Incoming), GuestError> {
        self.incoming(Request::ReadFile { at, offset, limit }).await
    }

    /// Writes a file; it is in place when [`Outgoing::finish`] says so.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when it cannot be written.
    pub async fn write_file(
        &self,
        at: At,
        mode: Option<u32>,
        parents: bool,
        append: bool,
    ) -> Result<Outgoing, GuestError> {
        self.outgoing(Request::WriteFile { at, mode, parents, append }).await
    }

    /// Makes a directory.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when it cannot be made.
    pub async fn make_dir(
        &self,
        at: At,
        mode: Option<u32>,
        parents: bool,
    ) -> Result<(), GuestError> {
        self.ask_ok(&Request::MakeDir { at, mode, parents }).await
    }

    /// Lists a directory, sorted by name, from after the name `after`. The flag says whether there
    /// is more than was listed.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when it cannot be read.
    pub async fn list_dir(
        &self,
        at: At,
        after: Option<String>,
    ) -> Result<(Vec<Entry>, bool), GuestError> {
        match self.ask(&Request::ListDir { at, after }).await? {
            Reply::Entries { entries, more } => Ok((entries, more)),
            _ => Err(unexpected()),
        }
    }

    /// Returns the metadata of a path, without following a final symlink.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when nothing exists there or it may not be seen.
    pub async fn stat(&self, at: At) -> Result<Entry, GuestError> {
        match self.ask(&Request::Stat { at }).await? {
            Reply::Stat { entry } => Ok(entry),
            _ => Err(unexpected()),
        }
    }

    /// Renames a file or directory.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when that is not possible.
    pub async fn rename(&self, at: At, to: String) -> Result<(), GuestError> {
        self.ask_ok(&Request::Move { at, to }).await
    }

    /// Removes a file or directory.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when that is not possible.
    pub async fn remove(
        &self,
        at: At,
        recursive: bool,
        missing_ok: bool,
    ) -> Result<(), GuestError> {
        self.ask_ok(&Request::Remove { at, recursive, missing_ok }).await
    }

    /// Unpacks a tar stream below a directory, which is made if absent. With `through_links`,
    /// directories on the way to an entry may be symlinks.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when the directory cannot be used.
    pub async fn tar_in(&self, at: At, through_links: bool) -> Result<Outgoing, GuestError> {
        self.outgoing(Request::TarIn { at, through_links }).await
    }

    /// Packs a file or directory as a tar stream.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when nothing exists there.
    pub async fn tar_out(&self, at: At) -> Result<(Entry, Incoming), GuestError> {
        self.incoming(Request::TarOut { at }).await
    }

    /// Makes a machine of its own the sandbox's.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when it was done before, or cannot be done: then the machine is of no use.
    pub async fn assemble(&self, assemble: Assemble) -> Result<(), GuestError> {
        self.ask_ok(&Request::Assemble(assemble)).await
    }

    /// Notifies a restored machine of what changed, and returns the agent's name for this run of it
    /// from now on. [`Guest::generation`] of connections that were greeted before stays the same.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when something of it did not work.
    pub async fn renew(&self, renew: Renew) -> Result<String, GuestError> {
        match self.ask(&Request::Renew(renew)).await? {
            Reply::Hello { generation, .. } => Ok(generation),
            _ => Err(unexpected()),
        }
    }

    /// Writes everything to the machine's disks and keeps it from writing more, for at most ten
    /// seconds.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when that is not possible; then nothing is frozen.
    pub async fn freeze(&self) -> Result<(), GuestError> {
        self.ask_ok(&Request::Freeze).await
    }

    /// Lets a machine write again; fine when it does.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when that is not possible.
    pub async fn thaw(&self) -> Result<(), GuestError> {
        self.ask_ok(&Request::Thaw).await
    }

    /// Packs what was written to a machine's root (0) or to one of its drives (from 1) as a tar stream.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when there is no such part, or nothing can be written to it.
    pub async fn export(&self, part: u32) -> Result<Incoming, GuestError> {
        let handle = self.ready(&Request::Export { part }).await?;
        Ok(Incoming { handle, verdict: true, progress: Some(self.deadlines.progress) })
    }

    /// Connects to a TCP port on the sandbox's loopback.
    ///
    /// # Errors
    ///
    /// Fails with [`GuestError::Refused`] when nothing listens there.
    pub async fn connect_port(&self, port: u16) -> Result<(Outgoing, Incoming), GuestError> {
        let handle = self.ready(&Request::Connect { port }).await?;
        // A connection may be silent for as long as its two ends like.
        let outgoing = Outgoing { handle: Arc::clone(&handle), progress: None };
        Ok((outgoing, Incoming { handle, verdict: false, progress: None }))
    }

    async fn incoming(&self, request: Request) -> Result<(Entry, Incoming), GuestError> {
        let (handle, reply) = self.call(&request, 0).await?;
        let Reply::Stat { entry } = reply else {
            return Err(unexpected());
        };
        let progress = Some(self.deadlines.progress);
        Ok((entry, Incoming { handle: Arc::new(handle), verdict: true, progress }))
    }

    async fn outgoing(&self, request: Request) -> Result<Outgoing, GuestError> {
        let progress = Some(self.deadlines.progress);
        Ok(Outgoing { handle: self.ready(&request).await?, progress })
    }

    /// Opens a stream that takes Data once the agent has answered [`Reply::Ok`].
    async fn ready(&self, request: &Request) -> Result<Arc<Handle>, GuestError> {
        match self.call(request, WINDOW).await? {
            (handle, Reply::Ok) => Ok(Arc::new(handle)),
            _ => Err(unexpected()),
        }
    }

    /// Asks something that has an answer and nothing else.
    async fn ask(&self, request: &Request) -> Result<Reply, GuestError> {
        let (handle, reply) = self.call(request, 0).await?;
        handle.forget();
        Ok(reply)
    }

    /// Sends a request and waits for the reply. The only way to make a request, so that each has a deadline.
    async fn call(&self, request: &Request, credit: usize) -> Result<(Handle, Reply), GuestError> {
        let call = async {
            let handle = AgentConnection::open(&self.owner, request, credit).await?;
            let reply = handle.reply().await?;
            Ok((handle, reply))
        };
        within(Some(self.patience(request)), call).await
    }

    /// How long the reply to a request may take.
    fn patience(&self, request: &Request) -> Duration {
        let reply = self.deadlines.reply;
        match request {
            Request::Quiesce { grace_ms } => reply + Duration::from_millis(*grace_ms),
            Request::Assemble(_) => 2 * reply,
            // A tree of a million files takes a while.
            Request::Remove { recursive: true, .. } => 10 * reply,
            _ => reply,
        }
    }

    async fn ask_ok(&self, request: &Request) -> Result<(), GuestError> {
        match self.ask(request).await? {
            Reply::Ok => Ok(()),
            _ => Err(unexpected()),
        }
    }
}

/// What an agent of our version calls this run of its machine.
fn greeted(reply: Reply) -> Result<String, GuestError> {
    match reply {
        Reply::Hello { version, generation } if version == VERSION => Ok(generation),
        Reply::Hello { version, .. } => Err(GuestError::Version { ours: VERSION, theirs: version }),
        _ => Err(unexpected()),
    }
}

/// Waits for the agent until the deadline, if there is one.
async fn within<T>(
    patience: Option<Duration>,
    answer: impl Future<Output = Result<T, GuestError>>,
) -> Result<T, GuestError> {
    match patience {
        Some(patience) => {
            tokio::time::timeout(patience, answer).await.map_err(|_| GuestError::Timeout)?
        }
        None => answer.await,
    }
}

/// Connects as soon as something listens.
async fn dial(socket: &Path, deadline: Instant) -> Result<UnixStream, GuestError> {
    let mut pause = Duration::from_millis(1);
    loop {
        let error = match UnixStream::connect(socket).await {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let early = matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
        );
        if !early {
            return Err(GuestError::Io { path: socket.to_owned(), source: error });
        }
        if Instant::now() + pause > deadline {
            return Err(GuestError::Timeout);
        }
        sleep(pause).await;
        pause = (pause * 5 / 4).min(Duration::from_millis(20));
    }
}
