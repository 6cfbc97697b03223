//! The network of a session, from its beginning to its end.
//!
//! It is attached when the machine is up and before any hook runs, updated when a policy, a bound
//! or a secret changes, and removed with the machine; then its counters enter the session's usage.
//! A restarted daemon asks the driver for the device again; connections that its predecessor held
//! are gone, the network is not.
//!
//! *A policy that cannot be put in force lets nothing through.* A start fails by it and says why. A
//! running session continues with everything denied.
//!
//! *The authority.* Requests inside TLS are seen by signing for their names, with an authority of the sandbox's own. Its
//! certificate must stay the same for as long as something inside may have it, so it is kept beside the sandbox's
//! record, its key sealed, from the first time that rules look into TLS. Until then the one at hand is good for nothing,
//! and is thrown away with the session.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use sandkeep_proto::link::At;
use zeroize::Zeroizing;

use crate::driver::Device;
use crate::engine::audit::AuditLog;
use crate::engine::error::error_chain;
use crate::engine::network::Network;
use crate::engine::observe::network_journal::FileJournal;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::network::{BUNDLE, CERTIFICATE, SessionNetwork, Trust};
use crate::engine::{Error, Result};
use crate::guest::{Guest, GuestError};
use crate::model::{
    Action, AuditActor, AuditRecord, BadPolicy, Connection, Credential, FORMAT, KeptAuthority,
    Name, Patch, Policy, Sandbox, Session, Tags,
};
use crate::net::{
    Authority, BadAuthority, Gate, Journal, NetworkConfig, OpenGate, Rules, SessionNetworkStack,
    Traffic,
};
use crate::store::Durability;

/// The journal of a session, and the audit log for uses of secrets.
#[derive(Debug)]
struct AuditedJournal {
    journal: Arc<FileJournal>,
    audit: Arc<AuditLog>,
    project: Name,
    sandbox: Name,
}

impl Journal for AuditedJournal {
    fn write(&self, connection: Connection) {
        self.journal.write(connection);
    }

    fn secret_used(&self, secret: &str, host: &str) {
        let Self { audit, project, sandbox, .. } = self;
        audit.note_sometimes(
            Some(project),
            format!("secret {project} {sandbox} {secret} {host}"),
            || {
                let target = Some(format!("secret/{secret}"));
                let record = AuditRecord::by_system(Some(project), "secret.use", target);
                let record = record.with("sandbox", sandbox.as_str()).with("host", host);
                AuditRecord { actor: AuditActor::Agent, ..record.with("how", "brokered") }
            },
        );
    }
}

/// Makes the gate of a session. Approvals are above this layer.
pub(in crate::engine) trait MakesGates: Send + Sync {
    fn gate(self: Arc<Self>, live: &Arc<RunningSandbox>) -> Arc<dyn Gate>;
}

/// Where images keep what they trust; the first that exists counts.
const SYSTEM_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The most that is read of it.
const BUNDLE_LIMIT: u64 = 8 << 20;
const AUTHORITY: &str = "the sandbox's certificate authority";
/// How long making a running sandbox trust the authority may take.
const TRUST_WITHIN: Duration = Duration::from_secs(10);
/// The same in one that starts, or is adopted. An agent that sends a byte now and then would hold its turn for ever.
const TRUST_AT_START: Duration = Duration::from_secs(60);
/// How often what was counted is put on record while a session runs.
pub(in crate::engine) const COUNTED_EVERY: Duration = Duration::from_secs(5);

impl Network {
    /// What a sandbox may reach: its own policy or its project's, within the project's bound.
    pub(in crate::engine) fn rules(&self, sandbox: &Sandbox) -> Result<Arc<Rules>> {
        self.rules_by(sandbox, sandbox.config.network.as_ref())
    }

    fn rules_by(&self, sandbox: &Sandbox, policy: Option<&Policy>) -> Result<Arc<Rules>> {
        let project = self.tenancy.project_network(&sandbox.project)?;
        let policy = policy.unwrap_or(&project.default);
        let tags = &sandbox.config.tags;
        let reveal = |credential: &Credential| self.reveal(&sandbox.project, tags, credential);
        let rules =
            Rules::new(policy, project.bound.as_ref(), self.secrets.brokered(sandbox)?, &reveal);
        let rules = rules.map_err(|BadPolicy(reason)| Error::invalid("network", reason))?;
        Ok(Arc::new(rules.excepting(&self.outside.opened())))
    }

    /// Whether a policy can be put in force for sandboxes with these tags, as far as is known now.
    pub(in crate::engine) fn check_policy(
        &self,
        project: &Name,
        tags: &Tags,
        policy: &Policy,
    ) -> Result<()> {
        let reveal = |credential: &Credential| self.reveal(project, tags, credential);
        match Rules::new(policy, None, Vec::new(), &reveal) {
            Ok(_) => Ok(()),
            Err(BadPolicy(reason)) => Err(Error::invalid("network", reason)),
        }
    }

