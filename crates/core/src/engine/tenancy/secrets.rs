//! Secrets of projects, and how sessions get them.
//!
//! Records lie on disk with their values sealed, and are held in memory as they lie there. A value is
//! revealed where it is needed and forgotten right after: for a command that is given it, for the network
//! that puts it in its placeholder's place, for the mask of what commands print, for the guard.
//!
//! *A session is on record with a secret before it has it.* What the guard searches for when the session
//! ends, after a crash too, is what the record says. So a value that a session was given is kept, whatever
//! becomes of the secret meanwhile, until the session's layer is sealed or given up.

mod check;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::RwLock;
use sandkeep_proto::link::{Hidden, SecretFile};
use zeroize::Zeroizing;

use crate::catalog::Record;
use crate::db::{Db, Filter, Page};
use crate::engine::context::Context;
use crate::engine::context::damage::DamageKind;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::turns::Turns;
use crate::engine::{Error, Result};
use crate::model::lifecycle::Phase;
use crate::model::{
    AuditRecord, Config, DomainPattern, FORMAT, Inject, InjectInto, Name, Sandbox, Secret,
    SecretGiven, SecretHow, SecretName, SecretPlace, SecretVersion, Session, Tags, now,
};
use crate::net::Brokered;
use crate::secret::{Keyring, Mask, SealError};
use crate::store::{Durability, Store};

pub(in crate::engine) use self::check::{check, check_inject};

/// How many values of a secret are kept, but for those that sessions have.
const KEPT: usize = 3;
/// How many secrets a project may have.
const MOST: usize = 1000;
/// How much a session may be given in all: its output is searched for all of it.
const MOST_GIVEN: usize = 256 << 10;
/// How long a placeholder is at the least.
const PLACEHOLDER: usize = 32;

/// A value to be set.
#[derive(Clone)]
pub struct SetSecret {
    /// The value.
    pub value: Zeroizing<String>,
    /// The hosts that may have it when it is brokered; as before if absent.
    pub hosts: Option<Vec<DomainPattern>>,
    /// Where its placeholder is replaced besides headers; as before if absent.
    pub places: Option<BTreeSet<SecretPlace>>,
    /// The tags a sandbox must have to use it; as before if absent.
    pub tags: Option<Tags>,
}

impl std::fmt::Debug for SetSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { value: _, hosts, places, tags } = self;
        f.debug_struct("SetSecret")
            .field("hosts", hosts)
            .field("places", places)
            .field("tags", tags)
            .finish_non_exhaustive()
    }
}

/// The secrets of projects, and which sessions were given them.
pub(in crate::engine) struct Secrets {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    turns: Arc<Turns>,
    keyring: Arc<Keyring>,
    table: SecretTable,
}

impl Secrets {
    pub(in crate::engine) fn new(
        context: &Arc<Context>,
        turns: &Arc<Turns>,
        keyring: &Arc<Keyring>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store: context.store.clone(),
            db: Arc::clone(&context.db),
            context: Arc::clone(context),
            turns: Arc::clone(turns),
            keyring: Arc::clone(keyring),
            table: SecretTable::default(),
        })
    }
}

/// All secrets, as they are on disk.
#[derive(Debug, Default)]
struct SecretTable {
    all: RwLock<BTreeMap<(Name, SecretName), Secret>>,
    /// Serialises changes, so that two of them do not undo each other.
    change: tokio::sync::Mutex<()>,
}

impl SecretTable {
    fn get(&self, project: &Name, name: &SecretName) -> Option<Secret> {
        let all = self.all.read();
        all.get(&(project.clone(), name.clone())).cloned()
    }

    fn of(&self, project: &Name) -> Vec<Secret> {
        let all = self.all.read();
        all.values().filter(|secret| secret.project == *project).cloned().collect()
    }

    fn put(&self, secret: Secret) {
        let key = (secret.project.clone(), secret.name.clone());
        self.all.write().insert(key, secret);
    }

    fn remove(&self, project: &Name, name: &SecretName) {
        let key = (project.clone(), name.clone());
        self.all.write().remove(&key);
    }
}

/// What a command is given.
#[derive(Debug, Default)]
pub(in crate::engine) struct Given {
    pub(in crate::engine) env: BTreeMap<String, Hidden>,
    pub(in crate::engine) files: Vec<SecretFile>,
}

