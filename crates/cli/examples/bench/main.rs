//! The benchmark: the released binary, driven over HTTP, beside its yardsticks in the same run.
//!
//! `./dev bench` builds and runs it; [`USAGE`] has its options. Every figure is a whole round trip as a client sees it, on
//! a data directory of its own. Absolute times depend on the machine; the ratio to the yardstick is what counts.
//!
//! `--compare` compares the run with `docs/benchmarks.json` and fails on a regression (`sandkeep_testkit::bench`);
//! `--record` writes that file. Both take all rows, so `--quick` is refused with them.

mod against;
mod interference;
mod microvm;
mod net;
mod peers;
mod recording;
mod stats;
mod steps;
mod transfer;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sandkeep_client::types::{Checkpoint, CreateSandbox, ExecRequest, Fork, Merge, Promote, Start};
use sandkeep_client::{Client, DiffQuery, Place, Upload};
use sandkeep_testkit::bench::{Compared, Run};
use sandkeep_testkit::daemon::Daemon;

use peers::Bare;
use stats::Table;

/// The run that others are compared with.
const RECORD: &str = "docs/benchmarks.json";

const USAGE: &str = "\
./dev bench [--quick] [--no-peers] [--compare | --record]   everything
./dev bench --net | --microvm | --recording | --steps | --interference | --checkpoints   one part, also with --quick
./dev bench --against KEEP   this build and another program, in turns, also with --quick

  --quick         fewer rounds
  --no-peers      without the other tools
  --compare       fail if something has become slower than in docs/benchmarks.json
  --record        write docs/benchmarks.json
  --net           the network alone
  --microvm       machines with memory alone
  --recording     what the record of changes costs
  --steps         where the time of each operation goes
  --interference  what the work of one sandbox costs the others
  --checkpoints   10,000 checkpoints of one session
  --against KEEP  fail if something is slower by more than 5 % than in that program";

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// How often each thing is done.
struct Rounds {
    quick: usize,
    slow: usize,
    heavy: usize,
    crowd: usize,
    sleepers: usize,
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    if has("--help") {
        writeln!(std::io::stdout(), "{USAGE}")?;
        return Ok(());
    }
    let other = other_program(&args)?;
    if has("--quick") && (has("--compare") || has("--record")) {
        return Err("--compare and --record take a whole run, not --quick".into());
    }
    let rounds = if has("--quick") {
        Rounds { quick: 20, slow: 5, heavy: 1, crowd: 20, sleepers: 100 }
    } else {
        Rounds { quick: 200, slow: 40, heavy: 5, crowd: 100, sleepers: 1000 }
    };
    let built = std::env::current_exe()?;
    let release = built.ancestors().nth(2).map(Path::to_owned).unwrap_or_default();
    if let Some(other) = other {
        return against::run(&release.join("keep"), &other, has("--quick")).await;
    }
    if has("--microvm") {
        return microvm::run(&release.join("keep"), has("--quick")).await;
    }
    if has("--steps") {
        return steps::run(&release.join("keep"), rounds).await;
    }
    let server = net::Server::start()?;
    let settings = tempfile::NamedTempFile::new()?;
    std::fs::write(&settings, format!("[network]\nexcept = [\"127.0.0.1:{}\"]\n", server.port))?;
    let config = settings.path().to_string_lossy().into_owned();
    let daemon = Daemon::start_with(release.join("keep"), &[("SANDKEEP_CONFIG", &config)]);
    daemon.import_small();
    let (url, key) = daemon.url_and_key();
    let client = Client::new(url.parse()?, Some(&key))?;
    let tree = daemon.scratch().join("tree.tar");
    let peers = !has("--no-peers");
    if has("--net") {
        let bench = Bench { client, tree, rounds, bare: None };
        let table =
            net::run(&bench, &server, daemon.scratch(), peers, bench.rounds.heavy.max(3)).await?;
        writeln!(std::io::stdout(), "{table}")?;
        return Ok(());
    }
    if has("--recording") {
        let mut table = Table::default();
        recording::run(&mut table, &release.join("keep"), daemon.scratch(), &rounds).await?;
        table.print();
        return Ok(());
    }
    if has("--interference") {
        let bench = std::sync::Arc::new(Bench { client, tree, rounds, bare: None });
        return interference::run(bench, has("--quick")).await;
    }
    if has("--checkpoints") {
        let bench = Bench { client, tree, rounds, bare: None };
        return interference::run_checkpoints(&bench, has("--quick")).await;
    }
    make_tree(&tree, 30_000, 344 << 20)?;
    // Written back before anything is timed: it is no part of what is measured.
    rustix::fs::sync();

