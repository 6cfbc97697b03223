//! One client of a campaign: random requests, and what their answers mean for the model.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use sandkeep_client::types::{
    self, Checkpoint, CreateSandbox, ExecRequest, Fork, Rollback, Start, State, error_chain,
};
use sandkeep_client::{Client, Error};

use super::model::{Content, Files, Model, Sandbox, Snapshot};
use super::report::Operation;
use crate::daemon::SMALL;
use crate::random::Random;

/// How many sandboxes a client has at most.
const SANDBOXES: usize = 4;
/// How many files a sandbox has at most.
const FILES: u64 = 24;

/// Lists every file with its digest.
const DIGESTS: &str = "cd /work && find . -type f -exec sha256sum {} +";

/// How things stand between faults and clients.
#[derive(Debug, Default)]
pub(super) struct Phase(AtomicU8);

impl Phase {
    /// Nothing is wrong: errors are not expected.
    pub(super) const QUIET: u8 = 0;
    /// Something is wrong, or was: errors are fine.
    pub(super) const FAULTY: u8 = 1;
    /// No more requests.
    pub(super) const OVER: u8 = 2;

    pub(super) fn set(&self, phase: u8) {
        self.0.store(phase, Ordering::SeqCst);
    }

    pub(super) fn get(&self) -> u8 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The outcome of a request.
pub(super) enum Answer<T> {
    Done(T),
    /// The server says that it did nothing.
    Refused,
    /// It may have been done, or will be.
    Unknown,
    /// No answer: the daemon is gone.
    Gone,
}

/// A client.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) index: usize,
    random: Random,
    pub(super) model: Model,
    /// How long one request may take.
    patience: Duration,
    driver: &'static str,
    next: u64,
    /// What was asked for since this was last taken, and whether it was acknowledged.
    pub(super) asked: Vec<(Operation, bool)>,
    /// Errors in quiet times.
    pub(super) surprises: Vec<(Operation, String)>,
}

impl Worker {
    pub(super) fn new(index: usize, seed: u64, driver: &'static str, patience: Duration) -> Self {
        Self {
            index,
            random: Random::new(seed),
            model: Model::default(),
            patience,
            driver,
            next: 0,
            asked: Vec::new(),
            surprises: Vec::new(),
        }
    }

    /// Works until the phase is over or the daemon is gone.
    pub(super) async fn work(mut self, client: Client, phase: Arc<Phase>) -> Self {
        while phase.get() != Phase::OVER {
            if self.step(&client, &phase).await.is_none() {
                break;
            }
        }
        self
    }

    /// Does one thing; nothing if the daemon is gone.
    async fn step(&mut self, client: &Client, phase: &Phase) -> Option<()> {
        let usable: Vec<String> = self.usable();
        let roll = self.random.below(100);
        if usable.is_empty() || (roll < 6 && self.model.sandboxes.len() < SANDBOXES) {
            return self.create(client, phase).await;
        }
        let name = self.random.pick(&usable).clone();
        match roll {
            0..=49 => self.write(client, phase, &name).await,
            50..=54 => self.background(client, phase, &name).await,
            55..=59 => self.read(client, phase, &name).await,
            60..=73 => self.checkpoint(client, phase, &name).await,
            74..=83 => self.stop(client, phase, &name).await,
            84..=86 => self.start(client, phase, &name).await,
            87..=90 if self.model.sandboxes.len() < SANDBOXES => {
                self.fork(client, phase, &name).await
            }
            91..=94 => self.rollback(client, phase, &name).await,
            95..=96 => self.delete_snapshot(client, phase).await,
            97..=99 if usable.len() > 2 => self.delete(client, phase, &name).await,
            _ => self.write(client, phase, &name).await,
        }
    }

    fn usable(&self) -> Vec<String> {
        let usable =
            |(name, sandbox): (&String, &Sandbox)| sandbox.is_usable().then(|| name.clone());
        self.model.sandboxes.iter().filter_map(usable).collect()
    }

    fn fresh_name(&mut self) -> String {
        self.next += 1;
        format!("c{}-{}", self.index, self.next)
    }

    fn at(&mut self, name: &str) -> &mut Sandbox {
        self.model.sandboxes.entry(name.to_owned()).or_default()
    }

