//! `keep fsck`: checks a data directory that no server has open, and rebuilds its index.

use std::path::PathBuf;
use std::time::Duration;

use sandkeep_core::engine::Settings;
use sandkeep_core::model::{Layer, LayerId, MemoryLayer, Name};
use sandkeep_core::store::{
    DigestVerdict, NameDifference, Problem, Repair, Report, Store, StoreError, missing_parts,
};
use serde::Serialize;

use crate::args::{FsckArgs, Global};
use crate::config::{self, MicrovmSettings, SecretsFile};
use crate::failure::Failure;
use crate::locate;
use crate::screen::{Paint, Screen};
use crate::serve;

/// How long the recovery of sandboxes is waited for after the index was made again.
const RECOVERED_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize)]
struct FsckOutput {
    data: PathBuf,
    #[serde(flatten)]
    report: Report,
    broken: bool,
    rebuilt: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<Verified>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    repaired: Vec<Repair>,
}

/// What reading all files found.
#[derive(Debug, Default, Serialize)]
struct Verified {
    intact: usize,
    /// Layers that were never read before: there is nothing to compare them with.
    unverified: usize,
    /// Those of them whose digests were made now.
    recorded: usize,
    damaged: Vec<String>,
}

pub(super) async fn fsck(global: &Global, args: &FsckArgs) -> Result<(), Failure> {
    let data = global.data.clone().unwrap_or_else(locate::default_data);
    if !data.is_dir() {
        let hint = "name the data directory with --data or SANDKEEP_DATA";
        let message = format!("there is no data directory `{}`", data.display());
        return Err(Failure::here(message).with_hint(hint));
    }
    let screen = Screen::new(global.json);
    let missing = missing_parts(&data);
    if !missing.is_empty() {
        // Nothing is opened, so that nothing is made in their place.
        let problems = missing.into_iter().map(|path| Problem::MissingPart { path }).collect();
        let report = Report { problems, ..Report::default() };
        let (rebuilt, verified, repaired) = (false, None, Vec::new());
        let answer = FsckOutput { data, report, broken: true, rebuilt, verified, repaired };
        screen.answer(&answer, |answer| written(screen.paint, answer))?;
        return Err(Failure::DataDamaged);
    }
    let changes = args.rebuild
        || args.repair
        || !args.give_up.is_empty()
        || !args.accept_layer.is_empty()
        || !args.reset_project.is_empty();
    let store = match Store::open(&data) {
        // A server works there: it checks by itself.
        Err(StoreError::Locked { .. }) if !changes => return online(global, args).await,
        Err(StoreError::Locked { .. }) => serve::open_store(&data)?,
        Err(error) => {
            return Err(Failure::caused(format!("cannot open `{}`", data.display()), error));
        }
        Ok(store) => store,
    };
    let cannot = |error| Failure::caused("cannot read the data directory", error);
    decide(&store, args).await?;
    let mut report = store.fsck().await.map_err(cannot)?;
    let mut repaired = Vec::new();
    if args.repair {
        repaired = store
            .repair(&report)
            .await
            .map_err(|error| Failure::caused("cannot repair the data directory", error))?;
        report = store.fsck().await.map_err(cannot)?;
    }
    let verified = match args.verify {
        true => Some(verify(&store, args.record).await?),
        false => None,
    };
    if args.rebuild {
        serve::forget_index(store.data_dir())?;
        // Opening the engine reads everything into a new index; running sandboxes are let run.
        let key =
            config::secrets_key(std::env::var_os(config::SECRETS_KEY), SecretsFile::default())?;
        let settings = Settings { secrets_key: key, ..Settings::default() };
        let (engine, drivers) =
            serve::open_engine(store, settings, &MicrovmSettings::default()).await?;
        // What is not recovered by then is recovered when the server starts.
        let _ = tokio::time::timeout(RECOVERED_WITHIN, engine.recovered()).await;
        engine.shutdown().await;
        drivers.retire();
    }
    let broken =
        report.is_broken() || verified.as_ref().is_some_and(|found| !found.damaged.is_empty());
    let answer = FsckOutput { data, report, broken, rebuilt: args.rebuild, verified, repaired };
    screen.answer(&answer, |answer| written(screen.paint, answer))?;
    match broken {
        true => Err(Failure::DataDamaged),
        false => Ok(()),
    }
}

/// Has a running server check its data directory.
async fn online(global: &Global, args: &FsckArgs) -> Result<(), Failure> {
    let found = locate::client(global)?.fsck(args.verify).await?;
    let screen = Screen::new(global.json);
    screen.answer(&found, |found| {
        let mut text = String::new();
        for problem in &found.problems {
            let mark = match problem.leftover {
                true => screen.paint.dim("leftover"),
                false => screen.paint.red("PROBLEM "),
            };
            text.push_str(&format!("{mark}  {}\n", problem.text));
        }
        text.push_str(concluded(found.broken));
        text
    })?;
    match found.broken {
        true => Err(Failure::DataDamaged),
        false => Ok(()),
    }
}

