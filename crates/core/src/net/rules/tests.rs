use std::net::SocketAddr;

use hyper::{HeaderMap, Method, Uri};
use proptest::prelude::*;

use super::{Brokered, NameSource, Named, RequestAction, Rules, Ruling};
use crate::model::{Credential, Policy, Protocol};
use crate::net::special_addresses::Destination;

fn policy(json: &str) -> Policy {
    let policy: Policy =
        serde_json::from_str(json).unwrap_or_else(|error| panic!("{json}: {error}"));
    policy.check("network").unwrap();
    policy
}

fn reveal(credential: &Credential) -> Result<zeroize::Zeroizing<String>, crate::model::BadPolicy> {
    match credential {
        Credential::Plain(text) => Ok(text.clone()),
        Credential::Sealed(text) => Ok(text.clone().into()),
    }
}

fn compiled(own: &Policy, bound: Option<&Policy>) -> Rules {
    Rules::new(own, bound, Vec::new(), &reveal).unwrap()
}

fn rules(json: &str) -> Rules {
    compiled(&policy(json), None)
}

fn destination(text: &str) -> Destination {
    Destination::new(text.parse().unwrap_or_else(|_| panic!("{text}")))
}

#[test]
fn addresses_are_judged_by_lists() {
    let custom = r#"{"mode": "custom", "allow": ["10.1.0.0/16", "192.0.2.7:5432", "[2001:db8::/32]:443"],
        "deny": ["10.1.9.0/24", "192.0.2.8"]}"#;
    let named = r#"{"mode": "custom", "domains": ["git.example:22"], "allow": ["192.0.2.7"]}"#;
    let open = r#"{"mode": "allow-all", "deny": ["10.0.0.0/8"]}"#;
    let requests =
        r#"{"mode": "custom", "requests": [{"domain": "a.example", "action": "allow"}]}"#;
    let allow = |rule: &str| Ruling::Allow(rule.to_owned());
    let deny = |rule: &str| Ruling::Deny(rule.to_owned());
    for (json, to, ruling) in [
        (custom, "10.1.2.3:80", allow("allow 10.1.0.0/16")),
        (custom, "10.1.9.3:80", deny("deny 10.1.9.0/24")),
        (custom, "192.0.2.7:5432", allow("allow 192.0.2.7/32:5432")),
        (custom, "192.0.2.7:5433", deny("no rule allows it")),
        (custom, "[2001:db8::1]:443", allow("allow [2001:db8::/32]:443")),
        (custom, "[2001:db8::1]:80", deny("no rule allows it")),
        (named, "198.51.100.1:22", Ruling::ByName),
        (named, "198.51.100.1:23", deny("no rule allows it")),
        (named, "192.0.2.7:23", allow("allow 192.0.2.7/32")),
        (requests, "198.51.100.1:8443", Ruling::ByName),
        (open, "198.51.100.1:1", allow("allow-all")),
        (open, "10.9.9.9:1", deny("deny 10.0.0.0/8")),
        // The same address in other clothes.
        (open, "[::ffff:10.9.9.9]:1", deny("deny 10.0.0.0/8")),
        (open, "[64:ff9b::10.9.9.9]:1", deny("deny 10.0.0.0/8")),
        (open, "[2002:a09:909::1]:1", deny("deny 10.0.0.0/8")),
        (r#"{"mode": "deny-all"}"#, "198.51.100.1:1", deny("deny-all")),
    ] {
        assert_eq!(rules(json).address(destination(to)), ruling, "{json} {to}");
    }
}

