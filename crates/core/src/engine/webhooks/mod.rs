//! Webhooks: events of a project, sent to addresses outside.
//!
//! ```text
//! event journal ──EventStream──> one task per webhook ──lane per sandbox──> POST ──> receiver
//!      (the outbox)                     │
//!                                 cursor.json: all up to here was delivered
//! ```
//!
//! - The event journal is the outbox: a webhook is a position in it. So an event that is in the journal is delivered, also by the
//!   next daemon, *at least once*; what is lost is what the journal loses.
//! - Events of one sandbox are delivered in order, one after the other. A receiver that refuses one of them holds up that
//!   sandbox's, and not the others', for as long as [`WINDOW`] has room.
//! - What fails is tried again, later and later. After [`WebhookSettings::give_up`] the webhook is disabled, which is an event.
//!
//! `deliver` sends and follows, `sign` makes the signature, `answers` the links with which receivers answer approvals. `net/post.rs` decides which addresses are dialled.

mod answers;
mod deliver;
mod sign;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

pub use self::answers::AnswerLink;
use self::answers::check_answers;
use crate::engine::context::Context;
use crate::engine::context::damage::DamageKind;
use crate::engine::{Error, Result};
use crate::model::{
    EventData, EventId, FORMAT, KeyId, Name, Timestamp, Webhook, WebhookCursor, WebhookDelivery,
    WebhookDisabled, WebhookId, WebhookSecret, now, webhook_kinds,
};
use crate::net::{PostTarget, Upstream};
use crate::secret::Keyring;
use crate::store::Durability;

/// How many webhooks a project may have.
const MOST: usize = 20;
/// How many events may be on their way or wait to be tried again, for each webhook.
const WINDOW: usize = 64;
/// How many attempts are remembered.
const REMEMBERED: usize = 20;
/// How many deliveries of one project may be under way at a time.
const PER_PROJECT: usize = 8;
/// How long a secret of an operator may be.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=256;

/// How webhooks behave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookSettings {
    /// How long a receiver may take.
    pub timeout: Duration,
    /// How long after the first failure it is tried again. Twice as long every time.
    pub retry: Duration,
    /// The longest of these pauses.
    pub retry_at_latest: Duration,
    /// How long deliveries may fail before the webhook is disabled.
    pub give_up: Duration,
    /// Where this server is reached from outside, for links in deliveries; if absent, links have a path only.
    pub public_url: Option<String>,
}

impl Default for WebhookSettings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            retry: Duration::from_secs(2),
            retry_at_latest: Duration::from_secs(3600),
            give_up: Duration::from_secs(24 * 3600),
            public_url: None,
        }
    }
}

/// A webhook to be made.
#[derive(Debug, Clone, Default)]
pub struct CreateWebhook {
    /// Where events are sent.
    pub url: String,
    /// Which: kinds, groups (`run.*`) or `*`.
    pub events: Vec<String>,
    /// What deliveries are signed with; one is made up if absent.
    pub secret: Option<String>,
    /// Whether private addresses may be dialled.
    pub allow_private: bool,
    /// The key that allows its receiver to answer approvals, if one does. It is one that may approve.
    pub answers: Option<KeyId>,
    /// The key it is made with.
    pub by: Option<KeyId>,
}

/// What is to be different.
#[derive(Debug, Clone, Default)]
pub struct UpdateWebhook {
    /// Where events are sent.
    pub url: Option<String>,
    /// Which.
    pub events: Option<Vec<String>>,
    /// Whether private addresses may be dialled.
    pub allow_private: Option<bool>,
    /// Whether anything is sent.
    pub enabled: Option<bool>,
    /// Whether its receiver may answer approvals.
    pub answers: Option<bool>,
    /// Whether whoever changes it may decide that private addresses are dialled.
    pub may_allow_private: bool,
    /// The key of whoever changes it, if it may approve.
    pub approver: Option<KeyId>,
}

/// A webhook, and how far it has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookStatus {
    /// The webhook.
    pub webhook: Webhook,
    /// Since when deliveries fail.
    pub failing_since: Option<Timestamp>,
    /// The last attempts, oldest first.
    pub deliveries: Vec<WebhookDelivery>,
}

/// The webhooks of all projects.
pub(in crate::engine) struct Webhooks {
    context: Arc<Context>,
    keyring: Arc<Keyring>,
    outside: Arc<Upstream>,
    all: RwLock<BTreeMap<WebhookId, Arc<ActiveWebhook>>>,
    /// Serialises changes, so that two of them do not undo each other.
    change: tokio::sync::Mutex<()>,
    /// Deliveries under way, by project.
    room: Mutex<BTreeMap<Name, Arc<Semaphore>>>,
}

