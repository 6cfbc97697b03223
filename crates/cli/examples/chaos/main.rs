//! Long campaigns of faults against the released binary: `./dev chaos --minutes N`.
//!
//! Goes from filesystem to filesystem with a new seed each time, says what it finds, and writes the table of results into
//! `docs/CRASH-MATRIX.md`. Ends with an error if anything was found.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sandkeep_testkit::chaos::{Campaign, FaultKind, Report};
use sandkeep_testkit::fault_disk::{self, Filesystem};
use sandkeep_testkit::machine::test_kernel;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const USAGE: &str = "chaos [--minutes N] [--seed S] [--fs ext4|ext4-noauto_da_alloc|xfs|btrfs] \
[--driver container|microvm] [--fault NAME]... [--clients N] [--rounds N] [--keep FILE] [--no-table]";

/// How long one campaign lasts before the next filesystem has its turn.
const TURN: Duration = Duration::from_secs(120);

struct Options {
    time: Duration,
    seed: u64,
    filesystems: Vec<Filesystem>,
    machines: bool,
    faults: Vec<FaultKind>,
    clients: usize,
    rounds: u64,
    keep: PathBuf,
    table: bool,
}

fn main() -> Outcome<()> {
    if fault_disk::serve_if_asked() {
        return Ok(());
    }
    let options = options()?;
    if let Some(why) = fault_disk::unfit() {
        return Err(why.into());
    }
    let kernel = options.machines.then(test_kernel).transpose()?;
    let (began, mut seed, mut report) = (Instant::now(), options.seed, Report::default());
    for filesystem in options.filesystems.iter().cycle() {
        let left = options.time.saturating_sub(began.elapsed());
        if left.is_zero() {
            break;
        }
        let campaign = Campaign {
            kernel: kernel.clone(),
            faults: options.faults.clone(),
            clients: options.clients,
            rounds: options.rounds,
            time: left.min(TURN),
            ..Campaign::new(&options.keep, *filesystem, seed)
        };
        report.add(campaign.run());
        seed += 1;
    }
    let mut out = std::io::stdout();
    writeln!(out, "{}", report.table())?;
    for violation in &report.violations {
        writeln!(out, "{violation:?}")?;
    }
    if options.table {
        let file = Path::new("docs/CRASH-MATRIX.md");
        let document = std::fs::read_to_string(file)?;
        let document = report.into_document(&document).ok_or("no place for the table")?;
        std::fs::write(file, document)?;
    }
    match report.violations.len() {
        0 => Ok(()),
        count => Err(format!("{count} findings").into()),
    }
}

fn options() -> Outcome<Options> {
    let built = std::env::current_exe()?;
    let beside = built.ancestors().nth(2).map(Path::to_owned).unwrap_or_default();
    let mut options = Options {
        time: Duration::from_secs(600),
        seed: 1,
        filesystems: Filesystem::ALL.to_vec(),
        machines: false,
        faults: Vec::new(),
        clients: 4,
        rounds: u64::MAX,
        keep: beside.join("keep"),
        table: true,
    };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        if name == "--no-table" {
            options.table = false;
            continue;
        }
        let value = args.next().ok_or(USAGE)?;
        match name.as_str() {
            "--minutes" => {
                let minutes: f64 = value.parse()?;
                options.time = Duration::from_secs_f64(minutes * 60.0);
            }
            "--seed" => options.seed = value.parse()?,
            "--fs" => options.filesystems = vec![Filesystem::parse(&value).ok_or(USAGE)?],
            "--driver" => {
                options.machines = match value.as_str() {
                    "microvm" => true,
                    "container" => false,
                    _ => return Err(USAGE.into()),
                };
            }
            "--fault" => options.faults.push(FaultKind::parse(&value).ok_or(USAGE)?),
            "--clients" => options.clients = value.parse()?,
            "--rounds" => options.rounds = value.parse()?,
            "--keep" => options.keep = PathBuf::from(value),
            _ => return Err(USAGE.into()),
        }
    }
    if options.faults.is_empty() {
        options.faults = FaultKind::ALL.to_vec();
    }
    if options.machines {
        options.clients = options.clients.min(2);
    }
    Ok(options)
}
