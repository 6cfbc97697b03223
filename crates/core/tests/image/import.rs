//! Images from files, into a store.

use std::fs;
use std::path::{Path, PathBuf};

use crate::image_support::{Archive, architecture, config, digest, drawn, gzip, picture, zstd};
use sandkeep_core::model::{Image, Size};
use sandkeep_core::store::Store;
use sandkeep_core::store::image::{
    HostRoot, ImageError, ImageResult, ImageSettings, Images, Reporter,
};
use tempfile::TempDir;

/// A store of its own for one test, and a directory for files.
struct Bench {
    images: Images,
    store: Store,
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        Self::with(ImageSettings::default())
    }

    fn with(settings: ImageSettings) -> Self {
        let dir = TempDir::new().expect("a directory");
        fs::create_dir(dir.path().join("files")).expect("ours");
        let store = Store::open(&dir.path().join("data")).expect("a new store");
        Self { images: Images::new(store.clone(), settings), store, dir }
    }

    fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join("files").join(name);
        fs::create_dir_all(path.parent().expect("it has one")).expect("ours");
        fs::write(&path, bytes).expect("ours");
        path
    }

    async fn import(&self, name: &str, path: &Path) -> ImageResult<Image> {
        self.images.import(name, path, &Reporter::silent()).await
    }

    /// The files of an image's layers, topmost first.
    fn drawn(&self, image: &Image) -> Vec<String> {
        image.layers.iter().map(|id| drawn(&self.store.diff_dir(id))).collect()
    }

    /// Names of what lies in a part of the data directory.
    fn names(&self, part: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.store.data_dir().join(part)) else { return Vec::new() };
        entries.map(|entry| entry.expect("ours").file_name().to_string_lossy().into()).collect()
    }

    /// Whether nothing exists, once what was thrown away is gone.
    fn is_empty(&self) -> bool {
        self.tmp_empties() && ["layers", "images"].iter().all(|part| self.names(part).is_empty())
    }

    fn tmp_empties(&self) -> bool {
        let give_up = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !self.names("tmp").is_empty() {
            if std::time::Instant::now() > give_up {
                return false;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        true
    }
}

fn base() -> Vec<u8> {
    Archive::new().dir("etc", 0o755).file("etc/a", "a").file("etc/b", "b").end()
}

fn top() -> Vec<u8> {
    Archive::new().dir("etc", 0o755).file("etc/.wh.a", "").file("etc/c", "c").end()
}

/// What `docker save` writes: documents, layers by directory, `manifest.json` at the end.
fn docker_archive(layers: &[Vec<u8>], tags: &[&str]) -> Vec<u8> {
    let refs: Vec<&[u8]> = layers.iter().map(Vec::as_slice).collect();
    let config = config(&refs, architecture());
    let config_name = format!("{}.json", &digest(&config)[7..]);
    let mut archive = Archive::new();
    let mut names = Vec::new();
    for layer in layers {
        let name = format!("{}/layer.tar", &digest(layer)[7..]);
        archive = archive.dir(&digest(layer)[7..], 0o755).entry(
            tar::EntryType::Regular,
            &name,
            "",
            &crate::image_support::PLAIN,
            layer,
        );
        names.push(name);
    }
    let manifest = serde_json::json!([{"Config": config_name, "RepoTags": tags, "Layers": names}]);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("JSON is text");
    archive.file(&config_name, &text(&config)).file("manifest.json", &manifest.to_string()).end()
}

/// The files of an OCI layout with one image for each of `architectures`.
fn layout(layers: &[Vec<u8>], architectures: &[&str]) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![("oci-layout".to_owned(), br#"{"imageLayoutVersion": "1.0.0"}"#.to_vec())];
    let mut add = |bytes: Vec<u8>, kind: &str| {
        let descriptor = serde_json::json!({
            "digest": digest(&bytes),
            "size": bytes.len(),
            "mediaType": format!("application/vnd.oci.image.{kind}"),
        });
        files.push((format!("blobs/sha256/{}", &digest(&bytes)[7..]), bytes));
        descriptor
    };
    let refs: Vec<&[u8]> = layers.iter().map(Vec::as_slice).collect();
    let packed: Vec<_> = layers.iter().map(|layer| add(gzip(layer), "layer.v1.tar+gzip")).collect();
    let mut manifests = Vec::new();
    for architecture in architectures {
        let config = add(config(&refs, architecture), "config.v1+json");
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": packed,
        });
        let mut descriptor = add(manifest.to_string().into_bytes(), "manifest.v1+json");
        descriptor["platform"] = serde_json::json!({"os": "linux", "architecture": architecture});
        descriptor["annotations"] =
            serde_json::json!({"org.opencontainers.image.ref.name": format!("for-{architecture}")});
        manifests.push(descriptor);
    }
    let list = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    });
    let list = add(list.to_string().into_bytes(), "index.v1+json");
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [list]});
    files.push(("index.json".to_owned(), index.to_string().into_bytes()));
    files
}

