//! The damage suite: `fsck` distinguishes damage from leftovers, and misses nothing.
//!
//! An engine makes a data directory with everything in it. Each case damages a copy of it and compares
//! the verdict with the one that is right.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Engine, SetSecret, Stop};
use sandkeep_core::model::{Layer, LayerId, SandboxId, SnapshotId};
use sandkeep_core::store::{DigestVerdict, Durability, Store, missing_parts};
use sandkeep_testkit::db::drive;
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, name, of, ok, project, small};
use zeroize::Zeroizing;

/// What is right to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Right {
    /// Nothing that was acknowledged is damaged.
    Whole,
    /// The same, and something is in the way.
    Leftover,
    /// Something is damaged.
    Broken,
    /// Something is damaged, and only reading the files shows it.
    Unread,
}

/// Where things are.
struct Fixture {
    app: SandboxId,
    running: SandboxId,
    /// Of `app`, newest first.
    snapshots: Vec<SnapshotId>,
    drive: String,
    /// The topmost layer of `app`.
    top: LayerId,
    open: LayerId,
    /// The manifest of `app` after its first stop.
    older: Vec<u8>,
}

impl Fixture {
    fn sandbox(&self) -> String {
        format!("sandboxes/{}/sandbox.json", self.app)
    }

    fn snapshot(&self, number: usize) -> String {
        format!("snapshots/{}.json", self.snapshots[number])
    }

    fn manifests(&self) -> Vec<String> {
        vec![
            "projects/default.json".to_owned(),
            self.sandbox(),
            self.snapshot(0),
            self.snapshot(1),
            format!("drives/{}.json", self.drive),
            "secrets/default/TOKEN.json".to_owned(),
            "images/small.json".to_owned(),
            format!("layers/{}/layer.json", self.top),
        ]
    }

    fn file(&self) -> String {
        format!("layers/{}/diff/work/file", self.top)
    }
}

async fn stop(engine: &Engine, sandbox: &str) {
    engine.stop(&project(), &name(sandbox), Stop::default(), None).await.unwrap();
}

async fn build(house: &House) -> Fixture {
    let engine = house.open().await;
    let value = Zeroizing::new("hunter2hunter2".to_owned());
    let secret = SetSecret { value, hosts: None, places: None, tags: None };
    engine.set_secret(&project(), "TOKEN".parse().unwrap(), secret).await.unwrap();
    for sandbox in ["app", "other", "running"] {
        engine.create(&project(), small(sandbox), None).await.unwrap();
        ok(&engine, sandbox, "echo one > /work/file; echo one > /work/one").await;
    }
    stop(&engine, "other").await;
    stop(&engine, "app").await;
    let app = engine.get(&project(), &name("app")).await.unwrap().sandbox.id;
    let older = fs::read(house.data().join(format!("sandboxes/{app}/sandbox.json"))).unwrap();
    for line in ["echo two > /work/file", "echo three > /work/file"] {
        ok(&engine, "app", line).await;
        stop(&engine, "app").await;
    }
    let found = engine.snapshots(&project(), of("app"), &Page::all()).await.unwrap();
    let snapshots: Vec<_> = found.items.into_iter().map(|sized| sized.item).collect();
    let running = engine.get(&project(), &name("running")).await.unwrap().sandbox;
    house.close(engine).await;
    // With the last synced version beside it, a damaged one costs nothing.
    for entry in fs::read_dir(house.data().join("snapshots")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "last") {
            fs::remove_file(path).unwrap();
        }
    }
    let store = Store::open(&house.data()).unwrap();
    let data = drive("default", "data");
    store.write(&data, Durability::Synced).await.unwrap();
    for layer in store.scan::<Layer>().await.unwrap().good {
        store.record_digest(&layer.id, None).await.unwrap();
    }
    Fixture {
        app,
        running: running.id.clone(),
        top: snapshots[0].layers[0].clone(),
        snapshots: snapshots.into_iter().map(|snapshot| snapshot.id).collect(),
        drive: data.id.to_string(),
        open: running.open_layer().cloned().unwrap(),
        older,
    }
}

/// What `fsck`, and then reading everything, say about a data directory.
async fn verdict(data: &Path) -> (Right, String) {
    if !missing_parts(data).is_empty() {
        return (Right::Broken, "a part is missing".to_owned());
    }
    let store = Store::open(data).unwrap();
    let report = store.fsck().await.unwrap();
    let told = format!("{:?}", report.problems);
    if report.is_broken() {
        return (Right::Broken, told);
    }
    for layer in store.scan::<Layer>().await.unwrap().good {
        match store.verify(&layer.id, None).await.unwrap() {
            DigestVerdict::Damaged(differences) => {
                return (Right::Unread, format!("{differences:?}"));
            }
            DigestVerdict::Unknown | DigestVerdict::Intact => {}
        }
    }
    let clean = report.problems.is_empty();
    (if clean { Right::Whole } else { Right::Leftover }, told)
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// A record of a kind that `app` has.
fn record(data: &Path, fixture: &Fixture, kind: &str) -> PathBuf {
    let dir = data.join(format!("sandboxes/{}/{kind}", fixture.app));
    let mut files: Vec<PathBuf> =
        fs::read_dir(dir).unwrap().map(|one| one.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "json"));
    files.sort();
    files.swap_remove(0)
}

