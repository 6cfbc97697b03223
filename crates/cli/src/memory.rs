//! Returns free memory to the system.
//!
//! A burst of work leaves the allocator with memory that is free and still the server's: a hundred creates at once some 15 MB. A server
//! whose sandboxes are all stopped should be small, so its free memory is checked now and then, and
//! given back when there is more of it than after the last time. What lies between memory that is
//! used cannot be given back, and the more *arenas* the allocator has, the more of that there is:
//! by itself it makes eight for each processor. It gets one for each ([`few_arenas`]).

use std::time::Duration;

/// How often it is looked at.
const EVERY: Duration = Duration::from_secs(10);
/// How much more there must be, in bytes.
const GROWN: u64 = 4 << 20;

/// Gives memory back for as long as the server runs.
pub(crate) async fn give_back() {
    let mut after_last = 0;
    loop {
        tokio::time::sleep(EVERY).await;
        if own().is_some_and(|now| now > after_last + GROWN) {
            // It takes the locks of all arenas, one after another, for a millisecond or so in all.
            let _ = tokio::task::spawn_blocking(trim).await;
            after_last = own().unwrap_or(u64::MAX - GROWN);
        }
    }
}

/// The bytes of this process's own memory that are resident.
fn own() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(kib.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Bounds the number of arenas. To be called before the first thread is started: existing ones
/// stay.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
pub(crate) fn few_arenas() {
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    let most = i32::try_from(processors.clamp(2, 16)).unwrap_or(2);
    // SAFETY: it takes two numbers, and there is no other thread.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, most) };
}

#[cfg(not(target_env = "gnu"))]
pub(crate) fn few_arenas() {}

#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
fn trim() {
    // SAFETY: it has no preconditions, and may be called by any thread at any time.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn trim() {}

#[cfg(test)]
mod tests {
    use super::own;

    #[test]
    fn the_memory_of_this_process_is_known() {
        let before = own().expect("it is known");
        let held = vec![1u8; 64 << 20];
        let after = own().expect("it is known");
        assert!(before > 0 && after >= before + (32 << 20), "{before}, {after}");
        drop(held);
    }
}
