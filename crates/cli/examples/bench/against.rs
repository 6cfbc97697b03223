//! This build against another one: two daemons on the same disk take turns, round by round, so both find the machine in the
//! same state. The ratio of two medians is the only result that says something about a change: this machine alone differs
//! by more from one hour to the next than most changes do.

use std::path::Path;
use std::time::{Duration, Instant};

use sandkeep_client::Client;
use sandkeep_client::types::Fork;
use sandkeep_testkit::daemon::Daemon;

use super::stats::{Table, percentile};
use super::{Bench, Outcome, Rounds, make_tree};

/// How much slower a median may be. Two runs of the same program differ by less.
const MAY_DIFFER: f64 = 1.05;
const WRITE: [&str; 3] =
    ["/bin/sh", "-c", "for i in 0 1 2 3 4 5 6 7 8 9; do echo $$ > /work/f$i; done"];

/// The times of one build, by operation.
type Times = Vec<(&'static str, Vec<Duration>)>;

struct Side {
    bench: Bench,
    times: Times,
    _daemon: Daemon,
}

/// Measures `ours` and `other` in turns. Fails if an operation of ours has become slower.
pub(crate) async fn run(ours: &Path, other: &Path, quick: bool) -> Outcome<()> {
    let scratch = tempfile::tempdir()?;
    let tree = scratch.path().join("tree.tar");
    make_tree(&tree, 30_000, 120 << 20)?;
    rustix::fs::sync();
    let mut sides = [side(other, &tree)?, side(ours, &tree)?];
    let [small, large, crowds] = if quick { [20, 2, 2] } else { [100, 7, 5] };
    for round in 0..small {
        in_turn(&mut sides, round, Work::Small).await?;
    }
    for round in 0..crowds {
        in_turn(&mut sides, round, Work::Crowd).await?;
    }
    for round in 0..large {
        in_turn(&mut sides, round, Work::Large).await?;
    }
    report(&sides)
}

fn side(keep: &Path, tree: &Path) -> Outcome<Side> {
    let daemon = Daemon::start_with(keep, &[]);
    daemon.import_small();
    let (url, key) = daemon.url_and_key();
    let client = Client::new(url.parse()?, Some(&key))?;
    let rounds = Rounds { quick: 5, slow: 1, heavy: 1, crowd: 100, sleepers: 0 };
    let bench = Bench { client, tree: tree.to_owned(), rounds, bare: None };
    Ok(Side { bench, times: Times::new(), _daemon: daemon })
}

#[derive(Clone, Copy)]
enum Work {
    /// Everything with ten files.
    Small,
    /// Everything with 30,000.
    Large,
    /// 100 creates at once.
    Crowd,
}

/// One round of both; each is the first in every other round.
async fn in_turn(sides: &mut [Side; 2], round: usize, work: Work) -> Outcome<()> {
    let order = if round.is_multiple_of(2) { [0, 1] } else { [1, 0] };
    for at in order {
        match work {
            Work::Small => sides[at].small().await?,
            Work::Large => sides[at].large().await?,
            Work::Crowd => sides[at].crowd().await?,
        }
    }
    Ok(())
}

impl Side {
    fn took(&mut self, what: &'static str, time: Duration) {
        match self.times.iter_mut().find(|(known, _)| *known == what) {
            Some((_, times)) => times.push(time),
            None => self.times.push((what, vec![time])),
        }
    }

    async fn small(&mut self) -> Outcome<()> {
        let began = Instant::now();
        self.bench.create("app").await?;
        self.bench.run("app", &["/bin/true"]).await?;
        self.took("create → first command", began.elapsed());
        for _ in 0..self.bench.rounds.quick {
            let began = Instant::now();
            self.bench.run("app", &["/bin/true"]).await?;
            self.took("command in a running sandbox", began.elapsed());
        }
        self.bench.run("app", &WRITE).await?;
        let began = Instant::now();
        self.bench.client.stop("app", None).await?;
        self.took("stop, 10 files", began.elapsed());
        let began = Instant::now();
        self.bench.run("app", &["/bin/true"]).await?;
        self.took("resume → first command, 10 files", began.elapsed());
        self.bench.client.stop("app", None).await?;
        self.fork("app", "fork → first command, 10 files").await?;
        self.bench.client.delete("app", None).await?;
        // Neither pays for what the other leaves to be done later.
        tokio::time::sleep(Duration::from_millis(150)).await;
        Ok(())
    }

    async fn large(&mut self) -> Outcome<()> {
        self.bench.create("large").await?;
        self.bench.fill("large").await?;
        let began = Instant::now();
        self.bench.client.stop("large", None).await?;
        self.took("stop, 30,000 new files", began.elapsed());
        for _ in 0..5 {
            let began = Instant::now();
            self.bench.run("large", &["/bin/true"]).await?;
            self.took("resume → first command, 30,000 files", began.elapsed());
            self.bench.client.stop("large", None).await?;
            self.fork("large", "fork → first command, 30,000 files").await?;
        }
        self.bench.client.delete("large", None).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        rustix::fs::sync();
        Ok(())
    }

    async fn fork(&mut self, source: &str, what: &'static str) -> Outcome<()> {
        let request = Fork { name: Some("fork".to_owned()), start: true, ..Fork::default() };
        let began = Instant::now();
        self.bench.client.fork(source, &request, None).await?;
        self.bench.run("fork", &["/bin/true"]).await?;
        self.took(what, began.elapsed());
        self.bench.client.delete("fork", None).await?;
        Ok(())
    }

    async fn crowd(&mut self) -> Outcome<()> {
        for time in self.bench.creates_at_once().await? {
            self.took("100 creates at once, each", time);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok(())
    }
}

fn report(sides: &[Side; 2]) -> Outcome<()> {
    let [other, ours] = sides;
    let mut table = Table::default();
    let mut slower = Vec::new();
    for ((what, theirs), (_, times)) in other.times.iter().zip(&ours.times) {
        let yardstick = format!("(the other build) {what}");
        table.add(&yardstick, theirs);
        table.add_beside(what, times, Some(yardstick));
        let ratio = percentile(times, 0.5) / percentile(theirs, 0.5);
        table.note(&format!("{what}: {:+.1} %", (ratio - 1.0) * 100.0));
        if ratio > MAY_DIFFER {
            slower.push(*what);
        }
    }
    table.print();
    match slower.as_slice() {
        [] => Ok(()),
        _ => Err(format!("slower by more than 5 %: {}", slower.join("; ")).into()),
    }
}
