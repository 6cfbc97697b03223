//! `keep promote FORK --only GLOB --out DIR`: chosen files that a fork made or changed, copied to this machine.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use sandkeep_client::types::{DiffEntry, DiffKind, EntryKind};
use sandkeep_client::{DiffQuery, Place};
use serde::Serialize;
use tokio::io::AsyncWriteExt as _;

use super::{Context, bytes};
use crate::args::PromoteArgs;
use crate::failure::Failure;

/// How many paths are looked at.
const MOST: u32 = 100_000;

/// What was copied, as JSON.
#[derive(Debug, Default, Serialize)]
struct Taken {
    files: Vec<String>,
    bytes: u64,
    /// What is no file, or has a name that is no text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<String>,
}

pub(super) async fn take_out(
    context: &Context,
    args: &PromoteArgs,
    out: &Path,
) -> Result<(), Failure> {
    let paths = args.only.iter().map(|glob| anchored(glob)).collect();
    let query = DiffQuery { from: format!("{}@base", args.fork), to: args.fork.clone(), paths };
    let diff = context.client.diff(&query, Some(MOST)).await?;
    if diff.truncated {
        let hint = "name fewer paths with `--only`";
        return Err(Failure::here(format!("more than {MOST} paths differ")).with_hint(hint));
    }
    let mut taken = Taken::default();
    for one in diff.changes.iter().filter(|one| one.change != DiffKind::Removed) {
        match place_of(one) {
            Some((path, local)) => {
                taken.bytes += copy(context, &args.fork, &path, one, &out.join(local)).await?;
                taken.files.push(path);
            }
            None if is_dir(one) => {}
            None => taken.left_out.push(one.path.clone()),
        }
    }
    context.screen.answer(&taken, |taken| {
        let mut text: String = taken.files.iter().map(|path| format!("{path}\n")).collect();
        for path in &taken.left_out {
            text.push_str(&format!("{path}  left out: it is no file\n"));
        }
        let noun = if taken.files.len() == 1 { "file" } else { "files" };
        text + &format!("{} {noun}, {}\n", taken.files.len(), bytes(taken.bytes))
    })
}

/// A glob as `merge --only` understands it, for `diff`, which begins at the working directory.
fn anchored(glob: &str) -> String {
    match glob {
        glob if glob.starts_with('/') => glob.to_owned(),
        glob if glob.trim_end_matches('/').contains('/') => format!("/{glob}"),
        glob => format!("/**/{glob}"),
    }
}

fn is_dir(entry: &DiffEntry) -> bool {
    entry.to.as_ref().is_some_and(|to| to.kind == EntryKind::Directory)
}

/// The path of a file in the sandbox, and below a directory here.
fn place_of(entry: &DiffEntry) -> Option<(String, PathBuf)> {
    entry.to.as_ref().filter(|to| to.kind == EntryKind::File)?;
    let path = unescaped(&entry.path)?;
    let local = PathBuf::from(path.trim_start_matches('/'));
    // Nothing is written outside of the directory, whatever the server says.
    let is_plain = local.components().all(|part| matches!(part, Component::Normal(_)));
    (is_plain && !local.as_os_str().is_empty()).then_some((path, local))
}

/// A path with `%XX` for bytes that are not printable; `None` if it is no text.
fn unescaped(path: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

async fn copy(
    context: &Context,
    fork: &str,
    path: &str,
    entry: &DiffEntry,
    local: &Path,
) -> Result<u64, Failure> {
    let cannot = |error| Failure::caused(format!("cannot write `{}`", local.display()), error);
    if let Some(dir) = local.parent() {
        tokio::fs::create_dir_all(dir).await.map_err(cannot)?;
    }
    let place = Place { user: Some("root"), ..Place::new(fork, path) };
    let mut download = context.client.read_file(place).await?;
    let mut file = tokio::fs::File::create(local).await.map_err(cannot)?;
    let mut total = 0;
    while let Some(piece) = download.next().await? {
        file.write_all(&piece).await.map_err(cannot)?;
        total += piece.len() as u64;
    }
    file.flush().await.map_err(cannot)?;
    let mode = entry.to.as_ref().map_or(0o644, |to| to.mode & 0o777);
    std::fs::set_permissions(local, std::fs::Permissions::from_mode(mode)).map_err(cannot)?;
    Ok(total)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use sandkeep_client::types::{DiffEntry, DiffKind, DiffSide, EntryKind};

    use super::{anchored, place_of};

    #[test]
    fn globs_are_those_of_a_merge() {
        assert_eq!(anchored("*.whl"), "/**/*.whl");
        assert_eq!(anchored("dist/"), "/**/dist/");
        assert_eq!(anchored("srv/*.txt"), "/srv/*.txt");
        assert_eq!(anchored("/srv"), "/srv");
    }

    #[test]
    fn files_go_below_the_directory_and_nowhere_else() {
        let entry = |path: &str, kind| DiffEntry {
            path: path.to_owned(),
            change: DiffKind::Added,
            old_path: None,
            what: Vec::new(),
            from: None,
            to: Some(DiffSide { kind, mode: 0o644, uid: 0, gid: 0, size_bytes: 1 }),
        };
        let place = |path: &str| place_of(&entry(path, EntryKind::File));
        assert_eq!(place("/a/50%25"), Some(("/a/50%".to_owned(), PathBuf::from("a/50%"))));
        for bad in ["/../x", "/a/../../x", "/", "/bad%FF", "/cut%4"] {
            assert_eq!(place(bad), None, "{bad}");
        }
        assert_eq!(place_of(&entry("/link", EntryKind::Symlink)), None);
    }
}
