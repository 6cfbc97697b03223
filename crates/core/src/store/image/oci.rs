//! The documents of the OCI image format, as far as a sandbox needs them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::digest;
use super::error::{ImageError, ImageResult};
use crate::model::ImageConfig;

/// The most a document may take.
pub(super) const LARGEST: u64 = 16 << 20;
/// The most layers an image may have: overlayfs takes 500, and sandboxes need some of them.
const MOST_LAYERS: usize = 256;

/// What manifests are asked for and announced as.
pub(super) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, \
     application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, \
     application/vnd.docker.distribution.manifest.v2+json";

/// Points to another document or to a layer.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    #[serde(default)]
    pub(super) media_type: String,
    pub(super) digest: String,
    #[serde(default)]
    pub(super) size: u64,
    #[serde(default)]
    pub(super) platform: Option<Platform>,
    #[serde(default)]
    pub(super) annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// The name a layout gives it.
    pub(super) fn name(&self) -> Option<&str> {
        self.annotations.get("org.opencontainers.image.ref.name").map(String::as_str)
    }
}

/// What an image is made for.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    variant: Option<String>,
}

impl Platform {
    fn text(&self) -> String {
        let variant = self.variant.iter().map(|variant| format!("/{variant}"));
        format!("{}/{}{}", self.os, self.architecture, variant.collect::<String>())
    }

    fn fits(&self) -> bool {
        self.os == "linux" && self.architecture == architecture()
    }
}

/// A manifest, or a list of them for several platforms.
#[derive(Debug, Deserialize)]
pub(super) struct OciManifest {
    #[serde(default)]
    pub(super) config: Option<Descriptor>,
    #[serde(default)]
    pub(super) layers: Vec<Descriptor>,
    #[serde(default)]
    pub(super) manifests: Vec<Descriptor>,
}

/// One image of a manifest: its configuration and its layers, the first at the bottom.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) config: Descriptor,
    pub(super) layers: Vec<Descriptor>,
}

/// A manifest either is an image, or says where the one for this machine is.
#[derive(Debug)]
pub(super) enum ImageOrIndex {
    Image(Plan),
    Look(Descriptor),
}

impl OciManifest {
    /// Reads what this manifest leads to.
    pub(super) fn next(self, what: &str) -> ImageResult<ImageOrIndex> {
        let no_image = |reason: String| ImageError::NotAnImage { what: what.to_owned(), reason };
        let Some(config) = self.config else {
            if self.manifests.is_empty() {
                return Err(no_image("its manifest names neither layers nor images".to_owned()));
            }
            return choose(what, &self.manifests).cloned().map(ImageOrIndex::Look);
        };
        if self.layers.len() > MOST_LAYERS {
            return Err(no_image(format!("it has {} layers", self.layers.len())));
        }
        if let Some(layer) = self.layers.iter().find(|layer| !layer.media_type.contains("tar")) {
            return Err(no_image(format!(
                "one of its layers is of the kind `{}`",
                layer.media_type
            )));
        }
        Ok(ImageOrIndex::Image(Plan { config, layers: self.layers }))
    }
}

/// The manifest for this machine.
fn choose<'a>(what: &str, manifests: &'a [Descriptor]) -> ImageResult<&'a Descriptor> {
    let mut fitting: Vec<&Descriptor> = manifests
        .iter()
        .filter(|manifest| manifest.platform.as_ref().is_some_and(Platform::fits))
        .collect();
    // Of several variants, the plain one runs everywhere.
    fitting.sort_by_key(|manifest| {
        manifest.platform.as_ref().and_then(|platform| platform.variant.clone())
    });
    let only = match manifests {
        [one] if one.platform.is_none() => Some(one),
        _ => None,
    };
    fitting.first().copied().or(only).ok_or_else(|| {
        let offered: BTreeSet<String> =
            manifests.iter().filter_map(|m| m.platform.as_ref()).map(Platform::text).collect();
        ImageError::Platform {
            what: what.to_owned(),
            wanted: format!("linux/{}", architecture()),
            offered: offered.into_iter().collect(),
        }
    })
}

