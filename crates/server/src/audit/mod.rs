//! The one place that sees the requests of all fronts, and records them in the audit log.
//!
//! ```text
//! request ──> record ──> routes, extractors, handlers ──> answer
//!               │              │
//!               │              └─ caller, project, target, detail: added as they become known
//!               └─ action of the route (`routes`), outcome of the answer ──> Engine::record
//! ```
//!
//! [`record`] is a layer around the whole router, the gateway for ports included. What is being recorded is a value of
//! the task that answers the request, so that any code adds what it finds out with a function and
//! need not be passed anything: [`caller`], [`project`], [`target`], [`detail`]. A task that
//! continues after the answer (a WebSocket) takes it along with [`later`].
//!
//! No secret, no content and no argument is added: names, ids, numbers and paths only.

mod routes;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use parking_lot::Mutex;
use sandkeep_core::engine::{AnswerLink, Caller};
use sandkeep_core::model::{
    AuditActor, AuditFront, AuditOutcome, AuditRecord, KeyId, Name, Sandbox, WebhookId, now,
};

use crate::api::App;
use crate::listen::Peer;
pub(crate) use routes::is_vercel;
use routes::{AuditRule, Recorded, rule_of};

tokio::task_local! {
    /// What is known of the request that this task answers.
    static CURRENT: Arc<Mutex<KnownRequest>>;
}

/// The code of an error, in the extensions of the answer that has it.
#[derive(Debug, Clone)]
pub(crate) struct AnsweredCode(pub(crate) Arc<str>);

/// What is known of a request.
#[derive(Debug, Clone)]
struct KnownRequest {
    front: AuditFront,
    address: Option<String>,
    key: Option<KeyId>,
    /// The webhook whose link it came with.
    webhook: Option<WebhookId>,
    project: Option<Name>,
    action: Option<&'static str>,
    target: Option<String>,
    detail: BTreeMap<String, String>,
    /// What it is instead, for what is recorded only occasionally.
    once: Option<String>,
}

/// A caller was authenticated.
pub(crate) fn caller(caller: &Caller) {
    with(|known| {
        known.key = Some(caller.key.clone());
        known.project = Some(caller.project.clone());
    });
}

/// A caller came with a link that a webhook got.
pub(crate) fn webhook(link: &AnswerLink) {
    with(|known| {
        known.webhook = Some(link.webhook.clone());
        known.project = Some(link.project.clone());
        known.detail.insert("webhook".to_owned(), link.webhook.to_string());
        known.detail.insert("allowed_by".to_owned(), link.allowed_by.to_string());
    });
}

/// The caller acts for this project.
pub(crate) fn project(project: &Name) {
    with(|known| known.project = Some(project.clone()));
}

/// It is done to this: `sandbox/my-app`.
pub(crate) fn target(kind: &str, name: impl std::fmt::Display) {
    with(|known| known.target = Some(format!("{kind}/{name}")));
}

/// It is this that is done, whatever the route says.
pub(crate) fn action(action: &'static str) {
    with(|known| known.action = Some(action));
}

/// A further fact.
pub(crate) fn detail(name: &str, value: impl std::fmt::Display) {
    with(|known| drop(known.detail.insert(name.to_owned(), value.to_string())));
}

/// The program of a command. Its arguments may hold anything, and are not recorded.
pub(crate) fn program(argv: &[String]) {
    if let Some(program) = argv.first() {
        detail("program", program_name(program));
    }
}

/// A published port of a sandbox is reached.
pub(crate) fn port(sandbox: &Sandbox, port: u16) {
    with(|known| {
        known.front = AuditFront::Gateway;
        known.action = Some("port.request");
        known.project = Some(sandbox.project.clone());
        known.target = Some(format!("sandbox/{}", sandbox.name));
        known.detail.insert("port".to_owned(), port.to_string());
        known.once = Some(format!("port {} {port}", sandbox.id));
    });
}

/// A key opened a published port.
pub(crate) fn port_key(key: &KeyId) {
    with(|known| known.key = Some(key.clone()));
}

fn with(change: impl FnOnce(&mut KnownRequest)) {
    // Outside of a request there is nothing to add to.
    let _ = CURRENT.try_with(|known| change(&mut known.lock()));
}

