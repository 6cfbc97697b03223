//! The hypervisor's command line: pure, so that it can be read in a test.
//!
//! What is fixed here is part of what a memory image was made with: a machine is restored by a command line that makes the same
//! devices in the same order. So every machine has all slots, and those with nothing to show are empty.

use std::collections::BTreeMap;
use std::path::PathBuf;

use sandkeep_proto::machine::{
    self, DISK, HOST_SOCKET, LOWER_SLOTS, MOUNT_SLOTS, NET_DIR, NIC_SOCKET, PORT, RAM_AT_FD,
    RAM_FILE, RAM_LATER_FD, RAM_MAP_FD, RAM_PAGES_FD, RAM_SO, SLOT, VmmFile,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::model::MTU;

/// Counts changes of the devices made here: memory captured with other ones is of no use.
pub(crate) const LAYOUT: u32 = 1;
/// Where the confined root has the kernel.
pub(crate) const KERNEL: &str = "/kernel";
/// Where it has the kernel's first filesystem.
pub(crate) const INITRAMFS: &str = "/initramfs";
/// The descriptor of the control socket.
pub(crate) const QMP_FD: u32 = 3;
/// The descriptor of the socket behind the serial port.
pub(crate) const LINK_FD: u32 = 4;
/// Where `ram.so` reports the place it put the RAM at.
const AT_FD: u32 = 5;
/// The map of the RAM.
const MAP_FD: u32 = 6;
/// The socket that the map of the RAM comes over, of one that was started before there was any.
pub(crate) const LATER_FD: u32 = 7;
/// The first of the others.
const FIRST_FD: u32 = 10;
/// How much of what the guest writes to its serial port is kept, the last of it.
const CONSOLE: u32 = 64 << 10;
/// Translated code, in MiB. The hypervisor would take a gigabyte.
const TRANSLATED: u32 = 64;

/// No messages but grave ones; a kernel that panics ends its machine at once; the time stamp counter is the hypervisor's and
/// needs no watching, which would be fooled by a machine that was suspended; one name for the
/// network card.
const KERNEL_LINE: &str = "console=ttyS0 quiet loglevel=3 panic=-1 reboot=t tsc=reliable \
     no_timer_check random.trust_cpu=on net.ifnames=0 rdinit=/init";

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// A translator.
    Tcg,
}

impl Accelerator {
    /// Its name on record.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// How large a machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) accelerator: Accelerator,
    pub(crate) cpus: u32,
    /// Bytes, whole MiB.
    pub(crate) ram: u64,
}

/// A disk: a blank one, and what was written to it, the last on top. Only the last is written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) blank: PathBuf,
    /// Names of their nodes, and files. Never empty.
    pub(crate) written: Vec<(String, PathBuf)>,
}

/// A drive's devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct MountDevices {
    pub(crate) lower: Option<PathBuf>,
    pub(crate) disk: Option<Chain>,
}

/// How a machine begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Beginning {
    /// With its kernel. An emulated machine gets the frequency of the time stamp counter: it has
    /// the host's counter, and measures it badly.
    Boot { tsc_khz: Option<u64> },
    /// With memory: a map of the RAM, and the files it names.
    Memory { map: PathBuf, pages: Vec<PathBuf> },
    /// With memory that it gets later, like its disks.
    Later,
}

/// Everything a machine is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: Shape,
    pub(crate) mac: [u8; 6],
    /// Absent until it is attached.
    pub(crate) disk: Option<Chain>,
    /// Packed layers, the topmost first.
    pub(crate) lower: Vec<PathBuf>,
    pub(crate) mounts: Vec<MountDevices>,
    /// Where `ram.so` writes the address.
    pub(crate) ram_at: PathBuf,
    pub(crate) beginning: Beginning,
}

/// What to run, and the descriptors that must be open for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandLine {
    pub(crate) argv: Vec<String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) files: Vec<VmmFile>,
}

