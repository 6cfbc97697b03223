//! The lifecycle of a machine: start, stop, survivors, network.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags};
use sandkeep_proto::cage::Record;
use sandkeep_proto::machine::{
    HOST_SOCKET, MOUNT_SLOTS, NET_DIR, NIC_SOCKET, QMP_SOCKET, RAM_AT, RAM_SOCKET, SLOT, SOCKET,
    VERSION, Vmm, VmmFile, VmmShown, VmmSocket,
};
use serde_json::json;

use super::disk::packed_layers::PackedLayers;
use super::disk::{self, DiskSpec, qcow2};
use super::memory;
use super::qemu::{
    self, Accelerator, Beginning, INITRAMFS, KERNEL, LATER_FD, LINK_FD, Layout, MountDevices,
    QMP_FD, Qmp,
};
use super::{MachinePlan, Microvm, NAME, PLAN};
use crate::driver::host::{WARM_HYPERVISOR, broken, connect, failed, lock};
use crate::driver::{
    Device, DriverError, DriverResult, Link, Machine, MachineMount, MachineUsage, Restored, mac_of,
};
use crate::model::{Limits, MachineKey};

/// How long a hypervisor may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(20);
/// Where a hypervisor's own messages go: a pipe, which holds the first of them and drops the rest.
pub(super) const LOG: &str = "log";
/// The map of the RAM of a machine that was restored.
const MAP: &str = "ram.map";
/// Directories of the root in which every machine has something mounted.
const OWN: [&str; 4] = ["proc", "sys", "dev", "run"];

/// How a machine begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// With its kernel.
    Boot,
    /// Where an image was captured.
    Restore,
}

/// What was prepared for a machine.
pub(super) struct Prepared {
    pub(super) layout: Layout,
    pub(super) plan: MachinePlan,
}

/// Whose a hypervisor is.
pub(super) struct MachineOwner<'a> {
    pub(super) key: &'a MachineKey,
    pub(super) hostname: &'a str,
    pub(super) uid: u32,
    pub(super) limits: &'a Limits,
}

impl Microvm {
    pub(super) fn start(
        &self,
        machine: &Machine,
        image: &[PathBuf],
        first: &[u8],
        how: Start,
        accelerator: Accelerator,
    ) -> DriverResult<Restored> {
        let key = &machine.key;
        check_mounts(&machine.mounts)?;
        let lock = self.host.claim(key)?;
        let mut made = Vec::new();
        let started = self.prepare(machine, image, how, accelerator, &mut made).and_then(
            |prepared| match self.use_warm(machine, image, first, &prepared)? {
                Some(line) => Ok(line),
                None => self.run(machine, image, first, &prepared),
            },
        );
        match started {
            Ok(line) => Ok(Restored { link: self.link(key), line }),
            Err(error) => {
                // The caller needs the cause of the failure; the next start, stop or survivors
                // clears any leftovers of this one.
                let _ = self.end(key);
                // Of one whose hypervisor did not come up.
                let _ = self.host.groups.remove(key);
                for disk in made {
                    let _ = fs::remove_file(&disk);
                    let _ = disk.parent().map(fs::remove_dir);
                }
                drop(lock);
                Err(error)
            }
        }
    }

