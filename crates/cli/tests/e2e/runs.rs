//! Runs and approvals with real containers: `keep ask` from inside, a daemon that dies. `docs.rs` runs the guide.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    Some(Daemon::with_small_image(env!("CARGO_BIN_EXE_keep")))
}

fn fails(keep: &Daemon, args: &[&str], code: i32) -> String {
    let (found, said) = keep.fails(args.iter());
    assert_eq!(found, code, "{args:?}: {said}");
    said
}

/// Asks until there is an answer.
fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        if let Some(answer) = ask() {
            return answer;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("{what} did not come about");
}

fn status(keep: &Daemon, run: &str) -> String {
    keep.json(["runs", "show", run])["status"].as_str().expect("a status").to_owned()
}

fn pending(keep: &Daemon) -> String {
    until("an approval", || {
        let all = keep.json(["approvals", "ls"]);
        all.as_array().and_then(|all| all.first()).map(|one| one["id"].as_str().unwrap().to_owned())
    })
}

/// Starts `keep` and does not wait for it.
fn begin(keep: &Daemon, args: &[&str]) -> Child {
    let mut command = keep.command(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("keep starts")
}

#[test]
fn a_program_inside_asks_and_its_exit_code_is_the_answer() {
    let Some(mut keep) = daemon("a_program_inside_asks_and_its_exit_code_is_the_answer") else {
        return;
    };
    keep.ok(["create", "my-app", "--image", SMALL]);
    keep.ok(["stop", "my-app"]);
    let script = "keep ask 'deploy to prod?' --context 'two files'; echo $? > /srv-1; \
                  keep ask 'and again?'; echo $? > /srv-2; \
                  keep ask --timeout 1 'is anybody there?'; echo $? > /srv-3; \
                  keep ask --timeout 1 --default deny 'hello?'; echo $? > /srv-4";
    let run = keep.ok(["runs", "start", "--sandbox", "my-app", "--fork", "--", "sh", "-c", script]);
    let run = run.trim();
    let first = pending(&keep);
    until("it waits", || (status(&keep, run) == "waiting_for_approval").then_some(()));
    let shown = keep.json(["approvals", "show", &first]);
    assert_eq!((&shown["source"], &shown["run"]), (&"agent".into(), &run.into()));
    assert_eq!(shown["context"], "two files");
    // A key that may only write neither answers nor accepts.
    let key = keep.ok(["key", "create", "agent", "--scope", "write"]);
    let refused = keep
        .command(["approvals", "approve", &first])
        .env("SANDKEEP_KEY", key.trim())
        .env("SANDKEEP_URL", keep.url_and_key().0)
        .output()
        .expect("keep starts");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("may approve"), "{refused:?}");
    // A daemon that dies meanwhile forgets neither the question nor who asked.
    keep.kill();
    keep.launch();
    assert_eq!(pending(&keep), first);
    keep.ok(["runs", "approve", run, "-m", "go ahead"]);
    fails(&keep, &["approvals", "deny", &first], 5);
    let second = until("the next question", || Some(pending(&keep)).filter(|id| *id != first));
    keep.ok(["approvals", "deny", &second]);
    until("its end", || (status(&keep, run) == "ready_for_review").then_some(()));
    let fork = keep.json(["runs", "show", run])["sandbox"].as_str().expect("a fork").to_owned();
    assert_eq!(keep.sh(&fork, "cat /srv-1 /srv-2 /srv-3 /srv-4"), "0\n1\n2\n1\n");
    // Nothing of it is in the result, and no other sandbox has the program.
    let paths = keep.ok(["diff", "my-app", &fork, "--name-only"]);
    assert_eq!(paths.lines().count(), 4, "{paths}");
    keep.ok(["create", "plain", "--image", SMALL]);
    assert_eq!(
        keep.sh("plain", "command -v keep || echo none; echo $PATH | grep -c sandkeep || :"),
        "none\n0\n"
    );
}

