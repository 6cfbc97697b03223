//! The audit log: lists entries, follows new ones, and has chains verified.

use std::time::Duration;

use bytes::BytesMut;

use crate::body::Download;
use crate::paging::Pages;
use crate::query::Target;
use crate::transport::Call;
use crate::types::{AuditEntry, AuditVerification};
use crate::{Client, Error};

/// An entry is far smaller; what is larger is not the answer of a server of ours.
const LONGEST: usize = 1 << 20;
/// For how long a stream tries to get back to a server that is gone.
const RECONNECT_FOR: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Selects entries. All given conditions must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditQuery {
    /// Only those since then: a time, or how long ago, like `10m`.
    pub since: Option<String>,
    /// Only those before then.
    pub until: Option<String>,
    /// By this key (id or label), or by `system`, `agent` or `anonymous`.
    pub actor: Option<String>,
    /// Done to this target (`sandbox/my-app`), or to all of a kind (`sandbox`).
    pub target: Option<String>,
    /// This action (`sandbox.create`) or group of actions (`sandbox`).
    pub action: Option<String>,
    /// Of the host's log; needs an admin key.
    pub host: bool,
}

/// New entries of the audit log. The stream reconnects by itself and continues where it was.
#[derive(Debug)]
pub struct AuditFollow<'a> {
    client: &'a Client,
    query: AuditQuery,
    cursor: Option<String>,
    body: Option<Download>,
    buffer: BytesMut,
}

impl AuditQuery {
    fn target(&self) -> Target {
        Target::new(&["audit"])
            .maybe("since", self.since.as_deref())
            .maybe("until", self.until.as_deref())
            .maybe("actor", self.actor.as_deref())
            .maybe("target", self.target.as_deref())
            .maybe("action", self.action.as_deref())
            .flag("host", self.host)
    }
}

impl Client {
    /// Lists entries of the audit log, oldest first.
    #[must_use]
    pub fn audit(&self, query: AuditQuery) -> Pages<AuditEntry> {
        Pages::new(self, move || query.target())
    }

    /// Follows the audit log: what is recorded from now on, or since a time.
    ///
    /// # Errors
    ///
    /// Fails with what the server says ([`Error::Api`]) or with what the way there says.
    pub async fn follow_audit(&self, query: AuditQuery) -> Result<AuditFollow<'_>, Error> {
        let body = self.open_audit(&query, None).await?;
        let (cursor, buffer) = (None, BytesMut::new());
        Ok(AuditFollow { client: self, query, cursor, body: Some(body), buffer })
    }

    /// Has the project's log verified, or the host's. `expect` is an entry that was noted: `SEQ:HASH`.
    ///
    /// # Errors
    ///
    /// Fails with what the server says ([`Error::Api`]) or with what the way there says.
    pub async fn verify_audit(
        &self,
        host: bool,
        expect: Option<&str>,
    ) -> Result<AuditVerification, Error> {
        let target = Target::new(&["audit", "verify"]).flag("host", host).maybe("expect", expect);
        self.transport.json(Call::get(target)).await
    }

    async fn open_audit(
        &self,
        query: &AuditQuery,
        cursor: Option<&str>,
    ) -> Result<Download, Error> {
        let target = query.target().flag("follow", true).maybe("cursor", cursor);
        let call = Call::get(target).header("accept", Some("text/event-stream"));
        self.transport.send(call).await
    }
}

impl AuditFollow<'_> {
    /// The next entry.
    ///
    /// # Errors
    ///
    /// [`Error::Api`] or [`Error::Broken`] when the server cannot be reached for a minute.
    pub async fn next(&mut self) -> Result<AuditEntry, Error> {
        loop {
            if let Some(entry) = self.parse()? {
                return Ok(entry);
            }
            let piece = match &mut self.body {
                Some(body) => body.next().await,
                None => Ok(None),
            };
            match piece {
                Ok(Some(bytes)) => self.buffer.extend_from_slice(&bytes),
                Ok(None) | Err(_) => self.reconnect().await?,
            }
        }
    }

    async fn reconnect(&mut self) -> Result<(), Error> {
        self.body = None;
        self.buffer.clear();
        let until = tokio::time::Instant::now() + RECONNECT_FOR;
        let mut pause = FIRST_PAUSE;
        loop {
            tokio::time::sleep(pause).await;
            match self.client.open_audit(&self.query, self.cursor.as_deref()).await {
                Ok(body) => {
                    self.body = Some(body);
                    return Ok(());
                }
                Err(error) if !error.may_pass() || tokio::time::Instant::now() > until => {
                    return Err(error);
                }
                Err(_) => pause = (pause * 2).min(LONGEST_PAUSE),
            }
        }
    }

    /// Takes a whole message out of what has come.
    fn parse(&mut self) -> Result<Option<AuditEntry>, Error> {
        while let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
            let message = self.buffer.split_to(end + 2);
            for line in message[..].split(|byte| *byte == b'\n') {
                if let Some(id) = line.strip_prefix(b"id: ") {
                    self.cursor = Some(String::from_utf8_lossy(id).into_owned());
                }
                if let Some(data) = line.strip_prefix(b"data: ") {
                    let entry = serde_json::from_slice(data);
                    let entry = entry.map_err(|error| Error::broken("reading an entry", error))?;
                    return Ok(Some(entry));
                }
            }
        }
        if self.buffer.len() > LONGEST {
            let error = std::io::Error::other("an entry is too long");
            return Err(Error::broken("reading an entry", error));
        }
        Ok(None)
    }
}
