//! Plans copies: which files, from where, to where, as whose.
//!
//! Sources and target are looked at as the overlay would show them (`Below`), so links lead where they
//! would lead in a sandbox and never outside. Nothing is written here.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::names::{bad, in_image, inside, shown};
use crate::dockerfile::FilePattern;
use crate::model::LayerId;
use crate::store::image::customize::archive::{TarPart, kept_xattrs};
use crate::store::image::customize::text;
use crate::store::image::error::{ImageError, ImageResult};
use crate::store::image::unpack::{
    Below, Form, Names, Packing, Shown, UnpackRoom, is_header, open, packing, unpack_layer,
};

/// How many files one copy may have.
const MOST_FILES: usize = 1_000_000;
const BUFFER: usize = 128 << 10;

/// Where files are copied from.
#[derive(Debug, Clone, Copy)]
pub enum CopySource<'a> {
    /// The build context.
    Context(&'a super::BuildContext),
    /// A stage or an image; the first layer is the topmost.
    Layers(&'a [LayerId]),
}

/// Who is to own files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileOwner {
    /// `user`, `user:group`, by name or number; root if absent.
    pub spec: Option<String>,
}

/// A file whose content is in the Dockerfile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InlineFile {
    /// Its name.
    pub name: String,
    /// What it holds.
    pub content: String,
}

/// Files to be copied.
#[derive(Debug, Clone, Default)]
pub struct CopyRequest {
    /// Paths and patterns, from the top of the source.
    pub sources: Vec<String>,
    /// Files besides.
    pub inline: Vec<InlineFile>,
    /// Where they go: an absolute path. With a slash at the end it is a directory.
    pub to: String,
    /// Who owns them.
    pub owner: FileOwner,
    /// Their permission bits; those they have if absent.
    pub mode: Option<u32>,
    /// Whether archives are unpacked.
    pub unpack: bool,
}

/// A copy that was planned.
#[derive(Debug)]
pub struct PlannedFiles {
    parts: Vec<TarPart>,
    digest: String,
    /// What was unpacked for it.
    kept: Vec<TempDir>,
}

impl PlannedFiles {
    /// SHA-256 over all that makes a difference, in hex.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether nothing is to be written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    pub(super) fn into_parts(self) -> (Vec<TarPart>, Vec<TempDir>) {
        (self.parts, self.kept)
    }
}

pub(super) fn plan(
    target: &[PathBuf],
    roots: &[PathBuf],
    of: &str,
    request: CopyRequest,
    tmp: &Path,
    room: UnpackRoom,
) -> ImageResult<PlannedFiles> {
    let owner = request.owner.find(&Below(target))?;
    let mut plan = Planning::new(target, owner, request.mode);
    let source = Below(roots);
    let mut found: Vec<Shown> = Vec::new();
    for text in &request.sources {
        found.extend(matches(&source, text, of)?);
    }
    let several = found.len() + request.inline.len() > 1;
    let to = in_image(&request.to)?;
    let ends_as_directory =
        request.to.ends_with('/') || request.to.ends_with("/.") || to.is_empty();
    if several && !ends_as_directory {
        return Err(bad(format!(
            "several files go to `{}`, so it must be a directory: end it with `/`",
            request.to
        )));
    }
    let there = plan.target.open(&to);
    let is_directory =
        ends_as_directory || there.as_ref().is_some_and(|there| there.entry.metadata.is_dir());
    if ends_as_directory && there.as_ref().is_some_and(|there| !there.entry.metadata.is_dir()) {
        return Err(bad(format!("`{}` is a file in the image, and no directory", request.to)));
    }
    let mut kept = Vec::new();
    for shown in found {
        if shown.entry.metadata.is_dir() {
            let to = plan.directory(&to)?;
            plan.content(&shown, &to)?;
            continue;
        }
        if request.unpack && is_archive(&shown.entry.path)? {
            let dir = unpacked(&shown, tmp, room)?;
            let to = plan.directory(&to)?;
            let roots = [dir.path().to_owned()];
            if let Some(top) = Below(&roots).open(&[]) {
                // What an archive says of owners is kept.
                plan.keeps_owners = request.owner.spec.is_none();
                plan.content(&top, &to)?;
                plan.keeps_owners = false;
            }
            kept.push(dir);
            continue;
        }
        let place = match (is_directory, shown.place.last()) {
            (true, Some(name)) => joined(plan.directory(&to)?, name.clone()),
            _ => plan.place(&to)?,
        };
        plan.file(&shown, place)?;
    }
    for file in request.inline {
        let place = match is_directory {
            true => joined(plan.directory(&to)?, file.name.into_bytes()),
            false => plan.place(&to)?,
        };
        plan.inline(place, file.content.into_bytes())?;
    }
    Ok(plan.finish(kept))
}

