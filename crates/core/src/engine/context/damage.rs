//! The register of damage: everything that is known to be wrong with stored data.
//!
//! Components that find damage (recovery, garbage collection, a failed sync, the scrub) report it
//! here; those that see that it is gone clear it. The register is in memory: a restarted daemon
//! finds the remaining damage again. `GET /v1/damage` and `keep doctor` show it, and every new
//! entry is one event and one log line at ERROR level.
//!
//! An entry is identified by its kind and its subject, so reporting the same thing every 30 seconds
//! neither grows the register nor floods the log.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use crate::engine::context::Context;
use crate::model::{EventData, Timestamp, now};

/// The register holds this many entries; more are counted and logged, not kept.
const LIMIT: usize = 1_000;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DamageKind {
    /// A manifest, or another document, cannot be read.
    UnreadableManifest,
    /// Something that is named by a manifest is not there.
    Missing,
    /// The filesystem failed to write data back, and may have lost some.
    SyncFailed,
    /// A layer whose data may not be on stable storage as it was written.
    LayerInDoubt,
    /// A sealed layer is not what was sealed.
    LayerChanged,
    /// Garbage collection is stopped, because something that could name layers was not read.
    CollectionStopped,
    /// The wall clock jumped, and nothing expires for a while.
    ClockJumped,
    /// The index could not be used and was built again.
    IndexRebuilt,
    /// Security configuration cannot be read; what depends on it is refused.
    SecurityConfig,
}

impl DamageKind {
    /// Its name on the wire and in logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::UnreadableManifest => "unreadable_manifest",
            Self::Missing => "missing",
            Self::SyncFailed => "sync_failed",
            Self::LayerInDoubt => "layer_in_doubt",
            Self::LayerChanged => "layer_changed",
            Self::CollectionStopped => "collection_stopped",
            Self::ClockJumped => "clock_jumped",
            Self::IndexRebuilt => "index_rebuilt",
            Self::SecurityConfig => "security_config",
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// What is wrong.
    pub kind: DamageKind,
    /// What it is wrong with: a path below the data directory, or an id.
    pub subject: String,
    /// What was found.
    pub detail: String,
    /// What it means for users, and what to do.
    pub consequence: String,
    /// When it was first found.
    pub since: Timestamp,
}

/// All damage that is known.
#[derive(Debug, Default)]
pub(in crate::engine) struct DamageRegister {
    entries: Mutex<BTreeMap<(DamageKind, String), Damage>>,
}

impl DamageRegister {
    /// Adds damage, and returns whether it is new. An existing entry keeps its time and takes the
    /// new text.
    pub(in crate::engine) fn report(
        &self,
        kind: DamageKind,
        subject: impl Into<String>,
        detail: impl Into<String>,
        consequence: impl Into<String>,
    ) -> bool {
        let (subject, detail, consequence) = (subject.into(), detail.into(), consequence.into());
        let mut entries = self.entries.lock();
        let key = (kind, subject.clone());
        if let Some(known) = entries.get_mut(&key) {
            (known.detail, known.consequence) = (detail, consequence);
            return false;
        }
        tracing::error!(kind = kind.name(), subject, detail, consequence, "damage found");
        if entries.len() < LIMIT {
            entries.insert(key, Damage { kind, subject, detail, consequence, since: now() });
            return true;
        }
        false
    }

    /// Removes an entry, because the damage is gone, and says whether there was one.
    fn clear(&self, kind: DamageKind, subject: &str) -> bool {
        let cleared = self.entries.lock().remove(&(kind, subject.to_owned())).is_some();
        if cleared {
            tracing::info!(kind = kind.name(), subject, "damage cleared");
        }
        cleared
    }

    /// What there is damage of one kind to.
    pub(in crate::engine) fn subjects(&self, kind: DamageKind) -> BTreeSet<String> {
        let entries = self.entries.lock();
        entries.keys().filter(|(known, _)| *known == kind).map(|(_, of)| of.clone()).collect()
    }

    /// What is known of damage of a kind to something.
    pub(in crate::engine) fn detail(&self, kind: DamageKind, subject: &str) -> Option<String> {
        let entries = self.entries.lock();
        entries.get(&(kind, subject.to_owned())).map(|damage| damage.detail.clone())
    }

    pub(in crate::engine) fn all(&self) -> Vec<Damage> {
        self.entries.lock().values().cloned().collect()
    }
}

impl Context {
    /// Enters damage into the register.
    pub(in crate::engine) fn report_damage(
        &self,
        kind: DamageKind,
        subject: impl Into<String>,
        detail: impl Into<String>,
        consequence: impl Into<String>,
    ) {
        let (subject, detail, consequence) = (subject.into(), detail.into(), consequence.into());
        if self.damage.report(kind, &subject, &detail, &consequence) {
            let damage = kind.name().to_owned();
            let change = EventData::DamageFound { damage, subject, detail, consequence };
            self.events.emit(None, None, change);
        }
    }

    /// Takes damage that is gone out of the register.
    pub(in crate::engine) fn clear_damage(&self, kind: DamageKind, subject: &str) {
        if self.damage.clear(kind, subject) {
            let (damage, subject) = (kind.name().to_owned(), subject.to_owned());
            self.events.emit(None, None, EventData::DamageCleared { damage, subject });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DamageKind, DamageRegister, LIMIT};

    #[test]
    fn the_same_damage_is_one_entry() {
        let register = DamageRegister::default();
        register.report(DamageKind::Missing, "layers/a", "first", "x");
        let since = register.all()[0].since;
        register.report(DamageKind::Missing, "layers/a", "second", "x");
        let all = register.all();
        assert_eq!((all.len(), all[0].detail.as_str(), all[0].since), (1, "second", since));
        register.clear(DamageKind::SyncFailed, "layers/a");
        assert_eq!(register.all().len(), 1, "another kind is another entry");
        register.clear(DamageKind::Missing, "layers/a");
        assert!(register.all().is_empty());
    }

    #[test]
    fn the_register_is_bounded() {
        let register = DamageRegister::default();
        for number in 0..LIMIT + 10 {
            register.report(DamageKind::Missing, format!("layers/{number}"), "gone", "x");
        }
        assert_eq!(register.all().len(), LIMIT);
    }
}