    fn prepare(
        &self,
        machine: &Machine,
        image: &[PathBuf],
        how: Start,
        accelerator: Accelerator,
        made: &mut Vec<PathBuf>,
    ) -> DriverResult<Prepared> {
        let run_dir = self.host.directory(&machine.key);
        let limits = &machine.limits;
        let fingerprint = self.fingerprint(limits, accelerator)?;
        let lower = self.layers.of_root(&machine.root)?;
        let disk = disk::assemble(&DiskSpec {
            cache: &self.config.cache_dir,
            helpers: &self.helpers,
            directory: &machine.root.disk_dir(),
            image,
            size: Self::disk_size(limits),
            as_captured: how == Start::Restore,
            name: "disk",
        })?;
        made.extend(disk.made.iter().cloned());
        let mut mounts = Vec::new();
        for (number, mount) in machine.mounts.iter().enumerate() {
            mounts.push(self.mount(number, mount, made)?);
        }
        let beginning = match how {
            Start::Boot => Beginning::Boot {
                tsc_khz: match accelerator {
                    Accelerator::Tcg => self.tsc_khz(),
                    Accelerator::Kvm => None,
                },
            },
            Start::Restore => {
                let read =
                    memory::map_of(image).map_err(|error| broken("read the image", &error))?;
                let map = run_dir.join(MAP);
                fs::write(&map, read.write()).map_err(failed("write", &map))?;
                Beginning::Memory { map, pages: read.files }
            }
        };
        let packed = lower.iter().chain(mounts.iter().filter_map(|mount| mount.lower.as_ref()));
        let roots = packed.map(|path| PackedLayers::mark(path)).collect::<DriverResult<_>>()?;
        let plan = MachinePlan {
            fingerprint,
            lower: u32::try_from(lower.len()).unwrap_or(u32::MAX),
            roots,
            disk_dir: machine.root.disk_dir(),
            image: image.len(),
            restored: how == Start::Restore,
            used_before: Duration::ZERO,
        };
        let layout = Layout {
            shape: Self::shape(limits, accelerator),
            mac: mac_of(&machine.key),
            disk: Some(disk.chain),
            lower,
            mounts,
            ram_at: run_dir.join(RAM_AT),
            beginning,
        };
        Ok(Prepared { layout, plan })
    }

    fn mount(
        &self,
        number: usize,
        mount: &MachineMount,
        made: &mut Vec<PathBuf>,
    ) -> DriverResult<MountDevices> {
        let lower = self.layers.of_drive(&mount.root)?;
        if mount.read_only {
            return Ok(MountDevices { lower, disk: None });
        }
        let disk = disk::assemble(&DiskSpec {
            cache: &self.config.cache_dir,
            helpers: &self.helpers,
            directory: &mount.root.disk_dir(),
            image: &[],
            size: SLOT,
            as_captured: false,
            name: &format!("mount-{number}"),
        })?;
        made.extend(disk.made);
        Ok(MountDevices { lower, disk: Some(disk.chain) })
    }

    /// Launches the hypervisor and sets the machine going.
    fn run(
        &self,
        machine: &Machine,
        image: &[PathBuf],
        first: &[u8],
        prepared: &Prepared,
    ) -> DriverResult<UnixStream> {
        let Machine { key, hostname, uids, limits, .. } = machine;
        let run_dir = self.host.directory(key);
        let owner = MachineOwner { key, hostname, uid: uids.base, limits };
        let (log, launched) = self.hypervisor_of(&owner, &prepared.layout)?;
        let going = launched.and_then(|(mut qmp, mut line)| {
            if let (true, Some(top)) = (prepared.plan.restored, image.first()) {
                qmp.await_machine()?;
                load(&mut qmp, &top.join("devices"))?;
            }
            line.write_all(first)?;
            set_going(&mut qmp, &run_dir, &prepared.plan)?;
            Ok(line)
        });
        going.map_err(|error| {
            let step =
                if prepared.plan.restored { "restore the machine" } else { "boot the machine" };
            broken(step, &said(log, &error))
        })
    }

    /// Launches a hypervisor, and takes away from it what it needed to start. Answers with its messages, and with
    /// connections to its control socket and to the machine's serial port.
    pub(super) fn hypervisor_of(
        &self,
        owner: &MachineOwner<'_>,
        layout: &Layout,
    ) -> DriverResult<(File, io::Result<(Qmp, UnixStream)>)> {
        let run_dir = self.host.directory(owner.key);
        let log = open_log(&run_dir.join(LOG))?;
        self.host.agent("vmm", || self.describe(owner, layout))?;
        let launched = Qmp::connect(&run_dir).and_then(|qmp| {
            // It has bound its socket by now, and has no business in there any more.
            let net = run_dir.join(NET_DIR);
            chown(&net, Some(0), Some(0))?;
            fs::set_permissions(&net, Permissions::from_mode(0o711))?;
            let directory = File::open(&run_dir)?;
            let short = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
            Ok((qmp, connect(&short, CONNECT)?))
        });
        Ok((log, launched))
    }

