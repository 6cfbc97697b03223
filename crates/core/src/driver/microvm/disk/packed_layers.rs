//! Layers, packed as erofs images for machines to mount.
//!
//! ```text
//! <cache>/roots/<name>.erofs    the image, seemingly SLOT bytes long
//! <cache>/roots/<name>.json     which layers are in it, and the mark of this packing
//! ```
//!
//! A machine that was captured knows where in a packed layer everything is. Packed again, by another version of the packer, it is
//! elsewhere: so each packing has a mark of its own, and memory is only used with those it was captured with.
//!
//! Layers never change, so a packed one is good for ever, and its name says what is in it. An image's layers, which
//! many sandboxes have in common, are packed together; layers above it each by itself, so that one session's work is what the
//! next start has to pack. When there are more than there are devices, the lower ones go with the image; how many is rounded up, so
//! that this happens once in a while and not at every start.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sandkeep_proto::machine::{LOWER_SLOTS, SLOT};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::driver::host::helper::{HelperLimits, HelperTask, Helpers, INPUT, Input, OUTPUT};
use crate::driver::host::{broken, failed, usable};
use crate::driver::{DriverError, DriverResult};
use crate::keyed_lock::KeyedLock;
use crate::model::{Reserve, RootFs};

/// How many layers above the image are packed with it at a time, once there are too many.
const STEP: usize = 4;
/// The program that packs.
const PACKER: &str = "mkfs.erofs";
/// How long a path in a layer may be that it packs. The packer works with paths, which the kernel
/// accepts up to 4096 bytes, and leaves out longer ones without an error; its stack grows with
/// their depth.
const LONGEST: usize = 3900;
/// What packing may use. Layers may be large, and it reads all of them.
const PACKING: HelperLimits =
    HelperLimits { memory: 8 << 30, stack: 512 << 20, cpu: 1800, file_size: SLOT, deadline: 3600 };

/// The packed layers of a data directory.
#[derive(Debug)]
pub(crate) struct PackedLayers {
    helpers: Arc<Helpers>,
    directory: PathBuf,
    reserve: Reserve,
    /// By name: each is packed once.
    packing: KeyedLock<String>,
}

/// `<name>.json`.
#[derive(Debug, Serialize, Deserialize)]
struct PackedRecord {
    layers_dir: PathBuf,
    layers: Vec<PathBuf>,
    /// The image's id, drawn when it was packed.
    #[serde(default)]
    uuid: String,
}

impl PackedLayers {
    pub(crate) fn new(helpers: Arc<Helpers>, cache: &Path, reserve: Reserve) -> Self {
        let directory = cache.join("roots");
        Self { helpers, directory, reserve, packing: KeyedLock::default() }
    }

    /// A root's layers, packed, the topmost first. None for a root without layers.
    pub(crate) fn of_root(&self, root: &RootFs) -> DriverResult<Vec<PathBuf>> {
        split(&root.lower, root.image).map(|layers| self.packed(&root.layers_dir, layers)).collect()
    }

    /// What distinguishes packed layers from any others, including the same layers packed again.
    pub(crate) fn mark(path: &Path) -> DriverResult<String> {
        let uuid = match contents(path) {
            Some(contents) => contents.uuid,
            None => uuid_in(path)?,
        };
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(format!("{name}:{uuid}"))
    }

    /// A drive's layers, packed as one, if there are any.
    pub(crate) fn of_drive(&self, root: &RootFs) -> DriverResult<Option<PathBuf>> {
        if root.lower.is_empty() {
            return Ok(None);
        }
        self.packed(&root.layers_dir, &root.lower).map(Some)
    }