fn context(secret: &Secret, version: u64) -> String {
    format!("project/{}/secret/{}/{version}", secret.project, secret.name)
}

impl Secrets {
    pub(in crate::engine) fn learn_secret(&self, secret: Secret) {
        self.table.put(secret);
    }

    pub(in crate::engine) fn secret(&self, project: &Name, name: &SecretName) -> Result<Secret> {
        let found = self.table.get(project, name);
        found
            .filter(|secret| secret.deleted_at.is_none())
            .ok_or_else(|| Error::NoSecret(name.to_string()))
    }

    /// All secrets of a project, with those that were deleted and whose values sessions still have.
    pub(in crate::engine) fn of_project(&self, project: &Name) -> Vec<Secret> {
        self.table.of(project)
    }

    /// Deletes a secret. Values that sessions under way were given are kept, sealed, until those end.
    pub(in crate::engine) async fn delete_secret(
        &self,
        project: &Name,
        name: &SecretName,
    ) -> Result<Secret> {
        let _change = self.table.change.lock().await;
        let mut secret = self.secret(project, name)?;
        secret.deleted_at = Some(now());
        let given = self.given_in(project).await?;
        self.prune(&mut secret, &given).await?;
        Ok(secret)
    }

    /// A secret that a sandbox with these tags may use.
    fn usable(&self, project: &Name, tags: &Tags, name: &SecretName) -> Result<Secret> {
        let secret = self.secret(project, name)?;
        if secret.allows(tags) {
            return Ok(secret);
        }
        let wanted = secret.tags.iter().map(|(key, value)| format!("{key}={value}"));
        Err(Error::SecretTags { secret: name.to_string(), tags: wanted.collect() })
    }

    pub(in crate::engine) async fn set_secret(
        &self,
        project: &Name,
        name: SecretName,
        set: SetSecret,
    ) -> Result<Secret> {
        let _change = self.table.change.lock().await;
        let at = now();
        let mut secret = match self.table.get(project, &name) {
            Some(found) if found.deleted_at.is_none() => found,
            // A deleted secret still counts: sessions may be on record with its values.
            Some(found) => Secret {
                hosts: Vec::new(),
                places: BTreeSet::new(),
                tags: Tags::new(),
                created_at: at,
                deleted_at: None,
                ..found
            },
            None if self.table.of(project).len() >= MOST => {
                return Err(Error::invalid(
                    "name",
                    format!("a project has at most {MOST} secrets"),
                ));
            }
            None => Secret {
                format: FORMAT,
                project: project.clone(),
                name,
                versions: Vec::new(),
                hosts: Vec::new(),
                places: BTreeSet::new(),
                tags: Tags::new(),
                created_at: at,
                updated_at: at,
                deleted_at: None,
            },
        };
        let version = secret.version() + 1;
        let what = || format!("secret `{}`", secret.name);
        let sealed = self
            .keyring
            .seal(&context(&secret, version), set.value.as_bytes())
            .map_err(|reason| Error::Sealed { what: what(), reason })?;
        secret.versions.push(SecretVersion { version, sealed, created_at: at });
        secret.hosts = set.hosts.unwrap_or(secret.hosts);
        secret.places = set.places.unwrap_or(secret.places);
        secret.tags = set.tags.unwrap_or(secret.tags);
        secret.updated_at = at;
        let given = self.given_in(project).await?;
        self.prune(&mut secret, &given).await?;
        Ok(secret)
    }

    /// Saves a secret without the values that are not needed any more; one without any is removed.
    async fn prune(&self, secret: &mut Secret, given: &BTreeSet<(SecretName, u64)>) -> Result<()> {
        let kept = if secret.deleted_at.is_some() { 0 } else { KEPT };
        let old = secret.versions.len().saturating_sub(kept);
        let mut number = 0;
        let name = secret.name.clone();
        secret.versions.retain(|version| {
            number += 1;
            number > old || given.contains(&(name.clone(), version.version))
        });
        if secret.versions.is_empty() {
            self.store.remove::<Secret>(&(secret.project.clone(), name.clone())).await?;
            self.table.remove(&secret.project, &name);
        } else {
            self.store.write(secret, Durability::Synced).await?;
            self.table.put(secret.clone());
        }
        Ok(())
    }