#[test]
fn private_networks_are_closed_until_a_rule_names_them() {
    let world = r#"{"mode": "custom", "allow": ["0.0.0.0/0", "::/0", "8.0.0.0/5"]}"#;
    let named = r#"{"mode": "custom", "allow": ["0.0.0.0/0", "::/0", "10.1.0.0/16", "192.168.7.0/24:443", "fd00:1::/32"]}"#;
    let custom = r#"{"mode": "custom", "allow": ["10.1.0.0/16"], "domains": ["*"]}"#;
    let all = r#"{"mode": "allow-all"}"#;
    let opened = r#"{"mode": "allow-all", "allow": ["10.1.0.0/16", "192.168.7.0/24:443", "fd00:1::/32", "64:ff9b::10.1.0.0/112"]}"#;
    let closed = "a private network, and no rule opens it";
    for (json, to, open) in [
        (all, "10.1.2.3:80", false),
        (all, "172.16.0.1:80", false),
        (all, "192.168.7.1:443", false),
        (all, "100.64.0.1:80", false),
        (all, "[fd00:1::1]:80", false),
        (all, "[64:ff9b::10.1.2.3]:80", false),
        (all, "198.51.100.1:80", true),
        (all, "[2001:db9::1]:80", true),
        (opened, "10.1.2.3:80", true),
        (opened, "10.2.2.3:80", false),
        (opened, "192.168.7.1:443", true),
        (opened, "192.168.7.1:80", false),
        (opened, "[fd00:1::1]:80", true),
        (opened, "[fd00:2::1]:80", false),
        (opened, "[64:ff9b::10.1.2.3]:80", true),
        (opened, "198.51.100.1:80", true),
        (world, "10.1.2.3:80", false),
        (world, "[fd00:1::1]:80", false),
        (world, "198.51.100.1:80", true),
        (named, "10.1.2.3:80", true),
        (named, "10.2.2.3:80", false),
        (named, "192.168.7.1:443", true),
        (named, "192.168.7.1:80", false),
        (named, "[fd00:1::1]:80", true),
        (named, "198.51.100.1:80", true),
        (custom, "10.1.2.3:80", true),
        (custom, "10.2.2.3:80", false),
    ] {
        let to_place = destination(to);
        let ruling = rules(json).address(to_place);
        match open {
            true => assert!(matches!(ruling, Ruling::Allow(_)), "{json} {to} {ruling:?}"),
            false => assert_eq!(ruling, Ruling::Deny(closed.to_owned()), "{json} {to}"),
        }
        let named = rules(json).named(to_place, "a.example", NameSource::Tls);
        assert_eq!(matches!(named, Named::Deny(_)), !open, "{json} {to} {named:?}");
        let datagrams = rules(json).datagrams(Protocol::Udp, to_place, &[]);
        assert_eq!(datagrams.is_ok(), open, "{json} {to} {datagrams:?}");
        assert_eq!(rules(json).unnamed(to_place, &[]).is_ok(), open, "{json} {to}");
    }
    // The operator's exceptions are opened for all.
    let excepted: Vec<_> = ["10.1.2.3:80"].map(|rule| rule.parse().unwrap()).to_vec();
    let rules_with = rules(all).excepting(&excepted);
    assert!(matches!(rules_with.address(destination("10.1.2.3:80")), Ruling::Allow(_)));
    assert!(matches!(rules_with.address(destination("10.1.2.3:81")), Ruling::Deny(_)));
    // Both sides must open them.
    let bounded = compiled(&policy(named), Some(&policy(all)));
    assert_eq!(
        bounded.address(destination("10.1.2.3:80")),
        Ruling::Deny(format!("project bound: {closed}"))
    );
    let bounded = compiled(&policy(named), Some(&policy(custom)));
    assert!(matches!(bounded.address(destination("10.1.2.3:80")), Ruling::Allow(_)));
    // A rule that forwards to an address names it.
    assert_eq!(rules(all).forward("10.1.2.3", destination("10.1.2.3:80")), Ok(()));
    assert!(rules(all).forward("a.example", destination("10.1.2.3:80")).is_err());
}