/// A webhook at work.
struct ActiveWebhook {
    webhook: Webhook,
    cursor: Arc<Mutex<WebhookCursor>>,
    /// Ends its task.
    stop: CancellationToken,
}

impl Webhooks {
    pub(in crate::engine) fn new(
        context: &Arc<Context>,
        keyring: &Arc<Keyring>,
        outside: Arc<Upstream>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            keyring: Arc::clone(keyring),
            outside,
            all: RwLock::default(),
            change: tokio::sync::Mutex::default(),
            room: Mutex::default(),
        })
    }

    /// Reads what is on disk, and continues where an earlier daemon was. A damaged file costs only
    /// that webhook.
    pub(in crate::engine) async fn begin(self: &Arc<Self>) -> Result<()> {
        let store = &self.context.store;
        let (webhooks, cursors) =
            (store.scan::<Webhook>().await?, store.scan::<WebhookCursor>().await?);
        for damaged in webhooks.damaged {
            self.context.report_damage(
                DamageKind::UnreadableManifest,
                damaged.path.display().to_string(),
                damaged.reason,
                "this webhook sends nothing. Bring the file back from a backup and start the server again, or delete it and \
                 add the webhook again",
            );
        }
        for damaged in &cursors.damaged {
            self.report_cursor(
                DamageKind::UnreadableManifest,
                damaged.path.display().to_string(),
                damaged.reason.clone(),
            );
        }
        let is_damaged = |id: &WebhookId| {
            let holds = |path: &Path| path.parent().is_some_and(|dir| dir.ends_with(id.as_str()));
            cursors.damaged.iter().any(|damaged| holds(&damaged.path))
        };
        let missing = |webhook: &Webhook| {
            if !is_damaged(&webhook.id) {
                let path = format!("webhooks/{}/{}/cursor.json", webhook.project, webhook.id);
                self.report_cursor(DamageKind::Missing, path, "it is not there".to_owned());
            }
            // Its progress is unknown. A receiver can recognize a repeated event by its id; it
            // cannot notice one that was never sent.
            WebhookCursor { after: EventId::at(webhook.created_at), ..fresh_cursor(webhook) }
        };
        let mut good: BTreeMap<_, _> =
            cursors.good.iter().cloned().map(|cursor| (cursor.webhook.clone(), cursor)).collect();
        for webhook in webhooks.good {
            let cursor = good.remove(&webhook.id).unwrap_or_else(|| missing(&webhook));
            self.put(webhook, Arc::new(Mutex::new(cursor)));
        }
        Ok(())
    }

    fn report_cursor(&self, kind: DamageKind, path: String, reason: String) {
        self.context.report_damage(
            kind,
            path,
            reason,
            "how far this webhook has come is not known: it sends again all events since it was made that the journal \
             has. Receivers tell them by their ids",
        );
    }

    /// Puts a webhook to work, in the place of what it was before.
    fn put(self: &Arc<Self>, webhook: Webhook, cursor: Arc<Mutex<WebhookCursor>>) {
        let stop = self.context.tasks.shutdown().child_token();
        let hook = Arc::new(ActiveWebhook { webhook: webhook.clone(), cursor, stop });
        let before = self.all.write().insert(webhook.id.clone(), Arc::clone(&hook));
        if let Some(before) = before {
            before.stop.cancel();
        }
        if webhook.disabled.is_none() {
            let (this, stop) = (Arc::downgrade(self), hook.stop.clone());
            self.context.tasks.spawn(async move {
                stop.run_until_cancelled(deliver::run(this, hook)).await;
            });
        }
    }

    /// The webhooks of a project, oldest first.
    pub(in crate::engine) fn list(&self, project: &Name) -> Vec<WebhookStatus> {
        let all = self.all.read();
        all.values()
            .filter(|hook| hook.webhook.project == *project)
            .map(|hook| hook.status())
            .collect()
    }

    pub(in crate::engine) fn get(&self, project: &Name, id: &WebhookId) -> Result<WebhookStatus> {
        Ok(self.find(project, id)?.status())
    }

    fn find(&self, project: &Name, id: &WebhookId) -> Result<Arc<ActiveWebhook>> {
        let found = self.all.read().get(id).cloned();
        let found = found.filter(|hook| hook.webhook.project == *project);
        found.ok_or_else(|| Error::NoWebhook(id.clone()))
    }

    /// Makes a webhook. The second answer is its secret, which is not shown again.
    pub(in crate::engine) async fn create(
        self: &Arc<Self>,
        project: &Name,
        create: CreateWebhook,
    ) -> Result<(WebhookStatus, Zeroizing<String>)> {
        check_url(&create.url)?;
        check_events(&create.events)?;
        let secret = secret_or_fresh(create.secret)?;
        let _change = self.change.lock().await;
        if self.list(project).len() >= MOST {
            return Err(Error::invalid("url", format!("a project has at most {MOST} webhooks")));
        }
        let mut webhook = Webhook {
            format: FORMAT,
            id: WebhookId::fresh(),
            project: project.clone(),
            url: create.url,
            events: create.events,
            allow_private: create.allow_private,
            answers: None,
            secrets: Vec::new(),
            created_at: now(),
            created_by: create.by,
            disabled: None,
        };
        self.add_secret(&mut webhook, &secret)?;
        if let Some(by) = create.answers {
            self.allow_answers(&mut webhook, by)?;
            check_answers(&webhook)?;
        }
        let cursor = fresh_cursor(&webhook);
        // The cursor first: with one, a webhook that is on disk begins where it was made.
        self.context.store.write(&cursor, Durability::Synced).await?;
        self.context.store.write(&webhook, Durability::Synced).await?;
        let id = webhook.id.clone();
        self.put(webhook, Arc::new(Mutex::new(cursor)));
        Ok((self.get(project, &id)?, secret))
    }

    pub(in crate::engine) async fn update(
        self: &Arc<Self>,
        project: &Name,
        id: &WebhookId,
        change: UpdateWebhook,
    ) -> Result<WebhookStatus> {
        let _change = self.change.lock().await;
        let hook = self.find(project, id)?;
        let mut webhook = hook.webhook.clone();
        // What an operator allowed is for the address that the operator saw.
        let keeps = webhook.allow_private && change.allow_private != Some(false);
        let allows = change.allow_private == Some(true) || (change.url.is_some() && keeps);
        if allows && !change.may_allow_private {
            return Err(Error::PrivateWebhook);
        }
        self.change_answers(&mut webhook, &change)?;
        if let Some(url) = change.url {
            check_url(&url)?;
            webhook.url = url;
        }
        if let Some(events) = change.events {
            check_events(&events)?;
            webhook.events = events;
        }
        webhook.allow_private = change.allow_private.unwrap_or(webhook.allow_private);
        check_answers(&webhook)?;
        match change.enabled {
            Some(true) => {
                webhook.disabled = None;
                hook.cursor.lock().failing_since = None;
            }
            Some(false) if webhook.disabled.is_none() => {
                let reason = "somebody disabled it".to_owned();
                webhook.disabled = Some(WebhookDisabled { at: now(), reason });
            }
            _ => {}
        }
        self.keep(&hook, webhook).await?;
        self.get(project, id)
    }

    /// Gives a webhook another secret. Deliveries are signed with the one before, too, until the next change.
    pub(in crate::engine) async fn rotate(
        self: &Arc<Self>,
        project: &Name,
        id: &WebhookId,
        secret: Option<String>,
        only: bool,
    ) -> Result<(WebhookStatus, Zeroizing<String>)> {
        let secret = secret_or_fresh(secret)?;
        let _change = self.change.lock().await;
        let hook = self.find(project, id)?;
        let mut webhook = hook.webhook.clone();
        self.add_secret(&mut webhook, &secret)?;
        let kept = if only { 1 } else { 2 };
        let old = webhook.secrets.len().saturating_sub(kept);
        webhook.secrets.drain(..old);
        self.keep(&hook, webhook).await?;
        Ok((self.get(project, id)?, secret))
    }

    pub(in crate::engine) async fn remove(&self, project: &Name, id: &WebhookId) -> Result<()> {
        let _change = self.change.lock().await;
        let hook = self.find(project, id)?;
        self.erase(&hook).await
    }

    /// Removes the webhooks of a project that is gone.
    pub(in crate::engine) async fn remove_all(&self, project: &Name) -> Result<()> {
        let _change = self.change.lock().await;
        let all: Vec<_> = self.all.read().values().cloned().collect();
        for hook in all.iter().filter(|hook| hook.webhook.project == *project) {
            self.erase(hook).await?;
        }
        self.room.lock().remove(project);
        Ok(())
    }

    async fn erase(&self, hook: &ActiveWebhook) -> Result<()> {
        let key = (hook.webhook.project.clone(), hook.webhook.id.clone());
        hook.stop.cancel();
        self.context.store.remove::<Webhook>(&key).await?;
        self.all.write().remove(&hook.webhook.id);
        self.context.store.remove::<WebhookCursor>(&key).await?;
        Ok(())
    }

    /// Writes down what a webhook is now, and puts it to work.
    async fn keep(self: &Arc<Self>, hook: &ActiveWebhook, webhook: Webhook) -> Result<()> {
        self.context.store.write(&webhook, Durability::Synced).await?;
        self.put(webhook, Arc::clone(&hook.cursor));
        Ok(())
    }

    /// Disables a failing webhook, and reports it.
    async fn disable(self: &Arc<Self>, hook: &ActiveWebhook, reason: String) {
        let _change = self.change.lock().await;
        // It may have been changed or removed meanwhile.
        if hook.stop.is_cancelled() {
            return;
        }
        let mut webhook = hook.webhook.clone();
        webhook.disabled = Some(WebhookDisabled { at: now(), reason: reason.clone() });
        tracing::warn!(webhook = %webhook.id, project = %webhook.project, reason, "a webhook was disabled");
        let (id, project) = (webhook.id.clone(), webhook.project.clone());
        if let Err(error) = self.keep(hook, webhook).await {
            tracing::error!(webhook = %id, %error, "a webhook that was disabled is not on record as such");
        }
        let change = EventData::WebhookDisabled { webhook: id, reason };
        self.context.events.emit(Some(&project), None, change);
    }

    fn add_secret(&self, webhook: &mut Webhook, secret: &str) -> Result<()> {
        let version = webhook.secrets.last().map_or(0, |last| last.version) + 1;
        let sealed = self.keyring.seal(&sealed_for(webhook, version), secret.as_bytes());
        let what = || format!("the secret of webhook `{}`", webhook.id);
        let sealed = sealed.map_err(|reason| Error::Sealed { what: what(), reason })?;
        webhook.secrets.push(WebhookSecret { version, sealed });
        Ok(())
    }

    /// The secrets of a webhook, the newest first.
    fn secrets(&self, webhook: &Webhook) -> Result<Vec<Zeroizing<Vec<u8>>>> {
        let reveal = |secret: &WebhookSecret| {
            let revealed =
                self.keyring.reveal(&sealed_for(webhook, secret.version), &secret.sealed);
            let what = format!("the secret of webhook `{}`", webhook.id);
            revealed.map_err(|reason| Error::Sealed { what, reason })
        };
        webhook.secrets.iter().rev().map(reveal).collect()
    }

    /// Where the deliveries of a project take their turns.
    fn room(&self, project: &Name) -> Arc<Semaphore> {
        let mut room = self.room.lock();
        Arc::clone(
            room.entry(project.clone()).or_insert_with(|| Arc::new(Semaphore::new(PER_PROJECT))),
        )
    }
}

