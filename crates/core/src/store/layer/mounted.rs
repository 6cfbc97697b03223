//! Whether an open layer is still mounted for writing.
//!
//! The kernel knows: overlayfs marks the upper directory of every mount, by its inode, in whatever namespace
//! the mount is and whatever the path of the directory is. A mount that asks for exclusive use (`index=on`) of a
//! marked directory fails with `EBUSY`. The check is a mount that cannot succeed, because its work directory is
//! above its upper one: the kernel tests that after the mark and before it writes anything, and fails with
//! `EINVAL`.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use rustix::io::Errno;
use rustix::mount::{FsOpenFlags, fsconfig_create, fsconfig_set_string, fsopen};

use crate::model::LayerId;
use crate::store::{Result, Store, blocking, io_error};

impl Store {
    /// Whether an open layer is the upper directory of a mount, anywhere on this host. A mount that is being taken down counts.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`](crate::store::StoreError::Io) when the layer cannot be opened.
    pub async fn is_mounted(&self, open: &LayerId) -> Result<bool> {
        let (store, id) = (self.clone(), open.clone());
        blocking(move || {
            let dir = store.layer_dir(&id);
            let layer = match File::open(&dir) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
                opened => opened.map_err(io_error("open", &dir))?,
            };
            let answer = ask(&layer, &store.inner.dir);
            match answer {
                Err(Errno::BUSY) => Ok(true),
                Ok(()) | Err(Errno::INVAL) => Ok(false),
                Err(error) => {
                    tracing::debug!(layer = %id, %error, "could not find out whether a layer is mounted");
                    Ok(false)
                }
            }
        })
        .await
    }
}

/// Asks for a mount that is refused in any case.
fn ask(layer: &File, data: &File) -> rustix::io::Result<()> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Not by their paths, which may be too long for a value.
    let below = |file: &File, name: &str| format!("/proc/self/fd/{}/{name}", file.as_raw_fd());
    for (key, value) in [
        ("lowerdir", below(data, "tmp")),
        ("upperdir", below(layer, "diff")),
        ("workdir", below(layer, ".")),
        ("index", "on".to_owned()),
    ] {
        fsconfig_set_string(&context, key, value.as_str())?;
    }
    fsconfig_create(&context)
}
