//! An agent that runs no programs: commands are scripts, files are those of the layers.
//!
//! It keeps to the agent link as the real one does: replies come first and once, output is numbered and
//! kept until the command is forgotten, a newer connection ends the older one. What it does not do is
//! noted, and the driver panics with it.
//!
//! Without a script of its own a command is one of these:
//!
//! | words | does |
//! |---|---|
//! | `true`, `false` | ends with 0, 1 |
//! | `exit N` | ends with N |
//! | `echo …` | prints its words |
//! | `write PATH TEXT` | replaces a file |
//! | `cat PATH` | prints a file, or ends with 1 |
//! | `sleep` | runs until it gets a signal |

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use sandkeep_core::model::RootFs;
use sandkeep_proto::ask::InsideAnswer;
use sandkeep_proto::frame::{CHUNK, FrameKind, HEADER, Header, WINDOW};
use sandkeep_proto::link::{
    At, Done, Entry, EntryKind, Exit, Failure, InsideQuestion, Known, Reply, Request, Spawn,
    VERSION,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

/// What a command does.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// What it prints to standard output. Less than a window of the link together with `err`.
    pub out: String,
    /// What it prints to standard error, after that.
    pub err: String,
    /// What it ends with; it runs until it gets a signal if absent.
    pub code: Option<i32>,
    /// Files it writes, with what is in them.
    pub writes: Vec<(String, String)>,
}

impl Script {
    fn ends(code: i32) -> Self {
        Self { code: Some(code), ..Self::default() }
    }

    fn prints(out: String) -> Self {
        Self { out, ..Self::ends(0) }
    }
}

/// The agent of a machine.
#[derive(Debug)]
pub(super) struct Agent {
    inside: Arc<AgentState>,
    task: JoinHandle<()>,
}

/// What connections share.
#[derive(Debug)]
struct AgentState {
    generation: String,
    root: Arc<Mutex<RootFs>>,
    scripts: BTreeMap<String, Script>,
    commands: Mutex<Vec<Command>>,
    problems: Mutex<Vec<String>>,
    /// What programs inside ask, with the version of that.
    questions: watch::Sender<(u64, Vec<InsideQuestion>)>,
    answers: Mutex<Vec<(String, InsideAnswer, String)>>,
}

#[derive(Debug)]
struct Command {
    id: String,
    pid: u32,
    /// What it printed: whether to standard error, and the bytes.
    output: Vec<(bool, Vec<u8>)>,
    exit: watch::Sender<Option<Exit>>,
}

impl Agent {
    /// Listens at `socket`.
    pub(super) fn start(
        runtime: &Handle,
        socket: &Path,
        root: Arc<Mutex<RootFs>>,
        scripts: BTreeMap<String, Script>,
        run: usize,
    ) -> Self {
        let generation = format!("run {run}");
        let (commands, problems) = (Mutex::default(), Mutex::default());
        let (questions, answers) = (watch::Sender::default(), Mutex::default());
        let inside =
            AgentState { generation, root, scripts, commands, problems, questions, answers };
        let inside = Arc::new(inside);
        let listener = {
            let _runtime = runtime.enter();
            UnixListener::bind(socket).expect("a socket for an agent")
        };
        let task = runtime.spawn(serve(Arc::clone(&inside), listener));
        Self { inside, task }
    }

    /// Whether a command runs.
    pub(super) fn is_busy(&self) -> bool {
        self.inside.commands.lock().iter().any(|one| one.exit.borrow().is_none())
    }

    /// What it was asked for that it does not do.
    pub(super) fn problems(&self) -> Vec<String> {
        self.inside.problems.lock().clone()
    }

    /// A program inside asks.
    pub(super) fn ask(&self, question: InsideQuestion) {
        self.inside.questions.send_modify(|(version, open)| {
            open.push(question);
            *version += 1;
        });
    }

    /// A program inside that asked is gone.
    pub(super) fn withdraw(&self, id: &str) {
        self.inside.questions.send_modify(|(version, open)| {
            open.retain(|one| one.id != id);
            *version += 1;
        });
    }

    /// What programs inside were answered.
    pub(super) fn answers(&self) -> Vec<(String, InsideAnswer, String)> {
        self.inside.answers.lock().clone()
    }