#[test]
fn the_hosts_loopback_is_spoken_of_either_way() {
    for allow in ["127.0.0.1:8080", "100.97.0.1:8080"] {
        let json = format!(r#"{{"mode": "custom", "allow": ["{allow}"]}}"#);
        assert!(matches!(rules(&json).address(destination("100.97.0.1:8080")), Ruling::Allow(_)));
    }
    for deny in ["127.0.0.0/8", "100.97.0.0/16"] {
        let json = format!(r#"{{"mode": "allow-all", "deny": ["{deny}"]}}"#);
        assert!(matches!(rules(&json).address(destination("100.97.0.1:8080")), Ruling::Deny(_)));
    }
}

#[test]
fn names_are_judged_by_domain_and_port() {
    let rules = rules(
        r#"{"mode": "custom", "domains": ["a.example", "*.b.example:443", "git.example:22"],
            "deny": ["198.51.100.9"], "requests": [{"domain": "api.example", "action": "allow"}]}"#,
    );
    let pass = |rule: &str| Named::Pass(rule.to_owned());
    let open = |rule: &str| Named::Open(rule.to_owned());
    let deny = |rule: &str| Named::Deny(rule.to_owned());
    for (name, to, source, said) in [
        ("a.example", "198.51.100.1:443", NameSource::Tls, pass("domain a.example")),
        ("a.example", "198.51.100.1:8080", NameSource::Http, open("domain a.example")),
        ("a.example", "198.51.100.9:443", NameSource::Tls, deny("deny 198.51.100.9/32")),
        ("x.b.example", "198.51.100.1:443", NameSource::Tls, pass("domain *.b.example:443")),
        ("x.b.example", "198.51.100.1:8443", NameSource::Tls, deny("no rule allows it")),
        ("b.example", "198.51.100.1:443", NameSource::Tls, deny("no rule allows it")),
        ("api.example", "198.51.100.1:443", NameSource::Tls, open("requests to api.example")),
        ("evil.example", "198.51.100.1:443", NameSource::Tls, deny("no rule allows it")),
    ] {
        assert_eq!(rules.named(destination(to), name, source), said, "{name} {to}");
    }
    for (name, fine) in [
        ("a.example", true),
        ("git.example", true),
        ("api.example", true),
        ("x.y.b.example", true),
        ("b.example", false),
        ("other.example", false),
    ] {
        assert_eq!(rules.lookup(name).is_ok(), fine, "{name}");
    }
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let to = destination("198.51.100.1:22");
    let said = rules.unnamed(to, &names(&["a.example", "git.example"]));
    assert_eq!(said, Ok(("domain git.example:22".to_owned(), Some("git.example".to_owned()))));
    // Without a port in the rule, a connection needs a name; and an address of another name is not
    // enough.
    assert!(rules.unnamed(to, &names(&["a.example"])).is_err());
    assert!(rules.unnamed(destination("198.51.100.1:80"), &names(&["git.example"])).is_err());
    assert!(rules.unnamed(destination("198.51.100.9:22"), &names(&["git.example"])).is_err());
    assert!(rules.unnamed(to, &[]).is_err());
}

#[test]
fn datagrams_need_an_address() {
    let custom = rules(r#"{"mode": "custom", "domains": ["*"], "allow": ["192.0.2.0/24"]}"#);
    assert!(custom.datagrams(Protocol::Udp, destination("192.0.2.1:53"), &[]).is_ok());
    assert!(custom.datagrams(Protocol::Icmp, destination("192.0.2.1:0"), &[]).is_ok());
    let refused = custom.datagrams(Protocol::Udp, destination("198.51.100.1:443"), &[]);
    assert_eq!(refused, Err("no rule allows it; udp tells no name".to_owned()));
    let open = rules(
        r#"{"mode": "allow-all", "requests": [{"domain": "api.example", "action": "deny"}]}"#,
    );
    let to = destination("198.51.100.1:443");
    assert!(open.datagrams(Protocol::Udp, to, &[]).is_ok());
    assert!(open.datagrams(Protocol::Udp, to, &["api.example".to_owned()]).is_err());
    assert!(open.datagrams(Protocol::Icmp, to, &["api.example".to_owned()]).is_ok());
}

#[test]
fn connections_are_looked_at_only_where_it_matters() {
    let web = destination("198.51.100.1:443");
    assert!(!rules(r#"{"mode": "allow-all"}"#).looks());
    let judged = rules(
        r#"{"mode": "allow-all", "requests": [{"domain": "api.example", "action": "deny"}]}"#,
    );
    assert!(judged.looks());
    let secret = Brokered {
        name: "KEY".to_owned(),
        placeholder: "placeholder".to_owned(),
        value: "value".to_owned().into(),
        hosts: vec!["api.example".parse().unwrap()],
        places: std::collections::BTreeSet::new(),
    };
    assert!(!format!("{secret:?}").contains("\"value\""));
    let brokered = Rules::new(&Policy::default(), None, vec![secret], &reveal).unwrap();
    assert!(brokered.looks());
    assert!(brokered.intercepts("api.example") && !brokered.intercepts("x.api.example"));
    assert_eq!(
        brokered.named(web, "api.example", NameSource::Tls),
        Named::Open("allow-all".to_owned())
    );
    assert_eq!(
        brokered.named(web, "b.example", NameSource::Tls),
        Named::Pass("allow-all".to_owned())
    );
}

fn ask<'a>(
    rules: &'a Rules,
    method: &str,
    url: &str,
    headers: &[(&str, &str)],
) -> (RequestAction<'a>, String) {
    let uri: Uri = url.parse().unwrap();
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(name.parse::<hyper::header::HeaderName>().unwrap(), value.parse().unwrap());
    }
    let method: Method = method.parse().unwrap();
    let name = uri.host().unwrap().to_owned();
    let verdict = rules.request(&name, destination("198.51.100.1:443"), &method, &uri, &map);
    let set = verdict.set.iter().map(|(name, value)| format!(" +{name}={}", value.as_str()));
    (verdict.action, verdict.rule + &set.collect::<String>())
}

#[test]
fn the_first_request_rule_that_matches_decides() {
    let rules = rules(
        r#"{"mode": "custom", "domains": ["open.example"], "requests": [
            {"domain": "api.example", "match": {"path": {"prefix": "/admin"}}, "action": "deny"},
            {"domain": "api.example", "match": {"methods": ["get"], "path": {"prefix": "/v1/"}}, "action": "allow"},
            {"domain": "api.example", "match": {"query": [{"key": {"exact": "q"}, "value": {"regex": "^a b$"}}]}, "action": {"answer": {"status": 204}}},
            {"domain": "*.example", "match": {"headers": [{"key": {"exact": "X-Kind"}, "value": {"prefix": "f"}}]}, "action": {"forward": {"url": "http://f.example"}}},
            {"domain": "open.example", "match": {"methods": ["PUT"]}, "action": {"headers": {"x-key": "v"}}}
        ]}"#,
    );
    let check = |method: &str, url: &str, headers: &[(&str, &str)], action: &str, rule: &str| {
        let (said, by) = ask(&rules, method, url, headers);
        assert_eq!(by, rule, "{method} {url}");
        assert!(format!("{said:?}").starts_with(action), "{method} {url}: {said:?}");
    };
    check("GET", "https://api.example/v1/x", &[], "Pass", "requests[1]: allow api.example");
    check("POST", "https://api.example/v1/x", &[], "Deny", "no rule allows it");
    check("GET", "https://api.example/admin/x", &[], "Deny", "requests[0]: deny api.example");
    // Other ways to write the same path.
    for path in ["/%61dmin", "//admin", "/v1/../admin", "/v1/%2e%2e/admin", "/v1\\..\\admin"] {
        let url = format!("https://api.example{path}");
        let Ok(uri) = url.parse::<Uri>() else { continue };
        assert!(
            matches!(ask(&rules, "GET", &uri.to_string(), &[]).0, RequestAction::Deny),
            "{path}"
        );
    }
    let answered = "requests[2]: answer api.example";
    check("POST", "https://api.example/?q=a+b", &[], "Answer", answered);
    check("POST", "https://api.example/?q=a%20b&r", &[], "Answer", answered);
    check("POST", "https://api.example/?q=ab", &[], "Deny", "no rule allows it");
    let kind = [("x-kind", "far")];
    check("POST", "https://api.example/", &kind, "Forward", "requests[3]: forward *.example");
    check(
        "PUT",
        "https://open.example/",
        &[],
        "Pass",
        "requests[4]: headers open.example +x-key=v",
    );
    check("GET", "https://open.example/", &[], "Pass", "domain open.example");
}

