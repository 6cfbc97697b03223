//! Calls about secrets: set, list, get, delete. Values are sent and never come back.

use hyper::Method;

use crate::query::Target;
use crate::transport::Call;
use crate::types::{Secret, SetSecret};
use crate::{Client, Error};

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Sets a secret: a new one, or another value of an existing one.
    pub async fn set_secret(&self, name: &str, request: &SetSecret) -> Result<Secret, Error> {
        let target = Target::new(&["secrets", name]);
        self.transport.json(Call::new(Method::PUT, target).json(request)?).await
    }

    /// Lists the secrets of the project.
    pub async fn secrets(&self) -> Result<Vec<Secret>, Error> {
        self.transport.json(Call::get(Target::new(&["secrets"]))).await
    }

    /// Gets a secret.
    pub async fn secret(&self, name: &str) -> Result<Secret, Error> {
        self.transport.json(Call::get(Target::new(&["secrets", name]))).await
    }

    /// Deletes a secret.
    pub async fn delete_secret(&self, name: &str) -> Result<Secret, Error> {
        let target = Target::new(&["secrets", name]);
        self.transport.json(Call::new(Method::DELETE, target)).await
    }
}