/// A request whose work continues after its answer.
#[derive(Debug)]
pub(crate) struct Later(KnownRequest);

/// What is known of this request, for what is done after its answer.
pub(crate) fn later() -> Option<Later> {
    CURRENT.try_with(|known| Later(known.lock().clone())).ok()
}

impl Later {
    /// Records that a command was started, or why not.
    pub(crate) async fn started(
        self,
        app: &App,
        sandbox: &Name,
        argv: &[String],
        failed: Option<&str>,
    ) {
        let mut known = self.0;
        known.target = Some(format!("sandbox/{sandbox}"));
        if let Some(program) = argv.first() {
            known.detail.insert("program".to_owned(), program_name(program).to_owned());
        }
        let outcome = match failed {
            None => AuditOutcome::Done,
            Some(_) => AuditOutcome::Failed,
        };
        let mut record = known.record(app, "command.exec", outcome);
        record.code = failed.map(str::to_owned);
        app.engine.record(record, false).await;
    }
}

impl KnownRequest {
    fn record(self, app: &App, action: &str, outcome: AuditOutcome) -> AuditRecord {
        let label = self.key.as_ref().and_then(|key| app.engine.key_label(key));
        let actor = match (&self.key, &self.webhook) {
            (Some(_), _) => AuditActor::Key,
            (None, Some(_)) => AuditActor::Webhook,
            (None, None) => AuditActor::Anonymous,
        };
        AuditRecord {
            at: now(),
            action: action.to_owned(),
            actor,
            key: self.key,
            label,
            front: self.front,
            address: self.address,
            project: self.project,
            target: self.target,
            outcome,
            status: None,
            code: None,
            detail: self.detail,
        }
    }
}

/// Answers a request, and records what it did.
pub(crate) async fn record(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let asked = AskedRoute::of(&request);
    let known = Arc::new(Mutex::new(asked.known(&request)));
    let mut unanswered =
        UnansweredRequest { app: Arc::clone(&app), known: Arc::clone(&known), asked: Some(asked) };
    let response = CURRENT.scope(Arc::clone(&known), next.run(request)).await;
    let Some(asked) = unanswered.asked.take() else { return response };
    let known = known.lock().clone();
    let code = response.extensions().get::<AnsweredCode>().map(|code| code.0.to_string());
    let status = Some(response.status());
    if asked.rule.recorded == Recorded::No && known.action.is_none() {
        asked.answered(&app, known, status, code).await;
        return response;
    }
    // In a task: a caller that leaves now must not take the entry along.
    let of = Arc::clone(&app);
    let work = async move { asked.answered(&of, known, status, code).await };
    let recorded = app.tasks.spawn(crate::request_id::follow(work));
    if let Err(error) = recorded.await {
        tracing::error!(%error, "recording a request panicked");
    }
    response
}

/// A request that has no answer yet. Where its caller leaves before there is one, that is recorded: what it asked for
/// may be done all the same.
struct UnansweredRequest {
    app: Arc<App>,
    known: Arc<Mutex<KnownRequest>>,
    /// Absent when there is an answer.
    asked: Option<AskedRoute>,
}

impl Drop for UnansweredRequest {
    fn drop(&mut self) {
        let Some(asked) = self.asked.take() else { return };
        let known = self.known.lock().clone();
        if asked.rule.recorded == Recorded::No && known.action.is_none() {
            return;
        }
        // Without a runtime the daemon is gone.
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let app = Arc::clone(&self.app);
        let code = Some("disconnected".to_owned());
        let work = async move { asked.answered(&app, known, None, code).await };
        self.app.tasks.spawn(crate::request_id::follow(work));
    }
}

/// What a request asks for.
struct AskedRoute {
    method: Method,
    /// The route, if there is one.
    pattern: Option<String>,
    path: String,
    rule: AuditRule,
}

impl AskedRoute {
    fn of(request: &Request) -> Self {
        let method = request.method().clone();
        let pattern =
            request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
        let rule = rule_of(&method, pattern.as_deref().unwrap_or_default());
        Self { method, pattern, path: request.uri().path().to_owned(), rule }
    }

