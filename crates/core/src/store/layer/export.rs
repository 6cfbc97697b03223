//! A layer as an OCI layer: an uncompressed tar stream.
//!
//! Whiteouts become empty files `.wh.<name>`, opaque directories get a `.wh..wh..opq`, extended
//! attributes, long names, large numbers and fractions of seconds go into PAX records, and every name
//! but the first of a file is a hard link to it. Entries come in a fixed order, so the same layer
//! always has the same digest. Holes are written as zeros. The kernel's own `user.overlay.*`
//! attributes are left out, and those a sandbox set under such a name get their name back.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io::{self, Read, Write};

use rustix::fs::{FileType, Statx};
use sha2::{Digest, Sha256};

use crate::model::LayerId;
use crate::store::path_text::path_text;
use crate::store::tree::{Dir, Opaque, Place, Xattrs, file_type, join};
use crate::store::{Result, Store, StoreError, blocking};

/// What was exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The digest of the stream, `sha256:…`.
    pub diff_id: String,
    /// Its length.
    pub bytes: u64,
    /// What an OCI layer cannot say and was left out: sockets, and files whose own name begins with
    /// `.wh.`.
    pub left_out: Vec<String>,
}

impl Store {
    /// Writes a sealed layer to `into` as an OCI layer, and gives `into` back.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError`] when the layer is not sealed, cannot be read, or `into` fails.
    pub async fn export<W>(&self, layer: &LayerId, into: W) -> Result<(W, Exported)>
    where
        W: Write + Send + 'static,
    {
        let (store, id) = (self.clone(), layer.clone());
        blocking(move || {
            store.sealed(&id)?;
            let root = Place::root(&store.diff_dir(&id))?;
            let mut tar = Tar {
                into,
                hash: Sha256::new(),
                bytes: 0,
                first: HashMap::new(),
                left_out: Vec::new(),
            };
            tar.tree(root)?;
            let diff_id = format!("sha256:{}", hex::encode(tar.hash.finalize()));
            Ok((tar.into, Exported { diff_id, bytes: tar.bytes, left_out: tar.left_out }))
        })
        .await
    }
}

struct Tar<W> {
    into: W,
    hash: Sha256,
    bytes: u64,
    /// The first name of each file with several, by inode.
    first: HashMap<u64, Vec<u8>>,
    left_out: Vec<String>,
}

/// What stands in a header.
struct Head<'a> {
    path: &'a [u8],
    kind: u8,
    link: &'a [u8],
    size: u64,
}

impl<W: Write> Tar<W> {
    fn tree(&mut self, root: Place) -> Result<()> {
        let mut places = vec![root];
        while let Some(place) = places.pop() {
            let dir = place.open()?;
            let path = place.path();
            self.directory(&dir, &path)?;
            let opaque = dir.opaque()?;
            if opaque == Opaque::Yes {
                self.empty(&dir, &join(&path, b".wh..wh..opq"))?;
            }
            let mut below = Vec::new();
            for entry in dir.entries()? {
                let stat = dir.stat(&entry.name)?;
                let name = entry.name.as_c_str();
                if dir.is_whiteout(name, &stat, opaque)? {
                    let hidden = [b".wh.", name.to_bytes()].concat();
                    self.empty(&dir, &join(&path, &hidden))?;
                } else if name.to_bytes().starts_with(b".wh.") {
                    self.left_out.push(path_text(&dir.path_of(name)));
                } else if file_type(&stat) == FileType::Directory {
                    below.push(dir.child(name));
                } else {
                    self.leaf(&dir, name, &stat)?;
                }
            }
            places.extend(below.into_iter().rev());
        }
        self.write(&[0; 1024])
    }

    fn directory(&mut self, dir: &Dir, path: &[u8]) -> Result<()> {
        let shown = if path.is_empty() { b"./".to_vec() } else { [path, b"/"].concat() };
        let head = Head { path: &shown, kind: b'5', link: b"", size: 0 };
        self.header(&head, &dir.own_stat()?, &dir.own_xattrs()?)
    }

    /// Writes an empty file that says something about `dir`.
    fn empty(&mut self, dir: &Dir, path: &[u8]) -> Result<()> {
        let mut stat = dir.own_stat()?;
        stat.stx_mode = 0o600;
        (stat.stx_uid, stat.stx_gid) = (0, 0);
        self.header(&Head { path, kind: b'0', link: b"", size: 0 }, &stat, &Vec::new())
    }

