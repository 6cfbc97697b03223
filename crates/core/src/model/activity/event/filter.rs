//! Which events a reader wants.

use super::{Event, EventData};
use crate::model::{Name, Tags};

/// Selects events. All given conditions must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventFilter {
    /// Of a sandbox of this name.
    pub sandbox: Option<Name>,
    /// Of sandboxes with these tags, all of them.
    pub tags: Tags,
    /// Of one of these kinds, or groups of kinds (`command` is `command.started` and
    /// `command.ended`); any if there are none.
    pub kinds: Vec<String>,
}

impl EventFilter {
    /// Whether a text is a kind or a group of kinds.
    #[must_use]
    pub fn knows_kind(text: &str) -> bool {
        EventData::KINDS.iter().any(|kind| is_of(kind, text))
    }

    /// Whether an event matches. Lost events always do.
    #[must_use]
    pub fn wants(&self, event: &Event) -> bool {
        if matches!(event.change, EventData::EventsLost { .. }) {
            return true;
        }
        let kind = event.change.kind();
        if !self.kinds.is_empty() && !self.kinds.iter().any(|wanted| is_of(kind, wanted)) {
            return false;
        }
        let of = event.sandbox.as_ref();
        if let Some(name) = &self.sandbox
            && of.is_none_or(|sandbox| sandbox.name != *name)
        {
            return false;
        }
        self.tags
            .iter()
            .all(|(key, value)| of.is_some_and(|sandbox| sandbox.tags.get(key) == Some(value)))
    }
}

fn is_of(kind: &str, wanted: &str) -> bool {
    kind == wanted || kind.split_once('.').is_some_and(|(group, _)| group == wanted)
}
