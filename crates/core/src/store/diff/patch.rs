//! Differences as a patch in git's format.
//!
//! Git knows regular files, whether they can be executed, and symbolic links. Directories, owners, attributes and
//! devices are left out. A path that changes its type is removed and added. `git apply` refuses a patch as a whole if
//! it has a path in a `.git` directory, so these are left out unless they were asked for.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::ZlibEncoder;
use rustix::fs::FileType;
use sha1::{Digest as _, Sha1};
use similar::{Algorithm, TextDiff};

use super::TreeDiff;
use super::content::{is_text, read_whole};
use super::walk::{PathDiff, Side};
use crate::model::DiffAspect;
use crate::store::walk::vanished;
use crate::store::{Result, StoreError};

/// The largest file that is compared by lines.
const LARGEST_TEXT: usize = 4 << 20;
/// The largest file that is written as binary data.
const LARGEST_BINARY: usize = 16 << 20;
/// How long lines of one file are compared for the shortest patch. After that it is correct and longer.
const SHORTEST: Duration = Duration::from_secs(2);
/// How much of files one piece of a patch reads, and how long it takes, before others have their turn.
const PIECE_READS: u64 = 32 << 20;
const PIECE_TAKES: Duration = Duration::from_secs(1);
/// How long a receiver that does not take the next piece is waited for.
const PIECE_TAKEN: Duration = Duration::from_secs(30);
/// Lines around a change.
const CONTEXT: usize = 3;

/// How a patch is written.
#[derive(Debug, Clone, Default)]
pub struct PatchOptions {
    /// Only what is below this directory, with paths relative to it; from the root, without slashes around it.
    pub relative: Vec<u8>,
    /// Whether the contents of binary files are written.
    pub binary: bool,
    /// Whether paths in `.git` directories are written, which `git apply` refuses.
    pub git_dir: bool,
}

/// One version of a file, as git sees it.
struct PatchSide {
    mode: &'static str,
    /// `None` if it is too large, or was not needed.
    bytes: Option<Vec<u8>>,
}

impl PatchSide {
    /// Reads what is at a path; `None` for what git does not store.
    fn read(side: Option<&Side>, contents: bool) -> Result<Option<Self>> {
        let Some(side) = side else { return Ok(None) };
        let name = &side.name;
        let dir = match side.dir.open() {
            Err(error) if vanished(&error) => return Ok(None),
            opened => opened?,
        };
        let read = match side.kind {
            FileType::RegularFile => {
                let mode = if side.mode & 0o100 == 0 { "100644" } else { "100755" };
                if !contents || side.size > LARGEST_BINARY as u64 {
                    return Ok(Some(Self { mode, bytes: None }));
                }
                let bytes = dir.open_file(name).and_then(|file| read_whole(&file, LARGEST_BINARY));
                bytes.map(|bytes| Self { mode, bytes })
            }
            FileType::Symlink => dir
                .link_target(name)
                .map(|target| Self { mode: "120000", bytes: Some(target.into_bytes()) }),
            _ => return Ok(None),
        };
        match read {
            Err(error) if vanished(&error) => Ok(None),
            read => read.map(Some),
        }
    }

    /// Whether it can be compared by lines.
    fn text(&self) -> Option<&[u8]> {
        self.bytes.as_deref().filter(|bytes| bytes.len() <= LARGEST_TEXT && is_text(bytes))
    }

    /// The name git has for the content.
    fn id(&self) -> Option<String> {
        let bytes = self.bytes.as_deref()?;
        let mut hash = Sha1::new();
        hash.update(format!("blob {}\0", bytes.len()));
        hash.update(bytes);
        Some(hex::encode(hash.finalize()))
    }
}

/// A patch that is written piece by piece.
#[derive(Debug)]
pub struct PreparedPatch {
    paths: std::vec::IntoIter<PathDiff>,
    how: PatchOptions,
    pub(super) patience: Duration,
}

impl PreparedPatch {
    pub(super) fn new(diff: TreeDiff, how: PatchOptions) -> Self {
        Self { paths: diff.paths.into_iter(), how, patience: PIECE_TAKEN }
    }

    /// The same for a receiver that is not waited for as long when it does not take the next piece.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The next piece: as many paths as take about `size` bytes, and fewer if their files are large. It may be empty. `None` at
    /// the end.
    pub(super) fn next(&mut self, size: usize) -> Result<Option<Vec<u8>>> {
        if self.paths.as_slice().is_empty() {
            return Ok(None);
        }
        let (begun, mut read, mut piece) = (Instant::now(), 0, Vec::new());
        while piece.len() < size && read < PIECE_READS && begun.elapsed() < PIECE_TAKES {
            let Some(one) = self.paths.next() else { break };
            read += reads(&one);
            write_path(&one, &self.how, &mut piece)?;
        }
        Ok(Some(piece))
    }
}

