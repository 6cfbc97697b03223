//! Excluded paths: what a seal leaves out.
//!
//! A pattern without a slash matches a name at any depth; one with a slash is anchored at the root of
//! the sandbox. `*` and `?` stop at slashes, `**` does not. A directory that matches goes with all
//! that is in it. Leaving a path out means removing it from the layer: what a lower layer has there
//! shows again, and what was new is gone.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use globset::{GlobBuilder, GlobMatcher, GlobSet, GlobSetBuilder};
use rustix::fs::{AtFlags, FileType};

use crate::store::gc::remove;
use crate::store::path_text::as_path;
use crate::store::tree::{TreeDir, join};
use crate::store::{Result, StoreError};

/// Patterns, ready to be matched.
#[derive(Debug)]
pub struct Globs {
    globs: GlobSet,
    leading: Vec<LeadingNames>,
}

/// How many names of a pattern are looked at. What is in deeper directories is visited more often than it has to be.
const MOST_NAMES: usize = 64;

/// The names a pattern begins with, up to the first that may match more than one name.
#[derive(Debug)]
struct LeadingNames {
    names: Vec<GlobMatcher>,
    /// Whether the pattern continues after them.
    goes_on: bool,
}

impl Globs {
    /// Reads patterns.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadGlob`] for the first that is none.
    pub fn parse(patterns: &[String]) -> Result<Self> {
        let (mut builder, mut leading) = (GlobSetBuilder::new(), Vec::new());
        for pattern in patterns {
            let bad = |source| StoreError::BadGlob { glob: pattern.clone(), source };
            let plain = pattern.trim_end_matches('/');
            let glob = match plain.strip_prefix('/') {
                Some(anchored) => anchored.to_owned(),
                None if plain.contains('/') => plain.to_owned(),
                None => format!("**/{plain}"),
            };
            // Excluding the root is never meant.
            if glob.is_empty() || glob == "**/" {
                continue;
            }
            let built = GlobBuilder::new(&glob).literal_separator(true).build().map_err(bad)?;
            builder.add(built);
            leading.push(LeadingNames::of(&glob).map_err(bad)?);
        }
        let bad = |source| StoreError::BadGlob { glob: patterns.join(" "), source };
        Ok(Self { globs: builder.build().map_err(bad)?, leading })
    }

    /// Whether a path, without a leading slash, matches.
    pub(in crate::store) fn matches(&self, path: &[u8]) -> bool {
        self.globs.is_match(as_path(path))
    }

    /// Whether a path or a directory it is in matches.
    #[must_use]
    pub fn covers(&self, path: &[u8]) -> bool {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        !self.globs.is_empty() && ends.chain([path.len()]).any(|end| self.matches(&path[..end]))
    }

    /// Whether something below a directory may match.
    pub(in crate::store) fn leads_to(&self, dir: &[u8]) -> bool {
        self.leading.iter().any(|one| one.leads_to(dir))
    }

    /// Removes from the tree under `root`, which the sandbox has at `prefix`, all that matches.
    pub(in crate::store) fn apply(&self, root: &Path, prefix: &[u8]) -> Result<()> {
        if self.globs.is_empty() {
            return Ok(());
        }
        let mut places = vec![TreeDir::root(root)?];
        while let Some(place) = places.pop() {
            let dir = place.open()?;
            for entry in dir.entries()? {
                let is_dir = entry.kind == FileType::Directory;
                if !self.matches(&join(prefix, &dir.path_of(&entry.name))) {
                    if is_dir {
                        places.push(dir.child(&entry.name));
                    }
                    continue;
                }
                let flags = if is_dir {
                    remove::empty(dir.child(&entry.name), &AtomicBool::new(false))?;
                    AtFlags::REMOVEDIR
                } else {
                    AtFlags::empty()
                };
                rustix::fs::unlinkat(dir.fd(), entry.name.as_c_str(), flags)
                    .map_err(|error| dir.failure("exclude", &entry.name, error))?;
            }
        }
        Ok(())
    }
}

impl LeadingNames {
    fn of(glob: &str) -> Result<Self, globset::Error> {
        let mut names = Vec::new();
        for name in glob.split('/') {
            if names.len() == MOST_NAMES {
                return Ok(Self { names, goes_on: true });
            }
            // Braces and brackets may have a slash in them.
            if name.contains("**") || name.contains(['{', '}', '[', ']', '\\']) {
                return Ok(Self { names, goes_on: true });
            }
            names.push(GlobBuilder::new(name).literal_separator(true).build()?.compile_matcher());
        }
        Ok(Self { names, goes_on: false })
    }

    fn leads_to(&self, dir: &[u8]) -> bool {
        for (at, name) in dir.split(|byte| *byte == b'/').enumerate() {
            match self.names.get(at) {
                Some(glob) if glob.is_match(as_path(name)) => {}
                Some(_) => return false,
                None => return self.goes_on,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::Globs;

    #[test]
    fn directories_that_cannot_lead_to_a_match_are_known() {
        let leads = |pattern: &str, dir: &str| {
            Globs::parse(&[pattern.to_owned()]).expect("a glob").leads_to(dir.as_bytes())
        };
        assert!(leads("/srv/app/*.txt", "srv"));
        assert!(leads("/srv/app/*.txt", "srv/app"));
        assert!(!leads("/srv/app/*.txt", "srv/other"));
        assert!(!leads("/srv/app/*.txt", "usr"));
        assert!(!leads("/srv/app/*.txt", "srv/app/x/y"));
        assert!(leads("/s?v/**/x", "srv/any/where"));
        assert!(!leads("/s?v/**/x", "usr/any"));
        assert!(leads("*.log", "any/where"));
        assert!(leads("/a/{b/c,d}/x", "a/b"));
        assert!(!leads("/", "a"));
    }

    #[test]
    fn patterns() {
        let matches = |pattern: &str, path: &str| {
            Globs::parse(&[pattern.to_owned()]).expect("a glob").matches(path.as_bytes())
        };
        assert!(matches("node_modules", "work/a/node_modules"));
        assert!(matches("*.log", "x.log"));
        assert!(matches("*.log", "var/x.log"));
        assert!(matches("/tmp/*", "tmp/x"));
        assert!(!matches("/tmp/*", "a/tmp/x"));
        assert!(!matches("/tmp/*", "tmp/x/y"));
        assert!(matches("work/**/target/", "work/a/b/target"));
        assert!(!matches("tmp/x", "a/tmp/x"));
        assert!(!matches("/", ""));
        assert!(!matches("", "x"));
    }
}
