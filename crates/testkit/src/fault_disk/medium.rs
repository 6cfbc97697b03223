//! What is on the disk: a durable base, and the writes a power cut may still take away.
//!
//! ```text
//! write  -> current, and appended to `unflushed`
//! read   <- current
//! flush  -> every unflushed write goes to base
//! cut    -> base plus a random part of the unflushed writes becomes base and current
//! ```
//!
//! A disk may persist unflushed writes in any order, any number of them, and the one it is busy with
//! in part: sectors are atomic, writes of several sectors are not. The cache is bounded; when it is
//! full, its oldest write goes to the base, as in a real disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use serde::{Deserialize, Serialize};

use crate::random::Random;

/// How much may be unflushed at a time.
const CACHE: usize = 64 << 20;

/// The outcome of the unflushed writes in a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// Writes that are on the disk as a whole.
    pub kept: u64,
    /// Writes of which only some sectors are on the disk.
    pub torn: u64,
    /// Writes that are lost.
    pub lost: u64,
}

#[derive(Debug)]
pub(super) struct Medium {
    size: u64,
    /// The unit in which writes tear.
    sector: usize,
    /// What would be there after a power cut that lost every unflushed write.
    base: File,
    /// What reads see.
    current: File,
    unflushed: Vec<Write>,
    unflushed_bytes: usize,
}

#[derive(Debug)]
struct Write {
    offset: u64,
    data: Vec<u8>,
}

/// What a cut does to the writes in the cache.
#[derive(Debug, Clone, Copy)]
enum Style {
    /// The cache was written out just before.
    KeepAll,
    /// The cache is lost as a whole.
    LoseAll,
    /// Writes go out in order; the cut comes in the middle of one.
    Prefix(usize),
    /// Writes go out in any order; this many percent made it.
    Subset(u64),
}

impl Medium {
    /// An empty disk in memory.
    pub(super) fn new(size: u64, sector: usize) -> io::Result<Self> {
        let sparse = |name: &str| -> io::Result<File> {
            let memory = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
            let file = File::from(memory);
            file.set_len(size)?;
            Ok(file)
        };
        let (base, current) = (sparse("fault-disk-base")?, sparse("fault-disk-current")?);
        Ok(Self { size, sector, base, current, unflushed: Vec::new(), unflushed_bytes: 0 })
    }

    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    /// How many writes a cut could take away.
    pub(super) const fn unflushed(&self) -> usize {
        self.unflushed.len()
    }

    pub(super) fn read(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let room = self.size.saturating_sub(offset);
        let length = length.min(usize::try_from(room).unwrap_or(usize::MAX));
        let mut data = vec![0; length];
        self.current.read_exact_at(&mut data, offset)?;
        Ok(data)
    }

    pub(super) fn write(&mut self, offset: u64, data: Vec<u8>) -> io::Result<()> {
        if offset.checked_add(data.len() as u64).is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.current.write_all_at(&data, offset)?;
        self.unflushed_bytes += data.len();
        self.unflushed.push(Write { offset, data });
        if self.unflushed_bytes > CACHE {
            // Half at once, so that this is not done again at the next write.
            let half = self.unflushed.len() / 2;
            for write in self.unflushed.drain(..=half) {
                self.base.write_all_at(&write.data, write.offset)?;
                self.unflushed_bytes -= write.data.len();
            }
        }
        Ok(())
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        for write in self.unflushed.drain(..) {
            self.base.write_all_at(&write.data, write.offset)?;
        }
        self.unflushed_bytes = 0;
        Ok(())
    }