    fn describe(&self, owner: &MachineOwner<'_>, layout: &Layout) -> DriverResult<Vmm> {
        let run_dir = self.host.directory(owner.key);
        let kernel = self.kernel()?;
        let mut line = qemu::command_line(layout);
        line.files.push(VmmFile { fd: 2, path: run_dir.join(LOG), write: true });
        let shown = match layout.beginning {
            Beginning::Boot { .. } => vec![(kernel.vmlinuz, KERNEL), (kernel.initramfs, INITRAMFS)],
            Beginning::Memory { .. } | Beginning::Later => vec![(kernel.head, KERNEL)],
        };
        let socket = |(fd, name)| VmmSocket { fd, path: run_dir.join(name) };
        let is_spare = layout.beginning == Beginning::Later;
        let limits = Self::limits(owner.limits, &layout.shape);
        Ok(Vmm {
            version: VERSION,
            hostname: owner.hostname.to_owned(),
            program: self.config.qemu.clone(),
            argv: line.argv,
            env: line.env,
            files: line.files,
            sockets: [(QMP_FD, QMP_SOCKET), (LINK_FD, SOCKET)].map(socket).to_vec(),
            calls: is_spare.then(|| socket((LATER_FD, RAM_SOCKET))).into_iter().collect(),
            devices: match layout.shape.accelerator {
                Accelerator::Kvm => vec![PathBuf::from("/dev/kvm")],
                Accelerator::Tcg => Vec::new(),
            },
            shown: shown.into_iter().map(|(path, at)| VmmShown { path, at: at.into() }).collect(),
            ram_so: self.ram_so.clone(),
            file_size: largest_file(owner.limits, layout),
            uid: owner.uid,
            gid: owner.uid,
            cgroup: self.host.groups.create(owner.key, &limits)?,
            group: is_spare.then(|| owner.key.as_str().to_owned()),
            run_dir,
        })
    }

    pub(super) fn link(&self, key: &MachineKey) -> Link {
        Link::Serial(self.host.directory(key).join(SOCKET))
    }

    /// The machine, if it lives.
    pub(super) fn demand(&self, key: &MachineKey) -> DriverResult<(Record, MachinePlan, OwnedFd)> {
        let absent = || DriverError::Absent { key: key.clone() };
        let (record, process) = self.host.alive(key).ok_or_else(absent)?;
        Ok((record, self.plan(key).ok_or_else(absent)?, process))
    }

