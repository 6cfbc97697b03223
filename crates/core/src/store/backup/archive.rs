//! A directory as one stream, with all that makes a difference: names of any bytes, owners, modes, times, attributes, links,
//! devices, holes.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::{BufRead, Read, Write};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Statx};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::store::path_text::{path_bytes, path_text};
use crate::store::tree::{Dir, TreeDir, Xattrs, file_type, join};
use crate::store::{Result, StoreError};

/// The first line of a stream.
const MAGIC: &[u8] = b"SANDKEEP-TREE-1\n";
/// How much content is read at a time.
const PIECE: usize = 64 << 10;
/// The longest header line.
const LONGEST_HEADER: u64 = 16 << 20;

/// A name of the tree. The content of a file follows.
#[derive(Debug, Serialize, Deserialize)]
struct PackedName {
    /// Its path, printable; empty for the directory itself.
    path: String,
    kind: PackedType,
    /// File type and mode.
    mode: u16,
    uid: u32,
    gid: u32,
    /// When it was modified: seconds and nanoseconds.
    mtime: (i64, u32),
    #[serde(default, skip_serializing_if = "is_zero")]
    size: u64,
    /// Of a symbolic link: what it says. Of a further name of a file: its first name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    target: String,
    /// Of a device.
    #[serde(default, skip_serializing_if = "is_no_device")]
    device: (u32, u32),
    /// Extended attributes: name and value, in hex.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    xattrs: Vec<(String, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PackedType {
    Directory,
    File,
    Symlink,
    /// A further name of a file.
    Link,
    /// A device, a pipe or a socket.
    Node,
    /// After the last name.
    End,
}

