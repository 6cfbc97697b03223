//! Network policies: converts the API's to the model's, and back.
//!
//! Texts become types here, so that an error names the place: `network.domains[2]: …`. What can
//! only be judged as a whole (regular expressions, URLs, bounds) the model checks, and its errors
//! name the place too.
//!
//! The value of a header that is set on the way goes in and never comes out: answers say `null`. A
//! client that reads a policy, changes it and sends it back sends that `null`, which then stands
//! for the existing value. It is taken from a rule for the *same domain* only: a value never goes
//! where its owner did not send it.

use std::collections::BTreeMap;

use sandkeep_client::types;
use sandkeep_core::model::{
    Action, Answer, Credential, DomainPattern, Mode, PairMatch, Policy, ProjectNetwork,
    RequestMatch, RequestRule, TextMatch,
};

use super::input::parsed;
use crate::error::ApiError;

/// Reads a policy that was sent as the field `at`. Values that were left out are those of `before`.
pub(crate) fn policy_in(
    at: &str,
    network: types::Network,
    before: Option<&Policy>,
) -> Result<Policy, ApiError> {
    let requests = network.requests.into_iter().enumerate();
    let requests = requests.map(|(index, rule)| {
        rule_in(&format!("{at}.requests[{index}]"), rule, before.map_or(&[], |it| &it.requests))
    });
    let policy = Policy {
        mode: match network.mode {
            types::NetworkMode::AllowAll => Mode::AllowAll,
            types::NetworkMode::DenyAll => Mode::DenyAll,
            types::NetworkMode::Custom => Mode::Custom,
        },
        domains: list(at, "domains", &network.domains)?,
        allow: list(at, "allow", &network.allow)?,
        deny: list(at, "deny", &network.deny)?,
        requests: requests.collect::<Result<_, _>>()?,
    };
    policy.check(at).map_err(|error| ApiError::invalid(error.to_string()))?;
    Ok(policy)
}

fn list<T>(at: &str, field: &str, texts: &[String]) -> Result<Vec<T>, ApiError>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    let each = |(index, text): (usize, &String)| parsed(&format!("{at}.{field}[{index}]"), text);
    texts.iter().enumerate().map(each).collect()
}

fn rule_in(
    at: &str,
    rule: types::RequestRule,
    before: &[RequestRule],
) -> Result<RequestRule, ApiError> {
    let domain: DomainPattern = parsed(&format!("{at}.domain"), &rule.domain)?;
    let matches = RequestMatch {
        methods: rule.matches.methods,
        path: rule.matches.path.map(text_in),
        query: rule.matches.query.into_iter().map(pair_in).collect(),
        headers: rule.matches.headers.into_iter().map(pair_in).collect(),
    };
    let action = match rule.action {
        types::RequestAction::Allow => Action::Allow,
        types::RequestAction::Deny => Action::Deny,
        types::RequestAction::Answer(answer) => Action::Answer(Answer {
            status: answer.status,
            headers: answer.headers,
            body: answer.body,
        }),
        types::RequestAction::Forward(forward) => {
            Action::Forward { url: forward.url, prefix: forward.prefix }
        }
        types::RequestAction::Headers(headers) => {
            let mut set = BTreeMap::new();
            for (name, value) in headers {
                let name = name.to_ascii_lowercase();
                let value = match value {
                    Some(value) => Credential::Plain(value.into()),
                    None => kept(before, &domain, &matches, &name).ok_or_else(|| {
                        ApiError::invalid(format!(
                            "{at}.action.headers.{name}: a value is needed; null leaves the one a rule for `{domain}` has, and none has this header"
                        ))
                    })?,
                };
                if set.insert(name.clone(), value).is_some() {
                    let place = format!("{at}.action.headers.{name}");
                    return Err(ApiError::invalid(format!("{place}: it is given twice")));
                }
            }
            Action::Headers(set)
        }
    };
    Ok(RequestRule { domain, matches, action })
}

/// The value a header has in a rule for this domain: in the one that looks the same, or else in the first.
fn kept(
    before: &[RequestRule],
    domain: &DomainPattern,
    matches: &RequestMatch,
    name: &str,
) -> Option<Credential> {
    let has = |rule: &RequestRule| match &rule.action {
        Action::Headers(headers) if rule.domain == *domain => headers.get(name).cloned(),
        _ => None,
    };
    let same = before.iter().filter(|rule| rule.matches == *matches).find_map(has);
    same.or_else(|| before.iter().find_map(has))
}

fn text_in(text: types::TextMatch) -> TextMatch {
    match text {
        types::TextMatch::Exact(text) => TextMatch::Exact(text),
        types::TextMatch::Prefix(text) => TextMatch::Prefix(text),
        types::TextMatch::Regex(text) => TextMatch::Regex(text),
    }
}

fn pair_in(pair: types::PairMatch) -> PairMatch {
    PairMatch { key: pair.key.map(text_in), value: pair.value.map(text_in) }
}

