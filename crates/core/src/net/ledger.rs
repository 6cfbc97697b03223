//! What went over a sandbox's network, and how much.
//!
//! Whatever is let through has an [`Open`] while it lasts: whoever carries it counts on it, and stops when it is
//! cut. When the last holder lets go of it, it goes into the journal. What was refused goes there at once.
//! The journal itself is the engine's; here is only the word for it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;

use super::fold::{Fold, WINDOW};
use crate::model::{Connection, Protocol, SessionId, Timestamp, Verdict, now};

/// Where connections are written down. Must not block: called where packets are handled.
pub trait Journal: Send + Sync + std::fmt::Debug {
    /// One that has ended, or was refused.
    fn write(&self, connection: Connection);
}

/// How much a sandbox received and sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes received from outside.
    pub received: u64,
    /// Bytes sent outside.
    pub sent: u64,
}

/// The connections of one session.
#[derive(Debug)]
pub(super) struct Ledger {
    session: SessionId,
    journal: Arc<dyn Journal>,
    next: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
    open: Mutex<HashMap<u64, Weak<Open>>>,
    /// Requests, which a sandbox can make any number of.
    requests: Fold,
}

/// What is known of a flow when it begins.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) protocol: Protocol,
    pub(super) to: Option<SocketAddr>,
    pub(super) name: Option<String>,
    pub(super) rule: String,
}

impl Ledger {
    /// A ledger that goes on from what an earlier daemon counted.
    pub(super) fn new(session: SessionId, journal: Arc<dyn Journal>, before: Traffic) -> Arc<Self> {
        Arc::new(Self {
            session,
            journal,
            // A later daemon's numbers must not meet an earlier one's.
            next: AtomicU64::new(u64::try_from(now().as_microsecond()).unwrap_or(0)),
            received: AtomicU64::new(before.received),
            sent: AtomicU64::new(before.sent),
            open: Mutex::default(),
            requests: Fold::default(),
        })
    }

    /// Something is let through.
    pub(super) fn begin(self: &Arc<Self>, facts: Facts) -> Arc<Open> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let open = Arc::new(Open {
            id,
            at: now(),
            ledger: Arc::clone(self),
            told: Mutex::new(Told { facts, verdict: Verdict::Allowed, detail: None }),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            cut: watch::channel(false).0,
        });
        self.opens().insert(id, Arc::downgrade(&open));
        open
    }

    /// Something is refused.
    pub(super) fn refused(self: &Arc<Self>, facts: Facts, detail: Option<String>) {
        let at = now();
        self.write(Connection {
            session: self.session.clone(),
            id: self.next.fetch_add(1, Ordering::Relaxed),
            at,
            ended_at: Some(at),
            protocol: facts.protocol,
            to: facts.to,
            name: facts.name,
            verdict: Verdict::Denied,
            rule: facts.rule,
            bytes_in: 0,
            bytes_out: 0,
            detail,
        });
    }

    /// How much went each way, what is still open included.
    pub(super) fn traffic(&self) -> Traffic {
        Traffic {
            received: self.received.load(Ordering::Relaxed),
            sent: self.sent.load(Ordering::Relaxed),
        }
    }

    /// Adds what was carried by another way than the sandbox's own connections.
    pub(super) fn count(&self, traffic: Traffic) {
        self.received.fetch_add(traffic.received, Ordering::Relaxed);
        self.sent.fetch_add(traffic.sent, Ordering::Relaxed);
    }

    /// What is open.
    pub(super) fn open(&self) -> Vec<Arc<Open>> {
        self.opens().values().filter_map(Weak::upgrade).collect()
    }

    /// Tells what was counted and not told yet.
    pub(super) fn flush(&self) {
        self.requests.over(Duration::ZERO).into_iter().for_each(|line| self.journal.write(line));
    }

    fn write(self: &Arc<Self>, line: Connection) {
        if line.protocol != Protocol::Http {
            return self.journal.write(line);
        }
        let (lines, more) = self.requests.add(line);
        lines.into_iter().for_each(|line| self.journal.write(line));
        if more && let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let this = Arc::downgrade(self);
            runtime.spawn(async move {
                tokio::time::sleep(WINDOW).await;
                if let Some(this) = this.upgrade() {
                    let over = this.requests.over(WINDOW);
                    over.into_iter().for_each(|line| this.journal.write(line));
                }
            });
        }
    }

    fn opens(&self) -> MutexGuard<'_, HashMap<u64, Weak<Open>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.flush();
    }
}

