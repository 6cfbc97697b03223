//! Streams of JSON lines, as their clients can read them.
//!
//! The JavaScript client turns each piece that arrives from the network into text by itself, so a
//! character that two pieces share would be lost: everything but ASCII is escaped. For the same reason
//! what a process prints is decoded here, with one decoder for each of its streams. That makes the text
//! a function of the bytes alone, however they were cut: the Python client resumes a broken stream by
//! counting characters of a replay.
//!
//! While there is nothing to send an empty line is sent, now and then: no proxy on the way closes a
//! stream that lives.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use sandkeep_core::engine::{CommandOutput, OutputStream};
use sandkeep_core::model::Command;
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::api::App;

/// A value as one line of ASCII.
pub(crate) fn line(value: &Value) -> Vec<u8> {
    let mut text = Vec::new();
    // Writing plain values to memory does not fail.
    let _ = value.serialize(&mut Serializer::with_formatter(&mut text, Ascii));
    text.push(b'\n');
    text
}

struct Ascii;

impl Formatter for Ascii {
    fn write_string_fragment<W>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()>
    where
        W: ?Sized + io::Write,
    {
        let mut rest = fragment;
        while let Some(at) = rest.find(|letter: char| !letter.is_ascii()) {
            let (plain, odd) = rest.split_at(at);
            writer.write_all(plain.as_bytes())?;
            let mut letters = odd.chars();
            let mut pair = [0; 2];
            for unit in letters.next().unwrap_or_default().encode_utf16(&mut pair) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = letters.as_str();
        }
        writer.write_all(rest.as_bytes())
    }
}

/// Turns bytes into text, holding back the beginning of a character until the rest of it comes.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    begun: Vec<u8>,
}

impl Decoder {
    pub(crate) fn take(&mut self, bytes: &[u8]) -> String {
        let joined;
        let mut rest = if self.begun.is_empty() {
            bytes
        } else {
            joined = [self.begun.as_slice(), bytes].concat();
            self.begun.clear();
            joined.as_slice()
        };
        let mut text = String::with_capacity(rest.len());
        loop {
            match std::str::from_utf8(rest) {
                Ok(good) => {
                    text.push_str(good);
                    return text;
                }
                Err(error) => {
                    let (good, odd) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(good));
                    match error.error_len() {
                        Some(length) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = odd.get(length..).unwrap_or_default();
                        }
                        None => {
                            self.begun = odd.to_vec();
                            return text;
                        }
                    }
                }
            }
        }
    }

    /// Nothing more comes: what was begun is no character.
    pub(crate) fn end(&mut self) -> String {
        let begun = std::mem::take(&mut self.begun);
        if begun.is_empty() { String::new() } else { char::REPLACEMENT_CHARACTER.to_string() }
    }
}

/// What the stream contains of a command.
#[derive(Debug)]
pub(crate) struct LogStream {
    /// A line before everything else.
    pub(crate) first: Option<Value>,
    /// Whether its output is sent.
    pub(crate) logs: bool,
    /// Whether its end is sent, and in which form.
    pub(crate) last: Option<fn(&Command) -> Value>,
}

struct VercelLines {
    telling: LogStream,
    events: Option<OutputStream>,
    out: Decoder,
    err: Decoder,
    keep_alive: Duration,
    closing: CancellationToken,
}