    /// Which values sessions have whose layers are not sealed.
    async fn given_in(&self, project: &Name) -> Result<BTreeSet<(SecretName, u64)>> {
        let mut given = BTreeSet::new();
        let all = self.db.sandboxes(Some(project), &Filter::default(), &Page::all()).await?.items;
        // Paused memory contains the secrets that it was given.
        let has =
            |sandbox: &Sandbox| sandbox.open_layer().is_some() || sandbox.phase() == Phase::Paused;
        for sandbox in all.into_iter().filter(has) {
            let session = match (self.turns.live(&sandbox.id), &sandbox.session) {
                (Some(live), _) => Some(live.session()),
                (None, Some(id)) => self.db.session(id).await?,
                (None, None) => None,
            };
            let secrets = session.into_iter().flat_map(|session| session.secrets);
            given.extend(secrets.map(|given| (given.name, given.version)));
        }
        Ok(given)
    }

    /// Drops what was kept for sessions that have ended since.
    pub(in crate::engine) async fn forget_secrets(&self) -> Result<()> {
        let stale: Vec<Secret> = {
            let all = self.table.all.read();
            let stale =
                |secret: &&Secret| secret.deleted_at.is_some() || secret.versions.len() > KEPT;
            all.values().filter(stale).cloned().collect()
        };
        for secret in stale {
            let _change = self.table.change.lock().await;
            let given = self.given_in(&secret.project).await?;
            let Some(mut now) = self.table.get(&secret.project, &secret.name) else { continue };
            let before = now.versions.len();
            let kept = if now.deleted_at.is_some() { 0 } else { KEPT };
            let needed =
                |version: &SecretVersion| given.contains(&(secret.name.clone(), version.version));
            let old = &now.versions[..before.saturating_sub(kept)];
            if !old.iter().all(needed) {
                self.prune(&mut now, &given).await?;
            }
        }
        Ok(())
    }

    /// Removes all secrets of a project that goes.
    pub(in crate::engine) async fn drop_secrets(&self, project: &Name) -> Result<()> {
        let _change = self.table.change.lock().await;
        for secret in self.table.of(project) {
            self.store.remove::<Secret>(&(project.clone(), secret.name.clone())).await?;
            self.table.remove(project, &secret.name);
        }
        Ok(())
    }

    fn reveal_secret(&self, secret: &Secret, version: u64) -> Result<Zeroizing<String>> {
        let missing = || Error::NoSecret(format!("{}, version {version}", secret.name));
        let found = secret.versions.iter().find(|found| found.version == version);
        let sealed = &found.ok_or_else(missing)?.sealed;
        let what = || format!("secret `{}`", secret.name);
        let bytes = self
            .keyring
            .reveal(&context(secret, version), sealed)
            .map_err(|reason| Error::Sealed { what: what(), reason })?;
        let text = std::str::from_utf8(&bytes).map_err(|_| missing())?;
        Ok(Zeroizing::new(text.to_owned()))
    }

    /// The values a session was given, each once, by the secret's name.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Sealed`] or [`Error::NoSecret`] when one of them cannot be had any more.
    pub(in crate::engine) fn given_values(
        &self,
        project: &Name,
        session: &Session,
    ) -> Result<Vec<(String, Zeroizing<String>)>> {
        let given: BTreeSet<_> =
            session.secrets.iter().map(|given| (&given.name, given.version)).collect();
        let mut values: Vec<(String, Zeroizing<String>)> = Vec::new();
        for (name, version) in given {
            let secret = self.table.get(project, name);
            let secret = secret.ok_or_else(|| Error::NoSecret(name.to_string()))?;
            values.push((name.to_string(), self.reveal_secret(&secret, version)?));
        }
        Ok(values)
    }

    /// The value of a secret for a caller that acts for a sandbox with these tags.
    pub(in crate::engine) fn secret_value(
        &self,
        project: &Name,
        tags: &Tags,
        name: &str,
    ) -> Result<Zeroizing<String>> {
        let name = name.parse().map_err(|_| Error::NoSecret(name.to_owned()))?;
        let secret = self.usable(project, tags, &name)?;
        self.reveal_secret(&secret, secret.version())
    }

