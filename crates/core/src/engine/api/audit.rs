//! Recording and reading the audit log.

use crate::engine::audit::{AuditFollow, AuditQuery};
use crate::engine::context::damage::DamageKind;
use crate::engine::{Engine, Result};
use crate::model::{AuditChain, AuditRecord, KeyId, Name};
use crate::store::AuditReport;

impl Engine {
    /// Records what a caller did. If it must not be lost, this waits until it is on stable storage. Says whether it is in
    /// the queue, or on stable storage; what is not is counted, and the count is recorded later.
    pub async fn record(&self, record: AuditRecord, synced: bool) -> bool {
        let audit = &self.parts.context.audit;
        let is_recorded = match synced {
            true => audit.record_synced(record).await,
            false => audit.record(record).await,
        };
        self.report_audit_damage();
        is_recorded
    }

    /// Records what a caller without a key did, unless there was much of that a short time ago.
    pub fn record_anonymous(&self, record: AuditRecord) {
        self.parts.context.audit.note_anonymous(record);
    }

    /// Whether a frequent event is to be recorded: `what` was not recorded a short time ago.
    #[must_use]
    pub fn is_record_due(&self, project: Option<&Name>, what: String) -> bool {
        self.parts.context.audit.is_due(project, what)
    }

    /// Begins to read entries of the audit log.
    #[must_use]
    pub fn audit(&self, query: AuditQuery) -> AuditFollow {
        let context = &self.parts.context;
        context.audit.read(query, context.tasks.shutdown())
    }

    /// Says what is wrong with a chain of the audit log. `noted` is an entry that somebody wrote down: its
    /// number, and its hash or the beginning of it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::AuditLog`](crate::engine::Error::AuditLog) when the log cannot be read.
    pub async fn verify_audit(
        &self,
        chain: AuditChain,
        noted: Option<(u64, String)>,
    ) -> Result<AuditReport> {
        self.parts.context.audit.verify(chain, noted).await
    }

    /// The number of the last entry of a chain of the audit log; 0 if it has none.
    ///
    /// # Errors
    ///
    /// Returns [`Error::AuditLog`](crate::engine::Error::AuditLog) when the log cannot be read.
    pub async fn last_audit_entry(&self, chain: &AuditChain) -> Result<u64> {
        self.parts.context.audit.last(chain.clone()).await
    }

    /// Lists the chains of the audit log.
    ///
    /// # Errors
    ///
    /// Returns [`Error::AuditLog`](crate::engine::Error::AuditLog) when the log cannot be read.
    pub async fn audit_chains(&self) -> Result<Vec<AuditChain>> {
        self.parts.context.audit.chains().await
    }

    /// The label of a key.
    #[must_use]
    pub fn key_label(&self, id: &KeyId) -> Option<String> {
        let (_, key) = self.parts.tenancy.key(id)?;
        (!key.label.is_empty()).then_some(key.label)
    }

    /// Enters chains that are not as they were left into the register of damage.
    fn report_audit_damage(&self) {
        let context = &self.parts.context;
        for (chain, damage) in context.audit.take_damage() {
            context.report_damage(
                DamageKind::SecurityConfig,
                format!("audit/{chain}"),
                damage,
                "entries of the audit log were lost or changed outside of this server; `keep audit verify` \
                 lists them. New entries are recorded after the gap",
            );
        }
    }
}
