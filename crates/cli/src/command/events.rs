//! `keep events`: prints the event feed, one event to a line, and follows it.

use sandkeep_client::EventQuery;
use sandkeep_client::types::Event;
use serde_json::Value;

use super::Context;
use crate::args::EventsArgs;
use crate::failure::Failure;
use crate::screen::{Paint, note};

/// How far back a list goes by itself.
const LIST_SINCE: &str = "1h";

pub(super) async fn events(context: &Context, args: EventsArgs) -> Result<(), Failure> {
    let since = match (&args.since, &args.after) {
        (None, None) if !args.follow => Some(LIST_SINCE.to_owned()),
        _ => args.since,
    };
    let query = EventQuery {
        sandbox: args.sandbox,
        tags: args.tags,
        kinds: args.kinds,
        cursor: args.after,
        since,
        follow: args.follow,
        all_projects: args.all_projects,
    };
    let mut events = context.client.events(query).await?;
    while let Some(event) = events.next().await? {
        match (context.screen.json, event.kind.as_str()) {
            (true, _) => context.screen.json_line(&event)?,
            (false, "stream.missed") => {
                note("some events are missing here: the server no longer has them");
            }
            (false, _) => {
                let line = line(context.screen.paint, &event, args.all_projects);
                context.screen.text(&line)?;
            }
        }
    }
    Ok(())
}

/// An event as one line: when, what, to which sandbox, details.
fn line(paint: Paint, event: &Event, with_project: bool) -> String {
    let kind = format!("{:<19}", event.kind);
    let kind = match event.kind.split_once('.').map_or("", |(group, _)| group) {
        "damage" | "events" | "guard" => paint.red(&kind),
        _ if event.kind == "sandbox.failed" => paint.red(&kind),
        "command" => paint.dim(&kind),
        _ => paint.cyan(&kind),
    };
    let mut whose = event.sandbox.as_ref().map_or("-", |sandbox| &sandbox.name).to_owned();
    if with_project && let Some(project) = &event.project {
        whose = format!("{project}/{whose}");
    }
    let details: Vec<String> = event
        .data
        .iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(key, value)| format!("{key}={}", short(value)))
        .collect();
    let text = format!("{}  {kind}  {whose:<16}  {}", event.at, details.join(" "));
    // What a guest chose (names of files, command lines) must not move the cursor or change colours.
    let text: String = text
        .trim_end()
        .chars()
        .map(|c| if c.is_control() && c != '\x1b' { ' ' } else { c })
        .collect();
    format!("{text}\n")
}

fn short(value: &Value) -> String {
    match value {
        Value::String(text) if text.is_empty() || text.contains([' ', '"', '\n', '\x1b']) => {
            Value::from(text.replace('\x1b', " ")).to_string()
        }
        Value::String(text) => text.clone(),
        Value::Array(all) => all.iter().map(short).collect::<Vec<_>>().join(","),
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(_, value)| !value.is_null());
            let all: Vec<String> =
                fields.map(|(key, value)| format!("{key}={}", short(value))).collect();
            format!("({})", all.join(" "))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types::{Event, EventSandbox};

    use super::line;
    use crate::screen::Paint;

    fn event(kind: &str, data: serde_json::Value) -> Event {
        let serde_json::Value::Object(data) = data else { unreachable!("an object") };
        Event {
            id: "1".to_owned(),
            at: "2026-01-01T00:00:00Z".to_owned(),
            kind: kind.to_owned(),
            project: Some("default".to_owned()),
            sandbox: Some(EventSandbox {
                id: "sbx-1".to_owned(),
                name: "my-app".to_owned(),
                tags: Default::default(),
            }),
            data,
        }
    }

    #[test]
    fn an_event_is_one_line_whatever_a_guest_writes() {
        let data = serde_json::json!({"exit_code": 0, "end": "exited", "line": null});
        assert_eq!(
            line(Paint::plain(), &event("command.ended", data), false),
            "2026-01-01T00:00:00Z  command.ended        my-app            end=exited exit_code=0\n"
        );
        let data = serde_json::json!({"line": "echo \u{1b}[2J\r\nx\u{7}"});
        let hostile = line(Paint::plain(), &event("command.started", data), true);
        assert!(hostile.contains("default/my-app"), "{hostile}");
        let text = hostile.strip_suffix('\n').unwrap();
        assert!(!text.contains(|c: char| c.is_control()), "{text:?}");
    }
}
