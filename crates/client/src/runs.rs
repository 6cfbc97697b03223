//! Calls about runs and approvals.

use hyper::Method;

use crate::paging::Pages;
use crate::query::Target;
use crate::sandboxes::sandbox;
use crate::transport::Call;
use crate::types::{
    AcceptRun, AnswerApproval, Approval, ApprovalStatus, AskApproval, CancelRun, FinishRun,
    ProjectRuns, RejectRun, Run, RunAccepted, RunHeartbeat, RunReview, RunStatus, StartRun,
};
use crate::{Client, Error};

/// Selects runs.
#[derive(Debug, Clone, Default)]
pub struct RunQuery {
    /// With one of these; any if there are none.
    pub statuses: Vec<RunStatus>,
    /// In the sandbox of this name.
    pub sandbox: Option<String>,
    /// Of this owner.
    pub owner: Option<String>,
    /// On this repository.
    pub repository: Option<String>,
}

/// Selects approvals.
#[derive(Debug, Clone, Default)]
pub struct ApprovalQuery {
    /// With this status.
    pub status: Option<ApprovalStatus>,
    /// About the sandbox of this name.
    pub sandbox: Option<String>,
    /// Of this run.
    pub run: Option<String>,
}

/// A word as the API writes it.
fn word(value: impl serde::Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Starts a run, or puts it into the queue.
    pub async fn start_run(&self, request: &StartRun) -> Result<Run, Error> {
        self.transport.json(Call::post(Target::new(&["runs"])).json(request)?).await
    }

    /// Lists runs, newest first.
    pub fn runs(&self, query: &RunQuery, per_page: Option<u32>) -> Pages<Run> {
        let query = query.clone();
        Pages::new(self, move || {
            let mut target = Target::new(&["runs"])
                .maybe("sandbox", query.sandbox.as_ref())
                .maybe("owner", query.owner.as_ref())
                .maybe("repository", query.repository.as_ref())
                .maybe("limit", per_page.map(|limit| limit.to_string()));
            for status in &query.statuses {
                target = target.with("status", word(status));
            }
            target
        })
    }

    /// Shows a run; with `wait`, once it waits for somebody or is over, or after that many seconds.
    pub async fn run(&self, id: &str, wait: Option<u64>) -> Result<Run, Error> {
        let wait = wait.map(|seconds| seconds.to_string());
        self.transport.json(Call::get(Target::new(&["runs", id]).maybe("wait", wait))).await
    }

    /// Ends a run that is queued or under way.
    pub async fn cancel_run(&self, id: &str, request: &CancelRun) -> Result<Run, Error> {
        let call = Call::post(Target::new(&["runs", id, "cancel"]));
        self.transport.json(call.json(request)?).await
    }

    /// Reports that the harness of a run is alive.
    pub async fn run_heartbeat(&self, id: &str, request: &RunHeartbeat) -> Result<Run, Error> {
        let call = Call::post(Target::new(&["runs", id, "heartbeat"]));
        self.transport.json(call.json(request)?).await
    }

    /// Reports that the work of a harness is done, or why it failed.
    pub async fn finish_run(&self, id: &str, request: &FinishRun) -> Result<Run, Error> {
        let call = Call::post(Target::new(&["runs", id, "finish"]));
        self.transport.json(call.json(request)?).await
    }

    /// Returns what there is to know about the result of a run.
    pub async fn review_run(&self, id: &str) -> Result<RunReview, Error> {
        self.transport.json(Call::get(Target::new(&["runs", id, "review"]))).await
    }

    /// The same, of the state that the run's sandbox has now.
    pub async fn pin_run_again(&self, id: &str) -> Result<RunReview, Error> {
        self.transport.json(Call::post(Target::new(&["runs", id, "review"]))).await
    }

    /// Accepts the result of a run.
    pub async fn accept_run(&self, id: &str, request: &AcceptRun) -> Result<RunAccepted, Error> {
        let call = Call::post(Target::new(&["runs", id, "accept"]));
        self.transport.json(call.json(request)?).await
    }

    /// Rejects the result of a run.
    pub async fn reject_run(&self, id: &str, request: &RejectRun) -> Result<Run, Error> {
        let call = Call::post(Target::new(&["runs", id, "reject"]));
        self.transport.json(call.json(request)?).await
    }

    /// Asks for an approval about a sandbox.
    pub async fn ask_approval(&self, name: &str, request: &AskApproval) -> Result<Approval, Error> {
        let call = Call::post(sandbox(name, &["approvals"]));
        self.transport.json(call.json(request)?).await
    }

    /// Lists approvals, newest first.
    pub fn approvals(&self, query: &ApprovalQuery, per_page: Option<u32>) -> Pages<Approval> {
        let query = query.clone();
        Pages::new(self, move || {
            Target::new(&["approvals"])
                .maybe("status", query.status.map(word))
                .maybe("sandbox", query.sandbox.as_ref())
                .maybe("run", query.run.as_ref())
                .maybe("limit", per_page.map(|limit| limit.to_string()))
        })
    }

    /// Shows an approval; with `wait`, once it is answered, or after that many seconds.
    pub async fn approval(&self, id: &str, wait: Option<u64>) -> Result<Approval, Error> {
        let wait = wait.map(|seconds| seconds.to_string());
        self.transport.json(Call::get(Target::new(&["approvals", id]).maybe("wait", wait))).await
    }

    /// Answers an approval.
    pub async fn answer_approval(
        &self,
        id: &str,
        request: &AnswerApproval,
    ) -> Result<Approval, Error> {
        let call = Call::post(Target::new(&["approvals", id, "answer"]));
        self.transport.json(call.json(request)?).await
    }

    /// What a project allows its runs.
    pub async fn project_runs(&self, project: &str) -> Result<ProjectRuns, Error> {
        self.transport.json(Call::get(Target::new(&["projects", project, "governance"]))).await
    }

    /// Sets what a project allows its runs.
    pub async fn set_project_runs(
        &self,
        project: &str,
        runs: &ProjectRuns,
    ) -> Result<ProjectRuns, Error> {
        let target = Target::new(&["projects", project, "governance"]);
        self.transport.json(Call::new(Method::PUT, target).json(runs)?).await
    }
}
