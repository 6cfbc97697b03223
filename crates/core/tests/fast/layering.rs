//! The layers that `docs/ARCHITECTURE.md` promises, held to by the sources.
//!
//! The sources are read as tokens: no comments, no text in quotes. A path that begins with `crate` or with enough `super`s to
//! get there names a module; the table in the document says which modules may name which.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Files that may read the environment.
const READ_ENVIRONMENT: [(&str, &str); 1] =
    [("failpoint.rs", "only with the feature `failpoints`, which only tests are built with")];

/// What is not the environment but what the compiler knew.
const NOT_ENVIRONMENT: [&str; 1] = ["consts"];

#[derive(Debug)]
struct Source {
    /// Relative to `src`.
    path: String,
    /// The modules it is in, from the crate's root.
    modules: Vec<String>,
    text: String,
}

/// A path in a source that leads to a top-level module, or out of `std::env`.
#[derive(Debug, Default)]
struct Names {
    modules: BTreeSet<String>,
    /// What of `engine` is named: folders, and items of its root.
    engine: BTreeSet<String>,
    environment: BTreeSet<String>,
}

#[test]
fn modules_use_only_the_layers_below() {
    let allowed = allowed();
    let mut found = BTreeSet::new();
    for source in sources() {
        let home = source.modules.first().cloned().unwrap_or_default();
        if home.is_empty() {
            continue;
        }
        let uses = allowed.get(&home);
        let uses = uses.unwrap_or_else(|| panic!("`{home}` is not in the table of layers"));
        for named in names(&source).modules {
            // What is no module is an item of the crate's root, or a macro.
            if named != home && allowed.contains_key(&named) && !uses.contains(&named) {
                found.insert((source.path.clone(), named));
            }
        }
    }
    assert!(found.is_empty(), "{found:?}: see the table of layers in docs/ARCHITECTURE.md");
}

#[test]
fn engine_folders_use_only_the_folders_below() {
    let rows = table("| engine folder | may use |\n");
    let mut below = BTreeSet::new();
    for (folders, uses) in &rows {
        let upward: Vec<_> = uses.iter().filter(|folder| !below.contains(*folder)).collect();
        assert!(
            upward.is_empty(),
            "{folders:?} may use {upward:?}, which the table has further down"
        );
        below.extend(folders.iter().cloned());
    }
    let allowed = by_module(rows);
    let sources = sources();
    let exported = exported(&sources);
    let mut found = BTreeSet::new();
    for source in &sources {
        let [home, folder, ..] = &source.modules[..] else { continue };
        // The root itself, and its errors, are for all.
        if home != "engine"
            || folder == "error"
            || !source.path.contains(&format!("engine/{folder}/"))
        {
            continue;
        }
        let uses = allowed.get(folder);
        let uses = uses.unwrap_or_else(|| panic!("`{folder}` is not in the table of folders"));
        for named in names(source).engine {
            let used = exported.get(&named).unwrap_or(&named);
            if used != folder && allowed.contains_key(used) && !uses.contains(used) {
                found.insert((source.path.clone(), named));
            }
        }
    }
    assert!(found.is_empty(), "{found:?}: see the table of folders in docs/ARCHITECTURE.md");
}

/// Names that the root of `engine` exports, with the folders they come from.
fn exported(sources: &[Source]) -> BTreeMap<String, String> {
    let root = sources.iter().find(|source| source.path == "engine/mod.rs").expect("the root");
    let tokens = tokens(&root.text);
    let mut exported = BTreeMap::new();
    for at in 0..tokens.len().saturating_sub(3) {
        if tokens[at] != "pub" || tokens[at + 1] != "use" {
            continue;
        }
        let folder = tokens[at + 2].clone();
        let end = tokens[at..].iter().position(|token| token == ";").expect("the end") + at;
        let names = tokens[at + 3..end].iter().filter(|token| token.as_str() != "::");
        for name in names.filter(|name| name.chars().all(|c| c.is_alphanumeric() || c == '_')) {
            exported.insert(name.clone(), folder.clone());
        }
    }
    assert!(exported.len() > 20, "{exported:?}");
    exported
}