pub(super) fn plan_directory(
    target: &[PathBuf],
    path: &str,
    owner: &FileOwner,
) -> ImageResult<PlannedFiles> {
    let owner = owner.find(&Below(target))?;
    let mut plan = Planning::new(target, owner, None);
    plan.directory(&in_image(path)?)?;
    Ok(plan.finish(Vec::new()))
}

/// What a path or pattern names; links at its end are followed.
fn matches(source: &Below<'_>, text: &str, of: &str) -> ImageResult<Vec<Shown>> {
    let names = inside(text)?;
    let none = || bad(format!("there is no `{text}` in {of}"));
    let pattern = names.iter().any(|name| FilePattern::is_pattern(&String::from_utf8_lossy(name)));
    if !pattern {
        let mut found = source.open(&names).ok_or_else(none)?;
        // It is called what it was asked for, wherever a link led.
        if let (Some(name), Some(asked)) = (found.place.last_mut(), names.last()) {
            name.clone_from(asked);
        }
        return Ok(vec![found]);
    }
    let mut found: Vec<Names> = vec![Names::new()];
    for name in &names {
        let text = String::from_utf8_lossy(name);
        let pattern = FilePattern::parse(&text).map_err(bad)?;
        let mut deeper = Vec::new();
        for place in found {
            let Some(dir) = source.open(&place).filter(|dir| dir.entry.metadata.is_dir()) else {
                continue;
            };
            let children = dir.children().map_err(ImageError::io("read", &dir.entry.path))?;
            for child in children.into_iter().filter_map(|child| child.place.last().cloned()) {
                if pattern.matches(&child) {
                    deeper.push(joined(place.clone(), child));
                }
            }
        }
        found = deeper;
    }
    let opened = found.into_iter().filter_map(|names| {
        let mut found = source.open(&names)?;
        if let (Some(name), Some(asked)) = (found.place.last_mut(), names.last()) {
            name.clone_from(asked);
        }
        Some(found)
    });
    let opened: Vec<Shown> = opened.collect();
    if opened.is_empty() { Err(none()) } else { Ok(opened) }
}

/// Whether `ADD` unpacks a file.
fn is_archive(path: &Path) -> ImageResult<bool> {
    let error = |error| ImageError::io("read", path)(error);
    let start = |reader: &mut dyn io::Read| -> io::Result<Vec<u8>> {
        let mut start = Vec::new();
        reader.take(512).read_to_end(&mut start)?;
        Ok(start)
    };
    let begins = start(&mut File::open(path).map_err(error)?).map_err(error)?;
    match packing(&begins) {
        Packing::Tar => Ok(is_header(&begins)),
        Packing::Gzip | Packing::Zstd => {
            let file = File::open(path).map_err(error)?;
            let mut plain = open(&path.display().to_string(), file)?;
            // What does not unpack is a file like any other.
            Ok(start(&mut plain).is_ok_and(|begins| is_header(&begins)))
        }
        Packing::Foreign(kind @ ("xz" | "bzip2")) => Err(bad(format!(
            "archives packed with {kind} are not supported by `ADD`; use gzip or zstd, or `COPY` and `RUN tar`"
        ))),
        Packing::Foreign(_) | Packing::Unknown => Ok(false),
    }
}

fn unpacked(archive: &Shown, tmp: &Path, room: UnpackRoom) -> ImageResult<TempDir> {
    let dir = TempDir::with_prefix_in("build-", tmp).map_err(ImageError::io("create", tmp))?;
    let path = &archive.entry.path;
    let file = File::open(path).map_err(ImageError::io("open", path))?;
    unpack_layer(&shown(&archive.place), file, Form::Root, dir.path(), &[], room)?;
    Ok(dir)
}

