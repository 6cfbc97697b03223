//! Drives: volumes that outlive sandboxes, and how they are mounted. `docs/formats/drive.md`
//! describes their lifecycle.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::{BadConfig, DriveId, LayerId, Name, SandboxId, SessionId, Size, Timestamp};

/// How much a drive may hold by default.
pub const DRIVE_SIZE: Size = Size(1 << 40);

/// How many drives a sandbox can mount.
const MOST: usize = 4;

/// Places that are mounts of the machine's own.
const RESERVED: [&str; 4] = ["/proc", "/sys", "/dev", "/run"];

/// A volume that outlives sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// [`crate::model::FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: DriveId,
    /// The project it belongs to.
    pub project: Name,
    /// Its name, unique among the project's drives.
    pub name: Name,
    /// What it may hold.
    pub max_size: Size,
    /// What it holds, topmost first; empty until it was first written to.
    pub layers: Vec<LayerId>,
    /// How often what it holds was changed: by a session that wrote to it, or a promotion. Records of before begin at 0.
    #[serde(default)]
    pub generation: u64,
    /// Who writes to it now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached: Option<Attachment>,
    /// The drive it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<DriveId>,
    /// The first drive of that line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<DriveId>,
    /// What a front keeps with it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
}

impl Drive {
    /// Whether somebody has written to it, so that there is something to read or to fork.
    #[must_use]
    pub fn is_initialised(&self) -> bool {
        !self.layers.is_empty()
    }
}

/// A session that writes to a drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Its name.
    pub name: Name,
    /// The session.
    pub session: SessionId,
    /// What it writes to.
    pub layer: LayerId,
}

/// A drive a sandbox is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// The drive's name.
    pub drive: Name,
    /// How it is mounted; to be written to if absent.
    #[serde(default)]
    pub mode: MountMode,
}

/// How a drive is mounted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountMode {
    /// To be read and written, by one session at a time.
    #[default]
    ReadWrite,
    /// As it was when the session started, to be read.
    #[serde(alias = "read-only")]
    Snapshot,
}

/// Drives by the path they are mounted at.
pub type Mounts = BTreeMap<String, Mount>;

/// A drive that a session has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// Where.
    pub path: String,
    /// The drive.
    pub drive: DriveId,
    /// How.
    pub mode: MountMode,
    /// The open layer on top; of a snapshot nothing is written to it.
    pub layer: LayerId,
    /// What that stands on, topmost first.
    pub chain: Vec<LayerId>,
}

/// Checks mounts as a whole and spells their paths in the one way they are compared in.
///
/// # Errors
///
/// Returns [`BadConfig`] for the first thing that is wrong.
pub fn check_mounts(mounts: Mounts) -> Result<Mounts, BadConfig> {
    if mounts.len() > MOST {
        return Err(refuse(format!(
            "{} are too many: a sandbox mounts at most {MOST}",
            mounts.len()
        )));
    }
    let mut checked = Mounts::new();
    for (path, mount) in mounts {
        check_drive_name(&mount.drive)?;
        let plain = mount_path(&path)?;
        let inside = |other: &String| within(&plain, other) || within(other, &plain);
        if let Some(other) = checked.keys().find(|other| inside(other)) {
            return Err(refuse(format!("`{path}` and `{other}` overlap")));
        }
        let writes =
            |other: &Mount| other.mode == MountMode::ReadWrite && other.drive == mount.drive;
        if mount.mode == MountMode::ReadWrite && checked.values().any(writes) {
            let drive = &mount.drive;
            return Err(refuse(format!("drive `{drive}` can be written to in one place only")));
        }
        checked.insert(plain, mount);
    }
    Ok(checked)
}

/// Checks the name of a drive, which is shorter than other names.
///
/// # Errors
///
/// Returns [`BadConfig`].
pub fn check_drive_name(name: &Name) -> Result<(), BadConfig> {
    if name.as_str().len() <= 64 {
        return Ok(());
    }
    let reason = format!("`{name}` is too long: use 1 to 64 letters, digits, `-` and `_`");
    Err(BadConfig { field: "drive".into(), reason })
}

