//! Commands about what sandboxes may reach, and what they reached.

use std::collections::HashSet;
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use sandkeep_client::ListConnections;
use sandkeep_client::types::{
    Connection, Network, NetworkMode, NetworkSummary, ProjectNetwork, RequestAction, RequestRule,
    SandboxNetwork, SetNetwork, TextMatch, Verdict,
};

use super::{Context, bytes, facts, or_dash, word};
use crate::args::{
    DefaultModeArg, ModeArg, NetArgs, NetworkArgs, NetworkSettings, ProjectNetworkArgs,
};
use crate::failure::Failure;
use crate::screen::{Paint, Table};
use crate::when;

/// How often `--follow` looks.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// What the options say a sandbox may reach; `Some(None)` is what its project says.
pub(crate) fn wished(settings: &NetworkSettings) -> Result<Option<Option<Network>>, Failure> {
    let NetworkSettings { network, allow_domain, allow_cidr, deny_cidr, network_file } = settings;
    let allows = !allow_domain.is_empty() || !allow_cidr.is_empty();
    let mut policy = match (network_file, network) {
        (Some(file), _) => read(file)?,
        (None, None) if !allows && deny_cidr.is_empty() => return Ok(None),
        (None, _) => Network::default(),
    };
    match network {
        Some(ModeArg::Default) if network_file.is_some() || allows || !deny_cidr.is_empty() => {
            let hint = "leave one of them out";
            return Err(Failure::here(
                "`--network default` cannot be combined with other network options",
            )
            .with_hint(hint));
        }
        Some(ModeArg::Default) => return Ok(Some(None)),
        Some(ModeArg::AllowAll) => policy.mode = NetworkMode::AllowAll,
        Some(ModeArg::DenyAll) => policy.mode = NetworkMode::DenyAll,
        Some(ModeArg::Custom) => policy.mode = NetworkMode::Custom,
        None if allows => policy.mode = NetworkMode::Custom,
        None => {}
    }
    policy.domains.extend(allow_domain.iter().cloned());
    policy.allow.extend(allow_cidr.iter().cloned());
    policy.deny.extend(deny_cidr.iter().cloned());
    Ok(Some(Some(policy)))
}

/// Reads a policy from a file: the policy itself, or what `keep network --json` prints.
fn read(path: &Path) -> Result<Network, Failure> {
    let cannot = || format!("cannot read the policy in `{}`", path.display());
    let mut text = String::new();
    let outcome = match path.as_os_str() == "-" {
        true => std::io::stdin().read_to_string(&mut text).map(|_| ()),
        false => std::fs::read_to_string(path).map(|read| text = read),
    };
    outcome.map_err(|error| Failure::caused(cannot(), error))?;
    let wrong = |error: serde_json::Error| {
        let hint = "docs/NETWORK.md shows what a policy looks like";
        Failure::caused(cannot(), error).with_hint(hint)
    };
    let value: serde_json::Value = serde_json::from_str(&text).map_err(wrong)?;
    let policy = match value.get("network") {
        Some(inner) => inner.clone(),
        None => value,
    };
    serde_json::from_value(policy).map_err(wrong)
}

pub(super) async fn network(context: &Context, args: &NetworkArgs) -> Result<(), Failure> {
    let wish = match args.default {
        true => Some(None),
        false => wished(&args.settings)?,
    };
    let answer = if args.add || args.remove {
        if wish.is_none() {
            let what = if args.add { "--add" } else { "--remove" };
            let hint = "name it with --allow-domain, --allow-cidr or --deny-cidr";
            return Err(Failure::here(format!(
                "{what} needs at least one --allow or --deny option"
            ))
            .with_hint(hint));
        }
        let there = context.client.network(&args.name).await?.network;
        let network = match args.add {
            true => added(there, &args.settings)?,
            false => removed(there, &args.settings)?,
        };
        let request = SetNetwork { network: Some(network) };
        context.client.set_network(&args.name, &request).await?
    } else {
        match wish {
            Some(network) => {
                context.client.set_network(&args.name, &SetNetwork { network }).await?
            }
            None => context.client.network(&args.name).await?,
        }
    };
    context.screen.answer(&answer, |answer| in_force(context.screen.paint, answer))
}