impl FileOwner {
    /// The numbers, as the accounts of the image say.
    fn find(&self, target: &Below<'_>) -> ImageResult<(u32, u32)> {
        let Some(spec) = self.spec.as_deref().filter(|spec| !spec.is_empty()) else {
            return Ok((0, 0));
        };
        let (user, group) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
            None => (spec, None),
        };
        let table = |path: &str| Ok::<_, ImageError>(text(target, path)?.unwrap_or_default());
        let (uid, own_group) = match user.parse::<u32>() {
            // A number without a group is that group too.
            Ok(uid) => (uid, uid),
            Err(_) if user == "root" => (0, 0),
            Err(_) => {
                let line = entry(&table("etc/passwd")?, user);
                let numbers = line.and_then(|line| {
                    let mut fields = line.split(':').skip(2);
                    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
                });
                numbers.ok_or_else(|| {
                    bad(format!("there is no user `{user}` in the image (/etc/passwd)"))
                })?
            }
        };
        let gid = match group {
            None => own_group,
            Some(group) => match group.parse() {
                Ok(gid) => gid,
                Err(_) if group == "root" => 0,
                Err(_) => entry(&table("etc/group")?, group)
                    .and_then(|line| line.split(':').nth(2)?.parse().ok())
                    .ok_or_else(|| {
                        bad(format!("there is no group `{group}` in the image (/etc/group)"))
                    })?,
            },
        };
        Ok((uid, gid))
    }
}

fn entry(table: &str, name: &str) -> Option<String> {
    let is_it = |line: &&str| line.split(':').next() == Some(name);
    table.lines().find(is_it).map(str::to_owned)
}

fn joined(mut place: Names, name: Vec<u8>) -> Names {
    place.push(name);
    place
}

struct Planning<'a> {
    target: Below<'a>,
    owner: (u32, u32),
    mode: Option<u32>,
    keeps_owners: bool,
    parts: Vec<TarPart>,
    /// Directories that are planned already.
    made: std::collections::BTreeSet<Names>,
    sum: Sha256,
}

impl<'a> Planning<'a> {
    fn new(target: &'a [PathBuf], owner: (u32, u32), mode: Option<u32>) -> Self {
        Self {
            target: Below(target),
            owner,
            mode,
            keeps_owners: false,
            parts: Vec::new(),
            made: Default::default(),
            sum: Sha256::new(),
        }
    }

    fn finish(self, kept: Vec<TempDir>) -> PlannedFiles {
        let digest = hex::encode(self.sum.finalize());
        PlannedFiles { parts: self.parts, digest, kept }
    }

    fn note(&mut self, kind: &str, place: &Names, mode: u32, owner: (u32, u32), what: &[u8]) {
        let path = place.join(&b'/');
        let head =
            format!("{kind} {mode:o} {} {} {} {} ", owner.0, owner.1, path.len(), what.len());
        self.sum.update(head);
        self.sum.update(&path);
        self.sum.update(what);
    }

    fn add(&mut self, part: TarPart) -> ImageResult<()> {
        if self.parts.len() >= MOST_FILES {
            return Err(bad(format!("more than {MOST_FILES} files in one copy are not supported")));
        }
        self.parts.push(part);
        Ok(())
    }

    /// Where a directory of the target really is. It is planned, with those above it, if it is missing.
    fn directory(&mut self, to: &Names) -> ImageResult<Names> {
        let mut at = Names::new();
        for name in to {
            let next = joined(at, name.clone());
            at = match self.target.open(&next) {
                _ if self.made.contains(&next) => next,
                Some(there) if there.entry.metadata.is_dir() => there.place,
                Some(_) => {
                    let reason =
                        format!("`{}` is a file in the image, and no directory", shown(&next));
                    return Err(bad(reason));
                }
                None => {
                    checked(&next)?;
                    self.note("new", &next, 0o755, self.owner, b"");
                    let part =
                        TarPart::Directory { path: path_of(&next), mode: 0o755, owner: self.owner };
                    self.add(part)?;
                    self.made.insert(next.clone());
                    next
                }
            };
        }
        Ok(at)
    }

    /// Where a file of the target really goes: links above it are followed, it itself is replaced.
    fn place(&mut self, to: &Names) -> ImageResult<Names> {
        match to.split_last() {
            Some((name, above)) => Ok(joined(self.directory(&above.to_vec())?, name.clone())),
            None => Err(bad("the target is the top of the image".to_owned())),
        }
    }

