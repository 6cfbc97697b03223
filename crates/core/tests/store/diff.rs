//! Differences between chains of layers, compared with what the kernel shows of both.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use sandkeep_core::model::{DiffAspect, DiffEntry, DiffKind, LayerId};
use sandkeep_core::store::{DiffOptions, Effort, Globs, PatchOptions, StoreError, TreeDiff};
use sandkeep_testkit::tree::{churn, nasty, upset};

use crate::store_world::World;
use crate::tree_model::Model;

/// What differs, found by looking at everything.
fn expected(from: &Model, to: &Model) -> BTreeMap<String, (DiffKind, Vec<DiffAspect>)> {
    let mut differences = BTreeMap::new();
    for path in from.keys().chain(to.keys()) {
        let difference = match (from.get(path), to.get(path)) {
            (None, _) => (DiffKind::Added, Vec::new()),
            (_, None) => (DiffKind::Removed, Vec::new()),
            (Some(one), Some(other)) => {
                let mut what = Vec::new();
                let linked = one.kind == 'l' || other.kind == 'l';
                for (aspect, differs) in [
                    (DiffAspect::Content, one.kind == other.kind && one.content != other.content),
                    (DiffAspect::Mode, one.mode != other.mode && !linked),
                    (DiffAspect::Owner, one.owner != other.owner),
                    (DiffAspect::Xattrs, one.kind == other.kind && one.xattr != other.xattr),
                    (DiffAspect::Type, one.kind != other.kind),
                ] {
                    if differs {
                        what.push(aspect);
                    }
                }
                if what.is_empty() {
                    continue;
                }
                (DiffKind::Modified, what)
            }
        };
        differences.insert(format!("/{path}"), difference);
    }
    differences
}

async fn diff(world: &World, from: &[LayerId], to: &[LayerId]) -> TreeDiff {
    let options = DiffOptions { renames: false, ..DiffOptions::default() };
    world.store.diff(from, to, options).await.unwrap()
}

fn found(diff: &TreeDiff) -> BTreeMap<String, (DiffKind, Vec<DiffAspect>)> {
    let entries = diff.entries().into_iter().filter(|entry| entry.path != "/");
    entries.map(|entry| (entry.path, (entry.change, entry.what))).collect()
}

fn entry(diff: &TreeDiff, path: &str) -> DiffEntry {
    let found = diff.entries().into_iter().find(|entry| entry.path == path);
    found.unwrap_or_else(|| panic!("{path} in {:?}", diff.entries()))
}

#[tokio::test]
async fn what_the_kernel_shows_differently_is_found_and_nothing_else() {
    for seed in 0..24 {
        let world = World::new();
        let image = world.image(|root| churn(root, seed, 60)).await;
        let shared = world.churned(&[image], seed + 100, (seed % 3) as usize).await;
        let mut from = world.churned(&shared, seed + 200, (seed % 4) as usize).await;
        let to = world.churned(&shared, seed + 300, 1 + (seed % 3) as usize).await;
        let (old, new) = (world.model(&from), world.model(&to));
        assert_eq!(found(&diff(&world, &from, &to).await), expected(&old, &new), "seed {seed}");
        assert_eq!(found(&diff(&world, &to, &from).await), expected(&new, &old), "seed {seed}");
        assert!(diff(&world, &to, &to).await.is_empty());
        // One layer instead of several shows the same.
        if from.len() > 1 {
            let merged = world.store.compact(&from[..2], Effort::Foreground).await.unwrap();
            let compacted: Vec<LayerId> =
                std::iter::once(merged.id).chain(from.split_off(2)).collect();
            let again = diff(&world, &compacted, &to).await;
            assert_eq!(found(&again), expected(&old, &new), "seed {seed}, compacted");
        }
    }
}

#[tokio::test]
async fn odd_files_differ_as_they_should() {
    let world = World::new();
    let image = world.image(nasty).await;
    let chain = [image];
    let (layer, _) = world.session(&chain, upset).await;
    let upset = [layer.unwrap().id, chain[0].clone()];
    let all = diff(&world, &chain, &upset).await;
    assert_eq!(entry(&all, "/swap").what, [DiffAspect::Mode, DiffAspect::Type]);
    assert_eq!(entry(&all, "/swap/file").change, DiffKind::Removed);
    assert_eq!(entry(&all, "/dir/deep/er/leaf").change, DiffKind::Removed);
    assert_eq!(entry(&all, "/odd/bad%FF%FEutf8").change, DiffKind::Removed);
    assert_eq!(entry(&all, "/kept/a").what, [DiffAspect::Xattrs]);
    assert_eq!(entry(&all, "/setuid").what[0], DiffAspect::Content);
    assert!(all.entries().iter().all(|entry| entry.path != "/sparse"));
}

