//! Customized images, seen on the disk: what the layer holds on bases of all kinds.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::image_support::{Archive, Meta, PLAIN, architecture, config, digest, picture};
use sandkeep_core::model::Image;
use sandkeep_core::store::Store;
use sandkeep_core::store::image::{
    AddedDirectory, Customization, ImageError, ImageSettings, Images, Reporter,
};
use tar::EntryType;
use tempfile::TempDir;

struct Bench {
    images: Images,
    store: Store,
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        let store = Store::open(&dir.path().join("data")).expect("a new store");
        Self { images: Images::new(store.clone(), ImageSettings::default()), store, dir }
    }

    /// Imports a base.
    async fn base(&self, name: &str, archive: Archive) -> Image {
        let path = self.dir.path().join("base.tar");
        fs::write(&path, archive.end()).expect("ours");
        self.images.import(name, &path, &Reporter::silent()).await.expect("a base")
    }

    async fn customize(&self, base: &str) -> Image {
        self.images
            .customize(base, "customized", &Customization::default())
            .await
            .expect("it is customized")
    }

    fn top(&self, image: &Image) -> PathBuf {
        self.store.diff_dir(&image.layers[0])
    }
}

/// A system much like Debian's.
fn debian() -> Archive {
    Archive::new()
        .dir("etc/", 0o755)
        .dir("etc/profile.d/", 0o755)
        .dir("etc/skel/", 0o755)
        .file("etc/skel/.bashrc", "hello")
        .file("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n")
        .file("etc/group", "root:x:0:\nshadow:x:42:\n")
        .entry(
            EntryType::Regular,
            "etc/shadow",
            "",
            &Meta { mode: 0o640, gid: 42, ..PLAIN },
            b"root:*:1::::::\n",
        )
        .dir("usr/", 0o711)
        .dir("usr/bin/", 0o755)
        .entry(EntryType::Regular, "usr/bin/bash", "", &Meta { mode: 0o755, ..PLAIN }, b"x")
        .symlink("bin", "usr/bin")
}

/// Layers as `docker save` writes them, the first at the bottom.
fn docker_archive(layers: &[Vec<u8>]) -> Archive {
    let refs: Vec<&[u8]> = layers.iter().map(Vec::as_slice).collect();
    let config = config(&refs, architecture());
    let name = format!("{}.json", &digest(&config)[7..]);
    let mut archive = Archive::new();
    let mut names = Vec::new();
    for layer in layers {
        let name = format!("{}.tar", &digest(layer)[7..]);
        archive = archive.entry(EntryType::Regular, &name, "", &PLAIN, layer);
        names.push(name);
    }
    let manifest = serde_json::json!([{"Config": name, "Layers": names}]).to_string();
    archive.entry(EntryType::Regular, &name, "", &PLAIN, &config).file("manifest.json", &manifest)
}

fn owner(path: &Path) -> (u32, u32, u32) {
    let found = fs::symlink_metadata(path).expect("it is there");
    (found.uid(), found.gid(), found.mode() & 0o7777)
}

