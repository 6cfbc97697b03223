//! The image of a new sandbox: what a runtime, an image or nothing at all means.
//!
//! | asked for | is |
//! |---|---|
//! | nothing, or `vercel/sandbox/universal` | the *default machine*: the image `host`, or what `default_image` names, customized |
//! | a runtime | what `[vercel.runtimes]` says; else the image `vercel/<runtime>`; else the default machine, if it has that runtime |
//! | an image | what `[vercel.images]` says; else the image of that name, with or without `vcr.vercel.com/` |
//!
//! The default machine and runtimes are *customized* (`docs/formats/image.md`): they have the user, the home and the
//! `sudo` these clients expect. It is done on first use, and again when the base has changed; an image that was
//! customized by hand is taken as it is. Images that are asked for by name keep their own user and directory.
//!
//! Nothing is pulled here: an image that is not on this server is an answer that lists those that are.

use std::collections::BTreeSet;

use axum::http::StatusCode;
use sandkeep_core::engine;
use sandkeep_core::model::Image;
use sandkeep_core::store::image::{Customization, HOST, ImageError, Images};
use tokio_util::task::TaskTracker;

use crate::api::App;
use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::{VercelSettings, done};

/// What the default machine is called, here and by them.
const UNIVERSAL: &str = "vercel/sandbox/universal";
/// Images with a runtime are called this and the runtime.
const RUNTIMES: &str = "vercel/";
/// Images that were customized for a runtime because somebody asked for it.
const CUSTOMIZED: &str = "vercel/auto/";
/// Their registry, which is often written out.
const REGISTRY: &str = "vcr.vercel.com/";
/// The runtime that is returned for an image without one that they have a name for.
const CUSTOM: &str = "custom";

/// What a sandbox is made from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BaseImage {
    /// The engine's name of the image.
    pub(crate) image: String,
    /// What to call it: clients of 2.x insist on a runtime.
    pub(crate) runtime: String,
    /// The image that was asked for, with its digest.
    pub(crate) reference: Option<String>,
}

/// Finds the image of a new sandbox.
///
/// # Errors
///
/// 400 for a runtime, 404 for an image that is not here; both list what is.
pub(crate) async fn choose(
    app: &App,
    runtime: Option<&str>,
    image: Option<&str>,
) -> Result<BaseImage, VercelError> {
    let machines =
        Machines { tasks: &app.tasks, images: app.engine.images(), settings: &app.vercel };
    match (runtime, image) {
        (Some(_), Some(_)) => {
            Err(VercelError::bad("`runtime` should NOT be given together with `image`."))
        }
        (Some(runtime), None) => machines.with_runtime(runtime).await,
        (None, Some(image)) => machines.named(image).await,
        (None, None) => machines.usual().await,
    }
}

struct Machines<'a> {
    tasks: &'a TaskTracker,
    images: &'a Images,
    settings: &'a VercelSettings,
}

