//! `keep image build`, with real sandboxes; and the same Dockerfiles with buildah.

mod buildah;
mod cases;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use sandkeep_testkit::daemon::{Daemon, skipped, unfit};
use sandkeep_testkit::root::small_root_tar;
use serde_json::Value;

use self::buildah::{Buildah, differences, files_of};
use self::cases::CASES;

fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    Some(Daemon::with_small_image(env!("CARGO_BIN_EXE_keep")))
}

/// Writes a context. `->x` is a link, `=tar` and `=tgz` are archives.
fn context(keep: &Daemon, name: &str, files: &[(&str, u32, &str)], dockerfile: &str) -> PathBuf {
    let dir = keep.scratch().join(name);
    fs::create_dir_all(&dir).unwrap();
    for (path, mode, content) in files.iter().chain(&[("Dockerfile", 0o644, dockerfile)]) {
        let path = dir.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match content.strip_prefix("->") {
            Some(target) => {
                std::os::unix::fs::symlink(target, &path).unwrap();
                continue;
            }
            None if *content == "=tar" => fs::write(&path, archive()).unwrap(),
            None if *content == "=tgz" => {
                let plain = dir.join("plain.part");
                fs::write(&plain, archive()).unwrap();
                let packed = std::process::Command::new("gzip").arg("-c").arg(&plain).output();
                fs::write(&path, packed.unwrap().stdout).unwrap();
                fs::remove_file(plain).unwrap();
            }
            None => fs::write(&path, content).unwrap(),
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
    }
    dir
}

/// An archive with owners and modes of its own.
fn archive() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |kind, path: &str, mode, owner, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner);
        header.set_gid(owner);
        header.set_mtime(1_700_000_000);
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, path, content).unwrap();
    };
    add(tar::EntryType::Directory, "in/", 0o750, 1000, b"");
    add(tar::EntryType::Regular, "in/file", 0o640, 1000, b"packed\n");
    add(tar::EntryType::Regular, "top", 0o600, 7, b"top\n");
    builder.into_inner().unwrap()
}

fn build(keep: &Daemon, dir: &Path, more: &[&str]) -> String {
    let mut args = vec!["image", "build", "--progress", "plain", "-t", "built"];
    args.extend(more);
    let dir = dir.display().to_string();
    args.push(&dir);
    let done = keep.keep(&args);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{said}");
    said
}

fn fails(keep: &Daemon, dir: &Path, more: &[&str]) -> String {
    let mut args = vec!["image", "build", "-t", "built"];
    args.extend(more);
    let dir = dir.display().to_string();
    args.push(&dir);
    keep.fails(args).1
}

/// Sandboxes on record, those of builds included.
fn sandboxes(keep: &Daemon) -> usize {
    fs::read_dir(keep.data().join("sandboxes")).unwrap().count()
}