fn concluded(broken: bool) -> &'static str {
    match broken {
        true => "something that was acknowledged is damaged\n",
        false => "everything that was acknowledged is there\n",
    }
}

/// Does what somebody decided about damage, each thing by its name.
async fn decide(store: &Store, args: &FsckArgs) -> Result<(), Failure> {
    for name in &args.reset_project {
        let project: Name = name
            .parse()
            .map_err(|error| Failure::caused(format!("`{name}` is not a project name"), error))?;
        store
            .reset_project(&project)
            .await
            .map_err(|error| Failure::caused(format!("cannot reset project `{name}`"), error))?;
    }
    for layer in &args.accept_layer {
        let id: LayerId = layer
            .parse()
            .map_err(|error| Failure::caused(format!("`{layer}` is not a layer id"), error))?;
        store
            .accept_layer(&id)
            .await
            .map_err(|error| Failure::caused(format!("cannot accept layer `{layer}`"), error))?;
    }
    for path in &args.give_up {
        let path = store.data_dir().join(path);
        let within = path.canonicalize().is_ok_and(|path| path.starts_with(store.data_dir()));
        if !within || path == store.data_dir() {
            return Err(Failure::here(format!(
                "`{}` is not in the data directory",
                path.display()
            )));
        }
        store
            .quarantine(&path)
            .await
            .map_err(|error| Failure::caused(format!("cannot move `{}`", path.display()), error))?;
    }
    Ok(())
}

async fn verify(store: &Store, record: bool) -> Result<Verified, Failure> {
    let cannot = |error| Failure::caused("cannot read the layers", error);
    let mut found = Verified::default();
    for layer in store.scan::<Layer>().await.map_err(cannot)?.good {
        let verdict = match store.verify(&layer.id, None).await {
            Ok(verdict) => verdict,
            // One that cannot be read is damaged; the others are read all the same.
            Err(error) => DigestVerdict::Damaged(vec![NameDifference::Other(error.to_string())]),
        };
        match verdict {
            DigestVerdict::Intact => found.intact += 1,
            DigestVerdict::Unknown if record => {
                store.record_digest(&layer.id, None).await.map_err(cannot)?;
                found.recorded += 1;
            }
            DigestVerdict::Unknown => found.unverified += 1,
            DigestVerdict::Damaged(differences) => {
                let told = differences
                    .iter()
                    .map(|difference| format!("layer {}: {difference}", layer.id));
                found.damaged.extend(told);
            }
        }
    }
    for layer in store.scan::<MemoryLayer>().await.map_err(cannot)?.good {
        let verdict = match store.verify_memory(&layer.id).await {
            Ok(verdict) => verdict,
            Err(error) => DigestVerdict::Damaged(vec![NameDifference::Other(error.to_string())]),
        };
        match verdict {
            DigestVerdict::Intact => found.intact += 1,
            DigestVerdict::Unknown if record => {
                store.record_memory_digests(&layer.id).await.map_err(cannot)?;
                found.recorded += 1;
            }
            DigestVerdict::Unknown => found.unverified += 1,
            DigestVerdict::Damaged(differences) => {
                let told = differences
                    .iter()
                    .map(|difference| format!("memory layer {}: {difference}", layer.id));
                found.damaged.extend(told);
            }
        }
    }
    Ok(found)
}

fn written(paint: Paint, answer: &FsckOutput) -> String {
    let Report { problems, projects, sandboxes, snapshots, drives, images, layers, memory } =
        &answer.report;
    let mut text = format!(
        "{}: {projects} projects, {sandboxes} sandboxes, {snapshots} snapshots, {drives} drives, {images} images, {layers} layers, {memory} memory layers\n",
        answer.data.display()
    );
    for problem in problems {
        let mark = match problem.is_leftover() {
            true => paint.dim("leftover"),
            false => paint.red("PROBLEM "),
        };
        text.push_str(&format!("{mark}  {problem}\n"));
    }
    for repair in &answer.repaired {
        let told = match repair {
            Repair::Quarantined { from, to } => {
                format!("`{}` is now `{}`", from.display(), to.display())
            }
            Repair::Restored { from, layer } => {
                format!("layer {layer} was in `{}` and is back in its place", from.display())
            }
        };
        text.push_str(&format!("{}  {told}\n", paint.bold("repaired")));
    }
    if let Some(Verified { intact, unverified, recorded, damaged }) = &answer.verified {
        for difference in damaged {
            text.push_str(&format!("{}  {difference}\n", paint.red("PROBLEM ")));
        }
        text.push_str(&format!(
            "{intact} layers are what was sealed; {unverified} have no digest to compare with; {recorded} digests were made\n"
        ));
    }
    if answer.rebuilt {
        text.push_str("the index was made again from what is on disk\n");
    }
    text.push_str(concluded(answer.broken));
    text
}
