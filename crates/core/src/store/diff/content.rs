//! Compares and reads contents of files.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use crate::store::tree::{Dir, Xattrs};
use crate::store::{Result, StoreError};

/// How much is read at a time.
const CHUNK: usize = 128 << 10;

/// Whether two open files have the same bytes. `step` is called between reads and can end it.
pub(super) fn same_content(
    one: Result<OwnedFd>,
    other: Result<OwnedFd>,
    step: impl Fn() -> Result<()>,
) -> Result<bool> {
    let (one, other) = (one?, other?);
    let (mut left, mut right) = (vec![0u8; CHUNK], vec![0u8; CHUNK]);
    loop {
        let (read, read_other) = (fill(&one, &mut left)?, fill(&other, &mut right)?);
        if left[..read] != right[..read_other] {
            return Ok(false);
        }
        if read == 0 {
            return Ok(true);
        }
        step()?;
    }
}

/// Reads until the buffer is full or the file ends.
pub(super) fn fill(file: &OwnedFd, buffer: &mut [u8]) -> Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match rustix::io::read(file, &mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                return Err(StoreError::Io {
                    action: "read a file of",
                    path: "a layer".into(),
                    source: error.into(),
                });
            }
        }
    }
    Ok(filled)
}

/// The whole of a file, or `None` if it is larger than `most`.
pub(in crate::store) fn read_whole(file: &OwnedFd, most: usize) -> Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0u8; CHUNK];
    loop {
        let read = fill(file, &mut chunk)?;
        if bytes.len() + read > most {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk[..read]);
        if read < chunk.len() {
            return Ok(Some(bytes));
        }
    }
}

/// Whether two symbolic links have the same target.
pub(super) fn same_target(one: &Dir, other: &Dir, name: &CStr) -> Result<bool> {
    Ok(one.link_target(name)? == other.link_target(name)?)
}

/// The attributes that a sandbox sees: without those that overlayfs uses itself. A sandbox's own attribute under such
/// a name is stored with the prefix twice.
pub(in crate::store) fn shown_xattrs(mut xattrs: Xattrs) -> Xattrs {
    let of_kernel = |key: &[u8]| {
        key.strip_prefix(b"user.overlay.").is_some_and(|rest| !rest.starts_with(b"overlay."))
    };
    xattrs.retain(|(key, _)| !of_kernel(key.to_bytes()));
    xattrs
}

/// Whether bytes are text, as git decides it: no NUL byte at the beginning.
pub(in crate::store) fn is_text(bytes: &[u8]) -> bool {
    !bytes[..bytes.len().min(8000)].contains(&0)
}
