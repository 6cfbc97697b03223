//! The hypervisor's control socket.
//!
//! Blocking, with a deadline for every command: a hypervisor that hangs is an error, not a wait. It serves one client at a time; another
//! waits for its greeting, so calls for one machine are in turn by themselves. What it says is bounded and nothing in it is
//! believed beyond what was asked: its guest may have taken it over.

use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use sandkeep_proto::machine::QMP_SOCKET;
use serde_json::{Value, json};

use crate::driver::host::connect;

/// How long an answer may take. All commands used here only begin something or look something up.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a migration of the devices may take.
const MIGRATION: Duration = Duration::from_secs(60);
/// The longest answer that is read.
const LONGEST: usize = 4 << 20;

/// A conversation with a hypervisor.
#[derive(Debug)]
pub(crate) struct Qmp {
    socket: UnixStream,
    /// What was read and not yet looked at.
    heard: Vec<u8>,
}

impl Qmp {
    /// Connects to the hypervisor of the machine whose runtime directory this is.
    pub(crate) fn connect(run_dir: &Path) -> io::Result<Self> {
        // Not by the path itself: it may be longer than a socket's address can be.
        let directory = File::open(run_dir)?;
        let short = format!("/proc/self/fd/{}/{QMP_SOCKET}", directory.as_raw_fd());
        Self::over(connect(&short, PATIENCE)?)
    }

    fn over(socket: UnixStream) -> io::Result<Self> {
        socket.set_write_timeout(Some(PATIENCE))?;
        let mut qmp = Self { socket, heard: Vec::new() };
        let greeting = qmp.hear(Instant::now() + PATIENCE)?;
        if greeting.get("QMP").is_none() {
            return Err(io::Error::other("it does not greet like a hypervisor"));
        }
        qmp.ask("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Has a command done.
    pub(crate) fn ask(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        self.tell(command, &arguments, None)
    }

    /// Has a command done that takes a descriptor.
    pub(crate) fn ask_with(
        &mut self,
        command: &str,
        arguments: Value,
        descriptor: BorrowedFd<'_>,
    ) -> io::Result<Value> {
        self.tell(command, &arguments, Some(descriptor))
    }

    fn tell(
        &mut self,
        command: &str,
        arguments: &Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        // The hypervisor reads it byte by byte, and each takes its time.
        let mut whole = json!({"execute": command});
        if arguments.as_object().is_some_and(|arguments| !arguments.is_empty()) {
            whole["arguments"] = arguments.clone();
        }
        let mut line = serde_json::to_vec(&whole)?;
        line.push(b'\n');
        let unheard = |error: io::Error| {
            io::Error::new(error.kind(), format!("no answer to `{command}`: {error}"))
        };
        self.send(&line, descriptor).map_err(unheard)?;
        loop {
            let mut heard = self.hear(deadline).map_err(unheard)?;
            if let Some(answer) = heard.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = heard.get("error") {
                let why = error["desc"].as_str().unwrap_or("it does not say why");
                return Err(io::Error::other(format!("`{command}`: {why}")));
            }
            // An event.
        }
    }

    fn send(&mut self, line: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let to = self.socket.as_fd();
        let sent =
            rustix::net::sendmsg(to, &[IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL)?;
        if sent < line.len() {
            return self.send(&line[sent..], None);
        }
        Ok(())
    }

    /// The next line.
    fn hear(&mut self, deadline: Instant) -> io::Result<Value> {
        loop {
            if let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(io::Error::other);
            }
            if self.heard.len() > LONGEST {
                return Err(io::Error::other("the answer has no end"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.socket.set_read_timeout(Some(left))?;
            let mut part = [0; 16 << 10];
            match self.socket.read(&mut part) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.heard.extend_from_slice(&part[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Passes it a descriptor, and returns the set of descriptors it is in.
    pub(crate) fn take(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<u64> {
        let set = self.ask_with("add-fd", json!({}), descriptor)?["fdset-id"].as_u64();
        set.ok_or_else(|| io::Error::other("a descriptor was not taken"))
    }

    /// Whether processors run.
    pub(crate) fn is_running(&mut self) -> io::Result<bool> {
        Ok(self.ask("query-status", json!({}))?["running"] == true)
    }

    /// Sets up migrations that leave the RAM where it is.
    pub(crate) fn leave_ram(&mut self) -> io::Result<()> {
        let capabilities = json!([{"capability": "x-ignore-shared", "state": true}]);
        self.ask("migrate-set-capabilities", json!({"capabilities": capabilities})).map(drop)
    }

    /// The same, for an incoming machine. It is not announced to its network, which is private to
    /// it: the guest would have to do that before all else.
    pub(crate) fn await_machine(&mut self) -> io::Result<()> {
        self.leave_ram()?;
        self.ask("migrate-set-parameters", json!({"announce-rounds": 0})).map(drop)
    }

    /// Waits for the end of a migration, in or out.
    pub(crate) fn migrated(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + MIGRATION;
        let mut pause = Duration::from_micros(200);
        loop {
            let told = self.ask("query-migrate", json!({}))?;
            match told["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => {
                    let why = told["error-desc"].as_str().unwrap_or("it does not say why");
                    return Err(io::Error::other(format!("the devices' state: {why}")));
                }
                _ if Instant::now() > deadline => return Err(io::ErrorKind::TimedOut.into()),
                _ => sleep(pause),
            }
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::thread;

    use serde_json::json;

    use super::Qmp;

    /// A hypervisor that reads a line, then says something, as often as there is something to say.
    fn hypervisor(says: &'static [&'static [u8]]) -> UnixStream {
        let (ours, mut its) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            for (n, said) in says.iter().enumerate() {
                let mut byte = [0];
                while n > 0 && byte != [b'\n'] {
                    its.read_exact(&mut byte).unwrap();
                }
                its.write_all(said).unwrap();
            }
        });
        ours
    }

    #[test]
    fn events_are_skipped_and_errors_told() {
        let says: &[&[u8]] = &[
            b"{\"QMP\": {}}\r\n",
            b"{\"return\": {}}\n",
            b"{\"event\": \"STOP\"}\n{\"event\": \"X\"}\n{\"return\": {\"running\": true}}\n",
            b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"not now\"}}\n",
        ];
        let mut qmp = Qmp::over(hypervisor(says)).unwrap();
        assert!(qmp.is_running().unwrap());
        let error = qmp.ask("cont", json!({})).unwrap_err().to_string();
        assert_eq!(error, "`cont`: not now");
        let error = qmp.ask("cont", json!({})).unwrap_err().to_string();
        assert!(error.contains("cont"), "{error}");
    }

    #[test]
    fn what_is_no_hypervisor_is_not_talked_to() {
        for greeting in [&b"{}\n"[..], b"hello\n", b"", b"\xff\xfe\n"] {
            let greetings: &'static [&'static [u8]] =
                Box::leak(Box::new([&*greeting.to_vec().leak()]));
            assert!(Qmp::over(hypervisor(greetings)).is_err(), "{greeting:?}");
        }
    }
}
