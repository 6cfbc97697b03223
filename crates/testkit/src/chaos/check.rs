//! After a fault: is everything there that was acknowledged?

use std::time::{Duration, Instant};

use sandkeep_client::types::{CreateSandbox, Stop};
use sandkeep_client::{Client, Error, ListSandboxes};

use super::model::Files;
use super::report::Operation;
use super::worker::{Worker, files, is_final, settings, told};
use crate::random::Random;

/// How long a sandbox may take to come to a lasting state after a restart.
const SETTLING: Duration = Duration::from_secs(30);

/// How many snapshots of one client that are new since the last fault are compared.
const FRESH: usize = 12;

/// Something that is wrong, and whether it is a loss.
pub(super) struct Finding {
    pub(super) lost: bool,
    pub(super) operation: Operation,
    pub(super) what: String,
}

impl Finding {
    const fn lost(operation: Operation, what: String) -> Self {
        Self { lost: true, operation, what }
    }

    const fn wrong(operation: Operation, what: String) -> Self {
        Self { lost: false, operation, what }
    }
}

/// How much is looked at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depth {
    /// Whether the fault may have taken what was not durable.
    pub(super) lossy: bool,
    /// How many snapshots of a client are resumed that were compared before.
    pub(super) snapshots: usize,
    /// How long one request may take.
    pub(super) patience: Duration,
    pub(super) driver: &'static str,
}

/// Compares everything of a client with its model, and lets the model follow. Returns how many snapshots were
/// compared.
pub(super) async fn client(
    client: &Client,
    worker: &mut Worker,
    depth: Depth,
    random: &mut Random,
    findings: &mut Vec<Finding>,
) -> u64 {
    let names: Vec<String> = worker.model.sandboxes.keys().cloned().collect();
    for name in names {
        sandbox(client, worker, &name, depth, findings).await;
    }
    for name in std::mem::take(&mut worker.model.deleted) {
        match client.sandbox(&name).await {
            Err(Error::Api { status: 404, .. }) => {}
            Ok(_) => {
                let what = format!("{name} was deleted and is there again");
                findings.push(Finding::lost(Operation::Delete, what));
                let _ = client.delete(&name, None).await;
            }
            Err(error) => {
                findings
                    .push(Finding::wrong(Operation::Delete, format!("{name}: {}", told(error))));
            }
        }
    }
    for id in std::mem::take(&mut worker.model.dropped) {
        if client.snapshot(&id).await.is_ok() {
            let what = format!("snapshot {id} was deleted and is there again");
            findings.push(Finding::lost(Operation::DeleteSnapshot, what));
            let _ = client.delete_snapshot(&id, true).await;
        }
    }
    snapshots(client, worker, depth, random, findings).await
}