    /// What a machine is, of one that was set going.
    pub(super) fn plan(&self, key: &MachineKey) -> Option<MachinePlan> {
        let text = fs::read(self.host.directory(key).join(PLAN)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    pub(super) fn stop(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let _lock = lock(&self.host.directory(key), FlockOperation::LockExclusive)?;
        self.end(key)
    }

    /// Ends whatever there is of a machine.
    fn end(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        if let Some((_, process)) = self.host.alive(key) {
            self.host.kill(key, &process)?;
        }
        let usage = self.usage(key);
        self.host.clear(key)?;
        Ok(usage)
    }

    pub(super) fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>> {
        let mut alive = Vec::new();
        for key in self.host.survivors()? {
            if let Some(prober) = super::probe::prober(&key) {
                // Tried out by a program that did not live to end it.
                if !Path::new("/proc").join(prober).exists() {
                    self.stop(&key)?;
                    let _ = fs::remove_dir_all(self.config.cache_dir.join(format!(".{key}")));
                }
                continue;
            }
            if key.as_str().starts_with(WARM_HYPERVISOR) {
                // Another driver's, which is gone: there is one for a directory.
                if !self.warm.is_ours(&key) {
                    self.stop(&key)?;
                }
                continue;
            }
            let Some(_lock) = lock(&self.host.directory(&key), FlockOperation::LockExclusive)?
            else {
                continue;
            };
            if self.demand(&key).is_ok() {
                let link = self.link(&key);
                alive.push((key, link));
            } else {
                // Launched by a daemon that did not live to set it going.
                self.end(&key)?;
            }
        }
        Ok(alive)
    }

    pub(super) fn network(&self, key: &MachineKey) -> DriverResult<Device> {
        self.demand(key)?;
        let path = self.host.directory(key).join(NET_DIR);
        let socket = dial(&path).map_err(failed("reach the network card at", &path))?;
        Ok(Device::Ethernet { socket: socket.into(), mac: mac_of(key) })
    }

    pub(super) fn go_on(&self, key: &MachineKey) -> DriverResult<()> {
        let run_dir = self.host.directory(key);
        let going = Qmp::connect(&run_dir).and_then(|mut qmp| {
            if !qmp.is_running()? {
                qmp.ask("cont", json!({}))?;
            }
            Ok(())
        });
        going.map_err(|error| broken("let the machine go on", &error))
    }
}

/// Lets a machine run, after it was put down what it is.
pub(super) fn set_going(qmp: &mut Qmp, run_dir: &Path, plan: &MachinePlan) -> io::Result<()> {
    fs::write(run_dir.join(PLAN), serde_json::to_vec(plan)?)?;
    qmp.ask("cont", json!({})).map(drop)
}

/// Loads the state of the devices, onto RAM that exists already.
pub(super) fn load(qmp: &mut Qmp, devices: &Path) -> io::Result<()> {
    use std::os::fd::AsFd as _;
    let file = File::open(devices)?;
    qmp.ask_with("getfd", json!({"fdname": "devices"}), file.as_fd())?;
    qmp.ask("migrate-incoming", json!({"uri": "fd:devices"}))?;
    qmp.migrated()
}

/// Binds the host's end of the network, which the hypervisor sends to by its name, and connects it to the card's.
fn dial(net: &Path) -> io::Result<UnixDatagram> {
    // Not by the path itself: it may be longer than a socket's address can be.
    let directory = File::open(net)?;
    let short = |name: &str| format!("/proc/self/fd/{}/{name}", directory.as_raw_fd());
    match fs::remove_file(short(HOST_SOCKET)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixDatagram::bind(short(HOST_SOCKET))?;
    // Only the hypervisor can reach it: the directory above is closed.
    fs::set_permissions(short(HOST_SOCKET), Permissions::from_mode(0o666))?;
    socket.connect(short(NIC_SOCKET))?;
    socket.set_nonblocking(true)?;
    // Best effort: a few of the largest frames at once.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, 1 << 20);
    Ok(socket)
}

/// Makes the pipe for the hypervisor's messages and opens its other end, so that what it says survives it.
fn open_log(path: &Path) -> DriverResult<File> {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
        .map_err(|error| failed("make", path)(error.into()))?;
    fs::OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(failed("open", path))
}

/// Why a machine did not start: the hypervisor's output, or else the error that was noticed.
fn said(log: File, error: &io::Error) -> String {
    let mut text = Vec::new();
    let _ = log.take(8192).read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text);
    let text = text.trim();
    if text.is_empty() {
        error.to_string()
    } else {
        format!("{error}; the hypervisor said: {text}")
    }
}

/// How large a file may become by a hypervisor's hand: the largest disk it writes to, with its tables and what a crash may have left
/// unused in it; or as large as the RAM, which it believes to be in a file. A hypervisor that gets
/// its disks later gets none that is larger than its limits allow.
fn largest_file(limits: &Limits, layout: &Layout) -> u64 {
    let disk = largest_disk(layout).max(Microvm::disk_size(limits));
    (disk + disk / 16 + (64 << 20)).max(layout.shape.ram)
}

/// How large the largest disk is that a machine writes to.
pub(super) fn largest_disk(layout: &Layout) -> u64 {
    let drives = layout.mounts.iter().filter_map(|mount| mount.disk.as_ref());
    let tops = drives.chain(&layout.disk).filter_map(|chain| chain.written.last());
    // One that does not read is refused by the hypervisor.
    tops.filter_map(|(_, top)| qcow2::size(top).ok()).max().unwrap_or(0)
}

/// Checks what can be known about drives before the machine knows its root. The agent checks the
/// rest.
fn check_mounts(mounts: &[MachineMount]) -> DriverResult<()> {
    let refuse = |reason: String| Err(DriverError::MountPoint { reason });
    if mounts.len() > MOUNT_SLOTS as usize {
        return refuse(format!("a machine of the {NAME} driver has room for {MOUNT_SLOTS}"));
    }
    for MachineMount { target, .. } in mounts {
        let shown = target.display();
        let mut parts = target.components().filter(|part| !matches!(part, Component::RootDir));
        if parts.clone().any(|part| !matches!(part, Component::Normal(_))) {
            return refuse(format!("`{shown}` is not a plain path"));
        }
        match parts.next() {
            None => return refuse(format!("`{shown}` is the root itself")),
            Some(first) if OWN.iter().any(|own| first.as_os_str() == *own) => {
                return refuse(format!("`{shown}` is the machine's own"));
            }
            Some(_) => {}
        }
    }
    Ok(())
}
