//! Secrets of projects.

use crate::engine::error::error_chain;
use crate::engine::tenancy::secrets::{SetSecret, check};
use crate::engine::{Engine, Result};
use crate::model::{Name, Secret, SecretName};

impl Engine {
    /// Sets a secret: a new one, or another value of an existing one.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`](crate::engine::Error::Invalid) when the value is too short, too long or no text.
    pub async fn set_secret(
        &self,
        project: &Name,
        name: SecretName,
        set: SetSecret,
    ) -> Result<Secret> {
        self.parts.tenancy.require_project(project)?;
        check(&set)?;
        let secret = self.parts.secrets.set_secret(project, name, set).await?;
        self.secret_changed(&secret).await?;
        Ok(secret)
    }

    /// Lists the secrets of a project.
    #[must_use]
    pub fn secrets(&self, project: &Name) -> Vec<Secret> {
        let all = self.parts.secrets.of_project(project).into_iter();
        all.filter(|secret| secret.deleted_at.is_none()).collect()
    }

    /// Finds a secret.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSecret`](crate::engine::Error::NoSecret) when the project has none of that name.
    pub fn secret(&self, project: &Name, name: &SecretName) -> Result<Secret> {
        self.parts.secrets.secret(project, name)
    }

    /// Deletes a secret. Values that sessions under way were given are kept, sealed, until those end.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSecret`](crate::engine::Error::NoSecret) when the project has none of that name.
    pub async fn delete_secret(&self, project: &Name, name: &SecretName) -> Result<()> {
        let secret = self.parts.secrets.delete_secret(project, name).await?;
        self.secret_changed(&secret).await
    }

    /// Brings a secret that was set or deleted to the sandboxes that have it brokered.
    async fn secret_changed(&self, secret: &Secret) -> Result<()> {
        for live in self.parts.turns.all_live() {
            let sandbox = live.sandbox();
            let uses = sandbox.config.secrets.iter().any(|used| used.secret == secret.name);
            if sandbox.project != secret.project || !uses {
                continue;
            }
            // The other sandboxes must still be notified, and the network of this one.
            if let Err(error) = self.parts.secrets.give_brokered(&live).await {
                tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the secrets that a session uses were not recorded");
            }
        }
        // Headers of policies may name it too.
        self.parts.network.project_rules_changed(&secret.project).await;
        Ok(())
    }
}
