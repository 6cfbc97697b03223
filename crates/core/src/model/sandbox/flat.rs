//! A sandbox as it is on disk: one flat document, of which each state uses a part.
//!
//! The document is older than [`SandboxState`] and stays as it is. Reading never fails for what it says about
//! the state. Daemons write, and wrote, these combinations, and all of them read back as they are:
//!
//! | `phase` | open session | `ending` | `decision` | `failure`, `guarded` | `debt` | `on_delete`, `forced`, `expired` |
//! |---|---|---|---|---|---|---|
//! | `stopped`, `paused` | no | maybe | with `ending` | no | no | no |
//! | `starting` | yes | no | no | no | `boot` | no |
//! | `running` | yes | no | no | no | no | no |
//! | `stopping` | maybe | yes | with a session | maybe: it was `failed` | `seal` | no |
//! | `failed` | maybe | maybe | with a session | maybe | no, `boot`, `seal` | no |
//! | `deleted` | maybe | maybe | with a session | maybe: it was `failed` | `erase` | maybe |
//!
//! The open session is all of `open_*`, `unsealed`, `captured`, `mounted` and `uids`, and exists
//! when `open_layer` does. `uids` are absent when a start failed for want of them and its machine
//! could not be ended.
//!
//! Earlier daemons did not clear every field that had lost its meaning. These are dropped: `open_image`
//! without an open session; `decision` without a session or an `ending` it is about; `guarded` of a
//! sandbox that was rolled back after its files were lost; `on_delete`, `forced` and `expired` of a
//! deletion that did not succeed.
//!
//! `revision` is absent in records of daemons that had none, and in those that were never saved: both
//! are revision 0. `owner` is absent where one node has all sandboxes.
//!
//! The `ending` of a `stopping` sandbox is absent in old records: it is the ordinary end of a session
//! that was stopped, which is what recovery always took it for.
//!
//! No daemon wrote `stopped` or `paused` with an open layer, or `starting` or `running` without one. Such
//! a record was made by hand. It is read as `failed`: the next start seals what there is.

use serde::{Deserialize, Serialize};

use super::{Breakdown, Deletion, Ended, LastSession, OpenSession, Sandbox, SandboxState};
use crate::model::lifecycle::{Effect, Phase};
use crate::model::{
    Config, Decision, Ending, Expiry, Finding, ForkOutcome, ImageConfig, LayerId, Lineage,
    MemoryId, MergePoint, Method, Mounted, Name, OnDelete, Ownership, Revision, SandboxId,
    SessionEnd, SessionId, SnapshotId, SnapshotKind, Timestamp, UidRange, Usage, Validation,
};

/// How a session ends of which a record of before says only that it is being stopped.
const STOP: Ending = Ending {
    end: SessionEnd::Stopped,
    kind: SnapshotKind::Stop,
    always: false,
    method: Method::Automatic,
    expiry: Expiry::Retention,
};

/// The document. [`Sandbox`] and [`SandboxState`] say what the fields mean.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Flat {
    format: u32,
    id: SandboxId,
    #[serde(default, skip_serializing_if = "Revision::is_new")]
    revision: Revision,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<Ownership>,
    project: Name,
    name: Name,
    config: Config,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    rules_as_made: bool,
    phase: Phase,
    debt: Option<Effect>,
    generation: u64,
    current: Option<SnapshotId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    missing: Option<SnapshotId>,
    image_layers: Vec<LayerId>,
    image_config: ImageConfig,
    forked_from: Option<Lineage>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rolled_back_at: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    merged: Vec<MergePoint>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    outcome: Option<ForkOutcome>,
    session: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ending: Option<Ending>,
    #[serde(default, skip_serializing_if = "OnDelete::is_drop")]
    on_delete: OnDelete,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    forced: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    expired: bool,
    #[serde(default)]
    totals: Usage,
    open_layer: Option<LayerId>,
    open_chain: Vec<LayerId>,
    unsealed: Option<LayerId>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    open_memory: Vec<MemoryId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    open_image: Option<usize>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    captured: Vec<MemoryId>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    mounted: Vec<Mounted>,
    uids: Option<UidRange>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    created_with: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    internal: bool,
    created_at: Timestamp,
    updated_at: Timestamp,
    #[serde(default)]
    phase_at: Timestamp,
    used_at: Timestamp,
    failure: Option<String>,
    #[serde(default, skip_serializing_if = "Decision::is_none")]
    decision: Decision,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    guarded: Vec<Finding>,
    validated: Option<Validation>,
}

