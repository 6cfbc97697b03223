//! `keep promote FORK --only GLOB --out DIR`: chosen files that a fork made or changed, unpacked on this machine.
//!
//! They come out as `tar -x` would leave them: hard links, symbolic links, modes, times and attributes, and owners for root.
//! The archive is what a sandbox wrote, so it is not trusted: nothing is written outside of the directory, no link is followed
//! on the way, no device is made, and `setuid` counts only for root, who has it from the archive's owner.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, lchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use sandkeep_client::types::TakeArtifacts;
use serde::Serialize;
use tokio::sync::mpsc;

use super::tar::{Source, below, existing_place, fresh_place, make_inside};
use super::{Context, bytes as shown};
use crate::args::PromoteArgs;
use crate::failure::Failure;

/// The prefix of attributes in an archive.
const ATTRIBUTE: &str = "SCHILY.xattr.";
/// How many names are listed that were left out.
const NAMED: usize = 20;

/// What was unpacked, as JSON.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Taken {
    /// Everything but directories.
    files: Vec<String>,
    bytes: u64,
    /// What was left out, and why.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    left_out: BTreeMap<String, String>,
}

/// Where it is unpacked, and by whom.
struct ArtifactUnpacker<'a> {
    destination: &'a Path,
    is_root: bool,
    taken: Taken,
    /// Directories, whose attributes come last: a read-only one could not be filled.
    directories: Vec<(PathBuf, EntryAttributes)>,
}

/// What an entry says of a file besides its content.
#[derive(Debug)]
struct EntryAttributes {
    mode: u32,
    uid: u32,
    gid: u32,
    modified: Timespec,
    extended: Vec<(String, Vec<u8>)>,
}

pub(super) async fn take_out(
    context: &Context,
    args: &PromoteArgs,
    out: &Path,
) -> Result<(), Failure> {
    let request = TakeArtifacts { only: args.only.clone() };
    let mut download = context.client.take_artifacts(&args.fork, &request).await?;
    let (sender, source) = mpsc::channel(8);
    let destination = out.to_path_buf();
    let is_root = rustix::process::geteuid().is_root();
    let unpacked = tokio::task::spawn_blocking(move || unpack(source, &destination, is_root));
    loop {
        let piece = match download.next().await {
            Ok(Some(piece)) => Ok(piece),
            Ok(None) => break,
            Err(error) => {
                // What was unpacked so far stays; it is not taken for all.
                drop(sender.send(Err(io::ErrorKind::UnexpectedEof.into())).await);
                drop(sender);
                let _ = unpacked.await;
                return Err(error.into());
            }
        };
        if sender.send(piece).await.is_err() {
            break;
        }
    }
    drop(sender);
    let cannot = |error| Failure::caused(format!("cannot write to `{}`", out.display()), error);
    let taken = unpacked.await.map_err(|error| cannot(io::Error::other(error)))?.map_err(cannot)?;
    context.screen.answer(&taken, |taken| {
        let mut text: String = taken.files.iter().map(|path| format!("{path}\n")).collect();
        for (path, why) in &taken.left_out {
            text.push_str(&format!("{path}  left out: {why}\n"));
        }
        let noun = if taken.files.len() == 1 { "file" } else { "files" };
        text + &format!("{} {noun}, {}\n", taken.files.len(), shown(taken.bytes))
    })
}

fn unpack(
    source: mpsc::Receiver<io::Result<bytes::Bytes>>,
    destination: &Path,
    is_root: bool,
) -> io::Result<Taken> {
    fs::create_dir_all(destination)?;
    let mut archive = tar::Archive::new(Source::new(source));
    let mut unpacking =
        ArtifactUnpacker { destination, is_root, taken: Taken::default(), directories: Vec::new() };
    for entry in archive.entries()? {
        unpacking.entry(entry?)?;
    }
    let directories = std::mem::take(&mut unpacking.directories);
    for (inner, attributes) in directories.iter().rev() {
        let at = existing_place(destination, inner)?;
        unpacking.dress(inner, &at, attributes, false)?;
    }
    Ok(unpacking.taken)
}

