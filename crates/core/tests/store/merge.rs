//! Merges of three chains, compared with a merge of what the kernel shows of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use sandkeep_core::model::LayerId;
use sandkeep_core::store::{Globs, MergeChains, MergeOptions, MergeOutcome, StoreError};
use sandkeep_testkit::tree::churn;

use crate::store_world::World;
use crate::tree_model::{Model, Node};

async fn merge(
    world: &World,
    base: &[LayerId],
    ours: &[LayerId],
    theirs: &[LayerId],
    options: MergeOptions,
) -> MergeOutcome {
    let chains = MergeChains { base: base.to_vec(), ours: ours.to_vec(), theirs: theirs.to_vec() };
    world.store.merge_trees(chains, options).await.unwrap()
}

/// The chain with the result on top.
fn result(outcome: &MergeOutcome, ours: &[LayerId]) -> Vec<LayerId> {
    let top = outcome.layer.iter().map(|layer| layer.id.clone());
    top.chain(ours.iter().cloned()).collect()
}

fn below(dir: &str, path: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
}

/// One value of three, or `None` if both sides changed it.
fn pick<T: PartialEq + Clone>(base: Option<&T>, ours: &T, theirs: &T) -> Option<T> {
    if ours == theirs || base == Some(theirs) {
        Some(ours.clone())
    } else if base == Some(ours) {
        Some(theirs.clone())
    } else {
        None
    }
}

/// The result by the rules of docs/FORKS.md, path by path, and the paths in conflict.
fn expected(base: &Model, ours: &Model, theirs: &Model) -> (Model, BTreeSet<String>) {
    let (mut merged, mut conflicts) = (ours.clone(), BTreeSet::new());
    let changed_by_us: BTreeSet<&String> =
        base.keys().chain(ours.keys()).filter(|path| base.get(*path) != ours.get(*path)).collect();
    let is_lost = |path: &str| {
        changed_by_us
            .iter()
            .any(|dir| below(dir, path) && ours.get(*dir).is_none_or(|node| node.kind != 'd'))
    };
    let is_used =
        |dir: &str| changed_by_us.iter().any(|path| below(dir, path) && ours.contains_key(*path));
    let changed: BTreeSet<&String> = base
        .keys()
        .chain(theirs.keys())
        .filter(|path| base.get(*path) != theirs.get(*path))
        .collect();
    for path in changed {
        let (was, our, their) = (base.get(path), ours.get(path), theirs.get(path));
        if was == our {
            match their {
                None if is_used(path) => drop(conflicts.insert(path.clone())),
                None => drop(merged.remove(path)),
                Some(_) if is_lost(path) => drop(conflicts.insert(path.clone())),
                Some(node)
                    if was.is_some_and(|was| was.kind == 'd')
                        && node.kind != 'd'
                        && is_used(path) =>
                {
                    conflicts.insert(path.clone());
                }
                Some(node) => drop(merged.insert(path.clone(), node.clone())),
            }
            continue;
        }
        match (our, their) {
            (None, None) => {}
            (Some(our), Some(their)) if our.kind == their.kind => {
                let was = was.filter(|was| was.kind == their.kind);
                let mode = pick(was.map(|was| &was.mode), &our.mode, &their.mode);
                let uid = pick(was.map(|was| &was.owner.0), &our.owner.0, &their.owner.0);
                let gid = pick(was.map(|was| &was.owner.1), &our.owner.1, &their.owner.1);
                let xattr = pick(was.map(|was| &was.xattr), &our.xattr, &their.xattr);
                let content = pick(was.map(|was| &was.content), &our.content, &their.content);
                match (mode, uid, gid, xattr, content) {
                    (Some(mode), Some(uid), Some(gid), Some(xattr), Some(content)) => {
                        let (kind, owner) = (our.kind, (uid, gid));
                        merged.insert(path.clone(), Node { kind, mode, owner, xattr, content });
                    }
                    _ => drop(conflicts.insert(path.clone())),
                }
            }
            _ => drop(conflicts.insert(path.clone())),
        }
    }
    (merged, conflicts)
}

