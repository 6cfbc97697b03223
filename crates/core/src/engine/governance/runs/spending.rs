//! Spending limits: what a run used, what it may use, and who has to approve more.
//!
//! An approval counts for one step: its target names the limit and how often that was raised before, and the run says how
//! often it was raised. So a daemon that dies between the answer and the raise finds the answer, and raises once.

use std::sync::Arc;

use super::drive::minus;
use super::{Runs, place};
use crate::engine::governance::approvals::ToAsk;
use crate::engine::{Error, Result};
use crate::model::{
    ApprovalAnswer, ApprovalSource, ApprovalSubject, Run, Sandbox, Size, Span, SpendingKind,
    SpendingLimit, Usage,
};

/// Whether a run may continue.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Spending {
    /// It is within its limits.
    Within,
    /// Somebody is asked.
    Waits,
    /// More was not approved.
    Refused(String),
}

/// Checks limits that were asked for.
pub(super) fn check(limits: &[SpendingLimit]) -> Result<()> {
    let mut kinds: Vec<SpendingKind> = limits.iter().map(|limit| limit.what).collect();
    kinds.sort_unstable();
    kinds.dedup();
    if kinds.len() < limits.len() {
        return Err(Error::invalid("spending", "one limit for each kind"));
    }
    let bad = |number: f64| !number.is_finite() || number <= 0.0;
    if limits.iter().any(|limit| bad(limit.limit) || limit.step.is_some_and(bad)) {
        return Err(Error::invalid("spending", "limits and steps are numbers over 0"));
    }
    Ok(())
}

impl Runs {
    /// Looks at what a run has used, asks where it is at a limit, and raises what was approved.
    pub(super) async fn spending(self: &Arc<Self>, run: &Run) -> Result<Spending> {
        if run.spec.spending.is_empty() {
            return Ok(Spending::Within);
        }
        let sandbox = self.sandbox_of(run).await?;
        let used = minus(self.used(&sandbox).await, run.usage_before);
        let mut waits = false;
        for limit in &run.spec.spending {
            let (spent, allowed) = (self.spent(run, limit.what, &used), run.allowed(limit));
            if spent < allowed {
                continue;
            }
            match self.more(run, &sandbox, limit, spent).await? {
                Spending::Within => {}
                Spending::Waits => waits = true,
                refused @ Spending::Refused(_) => return Ok(refused),
            }
        }
        Ok(if waits { Spending::Waits } else { Spending::Within })
    }

    fn spent(&self, run: &Run, what: SpendingKind, used: &Usage) -> f64 {
        match what {
            SpendingKind::Cpu => seconds(used.active_cpu_ms),
            SpendingKind::Network => number(used.network_in.saturating_add(used.network_out)),
            SpendingKind::Cost => run.cost.unwrap_or(0.0),
            SpendingKind::Time => {
                let at = self.now();
                let began = run.started_at.unwrap_or(at);
                let took = at.as_millisecond() - began.as_millisecond();
                seconds(u64::try_from(took).unwrap_or(0).saturating_sub(run.waited(at)))
            }
        }
    }

    /// What all sessions of a sandbox used until now.
    pub(super) async fn used(&self, sandbox: &Sandbox) -> Usage {
        let mut used = sandbox.totals;
        if let Some(live) = self.lifecycle.turns.live(&sandbox.id) {
            let mut session = live.session();
            if let Ok(usage) = live.driver.usage(&live.key).await {
                session.count_machine(usage);
            }
            used.add(session.usage);
        }
        used
    }