    /// What is in a directory.
    fn content(&mut self, dir: &Shown, to: &Names) -> ImageResult<()> {
        let trouble = |dir: &Shown| ImageError::io("read", dir.entry.path.clone());
        let mut todo: Vec<(Shown, Names)> = Vec::new();
        let children = |dir: &Shown, to: &Names| -> ImageResult<Vec<(Shown, Names)>> {
            let all = dir.children().map_err(trouble(dir))?;
            let placed = all.into_iter().filter_map(|child| {
                let name = child.place.last()?.clone();
                Some((child, joined(to.clone(), name)))
            });
            Ok(placed.collect())
        };
        todo.extend(children(dir, to)?.into_iter().rev());
        while let Some((child, to)) = todo.pop() {
            if !child.entry.metadata.is_dir() {
                self.file(&child, to)?;
                continue;
            }
            // A link to a directory stays, and what is in the directory goes where it leads.
            let place = match self.target.open(&to) {
                Some(there) if there.entry.metadata.is_dir() => there.place,
                Some(_) => {
                    let reason =
                        format!("`{}` is a file in the image, and a directory here", shown(&to));
                    return Err(bad(reason));
                }
                None => to,
            };
            self.taken("dir", &child, place.clone(), b"")?;
            self.made.insert(place.clone());
            todo.extend(children(&child, &place)?.into_iter().rev());
        }
        Ok(())
    }

    fn file(&mut self, file: &Shown, place: Names) -> ImageResult<()> {
        let in_place = self.target.find(&place);
        if self.made.contains(&place) || in_place.is_some_and(|there| there.metadata.is_dir()) {
            let reason =
                format!("`{}` is a directory in the image, and a file here", shown(&place));
            return Err(bad(reason));
        }
        let (path, kind) = (&file.entry.path, file.entry.metadata.file_type());
        if kind.is_symlink() {
            let to = std::fs::read_link(path).map_err(ImageError::io("read", path))?;
            self.taken("link", file, place, to.as_os_str().as_bytes())
        } else if kind.is_file() {
            let sum = content_sum(path).map_err(ImageError::io("read", path))?;
            self.taken("file", file, place, &sum)
        } else if kind.is_fifo() {
            self.taken("pipe", file, place, b"")
        } else {
            // Sockets and devices mean something where they were made only.
            Ok(())
        }
    }

    fn taken(&mut self, kind: &str, found: &Shown, to: Names, what: &[u8]) -> ImageResult<()> {
        checked(&to)?;
        let metadata = &found.entry.metadata;
        let owner = match self.keeps_owners {
            true => (metadata.uid(), metadata.gid()),
            false => self.owner,
        };
        let mode = match self.mode {
            _ if metadata.is_symlink() => 0o777,
            Some(mode) => mode,
            None => metadata.mode() & 0o7777,
        };
        let from = found.entry.path.clone();
        self.note(kind, &to, mode, owner, what);
        if !metadata.is_symlink() {
            let xattrs = kept_xattrs(&from).map_err(ImageError::io("read", &from))?;
            for (name, value) in xattrs {
                self.note(&format!("xattr {name}"), &to, 0, (0, 0), &value);
            }
        }
        self.add(TarPart::Taken { from, to: path_of(&to), mode, owner })
    }

    fn inline(&mut self, place: Names, content: Vec<u8>) -> ImageResult<()> {
        checked(&place)?;
        if self.target.find(&place).is_some_and(|there| there.metadata.is_dir()) {
            let reason =
                format!("`{}` is a directory in the image, and a file here", shown(&place));
            return Err(bad(reason));
        }
        let mode = self.mode.unwrap_or(0o644);
        self.note("text", &place, mode, self.owner, &content);
        self.add(TarPart::File { path: path_of(&place), mode, owner: self.owner, content })
    }
}

/// In a layer, some names say that others are removed.
fn checked(names: &Names) -> ImageResult<()> {
    match names.last() {
        Some(name) if name.starts_with(b".wh.") => Err(bad(format!(
            "`{}` cannot be copied: a name that begins with `.wh.` means removal in a layer",
            shown(names)
        ))),
        _ => Ok(()),
    }
}

fn path_of(names: &Names) -> PathBuf {
    names.iter().cloned().map(std::ffi::OsString::from_vec).collect()
}

fn content_sum(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let mut sum = Sha256::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum.finalize().to_vec()),
            read => sum.update(&buffer[..read]),
        }
    }
}
