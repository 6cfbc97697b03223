//! Paths as Dockerfiles write them.

use super::ImageError;
use crate::store::image::error::ImageResult;
use crate::store::image::unpack::Names;

/// The names of a path that begins at the top, with or without a slash. `..` may not lead out.
pub(super) fn inside(path: &str) -> ImageResult<Names> {
    if path.contains('\0') {
        return Err(bad(format!("`{}` has a NUL byte", path.replace('\0', "␀"))));
    }
    let mut names = Names::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                if names.pop().is_none() {
                    return Err(bad(format!(
                        "`{path}` is outside: only what is in the build context, the stage or the image can be copied"
                    )));
                }
            }
            _ => names.push(part.as_bytes().to_vec()),
        }
    }
    Ok(names)
}

/// The names of a path in an image, where `..` ends at the top.
pub(super) fn in_image(path: &str) -> ImageResult<Names> {
    let mut names = Names::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(names.pop()),
            _ if part.contains('\0') => return Err(bad("a path has a NUL byte".to_owned())),
            _ => names.push(part.as_bytes().to_vec()),
        }
    }
    Ok(names)
}

/// A path, for people.
pub(super) fn shown(names: &[Vec<u8>]) -> String {
    let names: Vec<_> = names.iter().map(|name| String::from_utf8_lossy(name)).collect();
    format!("/{}", names.join("/"))
}

pub(super) fn bad(reason: String) -> ImageError {
    ImageError::BadCopy { reason }
}
