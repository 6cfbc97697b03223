//! `RUN`: a command in a sandbox of its own, whose layer is sealed when the command has succeeded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sandkeep_proto::link::{At, Hidden, SecretFile};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::instructions::{StageState, is_proxy, key_of};
use super::{Build, BuildEvent};
use crate::dockerfile::{CacheMount, DockerfileError, Instruction, RunMount, SecretMount};
use crate::engine::lifecycle::create::StartingPoint;
use crate::engine::running::live::RunningSandbox;
use crate::engine::session::command::{CommandOutput, Exec, check};
use crate::engine::snapshots::drives::CreateDrive;
use crate::engine::tenancy::secrets::Given;
use crate::engine::{Error, Result, SnapshotOnStop, Stop};
use crate::model::{
    Command, CommandEnd, Config, Expiry, LayerId, Mount, MountMode, Name, OnJunk, Retention, Size,
    Span,
};
use crate::store::Effort;
use crate::store::search::{MatchKind, Needles, SearchedFiles, Writers};

/// How long a command may take.
pub(super) const STEP_WITHIN: Duration = Duration::from_secs(3 * 3600);
/// What a cache may hold.
const CACHE_SIZE: Size = Size(20 << 30);
/// How the drives of caches are named.
const CACHE: &str = "build-cache-";
/// How many caches a project may have.
const MOST_CACHES: u32 = 32;
/// Where a script is that says itself what runs it.
const SCRIPT: &str = "/run/keep-build/script";

/// What a step runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepCommand {
    /// Program and arguments.
    pub(super) argv: Vec<String>,
    /// A text that is in a file meanwhile; the file is the last argument.
    pub(super) script: Option<String>,
}