    /// Ends it. Nothing writes to its root afterwards.
    pub(super) async fn end(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(inside: Arc<AgentState>, listener: UnixListener) {
    // Aborted with this task.
    let mut connection = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        // There is one daemon: who comes later is it.
        connection.abort_all();
        connection.spawn(converse(Arc::clone(&inside), stream));
    }
}

/// Frames to the daemon.
#[derive(Debug, Clone)]
struct Out(Arc<tokio::sync::Mutex<OwnedWriteHalf>>);

impl Out {
    async fn send(&self, stream: u32, kind: FrameKind, payload: &[u8]) {
        let mut frame = Header { length: payload.len(), stream, kind }.encode().to_vec();
        frame.extend_from_slice(payload);
        // A daemon that is gone gets nothing.
        let _ = self.0.lock().await.write_all(&frame).await;
    }

    async fn reply(&self, stream: u32, reply: &Reply) {
        self.send(stream, FrameKind::Reply, &serde_json::to_vec(reply).expect("JSON")).await;
    }

    async fn refuse(&self, stream: u32, kind: Failure, message: impl Into<String>) {
        self.reply(stream, &Reply::Error { kind, message: message.into() }).await;
    }

    async fn done(&self, stream: u32, done: &Done) {
        self.send(stream, FrameKind::Done, &serde_json::to_vec(done).expect("JSON")).await;
    }
}

/// What the daemon sends on a stream after its request.
enum More {
    Data(Vec<u8>),
    End,
}

async fn converse(inside: Arc<AgentState>, stream: UnixStream) {
    let (mut read, write) = stream.into_split();
    let out = Out(Arc::new(tokio::sync::Mutex::new(write)));
    let mut streams: HashMap<u32, mpsc::UnboundedSender<More>> = HashMap::new();
    // Aborted with this connection: commands are not.
    let mut tasks = JoinSet::new();
    while let Ok((header, payload)) = frame(&mut read).await {
        match header.kind {
            FrameKind::Open => {
                let (sender, more) = mpsc::unbounded_channel();
                streams.insert(header.stream, sender);
                let request = serde_json::from_slice(&payload).expect("a request of the link");
                let (inside, out) = (Arc::clone(&inside), out.clone());
                tasks.spawn(async move { inside.answer(&out, header.stream, request, more).await });
            }
            FrameKind::Data | FrameKind::End => {
                let more = match header.kind {
                    FrameKind::Data => More::Data(payload),
                    _ => More::End,
                };
                // Nothing more is read from a stream that is over.
                let _ = streams.get(&header.stream).map(|stream| stream.send(more));
            }
            FrameKind::Credit => {}
            FrameKind::Cancel => drop(streams.remove(&header.stream)),
            FrameKind::Reply | FrameKind::DataErr | FrameKind::Done => {
                inside.problems.lock().push(format!("the daemon sent {:?}", header.kind));
            }
        }
    }
}

async fn frame(read: &mut OwnedReadHalf) -> io::Result<(Header, Vec<u8>)> {
    let mut header = [0; HEADER];
    read.read_exact(&mut header).await?;
    let header = Header::decode(&header).map_err(io::Error::other)?;
    let mut payload = vec![0; header.length];
    read.read_exact(&mut payload).await?;
    Ok((header, payload))
}

impl AgentState {
    async fn answer(
        &self,
        out: &Out,
        stream: u32,
        request: Request,
        more: mpsc::UnboundedReceiver<More>,
    ) {
        match request {
            Request::Hello { version } => {
                assert_eq!(version, VERSION, "the daemon's version");
                let generation = self.generation.clone();
                out.reply(stream, &Reply::Hello { version, generation }).await;
            }
            Request::Spawn(spawn) => match self.spawn(&spawn) {
                Ok(()) => self.attach(out, stream, &spawn.command, 0).await,
                Err(reason) => out.refuse(stream, Failure::NoExecutable, reason).await,
            },
            Request::Attach { command, from, .. } => {
                self.attach(out, stream, &command, from).await;
            }
            Request::Commands => {
                let known = |one: &Command| {
                    let exit = *one.exit.borrow();
                    Known { command: one.id.clone(), pid: one.pid, exit }
                };
                let commands = self.commands.lock().iter().map(known).collect();
                out.reply(stream, &Reply::Commands { commands }).await;
            }
            Request::Forget { command } => {
                let running = {
                    let mut commands = self.commands.lock();
                    let runs = |one: &Command| one.id == command && one.exit.borrow().is_none();
                    let running = commands.iter().any(runs);
                    commands.retain(|one| one.id != command || running);
                    running
                };
                match running {
                    true => out.refuse(stream, Failure::Invalid, "it runs").await,
                    false => out.reply(stream, &Reply::Ok).await,
                }
            }
            Request::Signal { command, signal } => {
                match self.end_commands(signal, |one| one.id == command) {
                    0 => out.refuse(stream, Failure::NotFound, "it has exited").await,
                    _ => out.reply(stream, &Reply::Ok).await,
                }
            }
            Request::Quiesce { .. } => {
                self.end_commands(15, |_| true);
                out.reply(stream, &Reply::Ok).await;
            }
            Request::ReadFile { at, offset, limit } => {
                self.read_file(out, stream, &at, offset, limit).await;
            }
            Request::WriteFile { at, append, .. } => {
                self.write_file(out, stream, &at, append, more).await;
            }
            Request::Stat { at } => match self.entry(&at) {
                Some(entry) => out.reply(stream, &Reply::Stat { entry }).await,
                None => out.refuse(stream, Failure::NotFound, at.path).await,
            },
            Request::Questions { known, wait_ms } => {
                let mut questions = self.questions.subscribe();
                let wait = std::time::Duration::from_millis(wait_ms);
                let other = questions.wait_for(|(version, _)| *version != known);
                let _ = tokio::time::timeout(wait, other).await;
                let (version, questions) = self.questions.borrow().clone();
                out.reply(stream, &Reply::Questions { version, questions }).await;
            }
            Request::AnswerQuestion { question, answer, comment } => {
                let mut was_open = false;
                self.questions.send_modify(|(version, open)| {
                    was_open = open.iter().any(|one| one.id == question);
                    open.retain(|one| one.id != question);
                    *version += 1;
                });
                if was_open {
                    self.answers.lock().push((question, answer, comment));
                }
                out.reply(stream, &Reply::Ok).await;
            }
            other => {
                self.problems.lock().push(format!("{other:?}"));
                out.refuse(stream, Failure::Fault, "a fake agent does not do this").await;
            }
        }
    }