impl ActiveWebhook {
    fn status(&self) -> WebhookStatus {
        let cursor = self.cursor.lock();
        WebhookStatus {
            webhook: self.webhook.clone(),
            failing_since: cursor.failing_since,
            deliveries: cursor.deliveries.clone(),
        }
    }
}

fn fresh_cursor(webhook: &Webhook) -> WebhookCursor {
    WebhookCursor {
        format: FORMAT,
        webhook: webhook.id.clone(),
        project: webhook.project.clone(),
        after: EventId::at(Timestamp::now()),
        done: Vec::new(),
        failing_since: None,
        deliveries: Vec::new(),
    }
}

fn sealed_for(webhook: &Webhook, version: u64) -> String {
    format!("project/{}/webhook/{}/{version}", webhook.project, webhook.id)
}

fn check_url(url: &str) -> Result<()> {
    PostTarget::parse(url).map(drop).map_err(|reason| Error::invalid("url", reason))
}

fn check_events(events: &[String]) -> Result<()> {
    webhook_kinds(events).map(drop).map_err(|reason| Error::invalid("events", reason))
}

/// The secret that was given, or a new one.
fn secret_or_fresh(given: Option<String>) -> Result<Zeroizing<String>> {
    if let Some(given) = given {
        if !SECRET_BYTES.contains(&given.len()) || given.chars().any(char::is_control) {
            let reason = "16 to 256 bytes of text, on one line; leave it out to have one made";
            return Err(Error::invalid("secret", reason));
        }
        return Ok(Zeroizing::new(given));
    }
    let mut random = Zeroizing::new([0u8; 32]);
    getrandom::fill(&mut *random).expect("the kernel gives random bytes");
    Ok(Zeroizing::new(format!("whsec_{}", URL_SAFE_NO_PAD.encode(*random))))
}