#[tokio::test]
async fn moved_files_are_renamed_and_twins_are_not_guessed() {
    let world = World::new();
    let image = world.image(|root| {
        fs::create_dir(root.join("a")).unwrap();
        for (name, content) in [("a/one", "one\n"), ("a/two", "twin\n"), ("a/three", "twin\n")] {
            fs::write(root.join(name), content).unwrap();
        }
    });
    let chain = [image.await];
    let change = |root: &Path| {
        fs::rename(root.join("a/one"), root.join("moved")).unwrap();
        fs::set_permissions(root.join("moved"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(root.join("a/two"), root.join("x")).unwrap();
        fs::rename(root.join("a/three"), root.join("y")).unwrap();
    };
    let (layer, _) = world.session(&chain, change).await;
    let to = [layer.unwrap().id, chain[0].clone()];
    let all = world.store.diff(&chain, &to, DiffOptions::default()).await.unwrap();
    let moved = entry(&all, "/moved");
    assert_eq!((moved.change, moved.old_path.as_deref()), (DiffKind::Renamed, Some("/a/one")));
    assert_eq!(moved.what, [DiffAspect::Mode]);
    assert_eq!((all.counts.renamed, all.counts.added, all.counts.removed), (1, 2, 2));
    assert_eq!(entry(&all, "/x").change, DiffKind::Added);
}

#[tokio::test]
async fn paths_are_chosen_and_lists_bounded() {
    let world = World::new();
    let image = world.image(|root| fs::write(root.join("f"), "").unwrap()).await;
    let change = |root: &Path| {
        for number in 0..30 {
            fs::create_dir_all(root.join(format!("d{}", number % 3))).unwrap();
            fs::write(root.join(format!("d{}/{number}", number % 3)), "x").unwrap();
        }
    };
    let chain = [image];
    let (layer, _) = world.session(&chain, change).await;
    let to = [layer.unwrap().id, chain[0].clone()];
    let only = Some(Globs::parse(&["/d1".to_owned()]).unwrap());
    let options = DiffOptions { only, ..DiffOptions::default() };
    let some = world.store.diff(&chain, &to, options).await.unwrap();
    assert_eq!((some.counts.added, some.counts.bytes, some.truncated), (11, 10, false));
    let options = DiffOptions { limit: 5, ..DiffOptions::default() };
    let cut = world.store.diff(&chain, &to, options).await.unwrap();
    assert_eq!((cut.counts.added, cut.entries().len(), cut.truncated), (33, 5, true));
    let options = DiffOptions { limit: 5, ..DiffOptions::default() };
    let refused =
        world.store.write_patch(&chain, &to, options, PatchOptions::default(), Vec::new()).await;
    assert!(matches!(refused, Err(StoreError::DiffTooLarge { .. })), "{refused:?}");
}

#[tokio::test]
async fn the_files_of_an_open_layer_are_compared_as_they_are() {
    let world = World::new();
    let image = world.image(|root| fs::write(root.join("f"), "old").unwrap()).await;
    let chain = [image];
    let open = world.store.begin(&chain).await.unwrap();
    let mount = world.mount(&open, &chain);
    let now = [open.clone(), chain[0].clone()];
    assert!(diff(&world, &chain, &now).await.is_empty());
    fs::write(mount.path().join("f"), "new").unwrap();
    fs::write(mount.path().join("g"), "").unwrap();
    let all = diff(&world, &chain, &now).await;
    assert_eq!((all.counts.modified, all.counts.added), (1, 1));
    drop(mount);
}

/// Collects what is written.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn patch(world: &World, from: &[LayerId], to: &[LayerId], how: PatchOptions) -> Vec<u8> {
    let sink = Sink::default();
    let options = DiffOptions { limit: 100_000, ..DiffOptions::default() };
    world.store.write_patch(from, to, options, how, sink.clone()).await.unwrap();
    sink.0.lock().unwrap().clone()
}

fn git(dir: &Path, args: &[&str], input: &[u8]) {
    let mut child = Command::new("git")
        .args(args)
        .current_dir(dir)
        .env("GIT_CEILING_DIRECTORIES", dir.parent().unwrap())
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let done = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "git {args:?}: {said}\n{}", String::from_utf8_lossy(input));
}

