//! Questions of programs inside: `keep ask` asks, the daemon fetches, and its answer goes back.
//!
//! Nothing is listened for until the daemon wants to receive questions. A program that asks holds
//! its connection open; when that breaks, the question is withdrawn. What questions can make the
//! agent hold is bounded.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::rc::Rc;
use std::time::Duration;

use sandkeep_proto::ask::{AskLine, AskReply, CONTEXT, InsideAnswer, LINE, QUESTION, SOCKET};
use sandkeep_proto::link::{InsideQuestion, Reply};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use super::{Agent, random};
use crate::serve::link::connection::Stream;
use crate::serve::link::outbound::Outbound;

/// How many may wait for an answer.
const MOST: usize = 32;
/// How many connections are served, those that have not sent anything yet included.
const CONNECTIONS: usize = 64;
/// How long a program may take to say what it asks.
const SAYS_WITHIN: Duration = Duration::from_secs(5);
/// How long the daemon may have its request wait.
const LONGEST_WAIT: u64 = 25_000;

struct Pending {
    question: InsideQuestion,
    answer: oneshot::Sender<AskReply>,
}

/// What programs inside ask.
#[derive(Default)]
pub(crate) struct Questions {
    open: Cell<bool>,
    version: Cell<u64>,
    pending: RefCell<Vec<Pending>>,
    changed: Notify,
    connections: Cell<usize>,
}

impl std::fmt::Debug for Questions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Questions").field("open", &self.open).finish_non_exhaustive()
    }
}

/// Replies with the unanswered questions, when those have changed or the time is over.
pub(super) fn list(agent: &Rc<Agent>, out: &Rc<Outbound>, stream: u32, known: u64, wait_ms: u64) {
    agent.questions.listen();
    let questions = Rc::clone(&agent.questions);
    if wait_ms == 0 || questions.version.get() != known {
        return out.reply(stream, &questions.reply());
    }
    let mine = Rc::clone(out);
    let task = tokio::task::spawn_local(async move {
        let wait = Duration::from_millis(wait_ms.min(LONGEST_WAIT));
        let other = async {
            while questions.version.get() == known {
                questions.changed.notified().await;
            }
        };
        let _ = timeout(wait, other).await;
        mine.finish(stream, &questions.reply());
    });
    out.streams.borrow_mut().insert(stream, Stream::task(task.abort_handle(), None));
}

impl Questions {
    /// Whether questions are listened for.
    pub(crate) fn is_open(&self) -> bool {
        self.open.get()
    }

    fn reply(&self) -> Reply {
        let pending = self.pending.borrow();
        let questions = pending.iter().map(|one| one.question.clone()).collect();
        Reply::Questions { version: self.version.get(), questions }
    }

    /// Gives an answer to the program that asked, if it is still connected.
    pub(crate) fn answer(&self, id: &str, answer: InsideAnswer, comment: String) {
        let mut pending = self.pending.borrow_mut();
        let Some(place) = pending.iter().position(|one| one.question.id == id) else { return };
        let answered = pending.remove(place);
        drop(pending);
        // A program that has just left gets nothing.
        let _ = answered.answer.send(AskReply::Answer { answer, comment });
        self.change();
    }

    fn change(&self) {
        self.version.set(self.version.get() + 1);
        self.changed.notify_waiters();
    }

    fn listen(self: &Rc<Self>) {
        if self.open.get() {
            return;
        }
        match bind() {
            Ok(listener) => {
                self.open.set(true);
                tokio::task::spawn_local(Rc::clone(self).accept(listener));
            }
            // A program inside has taken the name: then questions get nowhere, and `keep ask` fails
            // or gets a false answer from that program.
            Err(error) => eprintln!("keep-agent: could not listen for questions: {error}"),
        }
    }

    async fn accept(self: Rc<Self>, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((socket, _)) if self.connections.get() < CONNECTIONS => {
                    self.connections.set(self.connections.get() + 1);
                    let this = Rc::clone(&self);
                    tokio::task::spawn_local(async move {
                        this.serve(socket).await;
                        this.connections.set(this.connections.get() - 1);
                    });
                }
                Ok(_) => {}
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    async fn serve(&self, socket: UnixStream) {
        let user = socket.peer_cred().map_or(u32::MAX, |cred| cred.uid());
        let (read, mut write) = socket.into_split();
        let mut read = BufReader::new(read.take(LINE as u64 + 1));
        let mut line = String::new();
        let said = timeout(SAYS_WITHIN, read.read_line(&mut line)).await;
        let reply = match said {
            Ok(Ok(1..)) => match parse(&line) {
                Ok(asked) => match self.wait(asked, user, &mut read).await {
                    Some(reply) => reply,
                    None => return,
                },
                Err(problem) => AskReply::Problem { problem },
            },
            _ => return,
        };
        let mut text = serde_json::to_vec(&reply).unwrap_or_default();
        text.push(b'\n');
        let _ = timeout(SAYS_WITHIN, write.write_all(&text)).await;
    }

    /// Waits for the answer; `None` when the program that asked has left.
    async fn wait(
        &self,
        asked: AskLine,
        user: u32,
        read: &mut (impl tokio::io::AsyncRead + Unpin),
    ) -> Option<AskReply> {
        if self.pending.borrow().len() >= MOST {
            let problem = format!("{MOST} questions wait for an answer already");
            return Some(AskReply::Problem { problem });
        }
        let mut bytes = [0; 16];
        if random(&mut bytes).is_err() {
            return Some(AskReply::Problem { problem: "no randomness".to_owned() });
        }
        let id: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let (answer, mut answered) = oneshot::channel();
        let question = InsideQuestion { id: id.clone(), user, asked };
        self.pending.borrow_mut().push(Pending { question, answer });
        self.change();
        let mut more = [0; 1];
        tokio::select! {
            reply = &mut answered => reply.ok(),
            // No more input is valid: whatever comes is the end.
            _ = read.read(&mut more) => {
                self.pending.borrow_mut().retain(|one| one.question.id != id);
                self.change();
                None
            }
        }
    }
}

fn bind() -> io::Result<UnixListener> {
    let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(SOCKET)?)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

fn parse(line: &str) -> Result<AskLine, String> {
    if line.len() > LINE {
        return Err(format!("question and context are over {LINE} bytes"));
    }
    let mut asked: AskLine = serde_json::from_str(line)
        .map_err(|error| format!("the question cannot be read: {error}"))?;
    asked.question = asked.question.replace(char::is_control, " ").trim().to_owned();
    asked.context.retain(|c| !c.is_control() || c == '\n' || c == '\t');
    if asked.question.is_empty() || asked.question.len() > QUESTION {
        return Err(format!("a question has 1 to {QUESTION} bytes"));
    }
    if asked.context.len() > CONTEXT {
        return Err(format!("the context is over {CONTEXT} bytes"));
    }
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn questions_are_bounded_and_cleaned() {
        let asked = parse(r#"{"question":" a\nb ","context":"x\u0007\n\ty"}"#).unwrap();
        assert_eq!((asked.question.as_str(), asked.context.as_str()), ("a b", "x\n\ty"));
        let long = format!(r#"{{"question":"{}"}}"#, "x".repeat(1001));
        let context = format!(r#"{{"question":"x","context":"{}"}}"#, "x".repeat(9000));
        for bad in ["", "{}", r#"{"question":""}"#, r#"{"question":"x","what":1}"#, &long, &context]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
