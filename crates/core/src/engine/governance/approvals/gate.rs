//! First contacts with hosts and uses of secrets that somebody has to approve: what the network layer asks, answered from what
//! is on record, or by a question.
//!
//! All that need the same answer wait for one approval. It outlives them: programs give up sooner than people answer, and
//! find the answer when they try again.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::decided::why;
use super::{AnswerScope, ToAsk};
use crate::engine::governance::runs::{Runs, place};
use crate::engine::network::session_network::MakesGates;
use crate::engine::running::live::RunningSandbox;
use crate::engine::{Error, Result};
use crate::keyed_lock::KeyedLock;
use crate::model::approval::is_known;
use crate::model::{
    Approval, ApprovalAnswer, ApprovalPolicy, ApprovalSource, ApprovalSubject, RunId, Sandbox,
    SandboxId,
};
use crate::net::{Answered, Contact, Gate};

/// How many questions about hosts and secrets may be pending in a sandbox: others need room, too.
const MOST_PENDING: usize = 16;
/// How many may be asked in a minute.
const MOST_IN_A_MINUTE: u32 = 30;
const MINUTE: Duration = Duration::from_secs(60);
/// How many questions of a session that nothing waits for are asked at a time: datagrams come faster than that.
const ASKED_AT_ONCE: usize = 16;

const GONE: &str = "the server is being shut down";

/// What all gates share.
#[derive(Debug, Default)]
pub(in crate::engine) struct Gates {
    /// Serialises questions of a sandbox, so that each is asked once.
    asking: KeyedLock<SandboxId>,
    /// Since when questions of a sandbox are counted, and how many there were.
    counted: Mutex<HashMap<SandboxId, (Instant, u32)>>,
}

impl Gates {
    fn count(&self, sandbox: &SandboxId, now: Instant) -> bool {
        let mut counted = self.counted.lock();
        counted.retain(|_, (since, _)| now.saturating_duration_since(*since) < MINUTE);
        let (_, count) = counted.entry(sandbox.clone()).or_insert((now, 0));
        *count += 1;
        *count <= MOST_IN_A_MINUTE
    }
}

/// What is held in a sandbox at this moment.
struct HoldRules {
    run: Option<RunId>,
    /// Whether the sandbox's own policy asks for hosts.
    own_hosts: bool,
    hosts: bool,
    known: Vec<String>,
    own_secrets: Vec<String>,
    secrets: Vec<String>,
}

/// The gate of a session.
struct SessionGate {
    runs: Weak<Runs>,
    live: Weak<RunningSandbox>,
    /// One for each question that is being asked and that nothing waits for.
    asking: Arc<Semaphore>,
}

impl std::fmt::Debug for SessionGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionGate").field("live", &self.live).finish_non_exhaustive()
    }
}

/// What somebody is asked about.
struct What {
    target: String,
    question: String,
    context: &'static str,
}

impl What {
    fn host(Contact { host, port }: &Contact) -> Self {
        let at = match port {
            0 => host.clone(),
            _ if host.contains(':') => format!("[{host}]:{port}"),
            _ => format!("{host}:{port}"),
        };
        Self {
            target: host.clone(),
            question: format!("connect to {at}"),
            context: "It is the first contact with this host.",
        }
    }

    fn secret(secret: &str, host: &str) -> Self {
        Self {
            target: format!("{secret} at {host}"),
            question: format!("use secret {secret} in requests to {host}"),
            context: "It is the first use of this secret at this host. The sandbox does not see its value.",
        }
    }
}

impl MakesGates for Runs {
    fn gate(self: Arc<Self>, live: &Arc<RunningSandbox>) -> Arc<dyn Gate> {
        let (runs, live) = (Arc::downgrade(&self), Arc::downgrade(live));
        Arc::new(SessionGate { runs, live, asking: Arc::new(Semaphore::new(ASKED_AT_ONCE)) })
    }
}

#[async_trait]
impl Gate for SessionGate {
    fn holds_hosts(&self) -> bool {
        // A connection is not let through when nobody can approve it any more.
        self.both().is_none_or(|(runs, live)| runs.holds_hosts(&live))
    }

