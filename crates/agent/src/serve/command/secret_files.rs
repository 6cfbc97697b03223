//! Files that hold a secret while one command runs.
//!
//! They are in memory (`/run` or `/dev/shm`), belong to the command's user, and go when its process has
//! exited. It is the agent that removes them, so no daemon has to be there for it.
//!
//! What is on the way was made by the sandbox, which is not trusted: no link is followed and no other
//! filesystem entered, so a secret ends up in memory or nowhere.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use sandkeep_proto::link::{Failure, SecretFile};

use crate::serve::command::user::Identity;
use crate::serve::error::{RequestError, kind_of, say};

/// Where memory is mounted.
const MEMORY: [&str; 2] = ["/run", "/dev/shm"];
const TMPFS: u64 = 0x0102_1994;

/// The files of one command; they are removed when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct SecretFiles(Vec<(OwnedFd, String)>);

impl SecretFiles {
    /// Makes the files.
    pub(crate) fn write(files: &[SecretFile], identity: &Identity) -> Result<Self, RequestError> {
        let mut made = Self::default();
        for file in files {
            made.add(file, identity).map_err(|error| {
                let io = std::io::Error::from(error);
                let message = match error {
                    Errno::LOOP | Errno::XDEV => {
                        "a link or another filesystem is on the way".to_owned()
                    }
                    _ => say(&io).to_string(),
                };
                let kind = match error {
                    Errno::LOOP | Errno::XDEV | Errno::INVAL => Failure::Invalid,
                    _ => kind_of(&io),
                };
                RequestError::new(kind, format!("could not write `{}`: {message}", file.path))
            })?;
        }
        Ok(made)
    }

    fn add(&mut self, file: &SecretFile, identity: &Identity) -> rustix::io::Result<()> {
        let (root, inside) = MEMORY
            .iter()
            .find_map(|root| Some((*root, file.path.strip_prefix(root)?.strip_prefix('/')?)))
            .ok_or(Errno::INVAL)?;
        let mut dir = rustix::fs::open(root, DIRECTORY, Mode::empty())?;
        if u64::try_from(rustix::fs::fstatfs(&dir)?.f_type).ok() != Some(TMPFS) {
            return Err(Errno::XDEV);
        }
        let (parents, name) = match inside.rsplit_once('/') {
            Some((parents, name)) => (parents.split('/').collect(), name),
            None => (Vec::new(), inside),
        };
        for part in parents {
            dir = enter(dir.as_fd(), part)?;
        }
        if matches!(name, "" | "." | "..") {
            return Err(Errno::INVAL);
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let written = rustix::fs::openat2(&dir, name, flags, Mode::RUSR, WITHIN)?;
        self.0.push((dir, name.to_owned()));
        let mut rest = file.value.reveal().as_bytes();
        while !rest.is_empty() {
            let count = rustix::io::write(&written, rest)?;
            rest = rest.get(count..).unwrap_or_default();
        }
        // Last: no other user can open it before it is complete.
        rustix::fs::fchown(&written, Some(Uid::from_raw(identity.uid)), None)
    }
}

impl Drop for SecretFiles {
    fn drop(&mut self) {
        for (dir, name) in self.0.drain(..) {
            let _ = rustix::fs::unlinkat(&dir, name, AtFlags::empty());
        }
    }
}

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC);
const WITHIN: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Goes into a directory, which is made if it is not there.
fn enter(dir: BorrowedFd<'_>, name: &str) -> rustix::io::Result<OwnedFd> {
    if matches!(name, "" | "." | "..") {
        return Err(Errno::INVAL);
    }
    match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    rustix::fs::openat2(dir, name, DIRECTORY, Mode::empty(), WITHIN)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::path::Path;

    use sandkeep_proto::link::{Failure, Hidden, SecretFile};

    use super::SecretFiles;
    use crate::serve::command::user::Identity;

    fn me() -> Identity {
        let uid = rustix::process::getuid().as_raw();
        Identity {
            uid,
            gid: 0,
            groups: Vec::new(),
            name: None,
            home: "/".to_owned(),
            shell: "/bin/sh".to_owned(),
        }
    }

    fn file(path: &str) -> SecretFile {
        SecretFile { path: path.to_owned(), value: Hidden::new("hunter2hunter2") }
    }

    #[test]
    fn a_file_is_there_as_long_as_it_is_held() {
        let dir = format!("/dev/shm/keep-agent-test-{}", std::process::id());
        let path = format!("{dir}/a/b");
        let held = SecretFiles::write(&[file(&path)], &me()).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "hunter2hunter2");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o400);
        let taken = SecretFiles::write(&[file(&path)], &me()).unwrap_err();
        assert_eq!(taken.kind, Failure::Exists);
        assert!(Path::new(&path).exists(), "what was there is left alone");
        drop(held);
        assert!(!Path::new(&path).exists());
        symlink("/tmp", format!("{dir}/link")).unwrap();
        for bad in [&format!("{dir}/link/x"), &format!("{dir}/../x"), "/tmp/x", "/run", "/runner/x"]
        {
            let refused = SecretFiles::write(&[file(bad)], &me()).unwrap_err();
            assert_eq!(refused.kind, Failure::Invalid, "{bad}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
