//! Builds the layer that has the result of a merge.
//!
//! The layer goes on top of the target's chain: files that are written, whiteouts for those that are removed, and the
//! directories they are in, with the attributes these have in the target.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::Path;

use rustix::fs::{Mode, OFlags, Statx};
use rustix::io::Errno;

use super::budget::{Budget, LONGEST_BUILD};
use super::content::shown_xattrs;
use super::merge::{MergePlan, PathAction, PathAttributes, PathContent};
use super::merged::{Found, LayerDir, MergedDir};
use super::walk::{Side, name_of};
use crate::model::{Layer, LayerId, LayerKind};
use crate::store::tree::{Dir, TreeDir, Xattrs};
use crate::store::{Result, Store, StoreError};

impl Store {
    /// Builds and seals the layer that turns `ours` into the result.
    pub(super) fn build_merge(&self, ours: &[LayerId], plan: &MergePlan) -> Result<Layer> {
        let (id, staging) = self.stage()?;
        let built = self
            .fill_merge(ours, plan, &staging)
            .and_then(|()| self.publish(&id, &staging, LayerKind::Session));
        if built.is_err() {
            self.discard_dir(&staging, id.as_str())?;
        }
        built
    }

    fn fill_merge(&self, ours: &[LayerId], plan: &MergePlan, staging: &Path) -> Result<()> {
        let mut roots = Vec::new();
        for (layer, id) in ours.iter().enumerate() {
            roots.push(LayerDir { layer, place: TreeDir::root(&self.diff_dir(id))? });
        }
        let mut builder = TreeBuilder {
            target: TreeDir::root(&staging.join("diff"))?,
            roots,
            plan,
            made: HashMap::new(),
            finish: Vec::new(),
            links: HashMap::new(),
        };
        builder.root()?;
        let budget = Budget::new(LONGEST_BUILD);
        for (path, action) in &plan.actions {
            budget.time()?;
            if !path.is_empty() {
                builder.act(path, action)?;
            }
        }
        builder.finish()
    }
}

struct TreeBuilder<'p> {
    target: TreeDir,
    /// The target's layers.
    roots: Vec<LayerDir>,
    plan: &'p MergePlan,
    /// Directories of the new layer, with what the target has there.
    made: HashMap<Vec<u8>, (TreeDir, Vec<LayerDir>)>,
    /// Directories to be given their attributes in the end.
    finish: Vec<(TreeDir, Statx, Xattrs)>,
    /// Files with several names that were written, by inode: with the attributes they were given.
    links: HashMap<(u32, u32, u64), Vec<WrittenName>>,
}

/// A name of a file that was written.
struct WrittenName {
    path: Vec<u8>,
    attributes: PathAttributes,
}

