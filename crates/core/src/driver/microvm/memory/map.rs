//! Maps the pages of a chain of memory layers to one RAM image.

use std::io;
use std::path::PathBuf;

use super::layers_of;
use crate::model::{PAGE, PageRun};

const MAGIC: &[u8; 8] = b"SKRAMMAP";

/// Where a machine's RAM comes from. What no entry names is zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamMap {
    /// Bytes of RAM.
    pub ram: u64,
    /// In ascending order; they do not overlap.
    pub entries: Vec<MapEntry>,
    /// The files that entries name by their place in here.
    pub files: Vec<PathBuf>,
}

/// A piece of RAM that is a piece of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapEntry {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
    /// Which of [`RamMap::files`].
    pub file: usize,
    /// Where it begins in the file.
    pub at: u64,
}

/// Puts the pages of an image together, the topmost layer first.
///
/// # Errors
///
/// Returns an error that names the file which is missing, damaged or too short.
pub fn map_of(image: &[PathBuf]) -> io::Result<RamMap> {
    let layers = layers_of(image)?;
    let Some(ram) = layers.first().map(|(_, index)| index.ram) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "an image has a layer at least"));
    };
    let mut extents = Vec::new();
    for (file, (_, index)) in layers.iter().enumerate().rev() {
        extents = overlay(&extents, file, &index.runs);
    }
    let mut map = RamMap { ram: ram * PAGE, entries: Vec::new(), files: Vec::new() };
    let mut places = vec![None; layers.len()];
    for Extent { first, count, file, at } in extents {
        let place = *places[file].get_or_insert_with(|| {
            map.files.push(layers[file].0.clone());
            map.files.len() - 1
        });
        map.entries.push(MapEntry { offset: first * PAGE, length: count * PAGE, file: place, at });
    }
    Ok(map)
}

impl RamMap {
    /// The map as `ram.so` reads it, which is given [`files`](Self::files) in their order.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(24 + 32 * self.entries.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.ram.to_le_bytes());
        bytes.extend_from_slice(&(self.entries.len() as u64).to_le_bytes());
        for MapEntry { offset, length, file, at } in &self.entries {
            for word in [*offset, *length, *file as u64, *at] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
        }
        bytes
    }
}

/// Pages that come from one place of one layer's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) file: usize,
    pub(super) at: u64,
}

impl Extent {
    pub(super) fn end(&self) -> u64 {
        self.first + self.count
    }

    /// The part of it from page `first` up to page `end`.
    fn part(&self, first: u64, end: u64) -> Self {
        let at = self.at + (first - self.first) * PAGE;
        Self { first, count: end - first, file: self.file, at }
    }
}

/// Lays the runs of a layer over what was there.
pub(super) fn overlay(below: &[Extent], file: usize, runs: &[PageRun]) -> Vec<Extent> {
    let mut result: Vec<Extent> = Vec::with_capacity(below.len() + runs.len());
    let mut below = below.iter().copied().peekable();
    for run in runs {
        uncover(&mut below, run.first, &mut result);
        hide(&mut below, run.end());
        if let Some(at) = run.at {
            push(&mut result, Extent { first: run.first, count: run.count, file, at });
        }
    }
    uncover(&mut below, u64::MAX, &mut result);
    result
}

type Rest<I> = std::iter::Peekable<I>;

/// Takes over what lies before page `upto`.
fn uncover(below: &mut Rest<impl Iterator<Item = Extent>>, upto: u64, result: &mut Vec<Extent>) {
    while let Some(next) = below.peek_mut().filter(|next| next.first < upto) {
        if next.end() > upto {
            let (before, after) = (next.part(next.first, upto), next.part(upto, next.end()));
            *next = after;
            push(result, before);
            return;
        }
        push(result, *next);
        below.next();
    }
}

/// Drops what lies before page `upto`.
fn hide(below: &mut Rest<impl Iterator<Item = Extent>>, upto: u64) {
    while let Some(next) = below.peek_mut().filter(|next| next.first < upto) {
        if next.end() > upto {
            *next = next.part(upto, next.end());
            return;
        }
        below.next();
    }
}

fn push(result: &mut Vec<Extent>, next: Extent) {
    if let Some(last) = result.last_mut()
        && last.end() == next.first
        && last.file == next.file
        && last.at + last.count * PAGE == next.at
    {
        last.count += next.count;
        return;
    }
    result.push(next);
}
