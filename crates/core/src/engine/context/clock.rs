//! Clocks: whether the wall clock can be trusted for expiry.
//!
//! Expiry compares a time on record with the wall clock, and a wall clock can jump: a host that boots without one, a virtual
//! machine that was suspended, somebody's mistake. So nothing expires by a clock that was not *steady* for a while: since it was
//! first looked at, or since it last jumped, the wall clock advanced as the monotonic clock did, for 15 minutes
//! ([`Settings::clock_settle`](crate::engine::Settings)). A clock that is wrong for good is believed after that time; what expires by
//! it lies in the trash for the grace period, which is counted on the monotonic clock alone.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::engine::context::Context;
use crate::engine::context::damage::DamageKind;
use crate::model::{Timestamp, now};

/// How far the wall clock may be from where the monotonic clock expects it.
const SLACK: Duration = Duration::from_secs(60);

/// The two clocks of a host.
pub trait Clock: fmt::Debug + Send + Sync {
    /// What time it is.
    fn wall(&self) -> Timestamp;
    /// The time since some moment that stays the same while the process runs.
    fn monotonic(&self) -> Duration;
}

/// The clocks of this host.
#[derive(Debug)]
pub struct HostClock {
    begun: Instant,
}

impl Default for HostClock {
    fn default() -> Self {
        Self { begun: Instant::now() }
    }
}

impl Clock for HostClock {
    fn wall(&self) -> Timestamp {
        now()
    }

    fn monotonic(&self) -> Duration {
        self.begun.elapsed()
    }
}

/// What was seen of the wall clock.
#[derive(Debug, Default)]
pub(in crate::engine) struct ClockWatch(Mutex<Option<ClockReading>>);

#[derive(Debug, Clone, Copy)]
struct ClockReading {
    wall: Timestamp,
    monotonic: Duration,
    /// Since when the two agree.
    steady_since: Duration,
    /// Whether that was a jump, and not the beginning.
    jumped: bool,
}

/// What a look at the clocks found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClockCheck {
    /// By how many seconds the wall clock jumped since the last look.
    jump: Option<i64>,
    /// Whether it is believed.
    steady: bool,
}

impl ClockWatch {
    fn look(&self, wall: Timestamp, monotonic: Duration, settle: Duration) -> ClockCheck {
        let mut seen = self.0.lock();
        let Some(before) = *seen else {
            *seen = Some(ClockReading { wall, monotonic, steady_since: monotonic, jumped: false });
            return ClockCheck { jump: None, steady: settle.is_zero() };
        };
        let passed = monotonic.saturating_sub(before.monotonic).as_secs();
        let passed = i64::try_from(passed).unwrap_or(i64::MAX);
        let off = wall.as_second().saturating_sub(before.wall.as_second()).saturating_sub(passed);
        let jumped = off.unsigned_abs() > SLACK.as_secs();
        let steady_since = if jumped { monotonic } else { before.steady_since };
        *seen =
            Some(ClockReading { wall, monotonic, steady_since, jumped: jumped || before.jumped });
        let steady = !jumped && monotonic.saturating_sub(steady_since) >= settle;
        if steady && let Some(seen) = seen.as_mut() {
            seen.jumped = false;
        }
        ClockCheck { jump: jumped.then_some(off), steady }
    }
}

impl Context {
    /// The time to expire things by; `None` while the wall clock is not believed. Asked at least at every housekeeping.
    pub(in crate::engine) fn expiry_time(&self) -> Option<Timestamp> {
        const SUBJECT: &str = "clock";
        let clock = &self.settings.clock;
        let (wall, monotonic) = (clock.wall(), clock.monotonic());
        let settle = self.settings.clock_settle;
        let ClockCheck { jump, steady } = self.clock.look(wall, monotonic, settle);
        if let Some(seconds) = jump {
            self.report_damage(
                DamageKind::ClockJumped,
                SUBJECT,
                format!("the wall clock jumped by {seconds} s, to {wall}"),
                format!(
                    "nothing expires until it was steady for {} s; check the host's time",
                    settle.as_secs()
                ),
            );
        }
        if steady {
            self.clear_damage(DamageKind::ClockJumped, SUBJECT);
        }
        steady.then_some(wall)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ClockCheck, ClockWatch};
    use crate::model::Timestamp;

    const HOUR: Duration = Duration::from_secs(3600);
    const DAYS: i64 = 24 * 3600;

    #[test]
    fn a_clock_is_believed_when_it_was_steady() {
        let watch = ClockWatch::default();
        let look = |wall: i64, monotonic: u64| {
            let wall = Timestamp::from_second(wall).expect("a time");
            watch.look(wall, Duration::from_secs(monotonic), HOUR)
        };
        let no = ClockCheck { jump: None, steady: false };
        assert_eq!(look(1_000, 0), no, "just begun");
        assert_eq!(look(1_030, 30), no);
        assert_eq!(look(4_610, 3_600), ClockCheck { jump: None, steady: true }, "within the slack");
        let jump = ClockCheck { jump: Some(90 * DAYS), steady: false };
        assert_eq!(look(4_640 + 90 * DAYS, 3_630), jump);
        assert_eq!(look(4_670 + 90 * DAYS, 3_660), no, "still not believed");
        let back = ClockCheck { jump: Some(-90 * DAYS), steady: false };
        assert_eq!(look(4_700, 3_690), back);
        assert_eq!(look(4_730, 3_720), no, "nor is one that jumped back, for a while");
        assert!(look(4_700 + 3_600, 3_690 + 3_600).steady);
    }

    #[test]
    fn without_a_grace_period_only_the_jump_itself_is_ignored() {
        let watch = ClockWatch::default();
        let at = |wall| Timestamp::from_second(wall).expect("a time");
        assert!(watch.look(at(0), Duration::ZERO, Duration::ZERO).steady);
        assert!(!watch.look(at(DAYS), Duration::from_secs(1), Duration::ZERO).steady);
        assert!(watch.look(at(DAYS + 1), Duration::from_secs(2), Duration::ZERO).steady);
    }
}
