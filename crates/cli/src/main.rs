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
mod screen;
mod serve;
mod terminal;
mod when;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Command, Keep};
use crate::failure::Failure;
use crate::screen::Paint;

fn main() -> ExitCode {
    let keep = Keep::parse();
    let remote = matches!(keep.command, Command::Exec(_) | Command::Run(_) | Command::Sh(_));
    match run(keep) {
        Ok(code) => code,
        Err(failure) => {
            failure.tell(Paint::for_errors());
            ExitCode::from(match remote {
                true => failure.remote_exit_code(),
                false => failure.exit_code(),
            })
        }
    }
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