impl Build<'_> {
    pub(super) async fn run(
        &mut self,
        state: &mut StageState,
        step: &Instruction,
        command: &StepCommand,
        mounts: &[RunMount],
    ) -> Result<()> {
        if state.layers.is_empty() {
            let reason = "there is nothing to run: the stage has no files yet";
            return Err(DockerfileError { line: step.line, reason: reason.to_owned() }.into());
        }
        let mut argv = command.argv.clone();
        let mut given = self.secrets(mounts, step.line)?;
        if let Some(script) = &command.script {
            argv.push(SCRIPT.to_owned());
            given.files.push(SecretFile { path: SCRIPT.to_owned(), value: Hidden::new(script) });
        }
        let mut env: BTreeMap<String, String> = state.args.clone();
        env.retain(|name, _| !state.config.env.contains_key(name));
        let key = key_of(&(
            ("run", super::instructions::VERSION, self.project, &state.key),
            (&argv, &command.script, &env, &state.config.env),
            (&state.config.user, state.cwd(), format!("{mounts:?}")),
        ));
        let _making = self.while_heard(self.builds.steps.lock(&key)).await?;
        if self.cached(state, step, &key).await? {
            return Ok(());
        }
        self.begin_step(step.line, &step.text, false).await?;
        for (name, value) in &self.request.args {
            if is_proxy(name) && !state.config.env.contains_key(name) {
                env.insert(name.clone(), value.clone());
            }
        }
        let exec = Exec {
            argv,
            env,
            cwd: Some(state.cwd().to_owned()),
            timeout: Some(Span::seconds(STEP_WITHIN.as_secs())),
            by: self.request.by.clone(),
            ..Exec::default()
        };
        check(&exec)?;
        // Always in the same order, so that two steps never wait for each other.
        let caches: BTreeSet<&str> = caches_of(mounts).map(|cache| cache.id.as_str()).collect();
        let mut held = Vec::new();
        for id in caches {
            let cache = (self.project.clone(), id.to_owned());
            held.push(self.while_heard(self.builds.caches.lock(&cache)).await?);
        }
        let layers = self.in_sandbox(state, step, &exec, given, mounts).await?;
        self.made(state, step, key, layers).await
    }

    /// Starts a sandbox, runs the command and seals. The sandbox is gone afterwards, whatever happened.
    async fn in_sandbox(
        &self,
        state: &StageState,
        step: &Instruction,
        exec: &Exec,
        given: Given,
        mounts: &[RunMount],
    ) -> Result<Vec<LayerId>> {
        let lifecycle = &self.builds.lifecycle;
        lifecycle.store.check_room(1).await?;
        let config = self.config(mounts).await?;
        let hold = lifecycle.store.hold();
        hold.layers(&state.layers).await;
        let start_point = StartingPoint {
            config,
            hold: Some(Arc::new(hold)),
            layers: state.layers.clone(),
            image_config: state.config.clone(),
            current: None,
            memory: false,
            forked_from: None,
            internal: true,
        };
        let name = sandbox_name();
        let opened =
            lifecycle.register(self.project, Some(name.clone()), start_point, None, true).await?;
        let id = opened.sandbox.id.clone();
        let worked = async {
            let live = lifecycle.turns.live(&id).ok_or(Error::SessionOver)?;
            for cache in caches_of(mounts) {
                prepare_cache(&live, cache).await?;
            }
            let needles: Vec<_> = self.needles(mounts);
            self.follow(&live, step, exec, given).await?;
            // Before anything is sealed; and once more then, for what the command has left running.
            let open: Vec<LayerId> = live.sandbox().open_layer().cloned().into_iter().collect();
            self.search(&open, &[], &needles, Writers::Busy, step).await?;
            let wish = Stop { snapshot: SnapshotOnStop::Always, ..Stop::default() };
            let stopped =
                lifecycle.stop_found(id.clone(), name.clone(), wish, Expiry::Retention).await?;
            let snapshot = stopped.snapshot.ok_or(Error::SessionOver)?.item;
            self.hold.layers(&snapshot.layers).await;
            self.search(&snapshot.layers, &state.layers, &needles, Writers::None, step).await?;
            Ok(snapshot.layers)
        };
        let worked: Result<Vec<LayerId>> = worked.await;
        let layers = match worked {
            Ok(layers) => {
                lifecycle.references.count_image_layers(&layers).await?;
                Ok(layers)
            }
            Err(error) => Err(error),
        };
        crate::failpoint::pass("build.sealed");
        self.builds.delete(id).await;
        layers
    }

    /// What the sandbox of a step is like: as others of the project, but for what it must not do by itself.
    async fn config(&self, mounts: &[RunMount]) -> Result<Config> {
        let lifecycle = &self.builds.lifecycle;
        let mut config = lifecycle.fresh_config(None);
        "image build".clone_into(&mut config.purpose);
        config.idle_timeout = None;
        config.session_timeout = Some(Span::seconds(2 * STEP_WITHIN.as_secs()));
        config.expires = Span::seconds(24 * 3600);
        config.retention = Retention::default();
        config.guard.junk = OnJunk::Off;
        for cache in caches_of(mounts) {
            let name = cache_name(&cache.id)?;
            self.check_caches(&name).await?;
            let wish = CreateDrive {
                name: name.clone(),
                max_size: None,
                notes: BTreeMap::from([("cache".to_owned(), cache.id.clone())]),
            };
            // One that is there keeps the size it was given.
            if lifecycle.db.drive(self.project, &name).await?.is_none() {
                let wish = CreateDrive { max_size: Some(CACHE_SIZE), ..wish };
                lifecycle.storage.drives.create(self.project, &wish).await?;
            }
            let mount = Mount { drive: name, mode: MountMode::ReadWrite };
            config.mounts.insert(cache.target.clone(), mount);
        }
        config.mounts = crate::model::check_mounts(config.mounts)?;
        Ok(config.with_defaults_for(self.project))
    }

    async fn check_caches(&self, name: &Name) -> Result<()> {
        let db = &self.builds.lifecycle.db;
        if db.drive(self.project, name).await?.is_some() {
            return Ok(());
        }
        let page = crate::db::Page { limit: MOST_CACHES, ..crate::db::Page::default() };
        let there = db.drives(Some(self.project), Some(CACHE), &page).await?.items.len();
        if there >= MOST_CACHES as usize {
            return Err(Error::invalid(
                "--mount=type=cache",
                format!(
                    "the project has {there} caches of builds, which is the most it may have; delete some \
                     (`keep drive ls {CACHE}`, `keep drive rm`)"
                ),
            ));
        }
        Ok(())
    }

    /// The secrets of a step, as a command is given them.
    fn secrets(&self, mounts: &[RunMount], line: usize) -> Result<Given> {
        let mut given = Given::default();
        for mount in secrets_of(mounts) {
            let Some(value) = self.request.secrets.get(&mount.id) else {
                if mount.required {
                    let reason = format!(
                        "the secret `{0}` is required; give it with `--secret id={0},src=FILE`",
                        mount.id
                    );
                    return Err(DockerfileError { line, reason }.into());
                }
                continue;
            };
            if let Some(path) = &mount.target {
                given.files.push(SecretFile { path: path.clone(), value: value.clone() });
            }
            if let Some(name) = &mount.env {
                given.env.insert(name.clone(), value.clone());
            }
        }
        Ok(given)
    }

    fn needles(&self, mounts: &[RunMount]) -> Vec<(String, Zeroizing<String>)> {
        let value = |mount: &SecretMount| {
            let value = self.request.secrets.get(&mount.id)?;
            Some((mount.id.clone(), Zeroizing::new(value.reveal().trim_end().to_owned())))
        };
        secrets_of(mounts).filter_map(value).collect()
    }

    /// Runs the command to its end, and tells what it prints.
    async fn follow(
        &self,
        live: &Arc<RunningSandbox>,
        step: &Instruction,
        exec: &Exec,
        given: Given,
    ) -> Result<()> {
        let sessions = &self.builds.lifecycle.sessions;
        let (_, mut output) = sessions.launch_given(live, exec, given).await?;
        loop {
            let event = self.while_heard(output.next()).await?;
            match event {
                Some(CommandOutput::Stdout(bytes) | CommandOutput::Stderr(bytes)) => {
                    self.tell(BuildEvent::Output(bytes)).await?;
                }
                Some(CommandOutput::Gap(bytes)) => {
                    let text = format!("[{bytes} bytes of output are left out]\n");
                    self.tell(BuildEvent::Output(Bytes::from(text))).await?;
                }
                Some(CommandOutput::Exited(command)) if command.exit_code == Some(0) => {
                    return Ok(());
                }
                Some(CommandOutput::Exited(command)) => {
                    let (line, text) = (step.line, step.text.chars().take(200).collect());
                    return Err(Error::BuildStepFailed { line, text, how: how_it_ended(&command) });
                }
                None => return Err(Error::SessionOver),
            }
        }
    }

    /// Looks for the values of secrets in what a step has written.
    async fn search(
        &self,
        layers: &[LayerId],
        before: &[LayerId],
        secrets: &[(String, Zeroizing<String>)],
        writers: Writers,
        step: &Instruction,
    ) -> Result<()> {
        if secrets.is_empty() {
            return Ok(());
        }
        let needles = Arc::new(Needles::new(secrets));
        for layer in layers.iter().filter(|layer| !before.contains(layer)) {
            let store = &self.builds.lifecycle.store;
            let found = store
                .search(layer, &needles, writers, Effort::Foreground, SearchedFiles::default())
                .await?;
            for find in found.finds {
                if let MatchKind::Secret { name, .. } = find.what {
                    let path = String::from_utf8_lossy(&find.path).into_owned();
                    let how = format!(
                        "the secret `{name}` is in the file /{path}, and would be in the image"
                    );
                    let text = step.text.chars().take(200).collect();
                    return Err(Error::BuildStepFailed { line: step.line, text, how });
                }
            }
        }
        Ok(())
    }
}

