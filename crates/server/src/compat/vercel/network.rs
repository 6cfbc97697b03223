//! Network policies: converts theirs to ours, and back.
//!
//! What is asked and what is answered differ in shape: a client sends `{allow, subnets}`, with rules under each
//! domain, and reads `{mode: "custom", allowedDomains, injectionRules, …}`, in which values of headers do not occur.
//!
//! Two of their rules are about the same request when their domains overlap. Ours are one list whose first match
//! decides, so the rules of a more exact domain come first.

use std::collections::BTreeMap;

use sandkeep_core::db::{Filter, Page};
use sandkeep_core::engine::Engine;
use sandkeep_core::model::{
    Action, AddressRule, Answer, Credential, DomainPattern, DomainRule, Mode, PairMatch, Patch,
    Policy, RequestMatch, RequestRule, Sandbox, TextMatch,
};
use serde_json::{Map, Value, json};

use super::protocol::error::VercelError;
use super::protocol::input::Fields;
use super::protocol::ordered::Ordered;
use crate::api::App;

/// Where earlier versions noted the policy, when there was no network to keep it in.
pub(super) const NOTE: &str = "vercel.network";
/// The prefix of the headers that name a request's original destination to a proxy of theirs.
const FORWARDED: &str = "vercel-forwarded-";

/// Where it is noted how a policy was written, where that differs from how we would return it.
pub(super) const AS_WRITTEN: &str = "vercel.networkPolicy";
/// The size of a note is limited. A longer policy is returned in our own order.
const LONGEST_NOTE: usize = 32 << 10;

/// Reads a request's policy; returns also the note about how it was written.
pub(super) fn read(asked: &Ordered) -> Result<(Policy, Option<String>), VercelError> {
    let mut fields = Fields::of("networkPolicy", asked.to_value())?;
    let mode = match fields.text("mode")?.as_deref() {
        Some("allow-all") => return plain(&fields, Mode::AllowAll),
        Some("deny-all") => return plain(&fields, Mode::DenyAll),
        Some("default-allow") => Mode::AllowAll,
        Some("custom" | "default-deny") | None => Mode::Custom,
        Some(_) => {
            return Err(VercelError::bad(
                "`networkPolicy.mode` should be equal to one of the allowed values [\"allow-all\", \"deny-all\", \"custom\"].",
            ));
        }
    };
    let mut policy = Policy { mode, ..Policy::default() };
    let mut rules = Vec::new();
    let allow = asked.get("allow");
    match fields.any("allow") {
        None => {}
        Some(Value::Array(list)) => {
            for (index, domain) in list.into_iter().enumerate() {
                policy.domains.push(domain_in(&format!("allow[{index}]"), &domain)?);
            }
        }
        Some(Value::Object(_)) => {
            for (domain, list) in allow.map(Ordered::entries).unwrap_or_default() {
                let place = format!("allow.{domain}");
                policy.domains.push(domain_in(&place, &Value::String(domain.clone()))?);
                let pattern = &policy.domains[policy.domains.len() - 1].pattern;
                let Ordered::Array(list) = list else {
                    return Err(VercelError::bad(format!(
                        "`networkPolicy.{place}` should be array."
                    )));
                };
                for (index, rule) in list.iter().enumerate() {
                    let at = format!("networkPolicy.{place}[{index}]");
                    rules.push(rule_in(&at, domain, pattern, rule)?);
                }
            }
        }
        Some(_) => {
            return Err(VercelError::bad("`networkPolicy.allow` should be array or object."));
        }
    }
    if let Some(mut subnets) = fields.object("subnets")? {
        policy.allow = addresses(&mut subnets, "subnets.", "allow")?;
        policy.deny = addresses(&mut subnets, "subnets.", "deny")?;
        subnets.end()?;
    }
    legacy(asked, &mut fields, &mut policy, &mut rules)?;
    fields.end()?;
    let (mut requests, as_written): (Vec<RequestRule>, Vec<RuleResponse>) =
        rules.into_iter().unzip();
    // A stable sort: rules of one domain stay in the order they were written.
    requests.sort_by_key(|rule| std::cmp::Reverse(exactness(&rule.domain)));
    policy.requests = requests;
    policy
        .check("networkPolicy")
        .map_err(|error| VercelError::bad(format!("`{}`: {}.", error.field, error.reason)))?;
    let note = note(asked, &policy, as_written);
    Ok((policy, note))
}

