//! Three attempts at one task: compared, one picked, the work of another one merged.

use std::process::Command;

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    Some(Daemon::with_small_image(env!("CARGO_BIN_EXE_keep")))
}

/// What a command says that must fail with an exit code.
fn fails(keep: &Daemon, args: &[&str], code: i32) -> String {
    let (found, said) = keep.fails(args.iter());
    assert_eq!(found, code, "{args:?}: {said}");
    said
}

#[test]
fn attempts_are_compared_and_one_is_picked() {
    let Some(keep) = daemon("attempts_are_compared_and_one_is_picked") else { return };
    keep.ok(["create", "my-app", "--image", SMALL]);
    keep.sh("my-app", "mkdir /srv; seq 1 9 > /srv/lines; echo old > /srv/file");
    assert_eq!(keep.ok(["changes", "my-app"]).lines().last(), Some("+3, 22 B"));
    keep.ok(["stop", "my-app"]);
    assert_eq!(keep.ok(["changes", "my-app"]), "no differences\n");
    keep.ok(["fork", "my-app", "try", "--count", "3"]);
    keep.sh("try-1", "echo wrong > /srv/file");
    keep.sh("try-2", "sed -i s/5/five/ /srv/lines; mv /srv/file /srv/moved");
    keep.sh("try-3", "echo right > /srv/file; echo new > /srv/new");

    let shown = keep.ok(["diff", "my-app", "try-3"]);
    assert!(shown.contains("M /srv/file  content\n") && shown.contains("A /srv/new\n"), "{shown}");
    assert_eq!(keep.ok(["diff", "try-3"]), shown, "with its base");
    assert!(keep.ok(["diff", "my-app", "try-2"]).contains("R /srv/file -> /srv/moved\n"));
    let paths = keep.ok(["diff", "my-app", "try-3", "--name-only", "--", "/srv/n*"]);
    assert_eq!(paths, "/srv/new\n");
    assert_eq!(keep.ok(["diff", "try-3", "--stat"]), "+1 ~1, 10 B\n");
    let table = keep.ok(["diff", "--group", "try"]);
    for told in ["try-1", "~1, 6 B", "try-2", "1 renamed", "try-3", "+1 ~1, 10 B"] {
        assert!(table.contains(told), "{told} in {table}");
    }
    let json = keep.json(["diff", "my-app", "try-3"]);
    assert_eq!(json["counts"]["modified"], 1);
    let patch = keep.ok(["diff", "my-app", "try-2", "--patch", "--relative", "/srv"]);
    assert!(patch.contains("-5\n+five\n") && patch.contains("rename to moved\n"), "{patch}");

    // What an attempt made is taken over by path, into the origin or another sandbox.
    keep.ok(["merge", "try-2", "--only", "/srv/lines", "--into", "my-app"]);
    assert_eq!(keep.sh("my-app", "sed -n 5p /srv/lines; ls /srv"), "five\nfile\nlines\n");
    let late = fails(&keep, &["promote", "try-3"], 5);
    assert!(late.contains("has changed since") && late.contains("keep merge"), "{late}");
    let before = keep.json(["show", "my-app"])["generation"].to_string();
    let picked = keep.ok(["pick", "try-3", "--expect-generation", &before]);
    assert!(picked.contains("promoted from try-3") && picked.contains("keep rollback"), "{picked}");
    assert!(picked.contains("deleted: try-1, try-2"), "{picked}");
    assert_eq!(keep.sh("my-app", "cat /srv/file"), "right\n");
    let tree = keep.ok(["tree", "my-app"]);
    assert!(tree.contains("promoted into my-app"), "{tree}");
    assert!(
        tree.contains("merged, in the trash") || tree.contains("rejected, in the trash"),
        "{tree}"
    );
    let fates = keep.json(["tree", "my-app"])["forks"].clone();
    let fate = |name: &str| {
        let forks = fates.as_array().expect("a list").iter();
        let mut found = forks.filter(|fork| fork["name"] == name);
        found.next().unwrap_or_else(|| panic!("{name} in {fates}"))["fate"].clone()
    };
    assert_eq!((fate("try-3"), fate("try-1")), ("promoted".into(), "rejected".into()));
}

#[test]
fn a_conflict_changes_nothing_and_says_where_it_is() {
    let Some(keep) = daemon("a_conflict_changes_nothing_and_says_where_it_is") else { return };
    keep.ok(["create", "my-app", "--image", SMALL]);
    keep.sh("my-app", "mkdir /srv; echo old > /srv/file");
    keep.ok(["stop", "my-app"]);
    keep.ok(["fork", "my-app", "try"]);
    keep.sh("try", "echo theirs > /srv/file; echo 1 > /srv/one");
    keep.sh("my-app", "echo ours > /srv/file");
    let refused = fails(&keep, &["merge", "try"], 5);
    assert!(refused.contains("C /srv/file  the content changed on both sides"), "{refused}");
    assert!(refused.contains("hint: "), "{refused}");
    let json = fails(&keep, &["merge", "try", "--json"], 5);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON on standard error");
    assert_eq!(json["error"]["conflicts"][0]["path"], "/srv/file");
    let would = keep.ok(["merge", "try", "--dry-run", "--conflicts", "keep"]);
    assert!(would.contains("A /srv/file.from-try\n") && would.contains("can be merged"), "{would}");
    assert_eq!(keep.sh("my-app", "ls /srv"), "file\n");
    keep.ok(["merge", "try", "--conflicts", "keep"]);
    assert_eq!(keep.sh("my-app", "cat /srv/file /srv/file.from-try /srv/one"), "ours\ntheirs\n1\n");
}