#[test]
fn nothing_reads_the_environment() {
    let mut found = BTreeMap::new();
    for source in sources() {
        let environment = names(&source).environment;
        if !environment.is_empty() {
            found.insert(source.path, environment);
        }
    }
    let found: BTreeSet<_> = found.keys().map(String::as_str).collect();
    let listed = READ_ENVIRONMENT.map(|(path, _)| path).into();
    assert_eq!(found, listed, "pass it in: `core` reads no environment");
}

#[test]
fn only_its_driver_names_a_disk_format() {
    let found: Vec<_> = sources()
        .into_iter()
        .filter(|source| !source.path.starts_with("driver/microvm/"))
        .filter(|source| source.text.to_lowercase().contains("qcow"))
        .map(|source| source.path)
        .collect();
    assert_eq!(found, [""; 0], "ask the driver: `OwnDisk::disk_file`");
}

/// Where records are is the catalog's business: the engine reads them through the index and saves them
/// through the catalog. What only the data directory has (layers, images, templates, secrets) is not on
/// this list.
#[test]
fn only_the_catalog_writes_records() {
    const RECORDS: [&str; 6] = ["sandbox", "session", "command", "snapshot", "drive", "project"];
    let mut written = Vec::new();
    for source in sources().into_iter().filter(|source| source.path.starts_with("engine/")) {
        let text: String = source.text.split_whitespace().collect();
        for record in RECORDS {
            let kind = format!("{}{}", record[..1].to_uppercase(), &record[1..]);
            for call in [
                format!("db.put_{record}("),
                format!("db.remove_{record}("),
                format!("store.scan::<{kind}>"),
                format!("store.read::<{kind}>"),
                format!("store.remove::<{kind}>"),
                format!("store.write({record},"),
                format!("store.write(&{record},"),
            ] {
                if text.contains(&call) {
                    written.push(format!("{}: {call}", source.path));
                }
            }
        }
        for call in ["claim(", "claim_drive(", "put_tombstone(", "clear(", "is_fresh("] {
            if text.contains(&format!("db.{call}")) {
                written.push(format!("{}: {call}", source.path));
            }
        }
    }
    assert_eq!(written, [""; 0], "go through the catalog");
}

/// The engine reads records through the catalog, not from the directories in which one catalog
/// keeps them.
#[test]
fn the_engine_reads_no_directory_of_records() {
    let mut found = Vec::new();
    for source in sources().into_iter().filter(|source| source.path.starts_with("engine/")) {
        let text: String = source.text.split_whitespace().collect();
        for directory in ["sandboxes", "snapshots", "drives", "projects"] {
            for begin in [".join(\"", ".join(format!(\""] {
                if text.contains(&format!("{begin}{directory}")) {
                    found.push(format!("{}: {directory}", source.path));
                }
            }
        }
    }
    assert_eq!(found, [""; 0], "ask the catalog: `Contents`, or `listing`");
}

#[test]
fn every_way_to_write_a_path_is_seen() {
    let seen = |modules: &[&str], text: &str| {
        let modules = modules.iter().map(|name| (*name).to_owned()).collect();
        let names = names(&Source { path: String::new(), modules, text: text.to_owned() });
        let modules: Vec<_> = names.modules.into_iter().collect();
        (modules.join(" "), names.environment.into_iter().collect::<Vec<_>>().join(" "))
    };
    for (text, modules, environment) in [
        ("use crate::engine::lifecycle::Phase;", "engine", ""),
        ("use crate::{db::Db, model::{Name, Size}, store};", "db model store", ""),
        ("fn f(x: crate::net::Rules) {}", "net", ""),
        (
            "// crate::db\n/* crate::db /* */ crate::db */ \"crate::db\" r#\"\"crate::db\"# '\"'",
            "",
            "",
        ),
        ("pub(crate) use a::b; pub(in crate::store) fn f() {}", "store", ""),
        ("use super::qemu; use super::super::net::MTU;", "net", ""),
        ("use super::super::{guest, secret as s};", "guest secret", ""),
        (
            "mod tests { use super::super::x; } mod a { mod b { use super::super::super::super::db; } }",
            "db",
            "",
        ),
        ("fn f<'a>(x: &'a str) { use crate::db; }", "db", ""),
        (
            "let x = std::env::var(\"A\"); env!(\"A\"); c.env(\"A\", 1); std::env::consts::OS;",
            "",
            "var",
        ),
        ("use std::env; fn f() { env::args_os() }", "", "args_os"),
        ("use std::env::{consts, vars};", "", "vars"),
        (
            "#[cfg(test)] mod tests { fn f() { std::env::var(\"A\") } } fn g() { env::home_dir() }",
            "",
            "home_dir",
        ),
        ("#[cfg(test)] mod tests; fn g() { env::temp_dir() }", "", "temp_dir"),
        ("#[cfg(test)] mod tests { use crate::db; }", "db", ""),
    ] {
        let expected = (modules.to_owned(), environment.to_owned());
        assert_eq!(seen(&["driver", "microvm"], text), expected, "{text}");
    }
}

