//! What it costs to record what commands change: the same commands on a daemon that records and on one that does not.
//!
//! Two daemons of the same build take turns, round by round, so both find the machine in the same state. The
//! *install* is what `npm install` does after its downloads: it verifies 300 packages and unpacks them, 30,000 files in
//! all. Changes are looked at after a command has ended. So the cost is reported in three ways: what the caller waited, what
//! the next command waited, and the CPU time of the daemon until the record was complete, as a share of the command's time.

use std::path::Path;
use std::time::{Duration, Instant};

use sandkeep_client::types::{CreateSandbox, ExecRequest};
use sandkeep_client::{Client, Place, Upload};
use sandkeep_testkit::daemon::Daemon;

use super::stats::{Table, percentile};
use super::{Outcome, Rounds};

const BOX: &str = "recorded";
/// How many commands run one after another before it is the other daemon's turn.
const IN_A_ROW: usize = 20;
const PACKAGES: usize = 300;
const FILES_IN_PACKAGE: usize = 100;
/// What a file has on average, as in `node_modules`.
const FILE: usize = 5 << 10;
/// Verifies and unpacks.
const INSTALL: &str = "cd /work && sha256sum -c --quiet cache/sums && mkdir node_modules && \
    for package in cache/*.tar; do tar -xf $package -C node_modules || exit 1; done";
/// Clock ticks in a second, as `/proc` counts them.
const TICKS: f64 = 100.0;

/// A daemon, and how to talk to it.
struct Side {
    daemon: Daemon,
    client: Client,
}

/// What an install took.
#[derive(Default)]
struct Installs {
    times: Vec<Duration>,
    /// The command right after.
    next: Vec<Duration>,
    /// CPU time of the daemon until the record was complete, in milliseconds.
    cpu: Vec<f64>,
}

pub(crate) async fn run(
    table: &mut Table,
    keep: &Path,
    scratch: &Path,
    rounds: &Rounds,
) -> Outcome<()> {
    let off = tempfile::NamedTempFile::new()?;
    std::fs::write(&off, "[storage]\nrecord_changes = false\n")?;
    let on = tempfile::NamedTempFile::new()?;
    let side = |settings: &Path| -> Outcome<Side> {
        let config = settings.to_string_lossy().into_owned();
        let daemon = Daemon::start_with(keep, &[("SANDKEEP_CONFIG", &config)]);
        daemon.import_small();
        let (url, key) = daemon.url_and_key();
        Ok(Side { client: Client::new(url.parse()?, Some(&key))?, daemon })
    };
    let sides = [side(on.path())?, side(off.path())?];
    nothing(table, &sides, rounds).await?;
    let cache = scratch.join("packages.tar");
    make_packages(&cache)?;
    rustix::fs::sync();
    let mut installs = [Installs::default(), Installs::default()];
    for round in 0..rounds.heavy.max(3) {
        // Each is the first in turn.
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for at in order {
            installs[at].one(&sides[at], &cache).await?;
        }
    }
    std::fs::remove_file(&cache)?;
    let [recorded, unrecorded] = &installs;
    let yardstick = "(not recorded) install of 30,000 files";
    table.add(yardstick, &unrecorded.times);
    table.add_beside("install of 30,000 files", &recorded.times, Some(yardstick.to_owned()));
    let (with, without) = (percentile(&recorded.times, 0.5), percentile(&unrecorded.times, 0.5));
    let cpu = median(&recorded.cpu) - median(&unrecorded.cpu);
    table.note(&format!(
        "recording an install of 30,000 files: {:+.1} % of the command's time as its caller sees it; {:.0} ms of CPU time until the record is complete, {:.1} % of \
         {without:.0} ms (budget 3 %)",
        (with / without - 1.0) * 100.0,
        cpu,
        cpu / without * 100.0
    ));
    table.note(&format!(
        "the command right after such an install: {:.2} ms, not recorded {:.2} ms",
        percentile(&recorded.next, 0.5),
        percentile(&unrecorded.next, 0.5)
    ));
    Ok(())
}

/// A command that changes nothing, again and again.
async fn nothing(table: &mut Table, sides: &[Side; 2], rounds: &Rounds) -> Outcome<()> {
    let mut times = [Vec::new(), Vec::new()];
    for side in sides {
        side.create().await?;
        side.exec("true").await?;
    }
    for _ in 0..(rounds.quick / IN_A_ROW).max(2) {
        for (side, times) in sides.iter().zip(&mut times) {
            for _ in 0..IN_A_ROW {
                times.push(side.exec("true").await?);
            }
        }
    }
    for side in sides {
        side.client.delete(BOX, None).await?;
    }
    let yardstick = "(not recorded) command that changes nothing";
    table.add(yardstick, &times[1]);
    table.add_beside("command that changes nothing", &times[0], Some(yardstick.to_owned()));
    let [with, without] = [0, 1].map(|at: usize| percentile(&times[at], 0.5));
    table.note(&format!(
        "recording a command that changes nothing: {:+.2} ms (budget 1 ms)",
        with - without
    ));
    Ok(())
}