#[test]
fn a_bound_has_the_last_word_on_requests() {
    let own = policy(
        r#"{"mode": "allow-all", "requests": [
            {"domain": "a.example", "match": {"path": {"prefix": "/f"}}, "action": {"forward": {"url": "http://far.example"}}},
            {"domain": "a.example", "action": {"headers": {"x-own": "1"}}}]}"#,
    );
    let bound = policy(
        r#"{"mode": "custom", "domains": ["a.example"], "requests": [
            {"domain": "a.example", "match": {"methods": ["POST"]}, "action": "deny"},
            {"domain": "a.example", "match": {"methods": ["PUT"]}, "action": {"headers": {"x-bound": "2"}}}]}"#,
    );
    let rules = compiled(&own, Some(&bound));
    let said = |method, path: &str| ask(&rules, method, &format!("https://a.example{path}"), &[]);
    assert_eq!(said("POST", "/").1, "project bound: requests[0]: deny a.example +x-own=1");
    assert!(matches!(said("POST", "/f").0, RequestAction::Deny));
    assert_eq!(said("PUT", "/").1, "requests[1]: headers a.example +x-own=1 +x-bound=2");
    assert!(matches!(said("GET", "/f").0, RequestAction::Forward { .. }));
    assert!(matches!(ask(&rules, "GET", "https://b.example/", &[]).0, RequestAction::Deny));
    // A sandbox forwards to where its bound lets it.
    let to = destination("198.51.100.2:80");
    assert!(rules.forward("far.example", to).is_err());
    assert!(rules.forward("a.example", to).is_ok());
    assert!(compiled(&own, None).forward("far.example", to).is_ok());
}

