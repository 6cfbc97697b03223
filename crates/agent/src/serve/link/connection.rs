//! One connection: reads frames, and hands each to the stream it is for.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use sandkeep_proto::frame::{FrameKind, HEADER, Header};
use sandkeep_proto::link::{Failure, Reply, Request, VERSION};
use tokio::task::AbortHandle;
use zeroize::Zeroize as _;

use crate::serve::command::Command;
use crate::serve::command::reap;
use crate::serve::command::start::start;
use crate::serve::error::RequestError;
use crate::serve::files::worker::Transfer;
use crate::serve::files::{self, tar_in, tar_out, worker};
use crate::serve::link::outbound::Outbound;
use crate::serve::link::transport::Transport;
use crate::serve::questions;
use crate::serve::{Agent, machine_requests, port};

/// How many streams may be open on a connection.
const STREAMS: usize = 1024;

/// What a stream that is open belongs to.
#[derive(Debug)]
pub(crate) enum Stream {
    /// A command that is attached.
    Command(Rc<Command>),
    /// A request under way.
    Task(Task),
}

/// A request under way: the task that carries it out ends with its stream.
#[derive(Debug)]
pub(crate) struct Task {
    handle: AbortHandle,
    /// Where Data of the stream goes, if any may come.
    transfer: Option<Rc<Transfer>>,
}

