//! Typical mistakes: each gets an answer that names the cause and says what to do.

use std::fs;
use std::process::{Command, Output, Stdio};

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

use crate::full_disk::Disk;

/// A mistake, and what must be in the answer to it.
struct Mistake<'a> {
    args: &'a [&'a str],
    code: i32,
    cause: &'a str,
    advice: &'a str,
}

fn mistake<'a>(args: &'a [&'a str], code: i32, cause: &'a str, advice: &'a str) -> Mistake<'a> {
    Mistake { args, code, cause, advice }
}

/// What is wrong with an answer.
fn flaws(mistake: &Mistake<'_>, output: &Output) -> Vec<String> {
    let told = String::from_utf8_lossy(&output.stderr);
    let mut flaws = Vec::new();
    let mut must = |holds: bool, flaw: String| {
        if !holds {
            flaws.push(format!("keep {}: {flaw}\n{told}", mistake.args.join(" ")));
        }
    };
    let code = output.status.code();
    must(code == Some(mistake.code), format!("exit code {code:?}, not {}", mistake.code));
    must(output.stdout.is_empty(), "it printed to standard output".to_owned());
    let lines: Vec<&str> = told.lines().collect();
    let (first, rest) = lines.split_first().map_or(("", &[][..]), |(first, rest)| (*first, rest));
    let rest = rest.join("\n");
    must(first.starts_with("error: "), "no error".to_owned());
    must(first.contains(mistake.cause), format!("the cause `{}` is not named", mistake.cause));
    let leads = ["hint: ", "tip: ", "Usage: ", "For more information"];
    must(leads.iter().any(|lead| rest.contains(lead)), "no advice".to_owned());
    must(rest.contains(mistake.advice), format!("no `{}` in the advice", mistake.advice));
    must(!told.contains("panicked"), "it panicked".to_owned());
    flaws
}

fn none(flaws: &[String]) {
    assert!(flaws.is_empty(), "{} answers do not help:\n\n{}", flaws.len(), flaws.join("\n\n"));
}

#[test]
fn twenty_mistakes_are_answered_with_advice() {
    let test = "twenty_mistakes_are_answered_with_advice";
    if let Some(why) = unfit() {
        return skipped(test, why);
    }
    let keep = Daemon::with_small_image(env!("CARGO_BIN_EXE_keep"));
    keep.ok(["create", "my-app", "--image", SMALL]);
    keep.ok(["create", "asleep", "--image", SMALL, "--no-start"]);
    let over = keep.ok(["exec", "-d", "my-app", "--", "true"]);
    while keep.json(["ps", "my-app"]) != serde_json::json!([]) {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let made = |scope: &str| keep.json(["key", "create", scope, "--scope", scope]);
    let (reader, old) = (made("read"), made("write"));
    keep.ok(["key", "revoke", old["key"]["id"].as_str().unwrap()]);
    let [reader, old] = [&reader, &old].map(|key| key["secret"].as_str().unwrap());
    let junk = keep.scratch().join("junk.tar");
    fs::write(&junk, vec![7; 4096]).unwrap();
    let junk = junk.to_str().unwrap();
    let dir = keep.scratch().to_str().unwrap();
    let (plain, _) = keep.url_and_key();
    let https = plain.replace("http://", "https://");
    let wrong_snapshot = "snp-00000000000000000000000000";
    let flaws: Vec<String> = [
        mistake(&["create", "x", "--imgae", SMALL], 2, "'--imgae'", "'--image'"),
        mistake(&["exce", "my-app"], 2, "'exce'", "'exec'"),
        mistake(&["exec", "my-app"], 2, "required", "Usage: keep exec"),
        mistake(&["create", "x", "--memory", "lots"], 2, "`lots`", "--help"),
        mistake(&["show", "my-ap"], 4, "`my-ap`", "did you mean `my-app`?"),
        mistake(&["exec", "ym-app", "--", "true"], 125, "`ym-app`", "did you mean `my-app`?"),
        mistake(&["show", "something-else"], 4, "`something-else`", "keep ls"),
        mistake(&["create", "my-app"], 5, "my-app", "keep create my-app --get"),
        mistake(&["create", "bad name"], 1, "letters, digits", "--help"),
        mistake(&["create", "x", "--image", "pyton"], 4, "`pyton`", "keep image pull"),
        mistake(&["create", "x", "--driver", "docker"], 1, "container", "keep doctor"),
        mistake(&["create", "x", "--secret", "TOKEN"], 4, "TOKEN", "keep secret set"),
        mistake(&["create", "x", "--mount", "data:/data"], 4, "data", "keep drive create"),
        mistake(&["cp", "./nope", "my-app:/work/"], 1, "cannot read `./nope`", "NAME:/path"),
        mistake(&["cp", "my-app:/nope", "."], 4, "/nope", "keep exec"),
        mistake(&["cp", dir, "my-app:/work"], 1, "is a directory", "cp -r"),
        mistake(&["cp", "a", "b"], 1, "neither end", "NAME:/path"),
        mistake(&["exec", "my-app", "--", "pyhton"], 127, "pyhton", "inside the sandbox"),
        mistake(&["exec", "my-app", "--", "/etc/passwd"], 126, "/etc/passwd", "chmod +x"),
        mistake(&["exec", "-C", "/nope", "my-app", "--", "true"], 125, "/nope", "mkdir"),
        mistake(&["exec", "-u", "nobdy", "my-app", "--", "true"], 125, "nobdy", "/etc/passwd"),
        mistake(&["exec", "--if-running", "asleep", "--", "true"], 125, "asleep", "keep start"),
        mistake(&["logs", "asleep"], 1, "no commands", "keep exec asleep"),
        mistake(&["kill", "my-app", over.trim()], 5, "ended", "keep logs"),
        mistake(&["rollback", "my-app", wrong_snapshot], 4, wrong_snapshot, "keep snapshot ls"),
        mistake(&["pause", "my-app"], 5, "memory", "keep stop my-app"),
        mistake(&["start", "my-app", "--expect-generation", "9"], 5, "generation", "look again"),
        mistake(&["image", "import", "x", junk], 1, "cannot be imported", "docker save"),
        mistake(&["image", "pull", "registry.invalid/x:1"], 1, "registry.invalid", "network"),
        mistake(&["--url", "localhost:7777", "ls"], 1, "`localhost:7777`", "SANDKEEP_URL"),
        mistake(&["--url", "http://127.0.0.1:1", "ls"], 3, "cannot reach", "keep serve"),
        mistake(&["--url", "http://no.such.host.invalid", "ls"], 3, "cannot reach", "--url"),
        mistake(&["--url", &https, "--key", old, "ls"], 3, "https", "http://"),
        mistake(&["--key", old, "ls"], 1, "key", "keep key create"),
        mistake(&["--key", reader, "rm", "my-app"], 1, "scope", "keep key create --scope write"),
        mistake(&["backup", "verify", "/no/such/backup"], 1, "/no/such/backup", "backup"),
    ]
    .iter()
    .flat_map(|mistake| flaws(mistake, &keep.keep(mistake.args)))
    .collect();
    none(&flaws);
    assert_eq!(keep.json(["show", "my-app"])["state"], "running", "no mistake did any harm");
    assert_eq!(keep.ok(["ls", "-q"]).lines().count(), 2, "nor left anything behind");
}

#[test]
fn mistakes_of_whoever_starts_a_server_are_answered_with_advice() {
    let test = "mistakes_of_whoever_starts_a_server_are_answered_with_advice";
    if let Some(why) = unfit() {
        return skipped(test, why);
    }
    let keep = Daemon::start(env!("CARGO_BIN_EXE_keep"));
    let path = |name: &str| keep.scratch().join(name).to_str().unwrap().to_owned();
    let (taken, fresh, file) = (path("data"), path("fresh"), path("file"));
    fs::write(&file, "").unwrap();
    let (misspelt, missing) = (path("misspelt.toml"), path("missing.toml"));
    fs::write(&misspelt, "lisen = '127.0.0.1:1'\n").unwrap();
    let below = format!("{file}/data");
    let (url, _) = keep.url_and_key();
    let address = url.trim_start_matches("http://");
    let serve = |mistake: &Mistake<'_>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keep"));
        command.args(mistake.args).env_remove("SANDKEEP_DATA").stdin(Stdio::null());
        // A mistake that is not noticed starts a server.
        let mut limited = Command::new("timeout");
        limited.arg("60").arg(command.get_program()).args(command.get_args());
        limited.env_remove("SANDKEEP_DATA").env("NO_COLOR", "1").output().unwrap()
    };
    let listen = ["serve", "--data", &fresh, "--listen", address];
    let flaws: Vec<String> = [
        mistake(&["serve", "--data", &taken, "--listen", "127.0.0.1:0"], 1, &taken, "--data"),
        mistake(&listen, 1, "cannot listen", "--listen"),
        mistake(
            &["serve", "--data", &fresh, "--listen", "nonsense"],
            1,
            "nonsense",
            "127.0.0.1:7777",
        ),
        mistake(&["serve", "--config", &misspelt], 1, &misspelt, "keep config"),
        mistake(&["serve", "--config", &missing], 1, &missing, "--config"),
        mistake(&["config", "check", &misspelt], 1, &misspelt, "keep config"),
        mistake(&["serve", "--data", &below, "--listen", "127.0.0.1:0"], 1, &below, "--data"),
        mistake(&["fsck", "--data", &missing], 1, &missing, "--data"),
    ]
    .iter()
    .flat_map(|mistake| flaws(mistake, &serve(mistake)))
    .collect();
    none(&flaws);
}

#[test]
fn a_full_disk_is_answered_with_advice() {
    if let Some(why) = unfit() {
        return skipped("a_full_disk_is_answered_with_advice", why);
    }
    let disk = Disk::new(900 << 20);
    let keep = Daemon::start_at(env!("CARGO_BIN_EXE_keep"), disk.point.join("data"), &[]);
    keep.import_small();
    keep.ok(["create", "app", "--image", SMALL, "--no-start"]);
    let filler = disk.fill();
    let flaws: Vec<String> = [
        mistake(&["start", "app"], 1, "free", "delete"),
        mistake(&["create", "more", "--image", SMALL], 1, "free", "keep usage"),
        mistake(&["run", "--rm", "--image", SMALL, "--", "true"], 125, "free", "keep usage"),
    ]
    .iter()
    .flat_map(|mistake| flaws(mistake, &keep.keep(mistake.args)))
    .collect();
    fs::remove_file(filler).unwrap();
    none(&flaws);
    keep.ok(["start", "app"]);
}
