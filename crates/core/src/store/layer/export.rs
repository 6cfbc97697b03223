//! A layer as an OCI layer: an uncompressed tar stream.
//!
//! Whiteouts become empty files `.wh.<name>`, opaque directories get a `.wh..wh..opq`, extended
//! attributes, long names, large numbers and fractions of seconds go into PAX records, and every name
//! but the first of a file is a hard link to it. Entries come in a fixed order, so the same layer
//! always has the same digest. Holes are written as zeros: an export can be far larger than the layer on its disk, and
//! nobody keeps a copy of one. The kernel's own `user.overlay.*`
//! attributes are left out, and those a sandbox set under such a name get their name back.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io::{self, Read, Write};
use std::rc::Rc;

use rustix::fs::{FileType, Statx};
use sha2::{Digest, Sha256};

use crate::model::{LayerId, Size};
use crate::store::path_text::path_text;
use crate::store::tree::{Dir, Opaque, TreeDir, Xattrs, file_type, join};
use crate::store::{Result, Store, StoreError, blocking};

/// What was exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The digest of the stream, `sha256:…`.
    pub diff_id: String,
    /// Its length.
    pub bytes: u64,
    /// What an OCI layer cannot say.
    pub left_out: LeftOut,
}

/// What an OCI layer cannot say and was left out: sockets, and files whose own name begins with `.wh.`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// How many names.
    pub count: u64,
    /// The first of them.
    pub paths: Vec<String>,
}

impl LeftOut {
    /// How many are named, of all layers of an export together.
    pub const NAMED: usize = 20;

    fn add(&mut self, path: &[u8]) {
        self.count += 1;
        if self.paths.len() < Self::NAMED {
            self.paths.push(path_text(path));
        }
    }

    /// Adds those of another layer.
    pub fn extend(&mut self, other: Self) {
        self.count += other.count;
        let room = Self::NAMED - self.paths.len();
        self.paths.extend(other.paths.into_iter().take(room));
    }
}

/// How long the stream of a layer may be. A sparse file can claim any size, and all of it would be read.
const LONGEST: u64 = 1 << 40;
/// How much memory the first names of files with several may take: enough for more than a million.
const MOST_LINKS: usize = 128 << 20;
/// What one of them takes besides its name.
const PER_LINK: usize = 64;

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
        blocking(move || store.export_into(&id, into)).await
    }

    /// The same, on a thread that may block.
    ///
    /// # Errors
    ///
    /// As [`export`](Self::export).
    pub fn export_into<W: Write>(&self, layer: &LayerId, into: W) -> Result<(W, Exported)> {
        self.sealed(layer)?;
        let root = TreeDir::root(&self.diff_dir(layer))?;
        let mut tar = Tar {
            into,
            hash: Sha256::new(),
            bytes: 0,
            longest: LONGEST,
            links: FirstNames { left: MOST_LINKS, ..FirstNames::default() },
            left_out: LeftOut::default(),
        };
        tar.tree(root)?;
        let diff_id = format!("sha256:{}", hex::encode(tar.hash.finalize()));
        Ok((tar.into, Exported { diff_id, bytes: tar.bytes, left_out: tar.left_out }))
    }
}

struct Tar<W> {
    into: W,
    hash: Sha256,
    bytes: u64,
    longest: u64,
    links: FirstNames,
    left_out: LeftOut,
}

/// The first name of each file with several, by inode.
#[derive(Default)]
struct FirstNames {
    known: HashMap<u64, FirstName>,
    /// How many more bytes they may take.
    left: usize,
    /// The directory of the newest: its files share the path.
    dir: Rc<[u8]>,
}

struct FirstName {
    dir: Rc<[u8]>,
    name: Box<[u8]>,
    /// How many names the file has that were not come upon.
    more: u32,
}

impl FirstNames {
    /// The first name of a file that was come upon before. It is forgotten with the last of its names.
    fn find(&mut self, stat: &Statx) -> Option<Vec<u8>> {
        let first = self.known.get_mut(&stat.stx_ino)?;
        let path = join(&first.dir, &first.name);
        first.more = first.more.saturating_sub(1);
        if first.more == 0 {
            self.left += first.name.len() + PER_LINK;
            self.known.remove(&stat.stx_ino);
        }
        Some(path)
    }

    /// Remembers one, if there is room.
    fn add(&mut self, stat: &Statx, dir: &[u8], name: &CStr) -> bool {
        let is_new = *self.dir != *dir;
        let cost = name.to_bytes().len() + PER_LINK + if is_new { dir.len() } else { 0 };
        let Some(left) = self.left.checked_sub(cost) else { return false };
        self.left = left;
        if is_new {
            self.dir = dir.into();
        }
        let (dir, name) = (Rc::clone(&self.dir), name.to_bytes().into());
        self.known.insert(stat.stx_ino, FirstName { dir, name, more: stat.stx_nlink - 1 });
        true
    }
}

/// The fields of a header.
struct Head<'a> {
    path: &'a [u8],
    kind: u8,
    link: &'a [u8],
    size: u64,
}

impl<W: Write> Tar<W> {
    fn tree(&mut self, root: TreeDir) -> Result<()> {
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
                    self.left_out.add(&dir.path_of(name));
                } else if file_type(&stat) == FileType::Directory {
                    below.push(dir.child(name));
                } else {
                    self.leaf(&dir, &path, name, &stat)?;
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

    fn leaf(&mut self, dir: &Dir, parent: &[u8], name: &CStr, stat: &Statx) -> Result<()> {
        let path = join(parent, name.to_bytes());
        let kind = match file_type(stat) {
            FileType::RegularFile => b'0',
            FileType::Symlink => b'2',
            FileType::CharacterDevice => b'3',
            FileType::BlockDevice => b'4',
            FileType::Fifo => b'6',
            // All names of it: none may be a link to what is not there.
            _ => {
                self.left_out.add(&path);
                return Ok(());
            }
        };
        if stat.stx_nlink > 1 {
            if let Some(first) = self.links.find(stat) {
                let head = Head { path: &path, kind: b'1', link: &first, size: 0 };
                return self.header(&head, stat, &Vec::new());
            }
            if !self.links.add(stat, parent, name) {
                let why = "it has too many files with several names".to_owned();
                return Err(StoreError::ExportTooLarge { why });
            }
        }
        let xattrs = dir.xattrs(name)?;
        let head = Head { path: &path, kind, link: b"", size: 0 };
        match kind {
            b'0' => {
                if self.longest.saturating_sub(self.bytes) < stat.stx_size {
                    return Err(StoreError::ExportTooLarge {
                        why: format!(
                            "with `{}`, which has a size of {}, a layer takes more than {}; the holes of a sparse file are \
                             written as zeros",
                            path_text(&path),
                            Size(stat.stx_size),
                            Size(self.longest),
                        ),
                    });
                }
                self.header(&Head { size: stat.stx_size, ..head }, stat, &xattrs)?;
                self.content(dir, name, stat.stx_size)
            }
            b'2' => {
                let target = dir.link_target(name)?;
                self.header(&Head { link: target.as_bytes(), ..head }, stat, &xattrs)
            }
            _ => self.header(&head, stat, &xattrs),
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
