//! The connection log of one session: decides what is written to the journal about a flow, and how often.
//!
//! A flow that is let through has an [`OpenFlow`] while it lasts. The task that carries the flow counts bytes on it and stops when
//! it is cut. When the last reference is dropped, the flow is written to the journal. Refused flows are written at once. Both are
//! rate-limited, so that a sandbox cannot fill the journal: `requests` limits lines about HTTP requests, `refusals` those about refused
//! flows. The journal itself belongs to the engine, which implements [`Journal`].

mod refusals;
mod requests;
mod timer;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

pub(super) use self::refusals::Refusals;
use self::requests::{RequestLimiter, WINDOW};
use self::timer::Timer;
use crate::model::{Connection, Protocol, SessionId, Timestamp, Verdict, now};

/// Where connections are recorded. Must not block: it is called from the tasks that handle packets.
pub trait Journal: Send + Sync + std::fmt::Debug {
    /// Records a connection that has ended or was refused.
    fn write(&self, connection: Connection);

    /// The value of a secret went out in the place of its placeholder, in the head of a request to a host.
    fn secret_used(&self, _secret: &str, _host: &str) {}
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
pub(super) struct ConnectionLog {
    session: SessionId,
    journal: Arc<dyn Journal>,
    next: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
    open: Mutex<HashMap<u64, Weak<OpenFlow>>>,
    /// Limits lines about HTTP requests.
    requests: RequestLimiter,
    /// Writes what was only counted, when the time for that has come.
    request_timer: Timer,
}

/// What is known about a flow when it begins.
#[derive(Debug, Clone)]
pub(super) struct FlowInfo {
    pub(super) protocol: Protocol,
    pub(super) to: Option<SocketAddr>,
    pub(super) name: Option<String>,
    pub(super) rule: String,
}

impl ConnectionLog {
    /// A log that continues the counters of an earlier daemon.
    pub(super) fn new(session: SessionId, journal: Arc<dyn Journal>, before: Traffic) -> Arc<Self> {
        Arc::new(Self {
            session,
            journal,
            // Ids must not repeat those that an earlier daemon gave out in this session.
            next: AtomicU64::new(u64::try_from(now().as_microsecond()).unwrap_or(0)),
            received: AtomicU64::new(before.received),
            sent: AtomicU64::new(before.sent),
            open: Mutex::default(),
            requests: RequestLimiter::default(),
            request_timer: Timer::default(),
        })
    }

    /// A flow is let through.
    pub(super) fn begin(self: &Arc<Self>, info: FlowInfo) -> Arc<OpenFlow> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let open = Arc::new(OpenFlow {
            id,
            at: now(),
            log: Arc::clone(self),
            state: Mutex::new(FlowState { info, verdict: Verdict::Allowed, detail: None }),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            cut: CancellationToken::new(),
        });
        self.opens().insert(id, Arc::downgrade(&open));
        open
    }

    /// A flow is refused.
    pub(super) fn refused(self: &Arc<Self>, info: FlowInfo, detail: Option<String>) {
        let at = now();
        self.write(Connection {
            session: self.session.clone(),
            id: self.next.fetch_add(1, Ordering::Relaxed),
            at,
            ended_at: Some(at),
            protocol: info.protocol,
            to: info.to,
            name: info.name,
            verdict: Verdict::Denied,
            rule: info.rule,
            bytes_in: 0,
            bytes_out: 0,
            detail,
        });
    }

    /// Bytes in both directions, open flows included.
    pub(super) fn traffic(&self) -> Traffic {
        Traffic {
            received: self.received.load(Ordering::Relaxed),
            sent: self.sent.load(Ordering::Relaxed),
        }
    }

    /// Adds bytes that were not carried by the sandbox's own connections.
    pub(super) fn count(&self, traffic: Traffic) {
        self.received.fetch_add(traffic.received, Ordering::Relaxed);
        self.sent.fetch_add(traffic.sent, Ordering::Relaxed);
    }

    /// The open flows.
    pub(super) fn open(&self) -> Vec<Arc<OpenFlow>> {
        self.opens().values().filter_map(Weak::upgrade).collect()
    }

    /// Writes lines for everything that was only counted so far.
    pub(super) fn flush(&self) {
        self.requests.expire(Duration::ZERO).into_iter().for_each(|line| self.journal.write(line));
    }

