//! Services: commands that belong to a sandbox and are started again after every resume.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::spec::{BadConfig, refuse};
use super::{Name, Restart, check_env_name};

/// A command that belongs to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    /// Its name, unique in the sandbox.
    pub name: Name,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment on top of the sandbox's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The port it listens on: connections to it wait until it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// What becomes of it when it has ended.
    #[serde(default)]
    pub restart: Restart,
    /// Whether it is started with every session.
    pub start: bool,
}

/// Checks the services of a sandbox.
pub(super) fn check_services(services: &[Service]) -> Result<(), BadConfig> {
    let refuse = |reason: String| Err(refuse("services", reason));
    if services.len() > 16 {
        return refuse("at most 16".to_owned());
    }
    for (index, service) in services.iter().enumerate() {
        let Service { name, argv, env, cwd, port, .. } = service;
        if services[..index].iter().any(|other| other.name == *name) {
            return refuse(format!("`{name}` is there twice"));
        }
        if name.as_str().len() > 63 {
            return refuse(format!("`{name}` is too long: at most 63 characters"));
        }
        if argv.first().is_none_or(String::is_empty) || argv.iter().any(|arg| arg.contains('\0')) {
            return refuse(format!(
                "`{name}`: argv needs a program, and no argument may hold a NUL byte"
            ));
        }
        if argv.iter().map(String::len).sum::<usize>() > 64 << 10 {
            return refuse(format!("`{name}`: argv has at most 64 KiB in all"));
        }
        if env.len() > 128 || env.values().map(String::len).sum::<usize>() > 64 << 10 {
            return refuse(format!("`{name}`: env has at most 128 variables and 64 KiB in all"));
        }
        for (variable, value) in env {
            if let Err(error) = check_env_name(variable) {
                return refuse(format!("`{name}`: env: {error}"));
            }
            if value.contains('\0') {
                return refuse(format!("`{name}`: env: `{variable}` holds a NUL byte"));
            }
        }
        if cwd.as_ref().is_some_and(|cwd| !cwd.starts_with('/') || cwd.contains('\0')) {
            return refuse(format!("`{name}`: cwd must be an absolute path"));
        }
        if let Some(user) = &service.user
            && (user.is_empty()
                || user.len() > 128
                || user.chars().any(|c| c.is_control() || c.is_whitespace()))
        {
            return refuse(format!("`{name}`: user is a name or number, optionally `user:group`"));
        }
        if *port == Some(0) {
            return refuse(format!("`{name}`: port is between 1 and 65535"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Restart, Service, check_services};

    fn service(name: &str) -> Service {
        Service {
            name: name.parse().unwrap(),
            argv: vec!["sleep".to_owned()],
            env: [("A".to_owned(), "b".to_owned())].into(),
            cwd: Some("/work".to_owned()),
            user: Some("1000:1000".to_owned()),
            port: Some(3000),
            restart: Restart::Always,
            start: true,
        }
    }

    #[test]
    fn services_are_checked_and_the_one_at_fault_is_named() {
        check_services(&[service("web"), service("db")]).unwrap();
        let with = |change: fn(&mut Service)| {
            let mut service = service("web");
            change(&mut service);
            vec![service]
        };
        for bad in [
            vec![service("web"), service("web")],
            with(|service| service.argv.clear()),
            with(|service| service.argv.push("a\0b".to_owned())),
            with(|service| service.cwd = Some("work".to_owned())),
            with(|service| service.user = Some("a b".to_owned())),
            with(|service| service.port = Some(0)),
            with(|service| drop(service.env.insert("A=B".to_owned(), String::new()))),
        ] {
            let refused = check_services(&bad).unwrap_err();
            assert_eq!(refused.field, "services");
            assert!(refused.reason.contains("`web`"), "{refused}");
        }
        let many: Vec<Service> = (0..17).map(|n| service(&format!("s{n}"))).collect();
        assert!(check_services(&many).is_err());
    }
}