#[test]
fn what_is_forwarded_is_judged_by_the_bound_as_what_it_became() {
    let own = policy(r#"{"mode": "allow-all"}"#);
    let open = r#"{"mode": "allow-all", "requests": [
        {"domain": "api.example", "match": {"methods": ["DELETE"]}, "action": "deny"},
        {"domain": "api.example", "match": {"path": {"prefix": "/far"}}, "action": {"forward": {"url": "http://far.example"}}}]}"#;
    let custom = r#"{"mode": "custom", "domains": ["b.example:443"], "requests": [
        {"domain": "*.example", "match": {"methods": ["GET"]}, "action": "allow"}]}"#;
    for (bound, method, url, rule) in [
        (open, "DELETE", "https://api.example/x", Some("requests[0]: deny api.example")),
        (open, "DELETE", "https://api.example./x", Some("requests[0]: deny api.example")),
        (open, "GET", "https://api.example/far", Some("requests[1]: forward api.example")),
        (open, "GET", "https://api.example/x", None),
        (open, "DELETE", "https://b.example/x", None),
        (custom, "GET", "https://a.example/", None),
        (custom, "PUT", "https://a.example/", Some("no rule allows it")),
        (custom, "PUT", "https://b.example/", None),
        (custom, "PUT", "https://b.example:8443/", Some("no rule allows it")),
        (r#"{"mode": "deny-all"}"#, "GET", "https://a.example/", Some("deny-all")),
    ] {
        let rules = compiled(&own, Some(&policy(bound)));
        let uri: Uri = url.parse().unwrap();
        let port = uri.port_u16().unwrap_or(443);
        let method: Method = method.parse().unwrap();
        let said =
            rules.forwarded(uri.host().unwrap(), port, &method, &uri, &HeaderMap::new()).err();
        assert_eq!(said, rule.map(|rule| format!("project bound: {rule}")), "{method} {url}");
    }
}

#[test]
fn a_method_is_denied_however_it_is_written() {
    let rules = rules(
        r#"{"mode": "allow-all", "requests": [
            {"domain": "a.example", "match": {"methods": ["DELETE"]}, "action": "deny"},
            {"domain": "a.example", "match": {"methods": ["PUT"]}, "action": "allow"}]}"#,
    );
    let said = |method| ask(&rules, method, "https://a.example/", &[]).1;
    assert_eq!(said("delete"), "requests[0]: deny a.example");
    assert_eq!(said("DELETE"), "requests[0]: deny a.example");
    assert_eq!(said("put"), "allow-all");
}

fn domain() -> impl Strategy<Value = String> {
    let ports = prop_oneof![Just(""), Just(":443"), Just(":22,443")];
    let names = prop_oneof![
        Just("a.example"),
        Just("b.example"),
        Just("*.example"),
        Just("*.a.example"),
        Just("www.*.org"),
        Just("*")
    ];
    (names, ports).prop_map(|(name, ports)| format!("{name}{ports}"))
}

fn address() -> impl Strategy<Value = String> {
    let nets = prop_oneof![
        Just("192.0.2.0/24"),
        Just("192.0.2.1"),
        Just("198.51.100.0/24"),
        Just("0.0.0.0/0"),
        Just("10.0.0.0/8")
    ];
    let ports = prop_oneof![Just(""), Just(":443"), Just(":22,80")];
    (nets, ports).prop_map(|(net, ports)| format!("{net}{ports}"))
}

prop_compose! {
    fn any_policy()(
        mode in prop_oneof![1 => Just("allow-all"), 1 => Just("deny-all"), 4 => Just("custom")],
        domains in prop::collection::vec(domain(), 0..4),
        allow in prop::collection::vec(address(), 0..3),
        deny in prop::collection::vec(address(), 0..2),
        judged in prop::option::of(domain()),
    ) -> Policy {
        let mut text = serde_json::json!({"mode": mode});
        if mode == "custom" {
            text["domains"] = domains.into();
            text["allow"] = allow.into();
        }
        if mode != "deny-all" {
            text["deny"] = deny.into();
            if let Some(domain) = judged {
                let domain = domain.split(':').next().unwrap().to_owned();
                text["requests"] = serde_json::json!([{"domain": domain, "action": "allow"}]);
            }
        }
        serde_json::from_value(text).unwrap()
    }
}