/// A policy as it is returned.
pub(crate) fn policy_out(policy: Policy) -> types::Network {
    types::Network {
        mode: match policy.mode {
            Mode::AllowAll => types::NetworkMode::AllowAll,
            Mode::DenyAll => types::NetworkMode::DenyAll,
            Mode::Custom => types::NetworkMode::Custom,
        },
        domains: policy.domains.iter().map(ToString::to_string).collect(),
        allow: policy.allow.iter().map(ToString::to_string).collect(),
        deny: policy.deny.iter().map(ToString::to_string).collect(),
        requests: policy.requests.into_iter().map(rule_out).collect(),
    }
}

fn rule_out(rule: RequestRule) -> types::RequestRule {
    types::RequestRule {
        domain: rule.domain.to_string(),
        matches: types::RequestMatch {
            methods: rule.matches.methods,
            path: rule.matches.path.map(text_out),
            query: rule.matches.query.into_iter().map(pair_out).collect(),
            headers: rule.matches.headers.into_iter().map(pair_out).collect(),
        },
        action: match rule.action {
            Action::Allow => types::RequestAction::Allow,
            Action::Deny => types::RequestAction::Deny,
            Action::Answer(answer) => types::RequestAction::Answer(types::DirectAnswer {
                status: answer.status,
                headers: answer.headers,
                body: answer.body,
            }),
            Action::Forward { url, prefix } => {
                types::RequestAction::Forward(types::Forward { url, prefix })
            }
            Action::Headers(headers) => types::RequestAction::Headers(
                headers.into_keys().map(|name| (name, None)).collect(),
            ),
        },
    }
}

fn text_out(text: TextMatch) -> types::TextMatch {
    match text {
        TextMatch::Exact(text) => types::TextMatch::Exact(text),
        TextMatch::Prefix(text) => types::TextMatch::Prefix(text),
        TextMatch::Regex(text) => types::TextMatch::Regex(text),
    }
}

fn pair_out(pair: PairMatch) -> types::PairMatch {
    types::PairMatch { key: pair.key.map(text_out), value: pair.value.map(text_out) }
}

/// Reads a project's word. Values that were left out are those of `before`.
pub(crate) fn project_in(
    network: types::ProjectNetwork,
    before: &ProjectNetwork,
) -> Result<ProjectNetwork, ApiError> {
    let bound = network.bound.map(|bound| policy_in("bound", bound, before.bound.as_ref()));
    Ok(ProjectNetwork {
        default: policy_in("default", network.default, Some(&before.default))?,
        bound: bound.transpose()?,
        max_connections: network.max_connections,
    })
}

/// A project's policy as it is returned.
pub(crate) fn project_out(network: ProjectNetwork) -> types::ProjectNetwork {
    types::ProjectNetwork {
        default: policy_out(network.default),
        bound: network.bound.map(policy_out),
        max_connections: network.max_connections,
    }
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types;
    use sandkeep_core::model::{Action, Credential, Policy};

    use super::{policy_in, policy_out};

    fn read(text: &str, before: Option<&Policy>) -> Result<Policy, String> {
        let network: types::Network = serde_json::from_str(text).unwrap();
        policy_in("network", network, before).map_err(|error| error.into_body().message)
    }

    fn value(policy: &Policy) -> String {
        let Action::Headers(headers) = &policy.requests[0].action else { panic!("headers") };
        match headers.values().next().unwrap() {
            Credential::Plain(text) => text.to_string(),
            Credential::Sealed(text) => format!("sealed {text}"),
        }
    }

    #[test]
    fn values_go_in_and_never_come_out() {
        let text = r#"{"mode":"custom","domains":["a.com"],"requests":[{"domain":"a.com","action":{"headers":{"authorization":"s3cret"}}}]}"#;
        let policy = read(text, None).unwrap();
        assert_eq!(value(&policy), "s3cret");
        let told = serde_json::to_string(&policy_out(policy.clone())).unwrap();
        assert_eq!(told, text.replace(r#""s3cret""#, "null"));
        // What was returned may be sent back, and stands for the existing value.
        assert_eq!(value(&read(&told, Some(&policy)).unwrap()), "s3cret");
        // Not for another domain, nor for another header.
        for (other, named) in [
            (told.replace(r#""domain":"a.com""#, r#""domain":"b.com""#), "`b.com`"),
            (told.replace("authorization", "cookie"), "headers.cookie"),
        ] {
            let refused = read(&other, Some(&policy)).unwrap_err();
            assert!(refused.starts_with("network.requests[0].action.headers."), "{refused}");
            assert!(refused.contains(named), "{refused}");
        }
        assert!(read(&told, None).is_err());
    }

    #[test]
    fn texts_that_are_wrong_are_named_by_their_place() {
        for (text, place) in [
            (r#"{"mode":"custom","domains":["a.com","-"]}"#, "network.domains[1]: "),
            (r#"{"mode":"custom","allow":["10.0.0.0/33"]}"#, "network.allow[0]: "),
            (r#"{"mode":"custom","deny":["10.0.0.0/8","x"]}"#, "network.deny[1]: "),
            (
                r#"{"mode":"custom","requests":[{"domain":"10.0.0.1","action":"deny"}]}"#,
                "network.requests[0].domain: ",
            ),
        ] {
            let refused = read(text, None).unwrap_err();
            assert!(refused.starts_with(place), "{refused}");
        }
    }
}