    let mut table = Table::default();
    let bare = Bare::new(release.join("yardstick"), daemon.scratch())?;
    if peers {
        peers::run(&mut table, &bare, daemon.scratch(), &tree, rounds.slow)?;
        // What they leave to be written back is no part of what comes next.
        rustix::fs::sync();
    }
    let bench = Bench { client, tree, rounds, bare: Some(bare) };
    bench.small(&mut table).await?;
    bench.once(&mut table, &daemon).await?;
    bench.large(&mut table).await?;
    bench.crowd(&mut table).await?;
    transfer::run(&bench, &mut table, daemon.scratch(), bench.rounds.heavy).await?;
    bench.sleepers(&mut table, &daemon).await?;
    recording::run(&mut table, &release.join("keep"), daemon.scratch(), &bench.rounds).await?;
    let network =
        net::run(&bench, &server, daemon.scratch(), peers, bench.rounds.heavy.max(3)).await?;
    let bare = bench.bare.as_ref().map(Bare::times).unwrap_or_default();
    table.add_first(stats::BARE, &bare);
    table.print();
    writeln!(std::io::stdout(), "\n{network}")?;
    if has("--record") {
        let run = Run { about: about(), ..table.run().clone() };
        std::fs::write(RECORD, serde_json::to_string_pretty(&run)? + "\n")?;
    }
    if has("--compare") {
        compare(table.run())?;
    }
    Ok(())
}

/// The program that `--against` names. Fails for arguments that are not known.
fn other_program(args: &[String]) -> Outcome<Option<PathBuf>> {
    let mut other = None;
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        if arg == "--against" {
            let program = PathBuf::from(rest.next().ok_or("--against needs a program")?);
            if !program.is_file() {
                return Err(format!("there is no program `{}`", program.display()).into());
            }
            other = Some(program.canonicalize()?);
        } else if !USAGE.split_whitespace().any(|word| word.trim_matches(['[', ']']) == arg) {
            return Err(format!("unknown argument `{arg}`\n\n{USAGE}").into());
        }
    }
    Ok(other)
}

/// Compares a run with the one on record, prints how, and fails if something has become slower.
fn compare(run: &Run) -> Outcome<()> {
    let recorded: Run = serde_json::from_str(&std::fs::read_to_string(RECORD)?)?;
    let compared = run.compare(&recorded);
    let mut out = std::io::stdout().lock();
    writeln!(out, "Compared with {RECORD} ({}), as ratios to the yardstick:\n", recorded.about)?;
    writeln!(out, "| operation | recorded | now | change | |\n|---|---|---|---|---|")?;
    for one in &compared {
        writeln!(out, "{one}")?;
    }
    match compared.iter().filter(|one| Compared::is_regression(one)).count() {
        0 => Ok(()),
        count => Err(format!("{count} of {} have become slower", compared.len()).into()),
    }
}

/// When and where a run was made.
fn about() -> String {
    let system = rustix::system::uname();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "{}, {cores} cores, Linux {}",
        jiff::Timestamp::now().to_string().split('T').next().unwrap_or_default(),
        system.release().to_string_lossy()
    )
}

struct Bench {
    client: Client,
    tree: PathBuf,
    rounds: Rounds,
    /// What is measured between rounds.
    bare: Option<Bare>,
}

