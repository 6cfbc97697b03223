//! Changes that are put onto a chain without a common ancestor, compared with the same of what the kernel shows.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use sandkeep_core::model::LayerId;
use sandkeep_core::store::{Globs, MergeOutcome, OntoChains, OntoOptions, StoreError};
use sandkeep_testkit::tree::churn;

use crate::store_world::World;
use crate::tree_model::{Model, Node};

async fn put(
    world: &World,
    (from, to): (&[LayerId], &[LayerId]),
    onto: &[LayerId],
    options: OntoOptions,
) -> MergeOutcome {
    let chains = OntoChains { from: from.to_vec(), to: to.to_vec(), onto: onto.to_vec() };
    world.store.put_onto(chains, options).await.unwrap()
}

/// The chain with the result on top.
fn result(outcome: &MergeOutcome, onto: &[LayerId]) -> Vec<LayerId> {
    let top = outcome.layer.iter().map(|layer| layer.id.clone());
    top.chain(onto.iter().cloned()).collect()
}

fn joined(under: &str, path: &str) -> String {
    if under.is_empty() { path.to_owned() } else { format!("{under}/{path}") }
}

fn parents(path: &str) -> Vec<&str> {
    path.match_indices('/').map(|(at, _)| &path[..at]).collect()
}

fn is_dir(node: &Node) -> bool {
    node.kind == 'd'
}

/// The result by the rules of docs/FORKS.md, path by path, and the paths in conflict.
fn expected(
    base: &Model,
    theirs: &Model,
    drive: &Model,
    under: &str,
    chosen: impl Fn(&str) -> bool,
) -> (Model, BTreeSet<String>) {
    let all: BTreeSet<&String> = base.keys().chain(theirs.keys()).collect();
    let changed: Vec<&String> = all
        .into_iter()
        .filter(|path| base.get(*path) != theirs.get(*path) && chosen(path))
        .collect();
    let gone: BTreeSet<String> = changed
        .iter()
        .filter(|path| !theirs.get(**path).is_some_and(is_dir))
        .map(|path| joined(under, path))
        .collect();
    let below = |dir: &str| -> Vec<String> {
        let start = format!("{dir}/");
        drive.keys().filter(|path| path.starts_with(&start)).cloned().collect()
    };
    let is_emptied = |dir: &str| below(dir).iter().all(|path| gone.contains(path));
    let (mut merged, mut conflicts) = (drive.clone(), BTreeSet::new());
    let mut written: BTreeMap<String, Node> = BTreeMap::new();
    for path in changed {
        let at = joined(under, path);
        let (was, found) = (base.get(path), drive.get(&at));
        match (theirs.get(path), found) {
            (None, None) => {}
            (None, Some(found)) => {
                let is_it = was.is_some_and(|was| is_dir(was) == is_dir(found));
                if is_it && (!is_dir(found) || is_emptied(&at)) {
                    merged.remove(&at);
                    below(&at).iter().for_each(|path| drop(merged.remove(path)));
                }
            }
            (Some(node), Some(found)) if is_dir(found) && !is_dir(node) => {
                if was.is_some_and(is_dir) && is_emptied(&at) {
                    below(&at).iter().for_each(|path| drop(merged.remove(path)));
                    written.insert(at, node.clone());
                } else {
                    conflicts.insert(at);
                }
            }
            (Some(node), Some(found)) if !is_dir(found) && is_dir(node) => {
                if was.is_some_and(|was| !is_dir(was)) {
                    written.insert(at, node.clone());
                } else {
                    conflicts.insert(at);
                }
            }
            (Some(node), found) if found == Some(node) => {}
            (Some(node), _) => drop(written.insert(at, node.clone())),
        }
    }
    for path in written.keys().cloned().collect::<Vec<_>>() {
        for parent in parents(&path) {
            let there = written.get(parent).or(drive.get(parent));
            match there {
                Some(node) if is_dir(node) => {}
                Some(_) => {
                    conflicts.insert(path.clone());
                    break;
                }
                None => {
                    let source = match under {
                        "" => theirs.get(parent),
                        under => parent
                            .strip_prefix(&format!("{under}/"))
                            .and_then(|inner| theirs.get(inner)),
                    };
                    let place = Node {
                        kind: 'd',
                        mode: 0o777,
                        owner: (0, 0),
                        xattr: None,
                        content: Vec::new(),
                    };
                    let node = source.filter(|node| is_dir(node)).cloned().unwrap_or(place);
                    written.insert(parent.to_owned(), node);
                }
            }
        }
    }
    merged.extend(written);
    (merged, conflicts)
}

