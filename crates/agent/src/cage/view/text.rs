//! The files of a sandbox's view, as the kernel would write them.

use std::fmt::Write as _;

/// Ticks of a second in `/proc/stat`.
const TICKS: u64 = 100;

/// CPU time that was used, in microseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cpu {
    pub(super) user: u64,
    pub(super) system: u64,
}

impl Cpu {
    pub(super) fn total(&self) -> u64 {
        self.user + self.system
    }
}

/// What is known of a sandbox's memory, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Memory {
    pub(super) limit: u64,
    pub(super) used: u64,
    pub(super) file: u64,
    pub(super) anon: u64,
    pub(super) shared: u64,
    pub(super) mapped: u64,
    pub(super) dirty: u64,
    pub(super) writeback: u64,
    pub(super) active_anon: u64,
    pub(super) inactive_anon: u64,
    pub(super) active_file: u64,
    pub(super) inactive_file: u64,
    pub(super) unevictable: u64,
    pub(super) reclaimable: u64,
    pub(super) unreclaimable: u64,
    pub(super) stacks: u64,
    pub(super) tables: u64,
}

/// Picks `wanted` of the processors, other ones for each turn.
pub(super) fn share(all: &[usize], wanted: usize, turn: usize) -> Vec<usize> {
    let wanted = wanted.clamp(1, all.len().max(1));
    let first = turn.wrapping_mul(wanted) % all.len().max(1);
    let mut own: Vec<usize> = all.iter().cycle().skip(first).take(wanted).copied().collect();
    own.sort_unstable();
    own
}

/// Writes numbers, which are in order, the way the kernel does: `0-2,5`.
pub(super) fn list(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => ranges.push((*number, *number)),
        }
    }
    let shown = ranges.iter().map(|(first, last)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    });
    shown.collect::<Vec<_>>().join(",")
}

/// `/proc/cpuinfo` with these processors, each like the one that is described: one socket, a core each.
pub(super) fn cpuinfo(one: &str, cpus: &[usize]) -> String {
    let mut text = String::new();
    for (index, number) in cpus.iter().enumerate() {
        for line in one.lines() {
            let key = line.split_once(':').map_or("", |(key, _)| key);
            let value = match key.trim_end() {
                "processor" | "apicid" | "initial apicid" => Some(*number),
                "physical id" => Some(0),
                "core id" => Some(index),
                "siblings" | "cpu cores" => Some(cpus.len()),
                _ => None,
            };
            let _ = match value {
                Some(value) => writeln!(text, "{key}: {value}"),
                None => writeln!(text, "{line}"),
            };
        }
        text.push('\n');
    }
    text
}

pub(super) fn meminfo(memory: &Memory) -> String {
    let free = memory.limit.saturating_sub(memory.used);
    // The kernel takes these back before it ends a process.
    let reclaimable = memory.active_file + memory.inactive_file + memory.reclaimable;
    let available = free.saturating_add(reclaimable).min(memory.limit);
    let lines = [
        ("MemTotal", memory.limit),
        ("MemFree", free),
        ("MemAvailable", available),
        ("Buffers", 0),
        ("Cached", memory.file),
        ("SwapCached", 0),
        ("Active", memory.active_anon + memory.active_file),
        ("Inactive", memory.inactive_anon + memory.inactive_file),
        ("Active(anon)", memory.active_anon),
        ("Inactive(anon)", memory.inactive_anon),
        ("Active(file)", memory.active_file),
        ("Inactive(file)", memory.inactive_file),
        ("Unevictable", memory.unevictable),
        ("Mlocked", 0),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("Dirty", memory.dirty),
        ("Writeback", memory.writeback),
        ("AnonPages", memory.anon),
        ("Mapped", memory.mapped),
        ("Shmem", memory.shared),
        ("KReclaimable", memory.reclaimable),
        ("Slab", memory.reclaimable + memory.unreclaimable),
        ("SReclaimable", memory.reclaimable),
        ("SUnreclaim", memory.unreclaimable),
        ("KernelStack", memory.stacks),
        ("PageTables", memory.tables),
        ("CommitLimit", memory.limit),
        ("Committed_AS", memory.anon),
    ];
    let mut text = String::new();
    for (name, bytes) in lines {
        let _ = writeln!(text, "{:<16}{:>8} kB", format!("{name}:"), bytes / 1024);
    }
    text.push_str(
        "HugePages_Total:       0\nHugePages_Free:        0\nHugePages_Rsvd:        0\n\
         HugePages_Surp:        0\nHugepagesize:       2048 kB\n",
    );
    text
}

