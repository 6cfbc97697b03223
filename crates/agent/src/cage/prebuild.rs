//! A cage that is begun before it is assigned to a sandbox.
//!
//! The namespaces, the network device and the system call filter are the same in every cage, and take half of the time that one takes to
//! build. So `keep-agent cage ahead` makes them first and then waits for what to build:
//!
//! ```text
//! builder                                    first process
//!
//!  clone with new namespaces  ----------->   raise the loopback, make the network device,
//!  wait on standard input                    write the system call filter
//!     (the driver keeps both waiting)        wait at the gate
//!  read what to build
//!  lock, listen, copy mounts,
//!  make base layers, write the maps,
//!  shift owners,
//!  write machine.json
//!  open the gate: the plan and all
//!  descriptors in one message  ---------->   join the control groups, then as always
//! ```
//!
//! Nothing of it has a name before that: no directory, no control group, no user ids. The mount namespace comes last: it would keep
//! every filesystem of the host mounted that the host unmounts meanwhile. If the driver ends, or has no use for it any more,
//! standard input ends and both processes do. Under version 2 a process must be born in its control group, so there only the
//! builder is started ahead.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::pipe::PipeFlags;
use sandkeep_proto::cage::{Cage, MOST_MOUNTS_AHEAD, Record};

use super::{
    OPEN_THE_GATE, Raised, Step, StepError, abandon, checked_plan, claim, drives, finish, grant,
    hear, inside, owner, root, sys,
};

const WAIT: &str = "wait for the builder";
/// The most descriptors of a plan: control groups, listeners, and two for each stack of layers.
const DESCRIPTORS: usize = 16 + 2 * (1 + MOST_MOUNTS_AHEAD);

/// Begins a cage, waits for its description, and builds it.
pub(super) fn raise() -> Result<Raised, StepError> {
    let (gate, key) = UnixStream::pair().step("make a socket")?;
    let (news, teller) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")?;
    let namespaces = sys::NAMESPACES & !libc::CLONE_NEWNS;
    match owner::split_as_owner(namespaces, None).step("make the namespaces")? {
        sys::Side::Child => {
            drop((key, news));
            Ok(Raised::Inside(inside::enter_prebuilt(gate, teller)))
        }
        sys::Side::Parent { child } => {
            drop((gate, teller));
            let mut claimed = None;
            let outcome = complete(child, key, news, &mut claimed);
            if outcome.is_err() {
                abandon(claimed.as_deref(), child);
            }
            outcome.map(Raised::Outside)
        }
    }
}

/// Waits for the plan and does the builder's part of it. Says which runtime directory is its own from then on.
fn complete(
    child: u32,
    key: UnixStream,
    news: OwnedFd,
    claimed: &mut Option<PathBuf>,
) -> Result<Record, StepError> {
    let cage = checked_plan()?;
    // Not released before this process exits.
    std::mem::forget(claim(&cage)?);
    *claimed = Some(cage.run_dir.clone());
    finish(
        || {
            let listeners = (super::listen(&cage.run_dir)?, super::network::listen()?);
            let mounts = root::Mounts::copy(&cage.root)?;
            let drives = drives::Drives::copy(&cage.mounts)?;
            let inside::Groups::V1(groups) = inside::Groups::open(&cage.cgroup)? else {
                return Err(StepError::new(
                    "join the control groups",
                    "a process is born in one of version 2",
                ));
            };
            let record = grant(&cage, child, (&mounts, &drives))?;
            let mut all: Vec<BorrowedFd<'_>> = vec![listeners.0.as_fd(), listeners.1.as_fd()];
            all.extend(mounts.descriptors());
            all.extend(drives.descriptors());
            all.extend(groups.iter().map(AsFd::as_fd));
            send(&key, &cage, &all).step(OPEN_THE_GATE)?;
            drop(key);
            Ok(record)
        },
        || hear(news),
    )
}

fn send(gate: &UnixStream, cage: &Cage, descriptors: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let text = serde_json::to_vec(cage)?;
    let length = (text.len() as u64).to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(std::io::Error::other("too many descriptors"));
    }
    rustix::net::sendmsg(gate, &[IoSlice::new(&length)], &mut control, SendFlags::NOSIGNAL)?;
    let mut gate = gate;
    gate.write_all(&text)
}

/// What the first process is sent.
pub(super) struct Opened {
    pub(super) cage: Cage,
    pub(super) listeners: (UnixListener, UnixListener),
    pub(super) mounts: root::Mounts,
    pub(super) drives: drives::Drives,
    pub(super) groups: inside::Groups,
}

/// Waits until the builder knows what to build. When it dies before that, so does this process.
pub(super) fn wait(gate: UnixStream) -> Result<Opened, StepError> {
    let (length, descriptors) = receive(&gate).step(WAIT)?;
    let mut text = Vec::new();
    (&gate).take(length).read_to_end(&mut text).step(WAIT)?;
    let cage: Cage = serde_json::from_slice(&text).step(WAIT)?;
    let mut descriptors = descriptors.into_iter();
    let mut next =
        || descriptors.next().ok_or_else(|| StepError::new(WAIT, "descriptors are missing"));
    let listeners = (next()?.into(), next()?.into());
    let mounts = root::Mounts::from([next()?, next()?]);
    let mut each = Vec::new();
    for _ in &cage.mounts {
        each.push(root::Mounts::from([next()?, next()?]));
    }
    let groups = inside::Groups::V1(descriptors.collect());
    Ok(Opened { cage, listeners, mounts, drives: drives::Drives::from(each), groups })
}

fn receive(gate: &UnixStream) -> std::io::Result<(u64, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut length = [0; 8];
    let mut into = [IoSliceMut::new(&mut length)];
    let got = rustix::net::recvmsg(gate, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes != length.len() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    let sent = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors = sent.flatten().collect();
    Ok((u64::from_le_bytes(length), descriptors))
}