#[derive(Debug)]
struct Told {
    facts: Facts,
    verdict: Verdict,
    detail: Option<String>,
}

/// Something that was let through and has not ended.
#[derive(Debug)]
pub(super) struct Open {
    id: u64,
    at: Timestamp,
    ledger: Arc<Ledger>,
    told: Mutex<Told>,
    received: AtomicU64,
    sent: AtomicU64,
    cut: watch::Sender<bool>,
}

impl Open {
    /// So many bytes came from outside.
    pub(super) fn received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
        self.ledger.received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many bytes went outside.
    pub(super) fn sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.ledger.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// More is known of it now: the name it told, and the rule that follows.
    pub(super) fn learn(&self, name: Option<String>, rule: String) {
        let mut told = self.told();
        told.facts.name = name;
        told.facts.rule = rule;
    }

    /// Adds what else is worth telling.
    pub(super) fn note(&self, detail: impl Into<String>) {
        self.told().detail = Some(detail.into());
    }

    /// Nobody answered outside. What was cut stays that: the cut is why it failed.
    pub(super) fn failed(&self, reason: impl Into<String>) {
        let mut told = self.told();
        if told.verdict == Verdict::Cut {
            return;
        }
        told.verdict = Verdict::Failed;
        told.detail = Some(reason.into());
    }

    /// A rule was against it after all.
    pub(super) fn denied(&self, rule: impl Into<String>, detail: impl Into<String>) {
        let mut told = self.told();
        if told.verdict == Verdict::Cut {
            return;
        }
        told.verdict = Verdict::Denied;
        told.facts.rule = rule.into();
        told.detail = Some(detail.into());
    }

    /// It no longer fits, by this rule: whoever carries it must end it.
    pub(super) fn cut(&self, rule: String) {
        {
            let mut told = self.told();
            told.verdict = Verdict::Cut;
            told.facts.rule = rule;
        }
        self.cut.send_replace(true);
    }

    /// Resolves when it is cut.
    pub(super) async fn is_cut(&self) {
        // The sender is this value's own: it cannot go away while it is asked.
        let _ = self.cut.subscribe().wait_for(|cut| *cut).await;
    }

    /// How it would be written down now.
    pub(super) fn record(&self) -> Connection {
        let told = self.told();
        Connection {
            session: self.ledger.session.clone(),
            id: self.id,
            at: self.at,
            ended_at: None,
            protocol: told.facts.protocol,
            to: told.facts.to,
            name: told.facts.name.clone(),
            verdict: told.verdict,
            rule: told.facts.rule.clone(),
            bytes_in: self.received.load(Ordering::Relaxed),
            bytes_out: self.sent.load(Ordering::Relaxed),
            detail: told.detail.clone(),
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.ledger.opens().remove(&self.id);
        self.ledger.write(Connection { ended_at: Some(now()), ..self.record() });
    }
}

#[cfg(test)]
mod tests {
    use super::Facts;
    use crate::model::{Protocol, Verdict};
    use crate::net::testing;

    #[test]
    fn what_was_cut_did_not_fail() {
        let (ledger, _notes) = testing::ledger();
        let facts =
            Facts { protocol: Protocol::Tcp, to: None, name: None, rule: "allow-all".to_owned() };
        let open = ledger.begin(facts);
        open.cut("deny-all".to_owned());
        open.failed("connection aborted");
        open.denied("another", "detail");
        let record = open.record();
        assert_eq!((record.verdict, record.rule.as_str()), (Verdict::Cut, "deny-all"));
    }
}
