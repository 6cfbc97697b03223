//! What a session wrote is searched before it is sealed, on the real driver: what is refused, what
//! continues, and what a decision does.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use sandkeep_core::engine::{
    Checkpoint, CreateDrive, Delete, Engine, Error, Exec, Fork, SetSecret, Stop, Stopped,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    Because, Decision, Finding, FindingKind, GuardPatch, Inject, InjectInto, Mount, MountMode,
    OnJunk, OnSecret, Patch, Place, SessionEnd, Size, Span,
};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, holding, name, project, sh, small};
use zeroize::Zeroizing;

const VALUE: &str = "tok_1234567890abcdef-XYZ";

/// An engine with a sandbox `app` that has run a command with a secret.
async fn given(house: &House, patch: Patch, script: &str) -> Engine {
    let engine = house.open().await;
    let set = SetSecret {
        value: Zeroizing::new(VALUE.to_owned()),
        hosts: None,
        places: None,
        tags: None,
    };
    engine.set_secret(&project(), "TOKEN".parse().unwrap(), set).await.unwrap();
    let mut create = small("app");
    create.patch = Patch { image: create.patch.image, ..patch };
    engine.create(&project(), create, None).await.unwrap();
    with_secret(&engine, script).await;
    engine
}

async fn with_secret(engine: &Engine, script: &str) {
    let exec = Exec {
        argv: ["sh", "-c", script].map(str::to_owned).to_vec(),
        inject: vec![Inject {
            secret: "TOKEN".parse().unwrap(),
            into: InjectInto::Env("TOKEN".to_owned()),
        }],
        ..Exec::default()
    };
    let mut started = engine.exec(&project(), &name("app"), exec).await.expect("it starts");
    while started.events.next().await.is_some() {}
    // Long enough ago for a look at the running session to be believed.
    tokio::time::sleep(Duration::from_millis(50)).await;
}

fn policy(secrets: OnSecret) -> Patch {
    let guard = GuardPatch { secrets: Some(secrets), ..GuardPatch::default() };
    Patch { guard, ..Patch::default() }
}

async fn stop(engine: &Engine, decision: Decision) -> Result<Stopped, Error> {
    engine.stop(&project(), &name("app"), Stop { decision, ..Stop::default() }, None).await
}

