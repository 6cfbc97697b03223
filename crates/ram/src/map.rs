//! Reading a map, and putting page files where it says.

use std::ffi::{c_int, c_void};

use crate::{FAILED, errno, fail, kernel, status_of};

const MAGIC: u64 = u64::from_le_bytes(*b"SKRAMMAP");
const PAGE: u64 = 4096;
const ZERO: u64 = u64::MAX;
/// Entries that are read at a time.
const BATCH: usize = 512;
/// The most page files.
pub(crate) const FILES: usize = 64;

/// A piece of RAM, as the map has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    offset: u64,
    length: u64,
    file: u64,
    at: u64,
}

/// Which descriptors the files of a map have.
#[derive(Clone, Copy)]
pub(crate) enum Given<'a> {
    /// From this one on.
    From(c_int),
    /// These.
    These(&'a [c_int]),
}

impl Given<'_> {
    fn get(self, file: u64) -> Option<c_int> {
        match self {
            Self::From(first) => first.checked_add(c_int::try_from(file).ok()?),
            Self::These(list) => list.get(usize::try_from(file).ok()?).copied(),
        }
    }
}

/// Maps what `descriptor` says over `length` bytes at `ram`, which are mapped and empty.
pub(crate) fn apply(
    descriptor: c_int,
    given: Given<'_>,
    ram: *mut c_void,
    length: usize,
    protection: c_int,
) {
    let mut files = Files { given, known: [(0, 0, 0); FILES], count: 0 };
    let mut words = [0u64; 4 * BATCH];
    if !read(descriptor, &mut words[..3], 0) || words[0] != MAGIC {
        fail("the map of RAM cannot be read", errno());
    }
    if words[1] != length as u64 {
        fail("the map is of another amount of RAM", 0);
    }
    let (count, mut done, mut last) = (words[2], 0, 0);
    if status_of(descriptor).map(|found| found.st_size as u64)
        != count.checked_mul(32).map(|size| size + 24)
    {
        fail("the map of RAM is cut short", 0);
    }
    while done < count {
        let now = (count - done).min(BATCH as u64) as usize;
        if !read(descriptor, &mut words[..4 * now], 24 + 32 * done) {
            fail("the map of RAM cannot be read", errno());
        }
        for entry in words[..4 * now].chunks_exact(4) {
            let entry = Entry { offset: entry[0], length: entry[1], file: entry[2], at: entry[3] };
            last = match check(&entry, last, length as u64) {
                Some(end) => end,
                None => fail("the map of RAM is wrong", 0),
            };
            if entry.file != ZERO {
                put(&entry, files.get(entry.file), ram, protection);
            }
        }
        done += now as u64;
    }
    files.close();
    // SAFETY: nothing else was given this descriptor.
    unsafe { libc::close(descriptor) };
}

/// Where an entry ends, if it is one: pages, behind the last one, in RAM.
fn check(entry: &Entry, last: u64, ram: u64) -> Option<u64> {
    let Entry { offset, length, at, .. } = *entry;
    let end = offset.checked_add(length).filter(|end| *end <= ram)?;
    let pages = [offset, length, at].iter().all(|number| number % PAGE == 0);
    let in_file = entry.file == ZERO || at.checked_add(length).is_some();
    (offset >= last && length > 0 && pages && in_file).then_some(end)
}

fn put(entry: &Entry, (file, size): (c_int, u64), ram: *mut c_void, protection: c_int) {
    // What is mapped beyond a file's end kills the machine when it is touched, much later.
    if entry.at + entry.length > size {
        fail("a file of pages is too short", 0);
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let at = ram.wrapping_byte_add(entry.offset as usize);
    // SAFETY: the range is within RAM, which is ours to fill; nothing uses it yet.
    let mapped = unsafe {
        kernel(at, entry.length as usize, protection, flags, file, entry.at as libc::off_t)
    };
    if mapped == FAILED {
        fail("pages cannot be mapped", errno());
    }
}

/// The page files met so far: their places in the map, descriptors and sizes.
struct Files<'a> {
    given: Given<'a>,
    known: [(u64, c_int, u64); FILES],
    count: usize,
}

impl Files<'_> {
    fn get(&mut self, file: u64) -> (c_int, u64) {
        let mut known = self.known[..self.count].iter().rev();
        if let Some((_, descriptor, size)) = known.find(|(place, ..)| *place == file) {
            return (*descriptor, *size);
        }
        let Some(descriptor) = self.given.get(file) else {
            fail("the map of RAM is wrong", 0);
        };
        let Some(found) = status_of(descriptor) else {
            fail("a file of pages is not open", errno());
        };
        if self.count == FILES {
            fail("the map has too many files", 0);
        }
        self.known[self.count] = (file, descriptor, found.st_size as u64);
        self.count += 1;
        (descriptor, found.st_size as u64)
    }

    /// Closes them, and those that were given and not needed: what is mapped stays.
    fn close(&self) {
        let close = |descriptor: c_int| {
            // SAFETY: nothing else was given these descriptors.
            unsafe { libc::close(descriptor) };
        };
        match self.given {
            Given::These(list) => list.iter().copied().for_each(close),
            Given::From(_) => self.known[..self.count].iter().for_each(|known| close(known.1)),
        }
    }
}

/// Fills `words` from a file, all of them.
fn read(descriptor: c_int, words: &mut [u64], at: u64) -> bool {
    let wanted = size_of_val(words);
    let mut done = 0;
    while done < wanted {
        let into = words.as_mut_ptr().wrapping_byte_add(done);
        // SAFETY: what is left of `words` has room for what is read, and any bytes make numbers.
        let got = unsafe {
            libc::pread(descriptor, into.cast(), wanted - done, (at + done as u64) as libc::off_t)
        };
        match usize::try_from(got) {
            Ok(0) => return false,
            Ok(got) => done += got,
            Err(_) if errno() == libc::EINTR => {}
            Err(_) => return false,
        }
    }
    words.iter_mut().for_each(|word| *word = u64::from_le(*word));
    true
}

#[cfg(test)]
mod tests {
    use super::{Entry, ZERO, check};

    #[test]
    fn entries_that_are_none() {
        let good = Entry { offset: 4096, length: 8192, file: 3, at: 0 };
        assert_eq!(check(&good, 4096, 12288), Some(12288));
        assert_eq!(check(&Entry { file: ZERO, ..good }, 0, 12288), Some(12288));
        for bad in [
            Entry { offset: 0, ..good },
            Entry { offset: 8192, ..good },
            Entry { offset: 4097, ..good },
            Entry { length: 0, ..good },
            Entry { length: 100, ..good },
            Entry { length: u64::MAX - 4095, ..good },
            Entry { at: 1, ..good },
            Entry { at: u64::MAX - 4095, ..good },
        ] {
            assert_eq!(check(&bad, 4096, 12288), None, "{bad:?}");
        }
    }
}