#[test]
fn ten_dockerfiles_come_out_as_with_buildah() {
    const TEST: &str = "ten_dockerfiles_come_out_as_with_buildah";
    let Some(keep) = daemon(TEST) else { return };
    let base = keep.scratch().join("small.tar");
    small_root_tar(&base).unwrap();
    let Some(buildah) = Buildah::with_base(&keep.scratch().join("buildah"), &base) else {
        // `./dev test` installs it.
        return skipped(TEST, "there is no buildah");
    };
    let mut all = Vec::new();
    for case in &CASES {
        let dir = context(&keep, case.name, case.files, case.dockerfile);
        let args: Vec<&str> = case.args.iter().flat_map(|arg| ["--build-arg", arg]).collect();
        build(&keep, &dir, &args);
        let (theirs, config) = buildah.build(&dir, case.args);
        let ours = files_of(&keep, "built");
        assert!(ours.len() > 2, "{}: {ours:?}", case.name);
        let told = differences(&ours, &theirs);
        all.extend(told.into_iter().map(|told| format!("{}: {told}", case.name)));
        all.extend(differing_config(&keep, &config).map(|told| format!("{}: {told}", case.name)));
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
    assert_eq!(sandboxes(&keep), 0, "no sandbox of a build is left");
}

/// What the configurations do not agree on.
fn differing_config(keep: &Daemon, theirs: &Value) -> Option<String> {
    let ours = keep.json(["image", "inspect", "built"]);
    let mut env: Vec<String> = ours["env"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, value)| format!("{name}={}", value.as_str().unwrap()))
        .collect();
    env.sort();
    let list = |value: &Value| -> Vec<String> {
        let all = value.as_array().map(Vec::as_slice).unwrap_or_default();
        all.iter().map(|one| one.as_str().unwrap().to_owned()).collect()
    };
    let mut their_env = list(&theirs["Env"]);
    their_env.sort();
    let mut their_labels = theirs["Labels"].clone();
    if let Some(labels) = their_labels.as_object_mut() {
        labels.remove("io.buildah.version");
    }
    let ports: Vec<String> = theirs["ExposedPorts"]
        .as_object()
        .map(|ports| ports.keys().cloned().collect())
        .unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pairs = [
        ("env", format!("{env:?}"), format!("{their_env:?}")),
        ("user", text(&ours["user"]), text(&theirs["User"])),
        ("cwd", text(&ours["cwd"]), text(&theirs["WorkingDir"])),
        (
            "entrypoint",
            format!("{:?}", list(&ours["entrypoint"])),
            format!("{:?}", list(&theirs["Entrypoint"])),
        ),
        ("cmd", format!("{:?}", list(&ours["cmd"])), format!("{:?}", list(&theirs["Cmd"]))),
        (
            "labels",
            ours["labels"].to_string(),
            if their_labels.is_null() { "{}".to_owned() } else { their_labels.to_string() },
        ),
        ("ports", format!("{:?}", list(&ours["exposed_ports"])), format!("{ports:?}")),
    ];
    let differing = pairs.into_iter().find(|(_, ours, theirs)| ours != theirs);
    differing.map(|(what, ours, theirs)| format!("{what}: ours {ours}, buildah's {theirs}"))
}

#[test]
fn a_second_build_comes_from_the_cache_and_a_sandbox_of_the_image_works() {
    let Some(keep) = daemon("a_second_build_comes_from_the_cache") else { return };
    let text = "FROM small\nRUN echo one > /one\nCOPY f /f\nWORKDIR /w\nENV SAID=hello\nUSER user\nSHELL [\"/bin/bash\", \"-c\"]\nCMD go on\n";
    let dir = context(&keep, "cached", &[("f", 0o644, "1\n")], text);
    let first = build(&keep, &dir, &[]);
    assert!(!first.contains("(cached)"), "{first}");
    let again = build(&keep, &dir, &[]);
    assert_eq!(again.matches("(cached)").count(), 3, "{again}");
    // Another time of a file is no other file; another content is.
    fs::write(dir.join("f"), "2\n").unwrap();
    let changed = build(&keep, &dir, &[]);
    assert_eq!(changed.matches("(cached)").count(), 1, "{changed}");
    let anew = build(&keep, &dir, &["--no-cache"]);
    assert!(!anew.contains("(cached)"), "{anew}");

    keep.ok(["create", "box", "--image", "built"]);
    assert_eq!(keep.sh("box", "echo $SAID; pwd; id -un; cat /one /f"), "hello\n/w\nuser\none\n2\n");
    // The shell is that of `SHELL`, which buildah leaves out.
    let told = keep.json(["image", "inspect", "built"]);
    assert_eq!(told["cmd"], serde_json::json!(["/bin/bash", "-c", "go on"]));
    let listed = keep.ok(["image", "ls"]);
    assert!(!listed.contains("build-step"), "{listed}");
    let (_, told) = keep.fails(["create", "other", "--image", "build-step/x"]);
    assert!(told.contains("there is no image"), "{told}");
    assert!(keep.ok(["image", "prune"]).contains("steps deleted"));
    let after = build(&keep, &dir, &[]);
    assert!(!after.contains("(cached)"), "{after}");
}