/// The table in the document: which modules a module may use.
fn allowed() -> BTreeMap<String, BTreeSet<String>> {
    let allowed = by_module(table("| module | may use |\n"));
    assert!(allowed.len() >= 8, "{allowed:?}");
    allowed
}

fn by_module(rows: Vec<(Vec<String>, BTreeSet<String>)>) -> BTreeMap<String, BTreeSet<String>> {
    let each = |(modules, uses): (Vec<String>, BTreeSet<String>)| {
        modules.into_iter().map(move |module| (module, uses.clone()))
    };
    rows.into_iter().flat_map(each).collect()
}

/// The rows of a table in the document: modules, and what they may use.
fn table(heading: &str) -> Vec<(Vec<String>, BTreeSet<String>)> {
    let document = crates().join("../docs/ARCHITECTURE.md");
    let document = fs::read_to_string(document).expect("the document");
    let table = document.split(heading).nth(1).expect("the table");
    let code = |cell: &str| -> Vec<String> {
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let row = |row: &str| {
        let mut cells = row.split('|').skip(1);
        let (modules, uses) = (cells.next().unwrap_or(""), cells.next().unwrap_or(""));
        (code(modules), code(uses).into_iter().collect())
    };
    rows.map(row).collect()
}

pub(super) fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates").to_owned()
}

fn sources() -> Vec<Source> {
    let root = crates().join("core/src");
    let mut sources = Vec::new();
    let mut dirs = vec![root.clone()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("a directory of sources").flatten() {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            if path.extension().is_none_or(|ending| ending != "rs") {
                continue;
            }
            let text = fs::read_to_string(&path).expect("a source");
            let below = path.strip_prefix(&root).expect("below it").with_extension("");
            let parts = below.iter().map(|part| part.to_string_lossy().into_owned());
            let modules = parts.filter(|part| !["mod", "lib"].contains(&part.as_str())).collect();
            let path = path.strip_prefix(&root).expect("below it").to_string_lossy().into_owned();
            sources.push(Source { path, modules, text });
        }
    }
    assert!(sources.len() > 200, "{} files", sources.len());
    sources
}

fn names(source: &Source) -> Names {
    let tokens = tokens(&source.text);
    let token = |at: usize| tokens.get(at).map_or("", String::as_str);
    let in_tests = |name: &String| ["tests", "testing"].contains(&name.as_str());
    let whole_is_test = source.modules.iter().any(in_tests);
    let mut names = Names::default();
    // For each open brace: whether it is a module's, and whether only tests have it.
    let mut open: Vec<(bool, bool)> = Vec::new();
    let (mut module_begins, mut test_begins) = (false, false);
    let mut at = 0;
    while at < tokens.len() {
        match token(at) {
            "#" if tokens[at..].iter().take(7).map(String::as_str).eq(CFG_TEST) => {
                test_begins = true;
                at += CFG_TEST.len();
                continue;
            }
            "mod" => module_begins = true,
            "{" => {
                open.push((module_begins, test_begins));
                (module_begins, test_begins) = (false, false);
            }
            "}" => drop(open.pop()),
            ";" => (module_begins, test_begins) = (false, false),
            "crate" | "super" if token(at.wrapping_sub(1)) != "::" => {
                let depth =
                    source.modules.len() + open.iter().filter(|(module, _)| *module).count();
                let mut supers = 0;
                let mut next = at;
                while token(next) == "super" && token(next + 1) == "::" {
                    supers += 1;
                    next += 2;
                }
                let is_root = match token(at) {
                    "crate" => {
                        next = at + 2;
                        token(at + 1) == "::"
                    }
                    _ => supers == depth,
                };
                if is_root {
                    names.modules.extend(heads(&tokens[next..]));
                    names.engine.extend(heads_below(&tokens[next..], "engine"));
                } else if supers > 0 && supers + 1 == depth && source.modules[0] == "engine" {
                    names.engine.extend(heads(&tokens[next..]));
                }
                // What comes after it begins no path, and is looked at as it is.
                at = next.max(at + 1);
                continue;
            }
            "env" if token(at + 1) == "::" => {
                let test = whole_is_test || open.iter().any(|(_, test)| *test);
                let read = heads(&tokens[at + 2..]);
                let read =
                    read.into_iter().filter(|name| !NOT_ENVIRONMENT.contains(&name.as_str()));
                names.environment.extend(read.filter(|_| !test));
            }
            _ => {}
        }
        at += 1;
    }
    names
}