    /// The placeholder of a secret in a sandbox: the same in each of its sessions, another in a
    /// fork.
    fn placeholder(&self, sandbox: &Sandbox, name: &SecretName, value: &str) -> Result<String> {
        let length = value.len().max(PLACEHOLDER);
        let mut text = String::from("skp");
        for block in 0.. {
            if text.len() >= length {
                break;
            }
            let context = format!("placeholder/{}/{name}/{block}", sandbox.id);
            let bytes = self.keyring.derive(&context).map_err(|reason| Error::Sealed {
                what: format!("the placeholder of secret `{name}`"),
                reason,
            })?;
            // Only letters and digits: it must survive headers, URLs, JSON and shells as it is.
            text.extend(URL_SAFE_NO_PAD.encode(bytes).chars().filter(char::is_ascii_alphanumeric));
        }
        text.truncate(length);
        Ok(text)
    }

    /// The secrets that the network puts in their placeholders' place. A start is refused when one is
    /// missing; one that goes later is left out from then on.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Sealed`] when one cannot be read.
    pub(in crate::engine) fn brokered(&self, sandbox: &Sandbox) -> Result<Vec<Brokered>> {
        let mut all: Vec<Brokered> = Vec::new();
        for used in &sandbox.config.secrets {
            if all.iter().any(|there| there.name == used.secret.as_str()) {
                continue;
            }
            let usable = self.usable(&sandbox.project, &sandbox.config.tags, &used.secret);
            let Ok(secret) = usable else { continue };
            let value = self.reveal_secret(&secret, secret.version())?;
            let placeholder = self.placeholder(sandbox, &used.secret, &value)?;
            let name = used.secret.to_string();
            let Secret { hosts, places, .. } = secret;
            all.push(Brokered { name, placeholder, value, hosts, places });
        }
        Ok(all)
    }

    /// The placeholders that every command of a sandbox finds in its environment.
    pub(in crate::engine) fn placeholders(
        &self,
        sandbox: &Sandbox,
    ) -> Result<BTreeMap<String, String>> {
        let brokered = self.brokered(sandbox)?;
        let of = |name: &SecretName| {
            brokered.iter().find(|there| there.name == name.as_str()).map(|b| b.placeholder.clone())
        };
        let uses = sandbox.config.secrets.iter();
        Ok(uses.filter_map(|used| Some((used.env.clone(), of(&used.secret)?))).collect())
    }

    /// Whether a sandbox may use what its configuration says.
    pub(in crate::engine) fn check_secret_uses(
        &self,
        project: &Name,
        config: &Config,
    ) -> Result<()> {
        for used in &config.secrets {
            self.usable(project, &config.tags, &used.secret)?;
        }
        Ok(())
    }

    /// Puts a session on record with the secrets that its network puts in their placeholders' place, and
    /// masks them.
    pub(in crate::engine) async fn give_brokered(&self, live: &RunningSandbox) -> Result<()> {
        let _change = self.table.change.lock().await;
        let sandbox = live.sandbox();
        let mut given = Vec::new();
        for used in &sandbox.config.secrets {
            let usable = self.usable(&sandbox.project, &sandbox.config.tags, &used.secret);
            let Ok(secret) = usable else { continue };
            let (name, version) = (secret.name.clone(), secret.version());
            given.push(SecretGiven { name, version, how: SecretHow::Brokered });
        }
        self.give(live, given).await
    }

