//! Calls about images. A pull, an import or a customization reports its progress ([`Fetching`])
//! until the image exists.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::Method;

use crate::body::{Lines, Upload};
use crate::query::Target;
use crate::transport::Call;
use crate::types::{
    BuildProgress, CustomizeRequest, Image, ImageProgress, ImportRequest, Paged, PrunedBuilds,
    PullRequest,
};
use crate::{Client, Error};

/// An image on its way, and how far it has come.
#[derive(Debug)]
pub struct Fetching {
    lines: Lines<ImageProgress>,
}

impl Fetching {
    /// Returns the next news; the last is [`ImageProgress::Done`].
    ///
    /// # Errors
    ///
    /// [`Error::Api`] if it did not work, [`Error::Broken`] if the connection ends before that is
    /// known.
    pub async fn next(&mut self) -> Result<Option<ImageProgress>, Error> {
        match self.lines.next().await? {
            Some(ImageProgress::Error { error }) => Err(Error::from_body(200, error)),
            other => Ok(other),
        }
    }

    /// Waits for the image.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    pub async fn finish(mut self) -> Result<Image, Error> {
        while let Some(news) = self.next().await? {
            if let ImageProgress::Done { image } = news {
                return Ok(image);
            }
        }
        Err(Error::protocol("the image neither came nor failed"))
    }
}

/// An image that is being built. The build ends when this is dropped.
#[derive(Debug)]
pub struct Building {
    lines: Lines<BuildProgress>,
}

impl Building {
    /// Returns the next news; the last is [`BuildProgress::Done`].
    ///
    /// # Errors
    ///
    /// [`Error::Api`] if it did not work, [`Error::Broken`] if the connection ends before that is
    /// known.
    pub async fn next(&mut self) -> Result<Option<BuildProgress>, Error> {
        match self.lines.next().await? {
            Some(BuildProgress::Error { error }) => Err(Error::from_body(200, error)),
            other => Ok(other),
        }
    }
}

/// An image to be built.
#[derive(Debug, Clone, Default)]
pub struct BuildOptions {
    /// What to call it.
    pub name: String,
    /// The Dockerfile's path in the context; `Dockerfile` if absent.
    pub dockerfile: Option<String>,
    /// Values of `ARG`s.
    pub args: Vec<(String, String)>,
    /// The stage to build; the last if absent.
    pub target: Option<String>,
    /// Secrets: ids and values, 8 KiB together.
    pub secrets: Vec<(String, String)>,
    /// Whether steps are made that are in the cache.
    pub no_cache: bool,
}

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Lists images.
    pub async fn images(&self) -> Result<Vec<Image>, Error> {
        let page: Paged<Image> = self.transport.json(Call::get(Target::new(&["images"]))).await?;
        Ok(page.items)
    }

    /// Gets an image.
    pub async fn image(&self, name: &str) -> Result<Image, Error> {
        self.transport.json(Call::get(Target::new(&["images", name]))).await
    }

    /// Fetches an image from a registry.
    pub async fn pull_image(&self, request: &PullRequest) -> Result<Fetching, Error> {
        self.fetching(Call::post(Target::new(&["images", "pull"])).json(request)?).await
    }

    /// Makes an image from an archive that is sent along.
    pub async fn import_image(&self, name: &str, archive: Upload) -> Result<Fetching, Error> {
        let target = Target::new(&["images", "import"]).with("name", name);
        self.fetching(Call::post(target).stream(archive)).await
    }

    /// Makes an image from an archive on the server's own disk.
    pub async fn import_image_there(&self, request: &ImportRequest) -> Result<Fetching, Error> {
        self.fetching(Call::post(Target::new(&["images", "import"])).json(request)?).await
    }

    /// Customizes an image: adds a default user, a home and `sudo`.
    pub async fn customize_image(&self, request: &CustomizeRequest) -> Result<Fetching, Error> {
        self.fetching(Call::post(Target::new(&["images", "customize"])).json(request)?).await
    }

    /// Builds an image from a Dockerfile. `context` is a tar archive with all files it may copy.
    pub async fn build_image(
        &self,
        options: &BuildOptions,
        context: Upload,
    ) -> Result<Building, Error> {
        let mut target = Target::new(&["images", "build"])
            .with("name", &options.name)
            .maybe("dockerfile", options.dockerfile.as_ref())
            .maybe("target", options.target.as_ref())
            .flag("no_cache", options.no_cache);
        for (name, value) in &options.args {
            target = target.with("arg", format!("{name}={value}"));
        }
        let mut call = Call::post(target).stream(context);
        for (id, value) in &options.secrets {
            let secret = format!("{id}={}", STANDARD.encode(value));
            call = call.header("sandkeep-build-secret", Some(&secret));
        }
        Ok(Building { lines: Lines::of(self.transport.send(call).await?)? })
    }

    /// Removes what builds of the project have kept for the next one. Images stay.
    pub async fn prune_builds(&self) -> Result<PrunedBuilds, Error> {
        self.transport.json(Call::post(Target::new(&["images", "prune"]))).await
    }

    /// Deletes an image. Sandboxes that stand on it keep what they need.
    pub async fn delete_image(&self, name: &str) -> Result<(), Error> {
        let target = Target::new(&["images", name]);
        self.transport.done(Call::new(Method::DELETE, target)).await
    }

    async fn fetching(&self, call: Call) -> Result<Fetching, Error> {
        Ok(Fetching { lines: Lines::of(self.transport.send(call).await?)? })
    }
}
