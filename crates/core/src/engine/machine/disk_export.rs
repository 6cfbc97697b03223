//! Exports what a machine wrote from its disks into layers.
//!
//! What a machine of its own writes is on a disk that only its own kernel may read (`docs/MICROVM.md`). At the end of a
//! session the agent hands it over, and from there on it is a layer like any other. A machine that is gone or does not
//! answer is booted once more on its disks, for that alone.
//!
//! *What a guest says is not believed, and not waited for without end.* How much may come is bounded by what its disk can hold
//! (`store::fill`), and how long that may take by how much has come: it may pause for a minute, and
//! the time spent waiting for it may not be more than two minutes and a second for each MiB. What
//! the host itself takes to unpack is not counted. A live machine that is beyond a bound is ended
//! and booted once more, with an agent it has not touched. If the agent dies there in the middle of the
//! export, the machine is booted yet another time; if that fails as well the sandbox is `failed`, with
//! the reason, and its disk stays: the stop can be tried again, or what was written be discarded. A
//! machine that is booted for this has at least [`RESCUE_MEMORY`], because what was written may be
//! more to walk through than what the sandbox's own memory has room for.
//!
//! The store seals no layer whose disk is still there, and removes the disk only when all of it is in the layer: a daemon that
//! dies at any point finds one or the other, and comes this way again.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::driver::Machine;
use crate::engine::error::error_chain;
use crate::engine::machine::Machines;
use crate::engine::machine::restore::{ASSEMBLE_WITHIN, BOOT_WITHIN};
use crate::engine::running::live::{RunningSandbox, reach};
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::guest::{Guest, GuestError, Incoming};
use crate::model::{LayerId, Limits, MemoryLayer, MountMode, Sandbox, Size};
use crate::store::{StoreError, export_limit};

/// How long an exporting agent may send nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// How long it may be waited for in all, before anything has come.
const BEFORE: Duration = Duration::from_secs(120);
/// How many bytes earn it another second.
const PER_SECOND: u64 = 64 << 10;

/// The least memory of a machine that is booted to export its files, and how often one is booted.
const RESCUE_MEMORY: Size = Size(512 << 20);
const RESCUES: u32 = 2;

impl Machines {
    /// What is on disks and is to be kept: the part's number and its layer. Nothing, if the session
    /// was to be discarded.
    pub(in crate::engine) fn on_disks(
        &self,
        sandbox: &Sandbox,
        keep: bool,
    ) -> Result<Vec<(u32, LayerId)>> {
        let root = sandbox.open_layer().filter(|_| keep).map(|open| (0, open.clone()));
        let drives = (1..).zip(sandbox.mounted());
        let drives = drives.filter(|(_, mounted)| {
            mounted.mode == MountMode::ReadWrite && !sandbox.decision().discard
        });
        let mut parts = Vec::new();
        for (part, layer) in
            root.into_iter().chain(drives.map(|(n, mounted)| (n, mounted.layer.clone())))
        {
            if self.store.has_disk(&layer)? {
                parts.push((part, layer));
            }
        }
        Ok(parts)
    }

    /// Takes it out of a machine that lives and in which only the agent does.
    pub(in crate::engine) async fn hand_over(
        &self,
        live: &RunningSandbox,
        sandbox: &Sandbox,
        keep: bool,
    ) -> Result<()> {
        let parts = self.on_disks(sandbox, keep)?;
        if !parts.is_empty() {
            self.export(&live.guest().await?, sandbox, parts).await?;
        }
        Ok(())
    }

    async fn export(
        &self,
        guest: &Guest,
        sandbox: &Sandbox,
        parts: Vec<(u32, LayerId)>,
    ) -> Result<()> {
        for (part, layer) in parts {
            let incoming = guest.export(part).await?;
            let most = self.most_of(sandbox, part, &layer).await?;
            self.store.import_disk(&layer, Export::of(incoming), most).await?;
            failpoint::pass("export.filled");
        }
        Ok(())
    }