#[tokio::test]
async fn a_root_tarball_becomes_an_image_however_it_is_packed() {
    let bench = Bench::new();
    for (name, bytes) in
        [("plain.tar", base()), ("packed.tgz", gzip(&base())), ("packed.zst", zstd(&base()))]
    {
        let image = bench.import("mine", &bench.put(name, &bytes)).await.expect("it imports");
        assert_eq!((&*image.name, &*image.digest), ("mine", &*digest(&base())));
        assert_eq!(bench.drawn(&image), ["etc: dir 755\netc/a: 644 a\netc/b: 644 b\n"]);
        let layer = bench.store.layer(&image.layers[0]).await.expect("it is sealed");
        assert_eq!((layer.files, layer.diff_id), (3, Some(digest(&base()) + "@root")));
    }
    assert_eq!(bench.images.list().await.expect("a list").len(), 1, "the name was replaced");
}

#[tokio::test]
async fn a_docker_archive_becomes_an_image() {
    let bench = Bench::new();
    let archive = docker_archive(&[base(), top()], &["mine:1"]);
    for (name, bytes) in [("saved.tar", archive.clone()), ("saved.tgz", gzip(&archive))] {
        let image = bench.import("mine:1", &bench.put(name, &bytes)).await.expect("it imports");
        assert_eq!(image.config.user.as_deref(), Some("app"));
        assert_eq!(image.config.cwd.as_deref(), Some("/srv"));
        assert_eq!(image.config.env["A"], "b");
        assert_eq!(
            bench.drawn(&image),
            [
                "etc: dir 755\netc/a: ~\netc/c: 644 c\n",
                "etc: dir 755\netc/a: 644 a\netc/b: 644 b\n",
            ]
        );
    }
    assert_eq!(bench.names("layers").len(), 2, "layers are shared");
    assert!(bench.tmp_empties(), "nothing is left over");
}

#[tokio::test]
async fn an_oci_layout_becomes_an_image_for_this_machine() {
    let bench = Bench::new();
    let files = layout(&[base(), top()], &["vax", architecture()]);
    let mut archive = Archive::new();
    for (name, bytes) in &files {
        bench.put(&format!("layout/{name}"), bytes);
        let plain = &crate::image_support::PLAIN;
        archive = archive.entry(tar::EntryType::Regular, &format!("./{name}"), "", plain, bytes);
    }
    let directory = bench.dir.path().join("files/layout");
    let packed = bench.put("layout.tar", &archive.end());
    let mut layers = Vec::new();
    for path in [directory, packed] {
        let image = bench.import("mine", &path).await.expect("it imports");
        assert_eq!(image.layers.len(), 2);
        assert_eq!(image.config.user.as_deref(), Some("app"));
        layers.push(image.layers);
    }
    assert_eq!(layers[0], layers[1], "layers are shared");
}

#[tokio::test]
async fn an_image_for_other_machines_is_refused() {
    let bench = Bench::new();
    for (name, bytes) in layout(&[base()], &["vax", "pdp11"]) {
        bench.put(&format!("layout/{name}"), &bytes);
    }
    let refused = bench.import("mine", &bench.dir.path().join("files/layout")).await;
    match refused {
        Err(ImageError::Platform { offered, .. }) => {
            assert_eq!(offered, ["linux/pdp11", "linux/vax"]);
        }
        other => panic!("{other:?}"),
    }
    assert!(bench.is_empty());
}

