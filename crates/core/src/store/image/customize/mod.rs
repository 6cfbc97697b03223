//! Customized images: a base and one more layer, with a user who is not root, a home for it, and `sudo`.
//!
//! `docs/formats/image.md` says what the layer holds and how the user is chosen. Here is how it is
//! made: the base is read through its layers, as the overlay would show them; what is to be added
//! is written as a tar archive; and that is unpacked and sealed like a layer from anywhere else. So
//! modes, owners and directories on the way follow the rules that hold for all layers, and two
//! images that are customized alike share it.
//!
//! [`Images::customize`] makes one. [`Images::customized`] makes it only if it does not exist in
//! that form, which is what a front calls for every sandbox: it costs two small reads when there is
//! nothing to do, and one caller does the work when there is.

mod accounts;
pub(super) mod archive;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use self::accounts::{HOME, Numbers, Tables, USER};
use self::archive::{CustomizationTar, TarPart};
use super::builder::blocking;
use super::error::{ImageError, ImageResult};
use super::unpack::{Below, Form, Names};
use super::{HOST, Images, Reporter, check_name, digest};
use crate::embedded::SUDO;
use crate::model::{Customized, FORMAT, Image, ImageConfig, check_env_name, now};

/// Incremented when the same customization makes another layer.
const VERSION: u32 = 1;

const CWD: &str = "/vercel/sandbox";
const BIN: &str = "/vercel/bin";

/// Where programs are, on any system.
const USUAL_PATH: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Follow from the user who runs a command, so an image does not set them.
const PERSONAL: [&str; 3] = ["HOME", "USER", "LOGNAME"];

/// The files of a home that shells expect.
const SKEL: [&str; 3] = [".bashrc", ".profile", ".bash_logout"];

/// No account database or profile is larger.
const LARGEST: u64 = 4 << 20;

/// How an image is customized, beyond what every customized image has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Customization {
    /// Directories of this host that are put into it.
    pub add: Vec<AddedDirectory>,
    /// More for the environment of commands.
    pub env: BTreeMap<String, String>,
    /// Directories for `PATH`, in front of what the base has.
    pub path: Vec<String>,
}

/// A directory of this host, and where it goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AddedDirectory {
    /// The directory.
    pub from: PathBuf,
    /// Where it is in the image.
    pub to: PathBuf,
}

impl Images {
    /// Customizes `base` as the image `name`.
    ///
    /// # Errors
    ///
    /// Returns [`ImageError::NotFound`] for the base, [`ImageError::BadCustomization`] for an invalid
    /// customization, and errors of unpacking a layer.
    pub async fn customize(
        &self,
        base: &str,
        name: &str,
        customization: &Customization,
    ) -> ImageResult<Image> {
        check(base, name, customization)?;
        let base = self.base(base).await?;
        let _one_at_a_time = self.builder.lock(&lock_of(name)).await;
        self.build(&base, name, customization).await
    }

    /// Whether [`customize`](Self::customize) would begin, for callers that answer before it is done.
    ///
    /// # Errors
    ///
    /// Returns what is wrong with the customization, or that there is no such base.
    pub async fn check_customization(
        &self,
        base: &str,
        name: &str,
        customization: &Customization,
    ) -> ImageResult<()> {
        check(base, name, customization)?;
        // The image of this host can always be made.
        if base == HOST { Ok(()) } else { self.get(base).await.map(drop) }
    }

    /// The image `name`, customized from `base` as it is now: made when it is missing or was customized
    /// differently.
    ///
    /// # Errors
    ///
    /// As [`customize`](Self::customize).
    pub async fn customized(
        &self,
        base: &str,
        name: &str,
        customization: &Customization,
    ) -> ImageResult<Image> {
        check(base, name, customization)?;
        let base = self.base(base).await?;
        let recipe = recipe(&base, customization);
        if let Some(image) = self.as_wanted(name, &recipe).await? {
            return Ok(image);
        }
        let _one_at_a_time = self.builder.lock(&lock_of(name)).await;
        // Another caller may have done the work meanwhile.
        match self.as_wanted(name, &recipe).await? {
            Some(image) => Ok(image),
            None => self.build(&base, name, customization).await,
        }
    }