    /// Notes a snapshot that was acknowledged. One of nothing new is the snapshot that was there already, which
    /// may be another sandbox's and go with that.
    fn keep(&mut self, name: &str, snapshot: types::Snapshot, kept: Snapshot) {
        if snapshot.sandbox == name {
            let sandbox = self.at(name);
            sandbox.generation = sandbox.generation.max(snapshot.generation);
        }
        let kept = Snapshot { sandbox: snapshot.sandbox, ..kept };
        self.model.snapshots.entry(snapshot.id).or_insert(kept);
    }

    /// Sends a request, and notes its outcome.
    async fn ask<T>(
        &mut self,
        phase: &Phase,
        operation: Operation,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Answer<T> {
        let before = phase.get();
        let answer = tokio::time::timeout(self.patience, request).await;
        let quiet = before == Phase::QUIET && phase.get() == Phase::QUIET;
        let (answer, surprise) = match answer {
            Ok(Ok(done)) => (Answer::Done(done), None),
            Ok(Err(Error::Connect { .. })) => (Answer::Gone, None),
            Ok(Err(Error::Api { status: 400..500, code, message, .. })) => {
                // Conflicts are for the server to decide; a thing that is not there is not.
                let surprise = (code == "not_found").then(|| format!("{code}: {message}"));
                (Answer::Refused, surprise)
            }
            Ok(Err(error @ Error::Api { .. })) => {
                (Answer::Unknown, Some(format!("{:?}: {error}", error.code())))
            }
            // The daemon may have been killed before the phase says so.
            Ok(Err(_)) => (Answer::Unknown, None),
            Err(_) => (Answer::Unknown, Some(format!("no answer for {:?}", self.patience))),
        };
        self.asked.push((operation, matches!(answer, Answer::Done(_))));
        if !matches!(answer, Answer::Done(_)) {
            // A disk that refuses everything is not asked thousands of times.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if let Some(surprise) = surprise.filter(|_| quiet) {
            self.surprises.push((operation, surprise));
        }
        answer
    }

    async fn create(&mut self, client: &Client, phase: &Phase) -> Option<()> {
        let name = self.fresh_name();
        let request = CreateSandbox { name: Some(name.clone()), ..settings(self.driver) };
        match self.ask(phase, Operation::Create, client.create(&request, None)).await {
            Answer::Done(opened) => {
                let sandbox = self.at(&name);
                sandbox.created = true;
                sandbox.generation = opened.sandbox.generation;
            }
            Answer::Unknown => self.at(&name).unsettled = true,
            Answer::Refused => {}
            Answer::Gone => return None,
        }
        Some(())
    }

    async fn write(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        let path = format!("./d{}/f{}", self.random.below(3), self.random.below(FILES / 3));
        let lengths = [0, 7, 4096, 5000, 60_000, 300_000];
        let length = *self.random.pick(&lengths);
        let content = Content { id: self.random.next(), length };
        let remove = self.random.percent(12);
        let unsure = self.at(name).unsure.contains(&path);
        let script = match remove || unsure {
            true => format!("cd /work && rm -f {path}"),
            false => format!(
                // The mark is put together there: records of commands must not contain it.
                "cd /work && mkdir -p {} && yes \"$(printf %s%s {} '{}')\" | head -c {length} > {path}",
                &path[..4],
                &content.line()[..4],
                &content.line()[4..],
            ),
        };
        let removed = remove || unsure;
        self.model.known.insert(content.digest());
        let answer = self.run(client, phase, name, &script).await;
        let sandbox = self.at(name);
        sandbox.touched.insert(path.clone());
        match answer {
            Answer::Done(Some(_)) => {
                sandbox.unsure.remove(&path);
                match removed {
                    true => sandbox.expected.remove(&path),
                    false => sandbox.expected.insert(path, content.digest()),
                };
            }
            Answer::Done(None) | Answer::Unknown | Answer::Refused | Answer::Gone => {
                sandbox.expected.remove(&path);
                sandbox.unsure.insert(path);
                if matches!(answer, Answer::Gone) {
                    return None;
                }
            }
        }
        Some(())
    }

    /// A process that stays: checkpoints are made another way while there is one.
    async fn background(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        let request = ExecRequest { argv: argv("sleep 600"), ..ExecRequest::default() };
        match self.ask(phase, Operation::Exec, client.exec_detached(name, &request)).await {
            Answer::Gone => None,
            Answer::Done(_) | Answer::Refused | Answer::Unknown => Some(()),
        }
    }

    async fn read(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        let answer = self.run(client, phase, name, DIGESTS).await;
        let quiet = phase.get() == Phase::QUIET;
        match answer {
            Answer::Done(Some(output)) => {
                let found = parse(&output);
                if let Some(wrong) = self.at(name).judge(&found, false).filter(|_| quiet) {
                    self.surprises.push((Operation::Read, format!("{name}: {wrong}")));
                }
                Some(())
            }
            Answer::Gone => None,
            Answer::Done(None) | Answer::Refused | Answer::Unknown => Some(()),
        }
    }

    async fn start(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        let start = Start::default();
        match self.ask(phase, Operation::Start, client.start(name, &start)).await {
            Answer::Gone => None,
            Answer::Done(_) | Answer::Refused | Answer::Unknown => Some(()),
        }
    }

    async fn checkpoint(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        let request = Checkpoint::default();
        let operation = Operation::Checkpoint;
        match self.ask(phase, operation, client.checkpoint(name, &request)).await {
            Answer::Done(snapshot) => {
                let kept = self.at(name).kept(name, operation);
                self.keep(name, snapshot, kept);
            }
            Answer::Gone => return None,
            Answer::Refused | Answer::Unknown => {}
        }
        Some(())
    }

    async fn stop(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        match self.ask(phase, Operation::Stop, client.stop(name, None)).await {
            Answer::Done(stopped) => {
                let sandbox = self.at(name);
                sandbox.generation = sandbox.generation.max(stopped.sandbox.generation);
                let kept = sandbox.kept(name, Operation::Stop);
                if let Some(snapshot) = stopped.snapshot {
                    self.keep(name, snapshot, kept);
                }
            }
            Answer::Gone => return None,
            Answer::Refused | Answer::Unknown => {}
        }
        Some(())
    }

    async fn fork(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        let fork = self.fresh_name();
        let request = Fork { name: Some(fork.clone()), ..Fork::default() };
        match self.ask(phase, Operation::Fork, client.fork(name, &request, None)).await {
            Answer::Done(opened) => {
                let source = self.at(name);
                let kept = source.kept(name, Operation::Fork);
                let from = opened.sandbox.forked_from;
                let made = Sandbox {
                    created: true,
                    generation: opened.sandbox.generation,
                    durable: kept.files.clone(),
                    expected: kept.files.clone(),
                    touched: kept.unsure.clone(),
                    unsure: kept.unsure.clone(),
                    ..Sandbox::default()
                };
                self.model.sandboxes.insert(fork, made);
                if let Some(id) = from.and_then(|from| from.snapshot) {
                    let asked = tokio::time::timeout(self.patience, client.snapshot(&id)).await;
                    if let Ok(Ok(snapshot)) = asked {
                        self.keep(name, snapshot, kept);
                    }
                }
            }
            Answer::Unknown => {
                // If it was made, it has the files of its source.
                let made = self.at(name).as_it_is(name, Operation::Fork);
                let fork = self.at(&fork);
                fork.alternatives.push(made);
                fork.unsettled = true;
            }
            Answer::Refused => {}
            Answer::Gone => return None,
        }
        Some(())
    }

    async fn rollback(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        let mine =
            |(id, snapshot): (&String, &Snapshot)| (snapshot.sandbox == name).then(|| id.clone());
        let targets: Vec<String> = self.model.snapshots.iter().filter_map(mine).collect();
        if targets.is_empty() {
            return Some(());
        }
        let to = self.random.pick(&targets).clone();
        let target = self.model.snapshots[&to].clone();
        let request = Rollback { to, expect_generation: None };
        let operation = Operation::Rollback;
        match self.ask(phase, operation, client.rollback(name, &request)).await {
            Answer::Done(done) => {
                let sandbox = self.at(name);
                sandbox.generation = sandbox.generation.max(done.sandbox.generation);
                let before = sandbox.as_it_is(name, operation);
                sandbox.durable = target.files.clone();
                sandbox.expected = target.files;
                sandbox.touched = target.unsure.clone();
                sandbox.unsure = target.unsure;
                if let Some(snapshot) = done.before {
                    self.keep(name, snapshot, before);
                }
            }
            Answer::Unknown => {
                let sandbox = self.at(name);
                sandbox.alternatives.push(target);
                sandbox.unsettled = true;
            }
            Answer::Refused => {}
            Answer::Gone => return None,
        }
        Some(())
    }

    async fn delete_snapshot(&mut self, client: &Client, phase: &Phase) -> Option<()> {
        let ids: Vec<String> = self.model.snapshots.keys().cloned().collect();
        if ids.is_empty() {
            return Some(());
        }
        let id = self.random.pick(&ids).clone();
        let request = client.delete_snapshot(&id, false);
        match self.ask(phase, Operation::DeleteSnapshot, request).await {
            Answer::Done(_) => {
                self.model.snapshots.remove(&id);
                self.model.dropped.insert(id);
            }
            Answer::Unknown => drop(self.model.snapshots.remove(&id)),
            Answer::Refused => {}
            Answer::Gone => return None,
        }
        Some(())
    }

    async fn delete(&mut self, client: &Client, phase: &Phase, name: &str) -> Option<()> {
        match self.ask(phase, Operation::Delete, client.delete(name, None)).await {
            Answer::Done(deleted) => {
                self.model.sandboxes.remove(name);
                self.model.deleted.insert(name.to_owned());
                let kept: BTreeSet<String> = deleted.snapshots_kept.into_iter().collect();
                self.model
                    .snapshots
                    .retain(|id, snapshot| snapshot.sandbox != name || kept.contains(id));
            }
            Answer::Unknown => self.at(name).deleting = true,
            Answer::Refused => {}
            Answer::Gone => return None,
        }
        Some(())
    }

    /// Runs a script; its output if it succeeded.
    async fn run(
        &mut self,
        client: &Client,
        phase: &Phase,
        name: &str,
        script: &str,
    ) -> Answer<Option<String>> {
        self.ask(phase, Operation::Exec, shell(client, name, script)).await
    }
}

/// The settings of every sandbox: nothing goes away by itself.
pub(super) fn settings(driver: &'static str) -> CreateSandbox {
    CreateSandbox {
        image: Some(SMALL.to_owned()),
        driver: Some(driver.to_owned()),
        start: Some(false),
        keep_last: Some(None),
        snapshot_expires: Some(None),
        idle_timeout: Some(None),
        session_timeout: Some(None),
        memory: Some(sandkeep_client::types::Size(256 << 20)),
        ..CreateSandbox::default()
    }
}

fn argv(script: &str) -> Vec<String> {
    ["sh", "-c", script].map(str::to_owned).to_vec()
}

async fn shell(client: &Client, name: &str, script: &str) -> Result<Option<String>, Error> {
    let request = ExecRequest { argv: argv(script), ..ExecRequest::default() };
    let (end, output, _) = client.exec(name, &request).await?.collect().await?;
    let output = String::from_utf8_lossy(&output).into_owned();
    Ok((end.exit_code == Some(0)).then_some(output))
}

/// All files of a sandbox, which is woken for it.
pub(super) async fn files(client: &Client, name: &str) -> Result<Files, String> {
    let request = ExecRequest { argv: argv(DIGESTS), ..ExecRequest::default() };
    let running = client.exec(name, &request).await.map_err(told)?;
    let (end, output, errors) = running.collect().await.map_err(told)?;
    match end.exit_code {
        Some(0) => Ok(parse(&String::from_utf8_lossy(&output))),
        code => Err(format!("exit code {code:?}: {}", String::from_utf8_lossy(&errors))),
    }
}

/// An error with its causes.
pub(super) fn told(error: Error) -> String {
    error_chain(&error)
}

fn parse(output: &str) -> Files {
    let pair =
        |line: &str| line.split_once("  ").map(|(hash, path)| (path.to_owned(), hash.to_owned()));
    output.lines().filter_map(pair).collect()
}

/// Whether a state is one that lasts. One that failed can be started again, which is tried then.
pub(super) const fn is_final(state: State) -> bool {
    matches!(state, State::Running | State::Stopped | State::Paused | State::Failed)
}