    fn known(&self, request: &Request) -> KnownRequest {
        let peer = request.extensions().get::<Peer>().and_then(|peer| peer.0);
        let front = match (&self.pattern, peer) {
            (Some(pattern), _) if is_vercel(pattern) => AuditFront::Vercel,
            (_, None) => AuditFront::Socket,
            (_, Some(_)) => AuditFront::Api,
        };
        let mut detail = BTreeMap::new();
        let reads_files = self.pattern.as_ref().is_some_and(|pattern| pattern.contains("/files"));
        if reads_files && let Some(path) = parameter(request.uri().query(), "path") {
            detail.insert("path".to_owned(), path);
        }
        for name in ["port", "service"] {
            let part = self.part(name);
            detail.extend(part.map(|value| (name.to_owned(), value)));
        }
        KnownRequest {
            front,
            address: peer.map(|peer| peer.to_canonical().to_string()),
            key: None,
            webhook: None,
            project: None,
            action: None,
            target: None,
            detail,
            once: None,
        }
    }

    async fn answered(
        self,
        app: &App,
        mut known: KnownRequest,
        status: Option<StatusCode>,
        code: Option<String>,
    ) {
        let outcome = match status {
            Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => AuditOutcome::Denied,
            // Neither came to a handler.
            Some(StatusCode::TOO_MANY_REQUESTS | StatusCode::METHOD_NOT_ALLOWED) => return,
            Some(status) if !status.is_client_error() && !status.is_server_error() => {
                AuditOutcome::Done
            }
            // Without a status: the caller had left before it was answered.
            _ => AuditOutcome::Failed,
        };
        let is_gateway = known.front == AuditFront::Gateway;
        if self.pattern.is_none() && !is_gateway {
            return;
        }
        let rule =
            if is_gateway { AuditRule { recorded: Recorded::No, ..self.rule } } else { self.rule };
        let is_denied = outcome == AuditOutcome::Denied && !is_gateway;
        if rule.recorded == Recorded::No && known.action.is_none() && !is_denied {
            return;
        }
        if let Some(what) = known.once.take() {
            // Without a key, only the address distinguishes callers, and anybody can have many of
            // them.
            let key = known.key.as_ref();
            let who = key.map_or("", KeyId::as_str);
            let from = key.and(known.address.as_deref()).unwrap_or_default();
            let what = format!("{what} {who} {from} {}", outcome_word(outcome));
            if !app.engine.is_record_due(known.project.as_ref(), what) {
                return;
            }
        }
        let action = known.action.unwrap_or(rule.action);
        let action = if action.is_empty() { "access.denied" } else { action };
        if known.target.is_none() {
            known.target = self.target(rule.target);
        }
        self.choose_project(app, &mut known, rule.recorded, outcome);
        let is_anonymous = known.key.is_none() && known.webhook.is_none() && !is_gateway;
        let mut record = known.record(app, action, outcome);
        record.status = status.map(|status| status.as_u16());
        record.code = code;
        if is_anonymous {
            app.engine.record_anonymous(record);
            return;
        }
        let synced = matches!(rule.recorded, Recorded::Synced | Recorded::Everywhere)
            && outcome == AuditOutcome::Done;
        if rule.recorded == Recorded::Everywhere && record.project.is_some() {
            let everywhere = AuditRecord { project: None, ..record.clone() };
            app.engine.record(everywhere, false).await;
        }
        if !app.engine.record(record, synced).await {
            tracing::error!(
                action,
                path = self.path,
                "a request is not in the audit log, or not on stable storage there"
            );
        }
    }

    /// Changes of a project are recorded in its chain, whoever made them. Projects that do not
    /// exist have none.
    fn choose_project(
        &self,
        app: &App,
        known: &mut KnownRequest,
        recorded: Recorded,
        outcome: AuditOutcome,
    ) {
        let named = self.part("project").and_then(|name| name.parse::<Name>().ok());
        if let Some(named) = named
            && outcome == AuditOutcome::Done
            && recorded != Recorded::No
        {
            known.project = Some(named);
        }
        if let Some(project) = known.project.take_if(|name| !app.engine.knows_project(name)) {
            known.detail.insert("project".to_owned(), project.to_string());
        }
    }

