//! Extended attributes: which are kept of an entry, and what this host does not take.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::Form;
use super::stream::{ArchiveEntry, TarKind};
use crate::store::image::attributes::{Carrier, keeps_exported_xattr, keeps_xattr};

/// The extended attributes that are kept of an entry.
pub(super) fn wanted(entry: &ArchiveEntry, form: Form) -> impl Iterator<Item = &(String, Vec<u8>)> {
    let carrier = match entry.kind {
        TarKind::Directory => Carrier::Directory,
        TarKind::File if entry.size == 0 => Carrier::EmptyFile,
        _ => Carrier::Other,
    };
    entry.xattrs.iter().filter(move |(name, value)| match form {
        Form::Upper => keeps_exported_xattr(name, value, carrier),
        Form::Layer | Form::Root => keeps_xattr(name),
    })
}

/// How many extended attributes an entry has, and will not have here, that a program could have set.
pub(super) fn unwanted(entry: &ArchiveEntry, form: Form) -> u64 {
    let of_programs = |(name, _): &&(String, Vec<u8>)| !name.starts_with("user.overlay.");
    let kept = wanted(entry, form).filter(of_programs).count();
    (entry.xattrs.iter().filter(of_programs).count() - kept) as u64
}

/// Sets them on a file, and returns how many this host does not support.
pub(super) fn give_xattrs<'a>(
    file: BorrowedFd<'_>,
    xattrs: impl Iterator<Item = &'a (String, Vec<u8>)>,
) -> io::Result<u64> {
    let mut refused = 0;
    for (name, value) in xattrs {
        let outcome = rustix::fs::fsetxattr(file, name.as_str(), value, XattrFlags::empty());
        refused += u64::from(!taken(outcome)?);
    }
    Ok(refused)
}

/// Whether an attribute was taken; `false` if it is of a sort that the kernel or the filesystem here does not know.
pub(super) fn taken(outcome: rustix::io::Result<()>) -> io::Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::PERM | Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
