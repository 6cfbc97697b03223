//! Whatever is done to layers, the tree a sandbox sees stays the same, byte for byte.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::store_world::World;
use sandkeep_core::model::{LayerId, LayerKind};
use sandkeep_core::store::{
    DigestVerdict, Effort, LeftOut, NameDifference, SealOptions, StoreError,
};
use sandkeep_testkit::tree::{assert_same, churn, describe, nasty, upset};

/// How many random histories are tried; more of them with `SANDKEEP_SEEDS`.
fn seeds(usual: u64) -> std::ops::Range<u64> {
    let asked = std::env::var("SANDKEEP_SEEDS").ok().and_then(|text| text.parse().ok());
    0..asked.unwrap_or(usual)
}

#[tokio::test]
async fn a_nasty_tree_survives_sealing() {
    let world = World::new();
    let image = world.image(nasty).await;
    let (layer, expected) = world.session(std::slice::from_ref(&image), upset).await;
    let layer = layer.expect("something was written");
    let found = world.view(&[layer.id.clone(), image.clone()]);
    assert_same("sealed", &expected, &found);

    let again = world.store.seal(&layer.id, &SealOptions::default()).await.expect("sealed");
    assert_eq!(again, Some(layer.clone()), "sealing twice is harmless");
    assert!(layer.files > 5 && layer.bytes >= 4096, "{layer:?}");
    assert!(!world.store.diff_dir(&layer.id).join("../work").exists());
    let sparse = world.store.diff_dir(&image).join("sparse");
    assert!(fs::metadata(sparse).expect("sparse").blocks() * 512 < 1 << 20);
}

#[tokio::test]
async fn an_untouched_session_makes_no_layer() {
    let world = World::new();
    let image = world.image(|root| {
        nasty(root);
        fs::set_permissions(root, fs::Permissions::from_mode(0o711)).expect("root");
    });
    let image = image.await;
    let (layer, _) = world.session(std::slice::from_ref(&image), |_| {}).await;
    assert_eq!(layer, None);
    let left = fs::read_dir(world.data().join("layers")).expect("layers").count();
    assert_eq!(left, 1, "only the image");

    let chmod = |root: &std::path::Path| {
        fs::set_permissions(root, fs::Permissions::from_mode(0o700)).expect("root");
    };
    let (layer, expected) = world.session(std::slice::from_ref(&image), chmod).await;
    let layer = layer.expect("the root's mode is a change");
    assert_same("root", &expected, &world.view(&[layer.id, image]));
}

