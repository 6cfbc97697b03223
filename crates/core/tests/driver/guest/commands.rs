//! Commands: streams, users, signals, terminals, reconnecting.

use std::time::Duration;

use bytes::Bytes;
use sandkeep_core::guest::{Guest, GuestError, OutputEvent};
use sandkeep_proto::frame::WINDOW;
use sandkeep_proto::link::{Exit, Failure, Spawn, TermSize};

use crate::guest::machine::{Machine, PATIENCE, failure, hear, run, shell, spawn, wait_for};

#[tokio::test]
async fn a_command_prints_and_ends() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let heard = run(&guest, shell("a", "echo out; echo err >&2; exit 3")).await;
    assert_eq!((heard.out.as_slice(), heard.err.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(heard.exit, Some(Exit::with_code(3)));
}

#[tokio::test]
async fn a_signal_is_an_exit_code_too() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let heard = run(&guest, shell("a", "kill -9 $$")).await;
    assert_eq!(heard.exit, Some(Exit::by_signal(9)));
}

#[tokio::test]
async fn programs_that_cannot_run_are_explained() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let plain = machine.work().join("plain");
    std::fs::write(&plain, "no program").expect("our own directory");
    let plain = plain.to_str().expect("plain").to_owned();
    for (program, kind) in [
        ("no-such-program", Failure::NoExecutable),
        ("/no/such/program", Failure::NoExecutable),
        (plain.as_str(), Failure::NotExecutable),
        ("/etc", Failure::NotExecutable),
    ] {
        let error = guest.spawn(spawn(program, &[program])).await.expect_err("it cannot run");
        assert_eq!(error.failure(), Some(kind), "{error}");
        assert!(error.to_string().contains(program), "{error}");
    }
    assert_eq!(failure(guest.spawn(spawn("none", &[])).await), Failure::Invalid);
    assert_eq!(failure(guest.spawn(spawn("zero", &["/bin/true", "a\0b"])).await), Failure::Invalid);
    let nowhere = Spawn { cwd: Some("/no/such".to_owned()), ..spawn("cwd", &["/bin/true"]) };
    assert_eq!(failure(guest.spawn(nowhere).await), Failure::NoDirectory);
    let nobody = Spawn { user: Some("no-such-user".to_owned()), ..spawn("user", &["/bin/true"]) };
    assert_eq!(failure(guest.spawn(nobody).await), Failure::NoUser);
    assert_eq!(guest.commands().await.expect("a list"), [], "what did not start is not known");
}

#[tokio::test]
async fn a_program_is_found_on_the_commands_own_path() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let program = machine.work().join("greet");
    // Without `#!`: the shell's, as everywhere.
    std::fs::write(&program, "echo hello \"$@\"").expect("our own directory");
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("our own");
    let mut command = spawn("a", &["greet", "there"]);
    let path = format!("/nowhere:{}", machine.work().display());
    command.env.insert("PATH".to_owned(), path);
    assert_eq!(run(&guest, command).await.text(), "hello there\n");
}

#[tokio::test]
async fn the_environment_is_the_commands_own() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let mut command = spawn("a", &["env"]);
    command.env.insert("COLOUR".to_owned(), "blue=green\nand".to_owned());
    let text = run(&guest, command).await.text();
    for line in [
        "COLOUR=blue=green\nand\n",
        "HOME=/root\n",
        "USER=root\n",
        "LOGNAME=root\n",
        "PATH=",
        "SHELL=",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert_eq!(text.lines().count(), 7, "and nothing else: {text}");
}

#[tokio::test]
async fn a_command_inherits_nothing_of_the_agent() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let script = "ls /proc/self/fd | wc -l; grep -E '^Sig(Blk|Ign)' /proc/self/status; umask; \
        cut -d' ' -f5,6 /proc/self/stat; ulimit -n";
    let heard = run(&guest, shell("a", script)).await;
    let text = heard.text();
    let lines: Vec<&str> = text.lines().collect();
    // The three, and the one `ls` has open.
    assert_eq!(lines[0], "4", "{text}");
    assert_eq!(lines[1], "SigBlk:\t0000000000000000");
    assert_eq!(lines[2], "SigIgn:\t0000000000000000");
    assert_eq!(lines[3], "0022");
}

