//! What the commands of `keep` do, once their arguments are parsed (`args`).
//!
//! [`dispatch`] runs the command that was given. Most commands ask a server: they get a [`Context`], which has a client
//! for the server that `locate` found and the output, as text or JSON. `serve`, `doctor`, `microvm setup`, `tls init`,
//! `backup`, `fsck`, `completions` and `version` work without a server. A file per noun, with `exec` for running commands and
//! `sandbox` for sandboxes as a whole; what several of them print is at the end of this file.

mod approvals;
mod artifacts;
mod attach;
mod audit;
mod backup;
mod browser;
pub(crate) mod complete;
mod copy;
mod doctor;
mod drive;
mod env;
mod events;
mod exec;
mod fork;
mod fsck;
pub(crate) mod guard;
mod history;
mod image;
mod image_build;
mod microvm;
mod network;
mod port;
mod resolve;
mod runs;
mod sandbox;
mod secret;
mod service;
mod snapshot;
mod stats;
mod tar;
mod tenant;
mod tls;
mod trash;
mod tree;
mod typo;
mod webhook;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use sandkeep_client::Client;
use sandkeep_client::types::MergeConflict;
use serde::Serialize;

pub(crate) use network::{in_short as network_in_short, wished as network_change};

use crate::args::{Command, ConfigCommand, Global, Keep, MicrovmCommand, ServeArgs, TlsCommand};
use crate::config;
use crate::failure::Failure;
use crate::locate;
use crate::reference;
use crate::screen::{Paint, Screen, note};
use crate::serve;

/// The client and the output of a command that uses a server.
#[derive(Debug)]
struct Context {
    client: Client,
    screen: Screen,
}

impl Context {
    fn new(global: &Global) -> Result<Self, Failure> {
        let mut client = locate::client(global)?;
        if let Some(project) = &global.project {
            client = client.for_project(project)?;
        }
        Ok(Self { client, screen: Screen::new(global.json) })
    }
}

/// Runs a command and returns the exit code.
pub(crate) async fn dispatch(keep: Keep) -> Result<ExitCode, Failure> {
    let global = keep.global.clone();
    match carry_out(keep).await {
        Err(failure) => Err(typo::explained(&global, failure).await),
        done => done,
    }
}