/// At which descriptor the first of the RAM's files is.
const FIRST_PAGES_FD: u32 = 1000;

/// Spells it.
pub(crate) fn command_line(layout: &Layout) -> CommandLine {
    let mut line = Line::default();
    line.machine(&layout.shape, &layout.beginning);
    line.sockets(layout.mac);
    line.disk(DISK, layout.disk.as_ref());
    for number in 0..LOWER_SLOTS {
        line.lower(&machine::lower(number), layout.lower.get(number as usize));
    }
    for number in 0..MOUNT_SLOTS {
        let empty = MountDevices::default();
        let mount = layout.mounts.get(number as usize).unwrap_or(&empty);
        line.lower(&machine::mount_lower(number), mount.lower.as_ref());
        line.disk(&machine::mount_disk(number), mount.disk.as_ref());
    }
    line.files.push(VmmFile { fd: AT_FD, path: layout.ram_at.clone(), write: true });
    let mut env = BTreeMap::from([
        ("LD_PRELOAD".to_owned(), RAM_SO.to_owned()),
        (RAM_AT_FD.to_owned(), AT_FD.to_string()),
    ]);
    match &layout.beginning {
        Beginning::Boot { .. } => {}
        Beginning::Memory { map, pages } => {
            env.insert(RAM_MAP_FD.to_owned(), MAP_FD.to_string());
            env.insert(RAM_PAGES_FD.to_owned(), FIRST_PAGES_FD.to_string());
            line.files.push(VmmFile { fd: MAP_FD, path: map.clone(), write: false });
            for (fd, path) in (FIRST_PAGES_FD..).zip(pages) {
                line.files.push(VmmFile { fd, path: path.clone(), write: false });
            }
        }
        Beginning::Later => {
            env.insert(RAM_LATER_FD.to_owned(), LATER_FD.to_string());
        }
    }
    CommandLine { argv: line.argv, env, files: line.files }
}

/// What a device of a machine shows that was started without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceSlot {
    /// The device.
    pub(crate) serial: String,
    /// What it shows is called.
    pub(crate) node: String,
    /// Files, the lowest first: bytes as they are, and what was written over them, each over the one before.
    pub(crate) files: Vec<PathBuf>,
    /// Whether the last of them is written to.
    pub(crate) write: bool,
}

impl DeviceSlot {
    /// How it is described, with the files in these sets of descriptors. All in one piece and as
    /// short as possible: a hypervisor reads its input byte by byte. A lower disk inherits from the
    /// one above that it is read-only.
    pub(crate) fn options(&self, sets: &[u64]) -> Value {
        let file = |set: &u64| json!({"driver": "file", "filename": format!("/dev/fdset/{set}"), "locking": "off"});
        let mut shown = Value::Null;
        for set in sets {
            shown = match shown {
                Value::Null => file(set),
                below => json!({"driver": "qcow2", "file": file(set), "backing": below}),
            };
        }
        shown["node-name"] = json!(self.node);
        match self.write {
            true => shown["discard"] = json!("unmap"),
            false => shown["read-only"] = json!(true),
        }
        shown
    }
}

/// The devices that a machine started without disks has to be given; such a machine never has
/// drives.
pub(crate) fn slots(layout: &Layout) -> Vec<DeviceSlot> {
    let mut slots = Vec::new();
    if let Some(Chain { blank, written }) = &layout.disk {
        let node = written.last().map(|(node, _)| node.clone()).unwrap_or_default();
        let written = written.iter().map(|(_, path)| path.clone());
        let files = std::iter::once(blank.clone()).chain(written).collect();
        slots.push(DeviceSlot { serial: DISK.to_owned(), node, files, write: true });
    }
    for (number, path) in (0..LOWER_SLOTS).zip(&layout.lower) {
        let (serial, files) = (machine::lower(number), vec![path.clone()]);
        slots.push(DeviceSlot { node: serial.clone(), serial, files, write: false });
    }
    slots
}