#[tokio::test]
async fn users_are_switched_to_whole() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let as_user = |id: &str, user: &str| Spawn {
        user: Some(user.to_owned()),
        ..shell(id, "id -u; id -g; id -G; pwd; echo $HOME $USER")
    };
    let text = run(&guest, as_user("name", "nobody")).await.text();
    assert_eq!(text, "65534\n65534\n65534\n/\n/nonexistent nobody\n");
    let text = run(&guest, as_user("number", "4242")).await.text();
    assert_eq!(text, "4242\n0\n0\n/\n/ 4242\n");
    let text = run(&guest, as_user("both", "nobody:7")).await.text();
    assert_eq!(text, "65534\n7\n7\n/\n/nonexistent nobody\n");
    let secret = machine.work().join("secret");
    std::fs::write(&secret, "x").expect("our own directory");
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("our own");
    let cat = Spawn {
        user: Some("nobody".to_owned()),
        ..spawn("cat", &["cat", secret.to_str().expect("plain")])
    };
    assert_eq!(run(&guest, cat).await.code(), 1, "it may not read root's file");
}

#[tokio::test]
async fn standard_input_arrives_and_ends() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let mut process =
        guest.spawn(Spawn { stdin: true, ..spawn("a", &["sha256sum"]) }).await.expect("it starts");
    let bytes = Bytes::from(vec![b'x'; 3 << 20]);
    process.stdin.send(bytes).await.expect("it reads");
    process.stdin.close().await.expect("it reads to the end");
    process.stdin.close().await.expect("again is fine");
    assert!(matches!(process.stdin.send(Bytes::from_static(b"x")).await, Err(GuestError::Gone)));
    let heard = hear(&mut process.output).await.expect("it ends");
    let plain = run(&guest, shell("b", "head -c 3145728 /dev/zero | tr '\\0' x | sha256sum")).await;
    assert_eq!(heard.text(), plain.text());
}

#[tokio::test]
async fn input_nobody_reads_is_refused() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let script = Spawn { stdin: true, ..shell("a", "exec <&-; echo closed; sleep 1000") };
    let mut process = guest.spawn(script).await.expect("it starts");
    wait_for(&mut process, "closed").await;
    let sending = async {
        loop {
            if let Err(error) = process.stdin.send(Bytes::from_static(b"anybody?")).await {
                return error;
            }
            tokio::task::yield_now().await;
        }
    };
    let error = tokio::time::timeout(PATIENCE, sending).await.expect("it is noticed");
    assert!(matches!(error, GuestError::Gone), "{error:?}");
    guest.signal("a", 9).await.expect("it runs");
    assert_eq!(hear(&mut process.output).await.expect("it ends").code(), 137);
    let none = guest.spawn(spawn("b", &["cat"])).await.expect("it starts");
    let stdin = none.stdin;
    assert!(matches!(stdin.send(Bytes::from_static(b"x")).await, Err(GuestError::Gone)));
}

#[tokio::test]
async fn a_slow_reader_holds_the_process_back_and_loses_nothing() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let count = machine.work().join("count");
    let script = format!("seq 1 400000; echo done > {}", count.display());
    let mut process = guest.spawn(shell("a", &script)).await.expect("it starts");
    let mut seen = Vec::new();
    let mut unkept = 0;
    // Without keeping anything a window comes and no more.
    while seen.len() < WINDOW {
        let OutputEvent::Stdout(bytes) = process.output.next().await.expect("more") else {
            panic!("only output so far");
        };
        unkept += bytes.len();
        seen.extend_from_slice(&bytes);
    }
    assert_eq!(seen.len(), WINDOW);
    let more = tokio::time::timeout(Duration::from_millis(50), process.output.next()).await;
    assert!(more.is_err(), "nothing comes without credit: {more:?}");
    assert!(!count.exists(), "the process waits");
    process.output.keep(unkept);
    let rest = hear(&mut process.output).await.expect("it goes on");
    seen.extend_from_slice(&rest.out);
    let wanted: String = (1..=400_000).map(|n| format!("{n}\n")).collect();
    assert!(seen == wanted.as_bytes(), "{} bytes of {}", seen.len(), wanted.len());
    assert_eq!(rest.code(), 0);
}

