//! Restores a machine from memory, or boots it on its disks, and gives it its identity and the time.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use sandkeep_proto::link::{Assemble, AssembleMount, Hidden, Identity, Known, Moment, Renew};

use crate::driver::{Driver, DriverError, KeepsMemory, Link, Machine, OwnDisk, Restored, mac_of};
use crate::engine::Result;
use crate::engine::error::error_chain;
use crate::engine::machine::Machines;
use crate::engine::machine::capabilities::Pausing;
use crate::engine::running::live::reach;
use crate::failpoint;
use crate::guest::{Guest, GuestError, ResumeHandshake, ResumedGuest};
use crate::model::Sandbox;

/// How long a kernel may take to boot, where it is emulated and the host is busy.
pub(in crate::engine) const BOOT_WITHIN: Duration = Duration::from_secs(120);
/// How long an agent may take to mount its root.
pub(in crate::engine) const ASSEMBLE_WITHIN: Duration = Duration::from_secs(60);
/// How long an agent may take to find out that it was restored.
const RENEW_WITHIN: Duration = Duration::from_secs(20);
/// By how much a machine's clock may be behind.
const LATE: Duration = Duration::from_millis(250);

/// What a restored machine becomes: itself again, or another sandbox.
pub(in crate::engine) struct RestoreAs {
    /// Absent if it is who it was.
    pub(in crate::engine) identity: Option<Identity>,
    /// Whether its `/etc/machine-id` is another, too.
    pub(in crate::engine) machine_id: bool,
    /// Whether its disks were frozen when it was captured.
    pub(in crate::engine) frozen: bool,
}

/// A machine that resumed, and knows what changed meanwhile.
pub(in crate::engine) struct RestoredMachine {
    pub(in crate::engine) link: Link,
    pub(in crate::engine) guest: Guest,
    /// What is alive in it.
    pub(in crate::engine) commands: Vec<Known>,
}

impl Machines {
    /// Removes all traces of an attempt: nothing of it was reported to anybody.
    pub(in crate::engine) async fn start_over(
        &self,
        driver: &Arc<dyn Driver>,
        machine: &Machine,
        sandbox: &Sandbox,
    ) -> Result<()> {
        driver.stop(&machine.key).await?;
        let drives = sandbox.mounted().iter().map(|mounted| &mounted.layer);
        for layer in sandbox.open_layer().into_iter().chain(drives) {
            self.store.clear_disk(layer).await?;
        }
        Ok(())
    }

    /// Starts a machine from memory in which its root is mounted, and sends it its identity if that
    /// is another.
    pub(in crate::engine) async fn restore_as(
        &self,
        driver: &Arc<dyn Driver>,
        memory: &dyn KeepsMemory,
        machine: &Machine,
        image: &[PathBuf],
        RestoreAs { identity, machine_id, frozen }: RestoreAs,
    ) -> Result<RestoredMachine> {
        let renew = || Renew { now: moment(), identity: identity.clone(), machine_id };
        let mut began = Instant::now();
        let (link, woken) = self.restored(driver, memory, machine, image, Some(renew())).await?;
        let ResumedGuest { guest, commands } = woken;
        let commands = match commands {
            Some(commands) => commands,
            // It did not find what it was to find first.
            None => {
                began = Instant::now();
                let renewed = tokio::time::timeout(RENEW_WITHIN, guest.renew(renew())).await;
                renewed.map_err(|_| GuestError::Timeout)??;
                guest.commands().await?
            }
        };
        self.tell_time(&guest, began).await?;
        if frozen {
            self.thaw_soon(machine, guest.clone());
        }
        Ok(RestoredMachine { link, guest, commands })
    }

    /// Sends a machine the time once more, if it got it long ago: it was on its way for as long as
    /// everything took.
    pub(in crate::engine) async fn tell_time(&self, guest: &Guest, told: Instant) -> Result<()> {
        if told.elapsed() > LATE {
            guest.renew(Renew { now: moment(), identity: None, machine_id: false }).await?;
        }
        Ok(())
    }

    /// Lets a machine write again. No caller waits for it: writers do, for a moment. If the request
    /// is lost, the machine thaws itself ten seconds after it was frozen.
    fn thaw_soon(&self, machine: &Machine, guest: Guest) {
        let key = machine.key.clone();
        self.context.tasks.spawn(async move {
            if let Err(error) = guest.thaw().await {
                tracing::error!(machine = %key, error = error_chain(&error), "the filesystems of a restored VM were not thawed; its agent thaws them later");
            }
        });
    }

