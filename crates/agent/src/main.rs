//! `keep-agent`: builds a sandbox's cage, then lives in it as PID 1.
//!
//! - `keep-agent cage`: reads a [`sandkeep_proto::cage::Cage`] on standard input, builds it, answers
//!   on standard output and leaves the sandbox's first process behind. That process is this same
//!   program, which then serves the link and never returns.
//! - `keep-agent cage ahead`: the same, and begins before it gets the description of what to build.
//! - `keep-agent swap-root`: puts another root under a sandbox that lives.
//! - `keep-agent vmm`: reads a [`sandkeep_proto::machine::Vmm`] in the same way, and leaves a confined hypervisor behind.
//! - `keep-agent tsc`: prints how fast the host's time stamp counter runs, in kHz.
//! - As the first process of a machine of its own it gets no arguments: it serves the link on the
//!   machine's serial port, and becomes the sandbox's when it gets that one's identity.
//! - `keep-agent confine`: reads a [`sandkeep_proto::helper::Helper`], and runs a program of the host's, confined, on what sandboxes wrote.
//! - `keep ask <question>`: the same program under another name, inside a sandbox: asks, and exits with the answer.
//! - `keep-agent serve <socket>`: serves the link without any cage; the way the link is tested.

mod accounts;
mod ask;
mod cage;
mod helper;
mod machine;
mod overlay;
mod serve;
mod tsc;
mod vmm;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match (args.next().as_deref(), args.next()) {
        (Some("cage"), None) => match cage::build() {
            cage::Built::Builder(code) => code,
            cage::Built::First(endpoints) => serve::run(endpoints),
        },
        (Some("cage"), Some(how)) if how == "ahead" => match cage::prebuild() {
            cage::Built::Builder(code) => code,
            cage::Built::First(endpoints) => serve::run(endpoints),
        },
        (None, None) if rustix::process::getpid().is_init() => machine::init(),
        (Some("ask"), first) => ask::ask(first.into_iter().chain(args)),
        (Some("swap-root"), None) => cage::swap_root(),
        (Some("tsc"), None) => tsc::print(),
        (Some("vmm"), None) => vmm::launch(),
        (Some("confine"), None) => helper::confine(),
        (Some("serve"), Some(path)) => match std::os::unix::net::UnixListener::bind(&path) {
            Ok(link) => serve::run(cage::Endpoints { link, network: None, view: None }),
            Err(error) => {
                eprintln!("keep-agent: could not listen on `{path}`: {error}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("keep-agent is started by `keep serve`, with `cage`, `swap-root` or `vmm`");
            ExitCode::from(2)
        }
    }
}
