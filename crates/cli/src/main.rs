//! The `keep` binary: commands that talk to a server, and `keep serve`, which is one.
//!
//! In reading order: [`args`] and [`settings`] define the arguments, [`locate`] finds the server, [`command`]
//! carries commands out, [`screen`] prints results and [`failure`] errors.

mod args;
mod command;
mod config;
mod failure;
mod greeting;
mod host;
mod locate;
mod logging;
mod machines;
mod memory;
mod notify;
mod reference;
mod screen;
mod serve;
mod settings;
mod terminal;
mod when;

use std::ffi::OsString;
use std::io;
use std::io::Write as _;
use std::process::ExitCode;

use crate::args::{Command, Keep};
use crate::command::complete;
use crate::failure::{Failure, json_line};

fn main() -> ExitCode {
    memory::few_arenas();
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|first| first == complete::ASKED) {
        return names_for_shell(words);
    }
    let keep = match args::parse() {
        Ok(keep) => keep,
        Err(error) => return usage_error(error),
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

/// Reports invalid arguments, or prints the help that was asked for.
fn usage_error(error: clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    // The usage line shows options that the environment has set as if they had to be given.
    let plain = args::command().mut_args(|arg| arg.env(None::<&'static str>));
    let error = match plain.try_get_matches_from(std::env::args_os()) {
        Err(again) if again.kind() == error.kind() => again,
        _ => error,
    };
    let json = std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if json {
        let text = error.to_string();
        let message = text.split("\n\n").next().unwrap_or_default();
        let message = message.trim_start_matches("error: ");
        let tip = text.lines().find_map(|line| line.trim_start().strip_prefix("tip: "));
        let hint = tip.unwrap_or("`--help` lists the arguments");
        let error = serde_json::json!({
            "code": "usage", "message": message, "hint": hint, "exit_code": 2,
        });
        let _ = io::stderr().write_all(json_line(&error).as_bytes());
    } else {
        let _ = error.print();
    }
    ExitCode::from(2)
}

/// Prints the names that a completion script asks for. Whatever is wrong, it says nothing.
fn names_for_shell(words: impl Iterator<Item = OsString>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    if let Ok(runtime) = runtime {
        let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
        let names = runtime.block_on(complete::names(&words));
        let _ = io::stdout().write_all(names.as_bytes());
        runtime.shutdown_background();
    }
    ExitCode::SUCCESS
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
    // Do not wait for threads that still read standard input or a slow disk.
    runtime.shutdown_background();
    done
}
