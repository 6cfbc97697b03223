//! Empty qcow2 files: the overlays that are put on top of a disk before anything is written to it.
//!
//! Written by hand because it is sixty lines, and a program for it (`qemu-img`) would be one more thing to install and to
//! run whenever a machine starts. The name of what is below is not in the file: the chain is given to the hypervisor by
//! descriptors, and files are linked into memory layers under other names.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

pub(crate) const CLUSTER_BITS: u32 = 16;
pub(crate) const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Entries of a second table.
pub(crate) const PER_TABLE: usize = 1 << (CLUSTER_BITS - 3);
/// Bytes of a disk that one entry of the first table stands for.
pub(crate) const PER_ENTRY: u64 = CLUSTER * (CLUSTER / 8);
/// The header, the table of tables of reference counts, and the one such table that there is.
const BEFORE_TABLE: u64 = 3;

/// Makes an empty one of `size` bytes.
pub(crate) fn create(path: &Path, size: u64) -> io::Result<()> {
    let entries = size.div_ceil(PER_ENTRY);
    let clusters = BEFORE_TABLE + (entries * 8).div_ceil(CLUSTER);
    // One table counts references to this many clusters.
    if clusters > CLUSTER / 2 || !size.is_multiple_of(512) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(clusters * CLUSTER)?;
    let entries = u32::try_from(entries).unwrap_or(u32::MAX);
    file.write_all_at(&header(size, entries, BEFORE_TABLE), 0)?;
    file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER)?;
    let counts: Vec<u8> = (0..clusters).flat_map(|_| 1u16.to_be_bytes()).collect();
    file.write_all_at(&counts, 2 * CLUSTER)
}

/// Whether nothing was ever written to a disk that [`create`] made.
pub(crate) fn is_empty(path: &Path) -> io::Result<bool> {
    let file = std::fs::File::open(path)?;
    let mut head = [0; 72];
    file.read_exact_at(&mut head, 0)?;
    let word = |at: usize| head[at..at + 8].try_into().map_or(0, u64::from_be_bytes);
    let entries = u64::from(head[36..40].try_into().map_or(0, u32::from_be_bytes));
    // The hypervisor can write to it: a table that is not the one made here was written by it.
    if entries * 8 > file.metadata()?.len() {
        return Ok(false);
    }
    let mut table = vec![0; usize::try_from(entries * 8).map_err(io::Error::other)?];
    file.read_exact_at(&mut table, word(40))?;
    Ok(table.iter().all(|byte| *byte == 0))
}

/// Whether it never came to stable storage: the first flush of its machine would have brought all of it there.
pub(crate) fn is_lost(path: &Path) -> io::Result<bool> {
    let file = std::fs::File::open(path)?;
    let mut head = Vec::new();
    file.take(112).read_to_end(&mut head)?;
    Ok(head.iter().all(|byte| *byte == 0))
}

/// How large the disk is.
pub(crate) fn size(path: &Path) -> io::Result<u64> {
    let mut head = [0; 32];
    std::fs::File::open(path)?.read_exact_at(&mut head, 0)?;
    if !head.starts_with(b"QFI\xfb") {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no qcow2 file"));
    }
    Ok(head[24..].try_into().map_or(0, u64::from_be_bytes))
}

/// Version 3, no features, no snapshots, nothing below. The table of counts is at cluster 1, the first table at `table`.
pub(crate) fn header(size: u64, entries: u32, table: u64) -> [u8; 112] {
    let mut header = [0; 112];
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        header[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    put(b"QFI\xfb");
    put(&3u32.to_be_bytes());
    put(&[0; 12]); // the name of what is below: where, how long
    put(&CLUSTER_BITS.to_be_bytes());
    put(&size.to_be_bytes());
    put(&[0; 4]); // not encrypted
    put(&entries.to_be_bytes());
    put(&(table * CLUSTER).to_be_bytes());
    put(&CLUSTER.to_be_bytes());
    put(&1u32.to_be_bytes());
    put(&[0; 12]); // snapshots: how many, where
    put(&[0; 24]); // features
    put(&4u32.to_be_bytes()); // reference counts of 1 << 4 bits
    put(&104u32.to_be_bytes()); // the header's length; eight zero bytes end what may follow
    header
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{create, is_empty};

    #[test]
    fn the_hypervisor_s_own_tools_find_nothing_wrong_with_it() {
        let dir = tempfile::TempDir::with_prefix("keep-qcow2-").unwrap();
        for size in [1 << 20, (10 << 30) + 512, 256 << 30, 16 << 40] {
            let path = dir.path().join("disk.qcow2");
            create(&path, size).unwrap();
            assert!(is_empty(&path).unwrap());
            assert_eq!(super::size(&path).unwrap(), size);
            assert!(create(&path, size).is_err(), "what is there is not written over");
            let checked = Command::new("qemu-img").args(["check", "-q", "--"]).arg(&path).output();
            let Ok(checked) = checked else {
                println!(
                    "SKIPPED the_hypervisor_s_own_tools_find_nothing_wrong_with_it: no qemu-img"
                );
                return;
            };
            assert!(checked.status.success(), "{size}: {checked:?}");
            let told = Command::new("qemu-img").args(["info", "--output=json"]).arg(&path).output();
            let told: serde_json::Value = serde_json::from_slice(&told.unwrap().stdout).unwrap();
            assert_eq!(told["virtual-size"], size);
            assert_eq!(told["format"], "qcow2");
            let written = Command::new("qemu-io")
                .args(["-f", "qcow2", "-c", "write -P 7 4096 4096"])
                .arg(&path)
                .output();
            if written.is_ok_and(|written| written.status.success()) {
                assert!(!is_empty(&path).unwrap());
            }
            std::fs::remove_file(&path).unwrap();
        }
        assert!(create(&dir.path().join("odd"), 1000).is_err());
    }
}
