//! Control groups: what a machine may use, and what it has used.
//!
//! Both versions are in the field. Version 2 is one tree with every controller; version 1 is a tree
//! per controller. A *hybrid* host mounts both, with the controllers we need on the version 1 side,
//! and is treated as version 1. Which one this host has is read from its mounts, once.
//!
//! A machine has one group (version 2) or one per controller (version 1), named by its key below the
//! driver's own group. Its processes cannot make groups below that: inside, only the machine's own groups are mounted, and
//! read-only.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use sandkeep_proto::cage::Cgroup;

use rustix::process::{Pid, PidfdFlags, Signal};

use super::failed;
use crate::driver::{DriverError, DriverResult, MachineLoad, MachineUsage};
use crate::model::{Limits, MachineKey, Size};

/// The version 1 trees a machine has a group in.
const V1: [&str; 5] = ["cpu", "cpuacct", "memory", "pids", "freezer"];
/// The version 1 tree a machine has a group in where the host has that tree. Nothing is limited by it, but the JVM reads no limit at all
/// unless it is mounted.
const CPUSET: &str = "cpuset";
/// What a new group of [`CPUSET`] has none of. Until it does, no process can join it.
const CPUSET_FILES: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];
/// The version 2 controllers that must be there.
const V2: [&str; 3] = ["cpu", "memory", "pids"];
/// The part of a machine's memory that its sockets may queue on top of it, under version 1, and the least of it. Version 2
/// counts what sockets queue with all other memory; version 1 has a counter of its own for TCP and UDP, and without a limit on that
/// one sandbox can use up what the host has for the sockets of all (`net.ipv4.tcp_mem`).
const SOCKETS: u64 = 4;
const SOCKETS_AT_LEAST: u64 = 4 << 20;
/// The span over which CPU time is rationed.
const PERIOD_US: u64 = 100_000;
/// How long the kernel may take to freeze a group, or to release an empty one.
const PATIENCE: Duration = Duration::from_secs(10);