impl Installs {
    async fn one(&mut self, side: &Side, cache: &Path) -> Outcome<()> {
        side.create().await?;
        let file = tokio::fs::File::open(cache).await?;
        side.client.tar_in(Place::new(BOX, "/work"), Upload::reader(file)).await?;
        side.exec("true").await?;
        // What was uploaded is written back, and was looked at.
        rustix::fs::sync();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = side.cpu()?;
        let (time, id) = side.command(INSTALL).await?;
        // Waits until the record is complete.
        let list = side.client.command_changes(BOX, &id).await?;
        self.cpu.push((side.cpu()? - before) * 1000.0);
        self.times.push(time);
        if let Some(changes) = list.changes
            && (changes.created < (PACKAGES * FILES_IN_PACKAGE) as u64 || !changes.complete)
        {
            return Err(format!("30,000 files were made, and not {changes:?}").into());
        }
        side.exec("rm -r /work/node_modules").await?;
        side.exec("true").await?;
        side.command(INSTALL).await?;
        self.next.push(side.exec("true").await?);
        side.client.delete(BOX, None).await?;
        rustix::fs::sync();
        Ok(())
    }
}

impl Side {
    async fn create(&self) -> Outcome<()> {
        let request = CreateSandbox {
            name: Some(BOX.to_owned()),
            image: Some("small".to_owned()),
            start: Some(true),
            ..CreateSandbox::default()
        };
        self.client.create(&request, None).await?;
        Ok(())
    }

    async fn exec(&self, line: &str) -> Outcome<Duration> {
        Ok(self.command(line).await?.0)
    }

    /// Runs a command. Answers with the time and its id.
    async fn command(&self, line: &str) -> Outcome<(Duration, String)> {
        let argv = ["/bin/sh", "-c", line].map(str::to_owned).to_vec();
        let request = ExecRequest { argv, ..ExecRequest::default() };
        let began = Instant::now();
        let (ended, _, err) = self.client.exec(BOX, &request).await?.collect().await?;
        let took = began.elapsed();
        if ended.exit_code != Some(0) {
            return Err(format!("{line}: {}", String::from_utf8_lossy(&err)).into());
        }
        Ok((took, ended.command.id))
    }

    /// The CPU time that the daemon has used, in seconds.
    fn cpu(&self) -> Outcome<f64> {
        let pid = self.daemon.pid().ok_or("the daemon is gone")?;
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let (_, rest) = text.rsplit_once(')').ok_or("an odd line")?;
        let ticks = |at: usize| -> Outcome<f64> {
            Ok(rest.split_whitespace().nth(at).ok_or("a short line")?.parse::<f64>()?)
        };
        Ok((ticks(11)? + ticks(12)?) / TICKS)
    }
}

fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A tar with 300 packages, each a tar of 100 files, and a list of their checksums.
fn make_packages(path: &Path) -> Outcome<()> {
    use sha2::{Digest as _, Sha256};
    let file = std::io::BufWriter::new(std::fs::File::create(path)?);
    let mut archive = tar::Builder::new(file);
    let mut sums = String::new();
    let mut state = 1u64;
    for package in 0..PACKAGES {
        let mut inner = tar::Builder::new(Vec::new());
        for file in 0..FILES_IN_PACKAGE {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let size = FILE / 4 + (state >> 33) as usize % (FILE * 3 / 2);
            let line = format!("module.exports.f{state} = (a, b) => a * {state} + b;\n");
            let text: String = line.chars().cycle().take(size).collect();
            let name = format!("package-{package}/lib/d{}/file-{file}.js", file / 20);
            append(&mut inner, &name, text.as_bytes())?;
        }
        let bytes = inner.into_inner()?;
        let name = format!("cache/package-{package}.tar");
        sums.push_str(&format!("{}  {name}\n", hex::encode(Sha256::digest(&bytes))));
        append(&mut archive, &name, &bytes)?;
    }
    append(&mut archive, "cache/sums", sums.as_bytes())?;
    archive.finish()?;
    Ok(())
}

fn append<W: std::io::Write>(
    archive: &mut tar::Builder<W>,
    name: &str,
    bytes: &[u8],
) -> Outcome<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    Ok(archive.append_data(&mut header, name, bytes)?)
}