    fn spawn(&self, spawn: &Spawn) -> Result<(), String> {
        let mut commands = self.commands.lock();
        if commands.iter().any(|one| one.id == spawn.command) {
            self.problems.lock().push(format!("{} is started twice", spawn.command));
        }
        let script = self.script(&spawn.argv)?;
        for (path, text) in &script.writes {
            self.write(path, text.as_bytes(), false).map_err(|error| error.to_string())?;
        }
        let parts = [(false, script.out), (true, script.err)];
        let parts = parts.into_iter().filter(|(_, text)| !text.is_empty());
        let output: Vec<_> = parts.map(|(err, text)| (err, text.into_bytes())).collect();
        let printed: usize = output.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(printed < WINDOW, "a script prints less than a window");
        let pid = u32::try_from(commands.len()).expect("few commands") + 2;
        let exit = watch::Sender::new(script.code.map(Exit::with_code));
        commands.push(Command { id: spawn.command.clone(), pid, output, exit });
        Ok(())
    }

    fn script(&self, argv: &[String]) -> Result<Script, String> {
        if let Some(script) = self.scripts.get(&argv.join(" ")) {
            return Ok(script.clone());
        }
        let words: Vec<&str> = argv.iter().map(String::as_str).collect();
        Ok(match &words[..] {
            ["true"] => Script::ends(0),
            ["false"] => Script::ends(1),
            ["exit", code] => Script::ends(code.parse().map_err(|_| "no exit code".to_owned())?),
            ["echo", words @ ..] => Script::prints(format!("{}\n", words.join(" "))),
            ["write", path, text] => {
                Script { writes: vec![((*path).to_owned(), (*text).to_owned())], ..Script::ends(0) }
            }
            ["cat", path] => match self.find(path).map(fs::read_to_string) {
                Some(Ok(text)) => Script::prints(text),
                _ => Script { err: format!("{path}: no such file\n"), ..Script::ends(1) },
            },
            ["sleep"] => Script::default(),
            _ => return Err(format!("`{}` is not there", words.join(" "))),
        })
    }

    /// Sends what a command prints, from a byte on, and how it ends.
    async fn attach(&self, out: &Out, stream: u32, id: &str, from: u64) {
        let found = {
            let commands = self.commands.lock();
            let found = commands.iter().find(|one| one.id == id);
            found.map(|one| (one.pid, one.output.clone(), one.exit.subscribe()))
        };
        let Some((pid, output, mut exit)) = found else {
            return out.refuse(stream, Failure::NotFound, format!("no command {id}")).await;
        };
        let spawned = Reply::Spawned { pid, stdin_taken: 0, stdin_written: 0 };
        out.reply(stream, &spawned).await;
        let mut skip = usize::try_from(from).expect("a place in its output");
        for (err, bytes) in output {
            let kind = if err { FrameKind::DataErr } else { FrameKind::Data };
            let rest = &bytes[skip.min(bytes.len())..];
            skip = skip.saturating_sub(bytes.len());
            for part in rest.chunks(CHUNK) {
                out.send(stream, kind, part).await;
            }
        }
        // Forgotten while it is followed: no caller waits for its end.
        let Ok(exit) = exit.wait_for(Option::is_some).await.map(|exit| *exit) else { return };
        out.done(stream, &Done::Exited(exit.expect("it was waited for"))).await;
    }