    async fn base(&self, name: &str) -> ImageResult<Image> {
        if name == HOST {
            self.host(false, &Reporter::silent()).await
        } else {
            self.get(name).await
        }
    }

    async fn as_wanted(&self, name: &str, recipe: &str) -> ImageResult<Option<Image>> {
        let Some(image) = self.find(name).await? else { return Ok(None) };
        if image.customized.as_ref().is_none_or(|how| how.recipe != recipe) {
            return Ok(None);
        }
        for layer in &image.layers {
            // One that was lost is made again.
            if self.builder.store.layer(layer).await.is_err() {
                return Ok(None);
            }
        }
        Ok(Some(image))
    }

    async fn build(
        &self,
        base: &Image,
        name: &str,
        customization: &Customization,
    ) -> ImageResult<Image> {
        let mut stack = self.builder.begin().await?;
        self.builder.push_image(&mut stack, base).await?;
        let config = config(&base.config, customization);
        let (below, wanted) = (self.builder.diffs(&base.layers), customization.clone());
        let path = config.env.get("PATH").cloned().unwrap_or_default();
        let what = self.builder.store.data_dir().to_owned();
        let parts = blocking(&what, move || parts(&Below(&below), &wanted, &path)).await?;
        let time = u64::try_from(base.created_at.as_second()).unwrap_or(0);
        let archive = CustomizationTar::of(parts, time).map_err(ImageError::io("write", &what))?;
        let what = format!("the customization of {name}");
        let worn = self.builder.add(&mut stack, archive, Form::Layer, None, what).await;
        let worn = worn.map_err(|error| match error {
            // The archive is ours: what breaks it is a directory that could not be taken.
            ImageError::Damaged { source, .. } => {
                ImageError::BadCustomization { what: "add".to_owned(), reason: source.to_string() }
            }
            other => other,
        })?;
        let sum = format!("{} {} {}", base.digest, worn.diff_id, as_json(&config));
        let image = Image {
            format: FORMAT,
            name: name.to_owned(),
            digest: digest::text(&Sha256::digest(sum)),
            layers: stack.topmost_first(),
            config,
            created_at: now(),
            source: base.name.clone(),
            customized: Some(Customized {
                base: base.name.clone(),
                recipe: recipe(base, customization),
            }),
            step: None,
        };
        self.builder.publish(&image).await?;
        Ok(image)
    }
}

/// Names of images cannot have a space, so this is none.
fn lock_of(name: &str) -> String {
    format!("customize {name}")
}

/// Refuses an invalid customization before anything is done.
fn check(base: &str, name: &str, customization: &Customization) -> ImageResult<()> {
    check_name(name)?;
    let wrong = |what: String, reason: &str| {
        Err(ImageError::BadCustomization { what, reason: reason.to_owned() })
    };
    if name == base {
        return wrong(format!("name `{name}`"), "it is the image it is made of; give another name");
    }
    for AddedDirectory { from, to } in &customization.add {
        let inside = format!("add to `{}`", to.display());
        if !is_place(to) || to == Path::new("/") {
            return wrong(inside, "it must be an absolute path without `..`, below `/`");
        }
        let added = format!("add from `{}`", from.display());
        if !from.is_absolute() {
            return wrong(added, "it must be an absolute path on the server");
        }
        match std::fs::metadata(from) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return wrong(added, "it is no directory on the server"),
            Err(error) => return wrong(added, &format!("on the server: {error}")),
        }
    }
    for (key, value) in &customization.env {
        if let Err(error) = check_env_name(key) {
            return wrong(format!("env `{key}`"), &error.to_string());
        }
        if value.contains('\0') {
            return wrong(format!("env `{key}`"), "its value has a zero byte");
        }
    }
    for path in &customization.path {
        if !is_place(Path::new(path)) || path.contains([':', '\0', '\n']) {
            let reason = "it must be an absolute path without `..` or `:`";
            return wrong(format!("path `{path}`"), reason);
        }
    }
    Ok(())
}