#[test]
fn commands_are_held_by_every_front_until_somebody_answers() {
    let Some(keep) = daemon("commands_are_held_by_every_front_until_somebody_answers") else {
        return;
    };
    keep.ok(["create", "my-app", "--image", SMALL, "--hold", "*deploy*", "--hold-expires", "5m"]);
    assert_eq!(keep.ok(["exec", "my-app", "--", "echo", "free"]), "free\n");
    let args = ["exec", "my-app", "--", "sh", "-c", "echo deploy > /out; cat /out"];
    let held = begin(&keep, &args);
    let approval = pending(&keep);
    keep.ok(["approvals", "approve", &approval]);
    let done = held.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&done.stdout), "deploy\n");
    let held = begin(&keep, &args);
    let approval = pending(&keep);
    keep.ok(["approvals", "deny", &approval, "-m", "not today"]);
    let done = held.wait_with_output().expect("it ends");
    assert_eq!(done.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&done.stderr).contains("not today"), "{done:?}");
    // A caller that leaves withdraws the question.
    let mut held = begin(&keep, &args);
    let approval = pending(&keep);
    held.kill().expect("it runs");
    held.wait().expect("it ends");
    until("it is closed", || {
        (keep.json(["approvals", "show", &approval])["status"] == "expired").then_some(())
    });
    // Only who may approve loosens the policy.
    let key = keep.ok(["key", "create", "agent", "--scope", "write"]);
    let refused = keep
        .command(["update", "my-app", "--hold", "none"])
        .env("SANDKEEP_KEY", key.trim())
        .env("SANDKEEP_URL", keep.url_and_key().0)
        .output()
        .expect("keep starts");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("may approve"), "{refused:?}");
    keep.ok(["update", "my-app", "--hold", "none"]);
    assert_eq!(keep.ok(args), "deploy\n");
}

#[test]
fn a_run_outlives_a_daemon_that_is_killed() {
    let Some(mut keep) = daemon("a_run_outlives_a_daemon_that_is_killed") else { return };
    keep.ok(["create", "my-app", "--image", SMALL]);
    keep.ok(["stop", "my-app"]);
    let script = "echo begun >> /count; while [ ! -e /go ]; do sleep 0.1; done; echo done > /out";
    let run = keep.ok(["runs", "start", "--sandbox", "my-app", "--fork", "--", "sh", "-c", script]);
    let run = run.trim();
    let fork = until("its command", || {
        let shown = keep.json(["runs", "show", run]);
        let begun = !shown["attempts"].as_array()?.is_empty();
        shown["sandbox"].as_str().filter(|_| begun).map(str::to_owned)
    });
    keep.kill();
    keep.launch();
    assert_eq!(status(&keep, run), "running");
    keep.sh(&fork, "touch /go");
    let waited = keep.keep(["runs", "wait", run]);
    assert_eq!(waited.status.code(), Some(0), "{waited:?}");
    assert_eq!(keep.sh(&fork, "cat /count /out"), "begun\ndone\n", "it was started once");
    let review = fails(&keep, &["runs", "accept", run], 5);
    assert!(review.contains("--again"), "its sandbox runs again: {review}");
    keep.ok(["runs", "review", run, "--again"]);
    keep.ok(["runs", "accept", run, "--rm"]);
    assert_eq!(keep.sh("my-app", "cat /out"), "done\n");
    until("its fork is deleted", || (!keep.ok(["ls", "-q"]).contains(&fork)).then_some(()));
}

/// Has the next daemon die at a fail point, or not.
#[cfg(feature = "failpoints")]
fn restart(keep: &mut Daemon, environment: &[(&str, &str)]) {
    if keep.is_alive() {
        keep.kill();
    }
    keep.set_environment(environment);
    keep.launch();
}

