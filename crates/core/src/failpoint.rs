//! Places where a test can kill the daemon.
//!
//! With the feature `failpoints`, [`pass`] ends the process, as abruptly as kill -9 does, when the
//! variable `SANDKEEP_FAILPOINT` names the place; `name:3` lets two passes go by first. `panic=name`
//! panics there instead, and the process continues. `docs/CRASH-MATRIX.md` lists the places and
//! what must hold after each.
//!
//! In every build each place that is passed is also a line of the log at level `trace` (target `sandkeep_core::step`): the times
//! of these lines show where the time of a start or a stop goes. `./dev bench --steps` prints that.

/// Dies here, if a test asked for it.
#[cfg(feature = "failpoints")]
pub fn pass(name: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    step(name);
    static ARMED: OnceLock<Option<(String, AtomicU32, bool)>> = OnceLock::new();
    let armed = ARMED.get_or_init(|| {
        let text = std::env::var("SANDKEEP_FAILPOINT").ok()?;
        let (text, panics) = match text.strip_prefix("panic=") {
            Some(rest) => (rest, true),
            None => (text.as_str(), false),
        };
        let (name, count) = text.split_once(':').unwrap_or((text, "1"));
        Some((name.to_owned(), AtomicU32::new(count.parse().unwrap_or(1)), panics))
    });
    if let Some((place, left, panics)) = armed
        && place == name
        && left.fetch_sub(1, Ordering::SeqCst) == 1
    {
        assert!(!*panics, "the fail point {name} was asked to panic");
        std::process::abort();
    }
}

/// Dies here, if a test asked for it; in this build, never.
#[cfg(not(feature = "failpoints"))]
#[inline]
pub fn pass(name: &str) {
    step(name);
}

/// Notes in the log that some work has come this far.
#[inline]
pub fn step(name: &str) {
    tracing::trace!(target: "sandkeep_core::step", "{name}");
}
