//! The frequency of this host's time stamp counter.
//!
//! A machine that is emulated sees the host's counter. Its kernel measures it against a timer when it boots, which fails
//! on a busy host, and then it hangs for ever. So it gets the frequency.
#![allow(unsafe_code)]

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

/// How long the two are watched. A thousandth of a thousandth of it is far more than looking at both takes.
const WATCHED: Duration = Duration::from_millis(50);
/// How often one look is tried: the shortest is the best.
const TRIES: usize = 50;

/// Prints the counter's frequency in kHz.
pub(crate) fn print() -> ExitCode {
    match measure() {
        Some(khz) => match writeln!(io::stdout(), "{khz}") {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        None => {
            eprintln!("keep-agent: this processor has no time stamp counter that can be used");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Option<u64> {
    let (first, began) = look()?;
    std::thread::sleep(WATCHED);
    let (last, ended) = look()?;
    let ticks = u128::from(last.checked_sub(first)?);
    let nanos = u128::from(ended.checked_sub(began)?);
    u64::try_from(ticks * 1_000_000 / nanos.max(1)).ok().filter(|khz| *khz > 0)
}

/// The counter and the time, at the same moment.
fn look() -> Option<(u64, u64)> {
    let tries = (0..TRIES).map(|_| {
        let before = now();
        let counter = counter();
        let after = now();
        (after.saturating_sub(before), counter, before + after.saturating_sub(before) / 2)
    });
    let (_, counter, time) = tries.min()?;
    Some((counter?, time))
}

#[cfg(target_arch = "x86_64")]
fn counter() -> Option<u64> {
    // SAFETY: reads a register that every processor of this kind has.
    Some(unsafe { std::arch::x86_64::_rdtsc() })
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> Option<u64> {
    None
}

fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec`. It has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_RAW, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::measure;

    #[test]
    fn the_same_is_measured_twice() {
        let (one, two) = (measure().expect("a counter"), measure().expect("a counter"));
        assert!(one.abs_diff(two) < one / 500, "{one} {two}");
    }
}
