//! Merges the pages of several memory layers into one.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::map::overlay;
use super::{layers_of, trouble};
use crate::model::{PAGE, PageIndex, PageRun};

/// The place that runs of zeros get while they are laid over each other: their own offset in a file
/// that does not exist.
const NOWHERE: u64 = 1 << 62;
const BUFFER: u64 = 1 << 20;

/// Writes `pages` and `index` of what `run`, the topmost layer first, is together. What none of them has is left to what is below.
///
/// # Errors
///
/// Returns an error that names the file which is missing, damaged or too short.
pub fn merge_pages(run: &[PathBuf], into: &Path) -> io::Result<()> {
    let layers = layers_of(run)?;
    let (Some((_, top)), Some((_, last))) = (layers.first(), layers.last()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "there is nothing to merge"));
    };
    let (ram, whole) = (top.ram, last.whole);
    let mut extents = Vec::new();
    for (file, (_, index)) in layers.iter().enumerate().rev() {
        let placed = |run: &PageRun| PageRun {
            at: Some(run.at.unwrap_or(NOWHERE + run.first * PAGE)),
            ..*run
        };
        let runs: Vec<PageRun> = index.runs.iter().map(placed).collect();
        extents = overlay(&extents, file, &runs);
    }
    let path = into.join("pages");
    let pages = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    let mut runs: Vec<PageRun> = Vec::new();
    let (mut end, mut buffer) = (0, vec![0; BUFFER as usize]);
    let mut open: Vec<Option<fs::File>> = layers.iter().map(|_| None).collect();
    for extent in extents {
        let (first, count) = (extent.first, extent.count);
        if extent.at >= NOWHERE {
            // Nothing is below a layer that is whole, and nothing is zero.
            if !whole {
                runs.push(PageRun { first, count, at: None });
            }
            continue;
        }
        let (path, _) = &layers[extent.file];
        let file = match &mut open[extent.file] {
            Some(file) => file,
            none => none.insert(fs::File::open(path).map_err(|error| trouble(path, error))?),
        };
        copy(file, extent.at, &pages, end, count * PAGE, &mut buffer)?;
        match runs.last_mut() {
            Some(before) if before.at.is_some() && before.end() == first => before.count += count,
            _ => runs.push(PageRun { first, count, at: Some(end) }),
        }
        end += count * PAGE;
    }
    fs::write(into.join("index"), PageIndex { whole, ram, runs }.encode())
}

fn copy(
    from: &fs::File,
    at: u64,
    into: &fs::File,
    to: u64,
    length: u64,
    buffer: &mut [u8],
) -> io::Result<()> {
    let mut done = 0;
    while done < length {
        let most = (length - done).min(buffer.len() as u64) as usize;
        from.read_exact_at(&mut buffer[..most], at + done)?;
        into.write_all_at(&buffer[..most], to + done)?;
        done += most as u64;
    }
    Ok(())
}