    /// Asks for more, or does what was answered.
    async fn more(
        self: &Arc<Self>,
        run: &Run,
        sandbox: &Sandbox,
        limit: &SpendingLimit,
        spent: f64,
    ) -> Result<Spending> {
        let raised = run.raised.get(&limit.what).copied().unwrap_or(0);
        let target = format!("{}/{raised}", word(limit.what));
        let subject = ApprovalSubject::Spending;
        let asked = self.approvals.last_about(&sandbox.id, subject, &target, &run.id);
        let Some(approval) = asked else {
            let step = limit.step.unwrap_or(limit.limit);
            let policy = sandbox.config.approvals.as_ref();
            let to_ask = ToAsk {
                sandbox: place(sandbox),
                run: Some(run.id.clone()),
                source: ApprovalSource::Policy,
                subject,
                target: Some(target),
                question: format!(
                    "go on beyond the limit of {}: {} of {} used, {} more",
                    words(limit.what),
                    shown(limit.what, spent),
                    shown(limit.what, run.allowed(limit)),
                    shown(limit.what, step)
                ),
                context: "The run reached a spending limit. A denial fails it; its state is kept."
                    .to_owned(),
                default: policy.and_then(|policy| policy.default),
                expires: policy.and_then(|policy| policy.expires),
                asked_by: None,
                agent_question: None,
            };
            self.approvals.ask(&run.project, to_ask).await?;
            return Ok(Spending::Waits);
        };
        if approval.is_pending() {
            return Ok(Spending::Waits);
        }
        if approval.answer() != Some(ApprovalAnswer::Approve) {
            let used = shown(limit.what, spent);
            let what = words(limit.what);
            return Ok(Spending::Refused(format!(
                "it reached its limit of {what} with {used}, and more was not approved"
            )));
        }
        self.change(&run.project, &run.id, |run, _| {
            if run.raised.get(&limit.what).copied().unwrap_or(0) == raised {
                run.raised.insert(limit.what, raised + 1);
            }
            Ok(())
        })
        .await?;
        Ok(Spending::Within)
    }
}

fn word(what: SpendingKind) -> &'static str {
    match what {
        SpendingKind::Cpu => "cpu",
        SpendingKind::Time => "time",
        SpendingKind::Network => "network",
        SpendingKind::Cost => "cost",
    }
}

fn words(what: SpendingKind) -> &'static str {
    match what {
        SpendingKind::Cpu => "CPU time",
        SpendingKind::Time => "time",
        SpendingKind::Network => "network traffic",
        SpendingKind::Cost => "cost",
    }
}

fn shown(what: SpendingKind, amount: f64) -> String {
    match what {
        SpendingKind::Cpu | SpendingKind::Time if amount < 1.0 => {
            Span(whole(amount * 1000.0)).to_string()
        }
        SpendingKind::Cpu | SpendingKind::Time => {
            Span(whole(amount).saturating_mul(1000)).to_string()
        }
        SpendingKind::Network => Size(whole(amount)).to_string(),
        SpendingKind::Cost => format!("{amount}"),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is shown to people"
)]
fn whole(amount: f64) -> u64 {
    amount as u64
}

#[expect(clippy::cast_precision_loss, reason = "a limit is a round number")]
fn number(count: u64) -> f64 {
    count as f64
}

fn seconds(millis: u64) -> f64 {
    number(millis) / 1000.0
}

#[cfg(test)]
mod tests {
    use super::{check, shown};
    use crate::model::{SpendingKind, SpendingLimit};

    #[test]
    fn limits_are_over_0_and_one_of_a_kind() {
        let limit = |what, limit, step| SpendingLimit { what, limit, step };
        let (cpu, cost) = (SpendingKind::Cpu, SpendingKind::Cost);
        assert!(check(&[limit(cpu, 1.0, None), limit(cost, 0.5, Some(0.1))]).is_ok());
        for bad in [
            vec![limit(cpu, 1.0, None), limit(cpu, 2.0, None)],
            vec![limit(cpu, 0.0, None)],
            vec![limit(cpu, f64::NAN, None)],
            vec![limit(cpu, 1.0, Some(-1.0))],
            vec![limit(cost, f64::INFINITY, None)],
        ] {
            assert!(check(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn amounts_are_shown_in_units() {
        assert_eq!(shown(SpendingKind::Cpu, 600.4), "10m");
        assert_eq!(shown(SpendingKind::Network, 1_048_576.0), "1.0 MiB");
        assert_eq!(shown(SpendingKind::Cost, 2.5), "2.5");
    }
}
