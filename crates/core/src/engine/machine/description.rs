//! The description of a sandbox's machine, as drivers take it.

use crate::driver::{Machine, MachineMount};
use crate::engine::machine::Machines;
use crate::engine::machine::uid_ranges::IDS;
use crate::engine::{Error, Result};
use crate::model::{LayerId, Limits, MachineKey, MountMode, Mounted, RootFs, Sandbox, UidRange};

impl Machines {
    /// What the driver is to mount.
    pub(in crate::engine) fn machine_mounts(&self, sandbox: &Sandbox) -> Vec<MachineMount> {
        let user = sandbox.config.user.as_ref().or(sandbox.image_config.user.as_ref());
        let owner = user.map_or("root", String::as_str);
        let described = |mounted: &Mounted| MachineMount {
            target: mounted.path.clone().into(),
            root: self.store.root(&mounted.layer, &mounted.chain),
            read_only: mounted.mode == MountMode::Snapshot,
            owner: mounted.chain.is_empty().then(|| owner.to_owned()),
        };
        sandbox.mounted().iter().map(described).collect()
    }

    /// A machine of a sandbox as it would be, wherever its files are.
    pub(in crate::engine) fn describe_unplaced(&self, sandbox: &Sandbox) -> Machine {
        Machine {
            key: MachineKey::from(&sandbox.id),
            hostname: hostname(sandbox.name.as_str()),
            root: self.store.root(&LayerId::fresh(), &[]),
            uids: UidRange { base: self.context.settings.uid_base, count: IDS },
            limits: limits(sandbox),
            mounts: Vec::new(),
        }
    }

    pub(in crate::engine) fn machine(&self, sandbox: &Sandbox) -> Result<Machine> {
        let missing = || Error::invalid("sandbox", "its record names no open layer");
        let open = sandbox.open_session().ok_or_else(missing)?;
        Ok(Machine {
            key: MachineKey::from(&sandbox.id),
            hostname: hostname(sandbox.name.as_str()),
            root: RootFs {
                image: image_layers(sandbox),
                ..self.store.root(&open.layer, &open.chain)
            },
            uids: open.uids.ok_or_else(missing)?,
            limits: limits(sandbox),
            mounts: self.machine_mounts(sandbox),
        })
    }
}

/// How many of the lowest layers of its chain are an image's.
pub(in crate::engine) fn image_layers(sandbox: &Sandbox) -> usize {
    let said = sandbox.open_session().and_then(|open| open.image);
    said.unwrap_or_else(|| own_image(sandbox.open_chain(), sandbox))
}

/// How many of the lowest layers of a chain are of the image that a sandbox was made from.
pub(in crate::engine) fn own_image(chain: &[LayerId], sandbox: &Sandbox) -> usize {
    match chain.ends_with(&sandbox.image_layers) {
        true => sandbox.image_layers.len(),
        false => 0,
    }
}

pub(in crate::engine) fn limits(sandbox: &Sandbox) -> Limits {
    let resources = sandbox.config.resources;
    Limits {
        millicpus: resources.millicpus,
        memory: resources.memory,
        pids: resources.pids,
        file_size: resources.disk,
    }
}

/// A name that hosts may have: no underscores, at most 63 characters.
fn hostname(name: &str) -> String {
    let plain: String = name.chars().take(63).map(|c| if c == '_' { '-' } else { c }).collect();
    let trimmed = plain.trim_matches('-');
    if trimmed.is_empty() { "sandbox".to_owned() } else { trimmed.to_owned() }
}
