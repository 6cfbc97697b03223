//! The identity of a machine: its host name, its address, its ids; and its time.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

use sandkeep_proto::link::{Identity, Moment};

use super::{Whole, assemble, sys};
use crate::cage::{Step as _, StepError};

/// The machine's network device.
pub(super) const DEVICE: &CStr = c"eth0";

pub(super) fn take_in(moment: &Moment, random: &OwnedFd) -> Result<(), StepError> {
    sys::set_clock(moment.unix_ns).step("set the clock")?;
    // As text it holds as much as the 64 bytes it stands for.
    let entropy = moment.entropy.reveal().as_bytes();
    sys::add_entropy(random, entropy, 512).step("take in randomness")
}

/// Sets its identity in the kernel.
pub(super) fn take_on(identity: &Identity) -> Result<(), StepError> {
    rustix::system::sethostname(identity.hostname.as_bytes()).step("set the host name")?;
    sys::set_address(DEVICE, identity.mac).step("set the network device's address")
}

impl Whole {
    /// What the kernel does not know: other ids than the machine had whose memory this was.
    pub(super) fn renew(&self, hostname: &str, machine_id: bool) -> Result<(), StepError> {
        if let Some(base) = &self.base {
            assemble::name_in(base.as_fd(), hostname)?;
        }
        if let Some(boot_id) = &self.boot_id {
            boot_id.write_all_at(uuid()?.as_bytes(), 0).step("change the boot id")?;
        }
        if machine_id { change_machine_id() } else { Ok(()) }
    }
}

/// A boot id, as the kernel writes it.
pub(super) fn uuid() -> Result<String, StepError> {
    let mut bytes = [0_u8; 16];
    random(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let text = crate::serve::hex(&bytes);
    let parts = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)];
    let parts = parts.map(|(from, to)| text.get(from..to).unwrap_or_default());
    Ok(format!("{}\n", parts.join("-")))
}

/// Changes `/etc/machine-id`, where there is one: an image without has none in any of its machines.
fn change_machine_id() -> Result<(), StepError> {
    let path = "/etc/machine-id";
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() && found.len() > 0 => {}
        _ => return Ok(()),
    }
    let step = "change the machine id";
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    let mut options = File::options();
    options.write(true).truncate(true).custom_flags(libc::O_NOFOLLOW);
    let mut file = options.open(path).step(step)?;
    writeln!(file, "{}", crate::serve::hex(&bytes)).step(step)
}

fn random(bytes: &mut [u8]) -> Result<(), StepError> {
    crate::serve::random(bytes).step("draw random bytes")
}

#[cfg(test)]
mod tests {
    use super::uuid;

    #[test]
    fn a_boot_id_has_the_kernels_form() {
        let (one, two) = (uuid().expect("random"), uuid().expect("random"));
        assert_ne!(one, two);
        assert_eq!(one.len(), 37);
        let dashes: Vec<usize> = one.match_indices('-').map(|(at, _)| at).collect();
        assert_eq!(dashes, [8, 13, 18, 23]);
        assert_eq!(one.as_bytes()[14], b'4');
    }
}