/// This host's control groups, and our place in them.
#[derive(Debug, Clone)]
pub(crate) struct Cgroups {
    trees: Trees,
    parent: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Trees {
    /// Where each controller of [`V1`] is mounted, and [`CPUSET`] if it is.
    V1(BTreeMap<&'static str, PathBuf>),
    /// Where the one tree is mounted.
    V2(PathBuf),
}

impl Cgroups {
    /// Finds out what this host has for `driver`.
    pub(crate) fn find(driver: &'static str, parent: &str) -> DriverResult<Self> {
        let mounts = Path::new("/proc/self/mountinfo");
        let text = fs::read_to_string(mounts).map_err(failed("read", mounts))?;
        let has = |root: &Path| {
            let listed = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
            V2.iter().all(|wanted| listed.split_whitespace().any(|name| name == *wanted))
        };
        let trees =
            trees(&text, has).map_err(|reason| DriverError::Unsupported { driver, reason })?;
        Ok(Self { trees, parent: parent.to_owned() })
    }

    /// Whether a process must be born in its group: moving it there takes milliseconds.
    pub(crate) fn are_born_in(&self) -> bool {
        matches!(self.trees, Trees::V2(_))
    }

    /// Says in a few words what was found.
    pub(crate) fn describe(&self) -> String {
        match &self.trees {
            Trees::V1(trees) => {
                let names: Vec<&str> = trees.keys().copied().collect();
                format!("version 1, with {}", names.join(", "))
            }
            Trees::V2(root) => format!("version 2 at {}", root.display()),
        }
    }

    /// Makes a machine's group, with its limits set.
    pub(crate) fn create(&self, key: &MachineKey, limits: &Limits) -> DriverResult<Cgroup> {
        self.make(key)?;
        let quota = u64::from(limits.millicpus) * PERIOD_US / 1000;
        let memory = limits.memory.0.to_string();
        match &self.trees {
            Trees::V1(trees) => {
                self.fill_cpuset(key)?;
                let [cpu, _, memory_at, pids, _] = V1.map(|name| self.v1(name, key));
                write(&cpu.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
                write(&cpu.join("cpu.cfs_quota_us"), &quota.to_string())?;
                write(&memory_at.join("memory.limit_in_bytes"), &memory)?;
                // Memory and swap together: no swap on top. Absent where the kernel has no swap.
                write_if_there(&memory_at.join("memory.memsw.limit_in_bytes"), &memory)?;
                let sockets = (limits.memory.0 / SOCKETS).max(SOCKETS_AT_LEAST).to_string();
                // Absent where the kernel was built without.
                write_if_there(&memory_at.join("memory.kmem.tcp.limit_in_bytes"), &sockets)?;
                write(&pids.join("pids.max"), &limits.pids.to_string())?;
                let group = |name: &&str| ((*name).to_owned(), self.v1(name, key));
                Ok(Cgroup::V1(trees.keys().map(group).collect()))
            }
            Trees::V2(_) => {
                let group = self.any(key);
                write(&group.join("cpu.max"), &format!("{quota} {PERIOD_US}"))?;
                write(&group.join("memory.max"), &memory)?;
                write_if_there(&group.join("memory.swap.max"), "0")?;
                write(&group.join("pids.max"), &limits.pids.to_string())?;
                Ok(Cgroup::V2(group))
            }
        }
    }

    /// Removes a machine's group, and the driver's own with the last of them. Its processes are gone
    /// or on their last steps.
    pub(crate) fn remove(&self, key: &MachineKey) -> DriverResult<()> {
        let deadline = Instant::now() + PATIENCE;
        for directory in self.of(key) {
            loop {
                match fs::remove_dir(&directory) {
                    Ok(()) => break,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    // A process that has died leaves its group a moment later.
                    Err(error)
                        if error.kind() == io::ErrorKind::ResourceBusy
                            && Instant::now() < deadline =>
                    {
                        sleep(Duration::from_micros(300));
                    }
                    Err(error) => return Err(failed("remove", &directory)(error)),
                }
            }
        }
        for root in self.roots() {
            // Refused while there are others.
            let _ = fs::remove_dir(root.join(&self.parent));
        }
        Ok(())
    }

    /// Ends every process in a machine's group, and returns when there is none. For machines whose
    /// first process is not known: when that one ends, so do all others.
    pub(crate) fn end(&self, key: &MachineKey) -> DriverResult<()> {
        let deadline = Instant::now() + PATIENCE;
        let path = self.any(key).join("cgroup.procs");
        loop {
            let left = match self.processes(key) {
                Err(DriverError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    return Ok(());
                }
                left => left?,
            };
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(failed("end the processes in", &path)(io::ErrorKind::TimedOut.into()));
            }
            tracing::warn!(machine = %key, processes = ?left, "killing processes that are left in the cgroup of a machine without a record");
            // The frozen cannot die under version 1.
            self.thaw(key)?;
            self.kill(key)?;
            for number in left {
                let Some(pid) = i32::try_from(number).ok().and_then(Pid::from_raw) else {
                    continue;
                };
                // Held before it is looked for again: its number may be another's by now.
                let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
                    continue;
                };
                if self.processes(key).is_ok_and(|now| now.contains(&number)) {
                    let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
                }
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// Kills what is in a machine's group and has not died with its first process. Version 1 has no
    /// such call, and needs none: processes cannot leave the pid namespace.
    pub(crate) fn kill(&self, key: &MachineKey) -> DriverResult<()> {
        match &self.trees {
            Trees::V1(_) => Ok(()),
            Trees::V2(_) => write_if_there(&self.any(key).join("cgroup.kill"), "1"),
        }
    }

    /// The processes in a machine's group, by the host's numbers.
    pub(crate) fn processes(&self, key: &MachineKey) -> DriverResult<Vec<u32>> {
        let path = self.any(key).join("cgroup.procs");
        let text = fs::read_to_string(&path).map_err(failed("read", &path))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// What a machine has used; zeros where nothing is counted.
    pub(crate) fn usage(&self, key: &MachineKey) -> MachineUsage {
        let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
        let number = |text: String| text.trim().parse().unwrap_or(0);
        match &self.trees {
            Trees::V1(_) => {
                let memory = self.v1("memory", key);
                let cpu = number(read(self.v1("cpuacct", key).join("cpuacct.usage")));
                MachineUsage {
                    cpu: Duration::from_nanos(cpu),
                    memory_peak: Size(number(read(memory.join("memory.max_usage_in_bytes")))),
                    oom_kills: field(&read(memory.join("memory.oom_control")), "oom_kill"),
                }
            }
            Trees::V2(_) => {
                let group = self.any(key);
                MachineUsage {
                    cpu: Duration::from_micros(field(&read(group.join("cpu.stat")), "usage_usec")),
                    memory_peak: Size(number(read(group.join("memory.peak")))),
                    oom_kills: field(&read(group.join("memory.events")), "oom_kill"),
                }
            }
        }
    }

    /// What a machine uses at this moment; zeros where nothing is counted.
    pub(crate) fn load(&self, key: &MachineKey) -> MachineLoad {
        let used = self.usage(key);
        let (memory, pids) = match &self.trees {
            Trees::V1(_) => ("memory.usage_in_bytes", self.v1("pids", key)),
            Trees::V2(_) => ("memory.current", self.any(key)),
        };
        let number = |path: PathBuf| {
            fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
        };
        let memory = Size(number(self.v1("memory", key).join(memory)));
        MachineLoad { used, memory, processes: Some(number(pids.join("pids.current"))) }
    }

    /// How many of a machine's processes were killed out of memory; 0 where nothing is counted.
    pub(crate) fn oom_kills(&self, key: &MachineKey) -> u64 {
        let file = match &self.trees {
            Trees::V1(_) => self.v1("memory", key).join("memory.oom_control"),
            Trees::V2(_) => self.any(key).join("memory.events"),
        };
        field(&fs::read_to_string(file).unwrap_or_default(), "oom_kill")
    }

    /// Stops a machine's processes where they are; returns when none runs.
    pub(crate) fn freeze(&self, key: &MachineKey) -> DriverResult<()> {
        let frozen = self.try_freeze(key);
        if frozen.is_err() {
            // A half frozen group counts as frozen for its processes.
            self.thaw(key)?;
        }
        frozen
    }

    fn try_freeze(&self, key: &MachineKey) -> DriverResult<()> {
        let deadline = Instant::now() + PATIENCE;
        let (order, watched) = self.freezer(key);
        loop {
            // Version 1 can get stuck half way and continues when the value is written again.
            write(&order.0, order.1)?;
            let text = fs::read_to_string(&watched).map_err(failed("read", &watched))?;
            if text.trim() == "FROZEN" || field(&text, "frozen") == 1 {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(failed("freeze", &watched)(io::ErrorKind::TimedOut.into()));
            }
            sleep(Duration::from_micros(200));
        }
    }

    /// Resumes a machine's processes.
    pub(crate) fn thaw(&self, key: &MachineKey) -> DriverResult<()> {
        match &self.trees {
            Trees::V1(_) => {
                write_if_there(&self.v1("freezer", key).join("freezer.state"), "THAWED")
            }
            Trees::V2(_) => write_if_there(&self.any(key).join("cgroup.freeze"), "0"),
        }
    }

    /// The keys there are groups for. What cannot be a key is not ours.
    pub(crate) fn keys(&self) -> Vec<MachineKey> {
        let mut keys: Vec<MachineKey> = self
            .roots()
            .into_iter()
            .filter_map(|root| fs::read_dir(root.join(&self.parent)).ok())
            .flatten()
            .filter_map(Result::ok)
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| MachineKey::parse(entry.file_name().to_str()?))
            .collect();
        keys.sort();
        keys.dedup();
        keys
    }

    /// Makes a machine's directories, and the driver's own around them.
    fn make(&self, key: &MachineKey) -> DriverResult<()> {
        let deadline = Instant::now() + PATIENCE;
        let make_all = || self.of(key).iter().try_for_each(|directory| make(directory));
        loop {
            match make_all() {
                // There is none yet, or the last machine before this one took it along.
                Err(DriverError::Io { source, .. })
                    if source.kind() == io::ErrorKind::NotFound && Instant::now() < deadline =>
                {
                    match self.claim() {
                        Err(DriverError::Io { source, .. })
                            if source.kind() == io::ErrorKind::NotFound => {}
                        claimed => claimed?,
                    }
                }
                made => return made,
            }
        }
    }

    /// Gives a machine's group of [`CPUSET`] all that the group above it has.
    fn fill_cpuset(&self, key: &MachineKey) -> DriverResult<()> {
        let Trees::V1(trees) = &self.trees else { return Ok(()) };
        let Some(root) = trees.get(CPUSET) else { return Ok(()) };
        let read = |path: &Path| fs::read_to_string(path).map_err(failed("read", path));
        let fill = |from: &Path, to: &Path| {
            for name in CPUSET_FILES {
                if read(&to.join(name))?.trim().is_empty() {
                    write(&to.join(name), read(&from.join(name))?.trim())?;
                }
            }
            Ok(())
        };
        let (parent, group) = (root.join(&self.parent), self.v1(CPUSET, key));
        if !read(&group.join(CPUSET_FILES[1]))?.trim().is_empty() {
            return Ok(());
        }
        fill(root, &parent)?;
        // From now on new groups are made with what this one has.
        write_if_there(&parent.join("cgroup.clone_children"), "1")?;
        fill(&parent, &group)
    }

    fn claim(&self) -> DriverResult<()> {
        for root in self.roots() {
            make(&root.join(&self.parent))?;
        }
        if let Trees::V2(root) = &self.trees {
            let wanted = V2.map(|name| format!("+{name}")).join(" ");
            for directory in [root.clone(), root.join(&self.parent)] {
                write(&directory.join("cgroup.subtree_control"), &wanted)?;
            }
        }
        Ok(())
    }

    fn roots(&self) -> Vec<PathBuf> {
        let mut roots = match &self.trees {
            Trees::V1(trees) => trees.values().cloned().collect(),
            Trees::V2(root) => vec![root.clone()],
        };
        roots.dedup();
        roots
    }

    /// Every directory of a machine; one where controllers are mounted together.
    fn of(&self, key: &MachineKey) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = self
            .roots()
            .into_iter()
            .map(|root| root.join(&self.parent).join(key.as_str()))
            .collect();
        all.sort();
        all.dedup();
        all
    }

    fn v1(&self, controller: &str, key: &MachineKey) -> PathBuf {
        let root = match &self.trees {
            Trees::V1(trees) => &trees[controller],
            Trees::V2(root) => root,
        };
        root.join(&self.parent).join(key.as_str())
    }

    /// A directory that has all of a machine's processes.
    fn any(&self, key: &MachineKey) -> PathBuf {
        self.v1("pids", key)
    }

    fn freezer(&self, key: &MachineKey) -> ((PathBuf, &'static str), PathBuf) {
        match &self.trees {
            Trees::V1(_) => {
                let state = self.v1("freezer", key).join("freezer.state");
                ((state.clone(), "FROZEN"), state)
            }
            Trees::V2(_) => {
                let group = self.any(key);
                ((group.join("cgroup.freeze"), "1"), group.join("cgroup.events"))
            }
        }
    }
}

/// Finds the trees in the text of `/proc/self/mountinfo`; `has_all` returns whether a version 2
/// tree has the controllers we need.
fn trees(mountinfo: &str, has_all: impl Fn(&Path) -> bool) -> Result<Trees, String> {
    let mut v1 = BTreeMap::new();
    let mut v2 = None;
    for line in mountinfo.lines() {
        // 36 35 98:0 /root /mount/point options [tags] - type source super-options
        let Some((before, after)) = line.split_once(" - ") else { continue };
        let Some(place) = before.split(' ').nth(4).map(PathBuf::from) else { continue };
        let mut after = after.split(' ');
        match after.next() {
            Some("cgroup") => {
                let options = after.nth(1).unwrap_or_default();
                for name in V1.into_iter().chain([CPUSET]) {
                    if options.split(',').any(|option| option == name) {
                        v1.entry(name).or_insert_with(|| place.clone());
                    }
                }
            }
            Some("cgroup2") if has_all(&place) => v2 = v2.or(Some(place)),
            _ => {}
        }
    }
    if let Some(root) = v2 {
        return Ok(Trees::V2(root));
    }
    let missing: Vec<&str> = V1.into_iter().filter(|name| !v1.contains_key(name)).collect();
    if missing.is_empty() {
        return Ok(Trees::V1(v1));
    }
    Err(format!(
        "no control groups for {}; mount the cgroup2 filesystem on /sys/fs/cgroup, or boot with \
         `systemd.unified_cgroup_hierarchy=1`",
        missing.join(", ")
    ))
}

/// Reads `name 42` out of a file of such lines.
fn field(text: &str, name: &str) -> u64 {
    let found = text.lines().filter_map(|line| line.split_once(' ')).find(|(key, _)| *key == name);
    found.and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(0)
}

fn make(directory: &Path) -> DriverResult<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed("create", directory)(error))
        }
        _ => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> DriverResult<()> {
    // Opened without O_CREAT: on this filesystem a wrong name should say "not found".
    let file = fs::OpenOptions::new().write(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()))
        .map_err(failed("write to", path))
}

fn write_if_there(path: &Path, text: &str) -> DriverResult<()> {
    match write(path, text) {
        Err(DriverError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::{Cgroups, Trees, field, trees};
    use crate::model::MachineKey;

    const UNIFIED: &str = "\
22 1 0:20 / /sys rw - sysfs sysfs rw
25 22 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
    const HYBRID: &str = "\
24 22 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
25 24 0:23 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
26 24 0:24 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
27 24 0:25 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
31 24 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
28 24 0:26 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
29 24 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
30 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";

    #[test]
    fn a_unified_tree_with_controllers_is_version_2() {
        let found = trees(UNIFIED, |_| true);
        assert_eq!(found, Ok(Trees::V2(PathBuf::from("/sys/fs/cgroup"))));
    }

    #[test]
    fn a_hybrid_host_is_version_1_and_trees_may_be_mounted_together() {
        let Ok(Trees::V1(found)) = trees(HYBRID, |_| false) else { panic!("version 1") };
        assert_eq!(found["cpu"], Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(found["cpuacct"], found["cpu"]);
        assert_eq!(found["freezer"], Path::new("/sys/fs/cgroup/freezer"));
        assert_eq!(found["cpuset"], Path::new("/sys/fs/cgroup/cpuset"));
        assert_eq!(found.len(), 6);
    }

    #[test]
    fn what_is_missing_is_named() {
        let without: String =
            HYBRID.lines().filter(|line| !line.contains("memory")).collect::<Vec<_>>().join("\n");
        let reason = trees(&without, |_| false).unwrap_err();
        assert!(reason.starts_with("no control groups for memory;"), "{reason}");
        let without = HYBRID.lines().filter(|line| !line.contains("cpuset"));
        assert!(trees(&without.collect::<Vec<_>>().join("\n"), |_| false).is_ok());
        assert!(trees("", |_| true).is_err());
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(field(text, "oom_kill"), 3);
        assert_eq!(field(text, "oom"), 0);
    }

    /// Hybrid hosts have a version 2 tree as well, without our controllers: enough to see that a
    /// group freezes, thaws and is killed.
    #[test]
    fn version_2_freezes_thaws_and_kills() {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let Ok(Trees::V2(root)) = trees(&mounts, |_| true) else {
            println!("SKIPPED version_2_freezes_thaws_and_kills: no cgroup2 filesystem");
            return;
        };
        let parent = format!("sandkeep-unit-{}", std::process::id());
        let groups = Cgroups { trees: Trees::V2(root.clone()), parent: parent.clone() };
        let key = MachineKey::parse("two").unwrap();
        let place = root.join(&parent).join("two");
        if let Err(error) = fs::create_dir_all(&place) {
            println!("SKIPPED version_2_freezes_thaws_and_kills: {error}");
            return;
        }
        let mut sleeper = Command::new("sleep").arg("1000").spawn().unwrap();
        fs::write(place.join("cgroup.procs"), sleeper.id().to_string()).unwrap();
        assert_eq!(groups.processes(&key).unwrap(), [sleeper.id()]);
        assert_eq!(groups.keys(), std::slice::from_ref(&key));
        groups.freeze(&key).unwrap();
        let events = fs::read_to_string(place.join("cgroup.events")).unwrap();
        assert_eq!(field(&events, "frozen"), 1);
        groups.thaw(&key).unwrap();
        groups.kill(&key).unwrap();
        assert!(!sleeper.wait().unwrap().success());
        groups.remove(&key).unwrap();
        assert!(!root.join(parent).exists());
    }
}
