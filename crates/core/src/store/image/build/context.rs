//! The files that a build may copy.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::dockerfile::{IgnoreFile, IgnoreVerdict};
use crate::store::image::Images;
use crate::store::image::builder::blocking;
use crate::store::image::error::{ImageError, ImageResult};
use crate::store::image::unpack::{Below, Form, UnpackRoom, unpack_layer};

/// What a context may take, unpacked.
const LARGEST: u64 = 16 << 30;
/// How many files, directories and links it may have.
const MOST_ENTRIES: u64 = 500_000;
/// No Dockerfile and no list of ignored files is larger.
const LARGEST_TEXT: u64 = 1 << 20;
/// How clients name a Dockerfile that may be outside of the context, and what it ignores. Neither is copied.
const OUTSIDE: &str = ".keep-build.Dockerfile";
const OUTSIDE_IGNORE: &str = ".keep-build.Dockerfile.dockerignore";

/// An unpacked build context. It is removed when this is dropped.
#[derive(Debug)]
pub struct BuildContext {
    dir: TempDir,
    /// How many files were ignored, for errors that wonder where one is.
    ignored: usize,
}

impl BuildContext {
    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// How many files and directories `.dockerignore` has left out.
    #[must_use]
    pub fn ignored(&self) -> usize {
        self.ignored
    }
}

impl Images {
    /// Unpacks a context, and answers with it and the text of its Dockerfile. What `.dockerignore` names
    /// is left out.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::BadCopy`] when there is no such Dockerfile, and what is wrong with the archive.
    pub async fn open_context(
        &self,
        archive: &Path,
        dockerfile: &str,
    ) -> ImageResult<(BuildContext, String)> {
        let (archive, dockerfile) = (archive.to_owned(), dockerfile.to_owned());
        let tmp = self.builder.store.data_dir().join("tmp");
        let free = self.builder.room()?;
        let room = match free.bytes < LARGEST {
            true => UnpackRoom { entries: MOST_ENTRIES, ..free },
            false => UnpackRoom {
                bytes: LARGEST,
                entries: MOST_ENTRIES,
                why: "and 500,000 files that a build context may have; leave some out with .dockerignore",
            },
        };
        let what = tmp.clone();
        blocking(&what, move || open(&tmp, &archive, &dockerfile, room)).await
    }
}

fn open(
    tmp: &Path,
    archive: &Path,
    dockerfile: &str,
    room: UnpackRoom,
) -> ImageResult<(BuildContext, String)> {
    let dir = TempDir::with_prefix_in("build-", tmp).map_err(ImageError::io("create", tmp))?;
    let file = File::open(archive).map_err(ImageError::io("open", tmp))?;
    unpack_layer("the build context", file, Form::Root, dir.path(), &[], room)?;
    let roots = [dir.path().to_owned()];
    let missing = || ImageError::BadCopy {
        reason: format!(
            "there is no Dockerfile `{dockerfile}` in the build context; name it with `-f`"
        ),
    };
    let text = text(&roots, dockerfile)?.ok_or_else(missing)?;
    let mut rules = None;
    for name in [format!("{dockerfile}.dockerignore"), ".dockerignore".to_owned()] {
        if let Some(text) = self::text(&roots, &name)? {
            let read = IgnoreFile::parse(&text).map_err(|(line, reason)| ImageError::BadCopy {
                reason: format!("{name}, line {line}: {reason}"),
            })?;
            rules = Some(read);
            break;
        }
    }
    for name in [OUTSIDE, OUTSIDE_IGNORE] {
        match fs::remove_file(dir.path().join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(ImageError::io("remove", name)(error));
            }
            _ => {}
        }
    }
    let ignored = match rules {
        Some(rules) => leave_out(dir.path(), &rules).map_err(ImageError::io("prepare", tmp))?,
        None => 0,
    };
    Ok((BuildContext { dir, ignored }, text))
}

/// A file of the context.
fn text(roots: &[PathBuf], path: &str) -> ImageResult<Option<String>> {
    let names = super::names::inside(path)?;
    let Some((_, found)) = Below(roots).follow(&names) else { return Ok(None) };
    let bad = |reason: String| ImageError::BadCopy { reason };
    if !found.metadata.is_file() || found.metadata.len() > LARGEST_TEXT {
        return Err(bad(format!("`{path}` is no file of at most 1 MiB")));
    }
    let bytes = fs::read(&found.path).map_err(ImageError::io("read", path))?;
    String::from_utf8(bytes).map(Some).map_err(|_| bad(format!("`{path}` is not text in UTF-8")))
}

/// Removes what is ignored. A directory in which something is brought back stays, with that.
fn leave_out(root: &Path, rules: &IgnoreFile) -> io::Result<usize> {
    let mut removed = 0;
    let mut todo = vec![(root.to_owned(), Vec::new(), IgnoreVerdict::default())];
    let mut emptied = Vec::new();
    while let Some((dir, above, verdict)) = todo.pop() {
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let mut path = above.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(entry.file_name().as_bytes());
            let judged = rules.judge(&path, &verdict);
            let is_dir = entry.file_type()?.is_dir();
            if judged.ignored {
                removed += 1;
                match is_dir {
                    true if rules.brings_back() => emptied.push(entry.path()),
                    true => fs::remove_dir_all(entry.path())?,
                    false => fs::remove_file(entry.path())?,
                }
            }
            if is_dir && (!judged.ignored || rules.brings_back()) {
                todo.push((entry.path(), path, judged));
            }
        }
    }
    // The deepest come last. What still has something in it stays.
    for dir in emptied.into_iter().rev() {
        match fs::remove_dir(&dir) {
            Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => return Err(error),
            _ => {}
        }
    }
    Ok(removed)
}