/// What git keeps of a tree: files and links, and whether a file can be executed.
fn tracked(model: &Model) -> BTreeMap<String, (char, bool, Vec<u8>)> {
    let kept = model.iter().filter(|(_, node)| matches!(node.kind, 'f' | 'l'));
    let kept = kept.map(|(path, node)| {
        (path.clone(), (node.kind, node.mode & 0o100 != 0, node.content.clone()))
    });
    kept.collect()
}

#[tokio::test]
async fn git_applies_the_patches() {
    for seed in 0..12 {
        let world = World::new();
        let image = world.image(|root| churn(root, seed, 60)).await;
        let from = world.churned(std::slice::from_ref(&image), seed + 1, 1).await;
        let mut to = world.churned(&[image], seed + 500, 2).await;
        let lines = |root: &Path| {
            fs::write(root.join("lines"), "1\n2\n3\n4\r\nfive\rsix\n7\n8\n9").unwrap();
            fs::write(root.join("sp ace \"q\" \u{e9}"), "odd\n").unwrap();
            fs::write(root.join("binary"), [0, 1, 2, 255].repeat(500)).unwrap();
            symlink("nowhere", root.join("link")).ok();
        };
        let (layer, _) = world.session(&to, lines).await;
        to.insert(0, layer.unwrap().id);
        let how = PatchOptions { binary: true, ..PatchOptions::default() };
        let text = patch(&world, &from, &to, how.clone()).await;
        let tree = world.dir().join("tree");
        let mount = world.mount_chain(&from);
        let copied = Command::new("cp").arg("-a").arg(mount.path()).arg(&tree).status().unwrap();
        assert!(copied.success());
        drop(mount);
        // Git has no empty directories, and does not remove them.
        let empty = ["-mindepth", "1", "-type", "d", "-empty", "-delete"];
        assert!(Command::new("find").arg(&tree).args(empty).status().unwrap().success());
        git(&tree, &["apply", "--whitespace=nowarn", "-"], &text);
        let result = tracked(&crate::tree_model::read(&tree));
        assert_eq!(result, tracked(&world.model(&to)), "seed {seed}");
        // And back again.
        let back = patch(&world, &to, &from, how).await;
        git(&tree, &["apply", "--whitespace=nowarn", "-"], &back);
        assert_eq!(tracked(&crate::tree_model::read(&tree)), tracked(&world.model(&from)));
    }
}

#[tokio::test]
async fn a_patch_is_relative_to_a_directory_and_marks_binary_files() {
    let world = World::new();
    let image = world.image(|root| {
        fs::create_dir_all(root.join("work/repo")).unwrap();
        fs::write(root.join("work/repo/a.txt"), "one\n").unwrap();
        fs::write(root.join("work/repo/b.bin"), [0; 10]).unwrap();
        fs::write(root.join("other"), "x").unwrap();
    });
    let chain = [image.await];
    let change = |root: &Path| {
        fs::write(root.join("work/repo/a.txt"), "two\n").unwrap();
        fs::write(root.join("work/repo/b.bin"), [0; 11]).unwrap();
        fs::write(root.join("other"), "y").unwrap();
    };
    let (layer, _) = world.session(&chain, change).await;
    let to = [layer.unwrap().id, chain[0].clone()];
    let how = PatchOptions { relative: b"work/repo".to_vec(), binary: false };
    let text = String::from_utf8(patch(&world, &chain, &to, how).await).unwrap();
    let expected = "diff --git a/a.txt b/a.txt
index 5626abf0f72e58d7a153368ba57db4c673c0e171..f719efd430d52bcfc8566a43b2eb655688d38871 100644
--- a/a.txt
+++ b/a.txt
@@ -1 +1 @@
-one
+two
diff --git a/b.bin b/b.bin
";
    assert!(text.starts_with(expected), "{text}");
    assert!(text.ends_with("\nBinary files a/b.bin and b/b.bin differ\n"), "{text}");
    assert!(!text.contains("other"));
}