    /// Removes those whose layers are gone: nothing can be mounted from them any more.
    pub(crate) fn sweep(&self) {
        let Ok(listed) = fs::read_dir(&self.directory) else { return };
        for path in listed.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let Some(PackedRecord { layers_dir, layers, .. }) = contents(&path) else { continue };
            let gone = |layer: &PathBuf| {
                matches!(layers_dir.join(layer).try_exists(), Ok(false)) && layers_dir.exists()
            };
            if layers.iter().any(gone) {
                let _ = fs::remove_file(path.with_extension("erofs"));
                let _ = fs::remove_file(&path);
            }
        }
    }

    fn packed(&self, layers_dir: &Path, layers: &[PathBuf]) -> DriverResult<PathBuf> {
        let name = name_of(layers);
        let path = self.directory.join(format!("{name}.erofs"));
        if path.exists() && contents(&path).is_some() {
            return Ok(path);
        }
        let _single_flight = self.packing.blocking_lock(&name);
        let packed = match (path.exists(), contents(&path)) {
            (true, Some(_)) => Ok(()),
            // Earlier versions did not sync it, so a power cut may have left it empty.
            (true, None) => uuid_in(&path).and_then(|uuid| {
                let (layers_dir, layers) = (layers_dir.to_owned(), layers.to_vec());
                list(&path, &PackedRecord { layers_dir, layers, uuid })
            }),
            (false, _) => self.pack(layers_dir, layers, &path),
        };
        packed.map(|()| path)
    }

    fn pack(&self, layers_dir: &Path, layers: &[PathBuf], path: &Path) -> DriverResult<()> {
        for layer in layers.iter().map(|layer| layers_dir.join(layer)) {
            // Before anything else, so that what is missing is named.
            fs::read_dir(&layer).map_err(failed("open the layer", &layer))?;
            refuse_long_paths(&layer)?;
        }
        fs::create_dir_all(&self.directory).map_err(failed("create", &self.directory))?;
        self.sweep();
        let draft = tempfile::Builder::new()
            .prefix(".packing-")
            .tempfile_in(&self.directory)
            .map_err(failed("write to", &self.directory))?;
        let uuid = uuid()?;
        let room = usable(draft.as_file(), self.reserve).map_err(failed("measure", path))?;
        self.run(layers_dir, layers, draft.path(), &uuid, room)?;
        let length = draft.as_file().metadata().map_err(failed("look at", path))?.len();
        if length > SLOT {
            return Err(broken("pack the layers", &"they are larger than a device can be"));
        }
        draft.as_file().set_len(SLOT).map_err(failed("make room for", path))?;
        draft.as_file().sync_all().map_err(failed("sync", path))?;
        let contents =
            PackedRecord { layers_dir: layers_dir.to_owned(), layers: layers.to_vec(), uuid };
        list(path, &contents)?;
        draft.persist(path).map_err(|error| failed("rename", path)(error.error))?;
        File::open(&self.directory)
            .and_then(|dir| dir.sync_all())
            .map_err(failed("sync", &self.directory))
    }

    fn run(
        &self,
        layers_dir: &Path,
        layers: &[PathBuf],
        into: &Path,
        uuid: &str,
        room: u64,
    ) -> DriverResult<()> {
        if room == 0 {
            return Err(no_room());
        }
        let layers = Input::Layers { directory: layers_dir.to_owned(), lower: layers.to_vec() };
        let task = HelperTask {
            program: PACKER,
            // Every file with its own times and any owner; nothing in it that is not from the layers.
            args: &["-E", "force-inode-extended", "-U", uuid, OUTPUT, INPUT],
            env: &[],
            input: layers,
            output: Some(into),
            // What is packed is new work: the host's reserve is not for it.
            limits: HelperLimits { file_size: SLOT.min(room), ..PACKING },
        };
        match self.helpers.attempt(&task)? {
            Ok(_) => Ok(()),
            Err(how) if how.contains("No space left") => Err(DriverError::NoRoom { reason: how }),
            // The limit is what it wrote beyond, whatever it says about that.
            Err(_) if room < SLOT && is_full(into, room) => Err(no_room()),
            // It is the same for everybody who tries: what it was given is to blame.
            Err(how) => Err(DriverError::Unpackable { reason: format!("`{PACKER}`: {how}") }),
        }
    }
}

/// Whether a file is about as large as it may be.
fn is_full(path: &Path, most: u64) -> bool {
    fs::metadata(path).is_ok_and(|about| about.len().saturating_add(1 << 20) >= most)
}

fn no_room() -> DriverError {
    let reason = "packed layers would use the free space that is kept on the host's disk";
    DriverError::NoRoom { reason: reason.to_owned() }
}

/// What packed layers are, if that reads.
fn contents(path: &Path) -> Option<PackedRecord> {
    let text = fs::read(path.with_extension("json")).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Puts on record, on stable storage, what packed layers are.
fn list(path: &Path, contents: &PackedRecord) -> DriverResult<()> {
    let text = serde_json::to_vec(contents)
        .map_err(|error| broken("describe the packed layers", &error))?;
    let listed = path.with_extension("json");
    let written = File::create(&listed).and_then(|mut file| {
        file.write_all(&text)?;
        file.sync_all()
    });
    written.map_err(failed("write", &listed))
}

/// The id in the superblock of packed layers.
fn uuid_in(path: &Path) -> DriverResult<String> {
    /// Where the superblock is, and the id in it.
    const PLACE: u64 = 1024 + 48;
    let mut bytes = [0; 16];
    File::open(path)
        .and_then(|file| file.read_exact_at(&mut bytes, PLACE))
        .map_err(failed("read", path))?;
    Ok(written(bytes))
}

/// Refuses a layer with a path that the packer would leave out. Layers do not change, and names in them that are directories are no links.
fn refuse_long_paths(layer: &Path) -> DriverResult<()> {
    let too_long = |directory: &Path| {
        let path = directory.strip_prefix(layer).unwrap_or(directory);
        let text = path.as_os_str().as_bytes();
        let start = String::from_utf8_lossy(text.get(..64).unwrap_or(text)).into_owned();
        let depth = path.components().count();
        let reason = format!(
            "a path in `/{start}`, {depth} directories deep, is longer than {LONGEST} bytes; start the sandbox with the `container` driver to remove it"
        );
        DriverError::Unpackable { reason }
    };
    let before = layer.as_os_str().len() + 1;
    let mut waiting = vec![layer.to_owned()];
    while let Some(directory) = waiting.pop() {
        let listed = match fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::InvalidFilename => {
                return Err(too_long(&directory));
            }
            listed => listed.map_err(failed("read", &directory))?,
        };
        for entry in listed {
            let entry = entry.map_err(failed("read", &directory))?;
            let length = directory.as_os_str().len() + 1 + entry.file_name().len() - before;
            if length > LONGEST {
                return Err(too_long(&directory));
            }
            if entry.file_type().map_err(failed("read", &directory))?.is_dir() {
                waiting.push(entry.path());
            }
        }
    }
    Ok(())
}

