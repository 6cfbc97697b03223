//! Searches inside gzip, zstd, zip and tar, also nested.
//!
//! Everything is read as a stream, in memory that does not depend on what is read: a zip is walked by
//! the headers before its members, not by the directory at its end. What an archive unpacks to is
//! bounded: in depth, in bytes, and in proportion to the file, so that a bomb costs no more than a
//! large file does. What a bound cut off is reported, never passed over in silence.
//!
//! This finds what ordinary tools wrote. Somebody who wants to hide a value from it can.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::{DeflateDecoder, MultiGzDecoder};

use super::needles::Needles;
use super::scan::{NeedleScan, ScanMatch};
use crate::model::Encoding;

/// How deep archives in archives are looked into.
const DEPTH: usize = 3;
/// A file may unpack to so much, however small it is.
const ALWAYS: u64 = 64 << 20;
/// And to this many times its size.
const RATIO: u64 = 200;
/// And to no more than this.
const MOST: u64 = 2 << 30;
/// How many members are looked at.
const MEMBERS: u64 = 200_000;
/// How much of a file shows what it is.
pub(super) const HEAD: usize = 512;

/// What a file is, as its first bytes show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Container {
    Gzip,
    Zstd,
    Zip,
    Tar,
    /// Compressed in a way that is not looked into.
    Closed(&'static str),
}

impl Container {
    pub(super) fn of(head: &[u8]) -> Option<Self> {
        match head {
            [0x1f, 0x8b, 8, ..] => Some(Self::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Self::Zstd),
            [b'P', b'K', 3, 4, ..] => Some(Self::Zip),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Self::Closed("xz")),
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, ..] => {
                Some(Self::Closed("bzip2"))
            }
            [b'7', b'z', 0xbc, 0xaf, 0x27, 0x1c, ..] => Some(Self::Closed("7z")),
            _ if is_tar(head) => Some(Self::Tar),
            _ => None,
        }
    }
}

/// Whether a block is a tar's header: its checksum is right.
fn is_tar(block: &[u8]) -> bool {
    let Some(block) = block.get(..512) else { return false };
    let Some(told) = octal(&block[148..156]) else { return false };
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    let field: u64 = block[148..156].iter().map(|byte| u64::from(*byte)).sum();
    block[0] != 0 && told == sum - field + 8 * u64::from(b' ')
}

fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    let digits = text.trim_matches(|c: char| c == '\0' || c == ' ');
    u64::from_str_radix(digits, 8).ok()
}

/// A number of a tar's header: in octal, or in binary if it is large.
fn number(field: &[u8]) -> Option<u64> {
    match field {
        [0x80, rest @ ..] => {
            let low = rest.len().checked_sub(8)?;
            let (high, low) = rest.split_at(low);
            let plain = high.iter().all(|byte| *byte == 0) && low[0] < 0x40;
            plain.then(|| low.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
        }
        field => octal(field),
    }
}

/// The name in a tar's header.
fn name_in(block: &[u8; HEAD]) -> Vec<u8> {
    let text = |field: &[u8]| field.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
    let (name, prefix) = (text(&block[..100]), text(&block[345..500]));
    if prefix.is_empty() || block[257..262] != *b"ustar" {
        return name;
    }
    [prefix, name].join(&b'/')
}

/// What a stream says before `end`, and no more than a path can be long.
fn first_line(stream: &mut impl Read, end: u8) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    stream.take(4096).read_to_end(&mut text)?;
    text.truncate(text.iter().position(|byte| *byte == end).unwrap_or(text.len()));
    Ok(text)
}

/// The path among the attributes that a tar gives a member in front of it.
fn pax_path(stream: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut text = Vec::new();
    stream.take(16 << 10).read_to_end(&mut text)?;
    let path = |line: &[u8]| {
        let at = line.iter().position(|byte| *byte == b' ')?;
        line[at + 1..].strip_prefix(b"path=").map(<[u8]>::to_vec)
    };
    Ok(text.split(|byte| *byte == b'\n').find_map(path))
}