fn added(mut there: Network, more: &NetworkSettings) -> Result<Network, Failure> {
    // Addresses are useful there too: `allow-all` leaves private networks closed that no rule
    // names.
    let allows = !more.allow_domain.is_empty();
    match there.mode {
        NetworkMode::AllowAll if allows => {
            let hint = "without --add, only what is named is allowed";
            return Err(Failure::here("the policy already allows everything").with_hint(hint));
        }
        NetworkMode::DenyAll => there.mode = NetworkMode::Custom,
        NetworkMode::AllowAll | NetworkMode::Custom => {}
    }
    for (list, new) in [
        (&mut there.domains, &more.allow_domain),
        (&mut there.allow, &more.allow_cidr),
        (&mut there.deny, &more.deny_cidr),
    ] {
        for one in new {
            if !list.contains(one) {
                list.push(one.clone());
            }
        }
    }
    Ok(there)
}

fn removed(mut there: Network, gone: &NetworkSettings) -> Result<Network, Failure> {
    for (option, list, gone) in [
        ("--allow-domain", &mut there.domains, &gone.allow_domain),
        ("--allow-cidr", &mut there.allow, &gone.allow_cidr),
        ("--deny-cidr", &mut there.deny, &gone.deny_cidr),
    ] {
        for one in gone {
            if !list.contains(one) {
                let hint = "`keep network NAME` shows what there is";
                let what = format!("there is no `{option} {one}` to remove");
                return Err(Failure::here(what).with_hint(hint));
            }
            list.retain(|there| there != one);
        }
    }
    Ok(there)
}

/// A policy in a few words.
pub(crate) fn in_short(network: &Network) -> String {
    let mut parts = Vec::new();
    for (count, one, many) in [
        (network.domains.len(), "domain", "domains"),
        (network.allow.len(), "address", "addresses"),
        (network.deny.len(), "denied", "denied"),
        (network.requests.len(), "request rule", "request rules"),
    ] {
        match count {
            0 => {}
            1 => parts.push(format!("1 {one}")),
            count => parts.push(format!("{count} {many}")),
        }
    }
    match parts.is_empty() {
        true => word(network.mode),
        false => format!("{}: {}", word(network.mode), parts.join(", ")),
    }
}

fn lines(name: &'static str, network: &Network) -> Vec<(&'static str, String)> {
    let mut lines = vec![(name, word(network.mode))];
    lines.extend(network.domains.iter().map(|it| ("  domain", it.clone())));
    lines.extend(network.allow.iter().map(|it| ("  allow", it.clone())));
    lines.extend(network.deny.iter().map(|it| ("  deny", it.clone())));
    lines.extend(network.requests.iter().map(|it| ("  request", request_line(it))));
    lines
}

fn request_line(rule: &RequestRule) -> String {
    let text = |text: &TextMatch| match text {
        TextMatch::Exact(text) => text.clone(),
        TextMatch::Prefix(text) => format!("{text}…"),
        TextMatch::Regex(text) => format!("/{text}/"),
    };
    let mut line = rule.domain.clone();
    if !rule.matches.methods.is_empty() {
        line = format!("{} {line}", rule.matches.methods.join(","));
    }
    line.extend(rule.matches.path.as_ref().map(|path| format!(" {}", text(path))));
    for (what, pairs) in [("query", &rule.matches.query), ("header", &rule.matches.headers)] {
        for pair in pairs {
            let half = |half: &Option<TextMatch>| half.as_ref().map_or("*".to_owned(), text);
            line.push_str(&format!(" {what} {}={}", half(&pair.key), half(&pair.value)));
        }
    }
    let action = match &rule.action {
        RequestAction::Allow => "allow".to_owned(),
        RequestAction::Deny => "deny".to_owned(),
        RequestAction::Answer(answer) => format!("answer {}", answer.status),
        RequestAction::Forward(forward) => format!("forward to {}", forward.url),
        RequestAction::Headers(headers) => {
            let names: Vec<&str> = headers.keys().map(String::as_str).collect();
            format!("set {}", names.join(", "))
        }
    };
    format!("{line} -> {action}")
}

fn in_force(paint: Paint, answer: &SandboxNetwork) -> String {
    let mut said = lines("network", &answer.network);
    if !answer.own {
        said[0].1.push_str(" (the project's default)");
    }
    said.extend(answer.bound.iter().flat_map(|bound| lines("bound", bound)));
    facts(paint, &said)
}