fn target() -> impl Strategy<Value = SocketAddr> {
    let ips = prop_oneof![
        Just("192.0.2.1"),
        Just("192.0.2.2"),
        Just("198.51.100.1"),
        Just("203.0.113.1"),
        Just("10.1.1.1")
    ];
    let ports = prop_oneof![Just(22), Just(80), Just(443), Just(5432)];
    (ips, ports).prop_map(|(ip, port)| SocketAddr::new(ip.parse().unwrap(), port))
}

fn host() -> impl Strategy<Value = String> {
    let names = vec!["a.example", "b.example", "x.a.example", "www.x.org", "c.test"];
    prop::sample::select(names).prop_map(str::to_owned)
}

/// Everything that rules say of a destination and a name, as numbers that are larger where more is allowed.
fn everything(rules: &Rules, to: SocketAddr, name: &str) -> Vec<u8> {
    let to = Destination::new(to);
    let names = [name.to_owned()];
    let named = |source| u8::from(!matches!(rules.named(to, name, source), Named::Deny(_)));
    let uri: Uri = format!("http://{name}/").parse().unwrap();
    let request = rules.request(name, to, &Method::GET, &uri, &HeaderMap::new());
    vec![
        match rules.address(to) {
            Ruling::Deny(_) => 0,
            Ruling::ByName => 1,
            Ruling::Allow(_) => 2,
        },
        named(NameSource::Tls),
        named(NameSource::Http),
        u8::from(rules.unnamed(to, &names).is_ok()),
        u8::from(rules.unnamed(to, &[]).is_ok()),
        u8::from(rules.datagrams(Protocol::Icmp, to, &names).is_ok()),
        u8::from(rules.lookup(name).is_ok()),
        u8::from(!matches!(request.action, RequestAction::Deny)),
    ]
}

proptest! {
    #[test]
    fn more_rules_that_allow_never_allow_less(
        policy in any_policy(), to in target(), name in host(), more in domain(), wider in address()
    ) {
        let before = everything(&compiled(&policy, None), to, &name);
        let mut widened = policy;
        widened.domains.push(more.parse().unwrap());
        widened.allow.push(wider.parse().unwrap());
        let after = everything(&compiled(&widened, None), to, &name);
        prop_assert!(before.iter().zip(&after).all(|(before, after)| before <= after));
    }

    #[test]
    fn nothing_gets_beyond_the_bound(
        own in any_policy(), bound in any_policy(), to in target(), name in host()
    ) {
        let both = everything(&compiled(&own, Some(&bound)), to, &name);
        let own = everything(&compiled(&own, None), to, &name);
        let bound = everything(&compiled(&bound, None), to, &name);
        for (index, both) in both.iter().enumerate() {
            prop_assert_eq!(*both, own[index].min(bound[index]), "question {}", index);
        }
    }

    #[test]
    fn what_is_denied_stays_denied(
        mut policy in any_policy(), to in target(), name in host(), with_port in any::<bool>()
    ) {
        let ports = if with_port { vec![to.port()] } else { Vec::new() };
        policy.deny.push(crate::model::AddressRule { net: to.ip().into(), ports });
        let said = everything(&compiled(&policy, None), to, &name);
        // A name may be looked up although one of its addresses is denied, and echo requests have no port.
        for question in [0, 1, 2, 3, 4, 7] {
            prop_assert_eq!(said[question], 0, "question {}", question);
        }
    }

    #[test]
    fn a_name_is_found_as_if_every_rule_was_tried(
        domains in prop::collection::vec(domain(), 0..8), name in host()
    ) {
        let rules: Vec<crate::model::DomainRule> =
            domains.iter().map(|domain| domain.parse().unwrap()).collect();
        let mut slow: Vec<_> =
            rules.iter().filter(|rule| rule.pattern.matches(&name)).map(ToString::to_string).collect();
        let names = super::domain_index::DomainIndex::new(rules);
        let mut fast: Vec<_> = names.matching(&name).map(ToString::to_string).collect();
        slow.sort();
        fast.sort();
        prop_assert_eq!(slow, fast);
    }
}