impl TreeBuilder<'_> {
    fn root(&mut self) -> Result<()> {
        let stat = match self.roots.first() {
            Some(top) => {
                let dir = top.place.open()?;
                (dir.own_stat()?, shown_xattrs(dir.own_xattrs()?))
            }
            None => (self.target.open()?.own_stat()?, Xattrs::new()),
        };
        let (stat, xattrs) = match self.plan.actions.get(&b""[..]) {
            Some(PathAction::Write { attributes, .. }) => {
                (changed(stat.0, attributes), attributes.xattrs.clone())
            }
            _ => stat,
        };
        self.finish.push((self.target.clone(), stat, xattrs));
        self.made.insert(Vec::new(), (self.target.clone(), self.roots.clone()));
        Ok(())
    }

    fn act(&mut self, path: &[u8], action: &PathAction) -> Result<()> {
        // What is in a directory that is removed or replaced goes with it.
        if self.is_gone(path) {
            return Ok(());
        }
        match action {
            PathAction::Remove => {
                let (dir, ours) = self.parent(path)?;
                let name = name_of(path);
                match MergedDir::open(&ours)?.find(&name)? {
                    Found::Nothing => Ok(()),
                    _ => dir.open()?.make_whiteout(&name),
                }
            }
            PathAction::Write { content: PathContent::Side(side), .. } if side.is_dir() => {
                self.directory(path).map(drop)
            }
            PathAction::Write { content, attributes } => self.file(path, content, attributes),
        }
    }

    /// Whether a directory that a path is in is removed or becomes something else.
    fn is_gone(&self, path: &[u8]) -> bool {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        ends.filter_map(|end| self.plan.actions.get(&path[..end])).any(|action| match action {
            PathAction::Remove => true,
            PathAction::Write { content: PathContent::Side(side), .. } => !side.is_dir(),
            PathAction::Write { content: PathContent::Text(..), .. } => true,
        })
    }

    /// The directory a path is in, in the new layer, and what the target has there.
    fn parent(&mut self, path: &[u8]) -> Result<(TreeDir, Vec<LayerDir>)> {
        let end = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        self.directory(&path[..end])
    }

    /// Makes a directory of the new layer, and those it is in.
    fn directory(&mut self, path: &[u8]) -> Result<(TreeDir, Vec<LayerDir>)> {
        let mut at = path.len();
        let mut missing = Vec::new();
        while !self.made.contains_key(&path[..at]) {
            missing.push(at);
            at = path[..at].iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        }
        for end in missing.into_iter().rev() {
            self.make(&path[..end])?;
        }
        self.made.get(path).cloned().ok_or(StoreError::ShuttingDown)
    }

    fn make(&mut self, path: &[u8]) -> Result<()> {
        let end = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        let Some((parent, ours)) = self.made.get(&path[..end]).cloned() else { return Ok(()) };
        let name = name_of(path);
        let place = parent.open()?.make_dir(&name)?;
        let (parts, there) = match MergedDir::open(&ours)?.find(&name)? {
            Found::Dir { parts, stat } => (parts, Some(*stat)),
            Found::Nothing | Found::Leaf { .. } => (Vec::new(), None),
        };
        let written = match self.plan.actions.get(path) {
            Some(PathAction::Write { content: PathContent::Side(side), attributes }) => {
                Some((side, attributes))
            }
            _ => None,
        };
        let (stat, xattrs) = match (written, there) {
            (Some((side, attributes)), there) => {
                let stat = match there {
                    Some(stat) => stat,
                    None => stat_of(side)?,
                };
                (changed(stat, attributes), attributes.xattrs.clone())
            }
            (None, Some(stat)) => {
                let xattrs = match parts.first() {
                    Some(top) => shown_xattrs(top.place.open()?.own_xattrs()?),
                    None => Xattrs::new(),
                };
                (stat, xattrs)
            }
            // The plan has every directory that the target does not have. What the target has here is not to be replaced.
            (None, None) => return Err(parent.open()?.failure("merge into", &name, Errno::NOTDIR)),
        };
        self.finish.push((place.clone(), stat, xattrs));
        self.made.insert(path.to_vec(), (place, parts));
        Ok(())
    }

    fn file(
        &mut self,
        path: &[u8],
        content: &PathContent,
        attributes: &PathAttributes,
    ) -> Result<()> {
        let (place, _) = self.parent(path)?;
        let dir = place.open()?;
        let name = name_of(path);
        let (side, bytes) = match content {
            PathContent::Side(side) => (side, None),
            PathContent::Text(bytes, side) => (side, Some(bytes)),
        };
        let is_linked = bytes.is_none() && side.links > 1;
        // Names of one file have the same attributes. One that is to have others becomes a file of its own.
        let same = |one: &&WrittenName| one.attributes == *attributes;
        let written = self.links.get(&side.inode).and_then(|all| all.iter().find(same));
        if is_linked && let Some(WrittenName { path: first, .. }) = written {
            let (from, _) =
                self.made.get(parent_of(first)).cloned().ok_or(StoreError::ShuttingDown)?;
            let linked = dir.link_from(&name, &from.open()?, &name_of(first));
            return linked.map_err(|error| dir.failure("link", &name, error));
        }
        let stat = match bytes {
            Some(bytes) => {
                write_file(&dir, &name, bytes)?;
                stat_of(side)?
            }
            None => {
                let stat = stat_of(side)?;
                dir.copy_data(&name, &side.dir.open()?, &side.name, &stat)?;
                stat
            }
        };
        dir.set_attributes(&name, &changed(stat, attributes), &attributes.xattrs)?;
        if is_linked {
            self.links
                .entry(side.inode)
                .or_default()
                .push(WrittenName { path: path.to_vec(), attributes: attributes.clone() });
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        for (place, stat, xattrs) in &self.finish {
            place.open()?.finish(stat, xattrs)?;
        }
        Ok(())
    }
}

fn parent_of(path: &[u8]) -> &[u8] {
    &path[..path.iter().rposition(|byte| *byte == b'/').unwrap_or(0)]
}

/// What a side is on disk.
fn stat_of(side: &Side) -> Result<Statx> {
    let dir = side.dir.open()?;
    if side.name.is_empty() { dir.own_stat() } else { dir.stat(&side.name) }
}

/// The same with other attributes.
fn changed(mut stat: Statx, attributes: &PathAttributes) -> Statx {
    let mode = u16::try_from(attributes.mode & 0o7777).unwrap_or_default();
    stat.stx_mode = (stat.stx_mode & !0o7777) | mode;
    (stat.stx_uid, stat.stx_gid) = (attributes.uid, attributes.gid);
    stat
}

fn write_file(dir: &Dir, name: &CString, bytes: &[u8]) -> Result<()> {
    let failed = |error: rustix::io::Errno| dir.failure("write", name, error);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir.fd(), name.as_c_str(), flags, Mode::RUSR | Mode::WUSR)
        .map_err(failed)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::io::write(&file, rest) {
            Ok(written) => rest = &rest[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(())
}