#[test]
fn sandboxes_are_renamed_pruned_and_copied_between() {
    let Some(keep) = daemon("sandboxes_are_renamed_pruned_and_copied_between") else { return };
    keep.ok(["create", "my-app", "--image", SMALL]);
    for fork in ["try-a", "try-b", "try-c"] {
        keep.ok(["fork", "my-app", fork]);
    }
    keep.sh(
        "try-a",
        "mkdir -p /srv/out/deep; echo 1 > /srv/out/deep/one; ln -s deep /srv/out/link",
    );
    keep.sh("try-a", "ln /srv/out/deep/one /srv/out/two; chmod 640 /srv/out/deep/one");
    keep.ok(["cp", "-r", "try-a:/srv/out", "my-app:/srv/renamed"]);
    let there = keep.sh("my-app", "cd /srv/renamed; cat link/one; stat -c '%a %h' two");
    assert_eq!(there, "1\n640 2\n");
    keep.ok(["cp", "try-a:/srv/out/two", "my-app:/srv/"]);
    assert_eq!(keep.sh("my-app", "cat /srv/two; stat -c %a /srv/two"), "1\n640\n");
    fails(&keep, &["cp", "try-a:/srv/out", "my-app:/srv/"], 1);
    fails(&keep, &["cp", "try-a:/nothing", "my-app:/srv/"], 4);

    assert_eq!(keep.ok(["rename", "try-a", "auth-fix"]), "auth-fix  was try-a\n");
    assert_eq!(keep.sh("auth-fix", "cat /srv/out/two"), "1\n");
    let taken = fails(&keep, &["rename", "auth-fix", "try-b"], 5);
    assert!(taken.contains("try-b"), "{taken}");

    let would = keep.ok(["prune", "my-app", "--forks", "--dry-run"]);
    assert!(would.contains("try-b  would be deleted") && would.contains("stays: it is running"));
    assert!(keep.ok(["prune", "my-app", "--forks", "--older", "1h"]).contains("it was used"));
    let pruned = keep.ok(["prune", "my-app", "--forks"]);
    assert!(pruned.contains("try-b  deleted") && pruned.contains("try-c  deleted"), "{pruned}");
    // Chosen files, out to this machine.
    keep.ok(["fork", "my-app", "maker"]);
    keep.sh("maker", "mkdir -p /srv/dist/deep; echo a > /srv/dist/a.whl; echo b > /srv/dist/deep/b.whl; echo c > /srv/c");
    let out = keep.scratch().join("out");
    let out = out.to_str().expect("a text");
    let told = keep.ok(["promote", "maker", "--only", "*.whl", "--out", out]);
    assert!(told.contains("/srv/dist/deep/b.whl\n") && told.contains("2 files"), "{told}");
    let read = |path: &str| std::fs::read_to_string(format!("{out}/{path}")).ok();
    assert_eq!(read("srv/dist/a.whl").as_deref(), Some("a\n"));
    assert_eq!((read("srv/dist/deep/b.whl").as_deref(), read("srv/c")), (Some("b\n"), None));
    exact_out(&keep);
    keep.ok(["drive", "create", "wheels"]);
    let to = ["--only", "*.whl", "--to", "drive:wheels:/py"];
    let told = keep.ok([&["promote", "maker"][..], &to, &["--dry-run"]].concat());
    assert!(told.contains("A /py/srv/dist/a.whl\n") && told.contains("would get"), "{told}");
    let told = keep.ok([&["promote", "maker"][..], &to].concat());
    assert_eq!(told, "drive wheels  has files of maker, generation 1: 6 added\n");
    let told = keep.ok([&["promote", "maker"][..], &to].concat());
    assert_eq!(told, "drive wheels  has these files of maker already\n");
    fails(&keep, &["promote", "maker", "--only", "*", "--to", "drive:none"], 4);
    fails(&keep, &["promote", "maker", "--only", "*", "--to", "wheels"], 2);
    fails(&keep, &["promote", "maker", "--to", "drive:wheels"], 2);
    let shown = keep.ok(["show", "maker"]);
    assert!(shown.contains("session") && shown.contains("changed +5"), "{shown}");
    assert!(keep.ok(["sessions", "maker"]).contains("+5"));
    assert!(keep.ok(["history", "maker"]).contains("last session: +5"));
    keep.ok(["promote", "maker", "--only", "/srv/c"]);
    assert_eq!(keep.sh("my-app", "cat /srv/c; ls /srv/dist 2>&1 | wc -l"), "c\n1\n");
    keep.ok(["rm", "maker"]);
    // One that is not needed once its work is accepted.
    keep.ok(["fork", "my-app", "last", "--on-accept", "delete", "--ttl", "7d"]);
    keep.sh("last", "echo last > /srv/last");
    let merged = keep.ok(["merge", "last"]);
    assert!(merged.contains("deleted: last"), "{merged}");
    assert_eq!(keep.sh("my-app", "cat /srv/last"), "last\n");
    let mut left: Vec<String> = keep.ok(["ls", "-q"]).lines().map(str::to_owned).collect();
    left.sort();
    assert_eq!(left, ["auth-fix", "my-app"]);
}