impl From<Flat> for Sandbox {
    fn from(flat: Flat) -> Self {
        let session = flat.open_layer.map(|layer| OpenSession {
            layer,
            chain: flat.open_chain,
            unsealed: flat.unsealed,
            memory: flat.open_memory,
            image: flat.open_image,
            captured: flat.captured,
            mounted: flat.mounted,
            uids: flat.uids,
            decision: flat.decision.clone(),
        });
        let Flat { phase, ending, failure: why, guarded, on_delete, forced, expired, .. } = flat;
        let ended = || ending.map(|ending| Ended { ending, decision: flat.decision });
        let failure = Breakdown { why, guarded };
        let state = match (phase, session) {
            (Phase::Stopped, None) => SandboxState::Stopped(ended()),
            (Phase::Paused, None) => SandboxState::Paused(ended()),
            (Phase::Starting, Some(session)) => SandboxState::Starting(session),
            (Phase::Running, Some(session)) => SandboxState::Running(session),
            (Phase::Stopping, session) => {
                SandboxState::Stopping { session, ending: ending.unwrap_or(STOP), failure }
            }
            (Phase::Failed, session) => SandboxState::Failed {
                last: LastSession { session, ending, failure },
                pending: flat.debt,
            },
            (Phase::Deleted, session) => SandboxState::Deleted {
                last: LastSession { session, ending, failure },
                deletion: Deletion { on_delete, forced, expired },
            },
            (Phase::Stopped | Phase::Paused | Phase::Starting | Phase::Running, session) => {
                let open = if session.is_some() { "an" } else { "no" };
                let why = format!("its record says {phase:?} and names {open} open layer");
                let failure = Breakdown { why: Some(why), ..failure };
                SandboxState::Failed {
                    last: LastSession { session, ending, failure },
                    pending: None,
                }
            }
        };
        Self {
            format: flat.format,
            id: flat.id,
            revision: flat.revision,
            owner: flat.owner,
            project: flat.project,
            name: flat.name,
            config: flat.config,
            rules_as_made: flat.rules_as_made,
            generation: flat.generation,
            current: flat.current,
            missing: flat.missing,
            image_layers: flat.image_layers,
            image_config: flat.image_config,
            forked_from: flat.forked_from,
            rolled_back_at: flat.rolled_back_at,
            merged: flat.merged,
            outcome: flat.outcome,
            session: flat.session,
            totals: flat.totals,
            created_with: flat.created_with,
            internal: flat.internal,
            created_at: flat.created_at,
            updated_at: flat.updated_at,
            phase_at: flat.phase_at,
            used_at: flat.used_at,
            validated: flat.validated,
            state,
        }
    }
}

impl From<Sandbox> for Flat {
    fn from(sandbox: Sandbox) -> Self {
        let (phase, debt) = (sandbox.phase(), sandbox.pending_effect());
        let (ending, decision) = (sandbox.ending(), sandbox.decision().clone());
        let deletion = sandbox.deletion().unwrap_or_default();
        let LastSession { session, failure, .. } = sandbox.state.last();
        let mut flat = Self {
            format: sandbox.format,
            id: sandbox.id,
            revision: sandbox.revision,
            owner: sandbox.owner,
            project: sandbox.project,
            name: sandbox.name,
            config: sandbox.config,
            rules_as_made: sandbox.rules_as_made,
            phase,
            debt,
            generation: sandbox.generation,
            current: sandbox.current,
            missing: sandbox.missing,
            image_layers: sandbox.image_layers,
            image_config: sandbox.image_config,
            forked_from: sandbox.forked_from,
            rolled_back_at: sandbox.rolled_back_at,
            merged: sandbox.merged,
            outcome: sandbox.outcome,
            session: sandbox.session,
            ending,
            on_delete: deletion.on_delete,
            forced: deletion.forced,
            expired: deletion.expired,
            totals: sandbox.totals,
            open_layer: None,
            open_chain: Vec::new(),
            unsealed: None,
            open_memory: Vec::new(),
            open_image: None,
            captured: Vec::new(),
            mounted: Vec::new(),
            uids: None,
            created_with: sandbox.created_with,
            internal: sandbox.internal,
            created_at: sandbox.created_at,
            updated_at: sandbox.updated_at,
            phase_at: sandbox.phase_at,
            used_at: sandbox.used_at,
            failure: failure.why,
            decision,
            guarded: failure.guarded,
            validated: sandbox.validated,
        };
        if let Some(open) = session {
            flat.open_layer = Some(open.layer);
            flat.open_chain = open.chain;
            flat.unsealed = open.unsealed;
            flat.open_memory = open.memory;
            flat.open_image = open.image;
            flat.captured = open.captured;
            flat.mounted = open.mounted;
            flat.uids = open.uids;
        }
        flat
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, any, prop, prop_assert_eq, proptest};