    /// Starts a machine from memory and reaches its agent.
    async fn restored(
        &self,
        driver: &Arc<dyn Driver>,
        memory: &dyn KeepsMemory,
        machine: &Machine,
        image: &[PathBuf],
        renew: Option<Renew>,
    ) -> Result<(Link, ResumedGuest)> {
        let began = Instant::now();
        let opening = ResumeHandshake::new(renew)?;
        let first = opening.bytes();
        let started =
            self.start_replacing(driver, machine, || memory.restore(machine, image, first)).await?;
        failpoint::pass("boot.restored");
        let going = began.elapsed();
        let Restored { link, line } = started;
        let patience = self.context.settings.patience;
        let woken = match &link {
            Link::Unix(_) => ResumedGuest {
                guest: reach(&link, patience, self.context.settings.guest).await?,
                commands: None,
            },
            Link::Serial(socket) => {
                let ResumedGuest { guest, commands } =
                    Guest::resume(line, socket, opening, patience).await?;
                ResumedGuest { guest: guest.with_deadlines(self.context.settings.guest), commands }
            }
        };
        tracing::debug!(machine = %machine.key, ?going, woken = ?began.elapsed(), "restored");
        Ok((link, woken))
    }

    pub(in crate::engine) async fn start_from_template(
        &self,
        driver: &Arc<dyn Driver>,
        powers: Pausing<'_>,
        machine: &Machine,
        image: &[PathBuf],
    ) -> Result<(Link, Guest)> {
        let (link, ResumedGuest { guest, .. }) =
            self.restored(driver, powers.memory, machine, image, None).await?;
        self.assemble(powers.disk, machine, &guest).await?;
        Ok((link, guest))
    }

    pub(in crate::engine) async fn boot_machine(
        &self,
        driver: &Arc<dyn Driver>,
        disk: &dyn OwnDisk,
        machine: &Machine,
        image: &[PathBuf],
    ) -> Result<(Link, Guest)> {
        let link = self.start_replacing(driver, machine, || disk.boot(machine, image)).await?;
        let guest = reach(&link, BOOT_WITHIN, self.context.settings.guest).await?;
        self.assemble(disk, machine, &guest).await?;
        Ok((link, guest))
    }

    /// Starts a machine, and one that a pause left behind is ended first.
    pub(in crate::engine) async fn start_replacing<F, T>(
        &self,
        driver: &Arc<dyn Driver>,
        machine: &Machine,
        start: impl Fn() -> F + Send + Sync,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, DriverError>> + Send,
    {
        match start().await {
            Err(DriverError::Alive { .. }) => {
                driver.stop(&machine.key).await?;
                Ok(start().await?)
            }
            outcome => Ok(outcome?),
        }
    }

    pub(in crate::engine) async fn assemble(
        &self,
        disk: &dyn OwnDisk,
        machine: &Machine,
        guest: &Guest,
    ) -> Result<()> {
        let assemble = self.assembly(disk, machine, false).await?;
        let assembled = tokio::time::timeout(ASSEMBLE_WITHIN, guest.assemble(assemble)).await;
        assembled.map_err(|_| GuestError::Timeout)??;
        failpoint::pass("boot.assembled");
        Ok(())
    }

    /// The description of a machine for its agent.
    pub(in crate::engine) async fn assembly(
        &self,
        disk: &dyn OwnDisk,
        machine: &Machine,
        rescue: bool,
    ) -> Result<Assemble> {
        let mounts = machine.mounts.iter().map(|mount| AssembleMount {
            target: mount.target.to_string_lossy().into_owned(),
            lower: !mount.root.lower.is_empty(),
            read_only: mount.read_only,
            owner: mount.owner.clone(),
        });
        Ok(Assemble {
            lower: disk.lower(&machine.key).await?,
            mounts: mounts.collect(),
            identity: identity(machine),
            now: moment(),
            file_size: machine.limits.file_size.0,
            pids: machine.limits.pids,
            rescue,
        })
    }
}

pub(in crate::engine) fn identity(machine: &Machine) -> Identity {
    Identity { hostname: machine.hostname.clone(), mac: mac_of(&machine.key) }
}

/// The time, and fresh randomness.
pub(in crate::engine) fn moment() -> Moment {
    let mut entropy = zeroize::Zeroizing::new([0u8; 64]);
    // The kernel's random source does not fail once the machine is up.
    getrandom::fill(&mut entropy[..]).expect("the kernel gives random bytes");
    let text = zeroize::Zeroizing::new(base64::engine::general_purpose::STANDARD.encode(*entropy));
    let unix_ns = jiff::Timestamp::now().as_nanosecond();
    Moment { unix_ns: u64::try_from(unix_ns).unwrap_or(0), entropy: Hidden::new(&text) }
}
