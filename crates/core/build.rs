//! Builds `keep-agent` and `keep-sudo` as static programs, and `ram.so`, which is loaded into hypervisors, and puts their bytes
//! where `embedded` includes them, so that one binary is all there is to install.

use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::Compression;
use flate2::write::DeflateEncoder;

const PROGRAMS: [&str; 2] = ["keep-agent", "keep-sudo"];
const STATIC: &str = "-C target-feature=+crt-static -C relocation-model=static";

fn main() {
    let here = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let target = env::var("TARGET").expect("cargo sets it");
    for part in ["agent", "proto", "ram", "upper"] {
        for watched in ["src", "Cargo.toml"] {
            println!(
                "cargo::rerun-if-changed={}",
                here.join("..").join(part).join(watched).display()
            );
        }
    }
    let programs: Vec<&str> = PROGRAMS.iter().flat_map(|program| ["--bin", program]).collect();
    let built = build(&here.join("../agent"), &programs, STATIC, &out.join("agent"), &target);
    for program in PROGRAMS {
        compress(&built.join(program), &out.join(program));
    }
    let built = build(&here.join("../ram"), &["--lib"], "", &out.join("ram"), &target);
    compress(&built.join("libram.so"), &out.join("ram.so"));
}

/// Writes a program compressed, beside its name.
fn compress(program: &Path, name: &Path) {
    let program = std::fs::read(program).expect("what was just built");
    let into = std::fs::File::create(name.with_added_extension("deflate")).expect("our directory");
    let mut into = DeflateEncoder::new(into, Compression::best());
    into.write_all(&program).and_then(|()| into.finish()).expect("there is room");
}

fn build(from: &Path, what: &[&str], flags: &str, into: &Path, target: &str) -> PathBuf {
    let mut cargo = Command::new(env::var("CARGO").expect("cargo sets it"));
    cargo.args(["build", "--profile", "agent", "--target", target]).args(what);
    cargo.arg("--manifest-path").arg(from.join("Cargo.toml")).arg("--target-dir").arg(into);
    // This build is its own: what wraps or instruments the outer one has no say.
    for name in
        ["CARGO_ENCODED_RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CARGO_TARGET_DIR"]
    {
        cargo.env_remove(name);
    }
    cargo.env("RUSTFLAGS", flags);
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "{} did not build", from.display());
    into.join(target).join("agent")
}