#[tokio::test]
async fn the_layer_has_a_user_a_home_and_sudo() {
    let bench = Bench::new();
    let base = bench.base("debian", debian()).await;
    let image = bench.customize("debian").await;
    assert_eq!(image.layers.len(), 2);
    assert_eq!(image.layers[1..], base.layers);
    assert_eq!(image.config.user.as_deref(), Some("ubuntu"));
    assert_eq!(image.config.cwd.as_deref(), Some("/vercel/sandbox"));
    assert_eq!(
        (image.source.as_str(), image.customized.as_ref().unwrap().base.as_str()),
        ("debian", "debian")
    );
    let top = bench.top(&image);
    let read = |name: &str| fs::read_to_string(top.join(name)).expect("it is there");
    assert!(read("etc/passwd").ends_with("\nubuntu:x:1000:1000:Ubuntu:/vercel:/bin/bash\n"));
    assert!(read("etc/shadow").ends_with("\nubuntu:*:19000:0:99999:7:::\n"));
    assert_eq!(owner(&top.join("etc/shadow")), (0, 42, 0o640), "as the base has it");
    for own in ["vercel", "vercel/sandbox", "vercel/bin"] {
        assert_eq!(owner(&top.join(own)), (1000, 1000, 0o755), "{own}");
    }
    assert_eq!(read("vercel/.bashrc"), "hello");
    assert_eq!(owner(&top.join("vercel/.bashrc")).0, 1000);
    assert_eq!(owner(&top.join("usr/bin/sudo")), (0, 0, 0o4755));
    assert_eq!(owner(&top.join("usr")).2, 0o711, "directories on the way are as in the base");
    assert_eq!(read("etc/keep-sudo.users"), "ubuntu\n");
    assert_eq!(owner(&top.join("etc/sudoers.d/90-default-user")), (0, 0, 0o440));
    assert!(!top.join("etc/sudoers").exists() && !top.join("etc/gshadow").exists());
    assert!(read("etc/profile.d/default-path.sh").contains("/vercel/bin:"));
}

#[tokio::test]
async fn a_base_is_seen_as_its_layers_show_it() {
    let bench = Bench::new();
    let low = Archive::new()
        .dir("real/", 0o755)
        .file("real/passwd", "root:x:0:0::/root:/bin/sh\nold:x:1000:1000::/:/bin/sh\n")
        .file("real/group", "root:x:0:\n")
        .symlink("etc", "conf")
        .dir("conf/", 0o750)
        .file("conf/shadow", "gone")
        .dir("conf/profile.d/", 0o755)
        .symlink("conf/passwd", "/real/passwd")
        .symlink("conf/group", "../real/group")
        .symlink("usr", "sys/usr")
        .dir("sys/usr/bin/", 0o700)
        .entry(EntryType::Regular, "sys/usr/bin/bash", "", &Meta { mode: 0o755, ..PLAIN }, b"x")
        .entry(EntryType::Regular, "sys/usr/bin/sudo", "", &Meta { mode: 0o4755, ..PLAIN }, b"x");
    let high = Archive::new()
        .file("real/passwd", "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/:/bin/sh\n")
        .file("real/group", "root:x:0:\nnode:x:1000:\n")
        .file("conf/.wh.shadow", "")
        .file("conf/.wh.profile.d", "")
        .file("sys/usr/bin/.wh..wh..opq", "");
    bench.base("low", docker_archive(&[low.end(), high.end()])).await;
    let image = bench.customize("low").await;
    let top = bench.top(&image);
    let all = picture(&top);
    // Written where the links lead: a directory `etc` would hide the base's.
    assert!(all["conf/passwd"].ends_with("ubuntu:x:1001:1001:Ubuntu:/vercel:/bin/sh\n"), "{all:?}");
    assert!(all.contains_key("sys/usr/bin/sudo") && !all.contains_key("etc"), "{all:?}");
    for hidden in ["conf/shadow", "conf/profile.d"] {
        assert!(!all.contains_key(hidden), "{hidden} is gone in the base: {all:?}");
    }
    // The image's user and directory are not the ones that clients expect, the rest is kept.
    assert_eq!(
        (image.config.user.as_deref(), image.config.env["A"].as_str()),
        (Some("ubuntu"), "b")
    );
    assert_eq!(owner(&top.join("conf")).2, 0o750);
    assert_eq!(owner(&top.join("sys/usr/bin")).2, 0o700);
    assert_eq!(owner(&top.join("vercel/sandbox")), (1001, 1001, 0o755));
}