/// A command's events as a response.
pub(crate) fn told(app: &Arc<App>, events: OutputStream, telling: LogStream) -> Response {
    let lines = VercelLines {
        telling,
        events: Some(events),
        out: Decoder::default(),
        err: Decoder::default(),
        keep_alive: app.limits.keep_alive,
        closing: app.closing.clone(),
    };
    let stream = stream::unfold(lines, async |mut lines| {
        let bytes = lines.next().await?;
        Some((Ok::<_, io::Error>(Bytes::from(bytes)), lines))
    });
    // The type must be this and nothing behind it.
    let headers = [(CONTENT_TYPE, "application/x-ndjson"), (CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(stream)).into_response()
}

impl VercelLines {
    async fn next(&mut self) -> Option<Vec<u8>> {
        if let Some(first) = self.telling.first.take() {
            return Some(line(&first));
        }
        loop {
            let events = self.events.as_mut()?;
            let heard = tokio::select! {
                biased;
                heard = events.next() => heard,
                () = self.closing.cancelled() => {
                    self.events = None;
                    return Some(broke_off("The server is going down; the command goes on."));
                }
                () = tokio::time::sleep(self.keep_alive) => return Some(b"\n".to_vec()),
            };
            let said = self.said(heard);
            if !said.is_empty() {
                return Some(said);
            }
        }
    }

    fn said(&mut self, heard: Option<CommandOutput>) -> Vec<u8> {
        match heard {
            Some(CommandOutput::Stdout(bytes)) => self.printed("stdout", &bytes),
            Some(CommandOutput::Stderr(bytes)) => self.printed("stderr", &bytes),
            Some(CommandOutput::Gap(_)) if !self.telling.logs => Vec::new(),
            Some(CommandOutput::Gap(bytes)) => {
                // It is unknown what was printed to which stream there, so both get it.
                let marker = format!(
                    "\n[{bytes} bytes of output are missing here: the log does not keep them]\n"
                );
                let mut said = log_line("stdout", self.out.end() + &marker);
                said.extend(log_line("stderr", self.err.end() + &marker));
                said
            }
            Some(CommandOutput::Exited(command)) => {
                self.events = None;
                self.ended(&command)
            }
            None => {
                self.events = None;
                broke_off("Sandbox stream was closed and is not accepting commands.")
            }
        }
    }

    fn printed(&mut self, name: &str, bytes: &[u8]) -> Vec<u8> {
        if !self.telling.logs {
            return Vec::new();
        }
        let decoder = if name == "stdout" { &mut self.out } else { &mut self.err };
        log_line(name, decoder.take(bytes))
    }

    fn ended(&mut self, command: &Command) -> Vec<u8> {
        let mut said = Vec::new();
        if self.telling.logs {
            said.extend(log_line("stdout", self.out.end()));
            said.extend(log_line("stderr", self.err.end()));
        }
        if let Some(last) = self.telling.last {
            said.extend(line(&last(command)));
        }
        said
    }
}

fn log_line(stream: &str, data: String) -> Vec<u8> {
    if data.is_empty() {
        return Vec::new();
    }
    line(&json!({ "stream": stream, "data": data }))
}

/// The stream ends without what was waited for; clients may ask for it again.
fn broke_off(message: &str) -> Vec<u8> {
    failed("sandbox_stream_closed", message)
}

fn failed(code: &str, message: &str) -> Vec<u8> {
    let data = json!({ "code": code, "message": message });
    line(&json!({ "stream": "error", "data": data }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, any, prop, proptest};
    use serde_json::{Value, json};

    use std::time::Duration;

    use sandkeep_core::engine::CommandOutput;
    use tokio_util::sync::CancellationToken;

    use super::{Decoder, LogStream, VercelLines, line};

    fn decoded<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
        let mut decoder = Decoder::default();
        let mut text: String = pieces.into_iter().map(|piece| decoder.take(piece)).collect();
        text.push_str(&decoder.end());
        text
    }

    #[test]
    fn lines_are_ascii_and_mean_the_same() {
        let value = json!({ "d\u{e9}": "a\u{e9}\u{1f600}\u{ffff}\n\"\\\u{1}\u{7f}z" });
        let text = line(&value);
        assert!(text.is_ascii());
        assert!(text.windows(12).any(|part| part == br"\ud83d\ude00"));
        assert_eq!(text.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(serde_json::from_slice::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn a_gap_is_marked_in_both_streams_and_the_rest_follows() {
        let lines = |logs| VercelLines {
            telling: LogStream { first: None, logs, last: None },
            events: None,
            out: Decoder::default(),
            err: Decoder::default(),
            keep_alive: Duration::MAX,
            closing: CancellationToken::new(),
        };
        let mut whole = lines(true);
        let mut said = whole.said(Some(CommandOutput::Stdout(b"a\xc3".as_slice().into())));
        said.extend(whole.said(Some(CommandOutput::Gap(7))));
        said.extend(whole.said(Some(CommandOutput::Stdout(b"b".as_slice().into()))));
        let marker = "\n[7 bytes of output are missing here: the log does not keep them]\n";
        let said: Vec<Value> = said
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect();
        let log = |stream: &str, data: String| json!({ "stream": stream, "data": data });
        assert_eq!(
            said,
            [
                log("stdout", "a".to_owned()),
                log("stdout", format!("\u{fffd}{marker}")),
                log("stderr", marker.to_owned()),
                log("stdout", "b".to_owned()),
            ]
        );
        assert!(lines(false).said(Some(CommandOutput::Gap(7))).is_empty());
    }

    #[test]
    fn characters_come_whole_and_what_is_none_is_marked() {
        let face = "\u{1f600}".as_bytes();
        assert_eq!(decoded([&face[..1], &face[1..3], &face[3..]]), "\u{1f600}");
        assert_eq!(decoded([&face[..3], b"A"]), "\u{fffd}A");
        assert_eq!(decoded([&face[..2]]), "\u{fffd}");
        assert_eq!(decoded([&b"\xff\xfeA\xc3"[..], b"\xa9"]), "\u{fffd}\u{fffd}A\u{e9}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn the_text_does_not_depend_on_the_cuts(
            bytes in prop::collection::vec(
                prop::sample::select(vec![0x41u8, 0x80, 0xbf, 0xc3, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0x98, 0xff]), 0..40),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8)
        ) {
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let pieces = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]);
            assert_eq!(decoded(pieces), String::from_utf8_lossy(&bytes));
        }
    }
}
