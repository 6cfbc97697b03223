//! A reader that computes the digest of an archive and limits its size.

use std::io::{self, Read};

use sha2::{Digest as _, Sha256};

use super::{Form, UnpackRoom};
use crate::store::image::digest;

/// Computes the digest of what is read through it, and bounds it.
pub(super) struct Hashed<R> {
    inner: R,
    /// The digest of a machine's export is not needed, and its zeros take no space.
    hash: Option<Sha256>,
    left: u64,
}

impl<R: Read> Hashed<R> {
    pub(super) fn new(inner: R, room: &UnpackRoom, form: Form) -> Self {
        if form == Form::Upper {
            return Self { inner, hash: None, left: u64::MAX };
        }
        // Headers and padding come on top of what is unpacked; an archive has few bytes behind its
        // end, a bomb has many.
        let left = room.bytes.saturating_mul(2).saturating_add(64 << 20);
        Self { inner, hash: Some(Sha256::new()), left }
    }

    pub(super) fn digest(self) -> String {
        self.hash.map(|hash| digest::text(&hash.finalize())).unwrap_or_default()
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.left = self
            .left
            .checked_sub(read as u64)
            .ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        if let Some(hash) = &mut self.hash {
            hash.update(&into[..read]);
        }
        Ok(read)
    }
}