impl Bench {
    /// Measures the yardstick once. After a moment, so that neither pays for the other's end.
    async fn beside(&self) -> Outcome<()> {
        if let Some(bare) = &self.bare {
            tokio::time::sleep(Duration::from_millis(20)).await;
            bare.measure()?;
        }
        Ok(())
    }

    /// How often the yardstick was measured so far.
    fn bare_count(&self) -> usize {
        self.bare.as_ref().map_or(0, |bare| bare.times().len())
    }

    /// Adds a row, with what the yardstick took since there were `count` of it.
    fn add(&self, table: &mut Table, what: &str, times: &[Duration], count: usize) {
        let beside = self.bare.as_ref().map(|bare| bare.since(count)).unwrap_or_default();
        table.add_with(what, times, &beside);
    }

    async fn create(&self, name: &str) -> Outcome<()> {
        let request = CreateSandbox {
            name: Some(name.to_owned()),
            image: Some("small".to_owned()),
            start: Some(true),
            ..CreateSandbox::default()
        };
        self.client.create(&request, None).await?;
        Ok(())
    }

    async fn run(&self, name: &str, argv: &[&str]) -> Outcome<()> {
        let argv = argv.iter().map(|arg| (*arg).to_owned()).collect();
        let request = ExecRequest { argv, ..ExecRequest::default() };
        let (ended, _, err) = self.client.exec(name, &request).await?.collect().await?;
        if ended.exit_code != Some(0) {
            return Err(String::from_utf8_lossy(&err).into());
        }
        Ok(())
    }

    async fn fill(&self, name: &str) -> Outcome<()> {
        let file = tokio::fs::File::open(&self.tree).await?;
        self.client.tar_in(Place::new(name, "/work"), Upload::reader(file)).await?;
        // A clean page cache: what the daemon writes back by itself is on disk by now.
        rustix::fs::sync();
        Ok(())
    }

    /// Everything with ten files.
    async fn small(&self, table: &mut Table) -> Outcome<()> {
        let (mut times, bare) = (Vec::new(), self.bare_count());
        for round in 0..self.rounds.slow {
            let name = format!("create-{round}");
            let began = Instant::now();
            self.create(&name).await?;
            self.run(&name, &["/bin/true"]).await?;
            times.push(began.elapsed());
            self.client.delete(&name, None).await?;
            if round % 2 == 0 {
                // The other half follows in quick succession.
                self.beside().await?;
            }
        }
        self.add(table, "create → first command", &times, bare);

        self.create("app").await?;
        let (mut times, bare) = (Vec::new(), self.bare_count());
        for round in 0..self.rounds.quick {
            let began = Instant::now();
            self.run("app", &["/bin/true"]).await?;
            times.push(began.elapsed());
            if round % 10 == 0 {
                self.beside().await?;
            }
        }
        self.add(table, "command in a running sandbox", &times, bare);

        let (mut stops, mut resumes, bare) = (Vec::new(), Vec::new(), self.bare_count());
        let write = ["/bin/sh", "-c", "for i in 0 1 2 3 4 5 6 7 8 9; do echo $$ > /work/f$i; done"];
        for _ in 0..self.rounds.slow {
            self.run("app", &write).await?;
            let began = Instant::now();
            self.client.stop("app", None).await?;
            stops.push(began.elapsed());
            let began = Instant::now();
            self.run("app", &["/bin/true"]).await?;
            resumes.push(began.elapsed());
            self.beside().await?;
        }
        self.add(table, "stop, 10 files", &stops, bare);
        self.add(table, "resume → first command, 10 files", &resumes, bare);
        self.client.stop("app", None).await?;
        self.forks(table, "app", "fork → first command, 10 files").await?;

        let (mut idle, mut busy, bare) = (Vec::new(), Vec::new(), self.bare_count());
        for _ in 0..self.rounds.slow {
            self.run("app", &write).await?;
            let began = Instant::now();
            self.client.checkpoint("app", &Checkpoint::default()).await?;
            idle.push(began.elapsed());
            self.beside().await?;
        }
        self.add(table, "checkpoint, idle", &idle, bare);
        let argv = ["/bin/sleep", "1000"].map(str::to_owned).to_vec();
        self.client
            .exec_detached("app", &ExecRequest { argv, detach: true, ..ExecRequest::default() })
            .await?;
        let bare = self.bare_count();
        for _ in 0..self.rounds.slow {
            self.run("app", &write).await?;
            let began = Instant::now();
            self.client.checkpoint("app", &Checkpoint::default()).await?;
            busy.push(began.elapsed());
            self.beside().await?;
        }
        self.add(table, "checkpoint, a process alive", &busy, bare);
        self.client.delete("app", None).await?;
        Ok(())
    }

