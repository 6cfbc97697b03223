//! Which of a kernel's modules a machine needs, and in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::driver::host::helper;

/// What a machine cannot do without, built into its kernel or as a module.
pub(super) const NEEDED: [&str; 8] = [
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "virtio_rng",
    "virtio_net",
    "erofs",
    "overlay",
    "ext4",
];

/// A module, as the kernel loads it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Module {
    pub(super) name: String,
    pub(super) image: Vec<u8>,
}

/// All modules that are needed and are not built in, each after those it depends on.
pub(super) fn closure(directory: &Path) -> io::Result<Vec<Module>> {
    let mut search = Search {
        files: files(directory)?,
        builtin: builtin(directory)?,
        seen: BTreeSet::new(),
        found: Vec::new(),
    };
    for name in NEEDED {
        search.need(name, 0)?;
    }
    Ok(search.found)
}

struct Search {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
    seen: BTreeSet<String>,
    found: Vec<Module>,
}

impl Search {
    fn need(&mut self, name: &str, depth: usize) -> io::Result<()> {
        let name = plain(name);
        if depth > 32 || !self.seen.insert(name.clone()) {
            return Ok(());
        }
        let Some(path) = self.files.get(&name).cloned() else {
            if self.builtin.contains(&name) {
                return Ok(());
            }
            let message = format!("the kernel has no `{name}`, neither built in nor as a module");
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        };
        let image = unpack(&path).map_err(|error| super::at(&path, &error))?;
        let info = Info::read(&image).map_err(|error| super::at(&path, &error))?;
        for other in &info.depends {
            self.need(other, depth + 1)?;
        }
        // Others may do as well, and are often built in.
        for other in info.wants.iter().flat_map(|name| [name.clone(), format!("{name}_generic")]) {
            if self.files.contains_key(&plain(&other)) {
                self.need(&other, depth + 1)?;
            }
        }
        self.found.push(Module { name, image });
        Ok(())
    }
}

/// A module's name as the kernel compares it.
fn plain(name: &str) -> String {
    name.replace('-', "_")
}

/// The module a file holds, by the file's name.
fn module_name(file: &str) -> Option<String> {
    let endings = [".ko", ".ko.xz", ".ko.zst", ".ko.gz"];
    endings.iter().find_map(|ending| file.strip_suffix(ending)).map(plain)
}

fn files(directory: &Path) -> io::Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![directory.to_owned()];
    while let Some(here) = waiting.pop() {
        for entry in fs::read_dir(&here).map_err(|error| super::at(&here, &error))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                waiting.push(entry.path());
            } else if let Some(name) = entry.file_name().to_str().and_then(module_name) {
                found.insert(name, entry.path());
            }
        }
    }
    Ok(found)
}

