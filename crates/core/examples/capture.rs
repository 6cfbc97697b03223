//! How long a capture of RAM takes, and by hand.
//!
//! `cargo run --release -p sandkeep-core --example capture -- DIRECTORY` captures memory of this very process, of which more
//! and more was changed: what a paused or forked machine's pages cost without a machine around them. `capture of PID FILE-WITH-ADDRESS
//! RAM INTO [IMAGE]...` captures another process, and `capture map FIRST-DESCRIPTOR OUT [IMAGE]...` writes a map for `ram.so`.

use std::error::Error;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use sandkeep_core::driver::microvm::memory::{capture_pages, map_of};
use sandkeep_core::model::Reserve;

const RAM: usize = 1 << 30;
const PAGE: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let texts: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let paths = |texts: &[&str]| texts.iter().map(PathBuf::from).collect::<Vec<_>>();
    match texts.as_slice() {
        ["of", pid, at, ram, into, image @ ..] => {
            let at = u64::from_str_radix(&fs::read_to_string(at)?, 16)?;
            let into = Path::new(into);
            fs::create_dir(into)?;
            let written = capture_pages(
                pid.parse()?,
                at,
                ram.parse()?,
                &paths(image),
                into,
                Reserve::default(),
            )?;
            written.sync()?;
            say(&format!("{written:?}"))
        }
        ["map", out, image @ ..] => {
            let map = map_of(&paths(image))?;
            fs::write(out, map.write())?;
            say(&map.files.iter().map(|path| format!("{}\n", path.display())).collect::<String>())
        }
        [directory] => measure(Path::new(directory)),
        _ => Err("a directory is needed".into()),
    }
}

fn say(line: &str) -> Result<(), Box<dyn Error>> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Captures RAM of which ever more was changed: in one piece, and every eighth page.
fn measure(directory: &Path) -> Result<(), Box<dyn Error>> {
    let home = tempfile::Builder::new().prefix("keep-capture-").tempdir_in(directory)?;
    let below = home.path().join("below");
    for (megabytes, every) in [(0, 1), (0, 1), (16, 1), (64, 1), (64, 8), (256, 1), (512, 1)] {
        let mut room = vec![0u8; RAM + PAGE];
        let start = room.as_ptr().align_offset(PAGE);
        let ram = &mut room[start..start + RAM];
        let at = ram.as_ptr() as u64;
        // What a booted machine has.
        fill(ram, 0..(96 << 20) / PAGE, 1, 1);
        fill(ram, 0..((megabytes << 20) / PAGE) * every, every, 3);
        let first = !below.exists();
        let image = if first { Vec::new() } else { vec![below.clone()] };
        let into = if first { below.clone() } else { home.path().join("layer") };
        fs::create_dir(&into)?;
        let began = Instant::now();
        let written =
            capture_pages(std::process::id(), at, RAM as u64, &image, &into, Reserve::default())?;
        let stood = began.elapsed();
        written.sync()?;
        let all = began.elapsed();
        let size = fs::metadata(into.join("pages"))?.len() >> 20;
        let changed = if first { "all".to_owned() } else { format!("{megabytes} MiB") };
        say(&format!(
            "{changed:>7} changed, every {every}. page: stood {:6.1} ms, stable {:6.1} ms; {size} MiB in {} runs",
            stood.as_secs_f64() * 1e3,
            all.as_secs_f64() * 1e3,
            written.runs
        ))?;
        if !first {
            fs::remove_dir_all(&into)?;
        }
    }
    Ok(())
}

/// Writes to every `every`th page of a range something that depends on `seed`.
fn fill(ram: &mut [u8], pages: std::ops::Range<usize>, every: usize, seed: u64) {
    let most = ram.len() / PAGE;
    for page in pages.step_by(every).take_while(|page| *page < most) {
        for (place, word) in ram[page * PAGE..(page + 1) * PAGE].chunks_exact_mut(8).enumerate() {
            let value = (page as u64 * 512 + place as u64).wrapping_mul(seed | 1) ^ seed;
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
}