const CFG_TEST: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];

/// The first names of what follows `::`: one, or those of a list in braces.
fn heads(tokens: &[String]) -> Vec<String> {
    if tokens.first().is_none_or(|first| first != "{") {
        return tokens.first().cloned().into_iter().collect();
    }
    let (mut depth, mut heads, mut is_head) = (0, Vec::new(), true);
    for token in tokens {
        match token.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 1 => is_head = true,
            name if depth == 1 && is_head => {
                heads.push(name.to_owned());
                is_head = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    heads
}

/// The first names below `module` of what follows `::`.
fn heads_below(tokens: &[String], module: &str) -> Vec<String> {
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token == text);
    if is(0, module) && is(1, "::") {
        return heads(&tokens[2..]);
    }
    if !is(0, "{") {
        return Vec::new();
    }
    let (mut depth, mut found) = (0, Vec::new());
    for at in 0..tokens.len() {
        match tokens[at].as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            name if depth == 1 && name == module && is(at + 1, "::") => {
                found.extend(heads(&tokens[at + 2..]));
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    found
}

/// Words, `::`, and single characters; comments and text in quotes are left out.
pub(super) fn tokens(text: &str) -> Vec<String> {
    let text: Vec<char> = text.chars().collect();
    let char_at = |at: usize| text.get(at).copied().unwrap_or('\0');
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < text.len() {
        match (char_at(at), char_at(at + 1)) {
            ('/', '/') => {
                while at < text.len() && char_at(at) != '\n' {
                    at += 1;
                }
            }
            ('/', '*') => {
                let mut depth = 0;
                loop {
                    match (char_at(at), char_at(at + 1)) {
                        ('/', '*') => depth += 1,
                        ('*', '/') => depth -= 1,
                        _ => {
                            at += 1;
                            continue;
                        }
                    }
                    at += 2;
                    if depth == 0 || at >= text.len() {
                        break;
                    }
                }
            }
            ('"', _) => at = after_quote(&text, at),
            ('r', '"' | '#') if is_raw(&text, at + 1) => at = after_raw(&text, at + 1),
            // A character, or a lifetime.
            ('\'', '\\') => {
                at += 3;
                while at < text.len() && char_at(at) != '\'' {
                    at += 1;
                }
                at += 1;
            }
            ('\'', _) if char_at(at + 2) == '\'' => at += 3,
            (':', ':') => {
                tokens.push("::".to_owned());
                at += 2;
            }
            (c, _) if is_word(c) => {
                let begin = at;
                while is_word(char_at(at)) {
                    at += 1;
                }
                let word: String = text[begin..at].iter().collect();
                // `br"..."` and the like: the raw string follows its prefix.
                if word.ends_with('r') && is_raw(&text, at) {
                    at = after_raw(&text, at);
                } else {
                    tokens.push(word);
                }
            }
            (c, _) => {
                if !c.is_whitespace() {
                    tokens.push(c.to_string());
                }
                at += 1;
            }
        }
    }
    tokens
}

fn after_quote(text: &[char], quote: usize) -> usize {
    let mut at = quote + 1;
    while at < text.len() && text[at] != '"' {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// Whether a raw string begins here, with its hashes.
fn is_raw(text: &[char], at: usize) -> bool {
    let hashes = text[at.min(text.len())..].iter().take_while(|c| **c == '#').count();
    text.get(at + hashes) == Some(&'"')
}

fn after_raw(text: &[char], at: usize) -> usize {
    let hashes = text[at..].iter().take_while(|c| **c == '#').count();
    let mut end = at + hashes + 1;
    while end < text.len() {
        let closes = text[end] == '"'
            && text[end + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
        end += 1;
        if closes {
            return end + hashes;
        }
    }
    end
}