/// A value found inside.
#[derive(Debug)]
pub(super) struct Inside {
    pub(super) secret: usize,
    pub(super) encoding: Encoding,
    pub(super) offset: u64,
    /// The member, from the outermost in: `a.tar!b/c.txt`.
    pub(super) member: Vec<u8>,
}

/// One look into one file.
pub(super) struct FileSearch<'n> {
    needles: &'n Needles,
    /// What it may still unpack to.
    left: u64,
    members: u64,
    pub(super) found: Vec<Inside>,
    /// Why not all of it was searched: the member, and the reason.
    pub(super) missed: Vec<(Vec<u8>, String)>,
}

impl<'n> FileSearch<'n> {
    /// `size` is the file's.
    pub(super) fn new(needles: &'n Needles, size: u64) -> Self {
        let left = size.saturating_mul(RATIO).clamp(ALWAYS, MOST);
        Self { needles, left, members: 0, found: Vec::new(), missed: Vec::new() }
    }

    /// Looks into a stream that is `kind`.
    pub(super) fn open(&mut self, kind: Container, stream: &mut dyn Read) -> io::Result<()> {
        self.unpack(kind, stream, &[], 1)
    }

    /// Everything inside a stream. Damage ends the look at it and is reported; only a failure to read the
    /// file itself is an error.
    fn unpack(
        &mut self,
        kind: Container,
        stream: &mut dyn Read,
        path: &[u8],
        depth: usize,
    ) -> io::Result<()> {
        let mut source = StreamSource { stream, failed: None };
        let outcome = match kind {
            Container::Gzip => {
                let plain = MultiGzDecoder::new(BufReader::with_capacity(64 << 10, &mut source));
                self.member(plain, path, depth)
            }
            Container::Zstd => match zstd::stream::read::Decoder::new(&mut source) {
                Ok(plain) => self.member(plain, path, depth),
                Err(error) => Err(error),
            },
            Container::Zip => self.zip(&mut source, path, depth),
            Container::Tar => self.tar(&mut source, path, depth),
            Container::Closed(name) => Err(limit(format!("{name} is not looked into"))),
        };
        if let Some(error) = source.failed {
            return Err(error);
        }
        if let Err(error) = outcome {
            let reason = match error.get_ref().is_some_and(|inner| inner.is::<Limit>()) {
                true => error.to_string(),
                false => "it is damaged".to_owned(),
            };
            self.miss(path, reason);
        }
        Ok(())
    }

    fn miss(&mut self, path: &[u8], reason: String) {
        if self.missed.is_empty() {
            self.missed.push((path.to_vec(), reason));
        }
    }

    /// Searches what is in a member, and in it, if it is an archive itself.
    fn member(&mut self, stream: impl Read, path: &[u8], depth: usize) -> io::Result<()> {
        let needles = self.needles;
        let mut found = Vec::new();
        let mut metered = Metered { stream, left: self.left };
        let mut head = [0; HEAD];
        let outcome = read_full(&mut metered, &mut head).and_then(|got| {
            self.left = metered.left;
            let mut whole = (&head[..got]).chain(&mut metered);
            let mut tee =
                Tee { stream: &mut whole, scan: NeedleScan::new(needles), found: &mut found };
            let inner = match Container::of(&head[..got]) {
                Some(kind) if depth < DEPTH => {
                    // What the inner one unpacks to counts, and so does the inner one.
                    self.unpack(kind, &mut tee, path, depth + 1)
                }
                Some(_) => {
                    self.miss(path, format!("archives in archives, more than {DEPTH} deep"));
                    Ok(())
                }
                None => Ok(()),
            };
            inner.and_then(|()| tee.drain())
        });
        self.left = self.left.min(metered.left);
        for one in found {
            self.add(one.hit.secret, one.hit.encoding, one.offset(), path);
        }
        outcome
    }

    /// One find per secret and member is enough.
    fn add(&mut self, secret: usize, encoding: Encoding, offset: u64, member: &[u8]) {
        if !self.found.iter().any(|one| one.secret == secret && one.member == member)
            && self.found.len() < 64
        {
            self.found.push(Inside { secret, encoding, offset, member: member.to_vec() });
        }
    }

