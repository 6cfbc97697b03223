//! A machine's RAM: what is kept of it, and how it is mapped into a machine again.
//!
//! `docs/MICROVM.md` describes how RAM is mapped, `docs/formats/memory.md` what is written. Nothing
//! here talks to a hypervisor: callers pass the process and the place of RAM in it.

mod capture;
mod map;
mod merge;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::model::PageIndex;

pub use capture::{PagesWritten, capture_pages};
pub use map::{MapEntry, RamMap, map_of};
pub use merge::merge_pages;

/// The most mappings that a machine's RAM may take. The kernel allows a process 65,530.
pub const MOST_ENTRIES: usize = 20_000;

/// How many layers with pages a machine's RAM is put together from before a capture writes all of it.
pub const DEEPEST: usize = 8;

/// The layers of an image whose pages count: those down to the first that is whole.
fn layers_of(image: &[PathBuf]) -> io::Result<Vec<(PathBuf, PageIndex)>> {
    let mut layers: Vec<(PathBuf, PageIndex)> = Vec::new();
    for dir in image {
        let index = read_index(dir)?;
        if layers.first().is_some_and(|(_, top)| top.ram != index.ram) {
            return Err(trouble(dir, "it is of a machine with another amount of RAM"));
        }
        let whole = index.whole;
        layers.push((dir.join("pages"), index));
        if whole {
            break;
        }
    }
    Ok(layers)
}

/// Whether nothing below a layer counts for its pages.
///
/// # Errors
///
/// Returns an error that names the file which is missing or damaged.
pub fn is_whole(layer: &Path) -> io::Result<bool> {
    Ok(read_index(layer)?.whole)
}

fn read_index(dir: &Path) -> io::Result<PageIndex> {
    let path = dir.join("index");
    let bytes = fs::read(&path).map_err(|error| trouble(&path, error))?;
    let index = PageIndex::parse(&bytes).map_err(|error| trouble(&path, error))?;
    let pages = dir.join("pages");
    let there = fs::metadata(&pages).map_err(|error| trouble(&pages, error))?.len();
    // What is mapped beyond the end of a file kills the machine when it is touched.
    if there < index.file_len() {
        return Err(trouble(&pages, "it is shorter than its index says"));
    }
    Ok(index)
}

fn trouble(path: &Path, what: impl ToString) -> io::Error {
    let text = format!("`{}`: {}", path.display(), what.to_string());
    io::Error::new(io::ErrorKind::InvalidData, text)
}