#[tokio::test]
async fn a_reconnect_in_the_middle_loses_and_doubles_nothing() {
    let machine = Machine::start();
    let script = "seq 1 200000; seq 1 100000 >&2; exit 5";
    let mut guest = machine.connect().await;
    let mut process = guest.spawn(shell("a", script)).await.expect("it starts");
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut events = 0;
    let mut round = 0;
    let exit = loop {
        let event = process.output.next().await.expect("the connection holds");
        events += 1;
        match event {
            OutputEvent::Stdout(bytes) => {
                process.output.keep(bytes.len());
                out.extend_from_slice(&bytes);
            }
            OutputEvent::Stderr(bytes) => {
                process.output.keep(bytes.len());
                err.extend_from_slice(&bytes);
            }
            OutputEvent::Exited(exit) => break exit,
        }
        // Every few frames the daemon "dies"; what it has not stored it has not got.
        if events % 7 == 0 {
            round += 1;
            let from = (out.len() + err.len()) as u64;
            drop(process);
            if round % 2 == 0 {
                guest = machine.connect().await;
            }
            process = guest.attach("a", from, 0).await.expect("it is known");
        }
    };
    assert_eq!(exit.code, 5);
    let wanted: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert!(out == wanted.as_bytes(), "{} bytes of {}", out.len(), wanted.len());
    let wanted: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    assert!(err == wanted.as_bytes(), "{} bytes of {}", err.len(), wanted.len());
    assert!(round > 3, "it was interrupted {round} times");
}

#[tokio::test]
async fn a_command_that_ended_meanwhile_is_told_later() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let mut process = guest.spawn(shell("a", "printf 12345; exit 4")).await.expect("it starts");
    hear(&mut process.output).await.expect("it ends");
    drop(process);
    drop(guest);
    let guest = machine.connect().await;
    let known = guest.commands().await.expect("a list");
    assert_eq!(known.len(), 1);
    assert_eq!(known[0].exit, Some(Exit::with_code(4)));
    let mut process = guest.attach("a", 5, 0).await.expect("it is known");
    assert_eq!(hear(&mut process.output).await.expect("its end").code(), 4);
    assert_eq!(failure(guest.attach("a", 2, 0).await), Failure::Invalid, "those were kept");
    assert_eq!(failure(guest.attach("a", 9, 0).await), Failure::Invalid, "those never were");
    assert_eq!(failure(guest.attach("b", 0, 0).await), Failure::NotFound);
    assert_eq!(failure(guest.spawn(shell("a", "true")).await), Failure::Exists);
    guest.forget("a").await.expect("it has ended");
    guest.forget("a").await.expect("again is fine");
    assert_eq!(guest.commands().await.expect("a list"), []);
}

#[tokio::test]
async fn unkept_output_is_sent_again() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let mut process =
        guest.spawn(shell("a", "printf abc; printf def >&2")).await.expect("it starts");
    let mut first = Vec::new();
    while let OutputEvent::Stdout(bytes) | OutputEvent::Stderr(bytes) =
        process.output.next().await.expect("the connection holds")
    {
        first.extend_from_slice(&bytes);
    }
    let guest = machine.connect().await;
    let mut process = guest.attach("a", 2, 0).await.expect("it is known");
    let heard = hear(&mut process.output).await.expect("it ends");
    let mut again = heard.out.clone();
    again.extend_from_slice(&heard.err);
    again.sort_unstable();
    first.drain(..2);
    first.sort_unstable();
    assert_eq!(again, first);
}