async fn carry_out(keep: Keep) -> Result<ExitCode, Failure> {
    let Keep { global, command } = keep;
    let context = || Context::new(&global);
    match command {
        Command::Serve(args) => serve::serve(&global, args).await?,
        Command::Doctor(args) => doctor::doctor(&global, &args).await?,
        Command::Microvm(MicrovmCommand::Setup(args)) => microvm::setup(&global, &args).await?,
        Command::Backup(command) => backup::backup(&global, command)?,
        Command::Tls(TlsCommand::Init(args)) => tls::init(&global, &args)?,
        Command::Fsck(args) => fsck::fsck(&global, &args).await?,
        Command::Completions(args) => {
            Screen::new(false).text(&complete::script(args.shell))?;
        }
        Command::Config(args) => match args.command {
            None => Screen::new(false).text(&reference::settings_file())?,
            Some(ConfigCommand::Check { file }) => check_config(&global, file)?,
        },
        Command::Man(args) => reference::write_man_pages(&args.dir)?,
        Command::Version => version(&global).await?,
        Command::Create(args) => sandbox::create(&context()?, *args).await?,
        Command::Exec(args) => return exec::exec(&context()?, args).await,
        Command::Run(args) => return exec::run(&context()?, *args).await,
        Command::Sh(args) => return exec::shell(&context()?, args).await,
        Command::Start(args) => sandbox::start(&context()?, &args).await?,
        Command::Stop(args) => sandbox::stop(&context()?, args).await?,
        Command::Pause(args) => sandbox::pause(&context()?, &args).await?,
        Command::Fork(args) => sandbox::fork(&context()?, *args).await?,
        Command::Checkpoint(args) => sandbox::checkpoint(&context()?, args).await?,
        Command::Rollback(args) => sandbox::rollback(&context()?, args).await?,
        Command::Diff(args) => fork::diff(&context()?, args).await?,
        Command::Changes(args) => fork::changes(&context()?, &args).await?,
        Command::Promote(args) => fork::promote(&context()?, &args).await?,
        Command::Pick(args) => fork::pick(&context()?, &args).await?,
        Command::Merge(args) => fork::merge(&context()?, args).await?,
        Command::Rename(args) => fork::rename(&context()?, &args).await?,
        Command::Prune(args) => fork::prune(&context()?, &args).await?,
        Command::Ls(args) => sandbox::list(&context()?, args).await?,
        Command::Show(args) => sandbox::show(&context()?, &args.names).await?,
        Command::Why(args) => sandbox::why(&context()?, &args.names).await?,
        Command::Tree(args) => tree::tree(&context()?, &args.names).await?,
        Command::Ps(args) => exec::commands(&context()?, &args).await?,
        Command::History(args) => history::history(&context()?, &args).await?,
        Command::Logs(args) => exec::logs(&context()?, args).await?,
        Command::Events(args) => events::events(&context()?, args).await?,
        Command::Audit(args) => audit::audit(&global, args).await?,
        Command::Kill(args) => exec::kill(&context()?, &args).await?,
        Command::Cp(args) => copy::copy(&context()?, &args).await?,
        Command::Rm(args) => sandbox::remove(&context()?, &args).await?,
        Command::Update(args) => sandbox::update(&context()?, *args).await?,
        Command::Stats(args) => stats::stats(&context()?, &args).await?,
        Command::Top(args) => stats::top(&context()?, &args).await?,
        Command::Sessions(args) => sandbox::sessions(&context()?, &args).await?,
        Command::Ports(args) => port::ports(&context()?, &args).await?,
        Command::Open(args) => port::open(&context()?, &args).await?,
        Command::Forward(args) => port::forward(&context()?, &args).await?,
        Command::Service(command) => service::service(&context()?, command).await?,
        Command::Network(args) => network::network(&context()?, &args).await?,
        Command::Net(args) => network::net(&context()?, &args).await?,
        Command::Runs(command) => return runs::runs(&context()?, command).await,
        Command::Approvals(command) => return approvals::approvals(&context()?, command).await,
        Command::Ask(args) => return Err(approvals::ask(&args)),
        Command::Guard(command) => guard::guard(&context()?, command).await?,
        Command::Snapshot(command) => snapshot::snapshot(&context()?, command).await?,
        Command::Secret(command) => secret::secret(&context()?, command).await?,
        Command::Webhook(command) => webhook::webhook(&context()?, command).await?,
        Command::Trash(command) => trash::trash(&context()?, command).await?,
        Command::Drive(command) => drive::drive(&context()?, command).await?,
        Command::Image(command) => image::image(&context()?, command).await?,
        Command::Project(command) => tenant::project(&context()?, command).await?,
        Command::Key(command) => tenant::key(&context()?, command, global.project.clone()).await?,
        Command::Env(args) => env::env(&context()?, &global, &args).await?,
        Command::Usage => tenant::usage(&context()?).await?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct CheckedConfig {
    file: PathBuf,
    data: PathBuf,
}

/// Reads a settings file as `keep serve` would.
fn check_config(global: &Global, file: Option<PathBuf>) -> Result<(), Failure> {
    let file = file.unwrap_or_else(|| PathBuf::from(locate::SYSTEM_CONFIG));
    let args = ServeArgs { config: Some(file.clone()), ..ServeArgs::default() };
    let data = config::resolve(global, args)?.data;
    Screen::new(global.json).answer(&CheckedConfig { file, data }, |checked| {
        format!("{} is valid; data in {}\n", checked.file.display(), checked.data.display())
    })
}

#[derive(Serialize)]
struct Versions {
    client: &'static str,
    server: Option<String>,
}

/// Works without a server: people ask for versions when it does not answer.
async fn version(global: &Global) -> Result<(), Failure> {
    let server = match locate::client(global) {
        Ok(client) => client.health().await.ok().map(|health| health.version),
        Err(_) => None,
    };
    let versions = Versions { client: env!("CARGO_PKG_VERSION"), server };
    Screen::new(global.json).answer(&versions, |versions| {
        let server = versions.server.as_deref().unwrap_or("none found");
        format!("client {}\nserver {server}\n", versions.client)
    })
}

/// Waits for a sandbox, and says why if that takes long: the image may have to be built first.
async fn patiently<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    tokio::select! {
        done = &mut work => return done,
        () = tokio::time::sleep(std::time::Duration::from_secs(2)) => {}
    }
    if std::io::stderr().is_terminal() {
        note(
            "the first sandbox of an image waits until the image is built; this takes some seconds",
        );
    }
    work.await
}

/// Runs `each` for all names, reports failures as they happen, and fails if any did. With one name, its
/// failure is returned.
async fn for_each<F>(
    context: &Context,
    names: &[String],
    mut each: impl FnMut(String) -> F,
) -> Result<(), Failure>
where
    F: Future<Output = Result<(), Failure>>,
{
    if let [only] = names {
        return each(only.clone()).await;
    }
    let mut failed = 0;
    let mut first = None;
    for name in names {
        if let Err(failure) = each(name.clone()).await {
            failure.tell(context.screen.json, failure.exit_code());
            failed += 1;
            first.get_or_insert(failure.exit_code());
        }
    }
    match first {
        Some(code) => Err(Failure::Some { failed, all: names.len(), code }),
        None => Ok(()),
    }
}

/// Lines of a name and a value, aligned.
fn facts(paint: Paint, facts: &[(&str, String)]) -> String {
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let line = |(name, value): &(&str, String)| {
        let value = if value.is_empty() { "-" } else { value };
        let value = value.replace(|c: char| c.is_control() && c != '\x1b', " ");
        format!("{}{}  {value}\n", paint.bold(name), " ".repeat(width - name.len()))
    };
    facts.iter().map(line).collect()
}

/// A number of bytes for people.
pub(crate) fn bytes(count: u64) -> String {
    sandkeep_core::model::Size(count).to_string()
}

/// A list of pairs for people.
pub(crate) fn pairs(map: &std::collections::BTreeMap<String, String>) -> String {
    let said: Vec<String> = map.iter().map(|(key, value)| format!("{key}={value}")).collect();
    said.join(",")
}

/// The word a value has in JSON.
pub(crate) fn word(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => "-".to_owned(),
    }
}

/// Paths that cannot be merged, a line each.
pub(crate) fn conflicts_text(conflicts: &[MergeConflict]) -> String {
    let line = |one: &MergeConflict| format!("C {}  {}\n", one.path, one.reason);
    conflicts.iter().map(line).collect()
}

fn or_dash(value: Option<String>) -> String {
    value.unwrap_or_else(|| "-".to_owned())
}
