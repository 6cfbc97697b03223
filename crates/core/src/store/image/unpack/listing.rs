//! Lists an archive without unpacking it.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read};

use super::super::error::{ImageError, ImageResult};
use super::compression;
use super::stream::{TarKind, TarStream};

/// Where each file begins and how long it is, and where links lead.
pub(in super::super) type ArchiveIndex = (BTreeMap<String, (u64, u64)>, BTreeMap<String, String>);

/// The most files an archive of an image may have.
const MOST_FILES: usize = 100_000;

/// Calls `each` with every name, until it returns `false` because it has seen enough.
pub(in super::super) fn names(
    what: &str,
    archive: impl Read,
    mut each: impl FnMut(&str) -> bool,
) -> ImageResult<()> {
    let damaged = |source| ImageError::Damaged { what: what.to_owned(), source };
    let mut stream = TarStream::new(compression::open(what, archive)?);
    while let Some(entry) = stream.next().map_err(damaged)? {
        if !each(&plain(&entry.path)) {
            break;
        }
    }
    Ok(())
}

/// Notes where the files of an uncompressed archive are.
pub(in super::super) fn index(what: &str, archive: impl Read) -> ImageResult<ArchiveIndex> {
    let damaged = |source| ImageError::Damaged { what: what.to_owned(), source };
    let mut stream = TarStream::new(CountedReader { inner: BufReader::new(archive), at: 0 });
    let (mut files, mut links) = (BTreeMap::new(), BTreeMap::new());
    while let Some(entry) = stream.next().map_err(damaged)? {
        let name = plain(&entry.path);
        match entry.kind {
            TarKind::File => {
                files.insert(name, (stream.inner().at, entry.size));
            }
            TarKind::Symlink | TarKind::HardLink => {
                let target = String::from_utf8_lossy(&entry.link).into_owned();
                let from_top = entry.kind == TarKind::HardLink;
                links.insert(name.clone(), if from_top { target } else { beside(&name, &target) });
            }
            _ => {}
        }
        if files.len() + links.len() > MOST_FILES {
            let reason = "it has too many files for an image".to_owned();
            return Err(ImageError::NotAnImage { what: what.to_owned(), reason });
        }
    }
    Ok((files, links))
}

fn plain(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    let parts: Vec<&str> = text.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    parts.join("/")
}

/// Where a symlink at `name` leads.
fn beside(name: &str, target: &str) -> String {
    let mut parts: Vec<&str> = name.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

struct CountedReader<R> {
    inner: R,
    at: u64,
}

impl<R: Read> Read for CountedReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.at += read as u64;
        Ok(read)
    }
}