    /// The most that a part can come to.
    async fn most_of(&self, sandbox: &Sandbox, part: u32, layer: &LayerId) -> Result<u64> {
        let mut bytes = self.store.length_of_disk(layer)?;
        let mounted = usize::try_from(part).ok().and_then(|part| part.checked_sub(1));
        let limit = match mounted.and_then(|number| sandbox.mounted().get(number)) {
            Some(mounted) => {
                self.db.drive_by_id(&mounted.drive).await?.map_or(0, |drive| drive.max_size.0)
            }
            None => {
                for below in sandbox.open_memory() {
                    // Of one that cannot be read, what its disk could be: that is no reason to keep files from being had.
                    let about = self.store.read::<MemoryLayer>(below).await.ok();
                    let disk = about.and_then(|about| about.disk().map(|(_, size)| size));
                    bytes = bytes.saturating_add(disk.unwrap_or(sandbox.config.resources.disk.0));
                }
                sandbox.config.resources.disk.0
            }
        };
        Ok(export_limit(limit, bytes))
    }

    /// Takes it out of the disks of a machine that is gone.
    pub(in crate::engine) async fn export_by_rescue_boot(
        &self,
        sandbox: &Sandbox,
        keep: bool,
    ) -> Result<()> {
        for _ in 1..RESCUES {
            match self.rescue(sandbox, keep).await {
                Err(Error::Store(error @ StoreError::ExportLost { .. })) => {
                    tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "the export of a VM broke off; it is booted again");
                }
                outcome => return outcome,
            }
        }
        self.rescue(sandbox, keep).await
    }

    async fn rescue(&self, sandbox: &Sandbox, keep: bool) -> Result<()> {
        let parts = self.on_disks(sandbox, keep)?;
        let Some((_, layer)) = parts.first() else { return Ok(()) };
        let driver = self.context.driver(&sandbox.config.driver)?;
        let Some(disk) = driver.disk() else {
            return Err(StoreError::OnDisk { id: layer.clone() }.into());
        };
        tracing::warn!(sandbox = %sandbox.name, "a VM is booted again to export its files");
        let image = self.store.check_disks(sandbox.open_memory()).await?;
        let scratch = self.store.data_dir().join("tmp").join(format!("rescue-{}", sandbox.id));
        let machine = only(self.machine(sandbox)?, &parts, &scratch);
        let _few = self.boots.acquire().await;
        let work = async {
            let link = disk.boot(&machine, &image).await?;
            failpoint::pass("rescue.booted");
            let guest = reach(&link, BOOT_WITHIN, self.context.settings.guest).await?;
            let assemble = self.assembly(disk, &machine, true).await?;
            let assembled = tokio::time::timeout(ASSEMBLE_WITHIN, guest.assemble(assemble)).await;
            assembled.map_err(|_| GuestError::Timeout)??;
            self.export(&guest, sandbox, parts).await
        };
        let outcome = work.await;
        let down = driver.stop(&machine.key).await;
        // What is left of it goes when a daemon starts.
        let _ = tokio::fs::remove_dir_all(&scratch).await;
        outcome?;
        down?;
        Ok(())
    }
}

/// The machine for a rescue of these parts. Others were handed over before, or are given up: none of them gets a disk in its layer
/// again, which the next rescue would take for what was written.
fn only(machine: Machine, parts: &[(u32, LayerId)], scratch: &Path) -> Machine {
    let wanted = |part: u32| parts.iter().any(|(wanted, _)| *wanted == part);
    let Machine { mut root, mut mounts, .. } = machine.clone();
    if !wanted(0) {
        root.writable_dir = scratch.to_owned();
    }
    for (part, mount) in (1..).zip(&mut mounts) {
        mount.read_only |= !wanted(part);
    }
    let memory = machine.limits.memory.max(RESCUE_MEMORY);
    let limits = Limits { memory, ..machine.limits };
    Machine { root, mounts, limits, ..machine }
}

/// An agent's export, to be read. It ends only where the agent marks its end.
struct Export {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    rest: Bytes,
    over: bool,
    /// Receives from the agent. Dropping this ends the task, and the agent is notified.
    _receiving: AbortOnDropHandle<()>,
}