#[tokio::test]
async fn merges_are_those_of_the_trees_the_kernel_shows() {
    let (mut clean, mut conflicted, mut linked) = (0, 0, 0);
    for seed in 0..60 {
        let world = World::new();
        let image = world.image(|root| churn(root, seed, 80)).await;
        let base = world.churned(&[image], seed + 100, (seed % 2) as usize).await;
        // Few changes, or nearly every merge has a conflict.
        let few = |root: &Path, seed: u64| churn(root, seed, 3 + (seed % 23) as usize);
        let mut sides = Vec::new();
        for side in [1000, 2000] {
            let mut chain = base.clone();
            let (layer, _) = world.session(&base, |root| few(root, seed + side)).await;
            chain.splice(0..0, layer.map(|layer| layer.id));
            sides.push(chain);
        }
        let (ours, theirs) = (&sides[0], &sides[1]);
        let (wanted, conflicts) =
            expected(&world.model(&base), &world.model(ours), &world.model(theirs));
        let outcome = merge(&world, &base, ours, theirs, MergeOptions::default()).await;
        let told: BTreeSet<String> =
            outcome.conflicts.iter().map(|one| one.path[1..].to_owned()).collect();
        assert_eq!(told, conflicts, "seed {seed}");
        if conflicts.is_empty() {
            clean += 1;
            let (merged, stamps) = world.stamped(&result(&outcome, ours));
            assert_eq!(merged, wanted, "seed {seed}");
            // What was taken over has the times it had there, and what was not, those it had here.
            let (was, our) = (world.model(&base), world.stamped(ours));
            let their = world.stamped(theirs);
            for (path, stamp) in &stamps {
                let side =
                    match (was.get(path) == our.0.get(path), was.get(path) == their.0.get(path)) {
                        (true, false) => &their,
                        (_, true) => &our,
                        (false, false) => continue,
                    };
                let wanted = side.1[path];
                assert_eq!((stamp.0, stamp.1), (wanted.0, wanted.1), "seed {seed}: {path}");
            }
            // Names that were taken over are one file if they were one there. No others become one.
            let links = [&result(&outcome, ours), ours, theirs].map(|chain| world.inodes(chain));
            let are_one = |of: &BTreeMap<String, (u64, u64)>, one: &String, other: &String| {
                of.get(one).is_some_and(|inode| of.get(other) == Some(inode))
            };
            let is_taken = |path: &String| {
                was.get(path) == our.0.get(path) && was.get(path) != their.0.get(path)
            };
            for one in links[0].keys() {
                for other in links[0].keys().filter(|other| *other > one) {
                    let [now, here, there] = [0, 1, 2].map(|of| are_one(&links[of], one, other));
                    linked += usize::from(now && there);
                    assert!(!now || here || there, "seed {seed}: {one} and {other}");
                    let taken = is_taken(one) && is_taken(other);
                    assert!(!(taken && there) || now, "seed {seed}: {one} and {other}");
                }
            }
        } else {
            conflicted += 1;
            assert!(outcome.layer.is_none());
            nothing_is_lost(&world, &base, ours, theirs, &conflicts, seed).await;
        }
    }
    assert!(clean > 10 && conflicted > 10, "{clean} clean, {conflicted} with conflicts");
    assert!(linked > 0, "some files had several names");
}

/// With both versions kept, what the target has stays where the source changed nothing, or there was a conflict.
async fn nothing_is_lost(
    world: &World,
    base: &[LayerId],
    ours: &[LayerId],
    theirs: &[LayerId],
    conflicts: &BTreeSet<String>,
    seed: u64,
) {
    let keep_both = Some("x".to_owned());
    let kept = merge(world, base, ours, theirs, MergeOptions { keep_both, ..Default::default() });
    let kept = kept.await;
    let (was, our, their) = (world.model(base), world.model(ours), world.model(theirs));
    let all = world.model(&result(&kept, ours));
    if !kept.conflicts.is_empty() {
        assert!(kept.layer.is_none(), "seed {seed}");
        return;
    }
    for (path, node) in &our {
        if conflicts.contains(path) || was.get(path) == their.get(path) {
            assert_eq!(all.get(path), Some(node), "seed {seed}: {path}");
        }
    }
    for path in conflicts.iter().filter(|path| !our.contains_key(*path)) {
        assert_eq!(all.get(path), None, "seed {seed}: {path} does not come back");
    }
    for path in conflicts.iter().filter(|path| their.get(*path).is_some_and(|one| one.kind == 'f'))
    {
        let wanted = &their[path].content;
        let is_beside =
            |(there, node): (&String, &Node)| there.contains(".from-x") && node.content == *wanted;
        assert!(all.iter().any(is_beside), "seed {seed}: the other version of {path}");
    }
}

