//! Sparse files in PAX archives (`tar --format=posix --sparse`), as GNU tar and libarchive write them.
//!
//! Their entries say where the bytes that follow belong in the file. There are three forms:
//!
//! | form | size of the file | name | map of offsets and lengths |
//! |---|---|---|---|
//! | 0.0 | `GNU.sparse.size` | the entry's | `GNU.sparse.offset` and `GNU.sparse.numbytes`, in turn |
//! | 0.1 | `GNU.sparse.size` | `GNU.sparse.name` | `GNU.sparse.map`, with commas |
//! | 1.0 | `GNU.sparse.realsize` | `GNU.sparse.name` | decimal lines before the content, in whole blocks |
//!
//! Archives come from strangers: a map that does not fit the content is an error.

use std::io::{self, Read};

const BLOCK: usize = 512;
/// How many pieces a file may have.
const MOST_PIECES: usize = 1 << 20;

/// What the extended headers of one entry say about holes.
#[derive(Debug, Default)]
pub struct PaxSparse {
    seen: bool,
    /// The map is before the content.
    inside: bool,
    size: Option<u64>,
    name: Option<Vec<u8>>,
    numbers: Vec<u64>,
}

/// A sparse file, as it is to be.
#[derive(Debug, PartialEq, Eq)]
pub struct SparseMap {
    /// How long the file is.
    pub size: u64,
    /// Where the bytes of the archive belong: offset and length, in the order of the file.
    pub pieces: Vec<(u64, u64)>,
    /// How many bytes of the entry were the map itself.
    pub header: u64,
}

