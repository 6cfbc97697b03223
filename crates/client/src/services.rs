//! Calls about services of a sandbox: list, set, remove, start, stop.

use crate::sandboxes::sandbox;
use crate::transport::Call;
use crate::types::{Paged, ServiceStatus, SetService};
use crate::{Client, Error};

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Lists a sandbox's services and how they stand.
    pub async fn services(&self, name: &str) -> Result<Vec<ServiceStatus>, Error> {
        let call = Call::get(sandbox(name, &["services"]));
        let page: Paged<ServiceStatus> = self.transport.json(call).await?;
        Ok(page.items)
    }

    /// Declares a service, or declares it otherwise.
    pub async fn set_service(
        &self,
        name: &str,
        service: &str,
        request: &SetService,
    ) -> Result<ServiceStatus, Error> {
        let call = Call::new(hyper::Method::PUT, sandbox(name, &["services", service]));
        self.transport.json(call.json(request)?).await
    }

    /// Ends a service and takes it away.
    pub async fn remove_service(&self, name: &str, service: &str) -> Result<(), Error> {
        let call = Call::new(hyper::Method::DELETE, sandbox(name, &["services", service]));
        self.transport.done(call).await
    }

    /// Starts a service, waking its sandbox if it sleeps.
    pub async fn start_service(&self, name: &str, service: &str) -> Result<ServiceStatus, Error> {
        let call = Call::post(sandbox(name, &["services", service, "start"]));
        self.transport.json(call).await
    }

    /// Stops a service, for this session.
    pub async fn stop_service(&self, name: &str, service: &str) -> Result<ServiceStatus, Error> {
        let call = Call::post(sandbox(name, &["services", service, "stop"]));
        self.transport.json(call).await
    }
}