    fn known(&self, host: &str) -> Option<Answered> {
        match self.both() {
            Some((runs, live)) => runs.known_host(&live, host),
            None => Some(Err(GONE.to_owned())),
        }
    }

    async fn contact(&self, contact: &Contact) -> Answered {
        let (runs, live) = self.both().ok_or(GONE)?;
        runs.wait(&live, ApprovalSubject::Host, What::host(contact)).await
    }

    fn ask(&self, contact: Contact) {
        // A host that is left out is asked for with its next datagram.
        let Ok(place) = Arc::clone(&self.asking).try_acquire_owned() else { return };
        if let Some((runs, live)) = self.both() {
            runs.ask_soon(&live, contact, place);
        }
    }

    fn holds_secret(&self, secret: &str) -> bool {
        self.both().is_none_or(|(runs, live)| runs.holds_secret(&live, secret))
    }

    fn known_secret(&self, secret: &str, host: &str) -> Option<Answered> {
        match self.both() {
            Some((runs, live)) => runs.known_secret(&live, secret, host),
            None => Some(Err(GONE.to_owned())),
        }
    }

    async fn secret(&self, secret: &str, host: &str) -> Answered {
        let (runs, live) = self.both().ok_or(GONE)?;
        runs.wait(&live, ApprovalSubject::Secret, What::secret(secret, host)).await
    }
}

impl SessionGate {
    fn both(&self) -> Option<(Arc<Runs>, Arc<RunningSandbox>)> {
        self.runs.upgrade().zip(self.live.upgrade())
    }
}

impl Runs {
    fn holds_hosts(&self, live: &RunningSandbox) -> bool {
        self.holds_in(&live.sandbox()).hosts
    }

    fn known_host(&self, live: &RunningSandbox, host: &str) -> Option<Answered> {
        let holds = self.holds_in(&live.sandbox());
        if !holds.hosts || is_known(&holds.known, host) {
            return Some(Ok(()));
        }
        self.decided(live, &holds, ApprovalSubject::Host, host)
    }

    fn holds_secret(&self, live: &RunningSandbox, secret: &str) -> bool {
        self.holds_in(&live.sandbox()).secrets.iter().any(|held| held == secret)
    }

    fn known_secret(&self, live: &RunningSandbox, secret: &str, host: &str) -> Option<Answered> {
        let holds = self.holds_in(&live.sandbox());
        let target = What::secret(secret, host).target;
        self.decided(live, &holds, ApprovalSubject::Secret, &target)
    }

    async fn wait(&self, live: &RunningSandbox, subject: ApprovalSubject, what: What) -> Answered {
        let project = live.sandbox().project.clone();
        let refused = |error: Error| error.to_string();
        let approval = match self.ask_once(live, subject, &what).await.map_err(refused)? {
            Ok(approval) => approval,
            Err(decided) => return decided,
        };
        let answered = self.approvals.answered(&project, &approval.id).await.map_err(refused)?;
        match answered.answer() {
            Some(ApprovalAnswer::Approve) => Ok(()),
            _ => Err(why(&answered)),
        }
    }

    fn ask_soon(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        contact: Contact,
        place: OwnedSemaphorePermit,
    ) {
        let (this, live) = (Arc::clone(self), Arc::clone(live));
        self.context.tasks.spawn_until_shutdown(async move {
            let _place = place;
            let what = What::host(&contact);
            if let Err(error) = this.ask_once(&live, ApprovalSubject::Host, &what).await {
                tracing::debug!(host = contact.host, %error, "nobody was asked about a host");
            }
        });
    }

    fn holds_in(&self, sandbox: &Sandbox) -> HoldRules {
        let none = ApprovalPolicy::default();
        let policy = sandbox.config.approvals.as_ref().unwrap_or(&none);
        let mut holds = HoldRules {
            run: None,
            own_hosts: policy.hosts,
            hosts: policy.hosts,
            known: policy.known_hosts.clone(),
            own_secrets: policy.secrets.clone(),
            secrets: policy.secrets.clone(),
        };
        self.with_active(&sandbox.id, |run| {
            holds.run = Some(run.id.clone());
            // What one of the two has to ask for, the other does not let through.
            if run.spec.approve_hosts {
                match policy.hosts {
                    true => holds.known.retain(|host| run.spec.known_hosts.contains(host)),
                    false => holds.known.clone_from(&run.spec.known_hosts),
                }
                holds.hosts = true;
            }
            holds.secrets.extend(run.spec.approve_secrets.iter().cloned());
        });
        holds
    }