/// A base with some files, and what both sides do to it.
async fn sides(
    world: &World,
    base: impl FnOnce(&Path),
    ours: impl FnOnce(&Path),
    theirs: impl FnOnce(&Path),
) -> (Vec<LayerId>, Vec<LayerId>, Vec<LayerId>) {
    let base = vec![world.image(base).await];
    let mut chains = Vec::new();
    let (layer, _) = world.session(&base, ours).await;
    chains.push([vec![layer.unwrap().id], base.clone()].concat());
    let (layer, _) = world.session(&base, theirs).await;
    chains.push([vec![layer.unwrap().id], base.clone()].concat());
    let theirs = chains.pop().unwrap();
    (base, chains.pop().unwrap(), theirs)
}

fn write(root: &Path, path: &str, content: &str) {
    fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
    fs::write(root.join(path), content).unwrap();
}

#[tokio::test]
async fn text_is_merged_by_lines_and_modes_independently_of_it() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| write(root, "app.py", "1\n2\n3\n4\n5\n6\n7\n"),
        |root| write(root, "app.py", "one\n2\n3\n4\n5\n6\n7\n"),
        |root| {
            write(root, "app.py", "1\n2\n3\n4\n5\n6\nseven\n");
            fs::set_permissions(root.join("app.py"), fs::Permissions::from_mode(0o755)).unwrap();
        },
    )
    .await;
    let outcome = merge(&world, &base, &ours, &theirs, MergeOptions::default()).await;
    assert_eq!((outcome.counts.merged, outcome.counts.conflicts), (1, 0));
    let model = world.model(&result(&outcome, &ours));
    assert_eq!(model["app.py"].content, b"one\n2\n3\n4\n5\n6\nseven\n");
    assert_eq!(model["app.py"].mode, 0o755);
}

#[tokio::test]
async fn conflicts_change_nothing_or_keep_both_versions() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| write(root, "d/f", "old\n"),
        |root| write(root, "d/f", "ours\n"),
        |root| {
            write(root, "d/f", "theirs\n");
            write(root, "new", "new\n");
        },
    )
    .await;
    let outcome = merge(&world, &base, &ours, &theirs, MergeOptions::default()).await;
    assert_eq!(outcome.conflicts[0].path, "/d/f");
    assert!(outcome.layer.is_none());
    let keep = || MergeOptions { keep_both: Some("try-a".to_owned()), ..MergeOptions::default() };
    let dry = MergeOptions { dry_run: true, ..keep() };
    let planned = merge(&world, &base, &ours, &theirs, dry).await;
    assert!(planned.layer.is_none() && planned.conflicts.is_empty());
    let outcome = merge(&world, &base, &ours, &theirs, keep()).await;
    assert_eq!(outcome.changes, planned.changes);
    let model = world.model(&result(&outcome, &ours));
    assert_eq!(model["d/f"].content, b"ours\n");
    assert_eq!(model["d/f.from-try-a"].content, b"theirs\n");
    assert_eq!(model["new"].content, b"new\n");
}

#[tokio::test]
async fn a_repository_that_changed_on_both_sides_is_never_merged() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| write(root, "repo/.git/HEAD", "main\n"),
        |root| write(root, "repo/.git/refs/heads/main", "1\n"),
        |root| {
            write(root, "repo/.git/refs/heads/other", "2\n");
            write(root, "repo/src/x", "x\n");
        },
    )
    .await;
    for keep_both in [None, Some("try-a".to_owned())] {
        let options = MergeOptions { keep_both, ..MergeOptions::default() };
        let outcome = merge(&world, &base, &ours, &theirs, options).await;
        assert_eq!(outcome.conflicts.len(), 1);
        assert_eq!(outcome.conflicts[0].path, "/repo/.git");
        assert!(outcome.conflicts[0].reason.contains("branch"), "{:?}", outcome.conflicts);
        assert!(outcome.layer.is_none());
    }
    // Chosen paths are no problem.
    let only = Some(Globs::parse(&["/repo/src/**".to_owned()]).unwrap());
    let options = MergeOptions { only, ..MergeOptions::default() };
    let outcome = merge(&world, &base, &ours, &theirs, options).await;
    let model = world.model(&result(&outcome, &ours));
    assert_eq!(model["repo/src/x"].content, b"x\n");
    assert!(!model.contains_key("repo/.git/refs/heads/other"));
}