#[test]
fn heredocs_caches_and_secrets() {
    let Some(keep) = daemon("heredocs_caches_and_secrets") else { return };
    let text = "FROM small
ENV WHO=world
RUN <<EOF
echo \"hello $WHO\" > /greeting
echo second >> /greeting
EOF
RUN cat <<'A' > /a && cat <<B > /b
$WHO
A
$WHO
B
COPY <<one.txt <<\"two.txt\" /texts/
one $WHO
one.txt
two $WHO
two.txt
RUN <<EOF
#!/bin/bash
[[ -f /greeting ]] && echo bash > /script
EOF
RUN --mount=type=cache,target=/cache,uid=1000,mode=0750 echo x >> /cache/count; wc -l < /cache/count > /counted; stat -c '%a %u' /cache >> /counted
RUN --mount=type=secret,id=token --mount=type=secret,id=more,env=MORE test \"$(cat /run/secrets/token)\" = s3cr3t-token && test \"$MORE\" = m0re-than-that
";
    let dir = context(&keep, "mounts", &[], text);
    let file = keep.scratch().join("token");
    fs::write(&file, "s3cr3t-token").unwrap();
    let token = format!("id=token,src={}", file.display());
    let more = keep.scratch().join("more");
    fs::write(&more, "m0re-than-that").unwrap();
    let more = format!("id=more,src={}", more.display());
    let secrets = ["--secret", token.as_str(), "--secret", more.as_str()];
    build(&keep, &dir, &secrets);
    let files = files_of(&keep, "built");
    for gone in ["run/secrets", "cache/count"] {
        assert!(!files.contains_key(gone), "{gone}");
    }
    keep.ok(["create", "box", "--image", "built"]);
    let said = keep.sh("box", "cat /greeting /a /b /texts/one.txt /texts/two.txt /script /counted");
    assert_eq!(said, "hello world\nsecond\n$WHO\nworld\none world\ntwo $WHO\nbash\n1\n750 1000\n");
    build(&keep, &dir, &[&secrets[..], &["--no-cache"]].concat());
    keep.ok(["create", "again", "--image", "built"]);
    assert!(keep.sh("again", "cat /counted").starts_with("2\n"), "the cache is there again");

    // A secret that is written to a file is no layer.
    let leak = "FROM small\n\nRUN --mount=type=secret,id=token cp /run/secrets/token /kept\n";
    let dir = context(&keep, "leak", &[], leak);
    let told = fails(&keep, &dir, &secrets);
    assert!(
        told.contains("line 3") && told.contains("/kept") && !told.contains("s3cr3t"),
        "{told}"
    );
    let without = "FROM small\nRUN --mount=type=secret,id=no,required true\n";
    let told = fails(&keep, &context(&keep, "required", &[], without), &[]);
    assert!(told.contains("line 2: the secret `no` is required"), "{told}");
    for place in ["images", "sandboxes", "layers", "events"] {
        wait_until(place, || {
            let found = std::process::Command::new("grep")
                .args(["-rlE", "s3cr3t-token[^)\"\\\\]*$"])
                .arg(keep.data().join(place))
                .output()
                .unwrap();
            found.stdout.is_empty()
        });
    }
    assert_eq!(sandboxes(&keep), 2);
}