fn is_place(path: &Path) -> bool {
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    path.is_absolute()
        && path.components().all(plain)
        && !path.as_os_str().as_encoded_bytes().contains(&0)
}

/// Stands for everything that goes into a customized image, but for the content of added directories.
fn recipe(base: &Image, customization: &Customization) -> String {
    static SUDO_DIGEST: OnceLock<String> = OnceLock::new();
    let sudo = SUDO_DIGEST.get_or_init(|| digest::text(&Sha256::digest(SUDO.bytes())));
    let all = (VERSION, &base.name, &base.digest, &base.layers, &base.config, customization, sudo);
    digest::text(&Sha256::digest(as_json(&all)))
}

fn as_json(value: &impl Serialize) -> String {
    // Maps with text for keys and no numbers beyond JSON's: this cannot fail.
    serde_json::to_string(value).unwrap_or_default()
}

fn config(base: &ImageConfig, customization: &Customization) -> ImageConfig {
    let mut env = base.env.clone();
    env.retain(|name, _| !PERSONAL.contains(&name.as_str()));
    if !env.contains_key("LC_ALL") {
        env.entry("LANG".to_owned()).or_insert_with(|| "C.UTF-8".to_owned());
    }
    let had = env.remove("PATH").unwrap_or_default();
    let mut path: Vec<&str> = vec![BIN];
    let rest =
        customization.path.iter().map(String::as_str).chain(had.split(':')).chain(USUAL_PATH);
    for directory in rest {
        if !directory.is_empty() && !path.contains(&directory) {
            path.push(directory);
        }
    }
    env.insert("PATH".to_owned(), path.join(":"));
    env.extend(customization.env.clone());
    ImageConfig { user: Some(USER.to_owned()), cwd: Some(CWD.to_owned()), env, ..base.clone() }
}

/// All that the layer holds.
fn parts(base: &Below<'_>, customization: &Customization, path: &str) -> ImageResult<Vec<TarPart>> {
    let shell = ["/bin/bash", "/usr/bin/bash"].into_iter().find(|shell| is_program(base, shell));
    let mut tables = Tables {
        passwd: text(base, "etc/passwd")?.unwrap_or_default(),
        group: text(base, "etc/group")?.unwrap_or_default(),
        shadow: text(base, "etc/shadow")?,
        gshadow: text(base, "etc/gshadow")?,
    };
    let Numbers { uid, gid } = tables.admit(shell.unwrap_or("/bin/sh"));
    let mut parts = Vec::new();
    let mut file = |path: &str, mode, owner, content: Vec<u8>| {
        parts.push(TarPart::File { path: place(base, path), mode, owner, content });
    };
    let secret = owner_of(base, "etc/shadow").unwrap_or((0o640, (0, 0)));
    let Tables { passwd, group, shadow, gshadow } = tables;
    file("etc/passwd", 0o644, (0, 0), passwd.into_bytes());
    file("etc/group", 0o644, (0, 0), group.into_bytes());
    for (name, table) in [("etc/shadow", shadow), ("etc/gshadow", gshadow)] {
        if let Some(table) = table {
            let (mode, owner) = owner_of(base, name).unwrap_or(secret);
            file(name, mode, owner, table.into_bytes());
        }
    }
    file("etc/sudoers.d/90-default-user", 0o440, (0, 0), sudoers_drop_in().into_bytes());
    if has_classic_sudo(base) {
        if let Some(sudoers) = sudoers(text(base, "etc/sudoers")?) {
            file("etc/sudoers", 0o440, (0, 0), sudoers.into_bytes());
        }
    } else {
        file("usr/bin/sudo", 0o4755, (0, 0), SUDO.bytes());
        file("etc/keep-sudo.users", 0o644, (0, 0), format!("{USER}\n").into_bytes());
    }
    if is_directory(base, "etc/profile.d") {
        let quoted = path.replace('\'', "'\\''");
        let profile = format!("# Login shells begin with a PATH of their own.\nPATH='{quoted}'\n");
        file("etc/profile.d/default-path.sh", 0o644, (0, 0), profile.into_bytes());
    }
    for name in SKEL {
        let inside = format!("etc/skel/{name}");
        if let Some(content) = bytes(base, &inside)? {
            file(&format!("{}/{name}", relative(HOME)), 0o644, (uid, gid), content);
        }
    }
    for directory in [HOME, CWD, BIN] {
        let path = place(base, relative(directory));
        parts.push(TarPart::Directory { path, mode: 0o755, owner: (uid, gid) });
    }
    // Last, because of several entries with one name the last counts.
    for AddedDirectory { from, to } in &customization.add {
        let to = place(base, &to.to_string_lossy());
        parts.push(TarPart::Tree { from: from.clone(), to });
    }
    Ok(parts)
}