/// The note about how a policy was written: none, if it is returned like that anyway.
fn note(asked: &Ordered, policy: &Policy, rules: Vec<RuleResponse>) -> Option<String> {
    let texts = |list: Option<&Ordered>| -> Vec<String> {
        let list = list.map(Ordered::items).unwrap_or_default();
        list.iter().filter_map(Ordered::text).map(str::to_owned).collect()
    };
    let allow = asked.get("allow");
    let mut domains = texts(allow);
    let keys = allow.map(Ordered::entries).unwrap_or_default();
    domains.extend(keys.iter().map(|(domain, _)| domain.clone()));
    domains.extend(texts(asked.get("allowedDomains")));
    let subnets = |name: &str, legacy: &str| {
        let mut all = texts(asked.get("subnets").and_then(|subnets| subnets.get(name)));
        all.extend(texts(asked.get(legacy)));
        all
    };
    let addresses = [subnets("allow", "allowedCIDRs"), subnets("deny", "deniedCIDRs")];
    let as_written = tell(policy.mode, &domains, &addresses, rules);
    let told = told(policy);
    if told == as_written {
        return None;
    }
    let note = json!({ "told": told, "written": as_written }).to_string();
    Some(note).filter(|note| note.len() <= LONGEST_NOTE)
}

fn plain(fields: &Fields, mode: Mode) -> Result<(Policy, Option<String>), VercelError> {
    fields.end()?;
    Ok((Policy { mode, ..Policy::default() }, None))
}

/// What the older form of a policy says.
fn legacy(
    asked: &Ordered,
    fields: &mut Fields,
    policy: &mut Policy,
    rules: &mut Vec<(RequestRule, RuleResponse)>,
) -> Result<(), VercelError> {
    for (index, domain) in fields.list("allowedDomains")?.unwrap_or_default().iter().enumerate() {
        policy.domains.push(domain_in(&format!("allowedDomains[{index}]"), domain)?);
    }
    policy.allow.extend(addresses(fields, "", "allowedCIDRs")?);
    policy.deny.extend(addresses(fields, "", "deniedCIDRs")?);
    for name in ["injectionRules", "forwardRules", "responseRules"] {
        let written = asked.get(name).map(Ordered::items).unwrap_or_default();
        for (index, rule) in fields.list(name)?.unwrap_or_default().into_iter().enumerate() {
            let at = format!("networkPolicy.{name}[{index}]");
            let mut rule = Fields::of(&at, rule)?;
            let domain = rule.needed("domain")?;
            let place = format!("{name}[{index}].domain");
            let pattern = domain_in(&place, &Value::String(domain.clone()))?.pattern;
            let mut said = Vec::new();
            said.extend(rule.any("match").map(|it| ("match".to_owned(), it.into())));
            match name {
                "injectionRules" => {
                    let headers = rule.any("headers").unwrap_or_else(|| json!({}));
                    let written = written.get(index).and_then(|rule| rule.get("headers")).cloned();
                    let headers = ("headers".to_owned(), written.unwrap_or(headers.into()));
                    let transform = Ordered::Array(vec![Ordered::Object(vec![headers])]);
                    said.push(("transform".to_owned(), transform));
                    rule.end()?;
                }
                "forwardRules" => {
                    let url = Value::String(rule.needed("forwardURL")?);
                    said.push(("forwardURL".to_owned(), url.into()));
                    rule.end()?;
                }
                _ => said.push(("response".to_owned(), rule.into_value().into())),
            }
            rules.push(rule_in(&at, &domain, &pattern, &Ordered::Object(said))?);
        }
    }
    Ok(())
}

fn domain_in(place: &str, value: &Value) -> Result<DomainRule, VercelError> {
    let wrong = |problem: &str| VercelError::bad(format!("`networkPolicy.{place}` {problem}."));
    let text = value.as_str().ok_or_else(|| wrong("should be string"))?;
    let pattern: DomainPattern =
        text.parse().map_err(|error| wrong(&format!("should be a domain: {error}")))?;
    Ok(DomainRule { pattern, ports: Vec::new() })
}

