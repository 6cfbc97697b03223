//! Network policies: what can be asked for, what is answered.
//!
//! A sandbox has no network beyond itself yet. `deny-all`, and a policy that allows nothing, are just
//! that. `allow-all` is what every client asks for unless told otherwise; it restricts nothing, so it
//! is accepted and told back, and the page for users says that there is no way out yet. Anything that
//! asks for a *rule* is refused: it could not be kept.
//!
//! What is asked and what is answered differ in shape: a client sends `{allow, subnets}` and reads
//! `{mode: "custom", allowedDomains, …}`.

use serde_json::{Value, json};

use super::error::VercelError;
use super::input::Fields;

/// Where the policy is noted.
pub(super) const NOTE: &str = "vercel.network";

/// Reads a request's policy as what will be answered.
pub(super) fn read(value: Value) -> Result<Value, VercelError> {
    let mut fields = Fields::of("networkPolicy", value)?;
    match fields.text("mode")?.as_deref() {
        Some(mode @ ("allow-all" | "deny-all")) => {
            fields.end()?;
            Ok(json!({ "mode": mode }))
        }
        Some("default-allow") => {
            nothing_else(fields)?;
            Ok(json!({ "mode": "allow-all" }))
        }
        Some("custom" | "default-deny") | None => {
            nothing_else(fields)?;
            Ok(json!({ "mode": "custom", "allowedDomains": [] }))
        }
        Some(_) => Err(VercelError::bad(
            "`networkPolicy.mode` should be equal to one of the allowed values [\"allow-all\", \"deny-all\", \"custom\"].",
        )),
    }
}

/// Accepts a policy without a single rule.
fn nothing_else(mut fields: Fields) -> Result<(), VercelError> {
    let mut rules = Vec::new();
    for name in
        ["allow", "allowedDomains", "allowedCIDRs", "deniedCIDRs", "injectionRules", "forwardRules"]
    {
        rules.extend(fields.any(name).map(|value| (name.to_owned(), value)));
    }
    if let Some(mut subnets) = fields.object("subnets")? {
        for name in ["allow", "deny"] {
            rules.extend(subnets.any(name).map(|value| (format!("subnets.{name}"), value)));
        }
        subnets.end()?;
    }
    fields.end()?;
    for (name, value) in rules {
        let empty = match &value {
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => {
                return Err(VercelError::bad(format!(
                    "`networkPolicy.{name}` should be array or object."
                )));
            }
        };
        if !empty {
            return Err(VercelError::refused(format!(
                "`networkPolicy.{name}`: rules cannot be kept yet, sandboxes have no network beyond themselves; use `allow-all` or `deny-all`."
            )));
        }
    }
    Ok(())
}

/// The policy that is noted; what a sandbox that was told nothing has.
pub(super) fn noted(note: Option<&String>) -> Value {
    note.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_else(|| json!({ "mode": "allow-all" }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::read;

    #[test]
    fn modes_are_kept_and_rules_refused() {
        for (asked, answered) in [
            (json!({ "mode": "allow-all" }), json!({ "mode": "allow-all" })),
            (json!({ "mode": "deny-all" }), json!({ "mode": "deny-all" })),
            (json!({}), json!({ "mode": "custom", "allowedDomains": [] })),
            (json!({ "allow": [] }), json!({ "mode": "custom", "allowedDomains": [] })),
            (
                json!({ "allow": {}, "subnets": { "deny": [] } }),
                json!({ "mode": "custom", "allowedDomains": [] }),
            ),
        ] {
            assert_eq!(read(asked.clone()).unwrap(), answered, "{asked}");
        }
        for refused in [
            json!({ "allow": ["example.com"] }),
            json!({ "allow": { "example.com": [{ "transform": [] }] } }),
            json!({ "subnets": { "deny": ["10.0.0.0/8"] } }),
            json!({ "mode": "custom", "allowedDomains": ["a.b"] }),
            json!({ "mode": "sometimes" }),
            json!({ "mode": 7 }),
            json!({ "alow": [] }),
            json!("allow-all"),
        ] {
            assert!(read(refused.clone()).is_err(), "{refused}");
        }
    }
}
