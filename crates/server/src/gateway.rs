//! The way from outside to a port inside a sandbox.
//!
//! A published port has a *subdomain*, `sb-` and the sandbox's own id and the port: it stays the same
//! over stops and resumes, is another for a fork, and cannot be guessed.

use sandkeep_core::model::SandboxId;

use crate::api::App;

/// What a port of a sandbox is called.
pub(crate) fn subdomain(sandbox: &SandboxId, port: u16) -> String {
    let tail = sandbox.as_str().rsplit('-').next().unwrap_or_default();
    format!("sb-{tail}-{port}")
}

/// Where it is reached: below the domain that is set up for it, else by its path on this server.
pub(crate) fn route_url(app: &App, host: Option<&str>, subdomain: &str) -> String {
    if let Some(domain) = &app.vercel.domain {
        return format!("https://{subdomain}.{domain}");
    }
    let base = match (&app.vercel.public_url, host) {
        (Some(url), _) => url.trim_end_matches('/').to_owned(),
        (None, Some(host)) => format!("http://{host}"),
        (None, None) => "http://localhost".to_owned(),
    };
    format!("{base}/_route/{subdomain}")
}