fn addresses(fields: &mut Fields, at: &str, name: &str) -> Result<Vec<AddressRule>, VercelError> {
    let texts = fields.texts(name)?.unwrap_or_default();
    let read = |(index, text): (usize, String)| match text.parse::<AddressRule>() {
        Ok(rule) if rule.ports.is_empty() => Ok(rule),
        _ => Err(VercelError::bad(format!(
            "`networkPolicy.{at}{name}[{index}]` should be a CIDR, like `10.0.0.0/8`."
        ))),
    };
    texts.into_iter().enumerate().map(read).collect()
}

/// Whole names are more exact than patterns, and of those the longer ones.
fn exactness(domain: &DomainPattern) -> (bool, usize) {
    let text = domain.as_str();
    (!text.contains('*'), if text == "*" { 0 } else { text.split('.').count() })
}

/// The list of an answer in which a rule is returned, and its form there.
type RuleResponse = (&'static str, Value);

/// Reads a rule of a domain that was `written` so; returns it also in its form as it was written.
fn rule_in(
    at: &str,
    written: &str,
    domain: &DomainPattern,
    value: &Ordered,
) -> Result<(RequestRule, RuleResponse), VercelError> {
    let mut rule = Fields::of(at, value.to_value())?;
    let matches = rule.object("match")?.map(match_in).transpose()?.unwrap_or_default();
    let actions = [rule.any("transform"), rule.any("forwardURL"), rule.any("response")];
    rule.end()?;
    let action = match actions {
        [Some(Value::Array(list)), None, None] => transform_in(at, list)?,
        [Some(_), None, None] => {
            return Err(VercelError::bad(format!("`{at}.transform` should be array.")));
        }
        [None, Some(Value::String(url)), None] => {
            if url.contains(['?', '#']) {
                return Err(VercelError::bad(format!(
                    "`{at}.forwardURL` should have no query string and no fragment."
                )));
            }
            Action::Forward { url, prefix: Some(FORWARDED.to_owned()) }
        }
        [None, Some(_), None] => {
            return Err(VercelError::bad(format!("`{at}.forwardURL` should be string.")));
        }
        [None, None, Some(response)] => response_in(&format!("{at}.response"), response)?,
        _ => {
            return Err(VercelError::bad(format!(
                "`{at}` should have exactly one of `transform`, `forwardURL` and `response`."
            )));
        }
    };
    let rule = RequestRule { domain: domain.clone(), matches, action };
    // Alone, so that the error uses the words it was written in.
    let alone = Policy { mode: Mode::Custom, requests: vec![rule.clone()], ..Policy::default() };
    alone.check(at).map_err(|error| {
        let mut field = error.field.replacen(".requests[0]", "", 1);
        for (ours, theirs) in [
            (".action.forward.url", ".forwardURL"),
            (".action.headers", ".transform.headers"),
            (".action.answer.status", ".response.statusCode"),
            (".action.answer", ".response"),
            (".match.methods", ".match.method"),
            (".match.query", ".match.queryString"),
        ] {
            field = field.replacen(ours, theirs, 1);
        }
        VercelError::bad(format!("`{field}`: {}.", error.reason))
    })?;
    let (list, mut told) = rule_told(&rule);
    told["domain"] = json!(written);
    if matches!(rule.action, Action::Headers(_)) {
        told["headerNames"] = json!(header_names(value));
    }
    Ok((rule, (list, told)))
}

/// The names of the headers that a rule sets, as they were written.
fn header_names(rule: &Ordered) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for transform in rule.get("transform").map(Ordered::items).unwrap_or_default() {
        for (name, _) in transform.get("headers").map(Ordered::entries).unwrap_or_default() {
            if !names.iter().any(|other| other.eq_ignore_ascii_case(name)) {
                names.push(name);
            }
        }
    }
    names
}

fn match_in(mut fields: Fields) -> Result<RequestMatch, VercelError> {
    let matches = RequestMatch {
        methods: fields.texts("method")?.unwrap_or_default(),
        path: fields.object("path")?.map(text_in).transpose()?.flatten(),
        query: pairs_in(&mut fields, "queryString")?,
        headers: pairs_in(&mut fields, "headers")?,
    };
    fields.end()?;
    Ok(matches)
}