    /// Reveals what a command is given, after the session is on record with it.
    pub(in crate::engine) async fn inject(
        &self,
        live: &RunningSandbox,
        inject: &[Inject],
    ) -> Result<Given> {
        let mut given = Given::default();
        if inject.is_empty() {
            return Ok(given);
        }
        // What is about to be on record must not be pruned meanwhile.
        let _change = self.table.change.lock().await;
        let sandbox = live.sandbox();
        let mut notes = Vec::new();
        for Inject { secret, into } in inject {
            let secret = self.usable(&sandbox.project, &sandbox.config.tags, secret)?;
            let version = secret.version();
            let value = self.reveal_secret(&secret, version)?;
            let how = match into {
                InjectInto::Env(name) => {
                    given.env.insert(name.clone(), Hidden::new(&value));
                    SecretHow::Env
                }
                InjectInto::File(path) => {
                    let file = SecretFile { path: path.clone(), value: Hidden::new(&value) };
                    given.files.push(file);
                    SecretHow::File
                }
            };
            notes.push(SecretGiven { name: secret.name, version, how });
        }
        let told: Vec<_> = notes.iter().map(|note| (note.name.clone(), note.how)).collect();
        self.give(live, notes).await?;
        for (name, how) in told {
            let target = Some(format!("secret/{name}"));
            let record = AuditRecord::by_system(Some(&sandbox.project), "secret.use", target);
            let how = match how {
                SecretHow::Env => "env",
                SecretHow::File => "file",
                SecretHow::Brokered => "brokered",
            };
            let record = record.with("sandbox", sandbox.name.as_str()).with("how", how);
            self.context.audit.note(record);
        }
        Ok(given)
    }

    /// Puts a session on record with secrets, for good, and masks them from here on. One at a time: the
    /// caller holds the lock of changes.
    async fn give(&self, live: &RunningSandbox, given: Vec<SecretGiven>) -> Result<()> {
        let known = live.session().secrets;
        let new: Vec<_> = given.into_iter().filter(|given| !known.contains(given)).collect();
        if !new.is_empty() {
            let mut would_be = live.session();
            would_be.secrets.extend(new.iter().cloned());
            would_be.secrets.sort();
            would_be.secrets.dedup();
            let values = self.given_values(&live.sandbox().project, &would_be)?;
            if values.iter().map(|(_, value)| value.len()).sum::<usize>() > MOST_GIVEN {
                let most = MOST_GIVEN >> 10;
                let reason = format!("a session is given at most {most} KiB of secrets in all");
                return Err(Error::invalid("inject", reason));
            }
            let secrets = would_be.secrets;
            let session = live.change_session(|session| session.secrets = secrets);
            self.context.catalog.put(Record::Session(&session), Durability::Synced).await?;
            live.set_mask(Mask::new(values.iter().map(|(_, value)| value.as_str())));
        }
        Ok(())
    }

    /// Masks what a session was given before this daemon came.
    pub(in crate::engine) fn mask_again(&self, live: &RunningSandbox) {
        let sandbox = live.sandbox();
        let mut session = live.session();
        let mut values = Vec::new();
        for given in std::mem::take(&mut session.secrets) {
            session.secrets = vec![given];
            match self.given_values(&sandbox.project, &session) {
                Ok(found) => values.extend(found),
                Err(error) => {
                    tracing::error!(sandbox = %sandbox.name, %error, "a secret is no longer masked in command output: its value is not available");
                }
            }
        }
        live.set_mask(Mask::new(values.iter().map(|(_, value)| value.as_str())));
    }

    /// Keeps a new key from being made while there are secrets that an older one sealed.
    pub(in crate::engine) fn check_keyring(&self, secrets: &[Secret]) {
        if self.keyring.has_key() {
            return;
        }
        if self.keyring.locked().is_none() && !secrets.is_empty() {
            let count = secrets.len();
            self.keyring
                .lock(format!("`secrets.key` is missing, and {count} secrets are sealed with it"));
        }
        if let Some(reason) = self.keyring.locked() {
            self.context.report_damage(
                DamageKind::SecurityConfig,
                "secrets.key",
                reason,
                "secrets can be neither read nor set, and sandboxes that use them do not start. Bring the file back from \
                 a backup and start the server again; if it is lost for good, delete `secrets.key` and the files in \
                 `secrets/`, and set the secrets again",
            );
        }
    }

    /// Refuses to continue with another key than the one that running sessions were given secrets
    /// with: their output could not be masked, nor their files searched.
    pub(in crate::engine) async fn check_secrets_key(&self, sandboxes: &[Sandbox]) -> Result<()> {
        for sandbox in sandboxes.iter().filter(|sandbox| sandbox.open_layer().is_some()) {
            let Some(id) = &sandbox.session else { continue };
            let Some(session) = self.db.session(id).await? else { continue };
            if let Err(error @ Error::Sealed { reason: SealError::OtherKey { .. }, .. }) =
                self.given_values(&sandbox.project, &session)
            {
                return Err(error);
            }
        }
        Ok(())
    }
}