/// A file, by a descriptor: the hypervisor has no path to it.
fn file_options(node: &str, filename: &str, write: bool) -> Value {
    // The driver makes sure that nothing else writes to it; locks would be in the way of forks.
    let mut options = json!({
        "driver": "file", "node-name": node, "filename": filename, "read-only": !write,
        "locking": "off",
    });
    if write {
        options["discard"] = json!("unmap");
    }
    options
}

fn written_options(node: &str, file: &Value, below: &str, write: bool) -> Value {
    let mut options = json!({
        "driver": "qcow2", "node-name": node, "file": file, "backing": below, "read-only": !write,
    });
    if write {
        options["discard"] = json!("unmap");
    }
    options
}

#[derive(Default)]
struct Line {
    argv: Vec<String>,
    files: Vec<VmmFile>,
}

impl Line {
    fn put(&mut self, words: &[&str]) {
        self.argv.extend(words.iter().map(|word| (*word).to_owned()));
    }

    fn machine(&mut self, shape: &Shape, beginning: &Beginning) {
        let Shape { accelerator, cpus, ram } = shape;
        let (accel, cpu) = match accelerator {
            Accelerator::Kvm => ("kvm".to_owned(), "host"),
            Accelerator::Tcg => (format!("tcg,thread=multi,tb-size={TRANSLATED}"), "max"),
        };
        self.put(&["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-nographic"]);
        self.put(&["-no-reboot", "-sandbox"]);
        self.put(&["on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]);
        // The second interrupt controller is for the devices: one has room for eight.
        self.put(&[
            "-M",
            "microvm,acpi=on,ioapic2=on,rtc=on,pit=on,pic=on,isa-serial=on,memory-backend=ram",
        ]);
        self.put(&["-accel", &accel, "-cpu", cpu, "-smp", &cpus.to_string()]);
        self.put(&["-m", &format!("{}M", ram >> 20), "-object"]);
        self.put(&[&format!("memory-backend-file,id=ram,mem-path={RAM_FILE},size={ram},share=on")]);
        // For one that is restored a kernel has to be named, too, or a part of the firmware would be missing that the captured
        // machine had. It is in memory already.
        self.put(&["-kernel", KERNEL, "-append"]);
        // Either way it is suspended until the driver has looked at it.
        if let Beginning::Boot { tsc_khz } = beginning {
            let tsc = tsc_khz.map_or_else(String::new, |khz| format!(" tsc_early_khz={khz}"));
            self.put(&[&format!("{KERNEL_LINE}{tsc}"), "-initrd", INITRAMFS, "-S"]);
        } else {
            self.put(&[KERNEL_LINE, "-incoming", "defer"]);
        }
    }

    fn sockets(&mut self, mac: [u8; 6]) {
        let socket = |id: &str, fd: u32| format!("socket,id={id},fd={fd},server=on,wait=off");
        self.put(&["-chardev", &socket("qmp", QMP_FD), "-mon", "chardev=qmp,mode=control"]);
        self.put(&["-chardev", &format!("ringbuf,id=console,size={CONSOLE}")]);
        self.put(&["-serial", "chardev:console", "-chardev", &socket("link", LINK_FD)]);
        self.put(&["-device", "virtio-serial-device,max_ports=2"]);
        self.put(&["-device", &format!("virtserialport,nr=1,chardev=link,name={PORT}")]);
        let (local, remote) =
            (format!("/{NET_DIR}/{NIC_SOCKET}"), format!("/{NET_DIR}/{HOST_SOCKET}"));
        self.put(&["-netdev"]);
        self.put(&[&format!(
            "dgram,id=net,local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"
        )]);
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        self.put(&["-device", &format!("virtio-net-device,netdev=net,mac={mac},host_mtu={MTU}")]);
        self.put(&["-device", "virtio-rng-device"]);
    }

    /// A read-only device.
    fn lower(&mut self, serial: &str, file: Option<&PathBuf>) {
        let node = match file {
            Some(path) => {
                self.file(serial, path, false);
                serial.to_owned()
            }
            None => self.nothing(serial, true),
        };
        self.device(serial, &node);
    }

    /// A device that can be written to, or that could be.
    fn disk(&mut self, serial: &str, chain: Option<&Chain>) {
        let Some(Chain { blank, written }) = chain else {
            let node = self.nothing(serial, false);
            return self.device(serial, &node);
        };
        let mut below = format!("{serial}-blank");
        self.file(&below, blank, false);
        for (place, (node, path)) in written.iter().enumerate() {
            let (last, file) = (place + 1 == written.len(), format!("{node}-file"));
            self.file(&file, path, last);
            self.node(&written_options(node, &json!(file), &below, last));
            below.clone_from(node);
        }
        self.device(serial, &below);
    }

    fn file(&mut self, node: &str, path: &std::path::Path, write: bool) {
        let fd = FIRST_FD + u32::try_from(self.files.len()).unwrap_or(u32::MAX);
        self.files.push(VmmFile { fd, path: path.to_owned(), write });
        self.put(&["-add-fd", &format!("fd={fd},set={fd}")]);
        self.node(&file_options(node, &format!("/dev/fdset/{fd}"), write));
    }

    /// What a slot shows that has nothing to show.
    fn nothing(&mut self, serial: &str, read_only: bool) -> String {
        let node = format!("no-{serial}");
        self.node(&json!({
            "driver": "null-co", "node-name": node, "size": SLOT, "read-zeroes": true, "read-only": read_only,
        }));
        node
    }

    fn node(&mut self, options: &Value) {
        self.put(&["-blockdev", &options.to_string()]);
    }

    fn device(&mut self, serial: &str, node: &str) {
        self.put(&[
            "-device",
            // The guest gets an error when the host's disk is full. It would stop otherwise, and
            // nobody would know why.
            &format!(
                "virtio-blk-device,id={serial},drive={node},serial={serial},werror=report,rerror=report"
            ),
        ]);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use super::{
        Accelerator, Beginning, Chain, CommandLine, Layout, MountDevices, Shape, command_line,
        slots,
    };

    fn layout() -> Layout {
        let chain = |name: &str| Chain {
            blank: PathBuf::from("/cache/blank"),
            written: vec![
                (format!("{name}-0"), PathBuf::from("/image/disk.qcow2")),
                (format!("{name}-1"), PathBuf::from("/session/0.qcow2")),
            ],
        };
        Layout {
            shape: Shape { accelerator: Accelerator::Tcg, cpus: 2, ram: 256 << 20 },
            mac: [2, 0, 0, 0, 0, 9],
            disk: Some(chain("s")),
            lower: vec![PathBuf::from("/cache/a.erofs"), PathBuf::from("/cache/b.erofs")],
            mounts: vec![
                MountDevices {
                    lower: Some(PathBuf::from("/cache/c.erofs")),
                    disk: Some(chain("m")),
                },
                MountDevices { lower: Some(PathBuf::from("/cache/d.erofs")), disk: None },
            ],
            ram_at: PathBuf::from("/run/ram.at"),
            beginning: Beginning::Boot { tsc_khz: Some(2_000_000) },
        }
    }

    fn shape_of(line: &CommandLine) -> Vec<&String> {
        line.argv
            .iter()
            .filter(|word| word.starts_with("virtio-") || word.starts_with("virtser"))
            .collect()
    }

    #[test]
    fn every_machine_has_the_same_devices() {
        let full = layout();
        let mut empty = layout();
        empty.lower.clear();
        empty.mounts.clear();
        let names = |line: &CommandLine| -> Vec<String> {
            shape_of(line)
                .into_iter()
                .map(|word| word.split(",drive=").next().unwrap().to_owned())
                .collect()
        };
        let (full, empty) = (command_line(&full), command_line(&empty));
        assert_eq!(names(&full), names(&empty));
        assert_eq!(names(&full).len(), 1 + 8 + 8 + 4, "{:?}", names(&full));
    }

    #[test]
    fn only_the_top_of_a_disk_can_be_written() {
        let line = command_line(&layout());
        let writable: Vec<_> =
            line.files.iter().filter(|file| file.write).map(|file| &file.path).collect();
        assert_eq!(
            writable.iter().filter(|path| !path.ends_with("ram.at")).collect::<Vec<_>>(),
            [&&PathBuf::from("/session/0.qcow2"), &&PathBuf::from("/session/0.qcow2")]
        );
        let numbers: BTreeSet<_> = line.files.iter().map(|file| file.fd).collect();
        assert_eq!(numbers.len(), line.files.len(), "no descriptor is given twice");
        assert!(
            line.argv.iter().all(|word| !word.contains("/cache") && !word.contains("/session"))
        );
    }

    #[test]
    fn a_machine_waits_for_the_driver_whether_it_boots_or_is_restored() {
        let mut layout = layout();
        assert!(command_line(&layout).argv.contains(&"-S".to_owned()));
        let pages = vec![PathBuf::from("/image/pages")];
        layout.beginning = Beginning::Memory { map: PathBuf::from("/run/map"), pages };
        let line = command_line(&layout);
        assert!(line.argv.contains(&"defer".to_owned()) && !line.argv.contains(&"-S".to_owned()));
        assert_eq!(line.files.last().map(|file| file.fd), Some(1000));
        assert_eq!(line.env["SANDKEEP_RAM_MAP"], "6");
        assert_eq!(line.env["SANDKEEP_RAM_PAGES"], "1000");
    }

    #[test]
    fn one_that_is_told_later_has_the_same_devices_and_is_told_the_same_disks() {
        let mut known = layout();
        known.mounts.clear();
        let later =
            Layout { disk: None, lower: Vec::new(), beginning: Beginning::Later, ..known.clone() };
        let devices = |layout: &Layout| -> Vec<String> {
            let line = command_line(layout);
            let bare = |word: &&String| word.split(",drive=").next().unwrap().to_owned();
            shape_of(&line).iter().map(bare).collect()
        };
        assert_eq!(devices(&later), devices(&known));
        let files = command_line(&later).files;
        assert_eq!(files.len(), 1, "nothing is open but where its RAM is told: {files:?}");
        let known_files: BTreeSet<_> = command_line(&known)
            .files
            .into_iter()
            .filter(|file| !file.path.ends_with("ram.at"))
            .map(|file| (file.path, file.write))
            .collect();
        let told: BTreeSet<_> = slots(&known)
            .into_iter()
            .flat_map(|slot| {
                let last = slot.files.len() - 1;
                let files = slot.files.into_iter().enumerate();
                files.map(move |(at, path)| (path, slot.write && at == last))
            })
            .collect();
        assert_eq!(told, known_files);
    }

    #[test]
    fn a_disk_is_told_in_one_piece() {
        let told = slots(&layout());
        assert_eq!(
            told[0].options(&[4, 5, 6]).to_string(),
            r#"{"backing":{"backing":{"driver":"file","filename":"/dev/fdset/4","locking":"off"},"driver":"qcow2","file":{"driver":"file","filename":"/dev/fdset/5","locking":"off"}},"discard":"unmap","driver":"qcow2","file":{"driver":"file","filename":"/dev/fdset/6","locking":"off"},"node-name":"s-1"}"#
        );
        assert_eq!(
            told[1].options(&[7]).to_string(),
            r#"{"driver":"file","filename":"/dev/fdset/7","locking":"off","node-name":"lower-0","read-only":true}"#
        );
    }
}
