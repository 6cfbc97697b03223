//! Effects that need an approval first: the first contact with a host, the use of a secret.
//!
//! This layer holds flows and requests and cannot answer questions. The engine passes a [`Gate`]
//! per session. It is asked after the rules: what these refuse is never asked for.

use std::fmt;

use async_trait::async_trait;

/// A contact that needs an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contact {
    /// The name in lower case, without a final dot, or the address.
    pub host: String,
    /// The port; 0 for echo requests.
    pub port: u16,
}

/// What is known of a host: it may be contacted, or why not.
pub type Answered = Result<(), String>;

/// Answers for one session.
#[async_trait]
pub trait Gate: Send + Sync + fmt::Debug {
    /// Whether contacts are held now. Asked for every flow: it must not block.
    fn holds_hosts(&self) -> bool;

    /// What is known of a host already. Must not block.
    fn known(&self, host: &str) -> Option<Answered>;

    /// Waits until somebody has answered for a host. A caller that stops waiting does not withdraw
    /// the question.
    async fn contact(&self, contact: &Contact) -> Answered;

    /// Asks about a host and waits for nothing. Must not block.
    fn ask(&self, contact: Contact);

    /// Whether the use of a secret is held.
    fn holds_secret(&self, secret: &str) -> bool;

    /// What is known of the use of a secret in requests to a host already. Must not block.
    fn known_secret(&self, secret: &str, host: &str) -> Option<Answered>;

    /// Waits until somebody has answered for the use of a secret in requests to a host.
    async fn secret(&self, secret: &str, host: &str) -> Answered;
}

/// Holds nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenGate;

#[async_trait]
impl Gate for OpenGate {
    fn holds_hosts(&self) -> bool {
        false
    }

    fn known(&self, _host: &str) -> Option<Answered> {
        Some(Ok(()))
    }

    async fn contact(&self, _contact: &Contact) -> Answered {
        Ok(())
    }

    fn ask(&self, _contact: Contact) {}

    fn holds_secret(&self, _secret: &str) -> bool {
        false
    }

    fn known_secret(&self, _secret: &str, _host: &str) -> Option<Answered> {
        Some(Ok(()))
    }

    async fn secret(&self, _secret: &str, _host: &str) -> Answered {
        Ok(())
    }
}
