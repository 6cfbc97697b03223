//! The merged view of a name in a stack of layers, as overlayfs shows it.

use std::ffi::CStr;

use rustix::fs::{FileType, Statx};

use crate::store::Result;
use crate::store::tree::{Dir, Opaque, TreeDir, file_type};
use crate::store::walk::vanished;

/// A directory of one layer that is not open.
#[derive(Debug, Clone)]
pub(super) struct LayerDir {
    /// Which layer: the same number for the same layer of both stacks.
    pub(super) layer: usize,
    pub(super) place: TreeDir,
}

/// An open directory of one layer.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) layer: usize,
    pub(super) dir: Dir,
    opaque: Opaque,
}

/// A directory as a stack shows it: the same path in every layer that takes part, topmost first.
#[derive(Debug)]
pub(super) struct MergedDir {
    pub(super) parts: Vec<Part>,
}

/// What a stack has under a name.
#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    /// Anything but a directory.
    Leaf {
        layer: usize,
        dir: TreeDir,
        stat: Box<Statx>,
    },
    Dir {
        parts: Vec<LayerDir>,
        stat: Box<Statx>,
    },
}

impl MergedDir {
    /// Opens the parts that show: those above and including the first opaque one.
    pub(super) fn open(parts: &[LayerDir]) -> Result<Self> {
        let mut open = Vec::with_capacity(parts.len());
        for part in parts {
            let dir = match part.place.open() {
                Err(error) if vanished(&error) => continue,
                opened => opened?,
            };
            let opaque = dir.opaque()?;
            open.push(Part { layer: part.layer, dir, opaque });
            if opaque == Opaque::Yes {
                break;
            }
        }
        Ok(Self { parts: open })
    }

    /// How many of the lowest parts both stacks have in common.
    pub(super) fn common(&self, other: &Self) -> usize {
        let pairs = self.parts.iter().rev().zip(other.parts.iter().rev());
        pairs.take_while(|(one, other)| one.layer == other.layer).count()
    }

    /// What the stack has under `name`.
    pub(super) fn find(&self, name: &CStr) -> Result<Found> {
        let mut dirs: Option<(Vec<LayerDir>, Box<Statx>)> = None;
        for part in &self.parts {
            let Some(stat) = part.dir.stat_if_there(name)? else { continue };
            if part.dir.is_whiteout(name, &stat, part.opaque)? {
                break;
            }
            if file_type(&stat) != FileType::Directory {
                if dirs.is_none() {
                    let dir = part.dir.place().clone();
                    return Ok(Found::Leaf { layer: part.layer, dir, stat: Box::new(stat) });
                }
                break;
            }
            let one = LayerDir { layer: part.layer, place: part.dir.child(name) };
            let (parts, _) = dirs.get_or_insert_with(|| (Vec::new(), Box::new(stat)));
            parts.push(one);
        }
        Ok(match dirs {
            Some((parts, stat)) => Found::Dir { parts, stat },
            None => Found::Nothing,
        })
    }
}