    fn leaf(&mut self, dir: &Dir, name: &CStr, stat: &Statx) -> Result<()> {
        let path = dir.path_of(name);
        if stat.stx_nlink > 1 {
            if let Some(first) = self.first.get(&stat.stx_ino).cloned() {
                let head = Head { path: &path, kind: b'1', link: &first, size: 0 };
                return self.header(&head, stat, &Vec::new());
            }
            self.first.insert(stat.stx_ino, path.clone());
        }
        let xattrs = dir.xattrs(name)?;
        let plain = |kind| Head { path: &path, kind, link: b"", size: 0 };
        match file_type(stat) {
            FileType::RegularFile => {
                self.header(&Head { size: stat.stx_size, ..plain(b'0') }, stat, &xattrs)?;
                self.content(dir, name, stat.stx_size)
            }
            FileType::Symlink => {
                let target = dir.link_target(name)?;
                self.header(&Head { link: target.as_bytes(), ..plain(b'2') }, stat, &xattrs)
            }
            FileType::CharacterDevice => self.header(&plain(b'3'), stat, &xattrs),
            FileType::BlockDevice => self.header(&plain(b'4'), stat, &xattrs),
            FileType::Fifo => self.header(&plain(b'6'), stat, &xattrs),
            _ => {
                self.left_out.push(path_text(&path));
                Ok(())
            }
        }
    }

    fn content(&mut self, dir: &Dir, name: &CStr, size: u64) -> Result<()> {
        let mut file = std::fs::File::from(dir.open_file(name)?);
        let mut buffer = vec![0u8; 128 << 10];
        let mut left = size;
        while left > 0 {
            let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let read = file.read(&mut buffer[..want]);
            let got = read.map_err(|error| {
                let errno = rustix::io::Errno::from_io_error(&error);
                dir.failure("read", name, errno.unwrap_or(rustix::io::Errno::IO))
            })?;
            if got == 0 {
                return Err(dir.failure("read all of", name, rustix::io::Errno::IO));
            }
            self.write(&buffer[..got])?;
            left -= got as u64;
        }
        self.pad(size)
    }

    fn header(&mut self, head: &Head<'_>, stat: &Statx, xattrs: &Xattrs) -> Result<()> {
        let records = pax_records(head, stat, xattrs);
        if !records.is_empty() {
            let size = records.len() as u64;
            let mut block = block(&Head { path: b"pax", kind: b'x', link: b"", size }, None);
            seal_block(&mut block);
            self.write(&block)?;
            self.write(&records)?;
            self.pad(size)?;
        }
        let mut block = block(head, Some(stat));
        seal_block(&mut block);
        self.write(&block)
    }

    fn pad(&mut self, written: u64) -> Result<()> {
        let rest = usize::try_from(written % 512).unwrap_or(0);
        if rest == 0 { Ok(()) } else { self.write(&[0u8; 512][rest..]) }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.into.write_all(bytes).map_err(|source: io::Error| StoreError::Io {
            action: "write the export to",
            path: "its destination".into(),
            source,
        })
    }
}

/// A header block without its checksum. What does not fit is cut; PAX records say it in full.
fn block(head: &Head<'_>, stat: Option<&Statx>) -> [u8; 512] {
    let mut block = [0u8; 512];
    put(&mut block[0..100], head.path);
    let field = |value: u64, digits: usize| format!("{value:0digits$o}");
    let fit = |value: u64, digits: usize| {
        if value < 1 << (3 * digits) { field(value, digits) } else { field(0, digits) }
    };
    let (mode, uid, gid, seconds) = match stat {
        Some(stat) => {
            let seconds = u64::try_from(stat.stx_mtime.tv_sec).unwrap_or(0);
            (stat.stx_mode & 0o7777, stat.stx_uid, stat.stx_gid, seconds)
        }
        None => (0o644, 0, 0, 0),
    };
    put(&mut block[100..107], field(u64::from(mode), 7).as_bytes());
    put(&mut block[108..115], fit(u64::from(uid), 7).as_bytes());
    put(&mut block[116..123], fit(u64::from(gid), 7).as_bytes());
    put(&mut block[124..135], fit(head.size, 11).as_bytes());
    put(&mut block[136..147], fit(seconds, 11).as_bytes());
    block[156] = head.kind;
    put(&mut block[157..257], head.link);
    put(&mut block[257..265], b"ustar\x0000");
    if let Some(stat) = stat
        && matches!(head.kind, b'3' | b'4')
    {
        put(&mut block[329..336], field(u64::from(stat.stx_rdev_major), 7).as_bytes());
        put(&mut block[337..344], field(u64::from(stat.stx_rdev_minor), 7).as_bytes());
    }
    block
}

