//! The published clients of Vercel Sandbox, unmodified, against a real daemon.
//!
//! The suites themselves are in `conformance/vercel`, in the clients' own languages; here each gets a
//! daemon, the variables `keep env vercel` prints, and a way to kill the daemon under its feet. The
//! result must be what the table in `docs/compat/vercel.md` says: `UPDATE_VERCEL_TABLE=1` writes
//! the table anew.
//!
//! The packages are installed by `./dev test`. Without them these tests say that they cannot run.

use crate::conformance::Suite;

#[test]
fn vercel_js_2() {
    Suite::node("js", "sdk-2", "@vercel/sandbox").run("vercel_js_2");
}

#[test]
fn vercel_js_3() {
    Suite::node("js", "sdk-3", "@vercel/sandbox").run("vercel_js_3");
}

#[test]
fn vercel_cli() {
    Suite::node("cli", "cli", "sandbox").run("vercel_cli");
}

#[test]
fn vercel_python_sync() {
    Suite::python("sync").run("vercel_python_sync");
}

#[test]
fn vercel_python_async() {
    Suite::python("async").run("vercel_python_async");
}

#[test]
fn vercel_wire() {
    Suite::node("wire", "cli", "").run("vercel_wire");
}

#[test]
fn vercel_preload() {
    crate::conformance::preload("vercel_preload");
}

#[test]
fn vercel_python_helper() {
    crate::conformance::python_helper("vercel_python_helper");
}
