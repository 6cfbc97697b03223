//! Builds of images.

use tokio::sync::mpsc;

use crate::engine::{BuildEvent, BuildRequest, Engine, Result};
use crate::model::{Image, Name};

impl Engine {
    /// Builds an image from a Dockerfile. It ends early when nobody hears the events any more.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Dockerfile`](crate::engine::Error::Dockerfile) and other errors that name a line,
    /// [`Error::TooManyBuilds`](crate::engine::Error::TooManyBuilds), and what is wrong with the context.
    pub async fn build_image(
        &self,
        project: &Name,
        request: BuildRequest,
        events: mpsc::Sender<BuildEvent>,
    ) -> Result<Image> {
        self.parts.builds.build(project, request, events).await
    }

    /// Forgets what builds of a project have made. Answers with how many steps that were. Images stay.
    ///
    /// # Errors
    ///
    /// Returns [`Error`](crate::engine::Error) when a record cannot be removed.
    pub async fn prune_builds(&self, project: &Name) -> Result<usize> {
        self.parts.tenancy.require_project(project)?;
        self.parts.builds.forget(project).await
    }
}
