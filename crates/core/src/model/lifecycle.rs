//! The lifecycle of a sandbox, as a pure function.
//!
//! ```text
//! Stopped, Failed --Start--> Starting --Up--> Running
//!                            Starting, Running --Broke--> Failed          (a start that did not succeed)
//!                            Starting, Failed --Undone--> Stopped, Paused (a start that was rolled back)
//! Running, Failed --Stop---> Stopping --Down--> Stopped
//! Starting, Running --Died-> Stopping
//!                            Stopping --Broke--> Failed
//! Running ---------Pause---> Running --Captured-> Paused      (a pause that fails changes nothing)
//! Paused ----------Start---> Starting
//! Paused ----------Stop----> Starting, and then as if it had run
//! Starting, Running, Stopping --Lost--> Failed                (the record says so, and there is no machine)
//! Failed -------GivenUp----> Failed                           (the files of its last session are lost)
//! Stopped, Paused, Failed --RolledBack--> Stopped, Paused
//! every phase ----Delete---> Deleted
//!                            Deleted --Broke---> Failed       (what it wrote to drives could not be saved)
//!                            Deleted --Restored-> Stopped, Paused
//! ```
//!
//! [`command`] and [`report`] take where a sandbox is and what just happened, and say where it goes
//! next and what must be done about it. They perform nothing: no clock, no I/O, no locks.
//! [`Sandbox::transition`](super::Sandbox::transition) is the only writer of a phase and asks them
//! first. The engine records the new phase, which implies the pending effect, *before* it carries the
//! effect out: a daemon that dies in between finds the pending effect on restart and completes it.
//!
//! Rules that hold everywhere, tested over the whole table below:
//!
//! - A command that asks for the phase a sandbox is already in, or on its way to, succeeds and does
//!   nothing. Callers retry; retries must be harmless.
//! - *There is no phase between running and paused.* A capture touches nothing of the machine but to hold it still, so until
//!   the memory is on record the sandbox runs: after a crash in between, the next daemon finds
//!   `running`, resumes the machine, and has no pending effect. After that it finds `paused`, and
//!   only ends a machine that still exists.
//! - The files of a paused sandbox are on a disk that only its own kernel reads, so it is woken to be stopped.
//! - Delete is accepted in every phase. Nothing is stuck. It is taken back only where going on would lose what was written to
//!   a drive, which is not the sandbox's own.
//! - `Failed` keeps the last good snapshot and what the broken session wrote: it can be started
//!   (which seals what was left first), stopped (which seals it and stays down) or deleted.

use serde::{Deserialize, Serialize};

/// Where a sandbox is. Stored; renaming a variant needs a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Files only: no process, no memory.
    Stopped,
    /// The driver was asked to boot it.
    Starting,
    /// The agent inside answers.
    Running,
    /// Memory, processes and files are kept; nothing of it is on the host's CPUs or in its memory.
    Paused,
    /// It is being ended and its files sealed.
    Stopping,
    /// Something broke. The last good snapshot is safe; start it again or delete it.
    Failed,
    /// Gone.
    Deleted,
}

/// What a caller wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LifecycleCommand {
    /// Be running.
    Start,
    /// Be paused, with memory and processes kept.
    Pause,
    /// Be stopped, with all files kept.
    Stop,
    /// Be gone.
    Delete,
}

/// What must be done. Stored as the pending effect until it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// Boot it from its current snapshot.
    Boot,
    /// Keep its memory, then end it. Never pending: until it is done the sandbox runs.
    Capture,
    /// End its processes and seal what it wrote.
    Seal,
    /// Remove all that is its own.
    Erase,
}

/// What was reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LifecycleReport {
    /// The agent answers.
    Up,
    /// It is down and sealed.
    Down,
    /// Its memory is on record.
    Captured,
    /// The effect failed.
    Broke,
    /// The machine ended by itself, or a daemon died over a start.
    Died,
    /// The record has an operation in progress, but none is, and there is no machine.
    Lost,
    /// The files of its last session are lost, and a rollback continues without them.
    GivenUp,
    /// A start was rolled back: the sandbox is what it was before.
    Undone {
        /// Whether it was paused.
        paused: bool,
    },
    /// It stands on another snapshot.
    RolledBack {
        /// Whether that has memory.
        memory: bool,
    },
    /// It was taken out of the trash.
    Restored {
        /// Whether its snapshot has memory.
        memory: bool,
    },
}

