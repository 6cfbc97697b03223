//! Stamps: whether an index file belongs to the data directory beside it, and to its present state.
//!
//! The index is not synced, and people restore copies of it. An older index would hide sessions and
//! commands that are on disk. So each opening draws an *epoch*, a random number that is kept in the
//! index and in `index.stamp` beside it. An index is used only if all of this holds:
//!
//! - both name the same epoch, so it was not exchanged for a copy from another time;
//! - it is the same file, by inode, so the directory was not copied while a daemon wrote to it;
//! - the host has not been booted since, or the daemon closed and synced it: a killed process loses
//!   nothing of what it wrote to a file, a power cut may.
//!
//! A new index gets its epoch when it has been filled: a daemon that dies before fills it again.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// What `index.stamp` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    pub(super) epoch: String,
    /// Which boot of the host it was written in.
    boot: String,
    /// The inode of the index.
    inode: u64,
    /// Whether the index was closed and synced since.
    clean: bool,
}

impl Stamp {
    /// One for the opening that is under way.
    pub(super) fn draw(index: &Path) -> io::Result<Self> {
        let mut random = [0u8; 16];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let epoch = hex::encode(random);
        Ok(Self { epoch, boot: boot(), inode: fs::metadata(index)?.ino(), clean: false })
    }

    /// The same, once the index is closed.
    pub(super) fn closed(mut self) -> Self {
        self.clean = true;
        self
    }

    /// Why an index that carries `epoch` cannot be used.
    pub(super) fn refuses(index: &Path, epoch: Option<&str>) -> Option<&'static str> {
        let stamp = fs::read(place(index)).ok();
        let stamp = stamp.and_then(|bytes| serde_json::from_slice::<Self>(&bytes).ok());
        let Some(stamp) = stamp else { return Some("nothing says that it is of this directory") };
        if Some(stamp.epoch.as_str()) != epoch {
            return Some("it is from another time, or was not filled to its end");
        }
        if fs::metadata(index).is_ok_and(|found| found.ino() != stamp.inode) {
            return Some("it is a copy");
        }
        if !stamp.clean && (stamp.boot.is_empty() || stamp.boot != boot()) {
            return Some("it was open when the host went down");
        }
        None
    }

    /// Writes it down for good.
    pub(super) fn write(&self, index: &Path) -> io::Result<()> {
        let path = place(index);
        let draft = path.with_extension("stamp.new");
        let mut open = File::options();
        let mut file = open.write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&draft, &path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    }
}

fn place(index: &Path) -> PathBuf {
    index.with_extension("stamp")
}

fn boot() -> String {
    let read = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    read.map(|text| text.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Stamp, place};

    #[test]
    fn only_the_index_of_this_time_and_place_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let index = dir.path().join("index.sqlite");
        fs::write(&index, "x").unwrap();
        assert!(Stamp::refuses(&index, Some("1")).is_some(), "there is no stamp");
        let stamp = Stamp::draw(&index).unwrap();
        stamp.write(&index).unwrap();
        assert_eq!(Stamp::refuses(&index, Some(&stamp.epoch)), None);
        assert!(Stamp::refuses(&index, Some("1")).is_some(), "another epoch");
        assert!(Stamp::refuses(&index, None).is_some(), "none");
        fs::copy(&index, dir.path().join("copy")).unwrap();
        fs::rename(dir.path().join("copy"), &index).unwrap();
        assert!(Stamp::refuses(&index, Some(&stamp.epoch)).is_some(), "a copy");
        let stamp = Stamp { boot: "another".to_owned(), ..Stamp::draw(&index).unwrap() };
        stamp.write(&index).unwrap();
        assert!(Stamp::refuses(&index, Some(&stamp.epoch)).is_some(), "a power cut");
        let stamp = stamp.closed();
        stamp.write(&index).unwrap();
        assert_eq!(Stamp::refuses(&index, Some(&stamp.epoch)), None, "it was closed before");
        fs::write(place(&index), "garbage").unwrap();
        assert!(Stamp::refuses(&index, Some(&stamp.epoch)).is_some());
    }
}
