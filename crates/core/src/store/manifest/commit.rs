//! Writes several manifests that become valid together.
//!
//! A stop writes three: the manifests of the layer it sealed and of the snapshot, and the sandbox's, which is
//! the commit point. On stable storage each must exist before the next refers to it. One after the other that
//! takes six syncs, two for each: the file, and its directory after the rename. Here it takes three:
//!
//! ```text
//! the files of all, in parallel  →  all but the sandbox's are renamed
//! their directories, in parallel  →  the sandbox's is renamed
//! its directory
//! ```
//!
//! A daemon that dies on the way leaves what writing one after the other could have left too: files in `tmp/`,
//! or a layer and a snapshot that no sandbox refers to, whose session is still open.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use crate::failpoint;
use crate::model::{Layer, LayerId, Sandbox, Snapshot};
use crate::store::manifest::document::refuse_later;
use crate::store::manifest::{Manifest, ensure_parent, next_of, sync_parent, to_json, write_file};
use crate::store::{Durability, Result, Store, blocking};

/// A document that is to be written.
struct Document {
    place: PathBuf,
    bytes: Vec<u8>,
    keep_last: bool,
}

impl Document {
    fn of<M: Manifest>(manifest: &M) -> Result<Self> {
        let place = M::place(&manifest.key());
        let bytes = to_json(manifest, &place)?;
        Ok(Self { place, bytes, keep_last: M::KEEP_LAST })
    }
}

/// A document's next version, beside its place. It is removed if it is not put there.
struct Draft {
    path: PathBuf,
    draft: PathBuf,
    bytes: Vec<u8>,
    keep_last: bool,
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Gone already, if it was put in its place. On a full disk every block counts now.
        let _ = fs::remove_file(&self.draft);
    }
}

impl Store {
    /// Seals layers that are [ready](crate::store::Sealing::Ready), records the snapshot and, last of all, the sandbox.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`](crate::store::StoreError::Io). Then the sandbox's old record is still there;
    /// some of the others may be written, and all can be written again.
    pub async fn commit(
        &self,
        layers: &[Layer],
        snapshot: Option<&Snapshot>,
        sandbox: &Sandbox,
    ) -> Result<()> {
        let mut first = layers.iter().map(Document::of).collect::<Result<Vec<_>>>()?;
        first.extend(snapshot.map(Document::of).transpose()?);
        let last = Document::of(sandbox)?;
        let sealed: Vec<LayerId> = layers.iter().map(|layer| layer.id.clone()).collect();
        let store = self.clone();
        blocking(move || store.commit_now(first, last, &sealed)).await
    }

    fn commit_now(&self, first: Vec<Document>, last: Document, sealed: &[LayerId]) -> Result<()> {
        failpoint::pass("store.commit.before");
        let mut directories = BTreeSet::new();
        let first = first
            .into_iter()
            .map(|document| {
                // The entry of a directory that is made here is to be synced as well.
                directories.extend(ensure_parent(self.data_dir(), &document.place)?);
                self.draft(document)
            })
            .collect::<Result<Vec<_>>>()?;
        ensure_parent(self.data_dir(), &last.place)?;
        let last = self.draft(last)?;
        let drafts: Vec<&Draft> = first.iter().chain([&last]).collect();
        side_by_side(&drafts, |one| write_file(&one.draft, &one.bytes, Durability::Synced))?;
        failpoint::pass("store.commit.written");
        for one in &first {
            self.put_synced(&one.path, &one.draft, one.keep_last)?;
            directories.insert(one.path.clone());
        }
        failpoint::pass("store.write.renamed");
        let mut parents = BTreeSet::new();
        let directories: Vec<PathBuf> =
            directories.into_iter().filter(|path| parents.insert(parent_of(path))).collect();
        side_by_side(&directories, |path| sync_parent(path))?;
        for layer in sealed {
            self.is_sealed(layer);
        }
        failpoint::pass("commit.snapshot");
        self.put_synced(&last.path, &last.draft, last.keep_last)?;
        failpoint::pass("store.write.renamed");
        sync_parent(&last.path)
    }

    fn draft(&self, Document { place, bytes, keep_last }: Document) -> Result<Draft> {
        let path = self.data_dir().join(place);
        refuse_later(&path)?;
        if keep_last {
            refuse_later(&next_of(&path))?;
        }
        Ok(Draft { draft: self.fresh_tmp("commit"), path, bytes, keep_last })
    }
}

fn parent_of(path: &Path) -> PathBuf {
    path.parent().unwrap_or(path).to_owned()
}

/// Does `work` for each at the same time, and waits for all. All syncs wait for the same journal
/// commit then.
fn side_by_side<T: Sync>(all: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let Some((here, others)) = all.split_first() else { return Ok(()) };
    let work = &work;
    thread::scope(|scope| {
        let others: Vec<_> = others.iter().map(|one| scope.spawn(move || work(one))).collect();
        let mut outcome = work(here);
        for other in others {
            let done = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(done);
        }
        outcome
    })
}
