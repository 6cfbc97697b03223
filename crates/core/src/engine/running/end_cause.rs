//! Why a command ended, decided from how its process ended and what was done to it.
//!
//! The agent reports the exit code and the signal. Everything else is known here: that the timeout
//! passed, that somebody sent a signal, that the disk limit was exceeded or the host's disk nearly full,
//! that the session is being ended. A cause counts only if the exit fits it: a command that returns 0 at
//! the moment of its timeout has exited. *Out of memory* is decided from the kernel's count of such kills since the
//! command started, so a command that ends with 137 for another reason while a process beside it is
//! killed for memory is taken for one of them.

use sandkeep_proto::link::Exit;

use crate::model::CommandEnd;

const KILL: i32 = 9;
const TERM: i32 = 15;

/// Why the daemon ended processes that fill a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum DiskCause {
    /// The sandbox or a drive in it was over its limit: the limit, and how much was used.
    OverLimit { limit: u64, used: u64 },
    /// The disk of the host was about to use its reserve.
    HostReserve,
}

/// What the daemon did to a command that may be why it ends.
#[derive(Debug, Default)]
pub(in crate::engine) struct Causes {
    timed_out: bool,
    /// A bit for each signal that was sent through the API.
    signals: u128,
    /// Why processes of its sandbox were last ended because of a disk.
    disk: Option<DiskCause>,
    /// The rounds of that whose processes may not have ended yet.
    rounds: Vec<u64>,
    session_ends: bool,
}

impl Causes {
    pub(in crate::engine) fn timed_out(&mut self) {
        self.timed_out = true;
    }

    pub(in crate::engine) fn signalled(&mut self, signal: i32) {
        self.signals |= bit(signal);
    }

    /// In this round processes of its sandbox are ended because of a disk.
    pub(in crate::engine) fn disk_round(&mut self, round: u64, cause: DiskCause) {
        self.rounds.push(round);
        self.disk = Some(cause);
    }

    /// What was ended in this round has ended, and this command has not: unless it is for another
    /// round, it was not ended because of a disk after all.
    pub(in crate::engine) fn disk_round_over(&mut self, round: u64) {
        self.rounds.retain(|open| *open != round);
        if self.rounds.is_empty() {
            self.disk = None;
        }
    }

    pub(in crate::engine) fn session_ends(&mut self) {
        self.session_ends = true;
    }

    /// The disk limit that it was ended for, and how much was used.
    pub(in crate::engine) fn disk_limit(&self) -> Option<(u64, u64)> {
        match self.disk {
            Some(DiskCause::OverLimit { limit, used }) => Some((limit, used)),
            Some(DiskCause::HostReserve) | None => None,
        }
    }

    fn disk_end(&self) -> Option<CommandEnd> {
        self.disk.map(|cause| match cause {
            DiskCause::OverLimit { .. } => CommandEnd::OutOfDisk,
            DiskCause::HostReserve => CommandEnd::HostDiskFull,
        })
    }

    /// Why it ended; `exit` is absent when nobody reported it. `oom`: the control group counted a
    /// kill.
    pub(in crate::engine) fn why(&self, exit: Option<Exit>, oom: bool) -> CommandEnd {
        let Some(exit) = exit else {
            return match (self.disk_end(), self.session_ends) {
                (Some(end), _) => end,
                (None, true) => CommandEnd::SessionEnded,
                (None, false) => CommandEnd::Lost,
            };
        };
        let oom = exit.is_kill() && (oom || exit.oom);
        match (exit.signal, self.disk_end()) {
            (Some(KILL), _) if self.timed_out => return CommandEnd::TimedOut,
            (Some(KILL), Some(end)) => return end,
            _ => {}
        }
        match exit.signal {
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

    use super::{Causes, DiskCause};
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
        causes.disk_round(1, DiskCause::OverLimit { limit: 1, used: 2 });
        assert_eq!(causes.why(killed, false), CommandEnd::OutOfDisk);
        assert_eq!(causes.why(exited, false), CommandEnd::Exited);
        causes.timed_out();
        assert_eq!(causes.why(killed, true), CommandEnd::TimedOut);
        assert_eq!(causes.why(exited, false), CommandEnd::Exited);
    }

    #[test]
    fn a_disk_stays_the_cause_until_the_last_round_is_over() {
        let killed = Some(Exit::by_signal(9));
        let mut causes = Causes::default();
        causes.disk_round(1, DiskCause::OverLimit { limit: 5, used: 9 });
        causes.disk_round(2, DiskCause::HostReserve);
        causes.disk_round_over(2);
        // What the first round ended still frees its space.
        assert_eq!(causes.why(killed, false), CommandEnd::HostDiskFull);
        assert_eq!(causes.disk_limit(), None, "it was not the limit");
        // A round that this command has not seen.
        causes.disk_round_over(7);
        assert_eq!(causes.why(None, false), CommandEnd::HostDiskFull);
        causes.disk_round_over(1);
        assert_eq!(causes.why(killed, false), CommandEnd::Signalled);
    }

    #[test]
    fn a_machine_with_a_kernel_of_its_own_tells_by_itself() {
        let exit = Exit { oom: true, ..Exit::by_signal(9) };
        assert_eq!(Causes::default().why(Some(exit), false), CommandEnd::OutOfMemory);
    }
}