    /// A sandbox for one command, by the command line: three processes, create, command, delete.
    async fn once(&self, table: &mut Table, daemon: &Daemon) -> Outcome<()> {
        let (mut times, bare) = (Vec::new(), self.bare_count());
        for _ in 0..self.rounds.slow {
            let mut keep = daemon.command(["run", "--rm", "--image", "small", "--", "/bin/true"]);
            let began = Instant::now();
            let done = keep.output()?;
            times.push(began.elapsed());
            if !done.status.success() {
                return Err(String::from_utf8_lossy(&done.stderr).into());
            }
            self.beside().await?;
        }
        self.add(table, "keep run --rm -- true", &times, bare);
        if let (Some(ours), Some(podman)) =
            (table.median("keep run --rm -- true"), table.median("(podman) run"))
        {
            table.note(&format!("keep run --rm is {:.1} × as fast as podman run", podman / ours));
        }
        Ok(())
    }

    async fn forks(&self, table: &mut Table, source: &str, what: &str) -> Outcome<()> {
        let (mut times, bare) = (Vec::new(), self.bare_count());
        for round in 0..self.rounds.slow {
            let name = format!("fork-{round}");
            let request = Fork { name: Some(name.clone()), start: true, ..Fork::default() };
            let began = Instant::now();
            self.client.fork(source, &request, None).await?;
            self.run(&name, &["/bin/true"]).await?;
            times.push(began.elapsed());
            self.client.delete(&name, None).await?;
            if round % 2 == 0 {
                self.beside().await?;
            }
        }
        self.add(table, what, &times, bare);
        Ok(())
    }

    /// The same with 30,000 files, 344 MB.
    async fn large(&self, table: &mut Table) -> Outcome<()> {
        let (mut stops, mut idle_stops) = (Vec::new(), Vec::new());
        let (mut checkpoints, bare) = (Vec::new(), self.bare_count());
        for round in 0..self.rounds.heavy {
            let name = format!("large-{round}");
            self.create(&name).await?;
            self.fill(&name).await?;
            let began = Instant::now();
            self.client.stop(&name, None).await?;
            stops.push(began.elapsed());
            if round > 0 {
                self.client.delete(&name, None).await?;
            }
            self.create("idle").await?;
            self.fill("idle").await?;
            // The daemon visits the files of an idle sandbox ahead of its stop.
            tokio::time::sleep(Duration::from_secs(3)).await;
            let began = Instant::now();
            self.client.stop("idle", None).await?;
            idle_stops.push(began.elapsed());
            self.client.delete("idle", None).await?;
            self.create("check").await?;
            self.fill("check").await?;
            let began = Instant::now();
            self.client.checkpoint("check", &Checkpoint::default()).await?;
            checkpoints.push(began.elapsed());
            self.client.delete("check", None).await?;
            for _ in 0..3 {
                self.beside().await?;
            }
        }
        self.add(table, "stop, 30,000 new files", &stops, bare);
        self.add(table, "stop, 30,000 new files, idle for 3 s", &idle_stops, bare);
        self.add(table, "checkpoint, idle, 30,000 new files", &checkpoints, bare);
        let (mut resumes, bare) = (Vec::new(), self.bare_count());
        for _ in 0..self.rounds.slow {
            let began = Instant::now();
            self.run("large-0", &["/bin/true"]).await?;
            resumes.push(began.elapsed());
            self.client.stop("large-0", None).await?;
            self.beside().await?;
        }
        self.add(table, "resume → first command, 30,000 files", &resumes, bare);
        self.forks(table, "large-0", "fork → first command, 30,000 files").await?;
        self.differences(table, "large-0").await?;
        self.client.delete("large-0", None).await?;
        Ok(())
    }

