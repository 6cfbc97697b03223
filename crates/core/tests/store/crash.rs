//! Killed at any place, the store is as it was before the call or as it is after it.
//!
//! Each place of `docs/CRASH-MATRIX.md` is tried in a process of its own: this test starts itself
//! again with the place armed, lets it die there, and looks at what it left.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::store_world::{name, project, sandbox};
use sandkeep_core::model::{Layer, LayerId, LayerKind, Project, Sandbox, Timestamp};
use sandkeep_core::store::{Durability, Effort, SealOptions, Store};
use sandkeep_testkit::tree::{assert_same, describe, nasty, upset};
use sandkeep_testkit::victim;
use tempfile::TempDir;

const STEPS: [&str; 26] = [
    "store.found.before_rename",
    "store.found.renamed",
    "store.write.before",
    "store.write.before_rename",
    "store.write.renamed",
    "store.write.done",
    "store.remove.before",
    "store.remove.before_sync",
    "store.remove_sandbox.before",
    "store.remove_sandbox.before_sync",
    "store.begin.done",
    "store.seal.admitted",
    "store.seal.excluded",
    "store.seal.before_sync",
    "store.seal.before_manifest",
    "store.seal.sealed",
    "store.discard.before",
    "store.collect.before",
    "store.trash.before",
    "store.trash.moved",
    "store.purge.before",
    "store.copy_live.copied",
    "store.compact.linked",
    "store.publish.before_manifest",
    "store.publish.before_rename",
    "store.publish.before_sync",
];

/// What the process that dies does. Without a directory it is not that process and does nothing.
#[tokio::test]
async fn victim() {
    let Some(data) = std::env::var_os("SANDKEEP_TEST_DATA") else { return };
    let store = Store::open(Path::new(&data)).expect("a store");
    let layers = store.scan::<Layer>().await.expect("scanned").good;
    let sealed: Vec<LayerId> = layers.into_iter().map(|layer| layer.id).collect();
    let open = fs::read_to_string(Path::new(&data).join("bin/open")).expect("noted");
    let open: LayerId = open.parse().expect("an id");
    store.copy_live(&open, &[], None).await.expect("copied");
    store.compact(&sealed, Effort::Foreground).await.expect("compacted");
    store.seal(&open, &SealOptions::default()).await.expect("sealed");
    let useless = store.begin(&[]).await.expect("begun");
    store.discard(&useless).await.expect("discarded");
    store.begin(&[]).await.expect("begun");
    let live = sealed.into_iter().chain([open]).collect();
    store.collect(&live, Timestamp::MAX).await.expect("collected");
    for sandbox in store.scan::<Sandbox>().await.expect("scanned").good {
        store.remove_sandbox_dir(&sandbox.id).await.expect("removed");
    }
    // The directory of a sandbox comes with its manifest, or not at all.
    store.write(&sandbox(&[]), Durability::Synced).await.expect("written");
    store.write(&project("second"), Durability::Synced).await.expect("written");
    store.remove::<Project>(&name("first")).await.expect("removed");
}

#[tokio::test]
async fn killed_at_every_step() {
    for step in STEPS {
        for pass in 1..=3 {
            let died = kill_at(step, pass).await;
            if !died {
                assert!(pass > 1, "{step} is never passed");
                break;
            }
        }
    }
}

/// Lets a process die at the given pass of a step, and checks what it left. `false` when it came
/// through without passing there so often.
async fn kill_at(step: &str, pass: u32) -> bool {
    let dir = TempDir::with_prefix("keep").expect("a temporary directory");
    let data = dir.path().join("data");
    let store = Store::open(&data).expect("a store");
    store.write(&project("first"), Durability::Synced).await.expect("written");
    store.write(&project("p"), Durability::Synced).await.expect("written");
    store.write(&sandbox(&[]), Durability::Synced).await.expect("written");
    let mut sealed = Vec::new();
    for fill in [nasty, nasty] {
        let id = store.begin(&[]).await.expect("begun");
        fill(&store.diff_dir(&id));
        let options = SealOptions { kind: LayerKind::Image, ..SealOptions::default() };
        sealed.push(store.seal(&id, &options).await.expect("sealed").expect("not empty").id);
    }
    let open = store.begin(&[]).await.expect("begun");
    nasty(&store.diff_dir(&open));
    upset(&store.diff_dir(&open));
    let mut expected: Vec<_> = sealed.iter().map(|id| describe(&store.diff_dir(id))).collect();
    expected.push(describe(&store.diff_dir(&open)));
    fs::write(data.join("bin/open"), open.as_str()).expect("noted");
    store.sync().await.expect("synced");
    drop(store);

    let me = std::env::current_exe().expect("this test");
    let output = Command::new(me)
        .args(["--exact", victim!(), "--nocapture"])
        .env("SANDKEEP_TEST_DATA", &data)
        .env("SANDKEEP_FAILPOINT", format!("{step}:{pass}"))
        .output()
        .expect("it starts");
    if output.status.success() {
        return false;
    }
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!text.contains("panicked"), "{step}:{pass} {text}");

    let what = format!("{step}:{pass}");
    let store = Store::open(&data).expect("it opens again");
    let report = store.fsck().await.expect("checked");
    assert!(!report.is_broken(), "{what}: {report:?}");
    let projects = store.scan::<Project>().await.expect("scanned").good.len();
    assert!((2..=3).contains(&projects), "{what}: {projects}");
    store.seal(&open, &SealOptions::default()).await.expect("sealed now or before");
    let live: HashSet<LayerId> = sealed.iter().chain([&open]).cloned().collect();
    store.collect(&live, Timestamp::MAX).await.expect("collected");
    for (id, expected) in sealed.iter().chain([&open]).zip(&expected) {
        assert_same(&what, expected, &describe(&store.diff_dir(id)));
    }
    let left = fs::read_dir(data.join("layers")).expect("layers").count();
    assert_eq!(left, 3, "{what}: nothing is left over");
    // Everything that was in `tmp/` at the start was ordered deleted before the collection's own.
    store.begin(&[]).await.expect("begun");
    store.collect(&live, Timestamp::MAX).await.expect("collected");
    assert_eq!(fs::read_dir(data.join("tmp")).expect("tmp").count(), 0, "{what}");
    true
}