    /// Ends commands that run, and returns how many those were.
    fn end_commands(&self, signal: i32, which: impl Fn(&Command) -> bool) -> usize {
        let commands = self.commands.lock();
        let running = commands.iter().filter(|one| one.exit.borrow().is_none() && which(one));
        let mut ended = 0;
        for one in running {
            one.exit.send_replace(Some(Exit::by_signal(signal)));
            ended += 1;
        }
        ended
    }

    /// Where a file of the root is, in the topmost layer that has it.
    fn find(&self, path: &str) -> Option<PathBuf> {
        let root = self.root.lock();
        let inside = path.trim_start_matches('/');
        let upper = root.writable_dir.join(&root.upper);
        let lower = root.lower.iter().map(|lower| root.layers_dir.join(lower));
        let mut layers = std::iter::once(upper).chain(lower);
        layers.find_map(|layer| Some(layer.join(inside)).filter(|file| file.exists()))
    }

    fn write(&self, path: &str, bytes: &[u8], append: bool) -> io::Result<()> {
        if path.starts_with("/run/") {
            // In memory, in a real one: no layer ever has it.
            return Ok(());
        }
        let before = match append {
            true => self.find(path).map(fs::read).transpose()?.unwrap_or_default(),
            false => Vec::new(),
        };
        let root = self.root.lock();
        let file = root.writable_dir.join(&root.upper).join(path.trim_start_matches('/'));
        if let Some(dir) = file.parent() {
            fs::create_dir_all(dir)?;
        }
        fs::write(file, [before, bytes.to_vec()].concat())
    }

    async fn write_file(
        &self,
        out: &Out,
        stream: u32,
        at: &At,
        append: bool,
        mut more: mpsc::UnboundedReceiver<More>,
    ) {
        out.reply(stream, &Reply::Ok).await;
        let mut bytes = Vec::new();
        loop {
            match more.recv().await {
                Some(More::Data(part)) => {
                    bytes.extend_from_slice(&part);
                    let credit = u32::try_from(part.len()).expect("a frame is small");
                    out.send(stream, FrameKind::Credit, &credit.to_le_bytes()).await;
                }
                Some(More::End) => break,
                // The daemon no longer wants it written.
                None => return,
            }
        }
        let moved = Done::Moved { bytes: bytes.len() as u64, files: 1 };
        let done = match self.write(&at.path, &bytes, append) {
            Ok(()) => moved,
            Err(error) => Done::Failed { kind: Failure::Fault, message: error.to_string() },
        };
        out.done(stream, &done).await;
    }

    async fn read_file(&self, out: &Out, stream: u32, at: &At, offset: u64, limit: Option<u64>) {
        let bytes = self.find(&at.path).and_then(|file| fs::read(file).ok());
        let (Some(entry), Some(bytes)) = (self.entry(at), bytes) else {
            return out.refuse(stream, Failure::NotFound, at.path.clone()).await;
        };
        out.reply(stream, &Reply::Stat { entry }).await;
        let from = usize::try_from(offset).map_or(bytes.len(), |from| from.min(bytes.len()));
        let most = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
        let part = &bytes[from..from.saturating_add(most).min(bytes.len())];
        assert!(part.len() < WINDOW, "files of tests are small");
        for part in part.chunks(CHUNK) {
            out.send(stream, FrameKind::Data, part).await;
        }
        out.done(stream, &Done::Moved { bytes: part.len() as u64, files: 1 }).await;
    }

    fn entry(&self, at: &At) -> Option<Entry> {
        let found = self.find(&at.path)?.symlink_metadata().ok()?;
        let kind = if found.is_dir() { EntryKind::Directory } else { EntryKind::File };
        Some(Entry {
            name: at.path.clone(),
            raw_name: None,
            kind,
            size: found.len(),
            mode: found.mode() & 0o7777,
            uid: 0,
            gid: 0,
            modified_ms: found.mtime() * 1000,
            target: None,
        })
    }
}
