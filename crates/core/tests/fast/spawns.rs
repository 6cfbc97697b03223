//! Every task and thread of the daemon has an owner: a shutdown joins it, or dropping its owner ends it.
//!
//! Owners are a `TaskTracker`, a `JoinSet`, an `AbortOnDropHandle`, a scope of threads, or a caller that awaits what it sent to a
//! blocking thread. Whatever is spawned in another way is listed in [`DETACHED`] with the reason why that is safe. The agent is not
//! covered: it is the first process of a sandbox and ends with it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::layering::{crates, tokens};

const CRATES: [&str; 4] = ["core", "server", "client", "cli"];

/// Files that spawn without one of these owners: how often, and why that is safe.
const DETACHED: [(&str, usize, &str); 15] = [
    (
        "cli/command/tar.rs",
        2,
        "threads of a client command; they end when the archive's reader or writer does",
    ),
    (
        "cli/terminal.rs",
        1,
        "a read from a terminal cannot be interrupted, and must not keep `keep` from ending",
    ),
    ("client/transport.rs", 1, "the connection ends with its sender, and a client has no shutdown"),
    (
        "core/db/mirror.rs",
        1,
        "ends when its queue is closed and empty; `MirroredDb::close` waits for the queue",
    ),
    (
        "core/driver/host/builder.rs",
        2,
        "wait for a process that is about to end, so that it is no zombie",
    ),
    (
        "core/engine/audit/mod.rs",
        1,
        "ends when its queue is closed and empty; `AuditLog::finish` waits for the queue",
    ),
    (
        "core/engine/integrity/disk_probe.rs",
        1,
        "ends with its owner; a thread that a disk holds cannot be joined",
    ),
    (
        "core/engine/observe/events.rs",
        1,
        "ends when its queue is closed and empty; `EventFeed::finish` waits for the queue",
    ),
    (
        "core/engine/observe/network_journal.rs",
        1,
        "the same; `FileJournal::finish` waits for the queue",
    ),
    (
        "core/net/stack/mod.rs",
        1,
        "the stack keeps the handle, joins it when it is closed and aborts it on drop",
    ),
    (
        "core/net/upstream.rs",
        1,
        "one read of the host's addresses from memory of the kernel; nobody waits for it",
    ),
    (
        "core/release.rs",
        1,
        "closes a descriptor after 100 ms; at most 64 of them, and a daemon that ends closes it too",
    ),
    ("core/store/background.rs", 1, "a scoped thread, joined in the same function"),
    ("core/store/gc/remove.rs", 1, "`DeletionThreads` joins its threads on drop"),
    (
        "core/store/image/customize/archive.rs",
        1,
        "the reader joins it at the end; a reader that goes away closes the pipe, which ends it",
    ),
];

#[test]
fn every_task_and_thread_has_an_owner() {
    let listed: BTreeMap<String, usize> =
        DETACHED.iter().map(|(path, count, _)| ((*path).to_owned(), *count)).collect();
    let mut found = BTreeMap::new();
    for name in CRATES {
        let root = crates().join(name).join("src");
        visit(&root, &mut |path, text| {
            let count = detached(&production(&tokens(text)));
            if count > 0 {
                let below = path.strip_prefix(&root).expect("below it");
                found.insert(format!("{name}/{}", below.display()), count);
            }
        });
    }
    assert_eq!(
        found, listed,
        "left: what spawns, right: what is listed. Give a task an owner (`TaskTracker`, `JoinSet`, \
         `AbortOnDropHandle`), or list it with the reason why it needs none"
    );
    for (path, _, reason) in DETACHED {
        assert!(reason.len() > 20, "{path}: {reason}");
    }
}

