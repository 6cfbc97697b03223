//! A tar stream, entry by entry.
//!
//! Archives come from strangers, so this reader bounds what it holds in memory (names and extended
//! headers), believes no size it has not seen the bytes of, and distinguishes an archive that was
//! cut short from one that has ended. It reads old, ustar, GNU (long names, sparse files) and PAX
//! archives.

use std::io::{self, Read};

use sandkeep_proto::sparse::PaxSparse;
use tar::Header;

use super::super::attributes::Attributes;

const BLOCK: usize = 512;
/// The most a long name or an extended header may take.
const LARGEST_HEADER: u64 = 1 << 20;

/// What kind of file an entry describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TarKind {
    File,
    Directory,
    Symlink,
    HardLink,
    Fifo,
    /// A device node.
    Device,
    /// The device that stands for a name that is no more, in what overlayfs wrote.
    Whiteout,
    Unknown,
}

/// One file of the archive, without its content.
#[derive(Debug, Clone)]
pub(super) struct ArchiveEntry {
    pub(super) path: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: TarKind,
    pub(super) attributes: Attributes,
    pub(super) xattrs: Vec<(String, Vec<u8>)>,
    /// How long the file is.
    pub(super) size: u64,
    /// Where in the file the bytes of the archive belong: offset and length. One piece, unless the
    /// file is sparse.
    pub(super) pieces: Vec<(u64, u64)>,
}

/// Reads entries; between two calls of [`next`](Self::next) it is a reader of the entry's bytes.
pub(super) struct TarStream<R> {
    inner: R,
    /// Bytes of the current entry not yet read.
    left: u64,
    /// Bytes after them, up to the next block.
    padding: u64,
    /// Whether the mark that ends an archive was seen.
    ended: bool,
}

/// What extended headers say about the entry that follows.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, i64)>,
    xattrs: Vec<(String, Vec<u8>)>,
    sparse: PaxSparse,
}