fn caches_of(mounts: &[RunMount]) -> impl Iterator<Item = &CacheMount> {
    mounts.iter().filter_map(|mount| match mount {
        RunMount::Cache(cache) => Some(cache),
        RunMount::Secret(_) => None,
    })
}

fn secrets_of(mounts: &[RunMount]) -> impl Iterator<Item = &SecretMount> {
    mounts.iter().filter_map(|mount| match mount {
        RunMount::Secret(secret) => Some(secret),
        RunMount::Cache(_) => None,
    })
}

fn sandbox_name() -> Name {
    let id = crate::model::SandboxId::fresh().to_string();
    let digits = id.rsplit('-').next().unwrap_or(&id);
    format!("build-{digits}").parse().unwrap_or_else(|_| Name::generate())
}

fn cache_name(id: &str) -> Result<Name> {
    let digest = hex::encode(&Sha256::digest(id)[..8]);
    format!("{CACHE}{digest}").parse().map_err(|error: crate::model::BadName| {
        Error::invalid("--mount=type=cache", error.to_string())
    })
}

/// Gives a cache's directory the owner and mode that its mount names.
async fn prepare_cache(live: &RunningSandbox, cache: &CacheMount) -> Result<()> {
    if cache.owner.is_none() && cache.mode.is_none() {
        return Ok(());
    }
    let target = Path::new(&cache.target);
    let (Some(above), Some(name)) = (target.parent(), target.file_name()) else { return Ok(()) };
    let (uid, gid) = cache.owner.unwrap_or((0, 0));
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_mode(cache.mode.unwrap_or(0o755));
    header.set_uid(uid.into());
    header.set_gid(gid.into());
    header.set_size(0);
    let mut archive = tar::Builder::new(Vec::new());
    let packed = archive
        .append_data(&mut header, Path::new(name), std::io::empty())
        .and_then(|()| archive.into_inner());
    let packed = packed.map_err(|error| Error::invalid("--mount=type=cache", error.to_string()))?;
    let path = above.to_string_lossy().into_owned();
    let at = At { path, cwd: None, user: Some("root".to_owned()) };
    let mut out = live.guest().await?.tar_in(at, false).await?;
    out.send(Bytes::from(packed)).await?;
    out.finish().await?;
    Ok(())
}

fn how_it_ended(command: &Command) -> String {
    match (&command.end, command.exit_code) {
        (Some(CommandEnd::TimedOut), _) => {
            format!("it took longer than {} hours", STEP_WITHIN.as_secs() / 3600)
        }
        (Some(end @ (CommandEnd::OutOfMemory | CommandEnd::OutOfDisk)), _) => {
            format!("it was ended: {end:?}; the sandbox of a step has the limits of any other")
        }
        (_, Some(code)) => format!("it ended with exit code {code}"),
        (_, None) => "its sandbox ended".to_owned(),
    }
}