impl PackedType {
    fn is_of(self, file: FileType) -> bool {
        let kind = match file {
            FileType::Directory => Self::Directory,
            FileType::RegularFile => Self::File,
            FileType::Symlink => Self::Symlink,
            _ => Self::Node,
        };
        self == kind
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(size: &u64) -> bool {
    *size == 0
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_no_device(device: &(u32, u32)) -> bool {
    *device == (0, 0)
}

impl PackedName {
    fn new(path: &[u8], kind: PackedType, stat: &Statx, xattrs: &Xattrs) -> Self {
        let hex =
            |(key, value): &(CString, Vec<u8>)| (hex::encode(key.to_bytes()), hex::encode(value));
        Self {
            path: path_text(path).to_string(),
            kind,
            mode: stat.stx_mode,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            size: 0,
            target: String::new(),
            device: (0, 0),
            xattrs: xattrs.iter().map(hex).collect(),
        }
    }

    /// `like` with this entry's values.
    fn stat(&self, like: &Statx) -> Statx {
        let mut stat = *like;
        (stat.stx_mode, stat.stx_uid, stat.stx_gid) = (self.mode, self.uid, self.gid);
        (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec) = self.mtime;
        stat.stx_atime = stat.stx_mtime;
        stat
    }

    fn xattrs(&self) -> Option<Xattrs> {
        let one = |(key, value): &(String, String)| {
            Some((CString::new(hex::decode(key).ok()?).ok()?, hex::decode(value).ok()?))
        };
        self.xattrs.iter().map(one).collect()
    }
}

/// Writes a directory and everything in it.
pub(super) fn pack(root: &Path, into: &mut impl Write) -> Result<()> {
    let mut packer = Packer { into, links: HashMap::new() };
    packer.write(MAGIC)?;
    let mut places = vec![TreeDir::root(root)?];
    while let Some(place) = places.pop() {
        let dir = place.open()?;
        let path = place.path();
        packer.header(&PackedName::new(
            &path,
            PackedType::Directory,
            &dir.own_stat()?,
            &dir.own_xattrs()?,
        ))?;
        let mut below = Vec::new();
        for entry in dir.entries()? {
            let stat = dir.stat(&entry.name)?;
            if file_type(&stat) == FileType::Directory {
                below.push(dir.child(&entry.name));
            } else {
                packer.leaf(&dir, &join(&path, entry.name.to_bytes()), &entry.name, &stat)?;
            }
        }
        places.extend(below.into_iter().rev());
    }
    let end = br#"{"path":"","kind":"end","mode":0,"uid":0,"gid":0,"mtime":[0,0]}"#;
    packer.write(end)?;
    packer.write(b"\n")
}

struct Packer<'a, W> {
    into: &'a mut W,
    /// The first path of each file with several names.
    links: HashMap<(u32, u32, u64), Vec<u8>>,
}

impl<W: Write> Packer<'_, W> {
    fn leaf(&mut self, dir: &Dir, path: &[u8], name: &CString, stat: &Statx) -> Result<()> {
        if stat.stx_nlink > 1 {
            let file = (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
            if let Some(first) = self.links.get(&file) {
                let mut header = PackedName::new(path, PackedType::Link, stat, &Vec::new());
                header.target = path_text(first).to_string();
                return self.header(&header);
            }
            self.links.insert(file, path.to_vec());
        }
        let xattrs = dir.xattrs(name)?;
        match file_type(stat) {
            FileType::RegularFile => {
                let mut header = PackedName::new(path, PackedType::File, stat, &xattrs);
                header.size = stat.stx_size;
                self.header(&header)?;
                self.content(dir, name, stat.stx_size)
            }
            FileType::Symlink => {
                let mut header = PackedName::new(path, PackedType::Symlink, stat, &xattrs);
                header.target = path_text(dir.link_target(name)?.to_bytes()).to_string();
                self.header(&header)
            }
            _ => {
                let mut header = PackedName::new(path, PackedType::Node, stat, &xattrs);
                header.device = (stat.stx_rdev_major, stat.stx_rdev_minor);
                self.header(&header)
            }
        }
    }

    /// The parts of a file that are not holes, each after its offset and length; after the last one the file's size and 0.
    fn content(&mut self, dir: &Dir, name: &CString, size: u64) -> Result<()> {
        let file = std::fs::File::from(dir.open_file(name)?);
        let failed = |error| dir.failure("read", name, error);
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        while let Some((start, end)) = next_data(&file, at, size).map_err(failed)? {
            self.extent(start, end - start)?;
            at = start;
            while at < end {
                let want = piece.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
                let short = |_| dir.failure("read all of", name, Errno::IO);
                file.read_exact_at(&mut piece[..want], at).map_err(short)?;
                self.write(&piece[..want])?;
                at += want as u64;
            }
        }
        self.extent(size, 0)
    }

    fn extent(&mut self, offset: u64, length: u64) -> Result<()> {
        self.write(&offset.to_le_bytes())?;
        self.write(&length.to_le_bytes())
    }

    fn header(&mut self, header: &PackedName) -> Result<()> {
        let mut line = serde_json::to_vec(header).map_err(|error| broken(&error.to_string()))?;
        line.push(b'\n');
        self.write(&line)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.into.write_all(bytes).map_err(|source| StoreError::Io {
            action: "write to",
            path: "the backup".into(),
            source,
        })
    }
}

/// Makes a directory, which must not be there, out of a stream.
pub(super) fn unpack(from: &mut impl BufRead, root: &Path) -> Result<()> {
    let mut magic = [0; MAGIC.len()];
    from.read_exact(&mut magic).map_err(|error| broken(&error.to_string()))?;
    if magic != MAGIC {
        return Err(broken("it is no archive of a directory, or one of a later version"));
    }
    std::fs::create_dir(root).map_err(crate::store::io_error("create", root))?;
    let top = TreeDir::root(root)?;
    let like = top.open()?.own_stat()?;
    let mut unpacker = ArchiveUnpacker { from, top, like, last: None, directories: Vec::new() };
    while unpacker.entry()? {}
    // After everything in them: the inner ones first.
    for (place, stat, xattrs) in unpacker.directories.into_iter().rev() {
        place.open()?.finish(&stat, &xattrs)?;
    }
    Ok(())
}

struct ArchiveUnpacker<'a, R> {
    from: &'a mut R,
    top: TreeDir,
    /// What attributes are filled into.
    like: Statx,
    /// The directory that the last name was in.
    last: Option<(Vec<u8>, Dir)>,
    directories: Vec<(TreeDir, Statx, Xattrs)>,
}

impl<R: BufRead> ArchiveUnpacker<'_, R> {
    /// Makes the next name; false at the end.
    fn entry(&mut self) -> Result<bool> {
        let mut line = Vec::new();
        let mut head = Read::by_ref(self.from).take(LONGEST_HEADER);
        head.read_until(b'\n', &mut line).map_err(|error| broken(&error.to_string()))?;
        if line.last() != Some(&b'\n') {
            return Err(broken("it ends too early, or a line is too long"));
        }
        let header: PackedName =
            serde_json::from_slice(&line).map_err(|error| broken(&error.to_string()))?;
        if header.kind == PackedType::End {
            return Ok(false);
        }
        let path = path_bytes(&header.path).ok_or_else(|| broken("a path cannot be read"))?;
        let (stat, xattrs) = (header.stat(&self.like), header.xattrs());
        // Attributes are set by what the mode says it is, and those of a link would be set where it leads.
        if header.kind != PackedType::Link && !header.kind.is_of(file_type(&stat)) {
            return Err(broken("a name is said to be two things"));
        }
        let xattrs = xattrs.ok_or_else(|| broken("attributes cannot be read"))?;
        if path.is_empty() {
            self.directories.push((self.top.clone(), stat, xattrs));
            return Ok(true);
        }
        let (dir, name) = self.parent(&path)?;
        match header.kind {
            PackedType::Directory => {
                let place = dir.make_dir(&name)?;
                self.directories.push((place, stat, xattrs));
                return Ok(true);
            }
            PackedType::File => self.content(&dir, &name, header.size)?,
            PackedType::Symlink => {
                let target = CString::new(path_bytes(&header.target).unwrap_or_default());
                let target = target.map_err(|_| broken("a link cannot be read"))?;
                rustix::fs::symlinkat(&target, dir.fd(), &name)
                    .map_err(|error| dir.failure("create", &name, error))?;
            }
            PackedType::Link => {
                let first =
                    path_bytes(&header.target).ok_or_else(|| broken("a link cannot be read"))?;
                let (from, old) = split(&first)?;
                let from = self.top.descend(from)?.open()?;
                let linked = dir.link_from(&name, &from, &old);
                linked.map_err(|error| dir.failure("link", &name, error))?;
                return Ok(true);
            }
            PackedType::Node => {
                let kind = FileType::from_raw_mode(u32::from(header.mode));
                let device = rustix::fs::makedev(header.device.0, header.device.1);
                rustix::fs::mknodat(dir.fd(), &name, kind, Mode::empty(), device)
                    .map_err(|error| dir.failure("create", &name, error))?;
            }
            PackedType::End => {}
        }
        dir.set_attributes(&name, &stat, &xattrs)?;
        Ok(true)
    }