#[tokio::test]
async fn exclusions_show_what_is_below() {
    let world = World::new();
    let image = world
        .image(|root| {
            fs::create_dir_all(root.join("work/cache")).expect("dir");
            fs::write(root.join("work/cache/old"), "lower").expect("file");
            fs::write(root.join("work/app.log"), "lower").expect("file");
            fs::write(root.join("work/deleted.log"), "lower").expect("file");
        })
        .await;
    let before = world.view(std::slice::from_ref(&image));
    let open = world.store.begin(std::slice::from_ref(&image)).await.expect("begun");
    {
        let mount = world.mount(&open, std::slice::from_ref(&image));
        let at = |name: &str| mount.path().join(name);
        fs::write(at("work/cache/old"), "upper").expect("file");
        fs::create_dir(at("work/cache/new")).expect("dir");
        fs::write(at("work/cache/new/x"), "upper").expect("file");
        fs::write(at("work/app.log"), "upper").expect("file");
        fs::remove_file(at("work/deleted.log")).expect("file");
        fs::write(at("new.log"), "upper").expect("file");
        std::os::unix::fs::symlink("/", at("link.log")).expect("a symlink");
        fs::write(at("work/kept"), "upper").expect("file");
    }
    let exclude = vec!["/work/cache".to_owned(), "*.log".to_owned()];
    let options = SealOptions { exclude, ..SealOptions::default() };
    let layer = world.store.seal(&open, &options).await.expect("sealed").expect("work/kept");
    let mut after = world.view(&[layer.id, image]);
    assert!(after.remove("work/kept").is_some());
    // Times of directories that were written to are those of the session.
    let names = |tree: &std::collections::BTreeMap<String, String>| {
        tree.iter()
            .filter(|(_, text)| text.starts_with('1'))
            .map(|(path, text)| format!("{path} {text}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&before), names(&after));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    assert!(fs::read_dir("/").expect("the host's root").count() > 0);
}

#[tokio::test]
async fn any_run_compacts_to_the_same_tree() {
    for seed in seeds(3) {
        let world = World::new();
        let mut chain = vec![
            world
                .image(|root| {
                    nasty(root);
                    churn(root, seed + 100, 40);
                })
                .await,
        ];
        let mut expected = world.view(&chain);
        for round in 0..5 {
            let write = |root: &std::path::Path| {
                if round == 1 {
                    upset(root);
                }
                churn(root, seed * 10 + round, 30);
            };
            let (layer, seen) = world.session(&chain, write).await;
            if let Some(layer) = layer {
                chain.insert(0, layer.id);
            }
            expected = seen;
        }
        assert_same("sealed", &expected, &world.view(&chain));
        for from in 0..chain.len() {
            for to in from + 1..=chain.len() {
                let what = format!("seed {seed}, layers {from}..{to} of {}", chain.len());
                let merged = world
                    .store
                    .compact(&chain[from..to], Effort::Foreground)
                    .await
                    .expect("compacted");
                let mut shorter = chain.clone();
                shorter.splice(from..to, [merged.id.clone()]);
                assert_same(&what, &expected, &world.view(&shorter));
                assert_eq!(merged.kind, LayerKind::Compacted);
            }
        }
    }
}

#[tokio::test]
async fn compacting_costs_no_space_and_outlives_its_sources() {
    let world = World::new();
    let image = world.image(nasty).await;
    let big = |name: &'static str| {
        move |root: &std::path::Path| fs::write(root.join(name), vec![1; 1 << 20]).expect("room")
    };
    let (first, _) = world.session(std::slice::from_ref(&image), big("one")).await;
    let first = first.expect("written").id;
    let chain = [first.clone(), image.clone()];
    let (second, expected) = world.session(&chain, big("two")).await;
    let second = second.expect("written").id;
    let merged = world
        .store
        .compact(&[second.clone(), first.clone()], Effort::Foreground)
        .await
        .expect("compacted");
    let weights = world.store.layer_sizes().await.expect("weights");
    let linked: u64 = weights[&merged.id].linked.iter().map(|linked| linked.bytes).sum();
    assert_eq!(linked, 2 << 20);
    assert!(merged.bytes < linked + (64 << 10), "{merged:?}");

    let live = [merged.id.clone(), image.clone()].into();
    let later = sandkeep_core::model::Timestamp::MAX;
    let collected = world.store.collect(&live, later).await.expect("collected");
    assert_eq!(collected.layers.len(), 2, "{collected:?}");
    assert_same("after collection", &expected, &world.view(&[merged.id, image]));
}

#[tokio::test]
async fn live_copies_show_what_the_session_showed() {
    for seed in seeds(4) {
        let world = World::new();
        let image = world
            .image(|root| {
                nasty(root);
                churn(root, seed, 40);
            })
            .await;
        let chain = vec![image];
        let open = world.store.begin(&chain).await.expect("begun");
        let mount = world.mount(&open, &chain);
        let mut copy = None;
        for round in 0..6 {
            if round == 2 {
                upset(mount.path());
            }
            churn(mount.path(), seed * 100 + round, 25);
            let expected = describe(mount.path());
            let done = world.store.copy_live(&open, &chain, copy.as_ref()).await.expect("copied");
            let stack: Vec<LayerId> = done.1.layers().to_vec();
            assert_same(&format!("seed {seed}, round {round}"), &expected, &world.view(&stack));
            copy = Some(done.1);
        }
        let copy = copy.expect("copied");
        std::thread::sleep(std::time::Duration::from_millis(50));
        let settled = world.store.copy_live(&open, &chain, Some(&copy)).await.expect("copied").1;
        let (nothing, same) =
            world.store.copy_live(&open, &chain, Some(&settled)).await.expect("copied");
        assert_eq!(nothing, None, "nothing has changed");
        assert_eq!(same.layers(), settled.layers());
    }
}

#[tokio::test]
async fn a_copy_made_ahead_may_be_torn() {
    for seed in seeds(3) {
        let world = World::new();
        let image = world.image(nasty).await;
        let chain = vec![image];
        let open = world.store.begin(&chain).await.expect("begun");
        let mount = world.mount(&open, &chain);
        let root = mount.path().to_owned();
        churn(&root, seed, 100);
        fs::write(root.join("big"), vec![1; 5 << 20]).expect("room");
        // What changed only just now is copied twice.
        std::thread::sleep(std::time::Duration::from_millis(50));
        let frozen = Arc::new(AtomicBool::new(false));
        let writer = std::thread::spawn({
            let (root, frozen) = (root.clone(), Arc::clone(&frozen));
            move || {
                for round in 0.. {
                    if frozen.load(Ordering::Relaxed) {
                        break;
                    }
                    churn(&root, seed * 1000 + round, 5);
                }
            }
        });
        let ahead = world.store.copy_ahead(&open, &chain).await;
        frozen.store(true, Ordering::Relaxed);
        writer.join().expect("it ends");
        let (_, ahead) = ahead.expect("copied").expect("worth it");
        let expected = describe(&root);
        let (layer, copy) =
            world.store.copy_live(&open, &chain, Some(&ahead)).await.expect("copied");
        let stack: Vec<LayerId> = copy.layers().to_vec();
        assert_same(&format!("seed {seed}"), &expected, &world.view(&stack));
        assert!(layer.is_none_or(|layer| layer.bytes < 4 << 20), "the big file was copied ahead");
    }
}

#[tokio::test]
async fn a_restarted_daemon_goes_on_copying() {
    let world = World::new();
    let image = world.image(nasty).await;
    let chain = [image];
    let open = world.store.begin(&chain).await.expect("begun");
    let mount = world.mount(&open, &chain);
    fs::write(mount.path().join("big"), vec![1; 2 << 20]).expect("room");
    std::thread::sleep(std::time::Duration::from_millis(50));
    let (_, copy) = world.store.copy_live(&open, &chain, None).await.expect("copied");
    let recalled = loop {
        // Written in the background, so that the sandbox is thawed the sooner.
        if let Some(recalled) = world.store.live_copy(&open, &chain).await {
            break recalled;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    };
    assert_eq!(recalled.layers(), copy.layers());
    upset(mount.path());
    let expected = describe(mount.path());
    let (layer, copy) =
        world.store.copy_live(&open, &chain, Some(&recalled)).await.expect("copied");
    assert!(layer.expect("changed").bytes < 1 << 20, "the big file is not copied again");
    let stack: Vec<LayerId> = copy.layers().to_vec();
    assert_same("after a restart", &expected, &world.view(&stack));

    // A copy it stood on was collected: the next one is whole.
    let live = [chain[0].clone(), open.clone()].into();
    world.store.collect(&live, sandkeep_core::model::Timestamp::MAX).await.expect("collected");
    let (layer, copy) = world.store.copy_live(&open, &chain, Some(&copy)).await.expect("copied");
    assert!(layer.expect("whole").bytes > 2 << 20);
    assert_eq!(copy.layers().len(), 2);
}

#[tokio::test]
async fn an_export_unpacks_to_the_same_tree() {
    let world = World::new();
    let image = world.image(nasty).await;
    let archive = world.dir().join("layer.tar");
    let file = fs::File::create(&archive).expect("a file");
    let (_, exported) = world.store.export(&image, file).await.expect("exported");
    assert_eq!(exported.left_out, LeftOut::default());
    assert_eq!(exported.bytes, fs::metadata(&archive).expect("there").len());
    let sum = Command::new("sha256sum").arg(&archive).output().expect("sha256sum runs");
    let sum = String::from_utf8(sum.stdout).expect("text");
    assert!(sum.starts_with(exported.diff_id.strip_prefix("sha256:").expect("a prefix")), "{sum}");

    let unpacked = world.dir().join("unpacked");
    fs::create_dir(&unpacked).expect("a directory");
    let tar = Command::new("tar")
        .args(["--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf"])
        .arg(&archive)
        .arg("-C")
        .arg(&unpacked)
        .output()
        .expect("tar runs");
    assert!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
    assert_same("exported", &describe(&world.store.diff_dir(&image)), &describe(&unpacked));

    let (layer, _) = world.session(std::slice::from_ref(&image), upset).await;
    let (bytes, _) = world.store.export(&layer.expect("written").id, Vec::new()).await.expect("ok");
    fs::write(&archive, bytes).expect("room");
    let list = Command::new("tar").arg("-tf").arg(&archive).output().expect("tar runs");
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    for name in [".wh.gone", "dir/.wh..wh..opq", "kept/.wh.b", "swap", "tofile/in"] {
        assert!(list.lines().any(|line| line == name), "{name} in:\n{list}");
    }
}

#[tokio::test]
async fn an_export_leaves_out_all_names_of_a_socket_and_tells() {
    let world = World::new();
    let image = world
        .image(|root| {
            let _ = std::os::unix::net::UnixListener::bind(root.join("a-socket")).expect("bound");
            fs::hard_link(root.join("a-socket"), root.join("b-socket")).expect("linked");
            for number in 0..30 {
                fs::write(root.join(format!(".wh.{number:02}")), "").expect("a file");
            }
            fs::write(root.join("file"), "content").expect("a file");
            fs::hard_link(root.join("file"), root.join("link")).expect("linked");
        })
        .await;
    let (bytes, exported) = world.store.export(&image, Vec::new()).await.expect("exported");
    assert_eq!(exported.left_out.count, 32);
    assert_eq!(exported.left_out.paths.len(), LeftOut::NAMED);
    assert_eq!(exported.left_out.paths[0], ".wh.00");
    let mut archive = tar::Archive::new(&bytes[..]);
    let entries = archive.entries().expect("an archive").map(|entry| {
        let entry = entry.expect("an entry");
        let link = entry.link_name().expect("a name").map(|name| name.display().to_string());
        (entry.path().expect("a name").display().to_string(), link)
    });
    let wanted = [("./", None), ("file", None), ("link", Some("file"))];
    let wanted = wanted.map(|(name, link)| (name.to_owned(), link.map(str::to_owned)));
    assert_eq!(entries.collect::<Vec<_>>(), wanted);
}

#[tokio::test]
async fn an_export_of_a_huge_sparse_file_is_refused_before_it_is_read() {
    let world = World::new();
    let image = world
        .image(|root| {
            let file = fs::File::create(root.join("huge")).expect("a file");
            file.set_len(2 << 40).expect("this filesystem has files of 2 TiB");
        })
        .await;
    let began = std::time::Instant::now();
    let refused = world.store.export(&image, std::io::sink()).await.expect_err("too large");
    assert!(began.elapsed() < std::time::Duration::from_secs(20));
    assert!(matches!(refused, StoreError::ExportTooLarge { .. }), "{refused:?}");
    assert!(refused.to_string().contains("`huge`, which has a size of 2.0 TiB"), "{refused}");
}

#[tokio::test]
async fn damage_is_found_by_name() {
    let world = World::new();
    let image = world.image(nasty).await;
    assert_eq!(world.store.verify(&image, None).await.expect("ok"), DigestVerdict::Unknown);
    for _ in 0..2 {
        let made = world.store.record_digest(&image, None).await.expect("hashed");
        assert_eq!(made, DigestVerdict::Intact);
    }
    assert_eq!(world.store.verify(&image, None).await.expect("ok"), DigestVerdict::Intact);
    let diff = world.store.diff_dir(&image);
    fs::write(diff.join("dir/deep/er/leaf"), [7; 5001]).expect("a file");
    fs::remove_file(diff.join("absolute")).expect("a link");
    fs::write(diff.join("kept/new"), "").expect("a file");
    let DigestVerdict::Damaged(found) = world.store.verify(&image, None).await.expect("ok") else {
        panic!("damage");
    };
    for expected in [
        NameDifference::Changed("dir/deep/er/leaf".to_owned()),
        NameDifference::Missing("absolute".to_owned()),
        NameDifference::Extra("kept/new".to_owned()),
    ] {
        assert!(found.contains(&expected), "{expected:?} in {found:?}");
    }
    assert!(!found.contains(&NameDifference::Changed("dir/plain".to_owned())));
}

#[tokio::test]
async fn a_bottomless_tree_can_be_sealed_copied_and_removed() {
    let world = World::new();
    let open = world.store.begin(&[]).await.expect("begun");
    let depth = 1500;
    // Deeper than a path can say: made from the inside out.
    let diff = world.store.diff_dir(&open);
    let mut dir = rustix::fs::open(
        &diff,
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY,
        rustix::fs::Mode::empty(),
    )
    .expect("diff");
    for _ in 0..depth {
        rustix::fs::mkdirat(&dir, "down", rustix::fs::Mode::RWXU).expect("a directory");
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        dir = rustix::fs::openat(&dir, "down", flags, rustix::fs::Mode::empty()).expect("down");
    }
    drop(dir);
    let (copied, _) = world.store.copy_live(&open, &[], None).await.expect("copied");
    let copied = copied.expect("something");
    assert_eq!(copied.files, depth);
    let sealed = world.store.seal(&open, &SealOptions::default()).await.expect("sealed");
    let sealed = sealed.expect("something");
    assert_eq!(sealed.files, depth);
    let merged =
        world.store.compact(&[sealed.id, copied.id], Effort::Foreground).await.expect("compacted");
    assert_eq!(merged.files, depth);
    let nobody = std::collections::HashSet::new();
    let later = sandkeep_core::model::Timestamp::MAX;
    let collected = world.store.collect(&nobody, later).await.expect("collected");
    assert_eq!(collected.layers.len(), 3);
    assert_eq!(fs::read_dir(world.data().join("tmp")).expect("tmp").count(), 0);
}
