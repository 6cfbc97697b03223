//! `keep fsck`: looks at a data directory that no server has open, and makes its index again.

use std::path::PathBuf;
use std::time::Duration;

use sandkeep_core::engine::Settings;
use sandkeep_core::model::{Layer, MemoryLayer};
use sandkeep_core::store::{Problem, Report, Store, Verdict};
use serde::Serialize;

use super::bytes;
use crate::args::{FsckArgs, Global};
use crate::config::{self, MicrovmSettings, SecretsFile};
use crate::failure::Failure;
use crate::locate;
use crate::screen::{Paint, Screen};
use crate::serve;

/// How long the recovery of sandboxes is waited for after the index was made again.
const RECOVERED_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize)]
struct Answer {
    data: PathBuf,
    #[serde(flatten)]
    report: Report,
    broken: bool,
    rebuilt: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<Verified>,
}

/// What reading all files found.
#[derive(Debug, Default, Serialize)]
struct Verified {
    intact: usize,
    /// Layers seen for the first time: their digests are kept, to be compared with the next time.
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
    let store = serve::open_store(&data)?;
    let report = store
        .fsck()
        .await
        .map_err(|error| Failure::caused("cannot read the data directory", error))?;
    let verified = match args.verify {
        true => Some(verify(&store).await?),
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
    let screen = Screen::new(global.json);
    let answer = Answer { data, report, broken, rebuilt: args.rebuild, verified };
    screen.answer(&answer, |answer| written(screen.paint, answer))?;
    match broken {
        true => Err(Failure::Broken),
        false => Ok(()),
    }
}

async fn verify(store: &Store) -> Result<Verified, Failure> {
    let cannot = |error| Failure::caused("cannot read the layers", error);
    let mut found = Verified::default();
    for layer in store.scan::<Layer>().await.map_err(cannot)?.good {
        match store.verify(&layer.id).await.map_err(cannot)? {
            Verdict::Intact => found.intact += 1,
            Verdict::Unknown => {
                store.fingerprint(&layer.id).await.map_err(cannot)?;
                found.recorded += 1;
            }
            Verdict::Damaged(differences) => {
                let told = differences
                    .iter()
                    .map(|difference| format!("layer {}: {difference}", layer.id));
                found.damaged.extend(told);
            }
        }
    }
    for layer in store.scan::<MemoryLayer>().await.map_err(cannot)?.good {
        match store.verify_memory(&layer.id).await.map_err(cannot)? {
            Verdict::Intact => found.intact += 1,
            Verdict::Unknown => {
                store.fingerprint_memory(&layer.id).await.map_err(cannot)?;
                found.recorded += 1;
            }
            Verdict::Damaged(differences) => {
                let told = differences
                    .iter()
                    .map(|difference| format!("memory layer {}: {difference}", layer.id));
                found.damaged.extend(told);
            }
        }
    }
    Ok(found)
}

fn written(paint: Paint, answer: &Answer) -> String {
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
        text.push_str(&format!("{mark}  {}\n", told(problem)));
    }
    if let Some(Verified { intact, recorded, damaged }) = &answer.verified {
        for difference in damaged {
            text.push_str(&format!("{}  {difference}\n", paint.red("PROBLEM ")));
        }
        text.push_str(&format!(
            "{intact} layers read and found as they were, {recorded} read for the first time\n"
        ));
    }
    if answer.rebuilt {
        text.push_str("the index was made again from what is on disk\n");
    }
    text.push_str(match answer.broken {
        true => "something that was acknowledged is damaged\n",
        false => "everything that was acknowledged is there\n",
    });
    text
}

fn told(problem: &Problem) -> String {
    match problem {
        Problem::DamagedManifest { path, reason } => {
            format!("`{}` does not read: {reason}", path.display())
        }
        Problem::TooNew { path } => {
            format!("`{}` was written by a later version of keep", path.display())
        }
        Problem::MissingLayer { needed_by, layer } => {
            format!("layer {layer} is gone, and {needed_by} needs it")
        }
        Problem::MissingSnapshot { sandbox, snapshot } => {
            format!("snapshot {snapshot} is gone, and sandbox {sandbox} stands on it")
        }
        Problem::MissingMemory { needed_by, memory } => {
            format!("memory layer {memory} is gone, and {needed_by} needs it")
        }
        Problem::DamagedMemory { memory, reason } => format!("memory layer {memory}: {reason}"),
        Problem::AbandonedMemory { memory } => {
            format!("memory layer {memory} was begun and never finished")
        }
        Problem::UnheldMemory { memory, bytes: size } => {
            format!("memory layer {memory}, {}, is needed by nobody", bytes(*size))
        }
        Problem::MissingFiles { layer } => format!("layer {layer} has lost its files"),
        Problem::NotASandbox { path } => format!("`{}` holds no sandbox", path.display()),
        Problem::AbandonedLayer { layer } => format!("layer {layer} was begun and never finished"),
        Problem::UnheldLayer { layer, bytes: size } => {
            format!("layer {layer}, {}, is needed by nobody", bytes(*size))
        }
        Problem::Stray { path } => format!("`{}` does not belong there", path.display()),
    }
}