/// A path without empty and `.` parts.
fn mount_path(text: &str) -> Result<String, BadConfig> {
    if !text.starts_with('/') {
        return Err(refuse(format!("`{}` is not an absolute path", shown(text))));
    }
    if text.contains('\0') || text.split('/').any(|part| part == "..") {
        return Err(refuse(format!("`{}` has a `..` or a NUL byte in it", shown(text))));
    }
    let parts = text.split('/').filter(|part| !part.is_empty() && *part != ".");
    let plain: String = parts.flat_map(|part| ["/", part]).collect();
    if plain.is_empty() {
        return Err(refuse("`/` is the sandbox's own; choose a directory below it"));
    }
    if plain.len() > 256 || plain.split('/').any(|part| part.len() > 255) {
        return Err(refuse(format!("`{}` is longer than 256 bytes", shown(text))));
    }
    if let Some(place) = RESERVED.into_iter().find(|place| within(&plain, place)) {
        return Err(refuse(format!("`{plain}` cannot be used: {place} is the machine's own")));
    }
    Ok(plain)
}

/// Whether `path` is `place` or below it.
fn within(path: &str, place: &str) -> bool {
    path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn shown(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn refuse(reason: impl Into<String>) -> BadConfig {
    BadConfig { field: "mounts".into(), reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::{Mount, MountMode, Mounts, check_mounts};

    fn mounts(of: &[(&str, &str, MountMode)]) -> Mounts {
        let mount = |drive: &str, mode| Mount { drive: drive.parse().expect("a name"), mode };
        of.iter().map(|(path, drive, mode)| ((*path).to_owned(), mount(drive, *mode))).collect()
    }

    const RW: MountMode = MountMode::ReadWrite;
    const SNAPSHOT: MountMode = MountMode::Snapshot;

    #[test]
    fn paths_are_spelled_in_one_way() {
        let checked = check_mounts(mounts(&[("//data/./x/", "a", RW), ("/database", "b", RW)]));
        let paths: Vec<String> = checked.expect("they are fine").into_keys().collect();
        assert_eq!(paths, ["/data/x", "/database"]);
        let both =
            mounts(&[("/data", "a", RW), ("/then", "a", SNAPSHOT), ("/again", "a", SNAPSHOT)]);
        assert!(check_mounts(both).is_ok(), "a drive and what it was");
        assert!(check_mounts(mounts(&[("/running", "a", RW), ("/home/dev", "b", RW)])).is_ok());
    }

    #[test]
    fn what_cannot_be_mounted_is_refused() {
        let long = format!("/{}", "x/".repeat(200));
        for path in [
            "",
            "data",
            "/",
            "//.",
            "/..",
            "/data/../etc",
            "/a\0b",
            "/proc",
            "/proc/self",
            "/sys/fs",
            "/dev/shm",
            "/run/",
            "/run/x",
            &long,
        ] {
            let error = check_mounts(mounts(&[(path, "a", RW)])).expect_err(path);
            assert_eq!(error.field, "mounts", "{path}");
        }
        for pair in [["/a", "/a/"], ["/a", "/a/b"], ["/a/b/c", "/a"]] {
            let overlapping = mounts(&[(pair[0], "a", RW), (pair[1], "b", RW)]);
            assert!(check_mounts(overlapping).is_err(), "{pair:?}");
        }
        assert!(check_mounts(mounts(&[("/a", "x", RW), ("/b", "x", RW)])).is_err(), "two writers");
        let five: Vec<_> =
            ["/a", "/b", "/c", "/d", "/e"].map(|path| (path, "x", SNAPSHOT)).to_vec();
        assert!(check_mounts(mounts(&five)).is_err());
        assert!(check_mounts(mounts(&[("/a", &"x".repeat(65), RW)])).is_err());
    }

    #[test]
    fn modes_are_words() {
        let mode = |text: &str| serde_json::from_str::<MountMode>(text);
        assert_eq!(mode("\"read-write\"").ok(), Some(RW));
        assert_eq!(mode("\"snapshot\"").ok(), Some(SNAPSHOT));
        assert_eq!(mode("\"read-only\"").ok(), Some(SNAPSHOT), "an older word for it");
        assert!(mode("\"rw\"").is_err());
        assert_eq!(serde_json::to_string(&SNAPSHOT).expect("it writes"), "\"snapshot\"");
    }
}
