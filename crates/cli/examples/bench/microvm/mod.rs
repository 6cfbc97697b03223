//! Machines with memory: ours over HTTP, beside bare QEMU with the same kernel and beside runsc, in one run.
//!
//! What is measured of forks and captures is also what they cost: memory of the hypervisors' processes as the kernel
//! reports it, and disk space as the filesystem does.

mod bare;
mod cost;
mod runsc;

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use sandkeep_client::Client;
use sandkeep_client::types::{Checkpoint, CreateSandbox, ExecRequest, Fork, Pause, Start};
use sandkeep_testkit::daemon::{Daemon, SMALL};
use sandkeep_testkit::machine::{TestKernel, test_kernel};

use super::Outcome;
use super::stats::{Table, millis};
use cost::Machines;

/// How often each thing is done, and how many forks are made at once.
#[derive(Clone)]
struct Rounds {
    boots: usize,
    restores: usize,
    forks: &'static [u32],
    dirty: &'static [u32],
}

/// How long the server gets no requests before a machine is created or resumed, as with users who
/// are not in a loop.
const BREATH: Duration = Duration::from_secs(1);

/// Overwrites a number of MB of memory with new content.
const DIRTY: &str = r#"my ($mb, $salt) = @ARGV; open my $f, '>', '/dev/shm/dirty' or die;
for my $page (1 .. $mb * 256) { print $f pack('N', $page * 2654435761 + $salt) x 1024 }
close $f; unlink '/dev/shm/older'; rename '/dev/shm/dirty', '/dev/shm/older';"#;

pub(crate) async fn run(keep: &Path, quick: bool) -> Outcome<()> {
    let rounds = match quick {
        true => Rounds { boots: 1, restores: 5, forks: &[1, 10], dirty: &[0, 64] },
        false => Rounds { boots: 3, restores: 20, forks: &[1, 10, 50], dirty: &[0, 64, 256] },
    };
    let kernel = test_kernel()?;
    let daemon = Daemon::with_machines(keep, &kernel, &[]);
    daemon.import_small();
    let (url, key) = daemon.url_and_key();
    let client = Client::new(url.parse()?, Some(&key))?;
    let machines = Machines::new(&daemon.data());
    let bench = Bench { client, machines, rounds };
    let mut table = Table::default();
    runsc::run(&mut table, daemon.scratch(), bench.rounds.restores)?;
    bench.cold(&mut table).await?;
    bare::run(&mut table, &bench.machines, &daemon.data(), daemon.scratch(), &bench.rounds).await?;
    bench.client.delete("first", None).await?;
    // What the yardsticks wrote is not ours to wait for.
    rustix::fs::sync();
    bench.creates(&mut table, "").await?;
    bench.pauses(&mut table, "").await?;
    bench.captures(&mut table).await?;
    let forks = bench.forks().await?;
    for (when, settings) in LESS {
        with_less(keep, &kernel, &bench.rounds, &mut table, (when, settings)).await?;
    }
    table.print();
    writeln!(std::io::stdout(), "\n{forks}")?;
    Ok(())
}

/// What may wait for the next machine, and does not.
const LESS: [(&str, &str); 2] = [
    (", no warm VM", "[microvm]\nwarm_vms = 0\n"),
    (", no warm pool", "[microvm]\nwarm_vms = 0\nwarm_hypervisors = 0\n"),
];

/// The same when less waits for the next machine.
async fn with_less(
    keep: &Path,
    kernel: &TestKernel,
    rounds: &Rounds,
    table: &mut Table,
    (when, told): (&str, &str),
) -> Outcome<()> {
    let settings = tempfile::NamedTempFile::with_prefix("keep-bench-")?;
    std::fs::write(settings.path(), told)?;
    let path = settings.path().to_str().ok_or("a path that is no text")?;
    let daemon = Daemon::with_machines(keep, kernel, &[("SANDKEEP_CONFIG", path)]);
    daemon.import_small();
    let (url, key) = daemon.url_and_key();
    let client = Client::new(url.parse()?, Some(&key))?;
    let machines = Machines::new(&daemon.data());
    let bench = Bench { client, machines, rounds: rounds.clone() };
    bench.create("first").await?;
    bench.client.delete("first", None).await?;
    bench.creates(table, when).await?;
    bench.pauses(table, when).await
}

struct Bench {
    client: Client,
    machines: Machines,
    rounds: Rounds,
}

impl Bench {
    async fn create(&self, name: &str) -> Outcome<()> {
        let request = CreateSandbox {
            name: Some(name.to_owned()),
            image: Some(SMALL.to_owned()),
            driver: Some("microvm".to_owned()),
            start: Some(true),
            ..CreateSandbox::default()
        };
        self.client.create(&request, None).await?;
        Ok(())
    }

    async fn run(&self, name: &str, argv: &[&str]) -> Outcome<String> {
        let argv = argv.iter().map(|arg| (*arg).to_owned()).collect();
        let request = ExecRequest { argv, ..ExecRequest::default() };
        let (ended, out, err) = self.client.exec(name, &request).await?.collect().await?;
        if ended.exit_code != Some(0) {
            return Err(String::from_utf8_lossy(&err).into());
        }
        Ok(String::from_utf8_lossy(&out).into_owned())
    }

    /// The first of a size, which boots; it stays, for the yardstick to look at.
    async fn cold(&self, table: &mut Table) -> Outcome<()> {
        let began = Instant::now();
        self.create("first").await?;
        self.run("first", &["/bin/true"]).await?;
        table.add("create → first command, the first of its size", &[began.elapsed()]);
        Ok(())
    }

