//! An attached `keep exec` while the server is restarted: nothing is lost, nothing comes twice.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

/// A daemon with a sandbox `box`, or nothing if this host cannot run sandboxes.
fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    let keep = Daemon::with_small_image(env!("CARGO_BIN_EXE_keep"));
    keep.ok(["create", "box", "--image", SMALL]);
    Some(keep)
}

/// `keep exec` with its ends in our hands.
struct Exec {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Exec {
    fn start(keep: &Daemon, options: &[&str], script: &str) -> Self {
        let mut child = keep
            .command(["exec"])
            .args(options)
            .args(["box", "--", "sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line
    }

    fn say(&mut self, text: &str) {
        self.input.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// Its exit code, the rest of its output, and what it said on standard error.
    fn end(mut self) -> (Option<i32>, Vec<u8>, String) {
        drop(self.input.take());
        let mut rest = Vec::new();
        self.output.read_to_end(&mut rest).unwrap();
        let output = self.child.wait_with_output().unwrap();
        (output.status.code(), rest, String::from_utf8(output.stderr).unwrap())
    }
}

#[test]
fn an_attached_command_goes_on_over_restarts() {
    let Some(mut keep) = daemon("an_attached_command_goes_on_over_restarts") else { return };
    let script = "while read line; do echo \"got $line\"; done; echo done >&2; exit 7";
    let mut exec = Exec::start(&keep, &["-i"], script);
    exec.say("one\n");
    assert_eq!(exec.line(), "got one\n");
    for crash in [true, false] {
        match crash {
            true => keep.kill(),
            false => keep.terminate(),
        }
        // Typed while the server is away.
        exec.say("two\n");
        keep.launch();
        assert_eq!(exec.line(), "got two\n", "crash: {crash}");
        exec.say("three\n");
        assert_eq!(exec.line(), "got three\n", "crash: {crash}");
    }
    let (code, rest, told) = exec.end();
    assert_eq!((code, rest.as_slice()), (Some(7), &b""[..]), "{told}");
    assert_eq!(told.matches("the command goes on").count(), 2, "{told}");
    assert_eq!(told.matches("keep: reconnected\n").count(), 2, "{told}");
    assert!(told.ends_with("done\n"), "{told}");
    assert_eq!(keep.json(["ps", "box"]), serde_json::json!([]));
}

#[test]
fn bytes_pass_whole_over_a_crash_in_both_directions() {
    let Some(mut keep) = daemon("bytes_pass_whole_over_a_crash") else { return };
    let sent: Vec<u8> =
        (0..6_000_000u32).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let mut exec = Exec::start(&keep, &["-i"], "cat");
    let mut input = exec.input.take().unwrap();
    let copy = sent.clone();
    let writer = std::thread::spawn(move || {
        for piece in copy.chunks(100_000) {
            input.write_all(piece).unwrap();
            sleep(Duration::from_millis(20));
        }
    });
    let mut come = vec![0; 1_500_000];
    exec.output.read_exact(&mut come).unwrap();
    keep.kill();
    keep.launch();
    let (code, rest, told) = exec.end();
    writer.join().unwrap();
    come.extend(rest);
    assert_eq!(code, Some(0), "{told}");
    assert!(come == sent, "{} of {} bytes came back: {told}", come.len(), sent.len());
    assert!(told.contains("reconnected"), "{told}");
}

#[test]
fn a_command_that_ends_while_the_server_is_away_is_told() {
    let Some(mut keep) = daemon("a_command_that_ends_while_the_server_is_away") else { return };
    let script = "echo begun; while ! test -e /work/go; do sleep 0.05; done; echo over; exit 9";
    let mut exec = Exec::start(&keep, &[], script);
    assert_eq!(exec.line(), "begun\n");
    keep.ok(["exec", "-d", "box", "--", "sh", "-c", "sleep 2; touch /work/go"]);
    keep.kill();
    sleep(Duration::from_secs(3));
    keep.launch();
    let (code, rest, told) = exec.end();
    assert_eq!((code, rest.as_slice()), (Some(9), &b"over\n"[..]), "{told}");
}

#[test]
fn signals_reach_a_command_after_a_restart() {
    let Some(mut keep) = daemon("signals_reach_a_command_after_a_restart") else { return };
    let script = "trap 'echo got it; exit 9' INT; echo ready; while :; do sleep 0.02; done";
    let mut exec = Exec::start(&keep, &[], script);
    assert_eq!(exec.line(), "ready\n");
    keep.kill();
    keep.launch();
    // A signal before it has reconnected would end the waiting, not the command.
    let mut told = BufReader::new(exec.child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("reconnected") {
        line.clear();
        assert!(told.read_line(&mut line).unwrap() > 0, "it ended");
    }
    kill_process(Pid::from_child(&exec.child), Signal::INT).unwrap();
    assert_eq!(exec.line(), "got it\n");
    assert_eq!(exec.child.wait().unwrap().code(), Some(9));
}

#[test]
fn a_server_that_stays_away_is_waited_for_and_no_longer() {
    let Some(mut keep) = daemon("a_server_that_stays_away_is_waited_for") else { return };
    let script = "echo ready; while ! test -e /work/go; do sleep 0.05; done; echo over";
    let mut execs: Vec<Exec> = ["2s", "0s", "10m"]
        .map(|patience| Exec::start(&keep, &["--reconnect", patience], script))
        .into();
    for exec in &mut execs {
        assert_eq!(exec.line(), "ready\n");
    }
    let begun = Instant::now();
    keep.kill();
    let interrupted = execs.pop().unwrap();
    let at_once = execs.pop().unwrap();
    let (code, _, told) = at_once.end();
    assert_eq!(code, Some(125), "{told}");
    assert!(told.contains("connection to the server broke"), "{told}");
    let (code, _, told) = execs.pop().unwrap().end();
    assert_eq!(code, Some(125), "{told}");
    assert!(told.contains("did not come back within 2s"), "{told}");
    let id = told.split("keep logs -f box ").nth(1).and_then(|rest| rest.split('`').next());
    let id = id.unwrap_or_else(|| panic!("no advice: {told}")).to_owned();
    assert!(begun.elapsed() >= Duration::from_secs(2));
    kill_process(Pid::from_child(&interrupted.child), Signal::INT).unwrap();
    let (code, _, told) = interrupted.end();
    assert_eq!(code, Some(125), "{told}");
    assert!(told.contains("interrupted; command cmd-") && told.contains("goes on"), "{told}");
    keep.launch();
    keep.sh("box", "touch /work/go");
    assert_eq!(keep.ok(["logs", "-f", "box", &id]), "ready\nover\n", "it went on");
}
