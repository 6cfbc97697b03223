//! A typed client of Sandkeep's `/v1` API.
//!
//! [`types`] are the data types of the API, which the server uses as well. [`Client`] sends them over TCP,
//! with or without TLS, or a Unix socket, keeps connections alive between calls, and can be cloned and shared freely.
//! Nothing here prints, reads the environment or looks for servers: the caller says where and with
//! which key.
//!
//! ```no_run
//! use sandkeep_client::types::{CreateSandbox, ExecRequest};
//! use sandkeep_client::{Client, Error, Output};
//!
//! # async fn example() -> Result<(), Error> {
//! let client = Client::new("http://127.0.0.1:7777".parse()?, Some("skp_…"))?;
//! let opened = client.create(&CreateSandbox::default(), None).await?;
//! let argv = vec!["echo".to_owned(), "hello".to_owned()];
//! let mut running = client
//!     .exec(&opened.sandbox.name, &ExecRequest { argv, ..ExecRequest::default() })
//!     .await?;
//! while let Some(output) = running.next().await? {
//!     if let Output::Stdout(bytes) = output {
//!         // …
//!     }
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod attach;
mod audit;
mod body;
mod commands;
mod drives;
mod error;
mod events;
mod files;
mod forks;
mod images;
mod network;
mod paging;
mod ports;
mod query;
mod runs;
mod sandboxes;
mod secrets;
mod services;
mod snapshots;
mod tenants;
mod tls;
mod transport;
mod trash;
mod webhooks;
mod wire;

use std::path::Path;
use std::sync::Arc;

pub use sandkeep_types as types;

pub use attach::{Attached, Input};
pub use audit::{AuditFollow, AuditQuery};
pub use body::{Download, Lines, Upload};
pub use commands::{LogQuery, Output, Running, Started, Terminated};
pub use error::Error;
pub use events::{EventQuery, Events};
pub use files::{Place, WriteOptions};
pub use forks::{DiffQuery, PatchFormat};
pub use images::{BuildOptions, Building, Fetching};
pub use network::ListConnections;
pub use paging::Pages;
pub use ports::PortStream;
pub use runs::{ApprovalQuery, RunQuery};
pub use sandboxes::ListSandboxes;
pub use transport::Endpoint;

use tls::Trust;
use transport::Transport;

/// A server, and the key to it.
#[derive(Debug, Clone)]
pub struct Client {
    transport: Arc<Transport>,
}

impl Client {
    /// A client of the server at `endpoint`. Nothing is sent until the first call.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] if `key` cannot be sent in a header.
    pub fn new(endpoint: Endpoint, key: Option<&str>) -> Result<Self, Error> {
        let trust = Trust::default();
        Ok(Self { transport: Arc::new(Transport::new(endpoint, key, trust)?) })
    }

    /// A client that trusts the CA certificates in a file (PEM), besides those of the system. Nothing is sent until the
    /// first call.
    ///
    /// # Errors
    ///
    /// [`Error::BadCa`] if the file cannot be read or holds no certificate, [`Error::Protocol`] if `key` cannot be sent in
    /// a header.
    pub fn trusting(endpoint: Endpoint, key: Option<&str>, ca: &Path) -> Result<Self, Error> {
        let trust = Trust::with_ca(ca)?;
        Ok(Self { transport: Arc::new(Transport::new(endpoint, key, trust)?) })
    }

    /// The same client, acting for another project. Only keys that may do everything can.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] if `project` cannot be sent in a header.
    pub fn for_project(&self, project: &str) -> Result<Self, Error> {
        Ok(Self { transport: Arc::new(self.transport.for_project(project)?) })
    }

    /// Where the server is.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        self.transport.endpoint()
    }

    /// Whether calls carry a key.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.transport.has_key()
    }
}
