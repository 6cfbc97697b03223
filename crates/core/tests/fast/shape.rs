//! The shape of the sources: a type name means one thing, and files and folders stay small enough to be found.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::layering::crates;

/// Type names that several modules of one crate define, and why.
const SHARED: [(&str, &str, &str); 2] = [
    (
        "agent",
        "MountAttr",
        "the kernel's structure, inside the functions that call the kernel with it",
    ),
    ("core", "Result", "the result of a module's functions, as in the standard library"),
];

/// Folders with more files: lists by noun, one file for each noun of the API.
const LISTS: [&str; 5] =
    ["cli/src/command", "client/src", "core/src/engine/api", "server/src/api", "types/src"];

/// The longest file. Aim for 600 lines.
const LINES: usize = 650;

/// The most files of one folder. Aim for a dozen.
const FILES: usize = 16;

#[test]
fn a_type_name_means_one_thing() {
    let mut homes: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for (package, path, text) in sources() {
        if path.ends_with("tests.rs") || path.contains("/tests/") {
            continue;
        }
        for name in types_of(&text) {
            homes.entry((package.clone(), name)).or_default().insert(path.clone());
        }
    }
    assert!(homes.len() > 1000, "{} types were found", homes.len());
    homes.retain(|_, paths| paths.len() > 1);
    let found: BTreeSet<(&str, &str)> =
        homes.keys().map(|(package, name)| (package.as_str(), name.as_str())).collect();
    let shared: BTreeSet<(&str, &str)> =
        SHARED.iter().map(|(package, name, _)| (*package, *name)).collect();
    assert_eq!(found, shared, "left: what there is, right: what is listed. {homes:#?}");
}

/// The structs, enums, unions and traits of a source, and the type aliases that others can see.
fn types_of(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let mut names = Vec::new();
    for line in text.lines() {
        let mut rest = line.trim_start();
        let public = rest.starts_with("pub");
        if public {
            rest = rest.trim_start_matches("pub");
            if let Some(inside) = rest.strip_prefix('(') {
                rest = inside.split_once(')').map_or("", |(_, after)| after);
            }
            rest = rest.trim_start();
        }
        let Some((keyword, name)) = rest.split_once(' ') else { continue };
        let is_type = match keyword {
            "struct" | "enum" | "trait" | "union" => true,
            "type" => public,
            _ => false,
        };
        let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
        if is_type && name.starts_with(|c: char| c.is_uppercase()) {
            names.push(name[..end].to_owned());
        }
    }
    names
}

#[test]
fn every_way_to_write_a_type_is_seen() {
    let text = "\
        pub struct A;\nstruct B<T>(T);\npub(in crate::x) enum C {\n    pub(crate) trait D: E {\n\
        pub type F = u8;\ntype G = u8;\nimpl A {\n    type H = u8;\n/// struct I\nlet struct_j = 1;\n\
        #[cfg(test)]\nmod tests {\n    struct K;\n";
    assert_eq!(types_of(text), ["A", "B", "C", "D", "F"]);
}

#[test]
fn files_are_short() {
    let long: Vec<String> = sources()
        .into_iter()
        .map(|(_, path, text)| (text.lines().count(), path))
        .filter(|(lines, _)| *lines > LINES)
        .map(|(lines, path)| format!("{path}: {lines}"))
        .collect();
    assert_eq!(long, [""; 0], "split them along a seam");
}

#[test]
fn folders_are_small() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (_, path, _) in sources() {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *counts.entry(folder.to_owned()).or_default() += 1;
    }
    let large: BTreeSet<&str> =
        counts.iter().filter(|(_, count)| **count > FILES).map(|(name, _)| name.as_str()).collect();
    assert_eq!(large, LISTS.into(), "left: large folders. Group their files by noun: {counts:#?}");
}

/// All sources of all crates: the crate, the path below `crates`, the text.
fn sources() -> Vec<(String, String, String)> {
    let root = crates();
    let mut found = Vec::new();
    for package in fs::read_dir(&root).expect("the crates").flatten() {
        let name = package.file_name().to_string_lossy().into_owned();
        visit(&root, &package.path().join("src"), &name, &mut found);
    }
    assert!(found.len() > 400, "{} files", found.len());
    found
}

fn visit(root: &Path, dir: &PathBuf, package: &str, found: &mut Vec<(String, String, String)>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            visit(root, &path, package, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path).expect("a source");
            let below = path.strip_prefix(root).expect("below it").display().to_string();
            found.push((package.to_owned(), below, text));
        }
    }
}
