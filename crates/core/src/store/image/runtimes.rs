//! Detects the language runtimes of an image from its files, without running them.
//!
//! A `node` that is a package's is known to the package database; others carry the address of their
//! headers in their text, with the version in it. A `python3.x` says it by its name.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::path::Path;

use super::Images;
use super::builder::blocking;
use super::error::ImageResult;
use super::unpack::Below;
use crate::model::Image;
use parking_lot::Mutex;

/// Where programs are if the image does not say.
const USUAL: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The most of a package database that is read.
const LARGEST: u64 = 64 << 20;
/// Versions of Python that are looked for.
const PYTHONS: std::ops::RangeInclusive<u32> = 8..=20;

/// What was found, by the image's digest.
pub(super) type RuntimeCache = Mutex<HashMap<String, BTreeSet<String>>>;

impl Images {
    /// The runtimes of an image, such as `node24` and `python3.13`. Looked up once for each digest.
    ///
    /// # Errors
    ///
    /// When its files cannot be read.
    pub async fn runtimes(&self, image: &Image) -> ImageResult<BTreeSet<String>> {
        let seen = || self.builder.runtimes.lock();
        if let Some(known) = seen().get(&image.digest) {
            return Ok(known.clone());
        }
        let below = self.builder.diffs(&image.layers);
        let path = image.config.env.get("PATH").map_or(USUAL, String::as_str).to_owned();
        let what = self.builder.store.data_dir().to_owned();
        let found = blocking(&what, move || Ok(look(&Below(&below), &path))).await?;
        seen().insert(image.digest.clone(), found.clone());
        Ok(found)
    }
}

fn look(image: &Below<'_>, path: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let program = |name: &str| {
        path.split(':').filter(|directory| directory.starts_with('/')).find_map(|directory| {
            let (place, found) = image.follow(&names(&format!("{directory}/{name}")))?;
            found.metadata.is_file().then_some((place, found.path))
        })
    };
    if let Some((place, node)) = program("node") {
        // The database is asked first, because it is small and a `node` is large.
        let packaged = if place == names("usr/bin/node") { packaged_node(image) } else { None };
        if let Some(major) = packaged.or_else(|| node_major(&node)) {
            found.insert(format!("node{major}"));
        }
    }
    for minor in PYTHONS {
        let name = format!("python3.{minor}");
        if program(&name).is_some() {
            found.insert(name);
        }
    }
    found
}

fn names(path: &str) -> Vec<Vec<u8>> {
    path.split('/').map(|name| name.as_bytes().to_vec()).collect()
}

/// Searches the program for `node-v24.1.0-headers`, the name of the headers to build its add-ons
/// with.
fn node_major(program: &Path) -> Option<u32> {
    const CHUNK: usize = 1 << 20;
    const OVERLAP: usize = 64;
    let mut reader = BufReader::with_capacity(CHUNK, File::open(program).ok()?);
    let mut window = Vec::with_capacity(CHUNK + OVERLAP);
    loop {
        let read = reader.by_ref().take(CHUNK as u64).read_to_end(&mut window).ok()?;
        if let Some(major) = headers_version(&window) {
            return Some(major);
        }
        if read == 0 {
            return None;
        }
        // What was found half at the end is found whole the next time.
        window.drain(..window.len().saturating_sub(OVERLAP));
    }
}

fn headers_version(text: &[u8]) -> Option<u32> {
    const BEGIN: &[u8] = b"node-v";
    let mut rest = text;
    while let Some(at) = rest.windows(BEGIN.len()).position(|window| window == BEGIN) {
        rest = &rest[at + BEGIN.len()..];
        let version: Vec<u8> =
            rest.iter().take_while(|b| b.is_ascii_digit() || **b == b'.').copied().collect();
        if rest[version.len()..].starts_with(b"-headers") {
            let version = String::from_utf8(version).ok()?;
            return version.split('.').next()?.parse().ok();
        }
    }
    None
}

fn packaged_node(image: &Below<'_>) -> Option<u32> {
    let (_, found) = image.follow(&names("var/lib/dpkg/status"))?;
    // It is the image's own: it may be a pipe, or have no end.
    if !found.metadata.is_file() {
        return None;
    }
    let mut text = Vec::new();
    File::open(&found.path).ok()?.take(LARGEST).read_to_end(&mut text).ok()?;
    packaged_version(&String::from_utf8_lossy(&text))
}

fn packaged_version(status: &str) -> Option<u32> {
    let package = status.split("\n\n").find(|entry| {
        entry.lines().any(|line| line == "Package: nodejs")
            && entry.lines().any(|line| line == "Status: install ok installed")
    })?;
    let version = package.lines().find_map(|line| line.strip_prefix("Version: "))?;
    let version = version.split_once(':').map_or(version, |(_, version)| version);
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{headers_version, packaged_version};

    #[test]
    fn a_node_tells_its_version() {
        let text = b"..node-v0.x..https://nodejs.org/download/release/v24.1.0/node-v24.1.0-headers.tar.gz\0";
        assert_eq!(headers_version(text), Some(24));
        for none in
            [&b"node-v"[..], b"node-v-headers", b"node-v24.1.0.tar.gz", b"", b"node-v1.2-header"]
        {
            assert_eq!(headers_version(none), None, "{}", String::from_utf8_lossy(none));
        }
    }

    #[test]
    fn a_package_tells_its_version() {
        let status = "Package: a\nStatus: install ok installed\nVersion: 1\n\n\
            Package: nodejs\nStatus: install ok installed\nVersion: 1:18.19.0+dfsg-6\n\n";
        assert_eq!(packaged_version(status), Some(18));
        assert_eq!(packaged_version(&status.replace("install ok", "deinstall ok")), None);
    }
}