    /// Takes the session online, with the [authority](Self::authority) of its sandbox. Expects that nothing runs inside yet, or
    /// that an earlier daemon had it online.
    pub(in crate::engine) async fn connect_session(
        &self,
        live: &Arc<RunningSandbox>,
        device: Device,
        rules: Arc<Rules>,
        (authority, kept): (Arc<Authority>, bool),
    ) -> Result<()> {
        let (sandbox, session) = (live.sandbox(), live.session());
        let journal = FileJournal::new(self.store.network_dir(&sandbox.id), session.id.clone());
        let journal = Arc::new(journal);
        let told = AuditedJournal {
            journal: Arc::clone(&journal),
            audit: Arc::clone(&self.audit),
            project: sandbox.project.clone(),
            sandbox: sandbox.name.clone(),
        };
        let opens = rules.opens();
        let network = SessionNetworkStack::start(NetworkConfig {
            device,
            session: session.id.clone(),
            journal: Arc::new(told),
            before: Traffic { received: session.usage.network_in, sent: session.usage.network_out },
            rules,
            upstream: Arc::clone(&self.outside),
            authority: Arc::clone(&authority),
            gate: match self.gates.get().and_then(Weak::upgrade) {
                Some(gates) => gates.gate(live),
                None => Arc::new(OpenGate),
            },
            project: self.sockets_of(&sandbox.project),
        })
        .map_err(Error::NetworkDevice)?;
        let trust = Arc::new(Trust { authority, established: AtomicBool::new(false) });
        let policy = sandbox.config.network.clone();
        *live.network.lock() =
            Some(SessionNetwork { network, journal, policy, trust: Arc::clone(&trust) });
        if opens || kept {
            let established = self.establish_trust(live, &trust);
            let established = tokio::time::timeout(TRUST_AT_START, established).await;
            established.map_err(|_| GuestError::Timeout)??;
        }
        Ok(())
    }

