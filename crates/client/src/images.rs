//! Calls about images. A pull, an import or a customization reports its progress ([`Fetching`])
//! until the image exists.

use hyper::Method;

use crate::body::{Lines, Upload};
use crate::query::Target;
use crate::transport::Call;
use crate::types::{CustomizeRequest, Image, ImageProgress, ImportRequest, Paged, PullRequest};
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

    /// Deletes an image. Sandboxes that stand on it keep what they need.
    pub async fn delete_image(&self, name: &str) -> Result<(), Error> {
        let target = Target::new(&["images", name]);
        self.transport.done(Call::new(Method::DELETE, target)).await
    }

    async fn fetching(&self, call: Call) -> Result<Fetching, Error> {
        Ok(Fetching { lines: Lines::of(self.transport.send(call).await?)? })
    }
}
