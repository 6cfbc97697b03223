//! The network of a sandbox: policies and the HTTP proxy.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

mod policy;
mod proxy;
