//! Images: unpacked, imported, pulled, made from this host, customized.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

mod customize;
mod host;
mod image_support;
mod import;
mod registry;
mod unpack;