#[tokio::test]
async fn a_sudo_of_the_base_stays_and_one_in_rust_does_not() {
    let setuid = Meta { mode: 0o4755, ..PLAIN };
    let bench = Bench::new();
    let has_ours = async |archive: Archive| {
        bench.base("base", archive).await;
        let top = bench.top(&bench.customize("base").await);
        (top.join("usr/bin/sudo").is_file(), picture(&top).get("etc/sudoers").cloned())
    };
    let sudo = |meta: &Meta| debian().entry(EntryType::Regular, "usr/bin/sudo", "", meta, b"sudo");
    let reads = "root ALL=(ALL) ALL\n@includedir /etc/sudoers.d\n";
    assert_eq!(has_ours(sudo(&setuid).file("etc/sudoers", reads)).await, (false, None));
    let (ours, sudoers) = has_ours(sudo(&setuid).file("etc/sudoers", "Defaults x\n")).await;
    assert!(!ours);
    assert_eq!(sudoers.as_deref(), Some("440 Defaults x\n@includedir /etc/sudoers.d\n"));
    assert!(has_ours(sudo(&PLAIN)).await.0, "a file that is no setuid program is none");
    assert!(has_ours(sudo(&Meta { uid: 7, ..setuid })).await.0, "nor one that is not root's");
    let in_rust = debian()
        .symlink("usr/bin/sudo", "/etc/alternatives/sudo")
        .symlink("etc/alternatives/sudo", "/usr/lib/cargo/bin/sudo")
        .entry(EntryType::Regular, "usr/lib/cargo/bin/sudo", "", &setuid, b"sudo");
    assert!(has_ours(in_rust).await.0);
}

#[tokio::test]
async fn it_is_made_once_and_again_when_the_base_has_changed() {
    let bench = Bench::new();
    bench.base("base", debian()).await;
    let wanted = async || {
        bench.images.customized("base", "machine", &Customization::default()).await.unwrap()
    };
    let all = futures_util::future::join_all((0..8).map(|_| wanted())).await;
    let layers: BTreeSet<_> = all.iter().map(|image| image.layers.clone()).collect();
    assert_eq!(layers.len(), 1, "eight callers, one layer");
    assert_eq!(fs::read_dir(bench.store.data_dir().join("layers")).unwrap().count(), 2);
    assert_eq!(wanted().await, all[0]);
    let layer = |image: &Image| image.layers[0].clone();
    assert_eq!(layer(&bench.customize("base").await), layer(&all[0]), "two names share the layer");

    fs::remove_file(bench.store.data_dir().join(format!("layers/{}/layer.json", layer(&all[0]))))
        .expect("it was sealed");
    let mended = wanted().await;
    assert!(bench.store.layer(&layer(&mended)).await.is_ok(), "a lost layer is made again");

    bench.base("base", debian().file("etc/new", "x")).await;
    let renewed = wanted().await;
    assert_ne!((renewed.layers, renewed.digest), (all[0].layers.clone(), all[0].digest.clone()));
    let dress = Customization { path: vec!["/opt/x".to_owned()], ..Customization::default() };
    let other = bench.images.customized("base", "machine", &dress).await.unwrap();
    assert!(other.config.env["PATH"].starts_with("/vercel/bin:/opt/x:"));
    // A customized image is a base like any other.
    let twice =
        bench.images.customize("machine", "twice", &Customization::default()).await.unwrap();
    let passwd = fs::read_to_string(bench.top(&twice).join("etc/passwd")).unwrap();
    assert_eq!(passwd.matches("ubuntu").count(), 1);
}

