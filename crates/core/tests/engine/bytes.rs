//! What is hard to keep is kept: byte for byte through stops, forks, compaction and export.

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Create, Engine, Fork, Stop};
use sandkeep_core::model::{Patch, Size};
use sandkeep_core::store::image::Reporter;
use sandkeep_testkit::house::{House, name, of, project, sh, small, until};

/// Hard links, symlinks, holes, attributes, set-user-id, odd names, deleted and replaced things.
const TREE: &str = r#"set -e; mkdir -p /work/t/dir/deep && cd /work/t && echo hello > a && ln a dir/hard && ln -s /nowhere link
    dd if=/dev/zero of=sparse bs=1 count=1 seek=5000000 2>/dev/null; chmod 4755 a; chown 1000:1000 dir; mkfifo fifo
    printf x > "$(printf 'new\nline')"; printf y > "$(printf 'bad\377utf8')"
    : > "$(printf '%255s' | tr ' ' n)"; rm -r /home/user; echo now-a-file > /home/user; rm /etc/group
    rm -r /var; mkdir /var; echo fresh > /var/only; touch -d @1000000000 a"#;

const DIGEST: &str = r"cd / && { find work home etc var ! -name 'host*' ! -name resolv.conf -printf '%p %y %m %U %G %l %s %T@\n' | sed 's/^\(.* d .*\) [0-9]* [0-9.]*$/\1/';
    find work home etc var ! -name 'host*' ! -name resolv.conf -type f -exec sha256sum {} +; test work/t/a -ef work/t/dir/hard && echo linked; } | sort";

async fn digest(engine: &Engine, sandbox: &str) -> String {
    let ran = sh(engine, sandbox, DIGEST).await;
    assert_eq!(ran.command.exit_code, Some(0), "{}", ran.err);
    ran.out
}

/// Prints which lines differ, not both lists whole.
fn same(now: &str, expected: &str, when: &str) {
    let only = |these: &str, those: &str| -> Vec<String> {
        these
            .lines()
            .filter(|line| !those.lines().any(|other| other == *line))
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(
        (only(now, expected), only(expected, now)),
        (vec![], vec![]),
        "{when}: new lines, lines gone"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hard_tree_survives_everything() {
    let mut house = match House::new() {
        Ok(house) => house,
        Err(why) => return eprintln!("SKIPPED a_hard_tree_survives_everything: {why}"),
    };
    house.settings.chain_limit = 4;
    let engine = house.open().await;
    let app = name("app");
    let patch = Patch { keep_last: Some(None), ..small("app").patch };
    engine.create(&project(), Create { patch, ..small("app") }, None).await.unwrap();
    let made = sh(&engine, "app", TREE).await;
    assert_eq!(made.command.exit_code, Some(0), "{}", made.err);
    let expected = digest(&engine, "app").await;

    engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
    same(&digest(&engine, "app").await, &expected, "after a stop");
    let fork = Fork { name: Some(name("fork")), ..Fork::default() };
    engine.fork(&project(), &app, fork, None).await.unwrap();
    same(&digest(&engine, "fork").await, &expected, "in a fork");

    // One layer a session, until the chain is too long and becomes short again.
    for round in 0..6 {
        sh(
            &engine,
            "app",
            &format!(
                "rm -f /work/t/r*; mkdir -p /work/r; rm -r /work/r; echo {round} > /work/t/r{round}"
            ),
        )
        .await;
        engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
    }
    until("a chain of at most 4 layers", async || {
        let newest = Page { limit: 1, ..Page::default() };
        let newest = engine.snapshots(&project(), of("app"), &newest).await.unwrap();
        (newest.items[0].item.layers.len() <= 4).then_some(())
    })
    .await;
    sh(&engine, "app", "rm /work/t/r*").await;
    same(&digest(&engine, "app").await, &expected, "after compaction");

    let snapshot = engine
        .stop(&project(), &app, Stop::default(), None)
        .await
        .unwrap()
        .snapshot
        .unwrap()
        .item
        .id;
    let file = house.path().join("export.tar");
    let (sender, mut receiver) = tokio::sync::mpsc::channel(8);
    let export = engine.prepare_export(&project(), &snapshot).await.unwrap();
    let told = export.bytes();
    let sending = tokio::spawn(export.send(sender));
    let mut archive = Vec::new();
    while let Some(bytes) = receiver.recv().await {
        archive.extend_from_slice(&bytes);
    }
    sending.await.unwrap().unwrap();
    assert_eq!(archive.len() as u64, told);
    std::fs::write(&file, archive).unwrap();
    engine.images().import("exported", &file, &Reporter::silent()).await.unwrap();
    let mut again = small("again");
    again.patch.image = Some("exported".to_owned());
    engine.create(&project(), again, None).await.unwrap();
    same(&digest(&engine, "again").await, &expected, "after export and import");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_cannot_fill_the_disk() {
    let house = match House::new() {
        Ok(house) => house,
        Err(why) => return eprintln!("SKIPPED a_sandbox_cannot_fill_the_disk: {why}"),
    };
    let engine = house.open().await;
    let mut request = small("greedy");
    request.patch.disk = Some(Size(64 << 20));
    engine.create(&project(), request, None).await.unwrap();
    let one = sh(&engine, "greedy", "trap '' XFSZ; dd if=/dev/zero of=/work/one bs=1M count=100; ls -s --block-size=1M /work/one").await;
    assert!(one.err.contains("File too large"), "one file is bounded by the kernel: {}", one.err);
    // Many files are bounded by the reaper: the command does not get to its end.
    let many = sh(&engine, "greedy", "i=0; while [ $i -lt 400 ]; do dd if=/dev/zero of=/work/f$i bs=1M count=10 2>/dev/null; i=$((i+1)); sleep 0.02; done; echo done").await;
    assert_ne!(many.command.exit_code, Some(0));
    assert_eq!(many.out, "");
    // What it wrote exists, and can be cleaned up.
    let cleaned = sh(&engine, "greedy", "rm -f /work/f* /work/one; echo clean").await;
    assert_eq!(cleaned.out, "clean\n", "{cleaned:?}");
    engine.stop(&project(), &name("greedy"), Stop::default(), None).await.unwrap();
}