type Deed = Box<dyn Fn(&Path, &Fixture)>;

fn cases(fixture: &Fixture) -> Vec<(String, Deed, Right)> {
    let mut all: Vec<(String, Deed, Right)> = Vec::new();
    let mut case = |name: String, right: Right, deed: Deed| all.push((name, deed, right));
    case("nothing".into(), Right::Whole, Box::new(|_, _| {}));
    for file in fixture.manifests() {
        let at = |what: &str| format!("{file} {what}");
        let path = file.clone();
        case(
            at("empty"),
            Right::Broken,
            Box::new(move |data, _| fs::write(data.join(&path), "").unwrap()),
        );
        let path = file.clone();
        case(
            at("garbage"),
            Right::Broken,
            Box::new(move |data, _| fs::write(data.join(&path), [0xa5; 300]).unwrap()),
        );
        let path = file.clone();
        case(
            at("truncated"),
            Right::Broken,
            Box::new(move |data, _| {
                edit(&data.join(&path), |bytes| bytes.truncate(bytes.len() / 2));
            }),
        );
        let path = file.clone();
        case(
            at("with a flipped bit"),
            Right::Broken,
            Box::new(move |data, _| {
                edit(&data.join(&path), |bytes| {
                    let at = bytes.len() - 9;
                    bytes[at] ^= 1;
                });
            }),
        );
        let path = file.clone();
        case(
            at("of a later format"),
            Right::Broken,
            Box::new(move |data, _| {
                edit(&data.join(&path), |bytes| {
                    let text = String::from_utf8(bytes.clone()).unwrap();
                    *bytes = text.replacen("\"format\": 5", "\"format\": 99", 1).into_bytes();
                });
            }),
        );
    }
    for file in [
        "projects/default.json".to_owned(),
        fixture.sandbox(),
        fixture.snapshot(0),
        format!("layers/{}/layer.json", fixture.top),
    ] {
        case(
            format!("{file} missing"),
            Right::Broken,
            Box::new(move |data, _| fs::remove_file(data.join(&file)).unwrap()),
        );
    }
    for part in [
        "projects",
        "sandboxes",
        "snapshots",
        "drives",
        "secrets",
        "layers",
        "memory",
        "templates",
        "images",
        "aside",
    ] {
        case(
            format!("{part}/ missing"),
            Right::Broken,
            Box::new(move |data, _| fs::remove_dir_all(data.join(part)).unwrap()),
        );
    }
    case(
        "a whole sandbox missing".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::remove_dir_all(data.join(format!("sandboxes/{}", fixture.app))).unwrap();
        }),
    );
    case(
        "a power cut that undid the deletion of snapshots and not that of their sandbox".into(),
        Right::Whole,
        Box::new(|data, fixture| {
            let place = data.join(format!("sandboxes/{}", fixture.app));
            fs::rename(place, data.join(format!("trash/{}.1700000000000", fixture.app))).unwrap();
        }),
    );
    case(
        "the layer list edited".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            edit(&data.join(fixture.snapshot(0)), |bytes| {
                let mut text = String::from_utf8(bytes.clone()).unwrap();
                let line = format!("    \"{}\",\n", fixture.top);
                assert!(text.contains(&line));
                text = text.replacen(&line, "", 1);
                *bytes = text.into_bytes();
            });
        }),
    );
    case(
        "two manifests exchanged".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            let (a, b) = (data.join(fixture.snapshot(0)), data.join(fixture.snapshot(1)));
            let (first, second) = (fs::read(&a).unwrap(), fs::read(&b).unwrap());
            fs::write(a, second).unwrap();
            fs::write(b, first).unwrap();
        }),
    );
    case(
        "an older manifest put back".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::write(data.join(fixture.sandbox()), &fixture.older).unwrap();
        }),
    );
    case(
        "a layer missing".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::remove_dir_all(data.join(format!("layers/{}", fixture.top))).unwrap();
        }),
    );
    case(
        "the files of a layer missing".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::remove_dir_all(data.join(format!("layers/{}/diff", fixture.top))).unwrap();
        }),
    );
    case(
        "an open layer missing".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::remove_dir_all(data.join(format!("layers/{}", fixture.open))).unwrap();
        }),
    );
    case(
        "a file of a layer missing".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::remove_file(data.join(fixture.file())).unwrap();
        }),
    );
    case(
        "a file more in a layer".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::write(data.join(fixture.file()).with_extension("more"), "x").unwrap();
        }),
    );
    case(
        "a file of a layer shorter".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::write(data.join(fixture.file()), "thre").unwrap();
        }),
    );
    case(
        "a file of a layer with another mode".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::set_permissions(data.join(fixture.file()), fs::Permissions::from_mode(0o777))
                .unwrap();
        }),
    );
    case(
        "a file of a layer with another name".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            let path = data.join(fixture.file());
            fs::rename(&path, path.with_extension("x")).unwrap();
        }),
    );
    case(
        "a flipped bit in a file of a layer".into(),
        Right::Unread,
        Box::new(|data, fixture| {
            let path = data.join(fixture.file());
            let modified = fs::metadata(&path).unwrap().modified().unwrap();
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.write_all_at(b"T", 0).unwrap();
            file.set_modified(modified).unwrap();
        }),
    );
    for kind in ["sessions", "commands"] {
        case(
            format!("an empty record in {kind}"),
            Right::Leftover,
            Box::new(move |data, fixture| {
                fs::write(record(data, fixture, kind), "").unwrap();
            }),
        );
        case(
            format!("zeros for a record in {kind}"),
            Right::Leftover,
            Box::new(move |data, fixture| {
                fs::write(record(data, fixture, kind), [0; 700]).unwrap();
            }),
        );
        case(
            format!("a changed record in {kind}"),
            Right::Broken,
            Box::new(move |data, fixture| {
                edit(&record(data, fixture, kind), |bytes| {
                    let at = bytes.len() - 9;
                    bytes[at] ^= 1;
                });
            }),
        );
    }
    case(
        "a create that broke off".into(),
        Right::Whole,
        Box::new(|data, _| {
            fs::create_dir(data.join(format!("sandboxes/{}", SandboxId::fresh()))).unwrap();
        }),
    );
    case(
        "a create that broke off over its start".into(),
        Right::Leftover,
        Box::new(|data, fixture| {
            let dir = data.join(format!("sandboxes/{}", SandboxId::fresh()));
            fs::create_dir_all(dir.join("sessions")).unwrap();
            fs::write(dir.join("sandbox.json.next"), "").unwrap();
            let from = record(data, fixture, "sessions");
            fs::write(dir.join("sessions").join(from.file_name().unwrap()), "").unwrap();
        }),
    );
    case(
        "a layer that was begun".into(),
        Right::Leftover,
        Box::new(|data, _| {
            fs::create_dir_all(data.join(format!("layers/{}/diff", LayerId::fresh()))).unwrap();
        }),
    );
    case(
        "the manifest of a running sandbox missing".into(),
        Right::Broken,
        Box::new(|data, fixture| {
            fs::remove_file(data.join(format!("sandboxes/{}/sandbox.json", fixture.running)))
                .unwrap();
        }),
    );
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_is_right_in_every_case() {
    let house = house!();
    let fixture = build(&house).await;
    let mut wrong = Vec::new();
    let all = cases(&fixture);
    let count = all.len();
    for (case, deed, right) in all {
        let copy = house.path().join("copy");
        let status = Command::new("cp").args(["-a", "--"]).args([&house.data(), &copy]).status();
        assert!(status.unwrap().success());
        deed(&copy, &fixture);
        let (said, told) = verdict(&copy).await;
        if said != right {
            wrong.push(format!("{case}: {said:?} and not {right:?}: {told}"));
        }
        fs::remove_dir_all(&copy).unwrap();
    }
    assert!(count > 60, "{count}");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_restores_and_quarantines_and_deletes_nothing() {
    let house = house!();
    let fixture = build(&house).await;
    let data = house.data();
    let layer = data.join(format!("layers/{}", fixture.top));
    fs::create_dir_all(data.join("quarantine")).unwrap();
    fs::rename(&layer, data.join(format!("quarantine/layers+{}", fixture.top))).unwrap();
    let torn = record(&data, &fixture, "commands");
    fs::write(&torn, "").unwrap();
    let snapshot = data.join(fixture.snapshot(1));
    fs::write(&snapshot, "{").unwrap();
    fs::write(data.join("projects/default.json"), "").unwrap();
    let store = Store::open(&data).unwrap();
    let report = store.fsck().await.unwrap();
    let done = store.repair(&report).await.unwrap();
    assert_eq!(done.len(), 2, "{done:?}");
    assert!(layer.join("diff").is_dir() && !torn.exists());
    assert_eq!(fs::read_to_string(&snapshot).unwrap(), "{", "it may name layers: it stays");
    store.reset_project(&project()).await.unwrap();
    assert!(store.reset_project(&project()).await.is_err(), "nothing is wrong with it now");
    store.quarantine(&snapshot).await.unwrap();
    fs::remove_file(data.join(fixture.file())).unwrap();
    assert!(store.fsck().await.unwrap().is_broken());
    store.accept_layer(&fixture.top).await.unwrap();
    let report = store.fsck().await.unwrap();
    assert!(!report.is_broken(), "{report:?}");
    assert_eq!(store.verify(&fixture.top, None).await.unwrap(), DigestVerdict::Intact);
    let kept = fs::read_dir(data.join("quarantine")).unwrap().count();
    assert_eq!(kept, 4, "the record, the project, the snapshot and the digest");
    drop(store);
    let engine = house.open().await;
    let bound = engine.project_network(&project()).unwrap().bound;
    assert_eq!(bound.map(|bound| bound.mode), Some(sandkeep_core::model::Mode::DenyAll));
    house.close(engine).await;
}