#[test]
fn every_way_to_spawn_is_seen() {
    for (text, expected) in [
        ("tokio::spawn(work);", 1),
        ("let task = tokio::task::spawn(work);", 1),
        ("use tokio::spawn; fn f() { spawn(work); }", 1),
        ("std::thread::spawn(move || f());", 1),
        ("thread::Builder::new().name(n).spawn(f);", 1),
        ("runtime.spawn(work); handle.spawn_blocking(work);", 2),
        ("Handle::current().spawn(work); Handle::try_current()?.spawn(work)", 2),
        ("task::spawn_blocking(move || f(1));", 1),
        ("let handle = tokio::task::spawn_blocking(f); handle.abort();", 1),
        ("Builder::new(TokioExecutor::new())", 1),
        ("let one = task::spawn_blocking(f); match one.await { _ => {} }", 0),
        ("let two = task::spawn_blocking(f); let (a, b) = tokio::join!(count, two);", 0),
        ("command.spawn().map_err(f); mod tests { fn g() { tokio::spawn(f()); } }", 0),
        ("task::spawn_blocking(move || f(1)).await; let x = match spawn_blocking(f).await {};", 0),
        ("AbortOnDropHandle::new(tokio::spawn(f(1))); tracker.spawn(f); scope.spawn(|| f());", 0),
        ("command.spawn()?; fn spawn(&self) {} guest.spawn(request).await", 0),
        ("f(); #[cfg(test)] mod tests { fn g() { tokio::spawn(f()); } }", 0),
        ("#[cfg(test)] mod tests; tokio::spawn(f());", 1),
    ] {
        assert_eq!(detached(&production(&tokens(text))), expected, "{text}");
    }
}

fn visit(dir: &Path, each: &mut impl FnMut(&Path, &str)) {
    for entry in fs::read_dir(dir).expect("a directory of sources").flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "tests" {
                visit(&path, each);
            }
        } else if name.ends_with(".rs") && !["tests.rs", "testing.rs"].contains(&name.as_str()) {
            each(&path, &fs::read_to_string(&path).expect("a source"));
        }
    }
}

/// The tokens without the modules that only tests have.
fn production(tokens: &[String]) -> Vec<&str> {
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at..].starts_with(&["mod", "tests", "{"]) {
            at = after_bracket(&tokens, at + 2);
            continue;
        }
        kept.push(tokens[at]);
        at += 1;
    }
    kept
}

/// How often something is spawned that is not owned.
fn detached(tokens: &[&str]) -> usize {
    let token = |at: usize| tokens.get(at).copied().unwrap_or("");
    let before = |at: usize, back: usize| at.checked_sub(back).map_or("", token);
    let spawns = (0..tokens.len()).filter(|at| {
        let at = *at;
        match token(at) {
            "TokioExecutor" => token(at + 1) == "::",
            "Builder" => before(at, 1) == "::" && before(at, 2) == "thread",
            name @ ("spawn" | "spawn_blocking") if token(at + 1) == "(" => {
                let is_spawn = match before(at, 1) {
                    "::" => ["tokio", "task", "thread"].contains(&before(at, 2)),
                    "." => match before(at, 2) {
                        "runtime" | "handle" => true,
                        // `Handle::current().spawn(...)`, with or without `?`.
                        _ => tokens[at.saturating_sub(8)..at]
                            .iter()
                            .rev()
                            .take_while(|one| ![";", "{", "}"].contains(one))
                            .any(|one| ["current", "try_current"].contains(one)),
                    },
                    "fn" => false,
                    _ => true,
                };
                let end = after_bracket(tokens, at + 1);
                let awaited = name == "spawn_blocking" && is_awaited(tokens, at, end);
                is_spawn && !awaited && !is_wrapped(tokens, at)
            }
            _ => false,
        }
    });
    spawns.count()
}

/// Whether the handle of a call at `at`, which ends before `end`, is awaited: there, or later by its name.
fn is_awaited(tokens: &[&str], at: usize, end: usize) -> bool {
    if tokens[end.min(tokens.len())..].starts_with(&[".", "await"]) {
        return true;
    }
    let statement = tokens[..at].iter().rposition(|one| [";", "{", "}"].contains(one));
    let [first, name, equals, ..] = &tokens[statement.map_or(0, |at| at + 1)..at] else {
        return false;
    };
    let by_name = |later: &[&str]| later == [name, ".", "await"] || later == [",", name, ")"];
    *first == "let" && *equals == "=" && tokens[end..].windows(3).any(by_name)
}

/// Whether the path or the call that ends here is the argument of `AbortOnDropHandle::new`.
fn is_wrapped(tokens: &[&str], mut at: usize) -> bool {
    while at > 0 && tokens[at] != "(" {
        at -= 1;
    }
    tokens[..=at].ends_with(&["AbortOnDropHandle", "::", "new", "("])
}

/// The place after the bracket that closes the one at `open`.
fn after_bracket(tokens: &[&str], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match *token {
            "(" | "{" | "[" => depth += 1,
            ")" | "}" | "]" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}
