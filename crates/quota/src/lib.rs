//! Project quotas: the kernel's own limit on the space of a directory and everything made below it.
//!
//! ext4 (feature `project`, mounted with `prjquota`) and XFS (mounted with `pquota`) have them. A directory is given a *project*, a
//! number that everything made in it inherits; the filesystem counts blocks and inodes for each project, those of files
//! that were removed and are still open included, and refuses what goes beyond the project's limit: `EDQUOT` on ext4, `ENOSPC` on XFS.
//!
//! A crate of its own because there is no safe wrapper for these calls, and the engine has no unsafe code. All of it is here.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// What a project may take, or takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Bytes of blocks.
    pub bytes: u64,
    /// Inodes: files, directories, links and all else that has a number.
    pub inodes: u64,
}

/// A project's use and its limit; a limit of zero is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Project {
    /// What it takes.
    pub used: Amount,
    /// What it may take.
    pub limit: Amount,
}

/// `struct fsxattr` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct FsXattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

/// `struct if_dqblk` of `linux/quota.h`.
#[repr(C)]
#[derive(Default)]
struct IfDqblk {
    block_hard: u64,
    block_soft: u64,
    space: u64,
    inode_hard: u64,
    inode_soft: u64,
    inodes: u64,
    block_time: u64,
    inode_time: u64,
    valid: u32,
}

/// `struct fs_quota_statv` of `linux/dqblk_xfs.h`, as far as it is read.
#[repr(C)]
struct FsQuotaStatv {
    version: i8,
    pad: u8,
    flags: u16,
    rest: [u64; 24],
}

const FSGETXATTR: libc::Ioctl = 0x801c_581f_u32 as libc::Ioctl;
const FSSETXATTR: libc::Ioctl = 0x401c_5820_u32 as libc::Ioctl;
/// What is made in the directory belongs to its project.
const PROJINHERIT: u32 = 0x200;

const PRJQUOTA: u32 = 2;
const GETQUOTA: u32 = 0x80_0007;
const SETQUOTA: u32 = 0x80_0008;
const XGETQSTATV: u32 = 0x5808;
/// The limits of blocks and inodes are given.
const LIMITS: u32 = 5;
/// The limits of projects are enforced.
const PROJECTS_ENFORCED: u16 = 1 << 5;
/// The unit of the limit of blocks.
const BLOCK: u64 = 1024;

/// Whether the filesystem of `on` counts what projects take and enforces their limits.
///
/// # Errors
///
/// Fails where it has no quotas, or the caller is not the host's root.
pub fn is_enforced(on: BorrowedFd<'_>) -> io::Result<bool> {
    let mut state = FsQuotaStatv { version: 1, pad: 0, flags: 0, rest: [0; 24] };
    quotactl(on, XGETQSTATV, 0, &raw mut state)?;
    Ok(state.flags & PROJECTS_ENFORCED != 0)
}

/// The project that what is made in a directory belongs to, if it has one.
///
/// # Errors
///
/// Fails where the filesystem knows no projects.
pub fn project_of(directory: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let found = attributes(directory)?;
    Ok((found.xflags & PROJINHERIT != 0 && found.projid != 0).then_some(found.projid))
}

/// Puts a directory, and what is made in it from now on, into a project.
///
/// # Errors
///
/// Fails where the filesystem knows no projects, or the caller is not the host's root.
pub fn set_project(directory: BorrowedFd<'_>, project: u32) -> io::Result<()> {
    let mut wanted = attributes(directory)?;
    wanted.xflags |= PROJINHERIT;
    wanted.projid = project;
    // SAFETY: the kernel reads a `struct fsxattr`, which lives for the call.
    let done = unsafe { libc::ioctl(directory.as_raw_fd(), FSSETXATTR, &raw const wanted) };
    check(done.into())
}

/// Limits a project on the filesystem of `on`.
///
/// # Errors
///
/// Fails where the filesystem does not count what projects take, or the caller is not the host's root.
pub fn set_limit(on: BorrowedFd<'_>, project: u32, limit: Amount) -> io::Result<()> {
    let mut block = IfDqblk {
        // None would be no limit at all.
        block_hard: (limit.bytes / BLOCK).max(1),
        inode_hard: limit.inodes.max(1),
        valid: LIMITS,
        ..IfDqblk::default()
    };
    quotactl(on, SETQUOTA, project, &raw mut block)
}

/// What a project takes on the filesystem of `on`, and may.
///
/// # Errors
///
/// Fails where the filesystem does not count what projects take, or the caller is not the host's root.
pub fn look_up(on: BorrowedFd<'_>, project: u32) -> io::Result<Project> {
    let mut block = IfDqblk::default();
    match quotactl(on, GETQUOTA, project, &raw mut block) {
        // XFS knows only projects that something was ever in.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(Project::default()),
        looked => looked?,
    }
    let limit = Amount { bytes: block.block_hard.saturating_mul(BLOCK), inodes: block.inode_hard };
    Ok(Project { used: Amount { bytes: block.space, inodes: block.inodes }, limit })
}

fn attributes(directory: BorrowedFd<'_>) -> io::Result<FsXattr> {
    let mut found = FsXattr::default();
    // SAFETY: the kernel writes a `struct fsxattr`, which lives for the call.
    check(unsafe { libc::ioctl(directory.as_raw_fd(), FSGETXATTR, &raw mut found) }.into())?;
    Ok(found)
}

/// `about` is what the kernel reads or writes for `command`, as the callers here pair them.
fn quotactl<T>(on: BorrowedFd<'_>, command: u32, id: u32, about: *mut T) -> io::Result<()> {
    let command = (command << 8) | PRJQUOTA;
    // SAFETY: `about` is of the type that goes with the command, and lives for the call.
    check(unsafe { libc::syscall(libc::SYS_quotactl_fd, on.as_raw_fd(), command, id, about) })
}

fn check(answer: libc::c_long) -> io::Result<()> {
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::{FsQuotaStatv, FsXattr, IfDqblk};

    #[test]
    fn structures_are_as_large_as_the_kernels() {
        assert_eq!(size_of::<FsXattr>(), 28);
        assert_eq!(size_of::<IfDqblk>(), 72);
        // 160 bytes in the kernel; what is larger here is never written to.
        assert!(size_of::<FsQuotaStatv>() >= 160);
    }
}
