//! Looking for values in memory that was captured, before it is kept.
//!
//! Pages, devices and the disk are searched as the bytes they are: a file that was written to the disk is there as it was
//! written. What lies in several pieces is found if one of them holds most of it.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use super::Needles;
use super::scan::Scan;
use crate::model::{Encoding, MemoryId};
use crate::store::{Result, Store, blocking, io_error};

/// Where else than in pages a machine's state is.
const SEARCHED: [&str; 3] = ["pages", "devices", "disk.qcow2"];

/// A value in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InMemory {
    /// The secret's name.
    pub name: String,
    /// How it is written.
    pub encoding: Encoding,
    /// The file of the memory layer.
    pub file: &'static str,
    /// How far into it.
    pub offset: u64,
}

impl Store {
    /// Searches a memory layer, sealed or not; each value is told once for each file and each way in which it is written.
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
            for file in SEARCHED {
                let path = dir.join(file);
                search_file(&path, file, &needles, &mut all).map_err(io_error("search", &path))?;
            }
            Ok(all)
        })
        .await
    }
}

fn search_file(
    path: &Path,
    file: &'static str,
    needles: &Needles,
    all: &mut Vec<InMemory>,
) -> io::Result<()> {
    let mut from = File::open(path)?;
    let mut scan = Scan::new(needles);
    let mut found = |hit: super::scan::Found| {
        let (name, encoding) = (needles.name(hit.hit.secret).to_owned(), hit.hit.encoding);
        let known =
            |one: &InMemory| one.name == name && one.encoding == encoding && one.file == file;
        if !all.iter().any(known) {
            all.push(InMemory { name: name.clone(), encoding, file, offset: hit.offset() });
        }
    };
    loop {
        match scan.fill(|room| from.read(room), &mut found) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    scan.finish(&mut found);
    Ok(())
}