    use super::{Flat, STOP, SandboxState};
    use crate::model::lifecycle::{Effect, Phase};
    use crate::model::{
        Config, Decision, DriveId, Finding, FindingKind, LayerId, MemoryId, MountMode, Mounted,
        OnDelete, Ownership, Revision, Sandbox, SessionId, SnapshotId, UidRange,
    };

    const PHASES: [Phase; 7] = [
        Phase::Stopped,
        Phase::Starting,
        Phase::Running,
        Phase::Paused,
        Phase::Stopping,
        Phase::Failed,
        Phase::Deleted,
    ];

    fn found() -> Finding {
        Finding {
            kind: FindingKind::Secret,
            path: "/work/a".to_owned(),
            size: 3,
            secret: Some("TOKEN".to_owned()),
            place: None,
            encoding: None,
            offset: None,
            detail: None,
            commands: Vec::new(),
        }
    }

    /// A document with every field that `has` says, whether or not they go together.
    fn document(phase: Phase, has: [bool; 20]) -> Flat {
        let [
            open,
            chain,
            unsealed,
            memory,
            image,
            captured,
            mounted,
            uids,
            ending,
            decision,
            why,
            guarded,
            debt,
            seal,
            keep,
            forced,
            expired,
            session,
            missing,
            validated,
        ] = has;
        let name = |text: &str| text.parse().expect("a name");
        let rest = Sandbox::new(name("p"), name("app"), Config::default(), false);
        let drive = Mounted {
            path: "/data".to_owned(),
            drive: DriveId::fresh(),
            mode: MountMode::ReadWrite,
            layer: LayerId::fresh(),
            chain: vec![LayerId::fresh()],
        };
        let effect = match phase {
            Phase::Starting => Effect::Boot,
            Phase::Stopping => Effect::Seal,
            Phase::Deleted => Effect::Erase,
            _ if seal => Effect::Seal,
            _ => Effect::Boot,
        };
        let validation = crate::model::Validation {
            exit_code: 1,
            output_hash: "00".to_owned(),
            excerpt: "no".to_owned(),
        };
        Flat {
            phase,
            debt: debt.then_some(effect),
            missing: missing.then(|| SnapshotId::of_layer(&LayerId::fresh())),
            session: session.then(SessionId::fresh),
            // Neither goes with a state; every record may have them.
            revision: if uids { Revision::from(7) } else { Revision::NEW },
            owner: seal.then(|| Ownership { node: name("n1"), epoch: 3 }),
            ending: ending.then_some(STOP),
            on_delete: if keep { OnDelete::Keep } else { OnDelete::Drop },
            forced,
            expired,
            open_layer: open.then(LayerId::fresh),
            open_chain: if chain { vec![LayerId::fresh(), LayerId::fresh()] } else { Vec::new() },
            unsealed: unsealed.then(LayerId::fresh),
            open_memory: if memory { vec![MemoryId::fresh()] } else { Vec::new() },
            open_image: image.then_some(2),
            captured: if captured { vec![MemoryId::fresh()] } else { Vec::new() },
            mounted: if mounted { vec![drive] } else { Vec::new() },
            uids: uids.then_some(UidRange { base: 1 << 30, count: 1 << 16 }),
            failure: why.then(|| "it broke".to_owned()),
            decision: Decision { discard: decision, ..Decision::default() },
            guarded: if guarded { vec![found()] } else { Vec::new() },
            validated: validated.then_some(validation),
            ..Flat::from(rest)
        }
    }