impl PaxSparse {
    /// Takes one record of an extended header; others than those of sparse files are ignored.
    ///
    /// # Errors
    ///
    /// Returns an error for a value that cannot be read, or a form that is not known.
    pub fn record(&mut self, key: &str, value: &[u8]) -> io::Result<()> {
        let Some(key) = key.strip_prefix("GNU.sparse.") else { return Ok(()) };
        self.seen = true;
        match key {
            "major" if !matches!(value, b"0" | b"1") => return Err(wrong("is of a newer form")),
            "major" => self.inside = value == b"1",
            "name" => self.name = Some(value.to_owned()),
            "size" | "realsize" => self.size = Some(number(value)?),
            "offset" | "numbytes" => self.push(number(value)?)?,
            "map" => {
                for part in value.split(|byte| *byte == b',').filter(|part| !part.is_empty()) {
                    self.push(number(part)?)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether the entry is a sparse file.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        self.seen
    }

    /// The file's name, where the entry has another one.
    #[must_use]
    pub fn name(&self) -> Option<&[u8]> {
        self.name.as_deref()
    }

    /// The map of a file whose entry has `stored` bytes. Reads it from the content, if it is there.
    ///
    /// # Errors
    ///
    /// Returns an error for a map that does not fit, and those of reading.
    pub fn map(mut self, stored: u64, content: &mut impl Read) -> io::Result<SparseMap> {
        let header = if self.inside { self.read(stored, content)? } else { 0 };
        let size = self.size.ok_or_else(|| wrong("does not say how long it is"))?;
        let (mut end, mut bytes) = (0, 0u64);
        let mut pieces = Vec::with_capacity(self.numbers.len() / 2);
        for pair in self.numbers.chunks(2) {
            let &[offset, length] = pair else { return Err(wrong("has half a piece")) };
            let after = offset.checked_add(length).filter(|after| *after <= size);
            let sum = bytes.checked_add(length);
            let (Some(after), Some(sum)) = (after.filter(|_| offset >= end), sum) else {
                return Err(wrong("has pieces outside it or out of order"));
            };
            (end, bytes) = (after, sum);
            if length > 0 {
                pieces.push((offset, length));
            }
        }
        if bytes != stored - header {
            return Err(wrong("has another number of bytes than its map"));
        }
        Ok(SparseMap { size, pieces, header })
    }

    /// Reads the map before the content: how many pieces, then two numbers for each, a line each.
    fn read(&mut self, stored: u64, content: &mut impl Read) -> io::Result<u64> {
        let (mut taken, mut line, mut left) = (0, Vec::new(), None);
        let mut block = [0; BLOCK];
        while left != Some(0) {
            if stored - taken < BLOCK as u64 {
                return Err(wrong("has a map without an end"));
            }
            content.read_exact(&mut block)?;
            taken += BLOCK as u64;
            for byte in block {
                if left == Some(0) {
                    break;
                }
                if byte != b'\n' {
                    line.push(byte);
                    if line.len() > 20 {
                        return Err(wrong("has a number that is too long"));
                    }
                    continue;
                }
                let value = number(&line)?;
                line.clear();
                left = Some(match left {
                    None => {
                        let numbers = value.checked_mul(2);
                        numbers.ok_or_else(|| wrong("has too many pieces"))?
                    }
                    Some(left) => {
                        self.push(value)?;
                        left - 1
                    }
                });
            }
        }
        Ok(taken)
    }

    fn push(&mut self, number: u64) -> io::Result<()> {
        if self.numbers.len() >= 2 * MOST_PIECES {
            return Err(wrong("has too many pieces"));
        }
        self.numbers.push(number);
        Ok(())
    }
}

fn number(text: &[u8]) -> io::Result<u64> {
    let plain = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(text).ok().filter(|_| plain);
    text.and_then(|text| text.parse().ok()).ok_or_else(|| wrong("has a number that is none"))
}

fn wrong(how: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the map of a sparse file {how}"))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::{PaxSparse, SparseMap};

    fn map(records: &[(&str, &str)], content: &[u8]) -> io::Result<SparseMap> {
        let mut sparse = PaxSparse::default();
        for (key, value) in records {
            sparse.record(&format!("GNU.sparse.{key}"), value.as_bytes())?;
        }
        assert!(sparse.is_sparse());
        sparse.map(content.len() as u64, &mut &content[..])
    }

    fn block(text: &str, content: &str) -> Vec<u8> {
        let mut block = text.as_bytes().to_vec();
        block.resize(block.len().next_multiple_of(512), 0);
        block.extend_from_slice(content.as_bytes());
        block
    }

    #[test]
    fn all_three_forms_say_the_same() {
        let pieces = vec![(10, 2), (100, 1)];
        let first = [
            ("size", "1000"),
            ("numblocks", "3"),
            ("offset", "10"),
            ("numbytes", "2"),
            ("offset", "100"),
            ("numbytes", "1"),
            ("offset", "1000"),
            ("numbytes", "0"),
        ];
        let read = map(&first, b"abc").expect("it is well formed");
        assert_eq!(read, SparseMap { size: 1000, pieces: pieces.clone(), header: 0 });
        let second = [("size", "1000"), ("map", "10,2,100,1,1000,0"), ("name", "a")];
        let read = map(&second, b"abc").expect("it is well formed");
        assert_eq!(read, SparseMap { size: 1000, pieces: pieces.clone(), header: 0 });
        let third = [("major", "1"), ("minor", "0"), ("name", "a"), ("realsize", "1000")];
        let content = block("3\n10\n2\n100\n1\n1000\n0\n", "abc");
        let read = map(&third, &content).expect("it is well formed");
        assert_eq!(read, SparseMap { size: 1000, pieces, header: 512 });
    }

    #[test]
    fn a_map_may_be_longer_than_a_block_or_empty() {
        let third = [("major", "1"), ("realsize", "100000")];
        let lines: String = (0..300).map(|at| format!("{}\n1\n", at * 100)).collect();
        let content = block(&format!("300\n{lines}"), &"x".repeat(300));
        let read = map(&third, &content).expect("it is well formed");
        assert_eq!((read.pieces.len(), read.header), (300, 2560));
        let read = map(&third, &block("0\n", "")).expect("a hole and nothing else");
        assert_eq!(read, SparseMap { size: 100_000, pieces: vec![], header: 512 });
    }

    #[test]
    fn maps_that_do_not_fit_are_refused() {
        let size = ("size", "1000");
        for (records, content) in [
            (vec![("map", "0,3")], &b"abc"[..]),
            (vec![size, ("map", "0,2")], &b"abc"[..]),
            (vec![size, ("map", "0,4")], &b"abc"[..]),
            (vec![size, ("map", "0")], &b""[..]),
            (vec![size, ("map", "10,1,5,2")], &b"abc"[..]),
            (vec![size, ("map", "999,3")], &b"abc"[..]),
            (vec![size, ("map", "18446744073709551615,3")], &b"abc"[..]),
            (vec![size, ("map", "0,-3")], &b"abc"[..]),
            (vec![size, ("map", "0,99999999999999999999")], &b"abc"[..]),
            (vec![("size", "+5"), ("map", "0,3")], &b"abc"[..]),
            (vec![("major", "2"), ("realsize", "3")], &b"abc"[..]),
            (vec![("major", "1"), ("realsize", "3")], &b"abc"[..]),
            (vec![("major", "1"), ("realsize", "3")], &[b'1'; 512][..]),
            (vec![("major", "1"), ("realsize", "3")], &block("99999999999999999999\n", "")[..]),
            (vec![("major", "1"), ("realsize", "3")], &block("10000000000000000000\n", "")[..]),
            (vec![("major", "1"), ("realsize", "3")], &block("1\n0\n", "")[..]),
        ] {
            assert!(map(&records, content).is_err(), "{records:?}");
        }
    }
}