fn uuid() -> DriverResult<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| broken("draw an id", &error))?;
    Ok(written(bytes))
}

/// An id as it is written.
fn written(bytes: [u8; 16]) -> String {
    let hex = hex::encode(bytes);
    let parts = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)];
    parts.map(|(from, to)| hex.get(from..to).unwrap_or_default()).join("-")
}

/// Which layers go together, the topmost first.
fn split(lower: &[PathBuf], image: usize) -> impl Iterator<Item = &[PathBuf]> {
    let slots = LOWER_SLOTS as usize;
    let above = lower.len().saturating_sub(image);
    let room = if image > 0 { slots - 1 } else { slots };
    let (alone, together) = if above <= room {
        lower.split_at(above)
    } else {
        let with_image = (above - (slots - 1)).next_multiple_of(STEP).min(above);
        lower.split_at(above - with_image)
    };
    alone.chunks(1).chain([together].into_iter().filter(|layers| !layers.is_empty()))
}

fn name_of(layers: &[PathBuf]) -> String {
    let mut digest = Sha256::new();
    for layer in layers {
        digest.update(layer.as_os_str().as_encoded_bytes());
        digest.update([0]);
    }
    hex::encode(&digest.finalize()[..16])
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use std::fs;

    use super::{name_of, refuse_long_paths, split};
    use crate::driver::DriverError;

    #[test]
    fn paths_that_the_packer_leaves_out_are_refused() {
        let dir = tempfile::TempDir::with_prefix("keep-roots-").unwrap();
        let deep: PathBuf = std::iter::repeat_n("d", 1900).collect();
        fs::create_dir_all(dir.path().join(&deep)).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        refuse_long_paths(dir.path()).unwrap();
        let name = "n".repeat(101);
        fs::write(dir.path().join(&deep).join(&name), "").unwrap();
        let refused = refuse_long_paths(dir.path());
        let Err(DriverError::Unpackable { reason }) = refused else { panic!("{refused:?}") };
        assert!(reason.contains("1900 directories deep"), "{reason}");
        assert!(reason.contains("`/d/d/") && reason.len() < 300, "{reason}");
    }

    /// What a power cut may leave of the record costs nothing: the id is in the packed layers themselves.
    #[test]
    fn packed_layers_are_known_without_their_record() {
        let dir = tempfile::TempDir::with_prefix("keep-roots-").unwrap();
        fs::create_dir(dir.path().join("layer")).unwrap();
        let (path, id) = (dir.path().join("name.erofs"), super::uuid().unwrap());
        let packed = std::process::Command::new(super::PACKER)
            .args(["-U", &id])
            .args([&path, &dir.path().join("layer")])
            .output()
            .expect("erofs-utils are installed");
        assert!(packed.status.success(), "{packed:?}");
        for torn in ["", "{"] {
            fs::write(path.with_extension("json"), torn).unwrap();
            assert_eq!(super::PackedLayers::mark(&path).unwrap(), format!("name:{id}"));
        }
    }

    fn layers(count: usize) -> Vec<PathBuf> {
        (0..count).map(|n| PathBuf::from(format!("lay-{n}/diff"))).collect()
    }

    #[test]
    fn layers_fit_the_devices_and_keep_their_order() {
        for image in 0..4 {
            for above in 0..40 {
                let all = layers(above + image);
                let parts: Vec<_> = split(&all, image).collect();
                assert!(parts.len() <= 8, "{above} on {image}");
                assert!(parts.iter().all(|part| !part.is_empty()));
                assert_eq!(parts.concat(), all);
            }
        }
        let all = layers(5);
        let parts: Vec<usize> = split(&all, 3).map(<[_]>::len).collect();
        assert_eq!(parts, [1, 1, 3], "the image's are one");
    }

    #[test]
    fn many_layers_are_packed_anew_once_in_a_while() {
        let mut last = Vec::new();
        let mut anew = 0;
        for above in 8..40 {
            // As sessions go: a new one on top.
            let all: Vec<PathBuf> =
                (0..above).rev().map(|n| PathBuf::from(format!("{n}"))).collect();
            let lowest = split(&all, 1).last().unwrap().to_vec();
            anew += usize::from(name_of(&lowest) != name_of(&last));
            last = lowest;
        }
        assert!(anew <= 9, "{anew}");
    }

    #[test]
    fn names_tell_stacks_apart() {
        let named = |names: &[&str]| name_of(&names.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_ne!(named(&["a", "b"]), named(&["b", "a"]));
        assert_ne!(named(&["ab"]), named(&["a", "b"]));
        assert_eq!(named(&["a"]), named(&["a"]));
    }
}
