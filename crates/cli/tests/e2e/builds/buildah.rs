//! Two builders, and what came out of them file by file.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sandkeep_testkit::daemon::Daemon;
use serde_json::Value;

/// What one path is: type, mode, owner, content, attributes.
pub(super) type Listing = BTreeMap<String, String>;

/// What builders leave of their own: mount points and names of machines.
const OF_BUILDERS: [&str; 9] =
    ["dev", "etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf", "proc", "run", "sys", ""];

/// `buildah` with storage of its own.
pub(super) struct Buildah {
    place: PathBuf,
}

impl Buildah {
    /// None where there is no buildah. `base` is a root tarball, known as `small` afterwards.
    pub(super) fn with_base(place: &Path, base: &Path) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).find(|dir| dir.join("buildah").is_file())?;
        fs::create_dir_all(place).expect("a directory for buildah");
        let this = Self { place: place.to_owned() };
        let container = this.ok(&["from", "scratch"]);
        this.ok(&["add", container.trim(), &base.display().to_string(), "/"]);
        this.ok(&["commit", "-q", container.trim(), "localhost/small"]);
        this.ok(&["rm", container.trim()]);
        Some(this)
    }

    fn run(&self, args: &[&str]) -> Output {
        Command::new("buildah")
            .args(["--storage-driver", "vfs", "--root"])
            .arg(self.place.join("storage"))
            .arg("--runroot")
            .arg(self.place.join("run"))
            .args(args)
            .env("BUILDAH_ISOLATION", "chroot")
            .output()
            .expect("buildah starts")
    }

    fn ok(&self, args: &[&str]) -> String {
        let done = self.run(args);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "buildah {args:?}: {said}");
        String::from_utf8(done.stdout).expect("text")
    }

    /// Builds a context, in the format that knows `SHELL`; answers with its files and its configuration.
    pub(super) fn build(&self, context: &Path, args: &[&str]) -> (Listing, Value) {
        let context = context.display().to_string();
        let mut all = vec![
            "bud",
            "-q",
            "--format",
            "docker",
            "--isolation",
            "chroot",
            "--pull-never",
            "-t",
            "localhost/built",
        ];
        all.extend(args.iter().flat_map(|arg| ["--build-arg", arg]));
        all.push(&context);
        self.ok(&all);
        let container = self.ok(&["from", "--pull-never", "localhost/built"]);
        let mounted = self.ok(&["mount", container.trim()]);
        let listing = listing(Path::new(mounted.trim()));
        self.ok(&["umount", container.trim()]);
        self.ok(&["rm", container.trim()]);
        let told = self.ok(&["inspect", "--type", "image", "localhost/built"]);
        let told: Value = serde_json::from_str(&told).expect("JSON");
        (listing, told["OCIv1"]["config"].clone())
    }
}

impl Drop for Buildah {
    fn drop(&mut self) {
        // Storage of others is not touched: it has its own roots.
        let _ = self.run(&["rm", "--all"]);
        let _ = self.run(&["rmi", "--all", "--force"]);
        let _ = fs::remove_dir_all(&self.place);
    }
}

/// The files of an image of ours, as a sandbox would have them.
pub(super) fn files_of(keep: &Daemon, image: &str) -> Listing {
    let record = keep.data().join("images").join(format!("{image}.json"));
    let record: Value =
        serde_json::from_slice(&fs::read(record).expect("its manifest")).expect("JSON");
    let layers = record["layers"].as_array().expect("layers");
    let empty = keep.scratch().join(format!("empty-{image}"));
    let at = keep.scratch().join(format!("mounted-{image}"));
    fs::create_dir_all(&empty).expect("our own directory");
    fs::create_dir_all(&at).expect("our own directory");
    let layer = |id: &Value| {
        let id = id.as_str().expect("an id");
        keep.data().join("layers").join(id).join("diff").display().to_string()
    };
    let mut lower: Vec<String> = layers.iter().map(layer).collect();
    // One layer alone is nothing that can be stacked.
    lower.push(empty.display().to_string());
    let mounted = Mounted::overlay(&lower.join(":"), &at);
    listing(&mounted.0)
}

struct Mounted(PathBuf);

impl Mounted {
    fn overlay(lower: &str, at: &Path) -> Self {
        let done = Command::new("mount")
            .args(["-t", "overlay", "overlay", "-o", &format!("ro,userxattr,lowerdir={lower}")])
            .arg(at)
            .output()
            .expect("mount starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Self(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn listing(root: &Path) -> Listing {
    let mut found = Listing::new();
    let mut todo = vec![root.to_owned()];
    while let Some(path) = todo.pop() {
        let inner = path.strip_prefix(root).expect("below").to_string_lossy().into_owned();
        let metadata = fs::symlink_metadata(&path).expect("it is there");
        let of_builders = OF_BUILDERS.contains(&inner.as_str());
        if !of_builders {
            found.insert(inner.clone(), told(&path, &metadata));
        }
        // What is in them was mounted.
        if metadata.is_dir() && (!of_builders || inner.is_empty()) {
            let children = fs::read_dir(&path).expect("a directory");
            todo.extend(children.map(|child| child.expect("an entry").path()));
        }
    }
    found
}

fn told(path: &Path, metadata: &fs::Metadata) -> String {
    let kind = metadata.file_type();
    let what = if kind.is_symlink() {
        format!("link to {}", fs::read_link(path).expect("a link").display())
    } else if kind.is_dir() {
        "directory".to_owned()
    } else if kind.is_fifo() {
        "pipe".to_owned()
    } else {
        let content = fs::read(path).expect("a file");
        let sum = <sha2::Sha256 as sha2::Digest>::digest(&content);
        format!("file of {} bytes, {}", content.len(), hex::encode(sum))
    };
    let mode = if kind.is_symlink() { 0o777 } else { metadata.mode() & 0o7777 };
    let attributes = if kind.is_symlink() { Vec::new() } else { listed_attributes(path) };
    format!("{mode:o} {}:{} {what} {attributes:?}", metadata.uid(), metadata.gid())
}

fn listed_attributes(path: &Path) -> Vec<String> {
    let done = Command::new("getfattr")
        .args(["--absolute-names", "-h", "-d", "-m", "^(user|security.capability)"])
        .arg(std::ffi::OsStr::from_bytes(path.as_os_str().as_bytes()))
        .output()
        .expect("getfattr starts");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    // What overlayfs notes for itself is not the file's.
    let own = text.lines().filter(|line| line.contains('=') && !line.starts_with("user.overlay."));
    own.map(str::to_owned).collect()
}

/// How two listings differ, for people.
pub(super) fn differences(ours: &Listing, theirs: &Listing) -> Vec<String> {
    let mut names: Vec<&String> = ours.keys().chain(theirs.keys()).collect();
    names.sort();
    names.dedup();
    let differing = names.into_iter().filter(|name| ours.get(*name) != theirs.get(*name));
    let told = |one: Option<&String>| one.cloned().unwrap_or_else(|| "not there".to_owned());
    differing
        .map(|name| {
            format!("{name}: ours {}, buildah's {}", told(ours.get(name)), told(theirs.get(name)))
        })
        .collect()
}