/// Why a command was turned down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Another transition is under way; asking again later may work.
    #[error("the sandbox is {0:?} just now")]
    Busy(Phase),
    /// There is no memory to keep.
    #[error("the sandbox is not running")]
    NotRunning,
    /// The sandbox is gone.
    #[error("the sandbox was deleted")]
    Gone,
}

/// Answers a caller's command.
///
/// # Errors
///
/// Returns [`Refused`] and leaves the sandbox as it was.
pub fn command(
    phase: Phase,
    command: LifecycleCommand,
) -> Result<(Phase, Option<Effect>), Refused> {
    match (phase, command) {
        (Phase::Stopped | Phase::Paused | Phase::Failed, LifecycleCommand::Start)
        | (Phase::Paused, LifecycleCommand::Stop) => Ok((Phase::Starting, Some(Effect::Boot))),
        (Phase::Running, LifecycleCommand::Pause) => Ok((Phase::Running, Some(Effect::Capture))),
        (Phase::Running | Phase::Failed, LifecycleCommand::Stop) => {
            Ok((Phase::Stopping, Some(Effect::Seal)))
        }
        (
            Phase::Stopped
            | Phase::Starting
            | Phase::Running
            | Phase::Paused
            | Phase::Stopping
            | Phase::Failed,
            LifecycleCommand::Delete,
        ) => Ok((Phase::Deleted, Some(Effect::Erase))),

        // Already there, or on the way.
        (Phase::Starting | Phase::Running, LifecycleCommand::Start)
        | (Phase::Paused, LifecycleCommand::Pause)
        | (Phase::Stopping | Phase::Stopped, LifecycleCommand::Stop)
        | (Phase::Deleted, LifecycleCommand::Delete) => Ok((phase, None)),

        (Phase::Stopping, LifecycleCommand::Start | LifecycleCommand::Pause)
        | (Phase::Starting, LifecycleCommand::Stop | LifecycleCommand::Pause) => {
            Err(Refused::Busy(phase))
        }
        (Phase::Stopped | Phase::Failed, LifecycleCommand::Pause) => Err(Refused::NotRunning),
        (
            Phase::Deleted,
            LifecycleCommand::Start | LifecycleCommand::Pause | LifecycleCommand::Stop,
        ) => Err(Refused::Gone),
    }
}