pub(super) fn stat(cpu: &Cpu, cpus: &[usize], uptime: f64, booted: u64, tasks: u64) -> String {
    let ticks = |micros: u64| micros * TICKS / 1_000_000;
    let (user, system) = (ticks(cpu.user), ticks(cpu.system));
    let count = cpus.len().max(1) as u64;
    let all = (uptime * TICKS as f64) as u64 * count;
    let idle = all.saturating_sub(user + system);
    let mut text = format!("cpu  {user} 0 {system} {idle} 0 0 0 0 0 0\n");
    for (index, number) in (0..).zip(cpus) {
        // Control groups of version 2 do not report which processor did what, so each did the same.
        let part = |sum: u64| sum / count + u64::from(index < sum % count);
        let (user, system, idle) = (part(user), part(system), part(idle));
        let _ = writeln!(text, "cpu{number} {user} 0 {system} {idle} 0 0 0 0 0 0");
    }
    let _ = writeln!(
        text,
        "intr 0\nctxt 0\nbtime {booted}\nprocesses {tasks}\nprocs_running 1\nprocs_blocked 0\n\
         softirq 0 0 0 0 0 0 0 0 0 0 0"
    );
    text
}

pub(super) fn loadavg([one, five, fifteen]: [f64; 3], tasks: u64) -> String {
    let running = (one.round() as u64).clamp(1, tasks.max(1));
    format!("{one:.2} {five:.2} {fifteen:.2} {running}/{tasks} {tasks}\n")
}

/// Makes a text at least as long, with spaces at the end of its last line.
pub(super) fn pad(text: &mut String, length: usize) {
    if let Some(missing) = length.checked_sub(text.len()).filter(|missing| *missing > 0) {
        let end = text.trim_end_matches('\n').len();
        text.insert_str(end, &" ".repeat(missing));
    }
}

/// Reads `name 42` out of a file of such lines.
pub(super) fn field(text: &str, name: &str) -> u64 {
    let found = text.lines().filter_map(|line| line.split_once(' ')).find(|(key, _)| *key == name);
    found.and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{Cpu, Memory, cpuinfo, field, list, loadavg, meminfo, pad, share, stat};

    #[test]
    fn memory_adds_up() {
        let shown = |memory: &Memory, name: &str| {
            let text = meminfo(memory);
            let line = text.lines().find(|line| line.starts_with(&format!("{name}:")));
            let kilobytes =
                line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
            kilobytes.unwrap_or_else(|| panic!("{name}: {text}"))
        };
        let memory =
            Memory { limit: 64 << 20, used: 24 << 20, inactive_file: 8 << 20, ..Memory::default() };
        assert_eq!(shown(&memory, "MemTotal"), 64 << 10);
        assert_eq!(shown(&memory, "MemFree"), 40 << 10);
        assert_eq!(shown(&memory, "MemAvailable"), 48 << 10);
        assert_eq!(shown(&memory, "SwapTotal"), 0);
        let over =
            Memory { limit: 1 << 20, used: 2 << 20, active_file: 4 << 20, ..Memory::default() };
        assert_eq!((shown(&over, "MemFree"), shown(&over, "MemAvailable")), (0, 1 << 10));
    }

    #[test]
    fn processors_are_shared_out_evenly() {
        let all = [0, 1, 4, 5];
        assert_eq!(share(&all, 1, 0), [0]);
        assert_eq!(share(&all, 1, 6), [4]);
        assert_eq!(share(&all, 3, 1), [0, 1, 5]);
        assert_eq!(share(&all, 9, 7), all);
        assert_eq!(share(&all, 0, 1), [1]);
        assert!(share(&[], 1, 3).is_empty());
        let mut turns = [0; 6];
        for turn in 0..40 {
            share(&all, 2, turn).iter().for_each(|cpu| turns[*cpu] += 1);
        }
        assert_eq!(turns, [20, 20, 0, 0, 20, 20]);
    }

    #[test]
    fn lists_are_written_as_the_kernel_does() {
        for (numbers, text) in
            [(&[0][..], "0"), (&[0, 1, 2], "0-2"), (&[1, 3, 4, 9], "1,3-4,9"), (&[], "")]
        {
            assert_eq!(list(numbers), text);
        }
    }

    #[test]
    fn processors_keep_their_numbers() {
        let one = "processor\t: 0\nmodel name\t: A: B\nsiblings\t: 64\ncore id\t\t: 7\n";
        let text = cpuinfo(one, &[3, 5]);
        assert_eq!(
            text,
            "processor\t: 3\nmodel name\t: A: B\nsiblings\t: 2\ncore id\t\t: 0\n\n\
             processor\t: 5\nmodel name\t: A: B\nsiblings\t: 2\ncore id\t\t: 1\n\n"
        );
    }

    #[test]
    fn what_is_not_used_is_idle() {
        let text = stat(&Cpu { user: 1_500_000, system: 500_000 }, &[0, 3], 10.0, 42, 7);
        assert!(
            text.starts_with("cpu  150 0 50 1800 0 0 0 0 0 0\ncpu0 75 0 25 900 0 0 0 0 0 0\ncpu3 "),
            "{text}"
        );
        assert!(text.contains("\nbtime 42\n"));
        assert_eq!(loadavg([1.5, 0.25, 0.0], 7), "1.50 0.25 0.00 2/7 7\n");
    }

    #[test]
    fn texts_do_not_get_shorter() {
        let mut text = "0.10 2/7 7\n".to_owned();
        pad(&mut text, 13);
        assert_eq!(text, "0.10 2/7 7  \n");
        pad(&mut text, 5);
        assert_eq!(text.len(), 13);
        assert_eq!(field("cache 1\nrss_huge 2\nrss 3\n", "rss"), 3);
    }
}