#[tokio::test]
async fn what_is_put_onto_a_drive_is_what_the_trees_say() {
    let (mut clean, mut conflicted, mut empty) = (0, 0, 0);
    for seed in 0..60 {
        let world = World::new();
        let image = world.image(|root| churn(root, seed, 60)).await;
        let from = vec![image];
        let steps = 3 + (seed % 19) as usize;
        let (layer, _) = world.session(&from, |root| churn(root, seed + 1000, steps)).await;
        let to: Vec<LayerId> =
            layer.map(|layer| layer.id).into_iter().chain(from.iter().cloned()).collect();
        let under = ["", "in/side", "a"][(seed % 3) as usize];
        let drive = match seed % 4 {
            0 => Vec::new(),
            // It has some of the same files, in layers of its own.
            1 if under.is_empty() => world.churned(&from, seed + 4000, 2).await,
            _ => {
                let fill = |root: &Path| {
                    fs::write(root.join("own"), "x").unwrap();
                    churn(root, seed + 3000, 8);
                };
                let own = world.image(fill).await;
                world.churned(&[own], seed + 4000, (seed % 3) as usize).await
            }
        };
        let only = (seed % 5 == 0).then(|| "/a".to_owned());
        let chosen = |path: &str| only.is_none() || path == "a" || path.starts_with("a/");
        let options = || OntoOptions {
            only: only.iter().map(|glob| Globs::parse(std::slice::from_ref(glob)).unwrap()).next(),
            under: under.as_bytes().to_vec(),
            ..OntoOptions::default()
        };
        let before = if drive.is_empty() { Model::new() } else { world.model(&drive) };
        let (wanted, conflicts) =
            expected(&world.model(&from), &world.model(&to), &before, under, chosen);
        let outcome = put(&world, (&from, &to), &drive, options()).await;
        let told: BTreeSet<String> =
            outcome.conflicts.iter().map(|one| one.path[1..].to_owned()).collect();
        assert_eq!(told, conflicts, "seed {seed}");
        if !conflicts.is_empty() {
            conflicted += 1;
            assert!(outcome.layer.is_none());
            continue;
        }
        let after = result(&outcome, &drive);
        if after.is_empty() {
            empty += 1;
            assert_eq!(wanted, Model::new(), "seed {seed}");
            continue;
        }
        clean += 1;
        assert_eq!(world.model(&after), wanted, "seed {seed}");
        // A repeated request finds nothing to do.
        let again = put(&world, (&from, &to), &after, options()).await;
        assert!(again.layer.is_none() && again.conflicts.is_empty(), "seed {seed}: {again:?}");
    }
    assert!(clean > 20 && conflicted > 5, "{clean} clean, {conflicted} conflicts, {empty} empty");
}

fn xattr(path: &Path, key: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, key, value, rustix::fs::XattrFlags::empty()).unwrap();
}

fn in_out(seen: &BTreeMap<String, String>) -> impl Iterator<Item = (&String, &String)> {
    seen.iter().filter(|(path, _)| path.starts_with("out/"))
}

/// A description without the time, if it is of a directory: that changes with what is in it.
fn timeless(text: &str) -> String {
    let mut parts: Vec<&str> = text.split(' ').collect();
    if parts[0].starts_with('4') {
        parts.remove(2);
    }
    parts.join(" ")
}