    /// Takes a session that an earlier daemon had online there again. An obstacle is reported, and
    /// costs the session its network, not its life.
    pub(in crate::engine) async fn reconnect_session(&self, live: &Arc<RunningSandbox>) {
        let sandbox = live.sandbox();
        let rules = self.rules(&sandbox).unwrap_or_else(|error| {
            tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the network policy of a sandbox is invalid; all its connections are denied");
            Arc::new(Rules::deny_all())
        });
        let online = async {
            let device = live.driver.network(&live.key).await?;
            let authority = self.authority(&sandbox).await?;
            self.connect_session(live, device, rules, authority).await
        };
        if let Err(error) = online.await {
            tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "a sandbox is without a network until its next session");
        }
    }

    /// Takes the session offline and adds what was counted to its record.
    pub(in crate::engine) async fn disconnect_session(
        &self,
        live: &RunningSandbox,
        session: Option<&mut Session>,
    ) {
        let Some(connected) = live.network.lock().take() else { return };
        let traffic = connected.network.close().await;
        self.meters.count(traffic);
        if let Some(session) = session {
            session.usage.count(traffic);
        }
        connected.journal.finish().await;
    }

    /// Takes all sessions offline, for the next daemon to find what was counted.
    pub(in crate::engine) async fn disconnect_all(&self) {
        let offline = self.turns.all_live().into_iter().map(|live| async move {
            let mut session = live.session();
            self.disconnect_session(&live, Some(&mut session)).await;
            let counted = live.change_session(|kept| kept.usage = session.usage);
            if let Err(error) = self.records.keep_session(&counted).await {
                tracing::warn!(session = %counted.id, error = error_chain(&error), "the traffic of a session was not recorded");
            }
        });
        join_all(offline).await;
    }

    /// Puts another policy of the sandbox's own in force, at once.
    pub(in crate::engine) async fn policy_changed(
        &self,
        live: &Arc<RunningSandbox>,
        policy: Option<Policy>,
    ) {
        if let Some(connected) = &mut *live.network.lock() {
            connected.policy = policy;
        }
        self.rules_changed(live).await;
    }

    /// Puts the rules in force that now follow from the session's policy, its project's and its
    /// secrets, and makes sure that they can work inside.
    pub(in crate::engine) async fn rules_changed(&self, live: &Arc<RunningSandbox>) {
        if let Some(trust) = self.put_in_force(live) {
            self.try_to_establish_trust(live, &trust).await;
        }
    }

    /// The same for all that run in a project. No sandbox waits for another to be restricted.
    pub(in crate::engine) async fn project_rules_changed(&self, project: &Name) {
        let concerned =
            self.turns.all_live().into_iter().filter(|live| live.sandbox().project == *project);
        let opened: Vec<_> = concerned
            .filter_map(|live| self.put_in_force(&live).map(|trust| (live, trust)))
            .collect();
        join_all(opened.iter().map(|(live, trust)| self.try_to_establish_trust(live, trust))).await;
    }

    /// Puts rules in force, at once. They are made under a lock, so that the last call decides.
    /// Returns the authority if it must be trusted.
    fn put_in_force(&self, live: &Arc<RunningSandbox>) -> Option<Arc<Trust>> {
        let sandbox = live.sandbox();
        let connected = live.network.lock();
        let connected = connected.as_ref()?;
        let rules = self.rules_by(&sandbox, connected.policy.as_ref()).unwrap_or_else(|error| {
            tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the network policy of a sandbox is invalid; all its connections are denied");
            Arc::new(Rules::deny_all())
        });
        let opens = rules.opens();
        connected.network.set_rules(rules);
        opens.then(|| Arc::clone(&connected.trust))
    }

    /// A sandbox can keep its agent from answering, and loses by it: requests that rules look at fail inside.
    async fn try_to_establish_trust(&self, live: &RunningSandbox, trust: &Trust) {
        let established = tokio::time::timeout(TRUST_WITHIN, self.establish_trust(live, trust));
        let problem = match established.await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error_chain(&error),
            Err(_) => "its agent does not answer".to_owned(),
        };
        tracing::error!(sandbox = %live.sandbox().name, problem, "the CA certificate for intercepted TLS was not installed in a sandbox; its intercepted requests fail");
    }

    /// The authority that was kept, or a new one. Says whether it was kept.
    pub(in crate::engine) async fn authority(
        &self,
        sandbox: &Sandbox,
    ) -> Result<(Arc<Authority>, bool)> {
        let kept = match self.store.read::<KeptAuthority>(&sandbox.id).await {
            Ok(kept) => kept,
            Err(error) if error.is_not_found() => {
                let made = Authority::generate(sandbox.name.as_str())?;
                return Ok((Arc::new(made), false));
            }
            Err(error) => return Err(error.into()),
        };
        let key = self.keyring.reveal(&authority_context(sandbox), &kept.key);
        let key = key.map_err(|reason| Error::Sealed { what: AUTHORITY.to_owned(), reason })?;
        let key =
            std::str::from_utf8(&key).map_err(|_| BadAuthority::Damaged("its key is no text"))?;
        Ok((Arc::new(Authority::from_pem(&kept.certificate, key)?), true))
    }

    /// Keeps the authority and makes sure that programs inside trust it.
    async fn establish_trust(&self, live: &RunningSandbox, trust: &Trust) -> Result<()> {
        if trust.established.load(Ordering::SeqCst) {
            return Ok(());
        }
        let sandbox = live.sandbox();
        let (certificate, key) = trust.authority.to_pem();
        let key = self.keyring.seal(&authority_context(&sandbox), key.as_bytes());
        let key = key.map_err(|reason| Error::Sealed { what: AUTHORITY.to_owned(), reason })?;
        let kept = KeptAuthority {
            format: FORMAT,
            sandbox: sandbox.id.clone(),
            certificate: certificate.clone(),
            key,
        };
        self.store.write(&kept, Durability::Synced).await?;
        let guest = live.guest().await?;
        let mut bundle = system_bundle(&guest).await?;
        bundle.extend_from_slice(certificate.as_bytes());
        put(&guest, CERTIFICATE, certificate.into()).await?;
        put(&guest, BUNDLE, bundle.into()).await?;
        trust.established.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Encrypts the header values that come with a change, so that none is ever recorded as it is.
    pub(in crate::engine) fn seal_patch(&self, project: &Name, patch: &mut Patch) -> Result<()> {
        match &mut patch.network {
            Some(Some(policy)) => self.seal_policy(project, policy),
            _ => Ok(()),
        }
    }

    pub(in crate::engine) fn seal_policy(&self, project: &Name, policy: &mut Policy) -> Result<()> {
        for rule in &mut policy.requests {
            let Action::Headers(headers) = &mut rule.action else { continue };
            for value in headers.values_mut() {
                if let Credential::Plain(plain) = value {
                    let sealed = self.keyring.seal(&header_context(project), plain.as_bytes());
                    let what = || "the value of a header".to_owned();
                    *value = Credential::Sealed(
                        sealed.map_err(|reason| Error::Sealed { what: what(), reason })?,
                    );
                }
            }
        }
        Ok(())
    }

    fn reveal(
        &self,
        project: &Name,
        tags: &Tags,
        credential: &Credential,
    ) -> std::result::Result<Zeroizing<String>, BadPolicy> {
        let template = match credential {
            Credential::Plain(plain) => plain.clone(),
            Credential::Sealed(sealed) => {
                let revealed = self.keyring.reveal(&header_context(project), sealed);
                let bytes = revealed.map_err(|error| BadPolicy(error.to_string()))?;
                let text = std::str::from_utf8(&bytes);
                Zeroizing::new(
                    text.map_err(|_| BadPolicy("a header's value is no text".to_owned()))?
                        .to_owned(),
                )
            }
        };
        fill(&template, |name| {
            self.secrets
                .secret_value(project, tags, name)
                .map_err(|error| BadPolicy(error.to_string()))
        })
    }

    /// Puts on record what sessions under way have sent and received, so that a daemon that dies forgets little of it.
    pub(in crate::engine) async fn count_traffic(&self) {
        for live in self.turns.all_live() {
            // One that is being ended writes its own record.
            let Ok(_gate) = live.gate.try_read() else { continue };
            let Some(traffic) = live.traffic().filter(|_| !live.is_closed()) else { continue };
            let mut changed = false;
            let session = live.change_session(|session| {
                let before = session.usage;
                session.usage.count(traffic);
                changed = session.usage != before;
            });
            if changed && let Err(error) = self.records.keep_session(&session).await {
                tracing::warn!(session = %session.id, error = error_chain(&error), "the traffic of a session is not recorded yet");
            }
        }
    }
}

