//! Answers the kernel's requests for the disk's file.
//!
//! The file is called `disk-<generation>`. Every power-on is a generation of its own, and requests for an
//! older one fail: so a filesystem that was mounted before a cut, and that someone still holds, can never
//! write into the state after it.
//!
//! No thread ever waits in here: a request that hangs is put aside with its reply.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, WriteFlags,
};

use parking_lot::{Mutex, MutexGuard};

use super::medium::{Cut, Medium};
use super::protocol::{DiskRequest, Fault, FaultId, Outcome, Stats};

const ROOT: u64 = 1;
/// The inode of the first generation.
const FIRST: u64 = 2;
/// How long the kernel may remember attributes, which never change.
const FOREVER: Duration = Duration::from_secs(3600);

/// What the file's name begins with; its generation follows.
const PREFIX: &str = "disk-";

/// The disk, shared by the threads that serve it and the one that controls it.
#[derive(Debug, Clone)]
pub(super) struct Service(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    medium: Medium,
    /// The generation that is answered.
    generation: u64,
    /// Whether it is answered, too: not between a cut and the next power-on.
    powered: bool,
    faults: Vec<Active>,
    hanging: Vec<(FaultId, Job)>,
    stats: Stats,
    next_fault: u64,
}

#[derive(Debug)]
struct Active {
    id: FaultId,
    fault: Fault,
    until: Option<Instant>,
}

/// A request with its reply.
#[derive(Debug)]
enum Job {
    Read { offset: u64, length: usize, reply: ReplyData },
    Write { offset: u64, data: Vec<u8>, reply: ReplyWrite },
    Flush { reply: ReplyEmpty },
}

