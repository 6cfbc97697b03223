//! What can go wrong with an image.

use std::io;
use std::path::{Path, PathBuf};

use super::super::StoreError;
use crate::model::Size;

/// What image operations answer.
pub type ImageResult<T> = Result<T, ImageError>;

/// Why an image could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// No image has this name.
    #[error("there is no image `{name}`; {}", known_as_text(known))]
    NotFound {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The text cannot name an image.
    #[error("`{name}` cannot name an image: {reason}")]
    BadName {
        /// The text.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An image cannot be customized as requested.
    #[error("the image cannot be customized: {what}: {reason}")]
    BadCustomization {
        /// The wish: the field and its value.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Files cannot be copied into an image as a Dockerfile says.
    #[error("{reason}")]
    BadCopy {
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The file is none of the kinds that can be imported.
    #[error("{what} cannot be imported: {reason}")]
    NotAnImage {
        /// The file or part of it.
        what: String,
        /// What was found instead.
        reason: String,
    },
    /// The archive breaks off or does not add up.
    #[error("{what} is damaged")]
    Damaged {
        /// The archive.
        what: String,
        /// The error of its reader.
        source: io::Error,
    },
    /// An entry tries to reach out of the image, or is of no known kind.
    #[error("the archive entry `{entry}` is refused: {reason}")]
    Refused {
        /// The entry's name.
        entry: String,
        /// Why.
        reason: &'static str,
    },
    /// What is unpacked takes more room than is allowed or left.
    #[error("unpacked, {what} takes more than the {limit} {why}")]
    TooLarge {
        /// The archive.
        what: String,
        /// How much there may be.
        limit: Size,
        /// Whether this is a setting or what the disk has left.
        why: &'static str,
    },
    /// The bytes are not those that were named.
    #[error("{what} has the digest {found}, but {expected} was asked for")]
    Digest {
        /// The blob.
        what: String,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The image is not made for this machine.
    #[error("{what} has nothing for {wanted}; it is made for {}", offered.join(", "))]
    Platform {
        /// The image.
        what: String,
        /// This machine.
        wanted: String,
        /// The machines it is made for.
        offered: Vec<String>,
    },
    /// The registry has no such image, or hides it from anonymous callers.
    #[error("{registry} has no image `{reference}`")]
    Unknown {
        /// The registry.
        registry: String,
        /// What was asked for.
        reference: String,
    },
    /// The registry wants to know who asks, or does not let them.
    #[error("{registry} does not let {who} pull `{reference}`")]
    Denied {
        /// The registry.
        registry: String,
        /// What was asked for.
        reference: String,
        /// As whom.
        who: String,
    },
    /// The registry cannot be reached, or breaks off again and again.
    #[error("{registry} cannot be reached: {reason}")]
    Unreachable {
        /// The registry.
        registry: String,
        /// What happened, in the words of the network.
        reason: String,
    },
    /// The registry answers, but not with what the protocol says.
    #[error("{registry} answers in an unexpected way: {reason}")]
    Registry {
        /// The registry.
        registry: String,
        /// Its error.
        reason: String,
    },
    /// The docker configuration or a credential helper cannot be used.
    #[error("no credentials for {registry}: {reason}")]
    Credentials {
        /// The registry.
        registry: String,
        /// What is wrong.
        reason: String,
    },
    /// The store could not keep it.
    #[error("the image could not be stored")]
    Store {
        /// The store's error.
        source: StoreError,
    },
    /// The system refused something on this host.
    #[error("could not {action} `{path}`", path = path.display())]
    Io {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// What it was being done to.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl ImageError {
    /// Whether freeing space would help.
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        match self {
            Self::Store { source } => source.is_no_room(),
            Self::Io { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            _ => false,
        }
    }

    /// Gives a system error the context it lacks.
    pub(super) fn io<E: Into<io::Error>>(
        action: &'static str,
        path: impl AsRef<Path>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::Io { action, path, source: source.into() }
    }
}

fn known_as_text(known: &[String]) -> String {
    if known.is_empty() {
        "none has been pulled or imported yet".to_owned()
    } else {
        format!("there are: {}", known.join(", "))
    }
}
