//! A line in the log for each event: names, ids and numbers, never what commands were given or printed.
//!
//! Logs what happens to a sandbox at level `info`, the steps of it and commands at `debug`.

use crate::model::Event;

pub(super) fn write(event: &Event) {
    if !tracing::enabled!(target: "sandkeep::event", tracing::Level::WARN) {
        return;
    }
    let Ok(told) = serde_json::to_value(&event.change) else { return };
    let kind = told["kind"].as_str().unwrap_or_default();
    let data = &told["data"];
    let text = |name: &str| data[name].as_str();
    let project = event.project.as_ref().map(ToString::to_string);
    let sandbox = event.sandbox.as_ref().map(|sandbox| sandbox.name.to_string());
    let id = event.sandbox.as_ref().map(|sandbox| sandbox.id.to_string());
    let (session, snapshot) = (text("session"), text("snapshot"));
    let (reason, end) = (text("reason").or(text("problem")), text("end"));
    let (command, run) = (text("command"), text("run"));
    let (generation, port) = (data["generation"].as_u64(), data["port"].as_u64());
    macro_rules! line {
        ($level:ident) => {
            tracing::$level!(
                target: "sandkeep::event",
                kind, project, sandbox, id, session, snapshot, generation, command, run, port, end, reason,
                "{}", sentence(kind)
            )
        };
    }
    if is_step(kind) {
        line!(debug);
    } else if matches!(kind, "sandbox.failed" | "run.failed" | "damage.found" | "events.lost") {
        line!(warn);
    } else {
        line!(info);
    }
}

/// Whether it is only a step of something that is logged, or happens very often.
fn is_step(kind: &str) -> bool {
    kind.starts_with("command.")
        || matches!(kind, "sandbox.starting" | "sandbox.stopping" | "session.ended")
}

/// The kind in words: `sandbox.rolled_back` as `sandbox rolled back`.
fn sentence(kind: &str) -> String {
    kind.replace(['.', '_'], " ")
}

#[cfg(test)]
mod tests {
    use super::{is_step, sentence};

    #[test]
    fn steps_and_commands_are_details() {
        for kind in ["command.started", "command.ended", "sandbox.starting", "session.ended"] {
            assert!(is_step(kind), "{kind}");
        }
        for kind in ["sandbox.created", "sandbox.running", "sandbox.stopped", "snapshot.created"] {
            assert!(!is_step(kind), "{kind}");
        }
        assert_eq!(sentence("sandbox.rolled_back"), "sandbox rolled back");
    }
}
