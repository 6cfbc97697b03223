//! The names of ports, and where clients find them.
//!
//! ```text
//! <port>-<sandbox>.<domain>               of the default project
//! <port>-<sandbox>--<project>.<domain>    of another one
//! sb-<26 characters of the sandbox's id>-<port>.<any domain>
//! /_port/<project>/<sandbox>/<port>/...
//! /_route/sb-<26 characters>-<port>/...
//! ```
//!
//! Hosts know no capitals, no underscores and no label over 63 characters, and `--` is what divides a
//! sandbox from its project. A sandbox whose name does not fit is not reached by name on a domain; by its
//! id, and by path, every sandbox is. `localhost` is a domain always: browsers look for its
//! subdomains on their own machine.

use axum::http::header::HOST;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, Uri};
use sandkeep_core::engine::Whose;
use sandkeep_core::model::{Name, Sandbox, SandboxId};

use super::GatewaySettings;

/// The path under which every port has a place by its sandbox's id.
const BY_ID: &str = "/_route/";
/// The path under which every port has a place by its sandbox's name.
const BY_NAME: &str = "/_port/";
/// How a sandbox's id begins, which its public name leaves out.
const ID: &str = "sbx-";
/// A domain that leads to the own machine wherever one is.
const LOCAL: &str = "localhost";
/// The longest label of a host name.
const LABEL: usize = 63;

/// A port that a request is for, and what it asks of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) whose: Whose,
    pub(super) port: u16,
    pub(super) path: PathAndQuery,
    /// What was cut off the front of the path.
    pub(super) prefix: Option<String>,
}

/// The public name of a sandbox's port by its id: a label fit for a host name.
pub(crate) fn subdomain(sandbox: &SandboxId, port: u16) -> String {
    let tail = sandbox.as_str().strip_prefix(ID).unwrap_or(sandbox.as_str());
    format!("sb-{tail}-{port}")
}

/// Where clients find a port under its public name.
pub(crate) fn address(base: &str, domain: Option<&str>, sub: &str) -> String {
    match domain {
        Some(domain) => on_domain(base, domain, sub),
        None => format!("{base}{BY_ID}{sub}"),
    }
}

fn on_domain(base: &str, domain: &str, label: &str) -> String {
    let (scheme, host) = base.split_once("://").unwrap_or(("http", base));
    // The port is the server's; the host is not.
    let port = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
    match port {
        Some((_, port)) if !domain.contains(':') => format!("{scheme}://{label}.{domain}:{port}"),
        _ => format!("{scheme}://{label}.{domain}"),
    }
}

/// Where clients reach this server: as configured, or as they did.
pub(crate) fn base_url(public_url: Option<&str>, host: Option<&str>, tls: bool) -> String {
    let scheme = if tls { "https" } else { "http" };
    match public_url {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => format!("{scheme}://{}", host.unwrap_or("localhost")),
    }
}

/// Where a port of a sandbox is reached: the best address there is, and the one by path.
pub(crate) fn addresses(
    settings: &GatewaySettings,
    base: &str,
    sandbox: &Sandbox,
    port: u16,
) -> (String, String) {
    let path = format!("{base}{BY_NAME}{}/{}/{port}/", sandbox.project, sandbox.name);
    let best = settings.domain.as_deref().map(|domain| {
        let label = label(settings, sandbox, port);
        let label = label.unwrap_or_else(|| subdomain(&sandbox.id, port));
        format!("{}/", on_domain(base, domain, &label))
    });
    (best.unwrap_or_else(|| path.clone()), path)
}

/// The label that a sandbox's port has by name, if its names fit.
fn label(settings: &GatewaySettings, sandbox: &Sandbox, port: u16) -> Option<String> {
    let fits = |name: &Name| {
        let text = name.as_str();
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        text.bytes().all(plain)
            && !text.contains("--")
            && !text.starts_with('-')
            && !text.ends_with('-')
    };
    if !fits(&sandbox.name) || !fits(&sandbox.project) {
        return None;
    }
    let label = match sandbox.project == settings.default_project {
        true => format!("{port}-{}", sandbox.name),
        false => format!("{port}-{}--{}", sandbox.name, sandbox.project),
    };
    (label.len() <= LABEL).then_some(label)
}

