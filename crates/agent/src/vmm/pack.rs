//! Shows layers stacked, in a mount namespace that nobody else is in, to the program that packs them.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use rustix::mount::{MountFlags, MountPropagationFlags};
use sandkeep_proto::machine::{Pack, VERSION};

use super::{root, sys};
use crate::cage::{Step, Trouble, plain, read_plan, unshare, wrong_version};
use crate::overlay::Overlay;

/// Becomes the program; comes back only if that fails, and says why on standard error.
pub(crate) fn pack() -> ExitCode {
    let Trouble { step, reason } = match read_plan().and_then(|plan: Pack| become_packer(&plan)) {
        Ok(never) => match never {},
        Err(trouble) => trouble,
    };
    eprintln!("could not {step}: {reason}");
    ExitCode::FAILURE
}

fn become_packer(plan: &Pack) -> Result<std::convert::Infallible, Trouble> {
    if plan.version != VERSION {
        return Err(wrong_version(plan.version));
    }
    let lower = plan.lower.iter().map(|path| plain(path)).collect::<Result<Vec<_>, _>>()?;
    unshare(libc::CLONE_NEWNS).step("make the namespace")?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).step("keep mounts to itself")?;
    // Relative names are a fifth of absolute ones, and older kernels have a page for all of them.
    std::env::set_current_dir(&plan.layers_dir).step("enter the layers")?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Overlay { options: &["userxattr"], lower: &lower, writable: None, flags }
        .mount(Path::new(root::STAGE))?;
    let mut argv = plan.argv.clone();
    argv.push(root::STAGE.to_owned());
    let command = sys::Command::new(&plan.program, &argv, &BTreeMap::new())?;
    Err(Trouble::new("run the packer", command.exec()))
}