#[cfg(feature = "failpoints")]
#[test]
fn a_daemon_that_dies_at_any_step_of_a_run_goes_on_with_it() {
    let test = "a_daemon_that_dies_at_any_step_of_a_run_goes_on_with_it";
    let Some(mut keep) = daemon(test) else { return };
    keep.ok(["create", "my-app", "--image", SMALL]);
    keep.ok(["stop", "my-app"]);
    let start =
        ["runs", "start", "--sandbox", "my-app", "--fork", "--", "sh", "-c", "echo x >> /count"];
    let newest = |keep: &Daemon| {
        let all = keep.ok(["runs", "ls", "-q", "-n", "1"]);
        all.trim().to_owned()
    };
    for point in ["run.started", "run.sandbox", "run.attempt", "run.pinned"] {
        let sandboxes = keep.ok(["ls", "-q"]).lines().count();
        restart(&mut keep, &[("SANDKEEP_FAILPOINT", point)]);
        // It may die before it answers.
        let _ = keep.keep(start);
        keep.wait_for_death();
        restart(&mut keep, &[]);
        let run = newest(&keep);
        let waited = keep.keep(["runs", "wait", &run]);
        assert_eq!(waited.status.code(), Some(0), "{point}: {waited:?}");
        let shown = keep.json(["runs", "show", &run]);
        assert_eq!(shown["attempts"].as_array().map(Vec::len), Some(1), "{point}");
        let fork = shown["sandbox"].as_str().expect("a fork");
        assert_eq!(keep.sh(fork, "cat /count"), "x\n", "{point}: it was started once");
        let after = keep.ok(["ls", "-q"]).lines().count();
        assert_eq!(after, sandboxes + 1, "{point}: one fork was made");
    }
    for point in ["run.accepting", "promote.captured", "promote.done", "run.brought_back"] {
        let run = keep.ok(start).trim().to_owned();
        assert!(keep.keep(["runs", "wait", &run]).status.success());
        let before = keep.json(["show", "my-app"])["generation"].as_u64().expect("a number");
        restart(&mut keep, &[("SANDKEEP_FAILPOINT", point)]);
        let _ = keep.keep(["runs", "accept", &run]);
        keep.wait_for_death();
        restart(&mut keep, &[]);
        until(point, || (status(&keep, &run) == "accepted").then_some(()));
        let after = keep.json(["show", "my-app"])["generation"].as_u64().expect("a number");
        assert_eq!(after, before + 1, "{point}: it was promoted once");
    }
    assert_eq!(keep.sh("my-app", "cat /count"), "x\n".repeat(4));
}

#[cfg(feature = "failpoints")]
#[test]
fn a_daemon_that_dies_while_a_sandbox_stands_still_leaves_nothing_stuck() {
    let test = "a_daemon_that_dies_while_a_sandbox_stands_still_leaves_nothing_stuck";
    let Some(mut keep) = daemon(test) else { return };
    keep.ok(["create", "my-app", "--image", SMALL]);
    keep.ok(["stop", "my-app"]);
    restart(&mut keep, &[("SANDKEEP_FAILPOINT", "approval.frozen")]);
    let script = "keep ask 'deploy?' && echo deployed > /out";
    let run = keep.ok(["runs", "start", "--sandbox", "my-app", "--fork", "--", "sh", "-c", script]);
    let run = run.trim();
    // Its processes are frozen when the server dies.
    keep.wait_for_death();
    restart(&mut keep, &[]);
    let shown = keep.json(["runs", "show", run]);
    let fork = shown["sandbox"].as_str().expect("a fork").to_owned();
    assert_eq!(keep.sh(&fork, "echo it answers"), "it answers\n");
    until("it still waits", || (status(&keep, run) == "waiting_for_approval").then_some(()));
    keep.ok(["runs", "approve", run]);
    let waited = keep.keep(["runs", "wait", run]);
    assert_eq!(waited.status.code(), Some(0), "{waited:?}");
    assert_eq!(keep.sh(&fork, "cat /out"), "deployed\n");
}
