//! How an archive is compressed, detected by its first bytes.

use std::io::{self, BufReader, Cursor, Read};

use super::super::error::{ImageError, ImageResult};
use super::stream::is_header;

/// How far one must look to know.
const PEEK: usize = 512;
const BUFFER: usize = 256 << 10;

/// What some bytes are the beginning of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Packing {
    /// A tar archive.
    Tar,
    Gzip,
    Zstd,
    /// Compressed with something that is not supported, by name.
    Foreign(&'static str),
    /// None of these.
    Unknown,
}

/// Returns the compression whose data begins with `start`.
pub(in super::super) fn packing(start: &[u8]) -> Packing {
    const FOREIGN: [(&[u8], &str); 5] = [
        (b"\xfd7zXZ\0", "xz"),
        (b"BZh", "bzip2"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (b"PK\x03\x04", "zip"),
        (b"7z\xbc\xaf\x27\x1c", "7z"),
    ];
    // The second is a frame that zstd passes over: some tools begin with one.
    let skippable =
        start.len() >= 4 && start[0] & 0xf0 == 0x50 && start[1..4] == [0x2a, 0x4d, 0x18];
    if start.starts_with(&[0x1f, 0x8b]) {
        Packing::Gzip
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) || skippable {
        Packing::Zstd
    } else if let Some((_, name)) = FOREIGN.iter().find(|(magic, _)| start.starts_with(magic)) {
        Packing::Foreign(name)
    } else if is_header(start) || (start.len() == PEEK && start.iter().all(|b| *b == 0)) {
        Packing::Tar
    } else {
        Packing::Unknown
    }
}

/// Reads the tar archive inside, whatever it is packed with.
pub(in super::super) fn open<'a>(
    what: &str,
    archive: impl Read + 'a,
) -> ImageResult<Box<dyn Read + 'a>> {
    let damaged = |source| ImageError::Damaged { what: what.to_owned(), source };
    let (start, whole) = peek(archive).map_err(damaged)?;
    let plain: Box<dyn Read + 'a> = match packing(&start) {
        Packing::Gzip => {
            Box::new(flate2::read::MultiGzDecoder::new(BufReader::with_capacity(BUFFER, whole)))
        }
        Packing::Zstd => Box::new(zstd::stream::read::Decoder::new(whole).map_err(damaged)?),
        Packing::Tar => return Ok(Box::new(BufReader::with_capacity(BUFFER, whole))),
        Packing::Foreign(name) => return Err(foreign(what, name)),
        Packing::Unknown => return Err(no_archive(what, &start)),
    };
    let (start, whole) = peek(plain).map_err(damaged)?;
    match packing(&start) {
        Packing::Tar => Ok(Box::new(BufReader::with_capacity(BUFFER, whole))),
        _ => Err(no_archive(what, &start)),
    }
}

fn foreign(what: &str, name: &str) -> ImageError {
    let reason = format!("it is packed with {name}; unpack it, or pack it with gzip or zstd");
    ImageError::NotAnImage { what: what.to_owned(), reason }
}

fn no_archive(what: &str, start: &[u8]) -> ImageError {
    let reason = if start.is_empty() {
        "it is empty".to_owned()
    } else {
        "it is no tar archive, plain or packed with gzip or zstd".to_owned()
    };
    ImageError::NotAnImage { what: what.to_owned(), reason }
}

/// A reader that still has what was peeked at.
type Peeked<R> = io::Chain<Cursor<Vec<u8>>, R>;

/// Reads the first bytes, and makes a reader that has them still.
fn peek<R: Read>(mut reader: R) -> io::Result<(Vec<u8>, Peeked<R>)> {
    let mut start = Vec::with_capacity(PEEK);
    (&mut reader).take(PEEK as u64).read_to_end(&mut start)?;
    Ok((start.clone(), Cursor::new(start).chain(reader)))
}