fn authority_context(sandbox: &Sandbox) -> String {
    format!("sandbox/{}/authority", sandbox.id)
}

/// Forks take policies along, so it is the project that binds a value.
fn header_context(project: &Name) -> String {
    format!("project/{project}/header")
}

/// Replaces `${secret:NAME}` by what `value` has for it.
fn fill(
    template: &str,
    value: impl Fn(&str) -> std::result::Result<Zeroizing<String>, BadPolicy>,
) -> std::result::Result<Zeroizing<String>, BadPolicy> {
    const OPEN: &str = "${secret:";
    let mut filled = Zeroizing::new(String::new());
    let mut rest = template;
    while let Some(at) = rest.find(OPEN) {
        filled.push_str(&rest[..at]);
        let (name, after) = rest[at + OPEN.len()..]
            .split_once('}')
            .ok_or_else(|| BadPolicy(format!("a `{OPEN}` without its `}}`")))?;
        filled.push_str(&value(name)?);
        rest = after;
    }
    filled.push_str(rest);
    Ok(filled)
}

/// What the image trusts.
async fn system_bundle(guest: &Guest) -> Result<Vec<u8>> {
    for path in SYSTEM_BUNDLES {
        let read = guest.read_file(root(path), 0, Some(BUNDLE_LIMIT)).await;
        let mut incoming = match read {
            Ok((_, incoming)) => incoming,
            Err(GuestError::Refused { .. }) => continue,
            Err(error) => return Err(error.into()),
        };
        let mut bundle = Vec::new();
        while let Some(bytes) = incoming.next().await? {
            bundle.extend_from_slice(&bytes);
            if bundle.len() as u64 > BUNDLE_LIMIT {
                let reason = "more of a file came than was asked for".to_owned();
                return Err(GuestError::Protocol { reason }.into());
            }
        }
        if bundle.last().is_some_and(|last| *last != b'\n') {
            bundle.push(b'\n');
        }
        return Ok(bundle);
    }
    Ok(Vec::new())
}

async fn put(guest: &Guest, path: &str, bytes: Bytes) -> Result<()> {
    let mut file = guest.write_file(root(path), Some(0o644), true, false).await?;
    file.send(bytes).await?;
    file.finish().await?;
    Ok(())
}

fn root(path: &str) -> At {
    At { path: path.to_owned(), cwd: None, user: None }
}

#[cfg(test)]
mod tests {
    use zeroize::Zeroizing;

    use super::fill;
    use crate::model::BadPolicy;

    #[test]
    fn secrets_are_put_where_a_header_names_them() {
        let value = |name: &str| match name {
            "A" => Ok(Zeroizing::new("${secret:B}".to_owned())),
            name => Err(BadPolicy(format!("no {name}"))),
        };
        for (template, filled) in [
            ("", ""),
            ("Bearer x", "Bearer x"),
            ("Bearer ${secret:A}!", "Bearer ${secret:B}!"),
            ("${secret:A}${secret:A}", "${secret:B}${secret:B}"),
            ("${other}", "${other}"),
        ] {
            assert_eq!(*fill(template, value).unwrap(), filled);
        }
        assert_eq!(fill("x ${secret:C}", value).unwrap_err(), BadPolicy("no C".to_owned()));
        assert!(fill("x ${secret:A", value).is_err());
    }
}
