//! `keep ask`: sends a question to the people who watch the sandbox, waits, and exits with the
//! answer.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use sandkeep_proto::ask::{AskLine, AskReply, InsideAnswer, LINE, SOCKET};

/// How long the agent may take to begin to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(5);

const USAGE: &str = "\
Usage: keep ask [--context TEXT] [--default approve|deny] [--timeout SECONDS] QUESTION

Asks for an approval and waits for the answer.

Exit codes: 0 approved, 1 denied, 2 nobody answered in time, or it could not be asked";

/// Asks, with these arguments.
pub(crate) fn ask(args: impl Iterator<Item = String>) -> ExitCode {
    let line = match parse(args) {
        Ok(line) => line,
        Err(problem) => {
            eprintln!("keep ask: {problem}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match converse(&line) {
        Ok(AskReply::Answer { answer, comment }) => {
            if !comment.is_empty() {
                eprintln!("keep ask: {comment}");
            }
            ExitCode::from(answer.exit_code())
        }
        Ok(AskReply::Problem { problem }) | Err(problem) => {
            eprintln!("keep ask: {problem}");
            ExitCode::from(InsideAnswer::Expired.exit_code())
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<AskLine, String> {
    let mut line = AskLine::default();
    let mut words: Vec<String> = Vec::new();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--context" => line.context = value()?,
            "--default" => {
                line.default = Some(match value()?.as_str() {
                    "approve" => true,
                    "deny" => false,
                    other => return Err(format!("`{other}` is not `approve` or `deny`")),
                });
            }
            "--timeout" => {
                let text = value()?;
                let seconds = text.parse::<u64>().ok().filter(|seconds| *seconds > 0);
                let seconds = seconds.ok_or_else(|| format!("`{text}` is no number of seconds"))?;
                line.timeout_ms = Some(seconds.saturating_mul(1000));
            }
            "--help" | "-h" => return Err("asks for an approval".to_owned()),
            "--" => words.extend(args.by_ref()),
            option if option.starts_with("--") => return Err(format!("unknown option `{option}`")),
            _ => words.push(arg),
        }
    }
    line.question = words.join(" ");
    if line.question.trim().is_empty() {
        return Err("what is the question?".to_owned());
    }
    Ok(line)
}

fn converse(line: &AskLine) -> Result<AskReply, String> {
    let broken = |error: std::io::Error| format!("the connection to the agent broke: {error}");
    let mut socket = connect()?;
    let mut text = serde_json::to_vec(line).map_err(|error| error.to_string())?;
    text.push(b'\n');
    if text.len() > LINE {
        return Err(format!("question and context are over {LINE} bytes"));
    }
    socket.write_all(&text).map_err(broken)?;
    let mut reply = String::new();
    BufReader::new(socket.take(LINE as u64)).read_line(&mut reply).map_err(broken)?;
    serde_json::from_str(&reply)
        .map_err(|_| "the sandbox was stopped, or its agent left".to_owned())
}

fn connect() -> Result<UnixStream, String> {
    let address = SocketAddr::from_abstract_name(SOCKET).map_err(|error| error.to_string())?;
    let begun = Instant::now();
    loop {
        match UnixStream::connect_addr(&address) {
            Ok(socket) => return Ok(socket),
            Err(_) if begun.elapsed() < LISTENS_WITHIN => {
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(_) => {
                let why = "nobody answers questions here: this is no sandbox with an approval policy or a run under way";
                return Err(why.to_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    fn parsed(line: &str) -> Result<sandkeep_proto::ask::AskLine, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_are_read() {
        let line = parsed("--timeout 5 --default deny --context why deploy to prod?").unwrap();
        assert_eq!((line.question.as_str(), line.context.as_str()), ("deploy to prod?", "why"));
        assert_eq!((line.default, line.timeout_ms), (Some(false), Some(5000)));
        assert_eq!(parsed("-- --really?").unwrap().question, "--really?");
        for bad in ["", "--default maybe x", "--timeout 0 x", "--timeout", "--what x"] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