/// Applies a report. `None`: that does not happen in this phase, and changes nothing.
#[must_use]
pub fn report(phase: Phase, report: LifecycleReport) -> Option<(Phase, Option<Effect>)> {
    let rests = |memory| if memory { Phase::Paused } else { Phase::Stopped };
    Some(match (phase, report) {
        (Phase::Starting, LifecycleReport::Up) => (Phase::Running, None),
        (Phase::Stopping, LifecycleReport::Down) => (Phase::Stopped, None),
        (Phase::Running, LifecycleReport::Captured) => (Phase::Paused, None),
        (
            Phase::Starting | Phase::Running | Phase::Stopping | Phase::Deleted,
            LifecycleReport::Broke,
        )
        | (Phase::Starting | Phase::Running | Phase::Stopping, LifecycleReport::Lost)
        | (Phase::Failed, LifecycleReport::GivenUp) => (Phase::Failed, None),
        (Phase::Starting | Phase::Running, LifecycleReport::Died) => {
            (Phase::Stopping, Some(Effect::Seal))
        }
        (Phase::Starting | Phase::Failed, LifecycleReport::Undone { paused: memory })
        | (
            Phase::Stopped | Phase::Paused | Phase::Failed,
            LifecycleReport::RolledBack { memory },
        )
        | (Phase::Deleted, LifecycleReport::Restored { memory }) => (rests(memory), None),
        (
            Phase::Stopped
            | Phase::Starting
            | Phase::Running
            | Phase::Paused
            | Phase::Stopping
            | Phase::Failed
            | Phase::Deleted,
            _,
        ) => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use proptest::prelude::{ProptestConfig, prop, proptest};

    use super::{Effect, LifecycleCommand, LifecycleReport, Phase, Refused, command, report};

    const PHASES: [Phase; 7] = [
        Phase::Stopped,
        Phase::Starting,
        Phase::Running,
        Phase::Paused,
        Phase::Stopping,
        Phase::Failed,
        Phase::Deleted,
    ];
    const COMMANDS: [LifecycleCommand; 4] = [
        LifecycleCommand::Start,
        LifecycleCommand::Pause,
        LifecycleCommand::Stop,
        LifecycleCommand::Delete,
    ];
    const REPORTS: [LifecycleReport; 13] = [
        LifecycleReport::Up,
        LifecycleReport::Down,
        LifecycleReport::Captured,
        LifecycleReport::Broke,
        LifecycleReport::Died,
        LifecycleReport::Lost,
        LifecycleReport::GivenUp,
        LifecycleReport::Undone { paused: false },
        LifecycleReport::Undone { paused: true },
        LifecycleReport::RolledBack { memory: false },
        LifecycleReport::RolledBack { memory: true },
        LifecycleReport::Restored { memory: false },
        LifecycleReport::Restored { memory: true },
    ];

    fn row(next: Phase, effect: Option<Effect>) -> String {
        effect.map_or(format!("{next:?}"), |effect| format!("{next:?}, {effect:?}"))
    }

    /// The whole table, so that a change to one arm shows as a one-line diff.
    #[test]
    fn everything_in_every_phase() {
        let mut table = String::new();
        for phase in PHASES {
            for asked in COMMANDS {
                let row = match command(phase, asked) {
                    Ok((next, effect)) => row(next, effect),
                    Err(refused) => format!("refused: {refused}"),
                };
                writeln!(table, "{phase:?} + {asked:?} -> {row}").expect("a string takes text");
            }
            for heard in REPORTS {
                if let Some((next, effect)) = report(phase, heard) {
                    writeln!(table, "{phase:?} + {heard:?} -> {}", row(next, effect))
                        .expect("a string takes text");
                }
            }
        }
        insta::assert_snapshot!(table, @r"
        Stopped + Start -> Starting, Boot
        Stopped + Pause -> refused: the sandbox is not running
        Stopped + Stop -> Stopped
        Stopped + Delete -> Deleted, Erase
        Stopped + RolledBack { memory: false } -> Stopped
        Stopped + RolledBack { memory: true } -> Paused
        Starting + Start -> Starting
        Starting + Pause -> refused: the sandbox is Starting just now
        Starting + Stop -> refused: the sandbox is Starting just now
        Starting + Delete -> Deleted, Erase
        Starting + Up -> Running
        Starting + Broke -> Failed
        Starting + Died -> Stopping, Seal
        Starting + Lost -> Failed
        Starting + Undone { paused: false } -> Stopped
        Starting + Undone { paused: true } -> Paused
        Running + Start -> Running
        Running + Pause -> Running, Capture
        Running + Stop -> Stopping, Seal
        Running + Delete -> Deleted, Erase
        Running + Captured -> Paused
        Running + Broke -> Failed
        Running + Died -> Stopping, Seal
        Running + Lost -> Failed
        Paused + Start -> Starting, Boot
        Paused + Pause -> Paused
        Paused + Stop -> Starting, Boot
        Paused + Delete -> Deleted, Erase
        Paused + RolledBack { memory: false } -> Stopped
        Paused + RolledBack { memory: true } -> Paused
        Stopping + Start -> refused: the sandbox is Stopping just now
        Stopping + Pause -> refused: the sandbox is Stopping just now
        Stopping + Stop -> Stopping
        Stopping + Delete -> Deleted, Erase
        Stopping + Down -> Stopped
        Stopping + Broke -> Failed
        Stopping + Lost -> Failed
        Failed + Start -> Starting, Boot
        Failed + Pause -> refused: the sandbox is not running
        Failed + Stop -> Stopping, Seal
        Failed + Delete -> Deleted, Erase
        Failed + GivenUp -> Failed
        Failed + Undone { paused: false } -> Stopped
        Failed + Undone { paused: true } -> Paused
        Failed + RolledBack { memory: false } -> Stopped
        Failed + RolledBack { memory: true } -> Paused
        Deleted + Start -> refused: the sandbox was deleted
        Deleted + Pause -> refused: the sandbox was deleted
        Deleted + Stop -> refused: the sandbox was deleted
        Deleted + Delete -> Deleted
        Deleted + Broke -> Failed
        Deleted + Restored { memory: false } -> Stopped
        Deleted + Restored { memory: true } -> Paused
        ");
    }

    #[test]
    fn repeating_an_accepted_command_changes_nothing() {
        for phase in PHASES {
            for asked in COMMANDS {
                let Ok((next, effect)) = command(phase, asked) else { continue };
                // These two are on their way only when the effect has been carried out.
                if effect == Some(Effect::Capture) {
                    let paused = report(next, LifecycleReport::Captured).expect("it is running").0;
                    assert_eq!(command(paused, asked), Ok((paused, None)));
                    continue;
                }
                if (phase, asked) == (Phase::Paused, LifecycleCommand::Stop) {
                    let running = report(next, LifecycleReport::Up).expect("it is starting").0;
                    assert_eq!(command(running, asked), Ok((Phase::Stopping, Some(Effect::Seal))));
                    continue;
                }
                assert_eq!(command(next, asked), Ok((next, None)), "{phase:?} + {asked:?} twice");
            }
        }
    }

    #[test]
    fn delete_is_never_refused_and_is_final_unless_it_broke_or_was_restored() {
        for phase in PHASES {
            assert_eq!(
                command(phase, LifecycleCommand::Delete).map(|(next, _)| next),
                Ok(Phase::Deleted)
            );
        }
        for heard in REPORTS {
            let next = match heard {
                LifecycleReport::Broke => Some((Phase::Failed, None)),
                LifecycleReport::Restored { memory: true } => Some((Phase::Paused, None)),
                LifecycleReport::Restored { memory: false } => Some((Phase::Stopped, None)),
                _ => None,
            };
            assert_eq!(report(Phase::Deleted, heard), next);
        }
    }

    /// What one task may do with a sandbox, step by step, against a model that knows only whether a
    /// machine is alive.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Ask(LifecycleCommand),
        Hear(LifecycleReport),
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn no_history_loses_writes_or_gets_stuck(
            steps in prop::collection::vec(prop::sample::select(
                COMMANDS.map(Step::Ask).into_iter().chain(REPORTS.map(Step::Hear)).collect::<Vec<_>>()), 0..40)
        ) {
            let mut phase = Phase::Stopped;
            let mut machine = false;
            for step in steps {
                // Only a machine that lives can be captured; the task reports nothing else.
                if matches!(step, Step::Hear(LifecycleReport::Captured)) && !machine {
                    continue;
                }
                let effect = match step {
                    Step::Ask(asked) => match command(phase, asked) {
                        Ok((next, effect)) => { phase = next; effect }
                        Err(Refused::Busy(at)) => { assert!(matches!(at, Phase::Starting | Phase::Stopping)); None }
                        Err(Refused::NotRunning) => { assert!(!machine); None }
                        Err(Refused::Gone) => { assert_eq!(phase, Phase::Deleted); None }
                    },
                    Step::Hear(heard) => match report(phase, heard) {
                        Some((next, effect)) => { phase = next; effect }
                        None => None,
                    },
                };
                match effect {
                    Some(Effect::Boot) => { assert!(!machine, "booted over a machine that lives"); machine = true; }
                    Some(Effect::Capture) => assert!(machine, "captured nothing"),
                    Some(Effect::Seal) => assert_eq!(phase, Phase::Stopping),
                    Some(Effect::Erase) => machine = false,
                    None => {}
                }
                match phase {
                    Phase::Stopped | Phase::Paused | Phase::Failed | Phase::Deleted => machine = false,
                    Phase::Running => assert!(machine, "running without a machine"),
                    Phase::Starting | Phase::Stopping => {}
                }
                assert!(command(phase, LifecycleCommand::Delete).is_ok(), "stuck");
            }
        }
    }
}
