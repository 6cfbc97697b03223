//! Searches captured memory for secret values before it is sealed.
//!
//! Pages, devices and the disk are searched as the bytes they are: a file that was written to the disk is there as it was
//! written. What lies in several pieces is found if one of them holds most of it. Pages are searched in the order they have
//! in RAM, and what is not beside each other there is not taken for one text.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use super::scan::{NeedleScan, ScanMatch};
use super::{Needles, scan_file};
use crate::model::{Encoding, MemoryId, PAGE, PageIndex};
use crate::store::manifest::list;
use crate::store::tree::stat_of;
use crate::store::{Result, Store, blocking, io_error};

/// What is not searched as the bytes it is: pages are searched by their index, and the manifest has no memory in it.
const NOT_PLAIN: [&str; 3] = ["index", "pages", "memory.json"];

/// A value in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InMemory {
    /// The secret's name.
    pub name: String,
    /// How it is written.
    pub encoding: Encoding,
    /// The file of the memory layer.
    pub file: String,
    /// How far into it; of pages, how far into RAM.
    pub offset: u64,
}

impl Store {
    /// Searches a memory layer, sealed or not; each value is reported once for each file and each
    /// way in which it is written.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`](crate::store::StoreError::Io) when something cannot be read: what was not searched must not
    /// pass for clean.
    pub async fn search_memory(
        &self,
        id: &MemoryId,
        needles: &Arc<Needles>,
    ) -> Result<Vec<InMemory>> {
        let (dir, needles) = (self.memory_dir(id), Arc::clone(needles));
        blocking(move || {
            let mut all = Vec::new();
            let pages = dir.join("pages");
            let mut found = |one| add(&mut all, &needles, "pages", &one);
            search_pages(&dir, &needles, &mut found).map_err(io_error("search", &pages))?;
            for path in list(&dir)? {
                let file = path.file_name().unwrap_or_default().to_string_lossy();
                if NOT_PLAIN.contains(&&*file) {
                    continue;
                }
                let mut keep = |one| {
                    add(&mut all, &needles, &file, &one);
                    false
                };
                search_file(&path, &needles, &mut keep).map_err(io_error("search", &path))?;
            }
            Ok(all)
        })
        .await
    }
}

fn add(all: &mut Vec<InMemory>, needles: &Needles, file: &str, one: &ScanMatch) {
    let (name, encoding) = (needles.name(one.hit.secret), one.hit.encoding);
    let known = |one: &InMemory| one.name == name && one.encoding == encoding && one.file == file;
    if !all.iter().any(known) {
        all.push(InMemory {
            name: name.to_owned(),
            encoding,
            file: file.to_owned(),
            offset: one.offset(),
        });
    }
}

fn search_file(
    path: &Path,
    needles: &Needles,
    keep: &mut dyn FnMut(ScanMatch) -> bool,
) -> io::Result<()> {
    let file = OwnedFd::from(File::open(path)?);
    let stat = stat_of(&file)?;
    scan_file(&file, &stat, &mut NeedleScan::new(needles), keep)?;
    Ok(())
}

fn search_pages(dir: &Path, needles: &Needles, found: &mut dyn FnMut(ScanMatch)) -> io::Result<()> {
    let index = PageIndex::parse(&fs::read(dir.join("index"))?)?;
    let pages = File::open(dir.join("pages"))?;
    let mut scan = NeedleScan::new(needles);
    let mut last = None;
    for run in index.runs {
        let Some(at) = run.at else { continue };
        if last != Some(run.first) {
            scan.finish(found);
            scan.restart(run.first * PAGE);
        }
        last = Some(run.end());
        let mut done = 0;
        while done < run.count * PAGE {
            let most = usize::try_from(run.count * PAGE - done).unwrap_or(usize::MAX);
            let read = |room: &mut [u8]| {
                let most = most.min(room.len());
                pages.read_at(&mut room[..most], at + done)
            };
            match scan.fill(read, found) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => done += got as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
    scan.finish(found);
    Ok(())
}
