//! Names of images in registries.

use std::fmt;
use std::net::IpAddr;

use super::digest;
use super::error::ImageError;

const HUB: &str = "docker.io";

/// `[registry/]repository[:tag][@digest]`, parsed. The defaults are Docker Hub and `latest`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// `docker.io`, `localhost:5000`.
    pub registry: String,
    /// `library/debian`.
    pub repository: String,
    /// `12`; not looked at when there is a digest.
    pub tag: String,
    /// `sha256:…`.
    pub digest: Option<String>,
}

impl std::str::FromStr for Reference {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        let bad = |reason: &str| ImageError::BadName {
            name: text.chars().take(120).collect(),
            reason: reason.to_owned(),
        };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (text, None),
        };
        if digest.is_some_and(|digest| digest::digits(digest).is_none()) {
            return Err(bad("after `@` comes `sha256:` and 64 digits of hex"));
        }
        // A registry has a dot or a port, or is this machine; anything else begins a repository.
        let (registry, rest) = match rest.split_once('/') {
            Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => {
                (first, rest)
            }
            _ => (HUB, rest),
        };
        let (repository, tag) = match rest.rsplit_once(':') {
            Some((repository, tag)) => (repository, tag),
            None => (rest, "latest"),
        };
        let registry = if matches!(registry, "index.docker.io" | "registry-1.docker.io") {
            HUB
        } else {
            registry
        };
        check(registry, repository, tag).map_err(bad)?;
        let repository = if registry == HUB && !repository.contains('/') {
            format!("library/{repository}")
        } else {
            repository.to_owned()
        };
        Ok(Self {
            registry: registry.to_ascii_lowercase(),
            repository,
            tag: tag.to_owned(),
            digest: digest.map(str::to_owned),
        })
    }
}

fn check(registry: &str, repository: &str, tag: &str) -> Result<(), &'static str> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let part = |part: &str| {
        part.bytes().all(|b| plain(b) || matches!(b, b'.' | b'_' | b'-'))
            && part.bytes().next().is_some_and(plain)
            && part.bytes().last().is_some_and(plain)
    };
    if repository.len() > 255 || !repository.split('/').all(part) {
        return Err(
            "a repository is lowercase letters and digits, with `.`, `_`, `-` and `/` between them",
        );
    }
    let in_tag = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if !(1..=128).contains(&tag.len()) || !tag.bytes().all(in_tag) || tag.starts_with(['.', '-']) {
        return Err("a tag is up to 128 letters, digits, `.`, `_` and `-`");
    }
    let in_host =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b':' | b'[' | b']');
    if registry.len() > 255 || !registry.bytes().all(in_host) {
        return Err("a registry is a host name, with `:` and a port if need be");
    }
    Ok(())
}

impl Reference {
    /// What the registry is asked for: the digest, or the tag.
    pub(super) fn wanted(&self) -> &str {
        self.digest.as_deref().unwrap_or(&self.tag)
    }

    /// The host that speaks for the registry.
    pub(super) fn host(&self) -> &str {
        if self.registry == HUB { "registry-1.docker.io" } else { &self.registry }
    }

    /// The names under which docker's configuration may know the registry.
    pub(super) fn known_as(&self) -> Vec<&str> {
        if self.registry == HUB {
            vec!["https://index.docker.io/v1/", "index.docker.io", HUB]
        } else {
            vec![&self.registry]
        }
    }

    /// Whether the registry is on this machine, where nothing can listen in.
    pub(super) fn is_loopback(&self) -> bool {
        let host = match self.registry.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or(rest),
            None => self.registry.split(':').next().unwrap_or(&self.registry),
        };
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

/// The short form, as people write it: the name the image is kept under.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.registry == HUB {
            f.write_str(self.repository.strip_prefix("library/").unwrap_or(&self.repository))?;
        } else {
            write!(f, "{}/{}", self.registry, self.repository)?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => write!(f, ":{}", self.tag),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Reference;

    #[test]
    fn references_are_understood_as_docker_does() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (text, registry, repository, wanted, short) in [
            ("debian", "docker.io", "library/debian", "latest", "debian:latest"),
            ("debian:12", "docker.io", "library/debian", "12", "debian:12"),
            ("docker.io/library/debian:12", "docker.io", "library/debian", "12", "debian:12"),
            ("me/app", "docker.io", "me/app", "latest", "me/app:latest"),
            ("localhost/app", "localhost", "app", "latest", "localhost/app:latest"),
            ("127.0.0.1:5000/a/b:1", "127.0.0.1:5000", "a/b", "1", "127.0.0.1:5000/a/b:1"),
            (
                &format!("ghcr.io/a/b:1@{digest}"),
                "ghcr.io",
                "a/b",
                &digest,
                &format!("ghcr.io/a/b@{digest}"),
            ),
        ] {
            let read: Reference = text.parse().expect("a good reference");
            assert_eq!((&*read.registry, &*read.repository), (registry, repository), "{text}");
            assert_eq!((read.wanted(), &*read.to_string()), (wanted, short), "{text}");
        }
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        for text in
            ["", ":", "a:", "A", "a/../b", "a//b", "a@b", "a b", "x.y/", "a:-x", "a.b/c?d", "-a"]
        {
            assert!(text.parse::<Reference>().is_err(), "{text}");
        }
    }

    #[test]
    fn loopback_is_told_from_the_world() {
        for (text, loopback) in [
            ("localhost:5000/a", true),
            ("127.0.0.2:1/a", true),
            ("[::1]:5000/a", true),
            ("10.0.0.1:5000/a", false),
            ("localhost.example/a", false),
        ] {
            let read: Reference = text.parse().expect("a good reference");
            assert_eq!(read.is_loopback(), loopback, "{text}");
        }
    }
}
