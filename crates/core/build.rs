//! Builds `keep-agent` and `keep-sudo` as static programs and puts their bytes where `driver::AGENT` and
//! `store::image` include them, so that one binary is all there is to install.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAMS: [&str; 2] = ["keep-agent", "keep-sudo"];

fn main() {
    let here = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let target = env::var("TARGET").expect("cargo sets it");
    let agent = here.join("../agent");
    for watched in ["../agent/src", "../agent/Cargo.toml", "../proto/src", "../proto/Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", here.join(watched).display());
    }
    build(&agent, &out.join("agent"), &target);
    let built = out.join("agent").join(&target).join("agent");
    for program in PROGRAMS {
        std::fs::copy(built.join(program), out.join(program)).expect("what was just built");
    }
}

fn build(agent: &Path, into: &Path, target: &str) {
    let mut cargo = Command::new(env::var("CARGO").expect("cargo sets it"));
    cargo.args(["build", "--profile", "agent", "--target", target]);
    for program in PROGRAMS {
        cargo.args(["--bin", program]);
    }
    cargo.arg("--manifest-path").arg(agent.join("Cargo.toml")).arg("--target-dir").arg(into);
    // This build is its own: what wraps or instruments the outer one has no say.
    for name in
        ["CARGO_ENCODED_RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CARGO_TARGET_DIR"]
    {
        cargo.env_remove(name);
    }
    cargo.env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static");
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "the sandbox's own programs did not build");
}