    fn begin_member(&mut self, outer: &[u8], name: &[u8]) -> io::Result<Vec<u8>> {
        self.members += 1;
        if self.members > MEMBERS {
            return Err(limit(format!("more than {MEMBERS} members")));
        }
        let mut path = outer.to_vec();
        if !path.is_empty() {
            path.push(b'!');
        }
        path.extend_from_slice(name);
        let mut hits = Vec::new();
        self.needles.find(name, 0..name.len(), |hit| hits.push((hit.secret, hit.encoding)));
        for (secret, encoding) in hits {
            self.add(secret, encoding, 0, &path);
        }
        Ok(path)
    }

    /// Walks the members of a tar. What is in its headers, links say, was searched with the stream.
    fn tar(&mut self, stream: &mut dyn Read, outer: &[u8], depth: usize) -> io::Result<()> {
        let mut stream = BufReader::with_capacity(64 << 10, stream);
        let mut long_name = None;
        loop {
            let mut block = [0; HEAD];
            if read_full(&mut stream, &mut block)? < HEAD || block == [0; HEAD] {
                return Ok(());
            }
            let size = number(&block[124..136]).filter(|_| is_tar(&block));
            let size = size.ok_or(io::ErrorKind::InvalidData)?;
            let mut content = (&mut stream).take(size);
            match block[156] {
                b'L' => long_name = Some(first_line(&mut content, b'\0')?),
                b'x' => long_name = pax_path(&mut content)?.or(long_name),
                kind => {
                    let name = long_name.take().unwrap_or_else(|| name_in(&block));
                    let path = self.begin_member(outer, &name)?;
                    if matches!(kind, 0 | b'0' | b'7') {
                        self.member(&mut content, &path, depth)?;
                    }
                }
            }
            io::copy(&mut content, &mut io::sink())?;
            skip(&mut stream, size.next_multiple_of(HEAD as u64) - size)?;
        }
    }