#[tokio::test]
async fn links_among_what_is_taken_stay_links_and_times_stay() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| write(root, "old", "old\n"),
        |root| write(root, "ours", "ours\n"),
        |root| {
            write(root, "dir/a", "linked\n");
            fs::hard_link(root.join("dir/a"), root.join("b")).unwrap();
            let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000);
            fs::File::options()
                .write(true)
                .open(root.join("b"))
                .unwrap()
                .set_modified(time)
                .unwrap();
            fs::remove_file(root.join("old")).unwrap();
        },
    )
    .await;
    let outcome = merge(&world, &base, &ours, &theirs, MergeOptions::default()).await;
    let mount = world.mount_chain(&result(&outcome, &ours));
    let stat = |path: &str| fs::metadata(mount.path().join(path)).unwrap();
    assert_eq!(stat("dir/a").ino(), stat("b").ino());
    assert_eq!((stat("b").nlink(), stat("b").mtime()), (2, 1_000));
    assert!(mount.path().join("ours").exists() && !mount.path().join("old").exists());
}

fn keep() -> MergeOptions {
    MergeOptions { keep_both: Some("try-a".to_owned()), ..MergeOptions::default() }
}

fn chosen(glob: &str) -> MergeOptions {
    let only = Some(Globs::parse(&[glob.to_owned()]).unwrap());
    MergeOptions { only, ..MergeOptions::default() }
}

#[tokio::test]
async fn the_targets_file_stays_where_the_source_has_a_directory() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| write(root, "p", "base\n"),
        |root| write(root, "p", "ours\n"),
        |root| {
            fs::remove_file(root.join("p")).unwrap();
            write(root, "p/sub/x", "theirs\n");
            fs::set_permissions(root.join("p/sub"), fs::Permissions::from_mode(0o700)).unwrap();
        },
    )
    .await;
    let outcome = merge(&world, &base, &ours, &theirs, keep()).await;
    let model = world.model(&result(&outcome, &ours));
    assert_eq!((model["p"].kind, &model["p"].content[..]), ('f', &b"ours\n"[..]));
    assert_eq!(model["p.from-try-a/sub/x"].content, b"theirs\n");
    assert_eq!(model["p.from-try-a/sub"].mode, 0o700);
}

#[tokio::test]
async fn the_targets_directory_stays_where_the_source_has_a_file() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| {
            write(root, "p/unchanged", "base\n");
            write(root, "p/changed", "base\n");
        },
        |root| {
            write(root, "p/changed", "ours\n");
            write(root, "p/new", "ours\n");
        },
        |root| {
            fs::remove_dir_all(root.join("p")).unwrap();
            write(root, "p", "theirs\n");
        },
    )
    .await;
    let outcome = merge(&world, &base, &ours, &theirs, MergeOptions::default()).await;
    assert!(outcome.layer.is_none() && !outcome.conflicts.is_empty());
    let outcome = merge(&world, &base, &ours, &theirs, keep()).await;
    assert_eq!(outcome.conflicts, []);
    let model = world.model(&result(&outcome, &ours));
    assert_eq!(model["p/unchanged"].content, b"base\n");
    assert_eq!(model["p/changed"].content, b"ours\n");
    assert_eq!(model["p/new"].content, b"ours\n");
    assert_eq!(model["p.from-try-a"].content, b"theirs\n");
}

#[tokio::test]
async fn a_directory_that_the_target_replaced_or_removed_does_not_come_back() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| {
            write(root, "file/x", "base\n");
            write(root, "gone/deep/x", "base\n");
            std::os::unix::fs::chown(root.join("gone/deep"), Some(7), Some(8)).unwrap();
        },
        |root| {
            fs::remove_dir_all(root.join("file")).unwrap();
            write(root, "file", "ours\n");
            fs::remove_dir_all(root.join("gone")).unwrap();
        },
        |root| {
            write(root, "file/x", "theirs\n");
            write(root, "gone/deep/x", "theirs\n");
        },
    )
    .await;
    let outcome = merge(&world, &base, &ours, &theirs, keep()).await;
    let model = world.model(&result(&outcome, &ours));
    assert_eq!(model["file"].content, b"ours\n");
    assert_eq!(model["file.from-try-a/x"].content, b"theirs\n");
    assert!(!model.contains_key("gone"));
    assert_eq!(model["gone.from-try-a/deep/x"].content, b"theirs\n");
    assert_eq!(model["gone.from-try-a/deep"].owner, (7, 8));
}

