//! The names of an upper directory at one moment, packed into one piece of memory.
//!
//! Names come in the order of a walk: depth first, names of a directory in byte order, a directory
//! before what is in it. Each entry shares the beginning of its path with the one before:
//!
//! ```text
//! varint shared    how many bytes of the path are those of the entry before
//! varint length    how many bytes follow
//! bytes            the rest of the path
//! u8 kind
//! u64 mark         what tells this version of the name from others
//! varint bytes     what it takes on the disk
//! ```
//!
//! So 30,000 names take less than a megabyte.

use std::cmp::Ordering;

/// What a name in an upper directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A regular file.
    File = 0,
    /// A directory that is merged with the one below.
    Dir = 1,
    /// A directory that hides the one below.
    OpaqueDir = 2,
    /// A symbolic link.
    Symlink = 3,
    /// A device, a FIFO or a socket.
    Special = 4,
    /// A deletion.
    Whiteout = 5,
}

impl Kind {
    /// Whether it is a directory of either kind.
    #[must_use]
    pub fn is_dir(self) -> bool {
        matches!(self, Self::Dir | Self::OpaqueDir)
    }

    fn from_byte(byte: u8) -> Option<Self> {
        [Self::File, Self::Dir, Self::OpaqueDir, Self::Symlink, Self::Special, Self::Whiteout]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// The names of an upper directory at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    bytes: Vec<u8>,
    names: u64,
    /// The path of the last entry, which the next one shares a beginning with.
    last: Vec<u8>,
}

/// One name of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    pub(crate) path: &'a [u8],
    pub(crate) kind: Kind,
    pub(crate) mark: u64,
    pub(crate) bytes: u64,
}

impl Index {
    /// How many names it has.
    #[must_use]
    pub fn names(&self) -> u64 {
        self.names
    }

    /// How much memory it takes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// How many files differ between two moments, and what those of `self` take on the disk.
    #[must_use]
    pub fn difference(&self, before: &Self) -> (u64, u64) {
        let (mut old, mut new) = (Reader::new(before), Reader::new(self));
        let (mut files, mut bytes) = (0, 0);
        old.advance();
        new.advance();
        loop {
            let order = match (old.entry(), new.entry()) {
                (None, None) => return (files, bytes),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(old), Some(new)) => compare(old.path, new.path),
            };
            if order.is_ge()
                && let Some(entry) = new.entry()
            {
                let known = order.is_eq()
                    && old
                        .entry()
                        .is_some_and(|old| (old.kind, old.mark) == (entry.kind, entry.mark));
                if !known && !entry.kind.is_dir() {
                    files += 1;
                    bytes += entry.bytes;
                }
            }
            if order.is_lt() && old.entry().is_some_and(|old| !old.kind.is_dir()) {
                files += 1;
            }
            if order.is_le() {
                old.advance();
            }
            if order.is_ge() {
                new.advance();
            }
        }
    }

    pub(crate) fn push(&mut self, entry: Entry<'_>) {
        let shared = self.last.iter().zip(entry.path).take_while(|(one, two)| one == two).count();
        let rest = &entry.path[shared..];
        put_number(&mut self.bytes, shared as u64);
        put_number(&mut self.bytes, rest.len() as u64);
        self.bytes.extend_from_slice(rest);
        self.bytes.push(entry.kind as u8);
        self.bytes.extend_from_slice(&entry.mark.to_le_bytes());
        put_number(&mut self.bytes, entry.bytes);
        self.last.truncate(shared);
        self.last.extend_from_slice(rest);
        self.names += 1;
    }

    /// No more names come.
    pub(crate) fn finish(&mut self) {
        self.last = Vec::new();
        self.bytes.shrink_to_fit();
    }
}

/// Reads an index from its beginning to its end.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    path: Vec<u8>,
    now: Option<(Kind, u64, u64)>,
}

impl<'a> Reader<'a> {
    /// Before the first name.
    pub(crate) fn new(index: &'a Index) -> Self {
        Self { rest: &index.bytes, path: Vec::new(), now: None }
    }