#[tokio::test]
async fn layers_are_shared_between_images_unless_they_borrow_from_others() {
    let bench = Bench::new();
    // Does not describe `private`, so it looks as in the image below.
    let borrows = Archive::new().file("private/new", "x").end();
    let mut images = Vec::new();
    for (name, mode) in [("a", 0o700), ("b", 0o711), ("again", 0o700)] {
        let bottom = Archive::new().dir("private", mode).end();
        let archive = docker_archive(&[bottom, borrows.clone()], &[]);
        let path = bench.put(&format!("{name}.tar"), &archive);
        images.push(bench.import(name, &path).await.expect("it imports"));
    }
    let mode = |image: &Image| picture(&bench.store.diff_dir(&image.layers[0]))["private"].clone();
    assert_eq!((&*mode(&images[0]), &*mode(&images[1])), ("dir 700", "dir 711"));
    assert_eq!(images[0].layers, images[2].layers);
    assert_eq!(bench.names("layers").len(), 4);
}

#[tokio::test]
async fn a_layer_that_hides_everything_is_the_bottom() {
    let bench = Bench::new();
    let clears = Archive::new().file(".wh..wh..opq", "").file("only", "x").end();
    let path = bench.put("x.tar", &docker_archive(&[base(), clears], &[]));
    let image = bench.import("mine", &path).await.expect("it imports");
    assert_eq!(bench.drawn(&image), ["only: 644 x\n"]);
}