/// What an image says about itself.
#[derive(Debug, Deserialize)]
pub(super) struct OciConfig {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<Execution>,
    #[serde(default)]
    pub(super) rootfs: OciRootFs,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct OciRootFs {
    /// Digests of the uncompressed layers, the first at the bottom.
    #[serde(default)]
    pub(super) diff_ids: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Execution {
    user: Option<String>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    shell: Option<Vec<String>>,
    labels: Option<BTreeMap<String, String>>,
    exposed_ports: Option<BTreeMap<String, serde_json::Value>>,
}

impl OciConfig {
    /// Refuses images for other machines, and ones whose documents do not agree.
    pub(super) fn check(&self, what: &str, layers: usize) -> ImageResult<()> {
        let other = !matches!(self.os.as_str(), "" | "linux")
            || !(self.architecture.is_empty() || self.architecture == architecture());
        if other {
            return Err(ImageError::Platform {
                what: what.to_owned(),
                wanted: format!("linux/{}", architecture()),
                offered: vec![format!("{}/{}", self.os, self.architecture)],
            });
        }
        let wrong = self.rootfs.diff_ids.iter().any(|id| digest::digits(id).is_none());
        if wrong || self.rootfs.diff_ids.len() != layers {
            let reason = "its configuration does not name its layers".to_owned();
            return Err(ImageError::NotAnImage { what: what.to_owned(), reason });
        }
        Ok(())
    }

    /// What it says about the commands run in it.
    pub(super) fn settings(&self) -> ImageConfig {
        let said = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let Some(execution) = &self.config else { return ImageConfig::default() };
        let env = execution.env.iter().flatten().filter_map(|pair| {
            let (name, value) = pair.split_once('=')?;
            (!name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
        });
        ImageConfig {
            user: said(&execution.user),
            cwd: said(&execution.working_dir),
            env: env.collect(),
            entrypoint: execution.entrypoint.clone().unwrap_or_default(),
            cmd: execution.cmd.clone().unwrap_or_default(),
            shell: execution.shell.clone().unwrap_or_default(),
            labels: execution.labels.clone().unwrap_or_default(),
            exposed_ports: execution
                .exposed_ports
                .iter()
                .flatten()
                .map(|(port, _)| port.clone())
                .collect(),
        }
    }
}

/// Reads a document.
pub(super) fn read<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> ImageResult<T> {
    serde_json::from_slice(bytes).map_err(|error| ImageError::NotAnImage {
        what: what.to_owned(),
        reason: format!("its documents cannot be read: {error}"),
    })
}

/// This machine's architecture, in the words of the format.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::{ImageOrIndex, OciConfig, OciManifest, architecture, read};
    use crate::store::image::ImageError;

    #[test]
    fn the_manifest_for_this_machine_is_chosen() {
        let text = format!(
            r#"{{"manifests": [
                {{"digest": "a", "platform": {{"os": "windows", "architecture": "{0}"}}}},
                {{"digest": "b", "platform": {{"os": "linux", "architecture": "{0}", "variant": "v9"}}}},
                {{"digest": "c", "platform": {{"os": "linux", "architecture": "{0}"}}}},
                {{"digest": "d", "platform": {{"os": "unknown", "architecture": "unknown"}}}}
            ]}}"#,
            architecture()
        );
        let list: OciManifest = read("it", text.as_bytes()).expect("a list");
        match list.next("it").expect("one fits") {
            ImageOrIndex::Look(chosen) => assert_eq!(chosen.digest, "c"),
            ImageOrIndex::Image(plan) => panic!("{plan:?}"),
        }
    }

    #[test]
    fn an_image_for_another_machine_says_what_it_is_for() {
        let config: OciConfig =
            read("it", br#"{"os": "linux", "architecture": "vax"}"#).expect("a config");
        match config.check("it", 0) {
            Err(ImageError::Platform { offered, .. }) => assert_eq!(offered, ["linux/vax"]),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn user_directory_and_environment_are_read() {
        let text =
            br#"{"config": {"User": "", "WorkingDir": "/app", "Env": ["A=b=c", "bad", "=x"]}}"#;
        let settings = read::<OciConfig>("it", text).expect("a config").settings();
        assert_eq!((settings.user, settings.cwd.as_deref()), (None, Some("/app")));
        assert_eq!(settings.env.into_iter().collect::<Vec<_>>(), [("A".into(), "b=c".into())]);
    }
}