impl ArtifactUnpacker<'_> {
    fn entry<R: Read>(&mut self, mut entry: tar::Entry<'_, R>) -> io::Result<()> {
        let attributes = EntryAttributes::of(&mut entry)?;
        let name = entry.path()?.into_owned();
        let outside = |name: &Path| {
            io::Error::other(format!("the archive names `{}`, which is outside it", name.display()))
        };
        let inner = below(&name, None).ok_or_else(|| outside(&name))?;
        if inner.as_os_str().is_empty() {
            return Ok(());
        }
        let kind = entry.header().entry_type();
        if kind == tar::EntryType::Directory {
            make_inside(self.destination, &inner)?;
            self.directories.push((inner, attributes));
            return Ok(());
        }
        let left_out = match kind {
            tar::EntryType::Char | tar::EntryType::Block => Some("it is a device"),
            tar::EntryType::Regular
            | tar::EntryType::Link
            | tar::EntryType::Symlink
            | tar::EntryType::Fifo => None,
            _ => Some("it is no file"),
        };
        if let Some(why) = left_out {
            self.leave_out(&inner, why.to_owned());
            return Ok(());
        }
        let at = fresh_place(self.destination, &inner)?;
        match kind {
            tar::EntryType::Regular => {
                let mut file = fs::File::create_new(&at)?;
                self.taken.bytes += io::copy(&mut entry, &mut file)?;
            }
            tar::EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default();
                std::os::unix::fs::symlink(OsStr::from_bytes(&target), &at)?;
            }
            tar::EntryType::Link => {
                let target = entry.link_name()?.unwrap_or_default().into_owned();
                let target = below(&target, None).ok_or_else(|| outside(&target))?;
                fs::hard_link(existing_place(self.destination, &target)?, &at)?;
            }
            _ => rustix::fs::mknodat(CWD, &at, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?,
        }
        // Another name of a file has what the first one has.
        if kind != tar::EntryType::Link {
            self.dress(&inner, &at, &attributes, kind == tar::EntryType::Symlink)?;
        }
        self.taken.files.push(format!("/{}", inner.display()));
        Ok(())
    }

    /// Gives a file its owner, mode, attributes and time, in this order: a new owner takes `setuid` and capabilities away,
    /// and all of them change the time.
    fn dress(
        &mut self,
        inner: &Path,
        at: &Path,
        attributes: &EntryAttributes,
        is_link: bool,
    ) -> io::Result<()> {
        if self.is_root {
            lchown(at, Some(attributes.uid), Some(attributes.gid))?;
        }
        if !is_link {
            let kept = if self.is_root { 0o7777 } else { 0o777 };
            fs::set_permissions(at, fs::Permissions::from_mode(attributes.mode & kept))?;
        }
        for (key, value) in &attributes.extended {
            // Only root may set others.
            if !self.is_root && !key.starts_with("user.") {
                continue;
            }
            match rustix::fs::lsetxattr(at, key.as_str(), value, XattrFlags::empty()) {
                Ok(()) => {}
                Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::PERM) => {
                    let why = format!("its attribute `{key}` cannot be set here");
                    self.leave_out(inner, why);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let times =
            Timestamps { last_access: attributes.modified, last_modification: attributes.modified };
        rustix::fs::utimensat(CWD, at, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }

    fn leave_out(&mut self, inner: &Path, why: String) {
        if self.taken.left_out.len() < NAMED {
            self.taken.left_out.insert(format!("/{}", inner.display()), why);
        }
    }
}

impl EntryAttributes {
    fn of<R: Read>(entry: &mut tar::Entry<'_, R>) -> io::Result<Self> {
        let header = entry.header();
        let id = |id: u64| u32::try_from(id).map_err(|_| io::Error::other("an owner is no number"));
        let (mut uid, mut gid) = (id(header.uid()?)?, id(header.gid()?)?);
        let mode = header.mode()?;
        let seconds = i64::try_from(header.mtime()?).unwrap_or(i64::MAX);
        let mut modified = Timespec { tv_sec: seconds, tv_nsec: 0 };
        let mut extended = Vec::new();
        for extension in entry.pax_extensions()?.into_iter().flatten() {
            let extension = extension?;
            let key = extension.key().map_err(io::Error::other)?;
            let text = || extension.value().map_err(io::Error::other);
            let number = || text()?.parse().map_err(io::Error::other);
            match key {
                "uid" => uid = number()?,
                "gid" => gid = number()?,
                "mtime" => {
                    modified = time(text()?).ok_or_else(|| io::Error::other("a bad time"))?;
                }
                key => {
                    if let Some(key) = key.strip_prefix(ATTRIBUTE) {
                        extended.push((key.to_owned(), extension.value_bytes().to_vec()));
                    }
                }
            }
        }
        Ok(Self { mode, uid, gid, modified, extended })
    }
}

/// A time of an archive: seconds with a fraction; before 1970 both count downwards.
fn time(text: &str) -> Option<Timespec> {
    let (sign, text) = text.strip_prefix('-').map_or((1, text), |rest| (-1, rest));
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let nanos = format!("{fraction:0<9}").get(..9)?.parse::<i64>().ok()?;
    let all = (i128::from(seconds.parse::<i64>().ok()?) * 1_000_000_000 + i128::from(nanos)) * sign;
    let tv_sec = i64::try_from(all.div_euclid(1_000_000_000)).ok()?;
    Some(Timespec { tv_sec, tv_nsec: i64::try_from(all.rem_euclid(1_000_000_000)).ok()? })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::path::Path;

    use bytes::Bytes;
    use rustix::fs::Timespec;
    use tokio::sync::mpsc;

    use super::{Taken, time, unpack};

    type Builder = tar::Builder<Vec<u8>>;

    fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size);
        header.set_mtime(1_000_000_000);
        let own = rustix::process::geteuid().as_raw();
        header.set_uid(own.into());
        header.set_gid(rustix::process::getegid().as_raw().into());
        header
    }

    /// Adds an entry, whatever its name is.
    fn add(builder: &mut Builder, kind: tar::EntryType, name: &str, link: &str, content: &str) {
        let mut header = header(kind, 0o640, content.len() as u64);
        let fields = header.as_ustar_mut().expect("this format");
        fields.name[..name.len()].copy_from_slice(name.as_bytes());
        fields.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        builder.append(&header, content.as_bytes()).expect("an entry");
    }

    fn unpacked(builder: Builder, into: &Path, is_root: bool) -> io::Result<Taken> {
        let (sender, receiver) = mpsc::channel(1);
        let archive = builder.into_inner().expect("an archive");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for piece in archive.chunks(700) {
                    if sender.blocking_send(Ok(Bytes::copy_from_slice(piece))).is_err() {
                        return;
                    }
                }
            });
            unpack(receiver, into, is_root)
        })
    }

    #[test]
    fn links_modes_times_and_attributes_come_out_as_they_are() {
        use tar::EntryType::{Directory, Fifo, Link, Regular, Symlink};
        let dir = tempfile::tempdir().expect("a directory");
        let out = dir.path().join("out");
        let mut builder = Builder::new(Vec::new());
        let mut read_only = header(Directory, 0o555, 0);
        builder.append_data(&mut read_only, "d/", io::empty()).expect("a directory");
        let records: [(&str, &[u8]); 2] =
            [("mtime", b"1000000000.123456789"), ("SCHILY.xattr.user.k", b"a\0b")];
        builder.append_pax_extensions(records).expect("records");
        let mut file = header(Regular, 0o4751, 5);
        builder.append_data(&mut file, "d/a", &b"he\0lo"[..]).expect("a file");
        add(&mut builder, Link, "d/b", "d/a", "");
        add(&mut builder, Symlink, "d/c", "../../anywhere", "");
        add(&mut builder, Fifo, "d/p", "", "");
        let is_root = rustix::process::geteuid().is_root();
        let taken = unpacked(builder, &out, is_root).expect("it is unpacked");
        assert_eq!(taken.files, ["/d/a", "/d/b", "/d/c", "/d/p"]);
        assert_eq!(taken.bytes, 5);
        let at = |name: &str| fs::symlink_metadata(out.join(name)).expect(name);
        let a = at("d/a");
        assert_eq!((a.ino(), a.nlink()), (at("d/b").ino(), 2), "one file with two names");
        let mode = if is_root { 0o4751 } else { 0o751 };
        assert_eq!(a.mode() & 0o7777, mode, "setuid is for root");
        assert_eq!((a.mtime(), a.mtime_nsec()), (1_000_000_000, 123_456_789));
        assert_eq!(fs::read(out.join("d/b")).expect("its content"), b"he\0lo");
        assert_eq!(at("d").mode() & 0o777, 0o555, "modes of directories come last");
        assert_eq!(at("d").mtime(), 1_000_000_000);
        let target = fs::read_link(out.join("d/c")).expect("a link");
        assert_eq!(
            target,
            Path::new("../../anywhere"),
            "a link is what it was, and is not followed"
        );
        assert_eq!(at("d/c").mtime(), 1_000_000_000);
        let mut value = [0u8; 8];
        match rustix::fs::lgetxattr(out.join("d/a"), "user.k", &mut value[..]) {
            Ok(length) => assert_eq!(&value[..length], b"a\0b"),
            // A filesystem without attributes: that is told.
            Err(_) => assert!(taken.left_out.contains_key("/d/a"), "{taken:?}"),
        }
    }

    #[test]
    fn nothing_is_written_outside_and_no_device_is_made() {
        use tar::EntryType::{Char, Link, Regular};
        let dir = tempfile::tempdir().expect("a directory");
        let (out, outside) = (dir.path().join("out"), dir.path().join("outside"));
        fs::create_dir_all(&out).expect("a directory");
        fs::create_dir_all(&outside).expect("a directory");
        fs::write(outside.join("secret"), "secret").expect("a file");
        for (kind, name, link) in [
            (Regular, "../escaped", ""),
            (Regular, "/escaped", ""),
            (Regular, "a/../../escaped", ""),
            (Link, "got", "../outside/secret"),
            (Link, "got", "/etc/hostname"),
        ] {
            let mut builder = Builder::new(Vec::new());
            add(&mut builder, kind, name, link, "");
            let refused = unpacked(builder, &out, false).expect_err(name);
            assert!(refused.to_string().contains("outside"), "{name}: {refused}");
        }
        // A link in the way of a directory, from before or from the archive.
        symlink(&outside, out.join("linked")).expect("a link");
        let mut builder = Builder::new(Vec::new());
        add(&mut builder, Regular, "linked/secret", "", "changed");
        unpacked(builder, &out, false).expect_err("a link in the way");
        let mut builder = Builder::new(Vec::new());
        add(&mut builder, tar::EntryType::Symlink, "sub", "../outside", "");
        add(&mut builder, Regular, "sub/secret", "", "changed");
        unpacked(builder, &out, false).expect_err("a link in the way");
        assert_eq!(fs::read_to_string(outside.join("secret")).expect("a file"), "secret");
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 2);
        // A file that is there is replaced, and a link is not written through.
        symlink(outside.join("secret"), out.join("file")).expect("a link");
        let mut builder = Builder::new(Vec::new());
        add(&mut builder, Regular, "file", "", "new");
        add(&mut builder, Char, "tty", "", "");
        let taken = unpacked(builder, &out, false).expect("it is unpacked");
        assert_eq!(taken.left_out["/tty"], "it is a device");
        assert_eq!(fs::read_to_string(out.join("file")).expect("a file"), "new");
        assert_eq!(fs::read_to_string(outside.join("secret")).expect("a file"), "secret");
        assert!(!out.join("tty").exists());
        // A directory is not removed for a file.
        fs::create_dir(out.join("dir")).expect("a directory");
        let mut builder = Builder::new(Vec::new());
        add(&mut builder, Regular, "dir", "", "new");
        unpacked(builder, &out, false).expect_err("a directory in the way");
    }

    #[test]
    fn times_have_fractions_and_may_be_before_1970() {
        let is = |text: &str| time(text).map(|Timespec { tv_sec, tv_nsec }| (tv_sec, tv_nsec));
        assert_eq!(is("5"), Some((5, 0)));
        assert_eq!(is("5.25"), Some((5, 250_000_000)));
        assert_eq!(is("-0.250000000"), Some((-1, 750_000_000)));
        assert_eq!(is("-2.000000000"), Some((-2, 0)));
        assert_eq!((is(""), is("x"), is("1.x")), (None, None, None));
    }
}
