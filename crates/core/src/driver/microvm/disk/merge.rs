//! Merging qcow2 files of a chain into one.
//!
//! The files are read directly: their tables are two levels of offsets, and `qemu-img` would be another program to install. A
//! hypervisor wrote them for a guest, so they are untrusted. A file that differs from the layout that [`super::qcow2`] and QEMU's
//! defaults produce is rejected, every offset is checked, and then nothing is merged.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::qcow2::{CLUSTER, CLUSTER_BITS, PER_ENTRY, PER_TABLE, header};

/// The bits of an entry that are an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The cluster belongs to this disk alone.
const OWN: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// It reads as zeros, whatever is below.
const ZEROS: u64 = 1;
/// The largest disk that is merged: more than any that is made.
const LARGEST: u64 = 64 << 40;

/// A qcow2 file to read from.
struct Qcow2Reader {
    file: File,
    length: u64,
    size: u64,
    /// The offsets of its L2 tables; 0 for none.
    tables: Vec<u64>,
}

impl Qcow2Reader {
    fn open(path: &Path) -> io::Result<Self> {
        let told = |what: &str| wrong(format!("`{}`: {what}", path.display()));
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        let mut head = [0; 104];
        file.read_exact_at(&mut head, 0)?;
        let word = |at: usize| head[at..at + 8].try_into().map_or(0, u64::from_be_bytes);
        let half = |at: usize| head[at..at + 4].try_into().map_or(0, u32::from_be_bytes);
        let plain = head.starts_with(b"QFI\xfb")
            && half(4) == 3
            && word(8) == 0 // nothing below is named
            && half(20) == CLUSTER_BITS
            && half(32) == 0 // not encrypted
            && half(60) == 0 // no snapshots
            && word(72) == 0; // nothing that must be understood
        let (size, entries, at) = (word(24), u64::from(half(36)), word(40));
        if !plain || size > LARGEST || entries < size.div_ceil(PER_ENTRY) {
            return Err(told("it is not as it was made"));
        }
        // There may be more entries than the disk needs.
        let entries = size.div_ceil(PER_ENTRY);
        let mut table = vec![0; usize::try_from(entries * 8).map_err(io::Error::other)?];
        file.read_exact_at(&mut table, at)?;
        let tables = table.chunks_exact(8).map(|entry| entry_of(entry) & OFFSET).collect();
        Ok(Self { file, length, size, tables })
    }

    /// The second table for one entry of the first.
    fn table(&self, number: usize) -> io::Result<Option<Vec<u64>>> {
        let Some(at) = self.tables.get(number).copied().filter(|at| *at != 0) else {
            return Ok(None);
        };
        if !at.is_multiple_of(CLUSTER) {
            return Err(wrong("a table is at no cluster".to_owned()));
        }
        let mut bytes = vec![0; usize::try_from(CLUSTER).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(Some(bytes.chunks_exact(8).map(entry_of).collect()))
    }

    /// A cluster's bytes. A file may end within its last.
    fn read(&self, entry: u64, into: &mut [u8]) -> io::Result<()> {
        let at = entry & OFFSET;
        if entry & COMPRESSED != 0 || !at.is_multiple_of(CLUSTER) || at == 0 || at >= self.length {
            return Err(wrong("a cluster is nowhere".to_owned()));
        }
        let there = usize::try_from((self.length - at).min(CLUSTER)).map_err(io::Error::other)?;
        into[there..].fill(0);
        self.file.read_exact_at(&mut into[..there], at)
    }
}

/// A qcow2 file that is written front to back.
struct Qcow2Writer {
    file: File,
    /// The first free cluster.
    next: u64,
}

impl Qcow2Writer {
    fn append(&mut self, bytes: &[u8]) -> io::Result<u64> {
        let at = self.next * CLUSTER;
        self.file.write_all_at(bytes, at)?;
        self.next += (bytes.len() as u64).div_ceil(CLUSTER);
        Ok(at)
    }

