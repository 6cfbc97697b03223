//! Mounts overlays, with as many layers as the kernel can stack.
//!
//! Linux 6.8 and later are handed one layer at a time (`lowerdir+` of the new mount API), up to [`MOST`].
//! Older kernels take all options as one string that must fit a page ([`PAGE`]); the number of layers
//! that fit then depends on how long their names are, so it is counted in bytes.
//!
//! *A root that cannot be written is refused.* Overlayfs mounts read-only, without an error, when it
//! cannot prepare its work directory, for example because the disk is full. The mount would stay so when there is
//! room again. So a mount that was to be writable is checked once it exists, and a file system that
//! turned out to be read-only is an error, [`NO_ROOM`] where that is why.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags,
};
use sandkeep_proto::cage::NO_ROOM;

use crate::cage::{Step as _, StepError};

/// How many lower layers the kernel stacks at most.
pub(crate) const MOST: usize = 500;
/// How long the options of `mount(2)` may be, with the byte that ends them.
const PAGE: usize = 4096;
/// How long a value of `fsconfig(2)` may be, with the byte that ends it.
const VALUE: usize = 256;
/// With less than this free, a missing work directory means a lack of room.
const LITTLE: u64 = 4 << 20;

const STEP: &str = "stack the layers";

/// The part of an overlay that is written to.
pub(crate) struct Writable<'a> {
    pub(crate) upper: &'a str,
    pub(crate) work: &'a str,
}

/// An overlay to be mounted. Relative paths begin at the current directory.
pub(crate) struct Overlay<'a> {
    /// Plain options, `name` or `name=value`.
    pub(crate) options: &'a [&'a str],
    /// The topmost first.
    pub(crate) lower: &'a [&'a str],
    pub(crate) writable: Option<Writable<'a>>,
    pub(crate) flags: MountFlags,
}

impl Overlay<'_> {
    /// Mounts it on `target`.
    pub(crate) fn mount(&self, target: &Path) -> Result<(), StepError> {
        if self.lower.len() > MOST {
            return Err(self.too_many(MOST));
        }
        match self.create() {
            Ok(mount) => {
                let empty_path = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
                rustix::mount::move_mount(&mount, "", CWD, target, empty_path).step(STEP)?;
            }
            // The kernel is too old for one of the calls, or for `lowerdir+`.
            Err(Failed::Unknown) => self.mount_at_once(target)?,
            Err(Failed::Refused(error)) => return Err(StepError::new(STEP, error)),
        }
        if self.writable.is_some() && !self.flags.contains(MountFlags::RDONLY) {
            verify_writable(target).inspect_err(|_| {
                let _ = rustix::mount::unmount(target, UnmountFlags::DETACH);
            })?;
        }
        Ok(())
    }

    /// Makes the mount with the new mount API, attached nowhere.
    fn create(&self) -> Result<OwnedFd, Failed> {
        let context = match rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC) {
            Err(Errno::NOSYS) => return Err(Failed::Unknown),
            opened => opened?,
        };
        let context = context.as_fd();
        let set = |key: &str, value: &str| {
            // A longer one would have to be handed over otherwise; `mount(2)` takes it if any does.
            if value.len() >= VALUE {
                return Err(Failed::Unknown);
            }
            Ok(rustix::mount::fsconfig_set_string(context, key, value)?)
        };
        rustix::mount::fsconfig_set_string(context, "source", "overlay")?;
        for (number, layer) in self.lower.iter().enumerate() {
            match set("lowerdir+", layer) {
                Err(Failed::Refused(Errno::INVAL)) if number == 0 => return Err(Failed::Unknown),
                set => set?,
            }
        }
        for option in self.options {
            match option.split_once('=') {
                Some((key, value)) => set(key, value)?,
                None => rustix::mount::fsconfig_set_flag(context, *option)?,
            }
        }
        if let Some(Writable { upper, work }) = &self.writable {
            set("upperdir", upper)?;
            set("workdir", work)?;
        }
        if self.flags.contains(MountFlags::RDONLY) {
            // The filesystem itself, not this mount of it alone.
            rustix::mount::fsconfig_set_flag(context, "ro")?;
        }
        match rustix::mount::fsconfig_create(context) {
            // Before Linux 6.5 overlayfs takes any option and refuses those it does not know only here.
            Err(Errno::INVAL) => return Err(Failed::Unknown),
            created => created?,
        }
        let mut attributes = MountAttrFlags::empty();
        for (flag, attribute) in [
            (MountFlags::RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
            (MountFlags::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
            (MountFlags::NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
            (MountFlags::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        ] {
            attributes.set(attribute, self.flags.contains(flag));
        }
        Ok(rustix::mount::fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
    }

    /// Mounts it with `mount(2)`.
    fn mount_at_once(&self, target: &Path) -> Result<(), StepError> {
        let options = self.spelled()?;
        rustix::mount::mount("overlay", target, "overlay", self.flags, options.as_c_str())
            .step(STEP)
    }

    /// All options in one string, if it fits a page.
    fn spelled(&self) -> Result<CString, StepError> {
        let mut text = self.options.join(",");
        text.push_str(",lowerdir=");
        let before = text.len();
        text.push_str(&self.lower.join(":"));
        let layers = text.len() - before;
        if let Some(Writable { upper, work }) = &self.writable {
            text.push_str(&format!(",upperdir={upper},workdir={work}"));
        }
        if text.len() >= PAGE {
            let each = layers / self.lower.len().max(1) + 1;
            return Err(self.too_many((PAGE - 1 - (text.len() - layers)) / each));
        }
        CString::new(text).step("name the layers")
    }

    fn too_many(&self, most: usize) -> StepError {
        let count = self.lower.len();
        let reason = format!("{count} layers are more than this kernel can stack, which is {most}");
        StepError::new("name the layers", reason)
    }
}

enum Failed {
    /// The kernel does not know the call or the option.
    Unknown,
    Refused(Errno),
}

impl From<Errno> for Failed {
    fn from(error: Errno) -> Self {
        match error {
            Errno::NOSYS => Self::Unknown,
            error => Self::Refused(error),
        }
    }
}

/// Refuses a mount that the kernel made read-only although it was to be written to.
fn verify_writable(target: &Path) -> Result<(), StepError> {
    let found = rustix::fs::statvfs(target).step("look at the new root")?;
    if !found.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Ok(());
    }
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free < LITTLE {
        return Err(StepError::new(NO_ROOM, format!("the disk is full: {free} bytes are free")));
    }
    let reason = "the kernel mounted it read-only; its log says why (`dmesg`)";
    Err(StepError::new("make the root writable", reason))
}

#[cfg(test)]
mod tests {
    use rustix::mount::MountFlags;

    use super::{Overlay, Writable};

    fn fits(count: usize) -> bool {
        let names: Vec<String> = (0..count).map(|n| format!("lay-{n:026}/diff")).collect();
        let lower: Vec<&str> = names.iter().map(String::as_str).collect();
        let writable = Some(Writable { upper: "../writable/diff", work: "../writable/work" });
        let options = ["userxattr", "index=off", "uuid=off"];
        let flags = MountFlags::empty();
        Overlay { options: &options, lower: &lower, writable, flags }.spelled().is_ok()
    }

    #[test]
    fn without_the_new_api_the_layers_must_fit_a_page() {
        assert!(fits(100), "the bound of the engine");
        assert!(fits(110));
        assert!(!fits(115));
    }
}