    /// The name it is at; `None` at the end.
    pub(crate) fn entry(&self) -> Option<Entry<'_>> {
        self.now.map(|(kind, mark, bytes)| Entry { path: &self.path, kind, mark, bytes })
    }

    /// Goes to the next name.
    pub(crate) fn advance(&mut self) {
        self.now = self.read();
    }

    fn read(&mut self) -> Option<(Kind, u64, u64)> {
        let shared = usize::try_from(take_number(&mut self.rest)?).ok()?;
        let length = usize::try_from(take_number(&mut self.rest)?).ok()?;
        let (path, rest) = self.rest.split_at_checked(length)?;
        let ([kind, mark @ ..], rest) = rest.split_first_chunk::<9>()?;
        self.rest = rest;
        let bytes = take_number(&mut self.rest)?;
        self.path.truncate(shared);
        self.path.extend_from_slice(path);
        Some((Kind::from_byte(*kind)?, u64::from_le_bytes(*mark), bytes))
    }
}

/// The order of a walk: by components, and names in byte order.
pub(crate) fn compare(one: &[u8], two: &[u8]) -> Ordering {
    // Neighbours share most of their paths: what is equal is skipped first.
    let shared = one.iter().zip(two).take_while(|(one, two)| one == two).count();
    let key = |path: &[u8]| match path.get(shared) {
        None => 0,
        Some(b'/') => 1,
        Some(byte) => u16::from(*byte) + 2,
    };
    key(one).cmp(&key(two))
}

fn put_number(into: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        into.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

fn take_number(from: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = from.split_first()?;
        *from = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kind() -> impl Strategy<Value = Kind> {
        (0u8..6).prop_map(|byte| Kind::from_byte(byte).expect("a kind"))
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out(
            mut entries in prop::collection::vec(("[a-c/]{1,12}", kind(), any::<u64>(), any::<u64>()), 0..50)
        ) {
            entries.sort_by(|one, two| compare(one.0.as_bytes(), two.0.as_bytes()));
            let mut index = Index::default();
            for (path, kind, mark, bytes) in &entries {
                index.push(Entry { path: path.as_bytes(), kind: *kind, mark: *mark, bytes: *bytes });
            }
            index.finish();
            let mut reader = Reader::new(&index);
            for (path, kind, mark, bytes) in &entries {
                reader.advance();
                let entry = Entry { path: path.as_bytes(), kind: *kind, mark: *mark, bytes: *bytes };
                prop_assert_eq!(reader.entry(), Some(entry));
            }
            reader.advance();
            prop_assert_eq!(reader.entry(), None);
            prop_assert_eq!(index.names(), entries.len() as u64);
            prop_assert_eq!(index.difference(&index), (0, 0));
        }
    }

    #[test]
    fn a_directory_comes_before_its_contents_and_those_before_its_siblings() {
        let mut paths = ["a.b", "a", "a/b", "a/b/c", "a-", "a/c", "b"];
        paths.sort_by(|one, two| compare(one.as_bytes(), two.as_bytes()));
        assert_eq!(paths, ["a", "a/b", "a/b/c", "a/c", "a-", "a.b", "b"]);
    }

    #[test]
    fn a_difference_counts_files_that_are_new_other_or_gone() {
        let of = |entries: &[(&str, Kind, u64)]| {
            let mut index = Index::default();
            for (path, kind, mark) in entries {
                index.push(Entry { path: path.as_bytes(), kind: *kind, mark: *mark, bytes: 10 });
            }
            index
        };
        let before = of(&[("a", Kind::File, 1), ("b", Kind::File, 1), ("d", Kind::Dir, 1)]);
        let after = of(&[("a", Kind::File, 2), ("c", Kind::File, 1), ("d", Kind::Dir, 9)]);
        assert_eq!(after.difference(&before), (3, 20));
        assert_eq!(after.difference(&Index::default()), (2, 20));
    }
}