#[tokio::test]
async fn standard_input_goes_on_after_a_reconnect() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let cat = Spawn { stdin: true, ..spawn("a", &["cat"]) };
    let mut process = guest.spawn(cat).await.expect("it starts");
    process.stdin.send(Bytes::from_static(b"one ")).await.expect("it reads");
    wait_for(&mut process, "one ").await;
    let guest = machine.connect().await;
    assert_eq!(failure(guest.attach("a", 4, 99).await), Failure::Invalid);
    let mut process = guest.attach("a", 4, 4).await.expect("it is known");
    assert_eq!(process.stdin_taken, 4);
    process.stdin.send(Bytes::from_static(b"two")).await.expect("it reads");
    process.stdin.close().await.expect("it reads to the end");
    assert_eq!(hear(&mut process.output).await.expect("it ends").text(), "two");
}

#[tokio::test]
async fn a_newer_connection_replaces_the_older() {
    let machine = Machine::start();
    let older = machine.connect().await;
    let newer = machine.connect().await;
    tokio::time::timeout(PATIENCE, older.lost()).await.expect("it is dropped");
    assert!(older.is_lost());
    assert!(matches!(older.commands().await, Err(GuestError::Lost)));
    assert!(!newer.is_lost());
    assert_eq!(older.generation(), newer.generation());
    newer.commands().await.expect("it is served");
}

#[tokio::test]
async fn attaching_twice_lets_the_first_go() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let mut first = guest.spawn(shell("a", "echo x; sleep 1000")).await.expect("it starts");
    wait_for(&mut first, "x").await;
    let _second = guest.attach("a", 2, 0).await.expect("it is known");
    assert_eq!(failure(first.output.next().await), Failure::Exists);
}

#[tokio::test]
async fn signals_go_to_the_whole_group() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let mut process = guest
        .spawn(shell("a", "sleep 1000 & sleep 1000 & echo up; wait"))
        .await
        .expect("it starts");
    wait_for(&mut process, "up").await;
    guest.signal("a", 15).await.expect("it runs");
    assert_eq!(hear(&mut process.output).await.expect("it ends").exit, Some(Exit::by_signal(15)));
    assert_eq!(failure(guest.signal("a", 15).await), Failure::NotFound, "it has ended");
    assert_eq!(failure(guest.signal("b", 15).await), Failure::NotFound);
    let mut process = guest.spawn(shell("c", "sleep 1000")).await.expect("it starts");
    assert_eq!(failure(guest.signal("c", 9999).await), Failure::Invalid);
    assert_eq!(failure(guest.forget("c").await), Failure::Invalid, "it runs");
    guest.signal("c", 9).await.expect("it runs");
    hear(&mut process.output).await.expect("it ends");
    let sleeping = run(&guest, shell("d", "ps -e -o comm | grep -c sleep")).await;
    assert_eq!(sleeping.text(), "0\n");
}

#[tokio::test]
async fn background_children_do_not_hold_the_end_up() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let mark = machine.work().join("mark");
    let script = format!(
        "echo before; (sleep 1; echo late; echo later; echo alive > {}) & exit 6",
        mark.display()
    );
    let heard = run(&guest, shell("a", &script)).await;
    assert_eq!((heard.text().as_str(), heard.code()), ("before\n", 6));
    assert!(!mark.exists(), "the end came before the child's");
    // It is not hurt by nobody listening.
    let waiting = async {
        while !mark.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("the child lives on");
    let heard = run(&guest, shell("b", "yes & exit 7")).await;
    assert_eq!(heard.code(), 7, "nor by one that never falls silent");
}

#[tokio::test]
async fn all_that_was_printed_before_the_exit_comes() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let mut process =
        guest.spawn(shell("a", "seq 1 50000; sleep 1000 & exit 0")).await.expect("it starts");
    // Slower than the silence that ends a command.
    tokio::time::sleep(Duration::from_millis(400)).await;
    let heard = hear(&mut process.output).await.expect("it ends");
    let wanted: String = (1..=50_000).map(|n| format!("{n}\n")).collect();
    assert!(heard.text() == wanted, "{} bytes of {}", heard.out.len(), wanted.len());
}

fn terminal(command: &str, script: &str) -> Spawn {
    let tty = Some(TermSize { cols: 80, rows: 24 });
    Spawn { tty, stdin: true, ..shell(command, script) }
}