    /// Walks the members of a zip by the headers before them.
    fn zip(&mut self, stream: &mut dyn Read, outer: &[u8], depth: usize) -> io::Result<()> {
        let mut stream = BufReader::with_capacity(64 << 10, stream);
        loop {
            let mut header = [0; 30];
            let got = read_full(&mut stream, &mut header[..4])?;
            match &header[..4] {
                b"PK\x03\x04" => {}
                // The directory, or the end.
                [b'P', b'K', ..] => return Ok(()),
                _ if got == 0 => return Ok(()),
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
            stream.read_exact(&mut header[4..])?;
            let Local { flags, method, packed, name, extra } = Local::parse(&header);
            let mut text = vec![0; usize::from(name) + usize::from(extra)];
            stream.read_exact(&mut text)?;
            let (name, extra) = text.split_at(usize::from(name));
            let path = self.begin_member(outer, name)?;
            let packed = packed_size(packed, extra);
            let unknown = flags & 8 != 0 && packed == 0;
            if flags & 1 != 0 {
                self.miss(&path, "it is encrypted".to_owned());
                skip(&mut stream, packed)?;
                if unknown {
                    return Ok(());
                }
                continue;
            }
            match (method, unknown) {
                (8, true) => {
                    // A deflated member marks its own end; after it comes a note of its sizes.
                    let mut inflate = DeflateDecoder::new(&mut stream);
                    self.member(&mut inflate, &path, depth)?;
                    io::copy(&mut inflate, &mut io::sink())?;
                    let packed = inflate.total_in();
                    skip_descriptor(&mut stream, packed)?;
                }
                (8, false) => {
                    let mut part = (&mut stream).take(packed);
                    self.member(DeflateDecoder::new(BufReader::new(&mut part)), &path, depth)?;
                    io::copy(&mut part, &mut io::sink())?;
                }
                (0, false) => self.member((&mut stream).take(packed), &path, depth)?,
                (0, true) => return Err(limit("a member does not tell its size")),
                (_, _) => {
                    self.miss(&path, format!("method {method} is not looked into"));
                    if unknown {
                        return Ok(());
                    }
                    skip(&mut stream, packed)?;
                }
            }
        }
    }
}

/// What a member's own header in a zip says.
struct Local {
    flags: u16,
    method: u16,
    packed: u32,
    name: u16,
    extra: u16,
}

impl Local {
    fn parse(header: &[u8; 30]) -> Self {
        let short = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        Self {
            flags: short(6),
            method: short(8),
            packed: u32::from(short(18)) | u32::from(short(20)) << 16,
            name: short(26),
            extra: short(28),
        }
    }
}

/// The packed size, which for large members is in the extra field.
fn packed_size(told: u32, extra: &[u8]) -> u64 {
    if told != u32::MAX {
        return u64::from(told);
    }
    let mut rest = extra;
    while let [id0, id1, size0, size1, after @ ..] = rest {
        let size = usize::from(u16::from_le_bytes([*size0, *size1]));
        let Some((field, next)) = after.split_at_checked(size) else { break };
        if [*id0, *id1] == [1, 0]
            && let Some(packed) = field.get(8..16).and_then(|bytes| bytes.try_into().ok())
        {
            return u64::from_le_bytes(packed);
        }
        rest = next;
    }
    u64::from(told)
}

/// Passes over the note after a member whose size was not known before: with or without a signature,
/// with sizes of four bytes or of eight.
fn skip_descriptor(stream: &mut impl BufRead, packed: u64) -> io::Result<()> {
    let mut note = [0; 4];
    stream.read_exact(&mut note)?;
    if note == *b"PK\x07\x08" {
        stream.read_exact(&mut note)?;
    }
    let mut size = [0; 8];
    stream.read_exact(&mut size)?;
    if u64::from_le_bytes(size) == packed && !stream.fill_buf()?.starts_with(b"PK") {
        stream.read_exact(&mut size)?;
    }
    Ok(())
}

fn skip(stream: &mut impl Read, bytes: u64) -> io::Result<()> {
    io::copy(&mut stream.take(bytes), &mut io::sink()).map(drop)
}

fn read_full(stream: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match stream.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// A bound was reached.
#[derive(Debug)]
struct Limit(String);

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Limit {}

fn limit(reason: impl Into<String>) -> io::Error {
    io::Error::other(Limit(reason.into()))
}

/// Lets no more through than is left.
struct Metered<R> {
    stream: R,
    left: u64,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(buffer)?;
        self.left = self
            .left
            .checked_sub(got as u64)
            .ok_or_else(|| limit("it unpacks to more than is looked at"))?;
        Ok(got)
    }
}

/// Keeps the first of each secret: a stream may hold a value any number of times.
fn keep_first(found: &mut Vec<ScanMatch>, one: ScanMatch) {
    if !found.iter().any(|known| known.hit.secret == one.hit.secret) {
        found.push(one);
    }
}

/// Searches what passes through.
struct Tee<'a, 'n> {
    stream: &'a mut dyn Read,
    scan: NeedleScan<'n>,
    found: &'a mut Vec<ScanMatch>,
}

impl Tee<'_, '_> {
    /// Reads on to the end.
    fn drain(mut self) -> io::Result<()> {
        let Self { stream, scan, found } = &mut self;
        let mut keep = |one| keep_first(found, one);
        while scan.fill(|room| stream.read(room), &mut keep)? > 0 {}
        scan.finish(&mut keep);
        Ok(())
    }
}

impl Read for Tee<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(buffer)?;
        self.scan.feed(&buffer[..got], &mut |one| keep_first(self.found, one));
        Ok(got)
    }
}

/// A stream that remembers whether it was the one that failed.
struct StreamSource<'a> {
    stream: &'a mut dyn Read,
    failed: Option<io::Error>,
}

impl Read for StreamSource<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer).map_err(|error| {
            let told = io::Error::new(error.kind(), error.to_string());
            self.failed = Some(error);
            told
        })
    }
}