    /// A fork that differs in ten files: compared, merged and promoted.
    async fn differences(&self, table: &mut Table, origin: &str) -> Outcome<()> {
        let bare = self.bare_count();
        let (mut diffs, mut merges, mut promotions) = (Vec::new(), Vec::new(), Vec::new());
        let query =
            DiffQuery { from: origin.to_owned(), to: "differs".to_owned(), ..DiffQuery::default() };
        for _ in 0..self.rounds.slow {
            self.client.fork(origin, &named("differs"), None).await?;
            let line = "find /work -type f | head -n 10 | while read f; do echo more >> $f; done";
            self.run("differs", &["/bin/sh", "-c", line]).await?;
            self.client.stop("differs", None).await?;
            let began = Instant::now();
            let diff = self.client.diff(&query, None).await?;
            diffs.push(began.elapsed());
            if diff.counts.modified != 10 {
                return Err(format!("10 files differ, and not {:?}", diff.counts).into());
            }
            self.client.fork(origin, &named("target"), None).await?;
            let into = Merge { into: Some("target".to_owned()), ..Merge::default() };
            let began = Instant::now();
            self.client.merge("differs", &into).await?;
            merges.push(began.elapsed());
            self.client.fork("target", &named("promoted"), None).await?;
            self.run("promoted", &["/bin/sh", "-c", "echo more > /work/more"]).await?;
            self.client.stop("promoted", None).await?;
            let began = Instant::now();
            self.client.promote("promoted", &Promote::default(), None).await?;
            promotions.push(began.elapsed());
            for name in ["promoted", "target", "differs"] {
                self.client.delete(name, None).await?;
            }
            self.beside().await?;
        }
        self.add(table, "diff, 10 of 30,000 files", &diffs, bare);
        self.add(table, "merge, 10 of 30,000 files", &merges, bare);
        self.add(table, "promote, 30,000 files", &promotions, bare);
        Ok(())
    }

    /// Many creates at once.
    async fn crowd(&self, table: &mut Table) -> Outcome<()> {
        let bare = self.bare_count();
        for _ in 0..10 {
            self.beside().await?;
        }
        let times = self.creates_at_once().await?;
        self.add(table, &format!("{} creates at once, each", self.rounds.crowd), &times, bare);
        let all = times.iter().max().copied().unwrap_or_default();
        table.note(&format!(
            "{} creates at once, all of them: {:.0} ms",
            self.rounds.crowd,
            stats::millis(all)
        ));
        Ok(())
    }

    /// Creates as many sandboxes as a crowd has, all at the same time, and deletes them. Answers with what each create took.
    async fn creates_at_once(&self) -> Outcome<Vec<Duration>> {
        let tasks: Vec<_> = (0..self.rounds.crowd)
            .map(|n| {
                let client = self.client.clone();
                tokio::spawn(async move {
                    let request = CreateSandbox {
                        name: Some(format!("crowd-{n}")),
                        image: Some("small".to_owned()),
                        start: Some(true),
                        ..CreateSandbox::default()
                    };
                    let began = Instant::now();
                    client.create(&request, None).await.map(|_| began.elapsed())
                })
            })
            .collect();
        let mut times = Vec::new();
        for task in tasks {
            times.push(task.await??);
        }
        for n in 0..self.rounds.crowd {
            self.client.delete(&format!("crowd-{n}"), None).await?;
        }
        Ok(times)
    }