    /// What the path has in the place of a parameter.
    fn part(&self, name: &str) -> Option<String> {
        let pattern = self.pattern.as_deref()?;
        let mut path = self.path.split('/');
        for part in pattern.split('/') {
            let Some(parameter) = part.strip_prefix('{').and_then(|part| part.strip_suffix('}'))
            else {
                path.next()?;
                continue;
            };
            match parameter.strip_prefix('*') {
                Some(rest) if rest == name => {
                    return Some(decoded(&path.collect::<Vec<_>>().join("/")).into_owned());
                }
                None if parameter == name => return Some(decoded(path.next()?).into_owned()),
                _ => drop(path.next()?),
            }
        }
        None
    }

    /// The target that the rule names; the route if it names none.
    fn target(&self, template: &str) -> Option<String> {
        if template.is_empty() {
            let pattern = self.pattern.as_deref().unwrap_or_default();
            return Some(format!("route/{} {pattern}", self.method));
        }
        let Some((before, rest)) = template.split_once('{') else {
            return Some(template.to_owned());
        };
        let name = rest.strip_suffix('}').unwrap_or(rest);
        Some(format!("{before}{}", self.part(name).unwrap_or_default()))
    }
}

fn outcome_word(outcome: AuditOutcome) -> &'static str {
    match outcome {
        AuditOutcome::Done => "done",
        AuditOutcome::Denied => "denied",
        AuditOutcome::Failed => "failed",
    }
}

/// The last part of a program's path.
fn program_name(program: &str) -> &str {
    let name = program.rsplit('/').next().unwrap_or(program);
    // A shell's whole script may stand in its place; that is no name.
    if name.contains(char::is_whitespace) { "(not a name)" } else { name }
}

/// The first value of a parameter in a query.
fn parameter(query: Option<&str>, name: &str) -> Option<String> {
    let pairs = query?.split('&').filter_map(|pair| pair.split_once('='));
    let plain = |text: &str| decoded(&text.replace('+', " ")).into_owned();
    let (_, value) = pairs.into_iter().find(|(key, _)| plain(key) == name)?;
    Some(plain(value))
}

/// A text without its percent-encoding.
fn decoded(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return Cow::Owned(text.to_owned());
    }
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let escaped = bytes.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        let escaped = escaped.and_then(|digits| std::str::from_utf8(digits).ok());
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    Cow::Owned(String::from_utf8_lossy(&out).into_owned())
}

#[cfg(test)]
mod tests {
    use axum::http::Method;

    use super::routes::rule_of;
    use super::{AskedRoute, parameter, program_name};

    fn target(method: Method, pattern: &str, path: &str) -> Option<String> {
        let rule = rule_of(&method, pattern);
        let (pattern, path) = (Some(pattern.to_owned()), path.to_owned());
        AskedRoute { method, pattern, path, rule }.target(rule.target)
    }

    #[test]
    fn a_target_is_what_the_path_says() {
        for (method, pattern, path, expected) in [
            (
                Method::POST,
                "/v1/sandboxes/{name}/stop",
                "/v1/sandboxes/my%2Dapp/stop",
                "sandbox/my-app",
            ),
            (Method::DELETE, "/v1/images/{*name}", "/v1/images/a/b%3A1", "image/a/b:1"),
            (
                Method::DELETE,
                "/v1/projects/{project}/keys/{key}",
                "/v1/projects/p/keys/key-1",
                "key/key-1",
            ),
            (Method::DELETE, "/api/v2/sandboxes/{name}", "/api/v2/sandboxes/x", "sandbox/x"),
            (Method::POST, "/v1/images/pull", "/v1/images/pull", "route/POST /v1/images/pull"),
            (Method::DELETE, "/v1/trash", "/v1/trash", "trash"),
        ] {
            assert_eq!(target(method, pattern, path).as_deref(), Some(expected), "{path}");
        }
    }

    #[test]
    fn texts_of_callers_are_read_as_they_are_meant() {
        assert_eq!(parameter(Some("a=1&path=%2Fx%20y+z"), "path").as_deref(), Some("/x y z"));
        assert_eq!(parameter(Some("a=1&%70at%68=%2Fx"), "path").as_deref(), Some("/x"));
        assert_eq!(parameter(Some("path=%zz%"), "path").as_deref(), Some("%zz%"));
        assert_eq!(parameter(Some("path"), "path"), None);
        assert_eq!(parameter(None, "path"), None);
        assert_eq!(program_name("/usr/bin/npm"), "npm");
        assert_eq!(program_name("echo $TOKEN"), "(not a name)");
    }
}