#[tokio::test]
async fn all_that_a_file_is_gets_there() {
    let world = World::new();
    let image = world.image(|root| {
        fs::create_dir_all(root.join("out/old")).unwrap();
        fs::write(root.join("out/old/a"), "a").unwrap();
        fs::write(root.join("out/gone"), "x").unwrap();
        fs::write(root.join("out/becomes-dir"), "x").unwrap();
        fs::create_dir(root.join("out/becomes-link")).unwrap();
        fs::write(root.join("out/becomes-link/inner"), "x").unwrap();
        fs::create_dir(root.join("out/emptied")).unwrap();
        fs::write(root.join("out/emptied/inner"), "x").unwrap();
        fs::write(root.join("elsewhere"), "x").unwrap();
    });
    let from = [image.await];
    let change = |root: &Path| {
        let out = root.join("out");
        fs::write(out.join("one"), "linked").unwrap();
        fs::hard_link(out.join("one"), out.join("two")).unwrap();
        fs::create_dir(out.join("deep")).unwrap();
        fs::hard_link(out.join("one"), out.join("deep/three")).unwrap();
        xattr(&out.join("one"), "user.k", b"v\0\xff");
        fs::set_permissions(out.join("one"), fs::Permissions::from_mode(0o4751)).unwrap();
        std::os::unix::fs::chown(out.join("deep"), Some(7), Some(8)).unwrap();
        xattr(&out.join("deep"), "user.k", b"dir");
        symlink("../nowhere", out.join("link")).unwrap();
        fs::remove_file(out.join("gone")).unwrap();
        fs::remove_file(out.join("becomes-dir")).unwrap();
        fs::create_dir(out.join("becomes-dir")).unwrap();
        fs::write(out.join("becomes-dir/inner"), "y").unwrap();
        fs::remove_dir_all(out.join("becomes-link")).unwrap();
        symlink("one", out.join("becomes-link")).unwrap();
        // Renamed as `mv` does it.
        fs::create_dir(out.join("new")).unwrap();
        fs::copy(out.join("old/a"), out.join("new/a")).unwrap();
        fs::remove_dir_all(out.join("old")).unwrap();
        // Made anew: what was in it does not show through.
        fs::remove_dir_all(out.join("emptied")).unwrap();
        fs::create_dir(out.join("emptied")).unwrap();
        let odd = std::ffi::OsStr::new("odd \u{1}\n name");
        fs::write(out.join(odd), "odd").unwrap();
        let file = fs::File::create(out.join("sparse")).unwrap();
        file.set_len(1 << 20).unwrap();
        fs::write(root.join("elsewhere"), "changed").unwrap();
    };
    let (layer, seen) = world.session(&from, change).await;
    let to = [layer.unwrap().id, from[0].clone()];
    let only = || Some(Globs::parse(&["/out".to_owned()]).unwrap());
    let outcome =
        put(&world, (&from, &to), &[], OntoOptions { only: only(), ..OntoOptions::default() })
            .await;
    let drive = result(&outcome, &[]);
    let made = world.view(&drive);
    // A directory is taken if it is new or has other attributes, or something in it is taken.
    for (path, text) in in_out(&seen).filter(|(path, _)| *path != "out/emptied") {
        assert_eq!(made.get(path).map(|text| timeless(text)), Some(timeless(text)), "{path}");
    }
    assert!(!made.contains_key("elsewhere"));

    // The same onto a drive that has what it was before: whiteouts and all.
    let own = world.store.compact(&from, sandkeep_core::store::Effort::Foreground).await;
    let other = match own {
        Ok(layer) => vec![layer.id],
        Err(_) => vec![from[0].clone()],
    };
    let outcome =
        put(&world, (&from, &to), &other, OntoOptions { only: only(), ..OntoOptions::default() })
            .await;
    assert!(outcome.conflicts.is_empty(), "{:?}", outcome.conflicts);
    let made = world.view(&result(&outcome, &other));
    for (path, text) in in_out(&seen) {
        assert_eq!(made.get(path).map(|text| timeless(text)), Some(timeless(text)), "{path}");
    }
    let gone = ["out/gone", "out/old", "out/becomes-link/inner", "out/emptied/inner"];
    assert!(gone.iter().all(|path| !made.contains_key(*path)), "{made:?}");
}

#[tokio::test]
async fn bounds_and_exclusions_hold() {
    let world = World::new();
    let image = world.image(|root| {
        fs::create_dir(root.join("cache")).unwrap();
        fs::write(root.join("cache/a"), "a").unwrap();
        fs::write(root.join("b"), "b").unwrap();
    });
    let from = [image.await];
    let change = |root: &Path| {
        fs::remove_file(root.join("cache/a")).unwrap();
        fs::remove_file(root.join("b")).unwrap();
        fs::write(root.join("big"), vec![1u8; 100_000]).unwrap();
    };
    let (layer, _) = world.session(&from, change).await;
    let to = [layer.unwrap().id, from[0].clone()];
    let drive = [world
        .image(|root| {
            fs::create_dir(root.join("cache")).unwrap();
            fs::write(root.join("cache/a"), "own").unwrap();
            fs::write(root.join("b"), "own").unwrap();
        })
        .await];
    let exclude = || Some(Globs::parse(&["/cache".to_owned()]).unwrap());
    let chains = OntoChains { from: from.to_vec(), to: to.to_vec(), onto: drive.to_vec() };
    let options =
        OntoOptions { exclude: exclude(), most_bytes: Some(50_000), ..Default::default() };
    let refused = world.store.put_onto(chains, options).await;
    assert!(matches!(refused, Err(StoreError::OverLimit { .. })), "{refused:?}");
    let options = OntoOptions { exclude: exclude(), dry_run: true, ..Default::default() };
    let dry = put(&world, (&from, &to), &drive, options).await;
    assert_eq!((dry.counts.added, dry.counts.removed, dry.layer.is_none()), (1, 1, true));
    let options = OntoOptions { exclude: exclude(), ..Default::default() };
    let outcome = put(&world, (&from, &to), &drive, options).await;
    let model = world.model(&result(&outcome, &drive));
    assert_eq!(model["cache/a"].content, b"own");
    assert!(!model.contains_key("b") && model.contains_key("big"));
}