    /// The secrets that commands of a sandbox are not given without an approval.
    pub(in crate::engine) fn held_secrets(&self, sandbox: &Sandbox) -> Vec<String> {
        self.holds_in(sandbox).secrets
    }

    fn decided(
        &self,
        live: &RunningSandbox,
        holds: &HoldRules,
        subject: ApprovalSubject,
        target: &str,
    ) -> Option<Answered> {
        let secret = target.split(' ').next().unwrap_or_default();
        let whole_sandbox = match subject {
            ApprovalSubject::Secret => holds.own_secrets.iter().any(|own| own == secret),
            _ => holds.own_hosts,
        };
        let since = live.session().started_at;
        let scope = AnswerScope { run: holds.run.clone(), whole_sandbox, since };
        self.approvals.decision(&live.sandbox().id, subject, target, &scope)
    }

    /// Asks, unless it is known, or somebody is asked already.
    async fn ask_once(
        &self,
        live: &RunningSandbox,
        subject: ApprovalSubject,
        what: &What,
    ) -> Result<std::result::Result<Approval, Answered>> {
        let sandbox = live.sandbox();
        let _one = self.gates.asking.lock(&sandbox.id).await;
        let holds = self.holds_in(&sandbox);
        if let Some(decided) = self.decided(live, &holds, subject, &what.target) {
            return Ok(Err(decided));
        }
        let run = holds.run.as_ref();
        let asked = self.approvals.pending_about(&sandbox.id, subject, &what.target, run);
        if let Some(approval) = asked {
            return Ok(Ok(approval));
        }
        let pending = self.approvals.pending_in(&sandbox.project, &sandbox.id);
        let pending = pending.iter().filter(|one| {
            one.target.is_some()
                && matches!(one.subject, ApprovalSubject::Host | ApprovalSubject::Secret)
        });
        let pending = pending.count();
        if pending >= MOST_PENDING || !self.gates.count(&sandbox.id, Instant::now()) {
            let of = format!("hosts and secrets of sandbox `{}`", sandbox.name);
            return Err(Error::TooManyApprovals { of, pending });
        }
        let policy = sandbox.config.approvals.as_ref();
        let to_ask = ToAsk {
            sandbox: place(&sandbox),
            run: holds.run,
            source: ApprovalSource::Policy,
            subject,
            target: Some(what.target.clone()),
            question: what.question.clone(),
            context: what.context.to_owned(),
            default: policy.and_then(|policy| policy.default),
            expires: policy.and_then(|policy| policy.expires),
            asked_by: None,
            agent_question: None,
        };
        self.approvals.ask(&sandbox.project, to_ask).await.map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{Gates, MINUTE, MOST_IN_A_MINUTE, What};
    use crate::model::SandboxId;
    use crate::net::Contact;

    #[test]
    fn a_sandbox_asks_so_often_in_a_minute() {
        let (gates, now) = (Gates::default(), Instant::now());
        let (one, other) = (SandboxId::fresh(), SandboxId::fresh());
        for _ in 0..MOST_IN_A_MINUTE {
            assert!(gates.count(&one, now));
        }
        assert!(!gates.count(&one, now));
        assert!(gates.count(&other, now));
        assert!(gates.count(&one, now + MINUTE));
        assert_eq!(gates.counted.lock().len(), 1, "who asks no more is forgotten");
    }

    #[test]
    fn questions_name_the_host_and_the_port() {
        let asked =
            |host: &str, port| What::host(&Contact { host: host.to_owned(), port }).question;
        assert_eq!(asked("a.test", 443), "connect to a.test:443");
        assert_eq!(asked("2001:db8::1", 22), "connect to [2001:db8::1]:22");
        assert_eq!(asked("192.0.2.1", 0), "connect to 192.0.2.1");
    }
}
