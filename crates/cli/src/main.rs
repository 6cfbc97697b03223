//! The `keep` binary: commands that talk to a server, and `keep serve`, which is one.
//!
//! In reading order: [`args`] is what can be written, [`locate`] finds the server, [`command`] does
//! what was asked, [`screen`] and [`failure`] say how it went.

mod args;
mod command;
mod config;
mod failure;
mod host;
mod locate;
mod machines;
mod memory;
mod screen;
mod serve;
mod terminal;
mod when;

use std::io;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::args::{Command, Keep};
use crate::failure::{Failure, json_line};

fn main() -> ExitCode {
    memory::few_arenas();
    let keep = match Keep::try_parse() {
        Ok(keep) => keep,
        Err(error) => return misused(error),
    };
    let remote = matches!(keep.command, Command::Exec(_) | Command::Run(_) | Command::Sh(_));
    let json = keep.global.json;
    match run(keep) {
        Ok(code) => code,
        Err(failure) => {
            let code = match remote {
                true => failure.remote_exit_code(),
                false => failure.exit_code(),
            };
            failure.tell(json, code);
            ExitCode::from(code)
        }
    }
}

/// Tells what is wrong with the arguments, or prints the help that was asked for.
fn misused(error: clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // Whoever does not read the help does not need it.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    // The usage line shows options that the environment has set as if they had to be given.
    let plain = Keep::command().mut_args(|arg| arg.env(None::<&'static str>));
    let error = match plain.try_get_matches_from(std::env::args_os()) {
        Err(again) if again.kind() == error.kind() => again,
        _ => error,
    };
    let json = std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if json {
        let text = error.to_string();
        let message = text.split("\n\n").next().unwrap_or_default();
        let message = message.trim_start_matches("error: ");
        let error = serde_json::json!({ "code": "usage", "message": message, "exit_code": 2 });
        let _ = io::stderr().write_all(json_line(&error).as_bytes());
    } else {
        let _ = error.print();
    }
    ExitCode::from(2)
}

fn run(keep: Keep) -> Result<ExitCode, Failure> {
    let mut builder = match keep.command {
        Command::Serve(_) => tokio::runtime::Builder::new_multi_thread(),
        // A client waits for one thing at a time; threads would only cost start-up time.
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder
        .enable_all()
        .build()
        .map_err(|error| Failure::caused("cannot start the async runtime", error))?;
    let done = runtime.block_on(command::dispatch(keep));
    // Whatever still reads standard input or a slow disk is not worth waiting for.
    runtime.shutdown_background();
    done
}