impl<R: Read> TarStream<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, left: 0, padding: 0, ended: false }
    }

    /// Whether the archive has its end mark.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// What it reads from.
    pub(super) fn inner(&self) -> &R {
        &self.inner
    }

    /// Gives back what it reads from, behind the last entry.
    pub(super) fn into_inner(self) -> R {
        self.inner
    }

    /// Goes to the next entry; what was not read of the last one is passed over.
    pub(super) fn next(&mut self) -> io::Result<Option<ArchiveEntry>> {
        let mut extended = Extended::default();
        loop {
            self.pass_over()?;
            let Some(header) = self.header()? else { return Ok(None) };
            let kind = header.entry_type();
            let size = number(header.entry_size(), "size")?;
            if kind.is_gnu_longname() || kind.is_gnu_longlink() {
                let mut name = self.small(size)?;
                name.truncate(name.iter().position(|b| *b == 0).unwrap_or(name.len()));
                let place =
                    if kind.is_gnu_longname() { &mut extended.path } else { &mut extended.link };
                *place = Some(name);
            } else if kind.is_pax_local_extensions() {
                let records = self.small(size)?;
                read_records(&records, &mut extended)?;
            } else if kind.is_pax_global_extensions() {
                self.small(size)?;
            } else {
                return self.entry(&header, extended).map(Some);
            }
        }
    }

    fn entry(&mut self, header: &Header, extended: Extended) -> io::Result<ArchiveEntry> {
        let named = extended.sparse.name().map(ToOwned::to_owned).or(extended.path);
        let path = named.unwrap_or_else(|| header.path_bytes().into_owned());
        let link = extended
            .link
            .or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned))
            .unwrap_or_default();
        let kind = match header.entry_type() {
            // Before there was a kind for directories, they were files with a slash at the end.
            kind if kind.is_file() || kind.is_contiguous() => {
                if path.ends_with(b"/") {
                    TarKind::Directory
                } else {
                    TarKind::File
                }
            }
            kind if kind.is_gnu_sparse() => TarKind::File,
            kind if kind.is_dir() => TarKind::Directory,
            kind if kind.is_symlink() => TarKind::Symlink,
            kind if kind.is_hard_link() => TarKind::HardLink,
            kind if kind.is_fifo() => TarKind::Fifo,
            kind if kind.is_character_special() && is_null(header) => TarKind::Whiteout,
            kind if kind.is_character_special() || kind.is_block_special() => TarKind::Device,
            _ => TarKind::Unknown,
        };
        let stored = match (kind, extended.size) {
            // Whatever size is written there, nothing follows these.
            (TarKind::Directory | TarKind::Symlink | TarKind::HardLink | TarKind::Fifo, _) => 0,
            (TarKind::Device | TarKind::Whiteout, _) => 0,
            (_, Some(size)) => size,
            (_, None) => number(header.entry_size(), "size")?,
        };
        let (mut size, mut pieces) = (stored, vec![(0, stored)]);
        self.left = stored;
        self.padding = padding(stored);
        if header.entry_type().is_gnu_sparse() {
            (size, pieces) = self.sparse_map(header, stored)?;
        } else if extended.sparse.is_sparse() && kind == TarKind::File {
            let map = extended.sparse.map(stored, self).map_err(|error| damaged(&path, &error))?;
            (size, pieces) = (map.size, map.pieces);
        }
        let id = |set: Option<u64>, raw: &[u8], field: io::Result<u64>| {
            // Some writers leave the owner out: it is root then.
            let absent = raw.iter().all(|byte| matches!(byte, 0 | b' '));
            let value = match set {
                Some(value) => value,
                None if absent => 0,
                None => number(field, "owner")?,
            };
            u32::try_from(value).map_err(|_| bad("an owner's number is too large"))
        };
        let attributes = Attributes {
            uid: id(extended.uid, &header.as_old().uid, header.uid())?,
            gid: id(extended.gid, &header.as_old().gid, header.gid())?,
            mode: number(header.mode(), "mode")? & 0o7777,
            mtime: match extended.mtime {
                Some(time) => time,
                None => (i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0), 0),
            },
        };
        Ok(ArchiveEntry { path, link, kind, attributes, xattrs: extended.xattrs, size, pieces })
    }

    /// Reads where the pieces of a sparse file belong, and how long it is.
    fn sparse_map(&mut self, header: &Header, stored: u64) -> io::Result<(u64, Vec<(u64, u64)>)> {
        const WRONG: &str = "the map of a sparse file is wrong";
        let gnu = header.as_gnu().ok_or_else(|| bad(WRONG))?;
        let mut pieces = Vec::new();
        let mut end = 0u64;
        let mut bytes = 0u64;
        let mut add = |piece: &tar::GnuSparseHeader| -> io::Result<()> {
            if piece.is_empty() {
                return Ok(());
            }
            let (offset, length) = (piece.offset()?, piece.length()?);
            if offset < end || pieces.len() > 1 << 20 {
                return Err(bad(WRONG));
            }
            end = offset.checked_add(length).ok_or_else(|| bad(WRONG))?;
            bytes = bytes.checked_add(length).ok_or_else(|| bad(WRONG))?;
            pieces.push((offset, length));
            Ok(())
        };
        gnu.sparse.iter().try_for_each(&mut add)?;
        let mut more = gnu.is_extended();
        while more {
            let mut next = tar::GnuExtSparseHeader::new();
            self.inner.read_exact(next.as_mut_bytes())?;
            next.sparse.iter().try_for_each(&mut add)?;
            more = next.is_extended();
        }
        let size = gnu.real_size()?;
        if bytes != stored || end > size {
            return Err(bad(WRONG));
        }
        Ok((size, pieces))
    }

    /// Reads a header block; nothing at the end of the archive.
    fn header(&mut self) -> io::Result<Option<Header>> {
        let mut header = Header::new_old();
        let block = header.as_mut_bytes();
        let mut filled = 0;
        while filled < BLOCK {
            match self.inner.read(&mut block[filled..])? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(cut_short()),
                read => filled += read,
            }
        }
        if block.iter().all(|b| *b == 0) {
            self.ended = true;
            return Ok(None);
        }
        if !is_header(block) {
            return Err(bad("a header's checksum is wrong"));
        }
        Ok(Some(header))
    }

    fn small(&mut self, size: u64) -> io::Result<Vec<u8>> {
        if size > LARGEST_HEADER {
            return Err(bad("a name or extended header is over 1 MiB"));
        }
        let mut bytes = Vec::new();
        (&mut self.inner).take(size).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != size {
            return Err(cut_short());
        }
        self.padding = padding(size);
        Ok(bytes)
    }

    fn pass_over(&mut self) -> io::Result<()> {
        let wanted = self.left.checked_add(self.padding).ok_or_else(|| bad("a size is absurd"))?;
        let passed = io::copy(&mut (&mut self.inner).take(wanted), &mut io::sink())?;
        (self.left, self.padding) = (0, 0);
        if passed == wanted { Ok(()) } else { Err(cut_short()) }
    }
}