#[test]
fn mistakes_are_told_with_their_line() {
    let Some(keep) = daemon("mistakes_are_told_with_their_line") else { return };
    let files = [
        ("f", 0o644, "f\n"),
        ("out", 0o777, "->/etc/passwd"),
        ("gone.log", 0o644, "x"),
        (".dockerignore", 0o644, "*.log\n"),
    ];
    for (at, (text, line, told)) in [
        ("FROM small\nFOO x", 2, "unknown instruction `FOO`"),
        ("FROM small\n\nCOPY missing /", 3, "there is no `missing` in the build context"),
        ("FROM small\nCOPY gone.log /", 2, "there is no `gone.log` in the build context"),
        ("FROM small\nCOPY ../f /", 2, "`../f` is outside"),
        ("FROM small\nCOPY out /", 2, "there is no `out` in the build context"),
        ("FROM small\nCOPY f f /to", 2, "must be a directory"),
        ("FROM small\nCOPY f /etc/passwd/", 2, "is a file in the image"),
        (
            "FROM small\nCOPY --from=127.0.0.1:1/no f /",
            2,
            "there is no image `127.0.0.1:1/no` here",
        ),
        ("FROM scratch\nRUN true", 2, "the stage has no files yet"),
        ("FROM small AS a\nCOPY --from=a f /", 2, "stage `a` needs itself"),
        ("FROM small AS a\nCOPY --from=b f /\nFROM small AS b", 0, ""),
        ("FROM small\nRUN echo before; exit 7", 2, "it ended with exit code 7"),
        ("FROM small\nUSER nobody-here\nRUN true", 3, "there is no user `nobody-here`"),
        ("FROM small\nCOPY --chown=nobody-here f /", 2, "there is no user `nobody-here`"),
        ("FROM small\nENV A=\"${B?not given}\"", 2, "not given"),
        ("FROM small\nWORKDIR /etc/passwd/x", 2, "is a file in the image"),
        ("FROM small\nRUN --mount=type=ssh true", 2, "`--mount=type=ssh` is not supported"),
        ("FROM small\nRUN [\"/no/such/program\"]", 2, "/no/such/program"),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = context(&keep, &format!("wrong-{at}"), &files, text);
        if line == 0 {
            // Stages that are not needed are not looked at.
            build(&keep, &dir, &[]);
            continue;
        }
        let said = fails(&keep, &dir, &[]);
        assert!(said.contains(&format!("line {line}")) && said.contains(told), "{text:?}: {said}");
    }
    let dir = context(&keep, "output", &[], "FROM small\nRUN echo before; exit 7");
    assert!(fails(&keep, &dir, &[]).contains("before\n"), "what it printed is shown");
    for (args, told) in [
        (&["-f", "/no/such/file"][..], "cannot read the Dockerfile"),
        (&["--target", "nope"], "has no stage `nope`"),
        (&["--secret", "src=x"], "write id=ID"),
        (&["-t", "build-step/x"], "names that begin like this"),
        (&["-t", "host"], "the image of this machine"),
    ] {
        let mut all = vec!["image", "build"];
        all.extend(args);
        let dir = dir.display().to_string();
        all.push(&dir);
        let said = keep.fails(all).1;
        assert!(said.contains(told), "{args:?}: {said}");
    }
    assert_eq!(sandboxes(&keep), 0, "no sandbox is left of a build that failed");
}