    /// The directory of a path, which was made before, and the name in it.
    fn parent(&mut self, path: &[u8]) -> Result<(Dir, CString)> {
        let (parent, name) = split(path)?;
        if let Some((last, dir)) = &self.last
            && last == parent
        {
            return Ok((dir.clone(), name));
        }
        // Links are not followed on the way.
        let dir = match parent.is_empty() {
            true => self.top.open()?,
            false => self.top.descend(parent)?.open()?,
        };
        self.last = Some((parent.to_vec(), dir.clone()));
        Ok((dir, name))
    }

    fn content(&mut self, dir: &Dir, name: &CString, size: u64) -> Result<()> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(dir.fd(), name, flags, Mode::RUSR | Mode::WUSR);
        let made = made.map_err(|error| dir.failure("create", name, error))?;
        let file = std::fs::File::from(made);
        let failed = |error: std::io::Error| {
            let errno = Errno::from_io_error(&error);
            dir.failure("write", name, errno.unwrap_or(Errno::IO))
        };
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        loop {
            let (start, length) = (self.number()?, self.number()?);
            let end = start.checked_add(length).filter(|end| start >= at && *end <= size);
            let end = end.ok_or_else(|| broken("a part of a file is outside of it"))?;
            if length == 0 {
                break;
            }
            at = start;
            while at < end {
                let want = piece.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
                self.read(&mut piece[..want])?;
                file.write_all_at(&piece[..want], at).map_err(failed)?;
                at += want as u64;
            }
        }
        file.set_len(size).map_err(failed)
    }

    fn number(&mut self) -> Result<u64> {
        let mut bytes = [0; 8];
        self.read(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn read(&mut self, into: &mut [u8]) -> Result<()> {
        self.from.read_exact(into).map_err(|error| broken(&error.to_string()))
    }
}

/// The next part of a file from `at` on that is not a hole.
fn next_data(file: &std::fs::File, at: u64, size: u64) -> Result<Option<(u64, u64)>, Errno> {
    if at >= size {
        return Ok(None);
    }
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) if start < size => {
            let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
            Ok(Some((start, end.min(size))))
        }
        // A hole up to the end.
        Ok(_) | Err(Errno::NXIO) => Ok(None),
        // A filesystem that does not report holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some((at, size))),
        Err(error) => Err(error),
    }
}

