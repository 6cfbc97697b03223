//! Where the time of each operation goes: the times between the steps that the daemon logs on the way.
//!
//! Every fail point and some places between them are lines of the log at level `trace` (`crates/core/src/failpoint.rs`). One operation is
//! done at a time, so whatever is logged meanwhile belongs to it. A step's time is what passed since the line before it; writing the
//! lines is part of it, some ten microseconds each.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use sandkeep_client::Client;
use sandkeep_client::types::Fork;
use sandkeep_testkit::daemon::Daemon;

use super::{Bench, Outcome, Rounds};

const TARGET: &str = " sandkeep_core::step: ";

/// The steps of one round, and what each took in milliseconds.
type Round = Vec<(String, f64)>;

/// The operations, and for each its rounds.
#[derive(Default)]
struct Report {
    operations: Vec<(String, Vec<Round>)>,
}

pub(crate) async fn run(keep: &Path, rounds: Rounds) -> Outcome<()> {
    let filter = "warn,sandkeep_core::step=trace";
    let daemon = Daemon::start_with(keep, &[("SANDKEEP_LOG", filter)]);
    daemon.import_small();
    let (url, key) = daemon.url_and_key();
    let client = Client::new(url.parse()?, Some(&key))?;
    let tree = daemon.scratch().join("tree.tar");
    super::make_tree(&tree, 30_000, 344 << 20)?;
    let bench = Bench { client, tree, rounds, bare: None };
    let mut report = Report::default();
    let write = ["/bin/sh", "-c", "for i in 0 1 2 3 4 5 6 7 8 9; do echo $$ > /work/f$i; done"];
    for round in 0..bench.rounds.slow {
        let (name, fork) = (format!("box-{round}"), format!("fork-{round}"));
        report.time(&daemon, "create", bench.create(&name)).await?;
        report.time(&daemon, "first command", bench.run(&name, &["/bin/true"])).await?;
        report.time(&daemon, "command", bench.run(&name, &["/bin/true"])).await?;
        bench.run(&name, &write).await?;
        report.time(&daemon, "stop, 10 files", stop(&bench, &name)).await?;
        let resumed = bench.run(&name, &["/bin/true"]);
        report.time(&daemon, "resume → first command", resumed).await?;
        stop(&bench, &name).await?;
        let request = Fork { name: Some(fork.clone()), start: true, ..Fork::default() };
        let forked = async { Ok(bench.client.fork(&name, &request, None).await.map(drop)?) };
        report.time(&daemon, "fork", forked).await?;
        report.time(&daemon, "delete, running", delete(&bench, &fork)).await?;
        delete(&bench, &name).await?;
    }
    for round in 0..bench.rounds.heavy {
        let name = format!("large-{round}");
        bench.create(&name).await?;
        bench.fill(&name).await?;
        report.time(&daemon, "stop, 30,000 new files", stop(&bench, &name)).await?;
        delete(&bench, &name).await?;
    }
    report.print();
    Ok(())
}

async fn stop(bench: &Bench, name: &str) -> Outcome<()> {
    bench.client.stop(name, None).await?;
    Ok(())
}

async fn delete(bench: &Bench, name: &str) -> Outcome<()> {
    bench.client.delete(name, None).await?;
    Ok(())
}

impl Report {
    async fn time(
        &mut self,
        daemon: &Daemon,
        what: &str,
        work: impl Future<Output = Outcome<()>>,
    ) -> Outcome<()> {
        let before = daemon.log().len();
        let began = seconds(SystemTime::now());
        work.await?;
        let ended = seconds(SystemTime::now());
        let log = daemon.log();
        let mut last = began;
        let mut steps = Vec::new();
        for (at, step) in log[before..].lines().filter_map(parse) {
            if at > ended {
                break;
            }
            steps.push((step.to_owned(), (at - last) * 1000.0));
            last = at;
        }
        steps.push(("(answer)".to_owned(), (ended - last) * 1000.0));
        steps.push(("(all)".to_owned(), (ended - began) * 1000.0));
        match self.operations.iter_mut().find(|(name, _)| name == what) {
            Some((_, rounds)) => rounds.push(steps),
            None => self.operations.push((what.to_owned(), vec![steps])),
        }
        Ok(())
    }

    fn print(&self) {
        let mut out = std::io::stdout().lock();
        for (operation, rounds) in &self.operations {
            let _ = writeln!(out, "\n| {operation} | p50 ms | p95 ms |\n|---|---|---|");
            for (step, times) in medians(rounds) {
                let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
                let _ = writeln!(out, "| {step} | {:.2} | {:.2} |", at(0.5), at(0.95));
            }
        }
    }
}

/// The times of each step, sorted, in the order of the round that has the most steps. A step that comes more than once is counted.
fn medians(rounds: &[Round]) -> Vec<(String, Vec<f64>)> {
    let numbered = |round: &[(String, f64)]| {
        let mut seen: BTreeMap<String, u32> = BTreeMap::new();
        let steps = round.iter().map(|(step, time)| {
            let count = seen.entry(step.clone()).or_default();
            *count += 1;
            let name = if *count == 1 { step.clone() } else { format!("{step} #{count}") };
            (name, *time)
        });
        steps.collect::<Vec<_>>()
    };
    let rounds: Vec<_> = rounds.iter().map(|round| numbered(round)).collect();
    let Some(longest) = rounds.iter().max_by_key(|round| round.len()) else { return Vec::new() };
    let times = |step: &str| {
        let all = rounds.iter().flatten().filter(|(name, _)| name == step);
        let mut times: Vec<f64> = all.map(|(_, time)| *time).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    longest.iter().map(|(step, _)| (step.clone(), times(step))).collect()
}

/// When a line of the log says that which step was reached.
fn parse(line: &str) -> Option<(f64, &str)> {
    let (head, step) = line.split_once(TARGET)?;
    let at: jiff::Timestamp = head.split_whitespace().next()?.parse().ok()?;
    Some((at.as_nanosecond() as f64 / 1e9, step))
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
