//! Archives and images made by hand, for the tests of images.

pub(crate) mod registry;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};

/// A tar archive that is written entry by entry, with names the `tar` crate would refuse.
pub(crate) struct Archive {
    bytes: Vec<u8>,
}

/// What an entry has besides its name.
#[derive(Clone)]
pub(crate) struct Meta {
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: u64,
}

pub(crate) const PLAIN: Meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 1_000_000_000 };

impl Archive {
    pub(crate) fn new() -> Self {
        Self { bytes: Vec::new() }
    }

    pub(crate) fn entry(
        mut self,
        kind: EntryType,
        name: &str,
        link: &str,
        meta: &Meta,
        content: &[u8],
    ) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(meta.mode);
        header.set_uid(meta.uid);
        header.set_gid(meta.gid);
        header.set_mtime(meta.mtime);
        header.set_size(content.len() as u64);
        for (kind, text, place) in
            [(EntryType::GNULongName, name, 0), (EntryType::GNULongLink, link, 157)]
        {
            if text.len() > 100 {
                self = self.raw(kind, "././@LongLink", text.as_bytes());
            } else {
                header.as_mut_bytes()[place..place + text.len()].copy_from_slice(text.as_bytes());
            }
        }
        if matches!(kind, EntryType::Char | EntryType::Block) {
            header.set_device_major(0).expect("a GNU header");
            header.set_device_minor(0).expect("a GNU header");
        }
        header.set_cksum();
        self.bytes.extend_from_slice(header.as_bytes());
        self.data(content)
    }

    fn raw(mut self, kind: EntryType, name: &str, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        self.bytes.extend_from_slice(header.as_bytes());
        self.data(content)
    }

    fn data(mut self, content: &[u8]) -> Self {
        self.bytes.extend_from_slice(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    /// Says something more about the entry that comes next.
    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut text = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + rest.to_string().len();
            length = rest + length.to_string().len();
            text.extend_from_slice(format!("{length} {key}=").as_bytes());
            text.extend_from_slice(value);
            text.push(b'\n');
        }
        self.raw(EntryType::XHeader, "pax", &text)
    }

    pub(crate) fn bytes_of_header(mut self, header: &[u8]) -> Self {
        self.bytes.extend_from_slice(header);
        self
    }

    pub(crate) fn file(self, name: &str, content: &str) -> Self {
        self.entry(EntryType::Regular, name, "", &PLAIN, content.as_bytes())
    }

    pub(crate) fn dir(self, name: &str, mode: u32) -> Self {
        self.entry(EntryType::Directory, name, "", &Meta { mode, ..PLAIN }, b"")
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Symlink, name, target, &PLAIN, b"")
    }

    pub(crate) fn hard_link(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Link, name, target, &PLAIN, b"")
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.bytes.extend_from_slice(&[0; 1024]);
        self.bytes
    }

    pub(crate) fn without_end(self) -> Vec<u8> {
        self.bytes
    }
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(bytes).expect("memory");
    packer.finish().expect("memory")
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).expect("memory")
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// This machine, in the words of the image format.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The configuration of an image with these layers, uncompressed.
pub(crate) fn config(layers: &[&[u8]], architecture: &str) -> Vec<u8> {
    let ids: Vec<String> = layers.iter().map(|layer| digest(layer)).collect();
    serde_json::to_vec(&serde_json::json!({
        "os": "linux",
        "architecture": architecture,
        "config": {"User": "app", "WorkingDir": "/srv", "Env": ["PATH=/bin", "A=b"]},
        "rootfs": {"type": "layers", "diff_ids": ids},
    }))
    .expect("plain values")
}

/// Everything in a tree, one line each: kind, mode, owner, content. `~` is a whiteout, `!` an opaque
/// directory.
pub(crate) fn picture(dir: &Path) -> BTreeMap<String, String> {
    fn walk(dir: &Path, from: &Path, into: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(dir).expect("a directory of ours") {
            let path = entry.expect("an entry").path();
            let found = fs::symlink_metadata(&path).expect("it is there");
            let kind = found.file_type();
            let name = path.strip_prefix(from).expect("below").to_string_lossy().into_owned();
            let text = if kind.is_dir() {
                walk(&path, from, into);
                let opaque = xattr::get(&path, "user.overlay.opaque").expect("readable");
                format!("dir {:o}{}", found.mode() & 0o7777, opaque.map_or("", |_| " !"))
            } else if kind.is_symlink() {
                format!("-> {}", fs::read_link(&path).expect("a link").display())
            } else if kind.is_char_device() && found.rdev() == 0 {
                "~".to_owned()
            } else if kind.is_fifo() {
                format!("pipe {:o}", found.mode() & 0o7777)
            } else if kind.is_file() {
                let mut content = Vec::new();
                let file = fs::File::open(&path).expect("ours");
                file.take(100).read_to_end(&mut content).expect("readable");
                format!("{:o} {}", found.mode() & 0o7777, String::from_utf8_lossy(&content))
            } else {
                format!("{kind:?}")
            };
            into.insert(name, text);
        }
    }
    let mut all = BTreeMap::new();
    walk(dir, dir, &mut all);
    all
}

/// [`picture`] as text.
pub(crate) fn drawn(dir: &Path) -> String {
    picture(dir).iter().map(|(name, what)| format!("{name}: {what}\n")).collect()
}
