//! What sandboxes may reach, and what they reached: policies of sandboxes and projects, and the journal.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use crate::engine::network::Network;
use crate::engine::observe::network_journal as journal;
use crate::engine::{Error, Result};
use crate::model::{Connection, DomainPattern, SandboxId, SessionId, Timestamp, Verdict};
use crate::store::StoreError;

/// Selects connections. All given conditions must match.
#[derive(Debug, Clone, Default)]
pub struct ConnectionFilter {
    /// With this outcome.
    pub verdict: Option<Verdict>,
    /// Of this session.
    pub session: Option<SessionId>,
    /// To these names, or to this address.
    pub host: Option<ConnectionHost>,
    /// That had not ended before this time.
    pub since: Option<Timestamp>,
    /// That are open.
    pub open: bool,
}

/// Where a connection went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionHost {
    /// To a name.
    Name(DomainPattern),
    /// To an address, whatever its name.
    Address(std::net::IpAddr),
}

impl ConnectionFilter {
    fn takes(&self, connection: &Connection) -> bool {
        self.verdict.is_none_or(|verdict| connection.verdict == verdict)
            && self.since.is_none_or(|since| connection.ended_at.is_none_or(|end| end >= since))
            && (!self.open || connection.ended_at.is_none())
            && match &self.host {
                None => true,
                Some(ConnectionHost::Name(pattern)) => {
                    connection.name.as_deref().is_some_and(|name| pattern.matches(name))
                }
                Some(ConnectionHost::Address(ip)) => connection.to.is_some_and(|to| to.ip() == *ip),
            }
    }
}

/// All that went to one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DestinationTraffic {
    /// The name, or the address where no name is known.
    pub host: String,
    /// How many connections, refused ones included.
    pub connections: u64,
    /// How many were refused.
    pub denied: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Bytes sent.
    pub bytes_out: u64,
    /// When something last began.
    pub last_at: Timestamp,
}

impl Network {
    /// The sessions whose journals are to be looked at, newest first.
    pub(in crate::engine) async fn journals(
        &self,
        sandbox: &SandboxId,
        filter: &ConnectionFilter,
    ) -> Result<Vec<SessionId>> {
        if let Some(session) = &filter.session {
            return Ok(vec![session.clone()]);
        }
        let dir = self.store.network_dir(sandbox);
        let mut sessions = on_disk("list", dir, journal::sessions).await?;
        // Nothing of it has ended yet, maybe.
        if let Some(live) = self.turns.live(sandbox).map(|live| live.session().id)
            && !sessions.contains(&live)
        {
            sessions.insert(0, live);
        }
        Ok(sessions)
    }

    /// What a session's journal has, newest first.
    pub(in crate::engine) async fn journal(
        &self,
        sandbox: &SandboxId,
        session: &SessionId,
        filter: &ConnectionFilter,
    ) -> Result<Vec<Connection>> {
        let dir = self.store.network_dir(sandbox);
        let open = match self.turns.live(sandbox).filter(|live| live.session().id == *session) {
            Some(live) => live.connections(),
            None => Vec::new(),
        };
        let (session, filter) = (session.clone(), filter.clone());
        let open: Vec<_> = open.into_iter().filter(|line| filter.takes(line)).collect();
        let read = move |dir: &Path| {
            let mut lines = Vec::new();
            journal::read(dir, &session, |line| {
                lines.extend(Some(line).filter(|line| filter.takes(line)));
            })?;
            Ok(lines)
        };
        let mut lines = on_disk("read", dir, read).await?;
        // One that ended in between is on disk already.
        let ended: HashSet<u64> = lines.iter().map(|line| line.id).collect();
        lines.extend(open.into_iter().filter(|line| !ended.contains(&line.id)));
        lines.sort_unstable_by_key(|line| std::cmp::Reverse(line.id));
        Ok(lines)
    }
}

/// Does something in a directory, where it may block.
async fn on_disk<T: Send + 'static>(
    action: &'static str,
    dir: PathBuf,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let path = dir.clone();
    match tokio::task::spawn_blocking(move || work(&dir)).await {
        Ok(outcome) => Ok(outcome.map_err(|source| StoreError::Io { action, path, source })?),
        Err(_) => Err(StoreError::ShuttingDown.into()),
    }
}

pub(in crate::engine) fn read_cursor(text: &str) -> Result<(SessionId, u64)> {
    let parts = text.split_once(':');
    let read = parts.and_then(|(session, id)| Some((session.parse().ok()?, id.parse().ok()?)));
    read.ok_or_else(|| Error::invalid("cursor", "this is not `next` of a page of connections"))
}