fn relative(path: &str) -> &str {
    path.trim_start_matches('/')
}

fn names(path: &str) -> Names {
    path.split('/').filter(|name| !name.is_empty()).map(|name| name.as_bytes().to_vec()).collect()
}

/// Where a path of the image lies in a layer: links of the base on the way to it are followed, because
/// a directory in their place would hide them.
fn place(base: &Below<'_>, path: &str) -> PathBuf {
    let names = names(path);
    let (last, parents) = match names.split_last() {
        Some((last, parents)) => (vec![last.clone()], parents),
        None => (Vec::new(), &[][..]),
    };
    let mut known = parents.len();
    let there = loop {
        if known == 0 {
            break Vec::new();
        }
        match base.follow(&parents[..known]) {
            Some((place, found)) if found.metadata.is_dir() => break place,
            _ => known -= 1,
        }
    };
    let all = there.into_iter().chain(parents[known..].to_vec()).chain(last);
    all.map(std::ffi::OsString::from_vec).collect()
}

/// A file of the base; absent when there is none.
fn bytes(base: &Below<'_>, path: &str) -> ImageResult<Option<Vec<u8>>> {
    let Some((_, found)) = base.follow(&names(path)) else { return Ok(None) };
    if !found.metadata.is_file() {
        return Ok(None);
    }
    let file = std::fs::File::open(&found.path).map_err(ImageError::io("open", &found.path))?;
    let mut content = Vec::new();
    file.take(LARGEST + 1)
        .read_to_end(&mut content)
        .map_err(ImageError::io("read", &found.path))?;
    if content.len() as u64 > LARGEST {
        let (what, reason) = (format!("`/{path}` of the base"), "it is over 4 MiB".to_owned());
        return Err(ImageError::BadCustomization { what, reason });
    }
    Ok(Some(content))
}