#[tokio::test]
async fn what_cannot_be_imported_leaves_nothing() {
    let small = ImageSettings { largest_layer: Size(4096), ..Default::default() };
    let bench = Bench::with(small);
    let hostile = Archive::new().file("a", "a").file("../../x", "x").end();
    let large = Archive::new().file("a", &"x".repeat(10_000)).end();
    let mut wrong_layer = docker_archive(&[base(), hostile.clone()], &[]);
    let at = wrong_layer.windows(9).position(|w| w == b"../../x\0\0").expect("it is in there");
    wrong_layer[at..at + 7].copy_from_slice(b"aaaaaaa");
    let no_layer = Archive::new().file("manifest.json", r#"[{"Config": "x", "Layers": []}]"#).end();
    let other = |text: &str| Archive::new().file("index.json", text).end();
    for (case, bytes, message) in [
        ("text", b"hello".to_vec(), "no tar archive"),
        ("empty", Vec::new(), "it is empty"),
        ("no files", Archive::new().end(), "an empty archive"),
        ("cut", base()[..1500].to_vec(), "damaged"),
        ("hostile", hostile, "`..`"),
        ("large", large, "more than the 4.0 KiB that a layer may take"),
        ("tampered", wrong_layer, "damaged"),
        ("without config", no_layer, "it has no `x`"),
        ("no json", other("{"), "cannot be read"),
        ("no manifests", other("{}"), "neither layers nor images"),
        ("a stray digest", other(r#"{"manifests": [{"digest": "sha256:../../x"}]}"#), "digest"),
    ] {
        let error = bench.import("mine", &bench.put("x", &bytes)).await.expect_err(case);
        let said = error.to_string();
        assert!(said.contains(message), "{case}: {said}");
        assert!(bench.images.in_use().is_empty(), "{case}");
        // A sealed layer below a broken one waits for the store's collection.
        assert!(bench.names("images").is_empty() && bench.tmp_empties(), "{case}");
    }
    let sealed = bench.names("layers");
    assert!(sealed.len() <= 1, "only the good layer of the tampered image: {sealed:?}");
    let missing = bench.import("mine", Path::new("/no/such/file")).await;
    assert!(matches!(missing, Err(ImageError::Io { .. })), "{missing:?}");
}

#[tokio::test]
async fn a_layer_with_another_digest_than_promised_is_refused() {
    let bench = Bench::new();
    let mut files = layout(&[base()], &[architecture()]);
    let packed = format!("blobs/sha256/{}", &digest(&gzip(&base()))[7..]);
    for (name, bytes) in &mut files {
        if *name == packed {
            *bytes = gzip(&top());
        }
        bench.put(&format!("layout/{name}"), bytes);
    }
    let refused = bench.import("mine", &bench.dir.path().join("files/layout")).await;
    assert!(matches!(refused, Err(ImageError::Digest { .. })), "{refused:?}");
    assert!(bench.is_empty());
}

#[tokio::test]
async fn names_are_checked_and_unknown_ones_answered_with_what_there_is() {
    let bench = Bench::new();
    let path = bench.put("x.tar", &base());
    for name in ["host", "", "a b", "a\nb", &"x".repeat(300)] {
        let refused = bench.import(name, &path).await;
        assert!(matches!(refused, Err(ImageError::BadName { .. })), "{name}: {refused:?}");
    }
    for name in ["debian:12", "../../x", "registry.example:5000/a/b:1"] {
        bench.import(name, &path).await.expect("it imports");
        assert_eq!(bench.images.get(name).await.expect("it is there").name, name);
    }
    let same = bench.images.get("docker.io/library/debian:12").await.expect("the same image");
    assert_eq!(same.name, "debian:12");
    match bench.images.get("debain").await {
        Err(error @ ImageError::NotFound { .. }) => assert_eq!(
            error.to_string(),
            "there is no image `debain`; there are: ../../x, debian:12, registry.example:5000/a/b:1"
        ),
        other => panic!("{other:?}"),
    }
    bench.images.remove("debian:12").await.expect("it goes");
    assert!(bench.images.remove("debian:12").await.is_err(), "it is gone");
    assert_eq!(bench.names("layers").len(), 1, "shared, and the store's to collect");
}

#[tokio::test]
async fn the_host_image_is_made_once() {
    let root = TempDir::new().expect("a directory");
    fs::create_dir_all(root.path().join("usr/bin")).expect("ours");
    fs::write(root.path().join("usr/bin/tool"), "tool").expect("ours");
    let host = HostRoot { root: root.path().to_owned(), also: Vec::new() };
    let bench = Bench::with(ImageSettings { host, ..Default::default() });
    let silent = Reporter::silent();
    let (one, two) =
        tokio::join!(bench.images.host(false, &silent), bench.images.host(false, &silent));
    let one = one.expect("it is made");
    assert_eq!(two.expect("it is there"), one);
    fs::write(root.path().join("usr/bin/other"), "other").expect("ours");
    let again = bench.images.host(true, &silent).await.expect("it is made anew");
    assert_ne!((&again.digest, &again.layers), (&one.digest, &one.layers));
    assert!(bench.drawn(&again)[0].contains("usr/bin/other"));
    assert!(!bench.drawn(&one)[0].contains("usr/bin/other"), "the old layer is as it was");
}

/// Archives as other programs write them.
#[tokio::test]
async fn archives_of_skopeo_are_read() {
    let bench = Bench::new();
    for (name, bytes) in layout(&[base(), top()], &[architecture()]) {
        bench.put(&format!("layout/{name}"), &bytes);
    }
    let files = bench.dir.path().join("files");
    let ours = bench.import("ours", &files.join("layout")).await.expect("it imports");
    for (kind, name) in [("docker-archive", "docker.tar"), ("oci-archive", "oci.tar")] {
        let path = files.join(name);
        let copied = std::process::Command::new("skopeo")
            .args(["--insecure-policy", "copy", "--quiet"])
            .arg(format!("oci:{}", files.join("layout").display()))
            .arg(format!("{kind}:{}", path.display()))
            .output();
        let Ok(copied) = copied else {
            println!("SKIPPED archives_of_skopeo_are_read: skopeo is not installed");
            return;
        };
        assert!(copied.status.success(), "{copied:?}");
        let theirs = bench.import("theirs", &path).await.expect("it imports");
        assert_eq!((theirs.layers, theirs.config), (ours.layers.clone(), ours.config.clone()));
    }
}