    fn write(self: &Arc<Self>, line: Connection) {
        if line.protocol != Protocol::Http {
            return self.journal.write(line);
        }
        let (lines, more) = self.requests.add(line);
        lines.into_iter().for_each(|line| self.journal.write(line));
        if more {
            let this = Arc::downgrade(self);
            self.request_timer.set(WINDOW, move || {
                if let Some(this) = this.upgrade() {
                    let over = this.requests.expire(WINDOW);
                    over.into_iter().for_each(|line| this.journal.write(line));
                }
            });
        }
    }

    fn opens(&self) -> MutexGuard<'_, HashMap<u64, Weak<OpenFlow>>> {
        self.open.lock()
    }
}

impl Drop for ConnectionLog {
    fn drop(&mut self) {
        self.flush();
    }
}

#[derive(Debug)]
struct FlowState {
    info: FlowInfo,
    verdict: Verdict,
    detail: Option<String>,
}

/// A flow that was let through and has not ended.
#[derive(Debug)]
pub(super) struct OpenFlow {
    id: u64,
    at: Timestamp,
    log: Arc<ConnectionLog>,
    state: Mutex<FlowState>,
    received: AtomicU64,
    sent: AtomicU64,
    cut: CancellationToken,
}

impl OpenFlow {
    /// Counts bytes received from outside.
    pub(super) fn received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
        self.log.received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes sent outside.
    pub(super) fn sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.log.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Updates the name, now that the flow has sent it, and the rule that allows the flow.
    pub(super) fn learn(&self, name: Option<String>, rule: String) {
        let mut state = self.state();
        state.info.name = name;
        state.info.rule = rule;
    }

    /// Records that the value of a secret went out.
    pub(super) fn secret_used(&self, secret: &str, host: &str) {
        self.log.journal.secret_used(secret, host);
    }

    /// Sets the detail of its line.
    pub(super) fn note(&self, detail: impl Into<String>) {
        self.state().detail = Some(detail.into());
    }

    /// The connection outside failed. A flow that was cut stays cut: the cut is why it failed.
    pub(super) fn failed(&self, reason: impl Into<String>) {
        let mut state = self.state();
        if state.verdict == Verdict::Cut {
            return;
        }
        state.verdict = Verdict::Failed;
        state.detail = Some(reason.into());
    }

    /// A rule refused it after it was let through.
    pub(super) fn denied(&self, rule: impl Into<String>, detail: impl Into<String>) {
        let mut state = self.state();
        if state.verdict == Verdict::Cut {
            return;
        }
        state.verdict = Verdict::Denied;
        state.info.rule = rule.into();
        state.detail = Some(detail.into());
    }

    /// The rules in force no longer allow it: the task that carries it must end it.
    pub(super) fn cut(&self, rule: String) {
        {
            let mut state = self.state();
            state.verdict = Verdict::Cut;
            state.info.rule = rule;
        }
        self.cut.cancel();
    }

    /// Resolves when it is cut.
    pub(super) async fn is_cut(&self) {
        self.cut.cancelled().await;
    }

    /// Its line as of now.
    pub(super) fn record(&self) -> Connection {
        let state = self.state();
        Connection {
            session: self.log.session.clone(),
            id: self.id,
            at: self.at,
            ended_at: None,
            protocol: state.info.protocol,
            to: state.info.to,
            name: state.info.name.clone(),
            verdict: state.verdict,
            rule: state.info.rule.clone(),
            bytes_in: self.received.load(Ordering::Relaxed),
            bytes_out: self.sent.load(Ordering::Relaxed),
            detail: state.detail.clone(),
        }
    }

    fn state(&self) -> MutexGuard<'_, FlowState> {
        self.state.lock()
    }
}

impl Drop for OpenFlow {
    fn drop(&mut self) {
        self.log.opens().remove(&self.id);
        self.log.write(Connection { ended_at: Some(now()), ..self.record() });
    }
}

#[cfg(test)]
mod tests {
    use super::FlowInfo;
    use crate::model::{Protocol, Verdict};
    use crate::net::testing;

    #[test]
    fn what_was_cut_did_not_fail() {
        let (log, _notes) = testing::connection_log();
        let info = FlowInfo {
            protocol: Protocol::Tcp,
            to: None,
            name: None,
            rule: "allow-all".to_owned(),
        };
        let open = log.begin(info);
        open.cut("deny-all".to_owned());
        open.failed("connection aborted");
        open.denied("another", "detail");
        let record = open.record();
        assert_eq!((record.verdict, record.rule.as_str()), (Verdict::Cut, "deny-all"));
    }
}
