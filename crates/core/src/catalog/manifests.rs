//! Reads manifests from the store to fill the index: `db` and `store` do not see each other.

use async_trait::async_trait;

use crate::db::{ManifestResult, Manifests};
use crate::model::{Command, Drive, Project, Sandbox, SandboxId, Session, Snapshot};
use crate::store::Store;

#[async_trait]
impl Manifests for Store {
    fn free_space(&self) -> Option<u64> {
        Store::free_space(self).ok().map(|(free, _)| free)
    }

    async fn projects(&self) -> ManifestResult<Vec<Project>> {
        Ok(self.scan::<Project>().await?.good)
    }

    async fn snapshots(&self) -> ManifestResult<Vec<Snapshot>> {
        Ok(self.scan::<Snapshot>().await?.good)
    }

    async fn drives(&self) -> ManifestResult<Vec<Drive>> {
        Ok(self.scan::<Drive>().await?.good)
    }

    async fn sandboxes(&self) -> ManifestResult<Vec<Sandbox>> {
        Ok(self.scan::<Sandbox>().await?.good)
    }

    async fn sessions(&self, sandbox: &SandboxId) -> ManifestResult<Vec<Session>> {
        Ok(self.scan_sessions(sandbox).await?.good)
    }

    async fn commands(&self, sandbox: &SandboxId) -> ManifestResult<Vec<Command>> {
        Ok(self.scan_commands(sandbox).await?.good)
    }
}