fn pairs_in(fields: &mut Fields, name: &str) -> Result<Vec<PairMatch>, VercelError> {
    let list = fields.list(name)?.unwrap_or_default();
    let pair = |value| {
        let mut pair = Fields::of(name, value)?;
        let (key, value) = (pair.object("key")?, pair.object("value")?);
        pair.end()?;
        Ok(PairMatch {
            key: key.map(text_in).transpose()?.flatten(),
            value: value.map(text_in).transpose()?.flatten(),
        })
    };
    list.into_iter().map(pair).collect()
}

fn text_in(mut fields: Fields) -> Result<Option<TextMatch>, VercelError> {
    let said = [fields.text("exact")?, fields.text("startsWith")?, fields.text("regex")?];
    fields.end()?;
    match said {
        [Some(text), None, None] => Ok(Some(TextMatch::Exact(text))),
        [None, Some(text), None] => Ok(Some(TextMatch::Prefix(text))),
        [None, None, Some(text)] => Ok(Some(TextMatch::Regex(text))),
        [None, None, None] => Ok(None),
        _ => {
            Err(VercelError::bad("a matcher should have one of `exact`, `startsWith` and `regex`."))
        }
    }
}

fn transform_in(at: &str, list: Vec<Value>) -> Result<Action, VercelError> {
    let mut headers = BTreeMap::new();
    for (index, transform) in list.into_iter().enumerate() {
        let mut transform = Fields::of(&format!("{at}.transform[{index}]"), transform)?;
        for (name, value) in transform.words("headers")?.unwrap_or_default() {
            headers.insert(name.to_ascii_lowercase(), Credential::Plain(value.into()));
        }
        transform.end()?;
    }
    // A rule that changes nothing still claims its requests: those after it are not asked.
    Ok(if headers.is_empty() { Action::Allow } else { Action::Headers(headers) })
}

fn response_in(at: &str, value: Value) -> Result<Action, VercelError> {
    let mut response = Fields::of(at, value)?;
    let status = response.number("statusCode", 200..=599)?;
    let status = status.and_then(|status| u16::try_from(status).ok());
    let Some(status) = status else {
        return Err(VercelError::bad(format!("missing required property `{at}.statusCode`.")));
    };
    let mut headers = BTreeMap::new();
    for (name, value) in response.words("headers")?.unwrap_or_default() {
        if headers.insert(name.to_ascii_lowercase(), value).is_some() {
            return Err(VercelError::bad(format!("`{at}.headers` should NOT have duplicates.")));
        }
    }
    let (body, kind) = (response.text("body")?, response.text("contentType")?);
    response.end()?;
    if body.is_some() && kind.is_none() {
        return Err(VercelError::bad(format!("`{at}.contentType` should be given with a body.")));
    }
    if body.is_some() && matches!(status, 204 | 205 | 304) {
        return Err(VercelError::bad(format!("`{at}.body` is not allowed with {status}.")));
    }
    headers.extend(kind.map(|kind| ("content-type".to_owned(), kind)));
    Ok(Action::Answer(Answer { status, headers, body: body.unwrap_or_default() }))
}

/// What a sandbox may reach, as it is returned: its own policy, or its project's.
pub(super) fn of(app: &App, sandbox: &Sandbox) -> Value {
    match &sandbox.config.network {
        Some(policy) => {
            let told = told(policy);
            let note = sandbox.config.notes.get(AS_WRITTEN);
            let note = note.and_then(|note| serde_json::from_str::<Value>(note).ok());
            match note {
                // A note about another policy than the one in force does not count.
                Some(mut note) if note["told"] == told => note["written"].take(),
                _ => told,
            }
        }
        None => app
            .engine
            .project_network(&sandbox.project)
            .map_or_else(|_| told(&Policy::default()), |project| told(&project.default)),
    }
}

fn told(policy: &Policy) -> Value {
    let domains: Vec<String> = policy.domains.iter().map(ToString::to_string).collect();
    let addresses = [&policy.allow, &policy.deny]
        .map(|list| list.iter().map(ToString::to_string).collect::<Vec<String>>());
    tell(policy.mode, &domains, &addresses, policy.requests.iter().map(rule_told).collect())
}

