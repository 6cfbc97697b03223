use serde_json::{Value, json};

use super::{noted, read, told};
use crate::compat::vercel::protocol::ordered::Ordered;

fn again(asked: Value) -> Value {
    match read(&asked.clone().into()) {
        Ok((policy, _)) => told(&policy),
        Err(error) => panic!("{asked}: {}", error.message()),
    }
}

#[test]
fn modes_and_lists() {
    let empty = json!({ "mode": "custom", "allowedDomains": [] });
    for (asked, answered) in [
        (json!({ "mode": "allow-all" }), json!({ "mode": "allow-all" })),
        (json!({ "mode": "deny-all" }), json!({ "mode": "deny-all" })),
        (json!({}), empty.clone()),
        (json!({ "allow": {}, "subnets": { "deny": [] } }), empty),
        (
            json!({ "allow": ["*.example.com", "github.com"], "subnets": { "allow": ["10.0.0.0/8"], "deny": ["10.1.0.0/16"] } }),
            json!({ "mode": "custom", "allowedDomains": ["*.example.com", "github.com"], "allowedCIDRs": ["10.0.0.0/8"], "deniedCIDRs": ["10.1.0.0/16"] }),
        ),
        (
            json!({ "mode": "default-allow", "deniedCIDRs": ["10.0.0.0/8"] }),
            json!({ "mode": "allow-all", "deniedCIDRs": ["10.0.0.0/8"] }),
        ),
        (
            json!({ "mode": "default-deny", "allowedDomains": ["a.com"] }),
            json!({ "mode": "custom", "allowedDomains": ["a.com"] }),
        ),
    ] {
        assert_eq!(again(asked.clone()), answered, "{asked}");
    }
}

#[test]
fn rules_are_told_back_without_values() {
    let told = again(json!({ "allow": {
        "*": [],
        "ai.example.com": [
            {
                "match": { "method": ["POST"], "path": { "startsWith": "/v1/" }, "headers": [{ "key": { "exact": "x-api-key" } }] },
                "transform": [{ "headers": { "Authorization": "Bearer s3cret" } }, { "headers": { "x": "y" } }],
            },
            { "response": { "statusCode": 403, "body": "no", "contentType": "text/plain" } },
        ],
        "*.example.com": [{ "forwardURL": "https://proxy.example.org/in" }],
    }}));
    let text = told.to_string();
    assert!(!text.contains("s3cret"), "{text}");
    assert_eq!(
        told["injectionRules"],
        json!([{
            "domain": "ai.example.com",
            "headerNames": ["authorization", "x"],
            "match": { "method": ["POST"], "path": { "startsWith": "/v1/" }, "headers": [{ "key": { "exact": "x-api-key" } }] },
            "matchDimensions": ["headers", "method", "path"],
        }])
    );
    assert_eq!(
        told["forwardRules"],
        json!([{ "domain": "*.example.com", "forwardURL": "https://proxy.example.org/in" }])
    );
    assert_eq!(told["responseRules"], json!([{ "domain": "ai.example.com", "statusCode": 403 }]));
    // Policies returned in their older form can be read too, except for values, which were never
    // returned.
    let old = again(json!({ "mode": "custom", "allowedDomains": ["a.com"],
        "injectionRules": [{ "domain": "a.com", "headers": { "a": "b" } }],
        "forwardRules": [{ "domain": "a.com", "forwardURL": "https://b.com" }] }));
    assert_eq!(old["injectionRules"], json!([{ "domain": "a.com", "headerNames": ["a"] }]));
    assert_eq!(old["forwardRules"][0]["forwardURL"], "https://b.com");
}

#[test]
fn a_policy_is_told_as_it_was_written() {
    let asked = r#"{"allow":{
        "*.Zebra.com":[{"transform":[{"headers":{"X-Key":"s3cret","Authorization":"b"}},{"headers":{"x-key":"c"}}]}],
        "API.example.com":[{"response":{"statusCode":403}},{"forwardURL":"https://proxy.example.org"}],
        "b.com":[]},
        "subnets":{"deny":["10.1.0.0/16","10.0.0.0/16"]}}"#;
    let asked: Ordered = serde_json::from_str(asked).unwrap();
    let (policy, note) = read(&asked).unwrap();
    let note: Value = serde_json::from_str(&note.unwrap()).unwrap();
    assert!(!note.to_string().contains("s3cret"), "{note}");
    assert_eq!(note["told"], told(&policy), "it is known by what it is of");
    assert_eq!(
        note["written"],
        json!({
            "mode": "custom",
            "allowedDomains": ["*.Zebra.com", "API.example.com", "b.com"],
            "deniedCIDRs": ["10.1.0.0/16", "10.0.0.0/16"],
            "injectionRules": [{ "domain": "*.Zebra.com", "headerNames": ["X-Key", "Authorization"] }],
            "responseRules": [{ "domain": "API.example.com", "statusCode": 403 }],
            "forwardRules": [{ "domain": "API.example.com", "forwardURL": "https://proxy.example.org" }],
        })
    );
    let plain = json!({ "allow": ["a.com", "b.com"] });
    assert_eq!(read(&plain.into()).unwrap().1, None, "nothing to note");
}

