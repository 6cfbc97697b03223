//! Digests of layers in their files: `digest.jsonl`, and `digest.json` of earlier versions.
//!
//! Both are read entry by entry. `docs/formats/layer.md` describes them.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, BufWriter, Write};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::hash::TreeHasher;
use super::links::{HardLinkName, LinkGroups, path_id};
use crate::failpoint;
use crate::model::FORMAT;
use crate::store::manifest::document::{
    CHECKSUM_DIGITS, FileChecksum, check_file, line_head, refuse_later,
};
use crate::store::manifest::sync_parent;
use crate::store::{Result, Store, StoreError, io_error};

/// The file that is written now.
pub(super) const LINES: &str = "digest.jsonl";
/// The file of earlier versions.
pub(super) const DOCUMENT: &str = "digest.json";

/// Something that a digest says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Recorded<'a> {
    /// A name, in the order of paths.
    Entry { path: &'a str, hash: &'a str },
    /// The entry before, or any one, is a further name of a file.
    Link(HardLinkName),
}

/// The digest of a layer on disk.
#[derive(Debug)]
pub(super) struct DigestFile {
    pub(super) path: PathBuf,
    is_document: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct LinkLine {
    link: u64,
    first: String,
}

impl DigestFile {
    /// The digest in the directory of a layer. Of two, the one that was modified last.
    pub(super) fn find(layer: &Path) -> Result<Option<Self>> {
        let mut newest: Option<(std::time::SystemTime, Self)> = None;
        for (name, is_document) in [(LINES, false), (DOCUMENT, true)] {
            let path = layer.join(name);
            let modified = match fs::metadata(&path) {
                Ok(found) => found.modified().map_err(io_error("look at", &path))?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(io_error("look at", &path)(error)),
            };
            if newest.as_ref().is_none_or(|(known, _)| modified > *known) {
                newest = Some((modified, Self { path, is_document }));
            }
        }
        Ok(newest.map(|(_, file)| file))
    }

    /// Reads the whole file for its checksum.
    pub(super) fn check(&self) -> Result<()> {
        let layout = match self.is_document {
            true => FileChecksum::InDocument,
            false => FileChecksum::InFirstLine,
        };
        check_file(&self.path, layout)
    }

    /// Calls `each` with everything that it says, in order.
    pub(super) fn read(&self, mut each: impl FnMut(Recorded<'_>) -> Result<()>) -> Result<()> {
        let file = File::open(&self.path).map_err(io_error("open", &self.path))?;
        let file = BufReader::new(file);
        let mut last: Option<String> = None;
        let ordered = |recorded: Recorded<'_>| {
            if let Recorded::Entry { path, .. } = &recorded {
                if last.as_ref().is_some_and(|last| last.as_str() >= *path) {
                    return Err(self.damaged("its entries are not in order"));
                }
                let last = last.get_or_insert_default();
                last.clear();
                last.push_str(path);
            }
            each(recorded)
        };
        if self.is_document {
            self.read_document(file, ordered)
        } else {
            self.read_lines(file, ordered)
        }
    }

    fn read_lines(
        &self,
        mut file: BufReader<File>,
        mut each: impl FnMut(Recorded<'_>) -> Result<()>,
    ) -> Result<()> {
        let (mut line, mut path) = (Vec::new(), String::new());
        let mut is_first = true;
        loop {
            line.clear();
            if file.read_until(b'\n', &mut line).map_err(io_error("read", &self.path))? == 0 {
                return Ok(());
            }
            if std::mem::take(&mut is_first) {
                continue;
            }
            let invalid = |error: serde_json::Error| self.damaged(error.to_string());
            if line.starts_with(b"[") {
                let (shared, rest, hash): (usize, String, String) =
                    serde_json::from_slice(&line).map_err(invalid)?;
                if !path.is_char_boundary(shared) {
                    return Err(self.damaged("a path begins with more than the one before it has"));
                }
                path.truncate(shared);
                path.push_str(&rest);
                each(Recorded::Entry { path: &path, hash: &hash })?;
            } else {
                let LinkLine { link, first } = serde_json::from_slice(&line).map_err(invalid)?;
                let first = u64::from_str_radix(&first, 16);
                let first = first.map_err(|error| self.damaged(error.to_string()))?;
                each(Recorded::Link(HardLinkName { entry: link, first }))?;
            }
        }
    }

    fn read_document(
        &self,
        file: BufReader<File>,
        mut each: impl FnMut(Recorded<'_>) -> Result<()>,
    ) -> Result<()> {
        let (mut refused, mut entry) = (None, 0);
        let mut each_pair = |path: &str, value: &str| -> Result<(), ()> {
            let mut pass_on = |recorded| each(recorded).map_err(|error| refused = Some(error));
            let (hash, first) =
                value.split_once(" = ").map_or((value, None), |(hash, first)| (hash, Some(first)));
            pass_on(Recorded::Entry { path, hash })?;
            if let Some(first) = first {
                pass_on(Recorded::Link(HardLinkName { entry, first: path_id(first) }))?;
            }
            entry += 1;
            Ok(())
        };
        let mut deserializer = serde_json::Deserializer::from_reader(file);
        let read = DocumentSeed(&mut each_pair).deserialize(&mut deserializer);
        match (read, refused) {
            (_, Some(refused)) => Err(refused),
            (Err(error), None) => Err(self.damaged(error.to_string())),
            (Ok(()), None) => Ok(()),
        }
    }

    fn damaged(&self, reason: impl Into<String>) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), reason: reason.into() }
    }
}