    /// Many that sleep.
    async fn sleepers(&self, table: &mut Table, daemon: &Daemon) -> Outcome<()> {
        self.create("seed").await?;
        self.run("seed", &["/bin/sh", "-c", "echo x > /work/x"]).await?;
        self.client.stop("seed", None).await?;
        for n in 0..self.rounds.sleepers {
            let request =
                Fork { name: Some(format!("sleeper-{n}")), start: false, ..Fork::default() };
            self.client.fork("seed", &request, None).await?;
        }
        // One of a thousand wakes as quickly as one of one.
        let (mut times, bare) = (Vec::new(), self.bare_count());
        for n in 0..self.rounds.slow.min(self.rounds.sleepers) {
            let name = format!("sleeper-{n}");
            let began = Instant::now();
            self.client.start(&name, &Start::default()).await?;
            self.run(&name, &["/bin/true"]).await?;
            times.push(began.elapsed());
            self.client.stop(&name, None).await?;
            self.beside().await?;
        }
        let what = format!("resume → first command, one of {}", self.rounds.sleepers);
        self.add(table, &what, &times, bare);
        // What work leaves with the allocator is given back every ten seconds.
        tokio::time::sleep(Duration::from_secs(15)).await;
        let pid = daemon.pid().unwrap_or(0);
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let megabytes = |field: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or("0");
            let kilobytes = line.trim().trim_end_matches(" kB").trim().parse::<f64>();
            kilobytes.map_or(f64::NAN, |kilobytes| kilobytes / 1024.0)
        };
        let (agents, waiting) = count_processes(&daemon.data());
        let sleepers = self.rounds.sleepers;
        let [all, own, program] = ["VmRSS:", "RssAnon:", "RssFile:"].map(megabytes);
        table.add_memory(&format!("{sleepers} sleeping sandboxes, daemon resident"), all);
        table.note(&format!(
            "{sleepers} sleeping sandboxes: {agents} processes ({waiting} wait for the next start), daemon {all:.1} MiB resident ({own:.1} of its own, {program:.1} of \
             its program file)"
        ));
        Ok(())
    }
}

/// The processes of sandboxes, and those that wait for the next, by the agent program in the data directory. A sandbox's have mounts of their own.
fn count_processes(data: &Path) -> (usize, usize) {
    let mounts = |process: &Path| std::fs::read_link(process.join("ns/mnt")).ok();
    let ours = mounts(Path::new("/proc/self"));
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let agents = entries.map(|entry| entry.path()).filter(|process| {
        std::fs::read_link(process.join("exe")).is_ok_and(|exe| exe.starts_with(data))
    });
    let (waiting, of_sandboxes): (Vec<_>, Vec<_>) =
        agents.partition(|process| mounts(process) == ours);
    (of_sandboxes.len(), waiting.len())
}

/// A fork that is not started.
fn named(name: &str) -> Fork {
    Fork { name: Some(name.to_owned()), start: false, ..Fork::default() }
}

/// Writes a tar with `files` files, a hundred in a directory.
fn make_tree(path: &Path, files: usize, bytes: usize) -> Outcome<()> {
    let mut archive = tar::Builder::new(std::io::BufWriter::new(std::fs::File::create(path)?));
    let size = bytes / files;
    let mut content = vec![0u8; size];
    for file in 0..files {
        // Different in every file, and not compressible by a filesystem that would.
        let mut state = file as u64 + 1;
        for chunk in content.chunks_mut(8) {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let len = chunk.len();
            chunk.copy_from_slice(&state.to_le_bytes()[..len]);
        }
        let mut header = tar::Header::new_gnu();
        header.set_size(size as u64);
        header.set_mode(0o644);
        archive.append_data(
            &mut header,
            format!("tree/d{:03}/f{file:05}", file / 100),
            content.as_slice(),
        )?;
    }
    archive.finish()?;
    Ok(())
}
