//! Forks that come back: differences of two points, promotion, merges, other names.

use sandkeep_core::db::Page;
use sandkeep_core::engine::{
    Create, Delete, DiffRequest, Difference, Engine, Error, ErrorKind, Fork, MergeRequest, Merged,
    PatchOptions, Promote, Promoted, Stop,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    BroughtBack, DiffKind, ForkFate, GuardPatch, Name, OnAccept, OnJunk, Patch, Sandbox, SandboxId,
    Size, SnapshotKind,
};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, labelled, machine, name, of, ok, project, small};

async fn app(engine: &Engine) {
    engine.create(&project(), small("app"), None).await.unwrap();
    ok(engine, "app", "mkdir -p /srv; seq 1 9 > /srv/lines; echo old > /srv/file").await;
    stop(engine, "app").await;
}

async fn stop(engine: &Engine, sandbox: &str) {
    engine.stop(&project(), &name(sandbox), Stop::default(), None).await.unwrap();
}

async fn fork(engine: &Engine, source: &str, fork: &str) {
    let request = Fork { name: Some(name(fork)), ..Fork::default() };
    engine.fork(&project(), &name(source), request, None).await.unwrap();
}

async fn get(engine: &Engine, sandbox: &str) -> Sandbox {
    engine.get(&project(), &name(sandbox)).await.unwrap().sandbox
}

async fn diff_of(
    engine: &Engine,
    from: &str,
    to: &str,
    paths: &[&str],
) -> Result<Difference, Error> {
    let paths = paths.iter().map(|path| (*path).to_owned()).collect();
    let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
    engine.diff(&project(), DiffRequest { from, to, paths, limit: 100 }).await
}

/// `A /srv/new` and so on.
async fn diff(engine: &Engine, from: &str, to: &str) -> Vec<String> {
    let found = diff_of(engine, from, to, &[]).await.unwrap();
    let line = |entry: &sandkeep_core::model::DiffEntry| {
        let letter = match entry.change {
            DiffKind::Added => 'A',
            DiffKind::Removed => 'D',
            DiffKind::Modified => 'M',
            DiffKind::Renamed => 'R',
        };
        format!("{letter} {}", entry.path)
    };
    let shown = |line: &String| !line.ends_with("/srv");
    found.tree.entries().iter().map(line).filter(shown).collect()
}

async fn promote(engine: &Engine, fork: &str) -> Result<Promoted, Error> {
    engine.promote(&project(), &name(fork), Promote::default(), None).await
}

fn into(target: &str) -> MergeRequest {
    MergeRequest { into: Some(name(target)), ..MergeRequest::default() }
}

async fn merge(engine: &Engine, source: &str, request: MergeRequest) -> Result<Merged, Error> {
    engine.merge(&project(), &name(source), request).await
}