    async fn creates(&self, table: &mut Table, when: &str) -> Outcome<()> {
        let (mut whole, mut starts) = (Vec::new(), Vec::new());
        for round in 0..self.rounds.restores {
            tokio::time::sleep(BREATH).await;
            let name = format!("create-{round}");
            let began = Instant::now();
            self.create(&name).await?;
            starts.push(began.elapsed());
            self.run(&name, &["/bin/true"]).await?;
            whole.push(began.elapsed());
            self.client.delete(&name, None).await?;
        }
        table.add(&format!("create (it runs){when}"), &starts);
        table.add(&format!("create → first command{when}"), &whole);
        Ok(())
    }

    async fn pauses(&self, table: &mut Table, when: &str) -> Outcome<()> {
        self.create("app").await?;
        let mut commands = Vec::new();
        for _ in 0..self.rounds.restores {
            let began = Instant::now();
            self.run("app", &["/bin/true"]).await?;
            commands.push(began.elapsed());
        }
        table.add(&format!("command in a running machine{when}"), &commands);
        let (mut pauses, mut starts, mut resumes) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.rounds.restores {
            let began = Instant::now();
            self.client.pause("app", &Pause::default()).await?;
            pauses.push(began.elapsed());
            tokio::time::sleep(BREATH).await;
            let began = Instant::now();
            self.client.start("app", &Start::default()).await?;
            starts.push(began.elapsed());
            self.run("app", &["/bin/true"]).await?;
            resumes.push(began.elapsed());
        }
        table.add(&format!("pause{when}"), &pauses);
        table.add(&format!("resume (it runs){when}"), &starts);
        table.add(&format!("resume → first command{when}"), &resumes);
        self.client.delete("app", None).await?;
        Ok(())
    }

    /// What it costs to capture a machine of which so much has changed.
    async fn captures(&self, table: &mut Table) -> Outcome<()> {
        self.create("dirty").await?;
        self.client.checkpoint("dirty", &Checkpoint::default()).await?;
        for megabytes in self.rounds.dirty {
            let (mut times, mut written) = (Vec::new(), Vec::new());
            for salt in 0..self.rounds.restores.min(5) {
                if *megabytes > 0 {
                    let (size, salt) = (megabytes.to_string(), salt.to_string());
                    self.run("dirty", &["/bin/perl", "-e", DIRTY, &size, &salt]).await?;
                }
                let before = self.machines.disk()?;
                let began = Instant::now();
                self.client.checkpoint("dirty", &Checkpoint::default()).await?;
                times.push(began.elapsed());
                written.push(self.machines.disk()?.saturating_sub(before));
            }
            written.sort_unstable();
            table.add(&format!("checkpoint with memory, {megabytes} MB dirtied"), &times);
            table.note(&format!(
                "checkpoint with memory, {megabytes} MB dirtied: {:.1} MB written to the disk (median)",
                cost::megabytes(written[written.len() / 2])
            ));
        }
        self.client.delete("dirty", None).await?;
        Ok(())
    }

    /// Forks of a machine that runs, and what they use.
    async fn forks(&self) -> Outcome<String> {
        self.create("source").await?;
        // Something to share: a process with memory of its own that keeps counting.
        let count =
            r"my $x = 'x' x (32 << 20); while (1) { $i++; select undef, undef, undef, 0.5 }";
        let argv = ["/bin/perl", "-e", count].map(str::to_owned).to_vec();
        let request = ExecRequest { argv, detach: true, ..ExecRequest::default() };
        self.client.exec_detached("source", &request).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let mut text = String::from(
            "| live forks at once | all there, ms | each, ms | all answered a command, ms | private memory each, MB | share of all (PSS) each, MB | disk each, MB |\n\
             |---|---|---|---|---|---|---|\n",
        );
        for count in self.rounds.forks {
            text.push_str(&self.fork(*count).await?);
        }
        self.client.delete("source", None).await?;
        Ok(text)
    }

    async fn fork(&self, count: u32) -> Outcome<String> {
        let known = self.machines.pids();
        let disk = self.machines.disk()?;
        let request = Fork {
            name: Some(format!("f{count}")),
            count: Some(count),
            start: true,
            ..Fork::default()
        };
        let began = Instant::now();
        let forks = self.client.fork_many("source", &request, None).await?;
        let there = began.elapsed();
        if let Some(failed) = forks.failed.first() {
            return Err(format!("{}: {}", failed.name, failed.reason).into());
        }
        for fork in &forks.made {
            self.run(&fork.sandbox.name, &["/bin/true"]).await?;
        }
        let answered = began.elapsed();
        let fresh: Vec<u32> =
            self.machines.pids().into_iter().filter(|pid| !known.contains(pid)).collect();
        if fresh.len() != count as usize {
            return Err(format!("{} machines came of {count} forks", fresh.len()).into());
        }
        let memory = cost::memory(&fresh)?;
        let disk = self.machines.disk()?.saturating_sub(disk);
        for fork in &forks.made {
            self.client.delete(&fork.sandbox.name, None).await?;
        }
        let each = f64::from(count);
        Ok(format!(
            "| {count} | {:.0} | {:.0} | {:.0} | {:.1} | {:.1} | {:.1} |\n",
            millis(there),
            millis(there) / each,
            millis(answered),
            cost::megabytes(memory.private) / each,
            cost::megabytes(memory.share) / each,
            cost::megabytes(disk) / each,
        ))
    }
}