impl Machines<'_> {
    /// The default machine.
    async fn usual(&self) -> Result<BaseImage, VercelError> {
        let image = self.default_machine().await?;
        let runtime = self.known_as(&image, "universal").await;
        // Whatever it is made of, this is what they call it.
        let reference = Some(format!("{UNIVERSAL}@{}", image.digest));
        Ok(BaseImage { image: image.name, runtime, reference })
    }

    async fn default_machine(&self) -> Result<Image, VercelError> {
        let base = self.settings.default_image.as_deref().unwrap_or(HOST);
        self.customized(base, UNIVERSAL, "the default machine").await
    }

    async fn with_runtime(&self, runtime: &str) -> Result<BaseImage, VercelError> {
        let image = match self.stands_for(runtime).await? {
            Some(base) => {
                let what = format!("the runtime `{runtime}`");
                self.customized(&base, &format!("{CUSTOMIZED}{runtime}"), &what).await?
            }
            None => {
                let machine = self.default_machine().await?;
                let has = self.runtimes_of(&machine).await;
                if !has.contains(runtime) {
                    return Err(self.no_runtime(runtime, has).await);
                }
                machine
            }
        };
        Ok(BaseImage { image: image.name, runtime: runtime.to_owned(), reference: None })
    }

    /// The image that a runtime stands for, by the settings or by its name.
    async fn stands_for(&self, runtime: &str) -> Result<Option<String>, VercelError> {
        if let Some(mapped) = self.settings.runtimes.get(runtime) {
            return Ok(Some(mapped.clone()));
        }
        if !is_word(runtime) {
            return Ok(None);
        }
        let name = format!("{RUNTIMES}{runtime}");
        Ok(self.find(&name).await?.map(|image| image.name))
    }

    async fn named(&self, asked: &str) -> Result<BaseImage, VercelError> {
        let short = asked.strip_prefix(REGISTRY).unwrap_or(asked);
        let (name, digest) = match short.split_once('@') {
            Some((name, digest)) => (name, Some(digest)),
            None => (short, None),
        };
        let untagged = name.strip_suffix(":latest").unwrap_or(name);
        let mapped = [asked, short, name, untagged]
            .into_iter()
            .find_map(|name| self.settings.images.get(name).cloned());
        let found = match mapped {
            Some(mapped) => match self.find(&mapped).await? {
                Some(image) => Some(image),
                None => return Err(missing(&format!("the image `{asked}`"), &mapped)),
            },
            None if untagged == UNIVERSAL => Some(self.default_machine().await?),
            None => self.first_of(&[asked, short, name, untagged]).await?,
        };
        let Some(image) = found else { return Err(self.no_image(asked).await) };
        if digest.is_some_and(|digest| digest != image.digest) {
            let message =
                format!("Image `{asked}` not found: `{name}` is {} on this server.", image.digest);
            return Err(VercelError::new(StatusCode::NOT_FOUND, "not_found", message));
        }
        let runtime = self.known_as(&image, CUSTOM).await;
        let repository = match untagged.rsplit_once(':') {
            // A colon before the last slash belongs to a registry's port.
            Some((repository, tag)) if !tag.contains('/') => repository,
            _ => untagged,
        };
        let reference = format!("{repository}@{}", image.digest);
        Ok(BaseImage { image: image.name, runtime, reference: Some(reference) })
    }

    async fn first_of(&self, names: &[&str]) -> Result<Option<Image>, VercelError> {
        for name in names {
            if let Some(image) = self.find(name).await? {
                return Ok(Some(image));
            }
        }
        Ok(None)
    }

    /// The image of that name, if it is here.
    async fn find(&self, name: &str) -> Result<Option<Image>, VercelError> {
        match self.images.get(name).await {
            Ok(image) => Ok(Some(image)),
            Err(ImageError::NotFound { .. }) => Ok(None),
            Err(error) => Err(engine::Error::from(error).into()),
        }
    }

    /// The base itself if it is customized already; else the image `name`, customized from it.
    async fn customized(&self, base: &str, name: &str, what: &str) -> Result<Image, VercelError> {
        if base != HOST {
            match self.find(base).await? {
                Some(image) if image.customized.is_some() => return Ok(image),
                Some(_) => {}
                None => return Err(missing(what, base)),
            }
        }
        let (images, base, name) = (self.images.clone(), base.to_owned(), name.to_owned());
        // To its end, even if the caller leaves: the next one finds it done.
        done(self.tasks, async move {
            Ok(images.customized(&base, &name, &Customization::default()).await?)
        })
        .await
    }

    async fn runtimes_of(&self, image: &Image) -> BTreeSet<String> {
        self.images.runtimes(image).await.unwrap_or_else(|error| {
            tracing::warn!(image = image.name, %error, "cannot list runtimes");
            BTreeSet::new()
        })
    }

    /// The runtime that clients see for an image: the newest `node` it has, else the newest Python.
    async fn known_as(&self, image: &Image, otherwise: &str) -> String {
        let has = self.runtimes_of(image).await;
        newest(&has, "node")
            .or_else(|| newest(&has, "python3."))
            .unwrap_or_else(|| otherwise.to_owned())
    }

    async fn no_runtime(&self, runtime: &str, has: BTreeSet<String>) -> VercelError {
        let mut there = has;
        there.extend(self.settings.runtimes.keys().cloned());
        let names = self.names().await;
        let named = names.iter().filter_map(|name| name.strip_prefix(RUNTIMES));
        there.extend(named.filter(|name| is_word(name)).map(str::to_owned));
        let runtime: String = runtime.chars().take(60).collect();
        VercelError::bad(format!(
            "`runtime` `{runtime}` is not on this server; it has {}. An operator adds one with \
             `keep image customize {RUNTIMES}RUNTIME --from IMAGE`, or maps one under [vercel.runtimes].",
            listed(&there)
        ))
    }

    async fn no_image(&self, asked: &str) -> VercelError {
        let mut there: BTreeSet<String> = self.settings.images.keys().cloned().collect();
        there.insert(UNIVERSAL.to_owned());
        there.extend(self.names().await.into_iter().filter(|name| !name.starts_with(CUSTOMIZED)));
        let asked: String = asked.chars().take(120).collect();
        let message = format!(
            "Image `{asked}` not found; this server has {}. An operator adds one with \
             `keep image pull` or `keep image import`, or maps one under [vercel.images].",
            listed(&there)
        );
        VercelError::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    async fn names(&self) -> Vec<String> {
        match self.images.list().await {
            Ok(images) => images.into_iter().map(|image| image.name).collect(),
            Err(error) => {
                tracing::warn!(%error, "cannot list images");
                Vec::new()
            }
        }
    }
}

