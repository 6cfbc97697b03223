//! Calls about webhooks.

use hyper::Method;

use crate::query::Target;
use crate::transport::Call;
use crate::types::{
    CreateWebhook, NewWebhook, Paged, RotateWebhookSecret, UpdateWebhook, Webhook, WebhookDelivery,
};
use crate::{Client, Error};

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Creates a webhook. Its secret is in the answer, and is not shown again.
    pub async fn create_webhook(&self, request: &CreateWebhook) -> Result<NewWebhook, Error> {
        self.transport.json(Call::post(Target::new(&["webhooks"])).json(request)?).await
    }

    /// Lists the webhooks of the project.
    pub async fn webhooks(&self) -> Result<Vec<Webhook>, Error> {
        let page: Paged<Webhook> =
            self.transport.json(Call::get(Target::new(&["webhooks"]))).await?;
        Ok(page.items)
    }

    /// Gets a webhook with its last deliveries.
    pub async fn webhook(&self, id: &str) -> Result<Webhook, Error> {
        self.transport.json(Call::get(Target::new(&["webhooks", id]))).await
    }

    /// Changes, disables or enables a webhook.
    pub async fn update_webhook(
        &self,
        id: &str,
        request: &UpdateWebhook,
    ) -> Result<Webhook, Error> {
        let target = Target::new(&["webhooks", id]);
        self.transport.json(Call::new(Method::PATCH, target).json(request)?).await
    }

    /// Gives a webhook another secret.
    pub async fn rotate_webhook_secret(
        &self,
        id: &str,
        request: &RotateWebhookSecret,
    ) -> Result<NewWebhook, Error> {
        let target = Target::new(&["webhooks", id, "rotate"]);
        self.transport.json(Call::post(target).json(request)?).await
    }

    /// Sends a test event, and returns the result.
    pub async fn test_webhook(&self, id: &str) -> Result<WebhookDelivery, Error> {
        self.transport.json(Call::post(Target::new(&["webhooks", id, "test"]))).await
    }

    /// Deletes a webhook.
    pub async fn delete_webhook(&self, id: &str) -> Result<(), Error> {
        let target = Target::new(&["webhooks", id]);
        self.transport.done(Call::new(Method::DELETE, target)).await
    }
}
