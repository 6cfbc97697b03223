//! Which records are manifests, and where each lies in the data directory.

use std::path::PathBuf;

use super::Manifest;
use crate::model::{
    Approval, ApprovalId, Command, CommandId, Drive, DriveId, Image, KeptAuthority, Layer, LayerId,
    Name, Project, Run, RunId, Sandbox, SandboxId, Secret, SecretName, Session, SessionId,
    Snapshot, SnapshotId, Webhook, WebhookCursor, WebhookId,
};
use crate::store::path_text::file_name_of;

impl Manifest for Project {
    type Key = Name;
    const KIND: &'static str = "project";
    const KEEP_LAST: bool = true;
    fn key(&self) -> Name {
        self.name.clone()
    }
    fn place(key: &Name) -> PathBuf {
        PathBuf::from(format!("projects/{key}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["projects/*.json"]
    }
}

impl Manifest for Sandbox {
    type Key = SandboxId;
    const KIND: &'static str = "sandbox";
    const KEEP_LAST: bool = true;
    const FOUNDS_DIRECTORY: bool = true;
    fn key(&self) -> SandboxId {
        self.id.clone()
    }
    fn place(key: &SandboxId) -> PathBuf {
        PathBuf::from(format!("sandboxes/{key}/sandbox.json"))
    }
    fn places() -> &'static [&'static str] {
        &["sandboxes/*/sandbox.json"]
    }
}

impl Manifest for KeptAuthority {
    type Key = SandboxId;
    const KIND: &'static str = "authority";
    fn key(&self) -> SandboxId {
        self.sandbox.clone()
    }
    fn place(key: &SandboxId) -> PathBuf {
        PathBuf::from(format!("sandboxes/{key}/authority.json"))
    }
    fn places() -> &'static [&'static str] {
        &["sandboxes/*/authority.json"]
    }
}

impl Manifest for Session {
    type Key = (SandboxId, SessionId);
    const KIND: &'static str = "session";
    fn key(&self) -> Self::Key {
        (self.sandbox.clone(), self.id.clone())
    }
    fn place((sandbox, id): &Self::Key) -> PathBuf {
        PathBuf::from(format!("sandboxes/{sandbox}/sessions/{id}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["sandboxes/*/sessions/*.json"]
    }
}

impl Manifest for Command {
    type Key = (SandboxId, CommandId);
    const KIND: &'static str = "command";
    fn key(&self) -> Self::Key {
        (self.sandbox.clone(), self.id.clone())
    }
    fn place((sandbox, id): &Self::Key) -> PathBuf {
        PathBuf::from(format!("sandboxes/{sandbox}/commands/{id}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["sandboxes/*/commands/*.json"]
    }
}

impl Manifest for Snapshot {
    type Key = SnapshotId;
    const KIND: &'static str = "snapshot";
    const KEEP_LAST: bool = true;
    fn key(&self) -> SnapshotId {
        self.id.clone()
    }
    fn place(key: &SnapshotId) -> PathBuf {
        PathBuf::from(format!("snapshots/{key}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["snapshots/*.json"]
    }
}

impl Manifest for Layer {
    type Key = LayerId;
    const KIND: &'static str = "layer";
    fn key(&self) -> LayerId {
        self.id.clone()
    }
    fn place(key: &LayerId) -> PathBuf {
        PathBuf::from(format!("layers/{key}/layer.json"))
    }
    fn places() -> &'static [&'static str] {
        &["layers/*/layer.json"]
    }
}

impl Manifest for Drive {
    type Key = DriveId;
    const KIND: &'static str = "drive";
    const KEEP_LAST: bool = true;
    fn key(&self) -> DriveId {
        self.id.clone()
    }
    fn place(key: &DriveId) -> PathBuf {
        PathBuf::from(format!("drives/{key}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["drives/*.json"]
    }
}

impl Manifest for Secret {
    type Key = (Name, SecretName);
    const KIND: &'static str = "secret";
    const KEEP_LAST: bool = true;
    fn key(&self) -> Self::Key {
        (self.project.clone(), self.name.clone())
    }
    fn place((project, name): &Self::Key) -> PathBuf {
        PathBuf::from(format!("secrets/{project}/{name}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["secrets/*/*.json"]
    }
}

impl Manifest for Image {
    type Key = String;
    const KIND: &'static str = "image";
    fn key(&self) -> String {
        self.name.clone()
    }
    fn place(key: &String) -> PathBuf {
        PathBuf::from(format!("images/{}.json", file_name_of(key)))
    }
    fn places() -> &'static [&'static str] {
        &["images/*.json"]
    }
}

impl Manifest for Webhook {
    type Key = (Name, WebhookId);
    const KIND: &'static str = "webhook";
    const KEEP_LAST: bool = true;
    fn key(&self) -> Self::Key {
        (self.project.clone(), self.id.clone())
    }
    fn place((project, id): &Self::Key) -> PathBuf {
        PathBuf::from(format!("webhooks/{project}/{id}/webhook.json"))
    }
    fn places() -> &'static [&'static str] {
        &["webhooks/*/*/webhook.json"]
    }
}

impl Manifest for WebhookCursor {
    type Key = (Name, WebhookId);
    const KIND: &'static str = "cursor";
    fn key(&self) -> Self::Key {
        (self.project.clone(), self.webhook.clone())
    }
    fn place((project, id): &Self::Key) -> PathBuf {
        PathBuf::from(format!("webhooks/{project}/{id}/cursor.json"))
    }
    fn places() -> &'static [&'static str] {
        &["webhooks/*/*/cursor.json"]
    }
}

impl Manifest for Run {
    type Key = (Name, RunId);
    const KIND: &'static str = "run";
    fn key(&self) -> Self::Key {
        (self.project.clone(), self.id.clone())
    }
    fn place((project, id): &Self::Key) -> PathBuf {
        PathBuf::from(format!("runs/{project}/{id}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["runs/*/*.json"]
    }
}

impl Manifest for Approval {
    type Key = (Name, ApprovalId);
    const KIND: &'static str = "approval";
    fn key(&self) -> Self::Key {
        (self.project.clone(), self.id.clone())
    }
    fn place((project, id): &Self::Key) -> PathBuf {
        PathBuf::from(format!("approvals/{project}/{id}.json"))
    }
    fn places() -> &'static [&'static str] {
        &["approvals/*/*.json"]
    }
}