/// Hashes a tree and writes its digest into the directory of its layer.
pub(super) fn write(store: &Store, layer: &Path, hasher: TreeHasher<'_>) -> Result<()> {
    let path = layer.join(LINES);
    refuse_later(&path)?;
    let temporary = store.fresh_tmp("digest");
    let outcome = write_lines(store, &temporary, hasher).and_then(|()| {
        failpoint::pass("store.write.before_rename");
        fs::rename(&temporary, &path).map_err(io_error("replace", &path))?;
        failpoint::pass("store.write.renamed");
        sync_parent(&path)
    });
    if outcome.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    outcome
}

fn write_lines(store: &Store, temporary: &Path, mut hasher: TreeHasher<'_>) -> Result<()> {
    let mut options = File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(temporary);
    let file = file.map_err(io_error("create", temporary))?;
    let mut out = HashingWriter { out: BufWriter::new(file), hash: Sha256::new() };
    let failed = |error: io::Error| io_error("write", temporary)(error);
    let head = line_head(FORMAT);
    writeln!(out, "{head}{:0>CHECKSUM_DIGITS$}\"}}", "").map_err(failed)?;
    let mut groups = LinkGroups::new(store.fresh_tmp("links"));
    let (mut last, mut entry) = (String::new(), 0);
    while let Some(hashed) = hasher.next()? {
        if let Some(inode) = hashed.linked_inode {
            groups.add(inode, entry, &hashed.path)?;
        }
        let shared = shared_length(&last, &hashed.path);
        out.line(&(shared, &hashed.path[shared..], &hashed.hash)).map_err(failed)?;
        (last, entry) = (hashed.path, entry + 1);
    }
    let mut links = groups.finish(store.fresh_tmp("links"))?.sorted()?;
    while let Some(HardLinkName { entry, first }) = links.next()? {
        out.line(&LinkLine { link: entry, first: format!("{first:016x}") }).map_err(failed)?;
    }
    let checksum = hex::encode(out.hash.finalize());
    let file = out.out.into_inner().map_err(|error| failed(error.into_error()))?;
    file.write_all_at(checksum.as_bytes(), head.len() as u64).map_err(failed)?;
    file.sync_all().map_err(io_error("sync", temporary))
}

/// How many bytes two paths have in common at the beginning, in whole characters.
fn shared_length(before: &str, path: &str) -> usize {
    let same = before.bytes().zip(path.bytes()).take_while(|(before, path)| before == path).count();
    path.floor_char_boundary(same)
}

#[derive(Debug)]
struct HashingWriter {
    out: BufWriter<File>,
    hash: Sha256,
}

impl HashingWriter {
    fn line(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.write_all(&line)
    }
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Reads the `entries` of a document, one after the other. The function has kept its error when it fails.
struct DocumentSeed<'a, F>(&'a mut F);

impl<'de, F: FnMut(&str, &str) -> Result<(), ()>> DeserializeSeed<'de> for DocumentSeed<'_, F> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), ()>> Visitor<'de> for DocumentSeed<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the digest of a layer")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "entries" {
                found = true;
                map.next_value_seed(EntriesSeed(&mut *self.0))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if found { Ok(()) } else { Err(A::Error::missing_field("entries")) }
    }
}

struct EntriesSeed<'a, F>(&'a mut F);

impl<'de, F: FnMut(&str, &str) -> Result<(), ()>> DeserializeSeed<'de> for EntriesSeed<'_, F> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), ()>> Visitor<'de> for EntriesSeed<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("hashes by path")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((path, hash)) = map.next_entry::<String, String>()? {
            (self.0)(&path, &hash).map_err(|()| A::Error::custom("it was not read to the end"))?;
        }
        Ok(())
    }
}