#[tokio::test]
async fn directories_of_the_host_are_added_as_roots() {
    let bench = Bench::new();
    bench.base("base", debian()).await;
    let from = bench.dir.path().join("add");
    fs::create_dir_all(from.join("bin")).unwrap();
    fs::write(from.join("bin/tool"), "x".repeat(3 << 20)).unwrap();
    fs::set_permissions(from.join("bin/tool"), fs::Permissions::from_mode(0o6755)).unwrap();
    std::os::unix::fs::chown(from.join("bin/tool"), Some(4242), Some(4242)).unwrap();
    fs::set_permissions(from.join("bin/tool"), fs::Permissions::from_mode(0o6755)).unwrap();
    std::os::unix::fs::symlink("tool", from.join("bin/link")).unwrap();
    let deep = from.join("d".repeat(120)).join("e".repeat(120));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("f"), "deep").unwrap();
    let dress = |to: &str| Customization {
        add: vec![AddedDirectory { from: from.clone(), to: to.into() }],
        ..Customization::default()
    };
    let image = bench.images.customize("base", "added", &dress("/bin/more")).await.unwrap();
    let more = bench.top(&image).join("usr/bin/more");
    assert_eq!(owner(&more.join("bin/tool")), (0, 0, 0o755), "who ran it as 4242 is not root");
    assert_eq!(fs::metadata(more.join("bin/tool")).unwrap().len(), 3 << 20);
    assert_eq!(fs::read_link(more.join("bin/link")).unwrap(), Path::new("tool"));
    let deep = deep.strip_prefix(&from).unwrap().join("f");
    assert_eq!(fs::read_to_string(more.join(deep)).unwrap(), "deep");

    // One that cannot be taken whole leaves the name as it was.
    fs::write(from.join(".wh.x"), "").unwrap();
    let failed = bench.images.customize("base", "added", &dress("/opt/x")).await.unwrap_err();
    assert!(matches!(failed, ImageError::BadCustomization { .. }), "{failed:?}");
    assert!(
        failed.to_string().contains("add: ") && failed.to_string().contains(".wh."),
        "{failed}"
    );
    assert_eq!(bench.images.get("added").await.unwrap(), image);
}

#[tokio::test]
async fn wishes_that_make_no_sense_are_refused() {
    let bench = Bench::new();
    bench.base("base", debian()).await;
    let here = bench.dir.path().to_owned();
    let add = |from: &Path, to: &str| Customization {
        add: vec![AddedDirectory { from: from.to_owned(), to: to.into() }],
        ..Customization::default()
    };
    let env = |name: &str, value: &str| Customization {
        env: [(name.to_owned(), value.to_owned())].into(),
        ..Customization::default()
    };
    let path =
        |path: &str| Customization { path: vec![path.to_owned()], ..Customization::default() };
    for dress in [
        add(&here, "/"),
        add(&here, "relative"),
        add(&here, "/a/../b"),
        add(Path::new("relative"), "/a"),
        add(&here.join("nothing"), "/a"),
        add(&here.join("base.tar"), "/a"),
        env("", "x"),
        env("A=B", "x"),
        env("A", "x\0"),
        path("relative"),
        path("/a:/b"),
        path("/a/../b"),
    ] {
        let refused = bench.images.customize("base", "x", &dress).await.unwrap_err();
        assert!(matches!(refused, ImageError::BadCustomization { .. }), "{dress:?}: {refused:?}");
    }
    let plain = Customization::default();
    let refused = async |base: &str, name: &str| {
        bench.images.customize(base, name, &plain).await.unwrap_err()
    };
    assert!(matches!(refused("base", "base").await, ImageError::BadCustomization { .. }));
    assert!(matches!(refused("base", "host").await, ImageError::BadName { .. }));
    assert!(matches!(refused("base", "a b").await, ImageError::BadName { .. }));
    assert!(matches!(refused("nothing", "x").await, ImageError::NotFound { .. }));
    assert_eq!(bench.images.list().await.unwrap().len(), 1);
}

#[tokio::test]
async fn runtimes_are_found_by_looking() {
    let bench = Bench::new();
    let text =
        format!("{}node-v24.3.1-headers.tar.gz{}", "x".repeat((1 << 20) - 10), "y".repeat(99));
    let program = Meta { mode: 0o755, ..PLAIN };
    let base = bench
        .base(
            "runtimes",
            debian()
                .entry(EntryType::Regular, "opt/n/node", "", &program, text.as_bytes())
                .symlink("usr/bin/node", "/opt/n/node")
                .symlink("usr/bin/python3.13", "python3.13-real")
                .entry(EntryType::Regular, "usr/bin/python3.13-real", "", &program, b"x")
                .symlink("usr/bin/python3.12", "nowhere"),
        )
        .await;
    let found = bench.images.runtimes(&base).await.unwrap();
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["node24", "python3.13"]);
    let none = bench.base("none", debian()).await;
    assert!(bench.images.runtimes(&none).await.unwrap().is_empty());
}