    /// Loses a random part of what was not flushed.
    pub(super) fn cut(&mut self, seed: u64) -> io::Result<Cut> {
        let mut random = Random::new(seed);
        let writes = std::mem::take(&mut self.unflushed);
        self.unflushed_bytes = 0;
        for write in &writes {
            let mut before = vec![0; write.data.len()];
            self.base.read_exact_at(&mut before, write.offset)?;
            self.current.write_all_at(&before, write.offset)?;
        }
        let style = match random.below(8) {
            0 => Style::KeepAll,
            1 => Style::LoseAll,
            2 | 3 => {
                let bound = writes.len() as u64 + 1;
                Style::Prefix(usize::try_from(random.below(bound)).unwrap_or(0))
            }
            _ => Style::Subset(10 + random.below(81)),
        };
        let mut cut = Cut { kept: 0, torn: 0, lost: 0 };
        for (index, write) in writes.iter().enumerate() {
            let tears = write.data.len() > self.sector;
            let (keep, tear) = match style {
                Style::KeepAll => (true, false),
                Style::LoseAll => (false, false),
                Style::Prefix(length) => (index <= length, index == length && tears),
                Style::Subset(chance) => (random.percent(chance), tears && random.percent(15)),
            };
            match (keep, tear) {
                (false, _) => cut.lost += 1,
                (true, true) => {
                    self.keep_sectors(write, &mut random)?;
                    cut.torn += 1;
                }
                (true, false) => {
                    self.keep(write.offset, &write.data)?;
                    cut.kept += 1;
                }
            }
        }
        Ok(cut)
    }

    fn keep(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.base.write_all_at(data, offset)?;
        self.current.write_all_at(data, offset)
    }

    /// Keeps the beginning, the end, or any sectors of a write.
    fn keep_sectors(&self, write: &Write, random: &mut Random) -> io::Result<()> {
        let count = write.data.len().div_ceil(self.sector);
        let border = usize::try_from(random.below(count as u64)).unwrap_or(0);
        let way = random.below(3);
        for (index, data) in write.data.chunks(self.sector).enumerate() {
            let keep = match way {
                0 => index < border,
                1 => index >= border,
                _ => random.percent(50),
            };
            if keep {
                self.keep(write.offset + (index * self.sector) as u64, data)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Medium;

    const SECTOR: usize = 512;

    fn disk() -> Medium {
        Medium::new(1 << 20, SECTOR).expect("memory")
    }

    #[test]
    fn flushed_writes_survive_every_cut() {
        for seed in 0..200 {
            let mut disk = disk();
            disk.write(0, vec![1; 4096]).expect("written");
            disk.flush().expect("flushed");
            disk.write(8192, vec![2; 4096]).expect("written");
            disk.cut(seed).expect("cut");
            assert_eq!(disk.read(0, 4096).expect("read"), vec![1; 4096], "seed {seed}");
            assert_eq!(disk.unflushed(), 0);
        }
    }

    #[test]
    fn unflushed_writes_are_kept_lost_and_torn_by_whole_sectors() {
        let (mut kept, mut lost, mut torn) = (false, false, false);
        for seed in 0..200 {
            let mut disk = disk();
            disk.write(0, vec![1; 4096]).expect("written");
            disk.write(0, vec![2; 4096]).expect("written");
            disk.cut(seed).expect("cut");
            let found = disk.read(0, 4096).expect("read");
            for sector in found.chunks(SECTOR) {
                assert!(sector.iter().all(|byte| *byte == sector[0]), "seed {seed}");
            }
            kept |= found == [2; 4096];
            lost |= found == [0; 4096];
            torn |= found.iter().any(|byte| *byte != found[0]);
        }
        assert!(kept && lost && torn, "{kept} {lost} {torn}");
    }

    #[test]
    fn the_same_seed_gives_the_same_disk() {
        let once = |seed| {
            let mut disk = disk();
            for index in 0..50_u64 {
                disk.write(index * 1000, vec![u8::try_from(index).expect("small"); 3000])
                    .expect("written");
            }
            disk.cut(seed).expect("cut");
            disk.read(0, 60_000).expect("read")
        };
        assert_eq!(once(7), once(7));
        assert_ne!(once(7), once(8));
    }

    #[test]
    fn a_full_cache_goes_to_the_base() {
        let mut disk = Medium::new(256 << 20, SECTOR).expect("memory");
        for index in 0..100_u64 {
            disk.write(index << 20, vec![3; 1 << 20]).expect("written");
        }
        disk.cut(1).expect("cut");
        assert_eq!(disk.read(0, 1 << 20).expect("read"), vec![3; 1 << 20]);
    }

    #[test]
    fn nothing_is_written_past_the_end() {
        assert!(disk().write((1 << 20) - 10, vec![0; 11]).is_err());
    }
}