#[tokio::test]
async fn chosen_paths_take_no_place_of_a_file_and_bring_their_directories() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| write(root, "p", "base\n"),
        |root| write(root, "ours", "ours\n"),
        |root| {
            fs::remove_file(root.join("p")).unwrap();
            write(root, "p/x", "theirs\n");
            write(root, "new/dir/x", "theirs\n");
            fs::set_permissions(root.join("new"), fs::Permissions::from_mode(0o750)).unwrap();
            std::os::unix::fs::chown(root.join("new/dir"), Some(7), Some(8)).unwrap();
        },
    )
    .await;
    let refused = merge(&world, &base, &ours, &theirs, chosen("/p/x")).await;
    assert_eq!(refused.conflicts[0].path, "/p/x");
    assert!(refused.layer.is_none(), "the target's file is not replaced");
    let both = MergeOptions { keep_both: Some("try-a".to_owned()), ..chosen("/p/x") };
    let outcome = merge(&world, &base, &ours, &theirs, both).await;
    let model = world.model(&result(&outcome, &ours));
    assert_eq!(model["p"].content, b"base\n");
    assert_eq!(model["p.from-try-a/x"].content, b"theirs\n");
    // The directory was chosen, too.
    let outcome = merge(&world, &base, &ours, &theirs, chosen("/p")).await;
    assert_eq!(world.model(&result(&outcome, &ours))["p/x"].content, b"theirs\n");

    let outcome = merge(&world, &base, &ours, &theirs, chosen("x")).await;
    assert_eq!(outcome.conflicts.len(), 1, "{:?}", outcome.conflicts);
    let outcome = merge(&world, &base, &ours, &theirs, chosen("/new/dir/*")).await;
    let model = world.model(&result(&outcome, &ours));
    assert_eq!(model["new/dir/x"].content, b"theirs\n");
    assert_eq!((model["new"].mode, model["new/dir"].owner), (0o750, (7, 8)));
}

#[tokio::test]
async fn names_of_one_file_get_the_attributes_they_are_to_have() {
    let world = World::new();
    let mode = |root: &Path, path: &str, mode: u32| {
        fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    let (base, ours, theirs) = sides(
        &world,
        |root| ["a", "b", "c"].iter().for_each(|name| write(root, name, "base\n")),
        |root| mode(root, "b", 0o600),
        |root| {
            fs::write(root.join("a"), "theirs\n").unwrap();
            for name in ["b", "c"] {
                fs::remove_file(root.join(name)).unwrap();
                fs::hard_link(root.join("a"), root.join(name)).unwrap();
            }
        },
    )
    .await;
    let outcome = merge(&world, &base, &ours, &theirs, MergeOptions::default()).await;
    let chain = result(&outcome, &ours);
    let model = world.model(&chain);
    let modes = ["a", "b", "c"].map(|name| model[name].mode);
    assert_eq!(modes, [0o644, 0o600, 0o644]);
    assert!(["a", "b", "c"].iter().all(|name| model[*name].content == b"theirs\n"));
    let mount = world.mount_chain(&chain);
    let inode = |name: &str| fs::metadata(mount.path().join(name)).unwrap().ino();
    assert_eq!(inode("a"), inode("c"), "these two are one file still");
    assert_ne!(inode("a"), inode("b"));
}

#[tokio::test]
async fn what_the_target_leaves_out_and_more_than_its_disk_is_not_taken() {
    let world = World::new();
    let (base, ours, theirs) = sides(
        &world,
        |root| write(root, "f", "base\n"),
        |root| write(root, "ours", "ours\n"),
        |root| {
            write(root, "f", "theirs\n");
            write(root, "cache/x", &"x".repeat(100_000));
        },
    )
    .await;
    let exclude = Some(Globs::parse(&["/cache".to_owned()]).unwrap());
    let options = MergeOptions { exclude, most_bytes: Some(50_000), ..MergeOptions::default() };
    let outcome = merge(&world, &base, &ours, &theirs, options).await;
    let model = world.model(&result(&outcome, &ours));
    assert_eq!(model["f"].content, b"theirs\n");
    assert!(!model.contains_key("cache"));
    let chains = MergeChains { base, ours, theirs };
    let options = MergeOptions { most_bytes: Some(50_000), ..MergeOptions::default() };
    let refused = world.store.merge_trees(chains, options).await.unwrap_err();
    assert!(matches!(refused, StoreError::OverLimit { limit: 50_000, .. }), "{refused}");
}
