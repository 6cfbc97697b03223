//! A machine under QEMU, started by the test itself: what the agent is inside of one is tested without any driver.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sandkeep_core::guest::Guest;
use sandkeep_proto::link::{Assemble, Hidden, Identity, Moment, Renew};
use sandkeep_proto::machine;
use sandkeep_testkit::microvm::Prepared;
use tempfile::TempDir;

/// How long a machine may take for anything: it may be emulated, on a busy host.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// The files of one machine. They outlive it, so that another can be started on them.
pub(crate) struct Files {
    pub(crate) dir: TempDir,
    kernel: Prepared,
    /// Serials, files, and whether they are written to.
    disks: Vec<(String, PathBuf, bool)>,
}

impl Files {
    pub(crate) fn new(kernel: Prepared) -> Self {
        let dir = tempfile::Builder::new().prefix("keep-machine-").tempdir().expect("a directory");
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("our own");
        Self { dir, kernel, disks: Vec::new() }
    }

    /// A device that shows a directory.
    pub(crate) fn lower(&mut self, serial: &str, tree: &Path) {
        let image = self.dir.path().join(format!("{}.erofs", self.disks.len()));
        run(Command::new("mkfs.erofs").arg("-x1").arg(&image).arg(tree));
        let file = File::options().write(true).open(&image).expect("just made");
        file.set_len(machine::SLOT).expect("a hole");
        self.disks.push((serial.to_owned(), image, false));
    }

    /// Gives a device another serial.
    pub(crate) fn rename(&mut self, from: &str, to: &str) {
        for (serial, ..) in self.disks.iter_mut().filter(|(serial, ..)| serial == from) {
            to.clone_into(serial);
        }
    }

    /// A device with an empty filesystem of `bytes` bytes.
    pub(crate) fn disk(&mut self, serial: &str, bytes: u64) {
        let image = self.dir.path().join(format!("{serial}.ext4"));
        File::create(&image).and_then(|file| file.set_len(bytes)).expect("a hole");
        let options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0", "-E", options]).arg(&image));
        self.disks.push((serial.to_owned(), image, true));
    }

    pub(crate) fn boot(&self) -> Machine {
        let link = self.dir.path().join(machine::SOCKET);
        let _ = fs::remove_file(&link);
        let log = File::create(self.dir.path().join("log")).expect("our own directory");
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-M", "microvm,acpi=on,rtc=on,pit=on,pic=on,isa-serial=on,ioapic2=on"]);
        qemu.args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "256"]);
        qemu.args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot"]);
        qemu.arg("-kernel").arg(&self.kernel.kernel.vmlinuz);
        qemu.arg("-initrd").arg(&self.kernel.kernel.initramfs);
        let khz = self.kernel.tsc_khz;
        qemu.arg("-append")
            .arg(format!("console=ttyS0 quiet reboot=t panic=-1 tsc=reliable tsc_early_khz={khz}"));
        qemu.args(["-serial", "stdio", "-device", "virtio-rng-device"]);
        qemu.args(["-netdev", "hubport,hubid=0,id=net"]);
        qemu.args(["-device", "virtio-net-device,netdev=net,host_mtu=65521"]);
        qemu.args(["-device", "virtio-serial-device,max_ports=2", "-chardev"]);
        qemu.arg(option("socket,id=link,server=on,wait=off,path=", &link));
        qemu.args(["-device", "virtserialport,chardev=link,name=link"]);
        for (serial, image, write) in &self.disks {
            let access = if *write { "off" } else { "on" };
            qemu.arg("-blockdev");
            let node = format!(
                "driver=raw,node-name={serial},read-only={access},file.driver=file,file.filename="
            );
            qemu.arg(option(&node, image));
            qemu.arg("-device").arg(format!("virtio-blk-device,drive={serial},serial={serial}"));
        }
        qemu.stdin(Stdio::null()).stderr(log.try_clone().expect("a descriptor")).stdout(log);
        Machine { qemu: qemu.spawn().expect("QEMU starts"), link, log: self.dir.path().join("log") }
    }
}

fn option(start: &str, path: &Path) -> OsString {
    let mut option = OsString::from(start);
    option.push(path);
    option
}

fn run(command: &mut Command) {
    let ran = command.stdin(Stdio::null()).output().expect("it runs");
    assert!(ran.status.success(), "{command:?}: {}", String::from_utf8_lossy(&ran.stderr));
}

/// A machine that runs.
pub(crate) struct Machine {
    qemu: Child,
    pub(crate) link: PathBuf,
    log: PathBuf,
}

impl Machine {
    pub(crate) async fn connect(&mut self) -> Guest {
        match Guest::connect_serial(&self.link, PATIENCE).await {
            Ok(guest) => guest,
            Err(error) => panic!("{error}; {:?}; it said:\n{}", self.qemu.try_wait(), self.log()),
        }
    }

    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until the machine has ended by itself.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.qemu.try_wait().expect("our own child") {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "it did not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

pub(crate) fn now() -> Moment {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let unix_ns = u64::try_from(since.as_nanos()).expect("before 2554");
    Moment { unix_ns, entropy: Hidden::new(&"QUJD".repeat(21)) }
}

pub(crate) fn identity(hostname: &str, last: u8) -> Identity {
    Identity { hostname: hostname.to_owned(), mac: [2, 0, 0, 0, 0, last] }
}

pub(crate) fn assemble(lower: u32) -> Assemble {
    Assemble {
        lower,
        mounts: Vec::new(),
        identity: identity("first", 1),
        now: now(),
        file_size: 1 << 30,
        pids: 200,
        rescue: false,
    }
}

pub(crate) fn renew(identity: Option<Identity>) -> Renew {
    Renew { now: now(), identity, machine_id: true }
}