/// How much of its two files a path may read.
fn reads(one: &PathDiff) -> u64 {
    let sides = [&one.from, &one.to].into_iter().flatten();
    sides.map(|side| side.size).filter(|size| *size <= LARGEST_BINARY as u64).sum()
}

/// The path as the patch has it; `None` if it is left out.
fn shown<'p>(path: &'p [u8], how: &PatchOptions) -> Option<&'p [u8]> {
    let is_git = |name: &[u8]| name.eq_ignore_ascii_case(b".git");
    let shown = match how.relative.is_empty() {
        true => path,
        false => path.strip_prefix(&how.relative[..])?.strip_prefix(b"/")?,
    };
    (how.git_dir || !shown.split(|byte| *byte == b'/').any(is_git)).then_some(shown)
}

fn write_path(one: &PathDiff, how: &PatchOptions, into: &mut Vec<u8>) -> Result<()> {
    // Of a file that moved across the border of what is shown, one half is seen: it is new, or it is gone.
    let new = shown(&one.path, how);
    let old = match &one.old_path {
        Some(old) => shown(old, how),
        None => new,
    };
    let (Some(either), from, to) =
        (old.or(new), old.and(one.from.as_ref()), new.and(one.to.as_ref()))
    else {
        return Ok(());
    };
    // A file that only got another mode or path is not read, whatever its size.
    let is_file = |side: &Side| side.kind == FileType::RegularFile;
    let same = from.is_some_and(is_file)
        && to.is_some_and(is_file)
        && !one.what.contains(&DiffAspect::Content);
    let (before, after) = (PatchSide::read(from, !same)?, PatchSide::read(to, !same)?);
    let (old, new) = (old.unwrap_or(either), new.unwrap_or(either));
    let mut file = |from, to| {
        file((old, new), from, to, same, how, into).map_err(|source| StoreError::Io {
            action: "write",
            path: "the patch".into(),
            source,
        })
    };
    match (&before, &after) {
        (None, None) => Ok(()),
        // A link has no lines in common with a file.
        (Some(from), Some(to)) if (from.mode == "120000") != (to.mode == "120000") => {
            file(Some(from), None)?;
            file(None, Some(to))
        }
        (from, to) => file(from.as_ref(), to.as_ref()),
    }
}

fn file(
    (old, new): (&[u8], &[u8]),
    from: Option<&PatchSide>,
    to: Option<&PatchSide>,
    is_same: bool,
    how: &PatchOptions,
    into: &mut impl Write,
) -> io::Result<()> {
    let same = match (from, to) {
        (Some(from), Some(to)) => is_same || from.bytes.is_some() && from.bytes == to.bytes,
        _ => false,
    };
    let modes = (from.map(|blob| blob.mode), to.map(|blob| blob.mode));
    if same && modes.0 == modes.1 && old == new {
        return Ok(());
    }
    writeln!(into, "diff --git {} {}", quoted(b"a/", old), quoted(b"b/", new))?;
    match modes {
        (None, Some(mode)) => writeln!(into, "new file mode {mode}")?,
        (Some(mode), None) => writeln!(into, "deleted file mode {mode}")?,
        (Some(from), Some(to)) if from != to => writeln!(into, "old mode {from}\nnew mode {to}")?,
        _ => {}
    }
    if old != new {
        writeln!(into, "similarity index 100%")?;
        writeln!(into, "rename from {}\nrename to {}", quoted(b"", old), quoted(b"", new))?;
    }
    if same {
        return Ok(());
    }
    let id = |blob: Option<&PatchSide>| match blob {
        Some(blob) => blob.id(),
        None => Some("0".repeat(40)),
    };
    if let (Some(from), Some(to)) = (id(from), id(to)) {
        let mode = if modes.0 == modes.1 {
            format!(" {}", modes.0.unwrap_or_default())
        } else {
            String::new()
        };
        writeln!(into, "index {from}..{to}{mode}")?;
    }
    let text = |blob: Option<&'_ PatchSide>| match blob {
        Some(blob) => blob.text().map(<[u8]>::to_vec),
        None => Some(Vec::new()),
    };
    let name = |is_there: bool, prefix: &[u8], path: &[u8]| match is_there {
        true => quoted(prefix, path),
        false => "/dev/null".to_owned(),
    };
    let (old_name, new_name) = (name(from.is_some(), b"a/", old), name(to.is_some(), b"b/", new));
    match (text(from), text(to)) {
        (Some(before), Some(after)) if before.is_empty() && after.is_empty() => Ok(()),
        (Some(before), Some(after)) => {
            writeln!(into, "--- {old_name}{}", tab(old))?;
            writeln!(into, "+++ {new_name}{}", tab(new))?;
            hunks(&before, &after, into)
        }
        _ => match (how.binary, bytes_of(from), bytes_of(to)) {
            (true, Some(before), Some(after)) => binary(before, after, into),
            _ => writeln!(into, "Binary files {old_name} and {new_name} differ"),
        },
    }
}

