//! What of each route is recorded in the audit log.
//!
//! A new route gets a line here; `tests::every_route_is_listed` fails until it has one. A line says which action it
//! is, how it is recorded, and what it is done to: `{name}` stands for what the path has there. What only the body or
//! the answer knows (the name of a new sandbox), the handler adds with [`super::target`].

use std::collections::HashMap;
use std::sync::LazyLock;

use axum::http::Method;

/// How a route is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// Not, unless the caller is refused: it shows what there is.
    No,
    /// It gives access to what a sandbox has or does.
    Access,
    /// It changes something.
    Change,
    /// It changes who may do what: the entry is on stable storage before the answer is sent.
    Synced,
    /// The same, and the operator's chain has the entry too.
    Everywhere,
}

/// What is recorded of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AuditRule {
    pub(crate) action: &'static str,
    pub(crate) recorded: Recorded,
    /// What it is done to; empty if only the handler knows.
    pub(crate) target: &'static str,
}

type RouteLine = (&'static str, &'static str, Recorded, &'static str, &'static str);

use Recorded::{Access, Change, Everywhere, No, Synced};

/// Routes of `/v1`: method, path, how, action, target.
const API: &[RouteLine] = &[
    ("GET", "/healthz", No, "", ""),
    ("GET", "/readyz", No, "", ""),
    ("GET", "/metrics", No, "", ""),
    ("GET", "/v1/openapi.json", No, "", ""),
    ("GET", "/v1/whoami", No, "", ""),
    ("GET", "/v1/usage", No, "", ""),
    ("GET", "/v1/damage", No, "", ""),
    ("GET", "/v1/stats", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/stats", No, "", ""),
    ("GET", "/v1/events", No, "", ""),
    ("GET", "/v1/audit", Access, "audit.read", "audit"),
    ("GET", "/v1/audit/verify", No, "", ""),
    ("POST", "/v1/fsck", No, "", ""),
    ("POST", "/v1/tokens", Synced, "token.create", ""),
    ("GET", "/v1/trash", No, "", ""),
    ("DELETE", "/v1/trash", Change, "trash.empty", "trash"),
    ("POST", "/v1/trash/{sandbox}/restore", Change, "trash.restore", "sandbox/{sandbox}"),
    ("GET", "/v1/projects", No, "", ""),
    ("POST", "/v1/projects", Everywhere, "project.create", ""),
    ("DELETE", "/v1/projects/{project}", Everywhere, "project.delete", "project/{project}"),
    ("GET", "/v1/projects/{project}/keys", No, "", ""),
    ("POST", "/v1/projects/{project}/keys", Everywhere, "key.create", "project/{project}"),
    ("DELETE", "/v1/projects/{project}/keys/{key}", Everywhere, "key.revoke", "key/{key}"),
    ("GET", "/v1/projects/{project}/network", No, "", ""),
    ("PUT", "/v1/projects/{project}/network", Synced, "network.set", "project/{project}"),
    ("GET", "/v1/projects/{project}/governance", No, "", ""),
    ("PUT", "/v1/projects/{project}/governance", Synced, "governance.set", "project/{project}"),
    ("GET", "/v1/images", No, "", ""),
    ("GET", "/v1/images/{*name}", No, "", ""),
    ("DELETE", "/v1/images/{*name}", Change, "image.delete", "image/{name}"),
    ("POST", "/v1/images/pull", Change, "image.pull", ""),
    ("POST", "/v1/images/import", Change, "image.import", ""),
    ("POST", "/v1/images/customize", Change, "image.customize", ""),
    ("POST", "/v1/images/build", Change, "image.build", ""),
    ("POST", "/v1/images/prune", Change, "image.prune", "images"),
    ("POST", "/v1/images/dress", Change, "image.customize", ""),
    ("GET", "/v1/snapshots", No, "", ""),
    ("GET", "/v1/snapshots/{id}", No, "", ""),
    ("DELETE", "/v1/snapshots/{id}", Change, "snapshot.delete", "snapshot/{id}"),
    ("GET", "/v1/snapshots/{id}/export", Access, "snapshot.export", "snapshot/{id}"),
    ("GET", "/v1/diff", Access, "files.diff", ""),
    ("GET", "/v1/diff/patch", Access, "files.diff", ""),
    ("GET", "/v1/forks", No, "", ""),
    ("GET", "/v1/secrets", No, "", ""),
    ("GET", "/v1/secrets/{name}", No, "", ""),
    ("PUT", "/v1/secrets/{name}", Synced, "secret.set", "secret/{name}"),
    ("DELETE", "/v1/secrets/{name}", Synced, "secret.delete", "secret/{name}"),
    ("GET", "/v1/webhooks", No, "", ""),
    ("POST", "/v1/webhooks", Synced, "webhook.create", ""),
    ("GET", "/v1/webhooks/{id}", No, "", ""),
    ("PATCH", "/v1/webhooks/{id}", Synced, "webhook.update", "webhook/{id}"),
    ("DELETE", "/v1/webhooks/{id}", Synced, "webhook.delete", "webhook/{id}"),
    ("POST", "/v1/webhooks/{id}/rotate", Synced, "webhook.rotate", "webhook/{id}"),
    ("POST", "/v1/webhooks/{id}/test", Change, "webhook.test", "webhook/{id}"),
    ("GET", "/v1/runs", No, "", ""),
    ("POST", "/v1/runs", Change, "run.start", ""),
    ("GET", "/v1/runs/{id}", No, "", ""),
    ("POST", "/v1/runs/{id}/cancel", Change, "run.cancel", "run/{id}"),
    ("POST", "/v1/runs/{id}/heartbeat", No, "", ""),
    ("POST", "/v1/runs/{id}/finish", Change, "run.finish", "run/{id}"),
    ("GET", "/v1/runs/{id}/review", Access, "run.review", "run/{id}"),
    ("POST", "/v1/runs/{id}/review", Change, "run.pin", "run/{id}"),
    ("POST", "/v1/runs/{id}/accept", Synced, "run.accept", "run/{id}"),
    ("POST", "/v1/runs/{id}/reject", Synced, "run.reject", "run/{id}"),
    ("GET", "/v1/approvals", No, "", ""),
    ("GET", "/v1/approvals/{id}", No, "", ""),
    ("POST", "/v1/approvals/{id}/answer", Synced, "approval.answer", "approval/{id}"),
    ("POST", "/v1/sandboxes/{name}/approvals", Change, "approval.ask", "sandbox/{name}"),
    ("GET", "/v1/quarantine", No, "", ""),
    ("DELETE", "/v1/quarantine/{id}", Change, "quarantine.delete", "snapshot/{id}"),
    ("GET", "/v1/drives", No, "", ""),
    ("POST", "/v1/drives", Change, "drive.create", ""),
    ("GET", "/v1/drives/{name}", No, "", ""),
    ("DELETE", "/v1/drives/{name}", Change, "drive.delete", "drive/{name}"),
    ("POST", "/v1/drives/{name}/fork", Change, "drive.fork", "drive/{name}"),
    ("POST", "/v1/drives/{name}/promote", Change, "drive.promote", "drive/{name}"),
    ("GET", "/v1/sandboxes", No, "", ""),
    ("POST", "/v1/sandboxes", Change, "sandbox.create", ""),
    ("GET", "/v1/sandboxes/{name}", No, "", ""),
    ("PATCH", "/v1/sandboxes/{name}", Synced, "sandbox.update", "sandbox/{name}"),
    ("DELETE", "/v1/sandboxes/{name}", Change, "sandbox.delete", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/artifacts", Change, "sandbox.artifacts", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/start", Change, "sandbox.start", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/stop", Change, "sandbox.stop", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/pause", Change, "sandbox.pause", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/why", No, "", ""),
    ("POST", "/v1/sandboxes/{name}/fork", Change, "sandbox.fork", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/checkpoint", Change, "sandbox.checkpoint", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/rollback", Change, "sandbox.rollback", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/promote", Change, "sandbox.promote", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/merge", Change, "sandbox.merge", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/rename", Change, "sandbox.rename", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/extend", Change, "sandbox.extend", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/sessions", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/snapshots", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/tree", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/network", No, "", ""),
    ("PUT", "/v1/sandboxes/{name}/network", Synced, "network.set", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/connections", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/connections/summary", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/ports", No, "", ""),
    ("PUT", "/v1/sandboxes/{name}/ports/{port}", Synced, "port.publish", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/ports/{port}/token", Synced, "port.token", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/ports/{port}/connect", Access, "port.connect", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/ports/{port}/ws", Access, "port.connect", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/services", No, "", ""),
    ("PUT", "/v1/sandboxes/{name}/services/{service}", Change, "service.set", "sandbox/{name}"),
    (
        "DELETE",
        "/v1/sandboxes/{name}/services/{service}",
        Change,
        "service.delete",
        "sandbox/{name}",
    ),
    (
        "POST",
        "/v1/sandboxes/{name}/services/{service}/start",
        Change,
        "service.start",
        "sandbox/{name}",
    ),
    (
        "POST",
        "/v1/sandboxes/{name}/services/{service}/stop",
        Change,
        "service.stop",
        "sandbox/{name}",
    ),
    ("POST", "/v1/sandboxes/{name}/exec", Access, "command.exec", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/exec/ws", Access, "command.connect", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/commands", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/commands/{id}", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/commands/{id}/changes", No, "", ""),
    ("GET", "/v1/sandboxes/{name}/commands/{id}/logs", Access, "command.logs", "sandbox/{name}"),
    (
        "POST",
        "/v1/sandboxes/{name}/commands/{id}/signal",
        Access,
        "command.signal",
        "sandbox/{name}",
    ),
    ("POST", "/v1/sandboxes/{name}/commands/{id}/resize", No, "", ""),
    ("POST", "/v1/sandboxes/{name}/commands/{id}/stdin", Access, "command.stdin", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/files", Access, "files.read", "sandbox/{name}"),
    ("PUT", "/v1/sandboxes/{name}/files", Access, "files.write", "sandbox/{name}"),
    ("DELETE", "/v1/sandboxes/{name}/files", Access, "files.delete", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/files/stat", Access, "files.list", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/files/list", Access, "files.list", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/files/mkdir", Access, "files.mkdir", "sandbox/{name}"),
    ("POST", "/v1/sandboxes/{name}/files/move", Access, "files.move", "sandbox/{name}"),
    ("GET", "/v1/sandboxes/{name}/files/tar", Access, "files.read", "sandbox/{name}"),
    ("PUT", "/v1/sandboxes/{name}/files/tar", Access, "files.write", "sandbox/{name}"),
];

/// Routes for Vercel's clients, without `/api`. What their sessions are of, the handlers know.
const VERCEL: &[RouteLine] = &[
    ("GET", "/health", No, "", ""),
    ("GET", "/v2/user", No, "", ""),
    ("GET", "/v2/teams", No, "", ""),
    ("GET", "/v2/teams/{id}", No, "", ""),
    ("GET", "/v2/projects/{name}", No, "", ""),
    ("GET", "/v9/projects/{name}", No, "", ""),
    // It makes none: it answers with the existing one.
    ("POST", "/v11/projects", No, "", ""),
    ("GET", "/v2/sandboxes", No, "", ""),
    ("POST", "/v2/sandboxes", Change, "sandbox.create", ""),
    ("POST", "/v3/sandboxes", Change, "sandbox.create", ""),
    ("POST", "/v4/sandboxes", Change, "sandbox.create", ""),
    // With `resume` it starts the sandbox, which the handler records.
    ("GET", "/v2/sandboxes/{name}", No, "", "sandbox/{name}"),
    ("PATCH", "/v2/sandboxes/{name}", Synced, "sandbox.update", "sandbox/{name}"),
    ("DELETE", "/v2/sandboxes/{name}", Change, "sandbox.delete", "sandbox/{name}"),
    ("POST", "/v2/sandboxes/{name}/fork", Change, "sandbox.fork", "sandbox/{name}"),
    ("GET", "/v2/sandboxes/sessions", No, "", ""),
    ("GET", "/v2/sandboxes/sessions/{id}", No, "", ""),
    ("POST", "/v2/sandboxes/sessions/{id}/stop", Change, "sandbox.stop", "session/{id}"),
    (
        "POST",
        "/v2/sandboxes/sessions/{id}/extend-timeout",
        Change,
        "sandbox.extend",
        "session/{id}",
    ),
    ("POST", "/v2/sandboxes/sessions/{id}/network-policy", Synced, "network.set", "session/{id}"),
    ("POST", "/v2/sandboxes/sessions/{id}/snapshot", Change, "sandbox.checkpoint", "session/{id}"),
    ("POST", "/v3/sandboxes/sessions/{id}/snapshot", Change, "sandbox.checkpoint", "session/{id}"),
    ("POST", "/v2/sandboxes/sessions/{id}/cmd", Access, "command.exec", "session/{id}"),
    ("GET", "/v2/sandboxes/sessions/{id}/cmd", No, "", ""),
    ("GET", "/v2/sandboxes/sessions/{id}/cmd/{cmd}", No, "", ""),
    ("GET", "/v2/sandboxes/sessions/{id}/cmd/{cmd}/logs", Access, "command.logs", "session/{id}"),
    (
        "POST",
        "/v2/sandboxes/sessions/{id}/cmd/{cmd}/kill",
        Access,
        "command.signal",
        "session/{id}",
    ),
    (
        "POST",
        "/v2/sandboxes/sessions/{id}/cmd/{cmd}/stdin",
        Access,
        "command.stdin",
        "session/{id}",
    ),
    ("POST", "/v2/sandboxes/sessions/{id}/fs/write", Access, "files.write", "session/{id}"),
    ("POST", "/v2/sandboxes/sessions/{id}/fs/read", Access, "files.read", "session/{id}"),
    ("POST", "/v2/sandboxes/sessions/{id}/fs/mkdir", Access, "files.mkdir", "session/{id}"),
    ("POST", "/v2/sandboxes/sessions/{id}/interactive", Access, "command.connect", "session/{id}"),
    ("GET", "/ws/interactive", Access, "command.connect", ""),
    ("GET", "/v2/sandboxes/snapshots", No, "", ""),
    ("GET", "/v2/sandboxes/snapshots/tree", No, "", ""),
    ("GET", "/v2/sandboxes/snapshots/{id}", No, "", ""),
    ("DELETE", "/v2/sandboxes/snapshots/{id}", Change, "snapshot.delete", "snapshot/{id}"),
    ("GET", "/v2/sandboxes/drives", No, "", ""),
    ("GET", "/v2/sandboxes/drives/{name}", No, "", ""),
    ("POST", "/v2/sandboxes/drives/{name}", Change, "drive.create", "drive/{name}"),
    ("DELETE", "/v2/sandboxes/drives/{name}", Change, "drive.delete", "drive/{name}"),
    ("POST", "/v2/sandboxes/drives/{name}/fork", Change, "drive.fork", "drive/{name}"),
];

/// A change by a route that is not listed. Nothing that changes something goes unrecorded.
const UNLISTED: AuditRule = AuditRule { action: "other", recorded: Recorded::Change, target: "" };

/// A route that shows what there is.
const SHOWS: AuditRule = AuditRule { action: "", recorded: Recorded::No, target: "" };

/// What is recorded of a route.
pub(crate) fn rule_of(method: &Method, pattern: &str) -> AuditRule {
    static RULES: LazyLock<HashMap<(&str, &str), AuditRule>> = LazyLock::new(|| {
        let rule = |(method, pattern, recorded, action, target): &RouteLine| {
            let rule = AuditRule { action, recorded: *recorded, target };
            ((*method, *pattern), rule)
        };
        API.iter().chain(VERCEL).map(rule).collect()
    });
    let method = if method == Method::HEAD { "GET" } else { method.as_str() };
    let pattern = pattern.strip_prefix("/api").unwrap_or(pattern);
    let known = RULES.get(&(method, pattern)).copied();
    known.unwrap_or(if method == "GET" { SHOWS } else { UNLISTED })
}

/// Whether a route is one for Vercel's clients.
pub(crate) fn is_vercel(pattern: &str) -> bool {
    !pattern.starts_with("/v1/") && !matches!(pattern, "/healthz" | "/readyz" | "/metrics")
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fs;
    use std::path::Path;

    use axum::http::Method;

    use super::{API, Recorded, UNLISTED, VERCEL, rule_of};

    const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];

    /// The routes in the sources of all fronts: whatever a router is given.
    fn routes() -> BTreeSet<(String, String)> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let (mut dirs, mut found) = (vec![root], BTreeSet::new());
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    dirs.push(path);
                } else if path.extension().is_some_and(|ending| ending == "rs") {
                    let text = fs::read_to_string(&path).unwrap();
                    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                    for call in code.split(".route(").skip(1) {
                        found.extend(route(call, &path.display().to_string()));
                    }
                }
            }
        }
        found
    }

    /// The methods and the path of one call of `route`.
    fn route(call: &str, file: &str) -> Vec<(String, String)> {
        let call = call.trim_start();
        let path = call.strip_prefix('"').and_then(|rest| rest.split('"').next());
        let path = path.unwrap_or_else(|| {
            let line = call.lines().next().unwrap_or_default();
            panic!("{file}: `.route({line}`: write the path as text, so that this test sees it")
        });
        let mut depth = 1;
        let end = call.find(|c| {
            match c {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            depth == 0
        });
        let handlers = &call[path.len() + 2..end.unwrap_or(call.len())];
        let called = |method: &str| {
            handlers.match_indices(&format!("{method}(")).any(|(at, _)| {
                let before = handlers[..at].chars().next_back();
                before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':')
            })
        };
        let methods = METHODS.iter().filter(|method| called(method));
        let found: Vec<_> =
            methods.map(|method| (method.to_uppercase(), path.to_owned())).collect();
        assert!(!found.is_empty(), "{file}: {path}: no method was found");
        found
    }

    #[test]
    fn every_route_is_listed() {
        let routes = routes();
        assert!(routes.len() > 120, "{}", routes.len());
        let listed: BTreeSet<(String, String)> = API
            .iter()
            .chain(VERCEL)
            .map(|(method, path, ..)| ((*method).to_owned(), (*path).to_owned()))
            .collect();
        let missing: Vec<_> = routes.difference(&listed).collect();
        assert!(
            missing.is_empty(),
            "not in crates/server/src/audit/routes.rs: {missing:?}; say there what is recorded of them"
        );
        let gone: Vec<_> = listed.difference(&routes).collect();
        assert!(gone.is_empty(), "in crates/server/src/audit/routes.rs, and no routes: {gone:?}");
    }

    #[test]
    fn the_description_has_no_other_routes() {
        let description: serde_json::Value = serde_json::from_str(&crate::openapi::json()).unwrap();
        let mut count = 0;
        for (path, item) in description["paths"].as_object().unwrap() {
            for method in item.as_object().unwrap().keys() {
                let known = API.iter().any(|(known, at, ..)| {
                    known.eq_ignore_ascii_case(method) && at.replace("{*", "{") == *path
                });
                assert!(known, "{method} {path}");
                count += 1;
            }
        }
        assert!(count > 60, "{count}");
    }

    #[test]
    fn whatever_changes_something_has_an_action() {
        // What is asked for with another method than GET and changes nothing.
        let harmless = [
            ("POST", "/v1/fsck"),
            ("POST", "/v1/sandboxes/{name}/commands/{id}/resize"),
            ("POST", "/v11/projects"),
            // A sign of life, every minute.
            ("POST", "/v1/runs/{id}/heartbeat"),
        ];
        for (method, path, recorded, action, _) in API.iter().chain(VERCEL) {
            let is_recorded = *recorded != Recorded::No;
            assert_eq!(is_recorded, !action.is_empty(), "{method} {path}");
            if *method != "GET" && !harmless.contains(&(method, path)) {
                assert!(is_recorded, "{method} {path} changes something, and has no action");
            }
        }
    }

    #[test]
    fn a_route_that_was_forgotten_is_recorded_all_the_same() {
        assert_eq!(rule_of(&Method::POST, "/v1/new"), UNLISTED);
        assert_eq!(rule_of(&Method::GET, "/v1/new").recorded, Recorded::No);
        let create = rule_of(&Method::POST, "/api/v4/sandboxes");
        assert_eq!((create.action, create.recorded), ("sandbox.create", Recorded::Change));
        assert_eq!(rule_of(&Method::HEAD, "/v1/audit").action, "audit.read");
    }

    #[test]
    fn the_documentation_has_every_action() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/AUDIT.md");
        let text = fs::read_to_string(file).unwrap();
        let mut missing = BTreeMap::new();
        for (method, path, _, action, _) in API.iter().chain(VERCEL) {
            if !action.is_empty() && !text.contains(&format!("`{action}`")) {
                missing.insert(*action, (*method, *path));
            }
        }
        assert!(missing.is_empty(), "not in docs/AUDIT.md: {missing:?}");
    }
}