    /// Counts every cluster once, those of the counts too, and names where that is in the one table at cluster 1.
    fn count(&mut self) -> io::Result<()> {
        let per_block = CLUSTER / 2;
        let mut blocks = 0;
        while blocks * per_block < self.next + blocks {
            blocks += 1;
        }
        if blocks > CLUSTER / 8 {
            return Err(wrong("it is too large".to_owned()));
        }
        let all = self.next + blocks;
        let mut table = Vec::new();
        for block in 0..blocks {
            let counted = (all - block * per_block).min(per_block);
            let counts: Vec<u8> = (0..counted).flat_map(|_| 1u16.to_be_bytes()).collect();
            table.extend_from_slice(&self.append(&counts)?.to_be_bytes());
        }
        self.file.set_len(all * CLUSTER)?;
        self.file.write_all_at(&table, CLUSTER)
    }
}

/// Makes one disk of several, the topmost first.
pub(crate) fn merge_disks(run: &[PathBuf], into: &Path) -> io::Result<()> {
    let sources = run.iter().map(|path| Qcow2Reader::open(path)).collect::<io::Result<Vec<_>>>()?;
    let size = sources.first().map_or(0, |top| top.size);
    if sources.iter().any(|source| source.size > size) {
        return Err(wrong("a disk became smaller".to_owned()));
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(into)?;
    let entries = size.div_ceil(PER_ENTRY);
    let table_clusters = (entries * 8).div_ceil(CLUSTER);
    // The header, the table of counts, then this one.
    let mut target = Qcow2Writer { file, next: 2 + table_clusters };
    let mut first = Vec::new();
    for number in 0..usize::try_from(entries).map_err(io::Error::other)? {
        first.extend_from_slice(&merge_table(&sources, number, &mut target)?.to_be_bytes());
    }
    target.file.write_all_at(&first, 2 * CLUSTER)?;
    target.count()?;
    let entries = u32::try_from(entries).map_err(io::Error::other)?;
    target.file.write_all_at(&header(size, entries, 2), 0)
}

/// Merges what one entry of the first table stands for, and gives the entry.
fn merge_table(
    sources: &[Qcow2Reader],
    number: usize,
    target: &mut Qcow2Writer,
) -> io::Result<u64> {
    let mut tables = Vec::new();
    for source in sources {
        tables.extend(source.table(number)?.map(|table| (source, table)));
    }
    if tables.is_empty() {
        return Ok(0);
    }
    let mut merged = Vec::with_capacity(PER_TABLE * 8);
    let mut buffer = vec![0; usize::try_from(CLUSTER).map_err(io::Error::other)?];
    let mut any = false;
    for cluster in 0..PER_TABLE {
        let said = tables.iter().find_map(|(source, table)| {
            let entry = table.get(cluster).copied().filter(|entry| *entry & !OWN != 0)?;
            Some((source, entry))
        });
        let entry = match said {
            None => 0,
            Some((_, entry)) if entry & COMPRESSED == 0 && entry & ZEROS != 0 => ZEROS,
            Some((source, entry)) => {
                source.read(entry, &mut buffer)?;
                if buffer.iter().all(|byte| *byte == 0) {
                    ZEROS
                } else {
                    target.append(&buffer)? | OWN
                }
            }
        };
        any |= entry != 0;
        merged.extend_from_slice(&entry.to_be_bytes());
    }
    if any { Ok(target.append(&merged)? | OWN) } else { Ok(0) }
}

fn entry_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_be_bytes)
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::{Qcow2Reader, ZEROS, merge_disks};
    use crate::driver::microvm::disk::qcow2::{self, CLUSTER, create};

    const SIZE: u64 = 1100 << 20;

    fn run(program: &str, args: &[&str], path: &Path) -> Option<String> {
        let output = Command::new(program).args(args).arg(path).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{program} {args:?}: {output:?}");
        Some(text)
    }

    /// A disk with commands of `qemu-io` done to it, or nothing where there is none.
    fn disk(dir: &Path, name: &str, deeds: &[&str]) -> Option<PathBuf> {
        let path = dir.join(name);
        create(&path, SIZE).unwrap();
        for deed in deeds {
            run("qemu-io", &["-f", "qcow2", "-d", "unmap", "-c", deed], &path)?;
        }
        Some(path)
    }

