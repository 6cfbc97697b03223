//! Finds names of the same file, in memory that does not grow with their number.
//!
//! Every file of a compacted layer has several names, most of them in other layers. So each name of
//! such a file is a record, records are sorted by inode, and inodes with several records remain.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use crate::store::manifest::document::sha256;
use crate::store::{Result, io_error};

/// How many records are sorted in memory.
const RECORDS_HELD: usize = 1 << 16;
/// How many records are read from a sorted run at once.
const RECORDS_READ: u64 = 1 << 9;
const RECORD_BYTES: usize = 24;

/// Names of files that have several, by inode.
#[derive(Debug)]
pub(super) struct LinkGroups {
    /// Inode, number of the entry, [`path_id`].
    names: SpillSort,
}

/// A further name of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HardLinkName {
    /// The number of its entry.
    pub(super) entry: u64,
    /// The [`path_id`] of the file's first entry.
    pub(super) first: u64,
}

/// Stands for a path in [`HardLinkName::first`].
pub(super) fn path_id(text: &str) -> u64 {
    let hash = sha256(text.as_bytes());
    u64::from_be_bytes([hash[0], hash[1], hash[2], hash[3], hash[4], hash[5], hash[6], hash[7]])
}

impl LinkGroups {
    /// `temporary` is a file to be used if there are many names.
    pub(super) fn new(temporary: PathBuf) -> Self {
        Self { names: SpillSort::new(temporary, RECORDS_HELD) }
    }

    pub(super) fn add(&mut self, inode: u64, entry: u64, path: &str) -> Result<()> {
        self.names.push([inode, entry, path_id(path)])
    }

    /// All further names of files, by number of their entries. `temporary` is another file.
    pub(super) fn finish(self, temporary: PathBuf) -> Result<Links> {
        let mut links = Links::new(temporary);
        let mut first = None;
        let mut sorted = self.names.finish()?;
        while let Some([inode, entry, id]) = sorted.next()? {
            match first {
                Some((known, first)) if known == inode => {
                    links.push(HardLinkName { entry, first })?;
                }
                _ => first = Some((inode, id)),
            }
        }
        Ok(links)
    }
}

/// Further names of files.
#[derive(Debug)]
pub(super) struct Links(SpillSort);

impl Links {
    pub(super) fn new(temporary: PathBuf) -> Self {
        Self(SpillSort::new(temporary, RECORDS_HELD))
    }

    pub(super) fn push(&mut self, link: HardLinkName) -> Result<()> {
        self.0.push([link.entry, link.first, 0])
    }

    pub(super) fn sorted(self) -> Result<SortedLinks> {
        self.0.finish().map(SortedLinks)
    }
}

/// Links by number of their entries.
#[derive(Debug)]
pub(super) struct SortedLinks(Sorted);

impl SortedLinks {
    pub(super) fn next(&mut self) -> Result<Option<HardLinkName>> {
        Ok(self.0.next()?.map(|[entry, first, _]| HardLinkName { entry, first }))
    }
}

type LinkRecord = [u64; 3];

/// Sorts records. Those that do not fit in memory go to a temporary file in sorted runs.
#[derive(Debug)]
struct SpillSort {
    temporary: PathBuf,
    limit: usize,
    held: Vec<LinkRecord>,
    spilled: Option<File>,
    /// How many records the runs in the file have.
    runs: Vec<u64>,
}

impl SpillSort {
    fn new(temporary: PathBuf, limit: usize) -> Self {
        Self { temporary, limit, held: Vec::new(), spilled: None, runs: Vec::new() }
    }

    fn push(&mut self, record: LinkRecord) -> Result<()> {
        if self.held.len() >= self.limit {
            self.spill()?;
        }
        self.held.push(record);
        Ok(())
    }

