//! What a stack of layers has at single paths.

use std::collections::BTreeSet;

use super::MOST_IN_DIR;
use super::merged::{Found, LayerDir, MergedDir};
use super::walk::{self, Side, ends, name_of, split};
use crate::model::LayerId;
use crate::store::tree::Place;
use crate::store::{Result, Store, StoreError};

/// How many nested directories are remembered. Deeper ones are found anew each time.
const REMEMBERED: usize = 64;

/// A stack of layers. It remembers the directories on the way to the path that was looked up last, so that paths in
/// order cost little.
pub(super) struct Lookup {
    roots: Vec<LayerDir>,
    /// Directories, each in the one before.
    way: Vec<(Vec<u8>, Vec<LayerDir>)>,
}

impl Lookup {
    pub(super) fn new(store: &Store, chain: &[LayerId]) -> Result<Self> {
        let root = |(layer, id): (usize, &LayerId)| {
            Ok(LayerDir { layer, place: Place::root(&store.diff_dir(id))? })
        };
        let roots = chain.iter().enumerate().map(root).collect::<Result<_>>()?;
        Ok(Self { roots, way: Vec::new() })
    }

    /// The root itself.
    pub(super) fn root(&self) -> Result<Side> {
        let top = self.roots.first().ok_or(StoreError::ShuttingDown)?;
        Ok(Side::new(top.place.clone(), c"", &top.place.open()?.own_stat()?))
    }

    /// The names in a directory, each with whether it is one itself.
    pub(super) fn names(&mut self, path: &[u8]) -> Result<Vec<(Vec<u8>, bool)>> {
        let Some(parts) = self.directory(path)? else { return Ok(Vec::new()) };
        let dir = MergedDir::open(&parts)?;
        let mut names = BTreeSet::new();
        for part in &dir.parts {
            part.dir.for_each(|name, _| {
                names.insert(name.to_owned());
                match names.len() > MOST_IN_DIR {
                    true => Err(walk::too_many(path)),
                    false => Ok(()),
                }
            })?;
        }
        let mut found = Vec::new();
        for name in names {
            match dir.find(&name)? {
                Found::Nothing => {}
                Found::Leaf { .. } => found.push((name.into_bytes(), false)),
                Found::Dir { .. } => found.push((name.into_bytes(), true)),
            }
        }
        Ok(found)
    }

    /// What is at a path that is not the root.
    pub(super) fn find(&mut self, path: &[u8]) -> Result<Option<Side>> {
        let end = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        let Some(parts) = self.directory(&path[..end])? else { return Ok(None) };
        let name = name_of(path);
        Ok(split(&name, MergedDir::open(&parts)?.find(&name)?).0)
    }

    /// Whether there is a directory at a path.
    pub(super) fn is_dir(&mut self, path: &[u8]) -> Result<bool> {
        Ok(path.is_empty() || self.find(path)?.is_some_and(|side| side.is_dir()))
    }

    /// The layers that have a directory.
    fn directory(&mut self, path: &[u8]) -> Result<Option<Vec<LayerDir>>> {
        let is_on_way = |dir: &[u8]| {
            path.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
        };
        while self.way.last().is_some_and(|(dir, _)| !is_on_way(dir)) {
            self.way.pop();
        }
        let (mut at, mut parts) = match self.way.last() {
            Some((dir, parts)) => (dir.len(), parts.clone()),
            None => (0, self.roots.clone()),
        };
        for end in ends(path).filter(|end| *end > at).collect::<Vec<_>>() {
            at = end;
            let name = name_of(&path[..end]);
            match MergedDir::open(&parts)?.find(&name)? {
                Found::Dir { parts: below, .. } => parts = below,
                Found::Nothing | Found::Leaf { .. } => return Ok(None),
            }
            if self.way.len() < REMEMBERED {
                self.way.push((path[..at].to_vec(), parts.clone()));
            }
        }
        Ok(Some(parts))
    }
}
