//! The programs that are part of this one: build.rs builds and compresses them.

use std::io::Read as _;

use flate2::read::DeflateDecoder;

/// A program, compressed: three quarters of their size are saved, and each is needed once, if at all.
#[derive(Debug)]
pub struct Embedded {
    compressed: &'static [u8],
}

/// The agent, a static program: `keep serve` writes it into the data directory.
pub static AGENT: Embedded =
    Embedded { compressed: include_bytes!(concat!(env!("OUT_DIR"), "/keep-agent.deflate")) };

/// What a hypervisor is given its RAM by: a library that is loaded into it.
pub static RAM_SO: Embedded =
    Embedded { compressed: include_bytes!(concat!(env!("OUT_DIR"), "/ram.so.deflate")) };

/// Our own `sudo`, for images that have none.
pub(crate) static SUDO: Embedded =
    Embedded { compressed: include_bytes!(concat!(env!("OUT_DIR"), "/keep-sudo.deflate")) };

impl Embedded {
    /// Decompresses it.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.compressed.len() * 3);
        // build.rs compressed it: this cannot fail.
        let _ = DeflateDecoder::new(self.compressed).read_to_end(&mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_programs() {
        for program in [&AGENT, &RAM_SO, &SUDO] {
            let bytes = program.bytes();
            assert!(bytes.starts_with(b"\x7fELF"));
            assert!(bytes.len() > program.compressed.len() * 3 / 2);
        }
    }
}