impl<R: Read> Read for TarStream<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        if most == 0 {
            return Ok(0);
        }
        let read = self.inner.read(&mut into[..most])?;
        if read == 0 {
            return Err(cut_short());
        }
        self.left -= read as u64;
        Ok(read)
    }
}

/// Whether a block begins a tar entry: its checksum is right.
pub(in super::super) fn is_header(block: &[u8]) -> bool {
    if block.len() < BLOCK {
        return false;
    }
    let sum: u32 =
        block[..148].iter().chain(&block[156..BLOCK]).map(|b| u32::from(*b)).sum::<u32>() + 8 * 32;
    Header::from_byte_slice(&block[..BLOCK]).cksum().is_ok_and(|stored| stored == sum)
}

/// Reads `length key=value\n` records. The length rules: values may hold any byte.
fn read_records(mut records: &[u8], into: &mut Extended) -> io::Result<()> {
    let wrong = || bad("an extended header is malformed");
    while !records.is_empty() && records[0] != 0 {
        let space = records.iter().position(|b| *b == b' ').ok_or_else(wrong)?;
        let length: usize = parse(&records[..space]).ok_or_else(wrong)?;
        if length <= space + 1 || length > records.len() || records[length - 1] != b'\n' {
            return Err(wrong());
        }
        let record = &records[space + 1..length - 1];
        let equals = record.iter().position(|b| *b == b'=').ok_or_else(wrong)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        records = &records[length..];
        let Ok(key) = std::str::from_utf8(key) else { continue };
        match key {
            "path" => into.path = Some(value.to_owned()),
            "linkpath" => into.link = Some(value.to_owned()),
            "size" => into.size = Some(parse(value).ok_or_else(wrong)?),
            "uid" => into.uid = Some(parse(value).ok_or_else(wrong)?),
            "gid" => into.gid = Some(parse(value).ok_or_else(wrong)?),
            "mtime" => into.mtime = Some(time(value).ok_or_else(wrong)?),
            _ => {
                if let Some(name) = key.strip_prefix("SCHILY.xattr.") {
                    into.xattrs.push((name.to_owned(), value.to_owned()));
                }
                into.sparse.record(key, value)?;
            }
        }
    }
    Ok(())
}

fn parse<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Reads `seconds[.fraction]`, which may be before 1970.
fn time(text: &[u8]) -> Option<(i64, i64)> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos: i64 = digits.parse().ok()?;
    if whole.starts_with('-') && nanos > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}

/// Whether a device's numbers are both zero, and written down.
fn is_null(header: &Header) -> bool {
    let is_zero = |number: io::Result<Option<u32>>| matches!(number, Ok(Some(0)));
    is_zero(header.device_major()) && is_zero(header.device_minor())
}

fn padding(size: u64) -> u64 {
    let over = size % BLOCK as u64;
    if over == 0 { 0 } else { BLOCK as u64 - over }
}

fn number<T>(field: io::Result<T>, what: &str) -> io::Result<T> {
    field.map_err(|_| bad(&format!("a {what} is no number")))
}

/// An entry cannot be read.
fn damaged(path: &[u8], error: &io::Error) -> io::Error {
    let path = String::from_utf8_lossy(path);
    io::Error::new(error.kind(), format!("its entry `{}` is damaged: {error}", path.escape_debug()))
}

fn bad(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.to_owned())
}

pub(super) fn cut_short() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it is cut short")
}

#[cfg(test)]
mod tests {
    use super::{Extended, read_records, time};

    #[test]
    fn times_before_1970_and_parts_of_seconds() {
        for (text, read) in [
            ("0", Some((0, 0))),
            ("12.5", Some((12, 500_000_000))),
            ("-1.25", Some((-2, 750_000_000))),
            ("1.0000000019", Some((1, 1))),
            ("", None),
            ("x", None),
            ("1.-2", None),
        ] {
            assert_eq!(time(text.as_bytes()), read, "{text}");
        }
    }

    #[test]
    fn values_may_hold_any_byte_and_lengths_are_checked() {
        let mut good = Extended::default();
        read_records(b"28 SCHILY.xattr.user.a=b\n=c\n", &mut good).expect("a good record");
        assert_eq!(good.xattrs, [("user.a".to_owned(), b"b\n=c".to_vec())]);
        for wrong in
            [&b"5 a=b"[..], b"99 a=b\n", b"0 a=b\n", b"x\n", b"6 abc\n", b"8 size=x\n", b"-1 a=b\n"]
        {
            assert!(read_records(wrong, &mut Extended::default()).is_err(), "{wrong:?}");
        }
    }
}
