//! HTTP requests of domains that have rules or credentials.

mod authority;

use std::sync::Arc;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

use super::ledger::{Ledger, Open};
use super::outside::Outside;
use super::reserved::Place;
use super::rules::Rules;

pub use authority::{Authority, BadAuthority};

/// A connection whose requests are judged one by one.
#[derive(Debug)]
pub(super) struct Intercept {
    /// The name it told: in lower case, without a final dot.
    pub(super) name: String,
    /// Where it goes; refused places never come here.
    pub(super) to: Place,
    /// Whether that address was given out for that name. Credentials go over TLS, which proves the name by itself, or
    /// in the clear to places inside that were given out for it.
    pub(super) given: bool,
    /// Whether it is TLS.
    pub(super) tls: bool,
    /// The rules in force. When they change, requests that no longer fit are cut.
    pub(super) rules: watch::Receiver<Arc<Rules>>,
    pub(super) outside: Arc<Outside>,
    pub(super) authority: Arc<Authority>,
    /// Where each request is written down.
    pub(super) ledger: Arc<Ledger>,
    /// The connection itself: counts its bytes, says when it must end.
    pub(super) open: Arc<Open>,
}

/// Carries a connection to its end. `first` are the bytes that were already read off it.
pub(super) async fn serve<S>(guest: S, first: Bytes, intercept: Intercept)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    drop((guest, first, intercept));
}