/// A policy in the form of an answer. `addresses` are those that are allowed and those that are denied.
fn tell(
    mode: Mode,
    domains: &[String],
    addresses: &[Vec<String>; 2],
    rules: Vec<RuleResponse>,
) -> Value {
    let mut said = Map::new();
    let word = match mode {
        Mode::AllowAll => "allow-all",
        Mode::DenyAll => "deny-all",
        Mode::Custom => "custom",
    };
    said.insert("mode".to_owned(), json!(word));
    if mode == Mode::Custom {
        said.insert("allowedDomains".to_owned(), json!(domains));
    }
    for (name, list) in ["allowedCIDRs", "deniedCIDRs"].into_iter().zip(addresses) {
        if !list.is_empty() {
            said.insert(name.to_owned(), json!(list));
        }
    }
    for (name, rule) in rules {
        let list = said.entry(name).or_insert_with(|| json!([]));
        list.as_array_mut().into_iter().for_each(|list| list.push(rule.clone()));
    }
    Value::Object(said)
}

fn rule_told(rule: &RequestRule) -> RuleResponse {
    let mut one = rule_out(rule);
    match &rule.action {
        Action::Headers(headers) => {
            let names: Vec<&String> = headers.keys().collect();
            one["headerNames"] = json!(names);
            ("injectionRules", one)
        }
        Action::Allow => {
            one["headerNames"] = json!([]);
            ("injectionRules", one)
        }
        Action::Forward { url, .. } => {
            one["forwardURL"] = json!(url);
            ("forwardRules", one)
        }
        Action::Answer(answer) => {
            one["statusCode"] = json!(answer.status);
            ("responseRules", one)
        }
        Action::Deny => {
            one["statusCode"] = json!(403);
            ("responseRules", one)
        }
    }
}

fn rule_out(rule: &RequestRule) -> Value {
    let RequestMatch { methods, path, query, headers } = &rule.matches;
    let mut looks = Map::new();
    let mut insert = |name: &str, value: Option<Value>| {
        looks.extend(value.map(|value| (name.to_owned(), value)));
    };
    let pairs = |list: &[PairMatch]| {
        let pair = |pair: &PairMatch| {
            let mut said = Map::new();
            said.extend(pair.key.as_ref().map(|it| ("key".to_owned(), text_out(it))));
            said.extend(pair.value.as_ref().map(|it| ("value".to_owned(), text_out(it))));
            Value::Object(said)
        };
        (!list.is_empty()).then(|| list.iter().map(pair).collect())
    };
    insert("path", path.as_ref().map(text_out));
    insert("method", (!methods.is_empty()).then(|| json!(methods)));
    insert("queryString", pairs(query));
    insert("headers", pairs(headers));
    let mut said = json!({ "domain": rule.domain.as_str() });
    if !looks.is_empty() {
        said["matchDimensions"] = json!(looks.keys().collect::<Vec<_>>());
        said["match"] = Value::Object(looks);
    }
    said
}

fn text_out(text: &TextMatch) -> Value {
    match text {
        TextMatch::Exact(text) => json!({ "exact": text }),
        TextMatch::Prefix(text) => json!({ "startsWith": text }),
        TextMatch::Regex(text) => json!({ "regex": text }),
    }
}

/// Turns policies that earlier versions only noted into what sandboxes really have. `deny-all` was easy to keep
/// while there was no network; it is kept now.
pub(crate) async fn adopt_notes(engine: &Engine) {
    for project in engine.projects() {
        let found = engine.list(&project.name, &Filter::default(), &Page::all()).await;
        let sandboxes = match found {
            Ok(found) => found.items,
            Err(error) => {
                tracing::error!(project = %project.name, %error, "cannot read recorded network policies");
                continue;
            }
        };
        for sandbox in sandboxes {
            let Some(note) = sandbox.config.notes.get(NOTE) else { continue };
            let own = sandbox.config.network.clone();
            let network = own.or_else(|| serde_json::from_str(note).ok().map(noted));
            let notes = [(NOTE.to_owned(), None)].into();
            let patch = Patch { network: Some(network), notes, ..Patch::default() };
            if let Err(error) = engine.update(&project.name, &sandbox.name, patch).await {
                tracing::error!(sandbox = %sandbox.name, %error, "cannot apply a recorded network policy");
            }
        }
    }
}

/// What a note says. One that does not read allows nothing.
fn noted(note: Value) -> Policy {
    let mode = match note["mode"].as_str() {
        Some("allow-all") => Mode::AllowAll,
        Some("custom") => Mode::Custom,
        _ => Mode::DenyAll,
    };
    Policy { mode, ..Policy::default() }
}

#[cfg(test)]
mod tests;