    /// Makes it one of the combinations that daemons write: the table in the head of this module.
    fn occurring(phase: Phase, mut has: [bool; 20]) -> [bool; 20] {
        let open = match phase {
            Phase::Stopped | Phase::Paused => false,
            Phase::Starting | Phase::Running => true,
            Phase::Stopping | Phase::Failed | Phase::Deleted => has[0],
        };
        has[0] = open;
        for of_session in &mut has[1..8] {
            *of_session &= open;
        }
        has[8] = match phase {
            Phase::Starting | Phase::Running => false,
            Phase::Stopping => true,
            _ => has[8],
        };
        has[9] &= match phase {
            Phase::Stopped | Phase::Paused => has[8],
            Phase::Starting | Phase::Running => false,
            _ => open,
        };
        let broke = matches!(phase, Phase::Stopping | Phase::Failed | Phase::Deleted);
        has[10] &= broke;
        has[11] &= broke;
        has[12] = match phase {
            Phase::Starting | Phase::Stopping | Phase::Deleted => true,
            Phase::Failed => has[12],
            Phase::Stopped | Phase::Running | Phase::Paused => false,
        };
        for of_deletion in &mut has[14..17] {
            *of_deletion &= phase == Phase::Deleted;
        }
        has
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn nothing_that_daemons_write_is_lost(
            phase in prop::sample::select(PHASES.to_vec()), has in any::<[bool; 20]>()
        ) {
            let flat = document(phase, occurring(phase, has));
            let text = serde_json::to_string(&flat).expect("it is written");
            let sandbox: Sandbox = serde_json::from_str(&text).expect("it reads");
            prop_assert_eq!(sandbox.phase(), phase);
            prop_assert_eq!(Flat::from(sandbox.clone()), flat);
            prop_assert_eq!(serde_json::to_string(&sandbox).expect("it is written"), text);
        }

        /// Whatever the fields say, it reads, an open session is kept, and it is the same from then on.
        #[test]
        fn every_document_reads(
            phase in prop::sample::select(PHASES.to_vec()), has in any::<[bool; 20]>()
        ) {
            let flat = document(phase, has);
            let sandbox = Sandbox::from(flat.clone());
            let contradicts = match phase {
                Phase::Stopped | Phase::Paused => has[0],
                Phase::Starting | Phase::Running => !has[0],
                _ => false,
            };
            prop_assert_eq!(sandbox.phase(), if contradicts { Phase::Failed } else { phase });
            let again = Flat::from(sandbox.clone());
            prop_assert_eq!(&again.open_layer, &flat.open_layer);
            if has[0] {
                prop_assert_eq!(&again.open_chain, &flat.open_chain);
                prop_assert_eq!(&again.unsealed, &flat.unsealed);
                prop_assert_eq!(&again.open_memory, &flat.open_memory);
                prop_assert_eq!(&again.captured, &flat.captured);
                prop_assert_eq!(&again.mounted, &flat.mounted);
                prop_assert_eq!(&again.uids, &flat.uids);
            }
            prop_assert_eq!(Sandbox::from(again), sandbox);
        }
    }

    /// What earlier daemons left in fields that had lost their meaning.
    #[test]
    fn leftovers_of_earlier_daemons_are_dropped() {
        let none = [false; 20];
        let with = |places: &[usize]| {
            let mut has = none;
            places.iter().for_each(|place| has[*place] = true);
            has
        };
        // An image's share after a session began with memory, and a rollback after the files were lost.
        let stopped = Sandbox::from(document(Phase::Stopped, with(&[4, 9, 11])));
        assert_eq!(stopped.state(), &SandboxState::Stopped(None));
        // A deletion by expiry that did not succeed.
        let failed = Sandbox::from(document(Phase::Failed, with(&[0, 10, 14, 16])));
        assert_eq!((failed.deletion(), failed.failure()), (None, Some("it broke")));
        // Stopped by a daemon that did not write down how.
        let stopping = Sandbox::from(document(Phase::Stopping, with(&[0, 12])));
        assert_eq!((stopping.ending(), stopping.open_layer().is_some()), (Some(STOP), true));
    }
}
