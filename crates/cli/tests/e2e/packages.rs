//! Each package is installed into a clean Debian, and its server started, used, upgraded and removed.
//!
//! The work is done by `packaging/test/run`, which needs no more than a built `keep`: this one. The first run makes a Debian
//! with debootstrap, below the build directory; later runs copy it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sandkeep_testkit::daemon::{skipped, unfit};

/// Runs the test of one kind of package. It cleans up after itself, also when it fails or this process dies.
fn install(kind: &str) {
    let test = format!("packages::{kind}");
    if let Some(why) = unfit() {
        return skipped(&test, why);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    // `./dev test` installs it.
    if !std::env::split_paths(&path).any(|place| place.join("debootstrap").is_file()) {
        return skipped(&test, "there is no debootstrap");
    }
    let keep = Path::new(env!("CARGO_BIN_EXE_keep"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/test/run");
    let done = Command::new("setpriv")
        // A run that is ended for taking too long must not leave a machine behind.
        .args(["--pdeathsig", "TERM", "--"])
        .arg(script)
        .arg("--keep")
        .arg(keep)
        .arg(kind)
        .env("CARGO_TARGET_DIR", target_dir(keep))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    // In one piece, so that the end of a report alone shows the reason.
    let said = [&done.stdout[..], &done.stderr[..]].map(String::from_utf8_lossy).concat();
    assert!(done.status.success(), "packaging/test/run {kind}: {}\n{said}", done.status);
}

/// Where cargo builds: `keep` is in `<target>/<profile>/`.
fn target_dir(keep: &Path) -> PathBuf {
    keep.ancestors().nth(2).unwrap().to_path_buf()
}

#[test]
fn deb() {
    install("deb");
}

#[test]
fn tarball() {
    install("tarball");
}

#[test]
fn wheel() {
    install("wheel");
}

#[test]
fn npm() {
    install("npm");
}
