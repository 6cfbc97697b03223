//! Keeps the files of a sandbox's view current.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::thread::CpuSet;

use super::text::{self, Cpu, Memory, field};
use super::{CURRENT, Facts, Files};

/// Ticks of a second in `/proc/stat` and `cpuacct.stat`.
const TICKS: u64 = 100;
/// A sandbox that uses less than this part of one processor is idle.
const IDLE: f64 = 0.01;

/// What writes [`CURRENT`].
#[derive(Debug)]
pub(crate) struct View {
    files: [File; CURRENT.len()],
    /// How long each file is.
    lengths: [usize; CURRENT.len()],
    facts: Facts,
    sources: Sources,
    /// When the files were written last, and the CPU time that was used by then.
    last: Option<(Instant, u64)>,
    loads: [f64; 3],
}

/// What it is read from, kept open; absent if it cannot be.
#[derive(Debug)]
struct Sources {
    used: Option<File>,
    memory: Option<File>,
    cpu: Option<File>,
    tasks: Option<File>,
    uptime: Option<File>,
}

impl Sources {
    fn open(v2: bool) -> Self {
        let group = |v1: &str, name: &str| {
            File::open(Path::new("/sys/fs/cgroup").join(if v2 { name } else { v1 })).ok()
        };
        Self {
            used: group("memory/memory.usage_in_bytes", "memory.current"),
            memory: group("memory/memory.stat", "memory.stat"),
            cpu: group("cpuacct/cpuacct.stat", "cpu.stat"),
            tasks: group("pids/pids.current", "pids.current"),
            uptime: File::open("/proc/uptime").ok(),
        }
    }
}

/// All of a file, which is short.
fn read(file: Option<&File>) -> String {
    let mut bytes = vec![0; 8 << 10];
    let count = file.and_then(|file| file.read_at(&mut bytes, 0).ok()).unwrap_or(0);
    bytes.truncate(count);
    String::from_utf8(bytes).unwrap_or_default()
}

fn number(file: Option<&File>) -> u64 {
    read(file).trim().parse().unwrap_or(0)
}

/// What the sandbox is doing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Activity {
    /// How many processes and threads there are, the agent's included.
    pub(crate) tasks: u64,
    /// Whether it has used next to no CPU time since it was looked at last.
    pub(crate) idle: bool,
}

impl View {
    pub(in super::super) fn new(files: Files, facts: Facts) -> Self {
        let files = files.map(File::from);
        let sources = Sources::open(facts.v2);
        let lengths = [0; CURRENT.len()];
        Self { files, lengths, facts, sources, last: None, loads: [0.0; 3] }
    }

    /// The processors that commands run on, if not all.
    pub(crate) fn affinity(&self) -> Option<CpuSet> {
        self.facts.affinity
    }

    /// Writes what is true now.
    pub(crate) fn refresh(&mut self) -> Activity {
        let cpu = self.cpu();
        let idle = self.note(&cpu);
        let tasks = number(self.sources.tasks.as_ref());
        let uptime = self.uptime();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        // A second apart from one time to the next would be a change of the boot time.
        let booted = (now - uptime).round() as u64;
        let texts = [
            text::meminfo(&self.memory()),
            text::stat(&cpu, &self.facts.cpus, uptime, booted, tasks),
            text::loadavg(self.loads, tasks),
        ];
        for ((file, length), mut text) in self.files.iter().zip(&mut self.lengths).zip(texts) {
            // A file that never gets shorter can be written in one call, with nothing of the old text behind the new.
            text::pad(&mut text, *length);
            if file.write_all_at(text.as_bytes(), 0).is_ok() {
                *length = text.len();
            }
        }
        Activity { tasks, idle }
    }

    /// Follows the load; returns whether there is next to none.
    fn note(&mut self, cpu: &Cpu) -> bool {
        let now = Instant::now();
        let Some((then, used)) = self.last.replace((now, cpu.total())) else { return false };
        let passed = now.duration_since(then).as_secs_f64();
        let busy = cpu.total().saturating_sub(used) as f64 / 1e6 / passed.max(1e-3);
        for (load, minutes) in self.loads.iter_mut().zip([1.0, 5.0, 15.0]) {
            let keeps = (-passed / (60.0 * minutes)).exp();
            *load = *load * keeps + busy * (1.0 - keeps);
        }
        busy < IDLE
    }

    fn memory(&self) -> Memory {
        let v2 = self.facts.v2;
        let stat = read(self.sources.memory.as_ref());
        let either = |v1: &str, name: &str| field(&stat, if v2 { name } else { v1 });
        Memory {
            limit: self.facts.memory,
            used: number(self.sources.used.as_ref()),
            file: either("cache", "file"),
            anon: either("rss", "anon"),
            shared: field(&stat, "shmem"),
            mapped: either("mapped_file", "file_mapped"),
            dirty: either("dirty", "file_dirty"),
            writeback: either("writeback", "file_writeback"),
            active_anon: field(&stat, "active_anon"),
            inactive_anon: field(&stat, "inactive_anon"),
            active_file: field(&stat, "active_file"),
            inactive_file: field(&stat, "inactive_file"),
            unevictable: field(&stat, "unevictable"),
            // Version 1 does not report these.
            reclaimable: field(&stat, "slab_reclaimable"),
            unreclaimable: field(&stat, "slab_unreclaimable"),
            stacks: field(&stat, "kernel_stack"),
            tables: field(&stat, "pagetables"),
        }
    }

    fn cpu(&self) -> Cpu {
        let text = read(self.sources.cpu.as_ref());
        if self.facts.v2 {
            return Cpu { user: field(&text, "user_usec"), system: field(&text, "system_usec") };
        }
        let tick = 1_000_000 / TICKS;
        Cpu { user: field(&text, "user") * tick, system: field(&text, "system") * tick }
    }

    /// How long ago the session started, in seconds.
    fn uptime(&self) -> f64 {
        let text = read(self.sources.uptime.as_ref());
        text.split(' ').next().and_then(|seconds| seconds.parse().ok()).unwrap_or(0.0)
    }
}
