//! The user's own terminal while a remote one is shown in it.

use std::io;
use std::io::{IsTerminal as _, Read as _};

use bytes::Bytes;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use sandkeep_client::types::TermSize;
use tokio::sync::mpsc;

/// Keeps the terminal raw while it lives, and restores it however it ends.
#[derive(Debug)]
pub(crate) struct Raw {
    before: Termios,
}

impl Raw {
    /// Makes standard input raw, if it is a terminal.
    pub(crate) fn enter() -> Option<Self> {
        let input = io::stdin();
        let before = tcgetattr(&input).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&input, OptionalActions::Drain, &raw).ok()?;
        Some(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // If the terminal is gone there is nothing to restore.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

/// Keeps the terminal from showing what is typed while it lives.
#[derive(Debug)]
pub(crate) struct Silent {
    _restored: Raw,
}

impl Silent {
    /// Silences standard input, if it is a terminal.
    pub(crate) fn enter() -> Option<Self> {
        let input = io::stdin();
        let before = tcgetattr(&input).ok()?;
        let mut silent = before.clone();
        silent.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&input, OptionalActions::Drain, &silent).ok()?;
        Some(Self { _restored: Raw { before } })
    }
}

/// The size of the terminal, or a usual one.
pub(crate) fn size() -> TermSize {
    let found = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin()));
    match found {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            TermSize { cols: size.ws_col, rows: size.ws_row }
        }
        _ => TermSize { cols: 80, rows: 24 },
    }
}

/// Whether keystrokes come from a terminal.
pub(crate) fn is_interactive() -> bool {
    io::stdin().is_terminal()
}

/// Reads standard input from a thread of its own. The thread is not waited for: a read that never
/// returns must not keep the program alive when the remote command has ended.
pub(crate) fn keystrokes() -> mpsc::Receiver<io::Result<Bytes>> {
    let (sender, receiver) = mpsc::channel(8);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 32 << 10];
        loop {
            let read = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => Ok(Bytes::copy_from_slice(&buffer[..count])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let last = read.is_err();
            if sender.blocking_send(read).is_err() || last {
                return;
            }
        }
    });
    receiver
}