    #[test]
    fn what_is_merged_is_what_was_seen() {
        let dir = tempfile::TempDir::with_prefix("keep-merge-").unwrap();
        let dir = dir.path();
        let made = || {
            let bottom = ["write -P 1 0 1M", "write -P 2 600M 200k", "write -P 3 1099M 1M"];
            let bottom = disk(dir, "bottom", &bottom)?;
            let middle = disk(dir, "middle", &["write -P 4 64k 64k", "write -z 128k 128k"])?;
            let top = disk(
                dir,
                "top",
                &["write -P 5 320k 4k", "write -P 0 384k 64k", "write -P 6 1000M 1M"],
            )?;
            Some([top, middle, bottom])
        };
        let Some(chain) = made() else {
            println!("SKIPPED what_is_merged_is_what_was_seen: no qemu-io");
            return;
        };
        for upto in [2, 3] {
            let merged = dir.join(format!("merged-{upto}"));
            merge_disks(&chain[..upto], &merged).unwrap();
            assert!(merge_disks(&chain[..upto], &merged).is_err(), "nothing is written over");
            run("qemu-img", &["check", "-q"], &merged).unwrap();
            assert_eq!(qcow2::size(&merged).unwrap(), SIZE);
            // Seen with what is below it, it is what the chain was.
            let see = |chain: &[PathBuf], name: &str| {
                let mut below: Option<PathBuf> = None;
                for (number, disk) in chain.iter().rev().enumerate() {
                    let copy = dir.join(format!("{name}-{number}"));
                    std::fs::copy(disk, &copy).unwrap();
                    if let Some(below) = &below {
                        let below = below.to_str().unwrap();
                        run(
                            "qemu-img",
                            &["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", below],
                            &copy,
                        );
                    }
                    below = Some(copy);
                }
                let (seen, raw) = (below.unwrap(), dir.join(format!("{name}.raw")));
                let args = ["convert", "-f", "qcow2", "-O", "raw", seen.to_str().unwrap()];
                run("qemu-img", &args, &raw);
                raw
            };
            let whole = see(&chain, &format!("chain-{upto}"));
            let mut short = vec![merged];
            short.extend_from_slice(&chain[upto..]);
            let short = see(&short, &format!("short-{upto}"));
            let (whole, short) =
                (std::fs::File::open(whole).unwrap(), std::fs::File::open(short).unwrap());
            assert_eq!(whole.metadata().unwrap().len(), SIZE);
            let (mut one, mut two) = (vec![0; 1 << 20], vec![0; 1 << 20]);
            for at in (0..SIZE).step_by(1 << 20) {
                whole.read_exact_at(&mut one, at).unwrap();
                short.read_exact_at(&mut two, at).unwrap();
                assert!(one == two, "{upto}: another at {at}");
            }
        }
        // Zeros hide what is below, and take no room.
        let source = Qcow2Reader::open(&dir.join("merged-2")).unwrap();
        assert_eq!(source.table(0).unwrap().unwrap()[2], ZEROS);
    }

    #[test]
    fn nothing_is_believed() {
        let dir = tempfile::TempDir::with_prefix("keep-merge-").unwrap();
        let table = 3 * CLUSTER;
        let far = ((1u64 << 63) | (1 << 40)).to_be_bytes();
        let second = ((1u64 << 63) | (4 * CLUSTER)).to_be_bytes();
        let packed = ((1u64 << 62) | (4 * CLUSTER)).to_be_bytes();
        for (name, writes) in [
            ("a table beyond the end", vec![(table, far)]),
            ("a table that is no cluster", vec![(table, (CLUSTER + 512).to_be_bytes())]),
            ("a cluster beyond the end", vec![(table, second), (4 * CLUSTER, far)]),
            ("a compressed cluster", vec![(table, second), (4 * CLUSTER, packed)]),
            ("a feature", vec![(72, 2u64.to_be_bytes())]),
            ("something below", vec![(8, 104u64.to_be_bytes())]),
            ("a first table beyond the end", vec![(40, (1u64 << 40).to_be_bytes())]),
            ("a size beyond all", vec![(24, u64::MAX.to_be_bytes())]),
            ("no disk", vec![(0, [7; 8])]),
        ] {
            let path = dir.path().join(name);
            create(&path, 1 << 30).unwrap();
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(5 * CLUSTER).unwrap();
            for (at, bytes) in writes {
                file.write_all_at(&bytes, at).unwrap();
            }
            let into = dir.path().join(format!("{name}, merged"));
            assert!(merge_disks(&[path], &into).is_err(), "{name}");
        }
    }
}
