//! Links with which the receiver of a webhook answers approvals.
//!
//! ```text
//! approval.asked ──> delivery, with data.answer_url ──> receiver ──> POST answer_url ──> the answer, once
//! ```
//!
//! A token is an HMAC of the webhook and the approval, made with a key that this webhook has for nothing else. So no link is
//! stored anywhere: it is the same in every attempt to deliver it, and a daemon that is killed in between makes no
//! difference. A link ends with its approval, which is answered once or expires; with its webhook; and with the webhook's
//! key, which is another one when the address changes.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use zeroize::Zeroizing;

use super::{UpdateWebhook, Webhooks};
use crate::engine::error::error_chain;
use crate::engine::{Error, Result};
use crate::model::{ApprovalId, EventData, KeyId, Name, Webhook, WebhookAnswers, WebhookId};

/// What is authenticated begins with this.
const PURPOSE: &str = "sandkeep approval answer 1";
/// How long a token may be: an id, a dot and 32 bytes in Base64.
const LONGEST_TOKEN: usize = 128;

const UNKNOWN: &str =
    "it was not made here, or its webhook was deleted, disabled or may not answer any more";

/// Who answers with a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerLink {
    /// The webhook it was sent to.
    pub webhook: WebhookId,
    /// The project.
    pub project: Name,
    /// The key that allowed the webhook to answer.
    pub allowed_by: KeyId,
}

impl Webhooks {
    /// Lets a webhook answer, with a key that ends all earlier links.
    pub(super) fn allow_answers(&self, webhook: &mut Webhook, by: KeyId) -> Result<()> {
        let mut key = Zeroizing::new([0u8; 32]);
        getrandom::fill(&mut *key).expect("the kernel gives random bytes");
        let sealed = self.keyring.seal(&sealed_for(webhook), &*key);
        let sealed = sealed.map_err(|reason| Error::Sealed { what: what(webhook), reason })?;
        webhook.answers = Some(WebhookAnswers { allowed_by: by, sealed });
        Ok(())
    }

    /// Lets a webhook answer, or not any more. Who gets links is up to those who may approve, so an address is, too.
    pub(super) fn change_answers(
        &self,
        webhook: &mut Webhook,
        change: &UpdateWebhook,
    ) -> Result<()> {
        if change.answers == Some(false) {
            webhook.answers = None;
            return Ok(());
        }
        let moves = change.url.as_ref().is_some_and(|url| *url != webhook.url);
        if change.answers == Some(true) || (moves && webhook.answers.is_some()) {
            let by = change.approver.clone().ok_or(Error::WebhookAnswers)?;
            self.allow_answers(webhook, by)?;
        }
        Ok(())
    }

    /// Where an approval is answered; nothing if this webhook may not.
    pub(super) fn answer_url(&self, webhook: &Webhook, id: &ApprovalId) -> Result<Option<String>> {
        let Some(mac) = self.answer_mac(webhook, id)? else { return Ok(None) };
        let mac = URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes());
        let base = self.context.settings.webhooks.public_url.as_deref().unwrap_or_default();
        let base = base.trim_end_matches('/');
        Ok(Some(format!("{base}/v1/approvals/{id}/answer?token={}.{mac}", webhook.id)))
    }

    /// The link that goes out with an event: of an approval that was asked, if this webhook may answer.
    pub(super) fn link_in(&self, webhook: &Webhook, event: &EventData) -> Option<String> {
        let EventData::ApprovalAsked(asked) = event else { return None };
        match self.answer_url(webhook, &asked.approval) {
            Ok(link) => link,
            Err(error) => {
                tracing::error!(webhook = %webhook.id, error = error_chain(&error), "a delivery goes without its link");
                None
            }
        }
    }

    /// Whose link this token is. It does not tell whether the approval still waits.
    pub(in crate::engine) fn answer_link(
        &self,
        token: &str,
        id: &ApprovalId,
    ) -> Result<AnswerLink> {
        let unknown = || Error::AnswerLink(UNKNOWN);
        let parts = Some(token).filter(|token| token.len() <= LONGEST_TOKEN);
        let (webhook, mac) = parts.and_then(|token| token.split_once('.')).ok_or_else(unknown)?;
        let webhook: WebhookId = webhook.parse().map_err(|_| unknown())?;
        let given = URL_SAFE_NO_PAD.decode(mac).map_err(|_| unknown())?;
        let hook = self.all.read().get(&webhook).cloned().ok_or_else(unknown)?;
        let hook = Some(&hook.webhook).filter(|hook| hook.disabled.is_none());
        let hook = hook.ok_or_else(unknown)?;
        let expected = self.answer_mac(hook, id)?.ok_or_else(unknown)?;
        // Takes the same time wherever the two differ.
        expected.verify_slice(&given).map_err(|_| unknown())?;
        let allowed_by = hook.answers.as_ref().map(|answers| answers.allowed_by.clone());
        let allowed_by = allowed_by.ok_or_else(unknown)?;
        Ok(AnswerLink { webhook, project: hook.project.clone(), allowed_by })
    }

    fn answer_mac(&self, webhook: &Webhook, id: &ApprovalId) -> Result<Option<Hmac<Sha256>>> {
        let Some(answers) = &webhook.answers else { return Ok(None) };
        let key = self.keyring.reveal(&sealed_for(webhook), &answers.sealed);
        let key = key.map_err(|reason| Error::Sealed { what: what(webhook), reason })?;
        let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("any length is a key");
        for part in [PURPOSE, webhook.id.as_str(), id.as_str()] {
            mac.update(part.as_bytes());
            mac.update(b"\n");
        }
        Ok(Some(mac))
    }
}

/// Checks that links go to nobody on the way.
pub(super) fn check_answers(webhook: &Webhook) -> Result<()> {
    let open = webhook.answers.is_some() && !webhook.url.starts_with("https://");
    if open && !webhook.allow_private {
        let reason = "a webhook with `answers` needs an address that begins with `https://`, so that nobody on the way \
                      reads the links";
        return Err(Error::invalid("url", reason));
    }
    Ok(())
}

fn sealed_for(webhook: &Webhook) -> String {
    format!("project/{}/webhook/{}/answers", webhook.project, webhook.id)
}

fn what(webhook: &Webhook) -> String {
    format!("the key for answers of webhook `{}`", webhook.id)
}