impl Stream {
    /// A stream that a task works on.
    pub(crate) fn task(handle: AbortHandle, transfer: Option<Rc<Transfer>>) -> Self {
        Self::Task(Task { handle, transfer })
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

/// The host broke the rules of the link.
#[derive(Debug)]
struct Violation;

/// Serves a connection until it ends, by itself or because a newer one was greeted. Its input
/// begins with `first`.
pub(crate) async fn serve(agent: Rc<Agent>, transport: Transport, first: &[u8]) {
    let out = Outbound::new(transport, first);
    let writer = tokio::task::spawn_local(Rc::clone(&out).write());
    let mut connection =
        Connection { agent, out: Rc::clone(&out), greeted: false, held_secrets: Cell::new(false) };
    connection.read().await;
    connection.close();
    writer.abort();
}

struct Connection {
    agent: Rc<Agent>,
    out: Rc<Outbound>,
    greeted: bool,
    /// A request that was just read held secrets.
    held_secrets: Cell<bool>,
}

impl Connection {
    async fn read(&mut self) {
        let out = Rc::clone(&self.out);
        let scratch = Rc::clone(&self.agent.scratch);
        let mut buffer = Vec::new();
        loop {
            let ready = tokio::select! {
                ready = out.transport().readable() => ready,
                () = out.closed() => return,
            };
            if ready.is_err() {
                return;
            }
            let read = out.transport().try_read(&mut scratch.borrow_mut());
            match read {
                Ok(0) => return,
                Ok(count) => {
                    buffer.extend_from_slice(scratch.borrow().get(..count).unwrap_or_default());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => return,
            }
            let Ok(used) = self.frames(&buffer) else { return };
            if self.held_secrets.take() {
                // What was read is not left lying.
                scratch.borrow_mut().as_mut_slice().zeroize();
                buffer.get_mut(..used).unwrap_or_default().zeroize();
            }
            buffer.drain(..used);
        }
    }

    /// Acts on every whole frame and returns how many bytes they took.
    fn frames(&mut self, bytes: &[u8]) -> Result<usize, Violation> {
        let mut rest = bytes;
        while let Some(header) = rest.first_chunk::<HEADER>() {
            let header = Header::decode(header).map_err(|_| Violation)?;
            let Some(payload) = rest.get(HEADER..HEADER + header.length) else { break };
            self.frame(header, payload)?;
            rest = rest.get(HEADER + header.length..).unwrap_or_default();
        }
        Ok(bytes.len() - rest.len())
    }

    fn frame(&mut self, header: Header, payload: &[u8]) -> Result<(), Violation> {
        let stream = header.stream;
        match header.kind {
            FrameKind::Open => self.open(stream, payload),
            FrameKind::Data => self.data(stream, payload),
            FrameKind::Credit => {
                let amount: [u8; 4] = payload.try_into().map_err(|_| Violation)?;
                self.credit(stream, u32::from_le_bytes(amount));
                Ok(())
            }
            FrameKind::End => {
                self.end(stream);
                Ok(())
            }
            FrameKind::Cancel => {
                let dropped = self.out.streams.borrow_mut().remove(&stream);
                if let Some(Stream::Command(command)) = &dropped {
                    command.detach(&self.out, stream);
                }
                Ok(())
            }
            FrameKind::Reply | FrameKind::DataErr | FrameKind::Done => Err(Violation),
        }
    }

    fn data(&self, stream: u32, payload: &[u8]) -> Result<(), Violation> {
        let allowed = match self.find(stream) {
            Some(StreamTarget::Command(command)) => command.input(&self.out, stream, payload),
            Some(StreamTarget::Transfer(transfer)) => transfer.input(payload),
            // It has ended; the host did not know yet.
            None => true,
        };
        if allowed { Ok(()) } else { Err(Violation) }
    }

    fn credit(&self, stream: u32, amount: u32) {
        match self.find(stream) {
            Some(StreamTarget::Command(command)) => command.kept(&self.out, stream, amount.into()),
            Some(StreamTarget::Transfer(transfer)) => transfer.credit(amount),
            None => {}
        }
    }

    fn end(&self, stream: u32) {
        match self.find(stream) {
            Some(StreamTarget::Command(command)) => command.end_input(&self.out, stream),
            Some(StreamTarget::Transfer(transfer)) => transfer.end(),
            None => {}
        }
    }

    /// What a stream belongs to, with the table free again: acting on it may change the table.
    fn find(&self, stream: u32) -> Option<StreamTarget> {
        match self.out.streams.borrow().get(&stream)? {
            Stream::Command(command) => Some(StreamTarget::Command(Rc::clone(command))),
            Stream::Task(task) => task.transfer.as_ref().map(Rc::clone).map(StreamTarget::Transfer),
        }
    }

    fn open(&mut self, stream: u32, payload: &[u8]) -> Result<(), Violation> {
        if stream == 0 || self.out.streams.borrow().contains_key(&stream) {
            return Err(Violation);
        }
        let request = match serde_json::from_slice(payload) {
            Ok(request) => request,
            Err(error) => {
                let message = format!("the request cannot be read: {error}");
                self.refuse(stream, RequestError::new(Failure::Invalid, message));
                return Ok(());
            }
        };
        match request {
            Request::Hello { version } => self.hello(stream, version),
            _ if !self.greeted => return Err(Violation),
            _ if self.out.streams.borrow().len() >= STREAMS => {
                let message = format!("{STREAMS} streams are open already");
                self.refuse(stream, RequestError::new(Failure::Exhausted, message));
            }
            request => match machine_requests::allowed(&self.agent, &request) {
                Ok(()) => self.act(stream, request),
                Err(problem) => self.refuse(stream, problem),
            },
        }
        Ok(())
    }

    fn refuse(&self, stream: u32, problem: RequestError) {
        self.out.reply(stream, &problem.reply());
    }

    fn hello(&mut self, stream: u32, version: u32) {
        let generation = self.agent.generation.borrow().clone();
        self.out.reply(stream, &Reply::Hello { version: VERSION, generation });
        // A daemon of another version reads this and leaves; the daemon we have stays.
        if version != VERSION || self.greeted {
            return;
        }
        self.greeted = true;
        let older = self.agent.current.borrow_mut().replace(Rc::clone(&self.out));
        if let Some(older) = older {
            older.close();
        }
    }

    fn act(&self, stream: u32, request: Request) {
        let answer = match request {
            // Answered before.
            Request::Hello { .. } => return,
            Request::Spawn(spawn) => {
                let secrets = !spawn.secret_env.is_empty() || !spawn.secret_files.is_empty();
                self.held_secrets.set(self.held_secrets.get() || secrets);
                start(&self.agent, &self.out, stream, spawn)
                    .map(|command| self.attached(stream, command))
            }
            Request::Attach { command, from, stdin_from } => {
                return self.attach(stream, &command, from, stdin_from);
            }
            Request::Commands => Ok(self.commands()),
            Request::Forget { command } => self.forget(&command),
            Request::Signal { command, signal } => self.signal(&command, signal),
            Request::Resize { command, size } => {
                self.command(&command).and_then(|command| command.resize(size)).map(|()| Reply::Ok)
            }
            Request::Quiesce { grace_ms } => {
                return self.quiesce(stream, Duration::from_millis(grace_ms));
            }
            Request::Questions { known, wait_ms } => {
                return questions::list(&self.agent, &self.out, stream, known, wait_ms);
            }
            Request::AnswerQuestion { question, answer, comment } => {
                self.agent.questions.answer(&question, answer, comment);
                Ok(Reply::Ok)
            }
            Request::Connect { port } => return port::connect(&self.out, stream, port),
            Request::Assemble(_)
            | Request::Renew(_)
            | Request::Freeze
            | Request::Thaw
            | Request::Look { .. }
            | Request::Export { .. } => {
                return machine_requests::act(&self.agent, &self.out, stream, request);
            }
            request => return self.files(stream, request),
        };
        self.out.reply(stream, &answer.unwrap_or_else(RequestError::reply));
    }

    fn files(&self, stream: u32, request: Request) {
        let (agent, out) = (&self.agent, &self.out);
        match request {
            Request::ReadFile { at, offset, limit } => {
                worker::long(agent, out, stream, at, move |place, task| {
                    files::read(place, task, offset, limit)
                });
            }
            Request::WriteFile { at, mode, parents, append } => {
                worker::long(agent, out, stream, at, move |place, task| {
                    files::write(place, task, mode, parents, append)
                });
            }
            Request::TarIn { at, through_links } => {
                worker::long(agent, out, stream, at, move |place, task| {
                    tar_in::unpack(place, task, through_links)
                });
            }
            Request::TarOut { at } => worker::long(agent, out, stream, at, tar_out::pack),
            Request::MakeDir { at, mode, parents } => {
                worker::short(agent, out, stream, at, move |place| {
                    files::make_dir(place, mode, parents)
                });
            }
            Request::ListDir { at, after } => {
                worker::short(agent, out, stream, at, move |place| {
                    files::list(place, after.as_deref())
                });
            }
            Request::Stat { at } => worker::short(agent, out, stream, at, files::stat),
            Request::Move { at, to } => {
                worker::short(agent, out, stream, at, move |place| files::rename(place, &to));
            }
            Request::Remove { at, recursive, missing_ok } => {
                worker::short(agent, out, stream, at, move |place| {
                    files::remove(place, recursive, missing_ok)
                });
            }
            // Everything else was dealt with before.
            _ => self
                .refuse(stream, RequestError::new(Failure::Fault, "the request is not for files")),
        }
    }

    /// Notes that a command's stream is this one, and answers for it.
    fn attached(&self, stream: u32, command: Rc<Command>) -> Reply {
        let pid = command.pid.unsigned_abs();
        let (stdin_taken, stdin_written) = command.stdin_progress();
        self.out.streams.borrow_mut().insert(stream, Stream::Command(command));
        Reply::Spawned { pid, stdin_taken, stdin_written }
    }

    fn attach(&self, stream: u32, command: &str, from: u64, stdin_from: u64) {
        let found = self.command(command).and_then(|command| {
            command.check_attach(from, stdin_from)?;
            Ok(command)
        });
        match found {
            Ok(command) => {
                let reply = self.attached(stream, Rc::clone(&command));
                self.out.reply(stream, &reply);
                command.attach(&self.out, stream, from);
            }
            Err(problem) => self.refuse(stream, problem),
        }
    }

    fn command(&self, id: &str) -> Result<Rc<Command>, RequestError> {
        self.agent.commands.borrow().get(id).map(Rc::clone).ok_or_else(|| {
            RequestError::new(Failure::NotFound, format!("there is no command `{id}`"))
        })
    }

    fn commands(&self) -> Reply {
        let mut commands: Vec<_> = self.agent.commands.borrow().values().map(Rc::clone).collect();
        commands.sort_unstable_by_key(|command| command.number);
        Reply::Commands { commands: commands.iter().map(|command| command.known()).collect() }
    }

    fn forget(&self, id: &str) -> Result<Reply, RequestError> {
        let Ok(command) = self.command(id) else { return Ok(Reply::Ok) };
        if !command.has_exited() {
            let message = format!("the command `{id}` is still running");
            return Err(RequestError::new(Failure::Invalid, message));
        }
        self.agent.commands.borrow_mut().remove(id);
        command.forget();
        Ok(Reply::Ok)
    }

    fn signal(&self, id: &str, signal: i32) -> Result<Reply, RequestError> {
        let command = self.command(id)?;
        if command.has_exited() {
            // Its number may be another's by now.
            let message = format!("the command `{id}` has ended");
            return Err(RequestError::new(Failure::NotFound, message));
        }
        crate::serve::command::launch::signal_group(command.pid, signal).map_err(|error| {
            let message = format!("could not send signal {signal} to `{id}`: {error}");
            RequestError::new(Failure::Invalid, message)
        })?;
        Ok(Reply::Ok)
    }

    fn quiesce(&self, stream: u32, grace: Duration) {
        let (agent, out) = (Rc::clone(&self.agent), Rc::clone(&self.out));
        let task = tokio::task::spawn_local(async move {
            let outcome = reap::quiesce(&agent, grace).await;
            out.finish(stream, &outcome.map_or_else(RequestError::reply, |()| Reply::Ok));
        });
        let under_way = Stream::task(task.abort_handle(), None);
        self.out.streams.borrow_mut().insert(stream, under_way);
    }

    /// Lets go of everything the connection held; commands live on.
    fn close(&self) {
        let streams = std::mem::take(&mut *self.out.streams.borrow_mut());
        for (stream, held) in streams {
            if let Stream::Command(command) = held {
                command.detach(&self.out, stream);
            }
        }
        self.out.close();
        let mut current = self.agent.current.borrow_mut();
        if current.as_ref().is_some_and(|current| Rc::ptr_eq(current, &self.out)) {
            *current = None;
        }
    }
}

/// Where frames of a stream go.
enum StreamTarget {
    Command(Rc<Command>),
    Transfer(Rc<Transfer>),
}