#[test]
fn the_more_exact_domain_is_asked_first() {
    let policy = read(
        &json!({ "allow": {
            "*": [{ "response": { "statusCode": 404 } }],
            "*.example.com": [{ "response": { "statusCode": 403 } }],
            "a.example.com": [{ "transform": [] }, { "response": { "statusCode": 200 } }],
        }})
        .into(),
    )
    .unwrap()
    .0;
    let order: Vec<&str> = policy.requests.iter().map(|rule| rule.domain.as_str()).collect();
    assert_eq!(order, ["a.example.com", "a.example.com", "*.example.com", "*"]);
}

#[test]
fn what_is_wrong_is_named_in_their_words() {
    let rule = |rule: Value| json!({ "allow": { "a.com": [rule] } });
    for (asked, named) in [
        (json!({ "mode": "sometimes" }), "networkPolicy.mode"),
        (json!({ "mode": 7 }), "networkPolicy.mode"),
        (json!({ "mode": "allow-all", "allow": [] }), "networkPolicy.allow"),
        (json!({ "alow": [] }), "networkPolicy.alow"),
        (json!("allow-all"), "networkPolicy"),
        (json!({ "allow": "a.com" }), "networkPolicy.allow"),
        (json!({ "allow": ["a.com", 7] }), "networkPolicy.allow[1]"),
        (json!({ "allow": ["10.0.0.1"] }), "networkPolicy.allow[0]"),
        (json!({ "allow": ["a.com:443"] }), "networkPolicy.allow[0]"),
        (json!({ "allow": { "a.com": {} } }), "networkPolicy.allow.a.com"),
        (json!({ "subnets": { "deny": ["x"] } }), "networkPolicy.subnets.deny[0]"),
        (json!({ "subnets": { "allow": ["10.0.0.1:80"] } }), "networkPolicy.subnets.allow[0]"),
        (rule(json!({})), "networkPolicy.allow.a.com[0]"),
        (rule(json!({ "transform": [], "forwardURL": "https://b.com" })), "exactly one"),
        (rule(json!({ "transform": [{ "headers": { "a b": "c" } }] })), "transform.headers.a b"),
        (rule(json!({ "transform": [{ "headers": { "host": "c" } }] })), "transform.headers.host"),
        (rule(json!({ "transform": [{ "header": {} }] })), "transform[0].header"),
        (rule(json!({ "forwardURL": "ftp://b.com" })), "networkPolicy.allow.a.com[0].forwardURL"),
        (rule(json!({ "forwardURL": "https://b.com/?x" })), "forwardURL"),
        (rule(json!({ "response": {} })), "response.statusCode"),
        (rule(json!({ "response": { "statusCode": 199 } })), "response.statusCode"),
        (rule(json!({ "response": { "statusCode": 200, "body": "x" } })), "contentType"),
        (
            rule(json!({ "response": { "statusCode": 204, "body": "x", "contentType": "a/b" } })),
            "response.body",
        ),
        (
            rule(json!({ "match": { "path": { "regex": "(" } }, "transform": [] })),
            "networkPolicy.allow.a.com[0].match.path",
        ),
        (
            rule(json!({ "match": { "path": { "regex": "a", "exact": "b" } }, "transform": [] })),
            "one of `exact`",
        ),
        (rule(json!({ "match": { "query": [] }, "transform": [] })), "match.query"),
    ] {
        let error = read(&asked.clone().into()).expect_err(&asked.to_string());
        assert!(error.message().contains(named), "{asked}: {}", error.message());
    }
}

#[test]
fn what_was_noted_is_kept() {
    for (note, mode) in [
        (json!({ "mode": "allow-all" }), "allow-all"),
        (json!({ "mode": "deny-all" }), "deny-all"),
        (json!({ "mode": "custom", "allowedDomains": [] }), "custom"),
        (json!(7), "deny-all"),
    ] {
        assert_eq!(told(&noted(note))["mode"], mode);
    }
}