fn builtin(directory: &Path) -> io::Result<BTreeSet<String>> {
    let path = directory.join("modules.builtin");
    match fs::read_to_string(&path) {
        Ok(text) => {
            let names = text.lines().filter_map(|line| line.rsplit('/').next());
            Ok(names.filter_map(module_name).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(super::at(&path, &error)),
    }
}

/// Reads a module. Kernels that can unpack modules themselves are few, so it is done here.
fn unpack(path: &Path) -> io::Result<Vec<u8>> {
    let packed = fs::read(path)?;
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("zst") => zstd::decode_all(packed.as_slice()),
        Some("gz") => {
            let mut image = Vec::new();
            flate2::read::GzDecoder::new(packed.as_slice()).read_to_end(&mut image)?;
            Ok(image)
        }
        Some("xz") => unxz(path),
        _ => Ok(packed),
    }
}

fn unxz(path: &Path) -> io::Result<Vec<u8>> {
    let failed = |error: io::Error| {
        let reason = format!("the module is packed with `xz`, which does not run here: {error}");
        io::Error::new(error.kind(), reason)
    };
    let program = helper::find("xz").ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
    let mut xz = Command::new(program);
    xz.arg("-dc").arg("--").arg(path).stdin(Stdio::null()).env_clear();
    let ran = xz.output().map_err(failed)?;
    if ran.status.success() {
        return Ok(ran.stdout);
    }
    let message = String::from_utf8_lossy(&ran.stderr).trim().to_owned();
    Err(io::Error::new(io::ErrorKind::InvalidData, message))
}

/// What a module says about others.
#[derive(Debug, Default, PartialEq, Eq)]
struct Info {
    depends: Vec<String>,
    /// What had better be there before, under names that need not be a module's.
    wants: Vec<String>,
}

impl Info {
    fn read(image: &[u8]) -> io::Result<Self> {
        let broken = || io::Error::new(io::ErrorKind::InvalidData, "this is no kernel module");
        let section = section(image, b".modinfo").ok_or_else(broken)?;
        let mut info = Self::default();
        for line in
            section.split(|byte| *byte == 0).filter_map(|line| std::str::from_utf8(line).ok())
        {
            match line.split_once('=') {
                Some(("depends", names)) => {
                    info.depends
                        .extend(names.split(',').filter(|name| !name.is_empty()).map(Into::into));
                }
                Some(("softdep", text)) => {
                    let before = text.split("post:").next().unwrap_or_default();
                    let names = before.split_whitespace().filter(|word| *word != "pre:");
                    info.wants.extend(names.map(Into::into));
                }
                _ => {}
            }
        }
        Ok(info)
    }
}

/// A section of a 64-bit little-endian ELF file, by its name.
fn section<'a>(image: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    const HEADER: usize = 64;
    if !image.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, size: usize| -> Option<usize> {
        let bytes = image.get(at..at.checked_add(size)?)?;
        let value = bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        usize::try_from(value).ok()
    };
    let table = number(0x28, 8)?;
    let count = number(0x3c, 2)?;
    let at = |index: usize| table.checked_add(index.checked_mul(HEADER)?);
    let body = |index: usize| -> Option<&[u8]> {
        let header = at(index)?;
        let start = number(header.checked_add(0x18)?, 8)?;
        image.get(start..start.checked_add(number(header.checked_add(0x20)?, 8)?)?)
    };
    let names = body(number(0x3e, 2)?)?;
    (0..count).find_map(|index| {
        let text = names.get(number(at(index)?, 4)?..)?;
        let ended = text.strip_prefix(name)?.first() == Some(&0);
        ended.then(|| body(index))?
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::io::Write as _;

    use super::{Info, NEEDED, closure};

    /// A file that has a `.modinfo` and nothing else.
    pub(in super::super) fn module(info: &str) -> Vec<u8> {
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut image = b"\x7fELF\x02\x01".to_vec();
        image.resize(64, 0);
        let info_at = image.len();
        image.extend_from_slice(info.as_bytes());
        let names_at = image.len();
        image.extend_from_slice(names);
        let table = image.len();
        image[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        image[0x3c..0x3e].copy_from_slice(&2_u16.to_le_bytes());
        image[0x3e..0x40].copy_from_slice(&1_u16.to_le_bytes());
        for (name, at, size) in [(1_u32, info_at, info.len()), (10, names_at, names.len())] {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
            image.extend_from_slice(&header);
        }
        image
    }

    #[test]
    fn modules_come_after_what_they_depend_on() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join("kernel").join(name);
        fs::create_dir_all(at("fs")).expect("a directory");
        let put = |name: &str, info: &str| fs::write(at(name), module(info)).expect("a file");
        put("virtio.ko", "license=GPL\0depends=\0");
        put("virtio_mmio.ko", "depends=virtio,virtio_ring\0");
        put("virtio_ring.ko", "depends=virtio\0");
        put("virtio-rng.ko", "depends=virtio\0");
        put("libcrc32c.ko", "softdep=pre: crc32c post: other\0depends=\0");
        put("crc32c_generic.ko", "");
        for name in ["virtio_blk", "virtio_console", "virtio_net", "overlay"] {
            put(&format!("{name}.ko"), "depends=\0");
        }
        let packed = zstd::encode_all(module("depends=libcrc32c\0").as_slice(), 0).expect("zstd");
        fs::write(at("fs/erofs.ko.zst"), packed).expect("a file");
        fs::write(dir.path().join("modules.builtin"), "kernel/fs/ext4/ext4.ko\n").expect("a file");
        let found = closure(dir.path()).expect("all there");
        let names: Vec<&str> = found.iter().map(|module| module.name.as_str()).collect();
        let expected = [
            "virtio",
            "virtio_ring",
            "virtio_mmio",
            "virtio_blk",
            "virtio_console",
            "virtio_rng",
            "virtio_net",
            "crc32c_generic",
            "libcrc32c",
            "erofs",
            "overlay",
        ];
        assert_eq!(names, expected);
        fs::remove_file(dir.path().join("modules.builtin")).expect("there");
        let error = closure(dir.path()).expect_err("no ext4");
        assert!(error.to_string().contains("`ext4`"), "{error}");
    }

    #[test]
    fn packed_modules_are_unpacked() {
        let dir = tempfile::tempdir().expect("a directory");
        let plain = module("depends=\0");
        for name in NEEDED {
            let file = fs::File::create(dir.path().join(format!("{name}.ko.gz"))).expect("a file");
            let mut packer = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
            packer.write_all(&plain).expect("room");
            packer.finish().expect("room");
        }
        let found = closure(dir.path()).expect("all there");
        assert!(found.iter().all(|module| module.image == plain));
        assert_eq!(found.len(), NEEDED.len());
    }

    #[test]
    fn what_is_no_module_is_told() {
        for bytes in [&b""[..], b"\x7fELF", b"\x7fELF\x02\x01 and little more", &[0xff; 200]] {
            assert!(Info::read(bytes).is_err());
        }
        let mut image = module("depends=a\0");
        for at in 0..image.len() {
            image[at] ^= 0xff;
            // Anything, but no panic.
            let _ = Info::read(&image);
            image[at] ^= 0xff;
        }
        assert_eq!(Info::read(&image).expect("whole").depends, ["a"]);
    }
}