impl Export {
    fn of(mut incoming: Incoming) -> Self {
        let (sender, pieces) = mpsc::channel(16);
        let receiving = AbortOnDropHandle::new(tokio::spawn(async move {
            let mut pace = Pace::default();
            loop {
                let began = Instant::now();
                let piece = tokio::time::timeout(pace.patience(), incoming.next()).await;
                pace.waited += began.elapsed();
                let piece = match piece {
                    Ok(Ok(Some(bytes))) if bytes.is_empty() => continue,
                    Ok(Ok(Some(bytes))) => {
                        pace.received += bytes.len() as u64;
                        Ok(bytes)
                    }
                    // No bytes: that was all.
                    Ok(Ok(None)) => Ok(Bytes::new()),
                    Ok(Err(error)) => {
                        let lost = io::ErrorKind::ConnectionAborted;
                        Err(io::Error::new(lost, error.to_string()))
                    }
                    Err(_) => Err(pace.lost()),
                };
                let last = piece.as_ref().map_or(true, Bytes::is_empty);
                if sender.send(piece).await.is_err() || last {
                    return;
                }
            }
        }));
        Self { pieces, rest: Bytes::new(), over: false, _receiving: receiving }
    }
}

/// How long somebody who hands over was waited for, and for how much.
#[derive(Debug, Default)]
struct Pace {
    waited: Duration,
    received: u64,
}

impl Pace {
    /// How much longer it may be waited for now.
    fn patience(&self) -> Duration {
        let all = BEFORE + Duration::from_secs(self.received / PER_SECOND);
        all.saturating_sub(self.waited).min(SILENCE)
    }

    fn lost(&self) -> io::Error {
        let (waited, received) = (self.waited.as_secs(), self.received);
        let told = format!("it stands still, or is too slow: {received} bytes in {waited} s");
        io::Error::new(io::ErrorKind::TimedOut, told)
    }
}

impl AsyncRead for Export {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.rest.is_empty() && !self.over {
            match self.pieces.poll_recv(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(bytes))) => {
                    self.over = bytes.is_empty();
                    self.rest = bytes;
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                Poll::Ready(None) => {
                    return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                }
            }
        }
        let count = self.rest.len().min(into.remaining());
        into.put_slice(&self.rest[..count]);
        self.rest.advance(count);
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tokio::io::AsyncReadExt as _;
    use tokio::sync::mpsc;
    use tokio_util::task::AbortOnDropHandle;

    use super::{BEFORE, Export, PER_SECOND, Pace, SILENCE};

    #[test]
    fn nobody_is_waited_for_without_end() {
        let mut pace = Pace::default();
        let mut rounds = 0;
        // A byte right before each deadline.
        while !pace.patience().is_zero() {
            pace.waited += pace.patience().min(SILENCE);
            pace.received += 1;
            rounds += 1;
            assert!(rounds < 10);
        }
        assert_eq!(pace.waited, BEFORE);
        assert!(pace.lost().to_string().contains("bytes in 120 s"), "{}", pace.lost());
        // A fast stream has all the time it takes, but may not pause.
        pace.received = 600 * PER_SECOND;
        assert_eq!(pace.patience(), SILENCE);
    }

    fn export(pieces: Vec<std::io::Result<&'static [u8]>>) -> Export {
        let (sender, receiver) = mpsc::channel(8);
        for piece in pieces {
            sender.try_send(piece.map(Bytes::from_static)).unwrap();
        }
        let receiving = AbortOnDropHandle::new(tokio::spawn(async {}));
        Export { pieces: receiver, rest: Bytes::new(), over: false, _receiving: receiving }
    }

    #[tokio::test]
    async fn what_breaks_off_is_not_taken_for_all() {
        let mut all = Vec::new();
        export(vec![Ok(b"ab"), Ok(b"c"), Ok(b"")]).read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"abc");
        let cut = export(vec![Ok(b"ab")]).read_to_end(&mut all).await.unwrap_err();
        assert_eq!(cut.kind(), std::io::ErrorKind::UnexpectedEof);
        let lost = vec![Ok(&b"ab"[..]), Err(std::io::ErrorKind::TimedOut.into())];
        assert!(export(lost).read_to_end(&mut all).await.is_err());
    }
}
