//! What a seal leaves out.
//!
//! A pattern without a slash matches a name at any depth; one with a slash is anchored at the root of
//! the sandbox. `*` and `?` stop at slashes, `**` does not. A directory that matches goes with all
//! that is in it. Leaving a path out means removing it from the layer: what a lower layer has there
//! shows again, and what was new is gone.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use rustix::fs::{AtFlags, FileType};

use crate::store::gc::remove;
use crate::store::path_text::as_path;
use crate::store::tree::{Place, join};
use crate::store::{Result, StoreError};

/// Patterns, ready to be matched.
#[derive(Debug)]
pub struct Globs {
    globs: GlobSet,
}

impl Globs {
    /// Reads patterns.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadGlob`] for the first that is none.
    pub fn parse(patterns: &[String]) -> Result<Self> {
        let mut builder = GlobSetBuilder::new();
        for pattern in patterns {
            let bad = |source| StoreError::BadGlob { glob: pattern.clone(), source };
            let plain = pattern.trim_end_matches('/');
            let glob = match plain.strip_prefix('/') {
                Some(anchored) => anchored.to_owned(),
                None if plain.contains('/') => plain.to_owned(),
                None => format!("**/{plain}"),
            };
            // Nobody means to exclude the root.
            if glob.is_empty() || glob == "**/" {
                continue;
            }
            let built = GlobBuilder::new(&glob).literal_separator(true).build().map_err(bad)?;
            builder.add(built);
        }
        let bad = |source| StoreError::BadGlob { glob: patterns.join(" "), source };
        Ok(Self { globs: builder.build().map_err(bad)? })
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

    /// Removes from the tree under `root`, which the sandbox has at `prefix`, all that matches.
    pub(in crate::store) fn apply(&self, root: &Path, prefix: &[u8]) -> Result<()> {
        if self.globs.is_empty() {
            return Ok(());
        }
        let mut places = vec![Place::root(root)?];
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

#[cfg(test)]
mod tests {
    use super::Globs;

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
