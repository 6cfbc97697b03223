//! Calls about snapshots: get, list, delete, export as an OCI archive.

use crate::body::Download;
use crate::paging::Pages;
use crate::query::Target;
use crate::transport::Call;
use crate::types::{Snapshot, SnapshotDeleted};
use crate::{Client, Error};

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Gets a snapshot.
    pub async fn snapshot(&self, id: &str) -> Result<Snapshot, Error> {
        self.transport.json(Call::get(Target::new(&["snapshots", id]))).await
    }

    /// Lists snapshots, of one sandbox or of all.
    #[must_use]
    pub fn snapshots(&self, sandbox: Option<&str>) -> Pages<Snapshot> {
        let sandbox = sandbox.map(str::to_owned);
        Pages::new(self, move || match &sandbox {
            Some(name) => Target::new(&["sandboxes", name, "snapshots"]),
            None => Target::new(&["snapshots"]),
        })
    }

    /// Deletes a snapshot nothing stands on, or any with `force`.
    pub async fn delete_snapshot(&self, id: &str, force: bool) -> Result<SnapshotDeleted, Error> {
        let target = Target::new(&["snapshots", id]).flag("force", force);
        self.transport.json(Call::new(hyper::Method::DELETE, target)).await
    }

    /// Streams a snapshot as an OCI image layout in a tar archive.
    pub async fn export_snapshot(&self, id: &str) -> Result<Download, Error> {
        self.transport.send(Call::get(Target::new(&["snapshots", id, "export"]))).await
    }
}
