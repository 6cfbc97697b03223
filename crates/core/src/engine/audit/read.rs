//! Reading and verifying chains.

use std::sync::Arc;

use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::engine::audit::AuditLog;
use crate::engine::{Error, Result};
use crate::model::{AuditChain, AuditEntry, AuditFilter};
use crate::store::{
    AuditPosition, AuditReport, audit_chains, last_audit_entry, read_audit, verify_audit,
};

/// How many bytes of a chain are looked at before others may read.
const READ_BYTES: u64 = 1 << 20;

/// Selects entries, and where to begin.
#[derive(Debug, Clone)]
pub struct AuditQuery {
    /// Of which chain.
    pub chain: AuditChain,
    /// Which.
    pub filter: AuditFilter,
    /// Only those with higher numbers.
    pub after: u64,
    /// Whether it continues with what is recorded from now on.
    pub follow: bool,
}

/// Entries of a chain, as they are read.
#[derive(Debug)]
pub struct AuditFollow {
    audit: std::path::PathBuf,
    reading: Arc<Semaphore>,
    written: watch::Receiver<u64>,
    shutdown: CancellationToken,
    query: AuditQuery,
    position: Option<AuditPosition>,
    last: u64,
}

/// A part of what was asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditBatch {
    /// The entries, in order. May be empty, where many do not fit the filter.
    pub entries: Vec<AuditEntry>,
    /// All up to this number were looked at.
    pub last: u64,
}

impl AuditLog {
    /// Begins to read.
    pub(in crate::engine) fn read(
        &self,
        query: AuditQuery,
        shutdown: CancellationToken,
    ) -> AuditFollow {
        AuditFollow {
            audit: self.audit.clone(),
            reading: Arc::clone(&self.reading),
            written: self.shared.written.subscribe(),
            shutdown,
            last: query.after,
            query,
            position: None,
        }
    }

    /// Says what is wrong with a chain. What was recorded before is part of it.
    pub(in crate::engine) async fn verify(
        &self,
        chain: AuditChain,
        noted: Option<(u64, String)>,
    ) -> Result<AuditReport> {
        self.finish().await;
        let (audit, key) = (self.audit.clone(), self.key.clone());
        let permit = Arc::clone(&self.reading).acquire_owned().await;
        let work = move || {
            // Here, because the work continues when its caller leaves.
            let _permit = permit;
            let noted = noted.as_ref().map(|(seq, hash)| (*seq, hash.as_str()));
            verify_audit(&audit, &chain, &key, noted)
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(report) => report.map_err(Error::AuditLog),
            Err(error) => Err(Error::AuditLog(std::io::Error::other(error))),
        }
    }

    /// The number of the last entry of a chain.
    pub(in crate::engine) async fn last(&self, chain: AuditChain) -> Result<u64> {
        let audit = self.audit.clone();
        let permit = Arc::clone(&self.reading).acquire_owned().await;
        let work = move || {
            let _permit = permit;
            last_audit_entry(&audit, &chain)
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(last) => last.map_err(Error::AuditLog),
            Err(error) => Err(Error::AuditLog(std::io::Error::other(error))),
        }
    }

    /// The chains there are.
    pub(in crate::engine) async fn chains(&self) -> Result<Vec<AuditChain>> {
        let audit = self.audit.clone();
        match tokio::task::spawn_blocking(move || audit_chains(&audit)).await {
            Ok(chains) => chains.map_err(Error::AuditLog),
            Err(error) => Err(Error::AuditLog(std::io::Error::other(error))),
        }
    }
}

impl AuditFollow {
    /// All up to this number were looked at.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.last
    }

    /// The next entries, at most `count`. `None` when there are no more: nothing is followed, or the daemon goes
    /// down. Nothing is lost when the future is dropped.
    ///
    /// # Errors
    ///
    /// Returns [`Error::AuditLog`] when the log cannot be read.
    pub async fn next(&mut self, count: usize) -> Result<Option<AuditBatch>> {
        loop {
            self.written.borrow_and_update();
            let (entries, complete) = self.read(count).await?;
            if !entries.is_empty() {
                return Ok(Some(AuditBatch { entries, last: self.last }));
            }
            if !complete {
                continue;
            }
            if !self.query.follow || self.shutdown.is_cancelled() {
                return Ok(None);
            }
            tokio::select! {
                changed = self.written.changed() => if changed.is_err() { return Ok(None) },
                () = self.shutdown.cancelled() => {}
            }
        }
    }

    /// Reads on. Says whether the end was reached.
    async fn read(&mut self, count: usize) -> Result<(Vec<AuditEntry>, bool)> {
        let permit = Arc::clone(&self.reading).acquire_owned().await;
        let (audit, chain) = (self.audit.clone(), self.query.chain.clone());
        let (position, after) = (self.position, self.last);
        let filter = self.query.filter.clone();
        let work = move || {
            let _permit = permit;
            read_audit(&audit, &chain, position, after, &filter, (count, READ_BYTES))
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(page) => {
                let page = page.map_err(Error::AuditLog)?;
                self.position = page.position;
                self.last = page.last;
                Ok((page.entries, page.complete))
            }
            Err(error) => Err(Error::AuditLog(std::io::Error::other(error))),
        }
    }
}