async fn cat(engine: &Engine, sandbox: &str, path: &str) -> String {
    ok(engine, sandbox, &format!("cat {path}")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn points_are_compared_and_nothing_is_started() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "try").await;
    assert!(diff(&engine, "app", "try").await.is_empty());
    assert_eq!(get(&engine, "try").await.phase(), Phase::Stopped);
    ok(&engine, "try", "echo 1 > /srv/one; rm /srv/file").await;
    let checkpoint = engine.checkpoint(&project(), &name("try"), labelled("green")).await.unwrap();
    ok(&engine, "try", "echo 2 > /srv/two").await;
    let live = ["D /srv/file", "A /srv/one", "A /srv/two"];
    assert_eq!(diff(&engine, "app", "try").await, live, "it runs");
    assert_eq!(diff(&engine, "try@base", "try").await, live);
    assert_eq!(diff(&engine, "try@saved", "try").await, ["A /srv/two"]);
    let green = ["D /srv/file", "A /srv/one"];
    assert_eq!(diff(&engine, "app", "try@green").await, green);
    assert_eq!(diff(&engine, "app@saved", checkpoint.item.id.as_str()).await, green);
    let added = diff(&engine, "image:small", "app").await;
    assert_eq!(added, ["A /srv/file", "A /srv/lines"]);
    assert_eq!(diff(&engine, "app@base", "app").await, added, "it began as its image");
    let only = diff_of(&engine, "app", "try", &["/srv/one"]).await.unwrap();
    assert_eq!(only.tree.counts.added, 1);
    assert!(only.to.1, "files of one that runs may change meanwhile");
    assert_eq!(get(&engine, "app").await.phase(), Phase::Stopped, "it was not started");
    stop(&engine, "try").await;
    assert_eq!(diff(&engine, "app", "try").await, live);
    for (from, code) in [
        ("nobody", "sandbox_not_found"),
        ("app@yellow", "label_not_found"),
        ("snp-01k00000000000000000000000", "snapshot_not_found"),
        ("image:nothing", "image_not_found"),
    ] {
        let refused = diff_of(&engine, from, "app", &[]).await.unwrap_err();
        assert_eq!(refused.code(), code, "{from}: {refused}");
        assert!(refused.hint().is_some() || code != "label_not_found", "{refused}");
    }
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_patch_is_what_git_applies() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "try").await;
    ok(&engine, "try", "sed -i 's/5/five/' /srv/lines; chmod +x /srv/file; echo n > /srv/new")
        .await;
    let there = house.path().join("patched");
    std::fs::create_dir(&there).unwrap();
    let lines: String = (1..10).map(|n| format!("{n}\n")).collect();
    std::fs::write(there.join("lines"), lines).unwrap();
    std::fs::write(there.join("file"), "old\n").unwrap();
    let (into, mut pieces) = tokio::sync::mpsc::channel(4);
    let request = DiffRequest {
        from: "app".parse().unwrap(),
        to: "try".parse().unwrap(),
        paths: Vec::new(),
        limit: 1,
    };
    let how = PatchOptions { relative: b"srv".to_vec(), ..PatchOptions::default() };
    let work = engine.clone();
    let writing =
        tokio::spawn(async move { work.write_patch(&project(), request, how, into).await });
    let mut patch = Vec::new();
    while let Some(piece) = pieces.recv().await {
        patch.extend_from_slice(&piece);
    }
    writing.await.unwrap().unwrap();
    let file = house.path().join("patch");
    std::fs::write(&file, patch).unwrap();
    let git = std::process::Command::new("git")
        .args(["apply", "--unsafe-paths"])
        .arg(&file)
        .current_dir(&there)
        .output()
        .unwrap();
    assert!(git.status.success(), "{}", String::from_utf8_lossy(&git.stderr));
    let read = |name: &str| std::fs::read_to_string(there.join(name)).unwrap();
    assert_eq!(read("new"), "n\n");
    assert!(read("lines").contains("\nfive\n"));
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_becomes_what_its_fork_is_and_can_go_back() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    let before = get(&engine, "app").await;
    fork(&engine, "app", "try").await;
    ok(&engine, "try", "echo new > /srv/file").await;
    // The fork runs, and so does the origin, which has changed nothing.
    engine.start(&project(), &name("app"), None).await.unwrap();
    let promoted = promote(&engine, "try").await.unwrap();
    assert_eq!(promoted.sandbox.generation, before.generation + 1);
    assert_eq!(promoted.before.as_ref().map(|one| &one.id), before.current.as_ref());
    assert_eq!(cat(&engine, "app", "/srv/file").await, "new\n");
    assert!(diff(&engine, "app", "try").await.is_empty());
    let tried = get(&engine, "try").await;
    let outcome = tried.outcome.expect("its fate is on record");
    assert_eq!((outcome.how, outcome.into.as_str()), (BroughtBack::Promoted, "app"));
    assert_eq!(outcome.generation, before.generation + 1);
    // Once more, after a restart: it exists already.
    stop(&engine, "app").await;
    stop(&engine, "try").await;
    let engine = house.reopen(engine).await;
    assert!(get(&engine, "try").await.outcome.is_some());
    let again = promote(&engine, "try").await.unwrap();
    assert_eq!(again.sandbox.current, promoted.sandbox.current);
    // Further work of the fork is promoted to what the origin is now.
    ok(&engine, "try", "echo newer > /srv/file").await;
    let newer = promote(&engine, "try").await.unwrap();
    assert_eq!(cat(&engine, "app", "/srv/file").await, "newer\n");
    // What it had exists for a rollback.
    let back = promoted.before.unwrap().id;
    engine.rollback(&project(), &name("app"), &back, None).await.unwrap();
    assert_eq!(cat(&engine, "app", "/srv/file").await, "old\n");
    assert!(newer.sandbox.generation > promoted.sandbox.generation);
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_that_moved_on_is_not_overwritten() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    for one in ["try-a", "try-b", "try-c"] {
        fork(&engine, "app", one).await;
        ok(&engine, one, &format!("echo {one} > /srv/{one}")).await;
        stop(&engine, one).await;
    }
    // It runs and has changed a file.
    ok(&engine, "app", "echo mine > /srv/file").await;
    let refused = promote(&engine, "try-a").await.unwrap_err();
    assert_eq!(refused.code(), "origin_moved_on", "{refused}");
    assert_eq!(refused.kind(), ErrorKind::Conflict);
    assert_eq!(cat(&engine, "app", "/srv/file").await, "mine\n", "its session goes on");
    ok(&engine, "app", "echo old > /srv/file").await;
    let (one, other) = tokio::join!(promote(&engine, "try-a"), promote(&engine, "try-b"));
    let lost = match (one, other) {
        (Ok(_), Err(error)) | (Err(error), Ok(_)) => error,
        both => panic!("one wins: {both:?}"),
    };
    assert_eq!(lost.code(), "origin_moved_on", "{lost}");
    assert!(lost.hint().is_some_and(|hint| hint.contains("merge")), "{:?}", lost.hint());
    // The others can be merged, or promoted by somebody who knows.
    merge(&engine, "try-c", into("app")).await.unwrap();
    assert_eq!(cat(&engine, "app", "/srv/try-c").await, "try-c\n");
    stop(&engine, "app").await;
    let generation = get(&engine, "app").await.generation;
    let knowing = Promote { expect_generation: Some(generation) };
    engine.promote(&project(), &name("try-b"), knowing, None).await.unwrap();
    assert_eq!(ok(&engine, "app", "ls /srv").await, "file\nlines\ntry-b\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_both_sides_are_merged_or_nothing_is() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "try").await;
    ok(&engine, "try", "sed -i 's/^1$/one/' /srv/lines; echo theirs > /srv/new").await;
    ok(&engine, "app", "sed -i 's/^9$/nine/' /srv/lines; echo mine > /srv/mine").await;
    let session = get(&engine, "app").await.session;
    let dry = MergeRequest { dry_run: true, ..into("app") };
    let would = merge(&engine, "try", dry.clone()).await.unwrap();
    assert_eq!((would.outcome.counts.added, would.outcome.counts.merged), (1, 1));
    assert!(would.snapshot.is_none());
    let merged = merge(&engine, "try", MergeRequest::default()).await.unwrap();
    assert_eq!(merged.snapshot.as_ref().map(|one| one.kind), Some(SnapshotKind::Merge));
    let lines = cat(&engine, "app", "/srv/lines").await;
    assert!(lines.starts_with("one\n2\n") && lines.ends_with("8\nnine\n"), "{lines}");
    assert_eq!(ok(&engine, "app", "cat /srv/new /srv/mine").await, "theirs\nmine\n");
    assert_ne!(get(&engine, "app").await.session, session, "it was stopped for that");
    assert_eq!(get(&engine, "try").await.outcome.map(|one| one.how), Some(BroughtBack::Merged));

    // The next merge begins where this one ended: what was merged is no conflict.
    ok(&engine, "try", "echo more >> /srv/new").await;
    ok(&engine, "app", "sed -i 's/^one$/ONE/' /srv/lines").await;
    merge(&engine, "try", MergeRequest::default()).await.unwrap();
    assert_eq!(
        ok(&engine, "app", "cat /srv/new; head -n1 /srv/lines").await,
        "theirs\nmore\nONE\n"
    );
    let nothing = merge(&engine, "try", MergeRequest::default()).await.unwrap();
    assert!(nothing.snapshot.is_none(), "there is nothing left to merge");

    // A conflict: nothing is changed, and a running session continues.
    ok(&engine, "try", "echo theirs > /srv/file; echo fine > /srv/fine").await;
    ok(&engine, "app", "echo ours > /srv/file").await;
    let session = get(&engine, "app").await.session;
    let refused = merge(&engine, "try", MergeRequest::default()).await.unwrap_err();
    let Error::MergeConflicts { conflicts, .. } = &refused else { panic!("{refused}") };
    assert_eq!(conflicts[0].path, "/srv/file");
    assert_eq!(refused.code(), "merge_conflicts");
    assert_eq!(
        ok(&engine, "app", "cat /srv/file; ls /srv").await,
        "ours\nfile\nlines\nmine\nnew\n"
    );
    assert_eq!(get(&engine, "app").await.session, session);
    let would = merge(&engine, "try", dry).await.unwrap();
    assert_eq!(would.outcome.counts.conflicts, 1);

    // Chosen paths only, then both versions.
    let only = MergeRequest { only: vec!["/srv/fine".to_owned()], ..MergeRequest::default() };
    merge(&engine, "try", only).await.unwrap();
    assert_eq!(ok(&engine, "app", "cat /srv/fine /srv/file").await, "fine\nours\n");
    let keep = MergeRequest { keep_both: true, ..MergeRequest::default() };
    merge(&engine, "try", keep).await.unwrap();
    let both = ok(&engine, "app", "cat /srv/file /srv/file.from-try").await;
    assert_eq!(both, "ours\ntheirs\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_kept_beside_ours_replaces_nothing() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    ok(&engine, "app", "echo precious > /srv/file.from-try").await;
    stop(&engine, "app").await;
    fork(&engine, "app", "try").await;
    ok(&engine, "try", "echo theirs > /srv/file").await;
    ok(&engine, "app", "echo ours > /srv/file").await;
    let keep = MergeRequest { keep_both: true, ..MergeRequest::default() };
    let refused = merge(&engine, "try", keep).await.unwrap_err();
    assert_eq!(refused.code(), "merge_conflicts", "{refused}");
    assert_eq!(cat(&engine, "app", "/srv/file.from-try").await, "precious\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_common_past_is_not_merged() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    engine.create(&project(), small("other"), None).await.unwrap();
    let code = |refused: Result<Merged, Error>| refused.unwrap_err().code().to_owned();
    assert_eq!(code(merge(&engine, "other", into("app")).await), "unrelated");
    assert_eq!(code(merge(&engine, "app", into("app")).await), "invalid");
    assert_eq!(code(merge(&engine, "app", MergeRequest::default()).await), "not_a_fork");
    assert_eq!(code(merge(&engine, "app", into("nobody")).await), "sandbox_not_found");
    let globs = MergeRequest { only: vec!["a/[".to_owned()], ..into("app") };
    assert_eq!(code(merge(&engine, "other", globs).await), "invalid");
    let refused = promote(&engine, "app").await.unwrap_err();
    assert_eq!(refused.code(), "not_a_fork");

    // Two forks of one origin have a common past, also when the origin is gone.
    for one in ["try-a", "try-b"] {
        fork(&engine, "app", one).await;
        ok(&engine, one, &format!("echo {one} > /srv/{one}")).await;
    }
    let base = get(&engine, "app").await.current.unwrap();
    let held = engine.delete_snapshot(&project(), &base, false).await.unwrap_err();
    assert_eq!(held.code(), "snapshot_in_use", "{held}");
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    assert_eq!(promote(&engine, "try-a").await.unwrap_err().code(), "origin_deleted");
    merge(&engine, "try-a", into("try-b")).await.unwrap();
    assert_eq!(ok(&engine, "try-b", "ls /srv").await, "file\nlines\ntry-a\ntry-b\n");
    let later = ok(&engine, "try-a", "echo more > /srv/more").await;
    assert_eq!(later, "");
    // By force the common past goes, and that is reported.
    let merged = get(&engine, "try-a").await.merged[0].snapshot.clone();
    engine.delete_snapshot(&project(), &merged, true).await.unwrap();
    assert_eq!(code(merge(&engine, "try-a", into("try-b")).await), "ancestor_deleted");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forks_that_were_made_together_are_a_group() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    let many = Fork { name: Some(name("try")), count: Some(3), ..Fork::default() };
    engine.fork_many(&project(), &name("app"), many, None).await.unwrap();
    fork(&engine, "app", "alone").await;
    let names = |forks: Vec<Sandbox>| -> Vec<String> {
        forks.into_iter().map(|one| one.name.to_string()).collect()
    };
    let group = engine.forks(&project(), None, Some(&name("try"))).await.unwrap();
    assert_eq!(names(group), ["try-1", "try-2", "try-3"]);
    let all = engine.forks(&project(), Some(&name("app")), None).await.unwrap();
    assert_eq!(names(all), ["alone", "try-1", "try-2", "try-3"]);
    let others = engine.group_of(&project(), &name("try-2")).await.unwrap();
    let names_of = |all: &[(Name, SandboxId)]| -> Vec<Name> {
        all.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names_of(&others), [name("try-1"), name("try-3")]);
    // A fork that has the name of another one by now stays.
    let mixed = vec![(name("alone"), others[0].1.clone())];
    let (deleted, failed) = engine.delete_forks(&project(), mixed).await;
    assert_eq!((deleted.len(), failed[0].code.as_str()), (0, "used_meanwhile"));
    assert!(engine.group_of(&project(), &name("alone")).await.unwrap().is_empty());
    let (deleted, failed) = engine.delete_forks(&project(), others).await;
    assert_eq!((deleted.len(), failed.len()), (2, 0));
    let group = engine.forks(&project(), None, Some(&name("try"))).await.unwrap();
    assert_eq!(names(group), ["try-2"]);
    engine.shutdown().await;
}

/// The forks that would be deleted if one were picked.
async fn others(engine: &Engine, fork: &str) -> Vec<String> {
    let others = engine.group_of(&project(), &name(fork)).await.unwrap();
    others.iter().map(|(name, _)| name.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pick_leaves_forks_of_other_rounds_alone() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    let many = || Fork { name: Some(name("try")), count: Some(2), ..Fork::default() };
    engine.fork_many(&project(), &name("app"), many(), None).await.unwrap();
    for number in [1, 2] {
        let (old, new) = (format!("try-{number}"), format!("old-{number}"));
        engine.rename(&project(), &name(&old), name(&new)).await.unwrap();
    }
    // Another round of the same state, under the same name.
    engine.fork_many(&project(), &name("app"), many(), None).await.unwrap();
    assert_eq!(others(&engine, "try-1").await, ["try-2"]);
    assert_eq!(others(&engine, "old-2").await, ["old-1"]);
    ok(&engine, "try-1", "echo new > /srv/file").await;
    promote(&engine, "try-1").await.unwrap();
    let lineage = get(&engine, "try-1").await.forked_from.unwrap();
    assert_eq!((lineage.group, lineage.group_id), (None, None), "it comes from what app is now");
    assert_eq!(others(&engine, "try-1").await, ["try-2"], "for a pick that was cut short");
    assert!(others(&engine, "try-2").await.is_empty(), "and not the other way round");
    // A third round does not belong to what was picked before.
    engine.rename(&project(), &name("try-1"), name("picked")).await.unwrap();
    engine.delete(&project(), &name("try-2"), Delete::default(), None).await.unwrap();
    engine.fork_many(&project(), &name("app"), many(), None).await.unwrap();
    assert!(others(&engine, "picked").await.is_empty());
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_that_went_on_writing_after_it_was_accepted_stays() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    for one in ["busy", "idle"] {
        fork(&engine, "app", one).await;
        ok(&engine, one, "echo new > /srv/file").await;
    }
    promote(&engine, "busy").await.unwrap();
    ok(&engine, "busy", "echo later > /srv/later").await;
    let (deleted, failed) = engine.clear_accepted(&project(), &name("busy"), true).await;
    assert_eq!((deleted.len(), failed[0].code.as_str()), (0, "used_meanwhile"));
    assert_eq!(ok(&engine, "busy", "cat /srv/later").await, "later\n");
    let merge =
        MergeRequest { into: Some(name("app")), keep_both: true, ..MergeRequest::default() };
    engine.merge(&project(), &name("idle"), merge).await.unwrap();
    let (deleted, failed) = engine.clear_accepted(&project(), &name("idle"), true).await;
    assert_eq!((deleted, failed.len()), (vec![name("idle")], 0), "all it had was taken");
    engine.shutdown().await;
}

/// What the source leaves out of its snapshots was not deleted by it.
#[tokio::test(flavor = "multi_thread")]
async fn what_one_side_leaves_out_is_not_deleted_on_the_other() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "fork").await;
    let patch = Patch { exclude: Some(vec!["*.bin".to_owned()]), ..Patch::default() };
    engine.update(&project(), &name("app"), patch).await.unwrap();
    ok(&engine, "fork", "echo 1 > /srv/cache.bin; echo 1 > /srv/code").await;
    stop(&engine, "fork").await;
    merge(&engine, "fork", into("app")).await.unwrap();
    assert_eq!(ok(&engine, "app", "ls /srv | grep -c cache || :").await, "0\n");
    ok(&engine, "app", "echo 2 > /srv/code").await;
    stop(&engine, "app").await;
    merge(&engine, "app", into("fork")).await.unwrap();
    assert_eq!(ok(&engine, "fork", "cat /srv/cache.bin /srv/code").await, "1\n2\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_became_of_each_fork_is_known() {
    let mut house = house!();
    house.settings.trash_grace = std::time::Duration::from_secs(3600);
    let engine = house.open().await;
    app(&engine).await;
    for one in ["alive", "rejected", "accepted"] {
        let on_accept = match one {
            "accepted" => OnAccept::Delete,
            _ => OnAccept::Keep,
        };
        let request = Fork { name: Some(name(one)), on_accept, ..Fork::default() };
        engine.fork(&project(), &name("app"), request, None).await.unwrap();
        ok(&engine, one, "head -c 300000 /dev/urandom > /srv/big").await;
        stop(&engine, one).await;
    }
    engine.rename(&project(), &name("app"), name("main")).await.unwrap();
    let clear = |fork: &'static str| {
        let engine = engine.clone();
        async move { engine.clear_accepted(&project(), &name(fork), false).await.0 }
    };
    assert!(clear("accepted").await.is_empty(), "it was not accepted yet");
    promote(&engine, "accepted").await.unwrap();
    assert_eq!(clear("accepted").await, [name("accepted")]);
    assert!(clear("alive").await.is_empty());
    engine.delete(&project(), &name("rejected"), Delete::default(), None).await.unwrap();
    let tree = engine.lineage(&project(), &name("main")).await.unwrap();
    let seen: Vec<_> = tree
        .forks
        .iter()
        .map(|one| (one.name.as_str(), one.origin.as_str(), one.fate, one.in_trash))
        .collect();
    let wanted = [
        ("alive", "main", ForkFate::Alive, false),
        ("accepted", "main", ForkFate::Promoted, true),
        ("rejected", "main", ForkFate::Rejected, true),
    ];
    assert_eq!(seen, wanted);
    let freed: Vec<bool> = tree.forks.iter().map(|one| one.freed >= 300_000).collect();
    assert_eq!(
        freed,
        [true, false, true],
        "the origin stands on what was promoted: {:?}",
        tree.forks
    );
    let unused = |at| Delete { unused_since: Some(at), ..Delete::default() };
    let used = get(&engine, "alive").await.used_at;
    let before = used - std::time::Duration::from_millis(1);
    let refused =
        engine.delete(&project(), &name("alive"), unused(before), None).await.unwrap_err();
    assert_eq!((refused.code(), refused.kind()), ("used_meanwhile", ErrorKind::Stale));
    engine.start(&project(), &name("alive"), None).await.unwrap();
    let refused = engine.delete(&project(), &name("alive"), unused(used), None).await.unwrap_err();
    assert_eq!(refused.code(), "used_meanwhile", "it runs");
    stop(&engine, "alive").await;
    let used = get(&engine, "alive").await.used_at;
    engine.delete(&project(), &name("alive"), unused(used), None).await.unwrap();
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_rollback_undid_can_be_merged_again() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "try").await;
    ok(&engine, "try", "echo theirs > /srv/new").await;
    stop(&engine, "try").await;
    let before = get(&engine, "app").await.current.unwrap();
    merge(&engine, "try", into("app")).await.unwrap();
    engine.rollback(&project(), &name("app"), &before, None).await.unwrap();
    assert_eq!(ok(&engine, "app", "ls /srv").await, "file\nlines\n");
    let again = merge(&engine, "try", into("app")).await.unwrap();
    assert!(again.snapshot.is_some(), "it is no no-op");
    assert_eq!(cat(&engine, "app", "/srv/new").await, "theirs\n");
    // And the one after it begins there.
    ok(&engine, "app", "echo ours > /srv/new").await;
    ok(&engine, "try", "echo more > /srv/more").await;
    merge(&engine, "try", into("app")).await.unwrap();
    assert_eq!(ok(&engine, "app", "cat /srv/new /srv/more").await, "ours\nmore\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_stay_related_when_old_records_go() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "try").await;
    ok(&engine, "try", "echo theirs > /srv/new").await;
    stop(&engine, "try").await;
    let mut between = Vec::new();
    for number in 0..3 {
        ok(&engine, "app", &format!("echo {number} > /srv/{number}")).await;
        stop(&engine, "app").await;
        between.push(get(&engine, "app").await.current.unwrap());
    }
    // What is left of a deleted snapshot goes after a while.
    engine.delete_snapshot(&project(), &between[0], false).await.unwrap();
    house.close(engine).await;
    let record = house.data().join(format!("snapshots/{}.json", between[0]));
    std::fs::remove_file(&record).unwrap_or_else(|error| panic!("{}: {error}", record.display()));
    let engine = house.open().await;
    assert!(engine.snapshot(&project(), &between[0]).await.is_err(), "its record is gone");
    merge(&engine, "try", into("app")).await.unwrap();
    assert_eq!(ok(&engine, "app", "ls /srv").await, "0\n1\n2\nfile\nlines\nnew\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merge_that_is_refused_leaves_virtual_machines_alone() {
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => {
            skipped("a_merge_that_is_refused_leaves_virtual_machines_alone", &why);
            return;
        }
    };
    let engine = house.open().await;
    engine.create(&project(), machine("vm"), None).await.unwrap();
    ok(&engine, "vm", "mkdir -p /srv; echo old > /srv/file").await;
    stop(&engine, "vm").await;
    let patch = Patch { driver: Some("container".to_owned()), ..Patch::default() };
    let request = Fork { name: Some(name("try")), patch, ..Fork::default() };
    engine.fork(&project(), &name("vm"), request, None).await.unwrap();
    ok(&engine, "try", "echo theirs > /srv/file").await;
    stop(&engine, "try").await;
    ok(&engine, "vm", "echo ours > /srv/file").await;
    stop(&engine, "vm").await;

    engine.start(&project(), &name("vm"), None).await.unwrap();
    let running = get(&engine, "vm").await;
    let refused = merge(&engine, "try", into("vm")).await.unwrap_err();
    assert_eq!(refused.code(), "merge_conflicts", "{refused}");
    let now = get(&engine, "vm").await;
    assert_eq!((now.phase(), now.session), (Phase::Running, running.session), "it was not stopped");
    // As a source it is not even captured.
    let refused = merge(&engine, "vm", into("try")).await.unwrap_err();
    assert_eq!(refused.code(), "files_not_readable", "{refused}");
    assert_eq!(get(&engine, "vm").await.generation, running.generation);
    engine.pause(&project(), &name("vm"), None).await.unwrap();
    let refused = merge(&engine, "try", into("vm")).await.unwrap_err();
    assert_eq!(refused.code(), "merge_conflicts", "{refused}");
    assert_eq!(get(&engine, "vm").await.phase(), Phase::Paused);
    assert!(house.machines_alive().await.is_empty(), "no machine was started");
    // One that can be merged is.
    ok(&engine, "try", "echo old > /srv/file; echo new > /srv/new").await;
    merge(&engine, "try", into("vm")).await.unwrap();
    assert_eq!(ok(&engine, "vm", "cat /srv/file /srv/new").await, "ours\nnew\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_back_begins_where_the_merge_forth_ended() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "try").await;
    ok(&engine, "try", "echo theirs > /srv/file").await;
    merge(&engine, "try", MergeRequest { only: vec!["/".to_owned()], ..into("app") })
        .await
        .unwrap();
    assert_eq!(get(&engine, "try").await.merged.len(), 1, "the root is everything");
    ok(&engine, "app", "echo later > /srv/file").await;
    // Only `app` has changed the file since both had the same.
    merge(&engine, "app", into("try")).await.unwrap();
    assert_eq!(cat(&engine, "try", "/srv/file").await, "later\n");
    for (only, what) in [(vec![String::new()], "empty"), (vec!["x".to_owned(); 1_001], "1000")] {
        let request = MergeRequest { only, ..into("app") };
        let refused = merge(&engine, "try", request).await.unwrap_err();
        assert_eq!(refused.code(), "invalid");
        assert!(refused.to_string().contains(what), "{refused}");
    }
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_guard_of_the_target_refuses_does_not_come_in_through_a_fork() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "try").await;
    let guard = |junk| Patch {
        guard: GuardPatch { junk: Some(junk), large: Some(Size(1 << 20)), ..GuardPatch::default() },
        ..Patch::default()
    };
    engine.update(&project(), &name("app"), guard(OnJunk::PromoteOrDrop)).await.unwrap();
    ok(&engine, "try", "head -c 3000000 /dev/urandom > /srv/big; echo s > /srv/small").await;
    stop(&engine, "try").await;
    let before = get(&engine, "app").await;
    for refused in [
        merge(&engine, "try", into("app")).await.map(drop).unwrap_err(),
        promote(&engine, "try").await.map(drop).unwrap_err(),
    ] {
        assert_eq!(refused.code(), "decision_needed", "{refused}");
        assert!(refused.to_string().contains("`app` was not changed"), "{refused}");
    }
    assert_eq!(get(&engine, "app").await.generation, before.generation);
    let only = MergeRequest { only: vec!["/srv/small".to_owned()], ..into("app") };
    merge(&engine, "try", only).await.unwrap();
    assert_eq!(ok(&engine, "app", "ls /srv").await, "file\nlines\nsmall\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_of_nothing_does_not_hide_a_promotion() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    fork(&engine, "app", "try").await;
    ok(&engine, "try", "echo new > /srv/new").await;
    promote(&engine, "try").await.unwrap();
    let merged = merge(&engine, "try", into("app")).await.unwrap();
    assert!(merged.snapshot.is_none(), "it is there");
    let outcome = get(&engine, "try").await.outcome.unwrap();
    assert_eq!((outcome.how, outcome.generation), (BroughtBack::Promoted, 2));
    // Something was merged later: that is its outcome.
    ok(&engine, "try", "echo newer > /srv/new").await;
    merge(&engine, "try", into("app")).await.unwrap();
    assert_eq!(get(&engine, "try").await.outcome.unwrap().how, BroughtBack::Merged);
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_name_changes_nothing_else() {
    let house = house!();
    let engine = house.open().await;
    app(&engine).await;
    engine.create(&project(), small("other"), None).await.unwrap();
    ok(&engine, "app", "echo 1 > /srv/running").await;
    let before = get(&engine, "app").await;
    let taken = engine.rename(&project(), &name("app"), name("other")).await.unwrap_err();
    assert_eq!(taken.code(), "name_taken");
    let renamed = engine.rename(&project(), &name("app"), name("fix")).await.unwrap();
    assert_eq!((renamed.id.clone(), renamed.name.as_str()), (before.id.clone(), "fix"));
    assert!(engine.get(&project(), &name("app")).await.is_err());
    assert_eq!(cat(&engine, "fix", "/srv/running").await, "1\n");
    assert_eq!(get(&engine, "fix").await.session, before.session, "its session goes on");
    // The name is free, and what was taken under it is still listed.
    engine.create(&project(), small("app"), None).await.unwrap();
    let all = engine.snapshots(&project(), of("fix"), &Page::all()).await.unwrap().items;
    assert_eq!(all.len(), 1);
    stop(&engine, "fix").await;
    let engine = house.reopen(engine).await;
    assert_eq!(get(&engine, "fix").await.id, before.id);
    assert_ne!(get(&engine, "app").await.id, before.id);
    assert_eq!(cat(&engine, "fix", "/srv/running").await, "1\n");
    let same = engine.rename(&project(), &name("fix"), name("fix")).await.unwrap();
    assert_eq!(same.id, before.id);
    engine.shutdown().await;
}

#[cfg(feature = "failpoints")]
mod cut {
    use sandkeep_testkit::victim;

    use super::*;

    /// What the process that dies does. Without a house it is not that process and does nothing.
    #[tokio::test(flavor = "multi_thread")]
    async fn victim() {
        let Some(house) = sandkeep_testkit::house::House::lent() else { return };
        let engine = house.open().await;
        match std::env::var("SANDKEEP_TEST_DEED").unwrap().as_str() {
            "promote" => drop(promote(&engine, "try").await),
            "merge" => drop(merge(&engine, "try", MergeRequest::default()).await),
            _ => drop(engine.rename(&project(), &name("app"), name("fix")).await),
        }
        engine.shutdown().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_daemon_that_dies_leaves_the_old_state_or_the_new() {
        let house = house!();
        let mut engine = house.open().await;
        for (deed, point) in [
            ("promote", "promote.captured"),
            ("promote", "promote.done"),
            ("merge", "merge.captured"),
            ("merge", "merge.built"),
            ("merge", "merge.committed"),
        ] {
            let create = Create { patch: Patch::default(), ..small("app") };
            let create = Create { patch: small("app").patch, ..create };
            engine.create(&project(), create, None).await.unwrap();
            ok(&engine, "app", "mkdir -p /srv; echo old > /srv/file").await;
            stop(&engine, "app").await;
            fork(&engine, "app", "try").await;
            ok(&engine, "try", "echo new > /srv/file").await;
            stop(&engine, "try").await;
            let before = get(&engine, "app").await;
            engine = house.cut(engine, victim!(), deed, point).await;
            let now = get(&engine, "app").await;
            let file = cat(&engine, "app", "/srv/file").await;
            match now.generation == before.generation {
                true => assert_eq!(file, "old\n", "{deed} {point}"),
                false => assert_eq!(file, "new\n", "{deed} {point}"),
            }
            // Whatever was done, the same call can be made again: it is done then, once.
            stop(&engine, "app").await;
            let expect_generation = Some(before.generation);
            let tried = match deed {
                "merge" => {
                    let again = MergeRequest { expect_generation, ..MergeRequest::default() };
                    merge(&engine, "try", again).await.unwrap();
                    BroughtBack::Merged
                }
                _ => {
                    promote(&engine, "try").await.unwrap();
                    BroughtBack::Promoted
                }
            };
            let outcome = get(&engine, "try").await.outcome.expect("its fate is on record");
            assert_eq!(outcome.how, tried, "{deed} {point}");
            assert_eq!(outcome.generation, before.generation + 1, "{deed} {point}");
            assert_eq!(
                get(&engine, "app").await.generation,
                before.generation + 1,
                "{deed} {point}"
            );
            assert_eq!(cat(&engine, "app", "/srv/file").await, "new\n", "{deed} {point}");
            for one in ["try", "app"] {
                engine.delete(&project(), &name(one), Delete::default(), None).await.unwrap();
            }
        }
        engine.create(&project(), small("app"), None).await.unwrap();
        ok(&engine, "app", "echo 1 > /file").await;
        stop(&engine, "app").await;
        engine = house.cut(engine, victim!(), "rename", "rename.reserved").await;
        assert_eq!(cat(&engine, "app", "/file").await, "1\n", "it was not renamed");
        engine.create(&project(), small("fix"), None).await.unwrap();
        engine.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_was_loosened_and_restored_does_not_let_anything_through() {
    let house = house!();
    let engine = house.open().await;
    let guard = |junk| Patch {
        guard: GuardPatch { junk: Some(junk), large: Some(Size(1 << 20)), ..GuardPatch::default() },
        ..Patch::default()
    };
    app(&engine).await;
    engine.update(&project(), &name("app"), guard(OnJunk::PromoteOrDrop)).await.unwrap();
    let big = "head -c 3000000 /dev/urandom > /srv/big";
    let refused = async |fork: &str| {
        let refused = promote(&engine, fork).await.map(drop).unwrap_err();
        assert_eq!(refused.code(), "decision_needed", "{fork}: {refused}");
    };

    fork(&engine, "app", "try").await;
    engine.update(&project(), &name("try"), guard(OnJunk::Off)).await.unwrap();
    ok(&engine, "try", big).await;
    stop(&engine, "try").await;
    engine.update(&project(), &name("try"), guard(OnJunk::PromoteOrDrop)).await.unwrap();
    let rules = |sandbox: &Sandbox| sandbox.config.guard.clone();
    assert_eq!(rules(&get(&engine, "try").await), rules(&get(&engine, "app").await));
    refused("try").await;

    // Nor does a snapshot of a sandbox with another guard, which a fork was rolled back to.
    engine.create(&project(), small("lax"), None).await.unwrap();
    engine.update(&project(), &name("lax"), guard(OnJunk::Off)).await.unwrap();
    ok(&engine, "lax", &format!("mkdir -p /srv; {big}")).await;
    stop(&engine, "lax").await;
    fork(&engine, "app", "other").await;
    let lax = get(&engine, "lax").await.current.unwrap();
    engine.rollback(&project(), &name("other"), &lax, None).await.unwrap();
    refused("other").await;

    // A larger disk limit that was taken back is no way around that of the origin either.
    let disk = |size| Patch { disk: Some(Size(size)), ..Patch::default() };
    engine.update(&project(), &name("app"), disk(2 << 20)).await.unwrap();
    fork(&engine, "app", "large").await;
    engine.update(&project(), &name("large"), guard(OnJunk::Off)).await.unwrap();
    engine.update(&project(), &name("large"), disk(1 << 30)).await.unwrap();
    ok(&engine, "large", big).await;
    stop(&engine, "large").await;
    engine.update(&project(), &name("large"), disk(2 << 20)).await.unwrap();
    let refused = promote(&engine, "large").await.map(drop).unwrap_err();
    assert_eq!(refused.code(), "disk_limit", "{refused}");
    engine.shutdown().await;
}
