//! Differences between chains of layers, compared with what the kernel shows of both.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use sandkeep_core::model::{DiffAspect, DiffEntry, DiffKind, LayerId};
use sandkeep_core::store::{DiffOptions, Effort, Globs, PatchOptions, StoreError, TreeDiff};
use sandkeep_testkit::tree::{churn, nasty, upset};
use tokio::sync::mpsc;

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
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::lsetxattr(root.join("moved"), "user.k", b"v", flags).unwrap();
        fs::rename(root.join("a/two"), root.join("x")).unwrap();
        fs::rename(root.join("a/three"), root.join("y")).unwrap();
    };
    let (layer, _) = world.session(&chain, change).await;
    let to = [layer.unwrap().id, chain[0].clone()];
    let all = world.store.diff(&chain, &to, DiffOptions::default()).await.unwrap();
    let moved = entry(&all, "/moved");
    assert_eq!((moved.change, moved.old_path.as_deref()), (DiffKind::Renamed, Some("/a/one")));
    assert_eq!(moved.what, [DiffAspect::Mode, DiffAspect::Xattrs]);
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
    let refused = world.store.prepare_patch(&chain, &to, options, PatchOptions::default()).await;
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

async fn patch(world: &World, from: &[LayerId], to: &[LayerId], how: PatchOptions) -> Vec<u8> {
    let options = DiffOptions { limit: 100_000, ..DiffOptions::default() };
    let patch = world.store.prepare_patch(from, to, options, how).await.unwrap();
    let (into, mut pieces) = mpsc::channel(4);
    let store = world.store.clone();
    let sending = tokio::spawn(async move { store.send_patch(patch, into).await });
    let mut all = Vec::new();
    while let Some(piece) = pieces.recv().await {
        all.extend_from_slice(&piece);
    }
    sending.await.unwrap().unwrap();
    all
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
    let how = PatchOptions { relative: b"work/repo".to_vec(), ..PatchOptions::default() };
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

/// A copy of what a chain shows, without empty directories, for git.
fn checkout(world: &World, chain: &[LayerId], dir: &str, to: &str) -> PathBuf {
    let (mount, tree) = (world.mount_chain(chain), world.dir().join(to));
    let from = mount.path().join(dir);
    assert!(Command::new("cp").arg("-a").arg(from).arg(&tree).status().unwrap().success());
    tree
}

async fn changed(
    world: &World,
    base: impl FnOnce(&Path),
    change: impl FnOnce(&Path),
) -> (Vec<LayerId>, Vec<LayerId>) {
    let from = vec![world.image(base).await];
    let (layer, _) = world.session(&from, change).await;
    let to = [vec![layer.unwrap().id], from.clone()].concat();
    (from, to)
}

#[tokio::test]
async fn a_patch_of_a_repository_leaves_its_git_directory_out() {
    let world = World::new();
    let (from, to) = changed(
        &world,
        |root| {
            fs::create_dir_all(root.join("repo/.git")).unwrap();
            fs::write(root.join("repo/.git/index"), [0, 1, 2]).unwrap();
            fs::write(root.join("repo/a"), "one\n").unwrap();
            fs::write(root.join("repo/.git/moves"), "out of it\n").unwrap();
        },
        |root| {
            fs::write(root.join("repo/.git/index"), [0, 1, 3]).unwrap();
            fs::write(root.join("repo/.git/HEAD"), "main\n").unwrap();
            fs::write(root.join("repo/a"), "two\n").unwrap();
            fs::rename(root.join("repo/.git/moves"), root.join("repo/moved")).unwrap();
        },
    )
    .await;
    let how = PatchOptions { relative: b"repo".to_vec(), ..PatchOptions::default() };
    let text = patch(&world, &from, &to, how.clone()).await;
    let tree = checkout(&world, &from, "repo", "tree");
    git(&tree, &["apply", "-"], &text);
    assert_eq!(fs::read_to_string(tree.join("a")).unwrap(), "two\n");
    assert_eq!(fs::read_to_string(tree.join("moved")).unwrap(), "out of it\n");
    assert!(!tree.join(".git/HEAD").exists());
    let all = patch(&world, &from, &to, PatchOptions { git_dir: true, ..how }).await;
    assert!(String::from_utf8_lossy(&all).contains("b/.git/HEAD"));
}

#[tokio::test]
async fn what_leaves_the_directory_of_a_patch_is_deleted_there() {
    let world = World::new();
    let (from, to) = changed(
        &world,
        |root| {
            fs::create_dir_all(root.join("repo")).unwrap();
            fs::create_dir_all(root.join("other")).unwrap();
            fs::write(root.join("repo/leaves"), "leaves\n").unwrap();
            fs::write(root.join("other/comes"), "comes\n").unwrap();
        },
        |root| {
            fs::rename(root.join("repo/leaves"), root.join("other/leaves")).unwrap();
            fs::rename(root.join("other/comes"), root.join("repo/comes")).unwrap();
        },
    )
    .await;
    let how = PatchOptions { relative: b"repo".to_vec(), ..PatchOptions::default() };
    let text = patch(&world, &from, &to, how).await;
    let tree = checkout(&world, &from, "repo", "tree");
    git(&tree, &["apply", "-"], &text);
    assert!(!tree.join("leaves").exists(), "{}", String::from_utf8_lossy(&text));
    assert_eq!(fs::read_to_string(tree.join("comes")).unwrap(), "comes\n");
}

#[tokio::test]
async fn large_files_that_only_got_another_mode_or_name_can_be_applied() {
    let world = World::new();
    let size = 17 << 20;
    let file = |root: &Path, name: &str, byte: u8| {
        let file = fs::File::create(root.join(name)).unwrap();
        (&file).write_all(&[byte]).unwrap();
        file.set_len(size).unwrap();
    };
    let (from, to) = changed(
        &world,
        |root| {
            fs::create_dir(root.join("repo")).unwrap();
            file(root, "repo/large", b'a');
            file(root, "repo/moves", b'b');
        },
        |root| {
            let mode = fs::Permissions::from_mode(0o755);
            fs::set_permissions(root.join("repo/large"), mode).unwrap();
            fs::rename(root.join("repo/moves"), root.join("repo/moved")).unwrap();
        },
    )
    .await;
    let how = PatchOptions { relative: b"repo".to_vec(), ..PatchOptions::default() };
    let text = patch(&world, &from, &to, how).await;
    let shown = String::from_utf8_lossy(&text);
    assert!(!shown.contains("Binary files"), "{shown}");
    let tree = checkout(&world, &from, "repo", "tree");
    git(&tree, &["apply", "-"], &text);
    assert_eq!(fs::metadata(tree.join("large")).unwrap().permissions().mode() & 0o777, 0o755);
    assert_eq!(fs::metadata(tree.join("moved")).unwrap().len(), size);
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_take_nothing_keep_nobody_waiting() {
    let world = World::new();
    let text = |byte: char| format!("{byte}{}\n", "x".repeat(60)).repeat(20_000);
    let (from, to) = changed(
        &world,
        |root| (0..4).for_each(|n| fs::write(root.join(format!("f{n}")), text('a')).unwrap()),
        |root| (0..4).for_each(|n| fs::write(root.join(format!("f{n}")), text('b')).unwrap()),
    )
    .await;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let options = DiffOptions { limit: 100, ..DiffOptions::default() };
        let how = PatchOptions::default();
        let patch = world.store.prepare_patch(&from, &to, options, how).await.unwrap();
        let (into, pieces) = mpsc::channel(1);
        let store = world.store.clone();
        let sending = tokio::spawn(async move { store.send_patch(patch, into).await });
        waiting.push((sending, pieces));
    }
    let all = async {
        let found = diff(&world, &from, &to).await;
        assert_eq!(found.counts.modified, 4);
        // Nor does another patch wait for them.
        assert!(!patch(&world, &from, &to, PatchOptions::default()).await.is_empty());
    };
    tokio::time::timeout(Duration::from_secs(20), all).await.expect("nobody waits for them");
    for (sending, pieces) in waiting {
        assert!(!sending.is_finished(), "it waits for its reader");
        drop(pieces);
        let ended = sending.await.unwrap();
        assert!(matches!(ended, Err(StoreError::NotTaken { .. })), "{ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_piece_of_a_patch_reads_little_however_short_its_text_is() {
    let world = World::new();
    let sparse = |root: &Path, size: u64| {
        for number in 0..6 {
            let file = fs::File::create(root.join(format!("sparse{number}"))).unwrap();
            file.set_len(size).unwrap();
        }
        // Never read: it would not be written anyway.
        fs::File::create(root.join("huge")).unwrap().set_len(size << 2).unwrap();
    };
    let (from, to) =
        changed(&world, |root| sparse(root, 15 << 20), |root| sparse(root, 16 << 20)).await;
    let options = DiffOptions { limit: 100, ..DiffOptions::default() };
    let how = PatchOptions::default();
    let patch = world.store.prepare_patch(&from, &to, options, how).await.unwrap();
    let (into, mut pieces) = mpsc::channel(1);
    let store = world.store.clone();
    let sending = tokio::spawn(async move { store.send_patch(patch, into).await });
    let (mut count, mut text) = (0, Vec::new());
    while let Some(piece) = pieces.recv().await {
        count += 1;
        text.extend_from_slice(&piece);
    }
    sending.await.unwrap().unwrap();
    assert!((3..=7).contains(&count), "{count} pieces");
    let text = String::from_utf8(text).unwrap();
    assert_eq!(text.matches("Binary files").count(), 7, "{text}");
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_given_up() {
    let world = World::new();
    let (from, to) = changed(
        &world,
        |root| fs::write(root.join("f"), "").unwrap(),
        |root| {
            for number in 0..3 {
                fs::write(root.join(format!("g{number}")), "x\n".repeat(200_000)).unwrap();
            }
        },
    )
    .await;
    let how = PatchOptions::default();
    let patch = world.store.prepare_patch(&from, &to, DiffOptions::default(), how).await.unwrap();
    let (into, pieces) = mpsc::channel(1);
    let patch = patch.patience(Duration::from_millis(200));
    let ended = world.store.send_patch(patch, into).await;
    assert!(
        matches!(&ended, Err(StoreError::NotTaken { why }) if why.contains("slow")),
        "{ended:?}"
    );
    drop(pieces);
}

/// Nested directories below `root`, deeper than a path may be long.
fn nest(root: &Path, levels: usize) {
    let name = "d".repeat(200);
    let mut at = fs::File::open(root).unwrap();
    for _ in 0..levels {
        rustix::fs::mkdirat(&at, name.as_str(), rustix::fs::Mode::RWXU).unwrap();
        let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::RDONLY;
        let inner = rustix::fs::openat(&at, name.as_str(), flags, rustix::fs::Mode::empty());
        at = inner.unwrap().into();
    }
}

#[tokio::test]
async fn a_tree_that_is_too_deep_is_refused_where_it_matters() {
    let world = World::new();
    let from = vec![world.image(|root| fs::write(root.join("a"), "old").unwrap()).await];
    let deep = world.image(|root| {
        fs::write(root.join("a"), "new").unwrap();
        fs::create_dir(root.join("deep")).unwrap();
        nest(&root.join("deep"), 40);
    });
    let to = [vec![deep.await], from.clone()].concat();
    let refused = world.store.diff(&from, &to, DiffOptions::default()).await.unwrap_err();
    assert!(
        matches!(&refused, StoreError::DiffTooLarge { why } if why.contains("/deep/")),
        "{refused}"
    );
    // What was not asked for is not visited.
    let only = Some(Globs::parse(&["/a".to_owned()]).unwrap());
    let options = DiffOptions { only, ..DiffOptions::default() };
    let some = world.store.diff(&from, &to, options).await.unwrap();
    assert_eq!(some.counts.modified, 1);
    // Nor what is no matter any more.
    assert!(world.store.differ(&from, &to).await.unwrap());
    assert!(!world.store.differ(&to, &to).await.unwrap());
}

#[tokio::test]
async fn differences_in_deep_trees_take_no_descriptors() {
    let world = World::new();
    let (from, to) = changed(
        &world,
        |root| fs::write(root.join("a"), "old").unwrap(),
        |root| {
            // Longer than half of what a system call takes.
            nest(root, 12);
            let deep = root.join(vec!["d".repeat(200); 12].join("/"));
            for number in 0..1_500 {
                let dir = deep.join(number.to_string());
                fs::create_dir(&dir).unwrap();
                fs::write(dir.join("f"), "").unwrap();
            }
        },
    )
    .await;
    let open = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let found = diff(&world, &from, &to).await;
    assert_eq!(found.counts.added, 12 + 3_000);
    // Other tests of this process have some, too.
    assert!(open() < before + 700, "{} were open before, and {} are now", before, open());
    drop(found);
}
