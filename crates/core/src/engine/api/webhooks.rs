//! Webhooks of projects.

use zeroize::Zeroizing;

use crate::engine::webhooks::{CreateWebhook, UpdateWebhook, WebhookStatus};
use crate::engine::{Engine, Result};
use crate::model::{Name, WebhookDelivery, WebhookId};

impl Engine {
    /// Makes a webhook. The second answer is its secret, which is not shown again.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`](crate::engine::Error::Invalid) when the address, the events or the secret is none.
    pub async fn create_webhook(
        &self,
        project: &Name,
        create: CreateWebhook,
    ) -> Result<(WebhookStatus, Zeroizing<String>)> {
        self.parts.tenancy.require_project(project)?;
        self.parts.webhooks.create(project, create).await
    }

    /// Lists the webhooks of a project, oldest first.
    #[must_use]
    pub fn webhooks(&self, project: &Name) -> Vec<WebhookStatus> {
        self.parts.webhooks.list(project)
    }

    /// Finds a webhook.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoWebhook`](crate::engine::Error::NoWebhook) when the project has none of that id.
    pub fn webhook(&self, project: &Name, id: &WebhookId) -> Result<WebhookStatus> {
        self.parts.webhooks.get(project, id)
    }

    /// Changes, disables or enables a webhook.
    ///
    /// # Errors
    ///
    /// As [`create_webhook`](Self::create_webhook) and [`webhook`](Self::webhook).
    pub async fn update_webhook(
        &self,
        project: &Name,
        id: &WebhookId,
        change: UpdateWebhook,
    ) -> Result<WebhookStatus> {
        self.parts.webhooks.update(project, id, change).await
    }

    /// Gives a webhook another secret, which is the second value. Deliveries are signed with the
    /// one before, too, unless it is to be the `only` one.
    ///
    /// # Errors
    ///
    /// As [`create_webhook`](Self::create_webhook) and [`webhook`](Self::webhook).
    pub async fn rotate_webhook(
        &self,
        project: &Name,
        id: &WebhookId,
        secret: Option<String>,
        only: bool,
    ) -> Result<(WebhookStatus, Zeroizing<String>)> {
        self.parts.webhooks.rotate(project, id, secret, only).await
    }

    /// Sends a test event once, marked as one, and returns the result.
    ///
    /// # Errors
    ///
    /// As [`webhook`](Self::webhook).
    pub async fn test_webhook(&self, project: &Name, id: &WebhookId) -> Result<WebhookDelivery> {
        self.parts.webhooks.test(project, id).await
    }

    /// Deletes a webhook.
    ///
    /// # Errors
    ///
    /// As [`webhook`](Self::webhook).
    pub async fn delete_webhook(&self, project: &Name, id: &WebhookId) -> Result<()> {
        self.parts.webhooks.remove(project, id).await
    }
}
