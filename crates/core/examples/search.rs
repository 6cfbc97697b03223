//! How fast the guard searches, beside reading and hashing the same files in the same run.
//!
//! `cargo run --release -p sandkeep-core --example search [MEGABYTES]` writes two trees into a directory of its
//! own, large files and small ones, and removes them again. The files are in the page cache, as what a
//! session just wrote is.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sandkeep_core::store::Store;
use sandkeep_core::store::search::{Needles, SearchedFiles, Writers};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let megabytes: usize = std::env::args().nth(1).map_or(Ok(512), |text| text.parse())?;
    let dir = tempfile::tempdir()?;
    let store = Store::open(dir.path())?;
    let mut told = io::stdout().lock();
    for (what, count) in [("8 large files", 8), ("30,000 small files", 30_000)] {
        let open = store.begin(&[]).await?;
        let root = store.diff_dir(&open);
        write_tree(&root, count, (megabytes << 20) / count)?;
        store.sync().await?;
        let mut lines = Vec::new();
        lines.push(("read", timed(&root, |_| {})?));
        let mut hash = Sha256::new();
        lines.push(("sha256", timed(&root, |bytes| hash.update(bytes))?));
        for (label, secrets) in [("search, 1 secret", 1), ("search, 20 secrets", 20)] {
            let needles = Arc::new(Needles::new(&secrets_of(secrets)));
            let began = Instant::now();
            let searched = store
                .search(
                    &open,
                    &needles,
                    Writers::None,
                    sandkeep_core::store::Effort::Foreground,
                    SearchedFiles::default(),
                )
                .await?;
            lines.push((label, (began.elapsed(), searched.bytes)));
        }
        for (label, (took, bytes)) in lines {
            let speed = bytes as f64 / took.as_secs_f64() / 1e6;
            writeln!(told, "{what}: {label}: {} ms, {speed:.0} MB/s", took.as_millis())?;
        }
        store.discard(&open).await?;
    }
    Ok(())
}

fn secrets_of(count: usize) -> Vec<(String, Zeroizing<String>)> {
    let value = |n: usize| format!("sk-{n:04}-{}", "x9Qz7Lw2Rt5".repeat(3));
    (0..count).map(|n| (format!("SECRET_{n}"), Zeroizing::new(value(n)))).collect()
}

/// Text that is neither all alike nor random: what programs write.
fn write_tree(root: &Path, count: usize, size: usize) -> io::Result<()> {
    let mut seed = 1u64;
    let mut block = Vec::with_capacity(1 << 20);
    while block.len() < 1 << 20 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        block.extend_from_slice(
            format!("const v{} = require('./m{}');\n", seed >> 40, seed >> 50).as_bytes(),
        );
    }
    for n in 0..count {
        let dir = root.join((n % 300).to_string());
        fs::create_dir_all(&dir)?;
        let mut file = File::create(dir.join(n.to_string()))?;
        let mut left = size;
        while left > 0 {
            let part = left.min(block.len());
            file.write_all(&block[..part])?;
            left -= part;
        }
    }
    Ok(())
}

/// Reads every file of a tree, one after the other.
fn timed(root: &Path, mut each: impl FnMut(&[u8])) -> io::Result<(Duration, u64)> {
    let began = Instant::now();
    let mut bytes = 0;
    let mut buffer = vec![0; 256 << 10];
    for dir in fs::read_dir(root)? {
        for file in fs::read_dir(dir?.path())? {
            let mut file = File::open(file?.path())?;
            loop {
                let got = file.read(&mut buffer)?;
                if got == 0 {
                    break;
                }
                each(&buffer[..got]);
                bytes += got as u64;
            }
        }
    }
    Ok((began.elapsed(), bytes))
}