#[test]
fn archives_that_are_none_are_a_callers_mistake() {
    let Some(keep) = daemon("archives_that_are_none_are_a_callers_mistake") else { return };
    let (url, key) = keep.url_and_key();
    let ask = |query: &str, body: &[u8]| -> String {
        let mut curl = std::process::Command::new("curl")
            .args(["-s", "-X", "POST", "-H", &format!("Authorization: Bearer {key}")])
            .args(["--data-binary", "@-", "-H", "Content-Type: application/x-tar"])
            .args(["-w", "\n%{http_code}", &format!("{url}/v1/images/build?{query}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        curl.stdin.take().unwrap().write_all(body).unwrap();
        String::from_utf8(curl.wait_with_output().unwrap().stdout).unwrap()
    };
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |path: &str, content: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        // Written by hand: the library would refuse some names.
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        builder.append(&header, content.as_bytes()).unwrap();
    };
    add("Dockerfile", "FROM small\n");
    add("../climbs", "x");
    let climbs = builder.into_inner().unwrap();
    for (query, body, told) in [
        ("name=x", &b"garbage, and no archive at all"[..], "bad_image"),
        ("name=x", &climbs[..], "has `..` in it"),
        ("name=x", &climbs[..700], "bad_image"),
        ("name=x", &[0; 1024][..], "there is no Dockerfile `Dockerfile`"),
        ("name=x&dockerfile=../../etc/passwd", &[0; 1024][..], "is outside"),
        ("name=bad%20name", &[0; 1024][..], "cannot name an image"),
        ("", b"", "the query parameter `name` is missing"),
        ("name=x&arg=novalue", b"", "is not NAME=VALUE"),
        ("name=x&nmae=y", b"", "unknown query parameter `nmae`"),
    ] {
        let answer = ask(query, body);
        assert!(answer.contains(told), "{query}: {answer}");
        let status: u32 = answer.rsplit('\n').next().unwrap().parse().unwrap();
        assert!(status < 500, "{query}: {answer}");
        assert!(!answer.contains("\"internal\""), "{query}: {answer}");
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_build_goes_on_after_its_server_was_killed() {
    let Some(mut keep) = daemon("a_build_goes_on_after_its_server_was_killed") else { return };
    keep.keep_address();
    let text = "FROM small\nRUN echo 1 > /1; echo made-one\nRUN sleep 3; echo 2 > /2\nRUN cat /1 /2 > /3\n";
    let dir = context(&keep, "killed", &[], text);
    let said = keep.scratch().join("said");
    let mut building = keep
        .command(["image", "build", "--progress", "plain", "-t", "built"])
        .arg(&dir)
        .stderr(fs::File::create(&said).unwrap())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let has = |text: &str| fs::read_to_string(&said).unwrap().contains(text);
    wait_until("the second step", || has("line 3: RUN"));
    keep.kill();
    keep.wait_for_death();
    keep.launch();
    let ended = building.wait().unwrap();
    let said = fs::read_to_string(&said).unwrap();
    assert!(ended.success(), "{said}");
    assert!(said.contains("goes on when it is back") && said.contains("(cached)"), "{said}");
    assert_eq!(said.matches("\nmade-one").count(), 1, "the first step ran once: {said}");
    wait_until("what was interrupted is deleted", || sandboxes(&keep) == 0);
    keep.ok(["create", "box", "--image", "built"]);
    assert_eq!(keep.sh("box", "cat /3"), "1\n2\n");
}

#[test]
fn a_caller_that_leaves_leaves_nothing_and_two_at_once_share() {
    let Some(keep) = daemon("a_caller_that_leaves_leaves_nothing") else { return };
    let dir = context(&keep, "left", &[], "FROM small\nRUN sleep 1000\n");
    let mut building = keep
        .command(["image", "build", "-t", "built"])
        .arg(&dir)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the step", || sandboxes(&keep) == 1);
    assert_eq!(keep.ok(["ls", "-q"]), "", "sandboxes of builds are not listed");
    building.kill().unwrap();
    building.wait().unwrap();
    wait_until("its sandbox is deleted", || sandboxes(&keep) == 0);

    let text = "FROM small\nRUN sleep 1; date +%N > /when\nCOPY f /f\n";
    let dir = context(&keep, "both", &[("f", 0o644, "f\n")], text);
    let start = |name: &str| {
        let mut command = keep.command(["image", "build", "--progress", "quiet", "-t", name]);
        command.arg(&dir).stdout(Stdio::null()).spawn().unwrap()
    };
    for mut building in ["one", "two"].map(start) {
        assert!(building.wait().unwrap().success());
    }
    assert_eq!(files_of(&keep, "one"), files_of(&keep, "two"), "the step was made once");
    assert_eq!(sandboxes(&keep), 0);
}

#[cfg(feature = "failpoints")]
#[test]
fn a_build_goes_on_wherever_its_server_dies() {
    for place in ["build.sealed", "build.step"] {
        let Some(mut keep) = daemon("a_build_goes_on_wherever_its_server_dies") else { return };
        keep.keep_address();
        keep.kill();
        keep.set_environment(&[("SANDKEEP_FAILPOINT", place)]);
        keep.launch();
        let text = "FROM small\nRUN echo once > /once; echo printed\n";
        let dir = context(&keep, "dies", &[], text);
        let mut command = keep.command(["image", "build", "--progress", "plain", "-t", "built"]);
        let building = command.arg(&dir).stderr(Stdio::piped()).stdout(Stdio::null()).spawn();
        keep.wait_for_death();
        keep.set_environment(&[]);
        keep.launch();
        let ended = building.unwrap().wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.success(), "{place}: {said}");
        let cached = said.contains("(cached)");
        assert_eq!(cached, place == "build.step", "{place}: {said}");
        wait_until("what was interrupted is deleted", || sandboxes(&keep) == 0);
        keep.ok(["fsck"]);
        keep.ok(["create", "box", "--image", "built"]);
        assert_eq!(keep.sh("box", "cat /once"), "once\n", "{place}");
    }
}