    fn spill(&mut self) -> Result<()> {
        self.held.sort_unstable();
        let file = match self.spilled.take() {
            Some(file) => file,
            None => {
                let mut options = File::options();
                let options = options.read(true).write(true).create_new(true).mode(0o600);
                let file = options.open(&self.temporary);
                let file = file.map_err(io_error("create", &self.temporary))?;
                fs::remove_file(&self.temporary).map_err(io_error("remove", &self.temporary))?;
                file
            }
        };
        let bytes: Vec<u8> =
            self.held.iter().flatten().flat_map(|number| number.to_le_bytes()).collect();
        let at = self.runs.iter().sum::<u64>() * RECORD_BYTES as u64;
        file.write_all_at(&bytes, at).map_err(io_error("write", &self.temporary))?;
        self.spilled = Some(file);
        self.runs.push(self.held.len() as u64);
        self.held.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<Sorted> {
        self.held.sort_unstable();
        let mut runs = vec![SortedRun { at: 0, end: 0, read: self.held.into() }];
        let mut at = 0;
        for length in self.runs {
            runs.push(SortedRun { at, end: at + length, read: VecDeque::new() });
            at += length;
        }
        let (temporary, file) = (self.temporary, self.spilled);
        let mut sorted = Sorted { temporary, file, runs, heads: BinaryHeap::new() };
        for run in 0..sorted.runs.len() {
            sorted.advance(run)?;
        }
        Ok(sorted)
    }
}

/// Merges sorted runs.
#[derive(Debug)]
struct Sorted {
    temporary: PathBuf,
    file: Option<File>,
    runs: Vec<SortedRun>,
    /// The first record of each run that has one.
    heads: BinaryHeap<Reverse<(LinkRecord, usize)>>,
}

#[derive(Debug)]
struct SortedRun {
    /// The records of the file that are still to be read.
    at: u64,
    end: u64,
    read: VecDeque<LinkRecord>,
}

impl Sorted {
    fn next(&mut self) -> Result<Option<LinkRecord>> {
        let Some(Reverse((record, run))) = self.heads.pop() else { return Ok(None) };
        self.advance(run)?;
        Ok(Some(record))
    }

    fn advance(&mut self, number: usize) -> Result<()> {
        let run = &mut self.runs[number];
        if run.read.is_empty()
            && run.at < run.end
            && let Some(file) = &self.file
        {
            let count = (run.end - run.at).min(RECORDS_READ);
            let length = usize::try_from(count).unwrap_or_default() * RECORD_BYTES;
            let mut bytes = vec![0; length];
            let read = file.read_exact_at(&mut bytes, run.at * RECORD_BYTES as u64);
            read.map_err(io_error("read", &self.temporary))?;
            run.at += count;
            run.read.extend(bytes.chunks_exact(RECORD_BYTES).map(|record| {
                let mut numbers = [0; 3];
                for (number, bytes) in numbers.iter_mut().zip(record.as_chunks::<8>().0) {
                    *number = u64::from_le_bytes(*bytes);
                }
                numbers
            }));
        }
        if let Some(record) = run.read.pop_front() {
            self.heads.push(Reverse((record, number)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_sorted_however_few_are_held() {
        let dir = tempfile::tempdir().unwrap();
        let records: Vec<LinkRecord> = (0..5000u64).map(|n| [n * 7919 % 613, n, n]).collect();
        let mut expected = records.clone();
        expected.sort_unstable();
        for limit in [1, 10, 4999, 5000, 10_000] {
            let mut sort = SpillSort::new(dir.path().join("spill"), limit);
            for record in &records {
                sort.push(*record).unwrap();
                assert!(sort.held.len() <= limit);
            }
            let mut sorted = sort.finish().unwrap();
            let mut found = Vec::new();
            while let Some(record) = sorted.next().unwrap() {
                found.push(record);
            }
            assert_eq!(found, expected, "{limit} held");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "no file is left");
        }
    }

    #[test]
    fn further_names_refer_to_the_first_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut groups = LinkGroups::new(dir.path().join("one"));
        for (entry, (inode, path)) in
            [(8, "a"), (9, "b"), (8, "c"), (7, "d"), (9, "e"), (8, "f")].into_iter().enumerate()
        {
            groups.add(inode, entry as u64, path).unwrap();
        }
        let mut links = groups.finish(dir.path().join("two")).unwrap().sorted().unwrap();
        let mut found = Vec::new();
        while let Some(HardLinkName { entry, first }) = links.next().unwrap() {
            found.push((entry, first));
        }
        assert_eq!(found, [(2, path_id("a")), (4, path_id("b")), (5, path_id("a"))]);
    }
}
