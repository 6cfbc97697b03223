//! Commands that wait until somebody has approved them: by pattern, or because they are given a secret.

use super::{Runs, place};
use crate::engine::Result;
use crate::engine::governance::approvals::ToAsk;
use crate::engine::session::command::Exec;
use crate::model::approval::{held_by, is_too_long};
use crate::model::{ApprovalSource, ApprovalSubject, Sandbox};

impl Runs {
    /// Holds a command that the policy of its sandbox, or the run under way in it, wants somebody to approve. The command of
    /// the run itself is held by the former alone: who started the run has named it.
    pub(in crate::engine) async fn before_command(
        &self,
        sandbox: &Sandbox,
        exec: &Exec,
        is_of_run: bool,
    ) -> Result<()> {
        let (argv, by) = (exec.argv.as_slice(), exec.by.as_deref());
        self.before_inject(sandbox, exec).await?;
        let run = self.active_in(&sandbox.id);
        let policy = sandbox.config.approvals.as_ref();
        let asked = policy.map_or(&[][..], |policy| &policy.commands);
        let patterns = run.as_ref().filter(|_| !is_of_run);
        let of_run = patterns.map_or(&[][..], |run| &run.spec.approve);
        let Some(pattern) = held_by(asked.iter().chain(of_run), argv) else { return Ok(()) };
        let line = one_line(argv);
        let to_ask = ToAsk {
            sandbox: place(sandbox),
            run: run.as_ref().map(|run| run.id.clone()),
            source: ApprovalSource::Policy,
            subject: ApprovalSubject::Command,
            target: None,
            question: format!("run `{line}`"),
            context: match is_too_long(argv) {
                true => "The command is too long to be compared with patterns.".to_owned(),
                false => format!("The command matches the pattern `{pattern}`."),
            },
            default: policy.and_then(|policy| policy.default),
            expires: policy.and_then(|policy| policy.expires),
            asked_by: by.and_then(|by| by.parse().ok()),
            agent_question: None,
        };
        self.approvals.hold(&sandbox.project, to_ask).await
    }

    /// Holds a command that is given secrets of which somebody has to approve that.
    async fn before_inject(&self, sandbox: &Sandbox, exec: &Exec) -> Result<()> {
        if exec.inject.is_empty() {
            return Ok(());
        }
        let held = self.held_secrets(sandbox);
        let wanted = exec.inject.iter().map(|inject| inject.secret.as_str());
        let mut wanted: Vec<&str> =
            wanted.filter(|name| held.iter().any(|it| it == name)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        if wanted.is_empty() {
            return Ok(());
        }
        let names = wanted.join(", ");
        let policy = sandbox.config.approvals.as_ref();
        let to_ask = ToAsk {
            sandbox: place(sandbox),
            run: self.active_in(&sandbox.id).map(|run| run.id),
            source: ApprovalSource::Policy,
            subject: ApprovalSubject::Secret,
            target: None,
            question: match names.len() {
                0..=600 => format!("give {names} to `{}`", one_line(&exec.argv)),
                _ => format!("give {} secrets to `{}`", wanted.len(), one_line(&exec.argv)),
            },
            context: format!("The command is given the values of: {names}."),
            default: policy.and_then(|policy| policy.default),
            expires: policy.and_then(|policy| policy.expires),
            asked_by: exec.by.as_deref().and_then(|by| by.parse().ok()),
            agent_question: None,
        };
        self.approvals.hold(&sandbox.project, to_ask).await
    }
}

/// The beginning of a command line, on one line.
fn one_line(argv: &[String]) -> String {
    let line = argv.join(" ").replace(char::is_control, " ");
    match line.char_indices().nth(200) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