/// Whether a request is for a port; `Some(None)` if it is for one that cannot be.
pub(super) fn target(
    settings: &GatewaySettings,
    uri: &Uri,
    headers: &HeaderMap,
) -> Option<Option<Target>> {
    let whole = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let host = uri.host().or_else(|| headers.get(HOST).and_then(|host| host.to_str().ok()));
    if let Some(found) = host.and_then(|host| by_host(settings, host)) {
        return Some(found.map(|(whose, port)| Target { whose, port, path: whole, prefix: None }));
    }
    let text = whole.as_str();
    let named = text.strip_prefix(BY_ID).map(|rest| (BY_ID, rest, 1));
    let (front, rest, parts) =
        named.or_else(|| text.strip_prefix(BY_NAME).map(|rest| (BY_NAME, rest, 3)))?;
    Some(by_path(front, rest, parts))
}

/// What a host name stands for: `None` if for no port, `Some(None)` for one that cannot be.
fn by_host(settings: &GatewaySettings, host: &str) -> Option<Option<(Whose, u16)>> {
    // Host names are the same in capitals, and with a dot at the end.
    let host = host.to_ascii_lowercase();
    let host = host.rsplit_once(':').map_or(host.as_str(), |(host, _)| host);
    let (label, domain) = host.strip_suffix('.').unwrap_or(host).split_once('.')?;
    if let Some((sandbox, port)) = id_and_port(label) {
        return Some(Some((Whose::Id(sandbox), port)));
    }
    let ours = settings.domain.as_deref().map(|ours| {
        let ours = ours.rsplit_once(':').map_or(ours, |(ours, _)| ours);
        ours.eq_ignore_ascii_case(domain)
    });
    if domain != LOCAL && ours != Some(true) {
        return None;
    }
    // A domain may have other names in it: only what begins like a port is taken for one.
    let (port, name) = label.split_once('-')?;
    let port = number(port)?;
    let (sandbox, project) = match name.split_once("--") {
        Some((sandbox, project)) => (sandbox, project.parse().ok()),
        None => (name, Some(settings.default_project.clone())),
    };
    let named = sandbox.parse().ok().zip(project);
    Some(named.map(|(sandbox, project)| (Whose::Name { project, sandbox }, port)))
}

/// Whether a host name, without its port, stands for a port of a sandbox by its id, whatever the domain.
pub(crate) fn is_port_by_id(name: &str) -> bool {
    name.split_once('.').is_some_and(|(label, _)| id_and_port(label).is_some())
}

fn by_path(front: &str, rest: &str, parts: usize) -> Option<Target> {
    let end = rest
        .match_indices(['/', '?'])
        .scan(0, |seen, (at, mark)| {
            *seen += 1;
            Some((at, *seen == parts || mark == "?"))
        })
        .find_map(|(at, last)| last.then_some(at))
        .unwrap_or(rest.len());
    let (name, path) = rest.split_at(end);
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let (whose, port) = match front {
        BY_ID => id_and_port(name).map(|(id, port)| (Whose::Id(id), port)),
        _ => {
            let mut words = name.split('/');
            let (project, sandbox) = (words.next()?, words.next()?);
            let port = number(words.next()?)?;
            let (project, sandbox) = (project.parse().ok()?, sandbox.parse().ok()?);
            Some((Whose::Name { project, sandbox }, port))
        }
    }?;
    let prefix = Some(format!("{front}{name}"));
    Some(Target { whose, port, path: path.parse().ok()?, prefix })
}

/// Reads a public name by id.
fn id_and_port(sub: &str) -> Option<(SandboxId, u16)> {
    let (tail, port) = sub.strip_prefix("sb-")?.split_at_checked(26)?;
    Some((format!("{ID}{tail}").parse().ok()?, number(port.strip_prefix('-')?)?))
}