pub(super) fn text(base: &Below<'_>, path: &str) -> ImageResult<Option<String>> {
    Ok(bytes(base, path)?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

fn owner_of(base: &Below<'_>, path: &str) -> Option<(u32, (u32, u32))> {
    let (_, found) = base.follow(&names(path))?;
    let metadata = &found.metadata;
    Some((metadata.permissions().mode() & 0o7777, (metadata.uid(), metadata.gid())))
}

fn is_directory(base: &Below<'_>, path: &str) -> bool {
    base.follow(&names(path)).is_some_and(|(_, found)| found.metadata.is_dir())
}

fn is_program(base: &Below<'_>, path: &str) -> bool {
    let program = |mode: u32| mode & 0o111 != 0;
    base.follow(&names(path)).is_some_and(|(_, found)| {
        found.metadata.is_file() && program(found.metadata.permissions().mode())
    })
}

/// Whether the base has the `sudo` that reads `Defaults`. The one in Rust, which newer systems put
/// behind that name, does not, and clears the environment whatever the settings are.
fn has_classic_sudo(base: &Below<'_>) -> bool {
    ["usr/bin/sudo", "bin/sudo", "usr/local/bin/sudo"].iter().any(|path| {
        base.follow(&names(path)).is_some_and(|(place, found)| {
            let in_rust = place.iter().any(|name| matches!(name.as_slice(), b"cargo" | b"sudo-rs"));
            let metadata = &found.metadata;
            let setuid = metadata.permissions().mode() & 0o4000 != 0 && metadata.uid() == 0;
            metadata.is_file() && setuid && !in_rust
        })
    })
}

/// What the default user may do, for a `sudo` that exists now or is installed later.
fn sudoers_drop_in() -> String {
    format!(
        "Defaults:{USER} !env_reset, !secure_path, !requiretty, always_set_home\n\
         {USER} ALL=(ALL:ALL) NOPASSWD: ALL\n"
    )
}

/// The base's `sudoers`, if it must be another one for the drop-in to be read.
fn sudoers(had: Option<String>) -> Option<String> {
    const INCLUDE: &str = "@includedir /etc/sudoers.d\n";
    let Some(mut text) = had else {
        return Some(format!("root\tALL=(ALL:ALL) ALL\n{INCLUDE}"));
    };
    let reads = text.lines().any(|line| {
        let mut words = line.split_whitespace();
        matches!(words.next(), Some("@includedir" | "#includedir"))
            && words.next() == Some("/etc/sudoers.d")
    });
    if reads {
        return None;
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(INCLUDE);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::{Customization, config, sudoers};
    use crate::model::ImageConfig;

    #[test]
    fn the_path_begins_with_ours_and_has_what_the_base_had() {
        let mut base = ImageConfig::default();
        let usual = "/vercel/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        assert_eq!(config(&base, &Customization::default()).env["PATH"], usual);
        for (name, value) in
            [("PATH", "/usr/bin::/opt/x"), ("HOME", "/root"), ("USER", "x"), ("GOPATH", "/go")]
        {
            base.env.insert(name.to_owned(), value.to_owned());
        }
        base.user = Some("node".to_owned());
        let customization =
            Customization { path: vec!["/opt/node".to_owned()], ..Customization::default() };
        let made = config(&base, &customization);
        assert!(
            made.env["PATH"].starts_with("/vercel/bin:/opt/node:/usr/bin:/opt/x:/usr/local/sbin")
        );
        assert_eq!(made.env.keys().collect::<Vec<_>>(), ["GOPATH", "LANG", "PATH"]);
        assert_eq!(
            (made.user.as_deref(), made.cwd.as_deref()),
            (Some("ubuntu"), Some("/vercel/sandbox"))
        );
    }

    #[test]
    fn the_environment_that_is_asked_for_wins() {
        let mut base = ImageConfig::default();
        base.env.insert("LC_ALL".to_owned(), "de_DE.UTF-8".to_owned());
        assert!(!config(&base, &Customization::default()).env.contains_key("LANG"));
        let env = [("PATH", "/only"), ("LC_ALL", "C")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        let made = config(&base, &Customization { env: env.into(), ..Customization::default() });
        assert_eq!((made.env["PATH"].as_str(), made.env["LC_ALL"].as_str()), ("/only", "C"));
    }

    #[test]
    fn sudoers_is_left_alone_where_it_reads_the_drop_ins() {
        for fine in [
            "@includedir /etc/sudoers.d\n",
            "x\n#includedir\t/etc/sudoers.d",
            " @includedir  /etc/sudoers.d",
        ] {
            assert_eq!(sudoers(Some(fine.to_owned())), None, "{fine}");
        }
        let kept = sudoers(Some("root ALL=(ALL) ALL".to_owned())).unwrap();
        assert_eq!(kept, "root ALL=(ALL) ALL\n@includedir /etc/sudoers.d\n");
        assert!(sudoers(None).unwrap().starts_with("root\t"));
    }
}