#[test]
fn a_patch_goes_into_a_repository_here() {
    let Some(keep) = daemon("a_patch_goes_into_a_repository_here") else { return };
    keep.ok(["create", "my-app", "--image", SMALL]);
    keep.sh(
        "my-app",
        "mkdir -p /work/repo/.git; cd /work/repo; echo one > file; echo 1 > .git/index",
    );
    keep.ok(["stop", "my-app"]);
    keep.ok(["fork", "my-app", "try"]);
    keep.sh("try", "cd /work/repo; echo two >> file; echo new > more; echo 2 > .git/index");
    let repo = keep.scratch().join("repo");
    std::fs::create_dir(&repo).expect("a directory");
    let git = |args: &[&str]| {
        let done = Command::new("git").args(args).current_dir(&repo).output().expect("git runs");
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    git(&["init", "-q"]);
    std::fs::write(repo.join("file"), "one\n").expect("it is written");
    let patch = keep.ok(["diff", "my-app", "try", "-p", "--relative", "/work/repo", "--", "/work"]);
    std::fs::write(repo.join(".git/patch"), patch).expect("it is written");
    git(&["apply", ".git/patch"]);
    let read = |name: &str| std::fs::read_to_string(repo.join(name)).expect("it is there");
    assert_eq!((read("file"), read("more")), ("one\ntwo\n".to_owned(), "new\n".to_owned()));
    let all = keep.ok(["diff", "my-app", "try", "-p", "--git-dir", "--", "/work"]);
    assert!(all.contains("b/work/repo/.git/index"), "{all}");
}

/// Files leave a fork as they are in it, and the fork is not started for that.
fn exact_out(keep: &Daemon) {
    use std::os::unix::fs::MetadataExt as _;
    keep.ok(["fork", "my-app", "exact"]);
    keep.sh("exact", "mkdir -p /srv/exact/sub; cd /srv/exact; head -c 300000 /dev/urandom > a");
    keep.sh("exact", "cd /srv/exact; ln a sub/b; ln -s ../a sub/c; ln -s /etc/passwd out");
    keep.sh("exact", "cd /srv/exact; chown 1234:5678 a; chmod 4751 a; touch -t 200102030405 a");
    keep.sh("exact", "cd /srv/exact; chmod 555 sub; touch -t 200203040506 sub");
    let sums = keep.sh("exact", "cd /srv/exact; sha256sum < a");
    keep.ok(["stop", "exact"]);
    let before = keep.ok(["sessions", "exact"]);
    let out = keep.scratch().join("exact");
    std::fs::create_dir_all(out.join("srv/exact")).expect("a directory");
    std::fs::write(out.join("srv/exact/a"), "from before").expect("a file");
    std::fs::write(out.join("srv/exact/mine"), "mine").expect("a file");
    let to = out.to_str().expect("a text");
    let told = keep.ok(["promote", "exact", "--only", "/srv/exact", "--out", to]);
    assert!(told.contains("/srv/exact/sub/b\n") && told.contains("4 files"), "{told}");
    assert_eq!(keep.ok(["sessions", "exact"]), before, "it was not started");
    let at = |path: &str| out.join("srv/exact").join(path).symlink_metadata().expect(path);
    let a = at("a");
    assert_eq!((a.ino(), a.nlink(), a.len()), (at("sub/b").ino(), 2, 300_000));
    assert_eq!(a.mtime(), 981_173_100, "2001-02-03 04:05");
    if rustix::process::geteuid().is_root() {
        assert_eq!((a.uid(), a.gid(), a.mode() & 0o7777), (1234, 5678, 0o4751));
    }
    assert_eq!((at("sub").mode() & 0o777, at("sub").mtime()), (0o555, 1_015_218_360));
    let link = |path: &str| std::fs::read_link(out.join("srv/exact").join(path)).expect(path);
    assert_eq!((link("sub/c"), link("out")), ("../a".into(), "/etc/passwd".into()));
    let content = std::fs::read(out.join("srv/exact/sub/b")).expect("a file");
    let sum = format!("{}  -\n", hex::encode(<sha2::Sha256 as sha2::Digest>::digest(&content)));
    assert_eq!(sum, sums);
    assert_eq!(std::fs::read(out.join("srv/exact/mine")).expect("a file"), b"mine");
    let json = keep.ok(["promote", "exact", "--only", "/nothing", "--out", to, "--json"]);
    assert!(json.contains("\"files\": []") || json.contains("\"files\":[]"), "{json}");
    keep.ok(["rm", "exact"]);
}