pub(super) async fn of_project(
    context: &Context,
    args: &ProjectNetworkArgs,
) -> Result<(), Failure> {
    let mut network = context.client.project_network(&args.name).await?;
    let before = network.clone();
    match (&args.default_file, args.default) {
        (Some(file), _) => network.default = read(file)?,
        (None, Some(DefaultModeArg::AllowAll)) => network.default = Network::default(),
        (None, Some(DefaultModeArg::DenyAll)) => {
            network.default = Network { mode: NetworkMode::DenyAll, ..Network::default() };
        }
        (None, None) => {}
    }
    match &args.bound_file {
        Some(file) => network.bound = Some(read(file)?),
        None if args.no_bound => network.bound = None,
        None => {}
    }
    match args.max_connections {
        Some(most) => network.max_connections = Some(most.get()),
        None if args.no_max_connections => network.max_connections = None,
        None => {}
    }
    if network != before {
        network = context.client.set_project_network(&args.name, &network).await?;
    }
    context.screen.answer(&network, |ProjectNetwork { default, bound, max_connections }| {
        let mut said = lines("default", default);
        match bound {
            Some(bound) => said.extend(lines("bound", bound)),
            None => said.push(("bound", "none".to_owned())),
        }
        let most = max_connections.map_or("half of the server's".to_owned(), |it| it.to_string());
        said.push(("connections", most));
        facts(context.screen.paint, &said)
    })
}

pub(super) async fn net(context: &Context, args: &NetArgs) -> Result<(), Failure> {
    let filter = ListConnections {
        verdict: args.denied.then_some(Verdict::Denied),
        session: args.session.clone(),
        host: args.host.clone(),
        since: args.since.clone(),
        open: args.open,
        limit: Some(args.limit.clamp(1, 1000)),
    };
    if args.summary {
        let summary = context.client.network_summary(&args.name, &filter).await?;
        return context.screen.answer(&summary, |summary| summed(context, summary));
    }
    let limit = usize::try_from(args.limit).ok();
    let mut all = context.client.connections(&args.name, &filter).collect(limit).await?;
    // The newest is read last, as in every log.
    all.reverse();
    if args.follow {
        return follow(context, &args.name, filter, all).await;
    }
    context.screen.answer(&all, |all| {
        let mut table = Table::new(&[
            "TIME", "VERDICT", "NAME", "ADDRESS", "KIND", ">IN", ">OUT", ">TOOK", "RULE", "DETAIL",
        ]);
        for one in all {
            table.row(row(one));
        }
        context.screen.table(&table)
    })
}

fn row(one: &Connection) -> Vec<String> {
    let took = match one.ended_at {
        Some(_) => when::exact(one.duration_ms),
        None => format!("{} so far", when::exact(one.duration_ms)),
    };
    vec![
        to_the_second(&one.at),
        word(one.verdict),
        or_dash(one.name.clone()),
        or_dash(one.to.clone()),
        word(one.protocol),
        bytes(one.bytes_in),
        bytes(one.bytes_out),
        took,
        one.rule.clone(),
        one.detail.clone().unwrap_or_default(),
    ]
}

fn to_the_second(time: &str) -> String {
    match time.split_once('.') {
        Some((seconds, _)) => format!("{seconds}Z"),
        None => time.to_owned(),
    }
}

/// Shows the existing lines, then new ones, until somebody interrupts.
async fn follow(
    context: &Context,
    name: &str,
    mut filter: ListConnections,
    first: Vec<Connection>,
) -> Result<(), Failure> {
    let mut seen: HashSet<(String, u64)> = HashSet::new();
    let mut new = first;
    filter.limit = Some(1000);
    loop {
        for one in new.iter().filter(|one| one.ended_at.is_some()) {
            if !seen.insert((one.session.clone(), one.id)) {
                continue;
            }
            match context.screen.json {
                true => context.screen.json_line(one)?,
                false => context.screen.text(&line(one))?,
            }
        }
        // What ended by then is not printed again: the next look begins there.
        let ends = new.iter().filter_map(|one| one.ended_at.as_ref()?.parse::<Timestamp>().ok());
        if let Some(latest) = ends.max() {
            let there: HashSet<_> = new.iter().map(|one| (&one.session, one.id)).collect();
            seen.retain(|(session, id)| there.contains(&(session, *id)));
            filter.since = Some(latest.to_string());
        }
        tokio::time::sleep(LOOK_AGAIN).await;
        new = context.client.connections(name, &filter).collect(None).await?;
        new.reverse();
    }
}