#[tokio::test]
async fn a_terminal_is_a_terminal() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let script =
        "tty; stty size; trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.01; done";
    let mut process = guest.spawn(terminal("a", script)).await.expect("it starts");
    let seen = wait_for(&mut process, "ready").await;
    assert!(seen.starts_with("/dev/pts/"), "{seen}");
    assert!(seen.contains("24 80"), "{seen}");
    guest.resize("a", TermSize { cols: 132, rows: 50 }).await.expect("it has one");
    let heard = hear(&mut process.output).await.expect("it ends");
    assert!(heard.text().contains("50 132"), "{}", heard.text());
    let mut pipes = guest.spawn(shell("b", "sleep 1000")).await.expect("it starts");
    assert_eq!(failure(guest.resize("b", TermSize { cols: 1, rows: 1 }).await), Failure::Invalid);
    guest.signal("b", 9).await.expect("it runs");
    hear(&mut pipes.output).await.expect("it ends");
}

#[tokio::test]
async fn a_terminal_is_typed_on_and_ended() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    for (command, typed) in [("line", "hello\n"), ("middle", "hello")] {
        let mut process =
            guest.spawn(terminal(command, "cat; echo over")).await.expect("it starts");
        process.stdin.send(Bytes::from_static(typed.as_bytes())).await.expect("it reads");
        process.stdin.close().await.expect("it reads to the end");
        let heard = hear(&mut process.output).await.expect("it ends");
        assert!(heard.text().contains("over"), "{command}: {}", heard.text());
        assert_eq!(heard.text().matches("hello").count(), 2, "echoed, and printed by cat");
    }
    // Not through a shell, which has its own mind about a signal that comes while it starts a child.
    let cat = Spawn { argv: vec!["cat".to_owned()], ..terminal("c", "") };
    let mut process = guest.spawn(cat).await.expect("it starts");
    process.stdin.send(Bytes::from_static(b"up\n")).await.expect("it reads");
    wait_for(&mut process, "up\r\nup\r\n").await;
    process.stdin.send(Bytes::from_static(b"\x03")).await.expect("it reads");
    let exit = hear(&mut process.output).await.expect("it ends").exit.expect("it ended");
    assert_eq!(exit.code, 130, "interrupted from the keyboard");
}

#[tokio::test]
async fn a_user_owns_its_terminal() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let script = "exec 3<>$(tty) && echo opened";
    let command = Spawn { user: Some("nobody".to_owned()), ..terminal("a", script) };
    let heard = run(&guest, command).await;
    assert!(heard.text().contains("opened"), "{}", heard.text());
}

#[tokio::test]
async fn quiescing_leaves_nobody() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let script =
        "trap '' TERM; (setsid sleep 1000 &) ; sleep 1000 & echo up; while :; do wait; done";
    let mut stubborn = guest.spawn(shell("a", script)).await.expect("it starts");
    wait_for(&mut stubborn, "up").await;
    let mut polite = guest
        .spawn(shell("b", "trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.01; done"))
        .await
        .expect("it starts");
    wait_for(&mut polite, "up").await;
    guest.quiesce(Duration::from_millis(300)).await.expect("all end");
    assert_eq!(hear(&mut polite.output).await.expect("it ends").exit.expect("it ended").code, 9);
    assert_eq!(hear(&mut stubborn.output).await.expect("it ends").code(), 137);
    // Looked at by the shell itself: of a pipeline, not every process need be there yet.
    let others = run(&guest, shell("c", "set -- /proc/[0-9]*; echo $#")).await;
    assert_eq!(others.text(), "2\n", "the agent and the shell");
    guest.quiesce(Duration::ZERO).await.expect("again is fine");
}

#[tokio::test]
async fn orphans_are_reaped() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    run(
        &guest,
        shell("a", "for i in 1 2 3 4 5 6 7 8; do (setsid sh -c 'exit 0' >/dev/null 2>&1 &); done"),
    )
    .await;
    let script =
        "for i in $(seq 100); do ps -e -o stat | grep -q Z || exit 0; sleep 0.05; done; exit 1";
    assert_eq!(run(&guest, shell("b", script)).await.code(), 0, "no zombie stays");
}

