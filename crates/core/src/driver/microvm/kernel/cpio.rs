//! Writes the archives that a kernel unpacks when it boots: `cpio` in its `newc` form.

use std::fmt::Write as _;
use std::io;

/// An archive in the making.
#[derive(Debug)]
pub(super) struct CpioArchive {
    bytes: Vec<u8>,
    inodes: u32,
}

impl CpioArchive {
    pub(super) fn new() -> Self {
        Self { bytes: Vec::new(), inodes: 0 }
    }

    pub(super) fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, (0, 0), 0);
    }

    pub(super) fn device(&mut self, name: &str, mode: u32, device: (u32, u32)) {
        self.entry(name, 0o020_000 | mode, device, 0);
    }

    /// Adds a file. The format cannot describe one of more than four gigabytes.
    pub(super) fn file(&mut self, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        let size = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        self.entry(name, 0o100_000 | mode, (0, 0), size);
        self.bytes.extend_from_slice(bytes);
        self.pad();
        Ok(())
    }

    /// Ends the archive. Another may follow it.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), 0);
        self.bytes
    }

    /// Adds a header. The time of everything is 0, so that the same input makes the same archive.
    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), size: u32) {
        self.inodes += 1;
        // With its NUL.
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        let fields = [self.inodes, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            let _ = write!(header, "{field:08x}");
        }
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::CpioArchive;

    #[test]
    fn an_entry_is_laid_out_as_the_kernel_reads_it() {
        let mut archive = CpioArchive::new();
        archive.file("init", 0o755, b"hello").expect("small");
        let bytes = archive.finish();
        let header =
            b"07070100000001000081ed00000000000000000000000100000000000000050000000000000000\
            00000000000000000000000500000000init\0\0\0";
        let text: Vec<u8> = header.iter().copied().filter(|byte| *byte != b' ').collect();
        assert_eq!(bytes[..110].len() + 6, 116);
        assert_eq!(bytes[..116], text[..116]);
        assert_eq!(&bytes[116..124], b"hello\0\0\0");
        assert_eq!(bytes.len() % 4, 0);
        assert!(bytes[124..].starts_with(b"070701"));
        assert!(bytes.windows(11).any(|part| part == b"TRAILER!!!\0"));
    }
}
