//! Files in and out of a sandbox, beside what `tar` takes for the same on the host.
//!
//! Both sides read and write the page cache, and neither syncs. The client is on the same machine and shares its processors with the
//! daemon and the agent, so a copy over HTTP, the agent's link and overlayfs costs several of `tar`'s.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sandkeep_client::{Place, Upload, WriteOptions};

use super::stats::{Table, percentile};
use super::{Bench, Outcome};

const BOX: &str = "transfer";
/// The size of the single file.
const FILE: usize = 256 << 20;

pub(crate) async fn run(
    bench: &Bench,
    table: &mut Table,
    scratch: &Path,
    rounds: usize,
) -> Outcome<()> {
    let single = scratch.join("single.tar");
    super::make_tree(&single, 1, FILE)?;
    let tree = std::fs::metadata(&bench.tree)?.len();
    let plain = scratch.join("single");
    std::fs::create_dir_all(&plain)?;
    done(Command::new("tar").arg("-xf").arg(&single).arg("-C").arg(&plain))?;
    let plain = plain.join("tree/d000/f00000");
    rustix::fs::sync();

    let host = scratch.join("host");
    let mut times = Times::default();
    for _ in 0..rounds {
        // Side by side, so that both find the machine in the same state.
        for (archive, into, out) in [
            (&bench.tree, &mut times.host_tree_in, &mut times.host_tree_out),
            (&single, &mut times.host_file_in, &mut times.host_file_out),
        ] {
            std::fs::create_dir_all(&host)?;
            let began = Instant::now();
            done(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&host))?;
            into.push(began.elapsed());
            let began = Instant::now();
            // Not to /dev/null, which tar knows and does not read files for.
            let mut pack = Command::new("tar");
            pack.args(["-cf", "-", "-C"]).arg(&host).arg("tree").stdout(Stdio::piped());
            let mut pack = pack.spawn()?;
            let mut out_of = pack.stdout.take().ok_or("no pipe")?;
            std::io::copy(&mut out_of, &mut std::io::sink())?;
            pack.wait()?;
            out.push(began.elapsed());
            std::fs::remove_dir_all(&host)?;
        }
        bench.create(BOX).await?;
        let began = Instant::now();
        let file = tokio::fs::File::open(&bench.tree).await?;
        bench.client.tar_in(Place::new(BOX, "/work"), Upload::reader(file)).await?;
        times.tree_in.push(began.elapsed());
        let began = Instant::now();
        let download = bench.client.tar_out(Place::new(BOX, "/work/tree")).await?;
        download.copy_to(&mut tokio::io::sink()).await?;
        times.tree_out.push(began.elapsed());
        let began = Instant::now();
        let file = tokio::fs::File::open(&plain).await?;
        let place = Place::new(BOX, "/work/single");
        bench.client.write_file(place, WriteOptions::default(), Upload::reader(file)).await?;
        times.file_in.push(began.elapsed());
        let began = Instant::now();
        let download = bench.client.read_file(Place::new(BOX, "/work/single")).await?;
        download.copy_to(&mut tokio::io::sink()).await?;
        times.file_out.push(began.elapsed());
        bench.client.delete(BOX, None).await?;
        rustix::fs::sync();
    }
    let rows: [Compared<'_>; 4] = [
        ("unpack", "upload, tar of 30,000 files", &times.host_tree_in, &times.tree_in, tree),
        ("pack", "download, tar of 30,000 files", &times.host_tree_out, &times.tree_out, tree),
        ("unpack", "upload, one file of 256 MiB", &times.host_file_in, &times.file_in, FILE as u64),
        (
            "pack",
            "download, one file of 256 MiB",
            &times.host_file_out,
            &times.file_out,
            FILE as u64,
        ),
    ];
    for (does, what, host, ours, bytes) in rows {
        let (_, which) = what.split_once(", ").unwrap_or(("", what));
        let yardstick = format!("(tar on the host) {does}, {which}");
        table.add(&yardstick, host);
        table.add_beside(what, ours, Some(yardstick.clone()));
        let speed = |times: &[Duration]| bytes as f64 / 1e3 / percentile(times, 0.5);
        table.note(&format!(
            "{what}: {:.0} MB/s; tar on the host: {:.0} MB/s",
            speed(ours),
            speed(host)
        ));
    }
    Ok(())
}

/// What tar does, what we do, the times of both, and how many bytes that is.
type Compared<'a> = (&'a str, &'a str, &'a [Duration], &'a [Duration], u64);

#[derive(Default)]
struct Times {
    host_tree_in: Vec<Duration>,
    host_tree_out: Vec<Duration>,
    host_file_in: Vec<Duration>,
    host_file_out: Vec<Duration>,
    tree_in: Vec<Duration>,
    tree_out: Vec<Duration>,
    file_in: Vec<Duration>,
    file_out: Vec<Duration>,
}

fn done(command: &mut Command) -> Outcome<()> {
    let status = command.status()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{:?}: {status}", command.get_program()).into())
    }
}