/// The settings lead to an image that is not here, which is the operator's to mend.
fn missing(what: &str, image: &str) -> VercelError {
    let message = format!(
        "This server is set up to use the image `{image}` for {what}, and does not have it. An operator \
         brings it with `keep image pull` or `keep image import`."
    );
    VercelError::new(StatusCode::NOT_FOUND, "not_found", message)
}

/// Whether a runtime could be the last part of an image's name.
fn is_word(text: &str) -> bool {
    let fine =
        |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_');
    !text.is_empty() && text.len() <= 60 && text.bytes().all(fine)
}

fn newest(runtimes: &BTreeSet<String>, family: &str) -> Option<String> {
    let number = |runtime: &String| runtime.strip_prefix(family)?.parse::<u32>().ok();
    runtimes
        .iter()
        .filter(|runtime| number(runtime).is_some())
        .max_by_key(|one| number(one))
        .cloned()
}

fn listed(names: &BTreeSet<String>) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use axum::http::StatusCode;
    use axum::response::IntoResponse as _;
    use sandkeep_core::store::Store;
    use sandkeep_core::store::image::{
        AddedDirectory, Customization, ImageSettings, Images, Reporter,
    };
    use tempfile::TempDir;
    use tokio_util::task::TaskTracker;

    use super::{BaseImage, Machines, UNIVERSAL};
    use crate::compat::vercel::VercelSettings;
    use crate::compat::vercel::protocol::error::VercelError;

    struct Bench {
        images: Images,
        settings: VercelSettings,
        tasks: TaskTracker,
        dir: TempDir,
    }

    impl Bench {
        /// A server whose default image is `tiny`, which has a `node` 24 and nothing else.
        async fn new() -> Self {
            let dir = TempDir::with_prefix("keep-machine-").unwrap();
            let store = Store::open(&dir.path().join("data")).unwrap();
            let images = Images::new(store, ImageSettings::default());
            let settings = VercelSettings {
                default_image: Some("tiny".to_owned()),
                ..VercelSettings::default()
            };
            let bench = Self { images, settings, tasks: TaskTracker::new(), dir };
            bench.import("tiny", Some("node-v24.1.0-headers")).await;
            bench
        }

        async fn import(&self, name: &str, node: Option<&str>) {
            let root = self.dir.path().join("root");
            fs::create_dir_all(root.join("usr/bin")).unwrap();
            fs::write(root.join("usr/bin/sh"), "x").unwrap();
            if let Some(node) = node {
                fs::write(root.join("usr/bin/node"), node).unwrap();
            }
            let archive = self.dir.path().join("root.tar");
            let mut tar = Command::new("tar");
            tar.arg("-cf").arg(&archive).arg("-C").arg(&root).arg(".");
            assert!(tar.status().unwrap().success());
            self.images.import(name, &archive, &Reporter::silent()).await.unwrap();
            fs::remove_dir_all(root).unwrap();
        }

        fn machines(&self) -> Machines<'_> {
            Machines { tasks: &self.tasks, images: &self.images, settings: &self.settings }
        }
    }

    fn ground(image: &str, runtime: &str) -> BaseImage {
        BaseImage { image: image.to_owned(), runtime: runtime.to_owned(), reference: None }
    }

    /// What a create that names nothing is made from.
    async fn usual(bench: &Bench) -> (String, String) {
        let BaseImage { image, runtime, reference } = bench.machines().usual().await.unwrap();
        let digest = bench.images.get(&image).await.unwrap().digest;
        assert_eq!(reference, Some(format!("{UNIVERSAL}@{digest}")), "it is told");
        (image, runtime)
    }

    fn refused(answer: Result<BaseImage, VercelError>) -> (StatusCode, String) {
        let error = answer.unwrap_err();
        let message = error.object()["message"].as_str().unwrap().to_owned();
        (error.into_response().status(), message)
    }

    #[tokio::test]
    async fn nothing_asked_for_is_the_customized_default() {
        let bench = Bench::new().await;
        assert_eq!(usual(&bench).await, (UNIVERSAL.to_owned(), "node24".to_owned()));
        let image = bench.images.get(UNIVERSAL).await.unwrap();
        assert_eq!(image.config.user.as_deref(), Some("ubuntu"));
        assert_eq!(usual(&bench).await, (UNIVERSAL.to_owned(), "node24".to_owned()));
        assert_eq!(bench.images.get(UNIVERSAL).await.unwrap(), image, "made once");
        bench.import("tiny", None).await;
        assert_eq!(usual(&bench).await, (UNIVERSAL.to_owned(), "universal".to_owned()));
        assert_ne!(bench.images.get(UNIVERSAL).await.unwrap().layers, image.layers, "made anew");
    }

    #[tokio::test]
    async fn a_default_that_was_customized_by_hand_is_taken_as_it_is() {
        let mut bench = Bench::new().await;
        bench.images.customize("tiny", "mine", &Customization::default()).await.unwrap();
        bench.settings.default_image = Some("mine".to_owned());
        assert_eq!(usual(&bench).await, ("mine".to_owned(), "node24".to_owned()));
        bench.settings.default_image = Some("nowhere".to_owned());
        let (status, message) = refused(bench.machines().usual().await);
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(message.contains("`nowhere`"), "{message}");
    }

    #[tokio::test]
    async fn a_runtime_is_mapped_or_an_image_or_what_the_default_has() {
        let mut bench = Bench::new().await;
        let (status, message) = refused(bench.machines().with_runtime("python3.13").await);
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(message.contains("`runtime` `python3.13`") && message.contains("it has `node24`"));
        assert!(message.contains("keep image customize"), "{message}");
        assert_eq!(
            bench.machines().with_runtime("node24").await.unwrap(),
            ground(UNIVERSAL, "node24")
        );
        // An image of that name is used from now on, and customized if it is not.
        bench.import("vercel/python3.13", None).await;
        let auto = ground("vercel/auto/python3.13", "python3.13");
        assert_eq!(bench.machines().with_runtime("python3.13").await.unwrap(), auto);
        let add = AddedDirectory { from: bench.dir.path().join("data/blobs"), to: "/opt/x".into() };
        fs::create_dir_all(&add.from).unwrap();
        let customization = Customization { add: vec![add], ..Customization::default() };
        bench.images.customize("tiny", "vercel/node24", &customization).await.unwrap();
        assert_eq!(
            bench.machines().with_runtime("node24").await.unwrap(),
            ground("vercel/node24", "node24")
        );
        // The settings have the last word.
        bench.import("other", None).await;
        bench.settings.runtimes.insert("node24".to_owned(), "other".to_owned());
        assert_eq!(
            bench.machines().with_runtime("node24").await.unwrap(),
            ground("vercel/auto/node24", "node24")
        );
        let customized = bench.images.get("vercel/auto/node24").await.unwrap().customized.unwrap();
        assert_eq!(customized.base, "other");
        bench.settings.runtimes.insert("node22".to_owned(), "gone".to_owned());
        assert_eq!(refused(bench.machines().with_runtime("node22").await).0, StatusCode::NOT_FOUND);
        for odd in ["", "../x", "NODE24", "auto/node24", "a b", &"x".repeat(300), "héé"] {
            let (status, message) = refused(bench.machines().with_runtime(odd).await);
            assert_eq!(status, StatusCode::BAD_REQUEST, "{odd}: {message}");
            assert!(message.contains("`node22`, `node24`, `python3.13`"), "{message}");
        }
    }

    #[tokio::test]
    async fn an_image_is_found_however_it_is_written() {
        let mut bench = Bench::new().await;
        bench.import("acme/app:v1", None).await;
        let digest = bench.images.get("acme/app:v1").await.unwrap().digest;
        let pinned = format!("acme/app:v1@{digest}");
        for asked in ["acme/app:v1", "vcr.vercel.com/acme/app:v1", &pinned] {
            let ground = bench.machines().named(asked).await.unwrap();
            assert_eq!(ground.image, "acme/app:v1", "{asked}");
            assert_eq!(ground.reference, Some(format!("acme/app@{digest}")));
            assert_eq!(ground.runtime, "custom");
        }
        assert_eq!(bench.images.get("acme/app:v1").await.unwrap().config.user, None);
        for universal in [
            UNIVERSAL,
            "vercel/sandbox/universal:latest",
            "vcr.vercel.com/vercel/sandbox/universal",
        ] {
            assert_eq!(bench.machines().named(universal).await.unwrap().image, UNIVERSAL);
        }
        bench.settings.images.insert("team/project/repo".to_owned(), "acme/app:v1".to_owned());
        for mapped in
            ["team/project/repo", "team/project/repo:latest", "vcr.vercel.com/team/project/repo"]
        {
            let ground = bench.machines().named(mapped).await.unwrap();
            assert_eq!(ground.reference, Some(format!("team/project/repo@{digest}")), "{mapped}");
        }
        let other = format!("acme/app:v1@sha256:{}", "0".repeat(64));
        for gone in ["nope", "", "a b", "../../etc", "acme/app:v2", &other, &"x".repeat(9999)] {
            let (status, message) = refused(bench.machines().named(gone).await);
            assert_eq!(status, StatusCode::NOT_FOUND, "{gone}: {message}");
            assert!(message.len() < 1000);
        }
        let (_, message) = refused(bench.machines().named("nope").await);
        assert!(message.contains("`acme/app:v1`") && message.contains("`team/project/repo`"));
        assert!(!message.contains("vercel/auto/"));
    }
}