fn guarded<T: std::fmt::Debug>(outcome: Result<T, Error>) -> (Vec<Finding>, bool) {
    match outcome {
        Err(error @ Error::Guarded { .. }) => {
            assert!(!format!("{error:?} {error} {:?}", error.hint()).contains(VALUE), "{error}");
            let Error::Guarded { findings, goes_on, .. } = error else { unreachable!() };
            (findings, goes_on)
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// Where the value is under a directory.
fn leaks(dir: &Path) -> Vec<String> {
    holding(dir, VALUE)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_is_refused_and_the_session_goes_on() {
    let house = house!();
    let engine = given(&house, Patch::default(), "echo key=$TOKEN > /work/.env; echo hi").await;
    sh(&engine, "app", "echo clean > /work/other; sleep 1000 & echo $! > /tmp/pid").await;
    let (found, goes_on) = guarded(stop(&engine, Decision::default()).await);
    assert!(goes_on);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].kind, found[0].place), (FindingKind::Secret, Some(Place::Contents)));
    assert_eq!((&*found[0].path, found[0].secret.as_deref()), ("/work/.env", Some("TOKEN")));
    assert_eq!(found[0].offset, Some(4));
    assert_eq!(found[0].commands[0].because, Because::GivenAndRunning, "{found:?}");
    // No process inside noticed it, and nothing else seals it either.
    let alive = sh(&engine, "app", "cat /work/other; kill -0 $(cat /tmp/pid) && echo alive").await;
    assert_eq!(alive.out, "clean\nalive\n");
    let checkpoint = engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await;
    assert!(guarded(checkpoint).1);
    let fork = engine.fork(&project(), &name("app"), Fork::default(), None).await;
    assert!(guarded(fork).1);
    sh(&engine, "app", "kill -9 $(cat /tmp/pid)").await;
    let idle = engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await;
    assert!(guarded(idle).1, "also when the root could be exchanged");
    let state = engine.get(&project(), &name("app")).await.unwrap().sandbox;
    assert_eq!((state.phase(), state.generation), (Phase::Running, 0));

    // Mended by hand, it stops.
    sh(&engine, "app", "rm /work/.env").await;
    let done = stop(&engine, Decision::default()).await.unwrap();
    assert_eq!((done.sandbox.generation, done.findings), (1, vec![]));
    assert_eq!(leaks(&house.data().join("layers")), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn redact_masks_and_archives_must_be_dropped() {
    let house = house!();
    // The small root has no gzip and no base64.
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(VALUE.as_bytes()).unwrap();
    let packed: String = gzip.finish().unwrap().iter().map(|b| format!("\\{b:03o}")).collect();
    let encoded = STANDARD.encode(format!("x{VALUE}"));
    let script = format!(
        "echo $TOKEN > /work/a; printf '{packed}' > /work/b.gz; mkdir /work/$TOKEN; \
         ln -s $TOKEN /work/l; echo {encoded} > /work/c"
    );
    let engine = given(&house, Patch::default(), &script).await;
    let redact = Decision { redact: true, ..Decision::default() };
    let (found, goes_on) = guarded(stop(&engine, redact.clone()).await);
    assert!(goes_on, "before anything was masked");
    assert_eq!(found.iter().map(|one| &*one.path).collect::<Vec<_>>(), ["/work/b.gz"]);
    assert_eq!(sh(&engine, "app", "cat /work/a").await.out.trim().len(), VALUE.len());
    let both = Decision { drop: vec!["*.gz".to_owned()], ..redact };
    let done = stop(&engine, both).await.unwrap();
    assert_eq!(done.sandbox.generation, 1);
    assert_eq!(leaks(&house.data().join("layers")), Vec::<String>::new());
    let stars = "*".repeat(VALUE.len());
    assert!(!sh(&engine, "app", "cat /work/c").await.out.contains(&encoded[4..16]));
    let seen = sh(&engine, "app", "ls /work; cat /work/a; readlink /work/l").await.out;
    assert_eq!(seen, format!("{stars}\na\nc\nl\n{stars}\n{stars}\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ends_by_itself_stays_unsealed_until_somebody_decides() {
    let house = house!();
    let patch = Patch { session_timeout: Some(Some(Span::seconds(2))), ..Patch::default() };
    let engine = given(&house, patch, "echo $TOKEN > /work/a; echo kept > /work/b").await;
    let ended = async {
        loop {
            let now = engine.get(&project(), &name("app")).await.unwrap().sandbox;
            if now.phase() == Phase::Failed {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(30), ended).await.unwrap();
    assert_eq!((ended.generation, ended.guarded().len()), (0, 1), "{ended:?}");
    assert!(ended.failure().unwrap().contains("/work/a (TOKEN)"), "{:?}", ended.failure());
    assert!(ended.open_layer().is_some());
    for _ in 0..2 {
        let (found, goes_on) = guarded(engine.start(&project(), &name("app"), None).await);
        assert!(!goes_on && found.len() == 1, "never from something older");
    }
    // Also for the next daemon, and after a change of mind.
    let engine = house.reopen(engine).await;
    assert!(!guarded(stop(&engine, Decision::default()).await).1);
    assert!(
        guarded(engine.fork(&project(), &name("app"), Fork::default(), None).await).0.len() == 1
    );
    let redact = Decision { redact: true, ..Decision::default() };
    let done = stop(&engine, redact).await.unwrap();
    assert_eq!((done.sandbox.phase(), done.sandbox.generation), (Phase::Stopped, 1));
    assert!(done.sandbox.guarded().is_empty() && done.sandbox.failure().is_none());
    assert_eq!(done.session.unwrap().end, Some(SessionEnd::Interrupted));
    assert_eq!(leaks(&house.data().join("layers")), Vec::<String>::new());
    assert_eq!(sh(&engine, "app", "cat /work/b").await.out, "kept\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn discard_gives_up_what_the_session_wrote_and_no_more() {
    let house = house!();
    let engine = given(&house, Patch::default(), "true").await;
    sh(&engine, "app", "echo old > /work/a").await;
    stop(&engine, Decision::default()).await.unwrap();
    with_secret(&engine, "echo $TOKEN > /work/a").await;
    let discard = Decision { discard: true, ..Decision::default() };
    let done = stop(&engine, discard).await.unwrap();
    assert_eq!((done.sandbox.generation, done.sandbox.phase()), (1, Phase::Stopped));
    assert_eq!(sh(&engine, "app", "cat /work/a").await.out, "old\n");
    let both = Decision { discard: true, redact: true, ..Decision::default() };
    assert!(matches!(stop(&engine, both).await, Err(Error::Config(bad)) if bad.field == "discard"));
}

#[tokio::test(flavor = "multi_thread")]
async fn quarantine_keeps_files_aside_and_shows_nothing_older() {
    let house = house!();
    let engine = given(&house, policy(OnSecret::Quarantine), "true").await;
    sh(&engine, "app", "echo old > /work/a; echo other > /work/b").await;
    stop(&engine, Decision::default()).await.unwrap();
    with_secret(&engine, "echo $TOKEN > /work/a; echo $TOKEN > /work/n; echo new > /work/b").await;
    let done = stop(&engine, Decision::default()).await.unwrap();
    let paths: Vec<_> = done.findings.iter().map(|one| &*one.path).collect();
    assert_eq!(paths, ["/work/a", "/work/n"]);
    let snapshot = done.snapshot.unwrap().item;
    assert_eq!(snapshot.findings.len(), 2, "on record too");
    assert_eq!(sh(&engine, "app", "ls /work; cat /work/b").await.out, "b\nnew\n");
    assert_eq!(leaks(&house.data().join("layers")), Vec::<String>::new());
    let aside = engine.quarantines().await.unwrap();
    assert_eq!((aside.len(), &aside[0].id, aside[0].files.len()), (1, &snapshot.id, 2));
    assert_eq!(leaks(&house.data().join("aside")).len(), 2);
    assert!(engine.usage(None).await.unwrap().quarantine > 0);
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    assert!(engine.quarantines().await.unwrap().is_empty(), "it goes with the sandbox");
}

#[tokio::test(flavor = "multi_thread")]
async fn warn_seals_and_tells() {
    let house = house!();
    let engine = given(&house, policy(OnSecret::Warn), "echo $TOKEN > /work/a").await;
    let done = stop(&engine, Decision::default()).await.unwrap();
    assert_eq!((done.sandbox.generation, done.findings.len()), (1, 1));
    assert_eq!(done.snapshot.unwrap().item.findings, done.findings);
}

#[tokio::test(flavor = "multi_thread")]
async fn drives_are_guarded_and_a_delete_loses_nothing() {
    let house = house!();
    let engine = house.open().await;
    let drive = CreateDrive { name: name("data"), max_size: None, notes: Default::default() };
    engine.create_drive(&project(), drive).await.unwrap();
    engine.shutdown().await;
    drop(engine);
    let mount = Mount { drive: name("data"), mode: MountMode::ReadWrite };
    let mounts = Some([("/data".to_owned(), mount)].into());
    let patch = Patch { mounts, ..Patch::default() };
    let engine = given(&house, patch, "echo $TOKEN > /data/s; echo fine > /data/f").await;
    let (found, _) = guarded(stop(&engine, Decision::default()).await);
    assert_eq!(found[0].path, "/data/s");
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    let aside = engine.quarantines().await.unwrap();
    assert_eq!(aside.len(), 1, "what was written to a drive outlives the sandbox");
    assert!(aside[0].drive.is_some() && aside[0].files[0].shown == "/data/s");
    assert_eq!(leaks(&house.data().join("layers")), Vec::<String>::new());
    engine.remove_quarantine(&aside[0].id).await.unwrap();
    let gone = engine.remove_quarantine(&aside[0].id).await;
    assert!(matches!(gone, Err(Error::NoQuarantine(_))), "{gone:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_is_gone_holds_up_no_delete() {
    let house = house!();
    let engine = house.open().await;
    let drive = CreateDrive { name: name("data"), max_size: None, notes: Default::default() };
    engine.create_drive(&project(), drive).await.unwrap();
    engine.shutdown().await;
    drop(engine);
    let mount = Mount { drive: name("data"), mode: MountMode::ReadWrite };
    let mounts = Some([("/data".to_owned(), mount)].into());
    let patch = Patch { mounts, ..Patch::default() };
    let engine = given(&house, patch, "echo kept-on-the-drive > /data/f").await;
    engine.delete_secret(&project(), &"TOKEN".parse().unwrap()).await.unwrap();
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    assert_eq!(
        holding(&house.data().join("layers"), "kept-on-the-drive").len(),
        1,
        "the drive has its file"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn large_files_and_junk_are_told_or_decided_about() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let large = Some(Size(2 << 20));
    let update = |junk| Patch {
        guard: GuardPatch { junk: Some(junk), large, ..GuardPatch::default() },
        ..Patch::default()
    };
    engine.update(&project(), &name("app"), update(OnJunk::Warn)).await.unwrap();
    let write = "head -c 3000000 /dev/urandom > /work/big; mkdir -p /work/.cache; \
                 head -c 1500000 /dev/urandom > /work/.cache/x";
    sh(&engine, "app", write).await;
    let told = stop(&engine, Decision::default()).await.unwrap().findings;
    let told: Vec<_> = told.iter().map(|one| (&*one.path, one.kind)).collect();
    assert_eq!(told, [("/work/.cache", FindingKind::Junk), ("/work/big", FindingKind::Large)]);
    engine.update(&project(), &name("app"), update(OnJunk::PromoteOrDrop)).await.unwrap();
    sh(&engine, "app", &format!("mkdir /two; {}", write.replace("/work", "/two"))).await;
    let (found, goes_on) = guarded(stop(&engine, Decision::default()).await);
    assert!(goes_on && found.len() == 2, "{found:?}");
    let half = Decision { promote: vec!["/two/big".to_owned()], ..Decision::default() };
    assert_eq!(guarded(stop(&engine, half.clone()).await).0.len(), 1);
    let whole = Decision { drop: vec![".cache".to_owned()], ..half };
    stop(&engine, whole).await.unwrap();
    let seen = sh(&engine, "app", "ls -A /two; ls /work/.cache").await.out;
    assert_eq!(seen, "big\nx\n", "what was sealed before is not dropped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_comes_back_knows_what_a_session_was_given() {
    let house = house!();
    let engine = given(&house, Patch::default(), "echo $TOKEN > /work/a").await;
    let engine = house.reopen(engine).await;
    let now = engine.get(&project(), &name("app")).await.unwrap();
    assert_eq!(now.sandbox.phase(), Phase::Running, "adopted");
    assert_eq!(now.session.unwrap().secrets.len(), 1);
    assert!(guarded(stop(&engine, Decision::default()).await).1);
    // A machine that dies is not sealed.
    use sandkeep_core::driver::Driver as _;
    let key = sandkeep_core::model::MachineKey::from(&now.sandbox.id);
    house.driver().stop(&key).await.unwrap();
    let dead = async {
        while engine.get(&project(), &name("app")).await.unwrap().sandbox.phase() != Phase::Failed {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), dead).await.unwrap();
    assert!(!guarded(engine.start(&project(), &name("app"), None).await).1);
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
}