/// Reads a port as it is written and no other way.
fn number(text: &str) -> Option<u16> {
    let plain = !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue, Uri};
    use sandkeep_core::engine::Whose;

    use super::super::GatewaySettings;
    use super::{Target, id_and_port, subdomain};

    const TAIL: &str = "01k00000000000000000000000";

    fn settings(domain: Option<&str>) -> GatewaySettings {
        GatewaySettings { domain: domain.map(str::to_owned), ..GatewaySettings::default() }
    }

    fn target(host: &str, path: &str) -> Option<Option<Target>> {
        let headers = HeaderMap::from_iter([(super::HOST, HeaderValue::from_str(host).unwrap())]);
        let uri = path.parse::<Uri>().unwrap();
        super::target(&settings(Some("keep.test:8443")), &uri, &headers)
    }

    fn whose(host: &str) -> Option<Option<(String, u16)>> {
        target(host, "/x").map(|found| {
            found.map(|Target { whose, port, .. }| match whose {
                Whose::Id(id) => (id.to_string(), port),
                Whose::Name { project, sandbox } => (format!("{project}/{sandbox}"), port),
            })
        })
    }

    #[test]
    fn names_come_back_as_they_went() {
        let id = format!("sbx-{TAIL}").parse().unwrap();
        let sub = subdomain(&id, 3000);
        assert_eq!(sub, format!("sb-{TAIL}-3000"));
        assert!(sub.len() <= 63, "a label of a host name");
        assert_eq!(id_and_port(&sub), Some((id, 3000)));
        for bad in ["", "sb-", "sb-x-1", &format!("sb-{TAIL}"), &format!("sb-{TAIL}-")] {
            assert_eq!(id_and_port(bad), None, "{bad}");
        }
        for port in ["0", "080", "65536", "+80", "80-1", "\u{e9}"] {
            assert_eq!(id_and_port(&format!("sb-{TAIL}-{port}")), None, "{port}");
        }
    }

    #[test]
    fn a_host_names_a_port_or_nothing_of_ours() {
        let found = |name: &str, port| Some(Some((name.to_owned(), port)));
        for (host, meant) in [
            ("3000-my-app.keep.test", found("default/my-app", 3000)),
            ("3000-MY-app.Keep.Test.:443", found("default/my-app", 3000)),
            ("8080-a--team-b.keep.test:8443", found("team-b/a", 8080)),
            ("3000-my-app.localhost:7777", found("default/my-app", 3000)),
            (&format!("sb-{TAIL}-1.anywhere"), found(&format!("sbx-{TAIL}"), 1)),
            // Of our domain, and no port.
            ("api.keep.test", None),
            ("03000-a.keep.test", None),
            ("3000.keep.test", None),
            ("70000-a.keep.test", None),
            ("keep.test", None),
            // Not of our domain.
            ("3000-my-app.other.test", None),
            ("3000-my-app.keep.test.evil", None),
            ("3000-my-app.x.keep.test", None),
            ("localhost:7777", None),
            ("", None),
            ("[::1]:7777", None),
            // Ports, of sandboxes that cannot be.
            ("3000-.keep.test", Some(None)),
            ("3000-a--.keep.test", Some(None)),
            ("3000-a%2f.keep.test", Some(None)),
        ] {
            assert_eq!(whose(host), meant, "{host}");
        }
    }

    #[test]
    fn a_path_names_a_port_and_leaves_the_rest() {
        let sub = format!("sb-{TAIL}-3000");
        for (path, prefix, rest) in [
            (format!("/_route/{sub}"), format!("/_route/{sub}"), "/"),
            (format!("/_route/{sub}?x=1"), format!("/_route/{sub}"), "/?x=1"),
            (format!("/_route/{sub}/a//b%2f..?x"), format!("/_route/{sub}"), "/a//b%2f..?x"),
            ("/_port/p/a/80".to_owned(), "/_port/p/a/80".to_owned(), "/"),
            ("/_port/p/a/80?x=/".to_owned(), "/_port/p/a/80".to_owned(), "/?x=/"),
            ("/_port/p/A_b/80/v1/../x?y".to_owned(), "/_port/p/A_b/80".to_owned(), "/v1/../x?y"),
        ] {
            let found = target("localhost", &path).unwrap().unwrap();
            assert_eq!(found.path.as_str(), rest, "{path}");
            assert_eq!(found.prefix, Some(prefix));
        }
        for path in [
            "/_route/other/x",
            "/_port/",
            "/_port/p",
            "/_port/p/a",
            "/_port/p/a/",
            "/_port/p/a/x/80",
            "/_port/p/a/080/",
            "/_port/../a/80/",
            "/_port/p/..%2f/80/",
            "/_port/p/%61/80/",
            "/_port/p//80/",
            "/_port/p?/a/80/",
        ] {
            assert_eq!(target("localhost", path), Some(None), "{path}");
        }
        for path in ["/v1/sandboxes", "/_router", "/_ports/p/a/80/", "/"] {
            assert_eq!(target("localhost", path), None, "{path}");
        }
    }

    #[test]
    fn the_address_of_a_port_is_one_that_clients_can_reach() {
        for (url, domain, address) in [
            (None, None, "http://here:7777/_route/s"),
            (Some("https://keep.example.com/"), None, "https://keep.example.com/_route/s"),
            (None, Some("run.test"), "http://s.run.test:7777"),
            (Some("https://keep.example.com"), Some("run.test"), "https://s.run.test"),
        ] {
            let base = super::base_url(url, Some("here:7777"), false);
            assert_eq!(super::address(&base, domain, "s"), address);
        }
    }
}
