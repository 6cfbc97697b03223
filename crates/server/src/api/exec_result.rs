//! The answer to a caller that waits for a command: its output and its end, as one document.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sandkeep_client::types::{ExecResult, Size};
use sandkeep_core::engine::{CommandOutput, OutputStream};

use super::exec::{KillOnDisconnect, session_ended};
use super::input::{Params, parsed};
use super::{App, wire};
use crate::error::ApiError;

/// How much of each stream is returned if the caller does not say.
const USUAL: usize = 1 << 20;
/// The most of each stream that is returned. More is for who streams it: it is held in memory here.
const MOST: usize = 8 << 20;

/// What a waiting caller wants to get.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    limit: usize,
}

impl Wait {
    /// Reads `wait` and `output_limit`; `None` if the caller does not wait.
    pub(super) fn of(params: &mut Params) -> Result<Option<Self>, ApiError> {
        let wait = params.flag("wait")?;
        let limit = params.text("output_limit")?;
        let Some(limit) = limit else { return Ok(wait.then_some(Self { limit: USUAL })) };
        if !wait {
            return Err(ApiError::invalid("`output_limit` is for `wait=true`"));
        }
        let Size(limit) = parsed("output_limit", &limit)?;
        match usize::try_from(limit) {
            Ok(limit) if limit <= MOST => Ok(Some(Self { limit })),
            _ => Err(ApiError::invalid("`output_limit`: at most 8M")
                .hint("without `wait` the output is streamed, whatever its length")),
        }
    }

    /// Waits for the end of a command. A caller that leaves ends it; a server that goes down does not.
    pub(super) async fn result(
        self,
        app: &App,
        mut events: OutputStream,
        resumed: bool,
        mut leash: KillOnDisconnect,
    ) -> Result<ExecResult, ApiError> {
        let (mut stdout, mut stderr) = (Kept::new(self.limit), Kept::new(self.limit));
        let mut missing_bytes = 0;
        let command = loop {
            let event = tokio::select! {
                biased;
                event = events.next() => event,
                () = app.closing.cancelled() => {
                    leash.release();
                    return Err(ApiError::shutting_down()
                        .hint("the command goes on; its log is kept. Retry with the same `Idempotency-Key` to get its result"));
                }
            };
            match event {
                Some(CommandOutput::Stdout(bytes)) => stdout.add(&bytes),
                Some(CommandOutput::Stderr(bytes)) => stderr.add(&bytes),
                Some(CommandOutput::Gap(bytes)) => missing_bytes += bytes,
                Some(CommandOutput::Exited(command)) => break command,
                None => {
                    leash.release();
                    return Err(session_ended());
                }
            }
        };
        leash.release();
        let command = wire::command(command);
        let (stdout, stderr) = (stdout.told(), stderr.told());
        Ok(ExecResult {
            resumed,
            exit_code: command.exit_code,
            end: command.end,
            command,
            stdout: stdout.text,
            stdout_base64: stdout.base64,
            stdout_bytes: stdout.printed,
            stdout_truncated: stdout.truncated,
            stderr: stderr.text,
            stderr_base64: stderr.base64,
            stderr_bytes: stderr.printed,
            stderr_truncated: stderr.truncated,
            missing_bytes,
        })
    }
}

/// The beginning of a stream.
#[derive(Debug)]
struct Kept {
    bytes: Vec<u8>,
    limit: usize,
    printed: u64,
}

/// A stream, as it is returned.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    text: String,
    base64: Option<String>,
    printed: u64,
    truncated: bool,
}

impl Kept {
    fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), limit, printed: 0 }
    }

    fn add(&mut self, bytes: &[u8]) {
        self.printed += bytes.len() as u64;
        let fits = bytes.len().min(self.limit - self.bytes.len());
        self.bytes.extend_from_slice(&bytes[..fits]);
    }

    fn told(mut self) -> Told {
        let truncated = self.printed > self.bytes.len() as u64;
        // The limit may have cut a character in two: the whole ones before it are text all the same.
        if truncated
            && let Err(error) = std::str::from_utf8(&self.bytes)
            && error.error_len().is_none()
        {
            self.bytes.truncate(error.valid_up_to());
        }
        let (text, base64) = match String::from_utf8(self.bytes) {
            Ok(text) => (text, None),
            Err(error) => {
                let bytes = error.as_bytes();
                (String::from_utf8_lossy(bytes).into_owned(), Some(STANDARD.encode(bytes)))
            }
        };
        Told { text, base64, printed: self.printed, truncated }
    }
}

#[cfg(test)]
mod tests {
    use super::{Kept, Told};

    fn told(limit: usize, pieces: &[&[u8]]) -> Told {
        let mut kept = Kept::new(limit);
        pieces.iter().for_each(|piece| kept.add(piece));
        kept.told()
    }

    #[test]
    fn output_is_text_or_both_and_bounded() {
        let text = |text: &str, printed, truncated| Told {
            text: text.to_owned(),
            base64: None,
            printed,
            truncated,
        };
        assert_eq!(told(10, &[]), text("", 0, false));
        assert_eq!(told(10, &[b"abc", b"def"]), text("abcdef", 6, false));
        assert_eq!(told(6, &[b"abc", b"def"]), text("abcdef", 6, false), "just fits");
        assert_eq!(told(4, &[b"abc", b"def", b"ghi"]), text("abcd", 9, true));
        assert_eq!(told(0, &[b"abc"]), text("", 3, true));
        assert_eq!(told(4, &["abcö".as_bytes()]), text("abc", 5, true), "half a character");
        let binary = told(10, &[b"a\xff"]);
        assert_eq!((&*binary.text, binary.base64.as_deref()), ("a\u{fffd}", Some("Yf8=")));
        assert!(told(2, &[b"a\xffb"]).base64.is_some(), "not UTF-8 before the cut");
    }
}