fn line(one: &Connection) -> String {
    let cells = row(one);
    // Names come from the sandbox: a line break or escape sequence in one must not break the line.
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace(char::is_control, " ")).collect();
    let [time, verdict, name, address, kind, received, sent, took, rule, detail] = &cells[..]
    else {
        return String::new();
    };
    let host = match (name.as_str(), address.as_str()) {
        ("-", address) => address.to_owned(),
        (name, "-") => name.to_owned(),
        (name, address) => format!("{name} ({address})"),
    };
    let mut line = format!(
        "{time}  {verdict:7}  {kind:4}  {host}  {received} in, {sent} out, {took}  [{rule}]"
    );
    if !detail.is_empty() {
        line.push_str(&format!("  {detail}"));
    }
    line + "\n"
}

fn summed(context: &Context, summary: &NetworkSummary) -> String {
    let mut table = Table::new(&["HOST", ">CONNECTIONS", ">DENIED", ">IN", ">OUT", "LAST"]);
    for one in &summary.destinations {
        table.row(vec![
            one.host.clone(),
            one.connections.to_string(),
            one.denied.to_string(),
            bytes(one.bytes_in),
            bytes(one.bytes_out),
            when::ago(&one.last_at),
        ]);
    }
    table.row(vec![
        "all".to_owned(),
        summary.connections.to_string(),
        summary.denied.to_string(),
        bytes(summary.bytes_in),
        bytes(summary.bytes_out),
        String::new(),
    ]);
    context.screen.table(&table)
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types::{Network, NetworkMode};

    use super::{added, in_short, read, removed, request_line, wished};
    use crate::args::{ModeArg, NetworkSettings};

    fn domains(names: &[&str]) -> NetworkSettings {
        let allow_domain = names.iter().map(|name| (*name).to_owned()).collect();
        NetworkSettings { allow_domain, ..NetworkSettings::default() }
    }

    #[test]
    fn options_make_a_policy() {
        assert_eq!(wished(&NetworkSettings::default()).unwrap(), None);
        let back = NetworkSettings { network: Some(ModeArg::Default), ..Default::default() };
        assert_eq!(wished(&back).unwrap(), Some(None));
        let policy = wished(&domains(&["a.com"])).unwrap().unwrap().unwrap();
        assert_eq!(
            (policy.mode, &policy.domains[..]),
            (NetworkMode::Custom, &["a.com".into()][..])
        );
        let deny = NetworkSettings { deny_cidr: vec!["10.0.0.0/8".into()], ..Default::default() };
        let policy = wished(&deny).unwrap().unwrap().unwrap();
        assert_eq!(policy.mode, NetworkMode::AllowAll, "to deny something leaves the rest");
        let both = NetworkSettings { network: Some(ModeArg::Default), ..domains(&["a.com"]) };
        assert!(wished(&both).is_err());
    }

    #[test]
    fn things_are_added_and_removed() {
        let mode = |mode| Network { mode, ..Network::default() };
        let network = added(mode(NetworkMode::DenyAll), &domains(&["a.com", "a.com"])).unwrap();
        assert_eq!(in_short(&network), "custom: 1 domain");
        assert!(added(mode(NetworkMode::AllowAll), &domains(&["a.com"])).is_err());
        assert!(removed(network.clone(), &domains(&["b.com"])).is_err());
        let network = removed(network, &domains(&["a.com"])).unwrap();
        assert_eq!(in_short(&network), "custom");
    }

    #[test]
    fn a_file_is_a_policy_or_what_was_printed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policy.json");
        let policy = r#"{"mode":"custom","requests":[{"domain":"a.com","match":{"methods":["GET"],"path":{"prefix":"/v1/"}},"action":{"headers":{"authorization":null}}}]}"#;
        for text in [policy.to_owned(), format!(r#"{{"network":{policy},"own":true}}"#)] {
            std::fs::write(&path, text).unwrap();
            let network = read(&path).unwrap();
            assert_eq!(request_line(&network.requests[0]), "GET a.com /v1/… -> set authorization");
        }
        for text in ["", "[]", r#"{"mode":"some"}"#, r#"{"mode":"custom","alow":[]}"#] {
            std::fs::write(&path, text).unwrap();
            assert!(read(&path).is_err(), "{text}");
        }
    }
}