impl Service {
    pub(super) fn new(medium: Medium) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            medium,
            generation: 0,
            powered: false,
            faults: Vec::new(),
            hanging: Vec::new(),
            stats: Stats::default(),
            next_fault: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock()
    }

    /// Begins a new generation without faults, and returns the name of its file.
    pub(super) fn power_on(&self) -> String {
        let mut inner = self.lock();
        inner.heal(|_| true);
        inner.generation += 1;
        inner.powered = true;
        format!("{PREFIX}{}", inner.generation)
    }

    /// Stops answering, for good in this generation.
    pub(super) fn power_off(&self) {
        let mut inner = self.lock();
        inner.powered = false;
        inner.heal(|_| true);
    }

    /// Stops answering, and loses a part of what was not flushed.
    pub(super) fn cut(&self, seed: u64) -> io::Result<Cut> {
        let mut inner = self.lock();
        inner.powered = false;
        inner.heal(|_| true);
        inner.medium.cut(seed)
    }

    pub(super) fn inject(&self, fault: Fault) -> FaultId {
        let mut inner = self.lock();
        let id = FaultId(inner.next_fault);
        inner.next_fault += 1;
        let until = fault.lasts.map(|time| Instant::now() + time);
        inner.faults.push(Active { id, fault, until });
        id
    }

    pub(super) fn heal(&self, which: impl Fn(FaultId) -> bool) {
        self.lock().heal(which);
    }

    /// Ends the faults whose time is over.
    pub(super) fn expire(&self) {
        let mut inner = self.lock();
        let now = Instant::now();
        let over = |active: &&Active| active.until.is_some_and(|until| until <= now);
        let over: Vec<FaultId> = inner.faults.iter().filter(over).map(|active| active.id).collect();
        if !over.is_empty() {
            inner.heal(|id| over.contains(&id));
        }
    }

    pub(super) fn stats(&self) -> Stats {
        let inner = self.lock();
        let (hanging, unflushed) = (inner.hanging.len() as u64, inner.medium.unflushed() as u64);
        Stats { hanging, unflushed, ..inner.stats }
    }

    fn submit(&self, inode: INodeNo, job: Job) {
        let mut inner = self.lock();
        match inode.0 == FIRST + inner.generation {
            true => inner.submit(job),
            false => job.fail(),
        }
    }

    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let inner = self.lock();
        let file = match inode.0 {
            ROOT => false,
            other if (FIRST..=FIRST + inner.generation).contains(&other) => true,
            _ => return None,
        };
        let size = if file { inner.medium.size() } else { 0 };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if file { FileType::RegularFile } else { FileType::Directory },
            perm: if file { 0o600 } else { 0o700 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Inner {
    fn submit(&mut self, job: Job) {
        match job.operation() {
            DiskRequest::Read => self.stats.reads += 1,
            DiskRequest::Write => self.stats.writes += 1,
            DiskRequest::Flush => self.stats.flushes += 1,
        }
        self.carry_out(job);
    }

    fn carry_out(&mut self, job: Job) {
        if !self.powered {
            job.fail();
            return;
        }
        let Some(active) = self.faults.iter_mut().find(|active| active.hits(&job)) else {
            job.perform(&mut self.medium);
            return;
        };
        active.fault.times = active.fault.times.map(|times| times.saturating_sub(1));
        match active.fault.outcome {
            Outcome::Fail => {
                self.stats.failed += 1;
                job.fail();
            }
            Outcome::Hang => self.hanging.push((active.id, job)),
        }
    }

    fn heal(&mut self, which: impl Fn(FaultId) -> bool) {
        self.faults.retain(|active| !which(active.id));
        let hanging = std::mem::take(&mut self.hanging);
        let (released, hanging): (Vec<_>, Vec<_>) =
            hanging.into_iter().partition(|(id, _)| which(*id));
        self.hanging = hanging;
        for (_, job) in released {
            self.carry_out(job);
        }
    }
}

impl Active {
    fn hits(&self, job: &Job) -> bool {
        let fault = &self.fault;
        let touches = |(start, end): (u64, u64)| {
            job.range().is_none_or(|(from, to)| from < end && start < to)
        };
        fault.operations.contains(&job.operation())
            && fault.times != Some(0)
            && self.until.is_none_or(|until| Instant::now() < until)
            && fault.region.is_none_or(touches)
            && fault.content.as_ref().is_none_or(|bytes| job.contains(bytes))
    }
}

impl Job {
    const fn operation(&self) -> DiskRequest {
        match self {
            Self::Read { .. } => DiskRequest::Read,
            Self::Write { .. } => DiskRequest::Write,
            Self::Flush { .. } => DiskRequest::Flush,
        }
    }

    /// The bytes of the disk it is about.
    const fn range(&self) -> Option<(u64, u64)> {
        match self {
            Self::Read { offset, length, .. } => Some((*offset, *offset + *length as u64)),
            Self::Write { offset, data, .. } => Some((*offset, *offset + data.len() as u64)),
            Self::Flush { .. } => None,
        }
    }

    fn contains(&self, bytes: &[u8]) -> bool {
        match self {
            Self::Write { data, .. } => {
                !bytes.is_empty() && data.windows(bytes.len()).any(|window| window == bytes)
            }
            Self::Read { .. } | Self::Flush { .. } => false,
        }
    }

    fn perform(self, medium: &mut Medium) {
        match self {
            Self::Read { offset, length, reply } => match medium.read(offset, length) {
                Ok(data) => reply.data(&data),
                Err(_) => reply.error(Errno::EIO),
            },
            Self::Write { offset, data, reply } => {
                let length = u32::try_from(data.len()).unwrap_or(0);
                match medium.write(offset, data) {
                    Ok(()) => reply.written(length),
                    Err(_) => reply.error(Errno::EIO),
                }
            }
            Self::Flush { reply } => match medium.flush() {
                Ok(()) => reply.ok(),
                Err(_) => reply.error(Errno::EIO),
            },
        }
    }

    fn fail(self) {
        match self {
            Self::Read { reply, .. } => reply.error(Errno::EIO),
            Self::Write { reply, .. } => reply.error(Errno::EIO),
            Self::Flush { reply } => reply.error(Errno::EIO),
        }
    }
}

impl Filesystem for Service {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Requests that hang must leave room for others.
        let _ = config.set_max_background(4096);
        let _ = config.set_max_write(1 << 20);
        // Without it the loop device's one thread waits for every single write.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let number = number.and_then(|text| text.parse::<u64>().ok());
        let inode = number.filter(|_| parent.0 == ROOT).map(|number| INodeNo(FIRST + number));
        match inode.and_then(|inode| self.attributes(inode)) {
            Some(attributes) => reply.entry(&FOREVER, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let length = usize::try_from(size).unwrap_or(usize::MAX);
        self.submit(inode, Job::Read { offset, length, reply });
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.submit(inode, Job::Write { offset, data: data.to_vec(), reply });
    }

    fn flush(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Means that a descriptor was closed, not that anything is to be durable.
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.submit(inode, Job::Flush { reply });
    }

    fn fallocate(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        _length: u64,
        _mode: i32,
        reply: ReplyEmpty,
    ) {
        // No discard, and zeros are written like all else.
        reply.error(Errno::EOPNOTSUPP);
    }
}
