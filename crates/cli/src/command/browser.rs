//! Opening an address in the user's browser.

use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use crate::failure::Failure;
use crate::screen::note;

/// How long a browser may take to say that it does not work. One that works may run on in the foreground.
const PATIENCE: Duration = Duration::from_secs(2);

/// Opens `url` with the program in `BROWSER`, else the desktop's. Where there is none, it says so: the URL has been printed.
pub(super) async fn open(url: &str) -> Result<(), Failure> {
    let Some(program) = program() else {
        note("no browser here: open the URL yourself, or name a program in BROWSER");
        return Ok(());
    };
    let cannot = |why: String| {
        Failure::here(format!("cannot open a browser with `{}`: {why}", program.display()))
            .with_hint(
                "the URL is printed above; `--print` opens no browser, BROWSER names another",
            )
    };
    let mut command = Command::new(&program);
    command.arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| cannot(error.to_string()))?;
    match tokio::time::timeout(PATIENCE, child.wait()).await {
        Ok(Ok(status)) if !status.success() => Err(cannot(status.to_string())),
        _ => Ok(()),
    }
}

fn program() -> Option<OsString> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let desktop = || set("DISPLAY").or_else(|| set("WAYLAND_DISPLAY"));
    set("BROWSER").or_else(|| desktop().map(|_| OsString::from("xdg-open")))
}