async fn sandbox(
    client: &Client,
    worker: &mut Worker,
    name: &str,
    depth: Depth,
    findings: &mut Vec<Finding>,
) {
    let model = &mut worker.model;
    let Some(known) = model.sandboxes.get_mut(name) else { return };
    let deadline = Instant::now() + SETTLING;
    let found = loop {
        match client.sandbox(name).await {
            Ok(found) if is_final(found.state) => break Ok(found),
            Ok(found) if Instant::now() > deadline => {
                let state = found.state;
                let what = format!("{name} stays {state:?}: {:?}", found.failure);
                findings.push(Finding::wrong(Operation::Start, what));
                break Ok(found);
            }
            Ok(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            Err(error) => break Err(error),
        }
    };
    let found = match found {
        Ok(found) => found,
        Err(Error::Api { status: 404, .. }) => {
            if known.created && !known.deleting {
                let what = format!("{name} (generation {}) is gone", known.generation);
                findings.push(Finding::lost(Operation::Create, what));
            }
            let deleted = known.deleting;
            model.sandboxes.remove(name);
            if deleted {
                model.snapshots.retain(|_, snapshot| snapshot.sandbox != name);
            }
            return;
        }
        Err(error) => {
            let what = format!("{name} cannot be looked at: {}", told(error));
            findings.push(Finding::wrong(Operation::Create, what));
            model.sandboxes.remove(name);
            return;
        }
    };
    if found.generation < known.generation {
        let (is, was) = (found.generation, known.generation);
        let what = format!("{name} is at generation {is}, acknowledged was {was}");
        findings.push(Finding::lost(Operation::Stop, what));
    }
    known.generation = known.generation.max(found.generation);
    let mut lossy = depth.lossy;
    let mut read = read(client, name, depth).await;
    if let Err(reason) = &read
        && reason.contains("may have lost")
    {
        // What the disk may have lost was never acknowledged, and is given up as a user would.
        lossy = true;
        let given_up = Stop { discard: true, ..Stop::default() };
        read = match client.stop_deciding(name, &given_up, None).await {
            Ok(_) => self::read(client, name, depth).await,
            Err(error) => Err(format!("what is in doubt cannot be given up: {}", told(error))),
        };
    }
    match read {
        Ok(files) => {
            if let Some(wrong) = known.judge(&files, lossy) {
                let durable = known.judge(&files, true);
                let (operation, lost) = match durable {
                    Some(_) => (Operation::Stop, "what its last snapshot holds"),
                    None => (Operation::Exec, "what its session wrote"),
                };
                let generation = known.generation;
                let what = format!("{name} (generation {generation}) lost {lost}: {wrong}");
                findings.push(Finding::lost(operation, what));
                // From here on it is what it is.
                known.durable.clone_from(&files);
            }
            known.adopt(&files, &model.known);
        }
        Err(error) => {
            let what = format!("{name} (generation {}) does not start: {error}", known.generation);
            findings.push(Finding::lost(Operation::Start, what));
            let _ = client.delete(name, None).await;
            model.sandboxes.remove(name);
            model.snapshots.retain(|_, snapshot| snapshot.sandbox != name);
        }
    }
}

/// All files of a sandbox, if it answers in time.
async fn read(client: &Client, name: &str, depth: Depth) -> Result<Files, String> {
    let read = tokio::time::timeout(depth.patience, files(client, name)).await;
    read.unwrap_or_else(|_| Err(format!("no answer for {:?}", depth.patience)))
}

async fn snapshots(
    client: &Client,
    worker: &mut Worker,
    depth: Depth,
    random: &mut Random,
    findings: &mut Vec<Finding>,
) -> u64 {
    let mut ids: Vec<String> = worker.model.snapshots.keys().cloned().collect();
    let mut gone = Vec::new();
    for id in &ids {
        if let Err(error) = client.snapshot(id).await {
            let snapshot = &worker.model.snapshots[id];
            let what = format!("snapshot {id} of {}: {}", snapshot.sandbox, told(error));
            findings.push(Finding::lost(snapshot.made_by, what));
            gone.push(id.clone());
        }
    }
    ids.retain(|id| !gone.contains(id));
    // Those that were never compared, so that a loss shows after the fault that caused it, and some others.
    let fresh = |id: &String| !worker.model.snapshots[id].compared;
    let (mut ids, mut others): (Vec<String>, Vec<String>) = ids.into_iter().partition(fresh);
    thin_out(&mut ids, FRESH, random);
    thin_out(&mut others, depth.snapshots, random);
    ids.append(&mut others);
    let mut compared = 0;
    for id in ids {
        let name = format!("check-{}", worker.index);
        let request = CreateSandbox {
            name: Some(name.clone()),
            from: Some(id.clone()),
            image: None,
            ..settings(depth.driver)
        };
        let resumed = async {
            client.create(&request, None).await.map_err(told)?;
            files(client, &name).await
        };
        let found = tokio::time::timeout(depth.patience, resumed).await;
        let found = found.unwrap_or_else(|_| Err(format!("no answer for {:?}", depth.patience)));
        let Some(snapshot) = worker.model.snapshots.get_mut(&id) else { continue };
        snapshot.compared = true;
        let wrong = match found {
            Ok(files) => snapshot.judge(&files),
            Err(error) => Some(format!("does not start: {error}")),
        };
        if let Some(wrong) = wrong {
            let what = format!("snapshot {id} of {}: {wrong}", snapshot.sandbox);
            findings.push(Finding::lost(snapshot.made_by, what));
            gone.push(id);
        }
        compared += 1;
        if let Err(error) = client.delete(&name, None).await {
            let what = format!("{name} cannot be deleted: {}", told(error));
            findings.push(Finding::wrong(Operation::Delete, what));
        }
    }
    for id in gone {
        worker.model.snapshots.remove(&id);
    }
    compared
}

/// Leaves `count` of `ids`.
fn thin_out(ids: &mut Vec<String>, count: usize, random: &mut Random) {
    while ids.len() > count {
        ids.remove(usize::try_from(random.below(ids.len() as u64)).unwrap_or(0));
    }
}

/// Deletes everything. What cannot be deleted is a finding.
pub(super) async fn delete_all(client: &Client, findings: &mut Vec<Finding>) {
    let mut wrong = |what: String| findings.push(Finding::wrong(Operation::Delete, what));
    match client.sandboxes(&ListSandboxes::default()).collect(None).await {
        Ok(all) => {
            for sandbox in all {
                if let Err(error) = client.delete(&sandbox.name, None).await {
                    wrong(format!("{} cannot be deleted: {}", sandbox.name, told(error)));
                }
            }
        }
        Err(error) => wrong(format!("sandboxes cannot be listed: {}", told(error))),
    }
    match client.snapshots(None).collect(None).await {
        Ok(all) => {
            for snapshot in all {
                if let Err(error) = client.delete_snapshot(&snapshot.id, true).await {
                    wrong(format!("snapshot {} cannot be deleted: {}", snapshot.id, told(error)));
                }
            }
        }
        Err(error) => wrong(format!("snapshots cannot be listed: {}", told(error))),
    }
    for what in ["sandboxes", "snapshots"] {
        let left = match what {
            "sandboxes" => {
                let all = client.sandboxes(&ListSandboxes::default()).collect(None).await;
                all.map(|all| all.len())
            }
            _ => client.snapshots(None).collect(None).await.map(|all| all.len()),
        };
        if let Ok(left @ 1..) = left {
            wrong(format!("{left} {what} are left after all were deleted"));
        }
    }
}
