//! Why a command ended, decided from how its process ended and what was done to it.
//!
//! The agent reports the exit code and the signal. Everything else is known here: that the timeout
//! passed, that somebody sent a signal, that the disk limit was exceeded, that the session is being
//! ended. A cause counts only if the exit fits it: a command that returns 0 at the moment of its
//! timeout has exited. *Out of memory* is decided from the kernel's count of such kills since the
//! command started, so a command that ends with 137 for another reason while a process beside it is
//! killed for memory is taken for one of them.

use sandkeep_proto::link::Exit;

use crate::model::CommandEnd;

const KILL: i32 = 9;
const TERM: i32 = 15;

/// What the daemon did to a command that may be why it ends.
#[derive(Debug, Default)]
pub(in crate::engine) struct Causes {
    timed_out: bool,
    /// A bit for each signal that was sent through the API.
    signals: u128,
    /// The limit, and how much was used.
    disk: Option<(u64, u64)>,
    session_ends: bool,
}

impl Causes {
    pub(in crate::engine) fn timed_out(&mut self) {
        self.timed_out = true;
    }

    pub(in crate::engine) fn signalled(&mut self, signal: i32) {
        self.signals |= bit(signal);
    }

    pub(in crate::engine) fn over_disk(&mut self, limit: u64, used: u64) {
        self.disk = Some((limit, used));
    }

    /// It was not ended for the disk limit after all.
    pub(in crate::engine) fn within_disk(&mut self) {
        self.disk = None;
    }

    pub(in crate::engine) fn session_ends(&mut self) {
        self.session_ends = true;
    }

    /// The disk limit that it was ended for, and how much was used.
    pub(in crate::engine) fn disk(&self) -> Option<(u64, u64)> {
        self.disk
    }

    /// Why it ended; `exit` is absent when nobody reported it. `oom`: the control group counted a
    /// kill.
    pub(in crate::engine) fn why(&self, exit: Option<Exit>, oom: bool) -> CommandEnd {
        let Some(exit) = exit else {
            return match (self.disk, self.session_ends) {
                (Some(_), _) => CommandEnd::OutOfDisk,
                (None, true) => CommandEnd::SessionEnded,
                (None, false) => CommandEnd::Lost,
            };
        };
        let oom = exit.is_kill() && (oom || exit.oom);
        match exit.signal {
            Some(KILL) if self.timed_out => CommandEnd::TimedOut,
            Some(KILL) if self.disk.is_some() => CommandEnd::OutOfDisk,
            Some(KILL | TERM) if self.session_ends => CommandEnd::SessionEnded,
            Some(signal) if self.signals & bit(signal) != 0 => CommandEnd::Killed,
            _ if oom => CommandEnd::OutOfMemory,
            Some(_) => CommandEnd::Signalled,
            None => CommandEnd::Exited,
        }
    }
}

fn bit(signal: i32) -> u128 {
    u32::try_from(signal).ok().and_then(|signal| 1u128.checked_shl(signal)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use sandkeep_proto::link::Exit;

    use super::Causes;
    use crate::model::CommandEnd;

    #[test]
    fn a_cause_counts_if_the_exit_fits_it() {
        let (killed, exited) = (Some(Exit::by_signal(9)), Some(Exit::with_code(0)));
        let mut causes = Causes::default();
        assert_eq!(causes.why(killed, false), CommandEnd::Signalled);
        assert_eq!(causes.why(killed, true), CommandEnd::OutOfMemory);
        assert_eq!(causes.why(Some(Exit::with_code(137)), true), CommandEnd::OutOfMemory);
        assert_eq!(causes.why(Some(Exit::with_code(137)), false), CommandEnd::Exited);
        assert_eq!(causes.why(exited, true), CommandEnd::Exited);
        assert_eq!(causes.why(Some(Exit::by_signal(11)), true), CommandEnd::Signalled);
        assert_eq!(causes.why(None, false), CommandEnd::Lost);
        causes.signalled(15);
        causes.signalled(1000);
        assert_eq!(causes.why(Some(Exit::by_signal(15)), false), CommandEnd::Killed);
        assert_eq!(causes.why(killed, true), CommandEnd::OutOfMemory, "another signal was sent");
        causes.session_ends();
        assert_eq!(causes.why(Some(Exit::by_signal(15)), false), CommandEnd::SessionEnded);
        assert_eq!(causes.why(None, false), CommandEnd::SessionEnded);
        causes.over_disk(1, 2);
        assert_eq!(causes.why(killed, false), CommandEnd::OutOfDisk);
        causes.timed_out();
        assert_eq!(causes.why(killed, true), CommandEnd::TimedOut);
        assert_eq!(causes.why(exited, false), CommandEnd::Exited);
    }

    #[test]
    fn a_machine_with_a_kernel_of_its_own_tells_by_itself() {
        let exit = Exit { oom: true, ..Exit::by_signal(9) };
        assert_eq!(Causes::default().why(Some(exit), false), CommandEnd::OutOfMemory);
    }
}