fn bytes_of(blob: Option<&PatchSide>) -> Option<&[u8]> {
    match blob {
        Some(blob) => blob.bytes.as_deref(),
        None => Some(&[]),
    }
}

/// Git ends a name that has a space with a tab, so that it is not taken for a time.
fn tab(path: &[u8]) -> &'static str {
    if path.contains(&b' ') { "\t" } else { "" }
}

fn hunks(before: &[u8], after: &[u8], into: &mut impl Write) -> io::Result<()> {
    // Only at line feeds, as git does.
    let before: Vec<&[u8]> = before.split_inclusive(|byte| *byte == b'\n').collect();
    let after: Vec<&[u8]> = after.split_inclusive(|byte| *byte == b'\n').collect();
    let diff = TextDiff::configure()
        .algorithm(Algorithm::Myers)
        .timeout(SHORTEST)
        .newline_terminated(true)
        .diff_slices(&before, &after);
    let mut unified = diff.unified_diff();
    unified.context_radius(CONTEXT);
    for hunk in unified.iter_hunks() {
        let mut is_first = true;
        for change in hunk.iter_changes() {
            if std::mem::take(&mut is_first) {
                writeln!(into, "{}", hunk.header())?;
            }
            write!(into, "{}", change.tag())?;
            let line: &[u8] = change.value();
            into.write_all(line)?;
            if line.last() != Some(&b'\n') {
                into.write_all(b"\n\\ No newline at end of file\n")?;
            }
        }
    }
    Ok(())
}

/// Both versions whole, so that the patch can also be applied in reverse.
fn binary(before: &[u8], after: &[u8], into: &mut impl Write) -> io::Result<()> {
    writeln!(into, "GIT binary patch")?;
    for bytes in [after, before] {
        writeln!(into, "literal {}", bytes.len())?;
        let mut packed = ZlibEncoder::new(Vec::new(), Compression::default());
        packed.write_all(bytes)?;
        for line in packed.finish()?.chunks(52) {
            let length = match u8::try_from(line.len()).unwrap_or_default() {
                short @ 1..=26 => b'A' + short - 1,
                long => b'a' + long - 27,
            };
            write!(into, "{}", char::from(length))?;
            into.write_all(&base85(line))?;
            writeln!(into)?;
        }
        writeln!(into)?;
    }
    Ok(())
}

const DIGITS: &[u8; 85] =
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";

/// Five characters for every four bytes, as git writes them.
fn base85(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    for group in bytes.chunks(4) {
        let mut four = [0u8; 4];
        four[..group.len()].copy_from_slice(group);
        let mut number = u32::from_be_bytes(four) as usize;
        let mut five = [0u8; 5];
        for digit in five.iter_mut().rev() {
            *digit = DIGITS[number % 85];
            number /= 85;
        }
        text.extend_from_slice(&five);
    }
    text
}

/// A path as git writes it: in quotes, with escapes, where it has to be.
fn quoted(prefix: &[u8], path: &[u8]) -> String {
    let path = [prefix, path].concat();
    let is_plain = |byte: &u8| (0x20..0x7f).contains(byte) && !b"\"\\".contains(byte);
    if path.iter().all(is_plain) {
        return String::from_utf8_lossy(&path).into_owned();
    }
    let mut text = String::from("\"");
    for byte in &path {
        match byte {
            b'"' => text.push_str("\\\""),
            b'\\' => text.push_str("\\\\"),
            b'\n' => text.push_str("\\n"),
            b'\t' => text.push_str("\\t"),
            byte if is_plain(byte) => text.push(char::from(*byte)),
            byte => text.push_str(&format!("\\{byte:03o}")),
        }
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_as_git_does() {
        assert_eq!(quoted(b"a/", b"src/x y.rs"), "a/src/x y.rs");
        assert_eq!(quoted(b"a/", b"a\"b\n\xff"), "\"a/a\\\"b\\n\\377\"");
    }

    #[test]
    fn base85_is_gits() {
        assert_eq!(base85(&[0, 0, 0, 0]), b"00000");
        assert_eq!(base85(&[0xff; 4]), b"|NsC0");
    }
}