#[tokio::test]
async fn two_hundred_commands_at_once() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let one = async |guest: Guest, n: usize| {
        let script = format!("read line; echo $line {n}; echo err {n} >&2; exit {}", n % 100);
        let command = Spawn { stdin: true, ..shell(&format!("c{n}"), &script) };
        let mut process = guest.spawn(command).await.expect("it starts");
        process.stdin.send(Bytes::from_static(b"hi\n")).await.expect("it reads");
        let heard = hear(&mut process.output).await.expect("it ends");
        assert_eq!(heard.text(), format!("hi {n}\n"));
        assert_eq!(heard.err, format!("err {n}\n").into_bytes());
        assert_eq!(heard.code(), i32::try_from(n % 100).expect("small"));
        guest.forget(&format!("c{n}")).await.expect("it has ended");
    };
    let tasks: Vec<_> = (0..200).map(|n| tokio::spawn(one(guest.clone(), n))).collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(guest.commands().await.expect("a list"), []);
}

#[tokio::test]
async fn input_is_counted_to_the_byte_while_nobody_reads() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let go = machine.work().join("go");
    let script = format!("while [ ! -e {} ]; do sleep 0.02; done; sha256sum", go.display());
    let process = guest.spawn(Spawn { stdin: true, ..shell("a", &script) }).await.expect("starts");
    let bytes: Vec<u8> = (0..500_000_u32).map(|at| (at % 241) as u8).collect();
    let bytes = Bytes::from(bytes);
    let patience = Duration::from_millis(300);
    let sending = tokio::time::timeout(patience, process.stdin.send(bytes.clone())).await;
    assert!(sending.is_err(), "it takes no more than the window and its pipe");
    let count = process.stdin.count().await.expect("the connection holds");
    assert_eq!(count.written, 64 << 10, "what a pipe holds");
    assert_eq!(count.taken, count.written + WINDOW as u64, "and a window behind it");

    // The next connection gets the same, and the bytes in between arrive once.
    drop(guest);
    let guest = machine.connect().await;
    let process = guest.attach("a", 0, 0).await.expect("it is known");
    assert_eq!(process.stdin.count().await.expect("it holds"), count);
    std::fs::write(&go, "").expect("our own directory");
    let rest = bytes.slice(usize::try_from(count.taken).expect("small")..);
    process.stdin.send(rest).await.expect("it reads");
    process.stdin.written(bytes.len() as u64).await.expect("all of it");
    process.stdin.close().await.expect("it reads to the end");
    // A third one sees that the input is closed, however much of it was read.
    let guest = machine.connect().await;
    let mut process = guest.attach("a", 0, 500_000).await.expect("it is known");
    let refused = process.stdin.written(500_001).await;
    assert!(matches!(refused, Err(GuestError::Gone)), "{refused:?}");
    let heard = hear(&mut process.output).await.expect("it ends");
    let file = machine.work().join("same");
    std::fs::write(&file, &bytes).expect("our own directory");
    let plain = run(&guest, shell("b", &format!("sha256sum < {}", file.display()))).await;
    assert_eq!(heard.text(), plain.text());
}

#[tokio::test]
async fn on_behalf_of_a_user_as_sudo_does_it() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let script = "echo $HOME $USER $LOGNAME $SUDO_USER $SUDO_UID $SUDO_GID $COLOUR; id -u";
    let mut command = Spawn { sudo_from: Some("nobody".to_owned()), ..shell("a", script) };
    for (name, value) in [("HOME", "/x"), ("USER", "x"), ("COLOUR", "blue")] {
        command.env.insert(name.to_owned(), value.to_owned());
    }
    let text = run(&guest, command).await.text();
    assert_eq!(text, "/root root root nobody 65534 65534 blue\n0\n");
    let unknown = Spawn { sudo_from: Some("no-such".to_owned()), ..shell("b", "true") };
    assert_eq!(failure(guest.spawn(unknown).await), Failure::NoUser);
}
