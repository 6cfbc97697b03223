//! What the work of one sandbox costs the others.
//!
//! Small sandboxes run a command, stop, resume and fork, first on a quiet daemon and then while a sandbox with many files is
//! checkpointed, compacted, and deleted for good. What counts is the p99 of the second as a ratio to the p99 of the first, in
//! the same run: at most [`BUDGET`].

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sandkeep_client::types::{Checkpoint, ExecRequest, Fork};

use super::stats::{Table, percentile};
use super::{Bench, Outcome, make_tree};

/// What the others may lose.
const BUDGET: f64 = 2.0;

/// How long each thing takes.
#[derive(Default)]
struct Times {
    exec: Vec<Duration>,
    stop: Vec<Duration>,
    start: Vec<Duration>,
    fork: Vec<Duration>,
}

impl Times {
    fn rows(&self) -> [(&'static str, &[Duration]); 4] {
        [("exec", &self.exec), ("stop", &self.stop), ("start", &self.start), ("fork", &self.fork)]
    }
}

/// Measures until `over` says so, and as often as `least` at least.
async fn measure(bench: &Bench, over: &AtomicBool, least: usize) -> Outcome<Times> {
    let mut times = Times::default();
    let write = ["/bin/sh", "-c", "echo $$ > /work/file"];
    let mut round = 0;
    while round < least || !over.load(Ordering::SeqCst) {
        for _ in 0..5 {
            let began = Instant::now();
            bench.run("bystander", &["/bin/true"]).await?;
            times.exec.push(began.elapsed());
        }
        bench.run("bystander", &write).await?;
        let began = Instant::now();
        bench.client.stop("bystander", None).await?;
        times.stop.push(began.elapsed());
        let fork = format!("bystander-{round}");
        let request = Fork { name: Some(fork.clone()), start: true, ..Fork::default() };
        let began = Instant::now();
        bench.client.fork("bystander", &request, None).await?;
        times.fork.push(began.elapsed());
        bench.client.delete(&fork, None).await?;
        let began = Instant::now();
        bench.run("bystander", &["/bin/true"]).await?;
        times.start.push(began.elapsed());
        round += 1;
    }
    Ok(times)
}

/// Does the work that may disturb, and says when it is over.
async fn disturb(bench: &Bench, what: &str) -> Outcome<()> {
    let name = if what == "compacted" { "layered" } else { "heavy" };
    match what {
        "checkpointed" => {
            // A process that is alive: its files are copied.
            let argv = ["/bin/sleep", "1000"].map(str::to_owned).to_vec();
            let sleep = ExecRequest { argv, detach: true, ..ExecRequest::default() };
            bench.client.exec_detached(name, &sleep).await?;
            bench.client.checkpoint(name, &Checkpoint::default()).await?;
        }
        "compacted" => {
            // One layer more than a chain may have: they are merged.
            bench.run(name, &["/bin/sh", "-c", "echo one more > /work/more"]).await?;
            bench.client.stop(name, None).await?;
            merged(bench, name).await?;
        }
        _ => {
            bench.client.delete(name, None).await?;
            bench.client.empty_trash().await?;
            tokio::time::sleep(Duration::from_secs(20)).await;
        }
    }
    Ok(())
}

/// How many layers a chain has before it is compacted.
const LAYERS: usize = 24;

/// Adds a layer with its share of the files.
async fn grow(bench: &Bench, name: &str, layer: usize, files: usize) -> Outcome<()> {
    let files = files / LAYERS;
    let script = format!(
        "mkdir -p /work/{layer} && cd /work/{layer} && i=0; while [ $i -lt {files} ]; do echo $i > $i; i=$((i+1)); done"
    );
    bench.run(name, &["/bin/sh", "-c", &script]).await?;
    bench.client.stop(name, None).await?;
    Ok(())
}

/// How many layers the current snapshot of a sandbox stands on.
async fn layers_of(bench: &Bench, name: &str) -> Outcome<u64> {
    let current = bench.client.sandbox(name).await?.current_snapshot.ok_or("it has no snapshot")?;
    Ok(bench.client.snapshot(&current).await?.layers)
}

/// Waits until the chain of a sandbox is short.
async fn merged(bench: &Bench, name: &str) -> Outcome<()> {
    let deadline = Instant::now() + Duration::from_secs(300);
    let before = layers_of(bench, name).await?;
    while layers_of(bench, name).await? >= before {
        if Instant::now() > deadline {
            return Err("its layers were not merged within five minutes".into());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

pub(crate) async fn run(bench: Arc<Bench>, quick: bool) -> Outcome<()> {
    let files = if quick { 20_000 } else { 200_000 };
    // As long as the disturbances take, so that both see what happens now and then anyway.
    let least = if quick { 10 } else { 400 };
    let mut table = Table::default();
    bench.create("bystander").await?;
    let over = AtomicBool::new(true);
    let quiet = measure(&bench, &over, least).await?;
    for (what, times) in quiet.rows() {
        table.add(&format!("{what}, quiet"), times);
    }
    make_tree(&bench.tree, files, 1 << 30)?;
    rustix::fs::sync();
    bench.create("heavy").await?;
    bench.fill("heavy").await?;
    bench.create("layered").await?;
    for layer in 0..LAYERS {
        grow(&bench, "layered", layer, files).await?;
    }
    rustix::fs::sync();
    let mut worst: f64 = 0.0;
    for what in ["checkpointed", "compacted", "deleted"] {
        let over = Arc::new(AtomicBool::new(false));
        let (other, done) = (Arc::clone(&bench), Arc::clone(&over));
        let work = async move {
            let outcome = disturb(&other, what).await.map_err(|error| error.to_string());
            done.store(true, Ordering::SeqCst);
            outcome
        };
        let (disturbed, measured) = tokio::join!(work, measure(&bench, &over, 5));
        disturbed?;
        for ((name, before), (_, now)) in quiet.rows().iter().zip(measured?.rows()) {
            let ratio = percentile(now, 0.99) / percentile(before, 0.99);
            worst = worst.max(ratio);
            table
                .add(&format!("{name}, one with {files} files is {what} ({ratio:.1}× quiet)"), now);
        }
    }
    table.note(&format!(
        "p99 of others while one with {files} files is checkpointed, compacted and deleted: at most {worst:.1}× quiet, \
         of {BUDGET:.1}× allowed"
    ));
    table.print();
    if worst > BUDGET {
        writeln!(std::io::stderr(), "over budget: {worst:.1}×")?;
    }
    Ok(())
}

/// What many snapshots cost: checkpoints of a sandbox with few snapshots, and of the same one with many.
pub(crate) async fn run_checkpoints(bench: &Bench, quick: bool) -> Outcome<()> {
    let mut table = Table::default();
    for busy in [false, true] {
        many_snapshots(bench, &mut table, quick, busy).await?;
    }
    table.print();
    Ok(())
}

/// Checkpoints of one session with few and with many snapshots, while it is idle and while a process writes. Every tenth
/// snapshot is resumed and looked at.
async fn many_snapshots(bench: &Bench, table: &mut Table, quick: bool, busy: bool) -> Outcome<()> {
    let (many, window) = if quick { (200, 20) } else { (10_000, 500) };
    let (name, what) =
        if busy { ("busy", "of a busy session") } else { ("idle", "of an idle session") };
    bench.create(name).await?;
    if busy {
        let script = "while :; do date +%N > /work/other; sleep 0.05; done";
        let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let writer = ExecRequest { argv, detach: true, ..ExecRequest::default() };
        bench.client.exec_detached(name, &writer).await?;
    }
    let mut times = Vec::new();
    for round in 0..many {
        let script = format!("echo {round} > /work/file");
        bench.run(name, &["/bin/sh", "-c", &script]).await?;
        let began = Instant::now();
        let snapshot = bench.client.checkpoint(name, &Checkpoint::default()).await?;
        times.push(began.elapsed());
        if round % 10 == 9 {
            let fork = format!("{name}-{round}");
            let request = Fork {
                name: Some(fork.clone()),
                from: Some(snapshot.id),
                start: true,
                ..Fork::default()
            };
            bench.client.fork(name, &request, None).await?;
            let look = format!("test \"$(cat /work/file)\" = {round}");
            bench.run(&fork, &["/bin/sh", "-c", &look]).await?;
            bench.client.delete(&fork, None).await?;
        }
    }
    let (few, last) = (&times[..window], &times[times.len() - window..]);
    table.add(&format!("checkpoint {what}, the first {window}"), few);
    table.add(&format!("checkpoint {what}, the last {window} of {many}"), last);
    let ratio = percentile(last, 0.50) / percentile(few, 0.50);
    table.note(&format!(
        "p50 of a checkpoint {what} after {many} of them: {ratio:.1}× that of the first {window}; {} of them were resumed",
        many / 10
    ));
    bench.client.delete(name, None).await?;
    Ok(())
}