/// A path without its last name, and that name.
fn split(path: &[u8]) -> Result<(&[u8], CString)> {
    let bad = || broken("a path leads out of the archive");
    let fits = |name: &[u8]| !name.is_empty() && name != b"." && name != b"..";
    if !path.split(|byte| *byte == b'/').all(fits) {
        return Err(bad());
    }
    let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&b""[..], path),
    };
    Ok((parent, CString::new(name).map_err(|_| bad())?))
}

fn broken(reason: &str) -> StoreError {
    StoreError::Damaged { path: "an archive of the backup".into(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};

    use super::{pack, split, unpack};

    #[test]
    fn a_directory_is_the_same_after_it() {
        let home = tempfile::tempdir().unwrap();
        let (from, to) = (home.path().join("from"), home.path().join("to"));
        fs::create_dir_all(from.join("deep/er")).unwrap();
        fs::write(from.join("deep/file"), "content").unwrap();
        fs::hard_link(from.join("deep/file"), from.join("linked")).unwrap();
        symlink("deep/file", from.join("symlink")).unwrap();
        fs::write(from.join("odd\nname %41"), "").unwrap();
        fs::set_permissions(from.join("deep"), fs::Permissions::from_mode(0o1751)).unwrap();
        let sparse = fs::File::create(from.join("sparse")).unwrap();
        // A terabyte of zeros is never read.
        sparse.set_len(1 << 40).unwrap();
        sparse.write_all_at(b"data", 5 << 30).unwrap();
        let mut bytes = Vec::new();
        pack(&from, &mut bytes).unwrap();
        unpack(&mut bytes.as_slice(), &to).unwrap();
        let mut again = Vec::new();
        pack(&to, &mut again).unwrap();
        assert!(bytes == again, "times, modes and links included");
        let stat = |name: &str| to.join(name).metadata().unwrap();
        assert_eq!(stat("linked").ino(), stat("deep/file").ino());
        assert!(stat("sparse").len() == 1 << 40 && stat("sparse").blocks() <= 64);
        let mut data = [0; 6];
        fs::File::open(to.join("sparse")).unwrap().read_exact_at(&mut data, (5 << 30) - 1).unwrap();
        assert_eq!(&data, b"\0data\0");
        assert!(bytes.len() < 100_000, "{}", bytes.len());
        assert_eq!(fs::read_to_string(to.join("odd\nname %41")).unwrap(), "");
        // Wherever it is cut, it is refused.
        for length in [0, 10, bytes.len() / 3, bytes.len() - 1] {
            let place = home.path().join(length.to_string());
            assert!(unpack(&mut &bytes[..length], &place).is_err(), "{length}");
        }
    }

    #[test]
    fn no_path_leads_out() {
        for bad in [&b"../x"[..], b"/x", b"a/../x", b"a//x", b"./x", b"a/"] {
            assert!(split(bad).is_err(), "{bad:?}");
        }
        assert_eq!(split(b"a/b").unwrap().0, b"a");
        // Nor through a link that the archive made.
        let home = tempfile::tempdir().unwrap();
        let line = |path: &str, kind: &str, target: &str| {
            format!(
                r#"{{"path":"{path}","kind":"{kind}","mode":33188,"uid":0,"gid":0,"mtime":[0,0],"size":0,"target":"{target}"}}"#
            )
        };
        let out = home.path().join("out");
        fs::create_dir(&out).unwrap();
        let link = line("link", "symlink", out.to_str().unwrap());
        // What its mode says it is would have what it leads to changed.
        let stream = format!("SANDKEEP-TREE-1\n{link}\n");
        let said = unpack(&mut stream.as_bytes(), &home.path().join("two")).unwrap_err();
        assert!(said.to_string().contains("two things"), "{said}");
        let link = link.replace("33188", "41471");
        let stream = format!("SANDKEEP-TREE-1\n{link}\n{}\n", line("link/x", "file", ""));
        assert!(unpack(&mut stream.as_bytes(), &home.path().join("in")).is_err());
        assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    }
}