fn seal_block(block: &mut [u8; 512]) {
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    put(&mut block[148..154], format!("{sum:06o}").as_bytes());
    block[154] = 0;
}

fn put(field: &mut [u8], value: &[u8]) {
    let length = value.len().min(field.len());
    field[..length].copy_from_slice(&value[..length]);
}

/// What the header block has no room for.
fn pax_records(head: &Head<'_>, stat: &Statx, xattrs: &Xattrs) -> Vec<u8> {
    let mut records = Vec::new();
    if head.path.len() > 100 {
        record(&mut records, b"path", head.path);
    }
    if head.link.len() > 100 {
        record(&mut records, b"linkpath", head.link);
    }
    if head.size >= 1 << 33 {
        record(&mut records, b"size", head.size.to_string().as_bytes());
    }
    for (key, id) in [(&b"uid"[..], stat.stx_uid), (b"gid", stat.stx_gid)] {
        if id >= 1 << 21 {
            record(&mut records, key, id.to_string().as_bytes());
        }
    }
    let modified = stat.stx_mtime;
    if modified.tv_nsec != 0 || !(0..1 << 33).contains(&modified.tv_sec) {
        record(&mut records, b"mtime", pax_time(modified.tv_sec, modified.tv_nsec).as_bytes());
    }
    for (key, value) in xattrs {
        if let Some(key) = exported_key(key) {
            record(&mut records, &[b"SCHILY.xattr.", key.as_slice()].concat(), value);
        }
    }
    records
}

/// Seconds with a fraction; before 1970 both count downwards.
fn pax_time(seconds: i64, nanos: u32) -> String {
    if seconds < 0 && nanos > 0 {
        let whole = -(seconds + 1);
        return format!("-{whole}.{:09}", 1_000_000_000 - nanos);
    }
    format!("{seconds}.{nanos:09}")
}

/// The name an attribute has inside the sandbox; `None` for the kernel's own.
fn exported_key(key: &CStr) -> Option<Vec<u8>> {
    match key.to_bytes().strip_prefix(b"user.overlay.") {
        None => Some(key.to_bytes().to_vec()),
        Some(rest) => {
            let own = rest.strip_prefix(b"overlay.")?;
            Some([b"user.overlay.", own].concat())
        }
    }
}

/// Appends `length key=value\n`, where the length counts its own digits.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest;
    loop {
        let whole = rest + length.to_string().len();
        if whole == length {
            break;
        }
        length = whole;
    }
    records.extend_from_slice(format!("{length} ").as_bytes());
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::{exported_key, pax_time, record};

    #[test]
    fn records_count_their_own_length() {
        for size in [0, 1, 85, 86, 87, 88, 89, 90, 985, 986, 987, 988, 989, 990] {
            let mut records = Vec::new();
            record(&mut records, b"key", &vec![b'x'; size]);
            let text = String::from_utf8(records).expect("text");
            let (length, _) = text.split_once(' ').expect("a space");
            assert_eq!(length.parse(), Ok(text.len()), "{size}");
        }
    }

    #[test]
    fn times_before_the_epoch() {
        assert_eq!(pax_time(5, 0), "5.000000000");
        assert_eq!(pax_time(-1, 750_000_000), "-0.250000000");
        assert_eq!(pax_time(-2, 0), "-2.000000000");
    }

    #[test]
    fn the_kernels_attributes_stay_here() {
        assert_eq!(exported_key(c"user.overlay.opaque"), None);
        let own = exported_key(c"user.overlay.overlay.opaque");
        assert_eq!(own.as_deref(), Some(&b"user.overlay.opaque"[..]));
        assert_eq!(exported_key(c"user.x").as_deref(), Some(&b"user.x"[..]));
    }
}
